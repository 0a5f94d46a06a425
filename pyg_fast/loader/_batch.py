"""A sampled subgraph as a batch: PyG's objects, with the arrays that kernels read."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.index import index2ptr
from torch_geometric.sampler import SamplerOutput
from torch_geometric.typing import SparseTensor

from ..graph.batch_edge_index import BatchEdgeIndex
from ..graph.graph import keep_block
from ._pipeline import Late, Made
from ._versions import version_of


class Subgraph(NamedTuple):
    """A batch before its attributes are fetched."""

    n_id: Tensor
    edge_index: Tensor
    rowptr: Tensor | None  # None: edges are not sorted
    col: Tensor | None
    e_id: Tensor | None
    num_sampled_nodes: list[int] | None
    num_sampled_edges: list[int] | None
    input_id: Tensor
    hops: tuple[tuple[int, ...], tuple[int, ...]] | None  # the same two if they are valid
    edge_weight: Tensor | None = None
    batch: Tensor | None = None
    longest_row: int | None = None  # of its edges, if the sampler knows it

    def to_bidirectional(self) -> 'Subgraph':
        """Adds the reverse of each edge."""
        return self._replaced(self._output().to_bidirectional(), is_sorted=True)

    def transformed(self, transform: Callable) -> 'Subgraph':
        """Applies the user's function to the sampler's output."""
        before, version = self._output(), version_of(self.edge_index)
        out = transform(copy.copy(before))
        if not isinstance(out, SamplerOutput):
            raise TypeError(
                f"'transform_sampler_output' must return a SamplerOutput, got {type(out).__name__}"
            )
        same = out.row is before.row and out.col is before.col and out.node is before.node
        if same and version_of(self.edge_index) == version:
            return self._replace(
                e_id=out.edge, batch=out.batch, num_sampled_nodes=out.num_sampled_nodes,
                num_sampled_edges=out.num_sampled_edges,
            )  # fmt: skip
        return self._replaced(out, is_sorted=False)

    def _output(self) -> SamplerOutput:
        return SamplerOutput(
            node=self.n_id, row=self.edge_index[0], col=self.edge_index[1], edge=self.e_id,
            batch=self.batch, num_sampled_nodes=self.num_sampled_nodes,
            num_sampled_edges=self.num_sampled_edges, metadata=(self.input_id, None),
        )  # fmt: skip

    def _replaced(self, out: SamplerOutput, is_sorted: bool) -> 'Subgraph':
        rowptr = col = None
        if is_sorted:
            rowptr = index2ptr(out.col, out.node.numel()).int()
            col = out.row.int()
        input_id = out.metadata[0] if isinstance(out.metadata, tuple) else self.input_id
        return Subgraph(
            out.node, torch.stack([out.row, out.col]), rowptr, col, out.edge,
            out.num_sampled_nodes, out.num_sampled_edges, input_id, None, None, out.batch,
        )  # fmt: skip


def batch_of(
    data: Data | None,
    custom_cls: Callable | None,
    part: Subgraph,
    layout: str,
    loop_free: bool,
    node_values: dict[str, Any],
    edge_values: dict[str, Any],
    edge_keys: list[str],
    late: list[Late],
) -> Made:
    """The batch; the attributes in `late` are read when the loader returns it."""
    if data is None:
        out = Data() if custom_cls is None else custom_cls()
    else:
        out = copy.copy(data)
    num_nodes = part.n_id.numel()
    tensors = [t for t in part if isinstance(t, Tensor)]
    # The values of a matrix on the device are the user's own, like the columns there.
    adj_is_late = (
        data is not None and layout != 'edge_index' and part.n_id.is_cuda
        and _device_of(data.adj_t) == part.n_id.device
    )  # fmt: skip
    if data is None or 'num_nodes' in data._store:
        out.num_nodes = num_nodes
    for key, value in node_values.items():
        out._store[key] = value
    for key in edge_keys:  # None: without the attribute
        out._store[key] = edge_values.get(key)
    if layout == 'edge_index':
        out.edge_index = edge_index_of(part, loop_free)
        if part.edge_weight is not None:
            out.edge_weight = part.edge_weight
        if out.edge_index._indptr is not None:
            tensors.append(out.edge_index._indptr)
    elif not adj_is_late:
        out.adj_t = _adj_t(part, layout, data, tensors)

    if 'n_id' not in out:
        out.n_id = part.n_id
    if part.e_id is not None and 'e_id' not in out:
        out.e_id = part.e_id
    out.batch = part.batch
    out.num_sampled_nodes = part.num_sampled_nodes
    out.num_sampled_edges = part.num_sampled_edges
    out.input_id = part.input_id
    out.seed_time = None
    out.batch_size = part.input_id.size(0)
    values = [*node_values.values(), *edge_values.values()]
    tensors += [v for v in values if isinstance(v, Tensor)]
    tensors += [tensor for item in late for tensor in item.tensors]

    def read_late() -> None:
        for item in late:
            for key, value in item.read().items():
                out._store[key] = value
        if adj_is_late:
            out.adj_t = _adj_t(part, layout, data, [])

    return Made(out, tensors, read_late if late or adj_is_late else None)


def _device_of(adj_t: Any) -> torch.device:
    return adj_t.device() if isinstance(adj_t, SparseTensor) else adj_t.device


def edge_index_of(part: Subgraph, loop_free: bool) -> EdgeIndex:
    """The edges, with their CSR form by destination for PyG and for kernels."""
    num_nodes = part.n_id.numel()
    if part.rowptr is None or part.col is None:
        return EdgeIndex(part.edge_index, sparse_size=(num_nodes, num_nodes))
    out = BatchEdgeIndex.of(part.edge_index, part.rowptr.long())
    keep_block(out, part.rowptr, part.col, part.hops, loop_free, part.longest_row)
    return out


def _adj_t(part: Subgraph, layout: str, data: Any, tensors: list[Tensor]) -> Any:
    num_nodes = part.n_id.numel()
    row, col = part.edge_index
    rowptr = part.rowptr
    if rowptr is None:
        order = col.argsort(stable=True)
        row, col = row[order], col[order]
        e_id = None if part.e_id is None else part.e_id[order]
        rowptr = index2ptr(col, num_nodes)
    else:
        e_id = part.e_id
    rowptr = rowptr.long()
    if layout == 'SparseTensor':
        value = data.adj_t.storage.value()
        if value is not None and e_id is not None:
            value = value[e_id.to(value.device)].to(row.device)
        out = SparseTensor(
            rowptr=rowptr, row=col, col=row, value=value if e_id is not None else None,
            sparse_sizes=(num_nodes, num_nodes), is_sorted=True, trust_data=True,
        )  # fmt: skip
    else:
        value = data.adj_t.values()
        value = value[e_id.to(value.device)].to(row.device) if e_id is not None else (
            value.new_ones(row.numel(), device=row.device)
        )
        out = torch.sparse_csr_tensor(
            rowptr, row, value, size=(num_nodes, num_nodes), check_invariants=False
        )
    tensors += [t for t in (rowptr, row, value) if t is not None]
    return out
