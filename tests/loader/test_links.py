"""Batches sampled around links: PyG's layouts, negatives, edges that are dropped."""

import copy
import math
import pickle
import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scipy.stats import chisquare
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.sampler import EdgeSamplerInput, NegativeSampling

from pyg_fast.loader import FastLinkNeighborLoader, FastNeighborLoader
from pyg_fast.ops._reference import random_bits as bits_of_number
from tests.loader._graphs import check_hops, equal, random_data
from tests.loader._parts import _links, _negatives


def pyg_loader(data: Data, *args: Any, **kwargs: Any) -> LinkNeighborLoader:
    pytest.importorskip('torch_sparse')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return LinkNeighborLoader(data, *args, **kwargs)


def pairs(edge_index: Tensor) -> list[tuple[int, int]]:
    return list(zip(*edge_index.tolist(), strict=True))


def links_of(batch: Data) -> Tensor:
    """The links of a batch, as nodes of the graph."""
    return batch.n_id.cpu()[batch.edge_label_index.cpu()]


def triplets_of(batch: Data) -> tuple[Tensor, Tensor, Tensor]:
    n_id = batch.n_id.cpu()
    return tuple(
        n_id[batch[name].cpu()] for name in ('src_index', 'dst_pos_index', 'dst_neg_index')
    )


def without_edges(data: Data, dropped: set[tuple[int, int]]) -> Data:
    """The graph without all edges between these nodes; `e_id` is their place in the whole graph."""
    keep = torch.tensor([pair not in dropped for pair in pairs(data.edge_index)])
    out = Data(edge_index=data.edge_index[:, keep], num_nodes=data.num_nodes)
    out.place = keep.nonzero().view(-1)
    return out


# As PyG -----------------------------------------------------------------------------------------
@pytest.mark.parametrize('label', [None, 'from 0', 'from 1', 'rows'])
@pytest.mark.parametrize('subgraph_type', ['directional', 'induced', 'bidirectional'])
def test_batches_are_those_of_pyg(
    device: torch.device, label: str | None, subgraph_type: str
) -> None:
    data = random_data()
    links = torch.randint(60, (2, 33), dtype=torch.int32)
    labels = {
        'from 0': torch.randint(3, (33,)), 'from 1': torch.randint(1, 3, (33,)),
        'rows': torch.rand(33, 2),
    }.get(label)  # fmt: skip
    args = {
        'num_neighbors': [-1, -1], 'edge_label_index': links, 'edge_label': labels,
        'batch_size': 8, 'subgraph_type': subgraph_type,
    }  # fmt: skip
    ours = FastLinkNeighborLoader(data, **args, device=device)
    theirs = pyg_loader(data, **{**args, 'edge_label_index': links.long()})
    assert len(ours) == len(theirs) == 5
    for got, wanted in zip(ours, theirs, strict=True):
        assert set(wanted.keys()) <= set(got.keys())
        count = wanted.edge_label_index.unique().numel()
        assert torch.equal(got.n_id[:count].cpu(), wanted.n_id[:count])
        assert torch.equal(got.edge_label_index.cpu(), wanted.edge_label_index)
        assert torch.equal(got.input_id.cpu(), wanted.input_id)
        assert ('edge_label' in got) == ('edge_label' in wanted) == (label is not None)
        if labels is not None:
            assert torch.equal(got.edge_label.cpu(), wanted.edge_label)
        assert set(got.n_id.tolist()) == set(wanted.n_id.tolist())
        assert torch.equal(got.x.cpu(), data.x[got.n_id.cpu()])
        edges = got.n_id[got.edge_index.as_tensor()]
        assert sorted(pairs(edges)) == sorted(pairs(wanted.n_id[wanted.edge_index]))
        if subgraph_type != 'bidirectional':
            assert sorted(got.e_id.tolist()) == sorted(wanted.e_id.tolist())
            assert torch.equal(got.edge_attr.cpu(), data.edge_attr[got.e_id.cpu()])


@pytest.mark.parametrize('amount', [0.3, 1, 2.5])
@pytest.mark.parametrize('label', [None, 'from 0', 'from 1', 'bool', 'rows'])
def test_binary_negatives(device: torch.device, amount: float, label: str | None) -> None:
    data = random_data()
    links = torch.randint(60, (2, 33))
    labels = {
        'from 0': torch.randint(3, (33,)), 'from 1': torch.randint(1, 3, (33,)),
        'bool': torch.arange(33) > 9, 'rows': 1 + torch.rand(33, 2),
    }.get(label)  # fmt: skip
    args = {
        'num_neighbors': [2], 'edge_label_index': links, 'edge_label': labels,
        'neg_sampling': {'mode': 'binary', 'amount': amount}, 'batch_size': 8,
    }  # fmt: skip
    theirs = pyg_loader(data, **args)
    for got, wanted in zip(
        FastLinkNeighborLoader(data, **args, device=device), theirs, strict=True
    ):
        size = got.input_id.numel()
        assert torch.equal(links_of(got)[:, :size], links[:, got.input_id.cpu()])
        assert got.edge_label_index.shape == wanted.edge_label_index.shape
        assert got.edge_label.dtype == wanted.edge_label.dtype
        assert torch.equal(got.edge_label.cpu(), wanted.edge_label)
        seeds = got.edge_label_index.unique()
        assert torch.equal(seeds.cpu(), torch.arange(seeds.numel()))
        assert (got.n_id[: seeds.numel()].diff() > 0).all()
        assert got.num_sampled_nodes[0] == seeds.numel()
        assert 'src_index' not in got
        check_hops(data, got, [2], False)


@pytest.mark.parametrize('amount', [1, 3])
def test_triplets(device: torch.device, amount: int) -> None:
    data = random_data()
    data.edge_label_index, data.edge_label_time = data.edge_index[:, :9], torch.arange(9)
    links = torch.randint(60, (2, 33))
    args = {
        'num_neighbors': [2, 2], 'edge_label_index': links, 'batch_size': 8,
        'neg_sampling': NegativeSampling('triplet', amount),
    }  # fmt: skip
    theirs = pyg_loader(data, **args)
    for got, wanted in zip(
        FastLinkNeighborLoader(data, **args, device=device), theirs, strict=True
    ):
        src, positive, negative = triplets_of(got)
        assert torch.equal(torch.stack([src, positive]), links[:, got.input_id.cpu()])
        assert negative.shape == wanted.dst_neg_index.shape
        assert negative.is_contiguous()
        for name in ('seed_time', 'edge_label_index', 'edge_label_time'):
            assert name not in got


def test_all_edges_are_the_links_by_default(device: torch.device) -> None:
    data = random_data()
    batch = next(iter(FastLinkNeighborLoader(data, [1], batch_size=300, device=device)))
    assert torch.equal(links_of(batch), data.edge_index)
    dense = torch.zeros(5, 5)
    dense[[0, 3, 3], [1, 2, 4]] = 1
    sparse = Data(x=torch.rand(5, 2), adj_t=dense.to_sparse_csr())
    batch = next(iter(FastLinkNeighborLoader(sparse, [1], batch_size=9, device=device)))
    assert pairs(links_of(batch)) == [(1, 0), (2, 3), (4, 3)]


def test_ratio_is_the_amount_of_binary_negatives() -> None:
    data = random_data()
    (batch,) = FastLinkNeighborLoader(data, [1], neg_sampling_ratio=0.5, batch_size=300)
    assert batch.edge_label.tolist() == [1.0] * 300 + [0.0] * 150
    (batch,) = FastLinkNeighborLoader(data, [1], neg_sampling_ratio=0, batch_size=300)
    assert 'edge_label' not in batch


@given(ids=st.lists(st.integers(0, 9)))
def test_distinct_is_unique_with_a_length_that_no_one_waits_for(ids: list[int]) -> None:
    given_ids = torch.tensor(ids, dtype=torch.long)
    found, local, count = _links.distinct(given_ids)
    wanted, inverse = given_ids.unique(return_inverse=True)
    assert torch.equal(found[:count], wanted)
    assert torch.equal(local, inverse)
    assert (found[count:] == wanted[-1:]).all()


# Negatives --------------------------------------------------------------------------------------
def test_random_bits_are_those_of_the_kernels(device: torch.device) -> None:
    for seed in (0, 5, 2**62 + 12345, -(2**63)):
        got = _negatives.random_bits(seed, 3, 7, device).cpu()
        wanted = [[bits_of_number(seed % 2**64, k, d) for k in range(7)] for d in range(3)]
        assert [[b % 2**64 for b in row] for row in got.tolist()] == wanted
        for count in (1, 60, 2**31 - 1):
            below = _negatives._below(got, count)
            assert below.tolist() == [[b * count >> 64 for b in row] for row in wanted]


def negatives_of_many(data: Data, sampling: NegativeSampling, **kwargs: Any) -> Tensor:
    loader = FastLinkNeighborLoader(
        data, [1], neg_sampling=sampling, batch_size=256, seed=7, **kwargs
    )
    found = []
    for _ in range(3):
        for batch in loader:
            size = batch.input_id.numel()
            if sampling.is_binary():
                found.append(links_of(batch)[:, size:])
            else:
                src, _, negative = triplets_of(batch)
                negative = negative.view(size, -1)
                src = src[:, None].expand_as(negative)
                found.append(torch.stack([src.reshape(-1), negative.reshape(-1)]))
    return torch.cat(found, 1)


def small_graph(num_edges: int = 40) -> tuple[Data, Tensor]:
    """A graph of ten nodes, with repeated edges and loops, and which pairs are edges."""
    edge_index = torch.randint(10, (2, num_edges))
    dense = torch.zeros(10, 10, dtype=torch.bool)
    dense[edge_index[0], edge_index[1]] = True
    return Data(num_nodes=10, edge_index=edge_index.repeat(1, 30)), dense


@pytest.mark.parametrize('true_negatives', [False, True])
@pytest.mark.parametrize('weighted', [False, True])
def test_binary_negatives_are_drawn_by_weight(
    device: torch.device, weighted: bool, true_negatives: bool
) -> None:
    data, dense = small_graph()
    weights = (torch.arange(10) % 4, 1 + torch.arange(10.0) % 3) if weighted else (None, None)
    found = negatives_of_many(
        data, NegativeSampling('binary', 2, *weights), true_negatives=true_negatives, device=device
    )
    p = torch.ones(10, 10, dtype=torch.double)
    if weighted:
        p = weights[0][:, None].double() * weights[1].double()
    p[dense & true_negatives] = 0
    counts = torch.bincount(found[0] * 10 + found[1], minlength=100).view(10, 10)
    assert counts[p == 0].sum() == 0
    wanted = p[p > 0] / p.sum() * found.size(1)
    assert chisquare(counts[p > 0], wanted).pvalue > 1e-4


@pytest.mark.parametrize('true_negatives', [False, True])
@pytest.mark.parametrize('weighted', [False, True])
def test_triplets_are_drawn_by_weight(
    device: torch.device, weighted: bool, true_negatives: bool
) -> None:
    data, dense = small_graph(30)
    weight = torch.arange(10) % 4 if weighted else torch.ones(10)
    dense[:, 3] = False
    data.edge_index = data.edge_index[:, data.edge_index[1] != 3]  # A negative for each source
    found = negatives_of_many(
        data, NegativeSampling('triplet', 3, None, weight if weighted else None),
        true_negatives=true_negatives, device=device,
    )  # fmt: skip
    for src in range(10):
        of_src = found[1, found[0] == src]
        p = weight.double().clone()
        p[dense[src] & true_negatives] = 0
        counts = torch.bincount(of_src, minlength=10)
        assert counts[p == 0].sum() == 0
        if of_src.numel():
            wanted = p[p > 0] / p.sum() * of_src.numel()
            assert chisquare(counts[p > 0], wanted).pvalue > 1e-5


def test_true_negatives_are_found_in_full_graphs(device: torch.device) -> None:
    """One pair of a thousand is no edge: draws that are repeated would hardly find it."""
    dense = torch.ones(32, 32)
    dense[5, 7] = 0
    data = Data(num_nodes=32, edge_index=dense.nonzero().t())
    for weight in (None, torch.rand(32) + 0.1):
        sampling = NegativeSampling('binary', 1, weight, weight)
        found = negatives_of_many(data, sampling, true_negatives=True, device=device)
        assert set(pairs(found)) == {(5, 7)}
    data.edge_index = data.edge_index[:, data.edge_index[0] == 5]
    for weight in (None, torch.rand(32) + 0.1):
        sampling = NegativeSampling('triplet', 2, None, weight)
        found = negatives_of_many(data, sampling, true_negatives=True, device=device)
        assert set(pairs(found)) == {(5, 7)}


def test_links_are_no_true_negatives() -> None:
    data = Data(num_nodes=2, edge_index=torch.tensor([[0], [1]]))
    links = torch.tensor([[1, 0], [1, 0]])
    found = negatives_of_many(
        data, NegativeSampling('binary', 9), edge_label_index=links, true_negatives=True
    )
    assert set(pairs(found)) == {(1, 0)}


def test_no_true_negatives() -> None:
    full = Data(num_nodes=3, edge_index=torch.ones(3, 3).nonzero().t())
    weight = torch.tensor([0.0, 1.0, 0.0])
    alone = Data(num_nodes=1, edge_index=torch.zeros(2, 1, dtype=torch.long))
    part = Data(num_nodes=3, edge_index=torch.tensor([[0, 1, 1], [1, 1, 2]]))
    binary = NegativeSampling('binary', 1, weight, weight)
    for data, sampling in ((full, 'binary'), (alone, 'binary'), (part, binary)):
        with pytest.raises(ValueError, match="'true_negatives' must be False: every pair"):
            FastLinkNeighborLoader(data, [1], neg_sampling=sampling, true_negatives=True)
    triplet = NegativeSampling('triplet', 1, None, weight)
    for data, sampling, node in ((full, 'triplet', 0), (alone, 'triplet', 0), (part, triplet, 0)):
        with pytest.raises(ValueError, match=f"'true_negatives' must be False: node {node}, a"):
            FastLinkNeighborLoader(data, [1], neg_sampling=sampling, true_negatives=True)
    alone.edge_index = alone.edge_index[:, :0]
    loader = FastLinkNeighborLoader(alone, [1], neg_sampling='binary', true_negatives=True)
    assert len(loader) == 0


@given(seed=st.integers(0, 2**32), num_nodes=st.integers(1, 9), share=st.floats(0, 1))
@settings(max_examples=30)
def test_edges_that_no_negative_may_repeat(seed: int, num_nodes: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(num_nodes, num_nodes, generator=generator) < share
    src, dst = dense.nonzero().t()
    edges = _negatives.KnownEdges(src, dst, num_nodes)
    every = torch.arange(num_nodes)
    for eligible in (1, num_nodes):
        free = (~dense[:, :eligible]).sum(1)
        assert torch.equal(edges.num_free(every, eligible), free)
        draws = _negatives.random_bits(seed, 8, num_nodes, every.device)
        for bits in draws:
            rank = edges.draw(bits, every, eligible)
            assert ((rank >= 0) & (rank < eligible)).all()
            assert not (dense[every, rank] & (free > 0)).any()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20)
def test_candidates_exist_at_the_time(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    time = torch.randint(5, (8,), generator=generator)
    weight = torch.randint(1, 3, (8,), generator=generator) if seed % 2 else None
    nodes = _negatives.Candidates.of(8, weight, time, torch.device('cpu'))
    wanted = torch.randint(-1, 6, (50,), generator=generator)
    bits = _negatives.random_bits(seed, 1, 50, wanted.device)[0]
    found = nodes.at(nodes.draw(bits, nodes.num_eligible(wanted)))
    exists = (time[None] <= wanted[:, None]).any(1)
    assert (time[found] <= wanted)[exists].all()
    assert (time[found] == time.min())[~exists].all()


@pytest.mark.parametrize('weighted', [False, True])
def test_candidates_of_a_time_are_drawn_by_weight(device: torch.device, weighted: bool) -> None:
    time, weight = torch.arange(9).flip(0) // 2, torch.arange(9) % 3
    nodes = _negatives.Candidates.of(9, weight if weighted else None, time, device)
    bits = _negatives.random_bits(3, 1, 4000, device)[0]
    now = torch.full((4000,), 2, device=device)
    found = nodes.at(nodes.draw(bits, nodes.num_eligible(now))).cpu()
    p = (time <= 2).double() * (weight if weighted else 1)
    counts = torch.bincount(found, minlength=9)
    assert counts[p == 0].sum() == 0
    assert chisquare(counts[p > 0], p[p > 0] / p.sum() * 4000).pvalue > 1e-4


# Dropped edges ----------------------------------------------------------------------------------
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('subgraph_type', ['directional', 'induced', 'bidirectional'])
def test_edges_of_links_are_dropped(
    device: torch.device, subgraph_type: str, reverse: bool
) -> None:
    data = random_data(40, 300)
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :99].flip(0)], 1)
    data.edge_attr = torch.rand(399)
    args = {'num_neighbors': [-1, -1], 'subgraph_type': subgraph_type}
    links = torch.cat([data.edge_index[:, :40:3], torch.tensor([[0, 39], [39, 39]])], 1)
    loader = FastLinkNeighborLoader(
        data, **args, edge_label_index=links, batch_size=5, drop_seed_edges=True,
        rev_edge_type=reverse, neg_sampling='binary', device=device,
    )  # fmt: skip
    num_dropped = 0
    for batch in loader:
        dropped = set(pairs(links[:, batch.input_id.cpu()]))
        if reverse or subgraph_type == 'bidirectional':
            dropped |= {(b, a) for a, b in dropped}
        rest = without_edges(data, dropped)
        num_dropped += 399 - rest.edge_index.size(1)
        (wanted,) = pyg_loader(
            rest, **args, edge_label_index=links_of(batch), batch_size=batch.edge_label.numel()
        )
        n_id, edge_index = batch.n_id.cpu(), batch.edge_index.as_tensor().cpu()
        assert sorted(n_id.tolist()) == sorted(wanted.n_id.tolist())
        assert sorted(pairs(n_id[edge_index])) == sorted(pairs(wanted.n_id[wanted.edge_index]))
        batch.edge_index.validate()
        assert torch.equal(
            batch.edge_index._indptr.cpu(),
            torch.searchsorted(edge_index[1], torch.arange(n_id.numel() + 1)),
        )
        if subgraph_type != 'bidirectional':
            assert sorted(batch.e_id.tolist()) == sorted(rest.place[wanted.e_id].tolist())
            assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])
        if subgraph_type == 'directional':
            assert sum(batch.num_sampled_edges) == edge_index.size(1)
            check_hops(rest, batch, [-1, -1], False)
    assert num_dropped > 10


def test_layers_read_batches_with_dropped_edges(device: torch.device) -> None:
    from torch_geometric.nn import SAGEConv
    from torch_geometric.utils import trim_to_layer

    from pyg_fast.nn import FusedSAGEConv

    data = random_data(40, 300)
    loader = FastLinkNeighborLoader(
        data, [4, 4], batch_size=30, drop_seed_edges=True, rev_edge_type=True, device=device
    )
    ours = FusedSAGEConv(5, 5).to(device)
    theirs = SAGEConv(5, 5).to(device)
    theirs.load_state_dict(ours.state_dict())
    for batch in loader:
        got, wanted, edges = batch.x, batch.x, batch.edge_index.as_tensor()
        edge_index = batch.edge_index
        for layer in range(2):
            wanted, edges, _ = trim_to_layer(
                layer, batch.num_sampled_nodes, batch.num_sampled_edges, wanted, edges
            )
            got, edge_index, _ = trim_to_layer(
                layer, batch.num_sampled_nodes, batch.num_sampled_edges, got, edge_index
            )
            got, wanted = ours(got, edge_index), theirs(wanted, edges)
        torch.testing.assert_close(got, wanted)


# As the other loader ----------------------------------------------------------------------------
OPTIONS = [
    {'neg_sampling': 'binary', 'shuffle': True, 'batch_size': 40},
    {'neg_sampling': NegativeSampling('triplet', 2, None, torch.rand(60)), 'batch_size': 50},
    {'edge_label': torch.arange(300) % 3, 'neg_sampling_ratio': 2.0, 'batch_size': 64},
    {'edge_label': torch.arange(300) % 3, 'sampler': [5, 2, 9], 'drop_seed_edges': True},
    {'neg_sampling': 'binary', 'true_negatives': True, 'rank': 1, 'num_replicas': 3,
     'batch_size': 20, 'input_id': torch.arange(300).flip(0)},
]  # fmt: skip


@pytest.mark.parametrize('options', OPTIONS)
def test_copies(device: torch.device, options: dict) -> None:
    loader = FastLinkNeighborLoader(random_data(), [3, 2], device=device, seed=3, **options)
    list(loader)
    for other in (
        pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)
    ):  # fmt: skip
        other.epoch = loader.epoch = 1
        assert len(loader) > 0
        assert all(map(equal, loader, other))


@pytest.mark.parametrize('options', OPTIONS)
def test_batches_depend_on_the_seed_and_the_epoch_alone(
    device: torch.device, options: dict
) -> None:
    wanted = FastLinkNeighborLoader(random_data(), [3, 2], seed=3, **options)
    got = FastLinkNeighborLoader(
        random_data(), [3, 2], seed=3, device=device, window=3, reorder=False, **options
    )
    epochs = []
    for _ in range(2):
        epochs.append(list(wanted))
        assert all(map(equal, epochs[-1], got))
    assert not all(map(equal, *epochs))


def test_replicas_divide_the_links() -> None:
    data = random_data()
    loaders = [
        FastLinkNeighborLoader(
            data, [1], batch_size=20, shuffle=True, seed=1, rank=rank, num_replicas=3
        )
        for rank in range(3)
    ]
    found = torch.cat([batch.input_id for loader in loaders for batch in loader])
    assert torch.equal(found.sort()[0], torch.arange(300))
    with pytest.raises(ValueError, match="'edge_label_index' must hold at least 3"):
        FastLinkNeighborLoader(
            data, [1], data.edge_index[:, :2], rank=0, num_replicas=3, batch_size=2
        )


@pytest.mark.parametrize('size', [7, 300])
def test_triplets_leave_the_labels_of_data_as_pyg_does(device: torch.device, size: int) -> None:
    data = random_data()
    data.edge_label, data.edge_label_index = torch.rand(size), data.edge_index[:, :size]
    data.edge_label_time = torch.arange(size)
    options = {'edge_label_index': data.edge_label_index, 'neg_sampling': 'triplet'}
    pyg = next(iter(pyg_loader(data, [-1], batch_size=4, **options)))
    batch = next(iter(FastLinkNeighborLoader(data, [-1], batch_size=4, **options, device=device)))
    for name in ('edge_label', 'edge_label_index', 'edge_label_time'):
        assert (name in batch) == (name in pyg)
    if size == 7:
        assert torch.equal(batch.edge_label.cpu(), pyg.edge_label)
    else:  # One for each edge: those of the sampled edges.
        assert torch.equal(batch.edge_label.cpu(), data.edge_label[batch.e_id.cpu()])


def test_called_with_links(device: torch.device) -> None:
    data = random_data()
    loader = FastLinkNeighborLoader(
        data, [3], neg_sampling='triplet', transform=lambda batch: (batch, 'mine'), device=device
    )
    batch, mine = loader([4, 2, 2])
    assert mine == 'mine'
    assert torch.equal(torch.stack(triplets_of(batch)[:2]), data.edge_index[:, [4, 2, 2]])
    other, _ = loader([4, 2, 2])
    assert not equal(batch, other)
    for options in ({'neg_sampling': 'triplet'}, {'neg_sampling': 'binary'}, {}):
        empty = FastLinkNeighborLoader(data, [3], **options, drop_seed_edges=True, device=device)(
            []
        )
        assert empty.num_nodes == empty.edge_index.size(1) == empty.input_id.numel() == 0


def test_is_a_loader_of_pyg() -> None:
    data = random_data()
    labels = torch.arange(300) % 2
    loader = FastLinkNeighborLoader(
        data, [3], None, labels, neg_sampling='binary', batch_size=7, num_workers=3,
        filter_per_worker=False, persistent_workers=True,
    )  # fmt: skip
    assert isinstance(loader, LinkNeighborLoader)
    assert (loader.dataset, len(loader), loader.num_workers) == (range(300), 43, 0)
    assert loader.edge_label_index is None
    assert loader.neg_sampling.is_binary()
    assert list(loader.link_sampler.num_neighbors.values) == [3]
    assert repr(loader).startswith('FastLinkNeighborLoader(num_neighbors=[3], batch_size=7')
    given = loader.input_data
    assert isinstance(given, EdgeSamplerInput)
    assert torch.equal(torch.stack([given.row, given.col]), data.edge_index)
    assert torch.equal(given.label, labels + 1)
    given.row.fill_(10**9)
    assert torch.equal(links_of(loader([0]))[:, 0], data.edge_index[:, 0])


def test_as_lightning_makes_it_again() -> None:
    """With a DistributedSampler over the loader's own positions, and arguments of torch."""
    data = random_data()
    args = {'data': data, 'num_neighbors': [2], 'neg_sampling': 'binary', 'batch_size': 10}
    loader = FastLinkNeighborLoader(**args, shuffle=True)
    parts = []
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(loader.dataset, 2, rank)
        again = FastLinkNeighborLoader(
            **args, shuffle=False, sampler=sampler, dataset=loader.dataset,
            collate_fn=None, num_workers=0, pin_memory=False,
        )  # fmt: skip
        sampler.set_epoch(3)
        parts.append(torch.cat([batch.input_id for batch in again]))
        assert len(again) == 15
    assert torch.equal(torch.cat(parts).sort()[0], torch.arange(300))


def test_transform_of_the_output_sees_the_links(device: torch.device) -> None:
    def reversed_links(out: Any) -> Any:
        input_id, links, label, time = out.metadata
        out.metadata = input_id, links.flip(0), label, time
        return out

    data = random_data()
    loader = FastLinkNeighborLoader(
        data, [2], batch_size=9, transform_sampler_output=reversed_links, device=device
    )
    for batch in loader:
        assert torch.equal(links_of(batch), data.edge_index[:, batch.input_id.cpu()].flip(0))


def test_two_iterators_at_once(device: torch.device) -> None:
    loader = FastLinkNeighborLoader(
        random_data(), [2], batch_size=90, neg_sampling='binary', seed=1, device=device
    )
    wanted = [list(loader), list(loader)]
    loader.epoch = 0
    both = list(zip(loader, loader, strict=True))
    for k in range(2):
        assert all(map(equal, (pair[k] for pair in both), wanted[k]))


# Bad input --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ('kwargs', 'error', 'says'),
    [
        ({'edge_label_index': [[0], [1]]}, TypeError, "'edge_label_index' must be a tensor"),
        ({'edge_label_index': torch.rand(2, 3)}, TypeError, "'edge_label_index'.*float32"),
        ({'edge_label_index': torch.arange(4)}, ValueError, r"'edge_label_index'.*\[4\]"),
        ({'edge_label_index': torch.zeros(3, 2).long()}, ValueError, r"'edge_label_index'.*3, 2"),
        ({'edge_label_index': torch.full((2, 2), 60)}, IndexError, "'edge_label_index'.*got 60"),
        ({'edge_label_index': torch.full((2, 2), -1)}, IndexError, "'edge_label_index'.*got -1"),
        ({'edge_label': [1]}, TypeError, "'edge_label' must be a tensor"),
        ({'edge_label': torch.ones(3)}, ValueError, "'edge_label' must have 300"),
        ({'edge_label': torch.tensor(1)}, ValueError, "'edge_label' must have 300"),
        ({'edge_label': torch.ones(300), 'neg_sampling': 'triplet'}, ValueError, "'edge_label'"),
        ({'input_id': torch.arange(3)}, ValueError, "'input_id'.*'edge_label_index'"),
        ({'neg_sampling': 5}, TypeError, "'neg_sampling'.*int"),
        *(
            ({'neg_sampling': each}, ValueError, "'neg_sampling' must be one of .* got 'unary'")
            for each in ('unary', ('unary', 1), {'mode': 'unary'})
        ),
        ({'neg_sampling': ('triplet', 0.5)}, ValueError, 'amount'),
        ({'neg_sampling': ('binary', 0)}, ValueError, 'amount'),
        ({'neg_sampling': ('binary', math.inf)}, ValueError, "'neg_sampling.amount'"),
        ({'neg_sampling': 'binary', 'neg_sampling_ratio': 1.0}, ValueError, 'not both'),
        ({'neg_sampling_ratio': -1.0}, ValueError, "'neg_sampling_ratio'"),
        ({'neg_sampling_ratio': '1'}, TypeError, "'neg_sampling_ratio'"),
        ({'true_negatives': True}, ValueError, "'true_negatives'.*'neg_sampling'"),
        ({'true_negatives': 1}, TypeError, "'true_negatives'"),
        ({'drop_seed_edges': None}, TypeError, "'drop_seed_edges'"),
        ({'rev_edge_type': True}, ValueError, "'rev_edge_type' needs drop_seed_edges=True"),
        ({'neighbor_sampler': 1}, TypeError, r'torch_geometric\.loader\.LinkNeighborLoader'),
        ({'batchsize': 5}, TypeError, 'FastLinkNeighborLoader got unexpected'),
    ],
)
def test_arguments(kwargs: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        FastLinkNeighborLoader(random_data(), [3], **kwargs)


@pytest.mark.parametrize(
    ('weight', 'error', 'says'),
    [
        ([1.0] * 60, TypeError, 'must be a tensor'),
        (torch.ones(59), ValueError, r'shape \[60\]'),
        (torch.ones(60, 1), ValueError, r'shape \[60\]'),
        (torch.zeros(60), ValueError, 'a positive entry'),
        (-torch.ones(60), ValueError, 'negative'),
        (torch.full((60,), math.nan), ValueError, 'NaN'),
        (torch.ones(60, dtype=torch.complex64), TypeError, 'complex'),
    ],
)
def test_weights_of_negatives(weight: Any, error: type[Exception], says: str) -> None:
    for name in ('src_weight', 'dst_weight'):
        sampling = NegativeSampling('binary', 1, **{name: weight})
        with pytest.raises(error, match=f"'neg_sampling.{name}'.*{says}"):
            FastLinkNeighborLoader(random_data(), [3], neg_sampling=sampling)


def test_loader_of_nodes_is_not_one_of_links() -> None:
    assert not issubclass(FastLinkNeighborLoader, FastNeighborLoader)
