"""FusedGATConv and FusedGATv2Conv against PyG's GATConv and GATv2Conv, on the same weights."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import _forks
import pytest
import torch
import torch_geometric
from _pairs import pairs
from torch import Tensor
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing

import pyg_fast
from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import FusedGATConv, FusedGATv2Conv
from tests._compiled import Backend
from tests._profile import sorts_of
from tests._report import may_leave, must_fuse

SRC, DST, EDGES = 30, 20, 150
KINDS = {'gat': (GATConv, FusedGATConv), 'gatv2': (GATv2Conv, FusedGATv2Conv)}
both = pytest.mark.parametrize('kind', KINDS)
# Options that the kernels support; built anew for every layer, since tensors must not be shared.
OPTIONS: dict[str, dict[str, Any]] = {
    'default': {},
    'heads': {'heads': 3},
    'mean': {'heads': 3, 'concat': False},
    'slope': {'heads': 2, 'negative_slope': -0.3},
    'no loops': {'heads': 2, 'add_self_loops': False},
    'no bias': {'heads': 2, 'bias': False},
    'residual': {'heads': 2, 'residual': True},
    'all': {
        'heads': 2, 'residual': True, 'concat': False, 'negative_slope': 0.0,
        'add_self_loops': False, 'bias': False,
    },
}  # fmt: skip
FILL: dict[str, Callable[[], Any]] = {
    'mean': lambda: 'mean',
    'add': lambda: 'add',
    'sum': lambda: 'sum',
    'number': lambda: 1.5,
    'int': lambda: 2,
    'tensor': lambda: torch.linspace(-1, 1, 4, dtype=torch.float64),
    'row': lambda: torch.linspace(-1, 1, 4, dtype=torch.float64).view(1, 4),
    'max': lambda: 'max',
    'min': lambda: 'min',
    'mul': lambda: 'mul',
}


def edges(num_src: int = SRC, num_dst: int = DST, num_edges: int = EDGES) -> Tensor:
    """Edges with double ones and loops, of which some nodes have none."""
    edge_index = torch.stack([
        torch.randint(num_src - 3, (num_edges,)), torch.randint(num_dst - 3, (num_edges,))
    ])  # fmt: skip
    edge_index[:, 20:23] = torch.arange(3)
    return torch.cat([edge_index, edge_index[:, :30]], dim=1)


def layers(
    kind: str, in_channels: Any = 8, out_channels: int = 5, device: Any = 'cpu',
    dtype: torch.dtype = torch.float64, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    theirs, ours = (cls(in_channels, out_channels, **copy.deepcopy(options)) for cls in KINDS[kind])
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(device, dtype), ours.to(device, dtype)


def features(
    *size: int, device: Any = 'cpu', dtype: torch.dtype = torch.float64
) -> Tensor:  # fmt: skip
    return torch.randn(*size, dtype=torch.float64).to(device, dtype)


def gradients(
    conv: Any, x: Any, edge_index: Any, edge_attr: Any = None, *, of_edges: bool = True,
    **kwargs: Any,
) -> list[Tensor]:  # fmt: skip
    """The output and the gradients of inputs and parameters."""
    given = (*(x if isinstance(x, tuple) else (x,)), edge_attr)
    leaves = [None if v is None else v.detach().requires_grad_() for v in given]
    if edge_attr is not None:
        leaves[-1].requires_grad_(of_edges)
    args: Any = tuple(leaves[:-1]) if isinstance(x, tuple) else leaves[0]
    out = conv(args, edge_index, leaves[-1], **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
    inputs = [*(v for v in leaves if v is not None and v.requires_grad), *conv.parameters()]
    grads = torch.autograd.grad(
        (out.double() * weight.view_as(out)).sum(), inputs, allow_unused=True
    )
    return [out, *[torch.zeros_like(v) if g is None else g
                   for v, g in zip(inputs, grads, strict=True)]]  # fmt: skip


def assert_same(theirs: list[Tensor], ours: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, **tolerance)


def assert_no_farther(
    exact: list[Tensor], theirs: list[Tensor], ours: list[Tensor], eps: float
) -> None:
    """Asserts that our error is at most about that of PyG, up to rounding."""
    for e, a, b in zip(exact, theirs, ours, strict=True):
        error, allowed = (float((e - t.double()).abs().max()) for t in (b, a))
        assert error <= 3 * allowed + 8 * eps * float(e.detach().abs().max())


@both
@pytest.mark.parametrize('name', OPTIONS)
@pytest.mark.parametrize('prepared', [False, True])
def test_options(kind: str, name: str, prepared: bool, device: torch.device) -> None:
    theirs, ours = layers(kind, device=device, **OPTIONS[name])
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    graph = prepare_edge_index(edge_index, (SRC, SRC))[0] if prepared else edge_index
    expected = gradients(theirs, x, edge_index)
    for _ in range(1 + prepared):  # At the second call the graph has its cache.
        assert_same(expected, gradients(must_fuse(ours), x, graph))


@pytest.mark.parametrize('name', OPTIONS)
def test_shared_weights(name: str, device: torch.device) -> None:
    theirs, ours = layers('gatv2', device=device, share_weights=True, **OPTIONS[name])
    assert ours.lin_l is ours.lin_r
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))
    theirs, ours = layers('gatv2', (8, 8), device=device, share_weights=True, **OPTIONS[name])
    pair, edge_index = (x, features(DST, 8, device=device)), edges().to(device)
    assert_same(gradients(theirs, pair, edge_index), gradients(must_fuse(ours), pair, edge_index))


# --- edge features -------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(  # Without self-loops nothing is filled in.
    ('fill', 'loops'), [*((fill, True) for fill in FILL), ('mean', False), ('max', False)]
)
def test_edge_features(kind: str, fill: str, loops: bool, device: torch.device) -> None:
    theirs, ours = layers(
        kind, heads=3, edge_dim=4, fill_value=FILL[fill](), add_self_loops=loops, device=device
    )
    if kind == 'gatv2' or fill not in ('max', 'min', 'mul') or not loops:
        must_fuse(ours)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    edge_attr = features(edge_index.size(1), 4, device=device)
    expected = gradients(theirs, x, edge_index, edge_attr)
    assert_same(expected, gradients(ours, x, edge_index, edge_attr))
    graph, order = prepare_edge_index(edge_index, (SRC, SRC))
    graph_attr = edge_attr if order is None else edge_attr[order]
    got = gradients(ours, x, graph, graph_attr)
    if order is not None:
        got[2] = torch.empty_like(got[2]).index_copy(0, order, got[2])
    assert_same(expected, got)


@both
@pytest.mark.parametrize('loops', [False, True])
def test_one_edge_feature(kind: str, loops: bool) -> None:
    theirs, ours = layers(kind, heads=3, edge_dim=1, add_self_loops=loops)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    for edge_attr in (features(EDGES + 30), features(EDGES + 30, 1)):
        assert_same(
            gradients(theirs, x, edge_index, edge_attr), gradients(ours, x, edge_index, edge_attr)
        )


@both
@pytest.mark.parametrize('fill', ['mean', 'number'])
def test_edge_features_against_the_flow(kind: str, fill: str) -> None:
    theirs, ours = layers(
        kind, heads=2, edge_dim=4, fill_value=FILL[fill](), flow='target_to_source'
    )  # fmt: skip
    x, edge_index, edge_attr = features(SRC, 8), edges(SRC, SRC), features(EDGES + 30, 4)
    assert_same(
        gradients(theirs, x, edge_index, edge_attr), gradients(ours, x, edge_index, edge_attr)
    )


@pytest.mark.parametrize('fill', ['mean', 'add', 'number'])
@pytest.mark.parametrize('edge_dim', [4, 40])  # Scores of loops are mapped sums, or sums of scores.
@pytest.mark.parametrize(('heads', 'channels'), [(1, 1), (8, 8), (2, 64), (1, 300)])
def test_edge_features_without_gradient(
    fill: str, edge_dim: int, heads: int, channels: int, device: torch.device
) -> None:
    theirs, ours = layers(
        'gat', out_channels=channels, heads=heads, edge_dim=edge_dim, fill_value=FILL[fill](),
        device=device,
    )  # fmt: skip
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    edge_attr = features(edge_index.size(1), edge_dim, device=device)
    assert_same(*(
        gradients(conv, x, edge_index, edge_attr, of_edges=False)
        for conv in (theirs, must_fuse(ours))
    ))  # fmt: skip


@both
@pytest.mark.parametrize('loops', [False, True])
def test_bipartite_edge_features(kind: str, loops: bool, device: torch.device) -> None:
    theirs, ours = layers(
        kind, (8, 6), heads=2, edge_dim=4, add_self_loops=loops, device=device
    )  # fmt: skip
    x = features(SRC, 8, device=device), features(DST, 6, device=device)
    edge_index, edge_attr = edges().to(device), features(EDGES + 30, 4, device=device)
    assert_same(
        gradients(theirs, x, edge_index, edge_attr), gradients(ours, x, edge_index, edge_attr)
    )


@both
@pytest.mark.parametrize('fill', ['mean', 'add'])
def test_second_derivatives_with_edge_features(kind: str, fill: str, device: torch.device) -> None:
    """Of the features of self-loops, too."""
    theirs, ours = layers(kind, heads=2, edge_dim=4, fill_value=fill, device=device)
    edge_index = edges(SRC, SRC).to(device)
    graph, order = prepare_edge_index(edge_index, (SRC, SRC))
    edge_index = edge_index if order is None else edge_index[:, order]
    x, attr = features(SRC, 8, device=device), features(edge_index.size(1), 4, device=device)
    found = []
    for conv, given in ((theirs, edge_index), (ours, graph)):
        leaves = [t.detach().clone().requires_grad_() for t in (x, attr)]
        out = conv(leaves[0], given, leaves[1]).sin().sum()
        first = torch.autograd.grad(out, leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    torch.testing.assert_close(*found)


def test_edge_features_on_an_edge_index_sort_once() -> None:
    _, ours = layers('gatv2', heads=2, edge_dim=4)
    graph, _ = prepare_edge_index(edges(SRC, SRC), (SRC, SRC))
    x, attr = features(SRC, 8), features(graph.size(1), 4)
    first = gradients(ours, x, graph, attr)
    assert not sorts_of(lambda: assert_same(first, gradients(ours, x, graph, attr)))
    with torch.no_grad():
        assert not sorts_of(lambda: torch.testing.assert_close(ours(x, graph, attr), first[0]))


def test_one_edge_with_features_is_mapped_once() -> None:
    """One edge has no kernel: PyG's code runs before ours has mapped anything."""
    theirs, ours = layers('gatv2', heads=2, edge_dim=4, add_self_loops=False)
    calls = []
    ours.lin_l.register_forward_hook(lambda *_: calls.append(1))
    x, attr, edges = features(3, 8), features(1, 4), torch.tensor([[0], [1]])
    torch.testing.assert_close(ours(x, edges, attr), theirs(x, edges, attr))
    assert len(calls) == 1


def test_edge_features_that_are_missing_or_not_asked_for() -> None:
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    theirs, ours = layers('gat', heads=2, edge_dim=4)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))
    theirs, ours = layers('gat', heads=2)
    edge_attr = features(EDGES + 30, 7)
    assert_same(
        gradients(theirs, x, edge_index, edge_attr), gradients(ours, x, edge_index, edge_attr)
    )
    theirs, ours = layers('gatv2', heads=2, edge_dim=4)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


# --- inputs --------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('residual', [False, True])
def test_bipartite(kind: str, loops: bool, residual: bool, device: torch.device) -> None:
    theirs, ours = layers(
        kind, (8, 6), heads=2, add_self_loops=loops, residual=residual, device=device
    )  # fmt: skip
    x = features(SRC, 8, device=device), features(DST, 6, device=device)
    edge_index = edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, DST))
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, graph):
        assert_same(expected, gradients(must_fuse(ours), x, given))
        if kind == 'gat':
            assert_same(expected, gradients(ours, x, given, size=(SRC, DST)))
    backwards = edges(DST, SRC).to(device)
    theirs, ours = layers(kind, (6, 8), heads=2, add_self_loops=loops, device=device)
    assert_same(
        gradients(theirs, x[::-1], backwards), gradients(must_fuse(ours), x[::-1], backwards)
    )


@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('size', [(SRC, DST), None])
def test_no_destination_features(
    loops: bool, size: tuple[int, int] | None, device: torch.device
) -> None:
    theirs, ours = layers('gat', (8, 6), heads=2, add_self_loops=loops, device=device)
    x, edge_index = (features(SRC, 8, device=device), None), edges().to(device)
    expected = gradients(theirs, x, edge_index, size=size)
    assert expected[0].size(0) == (SRC if size is None else DST)
    assert_same(expected, gradients(ours, x, edge_index, size=size))
    if size is not None:
        graph, _ = prepare_edge_index(edge_index, size)
        assert_same(expected, gradients(ours, x, graph, size=size))


@both
def test_pairs_for_one_size_and_tensors_for_two(kind: str) -> None:
    edge_index = edges(SRC, SRC)
    theirs, ours = layers(kind, 8, heads=2)
    pair = features(SRC, 8), features(SRC, 8)
    assert_same(gradients(theirs, pair, edge_index), gradients(must_fuse(ours), pair, edge_index))
    theirs, ours = layers(kind, (8, 8), heads=2)
    x = features(SRC, 8)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))


@both
@pytest.mark.parametrize('loops', [False, True])
def test_target_to_source(kind: str, loops: bool, device: torch.device) -> None:
    theirs, ours = layers(
        kind, heads=2, add_self_loops=loops, flow='target_to_source', device=device
    )  # fmt: skip
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, SRC))
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, graph):
        assert_same(expected, gradients(ours, x, given))
    pair = x, features(SRC, 8, device=device)
    assert_same(gradients(theirs, pair, edge_index), gradients(ours, pair, edge_index))


@both
def test_lazy_channels(kind: str, device: torch.device) -> None:
    theirs, ours = KINDS[kind]
    for channels, x in (
        (-1, features(SRC, 8, device=device)),
        ((-1, -1), (features(SRC, 8, device=device), features(DST, 6, device=device))),
    ):
        lazy = ours(channels, 5, heads=2, residual=True).to(device, torch.float64)
        edge_index = edges(SRC, DST if isinstance(x, tuple) else SRC).to(device)
        first = lazy(x, edge_index)
        sizes = (8, 6) if isinstance(x, tuple) else 8
        base = theirs(sizes, 5, heads=2, residual=True).to(device, torch.float64)
        base.load_state_dict(lazy.state_dict())
        torch.testing.assert_close(first, base(x, edge_index))
        assert_same(gradients(base, x, edge_index), gradients(must_fuse(lazy), x, edge_index))


@both
@pytest.mark.parametrize('num_nodes', [0, 4])
@pytest.mark.parametrize('loops', [False, True])
def test_no_edges(kind: str, num_nodes: int, loops: bool, device: torch.device) -> None:
    theirs, ours = layers(kind, heads=2, add_self_loops=loops, device=device)
    x = features(num_nodes, 8, device=device)
    edge_index = torch.empty(2, 0, dtype=torch.long, device=device)
    graph, _ = prepare_edge_index(edge_index, (num_nodes, num_nodes))
    for given in (edge_index, graph):
        assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, given))


@pytest.mark.parametrize('num_nodes', [0, 4])
@pytest.mark.parametrize('loops', [False, True])
def test_no_edges_with_features(num_nodes: int, loops: bool, device: torch.device) -> None:
    """PyG leaves no gradient, where zeros would let weight decay change the parameters."""
    edge_index = torch.empty(2, 0, dtype=torch.long, device=device)
    x = features(num_nodes, 8, device=device).requires_grad_()
    edge_attr = features(0, 3, device=device).requires_grad_()
    theirs, ours = layers('gat', heads=2, edge_dim=3, add_self_loops=loops, device=device)
    found = []
    for conv in theirs, must_fuse(ours):
        inputs = [x, edge_attr, *conv.parameters()]
        out = conv(x, edge_index, edge_attr)
        found.append([out, *torch.autograd.grad(out.sum(), inputs, allow_unused=True)])
    for expected, got in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected)


@both
def test_strided_input_and_small_indices(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, heads=2, device=device)
    x, edge_index = features(8, SRC, device=device).t(), edges(SRC, SRC).to(device)
    expected = gradients(theirs, x, edge_index)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        assert_same(expected, gradients(must_fuse(ours), x, edge_index.to(dtype)))


@both
@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('layout', [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.filterwarnings('ignore:Converting sparse tensor', 'ignore:Sparse')
def test_torch_sparse(kind: str, layout: torch.layout, loops: bool) -> None:
    theirs, ours = layers(kind, heads=2, add_self_loops=loops, dtype=torch.float32)
    row, col = edges(SRC, SRC).flip(0).unique(dim=1)
    adj_t = torch.sparse_coo_tensor(
        torch.stack([row, col]), torch.rand(row.numel()), (SRC, SRC), is_coalesced=True
    )
    adj_t = adj_t.coalesce() if layout == torch.sparse_coo else adj_t.to_sparse_csr()
    x = features(SRC, 8, dtype=torch.float32)
    torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))


@both
@pytest.mark.filterwarnings('ignore:Sparse')
def test_what_is_left_to_pyg_is_mapped_once(kind: str) -> None:
    theirs, ours = layers(kind, heads=2, add_self_loops=False)
    index = edges(SRC, SRC).unique(dim=1)
    values = torch.ones(index.size(1), dtype=torch.float64, requires_grad=True)
    adj_t = torch.sparse_coo_tensor(index, values, (SRC, SRC), is_coalesced=True)
    x, calls = features(SRC, 8), []
    (ours.lin if kind == 'gat' else ours.lin_l).register_forward_hook(
        lambda *args: calls.append(args)
    )
    torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))
    assert len(calls) == 1


@both
@pytest.mark.parametrize('loops', [False, True])
def test_sparse_tensor(kind: str, loops: bool) -> None:
    torch_sparse = pytest.importorskip('torch_sparse')
    theirs, ours = layers(kind, heads=2, add_self_loops=loops, dtype=torch.float32)
    row, col = edges(SRC, SRC).flip(0).unique(dim=1)
    adj_t = torch_sparse.SparseTensor(row=row, col=col, sparse_sizes=(SRC, SRC))
    x = features(SRC, 8, dtype=torch.float32)
    assert_same(gradients(theirs, x, adj_t), gradients(ours, x, adj_t))


@both
@pytest.mark.parametrize('prepared', [False, True])
def test_gradient_of_each_parameter_alone(kind: str, prepared: bool) -> None:
    theirs, ours = layers(kind, heads=2, edge_dim=4 if kind == 'gat' else None, residual=True)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    graph, edge_attr = edge_index, features(EDGES + 30, 4) if kind == 'gat' else None
    if prepared:
        graph, order = prepare_edge_index(edge_index, (SRC, SRC))
        edge_index, edge_attr = (
            edge_index[:, order],
            None if edge_attr is None else edge_attr[order],
        )
    for conv in (theirs, must_fuse(ours)):
        conv.requires_grad_(False)
    torch.testing.assert_close(ours(x, graph, edge_attr), theirs(x, edge_index, edge_attr))
    assert not ours(x, graph, edge_attr).requires_grad
    for name, _ in theirs.named_parameters():
        grads = []
        for conv, given in ((theirs, edge_index), (ours, graph)):
            parameter = dict(conv.named_parameters())[name].requires_grad_()
            out = conv(x, given, edge_attr)
            grads.append(torch.autograd.grad(out.pow(2).sum(), parameter)[0])
            parameter.requires_grad_(False)
        torch.testing.assert_close(grads[1], grads[0])


@both
@pytest.mark.parametrize('aggr', ['mean', 'max'])
def test_other_aggregations_are_left_to_pyg(kind: str, aggr: str) -> None:
    theirs, ours = layers(kind, heads=2, aggr=aggr)
    x, edge_index = features(SRC, 8), edges(SRC, SRC).unique(dim=1)
    edge_index = edge_index[:, edge_index[1].argsort()]
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@both
@pytest.mark.parametrize('form', ['plain', 'prepared', 'no_grad'])
def test_sorts_no_more_than_backward_needs(kind: str, form: str) -> None:
    _, ours = layers(kind, heads=2)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    if form == 'prepared':
        edge_index, _ = prepare_edge_index(edge_index, (SRC, SRC))
        ours(x, edge_index)
    with torch.profiler.profile() as profile, torch.set_grad_enabled(form != 'no_grad'):
        out = ours(x, edge_index).sum()
        if out.requires_grad:
            out.backward()
    count = {event.key: event.count for event in profile.key_averages()}
    names = ('to_csr', 'to_csr_csc', 'to_csr_unweighted', 'transpose_csr')
    sorts = tuple(count.get(f'pyg_fast::{op}', 0) for op in names)
    assert sorts == {
        'plain': (0, 0, 1, 1), 'prepared': (0, 0, 0, 0), 'no_grad': (0, 0, 1, 0)
    }[form]  # fmt: skip


@both
def test_no_tensor_of_edges_times_heads(kind: str) -> None:
    num_nodes, num_edges, heads = 100, 50_000, 16
    _, ours = layers(kind, out_channels=4, heads=heads, dropout=0.5, dtype=torch.float32)
    x = features(num_nodes, 8, dtype=torch.float32)
    edge_index = torch.randint(num_nodes, (2, num_edges))
    with torch.profiler.profile(profile_memory=True) as profile:
        ours.train()(x, edge_index).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < num_edges * heads  # a byte for each edge and head; an index takes 8


# --- precision -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ['heads', 'mean', 'residual'])
def test_dtypes(kind: str, dtype: torch.dtype, name: str, device: torch.device) -> None:
    theirs, ours = layers(kind, device=device, dtype=dtype, **OPTIONS[name])
    x, edge_index = features(SRC, 8, device=device, dtype=dtype), edges(SRC, SRC).to(device)
    expected, got = (gradients(conv, x, edge_index) for conv in (theirs, must_fuse(ours)))
    assert all(v.dtype == dtype for v in got)
    exact = gradients(theirs.double(), x.double(), edge_index)
    assert_no_farther(exact, expected, got, torch.finfo(dtype).eps)


@both
@pytest.mark.parametrize('name', ['heads', 'mean', 'residual', 'no bias'])
def test_autocast(kind: str, name: str, device: torch.device) -> None:
    theirs, ours = layers(kind, device=device, dtype=torch.float32, **OPTIONS[name])
    x, edge_index = features(SRC, 8, device=device, dtype=torch.float32), edges(SRC, SRC).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        expected, got = (gradients(c, x, edge_index) for c in (theirs, must_fuse(ours)))
    assert [v.dtype for v in got] == [v.dtype for v in expected]
    exact = gradients(theirs.double(), x.double(), edge_index)
    assert_no_farther(exact, expected, got, torch.finfo(torch.bfloat16).eps)
    with torch.autocast(device.type, torch.bfloat16):
        assert ours.double()(x.double(), edge_index).dtype == torch.float64


@both
def test_large_scores_of_half_precision(kind: str, device: torch.device) -> None:
    # Scores beyond what float16 holds, of an output well within.
    _, ours = layers(kind, heads=2, device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.startswith('att'):
                parameter.mul_(30_000)
    lin = ours.lin if kind == 'gat' else ours.lin_l
    largest = float(lin(x).abs().max() + ours.bias.abs().max())
    out = must_fuse(ours).half()(x.half(), edge_index)
    assert out.isfinite().all()
    assert float(out.abs().max()) < 1.1 * largest


# --- dropout -------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize('loops', [False, True])
def test_dropout_is_that_of_a_composition(kind: str, loops: bool, device: torch.device) -> None:
    heads, p = 3, 0.4
    edge_index = edges(SRC, SRC).unique(dim=1)
    edge_index = edge_index[:, torch.randperm(edge_index.size(1))].to(device)
    theirs, ours = layers(kind, heads=heads, dropout=p, add_self_loops=loops, device=device)
    # Layers draw alike from one seed: one whose nodes send unit vectors shows what was kept.
    _, probe = layers(kind, SRC, SRC, heads=heads, dropout=p, add_self_loops=loops, device=device)
    with torch.no_grad():
        eye = torch.eye(SRC, dtype=torch.float64, device=device)
        (probe.lin if kind == 'gat' else probe.lin_l).weight.copy_(eye.repeat(heads, 1))
        probe.bias.zero_()
        if kind == 'gatv2':
            probe.lin_l.bias.zero_()
        torch.manual_seed(3)
        sent = must_fuse(probe).train()(eye, edge_index).view(SRC, heads, SRC)

    x = features(SRC, 8, device=device)

    def composed(x: Tensor, edge_index: Tensor, edge_attr: None) -> Tensor:
        _, (edge, alpha) = theirs(x, edge_index, return_attention_weights=True)
        kept = (sent[edge[1], :, edge[0]] != 0) / (1 - p)
        assert 0 < (kept == 0).sum() < kept.numel()
        messages = (theirs.lin if kind == 'gat' else theirs.lin_l)(x).view(-1, heads, 5)[edge[0]]
        out = torch.zeros(SRC, heads, 5, dtype=x.dtype, device=x.device)
        out = out.index_add(0, edge[1], (kept * alpha).unsqueeze(-1) * messages)
        return out.flatten(1) + theirs.bias

    composed.parameters = theirs.eval().parameters  # type: ignore[attr-defined]
    torch.manual_seed(3)
    got = gradients(must_fuse(ours).train(), x, edge_index)
    assert_same(gradients(composed, x, edge_index), got)


@both
def test_dropout_in_training_only(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, heads=2, dropout=0.6, device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    must_fuse(ours)
    plain = gradients(theirs.eval(), x, edge_index)
    assert_same(plain, gradients(ours.eval(), x, edge_index))
    ours.train()
    torch.manual_seed(1)
    first, second = gradients(ours, x, edge_index), gradients(ours, x, edge_index)
    torch.manual_seed(1)
    assert all(map(torch.equal, first, gradients(ours, x, edge_index)))
    assert not torch.allclose(first[0], second[0])
    assert not torch.allclose(first[0], plain[0])
    mean = sum(ours(x, edge_index).detach() for _ in range(600)) / 600
    assert float((mean - plain[0]).abs().max()) < 0.5
    theirs.dropout = ours.dropout = 1.0
    assert_same(gradients(theirs.train(), x, edge_index), gradients(ours, x, edge_index))


# --- PyG's own path ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize('wanted', [True, False])
@pytest.mark.parametrize('loops', [False, True])
def test_attention_weights(kind: str, wanted: bool, loops: bool, device: torch.device) -> None:
    theirs, ours = layers(kind, heads=2, add_self_loops=loops, device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    expected, got = (c(x, edge_index, return_attention_weights=wanted) for c in (theirs, ours))
    assert isinstance(expected, tuple) == wanted
    torch.testing.assert_close(got, expected)
    prepared, _ = prepare_edge_index(edge_index, (SRC, SRC))
    if wanted:
        torch.testing.assert_close(ours(x, prepared, return_attention_weights=True)[0], got[0])


@both
@pytest.mark.parametrize('name', ['message', 'aggregate', 'propagate', 'edge_update'])
def test_message_passing_hooks_run(kind: str, name: str) -> None:
    theirs, ours = layers(kind, heads=2)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    plain = theirs(x, edge_index)
    handles = [
        getattr(conv, f'register_{name}_forward_hook')(lambda module, args, out: 2 * out)
        for conv in (theirs, ours)
    ]
    hooked = gradients(theirs, x, edge_index)
    assert not torch.allclose(hooked[0], plain)
    assert_same(hooked, gradients(ours, x, edge_index))
    for handle in handles:
        handle.remove()
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))


@both
def test_module_hooks_run(kind: str) -> None:
    theirs, ours = layers(kind, heads=2, residual=True)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    plain = theirs(x, edge_index)
    for conv in (theirs, ours):
        for linear in (conv.lin if kind == 'gat' else conv.lin_l, conv.res):
            linear.register_forward_hook(lambda module, args, out: 2 * out)
    hooked = gradients(theirs, x, edge_index)
    assert not torch.allclose(hooked[0], plain)
    assert_same(hooked, gradients(ours, x, edge_index))


@both
def test_explain(kind: str) -> None:
    theirs, ours = layers(kind, heads=2)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    plain = theirs(x, edge_index)
    for conv in (theirs, ours):
        conv.explain = True
        conv._edge_mask = torch.linspace(-1, 1, edge_index.size(1), dtype=torch.float64)
        conv._loop_mask = edge_index[0] != edge_index[1]
        conv._apply_sigmoid = True
    masked = gradients(theirs, x, edge_index)
    assert not torch.allclose(masked[0], plain)
    assert_same(masked, gradients(ours, x, edge_index))
    ours.explain = False
    torch.testing.assert_close(must_fuse(ours)(x, edge_index), plain)


@both
def test_explainer(kind: str) -> None:
    x, edge_index = features(SRC, 8, dtype=torch.float32), edges(SRC, SRC)
    masks = []
    for conv in layers(kind, heads=2, dtype=torch.float32):
        torch.manual_seed(1)
        explainer = Explainer(
            conv, GNNExplainer(epochs=5), explanation_type='model', edge_mask_type='object',
            node_mask_type='attributes',
            model_config={
                'mode': 'multiclass_classification', 'task_level': 'node', 'return_type': 'raw'
            },
        )  # fmt: skip
        explanation = explainer(x, edge_index, index=3)
        masks.append((explanation.edge_mask, explanation.node_mask))
        plain = conv(x, edge_index)
    torch.testing.assert_close(masks[1], masks[0])
    assert masks[0][0].unique().numel() > 5
    torch.testing.assert_close(must_fuse(conv)(x, edge_index), plain)


class OwnMethods:
    """Methods that double what PyG's own give."""

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return 2 * alpha.unsqueeze(-1) * x_j

    def update(self, inputs: Tensor) -> Tensor:
        return 2 * inputs

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any, dim_size: Any) -> Tensor:
        return 2 * MessagePassing.aggregate(self, inputs, index, ptr, dim_size)


class OwnMethodsOfGAT(OwnMethods):
    def edge_update(
        self, alpha_j: Tensor, alpha_i: Any, edge_attr: Any, index: Tensor, ptr: Any, dim_size: Any
    ) -> Tensor:
        return 2 * GATConv.edge_update(self, alpha_j, alpha_i, edge_attr, index, ptr, dim_size)


class OwnMethodsOfGATv2(OwnMethods):
    def edge_update(
        self, x_j: Tensor, x_i: Tensor, edge_attr: Any, index: Tensor, ptr: Any, dim_size: Any
    ) -> Tensor:
        return 2 * GATv2Conv.edge_update(self, x_j, x_i, edge_attr, index, ptr, dim_size)


@pytest.mark.parametrize('method', ['message', 'update', 'aggregate', 'edge_update'])
@both
def test_subclass_with_a_method_of_its_own(kind: str, method: str) -> None:
    own = getattr(OwnMethodsOfGAT if kind == 'gat' else OwnMethodsOfGATv2, method)
    cls = type(f'Own_{method}_{kind}', (KINDS[kind][1],), {method: own})
    theirs, _ = layers(kind, heads=2, bias=False)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    conv = cls(8, 5, heads=2, bias=False).double()
    conv.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(conv(x, edge_index), 2 * theirs(x, edge_index))


# --- as a module ---------------------------------------------------------------------------------


@both
def test_to_base(kind: str) -> None:
    theirs, ours = layers(kind, heads=2, residual=True)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    base = ours.to_base()
    assert type(base) is KINDS[kind][0]
    assert all(a is b for a, b in zip(base.parameters(), ours.parameters(), strict=True))
    assert_same(gradients(theirs, x, edge_index), gradients(base, x, edge_index))


def saved(conv: Any) -> Any:
    file = io.BytesIO()
    torch.save(conv, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@both
@pytest.mark.parametrize(
    'copied',
    [copy.deepcopy, lambda conv: pickle.loads(pickle.dumps(conv)), saved],
    ids=['copy', 'pickle', 'save'],
)
def test_copies(kind: str, copied: Callable) -> None:
    theirs, ours = layers(kind, heads=2)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    ours(x, edge_index)
    again = copied(ours)
    assert type(again) is KINDS[kind][1]
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(again), x, edge_index))


@both
def test_parameters_and_repr_are_those_of_pyg(kind: str) -> None:
    for channels, options in (
        (8, OPTIONS['default']),
        ((8, 6), {**OPTIONS['residual'], 'edge_dim': 4}),
        (8, OPTIONS['all']),
    ):
        torch.manual_seed(4)
        theirs = KINDS[kind][0](channels, 5, **options)
        torch.manual_seed(4)
        ours = KINDS[kind][1](channels, 5, **options)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))  # initialised alike
        ours.reset_parameters()
        theirs.load_state_dict(ours.state_dict())
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        assert repr(ours) == repr(theirs).replace('GAT', 'FusedGAT')


@both
def test_accelerate_and_restore(kind: str) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = KINDS[kind][0](8, 4, heads=3, dropout=0.5, residual=True)
            self.last = KINDS[kind][0](12, 5, heads=2, concat=False)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: None = None) -> Tensor:
            return self.last(self.first(x, edge_index).relu(), edge_index)

    theirs = Net().double().eval()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    assert {type(conv) for conv in ours.children()} == {KINDS[kind][1]}
    for conv in ours.children():
        must_fuse(conv)
    x, edge_index = features(SRC, 8), edges(SRC, SRC)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))
    for conv in ours.children():
        may_leave(conv)
    parameters = list(ours.parameters())
    pyg_fast.restore(ours)
    assert {type(conv) for conv in ours.children()} == {KINDS[kind][0]}
    assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


PYGS_OWN = """
import sys, types
import torch, torch_geometric
from torch_geometric.nn import FusedGATConv as Theirs, GATConv
from pyg_fast.nn import FusedGATConv as Ours
assert Theirs is torch_geometric.nn.FusedGATConv is not Ours
operators = types.ModuleType('dgNN.operators')  # which only their forward calls
operators.GATConvFuse = None
sys.modules['dgNN'], sys.modules['dgNN.operators'] = types.ModuleType('dgNN'), operators
made = {'theirs': lambda: Theirs(8, 5, add_self_loops=False), 'ours': lambda: Ours(8, 5),
        'base': lambda: GATConv(8, 5)}
layers = {name: made[name]() for name in sys.argv[1:]}
x, edge_index = torch.randn(30, 8), torch.randint(30, (2, 99))
base, ours = layers['base'], layers['ours']
ours.load_state_dict(base.state_dict())
expected, weights = base(x, edge_index, return_attention_weights=True)
torch.testing.assert_close(ours(x, edge_index), expected)
torch.testing.assert_close(ours(x, edge_index, return_attention_weights=True), (expected, weights))
for conv in (base, ours):
    conv.explain, conv._apply_sigmoid = True, True
    conv._edge_mask = torch.linspace(-1, 1, 99)
    conv._loop_mask = edge_index[0] != edge_index[1]
torch.testing.assert_close(ours(x, edge_index), base(x, edge_index))
assert not torch.allclose(ours(x, edge_index), expected)
assert type(layers['theirs']).__module__.startswith('torch_geometric')
"""


@pytest.mark.parametrize('order', ['theirs ours base', 'ours base theirs'])
def test_beside_pygs_own_class_of_the_name(order: str) -> None:
    assert torch_geometric.nn.FusedGATConv is not FusedGATConv
    result = _forks.run('-c', PYGS_OWN, *order.split())
    assert result.returncode == 0, result.stderr[-3000:]


# --- compilation, derivatives --------------------------------------------------------------------


@pairs(('name', 'kind', 'prepared'), ['default', 'mean', 'no loops'], [*KINDS], [False, True])
def test_compile(kind: str, name: str, prepared: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = layers(kind, device=device, **OPTIONS[name])
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    graph = prepare_edge_index(edge_index, (SRC, SRC))[0] if prepared else edge_index
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, graph))


@pytest.mark.parametrize(('kind', 'prepared'), [('gat', False), ('gat', True), ('gatv2', True)])
def test_compile_bipartite(kind: str, prepared: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = layers(kind, (8, 6), heads=2, device=device)
    x = features(SRC, 8, device=device), features(DST, 6, device=device)
    edge_index = edges().to(device)
    graph = prepare_edge_index(edge_index, (SRC, DST))[0] if prepared else edge_index
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, graph))


@pairs(('fill', 'prepared', 'of_edges'), ['mean', 'number'], [False, True], [False, True])
def test_compile_edge_features(
    fill: str, prepared: bool, of_edges: bool, device: torch.device
) -> None:
    torch._dynamo.reset()
    theirs, ours = layers('gat', heads=2, edge_dim=4, fill_value=FILL[fill](), device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    edge_attr = features(edge_index.size(1), 4, device=device)
    graph = edge_index
    if prepared:
        graph, order = prepare_edge_index(edge_index, (SRC, SRC))
        edge_index, edge_attr = graph.as_tensor(), edge_attr[order]
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(
        gradients(theirs, x, edge_index, edge_attr, of_edges=of_edges),
        gradients(compiled, x, graph, edge_attr, of_edges=of_edges),
    )


@pytest.mark.parametrize(
    ('flow', 'fill', 'prepared', 'loops'),
    [
        ('source_to_target', 'mean', False, True), ('source_to_target', 'number', True, True),
        ('target_to_source', 'max', False, True), ('source_to_target', 'mean', True, False),
        ('target_to_source', 'mean', False, False),
    ],
)  # fmt: skip
def test_compile_edge_features_of_gatv2(
    flow: str, fill: str, prepared: bool, loops: bool, device: torch.device
) -> None:
    """A kernel, in one graph: PyG's code breaks it where it removes self-loops."""
    torch._dynamo.reset()
    options = dict(heads=2, edge_dim=4, fill_value=FILL[fill](), residual=True, flow=flow)
    theirs, ours = layers('gatv2', device=device, add_self_loops=loops, **options)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    edge_attr = features(edge_index.size(1), 4, device=device)
    graph = edge_index
    if prepared:
        graph, order = prepare_edge_index(edge_index, (SRC, SRC))
        edge_index, edge_attr = graph.as_tensor(), edge_attr[order]
    backend = Backend()
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend=backend)
    assert_same(
        gradients(theirs, x, edge_index, edge_attr, of_edges=True),
        gradients(compiled, x, graph, edge_attr, of_edges=True),
    )
    assert backend.kernels == backend.frames == 1


@pytest.mark.parametrize('loops', [True, False])
def test_compile_edge_features_of_gatv2_by_another_backend(
    loops: bool, device: torch.device
) -> None:
    """It runs PyG's code, in one graph too."""
    torch._dynamo.reset()
    options = dict(heads=2, edge_dim=4, residual=True, add_self_loops=loops)
    theirs, ours = layers('gatv2', device=device, **options)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    edge_attr = features(edge_index.size(1), 4, device=device)
    graph = edge_index
    if not loops:
        graph, order = prepare_edge_index(edge_index, (SRC, SRC))
        edge_index, edge_attr = graph.as_tensor(), edge_attr[order]
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(
        gradients(theirs, x, edge_index, edge_attr), gradients(compiled, x, graph, edge_attr)
    )


def test_compile_bipartite_edge_features_of_gatv2(device: torch.device) -> None:
    sizes = DST, SRC
    torch._dynamo.reset()
    theirs, ours = layers('gatv2', (8, 6), edge_dim=4, fill_value=1.5, device=device)
    x = features(sizes[0], 8, device=device), features(sizes[1], 6, device=device)
    edge_index = edges(*sizes).to(device)
    edge_attr = features(edge_index.size(1), 4, device=device)
    backend = Backend()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    assert_same(
        gradients(theirs, x, edge_index, edge_attr), gradients(compiled, x, edge_index, edge_attr)
    )
    assert backend.kernels == 1


def test_compiled_gatv2_does_not_drop_a_node_that_is_missing() -> None:
    """One beyond the last stands for self-loops that are left out."""
    torch._dynamo.reset()
    _, ours = layers('gatv2', edge_dim=4)
    edge_index = edges(SRC, SRC)
    edge_index[1, 3] = SRC
    compiled = torch.compile(ours, fullgraph=True, backend=Backend())
    with pytest.raises((IndexError, RuntimeError)):
        compiled(features(SRC, 8), edge_index, features(edge_index.size(1), 4))


@both
def test_compiled_dropout(kind: str, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = layers(kind, heads=2, dropout=0.5, device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    torch.manual_seed(7)
    first, second = (gradients(compiled, x, edge_index) for _ in range(2))
    torch.manual_seed(7)
    assert_same(first, gradients(compiled, x, edge_index))
    assert not torch.allclose(first[0], second[0])
    ours.eval()
    assert_same(gradients(theirs.eval(), x, edge_index), gradients(compiled, x, edge_index))


@both
def test_second_derivatives(kind: str, device: torch.device) -> None:
    edge_index = edges(7, 7, 23)[:, :40].to(device)
    _, ours = layers(kind, 3, 2, heads=2, dropout=0.3, device=device)
    name = 'lin.weight' if kind == 'gat' else 'lin_l.weight'
    weight = dict(ours.named_parameters())[name].detach().clone().requires_grad_()

    def run(x: Tensor, weight: Tensor) -> Tensor:
        torch.manual_seed(2)
        return torch.func.functional_call(must_fuse(ours), {name: weight}, (x, edge_index))

    x = features(7, 3, device=device).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weight))
    assert torch.autograd.gradgradcheck(run, (x, weight), nondet_tol=1e-9)


@pytest.mark.parametrize('of_edges', [False, True])
def test_second_derivatives_of_edge_scores(of_edges: bool, device: torch.device) -> None:
    edge_index = edges(7, 7, 23)[:, :40].to(device)
    _, ours = layers('gat', 3, 2, heads=2, edge_dim=3, device=device)
    weight = ours.lin_edge.weight.detach().clone().requires_grad_()
    edge_attr = features(edge_index.size(1), 3, device=device).requires_grad_(of_edges)
    x = features(7, 3, device=device).requires_grad_()

    def run(x: Tensor, edge_attr: Tensor, weight: Tensor) -> Tensor:
        new = {'lin_edge.weight': weight}
        return torch.func.functional_call(must_fuse(ours), new, (x, edge_index, edge_attr))

    assert torch.autograd.gradcheck(run, (x, edge_attr, weight))
    assert torch.autograd.gradgradcheck(run, (x, edge_attr, weight), nondet_tol=1e-9)


@both
def test_graph_first_met_in_inference_mode(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, heads=2, device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    prepared, _ = prepare_edge_index(edge_index, (SRC, SRC))
    with torch.inference_mode():
        ours(x, prepared)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, prepared))


# --- bad input -----------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ('error', 'match', 'options'),
    [
        (ValueError, "'heads'", {'heads': 0}),
        (ValueError, "'heads'", {'heads': -2}),
        (ValueError, "'dropout'", {'dropout': -0.1}),
        (ValueError, "'dropout'", {'dropout': 1.5}),
        (ValueError, "'dropout'", {'dropout': float('nan')}),
    ],
)
def test_bad_options(kind: str, error: type, match: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=match):
        KINDS[kind][1](8, 5, **options)


@both
def test_bad_input(kind: str, device: torch.device, raises: Any) -> None:
    _, ours = layers(kind, (8, 6), heads=2, device=device, dtype=torch.float32)
    x = tuple(
        features(n, f, device=device, dtype=torch.float32) for n, f in ((SRC, 8), (DST, 6))
    )  # fmt: skip
    edge_index = edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, DST))
    for end, value in ((0, SRC), (1, DST), (0, -1), (1, -1)):
        wrong = edge_index.clone()
        wrong[end, 3] = value
        with raises(IndexError, match=rf'edge_index\[{end}\]'):
            ours(x, wrong)
    with raises(ValueError, match='size'):
        ours((x[0][1:], x[1]), graph)
    with raises(ValueError, match='size'):
        ours((x[0], x[1][1:]), graph)
    with raises(ValueError, match='shape'):
        ours(x, edge_index[:, None])
    with raises(ValueError, match="'edge_index' is on meta"):
        ours(x, edge_index.to('meta'))
    if kind == 'gat':
        with raises(ValueError, match='size'):
            ours(x, edge_index, size=(SRC + 1, DST))
        with raises(ValueError, match='size'):
            ours(x, edge_index, size=(SRC, DST + 1))


WRONG_EDGE_FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    'narrow': lambda t: t[:, 1:],
    'wide': lambda t: torch.cat([t, t], dim=1),
    'vector': lambda t: t[:, 0],
    'cube': lambda t: t[:, :, None],
    'short': lambda t: t[1:],
    'long': lambda t: torch.cat([t, t]),
    'on meta': lambda t: t.to('meta'),
}


@both
@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('wrong', WRONG_EDGE_FEATURES)
def test_bad_edge_features(kind: str, wrong: str, loops: bool, device: torch.device) -> None:
    _, ours = layers(kind, heads=2, edge_dim=4, add_self_loops=loops, device=device)
    x, edge_index = features(SRC, 8, device=device), edges(SRC, SRC).to(device)
    edge_attr = WRONG_EDGE_FEATURES[wrong](features(edge_index.size(1), 4, device=device))
    with pytest.raises(ValueError, match="'edge_attr'.*" + ('on meta' if 'meta' in wrong else '')):
        ours(x, edge_index, edge_attr)


@both
def test_static_graphs_are_refused_as_by_pyg(kind: str) -> None:
    for conv in layers(kind):
        with pytest.raises(AssertionError):
            conv(features(3, SRC, 8), edges(SRC, SRC))


@pytest.mark.parametrize('kind', KINDS)
def test_edge_dim_without_edge_attr(kind: str) -> None:
    """As in PyG, but each layer tells once."""
    x, edge_index = torch.randn(9, 4), torch.randint(9, (2, 40))
    theirs, ours = KINDS[kind]
    for conv in (ours(4, 2, edge_dim=3), pyg_fast.accelerate(theirs(4, 2, edge_dim=3))):
        with pytest.warns(UserWarning, match="'edge_attr' is missing, .* 'edge_dim'") as found:
            out = conv(x, edge_index)
        assert found[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            conv(x, edge_index)
        torch.testing.assert_close(out, theirs.forward(conv, x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
def test_edge_attr_without_edge_dim(kind: str) -> None:
    """PyG's GATConv ignores it in silence, and GATv2Conv raises an error without text."""
    x, edge_index, edge_attr = torch.randn(9, 4), torch.randint(9, (2, 40)), torch.randn(40, 3)
    theirs, ours = KINDS[kind]
    conv = ours(4, 2)
    if kind == 'gatv2':
        with pytest.raises(AssertionError, match="'edge_attr' must not be given .* 'edge_dim'"):
            conv(x, edge_index, edge_attr)
        return
    with pytest.warns(UserWarning, match="'edge_attr' has no effect without 'edge_dim'"):
        out = conv(x, edge_index, edge_attr)
    torch.testing.assert_close(out, theirs.forward(conv, x, edge_index))
