"""Statistics of a loader."""

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: A time in seconds, or an event on a GPU.
Moment: TypeAlias = Any
#: What was measured, its start and its end.
_Span: TypeAlias = tuple[str, torch.cuda.Event, torch.cuda.Event]


@dataclass(frozen=True, repr=False)
class LoaderStats:
    """Statistics of a loader since it was made or :meth:`reset_stats` was called.

    A batch counts when it has been fetched, even if the loader has not returned it yet. Bytes are
    those of node-level attributes, and 0 if batches are in the memory of the features.
    """

    #: Number of batches.
    num_batches: int = 0
    #: Number of their nodes.
    num_nodes: int = 0
    #: Number of their edges.
    num_edges: int = 0
    #: :math:`\sum |A \cap B| / \sum \min(|A|, |B|)` over all pairs of successive batches;
    #: :obj:`None` if nothing is matched.
    match_degree: float | None = None
    #: Number of nodes whose features came from the cache.
    cache_hits: int = 0
    #: Bytes that crossed the bus, or came from a remote store or another process.
    bytes_moved: int = 0
    #: Bytes not moved because the previous batch had them.
    bytes_saved_by_match: int = 0
    #: Bytes not moved because the cache had them.
    bytes_saved_by_cache: int = 0
    #: Seconds of sampling, matching and ordering; on CUDA those of the loader's own stream.
    sample_seconds: float = 0.0
    #: Seconds of fetching attributes.
    fetch_seconds: float = 0.0
    #: Seconds of waiting for a batch: by the caller, on CUDA by its stream.
    wait_seconds: float = 0.0

    def __repr__(self) -> str:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        texts = (f'{k}={x:.3g}' if isinstance(x, float) else f'{k}={x}' for k, x in values)
        return f'LoaderStats({", ".join(texts)})'


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    """Runs the body on a stream. None: no streams, and CUDA is not initialised, which
    :func:`torch.cuda.stream` would do for it; forked processes cannot."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class Meter:
    """Counts and measures; its lock guards data shared by threads."""

    _PENDING = 512  # pairs of events before finished ones are added up

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._seconds = dict.fromkeys(('sample', 'fetch', 'wait'), 0.0)
            self._events: deque[_Span] = deque()
            self._counts = dict.fromkeys(
                ('batches', 'nodes', 'edges', 'smaller', 'moved', 'saved', 'matched'), 0
            )
            self._matched = False
            self._rows: list[tuple[Tensor, int]] = []

    def add_batch(self, num_nodes: int, num_edges: int) -> None:
        with self._lock:
            self._counts['batches'] += 1
            self._counts['nodes'] += num_nodes
            self._counts['edges'] += num_edges

    def add_pair(self, smaller: int) -> None:
        """Adds two matched batches; the smaller one has this number of nodes."""
        with self._lock:
            self._counts['smaller'] += smaller
            self._matched = True

    def add_moved(self, moved: int, saved: int, num_matched: int) -> None:
        """Adds bytes from other processes, those saved by a match, and matched rows that no
        :meth:`counter` counts."""
        with self._lock:
            self._counts['moved'] += moved
            self._counts['saved'] += saved
            self._counts['matched'] += num_matched

    def counter(self, row_bytes: int) -> Tensor:
        """The counter of :func:`~pyg_fast.ops.gather_rows` for rows of this size."""
        with self._lock:
            for counter, size in self._rows:
                if size == row_bytes:
                    return counter
            counter = torch.zeros(3, dtype=torch.int64, device=self._device)
            self._rows.append((counter, row_bytes))
            return counter

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """This moment; on CUDA in the work of a stream, by default the current one."""
        if self._device.type != 'cuda':
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        return event

    def add_time(self, name: str, start: Moment, end: Moment) -> None:
        """Adds the time between two moments."""
        with self._lock:
            if isinstance(start, float):
                self._seconds[name] += end - start
                return
            self._events.append((name, start, end))
            if len(self._events) > self._PENDING:
                self._add_up()

    def _add_up(self) -> None:
        left: deque[_Span] = deque()
        for name, start, end in self._events:
            if end.query():
                self._seconds[name] += start.elapsed_time(end) / 1000
            else:
                left.append((name, start, end))
        self._events = left

    def read(self, stream: torch.cuda.Stream | None) -> LoaderStats:
        """The statistics so far; waits only for the loader's stream."""
        with self._lock:
            with on_stream(stream):
                rows = [(counter.tolist(), size) for counter, size in self._rows]
            self._add_up()
            moved, matched, cached = (
                sum(counts[k] * size for counts, size in rows) for k in range(3)
            )
            num_matched, num_cached = (sum(counts[k] for counts, _ in rows) for k in (1, 2))
            counts, seconds = self._counts, self._seconds
            num_matched += counts['matched']
            degree = None
            if self._matched:
                degree = num_matched / counts['smaller'] if counts['smaller'] else 0.0
            return LoaderStats(
                num_batches=counts['batches'], num_nodes=counts['nodes'],
                num_edges=counts['edges'], match_degree=degree, cache_hits=num_cached,
                bytes_moved=moved + counts['moved'],
                bytes_saved_by_match=matched + counts['saved'], bytes_saved_by_cache=cached,
                sample_seconds=seconds['sample'], fetch_seconds=seconds['fetch'],
                wait_seconds=seconds['wait'],
            )  # fmt: skip
