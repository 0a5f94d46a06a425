"""Activations of values that torch computes before a kernel."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import pyg_fast
from pyg_fast.message._passes import Passes

ACTIVATIONS = [
    F.silu, F.softplus, F.mish, F.gelu, partial(F.gelu, approximate='tanh'), F.elu, F.leaky_relu,
]  # fmt: skip


class OfNodes(MessagePassing):
    """An activation between maps of one end, which run once for each node."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__(aggr='sum')
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.activation = activation

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i * self.second(self.activation(self.first(x_j)))


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_torch_computes_them_at_once(
    activation: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Passes] = []
    init = Passes.__init__

    def remember(self: Passes, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(Passes, '__init__', remember)
    torch.manual_seed(0)
    layer = OfNodes(activation).double()
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    x = (30 * torch.randn(6, 4, dtype=torch.double)).requires_grad_()
    edge_index = torch.randint(6, (2, 20))
    outs = []
    for each in (ours, layer):
        out = each(x, edge_index)
        outs.append([out, *torch.autograd.grad(out.square().sum(), [x, *each.parameters()])])
    torch.testing.assert_close(*outs)
    called = {str(call.function) for call in made[-1].prologue.calls}
    assert str(activation) in called
    assert not any('where' in name or 'sigmoid' in name for name in called)
