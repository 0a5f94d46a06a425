"""The Triton kernel of the statistics of a softmax, for results that are multiples of it."""

from functools import lru_cache

from ._ir import SOFTMAX_ROLES
from ._values import ROUNDED_ADD, sum_text

# Numbers of a result that a program reads at once.
_BLOCK = 1024


@lru_cache(maxsize=64)
def statistics_kernel(count: int) -> str:
    """The kernel for `count` results, all multiples of the softmax. It sums their products with
    their gradients for each number of the softmax, and stores the statistics side by side."""
    names = ', '.join(f'grad{k}, result{k}' for k in range(count))
    sizes = ', '.join(f'S{k}: tl.constexpr, C{k}: tl.constexpr' for k in range(count))
    lines = [
        *ROUNDED_ADD.split('\n'),
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
            f'        total += {sum_text("g * r", 1, False)}',
        ]
    lines.append('    tl.store(dot + i, total, m)')
    values = ('tl.load(most + i, m)', 'tl.load(scale + i, m)', 'total')
    for k, value in enumerate(values):
        lines.append(f'    tl.store(stats + i * {len(SOFTMAX_ROLES)} + {k}, {value}, m)')
    return '\n'.join(lines) + '\n'


def statistics_blocks(sizes: list[int]) -> tuple[int, list[int]]:
    """The block of softmax numbers of a program, and the channels that it reads at once of each
    result, for results with these numbers of channels per softmax number."""
    columns = [min(_BLOCK, 1 << (size - 1).bit_length()) for size in sizes]
    return _BLOCK // max(columns), columns
