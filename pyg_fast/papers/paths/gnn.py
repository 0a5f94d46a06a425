"""A model that runs on execution paths."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter, ReLU, RReLU, Sequential
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint as checkpointed
from torch_geometric.data import Data
from torch_geometric.nn import LayerNorm, MessagePassing
from torch_geometric.nn.resolver import activation_resolver, normalization_resolver
from torch_geometric.typing import Adj, OptTensor

from ...graph.signature import signature_of
from ...nn._aggregated import TILE, AggregatedInput, FeaturesT, stand_in
from ...nn._checks import may_fuse
from ...nn._explain_features import check_columns, check_input
from ...nn._explain_options import naming_options
from ...nn._inference import inference
from ...nn._modules import is_plain, mixes_nodes
from ...nn._reduce import neighbours
from ...ops._numbers import check_flag
from ...ops.linear_product import (
    Parts,
    aggregates_first,
    linear_product,
    rows_of_block,
    takes_gradient,
)
from ...ops.path import Rectify, Rows, expand, node_dropout, rectify, take
from ...ops.row_blocks import RowBlock, row_blocks, tile_width
from ...sparse.graph import Graph
from ._layer import PathPrepared, fill_of, refuse_paths
from ._out_of_memory import Call, explain
from .build import execution_paths
from .convs import PathPreparedGCNConv, PathPreparedGINConv, PathPreparedSAGEConv
from .execution_path import ExecutionPath, check_mask_shape, mask_signature_of

CONVS: dict[str, type[PathPrepared]] = {
    'gcn': PathPreparedGCNConv, 'sage': PathPreparedSAGEConv, 'gin': PathPreparedGINConv
}  # fmt: skip
_EVERY = Rows(None, None)
_LIBRARIES = 'torch.nn.', 'torch_geometric.', 'pyg_fast.'


class PathPreparedGNN(Module):
    r"""A graph neural network whose training computes only what its loss reads, after the
    `"Accelerating Backward Aggregation in GCN Training with Execution Path Preparing on GPUs"
    <https://arxiv.org/abs/2204.02662>`_ paper.

    .. math::
        \mathbf{X}_{\ell + 1} = \mathrm{dropout}(\sigma(\mathrm{norm}(\mathrm{conv}_{\ell}
        (\mathbf{X}_{\ell}))))

    where the last layer is only a convolution. The model passes its path to each layer. With
    :obj:`forward` paths no layer stores rows that the loss does not read: hidden features have the
    rows of the paths, and only the output has a row for every node, which is NaN where the loss
    does not read it: score other nodes in evaluation.

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
        checkpoint (bool, optional): Whether training keeps less and computes more: aggregated
            features exist only for a part of the rows at a time, and the backward pass aggregates
            again; :obj:`"gin"` computes whole layers again. Dropout is the same both times.
            Gradients of gradients need :obj:`False`. It has no effect on layers that map before
            they aggregate, which keep only their input, and on paths without :obj:`forward`.
            (default: :obj:`False`)
        tile (int, optional): The number of columns of :obj:`x` that the first layer aggregates at a
            time, rounded down to a divisor of :obj:`in_channels`: two tiles of features in host
            memory are on the device at once. If given, features on the device are divided too.
            (default: :obj:`None`, 32 in host memory, otherwise all)
        fill (float, optional): The rows of the output that training with :obj:`forward` paths does
            not compute. NaN shows in every score that reads them by mistake; gradients of these
            rows are ignored. With :obj:`0.` a loss on them raises an error instead.
            (default: :obj:`nan`)
        **kwargs (optional): Additional arguments of the layers.

    Raises:
        TypeError: If an option is of the wrong type.
        ValueError: If :obj:`conv` is unknown, :obj:`num_layers` below one, :obj:`dropout` out of
            range, or :obj:`norm` computes over all nodes.
    """

    checkpoint = False  # of a model that an earlier version has saved
    tile: int | None = None
    fill: float = math.nan

    @naming_options
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
        norm_kwargs: dict[str, object] | None = None,
        checkpoint: bool = False,
        tile: int | None = None,
        fill: float = math.nan,
        **kwargs: object,
    ) -> None:
        super().__init__()
        _check_options(conv, num_layers, dropout, tile)
        _check_types(norm_kwargs, checkpoint, fill)
        self.conv = conv
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels
        self.num_layers = num_layers
        self.checkpoint, self.tile, self.fill = checkpoint, tile, float(fill)
        self.dropout = dropout
        self.act = activation_resolver(act) if act is not None else None
        self.supports_edge_weight = CONVS[conv]._takes_edge_weight
        self.convs = ModuleList(
            _conv(conv, fin, fout, **kwargs) for fin, fout in pairwise(self._widths)
        )
        self._last_paths: tuple[tuple[object, ...], list[ExecutionPath]] | None = None
        self.norms = ModuleList()
        for _ in range(num_layers - 1 if norm is not None else 0):
            layer = normalization_resolver(norm, hidden_channels, **(norm_kwargs or {}))
            if isinstance(norm, str) and type(layer) is LayerNorm and not norm_kwargs:
                layer.mode = 'node'
            if mixes_nodes(layer) is not None:
                raise ValueError(
                    f"'norm' must treat each node by itself, such as norm='layer_norm', got "
                    f'{norm!r}'
                )
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
                result of :meth:`aggregate_input`. Features without gradient may be in pinned host
                memory beside edges on a GPU: the first layer then copies columns to it while it
                aggregates others, twice per training step.
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
        refuse_paths('paths', edge_weight)
        check_flag('active_only', active_only)
        if paths is not None:
            _check_paths(paths)
        check_input(x)
        if edge_weight is not None and not self.supports_edge_weight:
            raise ValueError(f"'edge_weight' is not supported by conv={self.conv!r}")
        check_columns(x, self.in_channels)
        trains = self.training and torch.is_grad_enabled()
        if edge_index is None:
            self._check_alone(paths, edge_weight, trains or active_only)
        elif paths is None and mask is not None and trains:
            check_mask_shape(mask, x.size(0))
            paths = self._prepared(edge_index, mask, edge_weight is not None)
        if paths is not None:
            self._check(paths, mask)
        elif active_only and mask is None:
            raise ValueError("'active_only' needs 'paths' or 'mask'")
        device = _stand_in(x, edge_index, None if paths is None else paths[0]).device
        path = seeds = None
        if self.training and self.dropout > 0:
            seeds = torch.randint(2**63 - 1, (self.num_layers,), device=device)
        call = Call(edge_index, edge_weight, x.size(0), device, trains and self.checkpoint)
        k, h, rows = 0, x, Rows(None, None)  # features and the rows that they have
        try:
            for k in range(self.num_layers):
                path = None if paths is None else paths[k]
                args = (k, h, rows, call, path, None if seeds is None else seeds[k : k + 1])
                recomputes = call.recomputes and not self.convs[k]._maps_linearly
                again = self._again(k) if recomputes else None
                h, rows = self._hidden(*args) if again is None else checkpointed(
                    again, *args, use_reentrant=False, preserve_rng_state=self._draws(k)
                )  # fmt: skip
            assert isinstance(h, Tensor)
            if not active_only:
                k = self.num_layers
                return h if path is None else self._of_all(h, rows, path)
        except torch.OutOfMemoryError as error:
            if torch.compiler.is_compiling():
                raise
            failed = explain(error, self, k, x, call, path, active_only)
        else:
            return self._active(h, rows, path, mask)
        raise failed  # Outside of the handler, whose error holds a layer's tensors.

    def aggregate_input(
        self,
        x: Tensor,
        edge_index: Tensor | None,
        edge_weight: OptTensor = None,
        paths: Sequence[ExecutionPath] | None = None,
    ) -> AggregatedInput:
        """Aggregates an input that takes no gradient and is the same in every step. Pass the result
        in place of :obj:`x`: see :meth:`PathPreparedGCNConv.aggregate_input`. Given :obj:`paths`
        that were prepared with :obj:`forward`, it has only the rows that training computes: then
        it needs these paths."""
        path = None if paths is None else paths[0]
        return self.convs[0].aggregate_input(x, edge_index, edge_weight, path=path)  # type: ignore[operator]

    def inference(
        self,
        data: Data,
        max_bytes: int | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        r"""The model's output in evaluation for all nodes, in blocks of rows, with bounded memory:
        see :func:`~pyg_fast.nn.inference`.

        Args:
            data (Data): A graph with :obj:`x`, :obj:`edge_index` and perhaps :obj:`edge_weight` for
                :obj:`"gcn"`, on the model's device or in host memory.
            max_bytes (int, optional): The device memory that the call may use, in addition to its
                arguments, the result if it is on the device, and what a prepared graph keeps.
                (default: :obj:`None`, on a GPU 9/10 of the free memory, otherwise any)
            device (torch.device or str, optional): Where to compute. (default: :obj:`None`, the
                device of the model)

        Returns:
            Tensor: :math:`(|\mathcal{V}|, F_{out})`, on the device of :obj:`x`.

        Raises:
            TypeError, ValueError: As :func:`~pyg_fast.nn.inference`; ValueError also if
                :obj:`data` has no edges.
        """
        if not isinstance(data, Data):
            got = type(data).__name__
            raise TypeError(f"'data' must be a torch_geometric.data.Data, got {got}")
        for name in ('x', 'edge_index'):
            if not isinstance(data.get(name), Tensor):
                raise ValueError(f"'data' must have a tensor {name!r}, got {data.get(name)!r}")
        weight = data.get('edge_weight') if self.supports_edge_weight else None
        layers: list[Callable[[Tensor], Tensor]] = []
        for k, conv in enumerate(self.convs):
            layers.append(conv)
            if k < self.num_layers - 1:
                layers += [self.norms[k]] if len(self.norms) > 0 else []
                layers += [self.act] if self.act is not None else []
        return inference(layers, data.x, data.edge_index, weight, max_bytes, device)

    def _hidden(
        self, k: int, x: Tensor | AggregatedInput, rows: Rows, call: Call,
        path: ExecutionPath | None, seed: Tensor | None,
    ) -> tuple[Tensor, Rows]:  # fmt: skip
        """A layer with all that follows it, and its rows."""
        rectifies, how = self._rectifies(k), Rectify(self.dropout, seed)
        out, rows, done = self._layer(k, x, rows, call, path, how if rectifies else None)
        if k == self.num_layers - 1 or done:
            return out, rows
        if rectifies:
            return rectify(out, how, rows.nodes), rows
        if len(self.norms) > 0:
            out = self.norms[k](out)
        if self._is_relu():
            return rectify(out, how, rows.nodes), rows
        if self.act is not None:
            out = self.act(out)
        if seed is not None:
            out = node_dropout(out, self.dropout, seed, rows.nodes)
        return out, rows

    def _again(self, k: int) -> Callable[..., tuple[Tensor, Rows]] | None:
        """A hidden layer as a function that the backward pass calls again, or None where it would
        then have other parameters: those that `functional_call` has put into it."""
        parts = [part for part in (self.convs[k], *self.norms[k : k + 1], self.act)
                 if isinstance(part, Module)]  # fmt: skip
        # torch's checkpoint does not save the noise of RReLU.
        draws = any(isinstance(each, RReLU) for part in parts for each in part.modules())
        if k == self.num_layers - 1 or draws:
            return None
        if torch.compiler.is_compiling():
            return self._hidden

        def parameters() -> list[Tensor]:
            return [parameter for part in parts for parameter in part.parameters()]

        first = parameters()
        if not all(isinstance(parameter, Parameter) for parameter in first):
            return None

        def hidden(*args: object) -> tuple[Tensor, Rows]:
            if any(a is not b for a, b in zip(first, parameters(), strict=True)):
                raise RuntimeError(
                    f'layer {k} has other parameters in the backward pass than in the forward '
                    'pass: use checkpoint=False'
                )
            return run(*args)

        run: Callable[..., tuple[Tensor, Rows]] = self._hidden
        return hidden

    def _draws(self, k: int) -> bool:
        """Whether a hidden layer may take random numbers from torch's generator."""
        if torch.compiler.is_compiling():
            return True
        parts = self.convs[k], *self.norms[k : k + 1], *([] if self.act is None else [self.act])
        return any(
            not isinstance(part, Module) or any(
                isinstance(each, _DropoutNd)
                or not type(each).__module__.startswith(_LIBRARIES)
                for each in part.modules()
            ) for part in parts
        )  # fmt: skip

    def _is_relu(self) -> bool:
        return type(self.act) is ReLU and is_plain(self.act)

    def _rectifies(self, k: int) -> bool:
        """Whether a ReLU, and dropout, directly follow the sum of a layer."""
        if k == self.num_layers - 1 or len(self.norms) > 0 or not self._is_relu():
            return False
        conv: MessagePassing = self.convs[k]
        return conv._ends_linearly()

    def _layer(
        self, k: int, x: Tensor | AggregatedInput, rows: Rows, call: Call,
        path: ExecutionPath | None, how: Rectify | None,
    ) -> tuple[Tensor, Rows, bool]:  # fmt: skip
        """A layer's output, its rows, and whether it went through :obj:`how`."""
        conv: MessagePassing = self.convs[k]
        edge_index = call.edge_index
        args = (edge_index, call.edge_weight) if conv._takes_edge_weight else (edge_index,)
        # Paths alone know no other rows, also in evaluation.
        trains = (conv.training and torch.is_grad_enabled()) or edge_index is None
        on_host = x.device != call.device
        staged = on_host or (self.tile is not None and k == 0 and not x.requires_grad)
        if not is_plain(conv):  # Its hooks or patches must run.
            if on_host:
                raise ValueError(f"'x' must be on {call.device}: layer {k} has hooks or patches")
            x = expand(x, rows) if isinstance(x, Tensor) else x
            return conv(x, *args, path=path), _EVERY, False
        if staged and isinstance(x, Tensor) and self._sums_tiles(conv, x, call):
            x = conv.aggregate_input(x, edge_index, path=path if trains else None, tile=self.tile)
        if isinstance(x, AggregatedInput):
            return *self._aggregated(conv, x, edge_index, path), False
        runs = path if path is not None and path.forward and not path.is_whole and trains else None
        streams = staged or (
            call.recomputes and conv._maps_linearly and (path is None or path.forward)
        )
        if runs is not None or streams:
            if staged and x.requires_grad:
                raise ValueError("'x' in host memory must not require a gradient")
            x, rows, runs = self._rows_for(conv, x, rows, call, path, runs)
            way = _Way(path, runs, how, staged, streams)
            out, done = self._described(conv, x, rows, call, way)
            if out is not None:
                return out, _EVERY if runs is None else runs.dst, done
            self._check_on_device(conv, x, call)
        return conv(expand(x, rows), *args, path=path), _EVERY, False

    @staticmethod
    def _rows_for(
        conv: MessagePassing, x: Tensor, rows: Rows, call: Call, path: ExecutionPath | None,
        runs: ExecutionPath | None,
    ) -> tuple[Tensor, Rows, ExecutionPath | None]:  # fmt: skip
        """The features with the rows that the layer reads, these rows, and :obj:`runs`, or None if
        the layer does not run on its path."""
        if path is not None and rows.nodes is None:
            given = _stand_in(x, call.edge_index, path)
            if conv._choose_path(path, given, call.edge_index) is None:
                runs = None
        elif path is not None and not torch.compiler.is_compiling():
            path.check_noted()
        if rows.nodes is not None and (runs is None or rows.nodes is not runs.src_nodes):
            return expand(x, rows), _EVERY, runs
        return x, rows, runs

    def _aggregated(
        self, conv: MessagePassing, x: AggregatedInput, edge_index: Adj, path: ExecutionPath | None
    ) -> tuple[Tensor, Rows]:
        """The output of a layer on an aggregated input, and its rows."""
        runs = conv._choose_path(path, x, edge_index)
        if runs is None:
            return conv._of_aggregated(x, edge_index), _EVERY
        out = conv._of_aggregated_on(x, edge_index, runs, runs.forward)
        return out, runs.dst if runs.forward else _EVERY

    def _described(
        self, conv: MessagePassing, x: Tensor, rows: Rows, call: Call, way: '_Way'
    ) -> tuple[Tensor | None, bool]:
        """The output of a layer by its description, in parts where the model streams, and whether
        it went through :obj:`how`; None if no description fits."""
        on, runs = _stand_in(x, call.edge_index, way.path), way.runs
        describes = conv._maps_linearly or runs is not None
        if not (may_fuse(conv) and conv._unaltered(on) and describes):
            return None, False
        compact = (rows.nodes is not None, runs is not None)
        given = conv._describe_on(
            on, call.edge_index, call.edge_weight, runs, compact, call.num_nodes
        )
        if given is None:
            return None, False
        weight, plan = given.weight, given.plan
        assert plan.part is not None
        graph, parts = plan.part.graph, None
        if way.streams and weight is not None and not plan.out_acc and (
            way.staged or aggregates_first(
                weight, takes_gradient(x), takes_gradient(weight), graph.num_dst < graph.num_src
            )
        ):  # fmt: skip
            if way.staged:
                width = tile_width(x.size(1), self.tile or TILE)
                parts = Parts(None, width, given.x.dtype, way.how)
            else:
                x = given.x
                parts = Parts(_blocks(graph, way.path), None, x.dtype, way.how)
            given = given._replace(x=x, plan=plan._replace(parts=parts))
        elif runs is None or way.staged:
            return None, False
        out = conv._finish(linear_product(*given), given, runs, compact[1])
        return out, parts is not None and way.how is not None

    @staticmethod
    def _check_on_device(conv: MessagePassing, x: Tensor, call: Call) -> None:
        """Raises for features in host memory that a layer does not sum by a kernel."""
        if x.device != call.device:
            why = conv._last_run or 'its result has another dtype, or PyG takes other arguments'
            raise ValueError(
                f"'x' must be on {call.device}, got {x.device}: features in host memory need a "
                f'layer that sums them by a kernel, but {why}'
            )

    @staticmethod
    def _sums_tiles(conv: MessagePassing, x: Tensor, call: Call) -> bool:
        """Whether a layer is no linear map, and sums columns of its input by a kernel; if the input
        is in host memory, or there are no edges, the layer itself says why not."""
        if conv._maps_linearly:
            return False
        if x.device != call.device or call.edge_index is None:
            return True
        if not (may_fuse(conv) and conv._unaltered(x)):
            return False
        to = neighbours(x, call.edge_index, None, conv.flow)
        return to is not None and conv._takes_path(to)

    @property
    def _widths(self) -> list[int]:
        hidden = [self.hidden_channels] * (self.num_layers - 1)
        return [self.in_channels, *hidden, self.out_channels]

    def _active(
        self, x: Tensor, rows: Rows, path: ExecutionPath | None, mask: Tensor | None
    ) -> Tensor:
        """The rows of the nodes that the loss reads, of the last layer's output."""
        if rows.nodes is not None:
            return x
        if path is not None:
            position, nodes = path.dst_position, path.dst_nodes
            if nodes is None:
                nodes = path.derived('active', lambda: (position >= 0).nonzero().view(-1))
            return take(x, Rows(nodes, position))
        assert mask is not None
        return x[mask]

    def _of_all(self, x: Tensor, rows: Rows, path: ExecutionPath) -> Tensor:
        """The rows of all nodes, of the last layer's output on a path."""
        if not path.forward or path.is_whole:
            return x
        if rows.nodes is None:
            # A layer with hooks, or PyG's code, fills the other rows itself, or computes them of
            # such: they mean nothing.
            if not (self.training and torch.is_grad_enabled()):
                return x
            x, rows = take(x, path.dst), path.dst
        fill = fill_of(path) or self.fill
        # NaN has NaN gradients, also where the loss does not read it.
        return expand(x, rows, fill, None if math.isnan(fill) else path.watch())

    def _prepared(self, edge_index: Adj, mask: Tensor, weighted: bool) -> list[ExecutionPath]:
        """Paths for a mask: those of the last call if mask and graph are unchanged."""
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            raise ValueError("'mask' needs an edge_index as a tensor or EdgeIndex")
        if torch.compiler.is_compiling():
            raise ValueError("'mask' needs 'paths' in compiled code: prepare them before")
        key = mask_signature_of(mask), signature_of(edge_index), weighted, edge_index.device
        if self._last_paths is None or self._last_paths[0] != key:
            self._last_paths = None  # Free the old paths first.
            self._last_paths = key, execution_paths(edge_index, mask, self.num_layers, weighted)
        return self._last_paths[1]

    def reset_paths(self) -> None:
        """Drops the paths that the model has prepared for a :obj:`mask`."""
        self._last_paths = None

    def __getstate__(self) -> dict[str, object]:
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


class _Way(NamedTuple):
    """How a layer runs."""

    path: ExecutionPath | None
    runs: ExecutionPath | None  # the path, if only its rows are computed
    how: Rectify | None  # what follows the layer's sum
    staged: bool  # whether columns of its input are on the device at a time
    streams: bool  # whether it aggregates some columns, or rows, at a time


def _check_options(conv: str, num_layers: int, dropout: float, tile: int | None) -> None:
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int)):
        raise TypeError(f"'tile' must be an integer, got {type(tile).__name__}")
    if tile is not None and tile < 1:
        raise ValueError(f"'tile' must be positive, got {tile}")
    if not isinstance(conv, str) or conv not in CONVS:
        raise ValueError(f"'conv' must be one of {tuple(CONVS)}, got {conv!r}")
    if num_layers < 1:
        raise ValueError(f"'num_layers' must be at least 1, got {num_layers}")
    if not 0 <= dropout <= 1:
        raise ValueError(f"'dropout' must be from 0 to 1, got {dropout}")


def _check_types(norm_kwargs: object, checkpoint: object, fill: object) -> None:
    if norm_kwargs is not None and not isinstance(norm_kwargs, dict):
        got = type(norm_kwargs).__name__
        raise TypeError(f"'norm_kwargs' must be a dictionary of arguments, got {got}")
    check_flag('checkpoint', checkpoint)
    if isinstance(fill, bool) or not isinstance(fill, (int, float)):
        raise TypeError(f"'fill' must be a number, got {type(fill).__name__}")


def _check_paths(paths: object) -> None:
    wrong = None
    if not isinstance(paths, (list, tuple)):
        wrong = 'an ExecutionPath' if isinstance(paths, ExecutionPath) else type(paths).__name__
    else:
        others = [path for path in paths if not isinstance(path, ExecutionPath)]
        wrong = f'a list of {type(others[0]).__name__}' if others else None
    if wrong is not None:
        raise TypeError(
            f"'paths' must be a list, of a path for each layer, got {wrong}: they are "
            'data.execution_paths, and a mask is given by name, mask=mask'
        )


def _blocks(graph: Graph, path: ExecutionPath | None) -> tuple[RowBlock, ...]:
    """The rows of a graph in blocks; a path keeps them."""
    num_rows = rows_of_block(graph.num_dst)
    if path is None:
        return row_blocks(graph, num_rows)
    key, parts = ('blocks', num_rows), (graph.rowptr, graph.col, graph.perm, graph.groups)
    of, blocks = path.derived(key, lambda: (parts, row_blocks(graph, num_rows)))
    if any(a is not b for a, b in zip(of, parts, strict=True)):
        # The whole graph of a call with other loops, weights or order of edges.
        path._derived.pop(key, None)
        _, blocks = path.derived(key, lambda: (parts, row_blocks(graph, num_rows)))
    return blocks


def _conv(kind: str, in_channels: int, out_channels: int, **kwargs: object) -> PathPrepared:
    if CONVS[kind]._maps_linearly:
        return CONVS[kind](in_channels, out_channels, **kwargs)
    mlp = Sequential(Linear(in_channels, out_channels), ReLU(), Linear(out_channels, out_channels))
    return CONVS[kind](mlp, **kwargs)


def _stand_in(
    x: FeaturesT, edge_index: Adj | None, path: ExecutionPath | None
) -> FeaturesT | Tensor:
    """Features to choose a kernel by: those in host memory stay there, beside a graph on a GPU."""
    return stand_in(x, path if edge_index is None else edge_index)
