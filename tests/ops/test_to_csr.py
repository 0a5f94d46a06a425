"""Sorting into CSR: against the twin, at any size, and bad input."""

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pyg_fast.ops import reference, to_csr
from pyg_fast.ops.to_csr import fits_int32

from ._graphs import GRAPHS, Edges, edge_lists

MODULE = import_module('pyg_fast.ops.to_csr')  # its name is the function's too


def check(device: torch.device, edges: Edges, dtype: torch.dtype, by: str, drop: bool) -> None:
    edge_index = edges.edge_index.to(device, dtype)
    actual = to_csr(edge_index, edges.num_src, edges.num_dst, by=by, drop_loops=drop)
    sizes = edges.num_dst, edges.num_src
    row, col = edge_index.flip(0)
    if by == 'src':
        row, col, sizes = col, row, sizes[::-1]
    expected = reference.to_csr(row, col, *sizes, False, drop)
    assert expected[3] == 0
    for a, e in zip(actual, expected, strict=False):
        assert a.device == edge_index.device
        assert a.dtype == torch.int32
        assert torch.equal(a, e)


@pytest.mark.parametrize('name', GRAPHS)
@pytest.mark.parametrize('by', ['dst', 'src'])
@pytest.mark.parametrize('drop_loops', [False, True])
def test_named_graphs(device: torch.device, name: str, by: str, drop_loops: bool) -> None:
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        check(device, GRAPHS[name], dtype, by, drop_loops)


@given(edge_lists(), st.sampled_from(['dst', 'src']), st.booleans())
def test_any_graph(device: torch.device, edges: Edges, by: str, drop_loops: bool) -> None:
    check(device, edges, torch.int64, by, drop_loops)


@pytest.mark.parametrize('num_src', [1, 2, 1000, 300_000])
@pytest.mark.parametrize('num_edges', [1, 8191, 19_999, 20_000, 50_001, 200_000])
def test_sizes(device: torch.device, num_src: int, num_edges: int) -> None:
    # Around the steps at which threads and buckets come in; most edges in one corner.
    draw = torch.rand(2, num_edges, dtype=torch.float64).pow(3)
    for num_dst in (1, 100_003):
        edge_index = (draw * torch.tensor([[num_src], [num_dst]])).long()
        for by in ('dst', 'src'):
            check(device, Edges(edge_index, num_src, num_dst), torch.int64, by, True)


def test_layouts(device: torch.device) -> None:
    pairs = torch.randint(50, (300, 2), device=device)
    expected = to_csr(pairs.t().contiguous(), 50, 50)
    wide = torch.randint(50, (5, 601), device=device)
    wide[::2, 1::2][:2] = pairs.t()
    for edge_index in (pairs.t(), wide[::2, 1::2][:2]):
        assert not edge_index.is_contiguous()
        assert all(map(torch.equal, to_csr(edge_index, 50, 50), expected))
    loops = torch.arange(9, device=device).expand(2, 9)
    assert to_csr(loops, 9, 9)[1].tolist() == list(range(9))


def test_int64_where_int32_cannot_count(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge_index = GRAPHS['square'].edge_index.to(device)
    narrow = to_csr(edge_index, 30, 30)
    assert {t.dtype for t in narrow} == {torch.int32}
    for limit in (30, 200):  # 30 nodes, 200 edges
        monkeypatch.setattr(MODULE, '_INT32_MAX', limit)
        wide = to_csr(edge_index, 30, 30)
        assert {t.dtype for t in wide} == {torch.int64}
        assert all(torch.equal(w, n.long()) for w, n in zip(wide, narrow, strict=True))


def test_fits_int32() -> None:
    assert fits_int32(0, 2**31 - 2048)
    assert not fits_int32(5, 2**31)
    assert not fits_int32(2**40, 5)


@pytest.mark.parametrize('by', ['dst', 'src'])
@pytest.mark.parametrize('drop_loops', [False, True])
@pytest.mark.parametrize(
    ('end', 'wrong', 'message'),
    [
        (0, 7, r"'edge_index\[0\]' must hold sources in \[0, 7\), got values from 0 to 7"),
        (0, -1, r"'edge_index\[0\]' must hold sources in \[0, 7\), got values from -1 to"),
        (1, 5, r"'edge_index\[1\]' must hold destinations in \[0, 5\), got values from 0 to 5"),
        (1, -(2**40), r"'edge_index\[1\]' must hold destinations in \[0, 5\), got values from -"),
        (1, 2**32, r"'edge_index\[1\]' must hold destinations"),  # 0 as int32
    ],
)
def test_index_out_of_range(
    device: torch.device, by: str, drop_loops: bool, end: int, wrong: int, message: str
) -> None:
    for position in (0, 150, 299):
        edge_index = torch.stack([torch.arange(300) % 7, torch.arange(300) % 5]).to(device)
        edge_index[end, position] = wrong
        with pytest.raises(IndexError, match=message):
            to_csr(edge_index, 7, 5, by=by, drop_loops=drop_loops)


@pytest.mark.parametrize(
    ('error', 'message', 'edge_index', 'options'),
    [
        (TypeError, "'edge_index' must be a tensor, got list", [[0], [0]], {}),
        (TypeError, "'edge_index' must hold integers", torch.zeros(2, 3), {}),
        (TypeError, "'edge_index' must hold integers", torch.zeros(2, 3).bool(), {}),
        (TypeError, 'strided', torch.zeros(2, 3, dtype=torch.long).to_sparse(), {}),
        (ValueError, r'\[2, num_edges\], got \[3\]', torch.zeros(3).long(), {}),
        (ValueError, r'\[2, num_edges\], got \[3, 2\]', torch.zeros(3, 2).long(), {}),
        (ValueError, r'\[2, num_edges\], got \[2, 3, 1\]', torch.zeros(2, 3, 1).long(), {}),
        (ValueError, "'by' must be", torch.zeros(2, 3).long(), {'by': 'row'}),
        (ValueError, "'num_src'.*-1, 4", torch.zeros(2, 3).long(), {'num_src': -1}),
        (ValueError, "'num_dst'.*4, -2", torch.zeros(2, 3).long(), {'num_dst': -2}),
    ],
)
def test_bad_input(error: type, message: str, edge_index: object, options: dict) -> None:
    with pytest.raises(error, match=message):
        to_csr(edge_index, **{'num_src': 4, 'num_dst': 4, **options})
