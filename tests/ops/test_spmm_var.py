"""The variance of neighbours: exact where they are equal, and near float64 at any mean."""

import pytest
import torch
from _raw_ops import ops, reference
from torch import Tensor
from torch_geometric.nn.aggr import VarAggregation

from pyg_fast.graph import Graph
from pyg_fast.ops.spmm_var import reduce_var
from pyg_fast.sparse.operator import SparseOperator, inverse_degree

from ._graphs import GRAPHS, hubs
from ._samples import Given, sample


@sample('spmm_var')
def _(given: Given) -> dict[str, object]:
    return dict(rowptr=given.csr['rowptr'], col=given.csr['col'], x=given.a)


def means_of(graph: Graph, dtype: torch.dtype) -> SparseOperator:
    return SparseOperator(graph, row_scale=inverse_degree(graph.rowptr, dtype))


@pytest.mark.parametrize('index', [torch.int32, torch.int64])
@pytest.mark.parametrize('width', [1, 3, 8, 17, 64, 130])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_equal_features_have_no_variance(
    device: torch.device, dtype: torch.dtype, width: int, index: torch.dtype
) -> None:
    """Each destination has a number of its own, at each of its edges; one has a hub's edges."""
    degree = torch.tensor([3, 0, 1, 70, 129, 3000, 2])
    rowptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)]).to(device, index)
    number = (torch.randn(degree.numel(), width) * 1000).to(device, dtype)
    x = number.repeat_interleave(degree.to(device), 0)
    col = torch.randperm(x.size(0), device=device)
    var, mean = ops.spmm_var(rowptr, col.argsort().int(), x[col.argsort().argsort()])
    assert var.dtype == mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert not var.any()
    exact = torch.where(degree.to(device).view(-1, 1) > 0, number, 0)
    assert torch.equal(mean, exact.to(mean.dtype))


@pytest.mark.parametrize('width', [1, 5, 64])
def test_far_from_zero(device: torch.device, width: int) -> None:
    edges = hubs(3000, 400, 40_000, 0.5, 0.1)
    graph = edges.graph(device=device)
    x = torch.randn(3000, width, device=device) + 1000
    var, mean = ops.spmm_var(*graph[:2], x)
    exact, exact_mean = reference.spmm_var(*graph[:2], x)
    assert ((var - exact).abs() <= 2e-6 * (1 + exact)).all()
    assert ((mean - exact_mean).abs() <= 1e-7 * exact_mean.abs()).all()


@pytest.mark.parametrize('place', ['row', 'rows'])
def test_long_rows(device: torch.device, place: str) -> None:
    size, num_rows = 300_000, 1 if place == 'row' else 3
    x = torch.rand(size, 3, device=device)
    rowptr = torch.tensor([0, size], device=device, dtype=torch.int32)
    if place == 'rows':
        rowptr = torch.tensor([0, 7, 150_000, size], device=device, dtype=torch.int32)
    col = torch.randperm(size, device=device).int()
    var, mean = ops.spmm_var(rowptr, col, x)
    exact, exact_mean = reference.spmm_var(rowptr, col, x)
    assert var.shape == (num_rows, 3)
    assert ((var - exact).abs() <= 2e-6 * exact).all()
    assert ((mean - exact_mean).abs() <= 2e-6 * exact_mean).all()
    assert torch.equal(var, ops.spmm_var(rowptr, col, x)[0])


@pytest.mark.parametrize('semi_grad', [False, True])
@pytest.mark.parametrize('name', ['square', 'tall', 'in_hubs'])
def test_gradient_is_that_of_pyg(device: torch.device, name: str, semi_grad: bool) -> None:
    edges = GRAPHS[name]
    graph, edge_index = edges.graph(device=device), edges.edge_index.to(device)
    x = torch.randn(edges.num_src, 7, dtype=torch.float64, device=device).requires_grad_()
    aggr = VarAggregation(semi_grad=semi_grad)
    outs = [
        reduce_var(means_of(graph, x.dtype), x, semi_grad)[0],
        aggr(x[edge_index[0]], edge_index[1], dim_size=edges.num_dst),
    ]
    torch.testing.assert_close(*outs)
    grad = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, x, grad, create_graph=True)[0] for out in outs]
    torch.testing.assert_close(*grads)
    second = [torch.autograd.grad((g * torch.sin(g)).sum(), x)[0] for g in grads]
    torch.testing.assert_close(*second)


def test_not_finite(device: torch.device) -> None:
    """NaN stays with its destination, and infinity becomes NaN, as PyG's."""
    x = torch.tensor([1.0, float('nan'), float('inf'), 3.0], device=device).view(-1, 1)
    rowptr = torch.tensor([0, 2, 4, 6, 8, 8], device=device, dtype=torch.int32)
    col = torch.tensor([0, 1, 2, 0, 0, 2, 0, 3], device=device, dtype=torch.int32)
    var = ops.spmm_var(rowptr, col, x)[0].view(-1).tolist()
    assert all(v != v for v in var[:3])
    assert var[3:] == [1.0, 0.0]


def test_no_edges_and_no_columns(device: torch.device) -> None:
    rowptr, col = torch.zeros(4, device=device).int(), torch.zeros(0, device=device).int()
    for width in (0, 3):
        for out in ops.spmm_var(rowptr, col, torch.rand(0, width, device=device)):
            assert torch.equal(out, torch.zeros(3, width, device=device))


def test_gradient_in_half_precision(device: torch.device) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    x = torch.randn(edges.num_src, 9, device=device).bfloat16().requires_grad_()

    def grad(x: Tensor) -> Tensor:
        return torch.autograd.grad(reduce_var(means_of(graph, x.dtype), x)[0].sum(), x)[0]

    actual, exact = grad(x), grad(x.detach().double().requires_grad_())
    assert actual.dtype == x.dtype
    assert (actual - exact).abs().max() <= 2**-8 * exact.abs().max()
