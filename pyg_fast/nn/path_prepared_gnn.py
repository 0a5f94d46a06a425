"""A model that runs on execution paths."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, ReLU, Sequential
from torch_geometric.nn import LayerNorm
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver
from torch_geometric.typing import Adj, OptTensor

from ..graph._prepare_paths import execution_paths
from ..graph.execution_path import (
    ExecutionPath,
    mask_signature_of,
    signature_of,
)
from ..ops.path import Rows, expand, node_dropout, take
from ._fused import is_plain
from ._path import AggregatedInput, check_commutes, fill_of
from ._reduce import Neighbours, may_fuse, neighbours
from .gcn import PathPreparedGCNConv
from .gin import PathPreparedGINConv
from .sage import PathPreparedSAGEConv

CONVS = ('gcn', 'sage', 'gin')


class PathPreparedGNN(Module):
    r"""A graph neural network whose training computes only what its loss reads, after the
    `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on GPUs"
    <https://arxiv.org/abs/2204.02662>`_ paper.

    .. math::
        \mathbf{X}_{\ell + 1} = \mathrm{dropout}(\sigma(\mathrm{norm}(\mathrm{conv}_{\ell}
        (\mathbf{X}_{\ell}))))

    where the last layer is only a convolution. The model passes its path to each layer. With
    :obj:`forward` paths no layer stores rows that the loss does not read: hidden features have the
    rows of the paths, and only the output has a row for every node.

    Dropout uses a counter-based generator keyed by (seed, node, column), with a seed from torch's
    generator: the mask is the same whether all rows or only some are computed. Without paths, and
    in evaluation, the model is an ordinary stack of layers. Those of :obj:`"gcn"` may add
    atomically on CUDA for a plain :obj:`edge_index`, see :class:`PathPreparedGCNConv`.

    Args:
        conv (str): The kind of layers: :obj:`"gcn"`, :obj:`"sage"` or :obj:`"gin"` (with an MLP of
            two linear maps).
        in_channels (int): Size of each input sample.
        hidden_channels (int): Size of each hidden sample.
        out_channels (int): Size of each output sample.
        num_layers (int): Number of layers.
        dropout (float, optional): Dropout probability of hidden features. (default: :obj:`0.`)
        act (str or Callable, optional): The non-linearity. (default: :obj:`"relu"`)
        norm (str or torch.nn.Module, optional): The normalisation after each hidden layer, as in
            :class:`~torch_geometric.nn.models.BasicGNN`. It must normalise each node separately
            (:obj:`"layer_norm"` does, unless :obj:`norm_kwargs` say otherwise).
            (default: :obj:`None`)
        norm_kwargs (dict, optional): Arguments of :obj:`norm`. (default: :obj:`None`)
        cache_input (bool, optional): Deprecated, without effect: use :meth:`aggregate_input`.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of the layers.

    Raises:
        ValueError: If :obj:`conv` is unknown, :obj:`num_layers` below one, :obj:`dropout` out of
            range, or :obj:`norm` computes over all nodes.
    """

    def __init__(
        self,
        conv: str,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_layers: int,
        dropout: float = 0.0,
        act: str | Callable | None = 'relu',
        norm: str | Module | None = None,
        norm_kwargs: dict[str, Any] | None = None,
        cache_input: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if conv not in CONVS:
            raise ValueError(f"'conv' must be one of {CONVS}, got {conv!r}")
        if num_layers < 1:
            raise ValueError(f"'num_layers' must be at least 1, got {num_layers}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"'dropout' must be from 0 to 1, got {dropout}")
        self.conv = conv
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels
        self.num_layers = num_layers
        self.dropout = dropout
        self.act = activation_resolver(act) if act is not None else None
        self.supports_edge_weight = conv == 'gcn'
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = ModuleList(
            _conv(conv, widths[k], widths[k + 1], cache_input=cache_input and k == 0, **kwargs)
            for k in range(num_layers)
        )
        self._last_paths: tuple[Any, list[ExecutionPath]] | None = None
        self.norms = ModuleList()
        for _ in range(num_layers - 1 if norm is not None else 0):
            layer = normalization_resolver(norm, hidden_channels, **(norm_kwargs or {}))
            if isinstance(norm, str) and type(layer) is LayerNorm and not norm_kwargs:
                layer.mode = 'node'
            check_commutes(layer)
            self.norms.append(layer)

    def reset_parameters(self) -> None:
        """Resets all learnable parameters of the module."""
        for module in (*self.convs, *self.norms):
            if hasattr(module, 'reset_parameters'):
                module.reset_parameters()

    def forward(
        self,
        x: Tensor | AggregatedInput,
        edge_index: Adj | None,
        edge_weight: OptTensor = None,
        paths: Sequence[ExecutionPath] | None = None,
        mask: Tensor | None = None,
        active_only: bool = False,
    ) -> Tensor:
        """Forward pass.

        Args:
            x (Tensor or AggregatedInput): Node features :math:`(|\\mathcal{V}|, F_{in})`, or the
                result of :meth:`aggregate_input`.
            edge_index (Tensor, EdgeIndex or SparseTensor, optional): The edges, as for the layers;
                :obj:`None` to train on :obj:`paths` that stand alone, see :obj:`keep_graph` of
                :class:`~pyg_fast.transforms.ExecutionPaths`.
            edge_weight (Tensor, optional): Edge weights :math:`(|\\mathcal{E}|)`, for
                :obj:`"gcn"`. (default: :obj:`None`)
            paths (list[ExecutionPath], optional): The path of each layer.
                (default: :obj:`None`)
            mask (Tensor, optional): The nodes that the loss reads :math:`(|\\mathcal{V}|)`, bool.
                Given :obj:`paths`, they are checked against the mask. Otherwise the model prepares
                paths for the backward pass only, and again when mask or graph change: both are read
                at every call. It keeps the paths of the last mask until :meth:`reset_paths`.
                (default: :obj:`None`)
            active_only (bool): Whether to return only the rows of the nodes that the loss reads,
                ascending, as in :obj:`out[mask]`, in training and evaluation: needs :obj:`paths` or
                :obj:`mask`. With :obj:`forward` paths no matrix of all nodes is made, nor its
                gradient. (default: :obj:`False`)

        Raises:
            TypeError: If :obj:`mask` is not a bool tensor.
            ValueError: If there are edge weights that this kind of layers does not take, or
                :obj:`paths` are not one for each layer, of this graph and this mask; if
                :obj:`edge_index` is :obj:`None` and all rows are wanted in evaluation, or the paths
                do not stand alone.
        """
        if edge_weight is not None and not self.supports_edge_weight:
            raise ValueError(f"'edge_weight' is not supported by conv={self.conv!r}")
        trains = self.training and torch.is_grad_enabled()
        if edge_index is None:
            self._check_alone(paths, edge_weight, trains or active_only)
        elif paths is None and mask is not None and trains:
            paths = self._prepared(edge_index, mask, edge_weight is not None)
        if paths is not None:
            self._check(paths, mask)
        seed = None
        if self.training and self.dropout > 0:
            seed = torch.randint(2**63 - 1, (self.num_layers,), device=x.device)
        rows = Rows(None, None)  # the rows that the features have
        num_nodes = x.size(0)
        h: Any = x
        for k, conv in enumerate(self.convs):
            path = None if paths is None else paths[k]
            h, rows = self._layer(conv, h, rows, num_nodes, edge_index, edge_weight, path)
            if k == self.num_layers - 1:
                break
            if len(self.norms) > 0:
                h = self.norms[k](h)
            if self.act is not None:
                h = self.act(h)
            if seed is not None:
                h = node_dropout(h, self.dropout, seed[k : k + 1], rows.nodes)
        if active_only:
            if paths is None and mask is None:
                raise ValueError("'active_only' needs 'paths' or 'mask'")
            return self._active(h, rows, paths, mask)
        if paths is None or rows.nodes is None:
            return h
        last = paths[-1]
        return expand(h, rows, fill_of(last), last.watch())

    def aggregate_input(
        self, x: Tensor, edge_index: Tensor, edge_weight: OptTensor = None
    ) -> AggregatedInput:
        """Aggregates an input that takes no gradient and is the same in every step. Pass the result
        in place of :obj:`x`: see :meth:`PathPreparedGCNConv.aggregate_input`."""
        args = () if edge_weight is None else (edge_weight,)
        return self.convs[0].aggregate_input(x, edge_index, *args)  # type: ignore[operator]

    def _layer(
        self,
        conv: Any,
        x: Any,
        rows: Rows,
        num_nodes: int,
        edge_index: Adj | None,
        edge_weight: OptTensor,
        path: ExecutionPath | None,
    ) -> tuple[Tensor, Rows]:
        """A layer's output and its rows."""
        args = (edge_index, edge_weight) if self.conv == 'gcn' else (edge_index,)
        if not is_plain(conv):  # Its hooks or patches must run.
            return conv(expand(x, rows), *args, path=path), Rows(None, None)
        if isinstance(x, AggregatedInput):
            runs = conv._path(path, x, edge_index)
            compact_out = runs is not None and runs.forward
            out = conv._of_aggregated(x, edge_index, runs, compact_out)
            return out, runs.dst if compact_out else Rows(None, None)
        if path is None or path.is_whole or not path.forward or not conv.training:
            return conv(expand(x, rows), *args, path=path), Rows(None, None)
        runs = path
        if rows.nodes is None:
            runs = conv._path(path, x, edge_index)
        elif not torch.compiler.is_compiling():
            path.check_noted()
        out = None
        if runs is not None and torch.is_grad_enabled() and may_fuse(conv) and conv._unaltered(x):
            if rows.nodes is not path.src_nodes and rows.nodes is not None:
                x, rows = expand(x, rows), Rows(None, None)
            compact = (rows.nodes is not None, True)
            if self.conv == 'gcn':
                if conv._sums() and not conv._has_other_graph(path):
                    norm = (
                        conv._norm_of_path(path, x.dtype) if edge_index is None
                        else conv._operator(x, edge_index, edge_weight, True, num_nodes)
                    )
                    if norm is not None and conv._takes_path(norm):
                        out = conv._on_path(x, edge_index, norm, path, compact)
            else:
                to: Neighbours | None
                if edge_index is None:
                    to = conv._alone(x, path, compact[0])
                elif compact[0]:
                    to = Neighbours(x, x, edge_index, num_nodes, conv.flow)
                else:
                    to = neighbours(x, edge_index, None, conv.flow)
                if to is not None and conv._takes_path(to):
                    out = conv._on_path(to, path, compact)
        if out is not None:
            return out, path.dst
        return conv(expand(x, rows), *args, path=path), Rows(None, None)

    def _active(
        self,
        x: Tensor,
        rows: Rows,
        paths: Sequence[ExecutionPath] | None,
        mask: Tensor | None,
    ) -> Tensor:
        if rows.nodes is not None:
            return x
        if paths is not None:
            path, position = paths[-1], paths[-1].dst_position
            nodes = path.dst_nodes
            if nodes is None:
                nodes = path.derived('active', lambda: (position >= 0).nonzero().view(-1))
            return take(x, Rows(nodes, position))
        assert mask is not None
        return x[mask]

    def _prepared(self, edge_index: Any, mask: Tensor, weighted: bool) -> list[ExecutionPath]:
        """Paths for a mask: those of the last call if mask and graph are unchanged."""
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise ValueError("'mask' needs an edge_index as a tensor or EdgeIndex")
        if torch.compiler.is_compiling():
            raise ValueError("'mask' needs 'paths' in compiled code: prepare them before")
        key = mask_signature_of(mask), signature_of(edge_index), weighted, edge_index.device
        if self._last_paths is None or self._last_paths[0] != key:
            self._last_paths = None  # Free the old paths first.
            paths = execution_paths(edge_index, mask, self.num_layers, weighted)
            self._last_paths = key, paths
        return self._last_paths[1]

    def reset_paths(self) -> None:
        """Drops the paths that the model has prepared for a :obj:`mask`."""
        self._last_paths = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies prepare their own paths.
        return {**self.__dict__, '_last_paths': None}

    @staticmethod
    def _check_alone(
        paths: Sequence[ExecutionPath] | None, edge_weight: OptTensor, some_rows: bool
    ) -> None:
        if paths is None or not all(path.stands_alone for path in paths):
            raise ValueError(
                "'edge_index' must be given, unless 'paths' stand alone: prepare them with "
                'keep_graph=False'
            )
        if edge_weight is not None:
            raise ValueError("'edge_weight' must be None without 'edge_index'")
        if not some_rows:
            raise ValueError(
                "'edge_index' must be given to compute all rows: in evaluation paths alone give "
                'those of active_only=True'
            )

    def _check(self, paths: Sequence[ExecutionPath], mask: Tensor | None) -> None:
        if len(paths) != self.num_layers or any(
            path.layer != k or path.num_layers != self.num_layers for k, path in enumerate(paths)
        ):
            raise ValueError(
                f"'paths' must be those of {self.num_layers} layers, got "
                f'{[f"{path.layer} of {path.num_layers}" for path in paths]}'
            )
        if mask is None or torch.compiler.is_compiling():
            return
        if mask_signature_of(mask) != paths[0].mask_signature:
            raise ValueError("'paths' were made for another mask, or it has changed since")

    def __repr__(self) -> str:
        return (
            f'{type(self).__name__}({self.conv!r}, {self.in_channels}, {self.hidden_channels}, '
            f'{self.out_channels}, num_layers={self.num_layers})'
        )


def _conv(kind: str, in_channels: int, out_channels: int, **kwargs: Any) -> Any:
    if kind == 'gcn':
        return PathPreparedGCNConv(in_channels, out_channels, **kwargs)
    if kind == 'sage':
        return PathPreparedSAGEConv(in_channels, out_channels, **kwargs)
    mlp = Sequential(
        Linear(in_channels, out_channels), ReLU(), Linear(out_channels, out_channels)
    )
    return PathPreparedGINConv(mlp, **kwargs)
