"""Rivals of the loader: other samplers, PyG's loaders, and one made of torch ops."""
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.sampler import NeighborSampler, NodeSamplerInput

from pyg_fast import ops
from pyg_fast.loader._order import greedy_order

from ._graphs import Graph
from ._harness import exact

CLASSES = 47
# Of the nodes, for training: the shares of ogbn-products, Reddit and ogbn-arxiv.
TRAIN_SHARE = {'products-like': 0.08, 'reddit-like': 0.66, 'arxiv-like': 0.54}


class Sampled(NamedTuple):
    """A mini-batch without its features."""

    n_id: Tensor
    edge_index: Tensor


class Inputs:
    """A graph with random features and labels in host memory, and its training nodes, at most
    ``num_nodes``. Batches are wanted on the device of the graph.
    """

    def __init__(self, graph: Graph, width: int, num_nodes: int | None = None) -> None:
        self.graph, self.width = graph, width
        self.device = graph.col.device
        generator = torch.Generator().manual_seed(1)
        count = int(TRAIN_SHARE.get(graph.name.split(' ')[0], 0.5) * graph.num_nodes)
        self.nodes = torch.randperm(graph.num_nodes, generator=generator)[:max(count, 1)]
        if num_nodes is not None:
            self.nodes = self.nodes[:num_nodes]
        self.y = torch.randint(CLASSES, (graph.num_nodes,), generator=generator)
        drawn = graph.normal()(graph.num_nodes, width)
        # Pinned once, not by every loader.
        self.x = torch.empty(drawn.shape, pin_memory=drawn.is_cuda).copy_(drawn)

    @functools.cached_property
    def data(self) -> Data:
        """For PyG's loaders, which move it into shared memory."""
        return self._data(self.x.clone(), self.y.clone(), self.graph.on_host)

    @functools.cached_property
    def prepared(self) -> Data:
        """For ours."""
        return self._data(self.x, self.y, self.graph.prepared_on_host)

    def _data(self, x: Tensor, y: Tensor, edge_index: Tensor) -> Data:
        return Data(x=x, y=y, edge_index=edge_index, num_nodes=self.graph.num_nodes)

    def seeds(self, batch_size: int, count: int, device: torch.device) -> list[Tensor]:
        """That many batches of distinct nodes."""
        generator = torch.Generator().manual_seed(2)
        batch_size = min(batch_size, self.nodes.numel())
        return [
            self.nodes[torch.randperm(self.nodes.numel(), generator=generator)[:batch_size]].to(
                device) for _ in range(count)]

    def num_batches(self, batch_size: int) -> int:
        return -(-self.nodes.numel() // batch_size)


# Samplers ---------------------------------------------------------------------------------------

def pyg_backend(left_out: dict[str, str], what: str) -> str | None:
    """The package that PyG samples with; if it has neither, ``what`` is left out."""
    for package in ('pyg_lib', 'torch_sparse'):
        if importlib.util.find_spec(package):
            return package.replace('_', '-')
    left_out[what] = (
        'PyG samples neighbours with pyg-lib or torch-sparse, and neither is installed')
    return None


def pyg_sampler(inputs: Inputs, num_neighbors: Sequence[int]) -> Callable[[Tensor], Sampled]:
    sampler = NeighborSampler(inputs.data, list(num_neighbors), is_sorted=True)

    def sample(seeds: Tensor) -> Sampled:
        out = sampler.sample_from_nodes(NodeSamplerInput(None, seeds))
        return Sampled(out.node, torch.stack([out.row, out.col]))

    return sample


def torch_relabel(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct ids in order of first occurrence, and the place of each id among them."""
    unique, inverse = ids.unique(return_inverse=True)
    place = torch.arange(ids.numel(), device=ids.device)
    first = torch.full_like(unique, ids.numel()).scatter_reduce_(0, inverse, place, 'amin')
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=ids.device)
    return unique[order], rank[inverse]


def torch_sample(
    rowptr: Tensor, col: Tensor, seeds: Tensor, num_neighbors: Sequence[int],
) -> Sampled:
    """Sampling put together from torch ops, the map by :func:`torch.unique`.

    Of a node with more neighbours than wanted it draws *with* replacement, which takes less.
    """
    n_id, edges, begin = seeds, [], 0
    for count in num_neighbors:
        frontier = n_id[begin:]
        first = rowptr[frontier].long()
        degree = rowptr[frontier + 1].long() - first
        taken = degree.clamp(max=count)
        row = torch.arange(frontier.numel(), device=seeds.device).repeat_interleave(taken)
        place = torch.arange(row.numel(), device=seeds.device) - (taken.cumsum(0) - taken)[row]
        drawn = (torch.rand(row.numel(), device=seeds.device) * degree[row]).long()
        offset = torch.where(degree[row] > count, drawn, place)
        neighbor = col[first[row] + offset].long()
        found, local = torch_relabel(torch.cat([n_id, neighbor]))
        edges.append(torch.stack([local[n_id.numel():], row + begin]))
        begin, n_id = n_id.numel(), found
    return Sampled(n_id, torch.cat(edges, 1))


def sample_error(graph: Graph, seeds: Tensor, num_neighbors: Sequence[int], sub: Any) -> float:
    """Zero if our sample of distinct seeds is right: existing edges, none of them twice."""
    n_id, device = sub.n_id, graph.col.device
    src, dst = n_id[sub.edge_index]
    e_id, local = sub.e_id, sub.edge_index[1]
    hops = torch.tensor(sub.num_sampled_nodes, device=device)
    begin, end = graph.rowptr[dst], graph.rowptr[dst + 1]
    wanted = torch.tensor([*num_neighbors, 0], device=device).repeat_interleave(hops)
    degree = graph.degree[n_id]
    number = local.bincount(minlength=n_id.numel())
    return exact(all([
        bool((n_id[:seeds.numel()] == seeds).all()),
        n_id.unique().numel() == n_id.numel() == int(hops.sum()),
        bool((graph.col[e_id] == src).all()),
        bool(((begin <= e_id) & (e_id < end)).all()),
        e_id.unique().numel() == e_id.numel(),
        bool((number == torch.minimum(wanted, degree)).all()),
        bool((sub.rowptr.diff() == number).all()),
        bool((sub.col == sub.edge_index[0]).all() and (local.diff() >= 0).all()),
    ]))


# Loaders ----------------------------------------------------------------------------------------

class Workers:
    """A loader of PyG's, whose workers end when the last reference to it is gone.

    Otherwise the loader is part of a reference cycle. When Python collects the cycle, it closes
    the queues of the workers before it stops them, and waits five seconds for each.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def __del__(self) -> None:
        self._loader._iterator = None


@dataclasses.dataclass
class Plain:
    """A loader of torch ops: samples one batch after another, gathers features on the CPU.
    ``window``: batches to sample ahead, put into order and matched with the one before.
    """

    inputs: Inputs
    batch_size: int
    sample: Callable[[Tensor], Sampled]
    window: int = 0

    def __iter__(self) -> Iterator[Data]:
        nodes = self.inputs.nodes
        shuffled = nodes[torch.randperm(nodes.numel())].to(self.inputs.device)
        batches = shuffled.split(self.batch_size)
        previous: tuple[Tensor, Tensor] | None = None
        for first in range(0, len(batches), max(self.window, 1)):
            window = [(seeds, self.sample(seeds))
                      for seeds in batches[first:first + max(self.window, 1)]]
            for seeds, sub in self._ordered(window):
                x = self._features(sub.n_id, previous)
                previous = (sub.n_id, x) if self.window else None
                y = self.inputs.y[seeds.cpu()].to(self.inputs.device)
                yield Data(x=x, y=y, edge_index=sub.edge_index, n_id=sub.n_id,
                           batch_size=seeds.numel())

    def _ordered(self, window: list[tuple[Tensor, Sampled]]) -> list[tuple[Tensor, Sampled]]:
        if len(window) < 3:
            return window
        degree = ops.match_degree([sub.n_id for _, sub in window], self.inputs.graph.num_nodes)
        return [window[i] for i in greedy_order(degree)]

    def _features(self, n_id: Tensor, previous: tuple[Tensor, Tensor] | None) -> Tensor:
        source, device = self.inputs.x, self.inputs.device
        if previous is None:
            return source[n_id.cpu()].to(device)
        old_id, old_x = previous
        found = ops.match(n_id, old_id, self.inputs.graph.num_nodes)
        kept = found >= 0
        x = old_x.new_empty(n_id.numel(), old_x.size(1))
        x[kept] = old_x[found[kept]]
        x[~kept] = source[n_id[~kept].cpu()].to(device)
        return x
