"""Triton kernels that combine the groups of long rows."""

from functools import lru_cache
from typing import NamedTuple

# Columns of a program.
_BLOCK = 128

_HEAD = """@triton.jit
def message_reduce({pointers}, long_row, long_ptr, rowptr, ACC: tl.constexpr):
    block = tl.program_id(0) % {num_blocks}
    k = tl.program_id(0) // {num_blocks}
    row = tl.load(long_row + k).to(tl.int64)
    begin = tl.load(long_ptr + k).to(tl.int64)
    end = tl.load(long_ptr + k + 1).to(tl.int64)
"""
# The columns of a result. Names differ by result: Triton would join those of branches.
_COLUMNS = """
f{k} = (block - {first}) * {width} + tl.arange(0, {width})
m{k} = f{k} < {size}
to{k} = row * {size} + f{k}
total{k} = tl.zeros([{width}], ACC)
"""
_SUM = """
for s{k} in range(begin, end):
    total{k} += tl.load(part{k} + s{k} * {size} + f{k}, m{k}, 0)
"""
_STORE = """
tl.store(out{k} + to{k}, total{k}.to(out{k}.dtype.element_ty), m{k})
"""
_MEAN = """
count{k} = tl.load(rowptr + row + 1) - tl.load(rowptr + row)
total{k} = total{k} / count{k}.to(ACC)
"""
# The softmax of a long row's groups.
_SOFTMAX = """
most{k} = tl.full([{width}], float('-inf'), ACC)
for s{k} in range(begin, end):
    v{k} = tl.load(part{k} + s{k} * {size} + f{k}, m{k}, 0)
    t{k} = tl.load(parg{k} + s{k} * {size} + f{k}, m{k}, 1)
    n{k} = tl.maximum(most{k}, v{k})
    total{k} = total{k} * tl.where(most{k} == n{k}, 1.0, tl.exp(most{k} - n{k}))
    total{k} += t{k} * tl.where(v{k} == n{k}, 1.0, tl.exp(v{k} - n{k}))
    most{k} = n{k}
total{k} = tl.where(tl.abs(most{k}) == float('inf'), float('nan'), total{k})
tl.store(out{k} + to{k}, most{k}, m{k})
tl.store(arg{k} + to{k}, 1.0 / total{k}, m{k})
"""
# The sum of multiples of the softmax that is result 0, of which each group has its own largest
# score; `channels` numbers have the same.
_WEIGHTED = """
most{k} = tl.full([{width}], float('-inf'), ACC)
power{k} = tl.zeros([{width}], ACC)
for s{k} in range(begin, end):
    h{k} = s{k} * {heads} + f{k} // {channels}
    v{k} = tl.load(part0 + h{k}, m{k}, 0)
    n{k} = tl.maximum(most{k}, v{k})
    a{k} = tl.where(most{k} == n{k}, 1.0, tl.exp(most{k} - n{k}))
    b{k} = tl.where(v{k} == n{k}, 1.0, tl.exp(v{k} - n{k}))
    power{k} = power{k} * a{k} + tl.load(parg0 + h{k}, m{k}, 1) * b{k}
    total{k} = total{k} * a{k} + tl.load(part{k} + s{k} * {size} + f{k}, m{k}, 0) * b{k}
    most{k} = n{k}
power{k} = tl.where(tl.abs(most{k}) == float('inf'), float('nan'), power{k})
total{k} = total{k} / power{k}
"""
# The first best of a long row's groups.
_EXTREME = """
best{k} = tl.load(part{k} + begin * {size} + f{k}, m{k}, 0)
place{k} = tl.load(parg{k} + begin * {size} + f{k}, m{k}, 0)
for s{k} in range(begin + 1, end):
    v{k} = tl.load(part{k} + s{k} * {size} + f{k}, m{k}, 0)
    p{k} = tl.load(parg{k} + s{k} * {size} + f{k}, m{k}, 0)
    better{k} = (v{k} {better} best{k}) | ((v{k} != v{k}) & (best{k} == best{k}))
    best{k} = tl.where(better{k}, v{k}, best{k})
    place{k} = tl.where(better{k}, p{k}, place{k})
tl.store(out{k} + to{k}, best{k}.to(out{k}.dtype.element_ty), m{k})
tl.store(arg{k} + to{k}, place{k}, m{k})
"""
_BODIES = {
    'sum': _SUM + _STORE, 'mean': _SUM + _MEAN + _STORE, 'softmax': _SOFTMAX,
    'weighted': _WEIGHTED + _STORE, 'max': _EXTREME, 'min': _EXTREME,
}  # fmt: skip


class Reduction(NamedTuple):
    """A kernel that combines the groups of long rows, for all results of a pass."""

    text: str
    num_blocks: int  # programs of a row


@lru_cache(maxsize=1024)
def reduction(results: tuple[tuple[str, int], ...]) -> Reduction:
    """The kernel for results of these kinds and numbers of columns. Its pointers are, for each
    result, the partial ones and the whole; for a softmax and an extreme also the second ones."""
    lines, pointers, first = [], [], 0
    for k, (kind, size) in enumerate(results):
        width = min(_BLOCK, 1 << (size - 1).bit_length())
        num_blocks = -(-size // width)
        heads = results[0][1]
        text = (_COLUMNS + _BODIES[kind]).format(
            k=k, size=size, width=width, first=first, heads=heads, channels=max(1, size // heads),
            better='>' if kind == 'max' else '<',
        )  # fmt: skip
        first += num_blocks
        lines.append(f'if block >= {first - num_blocks} and block < {first}:')
        lines += [f'    {line}' for line in text.split('\n') if line]
        pointers += [f'part{k}', f'out{k}']
        if 'parg' in text and kind != 'weighted':
            pointers += [f'parg{k}', f'arg{k}']
    head = _HEAD.format(pointers=', '.join(pointers), num_blocks=first)
    return Reduction(head + '\n'.join(f'    {line}' for line in lines) + '\n', first)
