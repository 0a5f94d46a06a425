"""Layers on few edges: PyG's operations, without its search for the arguments of `message`."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, SAGEConv, SimpleConv
from torch_geometric.nn.aggr import MedianAggregation

import pyg_fast
from pyg_fast.nn import FusedMessagePassing, _direct
from tests.nn import _layers
from tests.nn._layers import CASES, GAT, GATV2, GCN, Case, arguments, assert_alike, run

N, WIDTH = 12, 5


@pytest.fixture(autouse=True)
def by_default() -> Iterator[None]:
    with pyg_fast.small_graphs('pyg'):
        yield


@pytest.fixture
def ran(record_calls: Callable[..., list[bool]]) -> list[bool]:
    """Whether each `propagate` was direct."""
    return record_calls(_direct, 'propagate', lambda out, *_: out is not None)


@pytest.mark.parametrize('case', [
    case for case in CASES if case.layer not in ('MeshCNNConv', 'PANConv')
], ids=lambda case: case.name)  # fmt: skip
def test_like_pyg(
    case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch, ran: list[bool]
) -> None:
    """With its bits on a CPU, where no kernel runs and no map of ours."""
    _layers.use_pyg_lib(monkeypatch)
    torch.manual_seed(1)
    theirs = case.make().to(device, case.dtype)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    expected = run(theirs, arguments(case.args, device, case.dtype))
    for _ in range(2):
        got = run(ours, arguments(case.args, device, case.dtype))
        tolerance = 1e-9 if case.dtype == torch.float64 else 1e-4
        assert_alike(got, expected, tolerance)
        is_ours = case.runs in (GCN, GAT, GATV2) or case.layer == 'HGTConv'
        if ran and not is_ours and device.type == 'cpu':
            assert_alike(got, expected, 0)


def inputs(device: torch.device, num_src: int = N) -> tuple[Tensor, Tensor, Tensor]:
    x, edges = torch.randn(N, WIDTH), torch.randint(min(N, num_src), (2, 40))
    return x.to(device).requires_grad_(), torch.randn(num_src, WIDTH).to(device), edges.to(device)


class _Names:
    """Reads whatever a message may read."""

    def forward(
        self: Any, x: Any, edge_index: Tensor, w: Tensor, scale: float = 2.0, size: Any = None,
    ) -> Tensor:  # fmt: skip
        return self.propagate(edge_index, x=x, w=w, none=None, scale=scale, size=size)

    def message(
        self, x_i: Tensor, x_j: Tensor, w: Tensor, edge_index: Tensor, edge_index_i: Tensor,
        edge_index_j: Tensor, index: Tensor, ptr: Any, adj_t: Any, size_i: int, size_j: int,
        dim_size: int, size: list[int], scale: float, none_j: Any,
    ) -> Tensor:  # fmt: skip
        assert ptr is None
        assert adj_t is None
        assert none_j is None
        assert edge_index_i.equal(index)
        assert edge_index.equal(torch.stack([edge_index_j, edge_index_i]))
        return scale * w.view(-1, 1) * (x_j - x_i) + sum(size) + size_i * 2 + size_j * 3 + dim_size


class Names(_Names, MessagePassing):
    pass


class FastNames(_Names, FusedMessagePassing):
    pass


@pytest.mark.parametrize('aggr', ['sum', 'mean', 'max', 'min', 'mul', 'std', MedianAggregation()])
def test_arguments(aggr: Any, device: torch.device, ran: list[bool]) -> None:
    # In float64: CUDA adds the squares of a deviation in any order.
    x, other, edges = (each.double() if each.is_floating_point() else each for each in inputs(
        device, N + 3))  # fmt: skip
    layer, fast = (kind(copy.deepcopy(aggr)).to(device) for kind in (Names, FastNames))
    w = torch.rand(edges.size(1), device=device, dtype=torch.float64)
    for nodes in (x, (other, x)):
        for kwargs in ({}, {'scale': 0.5}, {'size': (other.size(0), N)}):
            if kwargs.get('size') and nodes is x:
                continue
            out = fast(nodes, edges, w, **kwargs)
            torch.testing.assert_close(out, layer(nodes, edges, w, **kwargs))
    assert ran == [True] * 5


def error(run: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as info:
        run()
    found = info.value
    if str(found).startswith("'edge_index") and found.__cause__ is not None:  # It has PyG's.
        return type(found.__cause__), str(found.__cause__)
    return info.type, str(found)


def test_errors_of_pyg(ran: list[bool]) -> None:
    x, other, edges = inputs(torch.device('cpu'), N + 3)
    layer, fast = Names(), FastNames()
    w = torch.rand(edges.size(1))
    wrong: list[Callable[[Any], Any]] = [
        lambda conv: conv(x, edges + N, w),
        lambda conv: conv(x, edges - 1, w),
        lambda conv: conv(x, edges.float(), w),
        lambda conv: conv(x, edges[:1], w),
    ]
    for call in wrong:
        assert error(lambda call=call: call(fast)) == error(lambda call=call: call(layer))
    with pytest.raises(RuntimeError, match='must have shape .* a row for each edge'):
        fast(x, edges, w[1:])
    with pytest.raises(ValueError, match=f"'x' must have a row for each of {N} nodes"):
        fast((other, other), edges, w, size=(N, N))
    with pytest.raises(AssertionError, match="'x' must be a tensor, or a pair .*, got 3 of them"):
        fast((other, x, x), edges, w)
    with pytest.raises(TypeError, match="'x' must be a tensor of features of nodes, got int"):
        fast(3, edges, w)
    assert True not in ran


def test_hooks_run(device: torch.device, ran: list[bool]) -> None:
    x, _, edges = inputs(device)
    seen: list[str] = []
    layer = pyg_fast.accelerate(SimpleConv())
    layer(x, edges)
    handle = layer.register_message_forward_hook(lambda *_: seen.append('message'))
    layer(x, edges)
    handle.remove()
    handle = layer.aggr_module.register_forward_hook(lambda *_: seen.append('aggregation'))
    layer(x, edges)
    handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append('any'))
    layer(x, edges)
    handle.remove()
    assert seen[:2] == ['message', 'aggregation']
    assert set(seen[2:]) == {'any'}
    assert ran == [True, False, True, False]


class Twice(SimpleConv):
    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return 2 * super().aggregate(inputs, index, dim_size=dim_size)


class Ends(MessagePassing):
    """Its other methods read inputs and the graph, too; perhaps the nodes of edges."""

    def forward(self, x: Any, edge_index: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_i: Tensor, x_j: Tensor, size_i: int) -> Tensor:
        return x_j * x_j + size_i * x_i

    def aggregate(self, inputs: Tensor, index: Tensor, w: Tensor, dim_size: int) -> Tensor:
        total = inputs.new_zeros(dim_size, inputs.size(1))
        return total.index_add(0, index, w.view(-1, 1) * inputs)

    def update(self, out: Tensor, x: Any, size_j: int) -> Tensor:
        return out * size_j + sum(map(torch.sum, x if isinstance(x, tuple) else (x,)))


class EndsOfUpdate(Ends):
    def update(self, out: Tensor, x_i: Tensor) -> Tensor:  # type: ignore[override]
        return out + x_i.sum()


class Own(SimpleConv):
    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return 3 * super().propagate(edge_index, size=size, **kwargs)


def test_methods_of_the_layer_run(device: torch.device, ran: list[bool]) -> None:
    x, _, edges = inputs(device)
    for layer in (Twice(), SimpleConv(flow='target_to_source'), Own()):
        fast = pyg_fast.accelerate(copy.deepcopy(layer))
        torch.testing.assert_close(fast(x, edges), layer(x, edges))
    assert ran == [True, True]
    ran.clear()
    layer = SAGEConv(WIDTH, 4).to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(layer))
    for conv in (layer, fast):
        conv.aggregate = lambda inputs, index, ptr=None, dim_size=None: (
            inputs.new_ones(N, inputs.size(1)))  # fmt: skip
    torch.testing.assert_close(fast(x, edges), layer(x, edges))
    assert True not in ran


@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_methods_read_arguments(flow: str, device: torch.device, ran: list[bool]) -> None:
    x, other, edges = (each.double() if each.is_floating_point() else each for each in inputs(
        device, N + 3))  # fmt: skip
    w = torch.rand(edges.size(1), device=device, dtype=torch.float64)
    is_forward = flow == 'source_to_target'
    for nodes in (x, (other, x)):
        for cls in (Ends, EndsOfUpdate):
            layer = cls(flow=flow)
            fast = pyg_fast.accelerate(copy.deepcopy(layer))
            if not is_forward and isinstance(nodes, tuple):
                edges = edges.flip(0)
            torch.testing.assert_close(fast(nodes, edges, w), layer(nodes, edges, w))
    assert ran == [True, False, is_forward, False]


def test_explainers(ran: list[bool]) -> None:
    x, _, edges = inputs(torch.device('cpu'))
    layer = pyg_fast.accelerate(SAGEConv(WIDTH, 4))
    expected = layer(x, edges)
    layer.explain, layer._edge_mask, layer._apply_sigmoid = True, torch.zeros(40), False
    layer._loop_mask = None
    out = layer(x, edges)
    assert not out.equal(expected)
    layer.explain = False
    assert layer(x, edges).equal(expected)
    assert ran[0]
