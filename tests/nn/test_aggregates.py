"""Layers with an `aggregate` of their own: captured with the message, also in compiled code."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import degree, scatter, softmax

import pyg_fast
from tests._compiled import Backend, assert_like_pyg, graph_data
from tests._report import why_pygs

N, E, C = 12, 70, 6


class Layer(MessagePassing):
    """Gates of both ends and the edge; what is aggregated differs by subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.edge = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = self.propagate(
            edge_index, x=self.query(x), v=self.value(x), e=self.edge(edge_attr), h=x
        )
        return out if isinstance(out, Tensor) else torch.cat(list(out), -1)

    def message(self, x_i: Tensor, x_j: Tensor, v_j: Tensor, e: Tensor) -> Any:
        gate = torch.sigmoid(x_i + x_j + e)
        return gate * v_j, gate


class GatedGCN(Layer):
    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        values, gates = (scatter(part, index, 0, dim_size, 'sum') for part in inputs)
        return values / (gates + 1e-6)


class Several(Layer):
    """A dict, each part with another width and reduction; `index_add_` into an own tensor."""

    def message(self, x_i: Tensor, x_j: Tensor, v_j: Tensor, e: Tensor) -> Any:
        return {'v': torch.relu(x_i - x_j), 'w': (v_j * e).sum(-1, keepdim=True)}

    def aggregate(self, inputs: Any, index: Tensor, ptr: Any = None, dim_size: Any = None) -> Any:
        value = inputs['v']
        total = torch.zeros(dim_size, C, dtype=value.dtype, device=value.device)
        total.index_add_(0, index, value)
        width = scatter(inputs['w'], index, dim=0, dim_size=dim_size, reduce='mean')
        return total, width, scatter(value, index, dim=0, dim_size=dim_size, reduce='max')


class Scalers(Layer):
    """Statistics, scaled by the degree, normalized and mapped; the rows of nodes are added."""

    def message(self, x_j: Tensor, e: Tensor) -> Any:
        return x_j * e

    def aggregate(self, inputs: Any, index: Tensor, h: Tensor, dim_size: int) -> Any:
        mean = scatter(inputs, index, 0, dim_size, 'mean')
        square = scatter(inputs * inputs, index, 0, dim_size, 'mean')
        least = scatter(inputs, index, 0, dim_size, 'min')
        spread = torch.sqrt(torch.relu(square - mean**2) + 1e-5)
        many = torch.log(degree(index, dim_size, inputs.dtype) + 1).view(-1, 1)
        return self.edge(layer_norm(mean * many + least, (C,))) * spread + h


class Weighted(Layer):
    """A softmax, with the module of the layer."""

    def message(self, x_i: Tensor, x_j: Tensor, v_j: Tensor, e: Tensor) -> Any:
        return v_j, (x_i * x_j).sum(-1, keepdim=True) + e[:, :2]

    def aggregate(self, inputs: Any, index: Tensor, ptr: Any, dim_size: int) -> Any:
        value, score = inputs
        alpha = softmax(score, index, num_nodes=dim_size)
        heads = (value.view(-1, 2, C // 2) * alpha.unsqueeze(-1)).flatten(1)
        return super().aggregate(heads, index, ptr, dim_size)


class SoftmaxWithoutSize(Layer):
    """The softmax asks the graph for the number of nodes, which is no number of rows here."""

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor, index: Tensor) -> Any:
        return softmax(x_i * e, index) * x_j

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return scatter(inputs, index, 0, dim_size) * 2


class NormalizedRows(Layer):
    """Batch normalization in evaluation, of rows of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(C).eval()

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return self.norm(scatter(inputs[0], index, 0, dim_size))


class NextEdges(GatedGCN):
    """Values of edges for the next layer, of which the gradient flows."""

    keeps = True

    def message(self, x_i: Tensor, x_j: Tensor, v_j: Tensor, e: Tensor) -> Any:
        self.edges = x_i + x_j + e
        self.last = v_j.detach()
        gate = torch.sigmoid(self.edges)
        return gate * v_j, gate

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out = super().forward(x, edge_index, edge_attr)
        assert self.last.requires_grad is False
        assert self.edges.shape == edge_attr.shape
        return torch.cat([out.flatten(), self.edges.flatten()]) if self.keeps else out


class UnreadEdges(NextEdges):
    keeps = False


LAYERS = [
    NextEdges, UnreadEdges, GatedGCN, Several, Scalers, Weighted, SoftmaxWithoutSize,
]  # fmt: skip


class Refused(Layer):
    def message(self, x_j: Tensor, e: Tensor) -> Any:
        return x_j * e


class WithoutSize(Refused):
    reason = 'an aggregation without dim_size'

    def aggregate(self, inputs: Any, index: Tensor) -> Any:
        return scatter(inputs, index, 0)


class TwoRounds(Refused):
    reason = 'the message of an edge depends on other edges'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        mean = scatter(inputs, index, 0, dim_size, 'mean')
        return scatter((inputs - mean[index]) ** 2, index, 0, dim_size)


class DropsRows(Refused):
    reason = 'drops out after a reduction'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return torch.dropout(scatter(inputs, index, 0, dim_size), 0.5, self.training) * 0


class InputWritten(Refused):
    reason = 'message writes into its input'

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=edge_attr, h=x * 1)

    def aggregate(self, inputs: Any, index: Tensor, h: Tensor, dim_size: int) -> Any:
        h.add_(0)
        return scatter(inputs, index, 0, dim_size) + h


class SameMemory(Refused):
    reason = 'aggregate returns its input, or one tensor twice'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        out = scatter(inputs, index, 0, dim_size)
        return out, out.view(-1, C)


class NoRowOfNodes(Refused):
    reason = 'has no row for each node'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return scatter(inputs, index, 0, dim_size), self.edge.bias.expand(dim_size, C) * 1


class OfEdges(Refused):
    reason = 'aggregate returns a row for each edge, not for each node'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return inputs


class UsesCounts(Refused):
    reason = 'used as a number'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return scatter(inputs, index, 0, dim_size) * (index.size(0) // dim_size)


class NoRows(Refused):
    reason = 'a reduction over edges'

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return scatter(inputs, index, 0, dim_size).sum(0, keepdim=True)


def graph(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Nodes, edges (the last nodes have none, one has many), and features of edges."""
    edge_index = torch.randint(N - 2, (2, E))
    edge_index[1, : E // 3] = 1
    features = (torch.randn(n, C, dtype=dtype) for n in (N, E))
    x, edge_attr = (each.to(device).requires_grad_() for each in features)
    return x, edge_index.to(device), edge_attr


def assert_same_as_pyg(layer: Any, fast: Any, inputs: tuple[Tensor, ...], **tolerance: Any) -> None:
    results = []
    for each in (layer, fast):
        out = each(*inputs)
        weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
        leaves = [inputs[0], inputs[2], *each.parameters()]
        grads = torch.autograd.grad(out, leaves, weight.view_as(out), materialize_grads=True)
        results.append([out, *grads])
    torch.testing.assert_close(results[1], results[0], **tolerance)


@pytest.mark.parametrize('cls', [*LAYERS, NormalizedRows])
def test_like_pyg(cls: type[Layer], device: torch.device) -> None:
    layer = cls().to(device, torch.float64)
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    inputs = graph(device)
    assert_same_as_pyg(layer, fast, inputs)
    assert why_pygs(fast) == ''


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    layer = Several().to(device, dtype)
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    inputs = graph(device, dtype)
    out = fast(*inputs)
    assert why_pygs(fast) == ''
    assert out.dtype == dtype
    exact = copy.deepcopy(layer).double()(inputs[0].double(), inputs[1], inputs[2].double())
    small = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}[dtype]
    torch.testing.assert_close(out.double(), exact, rtol=small, atol=small)


REFUSED = [
    WithoutSize, TwoRounds, DropsRows, InputWritten, SameMemory, NoRowOfNodes, UsesCounts, NoRows,
]  # fmt: skip


@pytest.mark.parametrize('cls', REFUSED)
def test_refused(cls: Any, device: torch.device) -> None:
    layer = cls().to(device, torch.float64).train()
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    inputs = graph(device)
    inputs[1][1, -1] = N - 1  # As `scatter` without a size expects.
    assert_same_as_pyg(layer, fast, inputs)
    assert cls.reason in why_pygs(fast)


def test_other_graphs_and_ends(device: torch.device) -> None:
    """Bipartite, prepared, by the other flow, and again with other sizes."""
    layer = GatedGCN().to(device, torch.float64)
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    for flow in ('source_to_target', 'target_to_source'):
        layer.flow = fast.flow = flow
        for _ in range(2):
            inputs = graph(device)
            assert_same_as_pyg(layer, fast, inputs)
            assert why_pygs(fast) == ''
    data = pyg_fast.transforms.ToCSR()(
        Data(edge_index=inputs[1], edge_attr=inputs[2].detach(), num_nodes=N)
    )
    layer.flow = fast.flow = 'source_to_target'
    out = fast(inputs[0], data.edge_index, data.edge_attr)
    torch.testing.assert_close(out, layer(*inputs))
    assert why_pygs(fast) == ''


@pytest.mark.parametrize('cls', LAYERS)
def test_compiled(cls: type[Layer], device: torch.device) -> None:
    calls = [[*graph_data(*sizes, device, channels=C)] for sizes in ((20, 50), (33, 71))]
    assert_like_pyg(cls().to(torch.float64), calls, kernels=1, frames=1)


class InfiniteAtZero(Layer):
    """The derivative of the root is not finite where no edge ends."""

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return scatter(inputs[0], index, 0, dim_size).abs().sqrt()


def test_finite_where_no_edge_ends(device: torch.device) -> None:
    layer = InfiniteAtZero().to(device, torch.float64)
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    inputs = graph(device)
    assert_same_as_pyg(layer, fast, inputs)
    assert why_pygs(fast) == ''
    assert_like_pyg(layer, [[*graph_data(20, 15, device, channels=C)]], kernels=1)


class OneDetached(Layer):
    """Of its results, and of a value that it keeps, some have no gradient."""

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
        return *self.propagate(edge_index, x=x, v=x, e=edge_attr), self.edges

    def message(self, x_i: Tensor, x_j: Tensor, v_j: Tensor, e: Tensor) -> Any:
        self.edges = x_i * e
        return x_j * 2, x_i.detach() * x_j.detach()

    def aggregate(self, inputs: Any, index: Tensor, dim_size: int) -> Any:
        return tuple([scatter(part, index, 0, dim_size) for part in inputs])


class AllDetached(OneDetached):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Any:
        return self.propagate(edge_index, x=x, v=x, e=edge_attr), self.edges

    def message(self, x_i: Tensor, x_j: Tensor, v_j: Tensor, e: Tensor) -> Any:
        return super().message(x_i, x_j, v_j, e)[1]

    aggregate = MessagePassing.aggregate  # type: ignore[assignment]


@pytest.mark.parametrize('cls', [OneDetached, AllDetached])
def test_results_without_gradients(cls: type[Layer], device: torch.device) -> None:
    layer = cls().to(device, torch.float64)
    fast, inputs = pyg_fast.accelerate(copy.deepcopy(layer)), graph(device)
    backend = Backend()
    compiled = torch.compile(fast, backend=backend, fullgraph=True)
    expected = [x.requires_grad for x in layer(*inputs)]
    assert False in expected
    for each in (fast, compiled):
        assert [x.requires_grad for x in each(*inputs)] == expected
    assert why_pygs(fast) == ''
    # In compiled code the value that is kept is no result of the kernel.
    assert backend.kernels == (cls is OneDetached)


class Moves(MessagePassing):
    """Distances and directions, of which self-loops have an infinite derivative."""

    def __init__(self, mapped: bool, reduce: str) -> None:
        super().__init__(node_dim=0)
        self.lin = torch.nn.Linear(1, 8) if mapped else torch.nn.Identity()
        self.reduce = reduce

    def forward(self, pos: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return self.propagate(edge_index, pos=pos)

    def message(self, pos_i: Tensor, pos_j: Tensor) -> tuple[Tensor, Tensor]:
        away = pos_i - pos_j
        square = away.square().sum(-1, keepdim=True)
        return self.lin(square), away / (square.sqrt() + 1)

    def aggregate(self, inputs: Any, index: Tensor, dim_size: Any) -> tuple[Tensor, Tensor]:
        first, second = (scatter(each, index, 0, dim_size, self.reduce) for each in inputs)
        return first, second


@pytest.mark.parametrize('reduce', ['sum', 'max'])
@pytest.mark.parametrize('mapped', [False, True])
def test_unread_results_give_nothing(mapped: bool, reduce: str, device: torch.device) -> None:
    """Not zero times infinity."""
    theirs = Moves(mapped, reduce).double().to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    pos = torch.randn(9, 3, dtype=torch.float64, device=device, requires_grad=True)
    edges = torch.randint(9, (2, 40), device=device)
    edges[1, :5] = edges[0, :5]
    for create_graph in (False, True):
        grads = [
            torch.autograd.grad(conv(pos, edges)[0].sin().sum(), pos, create_graph=create_graph)[0]
            for conv in (ours, theirs)
        ]
        assert grads[1].isfinite().all()
        torch.testing.assert_close(*grads)
