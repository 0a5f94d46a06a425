"""The plots of docs/performance: plain, and the same bytes for the same data and matplotlib."""
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ._harness import Cell

# Okabe and Ito's colours, which also those can tell apart who see some alike.
COLORS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#D55E00', '#56B4E9', '#000000')
MARKERS = 'os^DvPX'
_STYLE = {
    'svg.hashsalt': 'pyg_fast', 'svg.fonttype': 'none', 'font.size': 9, 'axes.grid': True,
    'grid.color': '#dddddd', 'axes.axisbelow': True, 'axes.spines.top': False,
    'axes.spines.right': False, 'legend.frameon': False,
}
Drawing = Callable[[list[list[Cell]]], Any]


def _axes(count: int, width: float = 3.4, height: float = 2.8) -> tuple[Any, list[Any]]:
    """A figure with some axes beside each other."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(width * count, height), layout='constrained')
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def save(draw: Callable[[], Any], file: Path, description: str) -> None:
    """Draws a figure into an SVG file."""
    import matplotlib
    with matplotlib.rc_context(_STYLE):
        draw().savefig(
            file, format='svg',
            metadata={'Date': None, 'Creator': None, 'Description': description})


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """Ticks at these values alone."""
    from matplotlib.ticker import NullLocator
    axis.set_ticks(values, [f'{value:g}' for value in values])
    axis.set_minor_locator(NullLocator())


def _numbers(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
    axis.set_minor_locator(NullLocator())


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=min(len(labels), 3))


def _fastest(cell: Cell, names: Sequence[str]) -> float | None:
    times = [
        time for name in names
        if name in cell.results and (time := cell.results[name].median_ms) is not None]
    return min(times, default=None)


def _line(axes: Any, cells: Sequence[Cell], names: Sequence[str], label: str, k: int) -> None:
    points = [
        (cell.width, time) for cell in sorted(cells, key=lambda cell: cell.width)
        if (time := _fastest(cell, names)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=COLORS[k], marker=MARKERS[k], markersize=4,
                  label=label)


def _graphs(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.graph, []).append(cell)
    return found


def over(
    width: str, lines: Mapping[str, Sequence[str]], levels: Mapping[str, Sequence[str]] = {},
    titles: Sequence[str] = (), log: bool = False,
) -> Drawing:
    """Times over a width, k or S, with those that do not depend on it; a section or graph in each
    of the axes."""
    def draw(data: list[list[Cell]]) -> Any:
        panels = [
            (f'{title}, {graph}' if title else graph, cells)
            for title, section in zip(titles or [''] * len(data), data, strict=True)
            for graph, cells in _graphs(section).items()]
        figure, axes = _axes(len(panels))
        for each, (title, cells) in zip(axes, panels, strict=True):
            for k, (label, names) in enumerate(lines.items()):
                _line(each, cells, names, label, k)
            for k, (label, names) in enumerate(levels.items(), len(lines)):
                time = _fastest(cells[0], names)
                if time is not None:
                    each.axhline(time, color=COLORS[k], linestyle=('--', ':')[k % 2], label=label)
            each.set(title=title, xscale='log', xlabel=width, ylabel='ms')
            if log:
                each.set(yscale='log')
                _numbers(each.yaxis)
            else:
                each.set_ylim(bottom=0)
            _ticks(each.xaxis, sorted({cell.width for cell in cells}))
        _legend(figure, axes[0])
        return figure
    return draw


def _grouped(
    axes: Any, groups: Sequence[str], bars: Mapping[str, Sequence[float | None]],
) -> None:
    """Bars beside each other for each group."""
    size = 0.8 / max(len(bars), 1)
    for k, (label, values) in enumerate(bars.items()):
        places = [at + (k - (len(bars) - 1) / 2) * size for at in range(len(groups))]
        known = [(at, value) for at, value in zip(places, values, strict=True)
                 if value is not None]
        if known:
            axes.bar(*zip(*known, strict=True), size, color=COLORS[k], label=label)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis='x')


def bars(titles: Sequence[str], contenders: Mapping[str, str]) -> Drawing:
    """Times on a logarithmic axis, a section in each of the axes."""
    def draw(data: list[list[Cell]]) -> Any:
        figure, axes = _axes(len(data), 4.6)
        for each, title, cells in zip(axes, titles, data, strict=True):
            _grouped(each, [cell.graph.replace(', ', '\n') for cell in cells], {
                label: [_fastest(cell, [name]) for cell in cells]
                for label, name in contenders.items()})
            each.set(title=title, yscale='log', ylabel='ms')
            _numbers(each.yaxis)
        _legend(figure, axes[0])
        return figure
    return draw


def shares(width: int, contenders: Mapping[str, str]) -> Drawing:
    """Times over that of the first contender."""
    def draw(data: list[list[Cell]]) -> Any:
        figure, (axes,) = _axes(1, 7.6)
        cells = [cell for cell in data[0] if cell.width == width]
        first = next(iter(contenders.values()))

        def share(cell: Cell, name: str) -> float | None:
            whole, time = _fastest(cell, [first]), _fastest(cell, [name])
            return time / whole if whole and time is not None else None

        _grouped(axes, [cell.graph.replace(', ', '\n') for cell in cells], {
            label: [share(cell, name) for cell in cells] for label, name in contenders.items()})
        axes.set(ylabel=f'time over that with\n{next(iter(contenders))}',
                 title=f'{width} hidden channels')
        _legend(figure, axes)
        return figure
    return draw


def loading(samplers: Mapping[str, str], variants: Mapping[str, str]) -> Drawing:
    """Sampling and loading: the largest batch of each graph."""
    def draw(data: list[list[Cell]]) -> Any:
        figure, axes = _axes(2, 4.6, 3.2)
        for each, cells, contenders, title in zip(
                axes, data, (samplers, variants), ('sampling', 'loading from host memory'),
                strict=True):
            largest = [max(some, key=lambda cell: cell.width) for graph, some in
                       _graphs(cells).items() if '15, 10, 5' in graph]

            def time(cell: Cell, name: str) -> float | None:
                return _fastest(cell, [name] if name in cell.results else [
                    each for each in cell.results if each.startswith(f'{name},')])

            _grouped(each, [f"{cell.graph.split(',')[0]}\n{cell.width:,} seeds"
                            for cell in largest], {
                label: [time(cell, name) for cell in largest]
                for label, name in contenders.items()})
            each.set(title=title, ylabel='ms a batch')
            each.legend(loc='upper center', bbox_to_anchor=(0.5, -0.2), ncols=2)
        axes[0].set_yscale('log')
        _numbers(axes[0].yaxis)
        return figure
    return draw


def ratios(rows: Sequence[Sequence[Any]]) -> Any:
    """The least, mean and greatest ratio of each work, on a logarithmic axis."""
    figure, (axes,) = _axes(1, 7.2, 1.1 + 0.32 * len(rows))
    for at, (_, least, mean, most) in enumerate(rows):
        axes.plot([least, most], [at, at], color=COLORS[5], linewidth=5, solid_capstyle='butt',
                  label='worst to best row' if at == 0 else None)
        axes.plot([mean], [at], color=COLORS[0], marker='o', linestyle='',
                  label='geometric mean' if at == 0 else None)
    axes.axvline(1, color='black', linewidth=0.8)
    axes.set(xscale='log', xlabel='time of the best rival over ours', ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.grid(visible=False, axis='y')
    _numbers(axes.xaxis)
    _legend(figure, axes)
    return figure


def workloads(groups: Sequence[Sequence[Any]]) -> Any:
    """Times of PyG, compiled PyG and ours over PyG's, a group of bars for each kind of work."""
    figure, (axes,) = _axes(1, 7.6, 3.2)

    def share(cell: Cell, names: Sequence[str]) -> float | None:
        time, whole = _fastest(cell, names), _fastest(cell, ['PyG'])
        return time / whole if time is not None and whole else None

    def compiled(cell: Cell) -> list[str]:
        return [name for name in cell.results if name.startswith('PyG, torch.compile')]

    _grouped(axes, [label for label, _, _ in groups], {
        'PyG': [share(cell, ['PyG']) for _, cell, _ in groups],
        'PyG, torch.compile': [share(cell, compiled(cell)) for _, cell, _ in groups],
        'pyg_fast': [share(cell, [ours]) for _, cell, ours in groups]})
    axes.set(ylabel="time of a step, PyG's is 1")
    _legend(figure, axes)
    return figure


# Rooflines: rows are [section, graph, width, kernel, result] -------------------------------------

def _named(row: Sequence[Any]) -> str:
    section, _, width, kernel, _ = row
    dtype = section.rsplit(', ', 1)[-1]
    of = f', {dtype}' if dtype in ('float32', 'bfloat16', 'int8') else ''
    return f'{kernel}{of}, {width:,}'


def _largest(rows: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Of each kernel, graph and section the row of the greatest width."""
    found = {(row[0], row[1], row[3]): row for row in sorted(rows, key=lambda row: row[2])}
    return [row for row in rows if found[row[0], row[1], row[3]] is row]


def reached(rows: Sequence[Sequence[Any]]) -> Any:
    """Bars of the shares of the limit, a graph in each of the axes."""
    graphs: dict[str, list[Sequence[Any]]] = {}
    for row in _largest(rows):
        graphs.setdefault(row[1].split(',')[0], []).append(row)
    names = list(dict.fromkeys(_named(row) for some in graphs.values() for row in some))
    limits = list(dict.fromkeys(row[4]['limit'] for row in rows))
    figure, axes = _axes(len(graphs), 2.4 + 2.6 / len(graphs), 1.2 + 0.17 * len(names))
    for each, (graph, some) in zip(axes, graphs.items(), strict=True):
        for k, limit in enumerate(limits):
            chosen = [row for row in some if row[4]['limit'] == limit]
            each.barh([names.index(_named(row)) for row in chosen],
                      [100 * row[4]['share'] for row in chosen], color=COLORS[k],
                      label=f'limit: {limit}')
        each.axvline(100, color='black', linewidth=0.8)
        each.set(title=graph, xlabel='% of the limit', ylim=(len(names) - 0.5, -0.5))
        each.set_yticks(range(len(names)), names if each is axes[0] else [''] * len(names),
                        fontsize=7)
        each.grid(visible=False, axis='y')
    _legend(figure, axes[0])
    return figure


def roofline(rows: Sequence[Sequence[Any]]) -> Any:
    """Bytes gathered per second over gathers per byte moved, below memory and cached rows."""
    rows = [row for row in rows if row[4]['gather_ceiling']]
    figure, (axes,) = _axes(1, 7.2, 4.4)
    families: dict[str, list[tuple[float, float]]] = {}
    for section, _, _, _, result in rows:
        rate = result['gathered'] / result['median_ms'] / 1e6
        families.setdefault(section.split(',')[0], []).append(
            (result['gathered'] / result['must_move'], rate))
    for k, (family, points) in zip(itertools.cycle(range(len(COLORS))), families.items()):
        axes.scatter(*zip(*points, strict=True), s=18, color=COLORS[k], marker=MARKERS[k],
                     label=family)
    if rows:
        reuse = [x for points in families.values() for x, _ in points]
        ends = [min(*reuse, 1.0), max(*reuse, 2.0)]
        streams = [r[4]['stream_ceiling'] / 1e9 for r in rows if r[4]['stream'] == 'memory']
        if streams:
            axes.plot(ends, [x * max(streams) for x in ends], color='black', linewidth=1,
                      label='memory')
        ceilings = sorted({(row[4]['gather_ceiling'] / 1e9) for row in rows})
        for style, ceiling, size in zip(
                ('-.', '--'), dict.fromkeys((ceilings[0], ceilings[-1])), ('slowest', 'fastest'),
                strict=False):
            axes.axhline(ceiling, color='black', linestyle=style, linewidth=1,
                         label=f'cached rows, {size} size')
    axes.set(xscale='log', yscale='log', xlabel='bytes gathered for each byte that must move',
             ylabel='gathered, GB/s')
    _numbers(axes.xaxis)
    _numbers(axes.yaxis)
    _legend(figure, axes)
    return figure
