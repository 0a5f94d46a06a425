"""Tells what `propagate` and the methods of a layer got in a call that failed."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from ._explain_code import LIBRARIES


def is_own(conv: Any) -> bool:
    """Whether the `forward` of a layer is the user's."""
    module = getattr(inspect.unwrap(type(conv).forward), '__module__', None) or ''
    return module.partition('.')[0] not in LIBRARIES


def frames_of_method(conv: Any, name: str, frames: Sequence[FrameType]) -> list[FrameType]:
    """The calls of a layer's method."""
    method = getattr(type(conv), name, None) if isinstance(conv, MessagePassing) else None
    code = getattr(inspect.unwrap(method), '__code__', None) if callable(method) else None
    return [] if code is None else [frame for frame in frames if frame.f_code is code]


def read_by(conv: Any, name: str = 'message') -> set[str]:
    """The arguments of a layer's method."""
    method = getattr(type(conv), name, None)
    return set() if method is None else set(inspect.signature(method).parameters)


def as_parts(value: object) -> Sequence[Any]:
    """The parts of a pair, or a value alone."""
    return value if isinstance(value, (tuple, list)) else (value,)


def of_propagate(frames: Sequence[FrameType], name: str) -> object:
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


def features_of_nodes(conv: Any, frames: Sequence[FrameType]) -> list[tuple[str, Tensor]]:
    """The features that `propagate` got of nodes, by name, those of a pair one by one."""
    read = read_by(conv)
    return [
        (name, part) for name, value in propagated(frames).items()
        if not read.isdisjoint((f'{name}_i', f'{name}_j'))
        for part in as_parts(value) if isinstance(part, Tensor)
    ]  # fmt: skip


def passed_to_message(frames: Sequence[FrameType]) -> dict[str, object]:
    """What PyG's `propagate`, or what runs in its place, has passed to `message`."""
    for frame in frames:
        if frame.f_code.co_name != 'propagate':
            continue
        is_direct = _is_direct(frame)
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


def messages_of(frames: Sequence[FrameType]) -> Iterator[object]:
    """What PyG's `aggregate`, or what runs in its place, has got as messages."""
    for frame in frames:
        is_direct = _is_direct(frame)
        name = 'out' if is_direct else 'inputs'
        is_pygs = frame.f_code is MessagePassing.aggregate.__code__
        if name in frame.f_locals and (is_direct or is_pygs):
            yield frame.f_locals[name]


def _is_direct(frame: FrameType) -> bool:
    """Whether a call is of what runs in the place of PyG's `propagate`."""
    return frame.f_globals.get('__name__') == f'{__package__}._direct'


def argument_that_is(
    value: Tensor, given: Mapping[str, object], frames: Sequence[FrameType]
) -> tuple[str, Tensor] | None:
    """The argument of a call, and its part of a pair, that a value is as it is, or rows of it that
    PyG has gathered."""
    arguments = [
        (name, part) for name, several in given.items()
        for part in as_parts(several) if isinstance(part, Tensor)
    ]  # fmt: skip
    for each in arguments:
        if _is_same(value, each[1]):
            return each
    passed = propagated(frames)
    for name, rows in passed_to_message(frames).items():
        if name[-2:] not in ('_i', '_j') or not _is_same(value, rows):
            continue
        parts = as_parts(passed.get(name[:-2]))
        for each in arguments:
            if any(_is_same(each[1], part) for part in parts):
                return each
    return None


def _is_same(value: Tensor, other: object) -> bool:
    """Whether two tensors are the same numbers in memory."""
    if not isinstance(other, Tensor) or value.shape != other.shape:
        return False
    return value.data_ptr() == other.data_ptr() != 0


def of_columns(conv: Any, tensors: Mapping[str, Tensor], columns: int) -> list[str]:
    """The arguments of so many columns; those that the message reads, if there are some."""
    names = [name for name, value in tensors.items() if value.size(-1) == columns]
    read_names = {name.removesuffix('_i').removesuffix('_j') for name in read_by(conv)}
    return [name for name in names if name in read_names] or names


def quoted(values: Mapping[str, object]) -> str:
    """The names of arguments for the text of an error."""
    return ', '.join(f"'{name}'" for name in values) or 'none'
