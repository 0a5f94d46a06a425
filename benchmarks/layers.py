"""Training steps of single layers: ours against PyG, eager and compiled.

python -m benchmarks.layers             every layer, on the planted graphs of the grid
python -m benchmarks.layers --quick     a minute or less

torch.compile is what a PyG user would try first: its default and reduce-overhead both run.
"""
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, GINConv, SAGEConv

import pyg_fast.nn as fast
from pyg_fast.transforms import ToCSR

from . import _graphs, _harness
from ._graphs import Graph
from ._harness import Cell, Contender, Settings, Versus
from .gcn import deviation

PREPARED, PLAIN = 'ours, prepared', 'ours, edge_index'
PYG, COMPILED, REDUCED = 'PyG', 'PyG, torch.compile', 'PyG, torch.compile reduce-overhead'
RIVALS = [PYG, COMPILED, REDUCED]
NAMES = ('arxiv-like', 'reddit-like')
TITLE = 'One layer, forward + backward'


@dataclasses.dataclass(frozen=True)
class Kind:
    """A layer of PyG's and ours, made by the same arguments."""

    pyg: type[nn.Module]
    ours: type[nn.Module]
    make: Callable[[type[nn.Module], int], nn.Module]
    compared: int = 2  # the output, and the gradient of the input


def _plain(cls: type[nn.Module], width: int, **kwargs: Any) -> nn.Module:
    return cls(width, width, **kwargs)


def _heads(cls: type[nn.Module], width: int) -> nn.Module:
    return cls(width, width // 8, heads=8)


def _gin(cls: type[nn.Module], width: int) -> nn.Module:
    return cls(nn.Linear(width, width))


KINDS = {
    'GCN': Kind(GCNConv, fast.PathPreparedGCNConv, _plain),
    'SAGE mean': Kind(SAGEConv, fast.PathPreparedSAGEConv, _plain),
    # PyG shares the gradient of equal maxima, ours goes to one of them.
    'SAGE max': Kind(
        SAGEConv, fast.PathPreparedSAGEConv, functools.partial(_plain, aggr='max'), compared=1),
    'GIN': Kind(GINConv, fast.PathPreparedGINConv, _gin),
    # A score near zero may have the other sign in float64, and leaky_relu another slope.
    'GAT 8 heads': Kind(GATConv, fast.FusedGATConv, _heads, compared=1),
    'GATv2 8 heads': Kind(GATv2Conv, fast.FusedGATv2Conv, _heads, compared=1),
}


class Case:
    """A layer on a graph: its input and parameters, and ways to run a step."""

    def __init__(self, kind: Kind, graph: Graph, width: int) -> None:
        generator = torch.Generator(graph.col.device).manual_seed(1)
        shape = graph.num_nodes, width
        self.kind, self.width = kind, width
        self.edge_index = graph.edge_index
        self.prepared = ToCSR()(
            Data(edge_index=self.edge_index, num_nodes=graph.num_nodes)).edge_index
        self.x = torch.randn(shape, generator=generator, device=graph.col.device)
        self.grad = torch.randn(shape, generator=generator, device=graph.col.device)
        self.state = kind.make(kind.pyg, width).to(self.x.device).state_dict()

    def step(self, name: str) -> Callable[[], tuple[Tensor, ...]]:
        """Output, and the gradients of the input and of each parameter."""
        ours = name in (PREPARED, PLAIN)
        conv = self.kind.make(self.kind.ours if ours else self.kind.pyg, self.width)
        conv.to(self.x.device).load_state_dict(self.state)
        edge_index = self.prepared if name == PREPARED else self.edge_index
        x = self.x.clone().requires_grad_()
        leaves = [x, *conv.parameters()]
        run: Callable[..., Tensor] = conv
        if name in (COMPILED, REDUCED):
            run = torch.compile(conv, mode='reduce-overhead' if name == REDUCED else None)

        def step() -> tuple[Tensor, ...]:
            out = run(x, edge_index)
            return out.detach(), *torch.autograd.grad(out, leaves, self.grad)

        for _ in range(3 * (name in (COMPILED, REDUCED))):  # compiles, warms up, captures
            step()
        return step

    def contenders(self) -> list[Contender]:
        expected: list[tuple[Tensor, ...]] = []

        def check(outputs: Sequence[Tensor]) -> float:
            # Our layer in float64 is the reference: the tests compare it with PyG's.
            if not expected:
                conv = self.kind.make(self.kind.ours, self.width).to(self.x.device)
                conv.load_state_dict(self.state)
                conv.double()
                x = self.x.double().requires_grad_()
                out = conv(x, self.prepared)
                expected.append((out.detach(), *torch.autograd.grad(out, [x], self.grad.double())))
            compared = self.kind.compared
            return deviation(outputs[:compared], expected[0][:compared])

        return [
            Contender(name, functools.partial(self.step, name), name in (PREPARED, PLAIN), check)
            for name in (PREPARED, PLAIN, *RIVALS)
        ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = _harness.parser('Layers in training, beside PyG eager and compiled.')
    parser.add_argument('--graphs', type=_harness.choice('graph', _graphs.NAMES))
    parser.add_argument('--layers', type=_harness.choice('layer', list(KINDS)))
    parser.add_argument('--width', type=int, default=64)
    args = parser.parse_args(argv)
    settings: Settings = _harness.start(args)
    torch._dynamo.config.recompile_limit = 1000  # A layer of each kind is compiled anew.
    report = _harness.Report('layers', args, [
        'Wall time in ms of a step to the end of its work, launches and Python included, medians, '
        'contenders taking turns; float32. The best of three rivals counts: PyG, and PyG under '
        'torch.compile, default and reduce-overhead, compilation not counted. † inexact, ‡ one '
        'cold run.'])
    names = args.graphs or (('small',) if args.quick else
                            ('Computers',) if settings.device.type == 'cpu' else NAMES)
    for graph in _graphs.load_each(names, settings.device, report.left_out):
        graph = graph.without_loops()
        report.graphs[graph.name] = graph.summary()
        for name in args.layers or KINDS:
            case = Case(KINDS[name], graph, args.width)
            section = report.section(
                TITLE, columns={each: [each] for each in (PREPARED, PLAIN, *RIVALS)},
                width='channels', memory=True, versus=[
                    Versus('the best', PREPARED, RIVALS), Versus(PYG, PREPARED, [PYG]),
                    Versus('torch.compile', PREPARED, [COMPILED, REDUCED]),
                    Versus('the best', PLAIN, RIVALS)])
            results = _harness.measure(case.contenders(), settings)
            section.cells.append(Cell(f'{graph.name}: {name}', args.width, results))
            report.save()
            _harness.log(f'{graph.name} {name}: ' + ', '.join(
                f'{each} {result.text()}' for each, result in results.items()))
    report.finish()


if __name__ == '__main__':
    main()
