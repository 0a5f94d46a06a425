"""Test scores of trained networks: MaxK beside ReLU, sampled inference, the loader, attention.

python -m benchmarks accuracy                      MaxK-GNNs beside the same networks with ReLU
python -m benchmarks accuracy --choose             validation scores of ReLU over many recipes
python -m benchmarks accuracy --system sampled     trained on all edges, sampled at inference
python -m benchmarks accuracy --system loader      trained on sampled batches, and on whole graphs
python -m benchmarks accuracy --system gat         GAT with the layers of PyG and of pyg_fast
python -m benchmarks accuracy --quick              small graphs, two seeds, few epochs

Scripts in examples/ train the networks with their recipes. Each system has records of its own.
"""
import argparse
import contextlib
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _graphs, _harness, _minibatch
from ._harness import Bench, Cell, Option, Result, Section

sys.path.append(str(_harness.ROOT / 'examples'))  # scripts, which import each other by name
import fastgl_training
import gat as gat_training
import maxk_training
import sampled_inference

COLLECTIONS = {
    **dict.fromkeys(('Cora', 'CiteSeer', 'PubMed'), 'Planetoid'), 'Computers': 'Amazon',
    'CS': 'Coauthor', 'tolokers': 'HeterophilousGraphDataset'}
MULTI_LABEL = maxk_training.MULTI_LABEL
QUICK_SIZES = {'planted': 'small', MULTI_LABEL: 'dense-small'}
GRAPHS = {
    'maxk': ('Cora', 'PubMed', 'Computers', 'CS', MULTI_LABEL),
    'sampled': ('Computers', 'CS', 'tolokers', 'PubMed', MULTI_LABEL),
    'loader': ('Computers', 'CS'), 'gat': ('Cora', 'CiteSeer', 'PubMed')}
QUICK_GRAPHS = {'maxk': tuple(QUICK_SIZES), 'sampled': tuple(QUICK_SIZES)}
MODELS = {
    'maxk': (None,), 'sampled': tuple(sampled_inference.CONVS), 'loader': ('gcn', 'sage', 'gat'),
    'gat': ('gat',)}
TIMES = 'Time per epoch, ms'
RATES, DROPOUTS = (0.001, 0.003, 0.01), (0.2, 0.5, 0.7)
CHOICE_SEED, CHOICE_RUNS = 100, 3  # the test scores have other seeds
STAGES = (0.1, 0.25, 0.5, 1.0)  # of a training
RELU = str(maxk_training.Variant())
STRATEGIES = ('fastrand', 'bucket', 'adaptive')
SAMPLES = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096)
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
    """Times of training steps; of every run the test score in percent and its losses."""

    scores: list[float] = dataclasses.field(default_factory=list)
    losses: list[list[float]] = dataclasses.field(default_factory=list)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def curve(self) -> list[float]:
        """The mean loss of each epoch."""
        return [statistics.fmean(losses) for losses in zip(*self.losses, strict=True)]

    def text(self) -> str:
        """The scores if there are any, otherwise the time."""
        if not self.scores:
            return super().text()
        spread = f' ± {statistics.stdev(self.scores):.2f}' if len(self.scores) > 1 else ''
        return f'{self.mean:.2f}{spread}'


@dataclasses.dataclass
class Lost(Trained):
    """Scores, the points that sampling loses, and the share of the edges that it reads."""

    lost: float = 0.0
    sampling_rate: float = 1.0

    def text(self) -> str:
        return f'{self.lost:.2f}'


def trained(cell: Cell, name: str) -> Trained:
    result = cell.results[name]
    assert isinstance(result, Trained)
    return result


class Scores(Section):
    """Test scores, and their differences from the first variant."""

    def summary(self) -> list[dict[str, Any]]:
        return [{
            'graph': cell.graph, 'variant': name, 'mean': trained(cell, name).mean,
            'difference': trained(cell, name).mean - trained(cell, next(iter(cell.results))).mean,
        } for cell in self.cells for name in cell.results]


class Choice(Section):
    """Validation scores of ReLU over the grid, the best in bold."""

    def summary(self) -> list[dict[str, Any]]:
        return [{'graph': cell.graph, 'chosen': max(
            cell.results, key=lambda name: trained(cell, name).mean)} for cell in self.cells]

    def row(self, cell: Cell) -> list[str]:
        row, means = super().row(cell), [trained(cell, name).mean for name in self.names()]
        best = 2 + means.index(max(means))
        return [f'**{text}**' if k == best else text for k, text in enumerate(row)]


@contextlib.contextmanager
def arguments(
    name: str, args: argparse.Namespace, model: str | None, *options: str,
) -> Iterator[list[str]]:
    """The command line of an example; raises Missing without the files of a graph."""
    line = ['--dataset', name, '--device', args.device, '--runs', str(args.runs), *options]
    for key, value in (('model', model), ('epochs', args.epochs), ('hidden', args.hidden)):
        line += [f'--{key}', str(value)] if value is not None else []
    if args.quick and name in QUICK_SIZES:
        line += ['--size', QUICK_SIZES[name]]
    if name not in COLLECTIONS:
        yield line
        return
    with _graphs.copied(COLLECTIONS[name], name) as root:
        yield [*line, '--root', str(root)]


# MaxK -------------------------------------------------------------------------------------------

def choose(bench: Bench, name: str, line: Sequence[str]) -> None:
    """Trains ReLU with every recipe of the grid, and adds its validation scores."""
    results: dict[str, Result] = {}
    for rate, dropout in itertools.product(RATES, DROPOUTS):
        recipe = maxk_training.parse([
            *line, '--lr', str(rate), '--dropout', str(dropout), '--k', 'relu', '--seed',
            str(CHOICE_SEED)])
        found = maxk_training.sweep(recipe)
        (relu,) = found.outcomes
        results[f'lr {rate:g}, dropout {dropout:g}'] = Trained(
            scores=[first for first, *_ in relu.validation_scores])
    bench.report.graphs[name] = found.graph
    bench.note(f'- {name}: {recipe.epochs} epochs, score: {found.metrics[0]}.')
    bench.add('Validation scores of ReLU, %', name, recipe.hidden, results, kind=Choice,
              label='hidden')


def outcomes(found: maxk_training.Sweep, place: int | None = None) -> dict[str, Trained]:
    """Times of all variants, with their scores by one of the metrics."""
    results: dict[str, Trained] = {}
    for outcome in found.outcomes:
        times = [1e3 * point.seconds for run in outcome.runs for point in run]
        results[str(outcome.variant)] = Trained(
            statistics.median(times), min(times), max(times), len(times),
            scores=[] if place is None else [score[place] for score in outcome.scores])
    return results


def add_scores(bench: Bench, title: str, name: str, width: int, label: str,
               results: Mapping[str, Trained]) -> None:
    """Test scores, with the difference of their means from that of the first variant."""
    first, *others = results
    bench.add(title, name, width, results, kind=Scores, label=label, facts={
        f'{other}, difference': f'{results[other].mean - results[first].mean:+.2f}'
        for other in others})


def maxk(bench: Bench, name: str, model: str | None) -> None:
    args = bench.args
    with arguments(name, args, model) as line:
        if args.choose:
            choose(bench, name, line)
            return
        recipe = maxk_training.parse([*line, '--balanced', '--k', ','.join(map(str, args.k))])
        found = maxk_training.sweep(recipe)
    bench.report.graphs[name] = found.graph
    bench.note(
        f'- {name}: {recipe.model}, {recipe.layers} layers, {recipe.epochs} epochs, learning rate '
        f'{recipe.lr:g}, weight decay {recipe.weight_decay:g}, dropout {recipe.dropout:g}, norm '
        f'{recipe.norm}; the aggregation takes {100 * found.aggregation_share:.1f} % of an epoch '
        f'with ReLU, which limits the speed-up to {found.limit:.2f}.')
    for place, metric in enumerate(found.metrics):
        add_scores(
            bench, f'Test {metric}, %', name, recipe.hidden, 'hidden', outcomes(found, place))
    epochs = len(found.outcomes[0].runs[0])
    for epoch in sorted({max(1, round(stage * epochs)) for stage in STAGES}):
        add_scores(bench, f'Test {found.metrics[0]} over epochs, %', name, epoch, 'epoch', {
            str(outcome.variant): Trained(
                scores=[100 * points[epoch - 1].test[0] for points in outcome.runs])
            for outcome in found.outcomes})
    times = outcomes(found)
    bench.add(TIMES, name, recipe.hidden, times, label='hidden',
              pairs=[(variant, RELU) for variant in times if variant != RELU])


# Sampled inference ------------------------------------------------------------------------------

def sampled(bench: Bench, name: str, model: str | None) -> None:
    options = [
        '--repeats', '0', '--max-drop', str(MAX_LOSS), '--strategies', ','.join(STRATEGIES),
        '--samples', ','.join(map(str, SAMPLES)), *['--quantize'] * bench.args.quantize]
    with arguments(name, bench.args, model, *options) as line:
        recipe = sampled_inference.parse(line)
        found = sampled_inference.sweep(recipe)
    by_samples: dict[int, dict[str, Lost]] = {}
    for strategy in STRATEGIES:
        for cell in found.of(strategy):
            by_samples.setdefault(cell.num_samples, {})[strategy] = Lost(
                scores=[100 * score for score in cell.scores], lost=found.loss(cell),
                sampling_rate=cell.sampling_rate)
    if name not in bench.report.graphs:
        bench.report.graphs[name] = found.graph
        bench.note(
            f'- {name}: {recipe.layers} layers, {recipe.epochs} epochs, learning rate '
            f'{recipe.lr:g}, weight decay {recipe.weight_decay:g}, dropout {recipe.dropout:g}.')
    for num_samples, results in by_samples.items():
        rate = max(100 * each.sampling_rate for each in results.values())
        bench.add(f'{str(model).upper()}: points lost', name, num_samples, results, label='S',
                  facts={'edges read, %': rate})
    full = Trained(scores=[100 * score for score in found.full_scores])
    least = {strategy: found.least(strategy, MAX_LOSS) for strategy in STRATEGIES}
    bench.add(
        f'{str(model).upper()}: S that loses at most {MAX_LOSS:g} point', name, recipe.hidden,
        {'all edges, %': full}, label='hidden', facts={
            'score': found.metric, 'mean degree': found.graph['edges'] / found.graph['nodes'],
            **{f'{what}, {strategy}': of[strategy] for strategy in STRATEGIES
               for what, of in (('least S', least), ('chosen', found.chosen))},
            **{f'{name} needs no larger S': 'yes' if (least[name] or math.inf) <= (
                least[other] or math.inf) else 'no'
               for name, other in (('fastrand', 'bucket'), ('adaptive', 'fastrand'))}})


# The loader -------------------------------------------------------------------------------------

def curves(full: Trained, loader: Trained, plain: Trained) -> dict[str, float]:
    """The points that the loader loses, and the difference of its loss curve from that without
    Match-Reorder, beside the deviation over seeds."""
    pairs = list(zip(loader.curve, plain.curve, strict=True))
    return {
        'lost, points': full.mean - loader.mean,
        'losses differ by at most': max(abs(a - b) for a, b in pairs),
        'at the end': abs(pairs[-1][0] - pairs[-1][1]),
        'deviation over seeds': max(
            statistics.stdev(losses) if len(losses) > 1 else 0.0
            for losses in zip(*plain.losses, strict=True))}


def loader(bench: Bench, name: str, model: str | None) -> None:
    args, ways = bench.args, dict(WAYS)
    if not _minibatch.pyg_backend(bench.report.left_out, PYG):
        del ways[PYG]
    options = ['--fanout', ','.join(map(str, args.fanout))]
    if name not in COLLECTIONS:
        options += ['--size', 'small', '--batch-size', '256']
    results: dict[str, Trained] = {}
    for way, some in ways.items():
        epochs = args.epochs if way != FULL else 40 if args.quick else None
        given = argparse.Namespace(**{**vars(args), 'epochs': epochs})
        with arguments(name, given, model, *options, *some) as line:
            found = fastgl_training.main(line)
        results[way] = Trained(
            1e3 * found.epoch_seconds, scores=found.accuracies,
            losses=[[point.loss for point in run] for run in found.runs])
    bench.report.graphs[name] = found.graph
    bench.add(str(model).upper(), name, args.runs, results, label='seeds',
              facts=curves(*(results[way] for way in (FULL, LOADER, PLAIN))))


# Attention --------------------------------------------------------------------------------------

def gat(bench: Bench, name: str, model: str | None) -> None:
    with arguments(name, bench.args, model) as line:
        graph, found = gat_training.compare(gat_training.parse(line))
    bench.report.graphs[name] = graph
    results = {
        side: Trained(1e3 * outcome.epoch_seconds, count=sum(outcome.epochs),
                      scores=outcome.accuracies) for side, outcome in found.items()}
    add_scores(bench, 'Test accuracy, %', name, bench.args.epochs or 0, 'epochs', results)
    times = {side: dataclasses.replace(each, scores=[]) for side, each in results.items()}
    bench.add(TIMES, name, bench.args.epochs or 0, times, label='epochs', ours='pyg_fast',
              rivals=['PyG'])


SYSTEMS = {'maxk': maxk, 'sampled': sampled, 'loader': loader, 'gat': gat}
NOTES = {
    'maxk': 'Test scores at the epoch of the best validation score, mean and standard deviation '
    'over {runs} seeds; difference: of the means, from ReLU. All variants have the same recipe, '
    "the best by ReLU's validation scores on other seeds, and start from the same weights. Times "
    'are medians of training steps; the variants take turns by runs; ratio: ReLU over MaxK.',
    'sampled': 'Trained on all edges to the epoch of the best validation score, sampled at '
    'inference{eight_bits}. Lost: the mean test score of all edges minus that of the sample, in '
    f'points, over {{runs}} seeds. Least S: every larger S loses at most {MAX_LOSS:g} point too; '
    'chosen: the result of choose_num_samples on the validation nodes, for each seed. S are '
    'powers of two and one and a half times them, up to the first that reads all edges.',
    'loader': 'Test accuracy at the epoch of the best validation accuracy, over {runs} seeds. '
    'Lost: points that the loader loses against training on the whole graph. Losses: means over '
    'the seeds, with and without Match and Reorder, beside their standard deviation over seeds, '
    'the largest of all epochs. Half of the nodes train; batches of sampled neighbours, '
    '{fanout}; evaluation on all neighbours.',
    'gat': 'The settings of the GAT paper, by examples/gat.py: test accuracy at the best '
    'validation accuracy, over {runs} seeds.',
}


def main(argv: Sequence[str] | None = None) -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument('--system', choices=SYSTEMS, default='maxk')
    first.add_argument('--choose', action='store_true')
    peeked = first.parse_known_args(argv)[0]
    system, usual_runs = peeked.system, CHOICE_RUNS if peeked.choose else 5
    known = (*COLLECTIONS, *QUICK_SIZES)
    bench = Bench(
        f'{system}-accuracy'.removeprefix('maxk-'), __doc__, argv, known_graphs=known, notes=None,
        graphs={'quick': QUICK_GRAPHS.get(system, ('planted',)), 'usual': GRAPHS[system]},
        system=Option('maxk', str, f"of {', '.join(SYSTEMS)}"),
        models=Option(MODELS[system], _harness.choice('model', (
            *sampled_inference.CONVS, *maxk_training.MODELS, *fastgl_training.MODELS, 'gatv2'))),
        k=Option((32,), _harness.integers, 'entries that MaxK keeps'),
        hidden=Option(help='channels, instead of those of the recipe'),
        fanout=Option((15, 10), _harness.integers, 'of the loader'),
        epochs=Option({'quick': 4 if system == 'loader' else 5, 'usual': None},
                      help='instead of those of the recipe'),
        runs=Option({'quick': 2, 'usual': usual_runs}, help='number of seeds'),
        quantize=Option(False, help='sample features of eight bits'),
        choose=Option(False, help='choose the recipes by validation scores'))
    args = bench.args
    bench.note('float32. ' + NOTES[system].format(
        runs=args.runs, fanout=list(args.fanout),
        eight_bits=' with features of eight bits' * args.quantize) if not args.choose else (
            f'Best validation scores of ReLU, mean and standard deviation over {args.runs} seeds '
            f'from {CHOICE_SEED} on; test scores are not used.'), '')
    for name in args.graphs:
        try:
            for model in args.models:
                SYSTEMS[system](bench, name, model)
        except _graphs.Missing as reason:
            bench.report.left_out[name] = str(reason)
        bench.report.sections.sort(key=lambda section: section.title == TIMES)  # last
        bench.report.save()
    bench.finish()


if __name__ == '__main__':
    main()
