"""What a layer needs before its first message is traced."""

import logging
from typing import Any

# What layers remember of their calls: `_call` are the arguments of the present one, in which they
# may propagate several times, `_graphs` the graphs of that, `_watched` its inputs with their
# versions, and `_writes` whether the first call wrote into them. `_in_memory` is a number of edges,
# and why PyG's code runs for no more.
OWN = (
    '_fused_entry', '_fused_arguments', '_call', '_graphs', '_watched', '_writes', '_last_run',
    '_one_sum', '_maps_reason', '_width', '_in_memory', '_marks', '_direct',
)  # fmt: skip


class Fallback(Exception):
    """PyG's code must run; the text says why."""


class BySize(Fallback):
    """PyG's code must run on a graph of this size, and perhaps not on another."""


class InMemory(BySize):
    """PyG's code is faster for so many edges and for fewer: their tensors fit into memory."""


def tell(layer: Any, reason: Fallback) -> None:
    """Logs why PyG's code runs, once for each class; a size that may change is no warning."""
    level = logging.INFO if isinstance(reason, BySize) else logging.WARNING
    if not _log.isEnabledFor(level):
        return
    cls = getattr(type(layer), '_base', type(layer)).__name__
    if (cls, str(reason)) not in _told and len(_told) < _MOST_TOLD:
        _told.add((cls, str(reason)))
        _log.log(level, "%s runs PyG's code: %s", cls, reason)


_log = logging.getLogger('pyg_fast')
_told: set[tuple[str, str]] = set()
_MOST_TOLD = 1000


def make_entry(num_writes: int = 0) -> Any:
    """The guarded call of messages, an :class:`~pyg_fast.message._entry.Entry`. What traces
    messages is imported when the first one runs.

    Args:
        num_writes: How many attributes they set that no caller reads: these become None.
    """
    from ._entry import Entry

    return Entry(num_writes)
