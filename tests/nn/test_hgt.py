"""HGTConv: one product for the matrices of all relations of a type, beside PyG's layer on the same
weights."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import UserError
from torch_geometric import EdgeIndex
from torch_geometric.nn import HGTConv
from torch_geometric.nn.dense import HeteroLinear

import pyg_fast
from pyg_fast.graph import Graph, PreparedGraph
from tests._report import plan_of, what_ran, why_pygs_maps
from tests.nn._layers import assert_alike, both, run

TYPES = {'a': 9, 'b': 14, 'c': 5, 'd': 0}
WIDTH, OUT = 6, 8


def relations(seed: int) -> list[tuple[str, str, str]]:
    """Random ones, in random order: several between the same types, types without any."""
    draw = random.Random(seed)
    return [(draw.choice('abcd'), f'r{k}', draw.choice('abc')) for k in range(draw.randint(2, 7))]


def given(
    metadata: Any, device: torch.device, dtype: torch.dtype = torch.float64, **widths: int
) -> tuple[dict[str, Tensor], dict[Any, Tensor]]:
    """Features that require gradients, and edges, with duplicates."""
    generator = torch.Generator().manual_seed(3)
    x = {
        name: torch.randn(TYPES[name], widths.get(name, WIDTH), generator=generator,
                          dtype=torch.float64).to(device, dtype).requires_grad_()
        for name in metadata[0]
    }  # fmt: skip
    edges = {}
    for src, kind, dst in metadata[1]:
        sizes = torch.tensor([[TYPES[src]], [TYPES[dst]]])
        count = 0 if 0 in sizes else 30
        ends = torch.rand(2, count, generator=generator) * sizes
        edges[src, kind, dst] = ends.long().to(device)
    return x, edges


PLAIN = (['a', 'b', 'c'], [('a', 'r', 'b'), ('b', 's', 'a'), ('a', 't', 'a'), ('c', 'u', 'b')])


def layers(
    device: torch.device, metadata: Any = PLAIN, in_channels: Any = WIDTH, out: int = OUT,
    heads: int = 4, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    torch.manual_seed(1)
    return both(HGTConv(in_channels, out, metadata, heads, **options), device)


def check(theirs: Any, ours: Any, args: Any, reason: str | None = None) -> None:
    """Compares results and gradients; `reason` is why PyG's code multiplied by matrices."""
    assert_alike(run(ours, list(args)), run(theirs, list(args)), 1e-9)
    assert list(ours(*args)) == list(theirs(*args))
    assert (why_pygs_maps(ours) != '') == (reason is not None)
    assert (reason or '') in why_pygs_maps(ours)


@pytest.fixture(params=[1, 4, 64], ids=['each_head', 'pairs_of_heads', 'all_heads'])
def least(request: pytest.FixtureRequest, limits: Callable[..., None]) -> int:
    limits(width_of_maps=request.param)
    return request.param


@pytest.mark.parametrize('seed', range(6))
def test_like_pyg(seed: int, least: int, device: torch.device) -> None:
    metadata = (list(TYPES), relations(seed))
    theirs, ours = layers(device, metadata, heads=4 if seed % 2 else 8, out=16)
    check(theirs, ours, given(metadata, device))
    assert what_ran(ours) == 'FusedHGTConv'


def test_no_product_for_each_head(device: torch.device, forbid: Callable[..., None]) -> None:
    _, ours = layers(device)
    forbid(type(ours.k_rel), 'forward_naive')
    ours(*given(PLAIN, device))
    assert 'edge [' not in plan_of(ours)  # Priors are no features of edges.


def test_features_of_several_widths(device: torch.device) -> None:
    """PyG adds those that are as wide as the output to it."""
    widths = {'a': OUT, 'b': 3, 'c': OUT}
    theirs, ours = layers(device, in_channels=widths)
    check(theirs, ours, given(PLAIN, device, **widths))


def test_relations_and_types_left_out(device: torch.device) -> None:
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    left = {name: edges[name] for name in PLAIN[1][:3:2]}
    check(theirs, ours, ({name: x[name] for name in 'ba'}, left))
    for conv in (theirs, ours):
        out = conv(x, left)
        sum(each.sum() for each in out.values()).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)


def test_relations_in_another_order(device: torch.device) -> None:
    """PyG multiplies by other matrices then, which a trained layer may rely on."""
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    check(theirs, ours, (x, dict(reversed(edges.items()))), 'another order')
    assert what_ran(ours) == 'FusedHGTConv'


def test_few_edges(device: torch.device) -> None:
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    for count in (0, 1):
        few = {name: each[:, : count * (name == PLAIN[1][0])] for name, each in edges.items()}
        torch.testing.assert_close(ours(x, few), theirs(x, few))
        assert f'{count} edges' in what_ran(ours)


def test_lazy(device: torch.device) -> None:
    theirs, ours = layers(device, in_channels=-1)
    args = given(PLAIN, device, a=3)
    torch.manual_seed(2)
    expected = theirs(*args)
    torch.manual_seed(2)
    torch.testing.assert_close(ours(*args), expected)
    check(theirs, ours, args)


@pytest.mark.parametrize(
    'made',
    [
        torch.Tensor.int, EdgeIndex,
        lambda each: PreparedGraph(Graph.from_edge_index(each, 14, 14)),
    ],
    ids=['int32', 'EdgeIndex', 'PreparedGraph'],
)  # fmt: skip
def test_kinds_of_edges(made: Any, device: torch.device) -> None:
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    other = {name: made(each) for name, each in edges.items()}
    torch.testing.assert_close(ours(x, other), theirs(x, edges))
    assert why_pygs_maps(ours) == ''


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
def test_narrow(dtype: torch.dtype, device: torch.device) -> None:
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    exact = theirs(x, edges)
    x = {name: each.to(dtype) for name, each in x.items()}
    got, expected = (conv.to(dtype)(x, edges) for conv in (ours, theirs))
    for name, each in exact.items():
        assert got[name].dtype == expected[name].dtype == dtype
        assert (got[name] - each).norm() <= 1.5 * (expected[name] - each).norm()


def test_autocast(device: torch.device) -> None:
    theirs, ours = (conv.float() for conv in layers(device))
    x, edges = given(PLAIN, device, torch.float32)
    exact, sums = theirs(x, edges), []
    for conv in (theirs, ours):
        conv.out_lin.register_forward_pre_hook(lambda module, args: sums.append(args[0]['a'].dtype))
    with torch.autocast(device.type, torch.bfloat16):
        got, expected = (conv(x, edges) for conv in (ours, theirs))
    assert sums[0] == sums[1]
    for name, each in exact.items():
        assert got[name].dtype == expected[name].dtype
        assert (got[name] - each).norm() <= 1.5 * (expected[name] - each).norm()
    assert why_pygs_maps(ours) == ''


def test_second_derivative(device: torch.device) -> None:
    _, ours = layers(device)
    x, edges = given(PLAIN, device)

    def total(*parts: Tensor) -> Tensor:
        out = ours(dict(zip(x, parts, strict=True)), edges)
        return sum(each.sin().sum() for each in out.values())

    # On CUDA torch's second derivatives add with atomics.
    nondet_tol = 1e-9 if device.type == 'cuda' else 0.0
    assert torch.autograd.gradgradcheck(
        total, tuple(x.values()), fast_mode=True, nondet_tol=nondet_tol
    )  # fmt: skip
    assert what_ran(ours) == 'FusedHGTConv'


@pytest.mark.parametrize('name', ['k_rel', 'v_rel'])
def test_observed_maps(name: str, device: torch.device) -> None:
    convs = layers(device)
    args, seen = given(PLAIN, device), []
    for conv in convs:
        getattr(conv, name).register_forward_hook(lambda *args: seen.append(1))
        getattr(conv, name).register_forward_hook(lambda module, args, out: 2 * out)
    check(*convs, args, f'{name} is observed')
    assert len(seen) == 4
    assert what_ran(convs[1]) == 'FusedHGTConv'


def test_replaced_maps(device: torch.device) -> None:
    convs = layers(device)
    for conv in convs:
        torch.manual_seed(4)
        conv.v_rel = HeteroLinear(2, 2, 16, is_sorted=True).double().to(device)
    check(*convs, given(PLAIN, device), 'v_rel')


def test_shared_maps(device: torch.device) -> None:
    convs = layers(device)
    for conv in convs:
        conv.v_rel = conv.k_rel
    check(*convs, given(PLAIN, device))


def test_priors_of_another_type(device: torch.device) -> None:
    convs = [conv.float() for conv in layers(device)]
    x, edges = given(PLAIN, device, torch.float32)
    for conv in convs:
        conv.p_rel.double()
        conv.out_lin.double()
    torch.testing.assert_close(convs[1](x, edges), convs[0](x, edges))
    assert 'p_rel of torch.float64' in why_pygs_maps(convs[1])


@pytest.mark.parametrize('name', ['message', '_construct_src_node_feat'])
def test_patched_class(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = layers(device)
    method = getattr(HGTConv, name)
    if name == 'message':

        def method(self: Any, k_j: Tensor, v_j: Tensor, edge_attr: Tensor, **kwargs: Any) -> Tensor:
            return ((k_j + v_j) * edge_attr.unsqueeze(-1)).view(-1, OUT)

    monkeypatch.setattr(HGTConv, name, lambda *args, **kwargs: method(*args, **kwargs))
    check(theirs, ours, given(PLAIN, device), f'{name} is patched')


def test_patched_layer(device: torch.device) -> None:
    convs = layers(device)
    for conv in convs:
        conv._cat = lambda x_dict, cat=conv._cat: cat({key: 2 * x for key, x in x_dict.items()})
    check(*convs, given(PLAIN, device), 'patched')


def test_maps_of_nodes_may_be_observed(device: torch.device) -> None:
    convs = layers(device)
    for conv in convs:
        conv.kqv_lin.register_forward_hook(
            lambda module, args, out: {key: 2 * x for key, x in out.items()}
        )
        conv.out_lin.lins['a'].register_forward_hook(lambda module, args, out: 2 * out)
    check(*convs, given(PLAIN, device))


def test_hooks(device: torch.device) -> None:
    theirs, ours = layers(device)
    args, seen = given(PLAIN, device), []
    ours.register_propagate_forward_pre_hook(lambda conv, inputs: seen.append(inputs[-1]))
    torch.testing.assert_close(ours(*args), theirs(*args))
    assert seen[0]['edge_attr'].shape == (120, 4)
    assert 'hooks' in what_ran(ours)


def test_sparse(device: torch.device) -> None:
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    sparse = {
        (src, kind, dst): torch.sparse_coo_tensor(
            each.flip(0), torch.ones(30, device=device), (TYPES[dst], TYPES[src])
        )
        for (src, kind, dst), each in edges.items()
    }
    torch.testing.assert_close(ours(x, sparse), theirs(x, edges))
    assert why_pygs_maps(ours).startswith('a sparse matrix')


def test_flow(device: torch.device) -> None:
    """PyG's result is of the same numbers of nodes in any relation only."""
    metadata = (['a'], [('a', 'r', 'a')])
    convs = layers(device, metadata, flow='target_to_source')
    check(*convs, given(metadata, device), 'flow')


@pytest.mark.parametrize('value', [-1, 9, 99])
@pytest.mark.parametrize('row', [0, 1])
def test_unknown_nodes(row: int, value: int, device: torch.device) -> None:
    if device.type == 'cuda':
        pytest.skip('PyG stops the process')
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    edges[PLAIN[1][2]][row, 0] = value  # Of the first type, from which PyG reads into the next.
    try:
        expected = theirs(x, edges)
    except (IndexError, RuntimeError):
        with pytest.raises((IndexError, RuntimeError)):
            ours(x, edges)
    else:
        torch.testing.assert_close(ours(x, edges), expected)


def test_unknown_names(device: torch.device) -> None:
    theirs, ours = layers(device)
    x, edges = given(PLAIN, device)
    for args in (({'a': x['a']}, edges), (x, {('a', 'none', 'b'): edges['a', 'r', 'b']})):
        for conv in (theirs, ours):
            with pytest.raises(KeyError):
                conv(*args)
    for conv in (theirs, ours):
        with pytest.raises((RuntimeError, ValueError)):
            conv(x, {})


def test_compiled(device: torch.device) -> None:
    metadata = (['a', 'b'], [('a', 'r', 'b'), ('b', 's', 'a')])
    theirs, ours = layers(device, metadata, heads=1)
    args = given(metadata, device)
    try:
        torch.compile(theirs, fullgraph=True, backend='eager')(*args)
    except UserError:
        pytest.skip("this torch does not compile PyG's layer")
    compiled = torch.compile(ours, fullgraph=True, backend='eager')
    torch.testing.assert_close(compiled(*args), theirs(*args))


def test_compiled_code_joins_plain_lists(device: torch.device) -> None:
    """Code by Inductor raised an error where PyG joined prepared ones."""
    metadata = (['a', 'b'], [('a', 'r', 'b'), ('b', 's', 'a')])
    theirs, ours = layers(device, metadata, heads=1)
    x, edges = given(metadata, device)
    prepared = {
        key: EdgeIndex(edge, sparse_size=(TYPES[key[0]], TYPES[key[2]])).sort_by('col').values
        for key, edge in edges.items()
    }
    joined: list[bool] = []

    def backend(graph: Any, _: Any) -> Any:
        values = [
            node.meta.get('example_value') for node in graph.graph.nodes if node.op != 'placeholder'
        ]
        joined.extend(isinstance(value, EdgeIndex) and value.size(1) == 60 for value in values)
        return graph

    compiled = torch.compile(ours, backend=backend)
    torch.testing.assert_close(compiled(x, prepared), theirs(x, edges))
    assert joined
    assert not any(joined)


def test_copies(device: torch.device) -> None:
    theirs, ours = layers(device)
    args = given(PLAIN, device)
    expected = theirs(*args)
    ours(*args)
    for conv in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), pyg_fast.restore(ours)):
        assert conv.state_dict().keys() == theirs.state_dict().keys()
        assert '_maps_reason' not in conv.__dict__
        torch.testing.assert_close(conv(*args), expected)
