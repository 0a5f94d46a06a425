"""Linear maps of nodes before a kernel, beside PyG in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing

import pyg_fast
from tests._report import plan_of

N, E = 12, 40
Message: TypeAlias = Callable[..., Tensor]


class Layer(MessagePassing):
    """A layer whose message is a function of itself and of its inputs."""

    def __init__(self, message: Message, aggr: Any = 'add', **modules: nn.Module):
        super().__init__(aggr=aggr)
        self.of_edge = message
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: object, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.of_edge(self, x_i, x_j, e)


def _both(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return F.silu(self.second(F.silu(self.first(torch.cat([x_i, x_j], -1)))))


def _one(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(self.first(torch.cat([x_i, x_j], -1)))


def _difference(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return F.silu(self.second(F.silu(self.first(torch.cat([x_i, x_j - x_i], -1)))))


def _mesh(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return self.second(F.silu(self.third(torch.cat([x_i, x_j, e], -1))))


def _gated(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(self.k(x_i) + self.q(x_j)) * self.v(x_j)


def _tied(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(self.k(x_i) - self.k(x_j)) * self.k(x_j)


def _matrix(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    weight = self.matrix.weight
    mapped = torch.cat([x_i, x_j], -1) @ weight - x_j @ weight[: x_j.size(-1)]
    return torch.sigmoid(mapped)


def _negative(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(-self.k(x_i) - self.q(x_j)) * e[:, :1]


def _read(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sqrt(self.k(x_i).square()) * torch.log(self.q(x_j).abs()) * e[:, :1]


def _part(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    inner = x_i.size(-1)
    weight = self.third.weight
    return torch.tanh(x_i @ weight[:, :inner].t() + x_j @ weight[:, inner : 2 * inner].t())


def _overlapping(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    inner = x_i.size(-1)
    weight = self.third.weight
    return torch.tanh(x_i @ weight[:, :inner].t() + x_j @ weight[:, 1 : inner + 1].t())


MESSAGES = (
    _both, _one, _difference, _mesh, _gated, _tied, _matrix, _negative, _read, _part, _overlapping,
)  # fmt: skip


def make_layer(
    message: Message, inner: int = 3, out: int = 4, bias: bool = True,
    aggr: Any = 'add', edge: int = 2,
) -> Layer:  # fmt: skip
    torch.manual_seed(1)
    k, q, v = (nn.Linear(inner, out, bias) for _ in range(3))
    return Layer(
        message, aggr, first=nn.Linear(2 * inner, out, bias), second=nn.Linear(out, 2, bias),
        third=nn.Linear(2 * inner + edge, out, bias), k=k, q=q, v=v,
        matrix=nn.Linear(out, 2 * inner, False),
    ).double()  # fmt: skip


def edges(num_src: int = N, num_dst: int = N) -> Tensor:
    """Edges that leave out some nodes at each end, others than at the other end."""
    draw = torch.Generator().manual_seed(2)
    src = torch.randint(2, num_src, (E,), generator=draw)
    return torch.stack([src, torch.randint(num_dst - 3, (E,), generator=draw)])


def inputs(inner: int = 3, edge: int = 2) -> tuple[Any, Tensor, Tensor]:
    x, e = torch.randn(N, inner).double(), torch.randn(E, edge).double()
    return x.requires_grad_(), edges(), e.requires_grad_()


def leaves_of(layer: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    tensors = [t for x in args for t in (x if isinstance(x, tuple) else (x,))]
    return [t for t in (*tensors, *layer.parameters()) if t.requires_grad]


def gradients(layer: nn.Module, args: Sequence[Any], weight: Tensor | None = None) -> list[Tensor]:
    """The result, and the gradients of all that requires one."""
    out = layer(*args)
    if weight is None:
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    found = torch.autograd.grad(
        out, leaves_of(layer, args), weight, allow_unused=True, materialize_grads=True
    )
    return [out, *found]


def check(layer: Layer, args: Sequence[Any], weight: Tensor | None = None) -> None:
    """Ours gives what PyG's code gives."""
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    found, expected = gradients(ours, args, weight), gradients(layer, args, weight)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert 'PyG' not in plan_of(ours)


@pytest.mark.parametrize('message', MESSAGES)
def test_gradients(message: Message) -> None:
    check(make_layer(message), inputs())


@pytest.mark.parametrize('message', [_both, _difference, _gated, _read])
def test_nodes_that_no_edge_reads(message: Message) -> None:
    """Rows that are not finite reach no gradient, nor do gradients of results without edges."""
    layer, (x, index, e) = make_layer(message), inputs()
    src, dst = x.detach().clone(), x.detach().clone()
    src[:2], dst[-3:] = torch.nan, torch.inf
    args = (src.requires_grad_(), dst.requires_grad_()), index, e
    weight = torch.randn(layer(*args).shape).double()
    weight[-3:] = torch.nan
    assert gradients(layer, args, weight)[1].isfinite().all()
    check(layer, args, weight)
    both = x.detach().clone()  # Of one tensor no row is unread at both ends.
    both[-1] = torch.nan
    index = index.clone()
    index[0, index[0] == N - 1] = 3
    check(layer, (both.requires_grad_(), index, e), weight)
