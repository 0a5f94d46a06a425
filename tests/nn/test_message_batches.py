"""Messages of batches of features `[B, N, F]`, of which the edges are not the first dimension."""

import copy
from typing import Any

import pytest
import torch
from _pairs import pairs
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

import pyg_fast
from tests._compiled import assert_like_pyg
from tests._report import why_pygs

E, F = 300, 8


class Layer(MessagePassing):
    def __init__(self, node_dim: int, aggr: str) -> None:
        super().__init__(aggr=aggr, node_dim=node_dim)
        self.both, self.one = torch.nn.Linear(2 * F, F), torch.nn.Linear(F, F, bias=False)
        self.norm = torch.nn.LayerNorm(F)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)


class Map(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.both(torch.cat([x_i, x_j], -1)).relu()


class Matrices(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.softmax(x_i @ self.one.weight, -1) * torch.matmul(x_j, self.one.weight)


class Sunk(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.one(torch.relu(self.both(torch.cat([x_i, x_j], dim=-1))))


class Score(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        score = (x_i * x_j).sum(-1, keepdim=True) + x_i.amax(-1, keepdim=True)
        return torch.sigmoid(score) * x_j * edge_attr


class Joined(Layer):
    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return torch.tanh(self.both(torch.cat([x_j, x_i], -1)) + edge_attr)


class Heads(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        q, k = (x.view(*x.shape[:-1], 2, F // 2) for x in (x_i, x_j))
        return (k * q.mean(-1, keepdim=True)).flatten(-2)


class Chunks(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        one, other = x_j.chunk(2, -1)
        return torch.cat([one * x_i[..., :4], other.tanh()], -1)


class Norm(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.norm(x_j - x_i)


class AcrossBatch(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i * x_j.mean(0, keepdim=True) + x_j[0]


class MixesEdges(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j - x_j.mean(-2, keepdim=True)


class Merges(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.flatten(0, 1).view(x_j.size(1), x_j.size(0), F).transpose(0, 1)


class Shifts(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.cat([x_j[:, 1:], x_j[:, :1]], 1)


class Joins(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_i, x_j], 1)[:, : x_j.size(1)]


def inputs(num_parts: int, num_nodes: int, *more: int, num_edges: int = E) -> list[Tensor]:
    x = torch.randn(num_parts, num_nodes, *more, F, dtype=torch.float64, requires_grad=True)
    source = torch.randint(num_nodes, (num_edges,))
    step = torch.randint(1, num_nodes, (num_edges,))
    edge_index = torch.stack([source, (source + step) % num_nodes])  # without self-loops
    weight = torch.randn(num_edges, *(1 for _ in more), 1, dtype=torch.float64, requires_grad=True)
    return [x, edge_index, weight]


def check(
    conv: Layer, num_parts: int, num_nodes: int, *more: int, edge_attr: Tensor | None = None
) -> str:
    """Compares results and gradients; returns why PyG's code ran."""
    torch.manual_seed(0)
    theirs = conv.double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x, edge_index, weight = inputs(num_parts, num_nodes, *more)
    weight = weight if edge_attr is None else edge_attr
    found = []
    for layer in (theirs, ours):
        out = layer(x, edge_index, weight)
        leaves = [x, weight, *layer.parameters()]
        total = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        grads = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        found.append([out, *grads])
    torch.testing.assert_close(found[1], found[0])
    return why_pygs(ours)


@pairs(
    ('cls', 'sizes', 'aggr'),
    [Map, Matrices, Score, Heads, AcrossBatch],
    [(3, 50), (1, 50), (50, 50), (2, E)], ['sum', 'max', 'mean'],
)  # fmt: skip
def test_taken(cls: type[Layer], sizes: tuple[int, int], aggr: str) -> None:
    assert check(cls(-2, aggr), *sizes) == ''


@pairs(('cls', 'sizes'), [Sunk, Chunks, Norm], [(3, 50), (2, E)])
def test_taken_row_by_row(cls: type[Layer], sizes: tuple[int, int]) -> None:
    assert check(cls(-2, 'sum'), *sizes) == ''


@pytest.mark.parametrize('num_parts', [1, 3])
@pytest.mark.parametrize('cls', [Score, Joined])
def test_features_of_edges_in_each_part(cls: type[Layer], num_parts: int) -> None:
    edge_attr = torch.randn(num_parts, E, F, dtype=torch.float64, requires_grad=True)
    assert check(cls(-2, 'mean'), num_parts, 50, edge_attr=edge_attr) == ''
    alike = torch.randn(1, E, F, dtype=torch.float64, requires_grad=True)
    for edge_attr in (alike, alike.expand(num_parts, -1, -1)):
        assert check(cls(-2, 'max'), num_parts, 50, edge_attr=edge_attr) == ''


@pytest.mark.parametrize('cls', [Map, Matrices, Score])
def test_four_dimensions(cls: type[Layer]) -> None:
    assert check(cls(-3, 'sum'), 3, 50, 2) == ''


@pytest.mark.parametrize('cls', [MixesEdges, Merges, Shifts, Joins])
def test_refused(cls: type[Layer]) -> None:
    for sizes in ((3, 50), (2, E)):
        assert check(cls(-2, 'sum'), *sizes) != ''


@pytest.mark.parametrize('cls', [Map, Matrices, Score, Heads, AcrossBatch])
def test_compiled(cls: type[Layer]) -> None:
    """One kernel for all numbers of nodes and edges; or one of fixed numbers."""
    conv = cls(-2, 'max' if cls is Score else 'mean').double()
    assert_like_pyg(conv, [inputs(3, 50), inputs(3, 40, num_edges=350)], kernels=1, frames=1)
    if cls in (Map, AcrossBatch):
        assert_like_pyg(conv, [inputs(3, 50)], kernels=1, dynamic=False)


def test_compiled_with_more_dimensions() -> None:
    several: Any = ['sum', 'std']
    conv = Score(-3, several).double()
    assert_like_pyg(conv, [inputs(3, 50, 2), inputs(3, 40, 2, num_edges=350)], kernels=1, frames=1)
    assert_like_pyg(Score(-2, 'sum').double(), [inputs(2, E)], kernels=1, dynamic=False)


@pytest.mark.parametrize('cls', [MixesEdges, Merges, Shifts, Joins])
def test_refused_in_compiled_code(cls: type[Layer]) -> None:
    for sizes, dynamic in (((3, 50), True), ((2, E), True), ((2, E), False)):
        assert_like_pyg(cls(-2, 'sum').double(), [inputs(*sizes)], kernels=0, dynamic=dynamic)


class Own(Map):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:  # type: ignore[override]
        return scatter(inputs, index, self.node_dim, dim_size)


def test_own_aggregate_in_compiled_code() -> None:
    assert_like_pyg(Own(-2, 'sum').double(), [inputs(3, 50)], kernels=0)
