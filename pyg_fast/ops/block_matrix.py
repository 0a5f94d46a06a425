"""Matrices of blocks."""

from typing import Any

import torch
from torch import Tensor


class BlockMatrix(torch.autograd.Function):
    r"""The blocks :math:`(H, A, B)` as the diagonal of a matrix :math:`(H A, H B)`.

    Its gradient is a view, where that of :func:`torch.diag_embed` and a reshape is a copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = heads, rows, columns = x.shape
        out = x.new_zeros(heads, rows, heads, columns)
        out.diagonal(0, 0, 2).copy_(x.permute(1, 2, 0))
        return out.view(heads * rows, heads * columns)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        heads, rows, columns = ctx.shape
        return grad.reshape(heads, rows, heads, columns).diagonal(0, 0, 2).permute(2, 0, 1)
