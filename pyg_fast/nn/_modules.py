"""What a layer's modules and methods are: plain ones, whose code kernels may replace, or not."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _NormBase
from torch_geometric import nn as pyg
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear

_LINEARS = {kind: kind.forward for kind in (Linear, torch.nn.Linear)}
# Modules that mix rows of different nodes: on a subset of the rows they give other results.
_MIXES = (
    _NormBase, pyg.BatchNorm, pyg.HeteroBatchNorm, pyg.InstanceNorm, pyg.GraphNorm,
    pyg.GraphSizeNorm, pyg.PairNorm, pyg.MeanSubtractionNorm, pyg.DiffGroupNorm, pyg.Aggregation,
)  # fmt: skip
# The dictionaries of hooks on message passing.
HOOKS = tuple(
    f'_{where}_forward_{when}'
    for where in ('propagate', 'message', 'aggregate', 'message_and_aggregate', 'edge_update')
    for when in ('pre_hooks', 'hooks')
)
hooks_of = itemgetter(*HOOKS)
_COLLECT = {'propagate': 'collect', 'edge_updater': 'edge_collect'}  # defined beside it
# PyG's Python code: a plain `MessagePassing()` replaces both, for all classes, by what a template
# makes for it, which takes no arguments of others.
PROPAGATE = MessagePassing.__dict__.get('_orig_propagate', MessagePassing.propagate)
EDGE_UPDATER = MessagePassing.__dict__.get('_orig_edge_updater', MessagePassing.edge_updater)
# Whether a `propagate` or `edge_updater` is PyG's own, perhaps compiled from its template.
PYGS: dict[object, bool] = {PROPAGATE: True, EDGE_UPDATER: True}


def allow_propagate(function: object) -> None:
    """Treats a `propagate` of this package like PyG's."""
    PYGS[function] = True


def note_propagate(*functions: Callable[..., object]) -> None:
    """Finds out whether these functions are PyG's own, which compiled code cannot do."""
    for function in functions:
        if function not in PYGS:
            name, module = function.__qualname__, function.__module__
            # PyG makes one module per class that it compiles a function for.
            PYGS[function] = (
                name in _COLLECT
                and module.endswith(f'_{name}')
                and (_COLLECT[name] in function.__globals__)
            )


def is_pygs(function: Callable[..., object]) -> bool:
    """Whether a `propagate` or `edge_updater` is PyG's own."""
    note_propagate(function)
    return PYGS[function]


def has_pygs(conv: MessagePassing, name: str) -> bool:
    """Whether neither a subclass nor the layer itself overrides a method of PyG's."""
    function = getattr(type(conv), name)
    if function not in PYGS and not torch.compiler.is_compiling():
        note_propagate(function)
    if not PYGS.get(function, False):
        return False
    own = conv.__dict__.get(name)
    if own is None:
        return True
    # Explainers leave PyG's own function on the instance.
    function = getattr(own, '__func__', None)
    return getattr(own, '__self__', None) is conv and PYGS.get(function, False)


def is_plain(module: Module) -> bool:
    """Whether a module has no hooks and is not patched."""
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and 'forward' not in module.__dict__
    )


def is_plain_linear(linear: Module) -> bool:
    """Whether a linear map consists only of its weight and bias."""
    kind = type(linear)
    return (
        kind in _LINEARS
        and kind.forward is _LINEARS[kind]
        and is_plain(linear)
        and 'weight' in linear._parameters
        and 'bias' in linear._parameters
    )


def weight_and_bias(linear: Module) -> tuple[Tensor, Tensor | None]:
    """The parameters of a plain linear map."""
    return linear._parameters['weight'], linear._parameters['bias']  # type: ignore[return-value]


def part_of(module: Module, name: str) -> Any:
    """The attribute of a module, found sooner if it is a submodule or parameter: each search by
    `Module.__getattr__` takes longer than most checks of a call."""
    part = module._modules.get(name)
    if part is not None:
        return part
    parameter = module._parameters.get(name)
    return getattr(module, name) if parameter is None else parameter


def mixes_nodes(module: Module) -> Module | None:
    """The part of a module that computes over all nodes, such as a batch norm, or None."""
    for part in module.modules():
        if isinstance(part, _MIXES):
            return part
        if isinstance(part, pyg.LayerNorm) and part.mode == 'graph':
            return part
    return None
