"""Says which values do not fit that a layer's methods combine or return."""

import dis
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from torch import Tensor
from torch_geometric.nn import MessagePassing

from ..errors import OptionError, ShapeError
from ._explain_call import (
    frames_of_method,
    is_own,
    messages_of,
    of_columns,
    of_propagate,
    passed_to_message,
    propagated,
    quoted,
    read_by,
)
from ._explain_code import TWO_TENSORS, Operand, frames_of, line_of, operands, reads, users_frame

# What helps where a message returns what is no tensor.
_JOINED = ": torch.cat([a, b], -1) joins channels, and an 'aggregate' of the layer takes several"
_CURES_OF_RESULTS = {
    'tuple': _JOINED, 'list': _JOINED, 'dict': ": an 'aggregate' of the layer takes several values",
    'ndarray': ": NumPy's functions have no gradient, use torch's of the same name",
}  # fmt: skip


def check_returns(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for a method without a result, or that takes no layer."""
    for value in messages_of(frames):
        if value is conv:
            raise TypeError(
                "'message' returns the layer: its first parameter is 'self', as in message(self, "
                'x_j)'
            )
    inside = frames_of_method(conv, 'forward', frames)
    if 'NoneType' not in text or not inside or of_propagate(frames, 'self') is not None:
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


def _check_result(conv: Any, frames: Sequence[FrameType], text: str) -> None:
    """Raises for what a message returns."""
    edges = of_propagate(frames, 'edge_index')
    for value in messages_of(frames):
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
                    f'{quoted(given)}'
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
    edges = of_propagate(frames, 'edge_index')
    if found is None or not isinstance(edges, Tensor) or edges.dim() != 2:
        return
    one, two, dim = map(int, found.groups())
    count, sizes = edges.size(1), {one, two}
    if inside:
        _check_operands(operands(error), passed_to_message(frames), count)
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
        _raise_widths_error(names[0][0], names[1][0], sizes)


def check_widths_by_text(conv: Any, tensors: Mapping[str, Tensor], error: Exception) -> None:
    """Raises if one argument alone has each of the two widths that do not fit; in a user's layer if
    the line at which it failed reads both."""
    found = re.search(rf'{TWO_TENSORS} at non-singleton dimension (\d+)', str(error))
    if found is None:
        return
    one, other, dim = map(int, found.groups())
    wide = {name: value for name, value in tensors.items() if value.dim() == dim + 1 > 1}
    names = [of_columns(conv, wide, columns) for columns in (one, other)]
    frame = users_frame(frames_of(error)) if is_own(conv) else None
    if list(map(len, names)) == [1, 1] and (frame is None or reads(frame, *names[0], *names[1])):
        _raise_widths_error(names[0][0], names[1][0], (one, other))


def _raise_widths_error(one: str, other: str, widths: tuple[int, int]) -> NoReturn:
    raise ShapeError(
        f"'{one}' and '{other}' must have as many columns, as the layer combines them, got "
        f'{widths[0]} and {widths[1]}'
    )


def check_dimensions(conv: Any, tensors: Mapping[str, Tensor], error: Exception) -> None:
    """Raises for the argument that has fewer dimensions than what it is joined with."""
    found = re.search(r'same number of dimensions: got (\d+) and (\d+)', str(error))
    if found is None:
        return
    fewer, more = sorted(map(int, found.groups()))
    inside = frames_of_method(conv, 'message', frames_of(error))
    read = read_by(conv) if inside else set(tensors)
    for name, value in tensors.items():
        if value.dim() == fewer and not read.isdisjoint((name, f'{name}_i', f'{name}_j')):
            raise ShapeError(
                f"'{name}' must have {more} dimensions, as what it is joined with, got shape "
                f'{list(value.shape)}'
            )
