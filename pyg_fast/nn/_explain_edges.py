"""Says which edges do not fit, or what a layer gets for each edge: weights, features, types."""

import re
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch_geometric.nn import CGConv, GATConv, GATv2Conv, GINEConv, GMMConv, MessagePassing, NNConv
from torch_geometric.typing import SparseTensor

from ..errors import DtypeError, EdgesError, OptionError, ShapeError
from ..ops._edges import is_list
from ._explain_call import features_of_nodes, of_propagate, propagated, read_by
from ._explain_code import TWO_TENSORS, frames_of
from ._explain_features import check_like_parameters, columns_of, made_by, weight_of

# What torch says of two sizes that must be the same.
_TWO_SIZES = rf'{TWO_TENSORS}|Expected size (\d+) but got size (\d+)'
_EXPANDED = (
    r'expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at '
    'non-singleton'
)


def check_order(given: Mapping[str, object], frames: Sequence[FrameType], text: str) -> None:
    """Raises for features in the place of edges."""
    edges, names = of_propagate(frames, 'edge_index'), list(given)
    others = [k for k, v in given.items() if is_list(v) and not k.startswith('edge')]
    for name, value in given.items() if others else ():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        # By this name also go features of edges.
        is_second = name == 'edges' and names[0] == others[0] and 'same dtype' in text
        if name == 'edge_index' or value is edges or is_second:
            raise ShapeError(
                f"'{name}' must be edges of shape [2, num_edges], got {value.dtype} of shape "
                f"{list(value.shape)}, but '{others[0]}' has got such edges: exchange the two"
            )
    if isinstance(edges, (tuple, list)) and given.get('edge_index') is not edges:
        raise EdgesError(
            f"'edge_index' of propagate must be a tensor, got a {type(edges).__name__}: functions "
            'such as add_self_loops and prepare_edge_index return edges and what belongs to them, '
            'edge_index, _ = add_self_loops(edge_index)'
        )
    is_read = 'to be of integer type' in text
    is_given = given.get('edge_index') is edges
    if not isinstance(edges, Tensor) or not is_read or not edges.is_floating_point():
        return
    if not others and edges.dim() == 2 and edges.size(0) == 2:
        name = next((name for name, value in given.items() if value is edges), 'edge_index')
        raise EdgesError(f"'{name}' must hold integers, got {edges.dtype}: {name}.long()")
    if not is_given:
        raise ShapeError(
            f"'edge_index' of propagate must have shape [2, num_edges], got {edges.dtype} of shape "
            f'{list(edges.shape)}: propagate(edge_index, x=x)'
        )


def check_edges(edges: object) -> None:
    """Raises unless an object holds edges."""
    if not isinstance(edges, (Tensor, SparseTensor)):
        raise EdgesError(
            "'edge_index' must be a tensor of shape [2, num_edges], or a sparse matrix, got "
            f'{type(edges).__name__}'
        )


def check_edge_weight(weight: object) -> None:
    """Raises unless weights of edges may be some, of floating-point numbers."""
    if weight is None:
        return
    if not isinstance(weight, Tensor):
        raise TypeError(f"'edge_weight' must be a tensor, got {type(weight).__name__}")
    if not weight.is_floating_point():
        raise DtypeError(
            f"'edge_weight' must hold floating-point numbers, got {weight.dtype}: "
            'edge_weight.float()'
        )
    if weight.dim() != 1:
        raise ShapeError(
            f"'edge_weight' must have shape [num_edges], a number for each edge, got "
            f'{list(weight.shape)}'
        )


def check_edge_attr(conv: Any, x: object, edge_attr: object) -> None:
    """Raises unless features of edges are what a layer with :obj:`edge_dim` maps."""
    if edge_attr is not None and not isinstance(edge_attr, Tensor):
        raise TypeError(f"'edge_attr' must be a tensor, got {type(edge_attr).__name__}")
    columns, option = _columns_of_edges(conv)
    if edge_attr is None:
        if isinstance(conv, GINEConv) and columns == 0:
            raise OptionError("'edge_attr' must be given, with as many columns as 'x', got None")
        if columns > 0 and not isinstance(conv, (GATConv, GATv2Conv)):  # They do without.
            raise OptionError(f"'edge_attr' must be given to a layer with '{option}', got None")
        return
    if isinstance(conv, GINEConv):
        source = x[0] if isinstance(x, (tuple, list)) else x
        wanted = source.size(-1) if isinstance(source, Tensor) else 0
        if columns == 0 and wanted not in (0, edge_attr.shape[1:].numel()):
            raise ShapeError(
                f"'edge_attr' must have {wanted} columns, as 'x' has, since the layer has no "
                f"'edge_dim', got shape {list(edge_attr.shape)}"
            )
    elif columns == 0 and option == 'edge_dim' and (
        hasattr(conv, 'lin_edge') or hasattr(conv, 'edge_dim')
    ):  # fmt: skip
        raise OptionError("'edge_attr' must not be given to a layer without 'edge_dim'")
    weight = weight_of(conv)
    if weight is not None and (columns > 0 or edge_attr.is_floating_point()):  # Else: embedded.
        check_like_parameters('edge_attr', edge_attr, weight)
    if columns > 0 and edge_attr.shape[1:].numel() != columns:
        raise ShapeError(
            f"'edge_attr' must have {columns} columns, as '{option}' of the layer says, got shape "
            f'{list(edge_attr.shape)}'
        )
    if isinstance(conv, NNConv):
        wanted, given = conv.in_channels_l * conv.out_channels, made_by(conv.nn)
        if given not in (None, wanted):
            raise ShapeError(
                f"'nn' must give {wanted} columns, 'in_channels' times 'out_channels' of the "
                f'layer, got {given}'
            )


def _columns_of_edges(conv: Any) -> tuple[int, str]:
    """The columns of features of edges that a layer takes, 0 for none or as many as it gets, and
    the option that says so."""
    lin = getattr(conv, 'lin' if isinstance(conv, GINEConv) else 'lin_edge', None)
    if isinstance(conv, (CGConv, GMMConv)):
        return conv.dim, 'dim'
    if isinstance(conv, NNConv):
        return columns_of(conv.nn) or 0, 'nn'
    columns = getattr(lin, 'in_channels', getattr(conv, 'edge_dim', None))
    return columns or 0, 'edge_dim'  # -1: the first call tells


# Layers that :func:`warn_of_missing_edges` has warned of.
_warned: WeakSet[MessagePassing] = WeakSet()


def warn_of_missing_edges(conv: MessagePassing, edge_index: object, stacklevel: int) -> None:
    """Warns once of a layer for features of edges, which is called without them."""
    if torch.compiler.is_compiling() or not conv.edge_dim or conv in _warned:
        return
    # A sparse matrix may have them as its values.
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        _warned.add(conv)
        warnings.warn(
            "'edge_attr' is missing, which a layer with 'edge_dim' then leaves out, as in PyG",
            stacklevel=stacklevel + 1,
        )


def check_edge_type(edge_type: object, edge_index: object, num_relations: int) -> None:
    """Raises unless there is a relation for each edge of a list; a sparse matrix has its own."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return
    if edge_type is None:
        raise OptionError("'edge_type' must be given, the number of a relation for each edge")
    if not isinstance(edge_type, Tensor):
        raise TypeError(f"'edge_type' must be a tensor, got {type(edge_type).__name__}")
    if edge_type.is_floating_point():
        raise DtypeError(f"'edge_type' must hold integers, got {edge_type.dtype}")
    if edge_type.dim() != 1:
        raise ShapeError(
            f"'edge_type' must have shape [num_edges], a number for each edge, got "
            f'{list(edge_type.shape)}'
        )
    if edge_type.numel() > 0:
        low, high = (int(value) for value in edge_type.aminmax())
        if low < 0 or high >= num_relations:
            raise IndexError(
                f"'edge_type' must hold relations in [0, {num_relations}), got values from {low} "
                f'to {high}'
            )


def check_edge_rows(num_edges: int, given: Mapping[str, object]) -> None:
    """Raises unless each tensor of edges has a row for each edge."""
    for name, value in given.items():
        if not name.startswith('edge_') or name.startswith(('edge_index', 'edge_label')):
            continue
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != num_edges:
            raise _rows_error(name, 'edge_index', num_edges, value)


def _rows_error(name: str, edges: str, num_edges: int, value: Tensor) -> ShapeError:
    """The error for an argument that has not a row for each edge."""
    return ShapeError(
        f"'{name}' must have shape {[num_edges, *value.shape[1:]]}, a row for each edge of "
        f"'{edges}', got {list(value.shape)}"
    )


def check_rows(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for what `forward` passes to `propagate` with other edges than those of the call."""
    text, frames = str(error), frames_of(error)
    found = re.search(
        rf'{TWO_TENSORS} at non-singleton dimension 0|Expected size (\d+) but got size (\d+)', text
    )
    edges = of_propagate(frames, 'edge_index')
    if found is None or not isinstance(edges, Tensor) or edges.dim() != 2:
        return
    sizes, count = {int(size) for size in found.groups() if size is not None}, edges.size(1)
    if count not in sizes or len(sizes) != 2:
        return
    (other,) = sizes - {count}
    values = {
        name: value for name, value in propagated(frames).items()
        if name in read_by(conv) and isinstance(value, Tensor) and value.dim() > 0
        and value.size(0) == other
    }  # fmt: skip
    changed = [k for k, v in given.items() if is_list(v) and v.size(1) == other]
    if len(values) == 1:
        ((name, value),) = values.items()
        cure = ''
        if changed:
            how = 'add_self_loops does' if count > other else f'a mask does: mask {name!r}, too'
            cure = f": 'forward' has changed '{changed[0]}', as {how}"
        if any(_rows(part) == other for _, part in features_of_nodes(conv, frames)):
            cure = f"; features of nodes are '{name}_i' or '{name}_j' in 'message'"
        raise ShapeError(
            f"'{name}' must have shape {[count, *value.shape[1:]]}, a row for each edge that "
            f'propagate gets, got {list(value.shape)}{cure}'
        )


def check_rows_by_text(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for the argument that has rows of edges, but not one for each, by two sizes that do
    not fit."""
    found = re.search(rf'{_TWO_SIZES}|{_EXPANDED} dimension 0', str(error))
    sizes = set() if found is None else {int(size) for size in found.groups() if size is not None}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    read = read_by(conv)
    for edges, value in tensors.items():
        is_list = value.dim() == 2 and value.size(0) == 2 and not value.is_floating_point()
        if len(sizes) == 2 and is_list and value.size(1) in sizes:
            (other,) = sizes - {value.size(1)}
            short = {k: v for k, v in tensors.items() if _rows(v) == other}
            # What propagate has got is surer than another argument with as many rows.
            passed = propagated(frames_of(error))
            sure = {k for k in read.intersection(passed) if _rows(passed[k]) == other}
            short = {k: v for k, v in short.items() if not sure or k in sure}
            for name in sorted(short, key=read.__contains__, reverse=True):
                if name not in read and not read.isdisjoint((f'{name}_i', f'{name}_j')):
                    continue  # It has a row for each node, as it should.
                error = _rows_error(name, edges, value.size(1), short[name])
                if name in read:
                    raise ShapeError(
                        f"{error}; features of nodes are '{name}_i' or '{name}_j' in 'message'"
                    )
                raise error


def _rows(value: object) -> int | None:
    return value.size(0) if isinstance(value, Tensor) and value.dim() > 0 else None
