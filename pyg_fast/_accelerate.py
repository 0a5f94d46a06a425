"""Replaces a model's layers by ours, and back."""

import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch_geometric.nn import GPSConv, MessagePassing

from ._alike import naming_keywords
from ._report import PLAIN, PYGS, SCRIPTED, WHY, AccelerateReport, LayerReport, table_of
from .nn import (
    FusedGATConv,
    FusedGATv2Conv,
    FusedGCNConv,
    FusedGINConv,
    FusedGPSConv,
    FusedSAGEConv,
)
from .nn._checks import NO_AGGREGATION
from .nn._explain_names import updates_edges, warn_of_methods
from .nn._explain_options import check_init
from .nn._layer import MADE, FusedModule, written_class
from .nn.message_passing import FusedPropagate, fused_class, may_adopt, why_never
from .ops._numbers import check_flag

ModelT = TypeVar('ModelT', bound=Module)

# Classes with kernels of their own, by PyG's class.
_FUSED: dict[type, type[FusedModule]] = {
    cls._base: cls
    for cls in (
        FusedGCNConv, FusedSAGEConv, FusedGINConv, FusedGATConv, FusedGATv2Conv, FusedGPSConv,
    )
}  # fmt: skip
_NAMES = {base.__name__ for base in _FUSED}


@naming_keywords
def accelerate(
    model: ModelT, *refused: object, verbose: bool = False, strict: bool = False
) -> ModelT:
    r"""Replaces each :class:`~torch_geometric.nn.conv.GCNConv`,
    :class:`~torch_geometric.nn.conv.SAGEConv`, :class:`~torch_geometric.nn.conv.GINConv`,
    :class:`~torch_geometric.nn.conv.GATConv`, :class:`~torch_geometric.nn.conv.GATv2Conv` and
    :class:`~torch_geometric.nn.conv.GPSConv` of a model by our exact equivalent, in place. Every
    other :class:`~torch_geometric.nn.MessagePassing`, PyG's or your own, runs its :meth:`message`
    as one kernel where :class:`~pyg_fast.nn.FusedMessagePassing` would.

    The layers stay the same objects (only their class changes, as for lazy modules in PyTorch),
    and so do parameters, buffers, hooks and options: existing optimizers keep working, state_dict
    and outputs stay the same. PyG's code runs layers with options that have no kernel.

    Args:
        model (torch.nn.Module): The model, or a single layer.
        verbose (bool, optional): Whether to print what will run each layer, and why PyG's code
            will; after a call also of layers that it ran then. Only by name.
            (default: :obj:`False`)
        strict (bool, optional): Whether to raise an error, and leave the model as it is, if PyG's
            code will run a layer for every input, or ran it in its last call; else the first call
            of the model raises it if PyG's code ran a layer, also as the graph is small, and so do
            the next ones until none did. Later calls are not checked, nor is compiled code;
            TorchScript needs such a call before. Only by name. (default: :obj:`False`)

    Returns:
        torch.nn.Module: The :obj:`model`.

    Raises:
        TypeError: If :obj:`model` is not a module, :obj:`verbose` or :obj:`strict` not a bool, or
            there are more arguments without a name.
        NotImplementedError: If :obj:`strict` is set and PyG's code runs a layer. The text is the
            table of :func:`accelerate_report`.

    Example:
        >>> model = pyg_fast.accelerate(GraphSAGE(128, 64, num_layers=3), verbose=True)
        layer    class     will run as
        convs.0  SAGEConv  FusedSAGEConv
        convs.1  SAGEConv  FusedSAGEConv
        convs.2  SAGEConv  FusedSAGEConv
    """
    if refused:
        raise TypeError(
            f'accelerate takes the model alone, got a {type(refused[0]).__name__} after it: '
            'options need their names, such as verbose=True; the data are not needed here, but '
            'sorted once by data = pyg_fast.transforms.ToCSR()(data)'
        )
    for name, value in (('verbose', verbose), ('strict', strict)):
        check_flag(name, value)
    layers = list(_layers(model))
    reports = AccelerateReport(report for _, report in layers)
    if strict:
        _raise_where_pygs(reports)
    _warn_of_unregistered(model, stacklevel=4)
    for conv, report in layers:
        if isinstance(conv, MessagePassing):
            warn_of_methods(conv, stacklevel=4)
        # One without an aggregation gets errors that tell so.
        is_ours = report.fused is not None or report.reason == NO_AGGREGATION
        is_ours = is_ours or (type(conv) not in _FUSED and _may_adopt(conv))
        if is_ours and not isinstance(conv, FusedModule):
            _class_for(type(conv))._fused_adopt(conv)
    _forget_check(model)
    if strict and layers:
        model.register_forward_hook(_check_first_call)
    if verbose:
        print(_will_run(reports))
    return model


def _warn_of_unregistered(model: Module, stacklevel: int) -> None:
    """Warns of layers in a plain list, tuple or dict, which PyTorch does not find."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            parts = value.values() if type(value) is dict else value
            if name.startswith('_') or not isinstance(value, (list, tuple, dict)):
                continue
            if any(isinstance(part, MessagePassing) for part in parts):
                kind = 'ModuleDict' if type(value) is dict else 'ModuleList'
                warnings.warn(
                    f"'{path}{'.' * bool(path)}{name}' holds layers in a {type(value).__name__}, "
                    'where PyTorch finds neither them nor their parameters: make it a torch.nn.'
                    f'{kind}',
                    stacklevel=stacklevel,
                )


def _may_adopt(module: Module) -> bool:
    return isinstance(module, MessagePassing) and may_adopt(module)


def _raise_where_pygs(reports: AccelerateReport) -> None:
    by_pyg = sum(report.reason is not None for report in reports)
    if by_pyg:
        table = f'\n{reports}'
        raise NotImplementedError(
            f"accelerate(strict=True): PyG's code runs {by_pyg} of {len(reports)} layers:{table}"
        )


def _check_first_call(model: Module, args: object, out: object) -> None:
    """A hook for the calls of a model until kernels have run all of its layers."""
    if not torch.compiler.is_compiling():
        _raise_where_pygs(accelerate_report(model))
        _forget_check(model)


def _forget_check(model: Module) -> None:
    hooks = model._forward_hooks
    for key in [key for key, hook in hooks.items() if hook is _check_first_call]:
        del hooks[key]


def accelerate_report(model: Module) -> AccelerateReport:
    r"""The layers that :func:`accelerate` would replace or has replaced, without changing the
    model; and what ran in the last eager call of each layer: some layers have no kernel for some
    inputs, such as sparse matrices. Of code by :func:`pyg_fast.compile`, or another one with
    :obj:`backend='pyg_fast'`, it tells what runs each layer in the code that was compiled last.

    With another backend of :func:`torch.compile` the report does not know what runs: layers with
    hand-written kernels (``FusedGATConv`` and the like, not ``FusedTransformerConv``) keep these,
    and others run PyG's code, compiled.

    Returns:
        list[LayerReport]: An entry for each layer. The list prints as a table.

    Raises:
        TypeError: If :obj:`model` is not a module.

    Example:
        >>> print(pyg_fast.accelerate_report(model))
        layer    class     runs on
        convs.0  SAGEConv  kernel
        convs.1  SAGEConv  PyG's code
            why not a kernel: MedianAggregation has no kernel
            what helps: aggr='sum', 'mean', 'max', 'min', 'var' or 'std', each once
    """
    return AccelerateReport(report for _, report in _layers(model))


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
    _forget_check(model)
    for module in model.modules():
        if isinstance(module, FusedModule) and module._fused_is_adopted():
            module._fused_release()
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, Module):
        got = f'the class {model.__name__}' if isinstance(model, type) else type(model).__name__
        raise TypeError(f"'model' must be a torch.nn.Module, got {got}")


def _layers(model: Module) -> Iterator[tuple[Any, LayerReport]]:
    _check_model(model)
    for path, module in model.named_modules():
        name = f'{path}.'.replace('_orig_mod.', '')[:-1]  # as of the model that was compiled
        cls = type(module)
        check_init(module)
        if isinstance(module, torch.jit.ScriptModule):
            original = getattr(module, 'original_name', '')
            if original in _NAMES:
                yield module, LayerReport(name, original, None, SCRIPTED)
        elif isinstance(module, FusedModule):
            layer = written_class(module).__name__
            reason = cls._fused_why_never(module)
            fused = None if reason else cls.__name__
            error = module._last_error
            ran = None if module._last_run is None or error is not None else cls.__name__
            if module._last_run:
                ran = f'{PYGS}: {module._last_run}'
                reason = reason or module._last_run + module._fused_beside()
            compiled = why = module._last_compiled
            if compiled is not None:
                compiled = f'{PYGS}: {why}' if why else 'kernel'
            if why and why != reason:
                reason = why if reason is None else f'{reason}; compiled: {why}'
            how = module._fused_how() if error is None else None
            sorts = '' if how is None else module._last_sorted
            updates = isinstance(module, FusedPropagate) and updates_edges(module)
            made = bool(sorts), error, sorts == MADE, updates
            yield module, LayerReport(name, layer, fused, reason, ran, how, compiled, *made)
        elif isinstance(module, MessagePassing) or cls is GPSConv:
            ours = _FUSED.get(cls)
            reason = why_never(module) if ours is None else ours._fused_why_never(module)
            fused = None if reason else _class_for(cls).__name__
            yield module, LayerReport(name, cls.__name__, fused, reason, how=fused and PLAIN)


def _class_for(cls: type) -> type[FusedModule]:
    """Our class for a layer of PyG's or of the user."""
    return _FUSED[cls] if cls in _FUSED else fused_class(cls)


def _will_run(reports: list[LayerReport]) -> str:
    """What will run each layer, as text."""
    if not reports:
        return 'accelerate: the model has no MessagePassing layer'
    written = {cls.__name__ for cls in _FUSED.values()}
    rows, notes = [], []
    for report in reports:
        if report.reason is not None or report.fused is None:
            what = PYGS
        elif report.ran is report.compiled is None and report.fused not in written:
            # Its message is captured then.
            what = f"{report.fused}, or PyG's code: known after a call"
        else:
            what = report.fused
        rows.append((report.name or '(model)', report.layer, what))
        notes.append({WHY: report.reason})
    return table_of(('layer', 'class', 'will run as'), rows, notes)
