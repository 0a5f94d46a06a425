"""Random walks: bit for bit as the reference, uniform, independent, and on bad input."""

from collections.abc import Callable

import pytest
import torch
from _raw_ops import ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.ops import pinsage_neighbors, random_walk, to_csr

from ._graphs import GRAPHS, Edges, edge_lists

pytestmark = pytest.mark.usefixtures('several_threads')

SQUARE = [name for name, edges in GRAPHS.items() if edges.num_src == edges.num_dst]
# The types of pointers and of columns.
INDEX = [torch.int32] * 2, [torch.int64] * 2, [torch.int64, torch.int32]


@pytest.fixture(params=['same', 'pinned'])
def place(request: pytest.FixtureRequest, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Puts a graph on the device, or in host memory that it reads."""
    if request.param == 'same':
        return lambda t: t.to(device)
    if device.type == 'cpu':
        pytest.skip('a CPU reads all of its memory')
    return lambda t: t.pin_memory()


def csr(edges: Edges, dtypes: list[torch.dtype] = INDEX[0]) -> tuple[Tensor, Tensor]:
    rowptr, col, _ = to_csr(edges.edge_index, edges.num_src, edges.num_dst)
    return rowptr.to(dtypes[0]), col.to(dtypes[1])


def equal(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(x.cpu().equal(y.cpu()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize('name', SQUARE)
@pytest.mark.parametrize('dtypes', INDEX)
@pytest.mark.parametrize('restart', [0.0, 0.3, 1.0])
def test_named_graphs(
    device: torch.device, place: Callable[[Tensor], Tensor], name: str,
    dtypes: list[torch.dtype], restart: float,
) -> None:  # fmt: skip
    graph, num_nodes = csr(GRAPHS[name], dtypes), GRAPHS[name].num_src
    placed = tuple(map(place, graph))
    nodes = torch.arange(num_nodes).repeat(3)
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        walks = random_walk(*placed, nodes.to(device), 5, restart=restart, seed=seed)
        assert walks.device.type == device.type
        assert walks.cpu().equal(reference.random_walk(*graph, nodes, 5, restart, seed))
        for number, sizes in ((3, (4, 3)), (20, (9, 2)), (1, (1, 7))):
            out = pinsage_neighbors(
                *placed, nodes.to(device), number, num_walks=sizes[0], walk_length=sizes[1],
                restart=restart, seed=seed,
            )  # fmt: skip
            assert out[0].device == out[1].device == walks.device
            expected = reference.pinsage_neighbors(*graph, nodes, number, *sizes, restart, seed)
            assert equal(out, expected)


@given(edge_lists(square=True), st.data())
def test_any_graph(device: torch.device, edges: Edges, data: st.DataObject) -> None:
    graph = csr(edges, data.draw(st.sampled_from(INDEX)))
    nodes = torch.tensor(
        data.draw(st.lists(st.integers(0, edges.num_src - 1), max_size=9))
        if edges.num_src > 0 else [],
        dtype=torch.int64,
    )  # fmt: skip
    restart = data.draw(st.one_of(st.just(0.0), st.floats(0, 1)))
    seed = data.draw(st.integers(-(2**63), 2**63 - 1))
    number, walks, length = (data.draw(st.integers(1, 20)) for _ in range(3))
    on_device = (*(t.to(device) for t in graph), nodes.to(device))
    out = random_walk(*on_device, length, restart=restart, seed=seed)
    assert out.cpu().equal(reference.random_walk(*graph, nodes, length, restart, seed))
    most = pinsage_neighbors(
        *on_device, number, num_walks=walks, walk_length=length, restart=restart, seed=seed
    )
    sizes = number, walks, length
    assert equal(most, reference.pinsage_neighbors(*graph, nodes, *sizes, restart, seed))


@pytest.mark.parametrize(
    'sizes', [(1024, 1), (1, 1024), (32, 32), (33, 31), (17, 60), (3, 341), (128, 8)]
)
def test_many_visits(device: torch.device, sizes: tuple[int, int]) -> None:
    edge_index = torch.randint(3000, (2, 9000))
    graph = csr(Edges(edge_index, 3000, 3000))
    nodes = torch.randint(3000, (9,))
    for number in (1, 40, 1030):
        out = pinsage_neighbors(
            *(t.to(device) for t in (*graph, nodes)), number, num_walks=sizes[0],
            walk_length=sizes[1], restart=0.2, seed=7,
        )  # fmt: skip
        assert equal(out, reference.pinsage_neighbors(*graph, nodes, number, *sizes, 0.2, 7))


def test_many_nodes(device: torch.device) -> None:
    # Shared among threads; the same alone, in other company, and from run to run.
    n = 30_000
    graph = tuple(t.to(device) for t in csr(Edges(torch.randint(n, (2, 5 * n)), n, n)))
    nodes = torch.arange(n, device=device)
    walks = random_walk(*graph, nodes, 10, restart=0.1, seed=3)
    assert walks.equal(random_walk(*graph, nodes, 10, restart=0.1, seed=3))
    assert walks[:50].equal(random_walk(*graph, nodes[:50], 10, restart=0.1, seed=3))
    assert not walks.equal(random_walk(*graph, nodes, 10, restart=0.1, seed=4))
    sizes = dict(num_walks=10, walk_length=3, restart=0.1)
    most = pinsage_neighbors(*graph, nodes, 5, **sizes, seed=3)
    assert equal(most, pinsage_neighbors(*graph, nodes, 5, **sizes, seed=3))
    flipped = pinsage_neighbors(*graph, nodes.flip(0), 5, **sizes, seed=3)
    assert equal(most, (flipped[0].flip(0), flipped[1].flip(0)))
    some = pinsage_neighbors(*graph, nodes[[9, 9, 4, 9]], 5, **sizes, seed=3)
    assert equal(some, (most[0][[9, 9, 4, 9]], most[1][[9, 9, 4, 9]]))


def test_walks_follow_edges_and_stop_at_dead_ends(device: torch.device) -> None:
    # 0 <- 1 <- 2 <- 3, and 4 alone with a loop.
    edge_index = torch.tensor([[1, 2, 3, 4], [0, 1, 2, 4]])
    rowptr, col = (t.to(device) for t in csr(Edges(edge_index, 5, 5)))
    start = torch.arange(5, device=device)
    walks = random_walk(rowptr, col, start, 4)
    assert walks.tolist() == [[min(k + step, 3) if k < 4 else 4 for step in range(5)]
                              for k in range(5)]  # fmt: skip
    # With certain restarts every step is the first one.
    walks = random_walk(rowptr, col, start, 3, restart=1)
    assert walks.tolist() == [[0, 1, 1, 1], [1, 2, 2, 2], [2, 3, 3, 3], [3] * 4, [4] * 4]
    found = pinsage_neighbors(rowptr, col, start, 2, num_walks=2, walk_length=4)
    assert found[0].tolist() == [[1, 2], [2, 3], [3, -1], [-1, -1], [-1, -1]]
    assert found[1].tolist() == [[2, 2], [2, 2], [2, 0], [0, 0], [0, 0]]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize('degree', [2, 3, 7, 64])
def test_steps_are_uniform(device: torch.device, degree: int) -> None:
    # Every node of a complete graph leads to all others; 40,000 walks from one of them.
    node = torch.arange(degree + 1)
    pairs = (node.view(-1, 1) != node).nonzero().t()
    graph = tuple(t.to(device) for t in csr(Edges(pairs, degree + 1, degree + 1)))
    start = torch.zeros(40_000, dtype=torch.int64, device=device)
    walks = random_walk(*graph, start, 3, seed=11).cpu()
    uniform = torch.full((degree,), 1 / degree, dtype=torch.float64)
    limit = degree + 5 * (2 * degree) ** 0.5 + 10  # Five standard deviations, and more for few.
    assert chi_square(walks[:, 1].bincount(minlength=degree + 1)[1:], uniform) < limit
    # Steps and walks do not depend on one another: neither pairs of steps nor of walks do.
    step = (walks[:, 1:] - walks[:, :-1]) % (degree + 1) - 1
    pairs_uniform = torch.full((degree**2,), 1 / degree**2, dtype=torch.float64)
    limit = degree**2 + 5 * (2 * degree**2) ** 0.5 + 10
    for a, b in ((step[:, 0], step[:, 1]), (step[:, 1], step[:, 2]), (step[:-1, 0], step[1:, 0])):
        assert chi_square((a * degree + b).bincount(minlength=degree**2), pairs_uniform) < limit


def test_restarts_are_as_likely_as_told(device: torch.device) -> None:
    # On a path 0 <- 1 <- 2 ..., a step to node 1 is the first or a restart.
    n = 40
    edge_index = torch.stack([torch.arange(1, n), torch.arange(n - 1)])
    graph = tuple(t.to(device) for t in csr(Edges(edge_index, n, n)))
    start = torch.zeros(20_000, dtype=torch.int64, device=device)
    walks = random_walk(*graph, start, 9, restart=0.15, seed=5).cpu()
    restarts = (walks[:, 2:] == 1).double()
    spread = (0.15 * 0.85 / restarts.numel()) ** 0.5
    assert abs(float(restarts.mean()) - 0.15) < 5 * spread
    for column in restarts.t():
        assert abs(float(column.mean()) - 0.15) < 5 * spread * 8**0.5


def test_visits_count_probabilities(device: torch.device) -> None:
    # A neighbour joined by three edges is visited three times as often as one joined by one.
    edge_index = torch.tensor([[1, 1, 1, 2], [0, 0, 0, 0]])
    graph = tuple(t.to(device) for t in csr(Edges(edge_index, 3, 3)))
    nodes = torch.zeros(1, dtype=torch.int64, device=device)
    total = torch.zeros(2, dtype=torch.int64)
    for seed in range(40):
        node, visits = pinsage_neighbors(*graph, nodes, 2, num_walks=1000, walk_length=1, seed=seed)
        assert node.tolist() == [[1, 2]]
        total += visits[0].cpu()
    assert int(total.sum()) == 40_000
    assert abs(int(total[0]) - 30_000) < 5 * (40_000 * 0.75 * 0.25) ** 0.5


def test_default_seed_is_torchs(device: torch.device) -> None:
    graph = tuple(t.to(device) for t in csr(GRAPHS['square']))
    nodes = torch.arange(30, device=device).repeat(20)

    def both() -> tuple[Tensor, ...]:
        most = pinsage_neighbors(*graph, nodes, 3, num_walks=5, walk_length=2)
        return random_walk(*graph, nodes, 5), *most

    torch.manual_seed(4)
    first, second = both(), both()
    torch.manual_seed(4)
    again = both()
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    assert not any(a.equal(b) for a, b in zip(first, second, strict=True))
    wrapped = random_walk(*graph, nodes, 5, seed=3 + 2**64)
    assert wrapped.equal(random_walk(*graph, nodes, 5, seed=3))


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.int32])
def test_types_and_strides(device: torch.device, dtype: torch.dtype) -> None:
    rowptr, col = (t.to(device) for t in csr(GRAPHS['square']))
    nodes = torch.randint(30, (40,), device=device)
    wide = tuple(t.repeat_interleave(2)[::2] for t in (rowptr, col))
    out = random_walk(*wide, nodes.to(dtype)[::2], 3, seed=1)
    assert out.equal(random_walk(rowptr, col, nodes[::2], 3, seed=1))
    sizes = dict(num_walks=3, walk_length=2, seed=1)
    most = pinsage_neighbors(*wide, nodes.to(dtype)[::2], 3, **sizes)
    assert equal(most, pinsage_neighbors(rowptr, col, nodes[::2], 3, **sizes))


def test_no_walks(device: torch.device) -> None:
    rowptr, col = (t.to(device) for t in csr(GRAPHS['square']))
    nodes = torch.arange(30, device=device)
    assert random_walk(rowptr, col, nodes, 0).equal(nodes.view(-1, 1))
    assert random_walk(rowptr, col, nodes[:0], 4).shape == (0, 5)
    none = pinsage_neighbors(rowptr, col, nodes[:0], 3, num_walks=2, walk_length=2)
    assert none[0].shape == none[1].shape == (0, 3)
    assert random_walk(rowptr[:1], col[:0], nodes[:0], 2).shape == (0, 3)


def test_what_is_out_of_range_is_not_read(device: torch.device) -> None:
    # The loader does not check nodes on a GPU; nor are pointers of graphs checked.
    rowptr, col = (t.to(device) for t in csr(GRAPHS['square'], INDEX[1]))
    wild = torch.tensor([-1, 30, 2**40, -(2**62)], device=device)
    walks = ops.random_walk(rowptr, col, wild, 3, 0.5, 1)
    assert walks.equal(wild.view(-1, 1).expand(4, 4))
    for tensor in ops.pinsage_neighbors(rowptr, col, wild, 2, 2, 2, 0.5, 1):
        assert tensor.unique().tolist() in ([-1], [0])
    nodes = torch.arange(30, device=device)
    ops.random_walk(rowptr * 1000, col, nodes, 3, 0.5, 1)
    ops.random_walk(rowptr.flip(0), col, nodes, 3, 0.5, 1)
    ops.random_walk(rowptr, col + 10**6, nodes, 3, 0.5, 1)
    ops.pinsage_neighbors(rowptr, col * 10**9, nodes, 3, 3, 3, 0.5, 1)


def test_opcheck_and_fake_kernels(device: torch.device) -> None:
    graph = tuple(t.to(device) for t in csr(GRAPHS['square']))
    nodes = torch.arange(12, device=device)
    for name, numbers in (('random_walk', (4, 0.25, 9)), ('pinsage_neighbors', (5, 3, 4, 0.1, 9))):
        op, args = getattr(ops, name), (*graph, nodes, *numbers)
        torch.library.opcheck(getattr(torch.ops.pyg_fast, name).default, args)
        out, fake = op(*args), op(*(t.to('meta') for t in args[:3]), *numbers)
        if isinstance(out, Tensor):
            out, fake = (out,), (fake,)
        for a, b in zip(out, fake, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    rowptr, col = (t.to(device) for t in csr(GRAPHS['square']))
    nodes = torch.arange(12, device=device)
    graphs = [
        (rowptr, col.long()), (rowptr.float(), col.float()), (rowptr[None], col),
        (rowptr[:0], col), (rowptr, col[None]), (rowptr, col.repeat_interleave(2)[::2]),
    ]  # fmt: skip
    if device.type == 'cuda':
        graphs += [(rowptr, col.cpu()), (rowptr.cpu(), col)]
        with pytest.raises(RuntimeError):
            ops.random_walk(rowptr, col, nodes.cpu(), 2, 0.0, 0)
    for graph in graphs:
        with pytest.raises(RuntimeError):
            ops.random_walk(*graph, nodes, 2, 0.0, 0)
        with pytest.raises(RuntimeError):
            ops.pinsage_neighbors(*graph, nodes, 2, 2, 2, 0.0, 0)
    for bad in (nodes.int(), nodes[None]):
        with pytest.raises(RuntimeError):
            ops.random_walk(rowptr, col, bad, 2, 0.0, 0)
    for walk in ((-1, 0.0), (2, -0.1), (2, 1.1), (2, float('nan'))):
        with pytest.raises(RuntimeError):
            ops.random_walk(rowptr, col, nodes, *walk, 0)
    for numbers in ((-1, 2, 2), (2, -1, 2), (2, 2, -1), (2, 1025, 1), (2, 33, 32), (2, 2**40, 9)):
        with pytest.raises(RuntimeError):
            ops.pinsage_neighbors(rowptr, col, nodes, *numbers, 0.0, 0)


def test_host_memory_must_be_pinned_and_contiguous(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU reads all of its memory')
    rowptr, col = csr(GRAPHS['square'])
    start = torch.arange(3, device=device)
    with pytest.raises(ValueError, match="'rowptr' must be on cuda.*pinned"):
        random_walk(rowptr, col, start, 2)
    with pytest.raises(ValueError, match="'col' must be on cuda.*pinned"):
        random_walk(rowptr.pin_memory(), col, start, 2)
    with pytest.raises(ValueError, match="'rowptr' must be contiguous"):
        random_walk(torch.stack([rowptr, rowptr], 1).pin_memory()[:, 0], col.pin_memory(), start, 2)
    with pytest.raises(ValueError, match="'rowptr' must be on cpu"):
        random_walk(rowptr.to(device), col.to(device), start.cpu(), 2)


ROWPTR, COL = csr(GRAPHS['square'])
NODES = torch.arange(3)
FAILS: list[tuple[type[Exception], str, tuple, dict]] = [
    (TypeError, "'rowptr' must be a tensor, got list", ([0], COL, NODES, 2), {}),
    (TypeError, "'rowptr' must hold int32 or int64", (ROWPTR.short(), COL, NODES, 2), {}),
    (TypeError, "'rowptr' must hold integers, got torch.float32",
     (ROWPTR.float(), COL, NODES, 2), {}),
    (ValueError, "'rowptr' must have one dimension", (ROWPTR[None], COL, NODES, 2), {}),
    (ValueError, "'rowptr' must have num_nodes \\+ 1 entries", (ROWPTR[:0], COL, NODES, 2), {}),
    (TypeError, "'col' must hold int32, or int64 if", (ROWPTR, COL.long(), NODES, 2), {}),
    (ValueError, "'col' must be on cpu, got meta", (ROWPTR, COL.to('meta'), NODES, 2), {}),
    (ValueError, "'rowptr' must be on meta", (ROWPTR, COL, NODES.to('meta'), 2), {}),
    (TypeError, "must hold integers, got torch.bool", (ROWPTR, COL, NODES > 0, 2), {}),
    (ValueError, 'must have one dimension, got 2', (ROWPTR, COL, NODES[None], 2), {}),
    (IndexError, r'must hold nodes in \[0, 30\), got values from 28 to 30',
     (ROWPTR, COL, NODES + 28, 2), {}),
    (IndexError, 'must hold nodes in', (ROWPTR, COL, NODES - 1, 2), {}),
    (TypeError, "must be an integer, got float", (ROWPTR, COL, NODES, 2.0), {}),
    (TypeError, "must be an integer, got bool", (ROWPTR, COL, NODES, True), {}),
    (ValueError, 'must (not be negative|be at least 1), got -1', (ROWPTR, COL, NODES, -1), {}),
    (TypeError, "'restart' must be a number, got str", (ROWPTR, COL, NODES, 2), {'restart': '0'}),
    (ValueError, "'restart' must be from 0 to 1, got 1.5", (ROWPTR, COL, NODES, 2),
     {'restart': 1.5}),
    (ValueError, "'restart' must be from 0 to 1, got nan", (ROWPTR, COL, NODES, 2),
     {'restart': float('nan')}),
    (TypeError, "'seed' must be an integer, got float", (ROWPTR, COL, NODES, 2), {'seed': 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(('error', 'text', 'args', 'kwargs'), FAILS)
def test_bad_input(error: type[Exception], text: str, args: tuple, kwargs: dict) -> None:
    with pytest.raises(error, match=text):
        random_walk(*args, **kwargs)
    with pytest.raises(error, match=text):
        pinsage_neighbors(*args, num_walks=2, walk_length=2, **kwargs)


@pytest.mark.parametrize(
    ('error', 'text', 'kwargs'),
    [
        (ValueError, "'num_walks' must be at least 1, got 0", {'num_walks': 0}),
        (ValueError, "'walk_length' must be at least 1, got 0", {'walk_length': 0}),
        (TypeError, "'num_walks' must be an integer, got float", {'num_walks': 2.0}),
        (ValueError, 'must be at most 1024, got 33 times 32', {'num_walks': 33}),
    ],
)
def test_bad_numbers_of_walks(error: type[Exception], text: str, kwargs: dict) -> None:
    with pytest.raises(error, match=text):
        pinsage_neighbors(ROWPTR, COL, NODES, 3, **{'num_walks': 2, 'walk_length': 32, **kwargs})
