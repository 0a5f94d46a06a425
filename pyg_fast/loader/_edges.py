"""The edges of a dataset of graphs, sorted once: those of a batch need no sort."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..graph._cache import Made, cache_of
from ..graph.batch_edge_index import DisjointEdgeIndex
from ..graph.graph import graph_of, keep_graph
from ..ops._edges import is_capturing
from ..ops.join_edges import join_edges
from ..sparse.graph import Graph
from ..sparse.to_csr import to_csr, to_csr_csc
from ._attributes import Counts, cut_rows
from ._levels import EDGES, NODES, Levels, Padding
from ._place import Place
from ._ring import longest_row_of
from ._selection import DeviceRows, Selection


class EdgeTensors(NamedTuple):
    """The edges of a batch, sorted by destination, with their structure both ways: what an
    :obj:`edge_index` of a batch is made of."""

    ends: Tensor  # (2, E) and
    indptr: Tensor  # (N + 1), both int64; the others are those of a Graph
    rowptr: Tensor
    col: Tensor
    t_rowptr: Tensor
    t_col: Tensor
    t_perm: Tensor

    @classmethod
    def of(cls, edge_index: DisjointEdgeIndex) -> 'EdgeTensors':
        """Those of which it was made."""
        graph = graph_in(edge_index)
        parts = edge_index._indptr, graph.rowptr, graph.col, *graph[3:6]
        return cls(edge_index.as_tensor(), *(part for part in parts if part is not None))

    def to_edge_index(
        self, longest_row: int | None, is_loop_free: bool, made: Made | None = None
    ) -> DisjointEdgeIndex:
        """The edges as a model takes them; `made` as of :func:`~..graph.graph.keep_graph`."""
        ends, indptr, rowptr, col, t_rowptr, t_col, t_perm = self
        size = rowptr.size(0) - 1
        graph = Graph(
            rowptr, col, None, t_rowptr, t_col, t_perm, size, size, longest_row=longest_row
        )
        out = DisjointEdgeIndex.of(ends, indptr)
        keep_graph(cache_of(out), graph, is_loop_free, made)
        return out


def graph_in(edge_index: DisjointEdgeIndex) -> Graph:
    """The structure that is kept beside the edges of a batch."""
    size = edge_index.sparse_size(0)
    return graph_of(edge_index, size, size)


class GraphEdges:
    """The edges of all graphs, an attribute: by destination, then source, and their structure both
    ways.

    Nodes and positions are numbered within each graph; a batch adds to them where its graphs begin.

    Args:
        edge_index: The edges of all graphs, with the node numbers of the graphs.
        levels: Those of the dataset.
        place: Where batches read them.
    """

    def __init__(self, edge_index: Tensor, levels: Levels, place: Place) -> None:
        device, num_edges = edge_index.device, edge_index.size(1)
        sizes = [torch.from_numpy(levels.sizes(k)).to(device) for k in (NODES, EDGES)]
        first = [each.cumsum(0) - each for each in sizes]
        node = first[0].repeat_interleave(sizes[1])
        first_edge = [first[1].repeat_interleave(size) for size in (sizes[1], sizes[0])]
        num_nodes = first_edge[1].size(0)

        def positions(edges: Tensor, by: str) -> Tensor:
            return to_csr(edges, num_nodes, num_nodes, by=by, wait=True)[2].long()

        # Sorted in the rows of both structures, which are one if the graphs are symmetric.
        edges = edge_index.long() + node
        order = positions(edges, 'dst')
        order = order[positions(edges[:, order], 'src')]
        rowptr, col, perm, t_rowptr, t_col, t_perm = to_csr_csc(
            edges[:, order], num_nodes, num_nodes, wait=True
        )
        self.perm = order[perm.long()]  # the position of each edge in the dataset
        place_of = torch.empty_like(order)
        place_of[perm.long()] = torch.arange(num_edges, device=device)
        dst = edges[1][self.perm]
        self.is_loop_free = not bool((col == dst).any())
        self.is_symmetric = torch.equal(rowptr, t_rowptr) and torch.equal(col, t_col)
        self.longest_row = int(rowptr.diff().max()) if num_nodes else 0
        # Of each edge its source and destination; in the transpose a destination and a position.
        position = place_of[t_perm.long()] - first_edge[0]
        self.ends = place(torch.stack([col - node, dst - node, t_col - node, position], 1).int())
        both = torch.stack([rowptr[:-1], t_rowptr[:-1]], 1) - first_edge[1][:, None]
        self.rowptr = place(both.int())

    def take(self, batch: DeviceRows) -> EdgeTensors:
        """The edges of a batch, sorted by destination, with their structure both ways."""
        sizes = batch.sizes
        ring, ring_rowptr = batch.ring() if sizes.is_padded else (None, None)
        edges, rowptr, ends, indptr = join_edges(
            self.ends, self.rowptr, batch.start, batch.ptr, ring, ring_rowptr, sizes.num_real,
            batch.num_rows(NODES), batch.num_rows(EDGES),
        )  # fmt: skip
        col, _, t_col, t_perm = edges.unbind()
        by_dst, by_src = rowptr.unbind()
        if self.is_symmetric and not sizes.is_padded:
            by_src, t_col = by_dst, col
        return EdgeTensors(ends, indptr, by_dst, col, by_src, t_col, t_perm)

    def join(self, tensors: EdgeTensors, padding: Padding | None) -> EdgeIndex:
        """The edges of a batch as a model takes them."""
        longest_row = self.longest_row
        if padding is not None:
            longest_row = max(longest_row, longest_row_of(padding))
        ends = tensors.ends
        made = None if is_capturing(ends) else Made.here(ends, late=True)
        return tensors.to_edge_index(longest_row, self.is_loop_free, made)

    def cut(self, value: object, counts: Counts) -> object:
        if NODES not in counts or EDGES not in counts:
            return value
        # The padding comes last in both structures.
        assert isinstance(value, DisjointEdgeIndex)
        size, num_edges = counts[NODES], counts[EDGES]
        ends, indptr, rowptr, col, t_rowptr, t_col, t_perm = EdgeTensors.of(value)
        cut = EdgeTensors(
            ends[:, :num_edges].contiguous(), indptr[: size + 1], rowptr[: size + 1],
            col[:num_edges], t_rowptr[: size + 1], t_col[:num_edges], t_perm[:num_edges],
        )  # fmt: skip
        return cut.to_edge_index(graph_in(value).longest_row, self.is_loop_free)

    def cut_follow(self, value: object, counts: Counts) -> object:
        return cut_rows(value, EDGES, counts)

    def has_own_rows(self) -> bool:
        return False

    def slices(self, graphs: Selection) -> Tensor:
        return torch.from_numpy(graphs.ptr[EDGES].copy())

    def incs(self, graphs: Selection) -> Tensor:
        return torch.from_numpy(graphs.ptr[NODES, :-1].copy())

    def follow(self, batch: DeviceRows) -> tuple[Tensor, Tensor]:
        return batch.owner(EDGES).clone(), batch.offsets(EDGES)


def add_ring(edge_index: Tensor, batch: DeviceRows) -> Tensor:
    """The edges of a batch as a plain list, with those of the padding."""
    ring, _ = batch.ring()
    return torch.where(batch.are_real(EDGES), edge_index, ring[:2])
