"""A linear map and an aggregation as one node of autograd: the body of a convolution."""

from typing import Any

import torch
from torch import Tensor

from ._library import ops
from .graph import Graph
from .spmm import SpMM, acc_dtype


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
    return _LinearSpMM.apply(
        x, weight, bias, graph.rowptr, graph.col, graph.perm, graph.t_rowptr, graph.t_col,
        graph.t_perm, value, scale, diag, out_acc, left,
    )  # fmt: skip


def aggregates_first(weight: Tensor, needs_x: bool, needs_weight: bool) -> bool:
    """Whether aggregating before the linear map moves fewer features, given which gradients are
    asked for. If so, and :obj:`x` needs none, the backward pass reads no transpose."""
    return weight.size(1) * (1 + needs_x) < weight.size(0) * (1 + (needs_x or needs_weight))


class _LinearSpMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rowptr: Tensor,
        col: Tensor,
        perm: Tensor | None,
        t_rowptr: Tensor | None,
        t_col: Tensor | None,
        t_perm: Tensor | None,
        value: Tensor | None,
        scale: Tensor | None,
        diag: Tensor | None,
        out_acc: bool,
        left: bool,
    ) -> Tensor:
        right = None if left else scale
        needs_x, needs_weight, _ = ctx.needs_input_grad[:3]
        first = aggregates_first(weight, needs_x, needs_weight)
        first = first and not out_acc  # Under autocast it is the linear map that runs in halves.
        if first:
            aggregated = ops.spmm(
                rowptr, col, perm, value, x, scale, right, diag, None, False, False
            )
            out = aggregated @ weight.t() if bias is None else (
                torch.addmm(bias, aggregated, weight.t())
            )
        else:
            aggregated = None
            out = ops.spmm(
                rowptr, col, perm, value, x @ weight.t(), scale, right, diag, bias, False, out_acc
            )
        ctx.first, ctx.left = first, left
        ctx.save_for_backward(
            x, weight, aggregated if needs_weight else None, rowptr, col, perm, t_rowptr, t_col,
            t_perm, value, scale, diag,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (
            x, weight, aggregated, rowptr, col, perm, t_rowptr, t_col, t_perm, value, scale, diag,
        ) = ctx.saved_tensors  # fmt: skip
        right = None if ctx.left else scale
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_weight = None
        again = torch.is_grad_enabled()  # The gradient will be differentiated itself.

        def transposed(g: Tensor) -> Tensor:
            if t_rowptr is None:
                raise RuntimeError('this graph was made without the transpose that backward needs')
            v = value
            if v is not None and v.dtype != acc_dtype(g.dtype):
                v = v.to(g.dtype)
            if not again:
                return ops.spmm(
                    t_rowptr, t_col, t_perm, v, g, right, scale, diag, None, False, False
                )
            return SpMM.apply(
                g, v, None, t_rowptr, t_col, t_perm, rowptr, col, perm, right, scale, diag,
                False, False,
            )  # fmt: skip

        if ctx.first:
            if needs_weight:
                if again:
                    aggregated = SpMM.apply(
                        x, value, None, rowptr, col, perm, t_rowptr, t_col, t_perm, scale, right,
                        diag, False, False,
                    )  # fmt: skip
                grad_weight = grad.t() @ aggregated
            if needs_x:
                grad_x = transposed(grad @ weight)
        elif needs_x or needs_weight:
            grad_mapped = transposed(grad).to(x.dtype)
            if needs_weight:
                grad_weight = grad_mapped.t() @ x
            if needs_x:
                grad_x = grad_mapped @ weight
        grad_bias = grad.sum(0) if needs_bias else None
        return (grad_x, grad_weight, grad_bias) + (None,) * 11
