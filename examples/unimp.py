"""Trains UniMP with PyG's TransformerConv and with pyg_fast's, and compares the two.

The model is that of "Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
Classification": in every step a part of the training nodes show their labels to their neighbours,
and the loss is that of the others; later all training nodes show them. Layers of attention with
gated skip connections. Ends with a table: the test accuracy at the best validation accuracy, the
time of a training step, and how far memory grew. `python examples/unimp.py --help` lists options.
"""
from __future__ import annotations

import argparse
import statistics

import torch
import torch.nn.functional as F
from gat import SIDES, spread
from node_classification import (
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
from torch_geometric.nn import TransformerConv
from tqdm import tqdm

from pyg_fast.nn import FusedTransformerConv
from pyg_fast.transforms import ToCSR

CONVS = {'PyG': TransformerConv, 'pyg_fast': FusedTransformerConv}


class UniMP(nn.Module):
    """Attention over features and the labels that are shown.

    Args:
        conv: Class of the layers.
        in_channels: Size of each input sample.
        num_classes: Size of each output sample.
        args: `hidden`, `heads`, `layers` and `dropout`.
    """

    def __init__(
        self, conv: type[nn.Module], in_channels: int, num_classes: int, args: argparse.Namespace
    ) -> None:
        super().__init__()
        self.num_classes, self.dropout = num_classes, args.dropout
        self.label = nn.Linear(num_classes, in_channels, bias=False)
        width = args.hidden * args.heads
        options = {'beta': True, 'dropout': args.dropout}
        self.convs = nn.ModuleList(
            conv(in_channels if k == 0 else width, args.hidden, args.heads, **options)
            for k in range(args.layers - 1))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in self.convs)
        self.last = conv(width, num_classes, args.heads, concat=False, **options)

    def forward(self, data: Data, shown: Tensor) -> Tensor:
        """Scores of all nodes; `shown` are the nodes whose labels are an input."""
        known = torch.zeros(data.num_nodes, self.num_classes, device=data.x.device)
        known[shown, data.y[shown]] = 1
        x = data.x + self.label(known)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x, data.edge_index)))
            x = F.dropout(x, self.dropout, self.training)
        return self.last(x, data.edge_index)


def train(
    model: UniMP, data: Data, parts: dict[str, Tensor], args: argparse.Namespace, name: str
) -> tuple[float, list[float]]:
    """Returns the test accuracy at the best validation accuracy, and the seconds of each step."""
    optimizer = torch.optim.Adam(model.parameters(), args.lr, weight_decay=args.weight_decay)
    best, seconds = (-1.0, 0.0), []
    nodes = parts['train']
    for _ in tqdm(range(args.epochs), name, unit='epoch'):
        model.train()
        shows = torch.rand(nodes.numel(), device=nodes.device) < args.label_rate
        shown, hidden = nodes[shows], nodes[~shows]
        start = now(data.x.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data, shown)[hidden], data.y[hidden])
        loss.backward()
        optimizer.step()
        seconds.append(now(data.x.device) - start)
        model.eval()
        with torch.no_grad():
            right = model(data, nodes).argmax(dim=-1) == data.y
        val, test = (right[parts[part]].float().mean().item() for part in ('val', 'test'))
        best = max(best, (val, test))
    return 100 * best[1], seconds


def compare(args: argparse.Namespace) -> str:
    """Trains all runs of all sides, which take turns; returns the table."""
    device = torch.device(args.device)
    data, num_classes = load(args)
    data = data.to(device)
    graphs = {'PyG': data, 'pyg_fast': ToCSR()(data)}
    accuracies, times, growths = ({side: [] for side in SIDES[args.layers_of]} for _ in range(3))
    for run in range(args.runs):
        for side in accuracies:
            graph = graphs[side]
            parts = split(graph, num_classes, args.seed + run)
            torch.manual_seed(args.seed + run)
            model = UniMP(CONVS[side], data.num_features, num_classes, args).to(device)
            memory = PeakMemory(device)
            accuracy, seconds = train(
                model, graph, parts, args, f'{side:8} run {run + 1}/{args.runs}')
            accuracies[side].append(accuracy)
            times[side].append(1e3 * statistics.median(seconds))
            growths[side].append((memory.growth() or 0) / 1e6)
    rows = [
        ['', *accuracies],
        ['test accuracy [%]', *(spread(each) for each in accuracies.values())],
        ['time of a step [ms]', *(f'{statistics.median(each):.2f}' for each in times.values())],
        ['growth of memory [MB]', *(f'{max(each):,.0f}' for each in growths.values())],
    ]
    return '\n'.join((f'{name:24}' + ''.join(f'{value:>16}' for value in values)).rstrip()
                     for name, *values in rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_dataset(parser, ('planted', 'Cora', 'CiteSeer', 'PubMed'), 'small')
    add('--layers-of', choices=SIDES, default='both', help='(default: both)')
    for name, default in {'layers': 2, 'hidden': 16, 'heads': 4, 'epochs': 100, 'runs': 1}.items():
        add(f'--{name}', type=at_least(1, int), default=default, help=f'(default: {default})')
    add('--label-rate', type=at_least(0, float, below=1), default=0.65,
        help='part of the training nodes that show their labels (default: 0.65)')
    add('--dropout', type=at_least(0, float, below=1), default=0.3, help='(default: 0.3)')
    add('--lr', type=at_least(0, float), default=0.005, help='(default: 0.005)')
    add('--weight-decay', type=at_least(0, float), default=5e-4, help='(default: 0.0005)')
    add('--seed', type=at_least(0, int), default=0, help='of the first run (default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    check_root(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    graph = f'planted, {args.size}' if args.dataset == 'planted' else args.dataset
    print(f'UniMP on {graph} ({args.device}): {args.layers} layers, {args.heads} heads of '
          f'{args.hidden}, {args.epochs} epochs', flush=True)
    print(f'\n{compare(args)}')


if __name__ == '__main__':
    main()
