"""The graph from which batches are sampled: the incoming edges of each node."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, FeatureStore, GraphStore
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.typing import SparseTensor

from ..graph._cache import look_up
from ..graph.graph import GraphRequest, has_loops
from ..graph.prepared_graph import PreparedGraph
from ..ops.neighbor_sample import sampling_weight
from ..sparse.to_csr import counts_in_int64, to_csr
from ._pinned import pin


class Structure(NamedTuple):
    """Row :math:`i` of a CSR matrix lists the sources of the incoming edges of node :math:`i`."""

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None  # position of each edge in the user's edges; None: the same
    weight: Tensor | None = None  # as kernels read it, in the order of col
    loop_free: bool = False  # known to have no self-loops
    layout: str = 'edge_index'  # what batches get: edge_index, or adj_t in a sparse format

    @property
    def num_nodes(self) -> int:
        return self.rowptr.size(0) - 1

    @property
    def num_bytes(self) -> int:
        tensors = self.rowptr, self.col, self.perm, self.weight
        return sum(t.nbytes for t in tensors if t is not None)

    def place(self, device: torch.device, on_host: bool) -> 'Structure':
        """The graph in memory from which batches on `device` can be sampled."""

        def move(tensor: Tensor) -> Tensor:
            return pin(tensor.cpu()) if on_host else tensor.to(device).contiguous()

        return self._replace(
            rowptr=move(self.rowptr), col=move(self.col),
            perm=None if self.perm is None else move(self.perm),
            weight=None if self.weight is None else move(self.weight),
        )  # fmt: skip


def structure_of_data(
    data: Data, is_sorted: bool, weight_attr: str | None, replace: bool
) -> Structure:
    """The graph of a :class:`~torch_geometric.data.Data` object."""
    num_nodes = data.num_nodes
    if num_nodes is None:
        raise ValueError("'data' must have features or num_nodes, got neither")
    if 'edge_index' in data:
        edge_index = data.edge_index
        graph = edge_index.graph if isinstance(edge_index, PreparedGraph) else None
        if graph is not None and not graph.is_in_order_of_transpose:
            loop_free = not has_loops(edge_index)
            out = Structure(graph.rowptr, graph.col, graph.perm, loop_free=loop_free)
            return _with_weight(out, data, weight_attr, replace)
        if isinstance(edge_index, EdgeIndex):
            graph = look_up(edge_index, GraphRequest(num_nodes, num_nodes, False))
            if graph is not None:
                out = Structure(graph.rowptr, graph.col, graph.perm)
                out = out._replace(loop_free=_is_loop_free(edge_index._data))
                return _with_weight(out, data, weight_attr, replace)
            edge_index = edge_index._data
        out = _from_coo(edge_index, num_nodes, is_sorted)
    elif 'adj_t' in data:
        out = _from_adj_t(data.adj_t, num_nodes)
    elif 'adj' in data:
        raise TypeError("'data' must hold its graph as edge_index or adj_t, got adj")
    else:
        empty = torch.empty(2, 0, dtype=torch.int64)
        out = _from_coo(empty, num_nodes, False)
    return _with_weight(out, data, weight_attr, replace)


def structure_of_store(feature_store: FeatureStore, graph_store: GraphStore) -> Structure:
    """The graph of a remote backend, which must have one type of nodes and edges."""
    attrs = graph_store.get_all_edge_attrs()
    types = {attr.edge_type for attr in attrs}
    if len(types) > 1 or any(kind is not None for kind in types):
        raise TypeError(
            f"'data' must be a graph with one type of nodes and edges, got edge types "
            f'{sorted(map(str, types))}'
        )
    if not attrs:
        raise ValueError("'data' must hold edges, got a graph store without any")
    by_layout = {attr.layout: attr for attr in attrs}
    layout = next(k for k in (EdgeLayout.CSC, EdgeLayout.COO, EdgeLayout.CSR) if k in by_layout)
    edges = graph_store.get_edge_index(by_layout[layout])
    num_nodes = max(by_layout[layout].size or (0,))
    if not num_nodes:
        sizes = [feature_store.get_tensor_size(a) for a in feature_store.get_all_tensor_attrs()]
        if not sizes:
            raise ValueError("'data' must have edges with a size, got none")
        num_nodes = sizes[0][0]
    first, second = edges
    if layout == EdgeLayout.CSC:
        return _from_csr(second, first, num_nodes)
    if layout == EdgeLayout.CSR:
        source = torch.repeat_interleave(first.diff(), output_size=second.numel())
        return _from_coo(torch.stack([source, second]), num_nodes, False)
    return _from_coo(torch.stack([first, second]), num_nodes, False)


def _from_coo(edge_index: Tensor, num_nodes: int, is_sorted: bool) -> Structure:
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'data.edge_index' must be a tensor, got {type(edge_index).__name__}")
    edge_index = edge_index.detach()
    rowptr, col, perm = to_csr(edge_index, num_nodes, num_nodes, wait=True)
    in_order = not bool((edge_index[1, 1:] < edge_index[1, :-1]).any())
    if is_sorted and not in_order:
        raise ValueError("'data.edge_index' must be sorted by destination if 'is_sorted' is set")
    return Structure(
        rowptr, col, None if in_order else perm, loop_free=_is_loop_free(edge_index)
    )


def _from_csr(rowptr: Tensor, col: Tensor, num_nodes: int, layout: str = 'edge_index') -> Structure:
    num_edges = col.numel()
    if rowptr.numel() != num_nodes + 1 or (num_nodes and int(rowptr[-1]) != num_edges):
        raise ValueError(
            f"'data' must have pointers for its {num_nodes} nodes that end at its {num_edges} "
            f'edges, got shape {list(rowptr.shape)}'
        )
    if num_edges:
        low, high = int(col.min()), int(col.max())
        if low < 0 or high >= num_nodes:
            raise IndexError(
                f"'data' must have edges between nodes 0 to {num_nodes - 1}, got "
                f'{low if low < 0 else high}'
            )
        if bool((rowptr.diff() < 0).any()) or int(rowptr[0]) != 0:
            raise ValueError("'data' must have pointers that start at 0 and do not decrease")
    dtype = torch.int64 if counts_in_int64(num_edges) else torch.int32
    return Structure(rowptr.to(dtype), col.int(), None, layout=layout)


def _from_adj_t(adj_t: object, num_nodes: int) -> Structure:
    if isinstance(adj_t, SparseTensor):
        rowptr, col, _ = adj_t.csr()
        return _from_csr(rowptr, col, num_nodes, 'SparseTensor')
    if isinstance(adj_t, Tensor) and adj_t.layout == torch.sparse_csr:
        return _from_csr(adj_t.crow_indices(), adj_t.col_indices(), num_nodes, 'sparse_csr')
    kind = adj_t.layout if isinstance(adj_t, Tensor) else type(adj_t).__name__
    raise TypeError(f"'data.adj_t' must be a SparseTensor or a torch.sparse_csr, got {kind}")


def _is_loop_free(edge_index: Tensor) -> bool:
    return not bool((edge_index[0] == edge_index[1]).any())


def _with_weight(
    structure: Structure, data: Data, weight_attr: str | None, replace: bool
) -> Structure:
    if weight_attr is None:
        return structure
    if not isinstance(weight_attr, str):
        raise TypeError(f"'weight_attr' must be a name, got {type(weight_attr).__name__}")
    if weight_attr not in data:
        raise ValueError(f"'weight_attr' must name an attribute of 'data', got {weight_attr!r}")
    weight, num_edges = data[weight_attr], structure.col.numel()
    if isinstance(weight, Tensor):
        if weight.shape not in ((num_edges,), (num_edges, 1)):
            raise ValueError(
                f"'data.{weight_attr}' must have shape [{num_edges}], got {list(weight.shape)}"
            )
        weight = weight.view(-1).to(structure.col.device)
        if structure.perm is not None:
            weight = weight[structure.perm.long()]
    checked = sampling_weight(weight, structure.col, replace)
    if checked.data_ptr() == data[weight_attr].data_ptr():  # Copy: weights are read once.
        checked = checked.clone()
    return structure._replace(weight=checked)
