"""GATv2's attention: raw ops against their references, extreme scores, bad input.

What it shares with GAT's is tested in test_attention.py.
"""

from typing import Any

import pytest
import torch
from _raw_ops import edges_and_loops, ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pyg_fast.graph import Graph, graph_of
from pyg_fast.ops import gatv2

from ._attention import (
    SHAPES,
    acc_of,
    check,
    inputs_of,
    log_sums,
    ordered,
    raw_variants,
    seed_of,
    terms_of,
)
from ._graphs import DTYPES, GRAPHS, Edges, assert_near, edge_lists, exact
from .test_gat import refused, spoiled


def arguments(
    graph: Graph, heads: int, channels: int, dtype: torch.dtype, extra: bool, out_acc: bool
) -> dict[str, Tensor | None]:
    """What ops.gatv2 takes after the graph, as far as it is tensors."""
    device = graph.col.device
    bias = exact(heads * channels, dtype=acc_of(dtype) if out_acc else dtype, device=device)
    return {
        'x': exact(graph.num_src, heads, channels, dtype=dtype, device=device),
        'x_dst': exact(graph.num_dst, heads, channels, dtype=dtype, device=device),
        # Logits that do not grow with the number of channels.
        'att': exact(1, heads, channels, dtype=dtype, device=device) / (1 + channels // 16),
        'bias': bias if extra else None,
        'seed': seed_of(2**40 + 7, device),
    }


def as_gat(
    graph: Graph, given: dict[str, Tensor | None], num_loops: int, slope: float
) -> tuple[list[Tensor], Tensor]:
    """The same attention by scores of edges and loops alone, and the hidden features of all."""
    csr = graph.rowptr, graph.col, graph.perm
    row, source, ids = edges_and_loops(*csr, num_loops)
    x, x_dst, att = (given[name].double() for name in ('x', 'x_dst', 'att'))
    hidden = torch.nn.functional.leaky_relu(x[source] + x_dst[row], slope)
    logit = (hidden * att).sum(-1)
    logits = logit.new_zeros(graph.num_edges + num_loops, x.size(1)).index_copy(0, ids, logit)
    zeros = [logit.new_zeros(n, x.size(1)) for n in (graph.num_src, graph.num_dst)]
    return [*zeros, *logits.split([graph.num_edges, num_loops])], hidden


def check_raw(
    edges: Edges, heads: int, channels: int, dtype: torch.dtype, index: torch.dtype,
    device: torch.device, *, order: str, dropout: float, slope: float, extra: bool, out_acc: bool,
) -> None:  # fmt: skip
    graph = ordered(edges, order, index, device)
    given = arguments(graph, heads, channels, dtype, extra, out_acc)
    x, x_dst, att, bias, seed = given.values()
    terms, acc = terms_of(graph, channels), acc_of(dtype)
    loops = min(edges.num_src, edges.num_dst) if extra else 0
    options, absolute = (loops, slope, dropout), (loops, 1.0, dropout)
    scores, hidden = as_gat(graph, given, loops, slope)
    largest = (hidden.abs() * att.double().abs()).sum(-1).flatten()
    # Roundings of logits, which the exponential turns into relative errors.
    scale = 10 + 2 * float(largest.max() if largest.numel() else 0)

    expected = reference.gatv2(*graph[:3], *given.values(), *options, True, out_acc)
    sums = reference.gat(
        *graph[:3], x.abs(), *scores, None if bias is None else bias.abs(), seed, *absolute, True,
        out_acc,
    )  # fmt: skip
    (out, *rest) = ops.gatv2(*graph[:3], *given.values(), *options, False, out_acc)
    assert [t.shape for t in rest] == [(0, *t.shape[1:]) for t in expected[1:]]
    assert_near(out, expected[0], scale * sums[0], terms)
    actual = ops.gatv2(*graph[:3], *given.values(), *options, True, out_acc)
    assert actual[0].dtype == out.dtype == (acc if out_acc else dtype)
    assert actual[1].dtype == actual[2].dtype == acc
    assert actual[2].shape == expected[2].shape
    assert_near(actual[0], expected[0], scale * sums[0], terms)
    assert_near(actual[1], expected[1], scale * sums[1], terms)
    log_sum = log_sums(expected[2])
    assert_near(log_sums(actual[2]), log_sum, scale * (1 + log_sum.abs()), terms)

    kept = [t.to(acc) for t in expected[1:]]
    grad = exact(*out.shape, dtype=out.dtype, device=device)
    args = *graph[:6], x, x_dst, att, seed, *kept, grad, *options
    actual, expected = ops.gatv2_backward(*args), reference.gatv2_backward(*args)
    # With <|grad|, |y|> of the other sign, differences become sums.
    message, by_src, _, by_edge, by_loop = reference.gat_backward(
        *graph[3:6], x.abs(), *scores, seed, -sums[1], *sums[2:], grad.abs(), *absolute
    )
    by_id = torch.cat([by_edge, by_loop])
    row, _, ids = edges_and_loops(graph.rowptr, graph.col, graph.perm, loops)
    by_dst = by_id.new_zeros(graph.num_dst, heads).index_add(0, row, by_id[ids])
    steepest = att.double().abs() * max(1, abs(slope))
    magnitude = (
        message + steepest * by_src.unsqueeze(-1),
        steepest * by_dst.unsqueeze(-1),
        (by_id[ids].unsqueeze(-1) * hidden.abs()).sum(0),
    )
    for a, e, m, name in zip(actual, expected, magnitude, ('x', 'x_dst', 'att'), strict=True):
        assert a.dtype == (acc if name == 'att' else dtype)
        assert_near(a, e, scale * m, terms if name != 'att' else max(terms, ids.numel()))


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
def test_widths(device: torch.device, dtype: torch.dtype, index: torch.dtype) -> None:
    for k, (heads, channels) in enumerate(SHAPES):
        for variant in list(raw_variants())[k % 3 :: 3]:
            check_raw(GRAPHS['hub'], heads, channels, dtype, index, device, **variant)


@pytest.mark.parametrize('name', GRAPHS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_graphs(device: torch.device, name: str, dtype: torch.dtype) -> None:
    for k, variant in enumerate(raw_variants(), DTYPES.index(dtype)):
        heads, channels = ((1, 5), (8, 8))[k % 2]
        check_raw(GRAPHS[name], heads, channels, dtype, torch.int32, device, **variant)


@given(
    edge_lists(), st.integers(1, 9), st.integers(1, 40), st.sampled_from(DTYPES),
    st.sampled_from(list(raw_variants())),
)  # fmt: skip
def test_any_graph(
    device: torch.device, edges: Edges, heads: int, channels: int, dtype: torch.dtype,
    variant: dict[str, Any],
) -> None:  # fmt: skip
    check_raw(edges, heads, channels, dtype, torch.int32, device, **variant)


@pytest.mark.parametrize('name', ['hub', 'out_hubs', 'no_edges'])
@pytest.mark.parametrize('extra', [False, True])
def test_backward_reference_is_that_of_autograd(name: str, extra: bool) -> None:
    edges = GRAPHS[name]
    graph, loops = edges.graph(), min(edges.num_src, edges.num_dst) if extra else 0
    for dropout, slope in ((0.0, 0.2), (0.4, -0.5)):
        given = arguments(graph, 3, 4, torch.float64, extra, False)
        inputs = [given[k].requires_grad_() for k in ('x', 'x_dst', 'att')]
        options = loops, slope, dropout
        out, *kept = reference.gatv2(*graph[:3], *given.values(), *options, True, False)
        grad = torch.randn_like(out)
        *got, grad_att = reference.gatv2_backward(
            *graph[:6], *inputs, given['seed'], *kept, grad, *options
        )
        expected = torch.autograd.grad(out, inputs, grad)
        torch.testing.assert_close([*got, grad_att[None]], list(expected))


@pytest.mark.parametrize('extra', [False, True])
def test_opcheck(device: torch.device, extra: bool) -> None:
    graph, options = GRAPHS['square'].graph(device=device), (30 * extra, 0.2, 0.5)
    given = arguments(graph, 3, 5, torch.float32, extra, False)
    for training in (False, True):
        args = *graph[:3], *given.values(), *options, training, False
        torch.library.opcheck(torch.ops.pyg_fast.gatv2.default, args)
    out, *kept = ops.gatv2(*args)
    del given['bias']
    args = *graph[:6], *given.values(), *kept, out, *options
    torch.library.opcheck(torch.ops.pyg_fast.gatv2_backward.default, args)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('out_acc', [False, True])
def test_fake_kernels(device: torch.device, dtype: torch.dtype, out_acc: bool) -> None:
    graph, options = GRAPHS['wide'].graph(device=device), (9, 0.2, 0.5)
    given = arguments(graph, 3, 5, dtype, True, out_acc)

    def results(graph: Any, given: dict[str, Tensor]) -> list[Tensor]:
        args = *graph[:3], *given.values(), *options
        inference, (out, *kept) = ops.gatv2(*args, False, out_acc), ops.gatv2(*args, True, out_acc)
        tensors = [v for k, v in given.items() if k != 'bias']
        backward = ops.gatv2_backward(*graph[:6], *tensors, *kept, out, *options)
        return [*inference, out, *kept, *backward]

    with FakeTensorMode() as mode:
        fakes = results(
            [mode.from_tensor(t) for t in graph[:6]],
            {k: mode.from_tensor(v) for k, v in given.items()},
        )
    for a, f in zip(results(graph, given), fakes, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (f.shape, f.dtype, f.device, f.stride())


# --- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize('magnitude', [1e4, 1e30])
def test_large_logits(device: torch.device, magnitude: float) -> None:
    # Distinct within each row, by so much that one edge takes all.
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 3, 2], [0, 0, 0, 0, 1, 1, 2]])
    edges = Edges(edge_index, 4, 4)
    ramp = torch.tensor([-2.0, -1, 1, 2], device=device).view(4, 1, 1).expand(4, 2, 3)
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        att = torch.full((2, 3), signs[0] * magnitude, device=device)
        inputs = [(ramp * signs[1]).contiguous(), ramp.contiguous(), att]
        check('gatv2', edges, [t.requires_grad_() for t in inputs])
        out = gatv2(edges.graph(device=device), *inputs)
        assert torch.equal(out[2], inputs[0][2])  # the only edge


@pytest.mark.parametrize('magnitude', [1e4, 1e6, 1e30])
def test_large_logits_that_are_equal(device: torch.device, magnitude: float) -> None:
    edges = Edges(torch.tensor([[0, 1, 2, 2, 0], [0, 0, 0, 1, 1]]), 3, 2)
    x = torch.randn(3, 2, 5, device=device)
    x[..., 0] = 1
    x_dst = torch.zeros(2, 2, 5, device=device)
    for sign in (1, -1):
        att = torch.zeros(2, 5, device=device)
        att[:, 0] = sign * magnitude
        out = gatv2(edges.graph(device=device), x, x_dst, att)
        torch.testing.assert_close(out[0], x.mean(0))
        torch.testing.assert_close(out[1], x[[0, 2]].mean(0))


def test_float16_near_its_maximum(device: torch.device) -> None:
    edges = GRAPHS['square']
    graph = edges.graph(device=device)
    inputs = inputs_of('gatv2', edges, 3, 8, torch.float16, device)
    with torch.no_grad():
        for t in inputs[:2]:
            t.copy_(t.sign() * 60000)  # sums beyond float16
    out = gatv2(graph, *inputs)
    expected = reference.gatv2(
        *graph[:3], *inputs, None, None, 0, 0.2, 0.0, False, False
    )[0]  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=60)
    assert expected.abs().max() > 50000
    grads = torch.autograd.grad(out.float().mul(1e-6).mean(), inputs)
    assert all(g.isfinite().all() for g in grads)


def test_nan_stays_where_it_belongs(device: torch.device) -> None:
    edges = Edges(torch.tensor([[0, 1, 2, 3, 3], [0, 0, 1, 2, 3]]), 4, 4)
    for k in range(2):
        inputs = [t.detach() for t in inputs_of('gatv2', edges, 2, 5, torch.float32, device)]
        node = 2 if k == 0 else 1  # a source that only node 1 has, or node 1 itself
        inputs[k][node, 1, 3] = float('nan')
        out = gatv2(edges.graph(device=device), *inputs)
        assert out[1, 1].isnan().all()
        out[1, 1] = 0
        assert out.isfinite().all()


# --- bad input -----------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple]:
    graph = torch.tensor([[0, 1, 2], [2, 1, 0]])
    x, att = torch.randn(3, 2, 4), torch.randn(2, 4)
    good = {'graph': graph, 'x_src': x, 'x_dst': x, 'att': att}
    sizes = "'(x_src|x_dst|att)'"
    calls: dict[str, tuple] = {
        'graph list': (TypeError, "'graph'", {'graph': [[0], [0]]}),
        'graph None': (TypeError, "'graph'", {'graph': None}),
        'graph float': (TypeError, "'edge_index'", {'graph': graph.float()}),
        'graph sparse': (TypeError, "'edge_index'", {'graph': torch.eye(3).to_sparse()}),
        'graph vector': (ValueError, "'edge_index'", {'graph': graph[0]}),
        'source too large': (IndexError, r"'edge_index\[0\]'", {'graph': graph * 2}),
        'destination too large': (IndexError, r"'edge_index\[1\]'", {'x_dst': x[:2]}),
        'negative': (IndexError, r"'edge_index\[0\]'", {'graph': graph - 1}),
        'Graph': (ValueError, "'graph'.*9 source", {'graph': GRAPHS['tall'].graph()}),
        'Graph and loops': (
            ValueError, "'add_self_loops'", {'graph': graph_of(graph, 3, 3), 'add_self_loops': True}
        ),
        'att int': (TypeError, "'att'", {'att': att.long()}),
        'att double': (TypeError, "'att'", {'att': att.double()}),
        'att list': (TypeError, "'att'", {'att': [1.0]}),
        'att vector': (ValueError, "'att'", {'att': att[0]}),
        'att of other heads': (ValueError, "'att'", {'att': att[:1]}),
        'att of other channels': (ValueError, "'att'", {'att': att[:, 1:]}),
        'x_src too short': (IndexError, r"'edge_index\[0\]'", {'x_src': x[:2]}),
        'dropout negative': (ValueError, "'dropout'", {'dropout': -0.1}),
        'dropout above 1': (ValueError, "'dropout'", {'dropout': 1.1}),
        'dropout nan': (ValueError, "'dropout'", {'dropout': float('nan')}),
        'dropout text': (TypeError, "'dropout'", {'dropout': '0.5'}),
        'dropout None': (TypeError, "'dropout'", {'dropout': None}),
        'slope text': (TypeError, "'negative_slope'", {'negative_slope': 'steep'}),
        'seed int': (TypeError, "'seed'", {'seed': 5, 'dropout': 0.5}),
        'seed float': (TypeError, "'seed'", {'seed': torch.ones(1), 'dropout': 0.5}),
        'seed scalar': (ValueError, "'seed'", {'seed': torch.tensor(5), 'dropout': 0.5}),
        'seeds': (ValueError, "'seed'", {'seed': torch.tensor([5, 6]), 'dropout': 0.5}),
    }  # fmt: skip
    for name in ('x_src', 'x_dst'):
        calls |= {
            f'{name} list': (TypeError, f"'{name}'", {name: [1.0]}),
            f'{name} int': (TypeError, f"'{name}'", {name: x.long()}),
            f'{name} complex': (TypeError, f"'{name}'", {name: x.to(torch.complex64)}),
            f'{name} double': (TypeError, sizes, {name: x.double()}),
            f'{name} half': (TypeError, sizes, {name: x.half()}),
            f'{name} matrix': (ValueError, f"'{name}'", {name: x[0]}),
            f'{name} of four dimensions': (ValueError, f"'{name}'", {name: x[None]}),
            f'{name} of other heads': (ValueError, sizes, {name: x[:, :1]}),
            f'{name} of other channels': (ValueError, sizes, {name: x[:, :, :1]}),
        }
    return {k: (error, match, {**good, **changes}) for k, (error, match, changes) in calls.items()}


@pytest.mark.parametrize('name', bad_calls())
def test_bad_input(device: torch.device, name: str, raises: Any) -> None:
    error, match, given = bad_calls()[name]
    for k, v in given.items():
        if isinstance(v, Graph):
            given[k] = Graph(*(t.to(device) if isinstance(t, Tensor) else t for t in v))
        elif isinstance(v, Tensor):
            given[k] = v.to(device)
    with raises(error, match=match):
        gatv2(**given)


@pytest.mark.parametrize('name', ['graph', 'x_dst', 'att', 'seed'])
def test_mixed_devices(name: str) -> None:
    x = torch.randn(3, 2, 4)
    good = {
        'graph': torch.tensor([[0, 1, 2], [2, 1, 0]]), 'x_src': x, 'x_dst': x,
        'att': torch.randn(2, 4), 'seed': seed_of(1), 'dropout': 0.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"'{name}' is on meta"):
        gatv2(**{**good, name: good[name].to('meta')})


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    graph, options = GRAPHS['square'].graph(device=device), (30, 0.2, 0.5)
    given = arguments(graph, 3, 5, torch.float32, True, False)
    grad, *kept = ops.gatv2(*graph[:3], *given.values(), *options, True, False)
    backward = {k: v for k, v in given.items() if k != 'bias'}
    backward |= zip(('y', 'softmax', 'grad'), [*kept, grad], strict=True)
    for run, csr, good, tail in (
        (ops.gatv2, graph[:3], given, (True, False)),
        (ops.gatv2_backward, graph[:6], backward, ()),
    ):
        run(*csr, *good.values(), *options, *tail)
        for name, tensor in good.items():
            for kind, t in spoiled(name, tensor).items():
                if tail and (name, kind) == ('x', 'longer'):
                    continue  # more sources
                bad = {**good, name: t}.values()
                assert refused(run, *csr, *bad, *options, *tail), f'{name}, {kind}'
        for wrong in ((31, 0.2, 0.5), (-1, 0.2, 0.5), (30, 0.2, -0.1), (30, 0.2, 1.1)):
            with pytest.raises(RuntimeError):
                run(*csr, *good.values(), *wrong, *tail)
        with pytest.raises(RuntimeError, match='seed'):
            run(*csr, *{**good, 'seed': None}.values(), *options, *tail)
    other = GRAPHS['wide'].graph(device=device)
    with pytest.raises(RuntimeError, match='another graph'):
        ops.gatv2_backward(*graph[:3], *other[3:6], *backward.values(), *options)
