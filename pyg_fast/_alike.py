"""Names that a user may have meant by a misspelt one."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import ParamSpec, TypeVar

T = TypeVar('T')
P = ParamSpec('P')

# How alike a name must be, by its length: of a short one a single letter may be wrong.
_SHORT, _ALIKE, _ALIKE_IF_SHORT = 5, 0.75, 0.6


def names_alike(name: str, known: Iterable[str]) -> list[str]:
    """The names that are most alike, if any is."""
    least = _ALIKE_IF_SHORT if len(name) <= _SHORT else _ALIKE
    ratios = {
        each: SequenceMatcher(None, name.lower(), each.lower()).ratio()
        for each in sorted(set(known) - {name})
    }
    most = max(ratios.values(), default=0.0)
    return [each for each, ratio in ratios.items() if ratio == most >= least]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to stand at the end of an error about a name; '' if no name is alike."""
    found = [f"'{each}'" for each in names_alike(name, known)]
    return f'; did you mean {" or ".join(found)}?' if found else ''


def naming_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """A function, or the `__init__` of a class, whose error about an option that it does not have
    tells which one is alike."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def naming(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            check_option(error, f'{function.__qualname__}()', known)
            raise

    return naming


def check_option(error: TypeError, name: str, known: Iterable[str]) -> None:
    """Raises with the name that is alike, if an error is of an option that a function, by whose
    name the error begins, does not have."""
    found = re.match(rf"{re.escape(name)} got an unexpected keyword argument '(\w+)'$", str(error))
    if found is not None:
        raise option_error(found[1], name, known) from error


def option_error(option: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for an option that a function or class does not have."""
    known = [each for each in known if each not in ('self', 'args', 'kwargs', 'refused')]
    return TypeError(
        f"{name} got an unexpected keyword argument '{option}'; it has {', '.join(known)}"
        f'{did_you_mean(option, known)}'
    )
