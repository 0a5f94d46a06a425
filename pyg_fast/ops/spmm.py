"""Aggregation over a graph: sum, mean, max and min, with every gradient."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._library import fake, ops, reference
from ._reference import edge_list, messages
from ._saved import save, saved
from ._transforms import transforms_active
from .graph import Graph, check_graph, graph_of
from .groups import Groups
from .spmm_max import reduce_max

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
REDUCE = ('sum', 'add', 'mean', 'max', 'min')


def spmm(
    graph: Graph | Tensor,
    x: Tensor,
    edge_weight: Tensor | None = None,
    reduce: str = 'sum',
) -> Tensor:
    r"""Aggregates the features of each node's in-neighbours.

    .. math::
        \mathbf{y}_i = \bigoplus_{e = (j, i) \in \mathcal{E}} w_e \cdot \mathbf{x}_j

    Differentiable in :obj:`x` and :obj:`edge_weight`, any number of times. Sums of float16 and
    bfloat16 run in float32. No tensor of size :math:`|\mathcal{E}| \times F` is ever made.
    Results are the same bits every time, with one exception: the gradient of
    :obj:`"max"`/:obj:`"min"` to :obj:`x` on CUDA adds atomically unless
    :func:`torch.use_deterministic_algorithms` is on. So do sums over a graph with atomic groups.

    Args:
        graph (EdgeIndex, Tensor or Graph): A graph prepared by
            :class:`~pyg_fast.transforms.ToCSR`; or a plain :obj:`edge_index`
            :math:`(2, |\mathcal{E}|)` of a square graph on the rows of :obj:`x`, sorted at every
            call; or an :class:`~pyg_fast.ops.Graph`.
        x (Tensor): Features of the source nodes :math:`(N_{src}, F)`, of type float32, float64,
            float16 or bfloat16.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the type of :obj:`x`,
            in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`), :obj:`"mean"`, :obj:`"max"` or
            :obj:`"min"`. :obj:`"mean"` divides by the number of edges. A node without edges gets
            zeros. Of several edges that reach the maximum the first takes the gradient.
            (default: :obj:`"sum"`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`.

    Raises:
        TypeError: If a dtype is not supported, or differs between :obj:`x` and
            :obj:`edge_weight`.
        ValueError: If a shape or device does not fit, or :obj:`reduce` is unknown.
        IndexError: If the graph holds a node that :obj:`x` does not have.
    """
    if reduce not in REDUCE:
        raise ValueError(f"'reduce' must be one of {REDUCE}, got {reduce!r}")
    check_features(x, 'x')
    graph = checked_graph(graph, x, 'x', torch.is_grad_enabled() and x.requires_grad)
    if edge_weight is not None:
        check_edge_weight(edge_weight, x, graph.num_edges)
    if reduce in ('max', 'min'):
        return reduce_max(graph, x, edge_weight, reduce == 'min')
    return reduce_sum(graph, x, edge_weight, mean=reduce == 'mean')


def reduce_sum(
    graph: Graph,
    x: Tensor,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
) -> Tensor:
    r"""The kernel behind :func:`spmm` with its prologue and epilogue, unchecked.

    .. math::
        \mathbf{y}_i = r_i \sum_{e = (j, i)} w_e c_j \mathbf{x}_j + d_i \mathbf{x}_i + \mathbf{b}

    Differentiable in :obj:`x`, :obj:`value` (:math:`w`) and :obj:`bias`, not in the scales, which
    are float32 (float64 for float64 features). :obj:`out_acc` returns float32 for halves.
    """
    if transforms_active():
        out = _spmm_reference(*graph[:3], value, x, row_scale, col_scale, diag, bias, mean)
        return out.to(acc_dtype(x.dtype) if out_acc else x.dtype)
    if not torch.is_grad_enabled():
        return sum_rows(
            graph[:3], graph.groups, value, x, row_scale, col_scale, diag, bias, mean, out_acc
        )
    constants = graph, row_scale, col_scale, diag, mean, out_acc
    return SpMM.apply(x, value, bias, constants)


def sum_rows(
    csr: tuple[Tensor, Tensor, Tensor | None],
    groups: Groups | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    self_row: Tensor | None = None,
) -> Tensor:
    """The raw op, by groups where there are any. Not differentiable."""
    args = (*csr, value, x, row_scale, col_scale, diag, bias, mean, out_acc, self_row)
    if groups is None:
        return ops.spmm.default(*args)
    *parts, atomic = groups
    atomic = atomic and not torch.are_deterministic_algorithms_enabled()
    return ops.spmm_groups.default(*args, *parts, atomic)


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over :obj:`dtype` run in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def inverse_degree(rowptr: Tensor, dtype: torch.dtype) -> Tensor:
    """One over the number of edges of each row, one for an empty row."""
    return rowptr.diff().clamp_(min=1).to(acc_dtype(dtype)).reciprocal_()


def with_mean(
    row_scale: Tensor | None, mean: bool, rowptr: Tensor, dtype: torch.dtype
) -> Tensor | None:
    # The row scale that does the division of a mean as well.
    if not mean:
        return row_scale
    inverse = inverse_degree(rowptr, dtype)
    return inverse if row_scale is None else inverse * row_scale


class SpMM(torch.autograd.Function):
    """Its backward is itself on the transpose, so it can be differentiated again."""

    # What takes no gradient is one argument: torch.compile refuses tensors that are given twice.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        constants: tuple[Any, ...],
    ) -> Tensor:
        graph, row_scale, col_scale, diag, mean, out_acc = constants
        needs_x, needs_value = ctx.needs_input_grad[:2]
        ctx.dtype = x.dtype
        if needs_x or needs_value:
            save(ctx, x if needs_value else None, value, constants)
        return sum_rows(
            graph[:3], graph.groups, value, x, row_scale, col_scale, diag, bias, mean, out_acc
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_value, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_value = None
        if needs_x or needs_value:
            x, value, (graph, row_scale, col_scale, diag, mean, _) = saved(ctx)
        if needs_x:
            scale = with_mean(row_scale, mean, graph.rowptr, grad.dtype)
            v = value
            if v is not None and v.dtype != acc_dtype(grad.dtype):
                v = v.to(grad.dtype)
            constants = transposed(graph), col_scale, scale, diag, False, False
            grad_x = SpMM.apply(grad, v, None, constants).to(ctx.dtype)
        if needs_value:
            options = graph, row_scale, col_scale, mean, value.size(0)
            grad_value = SDDMM.apply(grad, x.to(grad.dtype), options).to(value.dtype)
        return grad_x, grad_value, grad.sum(0) if needs_bias else None, None


class SDDMM(torch.autograd.Function):
    """Row i of `a` times row j of `b` for every edge (j, i): a sampled dense-dense product."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, constants: tuple[Any, ...]) -> Tensor:
        graph, row_scale, col_scale, mean, num_values = constants
        save(ctx, a, b, constants)
        return ops.sddmm(*graph[:3], a, b, row_scale, col_scale, mean, num_values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, (graph, row_scale, col_scale, mean, _) = saved(ctx)
        grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            constants = graph, row_scale, col_scale, None, mean, False
            grad_a = SpMM.apply(b, grad, None, constants)
        if ctx.needs_input_grad[1]:
            scale = with_mean(row_scale, mean, graph.rowptr, a.dtype)
            constants = transposed(graph), col_scale, scale, None, False, False
            grad_b = SpMM.apply(a, grad, None, constants)
        return grad_a, grad_b, None


def transposed(graph: Graph) -> Graph:
    """The graph that a backward pass reads.

    Raises:
        RuntimeError: If the graph was made without it.
    """
    if graph.t_rowptr is None:
        raise RuntimeError('this graph was made without the transpose that backward needs')
    return graph.t()


def checked_graph(graph: Graph | Tensor, x: Tensor, name: str, transpose: bool) -> Graph:
    """The graph on the rows of :obj:`x`, called :obj:`name`, with its transpose if asked for."""
    if not isinstance(graph, Graph):
        if not isinstance(graph, Tensor):
            raise TypeError(f"'graph' must be a tensor or Graph, got {type(graph).__name__}")
        check_device(graph, x, 'graph', name)
        num_src, num_dst = getattr(graph, '_sparse_size', (None, None))
        num_src = x.size(0) if num_src is None else num_src
        graph = graph_of(
            graph, num_src, num_src if num_dst is None else num_dst, transpose=transpose
        )
    else:
        check_graph(graph)
    check_device(graph.col, x, 'graph', name)
    if x.size(0) != graph.num_src:
        raise ValueError(
            f"'{name}' must have one row for each of the {graph.num_src} source nodes, got "
            f'{list(x.shape)}'
        )
    return graph


def check_features(x: Tensor, name: str) -> None:
    """Raises unless :obj:`x` is a matrix of a supported floating-point type."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"'{name}' must be a strided tensor, got {x.layout}")
    if x.dtype not in DTYPES:
        raise TypeError(f"'{name}' must be one of {DTYPES}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"'{name}' must have shape [num_nodes, channels], got {list(x.shape)}")


def check_device(tensor: Tensor, x: Tensor, name: str, of: str = 'x') -> None:
    """Raises unless :obj:`tensor` is where the features are."""
    if tensor.device != x.device:
        raise ValueError(f"'{name}' is on {tensor.device}, but '{of}' is on {x.device}")


def check_edge_weight(edge_weight: Tensor, x: Tensor, num_edges: int, of: str = 'x') -> None:
    """Raises unless there is one weight per edge, of the features' type and device."""
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"'edge_weight' must be a tensor, got {type(edge_weight).__name__}")
    if edge_weight.layout != torch.strided:
        raise TypeError(f"'edge_weight' must be a strided tensor, got {edge_weight.layout}")
    if edge_weight.dtype != x.dtype:
        raise TypeError(f"'edge_weight' must be {x.dtype} as '{of}' is, got {edge_weight.dtype}")
    if edge_weight.dim() != 1 or edge_weight.size(0) != num_edges:
        raise ValueError(
            f"'edge_weight' must have shape [{num_edges}], got {list(edge_weight.shape)}"
        )
    check_device(edge_weight, x, 'edge_weight', of)


@fake('spmm_groups')
@fake('spmm')
def _spmm_fake(rowptr: Tensor, x: Tensor, out_acc: bool) -> Tensor:
    dtype = acc_dtype(x.dtype) if out_acc else x.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=dtype)


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
    return out if bias is None else out + bias.double()


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
    group_size: int,
    atomic: bool,
) -> Tensor:
    """By the graph that the groups describe, as kernels read them."""
    group = torch.arange(group_row.size(0), device=col.device)
    is_long = group_row < 0
    slot = group[is_long] - long_shift[(-1 - group_row[is_long]).long()]
    row_of_slot = long_row.repeat_interleave(long_ptr.diff().long(), output_size=num_partials)
    row = group_row.index_put((is_long,), row_of_slot[slot])
    degree = rowptr.new_zeros(rowptr.size(0) - 1).index_add(0, row, group_ptr.diff())
    rowptr = pad(degree.cumsum(0), (1, 0))
    return _spmm_reference(
        rowptr, col, perm, value, x, row_scale, col_scale, diag, bias, mean, out_acc, self_row
    )


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
