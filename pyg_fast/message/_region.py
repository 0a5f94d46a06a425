"""Replaces regions of a graph that :func:`torch.compile` captured by the op of a message.

The graph is that of Dynamo, before autograd and before functionalization. The region of a message
is what varies per edge between the markers that gather and those that aggregate, see
:mod:`~pyg_fast.message._markers`. A region that no kernel computes stays as it is.
"""

import logging
import math
import operator
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from ..graph.small_graphs import are_few, width_of_mlp
from ..ops._edges import assert_no_invalid
from ..ops.head_map import in_torch
from . import _markers
from ._capture import (
    FACTORIES,
    CapturedMessage,
    SizedInterpreter,
    capture_twice,
    check_functions,
    dropout_of,
    mark_dropouts,
    read_message,
)
from ._compiled_op import graph_from, message, passes_of
from ._ir import Refused
from ._passes import Passes
from ._plan import make_plan
from ._run import SLOWER_IN_TILES, finish_results, is_slower_in_tiles
from ._text import dumps
from ._trace import Like
from ._traffic import Traffic, fake_of, record_traffic

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
    groups: dict[object, list[Node]] = {}
    for node in graph.nodes:
        if _is(node, _markers.rows):
            groups.setdefault((tuple(node.args[8]), node.args[3]), []).append(node)
        if _is(node, _markers.aggregate):
            groups.setdefault((node.args[0], node.args[3]), []).append(node)
    if not groups:
        return count
    _merge_duplicates(graph)
    try:
        traffic = record_traffic(module)
    except Refused as reason:
        _log.info("all messages of a graph run PyG's code, compiled: %s", reason)
        return count
    for aggregates in groups.values():
        name = _layer_name(aggregates[0])
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


def _is(node: Node, op: OpOverload) -> bool:
    return node.op == 'call_function' and node.target in (op, op.overloadpacket)


def _is_pure(node: Node) -> bool:
    """Whether a node without users may be erased: FX does not know all operators that write."""
    is_marker = getattr(node.target, 'namespace', '') == _markers.NAMESPACE
    return is_marker or node.target is operator.getitem


def _layer_name(node: Node) -> str:
    """The class of the layer that a node belongs to."""
    stack = node.meta.get('nn_module_stack') or {}
    names = [cls.__name__ if isinstance(cls, type) else str(cls) for _, cls in stack.values()]
    return names[-1] if names else 'a message'


def _merge_duplicates(graph: FxGraph) -> None:
    """Merges equal calls that sort edges or take a row of them: each layer has its own."""
    first_of: dict[object, Node] = {}
    for node in list(graph.nodes):
        sorts = _is(node, _markers.csr)
        if sorts or (node.op == 'call_function' and node.target is operator.getitem):
            key = node.target, node.args
            try:
                first = first_of.setdefault(key, node)
            except TypeError:  # An index that is a slice.
                continue
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _dim_of(marker: Node) -> int:
    """The dimension of nodes or edges in what a marker gathers or aggregates."""
    args: Any = marker.args
    for op, place in ((_markers.gather, 4), (_markers.aggregate, 8)):
        if _is(marker, op) and place < len(args):  # An exported graph leaves a zero out.
            return int(args[place])
    return 0


class _Input(NamedTuple):
    """An argument of the kernel: a node of the graph, its role and name, and the dimension of nodes
    or edges in it."""

    node: Node
    role: str
    name: str
    dim: int


def _lift(graph: FxGraph, x: _Input, number: int, edges: Node, num_nodes: Node) -> Node:
    """What the message reads of an input, in the graph of the message alone."""
    place = graph.placeholder(f'input_{number}')
    if x.role == 'row':
        return graph.call_function(_ops.row.default, (place, num_nodes, x.name))
    lifted = graph.call_function(_ops.lift.default, (place, edges, x.role, x.name))
    return graph.call_method('movedim', (lifted, 0, x.dim)) if x.dim else lifted


class _Region:
    """What lies between the markers of one message.

    :obj:`nodes` vary per edge; the :obj:`frontier` are values that they read from outside, gathers
    and inputs of edges among them.
    """

    def __init__(self, module: GraphModule, aggregates: Sequence[Node], traffic: Traffic) -> None:
        order = list(module.graph.nodes)
        self.traffic = traffic
        self.place = {node: k for k, node in enumerate(order)}
        first = aggregates[0]
        self.end = self.place[first]
        args: Any = first.args
        end, self.index, self.num_src, self.num_dst = args[:4]
        self.csr, self.perm, self.t_perm = args[5:8]
        self.of_rows = _is(first, _markers.rows)  # whether it holds the layer's own `aggregate`
        # What the kernel computes: the message, or results of an `aggregate`.
        self.ends: list[Node] = list(args[8]) if self.of_rows else [end]
        self.dim = 0 if self.of_rows else _dim_of(first)  # that of edges in the message
        self.reduces: tuple[str, ...] = ()
        if not self.of_rows:
            self.reduces = tuple(dict.fromkeys(str(node.args[4]) for node in aggregates))
        # The backward pass reads inputs again, of which PyG's messages hold copies.
        later = set().union(*(traffic.into[node] for node in order[self.end :]))
        self.written = {node for node in order if traffic.result[node] & later}
        order = order[: self.end]
        # Inputs of edges that are looked up in tables, with the integers by which they are.
        self.looked_up: dict[Node, set[Node]] = {}
        for node in order if fake_of(self.index).is_cuda else ():  # On a CPU torch looks up.
            if _is(node, _markers.edge) and (integers := self._integers_of(node)):
                self.looked_up[node] = integers
        self.integers = set().union(*self.looked_up.values())
        self.depends = self._edge_dependent(order)
        if not self.depends.issuperset(self.ends):
            raise Refused('the message does not depend on an edge')
        self.own: set[Node] = set()
        self.outer: set[Node] = set()
        self._walk(list(self.ends))
        while sum(map(self._add_write, order)) > 0:
            pass
        self._check_writes(order)
        begin = min(self.place[node] for node in self.own) if self.own else self.end
        if any(getattr(node.target, '__name__', '') in _CONTEXT for node in order[begin:]):
            raise Refused('autocast or the mode of gradients changes inside of the message')
        self.nodes = [node for node in order if node in self.own]
        self.frontier = [node for node in order if node in self.outer]
        self._check_escapes(aggregates)

    def _add_write(self, node: Node) -> bool:
        """Adds a node that writes into a value of the region; whether it was none of it before."""
        if node in self.own or node not in self.depends or not self.traffic.into[node]:
            return False
        values = (*self.own, *self.outer & self.depends)
        if not any(
            self.place[each] < self.place[node]
            and not self.traffic.result[each].isdisjoint(self.traffic.into[node])
            for each in values
        ):
            return False
        self._walk([node])
        return True

    def _check_escapes(self, aggregates: Sequence[Node]) -> None:
        """Refuses a message of which values are read elsewhere that it writes into, or any if it
        drops out."""
        written = set().union(*(self.traffic.into[node] for node in self.nodes))
        drops = any(call.is_on for node in self.nodes if (call := dropout_of(node)))
        for node in (*self.nodes, *self.frontier):
            if not drops and self.traffic.result[node].isdisjoint(written):
                continue
            is_own = node in self.own or _is(node, _markers.gather)
            elsewhere = any(u not in self.own and u not in aggregates for u in node.users)
            if node in self.depends and is_own and elsewhere:
                raise Refused(f'{node} is read elsewhere, of a message that writes or drops out')

    def _is_input(self, node: Node) -> bool:
        """Whether values that vary per edge or destination start here."""
        inputs = _markers.gather, _markers.edge, _markers.node, _markers.sources, _markers.ends
        if node is self.index or node in self.integers:
            return True
        return node not in self.looked_up and any(_is(node, each) for each in inputs)

    def _integers_of(self, marker: Node) -> set[Node] | None:
        """The integers of edges from which an input of edges is looked up in tables, such as a sum
        of embeddings of bonds; None for other inputs, or where the graph reads it elsewhere, too.
        The region then has the tables, and no tensor of all edges."""
        (num_edges,) = fake_of(self.index).shape
        integers: set[Node] = set()
        inner = {marker}
        stack: list[Any] = [marker.args[0]] if fake_of(marker).is_floating_point() else []
        while stack:
            node = stack.pop()
            value = fake_of(node)
            if not isinstance(node, Node) or not isinstance(value, Tensor) or node in inner:
                continue
            if value.dim() == 0 or str(value.shape[0]) != str(num_edges):
                continue  # A table.
            if not value.is_floating_point():
                integers.add(node)
                continue
            if node.target not in (*_LOOK_UPS, *_SUMS):
                return None
            inner.add(node)
            stack += node.all_input_nodes
        inner.remove(marker)
        own = set().union(*(self.traffic.result[node] for node in inner))
        for node in self.place:
            reads = not inner.isdisjoint(node.all_input_nodes)
            writes = not own.isdisjoint(self.traffic.into[node])
            if node not in inner and node is not marker and (reads or writes):
                return None
        return integers or None

    def _edge_dependent(self, order: Sequence[Node]) -> set[Node]:
        """The values that vary per edge, or are written from such; those of an aggregation are
        not."""
        out: set[Node] = set()
        written: set[int] = set()  # storages
        count = -1
        while len(written) > count:
            count = len(written)
            for node in order:
                ends = _is(node, _markers.aggregate) or _is(node, _markers.rows)
                varies = not ends and not out.isdisjoint(node.all_input_nodes)
                is_written = not self.traffic.result[node].isdisjoint(written)
                if self._is_input(node) or varies or (is_written and node.op != 'placeholder'):
                    out.add(node)
                    written |= self.traffic.into[node]
        return out

    def _walk(self, stack: list[Node]) -> None:
        """Adds what values are computed from, as far as that varies per edge."""
        while stack:
            node = stack.pop()
            if node in self.own or node in self.outer:
                continue
            is_shape = node.op == 'call_function' and isinstance(fake_of(node), (tuple, list))
            is_own = node in self.depends or is_shape or node.target in FACTORIES
            if self._is_input(node) or not is_own:
                self.outer.add(node)
            else:
                self.own.add(node)
                stack.extend(node.all_input_nodes)

    def _check_writes(self, order: Sequence[Node]) -> None:
        """Refuses writes into what the kernel reads, between the first reader and the kernel."""
        begins: dict[int, int] = {}  # by storage: the place where the message first reads it
        for node in (*self.own, *self.outer):
            read: Any = [] if node in self.outer else node.all_input_nodes
            if node in self.integers:
                read = [node]
            elif self._is_input(node) and node is not self.index:
                read = [node.args[0]]
            for each in read:
                for storage in self.traffic.result[each]:
                    begins[storage] = min(begins.get(storage, self.end), self.place[node])
        for node in order:
            if node not in self.own:
                for storage in self.traffic.into[node]:
                    if begins.get(storage, self.end) < self.place[node]:
                        raise Refused(f'{node} writes into a value that the message reads')

    def capture(self) -> tuple[CapturedMessage, list[_Input], dict[tuple[str, str | int], int]]:
        """The message; its inputs; and by role and name the places of these."""
        graph, inputs = self._graph()
        module = GraphModule(torch.nn.Module(), graph)
        mark_dropouts(module)
        check_functions(module)
        device = fake_of(self.index).device

        def capture(num_edges: int, num_nodes: int) -> CapturedMessage:
            given: list[Like | int] = [Like((num_edges,), torch.int8, device), num_nodes]
            for node, role, _, dim in inputs:
                x = fake_of(node).movedim(dim, 0) if dim else fake_of(node)
                rows = {'param': (), 'edge': (num_edges,)}.get(role, (2,))
                shape = x.shape[1:] if rows else x.shape
                if any(str(n) in self._sizes() for n in shape if isinstance(n, torch.SymInt)):
                    raise Refused(f'an input of shape {list(x.shape)}')
                given.append(Like((*rows, *map(int, shape)), x.dtype, x.device))
            interpreter = SizedInterpreter(module, num_edges, num_nodes)
            return read_message(interpreter, given, num_edges, num_nodes, device.type == 'cuda')

        # Parameters are named by their position among the arguments of the graph.
        places: dict[tuple[str, str | int], int] = {
            (role, k + 2 if role == 'param' else name): k
            for k, (_, role, name, _) in enumerate(inputs)
        }
        return capture_twice(capture), inputs, places

    def _sizes(self) -> tuple[str, str]:
        return str(fake_of(self.index).shape[0]), str(fake_of(self.num_dst))

    def _graph(self) -> tuple[FxGraph, list[_Input]]:
        """The graph of the message alone, whose arguments are the edges, the number of destinations
        and the inputs; and the inputs."""
        graph = FxGraph()
        edges, num_nodes = graph.placeholder('edges'), graph.placeholder('nodes')
        num_edges = graph.call_method('size', (edges, 0))
        inputs: list[_Input] = []
        copies: dict[Node, Any] = {}
        fixed = {
            str(n) for node in self.frontier if isinstance(fake_of(node), Tensor)
            for n in fake_of(node).shape
        } - set(self._sizes())  # fmt: skip
        for node in self.frontier:
            value = fake_of(node)
            if node is self.index:
                copies[node] = graph.call_function(_ops.index.default, (edges,))
            elif _is(node, _markers.sources) or _is(node, _markers.ends):
                copies[node] = self._ends(graph, node, edges)
            elif self._is_input(node):
                inputs.append(self._input(node, len(inputs)))
                copies[node] = _lift(graph, inputs[-1], len(inputs), edges, num_nodes)
            elif isinstance(value, Tensor):
                inputs.append(_Input(node, 'param', '', 0))
                copies[node] = graph.placeholder(f'input_{len(inputs)}')
            else:
                copies[node] = self._number(value, num_edges, num_nodes, fixed)
        for node in self.nodes:
            if node in self.looked_up:
                copies[node] = copies[node.all_input_nodes[0]]
                continue
            new = graph.node_copy(node, copies.__getitem__)
            if not isinstance(fake_of(self.index).shape[0], torch.SymInt):
                self._restore_sizes(new, num_edges, num_nodes)
            copies[node] = new
        ends: list[Any] = [copies[end] for end in self.ends]
        if self.of_rows:
            end = graph.call_function(_ops.end_of_rows.default, (ends, 'list'))
        else:
            end = graph.call_method('movedim', (ends[0], self.dim, 0)) if self.dim else ends[0]
            end = graph.call_function(_ops.end.default, (end,))
        graph.output((end,))
        return graph, inputs

    def _input(self, node: Node, number: int) -> _Input:
        if node in self.integers:
            return _Input(node, 'edge', f'{node.name} {number}', 0)
        args: Any = node.args
        if _is(node, _markers.gather):
            return _Input(args[0], args[2], f'{args[3]} {number}', _dim_of(node))
        role = 'row' if _is(node, _markers.node) else 'edge'
        return _Input(args[0], role, f'{args[2]} {number}', 0)

    def _ends(self, graph: FxGraph, node: Node, edges: Node) -> Node:
        """The sources of the edges, or both ends."""
        if node.args[1] is not self.index:
            raise Refused('the ends of other edges')
        if _is(node, _markers.sources):
            return graph.call_function(_ops.source.default, (edges,))
        return graph.call_function(_ops.edge_index.default, (edges, node.args[2]))

    def _number(self, value: object, num_edges: Node, num_nodes: Node, fixed: set[str]) -> Argument:
        """A number of the graph that is a node: a size, or a number that a guard fixes."""
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
        """In a graph of static sizes, makes numbers that equal E or N sizes again: the graph is
        valid for these anyway."""
        name = str(getattr(node.target, '__name__', node.target))
        makes, place = node.target in FACTORIES, int(node.target not in FACTORIES)
        if not (makes or name in _SIZE_FUNCTIONS) or len(node.args) <= place:
            return
        count, total = fake_of(self.index).shape[0], fake_of(self.num_dst)

        def restored(shape: Sequence[Argument], first: int = 0) -> tuple[Argument, ...]:
            places = first, first + self.dim
            return tuple([size(n) if k in places else n for k, n in enumerate(shape)])

        def size(n: Argument) -> Argument:
            if type(n) is not int:
                return n
            if n == total and (self.of_rows or makes or name.startswith('new')):
                return num_nodes
            return num_edges if n == count else n

        shape = node.args[place]
        if isinstance(shape, (tuple, list)):
            node.args = (*node.args[:place], restored(shape), *node.args[place + 1 :])
        else:
            node.args = restored(node.args, place)


_LOOK_UPS = (torch.nn.functional.embedding, torch.embedding, torch.ops.aten.embedding.default)
_SUMS = (operator.add, torch.add, operator.iadd, torch.ops.aten.add.Tensor)
# Functions that take a shape.
_SIZE_FUNCTIONS = (
    'new_zeros', 'new_ones', 'new_full', 'new_empty', 'view', 'reshape', 'expand',
)  # fmt: skip


def _replace(
    module: GraphModule, aggregates: Sequence[Node], traffic: Traffic, number: int,
    gradients: bool | None,
) -> str:  # fmt: skip
    """Replaces one region; tells how.

    Raises:
        Refused: If no kernel computes it; the graph is as before.
    """
    graph, order = module.graph, list(module.graph.nodes)
    with _autocast_at(order, aggregates[0]) as inside:
        region = _Region(module, aggregates, traffic)
        captured, reads, places = region.capture()
        plan = make_plan(captured, region.reduces)
        if plan.in_blocks:
            raise Refused('a linear map of values computed for each edge')
        passes = passes_of(text := dumps(plan))
        _check_size(region, passes)
        autocast = any(map(torch.is_autocast_enabled, ('cpu', 'cuda'))) or inside
    inputs, dims = [each.node for each in reads], [each.dim for each in reads]
    arguments = [
        *region.csr, region.perm, region.t_perm, region.num_src, region.num_dst, *inputs,
        _find_invalid(graph, region.csr[0]),
    ]  # fmt: skip
    read = {at: fake_of(inputs[places[role, name]]) for at, role, name in passes.reads}
    for at, role in passes.gathers:
        count = fake_of(region.num_src if role == 'src' else region.num_dst)
        if not statically_known_true(read[at].shape[0] == count):
            raise Refused('message gathers from what has no row for each node')
    # The mode of gradients is that of the graph, not that in which it is compiled.
    trains = any(fake_of(node).requires_grad for node in aggregates)
    needs = _needs_gradient(passes, read, trains if gradients is None else gradients, gradients)
    count = fake_of(region.index).shape[0]
    if isinstance(count, int) and is_slower_in_tiles(passes, count, any(needs)):
        raise Refused(SLOWER_IN_TILES)
    if plan.in_tiles and any(needs) and not passes.backward(tuple(needs)).passes:
        raise Refused('gradients of a linear map of values computed for each edge')
    copied = [node in region.written for node in inputs]
    asked = [] if gradients is False else needs
    body = _trace_replacement(
        passes, text, places, len(region.csr), arguments, dims, copied, needs, asked
    )
    results = _insert_op(module, body, arguments, aggregates[0], number, autocast)
    _use_results(graph, region, aggregates, results, trains)
    _erase_region(graph, region, order)
    reduces = ', '.join(output.reduce for output in passes.plan.outputs)
    return f'{len(passes.plan.inputs)} inputs, {reduces}'


def _use_results(
    graph: FxGraph, region: _Region, aggregates: Sequence[Node], results: Sequence[Node],
    trains: bool,
) -> None:  # fmt: skip
    """Puts the results of an op in the place of the aggregations."""
    traffic = region.traffic
    for node in aggregates:
        which = str(node.args[4])
        result = results[int(which) if region.of_rows else region.reduces.index(which)]
        with graph.inserting_before(node):
            if trains and not fake_of(node).requires_grad:
                result = graph.call_method('detach', (result,))
            if region.dim:
                result = graph.call_method('movedim', (result, 0, region.dim))
                result = graph.call_method('contiguous', (result,))
        # That of the trace is detached, and the next message asks whether it needs a gradient.
        result.meta['example_value'] = fake_of(node)
        traffic.result[result] |= traffic.result[node]
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _erase_region(graph: FxGraph, region: _Region, order: Sequence[Node]) -> None:
    """Erases what nobody reads any more, also writes, and what Dynamo asserts of the number of
    nodes that a softmax takes from its index."""
    own = {*region.nodes, *filter(_is_pure, region.frontier)}
    for node in order:
        asserts = node.target is torch.ops.aten._assert_scalar.default
        compares = isinstance(fake_of(node), torch.SymBool)
        if (asserts or compares) and not own.isdisjoint(node.all_input_nodes):
            own.add(node)
    for node in reversed(order):
        if node in own and not node.users and node.op != 'placeholder':
            graph.erase_node(node)


def _needs_gradient(
    passes: Passes, read: dict[int, Tensor], trains: bool, gradients: bool | None
) -> list[bool]:
    """Which inputs of the passes need a gradient, by the fake tensors that the prologue reads."""
    leaves = {
        at for at, x in read.items()
        if trains and x.is_floating_point() and (gradients or x.requires_grad)
    }  # fmt: skip
    return [not leaves.isdisjoint(each) for each in passes.leaves]


def _insert_op(
    module: GraphModule, body: GraphModule, arguments: Sequence[object], before: Node, number: int,
    autocast: bool,
) -> list[Node]:  # fmt: skip
    """Inserts the op of a message with what surrounds it, out of autocast; its results."""
    amp, device = torch.amp.autocast_mode, fake_of(arguments[0]).device.type
    with module.graph.inserting_before(before):
        if autocast:  # The plan has its conversions.
            enter = module.graph.call_function(amp._enter_autocast, (device, None, False, None))
        results = _insert_graph(module, body, arguments, before, number)
        if autocast:
            module.graph.call_function(amp._exit_autocast, (enter,))
    return results


def _find_invalid(graph: FxGraph, rowptr: Node) -> Node | None:
    """The node that counts invalid edges, where the graph sorts a list that nothing has checked."""
    sort = rowptr.args[0] if rowptr.target is operator.getitem else None
    if not isinstance(sort, Node) or not _is(sort, _markers.csr):
        return None
    for node in sort.users:
        if node.args[1] == _INVALID_RESULT:  # In an exported graph it may be unused.
            return None if node.users else node
    with graph.inserting_after(sort):
        node = graph.call_function(operator.getitem, (sort, _INVALID_RESULT))
    node.meta['example_value'] = fake_of(sort)[_INVALID_RESULT]
    return node


_INVALID_RESULT = 6  # the result of `csr` that counts invalid edges


def _check_size(region: _Region, passes: Passes) -> None:
    """Refuses a region of so few edges that PyG's compiled code is faster."""
    width = max(math.prod(each.shape) for each in passes.plan.inputs)
    index = fake_of(region.index)
    if passes.plan.in_tiles:
        width = width_of_mlp(width, index.is_cuda)
    kind = 'compiled' if passes.weighted_sum is None else 'compiled sum'
    if are_few(index.shape[0], width, index.is_cuda, kind):
        raise Refused('too few edges for a kernel to pay')


def _trace_replacement(
    passes: Passes, text: str, places: dict[tuple[str, str | int], int], num_csr: int,
    arguments: Sequence[object], dims: Sequence[int], copied: Sequence[bool], needs: Sequence[bool],
    asked: Sequence[bool],
) -> GraphModule:  # fmt: skip
    """The op of a message between its prologue and its tail, traced into torch's operators. All of
    it is differentiable by the dispatcher: the op gives the gradients that are `asked`. It copies
    inputs that are written after it."""
    plan = passes.plan

    def emit(*given: Any) -> list[Tensor]:
        csr, (perm, t_perm, num_src, num_dst, *inputs, invalid) = given[:num_csr], given[num_csr:]
        if invalid is not None:
            assert_no_invalid(invalid)
        inputs = [x.clone() if copy else x for x, copy in zip(inputs, copied, strict=True)]
        inputs = [x.movedim(dim, 0) if dim else x for x, dim in zip(inputs, dims, strict=True)]
        read = {at: inputs[places[role, name]] for at, role, name in passes.reads}
        hoists = passes.prologue.ends if True in needs else ()
        graph = graph_from(csr, perm, t_perm, num_src, num_dst)
        values = passes.prologue(read, graph if hoists else None)
        kernel_inputs = [x.contiguous() for x in values[: len(needs)]]
        seed = None
        if plan.num_dropouts:
            seed = torch.randint(2**62, (1,), device=csr[0].device)
        outs = message(text, asked, kernel_inputs, seed, list(csr), perm, t_perm, num_src, num_dst)
        reads = () if passes.after is None else passes.after.reads
        after = [inputs[places[role, name]] for _, role, name in reads]
        return finish_results(passes, outs[: len(plan.outputs)], values, after, csr[0])

    fakes = [fake_of(each) for each in arguments]
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


def _insert_graph(
    module: GraphModule, body: GraphModule, arguments: Sequence[Any], like: Node, number: int
) -> list[Node]:
    """Copies a graph to the present place of another one; its results there."""
    graph, copies = module.graph, {}
    given = iter(arguments)
    for node in body.graph.nodes:
        if node.op == 'placeholder':
            copies[node] = next(given)
            continue
        if node.op == 'output':
            return [copies[each] for each in node.args[0]]
        if node.op == 'get_attr':
            name = f'_pyg_fast_{number}_{node.target}'
            setattr(module, name, getattr(body, node.target))
            new = graph.get_attr(name)
        else:
            new = graph.node_copy(node, copies.__getitem__)
        names = 'stack_trace', 'nn_module_stack'
        # The keys of Dynamo and of exported programs.
        new.meta = dict.fromkeys(('example_value', 'val'), node.meta.get('val'))
        new.meta |= {key: like.meta[key] for key in names if key in like.meta}
        copies[node] = new
    raise AssertionError


@contextmanager
def _autocast_at(order: Sequence[Node], place: Node) -> Iterator[bool]:
    """Enters the autocast under which a node runs; yields whether the graph sets any."""
    active: list[tuple] = []
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
