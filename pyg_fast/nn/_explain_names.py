"""Says which names do not fit: of methods, of their arguments, and of those of `propagate`."""

import ast
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any
from weakref import WeakSet

from torch_geometric.nn import MessagePassing

from .._alike import did_you_mean, names_alike
from ..errors import OptionError
from ..message._fallback import users_class
from ._checks import OF_GRAPH
from ._explain_call import frames_of_method, messages_of, passed_to_message, propagated, quoted
from ._explain_code import frames_of, is_librarys, users_expression

# The methods of a layer that PyG calls, and what passes them their arguments.
_CALLERS = {
    'message': 'propagate', 'aggregate': 'propagate', 'update': 'propagate',
    'edge_update': 'edge_updater',
}  # fmt: skip
_TAKE = 'message', 'aggregate', 'update', 'edge_update', 'message_and_aggregate'
_OVERRIDDEN = 'forward', *_TAKE


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


def check_call_of_propagate(error: Exception, text: str) -> None:
    """Raises for a call of `propagate` without edges, or with more than these and `size` without
    a name, and for one of `edge_updater` where the layer has no `edge_update`."""
    if type(error) is NotImplementedError and frames_of(error)[-1].f_code.co_name == 'edge_update':
        raise NotImplementedError(
            "'edge_updater' needs a method 'edge_update' of the layer, got none: "
            'def edge_update(self, x_i, x_j)'
        )
    found = re.search(r"propagate\(\) (takes|missing .* 'edge_index'$)", text)
    call = None if found is None else users_expression(error)
    if call is None or not isinstance(call[0], ast.Call):
        return
    names = [each.arg for each in call[0].keywords if each.arg is not None]
    count = len(call[0].args)
    raise TypeError(
        f"'edge_index' must be given to propagate first, and all others by name, got {count} "
        f'argument{"s" * (count != 1)} without a name and {quoted(dict.fromkeys(names))}: '
        'propagate(edge_index, x=x)'
    )


def check_missing(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for an argument of a method that `forward` has not passed on."""
    for method, caller in _CALLERS.items():
        _check_missing(conv, method, caller, frames, text)


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
    is_returned = any(value is inspect.Parameter.empty for value in messages_of(frames))
    if method == 'message' and is_returned:
        passed_on = passed_to_message(frames)
        missing = next((n for n in read if passed_on.get(n) is inspect.Parameter.empty), None)
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
        f"'{name}' must be given to {caller}, as '{method}' takes '{missing}', got {quoted(given)}"
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


# Classes that :func:`warn_of_methods` has looked at.
_seen: WeakSet[type] = WeakSet()


def _functions_of(conv: MessagePassing) -> dict[str, FunctionType]:
    """The methods that the user's classes of a layer have."""
    cls = users_class(conv)
    bases = [base for base in cls.__mro__ if not is_librarys(base)]
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
    cls = users_class(conv)
    if cls in _seen:
        return
    _seen.add(cls)
    own = _functions_of(conv)
    pygs = {name for name in _OVERRIDDEN if is_librarys(getattr(type(conv), name))}
    called = {name for each in own.values() for name in _names_in(each.__code__)}
    for name in own.keys() - called - set(dir(MessagePassing)):
        alike = names_alike(name, pygs)
        if alike:
            warnings.warn(
                f"'{cls.__name__}.{name}' is called by nothing in the class, and PyG's own "
                f"'{alike[0]}' runs; did you mean '{alike[0]}'?",
                stacklevel=stacklevel,
            )


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
