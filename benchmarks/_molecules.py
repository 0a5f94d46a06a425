"""Molecules, made at random, and the models that train on batches of them."""
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.models.schnet import GaussianSmearing, InteractionBlock
from torch_geometric.utils import degree

import pyg_fast
from pyg_fast.loader import GraphLoader

from ._published_inputs import BONDS
from ._published_layers import MoleculeGCN, MoleculeGIN

ATOMS = (119, 5, 12, 12, 10, 6, 6, 2, 2)  # values of each feature of an atom, as OGB has them
GAUSSIANS, CUTOFF = 50, 5.0
GPS_HEADS, GAT_HEADS = 4, 5
BUCKETS = 'buckets'


# Data -------------------------------------------------------------------------------------------

def molecules(count: int, positions: bool = False) -> list[Data]:
    """Rings of 12 to 40 atoms with a few chords: 26 nodes and 56 edges on average.

    ``positions``: of atoms in place of bonds.
    """
    generator = torch.Generator().manual_seed(0)

    def integers(highs: Sequence[int], rows: int) -> Tensor:
        return torch.stack([torch.randint(h, (rows,), generator=generator) for h in highs], 1)

    sizes = torch.randint(12, 41, (count,), generator=generator)
    chords = (torch.rand(count, 2, 2, generator=generator) * sizes.view(-1, 1, 1)).long()
    num_nodes, num_edges = sizes.tolist(), (2 * sizes + 4).tolist()
    atoms, bonds = integers(ATOMS, sum(num_nodes)), integers(BONDS, sum(num_edges))
    places = torch.randn(sum(num_nodes), 3, generator=generator)
    found = []
    for size, more, x, bond, pos in zip(
            num_nodes, chords, atoms.split(num_nodes), bonds.split(num_edges),
            places.split(num_nodes), strict=True):
        ring = torch.arange(size)
        pairs = torch.cat([torch.stack([ring, ring.roll(-1)]), more], 1)
        data = Data(x=x, edge_index=torch.cat([pairs, pairs.flip(0)], 1),
                    y=((x[:, 0].float().mean() - 59) / 7).view(1))
        if positions:
            data.pos = pos
        else:
            data.edge_attr = bond
        found.append(data)
    return found


def degrees(graphs: Sequence[Data]) -> Tensor:
    """How many nodes have each degree."""
    return sum(
        degree(data.edge_index[1], data.num_nodes, torch.long).bincount(minlength=16)
        for data in graphs[:256])


# Models -----------------------------------------------------------------------------------------

class Embeddings(nn.Module):
    """The sum of an embedding for each column of integers."""

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Embedding(size, width) for size in sizes)
        for part in self.parts:
            nn.init.xavier_uniform_(part.weight)

    def forward(self, rows: Tensor) -> Tensor:
        out = self.parts[0](rows[:, 0])
        for k in range(1, len(self.parts)):
            out = out + self.parts[k](rows[:, k])
        return out


class Layers(nn.Module):
    """Layers with batch norm, ReLU between them, and a number for each molecule.

    ``embeds``: whether the model embeds bonds, once for all layers, or each layer does.
    """

    def __init__(
        self, make: Callable[[], nn.Module], width: int, depth: int, embeds: bool = True,
    ) -> None:
        super().__init__()
        self.atoms, self.last = Embeddings(ATOMS, width), nn.Linear(width, 1)
        self.bonds = Embeddings(BONDS, width) if embeds else nn.Identity()
        self.convs = nn.ModuleList(make() for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))

    def forward(
        self, x: Tensor, edge_index: Tensor, bonds: Tensor, batch: Tensor, num_graphs: int,
    ) -> Tensor:
        x, bonds = self.atoms(x), self.bonds(bonds)
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(conv(x, edge_index, bonds))
            x = x if k + 1 == len(self.convs) else F.relu(x)
        return self.last(pyg.global_mean_pool(x, batch, num_graphs)).squeeze(-1)


class GPS(nn.Module):
    """Layers of GPS with GINE, which have norms of their own."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.atoms, self.bonds = Embeddings(ATOMS, width), Embeddings(BONDS, width)
        self.last = nn.Linear(width, 1)
        self.convs = nn.ModuleList(
            pyg.GPSConv(width, pyg.GINEConv(mlp(width, width)), GPS_HEADS) for _ in range(depth))

    def forward(
        self, x: Tensor, edge_index: Tensor, bonds: Tensor, batch: Tensor, num_graphs: int,
    ) -> Tensor:
        x, bonds = self.atoms(x), self.bonds(bonds)
        for conv in self.convs:
            x = conv(x, edge_index, batch, edge_attr=bonds)
        return self.last(pyg.global_mean_pool(x, batch, num_graphs)).squeeze(-1)


class SchNet(nn.Module):
    """PyG's interactions of SchNet, along bonds."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.atoms, self.last = Embeddings(ATOMS, width), nn.Linear(width, 1)
        self.smear = GaussianSmearing(0.0, CUTOFF, GAUSSIANS)
        self.blocks = nn.ModuleList(
            InteractionBlock(width, GAUSSIANS, width, CUTOFF) for _ in range(depth))

    def forward(
        self, x: Tensor, edge_index: Tensor, pos: Tensor, batch: Tensor, num_graphs: int,
    ) -> Tensor:
        distance = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        smeared, x = self.smear(distance), self.atoms(x)
        for block in self.blocks:
            x = x + block(x, edge_index, distance, smeared)
        return self.last(pyg.global_mean_pool(x, batch, num_graphs)).squeeze(-1)


def mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))


def normed_mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(),
        nn.Linear(2 * width, width))


def gatv2(width: int) -> nn.Module:
    return pyg.GATv2Conv(
        width, width // GAT_HEADS, GAT_HEADS, edge_dim=width, add_self_loops=False)


def pna(width: int, deg: Tensor) -> nn.Module:
    return pyg.PNAConv(
        width, width, ['mean', 'min', 'max', 'std'],
        ['identity', 'amplification', 'attenuation'], deg, edge_dim=width)


def of_bonds(model: Callable[..., Tensor], batch: Any) -> Tensor:
    return model(batch.x, batch.edge_index, batch.edge_attr, batch.batch, batch.num_graphs)


def of_positions(model: Callable[..., Tensor], batch: Any) -> Tensor:
    return model(batch.x, batch.edge_index, batch.pos, batch.batch, batch.num_graphs)


class Kind(NamedTuple):
    """A model of a width and a depth; ``goals``: ms of a step on an H200, by graphs of a batch,
    ``sizes``: these graphs where there is no such goal."""

    title: str
    make: Callable[[int, int, Sequence[Data]], nn.Module]
    goals: Mapping[int, float] = {}
    sizes: Sequence[int] = (32,)
    width: int = 300
    positions: bool = False

    @property
    def call(self) -> Callable[[Callable[..., Tensor], Any], Tensor]:
        return of_positions if self.positions else of_bonds

    @property
    def usual_sizes(self) -> tuple[int, ...]:
        return tuple(self.goals or self.sizes)


KINDS = {
    'gin': Kind('GIN', lambda width, depth, _: Layers(
        lambda: MoleculeGIN(width), width, depth, False), {32: 1.2, 256: 3.3, 2048: 24}),
    'gcn': Kind('GCN', lambda width, depth, _: Layers(
        lambda: MoleculeGCN(width), width, depth, False), {32: 0.8, 256: 2.2}),
    'gps': Kind('GPS', lambda width, depth, _: GPS(width, depth), {32: 3, 256: 6}, width=64),
    'gine': Kind('GINE', lambda width, depth, _: Layers(
        lambda: pyg.GINEConv(normed_mlp(width)), width, depth)),
    'gatv2': Kind('GATv2', lambda width, depth, _: Layers(lambda: gatv2(width), width, depth)),
    'pna': Kind('PNA', lambda width, depth, graphs: Layers(
        lambda: pna(width, degrees(graphs)), width, depth)),
    'schnet': Kind('SchNet', lambda width, depth, _: SchNet(width, depth), positions=True)}


# Training ---------------------------------------------------------------------------------------

def loss_of(out: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(out, batch.y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-3, fused=True)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def our_loader(
    graphs: Sequence[Data], size: int, device: torch.device, pad: str | None = None,
) -> GraphLoader:
    return GraphLoader(
        graphs, size, shuffle=True, generator=seeded(), device=device, pad=pad)


def first_epoch(
    name: str, size: int, batches: int, width: int, depth: int, device: torch.device,
) -> dict[str, float]:
    """The seconds of capturing, compiling and training for an epoch, and its number of sizes."""
    kind = KINDS[name]
    graphs = molecules(size * batches, kind.positions)
    torch.manual_seed(0)
    model = pyg_fast.accelerate(kind.make(width, depth, graphs).to(device))
    loader, optimizer = our_loader(graphs, size, device, BUCKETS), adam(model)
    (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item()  # starts it
    start = time.perf_counter()
    step = pyg_fast.capture(model, loader, optimizer, loss_of, forward=kind.call, compile=True)
    losses = torch.stack(list(step.epoch())).cpu()
    seconds = time.perf_counter() - start
    if not bool(losses.isfinite().all()):
        raise SystemExit(f'{name}: losses are not finite')
    return {'seconds': seconds, 'sizes': len(step._slots)}


def main(argv: Sequence[str]) -> None:
    """Prints what the first epoch takes, in a process that begins with it."""
    name, precision, *numbers, device = argv
    torch.set_float32_matmul_precision(precision)
    print(json.dumps(first_epoch(name, *map(int, numbers), torch.device(device))))
