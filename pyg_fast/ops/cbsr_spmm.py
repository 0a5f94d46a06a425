"""Sums of CBSR features over the rows of a sparse matrix, and their gradients: raw ops."""

import torch
from torch import Tensor

from ._library import fake, reference
from ._numbers import acc_dtype
from ._reference import edge_list


@fake('cbsr_spmm')
def _cbsr_spmm_fake(rowptr: Tensor, values: Tensor, dim: int, out_acc: bool) -> Tensor:
    dtype = acc_dtype(values.dtype) if out_acc else values.dtype
    return values.new_empty(rowptr.size(0) - 1, dim, dtype=dtype)


@fake('cbsr_spmm_backward_ordered')
@fake('cbsr_spmm_backward')
def _cbsr_spmm_backward_fake(grad: Tensor, columns: Tensor) -> Tensor:
    return grad.new_empty(columns.size(0), columns.size(1))


@fake('cbsr_sddmm')
def _cbsr_sddmm_fake(grad: Tensor, num_values: int) -> Tensor:
    return grad.new_empty(num_values)


@reference('cbsr_spmm')
def _cbsr_spmm_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    values: Tensor,
    columns: Tensor,
    dim: int,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    bias: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
) -> Tensor:
    x = reference.cbsr_to_dense(values, columns, dim)
    return reference.spmm(rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean)


@reference('cbsr_spmm_backward')
def _cbsr_spmm_backward_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    grad: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    mean: bool,
    t_rowptr: Tensor | None = None,
    t_col: Tensor | None = None,
    t_perm: Tensor | None = None,
) -> Tensor:
    row, source, position = edge_list(rowptr, col, perm)
    value = None if value is None else value[position]
    if mean:
        inverse = 1 / rowptr.diff().clamp(min=1).double()
        row_scale = inverse if row_scale is None else inverse * row_scale.double()
    out, _ = reference.spmm_coo(
        torch.stack([row, source]), value, grad, col_scale, row_scale, diag, columns.size(0)
    )
    return reference.cbsr_sample(out, columns)


@reference('cbsr_spmm_backward_ordered')
def _cbsr_spmm_backward_ordered_reference(
    t_rowptr: Tensor,
    t_col: Tensor,
    t_perm: Tensor | None,
    value: Tensor | None,
    grad: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
) -> Tensor:
    out = reference.spmm(t_rowptr, t_col, t_perm, value, grad, row_scale, col_scale, diag)
    return reference.cbsr_sample(out, columns)


@reference('cbsr_sddmm')
def _cbsr_sddmm_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    grad: Tensor,
    values: Tensor,
    columns: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    mean: bool,
    num_values: int,
) -> Tensor:
    x = reference.cbsr_to_dense(values, columns, grad.size(1))
    return reference.sddmm(rowptr, col, perm, grad, x, row_scale, col_scale, mean, num_values)
