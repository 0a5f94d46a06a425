"""Execution paths: backward aggregation of the last layer, models, depth, preparation.

python -m benchmarks paths                    everything below
python -m benchmarks paths --quick            a minute or less
python -m benchmarks paths --parts kernels    the backward aggregation of the last layer
python -m benchmarks paths --parts models     backward passes and whole steps of GCNs
python -m benchmarks paths --parts depth      GCNs with more layers
python -m benchmarks paths --parts prepare    time and memory of the preparation
python -m benchmarks paths --parts groups     group sizes, and the choices of GroupSizes
python -m benchmarks paths --parts accuracy   test accuracy with and without paths
"""
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from pyg_fast.datasets import PlantedGraph
from pyg_fast.graph import ExecutionPath, execution_paths
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.ops._library import ops
from pyg_fast.ops.product import raw_product
from pyg_fast.sparse.operator import SparseOperator
from pyg_fast.transforms import ToCSR
from pyg_fast.transforms.group_sizes import SIZES, choose_group_size

from . import _cusparse, _graphs, _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option, norm_error

GRAPHS = {
    'quick': ('tiny',), 'cpu': ('Computers', 'tolokers'),
    'cuda': ('reddit-like', 'products-like', 'arxiv-like', 'moby')}
WIDTHS, HIDDEN = (16, 64), (16, 128)
SHARES = (0.1, 0.01)
IN_CHANNELS, NUM_CLASSES = 128, 40
GROUP_SIZES = (0, 8, 32, 128)
_TOLERANCE = 1e-4  # of the norm, for float32
_KINKED = 1e-3  # of models: rounding decides on which side of zero a ReLU is

PATH, ACTIVE, IF_ELSE = 'ours, path', 'ours, all edges', 'if-else'
CUSPARSE = 'cuSPARSE on the path'
BACKWARD, FORWARD, CACHED = 'path', 'path, forward too', 'and the input cached'
ACTIVE_ONLY = 'and active rows alone'
PLAIN, CACHED_ALONE = 'all active', 'all active, input cached'

# As in the paper: it reads every edge and skips those whose gradient is zero.
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


def grouped(size: int) -> str:
    return f'{PATH}, groups of {size}' if size else f'{PATH}, by rows'


class Problem:
    """A graph without loops and random training nodes, a share of all nodes."""

    def __init__(self, graph: Graph, share: float) -> None:
        graph = graph.without_loops()
        device = graph.col.device
        generator = torch.Generator(device=device).manual_seed(1)
        self.share, self.num_nodes = share, graph.num_nodes
        self.graph, self.edge_index = graph, graph.prepared
        self.mask = torch.rand(graph.num_nodes, generator=generator, device=device) < share
        self.mask[0] = True
        self.nodes = self.mask.nonzero().view(-1)
        self.device, self.random = device, graph.normal(2)

    def paths(self, num_layers: int, forward: bool = False) -> list[ExecutionPath]:
        return execution_paths(self.edge_index, self.mask, num_layers, forward=forward)

    def active(self, steps: int) -> Tensor:
        """The nodes from which paths of ``steps`` edges lead to training nodes."""
        src, dst = self.edge_index.as_tensor()
        active = self.mask
        for _ in range(steps):
            active = active.clone()
            active[src[active[dst]]] = True
        return active


# The aggregation of a layer's backward pass ------------------------------------------------------

class Aggregation:
    """The backward aggregation of a GCN layer without self-loops, which has ``above``
    layers above it.
    """

    def __init__(self, problem: Problem, width: int, above: int = 0) -> None:
        self.problem = problem
        self.graph = problem.graph.structure
        self.path = problem.paths(above + 1)[0]
        self.active = problem.active(above)
        self.scale = (self.graph.rowptr.diff() + 1).float().rsqrt()
        self.grad = problem.random(problem.num_nodes, width) * self.active.view(-1, 1)
        self.whole = SparseOperator(self.graph, None, self.scale, self.scale)
        self.expected = self.all_edges()()

    def all_edges(self) -> Callable[[], Tensor]:
        matrix = self.whole.t()
        return lambda: raw_product(matrix, self.grad)

    def placed(self, out: Tensor) -> Tensor:
        """The rows of a result on the path among those of all nodes."""
        path = self.path
        return out if path.src_nodes is None else ops.expand_rows(out, path.src_position, 0.0)

    def on_path(self, group_size: int | None = None) -> Callable[[], Tensor]:
        path, grad = self.path, self.grad
        if path.is_whole:
            return self.all_edges()
        matrix = self.whole.on(path).t()
        if group_size is not None:  # 0: by rows
            matrix = matrix._replace(graph=matrix.graph.with_groups(group_size or None, None))
        return lambda: raw_product(matrix, path.dst.of(grad), rows=path.src)

    def if_else(self) -> Callable[[], Tensor]:
        kernel = torch.cuda._compile_kernel(_IF_ELSE, 'if_else')
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
        t = self.whole.on(path).t()
        row = torch.arange(t.graph.num_dst, device=self.grad.device).repeat_interleave(
            t.graph.rowptr.diff().long())
        value = t.row_scale[row] * t.col_scale[t.graph.col.long()]
        given = path.dst.of(self.grad)
        product = _cusparse.SpMM(
            t.graph.rowptr, t.graph.col, value, given, algorithm, True)

        def run() -> Tensor:
            torch.index_select(self.grad, 0, path.dst_nodes, out=given)
            return self.placed(product())

        return run

    def check(self, out: Tensor) -> float:
        return norm_error([out], [self.expected.double()], _TOLERANCE)

    def contenders(self) -> list[Contender]:
        made = [Contender(PATH, self.on_path, True, self.check),
                Contender(ACTIVE, self.all_edges, True, self.check)]
        made += [Contender(grouped(size), functools.partial(self.on_path, size), True, self.check)
                 for size in GROUP_SIZES]
        if self.grad.is_cuda:
            made.append(Contender(IF_ELSE, self.if_else, check=self.check))
            if not self.path.is_whole:
                made += [Contender(f'{CUSPARSE} {name}', functools.partial(self.cusparse, name),
                                   check=self.check) for name in _cusparse.ALGORITHMS]
        return made


def run_kernels(bench: Bench, graph: Graph) -> None:
    for share, above, width in itertools.product(bench.args.shares, range(2), WIDTHS):
        bench.measure(
            'Backward aggregation of the ' + ('last layer', 'layer below')[above],
            f'{graph.name}, {share:.0%}', width,
            Aggregation(Problem(graph, share), width, above).contenders(), bench.kernel,
            pairs=[(PATH, ACTIVE)])


def run_groups(bench: Bench, graph: Graph, share: float = 0.1) -> None:
    """All group sizes on the path of the last layer; a note tells what each strategy chooses."""
    case = Aggregation(Problem(graph, share), HIDDEN[0])
    t = case.path.graph.t()
    choose = functools.partial(choose_group_size, t.rowptr, t.num_src, HIDDEN[0])
    choices = {
        'always 32': 32, 'regression of the paper': choose(coefficients='paper'),
        'regression, fitted': choose()}
    sizes = dict.fromkeys([0, *((32,) if bench.quick else SIZES), *filter(None, choices.values())])
    results = bench.measure(
        f'Group sizes, {share:.0%} training', graph.name, HIDDEN[0], [
            Contender(grouped(size), functools.partial(case.on_path, size), True, case.check)
            for size in sizes], bench.kernel)
    best = min(result.median_ms or math.inf for result in results.values())
    bench.note(f'{graph.name}, time over that of the best group size: ' + ', '.join(
        f'{how} {(results[grouped(size or 0)].median_ms or math.inf) / best:.2f}'
        for how, size in choices.items()) + '.')


# Models ------------------------------------------------------------------------------------------

class Model:
    """A GCN on random features: its steps with and without paths."""

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
            alone = name == ACTIVE_ONLY
            out = net(x, self.problem.edge_index, paths=paths, active_only=alone)
            return F.cross_entropy(
                out if alone else out.index_select(0, self.problem.nodes), self.target)

        return loss, list(net.parameters())

    def step(
        self, name: str, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], tuple[Tensor, ...]]:
        return _harness.with_gradients(*self.loss(name, dtype))

    def backward(self, name: str) -> Callable[[], tuple[Tensor, ...]]:
        loss, parameters = self.loss(name)
        value = loss()
        return lambda: torch.autograd.grad(value, parameters, retain_graph=True)

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PLAIN, torch.double)()

    def contenders(self, names: Sequence[str], backward: bool) -> list[Contender]:
        make = self.backward if backward else self.step
        right = self.expected[1:] if backward else self.expected
        return [Contender(name, functools.partial(make, name), True,
                          lambda out: norm_error(out, right, _KINKED)) for name in names]


def run_models(bench: Bench, graph: Graph) -> None:
    names = (PLAIN, BACKWARD, FORWARD, CACHED_ALONE, CACHED, ACTIVE_ONLY)
    ways = {'launches hidden': bench.kernel} if bench.cuda else {}
    for share, width in itertools.product(bench.args.shares, bench.args.hidden):
        model = Model(Problem(graph, share), width)
        for (way, settings), (what, some) in itertools.product(
                {**ways, 'eager': bench.wall}.items(),
                {'backward pass': names[:2], 'whole step': names}.items()):
            bench.measure(
                f'2-layer GCN, {way}, {what}', f'{graph.name}, {share:.0%}', width,
                model.contenders(some, what != 'whole step'), settings, label='hidden',
                memory=what == 'whole step', pairs=[(name, PLAIN) for name in some[1:]])


def run_depth(bench: Bench, graph: Graph, share: float = 0.1) -> None:
    names = (PLAIN, BACKWARD, FORWARD)
    problem, hidden = Problem(graph, share), bench.args.hidden[0]
    for depth in bench.args.depths:
        bench.measure(
            f'GCN, {share:.0%} training, over its depth, whole step',
            f'{graph.name}, hidden {hidden}', depth,
            Model(problem, hidden, depth).contenders(names, False), bench.kernel, label='layers',
            pairs=[(name, PLAIN) for name in names[1:]])


def run_preparation(bench: Bench, graph: Graph, share: float = 0.1) -> None:
    problem, hidden = Problem(graph, share), bench.args.hidden[-1]
    made = [Contender('preparing', lambda: lambda: problem.paths(2), True),
            *Model(problem, hidden).contenders((PLAIN,), False)]
    bench.measure(
        f'Preparing the paths of 2 layers beside a step of training, {share:.0%} training',
        graph.name, hidden, made, label='hidden', pairs=[('preparing', PLAIN)])
    bench.note(f'{graph.name}, {share:.0%}: ' + '; '.join(map(repr, problem.paths(2))))


# Accuracy ----------------------------------------------------------------------------------------

def trained(
    data: Data, mask: Tensor, paths: list[ExecutionPath] | None, epochs: int,
) -> tuple[float, float]:
    """The test accuracy in percent and the last loss."""
    torch.manual_seed(0)
    model = PathPreparedGNN('gcn', data.x.size(1), HIDDEN[0], int(data.y.max()) + 1,
                            num_layers=2, dropout=0.5).to(mask.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    step = _harness.descent(optimizer, lambda: F.cross_entropy(
        model(data.x, data.edge_index, paths=paths)[mask], data.y[mask]))
    loss = float(_harness.repeated(step, epochs)())
    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(1) == data.y
    return 100 * float(right[~mask].float().mean()), loss


def run_accuracy(bench: Bench, share: float = 0.1) -> None:
    """A share of the nodes trains, all others are tested."""
    for name in ('planted',) if bench.quick else ('Cora', 'CiteSeer', 'PubMed'):
        try:
            data = PlantedGraph('small')[0] if name == 'planted' else _graphs.dataset(name)
        except _graphs.Missing as reason:
            bench.report.left_out[name] = str(reason)
            continue
        data = ToCSR()(Data(x=data.x, y=data.y, edge_index=data.edge_index)).to(bench.device)
        generator = torch.Generator().manual_seed(0)
        mask = (torch.rand(data.num_nodes, generator=generator) < share).to(bench.device)
        epochs = 10 if bench.quick else 100
        found = {
            PLAIN: trained(data, mask, None, epochs),
            BACKWARD: trained(data, mask, execution_paths(data.edge_index, mask, 2), epochs)}
        bench.add('Test accuracy of a GCN, %, and the last loss', name, epochs, {}, label='epochs',
                  facts={f'{way}, {what}': value for way, values in found.items()
                         for what, value in zip(('%', 'loss'), values, strict=True)})


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'paths', __doc__, argv, graphs=GRAPHS,
        parts=('kernels', 'models', 'depth', 'prepare', 'groups', 'accuracy'),
        shares=Option(SHARES, lambda text: tuple(map(float, text.split(','))), 'that train'),
        hidden=Option({'quick': HIDDEN[:1], 'usual': HIDDEN}, _harness.integers, 'channels'),
        depths=Option({'quick': (1, 2), 'usual': (1, 2, 3, 4)}, _harness.integers, 'layers'),
        notes=[
            'float32. Aggregations: from a gradient of all nodes to a gradient of all nodes, with '
            "GCN's scales; graphs and scales are prepared. Models: steps without an optimizer, by "
            'wall time ("eager") and on a GPU also without launches, as in a CUDA graph. '
            f'{IN_CHANNELS} -> hidden -> {NUM_CLASSES} channels, constant features, cross entropy '
            'on random training nodes. Compared with float64 on all edges.'])
    bench.run_parts({
        'kernels': run_kernels, 'models': run_models, 'depth': run_depth,
        'prepare': run_preparation, 'groups': run_groups})
    if bench.has('accuracy'):
        run_accuracy(bench)
    bench.finish()


if __name__ == '__main__':
    main()
