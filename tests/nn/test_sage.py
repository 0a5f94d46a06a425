"""PathPreparedSAGEConv against PyG's SAGEConv, on the same weights."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing, SAGEConv
from torch_geometric.nn.aggr import (
    MeanAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    StdAggregation,
    VarAggregation,
)

from pyg_fast.graph import prepare_edge_index, set_group_sizes
from pyg_fast.nn import PathPreparedSAGEConv
from tests._report import may_leave, must_fuse

SRC, DST, EDGES = 30, 20, 150
# Given anew for every layer, since modules must not be shared.
FUSED: dict[str, Callable[[], dict[str, Any]]] = {
    name: (lambda name=name: {'aggr': name})
    for name in ('sum', 'add', 'mean', 'max', 'min', 'var', 'std', 'powermean')
} | {
    'module': lambda: {'aggr': MeanAggregation()},
    'var, semi_grad': lambda: {'aggr': VarAggregation(semi_grad=True)},
    'std, semi_grad': lambda: {'aggr': StdAggregation(semi_grad=True)},
    'powermean, p': lambda: {'aggr': PowerMeanAggregation(p=3.0)},
    'powermean, learn': lambda: {'aggr': PowerMeanAggregation(p=2.0, learn=True)},
    'powermean, channels': lambda: {
        'aggr': PowerMeanAggregation(p=2.0, learn=True, channels=8)
    },
    'list of one': lambda: {'aggr': ['mean']},
    'list': lambda: {'aggr': ['mean', 'max', 'std']},
    'list, all': lambda: {'aggr': ['powermean', 'std', 'var', 'min', 'mean', 'max', 'sum']},
    'list, semi_grad': lambda: {
        'aggr': ['std', 'var'], 'aggr_kwargs': {'aggrs_kwargs': [{}, {'semi_grad': True}]}
    },
    'list, std semi_grad': lambda: {
        'aggr': ['std', 'mean'], 'aggr_kwargs': {'aggrs_kwargs': [{'semi_grad': True}, {}]}
    },
    'multi, sum': lambda: {'aggr': MultiAggregation(['sum', 'max'], mode='sum')},
    'multi, proj': lambda: {
        'aggr': MultiAggregation(
            ['mean', 'std'], mode='proj', mode_kwargs={'in_channels': 8, 'out_channels': 8}
        )
    },
}  # fmt: skip
LEFT: dict[str, Callable[[], dict[str, Any]]] = {
    'mul': lambda: {'aggr': 'mul'},
    'median': lambda: {'aggr': 'median'},
    'softmax': lambda: {'aggr': 'softmax'},
    'list': lambda: {'aggr': ['mean', 'softmax']},
    'twice': lambda: {'aggr': ['mean', 'mean', 'max']},
    'powermean, no clamp': lambda: {'aggr': PowerMeanAggregation(p=2.0, clamp_min=None)},
    'nested': lambda: {'aggr': MultiAggregation([MultiAggregation(['mean', 'max'], mode='sum')])},
}


def edges(num_src: int = SRC, num_dst: int = DST, num_edges: int = EDGES) -> Tensor:
    """Edges with double ones, of which some nodes have none."""
    edge_index = torch.stack([
        torch.randint(num_src - 3, (num_edges,)), torch.randint(num_dst - 3, (num_edges,))
    ])  # fmt: skip
    return torch.cat([edge_index, edge_index[:, :9]], dim=1)


def layers(
    in_channels: Any, out_channels: int, options: Callable[[], dict[str, Any]] = dict,
    device: Any = 'cpu', dtype: torch.dtype = torch.float64, **kwargs: Any,
) -> tuple[SAGEConv, PathPreparedSAGEConv]:  # fmt: skip
    theirs = SAGEConv(in_channels, out_channels, **options(), **kwargs)
    ours = PathPreparedSAGEConv(in_channels, out_channels, **options(), **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(device, dtype), ours.to(device, dtype)


def gradients(conv: Any, x: Any, edge_index: Any, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of inputs and parameters."""
    xs = [v.detach().requires_grad_() for v in (x if isinstance(x, tuple) else (x,))
          if v is not None]  # fmt: skip
    args: Any = xs[0] if not isinstance(x, tuple) else (xs[0], xs[1] if len(xs) > 1 else None)
    out = conv(args, edge_index, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
    inputs = [*xs, *conv.parameters()]
    grads = torch.autograd.grad(
        (out.double() * weight.view_as(out)).sum(), inputs, allow_unused=True
    )
    return [out, *[torch.zeros_like(v) if g is None else g
                   for v, g in zip(inputs, grads, strict=True)]]  # fmt: skip


def assert_same(theirs: list[Tensor], ours: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, **tolerance)


@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('name', FUSED)
def test_aggregations(name: str, prepared: bool, device: torch.device) -> None:
    theirs, ours = layers(8, 5, FUSED[name], device)
    x, edge_index = torch.randn(SRC, 8, dtype=torch.float64, device=device), edges(SRC, SRC)
    edge_index = edge_index.to(device)
    graph = prepare_edge_index(edge_index, (SRC, SRC))[0] if prepared else edge_index
    expected = gradients(theirs, x, edge_index)
    for _ in range(1 + prepared):  # At the second call the graph has its cache.
        assert_same(expected, gradients(must_fuse(ours), x, graph))


@pytest.mark.parametrize('name', ['var', 'std', 'list'])
def test_equal_neighbours_have_no_variance(name: str, device: torch.device) -> None:
    """Squares of large numbers do not cancel exactly, for PyG either."""
    conv = PathPreparedSAGEConv(8, 5, **FUSED[name]()).to(device)
    x = (torch.rand(SRC, 1, device=device) * 1e4).expand(-1, 8)
    edge_index = torch.stack([torch.arange(SRC), torch.arange(SRC) // 2]).repeat(1, 3).to(device)
    x = x[edge_index[1, :SRC]]  # one number for both neighbours
    seen: list[Tensor] = []
    conv.lin_l.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    conv(x, edge_index)
    assert not seen[0][:, -8:].any()  # that of the list's last aggregation, too


@pytest.mark.parametrize('name', LEFT)
def test_other_aggregations_are_left_to_pyg(name: str, device: torch.device) -> None:
    theirs, ours = layers(8, 5, LEFT[name], device, torch.float32)
    x = torch.rand(SRC, 8, device=device)
    edge_index = edges(SRC, SRC).to(device)
    edge_index = edge_index[:, edge_index[1].argsort()]
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ['mean', 'sum', 'max', 'list', 'powermean, p'])
@pytest.mark.parametrize('channels', [(8, 24), (24, 8)])
def test_dtypes(
    name: str, dtype: torch.dtype, channels: tuple[int, int], device: torch.device
) -> None:
    theirs, ours = layers(*channels, FUSED[name], device, dtype)
    x = torch.randn(SRC, channels[0], device=device).to(dtype)
    graph, _ = prepare_edge_index(edges(SRC, SRC).to(device), (SRC, SRC))
    got = gradients(must_fuse(ours), x, graph)
    assert all(v.dtype == dtype for v in got)
    exact = gradients(theirs.double(), x.double(), graph.as_tensor())
    for a, b in zip(exact, got, strict=True):
        bound = 30 * torch.finfo(dtype).eps * float(a.detach().abs().max() + 1)
        torch.testing.assert_close(b.double(), a, rtol=0, atol=bound)


@pytest.mark.parametrize('aggr', ['sum', 'mean', 'max'])
@pytest.mark.parametrize('channels', [(8, 24), (24, 8)])
@pytest.mark.parametrize(
    'kwargs',
    [
        {'normalize': True},
        {'root_weight': False},
        {'bias': False},
        {'project': True},
        {'project': True, 'normalize': True, 'root_weight': False, 'bias': False},
    ],
)
def test_options(
    kwargs: dict[str, Any], channels: tuple[int, int], aggr: str, device: torch.device
) -> None:
    theirs, ours = layers(*channels, device=device, aggr=aggr, **kwargs)
    x = torch.randn(SRC, channels[0], dtype=torch.float64, device=device)
    edge_index = edges(SRC, SRC).to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, SRC))
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, graph):
        assert_same(expected, gradients(must_fuse(ours), x, given))


@pytest.mark.parametrize('name', ['mean', 'sum', 'max', 'list'])
@pytest.mark.parametrize('root', [True, False])
@pytest.mark.parametrize('project', [True, False])
@pytest.mark.parametrize('out_channels', [4, 24])
def test_bipartite(
    name: str, root: bool, project: bool, out_channels: int, device: torch.device
) -> None:
    theirs, ours = layers((8, 6), out_channels, FUSED[name], device, project=project)
    x_src = torch.randn(SRC, 8, dtype=torch.float64, device=device)
    x_dst = torch.randn(DST, 6, dtype=torch.float64, device=device) if root else None
    edge_index, size = edges().to(device), (SRC, DST)
    expected = gradients(theirs, (x_src, x_dst), edge_index, size=size)
    graph, _ = prepare_edge_index(edge_index, size)
    must_fuse(ours)
    assert_same(expected, gradients(ours, (x_src, x_dst), edge_index, size=size))
    assert_same(expected, gradients(ours, (x_src, x_dst), graph))
    assert_same(expected, gradients(ours, (x_src, x_dst), graph, size=size))
    if root:
        assert_same(expected, gradients(ours, (x_src, x_dst), edge_index))
    else:  # As many destinations as sources, where nothing says otherwise.
        assert_same(
            gradients(theirs, (x_src, None), edge_index),
            gradients(ours, (x_src, None), edge_index),
        )


@pytest.mark.parametrize('name', ['mean', 'sum', 'max', 'list'])
@pytest.mark.parametrize('project', [True, False])
def test_target_to_source(name: str, project: bool, device: torch.device) -> None:
    theirs, ours = layers(8, 5, FUSED[name], device, flow='target_to_source', project=project)
    x = torch.randn(SRC, 8, dtype=torch.float64, device=device)
    edge_index = edges(SRC, SRC).to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, SRC))
    by_row = EdgeIndex(edge_index, sparse_size=(SRC, SRC)).sort_by('row').values
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, graph, by_row):
        assert_same(expected, gradients(ours if project else must_fuse(ours), x, given))
    pair = (x, torch.randn_like(x))
    assert_same(gradients(theirs, pair, edge_index), gradients(may_leave(ours), pair, edge_index))


@pytest.mark.parametrize('aggr', ['mean', 'sum', 'max'])
@pytest.mark.parametrize('layout', [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.filterwarnings('ignore:Converting sparse tensor', 'ignore:Sparse')
def test_torch_sparse_with_values(aggr: str, layout: torch.layout) -> None:
    theirs, ours = layers(8, 5, aggr=aggr, dtype=torch.float32)
    row, col = edges(SRC, SRC).flip(0).unique(dim=1)
    adj_t = torch.sparse_coo_tensor(
        torch.stack([row, col]), torch.rand(row.numel()), (SRC, SRC), is_coalesced=True
    )
    adj_t = adj_t.coalesce() if layout == torch.sparse_coo else adj_t.to_sparse_csr()
    x = torch.randn(SRC, 8)
    # PyG compiles `propagate` for the first SAGEConv of a process, sparse input or not: undo that.
    theirs.propagate = MessagePassing.propagate.__get__(theirs)
    torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))


@pytest.mark.parametrize('name', ['mean', 'max', 'list'])
def test_sparse_tensor(name: str) -> None:
    torch_sparse = pytest.importorskip('torch_sparse')
    theirs, ours = layers((8, 6), 5, FUSED[name], dtype=torch.float32)
    row, col = edges().flip(0)
    adj_t = torch_sparse.SparseTensor(
        row=row, col=col, value=torch.rand(row.numel()), sparse_sizes=(DST, SRC)
    )
    x = (torch.randn(SRC, 8), torch.randn(DST, 6))
    assert_same(gradients(theirs, x, adj_t), gradients(ours, x, adj_t))


@pytest.mark.parametrize('name', ['mean', 'sum', 'max', 'multi, sum', 'powermean, p'])
@pytest.mark.parametrize('project', [True, False])
@pytest.mark.parametrize('channels', [(8, 24), (24, 8)])
def test_autocast(
    name: str, project: bool, channels: tuple[int, int], device: torch.device
) -> None:
    theirs, ours = layers(*channels, FUSED[name], device, torch.float32, project=project)
    x, graph = torch.randn(SRC, channels[0], device=device), edges(SRC, SRC).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        expected, got = gradients(theirs, x, graph), gradients(must_fuse(ours), x, graph)
    assert expected[0].dtype == torch.bfloat16
    if name == 'max':  # In bfloat16 neighbours tie, and then gradients differ: see the docstring.
        expected, got = expected[:1], got[:1]
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.02 * float(a.detach().abs().max() + 1))
    with torch.autocast(device.type, torch.bfloat16):
        assert ours.double()(x.double(), graph).dtype == torch.float64


# Each kind of aggregation, and both kinds of graph; a prepared one is sorted before any of them.
@pytest.mark.parametrize(
    ('name', 'prepared'),
    [('mean', False), ('mean', True), ('sum', True), ('max', False), ('max', True),
     ('list', False), ('std, semi_grad', True)],
)  # fmt: skip
def test_compile(name: str, prepared: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = layers((8, 6), 5, FUSED[name], device)
    x = (torch.randn(SRC, 8, dtype=torch.float64, device=device),
         torch.randn(DST, 6, dtype=torch.float64, device=device))  # fmt: skip
    edge_index = edges().to(device)
    graph = prepare_edge_index(edge_index, (SRC, DST))[0] if prepared else edge_index
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, graph))


def test_second_derivatives(device: torch.device) -> None:
    edge_index = edges(7, 7, 20).to(device)
    for name in ('mean', 'sum', 'var', 'list'):
        for channels in ((2, 6), (6, 2)):
            _, ours = layers(*channels, FUSED[name], device)
            x = torch.randn(7, channels[0], dtype=torch.float64, device=device)
            weight = ours.lin_l.weight

            def run(x: Tensor, weight: Tensor, ours: Any = ours) -> Tensor:
                return torch.func.functional_call(
                    ours, {'lin_l.weight': weight}, (x, edge_index)
                ).pow(2)  # fmt: skip

            inputs = (x.requires_grad_(), weight.detach().clone().requires_grad_())
            assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize('kind', ['message', 'aggregate', 'propagate'])
def test_message_passing_hooks_run(kind: str) -> None:
    theirs, ours = layers(8, 5)
    x, edge_index = torch.randn(SRC, 8, dtype=torch.float64), edges(SRC, SRC)
    for conv in (theirs, ours):
        register = getattr(conv, f'register_{kind}_forward_hook')
        handle = register(lambda module, args, out: 2 * out)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))
    handle.remove()
    gradients(must_fuse(ours), x, edge_index)


@pytest.mark.parametrize('part', ['lin_l', 'lin_r', 'aggr_module'])
def test_module_hooks_run(part: str) -> None:
    theirs, ours = layers(8, 5)
    x, edge_index = torch.randn(SRC, 8, dtype=torch.float64), edges(SRC, SRC)
    for conv in (theirs, ours):
        getattr(conv, part).register_forward_hook(lambda module, args, out: 2 * out)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


def test_explain_and_fuse_switch() -> None:
    theirs, ours = layers(8, 5)
    x, edge_index = torch.randn(SRC, 8, dtype=torch.float64), edges(SRC, SRC)
    plain = theirs(x, edge_index)
    for conv in (theirs, ours):
        conv.explain = True
        conv._edge_mask = torch.linspace(-1, 1, edge_index.size(1), dtype=torch.float64)
    masked = gradients(theirs, x, edge_index)
    assert not torch.allclose(masked[0], plain)
    assert_same(masked, gradients(ours, x, edge_index))
    ours.explain = False
    torch.testing.assert_close(must_fuse(ours)(x, edge_index), plain)
    ours.fuse = False
    with pytest.raises(AssertionError, match='own path'):
        ours(x, edge_index)


def test_subclass_with_its_own_message() -> None:
    class Doubled(PathPreparedSAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    theirs, _ = layers(8, 5, aggr='sum', root_weight=False, bias=False)
    conv = Doubled(8, 5, aggr='sum', root_weight=False, bias=False).double()
    conv.load_state_dict(theirs.state_dict())
    x, edge_index = torch.randn(SRC, 8, dtype=torch.float64), edges(SRC, SRC)
    torch.testing.assert_close(conv(x, edge_index), 2 * theirs(x, edge_index))


def test_static_batch() -> None:
    theirs, ours = layers(8, 5)
    x, edge_index = torch.randn(3, SRC, 8, dtype=torch.float64), edges(SRC, SRC)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')
def test_torchscript() -> None:
    theirs, ours = layers(8, 5, dtype=torch.float32)
    x, edge_index = torch.randn(SRC, 8), edges(SRC, SRC)
    scripted = torch.jit.script(ours)
    torch.testing.assert_close(scripted(x, edge_index), theirs(x, edge_index))


@pytest.mark.parametrize(
    'copied', [copy.deepcopy, lambda conv: pickle.loads(pickle.dumps(conv))], ids=['copy', 'pickle']
)
def test_copies(copied: Callable) -> None:
    theirs, ours = layers(8, 5, FUSED['list'])
    x, edge_index = torch.randn(SRC, 8, dtype=torch.float64), edges(SRC, SRC)
    again = copied(ours)
    assert type(again) is PathPreparedSAGEConv
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(again), x, edge_index))


def test_lazy_channels(device: torch.device) -> None:
    ours = PathPreparedSAGEConv((-1, -1), 5).to(device)
    x = (torch.randn(SRC, 8, device=device), torch.randn(DST, 6, device=device))
    edge_index = edges().to(device)
    first = ours(x, edge_index)
    theirs = SAGEConv((8, 6), 5).to(device)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(first, theirs(x, edge_index))
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))


@pytest.mark.parametrize('name', ['sum', 'mean', 'max', 'std', 'list'])
@pytest.mark.parametrize('num_nodes', [0, 4])
def test_no_edges(name: str, num_nodes: int, device: torch.device) -> None:
    theirs, ours = layers(8, 5, FUSED[name], device)
    x = torch.randn(num_nodes, 8, dtype=torch.float64, device=device)
    edge_index = torch.empty(2, 0, dtype=torch.long, device=device)
    graph, _ = prepare_edge_index(edge_index, (num_nodes, num_nodes))
    for given in (edge_index, graph):
        assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, given))


def test_strided_input_and_small_indices(device: torch.device) -> None:
    theirs, ours = layers(8, 5, device=device)
    x = torch.randn(8, SRC, dtype=torch.float64, device=device).t()
    edge_index = edges(SRC, SRC).to(device)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index.short()))


def test_bad_input(device: torch.device, raises: Any) -> None:
    _, ours = layers((8, 6), 5, device=device, dtype=torch.float32)
    x = (torch.randn(SRC, 8, device=device), torch.randn(DST, 6, device=device))
    edge_index = edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, DST))
    for end, value in ((0, SRC), (1, DST), (0, -1), (1, -1)):
        wrong = edge_index.clone()
        wrong[end, 3] = value
        with raises(IndexError, match=rf'edge_index\[{end}\]'):
            ours(x, wrong)
    with raises(ValueError, match='size'):
        ours(x, edge_index, size=(SRC + 1, DST))
    with raises(ValueError, match='size'):
        ours(x, edge_index, size=(SRC, DST + 1))
    with raises(ValueError, match='size'):
        ours((x[0][1:], x[1]), graph)
    with raises(ValueError, match='size'):
        ours((x[0], x[1][1:]), graph)
    with raises(ValueError, match='shape'):
        ours(x, edge_index[:, None])
    with raises(ValueError, match="'edge_index' is on meta"):
        ours(x, edge_index.to('meta'))
    with raises(ValueError, match=r"'x\[1\]' is on meta"):
        ours((x[0], x[1].to('meta')), edge_index)


def test_graph_first_met_in_inference_mode(device: torch.device) -> None:
    theirs, ours = layers(8, 5, device=device)
    x = torch.randn(SRC, 8, dtype=torch.float64, device=device)
    edge_index = edges(SRC, SRC).to(device)
    prepared, _ = prepare_edge_index(edge_index, (SRC, SRC))
    with torch.inference_mode():
        ours(x, prepared)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, prepared))


@pytest.mark.parametrize(('channels', 'transposes'), [((8, 24), 0), ((24, 8), 1)])
def test_sorts_no_more_than_backward_needs(channels: tuple[int, int], transposes: int) -> None:
    _, ours = layers(*channels)
    x, edge_index = torch.randn(SRC, channels[0], dtype=torch.float64), edges(SRC, SRC)
    with torch.profiler.profile() as profile:
        ours(x, edge_index).sum().backward()
    sorts = {e.key: e.count for e in profile.key_averages() if 'csr' in e.key}
    assert sorts.pop('pyg_fast::to_csr_unweighted') == 1
    assert sorts == {'pyg_fast::transpose_csr': 1} if transposes else not sorts


@pytest.mark.parametrize('aggr', ['sum', 'mean'])
@pytest.mark.parametrize('prepared', [False, True])
def test_sums_with_root_are_one_function(aggr: str, prepared: bool, device: torch.device) -> None:
    _, ours = layers(8, 5, device=device, aggr=aggr)
    x = torch.randn(SRC, 8, dtype=torch.float64, device=device, requires_grad=True)
    edge_index = edges(SRC, SRC).to(device)
    if prepared:
        edge_index, _ = prepare_edge_index(edge_index, (SRC, SRC))
    out = ours(x, edge_index)  # Torch 2.11 reads a node only while its result is alive.
    node = out.grad_fn
    assert type(node).__name__ == 'LinearProductBackward'
    accumulated = {id(of) for of, _ in node.next_functions if of is not None}
    assert len(accumulated) == 4  # x, both weights and the bias


def test_mean_of_a_graph_is_made_once(device: torch.device) -> None:
    _, ours = layers(8, 5, device=device)
    x = torch.randn(SRC, 8, dtype=torch.float64, device=device, requires_grad=True)
    prepared, _ = prepare_edge_index(edges(SRC, SRC).to(device), (SRC, SRC))
    expected = ours(x, prepared)
    with torch.profiler.profile() as profile:
        actual = ours(x, prepared)
    assert torch.equal(actual, expected)
    assert not {'aten::diff', 'aten::reciprocal_'} & {e.key for e in profile.key_averages()}
    set_group_sizes(prepared, 4, 4)  # drops what was derived from the graph
    assert torch.allclose(ours(x, prepared), expected)
