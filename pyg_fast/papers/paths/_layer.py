"""What layers on execution paths share: which path runs, and how a layer is described on it."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj, OptTensor

from ...graph.signature import signature_of
from ...nn._aggregated import (
    AggregatedInput,
    AggregatesInput,
    InputPlan,
    check_graph,
    check_same_graph,
    refuse_rows,
    stand_in,
)
from ...nn._modules import mixes_nodes
from ...ops._numbers import acc_dtype
from ...ops.linear_product import LinearAggregation, Plan, linear_product
from ...ops.path import expand
from ...sparse.operator import SparseOperator
from .execution_path import ExecutionPath


def check_commutes(module: Module) -> None:
    """Raises if a module's result for a row depends on other rows."""
    part = mixes_nodes(module)
    if part is not None:
        raise ValueError(
            f'{type(part).__name__} computes over all nodes, but a path with forward=True '
            'leaves some out: use a path with forward=False, or another normalization'
        )


def refuse_paths(name: str, value: object) -> None:
    """Raises if another argument of a call holds paths, which were given by position."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, ExecutionPath):
        raise TypeError(f"'{name}' must be given by name, got paths as another argument")


def fill_of(path: ExecutionPath) -> float | None:
    """Fill value of rows that are not computed, as of :func:`number_of`."""
    return float('nan') if path.debug else None


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


class PathPrepared(AggregatesInput):
    """Mixin for a layer that takes an execution path."""

    _maps_linearly = True  # whether the layer is one linear map, which a model may compute in parts

    def _ends_linearly(self) -> bool:
        """Whether nothing but a linear map makes the output."""
        return True

    def _describe_on(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_weight: OptTensor,
        path: ExecutionPath | None,
        compact: tuple[bool, bool],
        num_nodes: int,
    ) -> LinearAggregation | None:
        """The layer on a path (:obj:`None`: on all nodes) as a linear map around an aggregation, or
        None where it is none.

        Args:
            x: Features that :func:`why_not_layer` accepts.
            edge_index, edge_weight: The graph; None on a path that stands alone.
            path: The path.
            compact: Whether inputs and outputs have only the rows of the path.
            num_nodes: The number of nodes of the graph.
        """
        raise NotImplementedError

    def _finish(
        self, out: Tensor, given: LinearAggregation, path: ExecutionPath | None, compact_out: bool
    ) -> Tensor:
        """What the layer does to the result of its description, whose rows it expands to all nodes
        unless they stay compact."""
        return out

    def _of_aggregated_on(
        self, x: AggregatedInput, edge_index: Adj, path: ExecutionPath, compact_out: bool = False
    ) -> Tensor:
        """The layer on an input that is already aggregated."""
        raise NotImplementedError

    def _run_on(self, given: LinearAggregation, path: ExecutionPath) -> Tensor:
        """The layer as described, on a path."""
        return self._finish(linear_product(*given), given, path, False)

    def _choose_path(self, path: object, x: object, edge_index: Adj) -> ExecutionPath | None:
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

    def _check_alone(self, takes_path: bool) -> None:
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

    def _input_plan_on(
        self, x: Tensor, edge_index: Adj, edge_weight: OptTensor, path: ExecutionPath
    ) -> InputPlan | None:
        """How to aggregate an input for the rows of a path with :obj:`forward`, or None."""
        raise NotImplementedError

    def aggregate_input(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_weight: OptTensor = None,
        *,
        path: ExecutionPath | None = None,
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
            path (ExecutionPath, optional): The path that the layer will run on in every call. If it
                was prepared with :obj:`forward`, only its rows are computed and kept.
                (default: :obj:`None`)
            tile (int, optional): The number of columns to aggregate at a time.
                (default: :obj:`None`, 32 in host memory, otherwise all)

        Raises:
            ValueError: If an input requires a gradient, or the layer has no kernel for it.
        """
        if path is None or path.is_whole or not path.forward:
            return super().aggregate_input(x, edge_index, edge_weight, tile=tile)
        on = stand_in(x, path if edge_index is None else edge_index)
        path.check_fits(on.device, edge_index, x.size(0))
        signature = None
        if edge_index is None:
            signature = path.graph_signature
        elif isinstance(edge_index, EdgeIndex) and not torch.compiler.is_compiling():
            signature = signature_of(edge_index)
        return self._aggregate_once(
            x, edge_weight, on, lambda on: self._input_plan_on(on, edge_index, edge_weight, path),
            tile, edge_index, signature,
        )  # fmt: skip

    def _check_aggregated_on(
        self, given: AggregatedInput, edge_index: Adj, path: ExecutionPath
    ) -> None:
        """Raises unless this layer made the aggregated input, on this graph, with the rows of this
        path."""
        _check_rows(given, path)
        self._check_options(given)
        if edge_index is not None:
            check_graph(given, edge_index)
            return
        signature = path.graph_signature
        same = given.signature in (None, signature) and signature[0] == given.num_edges
        check_same_graph(given, signature[0], same)


def _check_rows(given: AggregatedInput, path: ExecutionPath) -> None:
    """Raises unless an aggregated input has all rows that a layer on a path reads."""
    if given.nodes is None:
        return
    nodes = path.dst_nodes if path.forward else None
    if nodes is None or (nodes is not given.nodes and (
        nodes.shape != given.nodes.shape
        or not (torch.compiler.is_compiling() or torch.equal(nodes, given.nodes))
    )):  # fmt: skip
        refuse_rows(given)


def rows_on_path(given: AggregatedInput, path: ExecutionPath) -> tuple[Tensor, Tensor | None]:
    """The aggregation and the input itself, if the layer needs it, for the rows that a layer
    computes on a path."""
    if not path.forward:
        return given.aggregated, given.root
    root = None if given.root is None else given.root_rows(path.dst)
    return given.rows(path.dst), root


def linear_on_path(
    given: AggregatedInput,
    weight: Tensor,
    bias: Tensor | None,
    path: ExecutionPath,
    compact_out: bool,
    root_weight: Tensor | None = None,
    out_acc: bool = False,
) -> Tensor:
    """The linear maps of an input that is already aggregated."""

    def map_rows(x: Tensor, weight: Tensor, bias: Tensor | None, watches: bool) -> Tensor:
        x = x.to(weight.dtype)
        if path.forward:
            return F.linear(x, weight, bias)
        # The gradients cover only some rows.
        plan = Plan(None, dst=path.dst, watch=path.watch() if watches else None)
        return linear_product(x, weight, bias, plan)

    rows, root = rows_on_path(given, path)
    out = map_rows(rows, weight, None if out_acc else bias, True)
    if out_acc:
        out = out.to(acc_dtype(out.dtype))
        out = out if bias is None else out + bias
    if root_weight is not None:
        assert root is not None
        out = out + map_rows(root, root_weight, None, False)
    if not path.forward or compact_out:
        return out
    return expand(out, path.dst, fill_of(path), path.watch())
