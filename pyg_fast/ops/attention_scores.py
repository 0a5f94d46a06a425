"""Scores of nodes: products of each head's channels with attention vectors."""

import torch
from torch import Tensor

from ._library import fake, ops, reference
from ._numbers import acc_dtype
from ._saved import Context, save, saved


def attention_scores(x: Tensor, *att: Tensor) -> tuple[Tensor, ...]:
    r"""The terms of GAT's edge scores, unchecked, for one or two attention vectors.

    .. math::
        \alpha_{i,h} = \mathbf{a}_h^{\top} \mathbf{x}_{i,h}

    Differentiable any number of times. The features are read once for both vectors, and only their
    gradient has their size.

    Args:
        x (Tensor): Features :math:`(N, H, C)`.
        *att (Tensor): One or two vectors of :math:`H \cdot C` elements.

    Returns:
        tuple[Tensor, ...]: A score :math:`(N, H)` for each vector, float32 (float64 for float64
        features).
    """
    return AttentionScores.apply(x, *att)


class AttentionScores(torch.autograd.Function):
    """Its backward consists of products and sums that torch can differentiate."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, *att: Tensor) -> tuple[Tensor, ...]:
        save(ctx, x, att)
        return ops.attention_scores.default(x, *vectors(x, att))[: len(att)]

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, att = saved(ctx)
        if torch.is_grad_enabled():  # create_graph=True: use differentiable torch ops.
            acc, shape = acc_dtype(x.dtype), x.shape[1:]
            grad_x = sum(
                grad.unsqueeze(-1) * a.to(acc).view(shape)
                for grad, a in zip(grads, att, strict=True)
            )
            grad_att = [(grad.unsqueeze(-1) * x.to(acc)).sum(0) for grad in grads]
        else:
            grad_x, grad_att = ops.attention_scores_backward.default(
                x, *vectors(x, att), grads[0], grads[1] if len(grads) > 1 else None, None
            )
        return grad_x.to(x.dtype), *(
            grad.to(a.dtype).view_as(a) for grad, a in zip(grad_att, att, strict=True)
        )


def vectors(x: Tensor, att: tuple[Tensor, ...]) -> list[Tensor | None]:
    """One or two attention vectors as the raw ops take them."""
    made = [a.to(acc_dtype(x.dtype)).view(x.shape[1:]) for a in att]
    return [*made, None][:2]


@fake('attention_scores')
def _attention_scores_fake(
    x: Tensor, att_src: Tensor, att_dst: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, heads = x.size(0), x.size(1)
    return (
        att_src.new_empty(rows, heads),
        att_src.new_empty(0 if att_dst is None else rows, heads),
    )


@fake('attention_scores_backward')
def _attention_scores_backward_fake(
    x: Tensor, att_src: Tensor, att_dst: Tensor | None
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), att_src.new_empty(1 if att_dst is None else 2, *att_src.shape)


@reference('attention_scores')
def _attention_scores_reference(
    x: Tensor, att_src: Tensor, att_dst: Tensor | None
) -> tuple[Tensor, Tensor]:
    def score(att: Tensor) -> Tensor:
        return (x.double() * att.double()).sum(-1)

    src = score(att_src)
    return src, src[:0] if att_dst is None else score(att_dst)


@reference('attention_scores_backward')
def _attention_scores_backward_reference(
    x: Tensor,
    att_src: Tensor,
    att_dst: Tensor | None,
    grad_alpha_src: Tensor,
    grad_alpha_dst: Tensor | None,
    more_grad_x: Tensor | None,
) -> tuple[Tensor, Tensor]:
    grad_x = torch.zeros_like(x) if more_grad_x is None else more_grad_x
    grad_x, grad_att = grad_x.double(), []
    for att, grad in ((att_src, grad_alpha_src), (att_dst, grad_alpha_dst)):
        if att is None or grad is None:
            continue
        grad_x = grad_x + grad.double().unsqueeze(-1) * att.double()
        grad_att.append((grad.double().unsqueeze(-1) * x.double()).sum(0))
    return grad_x, torch.stack(grad_att)
