"""Mini-batches whose neighbours are the nodes that random walks visit most often."""

import torch
from torch import Tensor
from torch_geometric.index import index2ptr

from ..graph._cache import SampledHops
from ..ops.neighbor_sample import relabel_ids
from ..ops.node_map import NodeMap
from ..ops.random_walk import pinsage_neighbors
from ._options import Walks
from ._seeds import SeedBatch, mix_seeds
from ._structure import Structure
from ._subgraph import Subgraph


def sample_walks(
    graph: Structure, seeds: SeedBatch, fanouts: tuple[int, ...], walks: Walks, seed: int,
    node_map: NodeMap,
) -> Subgraph:  # fmt: skip
    """Each hop adds the most visited nodes around the new nodes of the previous hop; the weight of
    an edge is its share of the node's visits."""
    assert isinstance(seeds.nodes, Tensor)
    distinct, place = relabel_ids(seeds.nodes, node_map)
    num_seeds, num_distinct = place.numel(), distinct.numel()
    first = _first_positions(place, num_distinct)
    frontier, start = seeds.nodes, 0
    sources, targets, weights = [], [], []
    num_nodes, num_edges = [num_seeds], []
    for hop, fanout in enumerate(fanouts):
        neighbor, target, weight = _most_visited(
            graph, frontier, fanout, walks, mix_seeds(seed, hop)
        )
        before = distinct.numel()
        distinct, local = relabel_ids(torch.cat([distinct, neighbor]), node_map)
        sources.append(_positions_of(local[before:], first, num_seeds))
        targets.append(target + start)
        weights.append(weight)
        start += frontier.numel()
        frontier = distinct[before:]
        num_nodes.append(frontier.numel())
        num_edges.append(neighbor.numel())

    n_id = torch.cat([seeds.nodes, distinct[num_distinct:]])
    edge_index = torch.stack([torch.cat(sources), torch.cat(targets)])
    rowptr = index2ptr(edge_index[1], n_id.numel()).int()
    return Subgraph(
        n_id, edge_index, rowptr, edge_index[0].int(), None, num_nodes, num_edges,
        seeds.metadata, SampledHops(num_edges, num_nodes, num_nodes), torch.cat(weights),
    )  # fmt: skip


def _most_visited(
    graph: Structure, nodes: Tensor, fanout: int, walks: Walks, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The neighbours of nodes: source, position in `nodes` and share of the visits of each edge."""
    neighbor, visits = pinsage_neighbors(
        graph.rowptr, graph.col, nodes, fanout, num_walks=walks.num_walks,
        walk_length=walks.walk_length, restart=walks.restart, seed=seed,
    )  # fmt: skip
    is_edge = neighbor >= 0
    share = visits / visits.sum(1, keepdim=True)
    target = torch.arange(nodes.numel(), device=nodes.device)
    return neighbor[is_edge], target.repeat_interleave(is_edge.sum(1)), share[is_edge].float()


def _first_positions(place: Tensor, num_distinct: int) -> Tensor:
    """The first seed that is each of the distinct nodes."""
    first = place.new_full((num_distinct,), place.numel())
    position = torch.arange(place.numel(), device=place.device)
    return first.scatter_reduce_(0, place, position, 'amin')


def _positions_of(local: Tensor, first: Tensor, num_seeds: int) -> Tensor:
    """The positions in a batch of ids among its distinct nodes. Repeated seeds have separate
    positions; edges use the first one."""
    num_distinct = first.numel()
    position = local + (num_seeds - num_distinct)
    if num_distinct < num_seeds:
        is_seed = local < num_distinct
        position = torch.where(is_seed, first[local.clamp(max=num_distinct - 1)], position)
    return position
