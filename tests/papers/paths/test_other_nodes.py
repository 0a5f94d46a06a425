"""Nodes that the loss does not read: the output of a model, and modules between its layers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import (
    BatchNorm1d,
    Dropout,
    Linear,
    Module,
    ModuleList,
    ReLU,
    ReLU6,
    Sequential,
    Softshrink,
)
from torch_geometric.nn import GraphNorm

from pyg_fast.graph import execution_paths, prepare_edge_index
from pyg_fast.nn import PathPreparedGCNConv, PathPreparedGNN, PathPreparedSAGEConv

from .test_convs import assert_equal, conv_of, model_step, random_graph


def watched(net: Module, way: str) -> Module:
    """The model, with a last layer that does not compute the rows of the path alone."""
    if way == 'hooks':
        net.convs[-1].register_forward_hook(lambda *_: None)
    if way == 'by PyG':
        for conv in net.convs:
            conv.register_message_forward_hook(lambda *_: None)
    return net


@pytest.mark.parametrize('way', ['kernel', 'hooks', 'by PyG'])
@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
def test_output_of_other_nodes_is_nan_in_training(
    device: torch.device, conv: str, way: str
) -> None:
    edge_index, mask = random_graph(400, 500, 0.05, device)
    net = watched(PathPreparedGNN(conv, 7, 8, 5, 2, dropout=0.5), way).to(device, torch.double)
    x = torch.randn(400, 7, dtype=torch.double, device=device)
    paths = execution_paths(edge_index, mask, 2, forward=True)
    out = net(x, edge_index, paths=paths)
    assert out[~mask].isnan().all()
    assert out[mask].isfinite().all()
    expected, actual = (
        model_step(net, x, edge_index, mask, **given) for given in ({}, {'paths': paths})
    )
    assert_equal(actual, expected)
    # An operation that has NaN gradients where its input is NaN.
    net(x, edge_index, paths=paths).log_softmax(-1)[mask, 0].sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    assert net.eval()(x, edge_index, paths=paths).isfinite().all()
    for fill in (0.0, 7.0):
        net.train().fill = fill
        assert (net(x, edge_index, paths=paths)[~mask] == fill).all()
    every = execution_paths(edge_index, mask, 2)
    net.fill = float('nan')
    assert net(x, edge_index, paths=every).isfinite().all()  # Only backward runs on these.


def test_nan_of_the_output_in_compiled_code(device: torch.device) -> None:
    edge_index, mask = random_graph(400, 500, 0.05, device)
    edge_index = prepare_edge_index(edge_index, (400, 400))[0]
    net, x = PathPreparedGNN('gcn', 7, 8, 5, 2).to(device), torch.randn(400, 7, device=device)
    paths = execution_paths(edge_index, mask, 2, forward=True)
    out = torch.compile(net, fullgraph=True, backend='aot_eager')(x, edge_index, paths=paths)
    assert out[~mask].isnan().all()
    torch.testing.assert_close(out[mask], net(x, edge_index)[mask])
    out[mask].sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())


class Between(Module):
    """Two layers of a path, with a module of the user between."""

    def __init__(self, kind: str, between: Module) -> None:
        super().__init__()
        self.convs = ModuleList([conv_of(kind, 7, 8), conv_of(kind, 8, 5)])
        self.between = between

    def forward(self, x: Tensor, edge_index: Tensor, paths: list) -> Tensor:
        x = self.between(self.convs[0](x, edge_index, path=paths[0]))
        return self.convs[1](x, edge_index, path=paths[1])


@pytest.mark.parametrize('kind', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('between', [Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.ELU()])
def test_modules_after_a_layer_have_finite_gradients(
    device: torch.device, kind: str, between: Module
) -> None:
    edge_index, mask = random_graph(400, 500, 0.02, device)
    net = Between(kind, between).to(device, torch.double)
    x = torch.randn(400, 7, dtype=torch.double, device=device)
    paths = execution_paths(edge_index, mask, 2, forward=True)
    assert not paths[0].is_whole
    grads = []
    for given in ([None, None], paths):
        loss = net(x, edge_index, given)[mask].square().sum()
        grads.append(torch.autograd.grad(loss, list(net.parameters())))
    assert all(grad.isfinite().all() for grad in grads[1])
    assert_equal(list(grads[1]), list(grads[0]))


class MinusMean(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class MinusMax(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.amax(0)  # whose gradient goes to the rows of the largest numbers


@pytest.mark.parametrize(
    ('kind', 'options'),
    [('gcn', {}), *((kind, {'forward': True}) for kind in ('gcn', 'sage', 'sum', 'gin')),
     *((kind, {'forward': True, 'keep_graph': False}) for kind in ('gcn', 'sage', 'sum', 'gin'))],
)  # fmt: skip
@pytest.mark.parametrize(
    'mixes',
    [lambda: BatchNorm1d(8), lambda: Sequential(ReLU(), BatchNorm1d(8)),
     lambda: Sequential(ReLU(), Dropout(), GraphNorm(8)), lambda: Sequential(ReLU6(), MinusMean())],
    ids=['norm', 'relu-norm', 'relu-dropout-graph_norm', 'relu6-mean'],
)  # fmt: skip
def test_module_that_mixes_nodes_is_noticed_before_a_step(
    device: torch.device, kind: str, options: dict[str, bool], mixes: Callable[[], Module]
) -> None:
    edge_index, mask = random_graph(400, 500, 0.02, device)
    net = Between(kind, mixes()).to(device)
    paths = execution_paths(edge_index, mask, 2, **options)
    given = None if paths[0].stands_alone else edge_index
    out = net(torch.randn(400, 7, device=device), given, paths)
    with pytest.raises(ValueError, match='the loss, or a layer between .*, such as BatchNorm'):
        out[mask].square().sum().backward()


@pytest.mark.parametrize(
    'mixes',
    [lambda: Sequential(ReLU(), MinusMax()), lambda: Sequential(Softshrink(), BatchNorm1d(8))],
    ids=['max', 'shrink-norm'],
)  # fmt: skip
def test_debug_shows_what_sends_no_gradient_to_zeros(
    device: torch.device, mixes: Callable[[], Module]
) -> None:
    edge_index, mask = random_graph(400, 500, 0.02, device)
    net = Between('gcn', mixes()).to(device)
    paths = execution_paths(edge_index, mask, 2, forward=True, debug=True)
    assert net(torch.randn(400, 7, device=device), edge_index, paths)[mask].isnan().all()


@pytest.mark.parametrize('keep', [False, True])
def test_paths_in_another_order_are_noticed(device: torch.device, keep: bool) -> None:
    edge_index, mask = random_graph(400, 500, 0.02, device)
    net = Between('gcn', ReLU()).to(device)
    paths = execution_paths(edge_index, mask, 2, forward=True)[::-1]
    out = net(torch.randn(400, 7, device=device), edge_index, paths)
    paths = paths if keep else []  # Before the backward pass nobody holds them.
    with pytest.raises(ValueError, match='lost gradients'):
        out[mask].square().sum().backward()


def test_paths_by_position(device: torch.device) -> None:
    edge_index, mask = random_graph(40, 50, 0.1, device)
    paths, x = execution_paths(edge_index, mask, 2), torch.randn(40, 7, device=device)
    model = PathPreparedGNN('gcn', 7, 8, 3, num_layers=2).to(device)
    with pytest.raises(TypeError, match="'paths' must be given by name"):
        model(x, edge_index, paths)
    with pytest.raises(TypeError, match="'paths' must be a list, .* got an ExecutionPath"):
        model(x, edge_index, paths=paths[0])
    for cls in (PathPreparedGCNConv, PathPreparedSAGEConv):
        with pytest.raises(TypeError, match="'path' must be given by name"):
            cls(7, 3).to(device)(x, edge_index, paths[0])
