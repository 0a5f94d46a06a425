"""Accelerated layers inside of torch.compile, beside PyG's: writes, sizes, prepared graphs."""

import configparser
import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _forks
import pytest
import torch
import torch.nn.functional as F
from _pairs import pairs
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import (
    AGNNConv,
    ClusterGCNConv,
    FeaStConv,
    GATConv,
    GCNConv,
    GENConv,
    GINEConv,
    GraphConv,
    LEConv,
    LGConv,
    MessagePassing,
    ResGatedGraphConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.utils import remove_self_loops, softmax, trim_to_layer

import pyg_fast
from pyg_fast.graph import BatchEdgeIndex, Graph, PreparedGraph
from pyg_fast.loader import FastNeighborLoader
from pyg_fast.message import _replace
from pyg_fast.transforms import ToCSR
from tests._compiled import Backend, assert_like_pyg, graph_data
from tests._profile import sorts_of
from tests.nn import _layers

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Dynamo compiles a code object at most eight times."""
    torch._dynamo.reset()


class Own(MessagePassing):
    """A layer whose message is a function."""

    def __init__(self, function: Callable[..., Tensor], aggr: Any = 'sum', **kwargs: Any) -> None:
        super().__init__(aggr, **kwargs)
        self.function = function
        self.lin = torch.nn.Linear(8, 8).double()
        self.row = torch.nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: Any, edge_index: Tensor, edge: Tensor, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, edge=edge, size=size)

    def message(self, x_i: Tensor, x_j: Tensor, edge: Tensor, index: Tensor, size_i: int) -> Tensor:
        return self.function(self, x_i, x_j, edge, index, size_i)


def gated(conv: Any, x_i: Tensor, x_j: Tensor, edge: Tensor, *_: Any) -> Tensor:
    return torch.sigmoid(conv.lin(x_i) + x_j) * x_j + edge


def attention(conv: Any, x_i: Tensor, x_j: Tensor, edge: Tensor, index: Any, size: Any) -> Tensor:
    return softmax(x_i + x_j, index, num_nodes=size) * x_j + softmax(edge, index, num_nodes=size)


def one_softmax(conv: Any, x_i: Tensor, x_j: Tensor, edge: Tensor, index: Any, size: Any) -> Tensor:
    return softmax(x_j + edge, index, num_nodes=size) * x_i


def writes(conv: Any, x_i: Tensor, x_j: Tensor, edge: Tensor, *_: Any) -> Tensor:
    out = x_j + edge
    out.mul_(2)
    out.view(-1, 2, 4).mul_(3)
    x_i.relu_()
    out += x_i
    return out * conv.row


def refused(conv: Any, x_i: Tensor, x_j: Tensor, edge: Tensor, *_: Any) -> Tensor:
    out = x_j * 1
    out.view(-1, 2, 4)[:, 0].mul_(2)
    out[:, 1:3] = 0
    return out - out.mean(0) + edge


def on(device: torch.device, *sizes: tuple[int, int]) -> list[list[Tensor]]:
    return [graph_data(*size, device) for size in sizes or ((20, 50), (33, 71))]


class Net(torch.nn.Module):
    """Two layers with what a user writes around them."""

    def __init__(self, body: Callable[..., Any], function: Any = gated, aggr: Any = 'sum') -> None:
        super().__init__()
        self.body = body
        self.one, self.two = Own(function, aggr), Own(gated, 'mean')
        self.two.row = self.one.row
        self.lin = torch.nn.Linear(8, 8).double()

    def forward(self, x: Tensor, edges: Tensor, edge: Tensor) -> Any:
        return self.body(self, x, edges, edge)


def before(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Tensor:
    h = F.relu(net.lin(x), inplace=True)
    edge = edge * 1
    edge.view(-1, 2, 4)[:, 1].relu_()
    return net.one(h, edges, edge)


def after(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Any:
    h = net.lin(x)
    out = net.one(h, edges, edge)
    h[:, :4].mul_(2)
    out += h
    return out, h


def between(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Tensor:
    h, edges = x * 1, edges.flip(0)
    out = net.one(h, edges, edge)
    h.mul_(3)
    return out + net.two(h, edges, edge)


def twice(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Tensor:
    return net.one(net.one(x, edges, edge), edges, edge)


def shared(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Tensor:
    return net.one(x, edges, edge) + net.two(x, edges.flip(0), edge)


def without_grad(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.one(x, edges, edge)
    return net.two(h, edges, edge)


def recomputed(net: Net, x: Tensor, edges: Tensor, edge: Tensor) -> Tensor:
    h = checkpoint(net.one, x, edges, edge, use_reentrant=False)
    return net.two(h.relu(), edges, edge)


@pytest.mark.parametrize(
    ('body', 'kernels'),
    [(before, 1), (after, 1), (between, 2), (twice, 2), (shared, 2), (without_grad, 2),
     (recomputed, 2)],
)  # fmt: skip
def test_around(body: Any, kernels: int, device: torch.device) -> None:
    """A layer that reads another's result lost its gradient; writes after it raised an error."""
    assert_like_pyg(Net(body), on(device), kernels=kernels, frames=1)


SEVERAL = ['mean', 'std', 'min']


@pytest.mark.parametrize(
    ('function', 'aggr'),
    [(gated, 'max'), (gated, SEVERAL), (attention, 'sum'), (attention, SEVERAL), (writes, 'sum'),
     (writes, 'max')],
)  # fmt: skip
def test_messages(function: Any, aggr: Any, device: torch.device) -> None:
    assert_like_pyg(Own(function, aggr), on(device), kernels=1, frames=1)


def test_refused_writes(device: torch.device) -> None:
    """FX took `mul_` on a view for dead code."""
    assert_like_pyg(Own(refused), on(device), kernels=0, frames=1)


class Keeps(MessagePassing):
    """Keeps the gathered input that its message writes, and counts its calls."""

    def __init__(self, keeps: bool) -> None:
        super().__init__('sum')
        self.keeps, self.kept = keeps, None
        self.register_buffer('count', torch.zeros(8, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor) -> Any:
        out = self.propagate(edge_index, x=x, edge=edge)
        kept, self.kept = self.kept, None
        return out, kept, self.count * 1

    def message(self, x_j: Tensor, edge: Tensor) -> Tensor:
        if self.keeps:
            self.kept = x_j
            x_j.mul_(2)
        return x_j.type_as(self.count.add_(1)) + edge


@pytest.mark.parametrize('keeps', [False, True])
def test_effects(keeps: bool, device: torch.device) -> None:
    assert_like_pyg(Keeps(keeps).to(device), on(device), kernels=int(not keeps), frames=1)


@pytest.mark.parametrize('function', [gated, one_softmax])
def test_sizes(function: Any, device: torch.device) -> None:
    """An epoch of batches, the last one partial, some with as many edges as nodes or channels."""
    sizes = (20, 50), (33, 33), (40, 8), (8, 90), (8, 8), (3, 5)
    assert_like_pyg(Own(function), on(device, *sizes), kernels=1, frames=1)


@pytest.mark.parametrize('first', [(20, 20), (20, 8), (8, 20), (1, 9), (5, 1), (9, 0)], ids=str)
def test_first_sizes(first: tuple[int, int], device: torch.device) -> None:
    """Numbers that are equal by chance, and those that Dynamo takes for constants."""
    backend = assert_like_pyg(Own(one_softmax), on(device, first, (33, 71)), frames=2)
    assert backend.kernels >= 1


def of_source(conv: Any, x_i: Tensor, x_j: Tensor, *_: Any) -> Tensor:
    return x_j


def loop(conv: Any, x_i: Tensor, x_j: Tensor, edge: Tensor, *_: Any) -> Tensor:
    return torch.sigmoid(x_i + x_j) * edge


def mlp(conv: Any, x_i: Tensor, x_j: Tensor, *_: Any) -> Tensor:
    return conv.lin(conv.lin(x_i - x_j).relu()).relu()


@pytest.mark.parametrize(('function', 'num_edges', 'threads', 'pays'), [
    (gated, 6900, 1, False), (gated, 7100, 1, True), (mlp, 6900, 2, False), (mlp, 7100, 2, True),
    (loop, 7100, 2, True), (loop, 7100, 1, False), (of_source, 7100, 2, False),
])  # fmt: skip
def test_few_edges(
    function: Any, num_edges: int, threads: int, pays: bool, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Kernels of messages pay earlier than sums of rows, on a CPU, of several threads all; on CUDA
    far later."""
    monkeypatch.setattr(torch, 'get_num_threads', lambda: threads)
    with pyg_fast.small_graphs('pyg'):
        kernels = int(pays and device.type == 'cpu')
        assert_like_pyg(Own(function), on(device, (300, num_edges)), kernels=kernels)


@pytest.mark.parametrize('num_edges', [7, 1, 0])
def test_variance_of_few_edges(num_edges: int, device: torch.device) -> None:
    """The CPU's kernel took a row of edge features for each destination."""
    conv = Own(gated, ['mean', 'std', 'max']).to(device)
    calls = on(device, (20, num_edges))
    assert_like_pyg(conv, calls, kernels=1)
    eager = pyg_fast.accelerate(copy.deepcopy(conv))
    torch.testing.assert_close(eager(*calls[0]), conv(*calls[0]))


@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_bipartite(flow: str, device: torch.device) -> None:
    calls = []
    for num_src, num_dst, num_edges in ((9, 20, 50), (12, 33, 71), (40, 20, 90)):
        if flow == 'target_to_source':
            num_src = num_dst
        x, edges, edge = graph_data(num_dst, num_edges, device, num_src)
        calls.append([(x, graph_data(num_dst, 1, device)[0]), edges, edge])
    assert_like_pyg(Own(gated, flow=flow), calls, kernels=1, frames=1)


@pytest.mark.parametrize('needs', ['x', 'edge', 'parameters', ''])
def test_some_gradients(needs: str, device: torch.device) -> None:
    conv, calls = Own(writes), on(device)
    conv.requires_grad_(needs == 'parameters')
    for x, _, edge in calls:
        x.requires_grad_(needs == 'x')
        edge.requires_grad_(needs == 'edge')
    assert_like_pyg(conv, calls, kernels=1, frames=1)


class Enabled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Own(gated)

    def forward(self, *args: Any) -> Tensor:
        with torch.enable_grad():
            return self.conv(*args)


def test_modes_of_gradients(device: torch.device) -> None:
    """A region of enable_grad in a call without gradients lost them."""

    def untracked(model: Any, *args: Any) -> Tensor:
        with torch.no_grad():
            return model(*args)

    def inference(model: Any, *args: Any) -> Tensor:
        with torch.inference_mode():
            return model(*args).clone()

    assert_like_pyg(Enabled(), on(device), kernels=1, through=untracked)
    assert_like_pyg(Own(gated), on(device), kernels=1, through=untracked)
    assert_like_pyg(Own(gated), on(device), kernels=1, through=inference)


def test_autocast(device: torch.device) -> None:
    def cast(model: Any, *args: Any) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(*args).float()

    calls = [
        [x.detach().float().requires_grad_(), edges, edge.detach().float().requires_grad_()]
        for x, edges, edge in on(device)
    ]
    for function in (gated, attention):
        conv = Own(function).float()
        assert_like_pyg(conv, calls, kernels=1, through=cast, tolerance=0.15)


def test_transforms(device: torch.device) -> None:
    """Graphs of torch.func run PyG's code; marks have no batching rule."""
    conv = Own(gated).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    x, edges, edge = (t.detach() for t in graph_data(20, 50, device))

    def energy(model: Any, x: Tensor) -> Tensor:
        return model(x, edges, edge).pow(2).sum()

    backend = Backend()
    grad = torch.compile(lambda x: torch.func.grad(lambda y: energy(ours, y))(x), backend=backend)
    torch.testing.assert_close(grad(x), torch.func.grad(lambda y: energy(conv, y))(x))
    batch = torch.stack([x, 2 * x])
    each = torch.compile(lambda b: torch.func.vmap(lambda y: energy(ours, y))(b), backend=backend)
    torch.testing.assert_close(each(batch), torch.stack([energy(conv, y) for y in batch]))
    assert backend.kernels == 0


@pytest.mark.parametrize('kind', ['EdgeIndex', 'sorted', 'PreparedGraph', 'without positions'])
def test_prepared(kind: str, device: torch.device) -> None:
    def prepared(edges: Tensor, num_nodes: int) -> Any:
        if kind == 'EdgeIndex':
            return EdgeIndex(edges)
        if kind == 'sorted':
            edges = edges[:, edges[1].argsort()].contiguous()
            return EdgeIndex(edges, sparse_size=(num_nodes, num_nodes), sort_order='col')
        graph = Graph.from_edge_index(edges, num_nodes, num_nodes)
        lean = graph._replace(t_perm=None, missing='t_perm')
        return PreparedGraph(graph if kind == 'PreparedGraph' else lean)

    def plain(args: list[Any]) -> list[Any]:
        x, edges, edge = args
        edges = edges.to_edge_index() if isinstance(edges, PreparedGraph) else edges
        own = (t.detach().clone().requires_grad_() for t in (x, edge))
        return [next(own), edges.as_tensor(), next(own)]

    calls = [[x, prepared(edges, x.size(0)), edge] for x, edges, edge in on(device)]
    backend = assert_like_pyg(Own(gated), calls, theirs=plain)
    assert backend.kernels == backend.frames


LAYERS = {
    'own': lambda: Own(gated), 'SAGE': lambda: SAGEConv(8, 8), 'GCN': lambda: GCNConv(8, 8),
    'GAT': lambda: GATConv(8, 8),
}  # fmt: skip


# A graph that lacks nothing is that of `test_graphs_of_any_size`.
@pytest.mark.parametrize('lacks', [('t_perm',), ('t_rowptr', 't_col', 't_perm')], ids=str)
@pytest.mark.parametrize('name', LAYERS)
def test_prepared_sizes(name: str, lacks: tuple[str, ...], device: torch.device) -> None:
    """Code that is compiled for one size runs for all."""
    conv = LAYERS[name]().double().to(device)
    backend = Backend()
    compiled = torch.compile(
        pyg_fast.accelerate(copy.deepcopy(conv)), backend=backend, fullgraph=True, dynamic=True
    )
    frames = set()
    for x, edges, edge in on(device):
        graph = Graph.from_edge_index(edges, x.size(0), x.size(0))
        missing = 't_perm' if lacks == ('t_perm',) else None
        graph = graph._replace(**dict.fromkeys(lacks), missing=missing)
        features = [edge] * isinstance(conv, Own)
        out = compiled(x, PreparedGraph(graph), *features)
        expected = conv(x, edges, *features)
        torch.testing.assert_close(out, expected)
        for got, wanted in zip(*(
            torch.autograd.grad(each.square().sum(), x) for each in (out, expected)
        ), strict=True):  # fmt: skip
            torch.testing.assert_close(got, wanted)
        frames.add(backend.frames)
    assert len(frames) == 1  # Those of the first call: GAT has two parts.
    assert frames <= ({1, 2} if name == 'GAT' else {1})


@pytest.mark.parametrize('name', LAYERS)
def test_batches_of_a_loader(name: str, device: torch.device) -> None:
    """Code that is compiled for one runs for all, also for the last one, which is smaller, with
    gradients of nodes and edges, whose order in the transpose is another."""
    x = torch.randn(300, 8, dtype=torch.double)
    data = Data(x=x, edge_index=torch.randint(300, (2, 2000)), num_nodes=300)
    conv = LAYERS[name]().double().to(device)
    backend = Backend()
    compiled = torch.compile(
        pyg_fast.accelerate(copy.deepcopy(conv)), backend=backend, fullgraph=True, dynamic=True
    )
    batches = FastNeighborLoader(data, [4, 3], batch_size=23, device=device)
    frames = set()
    for batch in batches:
        edges = batch.edge_index
        features = [torch.randn(edges.size(1), 8).to(x).to(device)] * isinstance(conv, Own)
        inputs = [t.clone().requires_grad_() for t in (batch.x, *features)]
        out = compiled(inputs[0], edges, *inputs[1:])
        expected = conv(inputs[0], edges.as_tensor(), *inputs[1:])
        torch.testing.assert_close(out, expected)
        weights = torch.randn_like(out)
        grads = [torch.autograd.grad((y * weights).sum(), inputs) for y in (out, expected)]
        torch.testing.assert_close(*grads)
        frames.add(backend.frames)
    assert len(batches) == 14
    assert len(frames) == 1  # Those of the first call: GAT has two parts.
    assert frames <= ({1, 2} if name == 'GAT' else {1})


class Trimmed(torch.nn.Module):
    """Layers over fewer hops each, as PyG's examples write it."""

    def __init__(self, *convs: torch.nn.Module) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(convs)

    def forward(self, x: Tensor, edges: Tensor, num_nodes: Any, num_edges: Any) -> Tensor:
        for k, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(k, num_nodes, num_edges, x, edges)
            x = conv(x, edges).relu()
        return x


@pytest.mark.parametrize(('name', 'num_layers', 'fullgraph'), [
    ('SAGE', 3, True), ('GCN', 2, True), ('GAT', 2, False), ('LEConv', 3, True),
])  # fmt: skip
def test_trimmed_batches(name: str, num_layers: int, fullgraph: bool, device: torch.device) -> None:
    """Code that is compiled for one runs for all, as PyG's does with plain lists."""
    x = torch.randn(300, 8, dtype=torch.double)
    data = Data(x=x, edge_index=torch.randint(300, (2, 2000)))
    make = {**LAYERS, 'LEConv': lambda: LEConv(8, 8)}[name]
    net = Trimmed(*(make() for _ in range(num_layers))).double().to(device)
    backend = Backend()
    compiled = torch.compile(
        pyg_fast.accelerate(copy.deepcopy(net)), backend=backend, fullgraph=fullgraph, dynamic=True
    )
    frames = set()
    for batch in FastNeighborLoader(data, [4, 3, 2][:num_layers], batch_size=55, device=device):
        args = batch.x, batch.num_sampled_nodes, batch.num_sampled_edges
        out = compiled(args[0], batch.edge_index, *args[1:])
        torch.testing.assert_close(out, net(args[0], batch.edge_index.as_tensor(), *args[1:]))
        frames.add(backend.frames)
    assert len(frames) <= 2  # GCNConv has a second one for a batch of few edges.
    assert max(frames) <= 3
    assert backend.kernels == (3 if name == 'LEConv' else 0)


@pytest.mark.parametrize('end', [0, 1])
def test_edges_out_of_range(end: int, device: torch.device) -> None:
    if device.type == 'cuda':
        pytest.skip('an assertion on the device ends the process')
    conv = pyg_fast.accelerate(Own(gated))
    compiled = torch.compile(conv, backend=Backend(), dynamic=True)
    x, edges, edge = graph_data(20, 50, device)
    for value in (20, -1, 2**40):
        edges[end, 7] = value
        with pytest.raises(RuntimeError, match='edge_index'):
            compiled(x, edges, edge)


def test_without_the_pass(device: torch.device) -> None:
    """Marks dissolve into PyG's operators under other backends and in exported programs."""
    assert_like_pyg(Own(writes, ['sum', 'std']), on(device), backend=Backend(replaces=False))
    conv = Own(gated).to(device)
    args = tuple(graph_data(20, 50, device))
    program = torch.export.export(pyg_fast.accelerate(copy.deepcopy(conv)), args)
    assert not any('pyg_fast' in str(node.target) for node in program.graph.nodes)


class Twice(torch.nn.Module):
    """Two messages, a layer that runs PyG's code in exported programs, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Own(gated), Own(attention, ['sum', 'max'])
        self.third = GATConv(8, 4, heads=2).double()

    def forward(self, x: Tensor, edges: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x, edges, edge)
        return self.second(F.dropout(x, 0.5, self.training), edges, edge), self.third(x, edges)


EDGES = torch.export.Dim('edges', max=2**30)
SIZES = {0: torch.export.Dim('nodes')}, {1: EDGES}, {0: EDGES}


def test_exported(device: torch.device, tmp_path: Path) -> None:
    model = Twice().to(device).eval()
    args = tuple(graph_data(20, 50, device))
    program = pyg_fast.export(copy.deepcopy(model), args, dynamic_shapes=SIZES, gradients=True)
    names = [str(node.target) for node in program.graph.nodes]
    assert names.count('pyg_fast.message.default') == 2
    torch.export.save(program, tmp_path / 'program.pt2')
    loaded = torch.export.load(tmp_path / 'program.pt2')
    args = tuple(graph_data(30, 90, device))
    wanted = model(*args)
    params = dict(model.named_parameters())
    for name in ('first.row', 'second.row', 'second.lin.weight', 'second.lin.bias'):
        del params[name]  # They are not used.
    grads = torch.autograd.grad(sum(x.square().sum() for x in wanted), params.values())
    for each in (program.module(), loaded.module()):
        found = each(*args)
        torch.testing.assert_close(found, wanted)
        own = dict(each.named_parameters())
        of_own = torch.autograd.grad(
            sum(x.square().sum() for x in found), [own[name] for name in params]
        )
        torch.testing.assert_close(of_own, grads)


def test_wrong_arguments() -> None:
    conv = SAGEConv(8, 4)
    x, edges, _ = graph_data(20, 50, torch.device('cpu'), dtype=torch.float32)
    with pytest.raises(TypeError, match="'args' must be a tuple of inputs, got Tensor: write"):
        pyg_fast.export(conv, x, edges)
    with pytest.raises(TypeError, match="'kwargs' must be a dictionary .*, got Tensor"):
        pyg_fast.export(conv, (x,), edges)
    with pytest.raises(ValueError, match="'mode' must be one of .*'reduce-overhead'.*, got 'reduc"):
        pyg_fast.compile(conv, mode='reduce-overheads')
    for name in ('dynamic', 'fullgraph'):
        with pytest.raises(TypeError, match=f"'{name}' must be True or False, got str"):
            pyg_fast.compile(conv, **{name: 'yes'})  # type: ignore[arg-type]
    for mode in ('default', 'max-autotune', None):
        pyg_fast.compile(conv, mode=mode)
    with pytest.raises(RuntimeError, match=r"'options' must hold options .*, got \['foo'\]"):
        pyg_fast.compile(conv, options={'foo': 1})
    with pytest.raises(TypeError, match="'options' must be a dictionary .*, got list"):
        pyg_fast.compile(conv, options=[1])
    pyg_fast.compile(conv, options={'triton.cudagraphs': False})
    for option in ('strict', 'gradients'):
        with pytest.raises(TypeError, match=f"'{option}' must be True or False, got str"):
            pyg_fast.export(conv, (x, edges), **{option: 'yes'})


@pytest.mark.parametrize('keeps', [True, False])
@pytest.mark.parametrize('conv', [GATConv(8, 4), SAGEConv(8, 4), GraphConv(8, 4)])
def test_export_of_a_prepared_graph(conv: torch.nn.Module, keeps: bool) -> None:
    """An error names the argument and the cure, which works."""
    conv = pyg_fast.accelerate(copy.deepcopy(conv).float())
    x, edges, _ = graph_data(20, 50, torch.device('cpu'), dtype=torch.float32)
    data = ToCSR(keep_edge_index=keeps)(Data(x=x.detach(), edge_index=edges))
    cure = r'got (EdgeIndex|PreparedGraph): pass edge_index.as_tensor\(\)'
    for export in (torch.export.export, pyg_fast.export):
        with pytest.raises(TypeError, match=cure):
            export(conv, (data.x, data.edge_index))
    program = torch.export.export(conv, (data.x, data.edge_index.as_tensor()))
    torch.testing.assert_close(program.module()(data.x, edges), conv(data.x, edges))


def test_exported_dropout(device: torch.device) -> None:
    """A program of a layer in training drops other edges in each call."""
    x, edges, edge = graph_data(20, 4000, device)
    conv = Own(lambda conv, x_i, x_j, edge, *_: F.dropout(x_j * 0 + 1, 0.25, conv.training), 'mean')
    program = pyg_fast.export(conv.to(device), (x, edges, edge), gradients=True)
    assert any(node.target is torch.ops.pyg_fast.message.default for node in program.graph.nodes)
    one, other = (program.module()(x, edges, edge) for _ in range(2))
    assert not torch.equal(one, other)
    assert abs(float((one + other).mean()) / 2 - 1) < 0.05


@pytest.mark.parametrize('strict', [False, True])
def test_exported_without_gradients(device: torch.device, strict: bool) -> None:
    conv, args = Own(gated).to(device), tuple(graph_data(20, 50, device))
    program = pyg_fast.export(copy.deepcopy(conv), args, strict=strict).module()
    torch.testing.assert_close(program(*args), conv(*args))
    with pytest.raises(RuntimeError, match='gradients=True'):
        program(*args).sum().backward()
    if device.type == 'cpu':  # On CUDA an assertion on the device ends the process.
        args[1][0, 3] = 20
        with pytest.raises(RuntimeError, match='edge_index'):
            program(*args)


@pytest.mark.parametrize('imports', ['torch._dynamo, pyg_fast._compile', 'torch._dynamo'])
def test_backend_by_name(tmp_path: Path, imports: str) -> None:
    """An installed package offers the backend; this process may run from the source tree."""
    config = configparser.ConfigParser()
    config.read(ROOT / 'setup.cfg')
    info = tmp_path / 'offered-1.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text('Name: offered\nVersion: 1\n')
    (line,) = config['options.entry_points']['torch_dynamo_backends'].split('\n')[1:]
    (info / 'entry_points.txt').write_text(f'[torch_dynamo_backends]\n{line}\n')
    code = (
        f'import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n'
        f'import {imports}\n'
        "found = torch._dynamo.lookup_backend('pyg_fast')\n"
        'import pyg_fast._compile\n'
        'assert found is pyg_fast._compile.backend'
    )
    run = _forks.run('-c', code)
    assert run.returncode == 0, run.stderr


def test_backend_by_name_in_a_source_tree() -> None:
    code = (  # No package is installed whose entry point offers the backend.
        f'import sys; sys.path.insert(0, {str(ROOT)!r})\n'
        'import importlib.metadata; importlib.metadata.entry_points = lambda **_: (\n'
        '    importlib.metadata.EntryPoints())\n'
        'import torch._dynamo, pyg_fast\n'
        "assert torch._dynamo.lookup_backend('pyg_fast') is pyg_fast._compile.backend\n"
        "assert 'pyg_fast' in torch._dynamo.list_backends()"
    )
    run = _forks.run('-c', code)
    assert run.returncode == 0, run.stderr


def test_one_run_on_fakes(device: torch.device, record_calls: Callable[..., list]) -> None:
    """Not one for each message: the time of a deep model would grow with the square."""
    runs = record_calls(_replace, 'record_traffic', lambda *_: 1)
    assert_like_pyg(Net(twice), on(device, (20, 50)), kernels=2, frames=1)
    assert len(runs) == 1


def test_copies(device: torch.device) -> None:
    conv = GraphConv(8, 8).double().to(device)
    x, edges, _ = graph_data(20, 50, device)
    ours = pyg_fast.accelerate(copy.deepcopy(conv))
    for model in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch._dynamo.reset()
        backend = Backend()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x, edges), conv(x, edges))
        assert backend.kernels == 1


# Layers that find loops, normalise, or make inputs of the edges, and an aggregation of PNA.
@pytest.mark.parametrize(
    'name',
    ['AGNNConv', 'ChebConv, K=3', 'FAConv', 'PNAConv, 4 aggregations, 3 scalers, 2 towers'],
)
def test_layers(name: str, device: torch.device) -> None:
    """Edges whose number depends on data raised an error."""
    case = _layers.BY_NAME[name]
    conv = case.make().to(device, case.dtype)
    calls = [_layers.arguments(case.args, device, case.dtype)]
    backend = assert_like_pyg(conv, calls)
    assert backend.kernels > 0
    assert backend.frames == (2 if name == 'FAConv' else 1)  # As many as PyG's.


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Takes the place of that of :func:`pyg_fast.compile`."""
    monkeypatch.setattr(pyg_fast._compile, 'backend', counting := Backend())
    return counting


@pairs(['name', 'listed', 'moved'], [*LAYERS], [True, False], [False, True])
def test_prepared_before(
    name: str, listed: bool, moved: bool, device: torch.device, backend: Backend
) -> None:
    """A prepared graph is not sorted again at each call, also if no eager call came before."""
    conv = LAYERS[name]().double().to(device)
    compiled = pyg_fast.compile(copy.deepcopy(conv), dynamic=True)
    for x, edges, edge in on(device):
        data = Data(edge_index=edges.cpu() if moved else edges, num_nodes=x.size(0))
        data = ToCSR(keep_edge_index=listed)(data).to(device)
        graph = data.edge_index.clone() if moved else data.edge_index
        features = [edge] * isinstance(conv, Own)
        compiled(x, graph, *features)
        assert not sorts_of(lambda: compiled(x, graph, *features).sum().backward())  # noqa: B023
        plain = graph.as_tensor() if listed else graph.to_edge_index().as_tensor()
        torch.testing.assert_close(compiled(x, graph, *features), conv(x, plain, *features))
    assert backend.frames > 0


@pytest.mark.parametrize('eager', [False, True], ids=['', 'eager before'])
@pytest.mark.parametrize('name', LAYERS)
def test_graphs_of_any_size(name: str, eager: bool, device: torch.device, backend: Backend) -> None:
    """Neither sizes nor numbers of self-loops are constants of compiled code."""
    theirs = LAYERS[name]().double().to(device)
    conv = pyg_fast.accelerate(copy.deepcopy(theirs))
    compiled = pyg_fast.compile(conv, dynamic=True, fullgraph=True)
    for k, size in enumerate([(20, 50), (33, 71), (47, 90)]):
        x, edges, edge = graph_data(*size, device)
        edges[:, : k + 1] = torch.arange(k + 1, device=device)  # self-loops
        data = Data(edge_index=edges, edge_attr=edge.detach(), num_nodes=x.size(0))
        data = ToCSR(keep_edge_index=False)(data)
        graph, edges = data.edge_index, data.edge_index.to_edge_index().as_tensor()
        features = [data.edge_attr.requires_grad_()] * isinstance(theirs, Own)
        if eager:
            conv(x, graph, *features).sum().backward()
        found, wanted = compiled(x, graph, *features), theirs(x, edges, *features)
        torch.testing.assert_close(found, wanted)
        leaves = [x, *features]
        grads = [torch.autograd.grad(each.square().sum(), leaves) for each in (found, wanted)]
        torch.testing.assert_close(*grads)
        if k == 0:
            frames = backend.frames
    assert backend.frames == frames > 0


def test_no_list_for_guards(device: torch.device, forbid: Callable[..., None]) -> None:
    """Compiled code makes no list of the edges of a prepared graph."""
    x, edges, edge = graph_data(20, 50, device)
    graph = PreparedGraph(Graph.from_edge_index(edges, 20, 20))
    backend = Backend()
    compiled = torch.compile(pyg_fast.accelerate(Own(gated).to(device)), backend=backend)
    forbid(PreparedGraph, '_data')
    for _ in range(2):
        compiled(x, graph, edge)
    assert backend.kernels > 0


def test_prepared_after_a_break(device: torch.device) -> None:
    """PyG's code reads a prepared graph after a graph break."""
    x, edges, _ = graph_data(20, 50, device)
    graph = PreparedGraph(Graph.from_edge_index(edges, 20, 20))
    found = torch.compile(remove_self_loops, backend='aot_eager', dynamic=True)(graph)[0]
    assert torch.equal(found.as_tensor(), remove_self_loops(graph.to_edge_index().as_tensor())[0])


@pytest.mark.parametrize('of_batch', [False, True], ids=['PreparedGraph', 'batch'])
def test_key_of_the_cache(of_batch: bool, device: torch.device) -> None:
    """PyTorch's cache on disk takes code for graphs of any size."""
    x, edges, edge = graph_data(20, 50, device)
    edges = edges[:, edges[1].argsort()]
    graph: Any = PreparedGraph(Graph.from_edge_index(edges, 20, 20))
    if of_batch:
        graph = BatchEdgeIndex.of(edges, graph.graph.rowptr.long())
    counters = torch._dynamo.utils.counters['aot_autograd']
    counters.clear()
    pyg_fast.compile(Own(lambda _, x_i, *__: x_i).to(device), dynamic=True)(x, graph, edge)
    assert counters['autograd_cache_bypass'] == 0
    assert counters['autograd_cache_saved'] + counters['autograd_cache_hit'] > 0


def test_a_graph_of_the_compiler_prints() -> None:
    """Torch 2.11 prints the inputs of what it compiles, whose numbers nobody knows."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True) as mode:
        graph = mode.from_tensor(EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 2)))
    before = EdgeIndex.__repr__
    with pyg_fast._compile._graphs_print_no_numbers():
        assert 'EdgeIndex' in repr(graph)
    assert not shapes.pending_fresh_unbacked_symbols
    assert EdgeIndex.__repr__ is before


def test_layers_one_by_one(device: torch.device) -> None:
    """Dynamo compiles a code object eight times: layers do not share one."""
    x, edges, _ = graph_data(20, 50, device)
    convs = [
        GraphConv(8, 8), TransformerConv(8, 8), ResGatedGraphConv(8, 8), LEConv(8, 8), LGConv(),
        GENConv(8, 8), FeaStConv(8, 8), AGNNConv(), ClusterGCNConv(8, 8),
    ]  # fmt: skip
    backend = CompileCounter()
    for conv in convs:
        layer = pyg_fast.accelerate(conv.double().to(device)).eval()
        torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)(x, edges)
    assert backend.frame_count == len(convs)


def test_weights_of_many_edges(device: torch.device, limits: Callable[..., None]) -> None:
    """Features are scaled before the sum, and those of self-loops are added to the result."""
    limits(numbers_scaled_first=0)
    x, edge_index, _ = graph_data(20, 60, device)
    weight = torch.rand(60, dtype=torch.float64, device=device)
    layer = GCNConv(8, 4).to(device, torch.float64)
    assert_like_pyg(layer, [[x, edge_index, weight]])


class Joins(MessagePassing):
    """A layer of a user's whose map fits inputs of 8 channels."""

    def __init__(self) -> None:
        super().__init__('add')
        self.lin = torch.nn.Linear(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], -1))


@pytest.mark.usefixtures('backend')
def test_errors(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """As in eager mode, also where Dynamo fails; a model goes on after them."""
    x, edges, _ = graph_data(20, 50, device)
    x = x.float()
    layers = (GCNConv(8, 4), "'x' must have 8 columns"), (Joins(), "'lin' must get 16")
    for layer, error in layers:
        model = pyg_fast.compile(layer.to(device), dynamic=True)
        for wrong in (x[:, :3], x[:, :5]):
            with pytest.raises(ValueError, match=error) as caught:
                model(wrong, edges)
            assert isinstance(caught.value.__cause__, torch._dynamo.exc.TorchRuntimeError)
        assert model(x, edges).shape == (20, 4)
        assert copy.deepcopy(model)(x, edges).shape == (20, 4)
    layer = pyg_fast.compile(GINEConv(torch.nn.Linear(8, 4), edge_dim=2).to(device))
    with pytest.raises(ValueError, match="'edge_attr' must be given to a layer with 'edge_dim'"):
        layer(x, edges)
    # PyG's assertion has no text.
    layer = pyg_fast.compile(TransformerConv(8, 4, edge_dim=5).to(device))
    with pytest.raises(ValueError, match="'edge_attr' must be given to a layer with 'edge_dim'"):
        layer(x, edges)
    # Torch logs what it has tried.
    assert not [each for each in caplog.records if each.name == 'torch._subclasses.fake_tensor']


def test_dynamo_does_not_warn_of_own_caches() -> None:
    text = (
        "Dynamo detected a call to a `functools.lru_cache`-wrapped function at 'a.py:1'.\n{}/a.py"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        pyg_fast.compile(SAGEConv(8, 4))
        for folder in ('site-packages/pyg_fast/message', 'home/mine'):
            warnings.warn(text.format(folder), stacklevel=1)
    told = [str(each.message) for each in caught if 'lru_cache' in str(each.message)]
    assert told == [text.format('home/mine')]


def test_errors_that_eager_mode_does_not_have(device: torch.device) -> None:
    """The model does not run again for them."""
    x, edges, _ = graph_data(20, 50, device)
    runs = []

    class Breaks(torch.nn.Module):
        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            runs.append(x)
            torch._dynamo.graph_break()
            return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        pyg_fast.compile(Breaks(), fullgraph=True)(x, edges)
    assert runs == []
