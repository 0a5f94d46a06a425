"""A linear map and a product as one function: both orders, the root weight, against dense ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_fast.graph import Graph
from pyg_fast.ops.linear_product import Plan, linear_product
from pyg_fast.ops.path import Rows
from pyg_fast.sparse.operator import SparseOperator

EDGES = torch.tensor([[0, 1, 2, 2, 5, 4, 4, 1], [0, 0, 1, 3, 3, 5, 5, 2]])


@pytest.mark.parametrize(('wide', 'narrow'), [(3, 2), (2, 5)])
@pytest.mark.parametrize('root', [False, True])
@pytest.mark.parametrize('mapped', [False, True])
def test_is_its_formula(
    device: torch.device, wide: int, narrow: int, root: bool, mapped: bool
) -> None:
    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.double, device=device, requires_grad=True)

    graph = Graph.from_edge_index(EDGES.to(device), 6)
    scale = torch.rand(6, dtype=torch.double, device=device)
    matrix = torch.zeros(6, 6, dtype=torch.double, device=device)
    ones = torch.ones(8, dtype=torch.double, device=device)
    matrix.index_put_((EDGES[1].to(device), EDGES[0].to(device)), ones, accumulate=True)
    matrix *= scale.view(-1, 1)
    out_size = narrow if mapped else wide
    x, bias = numbers(6, wide), numbers(out_size)
    weight = numbers(narrow, wide) if mapped else None
    root_weight = numbers(out_size, wide) if root else None
    plan = Plan(SparseOperator(graph, row_scale=scale))
    given = [t for t in (x, weight, bias, root_weight) if t is not None]

    def run(*_: Any) -> Tensor:
        return linear_product(x, weight, bias, plan, root_weight)

    expected = matrix @ (x if weight is None else x @ weight.t()) + bias
    if root_weight is not None:
        expected = expected + x @ root_weight.t()
    torch.testing.assert_close(run(), expected)
    for a, e in zip(
        torch.autograd.grad(run().sin().sum(), given),
        torch.autograd.grad(expected.sin().sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a, e)
    assert torch.autograd.gradgradcheck(run, given)


def test_of_a_constant_that_is_aggregated(device: torch.device) -> None:
    x = torch.randn(6, 3, dtype=torch.double, device=device)
    nodes = torch.tensor([1, 4], device=device)
    position = torch.tensor([-1, 0, -1, -1, 1, -1], device=device)
    weight, bias = (
        torch.randn(size, dtype=torch.double, device=device, requires_grad=True)
        for size in ((2, 3), (2,))
    )
    plan = Plan(None, dst=Rows(nodes, position))
    out = linear_product(x, weight, bias, plan)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(out, expected)
    grad = torch.randn(6, 2, dtype=torch.double, device=device, requires_grad=True)
    some = torch.zeros_like(grad).index_copy(0, nodes, grad[nodes])  # The others count as zero.
    first = torch.autograd.grad(out, (weight, bias), grad, create_graph=True)
    wanted = torch.autograd.grad(expected, (weight, bias), some, create_graph=True)
    torch.testing.assert_close(first, wanted)
    second, wanted = (
        torch.autograd.grad(sum(g.sin().sum() for g in each), grad) for each in (first, wanted)
    )
    torch.testing.assert_close(second, wanted)
