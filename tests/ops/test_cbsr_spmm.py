"""Aggregation of CBSR features: results, gradients, bad input, compilation, CUDA graphs, memory."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _captures import captured
from _pairs import pairs
from _profile import ops_of, sorts_of
from _raw_ops import ops, reference
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck, gradgradcheck

from pyg_fast.graph import Graph, graph_of, prepare_edge_index
from pyg_fast.ops import CBSR, cbsr_spmm, maxk, spmm

from ._graphs import (
    DTYPES,
    GRAPHS,
    MAXK_WIDTHS,
    Edges,
    assert_near,
    edge_lists,
    entries_of,
    exact,
    multiplied,
    random_columns,
)
from ._samples import Given, sample

REDUCE = ['sum', 'mean']
_module = importlib.import_module('pyg_fast.ops.product')


def entries_for(given: Given) -> tuple[Tensor, Tensor]:
    n = given.num_nodes
    return given.exact(n, 4), random_columns(n, 9, 4, given.device)


@sample('cbsr_spmm')
def _(given: Given) -> dict[str, object]:
    values, columns = entries_for(given)
    return dict(
        **given.csr, value=given.value, values=values, columns=columns, dim=9, **given.scaled,
        bias=given.bias, mean=given.full, out_acc=False,
    )  # fmt: skip


@sample('cbsr_spmm_backward')
def _(given: Given) -> dict[str, object]:
    return dict(
        **given.csr, value=given.value, grad=given.a, columns=entries_for(given)[1],
        **given.scaled, mean=given.full, **given.transpose,
    )  # fmt: skip


@sample('cbsr_spmm_backward_ordered')
def _(given: Given) -> dict[str, object]:
    graph = given.graph
    return dict(
        t_rowptr=graph.t_rowptr, t_col=graph.t_col, t_perm=given.optional(graph.t_perm),
        value=given.value, grad=given.a, columns=entries_for(given)[1], **given.scaled,
    )  # fmt: skip


@sample('cbsr_sddmm')
def _(given: Given) -> dict[str, object]:
    values, columns = entries_for(given)
    return dict(
        **given.csr, grad=given.a, values=values, columns=columns, **given.scales,
        mean=given.full, num_values=given.num_edges,
    )  # fmt: skip


@pytest.fixture
def sparse(limits: Callable[..., None]) -> None:
    """Reads features as entries, whatever their number."""
    limits(dense_share=(2, 2))


@pytest.fixture(params=['sparse', 'dense'])
def share(request: pytest.FixtureRequest, limits: Callable[..., None]) -> str:
    """Reads features as entries and as dense rows."""
    share = 2 if request.param == 'sparse' else 0
    limits(dense_share=(share, share))
    return request.param


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def entries(edges: Edges, width: int, k: int, dtype: torch.dtype, device: torch.device) -> CBSR:
    columns = random_columns(edges.num_src, width, k, device)
    return CBSR(exact(edges.num_src, k, dtype=dtype, device=device), columns, width)


def weights(edges: Edges, dtype: torch.dtype, device: torch.device) -> Tensor:
    return exact(edges.edge_index.size(1), dtype=dtype, device=device)


def reference_of(
    graph: Graph, cbsr: CBSR, value: Tensor | None, mean: bool, grad: Tensor
) -> tuple[Tensor, ...]:
    """Result, gradient of the values and of the weights in float64."""
    csr, columns = graph[:3], cbsr.columns
    values, grad = cbsr.values.detach(), grad.detach().double()
    value = None if value is None else value.detach()
    out = reference.cbsr_spmm(*csr, value, values, columns, cbsr.num_columns, mean=mean)
    none = None, None
    grads = [reference.cbsr_spmm_backward(*csr, value, grad, columns, *none, None, mean)]
    if value is not None:
        num_edges = graph.num_edges
        grads.append(reference.cbsr_sddmm(*csr, grad, values, columns, *none, mean, num_edges))
    return out, *grads


def absolute(cbsr: CBSR) -> CBSR:
    return CBSR._of(cbsr.values.detach().abs(), cbsr.columns, cbsr.num_columns)


def check(
    graph: Graph,
    cbsr: CBSR,
    value: Tensor | None = None,
    reduce: str = 'sum',
    grad: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Compares result and gradients, both ways to get that of the values, with the reference's."""
    cbsr = CBSR._of(cbsr.values.detach().requires_grad_(), cbsr.columns, cbsr.num_columns)
    value = None if value is None else value.detach().requires_grad_()
    inputs = [cbsr.values] if value is None else [cbsr.values, value]
    out = cbsr_spmm(graph, cbsr, value, reduce)
    assert (out.dtype, out.device) == (cbsr.dtype, cbsr.device)
    assert out.is_contiguous()
    grad = exact(*out.shape, dtype=out.dtype, device=out.device) if grad is None else grad
    actual = out, *torch.autograd.grad(out, inputs, grad)
    mean = reduce == 'mean'
    expected = reference_of(graph, cbsr, value, mean, grad)
    magnitude = reference_of(
        graph, absolute(cbsr), None if value is None else value.abs(), mean, grad.abs()
    )
    terms = max(graph.num_edges, cbsr.k)
    for a, e, m in zip(actual, expected, magnitude, strict=True):
        assert a.dtype == cbsr.dtype
        assert_near(a.detach(), e, m, terms)
    if graph.t_rowptr is not None:
        scale = graph.rowptr.diff().clamp(min=1).double().reciprocal() if mean else None
        scale = None if scale is None else scale.to(acc_of(grad.dtype))
        v = None if value is None else value.detach()
        ordered = ops.cbsr_spmm_backward_ordered(
            *graph[3:6], v, grad, cbsr.columns, None, scale, None
        )
        assert_near(ordered, expected[1], magnitude[1], terms)
    return actual


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('reduce', REDUCE)
def test_widths(
    device: torch.device, sparse: None, dtype: torch.dtype, weighted: bool, reduce: str
) -> None:
    # Each combination takes other numbers of entries; on the whole they take all.
    first = (DTYPES.index(dtype) + 2 * weighted + REDUCE.index(reduce)) % 4
    for width in MAXK_WIDTHS:
        edges = GRAPHS['hub' if width <= 257 else 'wide']
        graph = edges.graph(device=device)
        for k in entries_of(width)[first::4]:
            value = weights(edges, dtype, device) if weighted else None
            check(graph, entries(edges, width, k, dtype, device), value, reduce)


@pairs(('name', 'index', 'reduce'), list(GRAPHS), [torch.int32, torch.int64], REDUCE)
def test_graphs(
    device: torch.device, share: str, name: str, index: torch.dtype, reduce: str
) -> None:
    edges = GRAPHS[name]
    graph = edges.graph(index, device)
    for dtype in DTYPES:
        value = weights(edges, dtype, device)
        # Each width with weights for one of `share`, without for the other.
        for at, (width, k) in enumerate(((1, 1), (6, 2), (40, 13), (300, 32))):
            given_ = value if at % 2 == (share == 'sparse') else None
            check(graph, entries(edges, width, k, dtype, device), given_, reduce)


@given(edge_lists(), st.data(), st.sampled_from(DTYPES), st.booleans(), st.sampled_from(REDUCE))
def test_any_graph(
    device: torch.device,
    edges: Edges,
    data: st.DataObject,
    dtype: torch.dtype,
    weighted: bool,
    reduce: str,
) -> None:
    width = data.draw(st.sampled_from(MAXK_WIDTHS[:-4]))
    cbsr = entries(edges, width, data.draw(st.integers(1, width)), dtype, device)
    value = weights(edges, dtype, device) if weighted else None
    check(edges.graph(device=device), cbsr, value, reduce)


@pytest.mark.parametrize('dtype', DTYPES)
def test_more_columns_than_uint16_counts(
    device: torch.device, sparse: None, dtype: torch.dtype
) -> None:
    edges = Edges(torch.tensor([[0, 1, 2, 2, 1], [0, 0, 0, 1, 1]]), 3, 2)
    for width in (65536, 65537, 70000):
        columns = torch.arange(33, device=device) * -1999 + (width - 1)
        columns = torch.stack([columns, columns - 1, columns.flip(0)])
        values = exact(3, 33, dtype=dtype, device=device)
        cbsr = CBSR(values, columns, width)
        check(edges.graph(device=device), cbsr, weights(edges, dtype, device), 'mean')


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('reduce', REDUCE)
def test_all_entries_give_the_dense_aggregation(
    device: torch.device, share: str, dtype: torch.dtype, weighted: bool, reduce: str
) -> None:
    edges = GRAPHS['in_hubs']
    graph = edges.graph(device=device)
    for width in (1, 5, 33, 256, 300):
        x = exact(50, width, dtype=dtype, device=device).requires_grad_()
        w = weights(edges, dtype, device).requires_grad_() if weighted else None
        inputs = (x, w) if weighted else (x,)
        results = []
        for out in (
            cbsr_spmm(graph, maxk(x, width), w, reduce),
            cbsr_spmm(graph, CBSR.from_dense(x, width), w, reduce),
            spmm(graph, x, w, reduce),
        ):
            grad = torch.ones_like(out)
            results.append([out, *torch.autograd.grad(out, inputs, grad)])
        # Sums of eighths, exact in any order up to the division of a mean.
        for result in results[:-1]:
            torch.testing.assert_close(result, results[-1])


def test_both_ways_of_reading_agree(device: torch.device, limits: Callable[..., None]) -> None:
    edges = GRAPHS['in_hubs']
    graph = edges.graph(device=device)
    for dtype in DTYPES:
        for k in (1, 20, 33, 64):
            cbsr = entries(edges, 64, k, dtype, device)
            w = weights(edges, dtype, device)
            for share in (0, 3 / 8, 2):
                limits(dense_share=(share, share))
                check(graph, cbsr, w, 'mean')


@pytest.mark.parametrize(
    ('dtype', 'k', 'degree', 'cache', 'wide', 'dense'),
    [
        (torch.float32, 8, 32, 1 << 20, True, True),
        (torch.float16, 8, 32, 1 << 20, True, True),
        (torch.float32, 7, 32, 1 << 20, True, False),
        (torch.float32, 8, 31, 1 << 20, True, False),
        (torch.float32, 8, 32, 40 * 64 * 4 - 1, True, False),
        (torch.float32, 8, 32, 1 << 20, False, False),
        (torch.bfloat16, 8, 32, 1 << 20, True, False),
        (torch.float64, 8, 32, 1 << 20, True, False),
        (torch.float64, 13, 1, 0, False, True),
    ],
)
def test_reads_dense_rows_that_stay_in_the_cache(
    limits: Callable[..., None],
    dtype: torch.dtype,
    k: int,
    degree: int,
    cache: int,
    wide: bool,
    dense: bool,
) -> None:
    limits(cache_bytes=cache, wide_vectors=wide)
    edges = Edges(torch.randint(40, (2, 40 * degree)), 40, 40)
    graph, cbsr = edges.graph(), entries(edges, 64, k, dtype, torch.device('cpu'))
    calls = ops_of(lambda: cbsr_spmm(graph, cbsr))
    assert ('pyg_fast::cbsr_to_dense' in calls) == dense
    assert ('pyg_fast::cbsr_spmm' in calls) != dense


@pytest.mark.parametrize('balanced', [False, True])
def test_of_maxk(device: torch.device, balanced: bool) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    for width, k in ((16, 4), (100, 7), (256, 32), (300, 299)):
        x = torch.randn(30, width, device=device, dtype=torch.float64, requires_grad=True)
        dense = maxk(x, k, balanced).to_dense()
        results = []
        for out in (cbsr_spmm(graph, maxk(x, k, balanced)), spmm(graph, dense)):
            results.append((out, *torch.autograd.grad(out.pow(2).sum(), x)))
        torch.testing.assert_close(*results)


def test_threads() -> None:
    edges = Edges(torch.randint(1000, (2, 9000)), 1000, 1000)
    edges.edge_index[1, :4000] = 5
    edges.edge_index[0, 3000:6000] = 7
    graph = edges.graph()
    before = torch.get_num_threads()
    try:
        for dtype, width, k in ((torch.float32, 64, 23), (torch.bfloat16, 40, 39)):
            values = torch.randn(1000, k).to(dtype).requires_grad_()
            cbsr = CBSR(values, random_columns(1000, width, k), width)
            w = torch.randn(9000).to(dtype).requires_grad_()
            grad = torch.randn(1000, width).to(dtype)
            torch.set_num_threads(7)
            results = [check(graph, cbsr, w, 'mean', grad)]
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                out = cbsr_spmm(graph, cbsr, w, 'mean')
                results.append((out, *torch.autograd.grad(out, (values, w), grad)))
            for other in results[1:]:
                assert all(map(torch.equal, results[0], other))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(('width', 'k'), [(3, 1), (64, 16), (300, 33)])
def test_layouts(device: torch.device, share: str, dtype: torch.dtype, width: int, k: int) -> None:
    edges = GRAPHS['square']
    graph, n = edges.graph(device=device), edges.num_src
    num_edges = graph.num_edges
    columns = random_columns(n, width, k, device)

    def layouts(a: int, b: int) -> list[Tensor]:
        return [
            exact(a * b + 1, dtype=dtype, device=device)[1:].view(a, b),
            exact(b, a, dtype=dtype, device=device).t(),
            exact(a, 2 * b + 1, dtype=dtype, device=device)[:, 1::2],
            exact(1, b, dtype=dtype, device=device).expand(a, b),
            exact(1, 1, dtype=dtype, device=device).expand(a, b),
        ]

    value = exact(2 * num_edges + 1, dtype=dtype, device=device)[1::2]
    one = exact(1, dtype=dtype, device=device).expand(num_edges)
    for values, grad in zip(layouts(n, k), layouts(n, width)[::-1], strict=True):
        check(graph, CBSR(values, columns, width), value, 'sum', grad)
        check(graph, CBSR(values, columns, width), one, 'mean', grad)
    padded = torch.cat([columns.new_zeros(1), columns.flatten()])
    wide = random_columns(n, width, min(2 * k, width), device)
    for strange in (
        padded[1:].view(n, k),
        columns.t().contiguous().t(),
        wide[:, ::2],
        columns[:1].expand(n, k),
    ):
        values = exact(n, strange.size(1), dtype=dtype, device=device)
        check(graph, CBSR(values, strange, width), value)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize(('width', 'k'), [(1, 1), (9, 2), (65, 17), (300, 300)])
def test_nan_and_infinity_stay_where_they_belong(
    device: torch.device, share: str, dtype: torch.dtype, width: int, k: int
) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 4, 3], [0, 0, 1, 2, 3, 3, 3]])
    edges = Edges(edge_index, 5, 5)
    graph = edges.graph(device=device)
    nan, inf = float('nan'), float('inf')
    for special in (nan, inf, -inf):
        cbsr = entries(edges, width, k, dtype, device)
        cbsr.values[2] = special
        cbsr.values[0, -1] = special
        for w in (None, weights(edges, dtype, device).abs() + 1):
            for reduce in REDUCE:
                check(graph, cbsr, w, reduce)
                out = cbsr_spmm(graph, cbsr, w, reduce)
                assert (out[1].isfinite().sum(), out[2:].isfinite().all()) == (width - k, True)
                assert not out[0, cbsr.columns[0, -1].long()].isfinite()
                assert out[0].isfinite().sum() == width - 1
    w = weights(edges, dtype, device)
    w[2] = nan  # that of the one edge of node 1
    cbsr = entries(edges, width, k, dtype, device)
    out = cbsr_spmm(graph, cbsr, w)
    assert out[1, cbsr.columns[2].long()].isnan().all()
    assert out[[0, 2, 3, 4]].isfinite().all()
    # A gradient that is not finite reaches no column that is not stored.
    grad = torch.full_like(out, nan)
    grad[:, cbsr.columns[2].long()] = 1
    values = cbsr.values.requires_grad_()
    (grad_values,) = torch.autograd.grad(cbsr_spmm(graph, cbsr), values, grad)
    assert (grad_values[2] == 1).all()


def test_sums_of_halves_run_in_float32(device: torch.device, share: str) -> None:
    graph = Edges(torch.zeros(2, 4096, dtype=torch.long), 1, 1).graph(device=device)
    for dtype in (torch.float16, torch.bfloat16):
        for mean in (False, True):
            columns = torch.arange(6, device=device).view(1, 6)
            cbsr = CBSR(torch.ones(1, 6, dtype=dtype, device=device), columns, 64)
            values = cbsr.values.requires_grad_()
            w = torch.ones(4096, dtype=dtype, device=device, requires_grad=True)
            out = cbsr_spmm(graph, cbsr, w, 'mean' if mean else 'sum')
            total = 1 if mean else 4096
            assert (out[:, :6] == total).all()  # in bfloat16 it would have stopped at 256
            assert (out[:, 6:] == 0).all()
            grad_values, grad_w = torch.autograd.grad(out.sum(), (values, w))
            assert (grad_values == total).all()
            assert (grad_w == (6 / 4096 if mean else 6)).all()
    cbsr = CBSR(torch.ones(1, 4096, dtype=torch.bfloat16), torch.arange(4096)[None], 4096)
    w = torch.ones(1, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = cbsr_spmm(torch.zeros(2, 1, dtype=torch.long, device=device), cbsr.to(device), w)
    assert torch.autograd.grad(out.sum(), w)[0] == 4096


def test_add_is_sum(device: torch.device) -> None:
    edges = GRAPHS['square']
    cbsr = entries(edges, 40, 4, torch.float32, device)
    graph = edges.graph(device=device)
    assert torch.equal(cbsr_spmm(graph, cbsr, reduce='add'), cbsr_spmm(graph, cbsr))


def test_sizes_of_a_prepared_graph(device: torch.device) -> None:
    edges = GRAPHS['wide']
    prepared, perm = prepare_edge_index(edges.edge_index.to(device), (70, 9))
    cbsr = entries(edges, 40, 4, torch.float64, device)
    w = weights(edges, torch.float64, device)
    out = cbsr_spmm(prepared, cbsr, w[perm])
    assert out.shape == (9, 40)
    torch.testing.assert_close(out, cbsr_spmm(edges.graph(device=device), cbsr, w))


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('reduce', REDUCE)
@pytest.mark.parametrize('name', ['small', 'no_edges', 'loops_dropped', 'no_transpose'])
def test_gradcheck(
    device: torch.device, share: str, name: str, reduce: str, weighted: bool
) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4], [0, 0, 0, 2, 2, 2, 3, 3]], device=device)
    edge_index = edge_index[:, :0] if name == 'no_edges' else edge_index
    graph = graph_of(
        edge_index, 5, 4, drop_loops=name == 'loops_dropped', transpose=name != 'no_transpose'
    )
    columns = random_columns(5, 4, 2, device)
    values = torch.randn(5, 2, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(edge_index.size(1), dtype=torch.float64, device=device)
    inputs = (values, value.requires_grad_()) if weighted else (values,)

    def run(values: Tensor, value: Tensor | None = None) -> Tensor:
        return cbsr_spmm(graph, CBSR(values, columns, 4), value, reduce)

    # Atomic sums come in any order.
    assert gradcheck(run, inputs, nondet_tol=1e-12)
    assert gradgradcheck(run, inputs, nondet_tol=1e-12)


def test_third_derivative(device: torch.device, share: str) -> None:
    graph = GRAPHS['square'].graph(device=device)
    columns = random_columns(30, 6, 2, device)
    for mean in (False, True):
        values = exact(30, 2, dtype=torch.float64, device=device).requires_grad_()
        value = exact(200, dtype=torch.float64, device=device).requires_grad_()
        results = []
        for out in (
            cbsr_spmm(graph, CBSR(values, columns, 6), value, 'mean' if mean else 'sum'),
            reference.cbsr_spmm(*graph[:3], value, values, columns, 6, mean=mean),
        ):
            y = out.pow(3).sum()
            for _ in range(3):
                grads = torch.autograd.grad(y, (values, value), create_graph=True)
                y = sum(grad.pow(2).sum() for grad in grads)
            results.append(y)
        torch.testing.assert_close(*results)


@pytest.mark.parametrize('reduce', REDUCE)
def test_gradient_of_weights_alone(device: torch.device, share: str, reduce: str) -> None:
    edges = Edges(torch.randint(6, (2, 20)), 6, 6)
    edge_index = edges.edge_index.to(device)
    cbsr = entries(edges, 5, 2, torch.float64, device)
    value = torch.randn(20, dtype=torch.float64, device=device, requires_grad=True)

    def run(value: Tensor) -> Tensor:
        return cbsr_spmm(edge_index, cbsr, value, reduce)

    assert gradcheck(run, (value,))
    assert gradgradcheck(run, (value,))


def aggregate_reference(
    graph: Graph,
    cbsr: CBSR,
    inputs: dict[str, Tensor],
    scales: dict[str, Tensor],
    mean: bool,
    grad: Tensor,
) -> tuple[Tensor, ...]:
    leaves = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    options = {'value': None, **leaves, **scales, 'mean': mean}
    out = reference.cbsr_spmm(*graph[:3], columns=cbsr.columns, dim=cbsr.num_columns, **options)
    return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.double())


@pairs(('dtype', 'mean', 'out_acc', 'chosen'), DTYPES, [False, True], [False, True], range(8))
def test_prologue_and_epilogue(
    device: torch.device, share: str, dtype: torch.dtype, mean: bool, out_acc: bool, chosen: int
) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    acc = acc_of(dtype)
    names = [n for k, n in enumerate(('row_scale', 'col_scale', 'diag')) if chosen >> k & 1]
    scales = {name: torch.rand(30, dtype=acc, device=device) for name in names}
    for value_dtype in {dtype, acc, None}:
        cbsr = entries(edges, 19, 5, dtype, device)
        inputs = {'values': cbsr.values.requires_grad_()}
        if value_dtype is not None:
            inputs['value'] = weights(edges, value_dtype, device).requires_grad_()
            bias = exact(19, dtype=acc if out_acc else dtype, device=device)
            inputs['bias'] = bias.requires_grad_()
        given_ = {name: t for name, t in inputs.items() if name != 'values'}
        for transpose in (True, False):
            g = graph if transpose else graph._replace(t_rowptr=None, t_col=None, t_perm=None)
            out = multiplied(g, cbsr, **given_, **scales, mean=mean, out_acc=out_acc)
            assert out.dtype == (acc if out_acc else dtype)
            grad = exact(30, 19, dtype=out.dtype, device=device)
            actual = out, *torch.autograd.grad(out, list(inputs.values()), grad)
            expected = aggregate_reference(graph, cbsr, inputs, scales, mean, grad)
            positive = {name: t.abs() for name, t in inputs.items()}
            magnitude = aggregate_reference(graph, cbsr, positive, scales, mean, grad.abs())
            of = [grad, *inputs.values()]
            for a, e, m, t in zip(actual, expected, magnitude, of, strict=True):
                assert a.dtype == t.dtype
                # The gradient of float32 weights is rounded as that of the features is.
                coarser = max(a.dtype, grad.dtype, key=lambda dtype: torch.finfo(dtype).eps)
                assert_near(a.detach().to(coarser), e, m, 200)


@pytest.mark.parametrize('dtype', DTYPES)
def test_what_is_prepared_for_a_million_edges(device: torch.device, dtype: torch.dtype) -> None:
    num_edges, n, width = 1_100_000, 2000, 520  # in several tiles of every type
    graph = Edges(torch.randint(n, (2, num_edges)), n, n).graph(device=device)
    csr, perm = graph[:2], graph.perm
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    x = exact(n, width, dtype=dtype, device=device)
    kept = maxk(x, 20)
    scale = torch.rand(n, dtype=acc, device=device)
    for value in (exact(num_edges, dtype=d, device=device) for d in {dtype, acc}):
        ordered = value[perm.long()]
        for run in (
            lambda perm, value: ops.spmm(
                *csr, perm, value, x, None, None, None, None, False, False
            ),
            lambda perm, value: ops.cbsr_spmm_backward_ordered(
                *csr, perm, value, x, kept.columns, None, scale, None
            ),
        ):
            assert torch.equal(run(perm, value), run(None, ordered))
    # A scale of the sources alone, which is applied beforehand where sums and features are alike.
    args = None, None, kept.values, kept.columns, width, None, scale, None, None, False, True
    out = ops.cbsr_spmm(*csr, *args).double()
    dense = ops.spmm(*csr, None, None, kept.to_dense(), None, scale, None, None, False, True)
    torch.testing.assert_close(out, dense.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize('dense_share', [0, 2])
def test_higher_derivatives_of_everything(
    device: torch.device, limits: Callable[..., None], dense_share: int
) -> None:
    limits(dense_share=(dense_share, dense_share))
    edges = Edges(torch.tensor([[0, 1, 2, 3, 3, 0, 2, 2], [0, 0, 0, 2, 2, 3, 3, 2]]), 4, 4)
    graph = edges.graph(device=device)
    scale = torch.rand(3, 4, dtype=torch.float64, device=device) + 0.5
    columns = random_columns(4, 5, 2, device)
    values, value, bias = (
        torch.randn(*size, dtype=torch.float64, device=device, requires_grad=True)
        for size in ((4, 2), (8,), (5,))
    )
    for mean in (False, True):
        for out_acc in (False, True):
            for g in (graph, graph._replace(t_rowptr=None, t_col=None, t_perm=None)):

                def run(
                    values: Tensor, value: Tensor, bias: Tensor, g: Graph = g, mean: bool = mean,
                    out_acc: bool = out_acc,
                ) -> Tensor:  # fmt: skip
                    cbsr = CBSR(values, columns, 5)
                    return multiplied(g, cbsr, value, bias, *scale, mean, out_acc).sin()

                inputs = values, value, bias
                assert gradcheck(run, inputs, nondet_tol=1e-12, fast_mode=True)
                assert gradgradcheck(run, inputs, nondet_tol=1e-12, fast_mode=True)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('out_acc', [False, True])
def test_second_derivative_of_halves(
    device: torch.device, share: str, dtype: torch.dtype, out_acc: bool
) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    cbsr = entries(edges, 19, 5, dtype, device)
    scale = torch.rand(3, 30, device=device)
    value = weights(edges, dtype, device)
    results = []
    for double in (False, True):
        v, w = (t.detach().to(torch.float64 if double else dtype) for t in (cbsr.values, value))
        v, w = v.requires_grad_(), w.requires_grad_()
        scales = scale.double() if double else scale
        out = multiplied(
            graph, CBSR(v, cbsr.columns, 19), w, None, *scales, mean=True, out_acc=out_acc
        )
        grads = torch.autograd.grad(out.pow(2).sum(), (v, w), create_graph=True)
        second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in grads), (v, w))
        assert {t.dtype for t in second} == {torch.float64 if double else dtype}
        results.append(torch.cat([t.flatten().double() for t in second]))
    rounding = torch.finfo(dtype).eps
    assert (results[0] - results[1]).norm() < 2 * rounding * results[1].norm()


def test_trains_without_transpose(device: torch.device, share: str) -> None:
    edges = GRAPHS['out_hubs']
    edge_index = edges.edge_index.to(device)
    graph = graph_of(edge_index, 50, 40, transpose=False)
    assert graph.t_rowptr is None
    for dtype in DTYPES:
        cbsr = entries(edges, 64, 8, dtype, device)
        for reduce in REDUCE:
            check(graph, cbsr, weights(edges, dtype, device), reduce)
            check(graph, cbsr, None, reduce)


def test_plain_graphs_are_sorted_once(device: torch.device, sparse: None) -> None:
    cbsr = maxk(torch.randn(30, 40, device=device, requires_grad=True), 5)
    edge_index = GRAPHS['square'].edge_index.to(device)
    sorts = sorts_of(lambda: cbsr_spmm(edge_index, cbsr).sum().backward())
    assert sum(count for op, count in sorts.items() if op.startswith('to_csr')) == 1


# --- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('prepared', ['plain', 'Graph'])
def test_same_bits_every_time(
    device: torch.device, sparse: None, deterministic: None, dtype: torch.dtype, prepared: str
) -> None:
    edge_index = torch.randint(500, (2, 8000), device=device)
    edge_index[0, :2000] = 7
    edge_index[1, 1000:3000] = 9
    graph = graph_of(edge_index, 500, 500)
    columns = random_columns(500, 128, 16, device)
    values = torch.randn(500, 16, device=device).to(dtype).requires_grad_()
    value = torch.randn(8000, device=device).to(dtype).requires_grad_()
    grad = torch.randn(500, 128, device=device).to(dtype)
    cbsr = CBSR(values, columns, 128)
    for reduce in REDUCE:

        def run(reduce: str = reduce) -> tuple[Tensor, ...]:
            out = cbsr_spmm(edge_index if prepared == 'plain' else graph, cbsr, value, reduce)
            return out, *torch.autograd.grad(out, (values, value), grad)

        first = run()
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
        torch.use_deterministic_algorithms(False)  # the reference need not be
        expected = reference_of(graph, cbsr, value, reduce == 'mean', grad)
        magnitude = reference_of(graph, absolute(cbsr), value.abs(), reduce == 'mean', grad.abs())
        torch.use_deterministic_algorithms(True)
        for a, e, m in zip(first, expected, magnitude, strict=True):
            assert_near(a.detach(), e, m, 4000)


def test_result_is_the_same_bits_by_default_too(device: torch.device, share: str) -> None:
    edge_index = torch.randint(300, (2, 9000), device=device)
    edge_index[1, :3000] = 9
    graph = graph_of(edge_index, 300, 300)
    w = torch.randn(9000, device=device, requires_grad=True)
    cbsr = maxk(torch.randn(300, 128, device=device), 16)
    results = []
    for _ in range(3):
        out = cbsr_spmm(graph, cbsr, w, 'mean')
        results.append((out, *torch.autograd.grad(out.pow(2).sum(), w)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_higher_derivatives_are_deterministic_too(
    device: torch.device, sparse: None, deterministic: None
) -> None:
    graph = GRAPHS['square'].graph(device=device)
    columns = random_columns(30, 20, 4, device)
    values = torch.randn(30, 4, device=device, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True)
    results = []
    for _ in range(3):
        out = cbsr_spmm(graph, CBSR(values, columns, 20), value).pow(3).sum()
        grads = torch.autograd.grad(out, (values, value), create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in grads), (values, value)))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


# --- compilation ---------------------------------------------------------------------------------


def graphs(device: torch.device) -> dict[str, Tensor | Graph]:
    edge_index = GRAPHS['square'].edge_index.to(device)
    prepared, _ = prepare_edge_index(edge_index, (30, 30))
    return {'plain': edge_index, 'prepared': prepared, 'Graph': graph_of(edge_index, 30, 30)}


def nodes_of(graph_module: torch.fx.GraphModule) -> set[str]:
    """The names of what a traced graph calls, in its subgraphs too."""
    return {
        str(node.target)
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    }


# Weights on each graph, and each op on two: 39 of 40 entries are multiplied as dense rows.
@pytest.mark.parametrize(
    ('k', 'reduce', 'weighted', 'name'),
    [(5, 'sum', False, 'plain'), (5, 'sum', False, 'Graph'), (5, 'mean', True, 'prepared'),
     (5, 'mean', True, 'Graph'), (39, 'mean', True, 'plain'), (39, 'mean', True, 'prepared')],
)  # fmt: skip
def test_compiles_without_graph_break(
    device: torch.device, k: int, reduce: str, weighted: bool, name: str
) -> None:
    torch._dynamo.reset()
    graph = graphs(device)[name]
    x = torch.randn(30, 40, device=device, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True) if weighted else None

    def run(graph: Graph | Tensor, x: Tensor, value: Tensor | None) -> Tensor:
        return cbsr_spmm(graph, maxk(x * 2, k), value, reduce) + 1

    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    results = []
    for out in (run(graph, x, value), compiled(graph, x, value)):
        inputs = (x, value) if weighted else (x,)
        results.append((out, *torch.autograd.grad(out.pow(2).sum(), inputs)))
    torch.testing.assert_close(*results)


def test_compiles_with_inductor(device: torch.device) -> None:
    torch._dynamo.reset()
    x = torch.randn(30, 40, device=device, requires_grad=True)

    def run(graph: Graph | Tensor, x: Tensor) -> Tensor:
        return cbsr_spmm(graph, maxk(x.sin(), 5), reduce='mean').sigmoid()

    compiled = torch.compile(run, fullgraph=True)
    forms = graphs(device)
    # C++ takes long: other forms are compiled without it above.
    for graph in [forms['prepared']] if device.type == 'cpu' else forms.values():
        results = []
        for out in (run(graph, x), compiled(graph, x)):
            results.append((out, *torch.autograd.grad(out.pow(2).sum(), x)))
        torch.testing.assert_close(*results)


def test_our_kernels_run_in_compiled_code(device: torch.device, sparse: None) -> None:
    torch._dynamo.reset()
    calls: dict[str, list[set[str]]] = {'forward': [], 'backward': []}

    def compiler(of: str) -> Callable:
        def compile(module: torch.fx.GraphModule, _: list[Tensor]) -> Callable:
            names = {name for name in nodes_of(module) if name.startswith('pyg_fast.')}
            calls[of].append({name.split('.')[1] for name in names})
            return make_boxed_func(module.forward)

        return compile

    backend = aot_autograd(fw_compiler=compiler('forward'), bw_compiler=compiler('backward'))
    compiled = torch.compile(
        lambda graph, x: cbsr_spmm(graph, maxk(x, 5)), fullgraph=True, backend=backend
    )
    for graph in graphs(device).values():
        x = torch.randn(30, 40, device=device, requires_grad=True)
        compiled(graph, x).sum().backward()
    plain, *sorted_before = calls['forward']
    sort = 'to_csr' if device.type == 'cuda' else 'to_csr_unweighted'  # of a small graph
    assert plain == {sort, 'maxk', 'cbsr_spmm'}
    assert sorted_before == [{'maxk', 'cbsr_spmm'}] * 2
    assert calls['backward'] == [{'cbsr_spmm_backward', 'cbsr_to_dense'}] * 3


def test_compiled_code_takes_each_graph_as_it_is(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(cbsr_spmm, fullgraph=True, backend='aot_eager')
    cbsr = maxk(torch.randn(30, 40, device=device), 5)
    for num_edges in (200, 90, 0, 200):
        edge_index = torch.randint(30, (2, num_edges), device=device)
        prepared, _ = prepare_edge_index(edge_index, (30, 30))
        for graph in (edge_index, prepared):
            torch.testing.assert_close(compiled(graph, cbsr), cbsr_spmm(graph, cbsr))


def test_compiled_scale_of_both_ends(device: torch.device) -> None:
    # As a GCN normalises: dynamo refuses a tensor that a Function is given twice.
    torch._dynamo.reset()
    graph = graphs(device)['Graph']
    scale = torch.rand(30, device=device)

    def run(x: Tensor, scale: Tensor) -> Tensor:
        return multiplied(graph, maxk(x, 5), None, None, scale, scale, scale)

    x = torch.randn(30, 40, device=device, requires_grad=True)
    results = []
    for out in (run(x, scale), torch.compile(run, fullgraph=True, backend='aot_eager')(x, scale)):
        results.append((out, *torch.autograd.grad(out.pow(2).sum(), x)))
    torch.testing.assert_close(*results)


# --- memory --------------------------------------------------------------------------------------


def test_saves_no_dense_features(device: torch.device) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    saved = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    x = torch.randn(30, 256, device=device, requires_grad=True)
    for k in (8, 200):
        for value in (None, torch.randn(graph.num_edges, device=device, requires_grad=True)):
            saved.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                out = cbsr_spmm(graph, maxk(x, k), value)
            assert out.requires_grad
            assert any(t.dtype == torch.uint8 for t in saved)
            assert {tuple(t.shape) for t in saved} <= {(30, k), (200,), (31,)}


def test_no_tensor_of_edges_times_entries(cuda: torch.device, share: str) -> None:
    num_nodes, num_edges, width, k = 1000, 200_000, 256, 32
    graph = graph_of(torch.randint(num_nodes, (2, num_edges), device=cuda), num_nodes, num_nodes)
    x = torch.randn(num_nodes, width, device=cuda, requires_grad=True)
    value = torch.randn(num_edges, device=cuda, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cbsr_spmm(graph, maxk(x, k), value).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < num_edges * k * 4 / 2


# --- CUDA only -----------------------------------------------------------------------------------


def test_deterministic_backward_needs_transpose(
    cuda: torch.device, share: str, deterministic: None
) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=cuda)._replace(t_rowptr=None, t_col=None, t_perm=None)
    cbsr = entries(edges, 40, 4, torch.float32, cuda)
    cbsr.values.requires_grad_()
    out = cbsr_spmm(graph, cbsr)
    with pytest.raises(RuntimeError, match='transpose'):
        out.sum().backward()
    cbsr_spmm(edges.edge_index.to(cuda), cbsr).sum().backward()  # makes its own


@pytest.mark.parametrize('name', ['plain', 'prepared', 'Graph'])
@pytest.mark.parametrize('ordered', [False, True])
def test_cuda_graph(cuda: torch.device, share: str, name: str, ordered: bool) -> None:
    graph = graphs(cuda)[name]
    x = torch.randn(30, 40, device=cuda, requires_grad=True)
    value = torch.randn(200, device=cuda, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = cbsr_spmm(graph, maxk(x, 5), value, 'mean')
        return out, *torch.autograd.grad(out.pow(2).sum(), (x, value))

    torch.use_deterministic_algorithms(ordered)
    try:
        replay, results = captured(step)
        for _ in range(3):
            with torch.no_grad():
                x.normal_()
                value.normal_()
            replay()
            torch.testing.assert_close(results, step())
    finally:
        torch.use_deterministic_algorithms(False)


def test_side_stream(cuda: torch.device, share: str) -> None:
    graph = graphs(cuda)['prepared']
    degree = torch.bincount(graph.as_tensor()[1], minlength=30).float()
    stream = torch.cuda.Stream()
    x = torch.zeros(30, 64, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the default stream would not wait for it
        x.fill_(1)
        out = cbsr_spmm(graph, maxk(x, 8))
    stream.synchronize()
    expected = torch.zeros(30, 64, device=cuda)
    expected[:, :8] = degree.view(-1, 1)  # the first of ties
    assert torch.equal(out, expected)


# --- bad input -----------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple]:
    edge_index, w = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.rand(3)
    x = torch.randn(3, 9)
    cbsr = maxk(x, 4)
    coo = torch.sparse_coo_tensor(edge_index, w, (3, 3))
    fewer = CBSR(cbsr.values[:2], cbsr.columns[:2], 9)
    none = CBSR(cbsr.values[:0], cbsr.columns[:0], 9)
    return {
        'cbsr dense': (TypeError, "'cbsr' must be a CBSR, got Tensor", edge_index, x),
        'cbsr tuple': (TypeError, "'cbsr' must be a CBSR, got tuple", edge_index, (x, x)),
        'cbsr None': (TypeError, "'cbsr' must be a CBSR, got NoneType", edge_index, None),
        'weight list': (TypeError, "'edge_weight'", edge_index, cbsr, [1.0, 1.0, 1.0]),
        'weight dtype': (
            TypeError, "'edge_weight' must be torch.float32 as 'cbsr'", edge_index, cbsr, w.double()
        ),
        'weight int': (TypeError, "'edge_weight'", edge_index, cbsr, w.long()),
        'weight short': (ValueError, r"'edge_weight'.*\[3\]", edge_index, cbsr, w[:2]),
        'weight long': (ValueError, r"'edge_weight'.*\[3\]", edge_index, cbsr, torch.rand(4)),
        'weight matrix': (ValueError, r"'edge_weight'.*\[3\]", edge_index, cbsr, w.view(3, 1)),
        'graph list': (TypeError, "'graph'", [[0], [0]], cbsr),
        'graph float': (TypeError, "'edge_index'", edge_index.float(), cbsr),
        'graph coo': (TypeError, "'edge_index'", coo, cbsr),
        'graph vector': (ValueError, "'edge_index'", edge_index[0], cbsr),
        'too large': (IndexError, r"'edge_index\[0\]'.*\[0, 2\).*0 to 2", edge_index, fewer),
        'negative': (IndexError, r"'edge_index\[0\]'.*-1 to 1", edge_index - 1, cbsr),
        'no nodes': (IndexError, r"'edge_index\[0\]'", edge_index, none),
        'max': (ValueError, "'reduce' must be one of.*'max'", edge_index, cbsr, None, 'max'),
        'reduce None': (ValueError, "'reduce'.*None", edge_index, cbsr, None, None),
        'Graph': (ValueError, "'cbsr'.*each of the 9 source", GRAPHS['tall'].graph(), cbsr),
    }  # fmt: skip


@pytest.mark.parametrize('name', bad_calls())
def test_bad_input(device: torch.device, name: str, raises: Any) -> None:
    error, message, graph, *args = bad_calls()[name]
    if isinstance(graph, Graph):
        graph = GRAPHS['tall'].graph(device=device)
    elif isinstance(graph, Tensor):
        graph = graph.to(device)
    args = [a.to(device) if isinstance(a, (Tensor, CBSR)) else a for a in args]
    with raises(error, match=message):
        cbsr_spmm(graph, *args)


def test_sizes_that_differ(device: torch.device) -> None:
    prepared, _ = prepare_edge_index(GRAPHS['wide'].edge_index.to(device), (70, 9))
    with pytest.raises(ValueError, match="'cbsr'.*70 source"):
        cbsr_spmm(prepared, entries(GRAPHS['square'], 40, 4, torch.float32, device))


def test_mixed_devices(cuda: torch.device) -> None:
    edge_index, w = torch.tensor([[0, 1], [1, 0]]), torch.rand(2)
    cbsr = maxk(torch.randn(2, 9), 4)
    with pytest.raises(ValueError, match="'graph' is on cpu, but 'cbsr' is on cuda"):
        cbsr_spmm(edge_index, cbsr.cuda())
    with pytest.raises(ValueError, match="'graph' is on cuda"):
        cbsr_spmm(graph_of(edge_index.to(cuda), 2, 2), cbsr)
    with pytest.raises(ValueError, match="'edge_weight' is on cpu"):
        cbsr_spmm(edge_index.to(cuda), cbsr.cuda(), w)
