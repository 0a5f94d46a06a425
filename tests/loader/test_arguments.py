"""Bad input, and arguments that are refused."""

import copy
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_fast.loader import FastNeighborLoader
from tests.loader._graphs import random_data


@pytest.mark.parametrize(
    ('nodes', 'error', 'says'),
    [
        ([60], IndexError, 'from 0 to 59, got 60'),
        ([0, -1], IndexError, 'from 0 to 59, got -1'),
        (torch.tensor([5, 1000], dtype=torch.int32), IndexError, '1000'),
        (torch.tensor([1.0]), TypeError, 'float32'),
        ([0.5], TypeError, 'float'),
        (torch.tensor([1j]), TypeError, 'complex'),
        (torch.ones(59, dtype=torch.bool), ValueError, '60 nodes if it is a mask, got 59'),
        (torch.zeros(2, 2, dtype=torch.long), ValueError, 'one dimension'),
        (torch.tensor(3), ValueError, 'one dimension'),
        ('paper', TypeError, 'node type'),
        (('paper', torch.tensor([1])), TypeError, 'node type'),
        (3, TypeError, 'int'),
    ],
)
def test_input_nodes(nodes: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"'input_nodes' .*{says}"):
        FastNeighborLoader(random_data(), [3], input_nodes=nodes)


@pytest.mark.parametrize(
    ('num_neighbors', 'error'),
    [
        ([-2], ValueError), ([5, -3], ValueError), ([], ValueError), ([2.5], TypeError),
        ([True], TypeError), (['3'], TypeError), (5, TypeError),
        ({('a', 'to', 'b'): [3]}, TypeError), (None, TypeError),
    ],
)  # fmt: skip
def test_num_neighbors(num_neighbors: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="'num_neighbors'"):
        FastNeighborLoader(random_data(), num_neighbors)


@pytest.mark.parametrize('none_or_all', [0, -1])
def test_num_neighbors_of_walks(none_or_all: int) -> None:
    with pytest.raises(ValueError, match=f"'num_neighbors' must be positive .* got {none_or_all}"):
        FastNeighborLoader(random_data(), [3, none_or_all], sampler='random_walk')


@pytest.mark.parametrize(
    ('argument', 'value', 'error'),
    [
        ('batch_size', 0, ValueError),
        ('batch_size', 2.0, TypeError),
        ('batch_size', True, TypeError),
        ('window', 0, ValueError),
        ('window', None, TypeError),
        ('replace', 1, TypeError),
        ('shuffle', None, TypeError),
        ('drop_last', 'no', TypeError),
        ('match', None, TypeError),
        ('reorder', 'yes', TypeError),
        ('is_sorted', 1, TypeError),
        ('cache_ratio', -0.1, ValueError),
        ('cache_ratio', 1.5, ValueError),
        ('cache_ratio', '1', TypeError),
        ('features', 'gpu', ValueError),
        ('topology', None, ValueError),
        ('seed', 1.0, TypeError),
        ('seed', True, TypeError),
        ('transform', 3, TypeError),
        ('transform_sampler_output', 'f', TypeError),
        ('sampler', 'layer', ValueError),
        ('subgraph_type', 'none', ValueError),
        ('device', 'meta', ValueError),
        ('device', 'gpu', ValueError),
        ('device', 1.5, TypeError),
        ('input_nodes', torch.ones(3, dtype=torch.long, device='meta'), RuntimeError),
        ('input_id', torch.ones(60, device='meta'), RuntimeError),
        ('weight_attr', 'missing', ValueError),
        ('weight_attr', 3, TypeError),
        ('weight_attr', 'x', ValueError),
        ('input_id', [1, 2], TypeError),
        ('input_id', torch.arange(3), ValueError),
        ('disjoint', 1, TypeError),
        ('time_attr', 'time', ValueError),
        ('time_attr', 3, TypeError),
        ('input_time', torch.arange(59), ValueError),
        ('input_time', torch.rand(60), TypeError),
        ('input_time', [0] * 60, TypeError),
        ('temporal_strategy', 'first', ValueError),
        ('max_age', 3, ValueError),
        ('input_time', torch.zeros(3, dtype=torch.int64), ValueError),
        ('max_age', 0.5, TypeError),
        ('neighbor_sampler', object(), TypeError),
        ('collate_fn', list, TypeError),
        ('max_device_bytes', -1, ValueError),
        ('generator', 5, TypeError),
        ('max_device_bytes', 0.5, TypeError),
    ],
)
def test_arguments(argument: str, value: Any, error: type[Exception]) -> None:
    says = 'none' if argument == 'subgraph_type' else f"'(data.)?{argument}'"
    if value == 'x':
        says = "'data.x' must have shape"
    with pytest.raises(error, match=says):
        FastNeighborLoader(random_data(), [3], **{argument: value})


def test_calls_and_epochs() -> None:
    loader = FastNeighborLoader(random_data(), [3])
    with pytest.raises(TypeError, match='must give positions of seeds, got str'):
        loader('a')
    for epoch, error in (('a', TypeError), (-1, ValueError)):
        loader.epoch = epoch
        with pytest.raises(error, match="'epoch' must"):
            iter(loader)


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match=r"unexpected arguments \['batchsize'\]"):
        FastNeighborLoader(random_data(), [3], batchsize=5)


def test_arguments_that_exclude_each_other() -> None:
    data, positions = random_data(), [0, 1]
    for kwargs in (
        {'seed': 1, 'generator': torch.Generator()},
        {'sampler': positions, 'shuffle': True},
        {'sampler': positions, 'batch_sampler': [positions]},
        {'batch_sampler': [positions], 'shuffle': True},
        {'batch_sampler': [positions], 'batch_size': 3},
        {'batch_sampler': [positions], 'drop_last': True},
        {'sampler': positions, 'rank': 0, 'num_replicas': 2},
        {'rank': 0},
        {'num_replicas': 2},
        {'rank': 2, 'num_replicas': 2},
        {'rank': -1, 'num_replicas': 2},
        {'rank': 0, 'num_replicas': 0},
        {'rank': 0, 'num_replicas': 2, 'shuffle': True},  # Replicas need a common seed.
        {'rank': 0, 'num_replicas': 61},
        {'sampler': 'random_walk', 'replace': True},
        {'sampler': 'random_walk', 'subgraph_type': 'induced'},
        {'sampler': 'random_walk', 'weight_attr': 'edge_attr'},
        {'sampler': 'random_walk', 'num_walks': 0},
        {'sampler': 'random_walk', 'walk_length': 0},
        {'sampler': 'random_walk', 'restart': 1.5},
    ):
        with pytest.raises(ValueError, match='must'):
            FastNeighborLoader(data, [3], **kwargs)
    with pytest.raises(ValueError, match='random walks, got -1'):
        FastNeighborLoader(data, [-1], sampler='random_walk')
    for name in ('rank', 'num_replicas'):
        with pytest.raises(TypeError, match=name):
            FastNeighborLoader(data, [3], **{'rank': 0, 'num_replicas': 1, name: 1.0})


def test_data() -> None:
    for data in (None, random_data().x, (random_data(), 3), (1, 2, 3)):
        with pytest.raises(TypeError, match="'data'"):
            FastNeighborLoader(data, [3])
    with pytest.raises(ValueError, match='num_nodes'):
        FastNeighborLoader(Data(), [3])
    data = random_data()
    data.edge_index[0, 5] = 60
    with pytest.raises(IndexError):
        FastNeighborLoader(data, [3])
    data = random_data()
    data.edge_index = data.edge_index.float()
    with pytest.raises(TypeError, match='integers'):
        FastNeighborLoader(data, [3])
    data = random_data()
    data.weight = torch.full((300,), -1.0)
    for options in ({}, {'disjoint': True}):
        with pytest.raises(ValueError, match="'data.weight' must not be negative"):
            FastNeighborLoader(data, [3], weight_attr='weight', **options)
    for time in (torch.arange(3), [1, 2]):
        data.time = time
        with pytest.raises(ValueError, match="'data.time' must have a time for each of 60 nodes"):
            FastNeighborLoader(data, [3], time_attr='time')
    data.weight = torch.ones(300)
    for name in ('edge_index', 'x', 'weight'):
        moved = copy.copy(data)
        moved[name] = data[name].to('meta')
        with pytest.raises(RuntimeError, match=f"'data.{name}' must be on a CPU or a CUDA device"):
            FastNeighborLoader(moved, [3], weight_attr='weight', device='cpu')
    data.weight = torch.ones(300, dtype=torch.long)
    with pytest.raises(TypeError, match='floating-point'):
        FastNeighborLoader(data, [3], weight_attr='weight')
    data = random_data()
    data.edge_index, data.adj_t = None, torch.eye(60)
    with pytest.raises(TypeError, match='adj_t'):
        FastNeighborLoader(data, [3])
    data.adj_t, data.adj = None, torch.eye(60)
    with pytest.raises(TypeError, match='adj'):
        FastNeighborLoader(data, [3])


def test_remote_data() -> None:
    features, graph = MyFeatureStore(), MyGraphStore()
    with pytest.raises(ValueError, match='without any'):
        FastNeighborLoader((features, graph), [3])
    graph.put_edge_index(
        torch.zeros(2, 1, dtype=torch.long), edge_type=('a', 'to', 'b'), layout='coo', size=(4, 4)
    )
    with pytest.raises(TypeError, match='one type of nodes and edges'):
        FastNeighborLoader((features, graph), [3])
    graph = MyGraphStore()
    edges = torch.zeros(2, 1, dtype=torch.long)
    graph.put_edge_index(edges, edge_type=None, layout='coo', size=(4, 4))
    features.put_tensor(torch.randn(4, 2), group_name='paper', attr_name='x', index=None)
    with pytest.raises(TypeError, match='one type of nodes'):
        FastNeighborLoader((features, graph), [3])
    with pytest.raises(ValueError, match='weight_attr'):
        FastNeighborLoader((MyFeatureStore(), graph), [3], weight_attr='w')


def test_names_of_masks() -> None:
    data = random_data()
    data.train_mask = torch.ones(60, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"'input_nodes' .*'train_mask': pass data\.train_mask"):
        FastNeighborLoader(data, [3], input_nodes='train_mask')
    typed = HeteroData({'a': {'num_nodes': 3}})
    typed['a', 'to', 'a'].edge_index = torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(TypeError, match=r"'input_nodes' .*'seeds': pass data\['a'\]\.seeds"):
        FastNeighborLoader(typed, [3], input_nodes=('a', 'seeds'))


def test_refusals_name_what_to_use() -> None:
    with pytest.raises(TypeError, match='torch_geometric.loader.NeighborLoader'):
        FastNeighborLoader(random_data(), [3], neighbor_sampler=1)
    features, graph = MyFeatureStore(), MyGraphStore()
    with pytest.raises(ValueError, match='torch_geometric.loader.NeighborLoader'):
        FastNeighborLoader((features, graph), [3], disjoint=True)
