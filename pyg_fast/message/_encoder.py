"""Encodes the values of a pass as instructions for csrc/cpu/message.isa.cpp."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._instructions import Instruction, Ref, Slot, contiguous_strides, merge_dims, view_strides
from ._ir import POINTWISE, UNARY, Load, Program, Refused, number
from ._values import POWERS

MAX_DIMS = 6  # of an instruction
_MAX_NARROW = 4  # numbers of a row of an input that is copied
# How often powers multiply the square by the base.
_FACTORS: dict[float, int] = {2: 0, 3: 1, 4: 2}
_ROW_OPS = {'sum': 'row_sum', 'mean': 'row_mean', 'max': 'row_max', 'min': 'row_min'}


class _Dim(NamedTuple):
    """A dimension of a matrix product, with the stride of each operand."""

    place: int
    reduced: bool
    size: int
    out: int | None
    a: int | None
    b: int | None


class Encoder:
    """Writes the instructions of a section: all columns, or a chunk of them.

    `first` run once and compute values that all edges share, `body` runs for each tile of edges.
    """

    def __init__(
        self, program: Program, outs: list[tuple[int, str, int]], acc: torch.dtype,
        inputs: list[Load], dtypes: dict[Load, torch.dtype], numbers: list[float], chunk: bool,
    ) -> None:  # fmt: skip
        self.program = program
        self.outs = outs
        self.acc = acc
        self.inputs = inputs
        self.dtypes = dtypes
        self.numbers = numbers
        self.chunk = chunk
        self.first: list[Instruction] = []
        self.body: list[Instruction] = []
        self.refs: dict[int, Ref] = {}
        self.lone_products: set[int] = set()  # those that only one sum of two values uses
        # The softmax of a joint pass: its result number, its exponentials, and their count.
        self.softmax: tuple[int, Ref, int] | None = None

    def slot(self, shape: tuple[int, ...], uniform: bool) -> Ref:
        # A chunk computes values that all edges share again for each tile.
        width = math.prod(shape)
        slot = Slot(width, uniform and not self.chunk)
        return Ref(slot, 0, contiguous_strides(shape), 0 if uniform else width)

    def emit(self, instruction: Instruction) -> None:
        out = instruction.operands[0][0].space
        is_shared = isinstance(out, Slot) and out.uniform
        (self.first if is_shared else self.body).append(instruction)

    def nest(
        self, op: str, shape: tuple[int, ...], out: Ref, args: list[Ref],
        extra: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        """Emits a loop nest over `shape` (and edges)."""
        refs = [out, *args]
        edge = any(not ref.uniform for ref in refs)
        sizes, dims = merge_dims([1, *shape], [[ref.edge, *ref.strides] for ref in refs], edge)
        indexed = any(ref.edge is None for ref in refs)
        if (
            not dims
            or (indexed and len(dims) == 1)
            or (dims[-1][0] != 1 and (op in POINTWISE or op in ('copy', 'fma')))
        ):
            # Instructions write their innermost dimension without gaps.
            sizes.append(1)
            dims.append([1] * len(refs))
        if len(sizes) > MAX_DIMS:
            raise Refused(f'{op} over {len(sizes)} dimensions')
        strides = [[dim[k] or 0 for dim in dims] for k in range(len(refs))]
        self.emit(Instruction(
            op, sizes, 0 if edge else -1, list(zip(refs, strides, strict=True)), extra
        ))  # fmt: skip

    # Values.

    def ref(self, at: int) -> Ref:
        if at not in self.refs:
            self.refs[at] = self.build(at)
        return self.refs[at]

    def per_edge(self, at: int) -> Ref:
        """The value with a stride along edges, also if all edges share it."""
        ref, shape = self.ref(at), self.program[at].shape
        if ref.edge is None:
            return self.compact_copy(ref, shape)
        return self.copy(ref, shape, per_edge=True) if ref.uniform else ref

    def copy(self, ref: Ref, shape: tuple[int, ...], per_edge: bool = False) -> Ref:
        """A contiguous copy; with `per_edge` of each edge, also if all edges share the value."""
        out = self.slot(shape, ref.uniform and not per_edge)
        self.nest('copy', shape, out, [ref])
        return out

    def broadcast(self, at: int, shape: tuple[int, ...]) -> Ref:
        """The value broadcast to a shape, by strides of 0."""
        ref, own = self.ref(at), self.program[at].shape
        extra = len(shape) - len(own)
        strides = (0,) * extra + tuple(
            0 if n == 1 else s for n, s in zip(own, ref.strides, strict=True)
        )
        return ref._replace(strides=strides)

    def build(self, at: int) -> Ref:
        op, args, attrs, shape, _ = self.program[at]
        if op == 'const':
            value = number(self.program[at])
            return Ref('numbers', self.number(value), (0,) * len(shape), 0)
        if op == 'load':
            return self.build_load(attrs, shape)
        if op == 'keep':
            return self.build_keep(attrs, shape)
        if op in ('cast', 'detach', 'expand', 'view', 'permute', 'slice'):
            return self.build_view(at)
        if op == 'cat':
            return self.build_cat(at)
        if op in ('sum', 'amax', 'amin'):
            return self.build_reduction(at)
        if op == 'mm':
            return self.build_map(at)
        if op not in POINTWISE:
            raise Refused(f'{op} has no kernel')
        if op == 'pow' and self.program[args[1]].op == 'const':
            exponent = number(self.program[args[1]])
            if exponent in _FACTORS:
                return self.build_power(args[0], exponent)
            if POWERS.get(exponent) in UNARY:
                op, args = POWERS[exponent], args[:1]
        if op == 'add':
            for x, other in (args, args[::-1]):
                if x in self.lone_products and x not in self.refs:
                    op, args = 'fma', (*self.program[x].args, other)
                    break
        refs = [self.broadcast(arg, shape) for arg in args]
        if op == 'fma' and shape and refs[0].strides[-1] == 0:
            refs[:2] = refs[1::-1]
        out = self.slot(shape, all(ref.uniform for ref in refs))
        self.nest(op, shape, out, refs)
        return out

    def build_power(self, at: int, exponent: float) -> Ref:
        """A power that is a product of a few factors."""
        ref, shape = self.ref(at), self.program[at].shape
        out = self.slot(shape, ref.uniform)
        self.nest('mul', shape, out, [ref, ref])
        for _ in range(_FACTORS[exponent]):
            self.nest('mul', shape, out, [out, ref])
        return out

    def build_view(self, at: int) -> Ref:
        """The same numbers with other strides; copied only if a view needs it."""
        op, args, attrs, shape, _ = self.program[at]
        if op == 'expand':
            return self.broadcast(args[0], shape)
        ref = self.ref(args[0])
        if op == 'view':
            old = self.program[args[0]].shape
            strides = view_strides(ref.strides, old, shape)
            if strides is None:
                ref, strides = self.copy(ref, old), contiguous_strides(shape)
            return ref._replace(strides=strides)
        if op == 'permute':
            return ref.permuted(attrs)
        if op == 'slice':
            dim, start, _, step = attrs
            strides = (*ref.strides[:dim], ref.strides[dim] * step, *ref.strides[dim + 1 :])
            return ref._replace(strides=strides, offset=ref.offset + start * ref.strides[dim])
        return ref

    def number(self, value: float) -> int:
        """The place of a constant, which keeps the sign of zero."""
        for k, other in enumerate(self.numbers):
            if other == value and math.copysign(1, other) == math.copysign(1, value):
                return k
        self.numbers.append(value)
        return len(self.numbers) - 1

    def input(self, role: str, slot: int) -> int:
        if (role, slot) not in self.inputs:
            self.inputs.append((role, slot))
        return self.inputs.index((role, slot))

    def build_load(self, load: Load, shape: tuple[int, ...]) -> Ref:
        (role, slot), width = load, math.prod(shape)
        column = self.chunk and width > 1
        if role == 'powers':
            assert self.softmax is not None
            return self.softmax[1]
        # Rows that are narrower than a vector are copied: then vectors have those of many edges.
        is_narrow = 1 < width <= _MAX_NARROW
        if role == 'param' or (
            role != 'picked' and self.dtypes[load] == self.acc and not is_narrow
        ):
            space = 'input', self.input(role, slot)
            edge = 0 if role == 'param' else None
            return Ref(space, 0, contiguous_strides(shape), edge, column)
        out = self.slot(shape, False)
        if role == 'picked':
            op, which = role, (self.input('grad', slot), self.input('arg', slot))
        else:
            op, which = 'load', (self.input(role, slot), 0)
        self.emit(Instruction(op, [1, width], 0, [(out, [width, 1])], (*which, 0, int(column))))
        return out

    def build_keep(self, attrs: tuple, shape: tuple[int, ...]) -> Ref:
        which, p = attrs[0], float.fromhex(attrs[1])
        width = math.prod(shape)
        out = self.slot(shape, False)
        threshold = min(int(p * 2**32), 2**32 - 1)
        scale = self.number(1 / (1 - p) if p < 1 else 0.0)
        column = int(self.chunk and width > 1)
        extra = (which, threshold, scale, column)
        self.emit(Instruction('keep', [1, width], 0, [(out, [width, 1])], extra))
        return out

    def build_cat(self, at: int) -> Ref:
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

    def build_reduction(self, at: int) -> Ref:
        op, (arg,), dims, shape, _ = self.program[at]
        inner = self.program[arg].shape
        if op == 'sum' and self.program[arg].op == 'mul' and arg not in self.refs:
            found = self.build_contraction(arg, dims, shape) or self.build_dot(arg, dims, shape)
            if found is not None:
                return found
        ref = self.ref(arg)
        out = self.slot(shape, ref.uniform)
        neutral = {'sum': 0.0, 'amax': -math.inf, 'amin': math.inf}[op]
        self.fill(out, shape, neutral)
        self.reduce(op, inner, out.with_zero_strides(dims), ref)
        return out

    def fill(self, out: Ref, shape: tuple[int, ...], value: float) -> None:
        self.nest('copy', shape, out, [Ref('numbers', self.number(value), (0,) * len(shape), 0)])

    def build_dot(self, mul: int, dims: tuple[int, ...], shape: tuple[int, ...]) -> Ref | None:
        """The sum of a product along its last dimensions; the product is not stored."""
        args, inner = self.program[mul].args, self.program[mul].shape
        refs = [self.broadcast(arg, inner) for arg in args]
        wide = [d for d, n in enumerate(inner) if n > 1]
        if not wide or wide[-1] not in dims or any(ref.strides[wide[-1]] > 1 for ref in refs):
            return None
        order = sorted(range(len(inner)), key=lambda d: (d in dims, d))
        out = self.slot(shape, all(ref.uniform for ref in refs))
        several = len([d for d in dims if inner[d] > 1]) > 1
        if several:
            self.fill(out, shape, 0.0)
        to, *refs = (ref.permuted(order) for ref in (out.with_zero_strides(dims), *refs))
        self.nest('dot', tuple(inner[d] for d in order), to, refs, (int(several),))
        return out

    def reduce(self, op: str, shape: tuple[int, ...], out: Ref, ref: Ref) -> None:
        """Reduces into `out`. Innermost are dimensions of stride 1 that stay, else reduced ones."""
        order = sorted(range(len(shape)), key=lambda d: (
            2 if out.strides[d] == 1 and shape[d] > 1 else 1 if out.strides[d] == 0 else 0
        ))  # fmt: skip
        if any(ref.strides[d] == 1 and out.strides[d] == 0 and shape[d] > 1 for d in order):
            order = sorted(range(len(shape)), key=lambda d: (out.strides[d] == 0, d))
        sizes = tuple(shape[d] for d in order)
        self.nest(op, sizes, out.permuted(order), [ref.permuted(order)])

    def build_contraction(
        self, mul: int, dims: tuple[int, ...], shape: tuple[int, ...]
    ) -> Ref | None:
        """The sum of a product with values that all edges share, as a matrix product."""
        args, inner = self.program[mul].args, self.program[mul].shape
        refs = [self.broadcast(arg, inner) for arg in args]
        if refs[0].uniform == refs[1].uniform:
            return None
        a, b = refs[::-1] if refs[0].uniform else refs
        out = self.slot(shape, False)
        to = out.with_zero_strides(dims)
        return out if self.build_product_of_rows(inner, dims, to, a, b, False) else None

    def build_map(self, at: int) -> Ref:
        """A linear map of the last dimension, by a matrix that all edges share."""
        _, (x, weight), _, shape, _ = self.program[at]
        own, inner = self.program[x].shape, (*self.program[x].shape, shape[-1])
        dim = len(own) - 1
        a, b = self.per_edge(x), self.ref(weight)
        a = a._replace(strides=(*a.strides, 0))
        b = b._replace(strides=(*(0,) * dim, *b.strides))
        out = self.slot(shape, False)
        to = out._replace(strides=(*out.strides[:-1], 0, out.strides[-1]))
        if not self.build_product(inner, (dim,), to, a, b, False):  # A dimension of size 1.
            products = self.slot(inner, False)
            self.nest('mul', inner, products, [a, b])
            self.fill(out, shape, 0.0)
            self.reduce('sum', inner, to, products)
        return out

    def compact_copy(self, ref: Ref, shape: tuple[int, ...]) -> Ref:
        """A copy of rows of an input that leaves out dimensions of stride 0."""
        own = tuple(1 if s == 0 else n for n, s in zip(shape, ref.strides, strict=True))
        out = self.copy(ref, own)
        return out._replace(
            strides=tuple(0 if n == 1 else s for n, s in zip(own, out.strides, strict=True))
        )

    def build_product_of_rows(
        self, shape: tuple[int, ...], dims: tuple[int, ...], out: Ref, a: Ref, b: Ref, add: bool,
    ) -> bool:  # fmt: skip
        """A matrix product of values that may be indexed rows of an input: these are copied."""
        begin = len(self.body)
        a, b = (self.compact_copy(x, shape) if x.edge is None else x for x in (a, b))
        if self.build_product(shape, dims, out, a, b, add):
            return True
        del self.body[begin:]
        return False

    def build_product(
        self, shape: tuple[int, ...], dims: tuple[int, ...], out: Ref, a: Ref, b: Ref, add: bool,
    ) -> bool:  # fmt: skip
        """A matrix product if strides allow: `a` varies along m, `b` along n, both along k."""
        rows = _product_dims(shape, dims, (out, a, b))
        edge, reduced = rows[0], [row for row in rows if row.reduced]
        columns = [row for row in rows[1:] if not row.reduced and row.out == 1]
        if len(reduced) != 1 or len(columns) != 1:
            return False
        (k,), (n,) = reduced, columns
        if n.a and not n.b:
            return self.build_product(shape, dims, out, b, a, add)
        rest = [row for row in rows if row not in (k, n)]
        ms = [row for row in rest if row.b == 0 and row.a]
        if n.a or not n.b or not ms:
            return False
        m = edge if edge in ms else ms[0]
        order = [*(row for row in rest if row is not m), m, k, n]
        strides = {row.place: row.b or 0 for row in order}
        if n.b != 1 or not k.b:
            # Lay out the matrix anew, once for all edges.
            if not b.uniform or edge.b:
                return False
            varying = [row for row in order if row is not m and (row.b or row in (k, n))]
            sizes = tuple(row.size for row in varying)
            old = b._replace(strides=tuple(row.b or 0 for row in varying))
            b = self.slot(sizes, True)
            self.nest('copy', sizes, b, [old])
            strides = {row.place: stride for row, stride in zip(varying, b.strides, strict=True)}
        if len(order) > MAX_DIMS:
            return False
        operands = [
            (out, [row.out or 0 for row in order]), (a, [row.a or 0 for row in order]),
            (b, [strides.get(row.place, 0) for row in order]),
        ]  # fmt: skip
        sizes = tuple(row.size for row in order)
        self.emit(Instruction('product', [*sizes], order.index(edge), operands, (int(add),)))
        return True

    # Results.

    def build_result(self, at: int, kind: str, k: int) -> None:
        shape = self.program[at].shape
        width = math.prod(shape)
        if kind == 'total':
            inner, order = storage_layout(self.program, at, kind)
            strides = tuple(contiguous_strides(inner)[d] for d in order)
            out = Ref(('total', k), 0, strides, 0, self.chunk and width > 1)
            return self.build_total(at, out)
        if kind == 'softmax':
            return self.build_row_softmax(at, k)
        if kind in ('sum', 'mean', 'weighted') and self.build_row_product(at, kind, k):
            return None
        ref = self.ref(at)
        pairs = zip(shape, ref.strides, contiguous_strides(shape), strict=True)
        if width > 1 and any(n > 1 and own != plain for n, own, plain in pairs):
            ref = self.copy(ref, shape)
        op = _ROW_OPS.get(kind, 'to_edge')
        self.body.append(Instruction(
            op, [1, width], 0, [(ref, [0, 0]), (ref, [ref.edge or 0, 1])],
            (k, int(self.chunk and width > 1)),
        ))  # fmt: skip
        return None

    def build_row_softmax(self, at: int, k: int) -> None:
        """Emits a softmax, and keeps the exponentials for results of kind `weighted`."""
        shape = self.program[at].shape
        width = math.prod(shape)
        ref = self.ref(at)
        if (
            ref.edge != width
            or not isinstance(ref.space, Slot)
            or ref.strides != (contiguous_strides(shape))
        ):
            ref = self.copy(ref, shape, per_edge=True)
        out = self.slot(shape, False)
        self.body.append(Instruction(
            'row_softmax', [1, width], 0, [(out, [width, 1]), (ref, [width, 1])],
            (k, int(self.chunk and width > 1)),
        ))  # fmt: skip
        self.softmax = (k, out, width)

    def build_row_product(self, at: int, kind: str, k: int) -> bool:
        """Emits a sum of products that are not stored, if the result is one. One of kind `weighted`
        always is: a value that is no product is multiplied by one."""
        inner, width = at, math.prod(self.program[at].shape)
        while self.program[inner].op in ('view', 'cast') and inner not in self.refs:
            (inner,) = self.program[inner].args
        op, args, _, shape, _ = self.program[inner]
        pairs: list[tuple[Ref | None, Ref]] = []
        if op == 'mul' and inner not in self.refs:
            a, b = (self.broadcast(arg, shape) for arg in args)
            pairs = [(a, b), (b, a)]
        if kind == 'weighted':
            pairs.append((None, Ref('numbers', self.number(1.0), (0,) * len(shape), 0)))
        for x, w in pairs:
            if x is None:
                x = self.copy(self.ref(inner), shape)
            sizes, dims = merge_dims(
                [*shape], [[*contiguous_strides(shape)], [*x.strides], [*w.strides]], False
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

    def build_total(self, at: int, out: Ref) -> None:
        """Adds the value of every edge to `out`."""
        op, args, attrs, shape, _ = self.program[at]
        if at not in self.refs:
            if op in ('view', 'cast'):
                own = self.program[args[0]].shape
                strides = view_strides(out.strides, shape, own)
                if strides is not None:
                    return self.build_total(args[0], out._replace(strides=strides))
            if op == 'permute':
                turned = [0] * len(shape)
                for place, k in enumerate(attrs):
                    turned[k] = out.strides[place]
                return self.build_total(args[0], out._replace(strides=tuple(turned)))
            if op == 'sum':
                return self.sum_over_edges(args[0], attrs, out.with_zero_strides(attrs))
            if op == 'outer':
                return self.sum_outer_products(args, out)
        return self.sum_over_edges(at, (), out)

    def sum_outer_products(self, args: Sequence[int], out: Ref) -> None:
        """Adds outer products of two values of every edge, summed over leading dimensions; `args`
        are the factors of one after another."""
        if len(args) > 2:
            self.sum_outer_products(args[2:], out)
        args = args[:2]
        shapes = [self.program[arg].shape for arg in args]
        lead = shapes[0][:-1]
        inner, dims = (*lead, shapes[0][-1], shapes[1][-1]), tuple(range(len(lead)))
        a, b = map(self.per_edge, args)
        a = a._replace(strides=(*a.strides, 0))
        b = b._replace(strides=(*b.strides[:-1], 0, b.strides[-1]))
        to = out._replace(strides=(*(0,) * len(lead), *out.strides), edge=0)
        if not self.build_product(inner, dims, to, a, b, True):
            products = self.slot(inner, False)
            self.nest('mul', inner, products, [a, b])
            self.reduce('sum', inner, to, products)
        return None

    def sum_over_edges(self, at: int, dims: tuple[int, ...], out: Ref) -> None:
        """Adds the value of every edge, summed over `dims`."""
        value = self.program[at]
        if value.op == 'mul' and at not in self.refs:
            a, b = (self.broadcast(arg, value.shape) for arg in value.args)
            to = out._replace(edge=0)
            if not (a.uniform or b.uniform) and self.build_product_of_rows(
                value.shape, dims, to, a, b, True
            ):
                return
        ref = self.ref(at)
        if ref.uniform:
            ref = self.copy(ref, value.shape, per_edge=True)
        self.reduce('sum', value.shape, out, ref)

    def run(self) -> None:
        program = self.program
        by_value: dict[int, list[Load]] = {}
        for at, kind, k in self.outs:
            by_value.setdefault(at, []).append((kind, k))
        order = program.reachable(by_value)
        # Views are resolved where they are used, and products that only sums use are not stored.
        users: dict[int, list[str]] = {}
        for at in order:
            for arg in program[at].args:
                users.setdefault(arg, []).append(program[at].op)
        self.lone_products = {
            at for at in order
            if program[at].op == 'mul' and users.get(at) == ['add'] and at not in by_value
        }  # fmt: skip
        lazy = {'const', 'load', 'view', 'expand', 'permute', 'slice', 'cast', 'detach'}
        for at in order:
            op = program[at].op
            used = set(users.get(at, ()))
            later = (
                op in lazy
                or (op == 'mul' and used <= {'sum', 'view', 'permute', 'cast'})
                or at in self.lone_products
                or (op == 'sum' and not used)
                or op == 'outer'
            )
            if at in by_value:
                for kind, k in by_value[at]:
                    self.build_result(at, kind, k)
            elif not later:
                self.ref(at)


def _product_dims(
    shape: tuple[int, ...], dims: tuple[int, ...], refs: tuple[Ref, Ref, Ref]
) -> list[_Dim]:
    """The dimensions of a product, that of edges first; neighbours with joint strides are one."""
    rows: list[_Dim] = []
    for d, n in enumerate((1, *shape)):
        if d > 0 and n == 1:
            continue
        strides = [ref.edge if d == 0 else ref.strides[d - 1] for ref in refs]
        reduced = refs[0].edge == 0 if d == 0 else d - 1 in dims
        last = rows[-1] if rows else None
        if (
            last is not None
            and last.reduced == reduced
            and all(y is not None and x == y * n for x, y in zip(last[3:], strides, strict=True))
        ):
            rows[-1] = _Dim(last.place, reduced, last.size * n, *strides)
        else:
            rows.append(_Dim(len(rows), reduced, n, *strides))
    return rows


def storage_layout(program: Program, at: int, kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape in which memory holds a result, and where each of its dimensions is there. A sum
    over edges of a transposed value is stored as that of the value: its rows have all channels."""
    op, args, attrs, shape, _ = program[at]
    if kind != 'total' or op != 'permute':
        return shape, tuple(range(len(shape)))
    return program[args[0]].shape, attrs
