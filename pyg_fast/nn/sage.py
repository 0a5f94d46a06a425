"""GraphSAGE layers."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, Size

from ..graph.execution_path import ExecutionPath
from ..ops._numbers import acc_dtype
from ..ops.cbsr import CBSR
from ..ops.linear_cbsr import linear_cbsr
from ..ops.linear_product import LinearArguments, linear_product, reads_transpose
from ..ops.path import expand
from ..sparse.operator import SparseOperator
from ._fused import autocast_dtype, is_plain_linear, part_of, weight_and_bias
from ._path import (
    AggregatedInput,
    OnPath,
    fill_of,
    linear_of_rows,
    linear_on_path,
    path_operator,
)
from ._reduce import FusedReduce, Neighbours, reduce, source_of


class PathPreparedSAGEConv(OnPath, FusedReduce, SAGEConv):
    r"""The GraphSAGE operator of the `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    A drop-in for :class:`~torch_geometric.nn.conv.SAGEConv`: the same options, parameters,
    state_dict, outputs and gradients. No message is stored. For sums and means the linear maps and
    the aggregation are one autograd function, which aggregates the narrower of :math:`\mathbf{X}`
    and :math:`\mathbf{X} \mathbf{W}_2^{\top}`; for a pair of features :math:`\mathbf{W}_1` is
    another.

    The aggregations :obj:`"sum"`, :obj:`"mean"`, :obj:`"max"`, :obj:`"min"`, :obj:`"var"`,
    :obj:`"std"`, :obj:`"powermean"` and lists of these are fused, for plain and for prepared
    (:class:`~pyg_fast.transforms.ToCSR`) graphs. Other aggregations, sparse matrices, static
    batches, dtypes other than float32, float64, float16 and bfloat16, hooks and explainers run
    PyG's own code. If several neighbours reach a maximum, the first gets the gradient.

    With an execution path, see :class:`~pyg_fast.transforms.ExecutionPaths`, the backward pass of
    sums and means computes only what the loss reads; with :obj:`forward=True` the forward pass of
    training does so too. Losses and gradients are equal up to summation order. A path has no effect
    in evaluation, with :obj:`project`, on pairs of features, and when PyG's own code runs.

    Args:
        in_channels (int or tuple): Size of each input sample, or :obj:`-1` to derive it from the
            first input. A tuple stands for the sizes of sources and destinations.
        out_channels (int): Size of each output sample.
        aggr (str or [str] or Aggregation, optional): The aggregation.
            (default: :obj:`"mean"`)
        normalize (bool, optional): Whether to :math:`\ell_2`-normalise the output.
            (default: :obj:`False`)
        root_weight (bool, optional): Whether to add the transformed features of the node itself.
            (default: :obj:`True`)
        project (bool, optional): Whether to apply a linear map and a ReLU before aggregating.
            (default: :obj:`False`)
        bias (bool, optional): Whether to learn an additive bias. (default: :obj:`True`)
        cache_input (bool, optional): Deprecated, without effect: use :meth:`aggregate_input`.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_s), (|\mathcal{V}_t|, F_t))` if bipartite, edge indices
          :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`path` is not an execution path.
        ValueError: If :obj:`path` is of another graph or device, or the last loss with it read
            other nodes than it was made for; if :obj:`edge_index` is on another device, or a size
            does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = SAGEConv

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        *args: Any,
        cache_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, *args, **kwargs)
        self._set_cache_input(cache_input)

    def forward(
        self,
        x: Tensor | OptPairTensor | AggregatedInput,
        edge_index: Adj | None,
        size: Size = None,
        path: ExecutionPath | None = None,
    ) -> Tensor:
        """"""
        path = self._path(path, x, edge_index)
        if isinstance(x, AggregatedInput):
            return self._of_aggregated(x, edge_index, path)
        if path is not None and edge_index is None:
            return self._on_path(self._alone(x, path), path)
        plain = self._few_edges(x, edge_index) if path is None else None
        if plain is not None:
            few = None if self.project else self._of_few(x, plain, size)
            if few is None:
                return self._by_pyg(x, plain, size)
            out, root = self.lin_l(few[0]), few[1]
            if self.root_weight and root is not None:
                out = out + self.lin_r(root)
            return F.normalize(out, p=2.0, dim=-1) if self.normalize else out
        to = self._neighbours(x, edge_index, size)
        if to is None:
            return self._by_pyg(x, edge_index, size)
        if self._takes_path(to):
            return self._on_path(to, path)
        to = self._sent(to)
        out, root = self._aggregated(to), to.root
        if self.root_weight and root is not None:
            out = self._with_root(out, root)
        return self._normalized(out, None)

    def _by_pyg(self, x: Any, edge_index: Adj, size: Size) -> Tensor:
        """PyG's own way."""
        return super().forward(self._unfused(x), self._left(edge_index), size)

    def _sum_of_all(self, to: Neighbours) -> SparseOperator:
        return self._operator(to, False)

    def _aggregation(self) -> tuple[Any, ...]:
        """The options that an aggregated input depends on."""
        return 'SAGE', self.flow, type(self.aggr_module).__name__, self.root_weight

    def _sums_of_nodes(self, to: Neighbours) -> bool:
        """Whether the layer is linear in sums or means of the nodes' own dense features."""
        return (
            isinstance(to.source, Tensor)
            and to.root is to.source
            and not self.project
            and not self._sends_more()
            and type(part_of(self, 'aggr_module')) in (SumAggregation, MeanAggregation)
        )

    def _operator(
        self, to: Neighbours, transpose: bool, num_src: int | None = None
    ) -> SparseOperator:
        """The sum or mean between all nodes."""
        if type(part_of(self, 'aggr_module')) is MeanAggregation:
            return to.mean(transpose, num_src)
        return SparseOperator(to.graph(transpose, num_src=num_src))

    def _of_aggregated(
        self,
        x: AggregatedInput,
        edge_index: Any,
        path: ExecutionPath | None,
        compact_out: bool = False,
    ) -> Tensor:
        """The layer on an input that is already aggregated."""
        self._check_aggregated(x, edge_index, path)
        lin, lin_r = self.lin_l, self.lin_r if self.root_weight else None
        if not is_plain_linear(lin) or (lin_r is not None and not is_plain_linear(lin_r)):
            raise ValueError("'x' must be features: 'lin_l' or 'lin_r' is patched or has hooks")
        dtype = autocast_dtype(x.aggregated) or x.dtype
        bias = None if lin.bias is None else lin.bias.to(dtype)
        expands = self._normalizes_rows(path, compact_out)
        compact = compact_out or expands
        out = linear_on_path(x, lin.weight.to(dtype), bias, dtype, path, compact)
        if lin_r is not None:
            out = out + linear_of_rows(x, lin_r.weight.to(dtype), path, compact)
        return self._normalized(out, path if expands else None)

    def _normalizes_rows(self, path: ExecutionPath | None, compact_out: bool) -> bool:
        """Whether the computed rows are normalised before the others are filled in, which have no
        derivative."""
        return self.normalize and path is not None and path.forward and not compact_out

    def _normalized(self, out: Tensor, path: ExecutionPath | None) -> Tensor:
        """The output, normalised if the layer does that, then expanded from the rows of a path."""
        out = F.normalize(out, p=2.0, dim=-1) if self.normalize else out
        return out if path is None else expand(out, path.dst, fill_of(path), path.watch())

    def _takes_path(self, to: Neighbours) -> bool:
        """Whether the layer is one linear product, which may run on a path of the graph."""
        if not is_plain_linear(part_of(self, 'lin_l')) or not self._sums_of_nodes(to):
            return False
        if not self.root_weight:
            return True
        root = part_of(self, 'lin_r')
        return is_plain_linear(root) and weight_and_bias(root)[1] is None

    def _on_path(
        self,
        to: Neighbours,
        path: ExecutionPath | None,
        compact: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """The layer as one linear product. On a path, inputs and outputs may be :obj:`compact`."""
        expands = self._normalizes_rows(path, compact[1])
        compact = compact[0], compact[1] or expands
        out = linear_product(*self._arguments(to, path, compact))
        return self._normalized(out, path if expands else None)

    def _arguments(
        self, to: Neighbours, path: ExecutionPath | None, compact: tuple[bool, bool]
    ) -> LinearArguments:
        """The arguments of :func:`linear_product` for the layer before it normalises."""
        x, (weight, bias) = to.source, weight_and_bias(part_of(self, 'lin_l'))
        root_weight = None
        if self.root_weight and to.root is not None:
            root_weight, _ = weight_and_bias(part_of(self, 'lin_r'))
        assert isinstance(x, Tensor)
        dtype, acc = autocast_dtype(x), acc_dtype(x.dtype)

        if to.edge_index is None and path is not None:
            whole = path_operator(path, acc, type(self.aggr_module) is MeanAggregation)
        else:
            # On a path the backward pass reads only its part of the graph.
            transpose = path is None and reads_transpose(x, weight)
            whole = self._operator(to, transpose, to.num_dst if compact[0] else None)
        plan = self._plan_on(path, whole, acc, compact)
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            root_weight = None if root_weight is None else root_weight.to(dtype)
        return LinearArguments(x, weight, bias, plan, root_weight)

    def _neighbours(self, x: Any, edge_index: Any, size: Size) -> Neighbours | None:
        if self.project and (self.flow != 'source_to_target' or isinstance(source_of(x), CBSR)):
            return None
        return super()._neighbours(x, edge_index, size)

    def _sent(self, to: Neighbours) -> Neighbours:
        return to._replace(source=self.lin(to.source).relu()) if self.project else to

    def _aggregated(self, to: Neighbours) -> Tensor:
        """The linear map of the aggregated neighbours."""
        x, lin, kind = to.source, self.lin_l, type(self.aggr_module)
        if isinstance(x, CBSR):
            dtype = autocast_dtype(x)
            to = to if dtype is None else to._replace(source=x.to(dtype))
        elif kind in (SumAggregation, MeanAggregation) and is_plain_linear(lin):
            alone = to._replace(root=None)
            return linear_product(*self._arguments(alone, None, (False, False)))
        return lin(reduce(self.aggr_module, to))

    def _with_root(self, out: Tensor, root: Tensor | CBSR) -> Tensor:
        """Adds the linear map of the node's own features."""
        lin = self.lin_r
        plain = is_plain_linear(lin) and lin.bias is None
        if not isinstance(root, CBSR):
            return torch.addmm(out, root, lin.weight.t()) if plain else out + lin(root)
        if not plain:
            return out + lin(root.to_dense())
        weight, dtype = lin.weight, autocast_dtype(root)
        if dtype is not None:
            root, weight, out = root.to(dtype), weight.to(dtype), out.to(dtype)
        return linear_cbsr(root, weight, out)
