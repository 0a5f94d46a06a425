"""Graphs of plain and prepared edge lists, and what is kept on an EdgeIndex."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from _profile import sorts_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fast.graph import Graph, graph_of, prepare_edge_index
from pyg_fast.graph.graph import cache_of, has_loops
from pyg_fast.ops import spmm, to_csr

from ._graphs import GRAPHS, Edges, edge_lists

SQUARE = GRAPHS['square']


def entries(graph: Graph, transpose: bool = False) -> list[tuple[int, int, int]]:
    """(source, destination, position in edge_weight) of every edge, sorted."""
    rowptr, col, perm = graph[3:6] if transpose else graph[:3]
    row = torch.arange(rowptr.size(0) - 1).repeat_interleave(rowptr.diff().cpu().long()).tolist()
    col = col.tolist()[: len(row)]
    perm = list(range(len(row))) if perm is None else perm.tolist()[: len(row)]
    ends = (row, col) if transpose else (col, row)
    return sorted(zip(*ends, perm, strict=True))


def assert_graph(graph: Graph, edge_index: Tensor, drop_loops: bool = False) -> None:
    """The graph and its transpose hold exactly these edges."""
    data = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    edges = zip(*data.tolist(), range(data.size(1)), strict=True)
    expected = sorted(e for e in edges if not (drop_loops and e[0] == e[1]))
    assert {t.device for t in graph if isinstance(t, Tensor)} == {data.device}
    assert entries(graph) == expected
    assert entries(graph, transpose=True) == expected
    assert graph.num_edges == data.size(1)


def sorted_edge_index(edges: Edges, order: str | None, device: torch.device) -> EdgeIndex:
    data = edges.edge_index.to(device)
    if order is not None:
        data = data[:, data[0 if order == 'row' else 1].argsort(stable=True)]
    size = edges.num_src, edges.num_dst
    return EdgeIndex(data.contiguous(), sparse_size=size, sort_order=order)


@given(edge_lists(), st.booleans(), st.sampled_from(['plain', None, 'row', 'col', 'prepared']))
def test_any_graph(device: torch.device, edges: Edges, drop_loops: bool, kind: str | None) -> None:
    if kind == 'plain':
        edge_index = edges.edge_index.to(device)
    elif kind == 'prepared':
        edge_index, _ = prepare_edge_index(edges.edge_index.to(device), edges[1:])
    else:
        edge_index = sorted_edge_index(edges, kind, device)
    graph = graph_of(edge_index, *edges[1:], drop_loops=drop_loops)
    assert_graph(graph, edge_index, drop_loops)
    swapped = graph.t()
    assert (swapped.num_src, swapped.num_dst) == (edges.num_dst, edges.num_src)
    assert swapped.t() == graph or all(a is b for a, b in zip(swapped.t(), graph, strict=True))


def test_transpose_on_demand() -> None:
    graph = graph_of(SQUARE.edge_index, 30, 30, transpose=False)
    assert graph.t_rowptr is graph.t_col is graph.t_perm is None
    assert entries(graph) == entries(graph_of(SQUARE.edge_index, 30, 30))


@pytest.mark.parametrize('order', ['row', 'col'])
def test_sorted_edges_need_no_permutation(device: torch.device, order: str) -> None:
    graph = graph_of(sorted_edge_index(SQUARE, order, device), 30, 30)
    assert (graph.perm is None, graph.t_perm is None) == (order == 'col', order == 'row')


def test_int64_where_int32_cannot_count_edges(
    device: torch.device, limits: Callable[..., None]
) -> None:
    x = torch.randn(30, 5, device=device, requires_grad=True)
    results = []
    for limit in (2**31, 100):
        limits(edges_of_int32=limit)
        for edge_index in (
            SQUARE.edge_index.to(device),
            sorted_edge_index(SQUARE, 'col', device),
            prepare_edge_index(SQUARE.edge_index.to(device), (30, 30))[0],
        ):
            graph = graph_of(edge_index, 30, 30)
            dtypes = {t.dtype for t in (graph.rowptr, graph.perm, graph.t_rowptr, graph.t_perm)
                      if t is not None}  # fmt: skip
            assert dtypes == {torch.int64 if limit == 100 else torch.int32}
            assert graph.col.dtype == graph.t_col.dtype == torch.int32
            for reduce in ('mean', 'max'):
                out = spmm(edge_index, x, None, reduce)
                results.append((reduce, out, *torch.autograd.grad(out.sum(), x)))
    for reduce in ('mean', 'max'):
        first, *others = (result[1:] for result in results if result[0] == reduce)
        for other in others:
            torch.testing.assert_close(other, first)


# --- what is kept --------------------------------------------------------------------------------


def prepared(device: torch.device | str = 'cpu') -> EdgeIndex:
    return prepare_edge_index((SQUARE.edge_index % 29).to(device), (30, 30))[0]


def test_derived_once(device: torch.device) -> None:
    for edge_index in (prepared(device), sorted_edge_index(SQUARE, None, device)):
        first = graph_of(edge_index, 30, 30)
        assert graph_of(edge_index, 30, 30) is first
        spmm(edge_index, torch.randn(30, 2, device=device))
        assert graph_of(edge_index, 30, 30) is first
        without = graph_of(edge_index, 30, 30, drop_loops=True)
        assert graph_of(edge_index, 30, 30, drop_loops=True) is without
        assert without is not first


def test_preparing_fills_the_cache(device: torch.device) -> None:
    edge_index = prepared(device)
    x = torch.randn(30, 2, device=device, requires_grad=True)
    sorts = sorts_of(lambda: spmm(edge_index, x).sum().backward())
    assert not {'to_csr', 'to_csr_csc', 'to_csr_unweighted'} & sorts.keys()


EDITS = {
    'through _data': lambda e: e._data[0].fill_(29),
    'through as_tensor': lambda e: e.as_tensor()[0, 3:].fill_(29),
    'through an item': lambda e: e.__setitem__((0, 5), 29),
    'through a slice': lambda e: e[:, 3:][0].fill_(29),
    'sources filled': lambda e: e[0].fill_(3),
    'clamp': lambda e: e.clamp_(max=20),
    'add': lambda e: (e.add_(1), e.sparse_resize_(30, 30)),
    'copy': lambda e: e.copy_(prepared().flip(0).sort_by('col')[0].as_tensor()),
    'data replaced': lambda e: setattr(e, '_data', e._data.clone().clamp_(min=4)),
}


@pytest.mark.parametrize('edit', EDITS)
@pytest.mark.parametrize('used_before', [False, True])
def test_rebuilt_after_edits_in_place(device: torch.device, edit: str, used_before: bool) -> None:
    edge_index = prepared(device)
    if used_before:
        has_loops(edge_index)
        graph_of(edge_index, 30, 30, drop_loops=True)
        spmm(edge_index, torch.randn(30, 2, device=device))
    before = edge_index.as_tensor().clone()
    EDITS[edit](edge_index)
    assert not torch.equal(before, edge_index.as_tensor())
    data = edge_index.as_tensor()
    assert_graph(graph_of(edge_index, 30, 30), data)
    assert_graph(graph_of(edge_index, 30, 30, drop_loops=True), data, drop_loops=True)
    assert has_loops(edge_index) == (data[0] == data[1]).any()


def test_edit_that_breaks_the_order_is_noticed(device: torch.device) -> None:
    edge_index = prepared(device)
    edge_index[1, 0] = 25
    with pytest.raises(ValueError, match="claims to be sorted by 'col' but is not"):
        graph_of(edge_index, 30, 30)


def test_edit_that_leaves_the_graph_is_noticed(device: torch.device) -> None:
    edge_index = prepared(device)
    edge_index[0, 0] = 30
    with pytest.raises(IndexError, match='sources'):
        spmm(edge_index, torch.randn(30, 2, device=device))


def test_wrong_caches_of_an_edge_index_are_not_read(device: torch.device) -> None:
    edge_index = sorted_edge_index(SQUARE, 'col', device).fill_cache_()
    edge_index._indptr = edge_index._indptr.flip(0)
    edge_index._T_perm = edge_index._T_perm.flip(0)
    edge_index._T_index = tuple(t.flip(0) for t in edge_index._T_index)
    assert_graph(graph_of(edge_index, 30, 30), edge_index)


@pytest.mark.parametrize(
    'other',
    [
        lambda e: e.clone(),
        lambda e: e.to('cpu'),
        lambda e: e.contiguous(),
        lambda e: e[:, 5:],
        lambda e: e.flip(0),
        lambda e: e.sort_by('row')[0],
        lambda e: e.detach(),
        copy.deepcopy,
        lambda e: torch.cat([e, e], dim=1),
        lambda e: e.int(),
    ],
)
def test_copies_stand_on_their_own(other: Callable) -> None:
    edge_index = prepared()
    has_loops(edge_index)
    changed = other(edge_index)
    assert_graph(graph_of(changed, 30, 30), changed)
    changed.zero_()
    assert_graph(graph_of(changed, 30, 30), changed)
    assert_graph(graph_of(edge_index, 30, 30), edge_index)


def test_moved_graph_is_rebuilt(device: torch.device) -> None:
    for source, target in (('cpu', device), (device, 'cpu')):
        moved = prepared(source).to(target)
        assert_graph(graph_of(moved, 30, 30), moved)
        assert (
            moved.device == torch.device(target).type
            or moved.device.type == moved._data.device.type
        )


def test_cache_is_not_pickled() -> None:
    edge_index = prepared()
    plain = sorted_edge_index(SQUARE, 'col', torch.device('cpu')).fill_cache_()
    has_loops(edge_index)
    assert cache_of(edge_index)
    assert len(pickle.dumps(edge_index)) < len(pickle.dumps(plain)) + 200
    buffer = io.BytesIO()
    torch.save(edge_index, buffer)
    buffer.seek(0)
    for loaded in (
        pickle.loads(pickle.dumps(edge_index)),
        torch.load(buffer, weights_only=True),
    ):
        assert isinstance(loaded, EdgeIndex)
        assert torch.equal(loaded._indptr, edge_index._indptr)
        assert not loaded.__dict__.get('_pyg_fast_cache')
        assert_graph(graph_of(loaded, 30, 30), edge_index)


def test_inference_mode(device: torch.device) -> None:
    x = torch.randn(30, 4, device=device)
    outside = prepared(device)
    expected = spmm(outside, x)
    with torch.inference_mode():
        inside = prepared(device)
        mixed = EdgeIndex(SQUARE.edge_index.to(device), sparse_size=(30, 30))
        for edge_index in (inside, outside, inside.as_tensor()):
            torch.testing.assert_close(spmm(edge_index, x), expected)
        assert_graph(graph_of(mixed, 30, 30), mixed)
    for edge_index in (inside, outside):
        assert torch.equal(spmm(edge_index, x), expected)
    assert_graph(graph_of(mixed, 30, 30), mixed)


def test_graph_made_in_inference_mode_trains(device: torch.device) -> None:
    edge_index = sorted_edge_index(SQUARE, 'col', device)
    with torch.inference_mode():
        spmm(edge_index, torch.randn(30, 4, device=device))
        inside = prepared(device)
    x = torch.randn(30, 4, device=device, requires_grad=True)
    for graph in (edge_index, inside):
        for reduce in ('sum', 'mean', 'max'):
            spmm(graph, x, None, reduce).sum().backward()


# --- sizes and claims ----------------------------------------------------------------------------


@pytest.mark.parametrize('order', [None, 'row', 'col'])
def test_unknown_size(device: torch.device, order: str | None) -> None:
    data = torch.tensor([[0, 1, 2], [0, 0, 3]], device=device)
    edge_index = EdgeIndex(data, sort_order=order)
    x = torch.randn(6, 3, device=device, requires_grad=True)
    out = spmm(edge_index, x)
    expected = torch.zeros_like(x).index_add(0, data[1], x[data[0]])
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert x.grad.sum(1).tolist() == [3, 3, 3, 0, 0, 0]
    assert_graph(graph_of(edge_index, 3, 9), data)
    with pytest.raises(IndexError, match=r"'edge_index\[1\]' must hold destinations in \[0, 2\)"):
        graph_of(edge_index, 3, 2)


def test_half_known_size(device: torch.device) -> None:
    data = torch.tensor([[0, 1, 2], [0, 0, 3]], device=device)
    x = torch.randn(5, 2, device=device)
    assert spmm(EdgeIndex(data, sparse_size=(None, 7)), x).shape == (7, 2)
    assert spmm(EdgeIndex(data, sparse_size=(5, None)), x).shape == (5, 2)


@pytest.mark.parametrize('order', [None, 'row', 'col'])
def test_rectangular(device: torch.device, order: str | None) -> None:
    edge_index = sorted_edge_index(GRAPHS['wide'], order, device)
    assert spmm(edge_index, torch.randn(70, 2, device=device)).shape == (9, 2)
    with pytest.raises(ValueError, match=r"'x'.*70 source nodes, got \[9, 2\]"):
        spmm(edge_index, torch.randn(9, 2, device=device))


@pytest.mark.parametrize('order', [None, 'row', 'col'])
@pytest.mark.parametrize(('size', 'name'), [((31, 30), 'source'), ((30, 31), 'destination')])
@pytest.mark.parametrize('drop_loops', [False, True])
def test_size_mismatch(
    device: torch.device, order: str | None, size: tuple, name: str, drop_loops: bool
) -> None:
    edge_index = sorted_edge_index(SQUARE, order, device)
    with pytest.raises(ValueError, match=rf"'edge_index' is of size \(30, 30\).* 31 {name} nodes"):
        graph_of(edge_index, *size, drop_loops=drop_loops)


@pytest.mark.parametrize('order', ['row', 'col'])
def test_false_sort_order(device: torch.device, order: str) -> None:
    edge_index = EdgeIndex(SQUARE.edge_index.to(device), sparse_size=(30, 30), sort_order=order)
    with pytest.raises(ValueError, match=f"claims to be sorted by '{order}' but is not"):
        spmm(edge_index, torch.randn(30, 2, device=device))


@pytest.mark.parametrize('order', [None, 'row', 'col'])
@pytest.mark.parametrize(('end', 'wrong'), [(0, -1), (0, 30), (1, -5), (1, 2**40)])
def test_index_out_of_range(device: torch.device, order: str | None, end: int, wrong: int) -> None:
    edges = SQUARE.edge_index.clone()
    edges[end, 17] = wrong
    edge_index = sorted_edge_index(SQUARE._replace(edge_index=edges), order, device)
    for drop_loops in (False, True):
        with pytest.raises(IndexError, match=rf"'edge_index\[{end}\]'"):
            graph_of(edge_index, 30, 30, drop_loops=drop_loops)


def test_undirected(device: torch.device) -> None:
    one_way = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 4, 3, 0]], device=device)
    data = torch.cat([one_way, one_way.flip(0)], dim=1)
    x = torch.randn(6, 3, device=device, requires_grad=True)
    for order in ('row', 'col'):
        edge_index = EdgeIndex(data, sparse_size=(6, 6), is_undirected=True)
        edge_index = edge_index.sort_by(order, stable=True)[0].fill_cache_()
        assert edge_index.is_undirected
        assert_graph(graph_of(edge_index, 6, 6), edge_index)
        value = torch.randn(10, device=device)
        source, destination = edge_index.as_tensor()
        expected = torch.zeros(6, 3, device=device)
        expected = expected.index_add(0, destination, x[source] * value[:, None])
        out = spmm(edge_index, x, value)
        torch.testing.assert_close(out, expected)
        grads = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (out, expected))
        torch.testing.assert_close(*grads)


def test_loops(device: torch.device) -> None:
    loops = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 0]], device=device)
    edge_index = EdgeIndex(loops, sparse_size=(3, 3))
    assert has_loops(edge_index)
    graph = graph_of(edge_index, 3, 3, drop_loops=True)
    assert entries(graph) == [(2, 0, 3)]
    x = torch.arange(3.0, device=device).view(3, 1).requires_grad_()
    value = torch.tensor([9.0, 9.0, 9.0, 5.0], device=device, requires_grad=True)
    for reduce in ('sum', 'mean', 'max', 'min'):
        out = spmm(graph, x, value, reduce)
        assert out.tolist() == [[10], [0], [0]]
        grad_x, grad_value = torch.autograd.grad(out.sum(), (x, value))
        assert grad_x.tolist() == [[0], [0], [5]]
        assert grad_value.tolist() == [0, 0, 0, 2]


def test_graph_without_loops_is_shared(device: torch.device) -> None:
    data = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
    edge_index = EdgeIndex(data, sparse_size=(3, 3))
    assert graph_of(edge_index, 3, 3, drop_loops=True) is graph_of(edge_index, 3, 3)


def test_plain_edge_list_is_that_of_to_csr(device: torch.device) -> None:
    edge_index = SQUARE.edge_index.to(device)
    graph = graph_of(edge_index, 30, 30)
    assert all(map(torch.equal, graph[:3], to_csr(edge_index, 30, 30)))
    assert all(map(torch.equal, graph[3:6], to_csr(edge_index, 30, 30, by='src')))


@pytest.mark.parametrize(
    ('edges', 'size', 'full'),
    [
        ([[0, 1, 2], [1, 2, 0]], (3, 3), (True, True)), ([[0, 0], [1, 2]], (3, 3), (False, False)),
        ([[0, 1, 1], [0, 1, 1]], (3, 2), (True, False)), ([[], []], (2, 2), (False, False)),
    ],
)  # fmt: skip
def test_full_rows(
    edges: list[list[int]], size: tuple[int, int], full: tuple[bool, bool], device: torch.device
) -> None:
    """A prepared graph knows whether each row has an edge."""
    data = torch.tensor(edges, device=device, dtype=torch.long)
    for edge_index in (prepare_edge_index(data, size)[0], EdgeIndex(data, sparse_size=size)):
        graph = graph_of(edge_index, *size)
        assert graph.full == full
        assert graph.t().full == full[::-1]
        assert graph.without_loops().full == (False, False)
    assert graph_of(data, *size).full == (False, False)


def test_a_symmetric_graph_has_one_structure(device: torch.device) -> None:
    one_way = SQUARE.edge_index.unique(dim=1).contiguous().to(device)
    both = torch.cat([one_way, one_way.flip(0)], dim=1).unique(dim=1).contiguous()
    order = torch.randperm(both.size(1), device=device)
    for data in (both, both[:, order].contiguous(), one_way):
        graph = graph_of(EdgeIndex(data, sparse_size=(30, 30)), 30, 30)
        prepared = graph_of(prepare_edge_index(data, (30, 30))[0], 30, 30)
        for each in (graph, prepared):
            assert (each.t_col is each.col) == (each.t_rowptr is each.rowptr) == (data is both)
        if data is both:
            assert graph.with_groups(3, 3).t_groups is not None
    x = torch.randn(30, 5, device=device, dtype=torch.float64, requires_grad=True)
    w = torch.rand(both.size(1), device=device, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(spmm(both, x, w).sin().sum(), (x, w))
    edge_index = EdgeIndex(both, sparse_size=(30, 30))
    actual = torch.autograd.grad(spmm(edge_index, x, w).sin().sum(), (x, w))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
