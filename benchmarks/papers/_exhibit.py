"""What a paper reports beside what comes out here."""
import argparse
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pyg_fast.datasets import PlantedSize, planted_structure

from .. import _cusparse, _graphs, _harness
from .._graphs import Graph
from .._harness import Cell, Result, Section, Settings

# As OGB, PyG, SNAP and the papers list them: nodes, pairs of nodes (directed edges: half their
# number), communities (classes, or a guess).
SIZES: dict[str, PlantedSize] = {
    'Cora': PlantedSize(2_708, 5_278, 7),
    'Reddit': PlantedSize(232_965, 57_307_946, 41),
    'ogbn-arxiv': PlantedSize(169_343, 1_166_243, 40, 0.7),
    'ogbn-proteins': PlantedSize(132_534, 39_561_252, 16, 0.5),
    'ogbn-products': PlantedSize(2_449_029, 61_859_140, 2000),
    'BlogCatalog': PlantedSize(88_784, 2_093_195, 40),
    'YouTube': PlantedSize(1_134_890, 2_987_624, 8000),
    'ogbn-papers100M': PlantedSize(111_059_956, 807_842_936, 172),
    'IGB-large': PlantedSize(100_000_000, 611_785_682, 19),
}

Figure = float | str  # a number, or what stands for it


@dataclasses.dataclass
class Line(Cell):
    """A row of an exhibit.

    Args:
        paper: What the paper has there, by column.
        here: What came out, by column; ``results`` holds what was timed for it.
    """

    paper: Mapping[str, Figure] = dataclasses.field(default_factory=dict)
    here: Mapping[str, Figure] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Exhibit(Section):
    """A table or figure of a paper, rerun.

    Args:
        shows: What the paper shows there and concludes, in words of ours, and on what hardware if
            it is not the paper's usual one.
        differs: What is not as in the paper.
    """

    columns: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    shows: str = ''
    differs: str = ''

    def line(self, graph: str, width: int, **kwargs: Any) -> Line:
        """A row, added."""
        line = Line(graph, width, kwargs.pop('results', {}), **kwargs)
        self.cells.append(line)
        here = ', '.join(f'{name} {text(value)}' for name, value in line.here.items())
        _harness.log(f'{self.title}: {graph} {self.width}={width}: {here}')
        return line

    def lines(self) -> list[Line]:
        return [cell for cell in self.cells if isinstance(cell, Line)]

    def names(self) -> list[str]:
        """Columns, in the order in which they came up."""
        return list(dict.fromkeys(
            name for line in self.lines() for name in (*line.here, *line.paper)))

    def summary(self) -> list[dict[str, Any]]:
        return [{'shows': self.shows, 'differs': self.differs}]

    def markdown(self) -> str:
        lines = [f'## {self.title}', '', self.shows, '']
        sides = [
            (side, name) for name in self.names() for side in ('paper', 'here')
            if any(name in getattr(line, side) for line in self.lines())]
        widths = {line.width for line in self.lines()}
        head = ['graph', *[self.width] * (widths != {0}), *(f'{n}, {s}' for s, n in sides)]
        lines += _harness.table(head, [
            [
                line.graph, *[f'{line.width:,}' if line.width else '–'] * (widths != {0}),
                *(text(getattr(line, side).get(name, '–')) for side, name in sides),
            ] for line in self.lines()])
        return '\n'.join([*lines, *['', self.differs] * bool(self.differs)])


def text(figure: Figure) -> str:
    """Three significant digits."""
    if isinstance(figure, str):
        return figure
    return f'{figure:,.0f}' if abs(figure) >= 1000 else f'{figure:.3g}'


def fastest(results: Mapping[str, Result], *names: str) -> Figure:
    """The least median of those that were timed, in ms."""
    times = [
        time for name in names if name in results
        and (time := results[name].median_ms) is not None]
    return min(times, default='–')


def ratio(above: Figure, below: Figure) -> Figure:
    """A quotient, if both are numbers."""
    if isinstance(above, str) or isinstance(below, str) or not below:
        return '–'
    return above / below


@dataclasses.dataclass(frozen=True)
class Maker:
    """How an exhibit is made.

    Args:
        name: Such as ``'Table 2'``, or its subject.
        make: Adds it to the report of a run.
    """

    name: str
    make: Callable[['Run'], None]


@dataclasses.dataclass(frozen=True)
class Paper:
    """A paper and what is rerun of it.

    Args:
        key: What it is called on the command line.
        title: Its title.
        where: Where it was published, and its address.
        hardware: That its figures come from, unless an exhibit says otherwise.
        exhibits: What is rerun.
        left_out: Those of its tables and figures that are not, with the reason.
        note: Where its figures were read, and what else holds for all exhibits.
    """

    key: str
    title: str
    where: str
    hardware: str
    exhibits: Sequence[Maker]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str = ''


class Run:
    """What the exhibits of a paper share.

    Args:
        args: The arguments.
        wall: How to measure to the end of the work; :obj:`kernel` by what the device takes.
    """

    report: _harness.Report

    def __init__(self, args: argparse.Namespace, wall: Settings) -> None:
        self.args = args
        self.wall = wall
        self.kernel = dataclasses.replace(wall, device_time=True)
        self.device = wall.device
        self.quick: bool = args.quick

    @property
    def rival(self) -> str:
        """What sums over a graph for others on this device."""
        return 'cuSPARSE' if self.device.type == 'cuda' else 'torch.sparse'

    def like(self, name: str, max_edges: int | None = None) -> Graph:
        """A generated graph of the size of one in :obj:`SIZES`, or a fraction of it."""
        size, parts = SIZES[name], 1
        most = min(self.args.max_edges, max_edges or self.args.max_edges)
        while 2 * size.num_pairs // parts > most:
            parts *= 2
        return self._generated(name, parts)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (a run lives as long as its process)
    def _generated(self, name: str, parts: int) -> Graph:
        size = SIZES[name]
        communities = max(1, min(size.num_communities, size.num_nodes // parts // 20))
        size = size._replace(
            num_nodes=size.num_nodes // parts, num_pairs=size.num_pairs // parts,
            num_communities=communities)
        called = f'{name}-like' + (f' 1/{parts}' if parts > 1 else '') + ' (generated)'
        return self._noted(Graph(called, *planted_structure(size, seed=0, device=self.device)))

    def real(self, names: Iterable[str]) -> Iterator[Graph]:
        """Those of the real graphs that are at hand."""
        for graph in _graphs.load_each(names, self.device, self.report.left_out):
            yield self._noted(graph)

    def _noted(self, graph: Graph) -> Graph:
        self.report.graphs[graph.name] = graph.summary()
        return graph

    def exhibit(self, title: str, **kwargs: Any) -> Exhibit:
        section = self.report.section(title, Exhibit, **kwargs)
        assert isinstance(section, Exhibit)
        return section


def reported(paper: Paper, exhibits: Sequence[Maker], run: Run) -> list[str]:
    """Makes the exhibits, writes them down and returns those that failed."""
    run.report = _harness.Report(f'papers-{paper.key}', run.args, [
        f'{paper.title} ({paper.where}). Its figures, in the columns "paper", come from '
        f'{paper.hardware}; those in the columns "here" from this run, on {_here(run)}. Times are '
        'medians. Graphs called generated have the size of the one in their name and nothing else '
        'of it; 1/n: an nth of its nodes and edges.', *['', paper.note] * bool(paper.note)])
    if run.device.type == 'cuda':
        run.report.environment['cusparse'] = _cusparse.version()
    run.report.left_out.update(paper.left_out)
    failed = []
    for made in exhibits:
        start = time.perf_counter()
        try:
            made.make(run)
        except Exception as error:  # which must not cost what the others measure
            traceback.print_exc()
            failed.append(made.name)
            run.report.left_out[made.name] = f'it failed: {error}'
        run.report.save()
        _harness.log(f'{paper.key}, {made.name}: {time.perf_counter() - start:.1f} s')
    run.report.finish()
    return failed


def _here(run: Run) -> str:
    if run.device.type == 'cuda':
        return f'one {torch.cuda.get_device_name()}'
    return f'{run.wall.device.type.upper()}, {torch.get_num_threads()} threads'
