"""Layers with an MLP of each edge, in training and inference: beside PyG, eager and compiled.

python -m benchmarks edge_mlp                            everything below
python -m benchmarks edge_mlp --quick                    a minute or less
python -m benchmarks edge_mlp --layers "two layers"      only some
python -m benchmarks edge_mlp --modes forward            inference alone
python -m benchmarks edge_mlp --precisions highest       products as exact as float32
python -m benchmarks edge_mlp --hub 100000               so many edges end at one node
python -m benchmarks edge_mlp --graphs Computers         in place of random edges
python -m benchmarks edge_mlp --eager-only               without torch.compile, which takes long
python -m benchmarks edge_mlp --without-lists            prepared graphs alone

All contenders of a cell compute in the same precision: `highest` and `high` are torch's settings
for products of float32, with `bfloat16` weights and features have that type.
"""
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

import pyg_fast
from pyg_fast.graph import prepare_edge_index

from . import _graphs, _harness
from ._harness import Bench, Contender, Option
from .layers import (
    COMPILED,
    OURS_CAPTURED,
    OURS_COMPILED,
    PLAIN,
    PREPARED,
    PYG,
    REDUCED,
    captured,
    compiled,
    step_error,
    warm,
)

PRECISIONS = ('highest', 'high', 'bfloat16')
# Allowed errors of the norms of results and gradients.
TOLERANCES = {'highest': 1e-4, 'high': 3e-2, 'bfloat16': 1e-1}
GAUSSIANS = 50
TITLES = {'step': 'A step', 'forward': 'Forward'}
OURS_REDUCED = 'ours, torch.compile reduce-overhead'
OURS = (PREPARED, PLAIN, OURS_COMPILED, OURS_REDUCED, OURS_CAPTURED)
Inputs = tuple[Tensor, ...]


class TwoLayers(pyg.MessagePassing):
    """Two layers on both ends, summed behind an activation."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.first, self.second = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (self.propagate(edge_index, x=x),)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.first(torch.cat([x_i, x_j], -1)))))


class EdgeMax(nn.Module):
    """EdgeConv under a maximum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = pyg.EdgeConv(nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width)))

    def forward(self, edge_index: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (self.conv(x, edge_index),)


class ContinuousFilter(pyg.MessagePassing):
    """SchNet's convolution: a filter of the distance times the neighbour."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.filter = nn.Sequential(
            nn.Linear(GAUSSIANS, width), nn.Softplus(), nn.Linear(width, width))

    def forward(self, edge_index: Tensor, x: Tensor, smeared: Tensor) -> tuple[Tensor, ...]:
        return (self.propagate(edge_index, x=x, smeared=smeared),)

    def message(self, x_j: Tensor, smeared: Tensor) -> Tensor:
        return x_j * self.filter(smeared)


class Equivariant(pyg.MessagePassing):
    """EGNN: gated messages, summed beside the moves of the coordinates."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.edge = nn.Sequential(
            nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.gate = nn.Sequential(nn.Linear(width, 1), nn.Sigmoid())
        self.move = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.width = width

    def forward(self, edge_index: Tensor, x: Tensor, pos: Tensor) -> tuple[Tensor, ...]:
        return self.propagate(edge_index, x=x, pos=pos).split([self.width, 3], -1)

    def message(self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        gap = pos_i - pos_j
        m = self.edge(torch.cat([x_i, x_j, gap.square().sum(-1, keepdim=True)], -1))
        return torch.cat([m * self.gate(m), gap * self.move(m)], -1)


class Mesh(pyg.MessagePassing):
    """MeshGraphNets: new features of edges, which the nodes sum."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr='add')
        self.mlp = nn.Sequential(
            nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width))

    def forward(self, edge_index: Tensor, x: Tensor, e: Tensor) -> tuple[Tensor, ...]:
        out = self.propagate(edge_index, x=x, e=e)
        return out, self.new

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        self.new = e + self.mlp(torch.cat([x_i, x_j, e], -1))
        return self.new


class Kind(NamedTuple):
    """A layer, made of a number of channels; ``edges``: channels of an input of edges, 0 for those
    of the nodes, ``has_pos``: whether it takes coordinates; ``divide``: of nodes and edges;
    ``fixed``: whether the input of edges is data, without a gradient."""

    make: Callable[[int], nn.Module]
    edges: int | None = None
    has_pos: bool = False
    divide: tuple[float, float] = (1, 1)
    fixed: bool = False


KINDS = {
    'two layers': Kind(TwoLayers),
    'EdgeConv max': Kind(EdgeMax),
    'SchNet filter': Kind(ContinuousFilter, GAUSSIANS, divide=(5, 1.875)),
    'SchNet fixed': Kind(ContinuousFilter, GAUSSIANS, divide=(5, 1.875), fixed=True),
    'EGNN': Kind(Equivariant, has_pos=True),
    'mesh': Kind(Mesh, 0, divide=(1, 2.5)),
}


class Case:
    """A layer on a random graph: its inputs, and steps of all contenders."""

    def __init__(
        self, kind: Kind, width: int, precision: str, mode: str, bench: Bench,
        graph: _graphs.Graph | None,
    ) -> None:
        args, self.precision, self.mode = bench.args, precision, mode
        draw = torch.Generator().manual_seed(0)
        if graph is None:
            nodes, edges = (
                max(2, int(n / by))
                for n, by in zip((args.nodes, args.edges), kind.divide, strict=True))
            index = torch.randint(nodes, (2, edges), generator=draw)
            index[1, :min(args.hub, edges)] = 0
        else:
            nodes, index = graph.num_nodes, graph.edge_index
            edges = index.size(1)
        # The edges of both lists are in the same order, sorted by destination.
        self.prepared, perm = prepare_edge_index(index.to(bench.device), (nodes, nodes))
        self.edge_index = index.to(bench.device)[:, perm]
        normal = functools.partial(torch.randn, generator=draw)
        x = [normal(nodes, width)]
        if kind.has_pos:
            x.append(normal(nodes, 3))
        if kind.edges is not None:
            x.append(normal(edges, kind.edges or width))
        self.x = [each.to(bench.device) for each in x]
        self.needs = [not (kind.fixed and k == len(x) - 1) for k in range(len(x))]
        torch.manual_seed(0)
        self.layer = kind.make(width).to(bench.device)

    def step(self, name: str, dtype: torch.dtype | None = None) -> Callable[[], Inputs]:
        """The mode's function, which returns the outputs and, of a step, the gradients of inputs
        and parameters."""
        if dtype is None:
            dtype = torch.bfloat16 if self.precision == 'bfloat16' else torch.float32
        layer: Any = copy.deepcopy(self.layer).to(dtype)
        edge_index = self.prepared if name in OURS and name != PLAIN else self.edge_index
        if name in OURS:
            layer = pyg_fast.accelerate(layer)
        if name in (OURS_COMPILED, OURS_REDUCED):  # Another backend would compile PyG's code.
            mode = 'reduce-overhead' if name == OURS_REDUCED else None
            run: Any = pyg_fast.compile(layer, mode=mode)
        else:
            run = compiled(name, layer)
        # Own ones: a layer that keeps its output keeps their nodes of autograd, and their stream.
        leaves = [
            x.to(dtype, copy=True).requires_grad_(need)
            for x, need in zip(self.x, self.needs, strict=True)]
        wanted = [*(x for x in leaves if x.requires_grad), *layer.parameters()]

        @torch.no_grad()
        def forward() -> Inputs:
            return tuple(run(edge_index, *leaves))

        def step() -> Inputs:
            outs = run(edge_index, *leaves)
            grads = torch.autograd.grad(outs, wanted, [torch.ones_like(out) for out in outs])
            return (*(out.detach() for out in outs), *grads)

        function = step if self.mode == 'step' else forward
        return captured(function) if name == OURS_CAPTURED else warm(function)

    @functools.cached_property
    def expected(self) -> Inputs:
        return self.step(PYG, torch.double)()

    @functools.cached_property
    def error_of_pyg(self) -> float:
        return self.error(self.step(PYG)())

    def error(self, outputs: Sequence[Tensor]) -> float:
        """The largest error of the norm of a result, by the allowed one."""
        empty = torch.zeros(1, 1)  # In place of a result that is compared row by row.
        return step_error(
            [empty, *outputs], [empty, *self.expected], TOLERANCES[self.precision])

    def check(self, outputs: Sequence[Tensor]) -> float:
        """The error, of which twice that of PyG's layer in the same precision is allowed."""
        return self.error(outputs) / max(1.0, 2 * self.error_of_pyg)

    def contenders(self, args: Any) -> list[Contender]:
        is_cuda, compiles = self.x[0].is_cuda, not args.eager_only
        names = [PREPARED, *[PLAIN] * (not args.without_lists), *[OURS_CAPTURED] * is_cuda, PYG]
        names += [OURS_COMPILED, COMPILED] * compiles
        names += [OURS_REDUCED, REDUCED] * (compiles and is_cuda)
        return [
            Contender(name, functools.partial(self.step, name), name in OURS,
                      self.check if name in OURS else None) for name in names]


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'edge-mlp', __doc__, argv, graphs=(), known_graphs=_graphs.NAMES,
        layers=_harness.names('layer', tuple(KINDS), tuple(KINDS)),
        modes=_harness.names('mode', ('step', 'forward'), ('step', 'forward')),
        precisions=_harness.names('precision', PRECISIONS, PRECISIONS),
        widths=Option({'quick': (16,), 'cuda': (64, 128), 'cpu': (64,)}, _harness.integers),
        nodes=Option({'quick': 200, 'cuda': 100_000, 'cpu': 10_000}, int),
        edges=Option({'quick': 3_000, 'cuda': 1_500_000, 'cpu': 150_000}, int),
        hub=Option({'quick': 100, 'cuda': 0, 'cpu': 0}, int, 'edges that end at one node'),
        eager_only=Option(False), without_lists=Option(False), notes=[
            'A step is forward and backward, wall time with Python; forward: without gradients. '
            "Ours: pyg_fast.accelerate of the same layer, compared with PyG's in float64. SchNet: "
            'a fifth of the nodes, 1 / 1.875 of the edges; fixed: its Gaussians get no gradient; '
            'mesh: 1 / 2.5 of the edges. CUDA graph: the whole step; reduce-overhead: those that '
            'torch.compile makes of its parts.'])
    before = torch.get_float32_matmul_precision()
    for graph in bench.graphs() if bench.args.graphs else [None]:
        of_graph = '' if graph is None else f', {graph.name}'
        cells = itertools.product(
            bench.args.modes, bench.args.precisions, bench.args.layers, bench.args.widths)
        for mode, precision, name, width in cells:
            torch.set_float32_matmul_precision('high' if precision == 'high' else 'highest')
            case = Case(KINDS[name], width, precision, mode, bench, graph)
            bench.measure(
                f'{TITLES[mode]}, {precision}{of_graph}', name, width, case.contenders(bench.args),
                label='channels', memory=True, pairs=[
                    (PLAIN, PYG), (OURS_COMPILED, COMPILED), (OURS_REDUCED, REDUCED),
                    (OURS_CAPTURED, REDUCED)])
    torch.set_float32_matmul_precision(before)
    bench.finish()


if __name__ == '__main__':
    main()
