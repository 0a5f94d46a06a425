"""Batches of graphs with several types, with times, and with a subgraph for each seed."""

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import SAGEConv, to_hetero
from torch_geometric.sampler import HeteroSamplerOutput, NumNeighbors
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import trim_to_layer

from pyg_fast.graph import graph_of
from pyg_fast.graph._cache import cache_of
from pyg_fast.loader import FastNeighborLoader
from tests._profile import ops_of
from tests.loader._graphs import equal, random_data
from tests.loader._hetero import EDGES, NODES, check_hetero, expected, random_hetero
from tests.loader._parts import _columns, mix_seeds

FANOUTS = {key: [k % 3 - 1, 2] for k, key in enumerate(EDGES)}  # all, none, one; then two


def by_hop(fanouts: Any) -> list[list[int]]:
    lists = fanouts.values() if isinstance(fanouts, dict) else [fanouts] * len(EDGES)
    return [list(hop) for hop in zip(*lists, strict=True)]


def flat(batch: Any) -> dict[Any, Any]:
    """All that a batch holds, comparable."""
    return {
        (store._key, key): value.as_tensor().tolist() if isinstance(value, EdgeIndex)
        else value.tolist() if isinstance(value, torch.Tensor) else value
        for store in batch.stores for key, value in store.items()
    }  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    'joint': {},
    'replace': {'replace': True},
    'weights': {'weight_attr': 'weight'},
    'weights, replace': {'weight_attr': 'weight', 'replace': True},
    'disjoint': {'disjoint': True},
    'node time': {'time_attr': 'time'},
    'last': {'time_attr': 'time', 'temporal_strategy': 'last'},
    'max_age': {'time_attr': 'time', 'max_age': 4},
    'edge time': {'time_attr': 'edge_time', 'input_time': torch.arange(40)},
    'edge time, last': {
        'time_attr': 'edge_time', 'temporal_strategy': 'last', 'input_time': torch.arange(40),
        'max_age': 9, 'replace': True, 'weight_attr': 'weight',
    },
}  # fmt: skip


@pytest.mark.parametrize('fanouts', [[-1, -1], [2, 1], FANOUTS])
@pytest.mark.parametrize('name', OPTIONS)
def test_is_pyg_libs(device: torch.device, name: str, fanouts: Any) -> None:
    """Contents and order are those of the reference, which does what pyg-lib does."""
    options, data = OPTIONS[name], random_hetero()
    loader = FastNeighborLoader(
        data, fanouts, batch_size=9, input_nodes='paper', seed=5, device=device, **options
    )
    times = options.get('input_time', data['paper'].time)
    rule = {
        'replace': options.get('replace', False), 'max_age': options.get('max_age'),
        'last': options.get('temporal_strategy') == 'last', 'weight': options.get('weight_attr'),
        'disjoint': options.get('disjoint', False), 'time': options.get('time_attr'),
    }  # fmt: skip
    for number, batch in enumerate(loader):
        nodes = list(range(9 * number, min(9 * number + 9, 40)))
        assert batch['paper'].input_id.tolist() == nodes
        wanted = expected(
            data, 'paper', nodes, by_hop(fanouts), mix_seeds(5, 0, number, 1),
            seed_time=times[nodes].tolist() if 'time_attr' in options else None, **rule,
        )  # fmt: skip
        check_hetero(data, batch, wanted, 'paper')
        assert ('batch' in batch['place']) == (rule['disjoint'] or 'time_attr' in options)
        if 'input_time' in options:
            assert torch.equal(batch['paper'].seed_time.cpu(), times[nodes])
        else:
            assert 'seed_time' not in batch['paper']


@pytest.mark.parametrize('name', [name for name in OPTIONS if name != 'joint'])
def test_one_type(device: torch.device, name: str) -> None:
    options = dict(OPTIONS[name])
    if name in ('replace', 'weights', 'weights, replace'):
        options['disjoint'] = True
    data = random_data(40, 150)
    data.time = torch.randint(20, (40,))
    data.edge_time, data.weight = torch.randint(20, (150,)), torch.randint(4, (150,)) / 3
    times = options.get('input_time', data.time)
    loader = FastNeighborLoader(data, [3, 2], batch_size=15, seed=5, device=device, **options)
    for number, batch in enumerate(loader):
        nodes = list(range(15 * number, min(15 * number + 15, 40)))
        wanted = expected(
            data, None, nodes, [[3], [2]], mix_seeds(5, 0, number, 1),
            replace=options.get('replace', False), max_age=options.get('max_age'),
            last=options.get('temporal_strategy') == 'last', weight=options.get('weight_attr'),
            disjoint=True, time=options.get('time_attr'),
            seed_time=times[nodes].tolist() if 'time_attr' in options else None,
        )  # fmt: skip
        batch = batch.cpu()
        assert batch.n_id.tolist() == [node for _, node in wanted.nodes[0]]
        assert batch.batch.tolist() == [root for root, _ in wanted.nodes[0]]
        assert batch.e_id.tolist() == [e for _, _, e in wanted.edges[0]]
        source, target = batch.edge_index.as_tensor().tolist()
        pairs = list(zip(source, target, strict=True))
        assert pairs == [edge[:2] for edge in wanted.edges[0]]
        assert batch.num_sampled_nodes == wanted.num_nodes[0]
        assert torch.equal(batch.x, data.x[batch.n_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert batch.edge_index.validate() is not None


def test_as_the_loader_of_pyg(device: torch.device) -> None:
    pytest.importorskip('torch_sparse')
    data = random_hetero()
    for kind in ('directional', 'induced'):
        args = dict(batch_size=6, input_nodes=('author', data['author'].time > 3))
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            wanted = list(NeighborLoader(data, [-1, -1], subgraph_type=kind, **args))
        got = list(FastNeighborLoader(data, [-1, -1], subgraph_type=kind, device=device, **args))
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            ours = ours.cpu()
            assert ours.metadata() == theirs.metadata()
            for left, right in zip(ours.stores, theirs.stores, strict=True):
                assert set(right) <= set(left)
            for key in NODES:
                assert torch.equal(ours[key].n_id.sort()[0], theirs[key].n_id.sort()[0])
            for key in EDGES:
                e_id = ours[key].e_id
                assert torch.equal(e_id.sort()[0], theirs[key].e_id.sort()[0])
                ends = [ours[k].n_id[row] for k, row in zip(
                    (key[0], key[2]), ours[key].edge_index.as_tensor(), strict=True
                )]  # fmt: skip
                assert torch.equal(torch.stack(ends), data[key].edge_index[:, e_id])
                assert ours[key].edge_index.validate() is not None
            assert torch.equal(ours['author'].input_id, theirs['author'].input_id)
            assert ours['author'].batch_size == theirs['author'].batch_size


def test_bidirectional_and_transforms(device: torch.device) -> None:
    data, seen = random_hetero(), []

    def look(out: HeteroSamplerOutput) -> HeteroSamplerOutput:
        seen.append(out)
        return out

    def drop(out: HeteroSamplerOutput) -> HeteroSamplerOutput:
        for key, edges in out.row.items():
            out.row[key], out.col[key] = edges[:1], out.col[key][:1]
            out.edge[key] = out.edge[key][:1]
        out.num_sampled_nodes = out.num_sampled_edges = None
        return out

    args = dict(batch_size=8, input_nodes='paper', seed=2, device=device)
    plain = list(FastNeighborLoader(data, [2, 2], **args))
    looked = list(FastNeighborLoader(data, [2, 2], transform_sampler_output=look, **args))
    assert [flat(a) == flat(b) for a, b in zip(plain, looked, strict=True)] == [True] * 5
    assert len(seen) == 5
    both = FastNeighborLoader(data, [2, 2], subgraph_type='bidirectional', **args)
    cites = 'paper', 'cites', 'paper'
    for one, two in zip(plain, both, strict=True):
        edges = one[cites].edge_index.as_tensor().cpu()
        pairs = torch.cat([edges, edges.flip(0)], 1)
        found = two[cites].edge_index.as_tensor().tolist()
        assert set(zip(*found, strict=True)) == set(zip(*pairs.tolist(), strict=True))
        assert two[cites].edge_index.validate() is not None
        assert 'num_sampled_edges' not in two[cites]
    for batch in FastNeighborLoader(data, [2, 2], transform_sampler_output=drop, **args):
        assert all(batch[key].edge_index.size(1) <= 1 for key in EDGES)
        assert 'e_id' in batch[cites]
    with pytest.raises(TypeError, match='HeteroSamplerOutput'):
        next(iter(FastNeighborLoader(data, [2], transform_sampler_output=lambda out: 3, **args)))


def test_graphs_are_prepared_also_when_trimmed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random_hetero()
    (batch,) = FastNeighborLoader(data, [4, 3], batch_size=40, input_nodes='paper', device=device)
    nodes, edges = (batch.collect(f'num_sampled_{k}') for k in ('nodes', 'edges'))
    features = {key: torch.randn(batch[key].num_nodes, 2, device=device) for key in NODES}
    wanted = {key: value.as_tensor() for key, value in batch.edge_index_dict.items()}
    monkeypatch.setattr('pyg_fast.graph.graph._prepare', lambda *args: pytest.fail('sorts'))
    for layer in range(2):
        x, edge_index, _ = trim_to_layer(layer, nodes, edges, features, batch.edge_index_dict)
        for key, value in edge_index.items():
            num_src, num_dst = x[key[0]].size(0), x[key[2]].size(0)
            assert value.sparse_size() == (num_src, num_dst)
            graph = graph_of(value, num_src, num_dst, transpose=False)
            part = wanted[key][:, : value.size(1)]
            assert torch.equal(graph.col.long(), part[0])
            degree = torch.bincount(part[1], minlength=num_dst)
            assert torch.equal(graph.rowptr.diff().long(), degree)


def test_what_kernels_read_of_edges_is_made_late(device: torch.device) -> None:
    data = random_hetero()
    loader = FastNeighborLoader(data, [4, 3], 40, 'paper', device=device)
    (batch,), kind = loader, ('paper', 'cites', 'paper')
    wanted = batch[kind].num_sampled_edges.copy()
    batch[kind].num_sampled_edges.clear()  # The user's lists are not read.
    copied = pickle.loads(pickle.dumps(batch))
    edges = batch[kind].edge_index
    assert cache_of(edges).hops.edges == tuple(wanted)
    assert cache_of(edges).entries
    assert not cache_of(copied[kind].edge_index).entries
    (batch,) = loader
    edges = batch[kind].edge_index
    edges._data.add_(0)
    assert not cache_of(edges).entries  # It may have been edited.


def test_trains_as_with_plain_edges(device: torch.device) -> None:
    data = random_hetero()
    data['place'].x = torch.randn(6, 3)
    (batch,) = FastNeighborLoader(data, [-1, -1], batch_size=9, input_nodes=('paper', range(9)),
                                  device=device)  # fmt: skip

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = SAGEConv((-1, -1), 8), SAGEConv((-1, -1), 3)

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    net = to_hetero(Net(), data.metadata()).to(device)
    plain = {key: value.as_tensor() for key, value in batch.edge_index_dict.items()}
    ours = net(batch.x_dict, batch.edge_index_dict)['paper'][:9]
    theirs = net(batch.x_dict, plain)['paper'][:9]
    assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize('form', ['adj_t', 'torch.sparse', 'int32', 'EdgeIndex', 'sorted'])
def test_forms_of_edges(device: torch.device, form: str) -> None:
    data, other = random_hetero(), random_hetero()
    for key in (('author', 'writes', 'paper'), ('paper', 'cites', 'paper')):
        store = other[key]
        row, col = store.edge_index
        size = (NODES[key[2]], NODES[key[0]])
        if form == 'int32':
            store.edge_index = store.edge_index.int()
        elif form == 'EdgeIndex':
            store.edge_index = EdgeIndex(store.edge_index, sparse_size=size[::-1])
        elif form == 'sorted':
            perm = col.argsort(stable=True)
            for name, value in list(store.items()):
                store[name] = value[:, perm] if name == 'edge_index' else value[perm]
            data[key].update(store)
        else:
            pairs = torch.stack([col, row]).unique(dim=1)
            for name in list(store):
                del store[name]
                del data[key][name]
            value = torch.arange(1.0, pairs.size(1) + 1)
            data[key].edge_index = pairs.flip(0)
            if form == 'adj_t':
                pytest.importorskip('torch_sparse')
                store.adj_t = SparseTensor(row=pairs[0], col=pairs[1], value=value,
                                           sparse_sizes=size)  # fmt: skip
            else:
                store.adj_t = torch.sparse_coo_tensor(pairs, value, size).to_sparse_csr()
    args = dict(batch_size=9, input_nodes='paper', seed=1, device=device)
    plain = FastNeighborLoader(data, [3, 2], **args)
    for ours, theirs in zip(FastNeighborLoader(other, [3, 2], **args), plain, strict=True):
        for key in NODES:
            assert torch.equal(ours[key].n_id, theirs[key].n_id)
        for key in EDGES:
            if 'adj_t' in other[key]:
                found = ours[key].adj_t.to_dense().cpu()
                size = ours[key[2]].num_nodes, ours[key[0]].num_nodes
                wanted = torch.zeros(size)
                source, target = theirs[key].edge_index.as_tensor().cpu()
                wanted[target, source] = theirs[key].e_id.cpu() + 1.0
                assert torch.equal(found, wanted)
                assert 'edge_index' not in ours[key]
            else:
                assert torch.equal(
                    ours[key].edge_index.as_tensor(), theirs[key].edge_index.as_tensor()
                )


def test_ways_to_name_seeds_and_fanouts() -> None:
    data = random_hetero()
    args = dict(batch_size=40, seed=3)
    ids = torch.arange(40)
    (wanted,) = FastNeighborLoader(data, [2, 1], input_nodes='paper', **args)
    for nodes in (('paper', None), ('paper', ids), ['paper', ids.tolist()], ('paper', ids.numpy())):
        (batch,) = FastNeighborLoader(data, [2, 1], input_nodes=nodes, **args)
        assert flat(batch) == flat(wanted)
    (wanted,) = FastNeighborLoader(data, FANOUTS, input_nodes='paper', **args)
    some = dict(list(FANOUTS.items())[:-1])
    for fanouts in (
        {'__'.join(key): value for key, value in FANOUTS.items()},
        NumNeighbors(FANOUTS), NumNeighbors(some, default=FANOUTS['paper', 'at', 'place']),
        {key: tuple(np.int64(k) for k in value) for key, value in FANOUTS.items()},
    ):  # fmt: skip
        (batch,) = FastNeighborLoader(data, fanouts, input_nodes='paper', **args)
        assert flat(batch) == flat(wanted)


@pytest.mark.parametrize(
    ('error', 'says', 'options'),
    [
        (TypeError, "'input_nodes' must be a node type", {'input_nodes': None}),
        (TypeError, "'input_nodes' must be a node type", {'input_nodes': [1, 2]}),
        (ValueError, r"'input_nodes' must name one of .*'paper'.*got 'book'",
         {'input_nodes': 'book'}),
        (IndexError, "'input_nodes' must be from 0 to 24, got 25",
         {'input_nodes': ('author', [25])}),
        (ValueError, "'num_neighbors' must name all edge types, got none for .*'cites'",
         {'num_neighbors': {('author', 'writes', 'paper'): [2]}}),
        (ValueError, "'num_neighbors' must name edge types of 'data'.*'reads'",
         {'num_neighbors': {('author', 'reads', 'paper'): [2]}}),
        (ValueError, "'num_neighbors' must have as many hops",
         {'num_neighbors': {**FANOUTS, ('paper', 'at', 'place'): [1]}}),
        (ValueError, "'num_neighbors' must hold non-negative numbers", {'num_neighbors': [-2]}),
        (ValueError, "'time_attr' must name an attribute .*'birth'", {'time_attr': 'birth'}),
        (ValueError, "'input_time' must be given for the seeds of type 'paper': .*edges",
         {'time_attr': 'edge_time'}),
        (ValueError, "'input_time' must be given for the seeds of type 'place'",
         {'time_attr': 'time', 'input_nodes': 'place'}),
        (TypeError, r"'data\['paper'\].x' must hold integers", {'time_attr': 'x'}),
        (ValueError, "'weight_attr' must name", {'weight_attr': 'mass'}),
        (ValueError, r"'data\[\('paper', 'cites', 'paper'\)\].edge_attr' must have shape",
         {'weight_attr': 'edge_attr'}),
        (ValueError, "subgraph_type='induced'", {'disjoint': True, 'subgraph_type': 'induced'}),
        (ValueError, 'random walks', {'sampler': 'random_walk'}),
        (ValueError, "'features'.*HeteroData", {'features': 'sharded'}),
        (ValueError, r"'data\[\('paper', 'cites', 'paper'\)\].edge_index' must be sorted",
         {'is_sorted': True}),
    ],
)  # fmt: skip
def test_bad_arguments(error: type[Exception], says: str, options: dict[str, Any]) -> None:
    args = {'num_neighbors': [2], 'input_nodes': 'paper', **options}
    with pytest.raises(error, match=says):
        FastNeighborLoader(random_hetero(), **args)


def test_bad_data() -> None:
    data = random_hetero()
    data['author', 'writes', 'paper'].edge_index[0, 3] = 25
    with pytest.raises(IndexError, match=r"'data\[\('author', 'writes', 'paper'\)\].edge_index'"):
        FastNeighborLoader(data, [2], input_nodes='paper')
    data = random_hetero()
    data['paper'].edge_time = torch.zeros(40, dtype=torch.long)
    with pytest.raises(ValueError, match='both have'):
        FastNeighborLoader(data, [2], input_nodes='paper', time_attr='edge_time')
    del data['place'].num_nodes
    del data['author', 'lives', 'place'], data['place', 'of', 'author']
    del data['paper', 'at', 'place']
    with pytest.raises(ValueError, match=r"'data\['place'\]' must have features or num_nodes"):
        FastNeighborLoader(data, [2], input_nodes='paper')
    empty = HeteroData()
    empty['paper'].num_nodes = 3
    with pytest.raises(ValueError, match='must have edges'):
        FastNeighborLoader(empty, [2], input_nodes='paper')


def test_features_in_host_memory(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_hetero()
    if device.type == 'cpu':
        monkeypatch.setattr(_columns, 'is_apart', lambda memory, device: True)
        monkeypatch.setattr(_columns, 'pin', torch.clone)
    args = dict(batch_size=7, input_nodes='paper', seed=2, device=device)
    for options in ({}, {'disjoint': True}, {'time_attr': 'time'}):
        wanted = [flat(b) for b in FastNeighborLoader(data, [3, 2], **args, **options)]
        for storage in (
            {'cache_ratio': 0.4}, {'match': False}, {'reorder': False, 'topology': 'host'},
            {'reorder': bool(options)},  # without effect on batches of several subgraphs
        ):  # fmt: skip
            loader = FastNeighborLoader(data, [3, 2], features='host', **args, **options, **storage)
            assert [flat(batch) for batch in loader] == wanted
            assert loader.stats.bytes_moved > 0
            saved = loader.stats.bytes_saved_by_match > 0
            assert saved == (not options and storage.get('match', True))
            assert (loader.stats.cache_hits > 0) == ('cache_ratio' in storage)


def test_edited_features() -> None:
    data = random_hetero()
    loader = FastNeighborLoader(data, [2], batch_size=20, input_nodes='paper')
    next(iter(loader))
    data['author'].x += 1
    data['author'].z = torch.arange(25)
    for batch in loader:
        assert torch.equal(batch['author'].x, data['author'].x[batch['author'].n_id])
        assert torch.equal(batch['author'].z, batch['author'].n_id)


def test_types_of_edges_are_only_cut_from_joint_tensors() -> None:
    """Where a batch has many types, calls of PyTorch take longer than their work."""

    def calls(num_types: int) -> dict[str, int]:
        data = HeteroData()
        data['paper'].x = torch.randn(20, 3)
        for k in range(num_types):
            data['paper', f'cites_{k}', 'paper'].edge_index = torch.randint(20, (2, 60))
        loader = FastNeighborLoader(data, [2], 4, ('paper', [0, 1, 2, 3]))
        return ops_of(lambda: next(iter(loader)))

    few, many = calls(10), calls(30)
    assert {op for op in many if many[op] != few[op]} == {'aten::as_strided'}  # split calls it, too


def test_types_of_edges_have_few_objects() -> None:
    """Python's garbage collector looks at all of them, which may take longer than the batch."""

    def count(num_types: int) -> int:
        data = HeteroData()
        data['paper'].num_nodes = 20
        for k in range(num_types):
            data['paper', f'cites_{k}', 'paper'].edge_index = torch.randint(20, (2, 60))
        batches = iter(FastNeighborLoader(data, [2], 4, ('paper', [*range(8)])))
        batch = next(batches)  # the first one makes more
        gc.collect()
        before = len(gc.get_objects())
        batch = batch, next(batches)
        gc.collect()
        return len(gc.get_objects()) - before

    # A store, two dictionaries, edges, e_id, row pointers, counts, and two of an EdgeIndex; here
    # two more tensors, since all tests of the loader look at what kernels would read.
    assert (count(30) - count(10)) / 20 <= 11


def test_memory_of_batches_is_freed_at_once(device: torch.device) -> None:
    """Not by the garbage collector, which does not know that a GPU lacks memory."""
    hetero = FastNeighborLoader(random_hetero(), [2], 5, 'paper', device=device)
    plain = FastNeighborLoader(random_data(), [2], 5, device=device)
    gc.disable()
    try:
        for loader in (hetero, plain):
            for is_read in (False, True):
                batch = loader([0, 1])
                edges = batch.edge_stores[0].edge_index
                if is_read:
                    assert cache_of(edges).entries
                alive = [weakref.ref(x) for x in (batch, edges, edges._data, edges._indptr)]
                del batch, edges
                assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_class_of_data_and_its_copies() -> None:
    class Own(HeteroData):
        def __copy__(self) -> 'Own':
            out = super().__copy__()
            out.is_copy = True
            return out

    for kind in (HeteroData, Own):
        given = kind.from_dict(random_hetero().to_dict())
        batch = next(iter(FastNeighborLoader(given, [2], 5, 'paper')))
        assert type(batch) is kind
        assert ('is_copy' in batch) == (kind is Own)
        assert all(store._parent() is batch for store in batch.stores)
        assert 'e_id' not in given['paper', 'cites', 'paper']
        assert 'is_copy' not in given


def test_copies_and_calls() -> None:
    data = random_hetero()
    loader = FastNeighborLoader(
        data, [2, 1], batch_size=9, input_nodes=('paper', torch.arange(30)), seed=4,
        time_attr='edge_time', input_time=torch.arange(30, dtype=torch.int16), shuffle=True,
    )  # fmt: skip
    assert 'num_neighbors=[2, 1]' in repr(loader)
    assert len(loader) == 4
    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        other.epoch = loader.epoch
        assert [flat(b) for b in other] == [flat(b) for b in copy.copy(loader)]
    batch = loader([4, 2])
    assert batch['paper'].input_id.tolist() == [4, 2]
    assert batch['paper'].seed_time.dtype == torch.int16
    assert batch['paper'].seed_time.tolist() == [4, 2]
    assert loader.input_data.input_type == 'paper'
    assert torch.equal(loader.input_data.time, torch.arange(30).short())
    assert loader.stats.num_batches > 0


def test_seeds_without_a_past(device: torch.device) -> None:
    data = random_hetero()
    args = dict(batch_size=40, input_nodes='paper', device=device)
    early = torch.full((40,), -(2**63))
    (batch,) = FastNeighborLoader(
        data, [-1, 5], time_attr='time', input_time=early, max_age=3, **args
    )
    assert batch['paper'].n_id.tolist() == list(range(40))
    assert all(batch[key].e_id.numel() == 0 for key in EDGES if key[0] != 'place')
    # Seeds and types without times are sampled without them.
    assert batch['author', 'writes', 'paper'].edge_index.size(1) == 0


def test_order_of_equal_times(device: torch.device) -> None:
    edges = torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]])
    data = Data(num_nodes=5, edge_index=edges, edge_time=torch.tensor([7, 3, 7, 3]))
    (batch,) = FastNeighborLoader(
        data, [-1], batch_size=1, input_nodes=[0], time_attr='edge_time', device=device,
        input_time=torch.tensor([7]),
    )  # fmt: skip
    assert batch.e_id.tolist() == [1, 3, 0, 2]
    data.edge_index, data.edge_time = edges[:, [1, 3, 0, 2]], torch.tensor([3, 3, 7, 7])
    args = dict(batch_size=1, input_nodes=[0], time_attr='edge_time', is_sorted=True)
    FastNeighborLoader(data, [-1], input_time=torch.tensor([7]), **args)
    data.edge_time = data.edge_time.flip(0)
    with pytest.raises(ValueError, match='by destination and time'):
        FastNeighborLoader(data, [-1], input_time=torch.tensor([7]), **args)


def test_the_same_batches_as_without_types() -> None:
    """Data is sampled as before: the sampler with types draws the same."""
    data = random_data()
    hetero = HeteroData()
    hetero['node'].x, hetero['node', 'to', 'node'].edge_index = data.x, data.edge_index
    ours = FastNeighborLoader(hetero, [3, 2], batch_size=9, input_nodes='node', seed=8)
    for one, two in zip(ours, FastNeighborLoader(data, [3, 2], batch_size=9, seed=8), strict=True):
        assert torch.equal(one['node'].n_id, two.n_id)
        assert torch.equal(one['node', 'to', 'node'].e_id, two.e_id)
    assert equal(*(next(iter(FastNeighborLoader(data, [3], seed=1))) for _ in range(2)))
