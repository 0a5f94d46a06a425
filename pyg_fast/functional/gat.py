"""Graph attention in one pass over the edges."""

import torch
from torch import Tensor

from ..ops._attention import as_acc
from ..ops._checks import check_device
from ..ops._numbers import acc_dtype
from ..ops.gat import attend
from ..sparse.graph import Graph
from ._attention import attention_args, check_heads


def gat(
    graph: Graph | Tensor,
    x: Tensor,
    alpha_src: Tensor,
    alpha_dst: Tensor,
    alpha_edge: Tensor | None = None,
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    add_self_loops: bool = False,
    seed: Tensor | None = None,
) -> Tensor:
    r"""Aggregates the features of each node's in-neighbours by attention, as in the `"Graph
    Attention Networks" <https://arxiv.org/abs/1710.10903>`_ paper.

    .. math::
        \mathbf{y}_i^h = \sum_{e = (j, i)} m_e^h p_e^h \mathbf{x}_j^h, \quad
        p_e^h = \mathrm{softmax}_{e \to i} \, \mathrm{LeakyReLU}
        \left( a_j^h + b_i^h + c_e^h \right)

    with :math:`a` = :obj:`alpha_src`, :math:`b` = :obj:`alpha_dst`, :math:`c` = :obj:`alpha_edge`
    and dropout :math:`m`. One kernel computes scores, softmax, dropout and aggregation, as proposed
    by the `"fuseGNN" <https://dl.acm.org/doi/10.1145/3400302.3415610>`_ paper. The backward pass
    recomputes the weights from a maximum and a sum per node and head. Nothing of size
    :math:`|\mathcal{E}| \times H` is allocated unless :obj:`alpha_edge` is given.

    The running maximum is subtracted before the exponential. Exponentials and sums are float32 for
    float16 and bfloat16. A node without edges gets zeros. The dropout of an edge depends only on
    the seed, the position of the edge and the head. Differentiable in all four tensors, any number
    of times (second derivatives use tensors of size :math:`|\mathcal{E}| \times H \times C`).
    Results and gradients are bitwise reproducible.

    Args:
        graph (EdgeIndex, Tensor or Graph): A graph prepared by
            :class:`~pyg_fast.transforms.ToCSR`; or a plain :obj:`edge_index`
            :math:`(2, |\mathcal{E}|)`, sorted at every call; or a :class:`~pyg_fast.graph.Graph`.
        x (Tensor): Features of the source nodes :math:`(N_{src}, H, C)`, float32, float64,
            float16 or bfloat16.
        alpha_src (Tensor): Scores of the source nodes :math:`(N_{src}, H)`, of the dtype of
            :obj:`x`, or float32 for float16 and bfloat16.
        alpha_dst (Tensor): Scores of the destination nodes :math:`(N_{dst}, H)`, same dtypes.
        alpha_edge (Tensor, optional): Scores of the edges :math:`(|\mathcal{E}|, H)`, same dtypes.
            (default: :obj:`None`, all zero)
        negative_slope (float): Slope of the leaky ReLU below zero. (default: :obj:`0.2`)
        dropout (float): Probability :math:`p` that a weight is dropped; the others are divided by
            :math:`1 - p`. (default: :obj:`0.0`)
        add_self_loops (bool): Removes self-loops, and adds one with edge score zero to each node
            :math:`i < \min(N_{src}, N_{dst})`. Not for a
            :class:`~pyg_fast.graph.Graph`. (default: :obj:`False`)
        seed (Tensor, optional): Seed of dropout, int64 of shape :math:`(1)`, on the device of
            :obj:`x`. (default: :obj:`None`, drawn from torch's generator)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, H, C)`.

    Raises:
        TypeError: If a dtype is not supported, or does not fit that of :obj:`x`.
        ValueError: If a shape or device does not fit, or :obj:`dropout` is not from 0 to 1.
        IndexError: If the graph holds a node without scores.
    """
    check_heads(x, 'x')
    _check_scores(alpha_src, 'alpha_src', x.size(0), x)
    _check_scores(alpha_dst, 'alpha_dst', None, x)
    if alpha_edge is not None:
        check_heads(alpha_edge, 'alpha_edge', (None, x.size(1)))
    inputs = (x, alpha_src, alpha_dst, alpha_edge)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    args = attention_args(
        graph, x, alpha_dst.size(0), negative_slope, dropout, add_self_loops, seed, needs_grad
    )
    if alpha_edge is not None:
        _check_scores(alpha_edge, 'alpha_edge', args.graph.num_edges, x)
        alpha_edge = as_acc(alpha_edge, x)
    return attend(x, as_acc(alpha_src, x), as_acc(alpha_dst, x), alpha_edge, None, None, args)


def _check_scores(alpha: Tensor, name: str, rows: int | None, x: Tensor) -> None:
    check_heads(alpha, name, (rows, x.size(1)))
    if alpha.dtype not in (x.dtype, acc_dtype(x.dtype)):
        raise TypeError(f"'{name}' must be {x.dtype} as 'x' is, got {alpha.dtype}")
    check_device(alpha, x, name)
