"""Inputs that are aggregated once, because they take no gradient and are the same in every step."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import Linear, Sequential
from torch_geometric import EdgeIndex
from torch_geometric.nn import MLP, GINConv
from torch_geometric.nn import Linear as LinearOfPyG
from torch_geometric.typing import Adj, OptTensor

from ..graph._cache import Entry
from ..graph.signature import signature_of
from ..ops._edges import is_capturing
from ..ops.linear_product import Plan, aggregated_by_tiles
from ..ops.path import Rows, take
from ..ops.product import product
from ..ops.row_blocks import tile_width
from ._checks import why_not_layer
from ._explain_features import check_columns, columns_of
from ._layer import Fused

FeaturesT = TypeVar('FeaturesT')

TILE = 32  # columns of features in host memory that are on the device at once


class AggregatedInput:
    r"""The aggregation of an input that takes no gradient. :meth:`aggregate_input` of a layer makes
    it once; pass it to the layer in place of the input.

    .. math::
        \mathbf{A} (\mathbf{X} \mathbf{\Theta}) = (\mathbf{A} \mathbf{X}) \mathbf{\Theta}

    It has its own values: later writes to the input, the edges or their weights do not change it.
    It belongs to the graph and to the options of the layer's aggregation; a layer with other
    options raises an error.

    Shapes:
        - **aggregated:** :math:`\mathbf{A} \mathbf{X}` of shape :math:`(N, F_{in})`, or only the
          rows :obj:`nodes` of it
        - **root:** :math:`\mathbf{X}` itself where the layer needs it, of the same shape
    """

    def __init__(
        self,
        aggregated: Tensor,
        root: Tensor | None,
        weight_dtype: torch.dtype | None,
        options: tuple[object, ...],
        num_edges: int,
        signature: tuple[int, ...] | None,
        nodes: Tensor | None = None,
        num_nodes: int | None = None,
    ) -> None:
        self.aggregated, self.root = aggregated, root
        self.nodes, self.num_nodes = nodes, num_nodes
        self.weight_dtype = weight_dtype
        self.options, self.num_edges, self.signature = options, num_edges, signature
        self._rows: tuple[Tensor, Entry] | None = None

    #: It needs no gradient.
    requires_grad = False

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.aggregated.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the input."""
        return self.aggregated.dtype

    @property
    def shape(self) -> torch.Size:
        """The shape of the input."""
        if self.nodes is None or self.num_nodes is None:
            return self.aggregated.shape
        return torch.Size((self.num_nodes, self.aggregated.size(1)))

    @overload
    def size(self) -> torch.Size: ...

    @overload
    def size(self, dim: int) -> int: ...

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape of the input, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> 'AggregatedInput':
        """A copy on another device or of another dtype, as :meth:`torch.Tensor.to`."""
        root = None if self.root is None else self.root.to(*args, **kwargs)
        aggregated = self.aggregated.to(*args, **kwargs)
        nodes = None if self.nodes is None else self.nodes.to(aggregated.device)
        return AggregatedInput(
            aggregated, root, self.weight_dtype, self.options, self.num_edges, self.signature,
            nodes, self.num_nodes,
        )  # fmt: skip

    def root_rows(self, rows: Rows) -> Tensor:
        """The input for some nodes."""
        assert self.root is not None
        return self.root if self.nodes is not None else take(self.root, rows)

    def rows(self, rows: Rows) -> Tensor:
        """The aggregation for some nodes; those of the last call are cached."""
        if self.nodes is not None:
            return self.aggregated
        if torch.compiler.is_compiling() or is_capturing(self.aggregated):
            return take(self.aggregated, rows)
        if self._rows is None or self._rows[0] is not rows.nodes:
            assert rows.nodes is not None
            entry = Entry(take(self.aggregated, rows), wait=True)
            self._rows = rows.nodes, entry
        entry = self._rows[1]
        return entry.value if entry.is_ready() else take(self.aggregated, rows)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, '_rows': None}

    def __repr__(self) -> str:
        return f'{type(self).__name__}(shape={list(self.shape)}, device={self.device})'


class InputPlan(NamedTuple):
    """How a layer aggregates its input."""

    plan: Plan
    with_root: bool  # whether the layer needs the input itself, too
    weight_dtype: torch.dtype | None  # of the edges, if they have weights


class AggregatesInput(Fused):
    """Mixin for a layer that takes an :class:`AggregatedInput`."""

    _takes_edge_weight = False  # whether `forward` takes weights of edges after the edges

    def _aggregation(self) -> tuple[object, ...]:
        """The options that an aggregated input depends on."""
        raise NotImplementedError

    def _input_plan(self, x: Tensor, edge_index: Adj, edge_weight: OptTensor) -> InputPlan | None:
        """How to aggregate an input, or None if PyG's code would."""
        raise NotImplementedError

    def _of_aggregated(self, x: AggregatedInput, edge_index: Adj) -> Tensor:
        """The layer on an input that is already aggregated."""
        raise NotImplementedError

    def aggregate_input(
        self,
        x: Tensor,
        edge_index: Tensor,
        edge_weight: OptTensor = None,
        *,
        tile: int | None = None,
    ) -> AggregatedInput:
        r"""Aggregates an input that takes no gradient and is the same in every step, such as that
        of a first layer without dropout. Pass the result in place of :obj:`x`.

        Args:
            x (Tensor): Node features :math:`(|\mathcal{V}|, F_{in})`; beside edges on a GPU
                they may be in pinned host memory.
            edge_index (Tensor or EdgeIndex): The edges :math:`(2, |\mathcal{E}|)`.
            edge_weight (Tensor, optional): Edge weights :math:`(|\mathcal{E}|)`, for GCN layers.
                (default: :obj:`None`)
            tile (int, optional): The number of columns to aggregate at a time.
                (default: :obj:`None`, 32 in host memory, otherwise all)

        Raises:
            ValueError: If an input requires a gradient, or the layer has no kernel for it.
        """
        signature = None
        if isinstance(edge_index, EdgeIndex) and not torch.compiler.is_compiling():
            signature = signature_of(edge_index)
        return self._aggregate_once(
            x, edge_weight, stand_in(x, edge_index),
            lambda on: self._input_plan(on, edge_index, edge_weight), tile, edge_index, signature,
        )  # fmt: skip

    def _aggregate_once(
        self,
        x: Tensor,
        edge_weight: Tensor | None,
        on: Tensor,
        plan_for: Callable[[Tensor], InputPlan | None],
        tile: int | None,
        edge_index: Adj,
        signature: tuple[int, ...] | None,
    ) -> AggregatedInput:
        """Aggregates features :obj:`x` as :obj:`plan_for` says of its stand-in :obj:`on`, which is
        on the device of the graph; :obj:`signature` is that of the edges, if it is known."""
        if edge_weight is not None and not self._takes_edge_weight:
            raise ValueError(f"'edge_weight' is not supported by {type(self).__name__}")
        for name, given in (('x', x), ('edge_weight', edge_weight)):
            if isinstance(given, Tensor) and given.requires_grad:
                raise ValueError(
                    f"'{name}' must not require a gradient, which would have to pass through the "
                    'aggregation: give the layer x itself'
                )
        self._check_width(x)
        with torch.inference_mode(False), torch.no_grad():  # A later training step may use it.
            made = plan_for(on)
            if made is None:
                reason = self._last_run or 'arguments that no kernel takes'
                raise ValueError(
                    f"'x' must be an input that {type(self).__name__} aggregates by a kernel, but "
                    f"PyG's code would: {reason}"
                )
            plan = made.plan
            if x.device != on.device or tile is not None:
                width = tile_width(x.size(1), tile or TILE)
                summed, root = aggregated_by_tiles(x, plan, width, made.with_root)
            else:
                assert plan.part is not None
                summed = product(plan.part, plan.src.of(x))
                root = plan.dst.of(x) if made.with_root else None
                root = root.clone() if root is x else root
        num_edges = edge_index.size(1) if signature is None else signature[0]
        return AggregatedInput(
            summed, root, made.weight_dtype, self._aggregation(), num_edges, signature,
            plan.dst.nodes, x.size(0),
        )  # fmt: skip

    def _check_width(self, x: object) -> None:
        """Raises if the linear map of the layer takes another width than that of the features."""
        if not isinstance(self, GINConv):
            check_columns(x, self.in_channels)
            return
        first = self.nn[0] if isinstance(self.nn, Sequential) and len(self.nn) else self.nn
        if isinstance(first, (Linear, LinearOfPyG, MLP)):  # Of others nobody knows what runs first.
            check_columns(x, columns_of(first), 'nn')

    def _check_aggregated(self, given: AggregatedInput, edge_index: Adj) -> None:
        """Raises unless this layer made the aggregated input, on this graph, for all nodes."""
        if given.nodes is not None:
            refuse_rows(given)
        self._check_options(given)
        check_graph(given, edge_index)

    def _check_options(self, given: AggregatedInput) -> None:
        """Raises unless a layer with these options made the aggregated input."""
        reason = why_not_layer(self, given.aggregated) if self.fuse else None
        if reason is not None:
            raise ValueError(
                f"'x' must be features: PyG's code runs ({reason}), which takes no AggregatedInput"
            )
        self._fused_note('')
        if given.options != self._aggregation():
            raise ValueError(
                f"'x' must be aggregated by a layer with the options {self._aggregation()}, got "
                f'{given.options}: make it by aggregate_input of this layer'
            )


def refuse_rows(given: AggregatedInput) -> NoReturn:
    """Raises for an aggregated input that lacks rows that a layer reads."""
    assert given.nodes is not None
    raise ValueError(
        f"'x' was aggregated for the {given.nodes.size(0)} rows of a path: it needs this "
        'path in training; give features in evaluation'
    )


def check_graph(given: AggregatedInput, edge_index: Adj) -> None:
    """Raises unless an input was aggregated over this graph."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"'edge_index' must be a tensor beside an AggregatedInput, got "
            f'{type(edge_index).__name__}'
        )
    count = edge_index.size(1)
    same = count == given.num_edges
    if given.signature is not None and isinstance(edge_index, EdgeIndex) and same:
        same = torch.compiler.is_compiling() or signature_of(edge_index) == given.signature
    check_same_graph(given, count, same)


def check_same_graph(given: AggregatedInput, num_edges: int, same: bool) -> None:
    """Raises unless an input was aggregated over the :obj:`same` graph."""
    if not same:
        raise ValueError(
            f"'x' was aggregated over another graph, of {given.num_edges} edges, than "
            f"'edge_index', of {num_edges}: make it again"
        )


def stand_in(x: FeaturesT, beside: object) -> FeaturesT | Tensor:
    """Features to choose a kernel by: those in host memory stay there, beside a graph on a GPU."""
    device = getattr(beside, 'device', None)
    if not isinstance(x, Tensor) or x.device.type != 'cpu' or device in (None, x.device):
        return x
    return x.new_empty(x.size(0), 0, device=device)
