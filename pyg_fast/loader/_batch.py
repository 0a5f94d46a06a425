"""Makes a batch of a sampled subgraph: PyG's objects, with the arrays that kernels read."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.typing import SparseTensor

from ..graph.batch_edge_index import BatchEdgeIndex
from ..graph.csr import perm_name
from ..graph.graph import keep_block
from ._pipeline import LateRead, PendingBatch
from ._structure import Structure
from ._subgraph import Subgraph


class Attributes(NamedTuple):
    """The attributes of a batch. An edge-level one is None if the batch does not know its edges."""

    nodes: dict[str, object]
    edges: dict[str, object]
    late: list[LateRead]  # those that are read when the loader returns the batch

    def tensors(self) -> list[Tensor]:
        values = [*self.nodes.values(), *self.edges.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        return tensors + [tensor for read in self.late for tensor in read.tensors]


def build_batch(
    data: Data | None, custom_cls: Callable[[], Data] | None, graph: Structure, part: Subgraph,
    attributes: Attributes, write_seeds: Callable[[Data, tuple], None],
) -> PendingBatch:  # fmt: skip
    """The batch: a copy of `data`, or of a remote backend a new object."""
    out = copy.copy(data) if data is not None else (custom_cls or Data)()
    if (name := perm_name(out._store)) is not None:
        out._store.pop(name, None)  # It would be read for each batch: `e_id` tells the same.
    if data is None or 'num_nodes' in data._store:
        out.num_nodes = part.n_id.numel()
    for values in (attributes.nodes, attributes.edges):
        for key, value in values.items():
            out._store[key] = value
    tensors = [t for t in (*part, *part.metadata) if isinstance(t, Tensor)]
    late = list(attributes.late)
    if data is None or graph.layout == 'edge_index':
        tensors += _set_edge_index(out, part, graph.loop_free)
    elif part.n_id.is_cuda and _device_of(data.adj_t) == part.n_id.device:
        # The values of a matrix on the device are the user's own, like the columns there.
        late.append(LateRead(lambda: {'adj_t': _build_adj_t(part, data.adj_t)[0]}, []))
    else:
        out.adj_t, parts = _build_adj_t(part, data.adj_t)
        tensors += parts
    _set_sampling(out, part)
    write_seeds(out, part.metadata)
    return PendingBatch(out, tensors + attributes.tensors(), late)


def _set_edge_index(out: Data, part: Subgraph, is_loop_free: bool) -> list[Tensor]:
    """Sets the edges; returns the tensors made for them."""
    out.edge_index = build_edge_index(part, is_loop_free)
    if part.edge_weight is not None:
        out.edge_weight = part.edge_weight
    indptr = out.edge_index._indptr
    return [] if indptr is None else [indptr]


def _set_sampling(out: Data, part: Subgraph) -> None:
    """Sets what PyG's loader tells of the sampled nodes and edges."""
    if 'n_id' not in out:
        out.n_id = part.n_id
    if part.e_id is not None and 'e_id' not in out:
        out.e_id = part.e_id
    out.batch = part.batch
    out.num_sampled_nodes = part.num_sampled_nodes
    out.num_sampled_edges = part.num_sampled_edges


def build_edge_index(part: Subgraph, is_loop_free: bool) -> EdgeIndex:
    """The edges, with their CSR form by destination for PyG and for kernels."""
    if part.rowptr is None or part.col is None:
        num_nodes = part.n_id.numel()
        return EdgeIndex(part.edge_index, sparse_size=(num_nodes, num_nodes))
    out = BatchEdgeIndex.of(part.edge_index, part.rowptr.long())
    keep_block(out, part.rowptr, part.col, part.hops, is_loop_free, part.longest_row)
    return out


def _device_of(adj_t: SparseTensor | Tensor) -> torch.device:
    return adj_t.device() if isinstance(adj_t, SparseTensor) else adj_t.device


def _build_adj_t(
    part: Subgraph, adj_t: SparseTensor | Tensor
) -> tuple[SparseTensor | Tensor, list[Tensor]]:
    """The edges as a sparse matrix in the format of the graph's, and the tensors it is made of."""
    num_nodes = part.n_id.numel()
    row, col = part.edge_index
    rowptr, e_id = part.rowptr, part.e_id
    if rowptr is None:
        order = col.argsort(stable=True)
        row, col = row[order], col[order]
        e_id = None if e_id is None else e_id[order]
        rowptr = index2ptr(col, num_nodes)
    rowptr = rowptr.long()
    if isinstance(adj_t, SparseTensor):
        value = adj_t.storage.value()
        value = None if value is None or e_id is None else _values_at(value, e_id, row.device)
        out = SparseTensor(
            rowptr=rowptr, row=col, col=row, value=value, sparse_sizes=(num_nodes, num_nodes),
            is_sorted=True, trust_data=True,
        )  # fmt: skip
    else:
        value = adj_t.values()
        value = value.new_ones(row.numel(), device=row.device) if e_id is None else (
            _values_at(value, e_id, row.device)
        )
        out = torch.sparse_csr_tensor(
            rowptr, row, value, size=(num_nodes, num_nodes), check_invariants=False
        )
    return out, [tensor for tensor in (rowptr, row, value) if tensor is not None]


def _values_at(value: Tensor, e_id: Tensor, device: torch.device) -> Tensor:
    return value[e_id.to(value.device)].to(device)
