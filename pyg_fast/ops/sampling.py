"""Samples of a graph's edges as separate graphs."""

from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from ..sparse.graph import Graph
from ..sparse.operator import Sampling, SparseOperator
from ._library import fake, ops, reference
from ._numbers import acc_dtype
from ._reference import mixed_bits

_PAPER_STRIDE = 577


def sampled_graph(graph: Graph, sampling: Sampling, transpose: bool = False) -> Graph:
    r"""The graph of the sampled edges, in the order of :obj:`graph`'s edge weights.

    An edge that :obj:`"paper"` samples several times occurs as often. The arrays have room for
    :math:`\min(|\mathcal{E}|, N_{dst} \cdot S)` edges; unused slots hold an arbitrary valid edge.
    """
    sampled, edges = _kept_rows(graph, sampling)
    if not transpose:
        return sampled
    t_csr = _transposed(graph, sampling, sampled, edges)
    return sampled._replace(t_rowptr=t_csr[0], t_col=t_csr[1], t_perm=t_csr[2])


def sampled_on_its_own(
    graph: Graph, sampling: Sampling, transpose: bool = False
) -> tuple[Graph, Tensor]:
    """The same graph with positions into its own edge weights, and the position of each edge in the
    edge weights of :obj:`graph`."""
    sampled, edges = _kept_rows(graph, sampling)
    assert sampled.perm is not None
    own = sampled._replace(perm=None)
    if transpose:
        t_rowptr, t_col, t_perm = _sorted_by_source(sampled, edges)
        own = own._replace(t_rowptr=t_rowptr, t_col=t_col, t_perm=t_perm)
    return own, sampled.perm


def _num_slots(graph: Graph, sampling: Sampling) -> int:
    return min(graph.num_edges, graph.num_dst * sampling.num_samples)


def _kept_rows(graph: Graph, sampling: Sampling) -> tuple[Graph, Tensor]:
    """The graph, and its edges; unused slots have row -1."""
    taken = graph.rowptr.diff().clamp_(max=sampling.num_samples)
    rowptr = F.pad(taken.cumsum(0, dtype=graph.rowptr.dtype), (1, 0))
    edges, perm = ops.sample_edges.default(
        *graph[:3], rowptr, _num_slots(graph, sampling), *sampling.args()
    )
    size = graph.num_src, graph.num_dst
    return Graph(rowptr, edges[0], perm, None, None, None, *size), edges


def _transposed(
    graph: Graph, sampling: Sampling, sampled: Graph | None, edges: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled edges by source: selected from the transpose on a GPU, if the graph has one with
    positions of rows; otherwise sorted."""
    if _picks(graph, sampling):
        return ops.sample_transposed.default(
            graph.rowptr, graph.t_rowptr, graph.t_col, graph.t_perm, _num_slots(graph, sampling),
            *sampling.args(),
        )  # fmt: skip
    if sampled is None or edges is None:
        sampled, edges = _kept_rows(graph, sampling)
    assert sampled.perm is not None
    t_rowptr, t_col, order = _sorted_by_source(sampled, edges)
    perm = sampled.perm
    return t_rowptr, t_col, perm if perm.size(0) == 0 else perm[order.long()]


def _sorted_by_source(sampled: Graph, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Unused slots have no row and are skipped.
    return ops.to_csr.default(
        edges, sampled.num_src, sampled.num_dst, True, _in_int64(sampled), False, False
    )[:3]


def _in_int64(graph: Graph) -> bool:
    return graph.rowptr.dtype == torch.int64


def _picks(graph: Graph, sampling: Sampling) -> bool:
    return (
        graph.col.is_cuda
        and graph.perm is None
        and graph.t_perm is not None
        and sampling.strategy != 'paper'
    )


def of_sample(
    op: SparseOperator, needs_x: bool, needs_value: bool, dtype: torch.dtype
) -> tuple[SparseOperator, Tensor | None]:
    """The operator of the sampled edges with their factors, as the backward pass for gradients of
    :obj:`dtype` needs it; and the multiplicity of each edge, where it may be above one."""
    graph, sampling = op.graph, op.sampling
    assert sampling is not None
    row_scale = op.row_scale
    weight = sampling.weight(graph.rowptr, op.mean, dtype)
    if weight is not None:
        row_scale = weight if row_scale is None else weight * row_scale
    if op.mean:
        taken = graph.rowptr.diff().clamp_(1, sampling.num_samples)
        inverse = taken.to(acc_dtype(dtype)).reciprocal_()
        row_scale = inverse if row_scale is None else inverse * row_scale
    # A second derivative also reads the rows.
    reads_rows = needs_value or torch.is_grad_enabled()
    sampled = edges = times = None
    t_csr: tuple[Tensor | None, ...] = (None,) * 3
    if reads_rows or not _picks(graph, sampling):
        sampled, edges = _kept_rows(graph, sampling)
    if sampling.strategy == 'paper' and reads_rows:
        assert sampled is not None
        assert edges is not None
        sampled, times = _unrepeated(graph, sampling, sampled, edges, dtype)
        t_csr = sampled[3:6]
    elif needs_x or torch.is_grad_enabled():
        t_csr = _transposed(graph, sampling, sampled, edges)
    part = graph if sampled is None else sampled
    part = part._replace(
        t_rowptr=t_csr[0], t_col=t_csr[1], t_perm=t_csr[2], groups=None, t_groups=None
    )
    return op._replace(graph=part, row_scale=row_scale, mean=False, sampling=None), times


def _unrepeated(
    graph: Graph, sampling: Sampling, sampled: Graph, edges: Tensor, dtype: torch.dtype
) -> tuple[Graph, Tensor]:
    """The graph with each edge once that :obj:`"paper"` samples several times, and how often it is
    sampled: the product for an edge counts it once."""
    row = edges[1].clamp(min=0).long()
    degree = graph.rowptr.diff()[row]
    k = torch.arange(row.size(0), device=row.device) - sampled.rowptr[row]
    repeats = (degree > sampling.num_samples) & (degree % _PAPER_STRIDE == 0)
    period = torch.where(repeats, degree // _PAPER_STRIDE, sampling.num_samples)
    once = torch.where(k < period, edges, -1)  # Edges without a row are skipped.
    rowptr, col, order, t_rowptr, t_col, t_order, _ = ops.to_csr_csc.default(
        once, graph.num_src, graph.num_dst, _in_int64(graph), False, False
    )
    assert sampled.perm is not None
    perm = t_perm = sampled.perm
    if perm.size(0) > 0:
        perm, t_perm = perm[order.long()], perm[t_order.long()]
    size = graph.num_src, graph.num_dst
    times = torch.zeros(graph.num_edges, dtype=acc_dtype(dtype), device=edges.device)
    times.index_add_(0, sampled.perm.long(), (edges[1] >= 0).to(times.dtype))
    return Graph(rowptr, col, perm, t_rowptr, t_col, t_perm, *size), times.to(dtype)


@fake('sample_edges')
def _sample_edges_fake(rowptr: Tensor, col: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    return col.new_empty(2, num_slots), rowptr.new_empty(num_slots)


@fake('sample_transposed')
def _sample_transposed_fake(
    t_rowptr: Tensor, t_col: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        t_rowptr.new_empty(t_rowptr.shape),
        t_col.new_empty(num_slots),
        t_rowptr.new_empty(num_slots),
    )


@reference('sample_edges')
def _sample_edges_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    sampled_rowptr: Tensor,
    num_slots: int,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    row, edge = sampled_rows(rowptr, num_samples, strategy, seed)
    tail = (0, num_slots - row.size(0))
    return (
        torch.stack([pad(col[edge], tail), pad(row, tail, value=-1).to(col.dtype)]),
        pad(edge.to(rowptr.dtype) if perm is None else perm[edge], tail),
    )


def sampled_positions(
    degree: int, num_samples: int, strategy: int, seed: int, row: int
) -> list[int]:
    """The positions of a row's sampled edges; strategies as in csrc/params/sample.h."""
    if degree <= num_samples:
        return list(range(degree))
    offset, stride = 0, 1
    if strategy == 1:
        golden = degree * 0x9E3779B97F4A7C15 >> 64
        strides = (s for d in range(degree) for s in (golden + d, golden - d) if 0 < s < degree)
        stride = next(s for s in strides if gcd(s, degree) == 1)
    elif strategy == 2:
        bits = mixed_bits((mixed_bits(seed % 2**64) + row * 0x9E3779B97F4A7C15) % 2**64)
        offset = bits * degree >> 64
        stride = 1 + (mixed_bits(bits) * (degree - 1) >> 64)
        while gcd(stride, degree) > 1:
            stride = stride % (degree - 1) + 1
    elif strategy == 3:
        stride = 577
    elif strategy == 4:
        longest = min(num_samples // 16, degree // num_samples, 8)
        run = 1 << max(longest.bit_length() - 1, 0)
        half_gap = ((2**31 - 1) // -(-num_samples // run) + 1) * (degree - num_samples)
        return [k + ((2 * (k // run) + 1) * half_gap >> 32) for k in range(num_samples)]
    return [(offset + k * stride) % degree for k in range(num_samples)]


def sampled_rows(
    rowptr: Tensor, num_samples: int, strategy: int, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Row and position in `col` of each sampled edge."""
    number = 0 if seed is None else int(seed)
    pointers = rowptr.tolist()
    taken = [
        (row, begin + position)
        for row, (begin, end) in enumerate(zip(pointers[:-1], pointers[1:], strict=True))
        for position in sampled_positions(end - begin, num_samples, strategy, number, row)
    ]
    row, edge = torch.tensor(taken, dtype=torch.long).view(-1, 2).t().to(rowptr.device)
    return row, edge
