"""MaxK and its layers against PyG's on the same weights, with messages masked by torch."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any

import _forks
import pytest
import torch
from _captures import check_training
from _pairs import pairs
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCNConv, GINConv, MessagePassing, SAGEConv

import pyg_fast
from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import (
    MaxK,
    MaxKGCNConv,
    MaxKGINConv,
    MaxKSAGEConv,
    PathPreparedGCNConv,
    PathPreparedGINConv,
    PathPreparedSAGEConv,
)
from pyg_fast.ops import CBSR, maxk
from tests._report import may_leave, must_fuse

NODES, DST, EDGES = 40, 25, 300
IN, OUT = 16, 20
# Of 16 and of 20 channels: few, which are read as entries, and many, which are read as dense rows.
FEW, MANY = 3, 11
KINDS = ('gcn', 'sage', 'gin')
LAYERS = {
    'gcn': (GCNConv, PathPreparedGCNConv, MaxKGCNConv),
    'sage': (SAGEConv, PathPreparedSAGEConv, MaxKSAGEConv),
    'gin': (GINConv, PathPreparedGINConv, MaxKGINConv),
}


def mask(x: Tensor, k: int, balanced: bool = False) -> Tensor:
    """Ones where MaxK keeps a feature."""
    if balanced:
        groups = [x[..., c::k].sort(dim=-1, descending=True, stable=True)[1][..., :1] * k + c
                  for c in range(k)]  # fmt: skip
        columns = torch.cat(groups, -1)
    else:
        columns = x.sort(dim=-1, descending=True, stable=True)[1][..., :k]
    return torch.zeros_like(x).scatter_(-1, columns, 1)


def kept(x: Tensor, k: int, balanced: bool = False) -> Tensor:
    """MaxK by torch's own ops."""
    return x * mask(x.detach(), k, balanced)


class Twin(Module):
    """A layer of PyG's whose messages pass MaxK; `root` says whether the root does, too."""

    def __init__(self, conv: MessagePassing, k: int, balanced: bool, root: bool = False) -> None:
        super().__init__()
        self.conv = conv
        self.root = root
        self.keep = lambda x: kept(x, k, balanced)
        conv.register_propagate_forward_pre_hook(self.mask)

    def mask(self, _: Any, inputs: tuple) -> tuple:
        edge_index, size, kwargs = inputs
        x = kwargs['x']
        x = self.keep(x) if isinstance(x, Tensor) else (self.keep(x[0]), x[1])
        return edge_index, size, {**kwargs, 'x': x}

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.root:
            source, root = x if isinstance(x, tuple) else (x, x)
            x = source, None if root is None else self.keep(root)
        return self.conv(x, *args, **kwargs)


def build(kind: str, part: int, channels: Any = (IN, OUT), **kwargs: Any) -> Any:
    cls = LAYERS[kind][part]
    if part == 2:
        kwargs.setdefault('k', None)
    if kind == 'gin':
        kwargs = {'eps': 0.3, **kwargs}
        return cls(Sequential(Linear(channels[0], 7), ReLU(), Linear(7, channels[1])), **kwargs)
    return cls(*channels, **kwargs)


def layers(
    kind: str, k: int, device: Any = 'cpu', dtype: torch.dtype = torch.float64,
    balanced: bool = False, root: bool = False, channels: Any = (IN, OUT), **kwargs: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """PyG's layer with masked messages, and ours."""
    theirs = build(kind, 0, channels, **kwargs)
    if kind == 'gcn' and theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    own = {} if kind == 'gcn' else {'maxk_root': root}
    ours = build(kind, 2, channels, k=k, balanced=balanced, **own, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return Twin(theirs, k, balanced, root).to(device, dtype), ours.to(device, dtype)


def edges(num_src: int = NODES, num_dst: int = NODES, num_edges: int = EDGES) -> Tensor:
    """Edges with double ones, self-loops and nodes that have none."""
    edge_index = torch.stack([
        torch.randint(num_src - 3, (num_edges,)), torch.randint(num_dst - 3, (num_edges,))
    ])  # fmt: skip
    edge_index[:, :5] = torch.arange(5)
    return torch.cat([edge_index, edge_index[:, 9:30]], dim=1)


def features(*size: int, device: Any = 'cpu', dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, dtype=torch.float64).to(device, dtype)


def ops_of(run: Callable[[], Any]) -> dict[str, int]:
    """How often our ops were called."""
    with torch.profiler.profile() as profile:
        run()
    return {
        event.key.removeprefix('pyg_fast::'): event.count
        for event in profile.key_averages() if event.key.startswith('pyg_fast::')
    }  # fmt: skip


def gradients(conv: Any, x: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of features, weights and parameters."""
    pair = x if isinstance(x, tuple) else (x,)
    pair = tuple(None if v is None else v.detach().requires_grad_() for v in pair)
    out = conv(pair if isinstance(x, tuple) else pair[0], *args, **kwargs)
    inputs = [*(v for v in pair if v is not None), *conv.parameters()]
    inputs += [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
    grads = torch.autograd.grad(
        (out.double() * weight.view_as(out)).sum(), inputs, allow_unused=True
    )
    return [out, *(torch.zeros_like(v) if g is None else g
                   for v, g in zip(inputs, grads, strict=True))]  # fmt: skip


def assert_same(theirs: list[Tensor], ours: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, **tolerance)


# The module -----------------------------------------------------------------------------------


@pytest.mark.parametrize('balanced', [False, True])
@pytest.mark.parametrize('size', [(7,), (5, 7), (3, 5, 7), (2, 0, 7), (0, 7), (2, 3, 4, 7)])
@pytest.mark.parametrize('k', [1, 3, 7])
def test_module(k: int, size: tuple[int, ...], balanced: bool, device: torch.device) -> None:
    module = MaxK(k, balanced)
    x = features(*size, device=device).requires_grad_()
    out = module(x)
    torch.testing.assert_close(out, kept(x, k, balanced), rtol=0, atol=0)
    (grad,) = torch.autograd.grad((3 * out).sum(), x)
    assert torch.equal(grad, 3 * mask(x.detach(), k, balanced))


def test_module_of_views_and_types(device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = features(7, 4, 5, device=device, dtype=dtype).transpose(0, 2)
        assert torch.equal(MaxK(3)(x), kept(x, 3))
    assert repr(Sequential(MaxK(3), MaxK(4, balanced=True))) == (
        'Sequential(\n  (0): MaxK(3)\n  (1): MaxK(4, balanced=True)\n)'
    )
    assert not MaxK(3).state_dict()
    x = features(5, 7, device=device)
    compiled = torch.compile(MaxK(2), fullgraph=True, backend='aot_eager')
    assert torch.equal(compiled(x), kept(x, 2))


def test_module_refuses() -> None:
    for k in (1.0, '3', None, True):
        with pytest.raises(TypeError, match="'k'"):
            MaxK(k)  # type: ignore[arg-type]
    for k in (0, -1):
        with pytest.raises(ValueError, match="'k'"):
            MaxK(k)
    with pytest.raises(ValueError, match="'k'"):
        MaxK(8)(torch.randn(3, 7))
    with pytest.raises(TypeError, match="'x'"):
        MaxK(3)(torch.ones(3, 7, dtype=torch.long))
    with pytest.raises(ValueError, match="'x'"):
        MaxK(1)(torch.tensor(1.0))


# A dense matrix as the reference --------------------------------------------------------------


@pytest.mark.parametrize('root', [False, True])
@pytest.mark.parametrize('balanced', [False, True])
@pytest.mark.parametrize('k', [1, FEW, MANY])
def test_by_hand(k: int, balanced: bool, root: bool, device: torch.device) -> None:
    edge_index = edges()
    adj = torch.zeros(NODES, NODES, dtype=torch.float64)
    adj.index_put_((edge_index[1], edge_index[0]), torch.ones(()).double(), accumulate=True)
    x, edge_index = features(NODES, IN, device=device), edge_index.to(device)
    x_cpu = x.cpu()
    own = kept(x_cpu, k, balanced) if root else x_cpu

    _, conv = layers('sage', k, device, balanced=balanced, root=root)
    out = conv(x, edge_index)
    conv.cpu()
    mean = (adj @ kept(x_cpu, k, balanced)) / adj.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(out.cpu(), conv.lin_l(mean) + conv.lin_r(own))

    _, conv = layers('gin', k, device, balanced=balanced, root=root)
    out = conv(x, edge_index)
    conv.cpu()
    torch.testing.assert_close(
        out.cpu(), conv.nn(adj @ kept(x_cpu, k, balanced) + (1 + conv.eps) * own)
    )

    _, conv = layers('gcn', k, device, balanced=balanced)
    out = conv(x, edge_index)
    conv.cpu()
    adj = adj - adj.diag().diag() + torch.eye(NODES)
    scale = adj.sum(1).pow(-0.5).diag()
    torch.testing.assert_close(
        out.cpu(), scale @ adj @ scale @ kept(conv.lin(x_cpu), k, balanced) + conv.bias
    )


# Options --------------------------------------------------------------------------------------

GCN_OPTIONS = [
    dict(add_self_loops=loops, improved=improved, normalize=normalize, flow=flow, bias=bias)
    for loops, improved, normalize, flow, bias in itertools.product(
        (None, False), (False, True), (True, False), ('source_to_target', 'target_to_source'),
        (True, False),
    )
]  # fmt: skip


def weights(edge_index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    weight = torch.rand(edge_index.size(1), dtype=torch.float64) + 0.1
    # On CUDA, PyG takes any of several self-loops of a node: they get equal weights.
    loop = (edge_index[0] == edge_index[1]).cpu()
    weight[loop] = 0.5 + edge_index[0].cpu()[loop].double() / NODES
    return weight.to(edge_index.device, dtype)


@pytest.mark.parametrize('k', [FEW, MANY])
@pytest.mark.parametrize('weighted', ['unweighted', 'weighted', 'gradient'])
@pytest.mark.parametrize('prepared', [False, True])
def test_gcn(prepared: bool, weighted: str, k: int, device: torch.device) -> None:
    edge_index = edges().to(device)
    given, perm = prepare_edge_index(edge_index, (NODES, NODES)) if prepared else (edge_index, ...)
    weight, args = weights(edge_index), []
    x = features(NODES, IN, device=device)
    for number, options in enumerate(GCN_OPTIONS):
        theirs, ours = layers('gcn', k, device, balanced=number % 3 == 0, **options)
        if weighted != 'unweighted':
            args = [w.clone().requires_grad_(weighted == 'gradient')
                    for w in (weight, weight[perm])]  # fmt: skip
        expected = gradients(theirs, x, edge_index, *args[:1])
        got = gradients(must_fuse(ours), x, given, *args[1:])
        if weighted == 'gradient':
            expected[-1] = expected[-1][perm]
        assert_same(expected, got)


def test_gcn_keeps_the_gradient_of_weights_sparse(device: torch.device) -> None:
    """The gradient of edge weights is that of the kept features alone, and so is the loops'."""
    edge_index = edges().to(device)
    weight = weights(edge_index).requires_grad_()
    _, conv = layers('gcn', FEW, device)
    called = ops_of(lambda: gradients(conv, features(NODES, IN, device=device), edge_index, weight))
    assert called['cbsr_sddmm'] == 1
    assert called['cbsr_spmm'] == 1


@pytest.mark.parametrize('k', [FEW, MANY])
@pytest.mark.parametrize('root', [False, True])
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
@pytest.mark.parametrize(
    'kwargs',
    [
        {},
        {'aggr': 'sum'},
        {'aggr': 'max'},
        {'aggr': ['mean', 'std', 'min']},
        {'normalize': True},
        {'root_weight': False},
        {'bias': False},
        {'project': True},
        {'project': True, 'aggr': 'max', 'normalize': True},
    ],
)
def test_sage(kwargs: dict[str, Any], flow: str, root: bool, k: int, device: torch.device) -> None:
    theirs, ours = layers('sage', k, device, root=root, flow=flow, **kwargs)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    expected = gradients(theirs, x, edge_index)
    fuses = flow == 'source_to_target' or 'project' not in kwargs
    for given in (edge_index, graph, graph):  # At the third call the graph has its cache.
        assert_same(expected, gradients(must_fuse(ours) if fuses else ours, x, given))


@pytest.mark.parametrize('k', [FEW, MANY])
@pytest.mark.parametrize('train_eps', [False, True])
@pytest.mark.parametrize('root', [False, True])
@pytest.mark.parametrize('aggr', ['sum', 'mean', 'max'])
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_gin(
    flow: str, aggr: str, root: bool, train_eps: bool, k: int, device: torch.device
) -> None:
    theirs, ours = layers(
        'gin', k, device, root=root, flow=flow, aggr=aggr, train_eps=train_eps, balanced=root
    )
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, graph, graph):
        assert_same(expected, gradients(must_fuse(ours), x, given))
    with torch.no_grad():
        torch.testing.assert_close(ours(x, graph), expected[0])


@pytest.mark.parametrize('kind', KINDS)
def test_target_to_source_is_the_flipped_graph(kind: str, device: torch.device) -> None:
    _, ours = layers(kind, FEW, device, flow='target_to_source')
    _, other = layers(kind, FEW, device)
    other.load_state_dict(ours.state_dict())
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    assert_same(gradients(other, x, edge_index.flip(0)), gradients(ours, x, edge_index))


@pytest.mark.parametrize('kind', ['sage', 'gin'])
@pytest.mark.parametrize('root', ['none', 'raw', 'maxk'])
@pytest.mark.parametrize('extra', [{}, {'aggr': 'max'}, {'project': True}, {'train_eps': True}])
def test_bipartite(kind: str, root: str, extra: dict[str, Any], device: torch.device) -> None:
    if ('project' in extra and kind == 'gin') or ('train_eps' in extra and kind == 'sage'):
        pytest.skip('an option of the other layer')
    if 'train_eps' in extra and root == 'none':
        pytest.skip('nothing to learn')
    channels = ((IN, 10), OUT) if kind == 'sage' else (IN, OUT)
    theirs, ours = layers(kind, FEW, device, channels=channels, root=root == 'maxk', **extra)
    x_src = features(NODES, IN, device=device)
    x_dst = None if root == 'none' else features(DST, 10 if kind == 'sage' else IN, device=device)
    edge_index, size = edges(NODES, DST).to(device), (NODES, DST)
    graph, _ = prepare_edge_index(edge_index, size)
    expected = gradients(theirs, (x_src, x_dst), edge_index, size=size)
    must_fuse(ours)
    assert_same(expected, gradients(ours, (x_src, x_dst), edge_index, size=size))
    assert_same(expected, gradients(ours, (x_src, x_dst), graph))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('prepared', [False, True])
def test_all_channels_give_the_base_layer(kind: str, prepared: bool, device: torch.device) -> None:
    theirs = build(kind, 1).to(device)
    x = features(NODES, IN, device=device, dtype=torch.float32)
    edge_index = edges().to(device)
    graph = prepare_edge_index(edge_index, (NODES, NODES))[0] if prepared else edge_index
    for k in (None, OUT if kind == 'gcn' else IN):
        for balanced in (False, True):
            ours = build(kind, 2, k=k, balanced=balanced).to(device)
            ours.load_state_dict(theirs.state_dict())
            for fuse in (True, False):
                theirs.fuse = ours.fuse = fuse
                expected, got = gradients(theirs, x, graph), gradients(ours, x, graph)
                # On CUDA PyG's own path adds in any order, and so does a GCN on edges as they are.
                if device.type == 'cpu' or (fuse and (prepared or kind != 'gcn')):
                    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
                else:
                    assert_same(expected, got)


# Types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('root', [False, True])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('k', [FEW, MANY])
def test_dtypes(k: int, dtype: torch.dtype, root: bool, kind: str, device: torch.device) -> None:
    if kind == 'gcn' and root:
        pytest.skip('GCN has no root')
    theirs, ours = layers(kind, k, device, dtype, root=root)
    theirs.conv.load_state_dict(ours.state_dict())
    x = features(NODES, IN, device=device, dtype=dtype)
    if kind == 'gcn':  # The selection happens in low precision.
        ones = mask(ours.lin(x).detach(), k).double()
        theirs.keep = lambda x: x * ones
    edge_index = edges().to(device)
    got = gradients(must_fuse(ours), x, edge_index)
    assert all(v.dtype == dtype for v in got)
    for a, b in zip(gradients(theirs.double(), x.double(), edge_index), got, strict=True):
        bound = 30 * torch.finfo(dtype).eps * float(a.detach().abs().max() + 1)
        torch.testing.assert_close(b.double(), a, rtol=0, atol=bound)


@pytest.mark.parametrize('weighted', [False, True])
def test_mixed_dtypes(weighted: bool, device: torch.device) -> None:
    theirs, ours = layers('gcn', FEW, device, torch.bfloat16, bias=False)
    x, edge_index = features(NODES, IN, device=device, dtype=torch.bfloat16), edges().to(device)
    args = [weights(edge_index, torch.float32)] if weighted else []
    expected, got = theirs(x, edge_index, *args), must_fuse(ours)(x, edge_index, *args)
    assert got.dtype == (torch.float32 if weighted else torch.bfloat16)
    torch.testing.assert_close(got, expected, atol=1e-5 if weighted else 0.02, rtol=0.02)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'extra', [{}, {'root': True}, {'project': True}, {'train_eps': True, 'root': True}]
)
def test_autocast(kind: str, extra: dict[str, Any], device: torch.device) -> None:
    others = {'gcn': {'root', 'project', 'train_eps'}, 'sage': {'train_eps'}, 'gin': {'project'}}
    if extra.keys() & others[kind]:
        pytest.skip('an option of another layer')
    theirs, ours = layers(kind, FEW, device, torch.float32, **extra)
    x, edge_index = features(NODES, IN, device=device, dtype=torch.float32), edges().to(device)
    with torch.autocast(device.type, torch.bfloat16):
        expected, got = gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index)
    assert got[0].dtype == (torch.float32 if kind == 'gcn' else torch.bfloat16)
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.02 * float(a.detach().abs().max() + 1))
    with torch.autocast(device.type, torch.bfloat16):
        assert ours.double()(x.double(), edge_index).dtype == torch.float64


def test_refuses_other_types() -> None:
    for kind in KINDS:
        conv = build(kind, 2, k=FEW)
        with pytest.raises(TypeError, match="'x'"):
            conv(torch.ones(NODES, IN, dtype=torch.long), edges())


# Graphs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('layout', ['coo', 'csr', 'SparseTensor'])
@pytest.mark.filterwarnings('ignore:Converting sparse tensor', 'ignore:Sparse')
def test_sparse_matrices(layout: str, kind: str) -> None:
    theirs, ours = layers(kind, FEW, dtype=torch.float32)
    index = edges().unique(dim=1).flip(0)
    value = torch.rand(index.size(1))
    if layout == 'SparseTensor':
        torch_sparse = pytest.importorskip('torch_sparse')
        adj_t = torch_sparse.SparseTensor(
            row=index[0], col=index[1], value=value, sparse_sizes=(NODES, NODES)
        )
    else:
        adj_t = torch.sparse_coo_tensor(index, value, (NODES, NODES)).coalesce()
        adj_t = adj_t if layout == 'coo' else adj_t.to_sparse_csr()
    x = features(NODES, IN, dtype=torch.float32)
    theirs.conv.propagate = MessagePassing.propagate.__get__(theirs.conv)
    torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))
    if kind == 'gcn':
        must_fuse(ours)
        torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))


def test_cached(device: torch.device) -> None:
    theirs, ours = layers('gcn', FEW, device, cached=True)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    weight = weights(edge_index)
    must_fuse(ours)
    assert_same(gradients(theirs, x, edge_index, weight), gradients(ours, x, edge_index, weight))
    other = edge_index.flip(0)
    assert_same(gradients(theirs, x, other), gradients(ours, x, other))  # Both use the first.
    assert not any('to_csr' in op for op in ops_of(lambda: ours(x, other)))
    ours.reset_parameters()
    assert any('to_csr' in op for op in ops_of(lambda: ours(x, other)))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(('num_nodes', 'num_edges'), [(0, 0), (1, 0), (1, 3), (5, 0)])
def test_tiny_graphs(num_nodes: int, num_edges: int, kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, FEW, device)
    x = features(num_nodes, IN, device=device)
    edge_index = torch.zeros(2, num_edges, dtype=torch.long, device=device)
    graph, _ = prepare_edge_index(edge_index, (num_nodes, num_nodes))
    for given in (edge_index, graph):
        assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, given))


@pytest.mark.parametrize('kind', KINDS)
def test_strided_input_and_small_indices(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, FEW, device)
    x, edge_index = features(IN, NODES, device=device).t(), edges().to(device)
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index.int()))


@pytest.mark.parametrize('kind', KINDS)
def test_static_batch(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, FEW, device, root=kind != 'gcn')
    x, edge_index = features(3, NODES, IN, device=device), edges().to(device)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@pytest.mark.parametrize('kind', ['gcn', 'sage'])
def test_lazy_channels(kind: str, device: torch.device) -> None:
    ours = build(kind, 2, (-1, OUT), k=FEW).to(device).double()
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    first = ours(x, edge_index)
    theirs, _ = layers(kind, FEW, device)
    theirs.conv.load_state_dict(ours.state_dict())
    torch.testing.assert_close(first, theirs(x, edge_index))
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
def test_graph_first_met_in_inference_mode(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, FEW, device)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, graph), theirs(x, edge_index))
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, graph))


# Features in CBSR form ------------------------------------------------------------------------


class After(Module):
    """A layer with a function before it."""

    def __init__(self, conv: Module, before: Callable) -> None:
        super().__init__()
        self.conv, self.before = conv, before

    def forward(self, x: Any, *args: Any) -> Tensor:
        return self.conv(self.before(x), *args)


@pytest.mark.parametrize('kind', ['sage', 'gin'])
@pytest.mark.parametrize('aggr', ['sum', 'mean', 'max'])
@pytest.mark.parametrize('extra', [{}, {'project': True}, {'train_eps': True}])
def test_cbsr(kind: str, aggr: str, extra: dict[str, Any], device: torch.device) -> None:
    if ('project' in extra and kind == 'gin') or ('train_eps' in extra and kind == 'sage'):
        pytest.skip('an option of the other layer')
    theirs = build(kind, 0, aggr=aggr, **extra).to(device).double()
    ours = build(kind, 2, aggr=aggr, **extra).to(device).double()
    ours.load_state_dict(theirs.state_dict())
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    expected = gradients(After(theirs, lambda x: kept(x, FEW)), x, edge_index)
    sparse = After(ours, lambda x: maxk(x, FEW))
    if 'project' not in extra:
        must_fuse(ours)
    assert_same(expected, gradients(sparse, x, edge_index))
    assert_same(expected, gradients(sparse, x, prepare_edge_index(edge_index, (NODES, NODES))[0]))
    may_leave(ours)
    ours.fuse = False
    assert_same(expected, gradients(sparse, x, edge_index))
    ours.k = 2
    with pytest.raises(TypeError, match="'x' is a CBSR"):
        sparse(x, edge_index)
    ours.fuse = True
    with pytest.raises(TypeError, match="'x' is a CBSR"):
        sparse(x, edge_index)


def test_pairs_of_cbsr_and_dense_features(device: torch.device) -> None:
    theirs, ours = layers('sage', FEW, device, channels=((IN, 10), OUT))
    x = features(NODES, IN, device=device), features(DST, 10, device=device)
    edge_index = edges(NODES, DST).to(device)
    ours.k = None
    expected = theirs(x, edge_index)
    for fuse in (True, False):
        ours.fuse = fuse
        torch.testing.assert_close(ours((maxk(x[0], FEW), x[1]), edge_index), expected)
        root = CBSR.from_dense(x[1])
        torch.testing.assert_close(ours((maxk(x[0], FEW), root), edge_index), expected)
        ours.k = FEW  # The root is taken as it is.
        torch.testing.assert_close(ours((x[0], root), edge_index), expected)
        ours.maxk_root = True
        with pytest.raises(TypeError, match="'x' is a CBSR"):
            ours((x[0], root), edge_index)
        ours.k, ours.maxk_root = None, False


# Compilation, derivatives, hooks, copies ------------------------------------------------------


@pairs(('root', 'k', 'prepared', 'kind'), [False, True], [FEW, MANY], [False, True], KINDS)
def test_compile(root: bool, k: int, prepared: bool, kind: str, device: torch.device) -> None:
    if kind == 'gcn' and root:
        pytest.skip('GCN has no root')
    torch._dynamo.reset()
    options: dict[str, Any] = {'train_eps': True} if kind == 'gin' else {}
    theirs, ours = layers(kind, k, device, root=root, **options)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph = prepare_edge_index(edge_index, (NODES, NODES))[0] if prepared else edge_index
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, graph))


@pytest.mark.parametrize('gradient', [False, True])
def test_compile_gcn_with_weights(gradient: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = layers('gcn', FEW, device)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    args = edge_index, weights(edge_index).requires_grad_(gradient)
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, *args), gradients(compiled, x, *args))


@pytest.mark.parametrize('kind', KINDS)
def test_compile_of_pygs_own_path(kind: str) -> None:
    torch._dynamo.reset()
    theirs, ours = layers(kind, FEW, aggr='mul' if kind == 'gcn' else 'softmax')
    x, edge_index = features(NODES, IN), edges()
    compiled = torch.compile(ours, fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('root', [False, True])
def test_second_derivatives(root: bool, kind: str, device: torch.device) -> None:
    if kind == 'gcn' and root:
        pytest.skip('GCN has no root')
    # Without loops that are there twice: both would take the gradient of the one that counts.
    edge_index = edges(8, 8, 20).unique(dim=1).to(device)
    options: dict[str, Any] = {'train_eps': True} if kind == 'gin' else {}
    for k in (2, 5):
        _, conv = layers(kind, k, device, channels=(6, 6), root=root, **options)
        if kind == 'gin':
            conv.nn = torch.nn.Tanh()
        names = [name for name, _ in conv.named_parameters()]

        def run(x: Tensor, *rest: Tensor, names: Any = names, conv: Any = conv) -> Tensor:
            own, args = dict(zip(names, rest, strict=False)), rest[len(names) :]
            return torch.func.functional_call(conv, own, (x, edge_index, *args)).pow(2)

        inputs = [features(8, 6, device=device), *(p.detach().clone() for p in conv.parameters())]
        inputs += [weights(edge_index)] if kind == 'gcn' else []
        inputs = [v.requires_grad_() for v in inputs]
        tol = 1e-12 if device.type == 'cuda' else 0.0  # atomic additions, in any order
        assert torch.autograd.gradcheck(run, inputs, nondet_tol=tol, fast_mode=True)
        assert torch.autograd.gradgradcheck(run, inputs, nondet_tol=tol, fast_mode=True)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('hook', ['message', 'aggregate', 'propagate'])
@pytest.mark.parametrize('root', [False, True])
def test_message_passing_hooks_run(hook: str, root: bool, kind: str) -> None:
    if kind == 'gcn' and root:
        pytest.skip('GCN has no root')
    theirs, ours = layers(kind, FEW, root=root)
    x, edge_index = features(NODES, IN), edges()
    handles = [
        getattr(conv, f'register_{hook}_forward_hook')(lambda module, args, out: 2 * out)
        for conv in (theirs.conv, ours)
    ]
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))
    for handle in handles:
        handle.remove()
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))


def test_maxk_follows_whatever_linear_map_there_is() -> None:
    theirs, ours = layers('gcn', FEW)
    x, edge_index = features(NODES, IN), edges()
    for conv in (theirs.conv, ours):
        conv.lin.register_forward_hook(lambda module, args, out: out + torch.linspace(-9, 9, OUT))
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))
    swapped = Sequential(Linear(IN, 5), Linear(5, OUT)).double()
    theirs.conv.lin, ours.lin = copy.deepcopy(swapped), swapped
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))
    may_leave(ours)
    ours.fuse = False
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
def test_subclasses(kind: str) -> None:
    """A subclass may be the first layer that the process builds."""
    base = LAYERS[kind][2]

    class Same(base):  # type: ignore[valid-type, misc]
        pass

    class Doubled(base):  # type: ignore[valid-type, misc]
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    class Propagates(base):  # type: ignore[valid-type, misc]
        def propagate(self, *args: Any, **kwargs: Any) -> Tensor:
            return 3 * super().propagate(*args, **kwargs)

    x, edge_index = features(NODES, IN), edges()
    options: dict[str, Any] = {'normalize': False} if kind == 'gcn' else {}
    theirs, ours = layers(kind, FEW, **options)
    convs = []
    for cls in (Same, Doubled, Propagates):
        args = (copy.deepcopy(ours.nn), 0.3) if kind == 'gin' else (IN, OUT)
        conv = cls(*args, k=FEW, **options).double()
        convs.append(conv)
        conv.load_state_dict(ours.state_dict())
        conv.fuse = type(conv) is not Propagates
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(convs[0]), x, edge_index))
    for conv, factor in zip(convs[1:], (2, 3), strict=True):
        handle = theirs.conv.register_propagate_forward_hook(lambda *a, f=factor: f * a[-1])
        assert_same(gradients(theirs, x, edge_index), gradients(conv, x, edge_index))
        handle.remove()
    assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
def test_explain(kind: str) -> None:
    theirs, ours = layers(kind, FEW, root=kind != 'gcn')
    x, edge_index = features(NODES, IN), edges()
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    plain = theirs(x, edge_index)
    for conv in (theirs.conv, ours):
        conv.explain = True
        conv._edge_mask = torch.linspace(-1, 1, edge_index.size(1), dtype=torch.float64)
        conv._loop_mask = torch.ones(edge_index.size(1), dtype=torch.bool)
    masked = gradients(theirs, x, edge_index)
    assert not torch.allclose(masked[0], plain)
    assert_same(masked, gradients(ours, x, edge_index))
    ours.explain = False
    torch.testing.assert_close(must_fuse(ours)(x, edge_index), plain)


@pytest.mark.parametrize('kind', KINDS)
def test_explainer(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, FEW, device, torch.float32)
    x = features(12, IN, device=device, dtype=torch.float32)
    edge_index = edges(12, 12, 40).to(device)
    masks = []
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


@pytest.mark.parametrize('kind', KINDS)
def test_is_a_pyg_layer(kind: str) -> None:
    theirs, ours = layers(kind, FEW)
    assert isinstance(ours, LAYERS[kind][0])
    assert ours.state_dict().keys() == theirs.conv.state_dict().keys()
    theirs.conv.load_state_dict(ours.state_dict())
    x, edge_index = features(NODES, IN), edges()
    expected = gradients(theirs, x, edge_index)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert (type(again), again.k) == (type(ours), FEW)
        assert_same(expected, gradients(must_fuse(again), x, edge_index))
        may_leave(again)
        again.fuse = False
        assert_same(expected, gradients(again, x, edge_index))


def test_repr() -> None:
    assert repr(MaxKGCNConv(5, 3, k=2)) == 'MaxKGCNConv(5, 3, k=2)'
    assert repr(MaxKSAGEConv(5, 3, k=None)) == 'MaxKSAGEConv(5, 3, aggr=mean, k=None)'
    assert repr(MaxKGINConv(ReLU(), k=2, balanced=True)) == (
        'MaxKGINConv(nn=ReLU(), k=2, balanced=True)'
    )


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')
def test_torchscript(kind: str) -> None:
    """TorchScript compiles the layer without MaxK only."""
    ours = build(kind, 2)
    x, edge_index = features(NODES, IN, dtype=torch.float32), edges()
    torch.testing.assert_close(torch.jit.script(ours)(x, edge_index), ours(x, edge_index))
    with pytest.raises(NotImplementedError, match=r'k=3.*torch\.compile'):
        torch.jit.script(Sequential(build(kind, 2, k=FEW)))


def test_torchscript_where_no_layer_of_pygs_was_built_before() -> None:
    program = (
        'import torch; from pyg_fast.nn import MaxKSAGEConv\n'
        'conv, x = MaxKSAGEConv(2, 2, k=None), torch.randn(3, 2)\n'
        'edge_index = torch.tensor([[0], [1]])\n'
        'torch.testing.assert_close(torch.jit.script(conv)(x, edge_index), conv(x, edge_index))'
    )
    result = _forks.run('-c', program)
    assert result.returncode == 0, result.stderr


def test_accelerate_leaves_it_alone() -> None:
    model = Sequential(MaxKGCNConv(4, 4, k=2), MaxKSAGEConv(4, 4, k=2), SAGEConv(4, 4))
    pyg_fast.accelerate(model)
    assert [(r.layer, r.fused, r.reason) for r in pyg_fast.accelerate_report(model)] == [
        ('MaxKGCNConv', 'MaxKGCNConv', None),
        ('MaxKSAGEConv', 'MaxKSAGEConv', None),
        ('SAGEConv', 'FusedSAGEConv', None),
    ]
    pyg_fast.restore(model)
    assert [type(conv) for conv in model] == [MaxKGCNConv, MaxKSAGEConv, SAGEConv]
    assert [conv.k for conv in model[:2]] == [2, 2]


def test_bad_k() -> None:
    for kind in KINDS:
        for k in (2.0, '2', True):
            with pytest.raises(TypeError, match="'k'"):
                build(kind, 2, k=k)
        for k in (0, -1):
            with pytest.raises(ValueError, match="'k'"):
                build(kind, 2, k=k)
    with pytest.raises(ValueError, match="'k' must be 1 to 20, the number of channels, got 21"):
        MaxKGCNConv(IN, OUT, k=OUT + 1)
    with pytest.raises(ValueError, match="'k'"):
        MaxKSAGEConv(IN, OUT, k=IN + 1)
    with pytest.raises(ValueError, match="'k'"):
        MaxKSAGEConv((IN, 4), OUT, k=5, maxk_root=True)
    MaxKSAGEConv((IN, 4), OUT, k=5)
    for conv in (MaxKSAGEConv(-1, OUT, k=IN + 1), MaxKGINConv(Linear(IN, OUT), k=IN + 1)):
        for fuse in (True, False):
            conv.fuse = fuse
            with pytest.raises(ValueError, match="'k'"):
                conv(torch.randn(NODES, IN), edges())


@pytest.mark.parametrize('kind', KINDS)
def test_bad_input(kind: str, device: torch.device, raises: Any) -> None:
    _, ours = layers(kind, FEW, device, torch.float32)
    x, edge_index = features(NODES, IN, device=device, dtype=torch.float32), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    for value in (NODES, -1):
        wrong = edge_index.clone()
        wrong[1, 7] = value
        with raises(IndexError, match='edge_index'):
            ours(x, wrong)
    with raises(ValueError, match='size|edge_index'):
        ours(x[1:], graph)
    with raises(ValueError, match="'edge_index' is on meta"):
        ours(x, edge_index.to('meta'))
    if kind == 'gcn':
        with raises(ValueError, match='tuple'):
            ours((x, x), edge_index)


# Time and memory ------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', KINDS)
def test_sorts_a_plain_graph_once(kind: str, device: torch.device) -> None:
    _, ours = layers(kind, FEW, device)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    called = ops_of(lambda: gradients(ours, x, edge_index))
    # On CUDA one kernel sorts a small graph with positions.
    assert called['to_csr' if device.type == 'cuda' else 'to_csr_unweighted'] == 1
    assert 'transpose_csr' not in called
    assert called['cbsr_spmm'] == called['cbsr_spmm_backward'] == 1


class Shapes(TorchDispatchMode):
    """Records the shape of every new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen |= {tuple(t.shape) for t in (out if isinstance(out, (tuple, list)) else [out])
                      if isinstance(t, Tensor)}  # fmt: skip
        return out


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('root', [False, True])
def test_memory(root: bool, kind: str, device: torch.device) -> None:
    """No message is stored, and what waits for the backward pass is in compressed form."""
    if kind == 'gcn' and root:
        pytest.skip('GCN has no root')
    _, conv = layers(kind, FEW, device, root=root)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    below = torch.randn(IN, IN, dtype=torch.float64, device=device, requires_grad=True)
    waiting: dict[tuple[int, ...], set[int]] = {}

    def note(tensor: Tensor) -> Tensor:
        waiting.setdefault(tuple(tensor.shape), set()).add(tensor.data_ptr())
        return tensor

    with Shapes() as shapes, torch.autograd.graph.saved_tensors_hooks(note, lambda v: v):
        conv((x @ below).exp(), edge_index).sum().backward()
    assert below.grad is not None
    largest = max(math.prod(shape) for shape in shapes.seen)
    assert largest <= max(NODES * OUT, edge_index.numel()) < edge_index.size(1) * FEW
    # The two of the layers below, and for the linear map above what was aggregated.
    assert len(waiting[NODES, IN]) == 2 + (kind != 'gcn')
    assert (NODES, OUT) in shapes.seen
    assert (NODES, OUT) not in waiting


@pytest.mark.parametrize('kind', KINDS)
def test_captured_training_step(kind: str, device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('CUDA graphs need a GPU')
    edge_index = edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (NODES, NODES))
    _, conv = layers(kind, FEW, device, torch.float32, root=kind != 'gcn')
    x = features(NODES, IN, device=device, dtype=torch.float32)
    check_training(conv, lambda conv: conv(x, graph).square().sum())


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.filterwarnings('ignore:.*CuBLAS')
def test_deterministic(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, FEW, device)
    x, edge_index = features(NODES, IN, device=device), edges(NODES, NODES, 20000).to(device)
    expected = gradients(theirs, x, edge_index)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        runs = [gradients(must_fuse(ours), x, edge_index) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(expected, runs[0])
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
