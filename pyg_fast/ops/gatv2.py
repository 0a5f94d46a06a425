"""The attention of GATv2 in one pass over the edges, and its gradient in two."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ._attention import Setting, again, as_acc, check_heads, composed, leaky, setting_of
from ._library import ops
from ._saved import save, saved
from ._transforms import transforms_active
from .graph import Graph
from .spmm import check_device


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
    :obj:`att` and dropout :math:`m`. Scores, softmax, dropout and aggregation are one kernel; the
    backward pass works scores out again, once over the graph and once over its transpose. Nothing
    of the size of the edges is made.

    The running maximum is subtracted before exponentials are taken, which with all sums are
    float32 for halves. A node without edges gets zeros. Dropout of an edge depends on nothing but
    the seed, the position of the edge and the head. Differentiable in all three tensors, any number
    of times (the second time with tensors of size :math:`|\mathcal{E}| \times H \times C`).
    Results and gradients are the same bits every time; those of :obj:`att` on a CPU depend on the
    number of threads.

    Args:
        graph (EdgeIndex, Tensor or Graph): A graph prepared by
            :class:`~pyg_fast.transforms.ToCSR`; or a plain :obj:`edge_index`
            :math:`(2, |\mathcal{E}|)`, sorted at every call; or a :class:`~pyg_fast.ops.Graph`.
        x_src (Tensor): Features of the source nodes :math:`(N_{src}, H, C)`, of type float32,
            float64, float16 or bfloat16.
        x_dst (Tensor): Features of the destination nodes :math:`(N_{dst}, H, C)`, of the same type.
        att (Tensor): Attention vectors :math:`(H, C)`, of the same type.
        negative_slope (float): Slope of the leaky ReLU below zero. (default: :obj:`0.2`)
        dropout (float): Probability that a weight is dropped; the others are divided by one less
            this. (default: :obj:`0.0`)
        add_self_loops (bool): Leaves out edges from a node to itself, and gives each node
            :math:`i < \min(N_{src}, N_{dst})` one. Not for a :class:`~pyg_fast.ops.Graph`.
            (default: :obj:`False`)
        seed (Tensor, optional): Seed of dropout, int64 of shape :math:`(1)`, on the device of
            :obj:`x_src`. (default: :obj:`None`, the next of torch's generator)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, H, C)`.

    Raises:
        TypeError: If a type is not supported, or differs from that of :obj:`x_src`.
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
    setting = setting_of(
        graph, x_src, x_dst.size(0), negative_slope, dropout, add_self_loops, seed, needs_grad
    )
    return attend_v2(*inputs, None, setting)


def attend_v2(
    x_src: Tensor, x_dst: Tensor, att: Tensor, bias: Tensor | None, setting: Setting
) -> Tensor:
    """The kernel behind :func:`gatv2`, unchecked, with a bias :math:`(H C)` of the type of the
    result."""
    if x_dst is x_src:  # Dynamo refuses a tensor that is given twice.
        x_dst = x_dst.view_as(x_dst)
    inputs = x_src, x_dst, att, bias
    return _composed(setting, *inputs) if transforms_active() else GATv2.apply(*inputs, setting)


class GATv2(torch.autograd.Function):
    """The attention of GATv2; its backward needs the sums per node that forward keeps, and the
    transpose."""

    @staticmethod
    def forward(
        ctx: Any,
        x_src: Tensor,
        x_dst: Tensor,
        att: Tensor,
        bias: Tensor | None,
        setting: Setting,
    ) -> Tensor:
        (rowptr, col, perm, *_), num_loops, slope, dropout, seed, out_acc = setting
        training = any(ctx.needs_input_grad[:3])
        out, *kept = ops.gatv2.default(
            rowptr, col, perm, x_src, x_dst, att, bias, seed, num_loops, slope, dropout, training,
            out_acc,
        )  # fmt: skip
        save(ctx, setting, (x_src, x_dst, att, bias), tuple(kept))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        setting, inputs, (y, lse) = saved(ctx)
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph=True: in ops that torch differentiates.
            return *again(partial(_composed, setting), inputs, needs, grad), None
        grads: list[Tensor | None] = [None] * 4
        if any(needs[:3]):
            graph, num_loops, slope, dropout, seed, _ = setting
            if graph.t_rowptr is None:
                raise RuntimeError('this graph was made without the transpose that backward needs')
            *of_features, grad_att = ops.gatv2_backward.default(
                graph.rowptr, graph.col, graph.perm, graph.t_rowptr, graph.t_col, graph.t_perm,
                *inputs[:3], seed, y, lse, grad, num_loops, slope, dropout,
            )  # fmt: skip
            grads[:3] = *of_features, grad_att.to(inputs[2].dtype).view_as(inputs[2])
        if needs[3]:
            grads[3] = grad.sum(0).view_as(inputs[3])
        return *(g if need else None for g, need in zip(grads, needs, strict=True)), None


def _composed(
    setting: Setting, x_src: Tensor, x_dst: Tensor, att: Tensor, bias: Tensor | None
) -> Tensor:
    def logits(source: Tensor, row: Tensor, ids: Tensor) -> Tensor:
        src, dst, weight = (as_acc(t, x_src) for t in (x_src, x_dst, att))
        return (leaky(src[source] + dst[row], setting) * weight.view(src.shape[1:])).sum(-1)

    return composed(x_src, logits, bias, setting)
