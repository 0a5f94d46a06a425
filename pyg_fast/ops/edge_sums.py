"""Values of edges: their sums over the edges of each row, and some of their rows."""

import torch
from torch import Tensor

from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ..sparse.to_csr import MOST_NODES
from ._library import ops
from ._saved import Context, save, saved
from ._transforms import is_batched, transforms_active
from .linear_product import takes_gradient
from .product import raw_product


def edge_sums(graph: Graph, x: Tensor, edge_index: Tensor, mean: bool) -> Tensor:
    r"""Sums, or means, over the edges of each row of a graph.

    .. math::
        \mathbf{y}_i = \sum_{e = (j, i) \in \mathcal{E}} \mathbf{x}_e

    Deterministic, and differentiable any number of times. Unchecked.

    Args:
        graph (Graph): The graph of :obj:`edge_index` without self-loops.
        x (Tensor): Values of the edges :math:`(|\mathcal{E}|, F)`; those of self-loops count for
            nothing.
        edge_index (Tensor): Sources and rows of the edges :math:`(2, |\mathcal{E}|)`.
        mean (bool): Whether sums are divided by the numbers of edges.

    Returns:
        Tensor: :math:`(n_{dst}, F)`.
    """
    op = sum_operator(graph, x.size(0), mean)
    if op is None:
        row = rows_of(graph, edge_index).long().clamp(0, graph.num_dst)
        out = x.new_zeros(graph.num_dst + 1, x.size(1)).index_add(0, row, x)[:-1]
        return out / graph.rowptr.diff().clamp(min=1).view(-1, 1) if mean else out
    if not takes_gradient(x):
        return raw_product(op, x)
    return EdgeSums.apply(x, rows_of(graph, edge_index), op)


def sum_operator(graph: Graph, num_edges: int, mean: bool) -> SparseOperator | None:
    """The operator from values of edges to their sums, or None where only torch computes them."""
    if num_edges > MOST_NODES or transforms_active():  # Kernels name edges by int32.
        return None
    ids, dtype = graph.perm, graph.col.dtype
    if ids is None:
        ids = torch.arange(num_edges, device=graph.col.device, dtype=dtype)
    edges = graph._replace(
        col=ids.to(dtype), perm=None, t_rowptr=None, t_col=None, t_perm=None, t_groups=None,
        num_src=num_edges,
    )  # fmt: skip
    return SparseOperator(edges, mean=mean)


def rows_of(graph: Graph, edge_index: Tensor) -> Tensor:
    """The row of each edge; that of a self-loop is the one after the last. On CUDA an index out of
    range is reported later, and must not fail here."""
    return edge_index[1].masked_fill(edge_index[0] == edge_index[1], graph.num_dst)


class EdgeSums(torch.autograd.Function):
    """Its backward is :class:`OfRows`, and the reverse."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, row: Tensor, op: SparseOperator) -> Tensor:
        save(ctx, row, op)
        return raw_product(op, x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return OfRows.apply(grad, *saved(ctx)), None, None


class OfRows(torch.autograd.Function):
    """For each edge the values of its row, divided by the number of edges for means."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, row: Tensor, op: SparseOperator) -> Tensor:
        save(ctx, row, op)
        if op.mean:
            x = x / op.graph.rowptr.diff().clamp(min=1).view(-1, 1).to(x.dtype)
        return rows_at(torch.cat([x, x.new_zeros(1, x.size(1))]), row)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return EdgeSums.apply(grad, *saved(ctx)), None, None


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """Rows of a matrix, without gradient. On CUDA torch's index_select starts a block of threads
    for each row, however narrow."""
    if not x.is_cuda or is_batched(x):
        return x.index_select(0, index)
    return ops.gather_rows.default(x.contiguous(), index, None, None, None, None, None)


class Selected(torch.autograd.Function):
    """Some rows of a matrix, each once."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, index: Tensor) -> Tensor:
        ctx.num_rows = x.size(0)
        save(ctx, index)
        return rows_at(x, index)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = saved(ctx)
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy(0, index, grad), None
