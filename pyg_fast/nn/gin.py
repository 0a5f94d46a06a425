"""Graph isomorphism layers."""

import torch
from torch import Tensor
from torch_geometric.nn import GINConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, Size

from ..ops.cbsr import CBSR
from ..ops.spmm import acc_dtype
from ._reduce import FusedReduce, Neighbours, plus, reduce, with_values


class FastGINConv(FusedReduce, GINConv):
    r"""The graph isomorphism operator of the `"How Powerful are Graph Neural Networks?"
    <https://arxiv.org/abs/1810.00826>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = h_{\mathbf{\Theta}} \left( (1 + \epsilon) \cdot
        \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \mathbf{x}_j \right)

    A drop-in for :class:`~torch_geometric.nn.conv.GINConv`: the same options, parameters,
    state_dict, outputs and gradients. No message is ever stored, and a constant
    :math:`\epsilon` is applied inside of the kernel.

    Fused are the same inputs and aggregations as in :class:`~pyg_fast.nn.FastSAGEConv`; all else
    goes through PyG's own code.

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
        ValueError: If :obj:`edge_index` is on another device, or a size does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GINConv

    def forward(
        self, x: Tensor | OptPairTensor, edge_index: Adj, size: Size = None
    ) -> Tensor:
        """"""
        to = self._neighbours(x, edge_index, size)
        if to is None:
            return super().forward(self._unfused(x), edge_index, size)
        return self.nn(self._combined(self._sent(to)))

    def _combined(self, to: Neighbours) -> Tensor:
        """The aggregated neighbours and the node itself."""
        x, root, eps = to.source, to.root, self.eps
        dtype = torch.promote_types(x.dtype, eps.dtype)
        constant = not (eps.requires_grad and torch.is_grad_enabled())
        if (
            root is x
            and constant
            and type(self.aggr_module) is SumAggregation
            and dtype in (x.dtype, acc_dtype(x.dtype))
        ):
            diag = (1 + eps).to(acc_dtype(x.dtype)).expand(x.size(0)).contiguous()
            return to.sum(diag=diag, out_acc=dtype != x.dtype)
        out = reduce(self.aggr_module, to)
        if root is None:
            return out
        if isinstance(root, CBSR):
            return plus(out, with_values(root, (1 + eps) * root.values))
        return torch.addcmul(out, root, 1 + eps)
