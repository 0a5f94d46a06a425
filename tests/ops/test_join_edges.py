"""The rows and edges of a batch of graphs, beside a loop over its graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.ops._library import reference
from pyg_fast.ops.join_edges import join_edges, take_rows

Ring = Tensor | None
Arguments = tuple[Tensor, Tensor, Tensor, Tensor, Ring, Ring, int, int, int]
# Of rows: types, and the sizes of a row, for words of 16, 8, 4, 2 and 1 bytes, and none.
ROWS = (
    (torch.float32, (8,)), (torch.float64, (1, 3)), (torch.int32, ()), (torch.bfloat16, (3,)),
    (torch.bool, (5,)), (torch.float32, (0,)), (torch.int64, ()),
)  # fmt: skip


def arguments(
    sizes: list[tuple[int, int]], ids: list[int], extra: int = 0,
    device: torch.device | None = None, ring: bool = False,
) -> Arguments:  # fmt: skip
    """Random numbers for graphs with so many nodes and edges, and a batch of some of them."""
    rows = torch.tensor([(1, *size) for size in sizes]).view(-1, 3).t()
    first = rows.cumsum(1) - rows
    chosen = rows[:, ids]
    ptr = torch.nn.functional.pad(chosen.cumsum(1), (1, 0)).contiguous()
    _, num_nodes, num_edges = rows.sum(1).tolist()
    tensors = (
        torch.randint(9, (num_edges, 4), dtype=torch.int32),
        torch.randint(9, (num_nodes, 2), dtype=torch.int32), first[:, ids].contiguous(), ptr,
    )  # fmt: skip
    nodes, edges = int(ptr[1, -1]) + extra, int(ptr[2, -1]) + extra
    rings: tuple[Ring, Ring] = None, None
    if ring:
        rings = tuple(
            torch.randint(9, size, dtype=torch.int32).to(device)
            for size in ((4, edges), (2, nodes + 1))
        )  # type: ignore[assignment]
    return *(t.to(device) for t in tensors), *rings, len(ids), nodes, edges  # type: ignore[return-value]


def rows_of(args: Arguments, last: int) -> tuple[object, ...]:
    """Arguments of the other op for the same graphs: attributes of all kinds and levels, of which
    the dataset has so many rows."""
    _, _, start, ptr, *_ = args
    rows, level, shift = [], [], []
    for at in range(3):
        for dtype, size in ROWS:
            rows.append(torch.randint(2, (last, *size), device=start.device).to(dtype))
            level.append(at)
            shift.append(1 if dtype in (torch.int32, torch.int64) else -1)
    num_real = start.size(1) // 2
    return start, ptr, rows, level, shift, (1, 2), (0, 1, 2), ptr[:, -1].tolist(), num_real


def check(args: Arguments) -> None:
    """Raises unless both ops do as their references."""
    results, wanted = join_edges(*args), reference.join_edges(*args)
    end = args[-1] if args[4] is not None else int(args[3][2, -1])
    for k, (got, want) in enumerate(zip(results, wanted, strict=True)):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want) if k % 2 else torch.equal(got[:, :end], want[:, :end])
    for last in (1, int(args[3].max()) // 2 + 1, 1000):
        taken = rows_of(args, last)
        for got, want in zip(take_rows(*taken), reference.take_rows(*taken), strict=True):  # type: ignore[arg-type]
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=6),
    choice=st.lists(st.integers(0, 99), max_size=8), extra=st.integers(0, 3), ring=st.booleans(),
)  # fmt: skip
def test_as_a_loop(
    device: torch.device, sizes: list[tuple[int, int]], choice: list[int], extra: int, ring: bool
) -> None:
    check(arguments(sizes, [k % len(sizes) for k in choice], extra, device, ring))


@pytest.mark.usefixtures('several_threads')
def test_many_graphs(device: torch.device) -> None:
    check(arguments([(30, 60)] * 3000, list(range(2999, -1, -1)), device=device))


def test_pinned_memory(cuda: torch.device) -> None:
    args = arguments([(3, 5), (2, 0), (4, 7)], [2, 0, 2], device=cuda)
    pinned = [t.cpu().pin_memory() for t in args[:2]]
    for got, wanted in zip(join_edges(*pinned, *args[2:]), join_edges(*args), strict=True):
        assert torch.equal(got, wanted)
    start, ptr, rows, *others = rows_of(args, 9)
    hosted = [t.cpu().pin_memory() for t in rows]  # type: ignore[attr-defined]
    for got, wanted in zip(
        take_rows(start, ptr, hosted, *others),
        take_rows(start, ptr, rows, *others),
        strict=True,  # type: ignore[arg-type]
    ):
        assert torch.equal(got, wanted)


def test_opcheck(device: torch.device) -> None:
    args = arguments([(3, 5), (2, 0), (4, 7)], [2, 0, 2], device=device)
    torch.library.opcheck(torch.ops.pyg_fast.join_edges.default, args)
    torch.library.opcheck(torch.ops.pyg_fast.take_rows.default, rows_of(args, 5))


@pytest.mark.parametrize(('place', 'value', 'message'), [
    (0, torch.zeros(12, 3, dtype=torch.int32), 'ends must have shape'),
    (0, torch.zeros(12, 4), 'ends must be Int'),
    (0, torch.zeros(8, 4, dtype=torch.int32), 'graph 2 has edges outside of the dataset'),
    (1, torch.zeros(8, 2, dtype=torch.int32), 'graph 2 has nodes outside of the dataset'),
    (2, torch.zeros(3, 2, dtype=torch.int64), 'start must have 3 columns'),
    (2, torch.zeros(2, 3, dtype=torch.int64), 'start must have a row 2'),
    (3, torch.zeros(3, 4, dtype=torch.int32), 'ptr must be Long'),
    (3, torch.tensor([[0] * 4, [0, 3, 1, 4], [0] * 4]), 'graph 1 has nodes outside of the dataset'),
    (4, torch.zeros(4, 12, dtype=torch.int32), 'ring and ring_rowptr must both be given'),
    (6, -1, 'num_graphs must not be negative'),
    (7, 5, 'the batch must have from 9 to'),
    (8, 2**31, 'the batch must have from 12 to'),
])  # fmt: skip
def test_wrong_edges(place: int, value: object, message: str) -> None:
    args = list(arguments([(3, 5), (2, 0), (4, 7)], [0, 1, 2]))
    args[place] = value
    with pytest.raises(RuntimeError, match=message):
        join_edges(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize(('place', 'value', 'message'), [
    (0, torch.zeros(4, 11, dtype=torch.int32), 'ring must have shape'),
    (0, torch.zeros(4, 12), 'ring must be Int'),
    (1, torch.zeros(2, 9, dtype=torch.int32), 'ring_rowptr must have shape'),
    (1, torch.zeros(10, 2, dtype=torch.int32).t(), 'must be contiguous'),
])  # fmt: skip
def test_wrong_ring(place: int, value: Tensor, message: str) -> None:
    args = list(arguments([(3, 5), (2, 0), (4, 7)], [0, 1, 2], ring=True))
    args[4 + place] = value
    with pytest.raises(RuntimeError, match=message):
        join_edges(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize(('place', 'value', 'message'), [
    (0, torch.zeros(3, dtype=torch.int64), 'start must have two dimensions, got 1'),
    (0, torch.full((3, 3), -1), 'graph 0 has invalid rows'),
    (1, torch.tensor([[0, 5, 3, 9]] * 3), 'graph 1 has invalid rows'),
    (1, torch.zeros(3, 3, dtype=torch.int64), 'ptr must have 4 columns'),
    (2, [torch.zeros(())], 'rows must be contiguous tensors with a first dimension'),
    (2, [torch.zeros(0, 2)], 'rows must not be empty'),
    (2, [torch.zeros(9)] * 2, 'level and shift must have a number for each tensor'),
    (3, [3], 'start must have a row 3'), (4, [1], 'rows with a shift must be int32 or int64'),
    (4, [3], 'ptr must have a row 3'), (5, [-1], 'start must have a row -1'),
    (7, [3, 8, 12], 'ptr must end with 8'),
    (7, [3, 9], 'num_rows must have a number for each row of start'),
    (8, 4, 'num_real must be from 0 to 3'),
])  # fmt: skip
def test_wrong_rows(place: int, value: object, message: str) -> None:
    _, _, start, ptr, *_ = arguments([(3, 5), (2, 0), (4, 7)], [0, 1, 2])
    rows = torch.zeros(9, dtype=torch.int64 if (place, value) == (4, [3]) else torch.float32)
    args = [start, ptr, [rows], [1], [-1], [1], [], [3, 9, 12], 3]
    args[place] = value
    with pytest.raises(RuntimeError, match=message):
        take_rows(*args)  # type: ignore[arg-type]
