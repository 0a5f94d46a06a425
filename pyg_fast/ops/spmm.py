"""Aggregation over a graph: sum, mean, max and min, with every gradient."""

from typing import Any

import torch
from torch import Tensor

from . import reference
from ._library import ops
from ._saved import save, saved
from ._transforms import transforms_active
from .graph import Graph, check_graph, graph_of
from .groups import Groups

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
        out = reference.spmm(*graph[:3], value, x, row_scale, col_scale, diag, bias, mean)
        return out.to(acc_dtype(x.dtype) if out_acc else x.dtype)
    if not torch.is_grad_enabled():
        return sum_rows(
            graph[:3], graph.groups, value, x, row_scale, col_scale, diag, bias, mean, out_acc
        )
    constants = graph, row_scale, col_scale, diag, mean, out_acc
    return SpMM.apply(x, value, bias, constants)


def reduce_max(
    graph: Graph, x: Tensor, value: Tensor | None = None, minimum: bool = False
) -> Tensor:
    """The maximum (or minimum) of what the neighbours send, unchecked."""
    if transforms_active():
        return reference.spmm_max(*graph[:3], value, x, minimum)[0].to(x.dtype)
    return SpMMMax.apply(x, value, graph, minimum)


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


class SpMMMax(torch.autograd.Function):
    """Maximum (or minimum) over edges; the gradient goes to the edge that reached it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Tensor | None, graph: Graph, minimum: bool
    ) -> Tensor:
        out, arg = ops.spmm_max(*graph[:3], value, x, minimum)
        needs_value = value is not None and ctx.needs_input_grad[1]
        # A second derivative to `value` needs x as well.
        save(ctx, x if needs_value else None, value, arg, graph, x.size(0))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, value, arg, graph, num_src = saved(ctx)
        rowptr, col, perm, t_rowptr, t_col, t_perm = graph[:6]
        grad_x = grad_value = None
        if torch.is_grad_enabled():  # create_graph=True: torch's own ops.
            grad_x, grad_value = _max_backward(
                grad, x, value, arg, col, perm, num_src, ctx.needs_input_grad
            )
            return grad_x, grad_value, None, None
        if ctx.needs_input_grad[0]:
            if grad.is_cuda and torch.are_deterministic_algorithms_enabled():
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
                grad_x = ops.spmm_max_backward_x(rowptr, col, perm, value, arg, grad, num_src)
        if ctx.needs_input_grad[1]:
            grad_value = ops.spmm_max_backward_value(
                rowptr, col, perm, arg, grad, x, value.size(0)
            )
        return grad_x, grad_value, None, None


def _t_position(rowptr: Tensor, perm: Tensor | None, t_perm: Tensor | None) -> Tensor | None:
    # For each edge of the transpose its position in `col`.
    if perm is None:
        return t_perm
    num_edges = perm.size(0)
    position = torch.arange(num_edges, dtype=perm.dtype, device=perm.device)
    # The zeros behind the last edge must not pass for edge 0.
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
    # The backward of SpMMMax in differentiable ops of size N x F.
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
