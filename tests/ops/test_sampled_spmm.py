"""Sampled aggregation: which edges are taken, results, gradients, expectations, bad input."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from _captures import captured
from _pairs import pairs
from _raw_ops import ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.functional import pad

from pyg_fast.graph import Graph, graph_of, prepare_edge_index
from pyg_fast.ops import sampled_spmm, spmm
from pyg_fast.ops.product import quantized
from pyg_fast.ops.sampling import sampled_graph, sampled_positions
from pyg_fast.sparse.operator import STRATEGIES, Sampling

from ._graphs import DTYPES, GRAPHS, WIDTHS, Edges, assert_near, edge_lists, exact, multiplied
from ._samples import Given, sample

CODES = {'bucket': 0, 'fastrand': 1, 'unbiased': 2, 'paper': 3, 'adaptive': 4}
SEED = 2**40 + 7
# Kernels share rows of more than 256 sampled edges among warps.
SAMPLES = (1, 2, 5, 32, 33, 300, 4096)


def raw_sampling(given: Given) -> dict[str, object]:
    seed = given.optional(given.seed)
    return dict(num_samples=4, strategy=2 if given.full else 1, seed=seed)


@sample('sampled_spmm')
def _(given: Given) -> dict[str, object]:
    return dict(
        **given.csr, value=given.value, x=given.a, **given.scaled, bias=given.bias,
        mean=not given.full, out_acc=False, **raw_sampling(given),
    )  # fmt: skip


@sample('sample_edges')
def _(given: Given) -> dict[str, object]:
    sampled_rowptr = pad(given.graph.rowptr.diff().clamp(max=4).cumsum(0), (1, 0))
    return dict(
        **given.csr, sampled_rowptr=sampled_rowptr.to(given.index), num_slots=4 * given.num_nodes,
        **raw_sampling(given),
    )  # fmt: skip


@sample('quantize_rows')
def _(given: Given) -> dict[str, object]:
    return dict(x=given.a)


def sampling_of(strategy: str, num_samples: int, device: torch.device) -> Sampling:
    return Sampling(num_samples, strategy).drawn(device, SEED)


def reference_of(
    graph: Graph, sampling: Sampling, x: Tensor, value: Tensor | None, mean: bool
) -> Tensor:
    return reference.sampled_spmm(
        *graph[:3], value, x, None, None, None, None, mean, False, *sampling.args()
    )


def check(graph: Graph, sampling: Sampling, x: Tensor, value: Tensor | None, mean: bool) -> None:
    """Compares result and gradients with the reference's."""
    leaves = [t.detach().requires_grad_() for t in (x, value) if t is not None]
    x, value = leaves[0], leaves[1] if value is not None else None
    out = multiplied(graph, x, value, mean=mean, sampling=sampling)
    assert (out.dtype, out.device) == (x.dtype, x.device)
    grad = exact(*out.shape, dtype=x.dtype, device=x.device)
    actual = out, *torch.autograd.grad(out, leaves, grad)
    results = []
    for absolute in (False, True):
        leaves = [
            (t.detach().abs() if absolute else t.detach()).double().requires_grad_() for t in leaves
        ]
        y = reference_of(graph, sampling, leaves[0], leaves[1] if value is not None else None, mean)
        g = (grad.abs() if absolute else grad).double()
        results.append((y.detach(), *torch.autograd.grad(y, leaves, g)))
    terms = max(graph.num_edges, x.size(1))
    for a, e, m in zip(actual, *results, strict=True):
        assert a.dtype == x.dtype
        assert_near(a.detach(), e, m, terms)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('weighted', [False, True])
def test_widths(device: torch.device, dtype: torch.dtype, strategy: str, weighted: bool) -> None:
    edges = GRAPHS['hub']
    graph = edges.graph(device=device)
    for width in WIDTHS:
        x = exact(edges.num_src, width, dtype=dtype, device=device)
        value = exact(graph.num_edges, dtype=dtype, device=device) if weighted else None
        check(graph, sampling_of(strategy, 7, device), x, value, mean=width % 2 == 0)


@pairs(('name', 'index', 'strategy'), list(GRAPHS), [torch.int32, torch.int64], STRATEGIES)
def test_graphs(device: torch.device, name: str, index: torch.dtype, strategy: str) -> None:
    edges = GRAPHS[name]
    graph = edges.graph(index, device)
    for k, num_samples in enumerate(SAMPLES):
        # Of types and widths each in turn with weights and means.
        for dtype, width in ((torch.float32, 6), (torch.float64, 40), (torch.bfloat16, 1)):
            sampling = sampling_of(strategy, num_samples, device)
            x = exact(edges.num_src, width, dtype=dtype, device=device)
            value = exact(graph.num_edges, dtype=dtype, device=device)
            given_ = value if (k + width) % 2 else None
            check(graph, sampling, x, given_, mean=given_ is not None)


@given(
    edge_lists(), st.sampled_from(WIDTHS[:-3]), st.sampled_from(DTYPES), st.booleans(),
    st.sampled_from(STRATEGIES), st.integers(1, 60), st.booleans(),
)  # fmt: skip
def test_any_graph(
    device: torch.device, edges: Edges, width: int, dtype: torch.dtype, weighted: bool,
    strategy: str, num_samples: int, mean: bool,
) -> None:  # fmt: skip
    graph = edges.graph(device=device)
    x = exact(edges.num_src, width, dtype=dtype, device=device)
    value = exact(graph.num_edges, dtype=dtype, device=device) if weighted else None
    check(graph, sampling_of(strategy, num_samples, device), x, value, mean)


def star(degree: int, device: torch.device | str = 'cpu') -> Edges:
    """One destination, with an edge from each source."""
    edge_index = torch.stack([torch.arange(degree), torch.zeros(degree, dtype=torch.long)])
    return Edges(edge_index.to(device), degree, 1)


def taken(degree: int, num_samples: int, strategy: str, device: torch.device) -> list[int]:
    graph = star(degree).graph(device=device)
    sampled = sampled_graph(graph, sampling_of(strategy, num_samples, device))
    return sampled.col.tolist()


# Past 2^20 edges the products of positions and strides leave 32 bits.
@pytest.mark.parametrize('degree', [2, 3, 6, 12, 30, 577, 576, 1154, 46_341, 2**20 + 2, 3_000_000])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_which_edges_are_taken(device: torch.device, degree: int, strategy: str) -> None:
    for num_samples in (1, 2, 5, 4096):
        actual = taken(degree, num_samples, strategy, device)
        expected = sampled_positions(degree, num_samples, CODES[strategy], SEED, 0)
        assert actual == expected
        if strategy != 'paper':
            assert len(set(actual)) == min(degree, num_samples)
        if degree > num_samples and strategy == 'bucket':
            assert actual == list(range(num_samples))
        if degree > num_samples and strategy == 'paper':
            assert actual == [k * 577 % degree for k in range(num_samples)]


def test_fastrand_is_never_a_bucket(device: torch.device) -> None:
    for degree in range(7, 700):
        _, stride, *_ = taken(degree, 5, 'fastrand', device)
        assert math.gcd(stride, degree) == 1
        if degree not in (8, 10, 12, 18, 30):  # few numbers are coprime to these
            assert 0.45 * degree < stride < 0.79 * degree
        assert min(stride, degree - stride) > 1


# From 16 runs on they become longer, but not in rows of less than twice as many edges.
@pytest.mark.parametrize(
    ('num_samples', 'degree', 'run'),
    [(1, 9, 1), (31, 10**6, 1), (32, 63, 1), (32, 64, 2), (60, 10**6, 2), (64, 255, 2),
     (64, 256, 4), (100, 2**20 + 3, 4), (128, 1024, 8), (4096, 100_000, 8)],
)  # fmt: skip
def test_adaptive_takes_even_runs(
    device: torch.device, num_samples: int, degree: int, run: int
) -> None:
    edges = torch.tensor(taken(degree, num_samples, 'adaptive', device))
    starts, count = edges[::run], -(-num_samples // run)
    assert torch.equal(edges, (starts.view(-1, 1) + torch.arange(run)).view(-1)[:num_samples])
    left_out = (degree - num_samples) * (torch.arange(count) + 0.5) / count
    assert (starts - left_out - run * torch.arange(count)).abs().max() <= 1


def test_adaptive_scales_sums_to_all_edges(device: torch.device) -> None:
    graph = star(100_000).graph(device=device)
    x = torch.rand(100_000, 3, dtype=torch.float64, device=device)
    for num_samples in (1000, 4096):
        actual = sampled_spmm(graph, x, num_samples, 'adaptive')
        assert (actual / x.sum(0) - 1).abs().max() < 0.05
        ones = sampled_spmm(graph, torch.ones_like(x), num_samples, 'adaptive')
        assert ones[0, 0].item() == pytest.approx(num_samples * 100_001 / (num_samples + 1))


def test_paper_repeats_edges_where_577_divides_the_degree(device: torch.device) -> None:
    assert set(taken(577, 16, 'paper', device)) == {0}
    times = Counter(taken(1154, 16, 'paper', device))
    assert times == {0: 8, 577: 8}
    graph = star(1154).graph(device=device)
    weight = torch.rand(1154, dtype=torch.float64, device=device, requires_grad=True)
    x = torch.rand(1154, 2, dtype=torch.float64, device=device)
    for mean in (False, True):
        check(graph, Sampling(16, 'paper'), x, weight, mean)
        check(graph, Sampling(16, 'paper'), x, None, mean)
    # Two rows, of which one repeats edges; the derivatives of all orders count them.
    edge_index = torch.stack([torch.arange(584) % 9, torch.arange(584) // 577])
    graph = Edges(edge_index, 9, 2).graph(device=device)
    x = torch.rand(9, 1, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.rand(584, dtype=torch.float64, device=device, requires_grad=True)
    results = []
    for out in (
        multiplied(graph, x, weight, sampling=Sampling(5, 'paper')),
        reference_of(graph, Sampling(5, 'paper'), x, weight, mean=False),
    ):
        y = out.pow(3).sum()
        for _ in range(3):
            grad_x, grad_weight = torch.autograd.grad(y, (x, weight), create_graph=True)
            y = grad_x.pow(2).sum() + grad_weight.pow(2).sum()
        results.append(y)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('reduce', ['sum', 'mean', 'max', 'min'])
def test_all_edges_are_the_full_aggregation(
    device: torch.device, strategy: str, reduce: str
) -> None:
    if strategy == 'unbiased' and reduce in ('max', 'min'):
        return
    for name in ('square', 'in_hubs', 'out_hubs'):
        edges = GRAPHS[name]
        graph = edges.graph(device=device)
        x = torch.randn(edges.num_src, 40, device=device)
        weight = torch.rand(graph.num_edges, device=device)
        degree = graph.rowptr.diff()
        one_part = degree <= 256  # On CUDA the parts of longer rows differ.
        for w in (None, weight):
            actual = sampled_spmm(graph, x, min(int(degree.max()), 4096), strategy, w, reduce)
            expected = spmm(graph, x, w, reduce)
            assert torch.equal(actual[one_part], expected[one_part])
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('strategy', [s for s in STRATEGIES if s != 'unbiased'])
@pytest.mark.parametrize('reduce', ['sum', 'mean', 'max', 'min'])
def test_is_the_aggregation_of_the_sampled_graph(
    device: torch.device, strategy: str, reduce: str
) -> None:
    edges = GRAPHS['in_hubs']
    graph = edges.graph(device=device)
    x = torch.randn(edges.num_src, 8, dtype=torch.float64, device=device, requires_grad=True)
    sampled = sampled_graph(graph, Sampling(6, strategy), transpose=True)
    actual = sampled_spmm(graph, x, 6, strategy, reduce=reduce)
    expected = spmm(sampled, x, reduce=reduce)
    if (strategy, reduce) == ('adaptive', 'sum'):
        degree = graph.rowptr.diff().double().view(-1, 1)
        expected = expected * ((degree + 1) / 7).clamp(min=1)
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x, grad), torch.autograd.grad(expected, x, grad)
    )


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_sampled_graph(device: torch.device, strategy: str) -> None:
    graph = GRAPHS['hub'].graph(device=device)
    sampled = sampled_graph(graph, sampling_of(strategy, 4, device), transpose=True)
    assert sampled.rowptr.diff().tolist() == graph.rowptr.diff().clamp(max=4).tolist()
    assert sampled.perm is not None
    assert sampled.t_perm is not None
    assert sampled.t_col is not None
    num_edges = int(sampled.rowptr[-1])
    src, dst = GRAPHS['hub'].edge_index.to(device)
    at = sampled.perm[:num_edges].long()
    assert torch.equal(src[at], sampled.col[:num_edges].long())
    rows = torch.arange(graph.num_dst, device=device).repeat_interleave(sampled.rowptr.diff())
    assert torch.equal(dst[at], rows)
    t_at = sampled.t_perm[:num_edges].long()
    assert sorted(t_at.tolist()) == sorted(at.tolist())
    assert torch.equal(dst[t_at], sampled.t_col[:num_edges].long())


@pytest.mark.parametrize('strategy', [s for s in STRATEGIES if s != 'paper'])
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
def test_sampled_edges_out_of_the_transpose(
    device: torch.device, strategy: str, index: torch.dtype
) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU sorts')
    big = torch.stack([torch.randint(50, (200_000,)), torch.randint(2, (200_000,))])
    for edges in (*GRAPHS.values(), Edges(big, 50, 2)):
        for num_samples in SAMPLES:
            size = edges.num_src, edges.num_dst
            graph = graph_of(prepare_edge_index(edges.edge_index.to(device), size)[0], *size)
            counts = ('rowptr', 't_rowptr', 't_perm')
            graph = graph._replace(**{name: getattr(graph, name).to(index) for name in counts})
            assert graph.perm is None
            sampling = sampling_of(strategy, num_samples, device)
            actual = sampled_graph(graph, sampling, transpose=True)
            order = torch.arange(graph.num_edges, dtype=index, device=device)
            expected = sampled_graph(graph._replace(perm=order), sampling, transpose=True)
            assert actual.t_perm is not None
            assert expected.t_perm is not None
            assert torch.equal(actual.t_rowptr, expected.t_rowptr)
            assert torch.equal(actual.t_col, expected.t_col)
            rows = torch.arange(graph.num_src, device=device)
            rows = rows.repeat_interleave(actual.t_rowptr.diff())
            positions = []
            for t in (actual.t_perm, expected.t_perm):  # alike edges of a row come in any order
                t = t[: rows.size(0)]
                positions.append(t[(rows * graph.num_edges + t).argsort()])
            assert torch.equal(*positions)
            torch.library.opcheck(
                torch.ops.pyg_fast.sample_transposed.default,
                (graph.rowptr, graph.t_rowptr, graph.t_col, graph.t_perm, actual.t_col.size(0),
                 *sampling.args()),
                test_utils=('test_schema', 'test_faketensor'),
            )  # fmt: skip


def test_transposes_that_do_not_fit(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU sorts')
    prepared, _ = prepare_edge_index(GRAPHS['square'].edge_index.to(device), (30, 30))
    graph = graph_of(prepared, 30, 30)
    good = graph.rowptr, graph.t_rowptr, graph.t_col, graph.t_perm, 90, 3, 1, None
    ops.sample_transposed(*good)
    for at, bad in (
        (0, graph.rowptr.long()), (0, graph.rowptr.cpu()), (1, graph.t_rowptr[:0]),
        (2, graph.t_col.float()), (3, graph.t_perm[1:]), (3, graph.t_perm.long()), (4, -1), (5, 0),
        (6, 2), (6, 3), (6, 9),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            ops.sample_transposed(*good[:at], bad, *good[at + 1 :])


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('prepared', [False, True])
def test_second_derivative_of_prepared_graphs(
    device: torch.device, prepared: bool, strategy: str
) -> None:
    edges = GRAPHS['square'].edge_index.to(device)
    graph = prepare_edge_index(edges, (30, 30))[0] if prepared else edges
    x = torch.randn(30, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert gradgradcheck(lambda x: sampled_spmm(graph, x, 3, strategy, seed=SEED).sin(), x)


@pytest.mark.parametrize('mean', [False, True])
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_gradcheck(device: torch.device, strategy: str, weighted: bool, mean: bool) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4], [0, 0, 0, 2, 2, 2, 3, 3]])
    graph = Edges(edge_index, 5, 4).graph(device=device)
    sampling = sampling_of(strategy, 2, device)
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(8, dtype=torch.float64, device=device, requires_grad=True)

    def run(x: Tensor, value: Tensor | None = None) -> Tensor:
        return multiplied(graph, x, value, mean=mean, sampling=sampling)

    inputs = (x, value) if weighted else (x,)
    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_scales_bias_and_diag(device: torch.device, strategy: str) -> None:
    edges = GRAPHS['square']
    graph, n = edges.graph(device=device), edges.num_src
    sampling = sampling_of(strategy, 3, device)
    x = torch.randn(n, 5, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(graph.num_edges, dtype=torch.float64, device=device, requires_grad=True)
    scales = [torch.rand(n, dtype=torch.float64, device=device) for _ in range(3)]
    for mean in (False, True):
        out = multiplied(graph, x, value, bias, *scales, mean=mean, sampling=sampling)
        expected = reference.sampled_spmm(
            *graph[:3], value, x, *scales, bias, mean, False, *sampling.args()
        )
        torch.testing.assert_close(out, expected)
        grad = torch.randn_like(out)
        inputs = x, bias, value
        torch.testing.assert_close(
            torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
        )


def test_unbiased_takes_each_edge_with_equal_probability(device: torch.device) -> None:
    # Chi-squared over the edges of one row. The counts of a call add up to S, so that they vary no
    # more than independent ones: 61 degrees of freedom pass 118 with a probability of 2e-5.
    degree, num_samples, calls = 62, 9, 4000
    counts = torch.zeros(degree)
    graph = star(degree).graph(device=device)
    x = torch.eye(degree, device=device)
    for step in range(calls):
        out = sampled_spmm(graph, x, num_samples, 'unbiased', seed=3, step=step)
        counts += out[0].cpu() * num_samples / degree
    expected = calls * num_samples / degree
    variance = expected * (1 - num_samples / degree)
    assert ((counts - expected) ** 2 / variance).sum() < 118


@pytest.mark.parametrize('reduce', ['sum', 'mean'])
def test_unbiased_gives_the_full_result_and_gradient_on_average(
    device: torch.device, reduce: str
) -> None:
    # Each number is within five standard errors of its mean: of 400 of them one is not in about
    # one run of 4,000, and the seed is fixed.
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    x = torch.randn(30, 3, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.rand(graph.num_edges, dtype=x.dtype, device=device, requires_grad=True)
    grad = torch.randn(30, 3, dtype=x.dtype, device=device)

    def results(out: Tensor) -> Tensor:
        grads = torch.autograd.grad(out, (x, weight), grad)
        return torch.cat([t.detach().flatten() for t in (out, *grads)])

    draws = torch.stack([
        results(sampled_spmm(graph, x, 3, 'unbiased', weight, reduce, seed=1, step=step))
        for step in range(1500)
    ])  # fmt: skip
    expected = results(spmm(graph, x, weight, reduce))
    error = (draws.mean(0) - expected).abs()
    assert (error <= 5 * draws.std(0) / math.sqrt(len(draws)) + 1e-9).all()


def test_seeds(device: torch.device) -> None:
    graph = GRAPHS['in_hubs'].graph(device=device)
    x = torch.randn(50, 4, device=device)

    def run(**kwargs: object) -> Tensor:
        return sampled_spmm(graph, x, 5, 'unbiased', **kwargs)  # type: ignore[arg-type]

    torch.manual_seed(5)
    first, second = run(), run()
    assert not torch.equal(first, second)  # every call draws anew
    torch.manual_seed(5)
    assert torch.equal(run(), first)
    assert torch.equal(run(seed=7), run(seed=torch.tensor([7], device=device)))
    assert torch.equal(run(seed=7, step=2), run(seed=torch.tensor([7], device=device), step=2))
    draws = [run(seed=seed, step=step) for seed in range(4) for step in range(4)]
    assert len({tuple(d.flatten().tolist()) for d in draws}) == 16
    for seed in (-(2**63), 2**63 - 1, 2**64 - 1):
        assert run(seed=seed, step=seed).isfinite().all()
    assert torch.equal(run(seed=-1), run(seed=2**64 - 1))


def test_a_seed_that_changes_before_the_backward_pass(device: torch.device) -> None:
    graph = GRAPHS['in_hubs'].graph(device=device)
    x = torch.randn(50, 4, device=device, requires_grad=True)
    seed = torch.tensor([7], device=device)
    expected = torch.autograd.grad(sampled_spmm(graph, x, 5, 'unbiased', seed=7).sum(), x)
    out = sampled_spmm(graph, x, 5, 'unbiased', seed=seed)
    seed.fill_(8)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected[0])


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_deterministic(device: torch.device, strategy: str) -> None:
    graph = GRAPHS['out_hubs'].graph(device=device)
    sampling = sampling_of(strategy, 300, device)
    x = torch.randn(50, 40, device=device, requires_grad=True)
    value = torch.rand(graph.num_edges, device=device, requires_grad=True)

    def bits() -> tuple[Tensor, ...]:
        out = multiplied(graph, x, value, sampling=sampling)
        return out, *torch.autograd.grad(out.sin().sum(), (x, value))

    first = bits()
    for _ in range(3):
        assert all(map(torch.equal, bits(), first))


@pytest.mark.parametrize('strategy', [s for s in STRATEGIES if s != 'unbiased'])
@pytest.mark.parametrize('weighted', [False, True])
def test_deterministic_extremes(device: torch.device, strategy: str, weighted: bool) -> None:
    edges = GRAPHS['in_hubs']
    graph = edges.graph(device=device)
    x = torch.randn(edges.num_src, 8, device=device, dtype=torch.float64, requires_grad=True)
    value = torch.rand(graph.num_edges, device=device).double().requires_grad_()
    inputs = (x, value) if weighted else (x,)

    def results() -> tuple[Tensor, ...]:
        out = sampled_spmm(graph, x, 5, strategy, value if weighted else None, 'max')
        return out, *torch.autograd.grad(out.sin().sum(), inputs)

    usual = results()
    torch.use_deterministic_algorithms(True)
    try:
        first, second = results(), results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, usual)


@pytest.mark.parametrize('dtype', DTYPES)
def test_quantized(device: torch.device, dtype: torch.dtype) -> None:
    edges = GRAPHS['in_hubs']
    graph = edges.graph(device=device)
    for width in (1, 5, 16, 40, 47, 256):
        x = torch.randn(edges.num_src, width, device=device).to(dtype)
        x[3] = 0
        codes, scale = ops.quantize_rows(x)
        assert codes.abs().max() == 127
        assert (codes[3] == 0).all()
        assert scale[3] == 0
        rounded = codes.double() * scale.view(-1, 1).double()
        error = (rounded - x.double()).abs().amax(1)
        assert (error <= scale * 0.5001 + 1e-12).all()
        weight = torch.rand(graph.num_edges, device=device).to(dtype)
        for strategy in STRATEGIES:
            for reduce in ('sum', 'mean'):
                out = sampled_spmm(graph, x, 7, strategy, weight, reduce, seed=SEED, quantize=True)
                assert out.dtype == dtype
                sampling = sampling_of(strategy, 7, device)
                rest = weight.double(), reduce == 'mean'
                expected = reference_of(graph, sampling, rounded, *rest)
                magnitude = reference_of(graph, sampling, rounded.abs(), *rest)
                rounding = max(torch.finfo(dtype).eps, 2e-6)  # sums run in float32
                assert ((out.double() - expected).abs() <= rounding * magnitude + 1e-30).all()


def test_quantized_with_scales(device: torch.device) -> None:
    edges = GRAPHS['square']
    graph, n = edges.graph(device=device), edges.num_src
    for dtype in DTYPES:
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(n, 32, device=device, dtype=dtype)
        scales = [torch.rand(n, dtype=acc, device=device) for _ in range(3)]
        bias = torch.rand(32, dtype=dtype, device=device)
        actual, expected = (
            multiplied(graph, given, None, bias, *scales, sampling=Sampling(3))
            for given in (quantized(x), x)
        )
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=0.06, rtol=0.01)
        wide = multiplied(
            graph, quantized(x), None, bias.to(acc), *scales, out_acc=True, sampling=Sampling(3)
        )
        assert wide.dtype == acc


@pytest.mark.parametrize('bad', [float('nan'), float('inf'), -float('inf')])
def test_quantized_numbers_that_are_not_finite_are_not_lost(
    device: torch.device, bad: float
) -> None:
    graph = Edges(torch.tensor([[0, 1, 2], [0, 0, 1]]), 3, 2).graph(device=device)
    x = torch.randn(3, 5, device=device)
    x[1, 2] = bad
    out = sampled_spmm(graph, x, 4, quantize=True)
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()
    tiny = torch.full((3, 5), 1e-44, device=device)
    assert (sampled_spmm(graph, tiny, 4, quantize=True).abs() <= 1e-43).all()


# Compiled code only hands the strategy on. One by Inductor, which takes longer.
@pytest.mark.parametrize(
    ('strategy', 'form'),
    [('paper', 'plain'), ('paper', 'prepared'), ('fastrand', 'plain'), ('adaptive', 'prepared'),
     ('bucket', 'plain'), ('unbiased', 'prepared')],
)  # fmt: skip
def test_compile(device: torch.device, strategy: str, form: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(30, 8, device=device, requires_grad=True)
    w = torch.rand(200, device=device, requires_grad=True)
    seed = torch.tensor([SEED], device=device)
    graph = GRAPHS['square'].edge_index.to(device)
    if form == 'prepared':
        graph, _ = prepare_edge_index(graph, (30, 30))

    def run(x: Tensor, w: Tensor) -> Tensor:
        return sampled_spmm(graph, x, 3, strategy, w, seed=seed)

    backend = 'inductor' if strategy == 'unbiased' else 'aot_eager'
    results = []
    for out in (torch.compile(run, fullgraph=True, backend=backend)(x, w), run(x, w)):
        results.append((out, *torch.autograd.grad(out.sin().sum(), (x, w))))
    torch.testing.assert_close(*results)


def test_cuda_graph(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('CUDA graphs need CUDA')
    graph = GRAPHS['in_hubs'].graph(device=device)
    x = torch.randn(50, 16, device=device, requires_grad=True)
    seed = torch.tensor([1], device=device)

    def step() -> tuple[Tensor, Tensor]:
        out = sampled_spmm(graph, x, 5, 'unbiased', seed=seed)
        return out, torch.autograd.grad(out.sin().sum(), x)[0]

    replay, results = captured(step)
    for number in (1, 2):
        seed.fill_(number)
        replay()
        torch.testing.assert_close(results, step())


@pytest.mark.parametrize(
    ('kwargs', 'error', 'match'),
    [
        (dict(num_samples=0), ValueError, "'num_samples' must be 1 to 4096, got 0"),
        (dict(num_samples=-3), ValueError, 'num_samples'),
        (dict(num_samples=4097), ValueError, 'num_samples'),
        (dict(num_samples=2.0), TypeError, "'num_samples' must be an integer, got float"),
        (dict(num_samples=True), TypeError, 'num_samples'),
        (dict(strategy='random'), ValueError, "'strategy' must be one of"),
        (dict(strategy=1), TypeError, 'strategy'),
        (dict(reduce='mul'), ValueError, "'reduce' must be one of"),
        (dict(strategy='unbiased', reduce='max'), ValueError, 'sums and means'),
        (dict(quantize=True, reduce='min'), ValueError, 'sums and means'),
        (dict(seed=2**64), ValueError, "'seed' must fit 64 bits"),
        (dict(seed=-(2**63) - 1), ValueError, 'seed'),
        (dict(step=2**64), ValueError, "'step' must fit 64 bits"),
        (dict(step=1.0), TypeError, 'step'),
        (dict(seed=0.5), TypeError, "'seed' must be an integer or a tensor"),
        (dict(seed=True), TypeError, 'seed'),
        (dict(seed=torch.zeros(1)), TypeError, "'seed' must be an int64 tensor"),
        (dict(seed=torch.zeros(2, dtype=torch.long)), ValueError, 'seed'),
        (dict(x=torch.rand(30)), ValueError, "'x' must have shape"),
        (dict(x=torch.rand(29, 4)), ValueError, "'x' must have one row for each"),
        (dict(x=torch.ones(30, 4, dtype=torch.int8)), TypeError, "'x' must be one of"),
        (dict(edge_weight=torch.rand(199)), ValueError, "'edge_weight' must have shape"),
        (dict(edge_weight=torch.rand(200).double()), TypeError, 'edge_weight'),
        (dict(graph='graph'), TypeError, 'graph'),
        (
            dict(quantize=True, x=torch.rand(30, 4, requires_grad=True)), ValueError,
            "'quantize' must be False",
        ),
    ],
)  # fmt: skip
def test_bad_input(device: torch.device, kwargs: dict, error: type[Exception], match: str) -> None:
    good = dict(
        graph=GRAPHS['square'].graph(device=device), x=torch.rand(30, 4), num_samples=3,
        strategy='fastrand',
    )  # fmt: skip
    kwargs = {
        k: v.to(device).requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
        for k, v in {**good, **kwargs}.items()
    }
    with pytest.raises(error, match=match):
        sampled_spmm(**kwargs)


def test_indices_out_of_range(device: torch.device, raises: Any) -> None:
    edge_index = torch.tensor([[0, 5], [1, 1]], device=device)
    with raises(IndexError, match='edge_index'):
        sampled_spmm(edge_index, torch.rand(3, 2, device=device), 1)


def test_quantize_without_gradients(device: torch.device) -> None:
    graph = GRAPHS['square'].graph(device=device)
    x = torch.rand(30, 4, device=device, requires_grad=True)
    with torch.no_grad():
        assert not sampled_spmm(graph, x, 3, quantize=True).requires_grad
