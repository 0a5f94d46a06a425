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
from typing import Any, NamedTuple

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import pyg_fast
from pyg_fast.ops import spmm

from . import _harness
from ._graphs import Graph
from ._harness import Bench, Contender, Option
from .layers import (
    COMPILED,
    KINK,
    OURS,
    OURS_CAPTURED,
    PLAIN,
    PREPARED,
    PYG,
    captured,
    compiled,
    step_error,
    steps,
    warm,
)
from .spmm import FORWARD, STEP

PRODUCT = 'ours, spmm'  # the product written by hand, where the message is the neighbour's row
EDGE_WIDTH, HEADS = 16, 8
NODE_TYPES = 4
RELATIONS = ((0, 0), (0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0))  # types of both ends
GRAPHS = {
    'quick': ('small',), 'cuda': ('arxiv-like', 'products-like', 'reddit-like'),
    'cpu': ('Computers', 'tolokers'),
}


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


class ByType(nn.Module):
    """HGTConv; returns the features of all nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        types = [str(k) for k in range(NODE_TYPES)]
        self.conv = pyg.HGTConv(width, width, (types, list(edge_types())), HEADS)

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        out = self.conv(x, edges)
        return torch.cat([out[name] for name in x])


class Kind(NamedTuple):
    """A layer, made of a number of channels and the degrees of the graph; ``scratch``:
    matrices of the size of the messages that PyG stores; ``typed``: edges have relations, and
    those of ``'dict'`` are apart, as nodes of different types are; ``tolerance``: allowed error of
    a gradient's norm, for float32 (``None``: gradients are not compared).
    """

    make: Callable[[int, Tensor], nn.Module]
    num_inputs: int = 1
    edge_width: int = 0
    scratch: int = 6
    typed: str = ''
    tolerance: float | None = 3e-4


def edge_types() -> dict[tuple[str, str, str], tuple[int, int]]:
    """The relations: names, and the types of sources and destinations."""
    return {(str(src), f'r{k}', str(dst)): (src, dst) for k, (src, dst) in enumerate(RELATIONS)}


def typed(graph: Graph) -> tuple[Tensor, Tensor]:
    """The graph's edges, in turns between the nodes of each relation; and the relations. Nodes of
    one type follow another, as many of each."""
    device, size = graph.col.device, graph.num_nodes // NODE_TYPES
    relation = torch.arange(graph.num_edges, device=device) % len(RELATIONS)
    ends = torch.tensor(RELATIONS, device=device)[relation].t() * size
    return graph.edge_index % size + ends, relation


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))


def _rgat(width: int) -> nn.Module:
    conv = pyg.RGATConv(width, width // HEADS, len(RELATIONS), heads=HEADS)
    for name in ('w', 'l1', 'b1', 'l2', 'b2'):  # of the attention modes that it has not
        getattr(conv, name).requires_grad_(False)
    return conv


KINDS = {
    'gated message': Kind(lambda width, _: GatedMessage(), 3),
    'GINE': Kind(
        lambda width, _: pyg.GINEConv(nn.Linear(width, width), edge_dim=EDGE_WIDTH), 1, EDGE_WIDTH),
    'PNA': Kind(lambda width, degree: pyg.PNAConv(
        width, width, ['mean', 'min', 'max', 'std'], ['identity', 'amplification', 'attenuation'],
        torch.bincount(degree.cpu().long())), 1, 0, 16, tolerance=None),
    'EdgeConv mean': Kind(lambda width, _: pyg.EdgeConv(_mlp(width), aggr='mean')),
    'CG': Kind(lambda width, _: pyg.CGConv(width, EDGE_WIDTH), 1, EDGE_WIDTH, 10),
    'FiLM': Kind(lambda width, _: pyg.FiLMConv(width, width)),
    'GEN sum': Kind(lambda width, _: pyg.GENConv(width, width, aggr='add')),
    'sum': Kind(lambda width, _: pyg.SimpleConv('sum')),
    'Transformer': Kind(lambda width, _: pyg.TransformerConv(width, width // HEADS, HEADS)),
    'Transformer with edges': Kind(
        lambda width, _: pyg.TransformerConv(width, width // HEADS, HEADS, edge_dim=EDGE_WIDTH), 1,
        EDGE_WIDTH, 10),
    'GAT': Kind(
        lambda width, _: pyg.GATConv(width, width // HEADS, HEADS), tolerance=KINK),
    'GAT with edges': Kind(
        lambda width, _: pyg.GATConv(width, width // HEADS, HEADS, edge_dim=EDGE_WIDTH), 1,
        EDGE_WIDTH, 10, tolerance=KINK),
    'GATv2 with edges': Kind(
        lambda width, _: pyg.GATv2Conv(width, width // HEADS, HEADS, edge_dim=EDGE_WIDTH), 1,
        EDGE_WIDTH, 10, tolerance=KINK),
    'RGCN': Kind(
        lambda width, _: pyg.RGCNConv(width, width, len(RELATIONS)), 1, 0, 2, 'relation'),
    # PyG stores a matrix of weights for each edge.
    'RGAT': Kind(lambda width, _: _rgat(width), 1, 0, 200, 'relation'),
    'HGT': Kind(lambda width, _: ByType(width), NODE_TYPES, 0, 10, 'dict'),
}


class Case:
    """A layer on a graph: its inputs, its parameters, and steps of all contenders."""

    def __init__(self, kind: Kind, graph: Graph, width: int) -> None:
        self.kind, self.graph, self.width = kind, graph, width
        normal = graph.normal()
        num_nodes = graph.num_nodes // NODE_TYPES * NODE_TYPES if kind.typed else graph.num_nodes
        rows = num_nodes // NODE_TYPES if kind.typed == 'dict' else num_nodes
        self.x = [normal(rows, width) for _ in range(kind.num_inputs)]
        self.edge = normal(graph.num_edges, kind.edge_width) if kind.edge_width else None
        torch.manual_seed(0)  # The same scores of attention near the kink in each run.
        self.layer = kind.make(width, graph.degree).to(graph.col.device)
        self.grad = normal(num_nodes, width)
        if kind.typed:
            for parameter in self.layer.parameters():  # PyG leaves one of RGATConv as it is.
                nn.init.normal_(parameter, std=width ** -0.5)
            self.typed = typed(graph)

    def step(
        self, name: str, mode: str, dtype: torch.dtype = torch.float32
    ) -> Callable[[], tuple[Tensor, ...]]:
        """A step, which returns the output and the gradients of inputs and parameters."""
        layer = copy.deepcopy(self.layer).to(dtype)
        prepared = name in (PREPARED, PRODUCT, OURS_CAPTURED)
        edge_index = self.graph.prepared if prepared else self.graph.edge_index
        if name in OURS:
            layer = pyg_fast.accelerate(layer)
        if name == PRODUCT:
            layer = Product()
        x = [t.to(dtype).clone().requires_grad_(mode == STEP) for t in self.x]
        edge = () if self.edge is None else (self.edge.to(dtype),)
        given: tuple[Any, ...] = (x if len(x) > 1 else x[0], edge_index, *edge)
        if self.kind.typed:
            given = self.of_types(x)
        leaves = [*x, *(p for p in layer.parameters() if p.requires_grad)]
        step = warm(steps(compiled(name, layer), [given], leaves, self.grad.to(dtype), mode))
        for module in layer.modules() if name in OURS else ():
            if getattr(module, '_last_run', ''):
                raise RuntimeError(f"PyG's code ran: {module._last_run}")
        return captured(step) if name == OURS_CAPTURED else step

    def of_types(self, x: Sequence[Tensor]) -> tuple[Any, ...]:
        """The inputs of a layer for nodes or edges of several types."""
        edge_index, relation = self.typed
        if self.kind.typed == 'relation':
            return x[0], edge_index, relation
        size = self.graph.num_nodes // NODE_TYPES
        edges = {
            name: edge_index[:, relation == k] % size for k, name in enumerate(edge_types())}
        return {str(k): each for k, each in enumerate(x)}, edges

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        ours = PLAIN if self.kind.typed else PREPARED
        return self.step(PYG if self.fits(8) else ours, STEP, torch.double)()

    def fits(self, size: int) -> bool:
        """Whether PyG's layer fits into memory, with numbers of `size` bytes."""
        device = self.grad.device
        limit = torch.cuda.get_device_properties(device).total_memory // 4 if (
            device.type == 'cuda') else 1 << 32
        return self.kind.scratch * size * self.graph.num_edges * self.width <= limit

    def contenders(self, mode: str) -> list[Contender]:
        names = [PREPARED] * (not self.kind.typed) + [PLAIN, COMPILED] + [PYG] * self.fits(4)
        if self.grad.is_cuda and not self.kind.typed:
            names.insert(2, OURS_CAPTURED)
        if self.kind is KINDS['sum']:
            names.append(PRODUCT)
        return [
            Contender(name, functools.partial(self.step, name, mode), name in OURS, self.check)
            for name in names]

    def error(self, outputs: Sequence[Tensor]) -> float:
        # PyG divides the gradient of equal maxima. Its standard deviation is 0 below the root of
        # 1e-5, and rounding decides on which side of that a small one is.
        pna = self.kind is KINDS['PNA']
        found = step_error(outputs, self.expected[:len(outputs)], self.kind.tolerance)
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
