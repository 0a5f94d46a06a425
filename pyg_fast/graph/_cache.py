"""The cache of a prepared graph. No other part of the package keeps data about a tensor.

It stores only the structure of an :class:`~torch_geometric.EdgeIndex` (a
:class:`~pyg_fast.graph.PreparedGraph` is one), on that object, as long as it lives.
Weights, features, masks and seeds are read at every call.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.edge_index import SortOrder

from ..ops._edges import is_capturing
from ..sparse.graph import Graph
from .batch_edge_index import BatchEdgeIndex
from .prepared_graph import PreparedGraph

_CACHE = '_pyg_fast_cache'  # our only attribute on an EdgeIndex

# The name of an entry: a named tuple of what its value depends on beside the edges. Its last field,
# `kind`, differs for each type, because tuples of different types with the same fields are equal.
Request: TypeAlias = tuple[Hashable, ...]

RequestedSize: TypeAlias = tuple[int, int] | None
T = TypeVar('T')

# Graphs by the `id` of their row pointers: `flip` gives these to what it returns.
_by_indptr: 'WeakValueDictionary[int, EdgeIndex]' = WeakValueDictionary()


class SampledHops(NamedTuple):
    """The numbers of edges that each hop of a mini-batch adds, and of sources and destinations,
    those of the seeds first."""

    edges: Sequence[int] = ()
    src: Sequence[int] = ()
    dst: Sequence[int] = ()


class Made:
    """Where tensors of a GPU were made: the current stream, and an event behind all its work.

    Args:
        device: The GPU.
        late: Records the event when another stream asks for it, so behind later work, too: for
            tensors that most often the same stream reads, which needs none.
    """

    def __init__(self, device: torch.device, late: bool = False) -> None:
        # Ten times as fast as `torch.cuda.current_stream`.
        self.stream: int = torch._C._cuda_getCurrentRawStream(device.index)
        self._parts = torch._C._cuda_getCurrentStream(device.index)
        self._event = None if late else self._record()

    def _record(self) -> torch.cuda.Event:
        number, index, kind = self._parts
        stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)
        return stream.record_event()

    @property
    def event(self) -> torch.cuda.Event:
        """The event."""
        self._event = self._event or self._record()
        return self._event

    @classmethod
    def here(cls, tensor: Tensor, late: bool = False) -> 'Made | None':
        """The current stream, outside of a capture; None: no GPU."""
        return cls(tensor.device, late) if tensor.is_cuda else None


class Entry(Generic[T]):
    """A value made of tensors, and the CUDA streams on which it may be read; :obj:`made` says how
    it was made, if not here and now. Nothing waits for it if that is :obj:`None`."""

    def __init__(self, value: T, wait: bool, made: Made | None = None) -> None:
        self.value = value
        self.made: Made | None = None
        self.device = _gpu_of(value)
        if self.device is None:
            return
        if wait:
            stream = torch.cuda.current_stream(self.device)
            stream.synchronize()
            self.streams = {stream.cuda_stream}
        else:
            self.made = made or Made(self.device)
            self.streams = {self.made.stream}

    def is_ready(self) -> bool:
        """Makes the current stream wait for the value, and its memory wait for the stream; False
        in a capture, which cannot wait."""
        if self.device is None:
            return True
        if torch._C._cuda_getCurrentRawStream(self.device.index) in self.streams:
            return True
        stream = torch.cuda.current_stream(self.device)
        if self.made is not None:
            if torch.cuda.is_current_stream_capturing():
                return False
            stream.wait_event(self.made.event)
        for tensor in tensors_of(self.value):
            tensor.record_stream(stream)
        self.streams.add(stream.cuda_stream)
        return True


class Cache:
    """The cache of one EdgeIndex. Copies and pickles are empty: everything can be made again."""

    def __init__(self, state: tuple, data: Tensor) -> None:
        self.state = state
        self.data = data  # kept alive, so that no other tensor gets its id
        self.entries: dict[Request, Entry] = {}
        self.has_loops: bool | None = None  # None: nobody has looked for self-loops
        self.signature: tuple[int, ...] | None = None
        self.group_sizes: tuple[int | None, int | None, bool] | None = None  # as set by the user
        self.hops: SampledHops | None = None  # of a mini-batch; without entries: not known
        # Read by captured CUDA graphs, and so by their replays.
        self.captured: dict[int, Entry] = {}

    def __reduce__(self) -> tuple:
        return dict, ()  # torch.load supports it with weights_only=True


class Promise:
    """The caches of new edges, by type, which :func:`cache_of` makes when they are first asked for:
    most of those of a batch with many types are never read. Writes to the edges break it.

    Args:
        edges: The lists of edges that an EdgeIndex holds.
        fill: Fills the cache of edges of a type.
    """

    def __init__(self, edges: Mapping[Any, Tensor], fill: Callable[[Cache, Any], object]) -> None:
        self._edges, self._fill = edges, fill
        self._key_of: dict[int, Any] = {}  # by the `id` of the edges

    def __reduce__(self) -> tuple:
        return dict, ()  # as a cache

    def give(self, edge_index: EdgeIndex) -> None:
        """Promises the cache of a new EdgeIndex."""
        edge_index.__dict__[_CACHE] = self

    def keep(self, cache: Cache) -> None:
        """Fills the cache."""
        data, version, own_version, sort_order = cache.state
        self._key_of = self._key_of or {id(edges): key for key, edges in self._edges.items()}
        if data in self._key_of and not (version or own_version) and sort_order == SortOrder.COL:
            self._fill(cache, self._key_of[data])


def cache_of(edge_index: EdgeIndex) -> Cache:
    """The cache of an EdgeIndex; empty after an edit was noticed.

    Edits of its data are not allowed; those that change the version are still noticed.
    """
    # The tensor that holds the edges.
    data = edge_index.graph.col if isinstance(edge_index, PreparedGraph) else edge_index._data
    state = (
        id(data),
        None if data.is_inference() else data._version,  # Inference tensors have none.
        None if edge_index.is_inference() else edge_index._version,
        edge_index._sort_order,
    )
    cache = edge_index.__dict__.get(_CACHE)
    if not isinstance(cache, Cache) or cache.state != state:
        fresh = edge_index.__dict__[_CACHE] = Cache(state, data)
        if isinstance(cache, Cache):
            fresh.captured = cache.captured
        elif isinstance(cache, Promise):
            cache.keep(fresh)
        return fresh
    return cache


def forget(edge_index: EdgeIndex) -> None:
    """Drops what is cached of an EdgeIndex."""
    edge_index.__dict__.pop(_CACHE, None)


def look_up(edge_index: EdgeIndex, request: Request) -> Any:
    """A value that the current stream may read, or None."""
    if torch.compiler.is_compiling():
        if isinstance(edge_index, BatchEdgeIndex):
            return None  # Its sizes would become constants.
        # Methods of EdgeIndex cannot be traced, but attributes can.
        cache = getattr(edge_index, _CACHE, None)
        entry = cache.entries.get(request) if isinstance(cache, Cache) else None
        return None if entry is None or entry.made is not None else entry.value
    return look_up_eagerly(edge_index, request)


def look_up_eagerly(edge_index: EdgeIndex, request: Request) -> Any:
    """The same in eager calls."""
    cache = cache_of(edge_index)
    entry = cache.entries.get(request)
    if entry is None:
        return None
    if entry.device is not None:  # Only what is on a GPU must wait, and is read by its replays.
        if not entry.is_ready():
            return None
        if torch.cuda.is_current_stream_capturing():
            cache.captured[id(entry)] = entry
    return entry.value


def derive(
    edge_index: EdgeIndex,
    request: Request,
    make: Callable[[], T],
    wait: bool | None = None,
    suffices: Callable[[T], bool] | None = None,
) -> T:
    """A value that depends only on the structure of the graph, made once; again if the cached one
    does not suffice. Compiled code, which caches nothing, makes it where no eager call has done so.
    Other arguments are those of :func:`store`."""
    value: T | None = look_up(edge_index, request)
    if value is None or (suffices is not None and not suffices(value)):
        with outside_inference_mode():
            value = make()
        if not torch.compiler.is_compiling():
            store(edge_index, request, value, wait)
    return value


def keeps_graph(edge_index: object) -> bool:
    """Whether what was made of edges is kept on them, so that they are not sorted again; that of a
    copy is made once."""
    if isinstance(edge_index, (PreparedGraph, BatchEdgeIndex)):
        return True
    if not isinstance(edge_index, EdgeIndex):
        return False
    # What copies and `flip` take over of a prepared graph.
    if edge_index._indptr is not None and edge_index._T_indptr is not None:
        return True
    cache = cache_of(edge_index)
    return len(cache.entries) > 0 or cache.hops is not None


def requested_size(edge_index: Tensor, num_src: int, num_dst: int) -> RequestedSize:
    """The size of a graph as a part of a request; None for that of a prepared graph, which has no
    other: numbers in requests are constants of compiled code."""
    if isinstance(edge_index, PreparedGraph):
        graph = edge_index.graph
        if num_src == graph.num_src and num_dst == graph.num_dst:
            return None
    return num_src, num_dst


def outside_inference_mode() -> AbstractContextManager:
    """For making what a later training step may use. Compiled code caches nothing, and PyTorch's
    cache on disk does not take code with this mode."""
    return nullcontext() if torch.compiler.is_compiling() else torch.inference_mode(False)


def noted_loops(edge_index: EdgeIndex) -> bool | None:
    """Whether there are self-loops, for compiled code, which cannot look for them; None if no eager
    call has done so."""
    cache = getattr(edge_index, _CACHE, None)
    return cache.has_loops if isinstance(cache, Cache) else None


def store(edge_index: EdgeIndex, request: Request, value: object, wait: bool | None = None) -> None:
    """Caches a value made on the current stream, unless a capture records the stream.

    Args:
        edge_index (EdgeIndex): The graph.
        request (Request): Its name.
        value (object): Tensors, numbers, and tuples of them.
        wait (bool, optional): Waits for the device, so that any stream may read it, also captured
            ones and compiled code. (default: :obj:`None`, if all earlier entries were waited for)
    """
    cache = cache_of(edge_index)
    if is_capturing(cache.data):
        return
    if wait is None:
        wait = all(entry.made is None for entry in cache.entries.values())
    cache.entries[request] = Entry(value, wait)
    if edge_index._indptr is not None and edge_index._T_indptr is not None:
        _by_indptr[id(edge_index._indptr)] = edge_index


def flipped(edge_index: EdgeIndex) -> EdgeIndex | None:
    """The prepared graph of which an EdgeIndex is `flip(0)`, if neither list was ever written."""
    found = _by_indptr.get(id(edge_index._T_indptr))
    if found is None or isinstance(found, (PreparedGraph, BatchEdgeIndex)):
        return None
    # What `flip` takes over, and `sort_by`, which moves edges, does not.
    swaps = (
        edge_index._T_indptr is found._indptr and edge_index._indptr is found._T_indptr
        and edge_index._T_perm is found._T_perm and found.is_sorted and edge_index.is_sorted
        and edge_index._sort_order != found._sort_order
    )  # fmt: skip
    # A write changes the version of the EdgeIndex, or of its data if it went to that.
    lists = edge_index, edge_index._data, found, found._data
    if not swaps or any(x.is_inference() or x._version for x in lists):
        return None
    is_flip = found.sparse_size() == edge_index.sparse_size()[::-1]
    return found if is_flip and edge_index.shape == found.shape else None


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors of which a value is made."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)


def _gpu_of(value: object) -> torch.device | None:
    """The GPU on which tensors of a value are, without the generators of :func:`tensors_of`: it is
    asked for each edge type of each batch."""
    if isinstance(value, Graph):
        value = value.rowptr  # All its tensors are on one device.
    if isinstance(value, Tensor):
        return value.device if value.is_cuda else None
    if isinstance(value, tuple):
        for part in value:
            if (found := _gpu_of(part)) is not None:
                return found
    return None
