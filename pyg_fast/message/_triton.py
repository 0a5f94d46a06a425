"""Triton source for the passes of a plan over a graph's rows."""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ._ir import OF_DST, Program, Refused, is_float, number

_POWERS = {
    0.5: 'sqrt', -0.5: 'rsqrt', -1.0: 'reciprocal', 1.0: 'same', 2.0: 'square', 3.0: 'cube',
}  # fmt: skip
# The inner dimension of a product of matrices, in an index.
_INNER = 'inner'
_LEAST_INNER = 16  # of Triton's products
# The widest values that a program sums at once.
_MOST_SUMMED = 1024
# Tiles that make up a result wider than others in its pass.
_MOST_TILES = 16
# A sum over at most this many numbers is written out.
_UNROLLED = 32
# A linear map of raw values of an edge: of at least and at most so many inputs its matrix stays in
# registers; of more, it is a product of matrices.
_LEAST_HELD, _MOST_HELD = 4, 16

_CALLS = {
    'same': '{}', 'square': '{0} * {0}', 'cube': '{0} * {0} * {0}',
    'neg': '-{}', 'abs': 'tl.abs({})', 'exp': 'tl.exp({})', 'exp2': 'tl.exp2({})',
    'log': 'tl.log({})', 'log2': 'tl.log2({})', 'sqrt': 'tl.sqrt({})', 'rsqrt': 'tl.rsqrt({})',
    'reciprocal': '1.0 / {}', 'sin': 'tl.sin({})', 'cos': 'tl.cos({})', 'floor': 'tl.floor({})',
    'ceil': 'tl.ceil({})', 'erf': 'tl.erf({})', 'logical_not': '{} == 0',
    'relu': 'tl.where({0} <= 0, 0.0, {0})', 'sigmoid': '1.0 / (1.0 + tl.exp(-{}))',
    'sign': 'tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))',
    'expm1': 'libdevice.expm1({})', 'log1p': 'libdevice.log1p({})', 'log10': 'libdevice.log10({})',
    'tanh': 'libdevice.tanh({})',
    'add': '{} + {}', 'sub': '{} - {}', 'mul': '{} * {}', 'div': '{} / {}',
    'pow': 'libdevice.pow({}, {})',
    'maximum': 'tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
    'minimum': 'tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
    'lt': '{} < {}', 'le': '{} <= {}', 'gt': '{} > {}', 'ge': '{} >= {}', 'eq': '{} == {}',
    'ne': '{} != {}', 'logical_and': '({} != 0) & ({} != 0)',
    'logical_or': '({} != 0) | ({} != 0)', 'where': 'tl.where({}, {}, {})',
}  # fmt: skip


class Out(NamedTuple):
    """A result of a pass: :obj:`kind` is `sum`, `mean`, `max`, `min`, `softmax` (the largest score
    and the reciprocal of the sum of exponentials, over each row), `weighted` (a sum of multiples of
    the softmax before it, in the same pass), `edge` (a row per edge) or `total` (over all edges);
    :obj:`dtype` is a dtype, or `acc` for that of sums."""

    at: int
    kind: str
    dtype: str


# Kinds that give two results: the second are edges, or sums.
OF_TWO = ('max', 'min', 'softmax')


class Index(NamedTuple):
    """A sum of axes with factors, and a number."""

    terms: tuple[tuple[str, int], ...] = ()
    const: int = 0

    def times(self, factor: int) -> 'Index':
        return Index(tuple((a, c * factor) for a, c in self.terms), self.const * factor)

    def plus(self, other: 'Index') -> 'Index':
        terms = dict(self.terms)
        for axis, factor in other.terms:
            terms[axis] = terms.get(axis, 0) + factor
        return Index(tuple(sorted((a, c) for a, c in terms.items() if c)), self.const + other.const)

    def text(self) -> str:
        parts = [axis if factor == 1 else f'{axis} * {factor}' for axis, factor in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return ' + '.join(parts)


# How often a value is computed: once in a program, for each row, for each block of edges.
PROGRAM, ROW, EDGES = range(3)


class Block(NamedTuple):
    """A value in the generated code."""

    name: str
    axes: frozenset[str]
    level: int


class Raw(NamedTuple):
    """An input, read at a place."""

    role: str
    pointer: str
    flat: Index
    axes: frozenset[str]
    by_edge: bool
    size: int


class Source(NamedTuple):
    """A generated kernel."""

    text: str
    name: str
    sizes: tuple[int, ...]  # of the axes
    tiled: bool  # whether the only axis is cut into tiles
    holds: bool  # whether programs hold parameters in registers
    totals: bool  # whether programs sum over all edges
    loads: tuple[tuple[str, int], ...]  # the inputs, in the order of the parameters
    has_dots: bool  # whether it multiplies matrices
    has_maps: bool  # whether it maps raw values of edges by matrices in registers
    num_tiles: int  # of the widest result


def axes_of(program: Program, outs: list[Out]) -> list[tuple[int, ...]]:
    """The sizes of the dimensions over which a pass is parallel: the finest division of the widest
    output. Better, if that is possible: of values whose sum it is."""
    reachable = program.reachable([out.at for out in outs])
    # A parameter's gradient is a sum of products with that of the message.
    shapes = (
        [program[out.at].shape for out in outs if out.kind not in ('total', 'edge')]
        or [
            program[at].shape
            for at in reachable
            if program[at].attrs[:1] in (('grad',), ('picked',))
        ]
        or [program[out.at].shape for out in outs]
    )
    widest = max(shapes, key=lambda s: (math.prod(s), len(s)))
    count = math.prod(widest)
    best = tuple(n for n in widest if n != 1)
    rows = {tuple(n for n in shape if n != 1) for shape in shapes}
    alike = [row for row in rows if len(row) == len(best) and row[:-1] == best[:-1]]
    if best and len(alike) > 1:
        return [(*best[:-1], _tile_of([row[-1] for row in alike]))]
    wider: tuple[int, ...] = ()
    for at in reachable:
        shape = tuple(n for n in program[at].shape if n != 1)
        if math.prod(shape) == count and len(shape) > len(best):
            best = shape
        if program[at].op in ('sum', 'amax', 'amin') and math.prod(shape) == count:
            inner = tuple(n for n in program[program[at].args[0]].shape if n != 1)
            if math.prod(wider) < math.prod(inner) <= _MOST_SUMMED:
                wider = inner
    return [wider, best or (1,)] if math.prod(wider) > count else [best or (1,)]


def _tile_of(sizes: list[int]) -> int:
    """Which size of a last dimension the others are tiles of: the least numbers in whole blocks."""
    widest = max(sizes)
    narrow = [n for n in sizes if n >= min(16, widest // 2) and widest <= _MOST_TILES * n]
    return min(narrow, key=lambda n: (sum(-(-size // n) for size in sizes) * power(n), -n))


class Generator:
    """Writes one kernel: over the rows of a CSR structure, `src` or `dst`, the edges of each in
    blocks."""

    def __init__(
        self, program: Program, sizes: tuple[int, ...], row_role: str, acc: str, grouped: bool,
        in_tiles: bool,
    ) -> None:  # fmt: skip
        self.program = program
        self.row_role = row_role
        self.acc = acc
        self.grouped = grouped  # Long rows are divided.
        self.in_tiles = in_tiles  # A dimension may be several tiles of an axis.
        self.sizes = sizes
        self.rank = len(self.sizes)
        self.names = [f'a{k}' for k in range(self.rank)]
        self.size_of = dict(zip(self.names, self.sizes, strict=True))
        self.reduced: set[str] = set()
        # Lines of a program: before its rows, before the edges of a row, for each block of edges,
        # after the edges, and after the rows. Sums start after what is read before the edges.
        self.first: list[str] = []
        self.before: list[str] = []
        self.starts: list[str] = []
        self.lines: list[str] = []
        self.finals: list[str] = []
        self.stores: list[str] = []
        self.depth = 0
        self.known: list[dict[Any, Block]] = [{}]
        self.count = itertools.count()
        self.loads: dict[tuple[str, int], tuple[str, str]] = {}
        self.uses_edge = self.uses_seed = False
        self.holds = False  # parameters in registers
        self.summed: dict[str, tuple[Block, list[str]]] = {}  # what a value sums, and over what
        self.num_tiles = 1  # of the widest result
        self.loops: dict[str, int] = {}
        self.dots: set[int] = set()  # inputs of linear maps
        # The largest score so far of a softmax, and its place.
        self.running: tuple[Block, tuple[Index, ...]] | None = None

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

    def tiles(self, size: int, axis: str) -> Iterator[tuple[Index, str]]:
        """The places of an axis in tiles of a dimension, and what guards the last one."""
        n = self.size_of[axis]
        for k in range(-(-size // n)):
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
        if shape[last] > _MOST_TILES * self.size_of[names[-1]]:
            return []
        index = [Index()] * len(shape)
        for name, dim in zip(names, lead, strict=False):
            index[dim] = Index(((name, 1),))
        found = [
            ((*index[:last], place, *index[last + 1:]), guard)
            for place, guard in self.tiles(shape[last], names[-1])
        ]
        self.num_tiles = max(self.num_tiles, len(found))
        return found

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
        if op not in _CALLS:
            raise Refused(f'{op} has no kernel')
        blocks = []
        for arg in args:
            blocks.append(self.value(arg, self.narrowed(index, self.program[arg].shape), guard))
        if op == 'pow' and self.program[args[1]].op == 'const':
            power = number(self.program[args[1]])
            if power in _POWERS:
                blocks, op = blocks[:1], _POWERS[power]
        axes = frozenset().union(*(b.axes for b in blocks))
        parts = [self.summed[b.name] for b in blocks if b.name in self.summed]
        if op == 'add' and len(parts) == 2 and parts[0][1] == parts[1][1]:
            # One sum between threads instead of two; the others are dead code.
            (a, over), (b, _) = parts
            level = max(a.level, b.level)
            both = self.emit(f'{a.name} + {b.name}', a.axes | b.axes, level)
            return self.across('sum', both, over)
        return self.emit(
            _CALLS[op].format(*(b.name for b in blocks)), axes, max(b.level for b in blocks)
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
        if role == 'running':
            return self.running_score(index)
        pointer = f'{role}{slot}'
        self.loads[role, slot] = pointer, dtype
        flat = self.offset(index, shape)
        axes = frozenset(axis for axis, _ in flat.terms)
        own = 'dst' if role in OF_DST else role
        level = self.level_of(own)
        self.holds |= level == PROGRAM and bool(axes)
        size = math.prod(shape)
        if own == 'param':
            base = ''
        elif own == 'edge':
            self.uses_edge = True
            base = f'tl.cast(eid, OFFSET) * {size} + '
        elif own == self.row_role:
            base = f'tl.cast(row, OFFSET) * {size} + '
        else:
            base = f'tl.cast(other, OFFSET) * {size} + '
        masks = self.masks(axes)
        if level == EDGES:
            masks = ['m', *masks]
        if guard:
            masks.append(guard)
            axes = axes | frozenset(self.guard_axes(guard))
        mask = f', {" & ".join(masks)}, 0' if masks else ''
        text = f'tl.load({pointer} + ({base}{self.blocked(flat)}){mask})'
        if is_float(dtype):
            text += f'.to({self.acc})'
        elif dtype == 'bool':
            text += ' != 0'
        return self.emit(text, axes, level)

    def running_score(self, index: tuple[Index, ...]) -> Block:
        """The largest score so far. A multiple of the softmax is rescaled with it, so each of its
        numbers has one."""
        assert self.running is not None
        block, place = self.running
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
                    _COMBINE[op].format(out.name, block.name), out.axes | block.axes,
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
        index[dim] = Index(((_INNER, 1),))
        with self.inner(size):
            parts = [self.raw(arg, tuple(index)) for arg in self.program[at].args]
            for a, w in (parts, parts[::-1]):
                if a is None or w is None or w.by_edge or not a.by_edge or a.axes or not w.axes:
                    continue
                if not w.axes <= self.size_of.keys():  # It is in a loop.
                    continue
                left, right = self.rows_of(a), self.matrix_of(w)
                if size > _MOST_HELD:
                    text = f'tl.dot({left}, {right}, input_precision="tf32x3")'
                else:
                    text = f'tl.sum(tl.expand_dims({left}, 2) * tl.expand_dims({right}, 0), axis=1)'
                return self.emit(text, frozenset(self.names), EDGES)
        return None

    def outer(self, at: int, shape: tuple[int, ...]) -> tuple[Block, Index] | None:
        """The sum over a block's edges of `a[d] * g[f]`, the gradient of a linear map's weight, and
        its place."""
        others = [k for k, n in enumerate(shape) if n not in (1, *self.sizes)]
        wide = [k for k, n in enumerate(shape) if n in self.sizes and n != 1]
        if len(others) != 1 or len(wide) != 1 or not self.is_map(shape[others[0]]):
            return None
        index = [Index()] * len(shape)
        index[others[0]], index[wide[0]] = Index(((_INNER, 1),)), Index(((self.names[0], 1),))
        flat = self.offset(tuple(index), shape)
        with self.inner(shape[others[0]]):
            at, place = self.moved(at, tuple(index))
            if self.program[at].op != 'mul':
                return None
            sides = [
                self.moved(arg, self.narrowed(place, self.program[arg].shape))
                for arg in self.program[at].args
            ]
            for side, other in (sides, sides[::-1]):
                a = self.raw(*side)
                loops = {name for part in other[1] for name, _ in part.terms}
                if a is None or not a.by_edge or a.axes or _INNER in loops:
                    continue
                g = self.value(*other)
                masks = ' & '.join(['m', *self.masks(frozenset(self.names))])
                left = self.rows_of(a)
                right = f'tl.where({masks}, {g.name} + tl.zeros([BE, B0], {self.acc}), 0.0)'
                if shape[others[0]] > _MOST_HELD:
                    text = f'tl.dot(tl.trans({left}), {right}, input_precision="tf32x3")'
                else:
                    text = f'tl.sum(tl.expand_dims({left}, 2) * tl.expand_dims({right}, 1), axis=0)'
                block = self.emit(text, frozenset(self.names), EDGES)
                return block, flat
        return None

    def is_map(self, size: int) -> bool:
        """Whether a sum over `size` raw values of an edge is done for all columns at once."""
        if self.rank != 1 or size < _LEAST_HELD:
            return False
        return size <= _MOST_HELD or (self.acc == 'tl.float32' and self.sizes[0] >= _LEAST_INNER)

    @contextmanager
    def inner(self, size: int) -> Iterator[None]:
        """Allows an index over the inner dimension of a product."""
        before = self.loops
        self.loops = {**before, _INNER: size}
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
        axes = frozenset(axis for axis, _ in flat.terms if axis != _INNER)
        level = self.level_of(role)
        if level == ROW:
            return None
        self.loads[role, slot] = f'{role}{slot}', dtype
        return Raw(role, f'{role}{slot}', flat, axes, level == EDGES, math.prod(shape))

    def rows_of(self, raw: Raw) -> str:
        """A block of edges by inner numbers."""
        key = ('rows', raw, self.loops[_INNER])
        found = self.find(key)
        if found is None:
            self.uses_edge |= raw.role == 'edge'
            self.dots.add(self.loops[_INNER])
            base = 'eid' if raw.role == 'edge' else 'other'
            size = self.loops[_INNER]
            place = raw.flat.text().replace(_INNER, f'i{size}')
            found = self.known[-1][key] = self.emit(
                f'tl.load({raw.pointer} + (tl.cast({base}, OFFSET) * {raw.size} + {place}), '
                f'm & (i{size} < {size}), 0).to({self.acc})',
                frozenset(), EDGES,
            )  # fmt: skip
        return found.name

    def matrix_of(self, raw: Raw) -> str:
        """A block of inner numbers by columns."""
        key = ('matrix', raw, self.loops[_INNER])
        found = self.find(key)
        if found is None:
            size = self.loops[_INNER]
            self.dots.add(size)
            place = raw.flat.text().replace(_INNER, f'j{size}')
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
            reduce = {'sum': 'sum', 'amax': 'max', 'amin': 'min'}[op]
            place = self.names.index(axis) + 1
            masked = f'tl.where(m_{axis}, {name}, {other})'
            out = self.emit(
                f'tl.{reduce}({masked}, axis={place}, keep_dims=True)', kept, block.level
            )
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
            f'{pad}    {total} = ' + _COMBINE[op].format(total, block.name),
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


_COMBINE = {
    'sum': '{} + {}',
    'amax': 'tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
    'amin': 'tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
}


def power(n: int) -> int:
    """The size of a block, a power of two."""
    return 1 << (n - 1).bit_length()


def block_of(inner: int) -> int:
    """The size of a block of inputs of a map."""
    return power(inner) if inner <= _MOST_HELD else max(_LEAST_INNER, power(inner))


def generate(program: Program, outs: list[Out], row_role: str, acc: str, grouped: bool) -> Source:
    """The source of one pass.

    Raises:
        Refused: If the shapes of its values do not fit together.
    """
    *better, sizes = axes_of(program, outs)
    for each, in_tiles in [*((each, False) for each in better), (sizes, True)]:
        try:
            return _generate(program, outs, row_role, acc, grouped, each, in_tiles)
        except Refused:
            continue
    return _generate(program, outs, row_role, acc, grouped, sizes, False)


def _generate(
    program: Program, outs: list[Out], row_role: str, acc: str, grouped: bool,
    sizes: tuple[int, ...], in_tiles: bool,
) -> Source:  # fmt: skip
    gen = Generator(program, sizes, row_role, acc, grouped, in_tiles)
    for k, out in enumerate(outs):
        if out.kind != 'total' or not _mapped_total(gen, k, out):
            for n, (index, guard) in enumerate(_places(gen, out)):
                _add(gen, out, _term(gen, k, n, out.at, index, guard))
    return Source(
        _template(gen, outs),
        'message_pass',
        gen.sizes,
        gen.rank == 1 and not gen.reduced,
        gen.holds,
        bool(gen.stores),
        tuple(gen.loads),
        any(size > _MOST_HELD for size in gen.dots),
        any(size <= _MOST_HELD for size in gen.dots),
        gen.num_tiles,
    )


class Term(NamedTuple):
    """Numbers of a result: one for each edge, or the sum of which is over edges."""

    k: int  # the result
    name: str  # of the sum
    value: str
    place: tuple[Index, ...]
    flat: Index  # the place in a row of the result
    size: int  # of a row of the result
    sizes: str  # of a block
    masks: list[str]

    @property
    def mask(self) -> str:
        return ' & '.join(['m', *self.masks])


def _places(gen: Generator, out: Out) -> list[tuple[tuple[Index, ...], str]]:
    """The places in a result that a program computes, and what guards each."""
    shape = gen.program[out.at].shape
    if out.kind in ('total', 'edge') and math.prod(shape) not in (1, math.prod(gen.sizes)):
        sums = out.kind == 'edge' and len([n for n in shape if n != 1]) < gen.rank
        found = gen.tiled(shape) if sums else []  # Another axis is left for its sums.
        return found or [(index, '') for index in _unrolled_places(gen, shape)]
    try:
        return [(gen.out_index(shape), '')]
    except Refused:
        found = gen.tiled(shape)
        if not found:
            raise
        return found


def _term(
    gen: Generator, k: int, n: int, at: int, index: tuple[Index, ...], guard: str
) -> Term:
    value, shape = gen.value(at, index, guard).name, gen.program[at].shape
    flat = gen.offset(index, shape)
    axes = frozenset(axis for axis, _ in flat.terms)
    blocks = [f'B{j}' if name in axes else '1' for j, name in enumerate(gen.names)]
    sizes = ', '.join(['BE', *blocks])
    masks = [*gen.masks(axes), *([guard] if guard else [])]
    return Term(k, f's{k}_{n}', value, index, flat, math.prod(shape), sizes, masks)


def _add(gen: Generator, out: Out, one: Term) -> None:
    """Writes the lines of a result."""
    name, masked = one.name, f'tl.where({one.mask}, {one.value}, 0.0)'
    if out.kind in ('max', 'min'):
        _extreme(gen, out.kind, one)
    elif out.kind == 'softmax':
        _of_softmax(gen, one)
    elif out.kind == 'edge':
        gen.uses_edge = True
        gen.lines.append(
            f'tl.store(out{one.k} + (tl.cast(eid, OFFSET) * {one.size} + '
            f'{gen.blocked(one.flat)}), ({one.value} + tl.zeros([{one.sizes}], {gen.acc}))'
            f'.to(out{one.k}.dtype.element_ty), {one.mask})'
        )
    elif out.kind == 'total':
        gen.first.append(f'{name} = tl.zeros([{one.sizes}], {gen.acc})')
        gen.lines.append(f'{name} += {masked}')
        gen.stores.append(
            f'tl.store(out{one.k} + (tl.cast(pid, OFFSET) * {one.size} + '
            f'{gen.blocked(one.flat)}), tl.sum({name}, axis=0, keep_dims=True), '
            f'{" & ".join(one.masks) or "None"})'
        )
    elif out.kind == 'weighted':
        gen.starts.append(f'{name} = tl.zeros([{one.sizes}], {gen.acc})')
        gen.lines.append(f'{name} = {name} * s0_0f + {masked}')
        gen.finals.append(f'{name}f = tl.sum({name} * s0_0e, axis=0, keep_dims=True)')
        whole = f'tl.where(begin < end, {name}f * s0_0s, 0.0)'
        _store(gen, one, 'out', 'part', whole, f'{name}f')
    else:
        total = f'tl.sum({name}, axis=0, keep_dims=True)'
        mean = f' / tl.maximum(end - begin, 1).to({gen.acc})' if out.kind == 'mean' else ''
        gen.starts.append(f'{name} = tl.zeros([{one.sizes}], {gen.acc})')
        gen.lines.append(f'{name} += {masked}')
        gen.finals.append(f'{name}f = {total}{mean}')
        _store(gen, one, 'out', 'part', f'{name}f', total)


def _mapped_total(gen: Generator, k: int, out: Out) -> bool:
    """Writes the gradient of a linear map's weight, if the result is one."""
    shape = gen.program[out.at].shape
    found = gen.outer(out.at, shape)
    if found is None:
        return False
    block, flat = found
    inner = next(n for n in shape if n not in (1, *gen.sizes))
    text = flat.text().replace(_INNER, f'j{inner}')
    masks = ' & '.join([f'(j{inner} < {inner})', *gen.masks(frozenset(gen.names))])
    gen.first.append(f's{k} = tl.zeros([{block_of(inner)}, B0], {gen.acc})')
    gen.lines.append(f's{k} += {block.name}')
    gen.stores.append(
        f'tl.store(out{k} + (tl.cast(pid, OFFSET) * {math.prod(shape)} + {text}), s{k}, {masks})'
    )
    return True


def _unrolled_places(gen: Generator, shape: tuple[int, ...]) -> list[tuple[Index, ...]]:
    """Places of a parameter's gradient: the dimensions that are no axis, one number at a time."""
    kept: list[list[str]] = []
    free = list(gen.names)
    for size in reversed(shape):
        kept.append(gen.run_of(size, free) if size > 1 else [])
        free = [name for name in free if name not in kept[-1]]
    kept.reverse()
    loose = [[0] if names else range(n) for n, names in zip(shape, kept, strict=True)]
    if math.prod(len(r) for r in loose) > 64:
        raise Refused(f"a parameter's gradient of shape {shape}")
    return [
        tuple(
            gen.joint(names) if names else Index((), k)
            for k, names in zip(numbers, kept, strict=True)
        )
        for numbers in itertools.product(*loose)
    ]


def _store(gen: Generator, one: Term, out: str, part: str, value: str, partial: str) -> None:
    """Stores the results of rows, and partial ones of long rows."""
    place, masks = gen.blocked(one.flat), list(one.masks)
    if gen.grouped:
        gen.finals.append(
            f'tl.store({part}{one.k} + (tl.cast(slot, OFFSET) * {one.size} + {place}), {partial}, '
            f'{" & ".join([*masks, "long"])})'
        )
        masks.append('(long == 0)')
    gen.finals.append(
        f'tl.store({out}{one.k} + (tl.cast(row, OFFSET) * {one.size} + {place}), '
        f'{value}.to({out}{one.k}.dtype.element_ty), {" & ".join(masks) or "None"})'
    )


def _extreme(gen: Generator, kind: str, one: Term) -> None:
    """The first largest or smallest number, and its place."""
    name, value = one.name, one.value
    worst = "float('-inf')" if kind == 'max' else "float('inf')"
    better = '>' if kind == 'max' else '<'
    gen.starts += [
        f'{name} = tl.full([{one.sizes}], {worst}, {gen.acc})',
        f'{name}a = tl.full([{one.sizes}], -1, tl.int64)',
    ]
    gen.lines += [
        f'{name}b = {one.mask} & (({value} {better} {name}) | ({name}a < 0) | '
        f'(({value} != {value}) & ({name} == {name})))',
        f'{name} = tl.where({name}b, {value}, {name})',
        f'{name}a = tl.where({name}b, o, {name}a)',
    ]
    gen.finals += [
        f'{name}n = tl.max(({name} != {name}).to(tl.int32), axis=0, keep_dims=True) > 0',
        f'{name}v = tl.where(({name}a >= 0) & ({name} == {name}), {name}, {worst})',
        f'{name}v = tl.{kind}({name}v, axis=0, keep_dims=True)',
        f'{name}c = ({name}a >= 0) & (({name} == {name}v) | ({name} != {name})) '
        f'& (({name} != {name}) | ({name}n == 0))',
        f'{name}p = tl.where({name}c, {name}a, 9223372036854775807)',
        f'{name}p = tl.min({name}p, axis=0, keep_dims=True)',
        f"{name}v = tl.where({name}n, float('nan'), tl.where(begin < end, {name}v, 0.0))",
        f'{name}p = tl.where(begin < end, {name}p, -1)',
    ]
    _store(gen, one, 'out', 'part', f'{name}v', f'{name}v')
    _store(gen, one, 'arg', 'parg', f'{name}p', f'{name}p')


def _of_softmax(gen: Generator, one: Term) -> None:
    """The largest score, and the reciprocal of the sum of exponentials relative to it. A NaN makes
    the sum NaN; so does an infinite score, as in torch."""
    name = one.name
    gen.starts += [
        f"{name} = tl.full([{one.sizes}], float('-inf'), {gen.acc})",
        f'{name}t = tl.zeros([{one.sizes}], {gen.acc})',
    ]
    gen.lines += [
        f"{name}v = tl.where({one.mask}, {one.value}, float('-inf'))",
        f'{name}n = tl.maximum({name}, {name}v)',
        f'{name}f = tl.where({name} == {name}n, 1.0, tl.exp({name} - {name}n))',
        f'{name}t = {name}t * {name}f + tl.where({one.mask}, '
        f'tl.where({name}v == {name}n, 1.0, tl.exp({name}v - {name}n)), 0.0)',
        f'{name} = {name}n',
    ]
    gen.finals += [
        f'{name}m = tl.max({name}, axis=0, keep_dims=True)',
        f'{name}e = tl.where({name} == {name}m, 1.0, tl.exp({name} - {name}m))',
        f'{name}t = tl.sum({name}t * {name}e, axis=0, keep_dims=True)',
        f"{name}s = 1.0 / tl.where(tl.abs({name}m) == float('inf'), float('nan'), {name}t)",
    ]
    _store(gen, one, 'out', 'part', f'{name}m', f'{name}m')
    _store(gen, one, 'arg', 'parg', f'{name}s', f'{name}t')
    axes = frozenset(axis for axis, _ in one.flat.terms)
    gen.running = Block(f'{name}n', axes, EDGES), one.place


def _template(gen: Generator, outs: list[Out]) -> str:
    rank = gen.rank
    pointers = [name for name, _ in gen.loads.values()]
    extremes = [k for k, out in enumerate(outs) if out.kind in OF_TWO]
    results = [f'out{k}' for k in range(len(outs))] + [f'arg{k}' for k in extremes]
    if gen.grouped:
        results += [f'part{k}' for k, out in enumerate(outs) if out.kind not in ('edge', 'total')]
        results += [f'parg{k}' for k in extremes]
    schedule = ['rowptr', 'col', 'perm', 'group_row', 'long_row', 'long_shift']
    head = ', '.join([
        *schedule, *pointers, *results, 'seed_at', 'num_items', 'num_programs',
        'HAS_PERM: tl.constexpr', 'OFFSET: tl.constexpr', 'BE: tl.constexpr',
        *(f'B{k}: tl.constexpr' for k in range(rank)),
    ])  # fmt: skip
    out = [
        "@triton.jit(do_not_specialize=['num_items', 'num_programs'])",
        f'def message_pass({head}):',
        '    pid = tl.program_id(0)',
    ]

    def add(level: int, *texts: str) -> None:
        out.extend('    ' * level + text for text in texts)

    def shaped(place: int) -> str:
        return ', '.join(':' if j == place else 'None' for j in range(rank + 1))

    add(1, f'zero = tl.zeros([{", ".join(["1"] * (rank + 1))}], OFFSET)')
    if gen.uses_seed:
        add(1, 'seed = tl.load(seed_at)')
    add(1, 'tile = pid // num_programs', 'pid = pid % num_programs')
    for k, (name, size) in enumerate(zip(gen.names, gen.sizes, strict=True)):
        offset = ' + tile * B0' if rank == 1 else ''
        add(
            1,
            f'{name} = (tl.arange(0, B{k}){offset})[{shaped(k + 1)}]',
            f'm_{name} = {name} < {size}',
        )
    for size in sorted(gen.dots):
        add(1, f'i{size} = tl.arange(0, {block_of(size)})[None, :]')
        add(1, f'j{size} = tl.arange(0, {block_of(size)})[:, None]')
    add(1, *gen.first, 'for item in range(pid, num_items, num_programs):')
    add(2, 'begin = tl.load(rowptr + item)', 'end = tl.load(rowptr + item + 1)')
    if gen.grouped:
        add(
            2, 'row = tl.load(group_row + item)', 'long = row < 0',
            'which = tl.where(long, -1 - row, 0)',
            'slot = item - tl.load(long_shift + which, long, 0)',
            'row = tl.where(long, tl.load(long_row + which, long, 0), row)',
        )  # fmt: skip
    else:
        add(2, 'row = item')
    add(2, *gen.before, *gen.starts, 'for s in range(begin, end, BE):')
    add(3, f'o = (s + tl.arange(0, BE))[{shaped(0)}]', 'm = o < end')
    add(3, 'other = tl.load(col + o, m, 0)')
    if gen.uses_edge:
        add(3, 'eid = o', 'if HAS_PERM:')
        add(4, 'eid = tl.load(perm + o, m, 0)')
    add(3, *gen.lines)
    add(2, *gen.finals)
    add(1, *gen.stores)
    return '\n'.join(out) + '\n'


# The sums of a long row's groups, one after another.
REDUCE = """@triton.jit(do_not_specialize=['size', 'num_blocks'])
def message_reduce(
    part, out, long_row, long_ptr, rowptr, size, num_blocks,
    MEAN: tl.constexpr, B: tl.constexpr, ACC: tl.constexpr,
):
    k = tl.program_id(0) // num_blocks
    f = tl.program_id(0) % num_blocks * B + tl.arange(0, B)
    m = f < size
    row = tl.load(long_row + k).to(tl.int64)
    total = tl.zeros([B], ACC)
    for s in range(tl.load(long_ptr + k), tl.load(long_ptr + k + 1)):
        total += tl.load(part + s.to(tl.int64) * size + f, m, 0)
    if MEAN:
        total = total / (tl.load(rowptr + row + 1) - tl.load(rowptr + row)).to(ACC)
    tl.store(out + row * size + f, total.to(out.dtype.element_ty), m)
"""
# The softmax of a long row's groups.
REDUCE_SOFTMAX = """@triton.jit(do_not_specialize=['size', 'num_blocks'])
def message_reduce_softmax(
    part, psum, out, scale, long_row, long_ptr, size, num_blocks,
    B: tl.constexpr, ACC: tl.constexpr,
):
    k = tl.program_id(0) // num_blocks
    f = tl.program_id(0) % num_blocks * B + tl.arange(0, B)
    m = f < size
    row = tl.load(long_row + k).to(tl.int64)
    most = tl.full([B], float('-inf'), ACC)
    total = tl.zeros([B], ACC)
    for s in range(tl.load(long_ptr + k), tl.load(long_ptr + k + 1)):
        v = tl.load(part + s.to(tl.int64) * size + f, m, 0)
        t = tl.load(psum + s.to(tl.int64) * size + f, m, 1)
        n = tl.maximum(most, v)
        total = total * tl.where(most == n, 1.0, tl.exp(most - n))
        total += t * tl.where(v == n, 1.0, tl.exp(v - n))
        most = n
    total = tl.where(tl.abs(most) == float('inf'), float('nan'), total)
    tl.store(out + row * size + f, most, m)
    tl.store(scale + row * size + f, 1.0 / total, m)
"""
# The sum of multiples of a softmax over a long row's groups, of which each has its own largest
# score; `channels` numbers have the same.
REDUCE_WEIGHTED = """@triton.jit(do_not_specialize=['size', 'num_blocks', 'channels'])
def message_reduce_weighted(
    part, pmost, most, scale, out, long_row, long_ptr, size, num_blocks, channels,
    B: tl.constexpr, ACC: tl.constexpr,
):
    k = tl.program_id(0) // num_blocks
    f = tl.program_id(0) % num_blocks * B + tl.arange(0, B)
    m = f < size
    row = tl.load(long_row + k).to(tl.int64)
    heads = size // channels
    h = f // channels
    last = tl.load(most + row * heads + h, m, 0)
    total = tl.zeros([B], ACC)
    for s in range(tl.load(long_ptr + k), tl.load(long_ptr + k + 1)):
        v = tl.load(pmost + s.to(tl.int64) * heads + h, m, 0)
        factor = tl.where(v == last, 1.0, tl.exp(v - last))
        total += tl.load(part + s.to(tl.int64) * size + f, m, 0) * factor
    tl.store(out + row * size + f, total * tl.load(scale + row * heads + h, m, 0), m)
"""
# The first best of a long row's groups.
REDUCE_EXTREME = """@triton.jit(do_not_specialize=['size', 'num_blocks'])
def message_reduce_extreme(
    part, parg, out, arg, long_row, long_ptr, size, num_blocks,
    MAX: tl.constexpr, B: tl.constexpr,
):
    k = tl.program_id(0) // num_blocks
    f = tl.program_id(0) % num_blocks * B + tl.arange(0, B)
    m = f < size
    row = tl.load(long_row + k).to(tl.int64)
    begin = tl.load(long_ptr + k).to(tl.int64)
    best = tl.load(part + begin * size + f, m, 0)
    place = tl.load(parg + begin * size + f, m, 0)
    for s in range(tl.load(long_ptr + k) + 1, tl.load(long_ptr + k + 1)):
        v = tl.load(part + s.to(tl.int64) * size + f, m, 0)
        p = tl.load(parg + s.to(tl.int64) * size + f, m, 0)
        better = (v > best) if MAX else (v < best)
        better = better | ((v != v) & (best == best))
        best = tl.where(better, v, best)
        place = tl.where(better, p, place)
    tl.store(out + row * size + f, best.to(out.dtype.element_ty), m)
    tl.store(arg + row * size + f, place, m)
"""
