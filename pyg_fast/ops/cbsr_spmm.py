"""Aggregation of CBSR features: sum and mean, with every gradient."""

from torch import Tensor

from ..graph.operator import SparseOperator
from ..graph.structure import Graph
from ._checks import check_edge_weight, checked_graph
from ._library import fake, reference
from ._numbers import acc_dtype
from ._reference import edge_list, messages
from .cbsr import CBSR
from .product import needs_transpose, product

REDUCE = ('sum', 'add', 'mean')


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

    where :math:`\mathbf{X}` is the matrix in :obj:`cbsr`. Differentiable in its values
    and in :obj:`edge_weight`, any number of times; the gradient of the values is computed at the
    stored columns only. Sums of float16 and bfloat16 run in float32.

    The result is bitwise reproducible. The gradient of the values on CUDA adds atomically
    (in float32 for float16 and bfloat16), unless :func:`torch.use_deterministic_algorithms` is on;
    then it gathers over the transposed graph. Nodes with more than 16,384 outgoing edges gather in
    any case if the graph is prepared: as many atomic additions in float32 would not be exact.

    Args:
        graph (EdgeIndex, Tensor or Graph): As in :func:`~pyg_fast.ops.spmm`.
        cbsr (CBSR): Features of the source nodes :math:`(N_{src}, F)`, from
            :func:`~pyg_fast.ops.maxk`.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the dtype of
            :obj:`cbsr`, in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`) or :obj:`"mean"`, which divides by the number
            of edges. A node without edges gets zeros. (default: :obj:`"sum"`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`, dense.

    Raises:
        TypeError: If :obj:`cbsr` is not a CBSR, or its dtype differs from :obj:`edge_weight`'s.
        ValueError: If a shape or device does not fit, :obj:`reduce` is unknown, or an edited column
            of :obj:`cbsr` occurs twice in a row.
        IndexError: If the graph holds a node that :obj:`cbsr` does not have, or an edited column
            is out of range.
    """
    if reduce not in REDUCE:
        raise ValueError(f"'reduce' must be one of {REDUCE}, got {reduce!r}")
    if not isinstance(cbsr, CBSR):
        raise TypeError(f"'cbsr' must be a CBSR, got {type(cbsr).__name__}")
    cbsr._check()
    graph = checked_graph(
        graph, cbsr.values, 'cbsr', needs_transpose(cbsr), edge_weight is not None
    )
    if edge_weight is not None:
        check_edge_weight(edge_weight, cbsr.values, graph.num_edges, 'cbsr')
    return product(SparseOperator(graph, edge_weight, mean=reduce == 'mean'), cbsr)


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
    t_rowptr: Tensor | None = None,
    t_col: Tensor | None = None,
    t_perm: Tensor | None = None,
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
