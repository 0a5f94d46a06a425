"""Messages that map values of an edge, over blocks of edges, beside PyG on the same weights."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from _captures import captured
from torch import Tensor
from torch.nn import Dropout, Linear, Module, ReLU, Sequential, Tanh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import MLP, DynamicEdgeConv, EdgeConv, MessagePassing, PointNetConv
from torch_geometric.utils import scatter, softmax

import pyg_fast
from pyg_fast.nn import FusedMessagePassing
from pyg_fast.ops import message_passing
from tests._report import plan_of, runs_in_blocks, why_pygs
from tests.message._parts import Value, _blocks, _entry, _plan
from tests.nn import _layers
from tests.nn._layers import D, E, F, N, arguments, assert_alike, graph, run


@pytest.fixture(autouse=True)
def small_blocks(limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few edges: the hub of the graph has more. No kernel takes what blocks can compute."""
    limits(edges_of_block_parts=5, bytes_of_message_blocks=2**13)
    monkeypatch.setattr(_plan, '_fits_tiles', lambda *args: False)
    monkeypatch.setattr(_entry, '_passes_for', _entry._passes_for.__wrapped__)
    monkeypatch.setattr(_entry, '_stores', {})


def mlp(num_in: int, num_out: int = 8, last: Module | None = None) -> Module:
    layers = [Linear(num_in, 8), ReLU(), Linear(8, num_out)]
    return Sequential(*layers, *([] if last is None else [last]))


def pair(theirs: Module, device: torch.device) -> tuple[Any, Any]:
    theirs = theirs.to(device, torch.float64)
    return theirs, pyg_fast.accelerate(copy.deepcopy(theirs))


def check(theirs: Module, args: str, device: torch.device) -> None:
    theirs, ours = pair(theirs, device)
    expected = run(theirs, arguments(args, device))
    for given in (args, args.replace('edges', 'edges!').replace('bipartite', 'bipartite#')):
        assert_alike(run(ours, arguments(given, device)), expected, 1e-10)
        assert runs_in_blocks(ours)


@pytest.mark.parametrize('count', [1, 2**13])
@pytest.mark.parametrize('aggr', ['max', 'min', 'mean', 'sum', ['max', 'std', 'mean', 'sum']])
def test_edge_conv(
    aggr: Any, count: int, device: torch.device, limits: Callable[..., None]
) -> None:
    limits(bytes_of_message_blocks=count)
    check(EdgeConv(mlp(2 * F, 8, ReLU()), aggr), 'x edges', device)


@pytest.mark.parametrize('aggr', ['max', 'mean'])
def test_without_a_wait(aggr: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, where the number of rows in a block is not known."""
    monkeypatch.setattr(_blocks, '_may_sync', lambda row: False)
    check(EdgeConv(mlp(2 * F, 8, ReLU()), aggr), 'x edges', device)
    check(EdgeConv(mlp(2 * F, 8, ReLU()), aggr), 'pair bipartite', device)


@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_bipartite(flow: str, device: torch.device) -> None:
    if flow == 'source_to_target':
        check(EdgeConv(mlp(2 * F)), 'pair bipartite', device)
    else:
        check(EdgeConv(mlp(2 * F), flow=flow), 'x edges', device)


def test_point_net_conv(device: torch.device) -> None:
    check(PointNetConv(mlp(F + 3), Linear(8, 4)), 'x pos edges', device)


def test_dynamic_edge_conv(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _layers.use_pyg_lib(monkeypatch)
    check(DynamicEdgeConv(mlp(2 * F), 4), 'x', device)


class Messages(MessagePassing):
    """Its `message` is a function."""

    def __init__(self, function: Callable[..., Tensor], aggr: Any = 'max', **parts: Any) -> None:
        super().__init__(aggr)
        self.function, self.scale = function, 1.0
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, edge_index: Tensor, e: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Any) -> Tensor:
        return self.function(self, x_i, x_j, e)


@pytest.mark.parametrize('aggr', ['max', 'mean'])
def test_edge_features(aggr: str, device: torch.device) -> None:
    """Mapped together with nodes, and alone; a shared map, a matrix for two heads."""

    def message(self: Any, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        both = self.first(torch.cat([x_i, x_j, e], -1)).relu()
        both = self.second(self.second(both).tanh()) * self.third(e)
        return (both.view(-1, 2, 4) @ self.weight).flatten(1)

    weight = torch.nn.Parameter(torch.randn(4, 4))
    parts = {'first': Linear(2 * F + 6, 8), 'second': Linear(8, 8), 'third': Linear(6, 8)}
    check(Messages(message, aggr, weight=weight, **parts), 'x edges attr', device)


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize(('size', 'at_once'), [(12, False), (200, True), (100, None)])
def test_many_edge_features(
    size: int, at_once: bool | None, bias: bool, device: torch.device
) -> None:
    """BLAS maps more features of edges than kernels do; on CUDA kernels do fewer."""
    lin = Linear(size, 32, bias)
    conv = Messages(lambda self, x_i, x_j, e: self.of_x(x_j) * self.lin(e).relu(), 'sum', lin=lin,
                    of_x=Linear(F, 32))  # fmt: skip
    theirs, ours = pair(conv, device)
    args = [*arguments('x edges', device), torch.rand(E, size, dtype=torch.float64, device=device)]
    args[2].requires_grad_()
    assert_alike(run(ours, args), run(theirs, args), 1e-10)
    at_once = device.type == 'cuda' if at_once is None else at_once
    assert ('computed once per edge' in plan_of(ours)) == at_once
    assert plan_of(ours).count('param') == (0 if at_once else 1 + bias)


@pytest.mark.parametrize('aggr', ['sum', 'mean'])
def test_map_of_edge_features_at_the_end(aggr: str, device: torch.device) -> None:
    """It runs after the aggregation, once for each node."""
    conv = Messages(lambda self, x_i, x_j, e: self.lin(e), aggr, lin=Linear(D, F))
    theirs, ours = pair(conv, device)
    args = arguments('x edges attr', device)
    assert_alike(run(ours, args), run(theirs, args), 1e-10)
    assert 'sunk' in plan_of(ours)


@pytest.mark.parametrize('multiple', [True, False])
def test_softmax(multiple: bool, device: torch.device) -> None:
    """Of scores that an MLP computes, in values of one."""
    first, second = (mlp(2 * F, size).to(device, torch.float64) for size in (1, F))
    x, edges = arguments('x edges', device)

    def message(x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        both = torch.cat([x_i, x_j], -1)
        weight = softmax(first(both), index, num_nodes=size_i)
        return second(both) * weight + (0 if multiple else x_j * weight.square())

    src, dst = edges
    out = message_passing(edges, message, {'x_j': x}, {'x_i': x}, strict=True)
    expected = scatter(message(x[dst], x[src], dst, N), dst, 0, N)
    torch.testing.assert_close(out, expected)
    leaves = [x, *first.parameters(), *second.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(out.sin().sum(), leaves),
        torch.autograd.grad(expected.sin().sum(), leaves),
    )


def test_batch_norm(device: torch.device) -> None:
    """In evaluation it works edge by edge."""
    theirs, ours = pair(EdgeConv(MLP([2 * F, 8, 8])), device)
    x, edges = arguments('x edges', device)
    for training in (True, False, True):
        theirs.train(training)
        ours.train(training)
        torch.testing.assert_close(ours(x, edges), theirs(x, edges))
        assert (runs_in_blocks(ours)) != training
    norm = [conv.nn.norms[0].module for conv in (ours, theirs)]
    torch.testing.assert_close(norm[0].state_dict(), norm[1].state_dict())


@pytest.mark.parametrize('aggr', ['max', 'mean'])
def test_dropout(aggr: str, device: torch.device, limits: Callable[..., None]) -> None:
    """The backward pass, and that of torch operations, drop what the forward pass dropped, in
    blocks of any size."""
    layers = Linear(2 * F, 32), Tanh(), Dropout(0.25), Linear(32, 8), Tanh(), Dropout(0.5)
    conv = pyg_fast.accelerate(EdgeConv(Sequential(*layers), aggr).to(device, torch.float64))
    x, edges = arguments('x edges', device)
    wanted = [x, *conv.parameters()]

    def call(x: Tensor, count: int) -> Tensor:
        limits(bytes_of_message_blocks=count)
        torch.manual_seed(0)
        return conv(x, edges)

    out = call(x, 2**13)
    assert runs_in_blocks(conv)
    torch.testing.assert_close(call(x, 1), out)
    weight = torch.linspace(-1, 1, out.numel(), device=device, dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad(out, wanted, weight, retain_graph=True)
    again = torch.autograd.grad(out, wanted, weight, create_graph=True)
    torch.testing.assert_close(again, grads)
    direction = torch.randn_like(x) * 1e-6
    with torch.no_grad():
        change = ((call(x + direction, 2**12) - call(x - direction, 2**12)) * weight).sum() / 2
    torch.testing.assert_close((grads[0] * direction).sum(), change, rtol=1e-5, atol=1e-12)
    assert not torch.equal(conv(x, edges), out)
    theirs = copy.deepcopy(pyg_fast.restore(copy.deepcopy(conv))).eval()
    torch.testing.assert_close(conv.eval()(x, edges), theirs(x, edges))
    assert runs_in_blocks(conv)


def test_share_of_dropped(device: torch.device) -> None:
    """Independent of the edge, the channel, the seed and which dropout it is."""
    edges = torch.arange(1000, device=device)
    seeds = [torch.tensor([seed], device=device) for seed in (0, 1, 2**62 - 1)]
    masks = torch.stack([
        _blocks.dropout_factors(Value('keep', (), (k, (0.25).hex()), (64,), 'float32'), edges, seed)
        for seed in seeds for k in (0, 9)
    ])  # fmt: skip
    assert set(masks.unique().tolist()) == {0.0, masks.max().item()}
    torch.testing.assert_close(masks.max().item(), 1 / 0.75)
    flags = (masks > 0).double().sub(0.75).flatten(1)
    assert flags.mean(1).abs().max() < 0.01
    together = flags @ flags.t() / flags.size(1)
    assert (together - torch.diag(together.diag())).abs().max() < 0.005
    by_edge, by_channel = (masks > 0).double().mean((0, 2)), (masks > 0).double().mean((0, 1))
    assert (by_edge - 0.75).abs().max() < 0.11
    assert (by_channel - 0.75).abs().max() < 0.03


def test_changes_between_calls(device: torch.device) -> None:
    def message(self: Any, x_i: Tensor, x_j: Tensor, e: Any) -> Tensor:
        return self.nn(torch.cat([x_i, x_j], -1)) * self.scale

    theirs, ours = pair(Messages(message, nn=mlp(2 * F)), device)
    for change in range(5):
        for conv in (theirs, ours):
            if change == 1:
                conv.scale = -2.0
            elif change == 2:
                with torch.no_grad():
                    conv.nn[2].weight.mul_(-1)
            elif change == 3:
                torch.manual_seed(3)
                conv.nn[0] = Linear(2 * F, 8).to(device, torch.float64)
            elif change == 4:
                conv.nn[0].weight.requires_grad_(False)
        results = [run(conv, arguments('x edges', device)) for conv in (ours, theirs)]
        assert_alike(*results, 1e-10)
        assert runs_in_blocks(ours)


def test_changes_before_backward(device: torch.device) -> None:
    """The backward pass computes the message of the forward pass again, and notices a written
    parameter, as PyG's does."""
    theirs, ours = pair(EdgeConv(MLP([2 * F, 8, 8]).eval()), device)
    x, edges = arguments('x edges', device)
    grads = []
    for conv in (ours, theirs):
        out = conv(x, edges).sum()
        conv.train()
        with torch.autocast(device.type, torch.bfloat16):
            grads.append(torch.autograd.grad(out, [x, *conv.parameters()], retain_graph=True))
            again = torch.autograd.grad(out, [x, *conv.parameters()], retain_graph=True)
            if conv is ours:  # PyG's adds atomically on CUDA.
                torch.testing.assert_close(again, grads[-1], atol=0, rtol=0)
        with torch.no_grad():
            conv.nn.lins[1].weight.add_(1)
        with pytest.raises(RuntimeError, match='modified by an inplace operation'):
            out.backward()
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize('aggr', ['max', 'mean'])
def test_second_derivatives(aggr: str, device: torch.device) -> None:
    found = []
    theirs, ours = pair(EdgeConv(mlp(2 * F, 8, Tanh()), aggr), device)
    for conv in (theirs, ours):
        x, edges = arguments('x edges', device)
        out = conv(x, edges)
        wanted = [x, *conv.parameters()]
        grads = torch.autograd.grad(out.sin().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)
        out = conv(x, edges)
        weights = torch.linspace(-1, 1, 2 * out.numel(), device=device, dtype=out.dtype)
        several = torch.autograd.grad(
            out, wanted, weights.view(2, *out.shape), is_grads_batched=True
        )
        found.append([*grads, *second, *several])
    assert runs_in_blocks(ours)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('cast', [False, True])
def test_dtypes(dtype: torch.dtype, cast: bool, device: torch.device) -> None:
    """About as exact as PyG's layer in the same dtype, or under autocast: maps of nodes are rounded
    before they are added."""
    exact, _ = pair(EdgeConv(mlp(2 * F, 8, ReLU()), 'mean'), device)
    x, edges = arguments('x edges', device)
    expected = run(exact, [x, edges])
    errors, kinds = [], []
    for accelerated in (True, False):
        conv = copy.deepcopy(exact).to(torch.float32 if cast else dtype)
        conv = pyg_fast.accelerate(conv) if accelerated else conv
        given = x.detach().to(next(conv.parameters()).dtype).requires_grad_()
        with torch.autocast(device.type, dtype, dtype != torch.float32) if cast else nullcontext():
            got = run(conv, [given, edges])
        assert not accelerated or runs_in_blocks(conv)
        pairs = zip(got, expected, strict=True)
        errors.append([(a.double() - b).norm() / b.norm() for a, b in pairs])
        kinds.append([t.dtype for t in got])
    assert kinds[0] == kinds[1]
    for own, pygs in zip(*errors, strict=True):
        assert own <= 2 * pygs + 1e-6


@pytest.mark.parametrize('aggr', ['max', ['mean', 'std']])
def test_values_of_two_dtypes(aggr: Any, device: torch.device) -> None:
    def message(self: Any, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.lin((x_i * x_j).tanh()) * e

    theirs = Messages(message, aggr, lin=Linear(F, F)).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    args = arguments('x edges', device, torch.float32)
    args += arguments('wide', device)
    got, expected = run(ours, args), run(theirs, args)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)  # Some come from float32.
    assert runs_in_blocks(ours)


def test_ties(device: torch.device) -> None:
    """One of several equal maxima gets the gradient, also in different blocks."""
    conv = pyg_fast.accelerate(EdgeConv(mlp(2 * F)).to(device))
    edges = torch.tensor([[1] * 200, [0] * 200], device=device)
    x = torch.randn(2, F, device=device, requires_grad=True)
    out = conv(x, edges)
    assert runs_in_blocks(conv)
    one = conv.nn(torch.cat([x[:1], x[1:] - x[:1]], -1))
    torch.testing.assert_close(out[:1], one)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x), torch.autograd.grad(one.sum(), x))


def test_special_values(device: torch.device) -> None:
    """Infinite messages and those that are no number."""
    for aggr, value in (('max', -float('inf')), ('min', float('inf')), ('max', float('nan'))):
        theirs, ours = pair(EdgeConv(mlp(2 * F), aggr), device)
        results = []
        for conv in (ours, theirs):
            with torch.no_grad():
                conv.nn[2].bias[:3] = value
                x, edges = arguments('x edges', device)
                results.append(conv(x, edges))
        torch.testing.assert_close(*results, equal_nan=True)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that an operator makes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.size = max([self.size, *sizes])
        return out


@pytest.mark.parametrize('aggr', ['max', 'sum'])
def test_memory(
    aggr: str, device: torch.device, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor has a row of channels for each edge."""
    num_edges, channels, count = 4000, 64, 2**16
    limits(bytes_of_message_blocks=count)
    conv = pyg_fast.accelerate(EdgeConv(mlp(2 * channels, channels, ReLU()), aggr).to(device))
    x = torch.randn(30, channels, device=device, requires_grad=True)
    edges = torch.randint(30, (2, num_edges), device=device)
    conv(x, edges).sum().backward()
    assert runs_in_blocks(conv)
    largest = Largest()

    def watched(*args: Any) -> Any:
        with largest:
            return run_message(*args)

    run_message = _entry.run
    monkeypatch.setattr(_entry, 'run', watched)  # Nothing is captured in a mode of dispatch.
    out = conv(x, edges).sum()
    assert runs_in_blocks(conv)
    with largest:
        out.backward()
    assert largest.size > 0
    assert largest.size <= max(count, 8 * num_edges * 2)  # the edges themselves are int64


def test_same_bits(device: torch.device) -> None:
    conv = pyg_fast.accelerate(EdgeConv(mlp(2 * F, 8, ReLU()), 'mean').to(device))
    args = arguments('x edges', device, torch.float32)
    torch.testing.assert_close(run(conv, args), run(conv, args), atol=0, rtol=0)
    assert runs_in_blocks(conv)


def test_cuda_graph(device: torch.device) -> None:
    """Nothing waits for the device."""
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    conv = pyg_fast.accelerate(EdgeConv(mlp(2 * F)).to(device))
    edges = _layers.prepared(graph(device))
    x = torch.randn(N, F, device=device, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = conv(x, edges)
        return out, *torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])

    step()
    replay, found = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn(N, F, device=device))
    replay()
    assert runs_in_blocks(conv)
    torch.testing.assert_close(found, step())


def test_few_edges(device: torch.device, limits: Callable[..., None]) -> None:
    """All in one block: PyG's code, unless the layer is strict."""

    class Strict(FusedMessagePassing):
        def __init__(self) -> None:
            super().__init__('max', strict=True)
            self.nn = mlp(2 * F)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        message = EdgeConv.message

    limits(bytes_of_message_blocks=2**20)
    strict = Strict().to(device, torch.float64)
    plain = pyg_fast.accelerate(EdgeConv(strict.nn).to(device))
    x, edges = arguments('x edges', device)
    torch.testing.assert_close(plain(x, edges), strict(x, edges))
    assert 'over blocks of' in why_pygs(plain)
    assert runs_in_blocks(strict)
    (report,) = pyg_fast.accelerate_report(plain)
    assert report.how is None
    limits(bytes_of_message_blocks=2**13)
    plain(x, edges)
    for layer, name in ((plain, 'FusedEdgeConv'), (strict, 'Strict')):
        (report,) = pyg_fast.accelerate_report(layer)
        assert report[2:7] == (name, None, name, 'blocks', None)
    (report,) = pyg_fast.accelerate_report(plain)
    linear = pyg_fast.accelerate(EdgeConv(Linear(2 * F, 4)).to(device, torch.float64))
    linear(x, edges)
    assert pyg_fast.accelerate_report(linear)[0].how == 'kernel'


def test_no_edges_and_one(device: torch.device) -> None:
    theirs, ours = pair(EdgeConv(mlp(2 * F)), device)
    (x,) = arguments('x', device)
    for edges in (graph(device)[:, :0], graph(device)[:, :1], graph(device)[:, :2]):
        torch.testing.assert_close(ours(x, edges), theirs(x, edges))


def test_pygs_code_where_it_fits(
    monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None], device: torch.device
) -> None:
    """Blocks save memory, not time: they run where tensors of all edges would not fit."""
    limits(bytes_of_message_blocks=4096, few_edges=(0, 0))
    nn = Sequential(Linear(8, 8), ReLU(), Linear(8, 4))
    conv = pyg_fast.accelerate(EdgeConv(nn, aggr='max').to(device))
    x, edges = torch.randn(9, 4, device=device), torch.randint(9, (2, 200), device=device)
    with pyg_fast.small_graphs('pyg'):
        out = conv(x, edges)
        assert 'do not fit into memory' in why_pygs(conv)
        monkeypatch.setattr(_blocks, '_free_bytes', lambda device: 10_000)
        torch.testing.assert_close(conv(x, edges), out)
        assert 'do not fit into memory' in why_pygs(conv)  # As for so many edges before.
        more = torch.cat([edges, edges], 1)
        torch.testing.assert_close(conv(x, more), out)
        assert why_pygs(conv) == ''
        assert runs_in_blocks(conv)


def test_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the machine has free beyond a container's limit is not for its processes."""
    most, used = tmp_path / 'max', tmp_path / 'current'
    monkeypatch.setattr(_blocks, '_GROUPS', ((str(most), str(used)),))
    free = _blocks._free_bytes(torch.device('cpu'))
    assert 2**24 < free < 2**50
    most.write_text('max\n')
    used.write_text('3000000\n')
    assert _blocks._free_bytes(torch.device('cpu')) > 2**24
    most.write_text('5000000\n')
    assert _blocks._free_bytes(torch.device('cpu')) == 2_000_000
