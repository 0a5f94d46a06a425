"""The GCN layer."""

from contextlib import nullcontext
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptTensor, SparseTensor

from .._lazy import lazy
from ..graph._cache import outside_inference_mode
from ..graph.gcn_norm import GCNNorm, normalized
from ..graph.graph import graph_of
from ..graph.signature import signature_of
from ..ops._edges import check_edge_index, is_capturing
from ..ops._numbers import acc_dtype
from ..ops.aggregate import scatter_sum, sorting_pays
from ..ops.cbsr import CBSR
from ..ops.gcn_norm import gcn_scale
from ..ops.linear_product import LinearAggregation, Plan, linear_product
from ..ops.product import Quantized, product
from ..sparse.operator import Sampling, SparseOperator
from ._aggregated import AggregatedInput, AggregatesInput, InputPlan
from ._checks import may_fuse
from ._layer import Fused, autocast_dtype, entries, known_edges
from ._modules import is_plain_linear, part_of, weight_and_bias
from ._reduce import plus, with_values


class FusedGCNConv(AggregatesInput, GCNConv):
    r"""The graph convolution of the `"Semi-supervised Classification with Graph Convolutional
    Networks" <https://arxiv.org/abs/1609.02907>`_ paper on a fused kernel.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}}
        \mathbf{\hat{D}}^{-1/2} \mathbf{X} \mathbf{\Theta}

    A drop-in for :class:`~torch_geometric.nn.conv.GCNConv`: the same options, parameters,
    state_dict, outputs and gradients. The kernel normalises inputs and outputs, so unweighted
    edges carry no values, and nothing of size :math:`|\mathcal{E}| \times F` is allocated. Linear
    map, aggregation and bias are one autograd function, which aggregates the narrower of
    :math:`\mathbf{X}` and :math:`\mathbf{X} \mathbf{\Theta}`.

    A graph prepared by :class:`~pyg_fast.transforms.ToCSR` is sorted and normalised once. Any
    other input works as in PyG, and is sorted at every call unless :obj:`cached=True`. A plain
    :obj:`edge_index` without weights is not sorted where scattering is faster, see
    :func:`~pyg_fast.ops.aggregate`; on CUDA this adds atomically, and the last bits vary unless
    :func:`torch.use_deterministic_algorithms` is on. An :obj:`edge_weight` that requires a gradient
    is normalised at every call, because its gradient flows through the degrees. Inputs without a
    kernel (dtypes other than float32, float64, float16 and bfloat16, static batches, aggregations
    other than sums, hooks, explainers) run PyG's own code.

    For float16 and bfloat16, degrees and sums are computed in float32.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive it from the first
            input.
        out_channels (int): Size of each output sample.
        improved (bool, optional): Computes :math:`\mathbf{\hat{A}}` as
            :math:`\mathbf{A} + 2 \mathbf{I}`; as in PyG, only for weighted or sparse input.
            (default: :obj:`False`)
        cached (bool, optional): Keeps the normalised graph of the first call for later calls.
            (default: :obj:`False`)
        add_self_loops (bool, optional): Whether to add self-loops.
            (default: :obj:`None`, as :obj:`normalize`)
        normalize (bool, optional): Whether to add self-loops and normalise.
            (default: :obj:`True`)
        bias (bool, optional): Whether to learn an additive bias. (default: :obj:`True`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, edge indices
          :math:`(2, |\mathcal{E}|)` or sparse matrix :math:`(|\mathcal{V}|, |\mathcal{V}|)`,
          edge weights :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If :obj:`edge_index` is on another device, its size does not fit :obj:`x`, or
            :obj:`edge_weight` has not one entry per edge.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GCNConv
    _takes_edge_weight = True
    _fused_own: ClassVar[tuple[str, ...]] = (*Fused._fused_own, '_cached_norm', '_cached_signature')
    _cached_edge_index: tuple[Tensor, OptTensor] | None
    _cached_norm: dict[tuple[int, str] | None, GCNNorm] | None = None
    _cached_signature: tuple[int, ...] | None = None  # of its graph, if that was prepared

    @classmethod
    def _why_not_aggr(cls, conv: MessagePassing) -> str | None:
        if not may_fuse(conv):
            return 'fuse=False'
        sums = conv.aggr in ('add', 'sum') and type(conv.aggr_module) is SumAggregation
        return None if sums else f'aggr={conv.aggr!r}'

    def _fused_release(self) -> None:
        self._cache_for_pyg()
        super()._fused_release()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._cached_norm = self._cached_signature = None

    def forward(
        self, x: Tensor | AggregatedInput, edge_index: Adj, edge_weight: OptTensor = None
    ) -> Tensor:
        """"""
        if isinstance(x, AggregatedInput):
            return self._of_aggregated(x, edge_index)
        norm = None
        if self._fusible(x) and self._sums(x):
            if self._scatters(x, edge_index, edge_weight):
                self._fused_note_edges(None)
                return self._scattered(x, edge_index)
            norm = self._operator(x, edge_index, edge_weight, torch.is_grad_enabled())
        if norm is None:
            return self._by_pyg(x, edge_index, edge_weight)
        return self._aggregate(x, norm)

    def _by_pyg(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> Tensor:
        """PyG's own way."""
        self._cache_for_pyg()
        return super().forward(x, self._edges_for_pyg(edge_index), edge_weight)

    def _cache_for_pyg(self) -> None:
        """Gives the graph of the first call to PyG's own code, as `cached` requires."""
        norm = None if self._cached_norm is None else self._cached_norm.get(None)
        if norm is not None and self._cached_edge_index is None:
            self._cached_edge_index = listed_norm(norm, self.flow)

    def _sums(self, x: Tensor | CBSR) -> bool:
        """Whether the layer's aggregation is a sum, to which kernels can add the bias."""
        aggr, bias = part_of(self, 'aggr_module'), part_of(self, 'bias')
        if not (self.aggr in ('add', 'sum') and type(aggr) is SumAggregation):
            self._fused_note(f'aggr={self.aggr!r}')
            return False
        if bias is None:
            return True
        if bias.dtype == torch.float64 != x.dtype:
            self._fused_note('its bias is torch.float64')
        elif bias.size(-1) != self.out_channels:
            self._fused_note(f'its bias has shape {list(bias.shape)}')
        else:
            return True
        return False

    def _input_plan(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> InputPlan | None:
        norm = None
        if self._fusible(x) and self._sums(x) and self._commutes():
            norm = self._operator(x, edge_index, edge_weight, False)
        return None if norm is None else InputPlan(Plan(norm.operator), False, norm.dtype)

    def _aggregation(self) -> tuple[object, ...]:
        return 'GCN', self.flow, self.normalize, self.add_self_loops, self.improved

    def _is_plain(self) -> bool:
        """Whether the linear map consists of a weight only."""
        lin = part_of(self, 'lin')
        return is_plain_linear(lin) and weight_and_bias(lin)[1] is None

    def _commutes(self) -> bool:
        """Whether the linear map may follow the aggregation."""
        return self._is_plain()

    def _of_aggregated(self, x: AggregatedInput, edge_index: Adj) -> Tensor:
        self._check_aggregated(x, edge_index)
        weight, bias, out_acc = self._map_of(x)
        out = F.linear(x.aggregated.to(weight.dtype), weight)
        out = out.to(acc_dtype(out.dtype)) if out_acc else out
        return out if bias is None else out + bias

    def _map_of(self, x: AggregatedInput) -> tuple[Tensor, OptTensor, bool]:
        """The weight, the bias and whether the result has the type of sums, for an aggregated
        input."""
        if not self._commutes():
            raise ValueError("'x' must be features: 'lin' is patched, has hooks or another bias")
        dtype = autocast_dtype(x.aggregated) or x.dtype
        bias, out_acc = self._suited_bias(dtype, x.weight_dtype)
        return self.lin.weight.to(dtype), bias, out_acc

    def _scatters(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> bool:
        """Whether to scatter over plain edges without weights instead of sorting them."""
        return (
            edge_weight is None
            and self.normalize
            and not self.cached
            and type(edge_index) is Tensor
            and edge_index.layout == torch.strided
            and edge_index.device == x.device
            and autocast_dtype(x) is None
            and (self.bias is None or self.bias.dtype == x.dtype)
            and not sorting_pays(edge_index.size(-1), self.out_channels, x.is_cuda)
        )

    def _scattered(self, x: Tensor, edge_index: Adj) -> Tensor:
        check_edge_index(edge_index)
        scale, diag = gcn_scale(
            edge_index, None, x.size(0), x.dtype,
            loops='remaining' if self.add_self_loops else 'keep', flow=self.flow,
        )  # fmt: skip
        out = scatter_sum(
            edge_index, self.lin(x), None, x.size(0), scale, scale, diag,
            reverse=self.flow == 'target_to_source', drop_loops=self.add_self_loops,
        )  # fmt: skip
        return out if self.bias is None else out + self.bias

    def _operator(
        self,
        x: Tensor | CBSR,
        edge_index: Adj,
        edge_weight: OptTensor,
        transpose: bool,
        num_nodes: int | None = None,
    ) -> GCNNorm | None:
        """The normalised graph, with its transpose if a backward pass will need it, or None if
        PyG's code must run."""
        sampling = self._degree_sampling()
        key = None if sampling is None else sampling[:2]
        if self._cached_norm is not None and key in self._cached_norm:
            norm = self._cached_norm[key]
            return norm if _suits(norm, x.dtype) else None
        num_nodes = x.size(0) if num_nodes is None else num_nodes
        edges = self._edges(x, edge_index, edge_weight, num_nodes)
        if edges is None:
            return None
        keep = self.cached and self.normalize
        self._fused_note_edges(None if keep else edge_index)
        with outside_inference_mode() if keep else nullcontext():
            norm = self._normalize(edges, num_nodes, x.dtype, transpose or keep, keep, sampling)
        if keep:
            # `signature_of` waits for the device, which compiled code and captures cannot do.
            index = edges.edge_index
            waits = not torch.compiler.is_compiling() and not is_capturing(index)
            if self._cached_norm is None and isinstance(index, EdgeIndex) and waits:
                self._cached_signature = signature_of(index)
            self._cached_norm = {**(self._cached_norm or {}), key: norm}
        return norm

    def _edges(
        self, x: Tensor | CBSR, edge_index: Adj, edge_weight: OptTensor, num_nodes: int
    ) -> '_Edges | None':
        """The edges to aggregate over, or None if PyG's code must accept or reject them."""
        normalize, loops, fill_value = self.normalize, 'remaining', 2.0 if self.improved else 1.0
        keep = self.cached and normalize
        if keep and self._cached_edge_index is not None:  # from a replaced PyG layer
            edge_index, edge_weight = self._cached_edge_index
            normalize = False
        elif keep and self._cached_adj_t is not None:
            edge_index, edge_weight, normalize = self._cached_adj_t, None, False
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            loops = 'replace' if isinstance(edge_index, SparseTensor) else 'add'
            of_matrix = entries(edge_index, num_nodes, num_nodes, self.flow)
            # PyG's code rejects or ignores an `edge_weight` beside a matrix.
            if of_matrix is None or edge_weight is not None:
                return None
            edge_index, edge_weight = of_matrix
        elif edge_weight is None:
            fill_value = 1.0  # `improved` is for weighted graphs only, as in PyG.
        if self.add_self_loops and normalize:
            edge_index = known_edges(edge_index, num_nodes)
        if edge_index.device != x.device:
            raise ValueError(f"'edge_index' is on {edge_index.device}, but 'x' is on {x.device}")
        if edge_weight is not None:
            if edge_weight.dim() != 1 or not edge_weight.is_floating_point():
                return None
            check_weight(edge_weight, edge_index, x)
            wide = torch.promote_types(edge_weight.dtype, x.dtype)
            if wide not in (x.dtype, acc_dtype(x.dtype)) or (keep and edge_weight.requires_grad):
                return None
        return _Edges(edge_index, edge_weight, normalize, loops, fill_value)

    def _normalize(
        self,
        edges: '_Edges',
        num_nodes: int,
        dtype: torch.dtype,
        transpose: bool,
        keep: bool,
        sampling: Sampling | None,
    ) -> GCNNorm:
        """The normalised graph; without normalisation the graph as it is."""
        index, weight, normalize, loops, fill_value = edges
        if normalize:
            return normalized(
                index, weight, num_nodes, dtype, fill_value=fill_value,
                loops=loops if self.add_self_loops else 'keep', flow=self.flow,
                transpose=transpose, sampling=sampling, copy=keep or torch.is_grad_enabled(),
            )  # fmt: skip
        reverse = self.flow == 'target_to_source'
        graph = graph_of(
            index, num_nodes, num_nodes, transpose=transpose or reverse,
            values=weight is not None or reverse,
        )  # fmt: skip
        weight_dtype = None if weight is None else weight.dtype
        return GCNNorm(SparseOperator(graph.t() if reverse else graph, weight), weight_dtype)

    def _degree_sampling(self) -> Sampling | None:
        """The sample over which degrees are counted, or None for all edges."""
        return None

    def _aggregate(self, x: Tensor, norm: GCNNorm) -> Tensor:
        """The linear map and the aggregation."""
        if norm.is_differentiable:
            return self._aggregated(part_of(self, 'lin')(x), norm)
        check_rows(x, norm.operator)
        return linear_product(*self._describe(x, norm))

    def _describe(self, x: Tensor, norm: GCNNorm) -> LinearAggregation:
        """The layer as a linear map around an aggregation."""
        lin = part_of(self, 'lin')
        weight, own_bias = weight_and_bias(lin) if is_plain_linear(lin) else (None, None)
        dtype = autocast_dtype(x)
        if weight is None or own_bias is not None:
            x, weight = lin(x), None
        elif dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        bias, out_acc = self._suited_bias(x.dtype, norm.dtype)
        return LinearAggregation(x, weight, bias, Plan(norm.operator, out_acc=out_acc))

    def _aggregated(self, x: Tensor | CBSR, norm: GCNNorm) -> Tensor:
        """The aggregation of features after the linear map."""
        op, diag = norm.operator, norm.operator.diag
        check_rows(x, op)
        bias, out_acc = self._suited_bias(x.dtype, norm.dtype)
        if not norm.is_differentiable:
            return product(op, self._features(x, op), bias, out_acc)
        out = product(op._replace(diag=None), self._features(x, op), bias, out_acc)
        if diag is None:
            return out
        diag = diag.view(-1, 1)
        if isinstance(x, CBSR):
            return plus(out, with_values(x, (diag * x.values).to(out.dtype)))
        return out + (diag * x).to(out.dtype)

    def _features(self, x: Tensor | CBSR, op: SparseOperator) -> Tensor | CBSR | Quantized:
        """The form in which features are aggregated after the linear map."""
        return x

    def _suited_bias(
        self, dtype: torch.dtype, weight_dtype: torch.dtype | None
    ) -> tuple[OptTensor, bool]:
        """The bias in a dtype that the kernel supports for features of :obj:`dtype`, and whether
        the result has the dtype of sums."""
        bias = part_of(self, 'bias')
        # As in PyG, a message has the wider dtype of features and weights; so has the bias.
        out_dtype = dtype
        if weight_dtype is not None and weight_dtype != dtype:
            out_dtype = torch.promote_types(weight_dtype, dtype)
        if bias is not None and bias.dtype != out_dtype:
            out_dtype = torch.promote_types(bias.dtype, out_dtype)
            bias = bias.to(out_dtype)
        return bias, out_dtype != dtype


class _Edges(NamedTuple):
    """Checked edges, and how to normalise them: arguments of :func:`normalized`."""

    edge_index: Tensor
    edge_weight: Tensor | None
    normalize: bool
    loops: str
    fill_value: float


def check_weight(edge_weight: Tensor, edge_index: Tensor, x: Tensor | CBSR) -> None:
    """Raises unless there is a weight for each edge, on the device of the features."""
    if edge_weight.size(0) != edge_index.size(1):
        check_edge_index(edge_index)  # Its shape may be what is wrong.
        raise ValueError(
            f"'edge_weight' must have shape [{edge_index.size(1)}], got {list(edge_weight.shape)}"
        )
    if edge_weight.device != x.device:
        raise ValueError(f"'edge_weight' is on {edge_weight.device}, but 'x' is on {x.device}")


def _suits(norm: GCNNorm, dtype: torch.dtype) -> bool:
    """Whether a kernel supports a cached normalised graph for features of this dtype."""
    op, acc = norm.operator, acc_dtype(dtype)
    scales = all(t is None or t.dtype == acc for t in (op.row_scale, op.diag))
    return scales and (op.value is None or op.value.dtype in (dtype, acc))


@torch.inference_mode(False)  # A later training step may use it.
@torch.no_grad()
def listed_norm(norm: GCNNorm, flow: str) -> tuple[Tensor, Tensor]:
    """A normalised graph in PyG's form: edges and their weights, self-loops last."""
    graph, value, row_scale, col_scale, diag = norm.operator[:5]
    count = graph.rowptr.diff().long()
    dst = torch.arange(graph.num_dst, device=count.device).repeat_interleave(count)
    num_edges = dst.size(0)
    src = graph.col[:num_edges].long()
    if value is None:
        assert row_scale is not None
        weight = row_scale.new_ones(num_edges)
    else:
        weight = value[:num_edges] if graph.perm is None else value[graph.perm[:num_edges].long()]
    if col_scale is not None:
        weight = col_scale[src] * weight
    if row_scale is not None:
        weight = weight * row_scale[dst]
    if diag is not None:
        loop = torch.arange(graph.num_dst, device=count.device)
        src, dst = torch.cat([src, loop]), torch.cat([dst, loop])
        weight = torch.cat([weight, diag])
    ends = [src, dst] if flow == 'source_to_target' else [dst, src]
    return torch.stack(ends), weight.to(norm.dtype)


def check_rows(x: Tensor | CBSR, op: SparseOperator) -> None:
    if x.size(0) != op.graph.num_src:
        raise ValueError(
            f"'x' must have one row for each of {op.graph.num_src} nodes, got {list(x.shape)}"
        )


__getattr__ = lazy(__name__, {'PathPreparedGCNConv': 'papers.paths'})  # pickles of 0.2
