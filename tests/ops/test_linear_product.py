"""A linear map and a product as one function: both orders, the root weight, against dense ones."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_fast.graph import Graph
from pyg_fast.ops.linear_product import Plan, linear_product
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
