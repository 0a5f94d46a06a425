"""Full-batch training on graphs of the size of ogbn-papers100M: time, memory and exactness.

python -m benchmarks large_graphs --sizes papers-like --convs gcn --parts training   one cell
python -m benchmarks large_graphs --symmetric --host-features --checkpoint           in less memory
python -m benchmarks large_graphs --quick                                            a tiny graph

Parts:
    training    making a graph, preparing it, a training step and inference: time, peak memory
    losses      20 steps on paths beside 20 on the whole graph, from the same weights (memory for
                the whole graph: sizes up to an eighth)
    gradients   the loss of some training nodes beside float64 on all edges that it depends on
"""
import argparse
import statistics
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

from pyg_fast.datasets import DIRECTED_SIZES

from . import _harness
from ._harness import Bench, Option, Result

sys.path.append(str(_harness.ROOT / 'examples'))  # scripts, which import each other by name
import papers100m
from papers100m import GIB, Phase, Training

CONVS = ('gcn', 'sage')
TRAINING = 'Training and inference, full batch'
LOSSES = 'Steps on paths beside steps on the whole graph'
GRADIENTS = 'Gradients beside float64'
FLAGS = ('int64', 'symmetric', 'host_features', 'checkpoint', 'aggregate_input')
CHECKED = 20  # steps
_EDGES = 2**27  # edges that are looked at together


def example(bench: Bench, size: str, conv: str, dtype: str) -> argparse.Namespace:
    """The options of examples/papers100m.py."""
    args = bench.args
    flags = [f'--{name.replace("_", "-")}' for name in FLAGS if getattr(args, name)]
    return papers100m.parse([
        '--size', size, '--conv', conv, '--dtype', dtype, '--device', args.device,
        '--hidden', str(args.hidden), '--steps', str(args.steps), '--lr', str(args.lr), *flags])


def named(args: argparse.Namespace) -> str:
    flags = [f', {name.replace("_", " ")}' for name in FLAGS if getattr(args, name)]
    return f'{args.size}, {args.conv}, {args.dtype}{"".join(flags)}'


def rehearse(bench: Bench) -> None:
    """Runs everything once on a tiny graph: kernels load before they are timed."""
    for conv in bench.args.convs:
        for dtype in bench.args.dtypes:
            args = example(bench, next(iter(DIRECTED_SIZES)), conv, dtype)
            data, num_classes = papers100m.load(args)
            training = Training(papers100m.prepare(data, args), num_classes, args)
            training.step()
            papers100m.accuracy(training, None)


def run_training(bench: Bench, size: str, conv: str, dtype: str) -> None:
    args = example(bench, size, conv, dtype)
    phase = Phase(bench.device)
    data, num_classes = papers100m.load(args)
    making, made = phase.end()
    phase = Phase(bench.device)
    data = papers100m.prepare(data, args)
    preparing, prepared = phase.end()
    training = Training(data, num_classes, args)
    estimate = training.estimate()
    phase = Phase(bench.device)
    seconds = papers100m.train(training, args)
    _, trained = phase.end()
    inferred = []
    for _ in range(3):  # the first one fills caches
        phase = Phase(bench.device)
        test = papers100m.accuracy(training, None)
        inferred.append(phase.end())
    bench.add(
        TRAINING, named(args), args.hidden,
        {'step': timed(seconds), 'inference': timed([each for each, _ in inferred[1:]])},
        label='hidden', facts={
            'nodes': data.num_nodes, 'edges': data.num_edges, 'making, s': making,
            'preparing, s': preparing, 'peak of making, GiB': made,
            'peak of preparing, GiB': prepared, 'peak of a step, GiB': trained,
            'estimated, GiB': estimate.total / GIB, 'peak of inference, GiB': inferred[-1][1],
            'test accuracy, %': test, 'after steps': args.steps})
    bench.note(f'{named(args)}: ' + '; '.join(map(repr, data.execution_paths)))


def timed(seconds: Sequence[float]) -> Result:
    return Result(*(1e3 * of(seconds) for of in (statistics.median, min, max)), len(seconds))


# Exactness ---------------------------------------------------------------------------------------

class Whole(Training):
    """The same training on all rows of every layer."""

    def scores(self) -> Tensor:
        return self.model(self.data.x, self.data.edge_index)[self.data.train_mask].float()


def run_losses(bench: Bench, size: str, conv: str, dtype: str) -> None:
    args = example(bench, size, conv, dtype)
    data, num_classes = papers100m.load(args)
    data = papers100m.prepare(data, args)
    losses, tests = [], []
    for way in (Training, Whole):
        torch.manual_seed(0)
        training = way(data, num_classes, args)
        steps = [float(training.step()) for _ in range(args.steps)]
        losses.append(torch.tensor(steps[:CHECKED], dtype=torch.double))
        tests.append(papers100m.accuracy(training, None))
        del training
    differs = (losses[0] / losses[1] - 1).abs().max()
    bench.add(LOSSES, named(args), args.hidden, {}, label='hidden', facts={
        'steps compared': len(losses[0]), 'largest relative difference': float(differs),
        'last loss compared': float(losses[0][-1]), 'accuracy after steps': args.steps,
        'test accuracy on paths, %': tests[0], 'on the whole graph, %': tests[1]})


def edges_into(edge_index: Tensor, nodes: Tensor) -> Tensor:
    """The edges whose destinations are in a mask."""
    return torch.cat([
        part[:, nodes[part[1].long()]].long() for part in edge_index.split(_EDGES, dim=1)], dim=1)


def neighbourhood(edge_index: Tensor, seeds: Tensor, num_layers: int) -> Tensor:
    """All edges that the output of some nodes depends on."""
    reached, edges = seeds.clone(), edges_into(edge_index, seeds)
    for _ in range(num_layers - 1):
        reached[edges[0]] = True
        edges = edges_into(edge_index, reached)
    return edges


class Reference:
    """PyG's layers in float64 on the neighbourhood of some nodes, with the degrees of the graph."""

    def __init__(self, data: Data, seeds: Tensor, num_layers: int) -> None:
        mask = torch.zeros(data.num_nodes, dtype=torch.bool, device=seeds.device)
        mask[seeds] = True
        edges = neighbourhood(data.edge_index, mask, num_layers)
        degree = data.edge_index.new_zeros(data.num_nodes)
        for part in data.edge_index[1].split(_EDGES):
            degree += part.bincount(minlength=data.num_nodes)
        self.nodes = torch.cat([edges.view(-1), seeds]).unique()
        place = torch.searchsorted(self.nodes, edges)
        loops = torch.arange(self.nodes.numel(), device=seeds.device)
        self.edges = {'sage': place, 'gcn': torch.cat([place, loops.expand(2, -1)], dim=1)}
        scale = (degree[self.nodes] + 1.0).double().rsqrt()
        self.weight = scale[self.edges['gcn']].prod(0)
        self.seeds = torch.searchsorted(self.nodes, seeds)
        self.y = data.y[seeds]

    def gradients(self, model: nn.Module, x: Tensor) -> list[Tensor]:
        """Those of the parameters of a PathPreparedGNN, in their order."""
        kind = {'gcn': lambda *size: GCNConv(*size, normalize=False), 'sage': SAGEConv}[model.conv]
        convs = nn.ModuleList(
            kind(conv.in_channels, conv.out_channels) for conv in model.convs)
        convs.load_state_dict(model.convs.state_dict())
        convs.to(self.weight.device, torch.double)
        args = (self.edges[model.conv], self.weight)[:2 if model.conv == 'gcn' else 1]
        h = x[self.nodes.to(x.device)].to(self.weight.device, torch.double)
        for k, conv in enumerate(convs):
            h = conv(h if k == 0 else h.relu(), *args)
        F.cross_entropy(h[self.seeds], self.y).backward()
        by_name = {name: p.grad for name, p in convs.named_parameters()}
        return [by_name[name] for name, _ in model.convs.named_parameters()]


def run_gradients(bench: Bench, size: str, conv: str, dtype: str) -> None:
    args = example(bench, size, conv, dtype)
    data, num_classes = papers100m.load(args)
    nodes = data.train_mask.nonzero().view(-1)
    generator = torch.Generator().manual_seed(0)
    place = torch.randperm(nodes.numel(), generator=generator)[:bench.args.seeds].to(nodes.device)
    reference = Reference(data, nodes[place], args.layers)
    data = papers100m.prepare(data, args)
    torch.manual_seed(0)
    training = Training(data, num_classes, args)
    F.cross_entropy(training.scores()[place], reference.y).backward()
    model = training.model
    right = reference.gradients(model, data.x)
    errors = {
        name: float((p.grad.double() - grad).norm() / grad.norm())
        for (name, p), grad in zip(model.named_parameters(), right, strict=True)}
    bench.add(GRADIENTS, named(args), args.hidden, {}, label='hidden', facts={
        'training nodes of the loss': place.numel(), 'nodes it reads': reference.nodes.numel(),
        'edges it reads': reference.edges['sage'].size(1),
        'largest relative error of a parameter': max(errors.values()),
        'of': max(errors, key=lambda name: errors[name])})


PARTS = {'training': run_training, 'losses': run_losses, 'gradients': run_gradients}


def main(argv: Sequence[str] | None = None) -> None:
    sizes = tuple(DIRECTED_SIZES)
    bench = Bench(
        'large-graphs', __doc__, argv, parts=tuple(PARTS),
        sizes=_harness.names('size', sizes, {'quick': sizes[:1], 'usual': sizes[1:]}),
        convs=_harness.names('layer', CONVS, CONVS),
        dtypes=_harness.names('type', tuple(papers100m.DTYPES), ('bfloat16',)),
        hidden=Option({'quick': 32, 'usual': 128}, _harness.positive, 'channels'),
        lr=Option(0.01, float, 'learning rate'),
        steps=Option({'quick': 5, 'usual': 30}, _harness.positive, 'of training'),
        seeds=Option({'quick': 20, 'usual': 1000}, _harness.positive, 'training nodes of the loss'),
        int64=Option(False, help='a list of edges in int64, as PyG has it'),
        symmetric=Option(False, help='adds the reverse of each edge'),
        host_features=Option(False, help='features in host memory'),
        checkpoint=Option(False, help='computes activations again'),
        aggregate_input=Option(False, help='sums the features of neighbours once'),
        notes=None)
    bench.note(
        'Generated graphs: `pyg_fast.datasets.PlantedGraph`. 3 layers, Adam, weights updated in '
        'float32, by examples/papers100m.py. Wall times; steps and inference: medians in ms. A '
        'graph is made and prepared (sorted both ways, three paths) once, after a tiny one. Peaks, '
        "with all that is there before: torch's allocator on a GPU, the process on a CPU.")
    if bench.has('training'):
        rehearse(bench)
    for part, run in PARTS.items():
        for size in bench.args.sizes if bench.has(part) else ():
            for conv in bench.args.convs:
                for dtype in bench.args.dtypes:
                    run(bench, size, conv, dtype)
                    _harness.free(bench.cuda)
    bench.finish()


if __name__ == '__main__':
    main()
