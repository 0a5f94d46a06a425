"""RGCNConv and RGATConv: relations as pairs with nodes, beside PyG on the same weights."""

from typing import Any

import pytest
import torch
from torch_geometric.nn import RGATConv, RGCNConv
from torch_geometric.nn.aggr import MaxAggregation

from pyg_fast.nn import relational
from tests.nn._layers import (
    NUM_SRC,
    N,
    arguments,
    assert_alike,
    both,
    graph,
    how,
    prepared,
    run,
)

R, WIDTH = 3, 16


@pytest.fixture(params=[True, False], ids=['all_pairs', 'pairs_with_edges'])
def dense(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(relational, '_is_dense', lambda device: request.param)
    return request.param


@pytest.mark.parametrize(
    'options',
    [
        {}, {'aggr': 'add', 'num_bases': 2}, {'num_blocks': 4, 'root_weight': False},
        {'in_channels': N, 'bias': False}, {'in_channels': N, 'aggr': 'add', 'num_bases': 2},
    ],
)  # fmt: skip
def test_sums(options: dict[str, Any], dense: bool, device: torch.device) -> None:
    torch.manual_seed(1)
    options = {'in_channels': WIDTH, 'out_channels': 8, 'num_relations': R} | options
    theirs, ours = both(RGCNConv(**options), device)
    names = 'x edges relation' if options['in_channels'] == WIDTH else 'none edges relation'
    assert_alike(
        run(ours, arguments(names, device)), run(theirs, arguments(names, device)), 1e-9
    )


def test_one_sum_for_all_relations(
    dense: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = both(RGCNConv(WIDTH, 8, R), device)
    monkeypatch.setattr(type(ours), 'propagate', None)
    assert ours(*arguments('x edges relation', device)).shape == (N, 8)


def test_plan(device: torch.device) -> None:
    _, ours = both(RGCNConv(WIDTH, 8, R), device)
    assert ours.plan is None
    ours(*arguments('x edges relation', device))
    assert ours.plan == 'one sum for all relations'
    ours.aggr_module = MaxAggregation()
    ours(*arguments('x edges relation', device))
    assert ours.plan != 'one sum for all relations'


def test_relations_are_read_at_each_call(dense: bool, device: torch.device) -> None:
    theirs, ours = both(RGCNConv(WIDTH, 8, R), device)
    x, edges, relation = arguments('x edges! relation', device)
    for _ in range(2):
        torch.testing.assert_close(ours(x, edges, relation), theirs(x, edges, relation))
        relation.copy_(relation.flip(0))


def test_attention_reads_relations_at_each_call(device: torch.device) -> None:
    theirs, ours = both(RGATConv(WIDTH, 8, 30), device)
    x, edges, relation = arguments('x edges! relation', device)
    for _ in range(2):
        torch.testing.assert_close(ours(x, edges, relation), theirs(x, edges, relation))
        relation.copy_((relation.flip(0) % 2) * 29)  # Most of them have no edges.
    assert how(ours) == 'FusedRGATConv'


def test_few_relations_have_edges(dense: bool, device: torch.device) -> None:
    theirs, ours = both(RGCNConv(WIDTH, 8, 30), device)
    x, edges, relation = arguments('x edges relation', device)
    args = x, edges, (relation % 2) * 29
    torch.testing.assert_close(ours(*args), theirs(*args))


def test_unknown_relations(dense: bool, device: torch.device) -> None:
    """PyG ignores these edges where it masks them."""
    if device.type == 'cuda' and not dense:
        pytest.skip('a GPU has rows for all pairs')
    theirs, ours = both(RGCNConv(WIDTH, 8, R, num_blocks=2), device)
    x, edges, relation = arguments('x edges relation', device)
    relation[:5], relation[5:9] = -1, R
    torch.testing.assert_close(ours(x, edges, relation), theirs(x, edges, relation))


@pytest.mark.parametrize('row', [0, 1])
@pytest.mark.parametrize('value', [-1, N])
def test_unknown_nodes(row: int, value: int, dense: bool, device: torch.device) -> None:
    if device.type == 'cuda':
        pytest.skip('PyG stops the process')
    convs = [both(cls(WIDTH, 8, R), device)[1] for cls in (RGCNConv, RGATConv)]
    convs.append(both(RGCNConv(N, 8, R), device)[1])
    edges, relation = arguments('edges relation', device)
    for first in range(R):
        edges = edges.clone()
        edges[row, 0], relation[0] = value, first
        for conv in convs:
            x = None if conv.in_channels == N else torch.ones(N, WIDTH).double()
            with pytest.raises((IndexError, RuntimeError)):
                conv(x, edges, relation)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half(dtype: torch.dtype, dense: bool, device: torch.device) -> None:
    theirs, ours = both(RGCNConv((WIDTH, WIDTH), 8, R), device)
    pair, edges, relation = arguments('pair bipartite relation', device)
    exact = theirs(pair, edges, relation)
    pair = tuple(x.to(dtype) for x in pair)
    got, expected = (conv.to(dtype)(pair, edges, relation) for conv in (ours, theirs))
    assert got.dtype == expected.dtype
    assert (got - exact).abs().max() <= 1.5 * (expected - exact).abs().max()


@pytest.mark.parametrize(
    ('mode', 'mod'),
    [
        ('additive', None), ('additive', 'scaled'), ('multiplicative', 'additive'),
        ('multiplicative', 'f-scaled'),
    ],
)  # fmt: skip
def test_attention(mode: str, mod: str | None, device: torch.device) -> None:
    torch.manual_seed(1)
    dim = 1 if mode == 'additive' else 2
    conv = RGATConv(
        WIDTH, 4, R, num_bases=2, heads=2, dim=dim, edge_dim=6, mod=mod, concat=mode == 'additive',
        attention_mode=f'{mode}-self-attention',
    )  # fmt: skip
    theirs, ours = both(conv, device)
    names = 'x edges relation attr'
    assert_alike(
        run(ours, arguments(names, device)), run(theirs, arguments(names, device)), 1e-9
    )
    assert how(ours) == 'FusedRGATConv'


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        ({'mod': 'f-additive'}, 'f-additive'),
        ({'attention_mechanism': 'within-relation'}, 'within-relation'),
        ({'flow': 'target_to_source'}, 'flow'),
    ],
)  # fmt: skip
def test_attention_by_pyg(options: dict[str, Any], reason: str, device: torch.device) -> None:
    theirs, ours = both(RGATConv(WIDTH, 8, R, **options), device)
    args = arguments('x edges relation', device)
    torch.testing.assert_close(ours(*args), theirs(*args))
    assert reason in how(ours)


def test_returned_attention(device: torch.device) -> None:
    theirs, ours = both(RGATConv(WIDTH, 8, R), device)
    args = arguments('x edges relation', device)
    ours(*args)
    assert ours._alpha is None
    expected = theirs(*args, return_attention_weights=True)
    got = ours(*args, return_attention_weights=True)
    torch.testing.assert_close(got[1][1], expected[1][1])
    assert 'return_attention_weights' in how(ours)


def test_dropout(device: torch.device) -> None:
    """The mean over many calls is the result without dropout."""
    _, ours = both(RGATConv(WIDTH, 4, R, dropout=0.5), device)
    x, edges, relation = arguments('x edges! relation', device)
    with torch.no_grad():
        mean = torch.stack([ours(x, edges, relation) for _ in range(200)]).mean(0)
        exact = ours.eval()(x, edges, relation)
    assert how(ours) == 'FusedRGATConv'
    assert (mean - exact).abs().mean() < 0.2 * exact.abs().mean()


@pytest.mark.parametrize('trained', ['q', 'k', 'w', 'basis'])
def test_one_parameter_trained(trained: str, device: torch.device) -> None:
    theirs, ours = both(RGATConv(WIDTH, 4, R, num_bases=2, mod='additive'), device)
    x, edges, relation = arguments('x edges relation', device)
    grads = []
    for conv in (theirs, ours):
        conv.requires_grad_(False)
        parameter = getattr(conv, trained).requires_grad_()
        grads += torch.autograd.grad(conv(x.detach(), edges, relation).sin().sum(), parameter)
    assert how(ours) == 'FusedRGATConv'
    torch.testing.assert_close(grads[1], grads[0])


def test_second_derivative(dense: bool, device: torch.device) -> None:
    _, ours = both(RGCNConv(2, 2, 2), device)
    check_second_derivative(ours, device)


def test_second_derivative_of_attention(device: torch.device) -> None:
    _, ours = both(RGATConv(2, 2, 2), device)
    check_second_derivative(ours, device)
    assert how(ours) == 'FusedRGATConv'


def check_second_derivative(conv: Any, device: torch.device) -> None:
    edges = torch.tensor([[0, 1, 2, 3, 0, 0], [1, 1, 0, 1, 2, 2]], device=device)
    relation = torch.tensor([0, 1, 1, 0, 1, 1], device=device)
    x = torch.randn(5, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x: conv(x, edges, relation).sin(), (x,), fast_mode=True
    )


def test_hooks_and_patches(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, edges, relation = arguments('x edges relation', device)
    theirs, ours = both(RGCNConv(WIDTH, 8, R), device)
    seen: list[Any] = []
    ours.register_message_forward_hook(lambda *args: seen.append(args))
    torch.testing.assert_close(ours(x, edges, relation), theirs(x, edges, relation))
    assert len(seen) == R
    theirs, ours = both(RGCNConv(WIDTH, 8, R), device)
    monkeypatch.setattr(RGCNConv, 'message', lambda self, x_j, edge_type_ptr: 2 * x_j)
    torch.testing.assert_close(ours(x, edges, relation), theirs(x, edges, relation))


def test_bipartite(dense: bool, device: torch.device) -> None:
    theirs, ours = both(RGCNConv((WIDTH, 8), 8, R), device)
    edges = torch.stack([graph(device)[0] % NUM_SRC, graph(device)[1]])
    kind: Any = {'dtype': torch.float64, 'device': device}
    x = torch.randn(NUM_SRC, WIDTH, **kind), torch.randn(N, 8, **kind)
    relation = arguments('relation', device)[0]
    expected = theirs(x, edges, relation)
    torch.testing.assert_close(ours(x, edges, relation), expected)
    torch.testing.assert_close(ours(x, prepared(edges, NUM_SRC), relation), expected)
