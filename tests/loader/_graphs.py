"""Graphs and loaders for the tests of batches."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

from pyg_fast.loader import FastNeighborLoader

from ._parts import _columns


def random_data(num_nodes: int = 60, num_edges: int = 300, seed: int = 0) -> Data:
    """Nodes with features of three types, some isolated; edges with repeated ones and loops."""
    generator = torch.Generator().manual_seed(seed)
    high = max(1, num_nodes - num_nodes // 10)
    edge_index = torch.randint(high, (2, num_edges if num_nodes else 0), generator=generator)
    return Data(
        x=torch.randn(num_nodes, 5, generator=generator),
        y=torch.randint(4, (num_nodes,), generator=generator),
        train_mask=torch.rand(num_nodes, generator=generator) < 0.5,
        edge_index=edge_index,
        edge_attr=torch.randn(edge_index.size(1), 2, generator=generator),
        name='planted',
    )


def content(batch: Data) -> dict[str, Any]:
    """The contents of a batch, on the CPU and comparable."""
    out = {}
    for key, value in batch._store.items():
        if isinstance(value, EdgeIndex):
            value = value.as_tensor()
        out[key] = value.cpu() if isinstance(value, Tensor) else value
    return out


def equal(a: Data, b: Data) -> bool:
    """Whether two batches have the same contents."""
    left, right = content(a), content(b)
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, Tensor) else value == right[key]
        for key, value in left.items()
    )


def check_batch(data: Data, batch: Data, num_neighbors: list[int], replace: bool = False) -> None:
    """Checks a batch against its definition."""
    n_id, e_id = batch.n_id.cpu(), batch.e_id.cpu()
    edge_index = batch.edge_index.as_tensor().cpu()
    assert n_id.dtype == e_id.dtype == edge_index.dtype == torch.int64
    assert batch.num_nodes == n_id.numel()
    assert torch.equal(n_id[edge_index], data.edge_index.cpu()[:, e_id])
    for key in ('x', 'y', 'train_mask'):
        assert torch.equal(batch[key].cpu(), data[key].cpu()[n_id])
    assert torch.equal(batch.edge_attr.cpu(), data.edge_attr.cpu()[e_id])
    assert batch.name == data.name

    size = batch.batch_size
    assert batch.input_id.numel() == size == batch.num_sampled_nodes[0]
    rest = n_id[size:]
    assert rest.unique().numel() == rest.numel()
    assert not torch.isin(rest, n_id[:size]).any()
    assert sum(batch.num_sampled_nodes) == n_id.numel()
    assert sum(batch.num_sampled_edges) == e_id.numel()
    assert len(batch.num_sampled_nodes) == len(num_neighbors) + 1
    if not replace:
        assert e_id.unique().numel() == e_id.numel() or n_id[:size].unique().numel() < size

    check_order(edge_index, size, n_id.numel())
    check_hops(data, batch, num_neighbors, replace)


def check_order(edge_index: Tensor, size: int, num_nodes: int) -> None:
    """Checks that new nodes are sources in order of first occurrence."""
    sources = edge_index[0][edge_index[0] >= size]
    assert torch.equal(torch.unique(sources), torch.arange(size, num_nodes))
    new = torch.full((num_nodes,), edge_index.size(1))
    new.scatter_reduce_(0, edge_index[0], torch.arange(edge_index.size(1)), 'amin')
    assert (new[size:].diff() > 0).all()


def check_hops(data: Data, batch: Data, num_neighbors: list[int], replace: bool) -> None:
    """Checks that each hop samples the edges of the nodes that the hop before has met."""
    n_id, edge_index = batch.n_id.cpu(), batch.edge_index.as_tensor().cpu()
    degree = torch.bincount(data.edge_index[1].cpu(), minlength=data.num_nodes)
    assert (edge_index[1].diff() >= 0).all()
    first, done = 0, 0
    for k, nodes, edges in zip(
        num_neighbors, batch.num_sampled_nodes, batch.num_sampled_edges, strict=False
    ):
        found = edge_index[1, done : done + edges]
        counts = torch.bincount(found, minlength=first + nodes)
        wanted = degree[n_id[first : first + nodes]]
        if k > 0:
            wanted = wanted.gt(0) * k if replace else wanted.clamp(max=k)
        assert torch.equal(counts[first:], wanted)
        first, done = first + nodes, done + edges


class Apart:
    """Makes a loader on a CPU treat its memory as a GPU treats host memory."""

    def __init__(self, monkeypatch: Any, device: torch.device) -> None:
        if device.type == 'cpu':
            changes = {'is_apart': lambda memory, device: True, 'pin': torch.clone}
            for name, function in changes.items():
                monkeypatch.setattr(_columns, name, function)

    def __call__(self, data: Data, *args: Any, **kwargs: Any) -> FastNeighborLoader:
        return FastNeighborLoader(data, *args, features='host', **kwargs)
