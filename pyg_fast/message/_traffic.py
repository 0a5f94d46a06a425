"""What the nodes of a graph read and write, on fake tensors."""

from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode

from ._capture import storages_of, storages_written
from ._ir import Refused


def fake_of(x: object) -> Any:
    """The fake tensor or the symbolic number of a node."""
    return x.meta.get('example_value', x.meta.get('val')) if isinstance(x, Node) else x


class Traffic(torch.fx.Interpreter):
    """Runs a graph on fake tensors, and records for each node the storages of its result and those
    that it writes into: a write is no data dependency in this graph."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.result: defaultdict[Node, set[int]] = defaultdict(set)
        self.into: defaultdict[Node, set[int]] = defaultdict(set)

    def run_node(self, node: Node) -> object:
        writes = _Writes()
        if node.op == 'get_attr' or isinstance(node.target, HigherOrderOperator):
            out = fake_of(node)
        else:
            with writes:
                out = super().run_node(node)
        self.result[node] = storages_of(out)
        self.into[node] = writes.storages
        return out


class _Writes(TorchDispatchMode):
    """Records the storages that operators write into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.storages |= storages_written(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def record_traffic(module: GraphModule) -> Traffic:
    """What the nodes of a graph read and write.

    Raises:
        Refused: If the graph does not run on fake tensors.
    """
    traffic = Traffic(module)
    inputs = [fake_of(node) for node in module.graph.nodes if node.op == 'placeholder']
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None)
    if mode is None:
        raise Refused('a graph without tensors')
    if any('increment_nesting' in str(node.target) for node in module.graph.nodes):
        raise Refused('a graph with function transforms')
    try:
        with ExitStack() as stack:
            # The graph may leave another mode than it found.
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            if mode.shape_env is not None:  # Sizes that depend on data get other symbols here.
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            stack.enter_context(mode)
            stack.enter_context(enable_python_dispatcher())
            traffic.run(*inputs)
    except Exception as error:
        raise Refused(f'a graph that does not run on fake tensors: {error}') from error
    return traffic
