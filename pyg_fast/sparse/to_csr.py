"""Sorts edges into CSR."""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.functional import pad

from ..ops._edges import check_edge_index, check_invalid, kernel_index, raise_index_error
from ..ops._library import fake, ops, reference
from ..ops._numbers import check_flag, check_number

_INT32_MAX = 2**31 - 1024  # Kernel counters run a little past the last edge.
MOST_NODES = _INT32_MAX  # Node ids are always 32-bit.


def counts_in_int64(num_edges: int) -> bool:
    """Whether row pointers and positions of :obj:`num_edges` edges need 64 bits."""
    if torch.compiler.is_compiling() or type(num_edges) is not int:
        # Compiled code may not know the number: the kernel then checks that it fits into 32 bits.
        return bool(guard_or_false(num_edges >= _INT32_MAX))
    return num_edges >= _INT32_MAX


def to_csr(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    by: str = 'dst',
    drop_loops: bool = False,
    wait: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sorts edges by destination or by source into a compressed sparse row structure.

    The sort is stable: edges of one row keep their order. Columns are int32; pointers and
    positions too, unless there are :math:`2^{31}` edges or more. On CUDA a small graph takes one
    kernel.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`, of any integer
            dtype.
        num_src (int): Number of source nodes.
        num_dst (int): Number of destination nodes.
        by (str): :obj:`"dst"` makes one row per destination that lists sources; :obj:`"src"` makes
            the transpose. (default: :obj:`"dst"`)
        drop_loops (bool): Whether to remove self-loops. (default: :obj:`False`)
        wait (bool): On CUDA, wait for the device to raise IndexError at once.
            (default: :obj:`False`)

    Returns:
        :obj:`(rowptr, col, perm)` of shapes :math:`(N + 1)`, :math:`(|\mathcal{E}|)` and
        :math:`(|\mathcal{E}|)`: row :math:`i` holds :obj:`col[rowptr[i]:rowptr[i + 1]]`, and
        :obj:`perm` is the position in :obj:`edge_index` of each sorted edge. If edges are
        removed, the ends of :obj:`col` and :obj:`perm` after :obj:`rowptr[-1]` are zero.

    Raises:
        TypeError: If :obj:`edge_index` is not an integer tensor.
        ValueError: If its shape is not :math:`(2, |\mathcal{E}|)`, a size is negative or
            at least :math:`2^{31}`, or :obj:`by` is unknown.
        IndexError: If an index is negative or too large. Edges out of range are always skipped.
            CUDA does not wait for this check: the next call of pyg_fast outside of a CUDA graph
            capture raises the error, unless :obj:`wait` is set. Under :func:`torch.compile` the
            check is a device-side assertion.
    """
    if by not in ('dst', 'src'):
        raise ValueError(f"'by' must be 'dst' or 'src', got {by!r}")
    edges, index64 = _prepared(edge_index, num_src, num_dst, drop_loops, wait)
    *csr, invalid = ops.to_csr.default(edges, num_src, num_dst, by == 'src', index64, drop_loops)
    check_invalid(edge_index, invalid, (num_src, num_dst), wait)
    return tuple(csr)


def to_csr_csc(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    drop_loops: bool = False,
    wait: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    r"""Sorts edges by destination and by source, faster than two calls of :func:`to_csr`.

    On CUDA one kernel makes both orders of a small graph, and one check serves both.

    Args:
        edge_index (Tensor): Sources and destinations :math:`(2, |\mathcal{E}|)`, of any integer
            dtype.
        num_src (int): Number of source nodes.
        num_dst (int): Number of destination nodes.
        drop_loops (bool): Whether to remove self-loops. (default: :obj:`False`)
        wait (bool): As in :func:`to_csr`. (default: :obj:`False`)

    Returns:
        :obj:`(rowptr, col, perm, t_rowptr, t_col, t_perm)`: the result of :func:`to_csr` for
        :obj:`by="dst"`, then for :obj:`by="src"`.

    Raises:
        TypeError, ValueError, IndexError: As :func:`to_csr`.
    """
    edges, index64 = _prepared(edge_index, num_src, num_dst, drop_loops, wait)
    *both, invalid = ops.to_csr_csc.default(edges, num_src, num_dst, index64, drop_loops)
    check_invalid(edge_index, invalid, (num_src, num_dst), wait)
    return tuple(both)


def to_csr_unweighted(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    drop_loops: bool = False,
    wait: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Sorts edges by destination as :func:`to_csr` does, without their positions, in less time and
    memory.

    A large graph takes at most 16 bytes per edge on top of :obj:`edge_index`, the result included;
    :func:`to_csr` takes 24.

    Args:
        edge_index, num_src, num_dst, drop_loops, wait: As in :func:`to_csr`.

    Returns:
        :obj:`(rowptr, col)` of shapes :math:`(N + 1)` and :math:`(|\mathcal{E}|)`, as of
        :func:`to_csr`.

    Raises:
        TypeError, ValueError, IndexError: As :func:`to_csr`.
    """
    edges, index64 = _prepared(edge_index, num_src, num_dst, drop_loops, wait)
    rowptr, col, invalid = ops.to_csr_unweighted.default(
        edges, num_src, num_dst, index64, drop_loops
    )
    check_invalid(edge_index, invalid, (num_src, num_dst), wait)
    return rowptr, col


def transpose_csr(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor]:
    r"""The transpose of a compressed sparse row structure, without positions.

    It takes at most 16 bytes per edge on top of its input, the result included.

    Args:
        rowptr (Tensor): Row pointers :math:`(N + 1)`, int32 or int64.
        col (Tensor): Columns :math:`(|\mathcal{E}|)`, int32.
        num_cols (int): Number of columns :math:`M`.

    Returns:
        :obj:`(t_rowptr, t_col)` of shapes :math:`(M + 1)` and :math:`(|\mathcal{E}|)`; the rows of
        each column ascend.
    """
    return ops.transpose_csr.default(rowptr, col, num_cols)


def csr_rows(rowptr: Tensor, begin: int, end: int) -> Tensor:
    """The row of each edge of :obj:`[begin, end)`, int32."""
    return ops.csr_rows.default(rowptr, begin, end)


def _prepared(
    edge_index: Tensor, num_src: int, num_dst: int, drop_loops: bool, wait: bool
) -> tuple[Tensor, bool]:
    check_edge_index(edge_index)
    check_number('num_src', num_src)
    check_number('num_dst', num_dst)
    check_flag('drop_loops', drop_loops)
    if not torch.compiler.is_compiling():
        for name, count in (('num_src', num_src), ('num_dst', num_dst)):
            if count > MOST_NODES:
                raise ValueError(f"'{name}' must be at most {MOST_NODES}, got {count}")
    check_flag('wait', wait)
    compiling = torch.compiler.is_compiling()
    if not compiling and 0 in (num_src, num_dst) and edge_index.size(1) > 0:
        raise_index_error(edge_index, num_src, num_dst)
    return kernel_index(edge_index), counts_in_int64(edge_index.size(1))


def _empty_csr(edge_index: Tensor, num_rows: int, index64: bool) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.int64 if index64 else torch.int32
    return (
        edge_index.new_empty(num_rows + 1, dtype=dtype),
        edge_index.new_empty(edge_index.size(1), dtype=torch.int32),
        edge_index.new_empty(edge_index.size(1), dtype=dtype),
    )


@fake('to_csr')
def _to_csr_fake(
    edge_index: Tensor, num_src: int, num_dst: int, reverse: bool, index64: bool
) -> tuple[Tensor, ...]:
    csr = _empty_csr(edge_index, num_src if reverse else num_dst, index64)
    return *csr, edge_index.new_empty(1, dtype=torch.int64)


@fake('to_csr_csc')
def _to_csr_csc_fake(
    edge_index: Tensor, num_src: int, num_dst: int, index64: bool
) -> tuple[Tensor, ...]:
    csr, csc = (_empty_csr(edge_index, rows, index64) for rows in (num_dst, num_src))
    return *csr, *csc, edge_index.new_empty(1, dtype=torch.int64)


@fake('to_csr_unweighted')
def _to_csr_unweighted_fake(edge_index: Tensor, num_dst: int, index64: bool) -> tuple[Tensor, ...]:
    rowptr, col, _ = _empty_csr(edge_index, num_dst, index64)
    return rowptr, col, edge_index.new_empty(1, dtype=torch.int64)


@fake('transpose_csr')
def _transpose_csr_fake(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), col.new_empty(col.size(0))


@fake('csr_rows')
def _csr_rows_fake(rowptr: Tensor, begin: int, end: int) -> Tensor:
    return rowptr.new_empty(end - begin, dtype=torch.int32)


@reference('to_csr')
def _to_csr_reference(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    reverse: bool,
    index64: bool,
    drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (row, col), num_rows, num_cols = edge_index.flip(0), num_dst, num_src
    if reverse:
        row, col, num_rows, num_cols = col, row, num_cols, num_rows
    valid = (row >= 0) & (row < num_rows) & (col >= 0) & (col < num_cols)
    selected = valid & (row != col) if drop_loops else valid
    perm = selected.nonzero().view(-1)
    perm = perm[row[perm].argsort(stable=True)]
    rowptr = pad(torch.bincount(row[perm].long(), minlength=num_rows).cumsum(0), (1, 0))
    dtype = torch.int64 if index64 else torch.int32
    tail = (0, row.size(0) - perm.size(0))
    return (
        rowptr.to(dtype),
        pad(col[perm], tail).to(torch.int32),
        pad(perm, tail).to(dtype),
        (~valid).sum().view(1),
    )


@reference('to_csr_csc')
def _to_csr_csc_reference(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    index64: bool,
    drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, ...]:
    csr, csc = (
        _to_csr_reference(edge_index, num_src, num_dst, reverse, index64, drop_loops)
        for reverse in (False, True)
    )
    return *csr[:3], *csc


@reference('to_csr_unweighted')
def _to_csr_unweighted_reference(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    index64: bool,
    drop_loops: bool,
    report: bool = True,
) -> tuple[Tensor, ...]:
    rowptr, col, _, invalid = _to_csr_reference(
        edge_index, num_src, num_dst, False, index64, drop_loops
    )
    return rowptr, col, invalid


@reference('transpose_csr')
def _transpose_csr_reference(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor]:
    count = int(rowptr[-1])
    rows = _csr_rows_reference(rowptr, 0, count)
    edges = torch.stack([col[:count], rows])
    t_rowptr, t_col, *_ = _to_csr_reference(
        edges, num_cols, rowptr.size(0) - 1, True, rowptr.dtype == torch.int64, False
    )
    return t_rowptr, pad(t_col, (0, col.size(0) - count))


@reference('csr_rows')
def _csr_rows_reference(rowptr: Tensor, begin: int, end: int) -> Tensor:
    edge = torch.arange(begin, end, dtype=rowptr.dtype, device=rowptr.device)
    return (torch.searchsorted(rowptr, edge, right=True) - 1).int()
