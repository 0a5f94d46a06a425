"""Makes a batch of a sampled subgraph: PyG's objects, with the arrays that kernels read."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.data.storage import BaseStorage
from torch_geometric.index import index2ptr
from torch_geometric.typing import SparseTensor

from ..graph._cache import Cache, Made, Promise, SampledHops
from ..graph.batch_edge_index import edges_of_batch
from ..graph.csr import perm_name
from ..graph.graph import keep_block
from ._pipeline import LateRead, PendingBatch, put
from ._subgraph import Subgraph


class Edges(NamedTuple):
    """The edges of one type in a batch, sorted by destination if they have an `indptr`."""

    edge_index: Tensor
    e_id: Tensor | None
    size: tuple[int, int]  # numbers of sources and of destinations
    indptr: Tensor | None  # row pointers, int64


class Attributes(NamedTuple):
    """The attributes of a batch. An edge-level one is None if the batch does not know its edges."""

    nodes: dict[str, object]
    edges: dict[str, object]
    late: list[LateRead]  # those that are read when the loader returns the batch

    def tensors(self) -> list[Tensor]:
        """The tensors, of sparse ones their parts, which other streams may read."""
        values = [*self.nodes.values(), *self.edges.values()]
        tensors = [
            part for value in values if isinstance(value, Tensor)
            for part in ((value._indices(), value._values()) if value.is_sparse else (value,))
        ]  # fmt: skip
        return tensors + [tensor for read in self.late for tensor in read.tensors]


def build_batch(
    data: Data | None, custom_cls: Callable[[], Data] | None, layout: str, is_loop_free: bool,
    part: Subgraph, attributes: Attributes, write_seeds: Callable[[Any, tuple], None],
) -> PendingBatch:  # fmt: skip
    """The batch: a copy of `data`, or of a remote backend a new object."""
    out = copy.copy(data) if data is not None else (custom_cls or Data)()
    store, num_nodes = out._store, part.num_nodes
    size = num_nodes, num_nodes
    store.__dict__.pop('_cached_attr', None)  # What PyG knows of the attributes before.
    held = store._mapping
    if (name := perm_name(store)) is not None:
        held.pop(name, None)  # It would be read for each batch: `e_id` tells the same.
    if data is None or 'num_nodes' in held:
        held['num_nodes'] = num_nodes
    for values in (attributes.nodes, attributes.edges):
        for key, value in values.items():
            put(store, key, value)
    indptr = None if part.rowptr is None else part.rowptr.long()
    tensors = [t for t in (*part, *part.metadata, indptr) if isinstance(t, Tensor)]
    late = [read._replace(store=store) for read in attributes.late]
    # The lists are those of the batch, whose owner may write into them.
    hops = None if part.hops is None else SampledHops(*map(tuple, part.hops))
    made = Made.here(part.edge_index)
    rowptr, col, longest_row = part.rowptr, part.col, part.longest_row

    def keep(cache: Cache, key: None) -> None:
        assert rowptr is not None
        assert col is not None
        keep_block(cache, rowptr, col, hops, is_loop_free, longest_row, made=made)

    if data is not None and layout != 'edge_index':
        edges = Edges(part.edge_index, part.e_id, size, indptr)
        new, read = set_matrix(store, data, edges)
        tensors += new
        late += read
    else:
        promise = Promise({None: part.edge_index}, keep)
        held['edge_index'] = build_edge_index(part.edge_index, indptr, size, promise)
        if part.edge_weight is not None:
            held['edge_weight'] = part.edge_weight
    held.setdefault('n_id', part.n_id)
    if part.e_id is not None:
        held.setdefault('e_id', part.e_id)
    for name in ('batch', 'num_sampled_nodes', 'num_sampled_edges'):
        put(store, name, getattr(part, name))
    write_seeds(out, part.metadata)
    return PendingBatch(out, tensors + attributes.tensors(), late)


def set_matrix(
    out: BaseStorage, matrix_of: Any, edges: Edges
) -> tuple[list[Tensor], list[LateRead]]:
    """Sets the edges of a store of a batch, as a matrix like that of `matrix_of`; returns the
    tensors made for them, or how to read the matrix later."""
    device = edges.edge_index.device
    if device.type == 'cuda' and _device_of(matrix_of.adj_t) == device:
        # The values of a matrix on the device are the user's own, like the columns there.
        def read() -> dict[str, object]:
            return {'adj_t': _build_adj_t(edges, matrix_of.adj_t)[0]}

        return [], [LateRead(read, [], out)]
    out.adj_t, parts = _build_adj_t(edges, matrix_of.adj_t)
    return parts, []


def build_edge_index(
    edges: Tensor, indptr: Tensor | None, size: tuple[int, int], promise: Promise
) -> EdgeIndex:
    """The edges, with their CSR form by destination for PyG and, by promise, for kernels."""
    if indptr is None:
        return EdgeIndex(edges, sparse_size=size)
    out = edges_of_batch(edges, indptr, size)
    promise.give(out)
    return out


def _device_of(adj_t: SparseTensor | Tensor) -> torch.device:
    return adj_t.device() if isinstance(adj_t, SparseTensor) else adj_t.device


def _build_adj_t(
    edges: Edges, adj_t: SparseTensor | Tensor
) -> tuple[SparseTensor | Tensor, list[Tensor]]:
    """The edges as a sparse matrix in the format of the graph's, and the tensors it is made of."""
    size = edges.size[::-1]
    row, col = edges.edge_index
    rowptr, e_id = edges.indptr, edges.e_id
    if rowptr is None:
        order = col.argsort(stable=True)
        row, col = row[order], col[order]
        e_id = None if e_id is None else e_id[order]
        rowptr = index2ptr(col, size[0])
    if isinstance(adj_t, SparseTensor):
        value = adj_t.storage.value()
        value = None if value is None or e_id is None else _values_at(value, e_id, row.device)
        out = SparseTensor(
            rowptr=rowptr, row=col, col=row, value=value, sparse_sizes=size,
            is_sorted=True, trust_data=True,
        )  # fmt: skip
    else:
        value = adj_t.values()
        value = (
            value.new_ones(row.numel(), device=row.device)
            if e_id is None
            else (_values_at(value, e_id, row.device))
        )
        out = torch.sparse_csr_tensor(rowptr, row, value, size=size, check_invariants=False)
    return out, [tensor for tensor in (rowptr, row, value) if tensor is not None]


def _values_at(value: Tensor, e_id: Tensor, device: torch.device) -> Tensor:
    return value[e_id.to(value.device)].to(device)
