"""Messages that layers write in PyTorch, beside PyG on the same weights."""

import copy
import io
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from _captures import captured
from torch import Tensor
from torch.nn import Linear
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as pyg
from torch_geometric.typing import OptTensor
from torch_geometric.utils import scatter

import pyg_fast
from pyg_fast.graph.readable import ReadableEdgeIndex
from pyg_fast.nn import FusedMessagePassing, message_passing
from tests._profile import multiplies
from tests._report import plan_of, why_pygs
from tests.message._expressions import BINARY, UNARY, Expression
from tests.nn._layers import (
    BY_NAME,
    E,
    F,
    N,
    arguments,
    assert_alike,
    graph,
    hub_graph,
    prepared,
    run,
)


def _filled(leaves: list[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    pairs = zip(leaves, grads, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def fused(conv: Any) -> Any:
    return pyg_fast.accelerate(copy.deepcopy(conv))


@pytest.mark.parametrize(
    'name',
    [
        'ResGatedGraphConv, edge features', 'PNAConv, 4 aggregations, 3 scalers, 2 towers',
        "EdgeConv, nn=MLP, aggr='mean'", 'FeaStConv, 2 heads',
    ],
)  # fmt: skip
def test_prepared(name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    case = BY_NAME[name]
    theirs = case.make().to(device)
    ours = fused(theirs)
    expected = run(theirs, arguments(case.args, device, torch.float32))
    given = case.args.replace('edges', 'edges!')
    assert_alike(run(ours, arguments(given, device, torch.float32)), expected, 2e-4)
    assert why_pygs(ours) == ''


class Random(MessagePassing):
    """A message of random operations."""

    def __init__(self, seed: int, aggr: Any) -> None:
        super().__init__(aggr)
        self.expression = Expression(seed, ['a_j', 'b_j', 'c_i', 'e', 'p'])
        self.p = torch.nn.Parameter(torch.linspace(-1, 1, 8))
        self.scale = 1.0

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, a=x, b=x.sin(), c=x.cos(), e=e)

    def message(self, a_j: Tensor, b_j: Tensor, c_i: Tensor, e: Tensor) -> Tensor:
        p = self.p.expand_as(e)
        out = self.expression({'a_j': a_j, 'b_j': b_j, 'c_i': c_i, 'e': e, 'p': p})
        out = out + a_j * (self.scale * 0.01)
        return torch.nn.functional.dropout(out, 1e-12, self.training)


AGGRS = ['sum', 'mean', 'max', ['min', 'sum']]


def check_random(seed: int, device: torch.device, num_calls: int) -> str:
    """Why PyG's code ran, or ''. An attribute, a parameter and the mode change between calls, and
    the last one is on a graph with hubs."""
    torch.manual_seed(seed)
    theirs = Random(seed, AGGRS[seed % len(AGGRS)]).to(device, torch.float64)
    ours = fused(theirs)
    for call in range(num_calls + 1):
        edges = graph(device, seed) if call < num_calls else hub_graph(device)
        x = torch.randn(N, 8, dtype=torch.float64, device=device)
        e = torch.randn(edges.size(1), 8, dtype=torch.float64, device=device)
        results = []
        for conv in (ours, theirs):
            if call == 1:
                conv.scale = 3.0
            if call == 2:
                conv.p = torch.nn.Parameter(torch.full_like(conv.p, 0.3))
                conv.eval()
            leaves = [x.clone().requires_grad_(), e.clone().requires_grad_(), conv.p]
            out = conv(leaves[0], edges, leaves[1])
            weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device)
            grads = torch.autograd.grad((out.flatten() * weight).sum(), leaves, allow_unused=True)
            results.append([out, *_filled(leaves, grads)])
        for one, other in zip(*results, strict=True):
            ok = torch.isfinite(other)
            scale = max(1.0, other[ok].abs().max().item() if ok.any() else 1.0)
            error = (torch.where(ok, one - other, 0) / scale).abs().max().item()
            assert error < 1e-7, (seed, call, error, ours.expression)
    return why_pygs(ours)


# Few that have every operation together. More of them: PYG_FAST_MESSAGES=100 runs 600.
SEEDS: Sequence[int] = [17, 386, 24, 28, 111, 409, 105, 19, 6, 12, 22, 7]
# Edges of one source whose messages are equal but for rounding, which decides on their maximum.
ROUNDED = {498}
if 'PYG_FAST_MESSAGES' in os.environ:
    SEEDS = [k for k in range(6 * int(os.environ['PYG_FAST_MESSAGES'])) if k not in ROUNDED]


def test_random_messages_have_every_operation() -> None:
    def of(tree: tuple) -> set[tuple[int, int]]:
        operation = {(len(tree), tree[0])} if len(tree) > 1 else set()
        return operation.union(*map(of, tree[1:]))

    found = set().union(*(of(Random(seed, 'sum').expression.tree) for seed in SEEDS))
    assert len(found) == len(UNARY) + len(BINARY)


@pytest.mark.parametrize('block', range(len(SEEDS) // 6))
def test_random_messages(block: int, device: torch.device) -> None:
    seeds = SEEDS[6 * block : 6 * block + 6]
    reasons = [check_random(seed, device, 1 if seed % 6 else 3) for seed in seeds]
    assert sum(not reason for reason in reasons) >= 4, reasons


class Gated(FusedMessagePassing):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.weight = torch.nn.Parameter(torch.tensor(2.0))
        self.mode = 'sigmoid'

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return getattr(torch, self.mode)(x_i + x_j) * x_j * self.weight


class PlainGated(Gated):
    propagate = MessagePassing.propagate


def test_own_layer(device: torch.device) -> None:
    conv, plain = Gated(strict=True).to(device), PlainGated().to(device)
    x, edges = torch.randn(N, F, device=device), graph(device)
    torch.testing.assert_close(conv(x, edges), plain(x, edges))
    assert 'sigmoid' in plan_of(conv)
    conv.mode = plain.mode = 'tanh'  # Nothing of the first call is stale.
    torch.testing.assert_close(conv(x, edges), plain(x, edges))
    assert 'tanh' in plan_of(conv)
    with torch.no_grad():
        conv.weight.fill_(3)
        plain.weight.fill_(3)
    torch.testing.assert_close(conv(x, edges), plain(x, edges))
    for width in (3, 1, 70):
        x = torch.randn(N, width, device=device)
        torch.testing.assert_close(conv(x, edges), plain(x, edges))


class Weighted(FusedMessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return w.view(-1, *[1] * (x_j.dim() - 1)) * x_j if self.weighted else x_j


class PlainWeighted(Weighted):
    propagate = MessagePassing.propagate


@pytest.mark.parametrize('aggr', ['sum', 'mean'])
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_weighted_sum(aggr: str, flow: str, device: torch.device) -> None:
    """It runs as the product of a sparse matrix."""
    options = {'aggr': aggr, 'flow': flow, 'node_dim': 0}
    convs = Weighted(strict=True, **options), PlainWeighted(**options)
    for shape, dtype, weighted in (
        ((F,), torch.float64, True), ((F,), torch.float64, False), ((2, F), torch.float64, True),
        ((), torch.float64, True), ((F,), torch.float16, True),
    ):  # fmt: skip
        results = []
        for conv in convs:
            torch.manual_seed(1)
            conv.weighted = weighted
            # Sums of halves by atomics differ from run to run: PyG's code gets doubles.
            wide = torch.float64 if conv is convs[1] else dtype
            x = torch.randn(N, *shape, device=device).to(dtype).to(wide).requires_grad_()
            w = torch.rand(E, device=device).to(dtype).to(wide).requires_grad_()
            out = conv(x, graph(device), w)
            (grad_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            (grad_w,) = torch.autograd.grad(
                out.square().sum(), w, retain_graph=True, allow_unused=True
            )
            found = [out, grad_x, grad_w]
            if dtype == torch.float64:
                found += torch.autograd.grad(grad_x.square().sum(), x)
            results.append([t for t in found if t is not None])
        assert multiplies(lambda: convs[0](x, graph(device), w))  # noqa: B023
        for got, expected in zip(*results, strict=True):
            tolerance = {}
            if dtype == torch.float16:
                tolerance = {'rtol': 0, 'atol': 2e-3 * expected.abs().max().item()}
            torch.testing.assert_close(got.double(), expected, **tolerance)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half(device: torch.device, dtype: torch.dtype) -> None:
    conv, plain = Gated(strict=True).to(device, dtype), PlainGated().to(device, dtype)
    x, edges = torch.randn(N, F, device=device, dtype=dtype), graph(device)
    exact = copy.deepcopy(plain).double()(x.double(), edges)
    out = conv(x, edges)
    assert out.dtype == dtype
    assert (out - exact).abs().max() <= (plain(x, edges) - exact).abs().max()


def test_variance_of_halves(device: torch.device) -> None:
    """Its two sums are not rounded, nor can they overflow."""
    x, edges = (torch.randn(N, F, device=device) + 300).half(), graph(device)
    found = fused(pyg.SimpleConv('var')).to(device)(x, edges)
    exact = pyg.SimpleConv('var').to(device)(x.double(), edges)
    assert found.dtype == torch.half
    torch.testing.assert_close(found.double(), exact, atol=0.1, rtol=2e-3)


def test_casts_in_a_message(device: torch.device) -> None:
    """A message keeps a wider dtype; one that rounds on purpose is PyG's."""

    class Casts(FusedMessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return x_j.float() * 2

    x, edges = torch.randn(N, F, dtype=torch.half, device=device), graph(device)
    out = Casts(strict=True).to(device)(x, edges)
    expected = MessagePassing.propagate(Casts(), edges, x=x)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected)
    conv = Casts()
    conv(x.double(), edges)
    assert 'a conversion to float32' in why_pygs(conv)


def test_second_derivative(device: torch.device) -> None:
    x, edges = torch.randn(N, 3, device=device, dtype=torch.float64), graph(device)
    results = []
    for conv in (Gated(strict=True), PlainGated()):
        conv = conv.to(device, torch.float64)
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(conv(leaf, edges).sin().sum(), leaf, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), [leaf, conv.weight]))
    torch.testing.assert_close(results[0], results[1])


def test_nonlinear_at_isolated_nodes(device: torch.device) -> None:
    """PyG never computes the message of a node without edges: neither NaN nor its gradient."""

    class Root(FusedMessagePassing):
        def __init__(self) -> None:
            super().__init__(strict=True)
            self.lin = Linear(F, F, bias=False)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return self.lin(x_j.sqrt()).relu()

    conv, edges = Root().to(device), graph(device)
    for bad, edge_index in itertools.product(
        (0.0, float('nan'), float('inf')), (edges, prepared(edges))
    ):
        x = torch.rand(N, F, device=device) + 0.1
        x[-3:] = bad
        x.requires_grad_()
        conv.zero_grad()
        conv(x, edge_index).sum().backward()
        assert torch.isfinite(x.grad).all()
        assert (x.grad[-3:] == 0).all()
        assert torch.isfinite(conv.lin.weight.grad).all()


class Bad(FusedMessagePassing):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind, self.all = kind, []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        if self.kind == 'cumsum':
            return x_j.cumsum(0)
        if self.kind == 'mean':
            return x_j - x_j.mean()
        if self.kind == 'batch':
            return x_j - x_j.mean(0)
        if self.kind == 'size':
            return x_j * x_j.size(0)
        if self.kind == 'arange':
            return x_j * torch.arange(x_j.size(0), device=x_j.device).view(-1, 1)
        if self.kind == 'list':
            self.all.append(x_j * 2)
            return x_j * 2
        if self.kind == 'random':
            return x_j * torch.rand_like(x_j)
        if self.kind == 'branch':
            return x_j if x_j.size(0) > 10 else -x_j
        if self.kind == 'data':
            return x_j if x_j.sum() > 0 else -x_j
        if self.kind == 'transpose':
            return (x_j.t() @ x_j).sum() * x_j
        if self.kind == 'roll':
            return x_j.roll(1, 0)
        return x_j.sort(-1).values


@pytest.mark.parametrize(
    'kind',
    [
        'cumsum', 'mean', 'batch', 'size', 'arange', 'list', 'random', 'branch', 'data',
        'transpose', 'roll', 'sort',
    ],
)  # fmt: skip
def test_refused(kind: str, device: torch.device) -> None:
    x, edges = torch.randn(N, F, device=device, dtype=torch.float64), graph(device)
    conv, plain = Bad(kind).to(device), Bad(kind).to(device)
    torch.manual_seed(3)
    out = conv(x, edges)
    assert why_pygs(conv)
    torch.manual_seed(3)
    expected = MessagePassing.propagate(plain, edges, x=x)
    torch.testing.assert_close(out, expected)
    would = r"strict=True\): PyG's code would run: .*\. What helps: \w"
    with pytest.raises(NotImplementedError, match=would):
        Bad(kind, strict=True).to(device)(x, edges)


def test_strict_is_a_flag() -> None:
    with pytest.raises(TypeError, match="'strict' must be True or False, got str"):
        FusedMessagePassing(strict='a')


def test_hooks_and_explainers(device: torch.device) -> None:
    conv = Gated().to(device)
    x, edges = torch.randn(N, F, device=device), graph(device)
    expected = conv(x, edges)
    assert why_pygs(conv) == ''
    seen: list[Any] = []
    handle = conv.register_message_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(conv(x, edges), expected)
    assert len(seen) == 1
    assert 'hooks' in why_pygs(conv)
    handle.remove()
    conv.message = lambda x_i, x_j: x_j  # type: ignore[method-assign]
    conv(x, edges)
    assert 'patched' in why_pygs(conv)


class Doubled(MessagePassing):
    """Calls what ours replaces."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.pass_messages(x, edge_index)

    def pass_messages(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        return 2 * super().propagate(edge_index, size=size, **kwargs)


class Ignored(pyg.GraphConv):
    """On a sorted EdgeIndex PyG calls `message_and_aggregate` instead."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.exp()


class Replaces(Doubled):
    """Overrides what ours would replace."""

    def propagate(self, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
        return 3 * MessagePassing.propagate(self, edge_index, size=size, **kwargs)


class Twice(Doubled):
    def propagate(self, edge_index: Any, size: Any = None, *, x: Any) -> Tensor:
        return super().propagate(edge_index, size, x=x) + super().propagate(edge_index, x=2 * x)


@pytest.mark.parametrize('cls', [Doubled, Twice, Replaces])
def test_overridden_propagate(cls: type[Doubled], device: torch.device) -> None:
    x, edges = torch.randn(N, F, device=device, requires_grad=True), graph(device)
    theirs = cls()
    ours = fused(theirs)
    out, expected = ours(x, edges), theirs(x, edges)
    torch.testing.assert_close(out, expected)
    found = [torch.autograd.grad(each.square().sum(), x)[0] for each in (out, expected)]
    torch.testing.assert_close(*found)
    (report,) = pyg_fast.accelerate_report(ours)
    assert report.reason == ('its propagate is overridden' if cls is Replaces else None)
    if cls is not Replaces:
        assert why_pygs(ours) == ''
        assert type(copy.deepcopy(ours)) is type(ours)
        assert type(pyg_fast.restore(ours)) is cls


def test_overridden_propagate_of_the_other_flow(device: torch.device) -> None:
    """Of a pair PyG's Python code takes the second for sources."""
    theirs, edges = Doubled(), graph(device)
    ours, pair = fused(theirs), tuple(torch.randn(2, N, F, device=device))
    theirs.flow = ours.flow = 'target_to_source'
    torch.testing.assert_close(ours(pair, edges), theirs(pair, edges))
    assert why_pygs(ours) == 'its propagate is overridden'
    theirs = Doubled(flow='target_to_source')
    assert pyg_fast.accelerate_report(theirs)[0].reason == 'its propagate is overridden'


def test_overridden_message_of_a_sorted_graph(device: torch.device) -> None:
    theirs = Ignored(F, F).to(device)
    ours, x = fused(theirs), torch.randn(N, F, device=device)
    edges = EdgeIndex(graph(device), sparse_size=(N, N)).sort_by('col').values
    torch.testing.assert_close(ours(x, edges), theirs(x, edges))
    assert 'message_and_aggregate' in why_pygs(ours)
    torch.testing.assert_close(ours(x, edges.as_tensor()), theirs(x, edges.as_tensor()))
    assert why_pygs(ours) == ''


def test_first_reason_of_a_call_stays(device: torch.device) -> None:
    class Twice(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            few = self.propagate(edge_index[:, :1], x=x)
            return few + self.propagate(edge_index, x=x)

    ours, x, edges = fused(Twice()), torch.randn(N, F, device=device), graph(device)
    torch.testing.assert_close(ours(x, edges), Twice()(x, edges))
    assert why_pygs(ours) == '1 edges'
    ours.propagate(edges, x=x)
    assert why_pygs(ours) == ''


class Places(MessagePassing):
    """Nodes are not the first dimension."""

    def __init__(self, kind: str, aggr: Any) -> None:
        super().__init__(aggr)
        self.kind = kind

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_i: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        out = torch.where(x_i > x_j, x_i, x_j.tanh() * weight.view(-1, 1))
        if self.kind == 'transposed':
            return (out.transpose(0, 1) * weight.view(-1, 1, 1)).transpose(0, 1)
        if self.kind == 'sum':
            return out - out.sum(0)
        if self.kind == 'mixed':
            return out - out.mean(1, keepdim=True)
        return out


@pytest.mark.parametrize('kind', ['pointwise', 'transposed', 'sum', 'mixed'])
@pytest.mark.parametrize('aggr', ['mean', ['sum', 'max']])
def test_nodes_in_another_dimension(kind: str, aggr: Any, device: torch.device) -> None:
    theirs = Places(kind, aggr)
    ours = fused(theirs)
    for size in (1, 3):
        args = [
            torch.randn(size, N, F, device=device, dtype=torch.float64, requires_grad=True),
            graph(device),
            torch.rand(E, device=device, dtype=torch.float64, requires_grad=True),
        ]
        assert_alike(run(ours, args), run(theirs, args), 1e-9)
        reason = {'mixed': 'a reduction over edges'}.get(kind, '')
        assert why_pygs(ours).startswith(reason)
        assert bool(why_pygs(ours)) == bool(reason)


# What is done to rows of four numbers, several for each edge.
ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'sum': lambda x, p: x.sum(-1),
    'amax': lambda x, p: x.amax(-1, keepdim=True),
    'max': lambda x, p: x.max(-1).values,
    'slice': lambda x, p: x[:, 1:3],
    'select': lambda x, p: x[:, 1],
    'split': lambda x, p: x.split(2, -1)[1],
    'unbind': lambda x, p: x.unbind(-1)[2],
    'cat': lambda x, p: torch.cat([x, x.tanh()], 1),
    'map': lambda x, p: x @ p,
    'bmm': lambda x, p: torch.bmm(x.view(-1, 2, 2), x.view(-1, 2, 2)),
    'expand': lambda x, p: torch.bmm(x.view(-1, 1, 4), p.expand(x.size(0), 4, 4)),
    'transpose': lambda x, p: x.view(-1, 2, 2).transpose(1, 2),
    'add': lambda x, p: x + p[0],
}


class Rows(MessagePassing):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.p = torch.nn.Parameter(torch.rand(4, 4))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        out = ROWS[self.kind]((x_i.sin() * x_j).view(-1, 4), self.p)
        return out.reshape(x_j.size(0), out.numel() // x_j.size(0))


@pytest.mark.parametrize('kind', ROWS)
def test_several_rows_of_an_edge(kind: str, device: torch.device) -> None:
    theirs = Rows(kind).to(device, torch.float64)
    ours, args = fused(theirs), arguments('x edges', device)
    assert_alike(run(ours, args), run(theirs, args), 1e-9)
    reasons = {'transpose': 'aten.transpose', 'add': 'aten.add', 'expand': 'a batched product'}
    if device.type == 'cuda':  # Tiles have no float64 there.
        reasons['map'] = 'a linear map of values'
    assert why_pygs(ours).startswith(reasons.get(kind, ''))
    assert bool(why_pygs(ours)) == (kind in reasons)


def test_expanded_parameter(device: torch.device) -> None:
    class Scales(FusedMessagePassing):
        def __init__(self) -> None:
            super().__init__(strict=True)
            self.p = torch.nn.Parameter(torch.rand(1, F))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            scale = x_j.amax(-1) * self.p[0, 0]
            return x_j * self.p.expand(x_j.size(0), F) * scale.view(-1, 1)

    conv, (x, edges) = Scales().to(device, torch.float64), arguments('x edges', device)
    expected = MessagePassing.propagate(conv, edges, x=x)
    torch.testing.assert_close(conv(x, edges), expected)


class ReadsHalf(MessagePassing):
    """Its aggregation reads one part of the message."""

    def __init__(self, detaches: bool) -> None:
        super().__init__()
        self.detaches, self.lin = detaches, Linear(8, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return torch.cat([x_j.detach() if self.detaches else 3 * x_j, self.lin(x_j)], -1)

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        part, _ = inputs.chunk(2, -1)
        return 2 * scatter(part, index, 0, dim_size)


@pytest.mark.parametrize('detaches', [False, True])
def test_a_part_that_nobody_reads_gets_zero_gradients(detaches: bool, device: torch.device) -> None:
    conv = ReadsHalf(detaches).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    x = torch.randn(50, 8, device=device, requires_grad=True)
    edge_index = torch.randint(50, (2, 300), device=device)
    found = []
    for layer in (conv, ours):
        out = layer(x, edge_index)
        grads = torch.autograd.grad(out.sum(), [x, *layer.parameters()], allow_unused=True)
        found.append([out, *grads])
    assert why_pygs(ours) == ''
    torch.testing.assert_close(found[1], found[0])


class Sees(MessagePassing):
    """PyG's code runs a message that changes a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(type(edge_index))
        return x_j.cumsum(0)


class SeesPtr(Sees):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(  # type: ignore[override]
        self, x_j: Tensor, edge_index: Tensor, ptr: OptTensor
    ) -> Tensor:
        self.seen.append(None if ptr is None else ptr.tolist())
        return x_j.cumsum(0)


class Cumulates(SeesPtr):
    def message(self, x_j: Tensor) -> Tensor:  # type: ignore[override]
        return x_j.cumsum(0)


def test_pygs_code_gets_the_plain_list_but_where_it_reads_more(
    record_calls: Callable[..., list[type]],
) -> None:
    edge_index = EdgeIndex(
        [[0, 2, 1], [0, 0, 1]], sparse_size=(3, 3), sort_order='col'
    ).fill_cache_()
    given = record_calls(message_passing, 'edges_for_pyg', lambda out, *_: type(out))
    layers = [pyg_fast.accelerate(kind()) for kind in (Sees, SeesPtr, Cumulates)]
    for each in layers:
        each(torch.ones(3, 2), edge_index)
        assert why_pygs(each) != ''
    assert layers[0].seen[-1] is ReadableEdgeIndex
    assert layers[1].seen[-1] == [0, 2, 3, 3]
    assert given == [ReadableEdgeIndex, ReadableEdgeIndex, Tensor]


def test_message_of_other_rows(device: torch.device) -> None:
    class More(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return x_j.view(-1, 4)

    ours = fused(More())
    with pytest.raises(RuntimeError, match='must return a row for each of 160 edges'):
        ours(*arguments('x edges', device))
    assert 'first dimension' in why_pygs(ours)


def test_message_without_the_dimension_of_nodes(device: torch.device) -> None:
    class Sums(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return x_j.sum(-1)

    x, edges = torch.randn(N, F, device=device), graph(device)
    with pytest.raises(ValueError, match="'message' must return a row of ch"):
        fused(Sums())(x, edges)


@pytest.mark.parametrize('largest', [True, False])
def test_choice_of_equal_values(largest: bool, device: torch.device) -> None:
    """The gradient goes to the first of them; a NaN is chosen."""

    class Chooses(FusedMessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            both = torch.stack([x_i, x_j, x_i], -1)
            out = both.max(-1) if largest else both.min(-1)
            return out.values.view(-1, 4, 4).max(1, keepdim=True)[0].view(-1, 4)

    conv, edges = Chooses(strict=True), graph(device)
    x = torch.randint(3, (N, F), device=device).double()
    for value in (1.0, float('nan')):
        x[5, 3] = value
        results = []
        for propagate in (Chooses.propagate, MessagePassing.propagate):
            leaf = x.clone().requires_grad_()
            out = propagate(conv, edges, x=leaf)
            weight = torch.linspace(-1, 1, out.numel(), device=device).to(out).view_as(out)
            (grad,) = torch.autograd.grad((out * weight).sum(), leaf)
            results.append([out, grad])
        torch.testing.assert_close(*results, equal_nan=True)


def test_attention_of_fa_conv(device: torch.device) -> None:
    """Its message sets an attribute, which `return_attention_weights` alone reads."""
    theirs = pyg.FAConv(F).to(device)
    ours, edges = fused(theirs), graph(device)
    x = torch.randn(N, F, device=device)
    for kwargs in ({}, {'return_attention_weights': True}, {}):
        torch.testing.assert_close(ours(x, x, edges, **kwargs), theirs(x, x, edges, **kwargs))
        assert why_pygs(ours) == ('return_attention_weights' if kwargs else '')
        assert ours._alpha is None
    torch.testing.assert_close(ours.forward(x, x, edges), theirs(x, x, edges))

    class Own(pyg.FAConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            weight, alpha = x[edge_index[0], 0], (x[:, :1], x[:, 1:2])
            self.propagate(edge_index, x=x, alpha=alpha, edge_weight=weight)
            return self._alpha

    ours = fused(Own(F))
    torch.testing.assert_close(ours(x, edges), Own(F)(x, edges))
    assert why_pygs(ours) == ''


def test_copies_and_pickles(device: torch.device) -> None:
    theirs = pyg.FiLMConv(F, F).to(device)
    ours = fused(theirs)
    x, edges = torch.randn(N, F, device=device), graph(device)
    expected = ours(x, edges)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        torch.testing.assert_close(other(x, edges), expected)
        assert why_pygs(other) == ''
        restored = pyg_fast.restore(other)
        assert type(restored) is pyg.FiLMConv
        torch.testing.assert_close(restored(x, edges), theirs(x, edges))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_report(device: torch.device) -> None:
    model = torch.nn.ModuleList([pyg.FiLMConv(F, F), pyg.SAGEConv(F, F, 'median')]).to(device)
    pyg_fast.accelerate(model)
    model[0](torch.randn(N, F, device=device), graph(device))
    reports = pyg_fast.accelerate_report(model)
    assert [r.layer for r in reports] == ['FiLMConv', 'SAGEConv']
    assert [r.fused for r in reports] == ['FusedFiLMConv', None]
    assert reports[0].ran == 'FusedFiLMConv'
    assert reports[1].reason == 'MedianAggregation has no kernel'


class Writes(FusedMessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        x_j = x_j.mul_(2)  # PyG has gathered it.
        return x_j + edge_attr.view(-1, F).mul_(2)


def test_writes(device: torch.device) -> None:
    x, edges = torch.randn(N, F, device=device), graph(device)
    attr = torch.randn(E, F, device=device)
    conv, mine = Writes().to(device), attr.clone()
    out = conv(x, edges, mine)
    assert 'writes into its input' in why_pygs(conv)
    torch.testing.assert_close(mine, 2 * attr)
    expected = torch.zeros_like(out).index_add_(0, edges[1], 2 * x[edges[0]] + 2 * attr)
    torch.testing.assert_close(out, expected)


def test_shallow_copy(device: torch.device) -> None:
    """As replicas of DataParallel: the same attributes, other parameters."""
    conv = Gated(strict=True).to(device)
    x, edges = torch.randn(N, F, device=device), graph(device)
    expected = conv(x, edges)
    other = copy.copy(conv)
    other._parameters = {'weight': torch.nn.Parameter(torch.tensor(4.0, device=device))}
    torch.testing.assert_close(other(x, edges), 2 * expected)
    torch.testing.assert_close(conv(x, edges), expected)


def test_without_dynamo(device: torch.device) -> None:
    conv = Gated().to(device)
    x, edges = torch.randn(N, F, device=device), graph(device)
    with torch.compiler.set_stance('force_eager'):
        out = conv(x, edges)
    assert 'torch.compile is disabled' in why_pygs(conv)
    torch.testing.assert_close(out, conv(x, edges))
    assert why_pygs(conv) == ''


@pytest.mark.parametrize(
    'name', ["EdgeConv, nn=MLP, aggr='mean'", 'ResGatedGraphConv, edge features', 'FiLMConv']
)
def test_autocast(name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    case = BY_NAME[name]
    theirs = case.make().to(device)
    ours = fused(theirs)
    exact = run(copy.deepcopy(theirs).double(), arguments(case.args, device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = run(ours, arguments(case.args, device, torch.float32))
        expected = run(theirs, arguments(case.args, device, torch.float32))
    assert why_pygs(ours) == ''
    for one, other, right in zip(found, expected, exact, strict=True):
        assert one.dtype == other.dtype
        allowed = 2 * (other - right).norm() + 1e-3 * right.norm()
        assert (one - right).norm() <= allowed


def test_dropout(device: torch.device) -> None:
    """Kept values are scaled; another call drops others, the backward pass drops the same."""

    class Drops(FusedMessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return torch.nn.functional.dropout(x_j, 0.25, self.training)

    conv, edges = Drops(strict=True).to(device), graph(device)
    x = torch.ones(N, 512, device=device, requires_grad=True)
    out = conv(x, edges)
    degree = torch.bincount(edges[1], minlength=N).view(-1, 1)
    kept = out.sum() * 0.75 / (degree.sum() * 512)
    assert abs(kept.item() - 0.75) < 0.01
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad.sum(), out.sum())
    torch.testing.assert_close(grad.sum(0), out.sum(0))
    assert not torch.equal(conv(x, edges), out)
    torch.testing.assert_close(conv.eval()(x, edges), degree.expand_as(out).to(out.dtype))


def test_inside_of_torch_compile(device: torch.device) -> None:
    theirs = pyg.FiLMConv(F, F).to(device)
    ours, x, edges = fused(theirs), torch.randn(N, F, device=device), graph(device)
    compiled = torch.compile(ours, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(x, edges), theirs(x, edges))
    torch.testing.assert_close(ours(x, edges), theirs(x, edges))
    assert why_pygs(ours) == ''


def test_cuda_graph(device: torch.device) -> None:
    """A capture needs a warm-up call, and then replays forward and backward passes."""
    if device.type != 'cuda':
        pytest.skip('of CUDA only')

    class Own(Gated):  # No other test has captured its message.
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return torch.sigmoid(x_i + x_j) * x_j * self.weight

    conv, edges = Own(strict=True).to(device), prepared(graph(device))
    x = torch.randn(N, F, device=device, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = conv(x, edges)
        return out, *torch.autograd.grad(out.square().sum(), [x, conv.weight])

    first = pytest.raises(RuntimeError, match='a CUDA graph captures the first call of a message')
    with first, torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
    replay, found = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn(N, F, device=device))
    replay()
    torch.testing.assert_close(found, step())


def of_pairs(base: type, **kwargs: Any) -> Any:
    class Layer(base):
        def forward(self, x: Any, edge_index: Any) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (2 * x_i + x_j).tanh() * x_j

    return Layer(**kwargs)


def test_after_a_plain_message_passing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`MessagePassing()` replaces `MessagePassing.propagate` by what takes its arguments alone."""

    class Sorted(FusedMessagePassing):
        def message(self, x_j: Tensor) -> Tensor:  # PyG's code runs it.
            return x_j.sort(0)[0]

    layer, x, edges = Sorted(), torch.randn(N, F, device=device), graph(device)
    expected = layer.propagate(edges, x=x)
    monkeypatch.setattr(MessagePassing, 'propagate', lambda self, edge_index, size=None: None)
    torch.testing.assert_close(layer.propagate(edges, x=x), expected)
    assert why_pygs(layer)


@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_pairs_in_both_flows(device: torch.device, flow: str) -> None:
    """As PyG's template takes them, which every layer of PyG compiles."""
    x = torch.randn(9, 4, dtype=torch.double, device=device)
    edges = torch.randint(9, (2, 30), device=device)
    theirs, own = (of_pairs(base, flow=flow) for base in (MessagePassing, FusedMessagePassing))
    observed = of_pairs(FusedMessagePassing, flow=flow)
    observed.register_message_forward_hook(lambda *args: None)
    accelerated = pyg_fast.accelerate(of_pairs(MessagePassing, flow=flow))
    compiled = torch.compile(own, backend='aot_eager', fullgraph=True)
    for pair in ((x, 3 * x), [x, x + 1], x):
        expected = theirs(pair, edges)
        for layer in (own, accelerated, observed, compiled):
            torch.testing.assert_close(layer(pair, edges), expected)
    assert why_pygs(own) == why_pygs(accelerated) == ''
    assert 'hooks' in why_pygs(observed)


@pytest.mark.parametrize(
    'make',
    [
        lambda **kw: pyg.PointTransformerConv(4, 4, **kw),
        lambda **kw: pyg.GENConv(4, 6, **kw),
        lambda **kw: pyg.FAConv(4, **kw),
        lambda **kw: pyg.EdgeConv(torch.nn.Linear(8, 4), **kw),
    ],
)
def test_layers_that_send_pairs(device: torch.device, make: Any) -> None:
    x = torch.randn(9, 4, dtype=torch.double, device=device)
    edges = torch.randint(9, (2, 30), device=device)
    theirs = make(flow='target_to_source').double().to(device)
    args = {
        'PointTransformerConv': (x, x[:, :3]), 'FAConv': (x, 2 * x), 'EdgeConv': ((x, 2 * x),),
    }.get(type(theirs).__name__, (x,))  # fmt: skip
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    torch.testing.assert_close(ours(*args, edges), theirs(*args, edges))
    assert why_pygs(ours) == ''


class Typed(MessagePassing):
    def __init__(self) -> None:
        super().__init__('sum')
        self.lin = torch.nn.Linear(F, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


class OursTyped(FusedMessagePassing):
    def __init__(self) -> None:
        super().__init__('sum')
        self.lin = torch.nn.Linear(F, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
@pytest.mark.parametrize('make', [lambda: pyg.GraphConv(F, 8), Typed, OursTyped])
@pytest.mark.parametrize('called', [False, True])
def test_torchscript(make: Any, called: bool) -> None:
    x, edges = torch.randn(N, F), graph(torch.device('cpu'))
    ours = pyg_fast.accelerate(make())
    if called:
        ours(x, edges)
    script = torch.jit.script(ours)
    torch.testing.assert_close(script(x, edges), ours(x, edges))
    assert not why_pygs(ours)
    for parameter, other in zip(ours.parameters(), script.parameters(), strict=True):
        assert parameter.data_ptr() == other.data_ptr()


class Takes(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(
        self, x_j: Tensor, edge_index: Tensor, edge_index_j: Tensor, size: Any, size_j: Any
    ) -> Tensor:
        return x_j.relu() / x_j.size(1)


class Reads(Takes):
    def message(
        self, x_j: Tensor, edge_index: Tensor, edge_index_j: Tensor, size: Any, size_j: Any
    ) -> Tensor:
        return (lambda: x_j * (size_j == edge_index.size(1)))()


def test_arguments_that_message_does_not_read(device: torch.device) -> None:
    """They refuse a layer where they are read, not where they are only named."""
    x, edge_index = torch.randn(N, F, device=device), graph(device)
    conv = Takes()
    expected = conv(x, edge_index)
    torch.testing.assert_close(pyg_fast.accelerate(conv)(x, edge_index), expected)
    assert why_pygs(conv) == ''
    (report,) = pyg_fast.accelerate_report(Reads())
    assert report.reason == "'message' reads 'size_j'"
    assert report.cure.startswith('what reads all edges of a source, or how many sources there are')


def test_names_that_main_lacks(device: torch.device) -> None:
    """A script's code runs apart from its module under `python -m cProfile`."""
    scope: dict[str, Any] = {'__name__': '__main__', 'torch': torch, 'Base': MessagePassing}
    exec('class Own(Base):\n    def message(self, x_j): return torch.relu(x_j)', scope)
    layer = pyg_fast.accelerate(scope['Own']())
    layer.propagate(graph(device), x=torch.randn(N, F, device=device))
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.reason == (
        'message reads torch, which the module __main__ lacks, as under python -m cProfile'
    )
    assert 'cProfile.run' in str(pyg_fast.accelerate_report(layer))


def test_after_an_explainer(device: torch.device) -> None:
    """PyG's setter leaves its own `propagate` on a layer."""
    x = torch.randn(N, F, device=device)
    before = pyg.GraphConv(F, 3).to(device)
    before.explain = True
    before.explain = False
    assert 'propagate' in vars(before)
    for layer in (pyg_fast.accelerate(before), pyg_fast.accelerate(pyg.GraphConv(F, 3).to(device))):
        layer(x, graph(device))
        assert not why_pygs(layer)
        layer.explain = True
        layer._edge_mask = torch.zeros(E, device=device)
        layer._loop_mask, layer._apply_sigmoid = None, True
        masked = layer(x, graph(device))
        layer.explain = False
        assert why_pygs(layer) == 'an explainer observed the last call'
        assert not masked.allclose(layer(x, graph(device)))
        assert not why_pygs(layer)


class DropsEdges(FusedMessagePassing):
    def message(self, x_j: Tensor) -> Tensor:
        ones = x_j.new_ones(x_j.size(0), 1)
        return torch.nn.functional.dropout(ones, 0.5, self.training) * x_j


def test_dropout_of_whole_edges(device: torch.device) -> None:
    layer = DropsEdges()
    layer.propagate(graph(device), x=torch.randn(N, F, device=device))
    assert why_pygs(layer).startswith('dropout of what has no row for each edge (File')
    assert 'a feature of edges' in str(pyg_fast.accelerate_report(layer))
