"""Sorting a list of edges into CSR."""

from torch import Tensor

from ._edges import cannot_wait, check_edge_index, check_invalid, is_checked, kernel_index
from ._library import ops
from ._numbers import check_flag, check_number

_INT32_MAX = 2**31 - 1024  # Kernels step a little past the last edge.


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
    nodes and edges can be counted in it. On CUDA a small graph takes one kernel.

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
            the result: on CUDA by one synchronisation, when an :obj:`edge_index` is first met and
            after edits in place; under :func:`torch.compile` and in a CUDA graph the check becomes
            a device-side assertion. Edges out of range are left out in any case.
    """
    if by not in ('dst', 'src'):
        raise ValueError(f"'by' must be 'dst' or 'src', got {by!r}")
    edges, index64 = _prepared(edge_index, num_src, num_dst, drop_loops)
    *csr, invalid = ops.to_csr.default(edges, num_src, num_dst, by == 'src', index64, drop_loops)
    _check(edge_index, invalid, (num_src, num_dst))
    return tuple(csr)


def to_csr_csc(
    edge_index: Tensor, num_src: int, num_dst: int, *, drop_loops: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Sorts edges by destination and by source, for less than :func:`to_csr` for each.

    On CUDA both orders of a small graph take one kernel, and those of any graph one check.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`, of any integer
            type.
        num_src (int): Number of source nodes.
        num_dst (int): Number of destination nodes.
        drop_loops (bool): Leave out edges from a node to itself. (default: :obj:`False`)

    Returns:
        :obj:`(rowptr, col, perm, t_rowptr, t_col, t_perm)`: what :func:`to_csr` returns for
        :obj:`by="dst"`, then for :obj:`by="src"`.

    Raises:
        TypeError, ValueError, IndexError: As :func:`to_csr`.
    """
    edges, index64 = _prepared(edge_index, num_src, num_dst, drop_loops)
    *both, invalid = ops.to_csr_csc.default(edges, num_src, num_dst, index64, drop_loops)
    _check(edge_index, invalid, (num_src, num_dst))
    return tuple(both)


def _prepared(
    edge_index: Tensor, num_src: int, num_dst: int, drop_loops: bool
) -> tuple[Tensor, bool]:
    check_edge_index(edge_index)
    check_number('num_src', num_src)
    check_number('num_dst', num_dst)
    check_flag('drop_loops', drop_loops)
    return kernel_index(edge_index), not fits_int32(num_src, num_dst, edge_index.size(1))


def _check(edge_index: Tensor, invalid: Tensor, size: tuple[int, int]) -> None:
    # Only a synchronisation is worth leaving out. A captured graph may be given other edges later.
    wait = edge_index.is_cuda and not cannot_wait(edge_index)
    if not (wait and is_checked(edge_index, size)):
        check_invalid(edge_index, invalid, size)
