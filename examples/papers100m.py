"""Trains a network full-batch on a graph of the size of ogbn-papers100M, on one GPU.

The graph has 111 million nodes and 1.6 billion edges; 1.1 % of the nodes train, and execution paths
compute only what their loss reads. It is generated on the device (--size), or read from OGB's raw
files (--root). Ends with a table: the time of preparing, of a training step and of the inference of
all nodes, peak memory beside the estimate, and the test accuracy.

    python examples/papers100m.py                                     an eighth of it
    python examples/papers100m.py --size papers-like                  all of it
    python examples/papers100m.py --root data/ogbn_papers100M         OGB's raw files
    python examples/papers100m.py --size papers-like --symmetric --host-features --checkpoint
"""
from __future__ import annotations

import argparse
import os
import statistics
import zipfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from node_classification import PeakMemory, at_least, choose_device, now
from torch import Tensor
from torch_geometric.data import Data
from tqdm import tqdm

import pyg_fast
from pyg_fast.datasets import DIRECTED_SIZES, PlantedGraph
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.transforms import Prepare, ToCSR

# Read when CUDA is first used: memory that is free in several segments can hold a large tensor.
os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:True')

GIB = 2**30
CHUNK = 2**28  # bytes of a file, or of a tensor, that are on their way at once
DTYPES = {'bfloat16': torch.bfloat16, 'float16': torch.float16, 'float32': torch.float32}


class Missing(Exception):
    """Files that are not there, or are not OGB's."""


# The graph ---------------------------------------------------------------------------------------

def load(args: argparse.Namespace) -> tuple[Data, int]:
    """The graph on the device and its number of classes; `x` is in host memory if asked to."""
    dtype, index = DTYPES[args.dtype], torch.int64 if args.int64 else torch.int32
    if args.root is not None:
        data = read_ogb(args.root, dtype, index, args.device, args.host_features)
        num_classes = int(data.y.max()) + 1
    else:
        dataset = PlantedGraph(
            args.size, args.seed, dtype=dtype, index_dtype=index, device=args.device)
        data, num_classes = dataset[0], dataset.num_classes
        del dataset  # or it would keep the list of edges
        if args.host_features:
            data.x = on_host(data.x)
    if args.symmetric:
        data.edge_index = both_ways(data.edge_index)
    return data, num_classes


def on_host(x: Tensor) -> Tensor:
    """A copy in host memory, pinned if it comes from a GPU."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda).copy_(x)


def both_ways(edge_index: Tensor) -> Tensor:
    """The edges and their reverses. A pair of nodes linked both ways has each edge twice."""
    count = edge_index.size(1)
    both = edge_index.new_empty(2, 2 * count)
    both[:, :count] = edge_index
    both[0, count:], both[1, count:] = edge_index[1], edge_index[0]
    return both


def read_ogb(
    root: Path, dtype: torch.dtype, index: torch.dtype, device: str, host_features: bool
) -> Data:
    """The graph in OGB's raw files: raw/data.npz, raw/node-label.npz and split/time/*.csv.gz.

    Edges and features go to their place in chunks: host memory never holds a copy of them.
    """
    names = ('raw/data.npz', 'raw/node-label.npz', *(
        f'split/time/{part}.csv.gz' for part in ('train', 'valid', 'test')))
    for name in names:
        if not (root / name).is_file():
            raise Missing(f'{root / name} does not exist: expected {", ".join(names)}')
    with np.load(root / names[0]) as arrays:
        counts = arrays['num_nodes_list'], arrays['num_edges_list']
    if any(count.size != 1 for count in counts):
        raise Missing(f'{root / names[0]}: expected one graph, got {counts[0].size}')
    at = 'cpu' if host_features else device
    pinned = host_features and device == 'cuda'
    x = read_array(root / names[0], 'node_feat', dtype, at, pinned)
    edge_index = read_array(root / names[0], 'edge_index', index, device)
    with np.load(root / names[1]) as arrays:
        label = torch.from_numpy(arrays['node_label']).view(-1)
    y = torch.where(label.isnan(), -1, label).long() if label.is_floating_point() else label.long()
    data = Data(x=x, edge_index=edge_index, y=y.to(device))
    for part, name in zip(('train', 'val', 'test'), names[2:], strict=True):
        nodes = torch.from_numpy(np.loadtxt(root / name, dtype=np.int64, ndmin=1))
        mask = torch.zeros(y.numel(), dtype=torch.bool)
        mask[nodes] = True
        data[f'{part}_mask'] = mask.to(device)
    return data


def read_array(
    file: Path, name: str, dtype: torch.dtype, device: str, pinned: bool = False
) -> Tensor:
    """An array of an .npz file, converted and moved chunk by chunk."""
    with zipfile.ZipFile(file) as archive, archive.open(f'{name}.npy') as stream:
        version = np.lib.format.read_magic(stream)
        header = getattr(np.lib.format, f'read_array_header_{version[0]}_0')
        shape, fortran, kind = header(stream)
        out = torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)
        # The file holds the rows of a matrix, or of its transpose.
        rows = out.t() if fortran else out.view(-1, 1)
        for block in rows.split(max(1, CHUNK // (rows.size(1) * kind.itemsize))):
            read = bytearray(stream.read(block.numel() * kind.itemsize))
            if len(read) < block.numel() * kind.itemsize:
                raise Missing(f'{file}: {name} ends too early')
            block.copy_(torch.from_numpy(np.frombuffer(read, kind)).view(block.shape))
    return out


# Training ----------------------------------------------------------------------------------------

class Training:
    """A network in the type of the features with an optimizer of float32 weights.

    Args:
        data: A graph that :func:`prepare` has prepared.
        num_classes: Size of each output sample.
        args: `conv`, `layers`, `hidden`, `dropout`, `lr`, `checkpoint` and `aggregate_input`.
    """

    def __init__(self, data: Data, num_classes: int, args: argparse.Namespace) -> None:
        self.data = data
        self.model = PathPreparedGNN(
            args.conv, data.x.size(1), args.hidden, num_classes, args.layers, args.dropout,
            checkpoint=args.checkpoint)
        self.model.to(data.edge_index.device)
        self.weights = [p.detach().clone() for p in self.model.parameters()]
        self.model.to(data.x.dtype)
        self.optimizer = torch.optim.Adam(self.weights, args.lr)
        self.y = data.y[data.train_mask]
        self.x = data.x
        if args.aggregate_input:
            self.x = self.model.aggregate_input(
                data.x, data.edge_index, paths=data.execution_paths)

    def estimate(self) -> pyg_fast.MemoryEstimate:
        """What a step will need on the device, by part."""
        return pyg_fast.memory_estimate(self.model, self.data, x=self.x, active_only=True)

    def scores(self) -> Tensor:
        """Those of the training nodes alone: no matrix of all nodes is made for the output."""
        data = self.data
        return self.model(
            self.x, data.edge_index, paths=data.execution_paths, active_only=True).float()

    def step(self) -> Tensor:
        """One step of all training nodes; returns the loss."""
        self.model.train()
        loss = F.cross_entropy(self.scores(), self.y)
        loss.backward()
        low = list(self.model.parameters())
        for weight, parameter in zip(self.weights, low, strict=True):
            weight.grad, parameter.grad = parameter.grad.to(weight.dtype), None
        self.optimizer.step()
        with torch.no_grad():
            for weight, parameter in zip(self.weights, low, strict=True):
                parameter.copy_(weight)
        return loss.detach()


def prepare(data: Data, args: argparse.Namespace) -> Data:
    """Sorts the graph both ways, which takes the place of the list of edges, and makes the path of
    each layer."""
    ToCSR(keep_edge_index=False).forward(data)  # in place: the caller's data drop the list too
    return Prepare(args.layers, width=args.hidden, forward=True)(data)


def train(training: Training, args: argparse.Namespace) -> list[float]:
    """Returns the seconds of each step."""
    seconds, device = [], training.y.device
    steps = tqdm(range(args.steps), 'training', unit='step')
    for _ in steps:
        start = now(device)
        loss = training.step()
        seconds.append(now(device) - start)
        steps.set_postfix_str(f'loss {loss.item():.3f}, {seconds[-1]:.3g} s a step', refresh=False)
    return seconds


def accuracy(training: Training, max_bytes: int | None) -> float:
    """The share of the test nodes whose class the inference of all nodes finds, in percent."""
    training.model.eval()
    out = training.model.inference(training.data, max_bytes=max_bytes)
    nodes = training.data.test_mask.nonzero().view(-1).to(out.device)
    right = out[nodes].argmax(dim=1).to(training.data.y.device) == training.data.y[
        training.data.test_mask]
    return 100 * right.double().mean().item()


# The program -------------------------------------------------------------------------------------

class Phase:
    """A phase of the program, from now on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory, self.start = device, PeakMemory(device), now(device)

    def end(self) -> tuple[float, float | None]:
        """Its seconds and the peak of memory in GiB, with what was there before."""
        seconds, grown = now(self.device) - self.start, self.memory.growth()
        if grown is None or self.memory.start is None:
            return seconds, None
        return seconds, (self.memory.start + grown) / GIB


def row(name: str, seconds: float, peak: float | None, note: str = '') -> str:
    """A line of the table."""
    memory = 'unknown' if peak is None else f'{peak:.2f} GiB'
    return f'{name:24}{f"{seconds:.3g} s":>12}   {memory}{note}'


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--size', choices=DIRECTED_SIZES, default='papers-like-eighth',
        help='of the generated graph (default: papers-like-eighth)')
    add('--root', type=Path, help="folder with OGB's raw files of ogbn-papers100M, which are read "
        'instead: raw/data.npz, raw/node-label.npz and split/time/*.csv.gz')
    add('--conv', choices=('gcn', 'sage'), default='gcn', help='(default: gcn)')
    for name, default in {'layers': 3, 'hidden': 128, 'steps': 30}.items():
        add(f'--{name}', type=at_least(1, int), default=default, help=f'(default: {default})')
    add('--dropout', type=at_least(0, float, below=1), default=0.0, help='(default: 0)')
    add('--lr', type=at_least(0, float), default=0.01, help='(default: 0.01)')
    add('--dtype', choices=DTYPES, default='bfloat16',
        help='of features and activations; weights are updated in float32 (default: bfloat16)')
    add('--int64', action='store_true',
        help='a list of edges in int64, as PyG has it, until it is sorted, instead of int32')
    add('--symmetric', action='store_true', help='adds the reverse of each edge')
    add('--host-features', action='store_true',
        help='leaves the features in host memory, from where they are read in every step')
    add('--checkpoint', action='store_true', help='keeps fewer activations and computes them again')
    add('--aggregate-input', action='store_true',
        help='sums the features of neighbours once instead of in every step')
    add('--inference-bytes', type=at_least(1, int), metavar='N',
        help='memory that the inference may take (default: what is free)')
    add('--seed', type=at_least(0, int), default=0, help='(default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    phase = Phase(device)
    try:
        data, num_classes = load(args)
    except Missing as error:
        raise SystemExit(f'error: {error}') from error
    rows = [f'{"":24}{"time":>12}   peak memory',
            row('reading the graph' if args.root else 'making the graph', *phase.end())]
    print(f'{data.num_nodes:,} nodes, {data.num_edges:,} edges, {data.num_features} features, '
          f'{num_classes} classes, {int(data.train_mask.sum()):,} training nodes ({args.device})',
          flush=True)

    phase = Phase(device)
    data = prepare(data, args)
    rows.append(row('preparing', *phase.end()))
    for path in data.execution_paths:
        print(path)

    phase = Phase(device)
    training = Training(data, num_classes, args)
    if args.aggregate_input:
        rows.append(row('aggregating the input', *phase.end()))
    estimate = training.estimate()
    print(f'\n{estimate}\n', flush=True)
    phase = Phase(device)
    seconds = train(training, args)
    rows.append(row('training step', statistics.median(seconds), phase.end()[1],
                    f', estimated {estimate.total / GIB:.2f}'))

    phase = Phase(device)
    test = accuracy(training, args.inference_bytes)
    rows.append(row('inference of all nodes', *phase.end()))
    print('\n'.join(['', *rows, f'test accuracy {test:.1f} %']))


if __name__ == '__main__':
    main()
