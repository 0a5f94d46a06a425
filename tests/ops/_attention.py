"""Inputs, references and tolerances of both kinds of attention."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from _raw_ops import reference
from torch import Tensor

from pyg_fast.graph import Graph, graph_of
from pyg_fast.ops import gat, gatv2

from ._graphs import Edges, exact

OPS: dict[str, Callable[..., Tensor]] = {'gat': gat, 'gatv2': gatv2}
# Heads and channels of each.
SHAPES = [
    *((1, 1), (1, 64), (8, 8), (3, 5), (2, 33), (8, 32), (5, 7), (4, 16), (1, 256), (16, 4)),
    *((40, 3), (2, 1), (1, 300), (7, 12), (8, 1), (2, 9), (6, 13), (1, 31), (3, 31), (8, 47)),
    (1, 121),
]  # fmt: skip


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def seed_of(number: int, device: torch.device | str = 'cpu') -> Tensor:
    return torch.tensor([number], device=device)


def inputs_of(
    op: str,
    edges: Edges,
    heads: int,
    channels: int,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = 'cpu',
    edge: bool = False,
) -> list[Tensor]:
    """What an op takes after the graph, asking for gradients; scores are 0 for some edges."""

    def number(*size: int) -> Tensor:
        return exact(*size, dtype=dtype, device=device).requires_grad_()

    x = number(edges.num_src, heads, channels)
    if op == 'gatv2':
        return [x, number(edges.num_dst, heads, channels), number(heads, channels)]
    scores = [number(edges.num_src, heads), number(edges.num_dst, heads)]
    return [x, *scores, *([number(edges.edge_index.size(1), heads)] if edge else [])]


def reference_of(
    op: str,
    edges: Edges,
    inputs: list[Tensor] | tuple[Tensor, ...],
    *,
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    add_self_loops: bool = False,
    seed: Tensor | None = None,
) -> Tensor:
    """The result in float64, differentiable."""
    num_loops = min(edges.num_src, edges.num_dst) if add_self_loops else 0
    where = inputs[0].device
    csr = graph_of(
        edges.edge_index.to(where), edges.num_src, edges.num_dst, drop_loops=add_self_loops
    )[:3]
    rest = (None, seed, num_loops, negative_slope, dropout, False, True)
    if op == 'gatv2':
        return reference.gatv2(*csr, *inputs, *rest)[0]
    alpha_edge = inputs[3] if len(inputs) > 3 else None
    return reference.gat(*csr, *inputs[:3], alpha_edge, None, *rest)[0]


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The result and its gradients along a fixed direction."""
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.double, device=out.device)
    return [out, *torch.autograd.grad((out.double() * weight.view_as(out)).sum(), inputs)]


def check(op: str, edges: Edges, inputs: list[Tensor], graph: Any = None, **options: Any) -> None:
    """Compares the result and the gradients of the public op with the reference's."""
    where = inputs[0].device
    graph = edges.edge_index.to(where) if graph is None else graph
    actual = gradients(OPS[op](graph, *inputs, **options), inputs)
    assert actual[0].dtype == inputs[0].dtype
    assert actual[0].is_contiguous()
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    expected = gradients(reference_of(op, edges, leaves, **options), leaves)
    for a, e, like in zip(actual, expected, [inputs[0], *inputs], strict=True):
        assert (a.dtype, a.device) == (like.dtype, where)
        coarsest = max(inputs[0].dtype, a.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        share = 60 * torch.finfo(coarsest).eps + 1000 * torch.finfo(acc_of(coarsest)).eps
        bound = share * float(1 + e.detach().abs().max() if e.numel() else 1)
        torch.testing.assert_close(a.double(), e, rtol=0, atol=bound)


# --- raw ops -------------------------------------------------------------------------------------


def ordered(edges: Edges, order: str, index: torch.dtype, device: torch.device | str) -> Graph:
    """The graph of edges in random order, or sorted by either end: without its permutation."""
    data = edges.edge_index
    if order == 'random':
        return edges.graph(index, device)
    end = ('by_src', 'by_dst').index(order)
    graph = edges._replace(edge_index=data[:, data[end].argsort(stable=True)]).graph(index, device)
    return graph._replace(**{'t_perm' if end == 0 else 'perm': None})


def terms_of(graph: Graph, channels: int) -> int:
    """Roundings of sums over edges and channels, which rarely go all the same way."""
    degrees = [int(p.diff().max()) if p.numel() > 1 else 0 for p in (graph.rowptr, graph.t_rowptr)]
    return 2 * math.isqrt(max(degrees) + channels)


def log_sums(softmax: Tensor) -> Tensor:
    """The logarithm of each row's sum of exponentials, 0 for a row without edges. Compare this
    instead of `softmax`, in which kernels may store different maxima."""
    largest, inverse = softmax.double().unbind(1)
    return torch.where(inverse > 0, largest - inverse.log(), 0).to(softmax.dtype)


def raw_variants() -> Iterator[dict[str, Any]]:
    """Options of the raw ops, of which every one is met in each of its states."""
    for order, dropout, slope, extra, out_acc in (
        ('random', 0.0, 0.2, False, False),
        ('random', 0.6, 0.2, True, True),
        ('by_dst', 0.3, 0.0, False, True),
        ('by_src', 0.0, 1.0, True, False),
        ('by_src', 1.0, -0.5, False, False),
        ('by_dst', 0.0, 1.5, True, True),
    ):
        yield dict(order=order, dropout=dropout, slope=slope, extra=extra, out_acc=out_acc)
