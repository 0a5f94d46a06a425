"""Trains a model of molecules with PyG's loader and layers and with pyg_fast's, side by side.

The model is that of OGB's molecules: embeddings of atoms and bonds, GINE layers with batch norm,
and a mean over atoms. PyG's loop is that of most code on molecules: a DataLoader on the host, and
each batch moved to the device. Ours differs by two lines: a GraphLoader, which keeps the molecules
on the device and sorts no batch, and `accelerate`. A third side pads batches to a few sizes and
captures the step: on a GPU it is one CUDA graph for each size. The molecules are those of gps.py.
Ends with a table: the error on unseen molecules, and the times of a batch: of making it, and of
loading and training. Losses of the first steps are the same; rounding grows with each step, so the
errors of one run differ: compare means of several, --runs 5. `python examples/molecules.py --help`
lists options.
"""
from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gps import ATOMS, BONDS, molecule
from node_classification import at_least, choose_device, columns, in_turns, now
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool
from tqdm import tqdm

import pyg_fast
from pyg_fast.loader import GraphLoader

SIDES = {
    'both': ('PyG', 'pyg_fast', 'captured'),
    'pyg': ('PyG',),
    'ours': ('pyg_fast', 'captured'),
}


class GIN(nn.Module):
    """A number for each molecule.

    Args:
        channels: Size of each hidden sample.
        layers: How many layers.
    """

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.atom = nn.Embedding(ATOMS, channels)
        self.bonds = nn.ModuleList(nn.Linear(BONDS, channels) for _ in range(layers))
        self.convs = nn.ModuleList(GINEConv(self.mlp(channels)) for _ in range(layers))
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(layers))
        self.last = nn.Linear(channels, 1)

    @staticmethod
    def mlp(channels: int) -> nn.Module:
        """The perceptron of a layer."""
        return nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.BatchNorm1d(2 * channels), nn.ReLU(),
            nn.Linear(2 * channels, channels))

    def forward(self, data: Data) -> Tensor:
        x = self.atom(data.x)
        for bond, conv, norm in zip(self.bonds, self.convs, self.norms, strict=True):
            x = x + norm(conv(x, data.edge_index, bond(data.edge_attr))).relu()
        return self.last(global_mean_pool(x, data.batch, data.num_graphs)).squeeze(-1)


class Outcome(NamedTuple):
    """What a side reached, with the times in ms."""

    error: float
    making: float
    training: float


def loaders(
    side: str, parts: tuple[list[Data], list[Data]], args: argparse.Namespace, seed: int
) -> tuple[Iterable[Data], Iterable[Data]]:
    """Returns the loaders of seen and of unseen molecules; both sides have the same batches."""
    order = torch.Generator().manual_seed(seed)
    if side == 'PyG':
        workers = {'num_workers': args.workers, 'persistent_workers': args.workers > 0}
        return (DataLoader(parts[0], args.batch_size, shuffle=True, generator=order, **workers),
                DataLoader(parts[1], args.batch_size))
    options = {'device': args.device, 'pad': 'buckets' if side == 'captured' else None}
    return (GraphLoader(parts[0], args.batch_size, shuffle=True, generator=order, **options),
            GraphLoader(parts[1], args.batch_size, **options))


def loss_fn(out: Tensor, batch: Data) -> Tensor:
    """The loss of a batch."""
    return F.l1_loss(out, batch.y)


def plain_epoch(
    model: nn.Module, seen: Iterable[Data], optimizer: torch.optim.Optimizer, device: torch.device
) -> Iterator[Tensor]:
    """Yields the losses of an epoch, as most code trains."""
    for batch in seen:
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(batch), batch)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def train(
    side: str, parts: tuple[list[Data], list[Data]], args: argparse.Namespace, seed: int
) -> Outcome:
    """Trains a model and measures it."""
    device = torch.device(args.device)
    torch.manual_seed(seed)
    model = GIN(args.channels, args.layers).to(device)
    if side != 'PyG':
        pyg_fast.accelerate(model)
    seen, unseen = loaders(side, parts, args, seed)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    step = pyg_fast.capture(model, seen, optimizer, loss_fn) if side == 'captured' else None
    training = []
    for _ in tqdm(range(args.epochs), f'{side:8} seed {seed}', unit='epoch'):
        epoch = plain_epoch(model, seen, optimizer, device) if step is None else step.epoch()
        start = now(device)
        steps = sum(1 for _ in epoch)
        training.append(1e3 * (now(device) - start) / steps)
    start, steps = now(device), 0
    for batch in seen:
        batch.to(device)
        steps += 1
    making = 1e3 * (now(device) - start) / steps
    if step is None:
        model.eval()
        with torch.no_grad():
            batches = [batch.to(device) for batch in unseen]
            errors = [(model(batch) - batch.y).abs() for batch in batches]
    else:
        evaluate = pyg_fast.capture_inference(model, unseen)
        errors = [(out - batch.y).abs() for out, batch in evaluate.epoch()]
    return Outcome(torch.cat(errors).mean().item(), making, statistics.median(training))


def compare(args: argparse.Namespace) -> str:
    """Trains all runs of all sides, which take turns; returns the table."""
    generator = random.Random(args.seed)
    bar = tqdm(range(args.molecules), 'molecules', unit='molecule')
    molecules = [molecule(generator) for _ in bar]
    cut = len(molecules) * 4 // 5
    parts = molecules[:cut], molecules[cut:]
    outcomes = in_turns(
        SIDES[args.layers_of], args.runs,
        lambda side, run: train(side, parts, args, args.seed + run))
    sides = list(outcomes.values())
    return columns([
        ['', *outcomes],
        [f'error on unseen molecules, {args.runs} run' + 's' * (args.runs > 1),
         *(f'{statistics.fmean(each.error for each in found):.3f}' for found in sides)],
        ['making a batch [ms]',
         *(f'{statistics.median(each.making for each in found):.2f}' for found in sides)],
        ['loading and training [ms]',
         *(f'{statistics.median(each.training for each in found):.2f}' for found in sides)],
    ])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--layers-of', choices=SIDES, default='both', help='(default: both)')
    counts = {'molecules': 2000, 'batch-size': 32, 'layers': 5, 'epochs': 5, 'runs': 1,
              'channels': 64}
    for name, default in counts.items():
        least = 5 if name == 'molecules' else 1  # One of five is not seen in training.
        add(f'--{name}', type=at_least(least, int), default=default, help=f'(default: {default})')
    add('--workers', type=at_least(0, int), default=0, help="of PyG's loader (default: 0)")
    add('--lr', type=at_least(0, float), default=0.001, help='(default: 0.001)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    print(f'GIN on {args.molecules} molecules ({args.device}): {args.layers} layers of '
          f'{args.channels}, batches of {args.batch_size}, {args.epochs} epochs', flush=True)
    print(f'\n{compare(args)}')


if __name__ == '__main__':
    main()
