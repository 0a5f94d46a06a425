"""Evaluation of all nodes in blocks, against the model in evaluation."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from _live import live_bytes
from torch import Tensor
from torch.nn import Dropout, Linear, ReLU
from torch_geometric.data import Data

from pyg_fast.nn import (
    FusedGATConv,
    FusedGCNConv,
    FusedGINConv,
    FusedSAGEConv,
    PathPreparedGCNConv,
    PathPreparedGINConv,
    PathPreparedGNN,
    PathPreparedSAGEConv,
    inference,
)
from pyg_fast.transforms import ToCSR
from tests.papers.paths.test_convs import assert_equal

N, E = 500, 3000


def data_of(
    device: torch.device, dtype: torch.dtype = torch.double, sorts: bool = True, size: int = N
) -> Data:
    edge_index = torch.randint(size, (2, E))
    edge_index[1, :200] = 7  # a row of many edges
    x, weight = torch.randn(size, 12, dtype=dtype), torch.rand(E, dtype=dtype)
    data = Data(x=x, edge_index=edge_index, edge_weight=weight).to(device)
    return ToCSR()(data) if sorts else data


@pytest.fixture(autouse=True)
def small_blocks(limits: Callable[..., None]) -> None:
    limits(fewest_rows_of_inference=8, rows_of_inference=64)


def least_of(call: Any) -> int:
    """The number that the error for too little memory gives."""
    with pytest.raises(ValueError, match="'max_bytes' must be at least") as raised:
        call(1)
    return int(str(raised.value).split('at least ')[1].split()[0])


def modes(call: Any, least: int) -> list[Tensor]:
    """The result with any, the least, and some memory in between."""
    return [call(None), *(call(least + more) for more in (0, 20_000, 100_000, 1_000_000))]


@pytest.mark.parametrize('sorts', [True, False])
@pytest.mark.parametrize(
    ('conv', 'options'),
    [('gcn', {}), ('gcn', {'improved': True, 'norm': 'layer_norm', 'act': 'tanh'}),
     ('gcn', {'normalize': False, 'bias': False}), ('sage', {}),
     ('sage', {'normalize': True, 'aggr': 'sum'}), ('sage', {'root_weight': False}),
     ('gin', {'train_eps': True, 'eps': 0.3})],
)  # fmt: skip
def test_equals_the_model(
    device: torch.device, conv: str, options: dict[str, Any], sorts: bool
) -> None:
    data = data_of(device, sorts=sorts)
    net = PathPreparedGNN(conv, 12, 8, 6, 3, dropout=0.5, **options).to(device, torch.double)
    weight = (data.edge_weight,) if conv == 'gcn' else ()

    def call(max_bytes: int | None) -> Tensor:
        return net.inference(data, max_bytes)

    expected = net.eval()(data.x, data.edge_index, *weight)
    net.train()
    for out in modes(call, least_of(call)):
        assert_equal([out], [expected])
        assert not out.requires_grad
    assert net.training
    if conv == 'gcn':
        del data.edge_weight
        assert_equal([net.inference(data)], [net.eval()(data.x, data.edge_index)])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(device: torch.device, dtype: torch.dtype) -> None:
    data = data_of(device, dtype)
    net = PathPreparedGNN('sage', 12, 8, 6, 3).to(device, dtype)
    expected = net.double()(data.x.double(), data.edge_index)
    net = net.to(dtype)
    for out in modes(lambda b: net.inference(data, b), least_of(lambda b: net.inference(data, b))):
        assert out.dtype == dtype
        assert (out - expected).norm() <= 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize('convs', [
    (PathPreparedSAGEConv, PathPreparedGINConv, PathPreparedGCNConv),
    (FusedSAGEConv, FusedGINConv, FusedGCNConv),
], ids=['paths', 'exact'])  # fmt: skip
def test_a_stack_of_layers(device: torch.device, convs: Any) -> None:
    sage, gin, gcn = convs
    data = data_of(device, torch.double)
    layers: list[Any] = [
        sage(12, 9), pyg.LayerNorm(9, mode='node'), ReLU(), gin(torch.nn.Linear(9, 4)), torch.tanh,
        gcn(4, 5), lambda x: x.log_softmax(1),
    ]  # fmt: skip
    for layer in layers:
        if isinstance(layer, torch.nn.Module):
            layer.to(device, torch.double)
    x = data.x
    for layer in layers:
        is_conv = isinstance(layer, pyg.MessagePassing)
        x = layer(x, data.edge_index) if is_conv else layer(x)

    def call(max_bytes: int | None) -> Tensor:
        return inference(layers, data.x, data.edge_index, max_bytes=max_bytes)

    for out in modes(call, least_of(call)):
        assert_equal([out], [x.detach()])


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
def test_stays_within_its_memory(
    device: torch.device, limits: Callable[..., None], conv: str
) -> None:
    data = data_of(device, torch.float)
    net = PathPreparedGNN(conv, 12, 16, 6, 3).to(device)

    def call(max_bytes: int | None) -> Tensor:
        return net.inference(data, max_bytes)

    least = least_of(call)
    call(least)  # The graph keeps what it needs.
    result = N * 6 * 4
    full = N * (16 + 16) * 4
    assert least < full
    for max_bytes in (full + 40_000, 2 * full):  # All features are on the device.
        assert live_bytes(partial(call, max_bytes), device)[1] <= max_bytes + result
    if device.type == 'cuda':  # On a CPU features between layers count too.
        # Many times what the allocator adds to small tensors, less than the features of a layer.
        limits(fewest_rows_of_inference=1024)
        data = data_of(device, torch.float, size=40 * N)
        most = least_of(partial(net.inference, data))
        net.inference(data, most)
        used = live_bytes(lambda: net.inference(data, most), device)[1]
        assert used <= most + 40 * result < 40 * full


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('graph_on_host', [False, True])
@pytest.mark.parametrize('pinned', [False, True])
def test_host_memory(cuda: torch.device, conv: str, graph_on_host: bool, pinned: bool) -> None:
    data = data_of(torch.device('cpu'))
    net = PathPreparedGNN(conv, 12, 8, 6, 3).double().eval()
    weight = (data.edge_weight,) if conv == 'gcn' else ()
    expected = net(data.x, data.edge_index, *weight)
    net = net.to(cuda)
    if not graph_on_host:
        data = ToCSR()(data.to(cuda))
        data.x = data.x.cpu()
    if pinned:
        data.x = data.x.pin_memory()

    def call(max_bytes: int | None) -> Tensor:
        return net.inference(data, max_bytes)

    least = least_of(call)
    assert_equal([call(None)], [expected])
    if not pinned:
        with pytest.raises(ValueError, match='pinned host memory'):
            call(least)
        return
    for out in modes(call, least):
        assert out.device.type == 'cpu'
        assert_equal([out], [expected])
    # The row pointers of each block of eight rows take 512 bytes, twice with their scales.
    assert live_bytes(lambda: call(least), cuda)[1] <= least + 65_536


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    data = data_of(device, torch.float)
    conv = PathPreparedGCNConv(12, 4).to(device)
    args = data.x, data.edge_index
    with pytest.raises(TypeError, match="'max_bytes' must be an integer"):
        inference([conv], *args, max_bytes=1e9)  # type: ignore[arg-type]
    for wrong in (None, conv, PathPreparedGNN('gcn', 12, 8, 6, 2), [conv, 'relu']):
        with pytest.raises(TypeError, match="'layers' must be a list of layers"):
            inference(wrong, *args)  # type: ignore[arg-type]
    for none in ([], [ReLU()]):
        with pytest.raises(TypeError, match="'layers' must hold a GCN, SAGE or GIN layer of ours"):
            inference(none, *args)
    with pytest.raises(TypeError, match='got FusedGATConv'):
        inference([conv, FusedGATConv(4, 4)], *args)
    with pytest.raises(ValueError, match=r"'layers\[1\]' must compute each row separately"):
        inference([conv, pyg.PairNorm()], *args)
    with pytest.raises(ValueError, match='aggregated by kernels'):
        inference([PathPreparedSAGEConv(12, 4, aggr='max').to(device), Dropout(0)], *args)
    sage, after = FusedSAGEConv(12, 4).to(device), FusedGINConv(Linear(5, 4)).to(device)
    with pytest.raises(ValueError, match="'edge_weight' is not supported by FusedSAGEConv"):
        inference([sage], *args, data.edge_weight)
    with pytest.raises(TypeError, match="'edge_weight' must be a tensor, got str"):
        inference([conv], *args, 'w')  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'layers\[2\]' must take the features that it gets"):
        inference([conv, ReLU(), after], *args)
    with pytest.raises(ValueError, match="'x' must have 12 columns"):
        inference([conv], data.x[:, :5], data.edge_index)
    for x in ([1.0], None, data):
        with pytest.raises(TypeError, match="'x' must be a tensor"):
            inference([conv], x, data.edge_index)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'edge_index' must be a tensor"):
        inference([conv], data.x, None)  # type: ignore[arg-type]
    net = PathPreparedGNN('gcn', 12, 8, 6, 2).to(device)
    with pytest.raises(ValueError, match="'data' must have a tensor 'edge_index'"):
        net.inference(Data(x=data.x))
    with pytest.raises(TypeError, match="'data' must be a torch_geometric.data.Data, got Tensor"):
        net.inference(data.x)
    handle = conv.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match='no hooks or patches'):
        inference([conv], *args)
    handle.remove()
