"""Scattering against sorting: a whole step over lists of edges that nobody prepared.

python -m benchmarks.aggregate           a grid of random graphs and widths
python -m benchmarks.aggregate --quick   a few of them
"""
import argparse
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_fast.ops import aggregate
from pyg_fast.ops.aggregate import sorting_pays

from . import _harness
from ._harness import Cell, Contender, Versus
from .maxk import worst
from .spmm import STEP, excess

# Nodes and edges of each: Cora's size first.
SIZES = ((2_708, 10_556), (20_000, 80_000), (20_000, 1_000_000), (100_000, 400_000),
         (200_000, 10_000_000), (200_000, 100_000_000))
_CPU_EDGES = 1_000_000  # at most
WIDTHS = (8, 16, 32, 64, 128, 256)
QUICK_SIZES, QUICK_WIDTHS = SIZES[:2], (16, 64)
_REFERENCE_BYTES = 1 << 31  # of PyG's messages in float64
_NORM_TOLERANCE = 1e-4  # for float32

SCATTER, REDUCE, AUTO, PYG = 'scatter', 'reduce', 'auto', 'PyG ops'


def random_edges(num_nodes: int, num_edges: int, device: torch.device) -> Tensor:
    """A random graph, its edges in no order."""
    generator = torch.Generator(device=device).manual_seed(num_nodes + num_edges)
    return torch.randint(num_nodes, (2, num_edges), generator=generator, device=device)


class Case:
    """A graph, features of one width and edge weights."""

    def __init__(self, edge_index: Tensor, num_nodes: int, width: int) -> None:
        generator = torch.Generator(device=edge_index.device).manual_seed(width)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=edge_index.device)

        self.edge_index, self.num_nodes, self.width = edge_index, num_nodes, width
        self.x, self.grad = random(num_nodes, width), random(num_nodes, width)
        self.weight = random(edge_index.size(1)).abs()

    def step(
        self, run: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: torch.dtype,
        absolute: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A step with gradients of features and weights, over a list that is new every time;
        `absolute`: with the magnitudes of all numbers."""
        x, weight, grad = (
            (t.abs() if absolute else t).to(dtype) for t in (self.x, self.weight, self.grad))
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight)]

        def step() -> tuple[Tensor, ...]:
            out = run(self.edge_index.view_as(self.edge_index), *leaves)
            return out.detach(), *torch.autograd.grad(out, leaves, grad)

        return step

    def ours(self, mode: str) -> Callable[[], tuple[Tensor, ...]]:
        return self.step(lambda edge_index, x, weight: aggregate(edge_index, x, weight, mode),
                         torch.float32)

    def pyg(
        self, dtype: torch.dtype = torch.float32, absolute: bool = False,
    ) -> Callable[[], tuple[Tensor, ...]]:
        def run(edge_index: Tensor, x: Tensor, weight: Tensor) -> Tensor:
            return scatter(weight.view(-1, 1) * x[edge_index[0]], edge_index[1], 0, self.num_nodes)

        return self.step(run, dtype, absolute)

    @property
    def by_pyg(self) -> bool:
        """Whether PyG's messages fit."""
        return self.edge_index.size(1) * self.width * 8 <= _REFERENCE_BYTES

    def contenders(self) -> list[Contender]:
        made = [Contender(mode, lambda mode=mode: self.ours(mode), True, self.check)
                for mode in (SCATTER, REDUCE, AUTO)]
        return made + [Contender(PYG, self.pyg, check=self.check)] * self.by_pyg

    def check(self, outputs: Sequence[Tensor]) -> float:
        if self.by_pyg:
            right, scale = (self.pyg(torch.double, absolute)() for absolute in (False, True))
            return worst(excess(*three) for three in zip(outputs, right, scale, strict=True))
        return worst(  # What scatters is compared with what sorts.
            float((out - right).norm() / (_NORM_TOLERANCE * right.norm()))
            for out, right in zip(outputs, self.ours(REDUCE)(), strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser: argparse.ArgumentParser = _harness.parser(__doc__.split('\n')[0])
    args = parser.parse_args(argv)
    settings = _harness.start(args)
    report = _harness.Report('aggregate', args, [
        'Times in ms, medians, contenders taking turns, wall time to the end of the work. A sum '
        'aggregation with edge weights, float32, forward and backward with the gradients of '
        'features and weights, over a random list of edges in no order: sorted anew at every '
        f'step where it is sorted at all. "{AUTO}" is what mode="auto" takes, named beside the '
        f'graph; "{PYG}": gather, multiply, scatter, where its messages are not too many.'])
    section = report.section(
        STEP, columns={name: [name] for name in (SCATTER, REDUCE, AUTO, PYG)},
        versus=[Versus(REDUCE, SCATTER, [REDUCE]), Versus(PYG, AUTO, [PYG])])
    sizes, widths = (QUICK_SIZES, QUICK_WIDTHS) if args.quick else (SIZES, WIDTHS)
    for (num_nodes, num_edges), width in itertools.product(sizes, widths):
        if args.device == 'cpu' and num_edges > _CPU_EDGES:
            continue
        case = Case(random_edges(num_nodes, num_edges, settings.device), num_nodes, width)
        results = _harness.measure(case.contenders(), settings)
        taken = REDUCE if sorting_pays(num_edges, width, args.device == 'cuda') else SCATTER
        name = f'{num_nodes:,} nodes, {num_edges:,} edges ({taken})'
        section.cells.append(Cell(name, width, results))
        _harness.log(f'{name}, F={width}: ' + ', '.join(
            f'{which} {result.text()}' for which, result in results.items()))
    report.finish()


if __name__ == '__main__':
    main()
