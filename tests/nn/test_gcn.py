"""PathPreparedGCNConv against PyG's GCNConv on the same weights."""

import copy
import itertools
import pickle
from collections.abc import Callable

import pytest
import torch
from _captures import check_training
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCNConv
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import PathPreparedGCNConv
from pyg_fast.transforms import ToCSR
from tests._report import must_fuse, why_pygs

NODES, EDGES = 40, 300


def make_graph(device, dtype=torch.float64, num_nodes=NODES, num_edges=EDGES):
    """Edges with duplicates, duplicate self-loops and isolated nodes, and their weights."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(0, max(num_nodes - 3, 1), (2, num_edges), generator=generator)
    if num_edges > 100:
        edge_index[:, 5] = edge_index[:, 77] = 3
        edge_index[:, 9] = 4
        edge_index[:, 10] = edge_index[:, 11]
    weight = torch.rand(num_edges, generator=generator, dtype=torch.float64) + 0.1
    if torch.device(device).type == 'cuda':
        # On CUDA, PyG takes any of several self-loops of a node: they get equal weights.
        loop = edge_index[0] == edge_index[1]
        weight[loop] = 0.5 + edge_index[0][loop].double() / num_nodes
    return edge_index.to(device), weight.to(device, dtype)


def pair(*args, device, dtype=torch.float64, **kwargs):
    torch.manual_seed(2)
    theirs = GCNConv(*args, **kwargs)
    if theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    theirs = theirs.to(device, dtype)
    ours = PathPreparedGCNConv(*args, **kwargs).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def features(channels, device, dtype=torch.float64, num_nodes=NODES):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_nodes, channels, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def gradients(conv, out, *inputs):
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    return torch.autograd.grad(out, [*inputs, *conv.parameters()], direction)


def assert_same(theirs, ours, their_inputs, our_inputs, wanted):
    a, b = theirs(*their_inputs), ours(*our_inputs)
    torch.testing.assert_close(b, a)
    for left, right in zip(gradients(ours, b, *wanted), gradients(theirs, a, *wanted), strict=True):
        torch.testing.assert_close(left, right)


def took_kernel(conv, *inputs):
    """Returns whether a call reaches our ops."""
    with torch.profiler.profile() as profile:
        conv(*inputs)
    kernels = 'pyg_fast::spmm', 'pyg_fast::spmm_coo'
    return any(event.key.startswith(kernels) for event in profile.key_averages())


OPTIONS = [
    dict(add_self_loops=loops, improved=improved, normalize=normalize, flow=flow, bias=bias)
    for loops, improved, normalize, flow, bias in itertools.product(
        (None, False),
        (False, True),
        (True, False),
        ('source_to_target', 'target_to_source'),
        (True, False),
    )
]


CHANNELS = [(6, 20), (20, 6), (7, 7)]


@pytest.mark.parametrize('channels', CHANNELS)
@pytest.mark.parametrize('weighted', ['unweighted', 'weighted', 'gradient'])
@pytest.mark.parametrize('prepared', [False, True])
def test_options(device, prepared, weighted, channels):
    edge_index, weight = make_graph(device)
    # Each combination for one of the three, which all meet every two options.
    for options in OPTIONS[CHANNELS.index(channels) :: 3]:
        theirs, ours = pair(*channels, device=device, **options)
        x = features(channels[0], device)
        w = (
            None
            if weighted == 'unweighted'
            else (weight.clone().requires_grad_(weighted == 'gradient'))
        )
        wanted = [x, w] if weighted == 'gradient' else [x]
        graph, w_ours = edge_index, w
        if prepared:
            graph, perm = prepare_edge_index(edge_index, (NODES, NODES))
            w_ours = None if w is None else w[perm]
        assert took_kernel(ours, x, graph, w_ours)
        assert_same(theirs, ours, (x, edge_index, w), (x, graph, w_ours), wanted)


def test_last_of_several_self_loops_counts(device):
    edge_index = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 0, 1, 1]])
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    theirs, _ = pair(3, 4, device='cpu')
    _, ours = pair(3, 4, device=device)
    expected = theirs(features(3, 'cpu', num_nodes=2), edge_index, weight)
    out = ours(features(3, device, num_nodes=2), edge_index.to(device), weight.to(device))
    torch.testing.assert_close(out.cpu(), expected)


@pytest.mark.parametrize('improved', [False, True])
@pytest.mark.parametrize('loops', [None, False])
@pytest.mark.parametrize('kind', ['coo', 'csr', 'SparseTensor', 'SparseTensor without values'])
def test_sparse_input(device, kind, loops, improved):
    if kind.startswith('SparseTensor') and not WITH_TORCH_SPARSE:
        pytest.skip('torch-sparse is not installed')
    if kind.startswith('SparseTensor') and device.type == 'cuda':
        pytest.skip('torch-sparse was built for the CPU')
    edge_index, weight = make_graph(device)
    dense = torch.zeros(NODES, NODES, dtype=torch.float64, device=device)
    dense[edge_index[1], edge_index[0]] = weight
    if kind == 'coo':
        adj_t = dense.to_sparse_coo().coalesce()
    elif kind == 'csr':
        adj_t = dense.to_sparse_csr()
    else:
        adj_t = SparseTensor.from_dense(dense)
        if kind.endswith('without values'):
            adj_t = adj_t.set_value(None, layout=None)
    theirs, ours = pair(5, 9, device=device, improved=improved, add_self_loops=loops)
    x = features(5, device)
    assert took_kernel(ours, x, adj_t)
    assert_same(theirs, ours, (x, adj_t), (x, adj_t), [x])


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('weighted', [False, True])
def test_dtypes(device, dtype, weighted):
    edge_index, weight = make_graph(device, dtype)
    exact, _ = pair(16, 32, device=device)
    _, ours = pair(16, 32, device=device, dtype=dtype)
    exact.load_state_dict(ours.state_dict())
    x = features(16, device, dtype)
    x64 = x.detach().double().requires_grad_()
    w = weight if weighted else None
    out = ours(x, edge_index, w)
    expected = exact(x64, edge_index, None if w is None else w.double())
    assert out.dtype == dtype
    # Two roundings of the output's size: after the linear map and at the end.
    tolerance = 4 * torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) < tolerance
    for a, b in zip(gradients(ours, out, x), gradients(exact, expected, x64), strict=True):
        assert float((a.double() - b).abs().max()) < 16 * torch.finfo(dtype).eps * float(
            b.abs().max() + 1
        )


def test_mixed_dtypes(device):
    edge_index, weight = make_graph(device, torch.float32)
    theirs, ours = pair(8, 8, device=device, dtype=torch.bfloat16, bias=False)
    x = features(8, device, torch.bfloat16)
    a, b = theirs(x, edge_index, weight), ours(x, edge_index, weight)
    assert a.dtype == b.dtype == torch.float32
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('channels', [(8, 16), (16, 8)])
@pytest.mark.parametrize('weighted', [False, True])
def test_autocast(device, channels, weighted):
    edge_index, weight = make_graph(device, torch.float32)
    theirs, ours = pair(*channels, device=device, dtype=torch.float32)
    x = features(channels[0], device, torch.float32)
    w = weight if weighted else None
    with torch.autocast(device.type, torch.bfloat16):
        a, b = theirs(x, edge_index, w), ours(x, edge_index, w)
    assert a.dtype == b.dtype == torch.float32
    torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)
    for left, right in zip(gradients(ours, b, x), gradients(theirs, a, x), strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(left, right, atol=0.05, rtol=0.05)


@pytest.mark.parametrize('index_dtype', [torch.int32, torch.int16, torch.uint8])
def test_index_dtypes(device, index_dtype):
    edge_index, _ = make_graph(device)
    theirs, ours = pair(5, 3, device=device)
    x = features(5, device)
    expected = theirs(x, edge_index)
    torch.testing.assert_close(ours(x, edge_index.to(index_dtype)), expected)
    strided = edge_index.t().contiguous().t().to(index_dtype)
    assert not strided.is_contiguous()
    torch.testing.assert_close(ours(x, strided), expected)


def test_norm_is_kept_on_a_prepared_graph(device):
    edge_index, weight = make_graph(device)
    graph, perm = prepare_edge_index(edge_index, (NODES, NODES))
    weight = weight[perm]
    _, ours = pair(5, 3, device=device)
    x = features(5, device)

    def ops_called(*inputs):
        with torch.profiler.profile() as profile:
            ours(*inputs)
        return {e.key for e in profile.key_averages()}

    ours(x, graph), ours(x, graph, weight)
    for inputs in ((x, graph), (x, graph, weight)):
        called = ops_called(*inputs)
        assert not any('to_csr' in op for op in called)
        assert 'aten::pow' not in called
    before = ours(x, graph, weight)
    weight.mul_(torch.linspace(1, 2, EDGES, device=device))  # in place: the norm is stale
    after = ours(x, graph, weight)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, ours(x, graph.as_tensor(), weight))


def test_cached(device):
    edge_index, weight = make_graph(device)
    theirs, ours = pair(5, 3, device=device, cached=True)
    x = features(5, device)
    assert_same(theirs, ours, (x, edge_index, weight), (x, edge_index, weight), [x])
    other = edge_index.flip(0)
    torch.testing.assert_close(ours(x, other), theirs(x, other))  # both still use the first
    ours.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    assert not torch.allclose(ours(x, other, weight), theirs(x, other, weight))
    theirs.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(theirs(x, other), GCNConv.forward(theirs, x, other))


def test_takes_over_a_cache(device):
    edge_index, weight = make_graph(device)
    theirs, ours = pair(5, 3, device=device, cached=True)
    x = features(5, device)
    expected = theirs(x, edge_index, weight)
    ours._cached_edge_index = theirs._cached_edge_index
    torch.testing.assert_close(ours(x, edge_index), expected)
    assert took_kernel(ours, x, edge_index)


def test_first_layer_needs_no_transpose(device):
    # Where x takes no gradient, aggregating first leaves the backward pass nothing to aggregate.
    edge_index, _ = make_graph(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    theirs, ours = pair(6, 20, device=device)
    x = features(6, device).detach()
    assert_same(theirs, ours, (x, edge_index), (x, graph), [])
    out = ours(x, graph)
    with torch.profiler.profile() as profile:
        out.sum().backward()
    assert not any(event.key.startswith('pyg_fast') for event in profile.key_averages())


@pytest.mark.parametrize('channels', [(3, 2), (2, 5)])
@pytest.mark.parametrize('weighted', [False, True])
def test_gradcheck(device, channels, weighted):
    # Without duplicate self-loops: all of them take the gradient of the one that counts, as in PyG.
    edge_index, weight = make_graph(device, num_nodes=8, num_edges=20)
    edge_index = edge_index.unique(dim=1)
    weight = weight[: edge_index.size(1)].clone()
    graph, _ = prepare_edge_index(edge_index, (8, 8))
    _, conv = pair(*channels, device=device)
    x = features(channels[0], device, num_nodes=8)
    w = weight.requires_grad_() if weighted else None

    def call(x, lin, bias, *w):
        return torch.func.functional_call(conv, {'lin.weight': lin, 'bias': bias}, (x, graph, *w))

    inputs = [x, *(p.detach().clone().requires_grad_() for p in (conv.lin.weight, conv.bias))]
    inputs += [w] if weighted else []
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@pytest.mark.parametrize(
    ('graph_kind', 'weighted'),
    [('plain', False), ('prepared', False), ('plain', True), ('prepared', True), ('pickled', True)],
)
def test_compile(device, graph_kind, weighted):
    edge_index, weight = make_graph(device, torch.float32)
    graph, w = edge_index, weight
    if graph_kind != 'plain':
        graph, perm = prepare_edge_index(edge_index, (NODES, NODES))
        w = weight[perm]
    if graph_kind == 'pickled':  # PyG's caches survive this, ours do not.
        graph = pickle.loads(pickle.dumps(graph))
    w = w if weighted else None
    _, conv = pair(8, 16, device=device, dtype=torch.float32)
    x = features(8, device, torch.float32)
    expected = conv(x, edge_index, weight if weighted else None)
    must_fuse(conv)
    torch._dynamo.reset()
    compiled = torch.compile(conv, fullgraph=True, backend='aot_eager')
    out = compiled(x, graph, w)
    torch.testing.assert_close(out, expected)
    for a, b in zip(gradients(conv, out, x), gradients(conv, expected, x), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(('num_nodes', 'num_edges'), [(0, 0), (1, 0), (1, 3), (5, 0)])
def test_tiny_graphs(device, num_nodes, num_edges):
    edge_index = torch.zeros(2, num_edges, dtype=torch.long, device=device)
    theirs, ours = pair(4, 3, device=device)
    x = features(4, device, num_nodes=num_nodes)
    for weight in (None, torch.ones(num_edges, dtype=torch.float64, device=device)):
        graph, _ = prepare_edge_index(edge_index, (num_nodes, num_nodes))
        assert_same(theirs, ours, (x, edge_index, weight), (x, edge_index, weight), [x])
        assert_same(theirs, ours, (x, edge_index, weight), (x, graph, weight), [x])


def test_lazy(device):
    edge_index, _ = make_graph(device)
    ours = PathPreparedGCNConv(-1, 3).to(device).double()
    x = features(5, device)
    ours(x, edge_index)
    theirs = GCNConv(5, 3).to(device).double()
    theirs.load_state_dict(ours.state_dict())
    assert_same(theirs, ours, (x, edge_index), (x, edge_index), [x])


def test_static_batch_and_other_aggregations_go_through_pyg(device):
    edge_index, _ = make_graph(device)
    theirs, ours = pair(5, 3, device=device)
    x = torch.stack([features(5, device), features(5, device)])
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    for kwargs in ({'aggr': 'mean'}, {'aggr': 'max'}, {'decomposed_layers': 2}):
        theirs, ours = pair(6, 4, device=device, **kwargs)
        x = features(6, device)
        assert_same(theirs, ours, (x, edge_index), (x, edge_index), [x])


def test_hooks_and_overrides_are_called(device):
    edge_index, _ = make_graph(device)
    theirs, ours = pair(5, 3, device=device)
    x = features(5, device)
    calls = []
    handle = ours.register_message_forward_hook(lambda *args: calls.append(args))
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
    assert calls
    handle.remove()
    assert took_kernel(ours, x, edge_index)
    hook = ours.lin.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(
        ours(x, edge_index) - ours.bias, 2 * (theirs(x, edge_index) - theirs.bias)
    )
    hook.remove()

    class Doubled(PathPreparedGCNConv):
        def message(self, x_j, edge_weight):
            return 2 * super().message(x_j, edge_weight)

    doubled = Doubled(5, 3).to(device).double()
    doubled.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(
        doubled(x, edge_index) - doubled.bias, 2 * (theirs(x, edge_index) - theirs.bias)
    )


def test_explainer(device):
    edge_index, _ = make_graph(device, num_nodes=12, num_edges=40)
    GCNConv(2, 2)  # PyG's layer in the same process, built first
    x = features(5, device, torch.float32, num_nodes=12).detach()
    masks = []
    theirs, ours = pair(5, 3, device=device, dtype=torch.float32)
    for conv in (theirs, ours):
        torch.manual_seed(0)
        explainer = Explainer(
            conv, GNNExplainer(epochs=3), explanation_type='model', edge_mask_type='object',
            model_config=dict(mode='multiclass_classification', task_level='node',
                              return_type='raw'),
        )  # fmt: skip
        masks.append(explainer(x, edge_index).edge_mask)
    torch.testing.assert_close(*masks)
    assert masks[0].max() > 0


def test_is_a_pyg_layer():
    theirs, ours = pair(5, 3, device='cpu')
    assert repr(ours) == 'PathPreparedGCNConv(5, 3)'
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    edge_index, _ = make_graph('cpu')
    x = features(5, 'cpu').detach()
    expected = theirs(x, edge_index)
    torch.testing.assert_close(copy.deepcopy(ours)(x, edge_index), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours))(x, edge_index), expected)
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(x, edge_index), expected)
    with pytest.raises(ValueError, match='self-loops'):
        PathPreparedGCNConv(5, 3, add_self_loops=True, normalize=False)


def test_after_to_csr(device):
    edge_index, weight = make_graph(device)
    x = features(5, device)
    data = ToCSR()(Data(x=x, edge_index=edge_index, edge_weight=weight))
    assert isinstance(data.edge_index, EdgeIndex)
    theirs, ours = pair(5, 3, device=device)
    assert_same(theirs, ours, (x, edge_index, weight), (x, data.edge_index, data.edge_weight), [x])


def test_inference_mode(device):
    edge_index, weight = make_graph(device)
    theirs, ours = pair(5, 3, device=device)
    with torch.inference_mode():
        x = features(5, device).detach().clone()
        graph, perm = prepare_edge_index(edge_index.clone(), (NODES, NODES))
        torch.testing.assert_close(
            ours(x, graph, weight[perm].clone()), theirs(x, edge_index, weight)
        )


def test_bad_input(device, raises):
    edge_index, weight = make_graph(device)
    _, ours = pair(5, 3, device=device)
    x = features(5, device)
    for bad in (NODES, -1):
        wrong = edge_index.clone()
        wrong[0, 7] = bad
        with raises(IndexError, match='edge_index'):
            ours(x, wrong)
        with raises(IndexError, match='edge_index'):
            ours(x, wrong, weight)
    with raises(ValueError, match='edge_weight'):
        ours(x, edge_index, weight[:-1])
    with raises(TypeError, match='edge_index'):
        ours(x, edge_index.double())
    with raises(ValueError, match='edge_index'):
        ours(x, edge_index[:1])
    with raises(ValueError, match='tuple'):
        ours((x, x), edge_index)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    with raises(ValueError, match='edge_index'):
        ours(features(5, device, num_nodes=NODES - 1), graph)
    if device.type == 'cuda':
        with raises(ValueError, match='edge_index'):
            ours(x, edge_index.cpu())
        with raises(ValueError, match='edge_weight'):
            ours(x, edge_index, weight.cpu())


def test_captured_training_step(device):
    if device.type != 'cuda':
        pytest.skip('CUDA graphs need a GPU')
    edge_index, _ = make_graph(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    _, conv = pair(8, 4, device=device, dtype=torch.float32)
    x = features(8, device, torch.float32).detach()
    check_training(conv, lambda conv: conv(x, graph).square().sum())


def test_same_bits(device):
    edge_index, _ = make_graph(device, num_edges=20000)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    _, conv = pair(8, 16, device=device, dtype=torch.float32)
    x = features(8, device, torch.float32)
    runs = []
    for _ in range(3):
        out = conv(x, graph)
        runs.append([out, *gradients(conv, out, x)])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_more_nodes_than_32_bits_number_run_pygs_code(
    device: torch.device, limits: Callable[..., None]
) -> None:
    limits(nodes_of_layers=9)
    conv = PathPreparedGCNConv(3, 2).to(device)
    edge_index = torch.randint(10, (2, 30), device=device)
    x = torch.randn(10, 3, device=device)
    out = conv(x, edge_index)
    assert why_pygs(conv) == 'features of 10 nodes'
    torch.testing.assert_close(out, conv.to_base()(x, edge_index))
