"""The region of a message in a graph that :func:`torch.compile` captured.

It is what varies per edge between the markers that gather and those that aggregate, see
:mod:`~pyg_fast.message._markers`; :mod:`~pyg_fast.message._replace` puts an op in its place.
"""

import operator
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Argument

from . import _markers
from ._capture import (
    FACTORIES,
    SIZE_FUNCTIONS,
    CapturedMessage,
    SizedInterpreter,
    capture_twice,
    check_functions,
    dropout_of,
    mark_dropouts,
    read_message,
)
from ._ir import Refused
from ._parse import MAX_MADE
from ._trace import Like
from ._traffic import Traffic, fake_of

_ops = torch.ops.pyg_fast_message
_CONTEXT = ('_enter_autocast', '_exit_autocast', '_set_grad_enabled')


def is_call(node: Node, op: OpOverload) -> bool:
    return node.op == 'call_function' and node.target in (op, op.overloadpacket)


def _is_float(node: Node) -> bool:
    value = fake_of(node)
    return isinstance(value, Tensor) and value.is_floating_point()


def _ends_region(node: Node) -> bool:
    return is_call(node, _markers.aggregate) or is_call(node, _markers.rows)


def is_marker(node: Node) -> bool:
    return getattr(node.target, 'namespace', '') == _markers.NAMESPACE


def _dim_of(marker: Node) -> int:
    """The dimension of nodes or edges in what a marker gathers or aggregates."""
    args: Any = marker.args
    for op, place in ((_markers.gather, 4), (_markers.aggregate, 8)):
        if is_call(marker, op) and place < len(args):  # An exported graph leaves a zero out.
            return int(args[place])
    return 0


class RegionInput(NamedTuple):
    """An argument of the kernel: a node of the graph, its role and name, and the dimension of nodes
    or edges in it."""

    node: Node
    role: str
    name: str
    dim: int


# They make tensors of numbers.
_MAKERS = (torch.arange, torch.linspace, torch.eye, torch.tensor)


def _is_made(node: Node) -> bool:
    """Whether a node is a constant of a message."""
    value = fake_of(node)
    is_made = node.target in _MAKERS and not node.all_input_nodes and isinstance(value, Tensor)
    return is_made and isinstance(value.numel(), int) and value.numel() <= MAX_MADE


def _lift(graph: FxGraph, x: RegionInput, number: int, edges: Node, num_nodes: Node) -> Node:
    """What the message reads of an input, in the graph of the message alone."""
    place = graph.placeholder(f'input_{number}')
    if x.role == 'row':
        return graph.call_function(_ops.row.default, (place, num_nodes, x.name))
    lifted = graph.call_function(_ops.lift.default, (place, edges, x.role, x.name))
    return graph.call_method('movedim', (lifted, 0, x.dim)) if x.dim else lifted


class Region:
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
        self.of_rows = is_call(first, _markers.rows)  # whether it holds the layer's own `aggregate`
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
            if is_call(node, _markers.edge) and (integers := self._integers_of(node)):
                self.looked_up[node] = integers
        self.integers = set().union(*self.looked_up.values())
        self.depends = self._edge_dependent(order)
        if any(end.op == 'placeholder' for end in self.ends):  # An earlier graph computed it.
            raise Refused('a graph break in message')
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
        self.late = self._find_late(order)

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
        """Refuses a message of which values are read elsewhere that it writes into."""
        written = set().union(*(self.traffic.into[node] for node in self.nodes))
        for node in (*self.nodes, *self.frontier):
            is_own = node in self.own or is_call(node, _markers.gather)
            if self.traffic.result[node].isdisjoint(written) or not is_own:
                continue
            elsewhere = any(u not in self.own and u not in aggregates for u in node.users)
            if node in self.depends and elsewhere:
                raise Refused(f'{node} is read elsewhere, of a message that writes into it')

    def check_drawn_once(self, writes: Sequence[Node]) -> None:
        """Refuses a message that drops out if others read values of it that the op does not write:
        the graph would draw these again."""
        if not any(call.is_on for node in self.nodes if (call := dropout_of(node))):
            return
        for node in set(self.nodes).difference(writes):
            if any(map(self._reads_elsewhere, node.users)):
                raise Refused(f'{node} is read elsewhere, of a message that drops out')

    def read_elsewhere(self) -> list[Node]:
        """Values of edges that others read, too: the op writes them, or the graph computes them
        again."""
        return [
            node for node in self.nodes
            if _is_float(node) and any(self._reads_elsewhere(user) for user in node.users)
        ]  # fmt: skip

    def _reads_elsewhere(self, user: Node) -> bool:
        """Whether a reader of a value is none of the message, and no size of it."""
        is_value = user.op == 'output' or isinstance(fake_of(user), Tensor)
        return user not in self.own and not _ends_region(user) and is_value

    def _find_late(self, order: Sequence[Node]) -> list[Node]:
        """Readers of values of the message that stand before its end, and may as well run after
        it, such as a mean of what an attribute holds."""
        reads = set(self.nodes)
        for node in order:
            if node not in self.outer and not reads.isdisjoint(node.all_input_nodes):
                reads.add(node)
        late: dict[Node, None] = {}
        written: set[int] = set()  # storages, between a node and the end
        for node in reversed(order):
            if getattr(node.target, '__name__', '') in _CONTEXT:
                break
            inputs = set().union(*(self.traffic.result[each] for each in node.all_input_nodes))
            is_pure = not self.traffic.into[node] and not is_marker(node)
            stays = node in self.own or node not in reads or not inputs.isdisjoint(written)
            ends_late = all(user in late or self.place[user] >= self.end for user in node.users)
            if is_pure and ends_late and not stays:
                late[node] = None
            written |= self.traffic.into[node]
        return list(reversed(late))

    def is_later_reader(self, user: Node) -> bool:
        """Whether a reader of a value runs after the message, or may."""
        is_after = user in self.late or self.place[user] >= self.end
        return is_after and not _ends_region(user)

    def can_write(self, node: Node) -> bool:
        """Whether the op can write a value: all others read it after the message, and none writes
        into it, where others may have views of it."""
        readers = filter(self._reads_elsewhere, node.users)
        return (
            self.dim == 0 and node not in self.written and all(map(self.is_later_reader, readers))
        )

    def _is_input(self, node: Node) -> bool:
        """Whether values that vary per edge or destination start here."""
        inputs = _markers.gather, _markers.edge, _markers.node, _markers.sources, _markers.ends
        if node is self.index or node in self.integers:
            return True
        return node not in self.looked_up and any(is_call(node, each) for each in inputs)

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
                ends = is_call(node, _markers.aggregate) or is_call(node, _markers.rows)
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

    def capture(
        self, writes: Sequence[Node] = ()
    ) -> tuple[CapturedMessage, list[RegionInput], dict[tuple[str, str | int], int]]:
        """The message, with values of edges that it `writes`; its inputs; and by role and name the
        places of these."""
        graph, inputs = self._graph(writes)
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
        captured = capture_twice(capture)
        most = captured.most_nodes
        if most < sys.maxsize and not statically_known_true(fake_of(self.num_dst) <= most):
            raise Refused('a number of nodes in message that is too small')
        for k in range(len(captured.constants)):  # as if they were further arguments
            places['param', len(inputs) + k + 2] = len(inputs) + k
        return captured, inputs, places

    def _sizes(self) -> tuple[str, str]:
        return str(fake_of(self.index).shape[0]), str(fake_of(self.num_dst))

    def _graph(self, writes: Sequence[Node]) -> tuple[FxGraph, list[RegionInput]]:
        """The graph of the message alone, whose arguments are the edges, the number of destinations
        and the inputs; and the inputs."""
        graph = FxGraph()
        edges, num_nodes = graph.placeholder('edges'), graph.placeholder('nodes')
        num_edges = graph.call_method('size', (edges, 0))
        num_edges.meta['val'] = fake_of(self.index).shape[0]
        num_nodes.meta['val'] = fake_of(self.num_dst)
        inputs: list[RegionInput] = []
        copies: dict[Node, Any] = {}
        fixed = {
            str(n) for node in self.frontier if isinstance(fake_of(node), Tensor)
            for n in fake_of(node).shape
        } - set(self._sizes())  # fmt: skip
        for node in self.frontier:
            value = fake_of(node)
            if node is self.index:
                copies[node] = graph.call_function(_ops.index.default, (edges,))
            elif is_call(node, _markers.sources) or is_call(node, _markers.ends):
                copies[node] = self._ends(graph, node, edges)
            elif self._is_input(node):
                inputs.append(self._input(node, len(inputs)))
                copies[node] = _lift(graph, inputs[-1], len(inputs), edges, num_nodes)
            elif _is_made(node):
                copies[node] = graph.node_copy(node)
            elif isinstance(value, Tensor):
                inputs.append(RegionInput(node, 'param', '', 0))
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
        written = [graph.call_function(_ops.write.default, (copies[node],)) for node in writes]
        graph.output((end, *written))
        return graph, inputs

    def _input(self, node: Node, number: int) -> RegionInput:
        if node in self.integers:
            return RegionInput(node, 'edge', f'{node.name} {number}', 0)
        args: Any = node.args
        if is_call(node, _markers.gather):
            return RegionInput(args[0], args[2], f'{args[3]} {number}', _dim_of(node))
        role = 'row' if is_call(node, _markers.node) else 'edge'
        return RegionInput(args[0], role, f'{args[2]} {number}', 0)

    def _ends(self, graph: FxGraph, node: Node, edges: Node) -> Node:
        """The sources of the edges, or both ends."""
        if node.args[1] is not self.index:
            raise Refused('the ends of other edges')
        if is_call(node, _markers.sources):
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
        if not (makes or name in SIZE_FUNCTIONS) or len(node.args) <= place:
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
