"""Says which features do not fit that a layer gets."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.typing import SparseTensor

from ..errors import DeviceError, DtypeError, OptionError, ShapeError, TypesError
from ..ops.cbsr import CBSR
from ._explain_call import as_parts, propagated, read_by
from ._explain_code import frames_of

# What is no tensor of features, also where a layer does not say what it takes.
_NO_X = (type(None), list, np.ndarray, str, int, float, BaseData)


def check_input(x: object) -> None:
    """Raises unless the features that a model gets may be a tensor."""
    if isinstance(x, (*_NO_X, tuple)):
        cure = ': pass data.x' if isinstance(x, BaseData) else ''
        name = type(x).__name__
        raise TypeError(f"'x' must be a tensor of features of nodes, got {name}{cure}")


def check_features(conv: Any, x: object, annotation: object) -> None:
    """Raises unless features are tensors of the layer's dtype, with a row for each node."""
    parts = as_parts(x)
    _check_parts(x, parts, annotation, hasattr(conv, 'num_relations'))
    weight = weight_of(conv)
    for part in parts:
        if not isinstance(part, Tensor):
            continue
        if part.dim() == 1 and hasattr(conv, 'num_relations') and not part.is_floating_point():
            continue  # PyG's relational layers take numbers of nodes.
        of_own = part.is_floating_point() and part.dim() < -conv.node_dim
        if of_own or (part.dim() < 2 and hasattr(conv, 'in_channels')):
            cure = ': x.view(-1, 1)' if part.dim() == 1 else ''
            raise ShapeError(
                "'x' must have shape [num_nodes, in_channels], a row for each node, got "
                f'{list(part.shape)}{cure}'
            )
        if weight is not None:
            check_like_parameters('x', part, weight)


def _check_parts(x: object, parts: Sequence[object], annotation: object, may_lack: bool) -> None:
    """Raises unless features are tensors, as an annotation says, or what may be some where there is
    none; of a pair the second may be None, and the first if `may_lack`."""
    is_named = annotation is not inspect.Parameter.empty
    if is_named and 'Tensor' not in str(annotation):
        return  # Others, such as numbers of nodes by type.
    is_pair = parts is x and any(isinstance(part, (Tensor, CBSR)) for part in parts)
    if x is None and type(None) in get_args(annotation):
        return
    if not is_pair and not isinstance(x, (Tensor, CBSR)):
        check_input(x)
        if is_named:
            raise TypeError(f"'x' must be a tensor of features of nodes, got {type(x).__name__}")
    if is_pair and is_named and not any(name in str(annotation) for name in ('Pair', 'uple')):
        raise ValueError(
            f"'x' must be a tensor, since the layer takes no pair of sources and destinations, got "
            f'a {type(x).__name__}'
        )
    if is_pair and len(parts) != 2:
        raise ValueError(
            f"'x' must be a tensor, or a pair of those of sources and destinations, got "
            f'{len(parts)} tensors'
        )
    for k, part in enumerate(parts if is_pair else ()):
        lacks = part is None and (k == 1 or may_lack)
        if not lacks and not isinstance(part, (Tensor, CBSR)):
            name = type(part).__name__
            raise TypeError(f"'x[{k}]' must be a tensor of features of nodes, got {name}")


def check_features_of_nodes(conv: Any, error: Exception) -> None:
    """Raises for features of nodes that are no tensors, which PyG passes on as None, or no pair."""
    given = {
        name: value for name, value in propagated(frames_of(error)).items()
        if value is not None and not read_by(conv).isdisjoint((f'{name}_i', f'{name}_j'))
    }  # fmt: skip
    for name, value in given.items():
        parts = as_parts(value)
        if parts is value and len(parts) != 2:
            raise OptionError(
                f"'{name}' must be a tensor, or a pair of those of sources and destinations, got "
                f'{len(parts)} of them in a {type(value).__name__}'
            )
        for part in parts:
            if not isinstance(part, (Tensor, type(None))):
                raise TypeError(
                    f"'{name}' must be a tensor of features of nodes, got {type(part).__name__}"
                )


def check_dicts(conv: Any, given: Mapping[str, object]) -> None:
    """Raises unless features and edges of several types are what a layer takes."""
    for name, of in (('x_dict', 'node'), ('edge_index_dict', 'edge')):
        if name not in given:
            continue
        values = given[name]
        if not isinstance(values, Mapping):
            raise TypeError(
                f"'{name}' must be a dictionary by {of} type, got {type(values).__name__}: "
                f'data.{name}'
            )
        for key, value in values.items():
            if not isinstance(value, (Tensor, SparseTensor)):
                raise TypeError(f"'{name}[{key!r}]' must be a tensor, got {type(value).__name__}")
            wanted = conv.in_channels.get(key) if of == 'node' else None
            if wanted is not None and 0 < wanted != value.size(-1):
                raise ShapeError(
                    f"'{name}[{key!r}]' must have {wanted} columns, as 'in_channels' of the layer "
                    f'says, got shape {list(value.shape)}'
                )
    features, edges = given.get('x_dict'), given.get('edge_index_dict')
    if isinstance(features, Mapping) and isinstance(edges, Mapping):
        _check_types(conv, features, edges)


def _check_types(
    conv: Any, features: Mapping[str, object], edges: Mapping[tuple[str, str, str], object]
) -> None:
    """Raises for edges of a type that a layer does not have, or between nodes without features."""
    known = getattr(conv, 'edge_types_map', edges)
    for edge_type in edges:
        if edge_type not in known:
            raise TypesError(
                f"'edge_index_dict' must have edge types of the layer, {list(known)}, got "
                f'{edge_type}'
            )
        for node_type in (edge_type[0], edge_type[-1]):
            if node_type not in features:
                raise TypesError(
                    f"'x_dict' must have features of {node_type!r}, which edges {edge_type} read, "
                    f'got those of {list(features)}'
                )


def check_given(given: Mapping[str, object], signature: inspect.Signature) -> None:
    """Raises for an argument of None where a layer of PyG takes none."""
    for name, value in given.items():
        annotation = signature.parameters[name].annotation
        kinds = get_args(annotation)
        if value is None and kinds and type(None) not in kinds:
            raise TypeError(f"'{name}' must be given, got None")


def check_like_parameters(name: str, value: Tensor, weight: Tensor) -> None:
    """Raises unless features are on the device of a layer's parameters, and of their dtype."""
    if value.device != weight.device:
        raise DeviceError(
            f"'{name}' must be on {weight.device}, as the layer's parameters are, got a tensor on "
            f'{value.device}: move either by .to(device)'
        )
    if value.dtype == weight.dtype:
        return
    if not value.is_floating_point():
        raise DtypeError(
            f"'{name}' must hold floating-point numbers, got {value.dtype}: {name}.float()"
        )
    if not torch.is_autocast_enabled(value.device.type):
        raise DtypeError(
            f"'{name}' must have the dtype of the layer's parameters, {weight.dtype}, got "
            f'{value.dtype}: convert either, or use torch.autocast'
        )


def weight_of(conv: Any) -> Tensor | None:
    """A parameter whose dtype and device features should have: a matrix, or else any one."""
    parameters = list(conv.parameters())
    return next((each for each in parameters if each.dim() > 1), next(iter(parameters), None))


def check_columns(x: object, wanted: object, argument: str = 'in_channels') -> None:
    """Raises unless features have the columns that an option of a layer says; a number that is not
    positive says nothing."""
    pairs = x if isinstance(x, (tuple, list)) else (x,)
    for k, part in enumerate(pairs):
        columns = wanted[k] if isinstance(wanted, (tuple, list)) else wanted
        if isinstance(part, Tensor) and isinstance(columns, int) and 0 < columns != part.size(-1):
            name = f"'x[{k}]'" if isinstance(x, (tuple, list)) else "'x'"
            raise ShapeError(
                f"{name} must have {columns} columns, as '{argument}' of the layer says, got shape "
                f'{list(part.shape)}'
            )


def columns_of(nn: object) -> int | None:
    """The columns that a network's first linear map takes."""
    return _width_of(list(nn.modules()) if isinstance(nn, torch.nn.Module) else [], 'in')


def made_by(nn: object) -> int | None:
    """The columns that a network's last linear map gives."""
    return _width_of(list(nn.modules())[::-1] if isinstance(nn, torch.nn.Module) else [], 'out')


def _width_of(modules: list[torch.nn.Module], side: str) -> int | None:
    for module in modules:
        for name in (f'{side}_features', f'{side}_channels'):
            if isinstance(getattr(module, name, None), int):
                return getattr(module, name)
    return None
