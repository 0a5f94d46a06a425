"""The runs in benchmarks/results, and tables drawn from them."""
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _harness
from ._harness import Cell, Result, Section, Versus

sys.path.append(str(_harness.ROOT / 'docs' / '_ext'))
from result_tables import cells as cells
from result_tables import table_of

LETTERS = 'abcdefghijklmnopqrstuvwxyz'


class Unsupported(Exception):
    """A figure without its run, or a run without device, date, commit or report."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """The record of a benchmark: its file without the ending, its JSON, its report."""

    name: str
    bench: str
    device: str
    date: str
    data: Mapping[str, Any] = dataclasses.field(repr=False)
    markdown: str = dataclasses.field(repr=False)

    @classmethod
    def read(cls, path: Path) -> 'Run | None':
        """The run in a JSON file, which must tell its device, date and commit and have a report
        beside it; ``None`` if the file is of another kind.
        """
        data = json.loads(path.read_text(encoding='utf-8'))
        if 'bench' not in data:
            return None
        environment = data.get('environment', {})
        for key, found in (('date', data), ('device', environment), ('commit', environment)):
            if not found.get(key):
                raise Unsupported(f'{path.name} does not tell its {key}')
        report = path.with_suffix('.md')
        if not report.is_file():
            raise Unsupported(f'{path.name} has no {report.name} beside it')
        return cls(path.stem, data['bench'], environment['device'], data['date'], data,
                   report.read_text(encoding='utf-8'))

    def cited(self) -> str:
        environment = self.data['environment']
        changed = ' with changes' if environment.get('dirty') else ''
        return (
            f'`benchmarks/results/{self.name}.md`, {self.device}, {self.date[:10]}, commit '
            f"{environment['commit'][:7]}{changed}")


def read_runs(folder: Path) -> list[Run]:
    """All runs, the newest first, but for quick ones."""
    found = (Run.read(path) for path in sorted(folder.glob('*.json')))
    runs = [run for run in found if run and not run.data['arguments'].get('quick')]
    return sorted(runs, key=lambda run: (run.date, run.name), reverse=True)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a section, and the run that it is of."""

    run: Run
    cell: Cell


def result_of(data: Mapping[str, Any]) -> Result:
    known = {field.name for field in dataclasses.fields(Result)}
    return Result(**{key: value for key, value in data.items() if key in known})


def sources(runs: Sequence[Run]) -> list[str]:
    """Lines that name runs, by letters if there are several."""
    different = list(dict.fromkeys(runs))
    if len(different) == 1:
        return [f'Run: {different[0].cited()}.']
    return ['Runs: ' + '; '.join(
        f'({letter}) {run.cited()}' for letter, run in zip(LETTERS, different, strict=False)
    ) + '.']


def with_letters(
    head: Sequence[str], rows: Sequence[Sequence[str]], runs: Sequence[Run],
) -> list[str]:
    """A table, each row with the letter of its run if there are several."""
    if len(rows) != len(runs):
        raise Unsupported(f'{len(rows)} rows of a table have {len(runs)} runs')
    different = list(dict.fromkeys(runs))
    if len(different) == 1:
        return _harness.table(head, rows)
    return _harness.table([*head, 'run'], [
        [*row, LETTERS[different.index(run)]] for row, run in zip(rows, runs, strict=True)])


@dataclasses.dataclass(frozen=True)
class Timed:
    """A table of times: of a section of a benchmark, or of several whose records have it.

    ``rivals`` are beginnings of the names of the rivals of ``ours``, ``also`` other contenders to
    show, ``width`` is what widths are called, ``called`` has other names of contenders. A row
    counts that has a contender that it ``needs``, if any: runs differ in what they measured.
    """

    title: str
    bench: str | Sequence[str]
    section: str
    ours: str
    rivals: Sequence[str]
    also: Sequence[str] = ()
    width: str = 'F'
    called: Mapping[str, str] = dataclasses.field(default_factory=dict)
    needs: str = ''

    def rows(self, runs: Iterable[Run]) -> dict[str, list[Row]]:
        """The rows by device, GPUs first; of each graph from its newest run."""
        found: dict[str, list[Row]] = {}
        for run in runs:
            if run.bench not in ((self.bench,) if isinstance(self.bench, str) else self.bench):
                continue
            known = {row.cell.graph for row in found.get(run.device, [])}
            new = [
                Row(run, Cell(cell['graph'], cell['width'], {
                    name: result_of(result) for name, result in cell['results'].items()}))
                for section in run.data['sections'] if section['title'] == self.section
                for cell in section['cells'] if cell['graph'] not in known
                and (not self.needs or self.needs in cell['results'])]
            if new:
                found.setdefault(run.device, []).extend(new)
        return dict(sorted(found.items(), key=lambda item: item[0].startswith('CPU')))

    def name(self, contender: str) -> str:
        return self.called.get(contender, contender)

    def as_section(self, rows: Sequence[Row]) -> Section:
        names = list(dict.fromkeys(name for row in rows for name in row.cell.results))
        rivals = [name for name in names if name.startswith(tuple(self.rivals))
                  and name not in (self.ours, *self.also)]
        columns: dict[str, list[str]] = {
            self.name(name): [name] for name in (self.ours, *self.also)}
        for name in rivals:
            columns.setdefault(self.name(_harness.head_of(name)), []).append(name)
        versus = [Versus('the best rival', self.ours, rivals)]
        cells = [row.cell for row in rows]
        return Section(self.title, columns, versus, self.width, cells=cells, called=self.called)

    def against(self, rows: Sequence[Row]) -> Versus:
        """The comparison of ours with the best rival of each row."""
        return self.as_section(rows).versus[0]

    def best(self, versus: Versus, cell: Cell) -> str:
        """The time and the name of the best rival, or why none has a time."""
        best = versus.best(cell)
        if best is not None:
            return f'{cell.results[best[0]].text()} ({self.name(best[0])})'
        failed = [cell.results[name].text() for name in versus.rivals if name in cell.results]
        return ', '.join(dict.fromkeys(failed)) or '–'

    def markdown(self, runs: Sequence[Run]) -> list[str]:
        """The ratio and the best rival of each row; the other rivals stand in the records."""
        lines: list[str] = []
        for device, rows in self.rows(runs).items():
            section, versus = self.as_section(rows), self.against(rows)
            also = [name for name in self.also if any(name in row.cell.results for row in rows)]
            head = ['graph', 'ratio', self.width, self.name(self.ours), 'best rival',
                    *map(self.name, also)]
            table = []
            for cell in (row.cell for row in rows):
                ratio = versus.ratio(cell)
                table.append([
                    cell.graph, f'{ratio:.2f}' if ratio else '–', f'{cell.width:,}',
                    time_of(cell, self.ours), self.best(versus, cell),
                    *(time_of(cell, name) for name in also)])
            of = [row.run for row in rows]
            lines += [f'On {device}:', '', *with_letters(head, table, of), '']
            for summary in section.summary():
                worst = summary['worst']
                lines += [
                    f"The best rival takes {summary['geometric_mean']:.2f} times as long over "
                    f"these {summary['cells']} rows (geometric mean), at worst "
                    f"{worst['ratio']:.2f} times ({worst['graph']}, {worst['width']:,})."
                ] if summary['cells'] > 1 else []
            lines += [*sources(of), '']
        return [f'## {self.title}', '', *lines] if lines else []


def time_of(cell: Cell, name: str) -> str:
    return cell.results[name].text() if name in cell.results else '–'


@dataclasses.dataclass(frozen=True)
class Cited:
    """A section copied from the reports of runs that lack all arguments in ``without``."""

    title: str
    bench: str
    section: str
    without: Sequence[str] = ()

    def markdown(self, runs: Sequence[Run]) -> list[str]:
        found: dict[str, tuple[list[str], list[tuple[list[str], Run]]]] = {}
        for run in runs:
            if run.bench != self.bench or f'## {self.section}' not in run.markdown.splitlines():
                continue
            if any(run.data['arguments'].get(name) for name in self.without):
                continue
            head, *rows = table_of(run.markdown, self.section)
            first, pairs = found.setdefault(run.device, (head, []))
            known = {row[0] for row, _ in pairs}
            pairs += [(row, run) for row in rows if first == head and row[0] not in known]
        lines: list[str] = []
        for device, (head, pairs) in found.items():
            of = [run for _, run in pairs]
            lines += [f'On {device}:', '', *with_letters(
                head, [row for row, _ in pairs], of), '', *sources(of), '']
        return [f'## {self.title}', '', *lines] if lines else []
