"""Messages that users write in PyTorch, as one kernel."""

from typing import Any


class Fallback(Exception):
    """PyG's code must run; the text says why."""


def entry(function: Any) -> Any:
    """The guarded call of a message, an :class:`~pyg_fast.message._entry.Entry`. What traces
    messages is imported when the first one runs."""
    from ._entry import Entry

    return Entry(function)


__all__ = ['Fallback', 'entry']
