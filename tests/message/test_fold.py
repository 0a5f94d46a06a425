"""Linear maps of edge features that are exchanged with sums."""

from typing import Any

import pytest
import torch
from torch_geometric.nn import GeneralConv, MessagePassing, TransformerConv

import pyg_fast
from pyg_fast.nn import FusedMessagePassing
from tests._report import plan_of, why_pygs

N, E, F = 31, 190, 7


class Weighted(MessagePassing):
    """The mean of gated sums: no softmax, one factor for all heads."""

    def __init__(self, channels: int, edge_dim: int) -> None:
        super().__init__('mean')
        self.lin = torch.nn.Linear(edge_dim, channels, bias=False)
        self.node = torch.nn.Linear(F, channels)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any) -> Any:
        return self.propagate(edge_index, x=self.node(x), edge_attr=edge_attr)

    def message(self, x_j: Any, edge_attr: Any) -> Any:
        return (x_j + self.lin(edge_attr)) * edge_attr[:, :1]


class Relu(Weighted):
    """The map is needed for each edge: nothing is exchanged."""

    def message(self, x_j: Any, edge_attr: Any) -> Any:
        return (x_j + self.lin(edge_attr)).relu()


class Both(Weighted):
    """A score could do without the map, but the message could not."""

    def message(self, x_i: Any, x_j: Any, edge_attr: Any) -> Any:
        mapped = self.lin(edge_attr)
        return (x_i * (x_j + mapped)).sum(-1, keepdim=True) * mapped.tanh()


CUDA = 'cuda'  # where alone narrow heads fold maps of such numbers of features
CASES: dict[str, tuple[Any, int, bool | str]] = {
    'heads': (lambda d: TransformerConv(F, 8, 2, edge_dim=d), 4, True),
    'features as wide as a head': (lambda d: TransformerConv(F, 8, 2, edge_dim=d), 8, True),
    'wider': (lambda d: TransformerConv(F, 8, 3, edge_dim=d), 16, True),
    'not of whole tiles': (lambda d: TransformerConv(F, 7, 2, edge_dim=d), 13, CUDA),
    'mean of heads': (lambda d: TransformerConv(F, 5, 2, edge_dim=d, concat=False), 3, CUDA),
    'one head': (lambda d: TransformerConv(F, 64, 1, edge_dim=d), 16, True),
    'one feature': (lambda d: TransformerConv(F, 8, 2, edge_dim=d), 1, CUDA),
    'narrow heads': (lambda d: TransformerConv(F, 3, 2, edge_dim=d), 4, False),
    'more than two for a channel': (lambda d: TransformerConv(F, 8, 2, edge_dim=d), 17, False),
    'many features': (lambda d: TransformerConv(F, 4, 2, edge_dim=d), 33, False),
    'no softmax': (lambda d: GeneralConv(F, 8, d), 5, CUDA),
    'a factor': (lambda d: Weighted(9, d), 5, True),
    'a function of the map': (lambda d: Relu(8, d), 4, False),
    'one of two uses': (lambda d: Both(8, d), 4, False),
}


def results(conv: Any, edges: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of inputs and parameters."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = conv(leaves[0], edges, *leaves[1:])
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    wanted = [*leaves, *conv.parameters()]
    return [
        out,
        *torch.autograd.grad(
            (out * weight).sum(), wanted, materialize_grads=True, allow_unused=True
        ),
    ]


@pytest.mark.parametrize('name', CASES)
def test_fold(name: str, device: torch.device) -> None:
    make, edge_dim, folds = CASES[name]
    theirs = make(edge_dim).double().to(device)
    ours = pyg_fast.accelerate(theirs)
    edges = torch.randint(N, (2, E), device=device)
    edges[1, :40] = 3
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    attr = torch.randn(E, edge_dim, dtype=torch.float64, device=device)
    for got, expected in zip(
        results(ours, edges, x, attr), results(theirs, edges, x, attr), strict=True
    ):
        torch.testing.assert_close(got, expected)
    assert why_pygs(ours) == ''
    plan = plan_of(ours)
    expected_folds = folds is True or folds == device.type
    assert ('folded' in plan or 'sunk' in plan) is expected_folds


def test_other_derivatives(device: torch.device) -> None:
    """Second ones, and several at once."""
    theirs = TransformerConv(F, 4, 2, edge_dim=4).double().to(device)
    ours = pyg_fast.accelerate(theirs)
    edges = torch.randint(N, (2, E), device=device)
    found = []
    for conv in (ours, theirs):
        torch.manual_seed(0)
        x = torch.randn(N, F, dtype=torch.float64, device=device, requires_grad=True)
        attr = torch.randn(E, 4, dtype=torch.float64, device=device, requires_grad=True)
        out = conv(x, edges, attr)
        grads = torch.autograd.grad(out.sin().sum(), (x, attr), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), (x, attr))
        out = conv(x, edges, attr)
        weights = torch.randn(2, *out.shape, dtype=torch.float64, device=device)
        several = torch.autograd.grad(out, (x, attr), weights, is_grads_batched=True)
        found.append([*grads, *second, *several])
    assert why_pygs(ours) == ''
    assert 'folded' in plan_of(ours)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype, device: torch.device) -> None:
    """Not less exact than PyG's layer in the same dtype."""
    theirs = TransformerConv(F, 8, 2, edge_dim=5).to(device)
    edges = torch.randint(N, (2, E), device=device)
    x, attr = torch.randn(N, F, device=device), torch.randn(E, 5, device=device)
    with torch.no_grad():
        exact = theirs.double()(x.to(dtype).double(), edges, attr.to(dtype).double())
        theirs = theirs.to(dtype)
        ours = pyg_fast.accelerate(theirs)
        inputs = x.to(dtype), edges, attr.to(dtype)
        got, pyg = ((conv(*inputs) - exact).abs().max() for conv in (ours, theirs))
    assert why_pygs(ours) == ''
    assert got <= 1.5 * pyg + 1e-6


def test_dropout_of_the_folded_sum(device: torch.device) -> None:
    """Both sums drop the same edges."""

    class Ones(FusedMessagePassing):
        def __init__(self) -> None:
            super().__init__('sum', strict=True)
            self.lin = torch.nn.Linear(4, 8, bias=False)
            torch.nn.init.constant_(self.lin.weight, -0.25)

        def forward(self, x: Any, edge_index: Any, edge_attr: Any) -> Any:
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_j: Any, edge_attr: Any) -> Any:
            kept = torch.nn.functional.dropout(x_j[:, :1] * 0 + 1, 0.5)
            return (x_j + self.lin(edge_attr)) * kept

    conv = Ones().to(device)
    edges = torch.randint(N, (2, E), device=device)
    out = conv(torch.ones(N, 8, device=device), edges, torch.ones(E, 4, device=device))
    assert 'sunk' in plan_of(conv)
    torch.testing.assert_close(out, torch.zeros_like(out), atol=1e-4, rtol=0)


def test_maps_of_one_edge_are_joined(device: torch.device) -> None:
    """A sum of maps of the same features is a map by the sum of their weights, whose gradients do
    not share their memory."""

    class Maps(MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (torch.nn.Linear(3, F) for _ in range(3))

        def forward(self, x: Any, edge_index: Any, e: Any) -> Any:
            return self.propagate(edge_index, x=x, e=e)

        def message(self, x_i: Any, x_j: Any, e: Any) -> Any:
            return torch.sigmoid(x_i - self.a(e) + (self.b(e) - x_j)) * (x_j - self.c(e))

    theirs = Maps().to(device).double()
    ours = pyg_fast.accelerate(Maps().to(device).double())
    ours.load_state_dict(theirs.state_dict())
    edges = torch.randint(N, (2, E), device=device)
    x, e = (torch.randn(n, k, device=device).double() for n, k in ((N, F), (E, 3)))
    for conv in (theirs, ours):
        conv(x, edges, e).sin().sum().backward()
    assert plan_of(ours).count('param [') == 4  # two maps with their biases
    pairs = zip(theirs.parameters(), ours.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one.grad, other.grad)
    starts = {p.grad.untyped_storage().data_ptr() for p in ours.parameters() if p.grad is not None}
    assert len(starts) == 6


MAPS: dict[str, Any] = {
    'a map of a map': lambda c, i, j, w: c.two(c.one(i * j)),
    'of weighted ones': lambda c, i, j, w: c.two(c.one(i * j) * w) * w,
    'a sum': lambda c, i, j, w: c.both(i * j) + c.two(c.one(torch.relu(i + j))),
    'a difference, divided': lambda c, i, j, w: (c.both(i * j) - c.two(c.one(i + j))) / w,
    'scaled': lambda c, i, j, w: c.two(c.one(i * j) * c.number / 3) + c.bias,
    'of the same': lambda c, i, j, w: c.both(-(i * j)) - c.two(c.one(i * j)),
    'beside a value': lambda c, i, j, w: (c.both(i * j) + j.relu()) * w,
    'of a value beside': lambda c, i, j, w: c.two(c.one(i * j) + c.one(j)) + j,
    'of joined values': lambda c, i, j, w: c.two(c.one(torch.cat([i[:, :2] * w, j[:, 2:]], -1))),
}


class Mapped(MessagePassing):
    """Maps of values of the edge, which a sum of the edges does not need."""

    def __init__(self, name: str, aggr: str) -> None:
        super().__init__(aggr)
        self.one, self.two, self.both = (
            torch.nn.Linear(*size) for size in ((F, 5), (5, F), (F, F))
        )
        self.number, self.bias = (torch.nn.Parameter(torch.randn(n)) for n in (1, F))
        self.name = name

    def forward(self, x: Any, edge_index: Any, weight: Any) -> Any:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i: Any, x_j: Any, weight: Any) -> Any:
        return MAPS[self.name](self, x_i, x_j, weight.view(-1, 1))


# The mean divides the sum of any of them; a bias counts the edges.
@pytest.mark.parametrize(
    ('name', 'aggr'),
    [*((name, 'sum') for name in MAPS), ('of weighted ones', 'mean'), ('a sum', 'mean'),
     ('scaled', 'mean'), ('beside a value', 'mean')],
)  # fmt: skip
def test_maps_after_the_sum(name: str, aggr: str, device: torch.device) -> None:
    theirs = Mapped(name, aggr).double().to(device)
    ours = pyg_fast.accelerate(theirs)
    edges = torch.randint(N - 2, (2, E), device=device)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    weight = torch.rand(E, dtype=torch.float64, device=device) + 0.1
    found = (results(conv, edges, x, weight) for conv in (ours, theirs))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected)
    assert why_pygs(ours) == ''
    assert 'sunk' in plan_of(ours)
    assert 'tiles' not in plan_of(ours)
