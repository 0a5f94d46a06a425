"""The model of the MaxK-GNN paper."""

import copy

from torch import Tensor
from torch.nn import Dropout, Identity, Module, ModuleList
from torch_geometric.nn import LayerNorm, Linear, MessagePassing
from torch_geometric.nn.resolver import normalization_resolver
from torch_geometric.typing import Adj, OptTensor

from ...nn._explain_features import check_columns, check_input, check_like_parameters
from ...nn._explain_options import naming_options
from ...nn._reduce import with_values
from ...ops.cbsr import CBSR
from ...ops.product import needs_transpose
from ..paths.convs import PathPreparedGCNConv
from .convs import OMITTED, MaxKGINConv, MaxKSAGEConv, Omitted, check_k, given_k
from .op import maxk

CONVS = ('gcn', 'sage', 'gin')


class MaxKGNN(Module):
    r"""The graph neural network of the `"MaxK-GNN: Extremely Fast GPU Kernel Design for
    Accelerating Graph Neural Networks Training" <https://arxiv.org/abs/2312.08656>`_ paper.

    .. math::
        \mathbf{X}_{\ell} = \mathbf{A} \, h(\mathbf{X}_{\ell - 1} \mathbf{W}_{\ell} +
        \mathbf{b}_{\ell})

    between a linear map of the input and one to the output, where :math:`h` keeps the :math:`k`
    largest features of each node. Dropout and the aggregation read them in compressed form; a
    normalisation may follow. :math:`\mathbf{A}` is

    - :obj:`"gcn"`: :math:`\mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}} \mathbf{\hat{D}}^{-1/2}` with
      self-loops, as in :class:`~torch_geometric.nn.conv.GCNConv`;
    - :obj:`"gin"`: :math:`\mathbf{A} + (1 + \epsilon) \mathbf{I}` with learned :math:`\epsilon`,
      as in :class:`~torch_geometric.nn.conv.GINConv`;
    - :obj:`"sage"`: a mean, with linear maps after it instead of before:
      :math:`\mathbf{x}_i = \mathbf{W}_1 h(\mathbf{x}_i) + \mathbf{W}_2 \cdot
      \mathrm{mean}_{j \in \mathcal{N}(i)} h(\mathbf{x}_j) + \mathbf{b}`, as in
      :class:`~torch_geometric.nn.conv.SAGEConv`.

    As in the authors' code, MaxK is also applied to a node's own features, and for :obj:`"gcn"` and
    :obj:`"gin"` a ReLU follows the first linear map.

    No dense tensor is made between MaxK and the aggregation. The dense form of :math:`h` is made
    only for the node's own term, and not kept: for :obj:`"sage"` once per product of the forward
    and the backward pass, and for :obj:`"gin"` as the base of the sum. Gradients add atomically on
    CUDA, as in :class:`MaxKGCNConv`.

    Args:
        conv (str): The kind of layers: :obj:`"gcn"`, :obj:`"sage"` or :obj:`"gin"`.
        in_channels (int): Size of each input sample, or :obj:`-1` to derive it from the first
            input.
        hidden_channels (int): Size of each hidden sample.
        out_channels (int): Size of each output sample.
        num_layers (int): Number of layers.
        k (int or None): Number of features that MaxK keeps; :obj:`None` uses ReLU instead.
            Omitting it does too, with a warning; the next release needs it.
        dropout (float, optional): Dropout probability after the nonlinearity.
            (default: :obj:`0.`)
        norm (str or torch.nn.Module, optional): The normalisation after each layer, as in
            :class:`~torch_geometric.nn.models.BasicGNN`. :obj:`"layer_norm"` normalises each node
            separately, as in the paper, unless :obj:`norm_kwargs` say otherwise.
            (default: :obj:`None`)
        norm_kwargs (dict, optional): Arguments of :obj:`norm`. (default: :obj:`None`)
        balanced (bool, optional): A different nonlinearity, see :class:`~pyg_fast.nn.MaxK`.
            (default: :obj:`False`)

    Raises:
        TypeError: If :obj:`k` is not an integer.
        ValueError: If :obj:`conv` is unknown, :obj:`num_layers` below one, or :obj:`k` not within
            :math:`1, \ldots,` :obj:`hidden_channels`.
    """

    @naming_options
    def __init__(
        self,
        conv: str,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        k: int | None | Omitted = OMITTED,
        dropout: float = 0.0,
        norm: str | Module | None = None,
        norm_kwargs: dict[str, object] | None = None,
        balanced: bool = False,
    ) -> None:
        super().__init__()
        if conv not in CONVS:
            raise ValueError(f"'conv' must be one of {CONVS}, got {conv!r}")
        if num_layers < 1:
            raise ValueError(f"'num_layers' must be at least 1, got {num_layers}")
        k = given_k(k, type(self))
        if k is not None:
            check_k(k, hidden_channels)
        self.conv = conv
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels
        self.num_layers = num_layers
        self.k = k
        self.balanced = balanced
        self.supports_edge_weight = conv == 'gcn'
        self.dropout = Dropout(dropout)
        self.lin_in = _glorot_linear(in_channels, hidden_channels)
        self.lins = ModuleList(
            Identity() if conv == 'sage' else _glorot_linear(hidden_channels, hidden_channels)
            for _ in range(num_layers)
        )
        self.convs = ModuleList(_conv(conv, hidden_channels) for _ in range(num_layers))
        layer = _norm(norm, hidden_channels, norm_kwargs)
        self.norms = ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.lin_out = _glorot_linear(hidden_channels, out_channels)

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        for module in (self.lin_in, *self.lins, *self.convs, *self.norms, self.lin_out):
            if hasattr(module, 'reset_parameters'):
                module.reset_parameters()

    def forward(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor = None) -> Tensor:
        """Forward pass.

        Args:
            x (Tensor): Node features :math:`(|\\mathcal{V}|, F_{in})`.
            edge_index (Tensor, EdgeIndex or SparseTensor): The edges, as for the layers.
            edge_weight (Tensor, optional): Edge weights :math:`(|\\mathcal{E}|)`, for
                :obj:`"gcn"`. (default: :obj:`None`)

        Raises:
            ValueError: If there are edge weights that this kind of layers does not take.
        """
        if edge_weight is not None and not self.supports_edge_weight:
            raise ValueError(f"'edge_weight' is not supported by conv={self.conv!r}")
        check_input(x)
        check_columns(x, self.in_channels)
        check_like_parameters('x', x, self.lin_in.weight)
        args = (edge_index, edge_weight) if self.supports_edge_weight else (edge_index,)
        x = self.lin_in(x)
        if self.conv != 'sage':
            x = x.relu()
        for lin, conv, norm in zip(self.lins, self.convs, self.norms, strict=True):
            x = norm(conv(self._kept(lin(x)), *args))
        return self.lin_out(x)

    def _kept(self, x: Tensor) -> Tensor | CBSR:
        """Nonlinearity and dropout."""
        if self.k is None:
            x = x.relu()
        if self.k in (None, self.hidden_channels):
            return self.dropout(x)
        topk = maxk(x, self.k, self.balanced)
        return with_values(topk, self.dropout(topk.values))

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}({self.conv!r}, {self.in_channels}, {self.hidden_channels}, '
            f'{self.out_channels}, num_layers={self.num_layers}, k={self.k})'
        )


def _conv(kind: str, channels: int) -> MessagePassing:
    if kind == 'gcn':
        return GCNAggregation(channels)
    if kind == 'gin':
        return MaxKGINConv(Identity(), train_eps=True, k=None)
    conv = MaxKSAGEConv(channels, channels, k=None)
    for lin in (conv.lin_l, conv.lin_r):
        lin.weight_initializer = 'glorot'
    conv.reset_parameters()
    return conv


def _glorot_linear(in_channels: int, out_channels: int) -> Linear:
    return Linear(in_channels, out_channels, weight_initializer='glorot')


def _norm(norm: str | Module | None, channels: int, kwargs: dict[str, object] | None) -> Module:
    if norm is None:
        return Identity()
    layer = normalization_resolver(norm, channels, **(kwargs or {}))
    if isinstance(norm, str) and type(layer) is LayerNorm and 'mode' not in (kwargs or {}):
        layer.mode = 'node'
    return layer


class GCNAggregation(PathPreparedGCNConv):
    """The aggregation of a GCN layer, without a linear map; also of CBSR features."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, bias=False)
        self.lin = Identity()

    def reset_parameters(self) -> None:
        MessagePassing.reset_parameters(self)

    def forward(  # type: ignore[override]
        self, x: Tensor | CBSR, edge_index: Adj, edge_weight: OptTensor = None
    ) -> Tensor:
        """"""
        if isinstance(x, CBSR):
            if self._fusible(x.values):
                norm = self._operator(x, edge_index, edge_weight, needs_transpose(x))
                if norm is not None:
                    return self._aggregated(x, norm)
            x = x.to_dense()
        return super().forward(x, edge_index, edge_weight)
