"""Replaces messages in a graph that :func:`torch.compile` captured by the op of their plan.

The graph is that of Dynamo, before autograd and before writes become functional. The region of a
message is all that depends on an edge between the marks of :mod:`~pyg_fast.message._markers` that
gather and those that aggregate it. A region that no kernel computes stays as it is.
"""

import logging
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph.small_graphs import are_few
from ..ops._edges import assert_no_invalid
from ..ops.head_map import in_torch
from . import _markers
from ._capture import (
    Captured,
    check_autograd,
    dropout_of,
    mark_dropouts,
    read_message,
    storages,
    written,
)
from ._compiled_op import graph_from, message, passes_of
from ._ir import Refused
from ._parse import EDGES, NODES
from ._passes import Passes
from ._plan import plan
from ._run import finished
from ._text import dumps
from ._trace import Like

_log = logging.getLogger('pyg_fast')
_ops = torch.ops.pyg_fast_message
_CONTEXT = ('_enter_autocast', '_exit_autocast', '_set_grad_enabled')


def replace_messages(module: GraphModule, gradients: bool | None = None) -> int:
    """Replaces regions in place, also in the bodies of higher-order operators.

    Args:
        module (GraphModule): What Dynamo captured, or the graph of an exported program.
        gradients (bool, optional): Whether kernels give gradients to all inputs of float types, as
            an exported program does not tell which need them. Without, a backward pass raises an
            error. (default: :obj:`None`, to those that need them in the captured graph)

    Returns:
        int: How many messages became kernels.
    """
    graph, count = module.graph, 0
    for node in graph.nodes:
        body = getattr(module, node.target, None) if node.op == 'get_attr' else None
        if isinstance(body, GraphModule):
            count += replace_messages(body, gradients)
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        if _is(node, _markers.aggregate):
            groups.setdefault((node.args[0], node.args[3]), []).append(node)
    if not groups:
        return count
    _join(graph)
    try:
        traffic = _traffic(module)
    except Refused as reason:
        _log.info("all messages of a graph run PyG's code, compiled: %s", reason)
        return count
    for aggregates in groups.values():
        name = _name_of(aggregates[0])
        try:
            how = _replace(module, aggregates, traffic, count, gradients)
        except Refused as reason:
            _log.info("%s runs PyG's code, compiled: %s", name, reason)
        else:
            count += 1
            _log.info('%s runs as a kernel in compiled code: %s', name, how)
    for node in reversed(list(graph.nodes)):
        if not node.users and _is_pure(node):
            graph.erase_node(node)
    graph.lint()
    module.recompile()
    return count


def _is(node: Node, op: Any) -> bool:
    return node.op == 'call_function' and node.target in (op, op.overloadpacket)


def _is_pure(node: Node) -> bool:
    """Whether a node without users may go: FX does not know all that writes."""
    is_mark = getattr(node.target, 'namespace', '') == _markers.NAMESPACE
    return is_mark or node.target is operator.getitem


def _value(x: Any) -> Any:
    """The fake tensor or the symbolic number of a node."""
    return x.meta.get('example_value', x.meta.get('val')) if isinstance(x, Node) else x


def _name_of(node: Node) -> str:
    """The layer that a node is of."""
    stack = node.meta.get('nn_module_stack') or {}
    names = [cls.__name__ if isinstance(cls, type) else str(cls) for _, cls in stack.values()]
    return names[-1] if names else 'a message'


def _join(graph: FxGraph) -> None:
    """Makes one of equal calls that sort edges or take a row of them: each layer has its own."""
    known: dict[Any, Node] = {}
    for node in list(graph.nodes):
        sorts = _is(node, _markers.csr)
        if sorts or (node.op == 'call_function' and node.target is operator.getitem):
            key = node.target, node.args
            try:
                first = known.setdefault(key, node)
            except TypeError:  # An index that is a slice.
                continue
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


class _Traffic(torch.fx.Interpreter):
    """Runs a graph on its fakes, and notes the storages of each node's result and those that it
    writes into: writes have no edges in this graph."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        # Of other nodes, which are put in later: nothing.
        self.result: defaultdict[Node, set[int]] = defaultdict(set)
        self.into: defaultdict[Node, set[int]] = defaultdict(set)

    def run_node(self, node: Node) -> Any:
        known = node.op == 'get_attr' or isinstance(node.target, HigherOrderOperator)
        writes = _Writes()
        if known:
            out = _value(node)
        else:
            with writes:
                out = super().run_node(node)
        self.result[node] = storages(out)
        self.into[node] = writes.storages
        return out


class _Writes(TorchDispatchMode):
    """Notes the storages that operators write into."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages |= written(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _traffic(module: GraphModule) -> _Traffic:
    """What the nodes of a graph read and write."""
    traffic = _Traffic(module)
    inputs = [_value(node) for node in module.graph.nodes if node.op == 'placeholder']
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


class _Region:
    """What lies between the marks of one message."""

    def __init__(self, module: GraphModule, aggregates: Sequence[Node], traffic: _Traffic) -> None:
        order = list(module.graph.nodes)
        self.place = {node: k for k, node in enumerate(order)}
        first: Any = aggregates[0]
        self.end = self.place[first]
        self.message, self.index, self.num_src, self.num_dst = first.args[:4]
        self.reduces: tuple[str, ...] = tuple(
            dict.fromkeys(str(node.args[4]) for node in aggregates)
        )
        self.csr, self.perm, self.t_perm = first.args[5:]
        # The backward pass reads inputs again, of which PyG's messages hold copies.
        later = set().union(*(traffic.into[node] for node in order[self.end :]))
        self.written = {node for node in order if traffic.result[node] & later}
        order = order[: self.end]
        depends = self._depending(order)
        if self.message not in depends:
            raise Refused('the message does not depend on an edge')
        nodes: set[Node] = set()
        frontier: set[Node] = set()
        self._walk([self.message], depends, nodes, frontier)
        # A write into a value of the region belongs to it.
        changed = True
        while changed:
            changed = False
            own: dict[int, int] = {}  # by storage: the place of the first value of the region
            for node in (*nodes, *frontier & depends):
                for storage in traffic.result[node]:
                    own[storage] = min(own.get(storage, self.end), self.place[node])
            for node in order:
                if node not in nodes and node in depends and any(
                    own.get(storage, self.end) < self.place[node] for storage in traffic.into[node]
                ):
                    self._walk([node], depends, nodes, frontier)
                    changed = True
        self._check_writes(order, traffic, nodes, frontier)
        begin = min(self.place[node] for node in nodes) if nodes else self.end
        if any(getattr(node.target, '__name__', '') in _CONTEXT for node in order[begin:]):
            raise Refused('autocast or the mode of gradients changes inside of the message')
        self.nodes = [node for node in order if node in nodes]
        self.frontier = [node for node in order if node in frontier]
        escapes = [
            node for node in (*self.nodes, *self.frontier)
            if node in depends and (node in nodes or _is(node, _markers.gather))
            and any(u not in nodes and u not in aggregates for u in node.users)
        ]  # fmt: skip
        writes = any(traffic.into[node] for node in self.nodes)
        drops = any(found.is_on for node in self.nodes if (found := dropout_of(node)))
        if escapes and (writes or drops):
            raise Refused(f'{escapes[0]} is read elsewhere, of a message that writes or drops out')

    def _depending(self, order: Sequence[Node]) -> set[Node]:
        """The values that depend on an edge: an aggregate ends them."""
        out: set[Node] = set()
        for node in order:
            starts = node is self.index or _is(node, _markers.gather) or _is(node, _markers.edge)
            ends = _is(node, _markers.aggregate)
            if starts or (not ends and any(each in out for each in node.all_input_nodes)):
                out.add(node)
        return out

    def _walk(
        self, stack: list[Node], depends: set[Node], nodes: set[Node], frontier: set[Node]
    ) -> None:
        """Adds what values are made of, as far as it depends on an edge."""
        while stack:
            node = stack.pop()
            if node in nodes or node in frontier:
                continue
            starts = node is self.index or _is(node, _markers.gather) or _is(node, _markers.edge)
            is_shape = node.op == 'call_function' and isinstance(_value(node), (tuple, list))
            if starts or not (node in depends or is_shape):
                frontier.add(node)
            else:
                nodes.add(node)
                stack.extend(node.all_input_nodes)

    def _check_writes(
        self, order: Sequence[Node], traffic: _Traffic, nodes: set[Node], frontier: set[Node]
    ) -> None:
        """Refuses writes into what the kernel reads, between the first reader and the kernel."""
        begins: dict[int, int] = {}  # by storage: the place where the message first reads it
        for node in (*nodes, *frontier):
            marked = _is(node, _markers.gather) or _is(node, _markers.edge)
            read: Any = [] if node in frontier else node.all_input_nodes
            read = [node.args[0]] if marked else read
            for each in read:
                for storage in traffic.result[each]:
                    begins[storage] = min(begins.get(storage, self.end), self.place[node])
        for node in order:
            if node not in nodes:
                for storage in traffic.into[node]:
                    if begins.get(storage, self.end) < self.place[node]:
                        raise Refused(f'{node} writes into a value that the message reads')

    def captured(self) -> tuple[Captured, list[Node], dict[Any, int]]:
        """The message; the nodes of its inputs; and by role and name the places of these."""
        graph, inputs, kinds = self._graph()
        module = GraphModule(torch.nn.Module(), graph)
        mark_dropouts(module)
        check_autograd(module)
        found = []
        for num_edges, num_nodes in zip(EDGES, NODES, strict=True):
            device = _value(self.index).device
            given: list[Any] = [Like((num_edges,), torch.int8, device), num_nodes]
            for node, kind in zip(inputs, kinds, strict=True):
                x = _value(node)
                rows = {'param': (), 'edge': (num_edges,)}.get(kind[0], (2,))
                shape = x.shape[1:] if rows else x.shape
                if any(str(n) in self._sizes() for n in shape if isinstance(n, torch.SymInt)):
                    raise Refused(f'an input of shape {list(x.shape)}')
                given.append(Like((*rows, *map(int, shape)), x.dtype, x.device))
            program, output, num_dropouts, autocast = read_message(
                torch.fx.Interpreter(module), given, num_edges, num_nodes
            )
            text = program.text([output])
            on_cuda = device.type == 'cuda'
            found.append(Captured(program, output, num_dropouts, autocast, text, on_cuda))
        if found[0].key != found[1].key:
            raise Refused('the number of edges or nodes is used as a number')
        # Parameters count by their place among the arguments of the graph.
        places = {
            ('param', k + 2) if kind[0] == 'param' else kind: k for k, kind in enumerate(kinds)
        }  # fmt: skip
        return found[0], inputs, places

    def _sizes(self) -> tuple[str, str]:
        return str(_value(self.index).shape[0]), str(_value(self.num_dst))

    def _graph(self) -> tuple[FxGraph, list[Node], list[tuple[str, str]]]:
        """The graph of the message alone, with the marks of :mod:`~pyg_fast.message._capture`; its
        arguments are the edges, the number of destinations, and the inputs. By these: their role
        and name."""
        graph = FxGraph()
        edges, num_nodes = graph.placeholder('edges'), graph.placeholder('nodes')
        num_edges = graph.call_method('size', (edges, 0))
        inputs: list[Node] = []
        kinds: list[tuple[str, str]] = []
        known: dict[Node, Any] = {}
        fixed = {
            str(n) for node in self.frontier if isinstance(_value(node), Tensor)
            for n in _value(node).shape
        } - set(self._sizes())  # fmt: skip
        for node in self.frontier:
            value = _value(node)
            if node is self.index:
                known[node] = graph.call_function(_ops.index.default, (edges,))
            elif _is(node, _markers.gather) or _is(node, _markers.edge):
                x, _, *given = node.args
                role, name = given if len(given) == 2 else ('edge', *given)
                kind = role, f'{name} {len(inputs)}'
                inputs.append(x)
                kinds.append(kind)
                place = graph.placeholder(f'input_{len(inputs)}')
                known[node] = graph.call_function(_ops.lift.default, (place, edges, *kind))
            elif isinstance(value, Tensor):
                inputs.append(node)
                kinds.append(('param', ''))
                known[node] = graph.placeholder(f'input_{len(inputs)}')
            else:
                known[node] = self._number(value, num_edges, num_nodes, fixed)
        for node in self.nodes:
            new = graph.node_copy(node, known.__getitem__)
            if not isinstance(_value(self.index).shape[0], torch.SymInt):
                self._restore_sizes(new, num_edges, num_nodes)
            known[node] = new
        graph.output((graph.call_function(_ops.end.default, (known[self.message],)),))
        return graph, inputs, kinds

    def _number(self, value: Any, num_edges: Node, num_nodes: Node, fixed: set[str]) -> Any:
        """A number that is no constant of the graph: a size, or one that a guard makes constant."""
        edges, nodes = (str(value) == each for each in self._sizes())
        if edges and nodes:
            raise Refused('as many edges as destinations in the first call')
        if edges or nodes:
            return num_edges if edges else num_nodes
        if isinstance(value, (int, float, str, type(None), torch.dtype, torch.device)):
            return value
        if isinstance(value, torch.SymFloat):
            return float(value)
        if isinstance(value, torch.SymInt) and str(value) in fixed:
            return int(value)
        raise Refused(f'{value} is no size of the graph')

    def _restore_sizes(self, node: Node, num_edges: Node, num_nodes: Node) -> None:
        """Makes sizes of numbers in a graph of fixed sizes, for which a guard holds anyway."""
        name = getattr(node.target, '__name__', node.target)
        if name not in _SHAPED or len(node.args) <= (place := int(name != 'zeros')):
            return
        count, total = _value(self.index).shape[0], _value(self.num_dst)

        def size(n: Any) -> Any:
            if type(n) is not int:
                return n
            if n == total and name.startswith(('new', 'zeros')):
                return num_nodes
            return num_edges if n == count else n

        shape = node.args[place]
        new = (size(shape[0]), *shape[1:]) if isinstance(shape, (tuple, list)) else size(shape)
        node.args = (*node.args[:place], new, *node.args[place + 1 :])


_SHAPED = ('new_zeros', 'new_ones', 'new_full', 'new_empty', 'view', 'reshape', 'expand', 'zeros')


def _replace(
    module: GraphModule, aggregates: Sequence[Node], traffic: _Traffic, number: int,
    gradients: bool | None,
) -> str:  # fmt: skip
    """Replaces one region; tells how.

    Raises:
        Refused: If no kernel computes it; the graph is as before.
    """
    graph, order = module.graph, list(module.graph.nodes)
    last = aggregates[0]
    with _autocast_at(order, last) as inside:
        region = _Region(module, aggregates, traffic)
        captured, inputs, places = region.captured()
        made = plan(captured, region.reduces)
        if made.in_blocks:
            raise Refused('a linear map of values computed for each edge')
        text = dumps(made)
        passes = passes_of(text)
        _check_size(region, passes)
        autocast = any(map(torch.is_autocast_enabled, ('cpu', 'cuda'))) or inside
    arguments = [
        *region.csr, region.perm, region.t_perm, region.num_src, region.num_dst, *inputs
    ]  # fmt: skip
    invalid = _invalid_of(graph, region.csr[0])
    copied = [node in region.written for node in inputs]
    # The mode of gradients is that of the graph, not that in which it is compiled.
    trains = gradients
    if trains is None:
        trains = any(_value(node).requires_grad for node in aggregates)
    leaves = {
        at for at, role, name in passes.reads
        if trains and (x := _value(inputs[places[role, name]])).is_floating_point()
        and (gradients or x.requires_grad)
    }  # fmt: skip
    needs = [not leaves.isdisjoint(each) for each in passes.leaves]
    asked = [] if gradients is False else needs
    body = _emitted(
        passes, text, places, len(region.csr), [*arguments, invalid], copied, needs, asked
    )
    device = _value(region.csr[0]).device.type
    with graph.inserting_before(last):
        if autocast:  # The plan has its conversions.
            enter = graph.call_function(
                torch.amp.autocast_mode._enter_autocast, (device, None, False, None)
            )
        results = _inserted(module, body, [*arguments, invalid], last, number)
        if autocast:
            graph.call_function(torch.amp.autocast_mode._exit_autocast, (enter,))
    for node in aggregates:
        result = results[region.reduces.index(node.args[4])]
        # That of the trace is detached, and the next message asks whether it needs a gradient.
        result.meta['example_value'] = _value(node)
        traffic.result[result] |= traffic.result[node]
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    own = {*region.nodes, *filter(_is_pure, region.frontier)}
    for node in reversed(order):
        # A write into a value that nobody reads is no reason to stay.
        if node in own and not node.users and node.op != 'placeholder':
            graph.erase_node(node)
    return f'{len(passes.plan.inputs)} inputs, {", ".join(region.reduces)}'


def _invalid_of(graph: FxGraph, rowptr: Node) -> Node | None:
    """What tells invalid edges, of a list that the graph sorts and that nothing has checked."""
    sort = rowptr.args[0] if rowptr.target is operator.getitem else None
    if not isinstance(sort, Node) or not _is(sort, _markers.csr):
        return None
    for node in sort.users:
        if node.args[1] == _INVALID:  # An exported graph has it from the start, for nobody.
            return None if node.users else node
    with graph.inserting_after(sort):
        node = graph.call_function(operator.getitem, (sort, _INVALID))
    node.meta['example_value'] = _value(sort)[_INVALID]
    return node


_INVALID = 6  # of the results of `csr`


def _check_size(region: _Region, passes: Passes) -> None:
    """Refuses a region of so few edges that compiled code of PyG takes less time."""
    width = max(math.prod(each.shape) for each in passes.plan.inputs)
    index = _value(region.index)
    kind = 'compiled' if passes.weighted_sum is None else 'compiled sum'
    if are_few(index.shape[0], width, index.is_cuda, kind):
        raise Refused('too few edges for a kernel to pay')


def _emitted(
    passes: Passes, text: str, places: dict[Any, int], num_csr: int, arguments: Sequence[Any],
    copied: Sequence[bool], needs: Sequence[bool], asked: Sequence[bool],
) -> GraphModule:  # fmt: skip
    """The op of a message, with what runs on nodes before and after it, in torch's operators. All
    of it is differentiable by the dispatcher: the op gives the gradients that are `asked`. It
    copies inputs that are written after it."""
    made = passes.plan

    def emit(*given: Any) -> list[Tensor]:
        csr, (perm, t_perm, num_src, num_dst, *inputs, invalid) = given[:num_csr], given[num_csr:]
        if invalid is not None:
            assert_no_invalid(invalid)
        inputs = [x.clone() if copy else x for x, copy in zip(inputs, copied, strict=True)]
        read = {at: inputs[places[role, name]] for at, role, name in passes.reads}
        hoists = passes.prologue.ends if True in needs else ()
        graph = graph_from(csr, perm, t_perm, num_src, num_dst)
        values = passes.prologue(read, graph if hoists else None)
        kernel_inputs = [x.contiguous() for x in values[: len(needs)]]
        seed = None
        if made.num_dropouts:
            seed = torch.randint(2**62, (1,), device=csr[0].device)
        outs = message(
            text, asked, kernel_inputs, seed, list(csr), perm, t_perm, num_src, num_dst
        )
        return finished(passes, outs[: len(made.outputs)], values, csr[0])

    fakes = [_value(each) for each in arguments]
    mode = next(x.fake_mode for x in fakes if isinstance(x, FakeTensor))
    with ExitStack() as stack:
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(mode)
        stack.enter_context(in_torch())
        for kind in ('cpu', 'cuda'):
            stack.enter_context(torch.autocast(kind, enabled=False))
        try:
            body = make_fx(emit, tracing_mode='real')(*fakes)
        except RuntimeError as error:
            raise Refused(f'its operators cannot be traced: {error}') from error
    body.graph.eliminate_dead_code()
    return body


def _inserted(
    module: GraphModule, body: GraphModule, arguments: Sequence[Any], like: Node, number: int
) -> list[Any]:
    """Copies a graph to the present place of another one; its results there."""
    graph, known = module.graph, {}
    given = iter(arguments)
    for node in body.graph.nodes:
        if node.op == 'placeholder':
            known[node] = next(given)
            continue
        if node.op == 'output':
            return [known[each] for each in node.args[0]]
        if node.op == 'get_attr':
            name = f'_pyg_fast_{number}_{node.target}'
            setattr(module, name, getattr(body, node.target))
            new = graph.get_attr(name)
        else:
            new = graph.node_copy(node, known.__getitem__)
        kept = ('stack_trace', 'nn_module_stack')
        # The names of Dynamo and of exported programs.
        new.meta = dict.fromkeys(('example_value', 'val'), node.meta.get('val'))
        new.meta |= {key: like.meta[key] for key in kept if key in like.meta}
        known[node] = new
    raise AssertionError


@contextmanager
def _autocast_at(order: Sequence[Node], place: Node) -> Iterator[bool]:
    """Sets the autocast in which a node runs; whether the graph sets any."""
    active: list[Any] = []
    for node in order:
        if node is place:
            break
        name = getattr(node.target, '__name__', '')
        if name == '_enter_autocast':
            active.append(node.args)
        elif name == '_exit_autocast':
            active.pop()
    with ExitStack() as stack:
        for device, dtype, enabled, cache in active:
            stack.enter_context(torch.autocast(device, dtype, enabled, cache))
        yield bool(active)
