"""Aggregation before and after nodes are reordered, and what reordering costs.

python -m benchmarks.reorder           the grid of graphs, widths 16, 64 and 256
python -m benchmarks.reorder --quick   a minute or less
"""
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_fast import ops
from pyg_fast.transforms import Reorder, ToCSR

from . import _graphs, _harness
from ._graphs import Graph
from ._harness import Cell, Contender, Section, Settings, Versus
from .spmm import Case, excess

METHODS = ('rabbit', 'rcm', 'degree')
WIDTHS, QUICK_WIDTHS = (16, 64, 256), (16, 64)
AS_IS, SORTING = 'as is', 'ToCSR'
_REPEATS = 3  # of what is done once per graph, at most
_BLOCK, _ROWS = 8, 64  # nodes


class Costs(Section):
    """Graphs of so many sizes that none has a mean of its own."""

    def summary(self) -> list[dict[str, Any]]:
        return [{**row, 'by_width': {}} for row in super().summary()]


def aggregation(data: Data, width: int) -> Callable[[], Tensor]:
    x = data.x[:, :width].contiguous()
    return lambda: ops.spmm(data.edge_index, x, data.edge_weight)


def contenders(case: Case, reordered: dict[str, Data], width: int) -> list[Contender]:
    expected, scale = (t[:, :width] for t in case.aggregated('weighted'))

    def contender(name: str, data: Data) -> Contender:
        def check(out: Tensor) -> float:
            return excess(out if name == AS_IS else out[data.inverse_index], expected, scale)

        return Contender(name, lambda: aggregation(data, width), ours=True, check=check)

    return [contender(name, data) for name, data in reordered.items()]


def usable_methods() -> tuple[list[str], dict[str, str]]:
    """The methods whose packages are installed, and why the others cannot run."""
    usable, left_out = [], {}
    for method in METHODS:
        try:
            Reorder(method)
        except ImportError as error:
            left_out[method] = str(error)
        else:
            usable.append(method)
    return usable, left_out


def costs(graph: Graph, methods: Sequence[str]) -> list[Contender]:
    data = Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)

    def check(out: Data) -> float:
        same = out.perm_index[out.edge_index].equal(graph.edge_index)
        return 0.0 if same else float('inf')

    return [
        *(Contender(method, lambda method=method: lambda: Reorder(method)(data), True, check)
          for method in methods),
        Contender(SORTING, lambda: lambda: ToCSR()(data), ours=True)]


def locality(edge_index: Tensor, num_nodes: int) -> tuple[float, float]:
    """The mean distance of neighbours, as a share of the nodes, and how many blocks of memory
    blocks of rows read, per edge."""
    src, dst = edge_index
    blocks = torch.unique(dst // _ROWS * num_nodes + src // _BLOCK).numel()
    return float((src - dst).abs().double().mean()) / num_nodes, blocks / src.numel()


def run_graph(
    graph: Graph, methods: Sequence[str], widths: Sequence[int], settings: Settings,
    report: _harness.Report,
) -> None:
    case = Case(graph, torch.float32, max(widths))
    data = Data(x=case.x, edge_index=case.prepared, edge_weight=case.weight)
    reordered = {AS_IS: data, **{method: Reorder(method)(data) for method in methods}}
    if graph.num_edges:
        places = {
            name: locality(some.edge_index.as_tensor(), graph.num_nodes)
            for name, some in reordered.items()}
        report.notes.append(f'{graph.name}: ' + '; '.join(
            f'{name} {gap:.3f}, {blocks:.3f}' for name, (gap, blocks) in places.items()) + '.')
    section = report.section(
        'sum, forward, float32', columns={name: [name] for name in reordered},
        versus=[Versus(AS_IS, method, [AS_IS]) for method in methods])
    for width in widths:
        results = _harness.measure(
            contenders(case, reordered, width), dataclasses.replace(settings, device_time=True))
        state = _harness.cache_state(graph.num_nodes * width * 4, settings.device)
        section.cells.append(Cell(graph.name, width, results, state))
        _harness.log(f'{graph.name}, F={width}: ' + ', '.join(
            f'{name} {result.text()}' for name, result in results.items()))
    del reordered
    section = report.section(
        'Reordering', Costs, columns={name: [name] for name in (*methods, SORTING)}, width='edges',
        versus=[Versus(SORTING, method, [SORTING]) for method in methods])
    once = dataclasses.replace(settings, repeats=min(settings.repeats, _REPEATS))
    results = _harness.measure(costs(graph, methods), once)
    section.cells.append(Cell(graph.name, graph.num_edges, results))
    _harness.log(f'{graph.name}: ' + ', '.join(
        f'{name} {result.text()}' for name, result in results.items()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('Aggregation before and after nodes are reordered.')
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', _graphs.NAMES),
        help=f"of {', '.join(_graphs.NAMES)}")
    parser.add_argument('--widths', type=_harness.integers, help='numbers of features')
    args = parser.parse_args(argv)
    settings = _harness.start(args)
    widths = args.widths or (QUICK_WIDTHS if args.quick else WIDTHS)
    report = _harness.Report('reorder', args, [
        'Times in ms, medians, contenders taking turns. Sums with edge weights over a prepared '
        'graph, '
        + ('device time by CUDA events, launches hidden' if args.device == 'cuda' else 'wall time')
        + f'; ratio: the time "{AS_IS}" over that of "{METHODS[0]}". Generated graphs come with '
        'nodes in no order. Reordering is wall time, of a plain edge_index without attributes, '
        f'beside "{SORTING}", which sorts it.',
        '', 'Mean distance of neighbours over the number of nodes, and blocks of '
        f'{_BLOCK} nodes that {_ROWS} destinations read, per edge:', ''])
    methods, report.left_out = usable_methods()
    names = args.graphs or (_graphs.quick_names if args.quick else _graphs.default_names)(
        settings.device)
    for graph in _graphs.load_each(names, settings.device, report.left_out):
        report.graphs[graph.name] = graph.summary()
        run_graph(graph, methods, widths, settings, report)
        report.save()
    report.finish()


if __name__ == '__main__':
    main()
