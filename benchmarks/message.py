"""Layers whose message runs as one generated kernel: beside PyG, eager and compiled.

python -m benchmarks message                    all layers on planted graphs
python -m benchmarks message --quick            a minute or less
python -m benchmarks message --layers GINE      only some
python -m benchmarks message --modes step       forward and backward only
"""
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import pyg_fast
from pyg_fast.ops import spmm

from . import _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option
from .layers import COMPILED, PLAIN, PREPARED, PYG, compiled, step_error, steps, warm
from .spmm import FORWARD, STEP

PRODUCT = 'ours, spmm'  # the product written by hand, where the message is the neighbour's row
EDGE_WIDTH, HEADS = 16, 8
GRAPHS = {
    'quick': ('small',), 'cuda': ('arxiv-like', 'products-like', 'reddit-like'),
    'cpu': ('Computers', 'tolokers'),
}
_TOLERANCE = 3e-4  # of a gradient's norm, for float32, where rounding decides nothing


class GatedMessage(pyg.MessagePassing):
    """The message of ResGatedGraphConv without its linear maps."""

    def forward(self, x: Sequence[Tensor], edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, k=x[0], q=x[1], v=x[2])

    def message(self, k_i: Tensor, q_j: Tensor, v_j: Tensor) -> Tensor:
        return torch.sigmoid(k_i + q_j) * v_j


class Product(nn.Module):
    """The sum of the neighbours' rows by the op itself."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return spmm(edge_index, x)


class Kind(NamedTuple):
    """A layer, made of a number of channels and the degrees of the graph; ``scratch``:
    matrices of the size of the messages that PyG stores.
    """

    make: Callable[[int, Tensor], nn.Module]
    num_inputs: int = 1
    edge_width: int = 0
    scratch: int = 6


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))


KINDS = {
    'gated message': Kind(lambda width, _: GatedMessage(), 3),
    'GINE': Kind(
        lambda width, _: pyg.GINEConv(nn.Linear(width, width), edge_dim=EDGE_WIDTH), 1, EDGE_WIDTH),
    'PNA': Kind(lambda width, degree: pyg.PNAConv(
        width, width, ['mean', 'min', 'max', 'std'], ['identity', 'amplification', 'attenuation'],
        torch.bincount(degree.cpu().long())), 1, 0, 16),
    'EdgeConv mean': Kind(lambda width, _: pyg.EdgeConv(_mlp(width), aggr='mean')),
    'CG': Kind(lambda width, _: pyg.CGConv(width, EDGE_WIDTH), 1, EDGE_WIDTH, 10),
    'FiLM': Kind(lambda width, _: pyg.FiLMConv(width, width)),
    'GEN sum': Kind(lambda width, _: pyg.GENConv(width, width, aggr='add')),
    'sum': Kind(lambda width, _: pyg.SimpleConv('sum')),
    'Transformer': Kind(lambda width, _: pyg.TransformerConv(width, width // HEADS, HEADS)),
    'Transformer with edges': Kind(
        lambda width, _: pyg.TransformerConv(width, width // HEADS, HEADS, edge_dim=EDGE_WIDTH), 1,
        EDGE_WIDTH, 10),
}


class Case:
    """A layer on a graph: its inputs, its parameters, and steps of all contenders."""

    def __init__(self, kind: Kind, graph: Graph, width: int) -> None:
        self.kind, self.graph, self.width = kind, graph, width
        normal = graph.normal()
        self.x = [normal(graph.num_nodes, width) for _ in range(kind.num_inputs)]
        self.edge = normal(graph.num_edges, kind.edge_width) if kind.edge_width else None
        self.layer = kind.make(width, graph.degree).to(graph.col.device)
        self.grad = normal(graph.num_nodes, width)

    def step(
        self, name: str, mode: str, dtype: torch.dtype = torch.float32
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A step, which returns the output and the gradients of inputs and parameters."""
        layer = copy.deepcopy(self.layer).to(dtype)
        prepared = name in (PREPARED, PRODUCT)
        edge_index = self.graph.prepared if prepared else self.graph.edge_index
        if name in (PREPARED, PLAIN):
            layer = pyg_fast.accelerate(layer)
        if name == PRODUCT:
            layer = Product()
        x = [t.to(dtype).clone().requires_grad_(mode == STEP) for t in self.x]
        edge = () if self.edge is None else (self.edge.to(dtype),)
        step = warm(steps(
            compiled(name, layer), [(x if len(x) > 1 else x[0], edge_index, *edge)],
            [*x, *layer.parameters()], self.grad.to(dtype), mode))
        if name in (PREPARED, PLAIN) and layer._last_run:
            raise RuntimeError(f"PyG's code ran: {layer._last_run}")
        return step

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PYG if self.fits(8) else PREPARED, STEP, torch.double)()

    def fits(self, size: int) -> bool:
        """Whether PyG's layer fits into memory, with numbers of `size` bytes."""
        device = self.grad.device
        limit = torch.cuda.get_device_properties(device).total_memory // 4 if (
            device.type == 'cuda') else 1 << 30
        return self.kind.scratch * size * self.graph.num_edges * self.width <= limit

    def contenders(self, mode: str) -> list[Contender]:
        names = [PREPARED, PLAIN, COMPILED] + [PYG] * self.fits(4)
        if self.kind is KINDS['sum']:
            names.append(PRODUCT)
        return [
            Contender(name, functools.partial(self.step, name, mode), name in (PREPARED, PLAIN),
                      self.check)
            for name in names]

    def error(self, outputs: Sequence[Tensor]) -> float:
        # PyG divides the gradient of equal maxima. Its standard deviation is 0 below the root of
        # 1e-5, and rounding decides on which side of that a small one is.
        pna = self.kind is KINDS['PNA']
        found = step_error(outputs, self.expected[:len(outputs)], None if pna else _TOLERANCE)
        return found / 10 if pna else found

    @functools.cached_property
    def by_pyg(self) -> tuple[Tensor, ...]:
        try:
            return self.step(PYG if self.fits(8) else COMPILED, STEP)()
        except RuntimeError:  # Inductor's grid is too large for some graphs.
            return ()

    def check(self, outputs: Sequence[Tensor]) -> float:
        """The error, of which twice that of PyG's layer in float32 is allowed."""
        of_pyg = self.error(self.by_pyg[:len(outputs)]) if self.by_pyg else 0.0
        return self.error(outputs) / max(1.0, 2 * of_pyg)


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'message', __doc__, argv, graphs=GRAPHS,
        layers=_harness.names('layer', tuple(KINDS), tuple(KINDS)),
        modes=_harness.names('mode', ('forward', 'step'), ('forward', 'step')),
        widths=Option((64, 128), _harness.integers, 'channels'), notes=[
            'Wall time with launches and Python, float32; the first call is not counted. Ours: '
            "pyg_fast.accelerate of PyG's layer. Compared with PyG's layer in float64, or with "
            'ours where that does not fit into memory.'])
    for graph in bench.graphs():
        graph = graph.without_loops()
        for name, width, mode in itertools.product(
                bench.args.layers, bench.args.widths, bench.args.modes):
            case = Case(KINDS[name], graph, width)
            way = STEP if mode == 'step' else FORWARD
            bench.measure(
                f'{mode}', f'{graph.name}: {name}', width, case.contenders(way), label='channels',
                memory=True, pairs=[(PLAIN, PYG)])
    bench.finish()


if __name__ == '__main__':
    main()
