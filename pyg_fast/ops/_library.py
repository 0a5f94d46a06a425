"""Loads the compiled extension, converts its errors to Python types, and registers the fake kernels
and references in the files of the ops."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch

_PATH = Path(__file__).parent.parent / '_C.abi3.so'
if not _PATH.exists():
    raise ImportError(
        f"pyg_fast's compiled extension is missing ({_PATH}): build it with 'pip install .', and "
        f"do not import pyg_fast from the root of its source tree without 'pip install -e .'"
    )
try:
    torch.ops.load_library(_PATH)
except OSError as error:
    raise ImportError(
        f"pyg_fast's compiled extension ({_PATH}) does not load into torch {torch.__version__}: "
        f"build it again in this environment with 'pip install .' "
        f'({error.__cause__ or error})'
    ) from error


P = ParamSpec('P')
T = TypeVar('T')

_is_tracing = torch.compiler.is_dynamo_compiling

# Same text as in csrc/stable.h.
_OUT_OF_MEMORY = re.compile(r'out of memory: (\d+) bytes on (cuda:\d+)')


def _typed(error: RuntimeError, name: str) -> RuntimeError:
    """The error to raise for the user: torch.OutOfMemoryError if GPU memory ran out."""
    found = _OUT_OF_MEMORY.search(str(error))
    if found is None:
        return error
    size, device = int(found[1]), found[2]
    text = (
        f'CUDA out of memory: pyg_fast.{name} tried to allocate {size} bytes '
        f'({size / 2**30:.2f} GiB) on {device}.'
    )
    if torch.cuda.is_available():
        allocated = torch.cuda.memory_allocated(device) / 2**30
        reserved = torch.cuda.memory_reserved(device) / 2**30
        text += f' PyTorch has {allocated:.2f} GiB allocated and {reserved:.2f} GiB reserved there.'
        if (reserved - allocated) * 2**30 >= size:
            text += (
                ' What is reserved and free lies in several pieces: set PYTORCH_CUDA_ALLOC_CONF='
                'expandable_segments:True before CUDA is first used to join them.'
            )
    return torch.OutOfMemoryError(text)


def _guarded(name: str, raw: Callable[P, T]) -> Callable[P, T]:
    """`raw` with converted errors. Compiled code calls `raw` directly."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _is_tracing():
            return raw(*args, **kwargs)
        try:
            return raw(*args, **kwargs)
        except RuntimeError as error:
            typed = _typed(error, name)
            if typed is error:
                raise
            memory = typed
        # Outside of the handler: without the C++ error as context.
        raise memory

    return call


class _Op:
    """A raw op: `op(...)`, or faster `op.default(...)`."""

    def __init__(self, name: str) -> None:
        packet = getattr(torch.ops.pyg_fast, name)
        self.default = _guarded(name, packet.default)
        self.packet = _guarded(name, packet)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.packet(*args, **kwargs)


class _Ops:
    """The raw ops by name. `torch.ops.pyg_fast` has them without converted errors."""

    def __init__(self) -> None:
        for name in torch._C._dispatch_get_all_op_names():
            library, _, op = name.partition('::')
            if library == 'pyg_fast':
                setattr(self, op, _Op(op))

    def __getattr__(self, name: str) -> _Op:
        raise AttributeError(f'pyg_fast has no op {name!r}')


ops = _Ops()


def with_cuda() -> bool:
    """Whether the CUDA kernels were compiled in."""
    return ops.with_cuda()


Function = TypeVar('Function', bound=Callable[..., object])

# `Library.impl`, because the first `torch.library.register_fake` of a process costs 50 ms.
_meta = torch.library.Library('pyg_fast', 'IMPL')
fakes: dict[str, Callable[..., object]] = {}  # by op


def fake(op: str) -> Callable[[Function], Function]:
    """Registers a fake kernel, which gives :func:`torch.compile` the shapes and dtypes that a raw
    op returns. It names only those arguments of the op that it reads, in any order."""
    arguments = getattr(torch.ops.pyg_fast, op).default._schema.arguments
    names = [argument.name for argument in arguments]

    def register(function: Function) -> Function:
        code = function.__code__
        places = [names.index(name) for name in code.co_varnames[: code.co_argcount]]

        def kernel(*args: object) -> object:
            # Torch omits trailing arguments that equal their defaults.
            args += tuple(argument.default_value for argument in arguments[len(args) :])
            return function(*(args[place] for place in places))

        _meta.impl(op, kernel, 'Meta')
        fakes[op] = function
        return function

    return register


class _References(SimpleNamespace):
    """Ops in plain torch and float64, differentiable where the op is. Tests compare with them, and
    public ops run them under :mod:`torch.func` and forward-mode AD.

    :obj:`@reference('spmm')` adds one, :obj:`reference.spmm(...)` calls it.
    """

    def __call__(self, op: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            setattr(self, op, function)
            return function

        return register


reference = _References()
