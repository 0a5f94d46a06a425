"""The transforms that put execution paths on data."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_geometric.transforms as T
from torch_geometric import EdgeIndex
from torch_geometric.data import Data, HeteroData
from torch_geometric.datasets import Planetoid

from pyg_fast.graph import ExecutionPath, PreparedGraph
from pyg_fast.graph.graph import PreparedRequest, cache_of
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.transforms import ExecutionPaths, Prepare, ToCSR


def example() -> Data:
    mask = torch.zeros(100, dtype=torch.bool)
    mask[:4] = True
    return Data(
        x=torch.randn(100, 5), edge_index=torch.randint(100, (2, 150)), y=torch.randint(3, (100,)),
        train_mask=mask, val_mask=~mask,
    )  # fmt: skip


def test_prepare(device: torch.device) -> None:
    data = example().to(device)
    out = T.Compose([T.NormalizeFeatures(), Prepare(num_layers=2)])(data)
    assert isinstance(out.edge_index, EdgeIndex)
    assert [type(path) for path in out.execution_paths] == [ExecutionPath] * 2
    assert out.execution_paths[0].device == out.edge_index.device
    assert out.execution_paths[1].num_dst == 4
    net = PathPreparedGNN('gcn', 5, 8, 3, 2).to(device)
    for paths in (out.execution_paths, copy.copy(out).execution_paths):
        loss = net(out.x, out.edge_index, paths=paths, mask=out.train_mask)[out.train_mask].sum()
        loss.backward()


def test_data_moves_its_paths(device: torch.device) -> None:
    data = Prepare(2)(example()).to(device)
    assert {path.device.type for path in data.execution_paths} == {device.type}
    net = PathPreparedGNN('sage', 5, 8, 3, 2).to(device)
    out = net(data.x, data.edge_index, paths=data.execution_paths, mask=data.train_mask)
    out[data.train_mask].sum().backward()


def test_another_mask_and_options() -> None:
    data = ExecutionPaths(
        3, mask='val_mask', forward=True, checks=False, strict=False, debug=True
    )(example())  # fmt: skip
    path = data.execution_paths[2]
    assert (path.num_layers, path.num_dst) == (3, 96)
    assert (path.forward, path.checks, path.strict, path.debug) == (True, False, False, True)


def test_edge_weights() -> None:
    data = example()
    assert ExecutionPaths(1)(copy.copy(data)).execution_paths[0].perm is None
    data.edge_weight = torch.rand(150)
    assert ExecutionPaths(1)(copy.copy(data)).execution_paths[0].perm is not None
    assert ExecutionPaths(1, edge_weight=None)(copy.copy(data)).execution_paths[0].perm is None


def test_after_preparing_again_paths_are_new() -> None:
    data = Prepare(2)(example())
    data.train_mask = data.train_mask.roll(50)
    again = Prepare(2)(data)
    assert again.execution_paths[1].dst_nodes.tolist() == [50, 51, 52, 53]


@pytest.mark.parametrize('forward', [False, True])
def test_groups(device: torch.device, forward: bool) -> None:
    data = example().to(device)
    plain = Prepare(2, group_sizes=None, forward=forward)(copy.copy(data))
    grouped = Prepare(2, width=16, forward=forward)(copy.copy(data))
    usual = {(path.group_size, path.t_group_size)
             for path in plain.execution_paths if not path.is_whole}  # fmt: skip
    assert usual == {(32, 32) if device.type == 'cuda' else (None, None)}
    sizes = {path.group_size for path in grouped.execution_paths if not path.is_whole}
    assert sizes
    assert None not in sizes
    assert 'group_sizes=(' in repr(grouped.execution_paths[1])
    net = PathPreparedGNN('gcn', 5, 8, 3, 2).to(device).double()
    losses = []
    for each in (plain, grouped, grouped.clone()):
        out = net(data.x.double(), each.edge_index, paths=each.execution_paths)
        loss = out[data.train_mask].square().sum()
        losses.append([loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))])
    for other in losses[1:]:
        for a, b in zip(losses[0], other, strict=True):
            assert (a - b).norm() <= 1e-10 * (1 + a.norm())
    with pytest.raises(ValueError, match="'t_size' must be positive"):
        grouped.execution_paths[1].set_group_sizes(4, 0)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
def test_paths_alone_stay(device: torch.device, conv: str) -> None:
    data = example().to(device)
    lean = Prepare(2, keep_edge_index=False, forward=True)(copy.copy(data))
    alone = Prepare(2, forward=True, keep_graph=False)(copy.copy(data))
    assert type(lean.edge_index) is PreparedGraph
    assert 'edge_index' not in alone
    assert alone.num_nodes == 100
    bare = Data(edge_index=data.edge_index, train_mask=data.train_mask, num_nodes=100)
    assert Prepare(1, forward=True, keep_graph=False)(bare).num_nodes == 100
    net = PathPreparedGNN(conv, 5, 8, 3, 2).to(device).double()
    losses = []
    for each in (ToCSR()(data), lean, alone, alone.to(device).clone()):
        paths = each.get('execution_paths')
        out = net(data.x.double(), each.get('edge_index'), paths=paths)
        loss = out[data.train_mask].square().sum()
        losses.append([loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))])
    for other in losses[1:]:
        for a, b in zip(losses[0], other, strict=True):
            assert (a - b).norm() <= 1e-10 * (1 + a.norm())
    net.eval().inference(Data(x=data.x.double(), edge_index=lean.edge_index))
    # Positions of edges, which no step reads, would take as much memory as the graph.
    assert lean.edge_index.graph.missing is not None
    assert PreparedRequest('positions') not in cache_of(lean.edge_index).entries


def test_repr() -> None:
    assert repr(Prepare(2, group_sizes=None, forward=True, keep_graph=False)) == (
        "Prepare(ToCSR(keep_edge_index=False), ExecutionPaths(2, mask='train_mask', forward=True, "
        'keep_graph=False))'
    )
    assert repr(ExecutionPaths(2)) == "ExecutionPaths(2, mask='train_mask')"
    assert repr(Prepare(2, 'm', forward=True)) == (
        "Prepare(ToCSR(), ExecutionPaths(2, mask='m', forward=True), "
        "GroupSizes('regression', width=64))"
    )
    transform = Prepare(2)
    transform(example())
    assert 'last prepared: ExecutionPath(layer=0 of 2, active=' in repr(transform)
    assert '% of the graph' in repr(transform)
    assert repr(Prepare(2, group_sizes=None)) == (
        "Prepare(ToCSR(), ExecutionPaths(2, mask='train_mask'))"
    )


def test_bad_data() -> None:
    for num_layers in (0, -1):
        with pytest.raises(ValueError, match="'num_layers' must be at least 1"):
            ExecutionPaths(num_layers)
    with pytest.raises(TypeError, match="'num_layers' must be an integer"):
        Prepare('two')
    for transform in (ExecutionPaths, Prepare):
        with pytest.raises(TypeError, match="'mask' must be the name of .*, got Tensor: store it"):
            transform(2, mask=torch.ones(3, dtype=torch.bool))
        with pytest.raises(TypeError, match="'edge_weight' must be the name of .*, got Tensor"):
            transform(2, edge_weight=torch.ones(3))
        with pytest.raises(ValueError, match="'strict' must be False without 'checks'"):
            transform(2, checks=False, strict=True)
        with pytest.raises(ValueError, match="'data' must have the edge weights 'w', got"):
            transform(2, edge_weight='w')(example())
        for option in ('forward', 'checks', 'strict', 'debug', 'keep_graph'):
            with pytest.raises(TypeError, match=f"'{option}' must be True or False, got str"):
                transform(2, **{option: 'yes'})
    with pytest.raises(TypeError, match="'keep_edge_index' must be True or False, got str"):
        Prepare(2, keep_edge_index='yes')
    with pytest.raises(TypeError, match="'data' must be homogeneous, got HeteroData"):
        ExecutionPaths(1)(HeteroData())
    with pytest.raises(ValueError, match="'data' must have an edge_index"):
        ExecutionPaths(1)(Data(x=torch.ones(3, 1)))
    data = example()
    with pytest.raises(ValueError, match="'data' must have the mask 'test_mask'"):
        ExecutionPaths(1, mask='test_mask')(data)
    data.train_mask = data.train_mask[:50]
    with pytest.raises(ValueError, match=r"'data.train_mask' must have shape \[100\], got \[50\]"):
        ExecutionPaths(1)(data)
    data.train_mask = torch.zeros(100)
    with pytest.raises(TypeError, match="'data.train_mask' must be a bool tensor"):
        ExecutionPaths(1)(data)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('forward', [False, True])
def test_real_data(data_root: Callable[[str, str], Path], conv: str, forward: bool) -> None:
    data = Planetoid(data_root('Planetoid', 'Cora'), 'Cora')[0]
    data = Prepare(2, forward=forward)(data)
    assert not data.execution_paths[1].is_whole
    net = PathPreparedGNN(conv, data.num_features, 16, 7, 2).double()
    losses = []
    for paths in (None, data.execution_paths):
        out = net(data.x.double(), data.edge_index, paths=paths)
        loss = torch.nn.functional.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        grads = torch.autograd.grad(loss, list(net.parameters()))
        losses.append([loss.detach(), *grads])
    for a, b in zip(*losses, strict=True):
        assert (a - b).norm() <= 1e-6 * a.norm()


def test_sorted_data_stay_sorted() -> None:
    data = ToCSR()(example())
    edge_index = data.edge_index
    assert Prepare(2)(data).edge_index is edge_index
