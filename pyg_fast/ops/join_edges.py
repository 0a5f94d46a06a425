"""The edges of a batch of small graphs, from those of a dataset."""

from torch import Tensor

from ._library import fake, ops, reference


def join_edges(
    ends: Tensor, rowptr: Tensor, start: Tensor, ptr: Tensor, num_graphs: int, num_nodes: int,
    num_edges: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The structure of graphs side by side, on a CPU, from that of each graph.

    Args:
        ends (Tensor): Of each edge of a dataset, sorted by destination, its source and destination,
            and in the order by source the destination of each edge and its position in the first
            order :math:`(|\mathcal{E}|, 4)`, int32, counted within each graph.
        rowptr (Tensor): The first edge of each node in both orders :math:`(|\mathcal{V}|, 2)`,
            int32, counted within each graph.
        start (Tensor): The first node and the first edge of each graph in the dataset
            :math:`(2, B)`, int64.
        ptr (Tensor): The same in the batch, and the numbers of nodes and edges
            :math:`(2, B + 1)`, int64.
        num_graphs (int): The number of graphs :math:`B`; there may be more columns.
        num_nodes (int): At least the number of nodes of the batch.
        num_edges (int): At least the number of edges of the batch.

    Returns:
        The columns of :obj:`ends`, counted in the batch :math:`(4, \textrm{num\_edges})`, not
        written after the last edge; and the row pointers of both structures :math:`(2,
        \textrm{num\_nodes} + 1)`, which end with the number of edges.

    Raises:
        RuntimeError: If tensors do not fit together.
    """
    return ops.join_edges.default(ends, rowptr, start, ptr, num_graphs, num_nodes, num_edges)


@fake('join_edges')
def _join_edges_fake(ends: Tensor, num_nodes: int, num_edges: int) -> tuple[Tensor, Tensor]:
    return ends.new_empty(4, num_edges), ends.new_empty(2, num_nodes + 1)


@reference('join_edges')
def _join_edges_reference(
    ends: Tensor, rowptr: Tensor, start: Tensor, ptr: Tensor, num_graphs: int, num_nodes: int,
    num_edges: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    edges, out_rowptr = ends.new_zeros(4, num_edges), ends.new_zeros(2, num_nodes + 1)
    for graph in range(num_graphs):
        (node, edge), (last_node, last_edge) = ptr[:, graph].tolist(), ptr[:, graph + 1].tolist()
        first_node, first_edge = start[:, graph].tolist()
        rows = ends[first_edge : first_edge + last_edge - edge]
        edges[:, edge:last_edge] = (rows + rows.new_tensor([node, node, node, edge])).t()
        rows = rowptr[first_node : first_node + last_node - node]
        out_rowptr[:, node:last_node] = (rows + edge).t()
    out_rowptr[:, int(ptr[0, num_graphs]) :] = int(ptr[1, num_graphs])
    return edges, out_rowptr
