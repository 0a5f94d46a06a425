"""The attention of GATv2 in one pass over the edges."""

import torch
from torch import Tensor

from ..ops._checks import check_device
from ..ops.gatv2 import attend_v2
from ..sparse.graph import Graph
from ._attention import attention_args, check_heads


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
