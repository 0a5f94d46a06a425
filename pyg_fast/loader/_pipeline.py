"""Handing out batches: one after the other, or made ahead by a thread with a stream of its own."""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from ._stats import Meter

Made = Iterator[tuple[Data, list[Tensor]]]


class InlineIterator:
    """Makes each batch when it is asked for."""

    def __init__(self, made: Made, transform: Callable | None, meter: Meter, length: int) -> None:
        self._made, self._transform, self._meter = made, transform, meter
        self._length = length

    def __iter__(self) -> 'InlineIterator':
        return self

    def __len__(self) -> int:
        return self._length

    def __next__(self) -> Any:
        with self._meter.timed('wait'):
            batch, _ = next(self._made)
        return batch if self._transform is None else self._transform(batch)

    def close(self) -> None:
        """Ends the epoch here."""
        self._made.close()  # type: ignore[attr-defined]


class _Channel:
    """A queue between two threads that either can close."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque = deque()
        self._changed = threading.Condition()
        self.closed = False

    def put(self, item: Any) -> bool:
        """Adds an item once there is room; False: closed."""
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
    """Hands out what a thread makes ahead on its own stream.

    The thread knows the channel and not the iterator: an iterator that is closed, forgotten or
    left to the end of the interpreter closes the channel, which ends the thread.
    """

    def __init__(
        self,
        made: Made,
        transform: Callable | None,
        meter: Meter,
        length: int,
        stream: Any,
        prefetch: int,
    ) -> None:
        self._transform, self._meter, self._length = transform, meter, length
        self._stream = stream
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
                batch, tensors, done = item
                if current is not None:
                    current.wait_event(done)
        if item is None or isinstance(item, BaseException):
            self.close()
            raise StopIteration if item is None else item
        if current is not None:
            for tensor in tensors:
                tensor.record_stream(current)
        return batch if self._transform is None else self._transform(batch)


def _produce(made: Made, channel: _Channel, stream: Any) -> None:
    end: BaseException = StopIteration()
    try:
        with torch.cuda.stream(stream):  # Without effect for None.
            for batch, tensors in made:
                done = None if stream is None else stream.record_event()
                if not channel.put((batch, tensors, done)):
                    break
                del batch, tensors
    except BaseException as error:
        end = error
    finally:
        made.close()  # type: ignore[attr-defined]
        if stream is not None:
            stream.synchronize()  # Before memory goes that kernels read.
    channel.put(end)


def _stop(channel: _Channel, thread: threading.Thread) -> None:
    channel.close()
    if thread is not threading.current_thread():
        thread.join()
