"""Shared by GAT and GATv2: arguments, dropout, and the softmax in torch ops."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from ..sparse.graph import Graph
from ._numbers import acc_dtype
from ._reference import edge_list

_WORD = 0xFFFFFFFF


class AttentionArgs(NamedTuple):
    """Arguments of attention that take no gradient.

    In addition to the edges of :obj:`graph`, the first :obj:`num_loops` nodes have a self-loop.
    With :obj:`out_acc`, float16 and bfloat16 give a float32 result.
    """

    graph: Graph
    num_loops: int
    negative_slope: float
    dropout: float
    seed: Tensor | None
    out_acc: bool


def drawn_seed(seed: Tensor | None, dropout: float, x: Tensor) -> Tensor | None:
    """The seed of dropout: a copy of :obj:`seed`, or drawn from torch's generator."""
    if dropout == 0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (1,), device=x.device)
    return seed.clone()  # The backward pass must use the same seed.


def keeps(seed: Tensor, ids: Tensor, heads: int, dropout: float) -> Tensor:
    """Whether dropout keeps each edge and head, as in the kernels: :math:`(n, H)`."""
    low, high = seed & _WORD, seed >> 32 & _WORD
    bits = mixed(mixed(ids & _WORD ^ mixed(low)) + (ids >> 32 & _WORD) * 0x85EBCA6B) ^ high
    head = torch.arange(1, heads + 1, device=ids.device)
    threshold = min(int(dropout * 2**32), _WORD)
    return mixed(bits.view(-1, 1) + head * 0x9E3779B9) >= threshold


def mixed(h: Tensor) -> Tensor:
    # 32 bits in int64, whose products may wrap around: only the low word is used.
    h = h & _WORD
    h = (h ^ h >> 16) * 0x21F0AAAD & _WORD
    h = (h ^ h >> 15) * 0x735A2D97 & _WORD
    return h ^ h >> 15


def composed(
    x: Tensor,
    logits: Callable[[Tensor, Tensor, Tensor], Tensor],
    bias: Tensor | None,
    args: AttentionArgs,
) -> Tensor:
    """The result in torch ops of size E x H x C, differentiable any number of times.

    :obj:`logits` gets source, destination and id of all edges, loops last.
    """
    (rowptr, col, perm, *_), num_loops, _, dropout, seed, out_acc = args
    num_rows = rowptr.size(0) - 1
    row, source, ids = edges_and_loops(rowptr, col, perm, num_loops)
    weight, _ = softmax_by_row(logits(source, row, ids), row, num_rows)
    if seed is not None:
        weight = weight * dropout_factor(seed, ids, x.size(1), dropout).to(weight.dtype)
    out = sum_at(weight.unsqueeze(-1) * x[source].to(weight.dtype), row, num_rows)
    if bias is not None:
        out = out + bias.to(out.dtype).view(x.shape[1:])
    return out if out_acc else out.to(x.dtype)


def differentiable_gradients(
    run: Callable[..., Tensor],
    inputs: tuple[Tensor | None, ...],
    needs: tuple[bool, ...],
    grad: Tensor,
) -> list[Tensor | None]:
    """Differentiable gradients of :obj:`run`."""
    # Views: one input may be computed from another.
    views = [None if t is None else t.view_as(t) for t in inputs]
    wanted = [t for t, need in zip(views, needs, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(run(*views), wanted, grad, create_graph=True))
    return [
        next(found) if need and t is not None else None
        for t, need in zip(views, needs, strict=True)
    ]


def leaky(score: Tensor, args: AttentionArgs) -> Tensor:
    return leaky_relu(score, args.negative_slope)


def as_acc(t: Tensor, x: Tensor) -> Tensor:
    """Converted to the dtype in which sums over :obj:`x` run."""
    return t.to(acc_dtype(x.dtype))


def edges_and_loops(
    rowptr: Tensor, col: Tensor, perm: Tensor | None, num_loops: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the id of every edge and of the self-loops of the first nodes."""
    loops = torch.arange(num_loops, device=col.device)
    row, column, position = edge_list(rowptr, col, perm)
    return (
        torch.cat([row, loops]),
        torch.cat([column, loops]),
        torch.cat([position, loops + col.size(0)]),
    )


def dropout_factor(seed: Tensor | None, ids: Tensor, heads: int, dropout: float) -> Tensor:
    """The factors that dropout applies to the attention of every edge and head."""
    if seed is None or dropout == 0:
        return torch.ones(ids.size(0), heads, dtype=torch.double, device=ids.device)
    scale = 1 / (1 - dropout) if dropout < 1 else 0
    return keeps(seed, ids, heads, dropout).double() * scale


def leaky_slope(score: Tensor, negative_slope: float) -> Tensor:
    """The derivative of the leaky ReLU."""
    return torch.ones_like(score).masked_fill(score <= 0, negative_slope)


def softmax_by_row(logit: Tensor, row: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Softmax over the edges of each row; and for :func:`weight_of` the largest logit and the
    inverse of the sum of each row and head :math:`(N, 2, H)`, 0 for a row without edges."""
    size = num_rows, logit.size(1)
    rows = row.view(-1, 1).expand_as(logit)
    none = logit.new_full(size, -float('inf'))
    largest = none.scatter_reduce(0, rows, logit.detach(), 'amax')
    largest = largest.masked_fill(largest.isneginf(), 0)
    e = (logit - largest[row]).exp()
    none = sum_at(torch.ones_like(e), row, num_rows) == 0
    inverse = (1 / sum_at(e, row, num_rows).masked_fill(none, 1)).masked_fill(none, 0)
    return e * inverse[row], torch.stack([largest, inverse], dim=1)


def weight_of(logit: Tensor, softmax: Tensor, row: Tensor) -> Tensor:
    """The softmax of edges, from their logits and the `softmax` that the forward stored."""
    largest, inverse = softmax.double().unbind(1)
    return (logit - largest[row]).exp() * inverse[row]


def sum_at(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size, *values.shape[1:]).index_add(0, index, values)
