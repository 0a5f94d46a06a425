"""Samples the subgraph of a batch with types, times or a subgraph for each seed."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from ..graph._cache import SampledHops
from ..ops.node_map import NodeMap
from ..ops.typed_sample import Rules, TypedSeeds, TypedSubgraph, sample_typed
from ._hetero_subgraph import HeteroSubgraph, PartsByType
from ._options import SamplingOptions
from ._seeds import SeedBatch
from ._structure import Structure
from ._subgraph import Subgraph
from ._typed_structure import TypedStructure

_MOST_KEYS = 2**62  # of nodes with the number of a subgraph


def rules_of(options: SamplingOptions, device: torch.device) -> Rules:
    """Which edges are drawn."""
    fanouts = options.by_type or tuple((fanout,) for fanout in options.fanouts)
    return Rules.of(
        fanouts, device, options.replace, options.temporal_strategy == 'last', options.max_age
    )


def typed_map(graph: TypedStructure, options: SamplingOptions, device: torch.device) -> NodeMap:
    """A map for the batches: of all nodes, or hashed where each seed has a subgraph, since nodes
    are in several of them."""
    if options.has_roots:
        return NodeMap(_MOST_KEYS, device, hashed=True)
    return NodeMap(graph.num_nodes, device)


def sample_typed_batch(
    graph: TypedStructure, options: SamplingOptions, rules: Rules, seeds: SeedBatch, seed: int,
    node_map: NodeMap,
) -> Subgraph | HeteroSubgraph:  # fmt: skip
    """Samples around the seeds of a batch and numbers its nodes."""
    is_induced = options.subgraph_type == SubgraphType.induced
    out = sample_typed(
        graph.graph, _typed_seeds(graph, seeds, options.has_roots), rules, seed, node_map,
        is_induced,
    )  # fmt: skip
    longest = (None,) * len(rules.longest) if is_induced else rules.longest
    if graph.node_types == (None,):
        return _to_subgraph(out, seeds, longest[0])
    return _to_hetero_subgraph(out, graph, seeds, longest)


def _typed_seeds(graph: TypedStructure, seeds: SeedBatch, has_roots: bool) -> TypedSeeds:
    """The seeds, type by type as the graph has them."""
    if isinstance(seeds.nodes, TypedSeeds):
        return seeds.nodes
    nodes = seeds.nodes if isinstance(seeds.nodes, dict) else {None: seeds.nodes}
    first_root, count = {}, 0
    for key, ids in nodes.items():
        first_root[key] = count
        count += ids.numel()
    order = [key for key in graph.node_types if key in nodes]
    parts = [nodes[key] + graph.first_node(key) for key in order]  # type: ignore[index]
    sizes = [nodes[key].numel() if key in nodes else 0 for key in graph.node_types]  # type: ignore[index]
    root = time = None
    if has_roots:
        device = parts[0].device
        roots = torch.arange(count, dtype=torch.int32, device=device)
        root = _joined([
            roots[first_root[key] : first_root[key] + nodes[key].numel()]  # type: ignore[index]
            for key in order
        ])  # fmt: skip
        if isinstance(seeds.time, dict):
            time = _joined([seeds.time[key] for key in nodes])  # type: ignore[index]
        else:
            time = seeds.time
    return TypedSeeds(_joined(parts), tuple(sizes), root, time)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _to_subgraph(out: TypedSubgraph, seeds: SeedBatch, longest_row: int | None) -> Subgraph:
    edges = None if out.num_sampled_edges is None else out.num_sampled_edges[0]
    nodes = out.num_sampled_nodes[0]
    return Subgraph(
        out.n_id[0], out.edge_index[0], out.rowptr[0], out.col[0], out.e_id[0],
        None if edges is None else nodes, edges, seeds.metadata,
        None if edges is None else SampledHops(edges, nodes, nodes),
        batch=None if out.batch is None else out.batch[0], longest_row=longest_row,
    )  # fmt: skip


def _to_hetero_subgraph(
    out: TypedSubgraph, graph: TypedStructure, seeds: SeedBatch,
    longest: tuple[int | None, ...],
) -> HeteroSubgraph:  # fmt: skip
    def by_node_type(values: Any) -> PartsByType[Any, Any]:
        return PartsByType(graph.node_number, values)

    def by_edge_type(values: Any) -> PartsByType[Any, Any]:
        return PartsByType(graph.edge_number, values)

    nodes, edges, hops = out.num_sampled_nodes, out.num_sampled_edges, out.hops
    return HeteroSubgraph(
        by_node_type(out.n_id), by_edge_type(out.edge_index), by_edge_type(out.rowptr),
        by_edge_type(out.indptr), by_edge_type(out.col), by_edge_type(out.e_id),
        None if edges is None else by_node_type(nodes),
        None if edges is None else by_edge_type(edges), seeds.metadata,
        None if hops is None else (by_node_type(hops[0]), by_edge_type(hops[1])),
        by_edge_type(longest),
        None if out.batch is None else by_node_type(out.batch), out.wholes,
    )  # fmt: skip


def numbered_nodes(graph: Structure | TypedStructure, part: Subgraph | HeteroSubgraph) -> Tensor:
    """The nodes of a batch in the numbering of all types."""
    if isinstance(part, Subgraph):
        return part.n_id
    assert isinstance(graph, TypedStructure)
    return torch.cat([n_id + graph.first_node(key) for key, n_id in part.n_id.items()])
