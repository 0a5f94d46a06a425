"""Layers that aggregate a sample of each node's edges."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from ...graph.gcn_norm import GCNNorm
from ...graph.graph import graph_of
from ...graph.prepared_graph import list_of
from ...nn._aggregated import AggregatedInput
from ...nn._explain_edges import check_edges
from ...nn._layer import Mixin, autocast_dtype
from ...nn._modules import is_plain_linear
from ...nn._reduce import Neighbours
from ...nn.gcn import check_rows, check_weight, listed_norm
from ...ops._checks import check_device
from ...ops._numbers import check_number
from ...ops.cbsr import CBSR
from ...ops.linear_product import aggregates_first, takes_gradient
from ...ops.product import Quantized, product, quantized
from ...ops.sampled_spmm import MOST_SAMPLES, check_sampling
from ...ops.sampling import sampled_graph, sampled_on_its_own
from ...sparse.operator import SCALED, STRATEGIES, Sampling, SparseOperator
from ..paths.convs import PathPreparedGCNConv, PathPreparedSAGEConv
from ..paths.execution_path import ExecutionPath

SAMPLE = ('eval', 'always', 'never')
_OWN = ('num_samples', 'strategy', 'sample', 'quantize')


def _check_sampling(num_samples: int, strategy: str, sample: str) -> None:
    check_number('num_samples', num_samples, 1)
    check_sampling(min(num_samples, MOST_SAMPLES), strategy)
    if sample not in SAMPLE:
        raise ValueError(f"'sample' must be one of {SAMPLE}, got {sample!r}")


class _Sampled(Mixin):
    """Mixin for a fused layer that aggregates a sample of the edges."""

    num_samples: int
    strategy: str
    sample: str
    quantize: bool
    _is_exact = False

    def _set_sampling(self, num_samples: int, strategy: str, sample: str, quantize: bool) -> None:
        _check_sampling(num_samples, strategy, sample)
        if not isinstance(quantize, bool):
            raise TypeError(f"'quantize' must be a bool, got {type(quantize).__name__}")
        self.num_samples = num_samples
        self.strategy = strategy
        self.sample = sample
        self.quantize = quantize

    def check_strategy(self, strategy: str) -> None:
        """Raises unless the layer's aggregation supports it."""

    def _samples(self) -> bool:
        """Whether this call aggregates a sample."""
        sample, number = self.sample, self.num_samples
        if sample not in SAMPLE or not isinstance(number, int) or number < 1:  # They were changed.
            _check_sampling(number, self.strategy, sample)
        if number > MOST_SAMPLES:
            return False
        return sample == 'always' or (sample == 'eval' and not self.training)

    def _scales_sums(self) -> bool:
        return self._sampling().strategy in SCALED

    def _sampling(self) -> Sampling:
        if self.strategy not in STRATEGIES:  # It was changed.
            _check_sampling(self.num_samples, self.strategy, self.sample)
        return Sampling(self.num_samples, self.strategy)

    def _features(self, x: Tensor | CBSR, op: SparseOperator) -> Tensor | CBSR | Quantized:
        """Features, quantized to 8 bits while the layer samples and no gradient is required."""
        if not (self.quantize and self._samples() and isinstance(x, Tensor)):
            return x
        learns = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, op.value, *self.parameters())
        )
        return x if learns else quantized(x)

    def _choose_path(self, path: object, x: object, edge_index: Adj) -> ExecutionPath | None:
        if path is not None and self.training and self._samples():
            raise ValueError("'path' is for full aggregation: give the layer sample='eval'")
        return super()._choose_path(path, x, edge_index)

    def _takes_path(self, over: object) -> bool:
        return not self._samples() and super()._takes_path(over)

    def _check_options(self, given: AggregatedInput) -> None:
        if self._samples():
            raise ValueError("'x' must be features while the layer samples edges")
        super()._check_options(given)

    def _given_edges(
        self, x: Tensor, edge_index: Adj, num_src: int, num_dst: int, drop_loops: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Input for PyG's code: the sampled edges and their positions; or None if PyG's code reads
        all edges: for explainers, which number the edges, and for strategies that scale sums, which
        PyG's code cannot do."""
        if not self._samples() or self._explain or self._scales_sums():
            return None
        check_edges(edge_index)
        if isinstance(edge_index, SparseTensor) or is_torch_sparse_tensor(edge_index):
            raise NotImplementedError(
                f'{type(self).__name__} cannot sample the edges of this input, which runs '
                "PyG's own code, from a sparse matrix: pass an 'edge_index', or sample='never'"
            )
        data = list_of(edge_index)
        check_device(data, x, 'edge_index')
        reverse = self.flow == 'target_to_source'
        graph = graph_of(edge_index, num_src, num_dst, transpose=reverse, drop_loops=drop_loops)
        sampled = sampled_graph(graph.t() if reverse else graph, self._sampling())
        at = sampled.perm[: int(sampled.rowptr[-1])].long()  # type: ignore[index]
        if drop_loops:  # Self-loops are always kept.
            at = torch.cat([at, (data[0] == data[1]).nonzero().view(-1)])
        return data[:, at], at

    def to_base(self) -> MessagePassing:
        """PyG's own layer, sharing the parameters; exists only for :obj:`sample="never"`."""
        if self.sample != 'never':
            raise NotImplementedError(
                f'{type(self).__name__} has no equivalent in PyG, and TorchScript cannot compile '
                "it, unless sample='never': use torch.compile"
            )
        return super().to_base()

    def __repr__(self) -> str:
        return (
            f'{super().__repr__()[:-1]}, num_samples={self.num_samples}, '
            f'strategy={self.strategy!r}{", quantize=True" if self.quantize else ""})'
        )


class SampledGCNConv(_Sampled, PathPreparedGCNConv):
    r"""The graph convolution of :class:`~torch_geometric.nn.conv.GCNConv` over at most :math:`S`
    edges of each node, chosen inside the kernel, as in the `"ES-SpMM: Edge-Sampling SpMM"
    <https://arxiv.org/abs/2104.10716>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}^{\top} \left( \frac{\mathbf{x}_i}{\tilde{d}_i} +
        \sum_{j \in \mathcal{S}(i)} \frac{\mathbf{x}_j}{\sqrt{\tilde{d}_i \tilde{d}_j}} \right)
        + \mathbf{b}, \qquad \tilde{d}_i = \min(d_i, S) + 1

    A node's self-loop is always kept and does not count towards :math:`S`. Weighted degrees sum
    the weights of the sampled edges. With :obj:`strategy="unbiased"` degrees count all edges and
    the sum is multiplied by :math:`d_i / S`, so the expectations of the result and its gradients
    equal those of all edges. Every call then draws a new sample from torch's generator.

    With :obj:`strategy="adaptive"` degrees also count all edges, and each row is scaled to estimate
    the sum over all edges. The sum of the sample gets a smaller factor than the self-loop, because
    the factor multiplies the noise of the sample:

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{\Theta}^{\top} \left( c_i \frac{\mathbf{x}_i}{\tilde{d}_i} +
        c_i^{2/3} \sum_{j \in \mathcal{S}(i)} \frac{\mathbf{x}_j}{\sqrt{\tilde{d}_i \tilde{d}_j}}
        \right) + \mathbf{b}, \qquad c_i = \frac{d_i + 1}{\min(d_i, S) + 1}, \quad
        \tilde{d}_i = d_i + 1

    The layer trains on all edges and samples in evaluation, unless :obj:`sample` says otherwise.
    Parameters, options, outputs and gradients are those of
    :class:`~pyg_fast.nn.PathPreparedGCNConv`; if no node has more than :math:`S` edges, so is the
    result. A path has no effect while it samples. Where PyG's own code runs, hooks and other
    inputs see the sampled edges, explainers all edges; with :obj:`strategy="unbiased"` both see all
    edges. TorchScript cannot compile the layer, :func:`torch.compile` can.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive it from the first
            input.
        out_channels (int): Size of each output sample.
        num_samples (int): :math:`S`, at least 1; above 4096 the layer takes all edges. See
            :func:`pyg_fast.choose_num_samples`.
        strategy (str, optional): Which edges, as in :func:`~pyg_fast.ops.sampled_spmm`:
            :obj:`"fastrand"`, :obj:`"adaptive"`, :obj:`"bucket"`, :obj:`"unbiased"` or
            :obj:`"paper"`.
            (default: :obj:`"fastrand"`)
        sample (str, optional): When to sample: in evaluation (:obj:`"eval"`), also in training
            (:obj:`"always"`), or :obj:`"never"`. (default: :obj:`"eval"`)
        quantize (bool, optional): While it samples and no gradient is required, aggregates 8-bit
            features, each node's scaled by its largest. (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`~pyg_fast.nn.PathPreparedGCNConv`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, edge indices
          :math:`(2, |\mathcal{E}|)` or sparse matrix :math:`(|\mathcal{V}|, |\mathcal{V}|)`,
          edge weights :math:`(|\mathcal{E}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        TypeError: If an option is of the wrong type.
        ValueError: If :obj:`num_samples`, :obj:`strategy` or :obj:`sample` is invalid, a layer that
            samples in training gets a path, or as
            :class:`~pyg_fast.nn.PathPreparedGCNConv` does.
        NotImplementedError: If PyG's own code runs on a sparse matrix while the layer samples.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_samples: int,
        strategy: str = 'fastrand',
        *,
        sample: str = 'eval',
        quantize: bool = False,
        **kwargs: object,
    ) -> None:
        self._set_sampling(num_samples, strategy, sample, quantize)
        super().__init__(in_channels, out_channels, **kwargs)

    _fused_own: ClassVar[tuple[str, ...]] = (
        *PathPreparedGCNConv._fused_own, *_OWN, '_cached_edges'
    )  # fmt: skip
    _cached_edges: tuple[Adj, OptTensor] | None = None  # of the first call, with `cached`

    def _scatters(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> bool:
        return not self._samples() and super()._scatters(x, edge_index, edge_weight)

    def _aggregate(self, x: Tensor, norm: GCNNorm) -> Tensor:
        op = norm.operator
        if op.sampling is None or norm.is_differentiable:
            return super()._aggregate(x, norm)
        check_rows(x, op)
        x, weight, bias, plan, _ = self._describe(x, norm)
        if weight is None:
            return product(op, self._features(x, op), bias, plan.out_acc)
        # Under autocast the linear map runs in float16 or bfloat16.
        if plan.out_acc or not aggregates_first(weight, takes_gradient(x), takes_gradient(weight)):
            return product(op, self._features(F.linear(x, weight), op), bias, plan.out_acc)
        return F.linear(product(op, self._features(x, op)), weight, bias)

    def _operator(
        self,
        x: Tensor | CBSR,
        edge_index: Adj,
        edge_weight: OptTensor,
        transpose: bool,
        num_nodes: int | None = None,
    ) -> GCNNorm | None:
        if not self._samples():
            return self._operator_of_first_edges(x, edge_index, edge_weight, transpose, num_nodes)
        norm = self._normalized_once(x, edge_index, edge_weight, num_nodes)
        if norm is None:
            return None
        sampling = self._sampling().drawn(x.device)
        return norm._replace(operator=norm.operator.sampled(*sampling))

    def _normalized_once(
        self, x: Tensor | CBSR, edge_index: Adj, edge_weight: OptTensor, num_nodes: int | None
    ) -> GCNNorm | None:
        """The normalised graph to sample; with :obj:`cached` that of the first call."""
        caches = any(each is not None for each in self._cached_by_pyg())
        with self._without_cache() if caches else nullcontext():
            # The backward pass of a sample reads no transpose.
            return self._operator_of_first_edges(x, edge_index, edge_weight, False, num_nodes)

    def _operator_of_first_edges(
        self,
        x: Tensor | CBSR,
        edge_index: Adj,
        edge_weight: OptTensor,
        transpose: bool,
        num_nodes: int | None,
    ) -> GCNNorm | None:
        """The normalised graph. With :obj:`cached` the edges of the first call serve every number
        of samples, and none."""
        if self._cached_edges is not None:
            edge_index, edge_weight = self._cached_edges
        norm = super()._operator(x, edge_index, edge_weight, transpose, num_nodes)
        if norm is not None and self._cached_norm is not None and self._cached_edges is None:
            with torch.inference_mode(False):
                if type(edge_index) is Tensor:
                    edge_index = edge_index.clone()
                weight = None if edge_weight is None else edge_weight.detach().clone()
                self._cached_edges = edge_index, weight
        return norm

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._cached_edges = None

    def _degree_sampling(self) -> Sampling | None:
        return self._sampling() if self._samples() and self.strategy != 'unbiased' else None

    def _by_pyg(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> Tensor:
        if not self._samples():
            return super()._by_pyg(x, edge_index, edge_weight)
        if isinstance(x, Tensor):
            num_nodes = x.shape[self.node_dim]
            if self.cached and not self._explain:  # Cache it, as a kernel would.
                self._normalized_once(x, edge_index, edge_weight, num_nodes)
            given = self._given_edges(x, edge_index, num_nodes, num_nodes, self.add_self_loops)
            if given is not None:
                if edge_weight is not None:
                    check_weight(edge_weight, edge_index, edge_index)
                    edge_weight = edge_weight[given[1]]
                edge_index = given[0]
        with self._without_cache():
            sampling, cached = self._degree_sampling(), self._cached_norm or {}
            norm = cached.get(None if sampling is None else sampling[:2])
            if self.strategy == 'adaptive' and isinstance(x, Tensor) and not self._explain:
                norm = self._normalized_once(x, edge_index, edge_weight, num_nodes)
            if norm is not None:  # The graph of the first call, or its sample.
                if sampling is not None:
                    norm = _of_sampled_edges(norm, sampling, x.dtype)
                edge_index, edge_weight = self._cached_edge_index = listed_norm(norm, self.flow)
            return super()._by_pyg(x, edge_index, edge_weight)

    def _cache_for_pyg(self) -> None:
        if not self._samples():
            super()._cache_for_pyg()

    def _cached_by_pyg(self) -> tuple[tuple[Tensor, OptTensor] | None, SparseTensor | None]:
        return self._cached_edge_index, self._cached_adj_t

    @contextmanager
    def _without_cache(self) -> Iterator[None]:
        """Hides PyG's cache, which holds all edges, normalised, for training."""
        cached = self._cached_by_pyg()
        self._cached_edge_index = self._cached_adj_t = None
        try:
            yield
        finally:
            self._cached_edge_index, self._cached_adj_t = cached


def _of_sampled_edges(norm: GCNNorm, sampling: Sampling, dtype: torch.dtype) -> GCNNorm:
    graph, _, row_scale = norm.operator[:3]
    weight = sampling.weight(graph.rowptr, False, dtype)
    if weight is not None:
        row_scale = weight if row_scale is None else weight * row_scale
    part = norm.operator._replace(graph=sampled_graph(graph, sampling), row_scale=row_scale)
    return norm._replace(operator=part)


class SampledSAGEConv(_Sampled, PathPreparedSAGEConv):
    r"""The GraphSAGE operator of :class:`~torch_geometric.nn.conv.SAGEConv` over at most
    :math:`S` edges of each node, chosen inside the kernel, as in the `"ES-SpMM: Edge-Sampling
    SpMM" <https://arxiv.org/abs/2104.10716>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{S}(i)} \mathbf{x}_j

    Means and sums are over the sampled edges; :obj:`strategy="unbiased"` multiplies a sum by
    :math:`d_i / S`, :obj:`"adaptive"` by :math:`(d_i + 1) / (S + 1)`; where PyG's own code runs,
    such sums are over all edges. For everything else, such as when it samples, see
    :class:`~pyg_fast.nn.SampledGCNConv`.

    Args:
        in_channels (int or tuple): Size of each input sample, or :obj:`-1` to derive it from the
            first input. A tuple stands for the sizes of sources and destinations.
        out_channels (int): Size of each output sample.
        num_samples (int): :math:`S`, at least 1; above 4096 the layer takes all edges. See
            :func:`pyg_fast.choose_num_samples`.
        strategy (str, optional): Which edges, as in :func:`~pyg_fast.ops.sampled_spmm`;
            :obj:`"unbiased"` supports the aggregations :obj:`"sum"` and :obj:`"mean"` only.
            (default: :obj:`"fastrand"`)
        sample (str, optional): When to sample: in evaluation (:obj:`"eval"`), also in training
            (:obj:`"always"`), or :obj:`"never"`. (default: :obj:`"eval"`)
        quantize (bool, optional): While it samples sums or means and no gradient is required,
            aggregates 8-bit features, each node's scaled by its largest.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`~pyg_fast.nn.PathPreparedSAGEConv`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_s), (|\mathcal{V}_t|, F_t))` if bipartite, edge indices
          :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError, ValueError, NotImplementedError, IndexError: As
            :class:`~pyg_fast.nn.SampledGCNConv`.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        num_samples: int,
        strategy: str = 'fastrand',
        *,
        sample: str = 'eval',
        quantize: bool = False,
        **kwargs: object,
    ) -> None:
        self._set_sampling(num_samples, strategy, sample, quantize)
        super().__init__(in_channels, out_channels, **kwargs)
        self.check_strategy(strategy)

    def check_strategy(self, strategy: str) -> None:
        kind = type(self.aggr_module)
        if strategy == 'unbiased' and kind not in (SumAggregation, MeanAggregation):
            raise ValueError(
                f"strategy='unbiased' supports only sums and means, got {kind.__name__}"
            )

    _fused_own: ClassVar[tuple[str, ...]] = (*PathPreparedSAGEConv._fused_own, *_OWN)

    def _is_linear(self, to: Neighbours) -> bool:
        return not self._samples() and super()._is_linear(to)

    def _scales_sums(self) -> bool:
        kind = type(self.aggr_module)
        return super()._scales_sums() and (self.strategy == 'unbiased' or kind is SumAggregation)

    def _aggregated(self, to: Neighbours) -> Tensor:
        if not self._samples():
            return super()._aggregated(to)
        x = to.source.to_dense() if isinstance(to.source, CBSR) else to.source
        to = to._replace(source=x)
        lin, kind, graph = self.lin_l, type(self.aggr_module), to.graph(False)
        if kind not in (SumAggregation, MeanAggregation):
            part, _ = sampled_on_its_own(graph, self._sampling(), torch.is_grad_enabled())
            return super()._aggregated(to._replace(part=part))
        sampling = self._sampling().drawn(x.device)
        op = SparseOperator(graph, mean=kind is MeanAggregation, sampling=sampling)
        if not is_plain_linear(lin) or aggregates_first(
            lin.weight, takes_gradient(x), takes_gradient(lin.weight)
        ):
            dtype = autocast_dtype(x)
            x = x if dtype is None else x.to(dtype)
            return lin(product(op, self._features(x, op)))
        x = F.linear(x, lin.weight)
        bias = None if lin.bias is None else lin.bias.to(x.dtype)
        return product(op, self._features(x, op), bias)

    def _by_pyg(self, x: Tensor | OptPairTensor, edge_index: Adj, size: Size) -> Tensor:
        if self._samples():
            source, target = (x, x) if isinstance(x, Tensor) else x
            if isinstance(edge_index, EdgeIndex) and size is None:
                size = edge_index._sparse_size
            num_src, num_dst = (None, None) if size is None else size
            num_src = source.shape[self.node_dim] if num_src is None else num_src
            if num_dst is None:
                num_dst = num_src if target is None else target.shape[self.node_dim]
            given = self._given_edges(source, edge_index, num_src, num_dst, False)
            edge_index = edge_index if given is None else given[0]
        return super()._by_pyg(x, edge_index, size)
