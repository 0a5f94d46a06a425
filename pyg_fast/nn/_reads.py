"""What a layer's own `forward` may do with its edges."""

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Literal, get_args

from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

# What tells an EdgeIndex from its list.
_OF_EDGE_INDEX = {*dir(EdgeIndex)} - {*dir(Tensor)} | {
    'EdgeIndex', 'isinstance', 'type', 'hasattr', 'getattr', 'matmul', 'spmm', '__class__',
}  # fmt: skip
_OF_LAYERS = {*dir(MessagePassing), 'collect', 'edge_collect'}
_LIBRARIES = ('torch', 'torch_geometric', 'math', 'typing', 'builtins')


# Whether the list in place of a sorted EdgeIndex gives the same: never, where the list's last node
# is that of the graph, always.
Reads = Literal['no', 'with the last node', 'yes']


def reads_a_list(conv: MessagePassing) -> Reads:
    """Whether the list in place of a sorted EdgeIndex gives the same in a layer's `forward`, for as
    many nodes as that has: nothing there can tell them apart."""
    inner = [each for each in conv.modules() if each is not conv and not _is_librarys(type(each))]
    if any(isinstance(each, MessagePassing) for each in conv.modules() if each is not conv):
        return 'no'  # It may get the edges.
    functions = [
        each for module in (conv, *inner) for each in vars(module).values()
        if isinstance(each, FunctionType) and not _is_librarys(each)
    ]  # fmt: skip
    for module in (conv, *inner):
        cls = getattr(type(module), '_base', type(module))
        for name in ('forward', '__call__', '__getattr__'):
            functions += _methods(cls, name)
    seen: set[FunctionType] = set()
    found = [_reads_a_list(each, seen) for each in functions]
    return min(found, key=get_args(Reads).index, default='yes')


def _methods(cls: type, name: str, seen: set[str] | None = None) -> Iterator[FunctionType]:
    """A function of a class, and the class's own that it may call."""
    seen = set() if seen is None else seen
    function = getattr(cls, name, None)
    if name in seen or not isinstance(function, FunctionType) or _is_librarys(function):
        return
    seen.add(name)
    yield function
    for each in _names(function.__code__) - _OF_LAYERS:
        yield from _methods(cls, each, seen)


def _reads_a_list(function: FunctionType, seen: set[FunctionType]) -> Reads:
    """The same for a function, and the user's own that it may call."""
    if function in seen:
        return 'yes'
    seen.add(function)
    names = _names(function.__code__)
    if not names.isdisjoint(_OF_EDGE_INDEX) or function.__closure__:
        return 'no'
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    found: list[Reads] = ['yes']
    for value in values:
        if isinstance(value, ModuleType):  # What the code may take of it; the list grows.
            taken = (getattr(value, name, None) for name in names)
            values += [each for each in taken if not any(each is other for other in values)]
            continue
        if isinstance(value, FunctionType) and not _is_librarys(value):
            found.append(_reads_a_list(value, seen))
            continue
        if not callable(value):
            continue
        if not _is_librarys(value):
            return 'no'  # It may get the edges.
        asks = not isinstance(value, type) and {'edge_index', 'num_nodes'} <= _parameters(value)
        if asks and not _gives(function.__code__, 'num_nodes'):
            # An EdgeIndex knows how many nodes there are, a list its last one.
            found.append('with the last node')
    return min(found, key=get_args(Reads).index)


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function and those inside of it."""
    names = set(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            names |= _names(each)
    return names


def _gives(code: CodeType, name: str) -> bool:
    """Whether a function gives an argument by its name."""
    return any(isinstance(each, tuple) and name in each for each in code.co_consts)


def _parameters(function: object) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # Of C.
        return set()


def _is_librarys(value: object) -> bool:
    """Whether a function, a class or a module is not the user's."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, '__module__', None)
    return (name or 'builtins').partition('.')[0] in _LIBRARIES
