"""Products of a sparse operator with features: the choice of kernel, and the gradients."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..sparse.operator import SparseOperator

# Imported only to register the fake kernels and references of their raw ops.
from . import cbsr_spmm as cbsr_spmm
from . import sampled_spmm as sampled_spmm
from . import spmm as spmm
from ._library import ops, reference
from ._numbers import acc_dtype, adds_in_order
from ._saved import Context, save, saved
from ._transforms import transforms_active
from .cbsr import CBSR, to_dense
from .column_sums import column_sums
from .path import ALL_ROWS, Rows, expanded, no_result_in_place
from .sampling import of_sample, sampled_graph

# From this number of edges on, features are scaled before a sum of weighted edges, so the kernel
# reads one number less per edge; below, the extra launch costs more.
_SCALED_FIRST = 1 << 20
# Share of the columns from which on dense rows are faster than entries, forward and backward. On
# CUDA the share is smaller for float16 and bfloat16, since an entry costs about the same for all
# dtypes.
_DENSE_SHARE = {'cuda': (1 / 3, 1 / 3), 'cpu': (3 / 16, 1 / 2)}
_OF_HALF_PRECISION = 2 / 3
# On a CPU with wide vectors the forward share is smaller if the dense rows fit in the cache and
# many edges read each of them. Not for float64, whose rows have twice the bytes, and bfloat16, slow
# to widen on AVX2.
_OF_CACHED_ROWS = 3 / 5
_WIDE_VECTORS = torch.backends.cpu.get_cpu_capability() in ('AVX2', 'AVX512')
_CACHED_DTYPES = (torch.float32, torch.float16)
_CACHE_BYTES = 8 << 20
_CACHED_DEGREE = 32


class Quantized(NamedTuple):
    """8-bit features: :obj:`rows` times the :obj:`scale` of each row, for features of type
    :obj:`dtype`."""

    rows: Tensor
    scale: Tensor
    dtype: torch.dtype


def quantized(x: Tensor) -> Quantized:
    """Rounds the features of each row to multiples of 1/127 of the largest."""
    rows, scale = ops.quantize_rows.default(x.detach())
    return Quantized(rows, scale, x.dtype)


def product(
    op: SparseOperator,
    x: Tensor | CBSR | Quantized,
    bias: Tensor | None = None,
    out_acc: bool = False,
) -> Tensor:
    r"""A sparse operator times features.

    .. math::
        \mathbf{Y} = \left( \mathbf{D}_r \mathbf{A} \mathbf{D}_c + \mathbf{E} \right) \mathbf{X} +
        \mathbf{b}

    Differentiable in the features, in the operator's :obj:`value` and in :obj:`bias`, any number of
    times; 8-bit features have no gradient. Sums of float16 and bfloat16 run in float32.
    Unchecked.

    Args:
        op (SparseOperator): The operator.
        x (Tensor, CBSR or Quantized): Features :math:`(n_{src}, F)`; 8-bit ones only for a
            sample.
        bias (Tensor, optional): :math:`\mathbf{b}` of shape :math:`(F)`. (default: :obj:`None`)
        out_acc (bool): Whether features of float16 and bfloat16 give a float32 result; :obj:`bias`
            is float32 then. (default: :obj:`False`)

    Returns:
        Tensor: :math:`\mathbf{Y}` of shape :math:`(n_{dst}, F)`.
    """
    if not isinstance(x, Tensor):
        if isinstance(x, Quantized):
            return _quantized_product(op, x, bias, out_acc)
        if op.sampling is None and not transforms_active():
            constants = op._replace(value=None), x.columns, x.num_columns, out_acc
            return CBSRProduct.apply(x.values, op.value, bias, constants)
        x = to_dense(x.values, x.columns, x.num_columns)
    if transforms_active():
        return _in_torch(op, x, bias, out_acc)
    if not torch.is_grad_enabled():
        return raw_product(op, x, bias, out_acc)
    value = _suited(op.value, x.dtype)
    constant = op if value is None else op._replace(value=None)
    return DenseProduct.apply(x, value, bias, constant, out_acc)


def placed_product(op: SparseOperator, x: Tensor, rows: Rows) -> Tensor:
    """The product for dense features, its rows placed among those of all nodes; others are zero.
    Differentiable as :func:`product`."""
    if rows.nodes is None:
        return product(op, x)
    create_graph = torch.is_grad_enabled()
    if create_graph or transforms_active():
        return expanded(product(op, x), rows, create_graph)
    return raw_product(op, x, rows=rows)


def raw_product(
    op: SparseOperator,
    x: Tensor,
    bias: Tensor | None = None,
    out_acc: bool = False,
    rows: Rows = ALL_ROWS,
) -> Tensor:
    """The product for dense features, without gradient. Its rows are the :obj:`rows` of all nodes;
    others are zero, and no sample supports them."""
    return _dense_product(op, _suited(op.value, x.dtype), x, bias, out_acc, rows)


def _suited(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Entries in a dtype that kernels support with features of :obj:`dtype`."""
    if value is None or value.dtype == dtype or value.dtype == acc_dtype(dtype):
        return value
    return value.to(dtype)


def _dense_product(
    op: SparseOperator,
    value: Tensor | None,
    x: Tensor,
    bias: Tensor | None,
    out_acc: bool,
    rows: Rows = ALL_ROWS,
) -> Tensor:
    """The raw op for dense features, with :obj:`value` in place of the operator's entries."""
    graph, _, row_scale, col_scale, diag, self_row, _, _, mean, sampling = op
    if sampling is not None:
        assert rows.nodes is None
        return ops.sampled_spmm.default(
            *graph[:3], value, x, row_scale, col_scale, diag, bias, mean, out_acc, *sampling.args()
        )
    own = None
    if (
        value is not None and col_scale is not None and x.dtype == col_scale.dtype
        and graph.num_edges >= _SCALED_FIRST and self_row is None and rows.nodes is None
    ):  # fmt: skip
        own, x, col_scale, diag = x, x * col_scale.view(-1, 1), None, None
    args = (*graph[:3], value, x, row_scale, col_scale, diag, bias, mean, out_acc, self_row)
    placed: tuple[Tensor, int] | tuple[()] = ()
    if rows.nodes is not None:
        assert rows.position is not None
        placed = rows.nodes, rows.position.size(0)
    if graph.groups is None:
        out = ops.spmm.default(*args, *placed)
    else:
        *parts, atomic, order = graph.groups
        atomic = atomic and not torch.are_deterministic_algorithms_enabled()
        out = ops.spmm_groups.default(*args, *parts, atomic, order, *placed)
    if own is None or op.diag is None:
        return out
    diag = op.diag.view(-1, 1)
    return out.addcmul(diag, own) if no_result_in_place() else out.addcmul_(diag, own)


def _in_torch(op: SparseOperator, x: Tensor, bias: Tensor | None, out_acc: bool) -> Tensor:
    """The product in torch ops."""
    graph, row_scale = op.graph, op.row_scale
    if op.sampling is not None:
        weight = op.sampling.weight(graph.rowptr, op.mean, x.dtype)
        if weight is not None:
            row_scale = weight if row_scale is None else weight * row_scale
        graph = sampled_graph(graph, op.sampling)
    out = reference.spmm(
        *graph[:3], op.value, x, row_scale, op.col_scale, op.diag, bias, op.mean, False, op.self_row
    )
    return out.to(acc_dtype(x.dtype) if out_acc else x.dtype)


def _quantized_product(
    op: SparseOperator, x: Quantized, bias: Tensor | None, out_acc: bool
) -> Tensor:
    def single(t: Tensor | None) -> Tensor | None:
        return t if t is None else t.detach().float()

    def scaled(t: Tensor | None) -> Tensor | None:
        return t if t is None else x.scale * t.float()

    assert op.sampling is not None
    col_scale = x.scale if op.col_scale is None else scaled(op.col_scale)
    out = ops.sampled_spmm.default(
        *op.graph[:3], single(op.value), x.rows, single(op.row_scale), col_scale, scaled(op.diag),
        single(bias), op.mean, False, *op.sampling.args(),
    )  # fmt: skip
    return out.to(acc_dtype(x.dtype) if out_acc else x.dtype)


# Dense features ----------------------------------------------------------------------------------


class DenseProduct(torch.autograd.Function):
    """Its backward is itself on the transpose, so it is differentiable. The backward pass of a
    sample computes the sample again."""

    # One argument for the operator: torch.compile rejects a tensor that is passed twice.
    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        op: SparseOperator,
        out_acc: bool,
    ) -> Tensor:
        needs_x, needs_value = ctx.needs_input_grad[:2]
        ctx.dtype = x.dtype
        if needs_x or needs_value:
            save(ctx, x if needs_value else None, value, op)
        return _dense_product(op, value, x, bias, out_acc)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_value, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_value = times = None
        if needs_x or needs_value:
            x, value, op = saved(ctx)
            if op.sampling is not None:
                op, times = of_sample(op, needs_x, needs_value, grad.dtype)
        if needs_x:
            v = value if times is None else times if value is None else value * times
            grad_x = gradient_of_features(op, grad, v).to(ctx.dtype)
        if needs_value:
            grad_value = gradient_of_values(op, grad, x, value.size(0))
            grad_value = (grad_value if times is None else grad_value * times).to(value.dtype)
        grad_bias = column_sums(grad) if needs_bias else None
        return grad_x, grad_value, grad_bias, None, None


def gradient_of_features(op: SparseOperator, grad: Tensor, value: Tensor | None) -> Tensor:
    """The gradient of :func:`product` to dense features, in the dtype of :obj:`grad`, with
    :obj:`value` as the entries of the operator, unless it has none."""
    t_op = op.without_mean(grad.dtype).t()
    return product(t_op if value is None else t_op._replace(value=value), grad)


def gradient_of_values(op: SparseOperator, grad: Tensor, x: Tensor, num_values: int) -> Tensor:
    """The gradient of :func:`product` to the entries of the operator, in the dtype of
    :obj:`grad`."""
    return SDDMM.apply(grad, x.to(grad.dtype), op, num_values)


class SDDMM(torch.autograd.Function):
    """Row i of `a` times row j of `b` for every edge (j, i): a sampled dense-dense product."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, op: SparseOperator, num_values: int) -> Tensor:
        save(ctx, a, b, op)
        return ops.sddmm.default(
            *op.graph[:3], a, b, op.row_scale, op.col_scale, op.mean, num_values
        )

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, op = saved(ctx)
        op = op._replace(diag=None, self_row=None, t_diag=None, t_self_row=None)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_a = DenseProduct.apply(b, grad, None, op, False)
        if ctx.needs_input_grad[1]:
            grad_b = DenseProduct.apply(a, grad, None, op.without_mean(a.dtype).t(), False)
        return grad_a, grad_b, None, None


# CBSR features -----------------------------------------------------------------------------------


def needs_transpose(cbsr: CBSR) -> bool:
    """Whether the backward pass to the values reads the transposed graph."""
    if not (torch.is_grad_enabled() and cbsr.values.requires_grad):
        return False
    return adds_in_order(cbsr.values) or _is_dense_backward(cbsr.values, cbsr.k, cbsr.num_columns)


def _is_dense_forward(values: Tensor, num_columns: int, num_edges: int) -> bool:
    num_rows, k = values.shape
    share = _dense_shares(values)[0]
    if (
        values.is_cpu and _WIDE_VECTORS and values.dtype in _CACHED_DTYPES
        and num_rows * num_columns * values.dtype.itemsize <= _CACHE_BYTES
        and num_edges >= _CACHED_DEGREE * num_rows
    ):  # fmt: skip
        share *= _OF_CACHED_ROWS
    return k > share * num_columns


def _is_dense_backward(features: Tensor, k: int, num_columns: int) -> bool:
    return k > _dense_shares(features)[1] * num_columns


def _dense_shares(features: Tensor) -> tuple[float, float]:
    forward, backward = _DENSE_SHARE.get(features.device.type, (1, 1))
    if features.is_cuda and features.dtype.itemsize == 2:
        return forward * _OF_HALF_PRECISION, backward * _OF_HALF_PRECISION
    return forward, backward


# The operator, the columns of the stored values, the number of columns, and `out_acc`.
_Constants: TypeAlias = tuple[SparseOperator, Tensor, int, bool]


class CBSRProduct(torch.autograd.Function):
    """The SpGEMM of MaxK-GNN."""

    @staticmethod
    def forward(
        ctx: Context, values: Tensor, value: Tensor | None, bias: Tensor | None,
        constants: _Constants,
    ) -> Tensor:  # fmt: skip
        op, columns, num_columns, out_acc = constants
        ctx.dtype = values.dtype
        save(ctx, values if ctx.needs_input_grad[1] else None, value, constants)
        if _is_dense_forward(values, num_columns, op.graph.num_edges):
            x = ops.cbsr_to_dense.default(values, columns, num_columns)
            return _dense_product(op, value, x, bias, out_acc)
        return ops.cbsr_spmm.default(
            *op.graph[:3], value, values, columns, num_columns, op.row_scale, op.col_scale, op.diag,
            bias, op.mean, out_acc,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, value, constants = saved(ctx)
        grad_values = grad_value = None
        if ctx.needs_input_grad[0]:
            grad_values = SSpMM.apply(grad, _suited(value, grad.dtype), constants).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_value = CBSRSDDMM.apply(grad, values.to(grad.dtype), constants, value.size(0))
            grad_value = grad_value.to(value.dtype)
        grad_bias = column_sums(grad) if ctx.needs_input_grad[2] else None
        return grad_values, grad_value, grad_bias, None


class SSpMM(torch.autograd.Function):
    """The gradient of the values: a product with the transpose, only at their columns."""

    @staticmethod
    def forward(ctx: Context, grad: Tensor, value: Tensor | None, constants: _Constants) -> Tensor:
        op, columns, num_columns, _ = constants
        save(ctx, grad if ctx.needs_input_grad[1] else None, value, constants)
        graph, ordered = op.graph, adds_in_order(grad)
        dense = graph.t_rowptr is not None and _is_dense_backward(
            grad, columns.size(1), num_columns
        )
        if ordered and graph.t_rowptr is None:
            raise RuntimeError(
                'this graph was made without the transpose that a deterministic backward needs'
            )
        if not ordered and not dense:
            # Other graphs do not know whether they have hubs, and most lack the transpose.
            of_hubs = graph.transpose_of_hubs() if graph.t_groups is not None else ()
            if of_hubs and of_hubs[0] is not None:
                op = op.without_mean(grad.dtype)
            return ops.cbsr_spmm_backward.default(
                *graph[:3], value, grad, columns, op.row_scale, op.col_scale, op.diag, op.mean,
                *of_hubs,
            )  # fmt: skip
        t_op = op.without_mean(grad.dtype).t()
        if dense:
            out = _dense_product(t_op, value, grad, None, False)
            return ops.cbsr_sample.default(out, columns)
        return ops.cbsr_spmm_backward_ordered.default(
            *t_op.graph[:3], value, grad, columns, t_op.row_scale, t_op.col_scale, t_op.diag
        )

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dense, value, constants = saved(ctx)
        constants = *constants[:3], False
        grad_dense = grad_value = None
        if ctx.needs_input_grad[0]:
            grad_dense = CBSRProduct.apply(grad, value, None, constants)
        if ctx.needs_input_grad[1]:
            grad_value = CBSRSDDMM.apply(dense, grad, constants, value.size(0)).to(value.dtype)
        return grad_dense, grad_value, None


class CBSRSDDMM(torch.autograd.Function):
    """Dense row i times stored row j for every edge (j, i): the gradient of edge weights."""

    @staticmethod
    def forward(
        ctx: Context, dense: Tensor, values: Tensor, constants: _Constants, num_values: int
    ) -> Tensor:
        op, columns = constants[:2]
        save(ctx, dense, values, constants)
        return ops.cbsr_sddmm.default(
            *op.graph[:3], dense, values, columns, op.row_scale, op.col_scale, op.mean, num_values
        )

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        dense, values, (op, columns, num_columns, _) = saved(ctx)
        constants = op._replace(diag=None), columns, num_columns, False
        grad_dense = grad_values = None
        if ctx.needs_input_grad[0]:
            grad_dense = CBSRProduct.apply(values, grad, None, constants)
        if ctx.needs_input_grad[1]:
            grad_values = SSpMM.apply(dense, grad, constants)
        return grad_dense, grad_values, None, None
