"""Iterators over batches: made one after the other, or ahead by a thread with its own stream."""

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data

from ._stats import Meter

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Late(NamedTuple):
    """Attributes that are read when the loader returns the batch."""

    read: Callable[[], dict[str, Any]]
    tensors: list[Tensor]  # what it reads of those that others made


class Made(NamedTuple):
    """A batch that a loader has made."""

    batch: Data
    tensors: list[Tensor]  # its tensors that others made
    late: Callable[[], None] | None = None  # adds attributes that are read last

    def finished(self, meter: Meter) -> Data:
        """The complete batch, on the stream that uses it."""
        if self.late is not None:
            with meter.timed('fetch'):
                self.late()
        return self.batch


@contextmanager
def behind(stream: Any) -> Iterator[None]:
    """Runs the body on a stream, after all work of the current stream; None: no streams."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield


class InlineIterator:
    """Makes each batch when the caller requests it. `ended` is called once, with the error that
    ends making, or StopIteration; not if the iterator is left before."""

    def __init__(
        self,
        made: Iterator[Made],
        transform: Callable | None,
        meter: Meter,
        length: int,
        ended: Callable[[Exception], None] | None = None,
    ) -> None:
        self._made, self._transform, self._meter = made, transform, meter
        self._length, self._ended = length, ended

    def __iter__(self) -> 'InlineIterator':
        return self

    def __len__(self) -> int:
        return self._length

    def __next__(self) -> Any:
        with self._meter.timed('wait'):
            try:
                made = next(self._made)
            except Exception as end:
                ended, self._ended = self._ended, None
                if ended is not None:
                    ended(end)
                raise
            batch = made.finished(self._meter)
        return batch if self._transform is None else self._transform(batch)

    def close(self) -> None:
        """Ends the epoch."""
        self._ended = None
        self._made.close()  # type: ignore[attr-defined]


class _Channel:
    """A queue between two threads; each of them can close it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, item: Any) -> bool:
        """Adds an item when there is room; False: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self.closed or len(self._items) < self._size)
            if not self.closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self.closed

    def get(self) -> Any:
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


class ThreadedIterator:
    """Returns batches that a thread makes ahead on its own stream; `ended` as there.

    The thread refers to the channel, not to the iterator: when the iterator is closed, collected or
    left at interpreter exit, it closes the channel, which ends the thread.
    """

    def __init__(
        self,
        made: Iterator[Made],
        transform: Callable | None,
        meter: Meter,
        length: int,
        stream: Any,
        prefetch: int,
        ended: Callable[[Exception], None] | None = None,
    ) -> None:
        self._transform, self._meter, self._length = transform, meter, length
        self._stream, self._ended = stream, ended
        self._channel = _Channel(prefetch)
        self._thread = threading.Thread(
            target=_produce, args=(made, self._channel, stream), name='pyg_fast.loader', daemon=True
        )
        self.close = weakref.finalize(self, _stop, self._channel, self._thread)
        self._thread.start()

    def __iter__(self) -> 'ThreadedIterator':
        return self

    def __len__(self) -> int:
        return self._length

    def __next__(self) -> Any:
        stream = self._stream
        current = None if stream is None else torch.cuda.current_stream(stream.device)
        with self._meter.timed('wait'):
            item = self._channel.get()
            if item is not None and not isinstance(item, BaseException):
                made, done = item
                if current is not None:
                    current.wait_event(done)
        if item is None or isinstance(item, BaseException):
            self.close()
            if self._ended is not None and isinstance(item, Exception):
                self._ended(item)
            raise StopIteration if item is None else item
        if current is not None:
            for tensor in made.tensors:
                tensor.record_stream(current)
        batch = made.finished(self._meter)
        return batch if self._transform is None else self._transform(batch)


def _produce(made: Iterator[Made], channel: _Channel, stream: Any) -> None:
    end: BaseException = StopIteration()
    try:
        if stream is not None:
            _ignore_captures()
        with torch.cuda.stream(stream):  # no effect for None
            for item in made:
                done = None if stream is None else stream.record_event()
                if not channel.put((item, done)):
                    break
                del item
    except BaseException as error:
        end = error
    try:
        if stream is not None:
            stream.synchronize()  # Kernels still read memory that `made` keeps alive.
        made.close()  # type: ignore[attr-defined]
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


def _stop(channel: _Channel, thread: threading.Thread) -> None:
    channel.close()
    if thread is not threading.current_thread():
        thread.join()
