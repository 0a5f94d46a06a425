"""The attention of GATv2 in one pass over the edges, and its gradient in two."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ..graph.structure import Graph
from ._attention import (
    AttentionArgs,
    as_acc,
    attention_args,
    check_heads,
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
from ._checks import check_device
from ._library import fake, ops, reference
from ._numbers import acc_dtype
from ._saved import save, saved
from ._transforms import transforms_active
from .column_sums import column_sums


def gatv2(
    graph: Graph | Tensor,
    x_src: Tensor,
    x_dst: Tensor,
    att: Tensor,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    add_self_loops: bool = False,
    seed: Tensor | None = None,
) -> Tensor:
    r"""Aggregates the features of each node's in-neighbours by attention, as in the `"How Attentive
    are Graph Attention Networks?" <https://arxiv.org/abs/2105.14491>`_ paper.

    .. math::
        \mathbf{y}_i^h = \sum_{e = (j, i)} m_e^h p_e^h \mathbf{x}_j^h, \quad
        p_e^h = \mathrm{softmax}_{e \to i} \left( \mathbf{a}^{h \top} \, \mathrm{LeakyReLU}
        \left( \mathbf{x}_j^h + \mathbf{z}_i^h \right) \right)

    with :math:`\mathbf{x}` = :obj:`x_src`, :math:`\mathbf{z}` = :obj:`x_dst`, :math:`\mathbf{a}` =
    :obj:`att` and dropout :math:`m`. One kernel computes scores, softmax, dropout and aggregation;
    the backward pass recomputes the scores, once over the graph and once over its transpose.
    Nothing of the size of the edges is allocated.

    The running maximum is subtracted before the exponential. Exponentials and sums are float32 for
    float16 and bfloat16. A node without edges gets zeros. The dropout of an edge depends only on
    the seed, the position of the edge and the head. Differentiable in all three tensors, any number
    of times (second derivatives use tensors of size :math:`|\mathcal{E}| \times H \times C`).
    Results and gradients are bitwise reproducible.

    Args:
        graph (EdgeIndex, Tensor or Graph): A graph prepared by
            :class:`~pyg_fast.transforms.ToCSR`; or a plain :obj:`edge_index`
            :math:`(2, |\mathcal{E}|)`, sorted at every call; or a :class:`~pyg_fast.graph.Graph`.
        x_src (Tensor): Features of the source nodes :math:`(N_{src}, H, C)`, float32,
            float64, float16 or bfloat16.
        x_dst (Tensor): Features of the destination nodes :math:`(N_{dst}, H, C)`, same dtype.
        att (Tensor): Attention vectors :math:`(H, C)`, same dtype.
        negative_slope (float): Slope of the leaky ReLU below zero. (default: :obj:`0.2`)
        dropout (float): Probability :math:`p` that a weight is dropped; the others are divided by
            :math:`1 - p`. (default: :obj:`0.0`)
        add_self_loops (bool): Removes self-loops, and adds one to each node
            :math:`i < \min(N_{src}, N_{dst})`. Not for a :class:`~pyg_fast.graph.Graph`.
            (default: :obj:`False`)
        seed (Tensor, optional): Seed of dropout, int64 of shape :math:`(1)`, on the device of
            :obj:`x_src`. (default: :obj:`None`, drawn from torch's generator)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, H, C)`.

    Raises:
        TypeError: If a dtype is not supported, or differs from that of :obj:`x_src`.
        ValueError: If a shape or device does not fit, or :obj:`dropout` is not from 0 to 1.
        IndexError: If the graph holds a node without features.
    """
    check_heads(x_src, 'x_src')
    heads, channels = x_src.shape[1:]
    check_heads(x_dst, 'x_dst', (None, heads, channels))
    check_heads(att, 'att', (heads, channels))
    for t, name in ((x_dst, 'x_dst'), (att, 'att')):
        if t.dtype != x_src.dtype:
            raise TypeError(f"'{name}' must be {x_src.dtype} as 'x_src' is, got {t.dtype}")
        check_device(t, x_src, name, 'x_src')
    inputs = (x_src, x_dst, att)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
    args = attention_args(
        graph, x_src, x_dst.size(0), negative_slope, dropout, add_self_loops, seed, needs_grad
    )
    return attend_v2(*inputs, None, args)


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
        ctx: Any,
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
