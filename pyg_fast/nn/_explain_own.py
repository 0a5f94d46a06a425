"""Says what the functions of a user's own layer do wrong, by the frames of the call that failed."""

import ast
import dis
import inspect
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakSet

import torch
import torch_geometric.utils._softmax as softmax_of_pyg
from torch import Tensor
from torch.nn import Embedding, Linear, Module, Sequential
from torch_geometric.nn import Linear as LinearOfPyG
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from .._alike import did_you_mean, names_alike
from ..errors import DeviceError, DtypeError, EdgesError, IndicesError, OptionError, ShapeError
from ..graph.prepared_graph import list_of
from ..ops._edges import check_edge_index, is_capturing, is_list, raise_index_error
from ..ops._transforms import transforms_traced
from ._checks import OF_GRAPH
from ._explain_code import (
    LIBRARIES,
    OF_SHAPES,
    TWO_TENSORS,
    Operand,
    failed,
    frames_of,
    is_library,
    line_of,
    operand,
    operands,
    reads,
    users_expression,
    value_of,
)

# The methods of a layer that PyG calls, and what passes them their arguments.
_CALLERS = {
    'message': 'propagate', 'aggregate': 'propagate', 'update': 'propagate',
    'edge_update': 'edge_updater',
}  # fmt: skip
# Words of torch and PyG by what they complain of; the first class that fits counts.
_TOPICS: tuple[tuple[type[Exception], str], ...] = (
    (DtypeError, r'dtype|type|Long|Double|Half|Float|Bool|integer|indices'),
    (DeviceError, r'device|meta'),
    (ShapeError, OF_SHAPES),
    (
        TypeError,
        r"must be Tensor|NoneType|'(?!Tensor)\w+' object|support|iterable|subscript|[Ee]xpect",
    ),
    (IndexError, r'ind(ex|ices)|range|bounds|size|Encountered| must hold '),
    (ValueError, f'{OF_SHAPES}|NoneType|must be Tensor'),
)
# What helps where a message returns what is no tensor.
_JOINED = ": torch.cat([a, b], -1) joins channels, and an 'aggregate' of the layer takes several"
_CURES_OF_RESULTS = {
    'tuple': _JOINED, 'list': _JOINED, 'dict': ": an 'aggregate' of the layer takes several values",
    'ndarray': ": NumPy's functions have no gradient, use torch's of the same name",
}  # fmt: skip
# What PyG's code says of nodes that do not exist.
_BEYOND = (' must hold ', 'larger than', 'expected size', "invalid 'dim_size'")
# And of edges to or from such nodes.
_NO_NODES = (
    r"^Found (negative )?indices in 'edge_index'|^Encountered invalid 'dim_size'|"
    r'^index -?\d+ is out of bounds for dimension'
)


def frames_of_method(conv: Any, name: str, frames: Sequence[FrameType]) -> list[FrameType]:
    """The calls of a layer's method."""
    method = getattr(type(conv), name, None) if isinstance(conv, MessagePassing) else None
    code = getattr(inspect.unwrap(method), '__code__', None) if callable(method) else None
    return [] if code is None else [frame for frame in frames if frame.f_code is code]


def read_by(conv: Any, name: str = 'message') -> set[str]:
    """The arguments of a layer's method."""
    method = getattr(type(conv), name, None)
    return set() if method is None else set(inspect.signature(method).parameters)


def rows_error(name: str, edges: str, num_edges: int, value: Tensor) -> ShapeError:
    """The error for an argument that has not a row for each edge."""
    return ShapeError(
        f"'{name}' must have shape {[num_edges, *value.shape[1:]]}, a row for each edge of "
        f"'{edges}', got {list(value.shape)}"
    )


def _of_propagate(frames: Sequence[FrameType], name: str) -> object:
    """An argument by which a layer called `propagate`."""
    of = (frame.f_locals for frame in frames if frame.f_code.co_name == 'propagate')
    return next(of, {}).get(name)


def propagated(frames: Sequence[FrameType], caller: str = 'propagate') -> dict[str, object]:
    """The arguments by name with which a layer called `propagate` or `edge_updater`."""
    for frame in frames:
        if frame.f_code.co_name == caller:
            kwargs = frame.f_locals.get('kwargs')
            if isinstance(kwargs, dict):  # PyG's templates have other values by this name.
                return kwargs
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            given = {name: frame.f_locals.get(name) for name in names}
            return {name: given[name] for name in given if name not in ('edge_index', 'size')}
    return {}


def _names(values: Mapping[str, object]) -> str:
    return ', '.join(f"'{name}'" for name in values) or 'none'


# Whose error it is --------------------------------------------------------------------------------


def is_own(conv: Any) -> bool:
    """Whether the `forward` of a layer is the user's."""
    module = getattr(inspect.unwrap(type(conv).forward), '__module__', None) or ''
    return module.partition('.')[0] not in LIBRARIES


def is_users(conv: Any, error: Exception) -> bool:
    """Whether an error is of the user's own code: raised by it, or of a name that it lacks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or is_library(trace.tb_frame):
        return False
    at, code = trace.tb_lasti, trace.tb_frame.f_code
    if any(e.offset == at and 'RAISE' in e.opname for e in dis.get_instructions(code)):
        return True
    text, base = str(error), getattr(type(conv), '_base', type(conv))
    names = {type(conv).__name__, base.__name__}
    lacks = any(text.startswith(f"'{name}' object has no attribute") for name in names)
    return lacks or isinstance(error, (KeyError, NameError))


def name_error(conv: Any, error: NameError) -> NameError | None:
    """The error for a name in a method that is a variable of `forward` alone."""
    frames, name = frames_of(error), error.name
    inside = frames_of_method(conv, 'forward', frames)
    if not inside or name not in inside[-1].f_locals or inside[-1] is frames[-1]:
        return None
    return NameError(
        f"'{name}' is a variable of 'forward': give it to propagate, as in propagate(edge_index, "
        f"x=x, {name}={name}), and to '{frames[-1].f_code.co_name}' as an argument"
    )


def is_about(found: Exception, text: str) -> bool:
    """Whether the text of an error may speak of what a check has found."""
    if re.search(r'scalar type|dtype', text) is not None:
        return isinstance(found, DtypeError)
    topics = (topic for kind, topic in _TOPICS if isinstance(found, kind))
    if re.search(next(topics), text) is None:
        return False
    # Sizes that it complains of must be among those of the argument.
    sizes = re.sub(r'(dimension|position) -?\d+', '', text)
    numbers, known = (set(re.findall(r'\d+', each)) for each in (sizes, str(found)))
    is_of_dtype = isinstance(found, (DtypeError, DeviceError))
    return is_of_dtype or not numbers or not known or not numbers.isdisjoint(known)


# What no error tells ------------------------------------------------------------------------------

# Classes that :func:`warn_of_methods` has looked at.
_seen: WeakSet[type] = WeakSet()


def _functions_of(conv: MessagePassing) -> dict[str, FunctionType]:
    """The methods that the user's classes of a layer have."""
    cls = getattr(type(conv), '_base', type(conv))
    bases = [base for base in cls.__mro__ if base.__module__.partition('.')[0] not in LIBRARIES]
    return {
        name: value for base in bases for name, value in vars(base).items()
        if isinstance(value, FunctionType)
    }  # fmt: skip


def updates_edges(conv: MessagePassing) -> bool:
    """Whether a layer has an `edge_update` of the user."""
    is_own = type(conv).edge_update is not MessagePassing.edge_update
    return is_own and 'edge_update' in _functions_of(conv)


def warn_of_methods(conv: MessagePassing, stacklevel: int) -> None:
    """Warns of a method that nothing in its class calls, and that has almost the name of one of
    PyG's, which then runs in its place without an error."""
    cls = getattr(type(conv), '_base', type(conv))
    if cls in _seen:
        return
    _seen.add(cls)
    own = _functions_of(conv)
    pygs = {name for name in _OVERRIDDEN if _is_of_library(getattr(type(conv), name))}
    called = {name for each in own.values() for name in _names_in(each.__code__)}
    for name in own.keys() - called - set(dir(MessagePassing)):
        alike = names_alike(name, pygs)
        if alike:
            warnings.warn(
                f"'{cls.__name__}.{name}' is called by nothing in the class, and PyG's own "
                f"'{alike[0]}' runs; did you mean '{alike[0]}'?",
                stacklevel=stacklevel,
            )


_TAKE = 'message', 'aggregate', 'update', 'edge_update', 'message_and_aggregate'
_OVERRIDDEN = 'forward', *_TAKE


def _is_of_library(function: Any) -> bool:
    return (getattr(function, '__module__', '') or '').partition('.')[0] in LIBRARIES


def _names_in(code: CodeType) -> set[str]:
    """The names of attributes and globals that a function reads, and those inside of it."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def warn_of_keywords(
    conv: MessagePassing, size: object, kwargs: Mapping[str, object], stacklevel: int
) -> None:
    """Warns of an argument of `propagate` that no method takes, if one that it lacks is alike."""
    takes = [
        param for name in _TAKE
        for param in inspect.signature(getattr(type(conv), name)).parameters.values()
    ]  # fmt: skip
    bases = {
        param.name[:-2] if param.name[-2:] in ('_i', '_j') else param.name: param.default
        for param in takes
    }
    lacking = [name for name, default in bases.items() if default is None and name not in kwargs]
    lacking += ['size'] if size is None else []
    for name in kwargs.keys() - bases.keys() - OF_GRAPH - {param.name for param in takes}:
        alike = names_alike(name, lacking)
        if alike:
            warnings.warn(
                f"'{name}' of propagate is taken by no method of the layer, which lacks "
                f"'{alike[0]}'; did you mean '{alike[0]}'?",
                stacklevel=stacklevel,
            )


# What is surely wrong, whatever the error says ----------------------------------------------------


def check_first(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for mistakes that are sure, whatever argument the error itself names."""
    text, frames = str(error), frames_of(error)
    is_called = "'NoneType' object is not callable" in text
    own = type(conv).aggregate is not MessagePassing.aggregate
    if is_called and conv.aggr_module is None and not own:
        raise OptionError("'aggr' must be given to a layer without an 'aggregate' of its own")
    _check_call_of_propagate(error, text)
    _check_order(given, frames, text)
    _check_dimensions(conv, frames, text)
    _check_sizes(conv, given, frames, text)
    _check_ends(conv, frames, text)
    for method, caller in _CALLERS.items():
        _check_missing(conv, method, caller, frames, text)
    _check_softmax(frames, text)
    _check_returns(conv, frames, text)
    edges = _of_propagate(frames, 'edge_index')  # By another name in `forward`.
    is_named = 'edge_index' in given
    if not is_named and isinstance(edges, Tensor) and edges.layout == torch.strided:
        check_edge_index(edges)


def check_features_of_nodes(conv: Any, error: Exception) -> None:
    """Raises for features of nodes that are no tensors, which PyG passes on as None, or no pair."""
    given = {
        name: value for name, value in propagated(frames_of(error)).items()
        if value is not None and not read_by(conv).isdisjoint((f'{name}_i', f'{name}_j'))
    }  # fmt: skip
    for name, value in given.items():
        parts = value if isinstance(value, (tuple, list)) else (value,)
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


def _check_call_of_propagate(error: Exception, text: str) -> None:
    """Raises for a call of `propagate` without edges, or with more than these and `size` without
    a name."""
    found = re.search(r"propagate\(\) (takes|missing .* 'edge_index'$)", text)
    call = None if found is None else users_expression(error)
    if call is None or not isinstance(call[0], ast.Call):
        return
    names = [each.arg for each in call[0].keywords if each.arg is not None]
    count = len(call[0].args)
    raise TypeError(
        f"'edge_index' must be given to propagate first, and all others by name, got {count} "
        f'argument{"s" * (count != 1)} without a name and {_names(dict.fromkeys(names))}: '
        'propagate(edge_index, x=x)'
    )


def _check_order(given: Mapping[str, object], frames: Sequence[FrameType], text: str) -> None:
    """Raises for features in the place of edges."""
    edges, names = _of_propagate(frames, 'edge_index'), list(given)
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
            'such as add_self_loops return edges and features of edges, '
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


def _check_sizes(
    conv: Any, given: Mapping[str, object], frames: Sequence[FrameType], text: str
) -> None:
    """Raises for a `size` that `forward` gives to `propagate`."""
    size = _of_propagate(frames, 'size')
    if size is not None and given.get('size') is size and not is_own(conv):
        return
    error = _error_of_shape(conv, size, propagated(frames))
    parts = size if isinstance(size, (tuple, list)) else ()
    is_known = all(part is None or isinstance(part, (int, torch.SymInt, Tensor)) for part in parts)
    if error is None and size is not None and (len(parts) != 2 or not is_known):
        got = tuple(parts) if parts else type(size).__name__
        cure = (
            ': features go by name, propagate(edge_index, x=x)' if isinstance(size, Tensor) else ''
        )
        raise ValueError(
            f"'size' of propagate must be a pair of the numbers of sources and destinations, got "
            f'{got}{cure}'
        )
    is_beyond = any(words in text for words in _BEYOND)
    if error is not None and is_beyond:
        raise error
    if is_beyond:
        _check_exchanged(conv, frames, size)


def _check_exchanged(conv: Any, frames: Sequence[FrameType], size: object) -> None:
    """Raises where the sources are in the place of the destinations: in `size`, in a pair of
    features, or in the edges."""
    edges = _of_propagate(frames, 'edge_index')
    if not isinstance(edges, Tensor) or not is_list(edges) or edges.numel() == 0:
        return
    if conv.flow != 'source_to_target':
        return
    needed = [int(end.max()) + 1 for end in list_of(edges)]
    given = _counts(conv, frames)
    counts: list[int | None] = [None, None]
    for pair, _ in given.values():
        counts = [
            other if count is None else count for count, other in zip(counts, pair, strict=True)
        ]
    is_pair = isinstance(size, (tuple, list)) and [type(each) for each in size] == [int, int]
    if is_pair and isinstance(size, (tuple, list)):
        fits = _fit(size, counts, needed)
        if not fits and size[0] != size[1] and _fit(size[::-1], counts, needed):
            raise ValueError(
                f"'size' of propagate must be (num_sources, num_destinations), {tuple(size[::-1])} "
                f'by the edges and the features, got {tuple(size)}: exchange the two'
            )
        return
    for name, (pair, is_of_both) in given.items():
        fits = not is_of_both or None in pair or _fit(pair, pair, needed)
        if not fits and _fit(pair[::-1], pair[::-1], needed):
            raise IndicesError(
                f"'{name}' must be a pair of the features of sources and destinations, for "
                f'edges of at least {needed[0]} and {needed[1]} nodes, got {pair[0]} and '
                f"{pair[1]} rows: exchange the two, or the edges' rows by edge_index.flip(0)"
            )


def _fit(size: Sequence[int | None], counts: Sequence[int | None], needed: Sequence[int]) -> bool:
    """Whether numbers of sources and destinations are those of features, and enough for edges."""
    return all(
        each is None or (count in (None, each) and each >= least)
        for each, count, least in zip(size, counts, needed, strict=True)
    )


def _counts(conv: Any, frames: Sequence[FrameType]) -> dict[str, tuple[list[int | None], bool]]:
    """The numbers of sources and destinations by the features of nodes that `propagate` got, and
    whether these are a pair."""
    found = {}
    for name, value in propagated(frames).items():
        pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else None
        ends = pair or [
            value if f'{name}{suffix}' in read_by(conv) else None for suffix in ('_j', '_i')
        ]  # fmt: skip
        rows = [
            x.size(conv.node_dim)
            if isinstance(x, Tensor) and -x.dim() <= conv.node_dim < x.dim() else None
            for x in ends
        ]  # fmt: skip
        if rows != [None, None]:
            found[name] = rows, pair is not None
    return found


def _error_of_shape(conv: Any, size: object, kwargs: Mapping[str, object]) -> ValueError | None:
    """The error for a `size` that is the shape of features."""
    for name, value in kwargs.items() if type(size) is torch.Size else ():
        if isinstance(value, Tensor) and value.shape == size and conv.node_dim in (0, -2):
            return ValueError(
                f"'size' of propagate must be a pair of the numbers of sources and destinations, "
                f"got {tuple(size)}, which is the shape of '{name}'"
            )
    return None


def check_size(
    conv: MessagePassing, edge_index: object, size: torch.Size, kwargs: Mapping[str, object]
) -> None:
    """Raises for a `size` that is the shape of features and has too few destinations, before PyG's
    code would stop a GPU."""
    error = _error_of_shape(conv, size, kwargs)
    own = type(conv).aggregate is not MessagePassing.aggregate
    if error is None or own or conv.flow != 'source_to_target' or transforms_traced():
        return
    if type(edge_index) is not Tensor or not is_list(edge_index) or edge_index.numel() == 0:
        return
    count = size[1] if len(size) > 1 else 0
    if size[0] != count and not is_capturing(edge_index) and int(edge_index[1].max()) >= count:
        raise error


def _check_ends(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for edges to or from nodes of which `propagate` got no features."""
    edges, size = (_of_propagate(frames, name) for name in ('edge_index', 'size'))
    if re.search(_NO_NODES, text) is None or not isinstance(edges, Tensor) or edges.dim() != 2:
        return
    counts = [*size] if isinstance(size, (tuple, list)) and len(size) == 2 else [None, None]
    of_ends = (1, 0) if conv.flow == 'source_to_target' else (0, 1)
    for name, value in propagated(frames).items():
        pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else None
        for suffix, end in zip(('_i', '_j'), of_ends, strict=True):
            if pair is None and f'{name}{suffix}' not in read_by(conv):
                continue
            part = value if pair is None else pair[end]
            if isinstance(part, Tensor) and -part.dim() <= conv.node_dim < part.dim():
                counts[end] = part.size(conv.node_dim) if counts[end] is None else counts[end]
    first, second = counts
    first, second = second if first is None else first, first if second is None else second
    if type(first) is type(second) is int and edges.numel() > 0:
        raise_index_error(list_of(edges), first, second)


def _check_softmax(frames: Sequence[FrameType], text: str) -> None:
    """Raises for arguments of PyG's softmax and scatter, and of torch's in its place."""
    if re.match(r"softmax\(\): argument 'dim' .* must be int, not Tensor", text):
        raise TypeError(
            "'dim' of torch's softmax must be an integer, got Tensor: a softmax over the "
            'neighbours is torch_geometric.utils.softmax(src, index, num_nodes=size_i)'
        )
    for caller, frame in pairwise(frames):
        function, module = frame.f_code.co_name, frame.f_globals.get('__name__', '')
        if (function, module) not in _BY_INDEX or is_library(caller):
            continue
        src, index, ptr = (frame.f_locals.get(name) for name in ('src', 'index', 'ptr'))
        size = _BY_INDEX[function, module]
        count, dim = frame.f_locals.get(size), frame.f_locals.get('dim', 0)
        takes = f'{function}(src, index, {size}=size_i)'
        if isinstance(ptr, int):
            raise TypeError(
                "'ptr', the third argument of softmax, must be a tensor, got int: the number of "
                f'nodes has a name, {takes}'
            )
        if ptr is not None:
            continue
        cure = f"{takes}, as 'message' may take 'index' and 'size_i'"
        if not isinstance(index, Tensor):
            raise OptionError(
                f"'index' of {function} must be a tensor with the destination of each edge, got "
                f'{type(index).__name__ if index is not None else None}: {cure}'
            )
        of_floats = index.is_floating_point()
        if of_floats and isinstance(src, Tensor) and not src.is_floating_point():
            raise ShapeError(
                f"'src', the first argument of softmax, must hold the scores of edges, got "
                f"{src.dtype} of shape {list(src.shape)}, and 'index' numbers of nodes, got "
                f'{index.dtype} of shape {list(index.shape)}: exchange the two, softmax(src, index)'
            )
        if index.dim() != 1:
            raise ShapeError(
                f"'index' of {function} must have shape [num_edges], got {list(index.shape)}: "
                f'{cure}'
            )
        if index.dtype not in (torch.int64, torch.int32):
            raise DtypeError(
                f"'index' of {function} must hold the destination of each edge, got {index.dtype}: "
                f'{cure}'
            )
        if not isinstance(src, Tensor) or not -src.dim() <= dim < src.dim():
            continue
        if src.size(dim) != index.size(0):
            raise ShapeError(
                f"'src' and 'index' of {function} must have as many rows, got shapes "
                f'{list(src.shape)} and {list(index.shape)} with dim={dim}'
            )
        if count is not None and not isinstance(count, (int, Tensor)):
            raise TypeError(
                f"'{size}' of {function} must be an integer, got {type(count).__name__}: {cure}"
            )
        most = int(index.max()) if index.numel() > 0 else -1
        if isinstance(count, int) and count <= most:
            raise IndicesError(
                f"'{size}' of {function} must be more than all numbers of 'index', of which the "
                f'largest is {most}, got {count}: {cure}'
            )


# Functions of PyG that take the destinations of edges as `index`, by name and module, and their
# argument for the number of these.
_BY_INDEX = {
    ('softmax', softmax_of_pyg.__name__): 'num_nodes',
    ('scatter', scatter.__module__): 'dim_size',
}


def _check_missing(
    conv: Any, method: str, caller: str, frames: Sequence[FrameType], text: str
) -> None:
    """Raises for an argument of a method that the layer has not passed."""
    read = inspect.signature(getattr(type(conv), method)).parameters
    several = [str(each) for each in read.values() if str(each).startswith('*')]
    if several and frames_of_method(conv, 'forward', frames) and 'is not defined' in text:
        raise OptionError(
            f"'{method}' must name each of its arguments, as PyG passes them by their names, got "
            f'{several[0]}'
        )
    missing: str | None = None
    found = re.search(r"^name '(\w+)' is not defined|local variable '(\w+)'", text)
    if found is not None and frames[-1].f_code.co_name in ('collect', 'edge_collect', caller):
        name = found[1] or found[2]
        missing = next((n for n in (name, f'{name}_i', f'{name}_j') if n in read), None)
    # PyG's Python code passes a class for what is missing.
    inside = frames_of_method(conv, method, frames)
    passed = list(read)[2:] if method in ('aggregate', 'update') else sorted(read)
    for name in passed if inside else ():
        if inside[-1].f_locals.get(name) is inspect.Parameter.empty:
            missing = name
    is_returned = any(value is inspect.Parameter.empty for value in _results(frames))
    if method == 'message' and is_returned:
        collected = _collected(frames)
        missing = next((n for n in read if collected.get(n) is inspect.Parameter.empty), None)
        if missing is None:
            given = propagated(frames)
            ends = [n for n in read if n[-2:] in ('_i', '_j') and n[:-2] not in given]
            missing = next(iter(ends), None)
    given = propagated(frames, caller)
    if missing is None:
        return
    name = missing[:-2] if missing[-2:] in ('_i', '_j') else missing
    if name in given:
        return
    first = list(read)[1] if len(read) > 1 else ''
    cure = did_you_mean(missing, _arguments_alike(missing, given))
    if method in ('aggregate', 'update') and first in given:
        cure = f"; the first argument of '{method}' is what 'propagate' has computed, not '{first}'"
    raise OptionError(
        f"'{name}' must be given to {caller}, as '{method}' takes '{missing}', got {_names(given)}"
        f'{cure}'
    )


def _arguments_alike(missing: str, given: Mapping[str, object]) -> list[str]:
    """Arguments that a method may take, among which a missing one may be alike: those that
    `propagate` got, also for an end of edges, and those of the graph."""
    end = missing[-2:] if missing[-2:] in ('_i', '_j') else ''
    if end:  # What is before the end must be alike.
        bases = names_alike(missing[:-2], [each for each in given if each[-2:] not in ('_i', '_j')])
        found = [f'{each}{end}' for each in bases]
    else:
        found = [f'{each}{end}' for each in given for end in ('', '_i', '_j')]
    return [*found, *OF_GRAPH]


def _check_returns(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for a method without a result, or that takes no layer."""
    for value in _results(frames):
        if value is conv:
            raise TypeError(
                "'message' returns the layer: its first parameter is 'self', as in message(self, "
                'x_j)'
            )
    inside = frames_of_method(conv, 'forward', frames)
    if 'NoneType' not in text or not inside or _of_propagate(frames, 'self') is not None:
        return
    results = re.findall(r'(\w+) = self\.propagate\(', inspect.getsource(inside[-1].f_code))
    has_none = any(inside[-1].f_locals.get(name, 0) is None for name in results)
    for method in ('aggregate', 'update'):
        own = getattr(type(conv), method)
        is_called = has_none or 'propagate' in line_of(inside[-1])
        if own is not getattr(MessagePassing, method) and is_called and _returns_nothing(own):
            raise TypeError(f"'{method}' returns None: return a tensor")


def _returns_nothing(function: Any) -> bool:
    """Whether a function ends without a result, wherever it ends."""
    code = getattr(inspect.unwrap(function), '__code__', None)
    steps = [] if code is None else list(dis.get_instructions(code))
    ends = [
        each if each.opname == 'RETURN_CONST' else before
        for before, each in zip(steps, steps[1:], strict=False)
        if each.opname in ('RETURN_CONST', 'RETURN_VALUE')
    ]
    of_none = ('RETURN_CONST', 'LOAD_CONST')
    return len(ends) > 0 and all(e.opname in of_none and e.argval is None for e in ends)


# What the error tells ----------------------------------------------------------------------------


def _check_dimensions(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for features of nodes in which `node_dim` is not that of the nodes."""
    dim, read = conv.node_dim, read_by(conv)
    values = [
        (name, part) for name, value in propagated(frames).items()
        if not read.isdisjoint((f'{name}_i', f'{name}_j'))
        for part in (value if isinstance(value, (tuple, list)) else (value,))
        if isinstance(part, Tensor)
    ]  # fmt: skip
    for name, value in values if text.startswith('Dimension out of range') else ():
        if value.dim() == 1 and dim < -1:
            raise ShapeError(
                f"'{name}' must have shape [num_nodes, channels], as 'node_dim' is {dim}, got "
                f'{list(value.shape)}: {name}.view(-1, 1)'
            )
    edges = _of_propagate(frames, 'edge_index')
    is_beyond = any(words in text for words in _BEYOND) and isinstance(edges, Tensor)
    if not is_beyond or dim != -2 or not isinstance(edges, Tensor) or edges.numel() == 0:
        return
    for name, value in values:
        if value.dim() > 2 and value.size(-2) <= int(edges.max()) < value.size(0):
            raise OptionError(
                f"'node_dim' must be 0 for '{name}' of shape {list(value.shape)}, which has the "
                'nodes first: super().__init__(node_dim=0)'
            )


def _results(frames: Sequence[FrameType]) -> Iterator[object]:
    """What PyG's `aggregate`, or what runs in its place, has got as messages."""
    for frame in frames:
        is_direct = frame.f_globals.get('__name__') == f'{__package__}._direct'
        name = 'out' if is_direct else 'inputs'
        is_pygs = frame.f_code is MessagePassing.aggregate.__code__
        if name in frame.f_locals and (is_direct or is_pygs):
            yield frame.f_locals[name]


def _check_result(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for what a message returns."""
    edges = _of_propagate(frames, 'edge_index')
    for value in _results(frames):
        kind = type(value).__name__
        is_it = re.search(rf"'(\w+\.)*{kind}' object has no attribute", text) is not None
        if value is None and is_it:
            raise TypeError("'message' returns None: return a tensor")
        if is_it:
            cure = _CURES_OF_RESULTS.get(kind, '')
            raise TypeError(f"'message' must return a tensor, got {kind}{cure}")
        if isinstance(value, Tensor) and value.dim() < -conv.node_dim:
            raise ShapeError(
                f"'message' must return a row of channels for each edge, got shape "
                f'{list(value.shape)}: keepdim=True or .view(-1, 1) makes a column'
            )
        if not isinstance(value, Tensor) or not isinstance(edges, Tensor) or edges.dim() != 2:
            continue
        rows, wanted = value.size(conv.node_dim), edges.size(1)
        if rows != wanted and re.search(rf'\b{rows}\b', text):
            cure = 'torch.cat([x_i, x_j], dim=-1) joins channels, dim=0 edges'
            if wanted == 0 or rows % wanted > 0:
                cure = (
                    'as view(-1, heads, channels) gives, and torch.where(mask, x_j, 0) for a mask'
                )
            raise ShapeError(
                f"'message' must return a row for each of {wanted} edges, got shape "
                f'{list(value.shape)}: {cure}'
            )


def check_rows(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for what `forward` passes to `propagate` with other edges than those of the call."""
    text, frames = str(error), frames_of(error)
    found = re.search(
        rf'{TWO_TENSORS} at non-singleton dimension 0|Expected size (\d+) but got size (\d+)', text
    )
    edges = _of_propagate(frames, 'edge_index')
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
        cure = f": 'forward' has changed '{changed[0]}', as add_self_loops does" if changed else ''
        if _has_rows_of_nodes(conv, frames, other):
            cure = f"; features of nodes are '{name}_i' or '{name}_j' in 'message'"
        raise ShapeError(
            f"'{name}' must have shape {[count, *value.shape[1:]]}, a row for each edge that "
            f'propagate gets, got {list(value.shape)}{cure}'
        )


def _has_rows_of_nodes(conv: Any, frames: Sequence[FrameType], count: int) -> bool:
    """Whether features of nodes that `propagate` gets have so many rows."""
    values = [
        part for name, value in propagated(frames).items()
        if not read_by(conv).isdisjoint((f'{name}_i', f'{name}_j'))
        for part in (value if isinstance(value, (tuple, list)) else (value,))
    ]  # fmt: skip
    return any(isinstance(x, Tensor) and x.dim() > 0 and x.size(0) == count for x in values)


def check_inner(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for a linear map that does not fit what it gets: the argument, where it gets this as
    it is, else the module, in a user's own layer or behind the first one of a Sequential."""
    if 'mat1 and mat2 shapes' not in str(error):
        return
    frames, own = frames_of(error), is_own(conv)
    firsts: list[set[Module]] = []  # the modules of the first parts of Sequentials
    for frame in frames:
        module = frame.f_locals.get('self')
        if frame.f_code is Sequential.forward.__code__ and isinstance(module, Sequential):
            firsts.append({*module[0].modules()})
        if frame.f_code not in _LINEAR or (not own and all(module in each for each in firsts)):
            continue
        argument, option = _LINEAR[frame.f_code]
        value, columns = frame.f_locals.get(argument), getattr(module, option)
        name = next((name for name, each in conv.named_modules() if each is module), None)
        if name is None or not isinstance(value, Tensor):
            continue
        which, shape = _argument_that_is(value, given, frames) if own else None, list(value.shape)
        if which is not None and any(each is None for each in given.values()):
            return  # Perhaps that which is None is to blame.
        if which is not None and len(shape) == columns == 1:
            raise ShapeError(
                f"'{which[0]}' must have shape {[*shape, 1]}, as a linear map of the layer takes, "
                f'got {shape}: {which[0]}.view(-1, 1)'
            )
        if which is not None:
            shape = list(which[1].shape)
            raise ShapeError(
                f"'{which[0]}' must have {columns} columns, as a linear map of the layer takes, "
                f'got shape {shape}'
            )
        raise ShapeError(
            f"'{name}' must get {columns} columns, as its {option} is {columns}, got shape {shape}"
        )


# By the code of linear maps: the name of what they get, and the option that says its columns.
_LINEAR = {
    Linear.forward.__code__: ('input', 'in_features'),
    LinearOfPyG.forward.__code__: ('x', 'in_channels'),
}


def _argument_that_is(
    value: Tensor, given: Mapping[str, object], frames: Sequence[FrameType]
) -> tuple[str, Tensor] | None:
    """The argument of a call, and its part of a pair, that a value is as it is, or rows of it that
    PyG has gathered."""
    arguments = [
        (name, part) for name, several in given.items()
        for part in (several if isinstance(several, (tuple, list)) else (several,))
        if isinstance(part, Tensor)
    ]  # fmt: skip
    for each in arguments:
        if _is_same(value, each[1]):
            return each
    passed = propagated(frames)
    for name, rows in _collected(frames).items():
        if name[-2:] not in ('_i', '_j') or not _is_same(value, rows):
            continue
        several = passed.get(name[:-2])
        parts = several if isinstance(several, (tuple, list)) else (several,)
        for each in arguments:
            if any(_is_same(each[1], part) for part in parts):
                return each
    return None


def arguments_of_operator(given: Mapping[str, object], error: Exception) -> set[str]:
    """The arguments of a call that an operator in the user's code has got as they are."""
    frames = frames_of(error)
    found = (_argument_that_is(each.value, given, frames) for each in operands(error))
    return {each[0] for each in found if each is not None}


def _collected(frames: Sequence[FrameType]) -> dict[str, object]:
    """What PyG's `propagate`, or what runs in its place, has passed to `message`."""
    for frame in frames:
        if frame.f_code.co_name != 'propagate':
            continue
        is_direct = frame.f_globals.get('__name__') == f'{__package__}._direct'
        # Of a template of PyG, of its Python code, or of ours.
        values = frame.f_locals.get('given' if is_direct else 'kwargs')
        by_python = frame.f_locals.get('msg_kwargs')
        if isinstance(values, tuple) and hasattr(values, '_asdict'):
            return values._asdict()
        if isinstance(by_python, dict):
            return by_python
        if is_direct and isinstance(values, dict):
            return values
    return {}


def _is_same(value: Tensor, other: object) -> bool:
    """Whether two tensors are the same numbers in memory."""
    if not isinstance(other, Tensor) or value.shape != other.shape:
        return False
    return value.data_ptr() == other.data_ptr() != 0


def check_joined(conv: Any, error: Exception) -> None:
    """Raises for a message that joins rows in place of channels, before a linear map."""
    text, frames = str(error), frames_of(error)
    found = re.search(r'mat1 and mat2 shapes .* \((\d+)x(\d+) and (\d+)x\d+\)', text)
    edges = _of_propagate(frames, 'edge_index')
    if found is None or not isinstance(edges, Tensor) or edges.numel() == 0:
        return
    rows, columns, wanted = map(int, found.groups())
    times = rows // edges.size(1)
    is_joined = rows == times * edges.size(1) and wanted == times * columns and times > 1
    if is_joined and frames_of_method(conv, 'message', frames):
        raise ShapeError(
            f"'message' gives a linear map of {wanted} columns {rows} rows of {columns}, {times} "
            'for each edge: torch.cat(..., dim=-1) joins channels'
        )


def check_linear(given: Mapping[str, object], error: Exception) -> None:
    """Raises for an argument of whole numbers that a linear map gets."""
    if 'same dtype' not in str(error):
        return
    for frame in frames_of(error):
        value = frame.f_locals.get('input')
        if frame.f_code is not Linear.forward.__code__ or not isinstance(value, Tensor):
            continue
        for name, each in given.items():
            is_it = isinstance(each, Tensor) and each.data_ptr() == value.data_ptr() != 0
            if is_it and not value.is_floating_point() and not is_list(each):
                raise DtypeError(
                    f"'{name}' must hold floating-point numbers, got {value.dtype}: {name}.float()"
                )


def indices_of(error: Exception) -> Tensor | None:
    """The numbers that an embedding has got in the call that failed."""
    for frame in frames_of(error):
        value = frame.f_locals.get('input')
        if frame.f_code is Embedding.forward.__code__ and isinstance(value, Tensor):
            return value
    return None


def embedding_of(conv: Any, error: Exception) -> tuple[str, Embedding, int, int] | None:
    """The embedding of a layer that lacks numbers which it has got in the call that failed, its
    name, and the least and the largest number."""
    frames = frames_of(error)
    tables = [(frame.f_locals.get('weight'), frame.f_locals.get('input')) for frame in frames]
    tables += [(frame.f_locals.get('table'), frame.f_locals.get('index')) for frame in frames]
    for name, module in conv.named_modules():
        for table, index in tables if isinstance(module, Embedding) else ():
            if not isinstance(table, Tensor) or not isinstance(index, Tensor) or index.numel() == 0:
                continue
            low, high = map(int, index.aminmax())
            is_it = table.data_ptr() == module.weight.data_ptr()
            if is_it and (low < 0 or high >= module.num_embeddings):
                return name, module, low, high
    return None


def check_numbers(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for numbers that a table or `one_hot` lacks: for the argument of the call that they
    are, or that `propagate` got."""
    for index, rows, name in _looked_up(conv, error):
        if index.numel() == 0 or index.dtype not in (torch.int64, torch.int32):
            continue
        low, high = map(int, index.aminmax())
        of_classes = name == _CLASSES
        least = 0 if of_classes else -rows  # `table[index]` counts from the end, too.
        frames = frames_of(error)
        of_call, of_propagate = (
            _argument_that_is(index, each, frames) for each in (given, propagated(frames))
        )
        found = of_call or of_propagate
        if found is None or (least <= low and high < rows):
            continue
        if of_classes:
            raise IndicesError(
                f"'{found[0]}' must hold classes in [0, {rows}), as one_hot gets {rows} of them, "
                f'got values from {low} to {high}'
            )
        raise IndexError(
            f"'{found[0]}' must hold numbers of rows of the table that it indexes, '{name}', "
            f'which has {rows}, got values from {low} to {high}'
        )


_CLASSES = 'classes'  # in place of the name of a table


def _looked_up(conv: Any, error: Exception) -> Iterator[tuple[Tensor, int, str]]:
    """Numbers by which the call that failed looks up rows of a table, the number of rows and the
    name of the table, if it is one of the layer; or the classes of a `one_hot`."""
    tables = dict(conv.named_parameters()) | dict(conv.named_buffers())
    text, found = str(error), failed(error)
    if found is not None:  # PyG's code
        expression, frame = found
        if isinstance(expression, ast.Subscript) and 'out of bounds for dimension 0' in text:
            name = ast.unparse(expression.value).removeprefix('self.')
            index = operand(expression.slice, frame)
            if index is not None and name in tables:
                yield index.value, tables[name].size(0), name
        if isinstance(expression, ast.Call) and text.startswith('Class values must be'):
            values = [*expression.args, *(each.value for each in expression.keywords)]
            index = operand(values[0], frame) if values else None
            count = value_of(values[-1], frame)
            if index is not None and type(count) is int:
                yield index.value, count, _CLASSES
    for frame in frames_of(error):  # a kernel
        if frame.f_code.co_name != 'look_up_rows':
            continue
        table, index = frame.f_locals['table'], frame.f_locals['index']
        rows = table.size(0)
        names = [k for k, v in tables.items() if v.data_ptr() == table.data_ptr()]
        if names:
            yield index, rows, names[0].removesuffix('.weight')
        elif table.shape == (rows, rows) and table.equal(torch.eye(rows).to(table)):
            yield index, rows, _CLASSES


def check_embedding(conv: Any, error: Exception) -> None:
    """Raises for numbers that an embedding of the layer lacks."""
    found = embedding_of(conv, error)
    if found is not None:
        name, module, low, high = found
        rows = module.num_embeddings
        raise IndexError(
            f"'{name}' must get numbers in [0, {rows}), as its num_embeddings is {rows}, got "
            f'values from {low} to {high}'
        )


def check_message(conv: Any, error: Exception) -> None:
    """Raises for what an own message forgets: to return, a tensor, or a column of numbers."""
    text, frames = str(error), frames_of(error)
    _check_result(conv, frames, text)
    given = propagated(frames)
    for method in ('message', 'update'):
        inside = frames_of_method(conv, method, frames)
        parameters = inspect.signature(getattr(type(conv), method)).parameters
        for name in sorted(parameters) if inside else ():
            value = inside[-1].f_locals.get(name, 0)
            is_given = name in given or name[:-2] in given
            is_read = reads(inside[-1], name)
            if isinstance(value, tuple) and "'tuple'" in text and is_given and is_read:
                raise TypeError(
                    f"'{name}' of '{method}' is the pair that propagate got: {name}[1] is that of "
                    'destinations'
                )
            is_none = value is None and 'NoneType' in text and is_read
            if is_none and not is_given and parameters[name].default is None:
                raise OptionError(
                    f"'{name}' must be given to propagate, as '{method}' takes '{name}', got "
                    f'{_names(given)}'
                )
            if is_none and is_given:
                raise OptionError(
                    f"'{name}' must be a tensor, as '{method}' computes with it, got None"
                )
    inside = frames_of_method(conv, 'message', frames)
    found = re.search(r'same number of dimensions: got (\d+) and (\d+)', text)
    if found is not None and inside:
        raise ShapeError(
            f"'message' joins tensors of {found[1]} and {found[2]} dimensions: keepdim=True or "
            '.unsqueeze(-1) makes a column of a number for each edge'
        )
    found = re.search(rf'{TWO_TENSORS} at non-singleton dimension (\d+)', text)
    edges = _of_propagate(frames, 'edge_index')
    if found is None or not isinstance(edges, Tensor) or edges.dim() != 2:
        return
    one, two, dim = map(int, found.groups())
    count, sizes = edges.size(1), {one, two}
    if inside:
        _check_operands(operands(error), _collected(frames), count)
    if count in sizes and inside and dim == 0:
        (other,) = sizes - {count}
        if count > 0 and other % count == 0:
            raise ShapeError(
                f"'message' combines {other} rows with {count} edges: each value has a row for "
                'each edge, as .view(-1, heads, channels) keeps'
            )
    if dim == 0:
        return
    if count in sizes and inside:
        (other,) = sizes - {count}
        raise ShapeError(
            f"'message' combines {other} channels with {count} numbers, one for each edge: "
            f'.unsqueeze(-1) or .view(-1, 1) makes a column of a tensor of shape {[count]}, and '
            '.view(-1, 1, 1) one beside heads'
        )
    _check_heads(inside, sizes, dim)
    for method in ('message', 'update'):
        _check_widths(conv, method, frames, (one, two), dim)


def _check_operands(
    operands: Sequence[Operand], collected: Mapping[str, object], num_edges: int
) -> None:
    """Raises for a view of an argument that does not keep the edges, and for heads beside
    channels."""
    for name, _, shape in operands:
        value = collected.get(name)
        if not isinstance(value, Tensor) or name[-2:] in ('_i', '_j'):
            continue
        if shape[0] != num_edges == value.size(0):
            columns = math.prod(shape[1:])
            raise ShapeError(
                f"'{name}' must have {columns} column{'s' * (columns != 1)}, a row for each of "
                f"{num_edges} edges, as 'message' views it, got shape {list(value.shape)}"
            )
    shapes = sorted((each.shape for each in operands), key=len, reverse=True)
    if len(shapes) != 2 or len(shapes[0]) == len(shapes[1]) or len(shapes[1]) < 2:
        return
    if shapes[0][:-1] != shapes[1] and shapes[0][0] == shapes[1][0] == num_edges:
        raise ShapeError(
            f"'message' combines values of shapes {shapes[0]} and {shapes[1]}: "
            '.view(-1, heads, channels) of both gives them as many dimensions'
        )


def _check_heads(inside: Sequence[FrameType], sizes: set[int], dim: int) -> None:
    """Raises for a number of each head that is no column beside channels of heads."""
    values = [v for v in (inside[-1].f_locals.values() if inside else ()) if isinstance(v, Tensor)]
    for wide in values:
        for narrow in values:
            ends = {int(wide.size(-1)), int(narrow.size(-1))} if narrow.dim() > 0 else set()
            if wide.dim() == dim + 1 and narrow.shape == wide.shape[:-1] and ends == sizes:
                raise ShapeError(
                    f"'message' combines values of shapes {list(wide.shape)} and "
                    f'{list(narrow.shape)}: .unsqueeze(-1) makes a column of a number for each head'
                )


def _check_widths(
    conv: Any, method: str, frames: Sequence[FrameType], sizes: tuple[int, int], dim: int
) -> None:
    """Raises if one argument alone of a method has each of the two widths that do not fit, and the
    line at which it failed reads both."""
    inside = frames_of_method(conv, method, frames)
    values = {
        name: value for name, value in (inside[-1].f_locals if inside else {}).items()
        if name in read_by(conv, method) and isinstance(value, Tensor) and value.dim() == dim + 1
    }  # fmt: skip
    names = [[name for name, value in values.items() if value.size(dim) == size] for size in sizes]
    if list(map(len, names)) == [1, 1] and reads(inside[-1], *names[0], *names[1]):
        raise ShapeError(
            f"'{names[0][0]}' and '{names[1][0]}' must have as many columns, as the layer combines "
            f'them, got {sizes[0]} and {sizes[1]}'
        )
