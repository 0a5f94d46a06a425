"""The same input gives the same bits, but where a docstring says that something adds atomically."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pyg_fast.nn as nn
from pyg_fast import ops
from tests.ops._graphs import hubs

from ._entries import ENTRIES, on, on_edges
from ._layers import LAYERS, graph, prepared, train

# Ops that add atomically on CUDA, and the entries in which they do.
ATOMIC = {
    'aggregate': ['aggregate auto', 'aggregate scatter'],
    'cbsr_spmm': ['cbsr_spmm'],
    'gcn_norm': ['gcn_norm'],
    'sampled_spmm': ['sampled_spmm max'],
    'spmm': ['spmm max', 'spmm min'],
}
# Layers that do on a graph that was prepared, and on one that was not.
ATOMIC_LAYERS = {'MaxKGCNConv', 'MaxKGINConv', 'MaxKGNN', 'MaxKSAGEConv'}
ATOMIC_IF_PLAIN = {'FusedGCNConv', 'PathPreparedGCNConv', 'PathPreparedGNN'}
STEPS = 20


def doc_of(thing: Any) -> str:
    return ' '.join((thing.__doc__ or '').split())


def says_atomic(thing: Any) -> bool:
    return 'atomic' in doc_of(thing)


@pytest.fixture
def large() -> Iterator[None]:
    """Input that threads and blocks share, as they do a row and a column of many edges."""
    with on_edges(hubs(699, 699, 9000, 0.3, 0.3).edge_index, 700, 40):
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def made(name: str, device: torch.device) -> dict[str, Any]:
    """Input whose sums depend on their order."""
    torch.manual_seed(0)
    args = ENTRIES[name].make()
    for key, value in args.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            args[key] = torch.rand_like(value) + 0.1 * value.abs()
    return {key: on(device, value) for key, value in args.items()}


def results(name: str, device: torch.device) -> list[Tensor]:
    """What comes of an op, and gradients of all its input."""
    args = made(name, device)
    inputs = {
        key: value.requires_grad_()
        for key, value in args.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not args.get('quantize')
    }
    out = ENTRIES[name].run(**{**args, **inputs})
    grads: tuple = ()
    if out[-1].requires_grad:
        grad = torch.linspace(-1, 1, out[-1].numel(), device=device).view(out[-1].shape)
        grads = torch.autograd.grad(out[-1], [*inputs.values()], grad, allow_unused=True)
    return [t.detach() for t in (*out, *grads) if t is not None]


def assert_same(first: list[Tensor], *others: list[Tensor]) -> None:
    assert len(first) > 0
    for other in others:
        assert all(map(torch.equal, first, other))


def test_docstrings_of_ops_say_so() -> None:
    assert {name for name in ops.__all__ if says_atomic(getattr(ops, name))} == set(ATOMIC)
    for op, names in ATOMIC.items():
        assert all(ENTRIES[name].op == op for name in names)


def test_docstrings_of_layers_say_so() -> None:
    # The first two are no layers; in the third one all nodes read all others.
    assert set(LAYERS) == set(nn.__all__) - {'AggregatedInput', 'inference', 'FusedGPSConv'}
    said = {name for name in LAYERS if says_atomic(getattr(nn, name))}
    assert said == ATOMIC_LAYERS | ATOMIC_IF_PLAIN


@pytest.mark.usefixtures('large')
@pytest.mark.parametrize('name', ENTRIES)
def test_op(device: torch.device, name: str) -> None:
    if device.type == 'cuda' and name in ATOMIC.get(ENTRIES[name].op, ()):
        pytest.skip('adds atomically')
    assert_same(*(results(name, device) for _ in range(3)))


@pytest.mark.usefixtures('large', 'deterministic')
@pytest.mark.parametrize('name', ENTRIES)
def test_op_if_deterministic(device: torch.device, name: str) -> None:
    assert_same(*(results(name, device) for _ in range(3)))


@pytest.mark.usefixtures('large')
@pytest.mark.parametrize('name', ENTRIES)
def test_number_of_threads(name: str) -> None:
    before = torch.get_num_threads()
    runs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            runs.append(results(name, torch.device('cpu')))
        finally:
            torch.set_num_threads(before)
    assert_same(*runs)


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('plain', [False, True])
def test_layer(device: torch.device, name: str, plain: bool) -> None:
    if device.type == 'cuda' and name in ATOMIC_LAYERS | (ATOMIC_IF_PLAIN if plain else set()):
        pytest.skip('adds atomically')
    assert_same(*(trained(name, device, plain) for _ in range(2)))


@pytest.mark.usefixtures('deterministic')
@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('plain', [False, True])
def test_layer_if_deterministic(device: torch.device, name: str, plain: bool) -> None:
    assert_same(*(trained(name, device, plain) for _ in range(2)))


def trained(name: str, device: torch.device, plain: bool) -> list[Tensor]:
    found = train(name, data_of(device, plain), STEPS, lr=1e-5)  # Sums of hubs are large.
    assert all(t.isfinite().all() for t in found)
    return found


def data_of(device: torch.device, plain: bool) -> Any:
    torch.manual_seed(1)
    data = graph(device)
    data.edge_index = hubs(75, 75, 2000, 0.4, 0.4, aligned=True).edge_index.to(device)
    return data if plain else prepared(data)
