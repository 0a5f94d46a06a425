"""Silences what PyTorch logs and warns of what it cannot trace: PyG's code runs such messages, and
raises the user's own error, as eager mode does for compiled models."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

OF_FAKE_TENSORS = ('torch._subclasses.fake_tensor',)
_LOGGERS = (
    *OF_FAKE_TENSORS, 'torch.fx.experimental.symbolic_shapes',
    'torch._dynamo.convert_frame', 'torch._dynamo.guards', 'torch._dynamo.symbolic_convert',
    'torch._dynamo.output_graph', 'torch._dynamo.utils', 'torch._dynamo.variables.builder',
    'torch._guards',
)  # fmt: skip


class _Silent(threading.local):
    """The loggers that are silent in a thread, of those that :func:`may_silence` was called for."""

    loggers: tuple[str, ...] = ()


silent = _Silent()


class _Filter(logging.Filter):
    """Drops warnings and errors of a thread that traces, unless a lower level of the log is on."""

    def filter(self, record: logging.LogRecord) -> bool:
        asked = logging.getLogger(record.name).getEffectiveLevel() < logging.WARNING
        return asked or record.name not in silent.loggers or record.levelno < logging.WARNING


_filter = _Filter()


def may_silence(loggers: tuple[str, ...]) -> None:
    """Makes loggers look at :data:`silent`."""
    for name in loggers:
        logging.getLogger(name).addFilter(_filter)  # Once: it is the same.


def ignore_own_caches() -> None:
    """Drops what Dynamo warns of caches in this package, where it traces the frames of a call that
    fails: nobody else can change them."""
    warnings.filterwarnings(
        'ignore', r'Dynamo detected a call to a `functools\.lru_cache`[\s\S]*pyg_fast'
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the log of this thread while it traces a message."""
    may_silence(_LOGGERS)
    before, silent.loggers = silent.loggers, _LOGGERS
    try:
        yield
    finally:
        silent.loggers = before


@contextmanager
def without_warnings() -> Iterator[None]:
    """Drops what Dynamo warns of while it captures a message: the report tells it. Filters of
    warnings hold for all threads: the caller holds the lock of all captures."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', module=r'torch\._dynamo\.')
        yield
