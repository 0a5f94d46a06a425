"""Captures the message that a user wrote, with guards on everything that it reads."""

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from ._ir import Program, Refused
from ._markers import NAMESPACE
from ._parse import EDGES, NODES, Parser
from ._quiet import quiet
from ._trace import Like, run_on_fakes, trace

# Markers in a captured graph: they never run.
_library = torch.library.Library(NAMESPACE, 'FRAGMENT')
_library.define('lift(Tensor x, Tensor edges, str role, str name) -> Tensor')
_library.define('dropout(Tensor x, float p) -> Tensor')
_library.define('end(Tensor x) -> Tensor')
_library.define('end_of_sum(Tensor x) -> Tensor')
_library.define('index(Tensor edges) -> Tensor')
_library.impl('lift', lambda x, e, role, name: x.new_empty((e.size(0), *x.shape[1:])), 'Meta')
# As PyG's gathered inputs they need a gradient, and are no leaves.
torch.library.register_autograd(
    'pyg_fast_message::lift', lambda ctx, grad: (grad.sum(0, True), None, None, None), lib=_library
)
_library.impl('dropout', lambda x, p: torch.empty_like(x), 'Meta')
_library.impl('end', lambda x: torch.empty_like(x), 'Meta')
_library.impl('end_of_sum', lambda x: torch.empty_like(x), 'Meta')
_library.impl('index', lambda e: e.new_empty(e.size(0), dtype=torch.int64), 'Meta')
_ops = torch.ops.pyg_fast_message


@dataclass(frozen=True)
class Captured:
    """A message as a program. Loads of nodes and edges count by the name of the input, those of
    parameters by their place among the arguments of the captured function. Those of equal text are
    equal."""

    program: Program = field(compare=False)
    output: int = field(compare=False)
    num_dropouts: int = field(compare=False)
    autocast: bool = field(compare=False)
    key: str  # the canonical text
    on_cuda: bool
    numbers: tuple[int, ...] = field(default=(), compare=False)  # parameters that are Python floats
    plans: dict[Any, Any] = field(default_factory=dict, compare=False)  # by aggregations


@dataclass
class Request:
    """What the backend gets beside the graph of a message.

    Args:
        check: May refuse the message, before Dynamo repeats its side effects. Takes also the code
            objects that were traced, if Dynamo tells them.
        num_writes: How many attributes the message sets, exactly; they become None.
    """

    check: Callable[[Captured, Sequence[CodeType] | None], None]
    num_writes: int = 0


class _Requests(threading.local):
    current: Request | None = None


_requests = _Requests()


@contextmanager
def requested(request: Request) -> Iterator[None]:
    """What this thread captures meanwhile is for a request. Dynamo keeps the backend with all that
    it holds: there is one for all messages, which holds no layer."""
    before, _requests.current = _requests.current, request
    try:
        with quiet():
            yield
    finally:
        _requests.current = before


def backend(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """What Dynamo calls for a new message. The captured function returns the message and its
    arguments: what ran inside of it would run under Dynamo, slowly."""
    request = _requests.current
    if request is None:
        raise Refused('captured again by others')
    (output,) = (node for node in graph.graph.nodes if node.op == 'output')
    outs: Any = output.args[0]
    if len(outs) != 1 + request.num_writes:
        raise Refused('message sets an attribute or a global')
    (message,) = (node for node in outs if 'pyg_fast_message.end' in str(node.target))
    place, count = outs.index(message), len(outs)
    output.args = ((message,),)
    captured = _program(graph)
    request.check(captured, _traced_code())

    def returned(*args: Any) -> tuple[Any, ...]:
        return tuple((captured, args) if k == place else None for k in range(count))

    return returned


def _traced_code() -> Sequence[CodeType] | None:
    found = getattr(torch._guards.TracingContext, 'get_traced_code', None)
    return None if found is None else found()


def _program(graph: GraphModule) -> Captured:
    mark_dropouts(graph)
    for node in reversed(list(graph.graph.nodes)):
        # Facts about symbolic sizes, which Dynamo states.
        compares = node.target in _COMPARED and not node.users
        if compares or node.target is torch.ops.aten._assert_scalar.default:
            graph.graph.erase_node(node)
        elif node.target in _ROUNDS and node.users and _is_of_size(node):
            raise Refused('the number of edges or nodes is used as a number')
    check_autograd(graph)
    captured = [_read(graph, *counts) for counts in zip(EDGES, NODES, strict=True)]
    if captured[0].key != captured[1].key:
        raise Refused('the number of edges or nodes is used as a number')
    return captured[0]


_COMPARED = (operator.ge, operator.gt, operator.le, operator.lt, operator.eq, operator.ne)
# They may be the same for both numbers of edges or nodes with which a message is traced.
_ROUNDS = (operator.mod, torch.sym_min, torch.sym_max)


def _is_of_size(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get('example_value'), (torch.SymInt, torch.SymFloat))


def check_autograd(graph: GraphModule) -> None:
    """Refuses what changes gradients: the backward pass is derived from the values alone."""
    for node in graph.graph.nodes:
        target = node.target
        name = target if isinstance(target, str) else getattr(target, '__name__', str(target))
        detaches = 'detach' in (name, _method(node))
        if detaches and all(_is_maximum(user, node) for user in node.users):
            continue  # Of a softmax; the parser takes this maximum in nothing else.
        if isinstance(target, HigherOrderOperator) or any(part in name for part in _AUTOGRAD):
            raise Refused(f'{name} in message')


def _is_maximum(user: torch.fx.Node, node: torch.fx.Node) -> bool:
    """Whether a use of a tensor is a maximum of its values over edges, or reads its shape alone."""
    method = _method(user)
    if method == 'scatter_reduce_':
        places = [k for k, arg in enumerate(user.args) if arg is node]
        reduce = user.kwargs.get('reduce', user.args[-1])
        return reduce == 'amax' and places == [3]
    if method == 'expand_as':
        return user.args[0] is not node
    return method in ('new_zeros', 'size', 'sym_size', 'dim')


def _method(node: torch.fx.Node) -> str:
    """The method that a node calls; an exported graph has operators of torch in their place."""
    if node.op == 'call_method':
        return str(node.target)
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ''


_AUTOGRAD = (
    'detach', '_get_data_attr', 'grad_enabled', 'inference_mode', 'requires_grad', 'register_hook',
    'retain_grad', 'checkpoint', 'saved_tensors_hooks',
)  # fmt: skip


class _Writes(TorchDispatchMode):
    """Refuses a message that writes into a parameter or an input of the edges: it is the user's
    own tensor, while PyG has gathered the inputs of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, Tensor] = {}  # by storage; kept alive

    def watch(self, *inputs: Any) -> None:
        self.inputs |= {storage: x for x in inputs for storage in storages(x)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inputs.keys().isdisjoint(written(func, args, kwargs or {})):
            raise Refused('message writes into its input')
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.pyg_fast_message.lift.default and args[2] == 'edge':
            self.watch(out)
        return out


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> set[int]:
    """The storages that a call of an operator writes into."""
    arguments = func._schema.arguments
    given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return set().union(*(
        storages(given.get(each.name)) for each in arguments
        if each.alias_info is not None and each.alias_info.is_write
    ))  # fmt: skip


def storages(value: Any) -> set[int]:
    """The storages of a tensor, or of several."""
    if isinstance(value, Tensor):
        return {value.untyped_storage()._cdata}
    if isinstance(value, (list, tuple)):
        return set().union(*map(storages, value))
    return set()


class Dropout(NamedTuple):
    """A call of dropout."""

    x: Any
    p: Any
    is_on: bool
    inplace: bool


def dropout_of(node: torch.fx.Node) -> Dropout | None:
    """The dropout that a node calls, if it does."""
    functions = F.dropout, torch.dropout, torch.ops.aten.dropout.default
    if node.op != 'call_function' or node.target not in functions:
        return None
    names = ('input', 'p', 'training' if node.target is F.dropout else 'train', 'inplace')
    given: dict[str, Any] = {'p': 0.5, names[2]: True, 'inplace': False}
    given.update(zip(names, node.args, strict=False))
    given.update(node.kwargs)
    is_on = given[names[2]] and given['p'] != 0
    return Dropout(given['input'], given['p'], is_on, given['inplace'])


def mark_dropouts(graph: GraphModule) -> None:
    marker = torch.ops.pyg_fast_message.dropout.default
    for node in list(graph.graph.nodes):
        found = dropout_of(node)
        if found is None:
            continue
        if found.inplace:
            raise Refused('dropout in place')
        if isinstance(found.p, torch.fx.Node):
            raise Refused('dropout by a number that changes')
        if not found.is_on:
            node.replace_all_uses_with(found.x)
        else:
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(marker, (found.x, found.p))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()


class _Interpreter(torch.fx.Interpreter):
    """Runs a graph in which some floats are arguments: tensors of one number. An operation on
    tensors takes such a number in the type in which it computes, as PyTorch does.

    The maximum of the index, from which a softmax takes the number of nodes if it is not given,
    becomes the last node: nodes without edges after it change no message."""

    def __init__(self, graph: GraphModule, num_nodes: int) -> None:
        super().__init__(graph)
        self.num_nodes = num_nodes

    def run_node(self, node: torch.fx.Node) -> Any:
        if _is_last_node(node):
            _check_is_size(node)
            return self.num_nodes - 1
        if _is_maximum_of_index(node) and all(map(_is_last_node, node.users)):
            return None
        if _is_number(node) and node.target == 'item':
            return self.env[node.args[0]]  # type: ignore[index]
        out = super().run_node(node)
        expected = node.meta.get('example_value')
        if any(map(_is_number, node.all_input_nodes)) and not _is_number(node):
            if not isinstance(out, Tensor) or not isinstance(expected, Tensor):
                raise Refused(f'{node.target} of a number that changes')
            if out.dtype == torch.float32 and expected.dtype in (torch.half, torch.bfloat16):
                out = out.to(expected.dtype)
            if out.dtype != expected.dtype or out.dim() != expected.dim():
                raise Refused(f'{node.target} of a number that changes')
        return out

    def fetch_args_kwargs_from_env(self, node: torch.fx.Node) -> tuple[tuple, dict[str, Any]]:
        expected, known = node.meta.get('example_value'), self.env
        if not isinstance(expected, Tensor) or not any(map(_is_number, node.all_input_nodes)):
            return super().fetch_args_kwargs_from_env(node)
        dtype = torch.float64 if expected.dtype == torch.float64 else torch.float32
        own = {
            each: known[each].to(dtype) if _is_number(each) else known[each]
            for each in node.all_input_nodes
        }
        return (
            torch.fx.node.map_arg(node.args, own.__getitem__),
            torch.fx.node.map_arg(node.kwargs, own.__getitem__),
        )


def _is_last_node(node: torch.fx.Node) -> bool:
    """Whether it is `index.max().item()`, as :func:`torch_geometric.utils.softmax` asks for."""
    most = node.args[0] if node.target == 'item' else None
    return isinstance(most, torch.fx.Node) and _is_maximum_of_index(most)


def _is_maximum_of_index(node: torch.fx.Node) -> bool:
    if node.target not in ('max', torch.max) or len(node.args) != 1 or node.kwargs:
        return False
    (index,) = node.args
    return isinstance(index, torch.fx.Node) and index.target in (_ops.index, _ops.index.default)


def _check_is_size(node: torch.fx.Node) -> None:
    """Refuses a number of nodes of which not only a size is made."""
    for user in node.users:
        if user.target in (operator.add, torch.sym_sum):
            _check_is_size(user)
        elif user.target not in (torch.Size, 'new_zeros'):
            raise Refused('the number of edges or nodes is used as a number')


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get('example_value'), torch.SymFloat)


def _read(graph: GraphModule, num_edges: int, num_nodes: int) -> Captured:
    """The program, traced for numbers of edges and destinations of our own choice."""
    placeholders = [node for node in graph.graph.nodes if node.op == 'placeholder']
    examples = [node.meta['example_value'] for node in placeholders]
    # Symbolic are the size of `edges`, and the number of destinations. `entry` fixes all others.
    edges = {str(n) for x in examples if isinstance(x, Tensor) for n in x.shape}

    def size(n: Any) -> Any:
        if not isinstance(n, torch.SymInt):
            return n
        return num_edges if str(n) in edges else num_nodes

    inputs: list[Any] = []
    for example in examples:
        if isinstance(example, Tensor):
            inputs.append(Like(tuple(map(size, example.shape)), example.dtype, example.device))
        else:
            inputs.append(size(example))

    program, output, num_dropouts, autocast = read_message(
        _Interpreter(graph, num_nodes), inputs, num_edges, num_nodes
    )
    numbers = tuple(
        k for k, node in enumerate(placeholders) if any(map(_is_number, node.users))
    )  # fmt: skip
    text = program.text([output])
    on_cuda = any(isinstance(x, Like) and x.device.type == 'cuda' for x in inputs)
    return Captured(program, output, num_dropouts, autocast, text, on_cuda, numbers)


def read_message(
    interpreter: torch.fx.Interpreter, inputs: Sequence[Any], num_edges: int, num_nodes: int
) -> tuple[Program, int, int, bool]:
    """The program of a graph, its output, the number of its dropouts, and whether autocast was on.

    Raises:
        Refused: If the message of an edge depends on others, or writes into its inputs.
    """
    writes = _Writes()

    def watched(*args: Any) -> None:
        writes.watch(*args)
        with writes:
            interpreter.run(*args)

    run_on_fakes(watched, inputs)

    def function(*args: Any) -> Any:
        with torch.fx.traceback.preserve_node_meta():
            out = torch.func.functionalize(interpreter.run)(*args)
        return out if isinstance(out, (tuple, list)) else (out,)

    program = Program()
    parser = Parser(program, num_edges, num_nodes)
    with torch.no_grad():
        (output,) = parser.read(trace(function, inputs))
    if any(program[at].op in ('index', 'rowsum', 'rowmax') for at in program.reachable([output])):
        raise Refused('the message of an edge depends on other edges, and not by softmax')
    if program.values[output].dtype == 'bool':
        raise Refused('a message of bool')
    autocast = any(map(torch.is_autocast_enabled, ('cpu', 'cuda')))
    return program, output, parser.num_dropouts, autocast
