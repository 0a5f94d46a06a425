"""Trains the GAT paper's model with PyG's layers and with pyg_fast's, and compares the two.

The settings are those of the "Graph Attention Networks" paper: two layers, 8 heads of 8 channels
and then one output head (8, averaged, for PubMed), ELU between them, dropout 0.6 of features and of
attention, features of rows that sum to one, Adam, and an end once neither loss nor accuracy on the
validation nodes has improved for 100 epochs. Ends with a table: the test accuracy at the best
validation accuracy, and the time per epoch, which is that of the training step: forward, loss,
backward, optimizer. Both sides start from the same weights; dropout of attention drops other edges.
"""
from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from node_classification import add_dataset, at_least, check_root, choose_device, load, now, split
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv
from tqdm import tqdm

import pyg_fast
from pyg_fast.nn import FusedGATConv, FusedGATv2Conv
from pyg_fast.transforms import ToCSR


class Recipe(NamedTuple):
    """What a data set is trained with unless the command line says otherwise."""

    epochs: int
    lr: float = 0.005
    weight_decay: float = 5e-4
    out_heads: int = 1


RECIPES = {
    'planted': Recipe(epochs=30),
    **dict.fromkeys(('Cora', 'CiteSeer'), Recipe(epochs=1000)),
    'PubMed': Recipe(epochs=1000, lr=0.01, weight_decay=1e-3, out_heads=8),
}
CONVS = {
    ('gat', 'PyG'): GATConv,
    ('gat', 'pyg_fast'): FusedGATConv,
    ('gatv2', 'PyG'): GATv2Conv,
    ('gatv2', 'pyg_fast'): FusedGATv2Conv,
}
SIDES = {'pyg': ('PyG',), 'ours': ('pyg_fast',), 'both': ('PyG', 'pyg_fast')}


class GAT(nn.Module):
    """Two layers of attention.

    Args:
        conv: Class of the layers.
        in_channels: Size of each input sample.
        num_classes: Size of each output sample.
        hidden: Channels of each head of the first layer. (default: ``8``)
        heads: Heads of the first layer. (default: ``8``)
        out_heads: Heads of the second layer, averaged. (default: ``1``)
        dropout: Of features and of attention. (default: ``0.6``)
    """

    def __init__(
        self, conv: type[nn.Module], in_channels: int, num_classes: int, hidden: int = 8,
        heads: int = 8, out_heads: int = 1, dropout: float = 0.6,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv1 = conv(in_channels, hidden, heads, dropout=dropout)
        self.conv2 = conv(heads * hidden, num_classes, out_heads, concat=False, dropout=dropout)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, self.dropout, self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index)


class Point(NamedTuple):
    """The state of a training after an epoch; `seconds` are those of the training step."""

    seconds: float
    loss: float
    val_loss: float
    val: float
    test: float


@dataclass
class Outcome:
    """The runs of one side."""

    runs: list[list[Point]] = field(default_factory=list)

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of every run, in percent, at its best validation accuracy."""
        return [100 * max(run, key=lambda point: (point.val, -point.val_loss)).test
                for run in self.runs]

    @property
    def epoch_seconds(self) -> float:
        """Median duration of a training step."""
        return statistics.median(point.seconds for run in self.runs for point in run)

    @property
    def epochs(self) -> list[int]:
        """Number of epochs of every run."""
        return [len(run) for run in self.runs]


def train(
    model: nn.Module, data: Data, parts: dict[str, Tensor], args: argparse.Namespace
) -> Iterator[Point]:
    """Trains a network, epoch by epoch, until the patience runs out."""
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    labels = {part: data.y[nodes] for part, nodes in parts.items()}
    lowest, highest, waited = float('inf'), 0.0, 0
    for _ in range(args.epochs):
        model.train()
        start = now(data.x.device)
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[parts['train']], labels['train'])
        loss.backward()
        optimizer.step()
        seconds = now(data.x.device) - start

        model.eval()
        with torch.no_grad():
            out = model(data.x, data.edge_index)
        val_loss = F.cross_entropy(out[parts['val']], labels['val']).item()
        predicted = out.argmax(dim=-1)
        val, test = ((predicted[parts[part]] == labels[part]).float().mean().item()
                     for part in ('val', 'test'))
        yield Point(seconds, loss.item(), val_loss, val, test)

        waited = 0 if val_loss <= lowest or val >= highest else waited + 1
        lowest, highest = min(lowest, val_loss), max(highest, val)
        if waited == args.patience:
            return


def compare(args: argparse.Namespace) -> tuple[dict[str, int], dict[str, Outcome]]:
    """Trains all runs of all sides, which take turns; returns the size of the graph as well."""
    device = torch.device(args.device)
    data, num_classes = load(args)
    data = data.to(device)
    graphs = {'PyG': data, 'pyg_fast': ToCSR()(data)}
    outcomes = {side: Outcome() for side in SIDES[args.layers_of]}
    for run in range(args.runs):
        seed = args.seed + run
        for side, outcome in outcomes.items():
            graph = graphs[side]
            parts = split(graph, num_classes, seed)
            torch.manual_seed(seed)
            model = GAT(
                CONVS[args.model, side], data.num_features, num_classes, args.hidden, args.heads,
                args.out_heads, args.dropout).to(device)
            epochs = tqdm(train(model, graph, parts, args), f'{side:8} run {run + 1}/{args.runs}',
                          args.epochs, unit='epoch')
            points = []
            for point in epochs:
                points.append(point)
                epochs.set_postfix_str(
                    f'loss {point.loss:.3f}, validation {100 * point.val:.1f} %', refresh=False)
            outcome.runs.append(points)
    size = {'nodes': data.num_nodes, 'edges': data.num_edges, 'features': data.num_features,
            'classes': num_classes}
    return size, outcomes


def spread(values: list[float]) -> str:
    """Returns mean and standard deviation."""
    mean = f'{statistics.fmean(values):.2f}'
    return f'{mean} +- {statistics.stdev(values):.2f}' if len(values) > 1 else mean


def table(outcomes: dict[str, Outcome]) -> str:
    """Returns the comparison, one line per measure."""
    sides = list(outcomes.values())
    rows = [
        ['', *outcomes],
        ['test accuracy [%]', *(spread(side.accuracies) for side in sides)],
        ['epochs', *(f'{statistics.fmean(side.epochs):.0f}' for side in sides)],
        ['time per epoch [ms]', *(f'{1e3 * side.epoch_seconds:.2f}' for side in sides)],
    ]
    if len(sides) == 2:
        pyg, ours = sides
        difference = statistics.fmean(ours.accuracies) - statistics.fmean(pyg.accuracies)
        rows[0].append('')
        rows[1].append(f'{difference:+.2f} points')
        rows[2].append('')
        rows[3].append(f'{pyg.epoch_seconds / ours.epoch_seconds:.2f} x')
    return '\n'.join((f'{name:24}' + ''.join(f'{value:>16}' for value in values)).rstrip()
                     for name, *values in rows)


def record(
    args: argparse.Namespace, size: dict[str, int], outcomes: dict[str, Outcome]
) -> dict[str, Any]:
    """Returns the options, the versions and the scores."""
    return {
        'arguments': {key: str(value) if isinstance(value, Path) else value
                      for key, value in vars(args).items()},
        'graph': size,
        'device': torch.cuda.get_device_name() if args.device == 'cuda' else platform.processor()
        or platform.machine(),
        'versions': {
            'python': platform.python_version(),
            'torch': torch.__version__,
            'torch_geometric': torch_geometric.__version__,
            'pyg_fast': pyg_fast.__version__,
        },
        'outcomes': {side: {
            'accuracies': outcome.accuracies,
            'mean_accuracy': statistics.fmean(outcome.accuracies),
            'epochs': outcome.epochs,
            'epoch_ms': 1e3 * outcome.epoch_seconds,
        } for side, outcome in outcomes.items()},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_dataset(parser, RECIPES, 'small')
    add('--model', choices=('gat', 'gatv2'), default='gat', help='(default: gat)')
    add('--layers-of', choices=SIDES, default='both', help='(default: both)')
    for name, default in {'hidden': 8, 'heads': 8}.items():
        add(f'--{name}', type=at_least(1, int), default=default,
            help=f'of the first layer (default: {default})')
    for name, convert in {'out-heads': at_least(1, int), 'epochs': at_least(1, int),
                          'lr': at_least(0, float), 'weight-decay': at_least(0, float)}.items():
        add(f'--{name}', type=convert, help="(default: the paper's for the data set)")
    add('--dropout', type=at_least(0, float, below=1), default=0.6, help='(default: 0.6)')
    add('--patience', type=at_least(1, int), default=100,
        help='epochs without a better validation score before the end (default: 100)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--runs', type=at_least(1, int), default=1, help='(default: 1)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--json', type=Path, metavar='FILE', help='record to write')
    args = parser.parse_args(argv)

    for name, value in RECIPES[args.dataset]._asdict().items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    choose_device(parser, args)
    check_root(parser, args)
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f'--json {args.json}: no such folder')
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    graph = f'planted, {args.size}' if args.dataset == 'planted' else args.dataset
    print(f'{args.model} on {graph} ({args.device}): {args.heads} x {args.hidden}, then '
          f'{args.out_heads} heads, dropout {args.dropout}, lr {args.lr}, weight decay '
          f'{args.weight_decay}, at most {args.epochs} epochs, seed {args.seed}', flush=True)
    size, outcomes = compare(args)
    about = ', '.join(f'{count:,} {what}' for what, count in size.items())
    print(f'\n{about}\n\n{table(outcomes)}')
    if args.json is not None:
        text = json.dumps(record(args, size, outcomes), indent=1)
        args.json.write_text(text + '\n', encoding='utf-8')
        print(f'\nwrote {args.json}')


if __name__ == '__main__':
    main()
