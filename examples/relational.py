"""Predicts what customers of a shop do next, from a relational database with times.

The database is generated: customers write reviews of products; a good product lets a customer come
back soon, a bad one late. The task is that of relational deep learning
(https://arxiv.org/abs/2407.20060): for a customer and a day, does the customer write another
review within some days? A model may read what happened up to that day alone. Two layers of
GraphSAGE for each type of edges train on mini-batches of three loaders: PyG's, which needs pyg-lib
to sample by time and is left out without it, pyg_fast's with the times, and pyg_fast's without
them: that one mixes reviews of all days, the future's too. Ends with a table, a line for each
loader: the area under the ROC curve (AUC) of the last epoch and of later days, tested with the
times, and the time of an epoch. `python examples/relational.py --help` lists options.
"""
from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.typing
from link_prediction import auc
from node_classification import at_least, choose_device, columns, now
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from tqdm import tqdm

import pyg_fast
from pyg_fast.loader import FastNeighborLoader

DAYS, WINDOW = 365, 14
TRAIN, TEST = (60, 200), (240, DAYS - WINDOW)  # days of the questions
EDGES = [('review', 'by', 'customer'), ('review', 'of', 'product'),
         ('customer', 'wrote', 'review'), ('product', 'has', 'review')]


def draw_database(args: argparse.Namespace, generator: torch.Generator) -> HeteroData:
    """Customers, products, and reviews with a rating and a day."""
    quality = torch.randn(args.products, generator=generator)
    mood = torch.randn(args.customers, generator=generator)
    day = 60 * torch.rand(args.customers, generator=generator)
    found = []
    while (day < DAYS).any():
        product = torch.randint(args.products, day.shape, generator=generator)
        noise = torch.randn(day.shape, generator=generator)
        rating = quality[product] + 0.3 * noise
        who = (day < DAYS).nonzero().view(-1)
        found.append((who, product[who], rating[who], day[who].long()))
        mood = 0.5 * mood + rating
        gap = -torch.rand(day.shape, generator=generator).log() * 12 * (-mood).exp().clamp(max=8)
        day = day + gap.clamp(min=1)
    customer, product, rating, time = (torch.cat(parts) for parts in zip(*found, strict=True))
    data = HeteroData()
    data['customer'].num_nodes, data['product'].num_nodes = args.customers, args.products
    data['review'].x, data['review'].time = rating.view(-1, 1), time
    review = torch.arange(time.numel())
    ends = {'customer': customer, 'product': product, 'review': review}
    for src, name, dst in EDGES:
        data[src, name, dst].edge_index = torch.stack([ends[src], ends[dst]])
    return data


class Questions(NamedTuple):
    """Customers with a day each, and whether they write a review soon after it."""

    customer: Tensor
    day: Tensor
    label: Tensor


def ask(
    data: HeteroData, count: int, days: tuple[int, int], generator: torch.Generator
) -> Questions:
    """Questions about random customers and days."""
    customer = torch.randint(data['customer'].num_nodes, (count,), generator=generator)
    day = torch.randint(*days, (count,), generator=generator)
    by = data['review', 'by', 'customer'].edge_index[1]
    # The first review after the day, in the list of all by customer and day.
    known = (by * 2 * DAYS + data['review'].time).sort().values
    key = customer * 2 * DAYS + day
    place = torch.searchsorted(known, key, right=True).clamp(max=known.numel() - 1)
    return Questions(customer, day, ((known[place] - key) <= WINDOW) & (known[place] > key))


class Model(nn.Module):
    """Two layers of GraphSAGE for each type of edges.

    Args:
        hidden: Size of each hidden sample.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.review = nn.Linear(3, hidden)
        self.static = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(hidden)) for name in ('customer', 'product')})
        self.convs = nn.ModuleList(
            HeteroConv({kind: SAGEConv(hidden, hidden) for kind in EDGES}, 'sum') for _ in range(2))
        self.last = nn.Linear(hidden, 1)

    def forward(self, batch: HeteroData) -> Tensor:
        """The logits of the questions of a batch."""
        review = batch['review']
        if 'seed_time' in batch['customer']:
            age = batch['customer'].seed_time[review.batch] - review.time
        else:
            age = torch.zeros_like(review.time)
        age = age.view(-1, 1).float() / WINDOW
        x = {name: row.expand(batch[name].num_nodes, -1) for name, row in self.static.items()}
        x['review'] = self.review(torch.cat([review.x, age, (-age).exp()], -1)).relu()
        for conv in self.convs:
            x = {name: each.relu() for name, each in conv(x, batch.edge_index_dict).items()}
        return self.last(x['customer'][:batch['customer'].batch_size]).squeeze(-1)


def loaders(data: HeteroData, args: argparse.Namespace) -> dict[str, tuple[Any, dict[str, Any]]]:
    """The loaders to compare, with their options."""
    times = {'time_attr': 'time', 'temporal_strategy': 'last'}
    ours = {'seed': args.seed, 'device': args.device}
    found = {'pyg_fast': (FastNeighborLoader, times | ours),
             'pyg_fast, no times': (FastNeighborLoader, ours)}
    if torch_geometric.typing.WITH_PYG_LIB:
        found = {'PyG': (NeighborLoader, times), **found}
    return found


def batches(
    loader: tuple[Any, dict[str, Any]], data: HeteroData, questions: Questions,
    args: argparse.Namespace, shuffle: bool = False,
) -> Iterable[HeteroData]:
    """A loader of questions."""
    cls, options = loader
    time = {'input_time': questions.day} if 'time_attr' in options else {}
    return cls(
        data, num_neighbors=[args.neighbors] * 2, input_nodes=('customer', questions.customer),
        batch_size=args.batch_size, shuffle=shuffle, **time, **options)


class Outcome(NamedTuple):
    """What a loader led to; the time of an epoch in ms."""

    train: float
    test: float
    epoch: float


def scores(
    model: Model, of: Iterable[HeteroData], questions: Questions, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of all batches."""
    labels = questions.label.float().to(device)
    for batch in of:
        batch = batch.to(device)
        yield model(batch), labels[batch['customer'].input_id]


def train(
    loader: tuple[Any, dict[str, Any]], tests: tuple[Any, dict[str, Any]], data: HeteroData,
    parts: tuple[Questions, Questions], args: argparse.Namespace, name: str,
) -> Outcome:
    """Trains on the batches of a loader; tests on those with times."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = Model(args.hidden).to(device)
    if name != 'PyG':
        pyg_fast.accelerate(model)
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    of_train, of_test = (
        batches(loader, data, parts[0], args, shuffle=True), batches(tests, data, parts[1], args))
    seconds, found = [], []
    for _ in tqdm(range(args.epochs), name, unit='epoch'):
        start, found = now(device), []
        for logits, label in scores(model, of_train, parts[0], device):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(logits, label).backward()
            optimizer.step()
            found.append((logits.detach(), label))
        seconds.append(now(device) - start)
    with torch.no_grad():
        later = list(scores(model.eval(), of_test, parts[1], device))
    reached = (auc(*(torch.cat(each) for each in zip(*part, strict=True)))
               for part in (found, later))
    return Outcome(*reached, 1e3 * statistics.median(seconds))


def compare(args: argparse.Namespace) -> str:
    """Trains on the batches of all loaders; returns the table."""
    generator = torch.Generator().manual_seed(args.seed)
    data = draw_database(args, generator)
    parts = (ask(data, args.questions, TRAIN, generator),
             ask(data, args.questions // 4, TEST, generator))
    every = loaders(data, args)
    rows = [['', 'train AUC', 'test AUC', 'epoch [ms]']]
    for name, loader in every.items():
        out = train(loader, every['pyg_fast'], data, parts, args, name)
        rows.append([name, f'{out.train:.3f}', f'{out.test:.3f}', f'{out.epoch:.0f}'])
    about = f'{data["review"].num_nodes:,} reviews, {parts[0].label.float().mean():.0%} come back'
    return f'{about}\n\n{columns(rows)}'


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    counts = {'customers': 2000, 'products': 200, 'questions': 8000, 'epochs': 5, 'neighbors': 10,
              'batch-size': 512, 'hidden': 64}
    for name, default in counts.items():
        least = 40 if name == 'questions' else 1
        add(f'--{name}', type=at_least(least, int), default=default, help=f'(default: {default})')
    add('--lr', type=at_least(0, float), default=0.005, help='(default: 0.005)')
    add('--seed', type=at_least(0, int), default=0, help='(default: 0)')
    add('--device', choices=('auto', 'cpu', 'cuda'), default='auto', help='(default: auto)')
    args = parser.parse_args(argv)
    choose_device(parser, args)
    return args


def main(argv: list[str] | None = None) -> None:
    """Runs the example."""
    args = parse(argv)
    print(f'{args.customers} customers, {args.products} products ({args.device}): '
          f'{args.questions} questions, {args.epochs} epochs', flush=True)
    print(compare(args))


if __name__ == '__main__':
    main()
