"""Finds the code of a user's layer that has failed, and says what it has combined."""

import ast
import inspect
import linecache
import math
import re
import traceback
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from ..errors import DeviceError, DtypeError, ShapeError

# What PyG's code and torch raise for arguments that do not fit.
EXPLAINED = (
    AssertionError, AttributeError, IndexError, KeyError, NameError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
LIBRARIES = ('torch', 'torch_geometric', 'pyg_fast')
_OF_PYTHON = str(Path(inspect.__file__).parent)
# What torch says of two sizes that must be the same.
TWO_TENSORS = r'size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)'
# And of shapes of any kind, and of dtypes.
OF_SHAPES = r'size|shape|dim|match|[Ee]xpect|Encountered|mat1|range|\dD\b'
_OF_DTYPES = r'dtype|scalar type|result type|LongTensor|floating.point|not implemented for'
_OF_DEVICES = r'on device|same device'
_MAX_CODE = 100  # characters of the user's code in an error


def frames_of(error: Exception) -> list[FrameType]:
    """The calls that an error has ended, from the outermost on."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def line_of(frame: FrameType) -> str:
    """The line at which a call ended."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def reads(frame: FrameType, *names: str) -> bool:
    """Whether the line at which a call ended has all of some names, also for an end of edges."""
    return all(re.search(rf'\b{name}(_[ij])?\b', line_of(frame)) for name in names)


def users_frame(frames: Sequence[FrameType]) -> FrameType | None:
    """The last call of the user's code."""
    return next((frame for frame in reversed(frames) if not is_library(frame)), None)


def is_library(frame: FrameType) -> bool:
    """Whether a call is of code that is installed, or made while it runs."""
    path = frame.f_code.co_filename
    name = frame.f_globals.get('__name__', '').partition('.')[0]
    is_template = 'CollectArgs' in frame.f_globals  # of PyG
    is_installed = 'site-packages' in path or path.startswith(_OF_PYTHON)
    return name in LIBRARIES or is_template or is_installed


def is_librarys(value: object) -> bool:
    """Whether a function or a class is not the user's."""
    name = getattr(value, '__module__', None) or 'builtins'
    return name.partition('.')[0] in (*LIBRARIES, 'builtins')


class Operand(NamedTuple):
    """One of the values that an operator of a message combines."""

    name: str  # of the variable that it is, or a view of
    value: Tensor  # of the variable
    shape: list[int]


def operands(error: Exception) -> list[Operand]:
    """The values that the operator or function gets which has failed in the user's code, as far as
    their shapes are sure."""
    found = failed(error)
    if found is None:
        return []
    expression, frame = found
    sides: list[ast.expr] = []
    if isinstance(expression, ast.BinOp):
        sides = [expression.left, expression.right]
    elif isinstance(expression, ast.Call) and not expression.keywords:
        of = expression.func.value if isinstance(expression.func, ast.Attribute) else None
        sides = [*expression.args] if of is None else [of, *expression.args]
    return [each for side in sides if (each := operand(side, frame)) is not None]


def failed(error: Exception) -> tuple[ast.expr, FrameType] | None:
    """The expression that has failed in the user's code itself, and its call."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return None if trace is None or is_library(trace.tb_frame) else _expression_at(trace)


def _statement_at(trace: TracebackType) -> ast.stmt | None:
    """The statement that a call was at, if it is one line."""
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    try:
        (statement,) = ast.parse(line.strip()).body
    except (SyntaxError, ValueError):
        return None
    return statement


def _expression_at(trace: TracebackType) -> tuple[ast.expr, FrameType] | None:
    """The expression that a call was at, and the call."""
    frame, code = trace.tb_frame, trace.tb_frame.f_code
    if not hasattr(code, 'co_positions'):  # Python 3.10
        return None
    first, last, start, end = next(islice(code.co_positions(), trace.tb_lasti // 2, None))
    if first is None or last is None:
        return None
    lines = [linecache.getline(code.co_filename, k).encode() for k in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # Before the start: both may be in one line.
    lines[0] = lines[0][start:]
    try:
        return ast.parse(b'(%b)' % b''.join(lines), mode='eval').body, frame
    except (SyntaxError, ValueError):  # The file has changed.
        return None


def operand(side: ast.expr, frame: FrameType) -> Operand | None:
    """A variable, or a view of one by numbers that are known."""
    sizes: list[int] = []
    if isinstance(side, ast.Call) and isinstance(side.func, ast.Attribute):
        if side.func.attr not in ('view', 'reshape') or side.keywords:
            return None
        values = [value_of(each, frame) for each in side.args]
        sizes = [each for each in values if type(each) is int]
        if not sizes or len(sizes) < len(values):
            return None
        side = side.func.value
    value = frame.f_locals.get(side.id) if isinstance(side, ast.Name) else None
    if not isinstance(side, ast.Name) or not isinstance(value, Tensor):
        return None
    shape = torch.empty(value.shape, device='meta').view(sizes or value.shape).shape
    return Operand(side.id, value, list(shape))


def value_of(of: ast.expr, frame: FrameType) -> object:
    """A number in the code, a variable, or an attribute of one."""
    if isinstance(of, ast.Name):
        return frame.f_locals.get(of.id, frame.f_globals.get(of.id))
    if isinstance(of, ast.Attribute):
        base = value_of(of.value, frame)
        if isinstance(base, Module):
            for space in (base._parameters, base._buffers, base._modules):
                if of.attr in space:
                    return space[of.attr]
        return inspect.getattr_static(base, of.attr, None)
    if isinstance(of, ast.Subscript):  # a part of a pair
        several, key = value_of(of.value, frame), value_of(of.slice, frame)
        if isinstance(several, (tuple, list)) and isinstance(key, int):
            return several[key] if -len(several) <= key < len(several) else None
        return None
    try:
        return ast.literal_eval(of)
    except ValueError:
        return None


def check_expression(error: Exception) -> None:
    """Raises for the tensors that the user's code combines where it has failed, if the error is of
    shapes, dtypes, devices or indices: what torch says does not name them."""
    text = str(error).strip().partition('\n')[0]
    kind = _kind_of(error, text)
    found = None if kind is None else users_expression(error)
    if kind is None or found is None:
        return
    expression, frame = found
    tensors = {
        name: value for name, value in _variables(expression, frame) if isinstance(value, Tensor)
    }  # fmt: skip
    if not tensors:
        return
    code = ast.unparse(expression)
    if len(code) > _MAX_CODE:
        code = f'{code[: _MAX_CODE - 1]}…'
    bounds = 'out of bounds' in text
    values = [f"'{name}' has {_described(value, kind, bounds)}" for name, value in tensors.items()]
    raise kind(
        f"'{frame.f_code.co_name}' cannot compute {code} where {', '.join(values)}: "
        f'{_what_fits(text, list(tensors.values()))}'
    )


def _kind_of(error: Exception, text: str) -> type[Exception] | None:
    """The class of an error about tensors in the user's code; None if it is not about them."""
    if type(error) is IndexError:
        return IndexError
    if type(error) not in (RuntimeError, NotImplementedError, ValueError):
        return None
    if re.search(_OF_DEVICES, text) is not None:
        return DeviceError
    if re.search(_OF_DTYPES, text) is not None:
        return None if type(error) is ValueError else DtypeError
    return ShapeError if re.search(f'{OF_SHAPES}|elements|ambiguous', text) else None


def users_expression(error: Exception) -> tuple[ast.AST, FrameType] | None:
    """The expression at which the user's code has failed, also inside of a library; the statement
    if it writes into a tensor, or where Python tells the line alone."""
    last, trace = None, error.__traceback__
    while trace is not None:
        last = trace if not is_library(trace.tb_frame) else last
        trace = trace.tb_next
    if last is None:
        return None
    found, statement = _expression_at(last), _statement_at(last)
    targets = [ast.unparse(each) for each in getattr(statement, 'targets', [])]
    writes = found is not None and ast.unparse(found[0]) in targets
    if statement is None or (found is not None and not writes):
        return found
    value = getattr(statement, 'value', None)
    if writes or isinstance(statement, ast.AugAssign) or not isinstance(value, ast.expr):
        return statement, last.tb_frame
    return value, last.tb_frame


def _variables(expression: ast.AST, frame: FrameType) -> Iterator[tuple[str, object]]:
    """The variables of an expression with their values, without those that `propagate` gets."""
    if isinstance(expression, (ast.Name, ast.Attribute, ast.Subscript)):
        value = value_of(expression, frame)
        if isinstance(value, Tensor):
            yield ast.unparse(expression), value
            return
    if isinstance(expression, ast.Call) and ast.unparse(expression.func) == 'self.propagate':
        return
    for node in ast.iter_child_nodes(expression):
        yield from _variables(node, frame)


def _described(value: Tensor, kind: type[Exception], has_bounds: bool) -> str:
    """What an error of a class must tell of a tensor; of numbers that have bounds the range."""
    if kind is DtypeError:
        return f'dtype {value.dtype}'
    if kind is DeviceError:
        return f'device {value.device}'
    shape = f'shape {list(value.shape)}'
    if has_bounds and value.dtype in (torch.int64, torch.int32) and value.numel() > 0:
        low, high = map(int, value.aminmax())
        return f'{shape} and values from {low} to {high}'
    return shape


def _what_fits(text: str, tensors: Sequence[Tensor]) -> str:
    """What sizes must be, by what torch says of them; else what it says."""
    found = re.search(TWO_TENSORS, text)
    if found is not None:
        return f'{found[1]} and {found[2]} must be equal, or one of them 1'
    found = re.search(r'mat1 and mat2 shapes .* \(\d+x(\d+) and (\d+)x\d+\)', text)
    if found is not None:
        return f'a matrix of {found[2]} rows multiplies {found[2]} columns, got {found[1]}'
    found = re.search(r"shape '\[(.*)\]' is invalid for input of size (\d+)", text)
    if found is not None:
        sizes, count = [int(size) for size in found[1].split(',')], int(found[2])
        rows = {x.size(0) for x in tensors if x.numel() == count > 0}
        if len(rows) == 1 and sizes[0] in (-1, *rows):
            wanted = count // rows.pop()
            least = math.prod(size for size in sizes[1:] if size > 0)
            what = 'divide' if -1 in sizes[1:] else 'be'
            return f'the sizes of a row, {sizes[1:]}, must {what} {wanted}, got {least}'
    if 'ambiguous' in text:
        return 'if takes a single value: torch.where(condition, a, b) chooses for each of several'
    return text
