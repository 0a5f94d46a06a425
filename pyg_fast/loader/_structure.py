"""The graph from which batches are sampled: the incoming edges of each node."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, FeatureStore, GraphStore
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import SparseTensor

from ..graph._cache import look_up
from ..graph.graph import GraphRequest, has_loops
from ..graph.prepared_graph import PreparedGraph
from ..ops._checks import check_has_values
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
    out = edges_of_data(data, is_sorted)
    if weight_attr is None:
        return out
    weight = _find_weight(data, weight_attr)
    name = f'data.{weight_attr}'
    checked = sampling_weight(in_order_of(weight, out, name), out.col, replace, name)
    if checked.data_ptr() == weight.data_ptr():  # Copy: weights are read once.
        checked = checked.clone()
    return out._replace(weight=checked)


def edges_of_data(data: Data, is_sorted: bool) -> Structure:
    """The edges of a :class:`~torch_geometric.data.Data` object."""
    num_nodes = data.num_nodes
    if num_nodes is None:
        raise ValueError("'data' must have features or num_nodes, got neither")
    return edges_of_store(data._store, num_nodes, num_nodes, 'data', is_sorted)


def edges_of_store(
    data: BaseStorage, num_src: int, num_dst: int, name: str, is_sorted: bool
) -> Structure:
    """The edges of one type; `name` says in errors where they are."""
    if 'edge_index' in data:
        edge_index = data.edge_index
        graph = edge_index.graph if isinstance(edge_index, PreparedGraph) else None
        if graph is not None and not graph.is_in_order_of_transpose:
            loop_free = num_src == num_dst and not has_loops(edge_index)
            _check_size(name, graph.num_src, graph.num_dst, num_src, num_dst)
            return Structure(graph.rowptr, graph.col, graph.perm, loop_free=loop_free)
        if isinstance(edge_index, EdgeIndex):
            graph = look_up(edge_index, GraphRequest(num_src, num_dst, False))
            if graph is not None:
                out = Structure(graph.rowptr, graph.col, graph.perm)
                return out._replace(loop_free=_is_loop_free(edge_index._data))
            edge_index = edge_index._data
        return _from_coo(edge_index, num_src, num_dst, is_sorted, name)
    if 'adj_t' in data:
        return _from_adj_t(data.adj_t, num_src, num_dst, name)
    if 'adj' in data:
        raise TypeError(f"'{name}' must hold its graph as edge_index or adj_t, got adj")
    empty = torch.empty(2, 0, dtype=torch.int64)
    return _from_coo(empty, num_src, num_dst, False, name)


def in_order_of(values: Any, structure: Structure, name: str) -> Any:
    """Values of edges in the order of the structure, on its device; what is no tensor as it is."""
    num_edges = structure.col.numel()
    if not isinstance(values, Tensor):
        return values
    if values.shape not in ((num_edges,), (num_edges, 1)):
        raise ValueError(f"'{name}' must have shape [{num_edges}], got {list(values.shape)}")
    check_has_values(name, values)
    values = values.detach().view(-1).to(structure.col.device)
    return values if structure.perm is None else values[structure.perm.long()]


def _check_size(name: str, has_src: int, has_dst: int, num_src: int, num_dst: int) -> None:
    if (has_src, has_dst) != (num_src, num_dst):
        raise ValueError(
            f"'{name}.edge_index' must be of {num_src} sources and {num_dst} destinations, got one "
            f'prepared for {has_src} and {has_dst}'
        )


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
        return _from_csr(second, first, num_nodes, num_nodes, 'data')
    if layout == EdgeLayout.CSR:
        source = torch.repeat_interleave(first.diff(), output_size=second.numel())
        return _from_coo(torch.stack([source, second]), num_nodes, num_nodes, False, 'data')
    return _from_coo(torch.stack([first, second]), num_nodes, num_nodes, False, 'data')


def _from_coo(
    edge_index: Tensor, num_src: int, num_dst: int, is_sorted: bool, name: str
) -> Structure:
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'{name}.edge_index' must be a tensor, got {type(edge_index).__name__}")
    check_has_values(f'{name}.edge_index', edge_index)
    edge_index = edge_index.detach()
    try:
        rowptr, col, perm = to_csr(edge_index, num_src, num_dst, wait=True)
    except (TypeError, ValueError, IndexError) as error:
        if name == 'data':
            raise
        raise type(error)(f"'{name}.edge_index': {error}") from error
    in_order = not bool((edge_index[1, 1:] < edge_index[1, :-1]).any())
    if is_sorted and not in_order:
        raise ValueError(f"'{name}.edge_index' must be sorted by destination if 'is_sorted' is set")
    return Structure(rowptr, col, None if in_order else perm, loop_free=_is_loop_free(edge_index))


def _from_csr(
    rowptr: Tensor, col: Tensor, num_src: int, num_dst: int, name: str, layout: str = 'edge_index'
) -> Structure:
    num_edges = col.numel()
    if rowptr.numel() != num_dst + 1 or (num_dst and int(rowptr[-1]) != num_edges):
        raise ValueError(
            f"'{name}' must have pointers for its {num_dst} nodes that end at its {num_edges} "
            f'edges, got shape {list(rowptr.shape)}'
        )
    if num_edges:
        low, high = int(col.min()), int(col.max())
        if low < 0 or high >= num_src:
            raise IndexError(
                f"'{name}' must have edges between nodes 0 to {num_src - 1}, got "
                f'{low if low < 0 else high}'
            )
        if bool((rowptr.diff() < 0).any()) or int(rowptr[0]) != 0:
            raise ValueError(f"'{name}' must have pointers that start at 0 and do not decrease")
    dtype = torch.int64 if counts_in_int64(num_edges) else torch.int32
    return Structure(rowptr.to(dtype), col.int(), None, layout=layout)


def _from_adj_t(adj_t: object, num_src: int, num_dst: int, name: str) -> Structure:
    if isinstance(adj_t, SparseTensor):
        rowptr, col, _ = adj_t.csr()
        return _from_csr(rowptr, col, num_src, num_dst, name, 'SparseTensor')
    if isinstance(adj_t, Tensor) and adj_t.layout == torch.sparse_csr:
        ends = adj_t.crow_indices(), adj_t.col_indices()
        return _from_csr(*ends, num_src, num_dst, name, 'sparse_csr')
    kind = adj_t.layout if isinstance(adj_t, Tensor) else type(adj_t).__name__
    raise TypeError(f"'{name}.adj_t' must be a SparseTensor or a torch.sparse_csr, got {kind}")


def _is_loop_free(edge_index: Tensor) -> bool:
    return not bool((edge_index[0] == edge_index[1]).any())


def _find_weight(data: Data, weight_attr: str) -> Any:
    if not isinstance(weight_attr, str):
        raise TypeError(f"'weight_attr' must be a name, got {type(weight_attr).__name__}")
    if weight_attr not in data:
        raise ValueError(f"'weight_attr' must name an attribute of 'data', got {weight_attr!r}")
    return data[weight_attr]
