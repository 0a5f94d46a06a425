"""Trains MaxK-GNNs over a sweep of k, beside the same network with ReLU.

The network is that of the "MaxK-GNN" paper: in every layer a linear map, the nonlinearity, then the
aggregation, which has k instead of all hidden channels to read. ReLU's runs are on pyg_fast's dense
kernels. Ends with a table over k: the test score at the epoch of the best validation score, the
time per epoch, and the speed-up over ReLU beside its limit by Amdahl's law, 1 / (1 - p) for the
measured share p of the aggregation in ReLU's epoch; and with a picture if asked to (--plot). An
epoch's time is that of the training step: forward, loss, backward, optimizer.
"""
from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from node_classification import at_least, check_root, choose_device, load, now, split
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch_geometric.data import Data
from tqdm import tqdm

from pyg_fast.datasets import SIZES, MultiLabelPlantedGraph
from pyg_fast.nn import MaxKGNN
from pyg_fast.transforms import ToCSR


class Recipe(NamedTuple):
    """What a data set is trained with unless the command line says otherwise.

    The same for ReLU and every k: learning rates and dropouts are the best of a small grid by
    ReLU's validation scores (`python -m benchmarks.accuracy --choose`).
    """

    epochs: int
    model: str = 'gcn'
    layers: int = 2
    hidden: int = 256
    lr: float = 0.01
    weight_decay: float = 5e-4
    dropout: float = 0.5
    norm: str = 'none'


MULTI_LABEL = 'planted-labels'
PLANTED = {'planted': 'medium', MULTI_LABEL: 'dense-medium'}  # and the usual sizes
RECIPES = {
    'planted': Recipe(epochs=30, model='sage', norm='batch_norm'),
    MULTI_LABEL: Recipe(
        epochs=200, model='sage', layers=4, hidden=384, weight_decay=0, norm='batch_norm'),
    **dict.fromkeys(('Cora', 'CiteSeer', 'CS'), Recipe(epochs=400, dropout=0.7)),
    'PubMed': Recipe(epochs=400, lr=0.003),
    **dict.fromkeys(('Computers', 'Photo'), Recipe(epochs=400, lr=0.003, dropout=0.7)),
}
MODELS = ('gcn', 'sage', 'gin')
NORMS = ('none', 'batch_norm', 'layer_norm')
# What the dense layers run, forward and backward.
AGGREGATION = ('pyg_fast::spmm', 'pyg_fast::spmm_groups')


class Variant(NamedTuple):
    """A nonlinearity: ReLU, MaxK, or MaxK of residue-balanced columns."""

    k: int | None = None
    balanced: bool = False

    def __str__(self) -> str:
        if self.k is None:
            return 'ReLU'
        return f"{'balanced ' if self.balanced else ''}MaxK, k = {self.k}"


class Point(NamedTuple):
    """The state of a training after an epoch; `seconds` are those of the training step."""

    seconds: float
    loss: float
    val: tuple[float, ...]
    test: tuple[float, ...]


@dataclass
class Outcome:
    """The runs of one variant."""

    variant: Variant
    runs: list[list[Point]] = field(default_factory=list)

    @property
    def scores(self) -> list[tuple[float, ...]]:
        """Test scores of every run, in percent, at the best validation score."""
        return [tuple(100 * score for score in point.test) for point in self._best]

    @property
    def validation_scores(self) -> list[tuple[float, ...]]:
        """The best validation score of every run, in percent."""
        return [tuple(100 * score for score in point.val) for point in self._best]

    @property
    def _best(self) -> list[Point]:
        return [max(run, key=lambda point: point.val[0]) for run in self.runs]

    @property
    def epoch_seconds(self) -> float:
        """Median duration of a training step."""
        return statistics.median(point.seconds for run in self.runs for point in run)


@dataclass
class Sweep:
    """The outcomes of all variants; the first one is ReLU."""

    graph: dict[str, int]
    metrics: tuple[str, ...]
    outcomes: list[Outcome]
    aggregation_seconds: float = 0.0

    @property
    def aggregation_share(self) -> float:
        """Share of the aggregation in an epoch of ReLU."""
        return self.aggregation_seconds / self.outcomes[0].epoch_seconds

    @property
    def limit(self) -> float:
        """The speed-up over ReLU of an aggregation that takes no time: Amdahl's law."""
        return 1 / (1 - self.aggregation_share)

    def speedup(self, outcome: Outcome) -> float:
        """Speed-up over ReLU."""
        return self.outcomes[0].epoch_seconds / outcome.epoch_seconds


# Scores -----------------------------------------------------------------------------------------

def accuracy(out: Tensor, y: Tensor) -> float:
    """Share of the nodes whose highest output is at their class."""
    return (out.argmax(dim=-1) == y).float().mean().item()


def auc(out: Tensor, y: Tensor) -> float:
    r"""Area under the ROC curve, the mean over the labels that some nodes have and others lack.

    For each label the share of pairs of a node with it and a node without it that `out` orders
    rightly, ties counting half, by ranks: :math:`(R - P (P + 1) / 2) / (P Q)` for the sum
    :math:`R` of the ranks of the :math:`P` nodes with the label and :math:`Q` without.
    """
    out, y = out.t().contiguous(), y.t()
    ordered = out.sort(dim=1)[0]
    below, up_to = (torch.searchsorted(ordered, out, right=right) for right in (False, True))
    rank = (below + up_to + 1).double() / 2  # equal outputs share the mean of their ranks
    having = y.sum(dim=1).double()
    lacking = y.size(1) - having
    area = ((rank * y).sum(dim=1) - having * (having + 1) / 2) / (having * lacking)
    return area[(having > 0) & (lacking > 0)].mean().item()


def micro_f1(out: Tensor, y: Tensor) -> float:
    """F1 score of all labels together, where positive outputs are predictions."""
    predicted = out > 0
    hits = (predicted & (y > 0)).sum()
    return (2 * hits / (predicted.sum() + y.sum()).clamp(min=1)).item()


class Task(NamedTuple):
    """A loss, and scores of which the first one chooses the epoch."""

    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: dict[str, Callable[[Tensor, Tensor], float]]

    def scores(self, out: Tensor, y: Tensor) -> tuple[float, ...]:
        return tuple(metric(out, y) for metric in self.metrics.values())


ONE_CLASS = Task(F.cross_entropy, {'accuracy': accuracy})
MANY_LABELS = Task(F.binary_cross_entropy_with_logits, {'AUC': auc, 'micro-F1': micro_f1})


# Training ---------------------------------------------------------------------------------------

def load_data(args: argparse.Namespace) -> tuple[Data, int, Task]:
    """Returns the graph, its number of classes or labels, and what is to be learned."""
    if args.dataset == MULTI_LABEL:
        dataset = MultiLabelPlantedGraph(args.size, seed=args.seed)
        return dataset[0], dataset.num_classes, MANY_LABELS
    data, num_classes = load(args)
    if args.dataset not in PLANTED:  # word counts, whose mean would choose MaxK's k
        data.x = data.x / data.x.amax(dim=1, keepdim=True).clamp(min=1e-12)
        data.x = data.x - data.x.mean(dim=0)
    return data, num_classes, ONE_CLASS


class Trainer:
    """Trains a network on one split of the nodes."""

    def __init__(
        self, model: torch.nn.Module, data: Data, parts: dict[str, Tensor], task: Task,
        args: argparse.Namespace,
    ) -> None:
        self.model, self.data, self.parts, self.task = model, data, parts, task
        self.labels = {part: data.y[nodes] for part, nodes in parts.items()}
        self.optimizer = torch.optim.Adam(
            model.parameters(), args.lr, weight_decay=args.weight_decay)

    def step(self) -> Tensor:
        """Makes a training step and returns the loss."""
        self.model.train()
        self.optimizer.zero_grad()
        out = self.model(self.data.x, self.data.edge_index)
        loss = self.task.loss(out[self.parts['train']], self.labels['train'])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def epochs(self, count: int) -> Iterator[Point]:
        """Trains, epoch by epoch."""
        device = self.data.x.device
        for _ in range(count):
            start = now(device)
            loss = self.step()
            seconds = now(device) - start
            self.model.eval()
            with torch.no_grad():
                out = self.model(self.data.x, self.data.edge_index)
            val, test = (self.task.scores(out[self.parts[part]], self.labels[part])
                         for part in ('val', 'test'))
            yield Point(seconds, loss.item(), val, test)

    def aggregation_seconds(self, steps: int = 5) -> float:
        """Returns how long the aggregations of a training step take, forward and backward."""
        cuda = self.data.x.is_cuda
        self.step()
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
        with profile(activities=activities) as recorded:
            for _ in range(steps):
                self.step()
            now(self.data.x.device)
        total = sum(event.device_time_total if cuda else event.cpu_time_total
                    for event in recorded.key_averages() if event.key in AGGREGATION)
        if total == 0:
            raise RuntimeError(f"torch's profiler has seen no time of {AGGREGATION[0]}")
        return 1e-6 * total / steps


def sweep(args: argparse.Namespace) -> Sweep:
    """Trains all runs of all variants, which take turns."""
    device = torch.device(args.device)
    data, num_classes, task = load_data(args)
    data = ToCSR()(data.to(device))
    size = {'nodes': data.num_nodes, 'edges': data.num_edges, 'features': data.num_features,
            'classes': num_classes}
    result = Sweep(size, tuple(task.metrics), [Outcome(variant) for variant in args.variants])

    def trainer(variant: Variant, seed: int) -> Trainer:
        parts = split(data, num_classes, seed)
        torch.manual_seed(seed)  # the same initial weights for all
        model = MaxKGNN(
            args.model, data.num_features, args.hidden, num_classes, args.layers, k=variant.k,
            dropout=args.dropout, norm=None if args.norm == 'none' else args.norm,
            balanced=variant.balanced)
        return Trainer(model.to(device), data, parts, task, args)

    result.aggregation_seconds = trainer(Variant(), args.seed).aggregation_seconds()
    for run in range(args.runs):
        for outcome in result.outcomes:
            epochs = tqdm(
                trainer(outcome.variant, args.seed + run).epochs(args.epochs),
                f'{outcome.variant!s:24} run {run + 1}/{args.runs}', args.epochs, unit='epoch')
            points = []
            for point in epochs:
                points.append(point)
                epochs.set_postfix_str(
                    f'loss {point.loss:.3f}, validation {100 * point.val[0]:.1f} %', refresh=False)
            outcome.runs.append(points)
    return result


# Reports ----------------------------------------------------------------------------------------

def spread(values: Sequence[float]) -> str:
    """Returns mean and standard deviation."""
    mean = f'{statistics.fmean(values):.1f}'
    return f'{mean} +- {statistics.stdev(values):.1f}' if len(values) > 1 else mean


def table(result: Sweep) -> str:
    """Returns the comparison, one line per variant, and the limit of the speed-up."""
    rows = [('', *(f'test {metric} [%]' for metric in result.metrics), 'time per epoch [ms]',
             'speed-up')]
    for outcome in result.outcomes:
        rows.append((
            str(outcome.variant), *map(spread, zip(*outcome.scores, strict=True)),
            f'{1e3 * outcome.epoch_seconds:.2f}', f'{result.speedup(outcome):.2f} x'))
    rows.append(('limit (Amdahl)', *[''] * len(result.metrics),
                 f'{1e3 * result.outcomes[0].epoch_seconds / result.limit:.2f}',
                 f'{result.limit:.2f} x'))
    lines = [f'{name:24}' + ''.join(f'{value:>21}' for value in values)
             for name, *values in rows]
    return '\n'.join([
        *lines, '', f'The aggregation takes {100 * result.aggregation_share:.1f} % of an epoch '
        'with ReLU.'])


def plot(result: Sweep, title: str, file: Path) -> None:
    """Draws score and time per epoch over k, with ReLU and the limit as lines."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot

    gray, colors = '#9aa0a6', {False: '#d9480f', True: '#1971c2'}
    style = {'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True,
             'grid.color': '#e8e8e8', 'axes.axisbelow': True, 'axes.titlelocation': 'left',
             'axes.titlesize': 11, 'font.size': 10}
    relu, *others = result.outcomes

    def mean_and_error(outcome: Outcome) -> tuple[float, float]:
        scores = [first for first, *_ in outcome.scores]
        return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0

    with pyplot.rc_context(style):
        figure, (scores, times) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
        mean, error = mean_and_error(relu)
        scores.axhspan(mean - error, mean + error, color=gray, alpha=0.2, linewidth=0)
        scores.axhline(mean, color=gray, label='ReLU')
        seconds = relu.epoch_seconds
        times.axhline(1e3 * seconds, color=gray, label='ReLU')
        times.axhline(1e3 * seconds / result.limit, color='black', linestyle=':',
                      label=f'limit: {result.limit:.2f} x')
        for balanced, name in ((False, 'MaxK'), (True, 'balanced MaxK')):
            drawn = [outcome for outcome in others if outcome.variant.balanced == balanced]
            if not drawn:
                continue
            line = {'color': colors[balanced], 'marker': 'o', 'linewidth': 1.8, 'label': name}
            k = [outcome.variant.k for outcome in drawn]
            means, errors = zip(*map(mean_and_error, drawn), strict=True)
            scores.errorbar(k, means, errors, capsize=3, **line)
            times.plot(k, [1e3 * outcome.epoch_seconds for outcome in drawn], **line)
        scores.set_title(f'Test {result.metrics[0]} [%]')
        times.set_title('Time per epoch [ms]')
        times.set_ylim(bottom=0)
        ticks = sorted({outcome.variant.k for outcome in others})
        for axes in (scores, times):
            axes.set_xlabel('k')
            axes.set_xscale('log', base=2)
            axes.set_xticks(ticks, [str(k) for k in ticks])
            axes.minorticks_off()
            axes.legend(frameon=False)
        figure.suptitle(title, x=0.01, ha='left', weight='bold')
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


# Options ----------------------------------------------------------------------------------------

def nonlinearities(text: str) -> list[int | None]:
    """Reads `relu` and numbers between commas."""
    try:
        ks = [None if word == 'relu' else int(word) for word in text.split(',')]
    except ValueError:
        raise argparse.ArgumentTypeError(f"got '{text}', expected such as relu,16,32") from None
    if any(k is not None and k < 1 for k in ks):
        raise argparse.ArgumentTypeError(f"got '{text}', expected k of at least 1")
    return ks


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--dataset', choices=RECIPES, default='planted', help='(default: planted)')
    add('--size', choices=SIZES, help='of planted (default: medium) and of planted-labels '
        '(default: dense-medium)')
    add('--root', type=Path, help='folder of the other data sets, downloaded if not there')
    add('--model', choices=MODELS, help='(default: usual for the data set)')
    add('--k', type=nonlinearities, default='relu,8,16,32,64', metavar='K,...',
        help='entries to keep; ReLU is always trained as well (default: relu,8,16,32,64)')
    add('--balanced', action='store_true',
        help="also the best of each of k groups of columns, a nonlinearity other than MaxK's")
    for name, convert in {'layers': at_least(1, int), 'hidden': at_least(1, int),
                          'epochs': at_least(1, int), 'lr': at_least(0, float),
                          'weight-decay': at_least(0, float),
                          'dropout': at_least(0, float, below=1)}.items():
        add(f'--{name}', type=convert, help='(default: usual for the data set)')
    add('--norm', choices=NORMS, help='of layers (default: usual for the data set)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--runs', type=at_least(1, int), default=1, help='(default: 1)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--plot', type=Path, metavar='FILE', help='picture to write (.png, .pdf, .svg)')
    args = parser.parse_args(argv)

    for name, value in {**RECIPES[args.dataset]._asdict(),
                        'size': PLANTED.get(args.dataset)}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    ks = dict.fromkeys(k for k in args.k if k is not None)
    for k in ks:
        if k > args.hidden:
            parser.error(f'--k {k}: more than the {args.hidden} hidden channels')
    args.variants = [Variant(), *(Variant(k, balanced) for balanced in (False, True)[
        :1 + args.balanced] for k in ks)]
    choose_device(parser, args)
    check_root(parser, args, PLANTED)
    if args.plot is not None:
        if args.plot.suffix not in ('.png', '.pdf', '.svg'):
            parser.error(f'--plot {args.plot}: expected a name ending in .png, .pdf or .svg')
        if not args.plot.parent.is_dir():
            parser.error(f'--plot {args.plot}: no such folder')
        if importlib.util.find_spec('matplotlib') is None:
            parser.error('--plot needs matplotlib')
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    graph = f'{args.dataset}, {args.size}' if args.dataset in PLANTED else args.dataset
    title = f'MaxK {args.model.upper()} on {graph} ({args.device})'
    print(f'{title}: {args.layers} layers, hidden {args.hidden}, norm {args.norm}, '
          f'{args.epochs} epochs, seed {args.seed}', flush=True)
    result = sweep(args)
    size = ', '.join(f'{count:,} {what}' for what, count in result.graph.items())
    print(f'\n{size}\n\n{table(result)}')
    if args.plot is not None:
        plot(result, title, args.plot)
        print(f'\nwrote {args.plot}')


if __name__ == '__main__':
    main()
