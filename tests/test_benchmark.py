"""`benchmark`: its ways, its table, and the model, data and random numbers that it leaves alone."""

import copy
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Dropout, Module
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN, GCNConv, GPSConv, HeteroConv, SAGEConv, SimpleConv

import pyg_fast
from pyg_fast._benchmark import _by_pyg, _without_lines_of_profiler
from pyg_fast.datasets import PlantedGraph
from pyg_fast.nn import FusedGCNConv, FusedGPSConv, MaxKGNN
from pyg_fast.transforms import ToCSR
from tests._compiled import Backend


def planted(device: torch.device) -> Data:
    return PlantedGraph('tiny')[0].to(device)


def test_leaves_everything_alone(device: torch.device) -> None:
    data, model = planted(device), GCN(64, 8, num_layers=2, dropout=0.5, norm='batch_norm')
    model = model.to(device).train()
    data.x.requires_grad_()
    model(data.x, data.edge_index).sum().backward()
    grads = [p.grad for p in (data.x, *model.parameters())]
    values = [grad.clone() for grad in grads]
    state = copy.deepcopy(model.state_dict())
    classes, keys = [type(m) for m in model.modules()], list(data.keys())
    torch.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.manual_seed(5)
    pyg_fast.benchmark(model, data, seconds=0.01)
    assert torch.equal(torch.rand(3, device=device), expected)
    for p, grad, value in zip((data.x, *model.parameters()), grads, values, strict=True):
        assert p.grad is grad
        assert torch.equal(grad, value)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [type(m) for m in model.modules()] == classes
    assert list(data.keys()) == keys
    assert type(data.edge_index) is Tensor


def test_only_the_profiler_is_silenced(capfd: pytest.CaptureFixture) -> None:
    """What it says about itself, also of memory that the step before has allocated."""
    with _without_lines_of_profiler():
        os.write(2, b'USDT:1 SyncActivityProfilerHandler.cpp:52] profiler_start\nof the user\n')
    assert capfd.readouterr().err == 'of the user\n'
    data = planted(torch.device('cpu'))
    pyg_fast.benchmark(GCN(64, 8, num_layers=2), data, seconds=0.01)
    assert 'rofil' not in capfd.readouterr().err


@pytest.mark.parametrize('accelerated', [False, True])
def test_rows(device: torch.device, accelerated: bool) -> None:
    data, model = planted(device), GCN(64, 32, num_layers=2).to(device)
    if accelerated:
        model, data = pyg_fast.accelerate(model), ToCSR()(data)
    seen: list[tuple[type, type]] = []

    def forward(model: Module, data: Data) -> Tensor:
        seen.append((type(model.convs[0]), type(data.edge_index)))
        return model(data.x, data.edge_index)

    result = pyg_fast.benchmark(model, data, forward=forward, seconds=0.01)
    ways = ['PyG', 'pyg_fast'] + ['pyg_fast, captured'] * (device.type == 'cuda')
    assert [row.way for row in result.rows] == ways
    pyg, ours = result.rows[:2]
    assert (GCNConv, Tensor) in seen
    assert all(kind is FusedGCNConv for kind, edges in seen if edges is not Tensor)
    assert pyg.seconds > 0
    assert ours.ratio == pytest.approx(pyg.seconds / ours.seconds)
    for row in result.rows:
        assert row.error is row.compile_seconds is None
        assert row.memory > 0
    assert ours.memory < pyg.memory  # No message of each edge.
    assert [each.layer for each in result.report] == ['GCNConv'] * 2
    lines = repr(result).splitlines()
    assert lines[0].startswith(f'training step on {device.type}')
    assert '300 nodes' in lines[0]
    assert lines[1].split() == ['ms', 'a', 'step', 'times', 'PyG', 'memory,', 'MB']
    assert f'{ours.seconds * 1e3:.3g}' in lines[3]


def test_compiled(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    if device.type == 'cpu':  # C++ takes long, and tests of the manual compile some.
        monkeypatch.setattr(torch, 'compile', partial(torch.compile, backend='aot_eager'))
        monkeypatch.setattr('pyg_fast._compile.backend', Backend())
    result = pyg_fast.benchmark(
        GCNConv(64, 4).to(device), planted(device), compile_pyg=True, compile_ours=True,
        capture=False, seconds=0.01,
    )  # fmt: skip
    assert [row.way for row in result.rows] == [
        'PyG',
        'pyg_fast',
        'PyG, torch.compile',
        'pyg_fast, compiled',
    ]
    assert [row.compile_seconds is not None for row in result.rows] == [False, False, True, True]
    assert all(row.compile_seconds > row.seconds > 0 for row in result.rows[2:])
    assert 'compiled in, s' in repr(result)


def test_hetero(device: torch.device) -> None:
    data = HeteroData()
    data['a'].x, data['b'].x = torch.randn(6, 3), torch.randn(5, 4)
    data['a', 'to', 'b'].edge_index = torch.randint(5, (2, 30))
    model = HeteroConv({('a', 'to', 'b'): SAGEConv((-1, -1), 2)})  # lazy
    result = pyg_fast.benchmark(model.to(device), data.to(device), seconds=0.01)
    assert all(row.seconds is not None for row in result.rows)
    assert '11 nodes of 2 types, 30 edges of 1 types' in repr(result)
    assert isinstance(next(model.parameters()), torch.nn.UninitializedParameter)


def test_a_way_that_fails_is_a_row(device: torch.device) -> None:
    data = planted(device)
    model = MaxKGNN('sage', 64, 16, 4, 2, k=4).to(device)
    pyg, ours = pyg_fast.benchmark(model, data, capture=False, seconds=0.01).rows
    assert pyg.error == 'ValueError: MaxKGNN has no equivalent in PyG'
    assert pyg.seconds is pyg.memory is None
    assert ours.seconds > 0
    assert ours.ratio is None


def test_what_fails_in_one_way(device: torch.device) -> None:
    class Picky(Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = GCNConv(64, 4)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if type(self.conv) is GCNConv:
                raise RuntimeError("a PyG's layer")
            return self.conv(x, edge_index)

    result = pyg_fast.benchmark(Picky().to(device), planted(device), capture=False, seconds=0.01)
    pyg, ours = result.rows
    assert pyg.error == "RuntimeError: a PyG's layer"
    assert ours.error is None
    assert 'failed' in repr(result)


def test_what_fails_in_every_way(device: torch.device) -> None:
    data, model = planted(device), GCNConv(64, 4).to(device)
    for own, kwargs, text in (
        (Dropout(), {}, r'takes 2 .*: pass forward='),
        (model, {'loss': lambda out, data: out}, "'loss' must return a tensor of shape"),
        (model, {'loss': lambda out, data: out.detach().sum()}, "'loss' must return a loss of"),
        (model, {'loss': lambda out, data: data.no_such.sum()}, 'no_such|NoneType'),
        (model, {'forward': lambda model, data: None}, "'forward' must return a tensor, got None"),
    ):
        with pytest.raises((AttributeError, TypeError, ValueError), match=text):
            pyg_fast.benchmark(own, data, seconds=0.01, **kwargs)
    with pytest.raises(ValueError, match=r"^'model' must return .* model\(data.x.detach\(\).req"):
        pyg_fast.benchmark(SimpleConv().to(device), data, seconds=0.01)
    pyg_fast.benchmark(
        SimpleConv().to(device), data, seconds=0.01, capture=False,
        forward=lambda model, data: model(data.x.detach().requires_grad_(), data.edge_index),
    )  # fmt: skip
    del data.x  # By PyG another error than by this package.
    with pytest.raises(TypeError, match="'x' must be a tensor .* got NoneType"):
        pyg_fast.benchmark(model, data, seconds=0.01)


def test_layers_in_layers_become_pygs() -> None:
    for model in (
        FusedGPSConv(8, FusedGCNConv(8, 8)),
        torch.nn.Sequential(FusedGPSConv(8, FusedGCNConv(8, 8))),
        pyg_fast.accelerate(GPSConv(8, GCNConv(8, 8))),
    ):
        found = [type(each) for each in _by_pyg(model).modules()]
        assert {GPSConv, GCNConv} <= {*found}
        assert not {FusedGPSConv, FusedGCNConv} & {*found}


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        ({'model': 3}, TypeError, "'model' must be a torch.nn.Module, got int"),
        ({'data': [1]}, TypeError, "'data' must be a Data or HeteroData, got list"),
        ({'seconds': '1'}, TypeError, "'seconds' must be a number, got str"),
        ({'seconds': 0}, ValueError, "'seconds' must be positive, got 0"),
        ({'forward': 'x'}, TypeError, "'forward' must be a function, .*, got str: leave"),
        ({'capture': 'x'}, TypeError, "'capture' must be True or False, got str"),
        (
            {'loss': lambda out: 0},
            TypeError,
            "'loss' must take two arguments, the output and the d",
        ),
        ({'forward': lambda m: 0}, TypeError, "'forward' must take two arguments, the model and"),
        ({'loss': 'x'}, TypeError, "'loss' must be callable, got str"),
        ({'loss': cross_entropy}, TypeError, "'loss' must take the output and the data, got Py"),
        ({'loss': torch.nn.MSELoss}, TypeError, 'MSELoss: write lambda out, data: loss'),
        ({'loss': Data}, TypeError, "'loss' must be a function .* got the class Data: write"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pyg_fast.benchmark(**{'model': GCNConv(4, 4), 'data': Data(), **kwargs})


def test_a_model_of_more_inputs() -> None:
    class Pooled(GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return super().forward(x, edge_index)

    class Broken(GCNConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            raise TypeError('of the model')

    data = planted(torch.device('cpu'))
    for model, hint in ((Pooled(64, 4), True), (Broken(64, 4), False)):
        with pytest.raises(TypeError) as error:
            pyg_fast.benchmark(model, data, seconds=0.01)
        assert ('pass forward=, such as' in str(error.value)) == hint
