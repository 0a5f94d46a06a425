"""GAT's attention: raw ops against their references, extreme scores, edge scores, bad input.

What it shares with GATv2's is tested in test_attention.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _raw_ops import AttentionArgs, ops, reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pyg_fast.graph import Graph, graph_of
from pyg_fast.ops import gat
from pyg_fast.ops.attention_scores import attention_scores
from pyg_fast.ops.gat import GAT, attend

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


def arguments(
    graph: Graph, heads: int, channels: int, dtype: torch.dtype, loops: int, extra: bool,
    out_acc: bool,
) -> dict[str, Tensor | None]:  # fmt: skip
    """What ops.gat takes after the graph, as far as it is tensors."""
    device, acc = graph.col.device, acc_of(dtype)

    def score(rows: int) -> Tensor:
        return exact(rows, heads, dtype=acc, device=device)

    return {
        'x': exact(graph.num_src, heads, channels, dtype=dtype, device=device),
        'alpha_src': score(graph.num_src),
        'alpha_dst': score(graph.num_dst),
        'alpha_edge': score(graph.num_edges) if extra else None,
        'alpha_loop': score(loops) if extra else None,
        'bias': exact(heads * channels, dtype=acc if out_acc else dtype, device=device)
        if extra else None,
        'seed': seed_of(2**40 + 7, device),
    }  # fmt: skip


def check_raw(
    edges: Edges, heads: int, channels: int, dtype: torch.dtype, index: torch.dtype,
    device: torch.device, *, order: str, dropout: float, slope: float, extra: bool, out_acc: bool,
) -> None:  # fmt: skip
    graph = ordered(edges, order, index, device)
    loops = min(edges.num_src, edges.num_dst) if extra else 0
    given = arguments(graph, heads, channels, dtype, loops, extra, out_acc)
    terms, acc = terms_of(graph, channels), acc_of(dtype)
    options = loops, slope, dropout
    expected = reference.gat(*graph[:3], *given.values(), *options, True, out_acc)
    absolute = {**given, 'x': given['x'].abs()}
    absolute['bias'] = None if given['bias'] is None else given['bias'].abs()
    magnitude = reference.gat(*graph[:3], *absolute.values(), *options, True, out_acc)
    # Of logits, which the exponential turns into relative errors.
    sums = log_sums(expected[3])
    scale = 10 + 2 * float(sums.abs().max() if sums.numel() else 0)

    (out, *rest) = ops.gat(*graph[:3], *given.values(), *options, False, out_acc)
    assert [t.shape for t in rest] == [(0, *t.shape[1:]) for t in expected[1:]]
    assert_near(out, expected[0], scale * magnitude[0], terms)
    actual = ops.gat(*graph[:3], *given.values(), *options, True, out_acc)
    assert actual[0].dtype == out.dtype == (acc if out_acc else dtype)
    assert {t.dtype for t in actual[1:]} == {acc}
    assert actual[3].shape == expected[3].shape
    for k, (a, e, m) in enumerate(zip(actual, expected, magnitude, strict=True)):
        if k == 3:
            assert_near(log_sums(a), sums, scale * log_sums(m).abs() + sums.abs(), terms)
        else:
            assert_near(a, e, scale * m.abs(), terms)

    given.pop('bias')
    kept = [t.to(acc) for t in expected[1:]]
    grad = exact(*out.shape, dtype=out.dtype, device=device)
    seed = given.pop('seed')
    scores = list(given.values())[1:]
    actual = ops.gat_backward(*graph[3:6], *given.values(), seed, *kept, grad, *options)
    expected = reference.gat_backward(*graph[3:6], *given.values(), seed, *kept, grad, *options)
    # With <|grad|, |y|> of the other sign, differences become sums.
    sums = [-magnitude[1], magnitude[2], kept[2], kept[3]]
    magnitude = reference.gat_backward(
        *graph[3:6], given['x'].abs(), *scores, seed, *sums, grad.abs(), *options
    )
    sizes = [graph.num_src, graph.num_src, graph.num_dst, graph.num_edges, loops]
    for k, (a, e, m) in enumerate(zip(actual, expected, magnitude, strict=True)):
        assert a.dtype == (acc if k else dtype)
        assert a.size(0) == (sizes[k] if k < 3 or extra else 0)
        assert_near(a, e, scale * m.abs(), terms)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
def test_widths(device: torch.device, dtype: torch.dtype, index: torch.dtype) -> None:
    for k, (heads, channels) in enumerate(SHAPES):
        for variant in list(raw_variants())[k % 2 :: 2]:
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
        given = arguments(graph, 3, 4, torch.float64, loops, extra, False)
        scores = {k: v for k, v in given.items() if k not in ('bias', 'seed')}
        inputs = [t.requires_grad_() for t in scores.values() if t is not None]
        options = loops, slope, dropout
        out, *kept = reference.gat(*graph[:3], *given.values(), *options, True, False)
        grad = torch.randn_like(out)
        got = reference.gat_backward(
            *graph[3:6], *scores.values(), given['seed'], *kept, grad, *options
        )
        torch.testing.assert_close(
            [g for g, t in zip(got, scores.values(), strict=True) if t is not None],
            list(torch.autograd.grad(out, inputs, grad)),
        )


# One head of one channel; heads of one tile that several threads read; one of several tiles.
SCORED = [(1, 1), (8, 8), (4, 16), (2, 64), (3, 5), (8, 7), (4, 13), (2, 47), (1, 300)]


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', [torch.int32, torch.int64])
@pytest.mark.parametrize('name', ['square', 'wide', 'out_hubs'])
def test_gradients_of_edge_and_loop_scores(
    device: torch.device, name: str, index: torch.dtype, dtype: torch.dtype
) -> None:
    edges = GRAPHS[name]
    graph, loops = ordered(edges, 'random', index, device), min(edges.num_src, edges.num_dst)
    for heads, channels in SCORED:
        given = arguments(graph, heads, channels, dtype, loops, True, False)
        *inputs, _, seed = given.values()
        options = loops, 0.2, 0.3
        _, *kept = ops.gat(*graph[:3], *given.values(), *options, True, False)
        grad = exact(graph.num_dst, heads, channels, dtype=dtype, device=device)

        before, after = (*graph[3:6], *inputs[:3]), (seed, *kept, grad, *options)

        def run(
            of: Any, *scores: Tensor | None, before: Any = before, after: Any = after
        ) -> tuple[Tensor, ...]:
            return of.gat_backward(*before, *scores, *after)

        both = run(ops, *inputs[3:])
        for a, e in zip(both, run(reference, *inputs[3:]), strict=True):
            eps = max(torch.finfo(a.dtype).eps, 8 * torch.finfo(acc_of(dtype)).eps)
            largest = float(e.abs().max())
            torch.testing.assert_close(a.double(), e, rtol=0, atol=20 * eps * (1 + largest))
        assert all(torch.equal(*pair) for pair in zip(both, run(ops, *inputs[3:]), strict=True))
        # A score of zero for all edges, or all loops, is none.
        for k in (3, 4):
            zeros = [torch.zeros_like(t) if n == k else t for n, t in enumerate(inputs)][3:]
            missing = [None if n == k else t for n, t in enumerate(inputs)][3:]
            for n, (a, e) in enumerate(zip(run(ops, *missing), run(ops, *zeros), strict=True)):
                assert a.shape == ((0, heads) if n == k else e.shape)
                if n != k:
                    torch.testing.assert_close(a, e)


def test_scores_of_edges_that_the_graph_omits(device: torch.device) -> None:
    edge_index = GRAPHS['square'].edge_index.to(device)
    graph = graph_of(edge_index, 30, 30, drop_loops=True)
    given = arguments(graph, 8, 8, torch.float32, 30, True, False)
    grad, *kept = ops.gat(*graph[:3], *given.values(), 30, 0.2, 0.0, True, False)
    *inputs, _, seed = given.values()
    of_edges = ops.gat_backward(*graph[3:6], *inputs, seed, *kept, grad, 30, 0.2, 0.0)[3]
    loops = edge_index[0] == edge_index[1]
    assert loops.any()
    assert not of_edges[loops].any()
    assert of_edges[~loops].any()


@pytest.mark.parametrize('extra', [False, True])
def test_opcheck(device: torch.device, extra: bool) -> None:
    graph, loops = GRAPHS['square'].graph(device=device), 30 * extra
    options = loops, 0.2, 0.5
    given = arguments(graph, 3, 5, torch.float32, loops, extra, False)
    for training in (False, True):
        args = *graph[:3], *given.values(), *options, training, False
        torch.library.opcheck(torch.ops.pyg_fast.gat.default, args)
    kept = ops.gat(*args)
    seed = given.pop('seed')
    del given['bias']
    args = *graph[3:6], *given.values(), seed, *kept[1:], kept[0], *options
    torch.library.opcheck(torch.ops.pyg_fast.gat_backward.default, args)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('extra', [False, True])
@pytest.mark.parametrize('out_acc', [False, True])
def test_fake_kernels(device: torch.device, dtype: torch.dtype, extra: bool, out_acc: bool) -> None:
    graph, loops = GRAPHS['wide'].graph(device=device), 9 * extra
    given = arguments(graph, 3, 5, dtype, loops, extra, out_acc)
    options = loops, 0.2, 0.5

    def results(graph: Any, given: dict[str, Tensor | None]) -> list[Tensor]:
        bias_and_seed = given['bias'], given['seed']
        tensors = [v for k, v in given.items() if k not in ('bias', 'seed')]
        args = *graph[:3], *tensors, *bias_and_seed, *options
        inference, kept = ops.gat(*args, False, out_acc), ops.gat(*args, True, out_acc)
        backward = ops.gat_backward(
            *graph[3:6], *tensors, given['seed'], *kept[1:], kept[0], *options
        )
        return [*inference, *kept, *backward]

    with FakeTensorMode() as mode:
        fakes = results(
            [mode.from_tensor(t) for t in graph[:6]],
            {k: None if v is None else mode.from_tensor(v) for k, v in given.items()},
        )
    for a, f in zip(results(graph, given), fakes, strict=True):
        assert (a.shape, a.dtype, a.device, a.stride()) == (f.shape, f.dtype, f.device, f.stride())


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('edge', [False, True])
def test_scores_of_either_type(device: torch.device, dtype: torch.dtype, edge: bool) -> None:
    edges = GRAPHS['square']
    for options in ({}, {'add_self_loops': True, 'dropout': 0.5, 'seed': seed_of(3, device)}):
        x, *scores = inputs_of('gat', edges, 4, 6, dtype, device, edge)
        check('gat', edges, [x, *scores], **options)
        wide = [t.detach().to(acc_of(dtype)).requires_grad_() for t in scores]
        check('gat', edges, [x, *wide], **options)


@pytest.mark.parametrize('magnitude', [1e4, 1e30])
def test_large_scores(device: torch.device, magnitude: float) -> None:
    # Distinct within each row, by so much that one edge takes all.
    edge_index = torch.tensor([[0, 1, 2, 3, 0, 3, 2], [0, 0, 0, 0, 1, 1, 2]])
    edges = Edges(edge_index, 4, 4)
    x, alpha_src, alpha_dst = inputs_of('gat', edges, 2, 5, torch.float32, device)
    ramp = torch.tensor([-2.0, -1, 1, 2], device=device).view(4, 1) * magnitude
    for signs in ((1, 1), (1, -1), (-1, -1)):
        src, dst = (ramp * s for s in signs)
        inputs = [x, (src + 0 * alpha_src.detach()).requires_grad_(),
                  (dst + 0 * alpha_dst.detach()).requires_grad_()]  # fmt: skip
        check('gat', edges, inputs)
        assert torch.equal(gat(edges.graph(device=device), *inputs)[2], x[2])  # the only edge


@pytest.mark.parametrize('magnitude', [1e4, 1e6, 1e30])
def test_large_scores_that_are_equal(device: torch.device, magnitude: float) -> None:
    edges = Edges(torch.tensor([[0, 1, 2, 2, 0], [0, 0, 0, 1, 1]]), 3, 2)
    x = torch.randn(3, 2, 5, device=device)
    alpha = torch.full((3, 2), magnitude, device=device)
    for sign in (1, -1):
        out = gat(edges.graph(device=device), x, sign * alpha, sign * alpha[:2])
        torch.testing.assert_close(out[0], x.mean(0))
        torch.testing.assert_close(out[1], x[[0, 2]].mean(0))


def test_float16_near_its_maximum(device: torch.device) -> None:
    edges = GRAPHS['square']
    x, alpha_src, alpha_dst = inputs_of('gat', edges, 3, 8, torch.float16, device)
    with torch.no_grad():
        x.copy_(x.sign() * 60000)
        alpha_src.copy_(alpha_src.sign() * 60000 + 4096 * alpha_src)  # sums beyond float16
        alpha_dst.copy_(alpha_dst.sign() * 60000)
    out = gat(edges.graph(device=device), x, alpha_src, alpha_dst)
    expected = reference.gat(*edges.graph(device=device)[:3], x, alpha_src, alpha_dst, None, None,
                             None, None, 0, 0.2, 0.0, False, False)[0]  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=60)
    assert expected.abs().max() > 50000
    grads = torch.autograd.grad(out.float().mul(1e-4).mean(), (x, alpha_src, alpha_dst))
    assert all(g.isfinite().all() for g in grads)


def test_scores_of_minus_infinity_mask_edges(device: torch.device) -> None:
    edges = GRAPHS['square']
    inputs = inputs_of('gat', edges, 2, 5, torch.float32, device, edge=True)
    masked = torch.rand(200, 1, device=device).expand(200, 2) < 0.4
    first = torch.zeros(200, dtype=torch.bool)
    for i in range(30):  # each row keeps its last edge
        first[(edges.edge_index[1] == i).nonzero().view(-1)[:-1]] = True
    with torch.no_grad():
        inputs[3].masked_fill_(masked & first.to(device).view(-1, 1), -float('inf'))
    check('gat', edges, inputs)


def test_nan_stays_where_it_belongs(device: torch.device) -> None:
    edges = Edges(torch.tensor([[0, 1, 2, 3, 3], [0, 0, 1, 2, 3]]), 4, 4)
    graph = edges.graph(device=device)
    for k in range(3):
        inputs = [t.detach() for t in inputs_of('gat', edges, 2, 5, torch.float32, device)]
        node = 2 if k < 2 else 1  # a source that only node 1 has, or node 1 itself
        inputs[k][node, 1] = float('nan')
        out = gat(graph, *inputs)
        assert out[1, 1].isnan().all()
        out[1, 1] = 0
        assert out.isfinite().all()


# --- bad input -----------------------------------------------------------------------------------


def bad_calls() -> dict[str, tuple]:
    graph = torch.tensor([[0, 1, 2], [2, 1, 0]])
    x, a = torch.randn(3, 2, 4), torch.randn(3, 2)
    good = {'graph': graph, 'x': x, 'alpha_src': a, 'alpha_dst': a, 'alpha_edge': a}
    calls: dict[str, tuple] = {
        'x list': (TypeError, "'x'", {'x': [[1.0]]}),
        'x int': (TypeError, "'x'", {'x': x.long()}),
        'x complex': (TypeError, "'x'", {'x': x.to(torch.complex64)}),
        'x matrix': (ValueError, "'x'", {'x': x[0]}),
        'x of four dimensions': (ValueError, "'x'", {'x': x[None]}),
        'x too long': (ValueError, "'(x|alpha_src)'", {'x': torch.cat([x, x])}),
        'x of other heads': (ValueError, "'(x|alpha_src)'", {'x': x[:, :1]}),
        'graph list': (TypeError, "'graph'", {'graph': [[0], [0]]}),
        'graph None': (TypeError, "'graph'", {'graph': None}),
        'graph float': (TypeError, "'edge_index'", {'graph': graph.float()}),
        'graph sparse': (TypeError, "'edge_index'", {'graph': torch.eye(3).to_sparse()}),
        'graph vector': (ValueError, "'edge_index'", {'graph': graph[0]}),
        'source too large': (IndexError, r"'edge_index\[0\]'", {'graph': graph * 2}),
        'destination too large': (
            IndexError, r"'edge_index\[1\]'", {'graph': graph * torch.tensor([[1], [2]])}
        ),
        'negative': (IndexError, r"'edge_index\[0\]'", {'graph': graph - 1}),
        'Graph': (ValueError, "'graph'.*9 source", {'graph': GRAPHS['tall'].graph()}),
        'Graph and loops': (
            ValueError, "'add_self_loops'", {'graph': graph_of(graph, 3, 3), 'add_self_loops': True}
        ),
        'dropout negative': (ValueError, "'dropout'", {'dropout': -0.1}),
        'dropout above 1': (ValueError, "'dropout'", {'dropout': 1.1}),
        'dropout nan': (ValueError, "'dropout'", {'dropout': float('nan')}),
        'dropout text': (TypeError, "'dropout'", {'dropout': '0.5'}),
        'dropout None': (TypeError, "'dropout'", {'dropout': None}),
        'slope text': (TypeError, "'negative_slope'", {'negative_slope': 'steep'}),
        'seed int': (TypeError, "'seed'", {'seed': 5, 'dropout': 0.5}),
        'seed int32': (TypeError, "'seed'", {'seed': seed_of(5).int(), 'dropout': 0.5}),
        'seed scalar': (ValueError, "'seed'", {'seed': torch.tensor(5), 'dropout': 0.5}),
        'seeds': (ValueError, "'seed'", {'seed': torch.tensor([5, 6]), 'dropout': 0.5}),
    }  # fmt: skip
    for name in ('alpha_src', 'alpha_dst', 'alpha_edge'):
        calls |= {
            f'{name} list': (TypeError, f"'{name}'", {name: [1.0]}),
            f'{name} int': (TypeError, f"'{name}'", {name: a.long()}),
            f'{name} double': (TypeError, f"'{name}'", {name: a.double()}),
            f'{name} half': (TypeError, f"'{name}'", {name: a.half()}),
            f'{name} vector': (ValueError, f"'{name}'", {name: a[:, 0]}),
            f'{name} cube': (ValueError, f"'{name}'", {name: a[None]}),
            f'{name} of other heads': (ValueError, f"'{name}'", {name: torch.randn(3, 3)}),
        }
        if name != 'alpha_dst':  # which says how many destinations there are
            calls[f'{name} short'] = (ValueError, f"'{name}'", {name: a[:2]})
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
        gat(**given)


@pytest.mark.parametrize('name', ['graph', 'alpha_src', 'alpha_dst', 'alpha_edge', 'seed'])
def test_mixed_devices(name: str) -> None:
    a = torch.randn(3, 2)
    good = {
        'graph': torch.tensor([[0, 1, 2], [2, 1, 0]]), 'x': torch.randn(3, 2, 4), 'alpha_src': a,
        'alpha_dst': a, 'alpha_edge': a, 'seed': seed_of(1), 'dropout': 0.5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=f"'{name}' is on meta"):
        gat(**{**good, name: good[name].to('meta')})


def spoiled(name: str, t: Tensor) -> dict[str, Tensor]:
    out = {'complex': t.to(torch.complex64), 'bool': t.bool(), 'longer': torch.cat([t, t[-1:]])}
    if name not in ('bias', 'att'):  # of which only the number of elements matters
        out['more dimensions'] = t[None]
    return out if name == 'seed' else {**out, 'shorter': t[:-1]}


def refused(run: Callable, *args: object) -> bool:
    try:
        run(*args)
    except RuntimeError:
        return True
    return False


def test_raw_ops_refuse_what_does_not_fit(device: torch.device) -> None:
    graph, options = GRAPHS['square'].graph(device=device), (30, 0.2, 0.5)
    given = arguments(graph, 3, 5, torch.float32, 30, True, False)
    grad, *kept = ops.gat(*graph[:3], *given.values(), *options, True, False)
    backward = {k: v for k, v in given.items() if k != 'bias'}
    backward |= zip(('y', 'y_plus', 'softmax', 'mass_plus', 'grad'), [*kept, grad], strict=True)
    for run, csr, good, tail in (
        (ops.gat, graph[:3], given, (True, False)),
        (ops.gat_backward, graph[3:6], backward, ()),
    ):  # fmt: skip
        run(*csr, *good.values(), *options, *tail)
        for name, tensor in good.items():
            for kind, t in spoiled(name, tensor).items():
                bad = {**good, name: t}.values()
                assert refused(run, *csr, *bad, *options, *tail), f'{name}, {kind}'
        for wrong in ((31, 0.2, 0.5), (-1, 0.2, 0.5), (30, 0.2, -0.1), (30, 0.2, 1.1)):
            with pytest.raises(RuntimeError):
                run(*csr, *good.values(), *wrong, *tail)
        with pytest.raises(RuntimeError, match='seed'):
            run(*csr, *{**good, 'seed': None}.values(), *options, *tail)


@pytest.mark.parametrize('extra', [False, True])
def test_attention_with_its_scores(device: torch.device, extra: bool) -> None:
    graph = GRAPHS['square'].graph(device=device)
    args = AttentionArgs(graph, 30 if extra else 0, 0.2, 0.0, None, False)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.double, device=device, requires_grad=True)

    x, att = numbers(30, 3, 4), [numbers(1, 3, 4) for _ in range(2)]
    others = [numbers(graph.num_edges, 3), numbers(30, 3), numbers(12)] if extra else [None] * 3
    leaves = [x, *att, *(t for t in others if t is not None)]

    def grads(out: Tensor, create_graph: bool = False) -> list[Tensor]:
        return torch.autograd.grad(out.sin().sum(), leaves, create_graph=create_graph)

    out = GAT.apply(x, *att, *others, (args, True))
    apart = attend(x, *attention_scores(x, *att), *others, args)
    assert torch.equal(out, apart)
    expected = grads(apart, True)
    for create_graph in (False, True):
        actual = grads(GAT.apply(x, *att, *others, (args, True)), create_graph)
        torch.testing.assert_close(actual, expected, check_stride=False)
    second, wanted = (
        torch.autograd.grad(sum(g.sin().sum() for g in each), leaves, retain_graph=True)
        for each in (actual, expected)
    )
    torch.testing.assert_close(second, wanted, check_stride=False)
    for leaf in leaves:  # alone
        frozen = [t if t is leaf or t is None else t.detach() for t in (x, *att, *others)]
        (alone,) = torch.autograd.grad(GAT.apply(*frozen, (args, True)).sin().sum(), leaf)
        at = next(k for k, t in enumerate(leaves) if t is leaf)
        torch.testing.assert_close(alone, expected[at], check_stride=False)
