"""The passes of a plan on a CPU: instructions for tiles of edges, which csrc/cpu/message.isa.cpp
interprets."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops._library import fake, ops
from ..sparse.graph import Graph
from ._instructions import Code, Instruction, Ref, Slot, contiguous, merged, reshaped
from ._ir import BINARY, OF_DST, POINTWISE, UNARY, Program, Refused, number

if TYPE_CHECKING:
    from ._passes import Pass

# As MessageOp of csrc/params/message.h.
_NAMES = (
    'copy', *UNARY, *BINARY, 'where', 'load', 'picked', 'keep', 'sum', 'amax', 'amin', 'dot',
    'product', 'row_sum', 'row_mean', 'row_max', 'row_min', 'to_edge', 'row_product', 'row_softmax',
)  # fmt: skip
_OPS = {name: k for k, name in enumerate(_NAMES)}
_ROW_OPS = {'sum': 'row_sum', 'mean': 'row_mean', 'max': 'row_max', 'min': 'row_min'}
_KINDS = {
    'sum': 0, 'mean': 0, 'weighted': 0, 'edge': 1, 'total': 2, 'max': 3, 'min': 3, 'softmax': 4,
}  # fmt: skip
_INDEX = {'param': 0, 'row': 1, 'col': 2, 'edge': 3}
_MOST_DIMS = 6
# Columns of a chunk, and numbers of a tile: these stay in the first cache.
_CHUNK = 64
_TILE_SIZE = 8192
# The rows are divided into shares, whose sums over all edges are added up: by the size of the graph
# alone, so that results have the same bits for any number of threads (most divide 120). A share has
# at least so many edges, and as many numbers of all edges as torch gives a thread.
_MOST_SHARES, _LEAST_EDGES, _GRAIN = 120, 512, 2**15
_MOST_EDGES = 126


@fake('message_pass')
def _message_pass() -> None:
    return None


class _Encoder:
    """Writes the instructions of a section."""

    def __init__(
        self, program: Program, outs: list[tuple[int, str, int]], row_role: str,
        acc: torch.dtype, inputs: list[tuple[str, int]], dtypes: dict[tuple[str, int], torch.dtype],
        numbers: list[float], chunk: bool, whole: int,
    ) -> None:  # fmt: skip
        self.program = program
        self.outs = outs
        self.row_role = row_role
        self.acc = acc
        self.inputs = inputs
        self.dtypes = dtypes
        self.numbers = numbers
        self.chunk = chunk
        self.whole = whole
        self.first: list[Instruction] = []
        self.body: list[Instruction] = []
        self.refs: dict[int, Ref] = {}
        # Of the softmax: its number among the results, its exponentials, how many of them.
        self.softmax: tuple[int, Ref, int] | None = None

    # Instructions.

    def slot(self, shape: tuple[int, ...], uniform: bool) -> Ref:
        # A chunk computes values that all edges share again for each tile.
        width = math.prod(shape)
        slot = Slot(width, uniform and not self.chunk)
        return Ref(slot, 0, contiguous(shape), 0 if uniform else width)

    def emit(self, one: Instruction) -> None:
        out = one.operands[0][0].space
        prologue = isinstance(out, Slot) and out.uniform
        (self.first if prologue else self.body).append(one)

    def nest(
        self, op: str, shape: tuple[int, ...], out: Ref, args: list[Ref],
        extra: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """A loop over `shape` (and edges); each reference has a stride for each dimension."""
        refs = [out, *args]
        edge = any(not ref.uniform for ref in refs)
        sizes, dims = merged([1, *shape], [[ref.edge, *ref.strides] for ref in refs], edge)
        indexed = any(ref.edge is None for ref in refs)
        if (
            not dims
            or (indexed and len(dims) == 1)
            or (dims[-1][0] != 1 and (op in POINTWISE or op == 'copy'))
        ):
            # Instructions write their innermost dimension without gaps.
            sizes.append(1)
            dims.append([1] * len(refs))
        if len(sizes) > _MOST_DIMS:
            raise Refused(f'{op} over {len(sizes)} dimensions')
        strides = [[dim[k] or 0 for dim in dims] for k in range(len(refs))]
        self.emit(Instruction(
            op, sizes, 0 if edge else -1, list(zip(refs, strides, strict=True)), extra
        ))  # fmt: skip

    # Values.

    def ref(self, at: int) -> Ref:
        if at not in self.refs:
            self.refs[at] = self.made(at)
        return self.refs[at]

    def plain(self, at: int) -> Ref:
        """The value without an index: rows of an input are copied."""
        ref = self.ref(at)
        return ref if ref.edge is not None else self.copied(ref, self.program[at].shape)

    def copied(self, ref: Ref, shape: tuple[int, ...]) -> Ref:
        out = self.slot(shape, ref.uniform)
        self.nest('copy', shape, out, [ref])
        return out

    def widened(self, at: int, shape: tuple[int, ...]) -> Ref:
        """The value with strides 0 where it repeats."""
        ref, own = self.ref(at), self.program[at].shape
        extra = len(shape) - len(own)
        strides = (0,) * extra + tuple(
            0 if n == 1 else s for n, s in zip(own, ref.strides, strict=True)
        )
        return ref._replace(strides=strides)

    def made(self, at: int) -> Ref:
        op, args, attrs, shape, _ = self.program[at]
        if op == 'const':
            value = number(self.program[at])
            return Ref('numbers', self.number(value), (0,) * len(shape), 0)
        if op == 'load':
            role, slot = attrs
            return self.load(role, slot, shape)
        if op == 'keep':
            return self.keep(attrs, shape)
        if op == 'cast':
            return self.ref(args[0])
        if op == 'expand':
            return self.widened(args[0], shape)
        if op == 'view':
            old = self.program[args[0]].shape
            ref = self.ref(args[0])
            strides = reshaped(ref.strides, old, shape)
            if strides is None:
                ref = self.copied(ref, old)
                strides = contiguous(shape)
            return ref._replace(strides=strides)
        if op == 'permute':
            return self.ref(args[0]).in_order(attrs)
        if op == 'slice':
            dim, start, _, step = attrs
            ref = self.ref(args[0])
            strides = (*ref.strides[:dim], ref.strides[dim] * step, *ref.strides[dim + 1 :])
            return ref._replace(strides=strides, offset=ref.offset + start * ref.strides[dim])
        if op == 'cat':
            return self.joined(at)
        if op in ('sum', 'amax', 'amin'):
            return self.reduced(at)
        if op not in POINTWISE:
            raise Refused(f'{op} has no kernel')
        if op == 'pow' and self.program[args[1]].op == 'const':
            power = number(self.program[args[1]])
            short = {2.0: ('mul', (args[0], args[0])), 0.5: ('sqrt', args[:1])}
            op, args = short.get(power, (op, args))
        refs = [self.widened(arg, shape) for arg in args]
        out = self.slot(shape, all(ref.uniform for ref in refs))
        self.nest(op, shape, out, refs)
        return out

    def number(self, value: float) -> int:
        for k, other in enumerate(self.numbers):
            if other == value and math.copysign(1, other) == math.copysign(1, value):
                return k
        self.numbers.append(value)
        return len(self.numbers) - 1

    def input(self, role: str, slot: int) -> int:
        if (role, slot) not in self.inputs:
            self.inputs.append((role, slot))
        return self.inputs.index((role, slot))

    def load(self, role: str, slot: int, shape: tuple[int, ...]) -> Ref:
        width = math.prod(shape)
        column = self.chunk and width > 1
        if role == 'powers':
            assert self.softmax is not None
            return self.softmax[1]
        if role == 'param':
            return Ref(('input', self.input(role, slot)), 0, contiguous(shape), 0, column)
        if role != 'picked' and self.dtypes[role, slot] == self.acc:
            return Ref(('input', self.input(role, slot)), 0, contiguous(shape), None, column)
        out = self.slot(shape, False)
        if role == 'picked':
            op, which = role, (self.input('grad', slot), self.input('arg', slot))
        else:
            op, which = 'load', (self.input(role, slot), 0)
        self.emit(Instruction(op, [1, width], 0, [(out, [width, 1])], (*which, 0, int(column))))
        return out

    def keep(self, attrs: tuple, shape: tuple[int, ...]) -> Ref:
        which, p = attrs[0], float.fromhex(attrs[1])
        width = math.prod(shape)
        out = self.slot(shape, False)
        threshold = min(int(p * 2**32), 2**32 - 1)
        scale = self.number(1 / (1 - p) if p < 1 else 0.0)
        column = int(self.chunk and width > 1)
        extra = (which, threshold, scale, column)
        self.emit(Instruction('keep', [1, width], 0, [(out, [width, 1])], extra))
        return out

    def joined(self, at: int) -> Ref:
        _, args, (dim,), shape, _ = self.program[at]
        refs = [self.ref(arg) for arg in args]
        out = self.slot(shape, all(ref.uniform for ref in refs))
        start = 0
        for arg, ref in zip(args, refs, strict=True):
            part = out._replace(offset=start * out.strides[dim])
            own = self.program[arg].shape
            self.nest('copy', own, part, [ref])
            start += own[dim]
        return out

    def reduced(self, at: int) -> Ref:
        op, (arg,), dims, shape, _ = self.program[at]
        inner = self.program[arg].shape
        if op == 'sum' and self.program[arg].op == 'mul' and arg not in self.refs:
            found = self.contraction(arg, dims, shape) or self.dot(arg, dims, shape)
            if found is not None:
                return found
        ref = self.plain(arg)
        out = self.slot(shape, ref.uniform)
        neutral = {'sum': 0.0, 'amax': -math.inf, 'amin': math.inf}[op]
        self.fill(out, shape, neutral)
        self.reduce(op, inner, out.without(dims), ref)
        return out

    def fill(self, out: Ref, shape: tuple[int, ...], value: float) -> None:
        self.nest('copy', shape, out, [Ref('numbers', self.number(value), (0,) * len(shape), 0)])

    def dot(self, mul: int, dims: tuple[int, ...], shape: tuple[int, ...]) -> Ref | None:
        """The sum of a product along its last dimensions, which is not stored."""
        args, inner = self.program[mul].args, self.program[mul].shape
        refs = [self.widened(arg, inner) for arg in args]
        wide = [d for d, n in enumerate(inner) if n > 1]
        if not wide or wide[-1] not in dims or any(ref.strides[wide[-1]] > 1 for ref in refs):
            return None
        order = sorted(range(len(inner)), key=lambda d: (d in dims, d))
        out = self.slot(shape, all(ref.uniform for ref in refs))
        several = len([d for d in dims if inner[d] > 1]) > 1
        if several:
            self.fill(out, shape, 0.0)
        to, *refs = (ref.in_order(order) for ref in (out.without(dims), *refs))
        self.nest('dot', tuple(inner[d] for d in order), to, refs, (int(several),))
        return out

    def reduce(self, op: str, shape: tuple[int, ...], out: Ref, ref: Ref) -> None:
        """Reduces into `out`. Kept dimensions with stride 1, or else reduced ones, come last."""
        order = sorted(range(len(shape)), key=lambda d: (
            2 if out.strides[d] == 1 and shape[d] > 1 else 1 if out.strides[d] == 0 else 0
        ))  # fmt: skip
        if any(ref.strides[d] == 1 and out.strides[d] == 0 and shape[d] > 1 for d in order):
            order = sorted(range(len(shape)), key=lambda d: (out.strides[d] == 0, d))
        sizes = tuple(shape[d] for d in order)
        self.nest(op, sizes, out.in_order(order), [ref.in_order(order)])

    def contraction(self, mul: int, dims: tuple[int, ...], shape: tuple[int, ...]) -> Ref | None:
        """The sum of a product with values that all edges share, as a matrix product."""
        args, inner = self.program[mul].args, self.program[mul].shape
        refs = [self.widened(arg, inner) for arg in args]
        if refs[0].uniform == refs[1].uniform:
            return None
        a, b = refs[::-1] if refs[0].uniform else refs
        out = self.slot(shape, False)
        to = out.without(dims)
        if a.edge is None:
            a = self.repeats(a, inner)
        return out if self.product(inner, dims, to, a, b, False) else None

    def repeats(self, ref: Ref, shape: tuple[int, ...]) -> Ref:
        """Rows of an input copied without the dimensions that repeat."""
        own = tuple(1 if s == 0 else n for n, s in zip(shape, ref.strides, strict=True))
        out = self.copied(ref._replace(), own)
        return out._replace(
            strides=tuple(0 if n == 1 else s for n, s in zip(own, out.strides, strict=True))
        )

    def product(
        self, shape: tuple[int, ...], dims: tuple[int, ...], out: Ref, a: Ref, b: Ref, add: bool,
    ) -> bool:  # fmt: skip
        """Emits a matrix product if strides allow: b differs along n, a along m, both along k."""
        total = out.edge == 0
        rows: list[tuple[bool, int, int | None, int | None, int | None]] = []
        for d, n in enumerate((1, *shape)):
            if d == 0 or n != 1:
                strides: Any = [ref.edge if d == 0 else ref.strides[d - 1] for ref in (out, a, b)]
                reduced = total if d == 0 else d - 1 in dims
                last = rows[-1] if rows else None
                outer: Any = last[2:] if last else ()
                if (
                    last
                    and last[0] == reduced
                    and all(x == y * n for x, y in zip(outer, strides, strict=True))
                ):
                    rows[-1] = (reduced, last[1] * n, *strides)
                else:
                    rows.append((reduced, n, *strides))
        edge = rows[0]
        ks = [r for r in rows if r[0]]
        if len(ks) != 1:
            return False
        kept = [r for r in rows if not r[0]]
        columns = [r for r in kept if r[2] == 1 and r is not edge]
        if len(columns) != 1:
            return False
        n_dim = columns[0]
        if n_dim[3] and not n_dim[4]:
            a, b = b, a
            rows = [(r[0], r[1], r[2], r[4], r[3]) for r in rows]
            edge, ks, kept = rows[0], [r for r in rows if r[0]], [r for r in rows if not r[0]]
            n_dim = next(r for r in kept if r[2] == 1 and r is not edge)
        if n_dim[3] or not n_dim[4]:
            return False
        rest = [r for r in kept if r is not n_dim]
        ms = [r for r in rest if r[4] == 0 and r[3]]
        m_dim = next((r for r in ms if r is edge), ms[0] if ms else None)
        if m_dim is None:
            return False
        outer = [r for r in rest if r is not m_dim]
        k_dim = ks[0]
        if n_dim[4] != 1 or (k_dim[4] or 0) == 0:
            if not b.uniform or edge[4]:
                return False
            # Lay out the matrix anew, once for all edges.
            varying = [r for r in outer if r[4]]
            sizes = tuple(r[1] for r in (*varying, k_dim, n_dim))
            copy = self.slot(sizes, True)
            laid = tuple(r[4] or 0 for r in (*varying, k_dim, n_dim))
            self.nest('copy', sizes, copy, [b._replace(strides=laid)])
            given = dict(zip(map(id, (*varying, k_dim, n_dim)), copy.strides, strict=True))
            b = copy
        else:
            given = {id(r): r[4] or 0 for r in (*outer, k_dim, n_dim)}
        order = [*outer, m_dim, k_dim, n_dim]
        if len(order) > _MOST_DIMS:
            return False
        self.emit(Instruction(
            'product', [r[1] for r in order], next(k for k, r in enumerate(order) if r is edge),
            [
                (out, [r[2] or 0 for r in order]), (a, [r[3] or 0 for r in order]),
                (b, [given.get(id(r), 0) for r in order]),
            ],
            (int(add),),
        ))  # fmt: skip
        return True

    # Results.

    def result(self, at: int, kind: str, k: int) -> None:
        shape = self.program[at].shape
        width = math.prod(shape)
        if kind == 'total':
            inner, order = _stored(self.program, at, kind)
            strides = tuple(contiguous(inner)[d] for d in order)
            out = Ref(('total', k), 0, strides, 0, self.chunk and width > 1)
            return self.total(at, out)
        if kind == 'softmax':
            return self.row_softmax(at, k)
        if kind in ('sum', 'mean', 'weighted') and self.row_product(at, kind, k):
            return None
        ref = self.ref(at)
        plain = width == 1 or all(
            n == 1 or s == t for n, s, t in zip(shape, ref.strides, contiguous(shape), strict=True)
        )
        if not plain:
            ref = self.copied(ref, shape)
        op = _ROW_OPS.get(kind, 'to_edge')
        self.body.append(Instruction(
            op, [1, width], 0, [(ref, [0, 0]), (ref, [ref.edge or 0, 1])],
            (k, int(self.chunk and width > 1)),
        ))  # fmt: skip
        return None

    def row_softmax(self, at: int, k: int) -> None:
        """Turns scores into exponentials, for results of kind `weighted`."""
        shape = self.program[at].shape
        width = math.prod(shape)
        ref = self.ref(at)
        if ref.edge != width or not isinstance(ref.space, Slot) or ref.strides != (
            contiguous(shape)
        ):
            ref = self.spread(ref, shape)
        out = self.slot(shape, False)
        self.body.append(Instruction(
            'row_softmax', [1, width], 0, [(out, [width, 1]), (ref, [width, 1])],
            (k, int(self.chunk and width > 1)),
        ))  # fmt: skip
        self.softmax = (k, out, width)

    def row_product(self, at: int, kind: str, k: int) -> bool:
        """Emits a sum of products that are not stored, if the result is one, or `weighted`."""
        inner, width = at, math.prod(self.program[at].shape)
        while self.program[inner].op in ('view', 'cast') and inner not in self.refs:
            (inner,) = self.program[inner].args
        op, args, _, shape, _ = self.program[inner]
        pairs: list[tuple[Ref | None, Ref]] = []
        if op == 'mul' and inner not in self.refs:
            a, b = (self.widened(arg, shape) for arg in args)
            pairs = [(a, b), (b, a)]
        if kind == 'weighted':  # Those that fit no pair are stored, times one.
            pairs.append((None, Ref('numbers', self.number(1.0), (0,) * len(shape), 0)))
        for x, w in pairs:
            if x is None:
                x = self.copied(self.ref(inner), shape)
            sizes, dims = merged(
                [*shape], [[*contiguous(shape)], [*x.strides], [*w.strides]], False
            )
            if not sizes:
                sizes, dims = [1], [[1, 1, 0]]
            if len(sizes) == 1:
                sizes, dims = [1, *sizes], [[0, 0, 0], *dims]
            if len(sizes) != 2 or dims[1][1] != 1 or dims[1][2] not in (0, 1):
                continue
            extra = (int(kind == 'mean'), 0)
            if kind == 'weighted':
                assert self.softmax is not None
                extra = (self.softmax[0], self.softmax[2])
            operands = [
                (ref, [ref.edge or 0, dims[0][n] or 0, dims[1][n] or 0])
                for n, ref in ((1, x), (2, w))
            ]
            self.body.append(Instruction(
                'row_product', [1, *sizes], 0, [operands[0], *operands],
                (k, int(self.chunk and width > 1), *extra),
            ))  # fmt: skip
            return True
        return False

    def total(self, at: int, out: Ref) -> None:
        """Adds the value of every edge to `out`."""
        op, args, attrs, shape, _ = self.program[at]
        if at not in self.refs:
            if op in ('view', 'cast'):
                own = self.program[args[0]].shape
                strides = reshaped(out.strides, shape, own)
                if strides is not None:
                    return self.total(args[0], out._replace(strides=strides))
            if op == 'permute':
                turned = [0] * len(shape)
                for place, k in enumerate(attrs):
                    turned[k] = out.strides[place]
                return self.total(args[0], out._replace(strides=tuple(turned)))
            if op == 'sum':
                return self.total_of(args[0], attrs, out.without(attrs))
        return self.total_of(at, (), out)

    def total_of(self, at: int, dims: tuple[int, ...], out: Ref) -> None:
        value = self.program[at]
        if value.op == 'mul' and at not in self.refs:
            refs = []
            for arg in value.args:
                ref = self.widened(arg, value.shape)
                refs.append(ref if ref.edge is not None else self.repeats(ref, value.shape))
            if not any(ref.uniform for ref in refs):
                out_ = out._replace(edge=0)
                if self.product(value.shape, dims, out_, refs[0], refs[1], True):
                    return
        ref = self.plain(at)
        if ref.uniform:
            # A number for each edge all the same.
            ref = self.spread(ref, value.shape)
        self.reduce('sum', value.shape, out, ref)

    def spread(self, ref: Ref, shape: tuple[int, ...]) -> Ref:
        out = self.slot(shape, False)
        self.nest('copy', shape, out, [ref])
        return out

    def run(self) -> None:
        program = self.program
        by_value: dict[int, list[tuple[str, int]]] = {}
        for at, kind, k in self.outs:
            by_value.setdefault(at, []).append((kind, k))
        order = program.reachable(by_value)
        # Products that only sums use are computed with these, and views where they are used.
        users: dict[int, set[str]] = {}
        for at in order:
            for arg in program[at].args:
                users.setdefault(arg, set()).add(program[at].op)
        lazy = {'const', 'load', 'view', 'expand', 'permute', 'slice', 'cast'}
        for at in order:
            op = program[at].op
            used = users.get(at, set())
            later = (
                op in lazy
                or (op == 'mul' and used <= {'sum', 'view', 'permute', 'cast'})
                or (op == 'sum' and not used)
            )
            if at in by_value:
                for kind, k in by_value[at]:
                    self.result(at, kind, k)
            elif not later:
                self.ref(at)


def _stored(program: Program, at: int, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape in which memory holds a result, and the position in it of each of its dimensions.
    A sum of a transposed value is stored as the sum of the value: its rows have all channels."""
    op, args, attrs, shape, _ = program[at]
    if kind != 'total' or op != 'permute':
        return shape, tuple(range(len(shape)))
    return program[args[0]].shape, attrs


def _flat(program: Program, outs: list[int], whole: int, width: int) -> tuple[Program, list[int]]:
    """The program for `width` columns of values that all have `whole` or 1."""
    new = Program()
    places: dict[int, int] = {}
    for at in program.reachable(outs):
        op, args, attrs, shape, dtype = program[at]
        inner = [places[arg] for arg in args]
        own = (1,) if math.prod(shape) == 1 else (width,)
        if op in ('view', 'cast'):
            places[at] = inner[0]
        elif op == 'expand':
            places[at] = new.expand(inner[0], own)
        elif op == 'const':
            places[at] = new.add(op, (), attrs, own, dtype, 0)
        else:
            places[at] = new.add(op, inner, attrs, own, dtype, program.level(at))
    return new, [places[at] for at in outs]


def _chunks(program: Program, outs: list[int]) -> int:
    """The number of columns of a program that computes each by itself; 0: it does not."""
    order = program.reachable(outs)
    whole = max(math.prod(program[at].shape) for at in order)
    for at in order:
        op, _, _, shape, _ = program[at]
        if math.prod(shape) not in (1, whole):
            return 0
        if op not in POINTWISE and op not in ('const', 'load', 'keep', 'view', 'expand', 'cast'):
            return 0
    return whole


def _placed(instructions: list[Instruction]) -> int:
    """Gives slots of edges their places, per edge; returns the size."""
    slots: dict[Slot, int] = {}  # with the first instruction
    for k, one in enumerate(instructions):
        for ref, _ in one.operands:
            if isinstance(ref.space, Slot) and not ref.space.uniform:
                slots.setdefault(ref.space, k)
                ref.space.last = k
    live: list[Slot] = []
    size = 0
    for slot, begin in slots.items():
        live = [other for other in live if other.last >= begin]
        place = 0
        for other in sorted(live, key=lambda o: o.place):
            if place + slot.width <= other.place:
                break
            place = max(place, other.place + other.width)
        slot.place = place
        live.append(slot)
        size = max(size, place + slot.width)
    return size


def encode(one: 'Pass', acc: torch.dtype, dtypes: dict[tuple[str, int], torch.dtype]) -> Code:
    """The instructions of a pass, for inputs of these dtypes.

    Raises:
        Refused: If no instruction computes a value.
    """
    program = one.program
    ats = [out.at for out in one.outs]
    inputs: list[tuple[str, int]] = []
    numbers: list[float] = []
    whole = _chunks(program, ats)
    # A softmax of fewer scores would be computed again for each chunk.
    cut = whole > _CHUNK and all(
        math.prod(program[out.at].shape) == whole for out in one.outs if out.kind == 'softmax'
    )
    # A rest of one column would look like a value that all columns share.
    step = next(n for n in range(_CHUNK, 1, -1) if not cut or whole % n != 1)
    parts = [(0, whole // step if cut else 1, step)]
    if cut and whole % step:
        parts.append((whole - whole % step, 1, whole % step))
    sections, widest = [], 1
    for first, repeats, width in parts:
        own, places = _flat(program, ats, whole, width) if cut else (program, ats)
        outs = [(at, out.kind, k) for k, (at, out) in enumerate(zip(places, one.outs, strict=True))]
        encoder = _Encoder(own, outs, one.row_role, acc, inputs, dtypes, numbers, cut, whole)
        encoder.run()
        widest = max(widest, _placed(encoder.body))
        sections.append((first, repeats, encoder))
    uniform = len(numbers)
    for one_ in sections[0][2].first:
        slot = one_.operands[0][0].space
        if slot.place < 0:
            slot.place = uniform
            uniform += slot.width
    edges = max(1, min(_MOST_EDGES, _TILE_SIZE // widest))
    if edges % 16 == 0:  # A load waits for a store at a distance of 4096 bytes.
        edges -= 2
    words = [edges, edges * widest, uniform, 1 + len(sections)]
    words += [0, 0, 1, len(sections[0][2].first)]
    for each in sections[0][2].first:
        words += _words(each, edges, len(inputs))
    for first, repeats, encoder in sections:
        words += [first, step, repeats, len(encoder.body)]
        for each in encoder.body:
            words += _words(each, edges, len(inputs))
    index = tuple(_INDEX[_counted(role, one.row_role)] for role, _ in inputs)
    results = []
    for out in one.outs:
        shape, order = _stored(program, out.at, out.kind)
        turned = None if order == tuple(range(len(shape))) else (0, *(d + 1 for d in order))
        dtype = acc if out.dtype == 'acc' else getattr(torch, out.dtype)
        results.append((out.kind, shape, turned, dtype))
    return Code(
        torch.tensor(words), torch.tensor(numbers, dtype=torch.float64), tuple(inputs), index,
        tuple(results), tuple(_KINDS[out.kind] for out in one.outs),
        max(math.prod(shape) for _, shape, _, _ in results), acc == torch.float64,
    )  # fmt: skip


def _counted(role: str, row_role: str) -> str:
    """What counts the rows of an input."""
    own = 'dst' if role in OF_DST else role
    return own if own in ('param', 'edge') else 'row' if own == row_role else 'col'


def _words(one: Instruction, edges: int, num_inputs: int) -> list[int]:
    """An instruction as MessageInstruction of csrc/params/message.h."""
    pad = _MOST_DIMS - len(one.sizes)
    words = [_OPS[one.op], len(one.sizes), *one.sizes, *[1] * pad, one.edge_dim]
    operands = [*one.operands]
    for ref, strides in operands:
        space, place = 1, 0
        if isinstance(ref.space, Slot):
            space = 1 if ref.space.uniform else 0
            place = ref.space.place * (1 if ref.space.uniform else edges)
        elif isinstance(ref.space, tuple):
            what, k = ref.space
            space = 2 + k if what == 'input' else 2 + num_inputs + k
        words += [space, place + ref.offset, int(ref.column), *strides, *[0] * pad]
    words += [0] * (9 * (4 - len(operands)))
    return words + [*one.extra, *[0] * (4 - len(one.extra))]


def run_pass_cpu(
    one: 'Pass', graph: Graph, inputs: dict[tuple[str, int], Tensor], acc_dtype: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The results of a pass, and the chosen edges of a maximum or minimum, or the reciprocal of the
    sum of a softmax.

    A result of kind `total` has a leading dimension of partial sums.
    """
    if one.row_role == 'src':
        graph = graph.t()
    code = one.code_for(acc_dtype, inputs)
    num_edges = graph.col.size(0)
    most = min(_MOST_SHARES, num_edges // _LEAST_EDGES, num_edges * code.widest // _GRAIN)
    shares = max(1, most)
    rows = {'edge': num_edges, 'total': shares}
    stored: list[Tensor] = []
    args: list[Tensor] = []
    outs: list[Tensor] = []
    chosen: list[Tensor | None] = []
    for kind, shape, order, dtype in code.results:
        lead = rows.get(kind, graph.num_dst)
        out = torch.empty((lead, *shape), dtype=dtype)
        stored.append(out)
        outs.append(out if order is None else out.permute(order))
        if kind in ('max', 'min', 'softmax'):
            second = dtype if kind == 'softmax' else graph.rowptr.dtype
            args.append(torch.empty((lead, *shape), dtype=second))
            chosen.append(args[-1])
        else:
            chosen.append(None)
    ops.message_pass.default(
        graph.rowptr, graph.col, graph.perm, graph.num_src, code.code, code.numbers,
        [inputs[key] for key in code.loads], code.counted, stored, code.kinds, args, seed,
        code.wide, shares,
    )  # fmt: skip
    return outs, chosen
