"""Maps of heads against float64: shapes, types, layouts, and derivatives."""

import pytest
import torch
from _profile import ops_of
from _raw_ops import ops, reference
from torch import Tensor

from pyg_fast.ops.head_map import head_map

from ._graphs import DTYPES, assert_near, exact
from ._samples import Given, sample

# Rows, heads, features and channels: around the vectors of a thread, the heads of a block of
# threads, and the blocks of a launch.
SIZES = [
    *((0, 2, 3, 4), (1, 1, 1, 1), (5, 3, 0, 2), (5, 3, 2, 0), (7, 8, 16, 8), (33, 2, 5, 7)),
    *((130, 3, 24, 4), (1000, 8, 16, 8), (4097, 1, 16, 8), (70, 4, 16, 64), (9, 70, 8, 12)),
    *((300, 2, 40, 100), (20_000, 2, 8, 4), (3, 300, 4, 4), (2000, 6, 13, 6), (90, 1, 47, 41)),
]  # fmt: skip


@sample('head_map')
def _(given: Given) -> dict[str, object]:
    other = given.optional(given.exact(given.num_nodes, 12))
    return dict(x=given.a, weight=given.exact(3, 12), other=other, heads=3, transposed=False)


@sample('head_map_weight')
def _(given: Given) -> dict[str, object]:
    return dict(x=given.a, grad=given.exact(given.num_nodes, 12), heads=3)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('transposed', [False, True])
def test_map(device: torch.device, dtype: torch.dtype, transposed: bool) -> None:
    for rows, heads, features, channels in SIZES:
        weight = exact(features, heads * channels, dtype=dtype, device=device)
        sizes = (features, channels) if not transposed else (channels, features)
        x, other = (exact(rows, heads * size, dtype=dtype, device=device) for size in sizes)
        for added in (None, other):
            actual = ops.head_map(x, weight, added, heads, transposed)
            assert (actual.shape, actual.dtype) == (other.shape, dtype)
            size = reference.head_map(
                x.abs(), weight.abs(), None if added is None else added.abs(), heads, transposed
            )
            expected = reference.head_map(x, weight, added, heads, transposed)
            assert_near(actual, expected, size, sizes[0] + 1)


@pytest.mark.parametrize('dtype', DTYPES)
def test_gradient_of_the_weight(device: torch.device, dtype: torch.dtype) -> None:
    for rows, heads, features, channels in SIZES:
        x = exact(rows, heads * features, dtype=dtype, device=device)
        grad = exact(rows, heads * channels, dtype=dtype, device=device)
        actual = ops.head_map_weight(x, grad, heads)
        assert (actual.shape, actual.dtype) == ((features, heads * channels), dtype)
        size = reference.head_map_weight(x.abs(), grad.abs(), heads)
        assert_near(actual, reference.head_map_weight(x, grad, heads), size, rows)
        assert torch.equal(actual, ops.head_map_weight(x, grad, heads))


def test_layouts(device: torch.device) -> None:
    x, weight, grad, wide = (
        exact(*size, dtype=torch.float32, device=device)
        for size in ((50, 24), (4, 24), (50, 24), (1 + 50 * 24,))
    )
    for rows in (wide[1:].view(50, 24), wide[:-1].view(24, 50).t(), x[:1].expand(50, 24)):
        for transposed in (False, True):
            maps = weight if transposed else weight.t().contiguous().t()[:, :24]
            features = rows if transposed else rows[:, :12]
            actual = ops.head_map(features, maps, None, 3, transposed)
            expected = reference.head_map(features, maps, None, 3, transposed)
            torch.testing.assert_close(actual.double(), expected)
        actual = ops.head_map_weight(rows[:, 6:18], grad, 6)
        expected = reference.head_map_weight(rows[:, 6:18], grad, 6)
        torch.testing.assert_close(actual.double(), expected)


@pytest.mark.parametrize('transposed', [False, True])
@pytest.mark.parametrize('added', [False, True])
def test_derivatives(device: torch.device, transposed: bool, added: bool) -> None:
    heads, sizes = 3, (4, 2) if transposed else (2, 4)
    leaves = [
        torch.randn(*shape, dtype=torch.double, device=device, requires_grad=True)
        for shape in ((6, heads * sizes[0]), (2, heads * 4), (6, heads * sizes[1]))
    ]  # fmt: skip

    def run(x: Tensor, weight: Tensor, *other: Tensor) -> Tensor:
        return head_map(x, weight, heads, transposed, *other)

    leaves = leaves if added else leaves[:2]
    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, leaves, check_batched_grad=True)


def test_where_torch_runs(device: torch.device) -> None:
    x, weight = (torch.randn(size, 12, device=device) for size in (5, 4))
    expected = reference.head_map(x, weight, None, 3, True).float()

    def mapped() -> None:
        out = torch.func.vmap(lambda row: head_map(row[None], weight, 3, True)[0])(x)
        torch.testing.assert_close(out, expected)

    assert 'pyg_fast::head_map' not in ops_of(mapped)
    assert 'pyg_fast::head_map' in ops_of(lambda: head_map(x, weight, 3, True))
    if device.type == 'cuda':  # A block that shared memory cannot hold.
        large = torch.randn(200, 3 * 100, device=device)
        x = torch.randn(5, 3 * 200, device=device)
        expected = reference.head_map(x, large, None, 3, False).float()
        called = ops_of(
            lambda: torch.testing.assert_close(
                head_map(x, large, 3), expected, rtol=1e-4, atol=1e-3
            )
        )
        assert 'pyg_fast::head_map' not in called


def test_refusals(device: torch.device) -> None:
    x, weight = (torch.randn(size, 12, device=device) for size in (5, 4))
    with pytest.raises(RuntimeError, match='x must have two dimensions'):
        ops.head_map(x[0], weight, None, 3, True)
    with pytest.raises(RuntimeError, match='weight must have columns for 5 heads'):
        ops.head_map(torch.randn(5, 10, device=device), weight, None, 5, True)
    with pytest.raises(RuntimeError, match='weight must map 6 numbers of each head, got 4'):
        ops.head_map(x, weight, None, 2, False)
    with pytest.raises(RuntimeError, match='other'):
        ops.head_map(x, weight, x, 2, True)
    with pytest.raises(RuntimeError, match='grad'):
        ops.head_map_weight(x, x[:3], 3)
