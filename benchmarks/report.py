"""The manual's pages of performance, their plots and README's table, from benchmarks/results.

docs/performance.md has a chart and a table for each device; docs/performance/ has the details.

python -m benchmarks report             writes them
python -m benchmarks report --check     exits with 1 if they differ from the runs

For each benchmark, device and section, the rows of a graph come from the newest run that has them.
Runs with --quick are not drawn.
"""
import argparse
import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import (
    _harness,
    _plots,
    attention,
    compiled,
    edge_mlp,
    gat,
    hubs,
    layers,
    loader,
    maxk,
    molecules,
    paths,
    published,
    sampled,
    spmm,
)
from ._harness import Cell, slug
from ._runs import Cited, Row, Run, Timed, Unsupported, cells, read_runs, result_of, sources
from .roofline import gigabytes

RESULTS = _harness.ROOT / 'benchmarks' / 'results'
PAGE, FOLDER, README = 'docs/performance.md', 'docs/performance', 'README.md'
BEGIN, END = '<!-- begin: python -m benchmarks.report -->', '<!-- end -->'
PAPERS = 'papers-'
MOST = 10  # rows of a table of the page
WIDEST = 88  # characters of a line of a table, above which it is divided
_FIGURE = re.compile(
    r'(?<![\w.])\d[\d.,]*(?:st|nd|rd|th)?\s?(?:ms|µs|seconds?|times|x|[GM]B|GB/s|%|points?)(?!\w)'
    r'|\ba \d+(?:st|nd|rd|th)\b')


# Tables -----------------------------------------------------------------------------------------

CUSPARSE = 'cuSPARSE'
SUMS = Timed(
    'Sums of neighbours, weighted, float32', 'spmm', 'sum, forward, float32', spmm.OURS,
    [CUSPARSE, *spmm.RIVALS], [spmm.PLAIN])
GCN_LAYER = Timed(
    'A GCN layer, forward and backward', 'gcn', layers.TITLE, layers.PREPARED, ['PyG'],
    [layers.PLAIN], 'channels')
LAYERS = Timed(
    'Training steps of layers, PyG compiled too', 'layers', layers.TITLE, layers.PREPARED,
    layers.RIVALS, [each for each in layers.OURS if each != layers.PREPARED], 'channels')
PREPARING = Timed(
    'Sorting a graph both ways', ('gcn', 'reorder'), 'Preparing a graph, CSR and CSC', 'ours',
    ['PyG'], width='nodes')
FRESH = Timed(
    'Sums over lists of edges that are new at every step, forward and backward', 'aggregate',
    'forward + backward', 'auto', ['PyG'], ['scatter', 'reduce'])
REORDERED = Timed(
    'Sums on a graph in Rabbit Order', 'reorder', 'sum, forward, float32', 'rabbit', ['as is'],
    ['rcm', 'degree'])
MAXK = Timed(
    'Aggregation of the k largest of 256 features', 'maxk',
    'Aggregation at F=256, forward, float32', maxk.OURS,
    [maxk.DENSE, CUSPARSE, spmm.TORCH], [maxk.BALANCED], 'k')
MAXK_GRADIENT = Timed(
    'Its gradient', 'maxk', 'Aggregation at F=256, gradient of the values, float32', maxk.OURS,
    [maxk.DENSE, CUSPARSE, spmm.TORCH], [maxk.ORDERED, maxk.BALANCED], 'k')
MAXK_STEP = Timed(
    'A training step of three SAGE layers, 256 channels', 'maxk',
    'Training step, sage, 3 layers, hidden 256', maxk.MAXK, ['PyG', maxk.RELU],
    [maxk.MAXK_BALANCED, maxk.MAXK_ROOT], 'k')
GAT_LAYER, GATV2_LAYER = (Timed(
    f'A {name} layer, forward and backward', 'gat', f'One {name} layer, forward + backward',
    layers.PREPARED, [layers.PYG], [layers.PLAIN], 'H C') for name in ('GATConv', 'GATv2Conv'))
GAT_FORWARD = Timed(
    'The kernel of GAT, forward', 'gat', 'ops.gat, forward, float32', gat.INFERENCE,
    [gat.COMPOSED], [gat.TRAINING, gat.DROPPED], 'H C')
GAT_BACKWARD = Timed(
    'The kernel of GAT, gradients', 'gat', 'ops.gat, backward, float32', gat.OURS, [gat.COMPOSED],
    [gat.OURS_DROPPED], 'H C')
GAT_CORA = Timed(
    "A training step of the GAT paper's model on Cora", ('gat', 'layers'),
    'Cora, GATConv, the whole training step', layers.PREPARED, [layers.PYG], [layers.PLAIN],
    'H C')
SAMPLED = Timed(
    'Aggregation of at most S edges of each node, 256 features, weighted, float32', 'sampled',
    'Aggregation at F=256, float32', sampled.FASTRAND,
    [sampled.FULL, CUSPARSE, spmm.TORCH], ['bucket', sampled.UNBIASED], 'S',
    {sampled.FULL: 'ours, all edges'})
SAMPLED_MODEL = Timed(
    "Inference of the paper's GCN", 'sampled', 'Inference of a GCN, 602 to 128 to 41, float32',
    sampled.FASTRAND, [sampled.FULL], ['bucket', sampled.UNBIASED, sampled.INT8], 'S',
    {sampled.FULL: 'ours, all edges'})
PATH = Timed(
    "The last layer's backward aggregation, by share of training nodes", 'paths',
    'Backward aggregation of the last layer', paths.PATH,
    [paths.ACTIVE, paths.IF_ELSE, paths.CUSPARSE])
PATH_STEP, PATH_EAGER = (Timed(
    f'A training step of a GCN of two layers, {what}', 'paths', f'2-layer GCN, {what}, whole step',
    paths.FORWARD, [paths.PLAIN], [paths.BACKWARD, paths.CACHED, paths.CACHED_ALONE], 'hidden',
    {paths.PLAIN: 'ours, all nodes active'})
    for what in ('launches hidden', 'eager'))
SAMPLING = Timed(
    'Sampling, with the map to local ids', 'loader', 'Sampling with the id map', loader.OURS,
    [loader.TORCH, loader.PYG], [loader.CHECKED], 'batch')
LOADING = Timed(
    'An epoch of loading, ms a batch', 'loader', 'An epoch of loading, ms per batch', loader.OURS,
    [loader.PYG], width='batch')
EPOCH = Timed(
    'An epoch of training, ms a batch', 'loader', 'An epoch of training, ms per batch',
    loader.OURS, [loader.PYG], [loader.TRIMMED], 'batch')
HOST = Timed(
    'Loading features of 100 columns from host memory, ms a batch', 'loader',
    'Loading, features in host memory, 100 wide, ms per batch', loader.MATCH, [loader.NAIVE],
    [loader.REORDER, loader.CACHE], 'batch', {loader.NAIVE: 'ours, all rows fetched'})
ABLATION = Timed(
    'Training by the parts of the system, ms a batch', 'loader',
    'Training by the parts of the system, ms per batch', loader.FUSED_MAP, [loader.NAIVE],
    [loader.MATCH_REORDER, loader.MEMORY_AWARE], 'batch')
BLOCKS = Timed(
    'Sums over fresh blocks, forward and backward', 'loader',
    'Sums over fresh blocks, forward + backward, float32', loader.OURS,
    [CUSPARSE, loader.TORCH_SPARSE, loader.SCATTER])
PUBLISHED = [
    *(Timed(f'A training step, {size}', 'published', f'A training step, {size}', published.OURS,
            [layers.PYG], width='channels', needs=layers.COMPILED if size == 'hubs' else '')
      for size in published.SIZES),
    Timed('A training step as a CUDA graph, hubs', 'published', 'A training step, hubs',
          layers.OURS_CAPTURED, [layers.PYG], [published.OURS, layers.PREPARED], 'channels',
          needs=layers.OURS_CAPTURED)]
GRAPH_TRANSFORMERS = [
    Timed(f'A graph transformer with projected edge features, {mode}, {dtype}', 'attention',
          f'Attention, {mode}, {dtype}', layers.OURS_CAPTURED, [layers.PYG, attention.ANEMOI],
          [layers.PREPARED, layers.PLAIN], 'H C')
    for dtype in ('float32', 'bfloat16', 'float16') for mode in ('forward', 'step')]
HUBS = [
    Timed(title, 'hubs', title, layers.PLAIN, [layers.PYG], [layers.PREPARED], 'h')
    for title in (hubs.ROWS, hubs.BATCHES, hubs.TYPED)]
MESSAGES = Timed(
    'A training step of layers with a message of their own', 'message', 'step', layers.PREPARED,
    [layers.PYG], [layers.PLAIN], 'channels')
EDGE_MLPS = [
    Timed(title, 'edge-mlp', title, layers.PREPARED, layers.RIVALS,
          [layers.PLAIN, layers.OURS_COMPILED, edge_mlp.OURS_REDUCED, layers.OURS_CAPTURED],
          'channels')
    for title in (*(f'{mode}, {precision}' for mode in edge_mlp.TITLES.values()
                    for precision in edge_mlp.PRECISIONS),
                  *(f'A step, highest, {graph}' for graph in ('Computers', 'tolokers')))]
COMPILED = [
    Timed(title, 'compiled', title, layers.PLAIN, compiled.RIVALS, width='channels')
    for size in compiled.SIZES for title in [f'A compiled training step, {size}']]
MOLECULES = [
    Timed(f'A training step on batches of molecules, with loading{precision}', 'molecules',
          f'{molecules.TRAIN}{precision}', molecules.BOTH, ['PyG', molecules.COMPILED],
          [molecules.CAPTURED, molecules.EAGER], 'channels', needs=molecules.BOTH)
    for precision in ('', ', high')]
MAKING = Timed(
    'Making a batch of molecules', 'molecules', molecules.MAKING, molecules.OURS, ['PyG'],
    [molecules.PADDED], 'columns')


@dataclasses.dataclass(frozen=True)
class Headline:
    """A row of README's table: its text, and the row of the page with its figures."""

    what: str
    table: Timed
    graph: str
    width: int


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of rows of some sections on one GPU; ``graphs``: how names of graphs begin."""

    name: str
    alt: str
    tables: Sequence[Timed]
    graphs: Sequence[str]
    draw: Callable[[list[list[Cell]]], Any]


@dataclasses.dataclass(frozen=True)
class System:
    """A chapter of the page."""

    title: str
    about: str
    tables: Sequence[Timed | Cited]
    plots: Sequence[Plot] = ()
    headlines: Sequence[Headline] = ()


_BIG = ('reddit-like', 'products-like', 'arxiv-like')

SYSTEMS = (
    System(
        'Aggregation',
        'Exact layers, on prepared and on plain graphs; [which one to take](../start/choose.rst).',
        (LAYERS, SUMS, GCN_LAYER, PREPARING, FRESH, REORDERED),
        (Plot('sums', 'Time of a weighted sum over the number of features, ours beside cuSPARSE',
              [SUMS], _BIG, _plots.over('features', {
                  'ours': [spmm.OURS], 'cuSPARSE': spmm.CUSPARSE,
                  'cuSPARSE preprocessed': spmm.PREPROCESSED}, log=True)),),
        (*(
            Headline(layer, LAYERS, f'{graph}: {layer}', 64)
            for graph, layer in (
                ('arxiv-like', 'GCN'), ('arxiv-like', 'SAGE mean'), ('arxiv-like', 'GIN'),
                ('reddit-like', 'GCN'), ('reddit-like', 'GAT 8 heads'))),
         Headline('weighted sums alone, forward', SUMS, 'Computers', 64))),
    System(
        'Layers that people publish',
        'Layers in the manner of published code, under `pyg_fast.accelerate`, on a plain '
        '`edge_index`: a batch of molecules, a graph with hubs, a real graph.', PUBLISHED),
    System(
        'Hubs', 'One node receives h of the edges, and another sends as many.', HUBS),
    System(
        'Layers of your own', 'The message of each layer as one generated kernel: '
        '[Messages as kernels](../systems/messages.rst).', [MESSAGES]),
    System(
        'An MLP of each edge', 'Layers whose message is an MLP, as one kernel over tiles of edges: '
        '[Messages as kernels](../systems/messages.rst). Products of float32 as exact as float32 '
        '(`highest`) or not (`high`), or bfloat16.', EDGE_MLPS),
    System(
        'Compiled models', '`pyg_fast.compile` beside `torch.compile`, on a plain `edge_index`: '
        '[Compile, export and CUDA graphs](../systems/compile.rst).', COMPILED),
    System(
        'Batches of small graphs', 'Whole epochs of training on molecules, `GraphLoader` and '
        '`capture`: [Batches of small graphs](../systems/small_graphs.rst).',
        (*MOLECULES, MAKING)),
    System(
        'MaxK-GNN', 'MaxK replaces ReLU, so it changes the model: '
        '[when it pays](../systems/maxk.rst).',
        (MAXK, MAXK_GRADIENT, MAXK_STEP,
         Cited('Test accuracy beside ReLU', 'accuracy', 'Test accuracy, %'),
         Cited('Times of an epoch, ms', 'accuracy', 'Time per epoch, ms')),
        (Plot('maxk', 'Time of the aggregation and of its gradient over k, beside products with '
              'all columns', [MAXK, MAXK_GRADIENT], ('reddit-like',), _plots.over(
                  'k', {'MaxK': [maxk.OURS], 'MaxK, balanced': [maxk.BALANCED]},
                  {'all columns, ours': [maxk.DENSE],
                   'all columns, cuSPARSE': [*spmm.CUSPARSE, *spmm.PREPROCESSED]},
                  ('aggregation', 'gradient'))),),
        (Headline('three SAGE layers, MaxK, k = 32', MAXK_STEP, 'reddit-like', 32),)),
    System(
        'Attention', 'GAT and GATv2: [Fused attention](../systems/attention.rst).',
        (GAT_LAYER, GATV2_LAYER, GAT_FORWARD, GAT_BACKWARD, GAT_CORA, *GRAPH_TRANSFORMERS),
        (Plot('attention', 'Times of layers with attention, forward and backward, ours beside '
              "PyG's", [GAT_LAYER, GATV2_LAYER], ('arxiv-like', 'reddit-like'), _plots.bars(
                  ('GATConv', 'GATv2Conv'), {'ours, prepared graph': layers.PREPARED,
                                             'ours, edge_index': layers.PLAIN,
                                             'PyG': layers.PYG})),)),
    System(
        'Sampled aggregation',
        'It reads some of the edges, which costs accuracy: '
        '[Sampled aggregation](../systems/sampled.rst).',
        (SAMPLED, SAMPLED_MODEL,
         Cited('The least S of GCN that loses at most one point', 'sampled-accuracy',
               'GCN: S that loses at most 1 point', ['quantize']),
         Cited('The least S of SAGE that loses at most one point', 'sampled-accuracy',
               'SAGE: S that loses at most 1 point', ['quantize'])),
        (Plot('sampled', 'Time of sampled aggregation over S, beside that of all edges', [SAMPLED],
              ('reddit-like', 'arxiv-like'), _plots.over(
                  'S', {'fastrand': [sampled.FASTRAND], 'bucket': ['bucket']},
                  {'all edges, ours': [sampled.FULL],
                   'all edges, cuSPARSE': [*spmm.CUSPARSE, *spmm.PREPROCESSED]})),),
        (Headline('sums of at most 32 edges a node', SAMPLED, 'reddit-like', 32),)),
    System(
        'Execution paths',
        'The same losses and gradients for less, where few nodes train: '
        '[Execution paths](../systems/paths.rst).',
        (PATH, PATH_STEP, PATH_EAGER),
        (Plot('paths', 'Time of a training step by share of training nodes, beside that with all '
              'nodes active', [PATH_STEP], (), _plots.shares(
                  128, {'all nodes active': paths.PLAIN, 'path': paths.BACKWARD,
                        'path, forward too': paths.FORWARD,
                        'and the input cached': paths.CACHED})),),
        (Headline('GCN on execution paths, 10% train', PATH_STEP, 'products-like, 10%', 128),)),
    System(
        'Mini-batches', 'Sampling, loading, training: [Mini-batches](../systems/mini_batches.rst).',
        (SAMPLING, LOADING, EPOCH, HOST, ABLATION, BLOCKS,
         Cited('Waiting for data', 'loader', 'Waiting for data, batch 8,000, ms per batch'),
         Cited('One epoch on one or more GPUs, ms', 'loader', 'One epoch, ms'),
         Cited('Accuracy of GCN trained by the loader', 'loader-accuracy', 'GCN')),
        (Plot('loader', 'Times of sampling and of loading from host memory, by batch',
              [SAMPLING, HOST], (), _plots.loading(
                  {'ours': loader.OURS, 'torch ops': loader.TORCH, 'PyG, on the CPU': 'PyG'},
                  {name: name for name in loader.VARIANTS})),),
        (Headline('sampling a batch, fan-out 15, 10, 5', SAMPLING, 'products-like, [15, 10, 5]',
                  8000),)),
)


# Ceilings ---------------------------------------------------------------------------------------

ROOFLINE = (
    'Of one run: what each kernel must move (inputs and results once) and what it gathers (a row '
    'as often as an edge names it), and the share that it reaches of the least time which memory '
    'and cached random rows allow on that device.')


def roofline(runs: Sequence[Run], plots: 'Plots') -> list[str]:
    """A chapter of the newest run of benchmarks.roofline on each device."""
    lines: list[str] = []
    newest: dict[str, Run] = {}
    for run in runs:
        if run.bench == 'roofline':
            newest.setdefault(run.device, run)
    for device, run in newest.items():
        results = [
            [section['title'], cell['graph'], cell['width'], name, result]
            for section in run.data['sections'] for cell in section['cells']
            for name, result in cell['results'].items() if result['median_ms']]
        kernels = [row for row in results if 'must_move' in row[-1]]
        ceilings: dict[tuple[str, str, int], dict[str, float]] = {}
        for title, graph, width, name, result in results:
            if 'num_bytes' in result:
                ceilings.setdefault((title, graph, width), {})[name] = (
                    result['num_bytes'] / result['min_ms'] * 1e3)
        lines += [f'## {device}', '']
        for stem, alt, draw in (
            ('reached', 'Share of the least time that memory and caches allow, by kernel',
             _plots.reached),
            ('roofline', 'Bytes gathered per second over how often a byte is gathered, below the '
             'ceilings of memory and of cached rows', _plots.roofline)):
            if kernels:
                lines += plots.add(f'{stem}-{slug(device)}', alt, kernels, draw, [run])
        lines += ['Ceilings, GB per second:', '', *_harness.table(
            ['section', 'of', 'width', 'way', 'GB/s'],
            [[title.split(',')[0], graph, f'{width:,}', best, gigabytes(rates[best])]
             for (title, graph, width), rates in ceilings.items()
             for best in [max(rates, key=rates.__getitem__)]]), '', *sources([run]), '']
        if kernels:
            lines += ['Kernels:', '', *_harness.table(
                ['kernel', 'of the limit', 'limit', 'section', 'graph', 'width', 'ms'],
                [[name, f"{result['share']:.0%}", result['limit'], title, graph, f'{width:,}',
                  result_of(result).text()]
                 for title, graph, width, name, result in kernels]), '', *sources([run]), '']
    return [ROOFLINE, '', *lines] if lines else []


# Papers -----------------------------------------------------------------------------------------

def papers(runs: Sequence[Run]) -> dict[str, tuple[str, list[str]]]:
    """Title and lines of each paper: of each table or figure the newest rerun on each device."""
    chapters: dict[str, tuple[str, list[str]]] = {}
    benches = sorted({run.bench for run in runs if run.bench.startswith(PAPERS)})
    for bench in benches:
        found: dict[tuple[str, str], Run] = {}
        for run in (run for run in runs if run.bench == bench):
            for section in run.data['sections']:
                found.setdefault((section['title'], run.device), run)
        newest = next(run for run in runs if run.bench == bench)
        title, _, about = newest.data['notes'][0].partition(' (')
        where, _, about = about.partition('). ')
        lines = [f'{where}. {about}' if about else where, '']
        lines += [line for line in newest.data['notes'][1:] if line] + ['']
        for (section, device), run in sorted(found.items(), key=lambda item: (
                _numbered(item[0][0]), item[0][1].startswith('CPU'), item[0][1])):
            if text := _harness.sections_of(run.markdown).get(section):
                lines += [f'## {section} ({device})', '', *text, '', *sources([run]), '']
        for name, reason in newest.data.get('left_out', {}).items():
            lines += [f'Left out: {name}, since {reason}.', '']
        chapters[bench] = title, lines
    return chapters


def _numbered(title: str) -> list[tuple[int, str]]:
    """Figure 10 after Figure 9."""
    return [(int(part), '') if part.isdigit() else (0, part) for part in re.split(r'(\d+)', title)]


# Plots ------------------------------------------------------------------------------------------

class Plots:
    """The plots of the page: their files by name, and what draws them."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[str, Callable[[], Any]]] = {}

    def add(
        self, name: str, alt: str, data: Any, draw: Callable[[Any], Any], runs: Sequence[Run],
        folder: str = '',
    ) -> list[str]:
        """Lines that show a plot; its file has a digest of its data and of the drawing code."""
        text = json.dumps(data, sort_keys=True, default=vars)
        text += Path(_plots.__file__).read_text(encoding='utf-8')
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.made[f'{name}.svg'] = digest, lambda: draw(data)
        return [f'![{alt}]({folder}{name}.svg)', '', *(sources(runs) if runs else []), '']

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob('*.svg'):
            if file.name not in self.made:
                file.unlink()
        for name, (digest, draw) in self.made.items():
            if not self.is_current(folder / name, digest):
                _plots.save(draw, folder / name, f'data {digest}')

    def stale(self, folder: Path) -> list[str]:
        """Names of files that are missing, of other data, or too many."""
        there = {file.name for file in folder.glob('*.svg')}
        return sorted((there - self.made.keys()) | {
            name for name, (digest, _) in self.made.items()
            if not self.is_current(folder / name, digest)})

    @staticmethod
    def is_current(file: Path, digest: str) -> bool:
        return file.is_file() and f'data {digest}<' in file.read_text(encoding='utf-8')


def plotted(plot: Plot, runs: Sequence[Run], plots: Plots) -> list[str]:
    lines: list[str] = []
    by_table = [table.rows(runs) for table in plot.tables]
    for device in dict.fromkeys(device for rows in by_table for device in rows):
        if device.startswith('CPU'):
            continue
        chosen = [
            [row for row in rows.get(device, [])
             if not plot.graphs or row.cell.graph.startswith(tuple(plot.graphs))]
            for rows in by_table]
        if all(chosen):
            lines += plots.add(
                f'{plot.name}-{slug(device)}', f'{plot.alt}, {device}',
                [[row.cell for row in rows] for rows in chosen], plot.draw,
                [row.run for rows in chosen for row in rows])
    return lines


# The pages and README ---------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Workload:
    """A row of the page: all rows of some tables whose graphs begin so."""

    name: str
    tables: Sequence[Timed]

    def compared(self, runs: Sequence[Run]) -> dict[str, list[tuple[float, Row, str]]]:
        """Ratio, row and a name of the row by device, the worst first."""
        found: dict[str, list[tuple[float, Row, str]]] = {}
        for table in self.tables:
            for device, rows in table.rows(runs).items():
                versus = table.against(rows)
                found.setdefault(device, []).extend(
                    (ratio, row, f'{row.cell.graph}, {table.width} = {row.cell.width:,}')
                    for row in rows if (ratio := versus.ratio(row.cell)) is not None)
        return {device: sorted(rows, key=lambda row: row[0]) for device, rows in found.items()}


WORKLOADS = (
    Workload('Layers on one graph', [LAYERS, PUBLISHED[2]]),
    Workload('Layers on a graph with hubs', [HUBS[0], PUBLISHED[1]]),
    Workload('Layers on batches of molecules', [PUBLISHED[0]]),
    Workload('Training on batches of molecules', MOLECULES),
    Workload('Layers on several types of nodes', [HUBS[2]]),
    Workload('Layers on sampled batches', [HUBS[1]]),
    Workload('Layers with a message of their own', [MESSAGES]),
    Workload('Models compiled on both sides', COMPILED),
    Workload('Weighted sums alone, beside cuSPARSE or MKL', [SUMS]),
    Workload('An epoch of loading and training', [EPOCH]),
)
"""The figure of the manual's first page: a row of each kind of work."""
FIGURE = (
    ('full graph,\nGCN', LAYERS, 'arxiv-like: GCN', 64),
    ('hubs,\nGAT', HUBS[0], 'GAT 8 x 8', 100_000),
    ('molecules,\nGIN', PUBLISHED[0], 'molecule GIN', 64),
    ('hetero,\nSAGE', HUBS[2], 'SAGE 64', 0),
    ('sampled batch,\nSAGE', HUBS[1], 'SAGE mean', 0),
    ('own layer,\ngated sum', MESSAGES, 'arxiv-like: gated message', 64),
)

HEAD = """# Performance

<!-- Written by `python -m benchmarks.report`: do not edit. -->

Ratio: how many times as long as this package the fastest rival takes, which is PyG, `torch.compile`
of PyG, or the library that a row names. Above 1 this package is faster. Each row is the geometric
mean over the rows of its tables on the pages below, beside the worst of these rows, where this
package gains least or loses."""

ABOUT = """Each figure of these pages comes from a run that is named below its table or plot. The
runs lie in `benchmarks/results/`, with the versions, the graphs and every contender that was
measured. Times are medians in milliseconds unless a table says otherwise; † less exact than
rounding allows, ‡ one cold run, OOM out of memory. The rows of a graph come from the newest run
that has them. Graphs whose name ends in "-like" are generated in the size of the real one:
`pyg_fast.datasets.PlantedGraph`."""

WRITTEN = '<!-- Written by `python -m benchmarks.report`: do not edit. -->'


def pages(runs: Sequence[Run], plots: Plots) -> dict[str, str]:
    """The text of each page by its file, the page of all devices first."""
    chapters: dict[str, tuple[str, list[str]]] = {}
    for system in SYSTEMS:
        body = [line for plot in system.plots for line in plotted(plot, runs, plots)]
        body += [line for table in system.tables for line in table.markdown(runs)]
        if body:
            chapters[slug(system.title)] = system.title, [system.about, '', *body]
    if body := roofline(runs, plots):
        chapters['rooflines'] = 'Rooflines', body
    exhibits = papers(runs)
    figure(runs, plots)
    first = [
        HEAD, '', *overview(runs, plots), '## All tables', '', ABOUT, '', *contents(chapters),
        '## Reruns of papers', '', 'Tables and figures of papers, run again by this package.', '',
        *contents(exhibits, 'Paper: ')]
    texts = {PAGE: first} | {
        f'{FOLDER}/{name}.md': [f'# {title}', '', WRITTEN, '', *lines]
        for name, (title, lines) in (chapters | exhibits).items()}
    return {
        file: re.sub(r'\n{3,}', '\n\n', '\n'.join(narrow(lines))).rstrip() + '\n'
        for file, lines in texts.items()}


def contents(chapters: Mapping[str, tuple[str, list[str]]], what: str = '') -> list[str]:
    """A table of contents, with titles up to a colon: links, and the manual's."""
    titles = {name: what + title.split(':')[0] for name, (title, _) in chapters.items()}
    return [
        *(f'- [{title}](performance/{name}.md)' for name, title in titles.items()), '',
        '```{toctree}', ':hidden:', '',
        *(f'{title} <performance/{name}>' for name, title in titles.items()), '```', '']


def overview(runs: Sequence[Run], plots: Plots) -> list[str]:
    """A chart and a table for each device, GPUs first."""
    found: dict[str, list[tuple[str, list[tuple[float, Row, str]]]]] = {}
    for work in WORKLOADS:
        for device, rows in work.compared(runs).items():
            found.setdefault(device, []).append((work.name, rows))
    lines: list[str] = []
    for device, works in sorted(found.items(), key=lambda item: item[0].startswith('CPU')):
        of = [row.run for _, rows in works for _, row, _ in rows]
        dates = sorted({run.date[:10] for run in of})
        table, bars = [], []
        for name, rows in works[:MOST]:
            ratios = [ratio for ratio, _, _ in rows]
            mean, (least, _, where) = _harness.geometric_mean(ratios), rows[0]
            table.append([name, f'{mean:.2f}', f'{least:.2f}', where, f'{len(rows)}'])
            bars.append([name, least, mean, ratios[-1]])
        lines += [
            f'## {device}', '',
            *plots.add(f'ratios-{slug(device)}', f'Time of the best rival over ours, {device}',
                       bars, _plots.ratios, [], 'performance/'),
            *_harness.table(['work', 'ratio', 'worst', 'worst row', 'rows'], table), '',
            f'On {device}, {dates[0]} to {dates[-1]}.' if len(dates) > 1 else
            f'On {device}, {dates[0]}.', '']
    return lines


def figure(runs: Sequence[Run], plots: Plots) -> None:
    """The figure of the manual's first page: times of PyG, compiled PyG and ours."""
    groups = []
    for label, table, graph, width in FIGURE:
        for device, rows in table.rows(runs).items():
            found = {(row.cell.graph, row.cell.width): row.cell for row in rows}
            if (graph, width) in found and not device.startswith('CPU'):
                groups.append(
                    [f'{label}\n{device.split()[1]}', found[graph, width], table.ours])
                break
    if groups:
        plots.add('workloads', '', groups, _plots.workloads, [])


def narrow(lines: Sequence[str]) -> list[str]:
    """The lines, with each table that is too wide divided: every part has the first column."""
    out: list[str] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith('| '):
            out.append(lines[at])
            at += 1
            continue
        end = at
        while end < len(lines) and lines[end].startswith('|'):
            end += 1
        out += divided([cells(line) for line in lines[at:end]])
        at = end
    return out


def divided(table: list[list[str]]) -> list[str]:
    head, rule, *rows = table
    widths = [max(column_width(row[k]) for row in (head, *rows)) for k in range(len(head))]
    parts: list[list[int]] = [[]]
    for k in range(1, len(head)):
        if parts[-1] and widths[0] + sum(widths[j] for j in (*parts[-1], k)) > WIDEST:
            parts.append([])
        parts[-1].append(k)
    out: list[str] = []
    for part in parts:
        out += ['', *('| ' + ' | '.join(row[k] for k in (0, *part)) + ' |' for row in table)]
    return out[1:]


def column_width(text: str) -> int:
    """Characters that a browser cannot break, with the room between columns."""
    return 3 + max(map(len, re.split(r'[ -]', text)), default=0)


def readme_table(runs: Sequence[Run]) -> str:
    head = ['what', 'ratio', 'graph', 'ours, ms', 'best rival, ms']
    lines, used = [], []
    for headline in (each for system in SYSTEMS for each in system.headlines):
        wanted = headline.graph, headline.width
        found = [
            (row, rows) for device, rows in headline.table.rows(runs).items() for row in rows
            if not device.startswith('CPU') and (row.cell.graph, row.cell.width) == wanted]
        if not found:
            continue
        row, others = max(found, key=lambda pair: pair[0].run.date)
        versus = headline.table.as_section(others).versus[0]
        best, ratio = versus.best(row.cell), versus.ratio(row.cell)
        theirs = '–' if best is None else (
            f'{row.cell.results[best[0]].text()} ({headline.table.name(best[0])})')
        lines.append([
            headline.what, 'rivals fail' if ratio is None else f'{ratio:.2f}',
            re.split('[,:] ', headline.graph)[0], row.cell.results[versus.ours].text(), theirs])
        used.append(row.run)
    named = [
        f'[{run.bench}](benchmarks/results/{run.name}.md), {run.device}, {run.date[:10]}'
        for run in dict.fromkeys(used)]
    return '\n'.join([*_harness.table(head, lines), '', f'Runs: {"; ".join(named)}.'])


def with_table(readme: str, table: str) -> str:
    """README with its table replaced; raises Unsupported if it has no place for it."""
    first, last = readme.find(BEGIN), readme.find(END)
    if first < 0 or last < first:
        raise Unsupported(f'{README} has no lines {BEGIN!r} and {END!r}')
    return f'{readme[:first + len(BEGIN)]}\n\n{table}\n\n{readme[last:]}'


def unsupported(readme: str) -> list[str]:
    """Figures in README's words, which name no run."""
    words = re.sub(rf'{re.escape(BEGIN)}.*?{re.escape(END)}', '', readme, flags=re.DOTALL)
    words = re.sub(r'```.*?```', '', words, flags=re.DOTALL)
    words = re.sub(r'`[^`]*`', '', words)
    return [match[0] for match in _FIGURE.finditer(words)]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="The pages of performance, their plots and README's table, from the runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing; 1 if they differ')
    parser.add_argument('--results', type=Path, metavar='DIR', default=RESULTS)
    parser.add_argument(
        '--root', type=Path, metavar='DIR', default=_harness.ROOT, help='of README and docs')
    args = parser.parse_args(argv)
    try:
        failed = write(args.results, args.root, args.check)
    except Unsupported as error:
        raise SystemExit(str(error)) from error
    if failed:
        raise SystemExit('\n'.join([*failed, 'Run `python -m benchmarks.report`.']))


def write(results: Path, root: Path, check: bool) -> list[str]:
    """Writes what the runs give; with ``check`` returns what is different from it instead."""
    runs, plots = read_runs(results), Plots()
    readme = (root / README).read_text(encoding='utf-8')
    figures = unsupported(readme)
    if figures:
        raise Unsupported(f"{README} has figures that name no run: {', '.join(figures)}")
    files = {**pages(runs, plots), README: with_table(readme, readme_table(runs))}
    old = [file for file in sorted((root / FOLDER).glob('*.md'))
           if file.relative_to(root).as_posix() not in files]
    if check:
        failed = []
        for name, text in files.items():
            file = root / name
            there = file.read_text(encoding='utf-8') if file.is_file() else ''
            failed += list(difflib.unified_diff(
                there.splitlines(), text.splitlines(), name, f'{name}, as the runs give it', '',
                '', 0, ''))
        names = [*plots.stale(root / FOLDER), *(file.name for file in old)]
        return failed + [f'{FOLDER}/{name} is not what the runs give' for name in names]
    for file in old:
        file.unlink()
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding='utf-8')
    plots.write(root / FOLDER)
    return []


if __name__ == '__main__':
    main()
