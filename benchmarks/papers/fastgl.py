"""FastGL (ASPLOS 2024), rerun."""
import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pyg_fast import ops

from .. import _graphs, _harness, _minibatch, loader, loader_accuracy
from .._harness import Result, Settings
from .._minibatch import Inputs
from ..loader import FUSED_MAP, NAIVE, OURS, PER_WORKER, PYG
from ..loader_accuracy import LOADER, PLAIN, Trained
from ..spmm import FORWARD, STEP
from ._exhibit import Exhibit, Figure, Maker, Paper, Run, fastest, ratio

FANOUT = (15, 10, 5)  # from the seeds outwards; the authors' code lists them the other way round
HIDDEN = 64
REDDIT, PRODUCTS, PAPERS, IGB = 'Reddit', 'ogbn-products', 'ogbn-papers100M', 'IGB-large'
WIDTHS = {REDDIT: 602, PRODUCTS: 100, PAPERS: 128, IGB: 256}
MAX_EDGES = dict.fromkeys((PAPERS, IGB), 64_000_000)
MODELS = tuple(loader.MODELS)
TRAINED = {  # the last two graphs serve again
    PAPERS: MODELS[:1], IGB: MODELS[:1], REDDIT: MODELS, PRODUCTS: MODELS}
FANOUTS = (FANOUT, (10, 5), (10, 10, 5, 5))
BLOCK_WIDTHS = (64, 256)
LIMIT = 0.5  # seconds: a rival's epoch that takes longer is timed once
REPEATS = 3
WALKS = {'sampler': 'random_walk', 'walk_length': 3}
SPEEDUPS = {'PyG': 11.8, 'DGL': 2.2, 'GNNLab': 1.5}  # abstract
EPOCHS, QUICK_EPOCHS, CURVE_POINTS = 10, 3, 5
_RIVAL = 'torch ops'
_FUSED_MAP = (
    'The paper maps global ids to local ones in the pass that builds the table of them, without a '
    'synchronization per id; its figures could not be had here.')
_SWEPT = (
    'The scripts of the authors sweep GPUs (1 to 8), batch sizes (4,000 to 12,000), channels (64 '
    'to 512) and fan-outs (two to four hops) of a GCN on ogbn-products; what came out could not be '
    'had here.')


class Scale(NamedTuple):
    """How large everything is.

    Args:
        batch_size: Number of seeds.
        batches: Their number in an epoch of ours.
        rival_batches: Likewise of others; no fewer than there are workers.
        workers: Of PyG's loader.
        rows: Destinations of a block.
    """

    batch_size: int
    batches: int
    rival_batches: int
    workers: int
    rows: int


SCALES = {  # (device, quick)
    ('cuda', False): Scale(8000, 16, 8, 8, 100_000), ('cuda', True): Scale(1024, 4, 2, 2, 10_000),
    ('cpu', False): Scale(512, 4, 2, 2, 10_000), ('cpu', True): Scale(64, 3, 2, 0, 500)}


def scale_of(run: Run) -> Scale:
    return SCALES[run.device.type, run.quick]


def settings_of(run: Run) -> Settings:
    return dataclasses.replace(
        run.wall, repeats=min(run.wall.repeats, REPEATS), limit=min(run.wall.limit, LIMIT))


@functools.lru_cache(maxsize=2)
def inputs_of(run: Run, name: str) -> Inputs:
    scale = scale_of(run)
    inputs = Inputs(
        run.like(name, MAX_EDGES.get(name)), WIDTHS[name], scale.batches * scale.batch_size)
    _harness.log(f'{inputs.graph.name}: {inputs.prepared.num_edges:,} edges in host memory')
    return inputs


def without_pyg() -> str:
    """What keeps PyG from sampling here, if anything does."""
    try:
        _minibatch.pyg_backend()
    except _graphs.Missing as reason:
        return f' {reason}.'
    return ''


def sampled_by() -> str:
    return without_pyg() or f' PyG samples by {_minibatch.pyg_backend()}.'


def pyg_epoch(
    run: Run, inputs: Inputs, variants: Sequence[str], model: str | None = None,
) -> list[_harness.Contender]:
    """PyG's loader and, if there is a model, its layers; nothing if it cannot sample here."""
    if without_pyg():
        return []
    scale = scale_of(run)
    loaders = loader.pyg_loaders(
        inputs, FANOUT, scale.batch_size, scale.workers, scale.rival_batches)
    network = functools.partial(
        loader.Network, inputs.width, HIDDEN, len(FANOUT), inputs.device, ours=False,
        model=model) if model else None
    batches = inputs.first(scale.rival_batches * scale.batch_size).num_batches(scale.batch_size)
    return [loader.epoch_of(name, inputs, loaders[name], batches, network) for name in variants]


def step_of(run: Run, inputs: Inputs, name: str, model: str = 'GCN') -> _harness.Contender:
    scale = scale_of(run)
    if name != FUSED_MAP:
        inputs = inputs.first(scale.rival_batches * scale.batch_size)
    return loader.step_of(name, inputs, FANOUT, scale.batch_size, HIDDEN, model)


# Epochs -----------------------------------------------------------------------------------------

def figure9(run: Run) -> None:
    scale = scale_of(run)
    exhibit = run.exhibit(
        'Figure 9: epochs of training, ms per batch', shows=(
            'The abstract gives the mean over all graphs and networks: '
            + ', '.join(f'{factor} times as fast as {name}' for name, factor in SPEEDUPS.items())
            + '. By the scripts of the authors GCN, GIN and GAT of three layers and 64 channels '
            'are trained on Reddit, ogbn-products, ogbn-papers100M, MAG and IGB-large, in batches '
            'of 8,000 nodes with 5, 10 and 15 neighbours, on two GPUs.'),
        differs=(
            f'Batches of {scale.batch_size:,} nodes, one device, features in host memory, of '
            "IGB-large 256 of its 1,024 columns. A fraction's batches share more nodes than those "
            'of the whole graph. '
            f'"{_RIVAL}": sampling by torch ops on the device with torch.unique as its map, '
            "features gathered on the CPU, PyG's layers. PyG: its NeighborLoader with "
            f'{scale.workers} workers. Epochs of these have {scale.rival_batches} batches and, if '
            f'they take over {LIMIT:g} s, are timed once, cold; ours have up to {scale.batches}. '
            "GCN alone goes through PyG's loader, for the time that it takes. The mean of the last "
            'row is geometric; the abstract does not say which its mean is.' + sampled_by()))
    over_pyg: list[float] = []
    for name, models in list(TRAINED.items())[-2 if run.quick else 0:]:
        inputs = inputs_of(run, name)
        for model in models:
            rivals = pyg_epoch(run, inputs, [PYG], model) if model == MODELS[0] else []
            results = _harness.measure([
                *(step_of(run, inputs, step, model=model) for step in (NAIVE, FUSED_MAP)),
                *rivals], settings_of(run))
            ours, naive, pyg = (fastest(results, way) for way in (FUSED_MAP, NAIVE, PYG))
            exhibit.line(f'{inputs.graph.name}, {model}', 0, results=results, here={
                'ours': ours, _RIVAL: naive, 'PyG': pyg, f'speed-up over {_RIVAL}':
                ratio(naive, ours), 'speed-up over PyG': ratio(pyg, ours)})
            if isinstance(speedup := ratio(pyg, ours), float):
                over_pyg.append(speedup)
    exhibit.line(
        'all of them, mean', 0, paper={'speed-up over PyG': SPEEDUPS['PyG']},
        here={'speed-up over PyG': _harness.geometric_mean(over_pyg)} if over_pyg else {})


def loading(run: Run) -> None:
    exhibit = run.exhibit(
        "Loading: beside PyG's NeighborLoader, ms per batch", width='batch', shows=(
            'Not an exhibit of the paper by itself: what sampling and fetching take of its epochs, '
            'without training.'),
        differs=(
            'PyG, filter_per_worker: its workers gather the features, too. Else as Figure 9.'
            + sampled_by()))
    scale = scale_of(run)
    inputs = inputs_of(run, PRODUCTS)
    results = _harness.measure([
        loader.epoch_of(
            OURS, inputs, functools.partial(loader.fast, inputs, FANOUT, scale.batch_size),
            inputs.num_batches(scale.batch_size)),
        *pyg_epoch(run, inputs, [PYG, PER_WORKER])], settings_of(run))
    ours = fastest(results, OURS)
    exhibit.line(inputs.graph.name, scale.batch_size, results=results, here={
        'ours': ours, **{name: fastest(results, name) for name in (PYG, PER_WORKER)},
        'speed-up': ratio(fastest(results, PYG, PER_WORKER), ours)})


# Its parts --------------------------------------------------------------------------------------

def ablation(run: Run) -> None:
    exhibit = run.exhibit(
        'Ablation: epochs of training by the parts of the system, ms per batch', shows=(
            'The paper adds Match-Reorder, Memory-Aware computation and Fused-Map one after the '
            'other to a naive system; its figures could not be had here.'),
        differs=(
            f'"{NAIVE}" is what Figure 9 calls "{_RIVAL}". GCN; "{loader.MATCH_REORDER}": features '
            f'of nodes that the batch before has stay, in windows of {loader.WINDOW}; '
            f'"{loader.MEMORY_AWARE}": our layers; "{FUSED_MAP}": our loader, which also fetches '
            'features by the GPU itself and ahead of the training.'))
    for name in (REDDIT, PRODUCTS):
        inputs = inputs_of(run, name)
        results = _harness.measure(
            [step_of(run, inputs, step) for step in loader.STEPS], settings_of(run))
        exhibit.line(inputs.graph.name, 0, results=results, here={
            **{step: fastest(results, step) for step in loader.STEPS},
            'speed-up': ratio(fastest(results, NAIVE), fastest(results, FUSED_MAP))})


def match_reorder(run: Run) -> None:
    exhibit = run.exhibit(
        'Match and Reorder: loading with features in host memory, ms per batch', shows=(
            'The paper saves the traffic of nodes that two successive batches share, and orders '
            'batches so that they share more; its figures could not be had here.'),
        differs=(
            f'Windows of {loader.WINDOW} batches. "{NAIVE}" fetches all features by the same '
            'kernel. Any two batches of a planted graph share about as much, so that their order '
            'gains little. On a CPU nothing crosses a bus, and nothing is matched.'))
    scale = scale_of(run)
    for name in (REDDIT, PRODUCTS):
        inputs = inputs_of(run, name)
        moved_line(exhibit, inputs, loader.traffic(
            inputs, FANOUT, scale.batch_size, settings_of(run)))


def table7(run: Run) -> None:
    exhibit = run.exhibit(
        'Table 7: random walks, ms per batch of loading', shows=(
            'The paper samples by random walks of length 3 instead; its figures could not be had '
            'here.'),
        differs=(
            'Loading alone. Ten walks from each node; of the nodes that they visit most become '
            f'neighbours {loader.text(FANOUT)}. "{NAIVE}" fetches all features of every batch.'))
    inputs = inputs_of(run, PRODUCTS)
    moved_line(exhibit, inputs, loader.traffic(
        inputs, FANOUT, scale_of(run).batch_size, settings_of(run),
        (NAIVE, loader.MATCH, loader.REORDER), **WALKS))


def moved_line(exhibit: Exhibit, inputs: Inputs, moved: dict[str, loader.Moved]) -> None:
    naive = fastest(moved, NAIVE)
    exhibit.line(inputs.graph.name, 0, results=moved, here={
        **{name: fastest(moved, name) for name in moved},
        'speed-up by match': ratio(naive, fastest(moved, loader.MATCH)),
        'and reorder': ratio(naive, fastest(moved, loader.REORDER)),
        'match degree': degree_of(moved[loader.MATCH]),
        'reordered': degree_of(moved[loader.REORDER]),
        'MB per batch, naive': moved[NAIVE].bytes_moved / 1e6,
        'share saved': moved[loader.REORDER].saved})


def degree_of(moved: loader.Moved) -> Figure:
    return '–' if moved.match_degree is None else moved.match_degree


def sampling(run: Run) -> None:
    exhibit = run.exhibit(
        'Sampling: with the id map, millions of edges per second', shows=_FUSED_MAP,
        differs=(
            f'"{_RIVAL}" draw with replacement, which takes less, on the same device, with '
            'torch.unique as their map. PyG samples on the CPU, in one thread; it was given the '
            'first of the fan-outs.' + sampled_by()))
    inputs, size, settings = inputs_of(run, PRODUCTS), scale_of(run).batch_size, settings_of(run)
    node_map = ops.NodeMap(inputs.graph.num_nodes, inputs.device)
    pyg = None if without_pyg() else f'{PYG}, {_minibatch.pyg_backend()}'
    for fanout in FANOUTS[:1 if run.quick else None]:
        rates = loader.sampled(
            inputs, fanout, size, node_map, settings, pyg if fanout == FANOUT else None)
        exhibit.line(f'{inputs.graph.name}, {loader.text(fanout)}', 0, results=rates, here={
            **{name: rate(found) for name, found in rates.items()},
            f'speed-up over {_RIVAL}': ratio(rate(rates[OURS]), rate(rates[loader.TORCH]))})


def id_map(run: Run) -> None:
    exhibit = run.exhibit(
        'Id map: alone, millions of ids per second', width='ids', shows=_FUSED_MAP,
        differs='"ours, hashing" serves where a table with a place for every node is too large.')
    inputs = inputs_of(run, PRODUCTS)
    count, mapped = loader.relabelled(
        inputs, ops.NodeMap(inputs.graph.num_nodes, inputs.device), FANOUT,
        scale_of(run).batch_size, settings_of(run))
    exhibit.line(inputs.graph.name, count, results=mapped, here={
        **{name: rate(found) for name, found in mapped.items()},
        'speed-up': ratio(rate(mapped[OURS]), rate(mapped[loader.UNIQUE]))})


def rate(found: Result) -> Figure:
    assert isinstance(found, loader.Counted)
    return '–' if found.per_second is None else found.per_second / 1e6


def aggregation(run: Run) -> None:
    exhibit = run.exhibit(
        'Aggregation: on fresh blocks, ms', shows=(
            'The paper keeps partial sums in shared memory and prepares nothing; its figures, and '
            'GNNAdvisor, could not be had here.'),
        differs=(
            'Sums without weights; all start from the list of edges, and what a rival has to '
            'convert, and for the gradient to transpose, is counted. cuSPARSE: the best algorithm '
            'and way to transpose.'))
    scale = scale_of(run)
    inputs = inputs_of(run, PRODUCTS)
    cusparse = [name for names in loader.CUSPARSE.values() for name in names]
    rivals = {'cuSPARSE': cusparse, 'torch.sparse': [loader.TORCH_SPARSE],
              'gather and scatter': [loader.SCATTER]}
    for width in BLOCK_WIDTHS[:1 if run.quick else None]:
        blocks = list(loader.blocks(inputs, scale.batch_size, scale.rows, width))
        for name, sub, num_dst in blocks[::3 if run.quick else 1]:
            block = loader.Block(name, sub, num_dst, width)
            for title, backward in ((FORWARD, False), (STEP, True)):
                results = _harness.measure(
                    loader.block_contenders(block, backward), dataclasses.replace(
                        settings_of(run), device_time=True))
                ours = fastest(results, OURS)
                best = {rival: fastest(results, *names) for rival, names in rivals.items()}
                exhibit.line(f'{inputs.graph.name}, {name}, {title}', width, results=results, here={
                    'ours': ours, **best, 'speed-up': ratio(
                        fastest(results, *itertools.chain(*rivals.values())), ours)})


# Sweeps -----------------------------------------------------------------------------------------

@functools.cache  # the middle of all sweeps is the same
def middle(run: Run) -> dict[str, Result]:
    return swept(run)


def swept(
    run: Run, batch_size: int | None = None, hidden: int = HIDDEN,
    num_neighbors: Sequence[int] = FANOUT, width: int = WIDTHS[PRODUCTS],
) -> dict[str, Result]:
    scale, base = scale_of(run), inputs_of(run, PRODUCTS)
    size = batch_size or scale.batch_size
    count = scale.rival_batches * size
    inputs = base.first(count) if width == base.width else Inputs(
        base.graph, width, count, base.edges)
    return _harness.measure([
        loader.step_of(name, some, num_neighbors, size, hidden)
        for name, some in ((NAIVE, inputs.first(count // 2)), (FUSED_MAP, inputs))],
        settings_of(run))


def sweep(
    run: Run, title: str, measure: str, values: Sequence[Any], usual: Any, shows: str = _SWEPT,
) -> None:
    exhibit = run.exhibit(
        f'{title}, epochs of training, ms per batch', width=measure.replace('_', ' '), shows=shows,
        differs=(
            f'GCN; "{_RIVAL}" as in Figure 9; epochs of {scale_of(run).rival_batches} batches, '
            'half as many of the rival.'))
    for value in values[:2 if run.quick else None]:
        results = middle(run) if value == usual else swept(run, **{measure: value})
        ours, naive = fastest(results, FUSED_MAP), fastest(results, NAIVE)
        name, hops = inputs_of(run, PRODUCTS).graph.name, isinstance(value, tuple)
        exhibit.line(
            f'{name}, {loader.text(value)}' if hops else name, 0 if hops else value,
            results=results, here={'ours': ours, _RIVAL: naive, 'speed-up': ratio(naive, ours)})


def figure15b(run: Run) -> None:
    usual = scale_of(run).batch_size
    sweep(run, 'Figure 15b: batch size', 'batch_size',
          [usual * eighths // 8 for eighths in (1, 4, 8, 12)], usual)


def figure15c(run: Run) -> None:
    sweep(run, 'Figure 15c: channels', 'hidden', (HIDDEN, 256, 512), HIDDEN)


def figure15d(run: Run) -> None:
    sweep(run, 'Figure 15d: fan-out', 'num_neighbors', FANOUTS, FANOUT)


def feature_width(run: Run) -> None:
    usual = WIDTHS[PRODUCTS]
    sweep(run, 'Feature width: columns', 'width', (32, usual, 256), usual,
          'The scripts of the authors do not sweep it: it is what crosses the bus.')


# Training ---------------------------------------------------------------------------------------

def loss_curves(run: Run) -> None:
    exhibit = run.exhibit(
        'Loss curves: with and without Match-Reorder', width='epoch', shows=(
            'Whether another order of the batches changes what is learned; what the paper has on '
            'this could not be had here.'),
        differs=(
            'examples/fastgl_training.py: GCN of two layers, batches of 512 nodes or fewer with '
            '15 and 10 neighbours; accuracy in percent, with all neighbours, at the epoch of the '
            'best validation.'))
    args = argparse.Namespace(device=run.device.type, runs=1, fanout=loader_accuracy.FANOUT)
    epochs = QUICK_EPOCHS if run.quick else EPOCHS
    name = 'planted' if run.quick else 'Computers'
    found: dict[str, Trained] = {}
    try:
        with loader_accuracy.arguments(name, 'gcn', args) as line:
            for way in (LOADER, PLAIN):
                found[way], _ = loader_accuracy.trained(
                    [*line, *loader_accuracy.WAYS[way], '--epochs', str(epochs)])
    except _graphs.Missing as reason:
        run.report.left_out[name] = str(reason)
        return
    curves = {way: result.curve for way, result in found.items()}
    for epoch in range(0, epochs, max(1, epochs // CURVE_POINTS)):
        exhibit.line(name, epoch + 1, here={
            f'loss, {way}': curve[epoch] for way, curve in curves.items()})
    exhibit.line(f'{name}, test accuracy', epochs, results=found, here={
        f'accuracy, {way}': result.mean for way, result in found.items()})


PAPER = Paper(
    'fastgl', 'FastGL: A GPU-Efficient Framework for Accelerating Sampling-Based GNN Training at '
    'Large Scale', 'ASPLOS 2024, https://arxiv.org/abs/2409.14939',
    "NVIDIA GeForce RTX 3090 (24 GB; of eight, two by its authors' scripts), with two AMD EPYC "
    '7532 and 512 GB of host memory', [
        Maker('Figure 9', figure9), Maker('Figure 15b', figure15b), Maker('Figure 15c', figure15c),
        Maker('Figure 15d', figure15d), Maker('Feature width', feature_width),
        Maker('Table 7', table7), Maker('Loading', loading), Maker('Ablation', ablation),
        Maker('Match and Reorder', match_reorder), Maker('Sampling', sampling),
        Maker('Id map', id_map), Maker('Aggregation', aggregation),
        Maker('Loss curves', loss_curves)], {
        'Figures 10 to 14 and 16 and Tables 8 and 9, by these numbers': (
            "only the paper's abstract and its authors' code could be read here; what the parts "
            'of the system do stands under headings of ours'),
        'Figure 15a, over GPUs': (
            'python -m benchmarks.loader --sections gpus runs it, where there are several'),
        "DGL, GNNLab, GNNAdvisor and the paper's own code": 'they cannot be had here',
        'MAG of Figure 9': 'its size could not be had here'},
    "Speed-ups were read in the paper's abstract, hardware and settings in its authors' code, "
    'https://github.com/a1bc2def6g/fastgl-ae.')
