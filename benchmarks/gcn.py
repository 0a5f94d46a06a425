"""One GCN layer, a small GCN in training, and the sorting of a graph: ours against PyG.

python -m benchmarks.gcn                everything below
python -m benchmarks.gcn --quick        a minute or less
python -m benchmarks.gcn --cora         two layers on Cora: Python time and launches
python -m benchmarks.gcn --to-csr       sorting 2 million random edges
"""
import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from pyg_fast import ops
from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import PathPreparedGCNConv
from pyg_fast.transforms import ToCSR

from . import _graphs, _harness
from ._graphs import Graph
from ._harness import Cell, Contender, Settings, Versus

PREPARED, PLAIN = 'ours, prepared', 'ours, edge_index'
EDGE_INDEX, EDGE_INDEX_CACHED = 'PyG edge_index', 'PyG edge_index cached'
CSR, CSR_CACHED = 'PyG torch CSR', 'PyG torch CSR cached'
SPARSE_TENSOR, SPARSE_TENSOR_CACHED = 'PyG SparseTensor', 'PyG SparseTensor cached'
SPARSE = [CSR, CSR_CACHED, SPARSE_TENSOR, SPARSE_TENSOR_CACHED]
LAYERS = [PREPARED, PLAIN, EDGE_INDEX, EDGE_INDEX_CACHED, *SPARSE]
OURS, CACHED = 'ours', 'PyG cached'

FORWARD, STEP = 'forward', 'forward + backward'
TOLERANCE = 1e-4  # of a row's largest entry, for float32
HIDDEN, CLASSES = 16, 7
RANDOM_NODES, RANDOM_EDGES = 100_000, 2_000_000


def deviation(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error over the largest entry of its row, in units of what is allowed."""
    worst = 0.0
    for out, right in zip(outputs, expected, strict=True):
        if out.shape != right.shape:
            return float('inf')
        largest = right.abs().amax(-1, keepdim=True).clamp_(min=1e-30)
        ratio = float(((out.double() - right).abs_() / largest).max()) / TOLERANCE
        if math.isnan(ratio):
            return float('inf')
        worst = max(worst, ratio)
    return worst


# Layers -----------------------------------------------------------------------------------------

class Layer:
    """Inputs and weights of one layer on one graph, and what is right for them in float64."""

    def __init__(self, graph: Graph, channels: int) -> None:
        device = graph.col.device
        generator = torch.Generator(device=device).manual_seed(1)
        shape = graph.num_nodes, channels
        self.graph = graph
        self.channels = channels
        self.x = torch.randn(shape, generator=generator, device=device)
        self.grad = torch.randn(shape, generator=generator, device=device)
        self.state = GCNConv(channels, channels).to(device).state_dict()
        self.state['bias'] = torch.randn(channels, generator=generator, device=device)

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """The output, and the gradients of x, bias and weight."""
        graph, x, grad = self.graph, self.x.double(), self.grad.double()
        weight, bias = self.state['lin.weight'].double(), self.state['bias'].double()
        scale = (graph.degree + 1).double().rsqrt()
        value = scale[graph.row] * scale[graph.col.long()]
        loop = (scale * scale).view(-1, 1)
        hidden = x @ weight.t()
        out = torch.sparse.mm(graph.matrix(value), hidden) + loop * hidden + bias
        back = torch.sparse.mm(graph.matrix(value, transposed=True), grad) + loop * grad
        return out, back @ weight, grad.sum(0), back.t() @ x

    def check(self, outputs: Sequence[Tensor]) -> float:
        return deviation(outputs, self.expected[:len(outputs)])

    def contender(self, name: str, make_input: Callable[[], Any], mode: str) -> Contender:
        ours = name in (PREPARED, PLAIN)

        def make() -> Callable[[], Any]:
            cls = PathPreparedGCNConv if ours else GCNConv
            conv = cls(self.channels, self.channels, cached=name.endswith('cached'))
            conv = conv.to(self.x.device)
            conv.load_state_dict(self.state)
            graph = make_input()
            if mode == FORWARD:
                @torch.no_grad()
                def run() -> tuple[Tensor, ...]:
                    return (conv(self.x, graph),)
                return run
            x = self.x.detach().requires_grad_()
            leaves = [x, conv.bias, conv.lin.weight]

            def run_step() -> tuple[Tensor, ...]:
                out = conv(x, graph)
                return (out.detach(), *torch.autograd.grad(out, leaves, self.grad))
            return run_step

        return Contender(name, make, ours=ours, check=self.check)


def inputs(graph: Graph) -> dict[str, Callable[[], Any]]:
    """What a layer takes the graph as, each made once."""
    size = (graph.num_nodes, graph.num_nodes)
    edge_index = graph.edge_index

    @functools.cache
    def prepared() -> Tensor:
        return ToCSR()(Data(edge_index=edge_index, num_nodes=graph.num_nodes)).edge_index

    @functools.cache
    def csr() -> Tensor:
        value = torch.ones(graph.num_edges, device=graph.col.device)
        return torch.sparse_csr_tensor(graph.rowptr.long(), graph.col.long(), value, size)

    @functools.cache
    def sparse_tensor() -> Any:
        from torch_sparse import SparseTensor
        adj = SparseTensor(
            rowptr=graph.rowptr.long(), col=graph.col.long(), sparse_sizes=size, is_sorted=True,
            trust_data=True)
        return adj.fill_cache_()

    found: dict[str, Callable[[], Any]] = {PREPARED: prepared}
    found.update(dict.fromkeys(
        (PLAIN, EDGE_INDEX, EDGE_INDEX_CACHED), lambda: edge_index))
    found.update(dict.fromkeys((CSR, CSR_CACHED), csr))
    if importlib.util.find_spec('torch_sparse'):
        found.update(dict.fromkeys((SPARSE_TENSOR, SPARSE_TENSOR_CACHED), sparse_tensor))
    return found


def run_layers(
    graph: Graph, channels: Sequence[int], settings: Settings, report: _harness.Report,
) -> None:
    made = inputs(graph)
    for width in channels:
        layer = Layer(graph, width)
        for mode in (FORWARD, STEP):
            section = report.section(
                f'One layer, {mode}', columns={name: [name] for name in LAYERS}, width='channels',
                memory=True, versus=[
                    Versus('the best', PREPARED, LAYERS[2:]),
                    Versus(EDGE_INDEX, PREPARED, [EDGE_INDEX]),
                    Versus('PyG, best sparse input', PREPARED, SPARSE),
                    Versus(SPARSE_TENSOR, PREPARED, [SPARSE_TENSOR]),
                    Versus(EDGE_INDEX, PLAIN, [EDGE_INDEX])])
            results = _harness.measure(
                [layer.contender(name, make, mode) for name, make in made.items()], settings)
            state = _harness.cache_state(graph.num_nodes * width * 4, settings.device)
            section.cells.append(Cell(graph.name, width, results, state))
            _harness.log(f'{graph.name} {width} {mode}: ' + ', '.join(
                f'{name} {result.text()}' for name, result in results.items()))


# Cora -------------------------------------------------------------------------------------------

class Net(torch.nn.Module):
    """Two GCN layers."""

    # On a CPU dropout of 1433 input features costs many times what both layers do.
    input_dropout = True

    def __init__(
        self, cls: type[GCNConv], num_features: int, cached: bool, hidden: int = HIDDEN,
        num_classes: int = CLASSES,
    ) -> None:
        super().__init__()
        self.conv1 = cls(num_features, hidden, cached=cached)
        self.conv2 = cls(hidden, num_classes, cached=cached)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training and self.input_dropout)
        x = self.conv1(x, edge_index).relu()
        x = F.dropout(x, 0.5, self.training)
        return self.conv2(x, edge_index)


class Cora:
    """The two models, their inputs and what they are timed on."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.prepared = ToCSR()(Data(
            edge_index=data.edge_index, num_nodes=data.num_nodes)).edge_index
        self.train = data.train_mask.nonzero().view(-1)  # a mask would synchronise at every step
        self.target = data.y[self.train]
        generator = torch.Generator(device=data.x.device).manual_seed(1)
        self.grad = torch.randn(
            data.num_nodes, CLASSES, generator=generator, device=data.x.device)
        self.state = Net(GCNConv, data.x.size(1), cached=False).to(data.x.device).state_dict()

    def model(self, name: str) -> tuple[Net, Tensor]:
        """A model with the common weights, and the graph in the form it likes."""
        ours = name == OURS
        net = Net(PathPreparedGCNConv if ours else GCNConv, self.data.x.size(1), cached=not ours)
        net.to(self.data.x.device).load_state_dict(self.state)
        return net, self.prepared if ours else self.data.edge_index

    def layers(self, name: str, captured: bool, calls: int) -> Callable[[], Any]:
        net, edge_index = self.model(name)
        parameters = list(net.parameters())

        def step() -> tuple[Tensor, ...]:
            out = net.conv2(net.conv1(self.data.x, edge_index), edge_index)
            return (out.detach(), *torch.autograd.grad(out, parameters, self.grad))

        return repeated(capture(step) if captured else step, calls)

    def expected(self) -> tuple[Tensor, ...]:
        """What :meth:`layers` gives, by PyG in float64."""
        net = self.model(CACHED)[0].double()
        x, edge_index = self.data.x.double(), self.data.edge_index
        out = net.conv2(net.conv1(x, edge_index), edge_index)
        return out.detach(), *torch.autograd.grad(
            out, list(net.parameters()), self.grad.double())

    def training_step(
        self, name: str, captured: bool, input_dropout: bool = True,
    ) -> Callable[[], Tensor]:
        net, edge_index = self.model(name)
        net.input_dropout = input_dropout
        optimizer = torch.optim.Adam(
            net.parameters(), lr=0.01, weight_decay=5e-4, capturable=captured)

        def step() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            out = net(self.data.x, edge_index)
            loss = F.cross_entropy(out.index_select(0, self.train), self.target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return capture(step) if captured else step

    def training(
        self, name: str, captured: bool, calls: int, input_dropout: bool = True,
    ) -> Callable[[], Any]:
        return repeated(self.training_step(name, captured, input_dropout), calls)

    def losses(self, name: str, steps: int) -> Tensor:
        """The losses of the first steps; the same for both models, dropout included."""
        torch.manual_seed(0)
        step = self.training_step(name, captured=False)
        return torch.stack([step() for _ in range(steps)])


def repeated(step: Callable[[], Any], calls: int) -> Callable[[], Any]:
    def run() -> Any:
        for _ in range(calls - 1):
            step()
        return step()
    return run


def capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """Records a step in a CUDA graph: returns what replays it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def run_cora(settings: Settings, report: _harness.Report, quick: bool) -> None:
    data, name = _graphs.cora(settings.device)
    report.notes.append(
        f'Two layers, {data.x.size(1)} -> {HIDDEN} -> {CLASSES}, on: {name}. Wall time of a step, '
        'launches and Python included, over batches of steps synchronised once.')
    case = Cora(data)
    expected = case.expected()
    ours, theirs = (case.losses(which, 5) for which in (OURS, CACHED))
    if not torch.allclose(ours, theirs, rtol=1e-3):
        raise _harness.Incorrect(f'losses on Cora: {ours.tolist()}, by PyG {theirs.tolist()}')

    def check_layers(outputs: Sequence[Tensor]) -> float:
        return deviation(outputs, expected)

    def check_training(loss: Tensor) -> float:
        return float(loss / theirs[0])  # it must have learned

    calls = 10 if quick else 50
    for captured in (False, True) if settings.device.type == 'cuda' else (False,):
        how = 'CUDA graph' if captured else 'eager'
        for title, make, check in (
            (f'Cora, the two conv layers forward + backward, {how}', case.layers, check_layers),
            (f'Cora, the whole training step, {how}', case.training, check_training),
            (f'Cora, the whole training step without input dropout, {how}',
             functools.partial(case.training, input_dropout=False), check_training),
        ):
            section = report.section(
                title, columns={which: [which] for which in (OURS, CACHED)}, width='hidden',
                versus=[Versus(CACHED, OURS, [CACHED])])
            results = _harness.measure([
                Contender(
                    which, functools.partial(make, which, captured, calls), which == OURS, check,
                    calls)
                for which in (OURS, CACHED)], settings)
            section.cells.append(Cell(name.split(' (')[0], HIDDEN, results))
            report.save()
            _harness.log(f'{title}: ' + ', '.join(
                f'{which} {result.text()}' for which, result in results.items()))


# Sorting ----------------------------------------------------------------------------------------

def run_to_csr(settings: Settings, report: _harness.Report, num_edges: int) -> None:
    generator = torch.Generator(device=settings.device).manual_seed(0)
    size = RANDOM_NODES, RANDOM_NODES
    edge_index = torch.randint(
        RANDOM_NODES, (2, num_edges), generator=generator, device=settings.device)
    perm = edge_index[1].argsort(stable=True)
    rowptr = torch.zeros(RANDOM_NODES + 1, dtype=torch.long, device=settings.device)
    rowptr[1:] = edge_index[1].bincount(minlength=RANDOM_NODES).cumsum(0)

    def sort() -> tuple[Tensor, Tensor, Tensor]:
        order = edge_index[1].argsort(stable=True)
        pointers = edge_index.new_zeros(RANDOM_NODES + 1)
        torch.cumsum(
            edge_index[1].bincount(minlength=RANDOM_NODES), 0, out=pointers[1:])
        return pointers, edge_index[0][order], order

    def check_sort(outputs: tuple[Tensor, Tensor, Tensor]) -> float:
        right = rowptr, edge_index[0][perm], perm
        same = [bool((out == r).all()) for out, r in zip(outputs, right, strict=True)]
        return 0.0 if all(same) else float('inf')

    def pyg() -> Tensor:
        index = EdgeIndex(edge_index, sparse_size=size).sort_by('col', stable=True).values
        return index.fill_cache_()

    def check_prepared(output: EdgeIndex) -> float:
        same = bool((output.as_tensor() == edge_index[:, perm]).all())
        return 0.0 if same else float('inf')

    graph = f'random, {RANDOM_NODES:,} nodes'
    for title, rivals in (
        ('Sorting edges into CSR', [
            Contender(
                OURS, lambda: lambda: ops.to_csr(edge_index, *size), True, check_sort),
            Contender('torch argsort', lambda: sort, check=check_sort)]),
        ('Preparing a graph, CSR and CSC', [
            Contender(
                OURS, lambda: lambda: prepare_edge_index(edge_index, size)[0], True,
                check_prepared),
            Contender('PyG EdgeIndex', lambda: pyg, check=check_prepared)]),
    ):
        names = [contender.name for contender in rivals]
        section = report.section(
            title, columns={name: [name] for name in names}, width='edges',
            versus=[Versus(names[1], OURS, names[1:])])
        results = _harness.measure(rivals, settings)
        section.cells.append(Cell(graph, num_edges, results))
        _harness.log(f'{title}: ' + ', '.join(
            f'{name} {result.text()}' for name, result in results.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('GCN layers and training against PyG.')
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', _graphs.NAMES),
        help=f"of {', '.join(_graphs.NAMES)}")
    parser.add_argument(
        '--channels', type=_harness.integers, default=(64,), help='in and out, each')
    parser.add_argument('--edges', type=int, default=RANDOM_EDGES, help='that --to-csr sorts')
    parser.add_argument('--cora', action='store_true', help='nothing but this, unless combined')
    parser.add_argument('--to-csr', action='store_true', help='likewise')
    parser.add_argument('--layers', action='store_true', help='likewise')
    args = parser.parse_args(argv)
    settings = _harness.start(args)
    everything = not (args.cora or args.to_csr or args.layers)
    report = _harness.Report('gcn', args, [
        'Wall time in ms to the end of the work, medians, contenders taking turns, no cache '
        'flushed; ratio: the best rival over ours. float32. † inexact, ‡ one cold run.'])
    if everything or args.layers:
        report.notes.append(
            'Layers are measured on graphs without self-loops, since PyG counts those that are '
            'there differently for each kind of input.')
        names = args.graphs or (
            _graphs.quick_names if args.quick else _graphs.default_names)(settings.device)
        for graph in _graphs.load_each(names, settings.device, report.left_out):
            graph = graph.without_loops()
            report.graphs[graph.name] = graph.summary()
            run_layers(graph, args.channels, settings, report)
            report.save()
    if everything or args.cora:
        run_cora(settings, report, args.quick)
    if everything or args.to_csr:
        run_to_csr(settings, report, args.edges)
    report.finish()


if __name__ == '__main__':
    main()
