"""Says what does not fit a linear map of a layer."""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch_geometric.nn import Linear as LinearOfPyG

from ..errors import DtypeError, OptionError, ShapeError
from ..ops._edges import is_list
from ._explain_call import argument_that_is, frames_of_method, is_own, of_columns, of_propagate
from ._explain_code import frames_of, operands

# By the code of linear maps: the name of what they get, and the option that says its columns.
_LINEAR = {
    Linear.forward.__code__: ('input', 'in_features'),
    LinearOfPyG.forward.__code__: ('x', 'in_channels'),
}


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
        which, shape = argument_that_is(value, given, frames) if own else None, list(value.shape)
        if which is not None and any(each is None for each in given.values()):
            return  # Perhaps that which is None is to blame.
        if which is not None:
            _raise_columns_error(which[0], which[1].shape, columns)
        raise ShapeError(
            f"'{name}' must get {columns} columns, as its {option} is {columns}, got shape {shape}"
        )


def _raise_columns_error(name: str, shape: Sequence[int], columns: int) -> NoReturn:
    """Raises for an argument that has not the columns that a linear map takes."""
    if len(shape) == columns == 1:
        raise ShapeError(
            f"'{name}' must have shape {[*shape, 1]}, as a linear map of the layer takes, got "
            f'{[*shape]}: {name}.view(-1, 1)'
        )
    raise ShapeError(
        f"'{name}' must have {columns} columns, as a linear map of the layer takes, got shape "
        f'{[*shape]}'
    )


def check_joined(conv: Any, error: Exception) -> None:
    """Raises for a message that joins rows in place of channels, before a linear map."""
    text, frames = str(error), frames_of(error)
    found = re.search(r'mat1 and mat2 shapes .* \((\d+)x(\d+) and (\d+)x\d+\)', text)
    edges = of_propagate(frames, 'edge_index')
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


def check_linear_by_text(
    conv: Any, given: Mapping[str, object], tensors: Mapping[str, Tensor], error: Exception
) -> None:
    """Raises for the argument that has the columns, or that is missing, of which torch says that a
    linear map does not take them."""
    found = re.search(r'mat1 and mat2 shapes .* \(\d+x(\d+) and (\d+)x\d+\)', str(error))
    if found is None:
        return
    columns, wanted = int(found[1]), int(found[2])
    if all(wanted not in weight.shape for weight in conv.parameters()):
        return  # It is no parameter that does not fit.
    of_width = of_columns(conv, tensors, columns)
    if is_own(conv):
        as_they_are = _arguments_of_operator(given, error)
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
    if of_width:
        _raise_columns_error(of_width[0], tensors[of_width[0]].shape, wanted)
    widths = {name: value.size(-1) for name, value in tensors.items()}
    if columns - sum(widths.values()) not in (0, widths.get('x')):  # Of both ends of an edge.
        return
    names = ' and '.join(f"'{name}'" for name in tensors)
    both = ", 'x' for both ends of an edge" * (columns != sum(widths.values()))
    raise ShapeError(
        f'{names} must fit a linear map of the layer, which takes {wanted} columns and gets '
        f'{columns}: {widths} joined{both}'
    )


def _arguments_of_operator(given: Mapping[str, object], error: Exception) -> set[str]:
    """The arguments of a call that an operator in the user's code has got as they are."""
    frames = frames_of(error)
    found = (argument_that_is(each.value, given, frames) for each in operands(error))
    return {each[0] for each in found if each is not None}
