"""Writes the values of a message as Triton source, for blocks of edges."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from ._ir import DST_ROLES, NODES, SOFTMAX_ROLES, Load, Program, Refused, is_float, number
from ._values import (
    CALLS,
    COMBINE,
    EDGES,
    POWERS,
    PROGRAM,
    ROW,
    WARP,
    Block,
    Index,
    Raw,
    next_power_of_two,
    sum_text,
)

# Where a value is read: for each of its dimensions, a sum of axes with factors.
Place: TypeAlias = tuple[Index, ...]

INNER = 'inner'  # the inner dimension of a matrix product, as an axis of an index
_MIN_INNER = 16  # of Triton's matrix products
MAX_TILES = 16  # tiles that a dimension may have that is wider than the axes of its pass
_MAX_NAMES = 8192  # of values of a kernel
_MAX_UNROLLED = 32  # numbers of a sum that is written out in place of a loop
# A linear map of inputs of an edge with this many columns holds its matrix in registers; a wider
# one is a matrix product.
_MIN_HELD, MAX_HELD = 4, 16


def step_of(role: str, pointer: str, size: int) -> str:
    """The stride of rows: features of nodes may be columns of a wider matrix."""
    return f'STEP_{pointer}' if role in NODES else str(size)


class Generator:
    """Writes the values of one kernel, which walks the rows of a CSR structure (of `src` or `dst`),
    and the edges of each row in blocks."""

    def __init__(
        self, program: Program, sizes: tuple[int, ...], row_role: str, acc: str, in_tiles: bool
    ) -> None:
        self.program = program
        self.row_role = row_role
        self.acc = acc
        self.in_tiles = in_tiles  # whether a dimension may be several tiles of an axis
        self.sizes = sizes
        self.rank = len(self.sizes)
        self.names = [f'a{k}' for k in range(self.rank)]
        self.blocks = [f'B{k}' for k in range(self.rank)]
        self.size_of = dict(zip(self.names, self.sizes, strict=True))
        self.reduced: set[str] = set()
        # Lines of a program: `first` before its rows, `before` the edges of a row, then `starts` of
        # accumulators, `lines` for each block of edges, `finals` after the edges; stores `of_rows`
        # and `of_pieces` of long rows; `stores` of sums over all edges, after some rows.
        self.first: list[str] = []
        self.before: list[str] = []
        self.starts: list[str] = []
        self.lines: list[str] = []
        self.finals: list[str] = []
        self.of_rows: list[str] = []
        self.of_pieces: list[str] = []
        self.stores: list[str] = []
        self.depth = 0
        self.computed: list[dict[tuple, Block]] = [{}]  # by scope: the kernel, then its loops
        self.count = itertools.count()
        self.loads: dict[Load, tuple[str, str]] = {}  # name of the pointer, and dtype
        self.uses_edge = self.uses_seed = False
        self.tables: set[str] = set()
        self.holds = False  # whether parameters stay in registers
        self.summed: dict[str, tuple[Block, list[str]]] = {}  # sums by name: operand and axes
        self.num_tiles = 1  # of the widest dimension
        self.loops: dict[str, int] = {}  # sizes of axes that are loops
        self.dots: set[int] = set()  # inner sizes of matrix products
        # exp(score - running maximum) of the softmax of this pass, and where.
        self.powers: tuple[Block, Place] | None = None
        #: Of values that results add up with the weights of a softmax the name of the sum.
        self.weighted: dict[str, str] = {}

    # Names and lines.

    def fresh(self) -> str:
        count = next(self.count)
        if count >= _MAX_NAMES:  # Joins in joins write a value again for each of their parts.
            raise Refused('too many operations')
        return f'v{count}'

    def emit(self, text: str, axes: frozenset[str], level: int) -> Block:
        """Assigns an expression to a new name, at its loop level."""
        name = self.fresh()
        if level == EDGES or any(axis in self.loops for axis in axes):
            self.lines.append('    ' * self.depth + f'{name} = {text}')
        else:
            (self.first, self.before)[level].append(f'{name} = {text}')
        return Block(name, axes, level)

    def find(self, key: tuple) -> Block | None:
        for computed in reversed(self.computed):
            if key in computed:
                return computed[key]
        return None

    # Indices.

    def divmod_index(self, index: Index, size: int) -> tuple[Index, Index]:
        """The quotient and remainder of an index by a size."""
        if size == 1:
            return index, Index()
        high = tuple((a, c // size) for a, c in index.terms if c % size == 0)
        low = tuple((a, c) for a, c in index.terms if c % size)
        quotient, rest = divmod(index.const, size)
        if any(c < 0 for _, c in index.terms):
            raise Refused('a view of a reversed dimension')
        most = rest + sum(c * (self.extent(a) - 1) for a, c in low)
        if most >= size:
            raise Refused('a view that divides a dimension unevenly')
        return Index(high, quotient), Index(low, rest)

    def extent(self, axis: str) -> int:
        return self.size_of[axis] if axis in self.size_of else self.loops[axis]

    def view_index(self, index: Place, new: tuple[int, ...], old: tuple[int, ...]) -> Place:
        """The index in shape `old` of the number at `index` in shape `new`."""
        flat = self.offset(index, new)
        # The first dimension takes what is left: a tile may reach beyond its end.
        first = next((dim for dim, size in enumerate(old) if size > 1), 0)
        out = [Index()] * len(old)
        for dim in reversed(range(len(old))):
            if dim == first:
                out[dim] = flat
            elif old[dim] > 1:
                flat, out[dim] = self.divmod_index(flat, old[dim])
        return tuple(out)

    def out_index(self, shape: tuple[int, ...]) -> Place:
        """The index in a result that the axes of the kernel have."""
        if math.prod(shape) == 1:
            return tuple(Index() for _ in shape)
        sizes = [n for n in shape if n != 1]
        if math.prod(shape) == math.prod(self.sizes):
            whole = tuple(Index(((name, 1),)) for name in self.names)
            return self.view_index(whole, self.sizes, shape)
        # The result has some of the axes, in order.
        places, names = [], iter(self.names)
        for size in sizes:
            for name in names:
                if self.size_of[name] == size:
                    places.append(Index(((name, 1),)))
                    break
            else:
                raise Refused(f'results of shapes {self.sizes} and {shape} in one pass')
        parts = iter(places)
        return tuple(Index() if n == 1 else next(parts) for n in shape)

    def computed_place(self, at: int) -> Place | None:
        """The index at which the kernel has computed a whole value, if it has."""
        shape = self.program[at].shape
        for place, index, guard in itertools.chain(*self.computed):
            if place != at or guard:
                continue
            axes = [part.terms[0][0] if part.terms else '' for part in index]
            whole = tuple(Index(((axis, 1),)) if axis else Index() for axis in axes)
            if index == whole and shape == tuple(self.size_of.get(axis, 1) for axis in axes):
                return index
        return None

    def tiles(self, size: int, axis: str) -> Iterator[tuple[Index, str]]:
        """The indices of an axis in the tiles of a dimension, and the guard of the last one."""
        n = self.size_of[axis]
        count = -(-size // n)
        self.num_tiles = max(self.num_tiles, count)
        for k in range(count):
            place = Index(((axis, 1),), k * n)
            yield place, '' if (k + 1) * n <= size else f'(({place.text()} ) < {size})'

    def tile_places(self, shape: tuple[int, ...]) -> list[tuple[Place, str]]:
        """The indices and guards of a result whose last dimension is tiles of the last axis; else
        none."""
        dims = [dim for dim, n in enumerate(shape) if n != 1]
        names = self.names[self.rank - len(dims) :]
        *lead, last = dims or [-1]
        fits = all(self.size_of[name] == shape[dim] for name, dim in zip(names, lead, strict=False))
        if len(dims) != len(names) or not dims or not fits or not self.in_tiles:
            return []
        if shape[last] > MAX_TILES * self.size_of[names[-1]]:
            return []
        index = [Index()] * len(shape)
        for name, dim in zip(names, lead, strict=False):
            index[dim] = Index(((name, 1),))
        return [
            ((*index[:last], place, *index[last + 1 :]), guard)
            for place, guard in self.tiles(shape[last], names[-1])
        ]

    # Values.

    def value(self, at: int, index: Place, guard: str = '') -> Block:
        """A value at an index, where the guard holds; computed once."""
        if guard and not self.guard_axes(guard) & {a for part in index for a, _ in part.terms}:
            guard = ''  # No axis of this value is guarded.
        key = (at, index, guard)
        block = self.find(key)
        if block is None:
            block = self.compute(at, index, guard)
            axes = block.axes
            scope = (
                self.computed[0]
                if block.level < EDGES and not any(a in self.loops for a in axes)
                else (self.computed[-1])
            )
            scope[key] = block
        return block

    def compute(self, at: int, index: Place, guard: str) -> Block:
        op, args, attrs, shape, dtype = self.program[at]
        moved = self.move(at, index)
        if moved is not None:
            return self.value(*moved, guard)
        if op == 'const':
            return self.constant(number(self.program[at]), dtype)
        if op == 'load':
            role, slot = attrs
            return self.load(role, slot, index, shape, dtype, guard)
        if op == 'keep':
            return self.keep(attrs, index, shape)
        if op == 'lookup':
            return self.lookup(at, index, guard)
        if op == 'slice':
            dim, start, _, step = attrs
            part = index[dim].times(step).plus(Index((), start))
            return self.value(args[0], (*index[:dim], part, *index[dim + 1 :]), guard)
        if op == 'cat':
            return self.compute_cat(at, index, guard)
        if op in ('sum', 'amax', 'amin'):
            return self.reduction(at, index, guard)
        if op not in CALLS:
            raise Refused(f'{op} has no kernel')
        return self.pointwise(at, index, guard)

    def pointwise(self, at: int, index: Place, guard: str) -> Block:
        op, args = self.program[at][:2]
        blocks = [
            self.value(arg, self.broadcast_index(index, self.program[arg].shape), guard)
            for arg in args
        ]
        if op == 'pow' and self.program[args[1]].op == 'const':
            exponent = number(self.program[args[1]])
            if exponent in POWERS:
                blocks, op = blocks[:1], POWERS[exponent]
        axes = frozenset().union(*(b.axes for b in blocks))
        level = max(b.level for b in blocks)
        parts = [self.summed[b.name] for b in blocks if b.name in self.summed]
        if op == 'add' and len(parts) == 2 and parts[0][1] == parts[1][1]:
            # One sum between threads for the two; the compiler drops the others.
            (a, over), (b, _) = parts
            both = self.emit(f'{a.name} + {b.name}', a.axes | b.axes, max(a.level, b.level))
            return self.reduce_across('sum', both, over)
        return self.emit(CALLS[op].format(*(b.name for b in blocks)), axes, level)

    @staticmethod
    def broadcast_index(index: Place, shape: tuple[int, ...]) -> Place:
        return tuple(Index() if n == 1 else part for part, n in zip(index, shape, strict=True))

    def constant(self, value: float, dtype: str) -> Block:
        if dtype == 'bool':
            text = 'True' if value else 'False'
        elif math.isfinite(value):
            text = repr(float(value))
        else:
            text = f"float('{value}')"
        return self.emit(
            f'tl.full([{", ".join(["1"] * (self.rank + 1))}], {text}, '
            f'{"tl.int1" if dtype == "bool" else self.acc})', frozenset(), PROGRAM,
        )  # fmt: skip

    def offset(self, index: Place, shape: tuple[int, ...]) -> Index:
        """The offset of an index in contiguous memory."""
        flat, stride = Index(), 1
        for part, size in zip(reversed(index), reversed(shape), strict=True):
            flat = flat.plus(part.times(stride))
            stride *= size
        return flat

    def masks(self, axes: frozenset[str]) -> list[str]:
        return [f'm_{axis}' for axis in sorted(axes) if axis in self.size_of]

    def load(
        self, role: str, slot: int, index: Place, shape: tuple[int, ...], dtype: str, guard: str
    ) -> Block:
        if role == 'picked':
            self.uses_edge = True
            grad = self.load('grad', slot, index, shape, dtype, guard)
            arg = self.load('arg', slot, index, shape, 'int64', guard)
            return self.emit(f'tl.where({arg.name} == eid, {grad.name}, 0.0)', grad.axes, EDGES)
        if role == 'powers':
            return self.exponential(index)
        return self.read(role, slot, self.offset(index, shape), math.prod(shape), dtype, guard)

    def read(self, role: str, slot: int, flat: Index, size: int, dtype: str, guard: str) -> Block:
        """Reads an input at an offset in its rows of `size` numbers."""
        axes = frozenset(axis for axis, _ in flat.terms)
        own = 'dst' if role in DST_ROLES else role
        level = self.level_of(own)
        # Where edges read the statistics of a softmax these are side by side, in one memory sector.
        packed = role in SOFTMAX_ROLES and level == EDGES
        pointer = f'stats{slot}' if packed else f'{role}{slot}'
        self.loads['stats' if packed else role, slot] = pointer, dtype
        self.holds |= level == PROGRAM and bool(axes)
        base = ''
        if own != 'param':
            row = 'eid' if own == 'edge' else 'row' if own == self.row_role else 'other'
            self.uses_edge |= own == 'edge'
            base = f'tl.cast({row}, OFFSET) * {step_of(role, pointer, size)} + '
        masks = self.masks(axes)
        if own == 'edge':  # `other` is a valid row also where there is no edge.
            masks = ['m', *masks]
        if guard:
            masks.append(guard)
            axes = axes | frozenset(self.guard_axes(guard))
        mask = f', {" & ".join(masks)}, 0' if masks else ''
        place = f'{base}{self.blocked(flat)}'
        if packed:
            place = f'({place}) * 3 + {SOFTMAX_ROLES.index(role)}'
        text = f'tl.load({pointer} + ({place}){mask})'
        if is_float(dtype):
            text = self.converted(text)
            # Else a thread would have one of them for each number of wider blocks.
            for k, name in enumerate(self.names):
                if name not in axes:
                    text = sum_text(text, k + 1)
        elif dtype == 'bool':
            text += ' != 0'
        return self.emit(text, axes, level)

    def lookup(self, at: int, index: Place, guard: str) -> Block:
        """A row of a table by an integer of the edge; one that is out of range stops the kernel."""
        _, (which,), (role, slot, wraps), shape, dtype = self.program[at]
        count = len(self.program[which].shape)
        row = self.value(which, index[:count], guard)
        flat, size = self.offset(index[count:], shape[count:]), math.prod(shape[count:])
        axes = row.axes | {axis for axis, _ in flat.terms}
        pointer = f'{role}{slot}'
        self.loads[role, slot] = pointer, dtype
        self.tables.add(pointer)
        masks = ['m', *self.masks(axes), *([guard] if guard else [])]
        if guard:
            axes = axes | frozenset(self.guard_axes(guard))
        place = f'row_of_table({row.name}, ROWS_{pointer}, {wraps}).to(OFFSET) * {size}'
        text = f'tl.load({pointer} + ({place} + {self.blocked(flat)}), {" & ".join(masks)}, 0)'
        return self.emit(self.converted(text), axes, EDGES)

    def converted(self, text: str) -> str:
        """Numbers in the dtype of the arithmetic."""
        return f'widened({text})' if self.acc == 'tl.float32' else f'{text}.to({self.acc})'

    def exponential(self, index: Place) -> Block:
        """exp(score - running maximum); the weighted sum uses the same factor."""
        assert self.powers is not None
        block, place = self.powers
        if index != place:
            raise Refused('a softmax in another order than its multiples')
        return block

    def level_of(self, role: str) -> int:
        return PROGRAM if role == 'param' else ROW if role == self.row_role else EDGES

    def blocked(self, flat: Index) -> str:
        """An offset as a block with all dimensions of the kernel."""
        return f'{flat.text()} + zero'

    def guard_axes(self, guard: str) -> set[str]:
        """The axes that a guard compares."""
        return {name for name in (*self.names, *self.loops) if f'{name} ' in guard}

    def compute_cat(self, at: int, index: Place, guard: str) -> Block:
        _, args, (dim,), _, _ = self.program[at]
        place, start = index[dim], 0
        parts = []
        for arg in args:
            size = self.program[arg].shape[dim]
            parts.append((arg, start, start + size))
            start += size
        if not place.terms:
            for arg, begin, end in parts:
                if begin <= place.const < end:
                    inner = (*index[:dim], Index((), place.const - begin), *index[dim + 1 :])
                    return self.value(arg, inner, guard)
        out: Block | None = None
        for arg, begin, end in parts:
            test = f'(({place.text()} ) >= {begin}) & (({place.text()} ) < {end})'
            # Of a part of one number no other is meant where the test holds.
            part = place.plus(Index((), -begin)) if end - begin > 1 else Index()
            inner = (*index[:dim], part, *index[dim + 1 :])
            block = self.value(arg, inner, f'{guard} & {test}' if guard else test)
            if out is None:
                out = block
            else:
                axes = out.axes | block.axes | frozenset(a for a, _ in place.terms)
                text = f'tl.where({test}, {block.name}, {out.name})'
                out = self.emit(text, axes, max(out.level, block.level))
        assert out is not None
        return out

    def reduction(self, at: int, index: Place, guard: str) -> Block:
        op, (arg,), dims, _, _ = self.program[at]
        shape = self.program[arg].shape
        used = {axis for part in index for axis, _ in part.terms} | self.guard_axes(guard)
        free = [name for name in self.names if name not in used]
        inner, reduce_across, each = list(index), [], []
        for dim in dims:
            size = shape[dim]
            names = self.axes_spanning(size, free)
            if names and size > 1:
                free = [name for name in free if name not in names]
                reduce_across += names
                inner[dim] = self.joint_index(names)
            elif size > 1:
                each.append(dim)
            else:
                inner[dim] = Index()
        if reduce_across and each:
            raise Refused('a sum over dimensions of several sizes')
        if op == 'sum' and len(each) == 1 and not reduce_across and not guard:
            block = self.dot(arg, inner, each[0])
            if block is not None:
                return block
        if op == 'sum' and len(each) == 1 and free and self.in_tiles:
            return self.sum_of_tiles(arg, inner, each[0], free[-1], guard)
        if reduce_across:
            self.reduced.update(reduce_across)
            block = self.value(arg, tuple(inner), guard)
            return self.reduce_across(op, block, reduce_across)
        if math.prod(shape[dim] for dim in each) > _MAX_UNROLLED:
            return self.reduce_in_loop(op, arg, inner, each, shape, guard)
        return self.unrolled(op, arg, inner, each, guard)

    def unrolled(self, op: str, arg: int, index: list[Index], dims: list[int], guard: str) -> Block:
        """A reduction that is written out, number by number."""
        out: Block | None = None
        shape = self.program[arg].shape
        for numbers in itertools.product(*(range(shape[dim]) for dim in dims)):
            for dim, k in zip(dims, numbers, strict=True):
                index[dim] = Index((), k)
            out = self.combine(op, out, self.value(arg, tuple(index), guard))
        assert out is not None
        return out

    def combine(self, op: str, a: Block | None, b: Block) -> Block:
        if a is None:
            return b
        text = COMBINE[op].format(a.name, b.name)
        return self.emit(text, a.axes | b.axes, max(a.level, b.level))

    def sum_of_tiles(self, arg: int, index: list[Index], dim: int, axis: str, guard: str) -> Block:
        """A sum over a dimension, in tiles of an axis that its result does not have."""
        self.reduced.add(axis)
        out: Block | None = None
        for place, test in self.tiles(self.program[arg].shape[dim], axis):
            inner = (*index[:dim], place, *index[dim + 1 :])
            part = self.value(arg, inner, ' & '.join(filter(None, (guard, test))))
            if test:
                text, axes = f'tl.where({test}, {part.name}, 0.0)', part.axes | {axis}
                part = self.emit(text, axes, part.level)
            out = self.combine('sum', out, part)
        assert out is not None
        return self.reduce_across('sum', out, [axis])

    def axes_spanning(self, size: int, free: list[str]) -> list[str]:
        """Free axes, one after another, whose sizes multiply to `size`; none if there are none."""
        for start in range(self.rank):
            for end in range(start + 1, self.rank + 1):
                names = self.names[start:end]
                count = math.prod(self.size_of[name] for name in names)
                if count == size and all(name in free for name in names):
                    return names
        return []

    def joint_index(self, names: list[str]) -> Index:
        """The index in a dimension that several axes divide."""
        index = Index()
        for name in names:
            index = index.times(self.size_of[name]).plus(Index(((name, 1),)))
        return index

    def dot(self, at: int, index: list[Index], dim: int) -> Block | None:
        """The sum as a matrix product, if it is a linear map of inputs of the edges."""
        size = self.program[at].shape[dim]
        if self.program[at].op != 'mul' or not self.is_map(size):
            return None
        index = list(index)
        index[dim] = Index(((INNER, 1),))
        with self.inner(size):
            parts = [self.raw_input(arg, tuple(index)) for arg in self.program[at].args]
            for a, w in (parts, parts[::-1]):
                if a is None or w is None or w.by_edge or not a.by_edge or a.axes or not w.axes:
                    continue
                if not w.axes <= self.size_of.keys():  # It is in a loop.
                    continue
                left, right = self.rows_of(a), self.matrix_of(w)
                if size > MAX_HELD:
                    text = f'tl.dot({left}, {right}, input_precision="tf32x3")'
                else:
                    left = f'tl.expand_dims({left}, {self.rank + 1})'
                    text = self.sum_of_products(f'{left} * tl.expand_dims({right}, 0)', 1, w.axes)
                return self.emit(text, frozenset(self.names), EDGES)
        return None

    def outer(self, at: int, shape: tuple[int, ...]) -> tuple[Block, Index, int] | None:
        """The outer product of an input of the edges with a gradient, summed over a block of edges:
        the gradient of a linear map's weight. Returns it, its offset, and the inner size."""
        for inner, size in enumerate(shape):
            columns = [n for k, n in enumerate(shape) if k != inner and n != 1]
            if not self.is_map(size) or columns not in ([*self.sizes], [math.prod(self.sizes)]):
                continue
            names = iter([[name] for name in self.names] if len(columns) > 1 else [self.names])
            index = tuple(
                Index(((INNER, 1),)) if k == inner else Index() if n == 1 else
                self.joint_index(next(names)) for k, n in enumerate(shape)
            )  # fmt: skip
            block = self.outer_product(at, index, size)
            if block is not None:
                return block, self.offset(index, shape), size
        return None

    def outer_product(self, at: int, index: Place, size: int) -> Block | None:
        with self.inner(size):
            at, place = self.strip_moves(at, index)
            if self.program[at].op != 'mul':
                return None
            sides = [
                self.strip_moves(arg, self.broadcast_index(place, self.program[arg].shape))
                for arg in self.program[at].args
            ]
            for side, other in (sides, sides[::-1]):
                a = self.raw_input(*side)
                loops = {name for part in other[1] for name, _ in part.terms}
                if a is None or not a.by_edge or a.axes or INNER in loops:
                    continue
                g = self.value(*other)
                names = frozenset(self.names)
                masks = ' & '.join(['m', *self.masks(names)])
                left = self.rows_of(a)
                sizes = ', '.join(['BE', *self.blocks])
                right = f'tl.where({masks}, {g.name} + tl.zeros([{sizes}], {self.acc}), 0.0)'
                if size > MAX_HELD:
                    text = f'tl.dot(tl.trans({left}), {right}, input_precision="tf32x3")'
                else:
                    left = f'tl.expand_dims({left}, {self.rank + 1})'
                    text = self.sum_of_products(f'{left} * tl.expand_dims({right}, 1)', 0, names)
                return self.emit(text, names, EDGES)
        return None

    def sum_of_products(self, value: str, axis: int, axes: frozenset[str]) -> str:
        # With columns for all threads of a warp each thread has whole sums, and may fuse products
        # into them; sums between threads may not, see ROUNDED_ADD.
        if len(axes) == self.rank and math.prod(self.sizes) >= WARP:
            return f'tl.sum({value}, axis={axis})'
        return sum_text(value, axis, False)

    def is_map(self, size: int) -> bool:
        """Whether a sum over `size` inputs of an edge is done as a matrix product."""
        if size <= MAX_HELD:
            return size >= _MIN_HELD
        return self.rank == 1 and self.acc == 'tl.float32' and self.sizes[0] >= _MIN_INNER

    @contextmanager
    def inner(self, size: int) -> Iterator[None]:
        """Allows an index over the inner dimension of a matrix product."""
        before = self.loops
        self.loops = {**before, INNER: size}
        try:
            yield
        finally:
            self.loops = before

    def move(self, at: int, index: Place) -> tuple[int, Place] | None:
        """The argument of a view, expand, permute or cast, and the index in it; else None."""
        op, args, attrs, shape, _ = self.program[at]
        if op == 'view':
            index = self.view_index(index, shape, self.program[args[0]].shape)
        elif op == 'expand':
            index = self.broadcast_index(index, self.program[args[0]].shape)
        elif op == 'permute':
            parts = dict(zip(attrs, index, strict=True))
            index = tuple(parts[k] for k in range(len(shape)))
        elif op not in ('cast', 'detach'):
            return None
        return args[0], index

    def strip_moves(self, at: int, index: Place) -> tuple[int, Place]:
        """Strips view/expand/permute/cast; returns the base value and the mapped index."""
        while (moved := self.move(at, index)) is not None:
            at, index = moved
        return at, index

    def raw_input(self, at: int, index: Place) -> Raw | None:
        """Where a value is read, if it is an input of the edges or a parameter."""
        index = self.broadcast_index(index, self.program[at].shape)
        at, index = self.strip_moves(at, index)
        op, _, attrs, shape, dtype = self.program[at]
        if op != 'load':
            return None
        role, slot = attrs
        if role == 'picked' or role in DST_ROLES or not is_float(dtype):
            return None
        flat = self.offset(index, shape)
        axes = frozenset(axis for axis, _ in flat.terms if axis != INNER)
        level = self.level_of(role)
        if level == ROW:
            return None
        pointer = f'{role}{slot}'
        self.loads[role, slot] = pointer, dtype
        step = step_of(role, pointer, math.prod(shape))
        return Raw(role, pointer, flat, axes, level == EDGES, step)

    def rows_of(self, raw: Raw) -> str:
        """The rows of an input as a matrix of a block's edges by the inner dimension."""
        key = ('rows', raw, self.loops[INNER])
        block = self.find(key)
        if block is None:
            self.uses_edge |= raw.role == 'edge'
            self.dots.add(self.loops[INNER])
            base = 'eid' if raw.role == 'edge' else 'other'
            size = self.loops[INNER]
            place = raw.flat.text().replace(INNER, f'i{size}')
            block = self.computed[-1][key] = self.emit(
                f'tl.load({raw.pointer} + (tl.cast({base}, OFFSET) * {raw.step} + {place}), '
                f'm & (i{size} < {size}), 0).to({self.acc})',
                frozenset(), EDGES,
            )  # fmt: skip
        return block.name

    def matrix_of(self, raw: Raw) -> str:
        """A parameter as a matrix of the inner dimension by columns, in registers."""
        key = ('matrix', raw, self.loops[INNER])
        block = self.find(key)
        if block is None:
            size = self.loops[INNER]
            self.dots.add(size)
            place = raw.flat.text().replace(INNER, f'j{size}')
            masks = ' & '.join([f'(j{size} < {size})', *self.masks(raw.axes)])
            name = self.fresh()
            self.holds = True
            self.first.append(
                f'{name} = tl.load({raw.pointer} + ({place}), {masks}, 0).to({self.acc})'
            )
            block = self.computed[0][key] = Block(name, raw.axes, PROGRAM)
        return block.name

    def reduce_across(self, op: str, block: Block, axes: list[str]) -> Block:
        """Reduces a block over axes of the kernel: between threads."""
        name, kept = block.name, block.axes
        lost = [axis for axis in axes if axis not in block.axes]
        out = block
        for axis in axes:
            if axis in lost:
                if op == 'sum':
                    out = self.emit(
                        f'{out.name} * {float(self.size_of[axis])}', out.axes, block.level
                    )
                continue
            kept = kept - {axis}
            name = out.name
            other = {'sum': '0.0', 'amax': "float('-inf')", 'amin': "float('inf')"}[op]
            place = self.names.index(axis) + 1
            masked = f'tl.where(m_{axis}, {name}, {other})'
            if op == 'sum':
                text = sum_text(masked, place)
            else:
                text = f'tl.{op[1:]}({masked}, axis={place}, keep_dims=True)'
            out = self.emit(text, kept, block.level)
        if op == 'sum':
            self.summed[out.name] = block, axes
        return out

    def reduce_in_loop(
        self, op: str, arg: int, inner: list[Index], dims: list[int], shape: tuple[int, ...],
        guard: str,
    ) -> Block:  # fmt: skip
        if len(dims) != 1:
            raise Refused('a sum over several wide dimensions')
        loop = f'l{next(self.count)}'
        self.loops[loop] = shape[dims[0]]
        inner[dims[0]] = Index(((loop, 1),))
        # Values that the loop does not change are emitted before it, outside of its scope.
        mark = len(self.lines)
        self.computed.append({})
        self.depth += 1
        block = self.value(arg, tuple(inner), guard)
        self.depth -= 1
        self.computed.pop()
        body = self.lines[mark:]
        del self.lines[mark:]
        axes = frozenset(a for a in block.axes if a in self.size_of)
        total = self.fresh()
        sizes = ['BE' if block.level == EDGES else '1']
        sizes += [f'B{k}' if name in axes else '1' for k, name in enumerate(self.names)]
        pad = '    ' * self.depth
        start = {'sum': '0.0', 'amax': "float('-inf')", 'amin': "float('inf')"}[op]
        new = [
            f'{pad}{total} = tl.full([{", ".join(sizes)}], {start}, {self.acc})',
            f'{pad}for {loop} in range({shape[dims[0]]}):',
            *body,
            f'{pad}    {total} = ' + COMBINE[op].format(total, block.name),
        ]
        self.lines += new
        del self.loops[loop]
        return Block(total, axes, EDGES)

    def keep(self, attrs: tuple[int, str], index: Place, shape: tuple[int, ...]) -> Block:
        self.uses_edge = self.uses_seed = True
        which, p = attrs[0], float.fromhex(attrs[1])
        flat = self.offset(index, shape)
        axes = frozenset(axis for axis, _ in flat.terms)
        size = math.prod(shape)
        text = f'tl.rand(seed + {which}, (tl.cast(eid, tl.int64) * {size} + {self.blocked(flat)}))'
        block = self.emit(text, axes, EDGES)
        scale = 1 / (1 - p) if p < 1 else 0.0
        return self.emit(f'tl.where({block.name} >= {p!r}, {scale!r}, 0.0)', axes, EDGES)


def block_of(inner: int) -> int:
    """The block size of the inner dimension of a matrix product."""
    return max(next_power_of_two(inner), 1 if inner <= MAX_HELD else _MIN_INNER)
