"""GCN layers."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptTensor, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from ..graph._cache import outside_inference_mode
from ..graph.execution_path import ExecutionPath, signature_of
from ..graph.gcn_norm import GCNNorm, by_degree, normalized
from ..graph.graph import graph_of
from ..graph.prepared_graph import list_of
from ..ops._edges import check_edge_index, is_capturing
from ..ops._numbers import acc_dtype
from ..ops.aggregate import scatter_sum, sorting_pays
from ..ops.cbsr import CBSR
from ..ops.gcn_norm import gcn_scale
from ..ops.linear_product import (
    LinearArguments,
    Plan,
    aggregates_first,
    linear_product,
    takes_gradient,
)
from ..ops.product import Quantized, product
from ..sparse.operator import Sampling, SparseOperator
from ._fused import (
    Fused,
    autocast_dtype,
    entries,
    is_plain_linear,
    known_edges,
    part_of,
    weight_and_bias,
)
from ._path import AggregatedInput, OnPath, linear_on_path
from ._reduce import plus, with_values


class PathPreparedGCNConv(OnPath, Fused, GCNConv):
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

    With an execution path, see :class:`~pyg_fast.transforms.ExecutionPaths`, the backward pass
    computes only what the loss reads; with :obj:`forward=True` the forward pass of training does
    so too. Losses and gradients are equal up to summation order. A path has no effect in
    evaluation, with an :obj:`edge_weight` that requires a gradient, and when PyG's own code runs.

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
        cache_input (bool, optional): Deprecated, without effect: use :meth:`aggregate_input`.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, edge indices
          :math:`(2, |\mathcal{E}|)` or sparse matrix :math:`(|\mathcal{V}|, |\mathcal{V}|)`,
          edge weights :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        TypeError: If :obj:`path` is not an execution path.
        ValueError: If :obj:`path` is of another graph or device, or the last loss with it read
            other nodes than it was made for; if :obj:`edge_index` is on another device, or its size
            does not fit :obj:`x`, or :obj:`edge_weight` has not one entry per edge.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GCNConv
    _cached_edge_index: Any
    _cached_norm: dict[Any, GCNNorm] | None = None
    _cached_signature: tuple[int, ...] | None = None  # of its graph, if that was prepared

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *args: Any,
        cache_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, *args, **kwargs)
        self._set_cache_input(cache_input)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._cached_norm = self._cached_signature = None

    def forward(
        self,
        x: Tensor | AggregatedInput,
        edge_index: Adj | None,
        edge_weight: OptTensor = None,
        path: ExecutionPath | None = None,
    ) -> Tensor:
        """"""
        path = self._path(path, x, edge_index)
        if isinstance(x, AggregatedInput):
            return self._of_aggregated(x, edge_index, path)
        fuses = self._fusible(x) and self._sums()
        if path is not None and edge_index is None:
            self._check_alone(fuses and edge_weight is None and not self._has_other_graph(path))
            return self._on_path(x, None, self._norm_of_path(path, x.dtype), path)
        if path is not None and self._has_other_graph(path):
            path = None
        if fuses and path is None and self._scatters(x, edge_index, edge_weight):
            return self._scattered(x, edge_index)
        norm = None
        if fuses:
            norm = self._operator(x, edge_index, edge_weight, torch.is_grad_enabled())
        if norm is None:
            return self._by_pyg(x, edge_index, edge_weight)
        if path is not None and self._takes_path(norm):
            return self._on_path(x, edge_index, norm, path)
        return self._mapped(x, norm)

    def _by_pyg(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> Tensor:
        """PyG's own way."""
        self._cache_for_pyg()
        return super().forward(x, self._left(edge_index), edge_weight)

    def _cache_for_pyg(self) -> None:
        """Gives the graph of the first call to PyG's own code, as `cached` requires."""
        norm = None if self._cached_norm is None else self._cached_norm.get(None)
        if norm is not None and self._cached_edge_index is None:
            self._cached_edge_index = listed_norm(norm, self.flow)

    def _sums(self) -> bool:
        """Whether the layer's aggregation is a sum."""
        aggr = part_of(self, 'aggr_module')
        if self.aggr in ('add', 'sum') and type(aggr) is SumAggregation:
            return True
        self._note(f'aggr={self.aggr!r}')
        return False

    def aggregate_input(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: OptTensor = None,
        *,
        path: ExecutionPath | None = None,
        tile: int | None = None,
    ) -> AggregatedInput:
        r"""Aggregates an input that takes no gradient and is the same in every step, such as that
        of a first layer without dropout. Pass the result in place of :obj:`x`.

        Args:
            x (Tensor): Node features :math:`(|\mathcal{V}|, F_{in})`; beside edges on a GPU
                they may be in pinned host memory.
            edge_index (Tensor or EdgeIndex): The edges :math:`(2, |\mathcal{E}|)`.
            edge_weight (Tensor, optional): Edge weights :math:`(|\mathcal{E}|)`.
                (default: :obj:`None`)
            path (ExecutionPath, optional): The path that the layer will run on in every call. If it
                was prepared with :obj:`forward`, only its rows are computed and kept.
                (default: :obj:`None`)
            tile (int, optional): The number of columns to aggregate at a time.
                (default: :obj:`None`, 32 in host memory, otherwise all)

        Raises:
            ValueError: If an input requires a gradient, or the layer has no kernel for it.
        """
        return self._aggregated_input(x, edge_index, edge_weight, path, tile)

    def _input_plan(
        self, x: Tensor, edge_index: Any, edge_weight: OptTensor, path: ExecutionPath | None
    ) -> tuple[Plan, bool, torch.dtype | None] | None:
        """How to aggregate an input, whether the layer needs the input itself too, and the dtype of
        the weights."""
        if not (self._fusible(x) and self._sums() and self._is_plain()):
            return None
        if path is not None and edge_index is None:
            norm: Any = self._norm_of_path(path, x.dtype)
        else:
            norm = self._operator(x, edge_index, edge_weight, False)
        if norm is None:
            return None
        plan = self._plan_of(x.dtype, edge_index, norm, path, (False, True), False)
        return plan, False, norm.dtype

    def _aggregation(self) -> tuple[Any, ...]:
        """The options that an aggregated input depends on."""
        return 'GCN', self.flow, self.normalize, self.add_self_loops, self.improved

    def _is_plain(self) -> bool:
        lin = part_of(self, 'lin')
        return is_plain_linear(lin) and weight_and_bias(lin)[1] is None

    def _of_aggregated(
        self,
        x: AggregatedInput,
        edge_index: Any,
        path: ExecutionPath | None,
        compact_out: bool = False,
    ) -> Tensor:
        """The layer on an input that is already aggregated."""
        self._check_aggregated(x, edge_index, path)
        if not self._is_plain():
            raise ValueError("'x' must be features: 'lin' is patched, has hooks or another bias")
        dtype = autocast_dtype(x.aggregated) or x.dtype
        bias, out_acc = self._suited_bias(dtype, x.weight_dtype)
        out_dtype = acc_dtype(dtype) if out_acc else dtype
        return linear_on_path(x, self.lin.weight.to(dtype), bias, out_dtype, path, compact_out)

    def _has_other_graph(self, path: ExecutionPath) -> bool:
        """Whether the cached graph may differ from that of a path: it is the graph of another first
        call, or of a PyG layer that this layer replaces."""
        if self._cached_edge_index is not None or self._cached_adj_t is not None:
            return True
        return self._cached_norm is not None and self._cached_signature != path.graph_signature

    def _norm_of_path(self, path: ExecutionPath, dtype: torch.dtype) -> GCNNorm:
        """The normalisation by the degrees that a path keeps of the whole graph."""
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():  # The path may keep parts of it.
                return self._norm_of_path(path, dtype)
        op = SparseOperator(path.graph)
        if not self.normalize:
            return GCNNorm(op, None)
        degree = path.in_degree(acc_dtype(dtype), loops=not self.add_self_loops)
        return by_degree(op, degree, dtype, 1.0 if self.add_self_loops else None)

    def _takes_path(self, norm: GCNNorm) -> bool:
        """Whether the layer may run on a path of the graph."""
        return not norm.is_differentiable

    def _on_path(
        self,
        x: Tensor,
        edge_index: Adj | None,
        norm: GCNNorm,
        path: ExecutionPath,
        compact: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """The layer on a path. Inputs and outputs may be :obj:`compact`."""
        return linear_product(*self._arguments(x, edge_index, norm, path, compact))

    def _arguments(
        self,
        x: Tensor,
        edge_index: Adj | None,
        norm: GCNNorm,
        path: ExecutionPath | None,
        compact: tuple[bool, bool],
    ) -> LinearArguments:
        """The arguments of :func:`linear_product` for the layer."""
        if not compact[0] and edge_index is not None:
            check_rows(x, norm.operator)
        lin = part_of(self, 'lin')
        plain = self._is_plain()
        weight: Any = weight_and_bias(lin)[0] if plain else None
        dtype = autocast_dtype(x)
        if not plain:
            x = lin(x)
        elif dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        bias, out_acc = self._suited_bias(x.dtype, norm.dtype)
        plan = self._plan_of(x.dtype, edge_index, norm, path, compact, out_acc)
        return LinearArguments(x, weight, bias, plan)

    def _plan_of(
        self,
        dtype: torch.dtype,
        edge_index: Adj | None,
        norm: GCNNorm,
        path: ExecutionPath | None,
        compact: tuple[bool, bool],
        out_acc: bool,
    ) -> Plan:
        """The edges and rows of the layer."""
        op, acc = norm.operator, acc_dtype(dtype)
        if path is None:
            return Plan(op, out_acc=out_acc)

        def on_path() -> SparseOperator:
            diag = op.diag
            if diag is None and path.loops is not None:  # Loops are ordinary edges here.
                diag = _loop_entries(edge_index, op, path.loops, acc)
            return op._replace(diag=diag).on(path)

        if op.value is None:
            part = path.derived(('gcn', self.normalize, self.add_self_loops, acc), on_path)
        else:
            part = on_path()
        return self._plan(path, op, part, compact, out_acc)

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

    def _scattered(self, x: Tensor, edge_index: Any) -> Tensor:
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
        loops, fill_value = 'remaining', 2.0 if self.improved else 1.0
        normalize, keep = self.normalize, self.cached and self.normalize
        if keep and self._cached_edge_index is not None:  # from a replaced PyG layer
            edge_index, edge_weight = self._cached_edge_index
            normalize = False
        elif keep and self._cached_adj_t is not None:
            edge_index, edge_weight, normalize = self._cached_adj_t, None, False

        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            if not isinstance(edge_index, SparseTensor) and not is_torch_sparse_tensor(edge_index):
                return None
            if torch.compiler.is_compiling() or self.flow != 'source_to_target':
                return None
            loops = 'replace' if isinstance(edge_index, SparseTensor) else 'add'
            found = entries(edge_index, num_nodes, num_nodes)
            # PyG's code rejects or ignores an `edge_weight` beside a matrix.
            if found is None or edge_weight is not None:
                return None
            edge_index, edge_weight = found
        elif edge_weight is None:
            fill_value = 1.0  # `improved` is for weighted graphs only, as in PyG.
        if self.add_self_loops and normalize:
            edge_index = known_edges(edge_index, num_nodes)

        if edge_index.device != x.device:
            raise ValueError(f"'edge_index' is on {edge_index.device}, but 'x' is on {x.device}")
        if edge_weight is not None:
            if edge_weight.dim() != 1 or not edge_weight.is_floating_point():
                return None
            if edge_weight.size(0) != edge_index.size(1):
                raise ValueError(
                    f"'edge_weight' must have shape [{edge_index.size(1)}], got "
                    f'{list(edge_weight.shape)}'
                )
            if edge_weight.device != x.device:
                raise ValueError(
                    f"'edge_weight' is on {edge_weight.device}, but 'x' is on {x.device}"
                )
            wide = torch.promote_types(edge_weight.dtype, x.dtype)
            if wide not in (x.dtype, acc_dtype(x.dtype)) or (keep and edge_weight.requires_grad):
                return None

        with outside_inference_mode() if keep else nullcontext():
            norm = self._normalized(
                edge_index, edge_weight, num_nodes, x.dtype, normalize, fill_value, loops,
                transpose or keep, keep, sampling,
            )  # fmt: skip
        if keep:
            # `signature_of` waits for the device, which compiled code and captures cannot do.
            waits = not torch.compiler.is_compiling() and not is_capturing(edge_index)
            if self._cached_norm is None and isinstance(edge_index, EdgeIndex) and waits:
                self._cached_signature = signature_of(edge_index)
            self._cached_norm = {**(self._cached_norm or {}), key: norm}
        return norm

    def _normalized(
        self,
        edge_index: Tensor,
        edge_weight: OptTensor,
        num_nodes: int,
        dtype: torch.dtype,
        normalize: bool,
        fill_value: float,
        loops: str,
        transpose: bool,
        keep: bool,
        sampling: Sampling | None,
    ) -> GCNNorm:
        reverse = self.flow == 'target_to_source'
        if normalize:
            return normalized(
                edge_index, edge_weight, num_nodes, dtype, fill_value=fill_value,
                loops=loops if self.add_self_loops else 'keep', flow=self.flow,
                transpose=transpose, sampling=sampling, copy=keep or torch.is_grad_enabled(),
            )  # fmt: skip
        graph = graph_of(
            edge_index, num_nodes, num_nodes, transpose=transpose or reverse,
            values=edge_weight is not None or reverse,
        )  # fmt: skip
        weight_dtype = None if edge_weight is None else edge_weight.dtype
        return GCNNorm(SparseOperator(graph.t() if reverse else graph, edge_weight), weight_dtype)

    def _degree_sampling(self) -> Sampling | None:
        """The sample over which degrees are counted, or None for all edges."""
        return None

    def _mapped(self, x: Tensor, norm: GCNNorm) -> Tensor:
        """The linear map and the aggregation."""
        lin, op = part_of(self, 'lin'), norm.operator
        weight, own_bias = weight_and_bias(lin) if is_plain_linear(lin) else (None, None)
        if weight is None or own_bias is not None or norm.is_differentiable:
            return self._aggregated(lin(x), norm)
        check_rows(x, op)
        dtype = autocast_dtype(x)
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
        bias, out_acc = self._suited_bias(x.dtype, norm.dtype)
        if op.sampling is None:
            return linear_product(x, weight, bias, Plan(op, out_acc=out_acc))
        # Under autocast the linear map runs in float16 or bfloat16.
        if out_acc or not aggregates_first(weight, takes_gradient(x), takes_gradient(weight)):
            return product(op, self._features(F.linear(x, weight), op), bias, out_acc)
        return F.linear(product(op, self._features(x, op)), weight, bias)

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


def _loop_entries(
    edge_index: Any, op: SparseOperator, loops: Tensor, dtype: torch.dtype
) -> Tensor:
    """The sum of the loops of each node."""
    value, scale = op.value, op.row_scale
    if value is None:
        total = loops.to(dtype)
    else:
        src, dst = list_of(edge_index)
        value = torch.where(src == dst, value, value.new_zeros(())).to(dtype)
        total = torch.zeros(loops.shape, dtype=dtype, device=loops.device)
        total.index_add_(0, src.long(), value)
    return total if scale is None else scale * total * scale


def check_rows(x: Tensor | CBSR, op: SparseOperator) -> None:
    if x.size(0) != op.graph.num_src:
        raise ValueError(
            f"'x' must have one row for each of {op.graph.num_src} nodes, got {list(x.shape)}"
        )
