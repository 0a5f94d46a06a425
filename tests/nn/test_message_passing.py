"""Messages that layers write in PyTorch, beside PyG on the same weights."""

import copy
import io
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.aggr import MultiAggregation

import pyg_fast
from pyg_fast.nn import FusedMessagePassing
from pyg_fast.nn.message_passing import FusedPropagate
from tests.message._expressions import Expression

N, E, F, D = 37, 160, 16, 6


def graph(device: torch.device, seed: int = 0) -> Tensor:
    """With isolated nodes, a hub, a self-loop and duplicate edges."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(N - 3, (2, E), generator=generator)
    edges[1, :40] = 5
    edges[:, -2:] = torch.tensor([[1, 2], [1, 2]])
    edges[:, -3] = edges[:, -4]
    return edges.to(device)


def prepared(edges: Tensor) -> EdgeIndex:
    return EdgeIndex(edges, sparse_size=(N, N))


LAYERS: dict[str, Callable[[], Any]] = {
    'ResGated': lambda: pyg.ResGatedGraphConv(F, F),
    'ResGated, edges': lambda: pyg.ResGatedGraphConv(F, F, edge_dim=D),
    'GINE': lambda: pyg.GINEConv(Linear(F, F), edge_dim=D),
    'GINE, wide edges': lambda: pyg.GINEConv(Linear(F, F)),
    'CG': lambda: pyg.CGConv(F, D),
    'CG, mean': lambda: pyg.CGConv(F, 0, aggr='mean'),
    'FiLM': lambda: pyg.FiLMConv(F, F),
    'Edge, sum': lambda: pyg.EdgeConv(
        Sequential(Linear(2 * F, F), ReLU(), Linear(F, 8)), aggr='sum'
    ),
    'Edge, mean': lambda: pyg.EdgeConv(
        Sequential(Linear(2 * F, F), ReLU(), Linear(F, 8)), aggr='mean'
    ),
    'Edge, max': lambda: pyg.EdgeConv(Linear(2 * F, F)),
    'GEN': lambda: pyg.GENConv(F, F, aggr='add'),
    'PNA': lambda: pyg.PNAConv(
        F, F, ['mean', 'min', 'max', 'std'], ['identity', 'amplification', 'attenuation'],
        torch.tensor([0, 5, 9, 3]), towers=2,
    ),
    'FeaSt': lambda: pyg.FeaStConv(F, F, heads=2),
    'GMM': lambda: pyg.GMMConv(F, F, dim=D, kernel_size=3),
    'LE': lambda: pyg.LEConv(F, F),
    'Graph': lambda: pyg.GraphConv(F, 8),
    'Simple, several': lambda: pyg.SimpleConv(['sum', 'max', 'var']),
    'GatedGraph': lambda: pyg.GatedGraphConv(F, 2),
    'TAG': lambda: pyg.TAGConv(F, 8),
    'SG': lambda: pyg.SGConv(F, 8, K=2),
    'SSG': lambda: pyg.SSGConv(F, 8, 0.1, 2),
    'APPNP': lambda: pyg.APPNP(2, 0.1),
    'MF': lambda: pyg.MFConv(F, 8),
    'Cheb': lambda: pyg.ChebConv(F, 8, 3),
    'ClusterGCN': lambda: pyg.ClusterGCNConv(F, 8),
    'PDN': lambda: pyg.PDNConv(F, 8, D, 8),
    'LG': lambda: pyg.LGConv(),
    'MixHop': lambda: pyg.MixHopConv(F, 8),
    'Simple': lambda: pyg.SimpleConv('mean'),
    'Simple, combined': lambda: pyg.SimpleConv(
        MultiAggregation(['mean', 'std', 'min'], mode='proj', mode_kwargs=dict(
            in_channels=F, out_channels=8,
        ))
    ),
    'WLContinuous': lambda: pyg.WLConvContinuous(),
}  # fmt: skip
EDGE_ATTR = {'ResGated, edges', 'GINE', 'GINE, wide edges', 'CG', 'GMM', 'PDN'}


def run(conv: Any, name: str, x: Tensor, edges: Tensor) -> list[Tensor]:
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    inputs = [x]
    if name in EDGE_ATTR:
        width = F if name == 'GINE, wide edges' else D
        attr = torch.linspace(0.1, 1, E * width, dtype=x.dtype, device=x.device).view(E, width)
        inputs.append(attr.requires_grad_())
    out = conv(x, edges, *inputs[1:])
    out = out[0] if isinstance(out, tuple) else out
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    leaves = inputs + [p for p in conv.parameters() if p.requires_grad]
    grads = torch.autograd.grad((out.flatten() * weight).sum(), leaves, allow_unused=True)
    return [
        out,
        *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads, strict=True)),
    ]


def _filled(leaves: list[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    pairs = zip(leaves, grads, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def fused(conv: Any) -> Any:
    return pyg_fast.accelerate(copy.deepcopy(conv))


def check(name: str, device: torch.device, dtype: torch.dtype, edges: Tensor) -> None:
    torch.manual_seed(1)
    theirs = LAYERS[name]().to(device, dtype)
    ours = fused(theirs)
    assert isinstance(ours, FusedPropagate)
    x = torch.rand(N, F, dtype=dtype, device=device) + 0.1
    plain = edges.as_tensor() if isinstance(edges, EdgeIndex) else edges
    expected, got = run(theirs, name, x, plain), run(ours, name, x, edges)
    assert not ours._last_run, ours._last_run
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    for one, other in zip(got, expected, strict=True):
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(one / scale, other / scale, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize('name', LAYERS)
def test_like_pyg(name: str, device: torch.device) -> None:
    check(name, device, torch.float64, graph(device))


@pytest.mark.parametrize('name', ['ResGated, edges', 'PNA', 'Edge, mean', 'FeaSt'])
def test_prepared(name: str, device: torch.device) -> None:
    check(name, device, torch.float32, prepared(graph(device)))


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
    """Why PyG's code ran, or ''. An attribute, a parameter and the mode change between calls."""
    torch.manual_seed(seed)
    theirs = Random(seed, AGGRS[seed % len(AGGRS)]).to(device, torch.float64)
    ours, edges = fused(theirs), graph(device, seed)
    for call in range(num_calls):
        x = torch.randn(N, 8, dtype=torch.float64, device=device)
        e = torch.randn(E, 8, dtype=torch.float64, device=device)
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
    return ours._last_run


# More of them: PYG_FAST_MESSAGES=100 runs 600.
BLOCKS = int(os.environ.get('PYG_FAST_MESSAGES', '5'))


@pytest.mark.parametrize('block', range(BLOCKS))
def test_random_messages(block: int, device: torch.device) -> None:
    seeds = range(6 * block, 6 * block + 6)
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
    assert 'sigmoid' in conv.plan
    conv.mode = plain.mode = 'tanh'  # Nothing of the first call is stale.
    torch.testing.assert_close(conv(x, edges), plain(x, edges))
    assert 'tanh' in conv.plan
    with torch.no_grad():
        conv.weight.fill_(3)
        plain.weight.fill_(3)
    torch.testing.assert_close(conv(x, edges), plain(x, edges))
    for width in (3, 1, 70):
        x = torch.randn(N, width, device=device)
        torch.testing.assert_close(conv(x, edges), plain(x, edges))


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
    assert 'a conversion to float32' in conv._last_run


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

    conv = Root().to(device)
    for bad in (0.0, float('nan'), float('inf')):
        x = torch.rand(N, F, device=device) + 0.1
        x[-3:] = bad
        x.requires_grad_()
        conv(x, graph(device)).sum().backward()
        assert torch.isfinite(x.grad).all()
        assert (x.grad[-3:] == 0).all()
        assert torch.isfinite(conv.lin.weight.grad).all()


class Bad(FusedMessagePassing):
    def __init__(self, kind: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.kind = kind

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
        if self.kind == 'attribute':
            self.last = x_j * 2
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
        'cumsum', 'mean', 'batch', 'size', 'arange', 'attribute', 'random', 'branch', 'data',
        'transpose', 'roll', 'sort',
    ],
)  # fmt: skip
def test_refused(kind: str, device: torch.device) -> None:
    x, edges = torch.randn(N, F, device=device, dtype=torch.float64), graph(device)
    conv, plain = Bad(kind).to(device), Bad(kind).to(device)
    torch.manual_seed(3)
    out = conv(x, edges)
    assert conv.plan is not None
    assert conv.plan.startswith("PyG's code: ")
    torch.manual_seed(3)
    expected = MessagePassing.propagate(plain, edges, x=x)
    torch.testing.assert_close(out, expected)
    with pytest.raises(NotImplementedError, match=r"strict=True\): PyG's code would run"):
        Bad(kind, strict=True).to(device)(x, edges)


def test_hooks_and_explainers(device: torch.device) -> None:
    conv = Gated().to(device)
    x, edges = torch.randn(N, F, device=device), graph(device)
    expected = conv(x, edges)
    assert conv._last_run == ''
    seen: list[Any] = []
    handle = conv.register_message_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(conv(x, edges), expected)
    assert len(seen) == 1
    assert 'hooks' in conv._last_run
    handle.remove()
    conv.message = lambda x_i, x_j: x_j  # type: ignore[method-assign]
    conv(x, edges)
    assert 'patched' in conv._last_run


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
        assert other._last_run == ''
        restored = pyg_fast.restore(other)
        assert type(restored) is pyg.FiLMConv
        torch.testing.assert_close(restored(x, edges), theirs(x, edges))
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_report(device: torch.device) -> None:
    model = torch.nn.ModuleList([pyg.FiLMConv(F, F), pyg.TransformerConv(F, F)]).to(device)
    pyg_fast.accelerate(model)
    model[0](torch.randn(N, F, device=device), graph(device))
    reports = pyg_fast.accelerate_report(model)
    assert [r.layer for r in reports] == ['FiLMConv', 'TransformerConv']
    assert [r.fused for r in reports] == ['FusedFiLMConv', None]
    assert reports[0].ran == 'FusedFiLMConv'
    assert "reads 'index'" in reports[1].reason


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
    assert 'writes into its input' in conv.plan
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
    assert 'torch.compile is disabled' in conv._last_run
    torch.testing.assert_close(out, conv(x, edges))
    assert conv._last_run == ''


@pytest.mark.parametrize('name', ['Edge, mean', 'ResGated, edges', 'FiLM'])
def test_autocast(name: str, device: torch.device) -> None:
    torch.manual_seed(1)
    theirs = LAYERS[name]().to(device)
    ours, x = fused(theirs), torch.rand(N, F, device=device)
    exact = run(copy.deepcopy(theirs).double(), name, x.double(), graph(device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = run(ours, name, x, graph(device))
        expected = run(theirs, name, x, graph(device))
    assert ours._last_run == ''
    for one, other, right in zip(found, expected, exact, strict=True):
        assert one.dtype == other.dtype
        allowed = 1.5 * (other - right).norm() + 1e-3 * right.norm()
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
    assert ours._last_run == ''


def test_cuda_graph(device: torch.device) -> None:
    """A capture needs a warm-up call, and then replays forward and backward passes."""
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    conv, edges = Gated(strict=True).to(device), prepared(graph(device))
    x = torch.randn(N, F, device=device, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = conv(x, edges)
        return out, *torch.autograd.grad(out.square().sum(), [x, conv.weight])

    first = pytest.raises(RuntimeError, match='a CUDA graph captures the first call of a message')
    with first, torch.cuda.graph(torch.cuda.CUDAGraph()):
        step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    with torch.no_grad():
        x.copy_(torch.randn(N, F, device=device))
    captured.replay()
    torch.testing.assert_close(found, step())
