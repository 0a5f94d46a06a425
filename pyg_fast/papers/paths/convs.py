"""The layers on execution paths."""

import torch
from torch import Tensor
from torch_geometric.nn.aggr import MeanAggregation
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, Size

from ...graph.gcn_norm import GCNNorm, by_degree
from ...graph.prepared_graph import list_of
from ...nn._aggregated import AggregatedInput, InputPlan
from ...nn._reduce import FusedReduce, Neighbours, neighbours
from ...nn.gcn import FusedGCNConv, check_rows
from ...nn.gin import FusedGINConv
from ...nn.sage import FusedSAGEConv
from ...ops._numbers import acc_dtype
from ...ops.linear_product import LinearAggregation, Plan
from ...ops.path import Rows, expand, take
from ...sparse.operator import SparseOperator
from ._layer import (
    PathPrepared,
    check_commutes,
    fill_of,
    linear_on_path,
    path_operator,
    refuse_paths,
    rows_on_path,
    sum_on_path,
)
from .execution_path import ExecutionPath


class PathPreparedGCNConv(PathPrepared, FusedGCNConv):
    r""":class:`~pyg_fast.nn.FusedGCNConv`, whose backward pass computes only what the loss reads,
    after the `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on
    GPUs" <https://arxiv.org/abs/2204.02662>`_ paper.

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}}
        \mathbf{\hat{D}}^{-1/2} \mathbf{X} \mathbf{\Theta}

    With an execution path, see :class:`~pyg_fast.transforms.ExecutionPaths`, the backward pass
    computes only what the loss reads; with :obj:`forward=True` the forward pass of training does
    so too. Losses and gradients are equal up to summation order. A path has no effect in
    evaluation, with an :obj:`edge_weight` that requires a gradient, and when PyG's own code runs.
    Without a path the layer is :class:`~pyg_fast.nn.FusedGCNConv`, which may add atomically on
    CUDA.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive it from the first
            input.
        out_channels (int): Size of each output sample.
        **kwargs (optional): Additional arguments of :class:`~pyg_fast.nn.FusedGCNConv`.

    Shapes:
        - **input:** as :class:`~pyg_fast.nn.FusedGCNConv`; with a path that stands alone no edges
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        TypeError: If :obj:`path` is not an execution path.
        ValueError: If :obj:`path` is of another graph or device, or the last loss with it read
            other nodes than it was made for; and as :class:`~pyg_fast.nn.FusedGCNConv`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    def forward(
        self,
        x: Tensor | AggregatedInput,
        edge_index: Adj | None,
        edge_weight: OptTensor = None,
        path: ExecutionPath | None = None,
    ) -> Tensor:
        """"""
        refuse_paths('path', edge_weight)
        path = self._choose_path(path, x, edge_index)
        if path is None:
            return super().forward(x, edge_index, edge_weight)
        if isinstance(x, AggregatedInput):
            return self._of_aggregated_on(x, edge_index, path)
        # Weights with a gradient are normalised at each call, unless the first call's are kept.
        learned = isinstance(edge_weight, Tensor) and edge_weight.requires_grad
        given = None
        if self._fusible(x) and (not learned or self._cached_norm is not None):
            both = (False, False)
            given = self._describe_on(x, edge_index, edge_weight, path, both, x.size(0))
        if edge_index is None:
            self._check_alone(given is not None)
        if given is None:
            return super().forward(x, edge_index, edge_weight)
        return self._run_on(given, path)

    def _input_plan_on(
        self, x: Tensor, edge_index: Adj, edge_weight: OptTensor, path: ExecutionPath
    ) -> InputPlan | None:
        if not (self._fusible(x) and self._sums(x) and self._commutes()):
            return None
        if edge_index is None:
            norm: GCNNorm | None = self._norm_of_path(path, x.dtype)
        else:
            norm = self._operator(x, edge_index, edge_weight, False)
        if norm is None:
            return None
        plan = self._plan_of(x.dtype, edge_index, norm, path, (False, True), False)
        return InputPlan(plan, False, norm.dtype)

    def _of_aggregated_on(
        self, x: AggregatedInput, edge_index: Adj, path: ExecutionPath, compact_out: bool = False
    ) -> Tensor:
        self._check_aggregated_on(x, edge_index, path)
        weight, bias, out_acc = self._map_of(x)
        return linear_on_path(x, weight, bias, path, compact_out, out_acc=out_acc)

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

    def _describe_on(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_weight: OptTensor,
        path: ExecutionPath | None,
        compact: tuple[bool, bool],
        num_nodes: int,
    ) -> LinearAggregation | None:
        if not self._sums(x) or (path is not None and self._has_other_graph(path)):
            return None
        if path is not None and edge_index is None:
            norm: GCNNorm | None = None
            if edge_weight is None:
                norm = self._norm_of_path(path, x.dtype)
        else:
            transpose = torch.is_grad_enabled()
            norm = self._operator(x, edge_index, edge_weight, transpose, num_nodes)
            if norm is not None and not self._takes_path(norm):
                return None
        if norm is None:
            return None
        if not compact[0] and edge_index is not None:
            check_rows(x, norm.operator)
        given = self._describe(x, norm)
        if path is None:
            return given
        plan = self._plan_of(given.x.dtype, edge_index, norm, path, compact, given.plan.out_acc)
        return given._replace(plan=plan)

    def _plan_of(
        self,
        dtype: torch.dtype,
        edge_index: Adj | None,
        norm: GCNNorm,
        path: ExecutionPath,
        compact: tuple[bool, bool],
        out_acc: bool,
    ) -> Plan:
        """The edges and rows of the layer on a path."""
        op, acc = norm.operator, acc_dtype(dtype)

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


def _loop_entries(edge_index: Adj, op: SparseOperator, loops: Tensor, dtype: torch.dtype) -> Tensor:
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


class _PathPreparedReduce(PathPrepared, FusedReduce):
    """Mixin for a layer that sums or averages the features of neighbours."""

    def forward(
        self,
        x: Tensor | OptPairTensor | AggregatedInput,
        edge_index: Adj | None,
        size: Size = None,
        path: ExecutionPath | None = None,
    ) -> Tensor:
        """"""
        refuse_paths('path', size)
        path = self._choose_path(path, x, edge_index)
        if path is None:
            return super().forward(x, edge_index, size)
        if isinstance(x, AggregatedInput):
            return self._of_aggregated_on(x, edge_index, path)
        if edge_index is None:
            to: Neighbours | None = self._alone(x, path)
        else:
            to = self._neighbours(x, edge_index, size)
        if to is None:
            return self._by_pyg(x, edge_index, size)
        if not self._takes_path(to):
            return self._of_neighbours(to)
        return self._run_on(self._place(to, path, (False, False)), path)

    def _takes_path(self, to: Neighbours) -> bool:
        """Whether the layer may run on a path of the graph."""
        raise NotImplementedError

    def _place(
        self, to: Neighbours, path: ExecutionPath, compact: tuple[bool, bool]
    ) -> LinearAggregation:
        """The layer on a path as a linear map around an aggregation."""
        raise NotImplementedError

    def _alone(self, x: Tensor, path: ExecutionPath, compact: bool = False) -> Neighbours:
        """The input of a layer that runs on a path without the graph."""
        num_nodes = path.num_nodes if compact else x.size(0)
        to = Neighbours(x, x, None, num_nodes, self.flow)
        why = type(self)._why_not_aggr(self)
        if why is not None:
            self._fused_note(why)
        self._check_alone(why is None and self._unaltered(x) and self._takes_path(to))
        return to

    def _describe_on(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_weight: OptTensor,
        path: ExecutionPath | None,
        compact: tuple[bool, bool],
        num_nodes: int,
    ) -> LinearAggregation | None:
        to: Neighbours | None
        if path is not None and edge_index is None:
            to = self._alone(x, path, compact[0])
        elif compact[0]:
            to = Neighbours(x, x, edge_index, num_nodes, self.flow)
        else:
            to = neighbours(x, edge_index, None, self.flow)
        if to is None or not self._takes_path(to):
            return None
        return self._describe(to) if path is None else self._place(to, path, compact)

    def _sum_on(
        self, to: Neighbours, path: ExecutionPath, num_src: int | None
    ) -> tuple[SparseOperator, SparseOperator]:
        """The sum or mean between all nodes, and its part on a path."""
        acc = acc_dtype(to.source.dtype)
        if to.edge_index is None:
            whole = path_operator(path, acc, type(self.aggr_module) is MeanAggregation)
        else:  # The backward pass reads only the path's part of the graph.
            whole = self._operator(to, False, num_src)
        return whole, sum_on_path(path, whole, acc)

    def _input_plan_on(
        self, x: Tensor, edge_index: Adj, edge_weight: OptTensor, path: ExecutionPath
    ) -> InputPlan | None:
        if edge_index is None:
            to: Neighbours | None = self._alone(x, path)
        else:
            to = self._neighbours(x, edge_index, None)
        if to is None or not self._sums_of_nodes(to):
            return None
        plan = self._plan(path, *self._sum_on(to, path, None), (False, True))
        return InputPlan(plan, getattr(self, 'root_weight', True), None)


class PathPreparedSAGEConv(_PathPreparedReduce, FusedSAGEConv):
    r""":class:`~pyg_fast.nn.FusedSAGEConv`, whose backward pass computes only what the loss reads,
    after the `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on
    GPUs" <https://arxiv.org/abs/2204.02662>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    With an execution path, see :class:`~pyg_fast.transforms.ExecutionPaths`, the backward pass of
    sums and means computes only what the loss reads; with :obj:`forward=True` the forward pass of
    training does so too. Losses and gradients are equal up to summation order. A path has no effect
    in evaluation, with :obj:`project`, on pairs of features, and when PyG's own code runs.

    Args:
        in_channels (int or tuple): Size of each input sample, or :obj:`-1` to derive it from the
            first input. A tuple stands for the sizes of sources and destinations.
        out_channels (int): Size of each output sample.
        **kwargs (optional): Additional arguments of :class:`~pyg_fast.nn.FusedSAGEConv`.

    Shapes:
        - **input:** as :class:`~pyg_fast.nn.FusedSAGEConv`; with a path that stands alone no edges
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`path` is not an execution path.
        ValueError: If :obj:`path` is of another graph or device, or the last loss with it read
            other nodes than it was made for; and as :class:`~pyg_fast.nn.FusedSAGEConv`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    def _ends_linearly(self) -> bool:
        return not self.normalize

    def _takes_path(self, to: Neighbours) -> bool:
        return self._is_linear(to)

    def _of_aggregated_on(
        self, x: AggregatedInput, edge_index: Adj, path: ExecutionPath, compact_out: bool = False
    ) -> Tensor:
        self._check_aggregated_on(x, edge_index, path)
        weight, bias, root_weight = self._maps_of(x)
        expands = self._normalizes_rows(path, compact_out)
        out = linear_on_path(x, weight, bias, path, compact_out or expands, root_weight)
        out = self._normalized(out)
        return expand(out, path.dst, fill_of(path), path.watch()) if expands else out

    def _normalizes_rows(self, path: ExecutionPath, compact_out: bool) -> bool:
        """Whether the computed rows are normalised before the others are filled in, which have no
        derivative."""
        return self.normalize and path.forward and not compact_out

    def _place(
        self, to: Neighbours, path: ExecutionPath, compact: tuple[bool, bool]
    ) -> LinearAggregation:
        whole, part = self._sum_on(to, path, to.num_dst if compact[0] else None)
        compact = compact[0], compact[1] or self._normalizes_rows(path, compact[1])
        plan = self._plan(path, whole, part, compact)
        return self._describe(to, whole)._replace(plan=plan)

    def _finish(
        self, out: Tensor, given: LinearAggregation, path: ExecutionPath | None, compact_out: bool
    ) -> Tensor:
        out = self._normalized(out)
        if path is None or not self._normalizes_rows(path, compact_out):
            return out
        return expand(out, path.dst, fill_of(path), path.watch())


class PathPreparedGINConv(_PathPreparedReduce, FusedGINConv):
    r""":class:`~pyg_fast.nn.FusedGINConv`, whose backward pass computes only what the loss reads,
    after the `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on
    GPUs" <https://arxiv.org/abs/2204.02662>`_ paper.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot
        \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right)

    With an execution path, see :class:`~pyg_fast.transforms.ExecutionPaths`, the backward pass of
    sums computes only what the loss reads; with :obj:`forward=True` the forward pass of training
    does so too, including :obj:`nn`. Losses and gradients are equal up to summation order. A path
    has no effect in evaluation, on pairs of features, and when PyG's own code runs.

    Args:
        nn (torch.nn.Module): The network :math:`h_{\mathbf{\Theta}}` that maps features of size
            :math:`F_{in}` to :math:`F_{out}`.
        **kwargs (optional): Additional arguments of :class:`~pyg_fast.nn.FusedGINConv`.

    Shapes:
        - **input:** as :class:`~pyg_fast.nn.FusedGINConv`; with a path that stands alone no edges
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`path` is not an execution path.
        ValueError: If :obj:`path` is of another graph or device, the last loss with it read other
            nodes than it was made for, or :obj:`nn` has a part that mixes nodes, such as a batch
            norm, where only some are computed; and as :class:`~pyg_fast.nn.FusedGINConv`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _maps_linearly = False

    def _takes_path(self, to: Neighbours) -> bool:
        return self._sums_of_nodes(to)

    def _of_neighbours(self, to: Neighbours) -> Tensor:
        return self.nn(self._combined(self._messages_of(to)))

    def _alone(self, x: Tensor, path: ExecutionPath, compact: bool = False) -> Neighbours:
        # Under autocast PyG's result has the wider dtype of `eps`.
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(torch.promote_types(x.dtype, self.eps.dtype))
        return super()._alone(x, path, compact)

    def _of_aggregated_on(
        self, x: AggregatedInput, edge_index: Adj, path: ExecutionPath, compact_out: bool = False
    ) -> Tensor:
        self._check_aggregated_on(x, edge_index, path)
        out, root = rows_on_path(x, path)
        assert root is not None
        if path.forward:
            self._check_commutes()
        out = self.nn(torch.addcmul(out, root, 1 + self.eps))
        if not path.forward or compact_out:
            return out
        return expand(out, path.dst, fill_of(path), path.watch())

    def _check_commutes(self) -> None:
        if isinstance(self.nn, torch.nn.Module):
            check_commutes(self.nn)

    def _place(
        self, to: Neighbours, path: ExecutionPath, compact: tuple[bool, bool]
    ) -> LinearAggregation:
        x, eps = to.source, self.eps
        assert isinstance(x, Tensor)
        num_nodes = path.num_nodes if compact[0] else x.size(0)
        if path.forward:
            self._check_commutes()
        whole, part = self._sum_on(to, path, num_nodes)
        if not eps.requires_grad:  # Each node adds its own features.
            own = (eps.expand(num_nodes) + 1).to(acc_dtype(x.dtype))
            whole = whole if path.forward else whole.plus_diag(own)
            part = part.plus_diag(own)
        plan = self._plan(path, whole, part, compact)
        return LinearAggregation(x, None, None, plan._replace(compact_out=path.forward))

    def _finish(
        self, out: Tensor, given: LinearAggregation, path: ExecutionPath | None, compact_out: bool
    ) -> Tensor:
        assert path is not None
        if self.eps.requires_grad:
            root, plan = given.x, given.plan
            if path.forward:  # The positions of the destinations among the rows of the sources.
                assert plan.part is not None
                rows = Rows(plan.part.self_row, plan.part.t_self_row)
                root = take(root, rows if plan.compact_in else path.dst)
            out = torch.addcmul(out, root, 1 + self.eps)
        out = self.nn(out)
        if not path.forward or compact_out:
            return out
        return expand(out, path.dst, fill_of(path), path.watch())
