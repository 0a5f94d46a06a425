"""Messages whose meaning is easily lost: a kernel gives PyG's result, or PyG's code runs."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter

from pyg_fast import accelerate
from tests._functions import Sign
from tests._report import why_pygs

N, E, C = 7, 24, 4


def edges(device: torch.device) -> Tensor:
    """With a self-loop and two isolated nodes."""
    out = torch.randint(N - 2, (2, E), generator=torch.Generator().manual_seed(0))
    out[:, 0] = 1
    return out.to(device)


def discarded(x_j: Tensor) -> Tensor:
    out = x_j * 3
    out.add_(1)
    out[:, 0].mul_(2)
    F.relu(out, inplace=True)
    return out


def stopped(x_j: Tensor) -> Tensor:
    with torch.no_grad():
        gate = x_j * 2
    return gate * x_j


def hooked(x_j: Tensor) -> Tensor:
    out = x_j * 2
    out.register_hook(lambda grad: grad * 3)
    return out


def deep(x_j: Tensor) -> Tensor:
    for _ in range(30):
        x_j = (x_j + x_j.tanh() + x_j) / 3
    return x_j


MESSAGES: dict[str, Callable[[Tensor], Tensor]] = {
    'in-place, result unused': discarded,
    'detach': lambda x_j: x_j * x_j.detach(),
    'no_grad': stopped,
    'autograd function': lambda x_j: Sign.apply(x_j),
    'hook': hooked,
    'requires_grad': lambda x_j: x_j * 2 if x_j.requires_grad else x_j,
    'is_leaf': lambda x_j: x_j * 2 if x_j.is_leaf else x_j,
    'rows of halves': lambda x_j: x_j.view(-1, 2).sum(-1).view(-1, 2),
    'columns of halves': lambda x_j: x_j.view(-1, 2)[:, 1:].view(-1, 2),
    'wider': lambda x_j: (x_j.double() * 1e2).exp().log(),
    'cancels': lambda x_j: ((x_j.double() + 1e8) - 1e8).float(),
    'rounds': lambda x_j: (x_j * 10).half().float(),
    'mean of flags': lambda x_j: ((x_j > 0) * 1.0).mean(-1, keepdim=True) * x_j,
    'sum of flags': lambda x_j: ((x_j > 0) + (x_j < 1)) * x_j,
    'wide constant': lambda x_j: x_j * torch.ones(1, dtype=torch.float64, device=x_j.device),
    'norm': lambda x_j: (x_j - x_j.roll(0)).norm(dim=-1, keepdim=True) + x_j.norm(dim=-1)[:, None],
    'normalize': lambda x_j: F.normalize(x_j - x_j.mean(-1, keepdim=True), dim=-1),
    'softplus': lambda x_j: F.softplus(x_j * 100),
    'elu': lambda x_j: F.elu(x_j * 100) + F.selu(x_j * 100) + F.celu(x_j * 100, 0.5),
    'borders': lambda x_j: F.relu6(x_j.round()) + F.hardtanh(x_j.round()) + x_j.clamp(-1, 1),
    'hardsigmoid': lambda x_j: F.hardsigmoid(x_j.round() * 3),
    'three dimensions': lambda x_j: x_j.view(-1, 2, 2),
    'deep': deep,
    'one number': lambda x_j: x_j.square().sum(-1)[:, None],
    'repeat': lambda x_j: x_j[:, :2].repeat(1, 2) * x_j.tile(2)[:, 2:6],
    'repeat of edges': lambda x_j: x_j.repeat(2, 1)[:E] * x_j,
    'constants': lambda x_j: (x_j * 2 - torch.ones(C, device=x_j.device) * 2) * x_j,
}  # fmt: skip


class Layer(MessagePassing):
    def __init__(self, fn: Callable[..., Tensor], aggr: str = 'sum') -> None:
        super().__init__(aggr, node_dim=0)
        self.fn = fn
        self.lin = torch.nn.Linear(C, C)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.fn(x_j)


def compare(theirs: Any, x: Tensor, graph: Tensor, ours: Any = None) -> Any:
    """Runs both; returns the accelerated layer."""
    ours = accelerate(copy.deepcopy(theirs)) if ours is None else ours
    results = []
    for conv in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out = conv(leaf, graph)
        weight = torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out)
        (grad,) = torch.autograd.grad(out, leaf, weight.to(out.dtype))
        results.append((out.detach(), grad))
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=2e-5)
    return ours


RUN_AS_KERNELS = 'detach', 'no_grad', 'repeat'


@pytest.mark.parametrize('name', MESSAGES)
def test_meaning(name: str, device: torch.device) -> None:
    x = torch.randn(N, C, generator=torch.Generator().manual_seed(1)).to(device)
    x[0], x[1] = 1, torch.tensor([2, -1, 0.5, 3])
    theirs = Layer(MESSAGES[name]).to(device)
    ours = compare(theirs, x, edges(device))
    assert name not in RUN_AS_KERNELS or why_pygs(ours) == ''


class SumsWithoutGradients(MessagePassing):
    """Gradients are off where the captured graph ends, and on for a value of the edges."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) + self.edges.sum(0)

    def message(self, x_j: Tensor) -> Tensor:
        self.edges = x_j * 3
        return self.edges

    @torch.no_grad()
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return scatter(inputs, index, 0, dim_size)


def test_gradients_off_where_the_message_ends(device: torch.device) -> None:
    x = torch.randn(N, C, device=device)
    ours = compare(SumsWithoutGradients().to(device), x, edges(device))
    assert why_pygs(ours) == ''


def test_no_grad_message(device: torch.device) -> None:
    theirs = Layer(torch.no_grad()(lambda x_j: x_j * 2))
    ours = accelerate(copy.deepcopy(theirs))
    x = torch.randn(N, C, device=device, requires_grad=True)
    assert ours(x, edges(device)).requires_grad is theirs(x, edges(device)).requires_grad is False


class Compared(MessagePassing):
    """A threshold and features of edges have no influence on the gradient."""

    def __init__(self, hoisted: bool) -> None:
        super().__init__('sum')
        self.hoisted = hoisted
        self.lin, self.threshold = torch.nn.Linear(C, C), torch.nn.Parameter(torch.zeros(C))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        limit = self.lin(x_i) if self.hoisted else x_i
        return torch.where(edge_attr > self.threshold, x_j, x_j * (limit > x_j))


@pytest.mark.parametrize('hoisted', [False, True])
def test_no_gradient_of_what_is_only_compared(hoisted: bool, device: torch.device) -> None:
    theirs = Compared(hoisted).to(device)
    ours, found = accelerate(copy.deepcopy(theirs)), []
    for conv in (theirs, ours):
        x, edge_attr = (
            torch.randn(n, C, generator=torch.Generator().manual_seed(n)).to(device) for n in (N, E)
        )
        inputs = [x.requires_grad_(), edge_attr.requires_grad_(), *conv.parameters()]
        grads = torch.autograd.grad(
            conv(x, edges(device), edge_attr).sum(), inputs, allow_unused=True
        )
        found.append([grad is None for grad in grads])
    assert why_pygs(ours) == ''
    assert found[0] == found[1] == [False, *[True] * (len(found[0]) - 1)]


class Gated(Layer):
    """Maps nodes before the kernel, or edges in it."""

    def __init__(self, hoisted: bool, aggr: str) -> None:
        super().__init__(lambda x_j: x_j, aggr)
        self.hoisted = hoisted

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(self.lin(x_i) if self.hoisted else x_i * self.lin.bias) * x_j


@pytest.mark.parametrize('aggr', ['sum', 'max'])
@pytest.mark.parametrize('hoisted', [False, True])
def test_features_made_in_inference_mode(aggr: str, hoisted: bool, device: torch.device) -> None:
    """As those of a frozen encoder: PyG trains on the rows that it gathers."""
    theirs = Gated(hoisted, aggr).to(device)
    ours = accelerate(copy.deepcopy(theirs))
    with torch.inference_mode():
        x = torch.randn(N, C, device=device)
    for conv in (theirs, ours):
        conv(x, edges(device)).sum().backward()
    assert why_pygs(ours) == ''
    torch.testing.assert_close(ours.lin.bias.grad, theirs.lin.bias.grad)


def test_hooks_of_modules(device: torch.device) -> None:
    """Those registered after the first call, too."""

    class Hooked(Layer):
        def message(self, x_j: Tensor) -> Tensor:
            return self.lin(x_j).tanh()

    theirs = Hooked(lambda x_j: x_j).to(device)
    x, ours = torch.randn(N, C, device=device), None
    for _ in range(2):
        ours = compare(theirs, x, edges(device), ours)
        for conv in (theirs, ours):
            conv.lin.register_forward_hook(lambda module, args, out: out * 5)


def scale(factor: float) -> Any:
    """An object of a new class."""
    out = type('Scale', (), {})()
    out.factor = factor
    return out


def test_captures_are_looked_up(device: torch.device) -> None:
    """A capture is found without Dynamo if its guards hold. Otherwise the message is captured
    again, also after the class that the guards know by its address was freed."""

    class Scaled(Layer):
        scale = scale(1)

        def message(self, x_j: Tensor) -> Tensor:
            return self.lin(x_j).tanh() * self.scale.factor

    theirs, graph = Scaled(lambda x_j: x_j).to(device), edges(device)
    x = torch.randn(N, C, device=device)
    ours = compare(theirs, x, graph)
    entry = ours._fused_entry
    compare(theirs, x, graph, ours)
    assert entry.num_captures == 1
    for count in (1, 2, 3):
        theirs.scale = ours.scale = None
        gc.collect()
        theirs.scale = ours.scale = scale(count % 2 + 1)
        for _ in range(2):
            compare(theirs, x, graph, ours)
        assert entry.num_captures == 1 + count
    torch._dynamo.reset()
    compare(theirs, x, graph, ours)
    assert entry.num_captures == 5
    assert why_pygs(ours) == ''


@pytest.mark.parametrize('which', [0, 1, 2])
def test_one_gradient(which: int, device: torch.device) -> None:
    """The backward pass gets the transposed graph if it needs it, for each input alone."""

    class Mixed(Layer):
        def forward(self, k: Tensor, q: Tensor, e: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, k=k, q=q, e=e)

        def message(self, k_i: Tensor, q_j: Tensor, e: Tensor) -> Tensor:
            return torch.sigmoid(k_i + q_j) * (self.lin(q_j) > 0).float() * e

    theirs = Mixed(lambda x_j: x_j).to(device)
    ours = accelerate(copy.deepcopy(theirs))
    values = [torch.randn(n, C, device=device) for n in (N, N, E)]
    values[which].requires_grad_()
    grads = [
        torch.autograd.grad(conv(*values, edges(device)).sin().sum(), values[which])
        for conv in (theirs, ours)
    ]
    assert why_pygs(ours) == ''
    torch.testing.assert_close(*grads)


def test_writes_to_buffers(device: torch.device) -> None:
    class Counts(Layer):
        def message(self, x_j: Tensor) -> Tensor:
            self.steps.add_(1)
            return x_j * self.steps

    conv = Counts(lambda x_j: x_j)
    conv.register_buffer('steps', torch.zeros(1))
    ours = accelerate(conv.to(device))
    for _ in range(3):
        ours(torch.ones(N, C, device=device), edges(device))
    assert ours.steps.item() == 3


def test_side_effects_of_refused_messages(device: torch.device) -> None:
    class Counts(Layer):
        count = 0

        def message(self, x_j: Tensor) -> Tensor:
            self.count += 1
            return (x_j * x_j).tanh() @ self.lin.weight

    ours = accelerate(Counts(lambda x_j: x_j, 'max').to(device))
    for _ in range(3):
        ours(torch.ones(N, C, device=device), edges(device))
    assert ours.count == 3


@pytest.mark.parametrize('dtype', [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_integers(dtype: torch.dtype, device: torch.device) -> None:
    """Numbers that float32 or float64 would round compare as integers."""

    class Later(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor, t: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, t=t.view(-1, 1))

        def message(self, x_j: Tensor, t_i: Tensor, t_j: Tensor) -> Tensor:
            return torch.where(t_i < t_j, x_j, -x_j) * torch.where(t_j == 3, 2.0, 1.0)

    start = {torch.int64: 2**60, torch.int32: 2**30}.get(dtype, 0)
    t = (start + torch.arange(N, device=device) % 5).to(dtype)
    theirs, x = Later().to(device), torch.randn(N, C, device=device)
    found = accelerate(copy.deepcopy(theirs))(x, edges(device), t)
    torch.testing.assert_close(found, theirs(x, edges(device), t))


def test_inference_mode(device: torch.device) -> None:
    theirs = Layer(lambda x_j: x_j.tanh()).to(device)
    ours = accelerate(copy.deepcopy(theirs))
    with torch.inference_mode():
        x, graph = torch.randn(N, C, device=device), edges(device)
        torch.testing.assert_close(ours(x, graph), theirs(x, graph))


def test_several_gradients_at_once(device: torch.device) -> None:
    theirs = Layer(lambda x_j: x_j.tanh()).to(device)
    ours, graph = accelerate(copy.deepcopy(theirs)), edges(device)
    x = torch.randn(N, C, device=device)
    found, expected = (
        torch.autograd.functional.jacobian(lambda x: conv(x, graph), x, vectorize=True)  # noqa: B023
        for conv in (ours, theirs)
    )
    torch.testing.assert_close(found, expected)


def test_sources_that_no_message_reads(device: torch.device) -> None:
    class Own(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=(None, x))

        def message(self, x_i: Tensor) -> Tensor:
            return x_i * 2

    graph, x = edges(device), torch.randn(N, C, device=device)
    graph[0] += 100
    torch.testing.assert_close(accelerate(Own())(x, graph), Own()(x, graph))


def test_changes_end_in_pyg(device: torch.device, limits: Callable[..., None]) -> None:
    """Each of them is another kernel: after many of them PyG's code runs."""
    theirs = Layer(lambda x_j: x_j).to(device)
    ours, graph = accelerate(copy.deepcopy(theirs)), edges(device)
    x = torch.ones(N, C, device=device)
    limits(captures=2)
    for name in ('relu', 'tanh', 'exp', 'sigmoid'):
        for conv in (theirs, ours):
            conv.fn = lambda x_j, name=name: getattr(torch, name)(x_j)
        torch.testing.assert_close(ours(x, graph), theirs(x, graph))
    assert 'changed' in why_pygs(ours)


class Mapped(Layer):
    """A linear map at the end, which may run after the sum."""

    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(self.fn(x_j))


def test_sums_before_a_map_do_not_overflow(device: torch.device) -> None:
    theirs = Mapped(torch.relu)
    theirs.lin.weight.data.mul_(1e-3)
    theirs, graph = theirs.half().to(device), edges(device)
    graph[1] = 2
    x = torch.full((N, C), 9000.0, dtype=torch.half, device=device)
    ours = accelerate(copy.deepcopy(theirs))
    exact = copy.deepcopy(theirs).double()(x.double(), graph)
    torch.testing.assert_close(ours(x, graph).double(), exact, atol=1, rtol=1e-2)
    assert why_pygs(ours) == ''


def doubled(x_j: Tensor) -> Tensor:
    for _ in range(24):
        x_j = (x_j + x_j.detach()) / 2 - x_j
    return x_j


def rolled(x_j: Tensor) -> Tensor:
    x_j = F.normalize(x_j, dim=-1)
    for _ in range(16):
        x_j = torch.cat([x_j[:, 1:], x_j[:, :1]], -1) + x_j * 0.1
    return x_j


@pytest.mark.parametrize('fn', [doubled, rolled])
def test_values_that_are_read_twice_each(fn: Callable[..., Tensor], device: torch.device) -> None:
    """Their number of readings doubles with each line: a plan takes each once."""
    x = torch.randn(N, C, generator=torch.Generator().manual_seed(1)).to(device)
    compare(Mapped(fn).to(device), x, edges(device))
    compare(Layer(fn).to(device), x, edges(device))


def test_autocast_disabled_in_a_message(device: torch.device) -> None:
    class Exact(Layer):
        def message(self, x_j: Tensor) -> Tensor:
            with torch.autocast(x_j.device.type, enabled=False):
                return self.lin(x_j.float()).tanh()

    theirs, x = Exact(lambda x_j: x_j).to(device), torch.randn(N, C, device=device)
    ours = accelerate(copy.deepcopy(theirs))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found, expected = (conv(x, edges(device)) for conv in (ours, theirs))
    torch.testing.assert_close(found, expected)


class Normed(Layer):
    """Norms of the numbers of an edge."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__(fn)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(C), torch.nn.GroupNorm(2, C)])

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:  # type: ignore[override]
        return self.fn(x_i * x_j, *self.norms)


@pytest.mark.parametrize('fn', [
    lambda m, layer, group: layer(m).relu(),
    lambda m, layer, group: group(m).sin(),
    lambda m, layer, group: F.layer_norm(m, (C,)),
    lambda m, layer, group: F.rms_norm(m, (C,), layer.weight),
    lambda m, layer, group: m * m.var(-1, keepdim=True),
    lambda m, layer, group: m / (1 + m.std(-1, unbiased=False, keepdim=True)),
    lambda m, layer, group: sum(torch.var_mean(m, -1, keepdim=True)) * m,
], ids=['layer', 'group', 'without weights', 'rms', 'var', 'std', 'var_mean'])  # fmt: skip
@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_norms(fn: Callable[..., Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Their result and gradients, those of parameters too, and of equal numbers."""
    theirs = Normed(fn).to(device, dtype)
    ours = accelerate(copy.deepcopy(theirs))
    x = torch.randn(N, C, device=device).to(dtype)
    x[:2] = 2.0
    found = []
    for conv in (copy.deepcopy(theirs).double(), theirs, ours):
        leaf = x.to(conv.lin.weight.dtype, copy=True).requires_grad_()
        out = conv(leaf, edges(device))
        # No function of large results, which turns their rounding into another gradient.
        out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out))
        grads = [p.grad for p in conv.norms.parameters() if p.grad is not None]
        found.append([t.double() for t in (out.detach(), leaf.grad, *grads)])
    assert why_pygs(ours) == ''
    if dtype == torch.float64:
        return torch.testing.assert_close(found[2], found[0])
    for exact, pygs, own in zip(*found, strict=True):  # Results are rounded in both.
        error = 1.5 * (pygs - exact).abs().max() + 0.02 * exact.abs().max()
        assert (own - exact).abs().max() <= error


class OfBoth(Layer):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:  # type: ignore[override]
        return self.fn(x_i, x_j)


def _slice(x_i: Tensor, x_j: Tensor) -> Tensor:
    out = x_i * x_j
    out[:, 1:3] *= 3
    out[..., -1:] = x_i[:, :1].sin()
    out[:, :1] = 0.5
    return out


def _column(x_i: Tensor, x_j: Tensor) -> Tensor:
    out = x_i * x_j
    out[:, -1] = x_i[:, 0]
    out.view(-1, 2, 2)[:, 0] += x_j.view(-1, 2, 2)[:, 1]
    return out


def _mask(x_i: Tensor, x_j: Tensor) -> Tensor:
    out = x_i * x_j
    out[out < 0] = 0.5
    return out.masked_fill_(x_i > 1, 2.0)


def _own_input(x_i: Tensor, x_j: Tensor) -> Tensor:
    x_j[:, :2] *= 3
    x_i[:, 2:].add_(x_j[:, :2])
    return x_i + x_j


def _steps(x_i: Tensor, x_j: Tensor) -> Tensor:
    out = x_i * x_j
    out[:, ::2] = x_j[:, 1::2]
    return out


def _uneven(x_i: Tensor, x_j: Tensor) -> Tensor:
    out = x_i * x_j
    out[:, ::3] = 0
    return out


def _edges(x_i: Tensor, x_j: Tensor) -> Tensor:
    out = x_i * x_j
    out[5:] = 0
    return out


@pytest.mark.parametrize('fn', [_slice, _column, _mask, _own_input, _steps])
def test_writes_into_parts(fn: Callable[..., Tensor], device: torch.device) -> None:
    """Of a value of the message, whose inputs are copies in PyG."""
    x = torch.randn(N, C, device=device)
    assert why_pygs(compare(OfBoth(fn), x, edges(device))) == ''


@pytest.mark.parametrize(('fn', 'reason'), [
    (_uneven, 'a write into a slice with steps'), (_edges, 'aten.slice.Tensor along the edges'),
], ids=['uneven', 'edges'])  # fmt: skip
def test_other_writes_run_pygs_code(
    fn: Callable[..., Tensor], reason: str, device: torch.device
) -> None:
    ours = compare(OfBoth(fn), torch.randn(N, C, device=device), edges(device))
    assert why_pygs(ours).startswith(reason)


class Writes(Layer):
    """In `forward` or `update`, into its own features or into the result."""

    def __init__(self, where: str, message: str, aggr: str) -> None:
        super().__init__(lambda x_j: x_j, aggr)
        self.where, self.kind = where, message
        nn = torch.nn
        self.net = nn.Sequential(nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = x * 1.5
        out = self.propagate(edge_index, x=x)
        if self.where == 'forward':
            x += 1
        if self.where == 'result':
            out += x
            out.mul_(2)
        return out + x

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:  # type: ignore[override]
        if self.kind == 'sum':
            return x_j
        return self.net(x_i * x_j) if self.kind == 'blocks' else torch.sigmoid(x_i) * x_j

    def update(self, aggr_out: Tensor, x: Tensor) -> Tensor:
        if self.where == 'update':
            x += aggr_out
        return aggr_out * 2 if self.where == 'update' else aggr_out


@pytest.mark.parametrize(('where', 'message', 'aggr'), [
    *((where, *how) for where in ('forward', 'update', 'result') for how in (
        ('kernel', 'sum'), ('kernel', 'std'), ('sum', 'mean'), ('blocks', 'sum'))),
    # PyG's maximum keeps its result for the backward pass.
    *((where, how, 'max') for where in ('forward', 'update') for how in ('kernel', 'blocks')),
])  # fmt: skip
def test_writes(where: str, message: str, aggr: str, device: torch.device) -> None:
    """PyG trains on them, as its messages hold copies."""
    theirs = Writes(where, message, aggr).to(device)
    ours = accelerate(copy.deepcopy(theirs))
    ours.strict = True
    for _ in range(2):  # The first call finds out.
        x = torch.randn(N, C, device=device)
        compare(theirs, x, edges(device), ours)
        assert why_pygs(ours) == ''
        assert ours.__dict__['_writes'] == (where != 'result')


def test_writes_after_the_call(device: torch.device) -> None:
    """The error names the cure; the first call kept copies."""
    conv = accelerate(Writes('result', 'kernel', 'sum').to(device))
    x = torch.randn(N, C, device=device, requires_grad=True)
    conv(x, edges(device)).sum().backward()
    late = accelerate(Layer(lambda x_j: x_j.sin()).to(device))
    late(x, edges(device)).sum().backward()
    features = x * 1.0
    out = late(features, edges(device))
    features += 1
    with pytest.raises(RuntimeError, match=r'write x = x \+ \.\.\. in place of x \+= \.\.\.'):
        out.sum().backward()


def test_a_call_that_fails_tells_nothing(device: torch.device) -> None:
    """Whether the layer writes is known at the end of a call."""
    conv = accelerate(Writes('forward', 'kernel', 'sum').to(device))
    x = torch.randn(N, C, device=device, requires_grad=True)
    failing = conv.register_forward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        conv(x, edges(device))
    failing.remove()
    assert '_writes' not in conv.__dict__
    conv(x, edges(device)).sum().backward()
    assert conv.__dict__['_writes']
