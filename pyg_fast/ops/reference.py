"""The pure-torch float64 twin of every op, differentiable, for tests and benchmarks only."""

from collections.abc import Sequence
from math import gcd, log

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu, pad

from ._attention import keeps
from ._library import LOOP_CHUNK


def to_csr(
    edge_index: Tensor, num_src: int, num_dst: int, reverse: bool, index64: bool, drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (row, col), num_rows, num_cols = edge_index.flip(0), num_dst, num_src
    if reverse:
        row, col, num_rows, num_cols = col, row, num_cols, num_rows
    valid = (row >= 0) & (row < num_rows) & (col >= 0) & (col < num_cols)
    kept = valid & (row != col) if drop_loops else valid
    perm = kept.nonzero().view(-1)
    perm = perm[row[perm].argsort(stable=True)]
    rowptr = pad(torch.bincount(row[perm].long(), minlength=num_rows).cumsum(0), (1, 0))
    dtype = torch.int64 if index64 else torch.int32
    tail = (0, row.size(0) - perm.size(0))
    return (
        rowptr.to(dtype),
        pad(col[perm], tail).to(dtype),
        pad(perm, tail).to(dtype),
        (~valid).sum().view(1),
    )


def to_csr_csc(
    edge_index: Tensor, num_src: int, num_dst: int, index64: bool, drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, ...]:
    csr, csc = (
        to_csr(edge_index, num_src, num_dst, reverse, index64, drop_loops)
        for reverse in (False, True)
    )
    return *csr[:3], *csc


def rabbit_order(rowptr: Tensor, col: Tensor) -> Tensor:
    num_nodes = rowptr.size(0) - 1
    weight = col.new_zeros(num_nodes, num_nodes, dtype=torch.int64)
    row, source, _ = _edges(rowptr, col, None)
    weight.index_put_((row, source), torch.ones_like(row), accumulate=True)
    weight = (weight + weight.t()).fill_diagonal_(0)
    strength = weight.sum(1)
    total = strength.sum()
    members = [[node] for node in range(num_nodes)]
    scattered = (torch.arange(num_nodes) * -0x61C8864680B583EB).argsort()
    for node in scattered[strength[scattered].argsort(stable=True)].tolist():
        gain = weight[node] * total - strength[node] * strength
        gain[weight[node] == 0] = -1
        if gain.max() <= 0:
            continue
        best = int((gain == gain.max()).nonzero()[0])
        weight[best] += weight[node]
        weight[:, best] += weight[:, node]
        weight[node] = weight[:, node] = weight[best, best] = 0
        strength[best] += strength[node]
        members[best] += members[node]
        members[node] = []
    order = strength.argsort(descending=True, stable=True).tolist()
    return torch.tensor([m for node in order for m in members[node]], dtype=torch.int64)


def spmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    bias: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
    self_row: Tensor | None = None,
) -> Tensor:
    row, source, position = _edges(rowptr, col, perm)
    x = x.double()
    message = _message(x, value, source, position)
    if col_scale is not None:
        message = message * col_scale.double()[source, None]
    out = x.new_zeros(rowptr.size(0) - 1, x.size(1)).index_add(0, row, message)
    if mean:
        out = out / rowptr.diff().clamp(min=1).view(-1, 1)
    if row_scale is not None:
        out = out * row_scale.double().view(-1, 1)
    if diag is not None:
        own = x
        if self_row is not None:
            own = torch.cat([x, x.new_zeros(1, x.size(1))])[self_row.long()]
        out = out + diag.double().view(-1, 1) * own
    return out if bias is None else out + bias.double()


def spmm_groups(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    self_row: Tensor | None,
    group_ptr: Tensor,
    group_row: Tensor,
    long_row: Tensor,
    long_ptr: Tensor,
    long_shift: Tensor,
    num_partials: int,
    group_size: int,
    atomic: bool,
) -> Tensor:
    """By the graph that the groups describe, as kernels read them."""
    group = torch.arange(group_row.size(0), device=col.device)
    is_long = group_row < 0
    slot = group[is_long] - long_shift[(-1 - group_row[is_long]).long()]
    row_of_slot = long_row.repeat_interleave(long_ptr.diff().long(), output_size=num_partials)
    row = group_row.index_put((is_long,), row_of_slot[slot])
    degree = rowptr.new_zeros(rowptr.size(0) - 1).index_add(0, row, group_ptr.diff())
    rowptr = pad(degree.cumsum(0), (1, 0))
    return spmm(
        rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc, self_row
    )


def _mixed(h: int) -> int:
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    return h ^ h >> 31


def random_bits(seed: int, node: int, draw: int) -> int:
    """The `draw`-th 64 random bits of a node."""
    start = _mixed((seed + draw * 0xD1342543DE82EF95) % 2**64)
    return _mixed((start + node * 0x9E3779B97F4A7C15) % 2**64)


def drawn_edges(
    degree: int,
    fanout: int,
    weight: list[float] | None,
    running: list[float] | None,
    replace: bool,
    seed: int,
    node: int,
) -> list[int]:
    """Which of a node's edges are sampled, in order.

    `running`: where edges are put back, the sums of the weights of all edges up to each of these,
    and that before them.
    """
    bits = (random_bits(seed, node, k) for k in range(2**62))
    if fanout < 0 or degree == 0:
        return list(range(degree))
    if replace and running is not None:
        low, *sums = running
        last = max((e for e in range(degree) if sums[e] > (sums[e - 1] if e else low)), default=-1)
        units = (((next(bits) >> 11) + 1) * 2**-53 for _ in range(fanout if last >= 0 else 0))
        wanted = (max(low, sums[-1] - unit * (sums[-1] - low)) for unit in units)
        return [next((e for e in range(degree) if sums[e] > w), last) for w in wanted]
    if replace:
        return [next(bits) * degree >> 64 for _ in range(fanout)]
    if weight is not None:
        count = min(fanout, sum(w > 0 for w in weight))
        if count == degree:
            return list(range(degree))
        keys = [(-log(((b >> 11) + 1) * 2**-53), w) for w, b in zip(weight, bits, strict=False)]
        order = sorted((key / w, e) for e, (key, w) in enumerate(keys) if w > 0)
        return [e for _, e in order[:count]]
    if degree <= fanout:
        return list(range(degree))
    chosen: list[int] = []
    for last in range(degree - fanout, degree):
        drawn = next(bits) * (last + 1) >> 64
        chosen.append(last if drawn in chosen else drawn)
    return chosen


def neighbor_sample(
    rowptr: Tensor,
    col: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    edge_weight: Tensor | None = None,
    replace: bool = False,
    induced: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """n_id, edge_index, e_id, and the numbers of nodes and edges of each hop."""
    pointers, sources, n_id = rowptr.tolist(), col.tolist(), seeds.tolist()
    weights = None if edge_weight is None else edge_weight.double().tolist()
    sums = None if edge_weight is None else [0.0, *edge_weight.double().cumsum(0).tolist()]
    local: dict[int, int] = {}
    for k, node in enumerate(n_id):
        local.setdefault(node, k)
    edges: list[tuple[int, int, int]] = []
    nodes, counts, first = [len(n_id)], [], 0
    for fanout in fanouts:
        last, before = len(n_id), len(edges)
        for dst in range(first, last):
            begin, end = pointers[n_id[dst]], pointers[n_id[dst] + 1]
            weight = None if weights is None else weights[begin:end]
            running = None if sums is None else sums[begin : end + 1]
            drawn = drawn_edges(end - begin, fanout, weight, running, replace, seed, n_id[dst])
            edges += [(sources[begin + e], dst, begin + e) for e in drawn]
        for source, _, _ in edges[before:]:
            if source not in local:
                local[source] = len(n_id)
                n_id.append(source)
        first = last
        nodes.append(len(n_id) - last)
        counts.append(len(edges) - before)
    if induced:
        edges = [
            (sources[e], dst, e)
            for dst, node in enumerate(n_id)
            for e in range(pointers[node], pointers[node + 1])
            if sources[e] in local
        ]
    src, dst, e_id = torch.tensor(
        [(local[s], d, e) for s, d, e in edges], dtype=torch.long
    ).view(-1, 3).t()  # fmt: skip
    return torch.tensor(n_id, dtype=torch.long), torch.stack([src, dst]), e_id, nodes, counts


def relabel(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids in the order of their first occurrence, and the place of each."""
    place: dict[int, int] = {}
    local = [place.setdefault(i, len(place)) for i in ids.tolist()]
    return torch.tensor([*place], dtype=torch.long), torch.tensor(local, dtype=torch.long)


def sampled_positions(
    degree: int, num_samples: int, strategy: int, seed: int, row: int
) -> list[int]:
    """Which of the edges of a row are taken; strategies as :obj:`Strategy` in kernels.h."""
    if degree <= num_samples:
        return list(range(degree))
    offset, stride = 0, 1
    if strategy == 1:
        golden = degree * 0x9E3779B97F4A7C15 >> 64
        strides = (s for d in range(degree) for s in (golden + d, golden - d) if 0 < s < degree)
        stride = next(s for s in strides if gcd(s, degree) == 1)
    elif strategy == 2:
        bits = _mixed((_mixed(seed % 2**64) + row * 0x9E3779B97F4A7C15) % 2**64)
        offset = bits * degree >> 64
        stride = 1 + (_mixed(bits) * (degree - 1) >> 64)
        while gcd(stride, degree) > 1:
            stride = stride % (degree - 1) + 1
    elif strategy == 3:
        stride = 577
    return [(offset + k * stride) % degree for k in range(num_samples)]


def _sampled(
    rowptr: Tensor, num_samples: int, strategy: int, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row and position in `col` of each sampled edge."""
    number = 0 if seed is None else int(seed)
    pointers = rowptr.tolist()
    taken = [
        (row, begin + position)
        for row, (begin, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True))
        for position in sampled_positions(end - begin, num_samples, strategy, number, row)
    ]
    row, edge = torch.tensor(taken, dtype=torch.long).view(-1, 2).t().to(rowptr.device)
    return row, edge


def sampled_spmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> Tensor:
    row, edge = _sampled(rowptr, num_samples, strategy, seed)
    sampled_rowptr = pad(torch.bincount(row, minlength=rowptr.size(0) - 1).cumsum(0), (1, 0))
    perm = edge if perm is None else perm[edge]
    if strategy == 2 and not mean:
        weight = (rowptr.diff().double() / num_samples).clamp(min=1)
        row_scale = weight if row_scale is None else weight * row_scale
    return spmm(
        sampled_rowptr, col[edge], perm, value, x, row_scale, col_scale, diag, bias, mean
    )


def sample_edges(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    sampled_rowptr: Tensor,
    num_slots: int,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    row, edge = _sampled(rowptr, num_samples, strategy, seed)
    tail = (0, num_slots - row.size(0))
    return (
        torch.stack([pad(col[edge], tail), pad(row, tail, value=-1).to(col.dtype)]),
        pad(edge.to(col.dtype) if perm is None else perm[edge], tail),
    )


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    largest = x.abs().amax(1) if x.size(1) > 0 else x.new_zeros(x.size(0))
    inverse = (127 / largest).nan_to_num(nan=0, posinf=0)
    rounded = torch.where(inverse.view(-1, 1) > 0, x * inverse.view(-1, 1), 0).round()
    return rounded.to(torch.int8), largest / 127


def spmm_max(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, value: Tensor | None, x: Tensor, minimum: bool
) -> tuple[Tensor, Tensor]:
    row, source, position = _edges(rowptr, col, perm)
    message = _message(x.double(), value, source, position)
    size = rowptr.size(0) - 1, x.size(1)
    rows = row.view(-1, 1).expand_as(message)
    best = message.new_full(size, float('inf') if minimum else -float('inf'))
    best = best.scatter_reduce(0, rows, message.detach(), 'amin' if minimum else 'amax')[row]
    reached = (message == best) | (message.isnan() & best.isnan())
    edge = torch.arange(row.size(0), device=row.device).view(-1, 1)
    none = row.size(0)
    first = torch.where(reached, edge, none)
    arg = first.new_full(size, none).scatter_reduce(0, rows, first, 'amin')
    out = torch.cat([message, message.new_zeros(1, size[1])]).gather(0, arg)
    return out, arg.masked_fill(arg == none, -1).to(col.dtype)


def spmm_max_backward_x(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    num_cols: int,
) -> Tensor:
    i, f, source, position = _reached(col, perm, arg)
    message = grad.double()[i, f] * (1 if value is None else value.double()[position])
    out = message.new_zeros(num_cols, grad.size(1))
    return out.index_put((source, f), message, accumulate=True)


def spmm_max_backward_x_ordered(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    t_rowptr: Tensor,
    t_col: Tensor,
    t_position: Tensor | None,
) -> Tensor:
    return spmm_max_backward_x(rowptr, col, perm, value, arg, grad, t_rowptr.size(0) - 1)


def spmm_max_backward_value(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    x: Tensor,
    num_values: int,
) -> Tensor:
    i, f, source, position = _reached(col, perm, arg)
    message = grad.double()[i, f] * x.double()[source, f]
    return message.new_zeros(num_values).index_add(0, position, message)


def sddmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    mean: bool,
    num_values: int,
) -> Tensor:
    row, source, position = _edges(rowptr, col, perm)
    dot = (a.double()[row] * b.double()[source]).sum(1)
    if mean:
        dot = dot / rowptr.diff()[row]
    if row_scale is not None:
        dot = dot * row_scale.double()[row]
    if col_scale is not None:
        dot = dot * col_scale.double()[source]
    return dot.new_zeros(num_values).index_add(0, position, dot)


def scatter(
    edge_index: Tensor,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    num_dst: int = 0,
    reverse: bool = False,
    drop_loops: bool = False,
    count: bool = False,
    report: bool = False,
) -> tuple[Tensor, Tensor]:
    src, dst = edge_index.long().flip(0) if reverse else edge_index.long()
    x = x.double()
    valid = (src >= 0) & (src < x.size(0)) & (dst >= 0) & (dst < num_dst)
    used = (valid & (src != dst) if drop_loops else valid).nonzero().view(-1)
    message = _message(x, value, src[used], used)
    if col_scale is not None:
        message = message * col_scale.double()[src[used], None]
    out = x.new_zeros(num_dst, x.size(1)).index_add(0, dst[used], message)
    if row_scale is not None:
        out = out * row_scale.double().view(-1, 1)
    if diag is not None:
        out = out + diag.double().view(-1, 1) * x
    return out, (~valid).sum().view(1)[: int(count)]


def edge_dot(
    edge_index: Tensor,
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    drop_loops: bool,
) -> Tensor:
    src, dst = edge_index.long()
    valid = (src >= 0) & (src < b.size(0)) & (dst >= 0) & (dst < a.size(0))
    used = (valid & (src != dst) if drop_loops else valid).nonzero().view(-1)
    dot = (a.double()[dst[used]] * b.double()[src[used]]).sum(1)
    if row_scale is not None:
        dot = dot * row_scale.double()[dst[used]]
    if col_scale is not None:
        dot = dot * col_scale.double()[src[used]]
    return dot.new_zeros(edge_index.size(1)).index_add(0, used, dot)


def gcn_degree(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    drop_loops: bool,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    src, dst = edge_index.long().flip(0) if reverse else edge_index.long()
    valid = (src >= 0) & (src < num_nodes) & (dst >= 0) & (dst < num_nodes)
    loop = valid & (src == dst)
    used = (valid & ~loop if drop_loops else valid).nonzero().view(-1)
    if edge_weight is None:
        degree = torch.bincount(dst[used], minlength=num_nodes).int()
    else:
        degree = edge_weight.new_zeros(num_nodes, dtype=torch.float64)
        degree = degree.index_add(0, dst[used], edge_weight.double()[used])
    loops = loop.nonzero().view(-1)
    last = src.new_zeros(0 if edge_weight is None or not drop_loops else num_nodes)
    if last.size(0) > 0:
        last = last.scatter_reduce(0, dst[loops], loops + 1, 'amax')
    chunks = pad(loop.long(), (0, -loop.size(0) % LOOP_CHUNK)).view(-1, LOOP_CHUNK)
    chunk_loops = chunks.sum(1)[: None if drop_loops else 0]
    return degree, last, torch.stack([(~valid).sum(), loop.sum()]), chunk_loops


def gcn_weight(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    degree: Tensor,
    last: Tensor | None,
    before: Tensor | None,
    num_kept: int,
    loops: bool,
    fill_value: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    num_nodes = degree.size(0)
    loop = degree.new_full((num_nodes,), fill_value if loops else 0, dtype=torch.float64)
    if last is not None and edge_weight is not None and edge_weight.size(0) > 0:
        loop = torch.where(last > 0, edge_weight.double()[(last - 1).clamp(min=0)], loop)
    degree = degree.double() + loop
    scale = torch.where(degree == 0, 0, torch.where(degree == 0, 1, degree).rsqrt())
    if before is not None:
        kept = (edge_index[0] != edge_index[1]).nonzero().view(-1)
        edge_index = edge_index[:, kept]
        edge_weight = None if edge_weight is None else edge_weight[kept]
    edge_index = edge_index[:, :num_kept]
    edge_weight = None if edge_weight is None else edge_weight[:num_kept]
    src, dst = edge_index.long()
    used = ((src >= 0) & (src < num_nodes) & (dst >= 0) & (dst < num_nodes)).nonzero().view(-1)
    weight = scale[src[used]] * scale[dst[used]]
    if edge_weight is not None:
        weight = weight * edge_weight.double()[used]
    weight = weight.new_zeros(src.size(0)).index_add(0, used, weight)
    if not loops:
        return edge_index[:, :0], weight, scale
    node = torch.arange(num_nodes, device=edge_index.device).to(edge_index.dtype).expand(2, -1)
    return (
        torch.cat([edge_index, node], 1), torch.cat([weight, scale * loop * scale]), scale
    )  # fmt: skip


def gcn_weight_backward(
    edge_index: Tensor,
    grad: Tensor,
    scale: Tensor,
    grad_degree: Tensor,
    before: Tensor | None,
    reverse: bool,
) -> Tensor:
    src, dst = edge_index.long()
    num_nodes = scale.size(0)
    place = torch.arange(src.size(0), device=src.device)
    if before is not None:
        kept = src != dst
        place = torch.where(kept, kept.cumsum(0) - 1, grad.size(0) - num_nodes + dst)
    scale, grad_degree = scale.double(), grad_degree.double()
    return grad.double()[place] * scale[src] * scale[dst] + grad_degree[src if reverse else dst]


def gcn_scale(
    rowptr: Tensor,
    perm: Tensor | None,
    value: Tensor,
    last_loop: Tensor | None,
    fill_value: float,
    loops: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, value = rowptr.size(0) - 1, value.double()
    edge = torch.arange(int(rowptr[-1]), device=rowptr.device)
    row = torch.repeat_interleave(rowptr.diff().long())
    degree = value.new_zeros(num_rows)
    degree = degree.index_add(0, row, value[edge if perm is None else perm[edge].long()])
    if not loops:
        scale = degree.pow(-0.5)
        return scale.masked_fill(scale == float('inf'), 0), degree[:0]
    loop = torch.full_like(degree, fill_value)
    if last_loop is not None:
        found = (last_loop >= 0).nonzero().view(-1)
        loop = loop.index_put((found,), value[last_loop[found]])
    scale = (degree + loop).pow(-0.5)
    scale = scale.masked_fill(scale == float('inf'), 0)
    return scale, scale * loop * scale


def maxk(x: Tensor, k: int, balanced: bool) -> tuple[Tensor, Tensor]:
    """Entries in ascending order of columns; the kernels choose an order of their own."""
    x = x.double()
    # One zero and one NaN: a sort on CUDA would tell those of either sign apart.
    alike = torch.where(x.isnan(), float('nan'), x + 0.0)
    # A stable sort in descending order takes NaN first, and the lowest column among equals.
    order = alike.sort(dim=1, descending=True, stable=True)[1]
    if balanced:
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(x.size(1), device=x.device).expand_as(order)
        )
        groups = pad(rank, (0, -x.size(1) % k), value=x.size(1)).unflatten(1, (-1, k))
        columns = groups.argmin(1) * k + torch.arange(k, device=x.device)
    else:
        columns = order[:, :k]
    columns = columns.sort(1)[0]
    dtype = torch.uint8 if x.size(1) <= 256 else torch.uint16 if x.size(1) <= 65536 else torch.int32
    return x.gather(1, columns), columns.to(dtype)


def cbsr_to_dense(values: Tensor, columns: Tensor, dim: int) -> Tensor:
    values = values.double()
    return values.new_zeros(values.size(0), dim).scatter(1, columns.long(), values)


def cbsr_sample(dense: Tensor, columns: Tensor) -> Tensor:
    return dense.double().gather(1, columns.long())


def cbsr_spmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    values: Tensor,
    columns: Tensor,
    dim: int,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    bias: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
) -> Tensor:
    x = cbsr_to_dense(values, columns, dim)
    return spmm(rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean)


def cbsr_spmm_backward(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    grad: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    mean: bool,
) -> Tensor:
    row, source, position = _edges(rowptr, col, perm)
    grad = grad.double()
    message = _message(grad, value, row, position)
    if mean:
        message = message / rowptr.diff()[row, None]
    if row_scale is not None:
        message = message * row_scale.double()[row, None]
    if col_scale is not None:
        message = message * col_scale.double()[source, None]
    out = grad.new_zeros(columns.size(0), grad.size(1)).index_add(0, source, message)
    if diag is not None:
        out = out + diag.double().view(-1, 1) * grad
    return cbsr_sample(out, columns)


def cbsr_spmm_backward_ordered(
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    value: Tensor | None,
    grad: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
) -> Tensor:
    out = spmm(t_rowptr, t_col, t_perm, value, grad, row_scale, col_scale, diag)
    return cbsr_sample(out, columns)


def cbsr_sddmm(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    grad: Tensor,
    values: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    mean: bool,
    num_values: int,
) -> Tensor:
    x = cbsr_to_dense(values, columns, grad.size(1))
    return sddmm(rowptr, col, perm, grad, x, row_scale, col_scale, mean, num_values)


def expand_rows(x: Tensor, position: Tensor, fill: float) -> Tensor:
    return torch.cat([x.double(), x.new_full((1, x.size(1)), fill).double()])[position.long()]


def node_dropout(x: Tensor, nodes: Tensor | None, seed: Tensor, dropout: float) -> Tensor:
    nodes = torch.arange(x.size(0), device=x.device) if nodes is None else nodes
    return x.double() * _kept(seed if dropout > 0 else None, nodes, x.size(1), dropout)


def head_scores(x: Tensor, att_src: Tensor, att_dst: Tensor | None) -> tuple[Tensor, Tensor]:
    def score(att: Tensor) -> Tensor:
        return (x.double() * att.double()).sum(-1)

    src = score(att_src)
    return src, src[:0] if att_dst is None else score(att_dst)


def head_scores_backward(
    x: Tensor,
    att_src: Tensor,
    att_dst: Tensor | None,
    grad_alpha_src: Tensor,
    grad_alpha_dst: Tensor | None,
) -> tuple[Tensor, Tensor]:
    grad_x, grad_att = x.new_zeros(x.shape, dtype=torch.double), []
    for att, grad in ((att_src, grad_alpha_src), (att_dst, grad_alpha_dst)):
        if att is None or grad is None:
            continue
        grad_x = grad_x + grad.double().unsqueeze(-1) * att.double()
        grad_att.append((grad.double().unsqueeze(-1) * x.double()).sum(0))
    return grad_x, torch.stack(grad_att)


def gat(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    num_loops: int,
    negative_slope: float,
    dropout: float,
    training: bool,
    out_acc: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row, source, ids = _edges_and_loops(rowptr, col, perm, num_loops)
    x, num_rows = x.double(), rowptr.size(0) - 1
    ends, sizes = (alpha_src[source], alpha_dst[row]), (col.size(0), num_loops)
    score = _score(*ends, alpha_edge, alpha_loop, ids, *sizes)
    p, lse = _softmax(leaky_relu(score, negative_slope), row, num_rows)
    message = (p * _kept(seed, ids, x.size(1), dropout)).unsqueeze(-1) * x[source]
    plus = (score > 0).double()
    y = _sum(message, row, num_rows)
    y_plus = _sum(message * plus.unsqueeze(-1), row, num_rows)
    out = y if bias is None else y + bias.double().view(x.shape[1:])
    rest = y, y_plus, lse, _sum(p * plus, row, num_rows)
    return out, *(rest if training else (t[:0] for t in rest))


def gat_backward(
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    seed: Tensor | None,
    y: Tensor,
    y_plus: Tensor,
    lse: Tensor,
    mass_plus: Tensor,
    grad: Tensor,
    num_loops: int,
    negative_slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    source, row, ids = _edges_and_loops(t_rowptr, t_col, t_perm, num_loops)
    x, grad, num_edges = x.double(), grad.double(), t_col.size(0)
    ends, sizes = (alpha_src[source], alpha_dst[row]), (num_edges, num_loops)
    score = _score(*ends, alpha_edge, alpha_loop, ids, *sizes)
    p = (leaky_relu(score, negative_slope) - lse.double()[row]).exp()
    kept = _kept(seed, ids, x.size(1), dropout)
    mean = (grad * y.double()).sum(-1)
    grad_p = kept * (grad[row] * x[source]).sum(-1)
    grad_score = p * (grad_p - mean[row]) * _steepness(score, negative_slope)
    grad_dst = (grad * y_plus.double()).sum(-1) - mean * mass_plus.double()
    grad_edge = _sum(grad_score, ids, num_edges + num_loops)
    return (
        _sum((kept * p).unsqueeze(-1) * grad[row], source, x.size(0)),
        _sum(grad_score, source, x.size(0)),
        (1 - negative_slope) * grad_dst,
        grad_edge[: 0 if alpha_edge is None else num_edges],
        grad_edge[num_edges + num_loops if alpha_loop is None else num_edges :],
    )


def gatv2(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    num_loops: int,
    negative_slope: float,
    dropout: float,
    training: bool,
    out_acc: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    row, source, ids = _edges_and_loops(rowptr, col, perm, num_loops)
    x, num_rows = x.double(), rowptr.size(0) - 1
    hidden = leaky_relu(x[source] + x_dst.double()[row], negative_slope)
    p, lse = _softmax((att.double().view(x.shape[1:]) * hidden).sum(-1), row, num_rows)
    weight = p * _kept(seed, ids, x.size(1), dropout)
    y = _sum(weight.unsqueeze(-1) * x[source], row, num_rows)
    out = y if bias is None else y + bias.double().view(x.shape[1:])
    return (out, y, lse) if training else (out, y[:0], lse[:0])


def gatv2_backward(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor,
    seed: Tensor | None,
    y: Tensor,
    lse: Tensor,
    grad: Tensor,
    num_loops: int,
    negative_slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    row, source, ids = _edges_and_loops(rowptr, col, perm, num_loops)
    x, x_dst, grad = x.double(), x_dst.double(), grad.double()
    att = att.double().view(x.shape[1:])
    score = x[source] + x_dst[row]
    hidden = leaky_relu(score, negative_slope)
    p = ((att * hidden).sum(-1) - lse.double()[row]).exp()
    kept = _kept(seed, ids, x.size(1), dropout)
    mean = (grad * y.double()).sum(-1)
    grad_logit = p * (kept * (grad[row] * x[source]).sum(-1) - mean[row])
    grad_hidden = grad_logit.unsqueeze(-1) * _steepness(score, negative_slope)
    grad_message = (kept * p).unsqueeze(-1) * grad[row] + att * grad_hidden
    return (
        _sum(grad_message, source, x.size(0)),
        att * _sum(grad_hidden, row, x_dst.size(0)),
        (grad_logit.unsqueeze(-1) * hidden).sum(0),
    )


def match(
    n_id: Tensor, previous: Tensor, map: Tensor, stamp: int, num_nodes: int
) -> Tensor:
    ids = previous.tolist()
    row = {node: k for k, node in reversed(list(enumerate(ids)))}
    return n_id.new_tensor([row.get(node, -1) for node in n_id.tolist()])


def match_degree(
    ids: Tensor, ptr: Tensor, map: Tensor, stamp: int, num_nodes: int
) -> Tensor:
    batches = [set(batch.tolist()) for batch in ids.tensor_split(ptr[1:-1])]
    return ids.new_tensor([[len(a & b) for b in batches] for a in batches])


def fetch_rows(
    x: Tensor,
    index: Tensor,
    match: Tensor | None,
    previous: Tensor | None,
    cache_position: Tensor | None,
    cache: Tensor | None,
    counter: Tensor | None,
) -> Tensor:
    rows, index = [], index.long()
    for i, node in enumerate(index.tolist()):
        k = -1 if match is None else int(match[i])
        c = -1 if cache_position is None else int(cache_position[node])
        if previous is not None and 0 <= k < previous.size(0):
            rows.append((previous[k], 1))
        elif cache is not None and 0 <= c < cache.size(0):
            rows.append((cache[c], 2))
        else:
            rows.append((x[node].to(index.device), 0))
    if counter is not None:
        counter += index.new_tensor([sum(b == a for _, b in rows) for a in range(3)])
    out = x.new_empty(index.size(0), *x.shape[1:], device=index.device)
    return torch.stack([row for row, _ in rows]) if rows else out


def random_walk(
    rowptr: Tensor, col: Tensor, start: Tensor, walk_length: int, restart: float, seed: int
) -> Tensor:
    graph, out = (rowptr.tolist(), col.tolist()), []
    for key, first in enumerate(start.tolist()):
        path = [first]
        for step in range(walk_length):
            node = _next_node(graph, first, path[-1], seed, key, step, restart)
            path.append(path[-1] if node is None else node)
        out.append(path)
    return start.new_tensor(out).view(-1, walk_length + 1)


def visited_neighbors(
    rowptr: Tensor,
    col: Tensor,
    nodes: Tensor,
    num_neighbors: int,
    num_walks: int,
    walk_length: int,
    restart: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    graph, out = (rowptr.tolist(), col.tolist()), []
    for first in nodes.tolist():
        visits: dict[int, int] = {}
        for walk in range(num_walks):
            at = first
            for step in range(walk * walk_length, (walk + 1) * walk_length):
                node = _next_node(graph, first, at, seed, first, step, restart)
                if node is not None:
                    at = node
                    visits[at] = visits.get(at, 0) + (at != first)
        visits.pop(first, None)
        most = sorted(visits.items(), key=lambda item: -item[1])[:num_neighbors]  # stable
        out.append(most + [(-1, 0)] * (num_neighbors - len(most)))
    both = nodes.new_tensor(out).view(-1, num_neighbors, 2)
    return both[:, :, 0].contiguous(), both[:, :, 1].contiguous()


def _next_node(
    graph: tuple[list[int], list[int]],
    first: int,
    node: int,
    seed: int,
    key: int,
    step: int,
    restart: float,
) -> int | None:
    """The next node of a walk; None where no edge leads on."""
    rowptr, col = graph
    if restart > 0 and ((random_bits(seed, key, 2 * step) >> 11) + 1) * 2.0**-53 <= restart:
        node = first
    degree = rowptr[node + 1] - rowptr[node]
    if degree == 0:
        return None
    return col[rowptr[node] + (random_bits(seed, key, 2 * step + 1) * degree >> 64)]


def _edges(rowptr: Tensor, col: Tensor, perm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the position in `value` of every edge."""
    degree = rowptr.diff().long()
    row = torch.arange(degree.size(0), device=col.device).repeat_interleave(degree)
    position = torch.arange(row.size(0), device=col.device)
    return row, col[position].long(), position if perm is None else perm[position].long()


def _message(x: Tensor, value: Tensor | None, source: Tensor, position: Tensor) -> Tensor:
    return x[source] if value is None else x[source] * value.double()[position, None]


def _reached(
    col: Tensor, perm: Tensor | None, arg: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row and column of every maximum, and the source and position of the edge it came by."""
    i, f = (arg >= 0).nonzero(as_tuple=True)
    edge = arg[i, f].long()
    return i, f, col[edge].long(), edge if perm is None else perm[edge].long()


def _kept(seed: Tensor | None, ids: Tensor, heads: int, dropout: float) -> Tensor:
    """What dropout multiplies the attention of every edge and head with."""
    if seed is None or dropout == 0:
        return torch.ones(ids.size(0), heads, dtype=torch.double, device=ids.device)
    scale = 1 / (1 - dropout) if dropout < 1 else 0
    return keeps(seed, ids, heads, dropout).double() * scale


def _edges_and_loops(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, num_loops: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the id of every edge and of the self-loops of the first nodes."""
    loops = torch.arange(num_loops, device=col.device)
    row, column, position = _edges(rowptr, col, perm)
    return (
        torch.cat([row, loops]),
        torch.cat([column, loops]),
        torch.cat([position, loops + col.size(0)]),
    )


def _score(
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    ids: Tensor,
    num_edges: int,
    num_loops: int,
) -> Tensor:
    """Before the leaky ReLU, of every edge and head."""
    score = alpha_src.double() + alpha_dst.double()
    parts = ((alpha_edge, num_edges), (alpha_loop, num_loops))
    given = [score.new_zeros(n, score.size(1)) if a is None else a.double() for a, n in parts]
    return score + torch.cat(given)[ids]


def _steepness(score: Tensor, negative_slope: float) -> Tensor:
    """The derivative of the leaky ReLU."""
    return torch.ones_like(score).masked_fill(score <= 0, negative_slope)


def _softmax(logit: Tensor, row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Over the edges of each row; and the logarithm of the sum, 0 for a row without edges."""
    size = num_rows, logit.size(1)
    rows = row.view(-1, 1).expand_as(logit)
    none = logit.new_full(size, -float('inf'))
    largest = none.scatter_reduce(0, rows, logit.detach(), 'amax')
    largest = largest.masked_fill(largest.isneginf(), 0)
    e = (logit - largest[row]).exp()
    total = _sum(e, row, num_rows)
    lse = torch.where(total > 0, total, 1).log() + largest
    return e / total[row], lse


def _sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size, *values.shape[1:]).index_add(0, index, values)
