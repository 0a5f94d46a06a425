"""Sums over rows against float64: shapes, types, layouts, and where torch's own sum runs."""

import pytest
import torch
from _raw_ops import ops, reference
from torch import Tensor

from pyg_fast.graph import Graph
from pyg_fast.ops.column_sums import column_sums
from pyg_fast.ops.product import product
from pyg_fast.sparse.operator import SparseOperator

from ._graphs import DTYPES, assert_near, exact
from ._samples import Given, sample

# Around the vectors of a block, its rows, and the blocks of a launch.
SIZES = [
    *((0, 5), (1, 1), (3, 0), (7, 3), (33, 4), (300, 1), (5000, 2), (4097, 7), (1000, 16)),
    *((2049, 40), (513, 47), (130, 64), (1025, 100), (40, 257), (70, 1024), (20, 2052), (9, 4100)),
]  # fmt: skip


@sample('column_sums')
def _(given: Given) -> dict[str, object]:
    return dict(x=given.a)


@pytest.mark.parametrize('dtype', DTYPES)
def test_sizes(device: torch.device, dtype: torch.dtype) -> None:
    for rows, columns in SIZES:
        x = exact(rows, columns, dtype=dtype, device=device)
        actual = ops.column_sums(x)
        assert (actual.shape, actual.dtype) == ((columns,), dtype)
        assert_near(actual, reference.column_sums(x), reference.column_sums(x.abs()), rows)


@pytest.mark.parametrize('dtype', DTYPES)
def test_layouts(device: torch.device, dtype: torch.dtype) -> None:
    wide = exact(1 + 600 * 16, dtype=dtype, device=device)
    shifted, matrix = wide[1:].view(600, 16), wide[:-1].view(600, 16)
    for x in (shifted, matrix.t(), matrix[:, 3:], matrix[:1].expand(50, 16)):
        assert_near(
            ops.column_sums(x), reference.column_sums(x), reference.column_sums(x.abs()), x.size(0)
        )


def test_same_bits_every_time(device: torch.device) -> None:
    x = torch.randn(20_000, 5, device=device)
    first, second = (ops.column_sums(x) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize('shape', [(50, 3), (5000, 64), (5000, 4, 16)])
def test_is_the_sum_over_the_first_dimension(device: torch.device, shape: tuple) -> None:
    x = torch.randn(shape, dtype=torch.double, device=device)
    expected = x.sum(0)
    with torch.no_grad():
        several = (column_sums(x), column_sums(x.transpose(0, 1).contiguous().transpose(0, 1)))
        compiled = torch.compile(column_sums, fullgraph=True, backend='aot_eager')(x)
    for actual in (*several, compiled, torch.func.vmap(column_sums)(x[None])[0]):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize('rows', [20, 7000])
def test_gradient_of_a_bias(device: torch.device, rows: int) -> None:
    edges = torch.arange(rows, device=device).repeat(2, 1)
    operator = SparseOperator(Graph.from_edge_index(edges, rows))
    x, weight = (torch.randn(rows, 40, dtype=torch.double, device=device) for _ in range(2))
    bias = torch.zeros(40, dtype=torch.double, device=device, requires_grad=True)

    def grad(factor: Tensor, create_graph: bool = False) -> Tensor:
        out = product(operator, x, bias).square() * factor
        return torch.autograd.grad(out.sum(), bias, create_graph=create_graph)[0]

    expected = 2 * (x * weight).sum(0)
    torch.testing.assert_close(grad(weight), expected)
    once = grad(weight, create_graph=True)
    torch.testing.assert_close(once, expected)
    (twice,) = torch.autograd.grad(once.sum(), bias)
    torch.testing.assert_close(twice, 2 * weight.sum(0))
    out = product(operator, x, bias)
    several = torch.stack([weight, 2 * weight])
    (batched,) = torch.autograd.grad(out, bias, several, is_grads_batched=True)
    torch.testing.assert_close(batched, several.sum(1))
