"""Layers and small models in training: pyg_fast beside PyG, eager and compiled, and cuSPARSE.

python -m benchmarks layers                     everything below, all layers, planted graphs
python -m benchmarks layers --quick             a minute or less
python -m benchmarks layers --parts steps       forward and backward of one layer
python -m benchmarks layers --parts forward     inference of one layer
python -m benchmarks layers --parts fresh       a step on a new graph each time
python -m benchmarks layers --parts model       the models of the GCN and GAT papers on Cora
python -m benchmarks layers --parts launches    CUDA kernels that a step launches

PyG takes the graph as edge_index, as a torch CSR tensor and as a SparseTensor. torch.compile runs
in its default mode and in the mode reduce-overhead.
"""
import contextlib
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv

import pyg_fast
import pyg_fast.nn as fast
from pyg_fast.datasets import SIZES, planted_structure

from . import _cusparse, _graphs, _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option, finite, repeated, worst
from .gat import DROPOUT, pyg_fits
from .spmm import FORWARD, STEP

PREPARED, PLAIN = 'ours, prepared', 'ours, edge_index'
OURS_COMPILED, OURS_CAPTURED = 'ours, torch.compile', 'ours, CUDA graph'  # on a prepared graph
PLAIN_CAPTURED = 'ours, edge_index, CUDA graph'  # the list may change between replays
OURS = (PREPARED, PLAIN, OURS_COMPILED, OURS_CAPTURED, PLAIN_CAPTURED)
PYG, COMPILED, REDUCED = 'PyG', 'PyG, torch.compile', 'PyG, torch.compile reduce-overhead'
CSR, SPARSE_TENSOR = 'PyG torch CSR', 'PyG SparseTensor'
CACHED = [f'{name} cached' for name in (PYG, CSR, SPARSE_TENSOR)]  # with normalized weights
CUSPARSE = [f'cuSPARSE {name}' for name in _cusparse.ALGORITHMS]
RIVALS = [PYG, COMPILED, REDUCED]
LAYERS = (PREPARED, PLAIN, PYG)
TITLE = 'One layer, forward + backward'
GRAPHS = {'quick': ('small',), 'cuda': ('arxiv-like', 'reddit-like'), 'cpu': ('Computers',)}
REAL = ('Cora', 'CiteSeer', 'PubMed')  # with features
_SMALL = 1_000_000  # edges of a graph whose steps are timed many at once
NEW_GRAPHS = 4  # take turns
_NEW_EDGES = 1 << 23  # at most
_LOSSES, _LOSS_TOLERANCE = 3, 3e-5
_ROW_TOLERANCE = 1e-4  # of the largest entry of a row, for float32
_CANCELLED = 1e-2  # of the largest norm: smaller gradients are rounding errors


class Kind(NamedTuple):
    """A layer of PyG and the layer of pyg_fast with the same arguments.

    ``heads``: of attention; ``matrix``: whether PyG's layer takes sparse matrices; ``tolerance``:
    allowed error of a gradient's norm (``None``: gradients are not compared).
    """

    pyg: type[nn.Module]
    ours: type[nn.Module]
    heads: int = 0
    options: dict[str, Any] = {}
    matrix: bool = False
    tolerance: float | None = 3e-4

    def conv(self, name: str, in_channels: int, width: int, **options: Any) -> nn.Module:
        """The layer of a contender."""
        cls = self.ours if name in OURS else self.pyg
        if name in CUSPARSE:
            cls = ProductGCNConv
        options = {**self.options, **options}
        if name in CACHED:
            options['cached'] = True
        if self.pyg is GINConv:
            return cls(nn.Linear(in_channels, width), **options)
        if self.heads:
            return cls(in_channels, width // self.heads, heads=self.heads, **options)
        return cls(in_channels, width, **options)

    def contenders(self, cuda: bool) -> list[str]:
        found = [PREPARED, PLAIN, OURS_COMPILED]
        found += [*[OURS_CAPTURED, PLAIN_CAPTURED] * cuda, *RIVALS]
        if self.matrix:
            found += [CSR] + [SPARSE_TENSOR] * bool(importlib.util.find_spec('torch_sparse'))
        if self.pyg is GCNConv:
            found += [name for name in CACHED if name.removesuffix(' cached') in found]
            found += CUSPARSE * cuda
        return found


# Rounding decides on which side of the kink of a leaky ReLU the scores nearest to zero are.
KINK = 1e-3

KINDS = {
    'GCN': Kind(GCNConv, fast.PathPreparedGCNConv, matrix=True),
    'SAGE mean': Kind(SAGEConv, fast.PathPreparedSAGEConv, matrix=True),
    # PyG divides the gradient of equal maxima, pyg_fast gives it to one of them.
    'SAGE max': Kind(
        SAGEConv, fast.PathPreparedSAGEConv, options={'aggr': 'max'}, tolerance=None),
    'GIN': Kind(GINConv, fast.PathPreparedGINConv, matrix=True),
    'GAT 8 heads': Kind(GATConv, fast.FusedGATConv, 8, tolerance=KINK),
    'GAT 1 head': Kind(GATConv, fast.FusedGATConv, 1, tolerance=KINK),
    'GATv2 8 heads': Kind(GATv2Conv, fast.FusedGATv2Conv, 8, tolerance=KINK),
    'GATv2 1 head': Kind(GATv2Conv, fast.FusedGATv2Conv, 1, tolerance=KINK),
}


# Inputs -----------------------------------------------------------------------------------------

def product(
    rowptr: Tensor, col: Tensor, value: Tensor, like: Tensor, algorithm: str,
) -> Callable[[Tensor], Tensor]:
    """The product of a matrix by cuSPARSE, as a function of features with the shape of ``like``."""
    given = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    prepared = _cusparse.SpMM(rowptr, col, value, given, algorithm, preprocess=True)

    def run(x: Tensor) -> Tensor:
        given.copy_(x)
        return prepared().detach()

    return run


class Summed(torch.autograd.Function):
    """A sum over a graph whose gradient is a sum over its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad), None, None


class ProductGCNConv(GCNConv):
    """A GCN layer with sums by cuSPARSE, over a graph with loops; prepared at the first call."""

    pair: tuple[Callable[[Tensor], Tensor], ...] = ()

    def forward(self, x: Tensor, given: tuple[Graph, str]) -> Tensor:
        hidden = self.lin(x)
        if not self.pair:
            graph, algorithm = given
            scale = graph.degree.to(x.dtype).rsqrt()
            value = scale[graph.row] * scale[graph.col.long()]
            rowptr, col, perm = graph.transpose
            self.pair = (product(graph.rowptr, graph.col, value, hidden, algorithm),
                         product(rowptr, col, value[perm], hidden, algorithm))
        return Summed.apply(hidden, *self.pair) + self.bias


class Inputs:
    """A graph without loops, in the forms that the contenders take, each made once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._made: dict[str, Any] = {}

    def of(self, name: str) -> Any:
        name = name.removesuffix(' cached')
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Any:
        graph = self.graph
        if name in OURS and name not in (PLAIN, PLAIN_CAPTURED):
            return graph.prepared
        if name == CSR:
            value = torch.ones(graph.num_edges, device=graph.col.device)
            return graph.matrix(value, dtype=torch.long)
        if name == SPARSE_TENSOR:
            return graph.sparse_tensor()
        if name in CUSPARSE:
            loops = torch.arange(graph.num_nodes, device=graph.col.device).expand(2, -1)
            looped = _graphs.from_edge_index(
                graph.name, torch.cat([graph.edge_index, loops], 1), graph.num_nodes)
            return looped, name.split()[-1]
        return graph.edge_index


def step_error(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float | None,
) -> float:
    """The largest error of a result, row by row, and of the norms of its gradients."""
    if tolerance is None:
        outputs, expected = outputs[:1], expected[:1]
    if [out.shape for out in outputs] != [right.shape for right in expected]:
        return math.inf
    out, right = outputs[0], expected[0]
    largest = right.abs().amax(-1, keepdim=True).clamp_(min=1e-30)
    norms = [float(grad.norm()) for grad in expected[1:]]
    least = _CANCELLED * max(norms, default=0.0)
    return worst([
        float(((out.double() - right).abs_() / largest).max()) / _ROW_TOLERANCE,
        *(float((out.double() - right).norm()) / ((tolerance or 1) * max(norm, least))
          for out, right, norm in zip(outputs[1:], expected[1:], norms, strict=True))])


# Layers -----------------------------------------------------------------------------------------

def compiled(name: str, conv: nn.Module) -> nn.Module:
    """The layer, compiled if the name of its contender says so."""
    if name not in (COMPILED, REDUCED, OURS_COMPILED):
        return conv
    torch._dynamo.config.recompile_limit = 1000  # every layer is compiled anew
    made: Any = torch.compile(conv, mode='reduce-overhead' if name == REDUCED else None)
    return made


def steps(
    conv: nn.Module, given: Sequence[tuple[Any, ...]], leaves: Sequence[Tensor], grad: Tensor,
    mode: str = STEP,
) -> Callable[[], tuple[Tensor, ...]]:
    """Calls of a layer, one for each of some inputs; the last gives the output and the gradients
    of the leaves."""
    def step() -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = ()
        with torch.set_grad_enabled(mode == STEP):
            for inputs in given:
                out = conv(*inputs)
                if mode == STEP:
                    grads = torch.autograd.grad(out, leaves, grad)
        return out.detach(), *grads

    return step


def warm(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step, after it has been compiled and captured."""
    for _ in range(3):
        step()
    return step


def captured(step: Callable[[], tuple[Tensor, ...]]) -> Callable[[], tuple[Tensor, ...]]:
    """The step as a CUDA graph, whose results the next call overwrites."""
    with torch.cuda.stream(torch.cuda.Stream()):
        warm(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    def replay(read: Callable[[], Any]) -> tuple[Tensor, ...]:
        graph.replay()
        return outputs

    return functools.partial(replay, step)  # The graph reads the step's tensors.


class Case:
    """A layer on a graph: its input, its parameters, and steps of all contenders."""

    def __init__(
        self, kind: Kind, graph: Graph, width: int, in_channels: int | None = None,
    ) -> None:
        normal = graph.normal()
        self.kind, self.inputs, self.sizes = kind, Inputs(graph), (in_channels or width, width)
        self.x, self.grad = (normal(graph.num_nodes, size) for size in self.sizes)
        torch.manual_seed(0)  # The same scores of attention near the kink in each run.
        self.state = kind.conv(PYG, *self.sizes).to(self.x.device).state_dict()
        if 'bias' in self.state:
            self.state['bias'] = normal(self.state['bias'].shape)

    def step(
        self, name: str, graphs: Sequence[Tensor] = (), dtype: torch.dtype = torch.float32,
        mode: str = STEP,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Steps, one on each graph; the last of them gives the output and all gradients."""
        conv = self.kind.conv(name, *self.sizes).to(self.x.device)
        conv.load_state_dict(self.state)
        conv.to(dtype)
        x, grad = self.x.detach().to(dtype).requires_grad_(mode == STEP), self.grad.to(dtype)
        leaves, given = [x, *conv.parameters()], graphs or [self.inputs.of(name)]
        run = compiled(name, conv)
        step = steps(run, [(x, graph) for graph in given], leaves, grad, mode)
        if name in (OURS_CAPTURED, PLAIN_CAPTURED):
            return captured(step)
        return warm(step) if run is not conv else step

    @property
    def by_pyg(self) -> bool:
        graph = self.inputs.graph
        return pyg_fits((graph.num_edges + graph.num_nodes) * self.grad.size(1), self.x.device)

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PYG if self.by_pyg else PREPARED, dtype=torch.double)()

    def check(self, outputs: Sequence[Tensor]) -> float:
        return step_error(outputs, self.expected[:len(outputs)], self.kind.tolerance)

    def contender(self, name: str, **options: Any) -> Contender:
        return Contender(name, functools.partial(self.step, name, **options),
                         name in OURS, self.check, len(options.get('graphs', [0])))


def run_layers(bench: Bench, graph: Graph, mode: str) -> None:
    graph = graph.without_loops()
    bench.report.graphs[graph.name] = graph.summary()
    for name, width in itertools.product(bench.args.layers, bench.args.widths):
        case = Case(KINDS[name], graph, width, bench.args.in_channels)
        bench.measure(
            TITLE if mode == STEP else f'One layer, {mode}', f'{graph.name}: {name}', width,
            [case.contender(which, mode=mode) for which in case.kind.contenders(bench.cuda)],
            label='channels', memory=True, pairs=[
                (PLAIN, PYG), (OURS_COMPILED, COMPILED),
                *[(each, REDUCED) for each in (OURS_CAPTURED, PLAIN_CAPTURED) if bench.cuda]])


def run_fresh(bench: Bench, name: str, width: int) -> None:
    sizes = {size: SIZES[size] for size in bench.args.graphs
             if size in SIZES and 2 * SIZES[size].num_pairs <= _NEW_EDGES}
    for called, size in {**sizes, 'Cora-sized': _graphs.PLANTED['Cora-sized']}.items():
        graphs = [Graph('', *planted_structure(size, seed, bench.device)).without_loops()
                  for seed in range(NEW_GRAPHS)]
        lists = [graph.edge_index[:, torch.randperm(graph.num_edges, device=bench.device)]
                 for graph in graphs]
        case = Case(KINDS[name], graphs[-1], width, bench.args.in_channels)
        given = {
            PREPARED: [case.inputs.of(PREPARED)] * NEW_GRAPHS, PLAIN: lists, PYG: lists}
        bench.measure(
            f'A new graph at each step, {STEP}', f'{called}: {name}', width,
            [case.contender(which, graphs=taken) for which, taken in given.items()],
            label='channels', ours=PLAIN, pairs=[(PREPARED, PLAIN)])


# Models -----------------------------------------------------------------------------------------

class Net(nn.Module):
    """Two layers: the models of the papers of GCN and GAT."""

    def __init__(self, kind: Kind, name: str, sizes: tuple[int, int, int], dropout: float) -> None:
        super().__init__()
        num_features, hidden, num_classes = sizes
        self.dropout, self.activation = dropout, F.elu if kind.heads else F.relu
        options: dict[str, Any] = {'dropout': dropout} if kind.heads else {}
        self.conv1 = kind.conv(name, num_features, hidden, **options)
        if kind.heads:
            kind, options = kind._replace(heads=1), {**options, 'concat': False}
        self.conv2 = kind.conv(name, hidden, num_classes, **options)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = self.activation(self.conv1(x, graph))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, graph)


class Task:
    """Two layers in training on one graph without loops, with Adam; by default with the hidden
    channels of the papers, 16 of GCN and 64 of GAT.
    """

    def __init__(self, kind: Kind, graph: Graph, data: Data, hidden: int | None = None) -> None:
        self.kind, self.graph, self.inputs, self.x = kind, graph, Inputs(graph), data.x
        self.hidden = hidden or (64 if kind.heads else 16)
        self.lr, self.dropout = (0.005, DROPOUT) if kind.heads else (0.01, 0.5)
        self.train = data.train_mask.nonzero().view(-1)  # a mask would synchronize at every step
        self.y, self.target = data.y, data.y[self.train]
        self.sizes = data.x.size(1), self.hidden, int(data.y.max()) + 1
        self.grad = graph.normal()(graph.num_nodes, self.sizes[2])
        torch.manual_seed(1)
        self.state = self.net(PYG).state_dict()

    def net(self, name: str) -> Net:
        return Net(self.kind, name, self.sizes, self.dropout).to(self.x.device)

    def _loaded(self, name: str, dtype: torch.dtype) -> tuple[Net, Tensor, Any]:
        net, graph = self.net(name), self.inputs.of(name)
        net.load_state_dict(self.state)
        return net.to(dtype), self.x.to(dtype), graph.to(dtype) if name == CSR else graph

    def layers(
        self, name: str, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A step without dropout and optimizer."""
        net, x, graph = self._loaded(name, dtype)
        net.eval()
        return _harness.with_gradients(
            lambda: net(x, graph), list(net.parameters()), self.grad.to(dtype))

    def training(
        self, name: str, captured: bool = False, fresh: bool = False,
        training: bool = True, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], Tensor]:
        """A step of training, which returns the loss; ``fresh``: on a new list of edges."""
        net, x, graph = self._loaded(name, dtype)
        net.train(training)
        lr = torch.tensor(self.lr, device=x.device) if captured else self.lr
        optimizer = torch.optim.Adam(
            net.parameters(), lr=lr, weight_decay=5e-4, capturable=captured)
        if captured:
            data = Data(x=x, edge_index=graph, y=self.y, train_mask=self.train)
            captured_step = pyg_fast.capture(net, data, optimizer, F.cross_entropy)
            for _ in range(4):  # The last one captures it.
                captured_step()
            return captured_step

        def loss() -> Tensor:
            out = net(x, graph.view_as(graph) if fresh else graph)
            return F.cross_entropy(out.index_select(0, self.train), self.target)

        return _harness.descent(optimizer, loss)

    @functools.cached_property
    def reference(self) -> str:
        """The reference in float64: PyG's layers, for GCN on a matrix, or ours if they do not fit.
        """
        fits = pyg_fits(self.hidden * self.graph.num_edges, self.x.device)
        return CSR if self.kind.pyg is GCNConv else PYG if fits else PREPARED

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.layers(self.reference, dtype=torch.double)()

    @functools.cached_property
    def expected_losses(self) -> Tensor:
        step = self.training(self.reference, training=False, dtype=torch.double)
        return torch.stack([step() for _ in range(_LOSSES)])

    def check(self, outputs: Sequence[Tensor]) -> float:
        return step_error(outputs, self.expected, self.kind.tolerance)

    def error(self, name: str, fresh: bool = False) -> float:
        """The error of the first losses without dropout."""
        step = self.training(name, fresh=fresh, training=False)
        losses = torch.stack([step() for _ in range(_LOSSES)])
        return float(
            ((losses - self.expected_losses) / self.expected_losses).abs().max()) / _LOSS_TOLERANCE

    def contender(self, name: str, calls: int = 1, **options: Any) -> Contender:
        """Training steps."""
        def check(loss: Tensor) -> float:
            return max(finite(loss), self.error(name, options.get('fresh', False)))

        return Contender(
            name, lambda: repeated(self.training(name, **options), calls),
            name in (PREPARED, PLAIN), check, calls)

    def layers_contender(self, name: str, calls: int) -> Contender:
        return Contender(
            name, lambda: repeated(self.layers(name), calls),
            name in (PREPARED, PLAIN), self.check, calls)


def data_of(graph: Graph) -> Data:
    """Features and classes of a real graph; random ones in the size of Reddit of others."""
    device = graph.col.device
    if graph.name in REAL:
        return _graphs.dataset(graph.name).to(device)
    generator = torch.Generator(device=device).manual_seed(1)
    return Data(
        x=torch.randn(graph.num_nodes, 602, generator=generator, device=device),
        y=torch.arange(graph.num_nodes, device=device) % 41,
        train_mask=torch.rand(graph.num_nodes, generator=generator, device=device) < 0.66)


def run_model(bench: Bench, kind: Kind, graph: Graph) -> None:
    small = graph.num_edges <= _SMALL
    task = Task(kind, graph.without_loops(), data_of(graph), None if small else 128)
    calls = 1 if not (bench.cuda and small) else 10 if bench.quick else 50
    gcn = kind.pyg is GCNConv
    names = [name for name in (*LAYERS, *CACHED, *CUSPARSE) if name in LAYERS or (
        gcn and name in kind.contenders(bench.cuda))]
    steps = [
        ('two layers forward + backward', [task.layers_contender(each, calls) for each in names]),
        ('whole training step', [task.contender(each, calls) for each in names]),
        ('whole training step on a new list of edges', [
            task.contender(each, calls, fresh=True) for each in (PLAIN, PYG)]),
    ]
    if bench.cuda:
        # What sorts or normalizes an edge_index synchronizes, which no capture allows.
        captured = [PREPARED, *CACHED[:gcn]]
        steps.append(('whole training step by pyg_fast.capture', [
            *(task.contender(each, calls, captured=True) for each in captured),
            task.contender(PYG, calls)]))
    for what, made in steps:
        pair = {PLAIN, PREPARED} <= {each.name for each in made}
        bench.measure(
            f'{graph.name}, {kind.pyg.__name__}, the {what}', graph.name, task.hidden, made,
            label='hidden', memory=True, pairs=[(PLAIN, PYG)] * pair)


# Launches ---------------------------------------------------------------------------------------

def on_device(run: Callable[[], Any]) -> list[Any]:
    """What a call starts on the GPU, by torch's profiler: kernels and copies."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return [event for event in recorded.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation]


def launches(run: Callable[[], Any]) -> int:
    """How many kernels a call launches."""
    count = sum(not event.name.startswith(('Memcpy', 'Memset')) for event in on_device(run))
    if count == 0:
        raise RuntimeError("torch's profiler has seen no kernel")
    return count


def run_launches(bench: Bench, kinds: Sequence[str], graphs: Sequence[str]) -> None:
    """Runs last: the profiler might slow down later launches."""
    def count(step: str, width: int, make: Callable[[str], Callable[[], Any]]) -> None:
        found: dict[str, int | None] = dict.fromkeys(LAYERS)
        for name in LAYERS:
            with contextlib.suppress(*[torch.cuda.OutOfMemoryError] * (name == PYG)):
                found[name] = launches(make(name))
            torch.cuda.empty_cache()
        ratios = {f'{PYG} / {name}': theirs / ours if ours and theirs else None
                  for name in LAYERS[:2] for ours, theirs in [(found[name], found[PYG])]}
        bench.add('Kernel launches of a step', step, width, {}, facts=found | ratios)

    for graph, name in itertools.product(bench.graphs(bench.args.model_graphs), kinds):
        task = Task(KINDS[name], graph.without_loops(), data_of(graph))
        count(f'{graph.name}: {name}, the two layers', task.hidden, task.layers)
        count(f'{graph.name}: {name}, the whole training step', task.hidden, task.training)
    for graph, name in ((graph, name) for graph in bench.graphs(graphs) for name in kinds):
        case = Case(KINDS[name], graph.without_loops(), bench.args.widths[0])
        count(f'{graph.name}: {name}', bench.args.widths[0], case.step)


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'layers', __doc__, argv, parts=('steps', 'forward', 'fresh', 'model', 'launches'),
        graphs=GRAPHS, layers=_harness.names('layer', tuple(KINDS), tuple(KINDS)),
        widths=Option((64,), _harness.integers, 'channels of the output'),
        model_graphs=_harness.names(
            'graph', _graphs.NAMES, {'quick': ('Cora-sized',), 'usual': ('Cora',)}),
        in_channels=Option(help='channels of the input, if others than of the output'), notes=[
            'Wall time of a step to the end of its work, with launches and Python; float32. '
            'Gradients of input and parameters. PyG takes an edge_index unless its name says '
            'otherwise; cached: with the normalized weights of GCN. Compilation is not counted. '
            'Graphs are without self-loops. Compared with the layer in float64: that of PyG, or '
            'where it does not fit into memory ours. Ours in torch.compile and as a CUDA graph, '
            'which replays a step with its launches recorded, run on prepared graphs.',
            f'A new graph at each step: {NEW_GRAPHS} graphs of one size take turns, their edges '
            f'are not sorted; "{PREPARED}": one of them all the time.'])
    args = bench.args
    bench.run_parts({
        'steps': functools.partial(run_layers, mode=STEP),
        'forward': functools.partial(run_layers, mode=FORWARD)})
    if bench.has('fresh'):
        for name in args.layers:
            run_fresh(bench, name, args.widths[0])
    kinds = [name for name in args.layers if name in ('GCN', 'GAT 8 heads', 'GATv2 8 heads')]
    if bench.has('model'):
        for graph in bench.graphs(args.model_graphs):
            for name in kinds:
                run_model(bench, KINDS[name], graph)
    if bench.has('launches') and bench.cuda:
        run_launches(bench, kinds, args.graphs)
    bench.finish()


if __name__ == '__main__':
    main()
