"""Sorting a coordinate list into CSR."""

import torch
from torch import Tensor

from ._library import ops

_INT32_MAX = 2**31 - 1024  # Kernels step a little past the last edge.
_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_edge_index(edge_index: Tensor) -> None:
    """Raises unless :obj:`edge_index` is an integer tensor of shape :obj:`[2, num_edges]`."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'edge_index' must be a tensor, got {type(edge_index).__name__}")
    if edge_index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"'edge_index' must hold integers, got {edge_index.dtype}")
    if edge_index.layout != torch.strided:
        raise TypeError(f"'edge_index' must be a strided tensor, got {edge_index.layout}")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"'edge_index' must have shape [2, num_edges], got {list(edge_index.shape)}"
        )


def fits_int32(*counts: int) -> bool:
    """Whether counts of nodes and edges can be stored as int32."""
    return all(count < _INT32_MAX for count in counts)


def to_csr(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    by: str = 'dst',
    drop_loops: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sorts edges by one of their ends into a compressed sparse row structure.

    The sort is stable: edges of one row keep their order. Indices come back as int32 wherever
    nodes and edges can be counted in it.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`, of any integer
            type.
        num_src (int): Number of source nodes.
        num_dst (int): Number of destination nodes.
        by (str): :obj:`"dst"` makes one row per destination that lists sources; :obj:`"src"` the
            transpose. (default: :obj:`"dst"`)
        drop_loops (bool): Leave out edges from a node to itself. (default: :obj:`False`)

    Returns:
        :obj:`(rowptr, col, perm)` of shapes :math:`(N + 1)`, :math:`(|\mathcal{E}|)` and
        :math:`(|\mathcal{E}|)`: row :math:`i` holds :obj:`col[rowptr[i]:rowptr[i + 1]]`, and
        :obj:`perm` names the position in :obj:`edge_index` of each sorted edge. Where edges were
        left out, the tails of :obj:`col` and :obj:`perm` behind :obj:`rowptr[-1]` are zero.

    Raises:
        TypeError: If :obj:`edge_index` is not an integer tensor.
        ValueError: If its shape is not :math:`(2, |\mathcal{E}|)`, a size is negative, or
            :obj:`by` is unknown.
        IndexError: If an index is negative or too large. Eager calls check before anything uses
            the result (on CUDA by one synchronisation); under :func:`torch.compile` and in a
            CUDA graph the check becomes a device-side assertion.
    """
    check_edge_index(edge_index)
    if by not in ('dst', 'src'):
        raise ValueError(f"'by' must be 'dst' or 'src', got {by!r}")
    if num_src < 0 or num_dst < 0:
        raise ValueError(f"'num_src' and 'num_dst' must not be negative, got {num_src}, {num_dst}")
    if edge_index.dtype not in (torch.int32, torch.int64):
        edge_index = edge_index.to(torch.int64)
    src, dst = edge_index[0], edge_index[1]
    row, col, num_rows, num_cols = (
        (dst, src, num_dst, num_src) if by == 'dst' else (src, dst, num_src, num_dst)
    )
    index64 = not fits_int32(num_src, num_dst, edge_index.size(1))
    rowptr, col, perm, invalid = ops.to_csr(row, col, num_rows, num_cols, index64, drop_loops)
    if torch.compiler.is_compiling() or (
        edge_index.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        torch._assert_async(
            invalid == 0, "pyg_fast: 'edge_index' holds indices outside of its graph"
        )
    elif int(invalid):
        raise_index_error(edge_index, num_src, num_dst)
    return rowptr, col, perm


def raise_index_error(edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Raises the IndexError that names the first offending end."""
    for end, count, name in ((0, num_src, 'sources'), (1, num_dst, 'destinations')):
        low, high = (int(v) for v in edge_index[end].aminmax())
        if low < 0 or high >= count:
            raise IndexError(
                f"'edge_index[{end}]' must hold {name} in [0, {count}), got values from {low} "
                f'to {high}'
            )
