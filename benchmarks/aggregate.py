"""Sums over a new list of edges at every step: scatter, sort and reduce, and PyG.

python -m benchmarks aggregate           a grid of random graphs and widths
python -m benchmarks aggregate --quick   a few of them
python -m benchmarks aggregate --graphs reddit-like   a graph with shuffled edges
"""
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_fast.ops import aggregate
from pyg_fast.ops.aggregate import sorting_pays

from . import _harness
from ._graphs import normal
from ._harness import Bench, Contender, worst
from .spmm import STEP, excess

# Nodes and edges; the first has the size of Cora.
SIZES = ((2_708, 10_556), (20_000, 80_000), (20_000, 1_000_000), (100_000, 400_000),
         (200_000, 10_000_000), (200_000, 100_000_000))
_CPU_EDGES = 1_000_000  # at most
WIDTHS = (8, 16, 32, 64, 128, 256)
_REFERENCE_BYTES = 1 << 31  # of PyG's messages in float64
_NORM_TOLERANCE = 1e-4  # for float32

SCATTER, REDUCE, AUTO, PYG = 'scatter', 'reduce', 'auto', 'PyG ops'


def random_edges(num_nodes: int, num_edges: int, device: torch.device) -> Tensor:
    """A random graph with unsorted edges."""
    generator = torch.Generator(device=device).manual_seed(num_nodes + num_edges)
    return torch.randint(num_nodes, (2, num_edges), generator=generator, device=device)


class Case:
    """A graph, features and edge weights."""

    def __init__(self, edge_index: Tensor, num_nodes: int, width: int) -> None:
        random = normal(edge_index.device, width)
        self.edge_index, self.num_nodes, self.width = edge_index, num_nodes, width
        self.x, self.grad = random(num_nodes, width), random(num_nodes, width)
        self.weight = random(edge_index.size(1)).abs()

    def step(
        self, run: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32,
        absolute: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A step with gradients of features and weights; ``absolute``: of all magnitudes."""
        x, weight, grad = (
            (t.abs() if absolute else t).to(dtype) for t in (self.x, self.weight, self.grad))
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]
        return _harness.with_gradients(
            lambda: run(self.edge_index.view_as(self.edge_index), *leaves), leaves, grad)

    def ours(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        return self.step(lambda edge_index, x, weight: aggregate(edge_index, x, weight, mode))

    def pyg(
        self, dtype: torch.dtype = torch.float32, absolute: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        return self.step(lambda edge_index, x, weight: scatter(
            weight.view(-1, 1) * x[edge_index[0]], edge_index[1], 0, self.num_nodes),
            dtype, absolute)

    @property
    def by_pyg(self) -> bool:
        """Whether the messages of PyG fit into memory."""
        return self.edge_index.size(1) * self.width * 8 <= _REFERENCE_BYTES

    def contenders(self) -> list[Contender]:
        made = [Contender(mode, lambda mode=mode: self.ours(mode), True, self.check)
                for mode in (AUTO, SCATTER, REDUCE)]
        return made + [Contender(PYG, self.pyg, check=self.check)] * self.by_pyg

    def check(self, outputs: Sequence[Tensor]) -> float:
        if self.by_pyg:
            right, scale = (self.pyg(torch.double, absolute)() for absolute in (False, True))
            return worst(excess(*three) for three in zip(outputs, right, scale, strict=True))
        return _harness.norm_error(outputs, self.ours(REDUCE)(), _NORM_TOLERANCE)


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench('aggregate', __doc__, argv, graphs=(), notes=[
        'A sum with edge weights, float32, forward and backward with the gradients of features '
        f'and weights, over a random unsorted list of edges. "{REDUCE}" sorts the list at every '
        f'step. "{AUTO}" is mode="auto": the name of the graph tells what it chose. "{PYG}": '
        'gather, multiply, scatter, where the messages fit into memory.'])
    sizes, widths = (SIZES[:2], (16, 64)) if bench.quick else (SIZES, WIDTHS)
    cells: Iterable[tuple[str, int, Tensor]] = (
        (f'{num_nodes:,} nodes, {num_edges:,} edges', num_nodes,
         random_edges(num_nodes, num_edges, bench.device))
        for num_nodes, num_edges in sizes if bench.cuda or num_edges <= _CPU_EDGES)
    if bench.args.graphs:
        cells = ((graph.name, graph.num_nodes, graph.edge_index[:, torch.randperm(
            graph.num_edges, device=bench.device)]) for graph in bench.graphs())
    for name, num_nodes, edge_index in cells:
        for width in widths:
            taken = REDUCE if sorting_pays(edge_index.size(1), width, bench.cuda) else SCATTER
            bench.measure(
                STEP, f'{name} ({taken})', width, Case(edge_index, num_nodes, width).contenders(),
                pairs=[(SCATTER, REDUCE)])
    bench.finish()


if __name__ == '__main__':
    main()
