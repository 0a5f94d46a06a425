"""Long rows in pieces, which programs of their own add up, and the kernel that combines them.

Edges are divided into blocks of equal size, and a row is long if it has more edges than a block.
Its pieces are its edges in each block. So a block has at most two pieces: of the row that begins
before it, and of one that begins in it. The kernel of rows leaves long ones to that of pieces: it
writes the row's number to a slot for each piece. Slots without a piece are not cleared: who reads a
slot checks that its row has a piece there, which is true of no other number.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ._generator import ADDED

_MOST_BLOCKS, _LEAST_SIZE = 2**14, 128
# So many edges are not divided: one program adds them in less time than two launches take.
_FEW = 2**13
# Programs that add pieces, and those that combine them: each takes blocks at equal distances.
_MOST_PROGRAMS, _MOST_COMBINING = 2**12, 2**8
_LANES = 2 * _MOST_BLOCKS // _MOST_PROGRAMS
_COMBINING_LANES = _MOST_BLOCKS // _MOST_COMBINING
_COLUMNS, COMBINING_WARPS = 8, 8  # of a program that combines: it reads many pieces at once


class Pieces(NamedTuple):
    """How long rows are divided. Each block has two partial results, one for each piece."""

    size: int  # edges of a block, and the most of a row that is not long
    num_blocks: int
    num_programs: int


def pieces_of(
    num_edges: int, longest: int | None = None, least: int = _LEAST_SIZE, few: int = _FEW
) -> Pieces:
    """By the number of edges alone, which the host knows without waiting for the device, and by
    that of the `longest` row, if it knows that. No more than a certain number of blocks have at
    least `least` edges each; there are none if no row can be long."""
    size = max(least, -(-num_edges // _MOST_BLOCKS))
    longest = num_edges if longest is None else min(longest, num_edges)
    if longest <= size or num_edges <= few:
        return Pieces(num_edges, 0, 0)
    num_blocks = -(-num_edges // size)
    return Pieces(size, num_blocks, min(num_blocks, _MOST_PROGRAMS))


_LAST = '''@triton.jit
def last_of(rows, lane):
    return tl.max(tl.where(rows >= 0, lane, -1))


'''
# Functions that passes call. Slots are numbered 2b for the row that begins before block b, and
# 2b + 1 for the one that begins in it; `owner` has what the kernel of rows wrote.
OWNERS = f'''{_LAST}@triton.jit
def owner_of(owner, slot, rowptr, num_blocks, num_rows, size):
    block = slot // 2
    row = tl.load(owner + slot, block < num_blocks, -1).to(tl.int64)
    is_row = (row >= 0) & (row < num_rows)
    begin = tl.load(rowptr + row, is_row, 0)
    end = tl.load(rowptr + row + 1, is_row, 0)
    first = block * size
    begins = (begin >= first) & (begin < first + size)
    has_piece = tl.where(slot % 2 == 1, begins, (begin < first) & (end > first))
    return tl.where(is_row & (end - begin > size) & has_piece, row, -1)


'''
# The unit of work of a program: a row unless it is long, or the pieces in some blocks.
ROW = """\
row = item
begin = tl.load(rowptr + row)
end = tl.load(rowptr + row + 1)
is_short = end - begin <= size
if (end - begin > size) & (tile == 0):
    for start in range(begin // size, (end - 1) // size + 1, 128):
        block = start + tl.arange(0, 128)
        slot = 2 * block + (block == begin // size).to(block.dtype)
        tl.store(owner + slot, row, block <= (end - 1) // size)
end = tl.where(is_short, end, begin)"""
PIECES = f'''\
lane = tl.arange(0, {_LANES})
blocks = item + num_items * (lane // 2)
slots = 2 * blocks.to(tl.int64) + lane % 2
rows = owner_of(owner, slots, rowptr, num_blocks, num_rows, size)
parts = tl.sum((rows >= 0).to(tl.int32))'''
PART = '''\
which = last_of(rows, lane)
row = tl.max(tl.where(lane == which, rows, -1))
rows = tl.where(lane == which, -1, rows)
block = item + num_items * (which // 2)
slot = 2 * block + which % 2
first = block.to(tl.int64) * size
begin = tl.load(rowptr + row)
end = tl.load(rowptr + row + 1)
begin = tl.maximum(begin, first).to(begin.dtype)
end = tl.minimum(end, first + size).to(begin.dtype)'''

# Each thread reads partial results of every `R`-th piece, so that it adds up at most 128 one after
# another; those of threads are added as a tree.
_FUNCTIONS = f'''@triton.jit
def place_of(first, piece, size, f):
    return (2 * (first + piece) + (piece == 0)) * size + f


@triton.jit
def sum_of(part, first, count, size, f, m, R: tl.constexpr, ACC: tl.constexpr):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    total = tl.zeros([R, {_COLUMNS}], ACC)
    for start in range(0, count, R):
        at = piece + start
        total += tl.load(part + place_of(first, at, size, f), m & (at < count), 0)
    return tl.reduce(total, 0, added)


@triton.jit
def softmax_of(
    part, most, power, first, count, size, f, heads, head, m, R: tl.constexpr, ACC: tl.constexpr
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    highest = tl.full([R, {_COLUMNS}], float('-inf'), ACC)
    powers = tl.zeros([R, {_COLUMNS}], ACC)
    total = tl.zeros([R, {_COLUMNS}], ACC)
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
    part, place, first, count, size, f, m, SIGN: tl.constexpr, R: tl.constexpr, ACC: tl.constexpr
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    best = tl.full([R, {_COLUMNS}], float('-inf'), ACC)
    edge = tl.full([R, {_COLUMNS}], -1, tl.int64)
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


'''
_VARIANCE = f'''@triton.jit
def variance_of(
    part, mean, first, count, size, f, m, begin, end, block_size, R: tl.constexpr, ACC: tl.constexpr
):
    piece = tl.arange(0, R)[:, None].to(tl.int64)
    origin = tl.load(mean + place_of(first, 0, size, f), m, 0)
    total = tl.zeros([R, {_COLUMNS}], ACC)
    squares = tl.zeros([R, {_COLUMNS}], ACC)
    for start in range(0, count, R):
        at = piece + start
        inside = m & (at < count)
        number = tl.minimum((first + at + 1) * block_size, end)
        number = (number - tl.maximum((first + at) * block_size, begin)).to(ACC)
        place = place_of(first, at, size, f)
        away = tl.where(inside, tl.load(mean + place, inside, 0) - origin, 0.0)
        total += number * away
        squares += number * (tl.load(part + place, inside, 0) + away * away)
    away = tl.reduce(total, 0, added) / (end - begin).to(ACC)
    variance = tl.reduce(squares, 0, added) / (end - begin).to(ACC) - away * away
    return tl.where(variance < 0, 0.0, variance), origin + away


'''
_HEAD = """@triton.jit(do_not_specialize={numbers})
def message_combine({parameters}, ACC: tl.constexpr):
    tile, pid = tl.program_id(0) // num_programs, tl.program_id(0) % num_programs
    lane = tl.arange(0, {lanes})
    block = pid + num_programs * lane.to(tl.int64)
    rows = owner_of(owner, 2 * block + 1, rowptr, num_blocks, num_rows, size)
    for each in range(tl.sum((rows >= 0).to(tl.int32))):
        which = last_of(rows, lane)
        row = tl.max(tl.where(lane == which, rows, -1))
        rows = tl.where(lane == which, -1, rows)
        first = pid + num_programs * which.to(tl.int64)
        end = tl.load(rowptr + row + 1).to(tl.int64)
        begin = tl.load(rowptr + row).to(tl.int64)
        count = (end - 1) // size - first + 1
        tile0 = 0
"""
# One result: a program has some of its columns. Names differ by result: Triton would join those of
# branches.
_RESULT = """
tile{next} = tile{k} + tl.cdiv(size{k}, {width})
if (tile >= tile{k}) & (tile < tile{next}):
    f{k} = (tile - tile{k}) * {width} + tl.arange(0, {width})
    m{k} = f{k} < size{k}
    to{k} = row * size{k} + f{k}
    if count <= {few}:
        {values} = {function}({arguments}, {few}, ACC)
    else:
        {values} = {function}({arguments}, {many}, ACC)
"""
_OF_PIECES = 'first, count, size{k}, f{k}'
_STORE = 'tl.store(out{k} + to{k}, a{k}.to(out{k}.dtype.element_ty), m{k})'
_STORE_SECOND = 'tl.store(arg{k} + to{k}, b{k}, m{k})'


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
    # Of the softmax that is result 0, of which `size{k} // size0` numbers have the same.
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
# Pieces that a program reads at once, of a row of few and of many. Those of a softmax have more
# numbers, which would take all registers.
_FEW_PIECES, _MANY_PIECES, _MANY_OF_SOFTMAX = 16, 256, 128


@lru_cache(maxsize=256)
def combination(kinds: tuple[str, ...]) -> str:
    """The kernel `message_combine`, which writes the long rows of results of these kinds.

    Its pointers are, for each result, the partial ones and the whole, for a softmax and an extreme
    also the second ones; then what the kernel of rows wrote of long ones, and the row pointers. Its
    numbers are those of programs of a tile, of blocks and of rows, the edges of a block, and the
    columns of each result.
    """
    pointers: list[str] = []
    lines: list[str] = []
    many = _MANY_OF_SOFTMAX if 'softmax' in kinds else _MANY_PIECES
    for k, name in enumerate(kinds):
        kind = _KINDS[name]
        text = _RESULT + ''.join(f'    {line}\n' for line in kind.lines)
        text = text.replace('{arguments}', kind.arguments).replace('{values}', kind.values)
        lines += text.format(
            k=k, next=k + 1, width=_COLUMNS, few=_FEW_PIECES, many=many, function=kind.function
        ).split('\n')  # fmt: skip
        pointers += [f'part{k}', f'out{k}']
        pointers += [f'parg{k}', f'arg{k}'] if _STORE_SECOND in kind.lines else []
    sizes = [f'size{k}' for k in range(len(kinds))]
    numbers = ['num_programs', 'num_blocks', 'num_rows', 'size', *sizes]
    head = _HEAD.format(
        numbers=numbers, parameters=', '.join([*pointers, 'owner', 'rowptr', *numbers]),
        lanes=_COMBINING_LANES,
    )  # fmt: skip
    body = '\n'.join(f'        {line}' for line in lines if line)
    functions = f'{_FUNCTIONS}{_VARIANCE}' if 'var' in kinds else _FUNCTIONS
    return f'{ADDED}{OWNERS}{functions}{head}{body}\n'


def programs_of_combination(pieces: Pieces, sizes: Sequence[int]) -> tuple[int, int]:
    """The programs of a tile of columns, and all."""
    count = min(pieces.num_blocks, _MOST_COMBINING)
    return count, count * sum(-(-size // _COLUMNS) for size in sizes)
