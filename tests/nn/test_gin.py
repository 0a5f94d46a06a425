"""PathPreparedGINConv against PyG's GINConv, on the same weights."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch_geometric.nn import MLP, GINConv

from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import FusedGINConv, PathPreparedGINConv
from tests._report import must_fuse

SRC, DST, EDGES = 30, 20, 150


def edges(num_src: int = SRC, num_dst: int = SRC, num_edges: int = EDGES) -> Tensor:
    """Edges with double ones, of which some nodes have none."""
    edge_index = torch.stack([
        torch.randint(num_src - 3, (num_edges,)), torch.randint(num_dst - 3, (num_edges,))
    ])  # fmt: skip
    return torch.cat([edge_index, edge_index[:, :9]], dim=1)


def layers(
    device: Any = 'cpu', dtype: torch.dtype = torch.float64, in_channels: int = 6, **kwargs: Any
) -> tuple[GINConv, PathPreparedGINConv]:
    network = Sequential(Linear(in_channels, 7), ReLU(), Linear(7, 5))
    theirs = GINConv(copy.deepcopy(network), **kwargs).to(device, dtype)
    ours = PathPreparedGINConv(network, **kwargs).to(device, dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def gradients(conv: Any, x: Any, edge_index: Any, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of inputs and parameters."""
    pair = x if isinstance(x, tuple) else (x,)
    pair = tuple(None if v is None else v.detach().requires_grad_() for v in pair)
    out = conv(pair if isinstance(x, tuple) else pair[0], edge_index, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
    inputs = [*(v for v in pair if v is not None), *conv.parameters()]
    return [out, *torch.autograd.grad((out.double() * weight.view_as(out)).sum(), inputs)]


def assert_same(theirs: list[Tensor], ours: list[Tensor]) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize('train_eps', [False, True])
@pytest.mark.parametrize('aggr', ['add', 'sum', 'mean', 'max', 'std', 'powermean'])
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_square(flow: str, aggr: str, train_eps: bool, device: torch.device) -> None:
    theirs, ours = layers(device, aggr=aggr, eps=0.3, train_eps=train_eps, flow=flow)
    x, edge_index = torch.randn(SRC, 6, dtype=torch.float64, device=device), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, SRC))
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, graph, graph):
        assert_same(expected, gradients(must_fuse(ours), x, given))
    with torch.no_grad():
        torch.testing.assert_close(ours(x, graph), expected[0])


@pytest.mark.parametrize('train_eps', [False, True])
@pytest.mark.parametrize('root', [True, False])
def test_bipartite(root: bool, train_eps: bool, device: torch.device) -> None:
    theirs, ours = layers(device, eps=0.3, train_eps=train_eps and root)
    x_src = torch.randn(SRC, 6, dtype=torch.float64, device=device)
    x_dst = torch.randn(DST, 6, dtype=torch.float64, device=device) if root else None
    edge_index = edges(SRC, DST).to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, DST))
    expected = gradients(theirs, (x_src, x_dst), edge_index, size=(SRC, DST))
    must_fuse(ours)
    assert_same(expected, gradients(ours, (x_src, x_dst), edge_index, size=(SRC, DST)))
    assert_same(expected, gradients(ours, (x_src, x_dst), graph))


def test_other_aggregations_are_left_to_pyg() -> None:
    theirs, ours = layers(aggr='softmax')
    x, edge_index = torch.randn(SRC, 6, dtype=torch.float64), edges()
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize('train_eps', [False, True])
def test_dtypes(dtype: torch.dtype, train_eps: bool, device: torch.device) -> None:
    theirs, ours = layers(device, dtype, eps=0.25, train_eps=train_eps)
    x, edge_index = torch.randn(SRC, 6, device=device).to(dtype), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, SRC))
    got = gradients(must_fuse(ours), x, graph)
    assert all(v.dtype == dtype for v in got)
    for a, b in zip(gradients(theirs.double(), x.double(), edge_index), got, strict=True):
        bound = 30 * torch.finfo(dtype).eps * float(a.detach().abs().max() + 1)
        torch.testing.assert_close(b.double(), a, rtol=0, atol=bound)


@pytest.mark.parametrize('eps_dtype', [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize('train_eps', [False, True])
def test_eps_of_another_dtype(
    eps_dtype: torch.dtype, dtype: torch.dtype, train_eps: bool, device: torch.device
) -> None:
    theirs, ours = (
        conv(torch.nn.Identity(), eps=0.25, train_eps=train_eps).to(device, eps_dtype)
        for conv in (GINConv, PathPreparedGINConv)
    )
    x, edge_index = torch.randn(SRC, 6, device=device).to(dtype), edges().to(device)
    expected, got = theirs(x, edge_index), must_fuse(ours)(x, edge_index)
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)  # also compares the types


@pytest.mark.parametrize('train_eps', [False, True])
def test_autocast(train_eps: bool, device: torch.device) -> None:
    theirs, ours = layers(device, torch.float32, train_eps=train_eps)
    x, edge_index = torch.randn(SRC, 6, device=device), edges().to(device)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast(device.type, torch.bfloat16):
            expected = gradients(theirs, x.to(dtype), edge_index)
            got = gradients(must_fuse(ours), x.to(dtype), edge_index)
        for a, b in zip(expected, got, strict=True):
            bound = 0.02 * float(a.detach().abs().max() + 1)
            torch.testing.assert_close(b, a, rtol=0.05, atol=bound)


@pytest.mark.parametrize(('train_eps', 'prepared'), [(False, True), (True, False)])
def test_compile(prepared: bool, train_eps: bool, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = layers(device, train_eps=train_eps, eps=0.3)
    x, edge_index = torch.randn(SRC, 6, dtype=torch.float64, device=device), edges().to(device)
    graph = prepare_edge_index(edge_index, (SRC, SRC))[0] if prepared else edge_index
    compiled = torch.compile(must_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, graph))


@pytest.mark.parametrize('train_eps', [False, True])
def test_second_derivatives(train_eps: bool, device: torch.device) -> None:
    conv = PathPreparedGINConv(torch.nn.Tanh(), eps=0.3, train_eps=train_eps).to(device).double()
    edge_index = edges(7, 7, 20).to(device)
    x = torch.randn(7, 2, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: must_fuse(conv)(x, edge_index), x)


def test_hooks_and_explain() -> None:
    theirs, ours = layers(eps=0.3)
    x, edge_index = torch.randn(SRC, 6, dtype=torch.float64), edges()
    plain = theirs(x, edge_index)
    handles = [
        conv.register_message_forward_hook(lambda module, args, out: 2 * out)
        for conv in (theirs, ours)
    ]
    assert not torch.allclose(theirs(x, edge_index), plain)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))
    for handle in handles:
        handle.remove()
    for conv in (theirs, ours):
        conv.explain = True
        conv._edge_mask = torch.linspace(-1, 1, edge_index.size(1), dtype=torch.float64)
    assert not torch.allclose(theirs(x, edge_index), plain)
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))


@pytest.mark.parametrize('layout', [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.filterwarnings('ignore:Converting sparse tensor', 'ignore:Sparse')
def test_torch_sparse_with_values(layout: torch.layout) -> None:
    theirs, ours = layers(dtype=torch.float32)
    index = edges().unique(dim=1).flip(0)
    adj_t = torch.sparse_coo_tensor(index, torch.rand(index.size(1)), (SRC, SRC)).coalesce()
    adj_t = adj_t if layout == torch.sparse_coo else adj_t.to_sparse_csr()
    x = torch.randn(SRC, 6)
    torch.testing.assert_close(ours(x, adj_t), theirs(x, adj_t))


def test_sparse_tensor() -> None:
    torch_sparse = pytest.importorskip('torch_sparse')
    theirs, ours = layers(dtype=torch.float32)
    row, col = edges().flip(0)
    adj_t = torch_sparse.SparseTensor(
        row=row, col=col, value=torch.rand(row.numel()), sparse_sizes=(SRC, SRC)
    )
    x = torch.randn(SRC, 6)
    assert_same(gradients(theirs, x, adj_t), gradients(ours, x, adj_t))


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')
def test_torchscript() -> None:
    theirs, ours = layers(dtype=torch.float32)
    x, edge_index = torch.randn(SRC, 6), edges()
    torch.testing.assert_close(torch.jit.script(ours)(x, edge_index), theirs(x, edge_index))


def test_copies() -> None:
    theirs, ours = layers(eps=0.3, train_eps=True)
    x, edge_index = torch.randn(SRC, 6, dtype=torch.float64), edges()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(again) is PathPreparedGINConv
        assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(again), x, edge_index))


def test_lazy_channels_and_reset() -> None:
    conv = PathPreparedGINConv(MLP([-1, 7, 5], norm=None), eps=0.3, train_eps=True)
    x, edge_index = torch.randn(SRC, 6), edges()
    must_fuse(conv)(x, edge_index)
    assert conv.nn.lins[0].in_channels == 6
    conv.eps.data.fill_(9.0)
    conv.reset_parameters()
    torch.testing.assert_close(conv.eps.data, torch.tensor([0.3]))


@pytest.mark.parametrize('num_nodes', [0, 4])
@pytest.mark.parametrize('train_eps', [False, True])
def test_no_edges(train_eps: bool, num_nodes: int, device: torch.device) -> None:
    theirs, ours = layers(device, eps=0.3, train_eps=train_eps)
    x = torch.randn(num_nodes, 6, dtype=torch.float64, device=device)
    edge_index = torch.empty(2, 0, dtype=torch.long, device=device)
    graph, _ = prepare_edge_index(edge_index, (num_nodes, num_nodes))
    for given in (edge_index, graph):
        assert_same(gradients(theirs, x, edge_index), gradients(must_fuse(ours), x, given))


def test_no_network() -> None:
    with pytest.raises(TypeError, match="'nn' must be a network, .* got int"):
        FusedGINConv(64, 8)
    FusedGINConv(torch.relu)  # as PyG: whatever can be called


def test_bad_input(device: torch.device, raises: Any) -> None:
    _, ours = layers(device, torch.float32)
    x, edge_index = torch.randn(SRC, 6, device=device), edges().to(device)
    graph, _ = prepare_edge_index(edge_index, (SRC, SRC))
    for value in (SRC, -1):
        wrong = edge_index.clone()
        wrong[1, 3] = value
        with raises(IndexError, match=r'edge_index\[1\]'):
            ours(x, wrong)
    with raises(ValueError, match='size'):
        ours(x[1:], graph)
    with raises(ValueError, match='size'):
        ours(x, edge_index, size=(SRC, SRC + 1))
    with raises(ValueError, match="'edge_index' is on meta"):
        ours(x, edge_index.to('meta'))
