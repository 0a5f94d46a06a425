"""A linear map and an aggregation as one node of autograd: the body of a convolution."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._saved import save, saved
from .graph import Graph
from .spmm import acc_dtype, reduce_sum, sum_rows


def linear_spmm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    graph: Graph,
    value: Tensor | None = None,
    scale: Tensor | None = None,
    diag: Tensor | None = None,
    out_acc: bool = False,
    left: bool = False,
) -> Tensor:
    r"""Maps features linearly and aggregates them, in whichever order moves fewer of them.

    .. math::
        \mathbf{Y} = \left( \mathbf{D} \mathbf{A} \mathbf{D} + \mathbf{E} \right)
        \mathbf{X} \mathbf{W}^{\top} + \mathbf{b}

    Both orders are the same but for rounding. The narrower side is aggregated, counting the
    backward pass, which needs no aggregation if it comes first and :obj:`x` takes no gradient.
    Differentiable in :obj:`x`, :obj:`weight` and :obj:`bias`, any number of times. Unchecked.

    Args:
        x (Tensor): Features :math:`(N_{src}, F_{in})`.
        weight (Tensor): :math:`\mathbf{W}` of shape :math:`(F_{out}, F_{in})`.
        bias (Tensor, optional): :math:`\mathbf{b}` of shape :math:`(F_{out})`.
        graph (Graph): :math:`\mathbf{A}`, with its transpose if anything takes a gradient.
        value (Tensor, optional): The entries of :math:`\mathbf{A}`, of the type of :obj:`x` or
            of its sums, constant. (default: :obj:`None`, all one)
        scale (Tensor, optional): The diagonal of :math:`\mathbf{D}`, float32 (float64 for
            float64 features), constant. (default: :obj:`None`, all one)
        diag (Tensor, optional): The diagonal of :math:`\mathbf{E}`, likewise.
            (default: :obj:`None`, zero)
        out_acc (bool): Whether halves give a float32 result; :obj:`bias` is float32 then.
            (default: :obj:`False`)
        left (bool): Whether :math:`\mathbf{D}` stands on the left of :math:`\mathbf{A}` only,
            as in a mean. (default: :obj:`False`)

    Returns:
        Tensor: :math:`\mathbf{Y}` of shape :math:`(N_{dst}, F_{out})`.
    """
    constants = graph, value, scale, None if left else scale, diag, out_acc
    if not torch.is_grad_enabled():
        return _product(x, weight, bias, constants, (False, False))[0]
    return _LinearSpMM.apply(x, weight, bias, constants)


def aggregates_first(weight: Tensor, needs_x: bool, needs_weight: bool) -> bool:
    """Whether aggregating before the linear map moves fewer features, given which gradients are
    asked for. If so, and :obj:`x` needs none, the backward pass reads no transpose."""
    return weight.size(1) * (1 + needs_x) < weight.size(0) * (1 + (needs_x or needs_weight))


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    constants: tuple[Any, ...],
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None]:
    """The result, and the aggregated features if they were aggregated first."""
    graph, value, row_scale, col_scale, diag, out_acc = constants
    # Under autocast it is the linear map that runs in halves.
    if not out_acc and aggregates_first(weight, *needs):
        aggregated = _sum(graph, x, value, row_scale, col_scale, diag, None, False)
        return F.linear(aggregated, weight, bias), aggregated
    mapped = F.linear(x, weight)
    return _sum(graph, mapped, value, row_scale, col_scale, diag, bias, out_acc), None


def _sum(
    graph: Graph,
    x: Tensor,
    value: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    out_acc: bool,
) -> Tensor:
    if value is not None and col_scale is not None and x.dtype == col_scale.dtype:
        # Beside a value the kernel would gather a second number for each edge: rows are scaled
        # instead, of which there are fewer.
        x = x * col_scale.view(-1, 1)
        if diag is not None:
            diag = torch.where(col_scale == 0, diag, diag / col_scale)
        col_scale = None
    return sum_rows(
        graph[:3], graph.groups, value, x, row_scale, col_scale, diag, bias, False, out_acc
    )


class _LinearSpMM(torch.autograd.Function):
    # What takes no gradient is one argument: torch.compile refuses tensors that are given twice.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        constants: tuple[Any, ...],
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        out, aggregated = _product(x, weight, bias, constants, (needs_x, needs_weight))
        ctx.first = aggregated is not None
        save(ctx, x, weight, aggregated if needs_weight else None, constants)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, aggregated, constants = saved(ctx)
        graph, value, row_scale, col_scale, diag, _ = constants
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        again = torch.is_grad_enabled()  # The gradient will be differentiated itself.
        if ctx.first:
            if needs_weight:
                if again:
                    aggregated = reduce_sum(
                        graph, x, value, row_scale=row_scale, col_scale=col_scale, diag=diag
                    )
                grad_weight = grad.t() @ aggregated
            if needs_x:
                grad_x = _transposed(
                    graph, grad @ weight, value, col_scale, row_scale, diag, again
                )
        elif needs_x or needs_weight:
            mapped = _transposed(graph, grad, value, col_scale, row_scale, diag, again)
            if mapped.dtype != x.dtype:
                mapped = mapped.to(x.dtype)
            if needs_weight:
                grad_weight = mapped.t() @ x
            if needs_x:
                grad_x = mapped @ weight
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


def _transposed(
    graph: Graph,
    grad: Tensor,
    value: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    again: bool,
) -> Tensor:
    if value is not None and value.dtype != acc_dtype(grad.dtype):
        value = value.to(grad.dtype)
    graph = graph.t()
    if again:
        return reduce_sum(
            graph, grad, value, row_scale=row_scale, col_scale=col_scale, diag=diag
        )
    return _sum(graph, grad, value, row_scale, col_scale, diag, None, False)
