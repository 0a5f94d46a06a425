"""Timing contenders against each other, and reporting it."""
import argparse
import contextlib
import dataclasses
import datetime
import gc
import importlib.metadata
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
from typing import Any

import torch

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
    """One way to compute what a cell asks for.

    Args:
        name: What the reports call it.
        make: Prepares it and returns what is timed.
        ours: Whether failing or being wrong is an error rather than a result.
        check: The error of an output, in units of what is allowed.
        calls: Number of steps that one call makes. (default: ``1``)
    """

    name: str
    make: Callable[[], Callable[[], Any]]
    ours: bool = False
    check: Callable[[Any], float] | None = None
    calls: int = 1


@dataclasses.dataclass
class Result:
    """What was measured of one contender, in milliseconds and bytes.

    ``host_ms`` is the time after which a call returns (only beside device times),
    ``first_peak_bytes`` the peak memory of the first call (with what it leaves cached),
    ``error`` the largest error in units of what is allowed.
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
    """How to measure.

    Args:
        device: Where to.
        repeats: Measurements of each contender.
        limit: Seconds beyond which a rival's first run is its only one.
        budget: Seconds after which a rival is measured less often, though three times.
        device_time: Whether the host runs ahead of the GPU, so that launching costs nothing;
            otherwise wall time to the end of the work. (default: ``False``)
    """

    device: torch.device
    repeats: int
    limit: float
    budget: float
    device_time: bool = False


class Incorrect(Exception):
    """A result of ours that is wrong, which makes its time worthless."""


def measure(contenders: Sequence[Contender], settings: Settings) -> dict[str, Result]:
    """Checks and warms up every contender, then times them in turns.

    Raises:
        Incorrect: If a contender of ours is wrong.
    """
    cuda = settings.device.type == 'cuda'
    results = {contender.name: Result() for contender in contenders}
    ready: list[tuple[Contender, Callable[[], Any], int, float]] = []
    for contender in contenders:
        result = results[contender.name]
        try:
            run, seconds = _first_runs(contender, result, settings)
        except torch.cuda.OutOfMemoryError as error:
            if contender.ours:
                raise
            result.note = f'OOM: {_first_line(error)}'
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            if contender.ours:
                raise
            result.note = f'failed: {_first_line(error)}'
        else:
            if run is not None:
                share = contender.ours or seconds * settings.repeats <= settings.budget
                count = settings.repeats if share else min(
                    settings.repeats, max(3, int(settings.budget / seconds)))
                ready.append((contender, run, count, seconds))
                continue
        _free(cuda)

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
        for contender, run, count, _ in solo:  # its neighbours would empty torch's cache each time
            result = results[contender.name]
            result.note = 'measured on its own, for its memory'
            _free(cuda)
            try:
                run()
                for _ in range(count):
                    once(contender, run)
            except torch.cuda.OutOfMemoryError as error:  # what the others keep fills the rest
                result.note = f'OOM: {_first_line(error)}'
            _free(cuda)
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
    """Returns what to time and the seconds of one run, unless that was too long already."""
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
    """Milliseconds that cover what the host needs to launch the work."""
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


def _free(cuda: bool) -> None:
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


# Arguments --------------------------------------------------------------------------------------

def parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    result.add_argument('--device', choices=('auto', 'cpu', 'cuda'), default='auto')
    result.add_argument('--threads', type=int, help='CPU threads of torch')
    result.add_argument('--repeats', type=int, help='measurements of each contender')
    result.add_argument(
        '--rival-limit', type=float, metavar='S', default=20.0,
        help='a rival whose first run takes longer is measured by that alone')
    result.add_argument(
        '--budget', type=float, metavar='S',
        help='a rival that takes longer over its repeats gets fewer, though three')
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


def start(args: argparse.Namespace) -> Settings:
    """Fills in what depends on the device, and seeds torch."""
    if args.device == 'auto':
        args.device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    args.threads = torch.get_num_threads()
    if args.repeats is None:
        args.repeats = 5 if args.quick else 20
    if args.repeats < 1:
        raise SystemExit(f'--repeats: got {args.repeats}, expected at least 1')
    if args.budget is None:
        args.budget = 0.5 if args.device == 'cuda' else 5.0
    torch.manual_seed(0)
    warnings.filterwarnings('ignore', message='Sparse (CSR|invariant)')
    return Settings(torch.device(args.device), args.repeats, args.rival_limit, args.budget)


def log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


# Reports ----------------------------------------------------------------------------------------

@dataclasses.dataclass
class Cell:
    """One row of a table: what was measured on one graph at one width."""

    graph: str
    width: int
    results: dict[str, Result]
    cache: str = ''  # size of x, against that of the cache


@dataclasses.dataclass
class Versus:
    """A comparison: ``ours`` against the best of ``rivals``."""

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


@dataclasses.dataclass
class Section:
    """A table of cells with the same contenders.

    Args:
        title: Its heading.
        columns: Headings, each with the contenders whose best it shows.
        versus: The comparisons; the ratio of the first one stands in every row.
        width: What the widths are called.
        memory: Whether to show peak memory (columns must be of one contender each).
    """

    title: str
    columns: Mapping[str, Sequence[str]]
    versus: Sequence[Versus] = ()
    width: str = 'F'
    memory: bool = False
    cells: list[Cell] = dataclasses.field(default_factory=list)

    def used(self) -> dict[str, Sequence[str]]:
        """The columns that are not empty."""
        names = {name for cell in self.cells for name in cell.results}
        return {head: some for head, some in self.columns.items() if names.intersection(some)}

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
        best, ratio = self.versus[0].best(cell), self.versus[0].ratio(cell)
        texts += [best[0] if best else '–', f'{ratio:.2f}' if ratio else '–']
        return [*texts, *[cell.cache] * self.caches()]

    def caches(self) -> bool:
        return any(cell.cache for cell in self.cells)

    def memory_row(self, cell: Cell) -> list[str]:
        texts = [cell.graph, f'{cell.width:,}']
        for (name,) in self.used().values():
            result = cell.results.get(name, Result())
            texts.append(' / '.join(
                '–' if peak is None else megabytes(peak)
                for peak in (result.peak_bytes, result.first_peak_bytes)))
        return texts

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

    def markdown(self) -> str:
        lines = [f'## {self.title}', '']
        head = ['graph', self.width, *self.used()]
        lines += table(
            [*head, 'best rival', 'ratio', *['x'] * self.caches()],
            [self.row(cell) for cell in self.cells])
        summary = self.summary()
        if summary:
            widths = sorted({int(width) for row in summary for width in row['by_width']})
            by_width = [f'{self.width}={width}' for width in widths] if len(widths) > 1 else []
            lines += ['', 'Time of the rival over ours, geometric means:', '']
            lines += table(
                ['ours', 'rival', 'cells', 'all', *by_width, 'worst'],
                [[
                    row['ours'], row['rival'], str(row['cells']), f"{row['geometric_mean']:.2f}",
                    *(
                        f"{row['by_width'][str(width)]:.2f}" if str(width) in row['by_width']
                        else '–' for width in (widths if by_width else [])),
                    '{ratio:.2f} ({graph}, {width})'.format(**row['worst']),
                ] for row in summary])
        if self.memory and any(r.peak_bytes for c in self.cells for r in c.results.values()):
            lines += ['', 'Peak memory of a step / of the first one with what it keeps, MB:', '']
            lines += table(head, [self.memory_row(cell) for cell in self.cells])
        return '\n'.join(lines)


class Report:
    """Gathers sections, and writes them as JSON and Markdown.

    Args:
        bench: Name of the benchmark.
        args: Its arguments.
        notes: Lines that say how it was measured.
    """

    def __init__(self, bench: str, args: argparse.Namespace, notes: Sequence[str]) -> None:
        self.date = datetime.datetime.now().astimezone()
        self.bench = bench
        self.environment = environment(torch.device(args.device))
        self.arguments = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()}
        self.notes = list(notes)
        self.graphs: dict[str, dict[str, int]] = {}
        self.left_out: dict[str, str] = {}
        self.sections: list[Section] = []
        slug = re.sub(r'[^a-z0-9]+', '-', self.environment['device'].lower()).strip('-')
        self.path = args.out / f'{bench}-{slug}-{self.date:%Y%m%dT%H%M%S}'

    def section(self, title: str, kind: type[Section] = Section, **kwargs: Any) -> Section:
        """The section of that title, made if there is none."""
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
            columns = list(next(iter(self.graphs.values())))
            lines += table(
                ['graph', *(column.replace('_', ' ') for column in columns)],
                [[name, *(f'{graph[c]:,}' for c in columns)] for name, graph in
                 self.graphs.items()])
            lines += ['']
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
    """A run with a line for each cell, its numbers to six digits."""

    def one_line(value: Any) -> str:
        return json.dumps(_rounded(value), ensure_ascii=False)

    def section(each: Mapping[str, Any]) -> str:
        cells = ',\n'.join(f'   {one_line(cell)}' for cell in each['cells'])
        rest = ', '.join(
            f'"{key}": {one_line(value)}' for key, value in each.items() if key != 'cells')
        return f'  {{{rest}, "cells": [\n{cells}\n  ]}}'

    lines = [f' "{key}": {one_line(value)}' for key, value in run.items() if key != 'sections']
    sections = ',\n'.join(map(section, run.get('sections', ())))
    lines += [f' "sections": [\n{sections}\n ]'] if 'sections' in run else []
    return '{\n' + ',\n'.join(lines) + '\n}\n'


def _rounded(value: Any) -> Any:
    if isinstance(value, float) and math.isfinite(value):
        return float(f'{value:.6g}')
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def environment(device: torch.device) -> dict[str, Any]:
    """Everything that a figure depends on, but for the arguments."""
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
        **{name.replace('-', '_'): _version(name) for name in (
            'torch-geometric', 'torch-sparse', 'torch-scatter')},
        'cuda': torch.version.cuda if cuda else None,
        'driver': _driver() if cuda else None,
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


def _driver() -> str | None:
    return _output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader', '-i', '0')


def _version(package: str) -> str | None:
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


def cache_state(bytes_of_x: int, device: torch.device) -> str:
    """How the gathered matrix compares with the last-level cache."""
    name, cache = 'L2' if device.type == 'cuda' else 'L3', cache_bytes(device)
    known = f" {'<=' if bytes_of_x <= cache else '>'} {name}" if cache else ''
    return f'{megabytes(bytes_of_x)} MB{known}'


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def milliseconds(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f'{value:.{min(digits, 4)}f}'


def megabytes(count: int) -> str:
    return f'{count / 1e6:,.0f}' if count >= 1e7 else f'{count / 1e6:.2g}'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table, numbers to the right."""
    lines = [head, ['---', *['--:'] * (len(head) - 1)], *rows]
    return ['| ' + ' | '.join(line) + ' |' for line in lines]
