"""Rows of execution paths: counted outside, put back, taken, dropped out by node."""

from collections.abc import Callable

import pytest
import torch
from _raw_ops import ops, reference
from torch import Tensor

from pyg_fast.ops.path import Rows, expand, node_dropout, take

from ._graphs import DTYPES, GRAPHS, assert_near, exact
from ._samples import Given, sample

pytestmark = pytest.mark.usefixtures('several_threads')

WIDTHS = [0, 1, 3, 4, 8, 31, 64, 129]


@sample('expand_rows')
def _(given: Given) -> dict[str, object]:
    position = torch.randint(-1, given.num_nodes, (50,), device=given.device).to(given.index)
    return dict(x=given.a, position=position, fill=0.5)


@sample('node_dropout')
def _(given: Given) -> dict[str, object]:
    nodes = torch.randint(1 << 40, (given.num_nodes,), device=given.device)
    return dict(x=given.a, nodes=given.optional(nodes), seed=given.seed, dropout=0.5)


def rows_of(num_nodes: int, count: int, device: torch.device) -> Rows:
    nodes = torch.randperm(num_nodes)[:count].sort()[0]
    position = torch.full((num_nodes,), -1, dtype=torch.int32)
    position[nodes] = torch.arange(count, dtype=torch.int32)
    return Rows(nodes.to(device), position.to(device))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
@pytest.mark.parametrize('num_rows', [0, 1, 50, 3000])
def test_count_outside(
    device: torch.device, dtype: torch.dtype, index: torch.dtype, num_rows: int
) -> None:
    for width in WIDTHS:
        x = exact(num_rows, width, dtype=dtype, device=device)
        x[torch.rand(num_rows, device=device) < 0.5] = 0
        x[torch.rand(num_rows, device=device) < 0.1] = float('nan')
        x[:, : width // 2] = 0
        x[torch.rand(num_rows, device=device) < 0.1] = -0.0
        position = torch.randint(-1, 2, (num_rows,), device=device).to(index)
        counter = torch.tensor([5], device=device)
        ops.count_outside(x, position, counter)
        expected = ((x != 0).any(1) & (position < 0)).sum()
        assert int(counter) == 5 + int(expected)


def test_count_outside_traces(device: torch.device) -> None:
    x = exact(9, 4, dtype=torch.float, device=device)
    position = torch.randint(-1, 1, (9,), device=device)
    args = (x, position, torch.zeros(1, dtype=torch.long, device=device))
    torch.library.opcheck(torch.ops.pyg_fast.count_outside.default, args)


@pytest.mark.parametrize('bad', [0, 1, 2])
def test_count_outside_refuses_what_does_not_fit(device: torch.device, bad: int) -> None:
    x = exact(9, 4, dtype=torch.float, device=device)
    good = (x, torch.zeros(9, dtype=torch.int, device=device),
            torch.zeros(1, dtype=torch.long, device=device))  # fmt: skip
    for wrong in (good[bad].to(torch.float8_e5m2), good[bad][None], torch.cat([good[bad]] * 3)):
        given = [*good]
        given[bad] = wrong
        with pytest.raises(RuntimeError):
            ops.count_outside(*given)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('fill', [0.0, -2.0, float('nan'), float('inf')])
def test_expand(device: torch.device, dtype: torch.dtype, fill: float) -> None:
    for width in WIDTHS:
        rows = rows_of(70, 30, device)
        x = exact(30, width, dtype=dtype, device=device)
        out = expand(x, rows, fill)
        assert_near(out, reference.expand_rows(x, rows.position, fill), out.abs().double(), 0)
        assert torch.equal(take(out, rows), x)
    assert expand(x, Rows(None, None)) is x


def test_expand_few_rows(device: torch.device, limits: Callable[..., None]) -> None:
    """Of large results; a GPU fills these, and deterministic algorithms do not."""
    limits(numbers_filled_first=0)
    rows, x = rows_of(70, 8, device), exact(8, 5, dtype=torch.double, device=device)
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            for fill in (0.0, -2.0):
                out = expand(x, rows, fill)
                assert torch.equal(out, reference.expand_rows(x, rows.position, fill))
            full = torch.zeros_like(out).requires_grad_()
            (grad,) = torch.autograd.grad(take(full, rows), full, x)
            assert torch.equal(grad, reference.expand_rows(x, rows.position, 0.0))
        finally:
            torch.use_deterministic_algorithms(False)
    x = x.detach().requires_grad_()
    compiled = torch.compile(lambda x: expand(x, rows).square().sum(), backend='aot_eager')
    (grad,) = torch.autograd.grad(compiled(x), x)
    assert torch.equal(grad, 2 * x.detach())


def test_gradients_of_rows(device: torch.device) -> None:
    rows = rows_of(9, 4, device)
    x = exact(4, 3, dtype=torch.double, device=device).requires_grad_()
    full = exact(9, 3, dtype=torch.double, device=device).requires_grad_()
    for run, given in ((lambda x: expand(x, rows), x), (lambda x: take(x, rows), full)):
        assert torch.autograd.gradcheck(run, (given,))
        assert torch.autograd.gradgradcheck(run, (given,))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('p', [0.0, 0.3, 1.0])
def test_node_dropout(device: torch.device, dtype: torch.dtype, p: float) -> None:
    seed = torch.tensor([2**50 + 11], device=device)
    for width in WIDTHS:
        x = exact(70, width, dtype=dtype, device=device).requires_grad_()
        out = node_dropout(x, p, seed)
        expected = reference.node_dropout(x.detach(), None, seed, p)
        assert_near(out.detach(), expected, expected.abs(), 1)
        nodes = rows_of(70, 30, device).nodes
        assert torch.equal(node_dropout(x[nodes], p, seed, nodes), out[nodes])
        (grad,) = torch.autograd.grad(out.sum(), x)
        ones = torch.ones_like(x)
        assert torch.equal(grad, node_dropout(ones, p, seed))


def test_node_dropout_drops_at_its_rate(device: torch.device) -> None:
    x = torch.ones(4000, 50, device=device)
    seeds = torch.tensor([[1], [2]], device=device)
    first, second = (node_dropout(x, 0.3, seed) == 0 for seed in seeds)
    # Two seeds drop independently, and no row or column is spared.
    for dropped, rate in ((first, 0.3), (second, 0.3), (first ^ second, 2 * 0.3 * 0.7)):
        assert abs(float(dropped.double().mean()) - rate) < 0.005
    for dim, most in ((0, 0.06), (1, 0.35)):
        assert float((first.double().mean(dim) - 0.3).abs().max()) < most
    with pytest.raises(ValueError, match="'p' must be from 0 to 1, got 1.5"):
        node_dropout(x, 1.5, seeds[0])


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
@pytest.mark.parametrize('name', ['square', 'wide', 'tall', 'in_hubs', 'no_edges'])
def test_spmm_with_rows_of_its_own(
    device: torch.device, dtype: torch.dtype, index: torch.dtype, name: str
) -> None:
    graph = GRAPHS[name].graph(index, device)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    for width in WIDTHS[1:]:
        x = exact(graph.num_src, width, dtype=dtype, device=device)
        diag = exact(graph.num_dst, dtype=acc, device=device)
        scale = exact(graph.num_src, dtype=acc, device=device)
        # Beyond the last row there is none either.
        own = torch.randint(-2, graph.num_src + 3, (graph.num_dst,), device=device)
        valid = torch.where((own >= 0) & (own < graph.num_src), own, -1)

        def run(op: object, x: Tensor, own: Tensor, *scales: Tensor) -> Tensor:
            return op(*graph[:3], None, x, None, *scales, None, False, False, own)

        out = run(ops.spmm, x, own.int(), scale, diag)
        expected = run(reference.spmm, x, valid, scale, diag)
        magnitude = run(reference.spmm, x.abs(), valid, scale.abs(), diag.abs())
        assert_near(out, expected, magnitude, 2000)
