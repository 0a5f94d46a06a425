"""The loaders on graphs with types, with times and around links, beside PyG's.

python -m benchmarks typed_loader                    everything below
python -m benchmarks typed_loader --quick            a minute or less
python -m benchmarks typed_loader --parts time       or any of
    types  a batch of 7 and of 140 edge types, of a graph like ogbn-mag
    time   a batch of a relational database by time: the latest rows, and any
    links  a batch of links and negative ones, of a graph like ogbn-products
    train  a step of a GraphSAGE on the graph of types, with loading
python -m benchmarks typed_loader --scale 0.1        a tenth of all nodes and edges
python -m benchmarks typed_loader --workers 0,2,8    of PyG's loaders

Graphs and features are on the device, for PyG in host memory. The last batch of the first pass of
every loader is compared with the graph: which edges, how many of each node, none of them later than
its seed.
"""
import copy
import functools
import itertools
import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.typing
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.utils import trim_to_layer

import pyg_fast
from pyg_fast.loader import FastLinkNeighborLoader, FastNeighborLoader
from pyg_fast.loader._loader import SampledLoader

from . import _graphs, _harness
from ._harness import Bench, Contender, Option, Result, descent, exact, finite, worst
from ._minibatch import Workers

PARTS = ('types', 'time', 'links', 'train')
OURS, FEW, TRIMMED, DROPPED = 'ours', 'ours, 7 edge types', 'ours, trimmed', 'ours, drop_seed_edges'
OUR_LOADER = "our loader, PyG's layers"
LAST, UNIFORM = 'last', 'uniform'
CLASSES = 8
PIECES = 20  # edge types into which one is divided
_REPEATS = 5  # at most: each is a pass over many batches
_SPAN = 2**30  # times are below it

# ogbn-mag, as OGB lists it: nodes, and edges of one direction.
NODES = {'paper': 736_389, 'author': 1_134_649, 'institution': 8_740, 'field': 59_965}
EDGES = {
    ('author', 'affiliated', 'institution'): 1_043_998, ('author', 'writes', 'paper'): 7_145_660,
    ('paper', 'cites', 'paper'): 5_416_271, ('paper', 'has', 'field'): 7_505_078}

# The tables of a shop: their shares of all rows, and the tables that their foreign keys name.
ROWS = 20_000_000
TABLES: dict[str, tuple[float, tuple[str, ...]]] = {
    'region': (0.00005, ()), 'category': (0.0001, ()), 'seller': (0.001, ()),
    'customer': (0.005, ('region',)), 'product': (0.005, ('category', 'seller')),
    'order': (0.1, ('customer',)), 'line': (0.25, ('order', 'product')),
    'payment': (0.08, ('order',)), 'shipment': (0.07, ('order',)), 'review': (0.15, ('product',)),
    'visit': (0.3, ('customer',)), 'return': (0.03885, ('line',))}

EdgeType = tuple[Any, Any, Any]
OF_DATA: EdgeType = (None, None, None)  # the edge type of a graph with one


# Graphs -----------------------------------------------------------------------------------------

class Edges(NamedTuple):
    """The edges of a type, sorted by destination, then by time."""

    edge_index: Tensor
    rowptr: Tensor
    time: Tensor | None = None  # of each edge: that of its source

    @classmethod
    def of(cls, src: Tensor, dst: Tensor, num_dst: int, time: Tensor | None = None) -> 'Edges':
        order = (src if time is None else time[src]).argsort(stable=True)
        order = order[dst[order].argsort(stable=True)]
        src, dst = src[order], dst[order]
        return cls.of_sorted(torch.stack([src, dst]), num_dst, None if time is None else time[src])

    @classmethod
    def of_sorted(cls, edge_index: Tensor, num_dst: int, time: Tensor | None = None) -> 'Edges':
        rowptr = edge_index.new_zeros(num_dst + 1)
        rowptr[1:] = edge_index[1].bincount(minlength=num_dst).cumsum(0)
        return cls(edge_index, rowptr, time)

    def divided(self, number: Tensor) -> list['Edges']:
        """The edges of each number from 0 to that of the pieces."""
        num_dst = self.rowptr.numel() - 1
        return [self.of_sorted(self.edge_index[:, number == k], num_dst) for k in range(PIECES)]

    def ends(self, nodes: Tensor, time: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where the edges of some nodes begin, and where those end that are not later."""
        begin, end = self.rowptr[nodes], self.rowptr[nodes + 1]
        if self.time is None or time is None:
            return begin, end
        known = self.edge_index[1] * _SPAN + self.time
        return begin, torch.searchsorted(known, nodes * _SPAN + time, right=True)


class Graph:
    """A graph on the device, for ours, with the same in host memory, for PyG."""

    def __init__(
        self, name: str, data: Data | HeteroData, edges: Mapping[EdgeType, Edges], bench: Bench,
    ) -> None:
        self.name, self.data, self.edges, self.device = name, data, edges, bench.device
        for key, store in self.edge_stores.items():
            store.edge_index = edges[key].edge_index
        bench.report.graphs[f'{name}, {len(edges)} edge types'] = {
            'nodes': sum(store.num_nodes for store in self.node_stores.values()),
            'edges': sum(part.edge_index.size(1) for part in edges.values()),
            'node_types': len(self.node_stores), 'edge_types': len(edges)}

    @functools.cached_property
    def on_host(self) -> Data | HeteroData:
        return copy.copy(self.data).to('cpu')

    @property
    def node_stores(self) -> dict[Any, Any]:
        return stores_of(self.data)[0]

    @property
    def edge_stores(self) -> dict[EdgeType, Any]:
        if isinstance(self.data, Data):
            return {OF_DATA: self.data}
        return {key: self.data[key] for key in self.edges}


def stores_of(data: Data | HeteroData) -> tuple[dict[Any, Any], dict[EdgeType, Any]]:
    """What nodes and edges of each type have."""
    if isinstance(data, Data):
        return {None: data}, {OF_DATA: data}
    return dict(data.node_items()), dict(data.edge_items())


class Draws:
    """Random numbers on a device, the same in every run."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.generator = device, torch.Generator(device).manual_seed(0)

    def numbers(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self.generator, device=self.device)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)

    def skewed(self, size: int, count: int) -> Tensor:
        """Numbers below ``size``, of which the k-th most frequent has a share as 1 / sqrt(k)."""
        rank = torch.rand(
            count, generator=self.generator, device=self.device, dtype=torch.double) ** 2 * size
        return self.order(size)[rank.long().clamp(max=size - 1)]

    def features(self, rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=self.generator, device=self.device)


def mag_like(bench: Bench) -> Graph:
    """A graph with the numbers of nodes and edges of ogbn-mag, and the reverse of every edge."""
    draw, scale, width = Draws(bench.device), bench.args.scale, bench.args.width
    data, edges = HeteroData(), {}
    sizes = {key: max(2, int(scale * count)) for key, count in NODES.items()}
    for key, size in sizes.items():
        data[key].x = draw.features(size, width)
    data['paper'].y = data['paper'].x[:, :CLASSES].argmax(1)
    for (a, name, b), count in EDGES.items():
        src, dst = (draw.skewed(sizes[end], max(1, int(scale * count))) for end in (a, b))
        if a == b:  # as T.ToUndirected has it
            src, dst = torch.cat([src, dst]), torch.cat([dst, src])
        else:
            edges[b, f'rev_{name}', a] = Edges.of(dst, src, sizes[a])
        edges[a, name, b] = Edges.of(src, dst, sizes[b])
    return Graph('MAG-like', data, edges, bench)


def divided(graph: Graph, bench: Bench) -> Graph:
    """The same nodes and edges, each edge type divided at random."""
    draw = Draws(bench.device)
    data, edges = HeteroData(), {}
    for key, store in graph.node_stores.items():
        data[key].x = store.x
    for (a, name, b), part in graph.edges.items():
        pieces = part.divided(draw.numbers(PIECES, part.edge_index.size(1)))
        edges |= {(a, f'{name}_{k}', b): piece for k, piece in enumerate(pieces)}
    return Graph(graph.name, data, edges, bench)


def database(bench: Bench) -> Graph:
    """A relational database: an edge from each row to each that it names, and back. A row is later
    than those that it names."""
    draw, scale = Draws(bench.device), bench.args.scale
    data, edges, time = HeteroData(), {}, {}
    size: dict[str, int] = {}
    for table, (share, keys) in TABLES.items():
        size[table] = rows = max(2, int(scale * share * ROWS))
        named = {key: draw.skewed(size[key], rows) for key in keys}
        first = draw.numbers(_SPAN // 4, rows)
        for key, row in named.items():
            first = torch.maximum(first, time[key][row])
        time[table] = first + ((_SPAN - 1 - first) * draw.numbers(2**16, rows) >> 16)
        data[table].x = draw.features(rows, bench.args.columns)
        data[table].time = time[table]
        own = torch.arange(rows, device=bench.device)
        for key, row in named.items():
            edges[table, 'of', key] = Edges.of(own, row, size[key], time[table])
            edges[key, 'has', table] = Edges.of(row, own, rows, time[key])
    return Graph('relational', data, edges, bench)


def products_like(bench: Bench) -> Graph:
    """The generated graph of this name, with features."""
    args = bench.args
    size = _graphs.PLANTED['products-like']
    most = min(args.max_edges or math.inf, int(2.01 * args.scale * size.num_pairs))
    made = _graphs.load('products-like', bench.device, most)
    data = Data(x=Draws(bench.device).features(made.num_nodes, 100))
    return Graph(made.name, data, {OF_DATA: Edges(made.edge_index, made.rowptr.long())}, bench)


# Checks -----------------------------------------------------------------------------------------

class Rules(NamedTuple):
    """Which edges a batch must have: at most so many of each node in each hop."""

    fanouts: Sequence[int]
    strategy: str | None = None  # by time
    seed_type: Any = None


def batch_error(graph: Graph, rules: Rules, batch: Data | HeteroData) -> float:
    """Zero if a batch has what the rules say: of every node as many edges as there are, at most
    the fan-out, all of them in the graph, none twice, none too late; features of its nodes."""
    nodes, edges = stores_of(batch)
    times = None if rules.strategy is None else nodes[rules.seed_type].seed_time
    right: list[bool] = []
    for key, store in nodes.items():
        n_id, whole = store.n_id, graph.node_stores[key]
        root = 0 if times is None else store.batch
        right += [
            torch.equal(store.x, whole.x[n_id]), sum(store.num_sampled_nodes) == n_id.numel(),
            (root * whole.num_nodes + n_id).unique().numel() == n_id.numel()]
    for key, store in edges.items():
        source, target, whole = nodes[key[0]], nodes[key[2]], graph.edges[key]
        src, dst = torch.stack(tuple(store.edge_index))
        e_id, seed_time, root = store.e_id, None, torch.zeros_like(dst)
        if times is not None:
            root, seed_time = target.batch[dst], times[target.batch]
            right += [torch.equal(source.batch[src], root),
                      bool((source.time[src] <= times[root]).all())]
        begin, end = whole.ends(target.n_id, seed_time)
        hops = torch.tensor(target.num_sampled_nodes, device=dst.device)
        fanouts = torch.tensor([*rules.fanouts, 0], device=dst.device).repeat_interleave(hops)
        expected = torch.minimum(end - begin, fanouts)
        ends = torch.stack([source.n_id[src], target.n_id[dst]])
        right += [
            torch.equal(ends, whole.edge_index[:, e_id]),
            (root * whole.edge_index.size(1) + e_id).unique().numel() == e_id.numel(),
            torch.equal(dst.bincount(minlength=expected.numel()), expected)]
        if rules.strategy == LAST and whole.time is not None:
            right.append(bool((whole.time[e_id] >= whole.time[(end - expected)[dst]]).all()))
    return exact(all(right))


def link_error(graph: Graph, rules: Rules, links: Tensor, batch: Data) -> float:
    """The same of a batch of links, with its positive and negative ones."""
    num_links, ends = batch.input_id.numel(), batch.n_id[batch.edge_label_index]
    label = torch.arange(2 * num_links, device=ends.device) < num_links
    # How many edges are missing depends on the links, where those to predict are dropped.
    return worst([batch_error(graph, rules, batch), exact(all([
        torch.equal(ends[:, :num_links], links[:, batch.input_id]),
        torch.equal(batch.edge_label, label.to(batch.edge_label.dtype))]))])


def dropped_error(graph: Graph, links: Tensor, batch: Data) -> float:
    """Zero if no edge of a batch is a link that it predicts, and all edges are in the graph."""
    ends = batch.n_id[torch.stack(tuple(batch.edge_index))]
    size = graph.data.num_nodes
    keys, of_links = (a * size + b for a, b in (ends, links[:, batch.input_id]))
    return exact(all([
        torch.equal(ends, graph.edges[OF_DATA].edge_index[:, batch.e_id]),
        not bool(torch.isin(keys, of_links).any()), ends.size(1) > 0]))


# Loaders ----------------------------------------------------------------------------------------

class Pass:
    """All batches of a loader, which come to the device; returns the last one. The first pass notes
    the numbers of nodes and edges of each batch.
    """

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader, self.device, self.runs = loader, device, itertools.count(1)
        self.sizes: list[tuple[int, int]] = []

    def __call__(self) -> Any:
        run, ours = next(self.runs), isinstance(self.loader, SampledLoader)
        if run == 2 and ours:  # the first one is cold
            self.loader.reset_stats()
        for batch in self.loader:
            last = batch if ours else batch.to(self.device, non_blocking=True)
            if run == 1:
                nodes, edges = stores_of(last)
                self.sizes.append((sum(store.n_id.numel() for store in nodes.values()), sum(
                    store.edge_index.size(1) for store in edges.values())))
        return last


class Loading:
    """Contenders that load batches of a graph, of ``seeds`` nodes or links at most.

    ``make`` makes a loader of some batches: ours, or PyG's with a number of workers.
    """

    def __init__(
        self, bench: Bench, part: str, seeds: int, check: Callable[[Any], float],
        make: Callable[..., Iterable[Any]],
    ) -> None:
        self.bench, self.most, self.check, self.make = bench, seeds, check, make
        self.rivals = rivals_of(bench, part)
        self.passes: dict[str, Pass] = {}

    def contender(
        self, name: str, workers: int | None = None, check: Callable[[Any], float] | None = None,
        **options: Any,
    ) -> Contender:
        """Ours, or PyG's loader with some workers."""
        count = min(num_batches(self.bench, workers), self.most)

        def make() -> Pass:
            loader = self.make(count, workers, **options)
            self.passes[name] = Pass(loader, self.bench.device)
            return self.passes[name]

        compare = check or self.check
        if workers is not None and not torch_geometric.typing.WITH_PYG_LIB:
            compare = None  # torch-sparse does not tell the hops of nodes
        return Contender(name, make, workers is None, compare, count)

    def contenders(self) -> list[Contender]:
        return [self.contender(OURS), *(
            self.contender(pyg_name(workers), workers) for workers in self.rivals)]

    def facts(self, results: Mapping[str, Result]) -> dict[str, Any]:
        """What took how long in ours, and the sizes of batches."""
        stats = self.passes[OURS].loader.stats
        count = max(stats.num_batches, 1)
        facts = {'sampling': 1e3 * stats.sample_seconds / count,
                 'fetching': 1e3 * stats.fetch_seconds / count}
        rival = next((name for name in self.passes if name.startswith('PyG')), None)
        for name, of in ((OURS, ''), (rival, ', PyG')):
            if name in self.passes:
                means = map(statistics.fmean, zip(*self.passes[name].sizes, strict=True))
                facts |= {f'{kind}{of}': round(mean) for kind, mean in zip(
                    ('nodes', 'edges'), means, strict=True)}
        if FEW in results:
            facts['time / 7 edge types'] = (results[OURS].median_ms or math.nan) / (
                results[FEW].median_ms or math.nan)
        return facts


def num_batches(bench: Bench, workers: int | None) -> int:
    """How many batches a pass has: of ours, or of PyG's loader."""
    return bench.args.batches if workers is None else bench.args.rival_batches * max(1, workers)


def pyg_name(workers: int) -> str:
    return f'PyG, {workers or "no"} worker{"s" * (workers != 1)}'


def rivals_of(bench: Bench, part: str) -> Sequence[int]:
    """The numbers of workers of PyG's loader; none where it cannot sample."""
    if torch_geometric.typing.WITH_PYG_LIB:
        return bench.args.workers
    if torch_geometric.typing.WITH_TORCH_SPARSE and part != 'time':
        return bench.args.workers
    bench.report.left_out[f"PyG's loader of {part}"] = (
        'PyG samples by time with pyg-lib, which is not installed' if part == 'time' else
        'PyG samples neighbours with pyg-lib or torch-sparse, and neither is installed')
    return ()


def pyg_options(bench: Bench, workers: int) -> dict[str, Any]:
    return {'num_workers': workers, 'persistent_workers': workers > 0, 'is_sorted': True,
            'pin_memory': bench.cuda}


def node_loader(
    bench: Bench, graph: Graph, num_neighbors: Sequence[int], seed_type: str, seeds: Tensor,
    batch_size: int, count: int, workers: int | None, times: Tensor | None = None, **options: Any,
) -> Iterable[HeteroData]:
    """A loader of batches around the first seeds: ours, or with ``workers`` PyG's."""
    wanted = count * batch_size
    if times is not None:
        options |= {'input_time': times[:wanted], 'time_attr': 'time'}
    options |= {'input_nodes': (seed_type, seeds[:wanted]), 'batch_size': batch_size}
    if workers is None:
        return FastNeighborLoader(graph.data, list(num_neighbors), seed=1, **options)
    return Workers(NeighborLoader(
        graph.on_host, list(num_neighbors), **options, **pyg_options(bench, workers)))


def seeds_of(graph: Graph, seed_type: str, bench: Bench) -> Tensor:
    """Distinct nodes in random order, in host memory."""
    return Draws(bench.device).order(graph.data[seed_type].num_nodes).cpu()


# Parts ------------------------------------------------------------------------------------------

def run_types(bench: Bench) -> None:
    args = bench.args
    graph = mag_like(bench)
    seeds = seeds_of(graph, 'paper', bench)

    def loading(of: Graph, fanouts: Sequence[int]) -> Loading:
        return Loading(
            bench, 'types', seeds.numel() // args.batch_size,
            functools.partial(batch_error, of, Rules(fanouts)), functools.partial(
                node_loader, bench, of, fanouts, 'paper', seeds, args.batch_size))

    def cell(num_types: int, loads: Loading, *others: Contender, **more: Any) -> None:
        bench.measure(
            'Batches of a graph with types, ms a batch', graph.name, num_types,
            [*loads.contenders(), *others], bench.few(_REPEATS), label='edge types', memory=True,
            facts=loads.facts, **more)
        loads.passes.clear()  # PyG's workers end with their loaders.

    few, many = loading(graph, args.fanouts), divided(graph, bench)
    cell(len(graph.edges), few)
    loads = loading(many, [max(1, k // PIECES) for k in args.fanouts])
    cell(len(many.edges), loads, few.contender(FEW), pairs=[(OURS, FEW)])


def run_time(bench: Bench) -> None:
    args = bench.args
    graph = database(bench)
    seeds = seeds_of(graph, 'customer', bench)
    times = _SPAN // 2 + Draws(torch.device('cpu')).numbers(_SPAN // 2, seeds.numel())
    for strategy in (LAST, UNIFORM):
        loading = Loading(
            bench, 'time', seeds.numel() // args.time_batch_size,
            functools.partial(batch_error, graph, Rules(args.time_fanouts, strategy, 'customer')),
            functools.partial(
                node_loader, bench, graph, args.time_fanouts, 'customer', seeds,
                args.time_batch_size, times=times, temporal_strategy=strategy))
        bench.measure(
            'Batches by time, ms a batch', f'{graph.name}, {strategy}', args.time_batch_size,
            loading.contenders(), bench.few(_REPEATS), label='seeds', memory=True,
            facts=loading.facts)


def run_links(bench: Bench) -> None:
    args = bench.args
    graph = products_like(bench)
    edge_index = graph.edges[OF_DATA].edge_index
    most = max(num_batches(bench, workers) for workers in (None, *args.workers))
    links = edge_index[:, Draws(bench.device).numbers(edge_index.size(1), most * args.batch_size)]
    on_host = links.cpu()

    def make(count: int, workers: int | None, **options: Any) -> Iterable[Data]:
        options |= {'batch_size': args.batch_size, 'neg_sampling': 'binary',
                    'edge_label_index': on_host[:, :count * args.batch_size]}
        if workers is None:
            return FastLinkNeighborLoader(graph.data, list(args.fanouts), seed=1, **options)
        return Workers(LinkNeighborLoader(
            graph.on_host, list(args.fanouts), **options, **pyg_options(bench, workers)))

    loading = Loading(
        bench, 'links', most, functools.partial(link_error, graph, Rules(args.fanouts), links),
        make)
    ours, *rivals = loading.contenders()
    dropped = loading.contender(
        DROPPED, check=functools.partial(dropped_error, graph, links), drop_seed_edges=True)
    bench.measure(
        'Batches of links and as many negative ones, ms a batch', graph.name, args.batch_size,
        [ours, dropped, *rivals], bench.few(_REPEATS), label='links', memory=True,
        facts=loading.facts)


class HeteroSAGE(nn.Module):
    """Layers of GraphSAGE for each edge type, and the classes of the seeds."""

    def __init__(self, graph: Graph, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            HeteroConv({key: SAGEConv(hidden if k else width, hidden) for key in graph.edges})
            for k in range(depth))
        self.last = nn.Linear(hidden, CLASSES)

    def forward(self, batch: HeteroData, trim: bool = False) -> Tensor:
        x, edge_index = batch.x_dict, batch.edge_index_dict
        hops = [batch.collect(f'num_sampled_{kind}') for kind in ('nodes', 'edges')] if trim else []
        for k, conv in enumerate(self.convs):
            if trim:
                x, edge_index, _ = trim_to_layer(k, *hops, x, edge_index)
            x = {key: each.relu() for key, each in conv(x, edge_index).items()}
        return self.last(x['paper'][:batch['paper'].batch_size])


class Training:
    """Passes of training over the batches of a loader, from the same start."""

    def __init__(self, bench: Bench, graph: Graph) -> None:
        self.bench, self.graph = bench, graph
        args = bench.args
        torch.manual_seed(0)
        self.model = HeteroSAGE(graph, args.width, args.hidden, len(args.fanouts))
        self.seeds = seeds_of(graph, 'paper', bench)
        self.expected = self.make(OUR_LOADER, None)()

    def make(self, name: str, workers: int | None) -> Callable[[], Tensor]:
        bench, args = self.bench, self.bench.args
        loader = node_loader(
            bench, self.graph, args.fanouts, 'paper', self.seeds, args.batch_size,
            self.num_batches(workers), workers)
        model: Any = copy.deepcopy(self.model).to(bench.device)
        if name in (OURS, TRIMMED):
            model = pyg_fast.accelerate(model)
        optimizer = torch.optim.Adam(model.parameters(), 0.001)

        def run() -> Tensor:
            losses = []
            for batch in loader:
                if workers is not None:
                    batch = batch.to(bench.device, non_blocking=True)
                label = batch['paper'].y[:batch['paper'].batch_size]
                losses.append(descent(optimizer, lambda batch=batch, label=label: F.cross_entropy(
                    model(batch, name == TRIMMED), label))())
            return torch.stack(losses)

        return run

    def check(self, losses: Tensor) -> float:
        """Beside PyG's layers on the same batches: the first loss, before a step amplifies
        rounding, and the mean of all."""
        right = self.expected
        return worst([
            float((losses[0] - right[0]).abs() / (1e-4 * right[0])),
            float((losses.mean() - right.mean()).abs() / (1e-2 * right.mean()))])

    def num_batches(self, workers: int | None) -> int:
        most = self.seeds.numel() // self.bench.args.batch_size
        return min(num_batches(self.bench, workers), most)

    def contender(self, name: str, workers: int | None = None) -> Contender:
        return Contender(
            name, lambda: self.make(name, workers), workers is None,
            self.check if workers is None else lambda losses: finite(losses.mean()),
            self.num_batches(workers))


def run_train(bench: Bench) -> None:
    args = bench.args
    training = Training(bench, graph := mag_like(bench))
    bench.measure(
        f'Training, SAGE {len(args.fanouts)} x {args.hidden}, ms a batch', graph.name,
        args.batch_size, [
            *(training.contender(name) for name in (OURS, TRIMMED, OUR_LOADER)),
            *(training.contender(pyg_name(n), n) for n in rivals_of(bench, 'train'))],
        bench.few(_REPEATS), label='batch', memory=True)


# All of it --------------------------------------------------------------------------------------

def workers_of(text: str) -> tuple[int, ...]:
    """Reads numbers of workers between commas."""
    return tuple(int(number) for number in text.split(','))


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'typed-loader', __doc__, argv, parts=PARTS,
        scale=Option({'quick': 0.002, 'cuda': 1.0, 'cpu': 0.1}, float, 'of all graphs'),
        batches=Option({'quick': 3, 'cuda': 64, 'cpu': 16}, help='of a pass of ours'),
        rival_batches=Option({'quick': 2, 'usual': 4}, help='of a pass of PyG, for each worker'),
        workers=Option({'quick': (0,), 'cuda': (0, 4, 12), 'cpu': (0, 2)}, workers_of,
                       "numbers of workers of PyG's loaders"),
        batch_size=Option({'quick': 64, 'usual': 1024}, help='seeds, or links'),
        time_batch_size=Option({'quick': 32, 'usual': 512}, help='seeds by time'),
        fanouts=Option({'quick': (4, 3), 'usual': (15, 10)}, _harness.integers, 'by hop'),
        time_fanouts=Option({'quick': (6, 4), 'usual': (128, 64)}, _harness.integers, 'by time'),
        width=Option({'quick': 16, 'usual': 128}, help='features of a node'),
        columns=Option({'quick': 4, 'usual': 16}, help='features of a row of the database'),
        hidden=Option({'quick': 8, 'usual': 64}, help='channels of a layer'))
    args = bench.args
    bench.note(
        f'Times are wall times of passes over {args.batches} batches, divided by their number; '
        f'PyG has {args.rival_batches} batches for each worker. Sampling and fetching: of the '
        'loader, by its own statistics; nodes and edges: means of a batch.',
        '140 edge types: those of the same graph, each divided at random into '
        f'{PIECES}, and a fan-out of {[max(1, k // PIECES) for k in args.fanouts]} in place of '
        f'{list(args.fanouts)}.')
    if torch_geometric.typing.WITH_PYG_LIB:
        bench.note(
            f'PyG samples with pyg-lib {torch_geometric.typing.pyg_lib.__version__}. Its threads '
            'share one generator of random numbers: with several of them, batches of several edge '
            'types have fewer distinct nodes.')
    elif torch_geometric.typing.WITH_TORCH_SPARSE:
        bench.note('PyG samples with torch-sparse.')
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*worker processes in total')
        for part, run in {'types': run_types, 'time': run_time, 'links': run_links,
                          'train': run_train}.items():
            if bench.has(part):
                run(bench)
                _harness.free(bench.cuda)
    bench.finish()


if __name__ == '__main__':
    main()
