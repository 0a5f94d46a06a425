"""Says which argument of a layer does not fit, after code that does not know its name has failed:
PyG's, torch's, or a kernel's.

The order of the checks is here; what they check is in the modules ``_explain_*`` by subject, which
read the call that failed by ``_explain_call``, and the user's code by ``_explain_code``.
"""

import dis
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.nn import GINConv, GINEConv, MessagePassing
from torch_geometric.nn.conv import hetero_conv

from .._alike import did_you_mean
from ..errors import DeviceError, DtypeError, OptionError, ShapeError
from ..message._fallback import users_class
from ..ops._edges import check_edge_index, is_stream_capturing
from ._explain_call import is_own, of_propagate
from ._explain_code import OF_SHAPES, check_expression, frames_of, is_library
from ._explain_edges import (
    check_edge_attr,
    check_edge_rows,
    check_edge_type,
    check_edge_weight,
    check_edges,
    check_order,
    check_rows,
    check_rows_by_text,
)
from ._explain_features import (
    check_columns,
    check_dicts,
    check_features,
    check_features_of_nodes,
    check_given,
    check_like_parameters,
    columns_of,
    weight_of,
)
from ._explain_linear import check_inner, check_joined, check_linear, check_linear_by_text
from ._explain_message import check_dimensions, check_message, check_returns, check_widths_by_text
from ._explain_names import check_call_of_propagate, check_missing, name_error
from ._explain_options import check_attributes, check_init
from ._explain_scatter import check_softmax
from ._explain_size import (
    check_ends,
    check_node_dim,
    check_nodes,
    check_pair,
    check_rows_of_nodes,
    check_sizes,
)
from ._explain_table import (
    check_embedding,
    check_numbers,
    check_numbers_of_rows,
    check_numbers_of_types,
)

P = ParamSpec('P')
_MOST_FRAMES = 12  # between a layer and the container that has called it, with hooks

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
# What torch says of arguments of its functions that are no tensors.
_NO_TENSOR = r"(?:argument '\w+' .*must be Tensor, not|expected Tensor .* but got) (?:\w+\.)*(\w+)"


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
    if _is_users(conv, error):
        return name_error(conv, error) if isinstance(error, NameError) else None
    text = str(error)
    try:
        signature = inspect.signature(type(conv).forward)
        try:
            given = signature.bind(conv, *args, **kwargs).arguments
        except TypeError:
            return _raised(_check_data, signature, args) or _unknown_keyword(text, signature)
        if isinstance(conv, MessagePassing):
            found = _raised(_check_first, conv, given, error)
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
        found = _raised(_check_call, conv, given, signature)
        # What a user's own layer takes is not known: an error must speak of it, too.
        if found is not None and (not is_own(conv) or _is_about(found, text)):
            return found
        return _raised(_check_error, conv, given, error)
    except Exception:  # The search may fail, too: the error of the call stays.
        return None


def name_edge_type(error: Exception) -> None:
    """Makes an error tell for which edges a :class:`~torch_geometric.nn.HeteroConv` has called the
    layer."""
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame.f_globals.get('__name__') == hetero_conv.__name__:
            edge_type = frame.f_locals.get('edge_type')
            if edge_type is not None:
                given = frame.f_locals.get('args_dict') if 'NoneType' in str(error) else None
                lacking = _lacking_types(edge_type, given)
                error.args = f'{error}, for edges {edge_type}{lacking}', *error.args[1:]
            return
        if frame.f_back is None:
            return
        frame = frame.f_back


def _lacking_types(edge_type: tuple[str, str, str], given: object) -> str:
    """Which node types of edges a dictionary among the arguments of a call lacks, as text."""
    ends = edge_type[0], edge_type[-1]
    for one in given if isinstance(given, tuple) else ():
        if isinstance(one, Mapping) and not any(isinstance(key, tuple) for key in one):
            lacking = [repr(end) for end in dict.fromkeys(ends) if end not in one]
            if lacking:
                return f': no features of {" and ".join(lacking)} are given, but of {list(one)}'
    return ''


def first_line(error: Exception) -> str:
    """The class of an error and the first line of its text."""
    name, lines = type(error).__name__, str(error).strip().splitlines()
    return f'{name}: {lines[0]}' if lines else name


def _is_users(conv: Any, error: Exception) -> bool:
    """Whether an error is of the user's own code: raised by it, or of a name that it lacks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or is_library(trace.tb_frame):
        return False
    at, code = trace.tb_lasti, trace.tb_frame.f_code
    if any(e.offset == at and 'RAISE' in e.opname for e in dis.get_instructions(code)):
        return True
    text, base = str(error), users_class(conv)
    names = {type(conv).__name__, base.__name__}
    lacks = any(text.startswith(f"'{name}' object has no attribute") for name in names)
    return lacks or isinstance(error, (KeyError, NameError))


def _is_about(found: Exception, text: str) -> bool:
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


def _raised(check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Exception | None:
    """The error that a check raises of an argument."""
    try:
        check(*args, **kwargs)
    except (IndexError, NotImplementedError, TypeError, ValueError) as found:
        return found if str(found).startswith("'") else None  # Not an error of the search.
    return None


def _check_first(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for mistakes that are sure, whatever argument the error itself names."""
    text, frames = str(error), frames_of(error)
    is_called = "'NoneType' object is not callable" in text
    own = type(conv).aggregate is not MessagePassing.aggregate
    if is_called and conv.aggr_module is None and not own:
        raise OptionError("'aggr' must be given to a layer without an 'aggregate' of its own")
    check_call_of_propagate(error, text)
    check_order(given, frames, text)
    check_node_dim(conv, frames, text)
    check_sizes(conv, given, frames, text)
    check_ends(conv, frames, text)
    check_missing(conv, frames, text)
    check_softmax(frames, text)
    check_returns(conv, frames, text)
    edges = of_propagate(frames, 'edge_index')  # By another name in `forward`.
    is_named = 'edge_index' in given
    if not is_named and isinstance(edges, Tensor) and edges.layout == torch.strided:
        check_edge_index(edges)


def _check_call(conv: Any, given: Mapping[str, object], signature: inspect.Signature) -> None:
    """Raises for the argument of a call that does not fit, by what PyG's layers take."""
    edge_index, x = given.get('edge_index'), given.get('x')
    check_attributes(conv)
    if not is_own(conv):
        check_pair(given.get('size'), 'edge_weight' in signature.parameters)
    if 'edge_index' in given:
        check_edges(edge_index)
    check_edge_weight(given.get('edge_weight'))
    if 'x' in given:
        check_features(conv, x, signature.parameters['x'].annotation)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        check_edge_index(edge_index)
        check_edge_rows(edge_index.size(1), given)
        check_nodes(conv, x, edge_index)
    wanted, argument = getattr(conv, 'in_channels', None), 'in_channels'
    if wanted is None and isinstance(conv, (GINConv, GINEConv)):
        wanted, argument = columns_of(conv.nn), 'nn'
    check_columns(x, wanted, argument)
    if 'edge_attr' in signature.parameters:
        check_edge_attr(conv, x, given.get('edge_attr'))
    if 'edge_type' in signature.parameters and hasattr(conv, 'num_relations'):
        check_edge_type(given.get('edge_type'), edge_index, conv.num_relations)
    check_dicts(conv, given)
    if not is_own(conv):
        check_given(given, signature)
    if isinstance(x, Tensor) and x.dim() > 2 and hasattr(conv, 'heads'):
        raise OptionError(
            "'x' must have shape [num_nodes, in_channels], since attention takes no several "
            f'features of one graph, got {list(x.shape)}'
        )


def _check_error(conv: Any, given: Mapping[str, object], error: Exception) -> None:
    """Raises for the argument of a call that an error speaks of."""
    check_features_of_nodes(conv, error)
    check_numbers(conv, given, error)
    check_numbers_of_rows(conv, given, error)
    check_embedding(conv, error)
    check_linear(given, error)
    check_joined(conv, error)
    check_inner(conv, given, error)
    _check_by_text(conv, given, error)
    check_rows(conv, given, error)
    if isinstance(conv, MessagePassing):
        check_message(conv, error)
    check_expression(error)


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
    check_numbers_of_types(given, error)
    check_rows_by_text(conv, given, error)
    check_widths_by_text(conv, tensors, error)
    weight = weight_of(conv)
    if weight is not None and 'same dtype' in text:
        for name, value in tensors.items():
            check_like_parameters(name, value, weight)
    check_rows_of_nodes(tensors, error)
    check_dimensions(conv, tensors, error)
    check_linear_by_text(conv, given, tensors, error)


def _unknown_keyword(text: str, signature: inspect.Signature) -> TypeError | None:
    """An error that asks for the argument that a misspelt one may mean."""
    found = re.search(r"got an unexpected keyword argument '(\w+)'$", text)
    alike = '' if found is None else did_you_mean(found[1], list(signature.parameters)[1:])
    return TypeError(f'{text}{alike}') if alike else None


def _check_data(signature: inspect.Signature, args: tuple) -> None:
    """Raises for a whole graph in place of the arguments of a layer."""
    names = list(signature.parameters)[1:]
    if len(args) == 1 and isinstance(args[0], BaseData):
        raise TypeError(
            f"'{names[0]}' must be a tensor, got {type(args[0]).__name__} alone: the layer takes "
            f'{", ".join(names)}'
        )
