"""Sums of values of edges over rows, beside torch."""

from collections.abc import Callable

import pytest
import torch
from _profile import multiplies
from torch import Tensor

from pyg_fast.graph.graph import graph_of
from pyg_fast.ops.edge_sums import Selected, edge_sums
from pyg_fast.sparse.graph import Graph

N, E, F = 9, 60, 5


@pytest.fixture(params=['in order', 'shuffled', 'a hub'])
def edges(request: pytest.FixtureRequest, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    count = 5000 if request.param == 'a hub' else E
    src, dst = torch.randint(N, (count,)), torch.randint(N - 2, (count,))  # Two rows are empty.
    if request.param == 'a hub':
        dst[50:] = 3
    if request.param == 'in order':
        dst = dst.sort().values
    return torch.stack([src, dst]).to(device)


def loop_free(edges: Tensor) -> Graph:
    return graph_of(edges, N, N, drop_loops=True)


def expected(x: Tensor, edges: Tensor, mean: bool) -> Tensor:
    kept = (edges[0] != edges[1]).to(x.dtype).view(-1, 1)
    out = x.new_zeros(N, x.size(1)).index_add(0, edges[1], x * kept)
    count = x.new_zeros(N, 1).index_add(0, edges[1], kept)
    return out / count.clamp(min=1) if mean else out


@pytest.mark.parametrize('mean', [False, True])
def test_sums(edges: Tensor, mean: bool, device: torch.device) -> None:
    graph = loop_free(edges)
    x = torch.randn(edges.size(1), F, dtype=torch.double, device=device, requires_grad=True)
    out, right = edge_sums(graph, x, edges, mean), expected(x, edges, mean)
    torch.testing.assert_close(out, right)
    assert torch.equal(out, edge_sums(graph, x.detach(), edges, mean))
    weight = torch.randn_like(out).requires_grad_()
    found = [
        torch.autograd.grad((y * weight).square().sum(), x, create_graph=True)[0]
        for y in (out, right)
    ]
    torch.testing.assert_close(*found)
    second = [torch.autograd.grad(g.square().sum(), (x, weight)) for g in found]
    torch.testing.assert_close(*second)
    several = [
        torch.autograd.grad(y, x, torch.eye(F, device=device, dtype=x.dtype)[:, None].expand(
            F, N, F), is_grads_batched=True)[0]
        for y in (edge_sums(graph, x, edges, mean), expected(x, edges, mean))
    ]  # fmt: skip
    torch.testing.assert_close(*several)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half(dtype: torch.dtype, edges: Tensor, device: torch.device) -> None:
    x = torch.randn(edges.size(1), F, device=device).to(dtype)
    out = edge_sums(loop_free(edges), x, edges, True)
    right = expected(x.double(), edges, True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_more_edges_than_int32(
    edges: Tensor, device: torch.device, limits: Callable[..., None]
) -> None:
    x = torch.randn(edges.size(1), F, dtype=torch.double, device=device, requires_grad=True)

    def check(mean: bool) -> None:
        found = edge_sums(loop_free(edges), x, edges, mean), expected(x, edges, mean)
        torch.testing.assert_close(*found)
        torch.testing.assert_close(*(torch.autograd.grad(y.sin().sum(), x) for y in found))

    for mean in (False, True):
        assert multiplies(lambda: check(mean))  # noqa: B023
    limits(nodes_of_edge_sums=10)
    for mean in (False, True):
        assert not multiplies(lambda: check(mean))  # noqa: B023


def test_vmap(edges: Tensor, device: torch.device) -> None:
    x = torch.randn(2, edges.size(1), F, dtype=torch.double, device=device)
    graph = loop_free(edges)
    out = torch.func.vmap(lambda x: edge_sums(graph, x, edges, True))(x)
    torch.testing.assert_close(out, torch.stack([expected(each, edges, True) for each in x]))


@pytest.mark.parametrize('shape', [(7,), (7, 3), (7, 2, 2)])
def test_selected(shape: tuple[int, ...], device: torch.device) -> None:
    x = torch.randn(shape, dtype=torch.double, device=device, requires_grad=True)
    index = torch.tensor([6, 0, 3], device=device)
    assert torch.equal(Selected.apply(x, index), x.index_select(0, index))
    assert torch.autograd.gradcheck(Selected.apply, (x, index))
    assert torch.autograd.gradgradcheck(Selected.apply, (x, index))
