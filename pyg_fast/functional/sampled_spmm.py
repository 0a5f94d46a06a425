"""Aggregation over a sample of each node's edges, drawn inside the kernel."""

import torch
from torch import Tensor

from ..ops._checks import check_edge_weight, check_features
from ..ops._numbers import adds_in_order, check_flag
from ..ops.product import product, quantized
from ..ops.sampled_spmm import check_sampling
from ..ops.sampling import sampled_on_its_own
from ..ops.spmm_max import reduce_max
from ..sparse.graph import Graph
from ..sparse.operator import WORD, Sampling, SparseOperator
from ._arguments import check_seed, checked_graph
from .spmm import REDUCE


def _check_seed(seed: object, step: object, x: Tensor) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"'step' must be an integer, got {type(step).__name__}")
    for name, number in (('seed', seed), ('step', step)):
        if isinstance(number, int) and not -(2**63) <= number < WORD:
            raise ValueError(f"'{name}' must fit 64 bits, got {number}")
    if seed is None:
        return
    if isinstance(seed, Tensor):
        check_seed(seed, x)
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

    The kernel chooses the edges while it loads them: it needs no preparation and no other graph. A
    node with at most :math:`S` edges keeps all of them. Differentiable in :obj:`x` and
    :obj:`edge_weight`, any number of times: the backward pass computes the same sample again and
    sorts it by source. Results are bitwise reproducible, except that the gradient of
    :obj:`"max"`/:obj:`"min"` to :obj:`x` on CUDA adds atomically, as in
    :func:`~pyg_fast.ops.spmm`.

    Args:
        graph (EdgeIndex, Tensor or Graph): As in :func:`~pyg_fast.ops.spmm`. Gradients need no
            transpose, but are faster on a GPU if :class:`~pyg_fast.transforms.ToCSR` made one.
        x (Tensor): Features of the source nodes :math:`(N_{src}, F)`, float32, float64,
            float16 or bfloat16.
        num_samples (int): :math:`S`, from 1 to 4096.
        strategy (str): :obj:`"fastrand"` spreads the sample evenly over a row: :math:`p_i` is the
            number coprime to the degree :math:`d_i` that is nearest to :math:`0.618 d_i`, and
            :math:`o_i = 0`. :obj:`"bucket"` takes the first :math:`S` edges.
            :obj:`"adaptive"` takes runs of :math:`r_i` consecutive edges, the runs evenly spread,
            :math:`e_k = k + \lfloor (d_i - S) (\lfloor k / r_i \rfloor + 1/2) / \lceil S / r_i
            \rceil \rfloor`, where :math:`r_i`, a power of two, grows with :math:`d_i / S` up to
            8, but leaves at least 16 runs. A sum is multiplied by :math:`c_i = (d_i + 1) / (S + 1)`
            to estimate the sum over all edges, as if the sample had one more edge, of value zero.
            As in `AES-SpMM <https://arxiv.org/abs/2503.18427>`_, the sample adapts to the degree.
            :obj:`"unbiased"` draws :math:`o_i` and :math:`p_i`, coprime to :math:`d_i`, at random
            at every call: each edge is taken with probability :math:`S / d_i`, and a sum is
            multiplied by :math:`c_i = d_i / S`, so the expectations of the sum and its gradients
            are those of all edges. :obj:`"paper"` uses the authors' :math:`p_i = 577`, which takes
            edges several times where 577 divides the degree. A node's edges are in the order of the
            edge_index, or of the sorted graph. (default: :obj:`"fastrand"`)
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)` of the dtype of :obj:`x`,
            in the order of the edges. (default: :obj:`None`, all one)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`), :obj:`"mean"` of the sampled edges,
            :obj:`"max"` or :obj:`"min"` (not with :obj:`"unbiased"`). A node without
            edges gets zeros. (default: :obj:`"sum"`)
        seed (int or Tensor, optional): Seed of :obj:`"unbiased"`, an integer of 64 bits or an int64
            tensor of shape :math:`(1)`. (default: :obj:`None`, drawn from torch's generator)
        step (int): Gives a new sample of the same :obj:`seed` per step. (default: :obj:`0`)
        quantize (bool): Rounds the features of each node to multiples of 1/127 of the largest and
            reads one byte of each; for inference, without gradients, and not with :obj:`"max"` or
            :obj:`"min"`. Sums run in float32. (default: :obj:`False`)

    Returns:
        Tensor: Aggregated features :math:`(N_{dst}, F)`.

    Raises:
        TypeError: If a dtype is not supported, or differs between :obj:`x` and :obj:`edge_weight`.
        ValueError: If a shape or device does not fit, :obj:`num_samples`, :obj:`strategy` or
            :obj:`reduce` is invalid or they exclude each other, :obj:`seed` or :obj:`step`
            does not fit 64 bits, or :obj:`quantize` is set and a gradient is required.
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
        raise ValueError(f'{option} supports only sums and means, got reduce={reduce!r}')
    graph = checked_graph(graph, x, 'x', False, edge_weight is not None)
    if edge_weight is not None:
        check_edge_weight(edge_weight, x, graph.num_edges)
    if (
        quantize
        and torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (x, edge_weight))
    ):
        raise ValueError("'quantize' must be False if a gradient is required, got True")
    if step != 0:
        seed = _stepped(seed, step, x)
    sampling = Sampling(num_samples, strategy).drawn(x.device, seed)
    if extreme:
        # Only the deterministic gradient reads the transpose, which needs a sort.
        transpose = adds_in_order(x) and torch.is_grad_enabled() and x.requires_grad
        sampled, perm = sampled_on_its_own(graph, sampling, transpose)
        value = None if edge_weight is None else edge_weight.gather(0, perm.long())
        return reduce_max(sampled, x, value, reduce == 'min')
    op = SparseOperator(graph, edge_weight, mean=reduce == 'mean', sampling=sampling)
    return product(op, quantized(x) if quantize else x)


def _stepped(seed: int | Tensor | None, step: int, x: Tensor) -> int | Tensor:
    # Far from the samples of neighbouring seeds.
    offset = (step * 0x9E3779B97F4A7C15 + 2**63) % WORD - 2**63
    if seed is None:
        seed = torch.randint(2**63 - 1, (1,), device=x.device)
    return seed + offset
