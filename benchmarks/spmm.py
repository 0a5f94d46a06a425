"""Sums and maxima over neighbours: ours, cuSPARSE, torch.sparse, torch-sparse and PyG.

python -m benchmarks spmm                                 the whole grid, float32
python -m benchmarks spmm --quick                         a minute or less
python -m benchmarks spmm --reduce sum,max --backward     gradients too
python -m benchmarks spmm --graphs reddit-like --widths 64,256 --dtypes bfloat16
"""
import functools
import importlib.util
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_fast import ops

from . import _cusparse, _graphs, _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option

WIDTHS = (16, 32, 64, 128, 256, 512)
REDUCE = ('sum', 'max')
FORWARD, STEP = 'forward', 'forward + backward'
GRAD_X, GRAD_W = 'gradient of x', 'gradient of weights'
_CHUNK = 1 << 24  # elements compared at a time
_MAX_COLUMNS = 16  # of a maximum, compared
_EDGES_COMPARED = 1 << 16  # of a gradient of weights

OURS, PLAIN = 'ours', 'ours, unweighted'
CUSPARSE = [f'cuSPARSE {algorithm}' for algorithm in _cusparse.ALGORITHMS]
PREPROCESSED = [f'{name} preprocessed' for name in CUSPARSE]
TORCH, TORCH64 = 'torch.sparse', 'torch.sparse int64'  # int64: what PyG's conversions give
TORCH_SPARSE, SCATTER = 'torch-sparse', 'PyG scatter'
RIVALS = ('cuSPARSE', TORCH, TORCH_SPARSE, SCATTER)
DEFAULT_GRAPHS = {  # of most benchmarks
    'cuda': _graphs.GRID, 'cpu': _graphs.REAL,
    'quick': {'cuda': ('arxiv-like', 'Computers', 'ddi'), 'cpu': ('Computers', 'ddi')}}


class Case:
    """Inputs on one graph and dtype at the largest width, and their right results in float64.

    ``scale`` is the sum of the magnitudes of all terms: the allowed error depends on it.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype, width: int) -> None:
        normal = graph.normal()
        self.graph, self.dtype = graph, dtype
        self.x, self.grad = (normal(graph.num_nodes, width).to(dtype) for _ in range(2))
        self.weight = normal(graph.num_edges).abs().to(dtype)
        self.ones = torch.ones_like(self.weight)
        self.maxima: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._products: dict[tuple[str, bool], tuple[Tensor, Tensor]] = {}

    def aggregated(self, weight: str) -> tuple[Tensor, Tensor]:
        """The right sum and its scale."""
        return self._product(weight, self.x, transposed=False)

    def grad_x(self, weight: str) -> tuple[Tensor, Tensor]:
        """The right gradient of a sum and its scale."""
        return self._product(weight, self.grad, transposed=True)

    def _product(self, weight: str, x: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        if (weight, transposed) not in self._products:
            value = (self.weight if weight == 'weighted' else self.ones).double()
            matrix = self.graph.matrix(value, transposed)
            kept = torch.promote_types(self.dtype, torch.float32)
            self._products[weight, transposed] = (
                torch.sparse.mm(matrix, x.double()).to(kept),
                torch.sparse.mm(matrix, x.double().abs()).to(kept))  # no value is negative
        return self._products[weight, transposed]

    def grad_weight(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Positions of some edges, with the gradient and the scale there."""
        generator = torch.Generator(device=self.x.device).manual_seed(2)
        count = min(self.graph.num_edges, _EDGES_COMPARED)
        edge = torch.randint(
            max(self.graph.num_edges, 1), (count,), generator=generator, device=self.x.device)
        terms = (
            self.grad[self.graph.row[edge], :width].double()
            * self.x[self.graph.col[edge].long(), :width].double())
        return edge, terms.sum(1), terms.abs().sum(1)

    def maximum(self, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Some columns: maximum, gradient of x with its scale, and the error that ties allow."""
        graph = self.graph
        count = min(width, _MAX_COLUMNS, max(2, (1 << 27) // max(graph.num_edges, 1)))
        columns = torch.linspace(0, width - 1, count, device=self.x.device).long()
        row = graph.row.view(-1, 1).expand(-1, count)
        col = graph.col.long().view(-1, 1).expand(-1, count)
        x, grad = self.x[:, columns].double(), self.grad[:, columns].double()
        message = x.gather(0, col)
        best = torch.zeros_like(x).scatter_reduce_(0, row, message, 'amax', include_self=False)
        reached = (message == best.gather(0, row)).double()
        ties = torch.zeros_like(x).scatter_add_(0, row, reached)
        share = (grad / ties.clamp(min=1)).gather(0, row) * reached
        tied = (grad.abs() * (ties > 1)).gather(0, row) * reached
        zeros = torch.zeros_like(x)
        grad_x, scale, slack = (
            zeros.scatter_add(0, col, values) for values in (share, share.abs(), tied))
        return columns, best, torch.stack([grad_x, scale]), slack


def excess(
    out: Tensor, reference: Tensor, scale: Tensor, slack: Tensor | None = None,
) -> float:
    """The largest error of ``out``, divided by the error that rounding allows."""
    if out.shape != reference.shape:
        return float('inf')
    info = torch.finfo(out.dtype)
    sums = torch.finfo(torch.promote_types(out.dtype, torch.float32)).eps
    rounding = info.eps if info.bits < 32 else 0.0
    rows = max(1, _CHUNK // max(out[0].numel(), 1)) if out.numel() else 1
    worst = 0.0
    for first in range(0, out.size(0) if out.numel() else 0, rows):
        part = slice(first, first + rows)
        expected = reference[part].double()
        allowed = 32 * sums * scale[part].double() + rounding * expected.abs() + info.tiny
        if slack is not None:
            allowed += slack[part]
        ratio = float(((out[part].double() - expected).abs_() / allowed).max())
        if math.isnan(ratio):
            return float('inf')
        worst = max(worst, ratio)
    return worst


def gradient(out: Tensor, of: Tensor, grad: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.autograd.grad(out, of, grad, retain_graph=True)[0]


def step(forward: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Callable[[], Any]:
    x = x.detach().requires_grad_()
    return _harness.with_gradients(lambda: forward(x), x, grad)


def forwards(
    case: Case, reduce: str, width: int, scatter_limit: float,
) -> dict[str, Callable[[], Callable[[Tensor], Tensor]]]:
    """The implementations for this device except cuSPARSE; each makes a function of x."""
    graph, is_sum, cuda = case.graph, reduce == 'sum', case.x.is_cuda
    weight = case.weight if is_sum else None

    def ours(weight: Tensor | None) -> Callable[[Tensor], Tensor]:
        return lambda x: ops.spmm(graph.prepared, x, weight, reduce=reduce)

    def torch_sparse_mm(dtype: torch.dtype = torch.int) -> Callable[[Tensor], Tensor]:
        matrix = graph.matrix(case.weight if is_sum else case.ones, dtype=dtype)
        return lambda x: torch.sparse.mm(matrix, x, *[] if is_sum else ['amax'])

    def torch_sparse() -> Callable[[Tensor], Tensor]:
        from torch_sparse import matmul

        matrix = graph.sparse_tensor(weight)
        return lambda x: matmul(matrix, x, reduce=reduce)

    def pyg_scatter() -> Callable[[Tensor], Tensor]:
        src, dst = graph.edge_index

        def run(x: Tensor) -> Tensor:
            message = x.index_select(0, src)
            if weight is not None:
                message = weight.view(-1, 1) * message
            return scatter(message, dst, 0, graph.num_nodes, reduce)

        return run

    found: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        OURS: functools.partial(ours, weight)}
    if is_sum:
        found[PLAIN] = functools.partial(ours, None)
    if is_sum or not cuda:
        found[TORCH] = torch_sparse_mm
    if is_sum and not cuda:
        found[TORCH64] = functools.partial(torch_sparse_mm, torch.long)
    if importlib.util.find_spec('torch_sparse'):
        found[TORCH_SPARSE] = torch_sparse
    if graph.num_edges * width * case.x.element_size() <= scatter_limit * 2**30:
        found[SCATTER] = pyg_scatter
    return found


def contenders(
    case: Case, reduce: str, mode: str, width: int, scatter_limit: float,
) -> list[Contender]:
    """All contenders of one cell."""
    x, grad = case.x[:, :width].contiguous(), case.grad[:, :width].contiguous()

    def prepare(make: Callable[[], Callable[[Tensor], Tensor]]) -> Callable[[], Any]:
        forward = make()
        if mode == FORWARD:
            return lambda: forward(x)
        if mode == STEP:
            return step(forward, x, grad)
        leaf = x.detach().requires_grad_()
        return gradient(forward(leaf), leaf, grad)

    made: dict[str, Callable[[], Callable[[], Any]]]
    if mode == GRAD_W:
        weight = case.weight.detach().requires_grad_()
        made = {OURS: lambda: gradient(
            ops.spmm(case.graph.prepared, x, weight), weight, grad)}
    else:
        made = {name: functools.partial(prepare, make)
                for name, make in forwards(case, reduce, width, scatter_limit).items()}
        if x.is_cuda and reduce == 'sum':
            made |= cusparse_ways(case, mode, x, grad)
    return [Contender(name, make, name in (OURS, PLAIN), checker(
        case, reduce, mode, width, 'unweighted' if name == PLAIN else 'weighted'))
        for name, make in made.items()]


def cusparse_ways(
    case: Case, mode: str, x: Tensor, grad: Tensor,
) -> dict[str, Callable[[], Any]]:
    graph, value = case.graph, case.weight

    def make(algorithm: str, preprocess: bool) -> Callable[[], Any]:
        products = []
        if mode != GRAD_X:
            products.append(
                _cusparse.SpMM(graph.rowptr, graph.col, value, x, algorithm, preprocess))
        if mode != FORWARD:
            rowptr, col, perm = graph.transpose
            products.append(_cusparse.SpMM(rowptr, col, value[perm], grad, algorithm, preprocess))
        return (lambda: tuple(run() for run in products)) if mode == STEP else products[0]

    return {
        name: functools.partial(make, algorithm, preprocess)
        for names, preprocess in ((CUSPARSE, False), (PREPROCESSED, True))
        for name, algorithm in zip(names, _cusparse.ALGORITHMS, strict=True)}


def checker(
    case: Case, reduce: str, mode: str, width: int, weight: str,
) -> Callable[[Any], float]:
    def check(output: Any) -> float:
        if mode == GRAD_W:
            edge, expected, scale = case.grad_weight(width)
            return excess(output[edge], expected, scale)
        out, grad_x = {FORWARD: (output, None), GRAD_X: (None, output)}.get(mode, output)
        if reduce == 'sum':
            return _harness.worst(
                excess(part, *(each[:, :width] for each in reference(weight)))
                for part, reference in ((out, case.aggregated), (grad_x, case.grad_x))
                if part is not None)
        if width not in case.maxima:
            case.maxima[width] = case.maximum(width)
        columns, best, (expected, scale), slack = case.maxima[width]
        return _harness.worst(
            excess(part[:, columns], *right)
            for part, right in ((out, (best, best.abs())), (grad_x, (expected, scale, slack)))
            if part is not None)

    return check


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'spmm', __doc__, argv, graphs=DEFAULT_GRAPHS,
        widths=Option({'quick': (16, 64), 'usual': WIDTHS}, _harness.integers, 'features'),
        dtypes=_harness.names('dtype', tuple(_harness.DTYPES), ('float32',)),
        reduce=_harness.names('reduction', REDUCE, ('sum',)),
        backward=Option(False, help='gradients too'),
        scatter_limit=Option(
            {'cuda': 4.0, 'cpu': 2.0}, float, 'GiB of messages that a rival may store'),
        notes=['The graph is prepared beforehand for all contenders. Sums read edge weights, '
               f'except "{PLAIN}"; maxima have none.'])
    args = bench.args
    for graph, dtype in ((graph, dtype) for graph in bench.graphs() for dtype in args.dtypes):
        case = Case(graph, _harness.DTYPES[dtype], max(args.widths))
        for reduce, mode, width in itertools.product(
                args.reduce, (FORWARD, STEP, GRAD_X, GRAD_W)[:4 if args.backward else 1],
                args.widths):
            if mode in (GRAD_X, GRAD_W) and reduce == 'max':
                continue
            bench.measure(
                f'{reduce}, {mode}, {dtype}', graph.name, width,
                contenders(case, reduce, mode, width, args.scatter_limit), bench.kernel)
        del case  # frees its reference results
    bench.finish()


if __name__ == '__main__':
    main()
