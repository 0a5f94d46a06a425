"""The core of all benchmarks: command line, timing, checks, tables and records.

A benchmark declares its options (:class:`Option`) and, for each cell, its contenders
(:class:`Contender`); :class:`Bench` parses, measures, prints and writes.
"""
import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from . import _cusparse, _graphs
from ._turns import BEFORE, Before, Turns, beside

ROOT = Path(__file__).parent.parent
DTYPES = {
    name: getattr(torch, name) for name in ('float32', 'float64', 'float16', 'bfloat16')
}
_SPIN_PER_MS = 2_000_000  # clock cycles
_MAX_SPIN_MS = 5.0
_SHORT = 0.02  # seconds: a run then comes straight after one of its own, in caches it filled
_SOLO_SHARE = 0.25  # of the device's memory


@dataclasses.dataclass
class Contender:
    """One implementation that a cell measures.

    ``make`` prepares the work and returns the function to time, which makes ``calls`` steps. If
    ``ours``, a failure or a wrong result stops the benchmark. ``check`` returns the error of an
    output divided by the allowed error.
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    ours: bool = False
    check: Callable[[Any], float] | None = None
    calls: int = 1


@dataclasses.dataclass
class Result:
    """The measurement of one contender, in milliseconds and bytes.

    ``host_ms`` is the host time of a call (only beside device times), ``first_peak_bytes`` the
    peak memory of the first call, with the caches that it fills, ``error`` the largest error
    divided by the allowed error.
    """

    median_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    count: int = 0
    host_ms: float | None = None
    peak_bytes: int | None = None
    first_peak_bytes: int | None = None
    error: float | None = None
    note: str | None = None

    def text(self) -> str:
        if self.median_ms is None:
            return str(self.note).split(':')[0]
        marks = ('†' if self.error is not None and self.error > 1 else '') + (
            '‡' if self.count == 1 else '')
        return milliseconds(self.median_ms) + marks


@dataclasses.dataclass
class Settings:
    """How to measure: see ``--repeats``, ``--rival-limit`` and ``--budget``; ``device_time``: on
    the GPU, without launch overhead, otherwise wall time until the work is done.
    """

    device: torch.device
    repeats: int
    limit: float
    budget: float
    device_time: bool = False


class Incorrect(Exception):
    """A result of pyg_fast is wrong: its time means nothing."""


def measure(contenders: Sequence[Contender], settings: Settings) -> dict[str, Result]:
    """Checks and warms up every contender, then times them in turns; may raise Incorrect."""
    cuda = settings.device.type == 'cuda'
    results = {contender.name: Result() for contender in contenders}
    ready: list[tuple[Contender, Callable[[], Any], int, float]] = []
    for contender in contenders:
        result = results[contender.name]
        try:
            run, seconds = _first_runs(contender, result, settings)
        except (RuntimeError, AssertionError) as error:
            if contender.ours:
                raise
            full = isinstance(error, torch.cuda.OutOfMemoryError)
            result.note = f"{'OOM' if full else 'failed'}: {_first_line(error)}"
        else:
            if run is not None:
                share = contender.ours or seconds * settings.repeats <= settings.budget
                count = settings.repeats if share else min(
                    settings.repeats, max(3, int(settings.budget / seconds)))
                ready.append((contender, run, count, seconds))
                continue
        free(cuda)

    timings: dict[str, list[float]] = {contender.name: [] for contender, *_ in ready}
    hosts: dict[str, list[float]] = {contender.name: [] for contender, *_ in ready}

    def once(contender: Contender, run: Callable[[], Any]) -> None:
        if cuda and settings.device_time:
            spin = _spin(hosts[contender.name], results[contender.name])
            elapsed, host = _device_time(run, spin)
            hosts[contender.name].append(host)
        else:
            elapsed = _wall_time(run, settings.device)
        timings[contender.name].append(elapsed / contender.calls)

    large = cuda and _SOLO_SHARE * torch.cuda.get_device_properties(settings.device).total_memory
    solo = [entry for entry in ready if large and (results[entry[0].name].peak_bytes or 0) > large]
    with _no_garbage_collection():
        for contender, run, count, _ in solo:  # the others would empty torch's cache every time
            result = results[contender.name]
            result.note = 'measured on its own, for its memory'
            free(cuda)
            try:
                run()
                for _ in range(count):
                    once(contender, run)
            except torch.cuda.OutOfMemoryError as error:  # inputs of the others fill the memory
                result.note = f'OOM: {_first_line(error)}'
            free(cuda)
        turns = [entry for entry in ready if entry not in solo]
        for turn in range(max((count for _, _, count, _ in turns), default=0)):
            for contender, run, count, seconds in turns:
                if turn < count:
                    if seconds < _SHORT:
                        run()
                    once(contender, run)
    for name, values in timings.items():
        if not values:
            continue
        result = results[name]
        result.median_ms, result.min_ms, result.max_ms = (
            statistics.median(values), min(values), max(values))
        result.count = len(values)
        if hosts[name]:
            result.host_ms = statistics.median(hosts[name])
    return results


def _first_runs(
    contender: Contender, result: Result, settings: Settings,
) -> tuple[Callable[[], Any] | None, float]:
    """The function to time (``None`` if the first run was too long) and the time of one run."""
    before = _reset_peak(settings.device)
    run = contender.make()
    start = time.perf_counter()
    output = run()
    _synchronize(settings.device)
    seconds = time.perf_counter() - start
    result.first_peak_bytes = _peak_since(before, settings.device)
    if contender.check is not None:
        result.error = contender.check(output)
        if not result.error <= 1:
            message = f'{contender.name}: {result.error:.3g} times the error allowed'
            if contender.ours:
                raise Incorrect(message)
            log(f'  {message}')
            if not math.isfinite(result.error):
                result.error, result.note = None, 'wrong: no number, or another shape'
                return None, seconds
    del output
    if seconds > settings.limit and not contender.ours:
        result.median_ms = result.min_ms = result.max_ms = 1e3 * seconds / contender.calls
        result.count = 1
        result.note = f'over the limit of {settings.limit:g} s: measured once, cold'
        log(f'  {contender.name}: {result.note}')
        return None, seconds
    before = _reset_peak(settings.device)
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    _synchronize(settings.device)
    seconds = max(time.perf_counter() - start, 1e-9)
    result.peak_bytes = _peak_since(before, settings.device)
    if settings.device_time and settings.device.type == 'cuda':
        result.host_ms = 1e3 * host
    return run, seconds


def _spin(hosts: list[float], result: Result) -> float:
    """Milliseconds of waiting on the GPU while the host launches the work."""
    host = max(hosts[-5:]) if hosts else result.host_ms or 0.0
    return min(_MAX_SPIN_MS, 0.05 + 1.5 * host)


def _device_time(run: Callable[[], Any], spin: float) -> tuple[float, float]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(spin * _SPIN_PER_MS))
    launched = time.perf_counter()
    start.record()
    run()
    end.record()
    host = 1e3 * (time.perf_counter() - launched)
    end.synchronize()
    return start.elapsed_time(end), host


def _wall_time(run: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - start)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def free(cuda: bool) -> None:
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()


def _synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> int | None:
    if device.type != 'cuda':
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak_since(before: int | None, device: torch.device) -> int | None:
    return None if before is None else torch.cuda.max_memory_allocated(device) - before


def _first_line(error: BaseException) -> str:
    return str(error).strip().split('\n')[0][:200] or type(error).__name__


# Errors -----------------------------------------------------------------------------------------

def worst(errors: Iterable[float]) -> float:
    return float(torch.tensor(list(errors)).max())  # unlike Python's max, it keeps NaN


def exact(right: bool) -> float:
    """The error of what is either right or wrong."""
    return 0.0 if right else math.inf


def same(*pairs: tuple[Tensor, Tensor]) -> float:
    return exact(all(torch.equal(out, right) for out, right in pairs))


def finite(loss: Tensor) -> float:
    return exact(bool(loss.isfinite()))


def norm_error(outputs: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """The largest error of a norm, divided by ``tolerance``."""
    return worst(
        float((out.double() - right).norm() / (tolerance * right.norm().clamp(min=1e-12)))
        for out, right in zip(outputs, expected, strict=True))


def with_gradients(run: Callable[[], Tensor], leaves: Any, grad: Tensor | None = None) -> Any:
    """A step, which returns the output of ``run`` and its gradients."""
    def step() -> tuple[Tensor, ...]:
        out = run()
        return out.detach(), *torch.autograd.grad(out, leaves, grad)
    return step


def descent(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A step of training, which returns the loss."""
    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()
    return step


def repeated(step: Callable[[], Any], calls: int) -> Callable[[], Any]:
    """A function that makes many steps in one call."""
    def run() -> Any:
        for _ in range(calls - 1):
            step()
        return step()
    return run


# Arguments --------------------------------------------------------------------------------------

def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    result.add_argument('--threads', type=int, help='CPU threads of torch')
    result.add_argument('--repeats', type=positive, help='measurements of each contender')
    result.add_argument(
        '--rival-limit', type=float, metavar='S', default=20.0,
        help='a rival whose first run takes longer is measured by this run only')
    result.add_argument(
        '--budget', type=float, metavar='S',
        help='a rival whose repeats take longer gets fewer repeats, but at least three')
    result.add_argument(
        '--max-edges', type=int, help='larger generated graphs are replaced by a fraction of them')
    result.add_argument('--quick', action='store_true', help='a minute or less')
    result.add_argument(
        '--out', type=Path, metavar='DIR', default=ROOT / 'benchmarks' / 'results')
    return result


def choice(kind: str, known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Reads names between commas."""
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(','))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"got {kind} '{name}', expected some of {', '.join(known)}")
        return names
    return parse


def integers(text: str) -> tuple[int, ...]:
    """Reads positive numbers between commas."""
    numbers = tuple(int(number) for number in text.split(','))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f'got {min(numbers)}, expected at least 1')
    return numbers


def positive(text: str) -> int:
    return integers(text)[0]


def start(args: argparse.Namespace) -> Settings:
    """Fills in the defaults that depend on the device, and seeds torch."""
    if args.device == 'auto':
        args.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.threads = torch.get_num_threads()
    if args.repeats is None:
        args.repeats = 5 if args.quick else 20
    if args.budget is None:
        args.budget = 0.5 if args.device == 'cuda' else 5.0
    torch.manual_seed(0)
    warnings.filterwarnings('ignore', message='Sparse (CSR|invariant)')
    return Settings(torch.device(args.device), args.repeats, args.rival_limit, args.budget)


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of one benchmark. ``default`` may map ``'quick'`` runs, the devices ``'cuda'``
    and ``'cpu'``, and ``'usual'`` for everything else, to values.
    """

    default: Any = None
    parse: Callable[[str], Any] = positive
    help: str = ''
    nargs: str | None = None

    def value(self, args: argparse.Namespace) -> Any:
        found, quick = self.default, args.quick
        while isinstance(found, Mapping):
            if quick and 'quick' in found:
                found, quick = found['quick'], False
            else:
                found = found[args.device if args.device in found else 'usual']
        return found


def names(kind: str, known: Sequence[str], default: Any) -> Option:
    """An option that takes names between commas."""
    return Option(default, choice(kind, known), f"of {', '.join(known)}")


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


class Bench:
    """One benchmark: it parses the command line, measures cells and writes the record.

    ``--parts`` chooses from ``parts``, of which those ``on_request`` run only if they are named.
    ``graphs``: the default of ``--graphs``, which takes ``known_graphs``; ``None``: no such option.
    ``notes`` are lines of the report; ``options`` has further options by their names.
    ``--before`` names a second built checkout, whose figures stand beside ours.
    """

    TIMES = (
        'Times are medians in ms. The contenders of a cell run in turns, and no cache is flushed '
        'between them. {} Ratio: time of the best rival over our time. † less exact than rounding '
        'allows, ‡ one cold run.')
    KERNELS = 'Kernels: device time by CUDA events, without launches; all else: wall time.'

    def __init__(
        self, name: str, about: str | None, argv: Sequence[str] | None = None, *,
        parts: Sequence[str] = (), on_request: Sequence[str] = (), graphs: Any = None,
        known_graphs: Sequence[str] = _graphs.NAMES, notes: Sequence[str] | None = (),
        **options: Option,
    ) -> None:
        line = parser(about or name)
        if parts:
            usual = tuple(part for part in parts if part not in on_request)
            options = {'parts': names('part', parts, usual), **options}
        if graphs is not None:
            options = {'graphs': names('graph', known_graphs, graphs), **options}
        for key, option in options.items():
            flag: dict[str, Any] = (
                {'action': 'store_true'} if option.default is False else
                {'type': option.parse, 'nargs': option.nargs})
            line.add_argument(f"--{key.replace('_', '-')}", help=option.help or None, **flag)
        line.add_argument(
            '--before', type=Path, metavar='TREE', help='a second built checkout, in turns')
        line.add_argument('--in-turns', action='store_true', help=argparse.SUPPRESS)
        self.args = args = line.parse_args(argv)
        self.before: Before | None = None
        self.turns: Turns | None = None
        if args.in_turns:
            self.turns = Turns(sys.stdin, sys.stdout)
            sys.stdout = sys.stderr
        elif args.before is not None:
            given = sys.argv[1:] if argv is None else argv
            self.before = Before(args.before.resolve(), name.replace('-', '_'), given)
            commit = _output('git', '-C', str(args.before), 'rev-parse', 'HEAD')
            args.before = commit or args.before.name
            notes = [*(notes or ()), f'Before: the package of {args.before[:7] or "another tree"}.']
        self.wall = start(args)
        for key, option in options.items():
            if getattr(args, key) is None:
                setattr(args, key, option.value(args))
        self.device, self.cuda, self.quick = self.wall.device, args.device == 'cuda', args.quick
        self.kernel = dataclasses.replace(self.wall, device_time=True)
        how = self.KERNELS if self.cuda else 'All times are wall times.'
        said = [] if notes is None else [self.TIMES.format(how), *notes]
        self.report = Report(name, args, said)

    def has(self, part: str) -> bool:
        return part in self.args.parts

    def few(self, repeats: int) -> Settings:
        """Wall time with fewer repeats."""
        return dataclasses.replace(self.wall, repeats=min(self.wall.repeats, repeats))

    def note(self, *lines: str) -> None:
        self.report.notes += lines

    def run_parts(
        self, parts: Mapping[str, Callable[['Bench', _graphs.Graph], None]],
        graphs: Mapping[str, Any] = {},
    ) -> None:
        """Runs the chosen parts on each of their graphs, which is loaded once for all of them.

        ``graphs``: by part, where ``--graphs`` does not name them.
        """
        wanted = {
            part: self.args.graphs or Option(graphs[part]).value(self.args)
            for part in parts if self.has(part)}
        for graph in self.graphs(dict.fromkeys(itertools.chain(*wanted.values()))):
            for part, names in wanted.items():
                if graph.name.split(' ')[0] in names:
                    parts[part](self, graph)

    def graphs(self, names: Iterable[str] | None = None) -> Iterator[_graphs.Graph]:
        """Loads the graphs one after another and adds them to the record."""
        wanted = self.args.graphs if names is None else names
        for graph in _graphs.load_each(
                wanted, self.device, self.report.left_out, self.args.max_edges):
            self.report.graphs[graph.name] = graph.summary()
            yield graph

    def add(
        self, title: str, graph: str, width: int, results: Mapping[str, Result], *,
        kind: type['Section'] | None = None, ours: str = '', rivals: Sequence[str] = (),
        pairs: Iterable[tuple[str, str]] = (), label: str = 'F', facts: Mapping[str, Any] = {},
        **section: Any,
    ) -> 'Section':
        """Adds a cell to a section, which is made if there is none with this title.

        ``ours`` is compared with each of ``rivals`` and with the best, and so are ``pairs`` of ours
        and a rival. ``label``: name of the widths; ``facts``: further columns; ``section``: as in
        :class:`Section`.
        """
        if self.turns:
            free(self.cuda)
            self.turns.say(
                (title, graph, width), {n: {
                    field.name: getattr(result, field.name)
                    for field in dataclasses.fields(Result)} for n, result in results.items()},
                {name: fact for name, fact in facts.items() if name.startswith('ours')})
        if self.before:
            told = self.before.cell(title, graph, width)
            pairs = [*pairs, *((n, BEFORE + n) for n in told['results'] if n in results)]
            results = beside(results, {n: Result(**r) for n, r in told['results'].items()})
            facts = beside(facts, told['facts'])
        into = self.report.section(title, kind or Section, width=label, **section)
        into.compare(ours, rivals, pairs)
        into.cells.append(Cell(graph, width, dict(results), dict(facts)))
        if not self.turns:
            self.report.save()
            log(f'{title}: {graph}, {into.width}={width}: ' + ', '.join([
                *(f'{name} {result.text()}' for name, result in results.items()),
                *(f'{name} {shown(fact)}' for name, fact in facts.items())]))
        return into

    def measure(
        self, title: str, graph: str, width: int, contenders: Sequence[Contender],
        settings: Settings | None = None, *,
        made: Callable[[dict[str, Result]], Mapping[str, Result]] | None = None,
        facts: Callable[[dict[str, Result]], Mapping[str, Any]] | None = None, **cell: Any,
    ) -> dict[str, Result]:
        """Measures a cell and adds it; ``made`` may extend its results, ``facts`` adds columns.

        The section compares the first contender of ours with the best rival, and with each.
        """
        found = measure(self._of_turn(contenders), settings or self.wall)
        results = dict(made(found)) if made else found
        self.add(title, graph, width, results,
                 facts=facts(results) if facts and not self.turns else {},
                 **self._cell(contenders, cell))
        return results

    def measure_over(
        self, title: str, graph: str, of_k: Mapping[int, Sequence[Contender]],
        shared: Sequence[Contender], settings: Settings, **cell: Any,
    ) -> dict[int, dict[str, Result]]:
        """Measures a cell for each k; contenders in ``shared`` run once for all of them."""
        measured = measure(self._of_turn([
            *(dataclasses.replace(each, name=f'{each.name}, k={k}')
              for k, contenders in of_k.items() for each in contenders), *shared]), settings)
        results: dict[int, dict[str, Result]] = {}
        for k, contenders in of_k.items():
            results[k] = {each.name: measured[f'{each.name}, k={k}'] for each in contenders}
            results[k] |= {each.name: measured[each.name] for each in shared}
            self.add(
                title, graph, k, results[k], **self._cell([*contenders, *shared], dict(cell)))
        return results

    def _of_turn(self, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """What this process measures: as another tree only what is ours, which may be wrong."""
        return contenders if self.turns is None else [
            dataclasses.replace(each, ours=False, check=None) for each in contenders if each.ours]

    @staticmethod
    def _cell(contenders: Sequence[Contender], cell: dict[str, Any]) -> dict[str, Any]:
        cell.setdefault('ours', next((each.name for each in contenders if each.ours), ''))
        cell.setdefault('rivals', [each.name for each in contenders if not each.ours])
        return cell

    def finish(self) -> None:
        if self.before:
            self.before.end()
        if not self.turns:
            self.report.finish()


# Reports ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Cell:
    """One row of a table: the results on one graph at one width."""

    graph: str
    width: int
    results: dict[str, Result]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # what is no time, by column


@dataclasses.dataclass
class Versus:
    """A comparison of ``ours`` with the best of ``rivals``."""

    name: str
    ours: str
    rivals: Sequence[str]

    def best(self, cell: Cell) -> tuple[str, float] | None:
        times = {
            name: time for name in self.rivals
            if name in cell.results and (time := cell.results[name].median_ms) is not None}
        return min(times.items(), key=lambda item: item[1]) if times else None

    def ratio(self, cell: Cell) -> float | None:
        best, ours = self.best(cell), cell.results.get(self.ours)
        if best is None or ours is None or ours.median_ms is None:
            return None
        return best[1] / ours.median_ms


def head_of(name: str) -> str:
    """The column of a contender: all algorithms of cuSPARSE share one."""
    return re.sub(r',? ALG\d( preprocessed)?$', r'\1', name)


def columns_of(names: Iterable[str]) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    for name in names:
        columns.setdefault(head_of(name), []).append(name)
    return columns


@dataclasses.dataclass
class Section:
    """A table of cells.

    Each of ``columns`` shows the fastest of some contenders (default: a column for each contender,
    one for all algorithms of a library), each row the ratio of the first of ``versus``; ``called``
    has other names of contenders.
    """

    title: str
    columns: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    versus: list[Versus] = dataclasses.field(default_factory=list)
    width: str = 'F'
    memory: bool = False
    cells: list[Cell] = dataclasses.field(default_factory=list)
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def compare(
        self, ours: str, rivals: Sequence[str], pairs: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Adds comparisons of ours with the best rival and with each, and of pairs."""
        wanted = [('the best', ours, rivals)] if len(columns_of(rivals)) > 1 else []
        wanted += [(head, ours, some) for head, some in columns_of(rivals).items()]
        for label, mine, theirs in [*wanted, *((rival, ours, [rival]) for ours, rival in pairs)]:
            known = next((v for v in self.versus if (v.name, v.ours) == (label, mine)), None)
            if known is None:
                self.versus.append(known := Versus(label, mine, []))
            known.rivals = list(dict.fromkeys([*known.rivals, *theirs]))

    def names(self) -> list[str]:
        """The contenders of all cells."""
        return list(dict.fromkeys(name for cell in self.cells for name in cell.results))

    def used(self) -> dict[str, Sequence[str]]:
        """The columns that are not empty."""
        if not self.columns:
            return {**columns_of(self.names())}
        there = set(self.names())
        return {head: some for head, some in self.columns.items() if there.intersection(some)}

    def row(self, cell: Cell) -> list[str]:
        texts = [cell.graph, f'{cell.width:,}']
        for names in self.used().values():
            found = {name: cell.results[name] for name in names if name in cell.results}
            timed = {name: r for name, r in found.items() if r.median_ms is not None}
            if timed:
                name = min(timed, key=lambda name: timed[name].median_ms or 0.0)
                variant = f' ({name.split()[-1]})' if len(names) > 1 else ''
                texts.append(timed[name].text() + variant)
            else:
                texts.append(next(iter(found.values())).text() if found else '–')
        if self.versus:
            best, ratio = self.versus[0].best(cell), self.versus[0].ratio(cell)
            name = self.called.get(best[0], best[0]) if best else '–'
            texts += [name, f'{ratio:.2f}' if ratio else '–']
        return [*texts, *(shown(cell.facts.get(name)) for name in self.facts())]

    def facts(self) -> list[str]:
        return list(dict.fromkeys(name for cell in self.cells for name in cell.facts))

    def summary(self) -> list[dict[str, Any]]:
        """Geometric means over all cells and per width, and the worst cell."""
        rows = []
        for versus in self.versus:
            ratios = [
                (cell, ratio) for cell in self.cells if (ratio := versus.ratio(cell)) is not None]
            if not ratios:
                continue
            worst, lowest = min(ratios, key=lambda item: item[1])
            widths = sorted({cell.width for cell, _ in ratios})
            rows.append({
                'ours': versus.ours,
                'rival': versus.name,
                'cells': len(ratios),
                'geometric_mean': geometric_mean(ratio for _, ratio in ratios),
                'by_width': {
                    str(width): geometric_mean(r for cell, r in ratios if cell.width == width)
                    for width in widths},
                'worst': {'ratio': lowest, 'graph': worst.graph, 'width': worst.width},
            })
        return rows

    def titled(self, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        """A table below the title."""
        return '\n'.join([f'## {self.title}', '', *table(head, rows)])

    def markdown(self) -> str:
        head = ['graph', self.width, *self.used()]
        lines = [self.titled(
            [*head, *['best rival', 'ratio'] * bool(self.versus), *self.facts()],
            map(self.row, self.cells))]
        if self.versus and (summary := self.summary()):
            widths = sorted({int(width) for row in summary for width in row['by_width']})
            by_width = [str(width) for width in widths] * (
                1 < len(widths) < min(10, len(self.cells)))
            lines += ['', 'Time of the rival over ours, geometric means:', '', *table(
                ['ours', 'rival', 'cells', 'all', *(f'{self.width}={w}' for w in by_width),
                 'worst'],
                [[
                    row['ours'], row['rival'], str(row['cells']), f"{row['geometric_mean']:.2f}",
                    *(f"{row['by_width'][w]:.2f}" if w in row['by_width'] else '–'
                      for w in by_width),
                    '{ratio:.2f} ({graph}, {width})'.format(**row['worst']),
                ] for row in summary])]
        if self.memory and any(r.peak_bytes for c in self.cells for r in c.results.values()):
            lines += [
                '', 'Peak memory of a step / of the first step with its caches, MB:', '',
                *table(['graph', self.width, *self.names()], map(self.memory_row, self.cells))]
        return '\n'.join(lines)

    def memory_row(self, cell: Cell) -> list[str]:
        found = [cell.results.get(name, Result()) for name in self.names()]
        return [cell.graph, f'{cell.width:,}', *(' / '.join(
            '–' if peak is None else megabytes(peak)
            for peak in (result.peak_bytes, result.first_peak_bytes)) for result in found)]


class Report:
    """Gathers sections, and writes them as JSON and Markdown below notes how it measures."""

    def __init__(self, bench: str, args: argparse.Namespace, notes: Sequence[str]) -> None:
        self.date = datetime.datetime.now().astimezone()
        self.bench = bench
        self.environment = environment(torch.device(args.device))
        self.arguments = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items() if key != 'out'}  # which tells nothing
        self.notes = list(notes)
        self.graphs: dict[str, dict[str, int]] = {}
        self.left_out: dict[str, str] = {}
        self.sections: list[Section] = []
        device = slug(self.environment['device'])
        self.path = args.out / f'{bench}-{device}-{self.date:%Y%m%dT%H%M%S}'

    def section(self, title: str, kind: type[Section] = Section, **kwargs: Any) -> Section:
        """The section with this title, made if there is none."""
        for section in self.sections:
            if section.title == title:
                return section
        self.sections.append(kind(title, **kwargs))
        return self.sections[-1]

    def as_dict(self) -> dict[str, Any]:
        return {
            'bench': self.bench,
            'date': self.date.isoformat(timespec='seconds'),
            'environment': self.environment,
            'arguments': self.arguments,
            'notes': self.notes,
            'graphs': self.graphs,
            'left_out': self.left_out,
            'sections': [{
                'title': section.title,
                'cells': [dataclasses.asdict(cell) for cell in section.cells],
                'summary': section.summary(),
            } for section in self.sections],
        }

    def markdown(self) -> str:
        env = self.environment
        about = [
            f"{key} {env[key]}" for key in (
                'torch', 'torch_geometric', 'pyg_fast', 'python', 'cuda', 'driver', 'cusparse')
            if env.get(key)]
        commit = f"{env['commit'] or 'unknown'}{' with changes' if env['dirty'] else ''}"
        lines = [
            f"# {self.bench} on {env['device']}, {self.date:%Y-%m-%d %H:%M}", '',
            f"{', '.join(about)}; {env['threads']} CPU threads, "
            f"load {env['load_average']:.1f} before the start; commit {commit}.", '']
        lines += [*self.notes, '']
        if self.graphs:
            columns = list(dict.fromkeys(c for graph in self.graphs.values() for c in graph))
            lines += [*table(
                ['graph', *(column.replace('_', ' ') for column in columns)],
                [[name, *(f'{graph[c]:,}' if c in graph else '–' for c in columns)]
                 for name, graph in self.graphs.items()]), '']
        lines += [f'Left out: {name}, since {reason}.' for name, reason in self.left_out.items()]
        lines += [''] * bool(self.left_out)
        for section in self.sections:
            if section.cells:
                lines += [section.markdown(), '']
        return '\n'.join(lines).rstrip() + '\n'

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix('.json').write_text(as_json(self.as_dict()), encoding='utf-8')
        self.path.with_suffix('.md').write_text(self.markdown(), encoding='utf-8')

    def finish(self) -> None:
        self.save()
        print(self.markdown())
        print(f'Written to {self.path}.json and .md')


def as_json(run: Mapping[str, Any]) -> str:
    """A run as JSON: one line for each section and each cell, numbers with six digits."""
    rounded = json.loads(json.dumps(run), parse_float=lambda text: float(f'{float(text):.6g}'))
    lines = [f' "{key}": {json.dumps(value, ensure_ascii=False)}' for key, value in rounded.items()]
    text = '{\n' + ',\n'.join(lines) + '\n}\n'
    return re.sub(r'(?=\{"(title|graph)": )', '\n  ', text)


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit."""
    cuda = device.type == 'cuda'
    import pyg_fast

    return {
        'device': torch.cuda.get_device_name() if cuda else f'CPU {_cpu_name()}',
        'cpu': _cpu_name(),
        'threads': torch.get_num_threads(),
        'load_average': os.getloadavg()[0],
        'python': platform.python_version(),
        'torch': torch.__version__,
        'pyg_fast': pyg_fast.__version__,
        **{name.replace('-', '_'): version(name) for name in (
            'torch-geometric', 'torch-sparse', 'torch-scatter')},
        'cuda': torch.version.cuda if cuda else None,
        'driver': _output(
            'nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader', '-i', '0',
        ) if cuda else None,
        'cusparse': _cusparse.version() if cuda else None,
        'l2_bytes': torch.cuda.get_device_properties(device).L2_cache_size if cuda else None,
        'memory_bytes': torch.cuda.get_device_properties(device).total_memory if cuda else None,
        # The variable is for machines that have a copy of the tree, but no git.
        'commit': os.environ.get('PYG_FAST_COMMIT')
        or _output('git', '-C', str(ROOT), 'rev-parse', 'HEAD'),
        'dirty': bool(_output('git', '-C', str(ROOT), 'status', '--porcelain')),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path('/proc/cpuinfo').read_text().splitlines():
            if line.startswith('model name'):
                return line.split(':', 1)[1].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _output(*command: str) -> str | None:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return None


def cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache, 0 if it is not known."""
    if device.type == 'cuda':
        return torch.cuda.get_device_properties(device).L2_cache_size
    with contextlib.suppress(OSError, ValueError):
        text = Path('/sys/devices/system/cpu/cpu0/cache/index3/size').read_text()
        return int(text.strip().removesuffix('K')) << 10
    return 0


def sections_of(markdown: str) -> dict[str, list[str]]:
    """The lines of each section of a report, by its title."""
    parts = (part.partition('\n') for part in markdown.split('\n## ')[1:])
    return {title: body.strip().splitlines() for title, _, body in parts}


def slug(text: str) -> str:
    return re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-')


def shown(fact: Any) -> str:
    """A number with three digits, a list with commas."""
    if isinstance(fact, (list, tuple)):
        return ', '.join(map(shown, fact))
    if fact is None or fact != fact:
        return '–'
    return f'{fact:,.3g}' if isinstance(fact, float) and abs(fact) < 1000 else (
        fact if isinstance(fact, str) else f'{fact:,.0f}')


def milliseconds(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f'{value:.{min(digits, 4)}f}'


def megabytes(count: int) -> str:
    return f'{count / 1e6:,.0f}' if count >= 1e7 else f'{count / 1e6:.2g}'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, numbers aligned to the right."""
    lines = [head, ['---', *['--:'] * (len(head) - 1)], *rows]
    return ['| ' + ' | '.join(line) + ' |' for line in lines]
