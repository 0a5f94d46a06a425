"""Parses a traced graph of torch's operators into a :class:`~pyg_fast.message._ir.Program`."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from . import _markers  # noqa: F401 (its operators)
from ._gathers import argument_of, gather_by_end
from ._ir import BOOLEAN, DST, EDGE, PARAM, Program, Refused, is_float, number
from ._operators import (
    ANYWHERE,
    BINARY_OPS,
    CAST,
    COPIES,
    SAME,
    SCATTERS,
    UNARY_OPS,
    VIEW,
    WHERE,
    aten,
)
from ._rows import ACROSS_EDGES
from ._softmax import softmax_of
from ._trace import NO_ROW_FOR_DROPOUT, NODES, OWN, UTILS_OF_PYG, last_place

_M = TypeVar('_M', bound=Callable[..., int | list[int | None]])


_Positions: TypeAlias = int | list[int | None]  # of the result of an operator, or of several
_Reader: TypeAlias = Callable[['Parser', Node], _Positions]
_readers: dict[object, _Reader] = {}  # by operator
_ops = torch.ops.pyg_fast_message
_COMPARISONS: dict[object, str] = {aten.max.dim: 'gt', aten.min.dim: 'lt'}
# What `empty_like` holds is not told; writes into all of it follow.
_LIKE: dict[object, int] = {
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.empty_like.default: 0,
}  # fmt: skip
_OF_FLAGS = {'mul': 'logical_and', 'add': 'logical_or'}  # results that are flags, too
_REDUCTIONS: dict[object, str] = {aten.amax.default: 'amax', aten.amin.default: 'amin'}
# Reductions over the edges of each destination, by their names in torch.
_ROW_REDUCTIONS = {'sum': 'rowsum', 'mean': 'rowmean', 'amax': 'rowmax', 'amin': 'rowmin'}
OVER_EDGES = 'a reduction over edges'
_ATTENTION = 'nn.MultiheadAttention in message has no kernel'
_MAX_LOOKED_UP = 512  # numbers of a table for each edge: gradients of an edge have as many
OVER_SOURCES = 'a softmax or another reduction over the edges of each source'
_CONSTANT = 'a constant tensor made in message'
# Operators that make tensors of numbers alone, as `arange` is decomposed.
_MAKERS = {torch.ops.prims.iota.default, aten.linspace.default, aten.eye.default, aten.eye.m}
MAX_MADE = 4096  # numbers of a tensor that the message makes
_OF_TORCH = ('aten', 'prims')
_EXACT = 2**24  # Smaller integers are numbers of float32.
_MAX_COLUMNS = 128  # Each is a value of its own.
_MAX_CHOICES = 16  # values of which a maximum is written out, as comparisons


def _reads(*targets: object) -> Callable[[_M], _M]:
    """Registers the method that reads calls of these operators."""

    def register(method: _M) -> _M:
        _readers.update(dict.fromkeys(targets, method))
        return method

    return register


def _is_float_of(node: Node) -> bool:
    """Whether an operator takes integers to floats one by one."""
    meta = node.meta.get('val')
    is_pointwise = node.target in CAST or node.target in BINARY_OPS
    return is_pointwise and isinstance(meta, Tensor) and meta.is_floating_point()


def _draws(target: Any) -> bool:
    """Whether an operator of torch draws random numbers, or writes."""
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


def _small(made: Tensor) -> Tensor:
    """Integers as numbers of a type that holds them exactly, for arithmetic and comparisons."""
    is_integer = not made.is_floating_point() and made.dtype != torch.bool
    is_small = is_integer and made.numel() > 0 and int(made.abs().max()) < _EXACT
    return made.float() if is_small else made


def _are_same(one: Tensor, other: Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
    return alike and bool(one.equal(other))


class Parser:
    """Reads a graph that was traced with the sentinel sizes `num_edges` and `num_nodes`: by its
    size a dimension is that of the edges, or of the destinations."""

    def __init__(self, program: Program, num_edges: int, num_nodes: int = NODES[0]) -> None:
        self.program = program
        self.num_edges, self.num_nodes = num_edges, num_nodes
        self.at: dict[Node, _Positions] = {}  # positions of the results
        self.slot: dict[Node, int] = {}
        self.ends: dict[Node, tuple[int, int]] = {}  # of each `edge_index`: its rows
        self.made: dict[Node, Tensor] = {}  # what the message makes of numbers alone
        # Those that kernels read: parameters behind those of the placeholders.
        self.constants: list[Tensor] = []
        self.num_dropouts = 0
        self.is_derivative = False  # whether the graph is that of a derivative
        # Results of an `aggregate`, and the container in which it returns them.
        self.rows: list[int] = []
        self.container = ''
        self.lines: dict[int, str] = {}  # the user's, of values over the edges of a destination

    def read(self, graph: GraphModule, inputs: Sequence[int] | None = None) -> list[int]:
        """The positions of the graph's results. `inputs` are the positions of its placeholders;
        without them placeholders are parameters, or inputs of nodes and edges that it lifts."""
        self.is_derivative = inputs is not None
        for node in graph.graph.nodes:
            node.target = COPIES.get(node.target, node.target)
        for slot, node in enumerate(n for n in graph.graph.nodes if n.op == 'placeholder'):
            self.slot[node] = slot
            if inputs is not None:
                self.at[node] = inputs[slot]
        for node in graph.graph.nodes:
            if node.op == 'placeholder':
                meta = node.meta.get('val')
                if inputs is None and isinstance(meta, Tensor):
                    shape = tuple(meta.shape)
                    self.at[node] = self.program.load(
                        'param', self.slot[node], shape, _name(meta.dtype)
                    )
            elif node.target is aten.empty.memory_format and not node.users:
                pass  # A buffer that only the derivative of a batch norm reads.
            elif node.op == 'output':
                return [self._value(each) for each in _args(node)[0]]
            elif node.op == 'get_attr':
                self.made[node] = getattr(graph, node.target)
            elif self._is_made(node):
                self.made[node] = self._make(node)
            else:
                try:
                    self.at[node] = self._call(node)
                except Refused as error:
                    reason = _ATTENTION if _is_of_attention(node) else error
                    raise Refused(f'{reason}{_source_line(node)}') from None
        raise AssertionError

    def _is_made(self, node: Node) -> bool:
        """Whether a tensor depends on numbers alone, and is small."""
        inputs, meta = node.all_input_nodes, node.meta.get('val')
        if self.is_derivative or not isinstance(meta, Tensor) or meta.numel() > MAX_MADE:
            return False
        if not inputs:
            return node.target in _MAKERS
        is_torchs = isinstance(node.target, OpOverload) and node.target.namespace in _OF_TORCH
        return is_torchs and not _draws(node.target) and all(each in self.made for each in inputs)

    def _make(self, node: Node) -> Tensor:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.made.__getitem__)
        with torch.inference_mode(False):
            out: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return out

    def _constant(self, tensor: Tensor) -> int:
        """The position of a tensor that is made of numbers alone."""
        if tensor.numel() == 1:
            return self.program.const(tensor.item(), tensor.dim(), _name(tensor.dtype))
        if self.is_derivative or not 0 < tensor.numel() <= MAX_MADE:
            raise Refused(_CONSTANT)
        alike = (k for k, each in enumerate(self.constants) if _are_same(each, tensor))
        k = next(alike, len(self.constants))
        if k == len(self.constants):
            self.constants.append(tensor)
        slot, dtype = len(self.slot) + k, _name(tensor.dtype)
        return self.program.load('param', slot, tuple(tensor.shape), dtype)

    def _value(self, node: object) -> int:
        if isinstance(node, Node) and node in self.made:
            return self._constant(self.made[node])
        at = self.at.get(node) if isinstance(node, Node) else None
        if not isinstance(at, int):
            raise Refused('a result that is no tensor of the edges')
        return at

    def _trailing(self, node: Node) -> tuple[int, ...]:
        """The shape of a value without the dimension of the edges."""
        meta = node.meta['val']
        shape, on_edges = tuple(meta.shape), self._is_on_edges(node)
        if not on_edges:
            if self.num_edges in shape:
                raise Refused('a parameter of the size of the edges')
            return shape
        if 0 in shape:
            raise Refused('an empty value')
        lead = self._edge_dim(node)
        if self._is_on_nodes(node):
            return shape[1:]
        if lead:
            rest = (*shape[:lead], *shape[lead + 1 :])
            if shape[lead] != self.num_edges or math.prod(rest) % self.num_edges == 0:
                raise Refused(f'{node.target} mixes edges')
            return rest
        if (
            not shape
            or shape[0] % self.num_edges
            or math.prod(shape[1:]) % self.num_edges == 0
            and (math.prod(shape[1:]) > 0)
        ):
            raise Refused(f'{node.target} mixes edges')
        times = shape[0] // self.num_edges
        return shape[1:] if times == 1 else (times, *shape[1:])

    def _is_on_edges(self, node: Node) -> bool:
        """Whether a value or one of its arguments has the dimension of the edges."""
        return any(self._edge_dim(each) is not None for each in (node, *node.all_input_nodes))

    def _edge_dim(self, node: Node) -> int | None:
        """The dimension of a value that is that of the edges, if it has one."""
        meta = node.meta.get('val')
        if not isinstance(meta, Tensor):
            return None
        if self._is_on_nodes(node):
            return 0
        sizes = enumerate(meta.shape)
        return next((k for k, n in sizes if n and n % self.num_edges == 0), None)

    def _is_on_nodes(self, node: Node) -> bool:
        """Whether a value has one row per destination."""
        meta = node.meta.get('val')
        return isinstance(meta, Tensor) and meta.shape[:1] == (self.num_nodes,)

    def _operand(self, arg: object, node: Node) -> int:
        """An argument of a pointwise operation, viewed with as many dimensions as the result."""
        program, meta = self.program, node.meta['val']
        on_edges = self._is_on_edges(node)
        rank = meta.dim() - on_edges
        if not isinstance(arg, Node):
            if not isinstance(arg, (int, float, bool)):
                raise Refused(f'{node.target} of a {type(arg).__name__}')
            dtype = _name(meta.dtype)
            return self.program.const(arg, rank, dtype if dtype != 'bool' else 'float64')
        at = self._value(arg) if arg not in self.made else self._constant(_small(self.made[arg]))
        shape = program[at].shape
        if on_edges:
            own, lead = self._edge_dim(arg), self._edge_dim(node)
            if lead is None:
                raise Refused(f'{node.target} mixes edges')
            if own is None:
                shape = (1,) * (rank + 1 - len(shape)) + shape
                if shape[lead] != 1:
                    raise Refused(f'{node.target} mixes edges')
                shape = (*shape[:lead], *shape[lead + 1 :])
            # Both must have as many dimensions after that of the edges.
            elif (dim := arg.meta['val'].dim()) - own != rank + 1 - lead or dim - 1 != len(shape):
                raise Refused(f'{node.target} mixes edges')
        return program.view(at, (1,) * (rank - len(shape)) + shape)

    def _dim(self, dim: int, node: Node) -> int:
        """A dimension, counted without that of the edges."""
        (arg,) = _args(node)[:1]
        while not isinstance(arg, Node):
            arg = arg[0]
        full = arg.meta['val'].dim()
        dim = dim % max(full, 1)
        if self._is_on_edges(node):
            lead = self._edge_dim(arg) or 0
            if dim == lead:
                raise Refused(f'{node.target} along the edges')
            if lead:
                return dim - (dim > lead)
            # A view may have merged the edges with a dimension of theirs.
            dim += len(self.program[self._value(arg)].shape) - full
        return dim

    def _call(self, node: Node) -> _Positions:
        target = node.target
        if any(each in self.ends for each in node.all_input_nodes):
            return self._row_of_edge_index(node)
        anywhere = target in ANYWHERE or target in (operator.getitem, _ops.edge_index.default)
        if not anywhere and any(map(self._edge_dim, (node, *node.all_input_nodes))):
            raise Refused(f'{target} of a tensor whose first dimension is not that of the edges')
        if target not in _readers:
            of_parameters = node.all_input_nodes and not self._is_on_edges(node)
            raise Refused(_without_kernel(node, ' of parameters' if of_parameters else ''))
        return _readers[target](self, node)

    @_reads(operator.getitem)
    def _getitem(self, node: Node) -> int:
        several, k = _args(node)
        return self.at[several][k]  # type: ignore[index]

    @_reads(_ops.lift.default)
    def _lift(self, node: Node) -> int:
        role, name = _args(node)[2:]
        meta = node.meta['val']
        return self.program.load(role, name, tuple(meta.shape)[1:], _name(meta.dtype))

    @_reads(_ops.end.default)
    def _end(self, node: Node) -> int:
        shape = node.meta['val'].shape
        if not shape or shape[0] != self.num_edges:
            raise Refused('a message whose first dimension is not that of the edges')
        return self._same(node)

    @_reads(_ops.write.default)
    def _write(self, node: Node) -> int:
        shape, at = node.meta['val'].shape, self._same(node)
        if not shape or shape[0] != self.num_edges or self.program.dependence(at) == PARAM:
            raise Refused('message sets an attribute to what has no row for each edge')
        if not is_float(self.program[at].dtype):
            raise Refused(f'message sets an attribute of {self.program[at].dtype}')
        return at

    @_reads(_ops.end_of_rows.default)
    def _end_of_rows(self, node: Node) -> int:
        """The results of an `aggregate`, values of destinations."""
        results, self.container = _args(node)
        for each in results:
            at = self._value(each)
            if self._edge_dim(each) == 0 and not self._is_on_nodes(each):
                raise Refused('aggregate returns a row for each edge, not for each node')
            of_nodes = self._is_on_nodes(each) and self.program.dependence(at) != PARAM
            if not of_nodes or self.program[at].dtype != _name(each.meta['val'].dtype):
                raise Refused('aggregate returns a tensor that has no row for each node')
            self.rows.append(at)
        return self.rows[0]

    @_reads(_ops.row.default)
    def _row(self, node: Node) -> int:
        meta = node.meta['val']
        return self.program.load('row', _args(node)[2], tuple(meta.shape)[1:], _name(meta.dtype))

    @_reads(_ops.index.default)
    def _index(self, node: Node) -> int:
        return self.program.add('index', (), (), (), 'int64', EDGE)

    @_reads(_ops.source.default)
    def _source(self, node: Node) -> int:
        return self.program.add('source', (), (), (), 'int64', EDGE)

    @_reads(_ops.edge_index.default)
    def _edge_index(self, node: Node) -> list[int | None]:
        index, source = self._index(node), self._source(node)
        self.ends[node] = (index, source) if _args(node)[1] else (source, index)
        return list(self.ends[node])

    def _row_of_edge_index(self, node: Node) -> _Positions:
        """One row of an `edge_index`, or both."""
        edge_index, *rest = _args(node)
        if node.target is aten.select.int and rest[0] in (0, -2):
            return self.ends[edge_index][rest[1]]
        if node.target is operator.getitem or (
            node.target is aten.unbind.int and (not rest or rest[0] in (0, -2))
        ):
            return list(self.ends[edge_index])
        raise Refused(f"{node.target} of 'edge_index' has no kernel")

    @_reads(*SAME)
    def _same(self, node: Node) -> int:
        return self._value(node.args[0])

    @_reads(aten.detach.default)
    def _detach(self, node: Node) -> int:
        x = self._same(node)
        return x if self.is_derivative else self.program.detach(x)

    @_reads(*UNARY_OPS)
    def _unary(self, node: Node) -> int:
        x, dtype = self._require_float(self._same(node)), _name(node.meta['val'].dtype)
        out = self.program.pointwise(UNARY_OPS[node.target], x, dtype=dtype)
        return self._match_shape(out, node)

    @_reads(*WHERE)
    def _where(self, node: Node) -> int:
        parts = [self._operand(arg, node) for arg in node.args]
        out = self.program.pointwise('where', *parts, dtype=_name(node.meta['val'].dtype))
        return self._match_shape(out, node)

    @_reads(*CAST)
    def _cast(self, node: Node) -> int:
        x, dtype = self._same(node), _name(node.meta['val'].dtype)
        if not is_float(dtype) and dtype != self.program[x].dtype:
            # As of `one_hot`, which are converted again.
            is_flag = self.program[x].dtype == 'bool' and all(map(_is_float_of, node.users))
            if not is_flag or dtype == 'bool':
                raise Refused(f'a conversion to {dtype}')
            dtype = 'float32'  # of the same numbers
        return self.program.cast(x, dtype)

    @_reads(*SCATTERS)
    def _row_reduction(self, node: Node) -> int:
        """A reduction over the edges of each destination, in a softmax or an aggregation."""
        program, target, args = self.program, node.target, _args(node)
        zeros, dim, index, x = args[:4]
        start, shapes = program[self._value(zeros)], [each.meta['val'].shape for each in args[2:4]]
        if target is aten.index_add.default:
            shapes[0] = (*shapes[0], *shapes[1][1:])
        if self._is_index(index, 'source'):
            raise Refused(OVER_SOURCES)
        if (
            dim != 0 or not self._is_index(index) or not self._is_on_nodes(zeros)
            or start.op != 'const' or self._edge_dim(x) != 0
            or self._is_on_nodes(x) or shapes[0] != shapes[1]
            or zeros.meta['val'].shape[1:] != shapes[1][1:] or node.kwargs.get('alpha', 1) != 1
        ):  # fmt: skip
            raise Refused(f'{target} has no kernel')
        reduce = args[4] if target is aten.scatter_reduce.two else 'sum'
        includes = reduce == 'sum' or node.kwargs.get('include_self', True)
        # Where no edge ends the result is what it starts from.
        begin, neutral = number(start), {'amax': -math.inf, 'amin': math.inf}.get(reduce)
        if reduce not in _ROW_REDUCTIONS or begin not in ((neutral or 0,) if includes else (0,)):
            raise Refused(f'{target} of {reduce!r} from {begin} has no kernel')
        if includes and reduce == 'mean':
            raise Refused(f'{target} of a mean that includes zeros')
        op = _ROW_REDUCTIONS[reduce]
        at = self._value(x)
        value = program[at]
        if op == 'rowsum' and program.dependence(at) == PARAM:
            count = program.add('degree', (), (), (), value.dtype, DST)
            self.lines.setdefault(count, last_place(node.meta.get('stack_trace') or ''))
            degree = program.view(count, (1,) * len(value.shape))
            return program.pointwise('mul', at, degree, dtype=value.dtype)
        attrs = (begin,) if begin else ()
        out = program.add(op, (at,), attrs, value.shape, value.dtype, DST)
        self.lines.setdefault(out, last_place(node.meta.get('stack_trace') or ''))
        return out

    def _is_index(self, node: Node, end: str = 'index') -> bool:
        """Whether a value is the destination of each edge, or another end."""
        at = self._value(node)
        while self.program[at].op in ('view', 'expand'):
            (at,) = self.program[at].args
        return self.program[at].op == end

    @_reads(aten.index_select.default, aten.index.Tensor)
    def _gather_from_row(self, node: Node) -> int:
        """The value of the destination of each edge."""
        args = _args(node)
        if any(self._columns(each) for each in node.all_input_nodes):
            return self._choose_columns(node)
        x, dim, index = args if len(args) == 3 else (args[0], 0, args[1][0])
        several = len(args) == 2 and len(args[1]) != 1
        along = not several and dim % x.meta['val'].dim() == 0
        if along and index.meta['val'].dim() == 1:
            at, end = self._value(x), self._value(index)
            row = gather_by_end(self.program, at, end, self._is_on_nodes(x))
            if row is not None:
                return row
        if along and self.program.dependence(self._value(x)) == PARAM and not self._is_on_nodes(x):
            return self._look_up(x, index, wraps=len(args) == 2)
        if not along or not self._is_on_nodes(x) or not self._is_index(index):
            raise Refused(f'{node.target} has no kernel')
        return self._value(x)

    def _columns(self, index: object) -> list[int]:
        """Numbers of channels that the code has; none if the index is another."""
        made = self.made.get(index) if isinstance(index, Node) else None
        fits = made is not None and made.dim() == 1 and made.dtype == torch.int64
        return made.tolist() if fits else []  # type: ignore[union-attr]

    def _choose_columns(self, node: Node) -> int:
        """Channels by numbers that the code has, as in `x[:, [1, 0]]`, or `x[:, [0, 1], [1, 0]]` of
        matrices."""
        x, *rest = _args(node)
        by_dim = {rest[0]: rest[1]} if len(rest) == 2 else dict(enumerate(rest[0]))
        by_dim = {dim: index for dim, index in by_dim.items() if index is not None}
        lists = [self._columns(index) for index in by_dim.values()]
        dims = [self._dim(dim, node) for dim in by_dim]
        if not all(lists) or dims != list(range(dims[0], dims[0] + len(dims))):
            raise Refused(_CONSTANT)
        at, dim, flat = self._value(x), dims[0], [0] * max(map(len, lists))
        shape = self.program[at].shape
        for each, columns in zip(dims, lists, strict=True):
            columns = columns * (len(flat) // len(columns))
            size = shape[each]
            if not all(-size <= column < size for column in columns):  # Torch's error tells.
                raise Refused(f'an index of channels beyond {size}')
            flat = [k * size + column % size for k, column in zip(flat, columns, strict=True)]
        if len(flat) > _MAX_COLUMNS:
            raise Refused(f'an index of more than {_MAX_COLUMNS} channels')
        at = self.program.view(
            at, (*shape[:dim], math.prod(shape[dim : dims[-1] + 1]), *shape[dims[-1] + 1 :])
        )
        return self.program.cat([self.program.slice(at, dim, k, 1) for k in flat], dim)

    def _look_up(self, table: Node, index: Node, wraps: bool = False) -> int:
        """The rows of a parameter by integers of the edge, of which negative ones may count from
        the end."""
        program, at, which = self.program, self._value(table), self._value(index)
        if program[which].dtype not in ('int64', 'int32') or program.dependence(which) != EDGE:
            raise Refused('an index that is no integer of the edge')
        if any(program[each].op in ACROSS_EDGES for each in program.reachable([which])):
            raise Refused('a table by indices of nodes')
        self._require_float(at)
        out = program.lookup(at, which, wraps)
        if math.prod(program[out].shape) > _MAX_LOOKED_UP:
            raise Refused(f'{math.prod(program[out].shape)} numbers of a table for each edge')
        return out

    @_reads(aten.embedding.default)
    def _embedding(self, node: Node) -> int:
        args, program = _args(node), self.program
        options = dict(zip(('padding', 'by_frequency', 'sparse'), args[2:], strict=False))
        (table, index), padding = args[:2], options.pop('padding', -1)
        if any(options.values()) or program.dependence(self._value(table)) != PARAM:
            raise Refused('an embedding with sparse or scaled gradients')
        if index.meta['val'].dim() == 1:
            row = gather_by_end(program, self._value(table), self._value(index), False)
            if row is not None:
                if padding >= 0:
                    raise Refused('an embedding of nodes with padding_idx')
                return row
        out = self._look_up(table, index)
        if padding < 0:
            return out
        which, rank = self._value(index), len(program[out].shape)
        place = program.const(padding, rank, program[which].dtype)
        shape = program[which].shape
        which = program.view(which, (*shape, *(1,) * (rank - len(shape))))
        at_padding = program.pointwise('eq', which, place)
        return program.pointwise('where', at_padding, program.detach(out), out)

    @_reads(
        aten.full.default, aten.scalar_tensor.default, aten.full_like.default,
        aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default,
    )  # fmt: skip
    def _fill(self, node: Node) -> int:
        """A tensor of one number."""
        (value,) = _args(node)[-1:]
        if node.target in _LIKE:
            value = _LIKE[node.target]
        if not isinstance(value, (int, float, bool)):
            raise Refused(f'{node.target} of a {type(value).__name__}')
        dtype = _name(node.meta['val'].dtype)
        const = self.program[self.program.const(value, 0, dtype)]
        return self.program.add('const', (), const.attrs, self._trailing(node), dtype)

    @_reads(_ops.dropout.default)
    def _dropout(self, node: Node) -> int:
        x, p = self._same(node), float(_args(node)[1])
        value = self.program[x]
        if self.program.dependence(x) == 0:
            raise Refused(NO_ROW_FOR_DROPOUT)
        self.num_dropouts += 1
        keep = self.program.keep(self.num_dropouts - 1, p, self._trailing(node), value.dtype)
        return self.program.pointwise('mul', x, keep, dtype=value.dtype)

    def _require_float(self, x: int) -> int:
        if not is_float(self.program[x].dtype) and self.program[x].dtype != 'bool':
            raise Refused(f'arithmetic of {self.program[x].dtype}{argument_of(self.program, x)}')
        return x

    def _match_shape(self, at: int, node: Node) -> int:
        """Expands a value to the shape of the traced result."""
        trailing = self._trailing(node)
        if self.program[at].shape != trailing:
            at = self.program.expand(at, trailing)
        return at

    @_reads(*BINARY_OPS)
    def _binary(self, node: Node) -> int:
        program, meta, op = self.program, node.meta['val'], BINARY_OPS[node.target]
        if node.kwargs.get('rounding_mode') is not None:
            raise Refused('a division that rounds')
        a, b = (self._operand(arg, node) for arg in node.args[:2])
        scale = _kwarg(node, 'alpha', 1)
        if scale != 1:
            factor = program.const(scale, len(program[b].shape), program[b].dtype)
            b = program.pointwise('mul', b, factor)
        dtype = _name(meta.dtype)
        if dtype != 'bool':
            for each in (a, b):
                self._require_float(each)
            if not is_float(dtype):
                raise Refused(f'arithmetic of {dtype}')
        else:
            op = _OF_FLAGS.get(op, op)
            if op not in BOOLEAN or scale != 1:
                raise Refused('arithmetic of bool')
            a, b = self._comparable(a, b), self._comparable(b, a)
        softmax = softmax_of(program, a, b) if op == 'div' else None
        if softmax is not None:
            return self._match_shape(program.cast(softmax, dtype), node)
        return self._match_shape(program.pointwise(op, a, b, dtype=dtype), node)

    def _comparable(self, x: int, other: int) -> int:
        """An integer in a dtype in which comparisons are exact, or as torch rounds it."""
        own, against = self.program[x], self.program[other]
        is_number = against.op == 'const'
        if is_float(own.dtype) or own.dtype == 'bool':
            return x
        if against.dtype in ('float32', 'float64') and not is_number:
            return x
        limit = abs(number(against)) if is_number else math.inf
        if limit < _EXACT:  # Rounding does not carry an integer over this number.
            return x
        if own.dtype == 'int64' and limit >= 2**53:
            raise Refused(f'a comparison of int64{argument_of(self.program, x)}')
        return self.program.cast(x, 'float64')

    @_reads(aten.mm.default, aten.addmm.default)
    def _linear(self, node: Node) -> int:
        program = self.program
        args = list(_args(node))
        bias = args.pop(0) if node.target is aten.addmm.default else None
        _require_same_dtype(*args)
        x, weight = (self._value(arg) for arg in args)
        on_edges = self._is_on_edges(node)
        if on_edges and (program.dependence(weight) != 0 or program.dependence(x) == 0):
            raise Refused('a product with a matrix that varies by edge')
        out = program.mm(self._require_float(x), self._require_float(weight))
        if not on_edges:
            shape = program[out].shape
        else:
            shape = self._trailing(node)
            if program[out].shape != shape:
                raise Refused('a product of mixed edges')
        if bias is not None:
            if node.kwargs.get('alpha', 1) != 1 or node.kwargs.get('beta', 1) != 1:
                raise Refused('addmm with factors')
            at = self._value(bias)
            own = program[at].shape
            if program.dependence(at) != 0 or len(own) > len(shape):
                raise Refused('addmm of a matrix')
            at = program.view(at, (1,) * (len(shape) - len(own)) + own)
            out = program.pointwise('add', out, at, dtype=_name(node.meta['val'].dtype))
        return out

    @_reads(aten.bmm.default)
    def _bmm(self, node: Node) -> int:
        program = self.program
        _require_same_dtype(*_args(node))
        a, b = (self._value(arg) for arg in node.args)
        lead, (m, k), n = program[a].shape[:-2], program[a].shape[-2:], program[b].shape[-1]
        if not self._is_on_edges(node):
            if math.prod(lead) != 1:
                raise Refused('a batched product of parameters alone')
            out = program.mm(program.view(a, (m, k)), program.view(b, (k, n)))
            return program.view(out, (*lead, m, n))
        if program.dependence(a) == 0 or program[b].shape[:-2] != lead:
            raise Refused('a batched product of parameters')
        if program.dependence(b) == 0:  # A matrix repeated for every edge.
            if lead:
                raise Refused('a batched product of parameters')
            return program.mm(self._require_float(a), self._require_float(b))
        a, b = program.view(a, (*lead, m, k, 1)), program.view(b, (*lead, 1, k, n))
        both = program.pointwise('mul', a, b)
        return program.view(program.reduce('sum', both, (len(lead) + 1,)), (*lead, m, n))

    @_reads(aten.cat.default)
    def _cat(self, node: Node) -> int:
        args = _args(node)
        dim = self._dim(args[1] if len(args) > 1 else 0, node)
        xs = [self._value(arg) for arg in args[0]]
        if self._is_on_edges(node) and not all(self._is_on_edges(arg) for arg in args[0]):
            raise Refused('cat of parameters with values of the edges')
        if len({self._edge_dim(arg) for arg in args[0]}) > 1:
            raise Refused(f'{node.target} mixes edges')
        return self._match_shape(self.program.cat(xs, dim), node)

    @_reads(*VIEW, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)
    def _view(self, node: Node) -> int:
        old, new = self._edge_dim(_args(node)[0]), self._edge_dim(node)
        if old or new:  # The edges stay between the same values.
            shapes = _args(node)[0].meta['val'].shape, node.meta['val'].shape
            parts = [
                (math.prod(shape[:lead]), shape[lead])
                for shape, lead in zip(shapes, (old, new), strict=True) if lead is not None
            ]  # fmt: skip
            if len(parts) < 2 or parts[0] != parts[1] or parts[0][1] != self.num_edges:
                raise Refused(f'{node.target} mixes edges')
        return self.program.view(self._same(node), self._trailing(node))

    @_reads(aten.expand.default)
    def _expand(self, node: Node) -> int:
        program, x = self.program, self._same(node)
        shape, trailing, rank = program[x].shape, self._trailing(node), node.meta['val'].dim()
        if self._is_on_edges(node) and self._edge_dim(_args(node)[0]) is None:
            shape = ((1,) * (rank - len(shape)) + shape)[1:]
        shape = (1,) * (len(trailing) - len(shape)) + shape
        return program.expand(program.view(x, shape), trailing)

    @_reads(aten.permute.default, aten.t.default, aten.transpose.int)
    def _permute(self, node: Node) -> int:
        x = self._same(node)
        program, args = self.program, _args(node)
        rank = args[0].meta['val'].dim()
        order = list(range(rank))
        if node.target is aten.permute.default:
            order = [k % rank for k in args[1]]
        else:
            a, b = args[1:3] if node.target is aten.transpose.int else (0, rank - 1)
            order[a % rank], order[b % rank] = order[b % rank], order[a % rank]
        if self._is_on_edges(node):
            self._trailing(node)
            lead = self._edge_dim(args[0])
            if lead is None or rank - 1 != len(program[x].shape):
                raise Refused(f'{node.target} mixes edges')
            order = [k - (k > lead) for k in order if k != lead]
        return program.permute(x, tuple(order))

    @_reads(aten.slice.Tensor, aten.select.int)
    def _slice(self, node: Node) -> int:
        x = self._same(node)
        program, args = self.program, _args(node)
        if node.target is aten.select.int:
            dim = self._dim(args[1], node)
            index = args[2] % program[x].shape[dim]
            return program.view(program.slice(x, dim, index, 1), self._trailing(node))
        if self._is_whole(node):
            return x
        dim = self._dim(args[1] if len(args) > 1 else 0, node)
        size = program[x].shape[dim]
        start, stop, step = slice(*args[2:5]).indices(size)
        count = max(0, -((start - stop) // step))
        if step == 1 or count * step != size or start >= step:
            return program.slice(x, dim, start, count, step)
        # Such numbers are a column of rows of `step` numbers: its gradient has no steps.
        shape = program[x].shape
        columns = program.view(x, (*shape[:dim], count, step, *shape[dim + 1 :]))
        return program.view(program.slice(columns, dim + 1, start, 1), self._trailing(node))

    @_reads(aten.slice_backward.default, aten.select_backward.default)
    def _pad_slice(self, node: Node) -> int:
        """The gradient of a slice: padded by zeros."""
        x = self._same(node)
        program, args = self.program, _args(node)
        trailing, rank = self._trailing(node), node.meta['val'].dim()
        dim = args[2] % rank - 1 if self._is_on_edges(node) else args[2] % rank
        size = trailing[dim]
        if node.target is aten.select_backward.default:
            start, step = args[3] % size, 1
            x = program.view(x, (*trailing[:dim], 1, *trailing[dim + 1 :]))
        else:
            start, _, step = slice(*args[3:6]).indices(size)
        if dim < 0 or step != 1 or rank != len(trailing) + self._is_on_edges(node):
            raise Refused('the gradient of a slice with steps')
        dtype, own = program[x].dtype, program[x].shape[dim]
        parts = []
        for count, part in ((start, None), (own, x), (size - start - own, None)):
            if part is not None:
                parts.append(part)
            elif count:
                zero = program[self.program.const(0, 0, dtype)]
                shape = (*trailing[:dim], count, *trailing[dim + 1 :])
                parts.append(program.add('const', (), zero.attrs, shape, dtype))
        return program.cat(parts, dim)

    def _is_whole(self, node: Node) -> bool:
        """Whether a slice takes a whole dimension, perhaps that of edges."""
        args = _args(node)
        same = node.meta['val'].shape == args[0].meta['val'].shape
        return same and (len(args) < 5 or args[4] == 1)

    @_reads(aten.split_with_sizes.default, aten.split.Tensor, aten.unbind.int)
    def _split(self, node: Node) -> list[int | None]:
        x = self._same(node)
        program, args = self.program, _args(node)
        unbind = node.target is aten.unbind.int
        place = 1 if unbind else 2
        dim = self._dim(args[place] if len(args) > place else 0, node)
        size = program[x].shape[dim]
        if unbind:
            sizes = [1] * size
        elif node.target is aten.split.Tensor:
            each = args[1]
            sizes = [min(each, size - k) for k in range(0, size, each)]
        else:
            sizes = list(args[1])
        out: list[int | None] = []
        start = 0
        for each in sizes:
            part = program.slice(x, dim, start, each)
            if unbind:
                shape = program[part].shape
                part = program.view(part, (*shape[:dim], *shape[dim + 1 :]))
            out.append(part)
            start += each
        return out

    @_reads(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
    def _reduce(self, node: Node) -> int:
        x = self._same(node)
        program, args = self.program, _args(node)
        target = node.target
        counts = program[x].dtype == 'bool' and target is aten.sum.dim_IntList
        # A number of flags is small: exact in every dtype.
        x = program.cast(x, 'float32') if counts else self._require_float(x)
        rank = args[0].meta['val'].dim()
        dims = args[1] if len(args) > 1 and args[1] is not None else []
        if isinstance(dims, int):
            dims = [dims]
        if not dims:
            dims = list(range(rank))
        lead = self._edge_dim(args[0]) or 0
        if self._is_on_edges(node) and any(k % rank == lead for k in dims):
            raise Refused(OVER_EDGES)
        places = [self._dim(k, node) for k in dims]
        out = program.reduce(_REDUCTIONS.get(target, 'sum'), x, places)
        if target is aten.mean.dim:
            count = math.prod(program[x].shape[k] for k in places)
            divisor = self.program.const(count, len(program[out].shape), program[out].dtype)
            out = program.pointwise('div', out, divisor)
        dtype = 'float32' if counts else _name(node.meta['val'].dtype)
        return program.cast(program.view(out, self._trailing(node)), dtype)

    @_reads(*_COMPARISONS)
    def _choose(self, node: Node) -> list[int | None]:
        """A maximum or minimum whose gradient goes to the first of equal values, not to all."""
        x = self._same(node)
        program, args = self.program, _args(node)
        target = node.target
        dim = self._dim(args[1], node)
        size = program[x].shape[dim]
        if size > _MAX_CHOICES:
            raise Refused(f'{target} of {size} values')
        out = program.slice(self._require_float(x), dim, 0, 1)
        for k in range(1, size):
            each = program.slice(x, dim, k, 1)
            better = program.pointwise(_COMPARISONS[target], each, out)
            nan = program.pointwise('ne', each, each)
            better = program.pointwise('logical_or', better, nan)
            out = program.pointwise('where', better, each, out)
        shape = program[out].shape
        keeps = len(args) > 2 and args[2]
        out = out if keeps else program.view(out, (*shape[:dim], *shape[dim + 1 :]))
        return [out, None]  # Nothing reads the place of the maximum.


def _args(node: Node) -> tuple[Any, ...]:
    """The arguments of a call; their types depend on the operator."""
    return node.args


def _require_same_dtype(a: Node, b: Node) -> None:
    """Leaves a product of two dtypes to PyG's code, in which torch raises an error."""
    one, two = (_name(node.meta['val'].dtype) for node in (a, b))
    if one != two:
        raise Refused(f'a product of dtypes {one} and {two}')


def _kwarg(node: Node, name: str, default: float) -> Any:
    return node.kwargs.get(name, default)


def _name(dtype: torch.dtype) -> str:
    return str(dtype)[len('torch.') :]


def _written(node: Node) -> object:
    """The operator that the user wrote: torch may have decomposed it into others."""
    return node.meta.get('original_aten') or node.target


# Operators that reduce all dimensions of a value.
_OF_ALL = [f'aten.{name}.default' for name in ('max', 'min', 'mean', 'sum', 'prod', 'std', 'var')]


def _without_kernel(node: Node, of: str) -> str:
    """Names an operator without a kernel, with what it is `of`, and all others of its graph."""
    if str(_written(node)) in _OF_ALL and not of:
        return OVER_EDGES
    others = (
        _written(each) for each in node.graph.nodes
        if each.op == 'call_function' and each.users and each.target not in {*_readers, *_MAKERS}
    )  # fmt: skip
    first, *rest = dict.fromkeys(map(str, (_written(node), *others)))
    return f'{first}{of} has no kernel' + (f', nor have {", ".join(rest)}' if rest else '')


def _is_of_attention(node: Node) -> bool:
    """Whether a module of torch called an operator whose operators say little to its user."""
    modules = (node.meta.get('nn_module_stack') or {}).values()
    return any(
        getattr(kind, '__name__', str(kind)).endswith('MultiheadAttention') for _, kind in modules
    )


def _source_line(node: Node) -> str:
    """The line of the code that called an operator, if it is known, and not that of a function of
    PyG which the code calls."""
    lines = [line.strip() for line in (node.meta.get('stack_trace') or '').splitlines()]
    places = [
        k for k, line in enumerate(lines) if line.startswith('File "') and UTILS_OF_PYG not in line
    ]
    if not places or OWN in lines[places[-1]]:  # It is what calls the message.
        return ''
    code = lines[places[-1] + 1] if places[-1] + 1 < len(lines) else ''
    return f' ({lines[places[-1]]}: {code})'
