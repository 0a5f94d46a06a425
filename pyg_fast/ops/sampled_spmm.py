"""Aggregation over a sample of each node's edges, taken inside the kernel."""

from math import gcd
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from ._library import fake, ops, reference
from ._numbers import check_flag
from ._reference import mixed_bits
from ._saved import save, saved
from ._transforms import transforms_active
from .graph import Graph
from .spmm import (
    REDUCE,
    SDDMM,
    SpMM,
    acc_dtype,
    check_device,
    check_edge_weight,
    check_features,
    checked_graph,
    reduce_sum,
)
from .spmm_max import reduce_max

MOST_SAMPLES = 4096
_CODES = {'fastrand': 1, 'bucket': 0, 'unbiased': 2, 'paper': 3}  # of `Strategy` in kernels.h
STRATEGIES = tuple(_CODES)
_WORD = 2**64
_PAPER_STRIDE = 577


class Sampling(NamedTuple):
    """At most :obj:`num_samples` edges of each row, chosen by :obj:`strategy`; by :obj:`seed`,
    an int64 tensor of shape :math:`(1)`, where it is :obj:`"unbiased"`."""

    num_samples: int
    strategy: str = 'fastrand'
    seed: Tensor | None = None

    def args(self) -> tuple[int, int, Tensor | None]:
        """As the raw ops take it."""
        return self.num_samples, _CODES[self.strategy], self.seed

    def drawn(self, device: torch.device, seed: int | Tensor | None = None) -> 'Sampling':
        """With a seed where it needs one: that given, as it is now, or the next of torch's
        generator."""
        if self.strategy != 'unbiased':
            return self
        if seed is None:
            seed = torch.randint(2**63 - 1, (1,), device=device)
        elif isinstance(seed, Tensor):
            seed = seed.clone()  # The backward pass works out the same sample.
        else:
            seed = torch.full((1,), (seed + 2**63) % _WORD - 2**63, device=device)
        return self._replace(seed=seed)

    def weight(self, rowptr: Tensor, mean: bool, dtype: torch.dtype) -> Tensor | None:
        """What each row's sum is multiplied by, to stand for all of its edges."""
        if self.strategy != 'unbiased' or mean:
            return None
        return (rowptr.diff().to(acc_dtype(dtype)) / self.num_samples).clamp_(min=1)


def check_sampling(num_samples: Any, strategy: Any) -> None:
    """Raises unless they say how to sample."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int):
        raise TypeError(f"'num_samples' must be an integer, got {type(num_samples).__name__}")
    if not 1 <= num_samples <= MOST_SAMPLES:
        raise ValueError(f"'num_samples' must be 1 to {MOST_SAMPLES}, got {num_samples}")
    if not isinstance(strategy, str):
        raise TypeError(f"'strategy' must be a string, got {type(strategy).__name__}")
    if strategy not in STRATEGIES:
        raise ValueError(f"'strategy' must be one of {STRATEGIES}, got {strategy!r}")


def _check_seed(seed: Any, step: Any, x: Tensor) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"'step' must be an integer, got {type(step).__name__}")
    for name, number in (('seed', seed), ('step', step)):
        if isinstance(number, int) and not -(2**63) <= number < _WORD:
            raise ValueError(f"'{name}' must fit 64 bits, got {number}")
    if seed is None:
        return
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"'seed' must be an int64 tensor, got {seed.dtype}")
        if seed.layout != torch.strided:
            raise TypeError(f"'seed' must be a strided tensor, got {seed.layout}")
        if seed.shape != (1,):
            raise ValueError(f"'seed' must have shape [1], got {list(seed.shape)}")
        check_device(seed, x, 'seed')
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"'seed' must be an integer or a tensor, got {type(seed).__name__}")


def sampled_spmm(
    graph: Graph | Tensor,
    x: Tensor,
    num_samples: int,
    strategy: str = 'fastrand',
    edge_weight: Tensor | None = None,
    reduce: str = 'sum',
    seed: int | Tensor | None = None,
    step: int = 0,
    quantize: bool = False,
) -> Tensor:
    r"""Aggregates the features of at most :math:`S` of each node's in-neighbours, as in the
    `"ES-SpMM: Edge-Sampling SpMM" <https://arxiv.org/abs/2104.10716>`_ paper.

    .. math::
        \mathbf{y}_i = c_i \sum_{k = 0}^{\min(S, d_i) - 1} w_{e_k} \cdot \mathbf{x}_{j_k},
        \qquad e_k = (o_i + k \cdot p_i) \bmod d_i

    The edges are picked while the kernel loads them; nothing is prepared, and no other graph is
    made. A node with no more than :math:`S` edges keeps all of them. Differentiable in :obj:`x`
    and :obj:`edge_weight`, any number of times: the backward pass works out the same sample again,
    and lists it by source for as long as it runs.
    The results are the same bits every time, with one exception: the gradient of
    :obj:`"max"`/:obj:`"min"` to :obj:`x` on CUDA adds atomically, as in
    :func:`~pyg_fast.ops.spmm`.

    Args:
        graph (EdgeIndex, Tensor or Graph): As in :func:`~pyg_fast.ops.spmm`. Gradients need no
            transpose, but are faster on a GPU if :class:`~pyg_fast.transforms.ToCSR` has made it.
        x (Tensor): Features of the source nodes :math:`(N_{src}, F)`, of type float32, float64,
            float16 or bfloat16.
        num_samples (int): :math:`S`, from 1 to 4096.
        strategy (str): :obj:`"fastrand"` spreads the sample evenly over a row: :math:`p_i` is the
            number coprime to the degree :math:`d_i` that is nearest to :math:`0.618 d_i`, and
            :math:`o_i = 0`. :obj:`"bucket"` takes the first :math:`S` edges.
            :obj:`"unbiased"` draws :math:`o_i` and, coprime to :math:`d_i`, :math:`p_i` at random
            at every call: each edge is taken with probability :math:`S / d_i`, and a sum is
            multiplied by :math:`c_i = d_i / S`, so that it and its gradients are those of all
            edges in expectation. :obj:`"paper"` is the authors' choice of :math:`p_i = 577`, which
            takes edges several times where 577 divides the degree. The edges of a node are counted
            in the order of the list, or of what it was sorted into. (default: :obj:`"fastrand"`)
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the type of :obj:`x`,
            in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`), :obj:`"mean"` of what was taken,
            :obj:`"max"` or :obj:`"min"`, the latter two not with :obj:`"unbiased"`. A node without
            edges gets zeros. (default: :obj:`"sum"`)
        seed (int or Tensor, optional): What :obj:`"unbiased"` draws from, an integer of 64 bits or
            an int64 tensor of shape :math:`(1)`. (default: :obj:`None`, the next of torch's
            generator)
        step (int): Another sample of the same :obj:`seed` for each step. (default: :obj:`0`)
        quantize (bool): Rounds the features of each node to multiples of 1/127 of the largest and
            reads one byte of each; for inference, without gradients, and not with :obj:`"max"` or
            :obj:`"min"`. Sums run in float32. (default: :obj:`False`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`.

    Raises:
        TypeError: If a type is not supported, or differs between :obj:`x` and :obj:`edge_weight`.
        ValueError: If a shape or device does not fit, :obj:`num_samples`, :obj:`strategy` or
            :obj:`reduce` is unknown or one does not go with another, :obj:`seed` or :obj:`step`
            does not fit 64 bits, or a gradient is asked for with :obj:`quantize`.
        IndexError: If the graph holds a node that :obj:`x` does not have.
    """
    check_sampling(num_samples, strategy)
    if reduce not in REDUCE:
        raise ValueError(f"'reduce' must be one of {REDUCE}, got {reduce!r}")
    check_flag('quantize', quantize)
    check_features(x, 'x')
    _check_seed(seed, step, x)
    extreme = reduce in ('max', 'min')
    if extreme and (strategy == 'unbiased' or quantize):
        option = "strategy='unbiased'" if strategy == 'unbiased' else 'quantize=True'
        raise ValueError(f'{option} is for sums and means, got reduce={reduce!r}')
    graph = checked_graph(graph, x, 'x', False)
    if edge_weight is not None:
        check_edge_weight(edge_weight, x, graph.num_edges)
    if quantize and torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, edge_weight)
    ):
        raise ValueError("'quantize' is for inference: it has no gradient")
    if step != 0:
        seed = _stepped(seed, step, x)
    sampling = Sampling(num_samples, strategy).drawn(x.device, seed)
    if extreme:
        # Only the deterministic gradient reads the transpose, which takes a sort.
        ordered = x.is_cuda and torch.are_deterministic_algorithms_enabled()
        transpose = ordered and torch.is_grad_enabled() and x.requires_grad
        sampled, perm = sampled_on_its_own(graph, sampling, transpose)
        value = None if edge_weight is None else edge_weight.gather(0, perm.long())
        return reduce_max(sampled, x, value, reduce == 'min')
    mean = reduce == 'mean'
    if quantize:
        return quantized_sum(graph, sampling, x, edge_weight, mean=mean)
    return sampled_sum(graph, sampling, x, edge_weight, mean=mean)


def _stepped(seed: int | Tensor | None, step: int, x: Tensor) -> int | Tensor:
    # Far from what neighbouring seeds give.
    offset = (step * 0x9E3779B97F4A7C15 + 2**63) % _WORD - 2**63
    if seed is None:
        seed = torch.randint(2**63 - 1, (1,), device=x.device)
    return seed + offset


def sampled_sum(
    graph: Graph,
    sampling: Sampling,
    x: Tensor,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
) -> Tensor:
    r"""The kernel behind :func:`sampled_spmm` with the prologue and epilogue of
    :func:`~pyg_fast.ops.spmm.reduce_sum`, unchecked. The sampling has been :meth:`drawn`."""
    if transforms_active():
        weight = sampling.weight(graph.rowptr, mean, x.dtype)
        if weight is not None:
            row_scale = weight if row_scale is None else weight * row_scale
        part = sampled_graph(graph, sampling)
        return reduce_sum(part, x, value, bias, row_scale, col_scale, diag, mean, out_acc)
    constants = graph, sampling, row_scale, col_scale, diag, mean, out_acc
    return _SampledSpMM.apply(x, value, bias, constants)


def quantized_sum(
    graph: Graph,
    sampling: Sampling,
    x: Tensor,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
) -> Tensor:
    """The same of features of eight bits, without gradients."""
    dtype = acc_dtype(x.dtype) if out_acc else x.dtype

    def single(t: Tensor | None) -> Tensor | None:
        return t if t is None else t.detach().float()

    x, scale = ops.quantize_rows.default(x.detach())
    col_scale, diag = (
        scale if col_scale is None else scale * single(col_scale),
        None if diag is None else scale * single(diag),
    )
    out = ops.sampled_spmm.default(
        *graph[:3], single(value), x, single(row_scale), col_scale, diag, single(bias), mean, False,
        *sampling.args(),
    )  # fmt: skip
    return out.to(dtype)


def sampled_graph(graph: Graph, sampling: Sampling, transpose: bool = False) -> Graph:
    r"""The graph of the sampled edges alone, in the order of :obj:`graph`'s edge weights.

    An edge that :obj:`"paper"` takes several times is there as often. Its arrays have room for
    :math:`\min(|\mathcal{E}|, N_{dst} \cdot S)` edges; behind the last one they name some edge.
    """
    sampled, edges = _sampled_rows(graph, sampling)
    if not transpose:
        return sampled
    t_csr = _transposed(graph, sampling, sampled, edges)
    return sampled._replace(t_rowptr=t_csr[0], t_col=t_csr[1], t_perm=t_csr[2])


def sampled_on_its_own(
    graph: Graph, sampling: Sampling, transpose: bool = False
) -> tuple[Graph, Tensor]:
    """The same graph with edge weights in its own order, and where each is in that of
    :obj:`graph`'s."""
    sampled, edges = _sampled_rows(graph, sampling)
    assert sampled.perm is not None
    own = sampled._replace(perm=None)
    if transpose:
        t_rowptr, t_col, t_perm = _sorted_by_source(sampled, edges)
        own = own._replace(t_rowptr=t_rowptr, t_col=t_col, t_perm=t_perm)
    return own, sampled.perm


def _num_slots(graph: Graph, sampling: Sampling) -> int:
    return min(graph.num_edges, graph.num_dst * sampling.num_samples)


def _sampled_rows(graph: Graph, sampling: Sampling) -> tuple[Graph, Tensor]:
    """The graph, and its edges with rows of -1 behind the last."""
    kept = graph.rowptr.diff().clamp_(max=sampling.num_samples)
    rowptr = F.pad(kept.cumsum(0, dtype=graph.rowptr.dtype), (1, 0))
    edges, perm = ops.sample_edges.default(
        *graph[:3], rowptr, _num_slots(graph, sampling), *sampling.args()
    )
    size = graph.num_src, graph.num_dst
    return Graph(rowptr, edges[0], perm, None, None, None, *size), edges


def _transposed(
    graph: Graph, sampling: Sampling, sampled: Graph | None, edges: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled edges by source: picked out of the transpose on a GPU, where that is there and
    names positions of rows; else sorted."""
    if _picks(graph, sampling):
        return ops.sample_transposed.default(
            graph.rowptr, graph.t_rowptr, graph.t_col, graph.t_perm, _num_slots(graph, sampling),
            *sampling.args(),
        )  # fmt: skip
    if sampled is None or edges is None:
        sampled, edges = _sampled_rows(graph, sampling)
    assert sampled.perm is not None
    t_rowptr, t_col, order = _sorted_by_source(sampled, edges)
    perm = sampled.perm
    return t_rowptr, t_col, perm if perm.size(0) == 0 else perm[order.long()]


def _sorted_by_source(sampled: Graph, edges: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # What lies behind the last edge has no row, and is left out.
    return ops.to_csr.default(
        edges, sampled.num_src, sampled.num_dst, True, edges.dtype == torch.int64, False, False
    )[:3]


def _picks(graph: Graph, sampling: Sampling) -> bool:
    return (
        graph.col.is_cuda
        and graph.perm is None
        and graph.t_perm is not None
        and sampling.strategy != 'paper'
    )


class _SampledSpMM(torch.autograd.Function):
    """Its backward works out the sample again and goes on as that of the sampled graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        value: Tensor | None,
        bias: Tensor | None,
        constants: tuple[Any, ...],
    ) -> Tensor:
        graph, sampling, row_scale, col_scale, diag, mean, out_acc = constants
        needs_x, needs_value = ctx.needs_input_grad[:2]
        if needs_x or needs_value:
            save(ctx, x if needs_value else None, value, constants)
        ctx.dtype = x.dtype
        return ops.sampled_spmm.default(
            *graph[:3], value, x, row_scale, col_scale, diag, bias, mean, out_acc,
            *sampling.args(),
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_value, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_value = None
        if needs_x or needs_value:
            x, value, constants = saved(ctx)
            graph, sampling, row_scale, col_scale, diag, mean, _ = constants
            weight = sampling.weight(graph.rowptr, mean, grad.dtype)
            if weight is not None:
                row_scale = weight if row_scale is None else weight * row_scale
            if mean:
                taken = graph.rowptr.diff().clamp_(1, sampling.num_samples)
                inverse = taken.to(acc_dtype(grad.dtype)).reciprocal_()
                row_scale = inverse if row_scale is None else inverse * row_scale
            again = torch.is_grad_enabled()  # The gradient will be differentiated itself.
            sampled = edges = times = None
            t_csr: tuple[Tensor | None, ...] = (None,) * 3
            if needs_value or again or not _picks(graph, sampling):
                sampled, edges = _sampled_rows(graph, sampling)
            if sampling.strategy == 'paper' and (needs_value or again):
                assert edges is not None
                sampled, times = _unrepeated(graph, sampling, sampled, edges, grad.dtype)
                t_csr = sampled[3:6]
            elif needs_x or again:
                t_csr = _transposed(graph, sampling, sampled, edges)
            # Nothing but a second derivative reads the rows.
            part = graph if sampled is None else sampled
            part = part._replace(
                t_rowptr=t_csr[0], t_col=t_csr[1], t_perm=t_csr[2], groups=None, t_groups=None
            )
        if needs_x:
            v = value if times is None else times if value is None else value * times
            if v is not None and v.dtype != acc_dtype(grad.dtype):
                v = v.to(grad.dtype)
            options = part.t(), col_scale, row_scale, diag, False, False
            grad_x = SpMM.apply(grad, v, None, options).to(ctx.dtype)
        if needs_value:
            of_edges = part, row_scale, col_scale, False, value.size(0)
            grad_value = SDDMM.apply(grad, x.to(grad.dtype), of_edges)
            grad_value = (grad_value if times is None else grad_value * times).to(value.dtype)
        return grad_x, grad_value, grad.sum(0) if needs_bias else None, None


def _unrepeated(
    graph: Graph, sampling: Sampling, sampled: Any, edges: Tensor, dtype: torch.dtype
) -> tuple[Graph, Tensor]:
    """The graph with each edge once that :obj:`"paper"` takes several times, and how many times it
    takes each, which the product for an edge does not know."""
    row = edges[1].clamp(min=0).long()
    degree = graph.rowptr.diff()[row]
    k = torch.arange(row.size(0), device=row.device) - sampled.rowptr[row]
    repeats = (degree > sampling.num_samples) & (degree % _PAPER_STRIDE == 0)
    period = torch.where(repeats, degree // _PAPER_STRIDE, sampling.num_samples)
    once = torch.where(k < period, edges, -1)  # What has no row is left out.
    rowptr, col, order, t_rowptr, t_col, t_order, _ = ops.to_csr_csc.default(
        once, graph.num_src, graph.num_dst, edges.dtype == torch.int64, False, False
    )
    perm = t_perm = sampled.perm
    if perm.size(0) > 0:
        perm, t_perm = perm[order.long()], perm[t_order.long()]
    size = graph.num_src, graph.num_dst
    times = torch.zeros(graph.num_edges, dtype=acc_dtype(dtype), device=edges.device)
    times.index_add_(0, sampled.perm.long(), (edges[1] >= 0).to(times.dtype))
    return Graph(rowptr, col, perm, t_rowptr, t_col, t_perm, *size), times.to(dtype)


@fake('sampled_spmm')
def _sampled_spmm_fake(rowptr: Tensor, x: Tensor, out_acc: bool) -> Tensor:
    dtype = acc_dtype(x.dtype) if out_acc or x.dtype == torch.int8 else x.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=dtype)


@fake('sample_edges')
def _sample_edges_fake(col: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
    return col.new_empty(2, num_slots), col.new_empty(num_slots)


@fake('sample_transposed')
def _sample_transposed_fake(
    t_rowptr: Tensor, t_col: Tensor, num_slots: int
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        t_rowptr.new_empty(t_rowptr.shape), t_col.new_empty(num_slots), t_col.new_empty(num_slots)
    )


@fake('quantize_rows')
def _quantize_rows_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(x.size(0), dtype=torch.float32),
    )


@reference('sampled_spmm')
def _sampled_spmm_reference(
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
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> Tensor:
    row, edge = _sampled(rowptr, num_samples, strategy, seed)
    sampled_rowptr = pad(torch.bincount(row, minlength=rowptr.size(0) - 1).cumsum(0), (1, 0))
    perm = edge if perm is None else perm[edge]
    if strategy == 2 and not mean:
        weight = (rowptr.diff().double() / num_samples).clamp(min=1)
        row_scale = weight if row_scale is None else weight * row_scale
    return reference.spmm(
        sampled_rowptr, col[edge], perm, value, x, row_scale, col_scale, diag, bias, mean
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
    row, edge = _sampled(rowptr, num_samples, strategy, seed)
    tail = (0, num_slots - row.size(0))
    return (
        torch.stack([pad(col[edge], tail), pad(row, tail, value=-1).to(col.dtype)]),
        pad(edge.to(col.dtype) if perm is None else perm[edge], tail),
    )


@reference('quantize_rows')
def _quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    largest = x.abs().amax(1) if x.size(1) > 0 else x.new_zeros(x.size(0))
    inverse = (127 / largest).nan_to_num(nan=0, posinf=0)
    rounded = torch.where(inverse.view(-1, 1) > 0, x * inverse.view(-1, 1), 0).round()
    return rounded.to(torch.int8), largest / 127


def sampled_positions(
    degree: int, num_samples: int, strategy: int, seed: int, row: int
) -> list[int]:
    """Which of the edges of a row are taken; strategies as :obj:`Strategy` in kernels.h."""
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
    return [(offset + k * stride) % degree for k in range(num_samples)]


def _sampled(
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
