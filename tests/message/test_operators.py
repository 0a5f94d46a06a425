"""Operations of messages that kernels compute by others: values and derivatives are torch's."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import MessagePassing

import pyg_fast
from tests._compiled import Backend
from tests._report import why_pygs

from ._by_numpy import by_numpy
from ._parts import divide_rows

INF, NAN = math.inf, math.nan
Operation = Callable[[Tensor], Tensor]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out[:, ::2] = x[:, ::2] * cos - x[:, 1::2] * sin
    out[:, 1::2] = x[:, ::2] * sin + x[:, 1::2] * cos
    return out


def one_zero(x: Tensor) -> Tensor:
    return torch.cat([x[:, :3], x[:, 3:] * 0], -1)


def huge_of(x: Tensor) -> float:
    return 1e300 if x.dtype == torch.float64 else 1e30


# By name: the function, and numbers where it or its derivative is special.
UNARY: dict[str, tuple[Operation, list[float]]] = {
    'sinh': (torch.sinh, [0, 1, -1, 1e-9, 60, -60, INF, -INF, NAN]),
    'cosh': (torch.cosh, [0, 1, -1, 1e-9, 60, -60, INF, -INF, NAN]),
    'tan': (torch.tan, [0, 1e-9, 1.5, -40, INF, NAN]),
    'asinh': (torch.asinh, [0, -0.0, 1e-9, -1e-9, 1e8, 1e10, -1e12, -1e15, INF, -INF, NAN]),
    'acosh': (torch.acosh, [1, 1.125, 0.5, 1e8, 1e10, 1e15, INF, NAN]),
    'atanh': (torch.atanh, [0, 1e-9, -1e-9, 1, -1, 0.999, -0.999, 2, NAN]),
    'logit': (torch.logit, [0, 1, 1e-6, 0.25, 0.999, NAN]),
    'logit, eps': (lambda x: torch.logit(x, 0.125), [-1, 0, 0.125, 0.5, 0.875, 1, 2, INF, NAN]),
    'hardswish': (F.hardswish, [-4, -3, -2.99, 0, 2.99, 3, 4, INF, -INF]),
    'softshrink': (lambda x: F.softshrink(x, 0.25), [-1, -0.25, 0, 0.25, 1, INF, -INF]),
    'hardshrink': (lambda x: F.hardshrink(x, 0.25), [-1, -0.25, 0, 0.25, 1, INF, -INF]),
    'trunc': (lambda x: torch.trunc(x) + x, [-1.5, 1.5, 2, -2, 0, INF, NAN]),
    'frac': (torch.frac, [-1.5, 1.5, 2, -2, 0, INF, NAN]),
    'round': (
        lambda x: x.round() + x,
        [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.3, 1e15 + 1, INF, -INF, NAN],
    ),
    'norm, 3': (lambda x: x.norm(p=3, dim=-1, keepdim=True), [0, 1, -2, 1e-9, INF, NAN]),
    'norm, 0.5': (lambda x: one_zero(x).norm(p=0.5, dim=-1)[:, None], [0, 1, -2, 1e-9, NAN]),
    'norm, 1.5': (lambda x: one_zero(x).norm(p=1.5, dim=-1)[:, None], [0, 1, -2, 1e-9, NAN]),
    'norm, inf': (lambda x: torch.linalg.norm(x, INF, -1, True), [0, 1, -2, INF]),
    'norm, -inf': (lambda x: torch.linalg.norm(x, -INF, -1, True), [0, 1, -2, -INF]),
    'norm, 0': (lambda x: one_zero(x).norm(p=0, dim=-1)[:, None] * x, [0, 1, -2, INF]),
    'remainder': (lambda x: x % 0.5, [0, -0.0, 0.5, -0.25, 7.3, -7.3, 1e15, INF, NAN]),
    'remainder by -2': (lambda x: x % -2, [0, 2, -2, 7.3, -7.3, 1e15, INF, NAN]),
    'fmod': (lambda x: torch.fmod(x, 4), [0, 4, -4, 7.3, -7.3, 1e15, INF, NAN]),
    'rrelu': (lambda x: F.rrelu(x), [0, 1, -1, INF, -INF, NAN]),
    'sinc': (torch.sinc, [0, 1, -0.5, 0.25, 2.25]),
    'isinf': (lambda x: x * torch.isinf(x), [0, 1.5, -1.5, INF, -INF, NAN]),
    'isfinite': (lambda x: x * torch.isfinite(x), [0, 1.5, -1.5, INF, -INF, NAN]),
    'where, huge': (lambda x: torch.where(x > 0, x, huge_of(x)).clamp(max=2), [1, 0, -1]),
    'nan_to_num': (torch.nan_to_num, [0, 1, INF, -INF, NAN]),
    'nan_to_num, numbers': (lambda x: torch.nan_to_num(x, 1.5, 2.5, -3.5), [0, INF, -INF, NAN]),
    'nan_to_num, infinite': (lambda x: torch.nan_to_num(x, INF, NAN), [0, INF, -INF, NAN]),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'hypot': torch.hypot,
    'logaddexp': torch.logaddexp,
    'lerp by 0.3': lambda a, b: torch.lerp(a, b, 0.3),
    'lerp by 0.7': lambda a, b: torch.lerp(a, b, 0.7),
    'lerp by a tensor': lambda a, b: torch.lerp(a, b, torch.sigmoid(b)),
    'pad': lambda a, b: F.pad(a, (1, 1))[:, 1:-1] + F.pad(b, (2, -1), value=0.5)[:, 1:],
    'pad two': lambda a, b: F.pad((a * b).view(-1, 2, 2), (-1, 3, 2, 0), value=-1.0).flatten(1),
    'pad one': lambda a, b: F.pad(a, (0, 1)) * F.pad(b, (1, 0)),
    'distance': lambda a, b: F.pairwise_distance(a, b, keepdim=True) * b,
    'distance, 1': lambda a, b: F.pairwise_distance(a, b, 1.0).unsqueeze(-1) * b,
    'distance, no eps': lambda a, b: F.pairwise_distance(a, b, 2, 0.0, True) * b,
    'flip': lambda a, b: a.flip(1) * b.flip(-1),
    'index of channels': lambda a, b: a[:, [1, 0, -1, 1]] * b.view(-1, 2, 2)[:, [1, 1]].flatten(1),
    'index of matrices': lambda a, b: a.view(-1, 2, 2)[:, [0, 0, 1], [1, -1, 0]] * b[:, [3]],
    'prod': lambda a, b: one_zero(a).prod(-1, keepdim=True) + b.view(-1, 2, 2).prod(1).repeat(1, 2),
    'cumsum': lambda a, b: a.cumsum(-1) * b.cumprod(-1) + one_zero(a).cumprod(1),
    'diagonal': lambda a, b: (a.view(-1, 2, 2) @ b.view(-1, 2, 2)).diagonal(0, 1, 2),
    'diagonal, offset': lambda a, b: a.view(-1, 2, 2).diagonal(1, -1, -2) * b,
    'trace': lambda a, b: torch.einsum('eii->e', a.view(-1, 2, 2))[:, None] * b,
    'fmax': lambda a, b: torch.fmax(a, b.log()) - torch.fmin(a.log(), b),
    'roll': lambda a, b: a.roll(1, 1) * b.roll(-3, 1) + b.roll(4, 1),
    'arange': lambda a, b: a * torch.arange(4, device=a.device) + b,
    'linspace': lambda a, b: torch.exp(a - torch.linspace(-1, 1, 4, device=a.device).to(a)) * b,
    'tensor': lambda a, b: a * torch.tensor([1.5, -2, 0, 4], device=a.device).to(a) + b,
    'eye': lambda a, b: a @ (torch.eye(4, device=a.device, dtype=a.dtype) + 1) * b,
    'xor': lambda a, b: torch.where((a > 0) ^ (b > 0), a, b * ((a > 1) ^ (b < 0))),
    'products of flags': lambda a, b: a * ((a > 0) * (b > 0)) + b * ((a > 1) + (b > 1)),
    'isclose': lambda a, b: a * torch.isclose(a, b, 0.5),
    'rotary': lambda a, b: rotary(a, b[:, ::2], b[:, 1::2]),
    'columns': lambda a, b: a.view(-1, 2, 2)[:, :, 1::2].flatten(1) * b.view(-1, 2, 2)[:, ::2, 0],
    'cross': lambda a, b: torch.linalg.cross(a[:, :3], b[:, 1:]) * (a * b).sum(-1, keepdim=True),
    'one number': lambda a, b: (a.std(-1) + b.var(-1))[:, None],
    'atanh of tanh': lambda a, b: a.tanh().atanh() * b.asinh(),
}


class Applies(MessagePassing):
    def __init__(self, function: Callable[..., Tensor], aggr: str = 'sum') -> None:
        super().__init__(aggr)
        self.function = function

    def forward(self, x: Tensor, y: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, y=y)

    def message(self, x_j: Tensor, y_j: Tensor) -> Tensor:
        return self.function(x_j, y_j)


def check(function: Callable[..., Tensor], *calls: tuple[Tensor, Tensor, Tensor, float]) -> None:
    """Compares results and derivatives with those of PyG's layer: for edges, both inputs, and the
    error that is allowed."""
    theirs, ours = Applies(function), pyg_fast.accelerate(Applies(function))
    for edges, x, y, exact in calls:
        results = []
        for conv in (ours, theirs):
            leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
            out = conv(*leaves, edges)
            weight = torch.linspace(-1, 1.5, out.numel(), dtype=out.dtype, device=out.device)
            grads = torch.autograd.grad((out.flatten() * weight).sum(), leaves, allow_unused=True)
            results.append([out, *(g for g in grads if g is not None)])
        assert why_pygs(ours) == ''
        torch.testing.assert_close(*results, rtol=exact, atol=exact, equal_nan=True)


DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5)]


@pytest.mark.parametrize(('dtype', 'exact'), DTYPES)
@pytest.mark.parametrize('name', UNARY)
def test_unary(name: str, dtype: torch.dtype, exact: float, device: torch.device) -> None:
    """Random numbers, then special ones: each has a node, and an edge that ends in another one."""
    function, numbers = UNARY[name]
    torch.manual_seed(0)
    edges = torch.randint(9, (2, 40), device=device)
    x, y = torch.randn(2, 9, 4, dtype=dtype, device=device)
    x = x.abs() + 1.1 if name == 'acosh' else x.sigmoid() if name[:5] in ('logit', 'atanh') else x
    if name == 'hardswish' and device.type == 'cuda':
        exact = max(exact, 1e-7)  # Torch multiplies by a sixth of float32 there.
    special = torch.tensor(numbers, dtype=dtype, device=device).view(-1, 1).repeat(1, 4)
    nodes = torch.arange(special.size(0), device=device)
    check(
        lambda x, y: function(x) * y, (edges, x, y, exact * 10),
        (torch.stack([nodes, nodes.flip(0)]), special, torch.ones_like(special), exact),
    )  # fmt: skip


# Those that only move, add and multiply values do so in any dtype.
MOVES = {
    'pad', 'pad two', 'pad one', 'flip', 'index of channels', 'index of matrices', 'prod', 'cumsum',
    'diagonal', 'diagonal, offset', 'trace', 'roll', 'products of flags', 'rotary', 'columns',
    'cross',
}  # fmt: skip


@pytest.mark.parametrize(
    ('name', 'dtype', 'exact'),
    [(name, *dtype) for name in BINARY for dtype in DTYPES[: 1 if name in MOVES else 2]],
)
def test_binary(name: str, dtype: torch.dtype, exact: float, device: torch.device) -> None:
    torch.manual_seed(0)
    edges = torch.randint(9, (2, 40), device=device)
    x, y = torch.randn(2, 9, 4, dtype=dtype, device=device)
    check(BINARY[name], (edges, x, y, exact * 10))


@pytest.mark.parametrize('name', ['index of channels', 'index of matrices', 'cumsum', 'roll'])
def test_channels_by_numpy(name: str) -> None:
    """The kernels of a GPU, where the axes of a pass may be those of another view."""
    pytest.importorskip('triton')
    edges = torch.randint(9, (2, 40))
    x, y = torch.randn(2, 9, 4, dtype=torch.float64)
    with by_numpy(divide_rows):
        check(BINARY[name], (edges, x, y, 1e-11))


@pytest.mark.parametrize(('dtype', 'exact'), DTYPES)
@pytest.mark.parametrize(
    ('name', 'pairs'),
    [
        ('hypot', [(3, 4), (0, 2), (-1e30, 1e30), (1e-30, 1e-30), (INF, 1), (-INF, -2), (0, 0)]),
        ('logaddexp', [(0, 0), (1, 1), (0, -80), (90, 100), (INF, 1), (-INF, 1), (-INF, -INF),
                       (INF, INF), (NAN, 1)]),
        ('lerp by 0.3', [(1, 1), (0, 2), (1e30, -1e30), (NAN, 1), (INF, 1)]),
        ('lerp by 0.7', [(1, 1), (0, 2), (1e30, -1e30), (NAN, 1), (INF, 1)]),
        ('distance, no eps', [(1, 1), (0, 2), (3, -4)]),
    ],
)  # fmt: skip
def test_special_pairs(
    name: str, pairs: list[tuple[float, float]], dtype: torch.dtype, exact: float,
    device: torch.device,
) -> None:  # fmt: skip
    x, y = torch.tensor(pairs, dtype=dtype, device=device).t().unsqueeze(-1)
    nodes = torch.arange(x.size(0), device=device)
    check(BINARY[name], (torch.stack([nodes, nodes.flip(0)]), x, y, exact))


@pytest.mark.parametrize('number', [710.0, -710.0])
def test_a_hyperbolic_sine_overflows_as_late_as_torchs(number: float, device: torch.device) -> None:
    x = torch.tensor([[number]] * 2, dtype=torch.float64, device=device)
    nodes = torch.arange(2, device=device)
    for function in (torch.sinh, torch.cosh):
        scaled = lambda x, y, f=function: f(x) * 1e-300 + y  # noqa: E731
        check(scaled, (torch.stack([nodes, nodes]), x, torch.zeros_like(x), 1e-10))


def test_second_derivatives(device: torch.device) -> None:
    edges = torch.randint(9, (2, 40), device=device)
    x, y = torch.randn(2, 9, 4, dtype=torch.float64, device=device)
    y[:2] = x[:2]  # also where torch's maximum has a kink
    for function in (torch.logaddexp, torch.hypot, lambda x, y: x.asinh() * y.sinh() + x.cosh()):
        theirs, results = Applies(function), []
        ours = pyg_fast.accelerate(Applies(function))
        for conv in (ours, theirs):
            leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
            out = conv(*leaves, edges)
            first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
            results.append([*first, *second])
        assert why_pygs(ours) == ''
        torch.testing.assert_close(*results)


OF_NUMBERS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x_i, x_j: x_j + x_i * 0.05,
    lambda x_i, x_j: (x_j * 0.3 - x_i.relu() * 0.05) / 3,
    lambda x_i, x_j: torch.lerp(x_i, x_j, 0.3) + F.leaky_relu(x_i + x_j, 0.1) * 0.7,
]


@pytest.mark.parametrize('function', OF_NUMBERS)
def test_numbers_of_derivatives_are_float64(
    function: Callable[[Tensor, Tensor], Tensor], device: torch.device
) -> None:
    """A gradcheck does not see a factor that was rounded to float32."""

    class OfBoth(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return function(x_i, x_j)

    ours, grads = pyg_fast.accelerate(OfBoth()), []
    edges = torch.randint(9, (2, 40), device=device)
    x = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)
    for conv in (ours, OfBoth()):
        grads.append(torch.autograd.grad(conv(x, edges).sin().sum(), x)[0])
    assert why_pygs(ours) == ''
    torch.testing.assert_close(*grads, rtol=1e-13, atol=1e-13)


OF_EACH_EDGE: list[Operation] = [
    lambda d: d[:, [1, 0, -1]] + d.view(-1, 2, 2)[:, [0, 0, 1], [1, -1, 0]],
    lambda d: torch.cat([d.cumsum(-1), d.cumprod(-1), d.prod(-1, keepdim=True)], -1),
    lambda d: torch.cat([d.norm(p=3, dim=-1)[:, None], d.relu().norm(p=0.5, dim=-1)[:, None]], -1),
    lambda d: torch.cat([d % 0.5, torch.fmod(d * 4, 2), d.view(-1, 2, 2).diagonal(0, 1, 2)], -1),
    lambda d: (d > 0).sum(-1, keepdim=True) * d,
    lambda d: (d.unsqueeze(-1) > d[:, None, :2]).sum(-1) * d,
]


@pytest.mark.parametrize('number', range(len(OF_EACH_EDGE)))
def test_values_of_each_edge(number: int, device: torch.device) -> None:
    """A kernel computes these, where one computes those of a node before."""
    function = OF_EACH_EDGE[number]

    class OfEach(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return function((x_i - x_j) * x_j)

    torch.manual_seed(0)
    ours = pyg_fast.accelerate(OfEach())
    edges = torch.randint(9, (2, 40), device=device)
    x = torch.randn(9, 4, dtype=torch.float64, device=device)
    torch.testing.assert_close(ours(x, edges), OfEach()(x, edges))
    x.requires_grad_()
    grads = [torch.autograd.grad(conv(x, edges).sin().sum(), x)[0] for conv in (ours, OfEach())]
    assert why_pygs(ours) == ''
    torch.testing.assert_close(*grads)


def _raises(x: Tensor, y: Tensor) -> Tensor:
    raise ValueError('bad\nnumbers')


@pytest.mark.parametrize(
    ('function', 'reason'),
    [
        (_raises, 'message raises ValueError: bad'),
        (lambda x, y: x * {}['z'], 'message raises KeyError: z'),
        (lambda x, y: torch.sigmod(x), 'message raises AttributeError'),
        (lambda x, y: x.nothere, 'message cannot be traced: it reads what has no known type'),
        (lambda x, y: None, 'message returns no tensor'),
        (
            lambda x, y: torch.cat([x, y], -1) + x,
            'message cannot be traced: RuntimeError: The size',
        ),
    ],
)
def test_reasons_of_errors(function: Callable[..., Tensor], reason: str) -> None:
    ours = pyg_fast.accelerate(Applies(function))
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.raises((ValueError, KeyError, AttributeError, TypeError, RuntimeError)):
        ours(torch.ones(3, 4), torch.ones(3, 4), edges)
    found = why_pygs(ours)
    assert found.startswith(reason)
    assert '_entry.py' not in found
    assert 'numbers' not in found.partition(' (File ')[0]


OF_EDGES = torch.ones(3, 1)


@pytest.mark.parametrize(
    ('function', 'reason'),
    [
        (lambda x, y: torch.autograd.grad(x.sum(), x)[0] * y, 'message calls torch.autograd.grad,'),
        (lambda x, y: x * OF_EDGES, 'message reads a tensor of 3 rows that propagate did not get'),
        (lambda x, y: x.repeat(1, 40).flip(1), 'a flip of more than 128 channels'),
        (lambda x, y: x[:, list(range(4)) * 40], 'an index of more than 128 channels'),
        (lambda x, y: x.repeat(1, 5).cumsum(-1), 'a cumulative sum of more than 16 channels'),
        (lambda x, y: x.cumsum(0), 'a cumulative sum over edges'),
        (lambda x, y: x.repeat(1, 1050) * torch.tensor([1] * 4200), 'a constant tensor made in'),
        (lambda x, y: x.norm(p=-1, dim=-1, keepdim=True), 'a norm of order -1'),
        (lambda x, y: x % 0.3, 'a remainder of a division by 0.3, which is no power of two'),
        (lambda x, y: x + 0 * torch.rand_like(torch.arange(4.0)), 'aten.rand_like.default'),
        (lambda x, y: torch.polar(x, y).real, 'polar makes complex numbers'),
        (lambda x, y: x * torch.bucketize(y, OF_EDGES[:, 0]), 'aten.bucketize.Tensor has no kern'),
    ],
)
def test_reasons_of_what_pygs_code_runs(function: Callable[..., Tensor], reason: str) -> None:
    ours = pyg_fast.accelerate(Applies(function))
    x, edges = torch.ones(3, 4, requires_grad=True), torch.tensor([[0, 1, 2], [1, 2, 0]])
    torch.testing.assert_close(ours(x, x, edges), Applies(function)(x, x, edges))
    assert why_pygs(ours).startswith(reason)


SCALES = {'first': 1.0}


class OfKinds(MessagePassing):
    """Reads numbers that the code has, as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = 0.5, torch.nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j: Tensor, kind: Tensor) -> Tensor:
        scale = torch.tensor([self.first, 2.0, 3.0, 4.0], device=x_j.device).to(x_j.dtype)
        hot = (kind.view(-1, 1) == torch.arange(5, device=kind.device)).to(torch.int64)
        shift = F.one_hot(kind, num_classes=5).to(x_j.dtype) @ self.weight
        shift = shift + (hot * x_j[:, :1]).sum(-1, keepdim=True)
        more = torch.tensor([SCALES['first'], 2.0, 3.0, 4.0], device=x_j.device)
        return torch.tanh(x_j * scale + shift) * more.to(x_j.dtype)


@pytest.mark.parametrize('compiles', [False, True])
def test_tensors_of_numbers(
    compiles: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = OfKinds().double().to(device)
    ours: Any = pyg_fast.accelerate(copy.deepcopy(layer))
    backend = Backend()
    run = torch.compile(ours, backend=backend, fullgraph=True) if compiles else ours
    x = torch.randn(9, 4, dtype=torch.float64, device=device, requires_grad=True)
    edges, kind = torch.randint(9, (2, 40), device=device), torch.randint(5, (40,), device=device)
    for first in (0.5, -1.5):
        layer.first = ours.first = first
        for scale in (1.0, 7.0):
            monkeypatch.setitem(SCALES, 'first', scale)
            got, expected = run(x, edges, kind), layer(x, edges, kind)
            torch.testing.assert_close(got, expected)
            grads = [
                torch.autograd.grad(out.square().sum(), [x, each.weight])
                for out, each in ((got, ours), (expected, layer))
            ]
            torch.testing.assert_close(*grads)
    if device.type == 'cpu':
        with pytest.raises(IndexError, match="^index out|'kind' must hold .* which has 5, got"):
            run(x, edges, kind + 1)
    if compiles:
        assert backend.kernels == backend.frames > 0
    else:
        assert not ours.plan.startswith("PyG's"), ours.plan
        assert ' mm ' not in ours.plan  # It looks rows of the weight up.
