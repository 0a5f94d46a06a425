"""Scores of edges and self-loops, as a linear map of the features of edges."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ._saved import Context, save, saved
from ._transforms import transforms_active
from .edge_sums import OfRows, edge_sums, rows_of, sum_operator
from .head_map import head_map, head_map_weight
from .linear_product import takes_gradient
from .product import raw_product

# Sums of scores move their number about five times: in the forward pass once, in the backward pass
# to gather and add gradients. Sums of features are moved once.
_MOVES = 4

# Torch's product of few outputs uses few processors of a GPU: a product of so many rows, with at
# most so many outputs, is our own.
_MANY_ROWS = 1 << 17
_MOST_OUTPUTS = 1 << 10

# So is a map of so many rows, with at most so many numbers before and after it.
_MANY_MAPPED = 1 << 19
_FEW = 16


def edge_scores(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.linear`, unchecked, for features of edges; on CUDA the products
    of many edges are our own."""
    if not _is_tall(x, weight.size(0)) or not takes_gradient(weight) or transforms_active():
        return _linear(x, weight)
    return EdgeScores.apply(x, weight, None, None, False)[0]


def edge_and_loop_scores(
    x: Tensor, weight: Tensor, graph: Graph, edge_index: Tensor, mean: bool
) -> tuple[Tensor, Tensor]:
    r"""Scores of the edges, and of a self-loop at each node with the sum, or mean, of the features
    of its edges.

    .. math::
        \mathbf{S} = \mathbf{X} \mathbf{W}^{\top}, \quad
        \mathbf{t}_i = \sum_{e = (j, i) \in \mathcal{E}} \mathbf{s}_e

    Sums features, or their scores, whichever moves less. Differentiable any number of times.
    Unchecked.

    Args:
        x (Tensor): Features of the edges :math:`(|\mathcal{E}|, F)`.
        weight (Tensor): :math:`\mathbf{W}` of shape :math:`(H, F)`.
        graph, edge_index, mean: As those of :func:`~pyg_fast.ops.edge_sums.edge_sums`.

    Returns:
        tuple[Tensor, Tensor]: :math:`\mathbf{S}` of shape :math:`(|\mathcal{E}|, H)` and
        :math:`\mathbf{T}` of shape :math:`(n_{dst}, H)`.
    """
    op = sum_operator(graph, x.size(0), mean)
    if op is None:
        scores = _linear(x, weight)
        return scores, edge_sums(graph, scores, edge_index, mean)
    needs_x, needs_weight = takes_gradient(x), takes_gradient(weight)
    sums_first = needs_weight and not needs_x and x.size(1) <= _MOVES * weight.size(0)
    reads_rows = (needs_x or needs_weight) and not sums_first
    row = rows_of(graph, edge_index) if reads_rows else None
    return EdgeScores.apply(x, weight, row, op, sums_first)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """As :func:`torch.nn.functional.linear`."""
    if 1 < weight.size(0) <= _FEW >= weight.size(1) and _is_many(x, _MANY_MAPPED):
        return head_map(x, weight.t(), 1)
    return F.linear(x, weight)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """As :obj:`a.t() @ b`."""
    return head_map_weight(a, b, 1) if _is_tall(a, b.size(1)) else a.t() @ b


def _is_tall(x: Tensor, columns: int) -> bool:
    return x.size(1) * columns <= _MOST_OUTPUTS and _is_many(x, _MANY_ROWS)


def _is_many(x: Tensor, rows: int) -> bool:
    return x.is_cuda and x.size(0) >= rows


class EdgeScores(torch.autograd.Function):
    """Scores of edges, and with an operator of their sums those of loops. With `sums_first`, which
    needs features without gradient, the features are summed, else the scores. Its backward consists
    of products and sums that torch can differentiate."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        row: Tensor | None,
        op: SparseOperator | None,
        sums_first: bool,
    ) -> tuple[Tensor, ...]:
        scores, sums = _linear(x, weight), None
        out: tuple[Tensor, ...] = (scores,)
        if op is not None and sums_first:
            sums = raw_product(op, x)
            out = scores, _linear(sums, weight)
        elif op is not None:
            out = scores, raw_product(op, scores)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        save(ctx, x if needs_weight else None, weight if needs_x else None, row, op, sums)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor, *of_loops: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, row, op, sums = saved(ctx)
        if row is not None:  # Scores were summed.
            grad = grad + OfRows.apply(of_loops[0], row, op)
        grad_x = _linear(grad, weight.t()) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = _product(grad, x)
            if sums is not None:
                grad_weight = grad_weight + _product(of_loops[0], sums)
        return grad_x, grad_weight, None, None, None
