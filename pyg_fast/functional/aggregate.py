"""Sum aggregation, either over a sorted graph or by scattering over unsorted edges."""

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..graph.graph import graph_of
from ..graph.prepared_graph import list_of
from ..ops._checks import check_device, check_edge_weight, check_features
from ..ops._edges import check_edge_index
from ..ops._numbers import check_number
from ..ops.aggregate import scatter_sum, sorting_pays
from ..ops.product import product
from ..sparse.graph import Graph, check_graph
from ..sparse.operator import SparseOperator

MODES = ('auto', 'reduce', 'scatter')


def aggregate(
    graph: Graph | Tensor,
    x: Tensor,
    edge_weight: Tensor | None = None,
    mode: str = 'auto',
    num_dst: int | None = None,
) -> Tensor:
    r"""Sums the features of each node's in-neighbours in one of the two ways of the `"fuseGNN:
    Accelerating Graph Convolutional Neural Network Training on GPGPU"
    <https://doi.org/10.1145/3400302.3415610>`_ paper (ICCAD 2020).

    .. math::
        \mathbf{y}_i = \sum_{e = (j, i) \in \mathcal{E}} w_e \cdot \mathbf{x}_j

    Gather-apply-reduce sums over the edges of each destination and needs a sorted graph.
    Gather-apply-scatter reads the edges in the given order, adds each to its destination, and
    needs no conversion. Differentiable in :obj:`x` and :obj:`edge_weight`, any number of times.
    Sums of float16 and bfloat16 run in float32. No tensor of size :math:`|\mathcal{E}| \times F`
    is allocated.

    On CUDA scattering adds atomically: the last bits of its results vary from run to run. With
    :func:`torch.use_deterministic_algorithms` every mode sorts. All other results are bitwise
    reproducible.

    Args:
        graph (EdgeIndex, Tensor or Graph): A plain :obj:`edge_index` :math:`(2, |\mathcal{E}|)`
            of any integer type; or a graph prepared by :class:`~pyg_fast.transforms.ToCSR`; or an
            :class:`~pyg_fast.graph.Graph`, which cannot be scattered over.
        x (Tensor): Features of the source nodes :math:`(N_{src}, F)`, float32, float64,
            float16 or bfloat16.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the dtype of :obj:`x`,
            in the order of the edges. (default: :obj:`None`, all one)
        mode (str): :obj:`"reduce"`, :obj:`"scatter"`, or :obj:`"auto"`: reduce over a prepared
            graph, and over a plain :obj:`edge_index` with enough edges that sorting pays off.
            (default: :obj:`"auto"`)
        num_dst (int, optional): Number of destination nodes. (default: :obj:`None`, as in the
            graph, or the number of sources)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`.

    Raises:
        TypeError: If a dtype is not supported, or differs between :obj:`x` and
            :obj:`edge_weight`.
        ValueError: If a shape, size or device does not fit, :obj:`mode` is unknown, or
            :obj:`"scatter"` is used with an :class:`~pyg_fast.graph.Graph`.
        IndexError: If an edge names a node that does not exist; on CUDA the next call raises it,
            see :func:`to_csr`. Memory is never accessed out of bounds.
    """
    if mode not in MODES:
        raise ValueError(f"'mode' must be one of {MODES}, got {mode!r}")
    check_features(x, 'x')
    if isinstance(graph, Graph):
        if mode == 'scatter':
            raise ValueError("'graph' must be an edge_index for mode='scatter', got a Graph")
        check_graph(graph, edge_weight is not None)
        check_device(graph.col, x, 'graph')
        num_edges = graph.num_edges
        size: tuple[int | None, int | None] = graph.num_src, graph.num_dst
    else:
        check_edge_index(graph)
        check_device(graph, x, 'graph')
        num_edges, size = graph.size(1), getattr(graph, '_sparse_size', (None, None))
    num_src, num_dst = x.size(0), _num_dst(size, x, num_dst)
    if edge_weight is not None:
        check_edge_weight(edge_weight, x, num_edges)
    if isinstance(graph, Graph):
        return product(SparseOperator(graph, edge_weight), x)
    if mode == 'auto':
        prepared = isinstance(graph, EdgeIndex)
        sort = prepared or sorting_pays(num_edges, x.size(1), x.is_cuda)
        mode = 'reduce' if sort else 'scatter'
    if mode == 'reduce':
        transpose = torch.is_grad_enabled() and x.requires_grad
        graph = graph_of(
            graph, num_src, num_dst, transpose=transpose, values=edge_weight is not None
        )
        return product(SparseOperator(graph, edge_weight), x)
    return scatter_sum(list_of(graph), x, edge_weight, num_dst)


def _num_dst(size: tuple[int | None, int | None], x: Tensor, num_dst: int | None) -> int:
    """The number of destinations, if the features fit what is known of the size of a graph."""
    if size[0] is not None and size[0] != x.size(0):
        raise ValueError(
            f"'x' must have one row for each of the {size[0]} source nodes, got {list(x.shape)}"
        )
    if num_dst is None:
        return x.size(0) if size[1] is None else size[1]
    check_number('num_dst', num_dst)
    if size[1] is not None and size[1] != num_dst:
        raise ValueError(f"'num_dst' must be {size[1]} as the graph has it, got {num_dst}")
    return num_dst
