"""Graph attention in one pass over the edges, and its gradient in another."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ._attention import (
    AttentionArgs,
    as_acc,
    composed,
    differentiable_gradients,
    dropout_factor,
    edges_and_loops,
    leaky,
    leaky_slope,
    softmax_by_row,
    sum_at,
    weight_of,
)
from ._library import fake, ops, reference
from ._numbers import acc_dtype
from ._saved import Context, save, saved
from ._transforms import transforms_active
from .attention_scores import vectors
from .column_sums import column_sums


def attend(
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    bias: Tensor | None,
    args: AttentionArgs,
) -> Tensor:
    """The kernel of :func:`gat`, unchecked, with scores of self-loops :math:`(L, H)` and a bias
    :math:`(H C)` of the result's dtype. Scores are float32 (float64 for float64 features)."""
    inputs = x, alpha_src, alpha_dst, alpha_edge, alpha_loop, bias
    return _composed(args, *inputs) if transforms_active() else GAT.apply(*inputs, (args, False))


class GAT(torch.autograd.Function):
    """Attention; its backward needs the stored sums per node and the transpose.

    The last argument says whether :obj:`src` and :obj:`dst` are attention vectors, in place of the
    scores that :func:`~pyg_fast.ops.attention_scores.attention_scores` gives of them: one function,
    which adds both gradients of :obj:`x` in a kernel.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        src: Tensor,
        dst: Tensor,
        alpha_edge: Tensor | None,
        alpha_loop: Tensor | None,
        bias: Tensor | None,
        how: tuple[AttentionArgs, bool],
    ) -> Tensor:
        att, others, (args, scored) = (src, dst), (alpha_edge, alpha_loop, bias), how
        alphas = ops.attention_scores.default(x, *vectors(x, att)) if scored else att
        out, *for_backward = _attended((x, *alphas, *others), args, any(ctx.needs_input_grad[:5]))
        save(ctx, args, (x, *att, *others), alphas if scored else None, tuple(for_backward))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        args, inputs, alphas, for_backward = saved(ctx)
        needs = ctx.needs_input_grad[:6]
        if torch.is_grad_enabled():  # create_graph=True: use differentiable torch ops.
            run = partial(_composed if alphas is None else _composed_scored, args)
            return *differentiable_gradients(run, inputs, needs, grad), None
        x, *att = inputs[:3]
        scores = inputs[1:3] if alphas is None else alphas
        grads = _gradients((x, *scores, *inputs[3:]), for_backward, args, needs, grad)
        if alphas is not None and any(needs[:3]):
            grad_x, grad_att = ops.attention_scores_backward.default(
                x, *vectors(x, tuple(att)), grads[1], grads[2], grads[0]
            )
            grads[:3] = (
                grad_x,
                *(g.to(a.dtype).view_as(a) for g, a in zip(grad_att, att, strict=True)),
            )
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None


def _attended(
    inputs: tuple[Tensor | None, ...], args: AttentionArgs, training: bool
) -> tuple[Tensor, ...]:
    """The result, and what the backward pass needs of it."""
    (rowptr, col, perm, *_), num_loops, slope, dropout, seed, out_acc = args
    return ops.gat.default(
        rowptr, col, perm, *inputs, seed, num_loops, slope, dropout, training, out_acc
    )


def _gradients(
    inputs: tuple[Tensor | None, ...],
    for_backward: tuple[Tensor, ...],
    args: AttentionArgs,
    needs: tuple[bool, ...],
    grad: Tensor,
) -> list[Tensor | None]:
    """The gradients of :func:`_attended`; of all inputs but the bias if one of them is needed."""
    grads: list[Tensor | None] = [None] * 6
    if any(needs[:5]):
        graph, num_loops, slope, dropout, seed, _ = args
        if graph.t_rowptr is None:
            raise RuntimeError('this graph was made without the transpose that backward needs')
        grads[:5] = ops.gat_backward.default(
            graph.t_rowptr, graph.t_col, graph.t_perm, *inputs[:5], seed, *for_backward, grad,
            num_loops, slope, dropout,
        )  # fmt: skip
    bias = inputs[5]
    if needs[5] and bias is not None:
        grads[5] = column_sums(grad).view_as(bias)
    return grads


def _composed(
    args: AttentionArgs,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    def logits(source: Tensor, row: Tensor, ids: Tensor) -> Tensor:
        sizes = args.graph.num_edges, args.num_loops
        score = _score(alpha_src[source], alpha_dst[row], alpha_edge, alpha_loop, ids, *sizes)
        return leaky(score, args)

    return composed(x, logits, bias, args)


def _composed_scored(
    args: AttentionArgs, x: Tensor, att_src: Tensor, att_dst: Tensor, *others: Tensor | None
) -> Tensor:
    scores = (
        (as_acc(x, x) * as_acc(att, x).view(x.shape[1:])).sum(-1) for att in (att_src, att_dst)
    )
    return _composed(args, x, *scores, *others)


@fake('gat')
def _gat_fake(
    rowptr: Tensor, x: Tensor, training: bool, out_acc: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, heads, channels = rowptr.size(0) - 1, x.size(1), x.size(2)
    acc, saved_rows = acc_dtype(x.dtype), rows if training else 0
    return (
        x.new_empty(rows, heads, channels, dtype=acc if out_acc else x.dtype),
        x.new_empty(saved_rows, heads, channels, dtype=acc),
        x.new_empty(saved_rows, heads, channels, dtype=acc),
        x.new_empty(saved_rows, 2, heads, dtype=acc),
        x.new_empty(saved_rows, heads, dtype=acc),
    )


@fake('gat_backward')
def _gat_backward_fake(
    t_col: Tensor,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    num_loops: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    heads = x.size(1)
    return (
        x.new_empty(x.shape),
        alpha_src.new_empty(x.size(0), heads),
        alpha_src.new_empty(alpha_dst.size(0), heads),
        alpha_src.new_empty(0 if alpha_edge is None else t_col.size(0), heads),
        alpha_src.new_empty(0 if alpha_loop is None else num_loops, heads),
    )


@reference('gat')
def _gat_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    num_loops: int,
    negative_slope: float,
    dropout: float,
    training: bool,
    out_acc: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row, source, ids = edges_and_loops(rowptr, col, perm, num_loops)
    x, num_rows = x.double(), rowptr.size(0) - 1
    ends, sizes = (alpha_src.double()[source], alpha_dst.double()[row]), (col.size(0), num_loops)
    score = _score(*ends, alpha_edge, alpha_loop, ids, *sizes)
    p, softmax = softmax_by_row(leaky_relu(score, negative_slope), row, num_rows)
    message = (p * dropout_factor(seed, ids, x.size(1), dropout)).unsqueeze(-1) * x[source]
    plus = (score > 0).double()
    y = sum_at(message, row, num_rows)
    y_plus = sum_at(message * plus.unsqueeze(-1), row, num_rows)
    out = y if bias is None else y + bias.double().view(x.shape[1:])
    rest = y, y_plus, softmax, sum_at(p * plus, row, num_rows)
    return out, *(rest if training else (t[:0] for t in rest))


@reference('gat_backward')
def _gat_backward_reference(
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    seed: Tensor | None,
    y: Tensor,
    y_plus: Tensor,
    softmax: Tensor,
    mass_plus: Tensor,
    grad: Tensor,
    num_loops: int,
    negative_slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    source, row, ids = edges_and_loops(t_rowptr, t_col, t_perm, num_loops)
    x, grad, num_edges = x.double(), grad.double(), t_col.size(0)
    ends, sizes = (alpha_src.double()[source], alpha_dst.double()[row]), (num_edges, num_loops)
    score = _score(*ends, alpha_edge, alpha_loop, ids, *sizes)
    p = weight_of(leaky_relu(score, negative_slope), softmax, row)
    factor = dropout_factor(seed, ids, x.size(1), dropout)
    mean = (grad * y.double()).sum(-1)
    grad_p = factor * (grad[row] * x[source]).sum(-1)
    grad_score = p * (grad_p - mean[row]) * leaky_slope(score, negative_slope)
    grad_dst = (grad * y_plus.double()).sum(-1) - mean * mass_plus.double()
    grad_edge = sum_at(grad_score, ids, num_edges + num_loops)
    return (
        sum_at((factor * p).unsqueeze(-1) * grad[row], source, x.size(0)),
        sum_at(grad_score, source, x.size(0)),
        (1 - negative_slope) * grad_dst,
        grad_edge[: 0 if alpha_edge is None else num_edges],
        grad_edge[num_edges + num_loops if alpha_loop is None else num_edges :],
    )


def _score(
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None,
    alpha_loop: Tensor | None,
    ids: Tensor,
    num_edges: int,
    num_loops: int,
) -> Tensor:
    """Scores before the leaky ReLU, of every edge and head."""
    score = alpha_src + alpha_dst
    if alpha_edge is None and alpha_loop is None:
        return score
    parts = ((alpha_edge, num_edges), (alpha_loop, num_loops))
    return score + torch.cat([
        score.new_zeros(n, score.size(1)) if a is None else a for a, n in parts
    ])[ids]  # fmt: skip
