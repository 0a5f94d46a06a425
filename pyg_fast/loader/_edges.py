"""The edges of a dataset of graphs, sorted once: those of a batch need no sort."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..graph.batch_edge_index import DisjointEdgeIndex
from ..graph.graph import graph_of, keep_graph
from ..ops.join_edges import join_edges
from ..sparse.graph import Graph
from ..sparse.to_csr import to_csr, to_csr_csc
from ._attributes import Counts, cut_rows
from ._levels import EDGES, NODES, Levels, Selection, send
from ._place import Place


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

    def take(self, graphs: Selection) -> EdgeIndex:
        """The edges of a batch, sorted by destination, with their structure both ways."""
        edges, rowptr = join_edges(
            self.ends, self.rowptr, graphs.sent_start, graphs.sent_ptr, graphs.num_real,
            graphs.num_rows(NODES), graphs.num_rows(EDGES),
        )  # fmt: skip
        longest_row = self.longest_row
        if graphs.padding is not None:
            longest_row = max(longest_row, write_ring(graphs, edges, rowptr))
        return self._to_edge_index(edges, rowptr, longest_row, graphs.padding is not None)

    def _to_edge_index(
        self, edges: Tensor, rowptr: Tensor, longest_row: int, is_padded: bool
    ) -> EdgeIndex:
        col, _, t_col, t_perm = edges.unbind()
        by_dst, by_src = rowptr.unbind()
        if self.is_symmetric and not is_padded:
            by_src, t_col = by_dst, col
        size = by_dst.size(0) - 1
        graph = Graph(by_dst, col, None, by_src, t_col, t_perm, size, size, longest_row=longest_row)
        out = DisjointEdgeIndex.of(edges[:2].long(), by_dst.long())
        keep_graph(out, graph, self.is_loop_free)
        return out

    def cut(self, value: object, counts: Counts) -> object:
        if NODES not in counts or EDGES not in counts:
            return value
        # The padding comes last in both structures.
        assert isinstance(value, DisjointEdgeIndex)
        assert value._indptr is not None
        size, num_edges = counts[NODES], counts[EDGES]
        graph = graph_of(value, value.sparse_size(0), value.sparse_size(0))
        rowptr, col, _, t_rowptr, t_col, t_perm = (
            None if part is None else part[: size + 1] if number % 3 == 0 else part[:num_edges]
            for number, part in enumerate(graph[:6])
        )
        assert rowptr is not None
        assert col is not None
        part = Graph(
            rowptr, col, None, t_rowptr, t_col, t_perm, size, size, longest_row=graph.longest_row
        )
        out = DisjointEdgeIndex.of(
            value.as_tensor()[:, :num_edges].contiguous(), value._indptr[: size + 1]
        )
        keep_graph(out, part, self.is_loop_free)
        return out

    def cut_follow(self, value: object, counts: Counts) -> object:
        return cut_rows(value, EDGES, counts)

    def has_own_rows(self) -> bool:
        return False

    def slices(self, graphs: Selection) -> Tensor:
        return torch.from_numpy(graphs.ptr[EDGES].copy())

    def incs(self, graphs: Selection) -> Tensor:
        return torch.from_numpy(graphs.ptr[NODES, :-1].copy())

    def follow(self, graphs: Selection) -> tuple[Tensor, Tensor]:
        return graphs.rows(EDGES).owner.clone(), graphs.offsets(EDGES).clone()


class Ring(NamedTuple):
    """The edges of a padding, by destination, and their structure both ways."""

    edges: np.ndarray  # sources and destinations; by source, destinations and positions
    rowptr: np.ndarray  # of both
    longest_row: int


def ring_of(graphs: Selection) -> Ring:
    """The edges of a padding, spread over its nodes: each edge goes to a node from the next one, so
    that none is a loop."""
    assert graphs.padding is not None
    num_nodes, num_edges = graphs.num_real_rows(NODES), graphs.num_real_rows(EDGES)
    count, extra = graphs.padding
    begin = np.arange(count + 1) * extra // count
    degree = np.diff(begin)
    dst = np.repeat(np.arange(count), degree)
    t_degree = np.roll(degree, 1)
    t_col = (np.repeat(np.arange(count), t_degree) - 1) % count
    t_perm = np.roll(np.arange(extra), int(degree[-1]))
    t_begin = np.concatenate([[0], np.cumsum(t_degree)])
    ends = np.stack([(dst + 1) % count, dst, t_col]) + num_nodes
    return Ring(
        np.concatenate([ends, t_perm[None] + num_edges]),
        np.stack([begin, t_begin]) + num_edges, int(degree.max()),
    )  # fmt: skip


def write_edges(edge_index: Tensor, graphs: Selection) -> None:
    """Writes the edges of the padding into a plain list."""
    if not isinstance(edge_index, EdgeIndex):
        (ends,) = send([ring_of(graphs).edges[:2]], graphs.device)
        edge_index[:, graphs.num_real_rows(EDGES) :] = ends


def write_ring(graphs: Selection, edges: Tensor, rowptr: Tensor) -> int:
    """Writes the edges of the padding, in one copy to the device; returns the longest row."""
    ring = ring_of(graphs)
    of_padding, ptr = send([ring.edges, ring.rowptr], graphs.device)
    edges[:, graphs.num_real_rows(EDGES) :] = of_padding
    rowptr[:, graphs.num_real_rows(NODES) :] = ptr
    return ring.longest_row
