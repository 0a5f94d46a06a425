"""Groups of edges: samples for the tests of all raw ops, and calls that do not fit together."""

import pytest
import torch
from _raw_ops import ops, reference

from pyg_fast.sparse.group_edges import group_edges

from ._samples import Given, sample


@sample('count_groups')
def count_groups_sample(given: Given) -> dict[str, object]:
    return {'rowptr': given.graph.rowptr, 'size': 3}


@sample('group_edges')
def group_edges_sample(given: Given) -> dict[str, object]:
    rowptr = given.graph.rowptr
    count = ops.count_groups(rowptr, 3)
    num_groups, num_long = count[:, -1].tolist()
    return {
        'rowptr': rowptr, 'count': count, 'size': 3, 'num_groups': num_groups, 'num_long': num_long
    }  # fmt: skip


@sample('order_groups')
def order_groups_sample(given: Given) -> dict[str, object]:
    groups = ops.group_edges(**group_edges_sample(given))
    names = ('ptr', 'row', None, 'long_ptr', 'long_shift')
    return {name: t for name, t in zip(names, groups, strict=True) if name} | {'size': 3}


@pytest.mark.parametrize('size', [1, 100_000])
def test_order_of_long_rows_and_groups(size: int, device: torch.device) -> None:
    rowptr = torch.tensor([0, 2, 80_002, 120_002, 120_003], device=device)
    (ptr, row, _, long_ptr, long_shift), _, _, order = group_edges(rowptr, size)
    assert order.equal(reference.order_groups(ptr, row, long_ptr, long_shift, size))
    if size > 1:  # Lengths from 32,767 on count as equal.
        assert order.tolist() == [1, 2, 0, 3]


def test_more_rows_than_a_scan_tile(device: torch.device) -> None:
    degree = torch.arange(100_000, device=device) * 7919 % 23
    rowptr = torch.nn.functional.pad(degree.cumsum(0), (1, 0))
    count = ops.count_groups(rowptr, 4)
    each = ((degree + 3) // 4).clamp(min=1)
    assert count[0, 1:].equal(each.cumsum(0))
    assert count[1, 1:].equal((each > 1).cumsum(0))
    num_groups, num_long = count[:, -1].tolist()
    ptr, row, long_row, _, _ = ops.group_edges(rowptr, count, 4, num_groups, num_long)
    of = torch.where(row < 0, long_row[(-1 - row).clamp(min=0)], row)
    assert of.equal(torch.arange(100_000, device=device).repeat_interleave(each))
    assert ptr.diff().max() == 4
    assert ptr.diff().sum() == rowptr[-1]


def test_counts_that_do_not_fit(device: torch.device) -> None:
    rowptr = torch.tensor([0, 3, 4], device=device)
    count = ops.count_groups(rowptr, 2)
    assert count.tolist() == [[0, 2, 3], [0, 1, 1]]
    for bad in ((count[:, :2], 2, 3, 1), (count.int(), 2, 3, 1), (count, 0, 3, 1),
                (count, 2, 1, 1), (count, 2, 3, 3), (count, 2, 3, -1)):  # fmt: skip
        with pytest.raises(RuntimeError):
            ops.group_edges(rowptr, *bad)
