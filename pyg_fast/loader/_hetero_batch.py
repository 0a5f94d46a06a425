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
from ._batch import Attributes, Edges, set_edges
from ._hetero_subgraph import EdgeType, HeteroSubgraph
from ._pipeline import LateRead, PendingBatch, put
from ._typed_structure import TypedStructure


def build_hetero_batch(
    data: HeteroData, graph: TypedStructure, part: HeteroSubgraph,
    attributes: Mapping[Any, Attributes], write_seeds: Callable[[Any, tuple], None],
) -> PendingBatch:  # fmt: skip
    """The batch: a copy of `data` with the sampled nodes and edges of each type."""
    out = _copy_of(data)
    stores: dict[Any, BaseStorage] = {**dict(out.node_items()), **dict(out.edge_items())}
    tensors: list[Tensor] = part.tensors()
    late: list[LateRead] = []
    for key, values in attributes.items():
        store = stores[key]
        for parts in (values.nodes, values.edges):
            for name, value in parts.items():
                put(store, name, value)
        late += [LateRead(each.read, each.tensors, store) for each in values.late]
        tensors += values.tensors()
    for node_type, n_id in part.n_id.items():
        store = stores[node_type]
        if 'num_nodes' in store._mapping:
            put(store, 'num_nodes', n_id.numel())
        if 'n_id' not in store._mapping:
            put(store, 'n_id', n_id)
    kept = _Kept(part, graph.loop_free)
    promise, sizes = Promise(part.edge_index, kept.fill), kept.sizes
    for edge_type in graph.edge_types:
        assert edge_type is not None
        store, e_id = stores[edge_type], part.e_id[edge_type]
        edges = Edges(
            part.edge_index[edge_type], e_id, sizes[edge_type[0]], sizes[edge_type[2]],
            part.indptr.get(edge_type), promise,
        )  # fmt: skip
        if (perm := perm_name(store)) is not None:
            store.pop(perm, None)  # It would be read for each batch: `e_id` tells the same.
        is_sparse = graph.layout[edge_type] != 'edge_index'
        new, read = set_edges(store, data[edge_type] if is_sparse else None, edges)
        tensors += new
        if read is not None:
            late.append(read)
        if e_id is not None and 'e_id' not in store._mapping:
            put(store, 'e_id', e_id)
    for name in ('batch', 'num_sampled_nodes', 'num_sampled_edges'):
        for key, value in (getattr(part, name) or {}).items():
            store = stores.get(key)
            put(out[key] if store is None else store, name, value)
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
        new.__dict__.update(store.__dict__, _mapping=store._mapping.copy(), _parent=parent)
        new.__dict__.pop('_cached_attr', None)
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
        self._rowptr, self._col = part.rowptr, part.col
        self._longest_row, self._loop_free = part.longest_row, loop_free
        self.sizes = {key: n_id.numel() for key, n_id in part.n_id.items()}
        # By hop. The lists are those of the batch, whose owner may write into them.
        self._num_nodes, self._num_edges = (
            None if counts is None or not part.is_by_hop else
            {key: tuple(by_hop) for key, by_hop in counts.items()}
            for counts in (part.num_sampled_nodes, part.num_sampled_edges)
        )  # fmt: skip
        self._made = Made.here(next(iter(part.n_id.values())))

    def fill(self, cache: Cache, key: EdgeType) -> None:
        """Fills the cache of the edges of a type."""
        hops = None
        if self._num_nodes is not None and self._num_edges is not None:
            hops = SampledHops(
                self._num_edges[key], self._num_nodes[key[0]], self._num_nodes[key[2]]
            )
        keep_block(
            cache, self._rowptr[key], self._col[key], hops, self._loop_free[key],
            self._longest_row[key], self.sizes[key[0]], self._made,
        )  # fmt: skip
