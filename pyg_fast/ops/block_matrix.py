"""Linear maps of several heads as one matrix of blocks."""

from typing import Any

import torch
from torch import Tensor


class BlockMatrix(torch.autograd.Function):
    r"""A map :math:`(D, H C)` of features that all heads share, as the map :math:`(H D, H C)` of
    features that each head has: zero but for one block for each head.

    Its gradient is one copy, with the columns of the map side by side: what a weight of
    :class:`torch.nn.Linear`, which is its transpose, takes as it is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> Tensor:
        count, channels = x.size(0), x.size(1) // heads
        ctx.shape = heads, count, heads, channels
        out = x.new_zeros(ctx.shape)
        out.diagonal(0, 0, 2).copy_(x.view(count, heads, channels).transpose(1, 2))
        return out.view(heads * count, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        blocks = grad.reshape(ctx.shape).diagonal(0, 0, 2)
        return blocks.permute(2, 1, 0).reshape(-1, blocks.size(0)).t(), None
