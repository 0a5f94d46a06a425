"""Features and graphs from PyG's remote backends."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.testing import MyFeatureStore, MyGraphStore

from pyg_fast.loader import FastLinkNeighborLoader, FastNeighborLoader
from tests.loader._graphs import equal, random_data

ARGS = {'batch_size': 11, 'shuffle': True, 'seed': 2}


class Store(MyFeatureStore):
    """Records the number of rows of each request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def _get_tensor(self, attr: Any) -> Tensor | None:
        if isinstance(attr.index, Tensor):
            self.asked.append(attr.index.numel())
            assert attr.index.device.type == 'cpu'
        return super()._get_tensor(attr)


def stores(data: Data, layout: str, names: tuple[str, ...] = ('x', 'y')) -> tuple[Any, Any]:
    features, graph = Store(), MyGraphStore()
    for name in names:
        features.put_tensor(data[name], group_name=None, attr_name=name, index=None)
    source, target = data.edge_index
    size = (data.num_nodes, data.num_nodes)
    by = {'coo': None, 'csc': target, 'csr': source}[layout]
    if by is not None:
        order = by.argsort(stable=True)
        counts = torch.bincount(by, minlength=data.num_nodes)
        pointer = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        source, target = source[order], target[order]
        if layout == 'csc':
            target = pointer
        else:
            source = pointer
    graph.put_edge_index((source, target), edge_type=None, layout=layout, size=size)
    return features, graph


@pytest.mark.parametrize('layout', ['coo', 'csc', 'csr'])
def test_stores(device: torch.device, layout: str) -> None:
    data = random_data(100, 600)
    if layout != 'coo':  # Then edges are called by their position in the store.
        order = data.edge_index[0 if layout == 'csr' else 1].argsort(stable=True)
        data.edge_index, data.edge_attr = data.edge_index[:, order], data.edge_attr[order]
    plain = Data(x=data.x, y=data.y, edge_index=data.edge_index)
    wanted = FastNeighborLoader(plain, [3, 2], **ARGS)
    loader = FastNeighborLoader(stores(data, layout), [3, 2], reorder=False, device=device, **ARGS)
    for batch, other in zip(loader, wanted, strict=True):
        assert batch.num_nodes == other.num_nodes
        del batch.num_nodes
        assert batch.x.device.type == device.type
        assert equal(batch, other)


def test_only_unmatched_rows_are_asked_for(device: torch.device) -> None:
    data = random_data(100, 600)
    pair = stores(data, 'coo', ('x',))
    loader = FastNeighborLoader(pair, [3, 2], reorder=False, device=device, **ARGS)
    nodes = [set(batch.n_id.tolist()) for batch in loader]
    new = [len(nodes[0])] + [len(b - a) for a, b in zip(nodes, nodes[1:], strict=False)]
    assert pair[0].asked == [max(count, 1) for count in new]
    stats = loader.stats
    assert stats.bytes_moved == 20 * sum(new)
    assert stats.bytes_saved_by_match == 20 * (stats.num_nodes - sum(new))
    assert stats.match_degree > 0

    pair[0].asked.clear()
    loader = FastNeighborLoader(pair, [3, 2], match=False, device=device, **ARGS)
    sizes = [batch.num_nodes for batch in loader]
    assert pair[0].asked == sizes
    assert loader.stats.match_degree is None


def test_all_rows_matched(device: torch.device) -> None:
    data = random_data(30, 200)
    pair = stores(data, 'coo', ('x',))
    loader = FastNeighborLoader(pair, [-1, -1], input_nodes=[3, 3, 3], batch_size=1, device=device)
    for batch in loader:
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    assert pair[0].asked[1:] == [1, 1]


def test_edits_of_a_batch_never_reach_the_next(device: torch.device) -> None:
    data = random_data(100, 600)
    loader = FastNeighborLoader(stores(data, 'coo'), [3, 2], device=device, **ARGS)
    for batch in loader:
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
        batch.x.zero_()
        batch.n_id.zero_()
    assert loader.stats.match_degree > 0


def test_attributes_that_come_and_go(device: torch.device) -> None:
    data = random_data(100, 600)
    features, graph = stores(data, 'coo', ('x',))
    loader = FastNeighborLoader((features, graph), [3, 2], device=device, **ARGS)
    for k, batch in enumerate(loader):
        if k == 3:
            features.put_tensor(data.y, group_name=None, attr_name='y', index=None)
        if 'y' in batch:
            assert torch.equal(batch.y.cpu(), data.y[batch.n_id.cpu()])
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    assert 'y' in batch


def test_data_is_a_store_of_both_kinds(device: torch.device) -> None:
    data = random_data(100, 600)
    wanted = FastNeighborLoader(data, [3, 2], **ARGS)
    loader = FastNeighborLoader(
        (data, copy.copy(data)), [3, 2], reorder=False, device=device, **ARGS
    )
    for batch, other in zip(loader, wanted, strict=True):
        for key in ('x', 'y', 'train_mask', 'n_id', 'e_id', 'edge_index'):
            assert torch.equal(torch.as_tensor(batch[key]).cpu(), torch.as_tensor(other[key]))


def test_custom_cls(device: torch.device) -> None:
    class Own(Data):
        pass

    data = random_data()
    loader = FastNeighborLoader(
        stores(data, 'coo'), [3], input_nodes=data.train_mask, custom_cls=Own, device=device
    )
    assert isinstance(next(iter(loader)), Own)


def test_a_store_that_fails(device: torch.device) -> None:
    data = random_data()
    features, graph = stores(data, 'coo')
    loader = FastNeighborLoader((features, graph), [3], batch_size=5, device=device)
    iterator = iter(loader)
    next(iterator)
    features.remove_tensor(group_name=None, attr_name='x', index=None)
    features.store[(None, 'x')] = (torch.empty(0), None)  # type: ignore[assignment]
    with pytest.raises((KeyError, TypeError)):
        list(iterator)
    assert next(iterator, None) is None


@pytest.mark.parametrize('layout', ['coo', 'csc'])
def test_links_of_a_remote_graph(device: torch.device, layout: str) -> None:
    data = random_data()
    options = {**ARGS, 'neg_sampling': 'binary', 'drop_seed_edges': True, 'device': device}
    for links in (data.edge_index[:, :50], None):
        loader = FastLinkNeighborLoader(stores(data, layout), [3, 2], links, **options)
        for batch in loader:
            ends = batch.n_id[batch.edge_label_index].cpu()[:, : batch.input_id.numel()]
            assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
            if links is not None:
                assert torch.equal(ends, links[:, batch.input_id.cpu()])
        assert len(loader) == (5 if links is not None else 28)
