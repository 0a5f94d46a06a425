"""RGCNConv and RGATConv: relations as pairs with nodes, beside PyG on the same weights."""

import math
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import RGATConv, RGCNConv
from torch_geometric.nn.aggr import MaxAggregation

import pyg_fast
from pyg_fast.nn import relational
from tests._captures import check_training
from tests._report import plan_of, what_ran
from tests.nn._layers import (
    NUM_SRC,
    E,
    N,
    arguments,
    assert_alike,
    both,
    graph,
    prepared,
    run,
)

R, WIDTH = 3, 16


WAYS = ['all', 'relations', 'tiles', 'tiles_on_gpu']


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the functions that sum, on either device."""
    use(request.param, monkeypatch)
    return request.param


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = getattr(relational, f'_sums_of_{way.removesuffix("_on_gpu")}')
    changes: dict[str, Any] = {'_way': lambda *_: sums}
    if way == 'tiles_on_gpu':
        changes['_most_pairs'] = most_pairs
    for name, function in changes.items():
        monkeypatch.setattr(relational, name, function)


def most_pairs(edges: Any, pairptr: Tensor) -> int:
    return min(edges.kind.size(0), edges.num_dst * edges.num_relations)


@pytest.mark.parametrize(
    'options',
    [
        {}, {'aggr': 'add', 'num_bases': 2}, {'num_blocks': 4, 'root_weight': False},
        {'in_channels': N, 'bias': False}, {'in_channels': N, 'aggr': 'add', 'num_bases': 2},
    ],
)  # fmt: skip
def test_sums(options: dict[str, Any], way: str, device: torch.device) -> None:
    torch.manual_seed(1)
    options = {'in_channels': WIDTH, 'out_channels': 8, 'num_relations': R} | options
    theirs, ours = both(RGCNConv(**options), device)
    names = 'x edges relation' if options['in_channels'] == WIDTH else 'none edges relation'
    assert_alike(run(ours, arguments(names, device)), run(theirs, arguments(names, device)), 1e-9)


@pytest.fixture
def propagated(record_calls: Callable[..., list[None]]) -> list[None]:
    """Calls of `propagate`: PyG's code makes one for each relation, and one sum for all none."""
    ours = pyg_fast.accelerate(RGCNConv(1, 1, 1))
    return record_calls(type(ours), 'propagate', lambda *_, **__: None)


def test_plan(device: torch.device, propagated: list[None]) -> None:
    _, ours = both(RGCNConv(WIDTH, 8, R), device)
    with pytest.raises(AssertionError, match='no call yet'):
        plan_of(ours)
    ours(*arguments('x edges relation', device))
    assert plan_of(ours) == 'one sum for all relations'
    assert len(propagated) == 0
    ours.aggr_module = MaxAggregation()
    ours(*arguments('x edges relation', device))
    assert plan_of(ours) != 'one sum for all relations'
    assert len(propagated) == R


def test_relations_are_read_at_each_call(way: str, device: torch.device) -> None:
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
    assert what_ran(ours) == 'FusedRGATConv'


def test_few_relations_have_edges(way: str, device: torch.device) -> None:
    theirs, ours = both(RGCNConv(WIDTH, 8, 30), device)
    x, edges, relation = arguments('x edges relation', device)
    args = x, edges, (relation % 2) * 29
    torch.testing.assert_close(ours(*args), theirs(*args))


@pytest.mark.parametrize('kinds', ['some', 'each', 'one'])
@pytest.mark.parametrize(
    'options',
    [{}, {'num_bases': 3, 'aggr': 'add'}, {'num_blocks': 4}, {'in_channels': 5}],
    ids=str,
)
def test_many_relations(
    options: dict[str, Any], kinds: str, device: torch.device, monkeypatch: pytest.MonkeyPatch,
    propagated: list[None],
) -> None:  # fmt: skip
    """More relations than nodes: some have no edges, each has one, or one has all."""
    num_nodes, num_relations, num_edges = 5, 9, 30
    options = {'in_channels': WIDTH, 'out_channels': 8, 'num_relations': num_relations} | options
    theirs, ours = both(RGCNConv(**options), device)
    (x,) = arguments('none' if options['in_channels'] == num_nodes else 'x', device)
    if kinds == 'each':
        relation = torch.randperm(num_relations, device=device)
    else:
        relation = torch.randint(num_relations, (num_edges,), device=device) // 2 * 2
    if kinds == 'one':
        relation.fill_(num_relations - 1)
    edges = torch.randint(num_nodes, (2, relation.size(0)), device=device)
    args = [x if x is None else x[:num_nodes].detach().requires_grad_(), edges, relation]
    expected = run(theirs, args)
    for way in WAYS:
        use(way, monkeypatch)
        assert_alike(run(ours, args), expected, 1e-9)
        assert propagated == []


@hypothesis.given(data=st.data())
def test_tiles_of_any_size(data: st.DataObject) -> None:
    """The same as the sums of all pairs, and edges of other relations count for nothing."""
    draw = data.draw
    num_src, num_dst, num_relations = (draw(st.integers(1, high)) for high in (9, 9, 12))
    num_edges, width = draw(st.integers(2, 60)), draw(st.sampled_from([1, 4, 12]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def ids(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_edges,), generator=generator)

    edges = torch.stack([ids(0, num_src), ids(0, num_dst)])
    kind = ids(-1, num_relations + 1)
    kind[0] = 0
    x = torch.randn(num_src, width, dtype=torch.float64, generator=generator)
    shape = draw(st.sampled_from([(width, 3), (width // 4, 4, 2)] if width > 1 else [(1, 3)]))
    weight = torch.randn(num_relations, *shape, dtype=torch.float64, generator=generator)
    size, exact = draw(st.sampled_from([1, 2, 8, 64])), draw(st.booleans())
    arguments = relational._Edges(edges, kind, num_src, num_dst, num_relations, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relational, '_tile_size', lambda *_: size)
        if not exact:
            patch.setattr(relational, '_most_pairs', most_pairs)
        for mean in (False, True):
            leaves = x.requires_grad_(), weight.requires_grad_()
            results = []
            for sums in (relational._sums_of_tiles, relational._sums_of_all):
                out = sums(arguments, *leaves, mean)
                results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
            assert_alike(*results, 1e-12)


@hypothesis.given(
    num_pairs=st.integers(1, 10**9), num_relations=st.integers(1, 10**5),
    shape=st.lists(st.integers(1, 600), min_size=2, max_size=3),
)  # fmt: skip
def test_tiles_take_little_more_than_rows_and_matrices(
    num_pairs: int, num_relations: int, shape: list[int]
) -> None:
    weight = torch.empty(num_relations, *shape, device='meta')
    width, size = sum(shape[-2:]) * math.prod(shape[:-2]), math.prod(shape)
    tile = relational._tile_size(num_pairs, weight)
    num_tiles = (num_pairs + min(num_pairs, num_relations) * (tile - 1)) // tile
    needed = num_pairs * width + num_relations * size
    assert num_tiles * (tile * width + size) <= 2.25 * needed


def test_which_way(device: torch.device, limits: Callable[..., None]) -> None:
    """Few pairs, by numbers or beside the edges, have rows that suit the device."""
    few = relational._sums_of_all if device.type == 'cuda' else relational._sums_of_relations
    edges, relation = arguments('edges relation', device)

    def way(num_relations: int) -> Any:
        return relational._way(relational._Edges(edges, relation, N, N, num_relations, False), 8)

    assert way(R) is few
    assert way(10**8) is relational._sums_of_tiles
    limits(pairs_by_number=0)
    assert way(E // N - 1) is few
    assert way(E // N) is relational._sums_of_tiles


def test_many_pairs_take_tiles(
    device: torch.device, limits: Callable[..., None], forbid: Callable[..., None],
    propagated: list[None],
) -> None:  # fmt: skip
    limits(pairs_by_number=0)
    for name in ('_sums_of_all', '_sums_of_relations'):
        forbid(relational, name)
    theirs, ours = both(RGCNConv(WIDTH, 8, E // N), device)
    args = arguments('x edges relation', device)
    assert_alike(run(ours, args), run(theirs, args), 1e-9)
    assert propagated == []


@pytest.mark.parametrize('names', ['x edges!', 'x edges#', 'pair bipartite!', 'pair bipartite#'])
def test_prepared(names: str, way: str, device: torch.device, propagated: list[None]) -> None:
    theirs, ours = both(RGCNConv((WIDTH, WIDTH), 8, 9, num_blocks=2), device)
    relation = (arguments('relation', device)[0] * 5) % 7
    args = [*arguments(names, device), relation]
    plain = [*arguments(names[:-1], device), relation]
    if isinstance(args[0], Tensor):
        args[0], plain[0] = (args[0],) * 2, (plain[0],) * 2
    for _ in range(2):  # The second call finds the structure.
        assert_alike(run(ours, args)[:1], run(theirs, plain)[:1], 1e-9)
    assert propagated == []


@pytest.mark.parametrize('num_edges', [0, 1])
def test_hardly_any_edges(num_edges: int, way: str, device: torch.device) -> None:
    theirs, ours = both(RGCNConv(WIDTH, 8, R), device)
    x, edges, relation = arguments('x edges relation', device)
    args = [x, edges[:, :num_edges], relation[:num_edges]]
    assert_alike(run(ours, args), run(theirs, args), 1e-12)


def test_same_bits(way: str, device: torch.device) -> None:
    _, ours = both(RGCNConv(WIDTH, 8, 50), device)
    ours = ours.float()
    relation = (torch.rand(E, device=device) ** 3 * 50).long()
    args = [*arguments('x edges', device, torch.float32), relation]
    first = run(ours, args)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(ours, args), first, strict=True))


@pytest.mark.parametrize('way', ['all', 'tiles'])
def test_host_never_waits(way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step can be captured."""
    if device.type == 'cpu':
        pytest.skip('a CPU does not wait')
    use(way, monkeypatch)
    _, ours = both(RGCNConv(WIDTH, 8, 50, num_bases=4), device)
    x, edges, relation = arguments('x edges relation', device)
    torch.cuda.set_sync_debug_mode('error')
    try:
        ours(x, edges, relation).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode('default')
    check_training(ours, lambda conv: conv(x, edges, relation).square().sum())


def test_features_of_another_width(way: str, device: torch.device) -> None:
    """PyG's error."""
    for options in ({}, {'num_bases': 2}, {'num_blocks': 2}):
        theirs, ours = both(RGCNConv(WIDTH, 8, R, root_weight=False, **options), device)
        x, edges, relation = arguments('two edges relation', device)
        for conv in (theirs, ours):
            with pytest.raises(RuntimeError, match='shape|size'):
                conv(x, edges, relation)


def test_unknown_relations(way: str, device: torch.device) -> None:
    """PyG ignores these edges where it masks them."""
    if device.type == 'cuda' and way == 'relations':
        pytest.skip('a GPU does not use it')
    theirs, ours = both(RGCNConv(WIDTH, 8, R, num_blocks=2), device)
    x, edges, relation = arguments('x edges relation', device)
    relation[:5], relation[5:9] = -1, R
    torch.testing.assert_close(ours(x, edges, relation), theirs(x, edges, relation))


@pytest.mark.parametrize('row', [0, 1])
@pytest.mark.parametrize('value', [-1, N])
def test_unknown_nodes(row: int, value: int, way: str, device: torch.device) -> None:
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
@pytest.mark.parametrize('num_blocks', [None, 2])
def test_half(num_blocks: int | None, dtype: torch.dtype, way: str, device: torch.device) -> None:
    theirs, ours = both(RGCNConv((WIDTH, WIDTH), 8, R, num_blocks=num_blocks), device)
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
    assert_alike(run(ours, arguments(names, device)), run(theirs, arguments(names, device)), 1e-9)
    assert what_ran(ours) == 'FusedRGATConv'


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
    assert reason in what_ran(ours)


def test_returned_attention(device: torch.device) -> None:
    theirs, ours = both(RGATConv(WIDTH, 8, R), device)
    args = arguments('x edges relation', device)
    ours(*args)
    assert ours._alpha is None
    expected = theirs(*args, return_attention_weights=True)
    got = ours(*args, return_attention_weights=True)
    torch.testing.assert_close(got[1][1], expected[1][1])
    assert 'return_attention_weights' in what_ran(ours)


def test_dropout(device: torch.device) -> None:
    """The mean over many calls is the result without dropout."""
    _, ours = both(RGATConv(WIDTH, 4, R, dropout=0.5), device)
    x, edges, relation = arguments('x edges! relation', device)
    with torch.no_grad():
        mean = torch.stack([ours(x, edges, relation) for _ in range(200)]).mean(0)
        exact = ours.eval()(x, edges, relation)
    assert what_ran(ours) == 'FusedRGATConv'
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
    assert what_ran(ours) == 'FusedRGATConv'
    torch.testing.assert_close(grads[1], grads[0])


def test_second_derivative(way: str, device: torch.device) -> None:
    _, ours = both(RGCNConv(2, 2, 2), device)
    check_second_derivative(ours, device)


def test_second_derivative_of_attention(device: torch.device) -> None:
    _, ours = both(RGATConv(2, 2, 2), device)
    check_second_derivative(ours, device)
    assert what_ran(ours) == 'FusedRGATConv'


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


def test_bipartite(way: str, device: torch.device) -> None:
    theirs, ours = both(RGCNConv((WIDTH, 8), 8, R), device)
    edges = torch.stack([graph(device)[0] % NUM_SRC, graph(device)[1]])
    kind: Any = {'dtype': torch.float64, 'device': device}
    x = torch.randn(NUM_SRC, WIDTH, **kind), torch.randn(N, 8, **kind)
    relation = arguments('relation', device)[0]
    expected = theirs(x, edges, relation)
    torch.testing.assert_close(ours(x, edges, relation), expected)
    torch.testing.assert_close(ours(x, prepared(edges, NUM_SRC), relation), expected)
