"""PreparedGraph: in place of an EdgeIndex, as a container of tensors, and what it refuses."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from pyg_fast import nn, ops
from pyg_fast.graph import Graph, PreparedGraph, graph_of, set_group_sizes
from pyg_fast.graph import graph as graph_module
from pyg_fast.graph.csr import prepare_graph
from pyg_fast.graph.graph import cache_of, has_loops
from pyg_fast.graph.signature import signature_of
from tests._profile import sorts_of
from tests.ops._graphs import GRAPHS, Edges, edge_lists

SQUARE = GRAPHS['square']


def lean(edges: Edges, device: torch.device | str = 'cpu') -> PreparedGraph:
    return PreparedGraph(prepare_graph([edges.edge_index.to(device)], edges[1:]))


def entries(graph: Graph) -> tuple[list, list]:
    """Both structures as sorted (row, column, position)."""
    found = []
    for part in (graph, graph.t()):
        count = int(part.rowptr[-1])
        row = torch.arange(part.num_dst).repeat_interleave(part.rowptr.diff().cpu().long())
        perm = torch.arange(count) if part.perm is None else part.perm[:count].cpu()
        found.append(sorted(zip(row.tolist(), part.col[:count].tolist(), perm.tolist(),
                                strict=True)))  # fmt: skip
    return found[0], found[1]


@pytest.fixture(params=[None, 7])
def chunk(request: pytest.FixtureRequest, limits: Callable[..., None]) -> None:
    """Edges in one chunk, or in many."""
    if request.param is not None:
        limits(chunk_of_edges=request.param)


# --- in place of an EdgeIndex --------------------------------------------------------------------


def test_sorted_list_and_fixed_size(device: torch.device) -> None:
    prepared = lean(SQUARE, device)
    listed = prepared.to_edge_index()
    by_row, expected = prepared.sort_by('row'), listed.sort_by('row')
    assert torch.equal(by_row.values.as_tensor(), expected.values.as_tensor())
    assert torch.equal(by_row.indices, expected.indices)
    assert prepared.sort_by('col').values is prepared
    with pytest.raises(TypeError, match='sparse_resize_ would write'):
        prepared.sparse_resize_(100, 100)


@pytest.mark.parametrize('name', GRAPHS)
@pytest.mark.parametrize('drop_loops', [False, True])
@pytest.mark.parametrize('values', [False, True])
@pytest.mark.usefixtures('chunk')
def test_graph_is_that_of_the_edge_index(
    device: torch.device, name: str, drop_loops: bool, values: bool
) -> None:
    edges = GRAPHS[name]
    prepared = lean(edges, device)
    listed = prepared.to_edge_index()
    assert type(listed) is EdgeIndex
    order = edges.edge_index[1].argsort(stable=True)
    assert torch.equal(listed.as_tensor().cpu(), edges.edge_index[:, order])
    graph, expected = (
        graph_of(each, *edges[1:], drop_loops=drop_loops, values=values)
        for each in (prepared, listed)
    )
    if values:
        assert graph.missing is None
        assert entries(graph) == entries(expected)
    else:
        for part, other in ((graph, expected), (graph.t(), expected.t())):
            count = int(other.rowptr[-1])
            assert torch.equal(part.rowptr, other.rowptr)
            assert torch.equal(part.col[:count], other.col[:count])
    assert graph_of(prepared, *edges[1:], drop_loops=drop_loops, values=values) is graph
    assert has_loops(prepared) == has_loops(listed)
    assert signature_of(prepared) == signature_of(listed)
    assert tuple(prepared.sparse_size()) == edges[1:]
    assert (prepared.num_src, prepared.num_dst) == edges[1:]
    assert prepared.num_edges == prepared.size(1) == edges.edge_index.size(1)


@given(edge_lists())
def test_any_graph(device: torch.device, edges: Edges) -> None:
    prepared = lean(edges, device)
    graph = graph_of(prepared, *edges[1:])
    assert entries(graph) == entries(graph_of(prepared.to_edge_index(), *edges[1:]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, '_SMALL', -1)  # as large graphs
        plain = graph_of(edges.edge_index.to(device), *edges[1:], values=False)
    assert plain.missing == 'perm and t_perm'
    assert all(map(torch.equal, plain[:2], prepared.graph[:2]))
    assert all(map(torch.equal, plain[3:5], prepared.graph[3:5]))


@pytest.mark.usefixtures('chunk')
def test_any_order_of_the_edges(device: torch.device) -> None:
    edge_index = SQUARE.edge_index.to(device)
    graph = graph_of(edge_index, 30, 30)
    for each, expected in ((graph, edge_index), (graph.t(), edge_index.flip(0))):
        prepared = PreparedGraph(each)
        assert torch.equal(prepared.to_edge_index().as_tensor(), expected)
        assert signature_of(prepared) == signature_of(expected)
        assert entries(graph_of(prepared, 30, 30)) == entries(graph_of(expected, 30, 30))
    turned = PreparedGraph(lean(SQUARE, device).graph.t())
    assert turned.graph.missing == 'perm'
    listed = turned.to_edge_index()
    assert signature_of(turned) == signature_of(listed)
    assert entries(graph_of(turned, 30, 30)) == entries(graph_of(listed, 30, 30))


def test_symmetric_graph_has_one_structure(device: torch.device) -> None:
    edge_index = torch.cat([SQUARE.edge_index, SQUARE.edge_index.flip(0)], 1)  # in any order
    prepared = lean(Edges(edge_index, 30, 30), device)
    assert sorted(prepared.t().tolist()) == sorted(edge_index.t().tolist())
    for values, drop_loops in ((False, False), (False, True)):
        graph = graph_of(prepared, 30, 30, values=values, drop_loops=drop_loops)
        assert graph.t_rowptr is graph.rowptr
        assert graph.t_col is graph.col
    for other in (prepared.clone(), copy.deepcopy(prepared), prepared.cpu(),
                  pickle.loads(pickle.dumps(prepared))):  # fmt: skip
        assert other.graph.t_col is other.graph.col
        assert other.graph.t_rowptr is other.graph.rowptr
    listed = prepared.to_edge_index()
    assert entries(graph_of(prepared, 30, 30)) == entries(graph_of(listed, 30, 30))
    bytes_of_both = sum(t.numel() * 4 for t in prepared.graph[:2])
    assert prepared.num_bytes == bytes_of_both


def test_equal_degrees_are_not_symmetry(device: torch.device) -> None:
    ring = torch.stack([torch.arange(30), torch.arange(1, 31) % 30])
    graph = lean(Edges(ring, 30, 30), device).graph
    assert graph.t_col is not graph.col
    assert (graph.col.tolist(), graph.t_col.tolist()) == (
        [29, *range(29)], [*range(1, 30), 0]
    )  # fmt: skip


def test_torch_and_pyg_see_the_list(device: torch.device) -> None:
    prepared = lean(SQUARE, device)
    plain = prepared.to_edge_index().as_tensor()
    assert torch.equal(prepared[0].as_tensor(), plain[0])
    assert torch.equal(torch.as_tensor(prepared + 1), plain + 1)
    assert torch.equal(prepared.flip(0).as_tensor(), plain.flip(0))
    assert torch.equal(torch.cat([prepared, plain], 1), torch.cat([plain, plain], 1))
    assert int(prepared.max()) == 29
    assert prepared.tolist() == plain.tolist()
    data = Data(edge_index=prepared)
    assert (data.num_nodes, data.num_edges) == (30, plain.size(1))
    assert data.has_self_loops() == bool((plain[0] == plain[1]).any())
    assert prepared.to(torch.int32).dtype == torch.int32


def test_is_not_written(device: torch.device) -> None:
    prepared = lean(SQUARE, device)
    before = prepared.to_edge_index().as_tensor()
    writes: list[Callable[[], object]] = [
        lambda: prepared.add_(1), lambda: prepared.zero_(), lambda: prepared.copy_(before),
        lambda: torch.add(before, 1, out=prepared), lambda: prepared.__setitem__((0, 0), 3),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(TypeError, match='would write a PreparedGraph'):
            write()
    with pytest.raises(TypeError, match='make a batch of edge_index'):
        torch.cat([prepared, prepared])
    assert torch.equal(prepared.to_edge_index().as_tensor(), before)


def test_group_sizes(device: torch.device) -> None:
    prepared = lean(SQUARE, device)
    first = graph_of(prepared, 30, 30)
    set_group_sizes(prepared, 3, 5)
    for drop_loops in (False, True):
        graph = graph_of(prepared, 30, 30, drop_loops=drop_loops)
        assert (graph.groups.size, graph.t_groups.size) == (3, 5)
    assert graph_of(prepared, 30, 30).col is first.col
    assert prepared.clone().graph.groups.size == 3


def test_wide_positions(device: torch.device, limits: Callable[..., None]) -> None:
    narrow = lean(SQUARE, device)
    limits(edges_of_int32=100)
    wide = lean(SQUARE, device)
    assert {t.dtype for t in (wide.graph.rowptr, wide.graph.t_rowptr)} == {torch.int64}
    assert {t.dtype for t in (wide.graph.col, wide.graph.t_col)} == {torch.int32}
    assert entries(graph_of(wide, 30, 30)) == entries(graph_of(narrow, 30, 30))
    x = torch.randn(30, 5, device=device, requires_grad=True)
    outs = [ops.spmm(each, x) for each in (wide, narrow)]
    grads = [torch.autograd.grad(out.square().sum(), x) for out in outs]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gat'])
def test_compiles(device: torch.device, conv: str) -> None:
    torch._dynamo.reset()
    layer = {
        'gcn': lambda: nn.PathPreparedGCNConv(6, 4), 'sage': lambda: nn.PathPreparedSAGEConv(6, 4),
        'gat': lambda: nn.FusedGATConv(6, 4),
    }[conv]().to(device)  # fmt: skip
    prepared = lean(SQUARE, device)  # which has self-loops
    x = torch.randn(30, 6, device=device, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    results = []

    def step(run: Any) -> None:
        out = run(x, prepared)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))

    for run in (compiled, layer, compiled):
        step(run)
    # It finds what the layer has cached, and makes no list of edges.
    assert not sorts_of(lambda: step(compiled))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


# --- a container of tensors ----------------------------------------------------------------------


def loaded(prepared: PreparedGraph) -> PreparedGraph:
    file = io.BytesIO()
    torch.save({'graph': prepared}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)['graph']


def test_copies(device: torch.device) -> None:
    prepared = lean(SQUARE, device)
    set_group_sizes(prepared, 4, 4)
    cache_of(prepared)
    for other in (
        copy.copy(prepared), copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)),
        loaded(prepared), prepared.clone(), prepared.to(device), prepared.to('cpu', copy=True),
        prepared.cpu(), lean(SQUARE).share_memory_(), Data(edge_index=prepared).clone().edge_index,
        Data(edge_index=prepared).to(device).edge_index,
    ):  # fmt: skip
        assert type(other) is PreparedGraph
        assert other.graph.missing == 't_perm'
        for a, b in zip(other.graph[:5], prepared.graph[:5], strict=True):
            assert a is b is None or torch.equal(a.cpu(), b.cpu())
    assert prepared.clone().graph.col.data_ptr() != prepared.graph.col.data_ptr()
    assert prepared.to(device) is prepared
    assert lean(SQUARE).share_memory_().is_shared()
    assert 'num_src=30, num_dst=30' in repr(prepared)
    memo: dict = {}
    assert copy.deepcopy(prepared, memo) is copy.deepcopy(prepared, memo)
    if device.type == 'cuda':
        assert prepared.cpu().pin_memory().is_pinned()
        assert prepared.cpu().cuda().device == prepared.device
        prepared.record_stream(torch.cuda.current_stream())


def test_moves_its_schedule(cuda: torch.device, limits: Callable[..., None]) -> None:
    limits(edges_in_groups=20)
    prepared = lean(SQUARE)
    assert prepared.graph.groups is None
    assert prepared.to(cuda).graph.groups is not None


# --- values of edges -----------------------------------------------------------------------------


def test_values_find_their_edges(device: torch.device) -> None:
    prepared = lean(SQUARE, device)
    listed = prepared.to_edge_index()
    x = torch.randn(30, 6, device=device, requires_grad=True)
    weight = torch.rand(prepared.num_edges, device=device, requires_grad=True)
    for reduce in ('sum', 'max'):
        results: list[tuple[Tensor, ...]] = []
        for graph in (prepared, listed):
            out = ops.spmm(graph, x, weight, reduce)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, weight))))
        torch.testing.assert_close(*results)


def test_a_graph_without_positions_takes_no_values(device: torch.device) -> None:
    graph = lean(SQUARE, device).graph
    x = torch.randn(30, 2, 3, device=device)
    score = torch.randn(30, 2, device=device)
    weight = torch.rand(graph.num_edges, device=device)
    flat = x.flatten(1)
    refused: list[Callable[[], object]] = [
        lambda: ops.spmm(graph, flat, weight), lambda: ops.spmm(graph, flat, reduce='max'),
        lambda: ops.aggregate(graph, flat, weight),
        lambda: ops.sampled_spmm(graph, flat, 2, edge_weight=weight),
        lambda: ops.cbsr_spmm(graph, ops.maxk(flat, 2), weight),
        lambda: ops.gat(graph, x, score, score),
    ]  # fmt: skip
    for run in refused:
        with pytest.raises(ValueError, match="'graph' does not store t_perm"):
            run()
    whole = graph.with_positions()
    torch.testing.assert_close(ops.spmm(graph, flat), ops.spmm(whole, flat))
    ops.spmm(whole, flat, weight)
    lost = lean(SQUARE, device).graph.without_loops()
    with pytest.raises(ValueError, match='lost the positions'):
        lost.with_positions()


# --- errors --------------------------------------------------------------------------------------


def test_bad_graphs() -> None:
    graph = lean(SQUARE).graph
    with pytest.raises(TypeError, match="'graph' must be a Graph, got EdgeIndex"):
        PreparedGraph(lean(SQUARE).to_edge_index())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'graph.t_rowptr' must have shape \[31\]"):
        PreparedGraph(graph._replace(t_rowptr=graph.t_rowptr[:-1]))
    dropped = graph_of(SQUARE.edge_index, 30, 30, drop_loops=True)
    with pytest.raises(ValueError, match='must have an edge in each'):
        PreparedGraph(dropped)
    with pytest.raises(ValueError, match='of size'):
        graph_of(lean(SQUARE), 31, 31)
