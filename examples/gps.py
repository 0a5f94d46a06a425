"""Trains GPS on generated molecules with PyG's layers and with accelerated ones, side by side.

The model is that of "Recipe for a General, Powerful, Scalable Graph Transformer": each layer adds
up a message passing layer that reads the bonds, and attention among all atoms of a molecule.
`pyg_fast.accelerate` replaces the message passing; attention stays PyG's. The molecules are random
trees of atoms with rings, and the target is a sum over bonds of what both atoms and the bond are.
Ends with a table: the error on unseen molecules, the time of a training step, and how far memory
grew. `python examples/gps.py --help` lists options.
"""
from __future__ import annotations

import argparse
import random
import statistics

import torch
import torch.nn.functional as F
from gat import SIDES
from node_classification import PeakMemory, at_least, choose_device, columns, now
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GATv2Conv,
    GINEConv,
    GPSConv,
    MessagePassing,
    ResGatedGraphConv,
    TransformerConv,
    global_add_pool,
)
from tqdm import tqdm

import pyg_fast
from pyg_fast.transforms import ToCSR

ATOMS, BONDS, MOST_BONDS = 5, 3, 4


def molecule(generator: random.Random) -> Data:
    """A random tree of 8 to 24 atoms, each with up to four bonds, and up to three rings."""
    size = generator.randint(8, 24)
    atoms = [generator.randrange(ATOMS) for _ in range(size)]
    bonds: dict[tuple[int, int], int] = {}
    degree = [0] * size

    def join(a: int, b: int) -> None:
        pair = min(a, b), max(a, b)
        if a != b and max(degree[a], degree[b]) < MOST_BONDS and pair not in bonds:
            bonds[pair] = generator.randrange(BONDS)
            degree[a] += 1
            degree[b] += 1

    for atom in range(1, size):
        join(atom, generator.choice([k for k in range(atom) if degree[k] < MOST_BONDS]))
    for _ in range(3):
        join(generator.randrange(size), generator.randrange(size))
    target = sum(
        (bond + 1) * abs(atoms[a] - atoms[b]) for (a, b), bond in bonds.items()) / size
    pairs = torch.tensor(list(bonds)).t()
    kinds = torch.tensor(list(bonds.values()))
    return Data(
        x=torch.tensor(atoms), edge_index=torch.cat([pairs, pairs.flip(0)], 1),
        edge_attr=F.one_hot(torch.cat([kinds, kinds]), BONDS).float(), y=torch.tensor([target]))


def local(kind: str, channels: int) -> MessagePassing:
    """PyG's message passing layer, with bonds as edge features."""
    if kind == 'gine':
        mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))
        return GINEConv(mlp, edge_dim=BONDS)
    if kind == 'gated':
        return ResGatedGraphConv(channels, channels, edge_dim=BONDS)
    conv = {'transformer': TransformerConv, 'gatv2': GATv2Conv}[kind]
    return conv(channels, channels // 4, heads=4, edge_dim=BONDS)


class GPS(nn.Module):
    """A number for each molecule.

    Args:
        kind: Of the message passing layers, as in :func:`local`.
        channels: Size of each hidden sample.
        layers: How many layers.
    """

    def __init__(self, kind: str, channels: int, layers: int) -> None:
        super().__init__()
        self.atom = nn.Embedding(ATOMS, channels)
        self.convs = nn.ModuleList(
            GPSConv(channels, local(kind, channels), heads=4) for _ in range(layers))
        self.last = nn.Sequential(
            nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, 1))

    def forward(self, data: Data) -> Tensor:
        x = self.atom(data.x)
        for conv in self.convs:
            x = conv(x, data.edge_index, data.batch, edge_attr=data.edge_attr)
        sizes = data.ptr.diff().view(-1, 1)
        return (global_add_pool(self.last(x), data.batch, data.num_graphs) / sizes).squeeze(-1)


def train(
    side: str, parts: tuple[list[Data], list[Data]], args: argparse.Namespace, seed: int
) -> tuple[float, list[float]]:
    """Returns the mean absolute error on unseen molecules, and the seconds of each step."""
    device, seconds = torch.device(args.device), []
    torch.manual_seed(seed)
    model = GPS(args.conv, args.channels, args.layers).to(device)
    prepare = None
    if side == 'pyg_fast':
        pyg_fast.accelerate(model)
        prepare = ToCSR()  # Each batch is sorted once for all layers.

    def ready(batch: Data) -> Data:
        batch = batch.to(device)
        return batch if prepare is None else prepare(batch)

    order = torch.Generator().manual_seed(seed)  # the same for both sides
    seen = DataLoader(parts[0], args.batch_size, shuffle=True, generator=order)
    unseen = DataLoader(parts[1], args.batch_size)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(seen))
    for _ in tqdm(range(args.epochs), f'{side:8} seed {seed}', unit='epoch'):
        for batch in seen:
            start = now(device)
            batch = ready(batch)
            optimizer.zero_grad()
            F.l1_loss(model(batch), batch.y).backward()
            optimizer.step()
            schedule.step()
            seconds.append(now(device) - start)
    model.eval()
    with torch.no_grad():
        errors = [(model(ready(batch)) - batch.y.to(device)).abs() for batch in unseen]
    return torch.cat(errors).mean().item(), seconds


def compare(args: argparse.Namespace) -> str:
    """Trains all runs of all sides, which take turns; returns the table."""
    generator = random.Random(args.seed)
    molecules = [molecule(generator) for _ in range(args.molecules)]
    cut = len(molecules) * 4 // 5
    parts = molecules[:cut], molecules[cut:]
    errors, times, growths = ({side: [] for side in SIDES[args.layers_of]} for _ in range(3))
    for run in range(args.runs):
        for side in errors:
            memory = PeakMemory(torch.device(args.device))
            error, seconds = train(side, parts, args, args.seed + run)
            errors[side].append(error)
            times[side].append(1e3 * statistics.median(seconds))
            growths[side].append((memory.growth() or 0) / 1e6)
    rows = [
        ['', *errors],
        ['error on unseen molecules', *(f'{statistics.fmean(e):.3f}' for e in errors.values())],
        ['time of a step [ms]', *(f'{statistics.median(each):.2f}' for each in times.values())],
        ['growth of memory [MB]', *(f'{max(each):,.0f}' for each in growths.values())],
    ]
    guess = statistics.fmean(each.y.item() for each in parts[0])
    error = statistics.fmean(abs(each.y.item() - guess) for each in parts[1])
    return f'{columns(rows)}\nThe mean of all molecules as a guess has an error of {error:.3f}.'


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--conv', choices=('gine', 'gated', 'transformer', 'gatv2'), default='gine',
        help='the message passing layers (default: gine)')
    add('--layers-of', choices=SIDES, default='both', help='(default: both)')
    counts = {'molecules': 1000, 'batch-size': 64, 'layers': 3, 'epochs': 10, 'runs': 1}
    for name, default in counts.items():
        least = 5 if name == 'molecules' else 1  # One of five is not seen in training.
        add(f'--{name}', type=at_least(least, int), default=default, help=f'(default: {default})')
    add('--channels', type=at_least(4, int), default=32, help='a multiple of 4 (default: 32)')
    add('--lr', type=at_least(0, float), default=0.003, help='(default: 0.003)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    if args.channels % 4:
        parser.error(f'--channels must be a multiple of 4, got {args.channels}')
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    print(f'GPS with {args.conv} on {args.molecules} molecules ({args.device}): {args.layers} '
          f'layers of {args.channels}, {args.epochs} epochs', flush=True)
    print(f'\n{compare(args)}')


if __name__ == '__main__':
    main()
