"""Writes the values of one edge as Triton source."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._ir import NODES, OF_DST, STATISTICS, Program, Refused, is_float, number
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
    power,
    total_of,
)

# The inner dimension of a product of matrices, in an index.
INNER = 'inner'
_LEAST_INNER = 16  # of Triton's products
# Tiles that make up a result wider than others in its pass.
MOST_TILES = 16
# A sum over at most this many numbers is written out.
_UNROLLED = 32
# A linear map of raw values of an edge: of at least and at most so many inputs its matrix stays in
# registers; of more, it is a product of matrices.
_LEAST_HELD, MOST_HELD = 4, 16

def step_of(role: str, pointer: str, size: int) -> str:
    """From a row to the next: features of nodes may be columns of a wider matrix."""
    return f'STEP_{pointer}' if role in NODES else str(size)


class Generator:
    """Writes one kernel: over the rows of a CSR structure, `src` or `dst`, the edges of each in
    blocks."""

    def __init__(
        self, program: Program, sizes: tuple[int, ...], row_role: str, acc: str, in_tiles: bool
    ) -> None:
        self.program = program
        self.row_role = row_role
        self.acc = acc
        self.in_tiles = in_tiles  # A dimension may be several tiles of an axis.
        self.sizes = sizes
        self.rank = len(self.sizes)
        self.names = [f'a{k}' for k in range(self.rank)]
        self.blocks = [f'B{k}' for k in range(self.rank)]
        self.size_of = dict(zip(self.names, self.sizes, strict=True))
        self.reduced: set[str] = set()
        # Lines of a program: before its rows, before the edges of a row, for each block of edges,
        # after the edges, there also the stores of a row and those of a piece of a long one, and
        # after some rows. Sums start after what is read before the edges.
        self.first: list[str] = []
        self.before: list[str] = []
        self.starts: list[str] = []
        self.lines: list[str] = []
        self.finals: list[str] = []
        self.of_rows: list[str] = []
        self.of_pieces: list[str] = []
        self.stores: list[str] = []
        self.depth = 0
        self.known: list[dict[Any, Block]] = [{}]
        self.count = itertools.count()
        self.loads: dict[tuple[str, int], tuple[str, str]] = {}
        self.uses_edge = self.uses_seed = False
        self.holds = False  # parameters in registers
        self.summed: dict[str, tuple[Block, list[str]]] = {}  # what a value sums, and over what
        self.num_tiles = 1  # of the widest dimension
        self.loops: dict[str, int] = {}
        self.dots: set[int] = set()  # inputs of linear maps
        # The exponentials of a softmax's scores, and their place.
        self.powers: tuple[Block, tuple[Index, ...]] | None = None

    # Names and lines.

    def fresh(self) -> str:
        return f'v{next(self.count)}'

    def emit(self, text: str, axes: frozenset[str], level: int) -> Block:
        name = self.fresh()
        if level == EDGES or any(axis in self.loops for axis in axes):
            self.lines.append('    ' * self.depth + f'{name} = {text}')
        else:
            (self.first, self.before)[level].append(f'{name} = {text}')
        return Block(name, axes, level)

    def find(self, key: Any) -> Block | None:
        for known in reversed(self.known):
            if key in known:
                return known[key]
        return None

    # Indices.

    def divided(self, index: Index, size: int) -> tuple[Index, Index]:
        """Quotient and remainder."""
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

    def viewed(self, index: tuple[Index, ...], new: tuple[int, ...], old: tuple[int, ...]) -> tuple:
        """The index in shape `old` of the number at `index` in shape `new`."""
        flat, stride = Index(), 1
        for part, size in zip(reversed(index), reversed(new), strict=True):
            flat = flat.plus(part.times(stride))
            stride *= size
        # The first dimension takes what is left: a tile may reach beyond its end.
        first = next((dim for dim, size in enumerate(old) if size > 1), 0)
        out = [Index()] * len(old)
        for dim in reversed(range(len(old))):
            if dim == first:
                out[dim] = flat
            elif old[dim] > 1:
                flat, out[dim] = self.divided(flat, old[dim])
        return tuple(out)

    def out_index(self, shape: tuple[int, ...]) -> tuple[Index, ...]:
        """The place in a result of the axes of the kernel."""
        if math.prod(shape) == 1:
            return tuple(Index() for _ in shape)
        sizes = [n for n in shape if n != 1]
        if math.prod(shape) == math.prod(self.sizes):
            whole = tuple(Index(((name, 1),)) for name in self.names)
            return self.viewed(whole, self.sizes, shape)
        # Some of the axes, in order.
        found, names = [], iter(self.names)
        for size in sizes:
            for name in names:
                if self.size_of[name] == size:
                    found.append(Index(((name, 1),)))
                    break
            else:
                raise Refused(f'results of shapes {self.sizes} and {shape} in one pass')
        parts = iter(found)
        return tuple(Index() if n == 1 else next(parts) for n in shape)

    def known_place(self, at: int) -> tuple[Index, ...] | None:
        """Where a program has computed all numbers of a value, each once."""
        shape = self.program[at].shape
        for place, index, guard in itertools.chain(*self.known):
            if place != at or guard:
                continue
            axes = [part.terms[0][0] if part.terms else '' for part in index]
            whole = tuple(Index(((axis, 1),)) if axis else Index() for axis in axes)
            if index == whole and shape == tuple(self.size_of.get(axis, 1) for axis in axes):
                return index
        return None

    def tiles(self, size: int, axis: str) -> Iterator[tuple[Index, str]]:
        """The places of an axis in tiles of a dimension, and what guards the last one."""
        n = self.size_of[axis]
        count = -(-size // n)
        self.num_tiles = max(self.num_tiles, count)
        for k in range(count):
            place = Index(((axis, 1),), k * n)
            yield place, '' if (k + 1) * n <= size else f'(({place.text()} ) < {size})'

    def tiled(self, shape: tuple[int, ...]) -> list[tuple[tuple[Index, ...], str]]:
        """The places in a result whose last dimension is another than that of the last axes; none
        if that is not possible."""
        dims = [dim for dim, n in enumerate(shape) if n != 1]
        names = self.names[self.rank - len(dims):]
        *lead, last = dims or [-1]
        fits = all(self.size_of[name] == shape[dim] for name, dim in zip(names, lead, strict=False))
        if len(dims) != len(names) or not dims or not fits or not self.in_tiles:
            return []
        if shape[last] > MOST_TILES * self.size_of[names[-1]]:
            return []
        index = [Index()] * len(shape)
        for name, dim in zip(names, lead, strict=False):
            index[dim] = Index(((name, 1),))
        return [
            ((*index[:last], place, *index[last + 1:]), guard)
            for place, guard in self.tiles(shape[last], names[-1])
        ]

    # Values.

    def value(self, at: int, index: tuple[Index, ...], guard: str = '') -> Block:
        if guard and not self.guard_axes(guard) & {a for part in index for a, _ in part.terms}:
            guard = ''  # The place is inside of the part that the guard stands for.
        key = (at, index, guard)
        found = self.find(key)
        if found is None:
            found = self.made(at, index, guard)
            axes = found.axes
            scope = (
                self.known[0]
                if found.level < EDGES and not any(a in self.loops for a in axes)
                else (self.known[-1])
            )
            scope[key] = found
        return found

    def made(self, at: int, index: tuple[Index, ...], guard: str) -> Block:
        op, args, attrs, shape, dtype = self.program[at]
        if op == 'const':
            return self.constant(number(self.program[at]), dtype)
        if op == 'load':
            role, slot = attrs
            return self.load(role, slot, index, shape, dtype, guard)
        if op == 'keep':
            return self.keep(attrs, index, shape)
        if op == 'view':
            return self.value(
                args[0], self.viewed(index, shape, self.program[args[0]].shape), guard
            )
        if op == 'cast':
            return self.value(args[0], index, guard)
        if op == 'permute':
            inner: list[Index] = [Index()] * len(shape)
            for place, part in zip(attrs, index, strict=True):
                inner[place] = part
            return self.value(args[0], tuple(inner), guard)
        if op == 'slice':
            dim, start, _, step = attrs
            part = index[dim].times(step).plus(Index((), start))
            return self.value(args[0], (*index[:dim], part, *index[dim + 1 :]), guard)
        if op == 'cat':
            return self.joined(at, index, guard)
        if op in ('sum', 'amax', 'amin'):
            return self.reduction(at, index, guard)
        if op == 'expand':
            return self.value(args[0], self.narrowed(index, self.program[args[0]].shape), guard)
        if op not in CALLS:
            raise Refused(f'{op} has no kernel')
        blocks = []
        for arg in args:
            blocks.append(self.value(arg, self.narrowed(index, self.program[arg].shape), guard))
        if op == 'pow' and self.program[args[1]].op == 'const':
            power = number(self.program[args[1]])
            if power in POWERS:
                blocks, op = blocks[:1], POWERS[power]
        axes = frozenset().union(*(b.axes for b in blocks))
        parts = [self.summed[b.name] for b in blocks if b.name in self.summed]
        if op == 'add' and len(parts) == 2 and parts[0][1] == parts[1][1]:
            # One sum between threads instead of two; the others are dead code.
            (a, over), (b, _) = parts
            level = max(a.level, b.level)
            both = self.emit(f'{a.name} + {b.name}', a.axes | b.axes, level)
            return self.across('sum', both, over)
        return self.emit(
            CALLS[op].format(*(b.name for b in blocks)), axes, max(b.level for b in blocks)
        )

    @staticmethod
    def narrowed(index: tuple[Index, ...], shape: tuple[int, ...]) -> tuple[Index, ...]:
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

    def offset(self, index: tuple[Index, ...], shape: tuple[int, ...]) -> Index:
        flat, stride = Index(), 1
        for part, size in zip(reversed(index), reversed(shape), strict=True):
            flat = flat.plus(part.times(stride))
            stride *= size
        return flat

    def masks(self, axes: frozenset[str]) -> list[str]:
        return [f'm_{axis}' for axis in sorted(axes) if axis in self.size_of]

    def load(
        self, role: str, slot: int, index: tuple, shape: tuple, dtype: str, guard: str
    ) -> Block:
        if role == 'picked':
            self.uses_edge = True
            grad = self.load('grad', slot, index, shape, dtype, guard)
            arg = self.load('arg', slot, index, shape, 'int64', guard)
            return self.emit(f'tl.where({arg.name} == eid, {grad.name}, 0.0)', grad.axes, EDGES)
        if role == 'powers':
            return self.exponential(index)
        flat = self.offset(index, shape)
        axes = frozenset(axis for axis, _ in flat.terms)
        own = 'dst' if role in OF_DST else role
        level = self.level_of(own)
        # A destination's statistics are side by side where edges read them: in one sector.
        packed = role in STATISTICS and level == EDGES
        pointer = f'stats{slot}' if packed else f'{role}{slot}'
        self.loads['stats' if packed else role, slot] = pointer, dtype
        self.holds |= level == PROGRAM and bool(axes)
        size = math.prod(shape)
        base = ''
        if own != 'param':
            row = 'eid' if own == 'edge' else 'row' if own == self.row_role else 'other'
            self.uses_edge |= own == 'edge'
            base = f'tl.cast({row}, OFFSET) * {step_of(role, pointer, size)} + '
        masks = self.masks(axes)
        if own == 'edge':  # `other` is a row also where there is no edge.
            masks = ['m', *masks]
        if guard:
            masks.append(guard)
            axes = axes | frozenset(self.guard_axes(guard))
        mask = f', {" & ".join(masks)}, 0' if masks else ''
        place = f'{base}{self.blocked(flat)}'
        if packed:
            place = f'({place}) * 3 + {STATISTICS.index(role)}'
        text = f'tl.load({pointer} + ({place}){mask})'
        if is_float(dtype):
            text += f'.to({self.acc})'
        elif dtype == 'bool':
            text += ' != 0'
        return self.emit(text, axes, level)

    def exponential(self, index: tuple[Index, ...]) -> Block:
        """That of a score relative to the largest so far. A multiple of the softmax is rescaled
        with that, so each of its numbers has one."""
        assert self.powers is not None
        block, place = self.powers
        if index != place:
            raise Refused('a softmax in another order than its multiples')
        return block

    def level_of(self, role: str) -> int:
        return PROGRAM if role == 'param' else ROW if role == self.row_role else EDGES

    def blocked(self, flat: Index) -> str:
        """An offset as a block of all dimensions, or a number in one."""
        return f'{flat.text()} + zero'

    def guard_axes(self, guard: str) -> set[str]:
        return {name for name in (*self.names, *self.loops) if f'{name} ' in guard}

    def joined(self, at: int, index: tuple[Index, ...], guard: str) -> Block:
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
        # An axis that runs within parts only decides nothing: the quotient by equal sizes does.
        out: Block | None = None
        for arg, begin, end in parts:
            test = f'(({place.text()} ) >= {begin}) & (({place.text()} ) < {end})'
            inner = (*index[:dim], place.plus(Index((), -begin)), *index[dim + 1 :])
            block = self.value(arg, inner, f'{guard} & {test}' if guard else test)
            if out is None:
                out = block
            else:
                axes = out.axes | block.axes | frozenset(a for a, _ in place.terms)
                out = self.emit(
                    f'tl.where({test}, {block.name}, {out.name})',
                    axes,
                    max(out.level, block.level),
                )
        assert out is not None
        return out

    def reduction(self, at: int, index: tuple[Index, ...], guard: str) -> Block:
        op, (arg,), dims, _, _ = self.program[at]
        shape = self.program[arg].shape
        used = {axis for part in index for axis, _ in part.terms} | self.guard_axes(guard)
        free = [name for name in self.names if name not in used]
        inner, across, each = list(index), [], []
        for dim in dims:
            size = shape[dim]
            names = self.run_of(size, free)
            if names and size > 1:
                free = [name for name in free if name not in names]
                across += names
                inner[dim] = self.joint(names)
            elif size > 1:
                each.append(dim)
            else:
                inner[dim] = Index()
        if across and each:
            raise Refused('a sum over dimensions of several sizes')
        if op == 'sum' and len(each) == 1 and not across and not guard:
            block = self.dot(arg, inner, each[0])
            if block is not None:
                return block
        if op == 'sum' and len(each) == 1 and free and self.in_tiles:
            return self.sum_of_tiles(arg, inner, each[0], free[-1], guard)
        if across:
            self.reduced.update(across)
            block = self.value(arg, tuple(inner), guard)
            return self.across(op, block, across)
        count = math.prod(shape[dim] for dim in each)
        if count > _UNROLLED:
            return self.looped(op, arg, inner, each, shape, guard)
        out: Block | None = None
        for numbers in itertools.product(*(range(shape[dim]) for dim in each)):
            for dim, k in zip(each, numbers, strict=True):
                inner[dim] = Index((), k)
            block = self.value(arg, tuple(inner), guard)
            if out is None:
                out = block
            else:
                out = self.emit(
                    COMBINE[op].format(out.name, block.name), out.axes | block.axes,
                    max(out.level, block.level),
                )  # fmt: skip
        assert out is not None
        return out

    def sum_of_tiles(
        self, arg: int, index: list[Index], dim: int, axis: str, guard: str
    ) -> Block:
        """A sum over a dimension, in tiles of an axis that its result does not have."""
        self.reduced.add(axis)
        out: Block | None = None
        for place, test in self.tiles(self.program[arg].shape[dim], axis):
            inner = (*index[:dim], place, *index[dim + 1:])
            part = self.value(arg, inner, ' & '.join(filter(None, (guard, test))))
            if test:
                text, axes = f'tl.where({test}, {part.name}, 0.0)', part.axes | {axis}
                part = self.emit(text, axes, part.level)
            if out is None:
                out = part
            else:
                text, axes = f'{out.name} + {part.name}', out.axes | part.axes
                out = self.emit(text, axes, max(out.level, part.level))
        assert out is not None
        return self.across('sum', out, [axis])

    def run_of(self, size: int, free: list[str]) -> list[str]:
        """Axes, one after another, that have so many numbers together; none if there are none."""
        for start in range(self.rank):
            for end in range(start + 1, self.rank + 1):
                names = self.names[start:end]
                count = math.prod(self.size_of[name] for name in names)
                if count == size and all(name in free for name in names):
                    return names
        return []

    def joint(self, names: list[str]) -> Index:
        """The place in a dimension that several axes divide."""
        index = Index()
        for name in names:
            index = index.times(self.size_of[name]).plus(Index(((name, 1),)))
        return index

    def dot(self, at: int, index: list[Index], dim: int) -> Block | None:
        """A linear map of an edge's raw values, if the sum is one: a product of matrices."""
        size = self.program[at].shape[dim]
        if self.program[at].op != 'mul' or not self.is_map(size):
            return None
        index = list(index)
        index[dim] = Index(((INNER, 1),))
        with self.inner(size):
            parts = [self.raw(arg, tuple(index)) for arg in self.program[at].args]
            for a, w in (parts, parts[::-1]):
                if a is None or w is None or w.by_edge or not a.by_edge or a.axes or not w.axes:
                    continue
                if not w.axes <= self.size_of.keys():  # It is in a loop.
                    continue
                left, right = self.rows_of(a), self.matrix_of(w)
                if size > MOST_HELD:
                    text = f'tl.dot({left}, {right}, input_precision="tf32x3")'
                else:
                    left = f'tl.expand_dims({left}, {self.rank + 1})'
                    text = self.sum_of_products(f'{left} * tl.expand_dims({right}, 0)', 1, w.axes)
                return self.emit(text, frozenset(self.names), EDGES)
        return None

    def outer(self, at: int, shape: tuple[int, ...]) -> tuple[Block, Index, int] | None:
        """The sum over a block's edges of `a[d] * g[f]`, the gradient of a linear map's weight, its
        place, and the number of inputs."""
        for inner, size in enumerate(shape):
            columns = [n for k, n in enumerate(shape) if k != inner and n != 1]
            if not self.is_map(size) or columns not in ([*self.sizes], [math.prod(self.sizes)]):
                continue
            names = iter([[name] for name in self.names] if len(columns) > 1 else [self.names])
            index = tuple(
                Index(((INNER, 1),)) if k == inner else Index() if n == 1 else
                self.joint(next(names)) for k, n in enumerate(shape)
            )  # fmt: skip
            block = self.outer_at(at, index, size)
            if block is not None:
                return block, self.offset(index, shape), size
        return None

    def outer_at(self, at: int, index: tuple[Index, ...], size: int) -> Block | None:
        with self.inner(size):
            at, place = self.moved(at, index)
            if self.program[at].op != 'mul':
                return None
            sides = [
                self.moved(arg, self.narrowed(place, self.program[arg].shape))
                for arg in self.program[at].args
            ]
            for side, other in (sides, sides[::-1]):
                a = self.raw(*side)
                loops = {name for part in other[1] for name, _ in part.terms}
                if a is None or not a.by_edge or a.axes or INNER in loops:
                    continue
                g = self.value(*other)
                names = frozenset(self.names)
                masks = ' & '.join(['m', *self.masks(names)])
                left = self.rows_of(a)
                sizes = ', '.join(['BE', *self.blocks])
                right = f'tl.where({masks}, {g.name} + tl.zeros([{sizes}], {self.acc}), 0.0)'
                if size > MOST_HELD:
                    text = f'tl.dot(tl.trans({left}), {right}, input_precision="tf32x3")'
                else:
                    left = f'tl.expand_dims({left}, {self.rank + 1})'
                    text = self.sum_of_products(f'{left} * tl.expand_dims({right}, 1)', 0, names)
                return self.emit(text, names, EDGES)
        return None

    def sum_of_products(self, value: str, axis: int, axes: frozenset[str]) -> str:
        # With columns for all threads of a warp, each thread has whole sums: it may fuse products.
        if len(axes) == self.rank and math.prod(self.sizes) >= WARP:
            return f'tl.sum({value}, axis={axis})'
        return total_of(value, axis, False)

    def is_map(self, size: int) -> bool:
        """Whether a sum over `size` raw values of an edge is done for all columns at once."""
        if size <= MOST_HELD:
            return size >= _LEAST_HELD
        return self.rank == 1 and self.acc == 'tl.float32' and self.sizes[0] >= _LEAST_INNER

    @contextmanager
    def inner(self, size: int) -> Iterator[None]:
        """Allows an index over the inner dimension of a product."""
        before = self.loops
        self.loops = {**before, INNER: size}
        try:
            yield
        finally:
            self.loops = before

    def moved(self, at: int, index: tuple) -> tuple[int, tuple]:
        """The value that is the same but for moves, and the place in it."""
        while True:
            op, args, attrs, shape, _ = self.program[at]
            if op == 'view':
                index = self.viewed(index, shape, self.program[args[0]].shape)
            elif op == 'expand':
                index = self.narrowed(index, self.program[args[0]].shape)
            elif op == 'permute':
                inner: list[Index] = [Index()] * len(shape)
                for place, part in zip(attrs, index, strict=True):
                    inner[place] = part
                index = tuple(inner)
            elif op != 'cast':
                return at, index
            at = args[0]

    def raw(self, at: int, index: tuple) -> Raw | None:
        """Where a value that is an input is read."""
        index = self.narrowed(index, self.program[at].shape)
        at, index = self.moved(at, index)
        op, _, attrs, shape, dtype = self.program[at]
        if op != 'load':
            return None
        role, slot = attrs
        if role == 'picked' or role in OF_DST or not is_float(dtype):
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
        """A block of edges by inner numbers."""
        key = ('rows', raw, self.loops[INNER])
        found = self.find(key)
        if found is None:
            self.uses_edge |= raw.role == 'edge'
            self.dots.add(self.loops[INNER])
            base = 'eid' if raw.role == 'edge' else 'other'
            size = self.loops[INNER]
            place = raw.flat.text().replace(INNER, f'i{size}')
            found = self.known[-1][key] = self.emit(
                f'tl.load({raw.pointer} + (tl.cast({base}, OFFSET) * {raw.step} + {place}), '
                f'm & (i{size} < {size}), 0).to({self.acc})',
                frozenset(), EDGES,
            )  # fmt: skip
        return found.name

    def matrix_of(self, raw: Raw) -> str:
        """A block of inner numbers by columns."""
        key = ('matrix', raw, self.loops[INNER])
        found = self.find(key)
        if found is None:
            size = self.loops[INNER]
            self.dots.add(size)
            place = raw.flat.text().replace(INNER, f'j{size}')
            masks = ' & '.join([f'(j{size} < {size})', *self.masks(raw.axes)])
            name = self.fresh()
            self.holds = True
            self.first.append(
                f'{name} = tl.load({raw.pointer} + ({place}), {masks}, 0).to({self.acc})'
            )
            found = self.known[0][key] = Block(name, raw.axes, PROGRAM)
        return found.name

    def across(self, op: str, block: Block, axes: list[str]) -> Block:
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
                text = total_of(masked, place)
            else:
                text = f'tl.{op[1:]}({masked}, axis={place}, keep_dims=True)'
            out = self.emit(text, kept, block.level)
        if op == 'sum':
            self.summed[out.name] = block, axes
        return out

    def looped(
        self, op: str, arg: int, inner: list[Index], dims: list[int], shape: tuple, guard: str
    ) -> Block:
        if len(dims) != 1:
            raise Refused('a sum over several wide dimensions')
        loop = f'l{next(self.count)}'
        self.loops[loop] = shape[dims[0]]
        inner[dims[0]] = Index(((loop, 1),))
        # Values that the loop does not change come first: a dry run at the same depth finds them.
        mark = len(self.lines)
        self.known.append({})
        self.depth += 1
        block = self.value(arg, tuple(inner), guard)
        self.depth -= 1
        self.known.pop()
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

    def keep(self, attrs: tuple, index: tuple[Index, ...], shape: tuple[int, ...]) -> Block:
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
    """The size of a block of inputs of a map."""
    return power(inner) if inner <= MOST_HELD else max(_LEAST_INNER, power(inner))
