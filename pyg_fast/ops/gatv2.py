"""The attention of GATv2 in one pass over the edges, and its gradient in two."""

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
from .column_sums import column_sums


def attend_v2(
    x_src: Tensor, x_dst: Tensor, att: Tensor, bias: Tensor | None, args: AttentionArgs
) -> Tensor:
    """The kernel of :func:`gatv2`, unchecked, with a bias :math:`(H C)` of the result's dtype."""
    if x_dst is x_src:  # Dynamo rejects a tensor that is passed twice.
        x_dst = x_dst.view_as(x_dst)
    inputs = x_src, x_dst, att, bias
    return _composed(args, *inputs) if transforms_active() else GATv2.apply(*inputs, args)


class GATv2(torch.autograd.Function):
    """The attention of GATv2; its backward needs the stored sums per node and the transpose."""

    @staticmethod
    def forward(
        ctx: Context,
        x_src: Tensor,
        x_dst: Tensor,
        att: Tensor,
        bias: Tensor | None,
        args: AttentionArgs,
    ) -> Tensor:
        (rowptr, col, perm, *_), num_loops, slope, dropout, seed, out_acc = args
        training = any(ctx.needs_input_grad[:3])
        out, *for_backward = ops.gatv2.default(
            rowptr, col, perm, x_src, x_dst, att, bias, seed, num_loops, slope, dropout, training,
            out_acc,
        )  # fmt: skip
        save(ctx, args, (x_src, x_dst, att, bias), tuple(for_backward))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        args, inputs, (y, softmax) = saved(ctx)
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph=True: use differentiable torch ops.
            return *differentiable_gradients(partial(_composed, args), inputs, needs, grad), None
        grads: list[Tensor | None] = [None] * 4
        if any(needs[:3]):
            graph, num_loops, slope, dropout, seed, _ = args
            if graph.t_rowptr is None:
                raise RuntimeError('this graph was made without the transpose that backward needs')
            *of_features, grad_att = ops.gatv2_backward.default(
                graph.rowptr, graph.col, graph.perm, graph.t_rowptr, graph.t_col, graph.t_perm,
                *inputs[:3], seed, y, softmax, grad, num_loops, slope, dropout,
            )  # fmt: skip
            grads[:3] = *of_features, grad_att.to(inputs[2].dtype).view_as(inputs[2])
        if needs[3]:
            grads[3] = column_sums(grad).view_as(inputs[3])
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None


def _composed(
    args: AttentionArgs, x_src: Tensor, x_dst: Tensor, att: Tensor, bias: Tensor | None
) -> Tensor:
    def logits(source: Tensor, row: Tensor, ids: Tensor) -> Tensor:
        src, dst, weight = (as_acc(t, x_src) for t in (x_src, x_dst, att))
        return (leaky(src[source] + dst[row], args) * weight.view(src.shape[1:])).sum(-1)

    return composed(x_src, logits, bias, args)


@fake('gatv2')
def _gatv2_fake(
    rowptr: Tensor, x: Tensor, training: bool, out_acc: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, heads, channels = rowptr.size(0) - 1, x.size(1), x.size(2)
    acc, saved_rows = acc_dtype(x.dtype), rows if training else 0
    return (
        x.new_empty(rows, heads, channels, dtype=acc if out_acc else x.dtype),
        x.new_empty(saved_rows, heads, channels, dtype=acc),
        x.new_empty(saved_rows, 2, heads, dtype=acc),
    )


@fake('gatv2_backward')
def _gatv2_backward_fake(x: Tensor, x_dst: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(x_dst.shape),
        y.new_empty(x.size(1), x.size(2)),
    )


@reference('gatv2')
def _gatv2_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    num_loops: int,
    negative_slope: float,
    dropout: float,
    training: bool,
    out_acc: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    row, source, ids = edges_and_loops(rowptr, col, perm, num_loops)
    x, num_rows = x.double(), rowptr.size(0) - 1
    hidden = leaky_relu(x[source] + x_dst.double()[row], negative_slope)
    p, softmax = softmax_by_row((att.double().view(x.shape[1:]) * hidden).sum(-1), row, num_rows)
    weight = p * dropout_factor(seed, ids, x.size(1), dropout)
    y = sum_at(weight.unsqueeze(-1) * x[source], row, num_rows)
    out = y if bias is None else y + bias.double().view(x.shape[1:])
    return (out, y, softmax) if training else (out, y[:0], softmax[:0])


@reference('gatv2_backward')
def _gatv2_backward_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    x: Tensor,
    x_dst: Tensor,
    att: Tensor,
    seed: Tensor | None,
    y: Tensor,
    softmax: Tensor,
    grad: Tensor,
    num_loops: int,
    negative_slope: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    row, source, ids = edges_and_loops(rowptr, col, perm, num_loops)
    x, x_dst, grad = x.double(), x_dst.double(), grad.double()
    att = att.double().view(x.shape[1:])
    score = x[source] + x_dst[row]
    hidden = leaky_relu(score, negative_slope)
    p = weight_of((att * hidden).sum(-1), softmax, row)
    factor = dropout_factor(seed, ids, x.size(1), dropout)
    mean = (grad * y.double()).sum(-1)
    grad_logit = p * (factor * (grad[row] * x[source]).sum(-1) - mean[row])
    grad_hidden = grad_logit.unsqueeze(-1) * leaky_slope(score, negative_slope)
    grad_message = (factor * p).unsqueeze(-1) * grad[row] + att * grad_hidden
    return (
        sum_at(grad_message, source, x.size(0)),
        att * sum_at(grad_hidden, row, x_dst.size(0)),
        (grad_logit.unsqueeze(-1) * hidden).sum(0),
    )
