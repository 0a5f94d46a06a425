"""Every layer, small enough to be trained in a moment."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch_geometric.data import Data

import pyg_fast.nn as nn
from pyg_fast.transforms import ExecutionPaths, ToCSR

IN, OUT = 12, 8


class Gated(nn.FusedMessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.lin = Linear(IN, OUT)
        self.gate = Linear(2 * IN, OUT)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(torch.cat([x_i, x_j], -1)))
        return torch.nn.functional.dropout(gate * self.lin(x_j), 0.5, self.training)


LAYERS: dict[str, Callable[[], Module]] = {
    'FusedGATConv': lambda: nn.FusedGATConv(IN, OUT // 2, heads=2, dropout=0.5),
    'FusedGCNConv': lambda: nn.FusedGCNConv(IN, OUT),
    'FusedGINConv': lambda: nn.FusedGINConv(Linear(IN, OUT)),
    'FusedGATv2Conv': lambda: nn.FusedGATv2Conv(IN, OUT // 2, heads=2, dropout=0.5),
    'FusedMessagePassing': Gated,
    'FusedSAGEConv': lambda: nn.FusedSAGEConv(IN, OUT),
    'FusedTransformerConv': lambda: nn.FusedTransformerConv(IN, OUT // 2, heads=2, dropout=0.5),
    'MaxK': lambda: nn.MaxK(3),
    'MaxKGCNConv': lambda: nn.MaxKGCNConv(IN, OUT, k=3),
    'MaxKGINConv': lambda: nn.MaxKGINConv(Linear(IN, OUT), k=3),
    'MaxKGNN': lambda: nn.MaxKGNN('sage', IN, 10, OUT, 2, k=3, dropout=0.5),
    'MaxKSAGEConv': lambda: nn.MaxKSAGEConv(IN, OUT, k=3),
    'PathPreparedGCNConv': lambda: nn.PathPreparedGCNConv(IN, OUT),
    'PathPreparedGINConv': lambda: nn.PathPreparedGINConv(Linear(IN, OUT)),
    'PathPreparedGNN': lambda: nn.PathPreparedGNN('gcn', IN, 10, OUT, 2, dropout=0.5),
    'PathPreparedSAGEConv': lambda: nn.PathPreparedSAGEConv(IN, OUT),
    'SampledGCNConv': lambda: nn.SampledGCNConv(IN, OUT, 3, 'unbiased', sample='always'),
    'SampledSAGEConv': lambda: nn.SampledSAGEConv(IN, OUT, 3, sample='always'),
}


def graph(device: torch.device, num_nodes: int = 80, num_edges: int = 500) -> Data:
    """A random graph of which nothing is prepared."""
    high = max(1, num_nodes - 5)  # The last nodes have no edges.
    data = Data(x=torch.randn(num_nodes, IN), edge_index=torch.randint(high, (2, num_edges)))
    data.train_mask = torch.arange(num_nodes) % 3 == 0
    return data.to(device)


def prepared(data: Data, paths: bool = True) -> Data:
    """The same, sorted and with execution paths."""
    data = ToCSR()(data)
    return ExecutionPaths(num_layers=2, mask='train_mask')(data) if paths else data


def run(layer: Module, x: Tensor, data: Data) -> Tensor:
    if isinstance(layer, nn.MaxK):
        out = layer(x)
        return out if isinstance(out, Tensor) else out.to_dense()
    options: dict[str, Any] = {}
    if isinstance(layer, nn.PathPreparedGNN) and 'execution_paths' in data:
        options['paths'] = data.execution_paths
    return layer(x, data.edge_index, **options)


def train(
    name: str,
    data: Data,
    steps: int,
    watch: Callable[[int], None] | None = None,
    lr: float = 0.1,
) -> list[Tensor]:
    """Parameters and features after some steps of training both, and their last gradients."""
    torch.manual_seed(0)
    layer = LAYERS[name]().to(data.x.device)
    x = data.x.clone().requires_grad_()
    wanted = [x, *layer.parameters()]
    optimizer = torch.optim.SGD(wanted, lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        run(layer, x, data)[data.train_mask].square().mean().backward()
        optimizer.step()
        if watch is not None:
            watch(step)
    return [t.detach() for t in wanted] + [t.grad for t in wanted if t.grad is not None]
