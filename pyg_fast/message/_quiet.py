"""Silences what PyTorch logs and warns of messages that it cannot trace: PyG's code runs these, and
raises the user's own error."""

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


class _State(threading.local):
    loggers: tuple[str, ...] = ()  # that are silent


_state = _State()


class _Filter(logging.Filter):
    """Drops warnings and errors of a thread that traces, unless a lower level of the log is on."""

    def filter(self, record: logging.LogRecord) -> bool:
        asked = logging.getLogger(record.name).getEffectiveLevel() < logging.WARNING
        return asked or record.name not in _state.loggers or record.levelno < logging.WARNING


_filter = _Filter()


@contextmanager
def quiet(loggers: tuple[str, ...] = _LOGGERS) -> Iterator[None]:
    """Silences loggers in this thread, while it traces a message or what else may fail."""
    for name in loggers:
        logging.getLogger(name).addFilter(_filter)  # Once: it is the same.
    before, _state.loggers = _state.loggers, (*_state.loggers, *loggers)
    try:
        yield
    finally:
        _state.loggers = before


@contextmanager
def without_warnings() -> Iterator[None]:
    """Drops what Dynamo warns of while it captures a message: the report tells it. Filters of
    warnings hold for all threads: the caller holds the lock of all captures."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', module=r'torch\._dynamo\.')
        yield
