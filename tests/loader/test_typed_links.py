"""Batches around links of graphs with several types, with times, and with a subgraph for each
seed."""

import math
import pickle
import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, ZipLoader
from torch_geometric.sampler import NegativeSampling
from torch_geometric.utils import trim_to_layer

from pyg_fast.loader import FastLinkNeighborLoader
from tests.loader._graphs import random_data
from tests.loader._hetero import EDGES, plain_graph, random_hetero
from tests.loader._parts import _links, _sample, mix_seeds
from tests.loader.test_hetero import flat
from tests.ops._typed import Rule, Seeds, sample

WRITES, CITES = ('author', 'writes', 'paper'), ('paper', 'cites', 'paper')
REVERSE = {WRITES: ('paper', 'of', 'author'), CITES: CITES, None: True}


def timed_data(seed: int = 0) -> Data:
    data = random_data(40, 200, seed)
    generator = torch.Generator().manual_seed(seed)
    data.time = torch.randint(-5, 15, (40,), generator=generator)
    data.edge_time = torch.randint(20, (200,), generator=generator)
    return data


def links_from(data: Data | HeteroData, kind: Any) -> Tensor:
    """Some edges of a type, and a pair that is none."""
    edges = (data if kind is None else data[kind]).edge_index
    return torch.cat([edges[:, ::3], torch.tensor([[0], [1]])], 1)


def loader_of(data: Data | HeteroData, kind: Any, links: Tensor, **kwargs: Any) -> Any:
    given = links if kind is None else (kind, links)
    return FastLinkNeighborLoader(data, edge_label_index=given, seed=5, **kwargs)


def stores_of(batch: Any, kind: Any) -> tuple[Any, Any, Any]:
    """What has the sources, the links and the destinations."""
    return (batch,) * 3 if kind is None else (batch[kind[0]], batch[kind], batch[kind[2]])


def ends_of(batch: Any, kind: Any) -> tuple[Tensor, Tensor]:
    """The sources and the destinations that a batch names, negative ones last, as positions in
    :obj:`n_id`."""
    src, link, dst = stores_of(batch, kind)
    if 'edge_label_index' in link:
        return tuple(link.edge_label_index)
    negative = dst.dst_neg_index.view(link.input_id.numel(), -1).t().reshape(-1)
    return src.src_index, torch.cat([dst.dst_pos_index, negative])


OPTIONS: dict[str, dict[str, Any]] = {
    'joint': {},
    'induced': {'subgraph_type': 'induced'},
    'disjoint': {'disjoint': True},
    'time': {'time_attr': 'time'},
    'last edges': {'time_attr': 'edge_time', 'temporal_strategy': 'last', 'max_age': 9},
}
NEGATIVES = [
    NegativeSampling('triplet', 3), NegativeSampling('binary', 0.5), None,
    NegativeSampling('triplet', 1), NegativeSampling('binary', 2),
]  # fmt: skip


@pytest.mark.parametrize('kind', [WRITES, CITES, None])
@pytest.mark.parametrize('how', [name for name in OPTIONS if name != 'induced'])
@pytest.mark.parametrize('drops', [False, True])
def test_samples_around_links(device: torch.device, how: str, kind: Any, drops: bool) -> None:
    """The seeds are those of the layout, and the sample is that of the reference."""
    data = timed_data() if kind is None else random_hetero()
    links, options = links_from(data, kind), OPTIONS[how]
    time = torch.arange(links.size(1), dtype=torch.int32) % 17
    options = {**options, 'edge_label_time': time} if 'time_attr' in options else options
    if drops:
        options = {**options, 'drop_seed_edges': True, 'rev_edge_type': REVERSE[kind]}
    for negatives in NEGATIVES[: 2 if drops else None]:
        loader = loader_of(
            data, kind, links, num_neighbors=[3, 2], batch_size=7, neg_sampling=negatives,
            device=device, **options,
        )  # fmt: skip
        batch = loader(torch.arange(10, 17)).cpu()
        check_links(batch, kind, links[:, 10:17], negatives, time[10:17], options)
        seed = mix_seeds(5, 0, 0, 2)  # of the first call
        check_sample(data, batch, kind, options, seed, links[:, 10:17] if drops else None)


@given(
    seed=st.integers(0, 10**6), kind=st.sampled_from([WRITES, CITES, None]),
    how=st.sampled_from([name for name in OPTIONS if name != 'induced']), drops=st.booleans(),
    amount=st.sampled_from([None, 0.1, 0.5, 1, 3.7]), triplet=st.booleans(), exact=st.booleans(),
    few=st.booleans(),
)  # fmt: skip
def test_random_links(
    device: torch.device, seed: int, kind: Any, how: str, drops: bool, amount: float | None,
    triplet: bool, exact: bool, few: bool,
) -> None:  # fmt: skip
    """Random graphs, links that are edges or not, repeated links."""
    generator = torch.Generator().manual_seed(seed)
    data = timed_data(seed) if kind is None else random_hetero(seed)
    sizes = [store.num_nodes for store in stores_of(data, kind)[::2]]
    links = torch.stack([torch.randint(size, (30,), generator=generator) for size in sizes])
    links[:, ::2] = (data if kind is None else data[kind]).edge_index[:, :15]
    if few:
        links = links[:, torch.randint(4, (30,), generator=generator)]
    time = torch.randint(-3, 25, (30,), generator=generator).int()
    options, negatives = {**OPTIONS[how]}, None
    if 'time_attr' in options:
        options['edge_label_time'] = time
    if drops:
        options |= {'drop_seed_edges': True, 'rev_edge_type': REVERSE[kind]}
    if amount is not None:
        mode = 'triplet' if triplet else 'binary'
        negatives = NegativeSampling(mode, math.ceil(amount) if triplet else amount)
    loader = loader_of(
        data, kind, links, num_neighbors=[3, 2], neg_sampling=negatives, device=device,
        true_negatives=exact and amount is not None, **options,
    )  # fmt: skip
    batch = loader(torch.arange(10, 17)).cpu()
    check_links(batch, kind, links[:, 10:17], negatives, time[10:17], options)
    dropped = links[:, 10:17] if drops else None
    check_sample(data, batch, kind, options, mix_seeds(5, 0, 0, 2), dropped)


def check_links(
    batch: Any, kind: Any, links: Tensor, negatives: NegativeSampling | None, time: Tensor,
    options: dict,
) -> None:  # fmt: skip
    """Checks what a batch tells of its links."""
    src, link, dst = stores_of(batch, kind)
    is_disjoint = 'time_attr' in options or 'disjoint' in options
    num_pos = links.size(1)
    assert link.input_id.tolist() == list(range(10, 10 + num_pos))
    ends = ends_of(batch, kind)
    for end, store, row in zip(ends, (src, dst), links, strict=True):
        assert torch.equal(store.n_id[end[:num_pos]], row)
        if is_disjoint:
            number = torch.arange(end.numel()) % num_pos
            assert torch.equal(store.batch[end], number)
    if negatives is not None and negatives.is_triplet():
        assert ends[0].numel() == num_pos
        assert ends[1].numel() == num_pos * (1 + negatives.amount)
        shape = [num_pos, negatives.amount] if negatives.amount > 1 else [num_pos]
        assert list(dst.dst_neg_index.shape) == shape
        labels = ('edge_label', 'edge_label_index', 'edge_label_time')
        assert not any(name in link for name in labels)
        if 'time_attr' in options:
            assert torch.equal(src.seed_time, time)
            assert torch.equal(dst.seed_time, time)
            assert src.seed_time.dtype == torch.int32
    else:
        count = num_pos + (0 if negatives is None else -int(-num_pos * negatives.amount // 1))
        assert list(link.edge_label_index.shape) == [2, count]
        assert ('edge_label' in link) == (negatives is not None)
        if negatives is not None:
            assert link.edge_label.tolist() == [1.0] * num_pos + [0.0] * (count - num_pos)
        if 'time_attr' in options:
            assert torch.equal(link.edge_label_time, time.repeat(count)[:count])


def check_sample(
    data: Any, batch: Any, kind: Any, options: dict, seed: int, dropped: Tensor | None
) -> None:
    """Compares nodes and edges with those that the reference samples around the batch's seeds."""
    types = [None] if kind is None else data.node_types
    node_stores = [batch] if kind is None else [batch[key] for key in types]
    nodes = [store.n_id[: store.num_sampled_nodes[0]].tolist() for store in node_stores]
    ends = ends_of(batch, kind)
    has_time = 'time_attr' in options
    roots = times = None
    if has_time or 'disjoint' in options:
        order = [None] if kind is None else list(dict.fromkeys((kind[0], kind[2])))
        sizes = {key: len(nodes[types.index(key)]) for key in order}
        first, count = {}, 0
        for key in order:
            first[key], count = count, count + sizes[key]
        roots = [
            list(range(first[key], first[key] + len(of_type))) if key in first else []
            for key, of_type in zip(types, nodes, strict=True)
        ]
        num_pos = stores_of(batch, kind)[1].input_id.numel()
        number = torch.cat([torch.arange(end.numel()) % num_pos for end in ends])
        if has_time:
            times = options['edge_label_time'][10:17][number].tolist()
        assert count == number.numel()
    else:
        assert all(sorted(set(of_type)) == of_type for of_type in nodes)
        seeds = {key: set() for key in types}
        for key, end in zip((None, None) if kind is None else kind[::2], ends, strict=True):
            seeds[key] |= set(end.tolist())
        assert [len(seeds[key]) for key in types] == list(map(len, nodes))
    num_types = 1 if kind is None else len(EDGES)
    wanted = sample(
        plain_graph(data, options.get('time_attr')), Seeds(nodes, roots, times),
        Rule([[3] * num_types, [2] * num_types], last='temporal_strategy' in options,
             max_age=options.get('max_age')), seed,
    )  # fmt: skip
    for store, found in zip(node_stores, wanted.nodes, strict=True):
        assert store.n_id.tolist() == [node for _, node in found]
        if roots is not None:
            assert store.batch.tolist() == [int(number[root]) for root, _ in found]
    edge_stores = [batch] if kind is None else [batch[key] for key in data.edge_types]
    for store, edges in zip(edge_stores, wanted.edges, strict=True):
        pairs = set()
        if dropped is not None:
            pairs = {
                pair for key, ends in ((kind, dropped), (REVERSE[kind], dropped.flip(0)))
                if kind is None or key == store._key for pair in zip(*ends.tolist(), strict=True)
            }  # fmt: skip
        given = (data if kind is None else data[store._key]).edge_index
        edges = [edge for edge in edges if tuple(given[:, edge[2]].tolist()) not in pairs]
        source, target = store.edge_index.as_tensor().tolist()
        assert list(zip(source, target, store.e_id.tolist(), strict=True)) == edges
        assert sum(store.num_sampled_edges) == len(edges)
        store.edge_index.validate()
        if 'edge_attr' in store:
            edge_attr = (data if kind is None else data[store._key]).edge_attr
            assert torch.equal(store.edge_attr, edge_attr[store.e_id])


@pytest.mark.parametrize('kind', [WRITES, CITES])
@pytest.mark.parametrize('mode', [None, 'binary', 'triplet'])
@pytest.mark.parametrize('subgraph_type', ['directional', 'induced'])
def test_hetero_batches_are_those_of_pyg(
    device: torch.device, kind: Any, mode: str | None, subgraph_type: str
) -> None:
    pytest.importorskip('torch_sparse')
    data = random_hetero()
    for store in data.edge_stores:
        del store.weight
    args = {
        'num_neighbors': [-1, -1], 'edge_label_index': (kind, links_from(data, kind).int()),
        'batch_size': 9, 'neg_sampling': mode, 'subgraph_type': subgraph_type,
    }  # fmt: skip
    if mode != 'triplet':
        args['edge_label'] = torch.arange(links_from(data, kind).size(1)) % 3
    ours = FastLinkNeighborLoader(data, **args, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        theirs = LinkNeighborLoader(
            data, **{**args, 'edge_label_index': (kind, links_from(data, kind))}
        )
    for got, wanted in zip(ours, theirs, strict=True):
        got = got.cpu()
        for store in wanted.stores[1:]:
            # What PyG's own sampler tells, and torch-sparse's does not.
            extra = {'num_sampled_nodes', 'num_sampled_edges', 'num_nodes'}
            assert set(store.keys()) - extra <= set(got[store._key].keys()), store._key
        _, link, _ = stores_of(got, kind)
        assert torch.equal(link.input_id, wanted[kind].input_id)
        if mode != 'triplet':
            assert torch.equal(link.edge_label, wanted[kind].edge_label)
        for name, store in (('src_index', kind[0]), ('dst_neg_index', kind[2])):
            if mode == 'triplet':
                assert got[store][name].shape == wanted[store][name].shape
        if mode is not None:
            continue
        assert torch.equal(link.edge_label_index, wanted[kind].edge_label_index)
        for key in data.node_types:
            assert sorted(got[key].n_id.tolist()) == sorted(wanted[key].n_id.tolist())
        for key in data.edge_types:
            assert sorted(got[key].e_id.tolist()) == sorted(wanted[key].e_id.tolist())


@pytest.mark.parametrize('mode', ['binary', 'triplet'])
@pytest.mark.parametrize('kind', [WRITES, CITES, None])
@pytest.mark.parametrize('true_negatives', [False, True])
def test_negatives_exist_at_the_time_of_their_link(
    device: torch.device, mode: str, kind: Any, true_negatives: bool
) -> None:
    data = timed_data() if kind is None else random_hetero()
    links = links_from(data, kind)
    time = torch.arange(links.size(1)) % 24 - 7
    for weighted in (False, True):
        sizes = [store.num_nodes for store in stores_of(data, kind)[::2]]
        weights = [torch.arange(size) % 2 for size in sizes] if weighted else [None, None]
        loader = loader_of(
            data, kind, links, num_neighbors=[1], batch_size=1000, time_attr='time',
            edge_label_time=time, neg_sampling=NegativeSampling(mode, 9, *weights),
            true_negatives=true_negatives, device=device,
        )  # fmt: skip
        (batch,) = loader
        batch, num_pos = batch.cpu(), links.size(1)
        stores, found = stores_of(batch, kind)[::2], []
        for end, store, whole, weight in zip(
            ends_of(batch, kind), stores, stores_of(data, kind)[::2], weights, strict=True
        ):
            nodes = store.n_id[end[num_pos:]]
            found.append(nodes)
            now = time.repeat(9)[: nodes.numel()]
            may = torch.ones(whole.num_nodes) > 0 if weight is None else weight > 0
            earliest = whole.time[may].min()
            exists = earliest <= now
            assert (whole.time[nodes] <= now)[exists].all()
            assert (whole.time[nodes] == earliest)[~exists].all()
            assert may[nodes].all()
            assert exists.any() or nodes.numel() == 0  # The sources of triplets are whole.
        if mode == 'triplet':
            found[0] = links[0].repeat(9)
        if true_negatives:
            edges = (data if kind is None else data[kind]).edge_index
            known = set(zip(*edges.tolist(), strict=True))
            nodes = stores_of(data, kind)[2].time
            for src, dst, now in zip(
                *(t.tolist() for t in found), time.repeat(9).tolist(), strict=True
            ):
                if (src, dst) in known:  # only where all others are edges, too
                    others = ((nodes <= now) & (weights[1] > 0 if weighted else True)).nonzero()
                    assert all((src, int(other)) in known for other in others)
    if kind is not None:  # Times of edges are none of nodes.
        loader = loader_of(
            data, kind, links, num_neighbors=[1], time_attr='edge_time', edge_label_time=time,
            neg_sampling=mode, batch_size=1000,
        )  # fmt: skip
        end = ends_of(next(iter(loader)), kind)[1]
        assert end.numel() == 2 * num_pos


def test_links_of_a_type_that_is_not_in_the_graph(device: torch.device) -> None:
    data = random_hetero()
    kind = ('author', 'likes', 'place')
    links = torch.tensor([[0, 24, 3], [5, 0, 5]])
    loader = loader_of(
        data, kind, links, num_neighbors=[2, 2], batch_size=3, neg_sampling='binary',
        drop_seed_edges=True, true_negatives=True, device=device,
    )  # fmt: skip
    (batch,) = loader
    assert kind not in data.edge_types
    src, dst = ends_of(batch, kind)
    assert torch.equal(batch['author'].n_id[src[:3]].cpu(), links[0])
    assert torch.equal(batch['place'].n_id[dst[:3]].cpu(), links[1])
    assert 'edge_index' not in batch[kind]


def test_all_edges_of_a_type(device: torch.device) -> None:
    data = random_hetero()
    for named in (WRITES, list(WRITES), (WRITES, None), ('author', 'paper')):
        loader = FastLinkNeighborLoader(data, [1], named, batch_size=100, device=device)
        (batch,) = loader
        batch = batch.cpu()
        src, dst = ends_of(batch, WRITES)
        links = torch.stack([batch['author'].n_id[src], batch['paper'].n_id[dst]])
        assert torch.equal(links, data[WRITES].edge_index)
        assert loader.input_data.input_type == WRITES


def test_dropping_edges_of_two_types_reads_numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each read waits."""
    reads: list[str] = []

    def counted(name: str) -> Any:
        real = getattr(Tensor, name)
        return lambda x, *args: (reads.append(name), real(x, *args))[1]

    def drop_edges(*args: Any) -> Any:
        reads.clear()
        out = real(*args)
        seen.append(list(reads))
        return out

    real, seen = _sample.drop_edges, []
    monkeypatch.setattr(_sample, 'drop_edges', drop_edges)
    for name in ('tolist', 'item', 'nonzero', '__bool__', '__int__'):
        monkeypatch.setattr(Tensor, name, counted(name))
    data = random_hetero()
    next(iter(loader_of(
        data, WRITES, data[WRITES].edge_index, num_neighbors=[-1, -1], batch_size=8,
        drop_seed_edges=True, rev_edge_type=REVERSE[WRITES],
    )))  # fmt: skip
    assert seen[0] == ['tolist']


@pytest.mark.parametrize('kind', [WRITES, CITES])
def test_no_edge_of_links_with_all_neighbors(device: torch.device, kind: Any) -> None:
    """The batch is that of the graph without these edges."""
    data = random_hetero()
    links = data[kind].edge_index[:, ::5]
    options = {'num_neighbors': [-1, -1], 'batch_size': 8, 'device': device}
    loader = loader_of(
        data, kind, links, **options, drop_seed_edges=True, rev_edge_type=REVERSE[kind]
    )
    for number, batch in enumerate(loader):
        mine = links[:, 8 * number : 8 * number + 8]
        rest = random_hetero()
        for key, ends in ((kind, mine), (REVERSE[kind], mine.flip(0))):
            dropped = set(zip(*ends.tolist(), strict=True))
            pairs = zip(*rest[key].edge_index.tolist(), strict=True)
            keep = torch.tensor([pair not in dropped for pair in pairs])
            for name, value in list(rest[key].items()):
                rest[key][name] = value[:, keep] if name == 'edge_index' else value[keep]
        (wanted,) = loader_of(rest, kind, mine, **options)
        for key in data.node_types:
            assert batch[key].n_id.tolist() == wanted[key].n_id.tolist()
        for key in data.edge_types:
            got, other = batch[key], wanted[key]
            assert torch.equal(got.edge_index.as_tensor(), other.edge_index.as_tensor())
            assert got.num_sampled_edges == other.num_sampled_edges
            assert torch.equal(got.edge_index._indptr, other.edge_index._indptr)
            if 'edge_time' in got:
                assert torch.equal(got.edge_time, other.edge_time)


def test_no_edge_of_links_in_bidirectional_batches(device: torch.device) -> None:
    data, back = random_hetero(), ('paper', 'rev_writes', 'author')
    for name, value in data[WRITES].items():
        data[back][name] = value.flip(0) if name == 'edge_index' else value
    loader = loader_of(
        data, WRITES, links_from(data, WRITES), num_neighbors=[3, 2], batch_size=9, device=device,
        subgraph_type='bidirectional', drop_seed_edges=True, rev_edge_type=back,
    )  # fmt: skip
    for batch in loader:
        n_id = [batch[key].n_id.cpu() for key in WRITES[::2]]
        links, edges, reverse = (
            set(zip(*(ids[end].tolist() for ids, end in zip(n_id, ends.cpu(), strict=True)),
                    strict=True))
            for ends in (batch[WRITES].edge_label_index, batch[WRITES].edge_index.as_tensor(),
                         batch[back].edge_index.as_tensor().flip(0))
        )  # fmt: skip
        assert edges
        assert edges == reverse
        assert not links & edges


def test_few_tensors_hold_a_batch_without_dropped_edges() -> None:
    """The stream that uses a batch is told of each of them."""
    data = random_hetero()
    links = data[WRITES].edge_index
    core = loader_of(data, WRITES, links, num_neighbors=[3, 3], drop_seed_edges=True)._core
    with core._borrow_node_map() as node_map:
        part = core._sample(torch.arange(9), 0, node_map)
    assert len(part.tensors()) < 3 * len(EDGES)


def test_dropped_edges_are_trimmed_with_the_rest(device: torch.device) -> None:
    data = random_hetero()
    links = data[WRITES].edge_index
    loader = loader_of(
        data, WRITES, links, num_neighbors=[3, 3], batch_size=9, drop_seed_edges=True,
        device=device,
    )  # fmt: skip
    for batch in loader:
        x = {key: batch[key].n_id[:, None].float() for key in data.node_types}
        plain = {key: edges.as_tensor() for key, edges in batch.edge_index_dict.items()}
        sizes = batch.collect('num_sampled_nodes'), batch.collect('num_sampled_edges')
        for edges in (batch.edge_index_dict, plain):
            first = trim_to_layer(0, *sizes, x, edges)
            trimmed = trim_to_layer(1, *sizes, *first[:2])[1]
            for key in data.edge_types:
                count = batch[key].num_sampled_edges[0]
                assert torch.equal(torch.stack(list(trimmed[key])), plain[key][:, :count])


@pytest.mark.parametrize('how', OPTIONS)
def test_copies_and_devices_give_the_same(device: torch.device, how: str) -> None:
    data = random_hetero()
    links, options = links_from(data, WRITES), {**OPTIONS[how]}
    if 'time_attr' in options:
        options['edge_label_time'] = torch.arange(links.size(1))
    options |= {'num_neighbors': {key: [3, 1] for key in EDGES}, 'batch_size': 8}
    options |= {'neg_sampling': 'binary', 'shuffle': True, 'true_negatives': True}
    loader = loader_of(data, WRITES, links, device=device, **options)
    other = pickle.loads(pickle.dumps(loader))
    plain = loader_of(data, WRITES, links, **options)
    for _ in range(2):
        for batches in zip(loader, other, plain, strict=True):
            first, *rest = map(flat, batches)
            assert all(batch == first for batch in rest)


@pytest.mark.parametrize('how', ['plain', 'hetero', 'disjoint'])
@pytest.mark.parametrize('mode', ['binary', 'triplet'])
def test_large_batches_of_links_are_made_on_the_device(
    device: torch.device, how: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_data() if how == 'plain' else random_hetero()
    links = data.edge_index if isinstance(data, Data) else (WRITES, data[WRITES].edge_index)

    def batches() -> list[Data | HeteroData]:
        return list(FastLinkNeighborLoader(
            data, [3, 2], links, batch_size=16, neg_sampling=mode, seed=4, device=device,
            disjoint=how == 'disjoint', drop_seed_edges=True,
        ))  # fmt: skip

    small = batches()
    monkeypatch.setattr(_links, '_MOST_ON_CPU', 0)
    for one, other in zip(small, batches(), strict=True):
        assert flat(one) == flat(other)


@pytest.mark.parametrize('num_workers', [0, 2])
def test_zip_loader(num_workers: int) -> None:
    data, graph = random_data(), random_hetero()
    loaders = [
        FastLinkNeighborLoader(
            data, [2], data.edge_index[:, :80], neg_sampling='binary', drop_seed_edges=True
        ),
        FastLinkNeighborLoader(graph, [2], WRITES, neg_sampling='triplet', true_negatives=True),
    ]
    for one, two in ZipLoader(loaders, batch_size=20, num_workers=num_workers):
        assert torch.equal(one.input_id, two[WRITES].input_id)
        links = one.n_id[one.edge_label_index[:, :20]]
        assert torch.equal(links, data.edge_index[:, one.input_id])
        src = two['author'].n_id[two['author'].src_index]
        assert torch.equal(src, graph[WRITES].edge_index[0, one.input_id])


def test_empty_batches(device: torch.device) -> None:
    for data, kind in ((random_hetero(), WRITES), (random_hetero(), CITES), (timed_data(), None)):
        for options in OPTIONS.values():
            links = links_from(data, kind)
            if 'time_attr' in options:
                options = {**options, 'edge_label_time': torch.arange(links.size(1))}
            for mode in (None, 'binary', 'triplet'):
                loader = loader_of(
                    data, kind, links, num_neighbors=[2, 2], neg_sampling=mode,
                    drop_seed_edges=True, device=device, **options,
                )  # fmt: skip
                batch = loader([])
                assert stores_of(batch, kind)[1].input_id.numel() == 0
                assert all(store.n_id.numel() == 0 for store in batch.node_stores)


TIME = torch.arange(80)


@pytest.mark.parametrize(
    ('kwargs', 'error', 'says'),
    [
        ({'edge_label_index': None}, TypeError, "'edge_label_index' must be an edge type"),
        ({'edge_label_index': torch.zeros(2, 1)}, TypeError, "'edge_label_index' must be an edge"),
        ({'edge_label_index': (5, None)}, TypeError, "'edge_label_index' must name an edge type"),
        ({'edge_label_index': ('a', 'b', 'c')}, ValueError, "'edge_label_index' must name one"),
        ({'edge_label_index': ('author', 'likes', 'place')}, ValueError, 'must name one'),
        ({'edge_label_index': (WRITES, torch.tensor([[25], [0]]))}, IndexError, 'from 0 to 24'),
        ({'edge_label_index': (WRITES, torch.tensor([[0], [40]]))}, IndexError, 'from 0 to 39'),
        ({'edge_label_time': TIME}, ValueError, "'edge_label_time' and 'time_attr'"),
        ({'time_attr': 'time'}, ValueError, "'edge_label_time' and 'time_attr'"),
        ({'time_attr': 'time', 'edge_label_time': TIME[:9]}, ValueError, "'edge_label_time'.*80"),
        ({'time_attr': 'time', 'edge_label_time': TIME / 2}, TypeError, "'edge_label_time'.*float"),
        ({'max_age': 5}, ValueError, "'max_age'"),
        ({'disjoint': True, 'subgraph_type': 'induced'}, ValueError, "'disjoint'"),
        ({'rev_edge_type': CITES, 'drop_seed_edges': True}, ValueError, "'rev_edge_type'"),
        ({'rev_edge_type': 3, 'drop_seed_edges': True}, TypeError, "'rev_edge_type'"),
        ({'rev_edge_type': REVERSE[WRITES]}, ValueError, "'rev_edge_type' needs drop_seed_edges"),
        ({'subgraph_type': 'bidirectional', 'drop_seed_edges': True}, ValueError, "'rev_edge_t"),
        ({'neg_sampling': NegativeSampling('triplet', 1, None, torch.ones(25))}, ValueError, '40'),
    ],
)  # fmt: skip
def test_arguments(kwargs: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        FastLinkNeighborLoader(random_hetero(), [3], **{'edge_label_index': WRITES, **kwargs})


@pytest.mark.parametrize('reverse', [CITES, 'paper', 1])
def test_a_graph_with_one_type_has_no_type_of_reverses(reverse: Any) -> None:
    with pytest.raises(ValueError, match="'rev_edge_type' must be True or False"):
        FastLinkNeighborLoader(random_data(), [3], drop_seed_edges=True, rev_edge_type=reverse)
