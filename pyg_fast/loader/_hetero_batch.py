"""Makes a batch with several types of a sampled subgraph."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch_geometric.data import HeteroData

from ..graph._cache import Made, SampledHops
from ..graph.csr import perm_name
from ._batch import Attributes, Edges, put, set_edges
from ._hetero_subgraph import EdgeType, HeteroSubgraph
from ._pipeline import LateRead, PendingBatch
from ._typed_structure import TypedStructure


def build_hetero_batch(
    data: HeteroData, graph: TypedStructure, part: HeteroSubgraph,
    attributes: Mapping[Any, Attributes], write_seeds: Callable[[Any, tuple], None],
) -> PendingBatch:  # fmt: skip
    """The batch: a copy of `data` with the sampled nodes and edges of each type."""
    out = copy.copy(data)
    stores, given = ({store._key: store for store in d.stores[1:]} for d in (out, data))
    tensors: list[Tensor] = part.tensors()
    late: list[LateRead] = []
    for key, values in attributes.items():
        store = stores[key]
        if (name := perm_name(store)) is not None:
            store.pop(name, None)  # It would be read for each batch: `e_id` tells the same.
        for parts in (values.nodes, values.edges):
            for name, value in parts.items():
                put(store, name, value)
        late += [read._replace(key=key) for read in values.late]
        tensors += values.tensors()
    for node_type, n_id in part.n_id.items():
        store = stores[node_type]
        if 'num_nodes' in given[node_type]:
            put(store, 'num_nodes', n_id.numel())
        if 'n_id' not in store:
            put(store, 'n_id', n_id)
    some = next(iter(part.n_id.values()))
    made = Made(some.device) if some.is_cuda else None
    for edge_type in graph.edge_types:
        assert edge_type is not None
        store, e_id = stores[edge_type], part.e_id[edge_type]
        is_sparse = graph.layout[edge_type] != 'edge_index'
        new, read = set_edges(
            store, given[edge_type] if is_sparse else None, _edges_of(part, edge_type, made),
            graph.loop_free[edge_type], edge_type,
        )  # fmt: skip
        tensors += new
        late += [] if read is None else [read]
        if e_id is not None and 'e_id' not in store:
            put(store, 'e_id', e_id)
    for name in ('batch', 'num_sampled_nodes', 'num_sampled_edges'):
        for key, value in (getattr(part, name) or {}).items():
            put(stores[key] if key in stores else out[key], name, value)
    write_seeds(out, part.metadata)
    return PendingBatch(out, tensors, late)


def _edges_of(part: HeteroSubgraph, key: EdgeType, made: Made | None) -> Edges:
    hops = None
    if part.is_by_hop and part.num_sampled_nodes is not None and part.num_sampled_edges is not None:
        nodes = part.num_sampled_nodes
        hops = SampledHops(part.num_sampled_edges[key], nodes[key[0]], nodes[key[2]])
    indptr = None if part.indptr is None else part.indptr[key]
    return Edges(
        part.edge_index[key], part.rowptr.get(key), part.col.get(key), part.e_id[key],
        part.n_id[key[0]].numel(), part.n_id[key[2]].numel(), hops, part.longest_row[key],
        indptr, made,
    )  # fmt: skip
