"""Learns the forces between charged particles with an EGNN, on PyG's layers and on pyg_fast's.

The model is the network of "E(n) Equivariant Graph Neural Networks" (https://arxiv.org/abs/2102.09844)
without the moves of the coordinates: messages are an MLP of both particles, their charges and their
squared distance. It predicts the energy of a system; the forces are the negative gradient of that,
so that training differentiates twice, and a simulation with them conserves energy. The sides differ
by one line, `accelerate`. Ends with a table: the error of the forces on unseen systems, the drift
of the energy in a simulation with the learned forces, and the time of a training step.
`python examples/egnn.py --help` lists options.
"""
from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

import torch
from gat import SIDES
from node_classification import at_least, choose_device, columns, in_turns, now
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, global_add_pool
from tqdm import tqdm

import pyg_fast

SOFTENING = 0.5  # of the Coulomb energy, added to squared distances
TIME_STEP = 0.01


class Layer(MessagePassing):
    """Messages by an MLP, gated and summed.

    Args:
        channels: Size of each sample.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(aggr='add')
        self.edge = nn.Sequential(
            nn.Linear(2 * channels + 1, channels), nn.SiLU(), nn.Linear(channels, channels),
            nn.SiLU())
        self.gate = nn.Sequential(nn.Linear(channels, 1), nn.Sigmoid())
        self.node = nn.Sequential(
            nn.Linear(2 * channels, channels), nn.SiLU(), nn.Linear(channels, channels))

    def forward(self, x: Tensor, edge_index: Tensor, pos: Tensor) -> Tensor:
        out = self.propagate(edge_index, x=x, pos=pos)
        return x + self.node(torch.cat([x, out], -1))

    def message(self, x_i: Tensor, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        near = (pos_i - pos_j).square().sum(-1, keepdim=True)
        m = self.edge(torch.cat([x_i, x_j, near], -1))
        return self.gate(m) * m


class Energy(nn.Module):
    """The energy of each system.

    Args:
        channels: Size of each hidden sample.
        layers: How many layers.
    """

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.charge = nn.Linear(1, channels)
        self.layers = nn.ModuleList(Layer(channels) for _ in range(layers))
        self.last = nn.Sequential(
            nn.Linear(channels, channels), nn.SiLU(), nn.Linear(channels, 1))

    def forward(self, systems: Systems, pos: Tensor) -> Tensor:
        x = self.charge(systems.charge)
        for layer in self.layers:
            x = layer(x, systems.edge_index, pos)
        return global_add_pool(self.last(x), systems.batch, systems.count).squeeze(-1)

    def forces(self, systems: Systems, pos: Tensor, create_graph: bool = False) -> Tensor:
        """The negative gradient of the energy by the coordinates."""
        pos = pos.detach().requires_grad_()
        (grad,) = torch.autograd.grad(
            self(systems, pos).sum(), pos, create_graph=create_graph)
        return -grad


class Systems(NamedTuple):
    """Some systems of particles, each of which interacts with all others of its system."""

    count: int
    charge: Tensor  # [N, 1]
    pos: Tensor  # [N, 3]
    edge_index: Tensor
    batch: Tensor

    def energy(self, pos: Tensor) -> Tensor:
        """The true energy of each system."""
        src, dst = self.edge_index
        near = (pos[src] - pos[dst]).square().sum(-1) + SOFTENING
        pairs = (self.charge[src] * self.charge[dst]).squeeze(-1) * near.rsqrt() / 2
        return global_add_pool(pairs.unsqueeze(-1), self.batch[dst], self.count).squeeze(-1)

    def forces(self) -> Tensor:
        """The true forces."""
        pos = self.pos.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self.energy(pos).sum(), pos)
        return -grad


def draw(count: int, particles: int, generator: torch.Generator, device: str) -> Systems:
    """Random systems."""
    num_nodes = count * particles
    charge = torch.randint(2, (num_nodes, 1), generator=generator).float() * 2 - 1
    pos = 1.5 * torch.randn(num_nodes, 3, generator=generator)
    pair = torch.combinations(torch.arange(particles)).t()
    pair = torch.cat([pair, pair.flip(0)], 1)
    first = particles * torch.arange(count).repeat_interleave(pair.size(1))
    batch = torch.arange(count).repeat_interleave(particles)
    edge_index = pair.repeat(1, count) + first
    return Systems(count, *(x.to(device) for x in (charge, pos, edge_index, batch)))


class Outcome(NamedTuple):
    """What a side reached; the time of a training step in ms."""

    error: float
    drift: float
    training: float


def drift(model: Energy, systems: Systems, steps: int) -> float:
    """By how much the energy changes in a simulation with the learned forces, of that of the
    motion."""
    pos, velocity = systems.pos, torch.zeros_like(systems.pos)
    forces, energies, motion = model.forces(systems, pos), [], 1e-12
    for _ in range(steps):  # velocity Verlet, masses 1
        velocity = velocity + forces * (TIME_STEP / 2)
        pos = pos + velocity * TIME_STEP
        forces = model.forces(systems, pos)
        velocity = velocity + forces * (TIME_STEP / 2)
        kinetic = velocity.square().sum().item() / 2
        with torch.no_grad():
            energies.append(model(systems, pos).sum().item() + kinetic)
        motion = max(motion, kinetic)
    return (max(energies) - min(energies)) / motion


def train(side: str, args: argparse.Namespace, seed: int) -> Outcome:
    """Trains a model and measures it."""
    torch.manual_seed(seed)
    model = Energy(args.channels, args.layers).to(args.device)
    if side == 'pyg_fast':
        pyg_fast.accelerate(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    times = []
    for _ in tqdm(range(args.steps), f'{side:8} seed {seed}', unit='step'):
        systems = draw(args.systems, args.particles, generator, args.device)
        right = systems.forces()
        start = now(torch.device(args.device))
        optimizer.zero_grad()
        found = model.forces(systems, systems.pos, create_graph=True)
        (found - right).square().mean().backward()
        optimizer.step()
        times.append(1e3 * (now(torch.device(args.device)) - start))
    unseen = draw(args.systems, args.particles, generator, args.device)
    right = unseen.forces()
    error = (model.forces(unseen, unseen.pos) - right).norm() / right.norm()
    return Outcome(error.item(), drift(model, unseen, args.simulated), statistics.median(times))


def compare(args: argparse.Namespace) -> str:
    """Trains all runs of all sides, which take turns; returns the table."""
    outcomes = in_turns(
        SIDES[args.layers_of], args.runs, lambda side, run: train(side, args, args.seed + run))
    sides = list(outcomes.values())
    return columns([
        ['', *outcomes],
        ['error of forces [%]',
         *(f'{100 * statistics.fmean(each.error for each in found):.1f}' for found in sides)],
        ['drift of energy [%]',
         *(f'{100 * statistics.fmean(each.drift for each in found):.2f}' for found in sides)],
        ['training step [ms]',
         *(f'{statistics.median(each.training for each in found):.2f}' for found in sides)],
    ])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--layers-of', choices=SIDES, default='both', help='(default: both)')
    counts = {'systems': 64, 'particles': 10, 'steps': 300, 'simulated': 200, 'layers': 3,
              'channels': 64, 'runs': 1}
    for name, default in counts.items():
        least = 2 if name == 'particles' else 1
        add(f'--{name}', type=at_least(least, int), default=default, help=f'(default: {default})')
    add('--lr', type=at_least(0, float), default=0.001, help='(default: 0.001)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    print(f'EGNN on systems of {args.particles} particles ({args.device}): {args.layers} layers of '
          f'{args.channels}, {args.steps} steps of {args.systems} systems', flush=True)
    print(f'\n{compare(args)}')


if __name__ == '__main__':
    main()
