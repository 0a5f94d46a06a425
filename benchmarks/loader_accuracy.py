"""Test accuracy of networks trained on sampled batches beside those trained on whole graphs, and
loss curves with and without Match and Reorder.

python -m benchmarks.loader_accuracy           two real graphs, five seeds
python -m benchmarks.loader_accuracy --quick   a small graph, two seeds, few epochs

The networks are trained by examples/fastgl_training.py with its recipes.
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

from . import _graphs, _harness, _minibatch
from ._harness import Cell, Result, Section

sys.path.append(str(_harness.ROOT / 'examples'))  # scripts, which import each other by name
import fastgl_training

REAL = {'Computers': 'Amazon', 'CS': 'Coauthor'}
QUICK = ('planted',)
MODELS = ('gcn', 'sage', 'gat')
FANOUT = (15, 10)
MAX_LOSS = 1.0  # points
FULL, LOADER, PLAIN, PYG = (
    'whole graph', 'loader', 'loader without Match-Reorder', "PyG's loader and layers")
WAYS = {
    FULL: ['--loader', 'full'],
    LOADER: ['--reorder', '--features', 'host'],
    PLAIN: ['--no-match', '--no-reorder', '--features', 'host'],
    PYG: ['--loader', 'pyg', '--layers', 'pyg'],
}


@dataclasses.dataclass
class Trained(Result):
    """The test accuracy of every run, in percent, and its losses epoch by epoch."""

    scores: list[float] = dataclasses.field(default_factory=list)
    losses: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def curve(self) -> list[float]:
        """The mean loss of each epoch."""
        return [statistics.fmean(losses) for losses in zip(*self.losses, strict=True)]

    def scores_text(self) -> str:
        spread = f' ± {statistics.stdev(self.scores):.2f}' if len(self.scores) > 1 else ''
        return f'{self.mean:.2f}{spread}'


class Scores(Section):
    """A table of test scores, what the loader loses, and how far the loss curves differ."""

    def summary(self) -> list[dict[str, Any]]:
        """One row for each graph and model."""
        rows = []
        for cell in self.cells:
            found = {name: result for name, result in cell.results.items()
                     if isinstance(result, Trained)}
            pairs = list(zip(found[LOADER].curve, found[PLAIN].curve, strict=True))
            rows.append({
                'graph': cell.graph,
                **{name: result.mean for name, result in found.items()},
                'lost': found[FULL].mean - found[LOADER].mean,
                'curves_differ': max(abs(a - b) for a, b in pairs),
                'last_losses_differ': abs(pairs[-1][0] - pairs[-1][1]),
                # What another seed changes, to compare this with.
                'seeds_differ': max(
                    statistics.stdev(losses) if len(losses) > 1 else 0.0
                    for losses in zip(*found[PLAIN].losses, strict=True)),
            })
        return rows

    def markdown(self) -> str:
        rows = []
        for row, cell in zip(self.summary(), self.cells, strict=True):
            texts = [result.scores_text() for result in cell.results.values()
                     if isinstance(result, Trained)]
            rows.append([cell.graph, *texts, f"{row['lost']:+.2f}", *(
                f'{row[key]:.3f}' for key in
                ('curves_differ', 'last_losses_differ', 'seeds_differ'))])
        ways = [way for way in WAYS if any(way in cell.results for cell in self.cells)]
        head = ['graph', *ways, 'lost, points', 'losses differ by at most', 'at the end',
                'deviation over seeds']
        missed = [row['graph'] for row in self.summary() if row['lost'] > MAX_LOSS]
        verdict = (
            f'The loader loses at most {MAX_LOSS:g} point on '
            f'{len(self.cells) - len(missed)} of {len(self.cells)}'
            + (f"; more on {', '.join(missed)}." if missed else '.'))
        return '\n'.join([f'## {self.title}', '', *_harness.table(head, rows), '', verdict])


@contextlib.contextmanager
def arguments(name: str, model: str, args: argparse.Namespace) -> Iterator[list[str]]:
    """The command line of the example.

    Raises:
        Missing: If the files of a real graph are not there.
    """
    line = ['--dataset', name, '--model', model, '--device', args.device, '--runs',
            str(args.runs), '--fanout', ','.join(map(str, args.fanout))]
    if name not in REAL:
        yield [*line, '--size', 'small', '--batch-size', '256']
        return
    with _graphs.copied(REAL[name], name) as root:
        yield [*line, '--root', str(root)]


def trained(line: Sequence[str]) -> tuple[Trained, dict[str, int]]:
    """What the example made of a command line, and the size of its graph."""
    found = fastgl_training.main([*line])
    return Trained(
        1e3 * found.epoch_seconds, scores=found.accuracies,
        losses=[[point.loss for point in run] for run in found.runs]), found.graph


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description='Networks trained on sampled batches, and on whole graphs.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        '--graphs', type=_harness.choice('graph', (*REAL, *QUICK)),
        help=f"of {', '.join((*REAL, *QUICK))}")
    parser.add_argument(
        '--models', type=_harness.choice('model', tuple(fastgl_training.MODELS)),
        default=MODELS, help=f"of {', '.join(fastgl_training.MODELS)}")
    parser.add_argument('--fanout', type=fastgl_training.fanout, default=FANOUT)
    parser.add_argument('--epochs', type=int, help='of the loaders, instead of the usual number')
    parser.add_argument('--runs', type=int, help='seeds')
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
    args.graphs = args.graphs or (QUICK if args.quick else tuple(REAL))
    args.runs = args.runs or (2 if args.quick else 5)
    args.epochs = args.epochs or (4 if args.quick else None)
    report = _harness.Report('loader-accuracy', args, [
        f'Test accuracy at the epoch of the best validation accuracy, over {args.runs} seeds. '
        f'Lost: what the loader loses against training on the whole graph. Losses: means over the '
        'seeds, with and without Match and Reorder, beside their standard deviation over seeds, '
        'the largest of all epochs. Half of the nodes are for training; batches of sampled '
        f'neighbours, {list(args.fanout)}; evaluation on all neighbours. float32.', ''])
    ways = dict(WAYS)
    try:
        _minibatch.pyg_backend()
    except _graphs.Missing as reason:
        report.left_out[PYG] = str(reason)
        del ways[PYG]
    for name in args.graphs:
        for model in args.models:
            results: dict[str, Result] = {}
            try:
                with arguments(name, model, args) as line:
                    for way, options in ways.items():
                        if args.epochs is not None and way != FULL:
                            options = [*options, '--epochs', str(args.epochs)]
                        elif args.quick:
                            options = [*options, '--epochs', '40']
                        result, size = trained([*line, *options])
                        results[way] = result
                        _harness.log(f'{name}, {model}, {way}: {result.scores}')
            except _graphs.Missing as reason:
                report.left_out[name] = str(reason)
                _harness.log(f'{name} left out: {reason}')
                break
            report.graphs[name] = size
            report.section(model.upper(), Scores, columns={}).cells.append(Cell(name, 0, results))
            report.save()
    report.finish()


if __name__ == '__main__':
    main()
