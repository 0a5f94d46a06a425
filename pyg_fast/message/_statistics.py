"""A Triton kernel of what a backward pass reads of a softmax for each destination."""

from functools import lru_cache

from ._ir import STATISTICS
from ._values import ADDED, total_of

# Numbers of a result that a program reads at once.
_BLOCK = 1024


@lru_cache(maxsize=64)
def statistics_kernel(count: int) -> str:
    """The kernel for messages with `count` results, each a multiple of the softmax: their products
    with their gradients, added up for each number of the softmax, and all statistics side by side.
    """
    names = ', '.join(f'grad{k}, result{k}' for k in range(count))
    sizes = ', '.join(f'S{k}: tl.constexpr, C{k}: tl.constexpr' for k in range(count))
    lines = [
        *ADDED.split('\n'),
        "@triton.jit(do_not_specialize=['num_items'])",
        f'def message_statistics(most, scale, {names}, dot, stats, num_items,',
        f'                       B: tl.constexpr, ACC: tl.constexpr, {sizes}):',
        '    i = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)',
        '    m = i < num_items',
        '    total = tl.zeros([B], ACC)',
    ]
    for k in range(count):
        lines += [
            f'    for start in range(0, S{k}, C{k}):',
            f'        c = start + tl.arange(0, C{k})',
            f'        at = i[:, None] * S{k} + c[None, :]',
            f'        inside = m[:, None] & (c < S{k})[None, :]',
            f'        g = tl.load(grad{k} + at, inside, 0).to(ACC)',
            f'        r = tl.load(result{k} + at, inside, 0).to(ACC)',
            f'        total += {total_of("g * r", 1, False)}',
        ]
    lines.append('    tl.store(dot + i, total, m)')
    values = ('tl.load(most + i, m)', 'tl.load(scale + i, m)', 'total')
    for k, value in enumerate(values):
        lines.append(f'    tl.store(stats + i * {len(STATISTICS)} + {k}, {value}, m)')
    return '\n'.join(lines) + '\n'


def statistics_blocks(sizes: list[int]) -> tuple[int, list[int]]:
    """Numbers of the softmax for a program, and the channels that it reads at once, for results of
    so many channels for each of these numbers."""
    columns = [min(_BLOCK, 1 << (size - 1).bit_length()) for size in sizes]
    return _BLOCK // max(columns), columns
