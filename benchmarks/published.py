"""Layers in the manner of what people publish, accelerated: beside PyG, eager and compiled.

python -m benchmarks published                       everything below
python -m benchmarks published --quick               a minute or less
python -m benchmarks published --eager-only          without torch.compile, which takes long
python -m benchmarks published --layers GRAND,NGCF   only some
python -m benchmarks published --sizes molecules     a batch of molecules; also hubs, real graphs
python -m benchmarks published --before TREE         a second built checkout beside it

PyG's step and ours alternate, and change their order at each round. The ratio is the median of the
rounds' ratios, with a bootstrap interval; beside it that of PyG's step to PyG's step.
"""
import copy
import functools
import itertools
import math
import random
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import pyg_fast

from . import _graphs, _harness
from ._harness import Bench, Cell, Option, Result
from ._published_inputs import KINDS, Inputs, Published
from ._published_layers import LAYERS
from .hubs import Hub
from .layers import (
    COMPILED,
    KINK,
    OURS_CAPTURED,
    OURS_COMPILED,
    PREPARED,
    PYG,
    captured,
    compiled,
    step_error,
    steps,
    warm,
)

OURS = 'ours'
OURS_BOTH, PYGS_BOTH = f'{OURS_COMPILED}, CUDA graph', f'{COMPILED}, CUDA graph'
RECORDED = {OURS_BOTH: OURS_COMPILED, PYGS_BOTH: COMPILED}  # and of what
ALL_OURS = (OURS, PREPARED, OURS_CAPTURED, OURS_COMPILED, OURS_BOTH)
ALL_PYGS = (PYG, COMPILED, PYGS_BOTH)
GOAL = 0.97  # of PyG's time over ours
SAME = (0.98, 1.02)  # where the ratio of PyG's step to itself must lie
ATTEMPTS = 3
SIZES = ('molecules', 'hubs', 'Computers', 'tolokers')
RIGHT, WRONG = 'holds', 'fails'
KERNEL = 'kernel'  # in a layer's report
NOTE = (
    'A step is forward and backward, float32, wall time with Python. Ours: pyg_fast.accelerate of '
    "the same layer on the same plain edge_index; its result and gradients are compared with PyG's "
    f'in float64. "{PREPARED}": a prepared graph, and so are "{OURS_CAPTURED}", a whole step, and '
    f'"{OURS_COMPILED}", whose step is also recorded as a CUDA graph, as is that of "{COMPILED}". '
    'PyG / ours: the median of the ratios of alternating rounds with its 95 % bootstrap interval; '
    'PyG / PyG: the same of two steps of PyG, measured '
    f'again (up to {ATTEMPTS} times) where it is outside {SAME[0]} to {SAME[1]}. The goal '
    f'fails if the upper end of the interval is below {GOAL}. Torch.compile runs in its '
    'default mode, compilation is not counted. The layers were written for this benchmark: '
    'benchmarks/_published_*.py. Kinds, by what a layer does beside a map of node and edge '
    'features and an aggregation by name: '
    f"{'; '.join(f'{kind}: {does}' for kind, does in KINDS.items())}.")


def molecules(count: int) -> tuple[Tensor, int]:
    """Trees with rings, about 27 atoms and 60 directed edges each."""
    draw, ends, first = random.Random(0), [], 0
    for _ in range(count):
        size = max(4, int(draw.gauss(27, 8)))
        ends += [(first + k, first + draw.randrange(max(0, k - 3), k)) for k in range(1, size)]
        ends += [(first + k, first + (k + 5) % size)
                 for k in draw.sample(range(size), size // 9 + 1)]
        first += size
    edges = torch.tensor(ends).t()
    return torch.cat([edges, edges.flip(0)], 1), first


def interval(ratios: Sequence[float], draws: int = 1000) -> tuple[float, float, float]:
    """The median, and both ends of its 95 % interval by bootstrap."""
    values = torch.tensor(ratios, dtype=torch.double)
    generator = torch.Generator().manual_seed(0)
    drawn = values[torch.randint(len(ratios), (draws, len(ratios)), generator=generator)]
    low, high = drawn.quantile(0.5, 1).quantile(
        torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return float(values.quantile(0.5)), low, high


class Case:
    """A layer on a graph: a step of each contender."""

    def __init__(self, layer: Published, inputs: Inputs, prepared: Inputs) -> None:
        self.published, self.inputs, self.prepared = layer, inputs, prepared
        torch.manual_seed(0)
        self.layer = layer.make(inputs.x.size(1)).to(inputs.x.device)
        self.grad = _graphs.normal(inputs.x.device)(*inputs.x.shape)
        self.accelerated: torch.nn.Module | None = None

    def step(
        self, name: str, dtype: torch.dtype = torch.float32,
    ) -> Callable[[], tuple[Tensor, ...]]:
        layer = copy.deepcopy(self.layer).to(dtype)
        if name == OURS_COMPILED:  # Another backend would compile PyG's code.
            layer = pyg_fast.compile(layer)
        elif name in ALL_OURS:
            layer = pyg_fast.accelerate(layer)
            if name == OURS:
                self.accelerated = layer
        inputs = self.prepared if name in ALL_OURS and name != OURS else self.inputs
        given = tuple(inputs.of(self.published.inputs.split(), dtype))
        leaves = [*(t for t in given if t.requires_grad), *layer.parameters()]
        run = layer if name in ALL_OURS else compiled(name, layer)
        step = steps(run, [given], leaves, self.grad.to(dtype))
        return captured(step) if name == OURS_CAPTURED else warm(step)

    @property
    def runs(self) -> str:
        """What ran the last step of the layer: a kernel, code over blocks of edges, or PyG's code
        and why."""
        assert self.accelerated is not None
        reports = pyg_fast.accelerate_report(self.accelerated)
        return ' and '.join(sorted({
            report.how or brief(report.ran or f"PyG's code: {report.reason or 'not called'}")
            for report in reports}))

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        return self.step(PYG, torch.double)()

    def error(self, outputs: Sequence[Tensor]) -> float:
        """Of which 1 is allowed."""
        return step_error(outputs, self.expected, None if self.published.ties else KINK)

    def checked(
        self, name: str, outputs: Sequence[Tensor], by_pyg: Sequence[Tensor],
    ) -> float:
        """The error of one of ours: twice that of PyG's in float32 is allowed."""
        error = self.error(outputs) / max(1.0, 2 * self.error(by_pyg))
        if not error <= 1:
            raise _harness.Incorrect(f'{name}: {error:.3g} times the error allowed')
        return error


def brief(reason: str) -> str:
    """A reason for a cell of a table: files by name alone."""
    reason = re.sub(r'"[^"\n]*/([^"/\n]+)"', r'\1', reason.replace('|', '/'))
    return textwrap.shorten(reason, 160, placeholder=' ...')


def shares(cells: Iterable[Cell]) -> str:
    """How many layers of a size run as kernels, of all and of each kind."""
    ran = {cell.graph: cell.facts['runs'] == KERNEL for cell in cells}
    by_kind = {kind: [ran[name] for name in ran if LAYERS[name].kind == kind] for kind in KINDS}
    parts = [f'{kind} {sum(of)} of {len(of)}' for kind, of in by_kind.items() if of]
    return f"{sum(ran.values())} of {len(ran)} run as kernels: {', '.join(parts)}."


def mean_ratios(cells: Sequence[Cell]) -> str:
    """Geometric means over the layers that have both of what is compared."""
    found = {'PyG / ours': [
        cell.facts['PyG / ours'] for cell in cells if 'PyG / ours' in cell.facts]}
    for theirs, ours, of in (
            *itertools.product((PYG,), ALL_OURS[1:], ('median_ms',)),
            *itertools.product((COMPILED,), ALL_OURS, ('median_ms',)),
            *itertools.product((PYGS_BOTH,), (OURS_CAPTURED, OURS_BOTH), ('median_ms',)),
            (PYG, OURS, 'peak_bytes')):
        pairs = [
            [getattr(cell.results.get(each), of, None) for each in (theirs, ours)]
            for cell in cells]
        label = f'{theirs} / {ours}' + ', memory' * (of == 'peak_bytes')
        found[label] = [one / two for one, two in pairs if one and two]
    best = [[min((cell.results[each].median_ms or math.inf for each in some
                  if each in cell.results), default=math.inf) for some in (ALL_PYGS, ALL_OURS)]
            for cell in cells]
    found['the best of PyG / the best of ours'] = [
        one / two for one, two in best if math.isfinite(one) and math.isfinite(two)]
    told = [f'{label} {statistics.geometric_mean(values):.2f} ({len(values)} layers)'
            for label, values in found.items() if values]
    return f" Geometric means: {', '.join(told)}." * bool(told)


def peak(run: Callable[[], Any], cuda: bool) -> int | None:
    if not cuda:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def rounds(
    runs: dict[str, Callable[[], Any]], bench: Bench,
) -> tuple[dict[str, list[float]], list[float]]:
    """The times of all contenders, and those of a second step of PyG in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    again: list[float] = []
    timed = functools.partial(_harness._wall_time, device=bench.device)
    round_ms = sum(timed(run) for run in runs.values())  # warms up too
    most = int(1e3 * bench.args.seconds / round_ms)
    count = min(bench.args.rounds, max(bench.args.least, most))
    with _harness._no_garbage_collection():
        for number in range(count):
            order = [*runs] if number % 2 else [*runs][::-1]
            for name in order:
                times[name].append(timed(runs[name]))
            if PYG in runs:
                again.append(timed(runs[PYG]))
    return times, again


def ratios(times: dict[str, list[float]], again: Sequence[float]) -> dict[str, float | str]:
    """PyG's time by ours, and by that of PyG's second steps."""
    same = interval([a / b for a, b in zip(times[PYG], again, strict=True)])
    median, low, high = interval([a / b for a, b in zip(times[PYG], times[OURS], strict=True)])
    return {
        'PyG / ours': median, '95 %': f'{low:.2f} to {high:.2f}', 'PyG / PyG': same[0],
        'goal': RIGHT if high >= GOAL else WRONG}


def run_cell(bench: Bench, size: str, name: str, inputs: Inputs, prepared: Inputs) -> None:
    case = Case(LAYERS[name], inputs, prepared)
    eager = bench.args.eager_only or bench.quick
    names = [OURS, PREPARED, *[OURS_CAPTURED] * bench.cuda, PYG]
    names += [OURS_COMPILED, COMPILED] * (not eager)
    names += [*RECORDED] * (bench.cuda and not eager)
    if bench.turns:
        names = [OURS]
    made: dict[str, Callable[[], Any]] = {}
    results: dict[str, Result] = {}
    for each in names:
        if each in RECORDED and RECORDED[each] not in made:
            continue  # It did not compile.
        results[each] = result = Result()
        try:
            known = made.get(RECORDED.get(each, ''))
            made[each] = run = captured(known) if known else case.step(each)
            result.peak_bytes = peak(run, bench.cuda)
        except RuntimeError as error:  # Inductor's, or the memory's
            if each == OURS and not bench.turns:
                raise
            made.pop(each, None)
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            result.note = f"{'OOM' if full else 'failed'}: {str(error).strip()[:100]}"
            _harness.free(bench.cuda)
    facts: dict[str, Any] = {}
    if PYG in made:
        for each in ALL_OURS:
            if each in made:
                results[each].error = case.checked(each, made[each](), made[PYG]())
    for _ in range(ATTEMPTS if made else 0):
        times, again = rounds(made, bench)
        for each, values in times.items():
            result = results[each]
            result.median_ms, result.count = float(torch.tensor(values).quantile(0.5)), len(values)
            result.min_ms, result.max_ms = min(values), max(values)
        if PYG not in times:
            break
        facts = ratios(times, again)
        if bench.quick or SAME[0] <= facts['PyG / PyG'] <= SAME[1]:
            break
    if not bench.turns:
        facts |= {'kind': case.published.kind, 'runs': case.runs}
    rivals = [each for each in ALL_PYGS if each in names]
    bench.add(
        f'A training step, {size}', name, inputs.x.size(1), results, ours=OURS, rivals=rivals,
        label='channels', facts=facts, memory=True,
        pairs=[(PREPARED, PYG), (OURS_CAPTURED, PYG), (OURS_COMPILED, COMPILED),
               (OURS_BOTH, PYGS_BOTH)])
    torch._dynamo.reset()
    _harness.free(bench.cuda)


def graph_of(bench: Bench, size: str) -> tuple[Tensor, int] | None:
    if size == 'molecules':
        edge_index, num_nodes = molecules(bench.args.molecules)
        return edge_index.to(bench.device), num_nodes
    if size == 'hubs':
        hub = Hub.make(bench.args.nodes, bench.args.edges, 15, bench.device)
        return hub.edge_index, hub.num_nodes
    for graph in _graphs.load_each([size], bench.device, bench.report.left_out):
        return graph.edge_index, graph.num_nodes
    return None


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'published', __doc__, argv,
        layers=_harness.names('layer', tuple(LAYERS), {
            'quick': ('molecule GIN', 'EdgeConv max'), 'usual': tuple(LAYERS)}),
        sizes=_harness.names('size', SIZES, SIZES),
        width=Option({'quick': 8, 'usual': 64}, help='channels'),
        molecules=Option({'quick': 4, 'usual': 112}, help='in a batch'),
        nodes=Option({'quick': 200, 'cuda': 100_000, 'cpu': 20_000}, help='with hubs'),
        edges=Option({'quick': 1_000, 'cuda': 1_500_000, 'cpu': 300_000}, help='with hubs'),
        rounds=Option({'quick': 3, 'usual': 100}, help='at most'),
        least=Option({'quick': 3, 'usual': 5}, help='rounds of long steps'),
        seconds=Option({'quick': 1, 'usual': 2}, help='of rounds'),
        eager_only=Option(False, help='without torch.compile'), notes=[NOTE])
    for size in bench.args.sizes:
        found = graph_of(bench, size)
        if found is None:
            continue
        edge_index, num_nodes = found
        bench.report.graphs[size] = {
            'nodes': num_nodes, 'edges': edge_index.size(1),
            'largest_degree': int(edge_index[1].bincount().max())}
        inputs = Inputs.make(edge_index, num_nodes, bench.args.width)
        prepared = inputs.prepared()
        for name in bench.args.layers:
            run_cell(bench, size, name, inputs, prepared)
        del inputs, prepared
    sections = bench.report.sections if not bench.turns else []
    goals = [cell.facts['goal'] for section in sections for cell in section.cells
             if 'goal' in cell.facts]
    bench.note(f'The goal holds in {goals.count(RIGHT)} of {len(goals)} rows.', *(
        f'{section.title}: {shares(section.cells)}{mean_ratios(section.cells)}'
        for section in sections))
    bench.finish()


if __name__ == '__main__':
    main()
