"""Sums by groups against the reference: sizes, graphs, types, gradients, determinism, compiled."""

import pytest
import torch
from _captures import captured
from _pairs import pairs
from _raw_ops import reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyg_fast.graph import Graph, graph_of, prepare_edge_index, set_group_sizes
from pyg_fast.ops import spmm
from pyg_fast.ops.linear_product import Plan, linear_product
from pyg_fast.ops.path import Rows
from pyg_fast.ops.product import raw_product
from pyg_fast.sparse.groups import groups_of
from pyg_fast.sparse.operator import SparseOperator

from ._graphs import (
    DTYPES,
    GRAPHS,
    WIDTHS,
    Edges,
    assert_near,
    edge_lists,
    exact,
    multiplied,
    reference_of,
    short_rows,
)
from ._samples import Given, sample
from .test_spmm import check_short_rows, placed, spmm_sample

# Of teams and of whole warps, of one load of edges and of several.
SIZES = [1, 4, 16, 33, 64, 500, 4096]


@sample('spmm_groups')
def _(given: Given) -> dict[str, object]:
    *parts, atomic, order = groups_of(given.graph.rowptr, 3, atomic=given.full)
    names = ('group_ptr', 'group_row', 'long_row', 'long_ptr', 'long_shift', 'num_partials')
    groups = dict(zip((*names, 'most_groups', 'group_size'), parts, strict=True))
    args = spmm_sample(given)
    place = {name: args.pop(name) for name in ('out_row', 'num_out')}
    return dict(**args, **groups, atomic=atomic, group_order=order, **place)


def acc_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(graph: Graph, x: Tensor, value: Tensor | None, reduce: str = 'sum') -> None:
    """Compares result and gradients with the reference's."""
    inputs = [t.requires_grad_() for t in (x, value) if t is not None]
    out = spmm(graph, x, value, reduce)
    grad = exact(*out.shape, dtype=x.dtype, device=x.device)
    actual = out, *torch.autograd.grad(out, inputs, grad)
    expected, magnitude = reference_of(graph, x, value, reduce, grad)
    for a, e, m in zip(actual, expected, magnitude, strict=True):
        assert a.dtype == x.dtype
        assert_near(a.detach(), e, m, max(graph.num_edges, x.size(1)))


def inputs(
    edges: Edges, width: int, dtype: torch.dtype, device: torch.device, weighted: bool
) -> tuple[Tensor, Tensor | None]:
    value = exact(edges.edge_index.size(1), dtype=dtype, device=device) if weighted else None
    return exact(edges.num_src, width, dtype=dtype, device=device), value


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('atomic', [False, True])
def test_widths_and_sizes(
    device: torch.device, dtype: torch.dtype, weighted: bool, atomic: bool
) -> None:
    edges = GRAPHS['hub']
    for k, width in enumerate(WIDTHS):
        for size in (SIZES[k % len(SIZES)], SIZES[(k + 3) % len(SIZES)]):
            graph = Graph.with_groups(edges.graph(device=device), size, size + 1, atomic)
            check(graph, *inputs(edges, width, dtype, device, weighted))


@pairs(('name', 'index', 'size'), list(GRAPHS), [torch.int32, torch.int64], SIZES)
def test_graphs(device: torch.device, name: str, index: torch.dtype, size: int) -> None:
    edges = GRAPHS[name]
    for atomic in (False, True):
        graph = Graph.with_groups(edges.graph(index, device), size, size, atomic)
        for dtype in DTYPES:
            for width, weighted, reduce in ((1, 0, 'mean'), (6, 1, 'sum'), (40, 1, 'mean')):
                check(graph, *inputs(edges, width, dtype, device, bool(weighted)), reduce)


@given(
    edge_lists(),
    st.sampled_from(WIDTHS[:-3]),
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_any_graph(
    device: torch.device,
    edges: Edges,
    width: int,
    size: int,
    dtype: torch.dtype,
    weighted: bool,
    atomic: bool,
) -> None:
    graph = Graph.with_groups(edges.graph(device=device), size, size, atomic)
    for reduce in ('sum', 'mean'):
        check(graph, *inputs(edges, width, dtype, device, weighted), reduce)


def test_many_groups(device: torch.device) -> None:
    # Enough for several of one team, and for partial sums of which some rows have more than warps.
    generator = torch.Generator().manual_seed(5)
    edge_index = torch.randint(4000, (2, 120_000), generator=generator)
    edge_index[1, :9000] = 17
    edge_index[1, 9000:9700] = 3999
    edges = Edges(edge_index, 4000, 4000)
    for size in (2, 8, 64):
        graph = Graph.with_groups(edges.graph(device=device), size, size)
        for width, dtype in ((16, torch.float32), (64, torch.float32), (72, torch.bfloat16)):
            x, value = inputs(edges, width, dtype, device, width == 64)
            if value is not None:  # and infinite weights stay in their rows
                value[::997] = float('inf')
            check(graph, x, value)


def test_short_rows(device: torch.device) -> None:
    """With long rows, without, and of so few edges that the kernel for short rows adds them."""
    if device.type == 'cpu':
        pytest.skip('groups have no effect there')
    hubs, without = short_rows(10_000).graph(device=device), short_rows().graph(device=device)
    few = Edges(torch.randint(16_400, (2, 20_000)), 16_400, 16_400)
    few.edge_index[1, :700] = 11
    few = few.graph(device=device)
    for graph, size, is_short in ((hubs, 32, False), (without, 256, None), (few, 32, True)):
        grouped = graph.with_groups(size)
        for width, dtype in ((16, torch.float32), (300, torch.float32), (64, torch.float16)):
            check_short_rows(grouped, width, dtype)
        if is_short is None:  # Rows of one group each may have the same order of additions.
            continue
        assert same_bits(graph, grouped) == is_short
    many = 1 << 20  # Of so many rows longer ones are short.
    edges = torch.randint(many, (2, 5 * many))
    edges[1, :700] = 11
    graph = Edges(edges, many, many).graph(device=device)
    assert same_bits(graph, graph.with_groups(32))
    edges[1, :1100] = 11  # a hub
    graph = Edges(edges, many, many).graph(device=device)
    assert not same_bits(graph, graph.with_groups(32))


def same_bits(graph: Graph, other: Graph) -> bool:
    """Whether sums over two graphs are equal."""
    x = torch.randn(graph.num_src, 16, device=graph.rowptr.device)
    return torch.equal(*(raw_product(SparseOperator(g), x) for g in (graph, other)))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('mean', [False, True])
@pytest.mark.parametrize('out_acc', [False, True])
@pytest.mark.parametrize('atomic', [False, True])
def test_prologue_and_epilogue(
    device: torch.device, dtype: torch.dtype, mean: bool, out_acc: bool, atomic: bool
) -> None:
    edges, acc = GRAPHS['square'], acc_of(dtype)
    for k, size in enumerate((1, 3, 100)):
        graph = Graph.with_groups(edges.graph(device=device), size, size, atomic)
        scales = torch.rand(3, 30, dtype=acc, device=device)
        named = {
            name: scales[j]
            for j, name in enumerate(('row_scale', 'col_scale', 'diag'))
            if j != k or out_acc
        }
        x, value = inputs(edges, (19, 32, 1)[k], dtype, device, k != 1)
        bias = exact(x.size(1), dtype=acc if out_acc else dtype, device=device)
        out = multiplied(graph, x, value, bias, **named, mean=mean, out_acc=out_acc)
        assert out.dtype == (acc if out_acc else dtype)
        options = {**named, 'mean': mean}
        expected = reference.spmm(*graph[:3], value, x, bias=bias, **options)
        size_of = None if value is None else value.abs()
        magnitude = reference.spmm(*graph[:3], size_of, x.abs(), bias=bias.abs(), **options)
        assert_near(out, expected, magnitude, 200)


@pytest.mark.parametrize('atomic', [False, True])
def test_self_row(device: torch.device, atomic: bool) -> None:
    edges = GRAPHS['in_hubs']  # of 50 sources and 40 destinations
    graph = edges.graph(device=device)
    own = torch.randint(-1, 50, (40,), dtype=torch.int32, device=device)
    x = exact(50, 20, dtype=torch.float32, device=device)
    diag = torch.rand(40, device=device)
    expected = reference.spmm(*graph[:3], None, x, None, None, diag, None, True, False, own)
    for size in SIZES:
        grouped = graph.with_groups(size, atomic=atomic)
        op = SparseOperator(grouped, diag=diag, self_row=own, mean=True)
        out = raw_product(op, x)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('atomic', [False, True])
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
def test_place(device: torch.device, dtype: torch.dtype, atomic: bool, index: torch.dtype) -> None:
    """Rows of one group and of several write in place, of 40 all but those that do not exist."""
    edges, acc = GRAPHS['in_hubs'], acc_of(dtype)
    graph = edges.graph(index, device)
    own = torch.randint(-1, 50, (40,), dtype=torch.int32, device=device)
    place = torch.randperm(60)[:40]
    place[[0, 7]] = torch.tensor([-1, 1 << 40])
    position = torch.full((60,), -1, dtype=torch.int32)  # only its size is read
    rows = Rows(place.to(device), position.to(device))
    diag, row_scale = torch.rand(2, 40, dtype=acc, device=device)
    col_scale = torch.rand(50, dtype=acc, device=device)
    for size in SIZES:
        for width in (1, 8, 33, 64):
            for mean in (False, True):
                x, value = inputs(edges, width, dtype, device, mean)
                op = SparseOperator(
                    graph.with_groups(size, atomic=atomic), value, row_scale, col_scale, diag, own,
                    mean=mean,
                )  # fmt: skip
                out = raw_product(op, x, rows=rows)
                assert out.shape == (60, width)

                def run(x: Tensor, value: Tensor | None) -> Tensor:
                    return reference.spmm(
                        *graph[:3], value, x, row_scale, col_scale, diag,
                        None, mean, False, own, rows.nodes, 60,  # noqa: B023 (called at once)
                    )  # fmt: skip

                magnitude = run(x.abs(), None if value is None else value.abs())
                assert_near(out, run(x, value), magnitude, 2000)
                if not atomic:
                    assert torch.equal(out, placed(raw_product(op, x), rows.nodes, 60))


@pytest.mark.parametrize('dtype', DTYPES)
def test_layouts(device: torch.device, dtype: torch.dtype) -> None:
    edges = GRAPHS['square']
    for width in (3, 16, 64):
        padded = exact(30 * width + 1, dtype=dtype, device=device)
        for x in (
            padded[1:].view(30, width),
            exact(width, 30, dtype=dtype, device=device).t(),
            exact(1, width, dtype=dtype, device=device).expand(30, width),
        ):
            check(Graph.with_groups(edges.graph(device=device), 3, 3), x.detach(), None)


def test_nan_stays_where_it_belongs(device: torch.device) -> None:
    # What threads past the end of a group read must not reach its sum.
    edges = Edges(torch.tensor([[0, 1, 2, 3, 4, 4, 3], [0, 0, 1, 2, 3, 3, 3]]), 5, 5)
    for width in (1, 8, 33, 64):
        for value in (float('nan'), float('inf')):
            x = exact(5, width, dtype=torch.float32, device=device)
            x[2] = value
            for size in (1, 2, 8, 100):
                check(Graph.with_groups(edges.graph(device=device), size, size), x.detach(), None)


@pytest.mark.parametrize('atomic', [False, True])
@pytest.mark.parametrize('weighted', [False, True])
def test_gradcheck(device: torch.device, weighted: bool, atomic: bool) -> None:
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4], [0, 0, 0, 2, 2, 2, 3, 3]])
    graph = Graph.with_groups(Edges(edge_index, 5, 4).graph(device=device), 2, 1, atomic)
    x = torch.randn(5, 3, dtype=torch.float64, device=device, requires_grad=True)
    value = torch.randn(8, dtype=torch.float64, device=device, requires_grad=True)
    for reduce in ('sum', 'mean'):

        def run(x: Tensor, value: Tensor | None = None) -> Tensor:
            return spmm(graph, x, value, reduce)  # noqa: B023 (called at once)

        given = (x, value) if weighted else (x,)
        assert gradcheck(run, given, nondet_tol=1e-12)
        assert gradgradcheck(run, given, nondet_tol=1e-12)


@pytest.mark.parametrize('sizes', [(3, 5), (3, None), (None, 5)])
@pytest.mark.parametrize('channels', [(4, 7), (7, 4)])
def test_linear(device: torch.device, sizes: tuple, channels: tuple[int, int]) -> None:
    plain = GRAPHS['square'].graph(device=device)
    graph = Graph.with_groups(plain, *sizes)
    make = {'dtype': torch.float64, 'device': device}
    x = torch.randn(30, channels[0], **make, requires_grad=True)
    weight = torch.randn(channels[1], channels[0], **make, requires_grad=True)
    bias = torch.randn(channels[1], **make, requires_grad=True)
    scale, diag = torch.rand(2, 30, **make)
    results = []
    for each in (graph, plain):
        plan = Plan(SparseOperator(each, None, scale, scale, diag))
        out = linear_product(x, weight, bias, plan)
        grads = torch.autograd.grad(out.pow(2).sum(), (x, weight, bias), create_graph=True)
        second = torch.autograd.grad(sum(g.pow(2).sum() for g in grads), (x, weight, bias))
        results.append((out, *grads, *second))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Which of our ops run."""

    def __enter__(self) -> 'Called':
        self.names: list[str] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == 'pyg_fast':
            self.names.append(func._schema.name.split('::')[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('which', ['spmm', 'linear'])
def test_which_op_runs(device: torch.device, which: str) -> None:
    plain = GRAPHS['square'].graph(device=device)
    x = torch.randn(30, 4, device=device, requires_grad=True)
    weight = torch.randn(4, 4, device=device, requires_grad=True)
    names = {True: 'spmm_groups', False: 'spmm'}
    for sizes in ((4, 8), (4, None), (None, 8), (None, None)):
        graph = Graph.with_groups(plain, *sizes)
        with Called() as called:
            if which == 'spmm':
                out = spmm(graph, x)
            else:
                out = linear_product(x, weight, None, Plan(SparseOperator(graph)))
            out.sum().backward()
        assert called.names == [names[size is not None] for size in sizes]


def test_option_goes_to_the_op_but_not_where_results_must_repeat(device: torch.device) -> None:
    graph = Graph.with_groups(GRAPHS['square'].graph(device=device), 4, 4, atomic=True)
    seen = []

    class Atomic(Called):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.pyg_fast.spmm_groups.default:
                seen.append(args[-2])
            return func(*args, **(kwargs or {}))

    x = torch.randn(30, 4, device=device)
    try:
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            with Atomic():
                spmm(graph, x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True, False]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('atomic', [False, True])
def test_same_bits_every_time(device: torch.device, dtype: torch.dtype, atomic: bool) -> None:
    edge_index = torch.randint(500, (2, 20000))
    edge_index[:, :2000] = 7
    graph = Graph.with_groups(Edges(edge_index, 500, 500).graph(device=device), 16, 16, atomic)
    x = torch.randn(500, 48, device=device).to(dtype).requires_grad_()
    value = torch.randn(20000, device=device).to(dtype).requires_grad_()
    torch.use_deterministic_algorithms(atomic)
    try:

        def run() -> tuple[Tensor, ...]:
            out = spmm(graph, x, value)
            return out, *torch.autograd.grad(out.float().pow(2).sum(), (x, value))

        first = run()
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(('width', 'size'), [(8, 4), (32, 64), (32, 200), (128, 64)])
def test_order_changes_no_bit(device: torch.device, width: int, size: int) -> None:
    graph = Graph.with_groups(GRAPHS['hub'].graph(device=device), size)
    x = torch.randn(graph.num_src, width, device=device)
    unordered = graph._replace(groups=graph.groups._replace(order=None))
    assert torch.equal(spmm(graph, x), spmm(unordered, x))


def test_on_a_cpu_groups_change_nothing() -> None:
    graph = GRAPHS['in_hubs'].graph()
    x = torch.randn(50, 20)
    assert torch.equal(spmm(Graph.with_groups(graph, 3), x), spmm(graph, x))


# --- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize('atomic', [False, True])
def test_compiles_without_graph_break(device: torch.device, atomic: bool) -> None:
    torch._dynamo.reset()
    prepared = prepare_edge_index(GRAPHS['square'].edge_index.to(device), (30, 30))[0]
    set_group_sizes(prepared, 4, 8, atomic)
    x = torch.randn(30, 9, device=device, requires_grad=True)
    value = torch.randn(200, device=device, requires_grad=True)
    weight = torch.randn(5, 9, device=device, requires_grad=True)

    def run(graph: Tensor, x: Tensor, value: Tensor) -> Tensor:
        return spmm(graph, x * 2, value, 'mean') + 1

    def mapped(graph: Graph, x: Tensor, weight: Tensor) -> Tensor:
        return linear_product(x * 2, weight, None, Plan(SparseOperator(graph))).relu()

    names: list[str] = []

    def backend(module: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        for part in module.modules():
            if isinstance(part, torch.fx.GraphModule):
                names.extend(str(node.target) for node in part.graph.nodes)
        return module

    prepared_graph = graph_of(prepared, 30, 30)
    for function, graph, other in ((run, prepared, value), (mapped, prepared_graph, weight)):
        expected = function(graph, x, other)
        compiled = torch.compile(function, fullgraph=True, backend='aot_eager')
        actual = compiled(graph, x, other)
        torch.testing.assert_close(actual, expected)
        grads = (torch.autograd.grad(y.pow(2).sum(), (x, other)) for y in (actual, expected))
        torch.testing.assert_close(*grads)
        names.clear()
        torch.compile(function, fullgraph=True, backend=backend)(graph, x, other)
        assert any('spmm_groups' in name for name in names)


def test_compiles_with_inductor(device: torch.device) -> None:
    torch._dynamo.reset()
    prepared = prepare_edge_index(GRAPHS['square'].edge_index.to(device), (30, 30))[0]
    set_group_sizes(prepared, 4, 8)
    x = torch.randn(30, 9, device=device, requires_grad=True)

    def run(graph: Tensor, x: Tensor) -> Tensor:
        return spmm(graph, torch.relu(x), reduce='mean').sigmoid()

    expected, actual = run(prepared, x), torch.compile(run, fullgraph=True)(prepared, x)
    torch.testing.assert_close(actual, expected)
    grads = (torch.autograd.grad(y.pow(2).sum(), x)[0] for y in (actual, expected))
    torch.testing.assert_close(*grads)


def test_cuda_graph(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    for atomic in (False, True):
        graph = Graph.with_groups(GRAPHS['in_hubs'].graph(device=device), 16, 16, atomic)
        x = torch.randn(50, 20, device=device, requires_grad=True)

        def step() -> tuple[Tensor, ...]:
            out = spmm(graph, x)  # noqa: B023 (called at once)
            return out, *torch.autograd.grad(out.pow(2).sum(), x)  # noqa: B023

        replay, results = captured(step)
        for _ in range(3):
            with torch.no_grad():
                x.normal_()
            replay()
            torch.testing.assert_close(results, step(), rtol=1e-4, atol=1e-4)
