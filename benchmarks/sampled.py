"""Sampled aggregation: kernels over S, training steps, inference of the paper's GCN.

python -m benchmarks sampled                     everything below
python -m benchmarks sampled --quick             a minute or less
python -m benchmarks sampled --parts kernels     each strategy beside all edges, and rivals on the
                                                 sample as a graph (Figure 11 of the paper)
python -m benchmarks sampled --parts training    forward and backward, of a sum and of a GCN
python -m benchmarks sampled --parts inference   a GCN of two layers and its aggregations alone
python -m benchmarks sampled --graphs reddit-like --dtypes float32,bfloat16,int8 --samples 16,32
"""
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

from pyg_fast import ops
from pyg_fast.nn import SampledGCNConv
from pyg_fast.ops.sampling import sampled_graph, sampled_positions
from pyg_fast.sparse.graph import Graph as Structure
from pyg_fast.sparse.operator import SCALED, STRATEGIES, Sampling

from . import _harness, layers, maxk, spmm
from ._graphs import Graph
from ._harness import Bench, Contender, Option, norm_error, same, worst
from .maxk import all_columns
from .spmm import FORWARD, excess

SAMPLES = {'quick': (16, 64), 'usual': (16, 32, 64, 128)}
DTYPES = (*_harness.DTYPES, 'int8')
MODEL_GRAPHS = {'quick': ('tiny',), 'cuda': ('reddit-like',), 'cpu': ('Computers',)}
CHANNELS, HIDDEN, CLASSES = 602, 128, 41  # of Reddit, and of the paper
SEED = 1
TOLERANCE = 1e-4  # of a norm, for float32
_KINKED = 1e-3  # of gradients: rounding decides on which side of zero a ReLU is
_ROUNDED = 3e-2  # of features of eight bits

FASTRAND, UNBIASED, ADAPTIVE = 'fastrand', 'unbiased', 'adaptive'
UNWEIGHTED, ROUNDED = 'fastrand, unweighted', 'fastrand, rounding included'
FULL, MAKING, GIVEN = 'in full', 'making the sample', 'given the sample: '
INT8, PYG = 'fastrand, int8', 'PyG GCNConv'

kernels = torch.ops.pyg_fast


def drawn(num_samples: int, strategy: str, device: torch.device) -> Sampling:
    """A sampling; if it is random, its draw is the first after ``torch.manual_seed(SEED)``."""
    torch.manual_seed(SEED)
    return Sampling(num_samples, strategy).drawn(device)


class Taken:
    """The sampled edges as a graph, of the output of :func:`sampled_graph`; some rows are
    compared with the reference, and other edges raise Incorrect.
    """

    def __init__(self, graph: Graph, sampling: Sampling, made: Structure) -> None:
        num_edges = int(made.rowptr[-1])
        self.graph = Graph(graph.name, made.rowptr.int(), made.col[:num_edges].int())
        assert made.perm is not None
        self.edges = made.perm[:num_edges].long()  # positions in all edges
        self.factor = torch.ones_like(graph.degree, dtype=torch.double)
        if sampling.strategy in SCALED:
            zeros = int(sampling.strategy == ADAPTIVE)
            ratio = (graph.degree.double() + zeros) / (sampling.num_samples + zeros)
            self.factor = ratio.clamp(min=1)
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
    """Inputs on one graph, in one dtype (``int8`` too), at one width."""

    def __init__(self, graph: Graph, dtype: str, width: int) -> None:
        self.is_int8 = dtype == 'int8'
        super().__init__(graph, torch.float32 if self.is_int8 else _harness.DTYPES[dtype], width)
        self.given: tuple[Tensor, Tensor | None] = self.x, None
        if self.is_int8:
            self.exact, self.given = self.x, kernels.quantize_rows(self.x)
            self.x = self.given[0] * self.given[1].view(-1, 1)
        self.last: Sample | None = None

    def run(
        self, sampling: Sampling, weight: Tensor | None,
        given: tuple[Tensor, Tensor | None] | None = None,
    ) -> Tensor:
        x, scale = given or self.given
        return kernels.sampled_spmm(
            *self.graph.structure[:3], weight, x, None, scale, None, None, False, False,
            *sampling.args())

    def sample(self, sampling: Sampling) -> 'Sample':
        return Sample(self, sampling, sampled_graph(self.graph.structure, sampling))


class Sample(maxk.Case):
    """The same inputs on the sampled edges."""

    def __init__(self, case: Case, sampling: Sampling, made: Structure) -> None:
        taken = Taken(case.graph, sampling, made)
        self.case, self.graph, self.dtype, self.width = case, taken.graph, case.dtype, case.width
        self.x, self.grad = case.x, case.grad
        self.weight = case.weight[taken.edges]
        if sampling.strategy in SCALED:  # Ours scales in the kernel.
            self.weight = self.weight * taken.factor[self.graph.row]
        self.ones = torch.ones_like(self.weight)
        self._products = {}

    def _product(self, weight: str, x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        if self.case.last is not self:  # References of all samples would fill the memory.
            if self.case.last is not None:
                self.case.last._products.clear()
            self.case.last = self
        return super()._product(weight, x, transposed)


def sampling_contenders(case: Case, num_samples: int) -> list[Contender]:
    """The kernels at one S, and products with the graph that fastrand samples."""
    device = case.x.device
    made: list[Contender] = []
    fastrand = Sampling(num_samples)
    sample = functools.cache(lambda: case.sample(fastrand))

    def add(
        name: str, run: Callable[[], Tensor], of: Callable[[], Sample], weight: str = 'weighted',
    ) -> None:
        # The strategy 'paper' may take an edge S times: then rounding errors add up.
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
        add(ROUNDED, lambda: case.run(
            fastrand, case.weight, kernels.quantize_rows(case.exact)), sample)
        return made
    made += [dataclasses.replace(contender, name=f'{GIVEN}{contender.name}')
             for contender in all_columns(sample(), FORWARD, FULL)]

    def make_sample() -> tuple[Structure, Tensor]:
        graph = sampled_graph(case.graph.structure, fastrand)
        assert graph.perm is not None
        return graph, case.weight[graph.perm]

    def check(output: tuple[Structure, Tensor]) -> float:
        graph, weight = output
        taken = Taken(case.graph, fastrand, graph)
        return same((weight[:taken.edges.numel()], case.weight[taken.edges]))

    return [*made, Contender(MAKING, lambda: make_sample, ours=True, check=check)]


def full_contenders(case: Case) -> list[Contender]:
    made = all_columns(case, FORWARD, FULL)
    return made[:1] if case.is_int8 else made  # int8: on the rounded features, in float32


def sampling_rates(graph: Graph, samples: Sequence[int]) -> str:
    """The share of the edges that a sample reads, and of the nodes that it reads in full."""
    degree = graph.degree.long()
    total = max(int(degree.sum()), 1)
    return f'{graph.name} keeps ' + ', '.join(
        f'{int(degree.clamp(max=s).sum()) / total:.1%} of its edges at S={s} (all edges of '
        f'{float((degree <= s).double().mean()):.1%} of the nodes)' for s in samples
    ) + f'; mean degree {total / max(degree.numel(), 1):.0f}.'


def run_kernels(bench: Bench, graph: Graph) -> None:
    samples = bench.args.samples
    bench.note(sampling_rates(graph, samples))
    for width in bench.args.widths:
        for dtype in bench.args.dtypes:
            case = Case(graph, dtype, width)
            full = full_contenders(case)
            bench.measure_over(
                f'Aggregation at F={width}, {dtype}', graph.name,
                {s: sampling_contenders(case, s) for s in samples}, full, bench.kernel,
                ours=FASTRAND, rivals=[each.name for each in full], label='S',
                pairs=[(FASTRAND, f'{GIVEN}{FULL}'), *(
                    (name, FASTRAND) for name in (ADAPTIVE, 'bucket', UNBIASED))])
            del case


# Training ---------------------------------------------------------------------------------------

def run_training_op(bench: Bench, graph: Graph, width: int) -> None:
    """Forward and backward of the aggregation alone, with the draw of the sample."""
    case = Case(graph, 'float32', width)

    def error(of: maxk.Case, output: tuple[Tensor, Tensor]) -> float:
        return worst(excess(out, *right('weighted')) for out, right in zip(
            output, (of.aggregated, of.grad_x), strict=True))

    def contender(num_samples: int, strategy: str) -> Contender:
        def make() -> Callable[[], tuple[Tensor, Tensor]]:
            torch.manual_seed(SEED)
            return spmm.step(
                lambda x: ops.sampled_spmm(
                    graph.prepared, x, num_samples, strategy, case.weight), case.x, case.grad)

        def check(output: tuple[Tensor, Tensor]) -> float:
            return error(case.sample(drawn(num_samples, strategy, case.x.device)), output)

        return Contender(strategy, make, ours=True, check=check)

    step = spmm.step(lambda x: ops.spmm(case.graph.prepared, x, case.weight), case.x, case.grad)
    bench.measure_over(
        f'Aggregation at F={width}, forward + backward, float32', graph.name,
        {s: [contender(s, strategy) for strategy in STRATEGIES] for s in bench.args.samples},
        [Contender(FULL, lambda: step, ours=True, check=functools.partial(error, case))],
        bench.kernel, label='S',
        pairs=[(UNBIASED, FULL), (UNBIASED, FASTRAND), (FASTRAND, FULL), (ADAPTIVE, FASTRAND)])


class Exact(nn.Module):
    """A layer in float64, whose sums torch.sparse computes."""

    def __init__(
        self, matrix: Tensor, loops: Tensor, weight: Tensor, bias: Tensor,
    ) -> None:
        super().__init__()
        self.matrix, self.loops = matrix, loops
        self.bias, self.weight = (nn.Parameter(t.double()) for t in (bias, weight))

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        return self._aggregated(x @ self.weight.t(), None)

    def _operator(self, *_: Any) -> None:
        """The matrix is made already."""

    def _aggregated(self, h: Tensor, _: None) -> Tensor:
        h = h.double()
        return torch.sparse.mm(self.matrix, h) + self.loops * h + self.bias


class Model:
    """The GCN of the paper on random features: inference and steps, in full and sampled."""

    def __init__(self, graph: Graph, channels: int, hidden: int) -> None:
        self.graph = graph = graph.without_loops()
        normal = graph.normal(SEED)
        self.widths = channels, hidden, CLASSES
        self.x, *self.mapped = (normal(graph.num_nodes, width) for width in self.widths)
        self.target = normal(graph.num_nodes, CLASSES).argmax(1)
        torch.manual_seed(SEED)
        self.state = self.convs(FULL, 1).state_dict()

    def convs(self, name: str, num_samples: int) -> nn.ModuleList:
        options: dict[str, Any] = {FULL: {'sample': 'never'}, INT8: {'quantize': True}}.get(
            name, {'strategy': name})
        convs = nn.ModuleList(
            SampledGCNConv(*sizes, num_samples, **{'sample': 'always', **options})
            for sizes in zip(self.widths[:-1], self.widths[1:], strict=True))
        for conv in convs:  # Zeros at first, which would hide a wrong bias.
            nn.init.normal_(conv.bias)
        return convs.to(self.x.device)

    def exact(self, name: str, num_samples: int) -> nn.ModuleList:
        strategy = FASTRAND if name in (FULL, INT8) else name
        torch.manual_seed(SEED)
        made = nn.ModuleList()
        for k in range(2):
            graph, factor = self.graph, torch.ones(1, dtype=torch.double, device=self.x.device)
            if name != FULL:
                sampling = Sampling(num_samples, strategy).drawn(self.x.device)
                taken = Taken(self.graph, sampling, sampled_graph(self.graph.structure, sampling))
                graph, factor = taken.graph, taken.factor
            loop_factor = torch.ones_like(factor)
            if strategy == ADAPTIVE:
                factor, loop_factor = factor.pow(2 / 3), factor
            counted = self.graph if strategy in SCALED else graph
            scale = (counted.degree + 1).double().rsqrt()
            value = (factor * scale)[graph.row] * scale[graph.col.long()]
            loops = (loop_factor * scale.square()).view(-1, 1)
            made.append(Exact(graph.matrix(value), loops, *(
                self.state[f'{k}.{name}'] for name in ('lin.weight', 'bias'))))
        return made

    def work(self, what: str, convs: nn.ModuleList, graph: Any) -> Callable[[], Any]:
        """A step, an inference, or its aggregations: linear maps and degrees are computed before.
        """
        x = self.x.to(convs[0].bias.dtype)
        first, second = convs.train(what == 'step')
        torch.manual_seed(SEED)
        if what == 'step':
            return _harness.with_gradients(lambda: F.cross_entropy(
                second(first(x, graph).relu(), graph), self.target), list(convs.parameters()))
        given = [(conv, h, conv._operator(h, graph, None, False)) for conv, h in zip(
            convs, self.mapped, strict=True)] if what == 'aggregations' else []

        @torch.no_grad()
        def run() -> list[Tensor]:
            if given:
                return [conv._aggregated(h, norm) for conv, h, norm in given]
            return [second(first(x, graph).relu(), graph)]

        return run

    def right(self, what: str, name: str, num_samples: int) -> Sequence[Tensor]:
        return self.work(what, self.exact(name, num_samples), None)()

    def pyg(self) -> Contender:
        """The inference of PyG on all edges, with normalized weights that are cached."""
        def make() -> Callable[[], list[Tensor]]:
            convs = nn.ModuleList(GCNConv(*sizes, cached=True) for sizes in zip(
                self.widths[:-1], self.widths[1:], strict=True))
            convs.load_state_dict(self.state)
            matrix = layers.Inputs(self.graph).of(layers.CSR)
            return self.work('inference', convs.to(self.x.device), matrix)

        return Contender(PYG, make, check=lambda outputs: norm_error(
            outputs, self.right('inference', FULL, 1), TOLERANCE))

    def contenders(self, what: str, num_samples: int, names: Sequence[str]) -> list[Contender]:
        def make(name: str) -> Callable[[], Any]:
            convs = self.convs(name, num_samples)
            convs.load_state_dict(self.state)
            return self.work(what, convs, self.graph.prepared)

        def check(name: str, outputs: Sequence[Tensor]) -> float:
            tolerance = _ROUNDED if name == INT8 else _KINKED if what == 'step' else TOLERANCE
            return norm_error(outputs, self.right(what, name, num_samples), tolerance)

        return [
            Contender(name, functools.partial(make, name), ours=True,
                      check=functools.partial(check, name))
            for name in names]


def run_model(bench: Bench, graph: Graph, what: str) -> None:
    model = Model(graph, bench.args.channels, bench.args.hidden)
    title = {
        'step': 'Training step of a GCN', 'inference': 'Inference of a GCN',
        'aggregations': 'Inference of a GCN, its aggregations alone'}[what]
    names = STRATEGIES if what == 'step' else (*STRATEGIES, INT8)
    samples = bench.args.model_samples
    bench.measure_over(
        f'{title}, {model.widths[0]} to {model.widths[1]} to {CLASSES}, float32',
        model.graph.name, {s: model.contenders(what, s, names) for s in samples},
        [*model.contenders(what, samples[0], [FULL]), *[model.pyg()] * (what == 'inference')],
        bench.kernel if what == 'aggregations' else bench.wall, label='S', memory=what == 'step',
        pairs=[(FASTRAND, FULL), *((name, FULL) for name in names if name != FASTRAND),
               (UNBIASED, FASTRAND), (ADAPTIVE, FASTRAND)])


def run_training(bench: Bench, graph: Graph) -> None:
    for width in bench.args.widths:
        run_training_op(bench, graph, width)
    run_model(bench, graph, 'step')


def run_inference(bench: Bench, graph: Graph) -> None:
    run_model(bench, graph, 'aggregations')
    run_model(bench, graph, 'inference')


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'sampled', __doc__, argv, parts=('kernels', 'training', 'inference'), graphs=(),
        samples=Option(SAMPLES, _harness.integers, 'edges S taken of each row, at most'),
        widths=Option({'quick': (64,), 'usual': (256,)}, _harness.integers, 'columns F'),
        dtypes=_harness.names('dtype', DTYPES, ('float32',)),
        model_samples=Option((32,), _harness.integers, 'S of the GCN'),
        channels=Option(CHANNELS, help='input channels of the GCN'),
        hidden=Option(HIDDEN, help='hidden channels of the GCN'), notes=[
            f'"{FULL}": all edges by pyg_fast. Kernels: the graph is prepared for all, and all '
            f'but "{UNWEIGHTED}" read edge weights. "{GIVEN.strip(": ")}": a product with the '
            'graph of the edges that fastrand takes; the time of these rows is without '
            f'"{MAKING}", which is the time that pyg_fast needs to make this graph. int8: codes '
            f'and scales are given except in "{ROUNDED}"; "{FULL}" reads float32. Samples are '
            'compared with the reference in Python on some rows, results with float64.',
            'Training: forward and backward with the draw, without an optimizer. The GCN has two '
            f'layers on random features and samples in training too. "{INT8}" rounds at every '
            'call. Its aggregations include scales, loops and bias.'])
    bench.run_parts(
        {'kernels': run_kernels, 'training': run_training, 'inference': run_inference},
        {'kernels': spmm.DEFAULT_GRAPHS, 'training': MODEL_GRAPHS, 'inference': MODEL_GRAPHS})
    bench.finish()


if __name__ == '__main__':
    main()
