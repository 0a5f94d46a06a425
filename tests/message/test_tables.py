"""Rows of a table by an integer of the edge: on a GPU read inside of the kernel."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import pyg_fast
from tests._compiled import assert_like_pyg
from tests._report import plan_of, why_pygs

from ._by_numpy import by_numpy
from .test_pieces import together

N, E, C, TYPES = 9, 60, 6, 5


class Typed(MessagePassing):
    """A message of the features of the source and the type of the edge."""

    def __init__(self, kind: str, types: int = TYPES) -> None:
        super().__init__('mean' if kind == 'index' else 'sum')
        self.kind = kind
        self.table = nn.Parameter(torch.randn(types, C))
        self.gates = nn.Parameter(torch.randn(types))
        self.bases = nn.Parameter(torch.randn(types, 2))
        self.embedding = nn.Embedding(types, C, padding_idx=1 if kind == 'padding' else None)
        self.lin = nn.Linear(C, C)

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_type=edge_type)

    def message(self, x_i: Tensor, x_j: Tensor, edge_type: Tensor) -> Tensor:
        if self.kind == 'index':
            return torch.relu(x_j + self.table[edge_type])
        if self.kind == 'scalar':
            return self.gates[edge_type].view(-1, 1) * x_j
        if self.kind == 'bases':
            both = torch.stack([x_i, x_j], 1)
            return (self.bases[edge_type].unsqueeze(-1) * both).sum(1).sigmoid()
        if self.kind == 'several':
            both = self.embedding(torch.stack([edge_type, edge_type], 1))
            return (both * x_j.unsqueeze(1)).sum(1)
        if self.kind == 'mapped':
            return torch.tanh(self.lin(x_j + self.embedding(edge_type)) + x_i)
        if self.kind == 'weighted map':
            return self.lin(x_j * self.embedding(edge_type)) * self.gates[edge_type].view(-1, 1)
        return self.embedding(edge_type) * x_j + self.embedding.weight[edge_type] - x_i


KINDS = ['index', 'scalar', 'bases', 'several', 'mapped', 'weighted map', 'embedding', 'padding']


def inputs(device: torch.device, types: int = TYPES, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(N - 1, (2, E), generator=generator)
    edges[1, : E // 2] = 2
    x = torch.randn(N, C, dtype=torch.float64, generator=generator)
    which = torch.randint(types, (E,), generator=generator)
    return [x.to(device), edges.to(device), which.to(device)]


def training(conv: Any, x: Tensor, edges: Tensor, which: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = conv(leaf, edges, which)
    weight = torch.linspace(-1, 1, out.numel(), device=x.device).view(out.shape).to(out)
    leaves = [leaf, *conv.parameters()]
    return [out, *torch.autograd.grad(out, leaves, weight, materialize_grads=True)]


@pytest.mark.parametrize('types', [TYPES, 40])
@pytest.mark.parametrize('kind', KINDS)
def test_like_pyg(kind: str, types: int, device: torch.device) -> None:
    conv = Typed(kind, types).double().to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    given = inputs(device, types)
    torch.testing.assert_close(training(fast, *given), training(conv, *given))
    assert why_pygs(fast) == ''


@pytest.mark.parametrize('types', [TYPES, 40])
@pytest.mark.parametrize('kind', KINDS)
def test_kernels_by_numpy(kind: str, types: int) -> None:
    """The kernels of a GPU."""
    conv = Typed(kind, types).double()
    fast = pyg_fast.accelerate(copy.deepcopy(conv).float())
    x, edges, which = inputs(torch.device('cpu'), types)
    wanted = training(conv, x, edges, which)
    with by_numpy(partial(together, least=7)):
        found = training(fast, x.float(), edges, which)
    assert 'lookup' in plan_of(fast)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def test_no_row_of_the_table(device: torch.device) -> None:
    """As PyG: an error on a CPU; a negative number counts from the end where PyTorch lets it."""
    if device.type == 'cuda':
        pytest.skip('the kernel stops, and with it the process')
    x, edges, which = inputs(device)
    for kind, error in (('embedding', IndexError), ('index', IndexError)):
        conv = Typed(kind).double()
        fast = pyg_fast.accelerate(copy.deepcopy(conv))
        for each in (conv, fast):
            with pytest.raises(error):
                each(x, edges, which + 3)
    which[0] = -2
    conv = Typed('index').double()
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    torch.testing.assert_close(training(fast, x, edges, which), training(conv, x, edges, which))
    assert why_pygs(fast) == ''


@pytest.mark.parametrize('kind', ['index', 'bases', 'padding'])
def test_compiled(kind: str, device: torch.device) -> None:
    calls = [inputs(device, seed=seed) for seed in (0, 1)]
    assert assert_like_pyg(Typed(kind).double(), calls).kernels > 0


class Bonds(MessagePassing):
    """As GIN on molecules: the sum of embeddings of bonds is an input of the edges."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__('sum')
        self.embeddings = nn.ModuleList([nn.Embedding(n, C) for n in (3, TYPES)])
        self.shared = shared

    def forward(self, x: Tensor, edge_index: Tensor, bond: Tensor) -> Tensor:
        edge = 0
        for k, embedding in enumerate(self.embeddings):
            edge += embedding(bond[:, k])
        out = self.propagate(edge_index, x=x, edge=edge)
        return self.propagate(edge_index, x=out, edge=edge) if self.shared else out

    def message(self, x_j: Tensor, edge: Tensor) -> Tensor:
        return torch.relu(x_j + edge)


@pytest.mark.parametrize('shared', [False, True])
def test_embeddings_of_an_input(
    shared: bool, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled code looks them up inside of the message, if nothing else reads their sum."""
    calls = []
    for seed in (0, 1):
        x, edges, which = inputs(device, 3, seed)
        calls.append([x.requires_grad_(), edges, torch.stack([which, which + 1], 1)])
    with caplog.at_level('INFO', 'pyg_fast'):
        backend = assert_like_pyg(Bonds(shared).double(), calls)
    assert backend.kernels == (2 if shared else 1) * backend.frames
    kernels = [text for text in caplog.messages if 'as a kernel' in text]
    # The source and an input of edges; on a GPU the tables and integers, too.
    assert all('2 inputs' in text for text in kernels) == (shared or device.type == 'cpu')
