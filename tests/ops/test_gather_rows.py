"""Rows of features from the device or the host: every type and width, bad input."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _raw_ops import _lifetime, ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pyg_fast.ops import gather_rows

pytestmark = pytest.mark.usefixtures('several_threads')

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e5m2,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = [(), (1,), (2,), (3,), (4,), (7,), (8,), (25,), (32,), (100,), (129,), (3, 5), (2, 0)]


@pytest.fixture(params=['same', 'pinned'])
def place(request: pytest.FixtureRequest, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Puts features on the device, or in host memory that it reads."""
    if request.param == 'same':
        return lambda x: x.to(device)
    if device.type == 'cpu':
        pytest.skip('a CPU reads all of its memory')
    return lambda x: x.pin_memory()


def random_rows(num_rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bytes that are a number of that type."""
    if dtype == torch.bool:
        return torch.rand(num_rows, *shape) < 0.5
    return torch.randint(0, 200, (num_rows, *shape)).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.cpu().view(-1).view(torch.uint8).equal(
        b.cpu().view(-1).view(torch.uint8)
    )


def sources(
    x: Tensor, num_rows: int, device: torch.device, kinds: str = 'previous cache counter'
) -> dict[str, Tensor]:
    """An index, and what is there besides x; some matches and positions name no row."""
    n = x.size(0)
    out = {'index': torch.randint(n, (num_rows,))}
    if 'previous' in kinds:
        out['previous'] = random_rows(9, x.shape[1:], x.dtype)
        out['match'] = torch.randint(-3, 11, (num_rows,))
    if 'cache' in kinds:
        out['cache'] = random_rows(5, x.shape[1:], x.dtype)
        out['cache_position'] = torch.randint(-4, 7, (n,))
    if 'counter' in kinds:
        out['counter'] = torch.tensor([1, 10, 100])
    return {name: tensor.to(device) for name, tensor in out.items()}


def check(x: Tensor, given: dict[str, Tensor]) -> None:
    order = ('index', 'match', 'previous', 'cache_position', 'cache', 'counter')
    counter = given['counter'].clone() if 'counter' in given else None
    arguments = {**given, 'counter': counter}
    expected = reference.gather_rows(x, *(arguments.get(name) for name in order))
    out = gather_rows(x, **given)
    assert out.device == given['index'].device
    assert same(out, expected)
    if counter is not None:
        assert given['counter'].equal(counter)


@pytest.mark.parametrize('dtype', DTYPES)
def test_types_and_widths(
    device: torch.device, place: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    for shape in SHAPES:
        x = place(random_rows(21, shape, dtype))
        for kinds in ('', 'counter', 'previous', 'cache counter', 'previous cache counter'):
            check(x, sources(x, 50, device, kinds))


@pytest.mark.parametrize('index', [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize('position', [torch.int32, torch.int64])
def test_types_of_indices(device: torch.device, index: torch.dtype, position: torch.dtype) -> None:
    x = random_rows(21, (6,), torch.float32).to(device)
    given = sources(x, 50, device)
    given['index'] = given['index'].to(index)
    given['cache_position'] = given['cache_position'].to(position)
    check(x, given)


@given(st.data())
def test_anything(device: torch.device, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=2)))
    x = random_rows(data.draw(st.integers(1, 30)), shape, data.draw(st.sampled_from(DTYPES)))
    if device.type == 'cuda' and data.draw(st.booleans()):
        x = x.pin_memory()
    else:
        x = x.to(device)
    kinds = ' '.join(data.draw(st.sets(st.sampled_from(['previous', 'cache', 'counter']))))
    check(x, sources(x, data.draw(st.integers(0, 60)), device, kinds))


@pytest.mark.parametrize('offset', [1, 2, 4, 8, 12, 16, 20, 100])
@pytest.mark.parametrize('width', [1, 4, 12, 16, 48, 80, 96, 200, 400, 513])
def test_rows_that_begin_anywhere(
    device: torch.device, place: Callable[[Tensor], Tensor], offset: int, width: int
) -> None:
    memory = place(torch.randint(256, (40 * width + offset,), dtype=torch.uint8))
    x = memory[offset:].view(40, width)
    check(x, sources(x, 70, device))


@pytest.mark.parametrize('width', [1, 2, 64, 602])
def test_many_rows(device: torch.device, place: Callable[[Tensor], Tensor], width: int) -> None:
    x = place(torch.rand(20_000, width))
    index = torch.randint(20_000, (60_001,))
    match = torch.randint(-5000, 5000, (60_001,))
    previous = torch.rand(5000, width)
    position = torch.where(torch.rand(20_000) < 0.2, torch.arange(20_000), -1)
    cache = torch.rand(20_000, width)
    counter = torch.zeros(3, dtype=torch.int64, device=device)
    out = gather_rows(
        x, index.to(device), match=match.to(device), previous=previous.to(device),
        cache_position=position.to(device), cache=cache.to(device), counter=counter,
    )  # fmt: skip
    matched, cached = match >= 0, position[index] >= 0
    expected = torch.where(cached[:, None], cache[index], x.cpu()[index])
    expected = torch.where(matched[:, None], previous[match.clamp(min=0)], expected)
    assert out.cpu().equal(expected)
    numbers = [(~matched & ~cached).sum(), matched.sum(), (~matched & cached).sum()]
    assert counter.tolist() == [int(number) for number in numbers]


def test_more_than_two_gigabytes(device: torch.device) -> None:
    x = torch.empty(2**20 + 9, 2049, dtype=torch.uint8, device=device)
    last = torch.arange(2**20, 2**20 + 9, device=device)
    x[last] = random_rows(9, (2049,), torch.uint8).to(device)
    for index in (last, last.int()):
        assert gather_rows(x, index).equal(x[last])


def test_strides(device: torch.device) -> None:
    wide = torch.rand(30, 8, device=device)
    index = torch.randint(30, (40,), device=device)[::2]
    for x in (wide[:, ::2], wide[:, :5], wide.t().contiguous().t(), wide[:, 0]):
        assert gather_rows(x, index).equal(x[index])
    match = torch.randint(-1, 15, (40,), device=device)[::2]
    out = gather_rows(wide[:, :5], index, match=match, previous=wide[:15, 3:])
    chosen = torch.where((match >= 0)[:, None], wide[match.clamp(min=0), 3:], wide[index, :5])
    assert out.equal(chosen)


def test_indices_out_of_range_give_zeros(
    device: torch.device, place: Callable[[Tensor], Tensor]
) -> None:
    # The loader does not check indices on a GPU.
    x = place(torch.rand(9, 5) + 1)
    previous = torch.rand(2, 5, device=device) + 1
    index = torch.tensor([-1, 9, 2**40, -(2**62), 8, 100], device=device)
    match = torch.tensor([-1, 2, -9, 2**60, -1, 1], device=device)
    counter = torch.zeros(3, dtype=torch.int64, device=device)
    out = ops.gather_rows(x, index, match, previous, None, None, counter)
    assert out[:4].eq(0).all()
    assert out[4].cpu().equal(x[8].cpu())
    assert out[5].equal(previous[1])
    assert counter.tolist() == [1, 1, 0]


def test_counts_add_up(device: torch.device) -> None:
    x, index = torch.rand(9, 5, device=device), torch.randint(9, (7,), device=device)
    counter = torch.zeros(3, dtype=torch.int64, device=device)
    for k in range(1, 4):
        gather_rows(x, index, counter=counter)
        assert counter.tolist() == [7 * k, 0, 0]


def test_no_gradient(device: torch.device) -> None:
    x = torch.rand(9, 5, device=device, requires_grad=True)
    index = torch.randint(9, (7,), device=device)
    out = gather_rows(x, index, match=torch.zeros_like(index), previous=x)
    assert not out.requires_grad


def test_host_memory_must_be_pinned_and_contiguous(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU reads all of its memory')
    index = torch.arange(3, device=device)
    x = torch.rand(9, 6)
    with pytest.raises(ValueError, match="'x' must be on cuda.*or for a GPU in pinned"):
        gather_rows(x, index)
    with pytest.raises(ValueError, match="'x' must be contiguous in host memory"):
        gather_rows(x.pin_memory()[:, ::2], index)
    with pytest.raises(ValueError, match="'x' must be on cpu"):
        gather_rows(x.to(device), index.cpu())
    with pytest.raises(RuntimeError):
        ops.gather_rows(x.to(device), index.cpu(), *[None] * 5)


def test_opcheck_and_fake_kernel(device: torch.device, place: Callable[[Tensor], Tensor]) -> None:
    x = place(torch.rand(9, 2, 3))
    given = sources(x, 12, device)
    order = ('index', 'match', 'previous', 'cache_position', 'cache', 'counter')
    for args in ((x, *(given[name] for name in order)), (x, given['index'], *[None] * 5)):
        out = ops.gather_rows(*args)
        if x.device == out.device:
            torch.library.opcheck(torch.ops.pyg_fast.gather_rows.default, args)
        meta = [None if a is None else a.to('meta') for a in args]
        fake = ops.gather_rows(*meta)
        assert (fake.shape, fake.dtype, fake.stride()) == (out.shape, out.dtype, out.stride())


def test_raw_op_refuses_what_does_not_fit(device: torch.device) -> None:
    x = torch.rand(9, 2, 3, device=device)
    good = dict(
        index=torch.arange(4, device=device), match=torch.arange(4, device=device),
        previous=x[:5], cache_position=torch.arange(9, device=device), cache=x[:7],
        counter=torch.zeros(3, dtype=torch.int64, device=device),
    )  # fmt: skip
    ops.gather_rows(x, *good.values())
    bad: list[tuple[str, Tensor | None]] = [
        ('index', good['index'].float()), ('index', good['index'][None]),
        ('match', good['match'].int()), ('match', good['match'][:3]), ('match', None),
        ('previous', x.double()), ('previous', x[:, :, :2].contiguous()), ('previous', x[:, :1]),
        ('previous', x.view(9, 6)), ('previous', None), ('previous', x[::2]),
        ('cache_position', good['cache_position'][:8]), ('cache_position', None),
        ('cache_position', good['cache_position'].short()), ('cache', x.half()), ('cache', None),
        ('cache', x.view(9, 6)), ('counter', good['counter'].int()),
        ('counter', good['counter'][:2]),
    ]  # fmt: skip
    for name, tensor in bad:
        with pytest.raises(RuntimeError):
            ops.gather_rows(x, *{**good, name: tensor}.values())
    for wrong in (x[:, ::2], x[0, 0, 0]):
        with pytest.raises(RuntimeError):
            ops.gather_rows(wrong, good['index'], *[None] * 5)


X, INDEX = torch.rand(9, 4), torch.arange(3)
FAILS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (TypeError, "'x' must be a tensor, got list", lambda: gather_rows([1], INDEX)),
    (TypeError, "'x' must be a strided tensor", lambda: gather_rows(X.to_sparse(), INDEX)),
    (ValueError, "'x' must have at least one dimension", lambda: gather_rows(X[0, 0], INDEX)),
    (ValueError, "'x' must be on cpu, or", lambda: gather_rows(X.to('meta'), INDEX)),
    (TypeError, "'index' must hold integers, got torch.bool", lambda: gather_rows(X, INDEX > 0)),
    (ValueError, "'index' must have one dimension, got 2", lambda: gather_rows(X, INDEX[None])),
    (IndexError, "'index' must hold nodes in", lambda: gather_rows(X, INDEX - 1)),
    (IndexError, "'index' must hold nodes in", lambda: gather_rows(X, INDEX + 7)),
    (ValueError, "'match' and 'previous' must be given together",
     lambda: gather_rows(X, INDEX, match=INDEX)),
    (ValueError, "'match' and 'previous' must be given together",
     lambda: gather_rows(X, INDEX, previous=X)),
    (ValueError, "'cache_position' and 'cache' must be given together",
     lambda: gather_rows(X, INDEX, cache=X)),
    (TypeError, "'match' must be int64, got torch.int32",
     lambda: gather_rows(X, INDEX, match=INDEX.int(), previous=X)),
    (ValueError, r"'match' must have shape \[3\], got \[2\]",
     lambda: gather_rows(X, INDEX, match=INDEX[1:], previous=X)),
    (TypeError, "'previous' must be torch.float32 as 'x', got torch.float16",
     lambda: gather_rows(X, INDEX, match=INDEX, previous=X.half())),
    (ValueError, r"'previous' must have rows of shape \[4\] as 'x', got \[9, 3\]",
     lambda: gather_rows(X, INDEX, match=INDEX, previous=X[:, 1:])),
    (ValueError, "'previous' must be on cpu, got meta",
     lambda: gather_rows(X, INDEX, match=INDEX, previous=X.to('meta'))),
    (TypeError, "'cache_position' must be int32 or int64, got torch.int16",
     lambda: gather_rows(X, INDEX, cache_position=torch.arange(9).short(), cache=X)),
    (ValueError, "'cache_position' must have 9 entries, got 8",
     lambda: gather_rows(X, INDEX, cache_position=torch.arange(8), cache=X)),
    (TypeError, "'cache' must be a tensor, got int",
     lambda: gather_rows(X, INDEX, cache_position=torch.arange(9), cache=3)),
    (TypeError, "'counter' must be int64, got torch.int32",
     lambda: gather_rows(X, INDEX, counter=torch.zeros(3).int())),
    (ValueError, r"'counter' must have shape \[3\] and be contiguous, got \[2\]",
     lambda: gather_rows(X, INDEX, counter=torch.zeros(2).long())),
]  # fmt: skip


@pytest.mark.parametrize(('error', 'text', 'call'), FAILS)
def test_bad_input(error: type[Exception], text: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=text):
        call()


def test_fake_tensors(device: torch.device) -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.rand(9, 4, device=device))
        out = ops.gather_rows(x, torch.arange(3, device=device), *[None] * 5)
    assert (out.shape, out.dtype) == ((3, 4), torch.float32)


# --- lifetime of the inputs ----------------------------------------------------------------------


class FakeStream:
    """A stream that runs its work on demand."""

    device = 'fake'

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.given = self.done = 0

    def record_event(self) -> Any:
        self.given += 1
        return FakeEvent(self, self.given)


class FakeEvent:
    def __init__(self, stream: FakeStream, number: int) -> None:
        self.stream, self.number = stream, number

    def query(self) -> bool:
        return self.number <= self.stream.done


@pytest.fixture
def alive() -> Iterator[dict]:
    """What is kept, of this test alone."""
    before = _lifetime._alive.copy()
    _lifetime._alive.clear()
    yield _lifetime._alive
    _lifetime._alive.clear()
    _lifetime._alive.update(before)


def test_what_is_read_is_kept_until_it_is_done(alive: dict) -> None:
    streams = [FakeStream(k) for k in range(2)]
    a, b, c = (torch.zeros(4) for _ in range(3))
    for stream in streams:
        for _ in range(5):
            _lifetime._keep(stream, [a, a[1:]])
    assert len(alive) == 2  # however often they read it
    streams[0].done = 4
    _lifetime._keep(streams[0], [b])
    assert len(alive) == 3
    streams[0].done = 5
    _lifetime._keep(streams[1], [c])
    assert {key[1:] for key in alive} == {
        (1, a.data_ptr()), (0, b.data_ptr()), (1, c.data_ptr())
    }  # fmt: skip
    streams[0].done = streams[1].done = 6
    _lifetime._keep(streams[0], [a])
    assert [key[1:] for key in alive] == [(0, a.data_ptr())]


def test_keeping_from_many_threads(alive: dict) -> None:
    def use(stream: FakeStream) -> None:
        for _ in range(200):
            _lifetime._keep(stream, [torch.zeros(3)])
            stream.done = stream.given - 1

    threads = [threading.Thread(target=use, args=(FakeStream(k),)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(alive) <= 16


def test_nothing_is_kept_on_a_cpu(alive: dict) -> None:
    gather_rows(X, INDEX)
    assert not alive


def test_host_memory_outlives_the_call(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU reads before the call returns')
    num_rows, wrong = 100_000, 0
    index = torch.randperm(num_rows, device=device)
    x = torch.ones(num_rows, 256).pin_memory()
    gather_rows(x, index[:10])
    for _ in range(3):
        torch.cuda._sleep(500_000_000)  # The stream is busy, as in training.
        out = gather_rows(x, index)
        del x
        x = torch.empty(num_rows, 256, pin_memory=True).fill_(-1)  # The memory that is free now.
        torch.cuda.synchronize()
        wrong += int((out != 1).sum())
        x.fill_(1)
    assert wrong == 0


def test_host_memory_is_let_go(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('nothing is kept')
    index = torch.arange(9, device=device)
    for _ in range(50):
        gather_rows(torch.rand(9, 4).pin_memory(), index)
    torch.cuda.synchronize()
    gather_rows(torch.rand(9, 4).pin_memory(), index)
    assert len(_lifetime._alive) == 1


def test_nothing_is_kept_in_a_capture(device: torch.device, alive: dict) -> None:
    if device.type == 'cpu':
        pytest.skip('of CUDA only')
    x, index = torch.rand(9, 4).pin_memory(), torch.arange(9, device=device)
    gather_rows(x, index)
    torch.cuda.synchronize()
    alive.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.gather_rows(x, index, *[None] * 5)
        _lifetime.keep_until_read(device, x)
    assert not alive
    graph.replay()
    assert out.cpu().equal(x)
