"""The rows and edges of a batch of small graphs, from those of a dataset."""

import torch
from torch import Tensor

from ._library import fake, ops, reference
from ._lifetime import keep_until_read


def graph_rows(
    start: Tensor, ptr: Tensor, level: int, num_rows: int, last: int
) -> tuple[Tensor, Tensor]:
    r"""The rows of graphs side by side.

    Args:
        start (Tensor): Of several kinds of rows the first row of each graph in the dataset
            :math:`(L, B)`, int64.
        ptr (Tensor): The same in the batch, and the number of rows :math:`(L, B + 1)`, int64.
        level (int): The kind.
        num_rows (int): The number of rows of the batch, which :obj:`ptr` ends with.
        last (int): The largest row of the dataset, which stands for all beyond it.

    Returns:
        The row in the dataset and the graph of each row :math:`(\textrm{num\_rows})`, int64.

    Raises:
        RuntimeError: If tensors do not fit together. On a GPU their numbers are not checked.
    """
    return ops.graph_rows.default(start, ptr, level, num_rows, last)


@fake('graph_rows')
def _graph_rows_fake(start: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    return start.new_empty(num_rows), start.new_empty(num_rows)


@reference('graph_rows')
def _graph_rows_reference(
    start: Tensor, ptr: Tensor, level: int, num_rows: int, last: int
) -> tuple[Tensor, Tensor]:
    owner = torch.arange(start.size(1), device=start.device).repeat_interleave(ptr[level].diff())
    place = torch.arange(num_rows, device=start.device)
    return (start[level] - ptr[level, :-1])[owner].add(place).clamp(max=last), owner


def join_edges(
    ends: Tensor, rowptr: Tensor, start: Tensor, ptr: Tensor, num_graphs: int, num_nodes: int,
    num_edges: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""The structure of graphs side by side, from that of each graph.

    If :obj:`ends` and :obj:`rowptr` are in pinned host memory, a GPU reads them over the bus.

    Args:
        ends (Tensor): Of each edge of a dataset, sorted by destination, its source and destination,
            and in the order by source the destination of each edge and its position in the first
            order :math:`(|\mathcal{E}|, 4)`, int32, counted within each graph.
        rowptr (Tensor): The first edge of each node in both orders :math:`(|\mathcal{V}|, 2)`,
            int32, counted within each graph.
        start (Tensor): The first rows of each graph in the dataset :math:`(L, B)`, int64: of nodes
            in the second and of edges in the third row.
        ptr (Tensor): The same in the batch, and the numbers of rows :math:`(L, B + 1)`, int64.
        num_graphs (int): The number of graphs :math:`B`; there may be more columns.
        num_nodes (int): At least the number of nodes of the batch.
        num_edges (int): At least the number of edges of the batch.

    Returns:
        The columns of :obj:`ends`, counted in the batch :math:`(4, \textrm{num\_edges})`, not
        written after the last edge; and the row pointers of both structures :math:`(2,
        \textrm{num\_nodes} + 1)`, which end with the number of edges.

    Raises:
        RuntimeError: If tensors do not fit together. On a GPU their numbers are not checked.
    """
    out = ops.join_edges.default(ends, rowptr, start, ptr, num_graphs, num_nodes, num_edges)
    if ends.device != start.device or rowptr.device != start.device:
        keep_until_read(start.device, ends, rowptr)
    return out


@fake('join_edges')
def _join_edges_fake(start: Tensor, num_nodes: int, num_edges: int) -> tuple[Tensor, Tensor]:
    sizes = (4, num_edges), (2, num_nodes + 1)
    edges, rowptr = (start.new_empty(size, dtype=torch.int32) for size in sizes)
    return edges, rowptr


@reference('join_edges')
def _join_edges_reference(
    ends: Tensor, rowptr: Tensor, start: Tensor, ptr: Tensor, num_graphs: int, num_nodes: int,
    num_edges: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    edges, out_rowptr = ends.new_zeros(4, num_edges), ends.new_zeros(2, num_nodes + 1)
    start, ptr = start[1:3], ptr[1:3]
    for graph in range(num_graphs):
        (node, edge), (last_node, last_edge) = ptr[:, graph].tolist(), ptr[:, graph + 1].tolist()
        first_node, first_edge = start[:, graph].tolist()
        rows = ends[first_edge : first_edge + last_edge - edge]
        edges[:, edge:last_edge] = (rows + rows.new_tensor([node, node, node, edge])).t()
        rows = rowptr[first_node : first_node + last_node - node]
        out_rowptr[:, node:last_node] = (rows + edge).t()
    out_rowptr[:, int(ptr[0, num_graphs]) :] = int(ptr[1, num_graphs])
    return edges, out_rowptr
