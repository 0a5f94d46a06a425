"""Divides long rows into pieces, and writes the Triton kernel that combines partial results.

Edges are divided into blocks of equal size. A row is long if it has more edges than a block, and
many more than the mean: it would still run when all others have ended. Its pieces are its edges in
each block, so a block has at most two pieces: of the row that begins before it, and of one that
begins in it. Either one kernel takes rows, and leaves long ones to a second; or, where rows have
many edges on average, one takes both side by side, at a higher cost per row.

A prepared graph has groups, see :class:`~pyg_fast.sparse.groups.Groups`: if it has long rows, one
kernel takes groups, and the groups of a long row are its pieces.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..sparse.groups import Groups
from ._values import ROUNDED_ADD, next_power_of_two

_MAX_BLOCKS, _MIN_SIZE = 2**14, 128
_FEW = 2**13  # edges that are not divided: one program is faster than two launches
# Limits of the programs of a tile that add pieces, and that combine them. Each takes every n-th
# block.
_MAX_PROGRAMS, _MAX_COMBINING = 2**12, 2**7
_COMBINING_LANES = _MAX_BLOCKS // _MAX_COMBINING
# A row is long from so many times the mean on; or from E / `_FEW_ROWS` edges on (in a graph with
# groups E / `_FEW_OF_GROUPS`), if that is less.
_TIMES_MEAN, _FEW_ROWS, _FEW_OF_GROUPS = 4, 2**10, 2**12
_MANY_EDGES = 32  # per row on average: one kernel takes rows and pieces
# Limits for the use of groups: of groups in a row, which few programs combine, and of edges in a
# group, which one program adds.
_MAX_GROUPS, _LARGEST_GROUP = 2**11, 2**10
# Columns of a program that combines many pieces, and of one that combines few.
_COLUMNS, _WIDE = 8, 32


class Pieces(NamedTuple):
    """How long rows are divided. Each block has two slots for partial results, one per piece."""

    size: int  # edges of a block
    longest: int  # edges of a row that is not long; at least `size`
    num_blocks: int
    together: bool = False  # whether one kernel takes rows and pieces

    def programs(self, most: int | None) -> tuple[int, int]:
        """The number of programs that add pieces, up to `most`, and the slots that each looks at
        in graphs of any size, a power of two."""
        most = min(most or _MAX_PROGRAMS, _MAX_PROGRAMS)
        return min(self.num_blocks, most), 2 * next_power_of_two(-(-_MAX_BLOCKS // most))


def divide_rows(
    num_edges: int, num_rows: int, groups: Groups | None, most: int, least: int = _MIN_SIZE,
    few: int = _FEW,
) -> Pieces | Groups:  # fmt: skip
    """How the rows of a graph are divided, from what the host knows without a device sync: the
    numbers of edges and rows, and the bound `most` of the edges of a row. A block has at least
    `least` edges. Without a long row there are no blocks; with one, a graph's `groups` are used."""
    if num_edges <= few:
        return Pieces(num_edges, num_edges, 0)
    few_rows, divides = _FEW_ROWS, False
    if groups is not None:
        divides = groups.most_groups <= _MAX_GROUPS and groups.size <= _LARGEST_GROUP
        few_rows = _FEW_OF_GROUPS if divides else _FEW_ROWS
    size = max(least, -(-num_edges // _MAX_BLOCKS))
    longest = max(size, min(_TIMES_MEAN * num_edges // max(1, num_rows), num_edges // few_rows))
    if most <= longest:
        return Pieces(num_edges, num_edges, 0)
    if groups is not None and divides:
        return groups
    together = num_edges >= _MANY_EDGES * num_rows
    return Pieces(size, longest, -(-num_edges // size), together)


_LAST = """@triton.jit
def last_of(rows, lane):
    return tl.max(tl.where(rows >= 0, lane, -1))


"""
# Slot 2b is for the row that begins before block b, slot 2b + 1 for the one that begins in it.
# `owner` holds their rows, written by the kernel of rows or by one of its own. Slots without a
# piece are not cleared: readers check that the row has a piece there, as no stale number has.
_FEW_PIECES, ROWS_OF_OWNERS, WARPS_OF_OWNERS = 16, 128, 4
WRITE_OWNERS = f"""{_LAST}@triton.jit(do_not_specialize=['num_rows', 'size', 'longest'])
def message_owners(rowptr, owner, num_rows, size, longest):
    lane = tl.arange(0, {ROWS_OF_OWNERS})
    row = tl.program_id(0) * {ROWS_OF_OWNERS} + lane
    begin = tl.load(rowptr + row, row < num_rows, 0)
    end = tl.load(rowptr + row + 1, row < num_rows, 0)
    first = begin // size
    count = tl.where(end - begin > longest, (end - 1) // size - first + 1, 0)
    for k in range(tl.minimum(tl.max(count), {_FEW_PIECES})):
        tl.store(owner + 2 * (first + k) + (k == 0), row, k < count)
    rows = tl.where(count > {_FEW_PIECES}, row, -1)
    for each in range(tl.sum((rows >= 0).to(tl.int32))):
        which = last_of(rows, lane)
        of = tl.max(tl.where(lane == which, rows, -1))
        rows = tl.where(lane == which, -1, rows)
        first_of = tl.max(tl.where(lane == which, first, 0))
        count_of = tl.max(tl.where(lane == which, count, 0))
        for start in range({_FEW_PIECES}, count_of, {ROWS_OF_OWNERS}):
            tl.store(owner + 2 * (first_of + start + lane), of, start + lane < count_of)


"""
OWNERS = f"""{_LAST}@triton.jit
def owner_of(owner, slot, rowptr, num_blocks, num_rows, size, longest):
    row = tl.load(owner + slot, slot < 2 * num_blocks, -1).to(tl.int32)
    is_row = (row >= 0) & (row < num_rows)
    begin = tl.load(rowptr + row, is_row, 0)
    end = tl.load(rowptr + row + 1, is_row, 0)
    first = (slot // 2).to(tl.int64) * size
    begins = (begin >= first) & (begin < first + size)
    has_piece = tl.where(slot % 2 == 1, begins, (begin < first) & (end > first))
    return tl.where(is_row & (end - begin > longest) & has_piece, row, -1)


"""
# The units of a program: rows, or the pieces in some blocks; and the edges of one.
ROWS = """\
units = tl.cdiv(num_rows - pid, num_programs)"""
ROW = """\
row = pid + unit * num_programs
begin = tl.load(rowptr + row)
end = tl.load(rowptr + row + 1)
is_short = end - begin <= longest
if (end - begin > longest) & (tile == 0):
    for start in range(begin // size, (end - 1) // size + 1, 128):
        block = start + tl.arange(0, 128)
        slot = 2 * block + (block == begin // size).to(block.dtype)
        tl.store(owner + slot, row, block <= (end - 1) // size)
end = tl.where(is_short, end, begin)"""
ROWS_OR_PIECES = """\
lane = tl.arange(0, LANES)
owners = tl.full([LANES], -1, tl.int32)
if pid < num_of_pieces:
    slots = 2 * (pid + num_of_pieces * (lane // 2)) + lane % 2
    owners = owner_of(owner, slots, rowptr, num_blocks, num_rows, size, longest)
    units = tl.sum((owners >= 0).to(tl.int32))
else:
    units = tl.cdiv(num_rows - (pid - num_of_pieces), num_programs - num_of_pieces)"""
ROW_OR_PIECE = """\
if pid < num_of_pieces:
    which = last_of(owners, lane)
    row = tl.max(tl.where(lane == which, owners, -1))
    owners = tl.where(lane == which, -1, owners)
    slot = 2 * (pid + num_of_pieces * (which // 2)) + which % 2
    first = (slot // 2).to(tl.int64) * size
    begin = tl.maximum(tl.load(rowptr + row).to(tl.int64), first)
    end = tl.minimum(tl.load(rowptr + row + 1).to(tl.int64), first + size)
    begin = begin.to(rowptr.dtype.element_ty)
    end = end.to(rowptr.dtype.element_ty)
    is_short = row < 0
else:
    row = pid - num_of_pieces + unit * (num_programs - num_of_pieces)
    slot = row
    begin = tl.load(rowptr + row)
    end = tl.load(rowptr + row + 1)
    is_short = end - begin <= longest
    end = tl.where(is_short, end, begin)"""
# Groups: a row with one group has no partial results.
GROUPS = """\
units = tl.cdiv(num_groups - pid, num_programs)"""
GROUP = """\
group = pid + unit * num_programs
begin = tl.load(rowptr + group)
end = tl.load(rowptr + group + 1)
row = tl.load(owner + group)
is_long = row < 0
which = tl.where(is_long, -1 - row, 0)
slot = group - tl.load(long_shift + which, is_long, 0)
row = tl.where(is_long, tl.load(long_row + which, is_long, 0), row)
is_short = is_long == 0"""

# The offset of a partial result, and its number of edges.
_OF_BLOCKS = """@triton.jit
def place_of(first, piece, size, f):
    return (2 * (first + piece) + (piece == 0)) * size + f


@triton.jit
def edges_of(first, piece, begin, end, block_size):
    last = tl.minimum((first + piece + 1) * block_size, end)
    return last - tl.maximum((first + piece) * block_size, begin)


"""
_OF_GROUPS = """@triton.jit
def place_of(first, piece, size, f):
    return (first + piece) * size + f


@triton.jit
def edges_of(first, piece, begin, end, group_size):
    return tl.minimum((piece + 1) * group_size, end - begin) - piece * group_size


"""
# Each thread reads every `R`-th piece, so that it adds at most 128 one after another; the sums of
# threads are added as a tree.
_FUNCTIONS = """@triton.jit
def sum_of(
    part, first, count, size, f, m, R: tl.constexpr, W: tl.constexpr, ACC: tl.constexpr
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    total = tl.zeros([R, W], ACC)
    for start in range(0, count, R):
        at = piece + start
        total += tl.load(part + place_of(first, at, size, f), m & (at < count), 0)
    return tl.reduce(total, 0, added)


@triton.jit
def softmax_of(
    part, most, power, first, count, size, f, heads, head, m, R: tl.constexpr, W: tl.constexpr,
    ACC: tl.constexpr,
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    highest = tl.full([R, W], float('-inf'), ACC)
    powers = tl.zeros([R, W], ACC)
    total = tl.zeros([R, W], ACC)
    for start in range(0, count, R):
        at = piece + start
        inside = m & (at < count)
        place = place_of(first, at, heads, head)
        score = tl.load(most + place, inside, float('-inf'))
        new = tl.maximum(highest, score)
        a = tl.where(highest == new, 1.0, tl.exp(highest - new))
        b = tl.where(score == new, 1.0, tl.exp(score - new))
        powers = powers * a + tl.load(power + place, inside, 0) * b
        total = total * a + tl.load(part + place_of(first, at, size, f), inside, 0) * b
        highest = new
    new = tl.max(highest, axis=0)
    a = tl.where(highest == new[None, :], 1.0, tl.exp(highest - new[None, :]))
    powers = tl.reduce(powers * a, 0, added)
    powers = tl.where(tl.abs(new) == float('inf'), float('nan'), powers)
    return new, powers, tl.reduce(total * a, 0, added)


@triton.jit
def best_of(
    part, place, first, count, size, f, m, SIGN: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
    ACC: tl.constexpr,
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    best = tl.full([R, W], float('-inf'), ACC)
    edge = tl.full([R, W], -1, tl.int64)
    for start in range(0, count, R):
        at = piece + start
        inside = m & (at < count)
        value = SIGN * tl.load(part + place_of(first, at, size, f), inside, 0)
        better = (value > best) | (edge < 0) | ((value != value) & (best == best))
        best = tl.where(inside & better, value, best)
        other = tl.load(place + place_of(first, at, size, f), inside, -1)
        edge = tl.where(inside & better, other, edge)
    no_nan = tl.max((best != best).to(tl.int32), axis=0) == 0
    new = tl.max(tl.where(best == best, best, float('-inf')), axis=0)
    new = tl.where(no_nan, new, float('nan'))
    is_best = (edge >= 0) & ((best == new[None, :]) | (best != best))
    is_best = is_best & ((best != best) | no_nan[None, :])
    edge = tl.min(tl.where(is_best, edge, 9223372036854775807), axis=0)
    return SIGN * new, edge


"""
_VARIANCE = """@triton.jit
def variance_of(
    part, mean, first, count, size, f, m, begin, end, block_size, R: tl.constexpr, W: tl.constexpr,
    ACC: tl.constexpr,
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    origin = tl.load(mean + place_of(first, 0, size, f), m, 0)
    total = tl.zeros([R, W], ACC)
    squares = tl.zeros([R, W], ACC)
    for start in range(0, count, R):
        at = piece + start
        inside = m & (at < count)
        number = edges_of(first, at, begin, end, block_size).to(ACC)
        place = place_of(first, at, size, f)
        away = tl.where(inside, tl.load(mean + place, inside, 0) - origin, 0.0)
        total += number * away
        squares += number * (tl.load(part + place, inside, 0) + away * away)
    away = tl.reduce(total, 0, added) / (end - begin).to(ACC)
    variance = tl.reduce(squares, 0, added) / (end - begin).to(ACC) - away * away
    return tl.where(variance < 0, 0.0, variance), origin + away


"""
_HEAD = """@triton.jit(do_not_specialize={numbers})
def message_combine({parameters}, ACC: tl.constexpr):
    tile, pid = tl.program_id(0) // num_programs, tl.program_id(0) % num_programs
    tiles = {tiles}
{rows}
        at = tile
"""
_ROWS_OF_BLOCKS = f"""\
    lane = tl.arange(0, {_COMBINING_LANES})
    block = pid + num_programs * lane
    rows = owner_of(owner, 2 * block + 1, rowptr, num_blocks, num_rows, size, longest)
    for each in range(tl.sum((rows >= 0).to(tl.int32))):
        which = last_of(rows, lane)
        row = tl.max(tl.where(lane == which, rows, -1)).to(tl.int64)
        rows = tl.where(lane == which, -1, rows)
        first = pid + num_programs * which.to(tl.int64)
        end = tl.load(rowptr + row + 1).to(tl.int64)
        begin = tl.load(rowptr + row).to(tl.int64)
        count = (end - 1) // size - first + 1"""
_ROWS_OF_GROUPS = """\
    for each in range(tl.cdiv(num_rows - pid, num_programs)):
        which = pid + each * num_programs
        row = tl.load(long_row + which).to(tl.int64)
        first = tl.load(long_ptr + which).to(tl.int64)
        count = tl.load(long_ptr + which + 1).to(tl.int64) - first
        end = tl.load(rowptr + row + 1).to(tl.int64)
        begin = tl.load(rowptr + row).to(tl.int64)"""
# One program combines all columns of a row with few pieces; of a row with many, a program combines
# some columns. Names differ by result and branch: Triton would merge variables of equal names.
_RESULT_OF_FEW = """
if (count <= {few}) & (each % tiles == tile):
    for column in range(0, size{k}, {wide}):
        f{k} = column + tl.arange(0, {wide})
        m{k} = f{k} < size{k}
        {values} = {function}({arguments}, {few}, {wide}, ACC)
        {then}
"""
_RESULT_OF_TILE = """
first{k} = at
at = at - tl.cdiv(size{k}, {width})
if ({which}) & (first{k} >= 0) & (at < 0):
    g{k} = first{k} * {width} + tl.arange(0, {width})
    n{k} = g{k} < size{k}
    {values} = {function}({arguments}, {pieces}, {width}, ACC)
    {then}
"""
_OF_FEW, _OF_MANY = 'abcfm', 'xyzgn'  # names of values
_OF_PIECES = 'first, count, size{k}, f{k}'
_STORE = 'tl.store(out{k} + row * size{k} + f{k}, a{k}.to(out{k}.dtype.element_ty), m{k})'
_STORE_SECOND = 'tl.store(arg{k} + row * size{k} + f{k}, b{k}, m{k})'


class _Kind(NamedTuple):
    values: str
    function: str
    arguments: str
    lines: tuple[str, ...]


_SUM = _Kind('a{k}', 'sum_of', f'part{{k}}, {_OF_PIECES}, m{{k}}', (_STORE,))
_BEST = _Kind(
    'a{k}, b{k}', 'best_of', f'part{{k}}, parg{{k}}, {_OF_PIECES}, m{{k}}, 1',
    (_STORE, _STORE_SECOND),
)  # fmt: skip
_KINDS = {
    'sum': _SUM,
    'mean': _SUM._replace(lines=('a{k} = a{k} / (end - begin).to(ACC)', _STORE)),
    'softmax': _Kind(
        'a{k}, b{k}, c{k}', 'softmax_of',
        f'part{{k}}, part{{k}}, parg{{k}}, {_OF_PIECES}, size{{k}}, f{{k}}, m{{k}}',
        (_STORE, 'b{k} = 1.0 / b{k}', _STORE_SECOND),
    ),
    # The softmax is result 0: `size{k} // size0` numbers share one of its numbers.
    'weighted': _Kind(
        'c{k}, b{k}, a{k}', 'softmax_of',
        f'part{{k}}, part0, parg0, {_OF_PIECES}, size0, f{{k}} // (size{{k}} // size0), m{{k}}',
        ('a{k} = a{k} / b{k}', _STORE),
    ),
    'var': _Kind(
        'a{k}, b{k}', 'variance_of',
        f'part{{k}}, parg{{k}}, {_OF_PIECES}, m{{k}}, begin, end, size',
        (_STORE, _STORE_SECOND),
    ),
    'max': _BEST,
    'min': _BEST._replace(arguments=_BEST.arguments[:-1] + '-1'),
}  # fmt: skip
# Pieces that a program reads at once, of a row of more than _FEW_PIECES; fewer for a softmax, which
# needs more registers.
_MANY_PIECES, _MANY_OF_SOFTMAX = 256, 64
# Rows of up to `_FEW_GROUPS` groups are combined by programs of one warp, up to `_MAX_OF_FEW` for a
# tile, which read `_GROUPS_AT_ONCE`.
_FEW_GROUPS, _GROUPS_AT_ONCE, _MAX_OF_FEW = 64, 8, 2**16


class Form(NamedTuple):
    """What a kernel combines: pieces of blocks, or few or many groups. Of a prepared graph the host
    knows whether a row has many."""

    of_groups: bool
    of_many: bool

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return _COLUMNS if self.of_many else _WIDE

    @property
    def warps(self) -> int:
        return 8 if self.of_many else 1


FORMS = FORM_OF_BLOCKS, FORM_OF_FEW_GROUPS, FORM_OF_MANY_GROUPS = (
    Form(False, True), Form(True, False), Form(True, True),
)  # fmt: skip


@lru_cache(maxsize=256)
def combine_kernel(kinds: tuple[str, ...], form: Form) -> str:
    """The kernel `message_combine`, which writes the long rows of results of these kinds.

    Its pointers are, for each result, the partial results and the result, with the second ones of
    kinds that have two; then the owners of slots, or the long rows and the first partial result of
    each; then the row pointers. Its numbers are the programs of a tile, the blocks, the rows, the
    edges of a block and of the longest row that is not long (for groups: the programs, the long
    rows, the edges of a group), and the columns of each result.
    """
    pointers: list[str] = []
    lines: list[str] = []
    many = _MANY_OF_SOFTMAX if 'softmax' in kinds else _MANY_PIECES
    texts = [(_RESULT_OF_TILE, _OF_MANY, 4)]
    which, pieces = f'count > {_FEW_PIECES}', many
    if form.of_groups:
        which = f'count {">" if form.of_many else "<="} {_FEW_GROUPS}'
        pieces = many if form.of_many else _GROUPS_AT_ONCE
    else:
        texts.insert(0, (_RESULT_OF_FEW, _OF_FEW, 8))
    for k, name in enumerate(kinds):
        kind = _KINDS[name]
        for text, names, indent in texts:
            text = text.replace('{then}', ('\n' + ' ' * indent).join(kind.lines))
            text = text.replace('{arguments}', kind.arguments).replace('{values}', kind.values)
            for name, other in zip(_OF_FEW, names, strict=True):
                text = text.replace(f' {name}{{k}}', f' {other}{{k}}')
                text = text.replace(f'({name}{{k}}', f'({other}{{k}}')
            lines += text.format(
                k=k, width=form.columns, wide=_WIDE, few=_FEW_PIECES, pieces=pieces, which=which,
                function=kind.function,
            ).split('\n')  # fmt: skip
        pointers += [f'part{k}', f'out{k}']
        pointers += [f'parg{k}', f'arg{k}'] if _STORE_SECOND in kind.lines else []
    sizes = [f'size{k}' for k in range(len(kinds))]
    schedule = ['long_row', 'long_ptr'] if form.of_groups else ['owner']
    numbers = ['num_rows', 'size']
    if not form.of_groups:
        numbers = ['num_blocks', *numbers, 'longest']
    numbers = ['num_programs', *numbers, *sizes]
    head = _HEAD.format(
        numbers=numbers, parameters=', '.join([*pointers, *schedule, 'rowptr', *numbers]),
        tiles=' + '.join(f'tl.cdiv({size}, {form.columns})' for size in sizes),
        rows=_ROWS_OF_GROUPS if form.of_groups else _ROWS_OF_BLOCKS,
    )  # fmt: skip
    body = '\n'.join(f'        {line}' for line in lines if line)
    functions = f'{_FUNCTIONS}{_VARIANCE}' if 'var' in kinds else _FUNCTIONS
    functions = f'{_OF_GROUPS if form.of_groups else OWNERS + _OF_BLOCKS}{functions}'
    return f'{ROUNDED_ADD}{functions}{head}{body}\n'


class CombineLaunch(NamedTuple):
    """A launch of `message_combine`."""

    form: Form
    programs: int  # of a tile
    tiles: int


def combine_launches(pieces: Pieces | Groups, sizes: Sequence[int]) -> list[CombineLaunch]:
    """The launches that combine pieces of results of these sizes."""
    if isinstance(pieces, Groups):
        count = pieces.long_row.size(0)
        programs = {FORM_OF_FEW_GROUPS: min(count, _MAX_OF_FEW)}
        if pieces.most_groups > _FEW_GROUPS:
            programs[FORM_OF_MANY_GROUPS] = min(count, _MAX_COMBINING)
    else:
        programs = {FORM_OF_BLOCKS: min(pieces.num_blocks, _MAX_COMBINING)}
    return [
        CombineLaunch(form, count, sum(-(-size // form.columns) for size in sizes))
        for form, count in programs.items()
    ]
