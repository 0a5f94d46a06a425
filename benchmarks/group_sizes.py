"""Group sizes: the times of all sizes, and the regression that chooses a size for a graph.

    python -m benchmarks group_sizes --measure benchmarks/results/group-sizes-nvidia-h200.json
    python -m benchmarks group_sizes --fit benchmarks/results/group-sizes-nvidia-h200.json
The first command needs a GPU: it times sums over many graphs with each size. The second fits the
regression to three quarters of the graphs, prints its weights, which pyg_fast.transforms.GroupSizes
holds, and reports on the other graphs in a .md file beside the measurements.
"""
import argparse
import json
import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import _graphs, _harness
from benchmarks._harness import log, table
from pyg_fast.graph import Graph
from pyg_fast.graph.graph import graph_of
from pyg_fast.transforms import group_sizes
from pyg_fast.transforms.group_sizes import SIZES, Degrees, regression_size

WIDTHS = (16, 64, 128)
# Probabilities of the quadrants, from no skew to more than Graph500 has.
SKEWS = {
    'even': (0.25, 0.25, 0.25),
    'mild': (0.45, 0.22, 0.22),
    'graph500': (0.57, 0.19, 0.19),
    'strong': (0.65, 0.15, 0.15),
}
SCALES = (12, 14, 16, 18, 20)
DEGREES = (4, 16, 64, 256)
MOST_EDGES = 1 << 25
PLANTED = ('small', 'medium', 'dense-small', 'dense-medium', 'arxiv-like', 'reddit-like',
           'products-like')
REAL = (*_graphs.REAL, 'Cora', 'ca-astroph')
ROWS_KEPT = 0.1  # of a graph, as an execution path does
NEAR = 1.1  # a size is right if its time is at most this times the best time
NONE = 'none'


def rmat(
    scale: int, degree: int, skew: tuple[float, float, float], device: torch.device, seed: int,
) -> Tensor:
    """Distinct edges of a recursive matrix (Chakrabarti et al., 2004), nodes in random order."""
    generator = torch.Generator(device=device).manual_seed(seed)
    a, b, c = skew
    edges = torch.zeros(2, degree << scale, dtype=torch.long, device=device)
    for _ in range(scale):
        draw = torch.rand(edges.size(1), generator=generator, device=device)
        edges *= 2
        edges[0] += draw >= a + b
        edges[1] += ((draw >= a) & (draw < a + b)) | (draw >= a + b + c)
    key = ((edges[0] << scale) + edges[1]).unique()
    order = torch.randperm(1 << scale, generator=generator, device=device)
    return order[torch.stack([key >> scale, key & ((1 << scale) - 1)])]


def some_rows(graph: Graph, share: float, seed: int = 0) -> Graph:
    """The graph without the edges and rows of most of its nodes."""
    generator = torch.Generator().manual_seed(seed)
    keep = (torch.rand(graph.num_dst, generator=generator) < share).to(graph.col.device)
    degree = graph.rowptr.long().diff()
    col = graph.col[: int(graph.rowptr[-1])][keep.repeat_interleave(degree)]
    rowptr = torch.nn.functional.pad(degree[keep].cumsum(0), (1, 0)).to(col.dtype)
    return Graph(rowptr, col, None, None, None, None, graph.num_src, rowptr.size(0) - 1)


def graphs(device: torch.device, quick: bool) -> Iterator[tuple[str, str, Graph]]:
    """Name, name of the graph it is made of, and graph."""
    scales = SCALES[:2] if quick else SCALES
    for skew, probabilities in SKEWS.items():
        for scale in scales:
            for degree in DEGREES:
                if degree << scale > MOST_EDGES:
                    continue
                edges = rmat(scale, degree, probabilities, device, seed=scale * 1000 + degree)
                name = f'R-MAT {skew}, 2^{scale} x {degree}'
                yield name, name, graph_of(edges, 1 << scale, 1 << scale, transpose=False)
    names = PLANTED[:1] if quick else PLANTED
    left_out: dict[str, str] = {}
    for loaded in _graphs.load_each((*names, *REAL), device, left_out):
        n = loaded.num_nodes
        graph = Graph(loaded.rowptr, loaded.col, None, None, None, None, n, n)
        yield loaded.name, loaded.name, graph
        yield f'{loaded.name}, {ROWS_KEPT:.0%} of rows', loaded.name, some_rows(graph, ROWS_KEPT)


class Measured(NamedTuple):
    """A graph at one width: milliseconds by group size (``'none'``: rows)."""

    name: str
    base: str
    width: int
    degrees: Degrees
    times: dict[str, float]

    @property
    def by_size(self) -> tuple[list[float], list[float]]:
        """Logarithms of sizes and times, of groups alone."""
        pairs = sorted((int(k), v) for k, v in self.times.items() if k != NONE)
        return [math.log2(k) for k, _ in pairs], [math.log2(v) for _, v in pairs]

    @property
    def extremes(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """The logarithms of time and size of the best and of the worst group size."""
        pairs = list(zip(*reversed(self.by_size), strict=True))
        return min(pairs), max(pairs)

    def slowdown(self, size: int) -> float:
        """The time of a size over the best one's, between measured sizes along straight lines of
        logarithms."""
        sizes, times = self.by_size
        # From the largest degree on no row is cut: as with the last size measured.
        at = sizes[-1] if size >= self.degrees.largest else math.log2(size)
        return 2 ** float(np.interp(at, sizes, times) - min(times))

    @property
    def share(self) -> int:
        """The number of the graph's part, of eight; graphs made of one graph share a part."""
        return zlib.crc32(self.base.encode()) % 8

    @property
    def is_held_out(self) -> bool:
        """A quarter of the graphs, always the same."""
        return self.share < 2


def measure(file: Path, device: torch.device, quick: bool) -> None:
    """Times all graphs and writes the input of --fit."""
    if device.type != 'cuda':
        raise SystemExit('--measure: needs a GPU, groups are how work is handed out on one')
    start, cells = time.perf_counter(), []
    for name, base, graph in graphs(device, quick):
        degrees = Degrees.of(graph.rowptr)
        by_width = {width: group_sizes.measure_group_sizes(graph, width) for width in WIDTHS}
        cells.append({
            'name': name, 'base': base, 'degrees': degrees._asdict(),
            'ms': {str(width): {str(size or NONE): ms for size, ms in times.items()}
                   for width, times in by_width.items()},
        })
        best = min(by_width[64], key=by_width[64].__getitem__)
        log(f'{name}: {degrees.num_edges} edges, best at 64: {best} {by_width[64][best]:.3g} ms')
    file.parent.mkdir(parents=True, exist_ok=True)
    seconds = time.perf_counter() - start
    report = {'environment': _harness.environment(device), 'seconds': seconds, 'graphs': cells}
    file.write_text(json.dumps(report) + '\n')
    log(f'{len(cells)} graphs in {seconds:.0f} s: {file}')


def read(file: Path) -> tuple[dict[str, Any], list[Measured]]:
    report = json.loads(file.read_text())
    cells = []
    for graph in report['graphs']:
        degrees = Degrees(**graph['degrees'])
        for width, times in graph['ms'].items():
            cells.append(Measured(graph['name'], graph['base'], int(width), degrees, times))
    return report, cells


def fit_regression(cells: Sequence[Measured], steps: int = 2000) -> list[float]:
    """The weights that lose the least time; the start is the solution of least squares."""
    features = torch.tensor(
        [cell.degrees.features(cell.width) for cell in cells], dtype=torch.double)
    grids = [cell.by_size for cell in cells]
    middle = []
    for sizes, times in grids:  # of all sizes that are as good as the best
        good = [s for s, t in zip(sizes, times, strict=True) if t <= min(times) + math.log2(1.03)]
        middle.append(sum(good) / len(good))
    target = torch.tensor(middle, dtype=torch.double)[:, None]
    weights = torch.linalg.lstsq(features, target).solution.view(-1).requires_grad_()
    # Times where sizes end stay what they are there.
    count = len(SIZES)
    curves = torch.tensor([
        times + times[-1:] * (count - len(times)) for _, times in grids], dtype=torch.double)
    curves -= curves.min(dim=1, keepdim=True)[0]
    first, step = math.log2(SIZES[0]), math.log2(SIZES[1] / SIZES[0])
    optimizer = torch.optim.Adam([weights], lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        at = ((features @ weights - first) / step).clamp(0, count - 1)
        low = at.detach().floor().clamp(max=count - 2).long()[:, None]
        left, right = curves.gather(1, low)[:, 0], curves.gather(1, low + 1)[:, 0]
        lost = left + (at - low[:, 0]) * (right - left)
        (lost.mean() + lost.square().mean()).backward()
        optimizer.step()
    return [float(f'{w:.6g}') for w in weights.detach()]


Chooser = Callable[[Measured], int]


def choosers(train_cells: Sequence[Measured]) -> dict[str, Chooser]:
    constant = min(
        SIZES, key=lambda size: geometric_mean(cell.slowdown(size) for cell in train_cells))
    return {
        'regression, fitted': lambda cell: regression_size(cell.degrees, cell.width, 'fitted'),
        'regression, paper': lambda cell: regression_size(cell.degrees, cell.width, 'paper'),
        f'always {constant}': lambda cell: constant,
    }


def score(cells: Iterable[Measured], choose: Chooser) -> tuple[float, float, float]:
    """Share within 10 % of the best, geometric mean and worst of the slowdowns."""
    slowdowns = [cell.slowdown(choose(cell)) for cell in cells]
    near = sum(s <= NEAR for s in slowdowns) / len(slowdowns)
    return near, geometric_mean(slowdowns), max(slowdowns)


def report_lines(
    report: dict[str, Any], held_out: Sequence[Measured], cells: Sequence[Measured],
    methods: dict[str, Chooser],
) -> list[str]:
    environment = report['environment']
    rows = [
        [name, f'{near:.0%}', f'{mean:.3f}', f'{worst:.2f}']
        for name, choose in methods.items() for near, mean, worst in [score(held_out, choose)]]
    lines = [
        '# Group sizes', '',
        f"{environment['device']}, torch {environment['torch']}, commit {environment['commit']}. "
        f"{len({c.name for c in cells})} graphs at {len({c.width for c in cells})} widths, "
        f"{len({c.name for c in held_out})} of them held out: figures are of these.", '',
        '## Choosing', '',
        *table(['', 'within 10 % of the best', 'mean time over the best', 'worst'], rows)]
    extremes = [(cell, *cell.extremes) for cell in cells]
    extremes.sort(key=lambda each: each[1][0] - each[2][0])
    return [*lines, '', '## Where the size matters most', '', *table(
        ['graph', 'width', 'best size', 'ms', 'worst size', 'ms', 'worst over best'], [
            [cell.name, str(cell.width), *(text for time, size in (best, worst) for text in (
                str(round(2 ** size)), f'{2 ** time:.3g}')), f'{2 ** (worst[0] - best[0]):.2f}']
            for cell, best, worst in extremes[:20]])]


def fit(file: Path) -> list[float]:
    """Fits the regression to most graphs, and reports on the other graphs."""
    report, cells = read(file)
    fitted_on = [cell for cell in cells if not cell.is_held_out]
    held_out = [cell for cell in cells if cell.is_held_out]
    if not fitted_on or not held_out:
        raise SystemExit(f'--fit: {file} has too few graphs to hold some out')
    weights = fit_regression(fitted_on)
    # For the report; the package gets them by hand.
    group_sizes._FITTED = tuple(weights)
    lines = report_lines(report, held_out, cells, choosers(fitted_on))
    file.with_suffix('.md').write_text('\n'.join(lines) + '\n')
    print('\n'.join(lines))
    log(f"weights: {weights}, written: {file.with_suffix('.md')}")
    return weights


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument('--measure', type=Path, metavar='FILE', help='time and write')
    task.add_argument('--fit', type=Path, metavar='FILE', help='read, fit and report')
    parser.add_argument('--device', default='cuda', help='of --measure')
    parser.add_argument('--quick', action='store_true', help='few graphs, to see that it runs')
    args = parser.parse_args(argv)
    if args.measure:
        measure(args.measure, torch.device(args.device), args.quick)
    else:
        fit(args.fit)


if __name__ == '__main__':
    main()
