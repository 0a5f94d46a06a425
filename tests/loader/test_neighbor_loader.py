"""Batches: their contents and their order."""

import copy
import pickle
import re
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from hypothesis import given
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.loader import ImbalancedSampler, NeighborLoader
from torch_geometric.sampler import NumNeighbors, SamplerOutput
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import k_hop_subgraph
from torch_geometric.utils import subgraph as edges_among

from pyg_fast.loader import FastNeighborLoader
from pyg_fast.transforms import ToCSR
from tests.loader._graphs import check_batch, equal, random_data


def loaded(data: Data, num_neighbors: list[int], **kwargs: object) -> list[Data]:
    return list(FastNeighborLoader(data, num_neighbors, **kwargs))  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 99),
    num_neighbors=st.lists(st.sampled_from([1, 2, 5, -1]), min_size=1, max_size=3),
    num_nodes=st.integers(1, 40),
    num_edges=st.integers(0, 150),
    batch_size=st.integers(1, 50),
    replace=st.booleans(),
)
def test_definition(
    device: torch.device,
    seed: int,
    num_neighbors: list[int],
    num_nodes: int,
    num_edges: int,
    batch_size: int,
    replace: bool,
) -> None:
    data = random_data(num_nodes, num_edges, seed)
    batches = loaded(
        data, num_neighbors, batch_size=batch_size, replace=replace, shuffle=True, device=device
    )
    assert len(batches) == -(-num_nodes // batch_size)
    for batch in batches:
        assert batch.x.device.type == device.type
        check_batch(data, batch, num_neighbors, replace)
    seeds = torch.cat([batch.n_id[: batch.batch_size].cpu() for batch in batches])
    assert torch.equal(seeds.sort()[0], torch.arange(num_nodes))


@pytest.mark.parametrize('num_neighbors', [[3], [4, 2], [2, 2, 2]])
def test_with_replacement(device: torch.device, num_neighbors: list[int]) -> None:
    data = random_data()
    for batch in loaded(data, num_neighbors, batch_size=7, replace=True, device=device):
        check_batch(data, batch, num_neighbors, replace=True)


def test_all_neighbors_are_those_of_pyg(device: torch.device) -> None:
    pytest.importorskip('torch_sparse')
    data = random_data()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        wanted = list(NeighborLoader(data, [-1, -1], input_nodes=data.train_mask, batch_size=6))
    got = loaded(data, [-1, -1], input_nodes=data.train_mask, batch_size=6, device=device)
    assert len(got) == len(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        ours = ours.cpu()
        assert set(theirs.keys()) <= set(ours.keys())
        assert torch.equal(ours.n_id[:6], theirs.n_id[:6])
        assert torch.equal(ours.n_id.sort()[0], theirs.n_id.sort()[0])
        assert torch.equal(ours.e_id.sort()[0], theirs.e_id.sort()[0])
        assert torch.equal(ours.input_id, theirs.input_id)
        assert ours.batch_size == theirs.batch_size
        assert ours.x.dtype == theirs.x.dtype


def test_all_neighbors_are_the_k_hop_subgraph(device: torch.device) -> None:
    data = random_data()
    for batch in loaded(data, [-1, -1], batch_size=4, device=device):
        seeds = batch.n_id[: batch.batch_size].cpu()
        nodes, _, _, mask = k_hop_subgraph(seeds, 2, data.edge_index, num_nodes=data.num_nodes)
        assert torch.equal(batch.n_id.cpu().sort()[0], nodes)
        # That is all edges among them; edges of the last nodes that were met are not sampled.
        assert set(batch.e_id.tolist()) <= set(mask.nonzero().view(-1).tolist())
        inner = k_hop_subgraph(seeds, 1, data.edge_index, num_nodes=data.num_nodes)[0]
        wanted = torch.isin(data.edge_index[1], inner).nonzero().view(-1)
        assert torch.equal(batch.e_id.cpu().sort()[0], wanted)


@pytest.mark.parametrize('kind', ['induced', SubgraphType.induced])
def test_induced(device: torch.device, kind: str) -> None:
    data = random_data()
    for batch in loaded(data, [2, 2], batch_size=9, subgraph_type=kind, device=device):
        n_id = batch.n_id.cpu()
        among = edges_among(n_id, data.edge_index, num_nodes=data.num_nodes, return_edge_mask=True)
        assert torch.equal(batch.e_id.cpu().sort()[0], among[2].nonzero().view(-1))
        edge_index = batch.edge_index.as_tensor().cpu()
        assert torch.equal(n_id[edge_index], data.edge_index[:, batch.e_id.cpu()])
        assert (edge_index[1].diff() >= 0).all()
        assert 'num_sampled_nodes' not in batch
        assert 'num_sampled_edges' not in batch


def test_directed_means_induced() -> None:
    data = random_data()
    with pytest.warns(UserWarning, match='deprecated'):
        loader = FastNeighborLoader(data, [2], batch_size=20, directed=False, seed=1)
    wanted = FastNeighborLoader(data, [2], batch_size=20, subgraph_type='induced', seed=1)
    assert all(map(equal, loader, wanted))


def test_bidirectional(device: torch.device) -> None:
    data = random_data()
    plain = loaded(data, [2, 2], batch_size=9, seed=3, device=device)
    both = loaded(data, [2, 2], batch_size=9, seed=3, subgraph_type='bidirectional', device=device)
    for one, two in zip(plain, both, strict=True):
        assert torch.equal(one.n_id, two.n_id)
        edges = one.edge_index.as_tensor().cpu()
        wanted = set(zip(*torch.cat([edges, edges.flip(0)], 1).tolist(), strict=True))
        assert set(zip(*two.edge_index.as_tensor().tolist(), strict=True)) == wanted
        assert two.edge_index.validate() is not None
        assert torch.equal(two.edge_attr, data.edge_attr.to(device)[two.e_id])


def test_weighted(device: torch.device) -> None:
    data = random_data(30, 200)
    data.weight = (torch.rand(200) < 0.4).float()
    data.weight[data.edge_index[1] == 3] = 0.5
    for replace in (False, True):
        for batch in loaded(
            data, [3, 3], batch_size=5, weight_attr='weight', replace=replace, device=device
        ):
            weight = data.weight[batch.e_id.cpu()]
            ends = data.edge_index[1, batch.e_id.cpu()]
            most = torch.zeros(30).scatter_reduce_(0, data.edge_index[1], data.weight, 'amax')
            assert (weight[most[ends] > 0] > 0).all()


def test_weights_count_in_the_order_of_the_data(device: torch.device) -> None:
    # Every node has one edge that weighs, and a shuffled list of edges.
    num_nodes = 20
    perm = torch.randperm(3 * num_nodes)
    edge_index = torch.stack(
        [torch.randint(num_nodes, (3 * num_nodes,)), torch.arange(num_nodes).repeat(3)]
    )[:, perm]
    weight = torch.cat([torch.ones(num_nodes), torch.full((2 * num_nodes,), 1e-30)])[perm]
    data = Data(edge_index=edge_index, num_nodes=num_nodes, weight=weight)
    (batch,) = loaded(data, [1], batch_size=num_nodes, weight_attr='weight', device=device)
    assert (batch.weight == 1).all()
    assert batch.e_id.numel() == num_nodes


def prepared(data: Data, form: str) -> Data:
    data = copy.copy(data)
    if form == 'int32':
        data.edge_index = data.edge_index.int()
    elif form == 'transform':
        data = ToCSR()(data)
    elif form == 'sorted':
        perm = data.edge_index[1].argsort(stable=True)
        data.edge_index, data.edge_attr = data.edge_index[:, perm], data.edge_attr[perm]
    elif form == 'EdgeIndex':
        data.edge_index = EdgeIndex(data.edge_index, sparse_size=(60, 60))
    elif form == 'by row':
        index, perm = EdgeIndex(data.edge_index, sparse_size=(60, 60)).sort_by('row')
        data.edge_index, data.edge_attr = index, data.edge_attr[perm]
    return data


@pytest.mark.parametrize('form', ['plain', 'int32', 'transform', 'sorted', 'EdgeIndex', 'by row'])
def test_forms_of_edge_index(device: torch.device, form: str) -> None:
    data = prepared(random_data(), form)
    for batch in loaded(data, [3, 2], batch_size=16, device=device):
        plain = copy.copy(data)
        plain.edge_index = torch.as_tensor(
            data.edge_index.as_tensor()
            if isinstance(data.edge_index, EdgeIndex)
            else data.edge_index
        ).long()
        check_batch(plain, batch, [3, 2])


def test_is_sorted_is_checked() -> None:
    loaded(prepared(random_data(), 'sorted'), [3], is_sorted=True)
    with pytest.raises(ValueError, match='is_sorted'):
        FastNeighborLoader(random_data(), [3], is_sorted=True)


@pytest.mark.parametrize('layout', ['SparseTensor', 'torch.sparse'])
def test_adj_t(device: torch.device, layout: str) -> None:
    data = random_data()
    dense = torch.zeros(60, 60)
    dense[data.edge_index[1], data.edge_index[0]] = torch.rand(300) + 0.1
    del data.edge_index, data.edge_attr
    if layout == 'SparseTensor':
        pytest.importorskip('torch_sparse')
        data.adj_t = SparseTensor.from_dense(dense)
    else:
        data.adj_t = dense.to_sparse_csr()
    for batch in loaded(data, [-1, 2], batch_size=10, device=device):
        adj_t, n_id = batch.adj_t, batch.n_id.cpu()
        assert 'edge_index' not in batch
        got = (adj_t.to_dense()).cpu()
        wanted = dense[n_id][:, n_id]
        assert torch.equal(got[:10], wanted[:10])
        assert ((got == wanted) | (got == 0)).all()
        assert torch.equal(batch.x.cpu(), data.x[n_id])


def test_one_node_and_no_edges(device: torch.device) -> None:
    data = Data(x=torch.randn(1, 3), edge_index=torch.empty(2, 0, dtype=torch.long))
    (batch,) = loaded(data, [5, 5], device=device)
    assert batch.x.shape == (1, 3)
    assert batch.edge_index.shape == (2, 0)
    assert batch.num_sampled_nodes == [1, 0, 0]
    assert batch.num_sampled_edges == [0, 0]
    (batch,) = loaded(Data(x=torch.randn(1, 3)), [5], device=device)
    assert batch.num_nodes == 1


def test_isolated_seeds(device: torch.device) -> None:
    data = random_data()
    seeds = torch.arange(54, 60)
    for batch in loaded(data, [3, 3], input_nodes=seeds, batch_size=4, device=device):
        assert batch.num_nodes == batch.batch_size
        assert batch.num_edges == 0


def test_repeated_seeds(device: torch.device) -> None:
    data = random_data()
    (batch,) = loaded(data, [4, 4], input_nodes=[3, 5, 3, 3], batch_size=9, device=device)
    assert batch.n_id[:4].tolist() == [3, 5, 3, 3]
    assert batch.batch_size == 4
    assert torch.equal(
        batch.n_id.cpu()[batch.edge_index.as_tensor().cpu()], data.edge_index[:, batch.e_id.cpu()]
    )


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_types_of_input_nodes(dtype: torch.dtype) -> None:
    data = random_data()
    nodes = torch.tensor([5, 9, 2, 30])
    (wanted,) = loaded(data, [-1], input_nodes=nodes, batch_size=4, seed=0)
    for given_nodes in (nodes.to(dtype), nodes.tolist(), tuple(nodes.tolist()), nodes.numpy()):
        (got,) = loaded(data, [-1], input_nodes=given_nodes, batch_size=4, seed=0)
        assert equal(got, wanted)
    assert wanted.input_id.tolist() == [0, 1, 2, 3]


def test_masks_and_input_id() -> None:
    data = random_data()
    mask = data.train_mask
    nodes = mask.nonzero().view(-1)
    for given_mask in (mask, mask.numpy(), mask.tolist()):
        batches = loaded(data, [2], input_nodes=given_mask, batch_size=8, shuffle=True)
        for batch in batches:
            assert torch.equal(batch.input_id, batch.n_id[: batch.batch_size])
        ids = torch.cat([batch.input_id for batch in batches])
        assert torch.equal(ids.sort()[0], nodes)
    own = torch.randn(nodes.numel())
    for batch in loaded(data, [2], input_nodes=mask, batch_size=8, input_id=own, shuffle=True):
        place = torch.searchsorted(nodes, batch.n_id[: batch.batch_size])
        assert torch.equal(batch.input_id, own[place])


def test_no_seeds() -> None:
    for nothing in ([], torch.zeros(60, dtype=torch.bool), torch.empty(0, dtype=torch.int32)):
        loader = FastNeighborLoader(random_data(), [3], input_nodes=nothing, batch_size=4)
        assert len(loader) == 0
        assert list(loader) == []


def test_batch_larger_than_the_node_set() -> None:
    loader = FastNeighborLoader(random_data(), [3], batch_size=1000)
    assert len(loader) == 1
    (batch,) = loader
    assert batch.batch_size == 60
    assert list(FastNeighborLoader(random_data(), [3], batch_size=1000, drop_last=True)) == []


def test_length_and_drop_last() -> None:
    data = random_data()
    for drop_last, length in ((False, 9), (True, 8)):
        loader = FastNeighborLoader(data, [3], batch_size=7, drop_last=drop_last)
        sizes = [batch.batch_size for batch in loader]
        assert len(loader) == len(iter(loader)) == len(sizes) == length
        assert sizes[:8] == [7] * 8


def test_attributes_of_a_torch_loader() -> None:
    mask = torch.arange(60) % 3 == 0
    loader = FastNeighborLoader(random_data(), [3], batch_size=7, input_nodes=mask, drop_last=True)
    theirs = NeighborLoader(random_data(), [3], batch_size=7, input_nodes=mask, drop_last=True)
    assert loader.dataset == theirs.dataset == range(20)
    assert loader.batch_size == theirs.batch_size
    assert loader.drop_last == theirs.drop_last


def test_order_without_shuffle(device: torch.device) -> None:
    nodes = torch.randperm(60)[:33]
    batches = loaded(random_data(), [3], input_nodes=nodes, batch_size=4, device=device)
    assert torch.equal(torch.cat([b.n_id[: b.batch_size].cpu() for b in batches]), nodes)


def test_same_seed_same_batches(device: torch.device) -> None:
    data = random_data()
    args = {'batch_size': 9, 'shuffle': True, 'device': device}
    a, b, other = (FastNeighborLoader(data, [2, 2], seed=s, **args) for s in (7, 7, 8))
    epochs = [[list(loader) for _ in range(3)] for loader in (a, b, other)]
    for one, two, three in zip(*epochs, strict=True):
        assert all(map(equal, one, two))
        assert not any(map(equal, one, three))
    first, second = epochs[0][:2]
    assert not any(map(equal, first, second))


def test_every_epoch_differs_without_shuffle() -> None:
    loader = FastNeighborLoader(random_data(), [2, 2], batch_size=20)
    first, second = list(loader), list(loader)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.n_id[:20], b.n_id[:20])
        assert not torch.equal(a.e_id, b.e_id)


def test_epochs_can_be_taken_up_again() -> None:
    data = random_data()
    loader = FastNeighborLoader(data, [2], batch_size=9, shuffle=True, seed=5)
    epochs = [list(loader) for _ in range(3)]
    again = FastNeighborLoader(data, [2], batch_size=9, shuffle=True, seed=5)
    again.epoch = 2
    assert all(map(equal, epochs[2], again))
    assert again.epoch == 3


def test_seed_comes_from_torch() -> None:
    data, args = random_data(), {'batch_size': 9, 'shuffle': True}
    torch.manual_seed(3)
    a = loaded(data, [2], **args)
    torch.manual_seed(3)
    b = loaded(data, [2], **args)
    c = loaded(data, [2], **args)
    assert all(map(equal, a, b))
    assert not any(map(equal, a, c))
    d, e = (loaded(data, [2], generator=torch.Generator().manual_seed(4), **args) for _ in 'de')
    assert all(map(equal, d, e))


def test_content_does_not_depend_on_the_window(device: torch.device) -> None:
    data = random_data(200, 1500)
    args = {'batch_size': 11, 'shuffle': True, 'seed': 2, 'device': device}

    def by_first(batches: list[Data]) -> list[Data]:
        return sorted(batches, key=lambda batch: int(batch.n_id[0]))

    plain = loaded(data, [3, 2], window=1, match=False, reorder=False, **args)
    for window, match in ((1, True), (3, False), (8, True), (100, True)):
        same = loaded(data, [3, 2], window=window, match=match, reorder=False, **args)
        assert all(map(equal, plain, same))
        moved = loaded(data, [3, 2], window=window, match=match, reorder=True, **args)
        assert all(map(equal, by_first(plain), by_first(moved)))


def test_reorder_permutes_within_windows_by_match_degree() -> None:
    data = random_data(200, 1500)
    args = {'batch_size': 11, 'shuffle': True, 'seed': 2}
    plain = loaded(data, [3, 2], reorder=False, **args)
    moved = loaded(data, [3, 2], reorder=True, window=8, **args)
    nodes = [set(batch.n_id.tolist()) for batch in plain]
    wanted = []
    for start in range(0, len(plain), 8):
        rest = list(range(start, min(start + 8, len(plain))))
        wanted.append(rest.pop(0))
        while rest:
            last = nodes[wanted[-1]]
            best = max(rest, key=lambda k: len(last & nodes[k]) / min(len(last), len(nodes[k])))
            wanted.append(best)
            rest.remove(best)
    assert wanted != list(range(len(plain)))
    assert all(equal(moved[i], plain[k]) for i, k in enumerate(wanted))


def test_two_iterators_at_once(device: torch.device) -> None:
    data = random_data()
    args = {'batch_size': 9, 'shuffle': True, 'seed': 2, 'device': device}
    loader = FastNeighborLoader(data, [3, 2], **args)
    wanted = [list(loader), list(loader)]
    loader.epoch = 0
    pairs = list(zip(loader, loader, strict=True))
    for k in range(2):
        assert all(equal(pair[k], batch) for pair, batch in zip(pairs, wanted[k], strict=True))


def test_left_half_way(device: torch.device) -> None:
    loader = FastNeighborLoader(random_data(), [3], batch_size=5, device=device)
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert next(iterator, None) is None
    assert len(list(loader)) == 12


def test_transform(device: torch.device) -> None:
    data = random_data()

    def transform(batch: Data) -> Data:
        batch.x.mul_(2)
        batch.touched = True
        return batch

    batches = loaded(data, [3], batch_size=9, transform=transform, device=device)
    for batch in batches:
        assert batch.touched
        assert torch.equal(batch.x.cpu(), 2 * data.x[batch.n_id.cpu()])
    (other,) = loaded(data, [3], batch_size=60, transform=lambda batch: 'anything')
    assert other == 'anything'


def test_exception_in_a_transform(device: torch.device) -> None:
    def fail(batch: Data) -> Data:
        raise KeyError('mine')

    loader = FastNeighborLoader(random_data(), [3], batch_size=9, device=device)
    loader.transform = fail
    iterator = iter(loader)
    with pytest.raises(KeyError, match='mine'):
        next(iterator)
    loader = FastNeighborLoader(
        random_data(), [3], batch_size=9, transform_sampler_output=fail, device=device
    )
    iterator = iter(loader)
    with pytest.raises(KeyError, match='mine'):
        next(iterator)
    assert next(iterator, None) is None


def test_transform_sampler_output(device: torch.device) -> None:
    data = random_data()
    seen = []

    def keep(out: SamplerOutput) -> SamplerOutput:
        seen.append(out)
        return out

    args = {'batch_size': 9, 'seed': 4, 'device': device}
    plain = loaded(data, [3, 2], **args)
    assert all(map(equal, plain, loaded(data, [3, 2], transform_sampler_output=keep, **args)))
    assert all(isinstance(out, SamplerOutput) for out in seen)
    assert torch.equal(seen[0].edge, plain[0].e_id)

    def drop(out: SamplerOutput) -> SamplerOutput:
        return SamplerOutput(
            out.node, out.row.flip(0)[2:], out.col.flip(0)[2:], out.edge.flip(0)[2:],
            metadata=out.metadata,
        )  # fmt: skip

    for batch, whole in zip(
        loaded(data, [3, 2], transform_sampler_output=drop, **args), plain, strict=True
    ):
        assert torch.equal(batch.e_id, whole.e_id.flip(0)[2:])
        assert torch.equal(
            batch.edge_index.as_tensor(), whole.edge_index.as_tensor().flip(1)[:, 2:]
        )
        assert not batch.edge_index.is_sorted
        assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])

    def edit(out: SamplerOutput) -> SamplerOutput:
        out.row.zero_()
        return out

    batch = loaded(data, [3, 2], transform_sampler_output=edit, **args)[0]
    assert int(batch.edge_index.as_tensor()[0].max()) == 0
    assert not batch.edge_index.is_sorted

    with pytest.raises(TypeError, match='transform_sampler_output'):
        loaded(data, [3], transform_sampler_output=lambda out: None, **args)


def test_samplers() -> None:
    data = random_data()
    nodes = torch.arange(10, 40)
    sampler = torch.utils.data.SubsetRandomSampler(range(0, 30, 2))
    loader = FastNeighborLoader(data, [2], input_nodes=nodes, batch_size=4, sampler=sampler)
    assert len(loader) == 4
    ids = torch.cat([batch.input_id for batch in loader])
    assert sorted(ids.tolist()) == list(range(0, 30, 2))

    groups = [[0, 5], [3], [7, 8, 9]]
    batches = loaded(data, [2], input_nodes=nodes, batch_sampler=groups)
    assert [batch.input_id.tolist() for batch in batches] == groups
    assert [batch.n_id[: batch.batch_size].tolist() for batch in batches] == [
        [10, 15], [13], [17, 18, 19]
    ]  # fmt: skip
    imbalanced = ImbalancedSampler(data.y)
    assert sum(b.batch_size for b in loaded(data, [2], sampler=imbalanced, batch_size=9)) == 60
    for wrong, error in ((['a'], (TypeError, ValueError)), ([30], IndexError), ([0.5], TypeError)):
        with pytest.raises(error):
            loaded(data, [2], input_nodes=nodes, sampler=wrong)


def test_loader_made_again_for_a_process() -> None:
    """As Lightning does: with a DistributedSampler over the loader's own positions."""
    nodes, seen = torch.arange(10, 40), []
    loader = FastNeighborLoader(random_data(), [2], input_nodes=nodes, batch_size=4)
    for rank in range(2):
        sampler = torch.utils.data.DistributedSampler(loader.dataset, 2, rank, shuffle=True)
        batches = loaded(random_data(), [2], input_nodes=nodes, batch_size=4, sampler=sampler)
        seen.append(torch.cat([batch.n_id[: batch.batch_size] for batch in batches]))
    assert [each.size(0) for each in seen] == [15, 15]
    assert torch.cat(seen).sort().values.equal(nodes)


def test_other_attributes(device: torch.device) -> None:
    data = random_data()
    data.flags = torch.rand(60, 3) < 0.5
    data.half = torch.randn(60, 2, 2).half()
    data.complex = torch.randn(60, dtype=torch.cfloat)
    data.wide = torch.randn(60, 0)
    data.numbers = np.arange(60)
    data.names = [str(k) for k in range(60)]
    data.strided = torch.randn(60, 8)[:, ::2]
    data.edge_numbers = np.arange(300)
    data.some = torch.randn(7)
    data.number = 3
    for batch in loaded(data, [3, 2], batch_size=16, device=device):
        n_id, e_id = batch.n_id.cpu(), batch.e_id.cpu()
        for key in ('flags', 'half', 'complex', 'wide', 'strided'):
            assert torch.equal(batch[key].cpu(), data[key][n_id]), key
        assert batch.numbers.tolist() == n_id.tolist()
        assert batch.names == [str(k) for k in n_id.tolist()]
        assert batch.edge_numbers.tolist() == e_id.tolist()
        assert batch.some is data.some
        assert batch.number == 3


@pytest.mark.parametrize('disjoint', [False, True])
def test_sparse_attributes(device: torch.device, disjoint: bool) -> None:
    data = random_data()
    x, edge_attr = data.x.relu(), data.edge_attr.relu()
    data.x, data.edge_attr = x.to_sparse(), edge_attr.to_sparse(1)
    for batch in loaded(data, [3, 2], batch_size=16, disjoint=disjoint, device=device):
        assert batch.x.layout == batch.edge_attr.layout == torch.sparse_coo
        assert batch.x.device.type == device.type
        assert torch.equal(batch.x.to_dense().cpu(), x[batch.n_id.cpu()])
        assert torch.equal(batch.edge_attr.to_dense().cpu(), edge_attr[batch.e_id.cpu()])


def test_attributes_along_another_dimension(device: torch.device) -> None:
    class Own(Data):
        def __cat_dim__(self, key: str, value: object, *args: object) -> object:
            return 1 if key == 'table' else super().__cat_dim__(key, value, *args)

    data = Own(table=torch.randn(3, 60), edge_index=random_data().edge_index, num_nodes=60)
    for batch in loaded(data, [3], batch_size=20, device=device):
        assert isinstance(batch, Own)
        assert torch.equal(batch.table.cpu(), data.table[:, batch.n_id.cpu()])
        assert batch.num_nodes == batch.n_id.numel() == batch._store['num_nodes']


def test_features_that_learn(device: torch.device) -> None:
    data = random_data()
    data.x = torch.nn.Parameter(data.x)
    (batch,) = loaded(data, [3], batch_size=60, device=device)
    batch.x.sum().backward()
    assert torch.equal(data.x.grad, torch.ones(60, 5))


def test_data_is_left_alone(device: torch.device) -> None:
    data = random_data()
    before = copy.deepcopy(data)
    for batch in loaded(data, [3], batch_size=9, device=device):
        batch.x.zero_()
        batch.n_id.zero_()
        batch.edge_index._data.zero_()
        batch.num_sampled_nodes.clear()
    assert equal(data, before)


def test_own_n_id_is_kept_as_pyg_does() -> None:
    data = random_data()
    data.n_id = torch.arange(60) + 100
    data.e_id = torch.arange(300) + 1000
    for batch in loaded(data, [3], batch_size=9):
        assert torch.equal(data.x[batch.n_id - 100], batch.x)
        assert torch.equal(data.edge_attr[batch.e_id - 1000], batch.edge_attr)


def test_numpy_and_pyg_numbers_of_neighbors() -> None:
    data = random_data()
    wanted = loaded(data, [3, 2], seed=1, batch_size=9)
    assert all(map(equal, wanted, loaded(data, (3, 2), seed=1, batch_size=9)))
    assert all(map(equal, wanted, loaded(data, list(np.array([3, 2])), seed=1, batch_size=9)))
    assert all(map(equal, wanted, loaded(data, NumNeighbors([3, 2]), seed=1, batch_size=9)))


@pytest.mark.parametrize('disjoint', [False, True])
def test_hops_without_neighbors(device: torch.device, disjoint: bool) -> None:
    args = {'batch_size': 9, 'disjoint': disjoint, 'device': device}
    wanted = loaded(random_data(), [-1], **args)
    for one, none, two in zip(
        wanted, loaded(random_data(), [0, -1], **args), loaded(random_data(), [-1, 0], **args),
        strict=True,
    ):  # fmt: skip
        assert none.num_sampled_nodes == [one.batch_size, 0, 0]
        assert none.num_sampled_edges == [0, 0]
        assert none.edge_index.shape == (2, 0)
        assert torch.equal(none.n_id, one.n_id[: one.batch_size])
        assert two.num_sampled_nodes == [*one.num_sampled_nodes, 0]
        assert two.num_sampled_edges == [*one.num_sampled_edges, 0]
        assert torch.equal(two.n_id, one.n_id)
        assert torch.equal(two.edge_index.as_tensor(), one.edge_index.as_tensor())


def test_arguments_of_workers_are_taken() -> None:
    data = random_data()
    wanted = loaded(data, [3], seed=1, batch_size=9)
    got = loaded(
        data, [3], seed=1, batch_size=9, num_workers=4, persistent_workers=True, pin_memory=True,
        prefetch_factor=2, filter_per_worker=True, worker_init_fn=print, timeout=3,
        multiprocessing_context='spawn', pin_memory_device='', in_order=True,
    )  # fmt: skip
    assert all(map(equal, wanted, got))


def test_after_other_transforms() -> None:
    data = T.Compose([T.ToUndirected(), T.NormalizeFeatures()])(random_data())
    for batch in loaded(data, [3], batch_size=9, transform=T.AddSelfLoops()):
        loops = batch.edge_index[0] == batch.edge_index[1]
        assert int(loops.sum()) >= batch.num_nodes


def test_stats(device: torch.device) -> None:
    loader = FastNeighborLoader(random_data(), [3, 2], batch_size=9, device=device)
    assert loader.stats.num_batches == 0
    batches = list(loader)
    stats = loader.stats
    assert stats.num_batches == len(batches)
    assert stats.num_nodes == sum(batch.num_nodes for batch in batches)
    assert stats.num_edges == sum(batch.num_edges for batch in batches)
    assert stats.match_degree is None  # All tensors are on the device.
    assert stats.bytes_moved == stats.bytes_saved_by_match == stats.cache_hits == 0
    assert min(stats.sample_seconds, stats.fetch_seconds, stats.wait_seconds) > 0
    loader.reset_stats()
    assert re.search(r'sample_seconds=[\d.e-]{1,8}, ', repr(stats))
    assert loader.stats.num_batches == loader.stats.sample_seconds == 0


def test_repr() -> None:
    loader = FastNeighborLoader(random_data(), [3, -1], 4, range(10), shuffle=True, device='cpu')
    assert repr(loader) == (
        'FastNeighborLoader(num_neighbors=[3, -1], batch_size=4, seeds=10, batches=3, '
        "device='cpu', shuffle=True)"
    )


def test_uniform(device: torch.device) -> None:
    # One node with ten edges, of which three are taken: each in three tenths of the epochs.
    edge_index = torch.stack([torch.arange(1, 11), torch.zeros(10, dtype=torch.long)])
    data = Data(edge_index=edge_index, num_nodes=11)
    loader = FastNeighborLoader(data, [3], input_nodes=[0], device=device, seed=0)
    count: Tensor = torch.zeros(10)
    for _ in range(600):
        (batch,) = loader
        count[batch.e_id.cpu()] += 1
    assert (count / 600 - 0.3).abs().max() < 0.07


def test_values_of_a_matrix_are_read_at_hand_out(device: torch.device) -> None:
    data = random_data()
    del data.edge_index, data.edge_attr
    data.adj_t = (torch.rand(60, 60, device=device) + 1).to_sparse_csr()
    data = data.to(device)
    for k, batch in enumerate(FastNeighborLoader(data, [3, 2], batch_size=5)):
        assert k == 0 or (batch.adj_t.values() == k).all()
        data.adj_t.values().fill_(k + 1)


def test_graph_without_its_list(device: torch.device) -> None:
    edge_index = torch.randint(200, (2, 3000))
    batches = []
    for keep in (True, False):
        data = Data(x=torch.randn(200, 3), edge_index=edge_index).to(device)
        data = ToCSR(keep_edge_index=keep)(data)
        loader = FastNeighborLoader(data, [3, 2], batch_size=50, device=device, seed=1)
        batches.append([torch.as_tensor(batch.edge_index) for batch in loader])
    assert len(batches[0]) == 4
    assert all(map(torch.equal, *batches))


@pytest.mark.parametrize(
    'kwargs',
    [
        {}, {'shuffle': True}, {'rank': 1, 'num_replicas': 2}, {'sampler': range(20_000)},
        {'sampler': 'random_walk'}, {'subgraph_type': 'bidirectional'},
        {'input_nodes': torch.arange(20_000)}, {'input_nodes': torch.ones(20_000).bool()},
    ],
)  # fmt: skip
def test_pickles_nothing_of_other_batches(device: torch.device, kwargs: dict) -> None:
    edge_index = torch.randint(20_000, (2, 60_000))
    data = Data(x=torch.randn(20_000, 3), edge_index=edge_index)
    loader = FastNeighborLoader(data, [3], batch_size=10, device=device, **kwargs)
    for batch in (next(iter(loader)), loader(torch.arange(10))):
        assert batch.batch_size == 10
        assert len(pickle.dumps(batch)) < 20_000
