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
import torch_geometric.utils
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ._ir import Refused
from ._operators import DECOMPOSED, aten
from ._quiet import quiet

# Sentinel sizes for E and N: tracing twice reveals constants derived from them.
EDGES = (1_000_003, 3_000_017)
NODES = (999_983, 99_991)

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
        raise Refused(_with_type(error)) from error


_OF_TORCH = str(Path(torch.__file__).parent)

_OF_PYTHON = str(Path(inspect.__file__).parent)

UTILS_OF_PYG = str(Path(torch_geometric.utils.__file__).parent)

OWN = str(Path(__file__).parent)
_MAX_LENGTH = 200  # of a text that is not ours in a reason

NO_ROW_FOR_DROPOUT = 'dropout of what has no row for each edge'
READS_VALUE = 'message reads a value of a tensor, as by if, item(), tolist(), repr() or a mask'
_NO_OPERATION = r'message calls \1, which is no operation on tensors'
_NO_COLUMN = (
    r'message combines a number for each edge, of shape [num_edges], with a value of shape \1'
)
# Errors of Dynamo in the user's terms.
_TERMS = (
    (r'Failed to trace builtin operator.*?builtin operator `(\w+)`', _NO_OPERATION),
    (r'marked as skipped.*?(?:function|builtin) `(?:<unknown module>\.)?([\w.]+?)\.?`',
     _NO_OPERATION),
    (r'Attempted to wrap RNN, GRU, or LSTM', 'an LSTM, GRU or RNN in message'),
    (r'using `(torch\.autograd\.\w+)`', _NO_OPERATION),
    (r'isinstance\(\) cannot determine type',
     'message cannot be traced: it reads what has no known type'),
    (r'same reduction dim, but got \[[^],]+, (\d+)\] X \[(\d+), \d+\]',
     r'message raises RuntimeError: a linear map takes \2 columns, got \1'),
    (r"module '__main__' has no attribute '(\w+)'",
     r'message reads \1, which the module __main__ lacks, as under python -m cProfile'),
    (r'(message|aggregate) returns no tensor', r'\1 returns no tensor'),
    (r'^Missing attribute when running call_method', 'message raises AttributeError'),
    # Its arguments: a text, of which the first line counts, or Dynamo's variable that holds one.
    (r"""Observed exception.*?raised exception (\w+)\((?:\[ConstantVariable\(\w+: )?["']?(.*?)"""
     r"""(?:\\n[^\n]*?)?["']?(?:\)\])?\)\s*\n""", r'message raises \1: \2'),
    (r'Failed to find name `(\w+)`', r"message raises NameError: name '\1' is not defined"),
    (r'pyg_fast_message::dropout', NO_ROW_FOR_DROPOUT),
    (r"Could not run 'pyg_fast_message",
     'an operation that torch computes by writes has no kernel'),
    (r"DefaultCPUAllocator|can't allocate memory",
     'an operation across the edges has no kernel'),
    (r'LoggingLogger', 'message calls a logger, which is no operation on tensors'),
    (r'aten\.bincount', 'message counts edges by bincount'),
    (r'broadcast a dimension of length .*?Size\(\[num_edges\]\).*?to (\[num_edges, [^]]+\])',
     _NO_COLUMN),
    (r'broadcast a dimension of length .*?Size\((\[num_edges, [^]]+\])\).*?to \[[1, ]+num_edges\]',
     _NO_COLUMN),
    (r'Attempting to broadcast a dimension of length the number',
     'message combines values whose shapes do not fit'),
    (r'Attempting to broadcast a dimension of length (\d+)',
     r'message reads a tensor of \1 rows that propagate did not get, or that does not fit'),
    (r'^aten\.(nonzero|masked_select|_unique)|[Dd]ynamic (output )?shape operator',
     'the shape of a value depends on values of a tensor, as by a mask, nonzero() or unique()'),
    # The unbacked sizes of edges and nodes are the first symbols.
    (r'dependent expression (?:(?!u[2-9]|u\d\d|\(unhinted)[^\n])*\(unhinted[^\n]*'
     r'Size-like symbols: u[01]\b',
     'message asks for the number of edges or nodes, by if or in an operation'),
    (r'Could not guard on|Could not extract|[Dd]ata.dependent|_local_scalar_dense|'
     r'\b(tolist|item|repr)\(\)', READS_VALUE),
    (r"""when making fake tensor call.*?(?:got (\w+)\(["']|context: (\w+) <[^\n]*?>: )"""
     r"""([^\n]*?)(?:\)?['"]\))?\s*\n""", r'message cannot be traced: \1\2: \3'),
)  # fmt: skip


def _in_terms(error: Exception) -> str | None:
    """What is wrong with a message, in the user's terms, if the error is known."""
    message = _in_words(str(error))
    for pattern, terms in _TERMS:
        if found := re.search(pattern, message, re.DOTALL):
            # The class that `accelerate` makes of the user's has another name.
            text = re.sub(r"'Fused(\w+)' object", r"'\1' object", found.expand(terms))
            return _shorten(_without_symbols(text.rstrip(': ')))
    return None


def _in_words(text: str) -> str:
    """A text of torch in which words replace sentinel sizes."""

    def word(found: re.Match[str], shape: bool = False) -> str:
        size = int(found[0])
        for sizes, name in ((EDGES, 'edges'), (NODES, 'nodes')):
            for each in sizes:
                if size > 0 and size % each == 0:
                    times = size // each
                    if shape:
                        return f'num_{name}' if times == 1 else f'{times} * num_{name}'
                    of = '' if times == 1 else f'{times} times '
                    return f'{of}the number of {name}'
        return found[0]

    text = re.sub(
        r'\[[\d, -]+\]', lambda found: re.sub(r'\d+', lambda n: word(n, True), found[0]), text
    )
    return re.sub(r'\b\d{5,}\b', word, text)


def _without_symbols(text: str) -> str:
    """A text of Dynamo in which words replace symbols of sizes."""
    text = re.sub(r'(?<=\[)u\d+(?=[],])', 'num_edges or num_nodes', text)
    return re.sub(r'\bu\d+\b', 'the number of edges or nodes', text)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_LENGTH else f'{text[: _MAX_LENGTH - 1].rstrip()}…'


def one_line(error: Exception) -> str:
    """The first line of an error, and the last place in the user's code that it names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    # A refusal has the place in it.
    own = isinstance(error, Refused)
    text = _in_terms(error) or (first if own else _shorten(_without_symbols(_in_words(first))))
    return text if 'File "' in text else text + last_place(str(error))


def last_place(trace: str) -> str:
    """The last place in the user's code of a stack trace, such as ' (File "a.py", line 3, in f:
    x)'; '' if it has none."""
    lines = [line.strip() for line in trace.splitlines()]
    places = [line for line in lines if line.startswith('File "') and not _is_library(line)]
    if not places:
        return ''
    place = re.match(r'(File "(.+)", line (\d+), in [\w<>]+)', places[-1])
    if place is None:
        return f' ({places[-1]})'
    code = _shorten(linecache.getline(place[2], int(place[3])).strip())
    return f' ({place[1]}: {code})' if code else f' ({place[1]})'


def _is_library(place: str) -> bool:
    """Whether a place is in torch, in functions of PyG, in Python's own modules, or where messages
    are captured."""
    return (
        _OF_TORCH in place
        or UTILS_OF_PYG in place
        or OWN in place
        or (_OF_PYTHON in place and 'site-packages' not in place)
    )


def describe_error(error: Exception) -> str:
    """An error of Dynamo in one line."""
    return one_line(error) if isinstance(error, TorchDynamoException) else _with_type(error)


def _with_type(error: Exception) -> str:
    name = f'{type(error).__name__}: ' if _in_terms(error) is None else ''
    return name + one_line(error)


def line_of(function: Callable[..., object], name: str) -> str:
    """The first line of a function that has a name, or a method such as '.item', such as
    ' (File "a.py", line 3, in f: x)'; '' if there is none."""
    before = '' if name.startswith('.') else r'(?<![\w.])'
    try:
        lines, first = inspect.getsourcelines(function)
        path = inspect.getsourcefile(function)
    except (OSError, TypeError):
        return ''
    for number, line in enumerate(lines, first):
        if re.search(rf'{before}{re.escape(name)}\b', line):
            title = getattr(function, '__name__', type(function).__name__)
            return f' (File "{path}", line {number}, in {title}: {line.strip()})'
    return ''
