"""The graph isomorphism layer."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.nn import GINConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, Size

from .._lazy import lazy
from ..ops._numbers import acc_dtype
from ..ops.cbsr import CBSR
from ._aggregated import AggregatedInput
from ._explain_size import refuse_weights
from ._modules import part_of
from ._reduce import Features, FusedReduce, Neighbours, plus, reduce, with_values


class FusedGINConv(FusedReduce, GINConv):
    r"""The graph isomorphism operator of the `"How Powerful are Graph Neural Networks?"
    <https://arxiv.org/abs/1810.00826>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot
        \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right)

    A drop-in for :class:`~torch_geometric.nn.conv.GINConv`: the same options, parameters,
    state_dict, outputs and gradients. No message is stored, and the kernel applies a constant
    :math:`\epsilon`.

    The kernels support the inputs and aggregations of
    :class:`~pyg_fast.nn.FusedSAGEConv`; all others run PyG's own code.

    Args:
        nn (torch.nn.Module): The network :math:`h_{\mathbf{\Theta}}` that maps features of size
            :math:`F_{in}` to :math:`F_{out}`.
        eps (float, optional): The (initial) :math:`\epsilon`. (default: :obj:`0.`)
        train_eps (bool, optional): Whether to learn :math:`\epsilon`. (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_{in}), (|\mathcal{V}_t|, F_{in}))` if bipartite, edge
          indices :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        TypeError: If :obj:`nn` cannot be called.
        ValueError: If :obj:`edge_index` is on another device, or a size does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GINConv

    def __init__(
        self,
        nn: Callable[[Tensor], Tensor],
        eps: float = 0.0,
        train_eps: bool = False,
        **kwargs: object,
    ) -> None:
        if not callable(nn):
            raise TypeError(
                f"'nn' must be a network, such as torch.nn.Linear(64, 8), got {type(nn).__name__}"
            )
        super().__init__(nn, eps, train_eps, **kwargs)

    def forward(
        self,
        x: Tensor | OptPairTensor | AggregatedInput,
        edge_index: Adj,
        size: Size = None,
    ) -> Tensor:
        """"""
        if isinstance(x, AggregatedInput):
            return self._of_aggregated(x, edge_index)
        refuse_weights(size)
        plain = self._few_edges(x, edge_index)
        if plain is not None:
            size = size if plain is edge_index else None  # PyG reads none beside an EdgeIndex.
            few = self._propagate_few(x, plain, size)
            if few is None:
                return self._by_pyg(x, plain, size)
            out, own = few
            return self.nn(out if own is None else out + (1 + self.eps) * own)
        to = self._neighbours(x, edge_index, size)
        if to is None:
            return self._by_pyg(x, edge_index, size)
        return self.nn(self._combined(self._messages_of(to)))

    def _by_pyg(self, x: Features, edge_index: Adj, size: Size) -> Tensor:
        """PyG's own way."""
        return super().forward(self._features_for_pyg(x), self._edges_for_pyg(edge_index), size)

    def _aggregation(self) -> tuple[object, ...]:
        return 'GIN', self.flow, type(self.aggr_module).__name__

    def _sums_of_nodes(self, to: Neighbours) -> bool:
        """Whether the layer sums the nodes' own dense features, and keeps their dtype."""
        x = to.source
        return (
            isinstance(x, Tensor)
            and to.root is x
            and not self._changes_messages()
            and type(self.aggr_module) is SumAggregation
            and torch.promote_types(x.dtype, self.eps.dtype) == x.dtype
        )

    def _of_aggregated(self, x: AggregatedInput, edge_index: Adj) -> Tensor:
        self._check_aggregated(x, edge_index)
        assert x.root is not None
        return self.nn(torch.addcmul(x.aggregated, x.root, 1 + self.eps))

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


__getattr__ = lazy(__name__, {'PathPreparedGINConv': 'papers.paths'})  # pickles of 0.2
