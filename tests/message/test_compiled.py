"""Random messages as kernels inside of torch.compile, beside PyG's layer."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import softmax

import pyg_fast
from tests._compiled import Backend, assert_like_pyg, graph_data
from tests.message._expressions import Expression

CHANNELS = 8
AGGREGATIONS: list[Any] = [
    'sum', 'sum', 'mean', 'max', 'min', 'var', 'std', ['sum', 'max'], ['mean', 'std', 'min'],
]  # fmt: skip


class RandomMessage(MessagePassing):
    """Of a seed: the message, the aggregation, the flow, and what of it are maps and softmaxes."""

    def __init__(self, seed: int, num_nodes: int, num_edges: int) -> None:
        draw = random.Random(seed)
        aggr = draw.choice(AGGREGATIONS)
        flow = draw.choice(['source_to_target', 'target_to_source'])
        super().__init__(aggr, flow=flow)
        leaves = ['x_j', 'x_i', 'edge', 'row', 'map_j', 'map_i', 'product']
        self.expression = Expression(seed, leaves, depth=draw.choice([2, 3]))
        self.kind = draw.choice(['plain', 'plain', 'softmax', 'heads', 'sunk', 'written', 'norm'])
        self.lin = torch.nn.Linear(CHANNELS, CHANNELS)
        self.norm = torch.nn.LayerNorm(CHANNELS)
        self.row = torch.nn.Parameter(torch.randn(CHANNELS))
        # Of the sizes of the first graph.
        self.other = torch.nn.Parameter(torch.randn(draw.choice([num_nodes, num_edges, CHANNELS])))
        # Which values of edges are read after the message, as they are or in a product.
        self.keeps = draw.choice(['none', 'none', 'value', 'product'])

    def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor) -> Tensor | tuple[Tensor, ...]:
        out = self.propagate(edge_index, x=x, edge=edge)
        if self.keeps == 'none':
            return out
        return out, self.kept * edge if self.keeps == 'product' else self.kept

    def message(self, x_i: Tensor, x_j: Tensor, edge: Tensor, index: Tensor, size_i: int) -> Tensor:
        if self.kind == 'written':
            x_j = x_j * 1
            x_j.view(-1, 2, CHANNELS // 2).mul_(0.5)
            x_j += edge
        if self.kind == 'norm':
            x_j = self.norm(x_j)
        values = {
            'x_j': x_j, 'x_i': x_i, 'edge': edge, 'row': self.row.expand_as(x_j),
            'map_j': self.lin(x_j), 'map_i': self.lin(x_i), 'product': x_j * edge,
        }  # fmt: skip
        out = self.expression(values).tanh() + self.other.mean() + 0.1 * x_j
        if self.keeps != 'none':
            self.kept = values['product'] + out
        if self.kind == 'sunk':
            return self.lin(out)
        if self.kind == 'softmax':
            out = softmax(out, index, num_nodes=size_i) * x_j
        if self.kind == 'heads':
            heads = out.view(-1, 2, CHANNELS // 2)
            weight = softmax(heads.sum(-1), index, num_nodes=size_i)
            out = (weight.unsqueeze(-1) * x_j.view(-1, 2, CHANNELS // 2)).flatten(1)
        return torch.nn.functional.dropout(out, 0.5, self.training)


def check(seed: int, device: torch.device) -> None:
    torch.manual_seed(seed)
    num_nodes, num_edges = random.Random(-seed).choice([(20, 50), (20, 20), (20, 8), (9, 50)])
    conv = RandomMessage(seed, num_nodes, num_edges).double().to(device).eval()
    eager = pyg_fast.accelerate(copy.deepcopy(conv))
    eager(*graph_data(33, 71, device))
    (report,) = pyg_fast.accelerate_report(eager)
    calls = [graph_data(*sizes, device) for sizes in ((num_nodes, num_edges), (33, 71))]
    backend = assert_like_pyg(conv, calls, dynamic=random.Random(seed).choice([True, True, None]))
    # A message that is a kernel in eager code is one in compiled code.
    if report.how == 'kernel':
        assert backend.kernels > 0


# Those of the first 20 that have most pairs of two settings together.
@pytest.mark.parametrize('seed', [0, 1, 2, 3, 4, 5, 6, 7, 11, 14, 17, 19])
def test_random_message(seed: int, device: torch.device) -> None:
    check(seed, device)


class Kept(MessagePassing):
    """A dropout of a product, which is read after the message; or written into."""

    def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor) -> tuple[Tensor, ...]:
        out = self.propagate(edge_index, x=x, edge=edge)
        if self.training:
            return out, self.kept
        self.kept.mul_(2)
        return out, self.kept, self.view

    def message(self, x_j: Tensor, edge: Tensor) -> Tensor:
        self.kept = torch.nn.functional.dropout(x_j * edge, 0.5, self.training)
        self.view = self.kept.view(-1, 2, CHANNELS // 2)
        return self.kept if self.training else self.view.sigmoid().flatten(1)


def test_write_into_values_that_others_read(device: torch.device) -> None:
    """A view of what is written after the message shows it."""
    assert_like_pyg(Kept().double().eval(), [graph_data(20, 50, device)], kernels=1)


def test_dropped_values_that_others_read(device: torch.device) -> None:
    """They are those that the sum has."""
    backend = Backend()
    compiled = torch.compile(
        pyg_fast.accelerate(Kept().to(device)), backend=backend, fullgraph=True
    )
    x, edge_index, edge = graph_data(20, 50, device)
    out, kept = compiled(x, edge_index, edge)
    assert backend.kernels == 1
    assert (kept == 0).any()
    torch.testing.assert_close(out, torch.zeros_like(out).index_add(0, edge_index[1], kept))
