"""Mini-batches whose neighbours are the nodes that random walks visit most often."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.index import index2ptr

from ..ops.neighbor_sample import relabel_ids
from ..ops.node_map import NodeMap
from ..ops.random_walk import pinsage_neighbors
from ._batch import Subgraph
from ._seeds import mixed
from ._structure import Structure


class Walks(NamedTuple):
    """Parameters of the walks."""

    num_walks: int
    walk_length: int
    restart: float


def walk_subgraph(
    structure: Structure,
    seeds: Tensor,
    fanouts: tuple[int, ...],
    walks: Walks,
    seed: int,
    input_id: Tensor,
    node_map: NodeMap,
) -> Subgraph:
    """Each hop adds the most visited nodes around the new nodes of the previous hop; the weight of
    an edge is its share of the node's visits."""
    distinct, place = relabel_ids(seeds, node_map)
    num_seeds, num_distinct = seeds.numel(), distinct.numel()
    first = torch.full_like(distinct, num_seeds)
    position = torch.arange(num_seeds, device=seeds.device)
    first.scatter_reduce_(0, place, position, 'amin')

    frontier, start = seeds, 0
    sources, targets, weights = [], [], []
    num_nodes, num_edges = [num_seeds], []
    for hop, fanout in enumerate(fanouts):
        neighbor, visits = pinsage_neighbors(
            structure.rowptr, structure.col, frontier, fanout, num_walks=walks.num_walks,
            walk_length=walks.walk_length, restart=walks.restart, seed=mixed(seed, hop),
        )  # fmt: skip
        found = neighbor >= 0
        share = visits / visits.sum(1, keepdim=True)
        target = torch.arange(start, start + frontier.numel(), device=seeds.device)
        targets.append(target.repeat_interleave(found.sum(1)))
        weights.append(share[found].float())
        before = distinct.numel()
        distinct, local = relabel_ids(torch.cat([distinct, neighbor[found]]), node_map)
        local = local[before:]
        # Repeated seeds have separate positions; edges use the first one.
        moved = local + (num_seeds - num_distinct)
        if num_distinct < num_seeds:
            moved = torch.where(
                local < num_distinct, first[local.clamp(max=num_distinct - 1)], moved
            )
        sources.append(moved)
        start += frontier.numel()
        frontier = distinct[before:]
        num_nodes.append(frontier.numel())
        num_edges.append(moved.numel())

    n_id = torch.cat([seeds, distinct[num_distinct:]])
    edge_index = torch.stack([torch.cat(sources), torch.cat(targets)])
    rowptr = index2ptr(edge_index[1], n_id.numel()).int()
    return Subgraph(
        n_id, edge_index, rowptr, edge_index[0].int(), None, num_nodes, num_edges, input_id,
        (tuple(num_nodes), tuple(num_edges)), torch.cat(weights),
    )  # fmt: skip
