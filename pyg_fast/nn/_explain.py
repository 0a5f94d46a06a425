"""Says which argument of a layer does not fit, after code that does not know its name has failed:
PyG's, torch's, or a kernel's."""

import functools
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric.data.data import BaseData
from torch_geometric.nn import (
    CGConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GINEConv,
    GMMConv,
    MessagePassing,
    NNConv,
)
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.typing import SparseTensor

from .._alike import did_you_mean, option_error
from ..errors import DeviceError, DtypeError, EdgesError, OptionError, ShapeError
from ..graph.prepared_graph import list_of
from ..ops._edges import check_edge_index, is_stream_capturing, raise_index_error
from ..ops._numbers import check_share
from ..ops.cbsr import CBSR
from ..sparse.graph import check_node_counts
from ._explain_code import TWO_TENSORS, check_expression, frames_of, reads, users_frame
from ._explain_own import (
    arguments_of_operator,
    check_embedding,
    check_features_of_nodes,
    check_first,
    check_inner,
    check_joined,
    check_linear,
    check_message,
    check_numbers,
    check_rows,
    embedding_of,
    frames_of_method,
    indices_of,
    is_about,
    is_own,
    is_users,
    name_error,
    propagated,
    read_by,
    rows_error,
)

T = TypeVar('T')
P = ParamSpec('P')

# What is no tensor of features, also where a layer does not say what it takes.
_NO_X = (type(None), list, np.ndarray, str, int, float, BaseData)

# What PyG's code and torch raise for arguments that do not fit.
EXPLAINED = (
    AssertionError, AttributeError, IndexError, KeyError, NameError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
# Options that are whole numbers, and the least that each may be: -1 is that of the first input.
_LEAST = {
    'in_channels': -1, 'hidden_channels': 0, 'out_channels': 0, 'channels': 1, 'num_layers': 1,
    'heads': 1, 'edge_dim': -1,
}  # fmt: skip
# Names of aggregations that others may be meant for.
_AGGRS = 'add', 'sum', 'mean', 'max', 'min', 'mul', 'var', 'std', 'softmax', 'powermean', 'median'
# What torch says of arguments of its functions that are no tensors.
_NO_TENSOR = r"(?:argument '\w+' .*must be Tensor, not|expected Tensor .* but got) (?:\w+\.)*(\w+)"
# By functions that look up rows, of torch and ours: the table.
_TABLES = {'embedding': 'weight', 'look_up_rows': 'table'}
# And of two sizes that must be the same.
_TWO_SIZES = rf'{TWO_TENSORS}|Expected size (\d+) but got size (\d+)'
_EXPANDED = (
    r'expanded size of the tensor \((\d+)\) must match the existing size \((\d+)\) at '
    'non-singleton'
)


def explain(
    conv: MessagePassing, args: tuple, kwargs: dict[str, object], error: Exception
) -> Exception | None:
    """An error that names the argument of a call that does not fit, if one is found.

    Args:
        conv: The layer.
        args, kwargs: The arguments of its call.
        error: What the call has raised.
    """
    if isinstance(error, torch.OutOfMemoryError) or is_stream_capturing():  # Reads would end it.
        return None
    if '(strict=True)' in str(error):  # It is the report.
        return None
    try:
        check_init(conv)
    except AttributeError as lacking:
        return lacking
    if is_users(conv, error):
        return name_error(conv, error) if isinstance(error, NameError) else None
    text = str(error)
    try:
        signature = inspect.signature(type(conv).forward)
        try:
            given = signature.bind(conv, *args, **kwargs).arguments
        except TypeError:
            return _raised(_check_data, signature, args)
        if isinstance(conv, MessagePassing):
            found = _raised(check_first, conv, given, error)
            if found is not None:
                return found
        named = any(re.search(rf"'{name}[^\w ]", text) for name in signature.parameters)
        is_more = (
            'has no attribute', 'keyword argument', 'is not defined', 'local variable',
            'must hold sources in', 'must hold destinations in',
        )  # fmt: skip
        edges = given.get('edge_index')
        is_turned = 'to have size' in text and getattr(edges, 'shape', ())[1:] == (2,)
        if named and not is_turned and not any(words in text for words in is_more):
            return None
        found = _raised(_check_call, conv, given, signature, error)
        # What a user's own layer takes is not known: an error must speak of it, too.
        if found is not None and (not is_own(conv) or is_about(found, text)):
            return found
        return _raised(_check_error, conv, given, error)
    except Exception:  # The search may fail, too: the error of the call stays.
        return None


def first_line(error: Exception) -> str:
    """The class of an error and the first line of its text."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    return f'{name}: {lines[0]}' if lines else name


def naming_options(init: Callable[Concatenate[T, P], None]) -> Callable[Concatenate[T, P], None]:
    """A constructor of a layer or a model, whose errors name the option that does not fit."""

    @functools.wraps(init)
    def naming(self: T, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            init(self, *args, **kwargs)
        except EXPLAINED as error:
            _explain_options(self, init, args, kwargs, error)
            raise

    return naming


def _options_of(cls: type) -> list[str]:
    """The options of a class of layers; none of what stands below PyG's."""
    init = vars(cls).get('__init__')
    return list(inspect.signature(init).parameters) if init and cls is not Module else []


def _explain_options(
    of: object, init: Callable, args: Sequence[object], kwargs: Mapping[str, object],
    error: Exception,
) -> None:  # fmt: skip
    found = re.search(r"got an unexpected keyword argument '(\w+)'$", str(error))
    if found is not None and found[1] in kwargs:
        known = [name for base in type(of).__mro__ for name in _options_of(base)]
        raise option_error(found[1], type(of).__name__, dict.fromkeys(known)) from error
    try:
        given = inspect.signature(init).bind(None, *args, **kwargs).arguments
    except TypeError:  # It says which argument is missing, or not known.
        return
    given = given | given.get('kwargs', {})
    for name, least in _LEAST.items():
        value = given.get(name)
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if name not in given or (name == 'edge_dim' and part is None):
                continue
            if isinstance(part, bool) or not isinstance(part, (int, np.integer)):
                got = type(part).__name__
                raise TypeError(f"'{name}' must be an integer, got {got}") from error
            if part < least:
                raise ValueError(f"'{name}' must be at least {least}, got {part}") from error
    dropout, aggr = given.get('dropout', 0.0), given.get('aggr')
    if not isinstance(dropout, (int, float)):
        raise TypeError(f"'dropout' must be a number, got {type(dropout).__name__}") from error
    if str(error).startswith("'aggr' must"):
        return
    parts = aggr if isinstance(aggr, (tuple, list)) else (aggr,)
    is_known = all(part is None or isinstance(part, (str, Aggregation)) for part in parts)
    wrong = [p for p in parts if p and str(error).startswith(f'Could not resolve {p!r}')]
    if not is_known or wrong:
        alike = did_you_mean(wrong[0], _AGGRS) if wrong and type(wrong[0]) is str else ''
        raise ValueError(
            f"'aggr' must be a name such as 'mean', an Aggregation, or a list of these, got "
            f'{aggr!r}{alike}'
        ) from error
    if 'embed_dim must be divisible' in str(error):
        raise ValueError(
            f"'channels' must be a multiple of 'heads', got {given.get('channels')} and "
            f'{given.get("heads")}'
        ) from error


def check_input(x: object) -> None:
    """Raises unless the features that a model gets may be a tensor."""
    if isinstance(x, (*_NO_X, tuple)):
        cure = ': pass data.x' if isinstance(x, BaseData) else ''
        name = type(x).__name__
        raise TypeError(f"'x' must be a tensor of features of nodes, got {name}{cure}")


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


def warn_of_columns(
    conv: MessagePassing, out: object, edge_index: object, kwargs: Mapping[str, object],
    stacklevel: int,
) -> None:  # fmt: skip
    """Warns of numbers of edges that are a column, if what :obj:`propagate` returns has a dimension
    of the edges: rows of a table by them have one dimension more, and combine all edges with
    all."""
    if not isinstance(out, Tensor) or not isinstance(edge_index, Tensor):
        return
    num_edges = edge_index.size(-1)
    if conv.node_dim != -2 or out.dim() != 3 or out.size(0) != num_edges:
        return
    for name, value in kwargs.items():
        is_column = isinstance(value, Tensor) and value.shape == (num_edges, 1)
        if is_column and value.dtype in (torch.int64, torch.int32):  # type: ignore[attr-defined]
            warnings.warn(
                f"'{name}' has shape {[num_edges, 1]}, by which a table gives a row for each pair "
                f"of edges, and 'message' {num_edges} rows for each edge: {name}.view(-1) gives "
                'one for each edge',
                stacklevel=stacklevel + 1,
            )


def check_edge_rows(num_edges: int, given: Mapping[str, object]) -> None:
    """Raises unless each tensor of edges has a row for each edge."""
    for name, value in given.items():
        if not name.startswith('edge_') or name.startswith(('edge_index', 'edge_label')):
            continue
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) != num_edges:
            raise rows_error(name, 'edge_index', num_edges, value)


def _rows(value: object) -> int | None:
    return value.size(0) if isinstance(value, Tensor) and value.dim() > 0 else None


def _check_rows_by_text(conv: Any, given: Mapping[str, object], error: Exception) -> None:
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
                error = rows_error(name, edges, value.size(1), short[name])
                if name in read:
                    raise ShapeError(
                        f"{error}; features of nodes are '{name}_i' or '{name}_j' in 'message'"
                    )
                raise error


def _raised(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Exception | None:
    """The error that a check raises of an argument."""
    try:
        check(*args, **kwargs)
    except (IndexError, TypeError, ValueError) as found:
        return found if str(found).startswith("'") else None  # Not an error of the search.
    return None


def _check_call(
    conv: Any, given: Mapping[str, object], signature: inspect.Signature, error: Exception
) -> None:
    """Raises for the argument of a call that does not fit, by what PyG's layers take."""
    edge_index, x = given.get('edge_index'), given.get('x')
    _check_attributes(conv)
    if not is_own(conv):
        _check_size(given.get('size'), 'edge_weight' in signature.parameters)
    _check_types(conv, given, signature)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        check_edge_index(edge_index)
        check_edge_rows(edge_index.size(1), given)
        _check_nodes(conv, x, edge_index)
    wanted, argument = getattr(conv, 'in_channels', None), 'in_channels'
    if wanted is None and isinstance(conv, (GINConv, GINEConv)):
        wanted, argument = columns_of(conv.nn), 'nn'
    check_columns(x, wanted, argument)
    if 'edge_attr' in signature.parameters:
        _check_edge_attr(conv, x, given.get('edge_attr'))
    if 'edge_type' in signature.parameters and hasattr(conv, 'num_relations'):
        _check_edge_type(given.get('edge_type'), edge_index, conv.num_relations)
    _check_dicts(conv, given)
    if isinstance(x, Tensor) and x.dim() > 2 and hasattr(conv, 'heads'):
        raise OptionError(
            "'x' must have shape [num_nodes, in_channels], since attention takes no several "
            f'features of one graph, got {list(x.shape)}'
        )


def _check_error(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for the argument of a call that an error speaks of."""
    check_features_of_nodes(conv, error)
    check_numbers(conv, given, error)
    _check_numbers_of_rows(conv, given, error)
    check_embedding(conv, error)
    check_linear(given, error)
    check_joined(conv, error)
    check_inner(conv, given, error)
    _check_by_text(conv, given, error)
    check_rows(conv, given, error)
    if isinstance(conv, MessagePassing):
        check_message(conv, error)
    check_expression(error)


def check_init(module: object) -> None:
    """Raises for a layer whose constructor has not called that of PyG."""
    if isinstance(module, MessagePassing) and 'inspector' not in vars(module):
        name = getattr(type(module), '_base', type(module)).__name__
        raise AttributeError(
            f"'{name}.__init__' must call super().__init__(), and set attributes after it"
        )


def _check_data(signature: inspect.Signature, args: tuple) -> None:
    """Raises for a whole graph in place of the arguments of a layer."""
    names = list(signature.parameters)[1:]
    if len(args) == 1 and isinstance(args[0], BaseData):
        raise TypeError(
            f"'{names[0]}' must be a tensor, got {type(args[0]).__name__} alone: the layer takes "
            f'{", ".join(names)}'
        )


def _check_attributes(conv: Any) -> None:
    """Raises unless attributes that a program may have set later are what the layer takes."""
    if isinstance(conv, (GATConv, GATv2Conv)):
        check_share('dropout', conv.dropout)
        slope = conv.negative_slope
        if isinstance(slope, bool) or not isinstance(slope, (int, float)):
            raise TypeError(f"'negative_slope' must be a number, got {type(slope).__name__}")
    elif not isinstance(conv, GCNConv):
        return
    bias = conv.bias
    if isinstance(bias, Tensor):
        several = getattr(conv, 'concat', False)
        wanted = conv.heads * conv.out_channels if several else conv.out_channels
        if list(bias.shape) not in ([wanted], [1]):
            raise ShapeError(
                f"'bias' must have shape {[wanted]}, a number for each channel of the layer, got "
                f'{list(bias.shape)}'
            )


def _weight_of(conv: Any) -> Tensor | None:
    """A parameter whose dtype and device features should have: a matrix, or else any one."""
    parameters = list(conv.parameters())
    return next((each for each in parameters if each.dim() > 1), next(iter(parameters), None))


def _check_size(size: object, takes_weights: bool) -> None:
    if size is None or (isinstance(size, (tuple, list)) and len(size) == 2):
        return
    got = f'{len(size)} numbers' if isinstance(size, (tuple, list)) else type(size).__name__
    cure = ': the layer takes no weights of edges' if not takes_weights else ''
    raise ValueError(
        f"'size' must be a pair of the numbers of sources and destinations, got {got}{cure}"
    )


def _check_types(conv: Any, given: Mapping[str, object], signature: inspect.Signature) -> None:
    """Raises unless features and edges are tensors, the features of the layer's dtype."""
    if 'edge_index' in given:
        check_edges(given['edge_index'])
    check_edge_weight(given.get('edge_weight'))
    if 'x' not in given:
        return
    x, annotation = given['x'], signature.parameters['x'].annotation
    parts = x if isinstance(x, (tuple, list)) else (x,)
    _check_features(x, parts, annotation, hasattr(conv, 'num_relations'))
    weight = _weight_of(conv)
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


def _check_features(x: object, parts: Sequence[object], annotation: object, may_lack: bool) -> None:
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


def _check_edge_attr(conv: Any, x: object, edge_attr: object) -> None:
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
    weight = _weight_of(conv)
    if weight is not None and (columns > 0 or edge_attr.is_floating_point()):  # Else: embedded.
        check_like_parameters('edge_attr', edge_attr, weight)
    if columns > 0 and edge_attr.shape[1:].numel() != columns:
        raise ShapeError(
            f"'edge_attr' must have {columns} columns, as '{option}' of the layer says, got shape "
            f'{list(edge_attr.shape)}'
        )


def _check_edge_type(edge_type: object, edge_index: object, num_relations: int) -> None:
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


def _check_dicts(conv: Any, given: Mapping[str, object]) -> None:
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


def _check_by_text(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for the argument that an error of torch speaks of, by its type or its shape."""
    text = str(error)
    found = re.search(_NO_TENSOR, text)
    if found is not None:
        for name, value in given.items():
            if type(value).__name__ == found[1]:
                raise TypeError(f"'{name}' must be a tensor, got {found[1]}")
    tensors = {
        name: value for name, value in given.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    }  # fmt: skip
    _check_numbers_of_types(given, error)
    _check_rows_by_text(conv, given, error)
    _check_widths_by_text(conv, tensors, error)
    weight = _weight_of(conv)
    if weight is not None and 'same dtype' in text:
        for name, value in tensors.items():
            check_like_parameters(name, value, weight)
    found = re.search(r'Encountered tensor with size (\d+) in .*, but expected size (\d+)', text)
    if found is not None:
        rows, wanted = map(int, found.groups())
        for name, value in (tensors | propagated(frames_of(error))).items():
            if isinstance(value, Tensor) and value.size(0) == rows:
                raise ShapeError(
                    f"'{name}' must have a row for each of {wanted} nodes, as other features, "
                    f"'size' or a prepared graph say, got {list(value.shape)}"
                )
    found = re.search(r'same number of dimensions: got (\d+) and (\d+)', text)
    if found is not None:
        fewer, more = sorted(map(int, found.groups()))
        inside = frames_of_method(conv, 'message', frames_of(error))
        read = read_by(conv) if inside else set(tensors)
        for name, value in tensors.items():
            if value.dim() == fewer and not read.isdisjoint((name, f'{name}_i', f'{name}_j')):
                raise ShapeError(
                    f"'{name}' must have {more} dimensions, as what it is joined with, got shape "
                    f'{list(value.shape)}'
                )
    found = re.search(r'mat1 and mat2 shapes .* \(\d+x(\d+) and (\d+)x\d+\)', text)
    if found is None:
        return
    columns, wanted = int(found[1]), int(found[2])
    if all(wanted not in weight.shape for weight in conv.parameters()):
        return  # It is no parameter that does not fit.
    of_width = _of_width(conv, tensors, columns)
    if is_own(conv):
        as_they_are = arguments_of_operator(given, error)
        of_width = [name for name in of_width if name in as_they_are]
        if not of_width:
            return
    # What is joined with others has not the width of the map alone.
    parameters = inspect.signature(type(conv).forward).parameters
    missing = [
        name for name, value in given.items()
        if value is None and parameters[name].default is inspect.Parameter.empty
    ]  # fmt: skip
    if of_width and missing and columns < wanted:
        raise OptionError(
            f"'{missing[0]}' must be given if a linear map of the layer takes {wanted} columns, of "
            f"which '{of_width[0]}' has {columns}, got None"
        )
    if len(of_width) > 1:
        names = ' or '.join(f"'{name}'" for name in of_width)
        raise ShapeError(
            f'{names} must have {wanted} columns, as a linear map of the layer takes, got {columns}'
        )
    for name in of_width:
        shape = list(tensors[name].shape)
        if len(shape) == 1 and wanted == 1:
            raise ShapeError(
                f"'{name}' must have shape {[columns, 1]}, as a linear map of the layer takes, got "
                f'{shape}: {name}.view(-1, 1)'
            )
        raise ShapeError(
            f"'{name}' must have {wanted} columns, as a linear map of the layer takes, got shape "
            f'{shape}'
        )
    widths = {name: value.size(-1) for name, value in tensors.items()}
    if columns - sum(widths.values()) not in (0, widths.get('x')):  # Of both ends of an edge.
        return
    names = ' and '.join(f"'{name}'" for name in tensors)
    raise ShapeError(
        f'{names} must fit a linear map of the layer, which takes {wanted} columns of them joined, '
        f'got {columns} of widths {widths}'
    )


def _of_width(conv: Any, tensors: Mapping[str, Tensor], columns: int) -> list[str]:
    """The arguments of so many columns; those that the message reads, if there are some."""
    names = [name for name, value in tensors.items() if value.size(-1) == columns]
    read_names = {name.removesuffix('_i').removesuffix('_j') for name in read_by(conv)}
    return [name for name in names if name in read_names] or names


def _check_widths_by_text(conv: Any, tensors: Mapping[str, Tensor], error: Exception) -> None:
    """Raises if one argument alone has each of the two widths that do not fit; in a user's layer if
    the line at which it failed reads both."""
    found = re.search(rf'{TWO_TENSORS} at non-singleton dimension (\d+)', str(error))
    if found is None:
        return
    one, other, dim = map(int, found.groups())
    wide = {name: value for name, value in tensors.items() if value.dim() == dim + 1 > 1}
    names = [_of_width(conv, wide, columns) for columns in (one, other)]
    frame = users_frame(frames_of(error)) if is_own(conv) else None
    if list(map(len, names)) == [1, 1] and (frame is None or reads(frame, *names[0], *names[1])):
        raise ShapeError(
            f"'{names[0][0]}' and '{names[1][0]}' must have as many columns, as the layer combines "
            f'them, got {one} and {other}'
        )


def _check_numbers_of_rows(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises if one argument alone can hold the numbers that a table lacks."""
    text = str(error)
    found = re.search(r'index -?\d+ is out of bounds for dimension 0 with size (\d+)', text)
    if found is None and 'index out of range in self' not in text:
        return
    rows = _rows_of_table(error) if found is None else int(found[1])
    ranges = {
        name: tuple(int(each) for each in value.aminmax()) for name, value in given.items()
        if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        and value.dim() == 1 and value.numel() > 0
    }  # fmt: skip
    if rows is not None:
        least = 0 if found is None else -rows  # `table[index]` counts from the end, too.
        ranges = {
            name: (low, high) for name, (low, high) in ranges.items()
            if low < least or high >= rows
        }  # fmt: skip
    if len(ranges) == 1:
        ((name, (low, high)),) = ranges.items()
        table = embedding_of(conv, error)
        which = '' if rows is None else f', which has {rows}'
        which = which if table is None else f", '{table[0]}'{which}"
        raise IndexError(
            f"'{name}' must hold numbers of rows of the table that it indexes{which}, got values "
            f'from {low} to {high}'
        )


def _check_numbers_of_types(given: Mapping[str, object], error: Exception) -> None:
    """Raises if one argument alone can be what a table takes as numbers of its rows."""
    text, indices = str(error), indices_of(error)
    of_classes = text.startswith('one_hot is only applicable to index tensor of type Long')
    if 'scalar types: Long, Int' in text or 'used as indices must be' in text or of_classes:
        found = [
            (name, value.dtype) for name, value in given.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 1
            and (indices is None or indices.data_ptr() == value.data_ptr())
        ]  # fmt: skip
        if len(found) == 1:
            ((name, dtype),) = found
            raise DtypeError(f"'{name}' must hold integers, got {dtype}: {name}.long()")
    for name, value in given.items() if 'memory' in text else ():
        if not isinstance(value, Tensor) or value.dtype not in (torch.int64, torch.int32):
            continue
        if value.dim() == 2 and value.size(1) == 1:
            raise ShapeError(
                f"'{name}' must have shape [num_edges], a number for each edge, got "
                f'{list(value.shape)}: {name}.view(-1)'
            )


def _rows_of_table(error: Exception) -> int | None:
    """The rows of the table of which an error of torch says only that it lacks some."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        table = frame.f_locals.get(_TABLES.get(frame.f_code.co_name, ''))
        if isinstance(table, Tensor):
            return table.size(0)
    return None


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


def _check_nodes(conv: Any, x: object, edge_index: Tensor) -> None:
    ends = x if isinstance(x, (tuple, list)) else (x, x)
    num_src, num_dst = (_num_rows(end, conv.node_dim) for end in ends)
    if isinstance(edge_index, EdgeIndex):
        check_node_counts(edge_index.sparse_size(), num_src, num_dst)
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


def columns_of(nn: object) -> int | None:
    """The columns that a network's first linear map takes."""
    for module in nn.modules() if isinstance(nn, torch.nn.Module) else ():
        for name in ('in_features', 'in_channels'):
            if isinstance(getattr(module, name, None), int):
                return getattr(module, name)
    return None
