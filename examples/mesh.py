"""Learns to simulate heat on triangular meshes with a MeshGraphNet, by PyG's layers and pyg_fast's.

The model is the simulator of "Learning Mesh-Based Simulation with Graph Networks"
(https://arxiv.org/abs/2010.03409): each layer gives every edge new features, by an MLP of both
ends and of its old ones, and every node new features of the sum of these. It predicts by how much
the temperature of each node changes in a time step; a rollout feeds its predictions back to it.
The true change comes from finite elements, whose stiffness the model never sees. The sides differ
by one line, `accelerate`. Ends with a table: the error of a step and of a rollout on an unseen
mesh, and the time of a training step. `python examples/mesh.py --help` lists options.
"""
from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

import torch
from gat import SIDES
from node_classification import at_least, choose_device, columns, in_turns, now
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter
from tqdm import tqdm

import pyg_fast

TIME_STEP = 0.1  # in units of the square of the distance of neighbouring nodes


def mlp(num_in: int, channels: int, num_out: int | None = None) -> nn.Sequential:
    """Two layers; with a LayerNorm, if it does not say how many numbers come out."""
    layers = [nn.Linear(num_in, channels), nn.ReLU(), nn.Linear(channels, num_out or channels)]
    return nn.Sequential(*layers, *([] if num_out else [nn.LayerNorm(channels)]))


class Layer(MessagePassing):
    """New features of edges, and of nodes of their sums.

    Args:
        channels: Size of each sample.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(aggr='add')
        self.edge, self.node = mlp(3 * channels, channels), mlp(2 * channels, channels)

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
        out = self.propagate(edge_index, x=x, e=e)
        return x + self.node(torch.cat([x, out], -1)), self.new

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        new = e + self.edge(torch.cat([x_i, x_j, e], -1))
        self.new = new
        return new


class MeshGraphNet(nn.Module):
    """The change of the temperature of each node.

    Args:
        channels: Size of each hidden sample.
        layers: How many layers.
    """

    def __init__(self, channels: int, layers: int) -> None:
        super().__init__()
        self.nodes, self.edges = mlp(2, channels), mlp(4, channels)
        self.layers = nn.ModuleList(Layer(channels) for _ in range(layers))
        self.last = mlp(channels, channels, 1)

    def forward(self, mesh: Mesh, heat: Tensor) -> Tensor:
        src, dst = mesh.edge_index
        gap = mesh.pos[src] - mesh.pos[dst]
        x = self.nodes(torch.cat([heat, mesh.is_border], -1))
        e = self.edges(torch.cat([gap, gap.norm(dim=-1, keepdim=True), heat[src] - heat[dst]], -1))
        for layer in self.layers:
            x, e = layer(x, mesh.edge_index, e)
        return self.last(x).masked_fill(mesh.is_border > 0, 0)


class Mesh(NamedTuple):
    """A triangular mesh, and the heat conduction of finite elements on it."""

    pos: Tensor  # [N, 2]
    is_border: Tensor  # [N, 1], 1 where the temperature is held
    edge_index: Tensor
    stiffness: Tensor  # [E, 1], of each edge
    mass: Tensor  # [N, 1], of each node

    def change(self, heat: Tensor) -> Tensor:
        """The true change of the temperature in a time step."""
        src, dst = self.edge_index
        flow = scatter(self.stiffness * (heat[src] - heat[dst]), dst, 0, heat.size(0), 'sum')
        return (TIME_STEP * flow / self.mass).masked_fill(self.is_border > 0, 0)


def draw_mesh(side: int, generator: torch.Generator, device: str) -> Mesh:
    """A grid of `side` x `side` nodes, moved at random, its squares cut along a random diagonal."""
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing='ij')
    pos = torch.stack([row, column], -1).view(-1, 2).float()
    inner = ((pos > 0) & (pos < side - 1)).all(-1, keepdim=True)
    pos = pos + inner * 0.5 * (torch.rand(pos.shape, generator=generator) - 0.5)
    corner = (side * row + column)[:-1, :-1].reshape(-1)
    a, b, c, d = corner, corner + 1, corner + side, corner + side + 1
    cut = torch.rand(corner.numel(), generator=generator) < 0.5
    first = torch.stack([a, b, torch.where(cut, d, c)])
    second = torch.stack([torch.where(cut, a, b), d, c])
    corners = torch.cat([first, second], 1)  # [3, triangles]
    edges, weights, masses = [], [], torch.zeros(len(pos))
    for k in range(3):
        # The stiffness of an edge is half the cotangent of the angle at the opposite corner.
        i, j, opposite = corners[k], corners[k - 2], corners[k - 1]
        u, v = pos[i] - pos[opposite], pos[j] - pos[opposite]
        area = (u[:, 0] * v[:, 1] - u[:, 1] * v[:, 0]).abs()
        edges += [torch.stack([i, j]), torch.stack([j, i])]
        weights += [(u * v).sum(-1) / area / 2] * 2
        masses.index_add_(0, i, area / 6)
    pairs, place = torch.cat(edges, 1).unique(dim=1, return_inverse=True)
    stiffness = scatter(torch.cat(weights), place, 0, pairs.size(1), 'sum')
    return Mesh(*(
        x.to(device) for x in (
            pos, (~inner).float(), pairs, stiffness.unsqueeze(-1), masses.unsqueeze(-1))
    ))


def draw_heat(mesh: Mesh, generator: torch.Generator) -> Tensor:
    """A smooth random temperature."""
    waves = 0.6 * torch.randn(2, 8, generator=generator).to(mesh.pos.device)
    phase = 6 * torch.rand(8, generator=generator).to(mesh.pos.device)
    return (mesh.pos @ waves + phase).sin().mean(-1, keepdim=True)


class Outcome(NamedTuple):
    """What a side reached; the time of a training step in ms."""

    error: float
    rollout: float
    training: float


@torch.no_grad()
def errors(model: MeshGraphNet, mesh: Mesh, heat: Tensor, steps: int) -> tuple[float, float]:
    """The relative error of the change in a step, and of that since the start after some steps."""
    right, found = heat, heat
    change = mesh.change(heat)
    first = (model(mesh, heat) - change).norm() / change.norm()
    for _ in range(steps):
        right, found = right + mesh.change(right), found + model(mesh, found)
    return first.item(), ((found - right).norm() / (right - heat).norm()).item()


def train(side: str, args: argparse.Namespace, seed: int) -> Outcome:
    """Trains a model and measures it."""
    torch.manual_seed(seed)
    model = MeshGraphNet(args.channels, args.layers).to(args.device)
    if side == 'pyg_fast':
        pyg_fast.accelerate(model)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    meshes = [draw_mesh(args.side, generator, args.device) for _ in range(args.meshes)]
    times = []
    for step in tqdm(range(args.steps), f'{side:8} seed {seed}', unit='step'):
        mesh = meshes[step % args.meshes]
        heat = draw_heat(mesh, generator)
        right = mesh.change(heat)
        start = now(torch.device(args.device))
        optimizer.zero_grad()
        loss = (model(mesh, heat) - right).square().mean() / right.square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        times.append(1e3 * (now(torch.device(args.device)) - start))
    unseen = draw_mesh(args.side, generator, args.device)
    error, rollout = errors(model, unseen, draw_heat(unseen, generator), args.rollout)
    return Outcome(error, rollout, statistics.median(times))


def compare(args: argparse.Namespace) -> str:
    """Trains all runs of all sides, which take turns; returns the table."""
    outcomes = in_turns(
        SIDES[args.layers_of], args.runs, lambda side, run: train(side, args, args.seed + run))
    sides = list(outcomes.values())
    return columns([
        ['', *outcomes],
        ['error of a step [%]',
         *(f'{100 * statistics.fmean(each.error for each in found):.1f}' for found in sides)],
        ['error of a rollout [%]',
         *(f'{100 * statistics.fmean(each.rollout for each in found):.1f}' for found in sides)],
        ['training step [ms]',
         *(f'{statistics.median(each.training for each in found):.2f}' for found in sides)],
    ])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--layers-of', choices=SIDES, default='both', help='(default: both)')
    counts = {'side': 50, 'meshes': 8, 'steps': 300, 'rollout': 20, 'layers': 3, 'channels': 64,
              'runs': 1}
    for name, default in counts.items():
        least = 3 if name == 'side' else 1
        add(f'--{name}', type=at_least(least, int), default=default, help=f'(default: {default})')
    add('--lr', type=at_least(0, float), default=0.002, help='(default: 0.002)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    print(f'MeshGraphNet on meshes of {args.side}^2 nodes ({args.device}): {args.layers} layers of '
          f'{args.channels}, {args.steps} steps', flush=True)
    print(f'\n{compare(args)}')


if __name__ == '__main__':
    main()
