"""The loader: sampling, sums over sampled blocks, whole epochs, and the gain of each part.

python -m benchmarks loader                              everything below, except gpus
python -m benchmarks loader --quick                      a minute or less
python -m benchmarks loader --parts sample,aggregate     or any of
    sample     sampled edges per second with the id map, and the map alone
    aggregate  sums over new blocks; the conversions that others need are counted
    epoch      an epoch of loading and an epoch of training, beside PyG's NeighborLoader
    match      bytes over the bus and times: naive, Match, Match and Reorder, cache
    walks      likewise with random walks as the sampler
    ablation   training: naive, + Match and Reorder, + our layers, + our sampler
    sweep      the first and the last of these over batch sizes, widths and fanouts
    wait       the share of an epoch that waits for data
    gpus       epochs of examples/fastgl_ddp.py over numbers of processes
python -m benchmarks loader --parts gpus --gpus 1,2 --features host,sharded
"""
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GAT, GCN, GIN
from torch_geometric.utils import scatter

import pyg_fast
from pyg_fast import ops
from pyg_fast.graph.graph import cache_of
from pyg_fast.loader import FastNeighborLoader, LoaderStats
from pyg_fast.ops.neighbor_sample import sample_subgraph
from pyg_fast.sparse.graph import Graph as Structure

from . import _cusparse, _graphs, _harness, _minibatch, maxk
from ._graphs import Graph
from ._harness import Bench, Contender, Option, Result, exact, finite, repeated, same, worst
from ._minibatch import CLASSES, Inputs, Plain, Sampled, Workers
from .spmm import FORWARD, STEP, excess, step

PARTS = (
    'sample', 'aggregate', 'epoch', 'match', 'walks', 'ablation', 'sweep', 'wait', 'gpus')
GRAPHS = {
    'quick': {'cuda': ('arxiv-like',), 'cpu': ('small',)},
    'cuda': ('products-like', 'reddit-like', 'arxiv-like'), 'cpu': ('medium', 'arxiv-like')}
FANOUTS = ((15, 10, 5), (5, 10, 15), (25, 10))
BATCH_SIZES = {'cuda': (1024, 8000), 'cpu': (1024,)}
WIDTHS = {'cuda': (64, 128, 256, 512), 'cpu': (64, 256)}
BLOCK_DEGREES = (5, 10, 15)
SWEEP: dict[str, Sequence[Any]] = {
    'batch size': (1000, 2000, 4000, 8000),
    'width': (32, 64, 128, 256, 512),
    'hidden': (64, 256, 512),
    'fanout': ((5, 5), (10, 10), (5, 10, 15), (15, 10, 5), (10, 10, 10, 10)),
}
MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    'GCN': GCN, 'GIN': functools.partial(GIN, norm='batch_norm'),
    'GAT': functools.partial(GAT, heads=8)}
WINDOW = 8
CACHE_RATIO = 0.1
_CALLS = 8  # batches sampled between two readings of the clock
_COLUMNS_COMPARED = 8
_EPOCH_REPEATS = 5  # at most: each reads the clock once an epoch

OURS, TORCH, TRIMMED = 'ours', 'torch ops', 'ours, trimmed'
CHECKED, HASHING = 'ours, input checked', 'ours, hashing'
UNIQUE = 'torch.unique'
PYG, PER_WORKER = 'PyG', 'PyG, filter_per_worker'
TORCH_SPARSE, SCATTER = 'torch.sparse', 'PyG scatter'
NAIVE, MATCH, REORDER = 'naive', '+ match', '+ reorder'
CACHE = f'+ cache of {CACHE_RATIO:.0%}'
VARIANTS: dict[str, dict[str, Any]] = {
    NAIVE: {'match': False, 'reorder': False},
    MATCH: {'reorder': False},
    REORDER: {'reorder': True},
    CACHE: {'reorder': True, 'cache_ratio': CACHE_RATIO},
}
MATCH_REORDER, MEMORY_AWARE, FUSED_MAP = '+ match-reorder', '+ memory-aware', '+ fused-map'
STEPS = (NAIVE, MATCH_REORDER, MEMORY_AWARE, FUSED_MAP)
SHARDED = 'sharded'
PLACES = ('auto', 'host', 'device', SHARDED)  # of examples/fastgl_ddp.py
TRAINING, AT_HAND, LOADING = 'loading and training', 'training on batches at hand', 'loading'

kernels = torch.ops.pyg_fast


# Sampling ---------------------------------------------------------------------------------------

class Draws:
    """Samples all batches in a call and returns the last sample; the first call counts edges."""

    def __init__(self, sample: Callable[[Tensor], Any], batches: Sequence[Tensor]) -> None:
        self.sample, self.batches = sample, batches
        self.edges: list[int] = []

    def __call__(self) -> Any:
        for seeds in self.batches:
            last = self.sample(seeds)
            if len(self.edges) < len(self.batches):
                self.edges.append(last.edge_index.size(1))
        return last


def samplers(
    inputs: Inputs, num_neighbors: tuple[int, ...], node_map: ops.NodeMap,
) -> dict[str, Callable[[Tensor], Any]]:
    """The ways to sample on the device."""
    rowptr, col, seed = inputs.graph.rowptr, inputs.graph.col, itertools.count()
    return {
        OURS: lambda seeds: sample_subgraph(  # what the loader calls
            rowptr, col, None, None, seeds, num_neighbors, False, False, next(seed), node_map),
        CHECKED: lambda seeds: ops.neighbor_sample(
            rowptr, col, seeds, num_neighbors, node_map=node_map),
        TORCH: lambda seeds: _minibatch.torch_sample(rowptr, col, seeds, num_neighbors)}


def per_second(
    results: Mapping[str, Result], items: Mapping[str, float],
) -> dict[str, float]:
    """Millions of items per second, where there is a time."""
    return {f'{name}, M/s': items[name] / result.median_ms / 1e3
            for name, result in results.items() if result.median_ms}


def run_sample(bench: Bench, inputs: Inputs) -> None:
    graph, args = inputs.graph, bench.args
    node_map = ops.NodeMap(graph.num_nodes, inputs.device)
    for num_neighbors, batch_size in itertools.product(args.fanouts, args.batch_sizes):
        batches = inputs.seeds(batch_size, _CALLS if bench.cuda else 2, inputs.device)
        draws = {name: Draws(sample, batches) for name, sample in samplers(
            inputs, num_neighbors, node_map).items()}
        if backend := _minibatch.pyg_backend(bench.report.left_out, "PyG's sampler"):
            few = [seeds.cpu() for seeds in batches[:1 if bench.cuda else None]]
            draws[f'{PYG}, {backend} on the CPU'] = Draws(
                _minibatch.pyg_sampler(inputs, num_neighbors), few)
        check = functools.partial(_minibatch.sample_error, graph, batches[-1], num_neighbors)
        made = [
            Contender(name, lambda each=each: each, ours, check if ours else None,
                      len(each.batches))
            for name, each in draws.items() for ours in [name in (OURS, CHECKED)]]
        bench.measure(
            'Sampling with the id map', f'{graph.name}, {list(num_neighbors)}', batch_size, made,
            label='batch', memory=True, facts=lambda results, draws=draws: per_second(results, {
                name: statistics.fmean(each.edges or [0]) for name, each in draws.items()}))
    run_relabel(bench, inputs, node_map, args.fanouts[0], args.batch_sizes[-1])


def run_relabel(
    bench: Bench, inputs: Inputs, node_map: ops.NodeMap, num_neighbors: Sequence[int],
    batch_size: int,
) -> None:
    """The id maps on the ids of a sample."""
    graph = inputs.graph
    (seeds,) = inputs.seeds(batch_size, 1, inputs.device)
    sub = ops.neighbor_sample(
        graph.rowptr, graph.col, seeds, num_neighbors, node_map=node_map, seed=1)
    ids = torch.cat([seeds, sub.n_id[sub.edge_index[0]]])
    expected = _minibatch.torch_relabel(ids)
    hashed = ops.NodeMap(graph.num_nodes, inputs.device, hashed=True)
    calls = _CALLS if bench.cuda else 2

    def check(output: tuple[Tensor, Tensor]) -> float:
        return same(*zip(output, expected, strict=True))

    maps: dict[str, Callable[[], Any]] = {
        OURS: lambda: ops.relabel(ids, graph.num_nodes, node_map=node_map),
        HASHING: lambda: ops.relabel(ids, graph.num_nodes, node_map=hashed),
        UNIQUE: lambda: ids.unique(return_inverse=True)}
    bench.measure('The id map alone', graph.name, ids.numel(), [
        Contender(name, functools.partial(repeated, run, calls), name != UNIQUE,
                  check if name != UNIQUE else None, calls) for name, run in maps.items()],
        label='ids', facts=lambda results: per_second(
            results, dict.fromkeys(results, float(ids.numel()))))


# Aggregation ------------------------------------------------------------------------------------

class Block:
    """A sample as a bipartite graph. Every step converts it again, as in training, where no
    block comes twice.
    """

    def __init__(self, name: str, sub: ops.SampledSubgraph, num_dst: int, width: int) -> None:
        device = sub.n_id.device
        normal = _graphs.normal(device)
        self.name, self.num_src, self.num_dst = name, sub.n_id.numel(), num_dst
        self.rowptr, self.col = sub.rowptr[:num_dst + 1], sub.col
        self.edge_index = sub.edge_index
        self.x, self.grad = (normal(rows, width) for rows in (self.num_src, num_dst))
        self.columns = maxk.spread(_COLUMNS_COMPARED, width, device)

    def structure(self, transposed: bool) -> Structure:
        size = self.num_src, self.num_dst
        back = (None, None, None)
        if transposed:  # as graph_of does it for a batch of the loader
            back = kernels.to_csr(self.edge_index, *size, True, False, False)[:3]
        return Structure(self.rowptr, self.col, None, *back, *size)

    def ours(self, backward: bool) -> tuple[Tensor, ...]:
        if not backward:
            return (ops.spmm(self.structure(False), self.x),)
        return step(lambda x: ops.spmm(self.structure(True), x), self.x, self.grad)()

    def scatter(self, backward: bool) -> tuple[Tensor, ...]:
        x = self.x.detach().requires_grad_(backward)
        src, dst = self.edge_index
        out = scatter(x.index_select(0, src), dst, 0, self.num_dst)
        return out.detach(), *(torch.autograd.grad(out, x, self.grad) if backward else ())

    def product(self, way: str, algorithm: str, backward: bool) -> tuple[Tensor, ...]:
        """Sums by an algorithm of cuSPARSE or by torch.sparse; ``way``: to make the transpose."""
        def by(rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor) -> Tensor:
            if algorithm != TORCH_SPARSE:
                return _cusparse.SpMM(rowptr, col, value, x, algorithm)()
            size = rowptr.numel() - 1, x.size(0)
            return torch.sparse_csr_tensor(rowptr, col, value, size) @ x

        rowptr, col, value = self._csr()
        out = by(rowptr, col, value, self.x)
        if not backward:
            return (out,)
        if way == 'op(A)':
            return out, _cusparse.SpMM(
                rowptr, col, value, self.grad, algorithm, num_cols=self.num_src)()
        return out, by(*(
            _cusparse.transpose(rowptr, col, value, self.num_src) if way == 'csr2csc' else
            (*self._sorted(), value)), self.grad)

    def _csr(self) -> tuple[Tensor, Tensor, Tensor]:
        """From the list of edges, which is sorted by destination already."""
        src, dst = self.edge_index
        rowptr = torch._convert_indices_from_coo_to_csr(dst, self.num_dst, out_int32=True)
        return rowptr, src.int(), torch.ones(src.numel(), device=src.device)

    def _sorted(self) -> tuple[Tensor, Tensor]:
        src, perm = self.edge_index[0].int().sort()
        rowptr = torch._convert_indices_from_coo_to_csr(src, self.num_src, out_int32=True)
        return rowptr, self.edge_index[1].int()[perm]

    def check(self, outputs: Sequence[Tensor]) -> float:
        """The error in some columns."""
        src, dst = self.edge_index
        errors = []
        for out, given, from_, to, size in zip(
                outputs, (self.x, self.grad), (src, dst), (dst, src),
                (self.num_dst, self.num_src), strict=False):
            terms = given[:, self.columns].double()[from_]
            right = terms.new_zeros(size, self.columns.numel())
            errors.append(excess(
                out[:, self.columns], right.index_add(0, to, terms),
                right.index_add(0, to, terms.abs())))
        return worst(errors)


def blocks(
    inputs: Inputs, batch_size: int, rows: int, width: int,
) -> Iterator[tuple[str, ops.SampledSubgraph, int]]:
    graph = inputs.graph
    generator = torch.Generator().manual_seed(3)
    nodes = torch.randperm(graph.num_nodes, generator=generator)[:rows].to(inputs.device)
    for degree in BLOCK_DEGREES:
        sub = ops.neighbor_sample(graph.rowptr, graph.col, nodes, [degree], seed=degree)
        yield f'at most {degree}', sub, nodes.numel()
    (seeds,) = inputs.seeds(batch_size, 1, inputs.device)
    sub = ops.neighbor_sample(graph.rowptr, graph.col, seeds, FANOUTS[0], seed=1)
    yield f'batch of {list(FANOUTS[0])}', sub, sub.n_id.numel()


def block_contenders(block: Block, backward: bool) -> list[Contender]:
    made: dict[str, Callable[[bool], Any]] = {
        OURS: block.ours,
        TORCH_SPARSE: functools.partial(block.product, 'sorted', TORCH_SPARSE),
        SCATTER: block.scatter}
    if block.x.is_cuda:
        made |= {
            f'cuSPARSE {way}, {algorithm}': functools.partial(block.product, way, algorithm)
            for way in (('sorted', 'csr2csc', 'op(A)') if backward else ('sorted',))
            for algorithm in _cusparse.ALGORITHMS}
    return [
        Contender(name, functools.partial(functools.partial, run, backward), name == OURS,
                  block.check)
        for name, run in made.items()]


def run_aggregate(bench: Bench, inputs: Inputs) -> None:
    args = bench.args
    for width in args.widths:
        for name, sub, num_dst in blocks(inputs, args.batch_size, args.rows, width):
            block = Block(name, sub, num_dst, width)
            for title, backward in ((FORWARD, False), (STEP, True)):
                bench.measure(
                    f'Sums over fresh blocks, {title}, float32', f'{inputs.graph.name}, {name}',
                    width, block_contenders(block, backward), bench.kernel)


# Epochs -----------------------------------------------------------------------------------------

def fast(
    inputs: Inputs, num_neighbors: Sequence[int], batch_size: int, **options: Any,
) -> FastNeighborLoader:
    return FastNeighborLoader(
        inputs.prepared, list(num_neighbors), batch_size, input_nodes=inputs.nodes, shuffle=True,
        window=WINDOW, seed=1, device=inputs.device, features='host', **options)


def pyg_loader(
    inputs: Inputs, num_neighbors: Sequence[int], batch_size: int, workers: int, batches: int,
    **options: Any,
) -> Workers:
    """PyG's NeighborLoader of some batches."""
    return Workers(NeighborLoader(
        inputs.data, list(num_neighbors), input_nodes=inputs.nodes[:batches * batch_size],
        batch_size=batch_size, shuffle=True, num_workers=workers, is_sorted=True,
        persistent_workers=workers > 0, pin_memory=inputs.device.type == 'cuda', **options))


class Network:
    """A network and its steps of training."""

    def __init__(
        self, width: int, hidden: int, num_layers: int, device: torch.device, ours: bool,
        trim: bool = False, model: str = 'GCN',
    ) -> None:
        torch.manual_seed(1)
        made = MODELS[model](width, hidden, num_layers, CLASSES).to(device)
        self.model = pyg_fast.accelerate(made) if ours else made
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.001)
        self.trim = trim

    def step(self, batch: Data) -> Tensor:
        trimmed = {
            f'{which}_per_hop': batch[which] for which in (
                'num_sampled_nodes', 'num_sampled_edges')} if self.trim else {}
        return _harness.descent(self.optimizer, lambda: F.cross_entropy(
            self.model(batch.x, batch.edge_index, **trimmed)[:batch.batch_size],
            batch.y[:batch.batch_size]))()


def load(loader: Iterable[Data], device: torch.device) -> Callable[[], Data]:
    """An epoch of loading; returns the last batch."""
    def run() -> Data:
        for batch in loader:
            last = batch.to(device, non_blocking=True)
        return last

    return run


def train(
    loader: Iterable[Data], network: Network, device: torch.device,
) -> Callable[[], Tensor]:
    """An epoch of training; returns the sum of its losses."""
    def run() -> Tensor:
        total = torch.zeros((), device=device)
        for batch in loader:
            total += network.step(batch.to(device, non_blocking=True))
        return total

    return run


def loaded(inputs: Inputs, batch: Data, walks: bool = False) -> float:
    """Zero if features, labels and edges of a batch are right (edges not of ``walks``)."""
    n_id = batch.n_id.cpu()
    num_seeds = batch.batch_size
    edges = n_id[torch.stack(tuple(batch.edge_index)).cpu()].to(inputs.device)
    return exact(all([
        torch.equal(batch.x.cpu(), inputs.x[n_id]),
        torch.equal(batch.y[:num_seeds].cpu(), inputs.y[n_id[:num_seeds]]),
        walks or bool(inputs.graph.has_edges(*edges).all()),
        n_id.unique().numel() == n_id.numel(),
    ]))


def run_epoch(bench: Bench, inputs: Inputs) -> None:
    args = bench.args
    num_batches = inputs.num_batches(args.batch_size)
    sizes = args.fanouts[0], args.batch_size
    taken = min(max(args.rival_batches, args.workers), num_batches)  # one for each worker
    there = _minibatch.pyg_backend(bench.report.left_out, "PyG's NeighborLoader")
    rivals = {PYG: {}, PER_WORKER: {'filter_per_worker': True}} if there else {}

    def epoch_of(name: str, training: bool) -> Contender:
        ours = name not in rivals

        def make() -> Callable[[], Any]:
            loader = fast(inputs, *sizes) if ours else pyg_loader(
                inputs, *sizes, args.workers, taken, **rivals[name])
            return train(loader, Network(
                inputs.width, args.hidden, len(sizes[0]), inputs.device, ours, name == TRIMMED,
            ), inputs.device) if training else load(loader, inputs.device)

        check = finite if training else functools.partial(loaded, inputs)
        return Contender(name, make, ours, check, num_batches if ours else taken)

    for title, ours in (('loading', [OURS]), ('training', [OURS, TRIMMED])):
        results = bench.measure(
            f'An epoch of {title}, ms per batch', f'{inputs.graph.name}, {list(sizes[0])}',
            args.batch_size, [epoch_of(name, title == 'training') for name in (*ours, *rivals)],
            bench.few(_EPOCH_REPEATS), label='batch', memory=True)
        if len(rivals) > 1:  # only the faster one trains
            best = min(rivals, key=lambda name: results[name].median_ms or math.inf)
            rivals = {best: rivals[best]}
    share = f'the first {taken} of them' if taken < num_batches else 'all of them'
    bench.note(f'An epoch of {inputs.graph.name} has {num_batches} batches; {PYG} was given '
               f'{share}.')


# Match, Reorder and the cache -------------------------------------------------------------------

def run_match(bench: Bench, inputs: Inputs, walks: bool = False) -> None:
    """Epochs of loading with and without Match, Reorder and cache, and their traffic."""
    num_neighbors, batch_size = bench.args.fanouts[0], bench.args.batch_size
    options: dict[str, Any] = {'sampler': 'random_walk', 'walk_length': 3} if walks else {}
    loaders: dict[str, FastNeighborLoader] = {}

    def make(name: str) -> Callable[[], Data]:
        loaders[name] = fast(inputs, num_neighbors, batch_size, **VARIANTS[name], **options)
        return load(loaders[name], inputs.device)

    title = 'Random walks of 3 steps, ' if walks else 'Loading, features in host memory, '
    graph = f'{inputs.graph.name}, {list(num_neighbors)}'
    bench.measure(
        f'{title}{inputs.width} wide, ms per batch', graph, batch_size, [
            Contender(name, functools.partial(make, name), True,
                      functools.partial(loaded, inputs, walks=walks),
                      inputs.num_batches(batch_size)) for name in VARIANTS],
        bench.few(_EPOCH_REPEATS), label='batch', memory=True,
        pairs=[(REORDER, NAIVE), (MATCH, NAIVE), (REORDER, MATCH), (CACHE, NAIVE)])
    for name, made in loaders.items():
        bench.add(f'{title}traffic', f'{graph}, {name}', batch_size, {}, label='batch',
                  facts=traffic(made.stats))


def traffic(stats: LoaderStats) -> dict[str, float | None]:
    """What crossed the bus, in MB per batch, and what did not."""
    count = 1e6 * max(stats.num_batches, 1)
    moved, match, cache = (part / count for part in (
        stats.bytes_moved, stats.bytes_saved_by_match, stats.bytes_saved_by_cache))
    saved = (match + cache) / (moved + match + cache) if moved or match or cache else 0.0
    return {'MB moved per batch': moved, 'match degree': stats.match_degree,
            'share saved': saved, 'MB saved by match': match, 'MB saved by cache': cache}


# Ablation ---------------------------------------------------------------------------------------

def step_of(
    name: str, inputs: Inputs, num_neighbors: Sequence[int], batch_size: int, hidden: int,
    model: str = 'GCN',
) -> Contender:
    """An epoch of training by the paper's system up to one of its parts.

    The naive one samples on the device by torch ops, with torch.unique as its map, gathers
    features on the CPU, copies them, and aggregates by PyG's gather and scatter.
    """
    def sample(seeds: Tensor) -> Sampled:
        return _minibatch.torch_sample(
            inputs.graph.rowptr, inputs.graph.col, seeds, num_neighbors)

    def make() -> Callable[[], Tensor]:
        network = Network(
            inputs.width, hidden, len(num_neighbors), inputs.device,
            ours=name in (MEMORY_AWARE, FUSED_MAP), model=model)
        if name == FUSED_MAP:
            return train(fast(inputs, num_neighbors, batch_size), network, inputs.device)
        window = 0 if name == NAIVE else WINDOW
        return train(Plain(inputs, batch_size, sample, window), network, inputs.device)

    return Contender(
        name, make, ours=name == FUSED_MAP, check=finite, calls=inputs.num_batches(batch_size))


def run_ablation(bench: Bench, inputs: Inputs) -> None:
    sizes = bench.args.fanouts[0], bench.args.batch_size
    for model in bench.args.models:
        bench.measure(
            'Training by the parts of the system, ms per batch',
            f'{inputs.graph.name}, {list(sizes[0])}' + f', {model}' * (model != 'GCN'), sizes[1],
            [step_of(name, inputs, *sizes, bench.args.hidden, model) for name in STEPS],
            bench.few(_EPOCH_REPEATS), label='batch', memory=True, rivals=(),
            pairs=[(FUSED_MAP, NAIVE), *((after, before) for before, after in itertools.pairwise(
                STEPS))])


def run_sweep(bench: Bench, graph: Graph) -> None:
    """The first and the last step of the ablation; one parameter varies at a time."""
    args = bench.args
    if graph.name.split(' ')[0] != args.graphs[0]:
        return
    quick: dict[str, Sequence[Any]] = {
        'batch size': (64, 128), 'width': (8, 16), 'hidden': (8, 16), 'fanout': ((2, 2), (3, 2)),
    }
    for measure, values in (quick if args.quick else SWEEP).items():
        for value in values:
            width = value if measure == 'width' else args.width
            batch_size = value if measure == 'batch size' else args.batch_size
            num_neighbors = value if measure == 'fanout' else args.fanouts[0]
            inputs = Inputs(graph, width, args.sweep_batches * batch_size)
            bench.measure(
                f'Training over {measure}, ms per batch', f'{graph.name}, {list(num_neighbors)}',
                len(value) if measure == 'fanout' else value, [
                    step_of(name, inputs, num_neighbors, batch_size,
                            value if measure == 'hidden' else args.hidden)
                    for name in (NAIVE, FUSED_MAP)], bench.few(_EPOCH_REPEATS),
                label='hops' if measure == 'fanout' else measure)


# Waiting ----------------------------------------------------------------------------------------

def run_wait(bench: Bench, graph: Graph) -> None:
    args = bench.args
    num_neighbors, batch_size = args.fanouts[0], args.batch_size
    inputs = Inputs(graph, args.width, args.wait_batches * batch_size)
    num_batches, device = inputs.num_batches(batch_size), inputs.device
    loader = fast(inputs, num_neighbors, batch_size)

    def network() -> Network:
        return Network(inputs.width, args.wait_hidden, len(num_neighbors), device, ours=True)

    def training() -> Callable[[], Tensor]:
        epoch = train(loader, network(), device)
        runs = itertools.count(1)

        def run() -> Tensor:
            if next(runs) == 2:  # the first one is cold
                loader.reset_stats()
            return epoch()

        return run

    def at_hand() -> Callable[[], Tensor]:
        kept = [batch.to(device) for batch in fast(inputs, num_neighbors, batch_size)]
        fresh = [dict(cache_of(batch.edge_index).entries) for batch in kept]

        def run() -> Tensor:
            for batch, state in zip(kept, fresh, strict=True):
                # A step must not find what the step before cached on its batch.
                cache_of(batch.edge_index).entries = dict(state)
            return epoch()

        epoch = train(kept, network(), device)
        return run

    def waited(results: dict[str, Result]) -> dict[str, Any]:
        both, alone, fetch = (
            results[name].median_ms or math.nan for name in (TRAINING, AT_HAND, LOADING))
        sampling, fetching, waiting = (
            1e3 * seconds / max(loader.stats.num_batches, 1) for seconds in (
                loader.stats.sample_seconds, loader.stats.fetch_seconds,
                loader.stats.wait_seconds))
        return {
            'sampling': sampling, 'fetching': fetching,
            'waiting, by difference, %': 100 * (1 - alone / both),
            'by the loader, %': 100 * waiting / both,
            'what takes longer': 'step' if alone > fetch else 'fetch'}

    bench.measure(
        f'Waiting for data, batch {batch_size:,}, ms per batch',
        f'{graph.name}, {list(num_neighbors)}', args.wait_hidden, [
            Contender(TRAINING, training, True, finite, num_batches),
            Contender(AT_HAND, at_hand, True, finite, num_batches),
            Contender(LOADING, lambda: load(fast(inputs, num_neighbors, batch_size), device),
                      True, functools.partial(loaded, inputs), num_batches)],
        bench.few(_EPOCH_REPEATS), facts=waited, label='hidden')


# Processes --------------------------------------------------------------------------------------

def run_gpus(bench: Bench, name: str) -> None:
    """Epochs of the example with one process on each GPU (on a CPU: processes by gloo)."""
    args = bench.args
    results: dict[str, Result] = {}
    for count, place in itertools.product(args.gpus, args.features):
        if count == 1 and place == SHARDED:
            continue
        label = f'{count} process{"es" * (count > 1)}'
        label += f', {place}' * (len(args.features) > 1)
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / 'record.json'
            command = [
                sys.executable, '-m', 'torch.distributed.run', '--standalone',
                f'--nproc-per-node={count}', str(_harness.ROOT / 'examples' / 'fastgl_ddp.py'),
                '--dataset', 'planted', '--size', name, '--device', args.device, '--features',
                place, '--batch-size', str(args.batch_size), '--hidden', str(args.hidden),
                '--epochs', str(1 + max(1, min(args.repeats, _EPOCH_REPEATS))), '--fanout',
                ','.join(map(str, args.fanouts[0])), '--evaluate-every', '0', '--json', str(record)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if 'Error' in line]
                results[label] = Result(note=f'failed: {(lines or ["?"])[0][:200]}')
                continue
            seconds = json.loads(record.read_text())['seconds'][1:]  # the first one is cold
            times = [1e3 * each for each in seconds]
            results[label] = Result(
                statistics.median(times), min(times), max(times), len(times))
    first, *others = results
    bench.add('One epoch, ms', name, args.batch_size, results, label='batch of each',
              pairs=[(other, first) for other in others])


# All of it --------------------------------------------------------------------------------------

def main(argv: Sequence[str] | None = None) -> None:
    def usual(cuda: Any, cpu: Any, quick_cuda: Any, quick_cpu: Any) -> dict[str, Any]:
        return {'cuda': cuda, 'cpu': cpu, 'quick': {'cuda': quick_cuda, 'cpu': quick_cpu}}

    bench = Bench(
        'loader', __doc__, argv, parts=PARTS, on_request=('gpus',), graphs=GRAPHS,
        fanouts=Option(usual(FANOUTS, FANOUTS, FANOUTS[:1], ((4, 3),)), _harness.integers,
                       'neighbours by hop, from the seeds; whole epochs take the first', '+'),
        batch_sizes=Option(usual(*BATCH_SIZES.values(), BATCH_SIZES['cuda'], (64,)),
                           _harness.integers, 'of sample'),
        batch_size=Option(usual(8000, 1024, 8000, 64), help='of all other parts'),
        widths=Option(usual(*WIDTHS.values(), WIDTHS['cuda'][:2], (8,)), _harness.integers,
                      'columns of aggregate'),
        rows=Option(usual(100_000, 10_000, 100_000, 200), help='destinations of a block'),
        width=Option(100, help='features of a node'), hidden=Option(64, help='channels of the GCN'),
        workers=Option({'cuda': 8, 'cpu': 2}, int, "of PyG's NeighborLoader"),
        rival_batches=Option(32, help="batches of PyG's epoch, at most; at least its workers"),
        models=_harness.names('model', tuple(MODELS), ('GCN',)),
        nodes=Option(help='training nodes, at most'),
        sweep_batches=Option(8, help='batches of an epoch of sweep'),
        wait_batches=Option(16, help='batches of an epoch of wait'),
        wait_hidden=Option(256, help='channels in wait'),
        gpus=Option((1, 2), _harness.integers, 'numbers of processes'),
        features=_harness.names('place of features in gpus', PLACES, PLACES[:1]))
    args = bench.args
    bench.note(*(NOTES[part].format(**vars(args)) for part in args.parts if part in NOTES))

    @functools.lru_cache(maxsize=1)
    def inputs_of(graph: Graph) -> Inputs:
        return Inputs(graph, args.width, args.nodes)

    def on_inputs(run: Callable[[Bench, Inputs], None]) -> Callable[[Bench, Graph], None]:
        return lambda bench, graph: run(bench, inputs_of(graph))

    bench.run_parts({
        'sample': on_inputs(run_sample), 'aggregate': on_inputs(run_aggregate),
        'epoch': on_inputs(run_epoch), 'match': on_inputs(run_match),
        'walks': on_inputs(functools.partial(run_match, walks=True)),
        'ablation': on_inputs(run_ablation), 'sweep': run_sweep, 'wait': run_wait,
    })
    if bench.has('gpus'):
        for name in args.graphs:
            run_gpus(bench, name)
    bench.finish()


NOTES = {
    'sample': 'Sampling: without replacement; every edge of our samples is checked. '
    f'"{CHECKED}" is the public function, which checks the whole graph at every call. "{TORCH}": '
    'torch ops on the same device, which draw with replacement, with torch.unique as the id map. '
    'PyG samples on the CPU, in one thread.',
    'aggregate': 'Aggregation: sums without weights over blocks; each block comes once. All '
    'contenders start from the list of edges, sorted by destination; ours also has the row '
    'pointers of the sampler. All conversions for the gradient are counted: a transpose by our '
    'kernel, for cuSPARSE by a torch sort, by cusparseCsr2cscEx2, or none for op(A).',
    'epoch': 'Epochs: {width} features of each node in host memory; training nodes: '
    + ', '.join(f'{share:.0%} of {name}' for name, share in _minibatch.TRAIN_SHARE.items())
    + ". PyG's NeighborLoader has {workers} persistent workers and pinned memory; its batches are "
    'copied to the device. A GCN trains on them, ours accelerated. The start of a loader is not '
    'counted.',
    'match': f'Match: windows of {WINDOW} batches; "{NAIVE}" fetches all features of every batch '
    'with the same kernel. The match degree is that of successive batches.',
    'ablation': f'Ablation: "{NAIVE}" samples on the device by torch ops with torch.unique as the '
    "id map, gathers features on the CPU, copies them, and trains PyG's GCN on a list of edges. "
    f'"{MATCH_REORDER}" fetches only features that the previous batch lacks, in windows of '
    f'{WINDOW}; "{MEMORY_AWARE}" trains on our kernels; "{FUSED_MAP}" is FastNeighborLoader.',
    'wait': 'Waiting: a GCN of {wait_hidden} channels. ' f'"{AT_HAND}": the same steps on batches '
    'that were loaded before.',
    'gpus': 'Processes: examples/fastgl_ddp.py under torchrun; every process has its own batch. '
    '"host" reads features from host memory, "sharded" from the devices that hold a part each.',
}

if __name__ == '__main__':
    main()
