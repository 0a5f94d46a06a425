"""Kernels inside torch.compile: our backend beside Inductor alone, which compiles PyG's layers.

python -m benchmarks compiled                      everything below
python -m benchmarks compiled --quick              a minute or less
python -m benchmarks compiled --layers GINE,GAT    only some
python -m benchmarks compiled --sizes molecules    batches of 256 molecules; or of 2,048
python -m benchmarks compiled --sizes hubs         a row and a column with a 15th of the edges
python -m benchmarks compiled --sizes Computers    real graphs: also tolokers

On a GPU each side runs in the default mode of torch.compile and in reduce-overhead; the better one
counts.
"""
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

import pyg_fast
from pyg_fast.graph import prepare_edge_index

from . import _graphs, _harness, published
from ._harness import Bench, Contender, Option, Result
from ._published_inputs import BONDS
from ._published_layers import MoleculeGIN
from .hubs import Own
from .layers import (
    COMPILED,
    KINK,
    PLAIN,
    PREPARED,
    PYG,
    REDUCED,
    on_device,
    step_error,
    steps,
    warm,
)

WIDTH, HEADS, ATOMS, DEPTH, MOLECULE_WIDTH = 64, 8, 119, 5, 300
REDUCE = 'reduce-overhead'
OURS = {f'{form}{mode}': form for form in (PREPARED, PLAIN) for mode in ('', f', {REDUCE}')}
EAGER = f'{PREPARED}, eager'
RIVALS = (COMPILED, REDUCED)
MOLECULES = {'molecules': 256, 'many molecules': 2048}
REAL = 'Computers', 'tolokers'
SIZES = ('arxiv-like', 'hubs', *REAL, *MOLECULES)


class Gated(pyg.MessagePassing):
    """A gate of both ends and the edge."""

    def __init__(self, width: int) -> None:
        super().__init__('sum')
        self.target, self.source, self.value, self.edge = (
            nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(
            edge_index, k=self.target(x), q=self.source(x), v=self.value(x), e=self.edge(e))

    def message(self, k_i: Tensor, q_j: Tensor, v_j: Tensor, e: Tensor) -> Tensor:
        return torch.sigmoid(k_i + q_j + e) * v_j


class Two(nn.Module):
    """Two layers with batch norm between them."""

    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two, self.norm = one, two, nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor, *e: Tensor) -> Tensor:
        return self.two(F.relu(self.norm(self.one(x, edge_index, *e))), edge_index, *e)


class Molecules(nn.Module):
    """The GIN of OGB's molecules: five layers, embeddings of atoms and bonds."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms = nn.Embedding(ATOMS, MOLECULE_WIDTH)
        self.convs = nn.ModuleList(MoleculeGIN(MOLECULE_WIDTH) for _ in range(DEPTH))
        self.norms = nn.ModuleList(nn.BatchNorm1d(MOLECULE_WIDTH) for _ in range(DEPTH))

    def forward(self, atom: Tensor, edge_index: Tensor, bond: Tensor) -> Tensor:
        x = self.atoms(atom)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x, edge_index, bond)))
        return x


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def gine() -> nn.Module:
    return pyg.GINEConv(mlp(), edge_dim=WIDTH)


def gat() -> nn.Module:
    return pyg.GATConv(WIDTH, WIDTH // HEADS, HEADS, add_self_loops=False)


class Kind(NamedTuple):
    """``edges``: whether the layer takes features of the edges."""

    make: Callable[[], nn.Module]
    edges: bool = False


KINDS = {
    'own sum': Kind(Own, True),
    'own gated': Kind(lambda: Gated(WIDTH), True),
    'GINE': Kind(gine, True),
    'Transformer 8 x 8 edges': Kind(
        lambda: pyg.TransformerConv(WIDTH, WIDTH // HEADS, HEADS, edge_dim=WIDTH), True),
    'GAT 8 x 8': Kind(gat),
    'GATv2 8 x 8': Kind(
        lambda: pyg.GATv2Conv(WIDTH, WIDTH // HEADS, HEADS, add_self_loops=False)),
    'SAGE mean': Kind(lambda: pyg.SAGEConv(WIDTH, WIDTH)),
    'GIN': Kind(lambda: pyg.GINConv(mlp())),
    'two of GINE': Kind(lambda: Two(gine(), gine()), True),
    'two of GAT': Kind(lambda: Two(gat(), gat())),
}
MOLECULE_NET = 'molecule GIN'


class Case:
    """A layer, compiled once for all graphs by each contender."""

    def __init__(self, kind: Kind, device: torch.device) -> None:
        torch.manual_seed(0)
        self.kind, self.layer = kind, kind.make().to(device)
        self.compiled: dict[str, nn.Module] = {}

    def model(self, name: str) -> nn.Module:
        if name not in self.compiled:
            layer = copy.deepcopy(self.layer)
            mode = REDUCE if name.endswith(REDUCE) else None
            made: Any = layer  # PyG's, eager
            if name in RIVALS:
                made = torch.compile(layer, dynamic=True, mode=mode)
            elif name == EAGER:
                made = pyg_fast.accelerate(layer)
            elif name in OURS:
                made = pyg_fast.compile(layer, fullgraph=True, dynamic=True, mode=mode)
            self.compiled[name] = made
        return self.compiled[name]


class Inputs(NamedTuple):
    """``x``: features or atoms; ``graphs``: by what takes them, with features or bonds of the
    edges."""

    x: Tensor
    graphs: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def make(cls, edge_index: Tensor, num_nodes: int, atoms: bool) -> 'Inputs':
        device, num_edges = edge_index.device, edge_index.size(1)
        generator = torch.Generator(device=device).manual_seed(1)

        def integers(count: int, high: int) -> Tensor:
            return torch.randint(high, (count,), device=device, generator=generator)

        if atoms:
            x = integers(num_nodes, ATOMS)
            edges = torch.stack([integers(num_edges, high) for high in BONDS], 1)
        else:
            x = _graphs.normal(device)(num_nodes, WIDTH)
            edges = _graphs.normal(device, 2)(num_edges, WIDTH)
        prepared, perm = prepare_edge_index(edge_index, (num_nodes, num_nodes))
        return cls(x, {PREPARED: (prepared, edges[perm]), PLAIN: (edge_index, edges)})


def step(
    case: Case, inputs: Inputs, grad: Tensor, name: str, dtype: torch.dtype = torch.float32,
) -> Callable[[], tuple[Tensor, ...]]:
    exact = dtype == torch.double
    layer = copy.deepcopy(case.layer).double() if exact else case.model(name)
    form = PREPARED if name == EAGER else OURS.get(name, PLAIN)
    edge_index, edges = inputs.graphs[form]
    x = inputs.x
    leaves = [*layer.parameters()]
    if x.is_floating_point():
        x, edges = x.to(dtype).clone().requires_grad_(), edges.to(dtype)
        leaves = [x, *leaves]
    given = (x, edge_index, *[edges] * case.kind.edges)
    run = steps(layer, [given], leaves, grad.to(dtype))

    def once() -> tuple[Tensor, ...]:
        torch.compiler.cudagraph_mark_step_begin()
        return run()

    return run if name == PYG or exact else warm(once)


def busy_ms(run: Callable[[], Any]) -> float:
    """The time of the kernels of a step."""
    return sum(event.time_range.elapsed_us() for event in on_device(run)) / 1e3


def better(results: Mapping[str, Result], names: Sequence[str]) -> float | None:
    times = [results[name].median_ms for name in names if name in results]
    found = [time for time in times if time is not None]
    return min(found) if found else None


def ratios(results: Mapping[str, Result]) -> dict[str, float]:
    """Of the better mode of PyG over that of ours."""
    theirs, out = better(results, RIVALS), {}
    for form in (PREPARED, PLAIN):
        ours = better(results, [name for name, of in OURS.items() if of == form])
        if theirs is not None and ours is not None:
            out[f'PyG / {form}'] = theirs / ours
    return out


def run_cell(bench: Bench, size: str, name: str, case: Case, inputs: Inputs) -> None:
    with torch.no_grad():
        out = case.layer(inputs.x, *inputs.graphs[PLAIN][:1 + case.kind.edges])
    grad = _graphs.normal(bench.device, 3)(*out.shape)
    expected = step(case, inputs, grad, PLAIN, torch.double)()
    # Of PyG in float32 itself, where layers follow each other.
    allowed = max(1.0, 2 * step_error(step(case, inputs, grad, PYG)(), expected, KINK))
    made: dict[str, Callable[[], Any]] = {}

    def make(which: str) -> Callable[[], Any]:
        made[which] = step(case, inputs, grad, which)
        return made[which]

    def facts(results: Mapping[str, Result]) -> dict[str, Any]:
        found: dict[str, Any] = ratios(results)
        if bench.cuda:
            for which in (PREPARED, PLAIN, COMPILED):
                if which in made:
                    found[f'busy: {which}'] = busy_ms(made[which])
        return found

    bench.measure(
        f'A compiled training step, {size}', name, inputs.x.size(-1) if inputs.x.dim() > 1 else
        MOLECULE_WIDTH, [
            Contender(which, functools.partial(make, which), which not in RIVALS,
                      lambda out: step_error(out, expected, KINK) / allowed)
            for which in (*OURS, EAGER, *RIVALS)
            if bench.cuda or not which.endswith(REDUCE)],  # CUDA graphs
        bench.few(bench.args.rounds), label='channels', memory=True, facts=facts)


def graph_of(bench: Bench, size: str) -> tuple[Tensor, int] | None:
    if size not in MOLECULES:
        return published.graph_of(bench, size)
    edge_index, num_nodes = published.molecules(4 if bench.quick else MOLECULES[size])
    return edge_index.to(bench.device), num_nodes


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'compiled', __doc__, argv,
        layers=_harness.names('layer', tuple(KINDS), {
            'quick': ('GINE', 'GAT 8 x 8'), 'usual': tuple(KINDS)}),
        sizes=_harness.names('size', SIZES, {
            'quick': ('hubs', 'molecules'), 'cuda': ('arxiv-like', 'hubs', *MOLECULES),
            'cpu': (*REAL, 'hubs', 'molecules')}),
        nodes=Option({'quick': 200, 'cuda': 100_000, 'cpu': 20_000}, help='with hubs'),
        edges=Option({'quick': 1_000, 'cuda': 1_500_000, 'cpu': 300_000}, help='with hubs'),
        rounds=Option({'quick': 3, 'usual': 11}, help='at most'), notes=[
            'A step is forward and backward in float32, wall time with Python; dynamic=True, '
            'compilation is not counted. Ours: pyg_fast.compile with fullgraph=True; eager: '
            'pyg_fast.accelerate alone. PyG / ours: the better of two modes over the better of '
            'two. Busy: the sum of the times of the kernels, in ms.'])
    torch._dynamo.config.recompile_limit = 1000
    found = {size: graph_of(bench, size) for size in bench.args.sizes}
    graphs = {size: graph for size, graph in found.items() if graph is not None}
    for size, (edge_index, num_nodes) in graphs.items():
        bench.report.graphs[size] = {
            'nodes': num_nodes, 'edges': edge_index.size(1),
            'largest_degree': int(edge_index[1].bincount().max())}
    large = {
        size: Inputs.make(*graph, False) for size, graph in graphs.items() if size not in MOLECULES}
    for name in bench.args.layers if large else ():
        case = Case(KINDS[name], bench.device)
        for size, inputs in large.items():
            run_cell(bench, size, name, case, inputs)
        torch._dynamo.reset()
        _harness.free(bench.cuda)
    small = [size for size in graphs if size in MOLECULES]
    if small:
        case = Case(Kind(Molecules, True), bench.device)
        for size in small:
            run_cell(bench, size, MOLECULE_NET, case, Inputs.make(*graphs[size], True))
    cells = [ratios(cell.results) for section in bench.report.sections for cell in section.cells]
    for form in (PREPARED, PLAIN):
        of_form = [cell[f'PyG / {form}'] for cell in cells if f'PyG / {form}' in cell]
        if of_form:
            bench.note(f'{form}: geometric mean {geometric_mean(of_form):.2f}, least '
                       f'{min(of_form):.2f} of PyG, over {len(of_form)} rows.')
    bench.finish()


if __name__ == '__main__':
    main()
