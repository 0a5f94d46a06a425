"""Graph isomorphism layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GINConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, Size

from ..graph.execution_path import ExecutionPath
from ..graph.graph import graph_of
from ..ops._numbers import acc_dtype
from ..ops.cbsr import CBSR
from ..ops.linear_product import Plan, linear_product
from ..ops.path import Rows, expand, take
from ..sparse.operator import SparseOperator
from ._fused import part_of
from ._path import (
    AggregatedInput,
    OnPath,
    check_commutes,
    fill_of,
    path_operator,
    sum_on_path,
)
from ._reduce import FusedReduce, Neighbours, plus, reduce, with_values


class PathPreparedGINConv(OnPath, FusedReduce, GINConv):
    r"""The graph isomorphism operator of the `"How Powerful are Graph Neural Networks?"
    <https://arxiv.org/abs/1810.00826>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot
        \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right)

    A drop-in for :class:`~torch_geometric.nn.conv.GINConv`: the same options, parameters,
    state_dict, outputs and gradients. No message is stored, and the kernel applies a constant
    :math:`\epsilon`.

    The kernels support the inputs and aggregations of
    :class:`~pyg_fast.nn.PathPreparedSAGEConv`; all others run PyG's own code.

    With an execution path, see :class:`~pyg_fast.transforms.ExecutionPaths`, the backward pass of
    sums computes only what the loss reads; with :obj:`forward=True` the forward pass of training
    does so too, including :obj:`nn`. Losses and gradients are equal up to summation order. A path
    has no effect in evaluation, on pairs of features, and when PyG's own code runs.

    Args:
        nn (torch.nn.Module): The network :math:`h_{\mathbf{\Theta}}` that maps features of size
            :math:`F_{in}` to :math:`F_{out}`.
        eps (float, optional): The (initial) :math:`\epsilon`. (default: :obj:`0.`)
        train_eps (bool, optional): Whether to learn :math:`\epsilon`. (default: :obj:`False`)
        cache_input (bool, optional): Deprecated, without effect: use :meth:`aggregate_input`.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_{in}), (|\mathcal{V}_t|, F_{in}))` if bipartite, edge
          indices :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`path` is not an execution path.
        ValueError: If :obj:`path` is of another graph or device, the last loss with it read other
            nodes than it was made for, or :obj:`nn` has a part that mixes nodes, such as a batch
            norm, where only some are computed; if :obj:`edge_index` is on another device, or a size
            does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GINConv

    def __init__(
        self,
        nn: Callable,
        eps: float = 0.0,
        train_eps: bool = False,
        cache_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(nn, eps, train_eps, **kwargs)
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
            few = self._of_few(x, plain, size)
            if few is None:
                return super().forward(self._unfused(x), self._left(plain), size)
            out, own = few
            return self.nn(out if own is None else out + (1 + self.eps) * own)
        to = self._neighbours(x, edge_index, size)
        if to is None:
            return super().forward(self._unfused(x), self._left(edge_index), size)
        if path is not None and self._takes_path(to):
            return self._on_path(to, path)
        return self.nn(self._combined(self._sent(to)))

    def _alone(self, x: Any, path: ExecutionPath, compact: bool = False) -> Neighbours:
        # Under autocast PyG's result has the wider dtype of `eps`.
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(torch.promote_types(x.dtype, self.eps.dtype))
        return super()._alone(x, path, compact)

    def _sum_of_all(self, to: Neighbours) -> SparseOperator:
        return SparseOperator(to.graph(False))

    def _aggregation(self) -> tuple[Any, ...]:
        """The options that an aggregated input depends on."""
        return 'GIN', self.flow, type(self.aggr_module).__name__

    def _sums_of_nodes(self, to: Neighbours) -> bool:
        """Whether the layer sums the nodes' own dense features, and keeps their dtype."""
        x = to.source
        return (
            isinstance(x, Tensor)
            and to.root is x
            and not self._sends_more()
            and type(self.aggr_module) is SumAggregation
            and torch.promote_types(x.dtype, self.eps.dtype) == x.dtype
        )

    def _of_aggregated(
        self,
        x: AggregatedInput,
        edge_index: Any,
        path: ExecutionPath | None,
        compact_out: bool = False,
    ) -> Tensor:
        """The layer on an input that is already aggregated."""
        self._check_aggregated(x, edge_index, path)
        out, root = x.aggregated, x.root
        assert root is not None
        if path is not None and path.forward:
            self._check_commutes()
            out, root = x.rows(path.dst), x.root_rows(path.dst)
        out = self.nn(torch.addcmul(out, root, 1 + self.eps))
        if path is None or not path.forward or compact_out:
            return out
        return expand(out, path.dst, fill_of(path), path.watch())

    def _check_commutes(self) -> None:
        if isinstance(self.nn, torch.nn.Module):
            check_commutes(self.nn)

    def _takes_path(self, to: Neighbours) -> bool:
        """Whether the layer may run on a path of the graph."""
        return self._sums_of_nodes(to)

    def _on_path(
        self,
        to: Neighbours,
        path: ExecutionPath,
        compact: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """The layer on a path. Inputs and outputs may be :obj:`compact`."""
        x, eps = to.source, self.eps
        assert isinstance(x, Tensor)
        num_nodes = path.num_nodes if compact[0] else x.size(0)
        some = path.forward  # Only some rows are computed.
        if some:
            self._check_commutes()
        learned, acc = eps.requires_grad, acc_dtype(x.dtype)
        if to.edge_index is None:
            whole = path_operator(path, acc, mean=False)
        else:
            graph = graph_of(
                to.edge_index, num_nodes, num_nodes, transpose=False, values=False
            )
            whole = SparseOperator(graph)
        part = sum_on_path(path, whole, acc)
        if not learned:  # Each node adds its own features.
            own = (eps.expand(num_nodes) + 1).to(acc)
            whole, part = whole if some else whole.plus_diag(own), part.plus_diag(own)
        plan = self._plan(path, whole, part, compact)
        plan = plan._replace(compact_out=some)
        out = linear_product(x, None, None, plan)
        if learned:
            root = x
            if some:
                root = take(x, _own_rows(plan) if compact[0] else path.dst)
            out = torch.addcmul(out, root, 1 + eps)
        out = self.nn(out)
        if not some or compact[1]:
            return out
        return expand(out, path.dst, fill_of(path), path.watch())

    def _combined(self, to: Neighbours) -> Tensor:
        """The aggregated neighbours and the node itself."""
        x, root, eps = to.source, to.root, self.eps
        dtype = torch.promote_types(x.dtype, eps.dtype)
        constant = not (eps.requires_grad and torch.is_grad_enabled())
        if (
            root is x
            and constant
            and type(part_of(self, 'aggr_module')) is SumAggregation
            and dtype in (x.dtype, acc_dtype(x.dtype))
        ):
            diag = (eps.expand(x.size(0)) + 1).to(acc_dtype(x.dtype))
            return to.sum(diag=diag, out_acc=dtype != x.dtype)
        out = reduce(self.aggr_module, to)
        if root is None:
            return out
        if isinstance(root, CBSR):
            return plus(out, with_values(root, (1 + eps) * root.values))
        return torch.addcmul(out, root, 1 + eps)


def _own_rows(plan: Plan) -> Rows:
    """The positions of the destinations among the rows of the sources."""
    return Rows(plan.part.self_row, plan.part.t_self_row)
