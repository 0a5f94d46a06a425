"""A linear map with a bias."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._saved import save, saved
from ._transforms import transforms_active
from .column_sums import column_sums

# Numbers of a result from which on a faster sum saves more than a function in Python costs.
_MANY = 1 << 22


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    r"""As :func:`torch.nn.functional.linear` for a matrix, unchecked; on CUDA the gradient of a
    bias of many rows is a sum of our own.

    .. math::
        \mathbf{Y} = \mathbf{X} \mathbf{W}^{\top} + \mathbf{b}

    Args:
        x (Tensor): Features :math:`(N, F_{in})`.
        weight (Tensor): :math:`\mathbf{W}` of shape :math:`(F_{out}, F_{in})`.
        bias (Tensor): :math:`\mathbf{b}` of shape :math:`(F_{out})`.

    Returns:
        Tensor: :math:`\mathbf{Y}` of shape :math:`(N, F_{out})`.
    """
    if (
        not x.is_cuda or x.size(0) * weight.size(0) < _MANY or not bias.requires_grad
        or not torch.is_grad_enabled() or torch.compiler.is_compiling()
        or torch.is_autocast_enabled('cuda') or transforms_active()
    ):  # fmt: skip
        return F.linear(x, weight, bias)
    return Linear.apply(x, weight, bias)


class Linear(torch.autograd.Function):
    """Its backward consists of products and sums that torch can differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        save(ctx, x if needs_weight else None, weight if needs_x else None)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        return (
            None if weight is None else grad @ weight,
            None if x is None else grad.t() @ x,
            column_sums(grad) if ctx.needs_input_grad[2] else None,
        )
