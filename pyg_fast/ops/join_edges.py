"""The rows and edges of a batch of small graphs, from those of a dataset."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._library import fake, ops, reference
from ._lifetime import keep_until_read


def take_rows(
    start: Tensor, ptr: Tensor, rows: Sequence[Tensor], level: Sequence[int],
    shift: Sequence[int], owner: Sequence[int], is_real: Sequence[int], num_rows: Sequence[int],
    num_real: int,
) -> list[Tensor]:  # fmt: skip
    r"""The rows of graphs side by side: all attributes of a batch by one kernel.

    Rows are of several levels, such as nodes and edges. Rows beyond the last one of an attribute
    read the last one. Attributes in pinned host memory are read by a GPU over the bus.

    Args:
        start (Tensor): Of each level the first row of each graph in the dataset :math:`(L, B)`,
            int64.
        ptr (Tensor): The same in the batch, and the number of rows :math:`(L, B + 1)`, int64.
        rows (list[Tensor]): The attributes of the dataset, contiguous, with the rows of a level as
            their first dimension.
        level (list[int]): The level of each attribute.
        shift (list[int]): The level of which the first row of its graph in the batch is added to
            all numbers of a row, int32 or int64; -1: nothing is.
        owner (list[int]): Levels of which the graph of each row is wanted.
        is_real (list[int]): Levels of which is wanted whether each row is of one of the first
            graphs.
        num_rows (list[int]): The number of rows of the batch at each level :math:`(L)`, with which
            :obj:`ptr` ends.
        num_real (int): The number of the first graphs.

    Returns:
        The attributes of the batch; the graphs of rows :math:`(\textrm{num\_rows})`, int64; and
        whether rows are of the first graphs :math:`(\textrm{num\_rows})`, bool.

    Raises:
        RuntimeError: If tensors do not fit together. On a GPU their numbers are not checked.
    """
    out: list[Tensor] = ops.take_rows.default(
        start, ptr, rows, level, shift, owner, is_real, num_rows, num_real
    )
    if start.is_cuda:
        keep_until_read(start.device, *rows)
    return out


@fake('take_rows')
def _take_rows_fake(
    start: Tensor, rows: Sequence[Tensor], level: Sequence[int], owner: Sequence[int],
    is_real: Sequence[int], num_rows: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    taken = [
        start.new_empty(num_rows[at], *each.shape[1:], dtype=each.dtype)
        for each, at in zip(rows, level, strict=True)
    ]
    owners = [start.new_empty(num_rows[at]) for at in owner]
    return [*taken, *owners, *(start.new_empty(num_rows[at], dtype=torch.bool) for at in is_real)]


@reference('take_rows')
def _take_rows_reference(
    start: Tensor, ptr: Tensor, rows: Sequence[Tensor], level: Sequence[int],
    shift: Sequence[int], owner: Sequence[int], is_real: Sequence[int], num_rows: Sequence[int],
    num_real: int,
) -> list[Tensor]:  # fmt: skip
    def owner_at(at: int) -> Tensor:
        graphs = torch.arange(start.size(1), device=start.device)
        return graphs.repeat_interleave(ptr[at].diff(), output_size=num_rows[at])

    out = []
    for each, at, by in zip(rows, level, shift, strict=True):
        graph, place = owner_at(at), torch.arange(num_rows[at], device=start.device)
        source = (start[at] - ptr[at, :-1])[graph].add(place).clamp(max=each.size(0) - 1)
        taken = each[source]
        if by >= 0:
            first = ptr[by, :-1][graph].to(each.dtype)
            taken = taken + first.view(-1, *[1] * (each.dim() - 1))
        out.append(taken)
    out += [owner_at(at) for at in owner]
    return out + [owner_at(at) < num_real for at in is_real]


def join_edges(
    ends: Tensor, rowptr: Tensor, start: Tensor, ptr: Tensor, ring: Tensor | None,
    ring_rowptr: Tensor | None, num_graphs: int, num_nodes: int, num_edges: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
        ring (Tensor, optional): What follows the last graph in the first result :math:`(4,
            \textrm{num\_edges})`, int32; read there only.
        ring_rowptr (Tensor, optional): The same of the second result.
        num_graphs (int): The number of graphs :math:`B`; there may be more columns.
        num_nodes (int): At least the number of nodes of the batch.
        num_edges (int): At least the number of edges of the batch.

    Returns:
        The columns of :obj:`ends`, counted in the batch :math:`(4, \textrm{num\_edges})`; the row
        pointers of both structures :math:`(2, \textrm{num\_nodes} + 1)`, both int32; and again,
        int64, the first two of the columns :math:`(2, \textrm{num\_edges})` and the row pointers
        by destination. Without :obj:`ring` columns are not written after the last edge, and row
        pointers end with the number of edges.

    Raises:
        RuntimeError: If tensors do not fit together. On a GPU their numbers are not checked.
    """
    out = ops.join_edges.default(
        ends, rowptr, start, ptr, ring, ring_rowptr, num_graphs, num_nodes, num_edges
    )
    if ends.device != start.device or rowptr.device != start.device:
        keep_until_read(start.device, ends, rowptr)
    return out


@fake('join_edges')
def _join_edges_fake(
    start: Tensor, num_nodes: int, num_edges: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = (4, num_edges), (2, num_nodes + 1)
    edges, rowptr = (start.new_empty(size, dtype=torch.int32) for size in sizes)
    return edges, rowptr, start.new_empty(2, num_edges), start.new_empty(num_nodes + 1)


@reference('join_edges')
def _join_edges_reference(
    ends: Tensor, rowptr: Tensor, start: Tensor, ptr: Tensor, ring: Tensor | None,
    ring_rowptr: Tensor | None, num_graphs: int, num_nodes: int, num_edges: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    edges, out_rowptr = ends.new_zeros(4, num_edges), ends.new_zeros(2, num_nodes + 1)
    start, ptr = start[1:3], ptr[1:3]
    for graph in range(num_graphs):
        (node, edge), (last_node, last_edge) = ptr[:, graph].tolist(), ptr[:, graph + 1].tolist()
        first_node, first_edge = start[:, graph].tolist()
        rows = ends[first_edge : first_edge + last_edge - edge]
        edges[:, edge:last_edge] = (rows + rows.new_tensor([node, node, node, edge])).t()
        rows = rowptr[first_node : first_node + last_node - node]
        out_rowptr[:, node:last_node] = (rows + edge).t()
    num_read, end = ptr[:, num_graphs].tolist()
    out_rowptr[:, num_read:] = end
    if ring is not None and ring_rowptr is not None:
        edges[:, end:] = ring[:, end:]
        out_rowptr[:, num_read:] = ring_rowptr[:, num_read:]
    return edges, out_rowptr, edges[:2].long(), out_rowptr[0].long()
