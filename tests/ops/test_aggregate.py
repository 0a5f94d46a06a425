"""Both ways of aggregation: results, gradients, the choice between them, bad input, compilation."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from _captures import captured
from _pairs import pairs
from _profile import ops_of
from _raw_ops import ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyg_fast.graph import prepare_edge_index
from pyg_fast.ops import aggregate

from ._graphs import DTYPES, GRAPHS, WIDTHS, Edges, assert_near, edge_lists, exact, reference_of
from ._samples import Given, sample

MODULE = import_module('pyg_fast.ops.aggregate')  # its name is the function's too
INDEX = [torch.int32, torch.int64]
MODES = ['reduce', 'scatter']


@sample('spmm_coo')
def _(given: Given) -> dict[str, object]:
    full = given.full
    return dict(
        edge_index=given.edge_index, value=given.value, x=given.a, **given.scaled,
        num_dst=given.num_nodes, reverse=full, drop_loops=full, count=full, report=False,
    )  # fmt: skip


@sample('sddmm_coo')
def _(given: Given) -> dict[str, object]:
    return dict(
        edge_index=given.edge_index, a=given.a, b=given.b, **given.scales, drop_loops=given.full
    )


def check(edges: Edges, edge_index: Tensor, x: Tensor, value: Tensor | None, mode: str) -> None:
    """Compares result and gradients with the reference's."""
    x.requires_grad_()
    inputs = [x] if value is None else [x, value.requires_grad_()]
    out = aggregate(edge_index, x, value, mode, edges.num_dst)
    assert (out.dtype, out.device) == (x.dtype, x.device)
    grad = exact(*out.shape, dtype=x.dtype, device=x.device)
    actual = out, *torch.autograd.grad(out, inputs, grad)
    expected, magnitude = reference_of(edges.graph(device=x.device), x, value, 'sum', grad)
    terms = max(edge_index.size(1), x.size(1))
    for a, e, m in zip(actual, expected, magnitude, strict=True):
        assert a.dtype == x.dtype
        assert_near(a.detach(), e, m, terms)


def features(edges: Edges, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return exact(edges.num_src, width, dtype=dtype, device=device)


def weights(edges: Edges, dtype: torch.dtype, device: torch.device) -> Tensor:
    return exact(edges.edge_index.size(1), dtype=dtype, device=device)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('weighted', [False, True])
def test_widths(device: torch.device, dtype: torch.dtype, weighted: bool) -> None:
    edges = GRAPHS['hub']
    edge_index = edges.edge_index.to(device)
    for width in WIDTHS:
        value = weights(edges, dtype, device) if weighted else None
        check(edges, edge_index, features(edges, width, dtype, device), value, 'scatter')


@pairs(('name', 'index', 'mode'), list(GRAPHS), [*INDEX, torch.int16, torch.uint8], MODES)
def test_graphs(device: torch.device, name: str, index: torch.dtype, mode: str) -> None:
    edges = GRAPHS[name]
    edge_index = edges.edge_index.to(device, index)
    for dtype in DTYPES:
        for width in (1, 6, 40):
            check(edges, edge_index, features(edges, width, dtype, device), None, mode)
            value = weights(edges, dtype, device)
            check(edges, edge_index, features(edges, width, dtype, device), value, mode)


@given(edge_lists(), st.sampled_from(WIDTHS[:-3]), st.sampled_from(DTYPES), st.booleans())
def test_any_graph(
    device: torch.device, edges: Edges, width: int, dtype: torch.dtype, weighted: bool
) -> None:
    edge_index = edges.edge_index.to(device)
    by_source = edge_index[:, edge_index[0].argsort(stable=True)]
    for listed in (edge_index, by_source):  # sums of sorted lists take a way of their own on CUDA
        value = weights(edges, dtype, device) if weighted else None
        this = edges._replace(edge_index=listed.cpu())
        for mode in MODES:
            x = features(edges, width, dtype, device)
            check(this, listed, x, None if value is None else value.detach(), mode)


def test_threads() -> None:
    edges = Edges(torch.randint(1000, (2, 9000)), 1000, 1000)
    edges.edge_index[1, :4000] = 5
    cpu, results = torch.device('cpu'), []
    x = torch.randn(1000, 40)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for dtype in (torch.float32, torch.bfloat16):
                value = weights(edges, dtype, cpu)
                data = features(edges, 40, dtype, cpu)
                check(edges, edges.edge_index, data, value, 'scatter')
            results.append(aggregate(edges.edge_index, x, mode='scatter'))
        few = Edges(edges.edge_index % 2, 2, 2)  # fewer destinations than threads
        check(few, few.edge_index, features(few, 300, torch.float32, cpu), None, 'scatter')
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [3, 16, 33, 64])
def test_layouts(device: torch.device, dtype: torch.dtype, width: int) -> None:
    edges = GRAPHS['square']
    edge_index, n = edges.edge_index.to(device), edges.num_src
    padded = exact(n * width + 1, dtype=dtype, device=device)
    one = exact(1, dtype=dtype, device=device)
    for x in (
        padded[1:].view(n, width),
        exact(width, n, dtype=dtype, device=device).t(),
        exact(n, 2 * width + 1, dtype=dtype, device=device)[:, 1::2],
        exact(1, width, dtype=dtype, device=device).expand(n, width),
        exact(n, 1, dtype=dtype, device=device).expand(n, width),
    ):
        check(edges, edge_index, x.detach(), None, 'scatter')
        check(edges, edge_index, x.detach(), one.expand(200), 'scatter')
        value = exact(401, dtype=dtype, device=device)[1::2]
        check(edges, edge_index, x.detach(), value, 'scatter')


@pytest.mark.parametrize('index', INDEX)
def test_layouts_of_edges(device: torch.device, index: torch.dtype) -> None:
    edges = GRAPHS['square']
    edge_index = edges.edge_index.to(device, index)
    x = torch.randn(30, 8, device=device, dtype=torch.float64)
    expected = aggregate(edge_index, x, mode='scatter')
    wide = torch.full((5, 402), -1, device=device, dtype=index)
    wide[::2, 1:201][:2] = edge_index
    wide[1::2, 2::2] = edge_index
    for same in (
        edge_index.t().contiguous().t(),  # strided rows
        wide[::2, 1:201][:2],  # rows apart: read in place
        wide[1::2, 2::2],
    ):
        assert not same.is_contiguous()
        torch.testing.assert_close(aggregate(same, x, mode='scatter'), expected)
    loop = torch.tensor([[3]], device=device, dtype=index)
    for loops in (loop.expand(2, 1), loop.expand(2, 4)):
        out = aggregate(loops, x, mode='scatter')
        torch.testing.assert_close(out[3], x[3] * loops.size(1))
    flipped = aggregate(edge_index.flip(0), x, mode='scatter')
    graph = edges.graph(device=device).t()
    torch.testing.assert_close(flipped, aggregate(graph, x))


def test_no_copy_of_rows_that_are_contiguous(cuda: torch.device) -> None:
    edge_index = torch.zeros(3, 1 << 20, dtype=torch.int64, device=cuda)[:2]
    x = torch.zeros(4, 4, device=cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    aggregate(edge_index, x, mode='scatter')
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('width', [1, 3, 9, 17, 64, 65])
def test_nan_and_infinity_stay_where_they_belong(
    device: torch.device, dtype: torch.dtype, width: int
) -> None:
    nan, inf = float('nan'), float('inf')
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 4, 3], [0, 0, 1, 2, 3, 3, 3]])
    edges = Edges(edge_index, 5, 5)
    for value in (nan, inf, -inf):
        x = features(edges, width, dtype, device)
        x[2] = value
        x[0, width - 1] = value
        for w in (None, weights(edges, dtype, device).abs() + 1):
            check(edges, edge_index.to(device), x.detach(), w, 'scatter')
            out = aggregate(edge_index.to(device), x.detach(), w, 'scatter')
            assert out[2:].isfinite().all()
            assert out[0].isfinite().sum() == width - 1


def test_sums_of_halves_run_in_float32(device: torch.device) -> None:
    edge_index = torch.zeros(2, 4096, dtype=torch.long, device=device)
    for dtype in (torch.float16, torch.bfloat16):
        for width in (1, 8, 11):
            x = torch.ones(1, width, dtype=dtype, device=device, requires_grad=True)
            out = aggregate(edge_index, x, mode='scatter')
            assert (out == 4096).all()  # in bfloat16 it would have stopped at 256
            assert (torch.autograd.grad(out.sum(), x)[0] == 4096).all()


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('edges', ['some', 'none'])
def test_gradcheck(device: torch.device, edges: str, weighted: bool) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4], [0, 0, 0, 2, 2, 2, 3, 3]], device=device)
    edge_index = edge_index[:, :0] if edges == 'none' else edge_index
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(edge_index.size(1), dtype=torch.float64, device=device)
    inputs = (x, value.requires_grad_()) if weighted else (x,)

    def run(x: Tensor, value: Tensor | None = None) -> Tensor:
        return aggregate(edge_index, x, value, 'scatter', 4)

    assert gradcheck(run, inputs, nondet_tol=1e-12)
    assert gradgradcheck(run, inputs, nondet_tol=1e-12)


@pytest.mark.parametrize('mode', MODES)
def test_third_derivative(device: torch.device, mode: str) -> None:
    edges = GRAPHS['square']
    x = exact(30, 3, dtype=torch.float64, device=device).requires_grad_()
    value = exact(200, dtype=torch.float64, device=device).requires_grad_()
    edge_index = edges.edge_index.to(device)
    results = []
    for out in (
        aggregate(edge_index, x, value, mode),
        reference.spmm_coo(edge_index, value, x, num_dst=30)[0],
    ):
        y = out.pow(3).sum()
        for _ in range(3):
            grad_x, grad_value = torch.autograd.grad(y, (x, value), create_graph=True)
            y = grad_x.pow(2).sum() + grad_value.pow(2).sum()
        results.append(y)
    torch.testing.assert_close(*results)


@pytest.mark.parametrize('mode', MODES)
def test_gradient_of_weights_alone(device: torch.device, mode: str) -> None:
    edge_index = torch.randint(6, (2, 20)).to(device)
    x = exact(6, 5, dtype=torch.float64, device=device)
    value = torch.randn(20, dtype=torch.float64, device=device, requires_grad=True)

    def run(value: Tensor) -> Tensor:
        return aggregate(edge_index, x, value, mode)

    assert gradcheck(run, (value,), nondet_tol=1e-12)
    assert gradgradcheck(run, (value,), nondet_tol=1e-12)


def with_gradients(
    run: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor
) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = run(leaves[0], leaves[1] if len(leaves) > 1 else None)
    return out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('reverse', [False, True])
@pytest.mark.parametrize('drop_loops', [False, True])
@pytest.mark.parametrize('chosen', range(8))
def test_prologue_and_epilogue(
    device: torch.device, dtype: torch.dtype, reverse: bool, drop_loops: bool, chosen: int
) -> None:
    edge_index = GRAPHS['square'].edge_index.to(device)
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    scales = [torch.rand(30, dtype=acc, device=device) if chosen >> k & 1 else None
              for k in range(3)]  # fmt: skip
    for value_dtype in {dtype, acc, None}:
        x = exact(30, 19, dtype=dtype, device=device)
        inputs = [x]
        if value_dtype is not None:
            inputs.append(exact(200, dtype=value_dtype, device=device))
        grad = exact(30, 19, dtype=dtype, device=device)

        def ours(x: Tensor, value: Tensor | None) -> Tensor:
            return MODULE.scatter_sum(edge_index, x, value, 30, *scales, reverse, drop_loops)

        def theirs(x: Tensor, value: Tensor | None) -> Tensor:
            args = edge_index, value, x, *scales, 30, reverse, drop_loops
            return reference.spmm_coo(*args)[0]

        doubles = [t.double() for t in inputs]
        actual = with_gradients(ours, inputs, grad)
        expected = with_gradients(theirs, doubles, grad)
        magnitude = with_gradients(theirs, [t.abs() for t in doubles], grad.abs())
        for a, e, m, of in zip(actual, expected, magnitude, [x, *inputs], strict=True):
            assert a.dtype == of.dtype
            # The gradient of float32 weights is rounded as that of the features is.
            assert_near(a.detach().to(dtype), e.detach(), m.detach(), 200)


# --- the choice of the kernel --------------------------------------------------------------------


def test_choice_of_mode(device: torch.device, limits: Callable[..., None]) -> None:
    edge_index = GRAPHS['square'].edge_index.to(device)
    prepared, _ = prepare_edge_index(edge_index, (30, 30))
    x = torch.randn(30, 4, device=device)
    expected = aggregate(GRAPHS['square'].graph(device=device), x)

    def scatters(graph: Tensor, x: Tensor = x, **options: object) -> bool:
        return 'pyg_fast::spmm_coo' in ops_of(
            lambda: torch.testing.assert_close(aggregate(graph, x, **options)[:, :4], expected)
        )

    assert scatters(edge_index)
    assert scatters(edge_index, mode='scatter')
    assert scatters(prepared, mode='scatter')
    assert not scatters(edge_index, mode='reduce')
    assert not scatters(prepared)
    assert not scatters(GRAPHS['square'].graph(device=device))
    many = torch.cat([x, torch.randn(30, 1000, device=device)], 1)
    assert scatters(edge_index, many) == (device.type == 'cuda')
    limits(additions_on_cuda=200)
    assert not scatters(edge_index, many)
    assert scatters(edge_index) == (device.type == 'cpu')
    torch.use_deterministic_algorithms(True)
    try:
        assert aggregate(edge_index, x).equal(aggregate(edge_index, x))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('mode', ['auto', *MODES])
def test_same_bits_where_asked_for(device: torch.device, dtype: torch.dtype, mode: str) -> None:
    edge_index = torch.randint(500, (2, 20000), device=device)
    edge_index[:, :2000] = 7
    x = torch.randn(500, 48, device=device).to(dtype).requires_grad_()
    value = torch.randn(20000, device=device).to(dtype).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:

        def run() -> tuple[Tensor, ...]:
            out = aggregate(edge_index, x, value, mode)
            return out, *torch.autograd.grad(out.float().pow(2).sum(), (x, value))

        first = run()
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_tensor_of_edges_times_channels(cuda: torch.device) -> None:
    num_nodes, num_edges, width = 1000, 200_000, 128
    edge_index = torch.randint(num_nodes, (2, num_edges), device=cuda)
    x = torch.randn(num_nodes, width, device=cuda, requires_grad=True)
    value = torch.randn(num_edges, device=cuda, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    aggregate(edge_index, x, value, 'scatter').sum().backward()
    assert torch.cuda.max_memory_allocated() - before < num_edges * width * 4 / 8


def test_side_stream(cuda: torch.device) -> None:
    edge_index = GRAPHS['square'].edge_index.to(cuda)
    stream = torch.cuda.Stream()
    x = torch.zeros(30, 64, device=cuda)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the default stream would not wait for it
        x.fill_(1)
        out = aggregate(edge_index, x, mode='scatter')
    stream.synchronize()
    degree = torch.bincount(edge_index[1], minlength=30).float()
    assert torch.equal(out, degree.view(-1, 1).expand(30, 64))


def test_cuda_graph(cuda: torch.device) -> None:
    edge_index = GRAPHS['square'].edge_index.to(cuda)
    x = torch.randn(30, 8, device=cuda, requires_grad=True)
    value = torch.rand(200, device=cuda, requires_grad=True)

    def run() -> tuple[Tensor, ...]:
        out = aggregate(edge_index, x, value, 'scatter')
        return out, *torch.autograd.grad(out.pow(2).sum(), (x, value))

    replay, results = captured(run)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    replay()
    for a, e in zip(results, run(), strict=True):
        torch.testing.assert_close(a, e)


# --- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('graph', 'mode'),
    [('plain', 'auto'), ('prepared', 'auto'), ('plain', 'reduce'), ('prepared', 'scatter')],
)
def test_compiles_without_graph_break(device: torch.device, graph: str, mode: str) -> None:
    torch._dynamo.reset()
    edge_index = GRAPHS['square'].edge_index.to(device)
    if graph == 'prepared':
        edge_index, _ = prepare_edge_index(edge_index, (30, 30))
    x = torch.randn(30, 9, device=device, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True)
    compiled = torch.compile(aggregate, fullgraph=True, backend='aot_eager')
    for w in (None, value):
        inputs = (x,) if w is None else (x, w)
        results = []
        for fn in (aggregate, compiled):
            out = fn(edge_index, x * 2, w, mode) + 1
            results.append((out, *torch.autograd.grad(out.pow(2).sum(), inputs)))
        torch.testing.assert_close(*results)


def test_compiles_with_inductor(device: torch.device) -> None:
    torch._dynamo.reset()
    edge_index = GRAPHS['square'].edge_index.to(device)
    x = torch.randn(30, 9, device=device, requires_grad=True)

    def run(edge_index: Tensor, x: Tensor) -> Tensor:
        return aggregate(edge_index, torch.relu(x), mode='scatter').sigmoid()

    compiled = torch.compile(run, fullgraph=True)
    expected, actual = run(edge_index, x), compiled(edge_index, x)
    torch.testing.assert_close(actual, expected)
    grads = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (actual, expected))
    torch.testing.assert_close(*grads)


# --- indices out of range ------------------------------------------------------------------------


@pytest.mark.parametrize('index', INDEX)
@pytest.mark.parametrize('dtype', DTYPES)
def test_invalid_edges_are_counted_and_left_out(
    device: torch.device, dtype: torch.dtype, index: torch.dtype
) -> None:
    large = 2**31 - 1 if index == torch.int32 else 2**62
    src = torch.tensor([0, 5, 1, -1, 2, 2, 1, large, -large, 0] * 7, dtype=index, device=device)
    dst = torch.tensor([0, 0, 9, 0, 2, 1, -7, 1, 2, large] * 7, dtype=index, device=device)
    edge_index = torch.stack([src, dst])
    for width in (0, 1, 7, 32):
        x = exact(5, width, dtype=dtype, device=device)
        grad = exact(3, width, dtype=dtype, device=device)
        value = exact(70, dtype=dtype, device=device)
        for reverse in (False, True):
            edges = edge_index.flip(0) if reverse else edge_index
            for drop in (False, True):
                args = edges, value, x, None, None, None, 3, reverse, drop, True
                (out, invalid), (expected, count) = ops.spmm_coo(*args), reference.spmm_coo(*args)
                assert_near(out, expected, reference.spmm_coo(edges, value.abs(), x.abs(),
                            num_dst=3, reverse=reverse)[0], 70)  # fmt: skip
                assert int(invalid) == int(count) == 7 * 7
        args = edge_index, grad, x, None, None, False
        expected = reference.sddmm_coo(*args)
        assert_near(ops.sddmm_coo(*args), expected, expected.abs() + width, width)
    nothing = torch.empty(0, 4, dtype=dtype, device=device)
    out, invalid = ops.spmm_coo(edge_index, None, nothing, None, None, None, 3, False, False, True)
    assert int(invalid) == 70
    assert out.eq(0).all()
    assert ops.sddmm_coo(edge_index, nothing, nothing, None, None, False).eq(0).all()


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize(
    ('end', 'wrong', 'message'),
    [
        (0, 7, r"'edge_index\[0\]' must hold sources in \[0, 7\), got values from 0 to 7"),
        (0, -1, r"'edge_index\[0\]' must hold sources in \[0, 7\), got values from -1 to"),
        (1, 5, r"'edge_index\[1\]' must hold destinations in \[0, 5\), got values from 0 to 5"),
        (1, 2**32, r"'edge_index\[1\]' must hold destinations"),  # 0 as int32
    ],
)
def test_index_out_of_range(
    device: torch.device, mode: str, end: int, wrong: int, message: str, raises: Any
) -> None:
    good = torch.stack([torch.arange(300) % 7, torch.arange(300) % 5]).to(device)
    x = torch.randn(7, 4, device=device)
    for position in (0, 150, 299):
        edge_index = good.clone()
        aggregate(edge_index, x, None, mode, 5)
        edge_index.data[end, position] = wrong
        for _ in range(2):
            with raises(IndexError, match=message):
                aggregate(edge_index, x, None, mode, 5)
    with raises(IndexError, 'edge_index'):  # nor does a check hold for other sizes
        aggregate(good, x, None, mode, 4)
    with raises(IndexError, 'edge_index'):
        aggregate(good, x[:6], None, mode, 5)


def test_nothing_waits(cuda: torch.device) -> None:
    edge_index = GRAPHS['square'].edge_index.to(cuda)
    x = torch.randn(30, 4, device=cuda, requires_grad=True)
    for mode in MODES:
        aggregate(edge_index, x, mode=mode).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode('error')
        try:
            aggregate(edge_index.clone(), x, mode=mode).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode('default')


# --- bad input -----------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple]:
    edge_index, x, w = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.randn(3, 4), torch.rand(3)
    prepared, _ = prepare_edge_index(edge_index, (3, 3))
    graph = GRAPHS['tall'].graph()
    return {
        'mode': (ValueError, "'mode'.*'gather'", edge_index, x, None, 'gather'),
        'mode None': (ValueError, "'mode'", edge_index, x, None, None),
        'x list': (TypeError, "'x'", edge_index, [[1.0]]),
        'x int': (TypeError, "'x'", edge_index, x.long()),
        'x sparse': (TypeError, "'x'", edge_index, x.to_sparse()),
        'x vector': (ValueError, "'x'", edge_index, x[0]),
        'weight list': (TypeError, "'edge_weight'", edge_index, x, [1.0, 1.0, 1.0]),
        'weight dtype': (TypeError, "'edge_weight'", edge_index, x, w.double()),
        'weight short': (ValueError, "'edge_weight'", edge_index, x, w[:2]),
        'weight matrix': (ValueError, "'edge_weight'", edge_index, x, w.view(3, 1)),
        'graph list': (TypeError, "'edge_index'", [[0], [0]], x),
        'graph float': (TypeError, "'edge_index'", edge_index.float(), x),
        'graph sparse': (TypeError, "'edge_index'", edge_index.to_sparse(), x),
        'graph transposed': (ValueError, "'edge_index'", edge_index.t(), x),
        'Graph scattered': (ValueError, "'graph'.*'scatter'", graph, torch.rand(9, 2), None,
                            'scatter'),
        'Graph and x': (ValueError, "'x'.*9 source", graph, x),
        'Graph and num_dst': (ValueError, "'num_dst' must be 70", graph, torch.rand(9, 2), None,
                              'auto', 69),
        'prepared and x': (ValueError, "'x'.*3 source", prepared, x[:2]),
        'prepared and num_dst': (ValueError, "'num_dst' must be 3", prepared, x, None, 'auto', 4),
        'num_dst': (ValueError, "'num_dst' must not be negative, got -1", edge_index, x, None,
                    'auto', -1),
        'no nodes': (IndexError, r"'edge_index\[0\]'", edge_index, x[:0]),
    }  # fmt: skip


@pytest.mark.parametrize('name', bad_calls())
def test_bad_input(device: torch.device, name: str, raises: Any) -> None:
    error, message, graph, *args = bad_calls()[name]
    if 'Graph' in name:
        graph = GRAPHS['tall'].graph(device=device)
    elif isinstance(graph, Tensor):
        graph = graph.to(device)
    args = [a.to(device) if isinstance(a, Tensor) else a for a in args]
    with raises(error, match=message):
        aggregate(graph, *args)


def test_mixed_devices(cuda: torch.device) -> None:
    edge_index, x, w = torch.tensor([[0, 1], [1, 0]]), torch.randn(2, 4), torch.rand(2)
    for mode in MODES:
        with pytest.raises(ValueError, match="'graph' is on cpu"):
            aggregate(edge_index, x.to(cuda), mode=mode)
        with pytest.raises(ValueError, match="'edge_weight' is on cpu"):
            aggregate(edge_index.to(cuda), x.to(cuda), w, mode)
