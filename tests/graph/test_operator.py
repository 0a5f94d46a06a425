"""The sparse operator as a value: its transpose, its parts, and invalid combinations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import pyg_fast
from pyg_fast import ops
from pyg_fast.graph import Graph, execution_paths
from pyg_fast.ops.product import product
from pyg_fast.sparse.operator import SparseOperator

N = 12
EDGES = torch.randint(N, (2, 40), generator=torch.Generator().manual_seed(2))


def operator(device: torch.device, **parts: Tensor) -> SparseOperator:
    return SparseOperator(Graph.from_edge_index(EDGES.to(device), N), **parts)


def dense(op: SparseOperator, device: torch.device) -> Tensor:
    return product(op, torch.eye(op.graph.num_src, dtype=torch.float64, device=device))


def numbers(device: torch.device, count: int = N) -> Tensor:
    return torch.rand(count, dtype=torch.float64, device=device) + 0.5


@pytest.mark.parametrize('scaled_first', [False, True])
def test_parts_and_transpose(
    device: torch.device, scaled_first: bool, limits: Callable[..., None]
) -> None:
    if scaled_first:  # As on large graphs.
        limits(numbers_scaled_first=0)
    row, col, diag = (numbers(device) for _ in range(3))
    value = numbers(device, 40)
    op = operator(device, value=value, row_scale=row, col_scale=col, diag=diag)
    src, dst = EDGES.to(device)
    expected = torch.zeros(N, N, dtype=torch.float64, device=device)
    expected.index_put_((dst, src), row[dst] * value * col[src], accumulate=True)
    expected += torch.diag(diag)
    torch.testing.assert_close(dense(op, device), expected)
    torch.testing.assert_close(dense(op.t(), device), expected.t())


def test_mean_and_sample(device: torch.device) -> None:
    op = operator(device, mean=True)
    torch.testing.assert_close(dense(op.without_mean(torch.float64), device), dense(op, device))
    sampled = operator(device).sampled(1)
    degree = EDGES[1].bincount(minlength=N).to(device)
    torch.testing.assert_close(dense(sampled, device).sum(1), degree.clamp(max=1).double())
    for each in (op, sampled):
        with pytest.raises(ValueError, match='has no transpose'):
            each.t()


def test_on_a_path(device: torch.device) -> None:
    mask = torch.zeros(N, dtype=torch.bool, device=device)
    mask[:2] = True
    path = execution_paths(EDGES.to(device), mask, 1)[0]
    op = operator(device)
    with pytest.raises(ValueError, match='cannot be sampled'):
        op.sampled(2).on(path)
    part = op.on(path)
    with pytest.raises(ValueError, match='cannot be sampled'):
        part.sampled(2)
    x = torch.rand(N, 3, dtype=torch.float64, device=device)
    loops = EDGES[0] == EDGES[1]
    rest = SparseOperator(Graph.from_edge_index(EDGES[:, ~loops].to(device), N))
    torch.testing.assert_close(product(part, path.src.of(x)), product(rest, x)[mask])
    mean = op._replace(mean=True).on(path), rest._replace(mean=True)
    torch.testing.assert_close(product(mean[0], path.src.of(x)), product(mean[1], x)[mask])


def test_graph_of_a_list(device: torch.device) -> None:
    assert Graph.from_edge_index(EDGES.to(device)).num_src == int(EDGES.max()) + 1
    with pytest.raises(IndexError, match=r'must hold sources in \[0, 3\)'):
        Graph.from_edge_index(EDGES.to(device), 3, N)


@pytest.mark.parametrize('name', ['Graph', 'fetch_rows', 'visited_neighbors'])
def test_names_that_were_removed(name: str) -> None:
    with pytest.raises(AttributeError, match=f"'pyg_fast.ops' has no attribute '{name}'"):
        getattr(ops, name)
    assert not hasattr(pyg_fast, 'formats')
