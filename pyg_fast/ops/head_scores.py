"""Scores of nodes: products of each head's channels with vectors of attention."""

from typing import Any

import torch
from torch import Tensor

from ._library import ops
from ._saved import save, saved
from .spmm import acc_dtype


def head_scores(x: Tensor, *att: Tensor) -> tuple[Tensor, ...]:
    r"""What GAT's scores of edges are sums of, unchecked, for one vector of attention or two.

    .. math::
        \alpha_{i,h} = \mathbf{a}_h^{\top} \mathbf{x}_{i,h}

    Differentiable any number of times. No vector needs the features twice, and nothing of their
    size is made but their gradient.

    Args:
        x (Tensor): Features :math:`(N, H, C)`.
        *att (Tensor): One or two vectors of :math:`H \cdot C` elements.

    Returns:
        tuple[Tensor, ...]: A score :math:`(N, H)` for each vector, float32 (float64 for float64
        features).
    """
    return HeadScores.apply(x, *att)


class HeadScores(torch.autograd.Function):
    """Its backward is made of products and sums that torch can differentiate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *att: Tensor) -> tuple[Tensor, ...]:
        save(ctx, x, att)
        return ops.head_scores.default(x, *_vectors(x, att))[: len(att)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, att = saved(ctx)
        if torch.is_grad_enabled():  # create_graph=True: in ops that torch differentiates.
            acc, shape = acc_dtype(x.dtype), x.shape[1:]
            grad_x = sum(
                grad.unsqueeze(-1) * a.to(acc).view(shape)
                for grad, a in zip(grads, att, strict=True)
            )
            grad_att = [(grad.unsqueeze(-1) * x.to(acc)).sum(0) for grad in grads]
        else:
            grad_x, grad_att = ops.head_scores_backward.default(
                x, *_vectors(x, att), grads[0], grads[1] if len(grads) > 1 else None
            )
        return grad_x.to(x.dtype), *(
            grad.to(a.dtype).view_as(a) for grad, a in zip(grad_att, att, strict=True)
        )


def _vectors(x: Tensor, att: tuple[Tensor, ...]) -> list[Tensor | None]:
    made = [a.to(acc_dtype(x.dtype)).view(x.shape[1:]) for a in att]
    return [*made, None][:2]
