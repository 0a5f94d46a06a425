"""The thread that makes batches ahead."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from pyg_fast.loader import FastNeighborLoader
from tests.loader._graphs import random_data
from tests.loader._parts import Meter, PendingBatch, ThreadedIterator


def threads() -> int:
    return sum(thread.name == 'pyg_fast.loader' for thread in threading.enumerate())


def counted(made: list[int], end: int = 100) -> Iterator[Any]:
    for k in range(end):
        made.append(k)
        yield PendingBatch(Data(number=k), [])


def threaded(
    made: Iterator[Any], device: torch.device, transform: Callable | None = None
) -> ThreadedIterator:
    stream = torch.cuda.Stream(device) if device.type == 'cuda' else None
    return ThreadedIterator(made, transform, Meter(device), 100, stream, 2)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.time() + 20
    while not condition():
        assert time.time() < end
        time.sleep(0.001)


def test_all_in_order(device: torch.device) -> None:
    iterator = threaded(counted([]), device)
    assert len(iterator) == 100
    assert [batch.number for batch in iterator] == list(range(100))
    assert next(iterator, None) is None
    assert next(iterator, None) is None
    assert threads() == 0


def test_no_more_is_made_than_there_is_room_for(device: torch.device) -> None:
    made: list[int] = []
    iterator = threaded(counted(made), device)
    next(iterator)
    wait_until(lambda: len(made) == 4)  # One handed out, two queued, one that does not fit.
    time.sleep(0.05)
    assert len(made) == 4
    iterator.close()
    assert threads() == 0


@pytest.mark.parametrize('how', ['close', 'del', 'cycle', 'break'])
def test_left_half_way(device: torch.device, how: str) -> None:
    ended = []

    def made() -> Iterator[Any]:
        try:
            yield from counted([])
        finally:
            ended.append(threading.current_thread().name)

    iterator = threaded(made(), device)
    gone = weakref.ref(iterator)
    next(iterator)
    if how == 'close':
        iterator.close()
        assert next(iterator, None) is None
    elif how == 'break':
        for batch in iterator:
            if batch.number > 3:
                break
    elif how == 'cycle':
        iterator.itself = iterator  # type: ignore[attr-defined]
    del iterator
    gc.collect()
    assert gone() is None
    assert threads() == 0
    assert ended == ['pyg_fast.loader']


def test_errors_are_raised_where_batches_are_asked_for(device: torch.device) -> None:
    def fails() -> Iterator[Any]:
        yield from counted([], 3)
        raise KeyError('mine')

    iterator = threaded(fails(), device)
    for k in range(3):
        assert next(iterator).number == k
    with pytest.raises(KeyError, match='mine'):
        next(iterator)
    assert next(iterator, None) is None
    assert threads() == 0


def test_transform_runs_where_batches_are_asked_for(device: torch.device) -> None:
    seen = []

    def transform(batch: Data) -> Data:
        seen.append(threading.current_thread())
        if batch.number == 1:
            raise ValueError('not this one')
        return batch

    iterator = threaded(counted([], 3), device, transform)
    assert next(iterator).number == 0
    with pytest.raises(ValueError, match='not this one'):
        next(iterator)
    assert next(iterator).number == 2
    assert set(seen) == {threading.current_thread()}
    iterator.close()


def test_loaders_leave_nothing_behind(device: torch.device) -> None:
    data = random_data()
    loader = FastNeighborLoader(data, [3, 2], batch_size=4, device=device)
    x = weakref.ref(data.x)
    del data
    iterators = [iter(loader) for _ in range(3)]
    for iterator in iterators:
        next(iterator)
    assert threads() == (3 if device.type == 'cuda' else 0)
    for _ in zip(*iterators, strict=True):
        pass
    del iterators, iterator
    next(iter(loader))
    assert x() is not None
    del loader
    gc.collect()
    assert threads() == 0
    assert x() is None


def test_the_end_of_the_interpreter(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('that of a CPU is in test_share.py')
    code = f"""
import torch
from pyg_fast.loader import FastNeighborLoader
from torch_geometric.data import Data
data = Data(x=torch.randn(500, 4), edge_index=torch.randint(500, (2, 3000)))
iterator = iter(FastNeighborLoader(data, [3, 3], device='{device.type}'))
next(iterator)
print('left')
"""
    done = subprocess.run(
        [sys.executable, '-c', code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, 'left\n', '')


def test_batches_are_there_when_the_stream_uses_them(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU has no streams')
    data = random_data(20000, 100000)
    data.x = torch.randn(20000, 64)
    loader = FastNeighborLoader(
        data, [10, 10], batch_size=512, features='host', shuffle=True, device=device
    )
    x = data.x.to(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        wrong = [(batch.x != x[batch.n_id]).sum() for batch in loader for _ in range(2)]
        assert int(torch.stack(wrong).sum()) == 0
    stats = loader.stats
    assert min(stats.sample_seconds, stats.fetch_seconds) > 0
    assert stats.wait_seconds >= 0


def test_an_error_at_the_end_reaches_the_caller(device: torch.device) -> None:
    class Fails:
        def __iter__(self) -> 'Fails':
            return self

        def __next__(self) -> Any:
            raise StopIteration

        def close(self) -> None:
            raise KeyError('at the end')

    with pytest.raises(KeyError, match='at the end'):
        next(threaded(Fails(), device))
    assert threads() == 0


def test_memory_goes_once_the_stream_is_done(device: torch.device) -> None:
    """Kernels may still read the tensors of `made`."""
    if device.type == 'cpu':
        pytest.skip('a CPU has no streams')
    done = []

    def made() -> Iterator[Any]:
        try:
            for k in range(100):
                torch.cuda._sleep(50_000_000)
                event = torch.cuda.current_stream().record_event()
                yield PendingBatch(Data(number=k), [])
        finally:
            done.append(event.query())

    iterator = threaded(made(), device)
    next(iterator)
    iterator.close()
    assert done == [True]


@pytest.mark.parametrize('mode', ['global', 'thread_local', 'relaxed'])
def test_a_graph_is_captured_while_batches_are_made(device: torch.device, mode: str) -> None:
    if device.type == 'cpu':
        pytest.skip('of CUDA only')
    data = random_data(100_000, 2_000_000)
    data.x = torch.randn(100_000, 128)
    loader = FastNeighborLoader(
        data, [10, 10], batch_size=512, seed=1, device=device, features='host', topology='host'
    )
    linear, x = torch.nn.Linear(128, 128).to(device), torch.randn(512, 128, device=device)
    wanted = linear(x)
    for k, batch in enumerate(loader):
        if k >= 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode=mode):
                for _ in range(200):
                    out = linear(x)
            graph.replay()
            torch.testing.assert_close(out, wanted)
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        if k == 20:
            break
