"""Triton kernels that combine the groups of long rows."""

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
