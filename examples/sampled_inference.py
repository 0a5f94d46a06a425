"""Trains a network on all edges, and lets it read a sample of them at inference.

Each node's aggregation reads at most S of its edges, picked inside the kernel as in the "ES-SpMM"
paper; nothing is trained anew. Ends with a table over S for each strategy: the share of the edges
that is read, the score of the test nodes and what it lost, the time of a whole inference and its
speed-up; with the least S that loses no more than --max-drop points of the mean test score, and
what choose_num_samples takes for that by the validation nodes alone; and with a picture if asked to
(--plot). Every run trains from its own seed, to the epoch of the best validation score. Losses are
means over the runs; times are medians, of the first run's network.
"""
from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import maxk_training
import torch
import torch.nn.functional as F
import torch_geometric
from maxk_training import MULTI_LABEL, Task, Trainer, accuracy, auc
from node_classification import at_least, check_root, choose_device, now, split
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.datasets import HeterophilousGraphDataset
from tqdm import tqdm

import pyg_fast
from pyg_fast.datasets import SIZES
from pyg_fast.nn import SampledGCNConv, SampledSAGEConv
from pyg_fast.transforms import ToCSR


class Recipe(NamedTuple):
    """What a data set is trained with unless the command line says otherwise."""

    epochs: int
    layers: int = 2
    hidden: int = 64
    lr: float = 0.01
    weight_decay: float = 5e-4
    dropout: float = 0.5


TOLOKERS = 'tolokers'
PLANTED = {'planted': 'dense-small', MULTI_LABEL: 'dense-hubs'}  # and the usual sizes
RECIPES = {
    'planted': Recipe(epochs=30),
    MULTI_LABEL: Recipe(epochs=100, lr=0.05, weight_decay=0, dropout=0.2),
    **dict.fromkeys(('Cora', 'CiteSeer', 'PubMed'), Recipe(epochs=200)),
    **dict.fromkeys(('Computers', 'Photo'), Recipe(epochs=100)),
    'CS': Recipe(epochs=30),
    TOLOKERS: Recipe(epochs=400, weight_decay=0, dropout=0.2),
}
NUM_LABELS = 112  # the number of labels of ogbn-proteins
CONVS = {'gcn': SampledGCNConv, 'sage': SampledSAGEConv}
STRATEGIES = ('fastrand', 'adaptive', 'bucket', 'unbiased', 'paper')
POINT = 100  # of a score from 0 to 1


class Net(nn.Module):
    """Convolutions with ReLU and dropout between them.

    Args:
        conv: Class of the layers.
        in_channels: Size of each input sample.
        hidden: Size of each hidden sample.
        out_channels: Size of each output sample.
        num_layers: Number of layers. (default: ``2``)
        dropout: Of hidden samples. (default: ``0.5``)
        quantize: Whether features have eight bits while it samples. (default: ``False``)
    """

    def __init__(
        self, conv: type[nn.Module], in_channels: int, hidden: int, out_channels: int,
        num_layers: int = 2, dropout: float = 0.5, quantize: bool = False,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        sizes = [in_channels, *[hidden] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(
            conv(*pair, num_samples=1, quantize=quantize)
            for pair in zip(sizes[:-1], sizes[1:], strict=True))
        self.sample('never')

    def sample(self, when: str, num_samples: int = 1, strategy: str = 'fastrand') -> None:
        """Says when to sample, and how."""
        for conv in self.convs:
            conv.sample, conv.num_samples, conv.strategy = when, num_samples, strategy

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = conv(x, edge_index).relu()
            x = F.dropout(x, self.dropout, self.training)
        return self.convs[-1](x, edge_index)


@dataclass
class Cell:
    """The measurements of one strategy with one number of samples."""

    strategy: str
    num_samples: int
    sampling_rate: float
    scores: list[float] = field(default_factory=list)  # of the test nodes, one for each run
    seconds: list[float] = field(default_factory=list)  # of inferences


@dataclass
class Sweep:
    """The measurements on one graph."""

    graph: dict[str, int]
    metric: str
    full_scores: list[float] = field(default_factory=list)
    full_seconds: list[float] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    chosen: dict[str, list[int | None]] = field(default_factory=dict)  # for each run

    def of(self, strategy: str) -> list[Cell]:
        """The cells of a strategy, ascending."""
        return [cell for cell in self.cells if cell.strategy == strategy]

    def loss(self, cell: Cell) -> float:
        """The loss of the mean score, in points."""
        return POINT * (statistics.fmean(self.full_scores) - statistics.fmean(cell.scores))

    def speedup(self, cell: Cell) -> float:
        """Of an inference, over that on all edges."""
        return statistics.median(self.full_seconds) / statistics.median(cell.seconds)

    def least(self, strategy: str, max_drop: float) -> int | None:
        """The least number of samples from which on no more points are lost than that."""
        found = None
        for cell in reversed(self.of(strategy)):
            if not self.loss(cell) <= max_drop:
                break
            found = cell.num_samples
        return found


# Data -------------------------------------------------------------------------------------------

def margin_auc(out: Tensor, y: Tensor) -> float:
    """Area under the ROC curve of two classes, by the difference of their outputs."""
    return auc(out[:, 1:] - out[:, :1], y.view(-1, 1).float())


def load_data(args: argparse.Namespace) -> tuple[Data, int, Task]:
    """Returns the graph, its number of classes or labels, and what is to be learned."""
    if args.dataset == MULTI_LABEL:
        dataset = pyg_fast.datasets.MultiLabelPlantedGraph(
            args.size, seed=args.seed, num_labels=NUM_LABELS)
        return dataset[0], NUM_LABELS, maxk_training.MANY_LABELS
    if args.dataset != TOLOKERS:
        return maxk_training.load_data(args)
    root = args.root / HeterophilousGraphDataset.__name__
    try:
        data = HeterophilousGraphDataset(str(root), TOLOKERS)[0]
    except OSError as error:
        sys.exit(f'error: {TOLOKERS} is not in {root} and cannot be downloaded: {error}')
    return data, 2, Task(F.cross_entropy, {'AUC': margin_auc, 'accuracy': accuracy})


def parts_of(data: Data, num_classes: int, seed: int) -> dict[str, Tensor]:
    """Returns the nodes to train, validate and test on; where a graph has several splits, one."""
    if 'train_mask' in data and data.train_mask.dim() == 2:
        data = copy.copy(data)
        for part in ('train', 'val', 'test'):
            masks = data[f'{part}_mask']
            data[f'{part}_mask'] = masks[:, seed % masks.size(1)]
    return split(data, num_classes, seed)


# Training and inference -------------------------------------------------------------------------

def train(trainer: Trainer, epochs: int, name: str) -> None:
    """Trains to the last epoch, and goes back to the weights of the best validation score."""
    best, state = float('-inf'), {}
    bar = tqdm(trainer.epochs(epochs), name, epochs, unit='epoch')
    for point in bar:
        bar.set_postfix_str(
            f'loss {point.loss:.3f}, validation {POINT * point.val[0]:.1f} %', refresh=False)
        if point.val[0] > best:
            best, state = point.val[0], copy.deepcopy(trainer.model.state_dict())
    trainer.model.load_state_dict(state)
    trainer.model.eval()


@torch.no_grad()
def inference_seconds(model: nn.Module, data: Data, repeats: int) -> Iterator[float]:
    """Yields the time of each inference, after one more."""
    for repeat in range(1 + repeats if repeats else 0):
        start = now(data.x.device)
        model(data.x, data.edge_index)
        if repeat > 0:
            yield now(data.x.device) - start


def sweep(args: argparse.Namespace) -> Sweep:
    """Trains all runs, and measures every strategy with every number of samples."""
    device = torch.device(args.device)
    data, num_classes, task = load_data(args)
    data = ToCSR()(data.to(device))
    name, metric = next(iter(task.metrics.items()))
    result = Sweep({'nodes': data.num_nodes, 'edges': data.num_edges,
                    'largest_degree': int(data.edge_index[1].bincount().max()),
                    'features': data.num_features, 'classes': num_classes}, name)
    samples = args.samples and within(args.samples, result.graph['largest_degree'])
    for run in range(args.runs):
        seed = args.seed + run
        parts = parts_of(data, num_classes, seed)
        torch.manual_seed(seed)
        model = Net(CONVS[args.model], data.num_features, args.hidden, num_classes, args.layers,
                    args.dropout, args.quantize).to(device)
        train(Trainer(model, data, parts, task, args), args.epochs,
              f'{args.model:4} run {run + 1}/{args.runs}')
        measure(result, model, data, parts, metric, samples, args)
    return result


def within(samples: Sequence[int], largest_degree: int) -> list[int]:
    """Returns the numbers of samples, ascending, up to the first that reads all edges."""
    ascending = sorted(samples)
    fewer = [s for s in ascending if s < largest_degree]
    return ascending[:len(fewer) + 1]


def measure(
    result: Sweep, model: Net, data: Data, parts: dict[str, Tensor],
    metric: Callable[[Tensor, Tensor], float], samples: Sequence[int] | None,
    args: argparse.Namespace,
) -> None:
    """Adds what a trained network does with every strategy and number of samples."""
    test_scores: list[float] = []

    def score(out: Tensor, data: Data) -> float:
        val, test = (metric(out[parts[part]], data.y[parts[part]]) for part in ('val', 'test'))
        test_scores.append(test)
        return val

    is_first = not result.full_scores
    repeats = args.repeats if is_first else 0
    for strategy in args.strategies:
        model.sample('eval', strategy=strategy)
        test_scores.clear()
        choice = pyg_fast.choose_num_samples(
            model, data, args.max_drop / POINT, candidates=samples, metric=score, apply=False)
        full, *scores = test_scores  # which is the order of its evaluations
        result.chosen.setdefault(strategy, []).append(choice.num_samples)
        if is_first:
            result.cells += [
                Cell(strategy, row.num_samples, row.sampling_rate) for row in choice.table]
        for cell, reached in zip(result.of(strategy), scores, strict=True):
            cell.scores.append(reached)
            model.sample('eval', cell.num_samples, strategy)
            cell.seconds += inference_seconds(model, data, repeats)
    model.sample('never')
    result.full_scores.append(full)
    result.full_seconds += inference_seconds(model, data, repeats)


# Reports ----------------------------------------------------------------------------------------

def spread(values: Sequence[float]) -> str:
    """Returns mean and standard deviation."""
    mean = f'{statistics.fmean(values):.2f}'
    return f'{mean} ± {statistics.stdev(values):.2f}' if len(values) > 1 else mean


def percent(scores: Sequence[float]) -> str:
    """Returns mean and standard deviation, in percent."""
    return spread([POINT * score for score in scores])


def table(result: Sweep) -> str:
    """Returns a line per strategy and number of samples, in Markdown."""
    timed = bool(result.full_seconds)
    rows = [['strategy', 'S', 'edges read, %', f'test {result.metric}, %', 'lost, points',
             *['inference, ms', 'speed-up'] * timed]]
    rows.append(['---', *['--:'] * (len(rows[0]) - 1)])
    rows.append(['all edges', '–', '100.00', percent(result.full_scores), '–'])
    if timed:
        rows[-1] += [f'{1e3 * statistics.median(result.full_seconds):.2f}', '–']
    for cell in result.cells:
        rows.append([cell.strategy, str(cell.num_samples), f'{100 * cell.sampling_rate:.2f}',
                     percent(cell.scores), f'{result.loss(cell):.2f}'])
        if timed:
            rows[-1] += [f'{1e3 * statistics.median(cell.seconds):.2f}',
                         f'{result.speedup(cell):.2f} x']
    return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def verdict(result: Sweep, max_drop: float) -> str:
    """Returns the least number of samples of each strategy, by the test and validation nodes."""
    lines = []
    for strategy, chosen in result.chosen.items():
        least = result.least(strategy, max_drop)
        found = 'no S loses so little' if least is None else f'S = {least} and more'
        lines.append(
            f'- {strategy}: within {max_drop:g} points by the test nodes: {found}; chosen by the '
            f'validation nodes: {", ".join("none" if s is None else str(s) for s in chosen)}')
    return '\n'.join(lines)


def plot(result: Sweep, title: str, file: Path) -> None:
    """Draws score, sampling rate and time over the number of samples."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot

    gray, colors = '#9aa0a6', dict(
        zip(STRATEGIES, ('#d9480f', '#0c8599', '#1971c2', '#2f9e44', '#9c36b5'), strict=True))
    style = {'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True,
             'grid.color': '#e8e8e8', 'axes.axisbelow': True, 'axes.titlelocation': 'left',
             'axes.titlesize': 11, 'font.size': 10}

    def mean_and_error(scores: Sequence[float]) -> tuple[float, float]:
        error = statistics.stdev(scores) if len(scores) > 1 else 0.0
        return POINT * statistics.fmean(scores), POINT * error

    timed = bool(result.full_seconds)
    with pyplot.rc_context(style):
        figure, (scores, rates, *times) = pyplot.subplots(
            1, 2 + timed, figsize=(9 + 4 * timed, 3.8), layout='constrained')
        scores.axhline(mean_and_error(result.full_scores)[0], color=gray, label='all edges')
        rates.axhline(100, color=gray)
        for axes in times:
            axes.axhline(1e3 * statistics.median(result.full_seconds), color=gray)
            axes.set_title('Time per inference [ms]')
        for strategy in result.chosen:
            cells = result.of(strategy)
            line = {'color': colors[strategy], 'marker': 'o', 'linewidth': 1.8, 'label': strategy}
            samples = [cell.num_samples for cell in cells]
            means, errors = zip(*(mean_and_error(cell.scores) for cell in cells), strict=True)
            scores.errorbar(samples, means, errors, capsize=3, **line)
            rates.plot(samples, [100 * cell.sampling_rate for cell in cells], **line)
            for axes in times:
                axes.plot(
                    samples, [1e3 * statistics.median(cell.seconds) for cell in cells], **line)
        scores.set_title(f'Test {result.metric} [%]')
        rates.set_title('Edges read [%]')
        for axes in (rates, *times):
            axes.set_ylim(bottom=0)
        ticks = sorted({cell.num_samples for cell in result.cells})
        for axes in (scores, rates, *times):
            axes.set_xlabel('S')
            axes.set_xscale('log', base=2)
            axes.set_xticks(ticks, [str(s) for s in ticks], fontsize=8)
            axes.minorticks_off()
        scores.legend(frameon=False)
        figure.suptitle(title, x=0.01, ha='left', weight='bold')
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


def record(args: argparse.Namespace, result: Sweep) -> dict[str, Any]:
    """Returns the options, the versions and the scores."""
    timed = bool(result.full_seconds)
    return {
        'arguments': {key: str(value) if isinstance(value, Path) else value
                      for key, value in vars(args).items()},
        'device': torch.cuda.get_device_name() if args.device == 'cuda' else platform.processor()
        or platform.machine(),
        'threads': torch.get_num_threads(),
        'versions': {
            'python': platform.python_version(),
            'torch': torch.__version__,
            'torch_geometric': torch_geometric.__version__,
            'pyg_fast': pyg_fast.__version__,
        },
        'graph': result.graph,
        'metric': result.metric,
        'full': {'scores': result.full_scores,
                 'ms': 1e3 * statistics.median(result.full_seconds) if timed else None},
        'cells': [{
            'strategy': cell.strategy,
            'num_samples': cell.num_samples,
            'sampling_rate': cell.sampling_rate,
            'scores': cell.scores,
            'lost_points': result.loss(cell),
            'ms': 1e3 * statistics.median(cell.seconds) if timed else None,
        } for cell in result.cells],
        'least': {strategy: result.least(strategy, args.max_drop) for strategy in result.chosen},
        'chosen': result.chosen,
    }


# Options ----------------------------------------------------------------------------------------

def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    def several(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str):
        def convert(text: str) -> list[Any]:
            try:
                values = [kind(word) for word in text.split(',')]
            except ValueError:
                values = []
            if not values or not all(map(fits, values)):
                raise argparse.ArgumentTypeError(f"got '{text}', expected {expected}")
            return list(dict.fromkeys(values))
        return convert

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--dataset', choices=RECIPES, default='planted', help='(default: planted)')
    add('--size', choices=SIZES, help='of planted (default: dense-small) and of planted-labels '
        '(default: dense-hubs)')
    add('--root', type=Path, help='folder of the other data sets, downloaded if not there')
    add('--model', choices=CONVS, default='gcn', help='(default: gcn)')
    add('--samples', type=several(int, lambda s: 1 <= s <= 4096, 'numbers from 1 to 4096'),
        metavar='S,...', help='edges to read of each node at most, up to the first that reads '
        'all (default: powers of two, to 4096)')
    add('--strategies', metavar='NAME,...', default='fastrand,bucket',
        type=several(str, STRATEGIES.__contains__, f'some of {", ".join(STRATEGIES)}'),
        help=f'of {", ".join(STRATEGIES)} (default: fastrand,bucket)')
    add('--max-drop', type=at_least(0, float), default=1.0,
        help='points of the score that may be lost (default: 1)')
    for name, convert in {'layers': at_least(1, int), 'hidden': at_least(1, int),
                          'epochs': at_least(1, int), 'lr': at_least(0, float),
                          'weight-decay': at_least(0, float),
                          'dropout': at_least(0, float, below=1)}.items():
        add(f'--{name}', type=convert, help='(default: usual for the data set)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--runs', type=at_least(1, int), default=1, help='(default: 1)')
    add('--repeats', type=at_least(0, int), default=10,
        help='inferences to time, after one more; 0: none (default: 10)')
    add('--quantize', action='store_true', help='features of eight bits wherever it samples')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--plot', type=Path, metavar='FILE', help='picture to write (.png, .pdf, .svg)')
    add('--markdown', type=Path, metavar='FILE', help='table to write')
    add('--json', type=Path, metavar='FILE', help='record to write')
    args = parser.parse_args(argv)

    for name, value in {**RECIPES[args.dataset]._asdict(),
                        'size': PLANTED.get(args.dataset)}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    choose_device(parser, args)
    check_root(parser, args, PLANTED)
    if args.plot is not None:
        if args.plot.suffix not in ('.png', '.pdf', '.svg'):
            parser.error(f'--plot {args.plot}: expected a name ending in .png, .pdf or .svg')
        if importlib.util.find_spec('matplotlib') is None:
            parser.error('--plot needs matplotlib')
    for option in ('plot', 'markdown', 'json'):
        file = getattr(args, option)
        if file is not None and not file.parent.is_dir():
            parser.error(f'--{option} {file}: no such folder')
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    graph = f'{args.dataset}, {args.size}' if args.dataset in PLANTED else args.dataset
    title = f'{args.model.upper()} on {graph}, sampled at inference ({args.device})'
    print(f'{title}: {args.layers} layers, hidden {args.hidden}, {args.epochs} epochs, '
          f'seed {args.seed}', flush=True)
    result = sweep(args)
    size = ', '.join(f'{count:,} {what.replace("_", " ")}' for what, count in result.graph.items())
    report = f'{size}\n\n{table(result)}\n\n{verdict(result, args.max_drop)}'
    print(f'\n{report}')
    if args.markdown is not None:
        args.markdown.write_text(f'# {title}\n\n{report}\n', encoding='utf-8')
        print(f'\nwrote {args.markdown}')
    if args.plot is not None:
        plot(result, title, args.plot)
        print(f'\nwrote {args.plot}')
    if args.json is not None:
        args.json.write_text(json.dumps(record(args, result), indent=1) + '\n', encoding='utf-8')
        print(f'\nwrote {args.json}')


if __name__ == '__main__':
    main()
