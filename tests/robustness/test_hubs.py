"""Every op on a row and a column of a tenth to all of the edges, beside its reference."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from _pairs import pairs
from _raw_ops import ops as kernels
from _raw_ops import reference
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, SAGEConv

import pyg_fast
from pyg_fast import ops
from pyg_fast.graph import Graph, prepare_edge_index
from pyg_fast.ops.attention_scores import attention_scores
from pyg_fast.ops.head_map import head_map_weight
from tests.ops._graphs import hubs

from ._entries import ENTRIES, on, on_edges
from .test_hostile_input import check, check_gradients

NUM_NODES = 40
WITH_EDGES = [
    name for name, entry in ENTRIES.items()
    if {'graph', 'edge_index', 'rowptr'} & entry.make().keys()
]  # fmt: skip


def test_most_ops_have_edges() -> None:
    assert {ENTRIES[name].op for name in WITH_EDGES} == {
        'to_csr', 'spmm', 'aggregate', 'gcn_norm', 'cbsr_spmm', 'gat', 'gatv2', 'sampled_spmm',
        'neighbor_sample', 'random_walk', 'pinsage_neighbors',
    }  # fmt: skip


@pytest.mark.parametrize('name', WITH_EDGES)
@pytest.mark.parametrize('row', [0.1, 0.5, 1.0])
def test_op(device: torch.device, name: str, row: float) -> None:
    for column, aligned in ((0.1, True), (0.5, False), (1.0, True)):
        edges = hubs(NUM_NODES - 1, NUM_NODES - 1, 1900, row, column, aligned).edge_index
        with on_edges(edges, NUM_NODES) as taken:
            args = {key: on(device, value) for key, value in ENTRIES[name].make().items()}
        assert len(taken) == 1
        assert check(name, args, set())
        check_gradients(name, args)


SUMS = ('sum, weights', 'mean', 'own sum', 'own softmax', 'GAT', 'GATv2')
LIMIT = 2e-6  # of errors, over the sum of absolute terms


@pytest.mark.parametrize('place', ['one row', 'one column', '1,000 nodes'])
@pytest.mark.parametrize('name', SUMS)
def test_long_sums(
    device: torch.device, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients are as exact as pairwise sums."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import hubs as bench

    assert set(SUMS) == bench.SUMS.keys()
    terms = bench.Terms(bench.SUMS[name], place, 200_000, device)
    assert terms.error(bench.PREPARED) <= LIMIT


NUM_TERMS, FEW = 200_000, 100


def hub(end: int, num_nodes: int = FEW) -> Tensor:
    """Edges of which all are of node 0."""
    edges = torch.randint(num_nodes, (2, NUM_TERMS))
    edges[end] = 0
    return edges


def cbsr_spmm(edges: Tensor, x: Tensor, w: Tensor) -> Tensor:
    columns = (torch.arange(FEW).view(-1, 1) + torch.tensor([0, 3, 4])) % 11
    cbsr = ops.CBSR(x[:, :3], columns.sort(1).values.to(torch.uint8), 11)
    if x.is_cuda:  # A plain list has no transpose there.
        edges = prepare_edge_index(edges, (FEW, FEW))[0]
    return ops.cbsr_spmm(edges, cbsr, w)


# Functions of positive numbers, of which the gradients are sums of positive numbers too.
LONG: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    **{
        f'aggregate, end {end}': (
            lambda x, w, end=end: ops.aggregate(hub(end), x, w),
            ((FEW, 5), (NUM_TERMS,)),
        )
        for end in (0, 1)
    },
    **{
        f'cbsr_spmm, end {end}': (
            lambda x, w, end=end: cbsr_spmm(hub(end), x, w),
            ((FEW, 5), (NUM_TERMS,)),
        )
        for end in (0, 1)
    },
    'gcn_norm': (lambda w: ops.gcn_norm(hub(1), w, FEW)[1], ((NUM_TERMS,),)),
    'maximum': (
        lambda x: ops.spmm(
            torch.stack([torch.zeros(NUM_TERMS).long(), torch.arange(NUM_TERMS)]), x, reduce='max'
        ),
        ((NUM_TERMS, 2),),
    ),
    'attention_scores': (lambda x, a: attention_scores(x, a)[0], ((NUM_TERMS, 2, 3), (2, 3))),
    'head_map_weight': (
        lambda x, grad: head_map_weight(x, grad, 2),
        ((NUM_TERMS, 6), (NUM_TERMS, 4)),
    ),
}


# CUDA adds the 2,000 terms of each source one after another, in any order, unless it must be
# deterministic: five standard deviations of the rounding.
ANY_ORDER = {'cbsr_spmm, end 1': 3.2e-6}


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(('name', 'deterministic'), [
    *((name, False) for name in LONG), *((name, True) for name in ANY_ORDER),
], indirect=['deterministic'])  # fmt: skip
def test_long_sums_of_op(device: torch.device, name: str, deterministic: bool) -> None:
    """Also where there is no softmax, and a sum of absolute terms is the sum."""
    run, shapes = LONG[name]
    any_order = device.type == 'cuda' and not deterministic
    limit = ANY_ORDER.get(name, LIMIT) if any_order else LIMIT
    found = []
    with device:
        given = [torch.rand(shape) for shape in shapes]
        for dtype in (torch.float32, torch.float64):
            torch.manual_seed(0)
            leaves = [value.to(dtype).requires_grad_() for value in given]
            out = run(*leaves)
            grad = torch.full(out.shape, torch.tensor(0.3).item(), dtype=dtype)
            found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for actual, exact in zip(*found, strict=True):
        assert (actual - exact).abs().max() <= limit * exact.abs().max()


# A source that sends to so many that CUDA kernels gather its terms, beside sources of a few.
NUM_ROWS = 120_000


def edges_of_a_source(device: torch.device, prepared: bool) -> Tensor:
    """Edges of node 1 to all nodes, and as many others."""
    everywhere = torch.arange(NUM_ROWS, device=device)
    src = torch.cat([torch.ones_like(everywhere), torch.randint_like(everywhere, NUM_ROWS)])
    edges = torch.stack([src, everywhere.repeat(2)])
    edges = edges[:, torch.randperm(edges.size(1), device=device)]
    if prepared:
        return prepare_edge_index(edges, (NUM_ROWS, NUM_ROWS))[0]
    return edges


@pairs(
    ('prepared', 'weighted', 'kind'), [False, True], [False, True],
    [(1, torch.float32), (5, torch.float32), (64, torch.float32), (8, torch.bfloat16)],
)  # fmt: skip
def test_gradient_of_a_source_that_wins_most_rows(
    device: torch.device, prepared: bool, weighted: bool, kind: tuple[int, torch.dtype]
) -> None:
    width, dtype = kind
    edges = edges_of_a_source(device, prepared)
    x = torch.randint(-9, 9, (NUM_ROWS, width), device=device).to(dtype)
    x[1] = 7  # It wins most of the rows, and shares some.
    weight = torch.randint(1, 3, (edges.size(1),), device=device).to(dtype) if weighted else None
    found = []
    for to in (dtype, torch.float64):
        leaf = x.to(to).requires_grad_()
        out = ops.spmm(edges, leaf, None if weight is None else weight.to(to), reduce='max')
        found += torch.autograd.grad(out, leaf, torch.full_like(out, 0.3, dtype=dtype).to(to))
    actual, exact = found
    assert exact[1].min() > 20_000  # terms of about 0.3
    limit = LIMIT if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((actual - exact).abs() <= limit * exact.abs()).all()


@pytest.mark.parametrize(('reduce', 'dtype'), [
    ('sum', torch.float32), ('mean', torch.float32), ('sum', torch.bfloat16)])  # fmt: skip
@pytest.mark.parametrize('weighted', [False, True])
def test_gradient_of_cbsr_of_a_source_of_many_edges(
    device: torch.device, reduce: str, dtype: torch.dtype, weighted: bool
) -> None:
    edges = edges_of_a_source(device, True)
    columns = torch.rand(NUM_ROWS, 24, device=device).topk(4).indices.sort().values
    values = torch.rand(NUM_ROWS, 4, device=device, dtype=dtype)
    weight = torch.rand(edges.size(1), device=device, dtype=dtype) if weighted else None
    found = []
    for to in (dtype, torch.float64):
        leaf = values.to(to).requires_grad_()
        cbsr = ops.CBSR(leaf, columns.to(torch.uint8), 24)
        out = ops.cbsr_spmm(edges, cbsr, None if weight is None else weight.to(to), reduce)
        found += torch.autograd.grad(out, leaf, torch.full_like(out, 0.3, dtype=dtype).to(to))
    actual, exact = found
    limit = LIMIT if dtype == torch.float32 else torch.finfo(dtype).eps
    assert ((actual - exact).abs() <= limit * exact.abs()).all()


def test_gradient_of_cbsr_of_a_source_of_many_edges_with_scales(device: torch.device) -> None:
    graph = Graph.from_edge_index(edges_of_a_source(device, False), NUM_ROWS)
    columns = torch.rand(NUM_ROWS, 24, device=device).topk(4).indices.sort().values
    grad = torch.rand(NUM_ROWS, 24, device=device)
    value = torch.rand(graph.num_edges, device=device)
    scales = torch.rand(3, NUM_ROWS, device=device).unbind()
    args = (*graph[:3], value, grad, columns.to(torch.uint8), *scales, False, *graph[3:6])
    actual, exact = kernels.cbsr_spmm_backward(*args), reference.cbsr_spmm_backward(*args)
    assert ((actual - exact).abs() <= LIMIT * exact).all()


# Rows of so many parts that several CUDA blocks merge them: they begin and end anywhere in the
# ranges of parts that a block merges, among shorter ones.
DEGREES = [100, 70_000, 90_001, 5, 66_000, 300, 30_000, 17_000, 100_000, 4]
LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f'SAGE {aggr}': lambda aggr=aggr: SAGEConv(6, 5, aggr=aggr)
       for aggr in ('sum', 'mean', 'max', 'var')},
    'GCN': lambda: GCNConv(6, 5),
    'GAT': lambda: GATConv(6, 4, 3),
    'GATv2': lambda: GATv2Conv(6, 4, 3),
}  # fmt: skip


@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('end', [0, 1])
@pytest.mark.parametrize('name', LAYERS)
def test_rows_of_many_parts(device: torch.device, name: str, end: int, prepared: bool) -> None:
    degree = torch.tensor(DEGREES, device=device) // (1 if device.type == 'cuda' else 16)
    with device:
        layer = LAYERS[name]().double()
        x = torch.randn(len(DEGREES), 6, dtype=torch.double)
        edges = torch.randint(len(DEGREES), (2, int(degree.sum())))
        edges[end] = torch.arange(len(DEGREES)).repeat_interleave(degree)
        edges = edges[:, torch.randperm(edges.size(1))]
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    given = prepare_edge_index(edges, (len(DEGREES),) * 2)[0] if prepared else edges
    found = []
    for run, graph in ((layer, edges), (fast, given), (fast, given)):
        leaves = [x.clone().requires_grad_(), *run.parameters()]
        out = run(leaves[0], graph)
        grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=device).view_as(out)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    adds_atomically = name == 'SAGE max' or (name == 'GCN' and not prepared)
    for exact, first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, exact, rtol=1e-9, atol=1e-9 * exact.abs().max().item())
        assert first.equal(second) or (adds_atomically and device.type == 'cuda')
