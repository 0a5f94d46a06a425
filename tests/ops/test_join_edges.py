"""The edges of a batch of graphs, beside a loop over its graphs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.ops._library import reference
from pyg_fast.ops.join_edges import join_edges

Arguments = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


def arguments(sizes: list[tuple[int, int]], ids: list[int], extra: int = 0) -> Arguments:
    """Random numbers for graphs with so many nodes and edges, and a batch of some of them."""
    rows = torch.tensor(sizes).view(-1, 2).t()
    first = rows.cumsum(1) - rows
    chosen = rows[:, ids]
    ptr = torch.nn.functional.pad(chosen.cumsum(1), (1, 0))
    num_nodes, num_edges = rows.sum(1).tolist()
    return (
        torch.randint(9, (num_edges, 4), dtype=torch.int32),
        torch.randint(9, (num_nodes, 2), dtype=torch.int32), first[:, ids].contiguous(),
        ptr.contiguous(), len(ids), int(ptr[0, -1]) + extra, int(ptr[1, -1]) + extra,
    )  # fmt: skip


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=6),
    choice=st.lists(st.integers(0, 99), max_size=8), extra=st.integers(0, 3),
)  # fmt: skip
def test_as_a_loop(sizes: list[tuple[int, int]], choice: list[int], extra: int) -> None:
    args = arguments(sizes, [k % len(sizes) for k in choice], extra)
    edges, rowptr = join_edges(*args)
    wanted = reference.join_edges(*args)
    count = int(args[3][1, -1])
    assert (edges.dtype, rowptr.dtype) == (torch.int32, torch.int32)
    assert edges.shape == wanted[0].shape
    assert torch.equal(edges[:, :count], wanted[0][:, :count])
    assert torch.equal(rowptr, wanted[1])


@pytest.mark.usefixtures('several_threads')
def test_several_threads() -> None:
    args = arguments([(30, 60)] * 5000, list(range(4999, -1, -1)))
    for got, wanted in zip(join_edges(*args), reference.join_edges(*args), strict=True):
        assert torch.equal(got, wanted)


def test_opcheck() -> None:
    args = arguments([(3, 5), (2, 0), (4, 7)], [2, 0, 2])
    torch.library.opcheck(torch.ops.pyg_fast.join_edges.default, args)


@pytest.mark.parametrize(('place', 'value', 'message'), [
    (0, torch.zeros(12, 3, dtype=torch.int32), 'ends must have shape'),
    (0, torch.zeros(12, 4), 'ends must be Int'),
    (0, torch.zeros(8, 4, dtype=torch.int32), 'graph 2 has edges outside of the dataset'),
    (1, torch.zeros(8, 2, dtype=torch.int32), 'graph 2 has nodes outside of the dataset'),
    (2, torch.zeros(2, 2, dtype=torch.int64), r'start must have shape \[2, 3\]'),
    (3, torch.zeros(2, 4, dtype=torch.int32), 'ptr must be Long'),
    (3, torch.tensor([[0, 3, 1, 4], [0] * 4]), 'graph 1 has nodes outside of the dataset'),
    (4, -1, 'num_graphs must not be negative'),
    (5, 5, 'the batch must have from 9 to'),
    (6, 2**31, 'the batch must have from 12 to'),
])  # fmt: skip
def test_wrong_arguments(place: int, value: object, message: str) -> None:
    args = list(arguments([(3, 5), (2, 0), (4, 7)], [0, 1, 2]))
    args[place] = value
    with pytest.raises(RuntimeError, match=message):
        join_edges(*args)  # type: ignore[arg-type]
