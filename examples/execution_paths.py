"""Trains on shares of the nodes at several depths, along execution paths and with all nodes active.

A loss on some nodes reads only what lies within as many steps as there are layers. The same network
takes the same training steps (forward, loss, backward, optimizer), which take turns, in four ways:

  all active   every layer computes every row, forward and backward
  backward     the backward pass along the paths, as in the paper of execution path preparation
  forward      the forward pass along them, too
  cached       that, with the first layer's aggregation of the features made once for all steps

Ends with a table per graph: for each share of training nodes and each number of layers the share of
the graph's edges in each layer's path, first to last layer, the median time of a step and the
speed-up over all active, and what Prepare (sorting and paths, from a plain edge_index) takes, in
steps of all active. Below it stands where the ways gain nothing: the more nodes train, the denser
the graph and the deeper the network, the more of the graph the paths hold. Times are of float32; in
float64 all four must come to the same losses, or the program ends with an error.
"""
from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from node_classification import RECIPES, at_least, choose_device, load, now
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_fast
from pyg_fast.datasets import SIZES
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.transforms import ExecutionPaths, Prepare, ToCSR


class Way(NamedTuple):
    """A way to take the same training step."""

    paths: bool = False
    forward: bool = False
    aggregate_input: bool = False


ALL_ACTIVE = 'all active'
WAYS = {
    ALL_ACTIVE: Way(),
    'backward': Way(paths=True),
    'forward': Way(paths=True, forward=True),
    'cached': Way(paths=True, forward=True, aggregate_input=True),
}
REAL = tuple(name for name in RECIPES if name != 'planted')
GRAPHS = {'cpu': 'small,dense-small', 'cuda': 'arxiv-like,dense-medium'}
MODELS = ('gcn', 'sage', 'gin')
NORMS = {'gin': 'layer_norm'}  # whose sums over hubs would grow from layer to layer
LR = 0.01
WARM_UP = 2  # steps, not timed: the first ones keep degrees, scales and the aggregated input
PREPARATIONS = 3
CHECKED = 3  # steps in float64: in float32 Adam makes much of what rounding leaves
TOLERANCE = 1e-9  # the largest difference of losses, as a share of the first loss
PAYS = 1.05  # a lower speed-up does not pay


@dataclass
class Cell:
    """Measurements of all ways at one share of training nodes and one number of layers."""

    share: float
    num_layers: int
    paths: list[dict[str, Any]] = field(default_factory=list)
    preparation_seconds: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f'{percent(self.share)} %, {layers(self.num_layers)}'

    def step_seconds(self, way: str) -> float:
        """Median duration of a training step."""
        return statistics.median(self.seconds[way])

    def speedup(self, way: str) -> float:
        """Speed-up over all active."""
        return self.step_seconds(ALL_ACTIVE) / self.step_seconds(way)

    @property
    def preparation_steps(self) -> float:
        """Duration of the preparation, in steps of all active."""
        return self.preparation_seconds / self.step_seconds(ALL_ACTIVE)

    @property
    def difference(self) -> float:
        """The largest difference of a loss from that of all active, as a share of the first."""
        expected = torch.tensor(self.losses[ALL_ACTIVE], dtype=torch.double)
        losses = torch.tensor(list(self.losses.values()), dtype=torch.double)
        return ((losses - expected).abs().max() / expected[0]).item()


@dataclass
class Sweep:
    """The measurements on one graph."""

    name: str
    graph: dict[str, int]
    cells: list[Cell] = field(default_factory=list)


# Training ---------------------------------------------------------------------------------------

class Trainer:
    """Trains a network in one way.

    Args:
        way: How steps are taken.
        data: A graph prepared by ToCSR, with a ``train_mask``; the type of its features is that of
            the network.
        num_layers: Number of layers.
        num_classes: Size of each output sample.
        args: The options.
    """

    def __init__(
        self, way: Way, data: Data, num_layers: int, num_classes: int, args: argparse.Namespace
    ) -> None:
        self.data = data
        self.nodes = data.train_mask.nonzero().view(-1)
        self.labels = data.y[self.nodes]
        self.paths = None
        if way.paths:  # with Prepare instead of ToCSR, graphs come with them
            self.paths = ExecutionPaths(num_layers, forward=way.forward)(data).execution_paths
        torch.manual_seed(args.seed)  # the same initial weights for all
        self.model = PathPreparedGNN(
            args.model, data.num_features, args.hidden, num_classes, num_layers,
            dropout=args.dropout, norm=NORMS.get(args.model),
        ).to(data.x)
        self.x = data.x
        if way.aggregate_input:
            self.x = self.model.aggregate_input(data.x, data.edge_index)
        self.optimizer = torch.optim.Adam(self.model.parameters(), LR)

    def step(self) -> Tensor:
        """Makes a training step and returns the loss."""
        self.optimizer.zero_grad()
        out = self.model(self.x, self.data.edge_index, paths=self.paths)
        loss = F.cross_entropy(out[self.nodes], self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def preparation_seconds(plain: Data, num_layers: int) -> float:
    """Returns how long the preparation of a new graph takes."""
    device = plain.x.device
    durations = []
    for _ in range(PREPARATIONS):
        data = plain.clone()  # caches belong to a tensor: each preparation needs a new one
        start = now(device)
        Prepare(num_layers)(data)
        durations.append(now(device) - start)
    return statistics.median(durations)


def measure(
    cell: Cell, plain: Data, graph: Data, num_classes: int, args: argparse.Namespace
) -> Iterator[None]:
    """Trains in all ways, which take turns, and checks their losses; yields after each step."""
    device = graph.x.device

    def trainers(data: Data) -> dict[str, Trainer]:
        return {name: Trainer(way, data, cell.num_layers, num_classes, args)
                for name, way in WAYS.items()}

    cell.preparation_seconds = preparation_seconds(plain, cell.num_layers)
    timed = trainers(graph)
    cell.paths = [
        {'nodes': path.num_dst, 'edges': path.num_path_edges,
         'share': path.num_path_edges / max(path.num_edges, 1), 'whole': path.is_whole,
         'bytes': path.num_bytes}
        for path in timed['backward'].paths]
    for step in range(WARM_UP + args.steps):
        for name, trainer in timed.items():
            torch.manual_seed(args.seed + step)  # all ways drop the same features
            start = now(device)
            trainer.step()
            seconds = now(device) - start
            if step >= WARM_UP:
                cell.seconds.setdefault(name, []).append(seconds)
        yield
    del timed, trainer

    exact = copy.copy(graph)
    exact.x = graph.x.double()
    checked = trainers(exact)
    for step in range(CHECKED):
        for name, trainer in checked.items():
            torch.manual_seed(args.seed + step)
            cell.losses.setdefault(name, []).append(trainer.step().item())
        yield
    if not cell.difference <= TOLERANCE:  # `not <=` also refuses a NaN
        raise RuntimeError(
            f'losses with {cell} differ by {cell.difference:.1e} of the first: {cell.losses}')


def sweep(name: str, args: argparse.Namespace) -> Sweep:
    """Measures all shares and depths on one graph."""
    data, num_classes = load(argparse.Namespace(
        dataset='planted' if name in SIZES else name, size=name, root=args.root, seed=args.seed))
    device = torch.device(args.device)
    plain = Data(x=data.x, y=data.y, edge_index=data.edge_index).to(device)
    graph = ToCSR()(plain.clone())
    order = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(args.seed))
    result = Sweep(name, {'nodes': data.num_nodes, 'edges': data.num_edges,
                          'features': data.num_features, 'classes': num_classes})
    steps = len(args.shares) * len(args.layers) * (WARM_UP + args.steps + CHECKED)
    with tqdm(total=steps, desc=f'{name:16}', unit='step') as bar:
        for share in args.shares:
            mask = torch.zeros(data.num_nodes, dtype=torch.bool)
            mask[order[:max(1, round(share * data.num_nodes))]] = True
            plain.train_mask = graph.train_mask = mask.to(device)
            for num_layers in args.layers:
                cell = Cell(share, num_layers)
                bar.set_postfix_str(str(cell), refresh=False)
                for _ in measure(cell, plain, graph, num_classes, args):
                    bar.update()
                result.cells.append(cell)
    return result


# Reports ----------------------------------------------------------------------------------------

def percent(share: float) -> str:
    """Returns a share in percent, without needless zeros."""
    return f'{100 * share:.3g}'


def layers(count: int) -> str:
    """Returns a number of layers in words."""
    return f'{count} layer{"s" * (count > 1)}'


def table(result: Sweep) -> str:
    """Returns a line per share and depth."""
    rows = [('nodes', 'layers', 'edges of paths', *WAYS, 'preparation')]
    for cell in result.cells:
        everything, *others = WAYS
        rows.append((
            percent(cell.share), str(cell.num_layers),
            ' '.join(f'{100 * path["share"]:.0f}{"*" * path["whole"]}' for path in cell.paths),
            f'{1e3 * cell.step_seconds(everything):.2f}',
            *(f'{1e3 * cell.step_seconds(way):.2f} {cell.speedup(way):5.2f} x' for way in others),
            f'{cell.preparation_steps:.1f}'))
    widths = (6, 8, 22, *(12 if way == ALL_ACTIVE else 16 for way in WAYS), 13)
    lines = [''.join(f'{value:>{width}}' for value, width in zip(row, widths, strict=True))
             for row in rows]
    if any(path['whole'] for cell in result.cells for path in cell.paths):
        lines.append('* so many that no copy is kept: the layer runs on all edges')
    return '\n'.join(lines)


def verdict(result: Sweep) -> str:
    """Returns for each way its mean speed-up, its best and worst, and where it does not pay."""
    lines = []
    for way in WAYS:
        if way == ALL_ACTIVE:
            continue
        best, worst = (choose(result.cells, key=lambda cell: cell.speedup(way))
                       for choose in (max, min))
        mean = statistics.geometric_mean(cell.speedup(way) for cell in result.cells)
        lines.append(f'{way}: {mean:.2f} x (geometric mean), best {best.speedup(way):.2f} x at '
                     f'{best}, worst {worst.speedup(way):.2f} x at {worst}')
        idle: dict[int, list[str]] = {}
        for cell in result.cells:
            if cell.speedup(way) < PAYS:
                idle.setdefault(cell.num_layers, []).append(percent(cell.share))
        if idle:
            tried = len({cell.share for cell in result.cells})
            where = '; '.join(
                layers(count) + (f': {", ".join(shares)} %' if len(shares) < tried else ' at all')
                for count, shares in sorted(idle.items()))
            lines.append(f'  does not pay (below {PAYS} x) with {where}')
    return '\n'.join(lines)


def agreement(sweeps: Sequence[Sweep]) -> str:
    """Returns a line on the largest difference of losses."""
    cells = [cell for result in sweeps for cell in result.cells]
    difference = max(cell.difference for cell in cells)
    return (f'In float64 all ways came to the same losses, step by step: at most {difference:.1e} '
            f'of the first loss apart in {CHECKED} steps ({TOLERANCE:.0e} is allowed).')


def plot(sweeps: Sequence[Sweep], title: str, file: Path) -> None:
    """Draws the edges of the paths and the speed-ups over the share of training nodes."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    from matplotlib.ticker import NullLocator

    style = {'axes.spines.top': False, 'axes.spines.right': False, 'axes.grid': True,
             'grid.color': '#e8e8e8', 'axes.axisbelow': True, 'axes.titlelocation': 'left',
             'axes.titlesize': 11, 'font.size': 10}
    ways = [way for way in WAYS if way != ALL_ACTIVE]
    depths = sorted({cell.num_layers for result in sweeps for cell in result.cells})
    shades = pyplot.get_cmap('viridis')
    with pyplot.rc_context(style):
        figure, rows = pyplot.subplots(
            len(sweeps), 1 + len(ways), figsize=(13, 0.6 + 3.2 * len(sweeps)), sharex=True,
            squeeze=False, layout='constrained')
        for (edges, *speedups), result in zip(rows, sweeps, strict=True):
            for k, count in enumerate(depths):
                cells = sorted((cell for cell in result.cells if cell.num_layers == count),
                               key=lambda cell: cell.share)
                shares = [100 * cell.share for cell in cells]
                line = {'color': shades(0.9 * k / max(len(depths) - 1, 1)), 'marker': 'o',
                        'linewidth': 1.8, 'label': str(count)}
                edges.plot(shares, [100 * statistics.fmean(path['share'] for path in cell.paths)
                                    for cell in cells], **line)
                for axes, way in zip(speedups, ways, strict=True):
                    axes.plot(shares, [cell.speedup(way) for cell in cells], **line)
            edges.set_title(f'{result.name}: edges of paths [%]')
            edges.set_ylim(0, 105)
            for axes, way in zip(speedups, ways, strict=True):
                axes.axhline(1, color='black', linestyle=':')
                axes.set_title(f'Speed-up: {way}')
                axes.set_ylim(0, 1.05 * max(1, *(cell.speedup(way) for cell in result.cells
                                                 for way in ways)))
            ticks = sorted({100 * cell.share for cell in result.cells})
            for axes in (edges, *speedups):
                axes.set_xscale('log')
                axes.set_xticks(ticks, [f'{tick:.3g}' for tick in ticks])
                axes.xaxis.set_minor_locator(NullLocator())
        for axes in rows[-1]:
            axes.set_xlabel('training nodes [%]')
        handles, labels = max((axes[0].get_legend_handles_labels() for axes in rows),
                              key=lambda found: len(found[1]))
        figure.legend(handles, labels, title='layers', loc='outside right center', frameon=False)
        figure.suptitle(title, x=0.01, ha='left', weight='bold')
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


def record(args: argparse.Namespace, sweeps: Sequence[Sweep]) -> dict[str, Any]:
    """Returns the options, the versions and the times."""
    return {
        'arguments': {key: str(value) if isinstance(value, Path) else value
                      for key, value in vars(args).items()},
        'device': torch.cuda.get_device_name() if args.device == 'cuda' else platform.processor()
        or platform.machine(),
        'threads': torch.get_num_threads(),
        'versions': {
            'python': platform.python_version(),
            'torch': torch.__version__,
            'torch_geometric': torch_geometric.__version__,
            'pyg_fast': pyg_fast.__version__,
        },
        'graphs': {result.name: {**result.graph, 'cells': [{
            'share': cell.share,
            'layers': cell.num_layers,
            'paths': cell.paths,
            'step_ms': {way: 1e3 * cell.step_seconds(way) for way in WAYS},
            'speedup': {way: cell.speedup(way) for way in WAYS},
            'preparation_ms': 1e3 * cell.preparation_seconds,
            'preparation_steps': cell.preparation_steps,
            'losses': cell.losses,
            'difference': cell.difference,
        } for cell in result.cells]} for result in sweeps},
    }


# Options ----------------------------------------------------------------------------------------

def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    def several(kind: Callable[[str], Any], fits: Callable[[Any], bool], expected: str):
        def convert(text: str) -> list[Any]:
            try:
                values = [kind(word) for word in text.split(',')]
            except ValueError:
                values = []
            if not values or not all(map(fits, values)):
                raise argparse.ArgumentTypeError(f"got '{text}', expected {expected}")
            return list(dict.fromkeys(values))
        return convert

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = (*SIZES, *REAL)
    add('--graphs', metavar='NAME,...',
        type=several(str, names.__contains__, f'some of {", ".join(names)}'),
        help=f'planted ones ({", ".join(SIZES)}) and real ones ({", ".join(REAL)}) '
        f'(default: {GRAPHS["cpu"]}; on a GPU {GRAPHS["cuda"]})')
    add('--root', type=Path, help='folder of the real graphs, downloaded if not there')
    add('--model', choices=MODELS, default='gcn', help='(default: gcn)')
    add('--shares', type=several(float, lambda share: 0 < share <= 1, 'shares such as 0.1,0.01'),
        default='0.5,0.2,0.1,0.05,0.01', metavar='SHARE,...',
        help='of the nodes to train on (default: 0.5,0.2,0.1,0.05,0.01)')
    add('--layers', type=several(int, lambda count: count >= 1, 'numbers such as 1,2,3'),
        default='1,2,3,4', metavar='L,...', help='(default: 1,2,3,4)')
    add('--hidden', type=at_least(1, int), default=64, help='channels (default: 64)')
    add('--dropout', type=at_least(0, float, below=1), default=0.5, help='(default: 0.5)')
    add('--steps', type=at_least(1, int), default=10,
        help=f'to time, after {WARM_UP} more (default: 10)')
    add('--seed', type=at_least(0, int), default=0, help='(default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--plot', type=Path, metavar='FILE', help='picture to write (.png, .pdf, .svg)')
    add('--json', type=Path, metavar='FILE', help='record to write')
    args = parser.parse_args(argv)

    choose_device(parser, args)
    if args.graphs is None:
        args.graphs = GRAPHS[args.device].split(',')
    real = [name for name in args.graphs if name in REAL]
    if real and args.root is None:
        parser.error(f'--graphs {",".join(real)} needs --root, the folder to keep it in')
    if args.plot is not None:
        if args.plot.suffix not in ('.png', '.pdf', '.svg'):
            parser.error(f'--plot {args.plot}: expected a name ending in .png, .pdf or .svg')
        if importlib.util.find_spec('matplotlib') is None:
            parser.error('--plot needs matplotlib')
    for option in ('plot', 'json'):
        file = getattr(args, option)
        if file is not None and not file.parent.is_dir():
            parser.error(f'--{option} {file}: no such folder')
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    title = f'{args.model.upper()} on execution paths ({args.device})'
    print(f'{title}: hidden {args.hidden}, dropout {args.dropout}, {args.steps} steps, '
          f'seed {args.seed}', flush=True)
    sweeps = []
    for name in args.graphs:
        result = sweep(name, args)
        sweeps.append(result)
        size = ', '.join(f'{count:,} {what}' for what, count in result.graph.items())
        print(f'\n{name}: {size}\n\nnodes to train on and edges in %, times per step in ms with '
              f'speed-ups, preparation in steps\n{table(result)}\n\n{verdict(result)}\n',
              flush=True)
    print(agreement(sweeps))
    if args.plot is not None:
        plot(sweeps, title, args.plot)
        print(f'\nwrote {args.plot}')
    if args.json is not None:
        args.json.write_text(json.dumps(record(args, sweeps), indent=1) + '\n', encoding='utf-8')
        print(f'\nwrote {args.json}')


if __name__ == '__main__':
    main()
