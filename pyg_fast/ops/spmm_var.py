"""The variance over a graph, of the differences from each row's first message."""

import torch
from torch import Tensor

from ..sparse.operator import SparseOperator
from ._library import fake, ops, reference
from ._numbers import acc_dtype
from ._reference import edge_list
from ._saved import Context, save, saved
from .product import product, raw_product


def reduce_var(
    means: SparseOperator, x: Tensor, semi_grad: bool = False, also: SparseOperator | None = None
) -> tuple[Tensor, Tensor | None]:
    """The variance of the neighbours' features in the dtype of sums, unchecked; that of equal
    features is exactly 0.

    Args:
        means: The mean of the neighbours' features, with its factors in :obj:`row_scale`.
        x: Features of the sources.
        semi_grad: Whether the mean of the squares has no gradient, as in PyG.
        also: The mean or the sum, whose product is the second result: the gradients of both are
            added before they go to the sources.
    """
    var, _, product_of = SpMMVar.apply(x, means, semi_grad, also)
    return var, product_of


class SpMMVar(torch.autograd.Function):
    """Variance, mean, and another product. The backward pass is two products with the transpose."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, means: SparseOperator, semi_grad: bool, also: SparseOperator | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        var, mean = ops.spmm_var.default(*means.graph[:2], x)
        is_sum = also is not None and also.row_scale is None
        save(ctx, x, mean, means, semi_grad, is_sum)
        return var, mean, None if also is None else raw_product(also, x, out_acc=True)

    @staticmethod
    def backward(
        ctx: Context, grad: Tensor | None, grad_mean: Tensor | None, grad_also: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        x, mean, means, semi_grad, is_sum = saved(ctx)
        to_sources, out = means.t(), None
        if grad is not None:
            # Of the mean of squares, and of the square of the mean.
            twice = 2 * grad
            if not semi_grad:
                out = product(to_sources, twice) * x
            grad_mean = _added(grad_mean, -twice * mean)
        if grad_also is not None and is_sum:
            to_sources = to_sources._replace(col_scale=None)
            if grad_mean is not None:
                grad_mean = grad_mean * means.row_scale.view(-1, 1)
        grad_mean = _added(grad_also, grad_mean)
        if grad_mean is not None:
            out = _added(out, product(to_sources, grad_mean))
        return None if out is None else out.to(x.dtype), None, None, None


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


@fake('spmm_var')
def _spmm_var_fake(rowptr: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=acc_dtype(x.dtype))
    return out, torch.empty_like(out)


@reference('spmm_var')
def _spmm_var_reference(rowptr: Tensor, col: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    row, source, _ = edge_list(rowptr, col, None)
    message = x.double()[source]
    count = rowptr.diff().clamp(min=1).view(-1, 1)
    zeros = message.new_zeros(count.size(0), x.size(1))
    mean = zeros.index_add(0, row, message) / count
    return zeros.index_add(0, row, (message - mean[row]).square()) / count, mean
