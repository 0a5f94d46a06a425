"""The raw op gcn_scale: the normalisation of weighted edges that are sorted."""

import pytest
import torch
from _raw_ops import ops, reference
from torch import Tensor

from ._graphs import DTYPES
from ._samples import Given, sample


@sample('gcn_scale')
def _(given: Given) -> dict[str, object]:
    last = torch.randint(-1, given.num_edges, (given.num_nodes,), device=given.device)
    return dict(
        rowptr=given.graph.rowptr, perm=given.perm, value=given.exact(given.num_edges).abs() + 1,
        last_loop=given.optional(last), fill_value=2.0, loops=given.full,
    )  # fmt: skip


def rows_of(kind: str) -> list[int]:
    """Numbers of edges of rows."""
    generator = torch.Generator().manual_seed(len(kind))

    def draw(most: int, count: int) -> list[int]:
        return torch.randint(most + 1, (count,), generator=generator).tolist()

    return {
        'none': [],
        'empty': [0] * 70,
        'one': [1],
        'small': draw(5, 300),
        'small hub': [*draw(5, 40), 9000, 0, 257, *draw(3, 40)],
        # Past what one launch takes: with 4, 8 and 32 threads for a row.
        'short': [*draw(8, 20_000), 0, 0],
        'short and a hub': [0, *draw(4, 9000), 60_000, *draw(4, 9000)],
        'middle': [*draw(60, 3000), *[0] * 2000, *draw(60, 3000)],
        'long': [*draw(600, 300), 4096, 4095, 4097, *[0] * 10],
        'hubs': [1, 50_000, 0, 70_001, 3, 100, 40_000],
        'one row': [300_000],
    }[kind]


KINDS = [
    'none', 'empty', 'one', 'small', 'small hub', 'short', 'short and a hub', 'middle', 'long',
    'hubs', 'one row',
]  # fmt: skip


def graph(kind: str, index: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    degree = torch.tensor(rows_of(kind), dtype=torch.long)
    rowptr = torch.nn.functional.pad(degree.cumsum(0), (1, 0))
    return rowptr.to(device, index), int(rowptr[-1])


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('loops', [False, True])
def test_against_torch(device: torch.device, kind: str, dtype: torch.dtype, loops: bool) -> None:
    for index in (torch.int32, torch.int64):
        rowptr, num_edges = graph(kind, index, device)
        n = rowptr.size(0) - 1
        # Longer than the edges need, and not where vectors begin.
        value = torch.rand(num_edges + 9, device=device).add(0.5).to(dtype)[1:]
        last = torch.randint(-1, num_edges + 8, (n,), device=device) if loops else None
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        for perm in (None, torch.randperm(num_edges, device=device).to(index)):
            for at in (None, last) if loops else (None,):
                expected = reference.gcn_scale(rowptr, perm, value, at, 0.5, loops)
                for own in (value, value.clone()):
                    args = rowptr, perm, own, at, 0.5, loops
                    scale, diag = ops.gcn_scale(*args)
                    assert scale.dtype == diag.dtype == acc
                    tolerance = 1e-12 if acc == torch.float64 else 3e-5  # of long sums
                    for a, e in zip((scale, diag), expected, strict=True):
                        torch.testing.assert_close(a.double(), e, rtol=tolerance, atol=0)
                    again = ops.gcn_scale(*args)
                    assert torch.equal(scale, again[0])
                    assert torch.equal(diag, again[1])


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('kind', ['small', 'middle'])
def test_values_of_which_there_is_no_root(
    device: torch.device, dtype: torch.dtype, kind: str
) -> None:
    rowptr, num_edges = graph(kind, torch.int32, device)
    value = torch.randint(-2, 3, (num_edges,), device=device).to(dtype)
    value[::97] = float('inf')
    value[::89] = float('nan')
    value[::83] = -0.0
    row = torch.repeat_interleave(rowptr.diff().long())
    degree = torch.zeros(rowptr.size(0) - 1, dtype=torch.float64, device=device)
    degree.index_add_(0, row, value.double())
    expected = degree.pow(-0.5)
    expected = expected.masked_fill(expected == float('inf'), 0)
    actual, diag = ops.gcn_scale(rowptr, None, value, None, 1.0, False)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0, equal_nan=True)
    assert diag.numel() == 0
    assert (actual == 0).any()
    assert actual.isnan().any()


def test_no_result_depends_on_the_number_of_threads() -> None:
    rowptr, num_edges = graph('long', torch.int32, torch.device('cpu'))
    value = torch.rand(num_edges)
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 16):
            torch.set_num_threads(number)
            results.append(ops.gcn_scale(rowptr, None, value, None, 1.0, True))
    finally:
        torch.set_num_threads(threads)
    for result in results:
        assert all(map(torch.equal, result, results[0]))


def test_edges_beyond_the_values_are_not_read(device: torch.device) -> None:
    for kind in ('small', 'middle', 'hubs'):
        rowptr, num_edges = graph(kind, torch.int32, device)
        value = torch.ones(num_edges - 5, device=device)
        for perm in (None, torch.arange(num_edges - 5, dtype=torch.int32, device=device)):
            if device.type == 'cpu':
                with pytest.raises(RuntimeError, match='rowptr names'):
                    ops.gcn_scale(rowptr, perm, value, None, 1.0, False)
            else:
                assert ops.gcn_scale(rowptr, perm, value, None, 1.0, False)[0].isfinite().all()
