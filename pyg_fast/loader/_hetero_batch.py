"""Makes a batch with several types of a sampled subgraph."""

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.data.storage import BaseStorage

from ..graph._cache import Cache, Made, Promise, SampledHops
from ..graph.csr import perm_name
from ..graph.graph import keep_block
from ._batch import Attributes, Edges, build_edge_index, set_matrix
from ._hetero_subgraph import EdgeType, HeteroSubgraph, dict_of
from ._pipeline import LateRead, PendingBatch, put
from ._typed_structure import TypedStructure


def build_hetero_batch(
    data: HeteroData, graph: TypedStructure, part: HeteroSubgraph,
    attributes: Mapping[Any, Attributes], write_seeds: Callable[[Any, tuple], None],
) -> PendingBatch:  # fmt: skip
    """The batch: a copy of `data` with the sampled nodes and edges of each type."""
    out = _copy_of(data)
    stores: dict[Any, BaseStorage] = {**out._node_store_dict, **out._edge_store_dict}
    tensors: list[Tensor] = part.tensors()
    late: list[LateRead] = []
    for key, values in attributes.items():
        store = stores[key]
        for parts in (values.nodes, values.edges):
            for name, value in parts.items():
                put(store, name, value)
        late += [LateRead(each.read, each.tensors, store) for each in values.late]
        tensors += values.tensors()
    for node_type, n_id in dict_of(part.n_id).items():
        held = stores[node_type]._mapping
        if 'num_nodes' in held:
            held['num_nodes'] = n_id.numel()
        held.setdefault('n_id', n_id)
    kept = _Kept(part, graph.loop_free)
    edges_of, e_ids, pointers = dict_of(part.edge_index), dict_of(part.e_id), dict_of(part.indptr)
    promise, sizes = Promise(edges_of, kept.fill), [*kept.sizes.values()]
    size_of = {ends: (sizes[ends[0]], sizes[ends[1]]) for ends in graph.pairs}
    # What takes a microsecond for each type takes much of the time of a batch with many types.
    for (edge_type, edge_index), ends in zip(edges_of.items(), graph.graph.types.ends, strict=True):
        store, e_id, indptr = stores[edge_type], e_ids[edge_type], pointers.get(edge_type)
        held = store._mapping
        if (perm := perm_name(store)) is not None:
            held.pop(perm, None)  # It would be read for each batch: `e_id` tells the same.
        if graph.layout[edge_type] == 'edge_index':
            held['edge_index'] = build_edge_index(edge_index, indptr, size_of[ends], promise)
        else:
            edges = Edges(edge_index, e_id, size_of[ends], indptr)
            new, read = set_matrix(store, data[edge_type], edges)
            tensors += new
            late += read
        if e_id is not None:
            held.setdefault('e_id', e_id)
    for name in ('batch', 'num_sampled_nodes', 'num_sampled_edges'):
        for key, value in dict_of(getattr(part, name)).items():
            put(stores[key] if key in stores else out[key], name, value)
    write_seeds(out, part.metadata)
    return PendingBatch(out, tensors, late)


def _copy_of(data: HeteroData) -> HeteroData:
    """As :func:`copy.copy`, which takes several times as long for each type."""
    if type(data).__copy__ is not HeteroData.__copy__:
        return copy.copy(data)
    out = object.__new__(type(data))
    parent = weakref.ref(out)

    def copied(store: BaseStorage) -> BaseStorage:
        new = object.__new__(type(store))
        own = store.__dict__.copy()
        own['_mapping'], own['_parent'] = own['_mapping'].copy(), parent
        own.pop('_cached_attr', None)
        object.__setattr__(new, '__dict__', own)
        return new

    own = out.__dict__
    own.update(data.__dict__)
    own['_global_store'] = copied(data._global_store)
    for name in ('_node_store_dict', '_edge_store_dict'):
        own[name] = {key: copied(store) for key, store in own[name].items()}
    return out


class _Kept:
    """What kernels read of the edges of a batch. No reference leads back to it: memory is freed
    with the batch."""

    def __init__(self, part: HeteroSubgraph, loop_free: Mapping[Any, bool]) -> None:
        self._rowptr, self._col, self._hops = part.rowptr, part.col, part.hops
        self._longest_row, self._loop_free = part.longest_row, loop_free
        n_ids = dict_of(part.n_id)
        self.sizes = {key: n_id.numel() for key, n_id in n_ids.items()}
        self._made = Made.here(next(iter(n_ids.values())))

    def fill(self, cache: Cache, key: EdgeType) -> None:
        """Fills the cache of the edges of a type."""
        hops = None
        if self._hops is not None:
            nodes, edges = self._hops
            by_hop = edges[key], nodes[key[0]], nodes[key[2]]
            hops = SampledHops(*(tuple(map(int, counts)) for counts in by_hop))
        keep_block(
            cache, self._rowptr[key], self._col[key], hops, self._loop_free[key],
            self._longest_row[key], self.sizes[key[0]], self._made,
        )  # fmt: skip
