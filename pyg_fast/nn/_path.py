"""What layers on execution paths share: which path runs, and the input that is aggregated once."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric import nn as pyg

from ..formats.execution_path import ExecutionPath
from ..ops.path_spmm import Operator, Plan, Rows, Watch, expand, take

# What mixes the rows of different nodes: on some rows alone it gives something else.
_MIXES = (
    _NormBase, pyg.BatchNorm, pyg.HeteroBatchNorm, pyg.InstanceNorm, pyg.GraphNorm,
    pyg.GraphSizeNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm, pyg.Aggregation,
)  # fmt: skip


def mixes_nodes(module: Module) -> Module | None:
    """A part of a module that computes over all nodes, such as a batch norm, or None."""
    for part in module.modules():
        if isinstance(part, _MIXES):
            return part
        if isinstance(part, pyg.LayerNorm) and part.mode == 'graph':
            return part
    return None


def check_commutes(module: Module) -> None:
    """Raises unless a module gives the same for each row, whatever other rows there are."""
    part = mixes_nodes(module)
    if part is not None:
        raise ValueError(
            f'{type(part).__name__} computes over all nodes, of which a path with forward=True '
            'leaves some out: give the path forward=False, or take another normalization'
        )


def fill_of(path: ExecutionPath) -> float:
    """What rows are that are not computed."""
    return float('nan') if path.debug else 0.0


class OnPath:
    """Mixed into a fused layer that takes an execution path."""

    cache_input = False
    _input_cache: Any = None

    def _path(self: Any, path: Any, x: Any, edge_index: Any) -> ExecutionPath | None:
        """The path to run on, or None where there is nothing to save."""
        if path is None:
            return None
        if not isinstance(path, ExecutionPath):
            raise TypeError(f"'path' must be an ExecutionPath, got {type(path).__name__}")
        if self.flow != 'source_to_target':
            raise ValueError(f"'path' needs flow='source_to_target', got {self.flow!r}")
        if isinstance(x, Tensor) and x.dim() == 2:
            path.check_fits(x, edge_index, x.size(0))
        if not torch.compiler.is_compiling():
            path.check_noted()
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            return None
        trains = self.training and torch.is_grad_enabled()
        return path if trains and not path.is_whole else None

    def _plan(
        self,
        path: ExecutionPath,
        whole: Operator,
        value: Tensor | None,
        row_scale: Tensor | None,
        col_scale: Tensor | None,
        diag: Tensor | None,
        compact: tuple[bool, bool],
        out_acc: bool = False,
    ) -> Plan:
        part = path.operator(value, row_scale, col_scale, diag)
        return Plan(
            part, path.src, path.dst, None if path.forward else whole, *compact, fill_of(path),
            out_acc, None if compact[1] else path.watch(),
        )  # fmt: skip

    def _cached_input(
        self: Any, x: Tensor, edge_index: Any, edge_weight: Any, make: Callable[[], Any]
    ) -> Any:
        """What :obj:`make` gives, the aggregated input of the layer first, made once; or None where
        it cannot be kept."""
        if not self.cache_input or torch.compiler.is_compiling():
            return None
        learned = any(isinstance(t, Tensor) and t.requires_grad for t in (x, edge_weight))
        if learned and torch.is_grad_enabled():
            return None
        if self._input_cache is None:
            self._input_cache = InputCache()
        return self._input_cache.get((x, edge_index, edge_weight), make)

    def reset_parameters(self: Any) -> None:
        super().reset_parameters()  # type: ignore[misc]
        self._input_cache = None


class InputCache:
    """The aggregation of one input over one graph, and of some of its rows."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._made: Any = None  # the aggregation, and what belongs to it
        self._rows: tuple[Any, Tensor] | None = None
        self._changes = 0

    def get(self, given: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """What was made of the same tensors, unchanged since; None once they change every time."""
        if self._changes > 1:
            return None
        if self._made is not None and self._same(given):
            self._changes = 0
            return self._made
        if self._made is not None:
            self._changes += 1
            if self._changes > 1:
                self._made = self._rows = None
                warnings.warn(
                    "'cache_input' is off: the input of the layer is another one at every call, as "
                    'it is with input dropout; it is aggregated every time',
                    stacklevel=6,
                )
                return None
        self._given = [
            None if t is None else (weakref.ref(t), _version(t)) for t in given
        ]
        with torch.inference_mode(False), torch.no_grad():  # It may serve a training step later.
            self._made, self._rows = make(), None
        return self._made

    def _same(self, given: tuple[Any, ...]) -> bool:
        return all(
            a is None if b is None else b is not None and b[0]() is a and b[1] == _version(a)
            for a, b in zip(given, self._given, strict=True)
        )

    def rows(self, rows: Rows) -> Tensor:
        """Some rows of it, kept too."""
        assert self._made is not None
        if self._rows is None or self._rows[0] is not rows.nodes:
            self._rows = rows.nodes, take(self._made[0], rows)
        return self._rows[1]

    def __deepcopy__(self, memo: dict) -> 'InputCache':
        return InputCache()

    def __reduce__(self) -> tuple:
        return InputCache, ()


def _version(tensor: Any) -> int | None:
    if not isinstance(tensor, Tensor) or tensor.is_inference():
        return None
    return tensor._version


def linear_on_path(
    cache: InputCache,
    aggregated: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    path: ExecutionPath | None,
    compact_out: bool,
) -> Tensor:
    """The linear map of an input that was aggregated before."""
    if path is None:
        return F.linear(aggregated, weight, bias)
    if not path.forward:
        return RowsLinear.apply(aggregated, weight, bias, path.dst, path.watch())
    out = F.linear(cache.rows(path.dst), weight, bias)
    return out if compact_out else expand(out, path.dst, fill_of(path), path.watch())


def linear_of_rows(
    x: Tensor, weight: Tensor, path: ExecutionPath | None, compact_out: bool
) -> Tensor:
    """The linear map of a constant input itself."""
    if path is None:
        return F.linear(x, weight)
    if not path.forward:
        return RowsLinear.apply(x, weight, None, path.dst, None)
    out = F.linear(take(x, path.dst), weight)
    return out if compact_out else expand(out, path.dst, fill_of(path))


class RowsLinear(torch.autograd.Function):
    """A linear map of a constant, with the gradients of some rows alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Rows,
        watch: Watch | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rows, ctx.watch = rows, watch
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), rows = ctx.saved_tensors, ctx.rows
        if ctx.watch is not None:
            ctx.watch.look(grad)
        grad = rows.of(grad)
        grad_weight = grad.t() @ rows.of(x) if ctx.needs_input_grad[1] else None
        return None, grad_weight, grad.sum(0) if ctx.needs_input_grad[2] else None, None, None
