"""Plans a captured message: what runs on nodes before the passes, in them, and after them."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ..graph.small_graphs import Work
from ._capture import CapturedMessage
from ._cpu import check_maps
from ._fold import fold_message, fold_score, maps_edge_features
from ._ir import (
    DST,
    EDGE,
    PARAM,
    POINTWISE,
    REDUCTIONS,
    SRC,
    Program,
    Refused,
    Value,
    is_float,
    promote_dtypes,
)
from ._rows import Reduced, RowPart
from ._tile_values import HALF, WIDE
from ._tiles import check_tiles
from ._triton import Out

# Kernels map features of an edge up to this many, and on CUDA with up to so many products; wider
# maps are hoisted: BLAS makes a tensor of all edges.
_MAX_EDGE_INPUTS, _MAX_PRODUCTS = 128, 2048
# A sum of more terms keeps its order.
_MAX_TERMS = 64
_MAX_SUNK = 4  # terms that are summed apart, to map them after the sum
_MAX_LINEAR_TERMS = 4 * _MAX_SUNK  # before those of one value are joined
Term = tuple[int, int | None]  # a value of the edge, and the matrix that maps it
_ROLE = {PARAM: 'param', SRC: 'src', DST: 'dst'}


class Output(NamedTuple):
    """A value of the message, reduced over the edges of each destination; `edge` is not reduced,
    and stands before all others. For a variance the value is the square of the message, and the
    output before it its mean."""

    at: int
    reduce: str
    dtype: str


class Input(NamedTuple):
    """An input of the passes: a value of the prologue."""

    role: str
    at: int  # in the program of the prologue
    shape: tuple[int, ...]
    dtype: str


class Tail(NamedTuple):
    """A linear map of the last outputs, joined, by values of the prologue; an output before them is
    added."""

    weight: int
    bias: int | None
    shape: tuple[int, ...]
    heads: int = 1  # each mapped by its own columns of the weight
    parts: int = 1  # how many outputs it maps
    folds: bool = False  # a map of edge features that became one of nodes


_ANGLES = {'atan2', 'acos', 'asin', 'atan'}


class Plan(NamedTuple):
    """How a message runs.

    :obj:`prologue` is the program of the :obj:`inputs`, on rows of nodes and on parameters.
    :obj:`message` is the program of one edge, whose loads count the inputs, and :obj:`outputs` are
    what is aggregated of it. :obj:`softmaxes` are operations in it, of a score and of the largest
    score and the reciprocal sum of exponentials of its destination. With :obj:`in_blocks` torch's
    operators run the message over blocks of edges in place of a kernel; with :obj:`in_tiles` a
    kernel over tiles of edges does, which has matrix products. :obj:`rows` is what the layer's
    `aggregate` computes of the outputs. :obj:`on_cuda` tells for which device it is planned, and
    :obj:`keeps_maps` that the prologue has linear maps of values computed for each edge.
    """

    prologue: Program
    inputs: tuple[Input, ...]
    message: Program
    reduces: tuple[str, ...]  # of the layer's aggregation
    acc: str  # dtype of the arithmetic
    outputs: tuple[Output, ...]
    tail: Tail | None
    dtype: str
    num_dropouts: int
    softmaxes: tuple[int, ...] = ()
    in_blocks: bool = False
    rows: RowPart | None = None
    in_tiles: bool = False
    on_cuda: bool = False
    keeps_maps: bool = False

    def lookup(self, k: int) -> Value:
        """The operation that reads the rows of the table that is input `k`."""
        (out,) = (each for each in self.message.values if each.attrs[:2] == ('table', k))
        return out

    @property
    def repeats_work(self) -> bool:
        """Whether the backward pass of tiles has more products than PyG's code has in all: it
        computes the maps again, but those that run on nodes it saves."""
        own = sum(map(self.message.products, self._reachable_maps()))
        hoisted = sum(
            self.prologue.products(at)
            for each in self.inputs if each.role in ('src', 'dst')
            for at in self.prologue.reachable([each.at]) if self.prologue[at].op == 'mm'
        )  # fmt: skip
        return 4 * own > 3 * (own + hoisted)

    @property
    def columns(self) -> int:
        """The most numbers of an edge that are read of a node or aggregated."""
        of_nodes = [math.prod(each.shape) for each in self.inputs if each.role in ('src', 'dst')]
        return max(self.width, *of_nodes, 1)

    @property
    def is_loop(self) -> bool:
        """Whether compiled code of PyG has a single loop over edges: of numbers, then sums."""
        sums = all(output.reduce in ('sum', 'mean') for output in self.outputs[self.num_written :])
        return sums and not (self.has_products or self.is_mlp or self.softmaxes)

    @property
    def is_sum(self) -> bool:
        """Whether it sums rows of sources as they are."""
        found = weighted_sum(self)
        return found is not None and found.weight is None

    @property
    def has_weights(self) -> bool:
        """Whether it sums rows of sources by weights of edges."""
        found = weighted_sum(self)
        return found is not None and found.weight is not None

    @property
    def has_products(self) -> bool:
        """Whether PyG's code has matrix products of an edge, or rows of tables."""
        return any(
            value.op in ('mm', 'head_map', 'lookup')
            for program in (self.prologue, self.message)
            for value in program.values
        )

    @property
    def has_rows_of_edges(self) -> bool:
        """Whether it reads features of edges as wide as what it aggregates, or normalizes them."""
        wide = max([math.prod(each.shape) for each in self.inputs if each.role == 'edge'] or [0])
        order = [self.message[at].op for at in self.message.reachable([self.outputs[0].at])]
        sums = sum(op in REDUCTIONS for op in order)
        normalizes = sums > 1 and ('rsqrt' in order or 'sqrt' in order)
        return (wide > 1 and 2 * wide >= self.width) or normalizes

    @property
    def has_angles(self) -> bool:
        """Whether it computes angles, for which kernels take longer than torch."""
        return any(value.op in _ANGLES for value in self.message.values)

    @property
    def is_mlp(self) -> bool:
        """Whether PyG's code has linear maps of values computed for each edge."""
        return self.in_tiles or self.keeps_maps

    @property
    def may_keep_maps(self) -> bool:
        """Whether torch computes the linear maps for training, and keeps their values: it is faster
        than tiles or blocks of a GPU, which compute maps of features of edges twice. Of random
        numbers, kernels know their own alone."""
        in_kernel = self.on_cuda and (self.in_tiles or self.in_blocks)
        return in_kernel and self.repeats_work and self.maps_edges_alone

    def multiplies_in_tiles(self, rounds: bool) -> bool:
        """Whether the backward pass over tiles stores nothing of an edge for the gradients of its
        maps, as with up to four products, two for each map: then it takes less time than one with
        kept values. `rounds` says whether products of float32 are those of TF32."""
        maps = [self.message[at] for at in self._reachable_maps()]
        is_narrow = all(math.prod(one.shape) <= WIDE for one in maps)
        is_light = all(one.dtype in HALF for one in maps) or (rounds and len(maps) <= 2)
        sums = all(each.reduce in ('sum', 'mean', 'edge') for each in self.outputs)
        return self.on_cuda and self.in_tiles and is_narrow and is_light and sums

    @property
    def maps_edges_alone(self) -> bool:
        """Whether its linear maps take features of edges alone, and no random numbers."""
        before = [self.message[at] for at in self.message.reachable(self._reachable_maps())]
        loads = {value.attrs[0] for value in before if value.op in ('load', 'lookup')}
        return loads <= {'edge', 'param'} and all(value.op != 'keep' for value in before)

    @property
    def width(self) -> int:
        """The most numbers of an edge that are aggregated."""
        return max(math.prod(self.message[each.at].shape) for each in self.outputs)

    @property
    def has_wide_maps(self) -> bool:
        """Whether a map of float32 has values that two programs of a GPU do not hold at once."""
        maps = [self.message[at] for at in self._reachable_maps()]
        return any(one.dtype == 'float32' and math.prod(one.shape) > WIDE for one in maps)

    @property
    def work(self) -> Work | None:
        """What the message does, where it may be too little for a kernel of a CPU."""
        is_simple = (
            len(self.outputs) == 1 and self.outputs[0].reduce in ('sum', 'mean')
            and not (self.on_cuda or self.in_tiles or self.in_blocks or self.softmaxes)
            and self.tail is None and self.rows is None and weighted_sum(self) is None
        )  # fmt: skip
        if not is_simple or any(each.role in ('param', 'table') for each in self.inputs):
            return None
        order = [self.message[at] for at in self.message.reachable([self.outputs[0].at])]
        roles = [value.attrs[0] for value in order if value.op == 'load']
        computed = sum(value.op in POINTWISE for value in order)
        return Work((len(roles) + computed) * self.columns, self.columns, 'edge' in roles)

    def _reachable_maps(self) -> list[int]:
        order = self.message.reachable([each.at for each in self.outputs])
        return [at for at in order if self.message[at].op == 'mm']

    @property
    def num_written(self) -> int:
        """The number of outputs that have a row for each edge."""
        return sum(output.reduce == 'edge' for output in self.outputs)

    def __repr__(self) -> str:
        return describe(self)


def make_plan(captured: CapturedMessage, reduces: Sequence[str], keeps_maps: bool = False) -> Plan:
    """Plans a message. With :obj:`keeps_maps` the prologue has the linear maps of features of
    edges alone, so that autograd keeps their values.

    Raises:
        Refused: If no kernel computes it.
    """
    requested = [Reduced(at, 'edge') for at in captured.writes]
    requested += [
        Reduced(each.at, reduce) for each in captured.reduced
        for reduce in ([each.reduce] if each.reduce else kernel_reduces(reduces))
    ]  # fmt: skip
    program, summed, tail = _simplify(captured.program, requested, captured.on_cuda)
    values = [each.at for each in summed]
    acc = _check_dtypes(program, values, captured.autocast)
    kept = _find_maps_of_edges(program, values) if keeps_maps else set()
    in_blocks = _maps_computed_values(program, values, kept)
    hoisted = _find_hoistable(program, values) | kept
    if in_blocks or not captured.on_cuda:  # A CPU and blocks get rows of tables from torch.
        hoisted |= {at for at in program.reachable(values) if program[at].op == 'lookup'}
    if not in_blocks:
        most = _MAX_PRODUCTS if captured.on_cuda else math.inf
        hoisted |= _find_wide_edge_maps(program, values, most)
    split = _Split(program, hoisted, in_blocks)
    dtypes = [captured.program[each.at].dtype for each in requested]
    outputs: list[Output] = []
    for at, reduce in summed:
        body, dtype = split.translate(at), dtypes[min(len(outputs), len(dtypes) - 1)]
        # The mean that the gradient of a variance reads is not rounded.
        wide = promote_dtypes([dtype, 'float32'])
        if reduce == 'var':
            body = split.message.pointwise('mul', body, body, dtype=wide)
        exact = tail is not None or reduce == 'var' or (reduce == 'mean' and 'var' in reduces)
        outputs.append(Output(body, reduce, wide if exact else dtype))
    in_tiles = in_blocks and _fits_tiles(
        split.message, outputs, split.softmaxes, acc, captured.on_cuda
    )
    return Plan(
        program, tuple(split.inputs), split.message, tuple(reduces), acc, tuple(outputs), tail,
        captured.program[captured.reduced[0].at].dtype, captured.num_dropouts,
        tuple(split.softmaxes), in_blocks and not in_tiles, captured.rows, in_tiles,
        captured.on_cuda, keeps_maps,
    )  # fmt: skip


class _Split:
    """Splits a program into the prologue and the message of one edge, which loads the `hoisted`
    values and the parameters."""

    def __init__(self, program: Program, hoisted: set[int], in_blocks: bool) -> None:
        self.program, self.hoisted, self.in_blocks = program, hoisted, in_blocks
        self.message = Program()
        self.inputs: list[Input] = []
        self.softmaxes: list[int] = []
        self.places: dict[int, int] = {}

    def translate(self, at: int) -> int:
        """The position of a value in the message."""
        if at in self.places:
            return self.places[at]
        op, args, attrs, shape, dtype = value = self.program[at]
        message, is_param = self.message, self.program.dependence(at) == PARAM
        is_view = is_param and op in ('view', 'permute', 'expand')
        if op == 'const' and is_param:
            out = message.add(*value, PARAM)
        elif not is_view and (is_param or op == 'load' or at in self.hoisted):
            out = self._load(at)
        elif op == 'lookup':
            table = self.program[args[0]]
            self.inputs.append(Input('table', args[0], table.shape, table.dtype))
            own = 'table', len(self.inputs) - 1, *attrs
            out = message.add('lookup', [self.translate(args[1])], own, shape, dtype, EDGE)
        elif op == 'mm' and not self.in_blocks:
            out = _lower_map(message, self.translate(args[0]), self.translate(args[1]), shape)
        elif op == 'cast' and not self.in_blocks:
            out = self.translate(args[0])
            if self.program[args[0]].dtype == 'bool':
                one, zero = (message.const(n, len(shape), dtype) for n in (1, 0))
                out = message.pointwise('where', out, one, zero, dtype=dtype)
        elif op == 'softmax':
            out = self._softmax(self.translate(args[0]), shape, dtype)
        else:
            out = message.add(op, [self.translate(arg) for arg in args], attrs, shape, dtype)
        self.places[at] = out
        return out

    def _load(self, at: int) -> int:
        value, role = self.program[at], _ROLE.get(self.program.dependence(at), 'edge')
        self.inputs.append(Input(role, at, value.shape, value.dtype))
        return self.message.load(role, len(self.inputs) - 1, value.shape, value.dtype)

    def _softmax(self, score: int, shape: tuple[int, ...], dtype: str) -> int:
        message, n = self.message, len(self.softmaxes)
        if any(message[at].op == 'softmax' for at in message.reachable([score])):
            raise Refused('a softmax of another softmax')
        loads = [message.load_statistic(role, n, shape) for role in ('most', 'scale')]
        out = message.add('softmax', [score, *loads], (), shape, dtype, EDGE)
        self.softmaxes.append(out)
        return out


def _simplify(
    captured: Program, requested: Sequence[Reduced], on_cuda: bool
) -> tuple[Program, list[Reduced], Tail | None]:
    """The program with linear maps exchanged with other operations, the values to aggregate, and
    the map after that."""
    linear = len(requested) == 1 and requested[0].reduce in ('sum', 'mean')
    parts, ats = captured.with_parts([each.at for each in requested])
    for fold in (True, False) if linear else (False,):
        program, outputs = _push_maps(parts, ats, fold, on_cuda)
        for output in outputs:
            if not is_float(program[output].dtype):
                dtype = program[output].dtype
                is_complex = dtype.startswith('complex')
                raise Refused(f'a message of {"complex numbers" if is_complex else dtype}')
            if program.dependence(output) == PARAM:
                raise Refused('the message does not depend on an edge')
        tail, shape = None, program[outputs[0]].shape
        if linear:
            outputs, tail = _sink_maps(program, outputs[0])
        folded = fold_message(program, outputs[0], on_cuda) if fold and tail is None else None
        if folded is not None:
            outputs = [folded.first, folded.second]
            tail = Tail(folded.weight, None, shape, folded.heads, folds=True)
        if not (fold and maps_edge_features(program, outputs)):  # Do not map them twice.
            break
    reduces = [each.reduce for each in requested]
    reduces += reduces[:1] * (len(outputs) - len(reduces))
    return program, list(map(Reduced, outputs, reduces)), tail


_WIDTHS = {'bfloat16': 1, 'float16': 1, 'float32': 2, 'float64': 3}


def _check_dtypes(p: Program, outputs: list[int], autocast: bool) -> str:
    """The dtype of the arithmetic, the widest of all values. A cast to a narrower dtype than those
    of all inputs rounds or overflows on purpose: kernels would not."""
    reachable = [at for at in p.reachable(outputs) if p[at].op != 'const']
    for at in reachable:
        if p[at].op == 'load' and p[at].dtype not in (*_WIDTHS, 'int32', 'int64', 'bool'):
            raise Refused(f'an input of {p[at].dtype}')
    least = min(
        (_WIDTHS[p[at].dtype] for at in reachable if p[at].op == 'load' and is_float(p[at].dtype)),
        default=1,
    )
    for at in reachable:
        if p[at].op == 'cast' and not autocast and is_float(p[at].dtype):
            before = _WIDTHS.get(p[p[at].args[0]].dtype, 0)
            if _WIDTHS[p[at].dtype] < min(before, least):
                raise Refused(f'a conversion to {p[at].dtype}')
    wide = any(
        p[at].dtype == 'float64' and (p.dependence(at) or p[at].op != 'load') for at in reachable
    )
    return 'float64' if wide else 'float32'


def kernel_reduces(reduces: Iterable[str]) -> list[str]:
    """The reductions of the passes for these aggregations: a variance last, after its mean."""
    distinct = list(dict.fromkeys(reduces))
    if 'var' not in distinct:
        return distinct
    return [*(reduce for reduce in distinct if reduce not in ('mean', 'var')), 'mean', 'var']


def _push_maps(
    old: Program, outputs: Sequence[int], fold: bool, on_cuda: bool
) -> tuple[Program, list[int]]:
    """The program with linear maps pushed to the ends of the edge: to parts that vary with one end.
    With `fold`, scores do not map features of edges."""
    new = Program()
    maps = _MapPusher(new)
    places: dict[int, int] = {}

    def push(at: int) -> int:
        if at in places:
            return places[at]
        op, args, attrs, shape, dtype = old[at]
        new_args = [push(arg) for arg in args]
        folds = fold and op == 'sum'
        score = fold_score(new, new_args[0], attrs, on_cuda) if folds else None
        if score is not None:
            out = score
        elif op == 'mm':
            out = maps.push(new_args[0], new_args[1])
        elif op in POINTWISE:
            out = new.pointwise(op, *new_args, dtype=dtype)
            out = _reorder_sum(new, out) if op in ('add', 'sub') else out
        elif op == 'view':
            out = new.view(new_args[0], shape)
        else:
            out = new.add(op, new_args, attrs, shape, dtype, old.dependence(at))
        places[at] = out
        return out

    return new, list(map(push, outputs))


def _reorder_sum(p: Program, at: int) -> int:
    """A sum with linear maps of nodes, reordered: terms of one end come first, with the bias, and
    are added once per node."""
    terms: list[tuple[int, bool]] = []
    shape, dtype = p[at].shape, p[at].dtype
    stack = [(at, False)]
    while stack:
        each, minus = stack.pop()
        value = p[each]
        if value.op in ('add', 'sub') and value.shape == shape:
            stack += [(value.args[1], minus != (value.op == 'sub')), (value.args[0], minus)]
        else:
            terms.append((each, minus))
        if len(terms) > _MAX_TERMS:
            return at
    count = len(terms)
    terms = _merge_maps(p, terms)
    ends = [
        p.dependence(each) for each, _ in terms
        if p[each].op == 'mm' and p.dependence(each) in (SRC, DST)
    ]  # fmt: skip
    if len(terms) == count and (count < 3 or not ends):
        return at
    if not ends:
        out, negative = _sum_terms(p, terms, dtype)
        out = p.pointwise('neg', out, dtype=dtype) if negative else out
        return p.expand(out, shape)
    end = DST if DST in ends else SRC
    groups: dict[int, list[tuple[int, bool]]] = {end: []}
    for each, minus in terms:
        dependence = p.dependence(each)
        groups.setdefault(end if dependence == PARAM else dependence, []).append((each, minus))
    out, negative = _sum_terms(p, groups.pop(end), dtype)
    for group in groups.values():
        part, minus = _sum_terms(p, group, dtype)
        if negative and not minus:
            out, negative = p.pointwise('sub', part, out, dtype=dtype), False
        else:
            out = p.pointwise('sub' if minus != negative else 'add', out, part, dtype=dtype)
    out = p.pointwise('neg', out, dtype=dtype) if negative else out
    return p.expand(out, shape)


def _merge_maps(p: Program, terms: list[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """The terms of a sum, with linear maps of the same values of an edge as one map by the sum of
    their weights."""
    maps: dict[tuple[int, str, str], list[tuple[int, bool]]] = {}
    for each, minus in terms:
        op, args, attrs, _, dtype = p[each]
        if op == 'mm' and not attrs and p.dependence(each) == EDGE:
            maps.setdefault((args[0], dtype, p[args[1]].dtype), []).append((each, minus))
    out = list(terms)
    for (x, _, _), several in maps.items():
        if len(several) > 1:
            weights = [(p[each].args[1], minus) for each, minus in several]
            weight, negative = _sum_terms(p, weights, p[weights[0][0]].dtype)
            out = [term for term in out if term not in several]
            out.append((p.mm(x, weight), negative))
    return out


def _sum_terms(p: Program, terms: list[tuple[int, bool]], dtype: str) -> tuple[int, bool]:
    """A sum of signed terms, and whether it must be negated still."""
    terms = sorted(terms, key=lambda term: term[1])  # A positive one first.
    out, negative = terms[0]
    for each, minus in terms[1:]:
        out = p.pointwise('add' if minus == negative else 'sub', out, each, dtype=dtype)
    return out, negative


class _MapPusher:
    """Pushes linear maps through sums and cats to parts that vary with one end each, and each value
    once, however often others share it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.pushed: dict[tuple[int, int], int] = {}

    def push(self, x: int, weight: int) -> int:
        """`mm(x, weight)`."""
        if (x, weight) not in self.pushed:
            self.pushed[x, weight] = self._push(x, weight)
        return self.pushed[x, weight]

    def _push(self, x: int, weight: int) -> int:
        p = self.program
        value, dependence = p[x], p.dependence(x)
        if dependence in (PARAM, SRC, DST):
            return p.mm(x, weight)
        args = value.args
        if value.op == 'lookup' and len(value.shape) > len(p[args[1]].shape):
            return p.lookup(self.push(args[0], weight), args[1], value.attrs[0])
        if value.op == 'cat' and value.attrs[0] == len(value.shape) - 1:
            start, out = 0, None
            for arg in args:
                size = p[arg].shape[-1]
                part = self.push(arg, p.slice(weight, 0, start, size))
                out = part if out is None else p.pointwise('add', out, part)
                start += size
            return out  # type: ignore[return-value]
        if value.op in ('add', 'sub'):
            parts = [self.push(p.expand(arg, value.shape), weight) for arg in args]
            terms = _terms_of(p, parts)
            of_ends = any(p.dependence(term) in (PARAM, SRC, DST) for term in terms)
            if not of_ends and any(p[term].op == 'mm' and p[term].attrs for term in terms):
                return _map_in_place(p, x, weight)  # One map of the sum, and not one of each term.
            return p.pointwise(value.op, *parts)
        if value.op == 'neg':
            return p.pointwise('neg', self.push(args[0], weight))
        if value.op == 'detach' and p[args[0]].op in ('cat', 'add', 'sub', 'neg'):
            inner = p[args[0]]
            parts = [p.detach(arg) for arg in inner.args]
            return self.push(p.add(inner.op, parts, inner.attrs, inner.shape, value.dtype), weight)
        if value.op == 'cast' and p[args[0]].op == 'lookup':  # As of `one_hot`.
            (table, index), (wraps, *_) = p[args[0]].args, p[args[0]].attrs
            return self.push(p.lookup(p.cast(table, value.dtype), index, wraps), weight)
        if value.op == 'cast' and p[args[0]].op in ('cat', 'add', 'sub', 'neg'):
            inner = p[args[0]]
            parts = [p.cast(arg, value.dtype) for arg in inner.args]
            whole = p.add(inner.op, parts, inner.attrs, inner.shape, value.dtype)
            return self.push(whole, weight)
        if (
            value.op in ('mul', 'div')
            and p[args[1]].op == 'const'
            and p[args[1]].shape[-1:] in ((), (1,))
        ):
            return p.pointwise(value.op, self.push(args[0], weight), args[1])
        if value.op in ('view', 'slice') and _same_last(p, x):
            return self._push_through_part(x, weight)
        return _map_in_place(p, x, weight)

    def _push_through_part(self, x: int, weight: int) -> int:
        """A map of a view or slice of a sum or cat, exchanged with that."""
        p = self.program
        value = p[x]
        inner = p[value.args[0]]

        def part(arg: int) -> int:
            shape = p[arg].shape
            if value.op == 'slice':
                dim, start, size, step = value.attrs
                if shape[dim] == 1 and inner.shape[dim] != 1:
                    return arg
                return p.slice(arg, dim, start, size, step)
            lead = value.shape[:-1]
            return p.view(p.expand(arg, (*inner.shape[:-1], shape[-1])), (*lead, shape[-1]))

        if inner.op == 'cat' and inner.attrs[0] == len(inner.shape) - 1:
            return self.push(p.cat([part(arg) for arg in inner.args], len(value.shape) - 1), weight)
        if inner.op in ('add', 'sub', 'neg'):
            full = [p.expand(arg, inner.shape) for arg in inner.args]
            return self.push(p.pointwise(inner.op, *(part(arg) for arg in full)), weight)
        if inner.op in ('slice', 'view') and _same_last(p, value.args[0]):
            below = p[inner.args[0]]
            if below.op == 'cat' and below.attrs[0] == len(below.shape) - 1:
                # slice(slice(cat)): push the inner slice through the cat first.
                cat = _move_below_cat(p, value.args[0])
                return self.push(_repeat_on(p, x, cat), weight)
        return _map_in_place(p, x, weight)


def _terms_of(p: Program, sums: Iterable[int]) -> set[int]:
    """The terms of sums."""
    found, stack = set(sums), list(sums)
    while stack:
        at = stack.pop()
        if p[at].op in ('add', 'sub', 'neg'):
            stack += [arg for arg in p[at].args if arg not in found]
            found.update(p[at].args)
    return {at for at in found if p[at].op not in ('add', 'sub', 'neg')}


def _same_last(p: Program, x: int) -> bool:
    """Whether a view or slice leaves the last dimension alone."""
    value = p[x]
    inner = p[value.args[0]]
    if not value.shape or not inner.shape or value.shape[-1] != inner.shape[-1]:
        return False
    return value.op == 'view' or value.attrs[0] != len(inner.shape) - 1


def _move_below_cat(p: Program, x: int) -> int:
    """A slice or view of a cat as a cat of slices or views."""
    value = p[x]
    cat = p[value.args[0]]
    parts = []
    for arg in cat.args:
        if value.op == 'slice':
            parts.append(p.slice(arg, *value.attrs))
        else:
            parts.append(p.view(arg, (*value.shape[:-1], p[arg].shape[-1])))
    return p.cat(parts, len(value.shape) - 1)


def _repeat_on(p: Program, x: int, inner: int) -> int:
    """The slice or view that `x` is, of another value."""
    value = p[x]
    return p.slice(inner, *value.attrs) if value.op == 'slice' else p.view(inner, value.shape)


def _map_in_place(p: Program, x: int, weight: int) -> int:
    """A linear map that stays on the edge. Of values computed for each edge it is marked: no kernel
    has it, blocks of edges do."""
    inner = x
    while p[inner].op in ('cast', 'view', 'slice', 'detach'):
        inner = p[inner].args[0]
    if p[inner].op != 'load':
        shape = *p[x].shape[:-1], p[weight].shape[-1]
        return p.add('mm', (x, weight), ('computed',), shape, p[x].dtype)
    return p.mm(x, weight)


def _sink_maps(p: Program, output: int) -> tuple[list[int], Tail | None]:
    """Sinks the last linear maps below the aggregation: what is aggregated, and the map of that."""
    at = output
    while p[at].op == 'cast':
        at = p[at].args[0]
    terms = _linear_terms(p, at)
    weights: dict[int, int] = {}
    for x, matrix in terms:
        if matrix is not None:
            weights[x] = p.pointwise('add', weights[x], matrix) if x in weights else matrix
    constants = [weights.pop(x) for x in [*weights] if p[x].op == 'const']
    others = [x for x, matrix in terms if matrix is None]
    outputs = [functools.reduce(functools.partial(p.pointwise, 'add'), others)] if others else []
    outputs += weights
    if not weights or len(outputs) > _MAX_SUNK:
        return [output], None
    bias = p.view(constants[0], p[at].shape) if constants else None
    tail = Tail(p.cat([*weights.values()], 0), bias, p[output].shape, parts=len(weights))
    return outputs, tail


def _linear_terms(p: Program, output: int) -> list[Term]:
    """A value as a sum of linear maps of values of the edge, also of maps of such sums and of
    multiples: the values, and the matrix of each, None for what is not mapped."""
    order = p.reachable([output])
    needed = {output}
    for at in reversed(order):
        if at in needed and (_is_map(p, at) or p[at].op in ('add', 'sub', 'mul', 'div')):
            needed.update(p[at].args)
    # Each value once, however often others share it.
    terms: dict[int, list[Term]] = {}
    for at in order:
        if at in needed:
            found = _join_terms(p, at, terms)
            terms[at] = found if found and len(found) <= _MAX_LINEAR_TERMS else [(at, None)]
    return terms[output]


def _join_terms(p: Program, at: int, terms: Mapping[int, list[Term]]) -> list[Term] | None:
    """The terms of a value by those of its arguments; None where it is a term itself."""
    op, args, _, shape, dtype = p[at]
    if p.dependence(at) == PARAM and len(shape) == 1:
        return [(p.const(1, 1, dtype), p.view(at, (1, *shape)))]
    if _is_map(p, at):
        inner = terms[args[0]]
        return [(x, args[1] if weight is None else p.mm(weight, args[1])) for x, weight in inner]
    if op in ('add', 'sub') and all(p[arg].shape == shape for arg in args):
        one, other = (terms[arg] for arg in args)
        if not _has_map(p, one + other):
            return None
        if op == 'sub':
            other = [
                (p.pointwise('neg', x), None) if weight is None else (x, p.pointwise('neg', weight))
                for x, weight in other
            ]
        return one + other
    for x, factor in (args, args[::-1])[: {'mul': 2, 'div': 1}.get(op, 0)]:
        if p[factor].shape == (1,) != p[x].shape == shape and p.dependence(x) != PARAM:
            if not _has_map(p, terms[x]):
                continue
            if p.dependence(factor) != PARAM:
                return [(p.pointwise(op, each, factor), weight) for each, weight in terms[x]]
            number = p.view(factor, (1, 1))
            return [
                (p.pointwise(op, each, factor), None) if weight is None
                else (each, p.pointwise(op, weight, number))
                for each, weight in terms[x]
            ]  # fmt: skip
    return None


def _has_map(p: Program, terms: Sequence[Term]) -> bool:
    return any(weight is not None and p[x].op != 'const' for x, weight in terms)


def _is_map(p: Program, at: int) -> bool:
    """Whether a value is a linear map of values of the edge."""
    return p[at].op == 'mm' and p.dependence(at) not in (SRC, DST) and len(p[at].shape) == 1


def _find_hoistable(p: Program, outputs: list[int]) -> set[int]:
    """Values of one end that are worth a tensor of their own: they use a parameter or a reduction
    over a dimension."""
    hoisted: set[int] = set()
    for at in p.reachable(outputs):
        value, dependence = p[at], p.dependence(at)
        if dependence not in (SRC, DST):
            continue
        own = value.op in ('mm', 'sum', 'amax', 'amin')
        for arg in value.args:
            own |= arg in hoisted or (p.dependence(arg) == PARAM and p[arg].op != 'const')
        if own:
            hoisted.add(at)
    return hoisted


def _find_wide_edge_maps(p: Program, outputs: list[int], most_products: float) -> set[int]:
    """Linear maps of edge features that are too wide for a kernel, also with their bias."""
    order = p.reachable(outputs)
    maps = [at for at in order if p[at].op == 'mm' and not p[at].attrs and p.dependence(at) == EDGE]
    products = sum(math.prod(p[p[at].args[0]].shape) * p[at].shape[-1] for at in maps)
    most = _MAX_EDGE_INPUTS if products <= most_products else 0
    return _with_biases(p, order, {at for at in maps if p[p[at].args[0]].shape[-1] > most})


def _find_maps_of_edges(p: Program, outputs: list[int]) -> set[int]:
    """Linear maps of features of edges alone, also with their bias."""
    order = p.reachable(outputs)
    maps = {at for at in order if p[at].op == 'mm' and p.dependence(at) == EDGE}
    return _with_biases(p, order, maps)


def _with_biases(p: Program, order: Sequence[int], maps: set[int]) -> set[int]:
    """Linear maps, and what is one of them with its bias."""
    return maps | {
        at for at in order
        if p[at].op == 'add' and any(
            one in maps and p[one].shape == p[at].shape
            and p.dependence(bias) == PARAM and p[bias].op != 'const'
            for one, bias in (p[at].args, p[at].args[::-1])
        )
    }  # fmt: skip


def _maps_computed_values(p: Program, outputs: list[int], hoisted: set[int]) -> bool:
    """Whether a linear map takes values computed for each edge, which no kernel does."""
    return any(
        p[at].op == 'mm' and p[at].attrs and p.dependence(at) not in (SRC, DST)
        for at in p.reachable(outputs, hoisted)
    )


def _fits_tiles(
    message: Program, outputs: Sequence[Output], softmaxes: Sequence[int], acc: str, on_cuda: bool
) -> bool:
    """Whether a kernel over tiles of edges computes the outputs."""
    if on_cuda and softmaxes:
        return False
    program, places = Program(), dict[int, int]()
    outs = [
        Out(program.graft(message, each.at, places), each.reduce, each.dtype) for each in outputs
    ]
    try:
        if not on_cuda:
            check_maps(program, outs, getattr(torch, acc))
        elif acc == 'float32':
            check_tiles(program, outs)
        else:
            return False
    except Refused:
        return False
    return True


def _lower_map(p: Program, x: int, weight: int, shape: tuple[int, ...]) -> int:
    """A linear map as a sum of products."""
    lead, size = p[x].shape[:-1], p[x].shape[-1]
    a = p.view(x, (*lead, size, 1))
    w = p.view(weight, (*(1,) * len(lead), *p[weight].shape))
    dim = len(lead)
    return p.view(p.reduce('sum', p.pointwise('mul', a, w), (dim,)), shape)


class WeightedSum(NamedTuple):
    """A sum or mean of rows of sources, times a number of each edge: numbers of these inputs."""

    x: int
    weight: int | None
    mean: bool


def weighted_sum(p: Plan) -> WeightedSum | None:
    """The product of a sparse matrix with features, if the plan is one: spmm runs it."""
    output = p.outputs[0]
    if len(p.outputs) > 1 or output.reduce not in ('sum', 'mean'):
        return None
    value = p.message[output.at]
    inputs: dict[str, int] = {}
    for at in value.args if value.op == 'mul' else (output.at,):
        shape = p.message[at].shape
        while p.message[at].op == 'view' and math.prod(shape) == 1:
            (at,) = p.message[at].args
        op, _, attrs, shape, dtype = p.message[at]
        if op != 'load' or dtype != value.dtype or attrs[0] in inputs:
            return None
        if shape != value.shape if attrs[0] == 'src' else math.prod(shape) != 1:
            return None
        inputs[attrs[0]] = attrs[1]
    if inputs.keys() - {'edge'} != {'src'} or value.dtype not in _WIDTHS:
        return None
    return WeightedSum(inputs['src'], inputs.get('edge'), output.reduce == 'mean')


def describe(p: Plan) -> str:
    """What the plan made of a message, as text."""
    lines = []
    for k, each in enumerate(p.inputs):
        if each.role != 'param' and p.prologue[each.at].op != 'load':
            end = {'src': 'source node', 'dst': 'destination node'}.get(each.role, each.role)
            lines.append(f'hoisted: input {k}, computed once per {end}, {list(each.shape)}')
    fused = [
        p.message[at].op for at in p.message.reachable([o.at for o in p.outputs])
        if p.message[at].op not in ('load', 'const', 'view', 'expand')
    ]  # fmt: skip
    gathered = ', '.join(f'{each.role} {list(each.shape)}' for each in p.inputs)
    lines.append(f'fused: {" ".join(fused) or "nothing"}; reads {gathered}')
    written = p.outputs[: p.num_written]
    lines.append('reduced: ' + ', '.join(each.reduce for each in p.outputs[len(written) :]))
    if written:
        widths = ', '.join(str(list(p.message[each.at].shape)) for each in written)
        lines.append(f'written: values of edges that attributes hold, {widths}')
    if p.rows is not None and (after := p.rows.operations()):
        lines.append(f'after that, on nodes: {after}')
    if p.in_blocks:
        lines.append('run: over blocks of edges, again in the backward pass')
    elif p.in_tiles:
        units = ', with matrix products on tensor cores' if p.on_cuda else ' that stay in the cache'
        lines.append(f'run: over tiles of edges{units}')
    elif weighted_sum(p) is not None:
        lines.append('run: as the product of a sparse matrix, as by spmm')
    if p.tail is not None and p.tail.folds:
        lines.append('folded: the map of edge features, into values of nodes and after the sum')
    elif p.tail is not None:
        lines.append(f'sunk: a linear map to {list(p.tail.shape)} after the aggregation')
    return '\n'.join(lines)
