"""Test scores of networks trained on all edges and sampled at inference, over strategies and S.

python -m benchmarks.sampled_accuracy           four real graphs and a multi-label one, five seeds
python -m benchmarks.sampled_accuracy --quick   two small graphs, two seeds, few epochs

The networks are trained and sampled by examples/sampled_inference.py with its recipes.
"""
import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from . import _graphs, _harness
from ._harness import Cell, Result, Section

sys.path.append(str(_harness.ROOT / 'examples'))  # scripts, which import each other by name
import sampled_inference

REAL = {
    'Computers': 'Amazon', 'CS': 'Coauthor', 'tolokers': 'HeterophilousGraphDataset',
    'PubMed': 'Planetoid'}
CASES = (*REAL, sampled_inference.MULTI_LABEL)
QUICK = {'planted': 'small', sampled_inference.MULTI_LABEL: 'dense-small'}
MODELS = tuple(sampled_inference.CONVS)
STRATEGIES = ('fastrand', 'bucket')
SAMPLES = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096)
MAX_DROP = 1.0  # points
DENSE = 30  # the mean degree above which fastrand should do with no more than bucket


@dataclasses.dataclass
class Sampled(Result):
    """The test score of every run, in percent, and what the mean loses, in points."""

    sampling_rate: float = 1.0
    scores: list[float] = dataclasses.field(default_factory=list)
    lost: float = 0.0


@dataclasses.dataclass
class Swept(Cell):
    """A graph, with the least S that holds by the mean test score and those chosen by the
    validation scores of each run."""

    metric: str = ''
    mean_degree: float = 0.0
    least: dict[str, int | None] = dataclasses.field(default_factory=dict)
    chosen: dict[str, list[int | None]] = dataclasses.field(default_factory=dict)

    def at(self, strategy: str, num_samples: int) -> Sampled | None:
        """None where fewer samples read all edges already."""
        found = self.results.get(key(strategy, num_samples))
        assert found is None or isinstance(found, Sampled)
        return found


def key(strategy: str, num_samples: int) -> str:
    return f'{strategy}, S = {num_samples}'


class Sweeps(Section):
    """Tables over S, a column for each graph."""

    @property
    def swept(self) -> list[Swept]:
        return [cell for cell in self.cells if isinstance(cell, Swept)]

    def over_samples(
        self, heads: Sequence[str], texts: Callable[[int], list[str]],
    ) -> list[str]:
        """A line for each S that some graph has."""
        used = [s for s in SAMPLES if any(
            cell.at(strategy, s) for cell in self.swept for strategy in STRATEGIES)]
        return _harness.table(['S', *heads], [[str(s), *texts(s)] for s in used])


class Losses(Sweeps):
    """What is lost with each S, and the least S that holds."""

    def markdown(self) -> str:
        columns = [(cell, strategy) for cell in self.swept for strategy in STRATEGIES]

        def lost(num_samples: int) -> list[str]:
            found = [cell.at(strategy, num_samples) for cell, strategy in columns]
            return ['–' if result is None else f'{result.lost:.2f}' for result in found]

        lines = [f'## {self.title}: points lost', '', *self.over_samples(
            [f'{cell.graph}, {strategy}' for cell, strategy in columns], lost)]
        head = ['graph', 'mean degree', self.width, 'score', 'all edges, %']
        for strategy in STRATEGIES:
            head += [f'least S, {strategy}', 'chosen']
        rows = []
        for cell in self.swept:
            full = cell.results['all edges']
            assert isinstance(full, Sampled)
            row = [cell.graph, f'{cell.mean_degree:.1f}', str(cell.width), cell.metric,
                   sampled_inference.spread(full.scores)]
            for strategy in STRATEGIES:
                row += [number(cell.least[strategy]),
                        ', '.join(map(number, cell.chosen[strategy]))]
            rows.append(row)
        lines += ['', f'## {self.title}: S that loses at most {MAX_DROP:g} point', '',
                  *_harness.table(head, rows), '', self.verdict()]
        return '\n'.join(lines)

    def verdict(self) -> str:
        """Whether fastrand does with no more than bucket where it should."""
        dense = [row for row in self.summary() if row['mean_degree'] > DENSE]
        missed = [row['graph'] for row in dense if not row['fastrand_holds_first']]
        return (
            f'Of {len(dense)} graphs with a mean degree above {DENSE}, fastrand needs no larger S '
            f'than bucket on {len(dense) - len(missed)}'
            + (f"; it does on {', '.join(missed)}." if missed else '.'))

    def summary(self) -> list[dict[str, Any]]:
        """The least S, one row for each graph."""
        infinite = float('inf')
        return [{
            'graph': cell.graph,
            'mean_degree': cell.mean_degree,
            **cell.least,
            'fastrand_holds_first':
                (cell.least['fastrand'] or infinite) <= (cell.least['bucket'] or infinite),
        } for cell in self.swept]


class Rates(Sweeps):
    """The share of the edges that is read."""

    def markdown(self) -> str:
        def rates(num_samples: int) -> list[str]:
            found = [cell.at(STRATEGIES[0], num_samples) for cell in self.swept]
            return ['–' if result is None else f'{100 * result.sampling_rate:.2f}'
                    for result in found]

        return '\n'.join([f'## {self.title}', '', *self.over_samples(
            [cell.graph for cell in self.swept], rates)])

    def summary(self) -> list[dict[str, Any]]:
        return []


def number(num_samples: int | None) -> str:
    return 'none' if num_samples is None else str(num_samples)


@contextlib.contextmanager
def arguments(name: str, model: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The command line of the example.

    Raises:
        Missing: If the files of a real graph are not there.
    """
    line = ['--dataset', name, '--model', model, '--device', args.device, '--repeats', '0',
            '--runs', str(args.runs), '--max-drop', str(MAX_DROP),
            '--strategies', ','.join(STRATEGIES), '--samples', ','.join(map(str, SAMPLES))]
    if args.epochs is not None:
        line += ['--epochs', str(args.epochs)]
    if args.quantize:
        line.append('--quantize')
    if args.quick and name in QUICK:
        line += ['--size', QUICK[name]]
    if name not in REAL:
        yield line
        return
    with _graphs.copied(REAL[name], name) as root:
        yield [*line, '--root', str(root)]


def swept(name: str, recipe: argparse.Namespace, found: sampled_inference.Sweep) -> Swept:
    """A sweep as the report has it, up to the first S that reads all edges."""
    results: dict[str, Result] = {
        'all edges': Sampled(scores=[100 * score for score in found.full_scores])}
    for strategy in STRATEGIES:
        for cell in found.of(strategy):
            results[key(strategy, cell.num_samples)] = Sampled(
                sampling_rate=cell.sampling_rate, scores=[100 * score for score in cell.scores],
                lost=found.loss(cell))
            if cell.sampling_rate == 1:
                break
    return Swept(
        name, recipe.hidden, results, metric=found.metric,
        mean_degree=found.graph['edges'] / found.graph['nodes'],
        least={strategy: found.least(strategy, MAX_DROP) for strategy in STRATEGIES},
        chosen=found.chosen)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description='Networks trained on all edges and sampled at inference.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', (*CASES, *QUICK)),
        help=f"of {', '.join(dict.fromkeys((*CASES, *QUICK)))}")
    parser.add_argument(
        '--models', type=_harness.choice('model', MODELS), default=MODELS,
        help=f"of {', '.join(MODELS)}")
    parser.add_argument('--epochs', type=int, help='instead of the usual number')
    parser.add_argument('--runs', type=int, help='seeds')
    parser.add_argument(
        '--quantize', action='store_true', help='features of eight bits wherever it samples')
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
    args.runs = args.runs or (2 if args.quick else 5)
    args.epochs = args.epochs or (5 if args.quick else None)

    report = _harness.Report('sampled-accuracy', args, [
        'Trained on all edges to the epoch of the best validation score, sampled at inference. '
        f'Lost: what the mean test score over {args.runs} seeds loses against that of all edges, '
        f'in points, below zero a gain. Least S: from which on every S loses at most {MAX_DROP:g} '
        'point; chosen: what choose_num_samples returns by the validation nodes, for each seed. S '
        'are powers of two and one and a half times them, up to the first that reads all edges. '
        + ('Trained on float32, sampled with features of eight bits.' if args.quantize
           else 'float32.'), ''])
    for name in args.graphs:
        for model in args.models:
            try:
                with arguments(name, model, args) as line:
                    recipe = sampled_inference.parse(line)
                    found = sampled_inference.sweep(recipe)
            except _graphs.Missing as reason:
                report.left_out[name] = str(reason)
                _harness.log(f'{name} left out: {reason}')
                break
            cell = swept(name, recipe, found)
            if name not in report.graphs:
                report.graphs[name] = found.graph
                report.notes.append(
                    f'- {name}: {recipe.layers} layers, {recipe.epochs} epochs, learning rate '
                    f'{recipe.lr:g}, weight decay {recipe.weight_decay:g}, dropout '
                    f'{recipe.dropout:g}.')
                report.section('Share of the edges read, %', Rates, columns={}).cells.append(cell)
            report.section(
                model.upper(), Losses, columns={}, width='hidden').cells.append(cell)
            _harness.log(f'{name}, {model}: {cell.least}')
            report.save()
    report.finish()


if __name__ == '__main__':
    main()
