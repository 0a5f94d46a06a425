"""Sums over the rows of a sparse matrix, and their gradient to its entries: raw ops."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._library import fake, reference
from ._numbers import acc_dtype
from ._reference import edge_list, messages


@fake('spmm_groups')
@fake('spmm')
def _spmm_fake(
    rowptr: Tensor, x: Tensor, out_acc: bool, out_row: Tensor | None, num_out: int
) -> Tensor:
    dtype = acc_dtype(x.dtype) if out_acc else x.dtype
    num_rows = rowptr.size(0) - 1 if out_row is None else num_out
    return x.new_empty(num_rows, x.size(1), dtype=dtype)


@fake('sddmm')
def _sddmm_fake(a: Tensor, num_values: int) -> Tensor:
    return a.new_empty(num_values)


@reference('spmm')
def _spmm_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    bias: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
    self_row: Tensor | None = None,
    out_row: Tensor | None = None,
    num_out: int = 0,
) -> Tensor:
    row, source, position = edge_list(rowptr, col, perm)
    x = x.double()
    message = messages(x, value, source, position)
    if col_scale is not None:
        message = message * col_scale.double()[source, None]
    out = x.new_zeros(rowptr.size(0) - 1, x.size(1)).index_add(0, row, message)
    if mean:
        out = out / rowptr.diff().clamp(min=1).view(-1, 1)
    if row_scale is not None:
        out = out * row_scale.double().view(-1, 1)
    if diag is not None:
        own = x
        if self_row is not None:
            own = torch.cat([x, x.new_zeros(1, x.size(1))])[self_row.long()]
        out = out + diag.double().view(-1, 1) * own
    if bias is not None:
        out = out + bias.double()
    if out_row is None:
        return out
    exists = (out_row >= 0) & (out_row < num_out)
    return x.new_zeros(num_out, x.size(1)).index_copy(0, out_row[exists], out[exists])


@reference('spmm_groups')
def _spmm_groups_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    self_row: Tensor | None,
    group_ptr: Tensor,
    group_row: Tensor,
    long_row: Tensor,
    long_ptr: Tensor,
    long_shift: Tensor,
    num_partials: int,
    most_groups: int,
    group_size: int,
    atomic: bool,
    group_order: Tensor | None = None,
    out_row: Tensor | None = None,
    num_out: int = 0,
) -> Tensor:
    """Expands the groups to edges, in the order in which kernels read them."""
    group = torch.arange(group_row.size(0), device=col.device)
    is_long = group_row < 0
    slot = group[is_long] - long_shift[(-1 - group_row[is_long]).long()]
    row_of_slot = long_row.repeat_interleave(long_ptr.diff().long(), output_size=num_partials)
    row = group_row.index_put((is_long,), row_of_slot[slot])
    degree = rowptr.new_zeros(rowptr.size(0) - 1).index_add(0, row, group_ptr.diff())
    rowptr = pad(degree.cumsum(0), (1, 0))
    return _spmm_reference(
        rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc, self_row,
        out_row, num_out,
    )  # fmt: skip


@reference('sddmm')
def _sddmm_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    mean: bool,
    num_values: int,
) -> Tensor:
    row, source, position = edge_list(rowptr, col, perm)
    dot = (a.double()[row] * b.double()[source]).sum(1)
    if mean:
        dot = dot / rowptr.diff()[row]
    if row_scale is not None:
        dot = dot * row_scale.double()[row]
    if col_scale is not None:
        dot = dot * col_scale.double()[source]
    return dot.new_zeros(num_values).index_add(0, position, dot)
