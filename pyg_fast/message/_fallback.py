"""Fallbacks to PyG's code, and what else layers need before a message is traced."""

import logging
from typing import TYPE_CHECKING

from ._cures import cure_of

if TYPE_CHECKING:
    from ._entry import Entry

# Attributes of layers about their calls, which no message reads: `_call` are the arguments of the
# current one, in which a layer may propagate several times, `_graphs` its graphs, `_watched` its
# inputs with their versions, and `_writes` whether the first call wrote into them. `_in_memory`
# is a number of edges up to which PyG's code runs, whether in training, on a GPU, and why.
# `_columns` is the widest input, `_width` how wide that makes a message for the limits of few
# edges, `_most_width` how wide it may be until its plan is known; `_of_mlp` says whether it is an
# MLP, once `_width` counts what a kernel aggregates; `_work` is how much it computes on a CPU;
# `_few_edges` is a number of edges that are few, and of which kind.
# `_last_compiled` is what runs in compiled code, as `_last_run` in eager calls, of which
# `_last_sorted` tells which edges the last one sorted, `_last_error` what it raised. `_learned` is
# what the next call will take for `_width` and `_work`. Of prepared graphs: `_reads` says whether
# `forward` may get the list of one, `_listed` is that of this call, `_makes_lists` says whether it
# makes others of it, `_tells` whether a method reads what a list lacks.
OWN = (
    '_fused_entry', '_fused_arguments', '_call', '_graphs', '_watched', '_writes', '_last_run',
    '_one_sum', '_maps_reason', '_columns', '_width', '_most_width', '_few_edges', '_of_mlp',
    '_work', '_in_memory', '_marks', '_taken', '_direct', '_last_compiled', '_last_sorted',
    '_last_error', '_reads', '_on_gpu', '_listed', '_makes_lists', '_learned', '_tells',
)  # fmt: skip


class Fallback(Exception):
    """PyG's code must run. The text is the reason."""


class BySize(Fallback):
    """PyG's code must run on a graph of this size, perhaps not of another."""


class InMemory(BySize):
    """PyG's code is faster up to this number of edges: its tensors fit into memory."""


def with_cure(reason: Fallback) -> str:
    """The reason of a fallback, and what helps."""
    return f'{reason}. What helps: {cure_of(str(reason))}'


def users_class(layer: object) -> type:
    """The class of a layer that the user wrote or took from PyG: one that became ours has another.
    A user's class may have an attribute of the same name."""
    base = getattr(type(layer), '_base', None)
    return base if isinstance(base, type) else type(layer)


def tell(layer: object, reason: Fallback) -> None:
    """Logs the reason of a fallback, once for each class; as info where the size decides."""
    level = logging.INFO if isinstance(reason, BySize) else logging.WARNING
    if not _log.isEnabledFor(level):
        return
    cls = users_class(layer).__name__
    if (cls, str(reason)) not in _told and len(_told) < _MAX_TOLD:
        _told.add((cls, str(reason)))
        why = str(reason) if isinstance(reason, BySize) else with_cure(reason)
        _log.log(level, "%s runs PyG's code: %s", cls, why)


_log = logging.getLogger('pyg_fast')
_told: set[tuple[str, str]] = set()
_MAX_TOLD = 1000


def make_entry(num_writes: int = 0) -> 'Entry':
    """Makes the entry of a layer or function. Imports what traces messages only now.

    Args:
        num_writes: How many attributes the messages set that no caller reads: these become None.
    """
    from ._entry import Entry

    return Entry(num_writes)
