"""Neighbours that random walks visit most."""

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

import pyg_fast.nn as fnn
from pyg_fast.graph import graph as graphs
from pyg_fast.loader import FastNeighborLoader
from pyg_fast.ops import pinsage_neighbors, to_csr
from tests.loader._graphs import Apart, equal, random_data
from tests.loader._parts import mix_seeds

ARGS = {'sampler': 'random_walk', 'batch_size': 11, 'seed': 2, 'num_walks': 6, 'restart': 0.2}


def wanted_batch(data: Data, seeds: list[int], fanouts: list[int], seed: int) -> tuple:
    """Nodes, edges and weights, hop by hop and node by node."""
    rowptr, col, _ = to_csr(data.edge_index, data.num_nodes, data.num_nodes)
    nodes, edges, weights, counts = list(seeds), [], [], []
    start = 0
    for hop, fanout in enumerate(fanouts):
        end = len(nodes)
        found = pinsage_neighbors(
            rowptr, col, torch.tensor(nodes[start:end], dtype=torch.long), fanout, num_walks=6,
            walk_length=3, restart=0.2, seed=mix_seeds(seed, hop),
        )  # fmt: skip
        before = len(edges)
        for target, (ids, visits) in enumerate(
            zip(*(t.tolist() for t in found), strict=True), start
        ):
            for node, count in zip(ids, visits, strict=True):
                if node < 0:
                    continue
                if node not in nodes:
                    nodes.append(node)
                edges.append((nodes.index(node), target))
                weights.append(count / sum(visits))
        counts.append((len(nodes) - end, len(edges) - before))
        start = end
    return nodes, edges, weights, counts


@pytest.mark.parametrize('seeds', [[4, 9, 30, 58], [7, 3, 7, 7, 20]])
def test_definition(device: torch.device, seeds: list[int]) -> None:
    data = random_data(60, 200)
    (batch,) = FastNeighborLoader(data, [3, 2], input_nodes=seeds, device=device, **ARGS)
    nodes, edges, weights, counts = wanted_batch(data, seeds, [3, 2], mix_seeds(2, 0, 0, 1))
    assert batch.n_id.tolist() == nodes
    assert list(zip(*batch.edge_index.as_tensor().tolist(), strict=True)) == edges
    torch.testing.assert_close(batch.edge_weight.cpu(), torch.tensor(weights))
    assert batch.num_sampled_nodes == [len(seeds)] + [count for count, _ in counts]
    assert batch.num_sampled_edges == [count for _, count in counts]
    assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    assert 'e_id' not in batch
    assert 'edge_attr' not in batch
    assert batch.batch_size == len(seeds)


def test_same_seed_same_batches(device: torch.device) -> None:
    data = random_data()
    a, b = (FastNeighborLoader(data, [3, 2], shuffle=True, device=device, **ARGS) for _ in 'ab')
    first = list(a)
    assert all(map(equal, first, b))
    assert not any(map(equal, first, a))


def test_match(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    data = random_data(200, 1500)
    loader = Apart(monkeypatch, device)(data, [3, 2], shuffle=True, device=device, **ARGS)
    for batch in loader:
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    assert loader.stats.match_degree > 0


def test_isolated_nodes_and_no_edges(device: torch.device) -> None:
    data = random_data()
    (batch,) = FastNeighborLoader(data, [3, 2], input_nodes=[58, 59], device=device, **ARGS)
    assert batch.num_edges == 0
    empty = Data(x=torch.randn(3, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    (batch,) = FastNeighborLoader(empty, [3], device=device, **ARGS)
    assert batch.edge_weight.numel() == 0


def test_layers_take_the_shares(device: torch.device) -> None:
    data = random_data()
    batch = next(iter(FastNeighborLoader(data, [3, 2], device=device, **ARGS)))
    graphs.graph_of(batch.edge_index, batch.num_nodes, batch.num_nodes)
    conv = fnn.PathPreparedGCNConv(5, 3, normalize=False).to(device)

    def run(edge_index: Tensor) -> Tensor:
        return conv(batch.x, edge_index, batch.edge_weight)

    torch.testing.assert_close(run(batch.edge_index), run(batch.edge_index.as_tensor()))
    sums = torch.zeros(batch.num_nodes, device=device)
    sums.index_add_(0, batch.edge_index.as_tensor()[1], batch.edge_weight)
    assert ((sums == 0) | ((sums - 1).abs() < 1e-5)).all()


def test_too_many_steps() -> None:
    with pytest.raises(ValueError, match='1024'):
        FastNeighborLoader(random_data(), [3], sampler='random_walk', num_walks=400)
