"""The Triton source of the attention within graphs.

A program takes a tile of consecutive rows, which may belong to several graphs, and walks the rows
of these graphs block by block; pairs of rows of different graphs are masked. So neither the number
of graphs nor the largest one need be known: there are as many programs as tiles of all rows. Where
the graphs of a tile begin and end is searched in the sorted vector of their numbers.

Products of tiles would carry numbers that are not finite from one graph to another, as 0 times NaN:
where a result is NaN, the tile is computed again without them, and what they belong to gets NaN.
"""

from ..message._tile_texts import SPLITS

#: The constants of each kernel, in their order.
CONSTANTS = (
    'SCALE', 'H', 'C', 'STEP_Q', 'STEP_K', 'STEP_V', 'ROWS', 'BLOCK', 'WIDTH', 'STAGES',
    'PRECISION', 'HAS_BATCH', 'DROPS', 'ACC',
)  # fmt: skip
_DECLARED = ', '.join(f'{name}: tl.constexpr' for name in CONSTANTS)
_ALL = ', '.join(CONSTANTS)

# A product with the error of float32 is one of sums of three numbers of bfloat16, without the least
# parts; one of two such numbers has less error than TF32.
_FUNCTIONS = f"""{SPLITS}

@triton.jit
def product_of_3(a0, a1, a2, b0, b1, b2):
    low = tl.dot(a2, b0)
    low = tl.dot(a1, b1, low)
    low = tl.dot(a0, b2, low)
    low = tl.dot(a1, b0, low)
    low = tl.dot(a0, b1, low)
    return tl.dot(a0, b0, tl.where(low == low, low, 0.0))


@triton.jit
def times(a, b, PRECISION: tl.constexpr):
    if PRECISION == 'highest':
        a0, a1, a2 = thirds(a)
        b0, b1, b2 = thirds(b)
        return product_of_3(a0, a1, a2, b0, b1, b2)
    elif PRECISION == 'high':
        a0, a1, a2 = thirds(a)
        b0, b1, b2 = thirds(b)
        return product_of_parts(a0, a1, b0, b1)
    elif PRECISION == 'float64':
        return tl.dot(a, b, out_dtype=tl.float64)
    else:
        return tl.dot(a.to(b.dtype), b)


@triton.jit
def times_rows(a, b, same, PRECISION: tl.constexpr, IS_CAREFUL: tl.constexpr):
    if IS_CAREFUL:
        wrong = b.to(tl.float32) - b.to(tl.float32) != 0
        count = tl.dot(same.to(tl.bfloat16), wrong.to(tl.bfloat16))
        out = times(a, tl.where(wrong, 0.0, b).to(b.dtype), PRECISION)
        return tl.where(count > 0, float('nan'), out)
    else:
        return times(a, b, PRECISION)


@triton.jit
def has_nan(x):
    return tl.max(tl.max((x != x).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def count_below(batch, number, num_rows):
    low = 0
    size = num_rows
    while size > 0:
        step = tl.cdiv(size, 64)
        at = (tl.arange(0, 64) + 1) * step - 1
        found = tl.load(batch + (low + at), at < size, 0)
        count = tl.sum(((at < size) & (found < number)).to(tl.int32), axis=0)
        low += count * step
        size = tl.minimum(step - 1, size - count * step)
    return low


@triton.jit
def graphs_of(batch, first, rows, num_rows, BLOCK: tl.constexpr, HAS_BATCH: tl.constexpr):
    if HAS_BATCH:
        last = tl.minimum(first + BLOCK, num_rows) - 1
        start = count_below(batch, tl.load(batch + first), num_rows)
        stop = count_below(batch, tl.load(batch + last) + 1, num_rows)
        graph = tl.load(batch + rows, rows < num_rows, -1).to(tl.int32)
        return start, stop, graph
    else:
        return 0, num_rows, tl.where(rows < num_rows, 0, -1)


@triton.jit
def pairs(batch, graph, others, stop, HAS_BATCH: tl.constexpr):
    inside = others < stop
    if HAS_BATCH:
        other = tl.load(batch + others, inside, -2).to(tl.int32)
    else:
        other = tl.where(inside, 0, -2)
    return (graph[:, None] == other[None, :]) & inside[None, :]


@triton.jit
def read(x, rows, mask, c, STEP: tl.constexpr, C: tl.constexpr):
    place = rows.to(tl.int64)[:, None] * STEP + c[None, :]
    return tl.load(x + place, mask[:, None] & (c < C)[None, :], 0.0)


@triton.jit
def write(out, x, rows, mask, c, STEP: tl.constexpr, C: tl.constexpr):
    place = rows.to(tl.int64)[:, None] * STEP + c[None, :]
    tl.store(out + place, x.to(out.dtype.element_ty), mask[:, None] & (c < C)[None, :])


@triton.jit
def mixed(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def words_of_queries(seed, rows, head):
    both = tl.load(seed)
    low = both.to(tl.uint32)
    high = (both >> 32).to(tl.uint32)
    salt = mixed(low + head.to(tl.uint32) * 0x9E3779B9)
    return mixed(mixed(rows.to(tl.uint32) ^ salt) + high)


@triton.jit
def words_of_keys(rows):
    return mixed(rows.to(tl.uint32) + 0x5BD1E995)


@triton.jit
def dropped(x, queries, keys, threshold):
    factor = 2147483648.0 / ((2147483647 - threshold).to(x.dtype) + 1.0)
    word = (mixed(queries ^ keys) >> 1).to(tl.int32)
    return tl.where(word >= threshold, x * factor, 0.0)
"""

_START = """    head = tl.program_id(0) % H
    first = tl.program_id(0) // H * ROWS
    rows = first + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    inside = rows < num_rows
    start, stop, graph = graphs_of(batch, first, rows, num_rows, ROWS, HAS_BATCH)
    q += head * C
    k += head * C
    v += head * C
    at = rows.to(tl.int64) * H + head"""

_WALK = """    for first in tl.range(start, stop, BLOCK, num_stages=STAGES):
        others = first + tl.arange(0, BLOCK)
        inside = others < stop
        same = pairs(batch, graph, others, stop, HAS_BATCH)"""

FORWARD = f"""{_FUNCTIONS}

@triton.jit
def attend(
    queries, k, v, batch, graph, words, start, stop, c, threshold, {_DECLARED},
    IS_CAREFUL: tl.constexpr,
):
    most = tl.full([ROWS], float('-inf'), ACC)
    total = tl.zeros([ROWS], ACC)
    acc = tl.zeros([ROWS, WIDTH], ACC)
{_WALK}
        keys = read(k, others, inside, c, STEP_K, C)
        score = times(queries, tl.trans(keys), PRECISION) * SCALE
        score = tl.where(same, score, float('-inf'))
        larger = tl.maximum(most, tl.max(score, axis=1))
        base = tl.where(larger == float('-inf'), 0.0, larger)
        p = tl.exp2(score - base[:, None])
        shrinks = tl.exp2(most - base)
        total = total * shrinks + tl.sum(p, axis=1)
        most = larger
        if DROPS:
            p = dropped(p, words[:, None], words_of_keys(others)[None, :], threshold)
        values = read(v, others, inside, c, STEP_V, C)
        acc = acc * shrinks[:, None] + times_rows(p, values, same, PRECISION, IS_CAREFUL)
    return acc, most, total


@triton.jit(do_not_specialize=['num_rows', 'threshold'])
def segment_attention(
    q, k, v, batch, seed, out, lse, num_rows, threshold, {_DECLARED},
):
{_START}
    queries = read(q, rows, inside, c, STEP_Q, C)
    words = rows
    if DROPS:
        words = words_of_queries(seed, rows, head)
    acc, most, total = attend(
        queries, k, v, batch, graph, words, start, stop, c, threshold, {_ALL}, False,
    )
    if has_nan(acc):
        acc, most, total = attend(
            queries, k, v, batch, graph, words, start, stop, c, threshold, {_ALL}, True,
        )
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if HAS_BATCH:
        after = tl.load(batch + (rows + 1), rows + 1 < num_rows, 0).to(tl.int32)
        descends = (graph > after) & (rows + 1 < num_rows)
        acc = tl.where(tl.max(descends.to(tl.int32), axis=0) > 0, float('nan'), acc)
    write(out + head * C, acc, rows, inside, c, H * C, C)
    tl.store(lse + at, most + tl.log2(total), inside)
"""

OF_QUERIES = f"""{_FUNCTIONS}

@triton.jit
def differentiate(
    queries, grads, k, v, batch, graph, words, norm, mean, start, stop, c, threshold, {_DECLARED},
    IS_CAREFUL: tl.constexpr,
):
    acc = tl.zeros([ROWS, WIDTH], ACC)
{_WALK}
        keys = read(k, others, inside, c, STEP_K, C)
        values = read(v, others, inside, c, STEP_V, C)
        score = times(queries, tl.trans(keys), PRECISION) * SCALE
        grad = times(grads, tl.trans(values), PRECISION)
        if DROPS:
            grad = dropped(grad, words[:, None], words_of_keys(others)[None, :], threshold)
        grad = tl.where(same, tl.exp2(score - norm[:, None]) * (grad - mean[:, None]), 0.0)
        acc += times_rows(grad, keys, same, PRECISION, IS_CAREFUL)
    return acc


@triton.jit(do_not_specialize=['num_rows', 'threshold'])
def segment_attention_queries(
    q, k, v, batch, seed, out, lse, grad, delta, grad_q, num_rows, threshold, {_DECLARED},
):
{_START}
    queries = read(q, rows, inside, c, STEP_Q, C)
    grads = read(grad + head * C, rows, inside, c, H * C, C)
    results = read(out + head * C, rows, inside, c, H * C, C)
    mean = tl.sum(grads.to(ACC) * results.to(ACC), axis=1)
    tl.store(delta + at, mean, inside)
    norm = tl.load(lse + at, inside, 0.0)
    words = rows
    if DROPS:
        words = words_of_queries(seed, rows, head)
    acc = differentiate(
        queries, grads, k, v, batch, graph, words, norm, mean, start, stop, c, threshold, {_ALL},
        False,
    )
    if has_nan(acc):
        acc = differentiate(
            queries, grads, k, v, batch, graph, words, norm, mean, start, stop, c, threshold,
            {_ALL}, True,
        )
    write(grad_q + head * C, acc * (SCALE * 0.6931471805599453), rows, inside, c, H * C, C)
"""

OF_KEYS = f"""{_FUNCTIONS}

@triton.jit
def differentiate(
    keys, values, q, grad, lse, delta, batch, seed, graph, words, head, start, stop, c, threshold,
    {_DECLARED}, IS_CAREFUL: tl.constexpr,
):
    of_keys = tl.zeros([ROWS, WIDTH], ACC)
    of_values = tl.zeros([ROWS, WIDTH], ACC)
{_WALK}
        queries = read(q, others, inside, c, STEP_Q, C)
        grads = read(grad, others, inside, c, H * C, C)
        at = others.to(tl.int64) * H + head
        norm = tl.load(lse + at, inside, 0.0)
        mean = tl.load(delta + at, inside, 0.0)
        score = times(keys, tl.trans(queries), PRECISION) * SCALE
        p = tl.where(same, tl.exp2(score - norm[None, :]), 0.0)
        of_p = times(values, tl.trans(grads), PRECISION)
        kept = p
        if DROPS:
            word = words_of_queries(seed, others, head)[None, :]
            of_p = dropped(of_p, word, words[:, None], threshold)
            kept = dropped(p, word, words[:, None], threshold)
        of_values += times_rows(kept, grads, same, PRECISION, IS_CAREFUL)
        of_score = tl.where(same, p * (of_p - mean[None, :]), 0.0)
        of_keys += times_rows(of_score, queries, same, PRECISION, IS_CAREFUL)
    return of_keys, of_values


@triton.jit(do_not_specialize=['num_rows', 'threshold'])
def segment_attention_keys(
    q, k, v, batch, seed, lse, grad, delta, grad_k, grad_v, num_rows, threshold, {_DECLARED},
):
{_START}
    grad += head * C
    keys = read(k, rows, inside, c, STEP_K, C)
    values = read(v, rows, inside, c, STEP_V, C)
    words = words_of_keys(rows)
    of_keys, of_values = differentiate(
        keys, values, q, grad, lse, delta, batch, seed, graph, words, head, start, stop, c,
        threshold, {_ALL}, False,
    )
    if has_nan(of_keys) | has_nan(of_values):
        of_keys, of_values = differentiate(
            keys, values, q, grad, lse, delta, batch, seed, graph, words, head, start, stop, c,
            threshold, {_ALL}, True,
        )
    write(grad_k + head * C, of_keys * (SCALE * 0.6931471805599453), rows, inside, c, H * C, C)
    write(grad_v + head * C, of_values, rows, inside, c, H * C, C)
"""
