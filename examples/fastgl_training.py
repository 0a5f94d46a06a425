"""Trains a network on sampled mini-batches, which come out of pyg_fast's loader or of PyG's.

The settings are those of the "FastGL" paper: three layers, 8,000 nodes in a batch, 15 neighbours of
each of them, 10 of each of those and 5 of those. As everywhere in PyG, --fanout lists them from the
batch's nodes outwards; the paper and its code name the same numbers the other way round, from the
first layer on: 5, 10, 15. Evaluation infers all nodes layer by layer, from all of their neighbours.
An epoch's time is that of its batches and training steps, without evaluation. With --loader full
there are no batches: each epoch is one step on the whole graph.
"""
from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from node_classification import (
    AMAZON,
    PARTS,
    PLANETOID,
    add_dataset,
    at_least,
    check_root,
    choose_device,
    load,
    now,
)
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.transforms import GCNNorm

import pyg_fast
from pyg_fast.datasets import PlantedGraph
from pyg_fast.loader import FastNeighborLoader
from pyg_fast.transforms import ToCSR


class Recipe(NamedTuple):
    """What a data set is trained with unless the command line says otherwise."""

    epochs: int = 10
    batch_size: int = 8000
    lr: float = 0.01
    weight_decay: float = 5e-4
    dropout: float = 0.5


RECIPES = {
    'planted': Recipe(),
    **dict.fromkeys((*PLANETOID, *AMAZON, 'CS'), Recipe(epochs=30, batch_size=512)),
}
FULL_EPOCHS = 200  # each epoch is one step
MODELS = {'gcn': GCN, 'sage': GraphSAGE, 'gin': GIN, 'gat': GAT}
HEADS = 8


class Point(NamedTuple):
    """The state of a training after an epoch; `seconds` are those of its training alone."""

    seconds: float
    loss: float
    val: float | None
    test: float | None


@dataclass
class Outcome:
    """The results of all runs."""

    graph: dict[str, int]
    runs: list[list[Point]] = field(default_factory=list)
    stats: dict[str, Any] | None = None  # statistics of the last run's loader

    @property
    def accuracies(self) -> list[float]:
        """Test accuracy of every run, in percent, at its best validation accuracy."""
        rated = [[point for point in run if point.val is not None] for run in self.runs]
        return [100 * max(run, key=lambda point: point.val).test for run in rated if run]

    @property
    def epoch_seconds(self) -> float:
        """Median duration of an epoch, the first of each run left out if there are others."""
        return statistics.median(
            point.seconds for run in self.runs for point in (run[1:] or run))


def load_data(args: argparse.Namespace) -> tuple[Data, int]:
    """Returns the graph, in host memory, and its number of classes."""
    if args.dataset != 'planted':
        return load(args)
    dataset = PlantedGraph(args.size, seed=args.seed, device=args.device)  # fast there
    return dataset[0].cpu(), dataset.num_classes


def nodes_of(data: Data, seed: int) -> dict[str, Tensor]:
    """Returns nodes to train, validate and test on: the graph's own if each has its part, or half
    of them, a quarter and the rest."""
    masks = [data[f'{part}_mask'] for part in PARTS if f'{part}_mask' in data]
    if masks and bool(torch.stack(masks).any(0).all()):
        return {part: mask.nonzero().view(-1) for part, mask in zip(PARTS, masks, strict=True)}
    shuffled = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed))
    half, quarter = data.num_nodes // 2, data.num_nodes // 4
    sizes = [half, quarter, data.num_nodes - half - quarter]
    return dict(zip(PARTS, shuffled.split(sizes), strict=True))


def with_degrees(data: Data, args: argparse.Namespace) -> Data:
    """Returns a graph whose nodes know their degrees, if it is for GCN."""
    if args.model == 'gcn':
        data = copy.copy(data)
        data.in_degree = data.edge_index[1].bincount(minlength=data.num_nodes).float()
    return data


def build(args: argparse.Namespace, in_channels: int, num_classes: int) -> torch.nn.Module:
    """Returns the network, of PyG's layers or of pyg_fast's."""
    options = {'gin': {'norm': 'batch_norm'}, 'gat': {'heads': HEADS}}.get(args.model, {})
    model = MODELS[args.model](
        in_channels, args.hidden, len(args.fanout), num_classes, dropout=args.dropout, **options)
    return model if args.layers == 'pyg' else pyg_fast.accelerate(model)


def new_loader(
    data: Data, nodes: Tensor | None, fanout: list[int], args: argparse.Namespace,
    shuffle: bool = True, seed: int = 0, **options: Any,
) -> FastNeighborLoader | NeighborLoader:
    """Returns one of the loaders; `options` are for pyg_fast's alone."""
    common: dict[str, Any] = {
        'input_nodes': nodes, 'batch_size': args.batch_size, 'shuffle': shuffle}
    if args.loader == 'pyg':
        return NeighborLoader(
            data, fanout, num_workers=args.workers, persistent_workers=args.workers > 0, **common)
    return FastNeighborLoader(
        data, fanout, match=args.match, reorder=args.reorder if shuffle else False,
        cache_ratio=args.cache_ratio, window=args.window, features=args.features,
        topology=args.topology, device=args.device, seed=seed, **common, **options)


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Data],
    args: argparse.Namespace,
) -> float:
    """Trains for an epoch; returns its mean loss."""
    model.train()
    total, count = torch.zeros((), device=args.device), 0
    for batch in batches:
        batch = batch.to(args.device)
        optimizer.zero_grad()
        trimmed = {
            'num_sampled_nodes_per_hop': batch.num_sampled_nodes,
            'num_sampled_edges_per_hop': batch.num_sampled_edges} if args.trim else {}
        out = model(*inputs(batch), **trimmed)
        rows = batch.rows if 'rows' in batch else slice(batch.batch_size)
        loss = F.cross_entropy(out[rows], batch.y[rows])
        loss.backward()
        optimizer.step()
        total += batch.batch_size * loss.detach()
        count += batch.batch_size
    return total.item() / max(count, 1)


def inputs(batch: Data) -> tuple[Tensor, ...]:
    """Returns what the network takes of a batch.

    For GCN that are weights, too. A sample's own degrees are not those of the graph, by which GCN
    normalizes: with each edge counted as often as its node has edges for each one sampled, they
    are. Nodes of the last hop, of which none was sampled, are scaled by theirs beforehand.
    """
    if 'in_degree' not in batch:
        return batch.x, batch.edge_index
    target = batch.edge_index[1]
    sampled = torch.zeros_like(batch.in_degree).index_add_(
        0, target, batch.in_degree.new_ones(target.numel()))
    weight = (batch.in_degree / sampled.clamp(min=1))[target]
    alone = (sampled == 0) & (batch.in_degree > 0)
    scale = torch.where(alone, (batch.in_degree + 1).rsqrt(), 1.0)
    return scale.view(-1, 1) * batch.x, batch.edge_index, weight


class Inference:
    """Infers all nodes layer by layer, each from all of its neighbours.

    Args:
        data: The graph, as :func:`inference_graph` gives it.
        x: Features of its nodes, or None if its batches have them.
        args: Options of the network and the loader.
        gather: Puts together what several processes have inferred. (default: nothing to do)
        options: Further arguments of pyg_fast's loader.
    """

    def __init__(
        self, data: Data, x: Tensor | None, args: argparse.Namespace,
        gather: Callable[[Tensor], Any] | None = None, **options: Any,
    ) -> None:
        self.x, self.args, self.gather = x, args, gather
        self.num_nodes = data.num_nodes
        if args.loader == 'full':
            data = sorted_by(data, args)
            data.n_id, data.batch_size = torch.arange(data.num_nodes), data.num_nodes
            self.batches: Iterable[Data] = [data.to(args.device)]
        else:
            self.batches = new_loader(data, None, [-1], args, shuffle=False, **options)

    @torch.no_grad()
    def __call__(self, model: torch.nn.Module) -> Tensor:
        model.eval()
        x = None if self.x is None else self.x.to(self.args.device)
        with already_normalized(model):
            for place in range(model.num_layers):
                x = self._layer(model, place, x)
        return x

    def _layer(self, model: torch.nn.Module, place: int, x: Tensor | None) -> Tensor:
        out: Tensor | None = None
        for batch in self.batches:
            batch = batch.to(self.args.device)
            weight = (batch.edge_weight,) if 'edge_weight' in batch else ()
            source = batch.x if x is None else x[batch.n_id]
            rows = model.convs[place](source, batch.edge_index, *weight)[:batch.batch_size]
            if place < model.num_layers - 1:
                rows = model.act(model.norms[place](rows))
            if out is None:
                out = rows.new_zeros(self.num_nodes, rows.size(1))
            out[batch.n_id[:batch.batch_size]] = rows
        if self.gather is not None:
            self.gather(out)
        return out


def inference_graph(data: Data, args: argparse.Namespace) -> Data:
    """Returns a graph without features, with GCN's weights if it is for GCN: a batch does not have
    the degrees of its outermost nodes."""
    graph = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
    return GCNNorm()(graph) if args.model == 'gcn' else graph


@contextmanager
def already_normalized(model: torch.nn.Module) -> Iterator[None]:
    """Has GCN layers take edge weights as they are."""
    convs = [conv for conv in model.convs if hasattr(conv, 'normalize')]
    before = [conv.normalize for conv in convs]
    for conv in convs:
        conv.normalize = False
    try:
        yield
    finally:
        for conv, normalize in zip(convs, before, strict=True):
            conv.normalize = normalize


def sorted_by(data: Data, args: argparse.Namespace) -> Data:
    """Returns a graph where the network is, its edges sorted once if the layers are pyg_fast's."""
    data = data.to(args.device)
    return data if args.layers == 'pyg' else ToCSR()(data)


def run(
    data: Data, num_classes: int, seed: int, args: argparse.Namespace,
) -> tuple[list[Point], dict[str, Any] | None]:
    """Trains from one seed; returns every epoch, and what pyg_fast's loader counted."""
    device = torch.device(args.device)
    parts = {part: nodes.to(device) for part, nodes in nodes_of(data, seed).items()}
    torch.manual_seed(seed)
    model = build(args, data.num_features, num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    if args.loader == 'full':
        graph = sorted_by(data, args)
        graph.rows, graph.batch_size = parts['train'], parts['train'].numel()
        batches: Iterable[Data] = [graph]
    else:
        batches = new_loader(
            with_degrees(data, args), parts['train'].cpu(), args.fanout, args, seed=seed)
    infer, labels = Inference(inference_graph(data, args), data.x, args), data.y.to(device)
    points = []
    for epoch in range(args.epochs):
        start = now(device)
        loss = train(model, optimizer, batches, args)
        seconds = now(device) - start
        val = test = None
        if args.evaluate_every and (epoch + 1) % args.evaluate_every == 0:
            right = infer(model).argmax(dim=-1) == labels
            val, test = (right[parts[part]].float().mean().item() for part in ('val', 'test'))
        points.append(Point(seconds, loss, val, test))
        print(line(seed, epoch, points[-1]), flush=True)
    stats = asdict(batches.stats) if isinstance(batches, FastNeighborLoader) else None
    return points, stats


# Reports ----------------------------------------------------------------------------------------

def line(seed: int, epoch: int, point: Point) -> str:
    """Returns the line that reports an epoch."""
    text = f'seed {seed} epoch {epoch + 1:3}: {point.seconds:8.3f} s, loss {point.loss:.4f}'
    if point.val is None or point.test is None:
        return text
    return f'{text}, validation {100 * point.val:.2f} %, test {100 * point.test:.2f} %'


def summary(outcome: Outcome) -> str:
    """Returns the results of all runs, and the counts of the last loader."""
    lines = [f'time per epoch [s]      {outcome.epoch_seconds:.3f}']
    if outcome.accuracies:
        mean, spread = statistics.fmean(outcome.accuracies), ''
        if len(outcome.accuracies) > 1:
            spread = f' +- {statistics.stdev(outcome.accuracies):.2f}'
        lines.append(f'test accuracy [%]       {mean:.2f}{spread}')
    for name, value in (outcome.stats or {}).items():
        if value is not None:
            text = f'{value:.4g}' if isinstance(value, float) else f'{value:,}'
            lines.append(f'{name.replace("_", " "):24}{text}')
    return '\n'.join(lines)


def record(args: argparse.Namespace, outcome: Outcome) -> dict[str, Any]:
    """Returns the options, the versions and the results."""
    return {
        'arguments': {key: str(value) if isinstance(value, Path) else value
                      for key, value in vars(args).items()},
        'device': torch.cuda.get_device_name() if torch.device(args.device).type == 'cuda'
        else platform.processor() or platform.machine(),
        'threads': torch.get_num_threads(),
        'versions': {
            'python': platform.python_version(),
            'torch': torch.__version__,
            'torch_geometric': torch_geometric.__version__,
            'pyg_fast': pyg_fast.__version__,
        },
        'graph': outcome.graph,
        'runs': [[point._asdict() for point in run] for run in outcome.runs],
        'accuracies': outcome.accuracies,
        'epoch_seconds': outcome.epoch_seconds,
        'stats': outcome.stats,
    }


# Options ----------------------------------------------------------------------------------------

def fanout(text: str) -> list[int]:
    """Reads numbers of neighbours between commas."""
    try:
        counts = [int(word) for word in text.split(',')]
    except ValueError:
        counts = []
    if not counts or not all(count > 0 or count == -1 for count in counts):
        raise argparse.ArgumentTypeError(
            f"got '{text}', expected a number of neighbours for each hop, or -1 for all")
    return counts


def options(
    description: str, places: tuple[str, ...] = ('auto', 'host', 'device'),
) -> argparse.ArgumentParser:
    """Returns the options of data, network and training; `places` are for features."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_dataset(parser, RECIPES)
    add('--model', choices=MODELS, default='gcn', help='(default: gcn)')
    add('--layers', choices=('pyg_fast', 'pyg'), default='pyg_fast', help='(default: pyg_fast)')
    add('--fanout', type=fanout, default=[15, 10, 5], metavar='N,...',
        help="neighbours by hop, from the batch's nodes outwards, -1 for all; there are as many "
        'layers (default: 15,10,5)')
    add('--hidden', type=at_least(1, int), default=64, help='(default: 64)')
    for name, convert in {'epochs': at_least(1, int), 'batch-size': at_least(1, int),
                          'lr': at_least(0, float), 'weight-decay': at_least(0, float),
                          'dropout': at_least(0, float, below=1)}.items():
        add(f'--{name}', type=convert, help='(default: usual for the data set)')
    add('--evaluate-every', type=at_least(0, int), default=1, metavar='N',
        help='epochs; 0: never (default: 1)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--match', action=argparse.BooleanOptionalAction, default=True,
        help='keep features that the batch before has (default: yes)')
    add('--reorder', action=argparse.BooleanOptionalAction,
        help='choose the order of the batches in a window (default: as the loader does)')
    add('--window', type=at_least(1, int), default=8, help='batches ahead (default: 8)')
    add('--cache-ratio', type=at_least(0, float), default=0.0,
        help='share of the features to keep on the device (default: 0)')
    for name, choices in (('features', places), ('topology', ('auto', 'host', 'device'))):
        add(f'--{name}', choices=choices, default='auto', help='where they lie (default: auto)')
    add('--trim', action='store_true', help='each layer on no more than it needs')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    add('--json', type=Path, metavar='FILE', help='record to write')
    return parser


def checked(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    args = parser.parse_args(argv)
    recipe = RECIPES[args.dataset]._asdict()
    if args.loader == 'full':
        recipe['epochs'] = FULL_EPOCHS
    for name, value in recipe.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    choose_device(parser, args)
    check_root(parser, args)
    if args.cache_ratio > 1:
        parser.error(f'--cache-ratio: got {args.cache_ratio:g}, expected at most 1')
    if args.trim and args.loader != 'fast':
        parser.error(f'--trim needs --loader fast, got {args.loader}')
    if args.trim and args.model == 'gcn':
        parser.error('--trim is not for gcn, which needs the degrees of nodes that are cut off')
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f'--json {args.json}: no such folder')
    return args


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, all filled in and checked."""
    parser = options(__doc__)
    add = parser.add_argument
    add('--loader', choices=('fast', 'pyg', 'full'), default='fast',
        help="FastNeighborLoader, PyG's NeighborLoader, or the whole graph (default: fast)")
    add('--workers', type=at_least(0, int), default=0, help='of loader pyg (default: 0)')
    add('--runs', type=at_least(1, int), default=1, help='(default: 1)')
    return checked(parser, argv)


def title(args: argparse.Namespace) -> str:
    """Returns a line that names model, graph and device."""
    graph = f'planted, {args.size}' if args.dataset == 'planted' else args.dataset
    return (f'{args.model.upper()} of {len(args.fanout)} layers on {graph} ({args.device}): '
            f'layers {args.layers}, loader {args.loader}, hidden {args.hidden}, '
            f'batch {args.batch_size:,}, fanout {args.fanout}, {args.epochs} epochs')


def size(data: Data, num_classes: int) -> dict[str, int]:
    """Returns the numbers of nodes, edges, features and classes."""
    return {'nodes': data.num_nodes, 'edges': data.num_edges, 'features': data.num_features,
            'classes': num_classes}


def main(argv: list[str] | None = None) -> Outcome:
    """Runs the example."""
    args = parse(argv)
    print(title(args), flush=True)
    data, num_classes = load_data(args)
    outcome = Outcome(size(data, num_classes))
    print(', '.join(f'{count:,} {what}' for what, count in outcome.graph.items()), flush=True)
    for number in range(args.runs):
        points, outcome.stats = run(data, num_classes, args.seed + number, args)
        outcome.runs.append(points)
    print(f'\n{summary(outcome)}')
    if args.json is not None:
        text = json.dumps(record(args, outcome), indent=1)
        args.json.write_text(text + '\n', encoding='utf-8')
        print(f'\nwrote {args.json}')
    return outcome


if __name__ == '__main__':
    main()
