"""Sum aggregation, either over a sorted graph or by scattering over unsorted edges."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..graph.graph import graph_of
from ..graph.operator import SparseOperator
from ..graph.structure import Graph, check_graph
from ._checks import check_device, check_edge_weight, check_features
from ._edges import check_edge_index, check_invalid, kernel_index
from ._library import fake, ops, reference
from ._numbers import check_number
from ._reference import messages
from ._saved import save, saved
from ._transforms import transforms_active
from .product import product
from .to_csr import counts_in_int64

MODES = ('auto', 'reduce', 'scatter')


def aggregate(
    graph: Graph | Tensor,
    x: Tensor,
    edge_weight: Tensor | None = None,
    mode: str = 'auto',
    num_dst: int | None = None,
) -> Tensor:
    r"""Sums the features of each node's in-neighbours in one of the two ways of the `"fuseGNN:
    Accelerating Graph Convolutional Neural Network Training on GPGPU"
    <https://doi.org/10.1145/3400302.3415610>`_ paper (ICCAD 2020).

    .. math::
        \mathbf{y}_i = \sum_{e = (j, i) \in \mathcal{E}} w_e \cdot \mathbf{x}_j

    Gather-apply-reduce sums over the edges of each destination and needs a sorted graph.
    Gather-apply-scatter reads the edges in the given order, adds each to its destination, and
    needs no conversion. Differentiable in :obj:`x` and :obj:`edge_weight`, any number of times.
    Sums of float16 and bfloat16 run in float32. No tensor of size :math:`|\mathcal{E}| \times F`
    is allocated.

    On CUDA scattering adds atomically: the last bits of its results vary from run to run. With
    :func:`torch.use_deterministic_algorithms` every mode sorts. All other results are bitwise
    reproducible.

    Args:
        graph (EdgeIndex, Tensor or Graph): A plain :obj:`edge_index` :math:`(2, |\mathcal{E}|)`
            of any integer type; or a graph prepared by :class:`~pyg_fast.transforms.ToCSR`; or an
            :class:`~pyg_fast.graph.Graph`, which cannot be scattered over.
        x (Tensor): Features of the source nodes :math:`(N_{src}, F)`, float32, float64,
            float16 or bfloat16.
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the dtype of :obj:`x`,
            in the order of the edges. (default: :obj:`None`, all one)
        mode (str): :obj:`"reduce"`, :obj:`"scatter"`, or :obj:`"auto"`: reduce over a prepared
            graph, and over a plain :obj:`edge_index` with enough edges that sorting pays off.
            (default: :obj:`"auto"`)
        num_dst (int, optional): Number of destination nodes. (default: :obj:`None`, as in the
            graph, or the number of sources)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`.

    Raises:
        TypeError: If a dtype is not supported, or differs between :obj:`x` and
            :obj:`edge_weight`.
        ValueError: If a shape, size or device does not fit, :obj:`mode` is unknown, or
            :obj:`"scatter"` is used with an :class:`~pyg_fast.graph.Graph`.
        IndexError: If an edge names a node that does not exist; on CUDA the next call raises it,
            see :func:`to_csr`. Memory is never accessed out of bounds.
    """
    if mode not in MODES:
        raise ValueError(f"'mode' must be one of {MODES}, got {mode!r}")
    check_features(x, 'x')
    if isinstance(graph, Graph):
        if mode == 'scatter':
            raise ValueError("'graph' must be an edge_index for mode='scatter', got a Graph")
        check_graph(graph, edge_weight is not None)
        known: tuple[int | None, int | None] = graph.num_src, graph.num_dst
        check_device(graph.col, x, 'graph')
        num_edges = graph.num_edges
    else:
        check_edge_index(graph)
        check_device(graph, x, 'graph')
        known = getattr(graph, '_sparse_size', (None, None))
        num_edges = graph.size(1)
    num_src = x.size(0)
    if known[0] is not None and known[0] != num_src:
        raise ValueError(
            f"'x' must have one row for each of the {known[0]} source nodes, got {list(x.shape)}"
        )
    if num_dst is None:
        num_dst = num_src if known[1] is None else known[1]
    else:
        check_number('num_dst', num_dst)
        if num_dst != (num_dst if known[1] is None else known[1]):
            raise ValueError(
                f"'num_dst' must be {known[1]} as the graph has it, got {num_dst}"
            )
    if edge_weight is not None:
        check_edge_weight(edge_weight, x, num_edges)
    if isinstance(graph, Graph):
        return product(SparseOperator(graph, edge_weight), x)
    if mode == 'auto':
        prepared = isinstance(graph, EdgeIndex)
        sort = prepared or sorting_pays(num_edges, x.size(1), x.is_cuda)
        mode = 'reduce' if sort else 'scatter'
    if mode == 'reduce':
        transpose = torch.is_grad_enabled() and x.requires_grad
        graph = graph_of(
            graph, num_src, num_dst, transpose=transpose, values=edge_weight is not None
        )
        return product(SparseOperator(graph, edge_weight), x)
    edge_index = graph._data if isinstance(graph, EdgeIndex) else graph
    return scatter_sum(edge_index, x, edge_weight, num_dst)


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


def _scatter(x: Tensor, value: Tensor | None, constants: tuple[Any, ...], check: bool) -> Tensor:
    """The kernel, without gradient."""
    edges, row_scale, col_scale, diag, num_dst, reverse, drop_loops = constants
    size = (num_dst, x.size(0)) if reverse else (x.size(0), num_dst)
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():
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
        ctx: Any, x: Tensor, value: Tensor | None, constants: tuple[Any, ...], check: bool
    ) -> Tensor:
        needs_x, needs_value = ctx.needs_input_grad[:2]
        constants = kernel_index(constants[0]), *constants[1:]
        if needs_x or needs_value:
            save(ctx, x if needs_value else None, value, constants, x.size(0))
        return _scatter(x, value, constants, check)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
    def forward(ctx: Any, a: Tensor, b: Tensor, constants: tuple[Any, ...]) -> Tensor:
        edges, row_scale, col_scale, reverse, drop_loops = constants
        save(ctx, a, b, constants)
        if reverse:
            return ops.sddmm_coo(edges, b, a, col_scale, row_scale, drop_loops)
        return ops.sddmm_coo(edges, a, b, row_scale, col_scale, drop_loops)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
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
