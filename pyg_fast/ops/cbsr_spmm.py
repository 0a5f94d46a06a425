"""Aggregation of CBSR features: sum and mean, with every gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._library import fake, ops, reference
from ._reference import edge_list, messages
from ._saved import save, saved
from ._transforms import transforms_active
from .cbsr import CBSR, to_dense
from .graph import Graph
from .spmm import acc_dtype, check_edge_weight, checked_graph, reduce_sum, with_mean

REDUCE = ('sum', 'add', 'mean')
# The shares of the columns from which on dense rows are read faster than entries, forward and
# backward; on CUDA those of halves sooner, since an entry costs about the same whatever its type.
_DENSE_SHARE = {'cuda': (1 / 3, 1 / 3), 'cpu': (3 / 16, 1 / 2)}
_OF_HALVES = 2 / 3


def cbsr_spmm(
    graph: Graph | Tensor,
    cbsr: CBSR,
    edge_weight: Tensor | None = None,
    reduce: str = 'sum',
) -> Tensor:
    r"""Aggregates the stored features of each node's in-neighbours: the SpGEMM of the `"MaxK-GNN"
    <https://arxiv.org/abs/2312.08656>`_ paper, whose backward is its SSpMM.

    .. math::
        \mathbf{y}_i = \bigoplus_{e = (j, i) \in \mathcal{E}} w_e \cdot \mathbf{x}_j

    where :math:`\mathbf{X}` is the matrix that :obj:`cbsr` stands for. Differentiable in its values
    and in :obj:`edge_weight`, any number of times; the gradient of the values is computed at the
    stored columns only. Sums of float16 and bfloat16 run in float32.

    The result is the same bits every time. The gradient of the values on CUDA adds atomically
    (float32 for halves), unless :func:`torch.use_deterministic_algorithms` is on, which gathers
    over the transposed graph instead.

    Args:
        graph (EdgeIndex, Tensor or Graph): As in :func:`~pyg_fast.ops.spmm`.
        cbsr (CBSR): Features of the source nodes :math:`(N_{src}, F)`, as
            :func:`~pyg_fast.ops.maxk` makes them.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the type of
            :obj:`cbsr`, in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`) or :obj:`"mean"`, which divides by the number
            of edges. A node without edges gets zeros. (default: :obj:`"sum"`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`, dense.

    Raises:
        TypeError: If :obj:`cbsr` is none, or the type of :obj:`edge_weight` differs from its.
        ValueError: If a shape or device does not fit, :obj:`reduce` is unknown, or a column of
            :obj:`cbsr` was edited and occurs twice in a row.
        IndexError: If the graph holds a node that :obj:`cbsr` does not have, or an edited column
            is out of range.
    """
    if reduce not in REDUCE:
        raise ValueError(f"'reduce' must be one of {REDUCE}, got {reduce!r}")
    if not isinstance(cbsr, CBSR):
        raise TypeError(f"'cbsr' must be a CBSR, got {type(cbsr).__name__}")
    cbsr._check()
    graph = checked_graph(graph, cbsr.values, 'cbsr', needs_transpose(cbsr))
    if edge_weight is not None:
        check_edge_weight(edge_weight, cbsr.values, graph.num_edges, 'cbsr')
    return aggregate_cbsr(graph, cbsr, edge_weight, mean=reduce == 'mean')


def aggregate_cbsr(
    graph: Graph,
    cbsr: CBSR,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
) -> Tensor:
    r"""The kernel behind :func:`cbsr_spmm` with its prologue and epilogue, unchecked.

    .. math::
        \mathbf{y}_i = r_i \sum_{e = (j, i)} w_e c_j \mathbf{x}_j + d_i \mathbf{x}_i + \mathbf{b}

    Differentiable in the values of :obj:`cbsr`, :obj:`value` (:math:`w`) and :obj:`bias`, not in
    the scales, which are float32 (float64 for float64 features). :obj:`out_acc` returns float32
    for halves.
    """
    if transforms_active():
        dense = to_dense(cbsr.values, cbsr.columns, cbsr.num_columns)
        return reduce_sum(graph, dense, value, bias, row_scale, col_scale, diag, mean, out_acc)
    constants = _Constants(
        graph, cbsr.columns, cbsr.num_columns, row_scale, col_scale, diag, mean, out_acc
    )
    return _CbsrSpMM.apply(cbsr.values, value, bias, constants)


def needs_transpose(cbsr: CBSR) -> bool:
    """Whether a backward pass to the values will read the transposed graph."""
    if not (torch.is_grad_enabled() and cbsr.values.requires_grad):
        return False
    return _is_ordered(cbsr.values) or _is_dense(cbsr.values, cbsr.k, cbsr.num_columns, True)


def _is_ordered(values: Tensor) -> bool:
    return values.is_cuda and torch.are_deterministic_algorithms_enabled()


def _is_dense(features: Tensor, k: int, num_columns: int, backward: bool) -> bool:
    shares = _DENSE_SHARE.get(features.device.type, (1, 1))
    share = shares[1] if backward else shares[0]
    if features.is_cuda and features.dtype.itemsize == 2:
        share *= _OF_HALVES
    return k > share * num_columns


class _Constants(NamedTuple):
    """What takes no gradient. One argument of a Function: torch.compile refuses tensors that are
    given twice."""

    graph: Graph
    columns: Tensor
    num_columns: int
    row_scale: Tensor | None
    col_scale: Tensor | None
    diag: Tensor | None
    mean: bool
    out_acc: bool


class _CbsrSpMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, value: Tensor | None, bias: Tensor | None, constants: Any
    ) -> Tensor:
        graph, columns, num_columns, row_scale, col_scale, diag, mean, out_acc = constants
        ctx.dtype = values.dtype
        save(ctx, values if ctx.needs_input_grad[1] else None, value, constants)
        rowptr, col, perm = graph[:3]
        if _is_dense(values, values.size(1), num_columns, False):
            x = ops.cbsr_to_dense(values, columns, num_columns)
            return ops.spmm(
                rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc
            )
        return ops.cbsr_spmm(
            rowptr, col, perm, value, values, columns, num_columns, row_scale, col_scale, diag,
            bias, mean, out_acc,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, value, constants = saved(ctx)
        grad_values = grad_value = None
        if ctx.needs_input_grad[0]:
            v = value
            if v is not None and v.dtype != acc_dtype(grad.dtype):
                v = v.to(grad.dtype)
            grad_values = _CbsrSSpMM.apply(grad, v, constants).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            grad_value = _CbsrSDDMM.apply(
                grad, values.to(grad.dtype), constants, value.size(0)
            ).to(value.dtype)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_values, grad_value, grad_bias, None


class _CbsrSSpMM(torch.autograd.Function):
    """The gradient of the values: a product with the transpose, sampled at their columns."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, value: Tensor | None, constants: Any) -> Tensor:
        graph, columns, num_columns, row_scale, col_scale, diag, mean, _ = constants
        save(ctx, grad if ctx.needs_input_grad[1] else None, value, constants)
        ordered = _is_ordered(grad)
        dense = _is_dense(grad, columns.size(1), num_columns, True) and graph.t_rowptr is not None
        if ordered and graph.t_rowptr is None:
            raise RuntimeError(
                'this graph was made without the transpose that a deterministic backward needs'
            )
        if not ordered and not dense:
            return ops.cbsr_spmm_backward(
                graph.rowptr, graph.col, graph.perm, value, grad, columns, row_scale, col_scale,
                diag, mean,
            )  # fmt: skip
        scale = with_mean(row_scale, mean, graph.rowptr, grad.dtype)
        csr = graph.t_rowptr, graph.t_col, graph.t_perm
        if dense:
            out = ops.spmm(*csr, value, grad, col_scale, scale, diag, None, False, False)
            return ops.cbsr_sample(out, columns)
        return ops.cbsr_spmm_backward_ordered(*csr, value, grad, columns, col_scale, scale, diag)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dense, value, constants = saved(ctx)
        constants = constants._replace(out_acc=False)
        grad_dense = grad_value = None
        if ctx.needs_input_grad[0]:
            grad_dense = _CbsrSpMM.apply(grad, value, None, constants)
        if ctx.needs_input_grad[1]:
            grad_value = _CbsrSDDMM.apply(dense, grad, constants, value.size(0)).to(value.dtype)
        return grad_dense, grad_value, None


class _CbsrSDDMM(torch.autograd.Function):
    """Dense row i times stored row j for every edge (j, i): the gradient of edge weights."""

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, values: Tensor, constants: Any, num_values: int
    ) -> Tensor:
        graph, columns, _, row_scale, col_scale, _, mean, _ = constants
        save(ctx, dense, values, constants)
        return ops.cbsr_sddmm(
            graph.rowptr, graph.col, graph.perm, dense, values, columns, row_scale, col_scale, mean,
            num_values,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dense, values, constants = saved(ctx)
        constants = constants._replace(diag=None, out_acc=False)
        grad_dense = grad_values = None
        if ctx.needs_input_grad[0]:
            grad_dense = _CbsrSpMM.apply(values, grad, None, constants)
        if ctx.needs_input_grad[1]:
            grad_values = _CbsrSSpMM.apply(dense, grad, constants)
        return grad_dense, grad_values, None, None


@fake('cbsr_spmm')
def _cbsr_spmm_fake(rowptr: Tensor, values: Tensor, dim: int, out_acc: bool) -> Tensor:
    dtype = acc_dtype(values.dtype) if out_acc else values.dtype
    return values.new_empty(rowptr.size(0) - 1, dim, dtype=dtype)


@fake('cbsr_spmm_backward')
def _cbsr_spmm_backward_fake(grad: Tensor, columns: Tensor) -> Tensor:
    return grad.new_empty(columns.size(0), columns.size(1))


@fake('cbsr_spmm_backward_ordered')
def _cbsr_spmm_backward_ordered_fake(grad: Tensor, columns: Tensor) -> Tensor:
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
) -> Tensor:
    row, source, position = edge_list(rowptr, col, perm)
    grad = grad.double()
    message = messages(grad, value, row, position)
    if mean:
        message = message / rowptr.diff()[row, None]
    if row_scale is not None:
        message = message * row_scale.double()[row, None]
    if col_scale is not None:
        message = message * col_scale.double()[source, None]
    out = grad.new_zeros(columns.size(0), grad.size(1)).index_add(0, source, message)
    if diag is not None:
        out = out + diag.double().view(-1, 1) * grad
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
