"""Shared by layers whose messages are the neighbours' features: PyG's aggregations of them."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import (
    Aggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.nn.aggr.scaler import DegreeScalerAggregation
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from ..graph._cache import RequestedSize, derive, requested_size
from ..graph.graph import graph_of
from ..graph.prepared_graph import has_list
from ..graph.small_graphs import has_few_edges, reason_of
from ..ops._checks import check_device
from ..ops._numbers import acc_dtype
from ..ops.cbsr import CBSR
from ..ops.linear_product import LinearAggregation, Plan
from ..ops.product import needs_transpose, product
from ..ops.spmm_max import reduce_max
from ..ops.spmm_var import reduce_var
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator, inverse_degree
from . import _direct
from ._aggregated import AggregatesInput, InputPlan
from ._checks import may_fuse, why_not_reduction
from ._modules import part_of

# What a layer takes: the features of all nodes, or those of sources and of destinations.
Features: TypeAlias = Tensor | CBSR | tuple[Tensor | CBSR, Tensor | CBSR | None]

_MEANS = (MeanAggregation, VarAggregation, StdAggregation, PowerMeanAggregation)


def source_of(x: Features) -> Tensor | CBSR:
    """The features of the sources: the input, or the first of a pair."""
    return x if isinstance(x, (Tensor, CBSR)) else x[0]


def with_values(x: CBSR, values: Tensor) -> CBSR:
    """Other entries at the same columns."""
    return CBSR._of(values, x.columns, x.num_columns)


def plus(out: Tensor, x: CBSR) -> Tensor:
    """A sum with a sparse operand; allocates one matrix."""
    dense = x.to_dense()
    wide = torch.promote_types(dense.dtype, out.dtype) != dense.dtype
    return dense + out if wide else dense.add_(out)


class MeanRequest(NamedTuple):
    """The mean over neighbours, an operator, or its factors: :obj:`kind="inverse degree"`."""

    size: RequestedSize
    dtype: torch.dtype  # of sums
    flow: str
    kind: str = 'mean'


class Neighbours(NamedTuple):
    """Checked input of a layer: :obj:`edge_index`, or :obj:`part` of it, sends the rows of
    :obj:`source` to :obj:`num_dst` nodes, whose own features are :obj:`root`."""

    source: Tensor | CBSR
    root: Tensor | CBSR | None
    edge_index: Adj  # None on a path that stands alone
    num_dst: int
    flow: str
    part: Graph | None = None

    def graph(self, transpose: bool, values: bool = False, num_src: int | None = None) -> Graph:
        """The graph, with its transpose if a backward pass will need it; :obj:`values` as in
        :func:`~pyg_fast.graph.graph_of`. It has a source per row of the features unless
        :obj:`num_src` is given."""
        if self.part is not None:
            return self.part
        num_src, reverse = self.source.size(0) if num_src is None else num_src, self.is_reverse
        graph = graph_of(
            self.edge_index, num_src, self.num_dst, transpose=transpose or reverse,
            values=values or reverse,
        )  # fmt: skip
        return graph.t() if reverse else graph

    @property
    def is_reverse(self) -> bool:
        """Whether messages go from destinations to sources."""
        return self.flow == 'target_to_source'

    def sum(self, mean: bool = False, diag: Tensor | None = None, out_acc: bool = False) -> Tensor:
        """The sum (or mean) of the neighbours' features, and a multiple of the node's own."""
        x = self.source
        if isinstance(x, CBSR):
            transpose = needs_transpose(x)
        else:
            transpose = torch.is_grad_enabled() and x.requires_grad
        op = SparseOperator(self.graph(transpose), diag=diag, mean=mean)
        return product(op, x, out_acc=out_acc)

    def mean(self, transpose: bool, num_src: int | None = None) -> SparseOperator:
        """The mean of the neighbours' features; a prepared graph caches it. Arguments as in
        :meth:`graph`."""
        dtype = self.source.dtype

        def make() -> SparseOperator:
            graph = self.graph(transpose, num_src=num_src)
            return SparseOperator(graph, row_scale=self.inverse_degree(graph, dtype))

        if self.part is not None or not isinstance(self.edge_index, EdgeIndex):
            return make()
        size = self._size(self.source.size(0) if num_src is None else num_src, self.num_dst)
        return derive(
            self.edge_index, MeanRequest(size, acc_dtype(dtype), self.flow), make,
            suffices=_has_transpose if transpose else None,
        )  # fmt: skip

    def _size(self, num_src: int, num_dst: int) -> RequestedSize:
        if self.is_reverse:
            num_src, num_dst = num_dst, num_src
        return requested_size(self.edge_index, num_src, num_dst)

    def inverse_degree(self, graph: Graph, dtype: torch.dtype) -> Tensor:
        """The factors of a mean; a prepared graph caches them."""
        if self.part is not None or not isinstance(self.edge_index, EdgeIndex):
            return inverse_degree(graph.rowptr, dtype)
        size = self._size(graph.num_src, graph.num_dst)
        return derive(
            self.edge_index, MeanRequest(size, acc_dtype(dtype), self.flow, 'inverse degree'),
            lambda: inverse_degree(graph.rowptr, dtype),
        )  # fmt: skip


def _has_transpose(op: SparseOperator) -> bool:
    return op.graph.t_rowptr is not None


def neighbours(x: Features, edge_index: Adj, size: Size, flow: str) -> Neighbours | None:
    """The input in one form, or None if PyG's code must accept or reject it."""
    source, root = (x, x) if isinstance(x, (Tensor, CBSR)) else x
    if not isinstance(source, (Tensor, CBSR)) or not isinstance(edge_index, Tensor):
        return None
    if edge_index.layout != torch.strided:
        return None
    if isinstance(source, CBSR):
        source._check()
    if root is not None and root is not source:
        if not isinstance(root, (Tensor, CBSR)) or len(root.shape) != 2:
            return None
        if isinstance(root, CBSR):
            root._check()
    if flow != 'source_to_target' and root is not source:
        return None
    values = source.values if isinstance(source, CBSR) else source
    check_device(edge_index, values, 'edge_index')
    if isinstance(edge_index, EdgeIndex):
        size = edge_index._sparse_size
    num_src, num_dst = (None, None) if size is None else size
    if num_src is not None and num_src != source.size(0):
        return None
    if root is not None and root is not source:
        if root.device != source.device:
            raise ValueError(f"'x[1]' is on {root.device}, but 'x[0]' is on {source.device}")
        if num_dst is None:
            num_dst = root.size(0)
    if num_dst is None:
        num_dst = source.size(0)
    if root is not None and num_dst != root.size(0):
        return None
    return Neighbours(source, root, edge_index, num_dst, flow)


class FusedReduce(AggregatesInput):
    """Mixin for a layer whose messages are the neighbours' features, or computed from
    them row by row."""

    flow: str
    aggr_module: Aggregation
    _is_exact = True  # whether PyG's code computes the same

    @classmethod
    def _why_not_aggr(cls, conv: MessagePassing) -> str | None:
        return why_not_reduction(conv.aggr_module) if may_fuse(conv) else 'fuse=False'

    def _operator(
        self, to: Neighbours, transpose: bool, num_src: int | None = None
    ) -> SparseOperator:
        """The sum or mean between all nodes. Arguments as of :meth:`Neighbours.graph`."""
        return SparseOperator(to.graph(transpose, num_src=num_src))

    def _by_pyg(self, x: Features, edge_index: Adj, size: Size) -> Tensor:
        """PyG's own way."""
        raise NotImplementedError

    def _of_neighbours(self, to: Neighbours) -> Tensor:
        """The layer on checked input, by kernels."""
        raise NotImplementedError

    def _describe(self, to: Neighbours) -> LinearAggregation | None:
        """The layer as a linear map around an aggregation of all neighbours, or None."""
        return None

    def _sums_of_nodes(self, to: Neighbours) -> bool:
        """Whether the layer sums or averages the nodes' own dense features."""
        raise NotImplementedError

    def _input_plan(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> InputPlan | None:
        to = self._neighbours(x, edge_index, None)
        if to is None or not self._sums_of_nodes(to):
            return None
        plan = Plan(self._operator(to, False))
        return InputPlan(plan, getattr(self, 'root_weight', True), None)

    def _neighbours(self, x: Features, edge_index: Adj, size: Size) -> Neighbours | None:
        """The input of the fused path, or None if PyG's code must run."""
        source = source_of(x)
        why = type(self)._why_not_aggr(self)
        if why is not None:
            self._fused_note(why)
            return None
        if not self._unaltered(source.values if isinstance(source, CBSR) else source):
            return None
        self._fused_note_edges(edge_index)
        return neighbours(x, edge_index, size, self.flow)

    def _few_edges(self, x: Features, edge_index: Adj) -> Tensor | None:
        """The list of edges, if PyG's code is faster than a kernel, for which a plain list must be
        sorted."""
        if torch.compiler.is_compiling() or not self._is_exact:
            return None
        source = x[0] if isinstance(x, tuple) else x
        if not isinstance(source, Tensor) or source.dim() != 2:
            return None
        of_list = 'sum'
        if type(edge_index) is not Tensor:
            if not (has_list(edge_index) and torch.is_grad_enabled() and source is x):
                return None
            of_list = 'prepared sum'
        # The backward pass of PyG's other aggregations takes longer than ours.
        kind = type(part_of(self, 'aggr_module'))
        if kind not in (SumAggregation, MeanAggregation) and torch.is_grad_enabled():
            return None
        if not has_few_edges(edge_index, source.size(1), of_list):
            return None
        if isinstance(edge_index, EdgeIndex):
            if edge_index.sparse_size() != (source.size(0), source.size(0)):
                return None
            edge_index = edge_index.as_tensor()
        self._fused_note(reason_of(edge_index.size(1)))
        return edge_index

    def _propagate_few(
        self, x: Tensor | OptPairTensor, edge_index: Tensor, size: Size
    ) -> tuple[Tensor, OptTensor] | None:
        """What PyG's `propagate` returns, and the features of destinations."""
        pair = (x, x) if isinstance(x, Tensor) else x
        out = _direct.propagate(self, edge_index, size, {'x': pair})
        return None if out is None else (out, pair[1])

    def _messages_of(self, to: Neighbours) -> Neighbours:
        """The messages, in place of the neighbours' features."""
        return to

    def _changes_messages(self) -> bool:
        """Whether messages may differ from the neighbours' features."""
        return False

    def _features_for_pyg(self, x: Features) -> Tensor | OptPairTensor:
        """The input for PyG's code."""
        return x


def reduce(aggr: Aggregation, to: Neighbours) -> Tensor:
    """Applies an aggregation for which :func:`why_not_reduction` returns None.

    Several aggregations share their sums. float16 and bfloat16 are rounded only at the end.
    """
    x = to.source
    if isinstance(x, CBSR):
        kind = type(aggr)
        if kind is SumAggregation or kind is MeanAggregation:
            return to.sum(mean=kind is MeanAggregation)
        x = x.to_dense()
    multi = type(aggr) is MultiAggregation
    parts = list(aggr.aggrs) if multi else [aggr]
    kinds = [type(part) for part in parts]
    moments = VarAggregation in kinds or StdAggregation in kinds

    transpose = torch.is_grad_enabled() and (
        x.requires_grad or any(kind is PowerMeanAggregation and part.learn
                               for part, kind in zip(parts, kinds, strict=True))
    )  # fmt: skip
    # The gradient of a maximum goes by the position of its edge.
    graph = to.graph(transpose, values=MaxAggregation in kinds or MinAggregation in kinds)
    sums, inverse = SparseOperator(graph), None
    if any(kind in _MEANS for kind in kinds):
        inverse = to.inverse_degree(graph, x.dtype)
    means = sums._replace(row_scale=inverse)

    of: dict[type, Tensor] = {}  # by kind
    if moments:
        semi_grad = any(getattr(part, 'semi_grad', False) for part in parts)
        if not multi and kinds[0] is StdAggregation:
            semi_grad = parts[0].var_aggr.semi_grad
        also = sums if SumAggregation in kinds else means if MeanAggregation in kinds else None
        var, other = reduce_var(means, x, semi_grad, also)
        of[VarAggregation] = var
        if StdAggregation in kinds:
            of[StdAggregation] = std_of(var)
        if other is not None:
            of[SumAggregation if also is sums else MeanAggregation] = other
    elif SumAggregation in kinds:
        of[SumAggregation] = product(sums, x, out_acc=multi)
    if MeanAggregation in kinds and MeanAggregation not in of:
        if inverse is not None and SumAggregation in of:
            of[MeanAggregation] = of[SumAggregation] * inverse.view(-1, 1)
        else:
            of[MeanAggregation] = product(means, x, out_acc=multi)

    outs = []
    for part, kind in zip(parts, kinds, strict=True):
        if kind is PowerMeanAggregation:
            outs.append(_power_mean(part, means, x))
        elif kind is MaxAggregation or kind is MinAggregation:
            outs.append(reduce_max(graph, x, minimum=kind is MinAggregation))
        else:
            outs.append(of[kind].to(x.dtype))
    return aggr.combine(outs) if multi else outs[0]


def std_of(var: Tensor) -> Tensor:
    """PyG's standard deviation of a variance."""
    std = var.clamp(min=1e-5).sqrt()
    return std.masked_fill(std <= math.sqrt(1e-5), 0.0)


def _power_mean(aggr: PowerMeanAggregation, means: SparseOperator, x: Tensor) -> Tensor:
    p, low, high = aggr.p, aggr.min_value, aggr.max_value
    if isinstance(p, Tensor):
        p = p.view(-1, aggr.channels)
    elif p == 1:
        return product(means, x)
    mean = product(means, x.clamp(min=low, max=high).pow(p))
    return mean.clamp(min=low, max=high).pow(1.0 / p)


def combined(
    aggr: Aggregation, outs: Sequence[Tensor], node_dim: int, degree: Callable[[], Tensor]
) -> Tensor:
    """The result of an aggregation module, of the reductions of its parts: sums, means, maxima,
    minima, and variances. The scalers of PNA read the degrees."""
    inner = aggr.aggr if type(aggr) is DegreeScalerAggregation else aggr
    parts = list(inner.aggrs) if type(inner) is MultiAggregation else [inner]
    outs = [
        std_of(out) if type(part) is StdAggregation else out
        for out, part in zip(outs, parts)  # noqa: B905
    ]
    out = inner.combine(outs) if type(inner) is MultiAggregation else outs[0]
    if inner is aggr:
        return out
    size = [1] * out.dim()
    size[node_dim] = -1
    return _scaled(aggr, out, degree().to(out.dtype).view(size))


def _scaled(aggr: DegreeScalerAggregation, out: Tensor, degree: Tensor) -> Tensor:
    """The scalers of PNA, as in PyG."""
    outs = []
    for scaler in aggr.scaler:
        if scaler == 'identity':
            outs.append(out)
        elif scaler == 'amplification':
            outs.append(out * (torch.log(degree + 1) / aggr.avg_deg_log))
        elif scaler == 'attenuation':
            outs.append(out * (aggr.avg_deg_log / torch.log(degree.clamp(min=1) + 1)))
        elif scaler == 'linear':
            outs.append(out * (degree / aggr.avg_deg_lin))
        elif scaler == 'inverse_linear':
            outs.append(out * (aggr.avg_deg_lin / degree.clamp(min=1)))
        else:
            raise ValueError(f'Unknown scaler {scaler!r}')
    return torch.cat(outs, dim=-1) if len(outs) > 1 else outs[0]
