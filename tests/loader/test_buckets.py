"""Batches of small graphs that are rounded up to a few sizes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool

from pyg_fast.loader import GraphLoader
from pyg_fast.nn import FusedGATConv, FusedGCNConv, FusedSAGEConv
from tests.loader._small_graphs import check_equal, molecules, random_graphs


def pad_loader(graphs: list[Data], *args: Any, **kwargs: Any) -> GraphLoader:
    return GraphLoader(graphs, *args, pad='buckets', **kwargs)


@pytest.mark.parametrize('order', ['sorted', 'dataset'])
def test_padding(device: torch.device, order: str) -> None:
    names = ['x', 'edge_index', 'edge_attr', 'y', 'name', 'number', 'rings', 'nested', 'index_mask']
    graphs = random_graphs(60, names)
    options = dict(drop_last=True, device=device, edge_order=order)
    loader = pad_loader(graphs, 8, follow_batch=['x'], **options)
    plain = GraphLoader(graphs, 8, **options)
    assert 1 <= len(loader.buckets) <= 6
    for batch, real in zip(loader, plain, strict=True):
        n, e = real.num_nodes, real.num_edges
        assert (batch.num_nodes, batch.num_edges) in loader.buckets
        assert len({batch.num_nodes, batch.num_edges, batch.num_graphs}) == 3
        assert batch.num_graphs == 9
        assert batch.y.shape == (9, 2)
        assert batch.num_nodes >= n + 2
        for mask, count in ((batch.node_mask, n), (batch.edge_mask, e), (batch.graph_mask, 8)):
            assert mask.dtype == torch.bool
            assert mask[:count].all()
            assert not mask[count:].any()
        check_equal(batch.x[:n], real.x)
        check_equal(batch.edge_attr[:e], real.edge_attr)
        check_equal(batch.nested['a'][:n], real.nested['a'])
        check_equal(batch.y[:8], real.y)
        check_equal(batch.rings, real.rings)
        check_equal(batch.name, [*real.name, None])
        check_equal(batch.batch[:n], real.batch)
        check_equal(batch.edge_index.as_subclass(Tensor)[:, :e] if order == 'dataset'
                    else batch.edge_index.as_tensor()[:, :e], real.edge_index)  # fmt: skip
        for value in (batch.x[n:], batch.edge_attr[e:], batch.y[8:], batch.number[8:]):
            assert not value.any()
        assert (batch.batch[n:] == 8).all()
        check_padding_edges(batch, n, e)
        for a, b in zip(batch.to_data_list()[:8], real.to_data_list(), strict=True):
            check_equal(a._store._mapping, b._store._mapping)


@pytest.mark.parametrize('order', ['sorted', 'dataset'])
def test_cut(device: torch.device, order: str) -> None:
    """Without its padding a batch is that of a loader that does not pad, also for kernels."""
    names = ['x', 'edge_index', 'edge_attr', 'y', 'name', 'number', 'rings', 'nested', 'parts',
             'index_mask']  # fmt: skip
    graphs = random_graphs(60, names)
    options = dict(
        drop_last=True, device=device, edge_order=order, follow_batch=['x', 'nested', 'name']
    )
    loader, plain = pad_loader(graphs, 8, **options), GraphLoader(graphs, 8, **options)
    assert loader._collated.list_own_rows() == ['rings', 'parts']
    conv = FusedSAGEConv(3, 4).to(device)
    for batch, real in zip(loader, plain, strict=True):
        out = loader._collated.cut(batch, batch._store.__dict__['_num_real'])
        for name in ('node_mask', 'edge_mask', 'graph_mask'):
            assert out[name].all()
            del out[name]
        check_equal(out._store._mapping, real._store._mapping)
        assert out.num_graphs == real.num_graphs
        assert batch.num_graphs == 9
        x = real.x.clone().requires_grad_()
        grads = [
            torch.autograd.grad(conv(x, each.edge_index).square().sum(), x) for each in (out, real)
        ]
        torch.testing.assert_close(*grads)


def check_padding_edges(batch: Batch, num_nodes: int, num_edges: int) -> None:
    """The edges of the padding are among its nodes, spread evenly, and no loops."""
    edge_index = batch.edge_index
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    src, dst = edge_index[:, num_edges:].cpu()
    assert (src != dst).all()
    if src.numel():
        assert min(src.min(), dst.min()) >= num_nodes
        assert max(src.max(), dst.max()) < batch.num_nodes
        degree = dst.bincount(minlength=batch.num_nodes)[num_nodes:]
        assert degree.max() - degree.min() <= 1


@pytest.mark.parametrize('layer', [FusedGCNConv, FusedSAGEConv, FusedGATConv])
def test_padding_changes_no_result(device: torch.device, layer: type) -> None:
    graphs = molecules(40)
    conv = layer(4, 8).to(device).double()
    for data in graphs:
        data.x = data.x.double()
    loaders = pad_loader(graphs, 8, device=device), GraphLoader(graphs, 8, device=device)
    for batch, real in zip(*loaders, strict=True):
        results = []
        for each in (batch, real):
            conv.zero_grad()
            out = conv(each.x, each.edge_index)
            pooled = global_mean_pool(out, each.batch, each.num_graphs)
            pooled[: real.num_graphs].square().sum().backward()
            grads = [p.grad.clone() for p in conv.parameters()]
            results.append([out[: real.num_nodes], pooled[: real.num_graphs], *grads])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_overhead_of_molecules() -> None:
    graphs = molecules(2000)
    for size, most in ((32, 0.1), (256, 0.03)):
        loader = pad_loader(graphs, size, shuffle=True, drop_last=True)
        assert len(loader.buckets) == 6
        assert loader.buckets == tuple(sorted(loader.buckets))
        extra = total = 0
        for batch in loader:
            extra += int((~batch.edge_mask).sum())
            total += int(batch.edge_mask.sum())
        assert extra / total < most
        assert loader.num_unpadded == 0
        share = float(repr(loader).split('overhead=')[1].rstrip('%)')) / 100
        assert share < most


def test_small_and_large_batches_are_not_padded(device: torch.device) -> None:
    graphs = molecules(50) + [
        Data(x=torch.ones(900, 4), edge_index=torch.zeros(2, 900, dtype=torch.int64),
             edge_attr=torch.ones(900, 3), y=torch.ones(1, 1))
    ]  # fmt: skip
    loader = pad_loader(graphs, 8, device=device, sampler=torch.arange(16).tolist())
    list(loader)
    last = list(loader)[-1]
    assert not last.graph_mask.all()
    large = loader([*range(7), 50])
    assert loader.num_unpadded == 1
    small = loader(range(7))
    assert loader.num_unpadded == 1
    for batch, count in ((large, 8), (small, 7)):
        assert batch.num_graphs == count
        assert batch.node_mask.all()
        assert batch.edge_mask.all()
        assert batch.graph_mask.shape == (count,)
        assert batch.graph_mask.all()


def test_buckets_of_a_sampler_come_from_its_first_epoch(device: torch.device) -> None:
    graphs = molecules(40)
    sampler = [[k, k + 1, k + 2] for k in range(30)] + [[1, 2]]
    loader = pad_loader(graphs, batch_sampler=sampler, device=device)
    assert 'buckets after the first epoch' in repr(loader)
    assert all(batch.graph_mask.all() for batch in loader)
    sizes = {(batch.num_nodes, batch.num_edges) for batch in list(loader)[:-1]}
    assert sizes <= set(loader.buckets)
    assert 'overhead=' in repr(loader)


def test_sizes_that_are_all_equal(device: torch.device) -> None:
    graphs = [molecules(1)[0]] * 30
    loader = pad_loader(graphs, 4, True, device=device)
    assert len(loader.buckets) == 1
    assert sum(int(batch.graph_mask.all()) for batch in loader) == 1  # the last one


@pytest.mark.filterwarnings('ignore:Unable to accurately infer')
def test_padding_needs_nodes_and_plain_edges() -> None:
    class Shifted(Data):
        def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return 5 if key == 'edge_index' else super().__inc__(key, value, *args, **kwargs)

    edge_index = torch.zeros(2, 1, dtype=torch.int64)
    for graphs in ([Shifted(x=torch.ones(2, 1), edge_index=edge_index)], [Data(y=1)]):
        with pytest.raises(ValueError, match="'pad' needs graphs that tell"):
            pad_loader(graphs)
