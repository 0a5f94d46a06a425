"""Sizes past what 32 bits count: only rows near both ends are compared."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _raw_ops import keeps, reference
from torch import Tensor

from pyg_fast import ops
from pyg_fast.graph import Graph
from pyg_fast.graph.graph import graph_of
from pyg_fast.sparse.groups import groups_of

from ._entries import ENTRIES, SEED, compare

MANY = 2**31
# Of so many columns, features have more than MANY entries.
WIDTH = 256
NUM_ROWS = MANY // WIDTH + 16
FEW = 300  # edges
GIBIBYTE = 2**30


@pytest.fixture
def room(cuda: torch.device) -> Iterator[Callable[[int], torch.device]]:
    """Skips a test unless so many gibibytes are free; what it takes is given back after it."""

    def device(gibibytes: int) -> torch.device:
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] // GIBIBYTE
        if free < gibibytes:
            pytest.skip(f'needs {gibibytes} GiB of free GPU memory, there are {free}')
        return cuda

    yield device
    gc.collect()
    torch.cuda.empty_cache()


def near_both_ends(count: int, num_rows: int) -> Tensor:
    near = torch.randint(50, (count,))
    return torch.where(torch.rand(count) < 0.5, near, num_rows - 1 - near)


def few_edges(device: torch.device) -> Tensor:
    return near_both_ends(2 * FEW, NUM_ROWS).view(2, FEW).to(device)


def random(*size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()


def check_rows(
    name: str,
    graph: Tensor,
    of_nodes: dict[str, Tensor],
    others: dict[str, Tensor],
    **options: Any,
) -> None:
    """The result and the gradients of an op over few edges, on the nodes that they join.

    The rows of `others` are not those of nodes.
    """
    entry = ENTRIES[name]
    nodes, local = graph.unique(return_inverse=True)
    inputs = {k: t.detach().requires_grad_() for k, t in {**of_nodes, **others}.items()}
    small = {
        k: (t[nodes] if k in of_nodes else t).detach().cpu().requires_grad_()
        for k, t in inputs.items()
    }
    (out,) = entry.run(graph=graph, **inputs, **options)
    cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
    (expected,) = entry.reference(graph=local.cpu(), **small, **cpu)
    compare(out[nodes].cpu(), expected, 'result')
    assert not out[NUM_ROWS // 2].any()

    few = torch.randn(expected.shape).to(out.dtype)
    grad = torch.zeros_like(out)
    grad[nodes] = few.to(grad.device)
    actual = torch.autograd.grad(out, [*inputs.values()], grad)
    wanted = torch.autograd.grad(expected, [*small.values()], few.double())
    for key, a, e in zip(inputs, actual, wanted, strict=True):
        compare((a[nodes] if key in of_nodes else a).cpu(), e.double(), f'gradient of {key}')
        assert key not in of_nodes or not a[NUM_ROWS // 2].any()


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('spmm sum', {'reduce': 'sum'}),
        ('spmm mean', {'reduce': 'mean'}),
        ('spmm max', {'reduce': 'max'}),
        ('aggregate scatter', {'mode': 'scatter'}),
        ('aggregate reduce', {'mode': 'reduce'}),
        ('sampled_spmm fastrand', {'num_samples': 2}),
    ],
)
def test_features(room: Callable[[int], torch.device], name: str, options: dict) -> None:
    device = room(30)
    x = random(NUM_ROWS, WIDTH, device=device)
    edge_weight = random(FEW, device=device)
    check_rows(name, few_edges(device), {'x': x}, {'edge_weight': edge_weight}, **options)


def test_gat(room: Callable[[int], torch.device]) -> None:
    device, heads = room(60), 4
    x = random(NUM_ROWS, heads, WIDTH // heads, device=device)
    scores = {f'alpha_{end}': random(NUM_ROWS, heads, device=device) for end in ('src', 'dst')}
    check_rows(
        'gat', few_edges(device), {'x': x, **scores},
        {'alpha_edge': random(FEW, heads, device=device)}, dropout=0.5,
        seed=torch.tensor([SEED], device=device),
    )  # fmt: skip


def test_gatv2(room: Callable[[int], torch.device]) -> None:
    device, heads = room(60), 4
    size = NUM_ROWS, heads, WIDTH // heads
    x = {name: random(*size, device=device) for name in ('x_src', 'x_dst')}
    check_rows('gatv2', few_edges(device), x, {'att': random(*size[1:], device=device)})


def test_scores_of_edges(room: Callable[[int], torch.device]) -> None:
    device, heads, num_nodes, num_edges = room(60), 40, 1000, MANY // 32
    edges = torch.randint(num_nodes, (2, num_edges), device=device)
    alpha_edge = torch.empty(num_edges, heads, device=device).normal_().requires_grad_()
    assert alpha_edge.numel() > MANY
    x = torch.randn(num_nodes, heads, 2, device=device)
    alpha_src, alpha_dst = torch.randn(2, num_nodes, heads, device=device)
    seed = torch.tensor([SEED], device=device)
    out = ops.gat(edges, x, alpha_src, alpha_dst, alpha_edge, dropout=0.5, seed=seed)
    # One node, whose edges are all over the list.
    node = 7
    at = (edges[1] == node).nonzero().view(-1)
    few = alpha_edge.detach()[at].cpu().requires_grad_()
    source = edges[0, at].cpu()
    parts = [t.cpu() for t in (x, alpha_src, alpha_dst[node])]
    score = (parts[1][source] + parts[2] + few).double()
    p = torch.nn.functional.leaky_relu(score, 0.2).softmax(0)
    p = p * keeps(seed, at, heads, 0.5).cpu() * 2
    expected = (p.unsqueeze(-1) * parts[0][source]).sum(0)
    compare(out[node].cpu(), expected, 'result')
    (grad,) = torch.autograd.grad(out[node].sum(), alpha_edge)
    (wanted,) = torch.autograd.grad(expected.sum(), few)
    # Each of tens of thousands of weights is tiny: so are their gradients.
    scale = 1 / wanted.abs().max()
    compare(grad[at].cpu() * scale, wanted.double() * scale, 'gradient')
    assert not grad[(edges[1] == node + 1).nonzero()[-1]].any()


@pytest.mark.parametrize('balanced', [False, True])
def test_maxk(room: Callable[[int], torch.device], balanced: bool) -> None:
    device, k = room(30), 8
    x = random(NUM_ROWS, WIDTH, device=device).requires_grad_()
    rows = torch.tensor([0, 1, NUM_ROWS // 2, NUM_ROWS - 2, NUM_ROWS - 1], device=device)
    out = ops.maxk(x, k, balanced).to_dense()
    few = x.detach()[rows].cpu().requires_grad_()
    expected = reference.cbsr_to_dense(*reference.maxk(few, k, balanced), WIDTH)
    compare(out[rows].cpu(), expected, 'result')
    grad = random(NUM_ROWS, WIDTH, device=device)
    wanted = torch.autograd.grad(expected, few, grad[rows].cpu().double())[0]
    compare(torch.autograd.grad(out, x, grad)[0][rows].cpu(), wanted.double(), 'gradient')


@pytest.mark.parametrize('deterministic', [False, True])
def test_entries_of_rows(room: Callable[[int], torch.device], deterministic: bool) -> None:
    device, k, num_dst = room(30), 32, 8
    num_src = MANY // k + 16
    values = random(num_src, k, device=device).requires_grad_()
    shift = torch.arange(num_src, device=device).remainder_(8).byte()
    columns = torch.arange(0, WIDTH, 8, device=device).byte() + shift.view(-1, 1)
    cbsr = ops.CBSR._of(values, columns, WIDTH)  # The check of columns needs room of its own.
    source = near_both_ends(FEW, num_src).to(device)
    edges = torch.stack([source, torch.randint(num_dst, (FEW,), device=device)])
    graph = graph_of(edges, num_src, num_dst)
    torch.use_deterministic_algorithms(deterministic)
    try:
        out = ops.cbsr_spmm(graph, cbsr)
        grad = random(num_dst, WIDTH, device=device)
        (actual,) = torch.autograd.grad(out, values, grad)
    finally:
        torch.use_deterministic_algorithms(False)
    nodes, local = source.unique(return_inverse=True)
    few, at = (t.detach()[nodes].cpu() for t in (values, columns))
    few.requires_grad_()
    dense = reference.cbsr_to_dense(few, at, WIDTH)
    expected = dense.new_zeros(num_dst, WIDTH).index_add(0, edges[1].cpu(), dense[local.cpu()])
    compare(out.cpu(), expected, 'result')
    (wanted,) = torch.autograd.grad(expected, few, grad.cpu().double())
    compare(actual[nodes].cpu(), wanted.double(), 'gradient')
    assert not actual[num_src // 2].any()


def test_gather_rows(room: Callable[[int], torch.device]) -> None:
    device, width = room(10), 64
    num_rows = MANY // width + 16
    x = torch.empty(num_rows, width, dtype=torch.int8, device=device).random_()
    index = near_both_ends(FEW, num_rows).to(device)
    assert torch.equal(ops.gather_rows(x, index), x[index])
    # To more entries than 32 bits count, too.
    index = torch.arange(num_rows - 1, -1, -1, device=device)
    out = ops.gather_rows(x, index)
    assert torch.equal(out[:50], x[-50:].flip(0))
    assert torch.equal(out[-50:], x[:50].flip(0))


def test_edges(room: Callable[[int], torch.device]) -> None:
    device, num_nodes = room(120), 2**20
    num_edges = MANY + 1000
    edges = torch.empty(2, num_edges, dtype=torch.int32, device=device).random_(num_nodes)
    rowptr, col, perm = ops.to_csr(edges, num_nodes, num_nodes)
    assert rowptr.dtype == col.dtype == perm.dtype == torch.int64
    assert int(rowptr[-1]) == num_edges
    assert bool((rowptr.diff() >= 0).all())
    at = near_both_ends(1000, num_edges).to(device)
    row = torch.searchsorted(rowptr, at, right=True) - 1
    assert torch.equal(edges[:, perm[at]].long(), torch.stack([col[at], row]))
    x = torch.randn(num_nodes, 2, device=device)
    graph = Graph(rowptr, col, None, None, None, None, num_nodes, num_nodes)
    out = ops.spmm(graph, x)
    for node in (0, num_nodes // 2, num_nodes - 1):
        mine = col[rowptr[node] : rowptr[node + 1]]
        compare(out[node].cpu(), x[mine].double().sum(0).cpu(), f'row {node}')


# Those that need no memory ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ('num_nodes', 'num_edges', 'dtype'),
    [
        (10, MANY - 1025, torch.int32),
        (10, MANY - 1024, torch.int64),
        (10, 5 * MANY, torch.int64),
        (MANY - 1025, 10, torch.int32),
        (MANY - 1024, 10, torch.int32),
    ],
)
def test_indices_are_wide_enough(num_nodes: int, num_edges: int, dtype: torch.dtype) -> None:
    edges = torch.empty(2, num_edges, dtype=torch.int64, device='meta')
    rowptr, col, perm = ops.to_csr(edges, num_nodes, num_nodes)
    assert (rowptr.dtype, col.dtype, perm.dtype) == (dtype, torch.int32, dtype)
    assert (rowptr.numel(), col.numel()) == (num_nodes + 1, num_edges)


def test_more_than_an_int32_counts_is_refused() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="'ids' must have fewer than"):
        ops.relabel(one.expand(MANY))
    rowptr, col = torch.tensor([0, 1]), one
    with pytest.raises(ValueError, match='a mini-batch may have 2147483647 edges'):
        ops.neighbor_sample(rowptr, col, one.expand(3), [2**30], replace=True)
    with pytest.raises(ValueError, match="'num_columns' must be at most 2147483647"):
        ops.CBSR(torch.ones(1, 1), one.view(1, 1), MANY)
    pointers = torch.tensor([0, MANY - 1], dtype=torch.int32)
    with pytest.raises(ValueError, match='more than torch.int32 holds'):
        groups_of(torch.cat([pointers, pointers[1:]]), 1)
