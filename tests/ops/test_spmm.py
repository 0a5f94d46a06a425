"""Aggregation: results, gradients, bad input, compilation, CUDA graphs, memory."""

import pickle
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

from pyg_fast.graph import Graph, graph_of, prepare_edge_index
from pyg_fast.ops import spmm
from pyg_fast.ops.path import Rows
from pyg_fast.ops.product import raw_product
from pyg_fast.ops.spmm_max import _t_position
from pyg_fast.sparse.operator import SparseOperator

from ._graphs import (
    DTYPES,
    GRAPHS,
    REDUCE,
    WIDTHS,
    Edges,
    assert_near,
    edge_lists,
    exact,
    hubs,
    multiplied,
    reference_of,
    short_rows,
)
from ._samples import Given, sample


@sample('spmm')
def spmm_sample(given: Given) -> dict[str, object]:
    n = given.num_nodes
    own = torch.randint(-1, n, (n,), dtype=torch.int32, device=given.device)
    place = torch.randperm(n + 10, device=given.device)[:n]
    place[:2] = torch.tensor([-1, n + 10])  # rows that the result does not have
    return dict(
        **given.csr, value=given.value, x=given.a, **given.scaled, bias=given.bias,
        mean=given.full, out_acc=False, self_row=given.optional(own),
        out_row=given.optional(place), num_out=n + 10 if given.full else 0,
    )  # fmt: skip


@sample('sddmm')
def _(given: Given) -> dict[str, object]:
    return dict(
        **given.csr, a=given.a, b=given.b, **given.scales, mean=given.full,
        num_values=given.num_edges,
    )  # fmt: skip


@sample('spmm_max')
def _(given: Given) -> dict[str, object]:
    most = -1 if given.full else 10
    return dict(**given.csr, value=given.value, x=given.a, minimum=not given.full, longest_row=most)


def arg_of(given: Given) -> Tensor:
    return reference.spmm_max(*given.csr.values(), given.value, given.a, False)[1]


@sample('spmm_max_backward_x')
def _(given: Given) -> dict[str, object]:
    return dict(
        **given.csr, value=given.value, arg=arg_of(given), grad=given.b, num_cols=given.num_nodes,
        **given.transpose,
    )  # fmt: skip


@sample('spmm_max_backward_x_ordered')
def _(given: Given) -> dict[str, object]:
    graph = given.graph
    position = torch.empty_like(graph.perm)  # of each edge of the transpose in `col`
    position[graph.perm.long()] = torch.arange(
        given.num_edges, dtype=given.index, device=given.device
    )
    return dict(
        **given.csr, value=given.value, arg=arg_of(given), grad=given.b, t_rowptr=graph.t_rowptr,
        t_col=graph.t_col, t_position=position[graph.t_perm.long()],
    )  # fmt: skip


@sample('spmm_max_backward_value')
def _(given: Given) -> dict[str, object]:
    return dict(**given.csr, arg=arg_of(given), grad=given.b, x=given.a, num_values=given.num_edges)


def check(graph: Graph, x: Tensor, value: Tensor | None, reduce: str) -> None:
    """Compares result and gradients with the reference's."""
    x.requires_grad_()
    inputs = [x] if value is None else [x, value.requires_grad_()]
    out = spmm(graph, x, value, reduce)
    assert (out.dtype, out.device) == (x.dtype, x.device)
    grad = exact(*out.shape, dtype=x.dtype, device=x.device)
    actual = out, *torch.autograd.grad(out, inputs, grad)
    expected, magnitude = reference_of(graph, x, value, reduce, grad)
    terms = max(graph.num_edges, x.size(1))
    for a, e, m in zip(actual, expected, magnitude, strict=True):
        assert a.dtype == x.dtype
        assert_near(a.detach(), e, m, terms)


def features(edges: Edges, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return exact(edges.num_src, width, dtype=dtype, device=device)


def weights(edges: Edges, dtype: torch.dtype, device: torch.device) -> Tensor:
    return exact(edges.edge_index.size(1), dtype=dtype, device=device)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('reduce', REDUCE)
def test_widths(device: torch.device, dtype: torch.dtype, weighted: bool, reduce: str) -> None:
    edges = GRAPHS['hub']
    graph = edges.graph(device=device)
    for width in WIDTHS:
        value = weights(edges, dtype, device) if weighted else None
        check(graph, features(edges, width, dtype, device), value, reduce)


@pairs(('name', 'index', 'reduce'), list(GRAPHS), [torch.int32, torch.int64], REDUCE)
def test_graphs(device: torch.device, name: str, index: torch.dtype, reduce: str) -> None:
    edges = GRAPHS[name]
    graph = edges.graph(index, device)
    for dtype in DTYPES:
        for width in (1, 6, 40):
            check(graph, features(edges, width, dtype, device), None, reduce)
            value = weights(edges, dtype, device)
            check(graph, features(edges, width, dtype, device), value, reduce)


@given(edge_lists(), st.sampled_from(WIDTHS[:-3]), st.sampled_from(DTYPES), st.booleans())
def test_any_graph(
    device: torch.device, edges: Edges, width: int, dtype: torch.dtype, weighted: bool
) -> None:
    graph = edges.graph(device=device)
    for reduce in REDUCE:
        value = weights(edges, dtype, device) if weighted else None
        check(graph, features(edges, width, dtype, device), value, reduce)


def placed(out: Tensor, rows: Tensor, num_out: int) -> Tensor:
    """The rows of a result among zeros; only those that exist."""
    exist = (rows >= 0) & (rows < num_out)
    return out.new_zeros(num_out, out.size(1)).index_copy_(0, rows[exist], out[exist])


def check_place(
    graph: Graph, x: Tensor, value: Tensor | None, rows: Tensor, num_out: int, full: bool
) -> None:
    """Compares a sum that writes its rows in place with the reference and, bit by bit, with one
    that does not."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    n, make = graph.num_dst, dict(dtype=acc, device=x.device)
    parts: list[Any] = [None] * 4
    own = torch.randint(-1, max(graph.num_src, 1), (n,), dtype=torch.int32, device=x.device)
    if full:
        bias = exact(x.size(1), dtype=x.dtype, device=x.device)
        parts = [exact(n, **make), exact(graph.num_src, **make), exact(n, **make), bias]
    for mean, out_acc in ((False, False), (True, full)):
        if out_acc:
            parts[3] = parts[3].to(acc)

        def run(op: Any, absolute: bool = False, place: bool = True) -> Tensor:
            given = [None if t is None else t.abs() if absolute else t for t in (value, x, *parts)]
            args = (*graph[:3], *given, mean, out_acc, own)  # noqa: B023 (called at once)
            return op(*args, rows, num_out) if place else op(*args)

        out = run(ops.spmm)
        assert out.dtype == (acc if out_acc else x.dtype)
        assert torch.equal(out, placed(run(ops.spmm, place=False), rows, num_out))
        assert_near(
            out, run(reference.spmm), run(reference.spmm, True), max(graph.num_edges, x.size(1))
        )


def some_rows(graph: Graph, num_out: int) -> Tensor:
    """A different row of the result for each row of the sum; some do not exist."""
    rows = torch.randperm(max(num_out, graph.num_dst))[: graph.num_dst]
    rows[torch.rand(graph.num_dst) < 0.1] = -1
    rows[torch.rand(graph.num_dst) < 0.1] = num_out
    rows[torch.rand(graph.num_dst) < 0.1] += 1 << 40
    return rows.to(graph.rowptr.device)


@pairs(('name', 'index', 'dtype'), list(GRAPHS), [torch.int32, torch.int64], DTYPES)
def test_place(device: torch.device, name: str, index: torch.dtype, dtype: torch.dtype) -> None:
    edges = GRAPHS[name]
    graph = edges.graph(index, device)
    for width in (0, 1, 3, 16, 33, 40, 64, 256):
        for full in (False, True):
            value = weights(edges, dtype, device) if full else None
            x = features(edges, width, dtype, device)
            for num_out in (0, edges.num_dst, edges.num_dst + 50):
                check_place(graph, x, value, some_rows(graph, num_out), num_out, full)


@given(
    edge_lists(), st.sampled_from(WIDTHS[:-3]), st.sampled_from(DTYPES), st.booleans(),
    st.integers(0, 40),
)  # fmt: skip
def test_place_of_any_graph(
    device: torch.device, edges: Edges, width: int, dtype: torch.dtype, full: bool, num_out: int
) -> None:
    graph = edges.graph(device=device)
    value = weights(edges, dtype, device) if full else None
    x = features(edges, width, dtype, device)
    check_place(graph, x, value, some_rows(graph, num_out), num_out, full)


def test_place_refuses_what_does_not_fit(device: torch.device) -> None:
    graph = GRAPHS['square'].graph(device=device)
    x = torch.ones(30, 4, device=device)
    rows = torch.arange(30, device=device)
    none = (None, None, None, None, False, False, None)
    for bad in (rows[1:], rows.int(), rows.view(30, 1)):
        with pytest.raises(RuntimeError, match='out_row'):
            ops.spmm(*graph[:3], None, x, *none, bad, 30)
    with pytest.raises(RuntimeError, match='num_out must not be negative, got -1'):
        ops.spmm(*graph[:3], None, x, *none, rows, -1)
    # Without `out_row` no number of rows is read.
    assert ops.spmm(*graph[:3], None, x, *none, None, 7).size(0) == 30


def check_short_rows(graph: Graph, width: int, dtype: torch.dtype) -> None:
    """Compares sums, also those that write their rows in place, with the reference. Most sums are
    exact: a wrong edge of a long row shows, too."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    n, make = graph.num_dst, dict(dtype=acc, device=graph.rowptr.device)
    x = exact(n, width, dtype=dtype, device=make['device'])
    value = exact(graph.num_edges, dtype=dtype, device=make['device'])
    row_scale, col_scale, diag = exact(3, n, **make)
    own = torch.randint(-1, n, (n,), dtype=torch.int32, device=make['device'])
    infinite = value.clone()
    infinite[::997] = float('inf')  # stays in its rows
    num_out = n + 50
    nodes = some_rows(graph, num_out)
    rows = Rows(nodes, torch.empty(num_out, dtype=torch.int32, device=make['device']))
    plain = SparseOperator(graph)
    for op, out_acc in (
        (plain, False),
        (plain._replace(value=infinite, mean=True), True),
        (plain._replace(row_scale=row_scale, col_scale=col_scale), False),
        (SparseOperator(graph, value, row_scale, col_scale, diag, own, mean=True), True),
    ):
        bias = exact(width, dtype=acc if out_acc else dtype, device=make['device'])
        bias = bias if op.diag is not None else None
        out = raw_product(op, x, bias, out_acc)
        assert out.dtype == (acc if out_acc else dtype)

        def run(absolute: bool) -> Tensor:
            given = op.value, x, op.row_scale, op.col_scale, op.diag, bias  # noqa: B023
            parts = [t.abs() if absolute and t is not None else t for t in given]
            return reference.spmm(*graph[:3], *parts, op.mean, False, op.self_row)  # noqa: B023

        assert_near(out, run(False), run(True), 20)
        in_place = raw_product(op, x, bias, out_acc, rows)
        assert torch.equal(in_place.nan_to_num(7.0), placed(out, nodes, num_out).nan_to_num(7.0))


# Of one tile of columns and of several; the last ones of some threads without a column.
SHORT_WIDTHS = {
    torch.float32: (4, 16, 20, 64, 100, 256, 300, 1, 7, 31, 47, 121),
    torch.float64: (4, 64, 100, 5),
    torch.float16: (8, 40, 64, 304, 3, 50),
    torch.bfloat16: (16, 128, 47, 349),
}


def test_short_rows(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('rows are all alike there')
    for index in (torch.int32, torch.int64):
        graph = short_rows(10_000, 10_000, 129, 128).graph(index, device)
        for dtype, widths in SHORT_WIDTHS.items():
            for width in widths if index == torch.int32 else widths[1:3]:
                check_short_rows(graph, width, dtype)
    # Hubs of the transpose
    edges = short_rows(10_000)
    edges.edge_index[0, ::16] = 3
    graph = edges.graph(device=device)
    for width in (16, 136):
        value = weights(edges, torch.float32, device)
        check(graph, features(edges, width, torch.float32, device), value, 'mean')


@pytest.mark.parametrize('reduce', REDUCE)
def test_threads(reduce: str) -> None:
    edges = Edges(torch.randint(1000, (2, 9000)), 1000, 1000)
    edges.edge_index[1, :4000] = 5
    graph = edges.graph()
    before, cpu = torch.get_num_threads(), torch.device('cpu')
    try:
        for dtype, weighted in ((torch.float32, False), (torch.bfloat16, True)):
            value = weights(edges, dtype, cpu).requires_grad_() if weighted else None
            x = features(edges, 40, dtype, cpu).requires_grad_()
            check(graph, x.detach(), value, reduce)
            inputs = (x, value) if weighted else (x,)
            grad, results = exact(1000, 40, dtype=dtype), []
            for threads in (before, 1, 2, 3, 7):
                torch.set_num_threads(threads)
                out = spmm(graph, x, value, reduce)
                results.append((out, *torch.autograd.grad(out, inputs, grad)))
                assert all(map(torch.equal, results[0], results[-1]))
            torch.set_num_threads(before)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('reduce', REDUCE)
@pytest.mark.parametrize('width', [3, 16, 33, 64])
def test_layouts(device: torch.device, dtype: torch.dtype, reduce: str, width: int) -> None:
    edges = GRAPHS['square']
    graph, n = edges.graph(device=device), edges.num_src
    padded = exact(n * width + 1, dtype=dtype, device=device)
    layouts = {
        'unaligned': padded[1:].view(n, width),
        'transposed': exact(width, n, dtype=dtype, device=device).t(),
        'strided': exact(n, 2 * width + 1, dtype=dtype, device=device)[:, 1::2],
        'expanded rows': exact(1, width, dtype=dtype, device=device).expand(n, width),
        'expanded columns': exact(n, 1, dtype=dtype, device=device).expand(n, width),
    }
    one = exact(1, dtype=dtype, device=device)
    for x in layouts.values():
        # Expanded tensors cannot be leaves of a graph that asks for their gradient.
        x = x.detach()
        check(graph, x, None, reduce)
        check(graph, x.detach(), one.expand(graph.num_edges), reduce)
        value = exact(2 * graph.num_edges + 1, dtype=dtype, device=device)[1::2]
        check(graph, x.detach(), value, reduce)


def test_gradient_with_strange_strides(device: torch.device) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    for reduce in REDUCE:
        x = features(edges, 5, torch.float64, device).requires_grad_()
        value = weights(edges, torch.float64, device).requires_grad_()
        out = spmm(graph, x, value, reduce)
        grad = exact(1, 5, dtype=x.dtype, device=device).expand_as(out)
        expected, _ = reference_of(graph, x, value, reduce, grad)
        torch.testing.assert_close(torch.autograd.grad(out, (x, value), grad), expected[1:])


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('reduce', REDUCE)
@pytest.mark.parametrize('width', [1, 3, 9, 17, 64, 65])
def test_nan_and_infinity_stay_where_they_belong(
    device: torch.device, dtype: torch.dtype, reduce: str, width: int
) -> None:
    nan, inf = float('nan'), float('inf')
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 4, 3], [0, 0, 1, 2, 3, 3, 3]])
    edges = Edges(edge_index, 5, 5)
    graph = edges.graph(device=device)
    for value in (nan, inf, -inf):
        for column in {0, width // 2, width - 1}:
            x = features(edges, width, dtype, device)
            x[2] = value
            x[0, column] = value
            for w in (None, weights(edges, dtype, device).abs() + 1):
                check(graph, x.detach(), w, reduce)
                out = spmm(graph, x.detach(), w, reduce)
                assert torch.equal(out[1], x[2]) or (value != value and out[1].isnan().all())
                assert out[2:].isfinite().all()
                assert out[0].isfinite().sum() >= width - 1
    x = features(edges, width, dtype, device)
    w = weights(edges, dtype, device)
    w[0] = nan
    out = spmm(graph, x, w, reduce)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def test_first_nan_takes_the_gradient(device: torch.device) -> None:
    graph = Edges(torch.tensor([[2, 0, 1], [0, 0, 0]]), 3, 1).graph(device=device)
    nan = float('nan')
    for reduce in ('max', 'min'):
        x = torch.tensor([[nan], [nan], [1.0]], device=device, requires_grad=True)
        out = spmm(graph, x, None, reduce)
        assert out.isnan()
        assert torch.autograd.grad(out.sum(), x)[0].tolist() == [[1], [0], [0]]


def test_first_of_ties_takes_the_gradient(device: torch.device) -> None:
    graph = Edges(torch.tensor([[1, 2, 0, 2], [0, 0, 0, 0]]), 3, 1).graph(device=device)
    for reduce in ('max', 'min'):
        x = torch.full((3, 70), 2.0, device=device, requires_grad=True)
        w = torch.ones(4, device=device, requires_grad=True)
        grad_x, grad_w = torch.autograd.grad(spmm(graph, x, w, reduce).sum(), (x, w))
        assert grad_x.sum(1).tolist() == [0, 70, 0]
        assert grad_w.tolist() == [140, 0, 0, 0]


def test_sums_of_halves_run_in_float32(device: torch.device) -> None:
    graph = Edges(torch.zeros(2, 4096, dtype=torch.long), 1, 1).graph(device=device)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.ones(1, 8, dtype=dtype, device=device, requires_grad=True)
        out = spmm(graph, x)
        assert (out == 4096).all()  # in bfloat16 it would have stopped at 256
        assert (torch.autograd.grad(out.sum(), x)[0] == 4096).all()


def test_add_is_sum(device: torch.device) -> None:
    edges = GRAPHS['square']
    x = torch.randn(30, 4, device=device)
    graph = edges.graph(device=device)
    assert torch.equal(spmm(graph, x, reduce='add'), spmm(graph, x))


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('reduce', REDUCE)
@pytest.mark.parametrize('name', ['small', 'no_edges', 'loops_dropped'])
def test_gradcheck(device: torch.device, name: str, reduce: str, weighted: bool) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4], [0, 0, 0, 2, 2, 2, 3, 3]], device=device)
    edge_index = edge_index[:, :0] if name == 'no_edges' else edge_index
    graph = graph_of(edge_index, 5, 4, drop_loops=name == 'loops_dropped')
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(edge_index.size(1), dtype=torch.float64, device=device)
    inputs = (x, value.requires_grad_()) if weighted else (x,)

    def run(x: Tensor, value: Tensor | None = None) -> Tensor:
        return spmm(graph, x, value, reduce)

    assert gradcheck(run, inputs)
    assert gradgradcheck(run, inputs)


def test_third_derivative(device: torch.device) -> None:
    graph = GRAPHS['square'].graph(device=device)
    for reduce in ('sum', 'mean'):
        x = exact(30, 3, dtype=torch.float64, device=device).requires_grad_()
        value = exact(200, dtype=torch.float64, device=device).requires_grad_()
        results = []
        for out in (
            spmm(graph, x, value, reduce),
            reference.spmm(*graph[:3], value, x, mean=reduce == 'mean'),
        ):
            y = out.pow(3).sum()
            for _ in range(3):
                grad_x, grad_value = torch.autograd.grad(y, (x, value), create_graph=True)
                y = grad_x.pow(2).sum() + grad_value.pow(2).sum()
            results.append(y)
        torch.testing.assert_close(*results)


@pytest.mark.parametrize('reduce', REDUCE)
def test_gradient_of_weights_alone(device: torch.device, reduce: str) -> None:
    edge_index = torch.randint(6, (2, 20)).to(device)  # for x without gradient no transpose
    x = torch.randn(6, 5, dtype=torch.float64, device=device)
    value = torch.randn(20, dtype=torch.float64, device=device, requires_grad=True)

    def run(value: Tensor) -> Tensor:
        return spmm(edge_index, x, value, reduce)

    assert gradcheck(run, (value,))
    assert gradgradcheck(run, (value,))


def test_gradient_needs_transpose(device: torch.device) -> None:
    graph = graph_of(GRAPHS['square'].edge_index.to(device), 30, 30, transpose=False)
    x = torch.randn(30, 2, device=device, requires_grad=True)
    with pytest.raises(RuntimeError, match='without the transpose'):
        spmm(graph, x).sum().backward()
    with pytest.raises(ValueError, match='without its transpose'):
        graph.t()


def test_deterministic_backward_of_max_needs_transpose(cuda: torch.device) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=cuda)._replace(t_rowptr=None, t_col=None, t_perm=None)
    out = spmm(graph, features(edges, 4, torch.float32, cuda).requires_grad_(), reduce='max')
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match='transpose'):
            out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def aggregate_reference(
    graph: Graph, inputs: dict[str, Tensor], scales: dict[str, Tensor], mean: bool, grad: Tensor
) -> tuple[Tensor, ...]:
    leaves = {name: t.detach().double().requires_grad_() for name, t in inputs.items()}
    options = {'value': None, **leaves, **scales, 'mean': mean}
    out = reference.spmm(*graph[:3], **options)
    return out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad.double())


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('mean', [False, True])
@pytest.mark.parametrize('out_acc', [False, True])
@pytest.mark.parametrize('chosen', range(8))
def test_prologue_and_epilogue(
    device: torch.device, dtype: torch.dtype, mean: bool, out_acc: bool, chosen: int
) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    names = [n for k, n in enumerate(('row_scale', 'col_scale', 'diag')) if chosen >> k & 1]
    scales = {name: torch.rand(30, dtype=acc, device=device) for name in names}
    for value_dtype in {dtype, acc, None}:
        inputs = {'x': features(edges, 19, dtype, device).requires_grad_()}
        if value_dtype is not None:
            inputs['value'] = weights(edges, value_dtype, device).requires_grad_()
            bias = exact(19, dtype=acc if out_acc else dtype, device=device)
            inputs['bias'] = bias.requires_grad_()
        out = multiplied(graph, **inputs, **scales, mean=mean, out_acc=out_acc)
        assert out.dtype == (acc if out_acc else dtype)
        grad = exact(30, 19, dtype=out.dtype, device=device)
        actual = out, *torch.autograd.grad(out, list(inputs.values()), grad)
        expected = aggregate_reference(graph, inputs, scales, mean, grad)
        absolute = {name: t.abs() for name, t in inputs.items()}
        magnitude = aggregate_reference(graph, absolute, scales, mean, grad.abs())
        for a, e, m, of in zip(actual, expected, magnitude, [grad, *inputs.values()], strict=True):
            assert a.dtype == of.dtype
            # The gradient of float32 weights is rounded as that of the features is.
            coarser = max(a.dtype, grad.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            assert_near(a.detach().to(coarser), e, m, 200)


def test_scales_of_a_mean_in_higher_derivatives(device: torch.device) -> None:
    graph = GRAPHS['square'].graph(device=device)
    scale = torch.rand(2, 30, dtype=torch.float64, device=device)
    x = torch.randn(30, 2, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(200, dtype=torch.float64, device=device, requires_grad=True)

    def run(x: Tensor, value: Tensor) -> Tensor:
        return multiplied(graph, x, value, row_scale=scale[0], col_scale=scale[1], mean=True)

    assert gradcheck(run, (x, value), fast_mode=True)
    assert gradgradcheck(run, (x, value), fast_mode=True)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('reduce', REDUCE)
def test_same_bits_every_time(device: torch.device, dtype: torch.dtype, reduce: str) -> None:
    edge_index = torch.randint(500, (2, 20000), device=device)
    edge_index[:, :2000] = 7
    graph = graph_of(edge_index, 500, 500)
    x = torch.randn(500, 48, device=device).to(dtype).requires_grad_()
    value = torch.randn(20000, device=device).to(dtype).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:

        def run() -> tuple[Tensor, ...]:
            out = spmm(graph, x, value, reduce)
            return out, *torch.autograd.grad(out.float().pow(2).sum(), (x, value))

        first = run()
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('index', [torch.int32, torch.int64])
@pytest.mark.parametrize('prepared', ['plain', 'by_col', 'by_row', 'loops_dropped'])
def test_deterministic_backward_of_max(
    device: torch.device, prepared: str, index: torch.dtype
) -> None:
    edges = GRAPHS['in_hubs']._replace(num_dst=50)
    data = edges.edge_index
    if prepared.startswith('by'):
        order = data[int(prepared == 'by_col')].argsort(stable=True)
        data = data[:, order]
    graph = graph_of(data.to(device), 50, 50, drop_loops=prepared == 'loops_dropped')
    if prepared == 'by_col':
        graph = graph._replace(perm=None)
    elif prepared == 'by_row':
        graph = graph._replace(t_perm=None)
    counts = ('rowptr', 'perm', 't_rowptr', 't_perm')
    named = {name: getattr(graph, name) for name in counts}
    graph = graph._replace(**{name: t.to(index) for name, t in named.items() if t is not None})
    torch.use_deterministic_algorithms(True, warn_only=True)  # the reference need not be
    try:
        for dtype in DTYPES:
            x, w = features(edges, 20, dtype, device), weights(edges, dtype, device)
            check(graph, x, w, 'max')
            check(graph, x.detach(), None, 'min')
    finally:
        torch.use_deterministic_algorithms(False)
    # The arguments of the ordered kernel, which the CPU does not use.
    position = _t_position(*graph[:1], graph.perm, graph.t_perm)
    num_edges = int(graph.rowptr[-1])
    row = torch.arange(50, device=device).repeat_interleave(graph.rowptr.diff().long())
    position = torch.arange(num_edges, device=device) if position is None else position.long()
    assert torch.equal(row[position[:num_edges]], graph.t_col[:num_edges].long())


# --- compilation ---------------------------------------------------------------------------------


def prepared_graphs(device: torch.device) -> dict[str, Tensor]:
    edge_index = GRAPHS['square'].edge_index.to(device)
    prepared, _ = prepare_edge_index(edge_index, (30, 30))
    return {
        'plain': edge_index,
        'prepared': prepared,
        'unpickled': pickle.loads(pickle.dumps(prepared)),
    }


def nodes_of(graph_module: torch.fx.GraphModule) -> set[str]:
    """The names of what a traced graph calls, in its subgraphs too."""
    return {
        str(node.target)
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
        for node in module.graph.nodes
    }


@pytest.mark.parametrize(
    ('name', 'reduce'),
    [
        # Every graph with both kinds of op.
        *(('plain', 'sum'), ('plain', 'max'), ('prepared', 'mean'), ('prepared', 'min')),
        *(('unpickled', 'sum'), ('unpickled', 'max')),
    ],
)
def test_compiles_without_graph_break(device: torch.device, name: str, reduce: str) -> None:
    torch._dynamo.reset()
    graph = prepared_graphs(device)[name]
    x = torch.randn(30, 9, device=device, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True)

    def run(graph: Tensor, x: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
        out = spmm(graph, x * 2, value, reduce) + 1
        inputs = (x,) if value is None else (x, value)
        return out, *torch.autograd.grad(out.pow(2).sum(), inputs)

    compiled = torch.compile(spmm, fullgraph=True, backend='aot_eager')
    for w in (None, value):
        expected = run(graph, x, w)
        out = compiled(graph, x * 2, w, reduce) + 1
        inputs = (x,) if w is None else (x, w)
        actual = out, *torch.autograd.grad(out.pow(2).sum(), inputs)
        torch.testing.assert_close(actual, expected)


def test_compiles_with_inductor(device: torch.device) -> None:
    torch._dynamo.reset()
    x = torch.randn(30, 9, device=device, requires_grad=True)

    def run(graph: Tensor, x: Tensor) -> Tensor:
        return spmm(graph, torch.relu(x), reduce='mean').sigmoid()

    compiled = torch.compile(run, fullgraph=True)
    forms = prepared_graphs(device)
    # C++ takes long: other forms are compiled without it above.
    for graph in [forms['prepared']] if device.type == 'cpu' else forms.values():
        expected, actual = run(graph, x), compiled(graph, x)
        torch.testing.assert_close(actual, expected)
        grads = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (actual, expected))
        torch.testing.assert_close(*grads)


def test_compiled_prepared_graph_is_not_sorted_again(device: torch.device) -> None:
    torch._dynamo.reset()
    calls = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        calls.append(nodes_of(module))
        return module

    compiled = torch.compile(spmm, fullgraph=True, backend=backend)
    x = torch.randn(30, 9, device=device)
    for graph in prepared_graphs(device).values():
        compiled(graph, x)
    sorts = [any('to_csr' in name for name in names) for names in calls]
    assert sorts == [True, False, True]


def test_compiled_code_takes_each_graph_as_it_is(device: torch.device) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(spmm, fullgraph=True, backend='aot_eager')
    x = torch.randn(30, 9, device=device)
    for num_edges in (200, 200, 90, 0, 200):
        edge_index = torch.randint(30, (2, num_edges), device=device)
        prepared, _ = prepare_edge_index(edge_index, (30, 30))
        for graph in (edge_index, prepared):
            torch.testing.assert_close(compiled(graph, x), spmm(graph, x))


def test_compiled_code_refuses_wrong_indices() -> None:
    # On CUDA this is an assertion on the device, after which the process has to end.
    torch._dynamo.reset()
    compiled = torch.compile(spmm, fullgraph=True, backend='aot_eager')
    edge_index = torch.randint(30, (2, 99))
    x = torch.randn(30, 9)
    compiled(edge_index, x)
    for wrong in (30, -1):
        edge_index[0, 50] = wrong
        with pytest.raises(RuntimeError, match='outside of its graph'):
            compiled(edge_index, x)


# --- CUDA only -----------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['plain', 'prepared'])
@pytest.mark.parametrize('reduce', REDUCE)
def test_cuda_graph(cuda: torch.device, name: str, reduce: str) -> None:
    graph = prepared_graphs(cuda)[name]
    x = torch.randn(30, 20, device=cuda, requires_grad=True)
    value = torch.randn(200, device=cuda, requires_grad=True)

    def step() -> tuple[Tensor, ...]:
        out = spmm(graph, x, value, reduce)
        return out, *torch.autograd.grad(out.pow(2).sum(), (x, value))

    replay, results = captured(step)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
            value.normal_()
        replay()
        torch.testing.assert_close(results, step())


def test_side_stream(cuda: torch.device) -> None:
    graph = prepared_graphs(cuda)['prepared']
    stream = torch.cuda.Stream()
    x = torch.zeros(30, 64, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the default stream would not wait for it
        x.fill_(1)
        out = spmm(graph, x)
        plain = spmm(graph.as_tensor(), x)
    stream.synchronize()
    degree = torch.bincount(graph.as_tensor()[1], minlength=30).float()
    assert torch.equal(out, degree.view(-1, 1).expand(30, 64))
    assert torch.equal(plain, out)


@pytest.mark.parametrize('reduce', REDUCE)
def test_no_tensor_of_edges_times_channels(cuda: torch.device, reduce: str) -> None:
    num_nodes, num_edges, width = 1000, 200_000, 128
    graph = graph_of(torch.randint(num_nodes, (2, num_edges), device=cuda), num_nodes, num_nodes)
    x = torch.randn(num_nodes, width, device=cuda, requires_grad=True)
    value = torch.randn(num_edges, device=cuda, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spmm(graph, x, value, reduce).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < num_edges * width * 4 / 8


# --- bad input -----------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple]:
    edge_index, x, w = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.randn(3, 4), torch.rand(3)
    coo = torch.sparse_coo_tensor(edge_index, w, (3, 3))
    return {
        'x list': (TypeError, "'x'", edge_index, [[1.0]]),
        'x int': (TypeError, "'x'", edge_index, x.long()),
        'x complex': (TypeError, "'x'", edge_index, x.to(torch.complex64)),
        'x sparse': (TypeError, "'x'", edge_index, x.to_sparse()),
        'x vector': (ValueError, "'x'", edge_index, x[0]),
        'x cube': (ValueError, "'x'", edge_index, x[None]),
        'weight list': (TypeError, "'edge_weight'", edge_index, x, [1.0, 1.0, 1.0]),
        'weight dtype': (TypeError, "'edge_weight'", edge_index, x, w.double()),
        'weight int': (TypeError, "'edge_weight'", edge_index, x, w.long()),
        'weight short': (ValueError, "'edge_weight'", edge_index, x, w[:2]),
        'weight matrix': (ValueError, "'edge_weight'", edge_index, x, w.view(3, 1)),
        'graph list': (TypeError, "'graph'", [[0], [0]], x),
        'graph float': (TypeError, "'edge_index'", edge_index.float(), x),
        'graph bool': (TypeError, "'edge_index'", edge_index.bool(), x),
        'graph coo': (TypeError, "'edge_index'", coo, x),
        'graph csr': (TypeError, "'edge_index'", coo.to_sparse_csr(), x),
        'graph sparse int': (TypeError, "'edge_index'", edge_index.to_sparse(), x),
        'graph vector': (ValueError, "'edge_index'", edge_index[0], x),
        'graph transposed': (ValueError, "'edge_index'", edge_index.t(), x),
        'too large': (IndexError, r"'edge_index\[0\]'.*\[0, 2\).*0 to 2", edge_index, x[:2]),
        'negative': (IndexError, r"'edge_index\[0\]'.*-1 to 1", edge_index - 1, x),
        'no nodes': (IndexError, r"'edge_index\[0\]'", edge_index, x[:0]),
        'reduce': (ValueError, "'reduce'.*'median'", edge_index, x, None, 'median'),
        'reduce None': (ValueError, "'reduce'", edge_index, x, None, None),
        'x and Graph': (ValueError, "'x'.*9 source", GRAPHS['tall'].graph(), x),
    }


@pytest.mark.parametrize('name', bad_calls())
def test_bad_input(device: torch.device, name: str, raises: Any) -> None:
    error, message, graph, *args = bad_calls()[name]
    if isinstance(graph, Graph):
        graph = GRAPHS['tall'].graph(device=device)
    elif isinstance(graph, Tensor):
        graph = graph.to(device)
    args = [a.to(device) if isinstance(a, Tensor) else a for a in args]
    with raises(error, match=message):
        spmm(graph, *args)


def test_known_longest_row(device: torch.device) -> None:
    """A kernel that need not look for long rows still processes one that is there."""
    edges = hubs(39, 39, 1900, 0.5, 0.5, True).edge_index.to(device)
    graph, x = graph_of(edges, 40, 40), torch.randn(40, 9, device=device)
    wanted = ops.spmm_max(*graph[:3], None, x, False)
    for longest in (0, 1, 1900, 2**40):
        found = ops.spmm_max(*graph[:3], None, x, False, longest)
        assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_mixed_devices(cuda: torch.device) -> None:
    edge_index, x, w = torch.tensor([[0, 1], [1, 0]]), torch.randn(2, 4), torch.rand(2)
    with pytest.raises(ValueError, match="'graph' is on cpu"):
        spmm(edge_index, x.to(cuda))
    with pytest.raises(ValueError, match="'graph' is on cuda"):
        spmm(graph_of(edge_index.to(cuda), 2, 2), x)
    with pytest.raises(ValueError, match="'edge_weight' is on cpu"):
        spmm(edge_index.to(cuda), x.to(cuda), w)
