"""The symmetric normalisation of a GCN, as factors that the kernel applies."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..ops._library import ops
from ..ops._numbers import acc_dtype
from ..ops.product import product
from ..ops.sampling import sampled_graph
from ..sparse.graph import Graph
from ..sparse.operator import Sampling, SparseOperator
from ._cache import RequestedSize, derive, outside_inference_mode, requested_size
from .graph import graph_of, has_loops


class GCNNorm(NamedTuple):
    r"""A normalised adjacency matrix
    :math:`\mathbf{D} \mathbf{A} \mathbf{D} + \mathbf{E}` with diagonal matrices
    :math:`\mathbf{D}` and :math:`\mathbf{E}` (the self-loops). For weights that require a gradient
    :math:`\mathbf{A}` itself is normalised.

    :obj:`dtype` is the dtype of the given weights (without weights, that of the features).
    """

    operator: SparseOperator
    dtype: torch.dtype | None

    @property
    def is_differentiable(self) -> bool:
        """Whether its entries require a gradient."""
        op = self.operator
        return any(t is not None and t.requires_grad for t in (op.value, op.diag))


class NormRequest(NamedTuple):
    """The normalisation of edges without weights, a :class:`GCNNorm`."""

    size: RequestedSize
    dtype: torch.dtype
    fill_value: float
    loops: str
    flow: str
    sampling: tuple[int, str] | None
    kind: str = 'norm'


class LastLoopRequest(NamedTuple):
    """The position of each node's last self-loop."""

    num_nodes: int
    kind: str = 'last loop'


def normalized(
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
    copy: bool = False,
) -> GCNNorm:
    r"""Normalises an adjacency matrix symmetrically by its in-degrees.

    Without weights it allocates nothing of size :math:`|\mathcal{E}|` except the sorted graph, and
    an :class:`~torch_geometric.EdgeIndex` caches the result. Weights are read at every call.

    Args:
        edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)`.
        num_nodes (int): Number of nodes :math:`N`.
        dtype (torch.dtype): The dtype of the features.
        fill_value (float): Weight of added self-loops. (default: :obj:`1.0`)
        loops (str): :obj:`"remaining"` gives each node one self-loop, with the weight of its last
            self-loop, or :obj:`fill_value` if it has none; :obj:`"replace"` always uses
            :obj:`fill_value`; :obj:`"add"` adds a loop to the existing ones; :obj:`"keep"` adds
            none. (default: :obj:`"remaining"`)
        flow (str): Aggregate at destinations (:obj:`"source_to_target"`) or at sources.
            (default: :obj:`"source_to_target"`)
        transpose (bool): Whether a backward pass will need the transpose.
            (default: :obj:`True`)
        sampling (Sampling, optional): Counts only the sampled edges in degrees. With
            :obj:`"adaptive"`, counts all edges and scales each row to the size of its sample.
            (default: :obj:`None`, all)
        copy (bool): Whether to copy the weights, because the result outlives this call, or its
            backward pass needs their present values. (default: :obj:`False`)
    """
    reverse = flow == 'target_to_source'
    adapts = sampling is not None and sampling.strategy == 'adaptive'
    counted = None if adapts else sampling

    def make() -> GCNNorm:
        graph = graph_of(
            edge_index, num_nodes, num_nodes, transpose=transpose or reverse,
            drop_loops=loops in ('remaining', 'replace'), values=edge_weight is not None or reverse,
        )  # fmt: skip
        graph = graph.t() if reverse else graph
        if edge_weight is None:  # As in PyG, existing self-loops have weight one.
            norm = _unweighted(graph, dtype, None if loops == 'keep' else fill_value, counted)
        else:
            norm = _weighted(
                edge_index, edge_weight, graph, dtype, fill_value, loops, counted, copy
            )
        return _adapted(norm, sampling, dtype) if adapts else norm

    if edge_weight is not None:
        return make()
    if not isinstance(edge_index, EdgeIndex):
        with outside_inference_mode():
            return make()
    size = requested_size(edge_index, num_nodes, num_nodes)
    sampled = None if sampling is None else sampling[:2]
    request = NormRequest(size, dtype, fill_value, loops, flow, sampled)
    return derive(edge_index, request, make, suffices=_has_transpose if transpose else None)


def _has_transpose(norm: GCNNorm) -> bool:
    return norm.operator.graph.t_rowptr is not None


def _inverse_sqrt(degree: Tensor) -> Tensor:
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float('inf'), 0.0)


def _adapted(norm: GCNNorm, sampling: Sampling | None, dtype: torch.dtype) -> GCNNorm:
    r"""Scales the self-loop of a row by :math:`c_i = (d_i + 1) / (\min(d_i, S) + 1)` and the sum of
    its sampled edges by :math:`c_i^{2/3}`: the kernel by :math:`c_i`, `row_scale` by the rest.

    The scale of the sum also multiplies the noise of the sample, hence the smaller exponent. Of
    exponents from 1/2 to 1, 2/3 cost trained networks the least accuracy: benchmarks/accuracy.py.
    """
    assert sampling is not None
    op = norm.operator
    base = sampling.weight(op.graph.rowptr, False, dtype)
    assert base is not None
    damping = base.pow(-1 / 3)
    row_scale = damping if op.row_scale is None else damping * op.row_scale
    diag = None if op.diag is None else base * op.diag
    return norm._replace(operator=op._replace(row_scale=row_scale, diag=diag))


def _unweighted(
    graph: Graph, dtype: torch.dtype, fill_value: float | None, sampling: Sampling | None
) -> GCNNorm:
    degree = graph.rowptr.diff()
    if sampling is not None:
        degree = degree.clamp_(max=sampling.num_samples)
    return by_degree(SparseOperator(graph), degree.to(acc_dtype(dtype)), dtype, fill_value)


def by_degree(
    op: SparseOperator, degree: Tensor, dtype: torch.dtype, fill_value: float | None
) -> GCNNorm:
    """Normalises ones by degrees, with self-loops of :obj:`fill_value` if given."""
    if fill_value is None:
        scale = _inverse_sqrt(degree)
        return GCNNorm(op._replace(row_scale=scale, col_scale=scale), dtype)
    scale = (degree + fill_value).rsqrt_()
    diag = scale * scale * fill_value
    return GCNNorm(op._replace(row_scale=scale, col_scale=scale, diag=diag), dtype)


def _weighted(
    edge_index: Tensor,
    edge_weight: Tensor,
    graph: Graph,
    dtype: torch.dtype,
    fill_value: float,
    loops: str,
    sampling: Sampling | None,
    copy: bool,
) -> GCNNorm:
    weight = edge_weight.to(acc_dtype(dtype))
    if edge_weight.requires_grad and torch.is_grad_enabled():
        return _of_learned(edge_index, edge_weight, graph, weight, fill_value, loops, sampling)
    weight = weight.clone() if copy and weight is edge_weight else weight.detach()
    counted = graph if sampling is None else sampled_graph(graph, sampling)
    last = _last_loop(edge_index, graph.num_dst) if loops == 'remaining' else None
    scale, diag = ops.gcn_scale.default(
        counted.rowptr, counted.perm, weight, last, fill_value, loops != 'keep'
    )
    loop = None if loops == 'keep' else diag
    return GCNNorm(SparseOperator(graph, weight, scale, scale, loop), edge_weight.dtype)


def _of_learned(
    edge_index: Tensor,
    edge_weight: Tensor,
    graph: Graph,
    weight: Tensor,
    fill_value: float,
    loops: str,
    sampling: Sampling | None,
) -> GCNNorm:
    # Differentiable torch ops.
    data = _data_of(edge_index, graph.num_src)
    ones = weight.new_ones(graph.num_src, 1)
    degree = product(SparseOperator(graph, weight, sampling=sampling), ones).view(-1)
    loop = None
    if loops == 'remaining':
        loop = _loop_weights(edge_index, data, weight, graph.num_dst, fill_value)
    elif loops != 'keep':
        loop = weight.new_full((graph.num_dst,), fill_value)
    scale = _inverse_sqrt(degree if loop is None else degree + loop)
    value = scale[data[0]] * weight * scale[data[1]]
    diag = None if loop is None else scale * loop * scale
    return GCNNorm(SparseOperator(graph, value, diag=diag), edge_weight.dtype)


def _data_of(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The plain edges, whose indices are safe for torch's indexing."""
    if isinstance(edge_index, EdgeIndex):
        return edge_index._data.long()
    data = edge_index.long()
    # On CUDA an index out of range is reported later, and must not fail here.
    return data.clamp(0, max(num_nodes - 1, 0)) if data.is_cuda else data


def _last_loop(edge_index: Tensor, num_nodes: int) -> Tensor | None:
    """The position of each node's last self-loop :math:`(N)`, or -1; None if there are no
    self-loops. A prepared graph caches it."""
    if not isinstance(edge_index, EdgeIndex) or torch.compiler.is_compiling():
        return _find_last_loop(_data_of(edge_index, num_nodes), num_nodes)
    if not has_loops(edge_index):
        return None
    return derive(
        edge_index, LastLoopRequest(num_nodes),
        lambda: _find_last_loop(_data_of(edge_index, num_nodes), num_nodes),
    )  # fmt: skip


def _find_last_loop(data: Tensor, num_nodes: int) -> Tensor:
    last = data.new_full((num_nodes,), -1)
    if data.size(1) == 0 or num_nodes == 0:
        return last
    position = torch.arange(data.size(1), device=data.device)
    position = position.masked_fill_(data[0] != data[1], -1)
    return last.scatter_reduce_(0, data[0], position, 'amax')


def _loop_weights(
    edge_index: Tensor, data: Tensor, weight: Tensor, num_nodes: int, fill_value: float
) -> Tensor:
    """The weight of each node's self-loop: that of its last one, if it has any."""
    loop = weight.new_full((num_nodes,), fill_value)
    if data.size(1) == 0 or num_nodes == 0:
        return loop
    last = _last_loop(edge_index, num_nodes)
    if last is None:
        return loop
    loop = torch.where(last >= 0, weight.detach()[last.clamp(min=0)], loop)
    if weight.requires_grad:
        # An assignment's gradient goes to all assigned values, also overwritten ones.
        zero = torch.where(data[0] == data[1], weight - weight.detach(), weight.new_zeros(()))
        loop = loop.index_add(0, data[0], zero)
    return loop
