"""Scores of edges and self-loops, beside torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from _profile import multiplies, ops_of
from torch import Tensor

from pyg_fast.graph.graph import graph_of
from pyg_fast.ops import edge_scores as module
from pyg_fast.ops.edge_scores import EdgeScores, edge_and_loop_scores, edge_scores
from pyg_fast.sparse.graph import Graph

N, E = 9, 60
mean = pytest.mark.parametrize('mean', [False, True])
# Few features, whose sums are mapped, and many, whose scores are summed.
features = pytest.mark.parametrize('size', [4, 9])


@pytest.fixture(params=['in order', 'shuffled'])
def edges(request: pytest.FixtureRequest, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    src, dst = torch.randint(N, (E,)), torch.randint(N - 2, (E,))  # Two rows are empty.
    return torch.stack([src, dst.sort().values if request.param == 'in order' else dst]).to(device)


def graph_without_loops(edges: Tensor) -> Graph:
    return graph_of(edges, N, N, drop_loops=True)


def expected(x: Tensor, weight: Tensor, edges: Tensor, mean: bool) -> tuple[Tensor, Tensor]:
    kept = (edges[0] != edges[1]).to(x.dtype).view(-1, 1)
    sums = x.new_zeros(N, x.size(1)).index_add(0, edges[1], x * kept)
    if mean:
        sums = sums / x.new_zeros(N, 1).index_add(0, edges[1], kept).clamp(min=1)
    return F.linear(x, weight), F.linear(sums, weight)


def numbers(*size: int, device: torch.device) -> Tensor:
    return torch.randn(*size, dtype=torch.double, device=device, requires_grad=True)


@mean
@features
@pytest.mark.parametrize('needs', ['both', 'x', 'weight'])
@pytest.mark.parametrize('products', ["torch's", 'our own'])
def test_scores_and_gradients(
    edges: Tensor, mean: bool, size: int, needs: str, products: str, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if products == 'our own':
        monkeypatch.setattr(module, '_is_many', lambda x, rows: True)
    x, weight = numbers(E, size, device=device), numbers(2, size, device=device)
    if needs != 'both':
        (weight if needs == 'x' else x).requires_grad_(False)
    leaves = [t for t in (x, weight) if t.requires_grad]
    graph = graph_without_loops(edges)

    def run(of: Callable, *how: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        out = of(*how)
        total = sum((t * torch.arange(1, t.numel() + 1, device=device).view_as(t)).sin().sum()
                    for t in out)  # fmt: skip
        grads = torch.autograd.grad(total, leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.sin().sum() for g in grads), leaves)
        first = torch.autograd.grad(of(*how)[1].sin().sum(), leaves)  # of loops alone
        return list(out), [*grads, *first], list(second)

    actual = run(edge_and_loop_scores, x, weight, graph, edges, mean)
    for a, e in zip(actual, run(expected, x, weight, edges, mean), strict=True):
        torch.testing.assert_close(a, e)
    with torch.no_grad():
        inference = edge_and_loop_scores(x, weight, graph, edges, mean)
    torch.testing.assert_close(inference, tuple(actual[0]))


@features
def test_what_is_summed(
    edges: Tensor,
    size: int,
    device: torch.device,
    limits: Callable[..., None],
    record_calls: Callable[..., list],
) -> None:
    graph = graph_without_loops(edges)
    widths = record_calls(module, 'raw_product', lambda out, op, x: x.size(1))
    limits(moves_of_scores=4)
    x, weight = numbers(E, size, device=device), numbers(2, size, device=device)
    edge_and_loop_scores(x.detach(), weight, graph, edges, False)
    edge_and_loop_scores(x, weight, graph, edges, False)
    with torch.no_grad():
        edge_and_loop_scores(x, weight, graph, edges, False)
    assert widths == [size if size <= 8 else 2, 2, 2]


@mean
def test_several_gradients_at_once(edges: Tensor, mean: bool, device: torch.device) -> None:
    graph = graph_without_loops(edges)
    for needs_x in (False, True):
        x = numbers(E, 4, device=device).requires_grad_(needs_x)
        weight = numbers(2, 4, device=device)
        leaves = [x, weight] if needs_x else [weight]
        grads = [torch.randn(3, n, 2, dtype=torch.double, device=device) for n in (E, N)]
        several = [
            torch.autograd.grad(out, leaves, grads, is_grads_batched=True)
            for out in (edge_and_loop_scores(x, weight, graph, edges, mean),
                        expected(x, weight, edges, mean))
        ]  # fmt: skip
        torch.testing.assert_close(*several)


def test_where_the_gradient_of_the_weight_is_a_product_of_our_own(device: torch.device) -> None:
    x = torch.zeros(1, 8, device=device).expand(1 << 17, 8)
    weight = torch.zeros(2, 8, device=device, requires_grad=True)
    is_ours = type(edge_scores(x, weight).grad_fn).__name__ == 'EdgeScoresBackward'
    assert is_ours == (device.type == 'cuda')
    assert module._is_tall(x, 16) == (device.type == 'cuda')
    assert not module._is_tall(x, 1 << 10)
    assert not module._is_tall(x[:1000], 16)


def test_where_scores_are_a_product_of_our_own(device: torch.device) -> None:
    x, products = torch.randn(16, device=device).expand(1 << 19, 16), 0
    for rows, features, heads in ((1 << 19, 16, 8), (1000, 16, 8), (1 << 19, 16, 1)):
        weight = torch.randn(heads, features, device=device)
        given = x[:rows, :features]
        found = []
        called = ops_of(lambda x=given, w=weight, to=found: to.append(edge_scores(x, w)))
        torch.testing.assert_close(found[0], F.linear(given, weight))
        products += called.get('pyg_fast::head_map', 0)
    assert products == (device.type == 'cuda')


def test_edges_alone(device: torch.device) -> None:
    x, weight = numbers(E, 4, device=device), numbers(2, 4, device=device)
    assert torch.equal(edge_scores(x, weight), F.linear(x, weight))

    def run(x: Tensor, weight: Tensor) -> Tensor:
        return EdgeScores.apply(x, weight, None, None, False)[0]

    assert torch.equal(run(x, weight), F.linear(x, weight))
    assert torch.autograd.gradcheck(run, (x, weight), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight))


@mean
def test_more_edges_than_int32(
    edges: Tensor, mean: bool, device: torch.device, limits: Callable[..., None]
) -> None:
    x, weight = numbers(E, 4, device=device), numbers(2, 4, device=device)

    def check() -> None:
        results = (edge_and_loop_scores(x, weight, graph_without_loops(edges), edges, mean),
                   expected(x, weight, edges, mean))  # fmt: skip
        torch.testing.assert_close(*results)
        torch.testing.assert_close(
            *(torch.autograd.grad(a.sin().sum() + b.sin().sum(), (x, weight)) for a, b in results)
        )

    assert multiplies(check)
    limits(nodes_of_edge_sums=10)
    assert not multiplies(check)


def test_vmap(edges: Tensor, device: torch.device) -> None:
    graph = graph_without_loops(edges)
    x, weight = numbers(3, E, 4, device=device).detach(), numbers(2, 4, device=device).detach()
    out = torch.func.vmap(lambda x: edge_and_loop_scores(x, weight, graph, edges, True))(x)
    for k, each in enumerate(x):
        torch.testing.assert_close(tuple(t[k] for t in out), expected(each, weight, edges, True))
    torch.testing.assert_close(
        torch.func.vmap(lambda x: edge_scores(x, weight))(x), F.linear(x, weight)
    )


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half(edges: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    x, weight = (numbers(n, 4, device=device).detach().to(dtype) for n in (E, 2))
    out = edge_and_loop_scores(x, weight.requires_grad_(), graph_without_loops(edges), edges, True)
    for a, e in zip(out, expected(x.double(), weight.double(), edges, True), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=0, atol=8 * torch.finfo(dtype).eps)
    assert torch.autograd.grad(out[0].sum() + out[1].sum(), weight)[0].isfinite().all()
