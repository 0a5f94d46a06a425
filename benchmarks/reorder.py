"""Preparing graphs: sorting edges, reordering nodes, and what reordering gains and costs.

python -m benchmarks reorder               everything below
python -m benchmarks reorder --quick       a minute or less
python -m benchmarks reorder --parts sort  to_csr, prepare_edge_index and gcn_norm beside PyG
python -m benchmarks reorder --parts sums,costs   sums on reordered graphs; time to reorder
"""
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_fast import ops
from pyg_fast.graph import prepare_edge_index
from pyg_fast.transforms import Reorder, ToCSR

from . import _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option, same
from .aggregate import random_edges
from .spmm import DEFAULT_GRAPHS, Case, excess

METHODS = ('rabbit', 'rcm', 'degree')
AS_IS, SORTING, OURS = 'as is', 'ToCSR', 'ours'
RANDOM_NODES, RANDOM_EDGES = 100_000, 2_000_000
_REPEATS = 3  # of reordering, at most
_BLOCK, _ROWS = 8, 64  # nodes


def contenders(case: Case, reordered: dict[str, Data], width: int) -> list[Contender]:
    expected, scale = (t[:, :width] for t in case.aggregated('weighted'))

    def make(data: Data) -> Callable[[], Tensor]:
        x = data.x[:, :width].contiguous()
        return lambda: ops.spmm(data.edge_index, x, data.edge_weight)

    def check(name: str, data: Data, out: Tensor) -> float:
        return excess(out if name == AS_IS else out[data.inverse_index], expected, scale)

    return [
        Contender(name, functools.partial(make, data), True, functools.partial(check, name, data))
        for name, data in reordered.items()]


def usable_methods(left_out: dict[str, str]) -> list[str]:
    """The methods whose packages are installed; the others are left out, with the reason."""
    usable = []
    for method in METHODS:
        try:
            Reorder(method)
        except ImportError as error:
            left_out[method] = str(error)
        else:
            usable.append(method)
    return usable


def costs(graph: Graph, methods: Sequence[str]) -> list[Contender]:
    data = Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)

    def check(out: Data) -> float:
        return same((out.perm_index[out.edge_index], graph.edge_index))

    return [
        *(Contender(method, lambda method=method: lambda: Reorder(method)(data), True, check)
          for method in methods),
        Contender(SORTING, lambda: lambda: ToCSR()(data), ours=True)]


def locality(edge_index: Tensor, num_nodes: int) -> tuple[float, float]:
    """The mean distance of neighbours divided by the number of nodes, and how many blocks of
    sources the blocks of rows read, per edge."""
    src, dst = edge_index
    blocks = torch.unique(dst // _ROWS * num_nodes + src // _BLOCK).numel()
    return float((src - dst).abs().double().mean()) / num_nodes, blocks / src.numel()


def run_sums(bench: Bench, graph: Graph, methods: Sequence[str]) -> None:
    widths = bench.args.widths
    case = Case(graph, torch.float32, max(widths))
    data = Data(x=case.x, edge_index=graph.prepared, edge_weight=case.weight)
    reordered = {AS_IS: data, **{method: Reorder(method)(data) for method in methods}}
    if graph.num_edges:
        places = {
            name: locality(some.edge_index.as_tensor(), graph.num_nodes)
            for name, some in reordered.items()}
        bench.note(f'{graph.name}: ' + '; '.join(
            f'{name} {gap:.3f}, {blocks:.3f}' for name, (gap, blocks) in places.items()) + '.')
    for width in widths:
        bench.measure(
            'sum, forward, float32', graph.name, width, contenders(case, reordered, width),
            bench.kernel, ours=methods[0],
            pairs=[(method, AS_IS) for method in methods])


def run_costs(bench: Bench, graph: Graph, methods: Sequence[str]) -> None:
    bench.measure(
        'Reordering', graph.name, graph.num_edges, costs(graph, methods), bench.few(_REPEATS),
        label='edges', pairs=[(method, SORTING) for method in methods])


def run_sort(bench: Bench) -> None:
    num_edges, size = bench.args.edges, (RANDOM_NODES, RANDOM_NODES)
    edge_index = random_edges(RANDOM_NODES, num_edges, bench.device)

    def argsort() -> tuple[Tensor, Tensor, Tensor]:
        order = edge_index[1].argsort(stable=True)
        rowptr = edge_index.new_zeros(RANDOM_NODES + 1)
        torch.cumsum(edge_index[1].bincount(minlength=RANDOM_NODES), 0, out=rowptr[1:])
        return rowptr, edge_index[0][order], order

    right = argsort()

    def pyg() -> Tensor:
        index = EdgeIndex(edge_index, sparse_size=size).sort_by('col', stable=True).values
        return index.fill_cache_()

    def check(output: Sequence[Tensor]) -> float:
        return same(*((out.long(), each) for out, each in zip(output, right, strict=True)))

    def check_prepared(output: EdgeIndex) -> float:
        return same((output.as_tensor(), edge_index[:, right[2]]))

    def check_norm(output: tuple[Tensor, Tensor]) -> float:
        edges, weight = gcn_norm(edge_index, num_nodes=RANDOM_NODES)
        return same((output[0], edges)) + float(
            ((output[1] - weight).abs() / weight).max()) / 1e-5

    for title, contenders in (
        ('Sorting edges into CSR', [
            Contender(OURS, lambda: lambda: ops.to_csr(edge_index, *size), True, check),
            Contender('torch argsort', lambda: argsort, check=check)]),
        ('Preparing a graph, CSR and CSC', [
            Contender(
                OURS, lambda: lambda: prepare_edge_index(edge_index, size)[0], True,
                check_prepared),
            Contender('PyG EdgeIndex', lambda: pyg, check=check_prepared)]),
        ('Normalized weights of GCN', [
            Contender(OURS, lambda: lambda: ops.gcn_norm(
                edge_index.view_as(edge_index), num_nodes=RANDOM_NODES), True, check_norm),
            Contender('PyG gcn_norm', lambda: lambda: gcn_norm(
                edge_index, num_nodes=RANDOM_NODES))]),
    ):
        bench.measure(
            title, f'random, {RANDOM_NODES:,} nodes', num_edges, contenders, label='edges')


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'reorder', __doc__, argv, parts=('sort', 'sums', 'costs'), graphs=DEFAULT_GRAPHS,
        widths=Option({'quick': (16, 64), 'usual': (16, 64, 256)}, _harness.integers, 'features'),
        edges=Option({'quick': 100_000, 'usual': RANDOM_EDGES}, help='random edges to sort'),
        notes=[
            'Sums with edge weights over a prepared graph; ratio: the time of '
            f'"{AS_IS}" over the time of "{METHODS[0]}". The nodes of generated graphs have a '
            'random order. Reordering: wall time, of an edge_index without attributes, beside '
            f'"{SORTING}", which sorts it.',
            '', 'Mean distance of neighbours divided by the number of nodes, and blocks of '
            f'{_BLOCK} nodes that {_ROWS} destinations read, per edge:', ''])
    if bench.has('sort'):
        run_sort(bench)
    methods = usable_methods(bench.report.left_out)
    bench.run_parts({
        'sums': functools.partial(run_sums, methods=methods),
        'costs': functools.partial(run_costs, methods=methods)})
    bench.finish()


if __name__ == '__main__':
    main()
