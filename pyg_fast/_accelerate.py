"""Replaces a model's layers by ours, and back."""

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import torch
from torch.nn import Module
from torch_geometric.nn import MessagePassing

from .nn import FusedGATConv, FusedGATv2Conv, FusedGCNConv, FusedGINConv, FusedSAGEConv
from .nn._layer import FusedLayer
from .nn.message_passing import fused_class, why_never

ModelT = TypeVar('ModelT', bound=Module)

# Classes with kernels of their own, by PyG's class.
_FUSED: dict[type, type[FusedLayer]] = {
    cls._base: cls
    for cls in (FusedGCNConv, FusedSAGEConv, FusedGINConv, FusedGATConv, FusedGATv2Conv)
}
_NAMES = {base.__name__ for base in _FUSED}


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
        convs.0  SAGEConv  FusedSAGEConv
        convs.1  SAGEConv  FusedSAGEConv
        convs.2  SAGEConv  FusedSAGEConv
    """
    if not isinstance(verbose, (bool, int)):
        raise TypeError(f"'verbose' must be a bool, got {type(verbose).__name__}")
    reports = []
    for conv, report in _layers(model):
        reports.append(report)
        if report.fused is not None and not isinstance(conv, FusedLayer):
            _class_for(type(conv))._fused_adopt(conv)
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
        if isinstance(module, FusedLayer) and module._fused_is_adopted():
            module._fused_release()
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, Module):
        raise TypeError(f"'model' must be a torch.nn.Module, got {type(model).__name__}")


def _layers(model: Module) -> Iterator[tuple[Module, LayerReport]]:
    _check_model(model)
    for name, module in model.named_modules():
        cls = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            original = getattr(module, 'original_name', '')
            if original in _NAMES:
                yield module, LayerReport(name, original, None, 'compiled by TorchScript')
        elif isinstance(module, FusedLayer):
            layer = module._base.__name__ if module._fused_is_adopted() else cls.__name__
            reason = cls._fused_why_never(module)
            fused = None if reason else cls.__name__
            yield module, LayerReport(name, layer, fused, reason, _ran(module), module._fused_how())
        elif isinstance(module, MessagePassing):
            ours = _FUSED.get(cls)
            reason = why_never(module) if ours is None else ours._fused_why_never(module)
            fused = None if reason else _class_for(cls).__name__
            yield module, LayerReport(name, cls.__name__, fused, reason)


def _class_for(cls: type) -> type[FusedLayer]:
    """Our class for a layer of PyG's or of the user."""
    return _FUSED[cls] if cls in _FUSED else fused_class(cls)


def _ran(conv: FusedLayer) -> str | None:
    """What ran in the last eager call."""
    reason = conv._last_run
    if reason is None:
        return None
    return f"PyG's code: {reason}" if reason else type(conv).__name__


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
