"""The fused normalisation of a GCN: against PyG's, its gradients, and bad input."""

from importlib import import_module
from typing import Any

import pytest
import torch
from _pairs import pairs
from _raw_ops import reference
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch_geometric import EdgeIndex
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm

from pyg_fast.graph.gcn_norm import normalized
from pyg_fast.ops import gcn_norm
from pyg_fast.ops.aggregate import scatter_sum

from ._graphs import DTYPES, GRAPHS, Edges, assert_near, edge_lists
from ._samples import Given, sample

pytestmark = pytest.mark.usefixtures('several_threads')

MODULE = import_module('pyg_fast.ops.gcn_norm')  # its name is the function's too
INDEX = [torch.int32, torch.int64]
FLOWS = ['source_to_target', 'target_to_source']
SQUARE = {
    'square': GRAPHS['square'],
    'hub': Edges(GRAPHS['in_hubs'].edge_index, 50, 50),
    'no_loops': Edges(torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]]), 4, 4),
    'many_loops': Edges(torch.tensor([[0, 1, 1, 2, 1, 1], [1, 1, 0, 2, 1, 3]]), 5, 5),
    'one_node': GRAPHS['one_node'],
    'no_edges': Edges(torch.empty(2, 0, dtype=torch.long), 3, 3),
    'no_nodes': GRAPHS['no_nodes'],
}


@sample('gcn_degree')
def degree_sample(given: Given) -> dict[str, object]:
    return dict(
        edge_index=given.edge_index,
        edge_weight=None if given.value is None else given.value.abs() + 1,
        num_nodes=given.num_nodes, drop_loops=given.full, reverse=given.full,
    )  # fmt: skip


@sample('gcn_weight')
def _(given: Given) -> dict[str, object]:
    inputs, edge_index = degree_sample(given), given.edge_index
    degree, last, _, chunk_loops = reference.gcn_degree(**inputs)
    loops = int((edge_index[0] == edge_index[1]).sum()) if given.full else 0
    return dict(
        edge_index=edge_index, edge_weight=inputs['edge_weight'],
        degree=degree.to(given.acc) if given.full else degree, last=given.optional(last),
        before=given.optional(chunk_loops.cumsum(0)), num_kept=given.num_edges - loops,
        loops=given.full, fill_value=2.0, dtype=given.dtype,
    )  # fmt: skip


@sample('gcn_weight_backward')
def _(given: Given) -> dict[str, object]:
    edge_index, n = given.edge_index, given.num_nodes
    chunk_loops = reference.gcn_degree(**degree_sample(given))[3]
    num_kept = int((edge_index[0] != edge_index[1]).sum())
    return dict(
        edge_index=edge_index, grad=given.exact(num_kept + n if given.full else given.num_edges),
        scale=given.random(n), grad_degree=given.random(n),
        before=given.optional(chunk_loops.cumsum(0)), reverse=given.full,
    )  # fmt: skip


def weights_of(edges: Edges, dtype: torch.dtype, device: torch.device) -> Tensor:
    return (torch.rand(edges.edge_index.size(1)) + 0.1).to(device, dtype)


def check(
    edges: Edges, edge_index: Tensor, weight: Tensor | None, improved: bool, loops: bool, flow: str
) -> None:
    """Compares edges, weights and gradient with PyG's in float64."""
    options = edges.num_src, improved, loops, flow
    # As PyG has it on the CPU, where of several self-loops the last one wins.
    listed = edge_index.cpu().long()
    if weight is None:
        index, out = gcn_norm(edge_index, None, *options)
        expected_index, expected = pyg_gcn_norm(listed, None, *options, dtype=torch.float64)
        assert out.dtype == torch.float32
    else:
        weight = weight.requires_grad_()
        index, out = gcn_norm(edge_index, weight, *options)
        with torch.no_grad():
            again = gcn_norm(edge_index, weight, *options)
        double = weight.detach().cpu().double().requires_grad_()
        expected_index, expected = pyg_gcn_norm(listed, double, *options)
        assert torch.equal(again[0], index)
        assert_near(again[1].cpu(), expected.detach(), expected.detach(), listed.size(1))
        assert out.dtype == weight.dtype
        grad = torch.randn(out.shape).to(out)
        (actual,) = torch.autograd.grad(out, weight, grad)
        (wanted,) = torch.autograd.grad(expected, double, grad.cpu().double())
        assert actual.dtype == weight.dtype
        near = {torch.float64: 1e-12, torch.float32: 1e-4}.get(out.dtype, 2e-2)
        torch.testing.assert_close(actual.cpu().double(), wanted, rtol=near, atol=near)
    assert torch.equal(index.cpu().long(), expected_index)
    assert_near(out.detach().cpu(), expected.detach(), expected.detach(), listed.size(1))
    if not loops:
        assert index is edge_index


@pairs(
    ('name', 'index', 'flow', 'loops', 'improved'),
    list(SQUARE), [*INDEX, torch.int16], FLOWS, [False, True], [False, True],
)  # fmt: skip
def test_graphs(
    device: torch.device, name: str, index: torch.dtype, flow: str, loops: bool, improved: bool
) -> None:
    edges = SQUARE[name]
    edge_index = edges.edge_index.to(device, index)
    check(edges, edge_index, None, improved, loops, flow)
    for dtype in DTYPES:
        check(edges, edge_index, weights_of(edges, dtype, device), improved, loops, flow)


@given(edge_lists(square=True), st.booleans(), st.booleans(), st.sampled_from(FLOWS))
def test_any_graph(
    device: torch.device, edges: Edges, improved: bool, loops: bool, flow: str
) -> None:
    edge_index = edges.edge_index.to(device)
    check(edges, edge_index, None, improved, loops, flow)
    check(edges, edge_index, weights_of(edges, torch.float64, device), improved, loops, flow)


@pytest.mark.parametrize('num_edges', [1, 127, 128, 129, 1025, 20001])
@pytest.mark.parametrize('which', ['first', 'last', 'ends', 'only', 'all but one', 'many', 'few'])
def test_places_of_edges(device: torch.device, which: str, num_edges: int) -> None:
    # Kernels count the loops of each 128 edges.
    generator = torch.Generator().manual_seed(num_edges)
    # Of thousands of self-loops PyG may take another than a node's last: then each has but one.
    n = 40 if num_edges < 2000 else num_edges
    src = torch.randperm(num_edges, generator=generator) % n
    dst = (src + torch.randint(1, n, (num_edges,), generator=generator)) % n
    position = torch.arange(num_edges)
    loops = {
        'first': position == 0,
        'last': position == num_edges - 1,
        'ends': (position + 1) % 128 < 2,
        'only': position >= 0,
        'all but one': position != num_edges // 2,
        'many': torch.rand(num_edges, generator=generator) < 0.5,
        'few': position % 300 == 17,
    }[which]
    edges = Edges(torch.stack([src, torch.where(loops, src, dst)]), n + 1, n + 1)
    edge_index = edges.edge_index.to(device)
    for flow in FLOWS:
        check(edges, edge_index, None, True, True, flow)
        check(edges, edge_index.int(), weights_of(edges, torch.float64, device), True, True, flow)


def test_options(device: torch.device) -> None:
    edge_index = SQUARE['many_loops'].edge_index.to(device)
    for dtype in DTYPES:
        index, out = gcn_norm(edge_index, dtype=dtype)
        assert out.dtype == dtype
        assert torch.equal(index[:, -4:], torch.arange(4, device=device).expand(2, 4))
    weight = torch.rand(6, device=device)
    assert gcn_norm(edge_index, weight, dtype=torch.float64)[1].dtype == torch.float32  # as in PyG
    prepared = EdgeIndex(edge_index, sparse_size=(5, 5))
    for graph, num_nodes in ((edge_index, 5), (prepared, None), (EdgeIndex(edge_index), 5)):
        index, out = gcn_norm(graph, weight, num_nodes)
        assert index.size(1) == out.size(0) == 3 + 5
        assert type(index) is Tensor


def test_weights_that_cancel(device: torch.device) -> None:
    edge_index = torch.tensor([[0, 1, 2, 0], [1, 0, 0, 2]], device=device)
    weight = torch.tensor([0.0, 1.0, -1.0, -2.0], device=device, requires_grad=True)
    _, out = gcn_norm(edge_index, weight, 3, add_self_loops=False)
    expected = pyg_gcn_norm(edge_index, weight, 3, add_self_loops=False)[1]
    torch.testing.assert_close(out, expected, equal_nan=True)  # degrees 0, 0 and -2
    grad = torch.autograd.grad(out[:1].sum(), weight)[0]
    assert grad[0] == 0


@pytest.mark.parametrize('flow', FLOWS)
@pytest.mark.parametrize('loops', [False, True])
def test_gradcheck(device: torch.device, loops: bool, flow: str) -> None:
    # With one self-loop a node: what others of it get is PyG's choice, not a derivative.
    edge_index = torch.tensor([[0, 1, 2, 3, 3, 1, 0, 4, 1], [0, 0, 0, 2, 2, 1, 3, 3, 4]])
    edge_index = edge_index.to(device)
    weight = torch.rand(9, dtype=torch.float64, device=device) + 0.5

    def run(weight: Tensor) -> Tensor:
        return gcn_norm(edge_index, weight, 6, True, loops, flow)[1]

    # Without self-loops every node that an edge leaves needs a degree.
    if not loops:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
        weight = weight.repeat(2)
    assert gradcheck(run, (weight.requires_grad_(),), nondet_tol=1e-12)
    assert gradgradcheck(run, (weight,), nondet_tol=1e-12)


@pytest.mark.parametrize('name', ['square', 'many_loops'])
@pytest.mark.parametrize('loops', [False, True])
def test_higher_derivatives_are_those_of_pyg(device: torch.device, name: str, loops: bool) -> None:
    edges = SQUARE[name]
    weight = weights_of(edges, torch.float64, torch.device('cpu'))
    results = []
    for norm, on in ((gcn_norm, device), (pyg_gcn_norm, torch.device('cpu'))):
        leaf = weight.to(on).requires_grad_()
        y = norm(edges.edge_index.to(on), leaf, edges.num_src, add_self_loops=loops)[1]
        y = y.pow(3).sum()
        for _ in range(3):
            (grad,) = torch.autograd.grad(y, leaf, create_graph=True)
            y = grad.pow(2).sum()
        results.append(y.cpu())
    if results[1].isfinite():  # PyG differentiates roots of zero
        torch.testing.assert_close(*results)
    assert results[0].isfinite()


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('loops', ['remaining', 'replace', 'add', 'keep'])
@pytest.mark.parametrize('flow', FLOWS)
@pytest.mark.parametrize('name', SQUARE)
def test_scale(device: torch.device, name: str, flow: str, loops: str, weighted: bool) -> None:
    edges = SQUARE[name]
    edge_index, n = edges.edge_index.to(device), edges.num_src
    weight = weights_of(edges, torch.float64, device) if weighted else None
    options = {'fill_value': 2.0 if weighted else 1.0, 'loops': loops, 'flow': flow}
    scale, diag = MODULE.gcn_scale(edge_index, weight, n, torch.float64, **options)
    x = torch.randn(n, 3, dtype=torch.float64, device=device)
    out = scatter_sum(
        edge_index, x, weight, n, scale, scale, diag, flow == 'target_to_source',
        loops in ('remaining', 'replace'),
    )  # fmt: skip
    graph, *constants = normalized(edge_index, weight, n, torch.float64, **options).operator[:5]
    expected = reference.spmm(*graph[:3], constants[0], x, *constants[1:])
    torch.testing.assert_close(out, expected)
    for dtype in (torch.float32, torch.bfloat16):
        narrow = None if weight is None else weight.to(dtype)
        narrow, _ = MODULE.gcn_scale(edge_index, narrow, n, dtype, **options)
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), scale, rtol=2e-2, atol=0)


@pytest.mark.parametrize('flow', FLOWS)
@pytest.mark.parametrize('loops', [False, True])
def test_same_bits_where_asked_for(device: torch.device, loops: bool, flow: str) -> None:
    edge_index = torch.randint(300, (2, 20000), device=device)
    edge_index[:, :2000] = 7
    weight = torch.rand(20000, device=device, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:

        def run() -> tuple[Tensor, ...]:
            _, out = gcn_norm(edge_index, weight, 300, True, loops, flow)
            return out, *torch.autograd.grad(out.pow(2).sum(), weight)

        first = run()
        for _ in range(3):
            assert all(map(torch.equal, first, run()))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(run(), first)
    plain = [gcn_norm(edge_index, None, 300)[1] for _ in range(3)]  # counts need no help
    assert torch.equal(plain[0], plain[1])
    assert torch.equal(plain[0], plain[2])


@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('loops', [False, True])
def test_compiles_without_graph_break(device: torch.device, loops: bool, weighted: bool) -> None:
    torch._dynamo.reset()
    edges = SQUARE['square']
    edge_index = edges.edge_index.to(device)
    weight = weights_of(edges, torch.float32, device).requires_grad_() if weighted else None

    def run(weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return gcn_norm(edge_index, weight, 30, add_self_loops=loops)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=loops):
        compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
        results = []
        for fn in (run, compiled):
            index, out = fn(weight)
            grads = torch.autograd.grad(out.pow(2).sum(), weight) if weighted else ()
            results.append((index, out, *grads))
    torch.testing.assert_close(*results)


def test_compiled_scale(device: torch.device) -> None:
    torch._dynamo.reset()
    edge_index = SQUARE['square'].edge_index.to(device)

    def run(edge_index: Tensor) -> tuple[Tensor, Tensor]:
        return MODULE.gcn_scale(edge_index, None, 30, torch.float32)

    compiled = torch.compile(run, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(edge_index), run(edge_index))


def test_loops_are_counted_at_every_call(device: torch.device) -> None:
    edge_index = SQUARE['many_loops'].edge_index.to(device).clone()
    before = gcn_norm(edge_index, None, 5)[0].size(1)
    assert before == (edge_index[0] != edge_index[1]).sum() + 5
    edge_index.data[:, 0] = 4
    assert gcn_norm(edge_index, None, 5)[0].size(1) == (edge_index[0] != edge_index[1]).sum() + 5


@pytest.mark.parametrize('wrong', [5, -1, 2**33])
@pytest.mark.parametrize('end', [0, 1])
def test_index_out_of_range(device: torch.device, end: int, wrong: int, raises: Any) -> None:
    edge_index = torch.stack([torch.arange(300) % 5, torch.arange(300) % 4]).to(device)
    weight = torch.rand(300, device=device, requires_grad=True)
    gcn_norm(edge_index, weight, 5)
    edge_index[end, 150] = wrong
    name = 'sources' if end == 0 else 'destinations'
    for options in ({}, {'add_self_loops': False}, {'flow': 'target_to_source'}):
        for value in (weight, weight.detach(), None):
            message = rf"'edge_index\[{end}\]' must hold {name} in \[0, 5\)"
            with raises(IndexError, match=message):
                gcn_norm(edge_index, value, 5, **options)


def bad_calls() -> dict[str, tuple]:
    edge_index, w = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.rand(3)
    return {
        'list': (TypeError, "'edge_index' must be a tensor", [[0], [0]], {}),
        'float': (TypeError, "'edge_index' must hold integers", edge_index.float(), {}),
        'sparse': (TypeError, 'strided', edge_index.to_sparse(), {}),
        'transposed': (ValueError, r'\[2, num_edges\]', edge_index.t(), {}),
        'flow': (ValueError, "'flow'.*'up'", edge_index, {'flow': 'up'}),
        'num_nodes': (ValueError, "'num_nodes'.*-1", edge_index, {'num_nodes': -1}),
        'dtype': (TypeError, "'dtype'.*int64", edge_index, {'dtype': torch.int64}),
        'weight list': (TypeError, "'edge_weight' must be a tensor", edge_index,
                        {'edge_weight': [1.0]}),
        'weight int': (TypeError, "'edge_weight' must be one of", edge_index,
                       {'edge_weight': w.long()}),
        'weight sparse': (TypeError, 'strided', edge_index, {'edge_weight': w.to_sparse()}),
        'weight short': (ValueError, r'\[3\], got \[2\]', edge_index, {'edge_weight': w[:2]}),
        'weight matrix': (ValueError, r'\[3\], got \[3, 1\]', edge_index,
                          {'edge_weight': w.view(3, 1)}),
    }  # fmt: skip


@pytest.mark.parametrize('name', bad_calls())
def test_bad_input(device: torch.device, name: str) -> None:
    error, message, edge_index, options = bad_calls()[name]
    edge_index = edge_index.to(device) if isinstance(edge_index, Tensor) else edge_index
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    with pytest.raises(error, match=message):
        gcn_norm(edge_index, **options)


def test_scale_refuses_unknown_loops() -> None:
    with pytest.raises(ValueError, match="'loops'.*'none'"):
        MODULE.gcn_scale(torch.zeros(2, 3).long(), None, 1, torch.float32, loops='none')


def test_mixed_devices(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('needs two devices')
    with pytest.raises(ValueError, match="'edge_weight' is on cpu"):
        gcn_norm(torch.zeros(2, 3, device=device).long(), torch.rand(3))
