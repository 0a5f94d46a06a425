"""Iterators over batches: made one after the other, or ahead by a thread with its own stream."""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch_geometric.data.storage import BaseStorage

from ._stats import Meter, Moment, on_stream

T = TypeVar('T')
Self = TypeVar('Self', bound='BatchIterator')

#: What a user's function makes of a batch may be anything.
Transform: TypeAlias = Callable[[Any], Any]
OnEnd: TypeAlias = Callable[[Exception], None]

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class LateRead(NamedTuple):
    """Attributes that are read when the loader returns the batch."""

    read: Callable[[], dict[str, object]]
    tensors: list[Tensor]  # what it reads that another stream wrote
    store: BaseStorage | None = None  # of the batch, once that is made


class PendingBatch(NamedTuple):
    """A batch that may lack attributes."""

    batch: Any  # Data or HeteroData
    tensors: list[Tensor]  # its tensors that another stream wrote
    late: Sequence[LateRead] = ()

    def complete(self, meter: Meter, stream: torch.cuda.Stream | None, start: Moment) -> Any:
        """Reads what it lacks, on the stream that uses the batch: the current one, which has had
        this moment."""
        if self.late:
            for item in self.late:
                assert item.store is not None
                for key, value in item.read().items():
                    put(item.store, key, value)
            meter.add_time('fetch', start, meter.now(stream))
        return self.batch


def put(store: BaseStorage, key: str, value: object) -> None:
    """As `store[key] = value`, without PyG's checks, which count where a batch has many types. Only
    for stores of a new batch, which know nothing of their attributes yet."""
    if value is None:
        store._mapping.pop(key, None)
    else:
        store._mapping[key] = value


Batches: TypeAlias = Generator[PendingBatch, None, None]


@contextmanager
def run_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs the body on a stream, after all work of the current stream; None: no streams."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield


class BatchIterator:
    """The batches of an epoch. `on_end` is called once, with the error that ends the iterator, or
    StopIteration; not if the iterator is left before."""

    def __init__(
        self, transform: Transform | None, meter: Meter, length: int, on_end: OnEnd | None
    ) -> None:
        self._transform, self._meter = transform, meter
        self._length, self._on_end = length, on_end

    def __iter__(self: Self) -> Self:
        return self

    def __len__(self) -> int:
        return self._length


class InlineIterator(BatchIterator):
    """Makes each batch when the caller requests it."""

    def __init__(
        self, batches: Batches, transform: Transform | None, meter: Meter, length: int,
        on_end: OnEnd | None = None,
    ) -> None:  # fmt: skip
        super().__init__(transform, meter, length, on_end)
        self._batches = batches

    def __next__(self) -> Any:
        meter, start = self._meter, self._meter.now()
        try:
            pending = next(self._batches)
        except Exception as end:
            on_end, self._on_end = self._on_end, None
            if on_end is not None:
                on_end(end)
            raise
        batch = pending.complete(meter, None, meter.now())
        meter.add_time('wait', start, meter.now())
        return batch if self._transform is None else self._transform(batch)

    def close(self) -> None:
        """Ends the epoch."""
        self._on_end = None
        self._batches.close()


class _Channel(Generic[T]):
    """A queue between two threads; each of them can close it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, item: T) -> bool:
        """Adds an item when there is room; False: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._size)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self.closed

    def get(self) -> T | None:
        """The next item; None: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or self._items)
            if self.closed:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._items.clear()
            self._changed.notify_all()


#: A batch and the event after which it may be read, or what ended the thread.
_Item: TypeAlias = tuple[PendingBatch, torch.cuda.Event | None] | BaseException


class ThreadedIterator(BatchIterator):
    """Returns batches that a thread makes ahead on its own stream.

    The thread refers to the channel, not to the iterator: when the iterator is closed, collected or
    left at interpreter exit, it closes the channel, which ends the thread.
    """

    def __init__(
        self, batches: Batches, transform: Transform | None, meter: Meter, length: int,
        stream: torch.cuda.Stream | None, prefetch: int, on_end: OnEnd | None = None,
    ) -> None:  # fmt: skip
        super().__init__(transform, meter, length, on_end)
        self._stream = stream
        self._channel: _Channel[_Item] = _Channel(prefetch)
        self._thread = threading.Thread(
            target=_produce, args=(batches, self._channel, stream), name='pyg_fast.loader',
            daemon=True,
        )  # fmt: skip
        self.close = weakref.finalize(self, _stop, self._channel, self._thread)
        self._thread.start()

    def __next__(self) -> Any:
        stream = self._stream
        current = None if stream is None else torch.cuda.current_stream(stream.device)
        meter, start = self._meter, self._meter.now(current)
        item = self._channel.get()
        if current is not None and isinstance(item, tuple) and item[1] is not None:
            current.wait_event(item[1])
        end = meter.now(current)
        meter.add_time('wait', start, end)
        if item is None or isinstance(item, BaseException):
            self.close()
            if self._on_end is not None and isinstance(item, Exception):
                self._on_end(item)
            raise StopIteration if item is None else item
        pending = item[0]
        if current is not None:
            for tensor in pending.tensors:
                tensor.record_stream(current)
        batch = pending.complete(meter, current, end)
        return batch if self._transform is None else self._transform(batch)


def _produce(batches: Batches, channel: _Channel[_Item], stream: torch.cuda.Stream | None) -> None:
    end: BaseException = StopIteration()
    try:
        if stream is not None:
            _ignore_captures()
        with on_stream(stream):
            for pending in batches:
                done = None if stream is None else stream.record_event()
                if not channel.put((pending, done)):
                    break
                del pending
    except BaseException as error:
        end = error
    try:
        if stream is not None:
            stream.synchronize()  # Kernels still read memory that `batches` keeps alive.
        batches.close()
    except BaseException as error:
        end = error if isinstance(end, StopIteration) else end
    channel.put(end)


def _ignore_captures() -> None:
    """Lets this thread allocate and wait while another one captures a CUDA graph.

    Otherwise a capture in the default mode forbids both in all threads.
    """
    try:
        mode = ctypes.c_int(_THREAD_LOCAL)
        ctypes.CDLL('libcuda.so.1').cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    except (OSError, AttributeError):  # Another driver: captures must use 'thread_local'.
        pass


def _stop(channel: _Channel[_Item], thread: threading.Thread) -> None:
    channel.close()
    if thread is not threading.current_thread():
        thread.join()
