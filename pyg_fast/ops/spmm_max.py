"""Maximum and minimum over a graph; the gradient goes to the edge that attains them."""

import torch
from torch import Tensor

from ..sparse.graph import Graph
from ._library import fake, ops, reference
from ._numbers import adds_in_order
from ._reference import edge_list, messages
from ._saved import Context, save, saved
from ._transforms import transforms_active


def reduce_max(
    graph: Graph, x: Tensor, value: Tensor | None = None, minimum: bool = False
) -> Tensor:
    """The maximum (or minimum) of the neighbours' messages, unchecked."""
    if transforms_active():
        return _spmm_max_reference(*graph[:3], value, x, minimum)[0].to(x.dtype)
    return SpMMMax.apply(x, value, graph, minimum)


class SpMMMax(torch.autograd.Function):
    """Maximum (or minimum) over edges; the gradient goes to the edge that attains it."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, value: Tensor | None, graph: Graph, minimum: bool
    ) -> Tensor:
        out, arg = ops.spmm_max(*graph[:3], value, x, minimum, graph.most_edges)
        needs_value = value is not None and ctx.needs_input_grad[1]
        # A second derivative to `value` also needs x.
        save(ctx, x if needs_value else None, value, arg, graph, x.size(0))
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, value, arg, graph, num_src = saved(ctx)
        rowptr, col, perm, t_rowptr, t_col, t_perm = graph[:6]
        grad_x = grad_value = None
        if torch.is_grad_enabled():  # create_graph=True: use differentiable torch ops.
            grad_x, grad_value = _max_backward(
                grad, x, value, arg, col, perm, num_src, ctx.needs_input_grad
            )
            return grad_x, grad_value, None, None
        if ctx.needs_input_grad[0]:
            if adds_in_order(grad):
                if t_rowptr is None:
                    raise RuntimeError(
                        'this graph was made without the transpose that a deterministic backward '
                        'needs'
                    )
                position = _t_position(rowptr, perm, t_perm)
                grad_x = ops.spmm_max_backward_x_ordered(
                    rowptr, col, perm, value, arg, grad, t_rowptr, t_col, position
                )
            else:
                of_hubs = graph.transpose_of_hubs() if grad.is_cuda else ()
                grad_x = ops.spmm_max_backward_x(
                    rowptr, col, perm, value, arg, grad, num_src, *of_hubs
                )
        if ctx.needs_input_grad[1]:
            grad_value = ops.spmm_max_backward_value(rowptr, col, perm, arg, grad, x, value.size(0))
        return grad_x, grad_value, None, None


def _t_position(rowptr: Tensor, perm: Tensor | None, t_perm: Tensor | None) -> Tensor | None:
    # The position in `col` of each edge of the transpose.
    if perm is None:
        return t_perm
    num_edges = perm.size(0)
    position = torch.arange(num_edges, dtype=perm.dtype, device=perm.device)
    # The zeros after the last edge must not count as edge 0.
    target = perm.long().masked_fill(position >= rowptr[-1], num_edges)
    inverse = perm.new_zeros(num_edges + 1)
    inverse[target] = position
    return inverse[:-1] if t_perm is None else inverse[t_perm.long()]


def _max_backward(
    grad: Tensor,
    x: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    col: Tensor,
    perm: Tensor | None,
    num_src: int,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """The backward pass of :class:`SpMMMax` in differentiable torch ops of size N x F."""
    edge = arg.clamp(min=0).long()
    grad = torch.where(arg >= 0, grad, grad.new_zeros(()))
    if col.size(0) == 0:
        grad_x = grad.new_zeros(num_src, grad.size(1)) + grad[:0].sum() if needs[0] else None
        return grad_x, None if value is None else torch.zeros_like(value)
    source = col[edge].long()
    position = edge if perm is None else perm[edge].long()
    grad_x = grad_value = None
    if needs[0]:
        message = grad if value is None else grad * value[position]
        grad_x = grad.new_zeros(num_src, grad.size(1)).scatter_add(0, source, message)
    if needs[1]:
        assert x is not None
        assert value is not None
        message = (grad * x.gather(0, source)).view(-1)
        grad_value = torch.zeros_like(value).scatter_add(0, position.view(-1), message)
    return grad_x, grad_value


@fake('spmm_max')
def _spmm_max_fake(rowptr: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    out = x.new_empty(rowptr.size(0) - 1, x.size(1))
    return out, torch.empty_like(out, dtype=rowptr.dtype)


@fake('spmm_max_backward_x')
def _spmm_max_backward_x_fake(grad: Tensor, num_cols: int) -> Tensor:
    return grad.new_empty(num_cols, grad.size(1))


@fake('spmm_max_backward_x_ordered')
def _spmm_max_backward_x_ordered_fake(grad: Tensor, t_rowptr: Tensor) -> Tensor:
    return grad.new_empty(t_rowptr.size(0) - 1, grad.size(1))


@fake('spmm_max_backward_value')
def _spmm_max_backward_value_fake(grad: Tensor, num_values: int) -> Tensor:
    return grad.new_empty(num_values)


@reference('spmm_max')
def _spmm_max_reference(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, value: Tensor | None, x: Tensor,
    minimum: bool, longest_row: int = -1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    row, source, position = edge_list(rowptr, col, perm)
    message = messages(x.double(), value, source, position)
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
    return out, arg.masked_fill(arg == none, -1).to(rowptr.dtype)


@reference('spmm_max_backward_x')
def _spmm_max_backward_x_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    arg: Tensor,
    grad: Tensor,
    num_cols: int,
    t_rowptr: Tensor | None = None,
    t_col: Tensor | None = None,
    t_perm: Tensor | None = None,
) -> Tensor:
    i, f, source, position = _reached(col, perm, arg)
    message = grad.double()[i, f] * (1 if value is None else value.double()[position])
    out = message.new_zeros(num_cols, grad.size(1))
    return out.index_put((source, f), message, accumulate=True)


@reference('spmm_max_backward_x_ordered')
def _spmm_max_backward_x_ordered_reference(
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
    return _spmm_max_backward_x_reference(rowptr, col, perm, value, arg, grad, t_rowptr.size(0) - 1)


@reference('spmm_max_backward_value')
def _spmm_max_backward_value_reference(
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


def _reached(
    col: Tensor, perm: Tensor | None, arg: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row and column of every maximum, and the source and position of the edge that attains it."""
    i, f = (arg >= 0).nonzero(as_tuple=True)
    edge = arg[i, f].long()
    return i, f, col[edge].long(), edge if perm is None else perm[edge].long()
