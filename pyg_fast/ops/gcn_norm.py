"""The symmetric normalisation of a GCN over unsorted edges."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sparse.to_csr import to_csr
from ._edges import check_invalid, kernel_index
from ._library import fake, ops, reference
from ._numbers import acc_dtype, adds_in_order
from ._saved import Context, save, saved

LOOP_CHUNK = 128  # edges per self-loop count of gcn_degree: csrc/params/gcn_norm.h
LOOPS = ('remaining', 'replace', 'add', 'keep')


def gcn_weight(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    dtype: torch.dtype,
    add_self_loops: bool,
    fill_value: float,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The edges and normalised weights of :func:`~pyg_fast.ops.gcn_norm`, of a plain
    :obj:`edge_index`; checks only its indices. :obj:`reverse` counts degrees at sources."""
    edges = kernel_index(edge_index)
    differentiable = (
        edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled()
    )
    weight = edge_weight
    if weight is not None and differentiable:
        weight = weight.to(acc_dtype(dtype))  # The gradient is computed from the result.
    degree, last, chunk_loops, num_loops = _degree(
        edge_index, edges, weight, num_nodes, add_self_loops, reverse, wait=add_self_loops
    )
    before, num_kept = None, edges.size(1)
    if add_self_loops and num_loops != 0:
        before = chunk_loops.cumsum(0)
        # Compiled code cannot wait for the count: it uses the size of a tensor.
        num_kept -= _is_loop(edges).nonzero().size(0) if num_loops is None else num_loops
    if differentiable:
        index, out = GCNWeight.apply(
            weight, edges, degree, last, before, num_kept, add_self_loops, fill_value, reverse
        )
        out = out.to(dtype)
    else:
        index, out, _ = ops.gcn_weight(
            edges, weight, degree, last, before, num_kept, add_self_loops, fill_value, dtype
        )
    return index if add_self_loops else edge_index, out


def gcn_scale(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    dtype: torch.dtype,
    *,
    fill_value: float = 1.0,
    loops: str = 'remaining',
    flow: str = 'source_to_target',
) -> tuple[Tensor, Tensor | None]:
    r"""The normalisation as factors: the inverse square roots of degrees :math:`\mathbf{D}` and the
    self-loops :math:`\mathbf{E}` of :math:`\mathbf{D} \mathbf{A} \mathbf{D} + \mathbf{E}`.

    For a plain, unsorted :obj:`edge_index`, without gradient; nothing of size
    :math:`|\mathcal{E}|` is allocated. :math:`\mathbf{A}` has no self-loops if :obj:`loops` is
    :obj:`"remaining"` or :obj:`"replace"`.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)`.
        num_nodes (int): Number of nodes :math:`N`.
        dtype (torch.dtype): The dtype of the features; the factors have the dtype of their sums.
        fill_value (float): Weight of added self-loops. (default: :obj:`1.0`)
        loops (str): :obj:`"remaining"` gives each node one self-loop, with the weight of its last
            self-loop, or :obj:`fill_value` if it has none; :obj:`"replace"` always uses
            :obj:`fill_value`; :obj:`"add"` adds a loop to the existing ones; :obj:`"keep"` adds
            none. (default: :obj:`"remaining"`)
        flow (str): As in :func:`gcn_norm`. (default: :obj:`"source_to_target"`)

    Returns:
        :obj:`(scale, diag)` of shape :math:`(N)`; :obj:`diag` is :obj:`None` for :obj:`"keep"`.
    """
    if loops not in LOOPS:
        raise ValueError(f"'loops' must be one of {LOOPS}, got {loops!r}")
    acc = acc_dtype(dtype)
    weight = None if edge_weight is None else edge_weight.detach().to(acc)
    edges = kernel_index(edge_index)
    drop, reverse = loops in ('remaining', 'replace'), flow == 'target_to_source'
    degree, last, _, _ = _degree(edge_index, edges, weight, num_nodes, drop, reverse)
    if loops == 'replace':
        last = None
    _, diag, scale = ops.gcn_weight(
        edges, weight, degree, last, None, 0, loops != 'keep', fill_value, acc
    )
    return scale, None if loops == 'keep' else diag


def _degree(
    edge_index: Tensor,
    edges: Tensor,
    weight: Tensor | None,
    num_nodes: int,
    drop_loops: bool,
    reverse: bool,
    wait: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, int | None]:
    # The degrees, the last loop of each node, the number of loops per chunk of edges, and the total
    # number of loops if the host knows it: on a CPU, or with `wait`.
    weight = None if weight is None else weight.detach()
    degree, last, counts, chunk_loops = ops.gcn_degree(
        edges, weight, num_nodes, drop_loops, reverse
    )  # fmt: skip
    num_invalid: Tensor | int = counts[0]
    num_loops = None
    if not torch.compiler.is_compiling() and not counts.is_meta and (wait or not counts.is_cuda):
        num_invalid, num_loops = counts.tolist()  # one synchronisation
    check_invalid(edge_index, num_invalid, (num_nodes, num_nodes), wait)
    if weight is None or not drop_loops or num_loops == 0:
        last = None
    if weight is not None and adds_in_order(weight):
        csr = to_csr(
            edges, num_nodes, num_nodes, by='src' if reverse else 'dst', drop_loops=drop_loops
        )  # fmt: skip
        ones = degree.new_ones(num_nodes, 1)
        degree = ops.spmm(
            *csr, weight.to(degree.dtype), ones, None, None, None, None, False, False
        ).view(-1)  # fmt: skip
    return degree, last, chunk_loops, num_loops


def _is_loop(edges: Tensor) -> Tensor:
    return edges[0] == edges[1]


class GCNWeight(torch.autograd.Function):
    """The second pass over the edges; its gradient includes the first pass."""

    @staticmethod
    def forward(
        ctx: Context,
        weight: Tensor,
        edges: Tensor,
        degree: Tensor,
        last: Tensor | None,
        before: Tensor | None,
        num_kept: int,
        loops: bool,
        fill_value: float,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        index, out, scale = ops.gcn_weight(
            edges, weight, degree, last, before, num_kept, loops, fill_value, weight.dtype
        )
        ctx.mark_non_differentiable(index)
        save(
            ctx, weight, edges, last, before, index, out, scale, num_kept, loops, fill_value,
            reverse,
        )  # fmt: skip
        return index, out

    @staticmethod
    def backward(ctx: Context, _: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            weight, edges, last, before, index, out, scale, num_kept, loops, fill_value, reverse,
        ) = saved(ctx)  # fmt: skip
        if torch.is_grad_enabled():  # create_graph=True: use differentiable torch ops.
            num_kept = None if before is None else num_kept
            recomputed = _in_torch(
                weight, edges, last, num_kept, scale.size(0), loops, fill_value, reverse
            )
            grad_weight = torch.autograd.grad(recomputed, weight, grad, create_graph=True)[0]
            return (grad_weight,) + (None,) * 8
        src, dst = index if loops else edges
        # Gradient to the logarithms of the scales, and through them to the degrees. In float64:
        # torch adds the terms of a node one after another.
        grad_log = (grad * out).double()
        sums = torch.zeros_like(scale, dtype=torch.double)
        sums.index_add_(0, src, grad_log).index_add_(0, dst, grad_log)
        grad_degree = sums.to(scale.dtype) * scale * scale * -0.5
        grad_weight = ops.gcn_weight_backward(
            edges, grad, scale, grad_degree, before, reverse
        )  # fmt: skip
        return (grad_weight,) + (None,) * 8


def _in_torch(
    weight: Tensor,
    edges: Tensor,
    last: Tensor | None,
    num_kept: int | None,
    num_nodes: int,
    loops: bool,
    fill_value: float,
    reverse: bool,
) -> Tensor:
    # The whole normalisation in differentiable torch ops.
    loop = weight.new_full((num_nodes,), fill_value if loops else 0.0)
    value = weight
    if num_kept is not None:
        assert last is not None
        is_loop = _is_loop(edges)
        rest = (~is_loop).nonzero_static(size=num_kept).view(-1)
        loop = torch.where(last > 0, weight.detach()[(last - 1).clamp_(min=0)], loop)
        zero = torch.where(is_loop, weight - weight.detach(), weight.new_zeros(()))
        loop = loop.index_add(0, edges[0], zero)
        value, edges = weight[rest], edges[:, rest]
    src, dst = edges
    degree = loop.index_add(0, src if reverse else dst, value)
    isolated = degree == 0
    scale = degree.masked_fill(isolated, 1.0).rsqrt().masked_fill(isolated, 0.0)
    out = scale[src] * value * scale[dst]
    return torch.cat([out, scale * loop * scale]) if loops else out


@fake('gcn_degree')
def _gcn_degree_fake(
    edge_index: Tensor, edge_weight: Tensor | None, num_nodes: int, drop_loops: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = torch.int32 if edge_weight is None else acc_dtype(edge_weight.dtype)
    return (
        edge_index.new_empty(num_nodes, dtype=dtype),
        edge_index.new_empty(
            num_nodes if edge_weight is not None and drop_loops else 0, dtype=torch.int64
        ),
        edge_index.new_empty(2, dtype=torch.int64),
        edge_index.new_empty(
            (edge_index.size(1) + LOOP_CHUNK - 1) // LOOP_CHUNK if drop_loops else 0,
            dtype=torch.int64,
        ),
    )


@fake('gcn_weight')
def _gcn_weight_fake(
    edge_index: Tensor, degree: Tensor, num_kept: int, loops: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = num_kept + degree.size(0) if loops else num_kept
    return (
        edge_index.new_empty(2, total if loops else 0),
        edge_index.new_empty(total, dtype=dtype),
        torch.empty_like(degree, dtype=acc_dtype(dtype)),
    )


@fake('gcn_weight_backward')
def _gcn_weight_backward_fake(edge_index: Tensor, grad: Tensor) -> Tensor:
    return grad.new_empty(edge_index.size(1))


@fake('gcn_scale')
def _gcn_scale_fake(rowptr: Tensor, value: Tensor, loops: bool) -> tuple[Tensor, Tensor]:
    num_rows, acc = rowptr.size(0) - 1, acc_dtype(value.dtype)
    return (
        value.new_empty(num_rows, dtype=acc),
        value.new_empty(num_rows if loops else 0, dtype=acc),
    )


@reference('gcn_degree')
def _gcn_degree_reference(
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


@reference('gcn_weight')
def _gcn_weight_reference(
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
        rest = (edge_index[0] != edge_index[1]).nonzero().view(-1)
        edge_index = edge_index[:, rest]
        edge_weight = None if edge_weight is None else edge_weight[rest]
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


@reference('gcn_weight_backward')
def _gcn_weight_backward_reference(
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
        rest = src != dst
        place = torch.where(rest, rest.cumsum(0) - 1, grad.size(0) - num_nodes + dst)
    scale, grad_degree = scale.double(), grad_degree.double()
    return grad.double()[place] * scale[src] * scale[dst] + grad_degree[src if reverse else dst]


@reference('gcn_scale')
def _gcn_scale_reference(
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
