"""Values in generated code: the text of operations, and where a value lies."""

from typing import NamedTuple

POWERS = {
    0.5: 'sqrt', -0.5: 'rsqrt', -1.0: 'reciprocal', 1.0: 'same', 2.0: 'square', 3.0: 'cube',
}  # fmt: skip
CALLS = {
    'same': '{}', 'square': '{0} * {0}', 'cube': '{0} * {0} * {0}',
    'neg': '-{}', 'abs': 'tl.abs({})', 'exp': 'tl.exp({})', 'exp2': 'tl.exp2({})',
    'log': 'tl.log({})', 'log2': 'tl.log2({})', 'sqrt': 'tl.sqrt({})', 'rsqrt': 'tl.rsqrt({})',
    'reciprocal': '1.0 / {}', 'sin': 'tl.sin({})', 'cos': 'tl.cos({})', 'floor': 'tl.floor({})',
    'ceil': 'tl.ceil({})', 'erf': 'tl.erf({})', 'logical_not': '{} == 0',
    'relu': 'tl.where({0} <= 0, 0.0, {0})', 'sigmoid': '1.0 / (1.0 + tl.exp(-{}))',
    'sign': 'tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))',
    'expm1': 'libdevice.expm1({})', 'log1p': 'libdevice.log1p({})', 'log10': 'libdevice.log10({})',
    'tanh': 'libdevice.tanh({})', 'asin': 'libdevice.asin({})', 'acos': 'libdevice.acos({})',
    'atan': 'libdevice.atan({})', 'atan2': 'libdevice.atan2({}, {})',
    'add': '{} + {}', 'sub': '{} - {}', 'mul': '{} * {}', 'div': '{} / {}',
    'pow': 'libdevice.pow({}, {})',
    'maximum': 'tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
    'minimum': 'tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
    'lt': '{} < {}', 'le': '{} <= {}', 'gt': '{} > {}', 'ge': '{} >= {}', 'eq': '{} == {}',
    'ne': '{} != {}', 'logical_and': '({} != 0) & ({} != 0)',
    'logical_or': '({} != 0) | ({} != 0)', 'where': 'tl.where({}, {}, {})',
}  # fmt: skip
COMBINE = {
    'sum': '{} + {}',
    'amax': 'tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
    'amin': 'tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)',
}


WARP = 32  # threads

# How sums between threads add. An fma would fuse a product into the addition in the thread that has
# it, and not in others: threads would have different sums.
ROUNDED_ADD = """@triton.jit
def added(a, b):
    return libdevice.add_rn(a, b)


"""


# The exponentials of a softmax, which are 0 where they would be below the normal numbers: that
# saves scaling.
EXP_OF_MINUS = """@triton.jit
def exp_of_minus(x):
    if x.dtype == tl.float64:
        power = tl.exp(-x)
    else:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32,
            is_pure=True, pack=1,
        )
    return power


"""


# Numbers in float32, those of bfloat16 two at once.
WIDENED = """@triton.jit
def widened(x):
    if x.dtype == tl.bfloat16 and x.numel > 1:
        wide = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], dtype=tl.float32,
            is_pure=True, pack=2,
        )
    else:
        wide = x.to(tl.float32)
    return wide


"""


# Stops the kernel where a row is not one of the table.
ROW_OF_TABLE = '''@triton.jit
def row_of_table(row, num_rows: tl.constexpr, wraps: tl.constexpr):
    row = row.to(tl.int64)
    if wraps:
        row = tl.where(row < 0, row + num_rows, row)
    return tl.inline_asm_elementwise(
        """{
            .reg .pred outside;
            setp.ge.u64 outside, $1, $2;
            @outside trap;
            mov.u64 $0, $1;
        }""",
        "=l,l,l", [row, tl.full([1], num_rows, tl.int64)], dtype=tl.int64, is_pure=False, pack=1,
    )


'''


def sum_text(value: str, axis: int, keep_dims: bool = True) -> str:
    """The code of a sum of a block over an axis."""
    return f'tl.reduce({value}, {axis}, added, keep_dims={keep_dims})'


class Index(NamedTuple):
    """An affine index: a sum of axes with factors, and a constant."""

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


# Loop levels at which a value is computed: once per program, row, or block of edges.
PROGRAM, ROW, EDGES = range(3)


class Block(NamedTuple):
    """A value in the generated code: its name, the axes along which it varies, its loop level."""

    name: str
    axes: frozenset[str]
    level: int


class Raw(NamedTuple):
    """An input of the edges or a parameter, read at an index."""

    role: str
    pointer: str
    flat: Index
    axes: frozenset[str]
    by_edge: bool
    step: str  # the stride of rows


def next_power_of_two(n: int) -> int:
    """The size of the block that holds `n` numbers."""
    return 1 << (n - 1).bit_length()
