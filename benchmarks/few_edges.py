"""Own layers on graphs of few edges, in training: beside PyG, and beside kernels at any size.

python -m benchmarks few_edges                       everything below
python -m benchmarks few_edges --quick               a minute or less
python -m benchmarks few_edges --layers attention    only some

Where kernels take longer than PyG's code, that runs: the cells lie on both sides of these limits,
which pyg_fast.small_graphs describes.
"""
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import add_self_loops, degree, softmax

import pyg_fast
from pyg_fast.graph import prepare_edge_index

from . import _harness
from ._harness import Bench, Contender, Option, Result
from .layers import PLAIN, PREPARED, PYG, step_error, warm

KERNEL = ', kernels'  # at any size
TOLERANCE = 1e-4
DEGREE = 5


class Sum(pyg.MessagePassing):
    """A linear map, then a sum over neighbours."""

    aggr_of = 'add'

    def __init__(self, width: int) -> None:
        super().__init__(aggr=self.aggr_of)
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), e=e, w=w)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Mean(Sum):
    """A mean of neighbours."""

    aggr_of = 'mean'


class Weighted(Sum):
    """A sum by weights of edges."""

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return w.view(-1, 1) * x_j


class SelfLoops(Sum):
    """GCN, as a first layer of one's own computes it: with self-loops and degrees."""

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor, w: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        row, col = edge_index
        scale = degree(col, x.size(0), dtype=x.dtype).pow(-0.5)
        return self.propagate(edge_index, x=self.lin(x), w=scale[row] * scale[col])

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return w.view(-1, 1) * x_j


class EdgeFeatures(Sum):
    """GINE's message, of features of edges."""

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return F.relu(x_j + e)


class Gate(Sum):
    """A gate of both ends."""

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(x_i + x_j) * x_j


class Differences(Sum):
    """Maxima of differences."""

    aggr_of = 'max'

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_j - x_i


class Deviations(Gate):
    """The deviations of a gate."""

    aggr_of = 'std'


class Normed(Sum):
    """A layer normalization of each edge."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.LayerNorm(width)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.relu(self.norm(x_i + x_j))


class Attention(Sum):
    """Attention by products of both ends."""

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        alpha = softmax((x_i * x_j).sum(-1), index, num_nodes=size_i)
        return alpha.view(-1, 1) * x_j


class Kept(Sum):
    """A gate that stays as features of edges."""

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        self.e = x_i + x_j + e
        return torch.sigmoid(self.e) * x_j


class EdgeMLP(Sum):
    """Two layers on both ends of an edge."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mlp = nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j], -1))


class EdgeMax(EdgeMLP):
    """EdgeConv under a maximum."""

    aggr_of = 'max'


KINDS = {
    'sum': Sum, 'mean': Mean, 'weights': Weighted, 'self-loops': SelfLoops,
    'edge features': EdgeFeatures, 'gate': Gate, 'maxima': Differences,
    'deviations': Deviations, 'layer norm': Normed, 'attention': Attention,
    'kept gate': Kept, 'edge MLP': EdgeMLP, 'EdgeConv': EdgeMax}


class Case:
    """A layer on a random graph."""

    def __init__(self, kind: type[Sum], edges: int, width: int, device: torch.device) -> None:
        nodes = max(2, edges // DEGREE)
        draw = torch.Generator().manual_seed(0)
        index = torch.randint(nodes, (2, edges), generator=draw)
        self.prepared, perm = prepare_edge_index(index.to(device), (nodes, nodes))
        self.edge_index = index.to(device)[:, perm]  # in the same order
        x = torch.randn(nodes, width, generator=draw), torch.randn(edges, width, generator=draw)
        self.inputs = [each.to(device) for each in (*x, torch.rand(edges, generator=draw))]
        torch.manual_seed(0)
        self.layer = kind(width).to(device)
        self.calls = max(1, 50_000 // edges)

    def step(self, name: str, dtype: torch.dtype = torch.float32) -> Callable[[], Any]:
        """Steps, of which the last one returns the output and all gradients."""
        how, is_kernel = name.removesuffix(KERNEL), name.endswith(KERNEL)
        layer: Any = copy.deepcopy(self.layer).to(dtype)
        edge_index = self.prepared if how == PREPARED else self.edge_index
        if how != PYG:
            layer = pyg_fast.accelerate(layer)
        x, e, w = (each.to(dtype, copy=True).requires_grad_() for each in self.inputs)
        wanted = [x, e, w, *layer.parameters()]

        def step() -> tuple[Tensor, ...]:
            out = layer(x, edge_index, e, w)
            grads = torch.autograd.grad(
                out, wanted, torch.ones_like(out), allow_unused=True, materialize_grads=True)
            return out.detach(), *grads

        def steps() -> tuple[Tensor, ...]:
            with pyg_fast.small_graphs('kernel' if is_kernel else 'pyg'):
                return _harness.repeated(step, self.calls)()

        return warm(steps)

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PYG, torch.double)()

    @functools.cached_property
    def error_of_pyg(self) -> float:
        return step_error(self.step(PYG)(), self.expected, TOLERANCE)

    def check(self, outputs: Sequence[Tensor]) -> float:
        """The error, of which twice that of PyG's layer in float32 is allowed: rounding decides on
        which side of zero a ReLU is, and what is left of a row that nearly cancels."""
        return step_error(outputs, self.expected, TOLERANCE) / max(1.0, 2 * self.error_of_pyg)

    def contenders(self) -> list[Contender]:
        names = [PLAIN, PREPARED, PLAIN + KERNEL, PREPARED + KERNEL, PYG]
        return [
            Contender(name, functools.partial(self.step, name), name in (PLAIN, PREPARED),
                      None if name == PYG else self.check, self.calls) for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'few-edges', __doc__, argv,
        layers=_harness.names('layer', tuple(KINDS), tuple(KINDS)),
        widths=Option({'quick': (8,), 'cuda': (16, 64), 'cpu': (3, 16, 64)}, _harness.integers),
        edges=Option({'quick': (60,), 'cuda': (1_000, 30_000, 300_000, 1_500_000),
                      'cpu': (150, 1_500, 5_000, 15_000, 50_000)}, _harness.integers),
        notes=[
            'A step is forward and backward, wall time with Python, the mean of as many steps as '
            f'have 50,000 edges, of 10 in a quick run. Random graphs, {DEGREE} edges a node. Ours: '
            'pyg_fast.accelerate of the same layer. Kernels: with small_graphs("kernel").'])

    def facts(results: dict[str, Result]) -> dict[str, Any]:
        """The time of the faster one of PyG's code and kernels, over ours."""
        def share(ours: str, *others: str) -> float | None:
            times = [results[name].median_ms for name in (ours, *others)]
            known = [time for time in times if time is not None]
            return None if len(known) < len(times) else min(known[1:]) / known[0]
        return {
            name + ' / best choice': share(name, name + KERNEL, PYG) for name in (PLAIN, PREPARED)}

    cells = itertools.product(bench.args.layers, bench.args.widths, bench.args.edges)
    for name, width, edges in cells:
        case = Case(KINDS[name], edges, width, bench.device)
        if bench.quick:
            case.calls = 10
        bench.measure(
            f'A step, {width} channels', name, edges, case.contenders(), label='edges',
            facts=facts, pairs=[(PREPARED, PYG)], ours=PLAIN, rivals=[PYG])
    bench.finish()


if __name__ == '__main__':
    main()
