"""Sampled aggregation: its kernels over S, steps of training, inference of the paper's GCN.

python -m benchmarks.sampled                 everything below
python -m benchmarks.sampled --quick         a minute or less
python -m benchmarks.sampled --kernels       aggregation by each strategy, and of all edges; rivals
                                             given the sample as a graph (the paper's Figure 11)
python -m benchmarks.sampled --training      forward and backward, of an aggregation and of a GCN
python -m benchmarks.sampled --inference     a GCN of two layers and its aggregations alone
python -m benchmarks.sampled --graphs reddit-like --dtypes float32,bfloat16,int8 --samples 16,32
"""
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_fast import ops
from pyg_fast.graph import prepare_edge_index
from pyg_fast.graph.graph import Graph as Structure
from pyg_fast.graph.graph import graph_of
from pyg_fast.graph.operator import STRATEGIES, Sampling
from pyg_fast.nn import SampledGCNConv
from pyg_fast.ops.sampling import sampled_graph, sampled_positions

from . import _graphs, _harness, maxk, spmm
from ._graphs import Graph
from ._harness import Cell, Contender, Result, Settings, Versus
from .maxk import all_columns, measure_over_k
from .paths import norm_error
from .spmm import FORWARD, excess

SAMPLES, QUICK_SAMPLES = (16, 32, 64, 128), (16, 64)
WIDTHS, QUICK_WIDTHS = (256,), (64,)
DTYPES = (*_harness.DTYPES, 'int8')
MODEL_SAMPLES = (32,)
MODEL_GRAPHS = {'cuda': ('reddit-like',), 'cpu': ('Computers',)}
QUICK_GRAPHS = ('tiny',)
CHANNELS, HIDDEN, CLASSES = 602, 128, 41  # of Reddit, and of the paper
SEED = 1
TOLERANCE = 1e-4  # of a norm, for float32
_KINKED = 1e-3  # likewise, of gradients: rounding decides where a ReLU bends
_ROUNDED = 3e-2  # likewise, of features of eight bits

FASTRAND, UNBIASED = 'fastrand', 'unbiased'
UNWEIGHTED, ROUNDED = 'fastrand, unweighted', 'fastrand, rounding included'
FULL, MAKING, GIVEN = 'in full', 'making the sample', 'given the sample: '
INT8 = 'fastrand, int8'
CUSPARSE = [*spmm.CUSPARSE, *spmm.PREPROCESSED]
TORCH = [spmm.TORCH, spmm.TORCH64]
RIVALS = {'cuSPARSE in full': CUSPARSE, 'torch.sparse in full': TORCH}
CONTROL = {
    f'{GIVEN}{rival}': [f'{GIVEN}{name}' for name in names]
    for rival, names in (('ours', [FULL]), ('cuSPARSE', CUSPARSE), ('torch.sparse', TORCH))}

kernels = torch.ops.pyg_fast


def log(graph: str, at: int, title: str, results: Mapping[str, Result]) -> None:
    _harness.log(f'{graph} S={at} {title}: ' + ', '.join(
        f'{name} {result.text()}' for name, result in results.items()))


def drawn(num_samples: int, strategy: str, device: torch.device) -> Sampling:
    """A sampling whose draw, if it has one, is the first after ``torch.manual_seed(SEED)``."""
    torch.manual_seed(SEED)
    return Sampling(num_samples, strategy).drawn(device)


class Taken:
    """The edges that are taken, as a graph of their own; of some rows, compared with the reference.

    Args:
        graph: All edges.
        sampling: Which of them to take.
        made: What :func:`sampled_graph` gave.

    Raises:
        Incorrect: If they are others than the strategy says.
    """

    def __init__(self, graph: Graph, sampling: Sampling, made: Structure) -> None:
        num_edges = int(made.rowptr[-1])
        self.graph = Graph(graph.name, made.rowptr.int(), made.col[:num_edges].int())
        assert made.perm is not None
        self.edges = made.perm[:num_edges].long()  # positions in all edges
        self.factor = torch.ones_like(graph.degree, dtype=torch.double)
        if sampling.strategy == UNBIASED:
            self.factor = (graph.degree.double() / sampling.num_samples).clamp(min=1)
        if not self.is_right(graph, sampling):
            raise _harness.Incorrect(f'sampled_graph: {sampling} took other edges')

    def is_right(self, graph: Graph, sampling: Sampling) -> bool:
        num_samples, strategy, seed = sampling.args()
        degree = graph.degree
        fullest = degree.topk(min(64, degree.numel()))[1]
        rows = torch.cat([fullest, maxk.spread(512, degree.numel(), degree.device)]).unique()
        ends = [p[rows + i].tolist() for p in (graph.rowptr, self.graph.rowptr) for i in (0, 1)]
        for row, first, last, begin, end in zip(rows.tolist(), *ends, strict=True):
            expected = sampled_positions(
                last - first, num_samples, strategy, 0 if seed is None else int(seed), row)
            if (self.edges[begin:end] - first).tolist() != expected:
                return False
        return bool((self.graph.col == graph.col[self.edges]).all())


# Kernels ----------------------------------------------------------------------------------------

class Case(maxk.Case):
    """Inputs on one graph, in one dtype, at one width; of eight bits if that is ``int8``."""

    def __init__(self, graph: Graph, dtype: str, width: int) -> None:
        self.is_int8 = dtype == 'int8'
        super().__init__(graph, torch.float32 if self.is_int8 else _harness.DTYPES[dtype], width)
        self.given: tuple[Tensor, Tensor | None] = self.x, None
        if self.is_int8:
            self.exact, self.given = self.x, kernels.quantize_rows(self.x)
            self.x = self.given[0] * self.given[1].view(-1, 1)
        self.last: Sample | None = None

    def run(self, sampling: Sampling, weight: Tensor | None) -> Tensor:
        x, scale = self.given
        return kernels.sampled_spmm(
            *self.structure[:3], weight, x, None, scale, None, None, False, False,
            *sampling.args())

    def rounded_first(self, sampling: Sampling) -> Tensor:
        x, scale = kernels.quantize_rows(self.exact)
        return kernels.sampled_spmm(
            *self.structure[:3], self.weight, x, None, scale, None, None, False, False,
            *sampling.args())

    def sample(self, sampling: Sampling) -> 'Sample':
        return Sample(self, sampling, sampled_graph(self.structure, sampling))


class Sample(maxk.Case):
    """The same inputs on the edges that are taken."""

    def __init__(self, case: Case, sampling: Sampling, made: Structure) -> None:
        taken = Taken(case.graph, sampling, made)
        self.case, self.graph, self.dtype, self.width = case, taken.graph, case.dtype, case.width
        self.x, self.grad = case.x, case.grad
        self.weight = case.weight[taken.edges]
        if sampling.strategy == UNBIASED:  # Never an input, only what is right.
            self.weight = self.weight * taken.factor[self.graph.row]
        self.ones = torch.ones_like(self.weight)
        self._products = {}

    def _product(self, weight: str, x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        if self.case.last is not self:  # Those of all samples would fill the memory.
            if self.case.last is not None:
                self.case.last._products.clear()
            self.case.last = self
        return super()._product(weight, x, transposed)


def sampling_contenders(case: Case, num_samples: int) -> list[Contender]:
    """The kernels at one S; of fastrand's sample also what others make of it as a graph."""
    device = case.x.device
    made: list[Contender] = []
    fastrand = Sampling(num_samples)
    sample = functools.cache(lambda: case.sample(fastrand))

    def add(
        name: str, run: Callable[[], Tensor], of: Callable[[], Sample], weight: str = 'weighted',
    ) -> None:
        # Equal terms round the same way at every addition: an edge that is taken S times, too.
        slack = max(1.0, num_samples / 256) if name == 'paper' else 1.0

        def check(out: Tensor) -> float:
            expected, scale = of().aggregated(weight)
            return excess(out, expected, scale * slack)

        made.append(Contender(name, lambda: run, ours=True, check=check))

    for strategy in STRATEGIES:
        sampling = drawn(num_samples, strategy, device)
        add(strategy, functools.partial(case.run, sampling, case.weight),
            sample if strategy == FASTRAND else functools.partial(case.sample, sampling))
    add(UNWEIGHTED, functools.partial(case.run, fastrand, None), sample, 'unweighted')
    if case.is_int8:
        add(ROUNDED, functools.partial(case.rounded_first, fastrand), sample)
        return made
    for contender in all_columns(sample(), FORWARD):
        name = FULL if contender.name == maxk.DENSE else contender.name
        made.append(dataclasses.replace(contender, name=f'{GIVEN}{name}'))

    def make_sample() -> tuple[Structure, Tensor]:
        graph = sampled_graph(case.structure, fastrand)
        assert graph.perm is not None
        return graph, case.weight[graph.perm]

    def check(output: tuple[Structure, Tensor]) -> float:
        graph, weight = output
        taken = Taken(case.graph, fastrand, graph)
        same = torch.equal(weight[:taken.edges.numel()], case.weight[taken.edges])
        return 0.0 if same else float('inf')

    return [*made, Contender(MAKING, lambda: make_sample, ours=True, check=check)]


def full_contenders(case: Case) -> list[Contender]:
    named = [
        dataclasses.replace(contender, name=FULL) if contender.name == maxk.DENSE else contender
        for contender in all_columns(case, FORWARD)]
    return named[:1] if case.is_int8 else named  # Of numbers that were rounded, in float32.


def sampling_rates(graph: Graph, samples: Sequence[int]) -> str:
    degree = graph.degree.long()
    total = max(int(degree.sum()), 1)
    return f'{graph.name} keeps ' + ', '.join(
        f'{int(degree.clamp(max=s).sum()) / total:.1%} of its edges at S={s}' for s in samples
    ) + f'; mean degree {total / max(degree.numel(), 1):.0f}.'


def run_kernels(
    graph: Graph, widths: Sequence[int], samples: Sequence[int], dtypes: Sequence[str],
    settings: Settings, report: _harness.Report,
) -> None:
    report.notes.append(sampling_rates(graph, samples))
    columns: dict[str, Sequence[str]] = {
        name: [name] for name in (*STRATEGIES, UNWEIGHTED, ROUNDED, FULL)}
    columns |= RIVALS | CONTROL | {MAKING: [MAKING]}
    for width in widths:
        by_dtype: dict[int, dict[str, Result]] = {s: {} for s in samples}
        for dtype in dtypes:
            case = Case(graph, dtype, width)
            section = report.section(
                f'Aggregation at F={width}, {dtype}', columns=columns, width='S', versus=[
                    Versus('ours in full', FASTRAND, [FULL]),
                    *(Versus(name, FASTRAND, names) for name, names in (RIVALS | CONTROL).items()),
                    Versus(FASTRAND, 'bucket', [FASTRAND]),
                    Versus(FASTRAND, UNBIASED, [FASTRAND])])
            results = measure_over_k(
                {s: sampling_contenders(case, s) for s in samples}, full_contenders(case), settings)
            state = _harness.cache_state(
                graph.num_nodes * width * case.given[0].element_size(), settings.device)
            for s, cell in results.items():
                section.cells.append(Cell(graph.name, s, cell, state))
                by_dtype[s][dtype] = cell[FASTRAND]
                if case.is_int8:
                    by_dtype[s][ROUNDED] = cell[ROUNDED]
                log(graph.name, s, section.title, cell)
            del case
        first, *others = by_dtype[samples[0]]
        if others:
            section = report.section(
                f'Aggregation at F={width}, fastrand, by dtype', width='S',
                columns={name: [name] for name in (first, *others)},
                versus=[Versus(first, other, [first]) for other in others])
            section.cells += [Cell(graph.name, s, cell) for s, cell in by_dtype.items()]


# Training ---------------------------------------------------------------------------------------

def run_training_op(
    graph: Graph, width: int, samples: Sequence[int], settings: Settings, report: _harness.Report,
) -> None:
    """Forward and backward of the aggregation alone, drawing included."""
    case = Case(graph, 'float32', width)

    def contender(num_samples: int, strategy: str) -> Contender:
        def make() -> Callable[[], tuple[Tensor, Tensor]]:
            torch.manual_seed(SEED)
            return spmm.step(
                lambda x: ops.sampled_spmm(case.prepared, x, num_samples, strategy, case.weight),
                case.x, case.grad)

        def check(output: tuple[Tensor, Tensor]) -> float:
            sample = case.sample(drawn(num_samples, strategy, case.x.device))
            return maxk.worst(
                excess(out, *right('weighted')) for out, right in
                zip(output, (sample.aggregated, sample.grad_x), strict=True))

        return Contender(strategy, make, ours=True, check=check)

    def full(output: tuple[Tensor, Tensor]) -> float:
        return maxk.worst(
            excess(out, *right('weighted')) for out, right in
            zip(output, (case.aggregated, case.grad_x), strict=True))

    step = spmm.step(lambda x: ops.spmm(case.prepared, x, case.weight), case.x, case.grad)
    section = report.section(
        f'Aggregation at F={width}, forward + backward, float32', width='S',
        columns={name: [name] for name in (*STRATEGIES, FULL)},
        versus=[Versus(FULL, UNBIASED, [FULL]), Versus(FASTRAND, UNBIASED, [FASTRAND]),
                Versus(FULL, FASTRAND, [FULL])])
    results = measure_over_k(
        {s: [contender(s, strategy) for strategy in STRATEGIES] for s in samples},
        [Contender(FULL, lambda: step, ours=True, check=full)], settings)
    for s, cell in results.items():
        section.cells.append(Cell(graph.name, s, cell))
        log(graph.name, s, section.title, cell)


class Model:
    """The paper's GCN on random features, its inference and steps, in full and sampled."""

    def __init__(self, graph: Graph, channels: int, hidden: int) -> None:
        self.graph = graph = graph.without_loops()
        device = graph.col.device
        generator = torch.Generator(device=device).manual_seed(SEED)
        size = graph.num_nodes, graph.num_nodes
        self.prepared = prepare_edge_index(graph.edge_index, size)[0]
        self.structure = graph_of(self.prepared, *size)
        self.widths = channels, hidden, CLASSES
        self.x, *self.mapped = (
            torch.randn(graph.num_nodes, width, generator=generator, device=device)
            for width in self.widths)
        self.target = torch.randint(
            CLASSES, (graph.num_nodes,), generator=generator, device=device)
        torch.manual_seed(SEED)
        self.state = self.convs(FULL, 1).state_dict()

    def convs(self, name: str, num_samples: int) -> nn.ModuleList:
        options: dict[str, str | bool] = {'sample': 'always'}
        if name == FULL:
            options['sample'] = 'never'
        elif name == INT8:
            options['quantize'] = True
        else:
            options['strategy'] = name
        convs = nn.ModuleList(
            SampledGCNConv(*sizes, num_samples, **options)  # type: ignore[arg-type]
            for sizes in zip(self.widths[:-1], self.widths[1:], strict=True))
        for conv in convs:  # Zeros at first, which show nothing.
            nn.init.normal_(conv.bias)
        return convs.to(self.x.device)

    def loaded(self, name: str, num_samples: int) -> nn.ModuleList:
        convs = self.convs(name, num_samples)
        convs.load_state_dict(self.state)
        torch.manual_seed(SEED)
        return convs

    def inference(self, name: str, num_samples: int) -> Callable[[], list[Tensor]]:
        first, second = self.loaded(name, num_samples).eval()

        @torch.no_grad()
        def run() -> list[Tensor]:
            return [second(first(self.x, self.prepared).relu(), self.prepared)]

        return run

    def aggregations(self, name: str, num_samples: int) -> Callable[[], list[Tensor]]:
        """Those of an inference: of features that are mapped already, on a graph whose degrees
        are known."""
        given = [
            (conv, h, conv._operator(h, self.prepared, None, False))
            for conv, h in zip(self.loaded(name, num_samples).eval(), self.mapped, strict=True)]

        @torch.no_grad()
        def run() -> list[Tensor]:
            return [conv._aggregated(h, norm) for conv, h, norm in given]

        return run

    def step(self, name: str, num_samples: int) -> Callable[[], list[Tensor]]:
        convs = self.loaded(name, num_samples).train()
        first, second = convs

        def run() -> list[Tensor]:
            out = second(first(self.x, self.prepared).relu(), self.prepared)
            loss = F.cross_entropy(out, self.target)
            return [loss.detach(), *torch.autograd.grad(loss, list(convs.parameters()))]

        return run

    def matrices(self, name: str, num_samples: int) -> list[Callable[[Tensor], Tensor]]:
        """What each layer multiplies with, in float64, by another way than its own."""
        strategy = FASTRAND if name in (FULL, INT8) else name
        torch.manual_seed(SEED)
        made = []
        for _ in self.mapped:
            graph, factor = self.graph, None
            if name != FULL:
                sampling = Sampling(num_samples, strategy).drawn(self.x.device)
                taken = Taken(self.graph, sampling, sampled_graph(self.structure, sampling))
                graph, factor = taken.graph, taken.factor.view(-1, 1)
            counted = self.graph if strategy == UNBIASED else graph
            scale = (counted.degree + 1).double().rsqrt().view(-1, 1)
            ones = torch.ones(graph.num_edges, dtype=torch.double, device=self.x.device)
            matrix = graph.matrix(ones)

            def product(
                h: Tensor, matrix: Tensor = matrix, scale: Tensor = scale,
                factor: Tensor | None = factor,
            ) -> Tensor:
                total = scale * torch.sparse.mm(matrix, scale * h)
                return (total if factor is None else factor * total) + scale.square() * h

            made.append(product)
        return made

    def parameters(self) -> list[Tensor]:
        """Bias and weight of both layers, in float64."""
        names = 'bias', 'lin.weight'
        return [self.state[f'{i}.{name}'].double() for i in (0, 1) for name in names]

    @torch.no_grad()
    def right_inference(self, name: str, num_samples: int) -> list[Tensor]:
        return [self.output(self.matrices(name, num_samples), self.parameters())]

    @torch.no_grad()
    def right_aggregations(self, name: str, num_samples: int) -> list[Tensor]:
        products, parameters = self.matrices(name, num_samples), self.parameters()
        return [product(h.double()) + bias for product, h, bias in
                zip(products, self.mapped, parameters[::2], strict=True)]

    def right_step(self, name: str, num_samples: int) -> list[Tensor]:
        parameters = [parameter.requires_grad_() for parameter in self.parameters()]
        loss = F.cross_entropy(
            self.output(self.matrices(name, num_samples), parameters), self.target)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    def output(
        self, products: Sequence[Callable[[Tensor], Tensor]], parameters: Sequence[Tensor],
    ) -> Tensor:
        h = self.x.double()
        for product, bias, weight in zip(
                products, parameters[::2], parameters[1::2], strict=True):
            h = product((h if product is products[0] else h.relu()) @ weight.t()) + bias
        return h

    def contenders(self, what: str, num_samples: int, names: Sequence[str]) -> list[Contender]:
        make, right = getattr(self, what), getattr(self, f'right_{what}')

        def check(name: str, outputs: Sequence[Tensor]) -> float:
            tolerance = _ROUNDED if name == INT8 else _KINKED if what == 'step' else TOLERANCE
            return norm_error(outputs, right(name, num_samples), tolerance)

        return [
            Contender(name, functools.partial(make, name, num_samples), ours=True,
                      check=functools.partial(check, name))
            for name in names]


def run_model(
    model: Model, what: str, samples: Sequence[int], settings: Settings, report: _harness.Report,
) -> None:
    title, names = {
        'step': ('Training step of a GCN', (*STRATEGIES,)),
        'inference': ('Inference of a GCN', (*STRATEGIES, INT8)),
        'aggregations': ('Inference of a GCN, its aggregations alone', (*STRATEGIES, INT8)),
    }[what]
    section = report.section(
        f'{title}, {model.widths[0]} to {model.widths[1]} to {CLASSES}, float32', width='S',
        columns={name: [name] for name in (*names, FULL)}, memory=what == 'step', versus=[
            Versus(FULL, FASTRAND, [FULL]),
            *(Versus(FULL, name, [FULL]) for name in names if name != FASTRAND),
            Versus(FASTRAND, UNBIASED, [FASTRAND])])
    full = model.contenders(what, samples[0], [FULL])
    results = measure_over_k(
        {s: model.contenders(what, s, names) for s in samples}, full, settings)
    for s, cell in results.items():
        section.cells.append(Cell(model.graph.name, s, cell))
        log(model.graph.name, s, section.title, cell)


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('Sampled aggregation: kernels, training and inference.')
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', _graphs.NAMES),
        help=f"of {', '.join(_graphs.NAMES)}")
    parser.add_argument(
        '--samples', type=_harness.integers, help='edges S taken of each row, at most')
    parser.add_argument('--widths', type=_harness.integers, help='numbers of columns F')
    parser.add_argument('--dtypes', type=_harness.choice('dtype', DTYPES), default=('float32',))
    parser.add_argument('--kernels', action='store_true', help='nothing but this, unless combined')
    parser.add_argument('--training', action='store_true', help='likewise')
    parser.add_argument('--inference', action='store_true', help='likewise')
    parser.add_argument(
        '--model-samples', type=_harness.integers, default=MODEL_SAMPLES, help='S of the GCN')
    parser.add_argument('--channels', type=int, default=CHANNELS, help='of its input')
    parser.add_argument('--hidden', type=int, default=HIDDEN, help='of it')
    args = parser.parse_args(argv)
    wall = _harness.start(args)
    kernel = dataclasses.replace(wall, device_time=True)
    parts = ('kernels', 'training', 'inference')
    asked = [part for part in parts if getattr(args, part)] or list(parts)
    samples = args.samples or (QUICK_SAMPLES if args.quick else SAMPLES)
    widths = args.widths or (QUICK_WIDTHS if args.quick else WIDTHS)
    report = _harness.Report('sampled', args, [
        'Times in ms, medians, contenders taking turns, no cache flushed between them; ratio: '
        f'"{FULL}", which is ours too, over fastrand. '
        + ('Aggregations by CUDA events, launches hidden; whole models by' if args.device == 'cuda'
           else 'All by') + ' wall time to the end of the work. † inexact, ‡ one cold run.'])
    if args.device == 'cuda':
        report.environment['cusparse'] = maxk._cusparse.version()
    if 'kernels' in asked:
        report.notes.append(
            f'Kernels: the graph is prepared for everyone, and all but "{UNWEIGHTED}" read edge '
            f'weights. "{GIVEN.strip(": ")}": the edges that fastrand takes, as a graph of their '
            f'own with its weights; "{MAKING}" is the time that this takes ours, which those '
            f'times leave out. int8: "{FULL}" and its memory are those of float32; codes and '
            'scales are at hand but where it says otherwise. Every sample is compared with the '
            'reference in Python on some rows, every result with float64 on the sampled edges.')
    if 'training' in asked or 'inference' in asked:
        report.notes.append(
            'Training: forward and backward, without an optimizer, every draw included. The GCN '
            f'has two layers on random features, and samples in training too; "{INT8}" rounds at '
            'every call. Its aggregations: of features that are mapped already, scales, loops and '
            'bias included. Compared with products in float64.')
    names = {
        'kernels': args.graphs or (_graphs.quick_names if args.quick else _graphs.default_names)(
            wall.device),
        'models': args.graphs or (QUICK_GRAPHS if args.quick else MODEL_GRAPHS[args.device])}
    models = [part for part in asked if part != 'kernels']
    order = [name for part in ['kernels'] * ('kernels' in asked) + ['models'] * bool(models)
             for name in names[part]]
    for graph in _graphs.load_each(dict.fromkeys(order), wall.device, report.left_out):
        report.graphs[graph.name] = graph.summary()
        if 'kernels' in asked and graph.name in names['kernels']:
            run_kernels(graph, widths, samples, args.dtypes, kernel, report)
            report.save()
        if graph.name not in names['models']:
            continue
        if 'training' in asked:
            for width in widths:
                run_training_op(graph, width, samples, kernel, report)
                report.save()
        if models:
            model = Model(graph, args.channels, args.hidden)
            if 'training' in asked:
                run_model(model, 'step', args.model_samples, wall, report)
            if 'inference' in asked:
                run_model(model, 'aggregations', args.model_samples, kernel, report)
                run_model(model, 'inference', args.model_samples, wall, report)
            del model
            report.save()
    report.finish()


if __name__ == '__main__':
    main()
