import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _profile import Before
from _raw_ops import fitting_map, ops, reference, sample_subgraph
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_fast.datasets import planted_structure
from pyg_fast.ops import (
    NodeMap,
    SampledSubgraph,
    match,
    neighbor_sample,
    pinsage_neighbors,
    random_walk,
    relabel,
    to_csr,
)

from ._graphs import GRAPHS, Edges, edge_lists

pytestmark = pytest.mark.usefixtures('several_threads')

SQUARE = [name for name, edges in GRAPHS.items() if edges.num_src == edges.num_dst > 0]
FANOUTS = [(3,), (-1,), (1, 2), (2, -1), (5, 9, 3), (40, 17)]


def csr_of(edges: Edges, index: torch.dtype = torch.int32) -> tuple[Tensor, Tensor, Tensor]:
    csr = to_csr(edges.edge_index, edges.num_src, edges.num_dst)
    return tuple(t.to(index) for t in csr)


def sample(
    device: torch.device, csr: tuple[Tensor, ...], seeds: Tensor, fanouts: tuple, **options: Any
) -> SampledSubgraph:
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return neighbor_sample(
        csr[0].to(device), csr[1].to(device), seeds.to(device), fanouts, **options
    )


def assert_equal(out: SampledSubgraph, expected: tuple, induced: bool = False) -> None:
    n_id, edge_index, e_id, nodes, edges = expected
    assert torch.equal(out.n_id.cpu(), n_id)
    assert torch.equal(out.edge_index.cpu(), edge_index)
    assert torch.equal(out.e_id.cpu(), e_id)
    assert out.num_sampled_nodes == nodes
    assert out.num_sampled_edges == (None if induced else edges)
    assert torch.equal(out.col.cpu(), edge_index[0].int())
    rowptr = torch.bincount(edge_index[1], minlength=n_id.numel()).cumsum(0)
    assert torch.equal(out.rowptr.cpu(), torch.nn.functional.pad(rowptr, (1, 0)).int())


def weights_of(num_edges: int) -> Tensor:
    return torch.randint(0, 5, (num_edges,)) / 4


@pytest.mark.parametrize('name', SQUARE)
@pytest.mark.parametrize('fanouts', FANOUTS)
@pytest.mark.parametrize('hashed', [False, True])
def test_is_its_definition(device: torch.device, name: str, fanouts: tuple, hashed: bool) -> None:
    edges = GRAPHS[name]
    rowptr, col, _ = csr_of(edges)
    weight = weights_of(col.numel())
    node_map = NodeMap(edges.num_src, device, hashed)
    for seeds in (torch.arange(edges.num_src), torch.tensor([0]), torch.tensor([0, 0]),
                  torch.empty(0, dtype=torch.long)):  # fmt: skip
        for options in (
            {}, {'replace': True}, {'induced': True}, {'edge_weight': weight},
            {'edge_weight': weight, 'replace': True},
        ):  # fmt: skip
            for seed in (3, -1):
                expected = reference.neighbor_sample(
                    rowptr, col, seeds, fanouts, seed=seed, **options
                )
                out = sample(
                    device, (rowptr, col), seeds, fanouts, seed=seed, node_map=node_map, **options
                )
                assert_equal(out, expected, 'induced' in options)


@pytest.mark.parametrize('hashed', [False, True])
@pytest.mark.parametrize('induced', [False, True])
def test_how_many_seeds_the_device_knows(device: torch.device, hashed: bool, induced: bool) -> None:
    edges = torch.randint(3000, (2, 20000))
    rowptr, col, perm = (t.to(device) for t in to_csr(edges, 3000, 3000))
    node_map = NodeMap(3000, device, hashed)
    for count in (1, 40):
        seeds = torch.randperm(3000, device=device)[:count]
        repeated = torch.cat([seeds, seeds[-1:].repeat(count)])
        wanted, got = (
            sample_subgraph(
                rowptr, col, perm, None, nodes, (5, 9), False, induced, 3, node_map, number
            )
            for nodes, number in ((seeds, None), (repeated, torch.tensor(count, device=device)))
        )
        for key, value in wanted._asdict().items():
            other = getattr(got, key)
            assert other.equal(value) if isinstance(value, Tensor) else other == value


@given(
    edges=edge_lists(square=True),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 3, 8, 33]), min_size=1, max_size=3),
    replace=st.booleans(),
    weighted=st.booleans(),
    induced=st.booleans(),
    index=st.sampled_from([torch.int32, torch.int64]),
    col64=st.booleans(),
    seed=st.integers(-(2**63), 2**64 - 1),
)
def test_random_graphs(
    device: torch.device, edges: Edges, fanouts: list[int], replace: bool, weighted: bool,
    induced: bool, index: torch.dtype, col64: bool, seed: int,
) -> None:  # fmt: skip
    rowptr, col, perm = csr_of(edges, index)
    col = col if col64 else col.int()
    seeds = torch.randint(max(edges.num_src, 1), (min(edges.num_src, 4),))
    weight = weights_of(col.numel()) if weighted else None
    options = dict(replace=replace, induced=induced, seed=seed)
    expected = reference.neighbor_sample(rowptr, col, seeds, fanouts, weight, **options)
    out = sample(device, (rowptr, col), seeds, tuple(fanouts), edge_weight=weight, **options)
    assert_equal(out, expected, induced)
    named = sample(
        device, (rowptr, col), seeds.int(), tuple(fanouts), edge_weight=weight, perm=perm, **options
    )
    assert torch.equal(named.e_id.cpu(), perm[expected[2]].long())


@pytest.mark.parametrize('hashed', [False, True])
def test_a_larger_graph(device: torch.device, hashed: bool) -> None:
    rowptr, col = (t.to(device) for t in planted_structure('small'))
    num_nodes = rowptr.numel() - 1
    degree = rowptr.diff()
    node_map = NodeMap(num_nodes, device, hashed)
    for number, fanouts in enumerate([(15, 10, 5), (20, 100), (4, -1, 2)]):
        seeds = torch.randperm(num_nodes, device=device)[:700]
        out = neighbor_sample(rowptr, col, seeds, fanouts, seed=number, node_map=node_map)
        assert torch.equal(out.n_id[:700], seeds)
        assert out.n_id.unique().numel() == out.n_id.numel() == sum(out.num_sampled_nodes)
        assert out.e_id.unique().numel() == out.e_id.numel() == sum(out.num_sampled_edges)
        source, destination = out.n_id[out.edge_index]
        assert torch.equal(col[out.e_id].long(), source)
        assert bool((rowptr[destination] <= out.e_id).all())
        assert bool((out.e_id < rowptr[destination + 1]).all())
        most = [num_nodes if fanout < 0 else fanout for fanout in fanouts]
        bound = torch.tensor(most, device=device).repeat_interleave(
            torch.tensor(out.num_sampled_nodes[:-1], device=device)
        )
        expanded = out.n_id[: bound.numel()]
        assert torch.equal(
            out.rowptr.diff()[: bound.numel()], torch.minimum(degree[expanded], bound).int()
        )
        # In the order in which they occur.
        first = {}
        for node in [*seeds.tolist(), *source.tolist()]:
            first.setdefault(node, len(first))
        assert out.n_id.tolist() == [*first]


def test_full_neighborhoods(device: torch.device) -> None:
    rowptr, col = (t.to(device) for t in planted_structure('tiny'))
    seeds = torch.tensor([7, 3], device=device)
    out = neighbor_sample(rowptr, col, seeds, [-1, -1])
    met = {7, 3}
    for _ in range(2):
        met |= {s for n in [*met] for s in col[rowptr[n] : rowptr[n + 1]].tolist()}
    assert set(out.n_id.tolist()) == met
    assert torch.equal(out.n_id[out.col.long()], col[out.e_id].long())


def counts_of(device: torch.device, degree: int, fanout: int, **options: Any) -> Counter:
    """How often each set of edges of one node is drawn, of the copies of a star."""
    copies = 6000
    rowptr = torch.arange(copies + 1) * degree
    rowptr = torch.cat([rowptr, rowptr[-1:].expand(degree)]).int()
    col = (torch.arange(degree).repeat(copies) + copies).int()
    if 'edge_weight' in options:
        options['edge_weight'] = options['edge_weight'].repeat(copies)
    out = sample(device, (rowptr, col), torch.arange(copies), (fanout,), seed=5, **options)
    drawn = (out.e_id.view(copies, -1) % degree).cpu()
    return Counter(map(tuple, drawn.sort(1)[0].tolist()))


def distance(counts: Counter, shares: dict[tuple, float]) -> float:
    """By the statistic of the chi-square test, in its standard deviations from its mean."""
    total = sum(counts.values())
    assert counts.keys() <= {key for key, share in shares.items() if share > 0}
    statistic = sum((counts[k] - total * p) ** 2 / (total * p) for k, p in shares.items() if p > 0)
    freedom = sum(p > 0 for p in shares.values()) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(('degree', 'fanout'), [(5, 2), (6, 3), (7, 6), (4, 1)])
def test_all_sets_are_as_likely(device: torch.device, degree: int, fanout: int) -> None:
    sets = torch.combinations(torch.arange(degree), fanout).tolist()
    assert distance(counts_of(device, degree, fanout), {tuple(s): 1 / len(sets) for s in sets}) < 4


def test_edges_of_long_rows_are_as_likely(device: torch.device) -> None:
    for fanout in (10, 40, 100):
        drawn = counts_of(device, 120, fanout)
        counts = Counter({(e,): 0 for e in range(120)})
        for chosen, number in drawn.items():
            assert len(set(chosen)) == fanout
            counts.update({(e,): number for e in chosen})
        assert distance(counts, {(e,): 1 / 120 for e in range(120)}) < 4


def test_put_back(device: torch.device) -> None:
    pairs = {(a, b): (2 - (a == b)) / 16 for a in range(4) for b in range(a, 4)}
    assert distance(counts_of(device, 4, 2, replace=True), pairs) < 4


def test_weights(device: torch.device) -> None:
    weight = torch.tensor([1.0, 2.0, 0.0, 5.0])
    share = (weight / weight.sum()).tolist()
    pairs = {
        (a, b): share[a] * share[b] * (1 / (1 - share[a]) + 1 / (1 - share[b]))
        for a in range(4)
        for b in range(a + 1, 4)
    }
    assert distance(counts_of(device, 4, 2, edge_weight=weight), pairs) < 4
    pairs = {(a, b): share[a] * share[b] * (2 - (a == b)) for a in range(4) for b in range(a, 4)}
    drawn = counts_of(device, 4, 2, edge_weight=weight, replace=True)
    assert distance(drawn, pairs) < 4


def test_many_weighted_neighbors(device: torch.device) -> None:
    weight = torch.rand(200).double()
    weight[::7] = 0
    rowptr, col = torch.tensor([0, 200] + [200] * 200), torch.arange(1, 201)
    seeds = torch.tensor([0])
    for fanout in (31, 32, 33, 64, 100, 170, 171, 172):
        expected = reference.neighbor_sample(rowptr, col, seeds, (fanout,), weight, seed=2)
        assert_equal(
            sample(device, (rowptr, col), seeds, (fanout,), edge_weight=weight, seed=2), expected
        )
    all_of_them = sample(device, (rowptr, col), seeds, (-1,), edge_weight=weight)
    assert all_of_them.e_id.tolist() == [*range(200)]


def test_seeds_of_random_numbers(device: torch.device) -> None:
    csr = planted_structure('tiny')

    def run(**seed: int) -> Tensor:
        return sample(device, csr, torch.arange(50), (3, 2), **seed).e_id

    assert torch.equal(run(seed=4), run(seed=4))
    assert not torch.equal(run(seed=4), run(seed=5))
    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(first, run())
    assert not torch.equal(first, second)


def test_stamps_run_out(device: torch.device) -> None:
    csr = planted_structure('tiny')
    node_map = NodeMap(300, device)

    def run() -> SampledSubgraph:
        return sample(device, csr, torch.arange(9), (3, 2), seed=1, node_map=node_map)

    first = run()
    node_map._stamp = 2
    for _ in range(5):
        assert torch.equal(run().edge_index, first.edge_index)
    assert node_map._stamp > 2**31


def test_sizes_that_are_waited_for(device: torch.device, limits: Callable[..., None]) -> None:
    csr, seeds = planted_structure('tiny'), torch.arange(100)
    first = sample(device, csr, seeds, (4, 3, 2), seed=1)
    limits(edges_guessed=500)
    again = sample(device, csr, seeds, (4, 3, 2), seed=1)
    assert all(map(torch.equal, first[:5], again[:5]))
    assert first[5:] == again[5:]


def test_graph_in_host_memory(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    rowptr, col = planted_structure('small')
    perm = torch.randperm(col.numel()).int()
    seeds = torch.arange(100)
    for options in ({}, {'induced': True}, {'replace': True}):
        expected = neighbor_sample(rowptr, col, seeds, [5, -1], perm=perm, seed=1, **options)
        pinned = [t.pin_memory() for t in (rowptr, col, perm)]
        out = neighbor_sample(
            *pinned[:2], seeds.to(device), [5, -1], perm=pinned[2], seed=1, **options
        )
        assert out.n_id.is_cuda
        assert all(torch.equal(a.cpu(), b) for a, b in zip(out[:5], expected[:5], strict=True))
    with pytest.raises(ValueError, match='pinned host memory'):
        neighbor_sample(rowptr, col, seeds.to(device), [5])


def test_weights_in_host_memory(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    rowptr, col = planted_structure('small')
    perm = torch.randperm(2 * col.numel()).int()[::2]
    pinned, seeds = [t.pin_memory() for t in (rowptr, col)], torch.arange(100)
    for dtype in (torch.float32, torch.float64):
        weight = torch.rand(col.numel()).to(dtype)
        for replace in (False, True):
            options = {'edge_weight': weight, 'replace': replace, 'seed': 1}
            expected = neighbor_sample(
                rowptr.to(device), col.to(device), seeds.to(device), [5, 3],
                **{**options, 'edge_weight': weight.to(device)},
            )  # fmt: skip
            out = neighbor_sample(*pinned, seeds.to(device), [5, 3], **options)
            assert all(map(torch.equal, out[:5], expected[:5]))
    with pytest.raises(ValueError, match="'perm' must be"):
        neighbor_sample(*pinned, seeds.to(device), [5], perm=perm)


@pytest.mark.parametrize('kind', ['walk', 'visits', 'induced'])
def test_graph_in_host_memory_outlives_the_call(device: torch.device, kind: str) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU reads before the call returns')
    calls: dict[str, Callable] = {
        'walk': lambda csr: random_walk(*csr, seeds, 20, seed=1),
        'visits': lambda csr: pinsage_neighbors(
            *csr, seeds, 5, num_walks=20, walk_length=5, seed=1
        )[0],
        'induced': lambda csr: neighbor_sample(*csr, seeds, [4], induced=True, seed=1).edge_index,
    }
    csr, call = planted_structure('small'), calls[kind]
    seeds = torch.arange(1000, device=device)
    wanted = call(tuple(t.to(device) for t in csr))
    for _ in range(3):
        torch.cuda._sleep(500_000_000)
        pinned = [t.pin_memory() for t in csr]
        out = call(pinned)
        sizes = [t.numel() for t in pinned]
        del pinned
        again = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for size in sizes]
        assert torch.equal(out, wanted)
        del again


@pytest.mark.parametrize('fanouts', [(-1, -1, -1), (2, -1)])
def test_counts_are_written_before_they_are_read(
    device: torch.device, limits: Callable[..., None], fanouts: tuple
) -> None:
    limits(edges_guessed=0)  # As for large graphs: each hop is waited for.
    seen = []

    def look(*args: Any) -> None:
        counts, hop = args[3], args[5]
        seen.append(counts[:, : hop + 2].clone())

    torch.use_deterministic_algorithms(True)  # Fills memory that is not written.
    try:
        with Before('sample_counts', look):
            sample(device, planted_structure('tiny'), torch.arange(10), fanouts)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(seen) == len(fanouts)
    assert all(int(counts.max()) < 2**31 for counts in seen)


def test_input_is_left_alone(device: torch.device) -> None:
    rowptr, col = (t.to(device) for t in planted_structure('tiny'))
    seeds = torch.arange(10, device=device)
    before = [t.clone() for t in (rowptr, col, seeds)]
    out = neighbor_sample(rowptr, col, seeds, [3], node_map=(node_map := NodeMap(300, device)))
    kept = [t.clone() for t in out[:5]]
    neighbor_sample(rowptr, col, seeds + 5, [7, 3], node_map=node_map)
    assert all(map(torch.equal, out[:5], kept))
    assert all(map(torch.equal, (rowptr, col, seeds), before))


GOOD = {
    'rowptr': torch.tensor([0, 1, 3]),
    'col': torch.tensor([1, 0, 1]),
    'seeds': torch.tensor([0]),
    'num_neighbors': [2],
}


@pytest.mark.parametrize(
    ('error', 'message', 'changes'),
    [
        (TypeError, "'rowptr' must be a tensor, got list", {'rowptr': [0, 1]}),
        (TypeError, "'seeds' must hold integers, got torch.float32", {'seeds': torch.zeros(1)}),
        (TypeError, "'seeds' must hold integers", {'seeds': torch.tensor([True])}),
        (TypeError, "'rowptr' must hold int32 or int64", {'rowptr': torch.zeros(2).short()}),
        (TypeError, "'col' must hold int32, or int64 if", {'col': torch.zeros(3).short()}),
        (ValueError, "'col' must have one dimension, got 2", {'col': torch.zeros(3, 1).long()}),
        (ValueError, "'rowptr' must have num_nodes", {'rowptr': torch.zeros(0).long()}),
        (ValueError, 'ascend', {'rowptr': torch.tensor([0, 2, 1])}),
        (ValueError, 'ascend', {'rowptr': torch.tensor([0, 2, 4])}),
        (ValueError, 'ascend', {'rowptr': torch.tensor([1, 2, 3])}),
        (ValueError, "'perm' must have 3 entries, got 2", {'perm': torch.zeros(2).long()}),
        (TypeError, "'perm' must hold torch.int64", {'perm': torch.zeros(3).int()}),
        (IndexError, r"'seeds' must hold nodes in \[0, 2\), got .* 2 to 2",
         {'seeds': torch.tensor([2])}),
        (IndexError, "'seeds'.*-1", {'seeds': torch.tensor([-1])}),
        (IndexError, "'col'.*0 to 5", {'col': torch.tensor([0, 5, 1])}),
        (TypeError, "'num_neighbors' must be a list of integers, got int", {'num_neighbors': 3}),
        (TypeError, "'num_neighbors' must hold integers, got float", {'num_neighbors': [2.0]}),
        (ValueError, "'num_neighbors' must name at least one hop", {'num_neighbors': []}),
        (ValueError, "'num_neighbors'.*got 0", {'num_neighbors': [2, 0]}),
        (ValueError, "'num_neighbors'.*got -2", {'num_neighbors': [-2]}),
        (TypeError, "'edge_weight' must hold floating", {'edge_weight': torch.tensor([1, 2, 3])}),
        (ValueError, r"'edge_weight' must have shape \[3\]", {'edge_weight': torch.rand(2)}),
        (ValueError, "'edge_weight' must not be negative",
         {'edge_weight': torch.tensor([1.0, -1.0, 1.0])}),
        (ValueError, "'edge_weight' must not", {'edge_weight': torch.tensor([1, torch.nan, 1])}),
        (TypeError, "'seed' must be an integer, got float", {'seed': 1.0}),
        (ValueError, "'node_map' must be of 2 nodes", {'node_map': NodeMap(3, 'cpu')}),
    ],
)  # fmt: skip
def test_bad_input(error: type, message: str, changes: dict) -> None:
    with pytest.raises(error, match=message):
        neighbor_sample(**{**GOOD, **changes})


def test_too_many_edges(device: torch.device) -> None:
    rowptr, col = torch.tensor([0, 1]), torch.tensor([0])
    with pytest.raises(ValueError, match='2147483647 edges, got'):
        sample(device, (rowptr, col), torch.tensor([0, 0]), (2**30, 2**30), replace=True)


# --- relabel -------------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 30), max_size=60), hashed=st.booleans())
def test_relabel(device: torch.device, ids: list[int], hashed: bool) -> None:
    tensor = torch.tensor(ids, dtype=torch.long)
    expected = reference.relabel(tensor)
    node_map = NodeMap(31, device, hashed)
    for out in (
        relabel(tensor.to(device)),
        relabel(tensor.to(device).int(), 31),
        relabel(tensor.to(device), node_map=node_map),
        relabel(tensor.to(device), 31, node_map=node_map),
    ):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(out, expected, strict=True))


@pytest.mark.parametrize('bound', [500, 10**7, 2**62])
def test_relabel_many(device: torch.device, bound: int) -> None:
    ids = torch.randint(bound, (20_000,))
    ids[10_000:] = ids[torch.randint(10_000, (10_000,))]
    unique, local = relabel(ids.to(device))
    assert torch.equal(unique[local].cpu(), ids)
    assert torch.equal(unique.cpu(), reference.relabel(ids)[0])
    strided = ids.to(device)[::3]
    assert torch.equal(relabel(strided)[0].cpu(), reference.relabel(ids[::3])[0])


@pytest.mark.parametrize(
    ('error', 'message', 'ids', 'options'),
    [
        (TypeError, "'ids' must be a tensor, got list", [1], {}),
        (TypeError, 'got torch.float32', torch.rand(2), {}),
        (TypeError, 'got torch.bool', torch.tensor([True]), {}),
        (ValueError, "'ids' must have one dimension, got 2", torch.zeros(2, 2).long(), {}),
        (IndexError, r"'ids' must hold nodes in \[0, 4\), got .* -1 to 3",
         torch.tensor([-1, 3]), {}),
        (IndexError, r'\[0, 3\)', torch.tensor([3]), {'num_ids': 3}),
        (ValueError, "'node_map'", torch.tensor([2]),
         {'num_ids': 3, 'node_map': NodeMap(4, 'cpu')}),
    ],
)  # fmt: skip
def test_bad_ids(error: type, message: str, ids: Any, options: dict) -> None:
    with pytest.raises(error, match=message):
        relabel(ids, **options)


def test_node_map() -> None:
    with pytest.raises(ValueError, match="'num_nodes' must not be negative, got -1"):
        NodeMap(-1, 'cpu')
    assert not NodeMap(2**27, 'cpu').hashed
    assert NodeMap(2**27 + 1, 'cpu').hashed
    cpu = torch.device('cpu')
    assert fitting_map(None, 2**27 + 1, 2**27 + 1, cpu).hashed
    assert fitting_map(None, 10**6, 10, cpu).hashed
    assert not fitting_map(None, 10**6, 10**6, cpu).hashed


@pytest.mark.parametrize(
    'copied', [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_of_a_node_map(device: torch.device, copied: Callable) -> None:
    node_map = NodeMap(50, device, hashed=True)
    ids = torch.randint(50, (80,), device=device)
    wanted = relabel(ids)
    relabel(ids.flip(0), node_map=node_map)
    other = copied(node_map)
    assert (other.num_nodes, other.device, other.hashed) == (50, node_map.device, True)
    for used in (other, node_map, other):
        assert all(map(torch.equal, relabel(ids, node_map=used), wanted))


@pytest.mark.parametrize('hashed', [False, True])
def test_a_node_map_goes_from_stream_to_stream(device: torch.device, hashed: bool) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU has no streams')
    num_nodes, node_map = 10**6, NodeMap(10**6, device, hashed)
    lists = [torch.randperm(num_nodes, device=device)[: 10**5] for _ in range(8)]
    wanted = [match(a, b, num_nodes) for a, b in zip(lists, lists[1:], strict=False)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    got = []
    for k, pair in enumerate(zip(lists, lists[1:], strict=False)):
        with torch.cuda.stream(streams[k % 2]):
            torch.cuda._sleep(20_000_000)
            got.append(match(*pair, num_nodes, node_map=node_map))
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, wanted))


def test_a_node_map_in_a_capture(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('of CUDA only')
    ids, node_map = torch.arange(5, device=device), NodeMap(9, device)
    match(ids, ids, 9, node_map=node_map)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match='while a CUDA graph is captured'),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        match(ids, ids, 9, node_map=node_map)
    assert torch.equal(match(ids, ids, 9, node_map=node_map), ids)


# --- raw ops -------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Keeps the ops of ours that run, and with which arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == 'pyg_fast':
            given = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
            self.calls.append((func, given))
        return func(*args, **(kwargs or {}))


def test_opcheck(device: torch.device) -> None:
    rowptr, col, perm = csr_of(GRAPHS['square'])
    with Recorder() as recorder:
        for options in ({'perm': perm}, {'induced': True}):
            sample(device, (rowptr, col), torch.arange(4), (2, 3), seed=1, **options)
        relabel(col.to(device))
    assert len({op for op, _ in recorder.calls}) == 8
    for op, args in recorder.calls:
        torch.library.opcheck(op, args, test_utils=('test_schema', 'test_faketensor'))


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    ids = torch.tensor([1, 0], device=device)
    table = torch.full((1, 4), -1, device=device)
    for bad in (table.int(), table.view(-1), table.expand(3, 4), torch.zeros(2, 6).long()):
        with pytest.raises(RuntimeError, match='map'):
            ops.relabel(ids, bad.to(device), 1)
    for stamp in (-1, 2**32 - 1):
        with pytest.raises(RuntimeError, match='stamp must be'):
            ops.relabel(ids, table, stamp)
    with pytest.raises(RuntimeError, match='ids must have one dimension'):
        ops.relabel(ids.view(1, 2), table, 1)
