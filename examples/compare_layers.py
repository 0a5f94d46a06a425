"""Trains the same small network with every layer of pyg_fast and with PyG's: one table of all.

Two convolutions, dropout between them, trained on the whole graph at once. Each row of the table is
one layer: the test accuracy at the best validation accuracy, the median times of a training step
(forward, loss, backward, optimizer) and of an inference of all nodes, and peak memory, each with
how many times as much PyG's layer takes. What the rows differ in:

  ..., path     the backward pass along the execution paths of the training nodes
  MaxK...       the k largest hidden features in place of ReLU: another network
  Sampled...    trained on all edges; at inference each node reads at most S of its own

PyG's layers read a plain edge_index, ours a graph that is prepared once, before the first epoch.
Peak memory is what the process (on a GPU: torch's allocator) takes at most on top of the loaded
data; each layer has a process of its own.
"""
from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import platform
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from node_classification import (
    RECIPES,
    PeakMemory,
    add_dataset,
    at_least,
    check_root,
    choose_device,
    load,
    now,
    split,
)
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    SAGEConv,
    TransformerConv,
)
from tqdm import tqdm

import pyg_fast
from pyg_fast.nn import (
    FusedGATConv,
    FusedGATv2Conv,
    FusedGCNConv,
    FusedGINConv,
    FusedSAGEConv,
    FusedTransformerConv,
    MaxKGCNConv,
    MaxKGINConv,
    MaxKSAGEConv,
    PathPreparedGCNConv,
    PathPreparedGINConv,
    PathPreparedSAGEConv,
    SampledGCNConv,
    SampledSAGEConv,
)
from pyg_fast.transforms import Prepare, ToCSR


class Layer(NamedTuple):
    """A row of the table."""

    family: str
    conv: type[nn.Module]
    along_paths: bool = False

    @property
    def name(self) -> str:
        """The name of the row in the table."""
        return self.conv.__name__ + ', path' * self.along_paths

    @property
    def is_ours(self) -> bool:
        """Whether the layer reads a prepared graph."""
        return self.conv.__module__.startswith('pyg_fast.')

    @property
    def is_maxk(self) -> bool:
        """Whether the network keeps the k largest features."""
        return self.conv in (MaxKGCNConv, MaxKSAGEConv, MaxKGINConv)


# PyG's comes first in each family.
LAYERS = (
    Layer('gcn', GCNConv),
    Layer('gcn', FusedGCNConv),
    Layer('gcn', PathPreparedGCNConv, along_paths=True),
    Layer('gcn', MaxKGCNConv),
    Layer('gcn', SampledGCNConv),
    Layer('sage', SAGEConv),
    Layer('sage', FusedSAGEConv),
    Layer('sage', PathPreparedSAGEConv, along_paths=True),
    Layer('sage', MaxKSAGEConv),
    Layer('sage', SampledSAGEConv),
    Layer('gin', GINConv),
    Layer('gin', FusedGINConv),
    Layer('gin', PathPreparedGINConv, along_paths=True),
    Layer('gin', MaxKGINConv),
    Layer('gat', GATConv),
    Layer('gat', FusedGATConv),
    Layer('gatv2', GATv2Conv),
    Layer('gatv2', FusedGATv2Conv),
    Layer('transformer', TransformerConv),
    Layer('transformer', FusedTransformerConv),
)
FAMILIES = tuple(dict.fromkeys(layer.family for layer in LAYERS))
EPOCHS = 30


class Net(nn.Module):
    """Two convolutions with ReLU, or MaxK, and dropout between them."""

    def __init__(
        self, layer: Layer, in_channels: int, num_classes: int, args: argparse.Namespace
    ) -> None:
        super().__init__()
        self.act = nn.Identity() if layer.is_maxk else nn.ReLU()
        self.dropout = args.dropout
        self.conv1 = convolution(layer, in_channels, args.hidden, args, last=False)
        self.conv2 = convolution(layer, args.hidden, num_classes, args, last=True)

    def forward(
        self, x: Tensor, edge_index: Tensor, paths: list[Any] | None = None
    ) -> Tensor:
        first, second = ({}, {}) if paths is None else ({'path': path} for path in paths)
        x = self.act(self.conv1(x, edge_index, **first))
        x = F.dropout(x, self.dropout, self.training)
        return self.conv2(x, edge_index, **second)


def convolution(
    layer: Layer, in_channels: int, out_channels: int, args: argparse.Namespace, last: bool
) -> nn.Module:
    """Returns one convolution. MaxK is that of the hidden features, wherever a layer takes it."""
    if layer.family in ('gat', 'gatv2', 'transformer'):
        if last:
            return layer.conv(in_channels, out_channels, concat=False)
        return layer.conv(in_channels, out_channels // args.heads, args.heads)
    options: dict[str, Any] = {}
    if layer.is_maxk and last != (layer.family == 'gcn'):
        options['k'] = args.k  # GCN's is that of its result, the others' that of their input
        if layer.family != 'gcn':
            options['maxk_root'] = True
    if layer.conv in (SampledGCNConv, SampledSAGEConv):
        options['num_samples'] = args.samples
    if layer.family == 'gin':
        return layer.conv(nn.Sequential(
            nn.Linear(in_channels, out_channels), nn.ReLU(), nn.Linear(out_channels, out_channels)
        ), **options)
    return layer.conv(in_channels, out_channels, **options)


class Point(NamedTuple):
    """The state of a training after an epoch, and how long its parts took."""

    step_seconds: float
    inference_seconds: float
    loss: float
    val: float
    test: float


@dataclass
class Outcome:
    """The runs of one layer."""

    graph: dict[str, int]
    runs: list[list[Point]] = field(default_factory=list)
    peak_bytes: int | None = None

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of every run, in percent, at its best validation accuracy."""
        return [100 * max(run, key=lambda point: point.val).test for run in self.runs]

    def median(self, measure: str) -> float:
        """Median of some seconds, over all epochs of all runs."""
        return statistics.median(getattr(point, measure) for run in self.runs for point in run)


def train(
    net: Net, data: Data, parts: dict[str, Tensor], args: argparse.Namespace, epochs: int
) -> Iterator[Point]:
    """Trains a network, epoch by epoch."""
    optimizer = torch.optim.Adam(net.parameters(), args.lr, weight_decay=args.weight_decay)
    labels = {part: data.y[nodes] for part, nodes in parts.items()}
    paths = data.execution_paths if 'execution_paths' in data else None
    for _ in range(epochs):
        net.train()
        start = now(data.x.device)
        optimizer.zero_grad()
        out = net(data.x, data.edge_index, paths)
        loss = F.cross_entropy(out[parts['train']], labels['train'])
        loss.backward()
        optimizer.step()
        step_seconds = now(data.x.device) - start

        net.eval()
        with torch.no_grad():
            start = now(data.x.device)
            out = net(data.x, data.edge_index)
            inference_seconds = now(data.x.device) - start
        predicted = out.argmax(dim=-1)
        val, test = ((predicted[parts[part]] == labels[part]).float().mean().item()
                     for part in ('val', 'test'))
        yield Point(step_seconds, inference_seconds, loss.item(), val, test)


def prepared(layer: Layer, data: Data, train_nodes: Tensor) -> Data:
    """Returns the graph as the layer reads it best."""
    if not layer.is_ours:
        return data
    if not layer.along_paths:
        return ToCSR()(data)
    mask = torch.zeros(data.num_nodes, dtype=torch.bool, device=data.x.device)
    mask[train_nodes] = True
    data = copy.copy(data)
    data.train_mask = mask
    return Prepare(num_layers=2)(data)


def measure(layer: Layer, args: argparse.Namespace) -> Outcome:
    """Trains all runs of one layer."""
    data, num_classes = load(args)
    data = data.to(args.device)
    outcome = Outcome({'nodes': data.num_nodes, 'edges': data.num_edges,
                       'features': data.num_features, 'classes': num_classes})

    def new_net() -> Net:
        return Net(layer, data.num_features, num_classes, args).to(args.device)

    # Libraries that load on first use count for no layer.
    nodes = torch.arange(64, device=data.x.device)
    ring = Data(x=data.x[:1].repeat(64, 1), y=torch.zeros_like(nodes),
                edge_index=torch.stack([nodes, nodes.roll(1)]))
    everybody = dict.fromkeys(('train', 'val', 'test'), nodes)
    list(train(new_net(), prepared(layer, ring, nodes), everybody, args, epochs=2))

    memory = PeakMemory(torch.device(args.device))
    for run in range(args.runs):
        seed = args.seed + run
        parts = split(data, num_classes, seed)
        graph = prepared(layer, data, parts['train'])
        torch.manual_seed(seed)
        net = new_net()
        torch.manual_seed(seed)  # all drop the same hidden features
        outcome.runs.append(list(tqdm(
            train(net, graph, parts, args, args.epochs),
            f'{layer.name:26} run {run + 1}/{args.runs}', args.epochs, unit='epoch')))
    outcome.peak_bytes = memory.growth()
    return outcome


def in_own_process(layer: Layer, args: argparse.Namespace) -> Outcome | None:
    """Runs :meth:`measure` where no other layer has left memory behind; None: it did not fit."""
    context = multiprocessing.get_context('spawn')
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            return pool.submit(measure, layer, args).result()
        except torch.OutOfMemoryError:
            return None
        except BrokenProcessPool:
            print(f'the process of {layer.name} died, most likely out of memory', file=sys.stderr)
            return None


def chosen(args: argparse.Namespace) -> list[Layer]:
    """Returns the layers of the chosen families."""
    return [layer for layer in LAYERS if layer.family in args.families]


def table(outcomes: dict[Layer, Outcome | None]) -> str:
    """Returns one line for each layer, families apart."""
    def spread(values: list[float]) -> str:
        mean = f'{statistics.fmean(values):.1f}'
        return f'{mean} +- {statistics.stdev(values):.1f}' if len(values) > 1 else mean

    def cell(value: float | None, pyg: float | None, scale: float) -> list[str]:
        if value is None:
            return ['unknown', '']
        return [f'{scale * value:.2f}', f'{pyg / value:.2f} x' if pyg and value > 0 else '']

    titles = ('layer', 'test accuracy [%]', 'step [ms]', '', 'inference [ms]', '',
              'peak memory [MB]', '')
    lines, theirs, family = [titles], None, None
    for layer, outcome in outcomes.items():
        if layer.family != family:
            lines.append(())
            family, theirs = layer.family, None
        if outcome is None:
            lines.append((layer.name, 'out of memory'))
            continue
        if not layer.is_ours:
            theirs = outcome
        pyg = theirs if layer.is_ours else None
        cells = [layer.name, spread(outcome.accuracies)]
        for part in ('step_seconds', 'inference_seconds'):
            cells += cell(outcome.median(part), pyg and pyg.median(part), 1e3)
        lines.append((*cells, *cell(outcome.peak_bytes, pyg and pyg.peak_bytes, 1e-6)))
    widths = (26, 19, 12, 9, 16, 9, 18, 10)
    return '\n'.join(
        ''.join(f'{text:<{width}}' if k == 0 else f'{text:>{width}}'
                for k, (text, width) in enumerate(zip(line, widths, strict=False))).rstrip()
        for line in lines)


def record(args: argparse.Namespace, outcomes: dict[Layer, Outcome | None]) -> dict[str, Any]:
    """Returns the options, the versions and the scores."""
    return {
        'arguments': {key: str(value) if isinstance(value, Path) else value
                      for key, value in vars(args).items()},
        'graph': next((o.graph for o in outcomes.values() if o is not None), None),
        'device': torch.cuda.get_device_name() if args.device == 'cuda' else platform.processor()
        or platform.machine(),
        'versions': {
            'python': platform.python_version(),
            'torch': torch.__version__,
            'torch_geometric': torch_geometric.__version__,
            'pyg_fast': pyg_fast.__version__,
        },
        'outcomes': {layer.name: outcome and {
            'accuracies': outcome.accuracies,
            'step_ms': 1e3 * outcome.median('step_seconds'),
            'inference_ms': 1e3 * outcome.median('inference_seconds'),
            'peak_bytes': outcome.peak_bytes,
        } for layer, outcome in outcomes.items()},
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_dataset(parser, RECIPES, 'small')
    add('--families', nargs='+', choices=FAMILIES, default=list(FAMILIES), metavar='FAMILY',
        help=f'of {", ".join(FAMILIES)} (default: all)')
    for name, default, note in (
            ('hidden', 64, ''), ('heads', 8, 'of attention; they share the hidden channels'),
            ('k', 8, 'features that MaxK keeps'), ('samples', 8, 'edges of a node, the S'),
            ('epochs', EPOCHS, ''), ('runs', 1, '')):
        add(f'--{name}', type=at_least(1, int), default=default,
            help=f'{note} (default: {default})'.strip())
    add('--lr', type=at_least(0, float), default=0.01, help='(default: 0.01)')
    add('--weight-decay', type=at_least(0, float), default=5e-4, help='(default: 0.0005)')
    add('--dropout', type=at_least(0, float, below=1), default=0.5, help='(default: 0.5)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--json', type=Path, metavar='FILE', help='record to write')
    args = parser.parse_args(argv)

    choose_device(parser, args)
    check_root(parser, args)
    if args.hidden % args.heads:
        parser.error(f'--hidden {args.hidden} is no multiple of --heads {args.heads}')
    if args.k > args.hidden:
        parser.error(f'--k {args.k} is more than --hidden {args.hidden}')
    if args.samples > 4096:
        parser.error(f'--samples {args.samples} is more than 4096')
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f'--json {args.json}: no such folder')
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    graph = f'planted, {args.size}' if args.dataset == 'planted' else args.dataset
    print(f'{graph} ({args.device}): two layers, hidden {args.hidden}, {args.heads} heads, '
          f'k {args.k}, S {args.samples}, {args.epochs} epochs, seed {args.seed}', flush=True)
    outcomes = {layer: in_own_process(layer, args) for layer in chosen(args)}
    size = next((o.graph for o in outcomes.values() if o is not None), {})
    about = ', '.join(f'{count:,} {what}' for what, count in size.items())
    print(f'\n{about}\n\n{table(outcomes)}')
    if args.json is not None:
        args.json.write_text(json.dumps(record(args, outcomes), indent=1) + '\n', encoding='utf-8')
        print(f'\nwrote {args.json}')


if __name__ == '__main__':
    main()
