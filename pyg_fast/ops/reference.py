"""The pure-torch float64 twin of every op, differentiable, for tests and benchmarks only."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def to_csr(
    row: Tensor, col: Tensor, num_rows: int, num_cols: int, index64: bool, drop_loops: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    valid = (row >= 0) & (row < num_rows) & (col >= 0) & (col < num_cols)
    kept = valid & (row != col) if drop_loops else valid
    perm = kept.nonzero().view(-1)
    perm = perm[row[perm].argsort(stable=True)]
    rowptr = pad(torch.bincount(row[perm].long(), minlength=num_rows).cumsum(0), (1, 0))
    dtype = torch.int64 if index64 else torch.int32
    tail = (0, row.size(0) - perm.size(0))
    return (
        rowptr.to(dtype),
        pad(col[perm], tail).to(dtype),
        pad(perm, tail).to(dtype),
        (~valid).sum().view(1),
    )


def spmm(
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
) -> Tensor:
    row, source, position = _edges(rowptr, col, perm)
    x = x.double()
    message = _message(x, value, source, position)
    if col_scale is not None:
        message = message * col_scale.double()[source, None]
    out = x.new_zeros(rowptr.size(0) - 1, x.size(1)).index_add(0, row, message)
    if mean:
        out = out / rowptr.diff().clamp(min=1).view(-1, 1)
    if row_scale is not None:
        out = out * row_scale.double().view(-1, 1)
    if diag is not None:
        out = out + diag.double().view(-1, 1) * x
    return out if bias is None else out + bias.double()


def spmm_max(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, value: Tensor | None, x: Tensor, minimum: bool
) -> tuple[Tensor, Tensor]:
    row, source, position = _edges(rowptr, col, perm)
    message = _message(x.double(), value, source, position)
    size = rowptr.size(0) - 1, x.size(1)
    rows = row.view(-1, 1).expand_as(message)
    best = message.new_full(size, float('inf') if minimum else -float('inf'))
    best = best.scatter_reduce(0, rows, message.detach(), 'amin' if minimum else 'amax')[row]
    reached = (message == best) | (message.isnan() & best.isnan())
    edge = torch.arange(row.size(0), device=row.device).view(-1, 1)
    none = row.size(0)
    first = torch.where(reached, edge, none)
    arg = first.new_full(size, none).scatter_reduce(0, rows, first, 'amin')
    out = torch.cat([message, message.new_zeros(1, size[1])]).gather(0, arg)
    return out, arg.masked_fill(arg == none, -1).to(col.dtype)


def spmm_max_backward_x(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    num_cols: int,
) -> Tensor:
    i, f, source, position = _reached(col, perm, arg)
    message = grad.double()[i, f] * (1 if value is None else value.double()[position])
    out = message.new_zeros(num_cols, grad.size(1))
    return out.index_put((source, f), message, accumulate=True)


def spmm_max_backward_x_ordered(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    t_rowptr: Tensor,
    t_col: Tensor,
    t_position: Tensor | None,
) -> Tensor:
    return spmm_max_backward_x(rowptr, col, perm, value, arg, grad, t_rowptr.size(0) - 1)


def spmm_max_backward_value(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    x: Tensor,
    num_values: int,
) -> Tensor:
    i, f, source, position = _reached(col, perm, arg)
    message = grad.double()[i, f] * x.double()[source, f]
    return message.new_zeros(num_values).index_add(0, position, message)


def sddmm(
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
    row, source, position = _edges(rowptr, col, perm)
    dot = (a.double()[row] * b.double()[source]).sum(1)
    if mean:
        dot = dot / rowptr.diff()[row]
    if row_scale is not None:
        dot = dot * row_scale.double()[row]
    if col_scale is not None:
        dot = dot * col_scale.double()[source]
    return dot.new_zeros(num_values).index_add(0, position, dot)


def maxk(x: Tensor, k: int, balanced: bool) -> tuple[Tensor, Tensor]:
    """Entries in ascending order of columns; the kernels choose an order of their own."""
    x = x.double()
    # One zero and one NaN: a sort on CUDA would tell those of either sign apart.
    alike = torch.where(x.isnan(), float('nan'), x + 0.0)
    # A stable sort in descending order takes NaN first, and the lowest column among equals.
    order = alike.sort(dim=1, descending=True, stable=True)[1]
    if balanced:
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(x.size(1), device=x.device).expand_as(order)
        )
        groups = pad(rank, (0, -x.size(1) % k), value=x.size(1)).unflatten(1, (-1, k))
        columns = groups.argmin(1) * k + torch.arange(k, device=x.device)
    else:
        columns = order[:, :k]
    columns = columns.sort(1)[0]
    dtype = torch.uint8 if x.size(1) <= 256 else torch.uint16 if x.size(1) <= 65536 else torch.int32
    return x.gather(1, columns), columns.to(dtype)


def cbsr_to_dense(values: Tensor, columns: Tensor, dim: int) -> Tensor:
    values = values.double()
    return values.new_zeros(values.size(0), dim).scatter(1, columns.long(), values)


def cbsr_sample(dense: Tensor, columns: Tensor) -> Tensor:
    return dense.double().gather(1, columns.long())


def cbsr_spmm(
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
    x = cbsr_to_dense(values, columns, dim)
    return spmm(rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean)


def cbsr_spmm_backward(
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
) -> Tensor:
    row, source, position = _edges(rowptr, col, perm)
    grad = grad.double()
    message = _message(grad, value, row, position)
    if mean:
        message = message / rowptr.diff()[row, None]
    if row_scale is not None:
        message = message * row_scale.double()[row, None]
    if col_scale is not None:
        message = message * col_scale.double()[source, None]
    out = grad.new_zeros(columns.size(0), grad.size(1)).index_add(0, source, message)
    if diag is not None:
        out = out + diag.double().view(-1, 1) * grad
    return cbsr_sample(out, columns)


def cbsr_spmm_backward_ordered(
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
    out = spmm(t_rowptr, t_col, t_perm, value, grad, row_scale, col_scale, diag)
    return cbsr_sample(out, columns)


def cbsr_sddmm(
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
    x = cbsr_to_dense(values, columns, grad.size(1))
    return sddmm(rowptr, col, perm, grad, x, row_scale, col_scale, mean, num_values)


def _edges(rowptr: Tensor, col: Tensor, perm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the position in `value` of every edge."""
    degree = rowptr.diff().long()
    row = torch.arange(degree.size(0), device=col.device).repeat_interleave(degree)
    position = torch.arange(row.size(0), device=col.device)
    return row, col[position].long(), position if perm is None else perm[position].long()


def _message(x: Tensor, value: Tensor | None, source: Tensor, position: Tensor) -> Tensor:
    return x[source] if value is None else x[source] * value.double()[position, None]


def _reached(
    col: Tensor, perm: Tensor | None, arg: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row and column of every maximum, and the source and position of the edge it came by."""
    i, f = (arg >= 0).nonzero(as_tuple=True)
    edge = arg[i, f].long()
    return i, f, col[edge].long(), edge if perm is None else perm[edge].long()
