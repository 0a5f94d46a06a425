"""fuseGNN (ICCAD 2020), rerun."""
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_fast import ops
from pyg_fast.nn import FusedGATConv, PathPreparedGCNConv
from pyg_fast.ops.aggregate import sorting_pays

from .. import _cusparse, _graphs, _harness, aggregate, gat, gcn
from .._graphs import Graph
from .._harness import Contender, Result, Settings
from ._exhibit import Exhibit, Figure, Maker, Paper, Run, fastest, ratio

sys.path.append(str(_harness.ROOT / 'examples'))  # scripts, which import each other by name
import gat as gat_example

REAL = ('Cora', 'CiteSeer', 'PubMed')
FEATURES, CLASSES, TRAINING = 602, 41, 0.66  # of Reddit, and of all generated graphs
QUICK_FEATURES = 32
HIDDEN, REDDIT_HIDDEN = {'GCN': 16, 'GAT': 64}, 128
LR = {'GCN': 0.01, 'GAT': 0.005}
WEIGHT_DECAY = 5e-4
CUSPARSE = [f'cuSPARSE {name}' for name in _cusparse.ALGORITHMS]
OURS, FRESH = gat.PREPARED, gat.PLAIN
PYG = {
    'GCN': (gcn.EDGE_INDEX_CACHED, gcn.CSR_CACHED, gcn.SPARSE_TENSOR_CACHED),
    'GAT': (gat.PYG,)}
FRESH_PYG = {'GCN': gcn.EDGE_INDEX, 'GAT': gat.PYG}
NORM = "PyG's gcn_norm"

CHECKED, TOLERANCE = 3, 3e-5  # steps without dropout, and how far their losses may be off
SMALL, CALLS = 1_000_000, 10  # up to so many edges so many steps are timed at once, on CUDA
REPEATS, LARGE_REPEATS = 10, 5  # at most
MESSAGES = {'cuda': 1 << 40, 'cpu': 1 << 28}  # bytes above which PyG is not asked for them
COMPOSED_GIB = {'cuda': 40.0, 'cpu': 0.25}
EPOCHS, RUNS, QUICK_EPOCHS, QUICK_RUNS = 200, 2, 10, 1


def small(run: Run) -> Iterator[Graph]:
    """The citation graphs of the paper."""
    if run.quick:
        yield run.like('Cora')
    else:
        yield from run.real(REAL)


def graphs(run: Run) -> Iterator[Graph]:
    """Those of the paper; Reddit's size is drawn."""
    yield from small(run)
    yield run.like('Reddit')


def few(run: Run, graph: Graph) -> Settings:
    """Settings for steps, fewer of them where they take long."""
    most = REPEATS if graph.num_edges <= SMALL else LARGE_REPEATS
    return dataclasses.replace(run.wall, repeats=min(most, run.wall.repeats))


# Kernels ----------------------------------------------------------------------------------------

def attention(run: Run) -> None:
    exhibit = run.exhibit(
        'Attention: scores, softmax and aggregation in one kernel each way', width='H C',
        shows='The paper fuses what GAT does on edges, in the forward and in the backward pass, '
        'instead of a chain of small kernels that store numbers, or messages, for every edge.',
        differs='Beside it the same chain by operations of PyG. Launches hidden on a GPU; dropout '
        f'{gat.DROPOUT} where said.')
    for graph in graphs(run):
        configs = ((8, 8),) if run.quick else ((8, 8), (1, 64))
        for heads, channels in configs:
            case = gat.GATCase(graph, torch.float32, heads, channels)
            found: dict[str, Result] = {}
            for mode in (gat.FORWARD, gat.BACKWARD):
                contenders = gat.kernel_contenders(
                    case, mode, COMPOSED_GIB[run.device.type])
                found.update({
                    f'{mode}, {name}': result
                    for name, result in _harness.measure(contenders, run.kernel).items()})
            forward, backward = gat.FORWARD, gat.BACKWARD
            here = {
                'forward, ms': fastest(found, f'{forward}, {gat.TRAINING}'),
                'forward with dropout, ms': fastest(found, f'{forward}, {gat.DROPPED}'),
                'backward, ms': fastest(found, f'{backward}, {gat.OURS}'),
                'backward with dropout, ms': fastest(found, f'{backward}, {gat.OURS_DROPPED}'),
                'PyG ops forward, ms': note(found, f'{forward}, {gat.COMPOSED}'),
                'PyG ops backward, ms': note(found, f'{backward}, {gat.COMPOSED}')}
            exhibit.line(
                f'{graph.name}, {heads} x {channels}', heads * channels, results=found, here={
                    **here,
                    'forward, speed-up': ratio(here['PyG ops forward, ms'], here['forward, ms']),
                    'backward, speed-up': ratio(
                        here['PyG ops backward, ms'], here['backward, ms'])})
            del case


def note(results: Mapping[str, Result], *names: str) -> Figure:
    """The least median, or why there is none."""
    time = fastest(results, *names)
    if not isinstance(time, str):
        return time
    return next((results[name].text() for name in names if name in results), time)


def abstractions(run: Run) -> None:
    exhibit = run.exhibit(
        'Aggregation: gather-apply-scatter and gather-apply-reduce', width='F',
        shows='The paper has two forms of one aggregation with edge weights and chooses by the '
        'average degree: to scatter takes edges in any order, to reduce needs them by rows and '
        'adds without atomics.',
        differs='A step with the gradients of features and weights over edges that nobody '
        'prepared: reducing sorts them at every step, which is counted. "chosen" is what '
        'mode="auto" takes, by the number of additions. PyG: gather, multiply, scatter, where its '
        'messages fit.')
    widths = (16,) if run.quick else (16, 128)
    for graph in graphs(run):
        order = torch.randperm(graph.num_edges, device=run.device)
        edge_index = graph.edge_index[:, order].contiguous()
        for width in widths:
            case = aggregate.Case(edge_index, graph.num_nodes, width)
            results = _harness.measure(case.contenders(), few(run, graph))
            chosen = sorting_pays(graph.num_edges, width, edge_index.is_cuda)
            auto = fastest(results, aggregate.AUTO)
            pyg = fastest(results, aggregate.PYG)
            exhibit.line(graph.name, width, results=results, here={
                'mean degree': graph.num_edges / graph.num_nodes,
                'scatter, ms': fastest(results, aggregate.SCATTER),
                'reduce, ms': fastest(results, aggregate.REDUCE),
                'chosen': aggregate.REDUCE if chosen else aggregate.SCATTER,
                'PyG, ms': pyg, 'speed-up': ratio(pyg, auto)})
            del case


# Training ---------------------------------------------------------------------------------------

class Products(NamedTuple):
    """Sums over a graph and its transpose, with the weights of GCN.

    Args:
        graph: With a loop at every node.
        algorithm: Of cuSPARSE; :obj:`None`: torch.sparse, in the type of what is summed.
    """

    graph: Graph
    algorithm: str | None = None

    def pair(self, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The sums of the forward and of the backward pass for such features."""
        graph = self.graph
        scale = graph.degree.to(x.dtype).rsqrt()
        value = scale[graph.row] * scale[graph.col.long()]
        if self.algorithm is None:
            there, back = (graph.matrix(value, transposed) for transposed in (False, True))
            return functools.partial(torch.sparse.mm, there), functools.partial(
                torch.sparse.mm, back)
        rowptr, col, perm = graph.transpose
        return (self._bound(graph.rowptr, graph.col, value, x),
                self._bound(rowptr, col, value[perm], x))

    def _bound(
        self, rowptr: Tensor, col: Tensor, value: Tensor, like: Tensor,
    ) -> Callable[[Tensor], Tensor]:
        assert self.algorithm is not None
        given = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        product = _cusparse.SpMM(rowptr, col, value, given, self.algorithm, preprocess=True)

        def run(x: Tensor) -> Tensor:
            given.copy_(x)
            return product().detach()

        return run


class Summed(torch.autograd.Function):
    """A sum over a graph whose gradient is one over its transpose."""

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
    """A GCN layer on :class:`Products`, made at its first call."""

    pair: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None

    def forward(self, x: Tensor, products: Products) -> Tensor:
        hidden = self.lin(x)
        if self.pair is None:
            self.pair = products.pair(hidden.detach())
        return Summed.apply(hidden, *self.pair) + self.bias


class Task:
    """Two layers in training by the recipes of the authors' code, on one graph.

    Args:
        graph: Without loops.
        model: ``'GCN'`` or ``'GAT'``.
        num_features: Of a generated graph.
    """

    def __init__(self, graph: Graph, model: str, num_features: int = FEATURES) -> None:
        device = graph.col.device
        self.graph, self.model = graph, model
        self.is_large = graph.name.startswith('Reddit')
        if graph.name not in REAL:
            generator = torch.Generator(device=device).manual_seed(1)
            self.x = torch.randn(
                graph.num_nodes, num_features, generator=generator, device=device)
            y = torch.arange(graph.num_nodes, device=device) % CLASSES
            mask = torch.rand(
                graph.num_nodes, generator=generator, device=device) < TRAINING
            self.num_classes = CLASSES
        else:
            data = _graphs.dataset(graph.name).to(device)
            self.x, y, mask = data.x, data.y, data.train_mask
            self.num_classes = int(y.max()) + 1
        self.train = mask.nonzero().view(-1)  # a mask would synchronise at every step
        self.target = y[self.train]
        self.hidden = REDDIT_HIDDEN if self.is_large else HIDDEN[model]
        self.calls = CALLS if device.type == 'cuda' and graph.num_edges <= SMALL else 1
        self.inputs: dict[str, Callable[[], Any]] = {
            **gcn.inputs(graph), gat.PYG: lambda: graph.edge_index,
            **{name: functools.partial(self.products, name.split()[-1]) for name in CUSPARSE}}
        torch.manual_seed(1)
        self.state = self.net(OURS).state_dict()

    @functools.cached_property
    def looped(self) -> Graph:
        loops = torch.arange(self.graph.num_nodes, device=self.x.device).expand(2, -1)
        return _graphs.from_edge_index(
            self.graph.name, torch.cat([self.graph.edge_index, loops], 1), self.graph.num_nodes)

    def products(self, algorithm: str | None = None) -> Products:
        return Products(self.looped, algorithm)

    @property
    def message_bytes(self) -> int:
        return 4 * self.hidden * self.graph.num_edges

    def net(self, name: str) -> nn.Module:
        ours = name in (OURS, FRESH)
        num_features = self.x.size(1)
        if self.model == 'GAT':
            heads = 1 if self.is_large else gat.HEADS
            return gat.Net(
                FusedGATConv if ours else GATConv, num_features, self.num_classes, gat.DROPOUT,
                heads, self.hidden // heads).to(self.x.device)
        cls = PathPreparedGCNConv if ours else GCNConv
        if name in CUSPARSE or name == 'float64':
            cls = ProductGCNConv
        net = gcn.Net(
            cls, num_features, name.endswith('cached'), self.hidden, self.num_classes)
        net.input_dropout = False
        return net.to(self.x.device)

    def step(
        self, name: str, fresh: bool = False, training: bool = True,
        given: Callable[[], Any] | None = None, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], Tensor]:
        """A step of training, which returns the loss.

        Args:
            name: Of the contender.
            fresh: Whether the list of edges is a new one every time.
            training: Whether there is dropout.
            given: What the graph is handed over as, if not what goes by the name.
            dtype: Of features and parameters.
        """
        net = self.net(name)
        net.load_state_dict(self.state)
        net.to(dtype).train(training)
        graph, x = (given or self.inputs[name])(), self.x.to(dtype)
        optimizer = torch.optim.Adam(
            net.parameters(), lr=LR[self.model], weight_decay=WEIGHT_DECAY)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            out = net(x, graph.view_as(graph) if fresh else graph)
            loss = F.cross_entropy(out.index_select(0, self.train), self.target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    @functools.cached_property
    def expected(self) -> Tensor:
        """The first losses without dropout, in float64: GCN's by torch.sparse, GAT's by PyG where
        its messages fit."""
        if self.model == 'GCN':
            step = self.step('float64', False, False, self.products, torch.double)
        else:
            fits = 2 * self.message_bytes <= gat._REFERENCE_BYTES[self.x.device.type]
            step = self.step(gat.PYG if fits else OURS, False, False, dtype=torch.double)
        return torch.stack([step() for _ in range(CHECKED)])

    def error(self, name: str, fresh: bool) -> float:
        step = self.step(name, fresh, training=False)
        losses = torch.stack([step() for _ in range(CHECKED)])
        return float(((losses - self.expected) / self.expected).abs().max()) / TOLERANCE

    def contenders(self, fresh: bool) -> list[Contender]:
        cuda = self.x.is_cuda
        if fresh:
            names = [FRESH, FRESH_PYG[self.model]]
        else:
            names = [OURS, *PYG[self.model]]
            names += CUSPARSE if self.model == 'GCN' and cuda else []
        stores = (gat.PYG, gcn.EDGE_INDEX, gcn.EDGE_INDEX_CACHED)  # messages
        fits = self.message_bytes <= MESSAGES['cuda' if cuda else 'cpu']
        return [
            Contender(
                name, functools.partial(self._timed, name, fresh), name in (OURS, FRESH),
                lambda loss, name=name: self._checked(loss, name, fresh), self.calls)
            for name in names if name in self.inputs and (fits or name not in stores)]

    def _timed(self, name: str, fresh: bool) -> Callable[[], Tensor]:
        return gcn.repeated(self.step(name, fresh), self.calls)

    def _checked(self, loss: Tensor, name: str, fresh: bool) -> float:
        return self.error(name, fresh) if bool(loss.isfinite()) else float('nan')


def megabytes(results: Mapping[str, Result], *names: str) -> Figure:
    """What the fastest of them takes at most, during a step."""
    timed = {name: time for name in names if name in results
             and (time := results[name].median_ms) is not None}
    if not timed:
        return '–'
    peak = results[min(timed, key=timed.__getitem__)].peak_bytes
    return '–' if peak is None else peak / 1e6


def task_of(run: Run, graph: Graph, model: str) -> Task:
    return Task(graph, model, QUICK_FEATURES if run.quick else FEATURES)


def timed(run: Run, task: Task, fresh: bool) -> dict[str, Result]:
    return _harness.measure(task.contenders(fresh), few(run, task.graph))


def task_line(exhibit: Exhibit, run: Run, task: Task, fresh: bool) -> None:
    results = timed(run, task, fresh)
    mine = FRESH if fresh else OURS
    theirs = (FRESH_PYG[task.model],) if fresh else PYG[task.model]
    ours = fastest(results, mine)
    here = {'ours, ms': ours, 'PyG, ms': note(results, *theirs)}
    if task.model == 'GCN' and not fresh:
        here['cuSPARSE, ms'] = note(results, *CUSPARSE)
    here['speed-up'] = ratio(here['PyG, ms'], ours)
    if 'cuSPARSE, ms' in here:
        here['over cuSPARSE'] = ratio(here['cuSPARSE, ms'], ours)
    here['ours, MB'], here['PyG, MB'] = megabytes(results, mine), megabytes(results, *theirs)
    how = 'inductive' if fresh else 'transductive'
    exhibit.line(
        f'{task.graph.name}, {task.model}, {how}', task.hidden, results=results, here=here)


def figure10(run: Run) -> None:
    exhibit = run.exhibit(
        'Figure 10: training, transductive and inductive', width='hidden',
        shows='The paper trains GCN and GAT on a graph that stays, prepared once, and on one that '
        'is new at each step, where its conversion counts; by its abstract it is up to 5.3 times '
        'as fast as other frameworks and takes orders of magnitude less memory on large graphs.',
        differs="Models, widths and optimizer are those of the authors' code, but that GAT has 8 x "
        '8 channels as in the paper of GAT (on Reddit one head, as there). Times of whole steps to '
        'their end. PyG: the fastest of its inputs that stays prepared; inductive: the list of '
        'edges. GCN on Reddit, transductive, has a table of its own.')
    for graph in graphs(run):
        graph = graph.without_loops()
        for model in ('GCN', 'GAT'):
            for fresh in (False, True):
                if model == 'GAT' or fresh or not graph.name.startswith('Reddit'):
                    task_line(exhibit, run, task_of(run, graph, model), fresh)
    ratios = [figure for line in exhibit.lines()
              if not isinstance(figure := line.here['speed-up'], str)]
    exhibit.line(
        'the largest', 0, paper={'speed-up': 'up to 5.3'},
        here={'speed-up': max(ratios)} if ratios else {})


def gcn_on_reddit(run: Run) -> None:
    exhibit = run.exhibit(
        'GCN on Reddit', width='hidden',
        shows="Here the paper is slower than DGL, whose sums over a graph are cuSPARSE's. DGL's "
        'own documentation (of version 0.5, GPU not named) has 28.6 s and 11.7 GB for 200 epochs '
        'of a GCN on Reddit, where PyG ran out of memory.',
        differs='DGL cannot be had here. In its place a GCN on cuSPARSE, each algorithm, with '
        'weights, transpose and preprocessing made once.')
    graph = run.like('Reddit').without_loops()
    task_line(exhibit, run, task_of(run, graph, 'GCN'), False)


# Accuracy ---------------------------------------------------------------------------------------

@dataclasses.dataclass
class Trained(Result):
    """Times of training steps, and the test accuracy of every run, in percent."""

    scores: list[float] = dataclasses.field(default_factory=list)


def accuracy(run: Run) -> None:
    epochs, runs = (QUICK_EPOCHS, QUICK_RUNS) if run.quick else (EPOCHS, RUNS)
    exhibit = run.exhibit(
        'Accuracy: GAT', width='epochs',
        shows="Fusing changes nothing but the order of sums; the authors' code tells the test "
        'accuracy of every epoch.',
        differs='The settings of the paper of GAT, by examples/gat.py, but for the number of '
        f'epochs; mean over {runs} seeds.')
    for name in ('planted',) if run.quick else REAL:
        line = ['--dataset', name, '--device', run.device.type, '--epochs', str(epochs),
                '--runs', str(runs)]
        try:
            if name == 'planted':
                outcomes = gat_example.compare(gat_example.parse(line))[1]
            else:
                with _graphs.copied('Planetoid', name) as root:
                    outcomes = gat_example.compare(
                        gat_example.parse([*line, '--root', str(root)]))[1]
        except _graphs.Missing as reason:
            run.report.left_out[name] = str(reason)
            continue
        pyg, ours = (outcomes[side] for side in ('PyG', 'pyg_fast'))
        means = {side: sum(outcome.accuracies) / runs for side, outcome in outcomes.items()}
        results: dict[str, Result] = {
            side: Trained(1e3 * outcome.epoch_seconds, count=sum(outcome.epochs),
                          scores=outcome.accuracies)
            for side, outcome in outcomes.items()}
        exhibit.line(name, epochs, results=results, here={
            'PyG, %': means['PyG'], 'ours, %': means['pyg_fast'],
            'difference, points': means['pyg_fast'] - means['PyG'],
            'ours, ms': 1e3 * ours.epoch_seconds, 'PyG, ms': 1e3 * pyg.epoch_seconds})


# Graph processing -------------------------------------------------------------------------------

def processing(run: Run) -> None:
    """Comes last, since the profiler might slow launches down from then on."""
    exhibit = run.exhibit(
        'Graph processing: normalised weights, and launches of steps', width='hidden',
        shows='The paper finds degrees, normalised weights and attention slow for the many small '
        'kernels that they launch, and fuses them.',
        differs='Normalised weights of GCN from a list of edges, and whole training steps on it, '
        'by wall time. Launches: kernels that the profiler sees on a GPU.')
    for graph in graphs(run):
        results = _harness.measure(norms(graph), run.wall)
        processing_line(exhibit, run, f'{graph.name}, weights of GCN', 0, results, {
            contender.name: contender.make for contender in norms(graph)})
    for graph in small(run):
        for model in ('GCN', 'GAT'):
            task = task_of(run, graph.without_loops(), model)
            results = timed(run, task, True)
            processing_line(
                exhibit, run, f'{graph.name}, {model}, a step', task.hidden, results, {
                    name: functools.partial(task.step, name, True) for name in results})


def norms(graph: Graph) -> list[Contender]:
    edge_index, num_nodes = graph.edge_index, graph.num_nodes

    def ours() -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: ops.gcn_norm(edge_index.view_as(edge_index), num_nodes=num_nodes)

    def theirs() -> Callable[[], tuple[Tensor, Tensor]]:
        return lambda: gcn_norm(edge_index, num_nodes=num_nodes)

    def check(output: tuple[Tensor, Tensor]) -> float:
        right = theirs()()
        if not torch.equal(output[0], right[0]):
            return float('inf')
        return float(((output[1] - right[1]).abs() / right[1]).max()) / 1e-5

    return [Contender(gcn.OURS, ours, True, check), Contender(NORM, theirs)]


def processing_line(
    exhibit: Exhibit, run: Run, name: str, width: int, results: dict[str, Result],
    make: Mapping[str, Callable[[], Callable[[], Any]]],
) -> None:
    mine, theirs = results
    here: dict[str, Figure] = {
        'ours, ms': fastest(results, mine), 'PyG, ms': note(results, theirs),
        'speed-up': ratio(fastest(results, theirs), fastest(results, mine))}
    if run.device.type == 'cuda':
        for which, head in ((mine, 'ours, launches'), (theirs, 'PyG, launches')):
            if results[which].median_ms is not None:
                here[head] = gat.launches(make[which]())
    exhibit.line(name, width, results=results, here=here)


PAPER = Paper(
    'gat', 'fuseGNN: Accelerating Graph Convolutional Neural Network Training on GPGPU',
    'ICCAD 2020, https://doi.org/10.1145/3400302.3415610', 'a GPU that its abstract does not name',
    [Maker('Attention', attention), Maker('Aggregation', abstractions),
     Maker('Figure 10', figure10), Maker('GCN on Reddit', gcn_on_reddit),
     Maker('Accuracy', accuracy), Maker('Graph processing', processing)],
    {"DGL and the authors' kernels": 'they could not be had here'},
    note="The paper's text could not be had here. What its abstract, the authors' code and others "
    'tell of its evaluation is rerun by subject; which of Tables 3 to 5 and Figures 9, 11 and 12 '
    'shows what is not known, nor are their figures.')
