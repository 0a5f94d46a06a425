"""Trains a model that predicts links, on mini-batches of PyG's loader and of pyg_fast's.

A tenth of the links is held out for a test and a twentieth for validation; two layers of
GraphSAGE embed the nodes, and the product of two embeddings is the score of a link. Each batch has
as many random negative links as links. Ends with a table, a line for each loader: the area under
the ROC curve of the test links (AUC) at its best for the validation, and the time of an epoch.

The edges that a model is to predict are in the batches of PyG's loader: the model learns to find
them there, and misses them in the test. The last line leaves them out (drop_seed_edges).
"""
from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from node_classification import at_least, choose_device, now
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.transforms import RandomLinkSplit
from tqdm import tqdm

from pyg_fast.datasets import SIZES, PlantedGraph
from pyg_fast.loader import FastLinkNeighborLoader
from pyg_fast.nn import FusedSAGEConv

LOADERS = {
    'PyG': (LinkNeighborLoader, {}),
    'pyg_fast': (FastLinkNeighborLoader, {}),
    'pyg_fast, without the edges to predict':
        (FastLinkNeighborLoader, {'drop_seed_edges': True, 'rev_edge_type': True}),
}


class Encoder(nn.Module):
    """Two layers of GraphSAGE.

    Args:
        in_channels: Size of each input sample.
        hidden: Size of each output sample.
    """

    def __init__(self, in_channels: int, hidden: int) -> None:
        super().__init__()
        self.conv1 = FusedSAGEConv(in_channels, hidden)
        self.conv2 = FusedSAGEConv(hidden, hidden)

    def forward(self, batch: Data) -> Tensor:
        """Returns the scores of the links of a batch."""
        x = self.conv1(batch.x, batch.edge_index).relu()
        x = self.conv2(x, batch.edge_index)
        src, dst = x[batch.edge_label_index]
        return (src * dst).sum(-1)


class Outcome(NamedTuple):
    """The measurements of one loader."""

    auc: float
    epoch_seconds: float


def auc(score: Tensor, label: Tensor) -> float:
    """The share of the pairs of a link and a negative in which the link has the higher score."""
    order = score.argsort()
    rank = torch.empty_like(score, dtype=torch.double)
    rank[order] = torch.arange(1, score.numel() + 1, dtype=torch.double, device=score.device)
    positive = label > 0
    count, num_negative = int(positive.sum()), int((~positive).sum())
    return (float(rank[positive].sum()) - count * (count + 1) / 2) / (count * num_negative)


@torch.no_grad()
def evaluate(model: Encoder, batches: Iterable[Data]) -> float:
    """Returns the AUC of the links of a loader."""
    model.eval()
    found = [(model(batch), batch.edge_label) for batch in batches]
    return auc(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def train_on(name: str, parts: tuple[Data, Data, Data], args: argparse.Namespace) -> Outcome:
    """Trains on the batches of one loader."""
    loader, options = LOADERS[name]
    sizes = {'num_neighbors': [args.neighbors] * 2, 'batch_size': args.batch_size}
    train, *held_out = parts
    if loader is FastLinkNeighborLoader:
        options = {**options, 'seed': args.seed}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # PyG's loader recommends pyg-lib.
        batches = loader(
            train, **sizes, **options, edge_label_index=train.edge_label_index,
            neg_sampling='binary', shuffle=True)
    val, test = (
        FastLinkNeighborLoader(
            part, **sizes, edge_label_index=part.edge_label_index, edge_label=part.edge_label,
            seed=args.seed)
        for part in held_out)
    torch.manual_seed(args.seed)
    model = Encoder(train.num_features, args.hidden).to(train.x.device)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    seconds, best = [], (0.0, 0.0)
    for _ in tqdm(range(args.epochs), name, unit='epoch'):
        model.train()
        start = now(train.x.device)
        for batch in batches:
            optimizer.zero_grad()
            batch = batch.to(train.x.device)
            F.binary_cross_entropy_with_logits(model(batch), batch.edge_label).backward()
            optimizer.step()
        seconds.append(now(train.x.device) - start)
        best = max(best, (evaluate(model, val), evaluate(model, test)))
    return Outcome(best[1], statistics.median(seconds))


def table(outcomes: dict[str, Outcome]) -> str:
    """Returns the comparison, one line per loader."""
    lines = [f'{"":40}{"test AUC":>10}{"epoch [ms]":>12}']
    lines += [f'{name:40}{outcome.auc:>10.3f}{1e3 * outcome.epoch_seconds:>12.0f}'
              for name, outcome in outcomes.items()]
    return '\n'.join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('--size', choices=SIZES, default='small', help='of the planted graph (default: small)')
    add('--epochs', type=at_least(1, int), default=5, help='(default: 5)')
    add('--batch-size', type=at_least(1, int), default=512, help='links (default: 512)')
    add('--neighbors', type=at_least(1, int), default=10, help='in each hop (default: 10)')
    add('--hidden', type=at_least(1, int), default=64, help='(default: 64)')
    add('--lr', type=at_least(0, float), default=0.005, help='(default: 0.005)')
    add('--seed', type=at_least(0, int), default=0, help='(default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the demo."""
    args = parse(argv)
    torch.manual_seed(args.seed)
    data = PlantedGraph(args.size)[0].to(args.device)
    split = RandomLinkSplit(
        num_val=0.05, num_test=0.1, is_undirected=True, add_negative_train_samples=False)
    parts = split(data)
    print(f'planted, {args.size}: {data.num_nodes} nodes, {data.num_edges} edges, '
          f'{parts[0].edge_label_index.size(1)} links to train on ({args.device})', flush=True)
    print(f'\n{table({name: train_on(name, parts, args) for name in LOADERS})}')


if __name__ == '__main__':
    main()
