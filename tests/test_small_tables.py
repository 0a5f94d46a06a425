"""Gradients of embeddings of few rows, compiled."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from pyg_fast import _small_tables
from pyg_fast._compile import backend

config: Any = torch.compiler.config
MOST, DEVICES = _small_tables._MOST_ROWS, _small_tables._DEVICES


@pytest.fixture(autouse=True)
def used(record_calls: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of the tables in what a test compiles, on a CPU too, where others would not be."""
    monkeypatch.setattr(_small_tables, '_DEVICES', frozenset({'cpu', 'cuda'}))
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        yield record_calls(_small_tables, 'small_table_gradient', lambda *args: args[3])


def drawn(device: torch.device, num_weights: int, *shape: int) -> tuple[Tensor, Tensor]:
    """The gradient of an output, and the rows looked up."""
    indices = torch.randint(num_weights, shape, device=device)
    return torch.randn(*shape, 5, device=device), indices


def expected(grad: Tensor, indices: Tensor, *options: Any) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad.double(), indices, *options)


def gradient(grad: Tensor, indices: Tensor, *options: Any) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, indices, *options)


def close(found: Tensor, right: Tensor, tolerance: float = 1e-5) -> None:
    assert found.shape == right.shape
    bound = dict(rtol=tolerance, atol=tolerance * float(right.abs().max()))
    torch.testing.assert_close(found.double(), right, **bound)


@pytest.mark.parametrize('shape', [(0,), (1,), (128,), (700,), (2, 300), (0, 3)], ids=str)
@pytest.mark.parametrize('padding', [-1, 3])
def test_the_function(device: torch.device, shape: tuple[int, ...], padding: int) -> None:
    grad, indices = drawn(device, 6, *shape)
    found = _small_tables.small_table_gradient(grad, indices, 6, padding)
    assert found.dtype == grad.dtype
    close(found, expected(grad, indices, 6, padding, False))


class Kinds(torch.nn.Module):
    """The sum of an embedding for each of several columns."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(
            torch.nn.Embedding(k, 5, 1 if k == 5 else None) for k in (2, 5, 6, MOST, MOST + 1)
        )

    def forward(self, columns: Tensor) -> Tensor:
        return torch.stack([table(columns[:, k]) for k, table in enumerate(self.tables)]).sum(0)


def test_several_tables(device: torch.device, used: list[int]) -> None:
    """One gradient, and symbols for sizes."""
    model = Kinds().to(device)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for count in (1000, 300):  # one program
        weight = torch.randn(count, 5, device=device)
        drawn = [torch.randint(t.num_embeddings, (count,), device=device) for t in model.tables]
        columns = torch.stack(drawn, 1)
        model.zero_grad()
        (compiled(columns) * weight).sum().backward()
        for table, rows in zip(model.tables, drawn, strict=True):
            padding = -1 if table.padding_idx is None else table.padding_idx
            close(table.weight.grad, expected(weight, rows, table.num_embeddings, padding, False))
    assert set(used) == {2, 5, 6, MOST}


def test_half_precision(device: torch.device) -> None:
    """Sums are of float32: only the gradient is rounded."""
    grad = torch.rand(3000, 40, device=device).bfloat16()
    indices = torch.randint(3, (3000,), dtype=torch.int32, device=device)
    found = torch.compile(gradient, backend=backend)(grad, indices, 3, -1, False)
    assert torch.equal(found, expected(grad, indices, 3, -1, False).bfloat16())


def test_nan_stays_in_its_row(device: torch.device) -> None:
    grad, indices = drawn(device, 4, 300)
    grad[indices == 2] = float('nan')
    found = torch.compile(gradient, backend=backend)(grad, indices, 4, -1, False)
    assert found[2].isnan().all()
    assert found[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    ('num_weights', 'by_frequency', 'is_ours'),
    [(MOST, False, True), (MOST + 1, False, False), (2, True, False)],
)
def test_where_it_is_used(
    device: torch.device, used: list[int], num_weights: int, by_frequency: bool, is_ours: bool
) -> None:
    grad, indices = drawn(device, num_weights, 200)
    options = num_weights, -1, by_frequency
    compiled = torch.compile(gradient, backend=backend)
    found, codes = run_and_get_code(compiled, grad, indices, *options)
    close(found, expected(grad, indices, *options))
    assert bool(used) == is_ours
    if is_ours or grad.is_cuda:  # On a single thread of a CPU, Inductor's way is a loop.
        atomics = re.search('atomic_add(?!_found)', ''.join(codes))  # Triton's notes say whether.
        assert (atomics is None) == is_ours


def test_an_embedding(device: torch.device, used: list[int]) -> None:
    """What AOTAutograd makes of a layer, with indices of two dimensions and a row of padding."""
    layer = torch.nn.Embedding(6, 5, padding_idx=2, device=device)
    weight = torch.randn(40, 3, 5, device=device)
    indices = torch.randint(6, (40, 3), device=device)
    (torch.compile(layer, backend=backend)(indices) * weight).sum().backward()
    assert layer.weight.grad is not None
    close(layer.weight.grad, expected(weight, indices, 6, 2, False))
    assert set(used) == {6}


def test_a_cpu_keeps_inductors_way(used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_small_tables, '_DEVICES', DEVICES)
    grad, indices = drawn(torch.device('cpu'), 3, 200)
    found = torch.compile(gradient, backend=backend)(grad, indices, 3, -1, False)
    close(found, expected(grad, indices, 3, -1, False))
    assert not used


def test_options_choose_decompositions(device: torch.device) -> None:
    """Those of random numbers among them."""

    def drop(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(1000, device=device)
    options: dict[str, Any] = {'fallback_random': True}
    compiled = torch.compile(drop, backend=backend, options=options)
    torch.manual_seed(0)
    found = compiled(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, drop(x))


def test_caches(device: torch.device) -> None:
    """Programs come from Inductor's caches, where others do not read ours."""
    from torch._dynamo.utils import counters

    grad, indices = drawn(device, 2, 77)

    def hits(which: Any) -> int:
        torch._dynamo.reset()
        counters.clear()
        torch.compile(gradient, backend=which)(grad, indices, 2, -1, False)
        return counters['aot_autograd']['autograd_cache_hit']

    with (
        config.patch(force_disable_caches=False),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        assert [hits(backend), hits(backend), hits('inductor')] == [0, 1, 0]
