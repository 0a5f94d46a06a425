"""Traces functions into graphs of torch's operators."""

import inspect
import linecache
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ._ir import Refused
from ._operators import DECOMPOSED, aten
from ._quiet import quiet

# Held while this package traces: torch's flag that a thread traces is global.
tracing = threading.RLock()


class Like(NamedTuple):
    """A description of a tensor. It has a device as autocast depends on it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device = torch.device('cpu')


def trace(
    fn: Callable[..., object], inputs: Sequence[Like | float], derives: bool = False
) -> GraphModule:
    """The graph of torch's operators that a function calls, for inputs that are :class:`Like` or
    Python numbers. A function that `derives`, or writes into its own values, is traced twice: its
    first graph is functionalized. Writes into inputs stay."""
    with _on_fakes(inputs) as fakes:

        def traced(fn: Callable[..., object]) -> GraphModule:
            return make_fx(fn, decomposition_table=DECOMPOSED, tracing_mode='real')(*fakes)

        graph = None if derives else traced(fn)
        if graph is None or any(n.target is aten.copy_.default for n in graph.graph.nodes):
            graph = traced(torch.func.functionalize(make_fx(fn, tracing_mode='real')(*fakes)))
        return graph


def run_on_fakes(fn: Callable[..., object], inputs: Sequence[Like | float]) -> None:
    """Calls a function without computing anything, also where it makes tensors itself."""
    with _on_fakes(inputs) as fakes:
        mode = next((x.fake_mode for x in fakes if isinstance(x, FakeTensor)), nullcontext())
        with mode:
            fn(*fakes)


def _same(x: Tensor) -> Tensor:
    return x


@contextmanager
def _on_fakes(inputs: Sequence[Like | float]) -> Iterator[list[Tensor | float]]:
    """Yields fake tensors for the inputs; every error inside becomes a refusal."""
    try:
        # Not in the context of the capture, whose shapes are symbolic. The hooks of a checkpoint do
        # not see what the trace saves.
        with tracing, quiet(), torch._guards.tracing(None), saved_tensors_hooks(_same, _same):
            with FakeTensorMode(allow_non_fake_inputs=True):
                fakes = [
                    torch.empty(each.shape, dtype=each.dtype, device=each.device)
                    if isinstance(each, Like)
                    else each
                    for each in inputs
                ]
            yield fakes
    except Refused as error:
        raise Refused(one_line(error)) from None
    except Exception as error:
        raise Refused(f'{type(error).__name__}: {one_line(error)}') from error


_OF_TORCH = str(Path(torch.__file__).parent)

# Errors of Dynamo in the user's terms.
_TERMS = (
    (r'Failed to trace builtin operator.*?builtin operator `(\w+)`',
     r'message calls \1, which is no operation on tensors'),
    (r'(Could not guard on|Could not extract|Data-dependent|data-dependent).*',
     'message reads a value of a tensor, as by if, item() or a mask'),
)  # fmt: skip


def one_line(error: Exception) -> str:
    """The first line of an error, and the last place in the user's code that it names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    for pattern, terms in _TERMS:
        if found := re.search(pattern, str(error), re.DOTALL):
            text = found.expand(terms)
            break
    return text if 'File "' in text else text + last_place(str(error))


def last_place(trace: str) -> str:
    """The last place in the user's code of a stack trace, such as ' (File "a.py", line 3, in f:
    x)'; '' if it has none."""
    lines = [line.strip() for line in trace.splitlines()]
    places = [line for line in lines if line.startswith('File "') and _OF_TORCH not in line]
    if not places:
        return ''
    place = re.match(r'(File "(.+)", line (\d+), in \w+)', places[-1])
    if place is None:
        return f' ({places[-1]})'
    code = linecache.getline(place[2], int(place[3])).strip()
    return f' ({place[1]}: {code})' if code else f' ({place[1]})'


def describe_error(error: Exception) -> str:
    """An error of Dynamo in one line."""
    text = one_line(error)
    return text if isinstance(error, TorchDynamoException) else f'{type(error).__name__}: {text}'


def line_of(function: Callable[..., object], name: str) -> str:
    """The first line of a function that has a name, such as ' (File "a.py", line 3, in f: x)';
    '' if there is none."""
    try:
        lines, first = inspect.getsourcelines(function)
        path = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return ''
    for number, line in enumerate(lines, first):
        if re.search(rf'(?<![\w.]){re.escape(name)}\b', line):
            title = getattr(function, '__name__', type(function).__name__)
            return f' (File "{path}", line {number}, in {title}: {line.strip()})'
    return ''
