"""Test scores of MaxK-GNNs beside those of the same networks with ReLU, and times per epoch.

python -m benchmarks.accuracy             four real graphs and a multi-label one, five seeds
python -m benchmarks.accuracy --quick     two small graphs, two seeds, few epochs
python -m benchmarks.accuracy --choose    ReLU's validation scores over a grid, on other seeds

The networks are trained by examples/maxk_training.py with its recipes, one for all variants. Their
learning rates and dropouts are those that `--choose` finds best.
"""
import argparse
import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _graphs, _harness
from ._harness import Cell, Result, Section, Versus

sys.path.append(str(_harness.ROOT / 'examples'))  # scripts, which import each other by name
import maxk_training

REAL = {'Cora': 'Planetoid', 'PubMed': 'Planetoid', 'Computers': 'Amazon', 'CS': 'Coauthor'}
CASES = (*REAL, maxk_training.MULTI_LABEL)
QUICK = {'planted': 'small', maxk_training.MULTI_LABEL: 'dense-small'}
TIMES = 'Time per epoch, ms'
RATES = (0.001, 0.003, 0.01)
DROPOUTS = (0.2, 0.5, 0.7)
CHOICE_SEED, CHOICE_RUNS = 100, 3  # none of the seeds of the test scores
RELU = str(maxk_training.Variant())


@dataclasses.dataclass
class Trained(Result):
    """Times of training steps, and a test score of every run, in percent."""

    scores: list[float] = dataclasses.field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    def scores_text(self) -> str:
        spread = f' ± {statistics.stdev(self.scores):.2f}' if len(self.scores) > 1 else ''
        return f'{self.mean:.2f}{spread}'


def trained(cell: Cell, name: str) -> Trained:
    result = cell.results[name]
    assert isinstance(result, Trained)
    return result


class Scores(Section):
    """A table of test scores, and their differences from ReLU's."""

    def markdown(self) -> str:
        rivals = [name for name in self.used() if name != RELU]
        head = ['graph', self.width, RELU]
        for name in rivals:
            head += [name, 'difference']
        rows = []
        for cell in self.cells:
            row = [cell.graph, str(cell.width), trained(cell, RELU).scores_text()]
            for name in rivals:
                row += [
                    trained(cell, name).scores_text(), f'{self._difference(cell, name):+.2f}']
            rows.append(row)
        return '\n'.join([f'## {self.title}', '', *_harness.table(head, rows)])

    def summary(self) -> list[dict[str, Any]]:
        """Means and differences, one row for each graph and variant."""
        return [{
            'graph': cell.graph,
            'variant': name,
            'mean': trained(cell, name).mean,
            'difference': self._difference(cell, name),
        } for cell in self.cells for name in cell.results]

    @staticmethod
    def _difference(cell: Cell, name: str) -> float:
        return trained(cell, name).mean - trained(cell, RELU).mean


class Choice(Section):
    """A table of ReLU's validation scores over the grid, the best in bold."""

    def markdown(self) -> str:
        rows = []
        for row, cell in zip(self.summary(), self.cells, strict=True):
            texts = {name: trained(cell, name).scores_text() for name in cell.results}
            texts[row['chosen']] = f"**{texts[row['chosen']]}**"
            rows.append([cell.graph, str(cell.width), *texts.values()])
        return '\n'.join([
            f'## {self.title}', '', *_harness.table(['graph', self.width, *self.used()], rows)])

    def summary(self) -> list[dict[str, Any]]:
        """The best setting, one row for each graph."""
        return [{
            'graph': cell.graph,
            'chosen': max(cell.results, key=lambda name: trained(cell, name).mean),
        } for cell in self.cells]


@contextlib.contextmanager
def arguments(name: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The command line of the example.

    Raises:
        Missing: If the files of a real graph are not there.
    """
    line = ['--dataset', name, '--device', args.device]
    for option in ('model', 'hidden', 'epochs'):
        if getattr(args, option) is not None:
            line += [f'--{option}', str(getattr(args, option))]
    if args.quick and name in QUICK:
        line += ['--size', QUICK[name]]
    if name not in REAL:
        yield line
        return
    with _graphs.copied(REAL[name], name) as root:
        yield [*line, '--root', str(root)]


def choose(
    name: str, line: Sequence[str], args: argparse.Namespace, report: _harness.Report,
) -> None:
    """Trains ReLU with every setting of the grid, and adds its validation scores."""
    settings = {
        f'lr {rate:g}, dropout {dropout:g}': (rate, dropout)
        for rate in RATES for dropout in DROPOUTS}
    results: dict[str, Result] = {}
    for setting, (rate, dropout) in settings.items():
        recipe = maxk_training.parse([
            *line, '--lr', str(rate), '--dropout', str(dropout), '--k', 'relu',
            '--seed', str(CHOICE_SEED), '--runs', str(args.runs)])
        found = maxk_training.sweep(recipe)
        (relu,) = found.outcomes
        results[setting] = Trained(scores=[first for first, *_ in relu.validation_scores])
        _harness.log(f'{name}: {setting}: {results[setting].scores_text()}')
    report.graphs[name] = found.graph
    report.notes.append(f'- {name}: {recipe.epochs} epochs, score: {found.metrics[0]}.')
    report.section(
        'Validation scores of ReLU, %', Choice,
        columns={setting: [setting] for setting in settings}, width='hidden',
    ).cells.append(Cell(name, recipe.hidden, results))


def outcomes(found: maxk_training.Sweep, place: int | None = None) -> dict[str, Trained]:
    """Times of all variants, with their scores by one of the metrics."""
    results = {}
    for outcome in found.outcomes:
        times = [1e3 * point.seconds for run in outcome.runs for point in run]
        results[str(outcome.variant)] = Trained(
            statistics.median(times), min(times), max(times), len(times),
            scores=[] if place is None else [score[place] for score in outcome.scores])
    return results


def compare(
    name: str, line: Sequence[str], args: argparse.Namespace, report: _harness.Report,
) -> None:
    """Trains all variants on one graph, and adds what came out."""
    recipe = maxk_training.parse([
        *line, '--runs', str(args.runs), '--balanced', '--k', ','.join(map(str, args.k))])
    found = maxk_training.sweep(recipe)
    share, limit = found.aggregation_share, found.limit
    report.graphs[name] = found.graph
    report.notes.append(
        f'- {name}: {recipe.model}, {recipe.layers} layers, {recipe.epochs} epochs, learning rate '
        f'{recipe.lr:g}, weight decay {recipe.weight_decay:g}, dropout {recipe.dropout:g}, norm '
        f'{recipe.norm}; the aggregation takes {100 * share:.1f} % of an epoch with ReLU, which '
        f'limits the speed-up to {limit:.2f}.')
    columns = {str(variant): [str(variant)] for variant in recipe.variants}
    for place, metric in enumerate(found.metrics):
        report.section(
            f'Test {metric}, %', Scores, columns=columns, width='hidden',
        ).cells.append(Cell(name, recipe.hidden, {**outcomes(found, place)}))
    times = report.section(
        TIMES, columns=columns, width='hidden',
        versus=[Versus(RELU, name, [RELU]) for name in columns if name != RELU])
    times.cells.append(Cell(name, recipe.hidden, {**outcomes(found)}))
    _harness.log(f'{name}\n{maxk_training.table(found)}\n')


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description='MaxK-GNNs beside the same networks with ReLU.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', (*CASES, *QUICK)),
        help=f"of {', '.join(dict.fromkeys((*CASES, *QUICK)))}")
    parser.add_argument('--k', type=_harness.integers, default=(32,), help='entries to keep')
    parser.add_argument('--model', choices=maxk_training.MODELS, help='instead of the usual one')
    parser.add_argument('--hidden', type=int, help='instead of the usual width')
    parser.add_argument('--epochs', type=int, help='instead of the usual number')
    parser.add_argument('--runs', type=int, help='seeds')
    parser.add_argument('--choose', action='store_true', help='recipes, by validation scores')
    parser.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    parser.add_argument('--threads', type=int, help='CPU threads of torch')
    parser.add_argument('--quick', action='store_true', help='a minute or less')
    parser.add_argument(
        '--out', type=Path, metavar='DIR', default=_harness.ROOT / 'benchmarks' / 'results')
    args = parser.parse_args(argv)
    if args.device == 'auto':
        args.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.threads = torch.get_num_threads()
    args.graphs = args.graphs or tuple(QUICK if args.quick else CASES)
    args.runs = args.runs or (2 if args.quick else CHOICE_RUNS if args.choose else 5)
    args.epochs = args.epochs or (5 if args.quick else None)

    report = _harness.Report('accuracy', args, [
        f'Best validation scores of ReLU, mean and standard deviation over {args.runs} seeds from '
        f'{CHOICE_SEED} on. No test score is looked at.' if args.choose else
        'Test scores at the epoch of the best validation score, mean and standard deviation over '
        f'{args.runs} seeds; difference: of the means, from ReLU. All variants have the same '
        "recipe, the best by ReLU's validation scores on other seeds, and start from the same "
        'weights. Times are of training steps, medians, the variants taking turns by runs; ratio: '
        'ReLU over MaxK. float32.', ''])
    for name in args.graphs:
        try:
            with arguments(name, args) as line:
                (choose if args.choose else compare)(name, line, args, report)
        except _graphs.Missing as reason:
            report.left_out[name] = str(reason)
            _harness.log(f'{name} left out: {reason}')
        report.sections.sort(key=lambda section: section.title == TIMES)  # last
        report.save()
    report.finish()


if __name__ == '__main__':
    main()
