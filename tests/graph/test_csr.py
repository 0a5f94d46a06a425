"""Edge lists made into sorted EdgeIndex with caches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fast.graph import graph_of, prepare_edge_index
from pyg_fast.ops import spmm
from tests._profile import sorts_of


def assert_prepared(out: EdgeIndex, perm: Tensor, edge_index: Tensor, size: tuple) -> None:
    """Checks that all caches equal those that PyG makes of the stably sorted edges."""
    order = edge_index[1].argsort(stable=True)
    assert torch.equal(perm, order)
    assert perm.dtype == torch.int64
    out.validate()
    assert torch.equal(out.as_tensor(), edge_index.long()[:, order])
    assert tuple(out.sparse_size()) == size
    assert out.sort_order == 'col'
    assert not out.is_undirected
    expected = EdgeIndex(out.as_tensor(), sparse_size=size, sort_order='col').fill_cache_()
    for name in ('_data', '_indptr', '_T_indptr'):
        actual = getattr(out, name)
        assert (actual.dtype, actual.device) == (torch.int64, edge_index.device), name
        assert torch.equal(actual, getattr(expected, name)), name
    # PyG's own sort by row need not be stable, ours is.
    assert torch.equal(out._T_perm, out.as_tensor()[0].argsort(stable=True))
    for actual, end in zip(out._T_index, out.as_tensor(), strict=True):
        assert actual.dtype == torch.int64
        assert torch.equal(actual, end[out._T_perm])


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Tensor, tuple[int, int]]:
    size = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    if 0 in size:
        return torch.empty(2, 0, dtype=torch.long), size
    edge = st.tuples(*(st.integers(0, n - 1) for n in size))
    edges = draw(st.lists(edge, max_size=30))
    dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
    return torch.tensor(edges, dtype=dtype).view(-1, 2).t(), size


@given(inputs())
def test_any_edges(device: torch.device, drawn: tuple[Tensor, tuple[int, int]]) -> None:
    edge_index, size = drawn
    edge_index = edge_index.to(device)
    before = edge_index.clone()
    out, perm = prepare_edge_index(edge_index, size)
    assert torch.equal(edge_index, before)
    assert_prepared(out, perm, edge_index, size)


def test_many_edges(device: torch.device) -> None:
    edge_index = torch.randint(500, (2, 60_000), device=device)
    out, perm = prepare_edge_index(edge_index, (500, 700))
    assert_prepared(out, perm, edge_index, (500, 700))


@pytest.mark.parametrize('order', [None, 'row', 'col'])
def test_of_edge_index(device: torch.device, order: str | None) -> None:
    data = torch.randint(20, (2, 90), device=device)
    if order is not None:
        data = data[:, data[0 if order == 'row' else 1].argsort()]
    edge_index = EdgeIndex(data, sparse_size=(20, 20), sort_order=order)
    out, perm = prepare_edge_index(edge_index, (20, 20))
    assert type(perm) is Tensor
    assert_prepared(out, perm, data, (20, 20))


def test_result_shares_no_memory_with_its_input(device: torch.device) -> None:
    data = torch.arange(9, device=device).expand(2, 9).contiguous()
    for edge_index in (data, EdgeIndex(data, sparse_size=(9, 9), sort_order='col')):
        out, _ = prepare_edge_index(edge_index, (9, 9))
        before = out.as_tensor().clone()
        data.add_(0).clamp_(max=4)
        assert torch.equal(out.as_tensor(), before)
        data.copy_(before)


def test_kernels_find_their_graph(device: torch.device) -> None:
    edge_index = torch.randint(20, (2, 90), device=device)
    out, _ = prepare_edge_index(edge_index, (20, 25))
    ready = graph_of(out, 20, 25)
    fresh = EdgeIndex(out.as_tensor(), sparse_size=(20, 25), sort_order='col')
    for a, b in zip(ready, graph_of(fresh, 20, 25), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def test_caches_serve_pyg(device: torch.device) -> None:
    edge_index = torch.randint(20, (2, 90), device=device)
    out, perm = prepare_edge_index(edge_index, (20, 20))
    x = torch.randn(20, 3, device=device, requires_grad=True)
    value = torch.randn(90, device=device)
    results = []
    for y in (
        out.matmul(x, value[perm], transpose=True),
        torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]] * value[:, None]),
    ):
        results.append((y, *torch.autograd.grad(y.pow(2).sum(), x)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ('error', 'message', 'edge_index', 'size'),
    [
        (IndexError, r"'edge_index\[0\]'.*\[0, 2\)", torch.tensor([[2], [0]]), (2, 9)),
        (IndexError, r"'edge_index\[1\]'.*\[0, 2\)", torch.tensor([[2], [2]]), (9, 2)),
        (IndexError, r"'edge_index\[1\]'.*-1", torch.tensor([[2], [-1]]), (9, 9)),
        (IndexError, r"'edge_index\[0\]'", torch.tensor([[0], [0]]), (0, 0)),
        (TypeError, "'edge_index' must hold integers", torch.zeros(2, 3), (9, 9)),
        (TypeError, "'edge_index' must be a tensor", [[0], [0]], (9, 9)),
        (ValueError, r"'edge_index'.*got \[3, 2\]", torch.zeros(3, 2).long(), (9, 9)),
        (ValueError, "'num_src'.*-1", torch.zeros(2, 0).long(), (-1, 9)),
    ],
)
def test_bad_input(error: type, message: str, edge_index: object, size: tuple) -> None:
    with pytest.raises(error, match=message):
        prepare_edge_index(edge_index, size)


def test_flip(device: torch.device) -> None:
    """The other direction of a prepared graph is prepared, unless its list was changed."""
    torch.manual_seed(0)
    edges, weight = torch.randint(40, (2, 300), device=device), torch.rand(300, device=device)
    x = torch.randn(40, 8, device=device)
    prepared, perm = prepare_edge_index(edges, (40, 40))
    weight = weight[perm]
    spmm(prepared, x, weight)
    flip = prepared.flip(0)
    expected = spmm(flip.as_tensor(), x, weight)
    assert not sorts_of(lambda: spmm(flip, x, weight))
    torch.testing.assert_close(spmm(flip, x, weight), expected)
    torch.testing.assert_close(spmm(flip.flip(0), x, weight), spmm(prepared, x, weight))
    moved, order = prepared.flip(0).sort_by('col')
    torch.testing.assert_close(spmm(moved, x, weight[order]), expected)
    written = prepared.flip(0)
    written._data[1, 0] = (written._data[1, 0] + 1) % 40
    torch.testing.assert_close(spmm(written, x, weight), spmm(written.as_tensor(), x, weight))
