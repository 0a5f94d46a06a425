"""Groups of edges: what they hold, as a store, and on prepared graphs."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fast.graph import Graph, graph_of, prepare_edge_index, set_group_sizes
from pyg_fast.graph.gcn_norm import normalized
from pyg_fast.sparse import graph as sparse_graph
from pyg_fast.sparse.groups import Groups, groups_of

CPU = torch.device('cpu')
INDEX = [torch.int32, torch.int64]
EDGES = torch.randint(29, (2, 200), generator=torch.Generator().manual_seed(0))  # 29 is isolated


def size_of(groups: Groups | None) -> int | None:
    return None if groups is None else groups.size


def prepared(device: torch.device | str = 'cpu') -> EdgeIndex:
    return prepare_edge_index(EDGES.to(device), (30, 30))[0]


def plain_graph(device: torch.device) -> Graph:
    return graph_of(EDGES.to(device), 30, 30)


NAMES = ('ptr', 'row', 'long_row', 'long_ptr', 'long_shift', 'order')


def by_hand(rowptr: list[int], size: int) -> tuple[list[int], ...]:
    """The lists of :class:`Groups`, row by row."""
    ptr, row, long_row, long_ptr, long_shift, keys = [], [], [], [0], [], []
    for i, (begin, end) in enumerate(zip(rowptr, rowptr[1:])):  # noqa: B905 (one is shorter)
        starts = list(range(begin, end, size)) or [begin]
        if len(starts) > 1:
            long_shift.append(len(ptr) - long_ptr[-1])
            long_ptr.append(long_ptr[-1] + len(starts))
            long_row.append(i)
        row += [i if len(starts) == 1 else -len(long_row)] * len(starts)
        ptr += starts
        keys += [(0, k) if a + size <= end else (1, a - end) for k, a in enumerate(starts)]
    order = sorted(range(len(row)), key=keys.__getitem__)
    return ptr + rowptr[-1:], row, long_row, long_ptr, long_shift, order


def assert_groups(groups: Groups, rowptr: Tensor, size: int) -> None:
    for name, expected in zip(NAMES, by_hand(rowptr.tolist(), size), strict=True):
        actual = getattr(groups, name)
        assert (actual.dtype, actual.device) == (rowptr.dtype, rowptr.device), name
        assert actual.tolist() == expected, name
    assert (groups.num_partials, groups.size) == (int(groups.long_ptr[-1]), size)
    most = max(rowptr.diff().tolist(), default=0)
    assert groups.most_groups == max(-(-most // size), min(1, rowptr.size(0) - 1))


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 7, 8, 9, 64, 1000]), max_size=12),
    st.sampled_from([1, 2, 3, 4, 7, 32, 1000]),
    st.sampled_from(INDEX),
)
def test_any_degrees(
    device: torch.device, degrees: list[int], size: int, index: torch.dtype
) -> None:
    rowptr = torch.tensor([0, *itertools.accumulate(degrees)], dtype=index, device=device)
    assert_groups(groups_of(rowptr, size), rowptr, size)


def test_edges_behind_the_last_row_are_in_no_group(device: torch.device) -> None:
    edge_index = torch.tensor([[0, 1, 1, 2], [0, 1, 1, 0]], device=device)
    graph = graph_of(edge_index, 3, 3, drop_loops=True)
    assert groups_of(graph.rowptr, 2).ptr.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize('bad', [
    (TypeError, [0, 1], 2), (TypeError, torch.tensor([0.0]), 2),
    (TypeError, torch.tensor([0, 1]), 2.0), (TypeError, torch.tensor([0, 1]), True),
    (ValueError, torch.tensor([0, 1]), 0), (ValueError, torch.tensor([0, 1]), -4),
    (ValueError, torch.tensor([], dtype=torch.long), 2), (ValueError, torch.tensor([[0, 1]]), 2),
])  # fmt: skip
def test_bad_input(bad: tuple) -> None:
    error, rowptr, size = bad
    with pytest.raises(error, match="'rowptr'|'size'"):
        groups_of(rowptr, size)


def test_more_groups_than_int32_counts() -> None:
    # No group is built: the groups would not fit in memory.
    rowptr = torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    with pytest.raises(ValueError, match='needs 2147483648 groups, more than torch.int32'):
        groups_of(torch.cat([rowptr, rowptr[-1:]]), 1)


# --- as a store ----------------------------------------------------------------------------------


def some(device: torch.device = CPU, atomic: bool = False) -> Groups:
    return groups_of(plain_graph(device).rowptr, 5, atomic)


def assert_same(a: Groups, b: Groups) -> None:
    assert type(a) is type(b) is Groups
    for s, t in zip(a, b, strict=True):
        assert torch.equal(s.cpu(), t.cpu()) if isinstance(s, Tensor) else s == t


def test_moves_and_copies(device: torch.device) -> None:
    groups = some(device, atomic=True)
    for other in (
        groups.to(device), groups.to(device=device, non_blocking=True), groups.cpu(),
        groups.clone(), groups.detach(), copy.copy(groups), copy.deepcopy(groups),
        pickle.loads(pickle.dumps(groups)), some(device, atomic=True).cpu().share_memory_(),
    ):  # fmt: skip
        assert_same(other, groups)
    assert groups.cpu().row.device.type == 'cpu'
    assert groups.clone().row.data_ptr() != groups.row.data_ptr()
    assert groups.detach().row.data_ptr() == groups.row.data_ptr()
    assert some().share_memory_().ptr.is_shared()
    if device.type == 'cuda':
        assert_same(groups.cpu().cuda(), groups)
        assert_same(groups.cpu().pin_memory(), groups)
        assert groups.cpu().pin_memory().row.is_pinned()


def test_saves_and_loads_as_weights() -> None:
    file = io.BytesIO()
    torch.save({'groups': some()}, file)
    file.seek(0)
    assert_same(torch.load(file, weights_only=True)['groups'], some())


def test_repr() -> None:
    assert repr(groups_of(torch.tensor([0, 5, 6]), 2)) == 'Groups(size=2, groups=4, long_rows=1)'
    assert repr(groups_of(torch.tensor([0]), 2, atomic=True)) == (
        'Groups(size=2, groups=0, long_rows=0, atomic)')  # fmt: skip


# --- of graphs -----------------------------------------------------------------------------------


def test_of_a_graph(device: torch.device) -> None:
    graph = plain_graph(device)
    assert graph.groups is graph.t_groups is None
    both = graph.with_groups(3, 17, atomic=True)
    assert_same(both.groups, groups_of(graph.rowptr, 3, atomic=True))
    assert_same(both.t_groups, groups_of(graph.t_rowptr, 17, atomic=True))
    assert both.t().groups is both.t_groups
    assert both.t().t_groups is both.groups
    assert all(a is b for a, b in zip(both[:8], graph[:8], strict=True))
    one = graph.with_groups(None, 8)
    assert one.groups is None
    assert one.t_groups.size == 8
    alone = graph_of(EDGES, 30, 30, transpose=False)
    assert alone.with_groups(4, 4).t_groups is None


def test_of_a_prepared_graph(device: torch.device) -> None:
    edge_index = prepared(device)
    plain, without = graph_of(edge_index, 30, 30), graph_of(edge_index, 30, 30, drop_loops=True)
    norm = normalized(edge_index, None, 30, torch.float32)
    set_group_sizes(edge_index, 4, 8)
    graph = graph_of(edge_index, 30, 30)
    assert_groups(graph.groups, graph.rowptr, 4)
    assert_groups(graph.t_groups, graph.t_rowptr, 8)
    assert graph.rowptr is plain.rowptr
    assert graph_of(edge_index, 30, 30) is graph
    dropped = graph_of(edge_index, 30, 30, drop_loops=True)
    assert_groups(dropped.groups, without.rowptr, 4)
    again = normalized(edge_index, None, 30, torch.float32)
    assert again.operator.graph is dropped
    assert norm.operator.graph.groups is None
    assert torch.equal(again.operator.row_scale, norm.operator.row_scale)
    set_group_sizes(edge_index, None)
    assert graph_of(edge_index, 30, 30).groups is None
    assert graph_of(edge_index, 30, 30).t_groups is None


def test_sizes_before_the_graph_is_asked_for(device: torch.device) -> None:
    data = torch.tensor([[0, 1, 2], [1, 2, 0]], device=device)
    edge_index = EdgeIndex(data, sparse_size=(3, 3))
    set_group_sizes(edge_index, 2, 3, atomic=True)
    graph = graph_of(edge_index, 3, 3, drop_loops=True)
    assert (graph.groups.size, graph.t_groups.size, graph.groups.atomic) == (2, 3, True)
    assert graph_of(edge_index, 3, 3) is graph


def test_sizes_go_with_the_data(device: torch.device) -> None:
    edge_index = prepared(device)
    set_group_sizes(edge_index, 4)
    assert graph_of(edge_index.clone(), 30, 30).groups is None
    assert graph_of(copy.deepcopy(edge_index), 30, 30).groups is None
    assert graph_of(pickle.loads(pickle.dumps(edge_index)), 30, 30).groups is None
    edge_index._data[0, 0] = 3
    assert graph_of(edge_index, 30, 30).groups is None


@pytest.mark.parametrize(
    ('num_edges', 'size'), [(19, None), (20, 64), (29, 64), (30, 128), (50, 256)]
)
def test_schedule_of_a_prepared_graph(
    num_edges: int, size: int | None, device: torch.device, limits: Callable[..., None]
) -> None:
    limits(edges_in_groups=20, edges_in_larger_groups=30, edges_in_largest_groups=50)
    data = torch.zeros(2, num_edges, dtype=torch.long, device=device)
    for graph in (
        graph_of(EdgeIndex(data, sparse_size=(3, 3)), 3, 3),
        graph_of(prepare_edge_index(data, (3, 3))[0], 3, 3),
    ):
        expected = size if device.type == 'cuda' else None
        assert size_of(graph.groups) == size_of(graph.t_groups) == expected
        assert graph.with_default_groups() is graph


@pytest.mark.parametrize('bad', [(TypeError, 'auto'), (ValueError, 0), (TypeError, 4.0)])
def test_bad_sizes(bad: tuple) -> None:
    edge_index = prepared()
    error, size = bad
    for sizes in ((size, None), (4, size)):
        with pytest.raises(error, match="'size'"):
            set_group_sizes(edge_index, *sizes)
    assert graph_of(edge_index, 30, 30).groups is None


@pytest.mark.parametrize('end', [0, 1])
def test_groups_tell_whether_a_source_is_a_hub(device: torch.device, end: int) -> None:
    """By numbers of the host; without groups it may be one."""
    edge_index = torch.randint(9, (2, sparse_graph.MANY_TERMS + 200), device=device)
    edge_index[end] = 3
    graph = Graph.from_edge_index(edge_index, 9)
    assert graph.transpose_of_hubs()[0] is graph.t_rowptr
    found = graph.with_groups(64, 64).transpose_of_hubs()
    assert found[0] is (graph.t_rowptr if end == 0 else None)
