"""Sorting into CSR: against the reference, at any size, and bad input."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from _captures import captured
from _raw_ops import reference
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from pyg_fast.ops import to_csr
from pyg_fast.sparse.to_csr import (
    MOST_NODES,
    csr_rows,
    to_csr_csc,
    to_csr_unweighted,
    transpose_csr,
)

from ._graphs import GRAPHS, Edges, edge_lists
from ._samples import Given, sample

pytestmark = pytest.mark.usefixtures('several_threads')

MODULE = import_module('pyg_fast.sparse.to_csr')


@sample('to_csr')
def _(given: Given) -> dict[str, object]:
    return dict(
        edge_index=given.edge_index, num_src=30, num_dst=30, reverse=given.full,
        index64=given.index == torch.int64, drop_loops=not given.full, report=False,
    )  # fmt: skip


@sample('to_csr_csc')
def _(given: Given) -> dict[str, object]:
    return dict(
        edge_index=given.edge_index, num_src=30, num_dst=30, index64=given.index == torch.int64,
        drop_loops=not given.full, report=False,
    )  # fmt: skip


@sample('to_csr_unweighted')
def _(given: Given) -> dict[str, object]:
    return dict(
        edge_index=given.edge_index, num_src=30, num_dst=30, index64=given.index == torch.int64,
        drop_loops=not given.full, report=False,
    )  # fmt: skip


@sample('transpose_csr')
def _(given: Given) -> dict[str, object]:
    graph = given.graph
    return dict(rowptr=graph.rowptr, col=graph.col, num_cols=graph.num_src)


@sample('csr_rows')
def _(given: Given) -> dict[str, object]:
    begin, end = (7, 190) if given.full else (0, 0)
    return dict(rowptr=given.graph.rowptr, begin=begin, end=end)


def check(device: torch.device, edges: Edges, dtype: torch.dtype, drop: bool) -> None:
    edge_index = edges.edge_index.to(device, dtype)
    sizes = edges.num_src, edges.num_dst
    actual = [to_csr(edge_index, *sizes, by=by, drop_loops=drop) for by in ('dst', 'src')]
    expected = reference.to_csr_csc(edge_index, *sizes, False, drop)
    assert expected[6] == 0
    for made in ((*actual[0], *actual[1]), to_csr_csc(edge_index, *sizes, drop_loops=drop)):
        for a, e in zip(made, expected[:6], strict=True):
            assert a.device == edge_index.device
            assert a.dtype == torch.int32
            assert torch.equal(a, e)
    lean = to_csr_unweighted(edge_index, *sizes, drop_loops=drop)
    lean += transpose_csr(*lean, edges.num_src)
    # The transpose is in the order of the rows.
    ascending = reference.transpose_csr(*lean[:2], edges.num_src)
    for a, e in zip(lean, (*expected[:2], *ascending), strict=True):
        assert a.dtype == torch.int32
        assert torch.equal(a, e)
    count = int(lean[0][-1])
    rows = csr_rows(lean[0], 0, count)
    assert torch.equal(rows, reference.csr_rows(lean[0], 0, count))
    assert torch.equal(csr_rows(lean[0], count // 3, count // 2), rows[count // 3 : count // 2])


@pytest.mark.parametrize('name', GRAPHS)
@pytest.mark.parametrize('drop_loops', [False, True])
def test_named_graphs(device: torch.device, name: str, drop_loops: bool) -> None:
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        check(device, GRAPHS[name], dtype, drop_loops)


@given(edge_lists(), st.booleans())
def test_any_graph(device: torch.device, edges: Edges, drop_loops: bool) -> None:
    check(device, edges, torch.int64, drop_loops)


@pytest.mark.parametrize('num_src', [1, 2, 1000, 300_000])
@pytest.mark.parametrize('num_edges', [1, 8191, 19_999, 20_000, 50_001, 200_000])
def test_sizes(device: torch.device, num_src: int, num_edges: int) -> None:
    # Around the steps at which threads and buckets come in; most edges in one corner.
    draw = torch.rand(2, num_edges, dtype=torch.float64).pow(3)
    for num_dst in (1, 100_003):
        edge_index = (draw * torch.tensor([[num_src], [num_dst]])).long()
        check(device, Edges(edge_index, num_src, num_dst), torch.int64, True)


@pytest.mark.parametrize('num_src', [255, 256, 257, 32_767, 32_768, 32_769])
@pytest.mark.parametrize('num_edges', [31, 1024, 1025, 4097, 32_768, 32_769])
@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_steps_of_small_graphs(
    device: torch.device, num_src: int, num_edges: int, dtype: torch.dtype
) -> None:
    # Of which one CUDA kernel sorts 256 rows a block, by shares of the edges.
    draw = torch.rand(2, num_edges, dtype=torch.float64)
    for num_dst, power in ((300, 1), (num_src, 4), (1, 1)):
        edge_index = (draw.pow(power) * torch.tensor([[num_src], [num_dst]])).long()
        check(device, Edges(edge_index, num_src, num_dst), dtype, power == 4)


@pytest.mark.parametrize(('num_nodes', 'num_edges'), [
    (40_000, 40_000), (100_000, 600_000), (60_000, 600_000)])  # fmt: skip
def test_large_lists(device: torch.device, num_nodes: int, num_edges: int, raises: Any) -> None:
    """CUDA sorts them once for both ends, or once for each if one more pass would be needed."""
    edge_index = torch.randint(num_nodes, (2, num_edges))
    check(device, Edges(edge_index, num_nodes, num_nodes), torch.int64, True)
    for end, wrong in ((0, num_nodes), (1, -1)):
        bad = edge_index.clone().to(device)
        bad[end, num_edges // 2] = wrong
        for sort in (to_csr, to_csr_csc, to_csr_unweighted):
            with raises(IndexError, match=f"'edge_index\\[{end}\\]' must hold"):
                sort(bad, num_nodes, num_nodes)


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


def test_int64_where_int32_cannot_count_edges(
    device: torch.device, limits: Callable[..., None]
) -> None:
    edge_index = GRAPHS['square'].edge_index.to(device)
    narrow = to_csr(edge_index, 30, 30)
    assert {t.dtype for t in narrow} == {torch.int32}
    limits(edges_of_int32=200)
    wide = to_csr(edge_index, 30, 30)
    assert [t.dtype for t in wide] == [torch.int64, torch.int32, torch.int64]
    assert all(torch.equal(w, n.to(w.dtype)) for w, n in zip(wide, narrow, strict=True))
    lean = to_csr_unweighted(edge_index, 30, 30)
    lean += transpose_csr(*lean, 30)
    assert [t.dtype for t in lean] == [torch.int64, torch.int32] * 2
    assert torch.equal(lean[1], narrow[1])
    assert torch.equal(lean[3], transpose_csr(*narrow[:2], 30)[1])


def test_more_nodes_than_32_bits_number() -> None:
    none = torch.empty(2, 0, dtype=torch.long)
    with pytest.raises(ValueError, match="'num_src' must be at most"):
        to_csr(none, MOST_NODES + 1, 5)
    with pytest.raises(ValueError, match="'num_dst' must be at most"):
        to_csr_csc(none, 5, 2**40)


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
    device: torch.device, drop_loops: bool, end: int, wrong: int, message: str, raises: Any
) -> None:
    for position in (0, 150, 299):
        edge_index = torch.stack([torch.arange(300) % 7, torch.arange(300) % 5]).to(device)
        edge_index[end, position] = wrong
        for sort in (to_csr, partial(to_csr, by='src'), to_csr_csc, to_csr_unweighted):
            with raises(IndexError, match=message):
                sort(edge_index, 7, 5, drop_loops=drop_loops)


def test_edits_are_noticed(device: torch.device, raises: Any) -> None:
    edge_index = torch.stack([torch.arange(300) % 7, torch.arange(300) % 5]).to(device)
    for _ in range(2):
        to_csr_csc(edge_index, 7, 5)
    with raises(IndexError, 'edge_index'):  # a check does not hold for other sizes
        to_csr_csc(edge_index, 7, 4)
    edge_index[1, 7] = 5
    for _ in range(2):
        with raises(IndexError, 'edge_index'):
            to_csr_csc(edge_index, 7, 5)
        with raises(IndexError, 'edge_index'):
            to_csr(edge_index, 7, 5)
    to_csr_csc(edge_index, 7, 6)


def test_waits_where_it_is_told_to(device: torch.device) -> None:
    edge_index = torch.tensor([[0, 1], [1, 9]], device=device)
    for sort in (to_csr, to_csr_csc, to_csr_unweighted):
        with pytest.raises(IndexError, match=r'\[0, 2\), got values from 1 to 9'):
            sort(edge_index, 2, 2, wait=True)
        sort(edge_index, 2, 10)  # The error is not reported again.


@pytest.mark.parametrize('name', ['square', 'wide', 'no_edges', 'one_node'])
def test_compiles(device: torch.device, name: str) -> None:
    torch._dynamo.reset()
    edge_index, *size = GRAPHS[name]
    edge_index = edge_index.to(device, copy=True)
    for sort in (to_csr, to_csr_csc, to_csr_unweighted):
        compiled = torch.compile(sort, fullgraph=True, backend='aot_eager')
        actual, expected = (run(edge_index, *size, drop_loops=True) for run in (compiled, sort))
        assert all(map(torch.equal, actual, expected))
    if min(size) > 0 and edge_index.size(1) > 0 and not edge_index.is_cuda:
        edge_index[0, 0] = size[0]
        with pytest.raises(RuntimeError, match='outside of its graph'):
            compiled(edge_index, *size, drop_loops=True)


def test_cuda_graph(cuda: torch.device) -> None:
    first, second = (torch.randint(50, (2, 300), device=cuda) for _ in range(2))
    edge_index = first.clone()
    replay, results = captured(lambda: to_csr_csc(edge_index, 50, 50), warm_ups=2)
    for other in (second, first):
        edge_index.copy_(other)
        replay()
        assert all(map(torch.equal, results, to_csr_csc(other, 50, 50)))


@pytest.mark.parametrize('num_edges', [0, 10_556])
def test_one_kernel_sorts_a_small_graph(cuda: torch.device, num_edges: int) -> None:
    edge_index = torch.randint(2_708, (2, num_edges), device=cuda)
    runs = {
        'to_csr': lambda: to_csr(edge_index, 2_708, 2_708),
        'to_csr_csc': lambda: to_csr_csc(edge_index, 2_708, 2_708, drop_loops=True),
    }
    for name, run in runs.items():
        run()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        on_device = [e for e in profile.events() if e.device_type == DeviceType.CUDA]
        assert len(on_device) == 1, (name, [e.name for e in on_device])


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
        (ValueError, "'num_src' must not be neg", torch.zeros(2, 3).long(), {'num_src': -1}),
        (ValueError, "'num_dst' must not.*-2", torch.zeros(2, 3).long(), {'num_dst': -2}),
    ],
)
def test_bad_input(error: type, message: str, edge_index: object, options: dict) -> None:
    for sort in (to_csr, to_csr_csc):
        if sort is to_csr or 'by' not in options:
            with pytest.raises(error, match=message):
                sort(edge_index, **{'num_src': 4, 'num_dst': 4, **options})


def test_transpose_ends_at_the_last_row_pointer(device: torch.device) -> None:
    rowptr = torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=device)
    col = torch.tensor([1, 0, 1, 7, 7], dtype=torch.int32, device=device)
    for dtype in (torch.int32, torch.int64):
        t_rowptr, t_col = transpose_csr(rowptr.to(dtype), col, 2)
        assert t_rowptr.tolist() == [0, 1, 3]
        assert t_col.tolist() == [0, 0, 2, 0, 0]
        assert csr_rows(rowptr.to(dtype), 0, 5).tolist() == [0, 0, 2, 3, 3]


def test_peak_memory(cuda: torch.device) -> None:
    # Too many edges for the one kernel of small graphs.
    num_nodes, num_edges = 100_000, 4_000_000
    edge_index = torch.randint(num_nodes, (2, num_edges), device=cuda)

    def peak(run: Callable[[], object]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    # Keys, columns, and a second buffer for each; row pointers, and little for the sort itself.
    most = 16 * num_edges + 4 * num_nodes + (4 << 20)
    assert peak(lambda: to_csr_unweighted(edge_index, num_nodes, num_nodes)) <= most
    csr = to_csr_unweighted(edge_index, num_nodes, num_nodes)
    assert peak(lambda: transpose_csr(*csr, num_nodes)) <= most
