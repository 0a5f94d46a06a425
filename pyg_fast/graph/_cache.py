"""The cache of a prepared graph. No other part of the package keeps data about a tensor.

It stores only the structure of an :class:`~torch_geometric.EdgeIndex` (a
:class:`~pyg_fast.graph.PreparedGraph` is one), on that object, as long as it lives.
Weights, features, masks and seeds are read at every call.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..ops._edges import is_capturing
from .batch_edge_index import BatchEdgeIndex
from .prepared_graph import PreparedGraph

# Ten times as fast as `torch.cuda.current_stream`; only in CUDA builds of torch.
_current_raw_stream: Any = getattr(torch._C, '_cuda_getCurrentRawStream', None)

_CACHE = '_pyg_fast_cache'  # our only attribute on an EdgeIndex


class Entry:
    """A value made of tensors, and the CUDA streams on which it may be read."""

    def __init__(self, value: Any, wait: bool) -> None:
        self.value = value
        self.tensors = list(_tensors(value))
        self.event: Any = None
        self.device = next((t.device for t in self.tensors if t.is_cuda), None)
        if self.device is None:
            return
        stream = torch.cuda.current_stream(self.device)
        self.streams = {stream.cuda_stream}
        if wait:
            stream.synchronize()
        else:
            self.event = stream.record_event()

    def is_ready(self) -> bool:
        """Makes the current stream wait for the value, and its memory wait for the stream; False
        in a capture, which cannot wait."""
        if self.device is None:
            return True
        if _current_raw_stream(self.device.index) in self.streams:
            return True
        stream = torch.cuda.current_stream(self.device)
        if self.event is not None:
            if torch.cuda.is_current_stream_capturing():
                return False
            stream.wait_event(self.event)
        for tensor in self.tensors:
            tensor.record_stream(stream)
        self.streams.add(stream.cuda_stream)
        return True


class Cache:
    """The cache of one EdgeIndex. Copies and pickles are empty: everything can be made again."""

    def __init__(self, state: tuple, data: Tensor) -> None:
        self.state = state
        self.data = data  # kept alive, so that no other tensor gets its id
        self.entries: dict[Any, Entry] = {}
        self.facts: dict[str, Any] = {}  # numbers
        # Read by captured CUDA graphs, and so by their replays.
        self.captured: dict[int, Any] = {}

    def __reduce__(self) -> tuple:
        return dict, ()  # torch.load supports it with weights_only=True


def cache_of(edge_index: EdgeIndex) -> Cache:
    """The cache of an EdgeIndex; empty after an edit was noticed.

    Edits of its data are not allowed; those that change the version are still noticed.
    """
    data = _anchor(edge_index)
    state = (id(data), _version(data), _version(edge_index), edge_index._sort_order)
    cache = edge_index.__dict__.get(_CACHE)
    if not isinstance(cache, Cache) or cache.state != state:
        fresh = Cache(state, data)
        if isinstance(cache, Cache):
            fresh.captured = cache.captured
        cache = edge_index.__dict__[_CACHE] = fresh
    return cache


def cached(edge_index: EdgeIndex, key: tuple) -> Any:
    """An entry that the current stream may read, or None."""
    if torch.compiler.is_compiling():
        if isinstance(edge_index, BatchEdgeIndex):
            return None  # Its sizes would become constants.
        # Methods of EdgeIndex cannot be traced, but attributes can.
        cache = getattr(edge_index, _CACHE, None)
        entry = cache.entries.get(key) if isinstance(cache, Cache) else None
        return None if entry is None or entry.event is not None else entry.value
    cache = cache_of(edge_index)
    entry = cache.entries.get(key)
    if entry is None or not entry.is_ready():
        return None
    if is_capturing(cache.data):
        cache.captured[id(entry)] = entry
    return entry.value


def key_size(edge_index: Tensor, num_src: int, num_dst: int) -> tuple[int, int] | None:
    """The size of a graph as a part of a key; None for that of a prepared graph, which has no
    other: numbers in keys are constants of compiled code."""
    if isinstance(edge_index, PreparedGraph):
        graph = edge_index.graph
        if num_src == graph.num_src and num_dst == graph.num_dst:
            return None
    return num_src, num_dst


def kept() -> AbstractContextManager:
    """For making what a later training step may use. Compiled code keeps nothing, and PyTorch's
    cache on disk does not take code with this mode."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def known_loops(edge_index: EdgeIndex) -> bool | None:
    """Whether there are self-loops, for compiled code, which cannot look for them; None if no eager
    call has done so."""
    cache = getattr(edge_index, _CACHE, None)
    return cache.facts.get('has_loops') if isinstance(cache, Cache) else None


def store(edge_index: EdgeIndex, key: tuple, value: Any, wait: bool | None = None) -> None:
    """Caches a value made on the current stream, unless a capture records the stream.

    Args:
        edge_index (EdgeIndex): The graph.
        key (tuple): Its name.
        value (Any): Tensors, numbers, and tuples of them.
        wait (bool, optional): Waits for the device, so that any stream may read it, also captured
            ones and compiled code. (default: :obj:`None`, if all earlier entries were waited for)
    """
    if is_capturing(_anchor(edge_index)):
        return
    entries = cache_of(edge_index).entries
    if wait is None:
        wait = all(entry.event is None for entry in entries.values())
    entries[key] = Entry(value, wait)


def _anchor(edge_index: EdgeIndex) -> Tensor:
    """The tensor that holds its edges."""
    if isinstance(edge_index, PreparedGraph):
        return edge_index.graph.col
    return edge_index._data


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # Inference tensors have none.


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)
