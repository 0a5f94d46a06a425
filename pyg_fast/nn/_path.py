"""Shared by layers on execution paths: the choice of the path, and the aggregated input."""

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.nn.aggr import MeanAggregation

from ..graph._cache import Entry
from ..graph.execution_path import ExecutionPath, signature_of
from ..ops._edges import is_capturing
from ..ops._numbers import acc_dtype
from ..ops._saved import save, saved
from ..ops.linear_product import Plan
from ..ops.path import Rows, Watch, expand, take
from ..ops.product import product
from ..ops.row_blocks import tile_width
from ..ops.streamed_linear import aggregated_by_tiles
from ..sparse.operator import SparseOperator

TILE = 32  # columns of features in host memory that are on the device at once

# Modules that mix rows of different nodes: on a subset of the rows they give other results.
_MIXES = (
    _NormBase, pyg.BatchNorm, pyg.HeteroBatchNorm, pyg.InstanceNorm, pyg.GraphNorm,
    pyg.GraphSizeNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm, pyg.Aggregation,
)  # fmt: skip


def mixes_nodes(module: Module) -> Module | None:
    """The part of a module that computes over all nodes, such as a batch norm, or None."""
    for part in module.modules():
        if isinstance(part, _MIXES):
            return part
        if isinstance(part, pyg.LayerNorm) and part.mode == 'graph':
            return part
    return None


def check_commutes(module: Module) -> None:
    """Raises if a module's result for a row depends on other rows."""
    part = mixes_nodes(module)
    if part is not None:
        raise ValueError(
            f'{type(part).__name__} computes over all nodes, but a path with forward=True '
            'leaves some out: use a path with forward=False, or another normalization'
        )


def stand_in(x: Any, edge_index: Any, path: ExecutionPath | None = None) -> Any:
    """Features to choose a kernel by: those in host memory beside edges on a GPU stay there."""
    beside = path if edge_index is None else edge_index
    on_host = isinstance(x, Tensor) and x.device.type == 'cpu'
    if not on_host or not isinstance(beside, (Tensor, ExecutionPath)) or beside.device == x.device:
        return x
    return x.new_empty(x.size(0), 0, device=beside.device)


def fill_of(path: ExecutionPath) -> float:
    """Fill value of rows that are not computed."""
    return float('nan') if path.debug else 0.0


def sum_on_path(path: ExecutionPath, whole: SparseOperator, dtype: torch.dtype) -> SparseOperator:
    """A path's part of the sum or mean of neighbours; the loops of a node add its own features.
    The path caches it, because it depends only on the graph."""
    scale = whole.row_scale

    def make() -> SparseOperator:
        diag = None if path.loops is None else path.loops.to(dtype)
        if diag is not None and scale is not None:
            diag = diag * scale
        return whole._replace(diag=diag).on(path)

    return path.derived(('sum' if scale is None else 'mean', dtype), make)


def path_operator(path: ExecutionPath, dtype: torch.dtype, mean: bool) -> SparseOperator:
    """The sum or mean of neighbours of a path that stands alone: what :func:`sum_on_path` and the
    kernels of a path read of that of all nodes."""
    op = SparseOperator(path.graph)
    if not mean:
        return op
    return op._replace(row_scale=path.in_degree(dtype, loops=True).clamp_(min=1).reciprocal_())


class OnPath:
    """Mixin for a fused layer that takes an execution path."""

    cache_input = False  # deprecated, without effect

    def _path(self: Any, path: Any, x: Any, edge_index: Any) -> ExecutionPath | None:
        """The path to run on, or None where a path saves nothing."""
        if path is None:
            if edge_index is None:
                raise ValueError("'edge_index' must be given without a 'path', got None")
            return None
        if not isinstance(path, ExecutionPath):
            raise TypeError(f"'path' must be an ExecutionPath, got {type(path).__name__}")
        if self.flow != 'source_to_target':
            raise ValueError(f"'path' needs flow='source_to_target', got {self.flow!r}")
        if isinstance(x, AggregatedInput) or (isinstance(x, Tensor) and x.dim() == 2):
            path.check_fits(x.device, edge_index, x.size(0))
        if not torch.compiler.is_compiling():
            path.check_noted()
        if edge_index is None:
            if not path.stands_alone:
                raise ValueError(
                    "'edge_index' must be given for a path that does not stand alone: prepare the "
                    'paths with keep_graph=False'
                )
            return path
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return None
        trains = self.training and torch.is_grad_enabled()
        return path if trains and not path.is_whole else None

    def _check_alone(self: Any, takes_path: bool) -> None:
        """Raises unless the layer runs on a path without the graph."""
        if not takes_path:
            reason = self._last_run or 'its options or inputs have no kernel on a path'
            raise ValueError(f"'edge_index' must be given, since {reason}")

    def _plan(
        self,
        path: ExecutionPath,
        whole: SparseOperator,
        part: SparseOperator,
        compact: tuple[bool, bool],
        out_acc: bool = False,
    ) -> Plan:
        return Plan(
            part, path.src, path.dst, None if path.forward else whole, *compact, fill_of(path),
            out_acc, None if compact[1] else path.watch(),
        )  # fmt: skip

    def _plan_on(
        self,
        path: ExecutionPath | None,
        whole: SparseOperator,
        dtype: torch.dtype,
        compact: tuple[bool, bool],
    ) -> Plan:
        """The edges and rows of a sum or mean of neighbours."""
        if path is None:
            return Plan(whole)
        return self._plan(path, whole, sum_on_path(path, whole, dtype), compact)

    def _input_plan(
        self: Any, x: Tensor, edge_index: Any, edge_weight: Any, path: ExecutionPath | None
    ) -> tuple[Plan, bool, torch.dtype | None] | None:
        """How to aggregate an input, whether the layer needs the input itself too, and the dtype of
        the weights, if it has some. Here of a sum or mean."""
        acc = acc_dtype(x.dtype)
        if path is not None and edge_index is None:
            self._alone(x, path)
            whole = path_operator(path, acc, type(self.aggr_module) is MeanAggregation)
        else:
            to = self._neighbours(x, edge_index, None)
            if to is None or not self._sums_of_nodes(to):
                return None
            whole = self._sum_of_all(to)
        plan = self._plan_on(path, whole, acc, (False, True))
        return plan, getattr(self, 'root_weight', True), None

    def _set_cache_input(self, cache_input: bool) -> None:
        if cache_input:
            warnings.warn(
                "'cache_input' is deprecated and has no effect, since not every write to an input "
                'can be noticed: pass conv.aggregate_input(x, edge_index) in place of x',
                DeprecationWarning,
                stacklevel=3,
            )
        self.cache_input = cache_input

    def aggregate_input(
        self: Any,
        x: Tensor,
        edge_index: Tensor,
        *,
        path: ExecutionPath | None = None,
        tile: int | None = None,
    ) -> 'AggregatedInput':
        r"""Aggregates an input that takes no gradient and is the same in every step, such as that
        of a first layer without dropout. Pass the result in place of :obj:`x`.

        Args:
            x (Tensor): Node features :math:`(|\mathcal{V}|, F_{in})`; beside edges on a GPU
                they may be in pinned host memory.
            edge_index (Tensor or EdgeIndex): The edges :math:`(2, |\mathcal{E}|)`.
            path (ExecutionPath, optional): The path that the layer will run on in every call. If it
                was prepared with :obj:`forward`, only its rows are computed and kept.
                (default: :obj:`None`)
            tile (int, optional): The number of columns to aggregate at a time.
                (default: :obj:`None`, 32 in host memory, otherwise all)

        Raises:
            ValueError: If :obj:`x` requires a gradient, or the layer has no kernel for it.
        """
        return self._aggregated_input(x, edge_index, None, path, tile)

    def _aggregated_input(
        self: Any,
        x: Any,
        edge_index: Any,
        edge_weight: Any,
        path: ExecutionPath | None,
        tile: int | None,
    ) -> 'AggregatedInput':
        for name, given in (('x', x), ('edge_weight', edge_weight)):
            if isinstance(given, Tensor) and given.requires_grad:
                raise ValueError(
                    f"'{name}' must not require a gradient, which would have to pass through the "
                    'aggregation: give the layer x itself'
                )
        on = stand_in(x, edge_index, path)
        runs = None
        if path is not None and not path.is_whole and path.forward:
            path.check_fits(on.device, edge_index, x.size(0))
            runs = path
        with torch.inference_mode(False), torch.no_grad():  # A later training step may use it.
            made = self._input_plan(on, edge_index, edge_weight, runs)
            if made is None:
                reason = self._last_run or 'arguments that no kernel takes'
                raise ValueError(
                    f"'x' must be an input that {type(self).__name__} aggregates by a kernel, but "
                    f"PyG's code would: {reason}"
                )
            plan, with_root, weight_dtype = made
            if x.device != on.device or tile is not None:
                width = tile_width(x.size(1), tile or TILE)
                summed, root = aggregated_by_tiles(x, plan, width, with_root)
            else:
                summed = product(plan.part, plan.src.of(x))
                root = plan.dst.of(x) if with_root else None
                root = root.clone() if root is x else root
        signature = None
        if isinstance(edge_index, EdgeIndex) and not torch.compiler.is_compiling():
            signature = signature_of(edge_index)
        if edge_index is None and runs is not None:
            signature = runs.graph_signature
        num_edges = signature[0] if signature is not None else edge_index.size(1)
        return AggregatedInput(
            summed, root, weight_dtype, self._aggregation(), num_edges, signature, plan.dst.nodes,
            x.size(0),
        )  # fmt: skip

    def _check_aggregated(
        self: Any, given: 'AggregatedInput', edge_index: Any, path: ExecutionPath | None
    ) -> None:
        """Raises unless this layer made the aggregated input, on this graph, with the rows of this
        path."""
        given.check_path(path)
        reason = self._observed(given.aggregated) if self.fuse else None
        if reason is not None:
            raise ValueError(
                f"'x' must be features: PyG's code runs ({reason}), which takes no AggregatedInput"
            )
        self._note('')
        if given.options != self._aggregation():
            raise ValueError(
                f"'x' must be aggregated by a layer with the options {self._aggregation()}, got "
                f'{given.options}: make it by aggregate_input of this layer'
            )
        if edge_index is None and path is not None:
            signature = path.graph_signature
            count, same = signature[0], given.signature in (None, signature)
            self._check_same(given, count, same and count == given.num_edges)
            return
        if not isinstance(edge_index, Tensor):
            raise TypeError(
                f"'edge_index' must be a tensor beside an AggregatedInput, got "
                f'{type(edge_index).__name__}'
            )
        count = edge_index.size(1)
        same = count == given.num_edges
        if given.signature is not None and isinstance(edge_index, EdgeIndex) and same:
            same = torch.compiler.is_compiling() or signature_of(edge_index) == given.signature
        self._check_same(given, count, same)

    @staticmethod
    def _check_same(given: 'AggregatedInput', count: int, same: bool) -> None:
        if not same:
            raise ValueError(
                f"'x' was aggregated over another graph, of {given.num_edges} edges, than "
                f"'edge_index', of {count}: make it again"
            )


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
          rows of a path
        - **root:** :math:`\mathbf{X}` itself where the layer needs it, of the same shape
    """

    def __init__(
        self,
        aggregated: Tensor,
        root: Tensor | None,
        weight_dtype: torch.dtype | None,
        options: tuple[Any, ...],
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

    def size(self, dim: int | None = None) -> Any:
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

    def check_path(self, path: ExecutionPath | None) -> None:
        """Raises unless it has all rows that a layer on this path reads."""
        if self.nodes is None:
            return
        nodes = path.dst_nodes if path is not None and path.forward else None
        if nodes is None or (nodes is not self.nodes and (
            nodes.shape != self.nodes.shape
            or not (torch.compiler.is_compiling() or torch.equal(nodes, self.nodes))
        )):  # fmt: skip
            raise ValueError(
                f"'x' was aggregated for the {self.nodes.size(0)} rows of a path: it needs this "
                'path in training; give features in evaluation'
            )

    def root_rows(self, rows: Rows) -> Tensor:
        """The input for the nodes of a path."""
        assert self.root is not None
        return self.root if self.nodes is not None else take(self.root, rows)

    def rows(self, rows: Rows) -> Tensor:
        """The aggregation for the nodes of a path, cached for the last path."""
        if self.nodes is not None:
            return self.aggregated
        if torch.compiler.is_compiling() or is_capturing(self.aggregated):
            return take(self.aggregated, rows)
        if self._rows is None or self._rows[0] is not rows.nodes:
            assert rows.nodes is not None
            made = Entry(take(self.aggregated, rows), wait=True)
            self._rows = rows.nodes, made
        made = self._rows[1]
        return made.value if made.is_ready() else take(self.aggregated, rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_rows': None}

    def __repr__(self) -> str:
        return f'{type(self).__name__}(shape={list(self.shape)}, device={self.device})'


def linear_on_path(
    given: AggregatedInput,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    path: ExecutionPath | None,
    compact_out: bool,
) -> Tensor:
    """The linear map of an input that is already aggregated."""
    if path is not None and not path.forward:
        aggregated = given.aggregated.to(weight.dtype)
        out = RowsLinear.apply(aggregated, weight, path.dst, path.watch())
    else:
        rows = given.aggregated if path is None else given.rows(path.dst)
        out = F.linear(rows.to(weight.dtype), weight)
    out = out.to(out_dtype)
    out = out if bias is None else out + bias
    if path is None or not path.forward or compact_out:
        return out
    return expand(out, path.dst, fill_of(path), path.watch())


def linear_of_rows(
    given: AggregatedInput, weight: Tensor, path: ExecutionPath | None, compact_out: bool
) -> Tensor:
    """The linear map of a constant input itself."""
    assert given.root is not None
    if path is None:
        return F.linear(given.root.to(weight.dtype), weight)
    if not path.forward:
        return RowsLinear.apply(given.root.to(weight.dtype), weight, path.dst, None)
    out = F.linear(given.root_rows(path.dst).to(weight.dtype), weight)
    return out if compact_out else expand(out, path.dst, fill_of(path))


class RowsLinear(torch.autograd.Function):
    """A linear map of a constant; the gradients cover only some rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: Rows, watch: Watch | None
    ) -> Tensor:
        save(ctx, x, rows, watch)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rows, watch = saved(ctx)
        if watch is not None:
            watch.look(grad)
        return None, rows.of(grad).t() @ rows.of(x), None, None
