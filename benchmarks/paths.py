"""Execution paths: the aggregation of the last layer's backward pass, models, preparation.

python -m benchmarks.paths             everything below
python -m benchmarks.paths --quick     a minute or less
python -m benchmarks.paths --kernels   the backward aggregation of the last layer and nothing else
python -m benchmarks.paths --models    likewise: backward passes and whole steps of GCNs
python -m benchmarks.paths --depth     likewise: over depths, where it does not pay any more
python -m benchmarks.paths --prepare   likewise: preparation in steps of training, and memory
"""
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_fast.graph import ExecutionPath, execution_paths, prepare_edge_index
from pyg_fast.graph.graph import graph_of
from pyg_fast.graph.operator import SparseOperator
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.ops._library import ops
from pyg_fast.ops.product import raw_product

from . import _cusparse, _graphs, _harness
from ._graphs import Graph
from ._harness import Cell, Contender, Result, Settings, Versus
from .maxk import worst

KERNEL_GRAPHS = {'cuda': ('reddit-like', 'products-like', 'arxiv-like', 'moby'),
                 'cpu': ('Computers', 'tolokers')}
MODEL_GRAPHS = {'cuda': ('arxiv-like', 'products-like', 'moby', 'reddit-like'),
                'cpu': ('Computers', 'tolokers')}
QUICK_GRAPHS = ('tiny',)
WIDTHS, HIDDEN = (16, 64), (16, 128)
SHARES = (0.1, 0.01)
DEPTHS = (1, 2, 3, 4)
IN_CHANNELS, NUM_CLASSES = 128, 40
GROUP_SIZES = (0, 8, 32, 128)
_TOLERANCE = 1e-4  # of the norm, for float32
_KINKED = 1e-3  # likewise, of models: rounding decides where a ReLU bends

PATH, ACTIVE, IF_ELSE = 'ours, path', 'ours, all edges', 'if-else'
CUSPARSE = 'cuSPARSE on the path'
BACKWARD, FORWARD, CACHED = 'path', 'path, forward too', 'and the input cached'
ACTIVE_ONLY = 'and active rows alone'
PLAIN, CACHED_ALONE = 'all active', 'all active, input cached'

# As in the paper: every edge is read, those whose gradient is zero are skipped.
_IF_ELSE = r"""
extern "C" __global__ void if_else(const int* rowptr, const int* col, const bool* active,
                                   const float* scale, const float* grad, float* out, int rows,
                                   int dim) {
  const int lane = threadIdx.x & 31;
  for (int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < rows;
       row += gridDim.x * blockDim.x / 32) {
    for (int c = lane; c < dim; c += 32) {
      float sum = 0;
      for (int e = rowptr[row]; e < rowptr[row + 1]; ++e) {
        const int v = col[e];
        if (active[v]) sum += scale[v] * grad[(long long)v * dim + c];
      }
      out[(long long)row * dim + c] = sum * scale[row];
    }
  }
}
"""


@functools.cache
def _if_else_kernel() -> Callable[..., None]:
    return torch.cuda._compile_kernel(_IF_ELSE, 'if_else')


def grouped(size: int) -> str:
    return f'{PATH}, groups of {size}' if size else f'{PATH}, by rows'


def log(graph: str, title: str, results: dict[str, Result]) -> None:
    _harness.log(f'{graph}, {title}: ' + ', '.join(
        f'{name} {result.text()}' for name, result in results.items()))


def norm_error(
    outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float,
) -> float:
    return worst(
        float((out.double() - right).norm() / (tolerance * right.norm().clamp(min=1e-12)))
        for out, right in zip(outputs, expected, strict=True))


class Problem:
    """A graph without loops of which a share of the nodes trains, each with the same chance."""

    def __init__(self, graph: Graph, share: float) -> None:
        graph = graph.without_loops()
        device = graph.col.device
        generator = torch.Generator(device=device).manual_seed(1)
        self.share, self.num_nodes = share, graph.num_nodes
        self.edge_index = prepare_edge_index(graph.edge_index, (graph.num_nodes,) * 2)[0]
        self.mask = torch.rand(graph.num_nodes, generator=generator, device=device) < share
        self.mask[0] = True
        self.nodes = self.mask.nonzero().view(-1)
        self.device, self._generator = device, generator

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self._generator, device=self.device)

    def paths(self, num_layers: int, forward: bool = False) -> list[ExecutionPath]:
        return execution_paths(self.edge_index, self.mask, num_layers, forward=forward)


    def active(self, steps: int) -> Tensor:
        """The nodes from which so many steps lead to one that trains."""
        src, dst = self.edge_index.as_tensor()
        active = self.mask
        for _ in range(steps):
            active = active.clone()
            active[src[active[dst]]] = True
        return active


# The aggregation of a layer's backward pass ------------------------------------------------------

class Aggregation:
    """GCN's, without its self-loops, from a gradient of all nodes to one of all nodes.

    Args:
        problem: The graph and what trains.
        width: Of the gradient.
        above: How many layers lie above. (default: ``0``, the last layer)
    """

    def __init__(self, problem: Problem, width: int, above: int = 0) -> None:
        self.problem = problem
        self.graph = graph_of(problem.edge_index, problem.num_nodes, problem.num_nodes)
        self.path = problem.paths(above + 1)[0]
        self.active = problem.active(above)
        self.scale = (self.graph.rowptr.diff() + 1).float().rsqrt()
        self.grad = problem.random(problem.num_nodes, width) * self.active.view(-1, 1)
        whole = SparseOperator(self.graph, None, self.scale, self.scale)
        self.expected = self.all_edges(whole)()

    def all_edges(self, whole: SparseOperator) -> Callable[[], Tensor]:
        matrix = whole.t()
        return lambda: raw_product(matrix, self.grad)

    def on_path(self, group_size: int | None = None) -> Callable[[], Tensor]:
        path, grad = self.path, self.grad
        if path.is_whole:
            return self.all_edges(SparseOperator(self.graph, None, self.scale, self.scale))
        matrix = SparseOperator(self.graph, None, self.scale, self.scale).on(path).t()
        if group_size is not None:  # 0: by rows
            matrix = matrix._replace(graph=matrix.graph.with_groups(group_size or None, None))

        def run() -> Tensor:
            out = raw_product(matrix, path.dst.of(grad))
            return out if path.src_nodes is None else ops.expand_rows(out, path.src_position, 0.0)

        return run

    def if_else(self) -> Callable[[], Tensor]:
        kernel = _if_else_kernel()
        num_nodes, width = self.grad.shape
        blocks = min((num_nodes + 7) // 8, 1 << 20)
        graph = self.graph.t()

        def run() -> Tensor:
            out = torch.empty_like(self.grad)
            kernel((blocks, 1, 1), (256, 1, 1), (
                graph.rowptr, graph.col, self.active, self.scale, self.grad, out, num_nodes,
                width))
            return out

        return run

    def cusparse(self, algorithm: str) -> Callable[[], Tensor]:
        path = self.path
        t = SparseOperator(self.graph, None, self.scale, self.scale).on(path).t()
        row = torch.arange(t.graph.num_dst, device=self.grad.device).repeat_interleave(
            t.graph.rowptr.diff().long())
        value = t.row_scale[row] * t.col_scale[t.graph.col.long()]
        given = path.dst.of(self.grad)
        product = _cusparse.SpMM(
            t.graph.rowptr, t.graph.col, value, given, algorithm, True)

        def run() -> Tensor:
            torch.index_select(self.grad, 0, path.dst_nodes, out=given)
            out = product()
            return out if path.src_nodes is None else ops.expand_rows(out, path.src_position, 0.0)

        return run

    def check(self, out: Tensor) -> float:
        return norm_error([out], [self.expected.double()], _TOLERANCE)

    def contenders(self) -> list[Contender]:
        whole = SparseOperator(self.graph, None, self.scale, self.scale)
        made = [Contender(PATH, self.on_path, True, self.check),
                Contender(ACTIVE, lambda: self.all_edges(whole), True, self.check)]
        made += [Contender(grouped(size), functools.partial(self.on_path, size), True, self.check)
                 for size in GROUP_SIZES]
        if self.grad.is_cuda:
            made.append(Contender(IF_ELSE, self.if_else, check=self.check))
            if not self.path.is_whole:
                made += [Contender(f'{CUSPARSE} {name}', functools.partial(self.cusparse, name),
                                   check=self.check) for name in _cusparse.ALGORITHMS]
        return made


def run_kernels(
    graph: Graph, widths: Sequence[int], shares: Sequence[float], settings: Settings,
    report: _harness.Report,
) -> None:
    rivals = [f'{CUSPARSE} {name}' for name in _cusparse.ALGORITHMS]
    section = report.section(
        'Backward aggregation of the last layer',
        columns={PATH: [PATH], **{grouped(size): [grouped(size)] for size in GROUP_SIZES},
                 ACTIVE: [ACTIVE], IF_ELSE: [IF_ELSE], CUSPARSE: rivals},
        versus=[Versus(ACTIVE, PATH, [ACTIVE]), Versus(IF_ELSE, PATH, [IF_ELSE]),
                Versus(CUSPARSE, PATH, rivals)])
    for share in shares:
        problem = Problem(graph, share)
        for width in widths:
            case = Aggregation(problem, width)
            results = _harness.measure(case.contenders(), settings)
            name = f'{graph.name}, {share:.0%}'
            section.cells.append(Cell(name, width, results))
            log(name, f'F={width}', results)
            del case


# Models ------------------------------------------------------------------------------------------

class Model:
    """A GCN on random features, its steps with and without paths."""

    def __init__(self, problem: Problem, hidden: int, num_layers: int = 2) -> None:
        self.problem, self.num_layers = problem, num_layers
        self.x = problem.random(problem.num_nodes, IN_CHANNELS)
        self.target = torch.arange(problem.nodes.numel(), device=problem.device) % NUM_CLASSES
        torch.manual_seed(1)
        self.widths = IN_CHANNELS, hidden, NUM_CLASSES
        self.state = self.net().state_dict()
        self.paths = {
            False: problem.paths(num_layers), True: problem.paths(num_layers, forward=True)}

    def net(self) -> nn.Module:
        net = PathPreparedGNN('gcn', *self.widths, num_layers=self.num_layers)
        return net.to(self.problem.device)

    def loss(
        self, name: str, dtype: torch.dtype = torch.float32,
    ) -> tuple[Callable[[], Tensor], list[nn.Parameter]]:
        net = self.net()
        net.load_state_dict(self.state)
        net.to(dtype)
        paths = None if name in (PLAIN, CACHED_ALONE) else self.paths[name != BACKWARD]
        x = self.x.to(dtype)
        if name in (CACHED, CACHED_ALONE, ACTIVE_ONLY):
            x = net.aggregate_input(x, self.problem.edge_index)

        def loss() -> Tensor:
            if name == ACTIVE_ONLY:
                out = net(x, self.problem.edge_index, paths=paths, active_only=True)
                return F.cross_entropy(out, self.target)
            out = net(x, self.problem.edge_index, paths=paths)
            return F.cross_entropy(out.index_select(0, self.problem.nodes), self.target)

        return loss, list(net.parameters())

    def step(
        self, name: str, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], tuple[Tensor, ...]]:
        loss, parameters = self.loss(name, dtype)

        def run() -> tuple[Tensor, ...]:
            value = loss()
            return value.detach(), *torch.autograd.grad(value, parameters)

        return run

    def backward(self, name: str) -> Callable[[], tuple[Tensor, ...]]:
        loss, parameters = self.loss(name)
        value = loss()

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(value, parameters, retain_graph=True)

        return run

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PLAIN, torch.double)()

    def contenders(self, names: Sequence[str], backward: bool) -> list[Contender]:
        make = self.backward if backward else self.step
        right = self.expected[1:] if backward else self.expected
        return [Contender(name, functools.partial(make, name), True,
                          lambda out: norm_error(out, right, _KINKED)) for name in names]


def run_models(
    graph: Graph, hidden: Sequence[int], shares: Sequence[float], settings: Settings,
    report: _harness.Report,
) -> None:
    title = '2-layer GCN' + (', launches hidden' if settings.device_time else ', eager')
    backward = report.section(
        f'{title}, backward pass', columns={name: [name] for name in (PLAIN, BACKWARD)},
        width='hidden', versus=[Versus(PLAIN, BACKWARD, [PLAIN])])
    names = (PLAIN, BACKWARD, FORWARD, CACHED_ALONE, CACHED, ACTIVE_ONLY)
    step = report.section(
        f'{title}, whole step', columns={name: [name] for name in names}, width='hidden',
        memory=True, versus=[Versus(PLAIN, name, [PLAIN]) for name in names[1:]])
    for share in shares:
        problem = Problem(graph, share)
        for width in hidden:
            model = Model(problem, width)
            cell = f'{graph.name}, {share:.0%}'
            results = _harness.measure(model.contenders((PLAIN, BACKWARD), True), settings)
            backward.cells.append(Cell(cell, width, results))
            log(cell, f'hidden {width}, backward', results)
            results = _harness.measure(model.contenders(names, False), settings)
            step.cells.append(Cell(cell, width, results))
            log(cell, f'hidden {width}, step', results)
            del model


def run_depth(
    graph: Graph, hidden: int, depths: Sequence[int], share: float, settings: Settings,
    report: _harness.Report,
) -> None:
    names = (PLAIN, BACKWARD, FORWARD)
    section = report.section(
        f'GCN, {share:.0%} training, over its depth, whole step', width='layers',
        columns={name: [name] for name in names},
        versus=[Versus(PLAIN, name, [PLAIN]) for name in (BACKWARD, FORWARD)])
    problem = Problem(graph, share)
    for depth in depths:
        model = Model(problem, hidden, depth)
        results = _harness.measure(model.contenders(names, False), settings)
        name = f'{graph.name}, hidden {hidden}'
        section.cells.append(Cell(name, depth, results))
        log(name, f'{depth} layers', results)
        del model


# Preparation -------------------------------------------------------------------------------------

def run_preparation(
    graph: Graph, hidden: int, share: float, settings: Settings, report: _harness.Report,
) -> None:
    section = report.section(
        f'Preparing the paths of 2 layers beside a step of training, {share:.0%} training',
        columns={'preparing': ['preparing'], PLAIN: [PLAIN]}, width='hidden',
        versus=[Versus('a step', 'preparing', [PLAIN])])
    problem = Problem(graph, share)
    model = Model(problem, hidden)
    step = model.contenders((PLAIN,), False)[0]

    def prepare() -> Callable[[], list[ExecutionPath]]:
        return lambda: problem.paths(2)

    results = _harness.measure([Contender('preparing', prepare, True), step], settings)
    section.cells.append(Cell(graph.name, hidden, results))
    log(graph.name, 'preparation', results)
    report.notes.append(f'{graph.name}, {share:.0%}: ' + '; '.join(map(repr, problem.paths(2))))


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser(__doc__.split('\n')[0])
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', _graphs.NAMES),
        help=f"of {', '.join(_graphs.NAMES)}")
    for name in ('kernels', 'models', 'depth', 'prepare'):
        parser.add_argument(f'--{name}', action='store_true', help='see above')
    args = parser.parse_args(argv)
    wall = _harness.start(args)
    kernel = dataclasses.replace(wall, device_time=True)
    asked = [name for name in ('kernels', 'models', 'depth', 'prepare') if getattr(args, name)]
    asked = asked or ['kernels', 'models', 'depth', 'prepare']
    report = _harness.Report('paths', args, [
        'Times in ms, medians, contenders taking turns, float32. Aggregations '
        + ('by CUDA events, launches hidden; ' if args.device == 'cuda' else '')
        + 'from a gradient of all nodes to one of all nodes, GCN\'s scales included, graphs and '
        'scales at hand. Models without an optimizer, by wall time ("eager")'
        + (' and likewise by CUDA events, as a CUDA graph would run them; depths by the latter: '
           if args.device == 'cuda' else ': ') +
        f'{IN_CHANNELS} -> hidden -> {NUM_CLASSES}, features constant, cross entropy on the '
        'training nodes, which are drawn at random. Compared with float64 on all edges.'])
    names = {
        name: args.graphs or (QUICK_GRAPHS if args.quick else graphs[args.device])
        for name, graphs in (
            ('kernels', KERNEL_GRAPHS), ('models', MODEL_GRAPHS), ('depth', MODEL_GRAPHS),
            ('prepare', MODEL_GRAPHS))}
    order = list(dict.fromkeys(itertools.chain(*(names[part] for part in asked))))
    hidden = HIDDEN[:1] if args.quick else HIDDEN
    for graph in _graphs.load_each(order, wall.device, report.left_out):
        report.graphs[graph.name] = graph.summary()
        if 'kernels' in asked and graph.name in names['kernels']:
            run_kernels(graph, WIDTHS, SHARES, kernel, report)
        if 'models' in asked and graph.name in names['models']:
            for settings in (kernel, wall) if args.device == 'cuda' else (wall,):
                run_models(graph, hidden, SHARES, settings, report)
        if 'depth' in asked and graph.name in names['depth']:
            run_depth(graph, hidden[0], DEPTHS[:2] if args.quick else DEPTHS, 0.1, kernel, report)
        if 'prepare' in asked and graph.name in names['prepare']:
            run_preparation(graph, hidden[-1], 0.1, wall, report)
        report.save()
    report.finish()


if __name__ == '__main__':
    main()
