"""Replaces a model's layers by ours, and back."""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import SumAggregation

from .nn import (
    FusedGATConv,
    FusedGATv2Conv,
    PathPreparedGCNConv,
    PathPreparedGINConv,
    PathPreparedSAGEConv,
)
from .nn._fused import _METHODS, Fused, note_propagate
from .nn._reduce import may_fuse, why_not
from .nn.gat import LOOP_FILLS
from .nn.message_passing import OWN, FusedPropagate, fused_class, mark, why_never

ModelT = TypeVar('ModelT', bound=Module)

_FUSED: dict[type, Any] = {
    cls._base: cls
    for cls in (
        PathPreparedGCNConv, PathPreparedSAGEConv, PathPreparedGINConv, FusedGATConv,
        FusedGATv2Conv,
    )
}
_NAMES = {base.__name__ for base in _FUSED}
# Set on layers that `restore` changes back; copies and pickles keep it.
_MARK = '_accelerated'


class LayerReport(NamedTuple):
    """The result of :func:`accelerate` for a layer."""

    name: str  # in the model, as in `named_modules`
    layer: str  # the user's class
    fused: str | None  # our class; None if PyG's code runs for every input
    reason: str | None  # why PyG's code runs
    ran: str | None = None  # what ran in the layer's last eager call; None: no call yet
    how: str | None = None  # if that was ours: by a 'kernel', or over 'blocks' of edges


def accelerate(model: ModelT, verbose: bool = False) -> ModelT:
    r"""Replaces each :class:`~torch_geometric.nn.conv.GCNConv`,
    :class:`~torch_geometric.nn.conv.SAGEConv`, :class:`~torch_geometric.nn.conv.GINConv`,
    :class:`~torch_geometric.nn.conv.GATConv` and :class:`~torch_geometric.nn.conv.GATv2Conv` of a
    model by our exact equivalent, in place. Every other
    :class:`~torch_geometric.nn.MessagePassing`, PyG's or your own, runs its :meth:`message` as one
    kernel where :class:`~pyg_fast.nn.FusedMessagePassing` would.

    The layers stay the same objects (only their class changes, as for lazy modules in PyTorch),
    and so do parameters, buffers, hooks and options: existing optimizers keep working, state_dict
    and outputs stay the same. Layers with options that have no kernel are not changed.

    Args:
        model (torch.nn.Module): The model, or a single layer.
        verbose (bool, optional): Whether to print the layers replaced, the layers skipped, and the
            reasons; after a call also the layers that PyG's code ran. (default: :obj:`False`)

    Returns:
        torch.nn.Module: The :obj:`model`.

    Raises:
        TypeError: If :obj:`model` is not a module, or :obj:`verbose` not a bool.

    Example:
        >>> model = pyg_fast.accelerate(GraphSAGE(128, 64, num_layers=3), verbose=True)
        layer    class     runs as
        convs.0  SAGEConv  PathPreparedSAGEConv
        convs.1  SAGEConv  PathPreparedSAGEConv
        convs.2  SAGEConv  PathPreparedSAGEConv
    """
    if not isinstance(verbose, (bool, int)):
        raise TypeError(f"'verbose' must be a bool, got {type(verbose).__name__}")
    reports = []
    for conv, report in _layers(model):
        reports.append(report)
        if report.fused is not None and type(conv) in _FUSED:
            conv.__class__ = _FUSED[type(conv)]
            setattr(conv, _MARK, True)
        elif report.fused is not None and not isinstance(conv, (Fused, FusedPropagate)):
            conv.__class__ = fused_class(type(conv))
            setattr(conv, _MARK, True)
            mark(conv)
    if verbose:
        print(_table(reports))
    return model


def accelerate_report(model: Module) -> list[LayerReport]:
    """The layers that :func:`accelerate` would replace or has replaced, without changing the model;
    and what ran in the last eager call of each layer: some layers have no kernel for some inputs,
    such as sparse matrices. In code of :func:`torch.compile` layers with hand-written kernels
    (``FusedGATConv`` and the like, not ``FusedTransformerConv``) keep these; for others
    :func:`pyg_fast.compile` does, and with another backend PyG's code runs, compiled."""
    return [report for _, report in _layers(model)]


def restore(model: ModelT) -> ModelT:
    """Undoes :func:`accelerate` in place, also on a copied or unpickled model.
    Layers that were created as ours are not changed.

    Args:
        model (torch.nn.Module): The model, or a single layer.

    Returns:
        torch.nn.Module: The :obj:`model`.

    Raises:
        TypeError: If :obj:`model` is not a module.
    """
    _check_model(model)
    for module in model.modules():
        if isinstance(module, Fused) and vars(module).pop(_MARK, False):
            if isinstance(module, PathPreparedGCNConv):
                module._cache_for_pyg()
            for name in module._own:
                vars(module).pop(name, None)
            module.__class__ = module._base
        elif isinstance(module, FusedPropagate) and vars(module).pop(_MARK, False):
            for name in OWN:
                vars(module).pop(name, None)
            module.__class__ = module._base
    return model


def _check_model(model: Any) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"'model' must be a torch.nn.Module, got {type(model).__name__}")


def _layers(model: Module) -> Iterator[tuple[Any, LayerReport]]:
    _check_model(model)
    for name, module in model.named_modules():
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            original = getattr(module, 'original_name', '')
            if original in _NAMES:
                yield module, LayerReport(name, original, None, 'compiled by TorchScript')
        elif isinstance(module, Fused):
            layer = module._base.__name__ if _MARK in vars(module) else cls.__name__
            reason = _options_reason(module)
            fused = None if reason else cls.__name__
            yield module, LayerReport(name, layer, fused, reason, _ran(module), _how(module))
        elif isinstance(module, FusedPropagate):
            layer = module._base.__name__ if _MARK in vars(module) else cls.__name__
            reason = why_never(module)
            fused = None if reason else cls.__name__
            yield module, LayerReport(name, layer, fused, reason, _ran(module), _how(module))
        elif isinstance(module, MessagePassing):
            reason = _reason(module)
            fused = None if reason else _name_of_fused(cls)
            yield module, LayerReport(name, cls.__name__, fused, reason)


def _name_of_fused(cls: type) -> str:
    return _FUSED[cls].__name__ if cls in _FUSED else fused_class(cls).__name__


def _reason(conv: Any) -> str | None:
    """Why a layer cannot be replaced."""
    cls = type(conv)
    if cls not in _FUSED:
        return why_never(conv)
    if 'forward' in vars(conv):
        return 'its forward is patched'
    for name in (*_METHODS, 'propagate', 'edge_updater'):
        own = vars(conv).get(name)
        # Explainers leave PyG's own method on the instance.
        if own is not None and getattr(own, '__self__', None) is not conv:
            return f'its {name} is patched'
    note_propagate(_FUSED[cls].propagate, _FUSED[cls].edge_updater)
    if conv.explain:
        return 'explains'
    if conv.node_dim != _FUSED[cls]._node_dim:
        return f'node_dim={conv.node_dim}'
    if conv.decomposed_layers != 1:
        return f'decomposed_layers={conv.decomposed_layers}'
    attention = cls in (FusedGATConv._base, FusedGATv2Conv._base)
    if not attention and not may_fuse(conv):  # PyG never fuses attention.
        return 'fuse=False'
    if attention or cls is PathPreparedGCNConv._base:
        if conv.aggr not in ('add', 'sum') or type(conv.aggr_module) is not SumAggregation:
            return f'aggr={conv.aggr!r}'
        return _options_reason(conv)
    return why_not(conv.aggr_module)


def _options_reason(conv: Any) -> str | None:
    """Why PyG's code runs with these options, for every input."""
    if isinstance(conv, FusedGATConv._base) and conv.lin_edge is not None:
        fill = conv.fill_value
        if isinstance(fill, str) and conv.add_self_loops and fill not in LOOP_FILLS:
            return f'edge_dim: fill_value={fill!r} of self-loops has no kernel'
    return None


def _ran(conv: Any) -> str | None:
    """What ran in the last eager call."""
    reason = conv._last_run
    if reason is None:
        return None
    return f"PyG's code: {reason}" if reason else type(conv).__name__


def _how(conv: Any) -> str | None:
    """How our code ran in the last eager call, if it did."""
    if conv._last_run != '':
        return None
    entry = vars(conv).get('_fused_entry')
    return 'blocks' if entry is not None and entry.in_blocks else 'kernel'


def _table(reports: list[LayerReport]) -> str:
    if not reports:
        return 'accelerate: the model has no MessagePassing layer'
    rows = [('layer', 'class', 'runs as')]
    written = {cls.__name__ for cls in _FUSED.values()}
    for name, layer, fused, reason, ran, _ in reports:
        pygs = (ran or '').removeprefix("PyG's code: ")
        if fused is None or pygs != (ran or ''):
            what = f'{layer}: {reason or pygs}'
        elif ran is None and fused not in written:  # Its message is traced then.
            what = f"{fused}, or PyG's code: known after a call"
        else:
            what = fused
        rows.append((name or '(model)', layer, what))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return '\n'.join(f'{a:<{widths[0]}}  {b:<{widths[1]}}  {c}' for a, b, c in rows)
