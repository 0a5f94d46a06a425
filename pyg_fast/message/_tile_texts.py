"""Triton code of passes over tiles that does not depend on the message: the functions that kernels
call, and the kernels that run before and after them."""

import math
from functools import lru_cache

from ._values import ROUNDED_ADD, next_power_of_two, sum_text

# Edges of a tile, and the tiles of a program that plans them.
EDGES, PLANNED = 64, 4


def all_of(*masks: str) -> str:
    """The code of all masks that are not empty."""
    return ' & '.join(filter(None, masks))


def load_text(place: str, mask: str) -> str:
    return f'tl.load({place}, {mask}, 0)' if mask else f'tl.load({place})'


def store_text(pointer: str, place: str, value: str, mask: str) -> str:
    value = f'({value}).to({pointer}.dtype.element_ty)'
    return f'tl.store({pointer} + {place}, {value}{", " * bool(mask)}{mask})'


# Two numbers, rounded by an instruction that does not share a pipe with exponentials; a block as a
# sum of three of bfloat16, of which a lesser part of what is not finite is 0; and the product of
# sums of two parts, without that of both lesser ones.
SPLITS = """@triton.jit
def to_bfloat16(x):
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def thirds(x):
    a = to_bfloat16(x)
    rest = x - a.to(tl.float32)
    rest = tl.where(rest == rest, rest, 0.0)
    b = to_bfloat16(rest)
    return a, b, to_bfloat16(rest - b.to(tl.float32))


@triton.jit
def product_of_parts(a0, a1, b0, b1):
    low = tl.dot(a1, b0)
    low = tl.dot(a0, b1, low)
    return tl.dot(a0, b0, tl.where(low == low, low, 0.0))
"""

# What the kernels call.
#
# A product of float32 is one of numbers of float16 with as many digits as TF32, or, with the error
# of float32, three products of two such parts of each number. Float16 has a small range: powers of
# two (`scales`), one for each row of a tile and one for a parameter, make the largest number of a
# row one from 2^13 to 2^14, and their inverses undo that in the result. With what is not finite
# among them the largest number counts as one from 1 to 2: others stay what they are, where they are
# of a usual size. The lesser part of what is not finite is NaN, and products leave out lesser sums
# that are NaN. A sum over edges has one power for all of them: `shares` are those of edges relative
# to the largest, as two factors, one for each value, since one alone would often be less than
# float16 has.
#
# Products `apart` have no sums in one accumulator, which Triton takes for products of products. The
# key of a number has its row, then its place in the tile.
FUNCTIONS = f'''{SPLITS}

@triton.jit
def powers_of(most):
    exponent = most.to(tl.int32, bitcast=True) >> 23
    exponent = tl.where(exponent == 255, 127, exponent)
    # Of a smaller exponent the power would not be finite.
    exponent = tl.maximum(exponent, 14)
    up = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return up, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scales(x):
    return powers_of(tl.max(tl.abs(x), axis=1, keep_dims=True))


@triton.jit
def scale_of_all(x):
    most = tl.max(tl.abs(x), axis=1, keep_dims=True)
    return powers_of(tl.max(most, axis=0, keep_dims=True))


@triton.jit
def to_float16(x):
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.float16, is_pure=True, pack=2
    )


@triton.jit
def two_parts(x):
    a = to_float16(x)
    return a, to_float16(x - a.to(tl.float32))


@triton.jit
def joint(a, b):
    return tl.minimum(a * b, {2.0**127})  # Infinity would make NaN of 0.


@triton.jit
def power(exponent):
    return (exponent << 23).to(tl.float32, bitcast=True).to(tl.float16)


@triton.jit
def shares(a, b):
    powers = tl.minimum(a * b, {2.0**126})
    most = tl.maximum(tl.max(powers, axis=0, keep_dims=True), {2.0**-126})
    inverse = ({254 << 23} - most.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    exponents = ((powers * inverse).to(tl.int32, bitcast=True) >> 23) + 127
    first = exponents >> 1
    return power(first), power(exponents - first), most


@triton.jit
def sigmoid(x):
    return tl.inline_asm_elementwise(
        """{{
            .reg .f32 y;
            mul.f32 y, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 y, y;
            add.f32 y, y, 0f3F800000;
            rcp.approx.ftz.f32 $0, y;
        }}""",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )


@triton.jit
def log1p_exp(x):
    # A polynomial that is log1p(y) / y for y from 0 to 1, within an error of 2e-7.
    y = tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [tl.abs(x) * {-1 / math.log(2)}],
        dtype=tl.float32, is_pure=True, pack=1,
    )
    p = y * 0.005253458 - 0.029588507
    p = p * y + 0.07836167
    p = p * y - 0.1367477
    p = p * y + 0.1911143
    p = p * y - 0.2484437
    p = p * y + 0.3331927
    p = p * y - 0.499995
    p = p * y + 1.0
    return tl.maximum(x, 0.0) + y * p


@triton.jit
def product_of_parts_apart(a0, a1, b0, b1):
    low = added(tl.dot(a1, b0), tl.dot(a0, b1))
    return added(tl.dot(a0, b0), tl.where(low == low, low, 0.0))


@triton.jit
def larger_of_row(v0, k0, v1, k1):
    keep = ((k0 ^ k1) < {EDGES}) & ((v0 >= v1) | (v0 != v0))
    return tl.where(keep, v0, v1), tl.where(keep, k0, k1)


@triton.jit
def smaller_of_row(v0, k0, v1, k1):
    keep = ((k0 ^ k1) < {EDGES}) & ((v0 <= v1) | (v0 != v0))
    return tl.where(keep, v0, v1), tl.where(keep, k0, k1)


'''


# The kernel that says for each edge the how-manieth row of its tile it is in (`rank`), and for each
# row of a tile where its result goes (`place`): to that row, or, counted behind all rows, to one of
# two parts of the tile, as the row has edges in the tile before (the first part) or behind.
PLAN = f"""@triton.jit(do_not_specialize=['num_edges', 'num_rows'])
def plan_tiles(row_of, rank_of, place_of, num_edges, num_rows):
    t = tl.program_id(0) * {PLANNED} + tl.arange(0, {PLANNED})[:, None]
    i = tl.arange(0, {EDGES})[None, :]
    e = t * {EDGES} + i
    inside = e < num_edges
    is_tile = t * {EDGES} < num_edges
    row = tl.load(row_of + e, inside, num_rows)
    above = tl.load(row_of + (e - 1), inside & (e > 0), -1)
    below = tl.load(row_of + (e + 1), e + 1 < num_edges, -1)
    starts = (row != above) | (i == 0)
    rank = tl.cumsum(starts.to(tl.int32), 1) - 1
    tl.store(rank_of + e, rank, inside)
    before = tl.load(row_of + (t * {EDGES} - 1), is_tile & (t > 0), -1)
    is_head = row == before
    is_tail = (row == below) & (i == {EDGES - 1})
    place = tl.where(row < num_rows, row, -1)
    place = tl.where(is_tail & (row < num_rows), num_rows + 2 * t + 1, place)
    place = tl.where(is_head & (row < num_rows), num_rows + 2 * t, place)
    tl.store(place_of + e, -1 + i * 0 + t * 0, is_tile)
    tl.debug_barrier()
    ends = (row != below) | (i == {EDGES - 1})
    tl.store(place_of + (t * {EDGES} + rank), place, ends & inside)
"""


@lru_cache
def combine_text(kind: str, size: int) -> str:
    """The kernel that combines the parts of rows that several tiles have, of one result: a program
    takes the row that begins in its tile and goes on behind that."""
    width, several = next_power_of_two(size), 16
    has_places = kind in ('max', 'min')
    second = ', arg, parg' if has_places else ''
    mask = f'(c < {size})' if width > size else '(c >= 0)'
    lines = [
        f'last = ((tl.load(rowptr + row + 1) - 1) // {EDGES}).to(tl.int32)',
        f'c = tl.arange(0, {width})[None, :]',
        f'u = tl.arange(0, {several})[:, None]',
        f'start = tl.cast(2 * t + 1, OFFSET) * {size} + c + u * 0',
        f'v = tl.load(part + start, (u == 0) & {mask}, {_START[kind]})',
    ]
    loop = [
        f'for first in range(t + 1, last + 1, {several}):',
        f'    place = tl.cast(2 * (first + u), OFFSET) * {size} + c',
        f'    m = (first + u <= last) & {mask}',
    ]
    if has_places:
        better = '>' if kind == 'max' else '<'
        lines += [
            f'a = tl.load(parg + start, (u == 0) & {mask}, -1)',
            *loop,
            f'    w = tl.load(part + place, m, {_START[kind]})',
            '    b = tl.load(parg + place, m, -1)',
            f'    take = m & ((w {better} v) | (a < 0) | ((w != w) & (v == v)))',
            '    v = tl.where(take, w, v)',
            '    a = tl.where(take, b, a)',
            'is_nan = tl.sum((v != v).to(tl.int32), axis=0, keep_dims=True) > 0',
            f'best = tl.{kind}(tl.where(v == v, v, {_START[kind]}), axis=0, keep_dims=True)',
            'chosen = (a >= 0) & ((v != v) | ((v == best) & (is_nan == 0)))',
            'a = tl.min(tl.where(chosen, a, 2147483647), axis=0, keep_dims=True)',
            "v = tl.where(is_nan, float('nan'), best)",
        ]
    else:
        lines += [*loop, '    v += tl.load(part + place, m, 0)', f'v = {sum_text("v", 0)}']
    lines += [f'to = tl.cast(row, OFFSET) * {size} + c', store_text('out', 'to', 'v', mask)]
    if has_places:
        lines.append(store_text('arg', 'to', 'a', mask))
    numbers = ['num_edges', 'num_rows']
    return '\n'.join([
        ROUNDED_ADD.rstrip(), '', '', f'@triton.jit(do_not_specialize={numbers})',
        f'def combine_tiles(rowptr, row_of, out, part{second}, num_edges, num_rows, '
        'OFFSET: tl.constexpr):', '    t = tl.program_id(0)',
        f'    if (t + 1) * {EDGES} < num_edges:',
        f'        row = tl.load(row_of + ((t + 1) * {EDGES} - 1))',
        '        begin = tl.load(rowptr + tl.minimum(row, num_rows - 1))',
        f'        goes_on = tl.load(row_of + (t + 1) * {EDGES}) == row',
        f'        if (row < num_rows) & goes_on & (begin >= t * {EDGES}):',
        *('            ' + line for line in lines), '',
    ])  # fmt: skip


_START = {'sum': '0', 'mean': '0', 'max': "float('-inf')", 'min': "float('inf')"}
