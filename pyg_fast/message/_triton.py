"""Writes the Triton source of passes: loops over rows and their edges, accumulators, stores."""

import itertools
import math
from typing import NamedTuple

from ._generator import INNER, MAX_HELD, MAX_TILES, Generator, block_of
from ._ir import NODES, POINTWISE, SOFTMAX_ROLES, Load, Program, Refused
from ._pieces import GROUP, GROUPS, OWNERS, ROW, ROW_OR_PIECE, ROWS, ROWS_OR_PIECES
from ._values import (
    EDGES,
    EXP_OF_MINUS,
    ROUNDED_ADD,
    ROW_OF_TABLE,
    WIDENED,
    Block,
    Index,
    next_power_of_two,
    sum_text,
)

# The widest values that a program reduces at once.
_MAX_SUMMED = 1024
# After so many blocks of edges a program adds its sums over all edges to those in memory: a thread
# adds few numbers one after another.
_MAX_TERMS = 128


class Out(NamedTuple):
    """A result of a pass: the value :obj:`at` of its program, reduced by :obj:`kind`.

    Kinds with one row per row of the pass are `sum`, `mean`, `max`, `min`, `var` (the variance and
    the mean), `softmax` (the largest score and the reciprocal of the sum of exponentials) and
    `weighted` (a sum of multiples of the softmax that is result 0 of the pass). `edge` has one row
    per edge, `total` is a sum over all edges. :obj:`dtype` is a dtype, or `acc` for that of sums.
    """

    at: int
    kind: str
    dtype: str


# Kinds with a second result: the chosen edges, the reciprocal sum of exponentials, or the mean.
TWO_RESULTS = ('max', 'min', 'softmax', 'var')


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
    loads: tuple[Load, ...]  # the inputs, in the order of the parameters
    has_dots: bool  # whether it has matrix products
    has_maps: bool  # whether it maps inputs of edges by matrices in registers
    num_tiles: int  # of the widest dimension
    half: bool  # whether features of nodes are float16 or bfloat16
    of_softmax: bool  # whether it computes a softmax, or its gradients


# Roles of loads.
_GRADIENTS = ('grad',), ('picked',)
_STATISTICS = ('stats', *SOFTMAX_ROLES)
# Operations that read one number of each argument for a number of their value.
_BY_PLACE = {
    *POINTWISE, 'load', 'const', 'cast', 'slice', 'cat', 'lookup', 'detach', 'keep', 'view',
}  # fmt: skip


def choose_axes(program: Program, outs: list[Out]) -> list[tuple[int, ...]]:
    """Candidates for the sizes of the axes over which a pass is parallel, the best first: those of
    a wider value whose reduction is the widest output, then the finest division of that output."""
    reachable = program.reachable([out.at for out in outs])
    # A pass of gradients of parameters alone is parallel over the gradient of the message.
    shapes = (
        [program[out.at].shape for out in outs if out.kind not in ('total', 'edge')]
        or [program[at].shape for at in reachable if program[at].attrs[:1] in _GRADIENTS]
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
            if math.prod(wider) < math.prod(inner) <= _MAX_SUMMED:
                wider = inner
    return [wider, best or (1,)] if math.prod(wider) > count else [best or (1,)]


def _tile_of(sizes: list[int]) -> int:
    """The size of a last dimension of which the others are tiles: it pads the least."""
    widest = max(sizes)
    narrow = [n for n in sizes if n >= min(16, widest // 2) and widest <= MAX_TILES * n]

    def padded(n: int) -> int:
        return sum(-(-size // n) for size in sizes) * next_power_of_two(n)

    return min(narrow, key=lambda n: (padded(n), -n))


def generate(program: Program, outs: list[Out], row_role: str, acc: str) -> Source:
    """The source of one pass.

    Raises:
        Refused: If the shapes of its values do not fit together.
    """
    *better, sizes = choose_axes(program, outs)
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
        if out.kind != 'total' or not _add_weight_gradient(gen, k, out):
            for n, (index, guard) in enumerate(_result_places(gen, out)):
                _add_result(gen, out, _term(gen, k, n, out.at, index, guard))
    return Source(
        _kernel_text(gen, outs, 'rows'), _kernel_text(gen, outs, 'pieces'),
        _kernel_text(gen, outs, 'groups'), 'message_pass', gen.sizes,
        gen.names[0] not in gen.reduced, gen.holds, bool(gen.stores), tuple(gen.loads),
        any(size > MAX_HELD for size in gen.dots), any(size <= MAX_HELD for size in gen.dots),
        gen.num_tiles,
        any(
            role in NODES and dtype in ('float16', 'bfloat16')
            for (role, _), (_, dtype) in gen.loads.items()
        ),
        gen.powers is not None or any(role in _STATISTICS for role, _ in gen.loads),
    )  # fmt: skip


class Term(NamedTuple):
    """The numbers of a result at one place of the axes, for each edge of a block."""

    k: int  # the result
    name: str  # of the accumulator
    value: str
    place: tuple[Index, ...]
    flat: Index  # the offset in a row of the result
    size: int  # numbers of a row of the result
    sizes: str  # the shape of a block
    masks: list[str]

    @property
    def mask(self) -> str:
        return ' & '.join(['m', *self.masks])


def _result_places(gen: Generator, out: Out) -> list[tuple[tuple[Index, ...], str]]:
    """The indices in a result that a program computes, and the guard of each."""
    shape = gen.program[out.at].shape
    known = gen.computed_place(out.at) if out.kind == 'edge' else None
    if known is not None:
        return [(known, '')]
    if out.kind in ('total', 'edge') and math.prod(shape) not in (1, math.prod(gen.sizes)):
        # In tiles only if another axis is left for sums, or there are none.
        in_tiles = out.kind == 'edge' and len([n for n in shape if n != 1]) < gen.rank
        by_place = all(gen.program[at].op in _BY_PLACE for at in gen.program.reachable([out.at]))
        tiles = gen.tile_places(shape) if in_tiles or by_place else []
        return tiles or [(index, '') for index in _unroll_places(gen, shape)]
    try:
        return [(gen.out_index(shape), '')]
    except Refused:
        tiles = gen.tile_places(shape)
        if not tiles:
            raise
        return tiles


def _term(gen: Generator, k: int, n: int, at: int, index: tuple[Index, ...], guard: str) -> Term:
    value, shape = gen.value(at, index, guard).name, gen.program[at].shape
    flat = gen.offset(index, shape)
    axes = frozenset(axis for axis, _ in flat.terms)
    blocks = [f'B{j}' if name in axes else '1' for j, name in enumerate(gen.names)]
    sizes = ', '.join(['BE', *blocks])
    masks = [*gen.masks(axes), *([guard] if guard else [])]
    return Term(k, f's{k}_{n}', value, index, flat, math.prod(shape), sizes, masks)


def _add_result(gen: Generator, out: Out, term: Term) -> None:
    """Writes the lines that reduce and store a result."""
    name, masked = term.name, f'tl.where({term.mask}, {term.value}, 0.0)'
    if out.kind in ('max', 'min'):
        _add_extreme(gen, out.kind, term)
    elif out.kind == 'softmax':
        _add_softmax(gen, term)
    elif out.kind == 'var':
        _add_variance(gen, term)
    elif out.kind == 'edge':
        gen.uses_edge = True
        gen.lines.append(
            f'tl.store(out{term.k} + (tl.cast(eid, OFFSET) * {term.size} + '
            f'{gen.blocked(term.flat)}), tl.broadcast_to({term.value}, [{term.sizes}])'
            f'.to(out{term.k}.dtype.element_ty), {term.mask})'
        )
    elif out.kind == 'total':
        gen.lines.append(f'{name} += {masked}')
        place = f'{term.size} + {gen.blocked(term.flat)}'
        _store_total(gen, term.k, name, term.sizes, place, sum_text(name, 0), term.masks)
    elif out.kind == 'weighted':
        total = gen.weighted.setdefault(term.value, name)
        if total == name:  # Else another result has the same numbers, in another type.
            gen.starts.append(f'{name} = tl.zeros([{term.sizes}], {gen.acc})')
            gen.lines.append(f'{name} = {name} * s0_0f + {masked}')
            gen.finals.append(f'{name}f = {sum_text(f"{name} * s0_0e", 0)}')
        name = total
        whole = f'tl.where(begin < end, {name}f * s0_0s, 0.0)'
        _store(gen, term, 'out', 'part', whole, f'{name}f')
    else:
        total = sum_text(name, 0)
        mean = f' / tl.maximum(end - begin, 1).to({gen.acc})' if out.kind == 'mean' else ''
        gen.starts.append(f'{name} = tl.zeros([{term.sizes}], {gen.acc})')
        gen.lines.append(f'{name} += {masked}')
        gen.finals.append(f'{name}f = {total}{mean}')
        _store(gen, term, 'out', 'part', f'{name}f', total)


def _add_weight_gradient(gen: Generator, k: int, out: Out) -> bool:
    """Writes the gradient of a linear map's weight, if the result is term."""
    shape = gen.program[out.at].shape
    product = gen.outer(out.at, shape)
    if product is None:
        return False
    block, flat, inner = product
    text = flat.text().replace(INNER, f'j{inner}')
    masks = [f'(j{inner} < {inner})', *gen.masks(frozenset(gen.names))]
    sizes = ', '.join([str(block_of(inner)), *gen.blocks])
    gen.lines.append(f's{k} += {block.name}')
    _store_total(gen, k, f's{k}', sizes, f'{math.prod(shape)} + {text}', f's{k}', masks)
    return True


def _store_total(
    gen: Generator, k: int, name: str, sizes: str, place: str, total: str, masks: list[str]
) -> None:
    """Writes how a program adds its sum over edges to the one in memory, and starts again."""
    zeros = f'{name} = tl.zeros([{sizes}], {gen.acc})'
    gen.first.append(zeros)
    gen.stores += [
        f'{name}p = out{k} + (tl.cast(to, OFFSET) * {place})',
        f'{name}q = tl.load({name}p, {" & ".join([*masks, "stored"])}, 0)',
        f'tl.store({name}p, {name}q + {total}, {" & ".join(masks) or "None"})',
        zeros,
    ]


def _unroll_places(gen: Generator, shape: tuple[int, ...]) -> list[tuple[Index, ...]]:
    """The places of a parameter's gradient, one for each number along dimensions that are no
    axis."""
    kept: list[list[str]] = []
    free = list(gen.names)
    for size in reversed(shape):
        kept.append(gen.axes_spanning(size, free) if size > 1 else [])
        free = [name for name in free if name not in kept[-1]]
    kept.reverse()
    loose = [[0] if names else range(n) for n, names in zip(shape, kept, strict=True)]
    if math.prod(len(r) for r in loose) > 64:
        raise Refused(f"a parameter's gradient of shape {shape}")
    return [
        tuple(
            gen.joint_index(names) if names else Index((), k)
            for k, names in zip(numbers, kept, strict=True)
        )
        for numbers in itertools.product(*loose)
    ]


def _store(gen: Generator, term: Term, out: str, part: str, value: str, partial: str) -> None:
    """Writes the stores of results of rows, and of partial ones of pieces of long rows."""
    place = gen.blocked(term.flat)
    gen.of_rows.append(
        f'tl.store({out}{term.k} + (tl.cast(row, OFFSET) * {term.size} + {place}), '
        f'{value}.to({out}{term.k}.dtype.element_ty), {" & ".join([*term.masks, "is_short"])})'
    )
    gen.of_pieces.append(
        f'tl.store({part}{term.k} + (tl.cast(slot, OFFSET) * {term.size} + {place}), {partial}, '
        f'{" & ".join(term.masks) or "None"})'
    )


def _add_extreme(gen: Generator, kind: str, term: Term) -> None:
    """The largest or smallest number, and the first edge that has it."""
    name, value = term.name, term.value
    worst = "float('-inf')" if kind == 'max' else "float('inf')"
    better = '>' if kind == 'max' else '<'
    gen.starts += [
        f'{name} = tl.full([{term.sizes}], {worst}, {gen.acc})',
        f'{name}a = tl.full([{term.sizes}], -1, tl.int64)',
    ]
    gen.lines += [
        f'{name}b = {term.mask} & (({value} {better} {name}) | ({name}a < 0) | '
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
    _store(gen, term, 'out', 'part', f'{name}v', f'{name}v')
    _store(gen, term, 'arg', 'parg', f'{name}p', f'{name}p')


def _add_variance(gen: Generator, term: Term) -> None:
    """The variance and the mean, by moments about the first value of the row: the variance of equal
    values is exactly 0, so no product may be fused into a difference."""
    name = term.name
    gen.starts += [
        f'{name} = tl.zeros([{term.sizes}], {gen.acc})',
        f'{name}q = tl.zeros([{term.sizes}], {gen.acc})',
        f'{name}k = tl.zeros([{term.sizes.replace("BE", "1", 1)}], {gen.acc})',
    ]
    gen.lines += [
        f'{name}x = {term.value} + tl.zeros([{term.sizes}], {gen.acc})',
        'if s == begin:',
        f'    {name}k = {sum_text(f"tl.where(e == 0, {name}x, 0.0)", 0)}',
        f'{name}x = tl.where({term.mask}, libdevice.sub_rn({name}x, {name}k), 0.0)',
        f'{name} += {name}x',
        f'{name}q += {name}x * {name}x',
    ]
    gen.finals += [
        f'{name}n = tl.maximum(end - begin, 1).to({gen.acc})',
        f'{name}d = {sum_text(name, 0)} / {name}n',
        f'{name}v = {sum_text(f"{name}q", 0)} / {name}n - {name}d * {name}d',
        f'{name}v = tl.where({name}v < 0, 0.0, {name}v)',
        f'{name}d = {name}k + {name}d',
    ]
    _store(gen, term, 'out', 'part', f'{name}v', f'{name}v')
    _store(gen, term, 'arg', 'parg', f'{name}d', f'{name}d')


def _add_softmax(gen: Generator, term: Term) -> None:
    """An online softmax: the running maximum, and the sum of exponentials relative to it. A NaN or
    an infinite score makes the sum NaN, as in torch. Its blocks have no dimensions of 1: threads
    would hold a copy for each number of wider blocks."""
    name, dims = term.name, term.sizes.split(', ')
    narrow = ', '.join(dim for dim in dims if dim != '1')
    wide = f'[{", ".join("None" if dim == "1" else ":" for dim in dims)}]'
    value = f"tl.where({term.mask}, {term.value}, float('-inf'))"
    for k in reversed(range(len(dims))):
        if dims[k] == '1':
            value = sum_text(value, k, keep_dims=False)
    gen.starts += [
        f"{name}r = tl.full([{narrow}], float('-inf'), {gen.acc})",
        f'{name}t = tl.zeros([{narrow}], {gen.acc})',
    ]
    gen.lines += [
        f'{name}v = {value}',
        # One of the two exponentials is that of 0.
        f'{name}x = exp_of_minus(tl.abs({name}r - {name}v))',
        f'{name}b = {name}r >= {name}v',
        f'{name}f = tl.where({name}b, 1.0, {name}x)',
        f"{name}p = tl.where({name}v == float('-inf'), 0.0, tl.where({name}b, {name}x, 1.0))",
        f'{name}t = {name}t * {name}f + {name}p',
        f'{name}r = tl.maximum({name}r, {name}v)',
        f'{name}f = {name}f{wide}',
        f'{name}p = {name}p{wide}',
    ]
    gen.finals += [
        f'{name}m = tl.max({name}r, axis=0, keep_dims=True)',
        f'{name}e = tl.where(({name}r == {name}m) | (BE == 1), 1.0, tl.exp({name}r - {name}m))',
        f'{name}t = {sum_text(f"{name}t * {name}e", 0)}{wide}',
        f'{name}m = {name}m{wide}',
        f'{name}e = {name}e{wide}',
        f"{name}s = 1.0 / tl.where(tl.abs({name}m) == float('inf'), float('nan'), {name}t)",
    ]
    _store(gen, term, 'out', 'part', f'{name}m', f'{name}m')
    _store(gen, term, 'arg', 'parg', f'{name}s', f'{name}t')
    axes = frozenset(axis for axis, _ in term.flat.terms)
    gen.powers = Block(f'{name}p', axes, EDGES), term.place


def _reads_ahead(gen: Generator) -> bool:
    """Whether a kernel prefetches `col` for the next block of edges. That takes registers, which
    kernels with many values at once lack."""
    many = gen.dots or gen.num_tiles > 1
    return not (many or any(role in ('arg', *_STATISTICS) for role, _ in gen.loads))


class _Variant(NamedTuple):
    """How the programs of a kernel divide the edges: they take units one after another."""

    schedule: tuple[str, ...]  # names of tensors
    numbers: tuple[str, ...]
    units: str  # code that counts the units of a program
    unit: str  # code that finds the edges of one
    is_piece: str = ''  # whether a unit is a piece of a long row, with partial results


_OF_CSR = ('rowptr', 'col', 'perm', 'owner')
_OF_ROWS = ('num_rows', 'num_programs', 'size', 'longest')
_VARIANTS = {
    'rows': _Variant(_OF_CSR, _OF_ROWS, ROWS, ROW),
    'pieces': _Variant(
        _OF_CSR, (*_OF_ROWS, 'num_of_pieces', 'num_blocks', 'num_before'), ROWS_OR_PIECES,
        ROW_OR_PIECE, 'pid < num_of_pieces',
    ),
    'groups': _Variant(
        (*_OF_CSR, 'long_row', 'long_shift'), ('num_groups', 'num_programs'), GROUPS, GROUP,
        'is_long',
    ),
}  # fmt: skip


def _kernel_text(gen: Generator, outs: list[Out], takes: str) -> str:
    """The kernel for `rows`, for rows and `pieces` of long ones, or for `groups` of rows."""
    variant, divides = _VARIANTS[takes], takes == 'pieces'
    lines = [
        *ROUNDED_ADD.split('\n'),
        *WIDENED.split('\n'),
        *(EXP_OF_MINUS.split('\n') if gen.powers else []),
        *(ROW_OF_TABLE.split('\n') if gen.tables else []),
        *(OWNERS.split('\n') if divides else []),
        f'@triton.jit(do_not_specialize={list(variant.numbers)})',
        f'def message_pass({_parameters(gen, outs, variant, divides)}):',
        '    pid = tl.program_id(0)',
        *_indent(1, *_setup(gen), *gen.first, *variant.units.split('\n')),
    ]
    if gen.stores:
        to = f'to = pid{" + num_before" if divides else ""}'
        lines += _indent(1, to, 'stored = pid < 0', 'terms = 0')
    lines += _indent(1, 'for unit in range(units):')
    lines += _indent(2, *variant.unit.split('\n'), *gen.before, *gen.starts)
    lines += _indent(2, *_edge_loop(gen), *gen.finals)
    if variant.is_piece and gen.of_pieces:
        lines += _indent(2, f'if {variant.is_piece}:', *_indent(1, *gen.of_pieces))
        lines += _indent(2, 'else:', *_indent(1, *gen.of_rows))
    else:
        lines += _indent(2, *gen.of_rows)
    if gen.stores:
        lines += _indent(2, 'terms += tl.cdiv(end - begin, BE).to(tl.int32)')
        lines += _indent(2, f'if (terms >= {_MAX_TERMS}) | (unit + 1 >= units):')
        # The barrier: threads may read what others wrote.
        lines += _indent(3, 'tl.debug_barrier()', *gen.stores, 'stored = pid >= 0', 'terms = 0')
        if divides:  # A program without pieces has no term.
            lines += _indent(1, 'if units == 0:', *_indent(1, *gen.stores))
    return '\n'.join(lines) + '\n'


def _indent(level: int, *lines: str) -> list[str]:
    return ['    ' * level + line for line in lines]


def _parameters(gen: Generator, outs: list[Out], variant: _Variant, divides: bool) -> str:
    two = [k for k, out in enumerate(outs) if out.kind in TWO_RESULTS]
    results = [f'out{k}' for k in range(len(outs))]
    results += [f'arg{k}' for k in two]
    if variant.is_piece:
        results += [f'part{k}' for k, out in enumerate(outs) if out.kind not in ('edge', 'total')]
        results += [f'parg{k}' for k in two]
    return ', '.join([
        *variant.schedule, *(name for name, _ in gen.loads.values()), *results, 'seed_at',
        *variant.numbers, *['LANES: tl.constexpr'] * divides, 'HAS_PERM: tl.constexpr',
        'OFFSET: tl.constexpr', 'STAGES: tl.constexpr', 'BE: tl.constexpr',
        *(f'B{k}: tl.constexpr' for k in range(gen.rank)),
        *(f'STEP_{name}: tl.constexpr' for (role, _), (name, _) in gen.loads.items()
          if role in NODES),
        *(f'ROWS_{name}: tl.constexpr' for (role, _), (name, _) in gen.loads.items()
          if role == 'table'),
    ])  # fmt: skip


def _along(gen: Generator, dim: int) -> str:
    """The subscript that makes a range the dimension `dim` of a block."""
    return ', '.join(':' if j == dim else 'None' for j in range(gen.rank + 1))


def _setup(gen: Generator) -> list[str]:
    """The places of a program in each axis, and their masks."""
    lines = [f'zero = tl.zeros([{", ".join(["1"] * (gen.rank + 1))}], OFFSET)']
    if gen.uses_seed:
        lines.append('seed = tl.load(seed_at)')
    lines += ['tile = pid // num_programs', 'pid = pid % num_programs']
    for k, (name, size) in enumerate(zip(gen.names, gen.sizes, strict=True)):
        offset = ' + tile * B0' if k == 0 else ''
        lines += [
            f'{name} = (tl.arange(0, B{k}){offset})[{_along(gen, k + 1)}]',
            f'm_{name} = ({name} < {size}) | ({size} % B{k} == 0)',
        ]
    for size in sorted(gen.dots):
        lines += [
            f'i{size} = tl.arange(0, {block_of(size)})[{_along(gen, 1)}]',
            f'j{size} = tl.arange(0, {block_of(size)})[{_along(gen, 0)}]',
        ]
    return lines


def _edge_loop(gen: Generator) -> list[str]:
    """The loop over the edges of a row, in blocks."""
    lines = [f'e = tl.arange(0, BE)[{_along(gen, 0)}]']
    body = ['o = s + e', 'm = (e < end - s) | (BE == 1)']
    if _reads_ahead(gen):
        lines.append('ahead = tl.load(col + begin + e, e < end - begin, 0)')
        body += ['other = ahead', 'ahead = tl.load(col + o + BE, e < end - s - BE, 0)']
    else:
        body.append('other = tl.load(col + o, m, 0)')
    if gen.uses_edge:
        body += ['eid = o', 'if HAS_PERM:', '    eid = tl.load(perm + o, m, 0)']
    loop = 'for s in tl.range(begin, end, BE, num_stages=STAGES):'
    return [*lines, loop, *_indent(1, *body, *gen.lines)]
