"""Long training needs no more memory than short training, and caches die with their graph."""

import gc
import mmap
import weakref
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import softmax

from pyg_fast import ops
from pyg_fast.graph import prepare_edge_index
from pyg_fast.loader import FastNeighborLoader
from tests.ops._graphs import hubs

from ._layers import LAYERS, graph, prepared, run, train

pytestmark = pytest.mark.usefixtures('no_old_objects')
FIRST, LAST = 100, 1000  # steps
# One of each kind of kernel.
FAMILIES = [
    'FusedGATConv', 'MaxKGCNConv', 'PathPreparedGCNConv', 'PathPreparedGNN', 'SampledGCNConv'
]  # fmt: skip
NODES, EDGES = 400, 2500
MEGABYTE = 2**20


class Usage(NamedTuple):
    """What is held: of tensors, and in bytes."""

    tensors: int
    cuda: int
    resident: int


def usage(device: torch.device) -> Usage:
    gc.collect()
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    if device.type == 'cuda':
        torch.cuda.synchronize()
        return Usage(tensors, torch.cuda.memory_allocated(), 0)
    with open('/proc/self/statm') as file:
        pages = int(file.read().split()[1])
    return Usage(tensors, 0, pages * 4096)


def assert_no_growth(before: Usage, after: Usage, cuda: int = 0) -> None:
    """Raises if more is held after than before; of CUDA's memory so many bytes may be more."""
    assert after.tensors <= before.tensors
    assert after.cuda - before.cuda <= cuda
    # A leak of one row of features a node and step would be twice that.
    assert after.resident - before.resident <= 8 * MEGABYTE


def watched(device: torch.device, steps: tuple[int, int]) -> tuple[list[Usage], Callable]:
    """Usages, and a function that notes them after two of the steps."""
    found: list[Usage] = []

    def watch(step: int) -> None:
        if step + 1 in steps:
            found.append(usage(device))

    return found, watch


def test_a_leak_is_found(device: torch.device) -> None:
    held, before = [], usage(device)
    for _ in range(LAST - FIRST):
        held.append(torch.ones(NODES, 12, device=device))
    # The heap may have had room for the tensors, and the system may take back pages of files.
    with mmap.mmap(-1, 1 << 28) as pages:
        pages.write(bytes(1 << 28))
        after = usage(device)
    for single in ('tensors', 'cuda' if device.type == 'cuda' else 'resident'):
        with pytest.raises(AssertionError):
            assert_no_growth(before, before._replace(**{single: getattr(after, single)}))
    del held


@pytest.mark.parametrize('name', FAMILIES)
def test_training(device: torch.device, name: str) -> None:
    data = prepared(graph(device, NODES, EDGES))
    found, watch = watched(device, (FIRST, LAST))
    train(name, data, LAST, watch)
    assert_no_growth(*found)


@pytest.mark.parametrize('plain', [False, True])
def test_new_graph_at_each_step(device: torch.device, plain: bool) -> None:
    first, last = 20, 80
    layers = [LAYERS[name]().to(device) for name in FAMILIES]
    found, watch = watched(device, (first, last))
    for step in range(last):
        data = graph(device, NODES, EDGES)
        if not plain:
            data = prepared(data)
        x = data.x.requires_grad_()
        for layer in layers:
            run(layer, x, data)[data.train_mask].sum().backward()
        del data, x
        watch(step)
    assert_no_growth(*found, cuda=MEGABYTE)  # Paths are of different sizes.


def test_loader(device: torch.device) -> None:
    data = graph(torch.device('cpu'), NODES, EDGES)
    loader = FastNeighborLoader(data, [4, 3], batch_size=50, device=device, shuffle=True)
    layer = LAYERS['PathPreparedGCNConv']().to(device)
    first, last = FIRST // len(loader), LAST // len(loader)
    found, watch = watched(device, (first, last))
    for epoch in range(last):
        for batch in loader:
            layer(batch.x, batch.edge_index)[: batch.batch_size].sum().backward()
            layer.zero_grad()
        del batch
        watch(epoch)
    assert_no_growth(*found, cuda=MEGABYTE)  # Batches are of different sizes.


@pytest.mark.parametrize('plain', [False, True])
def test_what_is_kept_goes_with_the_graph(device: torch.device, plain: bool) -> None:
    names = [name for name in FAMILIES if not (plain and name == 'PathPreparedGNN')]

    def used(data: Data) -> list[weakref.ref]:
        for name in names:
            train(name, data, 2)
        return [weakref.ref(data.edge_index), weakref.ref(data)]

    def make() -> Data:
        return graph(device, NODES, EDGES) if plain else prepared(graph(device, NODES, EDGES))

    used(make())
    before = usage(device)
    data = make()
    refs = used(data)
    assert all(ref() is not None for ref in refs)
    del data
    after = usage(device)
    assert all(ref() is None for ref in refs)
    assert_no_growth(before, after)


# Partial sums of long rows ------------------------------------------------------------------------
WIDTH, ROWS, MANY = 64, 2048, 2**20  # columns, nodes and edges


def _attention(q: Tensor, k: Tensor, v: Tensor, index: Tensor, size_i: int) -> Tensor:
    return softmax((q * k).sum(-1, keepdim=True), index, num_nodes=size_i) * v


def _heads(x: Tensor) -> Tensor:
    return x.view(-1, 4, WIDTH // 4)


DIVIDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{
        reduce: lambda graph, x, reduce=reduce: ops.spmm(graph, x, reduce=reduce)
        for reduce in ('sum', 'mean', 'max')
    },
    'gat': lambda graph, x: ops.gat(graph, _heads(x), _heads(x).sum(-1), _heads(x).mean(-1)),
    'gatv2': lambda graph, x: ops.gatv2(graph, _heads(x), _heads(x), _heads(x)[0]),
    'message': lambda graph, x: ops.message_passing(
        graph, lambda q, v: torch.sigmoid(q) * v, src={'v': x}, dst={'q': x}, strict=True
    ),
    'softmax': lambda graph, x: ops.message_passing(
        graph, _attention, src={'k': x, 'v': x}, dst={'q': x}, strict=True
    ),
}


@pytest.mark.parametrize('is_prepared', [False, True])
@pytest.mark.parametrize('name', DIVIDED)
def test_partial_sums_are_bounded(cuda: torch.device, name: str, is_prepared: bool) -> None:
    """One row and one column of half the edges: of no tensor of edges and columns."""
    x = torch.randn(ROWS, WIDTH, device=cuda, requires_grad=True)
    grad = torch.randn(ROWS, 4, WIDTH // 4, device=cuda)
    peaks = []
    for share in (0.0, 0.5):
        edges = hubs(ROWS, ROWS, MANY, share, share).edge_index.to(cuda)
        if is_prepared:
            edges = prepare_edge_index(edges, (ROWS, ROWS))[0]

        def step(edges: Tensor = edges) -> None:
            out = DIVIDED[name](edges, x)
            torch.autograd.grad(out, x, grad.view_as(out))

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    pieces = -(-MANY // max(128, MANY // 16384))
    partials = 2 * pieces * WIDTH * 4
    assert peaks[1] - peaks[0] <= partials
    # Inputs and results a few times; of each edge its position and its scores.
    assert peaks[1] <= partials + 24 * ROWS * WIDTH * 4 + MANY * (8 if is_prepared else 48) * 4
    assert peaks[1] < MANY * WIDTH * 4
