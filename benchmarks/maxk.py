"""MaxK: its kernels over k, the selection itself, and whole training steps.

python -m benchmarks.maxk                           everything below
python -m benchmarks.maxk --quick                   a minute or less
python -m benchmarks.maxk --kernels                 aggregation of CBSR features and its gradient
python -m benchmarks.maxk --select --rows 232965    the k largest of each row, no graph needed
python -m benchmarks.maxk --training --models sage,gcn,gin
python -m benchmarks.maxk --graphs reddit-like --dtypes float32,bfloat16
"""
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv

from pyg_fast import ops
from pyg_fast.graph import prepare_edge_index
from pyg_fast.graph.graph import Graph as Structure
from pyg_fast.graph.graph import graph_of
from pyg_fast.nn import (
    MaxKGCNConv,
    MaxKGINConv,
    MaxKSAGEConv,
    PathPreparedGCNConv,
    PathPreparedGINConv,
    PathPreparedSAGEConv,
)
from pyg_fast.ops import CBSR
from pyg_fast.ops._library import reference
from pyg_fast.ops.product import _DENSE_SHARE

from . import _cusparse, _graphs, _harness, spmm
from ._graphs import Graph
from ._harness import Cell, Contender, Result, Settings, Versus
from .spmm import FORWARD, excess

K = (2, 4, 8, 16, 32, 64, 96, 128, 192)
QUICK_K = (8, 32)
WIDTHS = (256,)
SELECT_WIDTHS = (64, 128, 256, 512, 1024)
QUICK_SELECT_WIDTHS = (256,)
MODELS = ('sage', 'gcn', 'gin')
HIDDEN, QUICK_HIDDEN = 256, 64
CHANNELS, CLASSES = 602, 41  # of Reddit
GRADIENT = 'gradient of the values'
TOLERANCE = 2e-2  # of a gradient's norm: near-equal entries may be told apart otherwise
_COLUMNS_COMPARED, _ROWS_COMPARED = 8, 64  # of an aggregation
_ROWS_SELECTED = 1 << 13  # compared of a selection

OURS, UNWEIGHTED, BALANCED = 'ours', 'ours, unweighted', 'ours, balanced'
ORDERED, AS_DENSE, DENSE = 'ours, deterministic', 'ours, as dense', 'ours, spmm'
CUSPARSE = {'cuSPARSE': spmm.CUSPARSE, 'cuSPARSE preprocessed': spmm.PREPROCESSED}
TORCH = {spmm.TORCH: [spmm.TORCH], spmm.TORCH64: [spmm.TORCH64]}
TOPK, COPY = 'torch.topk', 'copy of as many bytes'
MAXK, MAXK_BALANCED, RELU = 'ours, MaxK', 'ours, MaxK balanced', 'ours, ReLU'
MAXK_ROOT = 'ours, MaxK of roots too'  # as in the paper
AGGREGATIONS = 'aggregations of ours, ReLU'
EDGE_INDEX, CSR, SPARSE_TENSOR = 'PyG edge_index', 'PyG torch CSR', 'PyG SparseTensor'
PYG = [EDGE_INDEX, CSR, SPARSE_TENSOR]

kernels = torch.ops.pyg_fast


def measure_over_k(
    of_k: Mapping[int, Sequence[Contender]], shared: Sequence[Contender], settings: Settings,
) -> dict[int, dict[str, Result]]:
    """All take turns together; those that do not depend on k are measured once for every cell."""
    numbered = {
        (k, contender.name): dataclasses.replace(contender, name=f'{contender.name}, k={k}')
        for k, contenders in of_k.items() for contender in contenders}
    measured = _harness.measure([*numbered.values(), *shared], settings)
    results: dict[int, dict[str, Result]] = {k: {} for k in of_k}
    for (k, name), contender in numbered.items():
        results[k][name] = measured[contender.name]
    for cell in results.values():
        cell.update((contender.name, measured[contender.name]) for contender in shared)
    return results


def worst(errors: Iterable[float]) -> float:
    return float(torch.tensor(list(errors)).max())  # unlike Python's, it keeps NaN


def spread(count: int, size: int, device: torch.device) -> Tensor:
    """Positions from the first to the last of ``size``, evenly; all of them if there are few."""
    count = min(count, size)
    return torch.arange(count, device=device) * (size - 1) // max(count - 1, 1)


def log(graph: str, k: int, title: str, results: Mapping[str, Result]) -> None:
    _harness.log(f'{graph} k={k} {title}: ' + ', '.join(
        f'{name} {result.text()}' for name, result in results.items()))


# Kernels ----------------------------------------------------------------------------------------

class Case(spmm.Case):
    """Inputs on one graph, in one dtype, at one width, the k largest entries of x among them."""

    def __init__(self, graph: Graph, dtype: torch.dtype, width: int) -> None:
        super().__init__(graph, dtype, width)
        self.width = width
        self._largest: dict[tuple[int, bool], CBSR] = {}

    @functools.cached_property
    def structure(self) -> Structure:
        return graph_of(self.prepared, self.graph.num_nodes, self.graph.num_nodes)

    def largest(self, k: int, balanced: bool = False) -> CBSR:
        if (k, balanced) not in self._largest:
            self._largest[k, balanced] = ops.maxk(self.x, k, balanced)
        return self._largest[k, balanced]

    @functools.cached_property
    def compared(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Some columns; and some rows, the fullest among them, with their CSR structure."""
        degree = self.graph.degree
        columns = spread(_COLUMNS_COMPARED, self.width, degree.device)
        fullest = degree.topk(min(_ROWS_COMPARED // 8, degree.numel()))[1]
        rows = torch.cat(
            [fullest, spread(_ROWS_COMPARED, degree.numel(), degree.device)]).unique()
        chosen = torch.zeros_like(degree, dtype=torch.bool)
        chosen[rows] = True
        rowptr = F.pad(degree[rows].cumsum(0), (1, 0)).int()
        return columns, rows, rowptr, chosen[self.graph.row].nonzero().view(-1)

    def error(self, out: Tensor, cbsr: CBSR, weight: Tensor) -> float:
        """That of an aggregation, in some columns of every row and all columns of some rows."""
        num_nodes = self.graph.num_nodes
        if out.shape != (num_nodes, self.width):
            return float('inf')
        columns, rows, rowptr, edges = self.compared
        x, value = reference.cbsr_to_dense(cbsr.values, cbsr.columns, self.width), weight.double()
        some = torch.sparse_csr_tensor(
            rowptr, self.graph.col[edges], value[edges], (rows.numel(), num_nodes))
        return worst(
            excess(part, torch.sparse.mm(matrix, of), torch.sparse.mm(matrix, of.abs()))
            for part, matrix, of in (
                (out[:, columns], self.graph.matrix(value), x[:, columns].contiguous()),
                (out[rows], some, x)))

    def grad_error(self, out: Tensor, cbsr: CBSR) -> float:
        """That of a gradient of the values, wherever it is stored."""
        columns = cbsr.columns.long()
        return excess(out, *(full.gather(1, columns) for full in self.grad_x('weighted')))


def forwards(case: Case, k: int) -> list[Contender]:
    csr, width = case.structure[:3], case.width
    made: list[Contender] = []

    def add(
        name: str, run: Callable[[CBSR, Tensor | None], Tensor], balanced: bool = False,
        weighted: bool = True,
    ) -> None:
        cbsr, weight = case.largest(k, balanced), case.weight if weighted else None
        checked = case.ones if weight is None else weight
        made.append(Contender(
            name, lambda: lambda: run(cbsr, weight), ours=True,
            check=lambda out: case.error(out, cbsr, checked)))

    def entries(cbsr: CBSR, weight: Tensor | None) -> Tensor:
        return kernels.cbsr_spmm(
            *csr, weight, cbsr.values, cbsr.columns, width, None, None, None, None, False, False)

    def rows(cbsr: CBSR, weight: Tensor | None) -> Tensor:
        x = kernels.cbsr_to_dense(cbsr.values, cbsr.columns, width)
        return kernels.spmm(*csr, weight, x, None, None, None, None, False, False)

    add(OURS, entries)
    add(UNWEIGHTED, entries, weighted=False)
    add(BALANCED, entries, balanced=True)
    add(AS_DENSE, rows)
    return made


def gradients(case: Case, k: int) -> list[Contender]:
    weight, grad, graph = case.weight, case.grad, case.structure
    csr, transpose = graph[:3], graph[3:6]
    made: list[Contender] = []

    def add(name: str, run: Callable[[Tensor], Tensor], balanced: bool = False) -> None:
        cbsr = case.largest(k, balanced)
        made.append(Contender(
            name, lambda: lambda: run(cbsr.columns), ours=True,
            check=lambda out: case.grad_error(out, cbsr)))

    def usual(columns: Tensor) -> Tensor:
        return kernels.cbsr_spmm_backward(*csr, weight, grad, columns, None, None, None, False)

    def ordered(columns: Tensor) -> Tensor:
        return kernels.cbsr_spmm_backward_ordered(
            *transpose, weight, grad, columns, None, None, None)

    def rows(columns: Tensor) -> Tensor:
        out = kernels.spmm(*transpose, weight, grad, None, None, None, None, False, False)
        return kernels.cbsr_sample(out, columns)

    add(OURS, usual)
    add(ORDERED, ordered)
    add(BALANCED, usual, balanced=True)
    add(AS_DENSE, rows)
    return made


def all_columns(case: Case, mode: str) -> list[Contender]:
    """Those that aggregate all columns of x, or of its gradient over the transposed graph."""
    back = mode != FORWARD
    x = case.grad if back else case.x
    graph = case.structure.t() if back else case.structure
    expected = case.grad_x if back else case.aggregated

    def matrix(int64: bool) -> Tensor:
        made = case.graph.matrix(case.weight, transposed=back)
        if not int64:
            return made
        return torch.sparse_csr_tensor(
            made.crow_indices().long(), made.col_indices().long(), made.values(), made.shape)

    def torch_sparse(int64: bool) -> Callable[[], Tensor]:
        adjacency = matrix(int64)
        return lambda: torch.sparse.mm(adjacency, x)

    def ours() -> Tensor:
        return kernels.spmm(*graph[:3], case.weight, x, None, None, None, None, False, False)

    made: dict[str, Callable[[], Callable[[], Tensor]]] = {DENSE: lambda: ours}
    if x.is_cuda:
        for names, preprocess in ((spmm.CUSPARSE, False), (spmm.PREPROCESSED, True)):
            for name, algorithm in zip(names, _cusparse.ALGORITHMS, strict=True):
                made[name] = functools.partial(
                    spmm.cusparse, case, 'sum', spmm.GRAD_X if back else FORWARD, x, x, algorithm,
                    preprocess)
    else:
        made[spmm.TORCH] = functools.partial(torch_sparse, int64=False)
        made[spmm.TORCH64] = functools.partial(torch_sparse, int64=True)
    return [
        Contender(name, make, name == DENSE, lambda out: excess(out, *expected('weighted')))
        for name, make in made.items()]


def run_kernels(
    graph: Graph, widths: Sequence[int], ks: Sequence[int], dtypes: Sequence[str],
    settings: Settings, report: _harness.Report,
) -> None:
    rivals = CUSPARSE | TORCH
    names = [name for variants in rivals.values() for name in variants]
    columns: dict[str, dict[str, Sequence[str]]] = {
        mode: {name: [name] for name in (OURS, special, BALANCED, AS_DENSE, DENSE)} | rivals
        for mode, special in ((FORWARD, UNWEIGHTED), (GRADIENT, ORDERED))}
    for width in widths:
        stored = [k for k in ks if k <= width]
        by_dtype: dict[str, dict[int, dict[str, Result]]] = {mode: {} for mode in columns}
        for dtype in dtypes:
            case = Case(graph, _harness.DTYPES[dtype], width)
            state = _harness.cache_state(
                graph.num_nodes * width * case.x.element_size(), settings.device)
            for mode, make in ((FORWARD, forwards), (GRADIENT, gradients)):
                section = report.section(
                    f'Aggregation at F={width}, {mode}, {dtype}', columns=columns[mode],
                    width='k', versus=[
                        Versus('the best, on all F columns', OURS, names),
                        *(Versus(rival, OURS, variants) for rival, variants in rivals.items()),
                        Versus(DENSE, OURS, [DENSE]),
                        Versus(AS_DENSE, OURS, [AS_DENSE]),
                        Versus(OURS, BALANCED, [OURS]),
                        *[Versus(ORDERED, OURS, [ORDERED])] * (mode == GRADIENT)])
                results = measure_over_k(
                    {k: make(case, k) for k in stored}, all_columns(case, mode), settings)
                for k, cell in results.items():
                    section.cells.append(Cell(graph.name, k, cell, state))
                    by_dtype[mode].setdefault(k, {})[dtype] = cell[OURS]
                    log(graph.name, k, section.title, cell)
        if len(dtypes) > 1:
            compare_dtypes(graph.name, width, by_dtype, report)


def compare_dtypes(
    graph: str, width: int, by_dtype: Mapping[str, Mapping[int, dict[str, Result]]],
    report: _harness.Report,
) -> None:
    """Puts the times of ours side by side, which were measured one dtype after the other."""
    for mode, cells in by_dtype.items():
        for k, results in cells.items():
            first, *others = results
            section = report.section(
                f'Aggregation at F={width}, {mode}, by dtype', width='k',
                columns={name: [name] for name in results},
                versus=[Versus(first, other, [first]) for other in others])
            section.cells.append(Cell(graph, k, results))


# Selection --------------------------------------------------------------------------------------

class Selection:
    """A matrix, and what is right for some of its rows."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(1)
        self.x = torch.randn(num_rows, width, generator=generator, device=device).to(dtype)
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
        same = (order[0] == right_columns.long()).all() & (
            values[self.rows].gather(1, order[1]) == right_values).all()
        return 0.0 if bool(same) else float('inf')

    def value_error(self, values: Tensor, k: int) -> float:
        """That of values in any order, whichever of several equal ones were taken."""
        right = reference.maxk(self.x[self.rows], k, False)[0].sort(1)[0]
        same = values.size(1) == k and bool((values[self.rows].sort(1)[0] == right).all())
        return 0.0 if same else float('inf')

    def copy(self, k: int) -> Callable[[], Tensor]:
        """Reads and writes as much in all as a selection has to."""
        values, columns = kernels.maxk(self.x[:1], k, False)
        entry = values.element_size() + columns.element_size()
        moved = self.x.numel() * self.x.element_size() + self.x.size(0) * k * entry
        source = torch.zeros(moved // 2, dtype=torch.uint8, device=self.x.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)


def run_selection(
    num_rows: int, widths: Sequence[int], ks: Sequence[int], dtypes: Sequence[str],
    settings: Settings, report: _harness.Report,
) -> None:
    names = [OURS, BALANCED, TOPK, COPY]
    for dtype in dtypes:
        for width in widths:
            selection = Selection(num_rows, width, _harness.DTYPES[dtype], settings.device)
            section = report.section(
                f'Selection at F={width}, {dtype}', columns={name: [name] for name in names},
                width='k', versus=[
                    Versus(rival, ours, [rival]) for rival in (TOPK, COPY)
                    for ours in (OURS, BALANCED)])
            state = _harness.cache_state(
                selection.x.numel() * selection.x.element_size(), settings.device)
            for k in (k for k in ks if k <= width):
                results = _harness.measure(selection.contenders(k), settings)
                section.cells.append(Cell(f'{num_rows:,} rows', k, results, state))
                log(f'{num_rows:,} rows', k, section.title, results)


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
    """One model on one graph: its data, its weights at the start, and every way to run it."""

    def __init__(self, graph: Graph, model: str, hidden: int, layers: int) -> None:
        device = graph.col.device
        generator = torch.Generator(device=device).manual_seed(1)
        # PyG counts self-loops that are there differently for each kind of input.
        self.graph = graph.without_loops() if model == 'gcn' else graph
        self.model, self.hidden, self.layers = model, hidden, layers
        self.x = torch.randn(graph.num_nodes, CHANNELS, generator=generator, device=device)
        self.target = torch.randint(
            CLASSES, (graph.num_nodes,), generator=generator, device=device)
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
        conv = {'sage': MaxKSAGEConv, 'gcn': MaxKGCNConv, 'gin': MaxKGINConv}[self.model]
        options = {'maxk_root': True} if root else {}
        return self.net(conv, nn.Identity(), k=k, balanced=balanced, **options)

    def relu(self) -> Net:
        convs = {
            'sage': PathPreparedSAGEConv, 'gcn': PathPreparedGCNConv, 'gin': PathPreparedGINConv}
        return self.net(convs[self.model])

    def pyg(self) -> Net:
        if self.model == 'gcn':
            return self.net(GCNConv, cached=True)
        return self.net({'sage': SAGEConv, 'gin': GINConv}[self.model])

    @functools.cached_property
    def prepared(self) -> Tensor:
        size = (self.graph.num_nodes, self.graph.num_nodes)
        return prepare_edge_index(self.graph.edge_index, size)[0]

    def csr(self, dtype: torch.dtype = torch.float32) -> Tensor:
        graph = self.graph
        return torch.sparse_csr_tensor(
            graph.rowptr.long(), graph.col.long(),
            torch.ones(graph.num_edges, dtype=dtype, device=graph.col.device),
            (graph.num_nodes, graph.num_nodes))

    def sparse_tensor(self) -> Any:
        from torch_sparse import SparseTensor
        graph = self.graph
        return SparseTensor(
            rowptr=graph.rowptr.long(), col=graph.col.long(), is_sorted=True, trust_data=True,
            sparse_sizes=(graph.num_nodes, graph.num_nodes)).fill_cache_()

    def step(self, net: Net, graph: Any) -> Callable[[], list[Tensor]]:
        """A step, which returns the loss and all gradients."""
        net.load_state_dict(self.state)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        dtype = next(net.parameters()).dtype
        x = self.x.to(dtype)

        def run() -> list[Tensor]:
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(net(x, graph), self.target)
            loss.backward()
            optimizer.step()
            return [loss.detach(), *(parameter.grad for parameter in net.parameters())]

        return run

    def expected(
        self, k: int | None, balanced: bool = False, root: bool = False,
    ) -> list[Tensor]:
        """What the first step gives by PyG's layers in float64, with MaxK if there is a k."""
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
            self._expected[key] = self.step(net.double(), self.csr(torch.double))()
        return self._expected[key]

    def error(
        self, outputs: Sequence[Tensor], k: int | None = None, balanced: bool = False,
        root: bool = False,
    ) -> float:
        return worst(
            float((out.double() - right).norm() / right.norm()) / TOLERANCE
            for out, right in zip(outputs, self.expected(k, balanced, root), strict=True))

    def of_k(self, k: int) -> list[Contender]:
        variants = {MAXK: {}, MAXK_BALANCED: {'balanced': True}}
        if self.model != 'gcn':
            variants[MAXK_ROOT] = {'root': True}
        return [
            Contender(
                name, lambda options=options: self.step(self.maxk(k, **options), self.prepared),
                ours=True, check=functools.partial(self.error, k=k, **options))
            for name, options in variants.items()]

    def others(self, scatter_limit: float) -> list[Contender]:
        """The models with ReLU, and the aggregations that ours spends its time on."""
        inputs: dict[str, Callable[[], Any]] = {CSR: self.csr}
        if importlib.util.find_spec('torch_sparse'):
            inputs[SPARSE_TENSOR] = self.sparse_tensor
        if self.graph.num_edges * self.hidden * 4 <= scatter_limit * 2**30:
            inputs[EDGE_INDEX] = lambda: self.graph.edge_index
        return [
            Contender(RELU, lambda: self.step(self.relu(), self.prepared), True, self.error),
            Contender(AGGREGATIONS, self.aggregations, ours=True),
            *(Contender(name, lambda make=make: self.step(self.pyg(), make()), check=self.error)
              for name, make in inputs.items())]

    def aggregations(self) -> Callable[[], Any]:
        """As many as a step has, forward and backward."""
        x = torch.ones(self.x.size(0), self.hidden, device=self.x.device)
        reduce = 'mean' if self.model == 'sage' else 'sum'
        once = spmm.step(lambda x: ops.spmm(self.prepared, x, reduce=reduce), x, x)

        def run() -> None:
            for _ in range(self.layers):
                once()

        return run


def run_training(
    graph: Graph, models: Iterable[str], ks: Sequence[int], hidden: int, layers: int,
    scatter_limit: float, settings: Settings, report: _harness.Report,
) -> None:
    for model in models:
        training = Training(graph, model, hidden, layers)
        names = [MAXK, MAXK_BALANCED, MAXK_ROOT, RELU, AGGREGATIONS, *PYG]
        section = report.section(
            f'Training step, {model}, {layers} layers, hidden {hidden}', width='k', memory=True,
            columns={name: [name] for name in names}, versus=[
                Versus('PyG, best input', MAXK, PYG),
                *(Versus(name, MAXK, [name]) for name in (RELU, *PYG)),
                Versus('PyG, best input', RELU, PYG),
                Versus(MAXK, MAXK_BALANCED, [MAXK]),
                Versus(RELU, MAXK_ROOT, [RELU])])
        results = measure_over_k(
            {k: training.of_k(k) for k in ks}, training.others(scatter_limit), settings)
        for k, cell in results.items():
            section.cells.append(Cell(graph.name, k, cell))
            log(graph.name, k, section.title, cell)
        report.notes.append(amdahl(graph.name, model, results))


def amdahl(graph: str, model: str, results: Mapping[int, Mapping[str, Result]]) -> str:
    """What could be gained at most if aggregation took no time."""
    cell = next(iter(results.values()))
    step, part = cell[RELU].median_ms, cell[AGGREGATIONS].median_ms
    assert step is not None
    assert part is not None
    limit = f'{step / (step - part):.2f}' if part < step else 'any number of'
    reached = ', '.join(
        f'{step / time:.2f} at k={k}' for k, cell in results.items()
        if (time := cell[MAXK].median_ms) is not None)
    return (
        f'{graph}, {model}: aggregations take {part / step:.0%} of the step of ours with ReLU; '
        f'without them it would be {limit} times as fast (Amdahl), with MaxK it is {reached}.')


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('MaxK: kernels, selection and training.')
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', _graphs.NAMES),
        help=f"of {', '.join(_graphs.NAMES)}")
    parser.add_argument('--k', type=_harness.integers, help='entries kept of each row')
    parser.add_argument(
        '--widths', type=_harness.integers, default=WIDTHS, help='numbers of columns F')
    parser.add_argument(
        '--dtypes', type=_harness.choice('dtype', tuple(_harness.DTYPES)), default=('float32',))
    parser.add_argument('--kernels', action='store_true', help='nothing but this, unless combined')
    parser.add_argument('--select', action='store_true', help='likewise')
    parser.add_argument('--training', action='store_true', help='likewise')
    parser.add_argument(
        '--rows', type=int, help='that --select takes, instead of the nodes of each graph')
    parser.add_argument('--select-widths', type=_harness.integers, help='its numbers of columns')
    parser.add_argument(
        '--models', type=_harness.choice('model', MODELS), default=('sage',),
        help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        '--training-k', type=_harness.integers, default=(32,), help='entries kept in training')
    parser.add_argument(
        '--hidden', type=int, help=f'channels in training ({HIDDEN}, or {QUICK_HIDDEN} if quick)')
    parser.add_argument('--layers', type=int, default=3, help='graph layers in training')
    parser.add_argument(
        '--scatter-limit', type=float, metavar='GIB',
        help="training by PyG's edge_index, which stores a message per edge, is left out beyond "
        'this (4 on CUDA, else 2)')
    args = parser.parse_args(argv)
    wall = _harness.start(args)
    kernel = dataclasses.replace(wall, device_time=True)
    if args.scatter_limit is None:
        args.scatter_limit = 4.0 if args.device == 'cuda' else 2.0
    if args.hidden is None:
        args.hidden = QUICK_HIDDEN if args.quick else HIDDEN
    ks = args.k or (QUICK_K if args.quick else K)
    select_widths = args.select_widths or (QUICK_SELECT_WIDTHS if args.quick else SELECT_WIDTHS)
    everything = not (args.kernels or args.select or args.training)
    report = _harness.Report('maxk', args, [
        'Times in ms, medians, contenders taking turns, no cache flushed between them; ratio: the '
        'best rival over ours. '
        + ('Kernels by CUDA events, launches hidden; training by' if args.device == 'cuda' else
           'All by') + ' wall time to the end of the work. † inexact, ‡ one cold run.'])
    if args.device == 'cuda':
        report.environment['cusparse'] = _cusparse.version()
    if everything or args.kernels:
        forward, backward = _DENSE_SHARE[args.device]
        report.notes.append(
            'Aggregation: the k largest of F columns are at hand, the graph is prepared for '
            f'everyone, and all but "{UNWEIGHTED}" read edge weights. "{BALANCED}": of columns '
            f'equal modulo k. "{AS_DENSE}": spread to dense rows and aggregated by spmm, which '
            f'ops.cbsr_spmm does from k > {forward:.2g} F on (in float32); the gradient likewise, '
            f'from k > {backward:.2g} F on. "{DENSE}" and the rivals: a product with the whole of '
            'x, or of the gradient over the transposed graph, measured once for all k. '
            f'"{ORDERED}": over the '
            'transposed graph. Compared with float64: of an aggregation of ours '
            f'{_COLUMNS_COMPARED} columns of every row and all columns of the fullest and other '
            f'rows, {_ROWS_COMPARED} or a few more; of all else everything.')
    if everything or args.select:
        report.notes.append(
            f'Selection: random numbers; "{COPY}" reads and writes together what has to be read '
            f'and written. {_ROWS_SELECTED} rows are compared with float64.')
    if everything or args.training:
        report.notes.append(
            f'Training: linear {CHANNELS} to hidden, the layers, linear to {CLASSES}; forward, '
            'cross entropy on all nodes, backward, Adam, on random features. Loss and gradients '
            "of the first step are compared with PyG's layers in float64.")
    if everything or args.kernels or args.training or args.rows is None:
        names = args.graphs or (
            _graphs.quick_names if args.quick else _graphs.default_names)(wall.device)
        for graph in _graphs.load_each(names, wall.device, report.left_out):
            report.graphs[graph.name] = graph.summary()
            if everything or args.kernels:
                run_kernels(graph, args.widths, ks, args.dtypes, kernel, report)
                report.save()
            if (everything or args.select) and args.rows is None:
                run_selection(
                    graph.num_nodes, select_widths, ks, args.dtypes, kernel, report)
                report.save()
            if everything or args.training:
                run_training(
                    graph, args.models, args.training_k, args.hidden, args.layers,
                    args.scatter_limit, wall, report)
                report.save()
    if (everything or args.select) and args.rows is not None:
        run_selection(args.rows, select_widths, ks, args.dtypes, kernel, report)
    report.finish()


if __name__ == '__main__':
    main()
