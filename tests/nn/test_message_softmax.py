"""Messages with a softmax over the edges of each destination, beside PyG."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, SimpleConv, TransformerConv
from torch_geometric.nn.aggr import AttentionalAggregation, SoftmaxAggregation
from torch_geometric.utils import scatter, softmax

import pyg_fast
from pyg_fast.nn import FusedGATv2Conv, FusedMessagePassing, FusedTransformerConv
from tests._report import runs_in_blocks, why_pygs
from tests.message._parts import _entry, _passes
from tests.nn._layers import E, F, N, graph, prepared

KINDS = {
    'scores of one end': lambda q, k, v, s: s(k.sum(-1)).unsqueeze(-1) * v,
    'by channel': lambda q, k, v, s: s(q * k) * v,
    'not a multiple': lambda q, k, v, s: (s((q * k).sum(-1, True)) + 1).log() * v + q,
    'two': lambda q, k, v, s: s((q * k).sum(-1, True)) * v - s(-(q * k).mean(-1, True)) * k,
    'heads in the end': lambda q, k, v, s: (
        s((q * k).view(-1, 4, 4).sum(1)).unsqueeze(-1) * v.view(-1, 4, 4)
    ).transpose(1, 2).reshape(-1, 16),
    'divided': lambda q, k, v, s: -(s((q * k).sum(-1, True)) / (1 + v * v)),
}  # fmt: skip


class Attention(FusedMessagePassing):
    kind = 'by channel'

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, q=x.cos(), k=x, v=x.sin())

    def message(
        self, q_i: Tensor, k_j: Tensor, v_j: Tensor, index: Tensor, ptr: Any, size_i: Any
    ) -> Tensor:
        return KINDS[self.kind](q_i, k_j, v_j, lambda score: softmax(score, index, ptr, size_i))


class PlainAttention(Attention):
    propagate = MessagePassing.propagate


def compared(convs: Any, x: Tensor, edges: Tensor, **close: Any) -> None:
    """Results, gradients and second derivatives of both."""
    results = []
    for conv in convs:
        leaf = x.clone().requires_grad_()
        out = conv(leaf, edges)
        weight = torch.linspace(-1, 1, out.numel(), dtype=x.dtype, device=x.device).view_as(out)
        (grad,) = torch.autograd.grad((out * weight).sum(), leaf, create_graph=True)
        found = [out, grad]
        if grad.requires_grad:
            found += torch.autograd.grad(grad.square().sum(), leaf, allow_unused=True)
        results.append([torch.zeros_like(x) if each is None else each for each in found])
    for found in results:
        found += [torch.zeros_like(x)] * (3 - len(found))
    torch.testing.assert_close(*results, equal_nan=True, **close)


# The mean divides the sum.
@pytest.mark.parametrize(
    ('kind', 'aggr'),
    [*((kind, aggr) for kind in KINDS for aggr in ('sum', 'max')), ('two', 'mean'),
     ('divided', 'mean')],
)  # fmt: skip
def test_kinds(kind: str, aggr: str, device: torch.device) -> None:
    convs = Attention(aggr=aggr, strict=True), PlainAttention(aggr=aggr)
    for conv in convs:
        conv.kind = kind
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    compared(convs, x, graph(device))
    assert not runs_in_blocks(convs[0])


@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_hub(flow: str, device: torch.device) -> None:
    """A row of many edges, which is divided on CUDA; most others have none."""
    convs = Attention(flow=flow, strict=True), PlainAttention(flow=flow)
    ends = torch.stack([torch.randint(N, (3000,)), torch.randint(9, (3000,)).clamp(min=6)])
    edges = (ends if flow == 'source_to_target' else ends.flip(0)).to(device)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    compared(convs, x, edges)
    out = convs[0](x, prepared(edges, N))
    torch.testing.assert_close(out, convs[1](x, edges))
    assert torch.equal(out, convs[0](x, prepared(edges, N)))


class Masked(FusedMessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor, score: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, score=score)

    def message(self, x_j: Tensor, score: Tensor, index: Tensor, size_i: Any) -> Tensor:
        return softmax(score, index, num_nodes=size_i) * x_j


class PlainMasked(Masked):
    propagate = MessagePassing.propagate


def test_extreme_scores(device: torch.device) -> None:
    inf, nan = float('inf'), float('nan')
    rows = [
        [-inf, 1.0], [-inf, -inf], [1e30, 1e30], [1e30, -1e30], [1e9, 1e9 + 64], [nan, 1.0],
        [inf, 0.0], [1e4, 1e4 + 0.5], [-1e4, -1e4], [-inf],
    ]  # fmt: skip
    score = torch.tensor([s for row in rows for s in row], device=device).unsqueeze(1)
    target = torch.tensor([k for k, row in enumerate(rows) for _ in row], device=device)
    edges = torch.stack([torch.arange(len(target), device=device) % 7, target])
    x = torch.randn(11, 5, device=device)
    results = []
    for conv in (Masked(strict=True), PlainMasked()):
        leaves = x.clone().requires_grad_(), score.clone().requires_grad_()
        out = conv(leaves[0], edges, leaves[1])
        results.append([out, *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*results, equal_nan=True)


def test_an_edge_of_all_the_weight(device: torch.device) -> None:
    """The gradient of its score is zero, and is not left to rounding times large keys."""
    torch.manual_seed(1)
    conv = TransformerConv(F, 4, heads=2).to(device)
    with torch.no_grad():
        for lin in (conv.lin_query, conv.lin_key):
            lin.weight *= 1e15
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    x = torch.randn(N, F, device=device)
    end = torch.arange(N, device=device)
    edges = torch.stack([torch.cat([end, (end + 1) % N, (end + 5) % N]), end.repeat(3)])
    grads = []
    for each in (ours, conv):
        out = each(x, edges)
        weight = torch.linspace(-1, 1, out.numel(), device=device).view_as(out)
        weights = [each.lin_query.weight, each.lin_key.weight, each.lin_value.weight]
        grads.append(torch.autograd.grad(out, weights, weight))
    torch.testing.assert_close(*grads)
    assert grads[1][2].any()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half(dtype: torch.dtype, device: torch.device) -> None:
    """The error against float64 is at most PyG's."""
    torch.manual_seed(1)
    x = torch.randn(N, F, device=device).to(dtype)
    for kind in ('by channel', 'two'):
        errors, exact = [], None
        for conv, own in ((PlainAttention(), torch.float64), (PlainAttention(), dtype),
                          (Attention(strict=True), dtype)):  # fmt: skip
            conv.kind = kind
            leaf = x.to(own).requires_grad_()
            out = conv(leaf, graph(device))
            (grad,) = torch.autograd.grad(out.sin().sum(), leaf)
            got = torch.cat([out, grad]).double()
            exact = got if exact is None else exact
            errors.append((got - exact).norm() / exact.norm())
        assert errors[2] <= errors[1]


def shifted(s: Tensor, index: Tensor, size: int) -> Tensor:
    return s - scatter(s.detach(), index, 0, size, 'max').index_select(0, index)


def sums(s: Tensor, index: Tensor, size: int) -> Tensor:
    return scatter(s, index, 0, size, 'sum').index_select(0, index) + 1e-16


def shares(s: Tensor, index: Tensor, size: int) -> Tensor:
    return s / sums(s, index, size)


REFUSED = {
    'own sum': (
        lambda s, i, n: s / scatter(s, i, 0, n, 'sum').index_select(0, i),
        'the message of an edge depends on other edges'),
    'maximum': (
        lambda s, i, n: s - scatter(s.detach(), i, 0, n, 'max').index_select(0, i),
        'the message of an edge depends on other edges'),
    'twice': (lambda s, i, n: softmax(softmax(s, i, None, n), i, None, n), 'a softmax of another'),
    'number': (lambda s, i, n: s * n, 'of edges or nodes is used as a number'),
    'rows': (lambda s, i, n: s * i.unsqueeze(-1), ''),
    'no exponential': (
        lambda s, i, n: s * shares(shifted(s, i, n), i, n), 'depends on other edges'),
    'detached numerator': (
        lambda s, i, n: s * shifted(s, i, n).exp().detach() / sums(shifted(s, i, n).exp(), i, n),
        'depends on other edges'),
    'detached maximum': (
        lambda s, i, n: s * shares((s - shifted(s.detach(), i, n)).exp(), i, n),
        'depends on other edges'),
}  # fmt: skip


class Refused(FusedMessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, index: Tensor, size_i: Any) -> Tensor:
        return REFUSED[self.kind][0](x_j, index, size_i)


class PlainRefused(Refused):
    propagate = MessagePassing.propagate


@pytest.mark.parametrize('kind', REFUSED)
def test_refused(kind: str, device: torch.device) -> None:
    convs = Refused(), PlainRefused()
    for conv in convs:
        conv.kind = kind
    compared(convs, torch.rand(N, F, dtype=torch.float64, device=device), graph(device))
    assert why_pygs(convs[0])
    assert REFUSED[kind][1] in why_pygs(convs[0])


def test_sum_over_some_columns(device: torch.device) -> None:
    def message(x: Tensor, index: Tensor, size_i: int) -> Tensor:
        power = shifted(x, index, size_i).exp()
        total = x.new_zeros(size_i, 1).scatter_add_(0, index.view(-1, 1), power)
        return power / total.index_select(0, index)

    x, edges = torch.rand(N, F, dtype=torch.float64, device=device), graph(device)
    out = pyg_fast.ops.message_passing(edges, message, src={'x': x})
    expected = scatter(message(x[edges[0]], edges[1], N), edges[1], 0, N)
    torch.testing.assert_close(out, expected)


def test_result_of_nodes(device: torch.device) -> None:
    """A message that is no value of the edges, with as many edges as nodes."""
    edges = torch.randint(N, (2, N), device=device)
    x = torch.rand(N, F, dtype=torch.float64, device=device)

    def message(x: Tensor, index: Tensor, size_i: int) -> Tensor:
        return scatter(x, index, 0, size_i)

    out = pyg_fast.ops.message_passing(edges, message, src={'x': x})
    torch.testing.assert_close(
        out, scatter(message(x[edges[0]], edges[1], N), edges[1], 0, N)
    )  # fmt: skip


@pytest.mark.parametrize('dtype', [torch.bool, torch.int64, torch.float16, torch.float32])
def test_converted_scores(dtype: torch.dtype, device: torch.device) -> None:
    score = torch.randn(E, 1, device=device).mul(3).to(dtype)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    edges = graph(device)

    def message(x: Tensor, score: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax(score.double(), index, None, size_i) * x

    expected = scatter(message(x[edges[0]], score, edges[1], N), edges[1], 0, N)
    out = pyg_fast.ops.message_passing(edges, message, src={'x': x}, edge={'score': score})
    torch.testing.assert_close(out, expected)
    leaf = x.requires_grad_()
    out = pyg_fast.ops.message_passing(edges, message, src={'x': leaf}, edge={'score': score})
    torch.testing.assert_close(out, expected)


def test_transposed_input(device: torch.device) -> None:
    convs = Attention(strict=True), PlainAttention()
    x = torch.randn(F, N, dtype=torch.float64, device=device)
    results = []
    for conv in convs:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            conv(leaf.t(), graph(device)).sin().sum(), leaf, create_graph=True
        )
        results.append([grad, *torch.autograd.grad(grad.square().sum(), leaf)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    'aggr',
    [
        SoftmaxAggregation(0.5), SoftmaxAggregation(learn=True, channels=F),
        SoftmaxAggregation(semi_grad=True), AttentionalAggregation(torch.nn.Linear(F, 1)),
    ],
    ids=['softmax', 'learnt', 'semi_grad', 'attention'],
)  # fmt: skip
def test_aggregations(aggr: Any, device: torch.device) -> None:
    theirs = SimpleConv(copy.deepcopy(aggr)).double().to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    compared((ours, theirs), torch.randn(N, F, dtype=torch.float64, device=device), graph(device))
    assert why_pygs(ours) == ''


def test_dropout(device: torch.device) -> None:
    """The weights of a softmax drop after it: their sums have the same mean, and gradients see the
    same ones."""
    conv = FusedTransformerConv(F, 8, 2, dropout=0.5, root_weight=False).double().to(device)
    x = torch.randn(N, F, dtype=torch.float64, device=device)
    ends = torch.stack([torch.arange(4000) % N, torch.arange(4000) * 7 % 3]).to(device)

    def step(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return conv(x, ends)[:3]

    assert pyg_fast.accelerate_report(conv)[0].ran is None
    assert torch.equal(step(1), step(1))
    assert why_pygs(conv) == ''
    mean = torch.stack([step(k) for k in range(20)]).mean(0)
    kept = conv.eval()(x, ends)[:3]
    assert 0 < (mean - kept).norm() < 0.2 * kept.norm()
    conv.train()
    x.requires_grad_()
    change = 1e-6 * torch.randn_like(x)
    (grad,) = torch.autograd.grad(step(1).square().sum(), x)
    with torch.no_grad():
        x += change
        far = step(1).square().sum()
        x -= 2 * change
        near = step(1).square().sum()
    torch.testing.assert_close((far - near) / 2, (grad * change).sum(), rtol=1e-4, atol=1e-12)


def test_transformer_conv(device: torch.device) -> None:
    conv = FusedTransformerConv(F, 8, 2, edge_dim=3).to(device)
    theirs = TransformerConv(F, 8, 2, edge_dim=3).to(device)
    theirs.load_state_dict(conv.state_dict())
    x, attr = torch.randn(N, F, device=device), torch.randn(E, 3, device=device)
    edges = graph(device)
    torch.testing.assert_close(conv(x, edges, attr), theirs(x, edges, attr))
    assert why_pygs(conv) == ''
    out, (_, alpha) = conv(x, edges, attr, return_attention_weights=True)
    expected, (_, weights) = theirs(x, edges, attr, return_attention_weights=True)
    torch.testing.assert_close((out, alpha), (expected, weights))
    assert why_pygs(conv) == 'return_attention_weights'
    assert conv._alpha is None
    assert type(copy.deepcopy(conv)) is FusedTransformerConv


@pytest.mark.parametrize('edge_dim', [None, 3])
def test_several_tiles_of_heads(edge_dim: int | None, device: torch.device) -> None:
    torch.manual_seed(1)
    convs = [cls(F, 24, 3, edge_dim=edge_dim) for cls in (FusedTransformerConv, TransformerConv)]
    edges = torch.stack([torch.randint(N, (600,)), torch.randint(9, (600,)).clamp(min=6)])
    x, attr = torch.randn(N, F, dtype=torch.float64), torch.randn(600, 3, dtype=torch.float64)
    results = []
    for conv in convs:
        conv.double().to(device).load_state_dict(convs[0].state_dict())
        leaves = [t.to(device).requires_grad_() for t in (x.clone(), attr.clone())]
        leaves = leaves[: 1 if edge_dim is None else 2]
        out = conv(leaves[0], edges.to(device), *leaves[1:])
        leaves += conv.parameters()
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    assert why_pygs(convs[0]) == ''
    torch.testing.assert_close(*results)


WRITTEN: dict[str, Any] = {
    'message': lambda: Attention(strict=True),
    'Transformer': lambda: FusedTransformerConv(F, 4, 2),
    'Transformer, mean': lambda: FusedTransformerConv(F, 4, 2, concat=False, root_weight=False),
    'Transformer, no root': lambda: FusedTransformerConv(F, 4, 2, root_weight=False),
    'GATv2': lambda: FusedGATv2Conv(F, 4, 2, edge_dim=3),
    'GATv2, no bias': lambda: FusedGATv2Conv(F, 4, 2, edge_dim=3, bias=False),
    'GATv2, residual': lambda: FusedGATv2Conv(F, 4, 2, edge_dim=3, bias=False, residual=True),
}


@pytest.mark.parametrize('name', WRITTEN)
def test_result_is_written(name: str, device: torch.device) -> None:
    """The backward pass needs no result that the caller may overwrite."""
    conv = WRITTEN[name]().double().to(device)
    x = torch.randn(N, F, dtype=torch.float64, device=device, requires_grad=True)
    edges, inputs = graph(device), []
    if 'GATv2' in name:
        inputs.append(torch.randn(edges.size(1), 3, dtype=torch.float64, device=device))
    grads = []
    for write in (False, True):
        out = conv(x, edges, *inputs)
        if write:
            out += 1
        grads.append(torch.autograd.grad(out, x, torch.ones_like(out))[0])
    assert not why_pygs(conv)
    torch.testing.assert_close(*grads)


class Twice(FusedMessagePassing):
    """Propagates, reverses the edges in place, and propagates again."""

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        out = self.propagate(edge_index, x=x)
        edge_index.copy_(edge_index.flip(0))
        return out - self.propagate(edge_index, x=x)

    def message(self, x_j: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x_j)


@pytest.mark.parametrize('inference', [False, True])
def test_graph_written_between_two_propagates(inference: bool, device: torch.device) -> None:
    with torch.inference_mode(inference):
        x, edges = torch.randn(N, F, device=device), graph(device).clone()
        (a, b), m = edges.clone(), torch.tanh(x)
        zero = torch.zeros_like(x)
        expected = zero.index_add(0, b, m[a]) - zero.index_add(0, a, m[b])
        torch.testing.assert_close(Twice(strict=True)(x, edges), expected)


def test_several_gradients_at_once(device: torch.device) -> None:
    conv, plain = Attention(strict=True), PlainAttention()
    x = torch.randn(N, F, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.randn(3, N, F, dtype=torch.float64, device=device)
    found = [
        torch.autograd.grad(each(x, graph(device)), x, weights, is_grads_batched=True)
        for each in (conv, plain)
    ]
    torch.testing.assert_close(*found)


@pytest.mark.parametrize('kwargs', [
    {}, {'bias': False}, {'root_weight': False}, {'beta': True}, {'concat': False},
    {'beta': True, 'concat': False},
], ids=str)  # fmt: skip
def test_maps_of_transformer(kwargs: dict[str, Any], device: torch.device) -> None:
    conv = FusedTransformerConv(F, 8, 2, **kwargs).to(device)
    theirs = TransformerConv(F, 8, 2, **kwargs).to(device)
    theirs.load_state_dict(conv.state_dict())
    x = torch.randn(30, F, device=device, requires_grad=True)
    edge_index = torch.randint(0, 30, (2, 90), device=device)
    outs = [each(x, edge_index) for each in (conv, theirs)]
    torch.testing.assert_close(*outs)
    grad = torch.randn_like(outs[0])
    found = [
        torch.autograd.grad(out, [x, *each.parameters()], grad, materialize_grads=True)
        for out, each in zip(outs, (conv, theirs), strict=True)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    # A hook on a map of the layer runs, and changes the result.
    for each in (conv, theirs):
        each.lin_key.register_forward_hook(lambda module, args, out: 2 * out)
    hooked = [each(x, edge_index) for each in (conv, theirs)]
    assert not torch.allclose(hooked[0], outs[0])
    torch.testing.assert_close(*hooked)


@pytest.mark.parametrize('dropout', [0.0, 0.4])
@pytest.mark.parametrize('of_edges', [False, True])
def test_values_that_passes_share(
    dropout: float, of_edges: bool, limits: Callable[..., None], record_calls: Callable[..., list]
) -> None:
    """The pass over sources reads those of edges from the pass over destinations."""
    made = record_calls(_passes, 'share_edge_values', lambda shared, *_: shared)
    theirs = TransformerConv(F, 8, 4, edge_dim=16, dropout=dropout).double()
    edges = graph('cpu')
    x, attr = torch.randn(N, F).double(), torch.randn(E, 16).double()
    results = []
    for least in (None, 1 << 30, 0):
        conv = theirs
        if least is not None:
            limits(values_gathered=least)
            _entry._passes_for.cache_clear()
            _entry._stores.clear()
            conv = FusedTransformerConv(F, 8, 4, edge_dim=16, dropout=dropout).double()
            conv.load_state_dict(theirs.state_dict())
        leaf, raw = x.clone().requires_grad_(), attr.clone().requires_grad_(of_edges)
        torch.manual_seed(0)
        out = conv(leaf, edges, raw)
        leaves = [leaf, *[raw] * of_edges, *conv.parameters()]
        results.append(torch.autograd.grad((out * out.detach().cos()).sum(), leaves))
    _entry._stores.clear()
    _entry._passes_for.cache_clear()  # Other tests plan with the usual number.
    alone, read = made
    assert alone[0].shared == ()
    loads = {
        value.attrs
        for at in read[1].pass_.program.reachable(out.at for out in read[1].pass_.outs)
        if (value := read[1].pass_.program[at]).op == 'load'
    }
    assert {load for load in loads if load[0] in ('edge', 'most', 'dot')} == {*read[0].shared}
    torch.testing.assert_close(results[1], results[2], rtol=1e-13, atol=1e-13)
    if dropout == 0:
        torch.testing.assert_close(results[0], results[2])


class WithoutSize(MessagePassing):
    how = 'index'

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, q=x.cos(), x=x)

    def message(
        self, q_i: Tensor, x_j: Tensor, index: Tensor, ptr: Any, edge_index_i: Tensor,
        dim_size: Any, size_i: Any,
    ) -> Tensor:  # fmt: skip
        score, number = (q_i * x_j).sum(-1, keepdim=True), int(index.max()) + 1
        if self.how == 'index':
            return softmax(score, index) * x_j
        if self.how == 'ptr':
            return softmax(score, edge_index_i, ptr) * x_j
        if self.how == 'dim_size':
            return softmax(score, index, num_nodes=dim_size) * x_j
        if self.how == 'last':
            return x_j * (index == number - 1).view(-1, 1)
        return x_j * {'rest': number % 2, 'number': number, 'least': min(size_i, 5)}[self.how]


@pytest.mark.parametrize('how', ['index', 'ptr', 'dim_size', 'last', 'rest', 'number', 'least'])
def test_softmax_without_size(how: str, device: torch.device) -> None:
    """The number of nodes is only a size: the softmax is the same with more nodes."""
    edges = torch.randint(N - 3, (2, E), generator=torch.Generator().manual_seed(0)).to(device)
    x = torch.randn(N, 8, device=device)
    theirs = WithoutSize()
    theirs.how = how
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    compared([theirs, ours], x, edges, atol=1e-4, rtol=1e-4)
    runs = how in ('index', 'ptr', 'dim_size')
    assert (why_pygs(ours) == '') == runs
    assert runs or 'used as a number' in why_pygs(ours)


class Counted(FusedMessagePassing):
    """Gives the number of nodes to its message, as published layers do."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, count=x.size(0), factor=2)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, count: int, factor: int) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, num_nodes=count)
        return factor * alpha.view(-1, 1) * x_j


class PlainCounted(Counted):
    propagate = MessagePassing.propagate


def test_a_number_of_nodes_that_changes(device: torch.device) -> None:
    conv = Counted()
    for num_nodes in (N, N + 1, 2, N + 2, 7):  # Two is the factor.
        x = torch.randn(num_nodes, 8, dtype=torch.float64, device=device)
        compared((conv, PlainCounted()), x, torch.randint(num_nodes, (2, E), device=device))
        assert not why_pygs(conv)


class Attribute(Counted):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, factor: int) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, num_nodes=self.num_nodes)
        return factor * alpha.view(-1, 1) * x_j


TOO_SMALL = f'a number of nodes in message, {N + 3}, is too small'


class PlainAttribute(Attribute):
    propagate = MessagePassing.propagate


def test_a_number_of_nodes_of_the_layer(device: torch.device) -> None:
    convs: Any = Attribute(), PlainAttribute()
    for conv in convs:
        conv.num_nodes = N + 3
    for num_nodes in (N, N + 3, N + 4, N):
        x = torch.randn(num_nodes, 8, dtype=torch.float64, device=device)
        compared(convs, x, torch.randint(N, (2, E), device=device))
        is_enough = num_nodes <= N + 3
        assert why_pygs(convs[0]) == ('' if is_enough else TOO_SMALL)


CUTS: dict[str, Callable[..., Tensor]] = {
    'slice': lambda x, count: x[:, :count], 'chunk': lambda x, count: x.chunk(count, -1)[0],
    'narrow': lambda x, count: x.narrow(1, 0, count),
    'split': lambda x, count: x.split(count, -1)[0],
}  # fmt: skip


class Cut(Counted):
    kind = 'slice'

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, count=4)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, count: int) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index).view(-1, 1)
        return alpha * CUTS[self.kind](x_j, count)


class PlainCut(Cut):
    propagate = MessagePassing.propagate


@pytest.mark.parametrize('kind', CUTS)
def test_a_number_that_is_that_of_nodes_by_chance(kind: str, device: torch.device) -> None:
    convs: Any = Cut(), PlainCut()
    for conv in convs:
        conv.kind = kind
    for num_nodes in (4, N, 4):
        x = torch.randn(num_nodes, 8, dtype=torch.float64, device=device)
        compared(convs, x, torch.randint(num_nodes, (2, E), device=device))
        assert not why_pygs(convs[0])


class CutByNodes(Cut):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax((x_i * x_j).sum(-1), index).view(-1, 1) * CUTS[self.kind](x_j, size_i)


class PlainCutByNodes(CutByNodes):
    propagate = MessagePassing.propagate


@pytest.mark.parametrize('kind', ['slice', 'chunk', 'split'])
def test_a_cut_by_the_number_of_nodes(kind: str, device: torch.device) -> None:
    """A graph of more nodes than channels does not tell."""
    convs: Any = CutByNodes(), PlainCutByNodes()
    for conv in convs:
        conv.kind = kind
    for num_nodes in (N, 4):
        x = torch.randn(num_nodes, 8, dtype=torch.float64, device=device)
        compared(convs, x, torch.randint(num_nodes, (2, E), device=device))
