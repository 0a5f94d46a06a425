"""Gradients of embeddings of few rows, compiled."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from pyg_fast import _small_tables
from pyg_fast._compile import backend

MOST = _small_tables._MOST_ROWS


@pytest.fixture(autouse=True)
def on_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, Inductor's own way is kept."""
    monkeypatch.setattr(_small_tables, '_DEVICES', frozenset({'cpu', 'cuda'}))
    monkeypatch.setattr(torch.compiler.config, 'cache_key_tag', 'on all devices')
    torch._dynamo.reset()


def drawn(device: torch.device, num_weights: int, *shape: int) -> tuple[Tensor, Tensor]:
    """The gradient of an output, and the rows looked up."""
    indices = torch.randint(num_weights, shape, device=device)
    return torch.randn(*shape, 5, device=device), indices


def expected(grad: Tensor, indices: Tensor, *options: Any) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad.double(), indices, *options)


def gradient(grad: Tensor, indices: Tensor, *options: Any) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, indices, *options)


def has_atomics(codes: list[str]) -> bool:
    """Whether code of Inductor adds by atomics; Triton's always notes whether it found some."""
    return re.search('atomic_add(?!_found)', ''.join(codes)) is not None


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


def test_compiled(device: torch.device) -> None:
    """Several tables of one gradient, with symbols for sizes."""
    sizes = (2, 5, 6, MOST, MOST + 1)

    def several(grad: Tensor, indices: Tensor) -> list[Tensor]:
        return [gradient(grad, indices % k, k, 1 if k == 5 else -1, False) for k in sizes]

    compiled = torch.compile(several, backend=backend, dynamic=True)
    for count in (1000, 300):  # one program
        grad, indices = drawn(device, 100, count)
        for k, found in zip(sizes, compiled(grad, indices), strict=True):
            close(found, expected(grad, indices % k, k, 1 if k == 5 else -1, False))


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
    device: torch.device, num_weights: int, by_frequency: bool, is_ours: bool
) -> None:
    """Inductor's own way writes by atomics."""
    grad, indices = drawn(device, num_weights, 200)
    options = num_weights, -1, by_frequency
    compiled = torch.compile(gradient, backend=backend)
    found, codes = run_and_get_code(compiled, grad, indices, *options)
    close(found, expected(grad, indices, *options))
    assert has_atomics(codes) != is_ours


def test_an_embedding(device: torch.device) -> None:
    """What AOTAutograd makes of a layer, with indices of two dimensions and a row of padding."""
    layer = torch.nn.Embedding(6, 5, padding_idx=2, device=device)
    weight = torch.randn(40, 3, 5, device=device)
    indices = torch.randint(6, (40, 3), device=device)
    compiled = torch.compile(layer, backend=backend)

    def step() -> None:
        (compiled(indices) * weight).sum().backward()

    _, codes = run_and_get_code(step)
    assert layer.weight.grad is not None
    close(layer.weight.grad, expected(weight, indices, 6, 2, False))
    assert not has_atomics(codes)


def test_a_cpu_keeps_inductors_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    grad, indices = drawn(torch.device('cpu'), 3, 200)
    compiled = torch.compile(gradient, backend=backend)
    _, codes = run_and_get_code(compiled, grad, indices, 3, -1, False)
    assert has_atomics(codes)


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

    with torch._functorch.config.patch(enable_autograd_cache=True):
        assert [hits(backend), hits(backend), hits('inductor')] == [0, 1, 0]
