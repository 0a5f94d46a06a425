"""Triton source for the passes of a plan over a graph's rows."""

import itertools
import math
from typing import NamedTuple

from ._generator import INNER, MOST_HELD, MOST_TILES, Generator, block_of
from ._ir import NODES, STATISTICS, Program, Refused
from ._pieces import GROUP, GROUPS, OWNERS, ROW, ROW_OR_PIECE, ROWS, ROWS_OR_PIECES
from ._values import ADDED, EDGES, Block, Index, power, total_of

# The widest values that a program sums at once.
_MOST_SUMMED = 1024
# Blocks of edges after which a program adds its sums over all edges to those in memory.
_MOST_TERMS = 128


class Out(NamedTuple):
    """A result of a pass: :obj:`kind` is `sum`, `mean`, `max`, `min`, `var` (the variance and the
    mean), `softmax` (the largest score and the reciprocal of the sum of exponentials, over each
    row), `weighted` (a sum of multiples of the softmax before it, in the same pass), `edge` (a row
    per edge) or `total` (over all edges); :obj:`dtype` is a dtype, or `acc` for that of sums."""

    at: int
    kind: str
    dtype: str


# Kinds that give two results: the second are edges, or what the first come from.
OF_TWO = ('max', 'min', 'softmax', 'var')


class Source(NamedTuple):
    """A generated kernel."""

    text: str  # for rows that are not long
    divides: str  # for pieces of long rows, and perhaps the other rows
    of_groups: str  # for the groups of a prepared graph
    name: str
    sizes: tuple[int, ...]  # of the axes
    tiled: bool  # whether the first axis may be cut into tiles, each a program's
    holds: bool  # whether programs hold parameters in registers
    totals: bool  # whether programs sum over all edges
    loads: tuple[tuple[str, int], ...]  # the inputs, in the order of the parameters
    has_dots: bool  # whether it multiplies matrices
    has_maps: bool  # whether it maps raw values of edges by matrices in registers
    num_tiles: int  # of the widest dimension
    half: bool  # whether features of nodes have two bytes


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
    narrow = [n for n in sizes if n >= min(16, widest // 2) and widest <= MOST_TILES * n]
    return min(narrow, key=lambda n: (sum(-(-size // n) for size in sizes) * power(n), -n))


def generate(program: Program, outs: list[Out], row_role: str, acc: str) -> Source:
    """The source of one pass.

    Raises:
        Refused: If the shapes of its values do not fit together.
    """
    *better, sizes = axes_of(program, outs)
    for each, in_tiles in [*((each, False) for each in better), (sizes, True)]:
        try:
            return _generate(program, outs, row_role, acc, each, in_tiles)
        except Refused:
            continue
    return _generate(program, outs, row_role, acc, sizes, False)


def _generate(
    program: Program, outs: list[Out], row_role: str, acc: str, sizes: tuple[int, ...],
    in_tiles: bool,
) -> Source:  # fmt: skip
    gen = Generator(program, sizes, row_role, acc, in_tiles)
    for k, out in enumerate(outs):
        if out.kind != 'total' or not _mapped_total(gen, k, out):
            for n, (index, guard) in enumerate(_places(gen, out)):
                _add(gen, out, _term(gen, k, n, out.at, index, guard))
    return Source(
        _template(gen, outs, 'rows'),
        _template(gen, outs, 'pieces'),
        _template(gen, outs, 'groups'),
        'message_pass',
        gen.sizes,
        gen.names[0] not in gen.reduced,
        gen.holds,
        bool(gen.stores),
        tuple(gen.loads),
        any(size > MOST_HELD for size in gen.dots),
        any(size <= MOST_HELD for size in gen.dots),
        gen.num_tiles,
        any(
            role in NODES and dtype in ('float16', 'bfloat16')
            for (role, _), (_, dtype) in gen.loads.items()
        ),
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
    known = gen.known_place(out.at) if out.kind == 'edge' else None
    if known is not None:
        return [(known, '')]
    if out.kind in ('total', 'edge') and math.prod(shape) not in (1, math.prod(gen.sizes)):
        # Tiles only if another axis is left for sums.
        in_tiles = out.kind == 'edge' and len([n for n in shape if n != 1]) < gen.rank
        found = gen.tiled(shape) if in_tiles else []
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
    elif out.kind == 'var':
        _variance(gen, one)
    elif out.kind == 'edge':
        gen.uses_edge = True
        gen.lines.append(
            f'tl.store(out{one.k} + (tl.cast(eid, OFFSET) * {one.size} + '
            f'{gen.blocked(one.flat)}), ({one.value} + tl.zeros([{one.sizes}], {gen.acc}))'
            f'.to(out{one.k}.dtype.element_ty), {one.mask})'
        )
    elif out.kind == 'total':
        gen.lines.append(f'{name} += {masked}')
        place = f'{one.size} + {gen.blocked(one.flat)}'
        _store_total(gen, one.k, name, one.sizes, place, total_of(name, 0), one.masks)
    elif out.kind == 'weighted':
        gen.starts.append(f'{name} = tl.zeros([{one.sizes}], {gen.acc})')
        gen.lines.append(f'{name} = {name} * s0_0f + {masked}')
        gen.finals.append(f'{name}f = {total_of(f"{name} * s0_0e", 0)}')
        whole = f'tl.where(begin < end, {name}f * s0_0s, 0.0)'
        _store(gen, one, 'out', 'part', whole, f'{name}f')
    else:
        total = total_of(name, 0)
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
    block, flat, inner = found
    text = flat.text().replace(INNER, f'j{inner}')
    masks = [f'(j{inner} < {inner})', *gen.masks(frozenset(gen.names))]
    sizes = ', '.join([str(block_of(inner)), *gen.blocks])
    gen.lines.append(f's{k} += {block.name}')
    _store_total(gen, k, f's{k}', sizes, f'{math.prod(shape)} + {text}', f's{k}', masks)
    return True


def _store_total(
    gen: Generator, k: int, name: str, sizes: str, place: str, total: str, masks: list[str]
) -> None:
    """Adds a sum over edges to that of the program in memory, and starts again: a thread adds few
    numbers one after another."""
    zeros = f'{name} = tl.zeros([{sizes}], {gen.acc})'
    gen.first.append(zeros)
    gen.stores += [
        f'{name}p = out{k} + (tl.cast(to, OFFSET) * {place})',
        f'{name}q = tl.load({name}p, {" & ".join([*masks, "stored"])}, 0)',
        f'tl.store({name}p, {name}q + {total}, {" & ".join(masks) or "None"})',
        zeros,
    ]


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
    """Stores the results of rows, and partial ones of pieces of long rows."""
    place = gen.blocked(one.flat)
    gen.of_rows.append(
        f'tl.store({out}{one.k} + (tl.cast(row, OFFSET) * {one.size} + {place}), '
        f'{value}.to({out}{one.k}.dtype.element_ty), {" & ".join([*one.masks, "is_short"])})'
    )
    gen.of_pieces.append(
        f'tl.store({part}{one.k} + (tl.cast(slot, OFFSET) * {one.size} + {place}), {partial}, '
        f'{" & ".join(one.masks) or "None"})'
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


def _variance(gen: Generator, one: Term) -> None:
    """The variance and the mean, by differences from the first value: those of equal values are 0.
    No product may be fused into a difference."""
    name = one.name
    gen.starts += [
        f'{name} = tl.zeros([{one.sizes}], {gen.acc})',
        f'{name}q = tl.zeros([{one.sizes}], {gen.acc})',
        f'{name}k = tl.zeros([{one.sizes.replace("BE", "1", 1)}], {gen.acc})',
    ]
    gen.lines += [
        f'{name}x = {one.value} + tl.zeros([{one.sizes}], {gen.acc})',
        'if s == begin:',
        f'    {name}k = {total_of(f"tl.where(e == 0, {name}x, 0.0)", 0)}',
        f'{name}x = tl.where({one.mask}, libdevice.sub_rn({name}x, {name}k), 0.0)',
        f'{name} += {name}x',
        f'{name}q += {name}x * {name}x',
    ]
    gen.finals += [
        f'{name}n = tl.maximum(end - begin, 1).to({gen.acc})',
        f'{name}d = {total_of(name, 0)} / {name}n',
        f'{name}v = {total_of(f"{name}q", 0)} / {name}n - {name}d * {name}d',
        f'{name}v = tl.where({name}v < 0, 0.0, {name}v)',
        f'{name}d = {name}k + {name}d',
    ]
    _store(gen, one, 'out', 'part', f'{name}v', f'{name}v')
    _store(gen, one, 'arg', 'parg', f'{name}d', f'{name}d')


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
        f'{name}p = tl.where({one.mask}, '
        f'tl.where({name}v == {name}n, 1.0, tl.exp({name}v - {name}n)), 0.0)',
        f'{name}t = {name}t * {name}f + {name}p',
        f'{name} = {name}n',
    ]
    gen.finals += [
        f'{name}m = tl.max({name}, axis=0, keep_dims=True)',
        f'{name}e = tl.where({name} == {name}m, 1.0, tl.exp({name} - {name}m))',
        f'{name}t = {total_of(f"{name}t * {name}e", 0)}',
        f"{name}s = 1.0 / tl.where(tl.abs({name}m) == float('inf'), float('nan'), {name}t)",
    ]
    _store(gen, one, 'out', 'part', f'{name}m', f'{name}m')
    _store(gen, one, 'arg', 'parg', f'{name}s', f'{name}t')
    axes = frozenset(axis for axis, _ in one.flat.terms)
    gen.powers = Block(f'{name}p', axes, EDGES), one.place


def _reads_ahead(gen: Generator) -> bool:
    """Whether columns are read one block of edges before the rows that they name. It takes
    registers, which passes with many values at once have not."""
    reads = {role for role, _ in gen.loads}
    many = gen.dots or gen.num_tiles > 1 or reads & {'stats', 'arg', *STATISTICS}
    return not many


def _template(gen: Generator, outs: list[Out], takes: str) -> str:
    """The kernel for `rows`, for rows and `pieces` of long ones, or for `groups` of rows."""
    rank, divides, of_groups = gen.rank, takes == 'pieces', takes == 'groups'
    pointers = [name for name, _ in gen.loads.values()]
    extremes = [k for k, out in enumerate(outs) if out.kind in OF_TWO]
    results = [f'out{k}' for k in range(len(outs))]
    results += [f'arg{k}' for k in extremes]
    if divides or of_groups:
        results += [f'part{k}' for k, out in enumerate(outs) if out.kind not in ('edge', 'total')]
        results += [f'parg{k}' for k in extremes]
    schedule = ['rowptr', 'col', 'perm', 'owner']
    numbers = ['num_rows', 'num_programs', 'size', 'longest']
    units, unit = ROWS, ROW
    if of_groups:
        schedule += ['long_row', 'long_shift']
        numbers = ['num_groups', 'num_programs']
        units, unit = GROUPS, GROUP
    elif divides:
        units, unit = ROWS_OR_PIECES, ROW_OR_PIECE
        numbers += ['num_of_pieces', 'num_blocks', 'num_before']
    head = ', '.join([
        *schedule, *pointers, *results, 'seed_at', *numbers,
        *['LANES: tl.constexpr'] * divides, 'HAS_PERM: tl.constexpr', 'OFFSET: tl.constexpr',
        'BE: tl.constexpr',
        *(f'B{k}: tl.constexpr' for k in range(rank)),
        *(f'STEP_{name}: tl.constexpr' for (role, _), (name, _) in gen.loads.items()
          if role in NODES),
    ])  # fmt: skip
    out = [
        *ADDED.split('\n'),
        *(OWNERS.split('\n') if divides else []),
        f'@triton.jit(do_not_specialize={numbers})',
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
        offset = ' + tile * B0' if k == 0 else ''
        add(
            1,
            f'{name} = (tl.arange(0, B{k}){offset})[{shaped(k + 1)}]',
            f'm_{name} = ({name} < {size}) | ({size} % B{k} == 0)',
        )
    for size in sorted(gen.dots):
        inputs = ', '.join(['None', ':', *['None'] * (rank - 1)])
        add(1, f'i{size} = tl.arange(0, {block_of(size)})[{inputs}]')
        add(1, f'j{size} = tl.arange(0, {block_of(size)})[{shaped(0)}]')
    add(1, *gen.first)
    add(1, *units.split('\n'))
    if gen.stores:
        add(1, f'to = pid{" + num_before" if divides else ""}', 'stored = pid < 0', 'terms = 0')
    add(1, 'for unit in range(units):')
    at = 2
    add(at, *unit.split('\n'), *gen.before, *gen.starts)
    add(at, f'e = tl.arange(0, BE)[{shaped(0)}]')
    ahead = _reads_ahead(gen)
    if ahead:
        add(at, 'ahead = tl.load(col + begin + e, e < end - begin, 0)')
    add(at, 'for s in range(begin, end, BE):')
    add(at + 1, 'o = s + e', 'm = e < end - s')
    if ahead:
        add(at + 1, 'other = ahead', 'ahead = tl.load(col + o + BE, e < end - s - BE, 0)')
    else:
        add(at + 1, 'other = tl.load(col + o, m, 0)')
    if gen.uses_edge:
        add(at + 1, 'eid = o', 'if HAS_PERM:')
        add(at + 2, 'eid = tl.load(perm + o, m, 0)')
    add(at + 1, *gen.lines)
    add(at, *gen.finals)
    if (divides or of_groups) and gen.of_pieces:
        add(at, 'if pid < num_of_pieces:' if divides else 'if is_long:')
        add(at + 1, *gen.of_pieces)
        add(at, 'else:')
        add(at + 1, *gen.of_rows)
    else:
        add(at, *gen.of_rows)
    if gen.stores:
        add(at, 'terms += tl.cdiv(end - begin, BE).to(tl.int32)')
        add(2, f'if (terms >= {_MOST_TERMS}) | (unit + 1 >= units):')
        # Threads may read what others wrote.
        add(3, 'tl.debug_barrier()', *gen.stores, 'stored = pid >= 0', 'terms = 0')
        if divides:  # A program without pieces has no term.
            add(1, 'if units == 0:')
            add(2, *gen.stores)
    return '\n'.join(out) + '\n'
