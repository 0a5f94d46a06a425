"""Messages with an MLP of each edge, by kernels over tiles of edges, beside PyG in float64. On a
GPU Triton runs them, else numpy."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.nn import EdgeConv, MessagePassing, PointNetConv
from torch_geometric.typing import OptTensor
from torch_geometric.utils import scatter, softmax

import pyg_fast
from pyg_fast.message._tile_values import Factor
from pyg_fast.nn import _few
from tests._captures import captured
from tests._compiled import Backend
from tests._report import plan_of, runs_in_blocks, why_pygs
from tests.message._by_numpy import by_numpy
from tests.message._parts import (
    EDGE,
    Program,
    _replace,
    _tiles,
    _tiles_cuda,
    divide_rows,
)

pytest.importorskip('triton')
N, E = 50, 400
CPU = torch.device('cpu')
KERNEL, ON_CPU = 'over tiles of edges', 'over tiles of edges that stay in the cache'


@contextmanager
def on_tiles(device: torch.device) -> Iterator[list[str]]:
    """Yields the names of kernels that numpy ran; none on a GPU."""
    if device.type == 'cuda':
        yield ['message_tiles']
        return
    with by_numpy(divide_rows) as names:
        yield names


def edges(num_nodes: int = N, num_edges: int = E, hub: int = 150) -> Tensor:
    """Duplicates, loops, nodes without edges, and a row of several tiles."""
    index = torch.randint(num_nodes, (2, num_edges), generator=torch.Generator().manual_seed(2))
    index[1] = index[1].clamp(max=num_nodes - 5)
    index[1, :hub] = 3
    return index


def results(layer: nn.Module, args: list[Any]) -> list[Tensor]:
    """What the layer returns, and the gradients of inputs and parameters."""
    leaves = [x.requires_grad_() for x in args if isinstance(x, Tensor) and x.is_floating_point()]
    outs = layer(*args)
    outs = [outs] if isinstance(outs, Tensor) else list(outs)
    given = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out) for out in outs]
    return [*outs, *torch.autograd.grad(outs, [*leaves, *layer.parameters()], given)]


def as_type(args: list[Any], dtype: torch.dtype, device: torch.device) -> list[Any]:
    return [
        x.detach().to(device, dtype if x.is_floating_point() else x.dtype)
        if isinstance(x, Tensor) else x for x in args
    ]  # fmt: skip


def check(
    layer: nn.Module, args: list[Any], device: torch.device, dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-5,
) -> None:  # fmt: skip
    """Ours in `dtype`, on the weights and inputs rounded to it, is PyG's in float64, but for some
    times PyG's own error in that dtype."""
    ours = pyg_fast.accelerate(copy.deepcopy(layer).to(device, dtype))
    args = as_type(args, dtype, device)
    theirs = copy.deepcopy(layer).to(device).double()
    theirs.load_state_dict({name: x.double() for name, x in ours.state_dict().items()})
    expected = results(theirs, as_type(args, torch.float64, device))
    with on_tiles(device) as names:
        all_found = [results(ours, args)]
    assert KERNEL in plan_of(ours), plan_of(ours)
    assert 'message_tiles' in names
    assert not runs_in_blocks(ours)
    if device.type == 'cpu':  # Also by its own kernel.
        ours = pyg_fast.accelerate(copy.deepcopy(layer).to(dtype))
        all_found.append(results(ours, args))
        assert ON_CPU in plan_of(ours), plan_of(ours)
        assert not runs_in_blocks(ours)
    largest = max(float(each.abs().max()) for each in expected if each.numel())
    rounded = results(copy.deepcopy(layer).to(device, dtype), as_type(args, dtype, device))
    for found in all_found:
        for ours_, theirs_, pygs in zip(found, expected, rounded, strict=True):
            assert ours_.dtype == dtype
            # Where terms cancel, what is left of the largest numbers is rounding, in PyG, too.
            allowed = 4 * (pygs.double() - theirs_).abs().max() + tolerance * theirs_.abs().max()
            allowed += tolerance / 20 * largest
            assert (ours_.double() - theirs_).abs().max() <= allowed


class Two(MessagePassing):
    """Two layers on both ends and features of the edge."""

    def __init__(self, num_in: int, hidden: int, out: int, aggr: Any = 'add', edge: int = 0):
        super().__init__(aggr=aggr)
        self.first = nn.Linear(2 * num_in + edge, hidden)
        self.second = nn.Linear(hidden, out)

    def forward(self, x: Tensor, edge_index: Tensor, e: OptTensor = None) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: OptTensor) -> Tensor:
        both = [x_i, x_j] if e is None else [x_i, x_j, e]
        return F.silu(self.second(F.silu(self.first(torch.cat(both, -1)))))


class Joined(MessagePassing):
    """Messages and moves of coordinates, joined and split again."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.width = width
        self.edge = nn.Sequential(nn.Linear(2 * width + 1, 20), nn.SiLU(), nn.Linear(20, width))
        self.move = nn.Sequential(nn.Linear(width, 18), nn.Tanh(), nn.Linear(18, 1))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        return self.propagate(edge_index, x=x, pos=pos).split([self.width, 3], -1)

    def message(self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        gap = pos_i - pos_j
        m = self.edge(torch.cat([x_i, x_j, gap.square().sum(-1, keepdim=True)], -1))
        return torch.cat([m.relu(), gap * self.move(m)], -1)


class Parts(MessagePassing):
    """A function of parts of the hidden values between two maps."""

    def __init__(self, width: int, function: Callable[[Tensor], Tensor], inner: int) -> None:
        super().__init__(aggr='add')
        self.first, self.second = nn.Linear(2 * width, 18), nn.Linear(18, 24)
        self.last, self.function = nn.Linear(inner, 8), function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        h = self.second(F.silu(self.first(torch.cat([x_i, x_j], -1))))
        return F.silu(self.last(self.function(h)))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('aggr', ['add', 'mean', 'max', 'min'])
def test_two_layers(aggr: str, x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(Two(16, 24, 20, aggr), [x, edges()], device)


@pytest.mark.parametrize(('hidden', 'aggr'), [(100, 'add'), (70, 'max')])
def test_wide_layers(hidden: int, aggr: str, x: Tensor, device: torch.device) -> None:
    """Values of more than 64 channels, which products read from memory."""
    torch.manual_seed(1)
    check(Two(16, hidden, 72, aggr), [x, edges()], device)


def test_several_launches(x: Tensor, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of matrices add up what each launch stored of its edges."""
    for name in ('_MOST_EDGES', '_LEAST_EDGES'):
        monkeypatch.setattr(_tiles_cuda, name, 128)
    monkeypatch.setattr(_tiles_cuda, 'processors', lambda _: 1)
    torch.manual_seed(1)
    check(Two(16, 24, 20), [x, edges()], device)


@pytest.mark.parametrize('num_tiles', [1, 263, 264, 265, 23_438, 2**20])
def test_whole_rounds(num_tiles: int) -> None:
    """Launches have as many rounds of all programs as each other, within the limit of factors."""
    factors = [Factor(64, 64, 'float32', False)] * 4
    step = _tiles_cuda._tiles_at_once(factors, num_tiles, 264)
    assert step == num_tiles or (step % 264 == 0 and step * 64 <= 2**18)
    launches = -(-num_tiles // step)
    assert launches == -(-num_tiles // (15 * 264))
    assert launches * step - num_tiles < launches * 264


def test_joined_results(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(Joined(16), [x, edges(), torch.randn(N, 3)], device)


def _gated(h: Tensor) -> Tensor:
    value, gate = h.chunk(2, -1)
    return value * gate.sigmoid()


def _rotated(h: Tensor) -> Tensor:
    one, two = h.split([5, h.size(-1) - 5], -1)
    return torch.cat([two, one.tanh()], -1)


@pytest.mark.parametrize('function', [_gated, F.glu, _rotated])
def test_parts_of_values(
    function: Callable[[Tensor], Tensor], x: Tensor, device: torch.device
) -> None:
    torch.manual_seed(1)
    inner = 24 if function is _rotated else 12
    check(Parts(16, function, inner), [x, edges()], device)


def test_several_reductions(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(Two(16, 24, 20, ['add', 'max', 'mean']), [x, edges()], device)


@pytest.mark.parametrize('width', [1, 7, 16])
def test_features_of_edges(width: int, x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(Two(16, 24, 20, edge=width), [x, edges(), torch.randn(E, width)], device)


def test_edge_conv(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    mlp = nn.Sequential(
        nn.Linear(32, 40), nn.ReLU(), nn.Linear(40, 17), nn.LayerNorm(17), nn.Tanh(),
        nn.Linear(17, 33), nn.GELU(), nn.Linear(33, 1), nn.Sigmoid(),
    )  # fmt: skip
    check(EdgeConv(mlp, 'add'), [x, edges()], device)
    check(EdgeConv(mlp[:3], 'max'), [x, edges()], device)


def test_point_net(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    mlp = nn.Sequential(nn.Linear(19, 24), nn.ReLU(), nn.Linear(24, 18))
    check(PointNetConv(mlp, nn.Linear(18, 4)), [x, torch.randn(N, 3), edges()], device)


class EGNN(MessagePassing):
    """A gate, squared distances, and coordinates that move."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.edge = nn.Sequential(
            nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.gate = nn.Sequential(nn.Linear(width, 1), nn.Sigmoid())
        self.move = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.propagate(edge_index, x=x, pos=pos)

    def message(
        self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor
    ) -> tuple[Tensor, Tensor]:
        gap = pos_i - pos_j
        near = gap.square().sum(-1, keepdim=True)
        m = self.edge(torch.cat([x_i, x_j, near], -1))
        m = self.gate(m) * m
        return m, gap * self.move(m)

    def aggregate(
        self,
        inputs: tuple[Tensor, Tensor],
        index: Tensor,
        dim_size: Optional[int] = None,  # noqa: UP045
    ) -> tuple[Tensor, Tensor]:
        m, moved = inputs
        return (scatter(m, index, 0, dim_size, 'sum'), scatter(moved, index, 0, dim_size, 'mean'))


def test_egnn(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(EGNN(16), [x, edges(), torch.randn(N, 3)], device)


class Mesh(MessagePassing):
    """New features of edges, which the nodes sum."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.mlp = nn.Sequential(
            nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)
        )

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        out = self.propagate(edge_index, x=x, e=e)
        return out, self.new

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        new = e + self.mlp(torch.cat([x_i, x_j, e], -1))
        self.new = new
        return new


def test_outputs_of_edges(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(Mesh(16), [x, edges(), torch.randn(E, 16)], device)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('num_edges', [E, 300_000])
def test_cuda_graph(dtype: torch.dtype, num_edges: int, device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    layer = pyg_fast.accelerate(Mesh(64)).to(device, dtype)
    index = edges(1_000, num_edges).to(device)
    leaves = [torch.randn(n, 64, device=device, dtype=dtype) for n in (1_000, num_edges)]
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def step() -> tuple[Tensor, ...]:
        outs = layer(leaves[0], index, leaves[1])
        return (*outs, *torch.autograd.grad([out.square().sum() for out in outs], leaves))

    replay, found = captured(step, warm_ups=3)
    with torch.no_grad():
        leaves[1].copy_(torch.randn_like(leaves[1]))
    replay()
    torch.testing.assert_close(found, step())


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('aggr', ['add', 'max'])
def test_half_types(aggr: str, dtype: torch.dtype, x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    if aggr == 'max' and dtype == torch.bfloat16:
        pytest.skip('rounding chooses other edges')
    if dtype == torch.bfloat16 and device.type == 'cpu':
        pytest.skip('numpy has no bfloat16')
    check(Two(16, 24, 20, aggr), [x, edges()], device, dtype, 0.05)


_mlps = st.tuples(
    st.lists(st.integers(1, 60), min_size=2, max_size=4),
    st.sampled_from([nn.ReLU, nn.SiLU, nn.Tanh, nn.GELU, nn.Softplus, nn.LeakyReLU]),
    st.booleans(), st.sampled_from(['add', 'mean', 'max']), st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(_mlps, st.integers(1, 70), st.integers(2, 200))
def test_random_mlps(mlp: Any, num_nodes: int, num_edges: int) -> None:
    """Widths, depths, norms, gates, graphs of a few nodes and of several tiles."""
    widths, activation, is_normed, aggr, seed = mlp
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Linear(2 * 5, widths[0]), activation()]
    for before, width in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, width), activation()]
        if is_normed and width > 1:
            layers.append(nn.LayerNorm(width))
            # Of maxima that are 0 PyTorch gives a share of the gradient to its initial zeros.
            nn.init.normal_(layers[-1].bias)
    index = torch.randint(num_nodes, (2, num_edges))
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    check(EdgeConv(nn.Sequential(*layers), aggr), [torch.randn(num_nodes, 5), index], device)


@pytest.mark.parametrize('value', [float('inf'), float('nan')])
@pytest.mark.parametrize('aggr', ['add', 'max'])
def test_what_is_not_finite_stays_in_its_row(
    aggr: str, value: float, x: Tensor, device: torch.device
) -> None:
    torch.manual_seed(1)
    layer, index = Two(16, 24, 20, aggr, edge=2).to(device), edges().to(device)
    ours, x = pyg_fast.accelerate(copy.deepcopy(layer)), x.to(device)
    e = torch.randn(E, 2, device=device)
    with on_tiles(device):
        clean = ours(x, index, e)
        e[200] = value
        found = ours(x, index, e)
    expected = layer(x, index, e)
    assert KERNEL in plan_of(ours)
    others = torch.arange(N, device=device) != index[1, 200]
    torch.testing.assert_close(found[others], clean[others])
    assert found.isfinite().equal(expected.isfinite())
    assert not found[index[1, 200]].isfinite().all()


class Rectified(MessagePassing):
    """Two layers whose values are as large as their inputs."""

    def __init__(self, width: int) -> None:
        super().__init__('add')
        self.first, self.second = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.second(self.first(x_i - x_j).relu()).relu()


def test_numbers_of_any_size(device: torch.device) -> None:
    """Each row is as exact as float32 would have it, however large others are; and so are sums of
    products over edges, of which one factor is as large as the other is small."""
    torch.manual_seed(1)
    layer, nodes = Rectified(24).to(device), torch.arange(N)
    index = torch.stack([nodes, nodes // 2 * 2])
    index = index[:, index[0] != index[1]].to(device)  # One edge ends at each other node.
    sizes = 10.0 ** torch.linspace(-14, 14, N, device=device)[:, None]
    x = torch.randn(N, 24, device=device) * sizes.roll(1, 0).maximum(sizes)
    weight = torch.linspace(-1, 2, N * 24, device=device).view(N, 24) / sizes
    found = []
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    for each, dtype in ((ours, x.dtype), (layer, torch.double)):
        each, at = each.to(dtype), x.to(dtype).requires_grad_()
        with on_tiles(device):
            out = each(at, index)
        grads = torch.autograd.grad(out, [at, *each.parameters()], weight.to(dtype))
        found.append([out.double(), *(grad.double() for grad in grads)])
    assert KERNEL in plan_of(ours)
    (out, grad, *totals), (right, right_grad, *right_totals) = found
    for a, b in ((out, right), (grad, right_grad)):
        rows = b.abs().amax(1) > 0
        assert ((a - b).abs().amax(1)[rows] <= 1e-5 * b.abs().amax(1)[rows]).all()
    for a, b in zip(totals, right_totals, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


class Gap(MessagePassing):
    """A linear map of the difference of both ends."""

    def __init__(self, width: int) -> None:
        super().__init__('add')
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin((x_i - x_j).relu()).relu()


@pytest.mark.parametrize('ratio', [1e2, 1e4])
def test_gradients_of_channels_of_small_edges(ratio: float, device: torch.device) -> None:
    """Nodes of two kinds have channels of their own, one kind larger; edges of both share tiles.
    Gradients are larger, too, so those of the small kind are less by the square of the ratio."""
    torch.manual_seed(1)
    layer, index = Gap(24).to(device), (edges() // 2 * 2).to(device)
    index[:, ::2] += 1
    x = torch.randn(N, 24, device=device) * torch.tensor([ratio, 1.0], device=device).repeat(12)
    x[::2, 1::2] = 0.0
    x[1::2, ::2] = 0.0
    found = []
    fused = pyg_fast.accelerate(copy.deepcopy(layer))
    for each, dtype in ((fused, x.dtype), (layer, torch.double)):
        with on_tiles(device):
            out = each.to(dtype)(x.to(dtype), index)
            found.append(torch.autograd.grad(out.square().sum(), each.lin.weight)[0].double())
    assert KERNEL in plan_of(fused)
    largest = found[1].abs().amax(0)  # of each channel
    torch.testing.assert_close(found[0] / largest, found[1] / largest, rtol=0, atol=1e-5)


@pytest.mark.parametrize('value', [float('inf'), float('nan')])
def test_gradient_of_a_parameter_where_an_edge_is_not_finite(
    value: float, device: torch.device
) -> None:
    """That of channels which are finite in all edges is as in PyG."""
    torch.manual_seed(1)
    layer, index, x = Gap(24).to(device), edges().to(device), torch.randn(N, 24, device=device)
    x[7, 0] = value
    found = []
    for each in (pyg_fast.accelerate(copy.deepcopy(layer)), layer):
        with on_tiles(device):
            found.append(torch.autograd.grad(each(x, index).sum(), each.lin.weight)[0])
        assert each is layer or KERNEL in plan_of(each)
    ours, theirs = found
    assert ours.isfinite().equal(theirs.isfinite())
    assert theirs[:, 1:].isfinite().any()
    assert not theirs[:, 0].isfinite().all()
    finite = theirs.isfinite()
    torch.testing.assert_close(ours[finite], theirs[finite], rtol=1e-4, atol=1e-4)


def test_same_bits(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    ours = pyg_fast.accelerate(Two(16, 24, 20).to(device))
    args = as_type([x, edges()], torch.float32, device)
    with on_tiles(device):
        first, second = results(ours, args), results(ours, args)
    assert KERNEL in plan_of(ours)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


def test_second_derivatives(x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    layer = Two(16, 24, 20).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    found = []
    for each in (ours, layer):
        at = x.to(device).clone().requires_grad_()
        with on_tiles(device):
            out = each(at, edges().to(device))
            (grad,) = torch.autograd.grad(out.square().sum(), at, create_graph=True)
            found.append(torch.autograd.grad(grad.square().sum(), [at, *each.parameters()]))
    assert KERNEL in plan_of(ours)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize('num_edges', [2, 63, 64, 65])
def test_few_edges(num_edges: int, x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    check(Two(16, 24, 20), [x, edges(num_edges=num_edges, hub=0)], device)


def test_one_part_if_torch_may_round(x: Tensor, device: torch.device) -> None:
    """With the error of TF32, to which torch rounds the maps of nodes on a GPU."""
    torch.manual_seed(1)
    tolerance = 5e-3 if device.type == 'cuda' else 2e-3
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision('high')
    try:
        check(Two(16, 24, 20), [x, edges()], device, tolerance=tolerance)
    finally:
        torch.set_float32_matmul_precision(before)


class Dropped(MessagePassing):
    """Values of edges that drop out before they are mapped."""

    def __init__(self, aggr: str, reads_twice: bool) -> None:
        super().__init__(aggr)
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, 12)
        self.reads_twice = reads_twice

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        hidden = F.dropout(self.first(torch.cat([x_i, x_j], -1)).tanh(), 0.25, self.training)
        out = F.dropout(self.second(hidden).tanh(), 0.5, self.training)
        return out * self.second.weight[0] if self.reads_twice else out


class Attention(MessagePassing):
    """Scores by an MLP of each edge."""

    def __init__(self, aggr: str, heads: int) -> None:
        super().__init__(aggr)
        self.first, self.score = nn.Linear(18, 12), nn.Linear(12, heads)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(
        self, x_i: Tensor, x_j: Tensor, e: Tensor, index: Tensor, ptr: OptTensor, size_i: int
    ) -> Tensor:
        hidden = self.first(torch.cat([x_i, x_j, e], -1)).tanh()
        alpha = softmax(self.score(hidden), index, ptr, size_i)
        return (alpha.unsqueeze(-1) * x_j.unflatten(-1, (alpha.size(-1), -1))).flatten(1)


@pytest.mark.parametrize('heads', [1, 4])
@pytest.mark.parametrize('aggr', ['add', 'mean'])
def test_attention_on_a_cpu(aggr: str, heads: int) -> None:
    torch.manual_seed(1)
    layer = Attention(aggr, heads).double()
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    args = as_type([torch.randn(N, 8), edges(), torch.randn(E, 2)], torch.float64, CPU)
    for mine, theirs in zip(results(ours, args), results(layer, args), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert ON_CPU in plan_of(ours)


@pytest.mark.parametrize('make', [
    lambda: Two(16, 200, 8), lambda: Two(16, 200, 8).bfloat16(),
    lambda: Two(16, 8, 8).double(),
])  # fmt: skip
def test_what_runs_in_blocks(make: Callable[[], nn.Module], x: Tensor) -> None:
    """Values that the registers cannot hold, and float64."""
    layer = pyg_fast.accelerate(make())
    with by_numpy(divide_rows):
        layer(x.to(next(layer.parameters()).dtype), edges())
    assert 'runs over blocks of' in plan_of(layer)  # They are few: PyG's code ran.


@pytest.mark.parametrize('aggr', ['add', 'max'])
@pytest.mark.parametrize('reads_twice', [False, True])
@pytest.mark.parametrize('on_cpu', [True, False])
def test_dropout(aggr: str, reads_twice: bool, on_cpu: bool, device: torch.device) -> None:
    """The backward pass, and that of torch operations, drop what the forward pass dropped. Where
    something else reads a weight, blocks compute the gradients."""
    if on_cpu and device.type == 'cuda':
        pytest.skip('of a CPU only')
    torch.manual_seed(1)
    dtype = torch.float64 if on_cpu else torch.float32
    conv = Dropped(aggr, reads_twice).to(device, dtype)
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    x = torch.randn(N, 8, dtype=dtype, device=device, requires_grad=True)
    index, wanted = edges().to(device), [x, *ours.parameters()]

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return layer(x, index)

    with nullcontext() if on_cpu else on_tiles(device):
        out = call(ours, x)
        assert (ON_CPU if on_cpu else KERNEL) in plan_of(ours)
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        grads = torch.autograd.grad(out, wanted, weight, retain_graph=True)
        again = torch.autograd.grad(out, wanted, weight, create_graph=True)
        scale = max(float(grad.abs().max()) for grad in grads)
        tight = {'rtol': 1e-7, 'atol': 1e-9} if on_cpu else {'rtol': 1e-4, 'atol': 1e-5 * scale}
        torch.testing.assert_close(again, grads, **tight)
        assert not torch.equal(ours(x, index), out)
        torch.testing.assert_close(ours.eval()(x, index), conv.eval()(x, index))
    if on_cpu:
        ours.train()
        direction = torch.randn_like(x) * 1e-6
        with torch.no_grad():
            change = call(ours, x + direction) - call(ours, x - direction)
        change = (change * weight).sum() / 2
        torch.testing.assert_close((grads[0] * direction).sum(), change, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize('kind', ['add', 'max', 'edges that others read'])
def test_compiled(
    kind: str, x: Tensor, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan = _replace.make_plan

    def plan_on_gpu(captured: Any, *args: Any) -> Any:
        return make_plan(dataclasses.replace(captured, on_cuda=True), *args)

    monkeypatch.setattr(_replace, 'make_plan', plan_on_gpu)
    if device.type == 'cpu' and kind != 'max':  # C++ of the rest once is enough.
        monkeypatch.setattr(pyg_fast._compile, 'backend', Backend())
    torch.manual_seed(1)
    args, layer = [x, edges()], Mesh(16).to(device)
    if kind in ('add', 'max'):
        layer = Two(16, 24, 20, kind).to(device)
    else:  # The op writes them: a kernel for the sum alone would run their maps twice.
        args.append(torch.randn(E, 16))
    ours = pyg_fast.compile(copy.deepcopy(layer), fullgraph=True)
    args = as_type(args, torch.float32, device)
    with on_tiles(device) as names:
        found = results(ours, args)
    assert device.type == 'cuda' or names.count('message_tiles') == 2
    for mine, theirs in zip(found, results(layer, args), strict=True):
        most = float(theirs.detach().abs().max())
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * most)


@pytest.mark.parametrize('make', [
    lambda: Two(16, 24, 20, 'max', 2), lambda: Attention('add', 2),
])  # fmt: skip
def test_compiled_on_a_cpu(make: Callable[[], nn.Module], x: Tensor) -> None:
    torch.manual_seed(1)
    layer = make()
    layer.first = nn.Linear(34, layer.first.out_features)
    args, backend = as_type([x, edges(), torch.randn(E, 2)], torch.float64, CPU), Backend()
    ours = pyg_fast.accelerate(copy.deepcopy(layer.double()))
    ours = torch.compile(ours, backend=backend, fullgraph=True)
    for mine, theirs in zip(results(ours, args), results(layer, args), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert backend.kernels == 1


class Filter(MessagePassing):
    """An MLP of features of edges: no map runs on nodes."""

    def __init__(self, width: int = 16, p: float | None = None) -> None:
        super().__init__(aggr='add')
        dropout = [] if p is None else [nn.Dropout(p)]
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.GELU(), *dropout, nn.Linear(8, width))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return self.mlp(e) * x_j


@pytest.mark.parametrize(('width', 'is_slower'), [(72, True), (64, False)])
def test_pygs_code_where_it_is_faster_on_a_gpu(
    width: int, is_slower: bool, x: Tensor, limits: Callable[..., None]
) -> None:
    """To train with wide maps of float32 of edges alone, behind random numbers."""
    limits(few_edges=(0, 0))
    layer = pyg_fast.accelerate(Filter(width, 0.5))
    with pyg_fast.small_graphs('pyg'), by_numpy(divide_rows) as names:
        layer(torch.randn(N, width), edges(), torch.randn(E, 2))
        assert ('again' in (why_pygs(layer) or '')) == is_slower
        assert ('message_tiles' in names) != is_slower
        with torch.no_grad():  # No backward pass, whatever ran before.
            layer(torch.randn(N, width), edges(), torch.randn(E, 2))
    assert why_pygs(layer) == ''
    assert 'message_tiles' in names


def test_maps_of_edges_alone_are_kept(x: Tensor, limits: Callable[..., None]) -> None:
    """To train, torch computes them; else tiles do."""
    limits(few_edges=(0, 0))
    layer = Filter()
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    args = as_type([x, edges(), torch.randn(E, 2)], torch.float32, CPU)
    with pyg_fast.small_graphs('pyg'), by_numpy(divide_rows) as names:
        found = results(ours, args)
        assert why_pygs(ours) == ''
        assert set(names) == {'message_pass'}
        with torch.no_grad():
            ours(*args)
        assert 'message_tiles' in names
    for mine, theirs in zip(found, results(layer, args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_maps_that_tiles_multiply_are_not_kept(x: Tensor, limits: Callable[..., None]) -> None:
    """With products as of TF32, tiles train with few maps."""
    limits(few_edges=(0, 0))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision('high')
        with pyg_fast.small_graphs('pyg'), by_numpy(divide_rows) as names:
            args = as_type([x, edges(), torch.randn(E, 2)], torch.float32, CPU)
            results(pyg_fast.accelerate(Filter()), args)
    finally:
        torch.set_float32_matmul_precision(before)
    assert names.count('message_tiles') == 2


def test_maps_of_edges_alone_are_kept_in_compiled_code(
    x: Tensor, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_plan = _replace.make_plan

    def plan_on_gpu(captured: Any, *args: Any) -> Any:
        return make_plan(dataclasses.replace(captured, on_cuda=True), *args)

    limits(few_edges=(0, 0))
    monkeypatch.setattr(_replace, 'make_plan', plan_on_gpu)
    monkeypatch.setattr(pyg_fast._compile, 'backend', Backend())
    layer = Filter()
    args = as_type([x, edges(), torch.randn(E, 2)], torch.float32, CPU)
    with pyg_fast.small_graphs('pyg'), by_numpy(divide_rows) as names:
        ours = pyg_fast.compile(copy.deepcopy(layer), fullgraph=True)
        found = results(ours, args)
    assert set(names) == {'message_pass'}
    for mine, theirs in zip(found, results(layer, args), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('spills', 'shared', 'fits'), [
    (48, 113, True), (49, 113, False), (48, 114, False),
])  # fmt: skip
def test_first_form_that_fits(
    spills: int, shared: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs of a multiprocessor have 114 KiB each, of which the system takes one."""
    few, more = _tiles.Form(4, 2), _tiles.Form(8, 1)
    source = _tiles.TileSource(f'# {spills} {shared}', (), (few, more), (), {}, {}, 0)
    compiled = []

    def compile_form(text: str, name: str, num_warps: int, *args: Any) -> Any:
        compiled.append((num_warps, args[-1]))
        return SimpleNamespace(
            n_spills=spills, metadata=SimpleNamespace(shared=shared * 2**10)
        )  # fmt: skip

    monkeypatch.setattr(_tiles_cuda._cuda, 'compiled_kernel', compile_form)
    monkeypatch.setattr(_tiles_cuda, 'shared_memory', lambda: 227 * 2**10)
    for _ in range(2):
        chosen = _tiles_cuda._choose_form(source, [torch.ones(1)], (), (), ())
        assert chosen == (few if fits else more)
    assert compiled == [(4, 255)]  # once


def test_next_form_where_one_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = _tiles.Form(4, 2, 2), _tiles.Form(4, 2)

    def compile_form(*args: Any) -> Any:
        raise RuntimeError('PassManager::run failed')

    source = _tiles.TileSource('# no form', (), forms, (), {}, {}, 0)
    monkeypatch.setattr(_tiles_cuda._cuda, 'compiled_kernel', compile_form)
    assert _tiles_cuda._choose_form(source, [torch.ones(1)], (), (), ()) == forms[1]


@pytest.mark.parametrize(('hidden', 'out', 'forward', 'backward'), [
    (24, 20, {1, 2}, {1, 2}), (12, 12, {1, 2}, {1}), (100, 72, {1}, {1}),
])  # fmt: skip
def test_what_reads_ahead(
    hidden: int, out: int, forward: set[int], backward: set[int], x: Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Passes read ahead, but around the smallest products and what passes through memory; forward
    passes of float32 with rows of edges alone."""
    found = []

    def choose(source: Any, *args: Any) -> _tiles.Form:
        found.append({form.stages for form in source.forms})
        return source.forms[0]

    with by_numpy(divide_rows):
        monkeypatch.setattr(_tiles_cuda, '_choose_form', choose)
        pyg_fast.accelerate(Two(16, hidden, out, 'add', 2))(x, edges(), torch.randn(E, 2))
        layer = pyg_fast.accelerate(Two(16, hidden, out))
        layer(x.requires_grad_(), edges()).sum().backward()
    assert found == [forward, {1}, backward]


class Softened(MessagePassing):
    """A filter as SchNet's, of some times its input."""

    def __init__(self, times: float) -> None:
        super().__init__('add')
        self.first, self.second, self.times = nn.Linear(5, 20), nn.Linear(20, 20), times

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return x_j * F.softplus(self.second(F.softplus(self.first(e) * self.times) - math.log(2)))


@pytest.mark.parametrize('times', [1.0, 60.0])
def test_softplus(times: float, x: Tensor, device: torch.device) -> None:
    """Also where its exponential is large, or next to nothing."""
    torch.manual_seed(1)
    with pyg_fast.small_graphs('kernel'):
        check(Softened(times), [x.repeat(1, 2)[:, :20], edges(), torch.randn(E, 5)], device)


def test_mlps_of_few_edges(
    x: Tensor, monkeypatch: pytest.MonkeyPatch, limits: Callable[..., None]
) -> None:
    """A call that would not be one of few edges for an MLP says whether the message is one; its
    width is that of an MLP from then on."""
    limits(few_edges=(E * 32, 0))
    monkeypatch.setattr(_few, 'width_of_mlp', lambda width, on_gpu: 3 * width)
    first = True

    def may_be_wider(conv: MessagePassing, edge_index: Tensor, kind: str) -> bool:
        return not first

    monkeypatch.setattr(_few, '_may_be_wider', may_be_wider)
    with pyg_fast.small_graphs('pyg'), by_numpy(divide_rows) as names:
        layer = pyg_fast.accelerate(Two(16, 24, 20))
        layer(x, edges())
        assert 'few' in why_pygs(layer)
        assert not names
        first = False
        for more in (1, 0):  # What was few is not asked again.
            layer(x, edges(num_edges=E + more))
            assert not why_pygs(layer)
        assert names.count('message_tiles') == 2
        layer(x, edges(num_edges=E // 4, hub=10))
        assert 'few' in why_pygs(layer)


class Scored(MessagePassing):
    """A softmax of an MLP of each edge, which more than a product with values reads."""

    def __init__(self, kind: str, heads: int) -> None:
        super().__init__('mean' if kind == 'mean' else 'sum')
        self.kind, self.heads = kind, heads
        self.score = nn.Sequential(nn.Linear(16, 6), nn.SiLU(), nn.Linear(6, heads))
        self.mix, self.post = nn.Linear(heads, heads), nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> list[Tensor]:
        out = self.propagate(edge_index, x=x)
        return [out] if self.kept is None else [out, self.kept]

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        score = self.score(torch.cat([x_i, x_j], -1))
        alpha = softmax(score, index, num_nodes=size_i)
        if self.kind in ('kept', 'kept score'):
            self.kept = alpha if self.kind == 'kept' else score
        if self.kind == 'mixed heads':
            alpha = self.mix(alpha)
        elif self.kind == 'a function':
            alpha = (1 + alpha).log()
        elif self.kind == 'dropout':
            alpha = F.dropout(alpha, 0.5, self.training) + alpha
        out = (alpha.unsqueeze(-1) * x_j.view(-1, self.heads, 8 // self.heads)).flatten(1)
        return self.post(out).relu() if self.kind == 'mapped' else out


@pytest.mark.parametrize('heads', [1, 4])
@pytest.mark.parametrize(
    'kind', ['kept', 'kept score', 'mixed heads', 'a function', 'mapped', 'mean', 'dropout']
)
def test_a_softmax_that_more_than_a_product_reads(kind: str, heads: int) -> None:
    torch.manual_seed(0)
    layer = Scored(kind, heads).double().eval()
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    x = torch.randn(N, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for each in (layer, ours):
        outs = each(x, edges())
        total = sum((out * torch.linspace(-1, 1, len(out)).view(-1, 1)).sum() for out in outs)
        wanted = [x, *each.parameters()]
        grads = torch.autograd.grad(total, wanted, materialize_grads=True, allow_unused=True)
        found.append([*outs, *grads])
    torch.testing.assert_close(found[1], found[0])
    assert 'tiles' in plan_of(ours)
    if kind == 'dropout':  # The same factors in both passes: a step along the gradient.
        ours.train()
        torch.manual_seed(1)
        (out,) = ours(x, edges())
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        step = 1e-6 * grad
        torch.manual_seed(1)
        (after,) = ours(x + step, edges())
        rise = after.square().sum() - out.square().sum()
        torch.testing.assert_close(rise, (grad * step).sum(), rtol=1e-3, atol=0)


class Narrow(MessagePassing):
    """Its inputs are narrower than what it aggregates."""

    def __init__(self, maps: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 40)
        self.maps = maps

    def forward(self, pos: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, pos=pos)

    def message(self, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        away = (pos_i - pos_j).tanh()
        return self.lin(away).relu() if self.maps else away


@pytest.mark.parametrize('maps', [False, True])
def test_few_edges_of_narrow_inputs(maps: bool, limits: Callable[..., None]) -> None:
    """The first kernel tells how wide the message is."""
    limits(few_edges=(E * 32, 0))
    layer, pos = pyg_fast.accelerate(Narrow(maps)), torch.randn(N, 2)
    with pyg_fast.small_graphs('pyg'):
        layer(pos, edges())
        assert not why_pygs(layer)
        layer(pos, edges())
        assert ('few' in why_pygs(layer)) is not maps


class Own(MessagePassing):
    """A message that a function writes, of a hidden value of each edge."""

    def __init__(self, write: Callable[['Own', Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(aggr='add')
        self.first, self.second = nn.Linear(32, 12), nn.Linear(12, 12)
        self.one, self.matrix = nn.Linear(1, 1), nn.Parameter(torch.randn(3, 4))
        self.write = write

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        hidden = F.silu(self.first(torch.cat([x_i, x_j], -1)))
        return self.write(self, hidden, F.silu(self.second(hidden)), x_j)


# What an adversary wrote; where tiles refuse, blocks or PyG's code run.
HOSTILE = {
    'a map of one number of several': lambda own, h, f, x_j: (
        own.one(f.unsqueeze(-1)).squeeze(-1).softmax(-1)
    ),
    'a matrix as a vector': lambda own, h, f, x_j: f * own.matrix.view(-1),
    'a matrix, transposed, as a vector': lambda own, h, f, x_j: f * own.matrix.t().reshape(-1),
    'a sum of booleans': lambda own, h, f, x_j: f * (h > 0).sum(-1, keepdim=True),
    'a weight read twice': lambda own, h, f, x_j: F.silu(own.second(f)),
    'a residual sum': lambda own, h, f, x_j: F.silu(own.second(h + h.tanh())) * h,
    'infinite in padded columns': lambda own, h, f, x_j: (f.abs() + 1).log() * f,
}

ON_TILES = 'a weight read twice', 'a residual sum', 'infinite in padded columns'


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_messages(name: str, x: Tensor, device: torch.device) -> None:
    torch.manual_seed(1)
    layer = Own(HOSTILE[name]).to(device)
    args = as_type([x, edges()], torch.float32, device)
    wide = as_type(args, torch.float64, device)
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    with on_tiles(device) as names:
        out = ours(*args)
        out.square().sum().backward()
    if name in ON_TILES and device.type == 'cpu':  # Forward and backward.
        assert names.count('message_tiles') == 2
    exact = copy.deepcopy(layer).double()
    expected = exact(*wide)
    expected.square().sum().backward()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for mine, right in zip(ours.parameters(), exact.parameters(), strict=True):
        if right.grad is not None:
            scale = float(right.grad.abs().max())
            torch.testing.assert_close(
                mine.grad.double(), right.grad, rtol=1e-3, atol=2e-5 * scale + 1e-4
            )


class Kept(MessagePassing):
    """A value of edges in an attribute that reads a weight again; no part of a node is mapped."""

    def __init__(self) -> None:
        super().__init__(aggr='add')
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        hidden = F.silu(self.second(F.silu(self.first(e.tanh()))))
        self.kept = self.second(hidden.tanh()).tanh()
        return hidden * x_j


def test_kept_value_that_reads_a_weight_again(x: Tensor, device: torch.device) -> None:
    """Without a gradient of that value, tiles compute the gradients of the rest."""
    torch.manual_seed(1)
    check(Kept(), [x, edges(), torch.randn(E, 16)], device)


def test_newer_settings_of_precision(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> str:
        raise RuntimeError('PyTorch is checking whether allow_tf32 is enabled')

    monkeypatch.setattr(torch, 'get_float32_matmul_precision', mixed)
    layer = pyg_fast.accelerate(Two(16, 24, 20))
    with by_numpy(divide_rows) as names:
        layer(x, edges())
    assert 'message_tiles' in names


def test_bound_of_shared_memory(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU with little shared memory blocks run."""
    monkeypatch.setattr(_tiles, 'shared_memory', lambda: 2**14)
    layer = pyg_fast.accelerate(Two(16, 24, 20))
    with by_numpy(divide_rows):
        layer(x, edges())
    assert 'runs over blocks of' in plan_of(layer)


def test_a_matrix_that_no_product_reads() -> None:
    program = Program()
    weight = program.permute(program.add('load', (), ('param', 1), (4, 3)), (1, 0))
    x = program.add('load', (), ('edge', 0), (4,), dependence=EDGE)
    at = program.pointwise('add', x, program.add('sum', (weight,), (0,), (4,)))
    with pytest.raises(_tiles.Refused, match=r'a parameter of shape \(3, 4\)'):
        _tiles.generate_tiles(program, [_tiles.Out(at, 'sum', 'float32')], 'highest')
