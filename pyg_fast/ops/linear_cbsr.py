"""A linear map of CBSR features."""

import torch
from torch import Tensor

from ._library import ops
from ._saved import Context, save, saved
from .cbsr import CBSR, Sample, ToDense


def linear_cbsr(x: CBSR, weight: Tensor, out: Tensor) -> Tensor:
    r"""Adds a linear map of sparse features: :math:`\mathbf{Y} + \mathbf{X} \mathbf{W}^{\top}`.

    The dense form of :math:`\mathbf{X}`, :math:`(N, F)`, exists only during the product; the
    backward pass stores the :math:`k` entries of each row. Differentiable in the values of
    :obj:`x`, in :obj:`weight` and :obj:`out`, any number of times. Unchecked.

    Args:
        x (CBSR): :math:`\mathbf{X}` of shape :math:`(N, F)`.
        weight (Tensor): :math:`\mathbf{W}` of shape :math:`(F_{out}, F)`.
        out (Tensor): :math:`\mathbf{Y}` of shape :math:`(N, F_{out})`, not modified.
    """
    return _LinearCBSR.apply(x.values, weight, out, x.columns, x.num_columns)


class _LinearCBSR(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, values: Tensor, weight: Tensor, out: Tensor, columns: Tensor, num_columns: int
    ) -> Tensor:
        needs_values, needs_weight = ctx.needs_input_grad[:2]
        save(
            ctx, values if needs_weight else None, weight if needs_values else None, columns,
            num_columns,
        )  # fmt: skip
        return torch.addmm(out, ops.cbsr_to_dense(values, columns, num_columns), weight.t())

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight, columns, num_columns = saved(ctx)
        needs_values, needs_weight, needs_out = ctx.needs_input_grad[:3]
        grad_values = Sample.apply(grad @ weight, columns) if needs_values else None
        grad_weight = None
        if needs_weight:
            grad_weight = grad.t() @ ToDense.apply(values, columns, num_columns)
        return grad_values, grad_weight, grad if needs_out else None, None, None
