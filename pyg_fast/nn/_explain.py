"""Says which argument of a layer does not fit, after code that does not know its name has failed:
PyG's, torch's, or a kernel's."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv, GINConv, GINEConv, MessagePassing
from torch_geometric.typing import SparseTensor

from ..errors import DeviceError, DtypeError, EdgesError, OptionError, ShapeError
from ..graph.prepared_graph import list_of
from ..ops._edges import check_edge_index, raise_index_error
from ..ops.cbsr import CBSR


def explain(conv: MessagePassing, args: tuple, kwargs: dict[str, object], error: Exception) -> None:
    """Raises an error that names the argument of a call that does not fit, if one is found.

    Args:
        conv: The layer.
        args, kwargs: The arguments of its call.
        error: What the call has raised.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return
    text = str(error)
    try:
        signature = inspect.signature(type(conv).forward)
        given = signature.bind(conv, *args, **kwargs).arguments
        named = any(f"'{name}" in text for name in signature.parameters)
        found = None if named else _find_mistake(conv, given, signature)
    except Exception:  # The search may fail, too: the error of the call stays.
        return
    if found is not None:
        raise found from error


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


def check_edges(edges: object) -> None:
    """Raises unless an object holds edges."""
    if not isinstance(edges, (Tensor, SparseTensor)):
        raise EdgesError(
            "'edge_index' must be a tensor of shape [2, num_edges], or a sparse matrix, got "
            f'{type(edges).__name__}'
        )


def check_edge_rows(num_edges: int, given: Mapping[str, object]) -> None:
    """Raises unless each tensor of edges has a row for each edge."""
    for name, value in given.items():
        if not name.startswith('edge_') or name.startswith(('edge_index', 'edge_label')):
            continue
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != num_edges:
            raise ShapeError(
                f"'{name}' must have shape {[num_edges, *value.shape[1:]]}, a row for each edge of "
                f"'edge_index', got {list(value.shape)}"
            )


def _find_mistake(
    conv: Any, given: Mapping[str, object], signature: inspect.Signature
) -> Exception | None:
    edge_index = given.get('edge_index')
    try:
        _check_types(conv, given, signature)
        if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
            check_edge_index(edge_index)
            check_edge_rows(edge_index.size(1), given)
            _check_nodes(conv, given.get('x'), edge_index)
        wanted, argument = getattr(conv, 'in_channels', None), 'in_channels'
        if wanted is None and isinstance(conv, (GINConv, GINEConv)):
            wanted, argument = _columns_of(conv.nn), 'nn'
        check_columns(given.get('x'), wanted, argument)
        _check_edge_attr(conv, given.get('edge_attr'))
    except (IndexError, TypeError, ValueError) as found:
        return found if str(found).startswith("'") else None  # Not an error of the search.
    return None


def _check_types(conv: Any, given: Mapping[str, object], signature: inspect.Signature) -> None:
    """Raises unless features and edges are tensors, the features of the layer's dtype."""
    if 'edge_index' in given:
        check_edges(given['edge_index'])
    _check_edge_weight(given.get('edge_weight'))
    if 'x' not in given:
        return
    x, annotation = given['x'], str(signature.parameters['x'].annotation)
    parts = x if isinstance(x, (tuple, list)) else (x,)
    may_be_none = 'None' in annotation and parts[0] is None
    if 'Tensor' in annotation and not (may_be_none or isinstance(parts[0], (Tensor, CBSR))):
        raise TypeError(f"'x' must be a tensor of features of nodes, got {type(parts[0]).__name__}")
    weight = next(conv.parameters(), None)
    for part in parts:
        if not isinstance(part, Tensor):
            continue
        if part.dim() == 1 and hasattr(conv, 'num_relations') and not part.is_floating_point():
            continue  # PyG's relational layers take numbers of nodes.
        if part.dim() == 1 and hasattr(conv, 'in_channels'):
            raise ShapeError(
                "'x' must have shape [num_nodes, in_channels], a row for each node, got "
                f'{list(part.shape)}'
            )
        if weight is not None:
            check_like_parameters('x', part, weight)


def _check_edge_attr(conv: Any, edge_attr: object) -> None:
    """Raises unless features of edges are what a layer with :obj:`edge_dim` maps."""
    if edge_attr is not None and not isinstance(edge_attr, Tensor):
        raise TypeError(f"'edge_attr' must be a tensor, got {type(edge_attr).__name__}")
    is_gine = isinstance(conv, GINEConv)
    lin = getattr(conv, 'lin' if is_gine else 'lin_edge', conv)  # None without 'edge_dim'
    columns = getattr(lin, 'in_channels', 0) if lin is not conv else 0  # -1: the first call tells
    if edge_attr is None:
        if columns > 0 and not isinstance(conv, (GATConv, GATv2Conv)):  # They do without.
            raise OptionError("'edge_attr' must be given to a layer with 'edge_dim', got None")
        return
    if lin is None and not is_gine:
        raise OptionError("'edge_attr' must not be given to a layer without 'edge_dim'")
    weight = next(conv.parameters(), None)
    if weight is not None and (columns > 0 or edge_attr.is_floating_point()):  # Else: embedded.
        check_like_parameters('edge_attr', edge_attr, weight)
    if columns > 0 and edge_attr.shape[1:].numel() != columns:
        raise ShapeError(
            f"'edge_attr' must have {columns} columns, as 'edge_dim' of the layer says, got shape "
            f'{list(edge_attr.shape)}'
        )


def _check_edge_weight(weight: object) -> None:
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


def _check_nodes(conv: Any, x: object, edge_index: Tensor) -> None:
    ends = x if isinstance(x, (tuple, list)) else (x, x)
    counts = [_num_rows(end, conv.node_dim) for end in ends]
    if isinstance(edge_index, EdgeIndex):
        size = edge_index.sparse_size()
        for count, wanted, name in zip(counts, size, ('source', 'destination'), strict=True):
            if None not in (count, wanted) and count != wanted:
                raise ValueError(
                    f"'edge_index' is of size {tuple(size)} (sources, destinations), but there are "
                    f'{count} {name} nodes'
                )
    num_src, num_dst = counts
    if edge_index.size(1) > 0 and num_src is not None and num_dst is not None:
        raise_index_error(list_of(edge_index), num_src, num_dst)


def _num_rows(x: object, node_dim: int) -> int | None:
    """The number of nodes; None where it is not known what features of more dimensions mean."""
    if isinstance(x, CBSR):
        return x.size(0)
    if not isinstance(x, Tensor) or x.dim() < 2 or (x.dim() > 2 and node_dim >= 0):
        return None
    return x.size(node_dim)


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


def _columns_of(nn: torch.nn.Module) -> int | None:
    """The columns that a network's first linear map takes."""
    for module in nn.modules():
        for name in ('in_features', 'in_channels'):
            if isinstance(getattr(module, name, None), int):
                return getattr(module, name)
    return None
