"""What both kinds of attention share: gradients, self-loops, extreme logits, dropout, compilation,
memory."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from _captures import captured
from _raw_ops import keeps
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from pyg_fast.graph import Graph, graph_of, prepare_edge_index
from pyg_fast.ops import gat

from ._attention import OPS, check, gradients, inputs_of, reference_of, seed_of
from ._graphs import DTYPES, GRAPHS, Edges, edge_lists, exact

both = pytest.mark.parametrize('op', OPS)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def graphs(edges: Edges, device: torch.device) -> dict[str, Tensor | Graph]:
    """One graph in every form, with its edges in one order: that of their destinations."""
    edge_index, size = edges.edge_index, (edges.num_src, edges.num_dst)
    edge_index = edge_index[:, edge_index[1].argsort(stable=True)].to(device)
    return {
        'plain': edge_index,
        'int32': edge_index.int(),
        'prepared': prepare_edge_index(edge_index, size)[0],
        'Graph': graph_of(edge_index, *size),
    }


def of_order(edges: Edges) -> Edges:
    """The edges in the order that :func:`graphs` gives them."""
    order = edges.edge_index[1].argsort(stable=True)
    return edges._replace(edge_index=edges.edge_index[:, order])


@both
@pytest.mark.parametrize('name', GRAPHS)
@pytest.mark.parametrize('loops', [False, True])
def test_graphs(device: torch.device, op: str, name: str, loops: bool) -> None:
    edges = GRAPHS[name]
    options = dict(add_self_loops=loops, negative_slope=0.3, seed=seed_of(11, device))
    for dtype, shape, dropout in ((torch.float64, (3, 5), 0.4), (torch.float32, (8, 8), 0.0)):
        inputs = inputs_of(op, edges, *shape, dtype, device, edge=dropout > 0)
        check(op, edges, inputs, edges.edge_index.to(device), dropout=dropout, **options)
        for graph in graphs(edges, device).values():
            if not (loops and isinstance(graph, Graph)):
                check(op, of_order(edges), inputs, graph, dropout=dropout, **options)


@both
@given(edge_lists(), st.integers(1, 5), st.integers(1, 9), st.booleans(), st.sampled_from([0, 0.5]))
def test_any_graph(
    device: torch.device, op: str, edges: Edges, heads: int, channels: int, loops: bool,
    dropout: float,
) -> None:  # fmt: skip
    inputs = inputs_of(op, edges, heads, channels, device=device, edge=loops)
    options = dict(add_self_loops=loops, dropout=dropout, seed=seed_of(5, device))
    check(op, edges, inputs, edges.edge_index.to(device), **options)


@both
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('shape', [(1, 1), (3, 5), (2, 32), (1, 64)])
def test_layouts(device: torch.device, op: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    edges = GRAPHS['square']
    contiguous = [t.detach() for t in inputs_of(op, edges, *shape, dtype, device, edge=True)]
    for change in (
        lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),  # unaligned
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: t[:1].expand(t.shape),
    ):
        check(op, edges, [change(t).requires_grad_() for t in contiguous])
    inputs = [t.requires_grad_() for t in contiguous]
    out = OPS[op](edges.graph(device=device), *inputs)
    grad = exact(*shape, dtype=dtype, device=device).expand_as(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, inputs, grad, retain_graph=True),
        torch.autograd.grad(out, inputs, grad.contiguous()),
    )


def test_threads() -> None:
    edge_index = torch.randint(500, (2, 5000))
    edge_index[1, :2000] = 5
    edge_index[0, 1500:3500] = 7
    edges, before = Edges(edge_index, 500, 500), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            for op in OPS:
                for dtype in (torch.float64, torch.bfloat16):
                    check(op, edges, inputs_of(op, edges, 3, 5, dtype))
    finally:
        torch.set_num_threads(before)


# --- gradients -----------------------------------------------------------------------------------

SMALL = Edges(torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4, 4], [0, 0, 0, 2, 2, 2, 3, 3, 3]]), 5, 4)


@both
@pytest.mark.parametrize('dropout', [0.0, 0.5])
@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('name', ['small', 'no_edges'])
def test_gradcheck(device: torch.device, op: str, name: str, loops: bool, dropout: float) -> None:
    edges = SMALL if name == 'small' else GRAPHS['no_edges']
    graph = edges.edge_index.to(device)
    options = dict(dropout=dropout, add_self_loops=loops, seed=seed_of(8, device))
    inputs = [t.detach() for t in inputs_of(op, edges, 2, 3, device=device, edge=True)]
    # Far enough from where the leaky ReLU has no derivative.
    inputs = [(t + 0.01 * torch.rand_like(t) + 0.02).requires_grad_() for t in inputs]

    def run(*inputs: Tensor) -> Tensor:
        return OPS[op](graph, *inputs, **options)

    assert gradcheck(run, inputs, atol=1e-6, rtol=1e-4)
    assert gradgradcheck(run, inputs, atol=1e-6, rtol=1e-4, nondet_tol=1e-9, fast_mode=True)


@both
@pytest.mark.parametrize('dropout', [0.0, 0.4])
@pytest.mark.parametrize('loops', [False, True])
def test_second_derivatives(device: torch.device, op: str, loops: bool, dropout: float) -> None:
    edges = GRAPHS['square']
    options = dict(dropout=dropout, add_self_loops=loops, seed=seed_of(8, device))
    inputs = inputs_of(op, edges, 3, 4, device=device, edge=True)
    results = []
    for out in (
        OPS[op](edges.edge_index.to(device), *inputs, **options),
        reference_of(op, edges, inputs, **options),
    ):
        grads = torch.autograd.grad(out.pow(3).sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in grads), inputs))
    torch.testing.assert_close(*results)


@both
def test_gradients_of_some_inputs_alone(device: torch.device, op: str) -> None:
    edges = GRAPHS['square']
    inputs = inputs_of(op, edges, 3, 4, device=device, edge=True)
    for graph in graphs(edges, device).values():
        expected = gradients(OPS[op](graph, *inputs), inputs)[1:]
        for k, e in enumerate(expected):
            alone = [t if j == k else t.detach() for j, t in enumerate(inputs)]
            (got,) = gradients(OPS[op](graph, *alone), [alone[k]])[1:]
            torch.testing.assert_close(got, e)
    out = OPS[op](graph, *[t.detach() for t in inputs])
    assert not out.requires_grad


@both
@pytest.mark.parametrize('dtype', DTYPES)
def test_isolated_nodes(device: torch.device, op: str, dtype: torch.dtype) -> None:
    edges = Edges(torch.tensor([[1, 1, 3], [2, 2, 4]]), 6, 7)
    for dropout in (0.0, 0.5, 1.0):
        inputs = inputs_of(op, edges, 3, 5, dtype, device, edge=True)
        out = OPS[op](edges.graph(device=device), *inputs, dropout=dropout)
        assert (out[[0, 1, 3, 5, 6]] == 0).all()
        grads = gradients(out, inputs)[1:]
        assert all(g.isfinite().all() for g in grads)
        assert (grads[0][[0, 2, 4, 5]] == 0).all()
        assert (grads[1][[0, 5]] == 0).all()


@both
def test_duplicate_edges_count_twice(device: torch.device, op: str) -> None:
    edge_index = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 0]], device=device)
    x = torch.randn(3, 2, 4, device=device)
    zeros = [torch.zeros(n, 2, device=device) for n in (3, 1)]
    inputs = [x, *zeros] if op == 'gat' else [x, x[:1], torch.zeros(2, 4, device=device)]
    out = OPS[op](edge_index, *inputs)
    torch.testing.assert_close(out[0], (x[0] + 2 * x[1] + x[2]) / 4)


@both
def test_self_loops_replace_those_of_the_graph(device: torch.device, op: str) -> None:
    edge_index = GRAPHS['square'].edge_index
    without = edge_index[:, edge_index[0] != edge_index[1]]
    assert without.size(1) < edge_index.size(1)
    loops = torch.cat([without, torch.arange(30).expand(2, -1)], dim=1)
    inputs = inputs_of(op, GRAPHS['square'], 3, 5, device=device)
    results = [
        gradients(OPS[op](graph.to(device), *inputs, add_self_loops=added), inputs)
        for graph, added in ((edge_index, True), (without, True), (loops, False))
    ]
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])


# --- extreme logits ------------------------------------------------------------------------------

# A hub whose edges several warps share, and rows of few edges.
HUB = torch.randint(40, (2, 10_600), generator=torch.Generator().manual_seed(0))
HUB[1, :10_000] = 0


def inputs_near(
    op: str, magnitude: float, spread: int, channels: int, num_edges: int, device: torch.device
) -> list[Tensor]:
    """Inputs whose logits are exact in float32 and within `spread` of `magnitude`."""

    def steps(*size: int, reach: int = spread) -> Tensor:
        return torch.randint(-16 * reach, 16 * reach + 1, size) / 16

    x = steps(40, 2, channels, reach=1)
    if op == 'gat':
        inputs = [x, steps(40, 2), magnitude + steps(40, 2), steps(num_edges, 2)]
    else:  # The first channel adds (1 + 1) * magnitude / 2; the others reach `spread`.
        z, att = steps(40, 2, channels, reach=1), torch.zeros(2, channels)
        x[..., 0] = z[..., 0] = 1
        att[:, 1:3] = spread / 4
        att[:, 0] = magnitude / 2
        inputs = [x, z, att]
    return [t.to(device).requires_grad_() for t in inputs]


@both
@pytest.mark.parametrize(
    ('magnitude', 'spread'), [(1e4, 4), (-4e4, 4), (1e9, 0), (-1e9, 0), (1e30, 0), (-1e30, 0)]
)
def test_weights_do_not_depend_on_the_size_of_logits(
    device: torch.device, op: str, magnitude: float, spread: int
) -> None:
    for edge_index, channels in ((HUB, 8), (HUB[:, 10_000:], 300)):
        edges = Edges(edge_index, 40, 40)
        inputs = inputs_near(op, magnitude, spread, channels, edge_index.size(1), device)
        options = dict(negative_slope=0.25, dropout=0.25, seed=seed_of(3, device))
        graph = edge_index.to(device)
        leaves = [t.detach().double().requires_grad_() for t in inputs]
        actual = gradients(OPS[op](graph, *inputs, **options), inputs)
        expected = gradients(reference_of(op, edges, leaves, **options), leaves)
        # Features of GATv2 get the gradient of the logit times att, whose first entry is huge.
        att = leaves[2].detach().abs().clamp(min=1) if op == 'gatv2' else 1
        units = [1, att, att, 1] if op == 'gatv2' else [1] * len(actual)
        for a, e, unit in zip(actual, expected, units, strict=True):
            torch.testing.assert_close(a.double() / unit, e / unit, rtol=2e-5, atol=2e-5)


@both
@pytest.mark.parametrize('channels', [8, 300, 301])
def test_only_edges_have_weight_one(device: torch.device, op: str, channels: int) -> None:
    # Exactly one: the backward pass must round the logits as the forward pass did.
    order = torch.randperm(50, device=device)
    for loops in (False, True):
        graph = torch.stack([order, order])[:, : 0 if loops else 50]
        x = torch.randn(50, 2, channels, device=device)
        at = slice(channels // 9, channels, channels // 3)
        x[..., at] = 0
        if op == 'gat':
            inputs = [x, *(1e6 * torch.randn(n, 2, device=device) for n in (50, 50, graph.size(1)))]
        else:
            inputs = [x, torch.randn_like(x), 1e6 * torch.randn(2, channels, device=device)]
        inputs = [t.requires_grad_() for t in inputs]
        out = OPS[op](graph, *inputs, add_self_loops=loops)
        torch.testing.assert_close(out, x)
        grad_x, *_ = torch.autograd.grad(out[..., at].sum(), inputs)
        assert (grad_x[..., at] == 1).all()


@both
@pytest.mark.parametrize('value', [-float('inf'), float('inf')])
def test_rows_of_infinite_logits_are_nan(device: torch.device, op: str, value: float) -> None:
    # All logits of nodes 0 and 1 are infinite (of +inf: at least one); node 4 has no edge.
    edges = Edges(torch.tensor([[0, 1, 5, 2, 3, 4, 4, 5], [0, 0, 0, 1, 2, 2, 3, 3]]), 6, 5)
    inputs = [t.detach() for t in inputs_of(op, edges, 2, 4, torch.float32, device)]
    inputs[2 if op == 'gat' else 1][:2] = value
    if op == 'gat' and value > 0:
        inputs[2][0], inputs[1][1] = 0, value
    if op == 'gatv2':
        inputs[2] = inputs[2].abs() + 1
    inputs = [t.requires_grad_() for t in inputs]
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    actual = gradients(OPS[op](edges.edge_index.to(device), *inputs), inputs)
    expected = gradients(reference_of(op, edges, leaves), leaves)
    assert expected[0][:2].isnan().all()
    assert expected[0][2:].isfinite().all()
    assert (actual[0][4] == 0).all()
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-5, equal_nan=True)


# --- dropout -------------------------------------------------------------------------------------


def mask_of(op: str, graph: Any, edge_index: Tensor, loops: bool, **options: Any) -> Tensor:
    """Which heads of which edges of 48 nodes a forward pass kept: sources send unit vectors."""
    x = torch.eye(48, device=edge_index.device).view(48, 1, 48).expand(48, 4, 48)
    scores = [torch.randn(48, 4, device=x.device) for _ in range(2)]
    inputs = [x, *scores] if op == 'gat' else [x, x, torch.randn(4, 48, device=x.device)]
    out = OPS[op](graph, *inputs, add_self_loops=loops, **options)
    row, col = edge_index
    kept = out[col, :, row]
    if loops:
        kept = torch.cat([kept, out.diagonal(dim1=0, dim2=2).t()])
    return kept != 0


def distinct_edges(device: torch.device) -> Tensor:
    """A random half of all pairs of 48 nodes in random order, self-loops aside."""
    pairs = torch.ones(48, 48).fill_diagonal_(0).nonzero()
    return pairs[torch.randperm(len(pairs))[:1100]].t().contiguous().to(device)


@both
@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('dropout', [0.1, 0.6, 0.97])
@pytest.mark.parametrize('number', [0, 12345, -(2**62) - 3])
def test_mask(device: torch.device, op: str, number: int, dropout: float, loops: bool) -> None:
    edge_index, seed = distinct_edges(device), seed_of(number, device)
    expected = keeps(
        seed, torch.arange(1100 + 48 * loops, device=device), 4, dropout
    )  # fmt: skip
    # What counts is the position in the list that is given, whatever its order.
    prepared, _ = prepare_edge_index(edge_index, (48, 48))
    by_src = edge_index[:, edge_index[0].argsort()]
    forms = [(edge_index, edge_index), (prepared, prepared.as_tensor()), (by_src, by_src)]
    if not loops:
        forms.append((graph_of(edge_index, 48, 48), edge_index))
    for graph, data in forms:
        mask = mask_of(op, graph, data, loops, dropout=dropout, seed=seed)
        assert torch.equal(mask, expected)


def test_mask_is_random() -> None:
    ids, dropout = torch.arange(2**16), 0.6
    masks = {n: keeps(seed_of(n), ids, 8, dropout) for n in (0, 1, 2, 3, 2**32, 77, -1)}
    centred = {n: (mask.double() - (1 - dropout)) / 0.24**0.5 for n, mask in masks.items()}
    count = ids.numel()

    def uncorrelated(a: Tensor, b: Tensor) -> None:
        assert abs(float((a * b).mean())) < 5 / a.numel() ** 0.5

    first = centred[77]
    for c in centred.values():
        # The share of kept edges, of all and of each head: five standard deviations.
        assert abs(float(c.mean())) < 5 / c.numel() ** 0.5
        assert float(c.mean(0).abs().max()) < 5 / count**0.5
        # In every short run of edges as well.
        runs = c.view(-1, 64 * 8).mean(1) * (64 * 8) ** 0.5
        assert abs(float(runs.var()) - 1) < 5 * (2 / runs.numel()) ** 0.5
    for h in range(1, 8):
        uncorrelated(first[:, h:], first[:, :-h])
    for step in (1, 2, 3, 4, 8, 16, 1024, 2**15):
        uncorrelated(first[step:], first[:-step])
        uncorrelated(first[step:, 1:], first[:-step, :-1])
    numbers = list(centred)
    for k, a in enumerate(numbers):
        for b in numbers[:k]:
            # Nor is the mask of a seed that of another with its edges in another order.
            for flip in (0, 1, 2, 3, 77, 2**15):
                uncorrelated(centred[a], centred[b][ids ^ flip])


@both
def test_expectation(device: torch.device, op: str) -> None:
    edges = Edges(torch.stack([torch.arange(4000), torch.zeros(4000, dtype=torch.long)]), 4000, 1)
    inputs = [t.detach().float() for t in inputs_of(op, edges, 4, 3, device=device)]
    inputs[0].fill_(1)
    for dropout in (0.2, 0.8):
        out = OPS[op](edges.graph(device=device), *inputs, dropout=dropout)
        # Of weights that differ little: five standard deviations of a mean of 4000.
        assert (out - 1).abs().max() < 5 * 2 * (dropout / (1 - dropout) / 4000) ** 0.5
        assert (out != 1).any()


@both
def test_no_dropout_and_nothing_but_dropout(device: torch.device, op: str) -> None:
    edges = GRAPHS['square']
    graph, inputs = edges.graph(device=device), inputs_of(op, edges, 3, 5, device=device)
    before = torch.get_rng_state()
    plain = OPS[op](graph, *inputs)
    assert torch.equal(OPS[op](graph, *inputs, dropout=0.0), plain)
    assert torch.equal(OPS[op](graph, *inputs, dropout=0, seed=seed_of(3, device)), plain)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn
    for dropout in (1, 1.0):
        out, *grads = gradients(OPS[op](graph, *inputs, dropout=dropout), inputs)
        assert (out == 0).all()
        assert all((g == 0).all() for g in grads)


@both
def test_reproducible(device: torch.device, op: str) -> None:
    edges = GRAPHS['square']
    graph, inputs = edges.graph(device=device), inputs_of(op, edges, 3, 5, device=device)

    def run(seed: Tensor | None = None) -> list[Tensor]:
        return gradients(OPS[op](graph, *inputs, dropout=0.5, seed=seed), inputs)

    torch.manual_seed(5)
    first, second = run(), run()
    torch.manual_seed(5)
    assert all(map(torch.equal, first, run()))
    assert all(map(torch.equal, second, run()))
    assert not torch.equal(first[0], second[0])
    given = [run(seed_of(9, device)) for _ in range(2)]
    assert all(map(torch.equal, *given))
    assert not torch.equal(given[0][0], run(seed_of(10, device))[0])


@both
def test_a_seed_that_changes_before_the_backward_pass(device: torch.device, op: str) -> None:
    edges = GRAPHS['square']
    graph, inputs = edges.graph(device=device), inputs_of(op, edges, 3, 5, device=device)
    expected = gradients(OPS[op](graph, *inputs, dropout=0.5, seed=seed_of(9, device)), inputs)
    seed = seed_of(9, device)
    out = OPS[op](graph, *inputs, dropout=0.5, seed=seed)
    seed.fill_(10)
    assert all(map(torch.equal, gradients(out, inputs), expected))


# --- determinism and memory ----------------------------------------------------------------------


@both
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('flag', [False, True])
def test_same_bits_every_time(
    device: torch.device, op: str, dtype: torch.dtype, flag: bool
) -> None:
    edge_index = torch.randint(300, (2, 6000), device=device)
    edge_index[:, :1500] = 7
    edges = Edges(edge_index, 300, 300)
    inputs = [(torch.randn_like(t) + t).detach().requires_grad_()
              for t in inputs_of(op, edges, 4, 9, dtype, device, edge=True)]  # fmt: skip
    prepared, _ = prepare_edge_index(edge_index, (300, 300))
    torch.use_deterministic_algorithms(flag)
    try:
        for graph in (edge_index, prepared):
            results = [
                gradients(
                    OPS[op](graph, *inputs, dropout=0.3, seed=seed_of(4, device)), inputs
                )
                for _ in range(3)
            ]  # fmt: skip
            for other in results[1:]:
                assert all(map(torch.equal, results[0], other))
    finally:
        torch.use_deterministic_algorithms(False)


@both
def test_higher_derivatives_are_deterministic(
    device: torch.device, op: str, deterministic: None
) -> None:
    edges = GRAPHS['in_hubs']
    inputs = [(torch.randn_like(t) + t).detach().requires_grad_()
              for t in inputs_of(op, edges, 2, 4, torch.float32, device, edge=True)]  # fmt: skip
    results = []
    for _ in range(3):
        out = OPS[op](edges.graph(device=device), *inputs).pow(2).sum()
        grads = torch.autograd.grad(out, inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.pow(2).sum() for g in grads), inputs))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@both
@pytest.mark.parametrize('form', ['plain', 'prepared'])
def test_no_tensor_of_edges_times_heads(op: str, form: str) -> None:
    num_nodes, num_edges, heads = 100, 50_000, 16
    edge_index = torch.randint(num_nodes, (2, num_edges))
    edges = Edges(edge_index, num_nodes, num_nodes)
    graph = edge_index
    if form == 'prepared':
        graph = prepare_edge_index(edge_index, (num_nodes,) * 2)[0]
    inputs = inputs_of(op, edges, heads, 4, torch.float32)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = OPS[op](graph, *inputs, dropout=0.5, add_self_loops=True)
        torch.autograd.grad(out.sum(), inputs)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < num_edges * heads  # a byte for each edge and head; an index takes 8


# --- compilation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('op', 'form', 'loops'),
    [('gat', 'plain', True), ('gatv2', 'plain', True), ('gat', 'prepared', False),
     ('gatv2', 'prepared', True), ('gat', 'Graph', False), ('gatv2', 'Graph', False)],
)  # fmt: skip
def test_compiles_without_graph_break(
    device: torch.device, op: str, form: str, loops: bool
) -> None:
    torch._dynamo.reset()
    edges = of_order(GRAPHS['square'])
    graph = graphs(edges, device)[form]
    inputs = inputs_of(op, edges, 3, 5, torch.float32, device, edge=True)
    seed = seed_of(6, device)

    def run(graph: Graph | Tensor, *inputs: Tensor) -> Tensor:
        x, *rest = inputs
        return OPS[op](graph, x * 2, *rest, dropout=0.5, add_self_loops=loops, seed=seed) + 1

    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    actual, expected = (gradients(f(graph, *inputs), inputs) for f in (compiled, run))
    torch.testing.assert_close(actual, expected)


@both
def test_compiles_with_inductor(device: torch.device, op: str) -> None:
    torch._dynamo.reset()
    edges = of_order(GRAPHS['square'])
    inputs = inputs_of(op, edges, 3, 5, torch.float32, device)

    def run(graph: Graph | Tensor, x: Tensor, *rest: Tensor) -> Tensor:
        return OPS[op](graph, x.sin(), *rest).sigmoid()

    compiled = torch.compile(run, fullgraph=True)
    # C++ takes long: plain graphs are compiled without it above.
    for form in ('prepared',) if device.type == 'cpu' else ('plain', 'prepared'):
        graph = graphs(edges, device)[form]
        actual, expected = (gradients(f(graph, *inputs), inputs) for f in (compiled, run))
        torch.testing.assert_close(actual, expected)


@both
def test_compiled_dropout_draws_anew(device: torch.device, op: str) -> None:
    torch._dynamo.reset()
    edges = GRAPHS['square']
    graph, inputs = edges.graph(device=device), inputs_of(op, edges, 3, 5, device=device)
    compiled = torch.compile(OPS[op], fullgraph=True, backend='aot_eager')
    torch.manual_seed(2)
    first, second = (compiled(graph, *inputs, dropout=0.5) for _ in range(2))
    torch.manual_seed(2)
    assert torch.equal(compiled(graph, *inputs, dropout=0.5), first)
    assert not torch.equal(first, second)


# --- CUDA only -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize('form', ['plain', 'prepared'])
@pytest.mark.parametrize('seeded', [False, True])
def test_cuda_graph(cuda: torch.device, op: str, form: str, seeded: bool) -> None:
    edges = of_order(GRAPHS['square'])
    graph = graphs(edges, cuda)[form]
    inputs = inputs_of(op, edges, 3, 5, torch.float32, cuda, edge=True)
    seed = seed_of(3, cuda) if seeded else None

    def step() -> list[Tensor]:
        out = OPS[op](graph, *inputs, dropout=0.5, add_self_loops=True, seed=seed)
        return gradients(out, inputs)

    replay, results = captured(step)
    if not seeded:  # each replay has a mask of its own
        replay()
        first = results[0].clone()
        replay()
        assert not torch.equal(first, results[0])
        return
    for number in range(3):
        with torch.no_grad():
            seed.fill_(number)
            for t in inputs:
                t.normal_()
        replay()
        torch.testing.assert_close(results, step())


@both
def test_side_stream(cuda: torch.device, op: str) -> None:
    edges = of_order(GRAPHS['square'])
    graph = graphs(edges, cuda)['prepared']
    inputs = inputs_of(op, edges, 3, 5, torch.float32, cuda)
    expected = gradients(OPS[op](graph, *inputs), inputs)
    late = [torch.zeros_like(t).requires_grad_() for t in inputs]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the default stream would not wait for it
        with torch.no_grad():
            for t, value in zip(late, inputs, strict=True):
                t.copy_(value)
        actual = gradients(OPS[op](graph, *late), late)
    stream.synchronize()
    torch.testing.assert_close(actual, expected)


@both
def test_peak_memory(cuda: torch.device, op: str) -> None:
    num_nodes, num_edges, heads = 1000, 1_000_000, 8
    edge_index = torch.randint(num_nodes, (2, num_edges), device=cuda)
    edges = Edges(edge_index, num_nodes, num_nodes)
    graph = edges.graph(device=cuda)
    inputs = inputs_of(op, edges, heads, 8, torch.float32, cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    OPS[op](graph, *inputs, dropout=0.5).sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used < num_edges * heads  # a byte for each edge and head


def test_devices_that_differ(cuda: torch.device) -> None:
    edges = GRAPHS['square']
    inputs = inputs_of('gat', edges, 3, 5, torch.float32, cuda)
    with pytest.raises(ValueError, match="'graph' is on cpu"):
        gat(edges.edge_index, *inputs)
    with pytest.raises(ValueError, match="'graph' is on cuda"):
        gat(edges.graph(device=cuda), *[t.cpu() for t in inputs])
    with pytest.raises(ValueError, match="'seed' is on cpu"):
        gat(edges.graph(device=cuda), *inputs, dropout=0.5, seed=seed_of(1))
