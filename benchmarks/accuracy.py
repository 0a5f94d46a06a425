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
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _graphs, _harness, _minibatch
from ._harness import Bench, Cell, Option, Result, Section, Versus

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
BENCHES = {'maxk': 'accuracy', **{name: f'{name}-accuracy' for name in (
    'sampled', 'loader', 'gat')}}
MODELS = {
    'maxk': (None,), 'sampled': tuple(sampled_inference.CONVS), 'loader': ('gcn', 'sage', 'gat'),
    'gat': ('gat',)}
TIMES = 'Time per epoch, ms'
RATES, DROPOUTS = (0.001, 0.003, 0.01), (0.2, 0.5, 0.7)
CHOICE_SEED, CHOICE_RUNS = 100, 3  # the test scores have other seeds
STAGES = (0.1, 0.25, 0.5, 1.0)  # of a training
RELU = str(maxk_training.Variant())
STRATEGIES = ('fastrand', 'bucket')
SAMPLES = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
    3072, 4096)
MAX_LOSS = 1.0  # points
DENSE = 30  # mean degree above which fastrand should need no larger S than bucket
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
    """Times of training steps; of every run the test score in percent and its losses.

    ``lost``: points that sampling loses, ``sampling_rate``: the share of the edges that it reads.
    """

    scores: list[float] = dataclasses.field(default_factory=list)
    losses: list[list[float]] = dataclasses.field(default_factory=list)
    sampling_rate: float = 1.0
    lost: float = 0.0

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

    def markdown(self) -> str:
        first, *others = self.names()
        head = ['graph', self.width, first, *(
            text for name in others for text in (name, 'difference'))]
        rows = {cell.graph: [cell.graph, str(cell.width)] for cell in self.cells}
        for cell, row in ((cell, row) for cell in self.cells for row in self.summary()
                          if row['graph'] == cell.graph):
            rows[cell.graph] += [trained(cell, row['variant']).scores_text(), *(
                [f"{row['difference']:+.2f}"] if row['variant'] != first else [])]
        return self.titled(head, rows.values())


class Choice(Section):
    """Validation scores of ReLU over the grid, the best in bold."""

    def summary(self) -> list[dict[str, Any]]:
        return [{'graph': cell.graph, 'chosen': max(
            cell.results, key=lambda name: trained(cell, name).mean)} for cell in self.cells]

    def markdown(self) -> str:
        rows = []
        for row, cell in zip(self.summary(), self.cells, strict=True):
            texts = {name: trained(cell, name).scores_text() for name in cell.results}
            texts[row['chosen']] = f"**{texts[row['chosen']]}**"
            rows.append([cell.graph, str(cell.width), *texts.values()])
        return self.titled(['graph', self.width, *self.used()], rows)


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
    for rate in RATES:
        for dropout in DROPOUTS:
            recipe = maxk_training.parse([
                *line, '--lr', str(rate), '--dropout', str(dropout), '--k', 'relu',
                '--seed', str(CHOICE_SEED)])
            found = maxk_training.sweep(recipe)
            (relu,) = found.outcomes
            results[f'lr {rate:g}, dropout {dropout:g}'] = Trained(
                scores=[first for first, *_ in relu.validation_scores])
    bench.report.graphs[name] = found.graph
    bench.note(f'- {name}: {recipe.epochs} epochs, score: {found.metrics[0]}.')
    bench.add('Validation scores of ReLU, %', name, recipe.hidden, results, kind=Choice,
              label='hidden')


def outcomes(found: maxk_training.Sweep, place: int | None = None) -> dict[str, Result]:
    """Times of all variants, with their scores by one of the metrics."""
    results: dict[str, Result] = {}
    for outcome in found.outcomes:
        times = [1e3 * point.seconds for run in outcome.runs for point in run]
        results[str(outcome.variant)] = Trained(
            statistics.median(times), min(times), max(times), len(times),
            scores=[] if place is None else [score[place] for score in outcome.scores])
    return results


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
        bench.add(f'Test {metric}, %', name, recipe.hidden, outcomes(found, place), kind=Scores,
                  label='hidden')
    epochs = len(found.outcomes[0].runs[0])
    for epoch in sorted({max(1, round(stage * epochs)) for stage in STAGES}):
        bench.add(f'Test {found.metrics[0]} over epochs, %', f'{name}, epoch {epoch}', epoch, {
            str(outcome.variant): Trained(
                scores=[100 * points[epoch - 1].test[0] for points in outcome.runs])
            for outcome in found.outcomes}, kind=Scores, label='epoch')
    times = outcomes(found)
    bench.add(TIMES, name, recipe.hidden, times, label='hidden',
              pairs=[(variant, RELU) for variant in times if variant != RELU])


# Sampled inference ------------------------------------------------------------------------------

@dataclasses.dataclass
class Swept(Cell):
    """Scores over S, the least S whose mean test score loses no more than the allowed points, and
    the S that the validation scores of each run choose."""

    metric: str = ''
    mean_degree: float = 0.0
    least: dict[str, int | None] = dataclasses.field(default_factory=dict)
    chosen: dict[str, list[int | None]] = dataclasses.field(default_factory=dict)

    def at(self, strategy: str, num_samples: int) -> Trained | None:
        """``None`` where a smaller S reads all edges already."""
        found = self.results.get(key(strategy, num_samples))
        assert found is None or isinstance(found, Trained)
        return found


def key(strategy: str, num_samples: int) -> str:
    return f'{strategy}, S = {num_samples}'


def number(num_samples: int | None) -> str:
    return 'none' if num_samples is None else str(num_samples)


class Sweeps(Section):
    """Tables over S."""

    @property
    def swept(self) -> list[Swept]:
        return [cell for cell in self.cells if isinstance(cell, Swept)]

    def over_samples(
        self, strategies: Sequence[str], text: Callable[[Trained], str],
    ) -> list[str]:
        """A row for each S, a column for each graph and strategy."""
        columns = [(cell, strategy) for cell in self.swept for strategy in strategies]
        rows = []
        for s in SAMPLES:
            found = [cell.at(strategy, s) for cell, strategy in columns]
            if any(found):
                rows.append([str(s), *('–' if each is None else text(each) for each in found)])
        return _harness.table(['S', *(
            f'{cell.graph}, {strategy}' for cell, strategy in columns)], rows)


class Losses(Sweeps):
    """The points that each S loses, and the least S."""

    def summary(self) -> list[dict[str, Any]]:
        return [{
            'graph': cell.graph, 'mean_degree': cell.mean_degree, **cell.least,
            'fastrand_holds_first': (cell.least['fastrand'] or float('inf')) <= (
                cell.least['bucket'] or float('inf')),
        } for cell in self.swept]

    def markdown(self) -> str:
        head = ['graph', 'mean degree', self.width, 'score', 'all edges, %']
        head += [text for strategy in STRATEGIES for text in (f'least S, {strategy}', 'chosen')]
        rows = [[
            cell.graph, f'{cell.mean_degree:.1f}', str(cell.width), cell.metric,
            sampled_inference.spread(trained(cell, 'all edges').scores), *(
                text for strategy in STRATEGIES for text in (
                    number(cell.least[strategy]), ', '.join(map(number, cell.chosen[strategy]))))]
            for cell in self.swept]
        dense = [row for row in self.summary() if row['mean_degree'] > DENSE]
        missed = [row['graph'] for row in dense if not row['fastrand_holds_first']]
        return '\n'.join([
            f'## {self.title}: points lost', '',
            *self.over_samples(STRATEGIES, lambda result: f'{result.lost:.2f}'), '',
            f'## {self.title}: S that loses at most {MAX_LOSS:g} point', '',
            *_harness.table(head, rows), '',
            f'Of {len(dense)} graphs with a mean degree above {DENSE}, fastrand needs no larger S '
            f'than bucket on {len(dense) - len(missed)}'
            + (f"; it does on {', '.join(missed)}." if missed else '.')])


class Rates(Sweeps):
    """The share of the edges that a sample reads."""

    def summary(self) -> list[dict[str, Any]]:
        return []

    def markdown(self) -> str:
        return '\n'.join([f'## {self.title}', '', *self.over_samples(
            STRATEGIES[:1], lambda result: f'{100 * result.sampling_rate:.2f}')])


def sampled(bench: Bench, name: str, model: str | None) -> None:
    options = [
        '--repeats', '0', '--max-drop', str(MAX_LOSS), '--strategies', ','.join(STRATEGIES),
        '--samples', ','.join(map(str, SAMPLES)), *['--quantize'] * bench.args.quantize]
    with arguments(name, bench.args, model, *options) as line:
        recipe = sampled_inference.parse(line)
        found = sampled_inference.sweep(recipe)
    results: dict[str, Result] = {
        'all edges': Trained(scores=[100 * score for score in found.full_scores])}
    for strategy in STRATEGIES:
        for cell in found.of(strategy):
            results[key(strategy, cell.num_samples)] = Trained(
                sampling_rate=cell.sampling_rate, scores=[100 * score for score in cell.scores],
                lost=found.loss(cell))
            if cell.sampling_rate == 1:
                break
    swept = Swept(
        name, recipe.hidden, results, metric=found.metric,
        mean_degree=found.graph['edges'] / found.graph['nodes'],
        least={strategy: found.least(strategy, MAX_LOSS) for strategy in STRATEGIES},
        chosen=found.chosen)
    if name not in bench.report.graphs:
        bench.report.graphs[name] = found.graph
        bench.note(
            f'- {name}: {recipe.layers} layers, {recipe.epochs} epochs, learning rate '
            f'{recipe.lr:g}, weight decay {recipe.weight_decay:g}, dropout {recipe.dropout:g}.')
        bench.report.section('Share of the edges read, %', Rates).cells.append(swept)
    bench.report.section(str(model).upper(), Losses, width='hidden').cells.append(swept)


# The loader -------------------------------------------------------------------------------------

class Curves(Section):
    """Test scores, the points that the loader loses, and the difference of the loss curves."""

    def summary(self) -> list[dict[str, Any]]:
        rows = []
        for cell in self.cells:
            found = {name: trained(cell, name) for name in cell.results}
            pairs = list(zip(found[LOADER].curve, found[PLAIN].curve, strict=True))
            rows.append({
                'graph': cell.graph,
                **{name: result.mean for name, result in found.items()},
                'lost': found[FULL].mean - found[LOADER].mean,
                'curves_differ': max(abs(a - b) for a, b in pairs),
                'last_losses_differ': abs(pairs[-1][0] - pairs[-1][1]),
                'seeds_differ': max(  # for comparison
                    statistics.stdev(losses) if len(losses) > 1 else 0.0
                    for losses in zip(*found[PLAIN].losses, strict=True)),
            })
        return rows

    def markdown(self) -> str:
        rows = [[
            cell.graph, *(trained(cell, name).scores_text() for name in cell.results),
            f"{row['lost']:+.2f}", *(f'{row[key]:.3f}' for key in (
                'curves_differ', 'last_losses_differ', 'seeds_differ'))]
            for row, cell in zip(self.summary(), self.cells, strict=True)]
        head = ['graph', *self.names(), 'lost, points', 'losses differ by at most', 'at the end',
                'deviation over seeds']
        missed = [row['graph'] for row in self.summary() if row['lost'] > MAX_LOSS]
        return self.titled(
            head, rows, '', f'The loader loses at most {MAX_LOSS:g} point on '
            f'{len(self.cells) - len(missed)} of {len(self.cells)}'
            + (f"; more on {', '.join(missed)}." if missed else '.'))


def loader(bench: Bench, name: str, model: str | None) -> None:
    args, ways = bench.args, dict(WAYS)
    try:
        _minibatch.pyg_backend()
    except _graphs.Missing as reason:
        bench.report.left_out[PYG] = str(reason)
        del ways[PYG]
    options = ['--fanout', ','.join(map(str, args.fanout))]
    if name not in COLLECTIONS:
        options += ['--size', 'small', '--batch-size', '256']
    results: dict[str, Result] = {}
    for way, some in ways.items():
        epochs = args.epochs if way != FULL else 40 if args.quick else None
        given = argparse.Namespace(**{**vars(args), 'epochs': epochs})
        with arguments(name, given, model, *options, *some) as line:
            found = fastgl_training.main(line)
        results[way] = Trained(
            1e3 * found.epoch_seconds, scores=found.accuracies,
            losses=[[point.loss for point in run] for run in found.runs])
    bench.report.graphs[name] = found.graph
    bench.report.section(str(model).upper(), Curves).cells.append(Cell(name, 0, results))


# Attention --------------------------------------------------------------------------------------

def gat(bench: Bench, name: str, model: str | None) -> None:
    with arguments(name, bench.args, model) as line:
        graph, found = gat_training.compare(gat_training.parse(line))
    bench.report.graphs[name] = graph
    results: dict[str, Result] = {
        side: Trained(1e3 * outcome.epoch_seconds, count=sum(outcome.epochs),
                      scores=outcome.accuracies) for side, outcome in found.items()}
    bench.add('Test accuracy, %', name, bench.args.epochs or 0, results, kind=Scores,
              label='epochs')
    bench.add(TIMES, name, 0, results, label='', versus=[Versus('PyG', 'pyg_fast', ['PyG'])])


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
        BENCHES[system], __doc__, argv, known_graphs=known, notes=None,
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
