"""MaxK-GNN (ASPLOS 2024), rerun."""
import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from pyg_fast.nn import MaxK

from .. import _graphs, _harness, accuracy, maxk
from .._harness import Result
from ..accuracy import maxk_training
from ._exhibit import SIZES, Figure, Maker, Paper, Run, fastest, ratio

GRAPHS, QUICK_GRAPHS = ('ogbn-arxiv', 'ddi', 'Reddit'), ('ogbn-arxiv', 'Reddit')
KS, QUICK_KS = (8, 16, 32, 64, 128), (8, 32)
UNITS = (4, 16, 64)
WIDTH = 256
K = 32  # where one has to do
MODES = {maxk.FORWARD: maxk.forwards, maxk.GRADIENT: maxk.gradients}
RIVALS = [name for names in (maxk.CUSPARSE | maxk.TORCH).values() for name in names]
DENSE_DEGREE = 50  # the mean degree above which the authors average
# The speed-ups of their backward kernel, averaged over such graphs.
OVER_CUSPARSE = {8: 6.93, 16: 5.39, 32: 2.55, 64: 1.46}
OVER_GNNADVISOR = {8: 9.57, 16: 7.46, 32: 3.55, 64: 2.04}
MODELS = (('sage', (8, K, 128)), ('gcn', (K,)), ('gin', (K,)))  # with every k of a training
LAYERS = 4  # of their networks for Reddit
# By system that they compare with: the speed-up, and its limit by Amdahl's law.
WHOLE_STEPS = {'DGL': (3.22, 5.52), 'GNNAdvisor': (4.24, 7.27)}
SCATTER_LIMIT = 2.0  # GiB of messages that PyG may store
TRAINED, QUICK_TRAINED = ('Cora', 'Computers', 'CS', 'planted'), ('planted',)
ACCURACY_KS = (8, K)
EPOCHS, QUICK_EPOCHS = 200, 5
RUNS, QUICK_RUNS = 2, 1
STAGES = (0.1, 0.25, 0.5, 1.0)  # of a training


# Approximation ----------------------------------------------------------------------------------

def error_of_square(
    hidden: int, nonlinearity: Callable[[Tensor], Tensor], device: torch.device | str = 'cpu',
) -> float:
    """How far trained networks with one hidden layer are from a parabola: median of nine."""
    generator = torch.Generator().manual_seed(0)

    def draw(bound: float, *size: int) -> Tensor:
        uniform = torch.rand(9, *size, generator=generator, dtype=torch.float64)
        return ((2 * uniform - 1) * bound).to(device).requires_grad_()

    first, shift, second, end = (
        draw(1, 1, hidden), draw(1, 1, hidden), draw(hidden**-0.5, hidden, 1),
        draw(hidden**-0.5, 1, 1))

    def errors(points: int) -> Tensor:
        x = torch.linspace(-1, 1, points, dtype=torch.float64, device=device).view(-1, 1)
        out = nonlinearity(x * first + shift) @ second + end
        return (out - x.square()).square().mean((1, 2))

    optimizer = torch.optim.Adam([first, shift, second, end], lr=0.02)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    for _ in range(300):
        optimizer.zero_grad()
        errors(200).sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float(errors(999).sqrt().median())


def parabola(run: Run) -> None:
    exhibit = run.exhibit(
        'Parabola: approximated by networks with one hidden layer', width='hidden units',
        shows='MaxK approximates any continuous function: a network with one hidden layer comes '
        'closer to y = x² the more hidden units it has.',
        differs='Root mean square errors over [-1, 1], medians of nine networks, k a quarter of '
        'the hidden units; networks and training are our own.')
    for hidden in UNITS[:2] if run.quick else UNITS:
        exhibit.line('parabola', hidden, here={
            'MaxK, error': error_of_square(hidden, MaxK(hidden // 4), run.device),
            'ReLU, error': error_of_square(hidden, torch.relu, run.device)})


# Kernels ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Kernels:
    """What was measured of the aggregations on one graph, by direction and k."""

    graph: str
    num_nodes: int
    num_edges: int
    results: Mapping[str, Mapping[int, dict[str, Result]]]

    @property
    def mean_degree(self) -> float:
        return self.num_edges / self.num_nodes

    def speedup(self, mode: str, k: int) -> Figure:
        """That of ours over the best rival, which multiplies all columns."""
        results = self.results[mode][k]
        return ratio(fastest(results, *RIVALS), fastest(results, maxk.OURS))


def _ks(run: Run) -> tuple[int, ...]:
    return QUICK_KS if run.quick else KS


@functools.cache
def kernels(run: Run, name: str) -> Kernels | None:
    """None if the graph is not at hand."""
    graph = run.like(name) if name in SIZES else next(run.real([name]), None)
    if graph is None:
        return None
    case = maxk.Case(graph, torch.float32, WIDTH)
    ours = {maxk.OURS, maxk.ORDERED}
    return Kernels(graph.name, graph.num_nodes, graph.num_edges, {
        mode: maxk.measure_over_k(
            {k: [contender for contender in make(case, k) if contender.name in ours]
             for k in _ks(run)},
            maxk.all_columns(case, mode), run.kernel)
        for mode, make in MODES.items()})


def traffic(run: Run) -> None:
    exhibit = run.exhibit(
        f'Memory traffic: k = {K}',
        shows='Their kernels move about a tenth of the bytes that a product with all columns '
        'moves, as a summary of the paper has it.',
        differs='No profiler here: GB are the bytes that the edges ask for (values and column '
        'numbers of each neighbour; what a backward adds to counts once), whichever memory serves '
        'them, and TB/s these over the time.')
    found = kernels(run, 'Reddit')
    assert found is not None
    results, edges = {mode: cells[K] for mode, cells in found.results.items()}, found.num_edges
    forward, backward = results[maxk.FORWARD], results[maxk.GRADIENT]
    dense, sparse = WIDTH * 4, K * (4 + 1)  # bytes; a column number below 256 has one
    for title, cell, names, asked in (
            (f'all columns, {run.rival}', forward, RIVALS, dense),
            ('all columns, ours', forward, [maxk.DENSE], dense),
            ('forward, ours', forward, [maxk.OURS], sparse),
            ('backward, ours', backward, [maxk.OURS], sparse),
            ('backward, ours, deterministic', backward, [maxk.ORDERED], sparse)):
        time = fastest(cell, *names)
        exhibit.line(
            f'{found.graph}: {title}', 0,
            results={name: cell[name] for name in names if name in cell},
            here={'GB': asked * edges / 1e9, 'ms': time, 'TB/s': ratio(asked * edges / 1e9, time)})


def over_k(run: Run) -> None:
    over = f'over {run.rival}'
    exhibit = run.exhibit(
        f'Kernels: over k, {WIDTH} columns', width='k',
        shows='Over 24 graphs: the smaller k, the faster are both kernels than a product with all '
        'columns. The figures quoted are the averages that the authors give for their backward on '
        f'those of a mean degree above {DENSE_DEGREE}.',
        differs='Fewer graphs. Speed-ups are over the best algorithm of '
        f'{run.rival} for each graph and direction, with its preprocessing where it has one, graph '
        'and transpose prepared for all; means are geometric. The backward is the usual, atomic '
        'one; a deterministic one stands beside it. GNNAdvisor cannot be had here.')
    dense = []
    for name in QUICK_GRAPHS if run.quick else GRAPHS:
        found = kernels(run, name)
        if found is None:
            continue
        for k, forward in found.results[maxk.FORWARD].items():
            backward = found.results[maxk.GRADIENT][k]
            exhibit.line(
                found.graph, k,
                results={f'{mode}: {contender}': result
                         for mode, cell in ((maxk.FORWARD, forward), (maxk.GRADIENT, backward))
                         for contender, result in cell.items()},
                here={
                    'forward, ms': fastest(forward, maxk.OURS),
                    f'forward {over}': found.speedup(maxk.FORWARD, k),
                    'backward, ms': fastest(backward, maxk.OURS),
                    'deterministic, ms': fastest(backward, maxk.ORDERED),
                    f'backward {over}': found.speedup(maxk.GRADIENT, k)})
        if found.mean_degree > DENSE_DEGREE:
            dense.append(found)
    for k in _ks(run):
        exhibit.line(
            f'mean, degree above {DENSE_DEGREE}', k,
            paper={
                name: figures[k] for name, figures in (
                    ('backward over cuSPARSE', OVER_CUSPARSE),
                    ('backward over GNNAdvisor', OVER_GNNADVISOR)) if k in figures},
            here={
                f'{name} {over}': _mean([found.speedup(mode, k) for found in dense])
                for name, mode in (('forward', maxk.FORWARD), ('backward', maxk.GRADIENT))})


def _mean(figures: list[Figure]) -> Figure:
    numbers = [figure for figure in figures if not isinstance(figure, str)]
    return _harness.geometric_mean(numbers) if numbers else '–'


def selection(run: Run) -> None:
    exhibit = run.exhibit(
        f'Selection: of {WIDTH} columns', width='k',
        shows='What selecting the k largest of each row costs beside the aggregations that it '
        'makes cheaper.',
        differs='Random numbers in as many rows as the graph has nodes; the share is that of one '
        'selection in a selection, a forward and a backward aggregation.')
    found = kernels(run, 'Reddit')
    assert found is not None
    case = maxk.Selection(found.num_nodes, WIDTH, torch.float32, run.device)
    for k, forward in found.results[maxk.FORWARD].items():
        results = _harness.measure(case.contenders(k), run.kernel)
        ours = fastest(results, maxk.OURS)
        times = [ours, fastest(forward, maxk.OURS),
                 fastest(found.results[maxk.GRADIENT][k], maxk.OURS)]
        whole = sum(time for time in times if not isinstance(time, str))
        exhibit.line(found.graph, k, results=results, here={
            'selection, ms': ours,
            'torch.topk, ms': fastest(results, maxk.TOPK),
            'copy of as many bytes, ms': fastest(results, maxk.COPY),
            'share': ratio(ours, whole)})


# Training ---------------------------------------------------------------------------------------

def training(run: Run) -> None:
    hidden, layers = (maxk.QUICK_HIDDEN, 2) if run.quick else (WIDTH, LAYERS)
    exhibit = run.exhibit(
        f'Training: steps, {layers} layers, hidden {hidden}', width='k',
        shows="Whole training comes near the limit that Amdahl's law sets; the figures quoted are "
        'those that the abstract gives for Reddit.',
        differs="Whole steps with Adam on random features against PyG's layers on their best "
        'input, and against ours with ReLU; the limit is that over ours with ReLU, if its '
        'aggregations took no time. DGL and GNNAdvisor cannot be had here.')
    for rival, (speedup, limit) in WHOLE_STEPS.items():
        exhibit.line('Reddit', 0, paper={f'over {rival}': speedup, f'limit, {rival}': limit})
    graph = run.like('Reddit')
    for model, some in MODELS[:1] if run.quick else MODELS:
        case = maxk.Training(graph, model, hidden, layers)
        ours = maxk.MAXK if model == 'gcn' else maxk.MAXK_ROOT
        cells = maxk.measure_over_k(
            {k: [contender for contender in case.of_k(k) if contender.name == ours]
             for k in some if k <= hidden},
            case.others(SCATTER_LIMIT), run.wall)
        for k, results in cells.items():
            relu, time = fastest(results, maxk.RELU), fastest(results, ours)
            part = fastest(results, maxk.AGGREGATIONS)
            rest = '–' if isinstance(relu, str) or isinstance(part, str) else max(relu - part, 0.0)
            exhibit.line(f'{graph.name}, {model}', k, results=results, here={
                'step, ms': time,
                'over PyG': ratio(fastest(results, *maxk.PYG), time),
                'over ReLU': ratio(relu, time),
                'limit, ReLU': ratio(relu, rest)})


def _epochs(run: Run) -> int:
    return QUICK_EPOCHS if run.quick else EPOCHS


@functools.cache
def trained(run: Run, name: str) -> maxk_training.Sweep:
    """What training a network with ReLU and with MaxK gave.

    Raises:
        Missing: If the files of a real graph are not there.
    """
    args = argparse.Namespace(
        device=run.args.device, quick=run.quick, model=None, hidden=None,
        epochs=min(_epochs(run), maxk_training.RECIPES[name].epochs))
    with accuracy.arguments(name, args) as line:
        return maxk_training.sweep(maxk_training.parse([
            *line, '--runs', str(QUICK_RUNS if run.quick else RUNS),
            '--k', ','.join(map(str, ACCURACY_KS))]))


def sweeps(run: Run) -> Iterator[tuple[str, maxk_training.Sweep]]:
    for name in QUICK_TRAINED if run.quick else TRAINED:
        try:
            yield name, trained(run, name)
        except _graphs.Missing as reason:
            run.report.left_out[name] = str(reason)


def _recipes(run: Run) -> str:
    return (
        f'Other graphs (planted: a generated one); at most {_epochs(run)} epochs, '
        f'number of seeds: {QUICK_RUNS if run.quick else RUNS}; recipes of '
        'examples/maxk_training.py, the same for ReLU and MaxK. Five seeds and all epochs: '
        'python -m benchmarks.accuracy.')


def convergence(run: Run) -> None:
    exhibit = run.exhibit(
        'Convergence: test scores over epochs, %', width='epoch',
        shows='How training with MaxK converges beside training with ReLU.',
        differs=_recipes(run))
    for graph, found in sweeps(run):
        epochs = len(found.outcomes[0].runs[0])
        for epoch in sorted({max(1, round(stage * epochs)) for stage in STAGES}):
            scores = {
                str(outcome.variant): [100 * points[epoch - 1].test[0] for points in outcome.runs]
                for outcome in found.outcomes}
            exhibit.line(
                graph, epoch,
                results={name: accuracy.Trained(scores=some) for name, some in scores.items()},
                here={name: statistics.fmean(some) for name, some in scores.items()})


def scores(run: Run) -> None:
    exhibit = run.exhibit(
        'Accuracy: test scores and time per epoch', width='k',
        shows='Accuracy is comparable with that of the best networks of the time, while training '
        'takes a fraction of the time; more than that could not be read.',
        differs=f'{_recipes(run)} Scores in %, at the epoch of the best validation score. Most of '
        'these graphs are small: an epoch waits for launches or is linear maps, as the limit by '
        "Amdahl's law shows.")
    for name, found in sweeps(run):
        results = accuracy.outcomes(found, 0)
        relu = results[accuracy.RELU]
        for outcome in found.outcomes:
            if outcome.variant.k is None:
                continue
            ours = results[str(outcome.variant)]
            exhibit.line(
                name, outcome.variant.k,
                results={accuracy.RELU: relu, str(outcome.variant): ours},
                here={
                    'ReLU': relu.mean, 'MaxK': ours.mean, 'difference': ours.mean - relu.mean,
                    'speed-up': found.speedup(outcome), 'limit': found.limit})


PAPER = Paper(
    'maxk', 'MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph Neural Networks '
    'Training', 'ASPLOS 2024, https://arxiv.org/abs/2312.08656', 'one NVIDIA A100 (80 GB)',
    [Maker('Parabola', parabola), Maker('Memory traffic', traffic), Maker('Kernels', over_k),
     Maker('Selection', selection), Maker('Training', training),
     Maker('Convergence', convergence), Maker('Accuracy', scores)],
    note='Figures of the paper were read in its abstract and in the README of '
    'https://github.com/harveyp123/MaxK-GNN. Its tables and plots could not be had here: what '
    'these two and others tell of its evaluation is rerun by subject, which of Tables 2, 4 and 5 '
    "and Figures 4 and 8 to 10 shows what is not known, nor are their other figures. The authors' "
    'kernels, DGL and GNNAdvisor cannot be had here.')
