"""Sampling with types, times, and a subgraph for each seed, against plain Python."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _raw_ops import ops
from _raw_ops import typed_sample as typed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_fast.ops import NodeMap, neighbor_sample
from tests.ops._typed import (
    Graph,
    Rule,
    Seeds,
    check,
    map_for,
    sample,
    typed_graph,
    typed_seeds,
)

pytestmark = pytest.mark.usefixtures('several_threads', 'checked_bounds')


@pytest.fixture(scope='module')
def checked_bounds() -> Iterator[None]:
    """On a CPU compares the numbers of edges with the bounds by which a GPU allocates."""
    read_sizes = typed._TypedBatch._read_sizes

    def checked(self: Any, hop: int) -> list[int]:
        bounds = self._most_edges(hop)
        found = read_sizes(self, hop)
        assert all(n <= most for n, most in zip(found, bounds, strict=True))
        return found

    typed._TypedBatch._read_sizes = checked
    yield
    typed._TypedBatch._read_sizes = read_sizes


def random_graph(
    seed: int, num_types: int, num_edge_types: int, timed: bool, weighted: bool
) -> Graph:
    """Some types have no nodes, edges, times or weights."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=generator)

    num_nodes = draw(9, num_types).tolist()
    ends = [tuple(draw(num_types, 2).tolist()) for _ in range(num_edge_types)]
    edges = []
    for src, dst in ends:
        count = int(draw(40, 1)) if min(num_nodes[src], num_nodes[dst]) > 0 else 0
        rows = [draw(max(num_nodes[k], 1), count) for k in (src, dst)]
        edges.append(torch.stack(rows))

    def some(is_given: bool, high: int, scale: float) -> list:
        return [
            draw(high, e.size(1)) / scale if scale != 1 else draw(high, e.size(1)) - high // 2
            for e in edges
        ] if is_given else [None] * len(edges)  # fmt: skip

    time, weight = some(timed, 12, 1), some(weighted, 4, 3.0)
    for values in (time, weight):
        if num_edge_types > 1:
            values[int(draw(num_edge_types, 1))] = None
    return Graph(num_nodes, ends, edges, time, weight)


def run(
    device: torch.device, graph: Graph, seeds: Seeds, fanouts: list[list[int]], seed: int = 1,
    induced: bool = False,
) -> Any:  # fmt: skip
    return typed.sample_typed(
        typed_graph(graph, device, False, torch.int32), typed_seeds(graph, seeds, device),
        typed.Rules.of(fanouts, device), seed, map_for(graph, seeds, device), induced,
    )  # fmt: skip


@given(
    seed=st.integers(0, 10**6), types=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    induced=st.booleans(), hashed=st.booleans(),
)  # fmt: skip
def test_how_many_seeds_the_device_knows(
    device: torch.device, seed: int, types: tuple[int, int], induced: bool, hashed: bool
) -> None:
    graph = random_graph(seed, *types, False, False)
    seeds = typed_seeds(graph, random_seeds(graph, seed, False, False), device)
    nodes = torch.cat([seeds.nodes, *[seeds.nodes[-1:]] * 5])
    bounds = tuple(size + 3 for size in seeds.sizes)
    repeated = typed.TypedSeeds(nodes, bounds, counts=torch.tensor(seeds.sizes, device=device))
    args = typed_graph(graph, device, False, torch.int32), [[2] * types[1], [-1] * types[1]]
    wanted, got = (
        typed.sample_typed(
            args[0],
            given,
            typed.Rules.of(args[1], device),
            seed,
            NodeMap(sum(graph.num_nodes), device, hashed),
            induced,
        )
        for given in (seeds, repeated)
    )
    for key, value in wanted._asdict().items():
        other = getattr(got, key)
        if key == 'wholes':  # Nothing writes what pads their parts.
            continue
        if value is None:
            assert other is None
        else:
            assert [plain(part) for part in other] == [plain(part) for part in value]


@pytest.mark.parametrize('disjoint', [False, True])
@pytest.mark.parametrize('most', [2**26, 60, 0])
def test_bounds_are_kept_for_the_next_batch(
    device: torch.device, disjoint: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = random_graph(5, 3, 6, False, False)
    hops = [[2] * 6, [3] * 6, [-1] * 6]
    kept = typed.Rules.of(hops, device)
    node_map = NodeMap(2**62 if disjoint else sum(graph.num_nodes), device, disjoint)
    args = typed_graph(graph, device, False, torch.int32)
    for seed in (1, 2, 1):
        seeds = typed_seeds(graph, random_seeds(graph, seed, disjoint, False), device)
        wanted = typed.sample_typed(args, seeds, typed.Rules.of(hops, device), seed, node_map)
        with monkeypatch.context() as patch:  # as on a GPU, where nobody knows sizes
            unknown = property(lambda _: False, lambda *_: None)
            patch.setattr(typed._TypedBatch, 'knows_sizes', unknown, raising=False)
            patch.setattr(typed, '_MOST_GUESSED', most)
            patch.setattr(typed, '_MOST_HASHED', most)
            got = typed.sample_typed(args, seeds, kept, seed, node_map)
        for name in ('n_id', 'edge_index', 'e_id', 'num_sampled_edges'):
            parts = (map(plain, getattr(out, name)) for out in (wanted, got))
            assert all(one == other for one, other in zip(*parts, strict=True))
    assert (len(kept.bounds) > 0) == (most > 0)


def plain(part: Any) -> list:
    return part.tolist() if hasattr(part, 'tolist') else part


def random_seeds(graph: Graph, seed: int, disjoint: bool, timed: bool) -> Seeds:
    generator = torch.Generator().manual_seed(seed)
    nodes = [
        torch.randint(max(n, 1), (min(n, 3),), generator=generator).tolist()
        for n in graph.num_nodes
    ]
    if not disjoint:
        return Seeds([list(dict.fromkeys(part)) for part in nodes])
    count = sum(map(len, nodes))
    order, roots = torch.randperm(count, generator=generator).tolist(), []
    for part in nodes:
        roots.append([order.pop() for _ in part])
    time = torch.randint(-7, 8, (count,), generator=generator).tolist() if timed else None
    return Seeds(nodes, roots, time)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    seed=st.integers(0, 10**6),
    types=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    hops=st.integers(1, 3),
    disjoint=st.booleans(),
    timed=st.booleans(),
    weighted=st.booleans(),
    replace=st.booleans(),
    last=st.booleans(),
    max_age=st.sampled_from([None, 0, 3, 2**63 - 1]),
    every=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_is_its_definition(
    device: torch.device, seed: int, types: tuple[int, int], hops: int, disjoint: bool,
    timed: bool, weighted: bool, replace: bool, last: bool, max_age: int | None, every: bool,
    index: torch.dtype,
) -> None:  # fmt: skip
    graph = random_graph(seed, *types, timed and disjoint, weighted)
    seeds = random_seeds(graph, seed, disjoint, timed)
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor([-1, 0, 1, 2, 3, 7, 40])
    fanouts = choice[torch.randint(7, (hops, types[1]), generator=generator)].tolist()
    rule = Rule([[-1] * types[1]] * hops if every else fanouts, replace, last, max_age)
    out = typed.sample_typed(
        typed_graph(graph, device, replace, index), typed_seeds(graph, seeds, device),
        typed.Rules.of(rule.fanouts, device, *rule[1:]), seed, map_for(graph, seeds, device),
    )  # fmt: skip
    check(out, sample(graph, seeds, rule, seed), disjoint)
    for parts in (out.col, out.rowptr, out.e_id):
        assert all(part.storage_offset() % 4 == 0 for part in parts)


def test_one_type_is_the_plain_sampler(device: torch.device) -> None:
    edges = torch.randint(300, (2, 6000))
    graph = Graph([300], [(0, 0)], [edges], [None], [None])
    seeds = Seeds([torch.randperm(300)[:40].tolist()])
    ours = typed_graph(graph, device, False, torch.int32)
    for fanouts in ([5, 3], [40, -1], [-1]):
        out = typed.sample_typed(
            ours, typed_seeds(graph, seeds, device),
            typed.Rules.of([[k] for k in fanouts], device), 7, map_for(graph, seeds, device),
        )  # fmt: skip
        wanted = neighbor_sample(
            ours.rowptr, ours.col, torch.tensor(seeds.nodes[0], device=device), fanouts,
            perm=ours.perm, seed=7,
        )  # fmt: skip
        assert torch.equal(out.n_id[0], wanted.n_id)
        assert torch.equal(out.edge_index[0], wanted.edge_index)
        assert torch.equal(out.rowptr[0], wanted.rowptr)
        assert torch.equal(out.e_id[0], wanted.e_id)
        assert list(out.num_sampled_edges) == [wanted.num_sampled_edges]


def test_induced(device: torch.device) -> None:
    for seed in range(20):
        graph = random_graph(seed, 3, 4, False, False)
        seeds = random_seeds(graph, seed, False, False)
        out = run(device, graph, seeds, [[2] * 4] * 2, seed, induced=True)
        for t, (src, dst) in enumerate(graph.ends):
            sources, targets = (out.n_id[k].cpu() for k in (src, dst))
            inside = torch.isin(graph.edges[t][0], sources) & torch.isin(graph.edges[t][1], targets)
            assert torch.equal(out.e_id[t].cpu().sort()[0], inside.nonzero().view(-1))
            source, target = out.edge_index[t].cpu()
            found = torch.stack([sources[source], targets[target]])
            assert torch.equal(found, graph.edges[t][:, out.e_id[t].cpu()])
            assert torch.equal(out.col[t].cpu(), source.int())
            degree = torch.bincount(target, minlength=targets.numel())
            assert torch.equal(out.rowptr[t].diff().cpu(), degree.int())


def test_never_later_than_the_seed(device: torch.device) -> None:
    """Ten thousand draws and more, in a graph large enough for threads."""
    num_nodes, num_edges = 5000, 60_000
    edges, time = torch.randint(num_nodes, (2, num_edges)), torch.randint(1000, (num_edges,))
    graph = Graph([num_nodes], [(0, 0)], [edges], [time], [None])
    count = 400
    nodes = torch.randint(num_nodes, (count,)).tolist()
    seeds = Seeds([nodes], [list(range(count))], torch.randint(1000, (count,)).tolist())
    ours = typed_graph(graph, device, False, torch.int32)
    node_map = map_for(graph, seeds, device)
    now = torch.tensor(seeds.time)
    for last in (False, True):
        for max_age in (None, 100):
            rules = typed.Rules.of([[6], [4], [3]], device, False, last, max_age)
            out = typed.sample_typed(ours, typed_seeds(graph, seeds, device), rules, 1, node_map)
            root = out.batch[0].cpu()
            source, target = out.edge_index[0].cpu()
            assert torch.equal(root[source], root[target])
            age = now[root[target]] - time[out.e_id[0].cpu()]
            assert (age >= 0).all()
            assert max_age is None or (age <= max_age).all()
            assert max_age is not None or age.numel() > 10_000
            if last and max_age is None:  # No edge that was left out is later than one taken.
                e_id, node = out.e_id[0].cpu(), out.n_id[0].cpu()
                for k in range(20):
                    taken = e_id[target == k]
                    row = (edges[1] == node[k]).nonzero().view(-1)
                    row = row[time[row] <= now[root[k]]]
                    assert len(taken) == min(6, len(row))
                    assert time[row].sort()[0].tolist()[-6:] == time[taken].sort()[0].tolist()


def test_draws_are_uniform(device: torch.device) -> None:
    # Of 5 edges that are early enough 2: each is taken in 2 of 5 subgraphs.
    edges = torch.stack([torch.arange(8), torch.zeros(8, dtype=torch.long)])
    graph = Graph([8], [(0, 0)], [edges], [torch.arange(8)], [None])
    count = 20_000
    seeds = Seeds([[0] * count], [list(range(count))], [4] * count)
    out = run(device, graph, seeds, [[2]])
    found = torch.bincount(out.e_id[0].cpu(), minlength=8)
    assert found[5:].tolist() == [0, 0, 0]
    wanted = 2 * count / 5
    assert float(((found[:5] - wanted) ** 2 / wanted).sum()) < 18.5  # chi-square, 4 degrees: 0.001


def test_the_table_grows(device: torch.device) -> None:
    """A subgraph for each seed needs more slots than the first table has."""
    edges = torch.randint(200, (2, 20_000))
    graph = Graph([200], [(0, 0)], [edges], [None], [None])
    seeds = Seeds([list(range(150)) * 8], [list(range(1200))])
    out = run(device, graph, seeds, [[60], [2]])
    assert out.n_id[0].numel() > 2**16
    keys = out.batch[0] * 200 + out.n_id[0]
    assert keys.unique().numel() == keys.numel()
    source, target = out.edge_index[0].cpu()
    e_id, node = out.e_id[0].cpu(), out.n_id[0].cpu()
    assert torch.equal(edges[:, e_id], torch.stack([node[source], node[target]]))


class Recorder(TorchDispatchMode):
    """Keeps the calls of our ops."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == 'pyg_fast':
            given = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
            self.calls.append((func, given))
        return func(*args, **(kwargs or {}))


def test_opcheck(device: torch.device) -> None:
    graph = random_graph(4, 2, 3, True, True)
    seeds = random_seeds(graph, 4, True, True)
    with Recorder() as recorder:
        run(device, graph, seeds, [[2, 2, -1]] * 2)
    assert len({op for op, _ in recorder.calls} - {ops.relabel.default}) == 5
    for op, args in recorder.calls:
        torch.library.opcheck(op, args, test_utils=('test_schema', 'test_faketensor'))


def test_launches_do_not_grow_with_types(device: torch.device) -> None:
    def calls(num_types: int) -> int:
        edges = [torch.randint(50, (2, 100)) for _ in range(num_types)]
        graph = Graph([50], [(0, 0)] * num_types, edges, [None] * num_types, [None] * num_types)
        with Recorder() as recorder:
            run(device, graph, Seeds([[1, 2, 3]]), [[2] * num_types] * 2)
        return len(recorder.calls)

    assert calls(2) == calls(100)


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    counts = torch.zeros(5, dtype=torch.long, device=device)
    ids = torch.zeros(2, dtype=torch.long, device=device)
    types = torch.zeros(1, 6, dtype=torch.long, device=device)
    table, small = torch.full((1, 4), -1, device=device), torch.zeros_like(ids, dtype=torch.int32)
    with pytest.raises(RuntimeError, match='counts'):
        ops.begin_typed(ids, None, ids, None, counts, types, table, small, small, 1, 1, 1, 4)
    with pytest.raises(RuntimeError, match='types must have shape'):
        ops.begin_typed(ids, None, ids, None, counts, types[:, :5], table, small, small, 1, 1, 1, 4)
