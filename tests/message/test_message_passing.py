"""Messages that are functions, beside torch operations."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import scatter, softmax

from pyg_fast.graph.graph import graph_of
from pyg_fast.message.message_passing import REDUCES, _entries
from pyg_fast.ops import message_passing

N, M, E, F = 9, 7, 40, 4


def gate(q: Tensor, v: Tensor, k: Tensor, a: Tensor) -> Tensor:
    return torch.sigmoid(k + q + a) * v


def case(device: torch.device, dtype: torch.dtype = torch.float64) -> tuple[Tensor, dict, list]:
    edges = torch.stack([torch.randint(N, (E,)), torch.randint(M - 1, (E,))]).to(device)
    sizes = {'q': N, 'v': N, 'k': M, 'a': E}
    values = {
        name: torch.randn(n, F, device=device, dtype=dtype).requires_grad_()
        for name, n in sizes.items()
    }
    roles = {
        'src': {'q': values['q'], 'v': values['v']}, 'dst': {'k': values['k']},
        'edge': {'a': values['a']},
    }  # fmt: skip
    return edges, roles, [*values.values()]


def exact(edges: Tensor, fn: Callable[..., Tensor], leaves: list, reduce: str) -> Tensor:
    q, v, k, a = leaves
    m = fn(q=q[edges[0]], v=v[edges[0]], k=k[edges[1]], a=a)
    if reduce == 'var':
        mean = scatter(m, edges[1], 0, M, 'mean')
        return scatter((m - mean[edges[1]]).square(), edges[1], 0, M, 'mean')
    return scatter(m, edges[1], 0, M, 'sum' if reduce == 'add' else reduce)


@pytest.mark.parametrize('reduce', REDUCES)
def test_like_torch(reduce: str, device: torch.device) -> None:
    edges, roles, leaves = case(device)
    expected = exact(edges, gate, leaves, reduce)
    weight = torch.linspace(-1, 1, expected.numel(), device=device).view_as(expected).double()
    wanted = torch.autograd.grad(expected, leaves, weight)
    graphs = [edges, EdgeIndex(edges, sparse_size=(N, M)), graph_of(edges, N, M)]
    for graph in graphs[:: 1 if reduce == 'sum' else 2]:
        out = message_passing(graph, gate, **roles, reduce=reduce, strict=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, weight), wanted)


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32])
def test_layouts(dtype: torch.dtype, device: torch.device) -> None:
    """Columns of wider matrices, every other column, one row for all nodes, and a transpose."""
    edges, roles, _ = case(device, dtype)
    wide = torch.randn(N, 3 * F + 5, device=device, dtype=dtype, requires_grad=True)
    thin = torch.randn(F, device=device, dtype=dtype, requires_grad=True)
    lying = torch.randn(F, E, device=device, dtype=dtype, requires_grad=True)
    leaves = [wide, thin, lying]
    of_k = thin.expand(M, F)
    for q, v in [(wide[:, 1 : F + 1], wide[:, F + 2 : 2 * F + 2]), (wide[:, : 2 * F : 2],) * 2]:
        roles |= {'src': {'q': q, 'v': v}, 'dst': {'k': of_k}, 'edge': {'a': lying.t()}}
        for reduce in ('sum', 'max'):
            out = message_passing(edges, gate, **roles, reduce=reduce, strict=True)
            expected = exact(edges, gate, [q, v, of_k, lying.t()], reduce)
            torch.testing.assert_close(out, expected)
            weight = torch.linspace(-1, 1, out.numel(), device=device, dtype=dtype).view_as(out)
            found, wanted = (
                torch.autograd.grad(each, leaves, weight, retain_graph=True)
                for each in (out, expected)
            )
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize('mixes', [False, True])
def test_softmax(mixes: bool, device: torch.device) -> None:
    """A function may take the destination of each edge, for a softmax."""
    edges, roles, leaves = case(device)

    def attention(q: Tensor, v: Tensor, k: Tensor, a: Tensor, index: Tensor, size_i: int) -> Tensor:
        weight = softmax((k * q).sum(-1, keepdim=True), index, num_nodes=size_i)
        return weight * (v + a) if not mixes else weight * v.cumsum(0) + a

    expected = exact(edges, partial(attention, index=edges[1], size_i=M), leaves, 'sum')
    for graph in (edges, graph_of(edges, N, M)):
        out = message_passing(graph, attention, **roles, strict=not mixes)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), leaves),
            torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True),
        )


@pytest.mark.parametrize('reduce', ['sum', 'max'])
def test_constants_that_give_a_shape(reduce: str, device: torch.device) -> None:
    """Four columns of one number, in values of nodes and of edges, twice derived."""
    edges, roles, leaves = case(device)

    def counted(q: Tensor, v: Tensor, k: Tensor, a: Tensor) -> Tensor:
        ones = q.new_ones(q.size(0), 4)
        first = (q[:, :1] * ones).sum(-1, keepdim=True)
        second = torch.where(k[:, :1] > 0, ones, 2.0).sum(-1, keepdim=True)
        return first * v + second * a + (q[:, :1] * k[:, :1] + ones).square()

    results = []
    for out in (
        message_passing(edges, counted, **roles, reduce=reduce, strict=True),
        exact(edges, counted, leaves, reduce),
    ):
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(grads[0].square().sum(), leaves)
        results.append([out, *grads, *second])
    torch.testing.assert_close(*results)


def test_closures_and_new_functions(device: torch.device) -> None:
    """A function defined anew at each call is captured once, and never stale."""
    edges, roles, leaves = case(device)
    before = len(_entries)
    for scale in (2.0, torch.tensor(3.0, device=device, dtype=torch.float64)):

        def scaled(q: Tensor, v: Tensor, k: Tensor, a: Tensor, scale: Any = scale) -> Tensor:
            return (q + k) * v * a * scale

        out = message_passing(edges, scaled, **roles, strict=True)
        torch.testing.assert_close(out, exact(edges, scaled, leaves, 'sum'))
    assert len(_entries) == before + 1
    learned = torch.randn(F, F, device=device, dtype=torch.float64, requires_grad=True)
    out = message_passing(
        graph_of(edges, N, M), lambda q: torch.relu(q @ learned), src={'q': leaves[0]}, strict=True
    )
    expected = scatter(torch.relu(leaves[0] @ learned)[edges[0]], edges[1], 0, M)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), learned), torch.autograd.grad(expected.sum(), learned)
    )


@pytest.mark.parametrize('reduce', ['max', 'var'])
def test_without_a_kernel(reduce: str, device: torch.device) -> None:
    edges, roles, leaves = case(device)

    def ranks(q: Tensor, v: Tensor, k: Tensor, a: Tensor) -> Tensor:
        return q.cumsum(0) + v + k + a

    for graph in (edges, graph_of(edges, N, M)):
        out = message_passing(graph, ranks, **roles, reduce=reduce)
        torch.testing.assert_close(out, exact(edges, ranks, leaves, reduce))
        with pytest.raises(NotImplementedError, match=r'message_passing\(strict=True\): .*helps: '):
            message_passing(graph, ranks, **roles, reduce=reduce, strict=True)


def test_wrong_arguments(
    device: torch.device, raises: Callable[..., AbstractContextManager]
) -> None:
    edges, roles, _ = case(device)
    with pytest.raises(ValueError, match="'reduce' must be one of"):
        message_passing(edges, gate, **roles, reduce='median')
    with pytest.raises(TypeError, match="'fn' must be a function of a message, got NoneType"):
        message_passing(edges, None, **roles)
    with pytest.raises(TypeError, match="'fn' must return a tensor, got NoneType"):
        message_passing(edges, lambda **_: None, **roles)
    with pytest.raises(TypeError, match="'src' must be a dict of tensors, .* got Tensor"):
        message_passing(edges, gate, roles['src']['q'])
    with pytest.raises(ValueError, match='are empty; give the message an input'):
        message_passing(edges, gate)
    with pytest.raises(TypeError, match=r"'edge\['a'\]' must be a tensor, got float"):
        message_passing(edges, gate, edge={'a': 1.0})
    with pytest.raises(ValueError, match='must have a row per edge, got a number'):
        message_passing(edges, gate, edge={'a': torch.tensor(1.0, device=device)})
    with pytest.raises(ValueError, match="two inputs have the name 'q'; rename one"):
        message_passing(edges, gate, src=roles['src'], dst={'q': roles['dst']['k']})
    with pytest.raises(ValueError, match=r"'edge\['a'\]' must have 40 rows, got 39"):
        message_passing(edges, gate, src=roles['src'], edge={'a': roles['edge']['a'][1:]})
    with pytest.raises(ValueError, match=r'edge_index of shape \[2, num_edges\], got \[2\]'):
        message_passing(edges[:, 0], gate, **roles)
    with pytest.raises(ValueError, match="'graph' has no size: prepare it by ToCSR"):
        message_passing(edges, gate, edge=roles['edge'])
    few = {name: x[:3] for name, x in roles['src'].items()}
    with raises(IndexError, 'edge_index'):
        message_passing(edges, gate, src=few, dst=roles['dst'], edge=roles['edge'])
