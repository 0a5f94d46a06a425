"""Sums by scattering over unsorted edges."""

from typing import TypeAlias

import torch
from torch import Tensor

from ..sparse.to_csr import counts_in_int64
from ._edges import check_invalid, kernel_index
from ._library import fake, ops, reference
from ._numbers import adds_in_order
from ._reference import messages
from ._saved import Context, save, saved
from ._transforms import transforms_active

# Above this number of columns on a CPU, and of additions on CUDA, sorting edges (for the transpose
# too) is faster than scattering, see benchmarks/aggregate.py. Threads that scatter to one hub wait
# for each other: with more additions they would take longer than a sort.
_CPU_COLUMNS = 32
_CUDA_ADDITIONS = 4_000_000


def sorting_pays(num_edges: int, columns: int, cuda: bool) -> bool:
    """Whether sorting a plain edge_index is faster than scattering over it."""
    if cuda and torch.are_deterministic_algorithms_enabled():
        return True
    return num_edges * columns > _CUDA_ADDITIONS if cuda else columns > _CPU_COLUMNS


def scatter_sum(
    edge_index: Tensor,
    x: Tensor,
    value: Tensor | None,
    num_dst: int,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    reverse: bool = False,
    drop_loops: bool = False,
) -> Tensor:
    r"""The scatter kernel with its prologue and epilogue, for a plain edge_index.

    .. math::
        \mathbf{y}_i = r_i \sum_{e = (j, i)} w_e c_j \mathbf{x}_j + d_i \mathbf{x}_i

    Checks only the indices of :obj:`edge_index`. Differentiable in :obj:`x` and :obj:`value`
    (:math:`w`), not in the scales, which are float32 (float64 for float64 features).
    :obj:`reverse` sums at sources, :obj:`drop_loops` skips self-loops.
    """
    if transforms_active():
        edges = kernel_index(edge_index)
        out, invalid = _spmm_coo_reference(
            edges, value, x, row_scale, col_scale, diag, num_dst, reverse, drop_loops, True
        )
        check_invalid(edge_index, invalid, (x.size(0), num_dst), wait=True)
        return out.to(x.dtype)
    constants = edge_index, row_scale, col_scale, diag, num_dst, reverse, drop_loops
    return SpMMCOO.apply(x, value, constants, True)


# `edge_index`, scales of rows and columns, diagonal, `num_dst`, `reverse`, `drop_loops`.
_Constants: TypeAlias = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, int, bool, bool]


def _scatter(x: Tensor, value: Tensor | None, constants: _Constants, check: bool) -> Tensor:
    """The kernel, without gradient."""
    edges, row_scale, col_scale, diag, num_dst, reverse, drop_loops = constants
    size = (num_dst, x.size(0)) if reverse else (x.size(0), num_dst)
    if adds_in_order(x):
        index64 = counts_in_int64(edges.size(1))
        *csr, invalid = ops.to_csr.default(edges, *size, reverse, index64, drop_loops, check)
        if check:
            check_invalid(edges, invalid, size)
        return ops.spmm(*csr, value, x, row_scale, col_scale, diag, None, False, False)
    # On CUDA the kernel records an edge out of range: counting them takes longer.
    count = check and (not x.is_cuda or torch.compiler.is_compiling())
    out, invalid = ops.spmm_coo.default(
        edges, value, x, row_scale, col_scale, diag, num_dst, reverse, drop_loops, count, check
    )
    if check:
        check_invalid(edges, invalid, size)
    return out


class SpMMCOO(torch.autograd.Function):
    """Its backward is itself with sources and destinations swapped, so it is differentiable."""

    # One argument for all constants: torch.compile rejects a tensor that is passed twice.
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, value: Tensor | None, constants: _Constants, check: bool
    ) -> Tensor:
        needs_x, needs_value = ctx.needs_input_grad[:2]
        constants = kernel_index(constants[0]), *constants[1:]
        if needs_x or needs_value:
            save(ctx, x if needs_value else None, value, constants, x.size(0))
        return _scatter(x, value, constants, check)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, value, constants, num_src = saved(ctx)
        edges, row_scale, col_scale, diag, _, reverse, drop_loops = constants
        grad_x = grad_value = None
        if ctx.needs_input_grad[0]:
            options = edges, col_scale, row_scale, diag, num_src, not reverse, drop_loops
            again = SpMMCOO.apply if torch.is_grad_enabled() else _scatter
            grad_x = again(grad, value, options, False)
        if ctx.needs_input_grad[1]:
            ends = edges, row_scale, col_scale, reverse, drop_loops
            grad_value = SDDMMCOO.apply(grad, x, ends).to(value.dtype)
        return grad_x, grad_value, None, None


class SDDMMCOO(torch.autograd.Function):
    """Row i of `a` times row j of `b` for every edge (j, i), or (i, j) if `reverse`."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, constants: tuple[object, ...]) -> Tensor:
        edges, row_scale, col_scale, reverse, drop_loops = constants
        save(ctx, a, b, constants)
        if reverse:
            return ops.sddmm_coo(edges, b, a, col_scale, row_scale, drop_loops)
        return ops.sddmm_coo(edges, a, b, row_scale, col_scale, drop_loops)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, (edges, row_scale, col_scale, reverse, drop_loops) = saved(ctx)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            options = edges, row_scale, col_scale, None, a.size(0), reverse, drop_loops
            grad_a = SpMMCOO.apply(b, grad, options, False)
        if ctx.needs_input_grad[1]:
            options = edges, col_scale, row_scale, None, b.size(0), not reverse, drop_loops
            grad_b = SpMMCOO.apply(a, grad, options, False)
        return grad_a, grad_b, None


@fake('spmm_coo')
def _spmm_coo_fake(x: Tensor, num_dst: int, count: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(num_dst, x.size(1)), x.new_empty(int(count), dtype=torch.int64)


@fake('sddmm_coo')
def _sddmm_coo_fake(edge_index: Tensor, a: Tensor) -> Tensor:
    return a.new_empty(edge_index.size(1))


@reference('spmm_coo')
def _spmm_coo_reference(
    edge_index: Tensor,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    num_dst: int = 0,
    reverse: bool = False,
    drop_loops: bool = False,
    count: bool = False,
    report: bool = False,
) -> tuple[Tensor, Tensor]:
    src, dst = edge_index.long().flip(0) if reverse else edge_index.long()
    x = x.double()
    valid = (src >= 0) & (src < x.size(0)) & (dst >= 0) & (dst < num_dst)
    used = (valid & (src != dst) if drop_loops else valid).nonzero().view(-1)
    message = messages(x, value, src[used], used)
    if col_scale is not None:
        message = message * col_scale.double()[src[used], None]
    out = x.new_zeros(num_dst, x.size(1)).index_add(0, dst[used], message)
    if row_scale is not None:
        out = out * row_scale.double().view(-1, 1)
    if diag is not None:
        out = out + diag.double().view(-1, 1) * x
    return out, (~valid).sum().view(1)[: int(count)]


@reference('sddmm_coo')
def _sddmm_coo_reference(
    edge_index: Tensor,
    a: Tensor,
    b: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    drop_loops: bool,
) -> Tensor:
    src, dst = edge_index.long()
    valid = (src >= 0) & (src < b.size(0)) & (dst >= 0) & (dst < a.size(0))
    used = (valid & (src != dst) if drop_loops else valid).nonzero().view(-1)
    dot = (a.double()[dst[used]] * b.double()[src[used]]).sum(1)
    if row_scale is not None:
        dot = dot * row_scale.double()[dst[used]]
    if col_scale is not None:
        dot = dot * col_scale.double()[src[used]]
    return dot.new_zeros(edge_index.size(1)).index_add(0, used, dot)
