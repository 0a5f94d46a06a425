"""MaxK: the kernels over k, the selection, and whole training steps.

python -m benchmarks maxk                                      everything below
python -m benchmarks maxk --quick                              a minute or less
python -m benchmarks maxk --parts kernels                      aggregation of CBSR features
python -m benchmarks maxk --parts select                       the k largest of each row
python -m benchmarks maxk --parts training --models sage,gcn,gin
python -m benchmarks maxk --graphs reddit-like --dtypes float32,bfloat16
"""
import functools
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

import pyg_fast.nn as fast
from pyg_fast import ops
from pyg_fast.ops import CBSR
from pyg_fast.ops._library import reference
from pyg_fast.ops.product import _CACHE_BYTES, _CACHED_DEGREE, _DENSE_SHARE, _OF_CACHED_ROWS

from . import _harness, layers, spmm
from ._graphs import Graph, normal
from ._harness import Bench, Contender, Option, Result, same
from .spmm import FORWARD, excess

K = {'quick': (8, 32), 'usual': (2, 4, 8, 16, 32, 64, 96, 128, 192)}
SELECT_WIDTHS = {'quick': (256,), 'usual': (64, 128, 256, 512, 1024)}
CONVS: dict[str, Sequence[type[nn.Module]]] = {  # with MaxK, with ReLU, of PyG
    'sage': (fast.MaxKSAGEConv, fast.PathPreparedSAGEConv, SAGEConv),
    'gcn': (fast.MaxKGCNConv, fast.PathPreparedGCNConv, GCNConv),
    'gin': (fast.MaxKGINConv, fast.PathPreparedGINConv, GINConv)}
CHANNELS, CLASSES = 602, 41  # of Reddit
GRADIENT = 'gradient of the values'
TOLERANCE = 2e-2  # of a gradient's norm: rounding may swap entries that are nearly equal
_ROWS_SELECTED = 1 << 13  # compared of a selection

OURS, UNWEIGHTED, BALANCED = 'ours', 'ours, unweighted', 'ours, balanced'
ORDERED, AS_DENSE, DENSE = 'ours, deterministic', 'ours, as dense', 'ours, spmm'
TOPK, COPY = 'torch.topk', 'copy of as many bytes'
MAXK, MAXK_BALANCED, RELU = 'ours, MaxK', 'ours, MaxK balanced', 'ours, ReLU'
MAXK_ROOT = 'ours, MaxK of roots too'  # as in the paper
AGGREGATIONS = 'aggregations of ours, ReLU'
EDGE_INDEX, CSR, SPARSE_TENSOR = 'PyG edge_index', layers.CSR, layers.SPARSE_TENSOR

kernels = torch.ops.pyg_fast


def spread(count: int, size: int, device: torch.device) -> Tensor:
    """``count`` positions at equal distances from the first to the last of ``size``."""
    count = min(count, size)
    return torch.arange(count, device=device) * (size - 1) // max(count - 1, 1)


# Kernels ----------------------------------------------------------------------------------------

class Case(spmm.Case):
    """Inputs on one graph, in one dtype, at one width, with the k largest entries of x."""

    def __init__(self, graph: Graph, dtype: torch.dtype, width: int) -> None:
        super().__init__(graph, dtype, width)
        self.width = width
        self._largest: dict[tuple[int, bool], CBSR] = {}

    def largest(self, k: int, balanced: bool = False) -> CBSR:
        if (k, balanced) not in self._largest:
            self._largest[k, balanced] = ops.maxk(self.x, k, balanced)
        return self._largest[k, balanced]

    def error(self, out: Tensor, cbsr: CBSR, weight: Tensor) -> float:
        """The error of an aggregation."""
        x = reference.cbsr_to_dense(cbsr.values, cbsr.columns, self.width)
        matrix = self.graph.matrix(weight.double())
        return excess(out, torch.sparse.mm(matrix, x), torch.sparse.mm(matrix, x.abs()))

    def grad_error(self, out: Tensor, cbsr: CBSR) -> float:
        """The error of a gradient of the values."""
        columns = cbsr.columns.long()
        return excess(out, *(full.gather(1, columns) for full in self.grad_x('weighted')))


def forwards(case: Case, k: int) -> list[Contender]:
    csr, width = case.graph.structure[:3], case.width

    def entries(cbsr: CBSR, weight: Tensor | None) -> Tensor:
        return kernels.cbsr_spmm(
            *csr, weight, cbsr.values, cbsr.columns, width, None, None, None, None, False, False)

    def rows(cbsr: CBSR, weight: Tensor | None) -> Tensor:
        x = kernels.cbsr_to_dense(cbsr.values, cbsr.columns, width)
        return kernels.spmm(*csr, weight, x, None, None, None, None, False, False)

    return [
        Contender(name, functools.partial(functools.partial, run, cbsr, weight), True,
                  functools.partial(
                      case.error, cbsr=cbsr, weight=case.ones if weight is None else weight))
        for name, run, cbsr, weight in (
            (OURS, entries, case.largest(k), case.weight),
            (UNWEIGHTED, entries, case.largest(k), None),
            (BALANCED, entries, case.largest(k, True), case.weight),
            (AS_DENSE, rows, case.largest(k), case.weight))]


def gradients(case: Case, k: int) -> list[Contender]:
    weight, grad, graph = case.weight, case.grad, case.graph.structure
    csr, transpose = graph[:3], graph[3:6]

    def usual(columns: Tensor) -> Tensor:
        return kernels.cbsr_spmm_backward(*csr, weight, grad, columns, None, None, None, False)

    def ordered(columns: Tensor) -> Tensor:
        return kernels.cbsr_spmm_backward_ordered(
            *transpose, weight, grad, columns, None, None, None)

    def rows(columns: Tensor) -> Tensor:
        out = kernels.spmm(*transpose, weight, grad, None, None, None, None, False, False)
        return kernels.cbsr_sample(out, columns)

    return [
        Contender(name, functools.partial(functools.partial, run, cbsr.columns), ours=True,
                  check=functools.partial(case.grad_error, cbsr=cbsr))
        for name, run, cbsr in (
            (OURS, usual, case.largest(k)), (ORDERED, ordered, case.largest(k)),
            (BALANCED, usual, case.largest(k, True)), (AS_DENSE, rows, case.largest(k)))]


def all_columns(case: Case, mode: str, called: str = DENSE) -> list[Contender]:
    """Products with all columns of x, or with those of its gradient over the transposed graph;
    ``called``: the name of ours."""
    back = mode != FORWARD
    x = case.grad if back else case.x
    graph = case.graph.structure.t() if back else case.graph.structure
    expected = case.grad_x if back else case.aggregated

    def torch_sparse(dtype: torch.dtype) -> Callable[[], Tensor]:
        matrix = case.graph.matrix(case.weight, back, dtype)
        return lambda: torch.sparse.mm(matrix, x)

    def ours() -> Tensor:
        return kernels.spmm(*graph[:3], case.weight, x, None, None, None, None, False, False)

    made: dict[str, Callable[[], Callable[[], Tensor]]] = {called: lambda: ours}
    made |= spmm.cusparse_ways(
        case, spmm.GRAD_X if back else FORWARD, x, x) if x.is_cuda else {
            spmm.TORCH: lambda: torch_sparse(torch.int),
            spmm.TORCH64: lambda: torch_sparse(torch.long)}
    return [
        Contender(name, make, name == called, lambda out: excess(out, *expected('weighted')))
        for name, make in made.items()]


def run_kernels(bench: Bench, graph: Graph) -> None:
    args = bench.args
    for width in args.widths:
        for dtype in args.dtypes:
            case = Case(graph, _harness.DTYPES[dtype], width)
            for mode, make in ((FORWARD, forwards), (GRADIENT, gradients)):
                pairs = [(OURS, DENSE), (OURS, AS_DENSE), (BALANCED, OURS)]
                pairs += [(ORDERED, OURS)] * (mode == GRADIENT)
                bench.measure_over(
                    f'Aggregation at F={width}, {mode}, {dtype}', graph.name,
                    {k: make(case, k) for k in args.k if k <= width}, all_columns(case, mode),
                    bench.kernel, label='k', pairs=pairs)


# Selection --------------------------------------------------------------------------------------

class Selection:
    """A matrix, and the right result for some of its rows."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.x = normal(device)(num_rows, width).to(dtype)
        self.rows = spread(_ROWS_SELECTED, num_rows, device)

    def contenders(self, k: int) -> list[Contender]:
        x = self.x
        return [
            Contender(
                name, lambda balanced=balanced: lambda: kernels.maxk(x, k, balanced), ours=True,
                check=functools.partial(self.error, k=k, balanced=balanced))
            for name, balanced in ((OURS, False), (BALANCED, True))
        ] + [
            Contender(
                TOPK, lambda: lambda: torch.topk(x, k, sorted=False),
                check=lambda out: self.value_error(out[0], k)),
            Contender(COPY, functools.partial(self.copy, k)),
        ]

    def error(self, out: tuple[Tensor, Tensor], k: int, balanced: bool) -> float:
        values, columns = out
        if values.shape != (self.x.size(0), k) or columns.shape != values.shape:
            return float('inf')
        x = self.x[self.rows]
        order = columns.long()[self.rows].sort(1)  # torch indexes uint16 on few devices
        right_values, right_columns = reference.maxk(x, k, balanced)
        return same((order[0], right_columns.long()),
                    (values[self.rows].gather(1, order[1]), right_values))

    def value_error(self, values: Tensor, k: int) -> float:
        """The error of values in any order; of equal values any may be taken."""
        right = reference.maxk(self.x[self.rows], k, False)[0].sort(1)[0]
        return same((values[self.rows].sort(1)[0], right))

    def copy(self, k: int) -> Callable[[], Tensor]:
        """Reads and writes as many bytes in total as a selection must."""
        values, columns = kernels.maxk(self.x[:1], k, False)
        entry = values.element_size() + columns.element_size()
        moved = self.x.numel() * self.x.element_size() + self.x.size(0) * k * entry
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=self.x.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def run_selection(bench: Bench, graph: Graph) -> None:
    args, num_rows = bench.args, graph.num_nodes
    for dtype, width in itertools.product(args.dtypes, args.select_widths):
        selection = Selection(num_rows, width, _harness.DTYPES[dtype], bench.device)
        for k in (k for k in args.k if k <= width):
            bench.measure(
                f'Selection at F={width}, {dtype}', f'{num_rows:,} rows', k,
                selection.contenders(k), bench.kernel, label='k',
                pairs=[(BALANCED, TOPK), (BALANCED, COPY)])


# Training ---------------------------------------------------------------------------------------

class Net(nn.Module):
    """A linear map, graph layers between hidden channels, and a linear map."""

    def __init__(
        self, make: Callable[[], nn.Module], hidden: int, layers: int,
        before: Callable[[Tensor], Any] = torch.relu,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(CHANNELS, hidden)
        self.convs = nn.ModuleList(make() for _ in range(layers))
        self.last = nn.Linear(hidden, CLASSES)
        self.before = before  # each layer

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        x = self.first(x)
        for conv in self.convs:
            x = conv(self.before(x), graph)
        return self.last(x)


def largest_only(x: Tensor, k: int, balanced: bool) -> Tensor:
    """MaxK in torch's ops."""
    return reference.cbsr_to_dense(*reference.maxk(x, k, balanced), x.size(1))


class Training:
    """One model on one graph: data, initial weights, and all implementations."""

    def __init__(self, graph: Graph, model: str, hidden: int, num_layers: int) -> None:
        normal = graph.normal()
        # PyG counts self-loops that are there differently for each kind of input.
        self.graph = graph.without_loops() if model == 'gcn' else graph
        self.model, self.hidden, self.layers = model, hidden, num_layers
        self.inputs = layers.Inputs(self.graph)
        self.x = normal(graph.num_nodes, CHANNELS)
        self.target = normal(graph.num_nodes, CLASSES).argmax(1)
        self.state = self.pyg().state_dict()
        self._expected: dict[tuple[int | None, bool, bool], list[Tensor]] = {}

    def net(self, conv: type[nn.Module], before: Callable[[Tensor], Any] = torch.relu,
            **kwargs: Any) -> Net:
        hidden = self.hidden

        def make() -> nn.Module:
            if self.model == 'gin':
                return conv(nn.Linear(hidden, hidden), **kwargs)
            return conv(hidden, hidden, **kwargs)

        return Net(make, hidden, self.layers, before).to(self.x.device)

    def maxk(self, k: int, balanced: bool = False, root: bool = False) -> Net:
        options = {'maxk_root': True} if root else {}
        return self.net(CONVS[self.model][0], nn.Identity(), k=k, balanced=balanced, **options)

    def relu(self) -> Net:
        return self.net(CONVS[self.model][1])

    def pyg(self) -> Net:
        options: dict[str, Any] = {'cached': True} if self.model == 'gcn' else {}
        return self.net(CONVS[self.model][2], **options)

    def step(self, net: Net, graph: Any) -> Callable[[], list[Tensor]]:
        """A step, which returns the loss and all gradients."""
        net.load_state_dict(self.state)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        x = self.x.to(next(net.parameters()).dtype)
        run = _harness.descent(optimizer, lambda: F.cross_entropy(net(x, graph), self.target))
        return lambda: [run(), *(parameter.grad for parameter in net.parameters())]

    def expected(
        self, k: int | None, balanced: bool = False, root: bool = False,
    ) -> list[Tensor]:
        """Loss and gradients of the first step by PyG in float64, with MaxK if ``k`` is given."""
        key = k, balanced, root
        if key not in self._expected:
            net = self.pyg()
            net.load_state_dict(self.state)
            if k is not None and self.model == 'gcn':
                net.before = nn.Identity()
                for conv in net.convs:
                    conv.lin.register_forward_hook(lambda _, __, x: largest_only(x, k, balanced))
            elif root:
                net.before = lambda x: largest_only(x, k, balanced)
            elif k is not None:
                net.before = lambda x: (largest_only(x, k, balanced), x)
            self._expected[key] = self.step(net.double(), self.inputs.of(CSR).double())()
        return self._expected[key]

    def error(
        self, outputs: Sequence[Tensor], k: int | None = None, balanced: bool = False,
        root: bool = False,
    ) -> float:
        return _harness.norm_error(outputs, self.expected(k, balanced, root), TOLERANCE)

    def of_k(self, k: int) -> list[Contender]:
        variants = {MAXK: {}, MAXK_BALANCED: {'balanced': True}}
        if self.model != 'gcn':
            variants[MAXK_ROOT] = {'root': True}
        return [
            Contender(
                name, lambda options=options: self.step(
                    self.maxk(k, **options), self.graph.prepared), ours=True,
                check=functools.partial(self.error, k=k, **options))
            for name, options in variants.items()]

    def others(self, scatter_limit: float) -> list[Contender]:
        """The models with ReLU, and the aggregations of our model with ReLU alone."""
        names = [CSR, *[SPARSE_TENSOR] * bool(importlib.util.find_spec('torch_sparse'))]
        if self.graph.num_edges * self.hidden * 4 <= scatter_limit * 2**30:
            names.append(EDGE_INDEX)
        return [
            Contender(RELU, lambda: self.step(self.relu(), self.graph.prepared), True, self.error),
            Contender(AGGREGATIONS, self.aggregations, ours=True),
            *(Contender(name, lambda name=name: self.step(self.pyg(), self.inputs.of(name)),
                        check=self.error) for name in names)]

    def aggregations(self) -> Callable[[], Any]:
        """All aggregations of a step, forward and backward."""
        x = torch.ones(self.x.size(0), self.hidden, device=self.x.device)
        reduce = 'mean' if self.model == 'sage' else 'sum'
        once = spmm.step(lambda x: ops.spmm(self.graph.prepared, x, reduce=reduce), x, x)
        return _harness.repeated(once, self.layers)


def run_training(bench: Bench, graph: Graph) -> None:
    args = bench.args
    for model in args.models:
        training = Training(graph, model, args.hidden, args.layers)
        results = bench.measure_over(
            f'Training step, {model}, {args.layers} layers, hidden {args.hidden}', graph.name,
            {k: training.of_k(k) for k in args.training_k}, training.others(args.scatter_limit),
            bench.wall, label='k', memory=True,
            pairs=[(MAXK, RELU), (MAXK_BALANCED, MAXK), (MAXK_ROOT, RELU)])
        bench.note(amdahl(graph.name, model, results))


def amdahl(graph: str, model: str, results: Mapping[int, Mapping[str, Result]]) -> str:
    """The largest possible speed-up: that of an aggregation that takes no time."""
    cell = next(iter(results.values()))
    step, part = cell[RELU].median_ms, cell[AGGREGATIONS].median_ms
    assert step is not None
    assert part is not None
    limit = f'{step / (step - part):.2f}' if part < step else 'any number of'
    reached = ', '.join(
        f'{step / time:.2f} at k={k}' for k, cell in results.items()
        if (time := cell[MAXK].median_ms) is not None)
    return (
        f'{graph}, {model}: aggregations take {part / step:.0%} of the step of ours with ReLU. '
        f'Without them the step would be {limit} times as fast (Amdahl), with MaxK it is '
        f'{reached}.')


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'maxk', __doc__, argv, parts=('kernels', 'select', 'training'),
        graphs=spmm.DEFAULT_GRAPHS,
        k=Option(K, _harness.integers, 'entries kept of each row'),
        widths=Option((256,), _harness.integers, 'columns F'),
        dtypes=_harness.names('dtype', tuple(_harness.DTYPES), ('float32',)),
        select_widths=Option(SELECT_WIDTHS, _harness.integers, 'columns of select'),
        models=_harness.names('model', tuple(CONVS), ('sage',)),
        training_k=Option((32,), _harness.integers, 'entries kept in training'),
        hidden=Option({'quick': 64, 'usual': 256}, help='channels in training'),
        layers=Option(3, help='graph layers in training'),
        scatter_limit=Option(
            {'cuda': 4.0, 'cpu': 2.0}, float, 'GiB of messages that PyG may store in training'))
    forward, backward = _DENSE_SHARE[bench.args.device]
    cached = '' if bench.args.device == 'cuda' else (
        f' (k > {_OF_CACHED_ROWS * forward:.2g} F if x has at most {_CACHE_BYTES >> 20} MiB and '
        f'each row is read by {_CACHED_DEGREE} edges or more on average)')
    bench.note(
        'Aggregation: the k largest of F columns are given, the graph is prepared, and all but '
        f'"{UNWEIGHTED}" read edge weights. "{BALANCED}": the largest of columns equal modulo k. '
        f'"{AS_DENSE}": writes dense rows and aggregates them by spmm; ops.cbsr_spmm does so for '
        f'k > {forward:.2g} F in float32{cached}, and in the gradient for k > {backward:.2g} F. '
        f'"{DENSE}" and the rivals multiply all columns of x, or of the gradient over the '
        f'transposed graph, and run once for all k. "{ORDERED}": over the transposed graph. '
        'Compared with float64.',
        f'Selection: of random numbers. "{COPY}" reads and writes as many bytes as a selection '
        f'must. {_ROWS_SELECTED} rows are compared with float64.',
        f'Training: linear {CHANNELS} to hidden, the layers, linear to {CLASSES}; forward, cross '
        'entropy on all nodes, backward, Adam, on random features. Loss and gradients of the '
        "first step are compared with PyG's layers in float64.")
    bench.run_parts({'kernels': run_kernels, 'select': run_selection, 'training': run_training})
    bench.finish()


if __name__ == '__main__':
    main()
