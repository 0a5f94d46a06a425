"""The symmetric normalisation of a GCN, as factors that the kernel applies on its way."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..ops.graph import Graph, cache_of, graph_of, kept, num_loops
from ..ops.sampled_spmm import Sampling, sampled_sum
from ..ops.spmm import acc_dtype, reduce_sum


class GCNNorm(NamedTuple):
    r"""A normalised adjacency matrix
    :math:`\mathbf{D} \mathbf{A} \mathbf{D} + \mathbf{E}` with diagonal matrices
    :math:`\mathbf{D}` and :math:`\mathbf{E}` (the self-loops).

    Shapes:
        - **value:** entries of :math:`\mathbf{A}` :math:`(|\mathcal{E}|)`, :obj:`None` for ones
        - **scale:** :math:`\mathbf{D}`: :math:`(N)`, :obj:`None` for ones
        - **diag:** :math:`\mathbf{E}`: :math:`(N)`, :obj:`None` for zeros

    :obj:`dtype` is the type that the weights were given in (without weights, that of the
    features), whatever type they are kept in.
    """

    graph: Graph
    value: Tensor | None
    scale: Tensor | None
    diag: Tensor | None
    dtype: torch.dtype | None


def gcn_norm(
    edge_index: Tensor,
    edge_weight: Tensor | None,
    num_nodes: int,
    dtype: torch.dtype,
    *,
    fill_value: float = 1.0,
    loops: str = 'remaining',
    flow: str = 'source_to_target',
    transpose: bool = True,
    sampling: Sampling | None = None,
) -> GCNNorm:
    r"""Normalises an adjacency matrix symmetrically by its in-degrees.

    Without weights nothing of size :math:`|\mathcal{E}|` is made beside the sorted graph. For an
    :class:`~torch_geometric.EdgeIndex` the result is kept on it as long as its weights (which must
    not require a gradient for it) stay the same by torch's version counter, which does not see
    edits through :obj:`.data`.

    Args:
        edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)`.
        num_nodes (int): Number of nodes :math:`N`.
        dtype (torch.dtype): The type of the features.
        fill_value (float): Weight of added self-loops. (default: :obj:`1.0`)
        loops (str): :obj:`"remaining"` gives each node one self-loop, with the last weight that it
            already had, else :obj:`fill_value`; :obj:`"replace"` takes :obj:`fill_value` in any
            case; :obj:`"add"` adds a loop to those that there are; :obj:`"keep"` changes nothing.
            (default: :obj:`"remaining"`)
        flow (str): Aggregate at destinations (:obj:`"source_to_target"`) or at sources.
            (default: :obj:`"source_to_target"`)
        transpose (bool): Whether a backward pass will need the transpose.
            (default: :obj:`True`)
        sampling (Sampling, optional): Degrees count those edges alone that it takes.
            (default: :obj:`None`, all)
    """
    reverse = flow == 'target_to_source'

    def make() -> GCNNorm:
        graph = graph_of(
            edge_index, num_nodes, num_nodes,
            transpose=transpose or reverse, drop_loops=loops in ('remaining', 'replace'),
        )  # fmt: skip
        graph = graph.t() if reverse else graph
        if edge_weight is None:
            # As PyG has it: loops that are there already all have weight one.
            return _unweighted(graph, dtype, None if loops == 'keep' else fill_value, sampling)
        return _weighted(
            edge_index, edge_weight, graph, dtype, fill_value, loops, reverse, sampling
        )

    differentiable = (
        edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled()
    )
    if not isinstance(edge_index, EdgeIndex) or differentiable:
        return make()
    sampled = None if sampling is None else sampling[:2]
    key = ('gcn_norm', num_nodes, dtype, fill_value, loops, flow, edge_weight is None, sampled)
    if torch.compiler.is_compiling():
        norm = kept(edge_index, key) if edge_weight is None else None
        if norm is None or (transpose and norm.graph.t_rowptr is None):
            return make()
        return norm
    cache = cache_of(edge_index)
    if edge_weight is None:
        if key not in cache or (transpose and cache[key].graph.t_rowptr is None):
            with torch.inference_mode(False):  # It may serve a training step later.
                cache[key] = make()
        return cache[key]
    if edge_weight.is_inference():
        return make()
    of = (edge_weight, edge_weight._version)
    if key in cache and cache[key][0][0] is of[0] and cache[key][0][1] == of[1]:
        norm = cache[key][1]
        if not transpose or norm.graph.t_rowptr is not None:
            return norm
    with torch.inference_mode(False), torch.no_grad():
        norm = make()
    cache[key] = (of, norm)
    return norm


def _inverse_sqrt(degree: Tensor) -> Tensor:
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float('inf'), 0.0)


def _unweighted(
    graph: Graph, dtype: torch.dtype, fill_value: float | None, sampling: Sampling | None
) -> GCNNorm:
    degree = graph.rowptr.diff()
    if sampling is not None:
        degree = degree.clamp_(max=sampling.num_samples)
    degree = degree.to(acc_dtype(dtype))
    if fill_value is None:
        return GCNNorm(graph, None, _inverse_sqrt(degree), None, dtype)
    scale = (degree + fill_value).rsqrt_()
    return GCNNorm(graph, None, scale, scale * scale * fill_value, dtype)


def _weighted(
    edge_index: Tensor,
    edge_weight: Tensor,
    graph: Graph,
    dtype: torch.dtype,
    fill_value: float,
    loops: str,
    reverse: bool,
    sampling: Sampling | None,
) -> GCNNorm:
    data = edge_index._data if isinstance(edge_index, EdgeIndex) else edge_index
    data = data.long()
    weight = edge_weight.to(acc_dtype(dtype))
    ones = weight.new_ones(graph.num_src, 1)
    if sampling is None:
        degree = reduce_sum(graph, ones, weight).view(-1)
    else:
        degree = sampled_sum(graph, sampling, ones, weight).view(-1)
    loop = None
    if loops == 'remaining':
        loop = _loop_weights(edge_index, data, weight, graph.num_dst, fill_value)
    elif loops != 'keep':
        loop = weight.new_full((graph.num_dst,), fill_value)
    scale = _inverse_sqrt(degree if loop is None else degree + loop)
    value = scale[data[0]] * weight * scale[data[1]]
    diag = None if loop is None else scale * loop * scale
    return GCNNorm(graph, value, None, diag, edge_weight.dtype)


def _loop_weights(
    edge_index: Tensor, data: Tensor, weight: Tensor, num_nodes: int, fill_value: float
) -> Tensor:
    """The weight of each node's self-loop: that of the last one that is there, if any is."""
    loop = weight.new_full((num_nodes,), fill_value)
    compiling = torch.compiler.is_compiling()
    if data.size(1) == 0 or num_nodes == 0:
        return loop
    if isinstance(edge_index, EdgeIndex) and not compiling and num_loops(edge_index) == 0:
        return loop
    is_loop = data[0] == data[1]
    position = torch.arange(data.size(1), device=data.device).masked_fill_(~is_loop, -1)
    last = data.new_full((num_nodes,), -1).scatter_reduce_(0, data[0], position, 'amax')
    loop = torch.where(last >= 0, weight.detach()[last.clamp(min=0)], loop)
    if weight.requires_grad:
        # The gradient of an assignment goes to all that were assigned, overwritten ones too.
        zero = torch.where(is_loop, weight - weight.detach(), weight.new_zeros(()))
        loop = loop.index_add(0, data[0], zero)
    return loop
