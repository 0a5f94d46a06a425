"""What a layer needs before its first message is traced."""

from typing import Any

# What layers remember of their calls.
OWN = ('_fused_entry', '_fused_arguments', '_call', '_last_run', '_one_sum', '_maps_reason')


class Fallback(Exception):
    """PyG's code must run; the text says why."""


def make_entry(num_writes: int = 0) -> Any:
    """The guarded call of messages, an :class:`~pyg_fast.message._entry.Entry`. What traces
    messages is imported when the first one runs.

    Args:
        num_writes: How many attributes they set that no caller reads: these become None.
    """
    from ._entry import Entry

    return Entry(num_writes)
