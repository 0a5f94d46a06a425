"""The rows and edges of a batch of graphs, beside a loop over its graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.ops._library import reference
from pyg_fast.ops.join_edges import graph_rows, join_edges

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


def arguments(
    sizes: list[tuple[int, int]], ids: list[int], extra: int = 0, device: torch.device | None = None
) -> Arguments:
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
    counts = len(ids), int(ptr[1, -1]) + extra, int(ptr[2, -1]) + extra
    return *(t.to(device) for t in tensors), *counts  # type: ignore[return-value]


def check(args: Arguments) -> None:
    """Raises unless both ops do as their references."""
    edges, rowptr = join_edges(*args)
    wanted = reference.join_edges(*args)
    count = int(args[3][2, -1])
    assert (edges.dtype, rowptr.dtype) == (torch.int32, torch.int32)
    assert edges.shape == wanted[0].shape
    assert torch.equal(edges[:, :count], wanted[0][:, :count])
    assert torch.equal(rowptr, wanted[1])
    for level in range(3):
        total = int(args[3][level, -1])
        for last in (total // 2, 10**6):
            rows = args[2], args[3], level, total, last
            for got, want in zip(graph_rows(*rows), reference.graph_rows(*rows), strict=True):
                assert got.dtype == torch.int64
                assert torch.equal(got, want)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=6),
    choice=st.lists(st.integers(0, 99), max_size=8), extra=st.integers(0, 3),
)  # fmt: skip
def test_as_a_loop(
    device: torch.device, sizes: list[tuple[int, int]], choice: list[int], extra: int
) -> None:
    check(arguments(sizes, [k % len(sizes) for k in choice], extra, device))


@pytest.mark.usefixtures('several_threads')
def test_many_graphs(device: torch.device) -> None:
    check(arguments([(30, 60)] * 3000, list(range(2999, -1, -1)), device=device))


def test_pinned_memory(cuda: torch.device) -> None:
    args = arguments([(3, 5), (2, 0), (4, 7)], [2, 0, 2], device=cuda)
    pinned = [t.cpu().pin_memory() for t in args[:2]]
    for got, wanted in zip(join_edges(*pinned, *args[2:]), join_edges(*args), strict=True):
        assert torch.equal(got, wanted)


def test_opcheck(device: torch.device) -> None:
    args = arguments([(3, 5), (2, 0), (4, 7)], [2, 0, 2], device=device)
    torch.library.opcheck(torch.ops.pyg_fast.join_edges.default, args)
    torch.library.opcheck(torch.ops.pyg_fast.graph_rows.default, (args[2], args[3], 1, 11, 8))


@pytest.mark.parametrize(('place', 'value', 'message'), [
    (0, torch.zeros(12, 3, dtype=torch.int32), 'ends must have shape'),
    (0, torch.zeros(12, 4), 'ends must be Int'),
    (0, torch.zeros(8, 4, dtype=torch.int32), 'graph 2 has edges outside of the dataset'),
    (1, torch.zeros(8, 2, dtype=torch.int32), 'graph 2 has nodes outside of the dataset'),
    (2, torch.zeros(3, 2, dtype=torch.int64), 'start must have 3 columns'),
    (2, torch.zeros(2, 3, dtype=torch.int64), 'start must have a row 2'),
    (3, torch.zeros(3, 4, dtype=torch.int32), 'ptr must be Long'),
    (3, torch.tensor([[0] * 4, [0, 3, 1, 4], [0] * 4]), 'graph 1 has nodes outside of the dataset'),
    (4, -1, 'num_graphs must not be negative'),
    (5, 5, 'the batch must have from 9 to'),
    (6, 2**31, 'the batch must have from 12 to'),
])  # fmt: skip
def test_wrong_edges(place: int, value: object, message: str) -> None:
    args = list(arguments([(3, 5), (2, 0), (4, 7)], [0, 1, 2]))
    args[place] = value
    with pytest.raises(RuntimeError, match=message):
        join_edges(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize(('place', 'value', 'message'), [
    (0, torch.zeros(3, dtype=torch.int64), 'start must have two dimensions, got 1'),
    (0, torch.full((3, 3), -1), 'graph 0 has invalid rows'),
    (1, torch.tensor([[0, 5, 3, 9]] * 3), 'graph 1 has invalid rows'),
    (1, torch.zeros(3, 3, dtype=torch.int64), 'ptr must have 4 columns'),
    (2, 3, 'start must have a row 3'), (3, 8, 'ptr must end with 8'),
])  # fmt: skip
def test_wrong_rows(place: int, value: object, message: str) -> None:
    _, _, start, ptr, *_ = arguments([(3, 5), (2, 0), (4, 7)], [0, 1, 2])
    args = [start, ptr, 1, 9, 9]
    args[place] = value
    with pytest.raises(RuntimeError, match=message):
        graph_rows(*args)  # type: ignore[arg-type]
