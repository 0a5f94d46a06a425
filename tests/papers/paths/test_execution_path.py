"""Execution paths against sets of nodes and edges counted one by one."""

import contextlib
import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.graph import ExecutionPath, PreparedGraph, execution_paths, prepare_edge_index
from pyg_fast.graph.csr import prepare_graph
from pyg_fast.papers.paths.build import WHOLE, _group_size
from tests.ops._graphs import hubs


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    num_nodes = draw(st.integers(1, 25))
    node = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=60))
    edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t().contiguous()
    if draw(st.integers(0, 4)) == 0:
        share = draw(st.sampled_from([0.1, 0.5, 1.0]))
        edge_index = hubs(num_nodes, num_nodes, 300, share, share, draw(st.booleans())).edge_index
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[draw(st.lists(node, min_size=1, max_size=5))] = True
    return edge_index, mask, draw(st.integers(1, 6))


def sets(edge_index: Tensor, mask: Tensor, num_layers: int) -> list[set[int]]:
    """S_0, ..., S_L by definition."""
    edges = edge_index.t().tolist()
    made = [set(mask.nonzero().view(-1).tolist())]
    for _ in range(num_layers):
        made.append(made[-1] | {src for src, dst in edges if dst in made[-1]})
    return made[::-1]


def listed(path: ExecutionPath, transposed: bool) -> list[tuple[int, ...]]:
    """The edges of a path as (source, destination) and, where it is known, position."""
    rowptr, col, perm = (
        (path.t_rowptr, path.t_col, path.t_perm) if transposed
        else (path.rowptr, path.col, path.perm)
    )  # fmt: skip
    row = torch.arange(rowptr.numel() - 1).repeat_interleave(rowptr.diff().long())
    ends = (row, col.long()) if transposed else (col.long(), row)
    src, dst = (rows.nodes[end] if rows.nodes is not None else end
                for rows, end in zip((path.src, path.dst), ends, strict=True))  # fmt: skip
    columns = [src, dst] if perm is None else [src, dst, perm.long()]
    return sorted(map(tuple, torch.stack(columns, 1).tolist()))


@settings(max_examples=100)
@given(problem=problems(), weighted=st.booleans(), prepared=st.booleans(), forward=st.booleans())
def test_paths_are_what_they_are_defined_as(
    problem: Any, weighted: bool, prepared: bool, forward: bool
) -> None:
    edge_index, mask, num_layers = problem
    if prepared:
        edge_index = prepare_edge_index(edge_index, (mask.numel(),) * 2)[0]
        edges = edge_index.as_tensor()
    else:
        edges = edge_index
    paths = execution_paths(edge_index, mask, num_layers, weighted, forward)
    active = sets(edges, mask, num_layers)
    numbered = [(*ends, k) for k, ends in enumerate(edges.t().tolist()) if ends[0] != ends[1]]
    below = None
    for layer, path in enumerate(paths):
        assert (path.layer, path.num_layers) == (layer, num_layers)
        assert (path.num_nodes, path.num_edges) == (mask.numel(), len(numbered))
        assert (path.num_src, path.num_dst) == (len(active[layer]), len(active[layer + 1]))
        expected = sorted(e for e in numbered if e[1] in active[layer + 1])
        assert path.num_path_edges == len(expected)
        assert (path.dst_position >= 0).nonzero().view(-1).tolist() == sorted(active[layer + 1])
        if path.is_whole:
            assert all(p.is_whole for p in paths[:layer])
            assert path.dst_nodes is None
        else:
            if forward:
                assert path.num_dst < WHOLE * path.num_nodes
            else:
                assert len(expected) < WHOLE * len(numbered) or not numbered
            assert path.dst_nodes.tolist() == sorted(active[layer + 1])
            if path.src_nodes is not None:
                assert path.src_nodes.tolist() == sorted(active[layer])
                assert below is None or below.is_whole or path.src_nodes is below.dst_nodes
            else:
                assert path.num_src >= WHOLE * path.num_nodes
            for transposed in (False, True):
                found = listed(path, transposed)
                assert found == (expected if weighted else [e[:2] for e in expected])
            for name in ('src', 'dst'):
                rows = getattr(path, name)
                if rows.nodes is not None:
                    assert rows.position[rows.nodes].tolist() == list(range(rows.nodes.numel()))
            own = path.dst_nodes if path.src_nodes is None else path.src_nodes[path.self_row.long()]
            assert own.tolist() == path.dst_nodes.tolist()
        loops = torch.bincount(edges[0][edges[0] == edges[1]], minlength=mask.numel())
        assert path.loops is None if not loops.any() else path.loops.tolist() == loops.tolist()
        below = path


@settings(max_examples=50)
@given(problem=problems(), weighted=st.booleans(), alone=st.booleans(), chunk=st.integers(1, 9))
def test_lean_graphs_have_the_same_paths(
    problem: Any, weighted: bool, alone: bool, chunk: int
) -> None:
    edge_index, mask, num_layers = problem
    lean = PreparedGraph(prepare_graph([edge_index], (mask.numel(),) * 2))
    options = dict(weighted=weighted and not alone, forward=alone, keep_graph=not alone)
    expected = execution_paths(lean.to_edge_index(), mask, num_layers, **options)
    modules = ('sparse.graph', 'graph.signature', 'papers.paths.build')
    with contextlib.ExitStack() as stack:
        for name in modules:
            stack.enter_context(mock.patch(f'pyg_fast.{name}.CHUNK', chunk))
        paths = execution_paths(lean, mask, num_layers, **options)
    for path, other in zip(paths, expected, strict=True):
        assert path.graph_signature == other.graph_signature
        assert path.stands_alone == alone
        assert alone <= (not path.is_whole)
        for name in ExecutionPath._TENSORS:
            one, two = getattr(path, name), getattr(other, name)
            assert one is two is None or torch.equal(one, two), name


def example(device: torch.device | str = 'cpu', **kwargs: Any) -> list[ExecutionPath]:
    edge_index = torch.randint(100, (2, 150))
    mask = torch.zeros(100, dtype=torch.bool)
    mask[:4] = True
    return execution_paths(edge_index.to(device), mask.to(device), 2, **kwargs)


def assert_same(path: ExecutionPath, other: ExecutionPath) -> None:
    for key, value in path.__getstate__().items():
        if isinstance(value, Tensor):
            assert torch.equal(value, getattr(other, key).to(value.device))
        else:
            assert value == getattr(other, key)


def test_store(device: torch.device, tmp_path: Path) -> None:
    path = example(device, weighted=True)[1]
    torch.save([path], tmp_path / 'paths.pt')
    for other in (
        path.to('cpu'), path.to(device=device, non_blocking=True), path.cpu(), path.clone(),
        path.detach(), copy.copy(path), copy.deepcopy(path), pickle.loads(pickle.dumps(path)),
        path.cpu().share_memory_(), torch.load(tmp_path / 'paths.pt', weights_only=True)[0],
    ):  # fmt: skip
        assert_same(path, other)
    assert path.clone().col.data_ptr() != path.col.data_ptr()
    assert path.to(device).col.data_ptr() == path.col.data_ptr()
    if device.type == 'cuda':
        assert path.cpu().pin_memory().col.is_pinned()
        assert path.cpu().cuda().device.type == 'cuda'


def test_tensors_that_are_one_stay_one() -> None:
    path = example()[1]
    assert path.self_row.data_ptr() != path.t_self_row.data_ptr()
    if path.src_nodes is None:
        assert path.clone().t_self_row.data_ptr() == path.clone().dst_position.data_ptr()


def test_repr() -> None:
    text = repr(example())
    assert 'ExecutionPath(layer=1 of 2, active=4 -> ' in text
    assert 'of 100 nodes' in text
    assert '% of the graph' in text
    whole = execution_paths(torch.tensor([[0], [1]]), torch.ones(2, dtype=torch.bool), 1)[0]
    assert '(100.0% of the graph, whole graph)' in repr(whole)
    assert whole.num_bytes < 100


def test_bad_input(device: torch.device) -> None:
    edge_index = torch.tensor([[0, 1], [1, 2]], device=device)
    mask = torch.tensor([True, False, False], device=device)
    with pytest.raises(ValueError, match="'mask' must hold a node, got none"):
        execution_paths(edge_index, mask & False, 1)
    with pytest.raises(TypeError, match="'mask' must be a bool tensor, got torch.int64"):
        execution_paths(edge_index, mask.long(), 1)
    with pytest.raises(TypeError, match="'mask' must be a bool tensor, got list"):
        execution_paths(edge_index, [True], 1)
    with pytest.raises(ValueError, match="'num_layers' must be at least 1, got 0"):
        execution_paths(edge_index, mask, 0)
    with pytest.raises(TypeError, match="'num_layers' must be an integer, got float"):
        execution_paths(edge_index, mask, 2.0)
    with pytest.raises(IndexError, match='edge_index'):
        execution_paths(edge_index, mask[:2], 1)
    prepared = prepare_edge_index(edge_index, (3, 3))[0]
    with pytest.raises(ValueError, match=r"'mask' must have shape \[3\], got \[2\]"):
        execution_paths(prepared, mask[:2], 1)
    with pytest.raises(ValueError, match=r"'mask' must have shape"):
        execution_paths(edge_index, mask[None], 1)
    if device.type == 'cuda':
        with pytest.raises(ValueError, match="'mask' is on cpu, but 'edge_index' is on cuda"):
            execution_paths(edge_index, mask.cpu(), 1)


def test_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        paths = example(device)
    assert not paths[1].col.is_inference()


def test_group_sizes(device: torch.device) -> None:
    """Of paths with short rows, of few edges, of some and of many."""
    cases = ((100, 50), (60_000, 9), (70_000, 9), (5_000_000, 9), (1 << 25, 9))
    sizes = [
        _group_size(torch.zeros(1, device=device).expand(num_edges), num_rows)
        for num_edges, num_rows in cases
    ]
    assert sizes == ([32, None, 64, 128, 256] if device.type == 'cuda' else [None] * 5)
