"""Samples the subgraph of a batch around its seeds."""

from torch import Tensor
from torch_geometric.sampler.base import SubgraphType

from ..graph._cache import SampledHops
from ..ops.neighbor_sample import sample_subgraph
from ..ops.node_map import NodeMap
from ..ops.typed_sample import Rules
from ._drop import drop_edges
from ._hetero_subgraph import HeteroSubgraph
from ._options import SamplingOptions
from ._seeds import SeedBatch
from ._structure import Structure
from ._subgraph import Subgraph
from ._typed_sample import sample_typed_batch
from ._typed_structure import TypedStructure
from ._walks import sample_walks


def sample_batch(
    graph: Structure | TypedStructure, options: SamplingOptions, rules: Rules | None,
    seeds: SeedBatch, seed: int, node_map: NodeMap,
) -> Subgraph | HeteroSubgraph:  # fmt: skip
    """Samples around the seeds of a batch and relabels its nodes; `rules` are those of a graph with
    types."""
    out: Subgraph | HeteroSubgraph
    if isinstance(graph, TypedStructure):
        assert rules is not None
        out = sample_typed_batch(graph, options, rules, seeds, seed, node_map)
    elif options.walks is not None:
        out = sample_walks(graph, seeds, options.fanouts, options.walks, seed, node_map)
    else:
        out = _sample_neighbors(graph, options, seeds, seed, node_map)
    if seeds.batch is not None:
        out = out.with_batch(seeds.batch)
    if seeds.dropped is not None:
        out = drop_edges(out, seeds.dropped)
    if options.subgraph_type == SubgraphType.bidirectional:
        out = out.to_bidirectional()
    return out if options.transform is None else out.apply(options.transform)


def _sample_neighbors(
    graph: Structure, options: SamplingOptions, seeds: SeedBatch, seed: int, node_map: NodeMap
) -> Subgraph:
    assert isinstance(seeds.nodes, Tensor)
    fanouts, is_induced = options.fanouts, options.subgraph_type == SubgraphType.induced
    out = sample_subgraph(
        graph.rowptr, graph.col, graph.perm, graph.weight, seeds.nodes, fanouts,
        options.replace, is_induced, seed, node_map, seeds.num_nodes,
    )  # fmt: skip
    nodes, edges = out.num_sampled_nodes, out.num_sampled_edges
    return Subgraph(
        out.n_id, out.edge_index, out.rowptr, out.col, out.e_id,
        None if edges is None else nodes, edges, seeds.metadata,
        None if edges is None else SampledHops(edges, nodes, nodes),
        longest_row=None if is_induced or min(fanouts) < 0 else max(fanouts),
    )  # fmt: skip
