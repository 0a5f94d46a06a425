"""Sampling of graphs with types in plain Python: what pyg-lib's sampler does, and which edges ours
draws."""

from typing import Any, NamedTuple

import numpy as np
import torch
from _raw_ops import draw_edges, sampling_weight
from _raw_ops import typed_sample as typed
from torch import Tensor

from pyg_fast.ops import NodeMap

# The number of a subgraph changes its random numbers.
_ROOT = 0xA0761D6478BD642F


class Graph(NamedTuple):
    """Numbers of nodes by type; by edge type its ends, edges, and times and weights or None."""

    num_nodes: list[int]
    ends: list[tuple[int, int]]
    edges: list[Tensor]
    time: list[Tensor | None]
    weight: list[Tensor | None]


class Seeds(NamedTuple):
    """Seeds by node type; the number of the subgraph of each, and the time of each subgraph."""

    nodes: list[list[int]]
    root: list[list[int]] | None = None
    time: list[int] | None = None


class Rule(NamedTuple):
    fanouts: list[list[int]]  # by hop and edge type
    replace: bool = False
    last: bool = False
    max_age: int | None = None


class Sampled(NamedTuple):
    """By node type the nodes and their roots; by edge type (source, destination, edge); counts."""

    nodes: list[list[tuple[int, int]]]
    edges: list[list[tuple[int, int, int]]]
    num_nodes: list[list[int]]
    num_edges: list[list[int]]


def sorted_edges(graph: Graph) -> list[Tensor]:
    """By edge type the positions of the edges by destination, then time, then position."""
    out = []
    for edges, time in zip(graph.edges, graph.time, strict=True):
        keys = [edges[1].numpy()] if time is None else [time.numpy(), edges[1].numpy()]
        out.append(torch.from_numpy(np.lexsort(keys)))
    return out


def running_weights(graph: Graph) -> list[list[float]]:
    """By edge type the sums of all weights before each edge, and those of all."""
    order = sorted_edges(graph)
    parts = [
        torch.zeros(len(o), dtype=torch.float64) if w is None else w.double()[o]
        for w, o in zip(graph.weight, order, strict=True)
    ]
    sums = [0.0, *torch.cat(parts).cumsum(0).tolist()]
    ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    return [sums[a : b + 1] for a, b in zip(ends, ends[1:], strict=False)]


def sample(graph: Graph, seeds: Seeds, rule: Rule, seed: int) -> Sampled:
    """Hop by hop, edge type by edge type, node by node; nodes in order of first occurrence."""
    order, sums = sorted_edges(graph), running_weights(graph)
    roots = seeds.root or [[0] * len(nodes) for nodes in seeds.nodes]
    nodes = [list(zip(r, n, strict=True)) for r, n in zip(roots, seeds.nodes, strict=True)]
    place = [{} for _ in nodes]
    for of_type, keys in zip(place, nodes, strict=True):
        for k, key in enumerate(keys):
            of_type.setdefault(key, k)
    edges: list[list[tuple[int, int, int]]] = [[] for _ in graph.ends]
    counts, num_edges = [[len(n)] for n in nodes], [[] for _ in graph.ends]
    first = [0] * len(nodes)
    first_row = np.cumsum([0, *(graph.num_nodes[dst] for _, dst in graph.ends)]).tolist()
    for fanouts in rule.fanouts:
        last = [len(n) for n in nodes]
        for t, (src, dst) in enumerate(graph.ends):
            done, dsts = len(edges[t]), graph.edges[t][1][order[t]]
            for k in range(first[dst], last[dst]):
                root, node = nodes[dst][k]
                row = (dsts == node).nonzero().view(-1).tolist()
                if graph.time[t] is not None and seeds.time is not None:
                    now, times = seeds.time[root], graph.time[t][order[t]].tolist()
                    row = [e for e in row if times[e] <= now]
                    if rule.max_age is not None:
                        row = [e for e in row if now - times[e] <= rule.max_age]
                    if rule.last and fanouts[t] >= 0:
                        row = row[max(0, len(row) - fanouts[t]) :]
                weight = running = None
                if graph.weight[t] is not None:
                    weight = graph.weight[t].double()[order[t]][row].tolist()
                    if rule.replace and row:
                        running = sums[t][row[0] : row[-1] + 2]
                number = seed if seeds.root is None else (seed + (root + 1) * _ROOT) % 2**64
                for j in draw_edges(
                    len(row), fanouts[t], weight, running, rule.replace, number,
                    first_row[t] + node,
                ):  # fmt: skip
                    e = int(order[t][row[j]])
                    key = root, int(graph.edges[t][0, e])
                    if key not in place[src]:
                        place[src][key] = len(nodes[src])
                        nodes[src].append(key)
                    edges[t].append((place[src][key], k, e))
            num_edges[t].append(len(edges[t]) - done)
        first = last
        for count, keys, before in zip(counts, nodes, last, strict=True):
            count.append(len(keys) - before)
    return Sampled(nodes, edges, counts, num_edges)


def typed_graph(graph: Graph, device: torch.device, replace: bool, index: torch.dtype) -> Any:
    """The graph as the sampler takes it."""
    order = sorted_edges(graph)
    longest = [int(e[1].bincount().max()) if e.numel() else 0 for e in graph.edges]
    types = typed.Types.of(
        graph.num_nodes, graph.ends, [e.size(1) for e in graph.edges], longest,
        [t is not None for t in graph.time], [w is not None for w in graph.weight], device,
    )  # fmt: skip
    degrees = [
        torch.bincount(e[1], minlength=graph.num_nodes[dst])
        for e, (_, dst) in zip(graph.edges, graph.ends, strict=True)
    ]
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.cat(degrees).cumsum(0)])
    col = torch.cat([
        e[0, o] + types.first_node[src]
        for e, o, (src, _) in zip(graph.edges, order, graph.ends, strict=True)
    ])  # fmt: skip

    def all_of(values: list[Tensor | None], dtype: torch.dtype) -> Tensor | None:
        if all(v is None for v in values):
            return None
        return torch.cat([
            torch.zeros(len(o), dtype=dtype) if v is None else v[o].to(dtype)
            for v, o in zip(values, order, strict=True)
        ])  # fmt: skip

    weight, time = all_of(graph.weight, torch.float64), all_of(graph.time, torch.int64)
    if weight is not None:
        weight = sampling_weight(weight, col, replace).to(device)
    return typed.TypedGraph(
        types, rowptr.to(device, index), col.to(device, torch.int32),
        torch.cat(order).to(device, index), weight, None if time is None else time.to(device),
    )  # fmt: skip


def typed_seeds(graph: Graph, seeds: Seeds, device: torch.device) -> Any:
    """The seeds as the sampler takes them."""
    first = np.cumsum([0, *graph.num_nodes]).tolist()
    nodes = [n + base for base, part in zip(first, seeds.nodes, strict=False) for n in part]
    root = None if seeds.root is None else sum(seeds.root, [])
    return typed.TypedSeeds(
        torch.tensor(nodes, dtype=torch.long, device=device), tuple(map(len, seeds.nodes)),
        None if root is None else torch.tensor(root, dtype=torch.int32, device=device),
        None if seeds.time is None else torch.tensor(seeds.time, dtype=torch.int64, device=device),
    )  # fmt: skip


def map_for(graph: Graph, seeds: Seeds, device: torch.device) -> Any:
    if seeds.root is None:
        return NodeMap(sum(graph.num_nodes), device)
    return NodeMap(2**62, device, hashed=True)


def check(out: Any, wanted: Sampled, has_roots: bool) -> None:
    """Compares a batch with that of :func:`sample`."""
    assert list(out.num_sampled_nodes) == wanted.num_nodes
    assert list(out.num_sampled_edges) == wanted.num_edges
    for t, keys in enumerate(wanted.nodes):
        assert out.n_id[t].tolist() == [node for _, node in keys]
        if has_roots:
            assert out.batch[t].tolist() == [root for root, _ in keys]
    assert has_roots == (out.batch is not None)
    for t, edges in enumerate(wanted.edges):
        src, dst, e_id = ([edge[k] for edge in edges] for k in range(3))
        assert out.edge_index[t].tolist() == [src, dst]
        assert out.col[t].tolist() == src
        assert out.e_id[t].tolist() == e_id
        degree = out.rowptr[t].diff().tolist()
        assert int(out.rowptr[t][0]) == 0
        assert torch.equal(out.indptr[t], out.rowptr[t].long())
        assert degree == np.bincount(dst, minlength=len(degree)).tolist()
