"""Trains the same network twice from the same seed, with PyG's layers and with pyg_fast's.

Ends with a table of accuracy, time and memory, and with a picture if asked to (--plot). Each side
has a process of its own. An epoch's time is that of the training step: forward, loss, backward,
optimizer. Peak memory is what the process (on a GPU: torch's allocator) takes at most on top of
the loaded data, from before pyg_fast prepares the graph until the last epoch.
"""
from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, Coauthor, Planetoid
from torch_geometric.nn import GCN, GIN, GraphSAGE
from torch_geometric.transforms import NormalizeFeatures
from tqdm import tqdm

import pyg_fast
from pyg_fast.datasets import SIZES, PlantedGraph
from pyg_fast.transforms import ToCSR

T = TypeVar('T')


class Recipe(NamedTuple):
    """What a data set is trained with unless the command line says otherwise."""

    hidden: int
    epochs: int
    weight_decay: float = 5e-4
    lr: float = 0.01
    dropout: float = 0.5
    input_dropout: float = 0.0


PLANETOID = ('Cora', 'CiteSeer', 'PubMed')
AMAZON = ('Computers', 'Photo')
RECIPES = {
    'planted': Recipe(hidden=64, epochs=30),
    **dict.fromkeys(PLANETOID, Recipe(hidden=16, epochs=200, input_dropout=0.5)),
    **dict.fromkeys((*AMAZON, 'CS'), Recipe(hidden=64, epochs=200)),
}
MODELS = {'gcn': GCN, 'sage': GraphSAGE, 'gin': GIN}
PARTS = ('train', 'val', 'test')
SIDES = ('PyG', 'pyg_fast')


class Point(NamedTuple):
    """The state of a training after an epoch; `seconds` counts training steps only."""

    seconds: float
    loss: float
    val: float
    test: float


@dataclass
class Outcome:
    """The runs of one side."""

    graph: str = ''
    prepare_seconds: float = 0.0
    peak_bytes: int | None = None
    runs: list[list[Point]] = field(default_factory=list)

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of every run, in percent, at its best validation accuracy."""
        return [100 * max(run, key=lambda point: point.val).test for run in self.runs]

    @property
    def epoch_seconds(self) -> list[float]:
        """Duration of every training step."""
        return [end - begin for run in self.runs
                for begin, end in pairwise([0.0, *(point.seconds for point in run)])]


def load(args: argparse.Namespace) -> tuple[Data, int]:
    """Returns the graph and its number of classes."""
    if args.dataset == 'planted':
        dataset = PlantedGraph(args.size, seed=args.seed)
        return dataset[0], dataset.num_classes
    family = (Planetoid if args.dataset in PLANETOID else
              Amazon if args.dataset in AMAZON else Coauthor)
    root = args.root / family.__name__
    try:
        transform = NormalizeFeatures() if family is Planetoid else None
        dataset = family(str(root), args.dataset, transform=transform)
    except OSError as error:
        sys.exit(f'error: {args.dataset} is not in {root} and cannot be downloaded: {error}')
    return dataset[0], dataset.num_classes


def split(data: Data, num_classes: int, seed: int) -> dict[str, Tensor]:
    """Returns nodes to train, validate and test on: the graph's own, or 20, 30 and the rest."""
    if 'train_mask' in data:
        return {part: data[f'{part}_mask'].nonzero().view(-1) for part in PARTS}
    shuffled = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed))
    label = data.y.cpu()[shuffled]
    classes = [shuffled[label == c].split([20, 30, int((label == c).sum()) - 50])
               for c in range(num_classes)]
    return {part: torch.cat([nodes[i] for nodes in classes]).to(data.y.device)
            for i, part in enumerate(PARTS)}


def build(args: argparse.Namespace, in_channels: int, num_classes: int) -> torch.nn.Module:
    """Returns PyG's network."""
    options = {'gcn': {'cached': args.cached}, 'sage': {}, 'gin': {'norm': 'batch_norm'}}
    return MODELS[args.model](
        in_channels, args.hidden, args.layers, num_classes, dropout=args.dropout,
        **options[args.model])


def train(
    model: torch.nn.Module, data: Data, parts: dict[str, Tensor], args: argparse.Namespace
) -> Iterator[Point]:
    """Trains a network, epoch by epoch."""
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    labels = {part: data.y[nodes] for part, nodes in parts.items()}
    seconds = 0.0
    for _ in range(args.epochs):
        model.train()
        start = now(data.x.device)
        optimizer.zero_grad()
        x = F.dropout(data.x, args.input_dropout) if args.input_dropout > 0 else data.x
        out = model(x, data.edge_index)
        loss = F.cross_entropy(out[parts['train']], labels['train'])
        loss.backward()
        optimizer.step()
        seconds += now(data.x.device) - start

        model.eval()
        with torch.no_grad():
            predicted = model(data.x, data.edge_index).argmax(dim=-1)
        val, test = ((predicted[parts[part]] == labels[part]).float().mean().item()
                     for part in ('val', 'test'))
        yield Point(seconds, loss.item(), val, test)


def now(device: torch.device) -> float:
    """Returns the time at which everything launched so far is done."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PeakMemory:
    """Measures how far memory grows from now on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == 'cuda':
            torch.cuda.reset_peak_memory_stats(device)
            self.start: int | None = torch.cuda.memory_allocated(device)
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # freed memory that glibc keeps would hide growth
            Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
            self.start = self._status('VmRSS')
        except (AttributeError, OSError, TypeError):  # not Linux with glibc
            self.start = None

    def growth(self) -> int | None:
        """Returns the peak in bytes, or None where the system does not tell."""
        if self.start is None:
            return None
        if self.device.type == 'cuda':
            return torch.cuda.max_memory_allocated(self.device) - self.start
        return self._status('VmHWM') - self.start

    @staticmethod
    def _status(key: str) -> int:
        lines = Path('/proc/self/status').read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def train_side(side: str, args: argparse.Namespace) -> Outcome:
    """Trains all runs of one side."""
    device = torch.device(args.device)
    data, num_classes = load(args)
    data = data.to(device)
    outcome = Outcome(f'{data.num_nodes:,} nodes, {data.num_edges:,} edges, '
                      f'{data.num_features} features, {num_classes} classes')
    fast = side == 'pyg_fast'

    def new_model() -> torch.nn.Module:
        model = build(args, data.num_features, num_classes).to(device)
        return pyg_fast.accelerate(model) if fast else model

    rehearse(new_model(), data, fast, args)
    memory = PeakMemory(device)
    if fast:
        start = now(device)
        data = ToCSR()(data)
        outcome.prepare_seconds = now(device) - start
    for run in range(args.runs):
        seed = args.seed + run
        parts = split(data, num_classes, seed)
        torch.manual_seed(seed)
        model = new_model()
        torch.manual_seed(seed)  # both sides drop the same entries
        epochs = tqdm(train(model, data, parts, args), f'{side:8} run {run + 1}/{args.runs}',
                      args.epochs, unit='epoch')
        points = []
        for point in epochs:
            points.append(point)
            epochs.set_postfix_str(f'loss {point.loss:.3f}, validation {100 * point.val:.1f} %',
                                   refresh=False)
        outcome.runs.append(points)
    outcome.peak_bytes = memory.growth()
    return outcome


def rehearse(
    model: torch.nn.Module, data: Data, fast: bool, args: argparse.Namespace
) -> None:
    """Trains on a small ring, so that libraries load before either side is measured."""
    nodes = torch.arange(64, device=data.x.device)
    ring = Data(x=data.x[:1].repeat(64, 1), y=torch.zeros_like(nodes),
                edge_index=torch.stack([nodes, nodes.roll(1)]))
    if fast:
        ring = ToCSR()(ring)
    parts = dict.fromkeys(PARTS, nodes)
    for _ in train(model, ring, parts, argparse.Namespace(**{**vars(args), 'epochs': 2})):
        pass


def in_own_process(side: str, args: argparse.Namespace) -> Outcome:
    """Runs :meth:`train_side` where the other side has left no memory behind."""
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(train_side, side, args).result()
        except torch.OutOfMemoryError:
            sys.exit(f'error: {side} ran out of memory on {args.device}')
        except BrokenProcessPool:
            sys.exit(f'error: the process of {side} died, most likely out of memory')


def table(outcomes: dict[str, Outcome]) -> str:
    """Returns the comparison, one line per measure."""
    def spread(values: list[float]) -> str:
        mean = f'{statistics.fmean(values):.1f}'
        return f'{mean} +- {statistics.stdev(values):.1f}' if len(values) > 1 else mean

    def ratio(pyg: float, ours: float) -> str:
        return f'{pyg / ours:.2f} x' if ours > 0 else ''

    pyg, ours = (outcomes[side] for side in SIDES)
    times = [statistics.median(outcome.epoch_seconds) for outcome in (pyg, ours)]
    rows = [
        ('', *SIDES, 'ratio'),
        ('test accuracy [%]', spread(pyg.accuracies), spread(ours.accuracies), ''),
        ('time per epoch [ms]', *(f'{1e3 * seconds:.2f}' for seconds in times), ratio(*times)),
    ]
    if pyg.peak_bytes is None or ours.peak_bytes is None:
        rows.append(('peak memory [MB]', 'unknown', 'unknown', ''))
    else:
        peaks = (pyg.peak_bytes, ours.peak_bytes)
        rows.append(('peak memory [MB]', *(f'{peak / 1e6:.1f}' for peak in peaks), ratio(*peaks)))
    rows.append(('preparation, once [ms]', '-', f'{1e3 * ours.prepare_seconds:.2f}', ''))
    return '\n'.join(f'{name:24}{left:>14}{right:>14}{last:>10}'.rstrip()
                     for name, left, right, last in rows)


def plot(outcomes: dict[str, Outcome], title: str, file: Path) -> None:
    """Draws the first run of both sides over time, and their times per epoch."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot

    colors = {'PyG': '#9aa0a6', 'pyg_fast': '#d9480f'}
    style = {'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True,
             'grid.color': '#e8e8e8', 'axes.axisbelow': True, 'axes.titlelocation': 'left',
             'axes.titlesize': 11, 'font.size': 10}
    with pyplot.rc_context(style):
        figure, (losses, scores, bars) = pyplot.subplots(
            1, 3, figsize=(12, 3.8), width_ratios=(2, 2, 1.1), layout='constrained')
        for side, outcome in outcomes.items():
            run = outcome.runs[0]
            seconds = [point.seconds for point in run]
            line = {'color': colors[side], 'label': side, 'linewidth': 1.8}
            losses.plot(seconds, [point.loss for point in run], **line)
            scores.plot(seconds, [100 * point.test for point in run], **line)
            for axes, value in ((losses, run[-1].loss), (scores, 100 * run[-1].test)):
                axes.plot(seconds[-1], value, 'o', color=colors[side])
        medians = [1e3 * statistics.median(outcomes[side].epoch_seconds) for side in SIDES]
        drawn = bars.bar(SIDES, medians, color=[colors[side] for side in SIDES], width=0.6)
        bars.bar_label(drawn, [f'{value:.3g} ms' for value in medians], padding=3)
        bars.margins(y=0.15)
        bars.grid(axis='x', visible=False)
        losses.set_title('Training loss')
        scores.set_title('Test accuracy [%]')
        bars.set_title(f'Time per epoch: ratio {medians[0] / medians[1]:.2f}')
        for axes in (losses, scores):
            axes.set_xlabel('training time [s]')
            axes.set_xlim(left=0)
            axes.legend(frameon=False)
        figure.suptitle(title, x=0.01, ha='left', weight='bold')
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


def at_least(least: float, kind: type, below: float = float('inf')) -> Callable[[str], float]:
    """Returns what reads a number from `least` on, less than `below`."""
    def convert(text: str) -> float:
        value = kind(text)
        if not least <= value < below:
            raise argparse.ArgumentTypeError(
                f'got {text}, expected at least {least}'
                + (f' and less than {below}' if below != float('inf') else ''))
        return value
    convert.__name__ = kind.__name__
    return convert


def in_turns(
    sides: Iterable[str], runs: int, train: Callable[[str, int], T]
) -> dict[str, list[T]]:
    """Trains all runs of all sides, which take turns; returns the outcomes by side."""
    outcomes: dict[str, list[T]] = {side: [] for side in sides}
    for run in range(runs):
        for side, found in outcomes.items():
            found.append(train(side, run))
    return outcomes


def columns(rows: list[list[str]]) -> str:
    """A table: the first column has the names of rows, each other one belongs to a side."""
    width = max(len(row[0]) for row in rows) + 1
    lines = [f'{name:{width}}' + ''.join(f'{value:>12}' for value in row) for name, *row in rows]
    return '\n'.join(line.rstrip() for line in lines)


def choose_device(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Settles on which device to run, or says why not on a GPU."""
    has_cuda = torch.cuda.is_available()
    if args.device == 'auto':
        args.device = 'cuda' if has_cuda and pyg_fast.with_cuda() else 'cpu'
    if args.device == 'cuda' and not has_cuda:
        parser.error('--device cuda: no GPU that torch can use')
    if args.device == 'cuda' and not pyg_fast.with_cuda():
        parser.error('--device cuda: pyg_fast was built without CUDA')


def add_dataset(
    parser: argparse.ArgumentParser, choices: Iterable[str], size: str = 'medium'
) -> None:
    """Adds the options that choose the data."""
    add = parser.add_argument
    add('--dataset', choices=choices, default='planted', help='(default: planted)')
    add('--size', choices=SIZES, default=size, help=f'of planted (default: {size})')
    add('--root', type=Path, help='folder of the other data sets, downloaded if not there')


def check_root(
    parser: argparse.ArgumentParser, args: argparse.Namespace,
    planted: Iterable[str] = ('planted',),
) -> None:
    """Ends the program if a data set has no folder to be kept in."""
    if args.dataset not in planted and args.root is None:
        parser.error(f'--dataset {args.dataset} needs --root, the folder to keep it in')


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_dataset(parser, RECIPES)
    add('--model', choices=MODELS, default='gcn', help='(default: gcn)')
    add('--layers', type=at_least(1, int), default=2, help='(default: 2)')
    for name, convert in {'hidden': at_least(1, int), 'epochs': at_least(1, int),
                          'lr': at_least(0, float), 'weight-decay': at_least(0, float),
                          'dropout': at_least(0, float, below=1),
                          'input-dropout': at_least(0, float, below=1)}.items():
        add(f'--{name}', type=convert, help='(default: usual for the data set)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--runs', type=at_least(1, int), default=1, help='(default: 1)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--cached', action='store_true', help="gcn with PyG's option cached=True, on both sides")
    add('--plot', type=Path, metavar='FILE', help='picture to write (.png, .pdf, .svg)')
    args = parser.parse_args(argv)

    for name, value in RECIPES[args.dataset]._asdict().items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    choose_device(parser, args)
    check_root(parser, args)
    if args.cached and args.model != 'gcn':
        parser.error(f'--cached is for gcn, not for {args.model}')
    if args.plot is not None:
        if args.plot.suffix not in ('.png', '.pdf', '.svg'):
            parser.error(f'--plot {args.plot}: expected a name ending in .png, .pdf or .svg')
        if not args.plot.parent.is_dir():
            parser.error(f'--plot {args.plot}: no such folder')
        if importlib.util.find_spec('matplotlib') is None:
            parser.error('--plot needs matplotlib')
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the demo."""
    args = parse(argv)
    graph = f'planted, {args.size}' if args.dataset == 'planted' else args.dataset
    title = f'{MODELS[args.model].__name__} on {graph} ({args.device})'
    print(f'{title}: {args.layers} layers, hidden {args.hidden}, {args.epochs} epochs, '
          f'seed {args.seed}', flush=True)
    outcomes = {side: in_own_process(side, args) for side in SIDES}
    print(f'\n{outcomes[SIDES[0]].graph}\n\n{table(outcomes)}')
    if args.plot is not None:
        plot(outcomes, title, args.plot)
        print(f'\nwrote {args.plot}')


if __name__ == '__main__':
    main()
