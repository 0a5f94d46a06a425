"""Steps on graphs with hubs, long sums, odd widths and many relations: ours beside PyG.

python -m benchmarks hubs                       everything below
python -m benchmarks hubs --quick               a minute or less
python -m benchmarks hubs --before TREE         a second built checkout beside it, cell by cell
python -m benchmarks hubs --parts layers        a row and a column of h of the edges
python -m benchmarks hubs --parts both          flow='target_to_source'
python -m benchmarks hubs --parts dense         rows of hundreds of edges, and by a power law
python -m benchmarks hubs --parts batches       batches of FastNeighborLoader, from such a graph
python -m benchmarks hubs --parts hetero        four types of nodes, eight relations, as in MAG
python -m benchmarks hubs --parts sums          errors of sums and gradients in float32
python -m benchmarks hubs --parts widths        odd widths beside the next multiple of four
python -m benchmarks hubs --parts relations     RGCNConv with many relations
"""
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import OptTensor
from torch_geometric.utils import scatter, softmax

import pyg_fast
from pyg_fast import ops
from pyg_fast.graph import prepare_edge_index
from pyg_fast.loader import FastNeighborLoader
from pyg_fast.transforms import ToCSR

from . import _graphs, _harness
from ._harness import Bench, Contender, Option, Result, Settings, worst
from .layers import KINK, PLAIN, PREPARED, PYG, step_error, steps

WIDTH, HEADS = 64, 8
SLOWER, LIMIT, SHARE = 1.3, 2e-6, 0.5  # the goals
REPEATS = 11
BATCH, FAN_OUT = 1024, [15, 10, 5]
RIGHT, WRONG = 'holds', 'fails'
EXACT = 'PyG, float64'
REVERSED = 'target_to_source'
DENSE = 'Many edges'
ROWS, BATCHES, TYPED = (
    'A row and a column of h edges', 'A batch of FastNeighborLoader',
    'Four types of nodes, eight relations')


class Own(pyg.MessagePassing):
    """A sum of messages with edge features."""

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_j: Tensor, e: Tensor) -> Tensor:
        return F.relu(x_j + e)


class OwnSoftmax(pyg.MessagePassing):
    """Attention by products of the features at both ends."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(
        self, x_i: Tensor, x_j: Tensor, index: Tensor, ptr: OptTensor, size_i: int,
    ) -> Tensor:
        score = (x_i * x_j).sum(-1, keepdim=True) / x_i.size(-1)
        return softmax(score, index, ptr, size_i) * x_j


class Kind(NamedTuple):
    """A layer of 64 channels, made with options of MessagePassing; ``edges``: with features of as
    many; ``tolerance``: allowed error of a gradient's norm (``None``: not compared).
    """

    make: Callable[..., nn.Module]
    edges: bool = False
    tolerance: float | None = 3e-4


_EACH = WIDTH // HEADS
KINDS = {
    'own sum': Kind(Own, edges=True),
    'Transformer 8 x 8': Kind(functools.partial(pyg.TransformerConv, WIDTH, _EACH, HEADS)),
    'GCN': Kind(functools.partial(pyg.GCNConv, WIDTH, WIDTH)),
    'SAGE mean': Kind(functools.partial(pyg.SAGEConv, WIDTH, WIDTH)),
    # PyG divides the gradient of equal maxima.
    'SAGE max': Kind(functools.partial(pyg.SAGEConv, WIDTH, WIDTH, aggr='max'), tolerance=None),
    'GAT 8 x 8': Kind(functools.partial(pyg.GATConv, WIDTH, _EACH, HEADS), tolerance=KINK),
    'GAT 8 x 8 edges': Kind(
        functools.partial(pyg.GATConv, WIDTH, _EACH, HEADS, edge_dim=WIDTH), True, KINK),
    'GATv2 8 x 8': Kind(functools.partial(pyg.GATv2Conv, WIDTH, _EACH, HEADS), tolerance=KINK),
    'own softmax': Kind(OwnSoftmax),
}


class Hub(NamedTuple):
    """Edges in random order, of which ``size`` go to node 0 and as many come from node 1."""

    edge_index: Tensor
    num_nodes: int
    size: int

    @classmethod
    def make(cls, num_nodes: int, num_edges: int, one_in: int, device: torch.device) -> 'Hub':
        size = num_edges // one_in if one_in else 0
        generator = torch.Generator(device=device).manual_seed(0)
        src, dst = torch.randint(
            num_nodes, (2, num_edges), device=device, generator=generator).unbind()
        dst[:size] = 0
        src[size:2 * size] = 1
        order = torch.randperm(num_edges, device=device, generator=generator)
        return cls(torch.stack([src[order], dst[order]]), num_nodes, size)

    @classmethod
    def by_power_law(cls, num_nodes: int, num_edges: int, device: torch.device) -> 'Hub':
        """Both ends are node k with a probability proportional to the root of 1 / k."""
        generator = torch.Generator(device=device).manual_seed(0)
        share = torch.arange(1, num_nodes + 1, device=device, dtype=torch.double).rsqrt()
        ends = [share.multinomial(num_edges, True, generator=generator) for _ in range(2)]
        return cls(torch.stack(ends), num_nodes, 0)


@functools.cache
def layers(name: str, flow: str, device: torch.device) -> dict[str, nn.Module]:
    """A layer by what runs it, made once: its messages are captured at the first call."""
    torch.manual_seed(0)  # The same scores of attention near the kink in each run.
    layer = KINDS[name].make(flow=flow).to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    return {PLAIN: fast, PREPARED: fast, PYG: layer, EXACT: copy.deepcopy(layer).double()}


class Case:
    """A layer on a graph in the forms of the contenders, each with its edge features."""

    def __init__(
        self, name: str, graphs: Mapping[str, tuple[Tensor, Tensor]], num_nodes: int,
        flow: str = 'source_to_target',
    ) -> None:
        device = graphs[PYG][0].device
        self.kind, self.graphs = KINDS[name], graphs
        self.layers = layers(name, flow, device)
        normal = _graphs.normal(device)
        self.x, self.grad = (normal(num_nodes, WIDTH) for _ in range(2))

    def step(self, name: str) -> Callable[[], tuple[Tensor, ...]]:
        layer, dtype = self.layers[name], torch.double if name == EXACT else torch.float32
        x = self.x.to(dtype).clone().requires_grad_()
        edge_index, features = self.graphs[PYG if name == EXACT else name]
        given = (x, edge_index, *[features.to(dtype)] * self.kind.edges)
        return steps(layer, [given], [x, *layer.parameters()], self.grad.to(dtype))

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(EXACT)()

    def check(self, outputs: Sequence[Tensor]) -> float:
        return step_error(outputs, self.expected, self.kind.tolerance)

    def contenders(self) -> list[Contender]:
        return [
            Contender(name, functools.partial(self.step, name), name != PYG, self.check)
            for name in (PLAIN, PREPARED, PYG) if name in self.graphs]


class Verdict:
    """Compares a cell with that of h = 0, which came first, and with PyG."""

    def __init__(self) -> None:
        self.without: dict[tuple[str, str], float] = {}
        self.held: list[bool] = []

    def __call__(self, layer: str, results: Mapping[str, Result]) -> dict[str, Any]:
        facts: dict[str, Any] = {}
        right = True
        pyg_ms = results[PYG].median_ms
        for name in (PLAIN, PREPARED):
            ms = results[name].median_ms if name in results else None
            if ms is None:
                continue
            slower = ms / self.without.setdefault((layer, name), ms)
            facts[f'{name} / h = 0'] = slower
            right &= slower <= SLOWER and (pyg_ms is None or ms <= pyg_ms)
        self.held.append(right)
        return {**facts, 'goal': RIGHT if right else WRONG}

    def note(self, bench: Bench, part: str) -> None:
        bench.note(f'{part}: the goal holds in {sum(self.held)} of {len(self.held)} rows.')


def launches_hidden(bench: Bench) -> Settings:
    """On a GPU the time of the kernels: what a hub costs does not depend on the host's speed."""
    return dataclasses.replace(bench.few(REPEATS), device_time=True)


def measure(
    bench: Bench, title: str, kinds: Sequence[str], hub: Hub,
    graphs: Mapping[str, tuple[Tensor, Tensor]], num_nodes: int, verdict: Verdict, **options: Any,
) -> None:
    for name in kinds:
        case = Case(name, graphs, num_nodes, **options)
        bench.measure(
            title, name, hub.size, case.contenders(), launches_hidden(bench), label='h',
            facts=functools.partial(verdict, name), pairs=[(PREPARED, PYG)] * (PREPARED in graphs))


def both_forms(hub: Hub) -> dict[str, tuple[Tensor, Tensor]]:
    device = hub.edge_index.device
    features = _graphs.normal(device, 2)(hub.edge_index.size(1), WIDTH)
    data = ToCSR()(Data(
        edge_index=hub.edge_index.clone(), num_nodes=hub.num_nodes, edge_attr=features))
    plain = hub.edge_index, features
    return {PLAIN: plain, PREPARED: (data.edge_index, data.edge_attr), PYG: plain}


def run_layers(bench: Bench, title: str, one_in: Sequence[int], **options: Any) -> None:
    verdict = Verdict()
    for part in one_in:
        hub = Hub.make(bench.args.nodes, bench.args.edges, part, bench.device)
        bench.report.graphs[f'h = {hub.size:,}'] = {
            'nodes': hub.num_nodes, 'edges': hub.edge_index.size(1)}
        measure(
            bench, title, bench.args.layers, hub, both_forms(hub), hub.num_nodes, verdict,
            **options)
    verdict.note(bench, title)


def run_dense(bench: Bench) -> None:
    """All rows are long, or many are longer than others."""
    nodes, edges, device = bench.args.nodes, bench.args.edges, bench.device
    graphs = {
        f'{DENSE}: {edges // few:,} a node': Hub.make(few, edges, 0, device)
        for few in (nodes // 50, nodes // 20, nodes // 8)}
    graphs[f'{DENSE}: by a power law'] = Hub.by_power_law(nodes // 7, edges // 3, device)
    for title, hub in graphs.items():
        bench.report.graphs[title] = {'nodes': hub.num_nodes, 'edges': hub.edge_index.size(1)}
        forms = both_forms(hub)
        for name in bench.args.layers:
            bench.measure(
                title, name, hub.num_nodes, Case(name, forms, hub.num_nodes).contenders(),
                launches_hidden(bench), label='nodes', facts=not_slower, pairs=[(PREPARED, PYG)])


def not_slower(results: Mapping[str, Result]) -> dict[str, Any]:
    """Whether ours take at most PyG's time."""
    times = {name: result.median_ms for name, result in results.items()}
    limit = times[PYG]
    right = limit is None or all((times[name] or 0) <= limit for name in (PLAIN, PREPARED))
    return {'goal': RIGHT if right else WRONG}


def run_batches(bench: Bench) -> None:
    """A batch has rows of the length of the fan-out, and columns as long as the graph has."""
    title, verdict = BATCHES, Verdict()
    for part in bench.args.one_in:
        hub = Hub.make(bench.args.nodes, bench.args.edges, part, torch.device('cpu'))
        data = Data(edge_index=hub.edge_index, num_nodes=hub.num_nodes)
        loader = FastNeighborLoader(
            data, FAN_OUT, batch_size=min(BATCH, hub.num_nodes), device=bench.device)
        batch = next(iter(loader))
        edges = batch.edge_index
        size = int(edges[0].bincount().max()) if part else 0
        bench.report.graphs[f'batch, h = {hub.size:,}'] = {
            'nodes': batch.num_nodes, 'edges': edges.size(1), 'largest_column': size}
        features = _graphs.normal(bench.device, 2)(edges.size(1), WIDTH)
        plain = torch.stack([*edges.unbind()]).as_subclass(Tensor)
        graphs = {PREPARED: (edges, features), PLAIN: (plain, features), PYG: (plain, features)}
        measure(bench, title, bench.args.layers, hub, graphs, batch.num_nodes, verdict)
        del batch, loader
    verdict.note(bench, title)


# Types of nodes ---------------------------------------------------------------------------------

# Shares of the nodes and of the edges of ogbn-mag, whose relations also go backwards here.
TYPES = {'paper': 0.38, 'author': 0.58, 'institution': 0.005, 'field': 0.035}
RELATIONS = {
    ('author', 'writes', 'paper'): 0.34, ('author', 'affiliated', 'institution'): 0.05,
    ('paper', 'cites', 'paper'): 0.26, ('paper', 'has', 'field'): 0.35,
}
HETERO = {
    'SAGE 64': lambda: pyg.SAGEConv((WIDTH, WIDTH), WIDTH),
    'GATv2 4 x 16': lambda: pyg.GATv2Conv((WIDTH, WIDTH), 16, 4, add_self_loops=False),
}


class Typed(nn.Module):
    """A layer for each relation; returns the features of all nodes."""

    def __init__(self, make: Callable[[], nn.Module], relations: Sequence[Any]) -> None:
        super().__init__()
        self.conv = pyg.HeteroConv({relation: make() for relation in relations})

    def forward(self, x: dict[str, Tensor], edges: dict[Any, Tensor]) -> Tensor:
        out = self.conv(x, edges)
        return torch.cat([out[name] for name in x])


def typed(num_edges: int, one_in: int, device: torch.device) -> HeteroData:
    """About ``num_edges`` edges; a node has ten in each direction, as in ogbn-mag."""
    data = HeteroData()
    normal = _graphs.normal(device)
    for name, share in TYPES.items():
        data[name].x = normal(max(2, int(share * num_edges / 20)), WIDTH)
    for (src, name, dst), share in RELATIONS.items():
        size = data[src].num_nodes, data[dst].num_nodes
        drawn = Hub.make(min(size), int(share * num_edges / 2), one_in, device).edge_index
        # Hubs stay at nodes 0 and 1; others spread over both types.
        scale = torch.tensor(size, device=device) // min(size)
        offset = torch.arange(drawn.size(1), device=device) % scale.view(2, 1)
        edges = torch.where(drawn > 1, drawn * scale.view(2, 1) - offset, drawn)
        data[src, name, dst].edge_index = edges
        data[dst, f'rev_{name}', src].edge_index = edges.flip(0)
    return data


def run_hetero(bench: Bench) -> None:
    title, verdict = TYPED, Verdict()
    for part in _two(bench):
        data = typed(bench.args.hetero_edges, part, bench.device)
        forms = {PLAIN: data, PREPARED: ToCSR()(copy.copy(data)), PYG: data}
        num_edges = sum(edges.size(1) for edges in data.edge_index_dict.values())
        bench.report.graphs['of four types'] = {'nodes': data.num_nodes, 'edges': num_edges}
        grad = _graphs.normal(bench.device, 3)(data.num_nodes, WIDTH)
        for name, make in HETERO.items():
            torch.manual_seed(0)
            layer = Typed(make, data.edge_types).to(bench.device)

            def step(
                which: str, dtype: torch.dtype = torch.float32, layer: nn.Module = layer,
                forms: Mapping[str, HeteroData] = forms, grad: Tensor = grad,
            ) -> Callable[[], tuple[Tensor, ...]]:
                conv = copy.deepcopy(layer).to(dtype)
                if which != PYG:
                    conv = pyg_fast.accelerate(conv)
                x = {key: value.to(dtype).clone().requires_grad_()
                     for key, value in forms[which].x_dict.items()}
                leaves = [*x.values(), *conv.parameters()]
                return steps(conv, [(x, forms[which].edge_index_dict)], leaves, grad.to(dtype))

            expected = step(PYG, torch.double)()
            bench.measure(
                title, name, num_edges // part if part else 0, [
                    Contender(which, functools.partial(step, which), which != PYG,
                              lambda out, right=expected: step_error(out, right, KINK))
                    for which in forms],
                bench.few(REPEATS), label='h', facts=functools.partial(verdict, name),
                pairs=[(PREPARED, PYG)])
    verdict.note(bench, title)


# Sums -------------------------------------------------------------------------------------------

PLACES = ('one row', 'one column', '1,000 nodes')


class Sums(NamedTuple):
    """A sum of messages by one of our kernels, and its messages in torch.

    ``shapes``: of each input but for the first dimension. The first letter of a name says where
    its rows are: ``s`` at sources, ``d`` at destinations, ``e`` at edges, ``p``: nowhere, a
    parameter. Gradients of ``e`` are not compared: they are no sums over edges. ``message`` takes
    a softmax over the edges of a row, and values that were gathered.
    """

    shapes: Mapping[str, tuple[int, ...]]
    ours: Callable[..., Tensor]
    message: Callable[..., Tensor]
    reduce: str = 'sum'


def _own(graph: Tensor, s_x: Tensor, e_e: Tensor, p_w: Tensor, p_b: Tensor) -> Tensor:
    return ops.message_passing(
        graph, lambda x, e: F.relu(x * p_w + e + p_b), src={'x': s_x}, edge={'e': e_e})


def _own_softmax(graph: Tensor, s_k: Tensor, s_v: Tensor, d_q: Tensor) -> Tensor:
    def message(k: Tensor, v: Tensor, q: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax((q * k).sum(-1, keepdim=True), index, num_nodes=size_i) * v

    return ops.message_passing(graph, message, src={'k': s_k, 'v': s_v}, dst={'q': d_q})


class Magnitude(torch.autograd.Function):
    """A softmax whose backward pass adds what that of a softmax subtracts."""

    @staticmethod
    def forward(ctx: Any, score: Tensor, dst: Tensor, size: int) -> Tensor:
        alpha = softmax(score, dst, num_nodes=size)
        ctx.save_for_backward(alpha, dst)
        ctx.size = size
        return alpha

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        alpha, dst = ctx.saved_tensors
        return alpha * (grad + scatter(alpha * grad, dst, 0, ctx.size, 'sum')[dst]), None, None


# All numbers are positive, so that the only differences are in gradients of a softmax.
SUMS = {
    'sum, weights': Sums(
        {'s_x': (16,), 'e_w': (1,)}, lambda graph, s_x, e_w: ops.spmm(graph, s_x, e_w.view(-1)),
        lambda _, s_x, e_w: s_x * e_w),
    'mean': Sums(
        {'s_x': (16,)}, lambda graph, s_x: ops.spmm(graph, s_x, reduce='mean'),
        lambda _, s_x: s_x, 'mean'),
    'own sum': Sums(
        {'s_x': (16,), 'e_e': (16,), 'p_w': (16,), 'p_b': (16,)}, _own,
        lambda _, s_x, e_e, p_w, p_b: F.relu(s_x * p_w + e_e + p_b)),
    'own softmax': Sums(
        {'s_k': (16,), 's_v': (16,), 'd_q': (16,)}, _own_softmax,
        lambda soft, s_k, s_v, d_q: soft((d_q * s_k).sum(-1, keepdim=True)) * s_v),
    'GAT': Sums(
        {'s_x': (4, 4), 's_a': (4,), 'd_a': (4,), 'e_a': (4,)},
        lambda graph, s_x, s_a, d_a, e_a: ops.gat(graph, s_x, s_a, d_a, e_a),
        lambda soft, s_x, s_a, d_a, e_a: (
            soft(F.leaky_relu(s_a + d_a + e_a, 0.2)).unsqueeze(-1) * s_x)),
    'GATv2': Sums(
        {'s_x': (4, 4), 'd_x': (4, 4), 'p_a': (4, 4)},
        lambda graph, s_x, d_x, p_a: ops.gatv2(graph, s_x, d_x, p_a),
        lambda soft, s_x, d_x, p_a: soft(
            (F.leaky_relu(s_x + d_x, 0.2) * p_a).sum(-1)).unsqueeze(-1) * s_x),
}


class Terms:
    """A sum on one graph, and in float64 with the sum of the absolute terms of each result."""

    def __init__(self, sums: Sums, place: str, num_edges: int, device: torch.device) -> None:
        self.sums, self.size = sums, min(1000, num_edges)
        generator = torch.Generator(device=device).manual_seed(0)
        self.edge_index = torch.randint(
            self.size, (2, num_edges), device=device, generator=generator)
        if place != PLACES[2]:
            self.edge_index[PLACES.index(place) ^ 1] = 0
        rows = {'s': self.size, 'd': self.size, 'e': num_edges}
        # What parameters have no rows for.
        self.given = {
            name: torch.rand(
                (rows[name[0]], *shape) if name[0] in rows else shape, device=device,
                generator=generator)
            for name, shape in sums.shapes.items()}
        width = next(iter(sums.shapes.values()))
        self.grad = torch.rand((self.size, *width), device=device, generator=generator)

    @functools.cached_property
    def prepared(self) -> tuple[Tensor, Tensor]:
        return prepare_edge_index(self.edge_index, (self.size, self.size))

    def _gathered(self, name: str, value: Tensor) -> Tensor:
        src, dst = self.edge_index
        num_edges = src.numel()
        return {'s': lambda: value[src], 'd': lambda: value[dst], 'e': lambda: value,
                'p': lambda: value.expand(num_edges, *value.shape)}[name[0]]()

    def _summed(self, gathered: Mapping[str, Tensor], magnitude: bool = False) -> Tensor:
        dst = self.edge_index[1]

        def soft(score: Tensor) -> Tensor:
            if magnitude:
                return Magnitude.apply(score, dst, self.size)
            return softmax(score, dst, num_nodes=self.size)

        message = self.sums.message(soft, **gathered)
        return scatter(message, dst, 0, self.size, self.sums.reduce)

    def _at(self, name: str, term: Tensor) -> Tensor:
        """The sum of an input's terms, one of each edge."""
        if name[0] == 'p':
            return term.sum(0)
        return scatter(term, self.edge_index['sd'.index(name[0])], 0, self.size, 'sum')

    def _in_double(self, magnitude: bool) -> list[Tensor]:
        """The result and gradients, or the sums of their absolute terms."""
        leaves = {name: self._gathered(name, value).double().clone().requires_grad_()
                  for name, value in self.given.items()}
        out = self._summed(leaves, magnitude)
        terms = torch.autograd.grad(out, [*leaves.values()], self.grad.double())
        return [out.detach(), *(
            self._at(name, term) for name, term in zip(leaves, terms, strict=True)
            if name[0] != 'e')]

    @functools.cached_property
    def exact(self) -> list[tuple[Tensor, Tensor]]:
        return [*zip(*(self._in_double(magnitude) for magnitude in (False, True)), strict=True)]

    def error(self, name: str) -> float:
        """The largest error over the sum of the absolute terms, of the result and gradients."""
        leaves = {key: value.clone().requires_grad_() for key, value in self.given.items()}
        if name == PYG:
            out = self._summed({key: self._gathered(key, leaf) for key, leaf in leaves.items()})
        else:
            graph, perm = self.prepared if name == PREPARED else (self.edge_index, None)
            out = self.sums.ours(graph, **{
                key: leaf if perm is None or key[0] != 'e' else leaf[perm]
                for key, leaf in leaves.items()})
        wanted = [leaf for key, leaf in leaves.items() if key[0] != 'e']
        found = [out.detach(), *torch.autograd.grad(out, wanted, self.grad)]
        return worst(
            float(((got.double() - right).abs() / size.clamp(min=1e-30)).max())
            for got, (right, size) in zip(found, self.exact, strict=True))


def run_sums(bench: Bench) -> None:
    title, held = 'Errors of sums and gradients in float32, over the sum of absolute terms', []
    for name, sums in SUMS.items():
        for place in PLACES:
            terms = Terms(sums, place, bench.args.terms, bench.device)
            errors = {which: terms.error(which) for which in (PLAIN, PREPARED, PYG)}
            held.append(max(errors[PLAIN], errors[PREPARED]) <= LIMIT)
            bench.add(
                title, f'{name}, {place}', bench.args.terms, {}, label='edges',
                facts={**{which: f'{error:.1e}' for which, error in errors.items()},
                       'goal': RIGHT if held[-1] else WRONG})
    bench.note(f'Sums: the goal of {LIMIT} holds in {sum(held)} of {len(held)} rows.')


# Widths -----------------------------------------------------------------------------------------

BY_WIDTH: dict[str, Callable[[int], nn.Module]] = {
    'GATv2, 8 heads, mean': lambda width: pyg.GATv2Conv(WIDTH, width, 8, concat=False),
    'GAT, 8 heads, mean': lambda width: pyg.GATConv(WIDTH, width, 8, concat=False),
    'SAGE': lambda width: pyg.SAGEConv(WIDTH, width),
    'SAGE max': lambda width: pyg.SAGEConv(WIDTH, width, aggr='max'),
    'Transformer, 8 heads, mean': lambda width: pyg.TransformerConv(
        WIDTH, width, 8, concat=False),
}
GENERATED = (3, 47, 121)  # widths of the last: each compiles kernels


def run_widths(bench: Bench) -> None:
    """On the last hop of a sampled batch: few destinations of many nodes."""
    title, held = 'Odd widths beside the next multiple of four', []
    num_nodes, num_edges = bench.args.batch_nodes, bench.args.batch_nodes * 22 // 15
    device = bench.device
    for odd in bench.args.widths:
        share = max(1, odd // 60)  # of the memory
        nodes, size = num_nodes // share, num_edges // share
        normal = _graphs.normal(device)
        edge_index = torch.stack([
            torch.randint(nodes, (size,)), torch.randint(max(1, nodes // 60), (size,)) * 15])
        edges, _ = prepare_edge_index(edge_index.to(device), (nodes, nodes))
        x = normal(nodes, WIDTH)
        for name, make in BY_WIDTH.items():
            if name.startswith('Transformer') and odd not in GENERATED:
                continue

            def step(
                width: int, make: Callable[[int], nn.Module] = make, x: Tensor = x,
                edges: Tensor = edges,
            ) -> Callable[[], tuple[Tensor, ...]]:
                conv = pyg_fast.accelerate(make(width).to(device))
                leaf = x.clone().requires_grad_()
                grad = torch.ones(x.size(0), width, device=device)
                return steps(conv, [(leaf, edges)], [leaf, *conv.parameters()], grad)

            def facts(results: Mapping[str, Result]) -> dict[str, Any]:
                wide, narrow = (results[of].median_ms for of in ('ours', 'ours, multiple of 4'))
                assert wide is not None
                assert narrow is not None
                held.append(wide <= SLOWER * narrow)
                return {'odd / multiple': wide / narrow, 'goal': RIGHT if held[-1] else WRONG}

            contenders = [
                Contender(of, functools.partial(step, width), True)
                for of, width in (('ours', odd), ('ours, multiple of 4', -(-odd // 4) * 4))]
            bench.measure(
                title, name, odd, contenders, launches_hidden(bench), label='columns',
                facts=facts)
            _harness.free(bench.cuda)
    bench.note(f'Widths: the goal holds in {sum(held)} of {len(held)} rows.')


# Relations --------------------------------------------------------------------------------------

class Relations(NamedTuple):
    nodes: int
    edges: int
    relations: int
    options: dict[str, int]


RGCN = (
    Relations(200_000, 3_000_000, 90, {'num_bases': 30}),
    Relations(200_000, 3_000_000, 90, {'num_blocks': 4}),
    Relations(200_000, 3_000_000, 500, {'num_bases': 30}),
    Relations(15_000, 550_000, 474, {'num_blocks': 4}),
    Relations(8_000, 60_000, 90, {}),
)


def run_relations(bench: Bench) -> None:
    title, held = 'RGCNConv on a plain list', []
    for row in RGCN[::4] if bench.quick else RGCN:
        nodes, edges = row.nodes // bench.args.divide, row.edges // bench.args.divide
        generator = torch.Generator(device=bench.device).manual_seed(0)
        edge_type = torch.rand(edges, device=bench.device, generator=generator) ** 3
        given = (
            _graphs.normal(bench.device)(nodes, WIDTH),
            torch.randint(nodes, (2, edges), device=bench.device, generator=generator),
            (edge_type * row.relations).long())
        torch.manual_seed(0)
        layer = pyg.RGCNConv(WIDTH, WIDTH, row.relations, **row.options).to(bench.device)

        def step(
            name: str, dtype: torch.dtype = torch.float32, layer: nn.Module = layer,
            given: tuple[Tensor, ...] = given,
        ) -> Callable[[], tuple[Tensor, ...]]:
            conv = copy.deepcopy(layer).to(dtype)
            if name == PLAIN:
                conv = pyg_fast.accelerate(conv)
            x = given[0].to(dtype)
            return steps(conv, [(x, *given[1:])], [*conv.parameters()], x)

        def facts(results: Mapping[str, Result]) -> dict[str, Any]:
            ours, theirs = (results[of].median_ms for of in (PLAIN, PYG))
            assert ours is not None
            held.append(theirs is None or ours <= SHARE * theirs)
            return {'goal': RIGHT if held[-1] else WRONG}

        expected = step(PYG, torch.double)()
        options = ', '.join(f'{key}={value}' for key, value in row.options.items())
        bench.measure(
            title, f"{row.relations} relations{', ' * bool(options)}{options}", edges, [
                Contender(name, functools.partial(step, name), name == PLAIN,
                          lambda out, right=expected: step_error(out, right, 3e-4))
                for name in (PLAIN, PYG)],
            bench.few(REPEATS), label='edges', facts=facts)
    bench.note(f'Relations: the goal holds in {sum(held)} of {len(held)} rows.')


def _two(bench: Bench) -> tuple[int, int]:
    """Without a hub, and one of the sizes with."""
    one_in = bench.args.one_in
    return one_in[0], one_in[len(one_in) // 2]


def _shares(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(',')))


def main(argv: Sequence[str] | None = None) -> None:
    parts: dict[str, Callable[[Bench], None]] = {
        'layers': lambda bench: run_layers(
            bench, ROWS, bench.args.one_in),
        'both': lambda bench: run_layers(
            bench, "flow='target_to_source'", _two(bench), flow=REVERSED),
        'dense': run_dense, 'batches': run_batches, 'hetero': run_hetero, 'sums': run_sums,
        'widths': run_widths, 'relations': run_relations,
    }
    bench = Bench(
        'hubs', __doc__, argv, parts=tuple(parts),
        layers=_harness.names('layer', tuple(KINDS), {
            'quick': ('own sum', 'SAGE max', 'GATv2 8 x 8'), 'usual': tuple(KINDS)}),
        one_in=Option({'quick': (0, 3), 'usual': (0, 75, 15, 3)}, _shares,
                      'h is one edge in so many; 0: none'),
        nodes=Option({'quick': 200, 'cuda': 100_000, 'cpu': 20_000}),
        edges=Option({'quick': 3_000, 'cuda': 1_500_000, 'cpu': 300_000}),
        hetero_edges=Option({'quick': 2_000, 'cuda': 4_000_000, 'cpu': 200_000}),
        terms=Option({'quick': 2_000, 'usual': 1_000_000}, help='edges of a sum'),
        batch_nodes=Option({'quick': 1_500, 'cuda': 480_000, 'cpu': 30_000}),
        widths=Option({'quick': (3,), 'usual': (1, 3, 5, 7, 41, 47, 50, 121, 349)},
                      _harness.integers),
        divide=Option({'quick': 1000, 'cuda': 1, 'cpu': 20}, help='sizes of graphs with relations'),
        notes=[
            'A step is forward and backward, 64 channels, float32; on a GPU the time of the '
            'kernels, which run at any size, but for types of nodes and relations wall time with '
            'Python. Edges are in random order, which a prepared graph sorts once. "/ h = 0": over '
            'the time '
            f'without a hub. Goals: at most {SLOWER} times the time at h = 0 and at most that of '
            f'PyG; errors of at most {LIMIT}; at most {SLOWER} times the time of the next '
            f'multiple of four; at most {SHARE:g} times the time of PyG for RGCNConv.'])
    with pyg_fast.small_graphs('kernel'):
        for part, run in parts.items():
            if bench.has(part):
                run(bench)
    bench.finish()


if __name__ == '__main__':
    main()
