"""`torch.einsum` of values of the edges and a parameter runs in a kernel, with PyG's results."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import pyg_fast
from tests._report import why_pygs

SIZES = {'h': 3, 'd': 4, 'f': 5, 'g': 2}


class Einsum(MessagePassing):
    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation
        self.names = equation.split('->')[0].split(',')
        (own,) = (names for names in self.names if 'e' not in names)
        self.weight = nn.Parameter(torch.randn([SIZES[n] for n in own]))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        (own,) = (names for names in self.names if 'e' in names)
        first, *others = [-1 if n == 'e' else SIZES[n] for n in sorted(own, key='ehdfg'.index)]
        value = torch.tanh(x_i - x_j).view(first, *others)
        order = sorted(own, key='ehdfg'.index)
        value = value.permute([order.index(n) for n in own])
        operands = [value if 'e' in names else self.weight for names in self.names]
        return torch.einsum(self.equation, *operands).sin().flatten(1)


@pytest.mark.parametrize('equation', [
    'ed,df->ef', 'df,ed->ef', 'ed,fd->ef', 'ehd,hdf->ehf', 'hdf,ehd->ehf', 'ehd,hdf->efh',
    'ehd,df->ehf', 'ehd,hg->eg', 'ehd,hg->edg', 'ed,hdf->ehf', 'ehd,hd->eh', 'ehd,d->eh',
    'ehd,hd->ehd', 'eh,d->ehd', 'ehd,hdf->ef', 'ehd,hdg->ehg', 'hed,hdf->ehf', 'ehd,f->ef',
])  # fmt: skip
def test_like_pyg(equation: str, device: torch.device) -> None:
    torch.manual_seed(0)
    conv = Einsum(equation).double().to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    own = next(names for names in conv.names if 'e' in names)
    columns = torch.Size([SIZES[n] for n in own if n != 'e']).numel()
    x = torch.randn(30, columns, dtype=torch.float64, device=device, requires_grad=True)
    edge_index = torch.randint(27, (2, 150), device=device)
    found = []
    for layer in (conv, ours):
        out = layer(x, edge_index)
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
        found.append([out, *grads])
    torch.testing.assert_close(found[1], found[0])
    # Tiles of a GPU have no products of float64.
    has_products = device.type == 'cuda' and 'linear map' in why_pygs(ours)
    assert has_products or why_pygs(ours) == ''


@pytest.mark.parametrize('equation', ['ehd,hdf->ehf', 'ehd,hd->eh'])
def test_dtype_of_autocast(equation: str, device: torch.device) -> None:
    conv = Einsum(equation).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    x, edge_index = torch.randn(30, 12, device=device), torch.randint(30, (2, 150), device=device)
    with torch.autocast(device.type, torch.bfloat16):
        theirs, out = conv(x, edge_index), ours(x, edge_index)
    assert out.dtype == theirs.dtype
    torch.testing.assert_close(out.float(), theirs.float(), rtol=0.05, atol=0.1)
