"""Graphs to test on, features whose products are exact, and how close results have to be."""

from typing import NamedTuple

import torch
from _raw_ops import reference
from hypothesis import strategies as st
from torch import Tensor

from pyg_fast.graph import Graph
from pyg_fast.graph.graph import graph_of
from pyg_fast.ops.cbsr import CBSR, column_dtype
from pyg_fast.ops.product import Quantized, product
from pyg_fast.sparse.operator import Sampling, SparseOperator

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
REDUCE = ['sum', 'mean', 'max', 'min']
WIDTHS = [
    *(*range(6), 7, 8, 9, 16, 17, 31, 32, 33, 41, 47, 50, 64, 65),
    *(100, 121, 128, 130, 256, 300, 349),
]  # fmt: skip
# Widths of which CBSR stores a part.
MAXK_WIDTHS = [
    *(1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 100, 128),
    *(255, 256, 257, 300, 384, 512, 1000, 1024, 1025, 3000),
]  # fmt: skip


class Edges(NamedTuple):
    """An edge list with its numbers of nodes."""

    edge_index: Tensor
    num_src: int
    num_dst: int

    def graph(self, dtype: torch.dtype = torch.int32, device: torch.device | str = 'cpu') -> Graph:
        """With pointers and positions of a type."""
        graph = graph_of(self.edge_index.to(device), self.num_src, self.num_dst)
        counts = ('rowptr', 'perm', 't_rowptr', 't_perm')
        return graph._replace(**{name: getattr(graph, name).to(dtype) for name in counts})


def _random(num_src: int, num_dst: int, num_edges: int, *hubs: tuple[int, int, int]) -> Edges:
    """Random edges; each hub (end, node, degree) has one end of `degree` more of them."""
    generator = torch.Generator().manual_seed(num_src + num_dst + num_edges)
    num_edges += sum(degree for _, _, degree in hubs)
    draw = torch.rand(2, num_edges, generator=generator, dtype=torch.float64)
    edge_index = (draw * torch.tensor([[num_src], [num_dst]])).long()
    for end, node, degree in hubs:
        num_edges -= degree
        edge_index[end, num_edges : num_edges + degree] = node
    order = torch.randperm(edge_index.size(1), generator=generator)
    return Edges(edge_index[:, order], num_src, num_dst)


# Kernels split rows of more than 512 edges.
GRAPHS = {
    'square': _random(30, 30, 200),  # with duplicates, loops and isolated nodes
    'wide': _random(70, 9, 100),
    'tall': _random(9, 70, 40),
    'hub': _random(20, 12, 60, (1, 3, 520)),
    'in_hubs': _random(50, 40, 100, (1, 3, 1500), (1, 39, 600), (1, 0, 512)),
    'out_hubs': _random(50, 40, 100, (0, 7, 1100), (0, 49, 513)),
    'one_node': Edges(torch.zeros(2, 3, dtype=torch.long), 1, 1),
    'no_edges': Edges(torch.empty(2, 0, dtype=torch.long), 4, 3),
    'no_sources': Edges(torch.empty(2, 0, dtype=torch.long), 0, 3),
    'no_destinations': Edges(torch.empty(2, 0, dtype=torch.long), 3, 0),
    'no_nodes': Edges(torch.empty(2, 0, dtype=torch.long), 0, 0),
}


def short_rows(*hubs: int) -> Edges:
    """Enough rows of so few edges that a GPU has a kernel for them: most of 0 to 5, some of up to
    200, and `hubs`."""
    num_nodes = 16_391
    generator = torch.Generator().manual_seed(1)
    degree = torch.randint(6, (num_nodes,), generator=generator)
    degree[::40] = torch.randint(201, degree[::40].shape, generator=generator)
    degree[5000:5020] = torch.arange(120, 140)
    degree[7000:7100] = 0
    degree[torch.arange(-1, len(hubs) - 1)] = torch.tensor(hubs, dtype=torch.long)
    dst = torch.arange(num_nodes).repeat_interleave(degree)
    assert dst.numel() < 8 * num_nodes
    src = torch.randint(num_nodes, dst.shape, generator=generator)
    order = torch.randperm(dst.numel(), generator=generator)
    return Edges(torch.stack([src, dst])[:, order], num_nodes, num_nodes)


PIECE = 128  # edges of a long row that a GPU gives to one program


def hubs(
    num_src: int, num_dst: int, num_edges: int, row: float, column: float, aligned: bool = False,
    seed: int = 0,
) -> Edges:  # fmt: skip
    """Random edges, of which a share goes to the middle destination and a share comes from the
    middle source. `aligned`: more edges let that row begin and end at multiples of a piece."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(2, num_edges, generator=generator, dtype=torch.float64)
    src, dst = (draw * torch.tensor([[num_src], [num_dst]])).long().unbind()
    hub, source = num_dst // 2, num_src // 2
    dst[: int(row * num_edges)] = hub
    src[num_edges - int(column * num_edges) :] = source
    if aligned:
        before, own = int((dst < hub).sum()), int((dst == hub).sum())
        more = [(-before % PIECE) * (hub > 0), -(own + before * (hub == 0)) % PIECE]
        dst = torch.cat([dst, torch.tensor([0, hub]).repeat_interleave(torch.tensor(more))])
        src = torch.cat([src, torch.randint(num_src, (sum(more),), generator=generator)])
    order = torch.randperm(src.numel(), generator=generator)
    return Edges(torch.stack([src, dst])[:, order], num_src, num_dst)


@st.composite
def edge_lists(draw: st.DrawFn, square: bool = False) -> Edges:
    """Few edges; or some with hubs of a tenth to all of them, long enough for kernels to divide."""
    num_src = draw(st.integers(0, 12))
    num_dst = num_src if square else draw(st.integers(0, 12))
    if min(num_src, num_dst) == 0:
        return Edges(torch.empty(2, 0, dtype=torch.long), num_src, num_dst)
    if draw(st.booleans()):
        share = st.sampled_from([0.0, 0.1, 0.5, 1.0])
        size = draw(st.sampled_from([1300, 129, 640]))
        return hubs(
            num_src, num_dst, size, draw(share), draw(share), draw(st.booleans()),
            draw(st.integers(0, 9)),
        )  # fmt: skip
    edge = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    edges = draw(st.lists(edge, max_size=40))
    return Edges(torch.tensor(edges, dtype=torch.long).view(-1, 2).t(), num_src, num_dst)


def exact(*size: int, dtype: torch.dtype, device: torch.device | str = 'cpu') -> Tensor:
    """Numbers with many ties, of which two multiply without rounding in every type."""
    return (torch.randint(-8, 9, size) / 8).to(device, dtype)


def entries_of(width: int) -> list[int]:
    """How many of `width` columns to store: few, some, all but one and all; odd ones among them."""
    some = {1, 2, 3, 8, 13, 32, 64, width // 4, 3 * width // 8, width // 2 | 1, width - 1, width}
    return sorted(k for k in some if 1 <= k <= width)


def random_columns(num_rows: int, width: int, k: int, device: torch.device | str = 'cpu') -> Tensor:
    """Distinct columns of each row, in no order: parts of one permutation."""
    start = torch.randint(max(width, 1), (num_rows, 1))
    columns = torch.randperm(width)[(start + torch.arange(k)) % max(width, 1)]
    return columns.to(device, column_dtype(width))


def assert_near(actual: Tensor, expected: Tensor, magnitude: Tensor, terms: int) -> None:
    """Within a rounding of the result and those of a sum of `terms` in the accumulator.

    `magnitude` is that sum with absolute values of everything.
    """
    assert actual.shape == expected.shape
    rounding = torch.finfo(actual.dtype).eps
    summing = torch.finfo(actual.dtype if actual.dtype == torch.float64 else torch.float32).eps
    finite = expected.isfinite()
    error = torch.where(finite, (actual.double() - expected).abs(), 0)
    allowed = rounding * expected.abs() + (terms + 4) * summing * magnitude
    allowed += torch.finfo(actual.dtype).smallest_normal * rounding
    assert (error <= allowed)[finite].all(), f'off by {(error - allowed)[finite].max()}'
    assert torch.equal(
        torch.where(finite, 0, actual.double()).nan_to_num(nan=7.0),
        torch.where(finite, 0, expected).nan_to_num(nan=7.0),
    )


def reference_of(
    graph: Graph, x: Tensor, value: Tensor | None, reduce: str, grad: Tensor
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Result, gradient of x and of value in float64, and the magnitudes of all three."""
    csr = graph[:3]
    x, grad = x.detach().double(), grad.detach().double()
    value = None if value is None else value.detach().double()

    if reduce in ('sum', 'mean'):

        def run(x: Tensor, value: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
            inputs = [t.requires_grad_() for t in (x, value) if t is not None]
            out = reference.spmm(*csr, value, x, mean=reduce == 'mean')
            return out.detach(), *torch.autograd.grad(out, inputs, grad)

        return (
            run(x.clone(), None if value is None else value.clone(), grad),
            run(x.abs(), None if value is None else value.abs(), grad.abs()),
        )

    # Not by autograd, which multiplies what did not reach the maximum by zero: inf would give NaN.
    out, arg = reference.spmm_max(*csr, value, x, reduce == 'min')

    def grads(x: Tensor, value: Tensor | None, grad: Tensor) -> tuple[Tensor, ...]:
        grad_x = reference.spmm_max_backward_x(*csr, value, arg, grad, graph.num_src)
        if value is None:
            return (grad_x,)
        return grad_x, reference.spmm_max_backward_value(*csr, arg, grad, x, graph.num_edges)

    absolute = None if value is None else value.abs()
    return (
        (out, *grads(x, value, grad)),
        (out.abs(), *grads(x.abs(), absolute, grad.abs())),
    )


def multiplied(
    graph: Graph,
    x: Tensor | CBSR | Quantized,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    diag: Tensor | None = None,
    mean: bool = False,
    out_acc: bool = False,
    sampling: Sampling | None = None,
) -> Tensor:
    """The product of an operator, given by its parts, with features."""
    op = SparseOperator(graph, value, row_scale, col_scale, diag, mean=mean, sampling=sampling)
    return product(op, x, bias, out_acc)
