"""GPS on batches of molecules, in training: beside PyG, eager and compiled.

python -m benchmarks gps                       everything below
python -m benchmarks gps --quick               a minute or less
python -m benchmarks gps --sizes 32,256,2048   graphs of a batch
python -m benchmarks gps --eager-only          without torch.compile, which takes long

Each contender trains a copy of the same model, GPSConv with GINEConv, on the same batches.
"""
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, GPSConv, global_add_pool

import pyg_fast
from pyg_fast.loader import GraphLoader

from . import _harness
from ._harness import Bench, Contender, Option

PYG, AT_HAND, COMPILED = 'PyG', 'PyG, batches at hand', 'compile(PyG), batches at hand'
EAGER, CAPTURED, BOTH = 'ours, eager', 'ours, captured', 'ours, captured and compiled'
ATOMS, BONDS, HEADS = 9, 3, 4
_TOLERANCE = 0.05  # of the mean loss of the first pass, in which Adam amplifies rounding


class GPS(nn.Module):
    """The layers of GPS with bonds as edge features, and a number for each molecule."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.atoms, self.last = nn.Linear(ATOMS, width), nn.Linear(width, 1)
        self.convs = nn.ModuleList(GPSConv(width, local(width), HEADS) for _ in range(depth))

    def forward(self, batch: Any) -> Tensor:
        x = self.atoms(batch.x)
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.batch, edge_attr=batch.edge_attr)
        return global_add_pool(self.last(x), batch.batch, batch.num_graphs).squeeze(-1)


def local(width: int) -> nn.Module:
    mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    return GINEConv(mlp, edge_dim=BONDS)


def molecules(count: int) -> list[Data]:
    """Rings of 12 to 40 atoms with a few chords: 26 nodes and 56 edges on average."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in torch.randint(12, 41, (count,), generator=generator).tolist():
        ring = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
        pairs = torch.cat([ring, torch.randint(size, (2, 2), generator=generator)], 1)
        edges = torch.cat([pairs, pairs.flip(0)], 1)
        x = torch.randn(size, ATOMS, generator=generator)
        bonds = torch.randint(BONDS, (edges.size(1),), generator=generator)
        found.append(Data(x=x, edge_index=edges, edge_attr=F.one_hot(bonds, BONDS).float(),
                          y=x[:, 0].sum().view(1) / size))
    return found


def loss_of(out: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(out, batch.y)


class Case:
    """One size of batches."""

    def __init__(self, size: int, bench: Bench) -> None:
        args = bench.args
        torch.manual_seed(0)
        self.size, self.calls, self.device = size, args.batches, bench.device
        self.graphs = molecules(size * args.batches)
        self.model = GPS(args.width, args.depth).to(self.device)
        self.expected = float(self.pass_over(*self.trained(), self.plain())())

    def trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(self.model)
        return model, torch.optim.Adam(model.parameters(), 1e-3)

    def plain(self) -> DataLoader:
        return DataLoader(self.graphs, self.size)

    def pass_over(
        self, model: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer,
        batches: Iterable[Any],
    ) -> Callable[[], Tensor]:
        def run() -> Tensor:
            losses = []
            for batch in batches:
                batch = batch.to(self.device)
                optimizer.zero_grad()
                loss = loss_of(model(batch), batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses).mean()
        return run

    def make(self, name: str) -> Callable[[], Any]:
        model, optimizer = self.trained()
        if name == PYG:
            return self.pass_over(model, optimizer, self.plain())
        if name in (AT_HAND, COMPILED):
            batches = [batch.to(self.device) for batch in self.plain()]
            run = torch.compile(model, dynamic=True) if name == COMPILED else model
            return self.pass_over(run, optimizer, batches)
        model = pyg_fast.accelerate(model)
        if name == EAGER:
            loader = GraphLoader(self.graphs, self.size, device=self.device)
            return self.pass_over(model, optimizer, loader)
        loader = GraphLoader(self.graphs, self.size, device=self.device, pad='buckets')
        step = pyg_fast.capture(model, loader, optimizer, loss_of, compile=name == BOTH)
        return lambda: torch.stack(list(step.epoch())).mean()

    def check(self, loss: Tensor) -> float:
        return abs(float(loss) - self.expected) / (_TOLERANCE * self.expected)

    def contenders(self, eager_only: bool) -> list[Contender]:
        ours = [CAPTURED, EAGER] if eager_only else [BOTH, CAPTURED, EAGER]
        rivals = [PYG, AT_HAND] if eager_only else [PYG, AT_HAND, COMPILED]
        return [
            Contender(name, lambda name=name: self.make(name), name in ours, self.check, self.calls)
            for name in [*ours, *rivals]]


def main(argv: Sequence[str] | None = None) -> None:
    bench = Bench(
        'gps', __doc__, argv,
        sizes=Option({'quick': (4,), 'usual': (32, 256)}, _harness.integers, 'graphs of a batch'),
        batches=Option({'quick': 3, 'cuda': 40, 'cpu': 8}, int, 'of a pass'),
        width=Option({'quick': 8, 'usual': 64}, int), depth=Option({'quick': 1, 'usual': 5}, int),
        eager_only=Option(False), notes=[
            'A step is loading, forward, backward and Adam, wall time with Python: the time of a '
            'pass over all batches, divided by their number. At hand: on the device before. '
            'Molecules have 26 nodes and 56 edges on average.'])
    for size in bench.args.sizes:
        case = Case(size, bench)
        bench.measure(
            'A training step', f'{size} graphs', bench.args.width,
            case.contenders(bench.args.eager_only), label='channels', memory=True,
            pairs=[(EAGER, PYG), (EAGER, AT_HAND)])
    bench.finish()


if __name__ == '__main__':
    main()
