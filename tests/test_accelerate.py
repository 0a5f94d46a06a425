"""`accelerate` swaps PyG's layers for ours, and `restore` swaps them back."""

import contextlib
import copy
import pickle
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _forks
import numpy as np
import pytest
import torch
import torch_geometric
from torch import Tensor
from torch.linalg import matrix_norm
from torch.nn import Module, ModuleDict, ModuleList
from torch.nn.functional import gumbel_softmax, one_hot
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import (
    MLP,
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    Sequential,
    SGConv,
    to_hetero,
)
from torch_geometric.typing import OptTensor
from torch_geometric.utils import add_self_loops, degree, scatter, softmax

import pyg_fast
from pyg_fast.graph import prepare_edge_index
from pyg_fast.message._trace import one_line
from pyg_fast.nn import FusedGCNConv, FusedGINConv, FusedSAGEConv
from tests._compiled import Backend
from tests._functions import Sign
from tests._report import must_fuse

OURS = {GCNConv: FusedGCNConv, SAGEConv: FusedSAGEConv, GINConv: FusedGINConv}
MODELS = ['GCN', 'GraphSAGE', 'GIN']
NODES = 40


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(NODES, 8), torch.randint(NODES, (2, 200))


def model_of(name: str, in_channels: int = 8, **kwargs: Any) -> Module:
    return getattr(torch_geometric.nn, name)(in_channels, 16, 3, 4, **kwargs)


def convs(model: Module) -> Iterator[Module]:
    kinds = (*OURS, *OURS.values())
    return (module for module in model.modules() if type(module) in kinds)


def all_fuse(model: Module) -> Module:
    for conv in convs(model):
        assert type(conv) in OURS.values()
        must_fuse(conv)
    return model


def gradients(model: Module, *args: Any) -> list[Tensor]:
    out = model(*args)
    return [out, *torch.autograd.grad(out.pow(2).sum(), list(model.parameters()))]


@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('name', MODELS)
def test_models(name: str, prepared: bool, device: torch.device) -> None:
    theirs = model_of(name).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x, edge_index = (v.to(device) for v in graph())
    given = prepare_edge_index(edge_index, (NODES, NODES))[0] if prepared else edge_index
    expected, got = gradients(theirs, x, edge_index), gradients(all_fuse(ours), x, given)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_everywhere_in_a_model() -> None:
    shared = SAGEConv(8, 8)

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = ModuleList([shared, GCNConv(8, 8)])
            self.by_name = ModuleDict({'a': GINConv(torch.nn.Linear(8, 8)), 'b': shared})
            self.deep = torch.nn.Sequential(torch.nn.Sequential(SAGEConv(8, 8)))
            self.pyg = torch_geometric.nn.Sequential(
                'x, edge_index', [(GCNConv(8, 8), 'x, edge_index -> x'), torch.nn.ReLU()]
            )
            self.unregistered = [shared]

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            for conv in (*self.layers, *self.by_name.values(), self.deep[0][0], self.pyg):
                x = conv(x, edge_index).tanh()
            return self.unregistered[0](x, edge_index)

    theirs = Net()
    ours = copy.deepcopy(theirs)
    assert pyg_fast.accelerate(ours) is ours
    assert [type(conv) for conv in convs(ours)] == [OURS[type(conv)] for conv in convs(theirs)]
    assert ours.layers[0] is ours.by_name['b'] is ours.unregistered[0]
    x, edge_index = graph()
    torch.testing.assert_close(
        gradients(all_fuse(ours), x, edge_index), gradients(theirs, x, edge_index)
    )
    pyg_fast.restore(ours)
    assert [type(conv) for conv in convs(ours)] == [type(conv) for conv in convs(theirs)]


@pytest.mark.parametrize('first', [True, False])
def test_hetero(first: bool) -> None:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = SAGEConv((-1, -1), 8)
            self.conv2 = SAGEConv((-1, -1), 4, aggr=['mean', 'max'])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.conv2(self.conv1(x, edge_index).relu(), edge_index)

    metadata = (['user', 'item'], [('user', 'buys', 'item'), ('item', 'of', 'user')])
    x = {'user': torch.randn(9, 5), 'item': torch.randn(7, 6)}
    edge_index = {
        edge_type: torch.stack([
            torch.randint(x[edge_type[0]].size(0), (30,)),
            torch.randint(x[edge_type[2]].size(0), (30,)),
        ])
        for edge_type in metadata[1]
    }  # fmt: skip
    net = Net()
    if first:
        pyg_fast.accelerate(net)
    ours = to_hetero(net, metadata)
    if not first:
        pyg_fast.accelerate(ours)
    ours(x, edge_index)  # The lazy layers' first call.
    theirs = pyg_fast.restore(copy.deepcopy(ours))
    assert {type(conv) for conv in convs(theirs)} == {SAGEConv}
    torch.testing.assert_close(all_fuse(ours)(x, edge_index), theirs(x, edge_index))


def test_what_stays_the_same() -> None:
    model = model_of('GraphSAGE', dropout=0.5).eval()
    conv = model.convs[0]
    parameters, keys, known = list(model.parameters()), list(model.state_dict()), set(vars(conv))
    calls = []
    conv.register_forward_hook(lambda *args: calls.append(args))
    pyg_fast.accelerate(model)
    assert type(conv) is FusedSAGEConv
    assert model.convs[0] is conv
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == keys
    assert not conv.training
    assert repr(conv) == 'FusedSAGEConv(8, 16, aggr=mean)'
    model(*graph())
    assert len(calls) == 1
    before = conv.lin_l.weight.clone()
    conv.reset_parameters()
    assert not torch.equal(before, conv.lin_l.weight)
    pyg_fast.restore(model)
    assert type(conv) is SAGEConv
    assert set(vars(conv)) == known


def test_optimizer_built_before() -> None:
    theirs = model_of('GIN')
    ours = copy.deepcopy(theirs)
    x, edge_index = graph()
    results = []
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if model is ours:
            all_fuse(pyg_fast.accelerate(model))
        for _ in range(3):
            optimizer.zero_grad()
            model(x, edge_index).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


def test_a_layer_itself() -> None:
    conv = GCNConv(8, 4)
    assert type(pyg_fast.accelerate(conv)) is FusedGCNConv
    assert type(pyg_fast.accelerate(conv)) is FusedGCNConv
    (report,) = pyg_fast.accelerate_report(conv)
    assert report[:7] == ('', 'GCNConv', 'FusedGCNConv', None, None, None, None)
    assert report[7:] == (False, None, False, False)
    assert type(pyg_fast.restore(conv)) is GCNConv
    assert type(pyg_fast.restore(conv)) is GCNConv


def test_restore_leaves_what_the_user_built() -> None:
    model = ModuleList([FusedGCNConv(8, 4), GCNConv(8, 4), FusedSAGEConv(8, 4)])
    pyg_fast.restore(pyg_fast.accelerate(model))
    assert [type(conv) for conv in model] == [FusedGCNConv, GCNConv, FusedSAGEConv]


def test_restore_keeps_the_cached_graph() -> None:
    """PyG's contract for `cached`: the graph of the first call is that of all."""
    conv, (x, edge_index) = GCNConv(8, 4, cached=True), graph()
    known = set(vars(conv))
    pyg_fast.accelerate(conv)(x, edge_index)
    pyg_fast.restore(conv)
    assert set(vars(conv)) == known
    fresh = GCNConv(8, 4)
    fresh.load_state_dict(conv.state_dict())
    torch.testing.assert_close(conv(x, edge_index.flip(1)[:, 20:]), fresh(x, edge_index))


@pytest.mark.parametrize('name', MODELS)
def test_copy_and_pickle(name: str) -> None:
    theirs, (x, edge_index) = model_of(name), graph()
    expected = theirs(x, edge_index)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert {type(conv) for conv in convs(again)} <= set(OURS.values())
        torch.testing.assert_close(again(x, edge_index), expected)
        pyg_fast.restore(again)
        assert {type(conv) for conv in convs(again)} <= set(OURS)
        torch.testing.assert_close(again(x, edge_index), expected)
    theirs.load_state_dict(ours.state_dict())


def test_saved_model_in_another_process(tmp_path: Path) -> None:
    model, (x, edge_index) = model_of('GraphSAGE'), graph()
    expected = model(x, edge_index).detach()
    torch.save((pyg_fast.accelerate(model), x, edge_index, expected), tmp_path / 'model.pt')
    script = f"""
import torch
model, x, edge_index, expected = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)
assert type(model.convs[0]).__name__ == 'FusedSAGEConv'
torch.testing.assert_close(model(x, edge_index), expected)
model.convs[0].register_message_forward_hook(lambda *args: None)  # PyG's own path.
torch.testing.assert_close(model(x, edge_index), expected)
import pyg_fast
assert type(pyg_fast.restore(model).convs[0]).__name__ == 'SAGEConv'
torch.testing.assert_close(model(x, edge_index), expected)
"""
    result = _forks.run('-c', script)
    assert result.returncode == 0, result.stderr


def explaining() -> Module:
    conv = SAGEConv(8, 4)
    conv.explain = True
    return conv


def patched() -> Module:
    conv = SAGEConv(8, 4)
    conv.message = lambda x_j: x_j.relu()
    return conv


def not_fused() -> Module:
    conv = SAGEConv(8, 4)
    conv.fuse = False
    return conv


@pytest.mark.parametrize(
    ('made', 'reason'),
    [
        (lambda: SAGEConv(8, 4, aggr='lstm'), 'LSTMAggregation has no kernel'),
        (lambda: SAGEConv(8, 4, aggr=['mean', 'median']), 'MedianAggregation has no kernel'),
        (lambda: SAGEConv(8, 4, aggr=['mean', 'mean']), 'an aggregation is listed twice'),
        (lambda: GINConv(torch.nn.Linear(8, 4), aggr='softmax'), 'SoftmaxAggregation has no'),
        (lambda: GCNConv(8, 4, aggr='mean'), "aggr='mean'"),
        (lambda: GCNConv(8, 4, node_dim=0), 'node_dim=0'),
        (lambda: SAGEConv(8, 4, decomposed_layers=2), 'decomposed_layers=2'),
        (explaining, 'explains'),
        (patched, 'its message is patched'),
        (not_fused, 'fuse=False'),
    ],
)
def test_left_with_a_reason(made: Callable[[], Module], reason: str) -> None:
    model = ModuleList([made(), GCNConv(8, 4)])
    cls = type(model[0])
    before = pyg_fast.accelerate_report(model)
    assert type(model[1]) is GCNConv
    pyg_fast.accelerate(model)
    assert type(model[0]) is cls
    assert type(model[1]) is FusedGCNConv
    after = pyg_fast.accelerate_report(model)
    assert before[0] == after[0]
    assert before[1]._replace(how=None) == after[1]  # not accelerated before
    assert after[0][:3] == ('0', cls.__name__, None)
    assert reason in after[0].reason


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')
def test_torchscript() -> None:
    model, (x, edge_index) = model_of('GraphSAGE'), graph()
    expected = model(x, edge_index)
    scripted = torch.jit.script(pyg_fast.accelerate(model))
    torch.testing.assert_close(scripted(x, edge_index), expected)
    reports = pyg_fast.accelerate_report(pyg_fast.accelerate(ModuleList([scripted])))
    assert [(r.fused, r.reason) for r in reports] == [(None, 'compiled by TorchScript')] * 3


def test_verbose(capsys: pytest.CaptureFixture) -> None:
    model = ModuleDict({
        'first': SAGEConv(8, 4), 'second': SAGEConv(8, 4, aggr='median'),
    })  # fmt: skip
    pyg_fast.accelerate(model)
    assert capsys.readouterr().out == ''
    pyg_fast.accelerate(model, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        'layer   class     will run as',
        'first   SAGEConv  FusedSAGEConv',
        "second  SAGEConv  PyG's code",
        '    why not a kernel: MedianAggregation has no kernel',
    ]


def test_verbose_of_traced_layers(capsys: pytest.CaptureFixture) -> None:
    """What runs them is known after a call."""
    model = ModuleList([GraphConv(8, 4), GraphConv(8, 4)])
    pyg_fast.accelerate(model, verbose=True)
    x, edge_index = graph()
    x = x[:, :8].contiguous()
    model[0](x, edge_index)
    model[1](x, edge_index[:, :1])
    pyg_fast.accelerate(model, verbose=True)
    pyg_fast.accelerate(torch.nn.Linear(2, 2), verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        'layer  class      will run as',
        "0      GraphConv  FusedGraphConv, or PyG's code: known after a call",
        "1      GraphConv  FusedGraphConv, or PyG's code: known after a call",
        'layer  class      will run as',
        '0      GraphConv  FusedGraphConv',
        "1      GraphConv  PyG's code",
        '    why not a kernel: 1 edges',
        'accelerate: the model has no MessagePassing layer',
    ]
    for option in ('verbose', 'strict'):
        for wrong, got in ((Data(), 'Data'), (2, '2')):
            with pytest.raises(TypeError, match=f"'{option}' must be True or False, got {got}"):
                pyg_fast.accelerate(model, **{option: wrong})


def test_data_after_the_model() -> None:
    model = GCNConv(8, 4)
    for extra in (Data(), True):
        message = f'takes the model alone, got a {type(extra).__name__} .*ToCSR'
        with pytest.raises(TypeError, match=message):
            pyg_fast.accelerate(model, extra)
    assert type(model) is GCNConv


def test_report_is_a_list_that_prints_as_a_table() -> None:
    model = ModuleDict({
        'first': SAGEConv(8, 4), 'second': SAGEConv(8, 4, aggr='median'), 'third': GraphConv(8, 4),
    })  # fmt: skip
    plain = pyg_fast.accelerate_report(model)
    not_yet = 'not accelerated: pyg_fast.accelerate(model)'
    assert [each.runs_on for each in plain] == [not_yet, "PyG's code", not_yet]
    report = pyg_fast.accelerate_report(pyg_fast.accelerate(model))
    assert isinstance(report, list)
    assert pickle.loads(pickle.dumps(report)) == list(report)
    x, edge_index = torch.randn(5, 8), torch.tensor([[0], [1]])
    assert [each.runs_on for each in report] == [
        'no eager call yet',
        "PyG's code",
        'no eager call yet',
    ]
    with pyg_fast.small_graphs('kernel'):
        model['first'](x, edge_index)
    model['third'](x, edge_index)
    report = pyg_fast.accelerate_report(model)
    assert repr(report) == str(report)
    assert repr(report).splitlines() == [
        'layer   class      runs on',
        'first   SAGEConv   kernel',
        '    what helps: edges are sorted at each call: prepare a graph that stays the same by '
        'ToCSR, batches',
        '        of small graphs by GraphLoader',
        "second  SAGEConv   PyG's code",
        '    why not a kernel: MedianAggregation has no kernel',
        "    what helps: aggr='sum', 'mean', 'max', 'min', 'var' or 'std', each once",
        "third   GraphConv  PyG's code",
        '    why not a kernel: 1 edges',
        "    what helps: little: PyG's code is as fast here; with pyg_fast.small_graphs('kernel') "
        'a kernel',
        '        runs, or the report tells why none can',
    ]
    assert report[2].reason == '1 edges'
    assert report[2].ran == f"PyG's code: {report[2].reason}"
    assert plain[0].cure is None
    place = 'File "/my models/net.py", line 3'
    long = pyg_fast.LayerReport('', 'Own', None, f'{80 * "a"} ({place}, in message: y)')
    assert f'{80 * "a"}\n        ({place}, in message: y)\n' in repr(type(report)([long]))
    assert repr(pyg_fast.accelerate_report(torch.nn.Linear(2, 2))) == (
        'the model has no MessagePassing layer'
    )


class Looped(MessagePassing):
    """Makes its own list of edges, in each call or once."""

    def __init__(self, cached: bool = False) -> None:
        super().__init__()
        self.cached, self.known = cached, None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = self.known
        if edges is None:
            edges, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        if self.cached:
            self.known = edges
        return self.propagate(edges, x=x) + self.propagate(edges, x=2 * x)


class Flipped(MessagePassing):
    """Turns the edges, which of a prepared graph does not sort them."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index.flip(0), x=x)


@pytest.mark.parametrize(
    ('layer', 'sorts'),
    [
        (lambda: GraphConv(8, 4), True), (lambda: SAGEConv(8, 4), True),
        (lambda: GCNConv(8, 4), True), (lambda: GCNConv(8, 4, cached=True), False),
        (lambda: GATConv(8, 4), True), (lambda: GATv2Conv(8, 4), True), (Flipped, True),
    ],
)  # fmt: skip
def test_report_hints_at_lists_that_are_sorted(
    layer: Callable[[], MessagePassing], sorts: bool
) -> None:
    conv, (x, edge_index) = pyg_fast.accelerate(layer()), graph()
    # Without weights GCNConv scatters.
    weight = (torch.ones(edge_index.size(1)),) if isinstance(conv, GCNConv) else ()
    with pyg_fast.small_graphs('kernel'):
        conv(x, edge_index, *weight)
    (report,) = pyg_fast.accelerate_report(conv)
    assert (report.runs_on, report.sorts) == ('kernel', sorts)
    assert str(report.cure).startswith('edges are sorted at each call') == sorts
    with pyg_fast.small_graphs('kernel'):
        conv(x, prepare_edge_index(edge_index, (NODES, NODES))[0], *weight)
    (report,) = pyg_fast.accelerate_report(conv)
    assert (report.runs_on, report.sorts, report.cure) == ('kernel', False, None)
    assert '_last_sorted' not in vars(pyg_fast.restore(conv))


def test_report_hints_at_lists_that_forward_makes() -> None:
    x, edge_index = graph()
    prepared = prepare_edge_index(edge_index, (NODES, NODES))[0]
    again, once = pyg_fast.accelerate(Looped()), pyg_fast.accelerate(Looped(cached=True))
    pygs = pyg_fast.accelerate(SGConv(8, 4))
    for edges in (edge_index, prepared):
        for _ in range(2):
            with pyg_fast.small_graphs('kernel'):
                for conv in (again, once, pygs):
                    conv(x, edges)
        (report,) = pyg_fast.accelerate_report(again)
        assert (report.runs_on, report.sorts, report.remakes) == ('kernel', True, True)
        assert 'add_self_loops, once on the data, before ToCSR' in report.cure
        assert not pyg_fast.accelerate_report(pygs)[0].remakes
        assert pyg_fast.accelerate_report(once)[0].sorts == (edges is edge_index)
        once.known = None


class Pair(Module):
    """A layer with kernels written for it, and a message."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 8), Fails()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index), edge_index)


class Compiled(Module):
    """A kernel on both sides of a graph break, and messages that no kernel computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 8), ModuleList([Told('') for _ in range(2)])
        self.mean, self.broken = Told('mean'), Told('value')

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.second[0](self.first(x, edge_index), edge_index)
        torch._dynamo.graph_break()
        x = self.mean(self.second[1](x, edge_index), edge_index)
        return self.broken(x, edge_index)


@pytest.mark.filterwarnings('ignore')
def test_report_of_compiled_code() -> None:
    torch._dynamo.reset()
    model, (x, edge_index) = pyg_fast.accelerate(Compiled()), graph()
    compiled = torch.compile(model, backend=Backend(), dynamic=True)
    with pyg_fast.small_graphs('kernel'):
        compiled(x, edge_index)
    report = pyg_fast.accelerate_report(compiled)
    assert [(each.name, each.runs_on) for each in report] == [
        ('first', 'compiled: kernel'), ('second.0', 'compiled: kernel'),
        ('second.1', 'compiled: kernel'), ('mean', "compiled: PyG's code"),
        ('broken', "compiled: PyG's code"),
    ]  # fmt: skip
    assert report[3].reason.startswith('a reduction over edges (File ')
    assert report[3].compiled == f"PyG's code: {report[3].reason}"
    assert report[4].reason == 'a graph break in message'
    assert 'fullgraph=True' in report[4].cure
    model.second[0](x, edge_index[:, :1])
    model.mean(x, edge_index[:, :1])
    one, other = (pyg_fast.accelerate_report(layer)[0] for layer in (model.second[0], model.mean))
    assert (one.runs_on, one.reason) == ("PyG's code; compiled: kernel", '1 edges')
    assert other.runs_on == "PyG's code; compiled: PyG's code"
    assert other.reason == f'1 edges; compiled: {report[3].reason}'
    pyg_fast.restore(model)
    assert not any('_last_compiled' in vars(layer) for layer in model.modules())


class Beside(MessagePassing):
    """Reads of all edges, and of edges alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.score = how, torch.nn.Linear(16, 1)

    def forward(self, x: Tensor, edge_index: Tensor, kept: Tensor) -> Tensor:
        row, col = edge_index
        if self.how == 'largest':  # As the cure of a reduction over edges says.
            score = self.score(torch.cat([x[col], x[row]], -1))
            return self.propagate(edge_index, x=x, kept=kept, largest=score.max())
        if self.how == 'number':
            return self.propagate(edge_index, x=x, kept=kept, largest=x.max().item())
        size = (NODES, NODES) if self.how == 'size' else None
        return self.propagate(edge_index, x=x, kept=kept, size=size, largest=1)


class Kept(Beside):
    def message(self, kept: Tensor) -> Tensor:
        return kept.relu()


class Scaled(Beside):
    def message(self, x_j: Tensor, largest: Tensor) -> Tensor:
        return x_j / largest


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    ('layer', 'reason'),
    [
        (Kept('alone'), 'no input of nodes'),
        (Kept('size'), None),
        (Scaled('largest'), None),
        (Scaled('number'), None),
    ],
)
def test_report_of_what_stands_beside_nodes(layer: Beside, reason: str | None) -> None:
    """The same in eager mode and in compiled code."""
    torch._dynamo.reset()
    (x, edge_index), model = graph(), copy.deepcopy(layer)
    given = x, edge_index, torch.randn(200, 8)
    ours, eager = pyg_fast.accelerate(layer), pyg_fast.accelerate(copy.deepcopy(model))
    with pyg_fast.small_graphs('kernel'):
        outs = [torch.compile(ours, backend=Backend())(*given), eager(*given)]
    for each, out, runs_on in zip((ours, eager), outs, ('compiled: ', ''), strict=True):
        torch.testing.assert_close(out, model(*given))
        (report,) = pyg_fast.accelerate_report(each)
        assert report.reason == reason
        assert report.runs_on == runs_on + ('kernel' if reason is None else "PyG's code")
        assert reason is None or report.cure.startswith('the number of nodes: propagate(edge_index')


@pytest.mark.filterwarnings('ignore')
def test_report_of_a_call_that_failed_while_it_was_compiled() -> None:
    class Fails(Told):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j.view(-1, 3)

    torch._dynamo.reset()
    model, (x, edge_index) = pyg_fast.accelerate(Fails('')), graph()
    model = torch.compile(model, backend='pyg_fast')  # That of `compile` runs in eager mode then.
    with pytest.raises(RuntimeError, match='invalid for input of size'):
        model(x, edge_index[:, :5])
    (report,) = pyg_fast.accelerate_report(model)
    assert report.reason == 'torch.compile did not tell what runs it, as where it raised an error'
    assert report.cure.startswith('a call without torch.compile, whose error')


class Attends(MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.score = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        gate = self.edge_updater(edge_index, x=x)
        return self.propagate(edge_index, x=x, gate=gate)

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.score(torch.cat([x_i, x_j], -1))

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate * x_j


class AttendsInMessage(Attends):
    edge_update = MessagePassing.edge_update

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:  # type: ignore[override]
        return self.score(torch.cat([x_i, x_j], -1)) * x_j


def test_report_of_an_edge_update() -> None:
    """PyG's code runs it beside the kernel; in the message it is a part of that."""
    one, other = (pyg_fast.accelerate(cls()) for cls in (Attends, AttendsInMessage))
    other.load_state_dict(one.state_dict())
    with pyg_fast.small_graphs('kernel'):
        given = graph()
        torch.testing.assert_close(one(*given), other(*given))
    first, second = (pyg_fast.accelerate_report(each) for each in (one, other))
    assert (first[0].runs_on, second[0].runs_on) == ('kernel', 'kernel')
    assert "    beside: edge_update runs PyG's code" in str(first)
    assert 'beside' not in str(second)


class Mistyped(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_atr=x, other=x)

    def mesage(self, x_j: Tensor) -> Tensor:
        return 2 * x_j

    def helper(self) -> None:
        self.updates()

    def updates(self) -> None:
        """Called in the class, so it is no mistake."""

    def message(self, x_j: Tensor, edge_attr: OptTensor = None) -> Tensor:
        return x_j


class MistypedMethod(Mistyped):
    message = MessagePassing.message

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


def test_names_that_are_almost_those_of_pyg() -> None:
    x, edge_index = graph()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        layers = [pyg_fast.accelerate(cls()) for cls in (Mistyped, MistypedMethod, MistypedMethod)]
        for layer in (*layers, layers[0]):
            layer(x, edge_index)
    assert [(str(each.message).partition("' ")[0], each.filename) for each in warned] == [
        ("'MistypedMethod.mesage", __file__), ("'edge_atr", __file__),
    ]  # fmt: skip
    assert "did you mean 'message'?" in str(warned[0].message)
    assert "did you mean 'edge_attr'?" in str(warned[1].message)


def test_layers_that_are_not_registered() -> None:
    class Lists(Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Module()
            self.inner.convs, self.inner.sizes = [GCNConv(8, 8)], [8, 8]
            self.known = ModuleList([GCNConv(8, 8)])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        pyg_fast.accelerate(Lists())
    assert [each.filename for each in warned] == [__file__]
    assert str(warned[0].message).startswith("'inner.convs' holds layers in a list, where PyTorch")


@pytest.mark.parametrize(
    ('call', 'text'),
    [
        (lambda: pyg_fast.accelerate(GCNConv), "'model' must be a .*, got the class GCNConv$"),
        (
            lambda: pyg_fast.accelerate(Pair(), verbos=True),
            r"unexpected .* 'verbos'; .* mean 'verbose'\?",
        ),
        (
            lambda: pyg_fast.nn.FusedMessagePassing(agr='sum'),
            r"unexpected .* 'agr'; it has .*'aggr'\?",
        ),
        (lambda: FusedGCNConv(8, 4, normalise=False), r"'normalise'; it .* mean 'normalize'\?"),
        (lambda: FusedGCNConv(8, 4, unlike=3), r"'unlike'; it has .*, decomposed_layers$"),
        (lambda: FusedSAGEConv(8, 4, aggr=['sum', 'maen']), r"'aggr' must be .* mean 'mean'\?"),
    ],
)
def test_options_that_are_misspelt(call: Callable[[], object], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        call()


@pytest.mark.filterwarnings('ignore')
def test_report_of_layers_that_other_backends_compile() -> None:
    """Kernels written for layers run there, too; messages are for ours."""
    torch._dynamo.reset()
    model, (x, edge_index) = pyg_fast.accelerate(Pair()), graph()
    torch.compile(model, backend='aot_eager')(x, edge_index)
    first, second = pyg_fast.accelerate_report(model)
    assert (first.runs_on, second.runs_on) == ('compiled: kernel', "compiled: PyG's code")
    assert second.reason == "torch.compile has another backend than 'pyg_fast'"
    assert second.cure == 'pyg_fast.compile(model)'
    torch._dynamo.reset()
    model.first.aggr = 'max'
    torch.compile(model, backend='aot_eager')(x, edge_index)
    assert "aggr='max'" in pyg_fast.accelerate_report(model)[0].reason


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('place', ['attribute', 'dict'])
def test_report_of_layers_that_a_compiled_function_reaches(place: str) -> None:
    torch._dynamo.reset()
    model, (x, edge_index) = pyg_fast.accelerate(Pair()), graph()
    holder = SimpleNamespace(model=model, models={'a': model})
    call = (lambda x: holder.model(x, edge_index)) if place == 'attribute' else (
        lambda x: holder.models['a'](x, edge_index)
    )  # fmt: skip
    with pyg_fast.small_graphs('kernel'):
        torch.compile(call, backend=Backend())(x)
    assert {r.runs_on for r in pyg_fast.accelerate_report(model)} == {'compiled: kernel'}


@pytest.mark.filterwarnings('ignore')
def test_report_of_a_model_that_runs_the_code_of_another() -> None:
    """Dynamo does not trace it again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, edge_index = graph()
    for _ in range(2):
        model = pyg_fast.compile(Pair())
        with pyg_fast.small_graphs('kernel'):
            model(x, edge_index)
        assert {r.runs_on for r in pyg_fast.accelerate_report(model)} == {'compiled: kernel'}
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1
    untouched = pyg_fast.compile(Pair())
    assert pyg_fast.accelerate_report(untouched)[0].runs_on == 'no eager call yet'


@pytest.mark.filterwarnings('ignore')
def test_report_of_a_compiled_layer(capsys: pytest.CaptureFixture) -> None:
    """The frame that Dynamo compiles is then one of the layer itself."""
    torch._dynamo.reset()
    layer, (x, edge_index) = pyg_fast.accelerate(Told('')), graph()
    torch.compile(layer, backend=Backend(), dynamic=True)(x, edge_index)
    assert pyg_fast.accelerate_report(layer)[0].runs_on == 'compiled: kernel'
    pyg_fast.accelerate(layer, verbose=True)
    assert capsys.readouterr().out.endswith('Told   FusedTold\n')
    with pyg_fast.small_graphs('pyg'):
        torch.compile(layer, backend=Backend(), dynamic=False)(x, edge_index[:, :9])
    assert pyg_fast.accelerate_report(layer)[0].reason == 'too few edges for a kernel to pay'
    layer.register_message_forward_hook(lambda *_: None)
    torch._dynamo.reset()
    torch.compile(layer, backend=Backend(), dynamic=True)(x, edge_index)
    assert pyg_fast.accelerate_report(layer)[0].reason == 'hooks on its message passing'


def test_strict() -> None:
    model = ModuleList([SAGEConv(8, 4), SAGEConv(8, 4, aggr='median')])
    with pytest.raises(NotImplementedError, match='MedianAggregation has no kernel') as error:
        pyg_fast.accelerate(model, strict=True)
    assert str(pyg_fast.accelerate_report(model)) in str(error.value)
    assert type(model[0]) is SAGEConv  # nothing changed
    assert type(pyg_fast.accelerate(model[:1], strict=True)[0]) is FusedSAGEConv
    layer = pyg_fast.accelerate(GraphConv(8, 4))
    layer(torch.randn(3, 8), torch.tensor([[0], [1]]))
    with pytest.raises(NotImplementedError, match='1 edges'):  # what ran in the last call
        pyg_fast.accelerate(layer, strict=True)


@pytest.mark.parametrize('is_layer', [False, True])
def test_strict_raises_in_the_first_call(is_layer: bool) -> None:
    """What only a call knows; nothing stays of it once all layers ran on kernels."""
    layer, (x, edge_index) = Told('mean'), graph()
    x = x[:, :8].contiguous()
    model = layer if is_layer else Compiled()
    with pyg_fast.small_graphs('kernel'):
        for each in (pyg_fast.accelerate(model, strict=True), copy.deepcopy(model)):
            for _ in range(2):
                with pytest.raises(NotImplementedError, match='a reduction over edges') as error:
                    each(x, edge_index)
                assert str(pyg_fast.accelerate_report(each)) in str(error.value)
        layer = Told('')
        model = layer if is_layer else Sequential('x, edge_index', [(layer, 'x, edge_index -> x')])
        pyg_fast.accelerate(model, strict=True)
        compiled = torch.compile(model, backend=Backend(), fullgraph=True)
        out = compiled(x, edge_index)
        assert model._forward_hooks  # Compiled code checks nothing.
        torch.testing.assert_close(model(x, edge_index), out)
        assert not model._forward_hooks
    with pyg_fast.small_graphs('pyg'):
        with pytest.raises(NotImplementedError, match='too few for a kernel to pay'):
            pyg_fast.accelerate(Told(''), strict=True)(x, edge_index)
        for undo in (pyg_fast.restore, pyg_fast.accelerate):
            model = pyg_fast.accelerate(Told(''), strict=True)
            assert len(model._forward_hooks) == 1
            undo(model)(x, edge_index)
            assert len(model._forward_hooks) == 0


class Told(MessagePassing):
    """Messages that no kernel runs, for a reason in the user's own code."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count = how, 0
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.count += 1
        self.most = 600 + self.count
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        if self.how == 'print':
            print(x_i.shape)
        if self.how == 'value' and x_j.sum().item() > 0:
            return x_i
        if self.how == 'norm':
            return self.norm(x_j)
        if self.how == 'mean':
            return x_j - x_j.mean(0)
        if self.how == 'number':
            return x_j[:, :4] * (self.count * 2)
        if self.how == 'degree':
            return x_j / degree(index, 600)[index].view(-1, 1)
        if self.how == 'nodes':
            return softmax(x_j, index, num_nodes=self.most)
        return x_j


@pytest.mark.parametrize(
    ('how', 'cause', 'line', 'helps'),
    [
        ('print', 'message calls print', 'print(x_i.shape)', 'print in forward'),
        ('value', 'reads a value of a tensor', "if self.how == 'value'", 'torch.where'),
        (
            'norm',
            'batch normalization in training mixes edges',
            'return self.norm(x_j)',
            'normalize the nodes in forward, or use LayerNorm',
        ),
        ('number', 'a number that changes: self.count', 'return x_j[:, :4]', 'a tensor in place'),
        ('degree', 'aten.scatter_add.default has no', 'return x_j / degree(', 'gives deg_i'),
        ('nodes', 'a number that changes: self.most', 'return softmax(', 'num_nodes=size_i'),
    ],
)
@pytest.mark.filterwarnings('ignore:Told.message')
def test_reasons_name_line_cause_and_cure(how: str, cause: str, line: str, helps: str) -> None:
    layer, (x, edge_index) = pyg_fast.accelerate(Told(how)), graph()
    with pyg_fast.small_graphs('kernel'):
        for _ in range(4):
            layer(x[:, :8].contiguous(), edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert cause in report.reason
    assert 'test_accelerate.py", line ' in report.reason
    assert f'in message: {line}' in report.reason
    assert helps in report.cure


def asserts(x: Tensor) -> Tensor:
    assert x.isfinite().all()
    return x


def by_mask(x: Tensor) -> Tensor:
    out, mask = torch.zeros_like(x), x[:, 0] > 0
    out[mask] = 2 * x[mask]
    return out


LSTM = torch.nn.LSTM(8, 8, batch_first=True)
ATTENTION = torch.nn.MultiheadAttention(8, 2, batch_first=True)
VALUE = 'message reads a value of a tensor'
NO_OPERATION = ', which is no operation on tensors'
ASKS = 'message asks for the number of edges or nodes, by if or in an operation'
SHAPE = 'the shape of a value depends on values of a tensor'
# What a message does, the reason, and a word of what helps.
SEEN = [
    (lambda x: x * x.sum().item(), 'a reduction over edges', 'computed in forward'),
    (lambda x: x / x.abs().max(), 'a reduction over edges', 'largest=score.max()'),
    (lambda x: (x * 1j).real, 'message computes with complex numbers', 'real and imaginary'),
    (lambda x: x * int(x.sum()), VALUE, 'torch.where'),
    (lambda x: x * bool(x.sum() > 0), VALUE, 'torch.where'),
    (lambda x: torch.tensor(x.tolist()), VALUE, 'torch.where'),
    (lambda x: x if torch.equal(x, x) else -x, VALUE, 'torch.where'),
    (lambda x: x * len(repr(x)), VALUE, 'torch.where'),
    (by_mask, SHAPE, 'torch.where((edge_type == r).view(-1, 1), self.lins[r](x_j), out)'),
    (lambda x: x * x.nonzero().size(0), SHAPE, 'torch.where'),
    (lambda x: x * x.unique().numel(), SHAPE, 'torch.where'),
    (lambda x: x * (1 + 0 * time.time()), f'message calls time.time{NO_OPERATION}', 'in forward'),
    (lambda x: x * random.random(), f'message calls Random.random{NO_OPERATION}', 'in forward'),
    (lambda x: x * np.random.rand(), 'message calls NumPy', "torch's operations"),
    (lambda x: x.data * 2, 'data in message', 'detach()'),
    (lambda x: x if x.size(0) > 5 else -x, ASKS, 'how many edges'),
    (lambda x: matrix_norm(x.view(-1, 4, 2), ord=1)[:, None], ASKS, 'm.abs().sum(-2).amax(-1)'),
    (lambda x: x / x.size(0), 'the number of edges or nodes is used as a number', 'as a tensor'),
    (asserts, 'message asserts', 'in forward'),
    (lambda x: x * torch.rand(x.size(0), 1), 'the number of edges or nodes', 'noise drawn in for'),
    (lambda x: LSTM(x[:, None])[0][:, 0], 'an LSTM, GRU or RNN in message', 'torch.nn.GRUCell'),
    (lambda x: x + x.flip(0), 'a flip along the edges', 'what one edge needs alone in message'),
    (lambda x: x.round(decimals=2), 'aten.round.decimals has', 'torch.round(x * 100) / 100'),
    (lambda x: x + torch.randn_like(x), 'aten.randn_like.default has', 'a row for each edge'),
    (lambda x: gumbel_softmax(x, dim=-1), 'aten.exponential.default has', 'a row for each edge'),
    (lambda x: Sign.apply(x), 'a custom autograd.Function in message', 'detach'),
    (lambda x: ATTENTION(*[x[:, None]] * 3)[0][:, 0], 'nn.MultiheadAttention', 'a softmax of'),
]


@pytest.mark.parametrize('number', range(len(SEEN)))
def test_reasons_are_in_the_users_terms(number: int) -> None:
    function, cause, helps = SEEN[number]

    class Seen(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_j: Tensor) -> Tensor:
            return function(x_j)

    layer, (x, edge_index) = pyg_fast.accelerate(Seen()), graph()
    torch._dynamo.utils.warn_once_cache.clear()
    with pyg_fast.small_graphs('kernel'), warnings.catch_warnings(record=True) as warned:
        layer(x, edge_index)
    assert not [each for each in warned if 'Dynamo' in str(each.message)]
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.reason.startswith(cause)
    assert helps in report.cure
    if 'used as a number' not in cause:  # Of a graph as a whole, which has no line.
        line = function.__code__.co_firstlineno + {asserts: 1, by_mask: 2}.get(function, 0)
        assert f'test_accelerate.py", line {line}' in report.reason


def with_hook(lin: torch.nn.Linear) -> torch.nn.Linear:
    lin.register_forward_hook(lambda *call: setattr(lin, 'last', call[2]))
    return lin


OF_TORCH = torch.nn.utils
# What is done to a module of the message, the reason, and a word of what helps.
CHANGED = [
    (OF_TORCH.spectral_norm, "'nets.lin' has spectral_norm, which changes", 'parametrizations'),
    (OF_TORCH.weight_norm, "'nets.lin' has weight_norm, which changes", 'parametrizations'),
    (OF_TORCH.parametrizations.spectral_norm, "'nets.lin' has spectral_norm", 'in forward'),
    (OF_TORCH.parametrizations.orthogonal, 'aten.tril.default of parameters has', 'in forward'),
    (OF_TORCH.parametrizations.weight_norm, '', ''),
    (with_hook, "message sets an attribute or a global, perhaps by a hook of 'nets", 'no hook'),
]  # fmt: skip


@pytest.mark.filterwarnings('ignore:.*weight_norm.* is deprecated')
@pytest.mark.parametrize('number', range(len(CHANGED)))
def test_modules_that_change_at_calls(number: int) -> None:
    change, cause, helps = CHANGED[number]

    class Changed(MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.nets = torch.nn.ModuleDict({'lin': torch.nn.Linear(8, 8).double()})
            self.nets['lin'] = change(self.nets['lin'])

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.nets['lin'](x_j - x_i).relu()

    torch.manual_seed(0)
    theirs = Changed()
    torch.manual_seed(0)
    ours, (x, edge_index) = pyg_fast.accelerate(Changed()), graph()
    theirs.load_state_dict(ours.state_dict())
    results: list[list[Tensor]] = []
    with pyg_fast.small_graphs('kernel'):
        for layer in (ours, theirs):
            optimizer, out = torch.optim.SGD(layer.parameters(), 0.1), []
            for _ in range(3):
                optimizer.zero_grad()
                out.append(layer(x.double(), edge_index))
                out[-1].sin().sum().backward()
                optimizer.step()
            results.append([*out, *layer.state_dict().values()])
    (report,) = pyg_fast.accelerate_report(ours)
    assert (report.reason or '').startswith(cause)
    assert helps in (report.cure or '')
    assert (report.runs_on == 'kernel') == (cause == '')
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('backend', ['eager', None])
def test_report_of_a_layer_that_does_not_propagate(backend: str | None) -> None:
    class Passes(Told):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x if self.how == 'nothing' else super().forward(x, edge_index)

    layer, (x, edge_index) = pyg_fast.accelerate(Passes('nothing'), strict=True), graph()
    if backend is not None:
        torch.compile(layer, backend=backend)(x[:, :8], edge_index)
        assert pyg_fast.accelerate_report(layer)[0].runs_on == 'no eager call yet'
    layer(x[:, :8], edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.runs_on == 'nothing: its forward called no propagate'
    assert (report.ran, report.reason, report.cure, layer.plan) == (None, None, None, None)
    layer.how = ''
    with pyg_fast.small_graphs('kernel'):
        layer(x[:, :8], edge_index)
    assert pyg_fast.accelerate_report(layer)[0].runs_on == 'kernel'


class Fails(MessagePassing):
    def __init__(self, aggr: str | None = 'sum') -> None:
        super().__init__(aggr)
        self.lin = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return self.lin(x_j)


def test_cures_fit_errors() -> None:
    """An error that names an argument is the cure, unless the reason speaks of it, too."""
    x, edge_index = graph()
    prepared = prepare_edge_index(edge_index, (NODES, NODES))[0]
    wrong = [
        (x.double(), edge_index, "must have the dtype of the layer's", None),
        (x.long(), edge_index, 'must hold floating-point numbers', None),
        (x.numpy(), edge_index, 'must be a tensor of features of nodes', 'tensors, as of'),
        (x[:30], prepared, "'edge_index' is of size .*: prepare the edges again, by ToCSR", None),
        (x[:, 0], edge_index, r'x.view\(-1, 1\)', 'a column of a number for each node'),
    ]
    for features, edges, text, helps in wrong:
        layer = pyg_fast.accelerate(Fails())
        with pyg_fast.small_graphs('kernel'), pytest.raises((TypeError, ValueError), match=text):
            layer(features, edges)
        (report,) = pyg_fast.accelerate_report(layer)
        assert (report.cure or '').startswith(helps or '')
        assert (report.cure is None) == (helps is None)
    assert pyg_fast.accelerate_report(Fails(None))[0].cure.startswith("aggr='sum' or another one")


class Mine(Exception):
    """No error of torch or Python."""


@pytest.mark.parametrize('kind', [Mine, ZeroDivisionError, torch.OutOfMemoryError])
def test_report_of_a_first_call_that_raised(kind: type[Exception]) -> None:
    def fails(x: Tensor) -> Tensor:
        raise kind('too bad')

    class Raises(Told):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=fails(x) if self.how else x)

    layer, (x, edge_index) = pyg_fast.accelerate(Raises('a')), graph()
    with pytest.raises(kind, match='^too bad$'):
        layer(x, edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert (report.runs_on, report.error) == ('raised an error', f'{kind.__name__}: too bad')
    layer.how = ''
    torch.compile(layer, backend='eager')(x, edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.runs_on == "raised an error; compiled: PyG's code"
    checkpoint(layer, x.requires_grad_(), edge_index, use_reentrant=False).sum().backward()
    assert pyg_fast.accelerate_report(layer)[0].error is None


def test_report_of_a_call_that_raised() -> None:
    class Raises(Told):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x + self.norm.weight)

    layer, (x, edge_index) = pyg_fast.accelerate(Raises('')), graph()
    for edges, size in ((edge_index.t(), 'pyg'), (edge_index.t(), 'kernel')):
        with pyg_fast.small_graphs(size), pytest.raises(ValueError, match=r'\[2, num_edges\]'):
            layer(x[:, :8], edges)
        (report,) = pyg_fast.accelerate_report(layer)
        assert report.error == (
            f"ValueError: 'edge_index' must have shape [2, num_edges], got {list(edges.shape)}: "
            'edge_index.t().contiguous()'
        )
        assert report.reason == f'an edge_index of shape {list(edges.shape)}'
        assert report.cure.endswith('edge_index.t().contiguous()')
    layer = pyg_fast.accelerate(Raises(''))
    with pytest.raises(RuntimeError):
        layer(x[:, :5], edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert (report.runs_on, report.ran, report.sorts) == ('raised an error', None, False)
    assert "its last call raised: ShapeError: 'forward' cannot compute x + self.norm.weight" in str(
        pyg_fast.accelerate_report(layer)
    )
    layer(x[:, :8], edge_index)
    assert pyg_fast.accelerate_report(layer)[0].error is None
    layer = pyg_fast.accelerate(GCNConv(8, 4))
    with pytest.raises(ValueError, match=r'edge_index.t\(\).contiguous\(\)'):
        layer(x[:, :8], edge_index.t())
    assert pyg_fast.accelerate_report(layer)[0].runs_on == 'raised an error'


ROWS, LISTS = torch.ones(NODES, 8), torch.ones(NODES, NODES)
OF_COLUMN = 'message combines a number for each edge, of shape [num_edges], with a value of shape '
# What a message does with features and both ends, the reason, and a word of what helps.
OF_ENDS = [
    (lambda x, i, j, n: x * x.mean(-1), f'{OF_COLUMN}[num_edges, 8] (', '.unsqueeze(-1)'),
    (lambda x, i, j, n: x.mean(-1) * x, f'{OF_COLUMN}[num_edges, 8] (', '.unsqueeze(-1)'),
    (
        lambda x, i, j, n: torch.cat([x, ROWS], -1),
        'RuntimeError: Sizes of tensors must match except in dimension 1. Expected the number of '
        'edges in dimension 0 but got 40 ',
        'a row for each edge',
    ),
    (lambda x, i, j, n: x @ LISTS, 'message raises RuntimeError: a linear map takes 40', 'another'),
    (
        lambda x, i, j, n: x.view(100, -1, 8),
        "RuntimeError: shape '[100, -1, 8]' is invalid for input of size 8 times the number of",
        'view(-1, heads, channels)',
    ),
    (lambda x, i, j, n: x * (i > j).view(-1, 1), "a comparison of int64 ('index') (", 'mask='),
    (lambda x, i, j, n: x / degree(i, n)[i][:, None], 'message counts edges of each', 'deg_i'),
]


@pytest.mark.parametrize('number', range(len(OF_ENDS)))
def test_reasons_of_sizes_and_ends_are_in_the_users_terms(number: int) -> None:
    function, cause, helps = OF_ENDS[number]

    class SeenEnds(MessagePassing):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

        def message(
            self, x_j: Tensor, edge_index_i: Tensor, edge_index_j: Tensor, size_i: int
        ) -> Tensor:
            return function(x_j, edge_index_i, edge_index_j, size_i)

    layer, (x, edge_index) = pyg_fast.accelerate(SeenEnds()), graph()
    with pyg_fast.small_graphs('kernel'), contextlib.suppress(RuntimeError):  # The message's own.
        layer(x, edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.reason.startswith(cause)
    assert helps in (report.cure or report.error)
    assert 'test_accelerate.py", line ' in report.reason


def test_symbols_of_sizes_are_words_in_reasons() -> None:
    error = RuntimeError('Expected u0 in dimension 0 but got 39995')
    assert one_line(error) == 'Expected the number of edges or nodes in dimension 0 but got 39995'


def test_a_missing_attribute_is_of_the_users_class() -> None:
    class Misspelled(Told):
        def message(self, x_j: Tensor) -> Tensor:
            return self.nrom(x_j)

    layer, (x, edge_index) = pyg_fast.accelerate(Misspelled('')), graph()
    for size in ('kernel', 'pyg'):
        with pyg_fast.small_graphs(size), pytest.raises(AttributeError) as error:
            layer(x, edge_index)
        text = "'Misspelled' object has no attribute 'nrom'; did you mean 'norm'?"
        assert str(error.value) == text
        assert 'Did you mean' not in traceback.format_exc()  # Python would repeat it.
        assert pyg_fast.accelerate_report(layer)[0].error == f'AttributeError: {text}'


def test_all_operations_without_a_kernel_are_named() -> None:
    class Several(Told):
        def message(self, x_j: Tensor) -> Tensor:
            losses = torch.nn.functional.huber_loss(x_j, x_j.relu(), reduction='none')
            return losses.digamma().lgamma() + x_j.exp().lgamma()

    layer, (x, edge_index) = pyg_fast.accelerate(Several('')), graph()
    with pyg_fast.small_graphs('kernel'):
        layer(x, edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.reason.startswith(
        'aten.huber_loss.default has no kernel, nor have aten.digamma.default, '
        'aten.lgamma.default (File '
    )
    assert report.cure.startswith('the operation in forward, before propagate, where')


def test_the_line_of_a_size_that_is_a_number() -> None:
    class Sized(Told):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j / len(x_j)

    layer, (x, edge_index) = pyg_fast.accelerate(Sized('')), graph()
    with pyg_fast.small_graphs('kernel'):
        layer(x, edge_index)
    assert pyg_fast.accelerate_report(layer)[0].reason.endswith('return x_j / len(x_j))')


@pytest.mark.filterwarnings('ignore:ToldNumPy.message')
def test_the_reason_for_numpy_is_the_users() -> None:
    class ToldNumPy(Told):
        def message(self, x_j: Tensor) -> Tensor:
            return torch.from_numpy(x_j.numpy() % 0.3).float()

    layer, (x, edge_index) = pyg_fast.accelerate(ToldNumPy('')), graph()
    with pyg_fast.small_graphs('kernel'):
        layer(x[:, :8].contiguous(), edge_index)
    (report,) = pyg_fast.accelerate_report(layer)
    assert report.reason.startswith('message converts to NumPy (File ')
    assert report.reason.endswith('return torch.from_numpy(x_j.numpy() % 0.3).float())')
    assert report.cure.startswith("torch's operations in place of NumPy's")


@pytest.mark.parametrize(
    ('layer', 'helps'),
    [
        (lambda: GATConv(8, 4, aggr='mean'), "aggr='add': this layer has kernels for sums alone"),
        (lambda: GATv2Conv(8, 4, aggr='max'), "aggr='add': this layer has kernels for sums alone"),
        (
            lambda: GATConv(8, 4, edge_dim=4, fill_value='max'),
            "fill_value='mean' or a number, or add_self_loops=False",
        ),
        (
            lambda: SAGEConv(8, 4, aggr='median'),
            "aggr='sum', 'mean', 'max', 'min', 'var' or 'std', each",
        ),
    ],
)
def test_cures_fit_the_layer(layer: Callable[[], MessagePassing], helps: str) -> None:
    assert pyg_fast.accelerate_report(layer())[0].cure.startswith(helps)


class Product(MessagePassing):
    def __init__(self, aggr: str = 'mul') -> None:
        super().__init__(aggr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Spread(Product):
    """A variance in two rounds."""

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        mean = scatter(inputs, index, 0, dim_size, 'mean')
        return scatter((inputs - mean[index]) ** 2, index, 0, dim_size, 'mean')


class Moments(Spread):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        mean = scatter(inputs, index, 0, dim_size, 'mean')
        return scatter(inputs * inputs, index, 0, dim_size, 'mean') - mean * mean


class Logarithms(Product):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x).exp()

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.log()


class Checkpointed(Product):
    def message(self, x_j: Tensor) -> Tensor:
        return checkpoint(torch.sigmoid, x_j, use_reentrant=False)


class Uncheckpointed(Product):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.sigmoid(x_j)


@pytest.mark.parametrize(
    ('layer', 'helps', 'instead'),
    [
        (Spread, "for a variance aggr='var' or 'std', or in aggregate the mean of inputs", Moments),
        (Spread, "for a variance aggr='var'", lambda: Product('var')),
        (Product, "for positive numbers aggr='sum' of x_j.log()", lambda: Logarithms('sum')),
        (
            lambda: Checkpointed('sum'),
            'torch.utils.checkpoint around the layer, or none',
            lambda: Uncheckpointed('sum'),
        ),
    ],
)
def test_cures_run_as_kernels(
    layer: Callable[[], MessagePassing], helps: str, instead: Callable[[], MessagePassing]
) -> None:
    _, edge_index = graph()
    x = torch.rand(NODES, 8, dtype=torch.float64).add(0.5).requires_grad_()
    first, second = pyg_fast.accelerate(layer()), pyg_fast.accelerate(instead())
    with pyg_fast.small_graphs('kernel'):
        out = first(x, edge_index)
        around = checkpoint(second, x, edge_index, use_reentrant=False)
        for result in (second(x, edge_index), around):
            torch.testing.assert_close(result, out)
            torch.testing.assert_close(
                *(torch.autograd.grad(each.sum(), x, retain_graph=True) for each in (result, out))
            )
    (report,) = pyg_fast.accelerate_report(first)
    assert report.runs_on == "PyG's code"
    assert report.cure.startswith(helps)
    assert pyg_fast.accelerate_report(second)[0].runs_on == 'kernel'


class Chosen(MessagePassing):
    """With a message of functions that read types of edges and several linear maps."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.lins = ModuleList([torch.nn.Linear(8, 8, dtype=torch.float64) for _ in range(3)])

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, kind=kind)

    def message(self, x_j: Tensor, kind: Tensor) -> Tensor:
        return self.function(x_j, kind, self.lins)


def maps(x: Tensor, lins: ModuleList) -> Tensor:
    return torch.stack([lin(x) for lin in lins], 1)


def chosen_by_arange(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    h = maps(x, lins)
    return h[torch.arange(h.size(0)), kind]


def chosen_by_numbers(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    edges = torch.arange(len(kind))
    return maps(x, lins)[edges, kind]


def chosen_by_where(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    out = lins[0](x)
    for r in range(len(lins)):
        out = torch.where((kind == r).view(-1, 1), lins[r](x), out)
    return out


def chosen_by_classes(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    h = maps(x, lins)
    return (one_hot(kind, 3).to(h.dtype).unsqueeze(-1) * h).sum(1)


def gathered(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    return torch.gather(maps(x, lins), 1, kind.view(-1, 1, 1).expand(-1, 1, 8)).squeeze(1)


def one_channel(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    return x.gather(1, kind.view(-1, 1))


def one_channel_by_classes(x: Tensor, kind: Tensor, lins: ModuleList) -> Tensor:
    return (one_hot(kind, 8).to(x.dtype) * x).sum(-1, keepdim=True)


def three_by_three(x: Tensor) -> Tensor:
    return torch.cat([x, x[:, :1].exp()], -1).view(-1, 3, 3)


def cross_of_rows(x: Tensor) -> Tensor:
    m = three_by_three(x)
    return (m[:, 0] * torch.linalg.cross(m[:, 1], m[:, 2])).sum(-1).view(-1, 1)


def products_of_two(x: Tensor) -> Tensor:
    m = x[:, :4].view(-1, 2, 2)
    return (m[:, 0, 0] * m[:, 1, 1] - m[:, 0, 1] * m[:, 1, 0]).view(-1, 1)


# A message that no kernel computes, words of its cure, and messages that follow it.
CHOICES: list[tuple[Callable[..., Tensor], str, list[Callable[..., Tensor]]]] = [
    (chosen_by_arange, 'torch.where for each type', [chosen_by_where, chosen_by_classes]),
    (chosen_by_numbers, 'torch.where for each type', [chosen_by_where, chosen_by_classes]),
    (gathered, 'of h with a row for each type (F.one_hot', [chosen_by_classes]),
    (one_channel, '(F.one_hot(kind, channels).to(x_j.dtype) * x_j)', [one_channel_by_classes]),
    (
        lambda x, *_: torch.linalg.det(x[:, :4].view(-1, 2, 2)).view(-1, 1),
        'm[:, 0, 0] * m[:, 1, 1]', [lambda x, *_: products_of_two(x)],
    ),
    (
        lambda x, *_: torch.det(three_by_three(x)).view(-1, 1),
        'torch.linalg.cross(m[:, 1], m[:, 2])', [lambda x, *_: cross_of_rows(x)],
    ),
]  # fmt: skip


@pytest.mark.parametrize('number', range(len(CHOICES)))
def test_cures_of_choices_run_as_kernels(number: int) -> None:
    function, helps, others = CHOICES[number]
    _, edge_index = graph()
    kind = torch.randint(3, (edge_index.size(1),))
    x = torch.rand(NODES, 8, dtype=torch.float64, requires_grad=True)
    first = pyg_fast.accelerate(Chosen(function))
    with pyg_fast.small_graphs('kernel'):
        out = first(x, edge_index, kind)
        (report,) = pyg_fast.accelerate_report(first)
        assert report.runs_on == "PyG's code"
        assert helps in report.cure
        for other in others:
            second = pyg_fast.accelerate(Chosen(other), strict=True)
            second.load_state_dict(first.state_dict())
            result = second(x, edge_index, kind)
            torch.testing.assert_close(result, out)
            torch.testing.assert_close(
                *(torch.autograd.grad(each.sum(), x, retain_graph=True) for each in (result, out))
            )
            assert pyg_fast.accelerate_report(second)[0].runs_on == 'kernel'


def test_pygs_norm_of_all_edges_is_told() -> None:
    class Normed(Told):
        def __init__(self) -> None:
            super().__init__('')
            self.net = MLP([16, 8, 8], norm='layer_norm')

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.net(torch.cat([x_i, x_j], dim=-1))

    layer, (x, edge_index) = pyg_fast.accelerate(Normed()), graph()
    with pyg_fast.small_graphs('kernel'):
        layer(x, edge_index)
    assert "norm_kwargs=dict(mode='node')" in pyg_fast.accelerate_report(layer)[0].cure


def test_a_message_with_a_network_a_norm_and_detach_runs_on_a_kernel() -> None:
    class Rich(Told):
        def __init__(self) -> None:
            super().__init__('')
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.LayerNorm(8))

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.net(torch.cat([x_i, x_j.detach()], dim=-1))

    layer, (x, edge_index) = Rich(), graph()
    x = x[:, :8].contiguous()
    expected = layer(x, edge_index)
    with pyg_fast.small_graphs('kernel'):
        torch.testing.assert_close(pyg_fast.accelerate(layer)(x, edge_index), expected)
    assert pyg_fast.accelerate_report(layer)[0].runs_on in ('kernel', 'blocks')


@pytest.mark.parametrize(
    'function', [pyg_fast.accelerate, pyg_fast.accelerate_report, pyg_fast.restore]
)
def test_not_a_module(function: Callable) -> None:
    with pytest.raises(TypeError, match="'model' must be a torch.nn.Module, got list"):
        function([GCNConv(8, 4)])


@pytest.mark.parametrize('name', MODELS)
def test_explainer(name: str) -> None:
    theirs, (x, edge_index) = model_of(name).eval(), graph()
    masks = []
    for model in (theirs, pyg_fast.accelerate(copy.deepcopy(theirs))):
        torch.manual_seed(1)
        explainer = Explainer(
            model,
            GNNExplainer(epochs=5),
            explanation_type='model',
            edge_mask_type='object',
            model_config={
                'mode': 'multiclass_classification', 'task_level': 'node', 'return_type': 'raw'
            },
        )  # fmt: skip
        masks.append(explainer(x, edge_index, index=3).edge_mask)
    torch.testing.assert_close(masks[1], masks[0])
    assert masks[0].unique().numel() > 10
    torch.testing.assert_close(all_fuse(model)(x, edge_index), theirs(x, edge_index))


@pytest.mark.parametrize('name', MODELS)
def test_trains_after_inference(name: str, device: torch.device) -> None:
    theirs = model_of(name).to(device)
    ours = all_fuse(pyg_fast.accelerate(copy.deepcopy(theirs)))
    x, edge_index = (v.to(device) for v in graph())
    prepared, _ = prepare_edge_index(edge_index, (NODES, NODES))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, prepared), theirs(x, edge_index))
    got, expected = gradients(ours, x, prepared), gradients(theirs, x, edge_index)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_compiled_model(device: torch.device) -> None:
    torch._dynamo.reset()
    theirs = model_of('GraphSAGE').to(device)
    ours = all_fuse(pyg_fast.accelerate(copy.deepcopy(theirs)))
    x, edge_index = (v.to(device) for v in graph())
    prepared, _ = prepare_edge_index(edge_index, (NODES, NODES))
    compiled = torch.compile(ours, fullgraph=True, backend='aot_eager')
    got, expected = gradients(compiled, x, prepared), gradients(theirs, x, edge_index)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


BY_INDEX = re.compile(r'\w+::_?(index|scatter|gather|sort|argsort|segment|sparse|spmm)')


def share_of_our_kernels(model: Module, x: Tensor, edge_index: Tensor) -> float:
    """Of the time in operations that read or write edges, how much is in ours."""
    num_edges = edge_index.size(1)
    model(x, edge_index).sum().backward()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if x.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        model(x, edge_index).sum().backward()
    ours = others = 0.0
    for event in profile.key_averages(group_by_input_shape=True):
        time = event.self_device_time_total if x.is_cuda else event.self_cpu_time_total
        if '::' not in event.key or event.key.startswith('autograd::'):
            continue  # No operation: Python that calls some.
        sizes = {n for shape in event.input_shapes for n in shape if isinstance(n, int)}
        if event.key.startswith('pyg_fast::'):
            ours += time
        elif num_edges in sizes or num_edges + x.size(0) in sizes or BY_INDEX.match(event.key):
            others += time
    return ours / (ours + others)


@pytest.mark.parametrize('name', MODELS)
def test_aggregation_runs_in_our_kernels(name: str, device: torch.device) -> None:
    num_nodes, num_edges = 5_000, 100_003
    edge_index, _ = prepare_edge_index(torch.randint(num_nodes, (2, num_edges)), (num_nodes,) * 2)
    edge_index = edge_index.to(device)
    x = torch.randn(num_nodes, 64, device=device, requires_grad=True)
    model = getattr(torch_geometric.nn, name)(64, 64, 3).to(device)
    assert share_of_our_kernels(model, x, edge_index) == 0.0
    assert share_of_our_kernels(pyg_fast.accelerate(model), x, edge_index) >= 0.9


def test_names_of_a_users_layer_stay_theirs() -> None:
    class Named(MessagePassing):
        _own, _how, _release, _is_adopted = 1, 2, 3, 4

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self._note(self.propagate(edge_index, x=x)) + self.to_base() + self._adopt

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_i * x_j

        def _note(self, out: Tensor) -> Tensor:
            return out + self._why_never

        def to_base(self) -> int:
            return self._own + self._how + self._release + self._is_adopted

        _adopt, _why_never = 5, 6

    x, edge_index = torch.randn(9, 3), torch.randint(9, (2, 40))
    layer = Named()
    expected = layer(x, edge_index)
    with pyg_fast.small_graphs('kernel'):
        out = pyg_fast.accelerate(layer)(x, edge_index)
    torch.testing.assert_close(out, expected)
    (report,) = pyg_fast.accelerate_report(layer)
    assert (report.ran, report.how) == ('FusedNamed', 'kernel')
    assert type(pyg_fast.restore(layer)) is Named


def test_a_refused_layer_gets_no_class() -> None:
    made = []

    class Registered(MessagePassing):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            made.append(cls)
            super().__init_subclass__(**kwargs)

        def propagate(self, *args: Any, **kwargs: Any) -> Tensor:
            return MessagePassing.propagate(self, *args, **kwargs)

    (report,) = pyg_fast.accelerate_report(pyg_fast.accelerate(Registered()))
    assert report.reason == 'its propagate is overridden'
    assert made == []


def test_reason_of_edges_that_are_no_tensor() -> None:
    layers, (x, edge_index) = (SAGEConv(8, 4), GraphConv(8, 4)), graph()
    for layer in map(pyg_fast.accelerate, layers):
        with pytest.raises((ValueError, AttributeError)):
            layer(x, {('a', 'to', 'a'): edge_index})
        (report,) = pyg_fast.accelerate_report(layer)
        assert report.reason == 'an edge_index of type dict'
        assert 'HeteroConv' in report.cure


@pytest.mark.parametrize('name', ['SAGEConv', 'GraphConv', 'GATConv', 'TransformerConv'])
def test_few_edges_of_any_integers(name: str) -> None:
    """PyG's code, which runs few edges, takes int64 alone."""
    layer = pyg_fast.accelerate(getattr(torch_geometric.nn, name)(4, 2))
    x, edge_index = torch.randn(9, 4), torch.randint(9, (2, 30))
    with pyg_fast.small_graphs('pyg'):
        expected = layer(x, edge_index)
        for dtype in (torch.int32, torch.int16):
            torch.testing.assert_close(layer(x, edge_index.to(dtype)), expected)
