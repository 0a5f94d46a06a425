"""Aggregation over a graph: sum, mean, max and min, with every gradient."""

import torch
from torch import Tensor

from ..ops._checks import check_edge_weight, check_features
from ..ops.product import product
from ..ops.spmm_max import reduce_max
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ._arguments import checked_graph

REDUCE = ('sum', 'add', 'mean', 'max', 'min')


def spmm(
    graph: Graph | Tensor,
    x: Tensor,
    edge_weight: Tensor | None = None,
    reduce: str = 'sum',
) -> Tensor:
    r"""Aggregates the features of each node's in-neighbours.

    .. math::
        \mathbf{y}_i = \bigoplus_{e = (j, i) \in \mathcal{E}} w_e \cdot \mathbf{x}_j

    Differentiable in :obj:`x` and :obj:`edge_weight`, any number of times. Sums of float16 and
    bfloat16 run in float32. No tensor of size :math:`|\mathcal{E}| \times F` is allocated.
    Results are bitwise reproducible, except where CUDA adds atomically: in the gradient of
    :obj:`"max"`/:obj:`"min"` to :obj:`x`, unless :func:`torch.use_deterministic_algorithms` is on
    or the source has more than 16,384 edges in a graph of more than 65,536, and in sums over a
    graph with atomic groups.

    Args:
        graph (EdgeIndex, Tensor or Graph): A graph prepared by
            :class:`~pyg_fast.transforms.ToCSR`; or a plain :obj:`edge_index`
            :math:`(2, |\mathcal{E}|)` of a square graph on the rows of :obj:`x`, sorted at every
            call; or an :class:`~pyg_fast.graph.Graph`.
        x (Tensor): Features of the source nodes :math:`(N_{src}, F)`, float32, float64,
            float16 or bfloat16.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the dtype of :obj:`x`,
            in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`), :obj:`"mean"`, :obj:`"max"` or
            :obj:`"min"`. :obj:`"mean"` divides by the number of edges. A node without edges gets
            zeros. If several edges reach the maximum, the first gets the gradient.
            (default: :obj:`"sum"`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`.

    Raises:
        TypeError: If a dtype is not supported, or differs between :obj:`x` and
            :obj:`edge_weight`.
        ValueError: If a shape or device does not fit, or :obj:`reduce` is unknown.
        IndexError: If the graph holds a node that :obj:`x` does not have.
    """
    if reduce not in REDUCE:
        raise ValueError(f"'reduce' must be one of {REDUCE}, got {reduce!r}")
    check_features(x, 'x')
    transpose = torch.is_grad_enabled() and x.requires_grad
    values = edge_weight is not None or reduce in ('max', 'min')
    graph = checked_graph(graph, x, 'x', transpose, values)
    if edge_weight is not None:
        check_edge_weight(edge_weight, x, graph.num_edges)
    if reduce in ('max', 'min'):
        return reduce_max(graph, x, edge_weight, reduce == 'min')
    return product(SparseOperator(graph, edge_weight, mean=reduce == 'mean'), x)
