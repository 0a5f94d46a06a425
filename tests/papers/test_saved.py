"""What release 0.2 has saved, when the classes had other homes."""

import io
import lzma
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GraphConv

import pyg_fast

# Layers with their outputs, a prepared graph, an aggregated input and transforms.
FILE = Path(__file__).parent / 'data' / 'saved-by-0.2.pt.xz'


@pytest.fixture(scope='module')
def saved() -> dict[str, Any]:
    return torch.load(io.BytesIO(lzma.decompress(FILE.read_bytes())), weights_only=False)


def test_layers(saved: dict[str, Any]) -> None:
    x, edge_index = saved['data'].x, saved['data'].edge_index
    assert len(saved['layers']) == 13
    for name, layer in saved['layers'].items():
        with torch.no_grad():
            assert torch.allclose(layer(x, edge_index), saved['outs'][name], atol=1e-6), name


def test_accelerated_layers_are_restored(saved: dict[str, Any]) -> None:
    layers = [*saved['layers']['accelerated'].convs, saved['layers']['accelerated message']]
    assert all(report.layer in ('GCNConv', 'GraphConv') for layer in layers
               for report in pyg_fast.accelerate_report(layer))  # fmt: skip
    for layer in layers:
        pyg_fast.restore(layer)
    assert [type(layer) for layer in layers] == [GCNConv, GCNConv, GraphConv]


def test_aggregated_input(saved: dict[str, Any]) -> None:
    data, conv = saved['data'], saved['layers']['path gcn']
    out = conv(saved['aggregated'], data.edge_index)
    assert torch.allclose(out, saved['outs']['path gcn'], atol=1e-6)


def test_prepared_graph_trains(saved: dict[str, Any]) -> None:
    data, model = saved['data'], saved['layers']['path gnn'].train()
    out = model(data.x, data.edge_index, paths=data.execution_paths)
    out[data.train_mask].sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(data.x, data.edge_index)[data.train_mask].sum().backward()
    for grad, p in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(grad, p.grad, atol=1e-5)


def test_transforms(saved: dict[str, Any]) -> None:
    names = [type(transform).__name__ for transform in saved['transforms']]
    assert names == ['Prepare', 'ExecutionPaths', 'GroupSizes', 'Reorder', 'ToCSR']
    torch.manual_seed(0)
    data = Data(
        x=torch.randn(12, 4), edge_index=torch.randint(12, (2, 40)),
        train_mask=torch.arange(12) < 3,
    )  # fmt: skip
    prepared = saved['transforms'][0](data)
    assert len(prepared.execution_paths) == 2
    reordered = saved['transforms'][3](data)
    assert torch.equal(data.x[reordered.perm_index], reordered.x)
