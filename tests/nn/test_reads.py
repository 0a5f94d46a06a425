"""Whether a layer's forward may get the list of a prepared graph."""

import copy
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, MessagePassing
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, softmax

import pyg_fast
from pyg_fast.graph.readable import ReadableEdgeIndex
from pyg_fast.nn._reads import reads_a_list
from pyg_fast.transforms import ToCSR
from tests.nn import _layers
from tests.nn._layers import N, graph


class Layer(MessagePassing):
    def __init__(self, aggr: str = 'sum') -> None:
        super().__init__(aggr)
        self.lin = torch.nn.Linear(8, 8)
        self.seen: list[Tensor] = []

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Degrees(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(edge_index)
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=x.size(0))
        row, col = edge_index
        x = self.lin(x) / degree(col, x.size(0), dtype=x.dtype).view(-1, 1)
        return self.propagate(edge_index, x=x * (row.numel() > 0)) + self.own(x)

    def own(self, x: Tensor) -> Tensor:
        return x.relu()


class Updates(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(edge_index)
        return self.propagate(edge_index, x=x * self.edge_updater(edge_index, x=x).sum())

    def edge_update(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        return softmax((x_i * x_j).sum(-1), index)


class Loops(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(edge_index)
        return self.propagate(add_self_loops(edge_index)[0], x=x)


class Asks(Degrees):
    def own(self, x: Any) -> Any:
        return x.get_csr() if isinstance(x, EdgeIndex) else x


class Sized(Layer):
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x) * edge_index.num_rows


def helper(edge_index: Tensor) -> Tensor:
    return degree(edge_index[0]).add(scale(edge_index)).sum() * edge_index


def scale(edge_index: Any) -> float:
    return helper.__code__.co_argcount * 2.0


def asking(edge_index: Any) -> Any:
    return edge_index.num_rows


class Helped(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(helper(edge_index), x=x)


class HelpedBadly(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * asking(edge_index)


class OfClass(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(Data(edge_index=edge_index).edge_index, x=x) * bool(Own(edge_index))


class OfModule(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(torch_geometric.utils.add_self_loops(edge_index)[0], x=x)


class OfOwnModule(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(_layers.prepared(edge_index), x=x)


class Attribute(Layer):
    def __init__(self, function: Any = helper) -> None:
        super().__init__()
        self.change = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(self.change(edge_index), x=x)


class Inner(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.own(x)

    def own(self, x: Tensor) -> Tensor:
        return x.relu()


class AskingInner(Inner):
    def own(self, x: Any) -> Any:
        return x.num_rows


class HasModule(Degrees):
    inner: Any = Inner

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(self.inner())


class HasAskingModule(HasModule):
    inner = AskingInner


class Own:
    def __init__(self, edge_index: Any) -> None:
        self.is_ours = isinstance(edge_index, EdgeIndex)


class Nested(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(8, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.conv(x, edge_index))


def enclosed() -> type[Layer]:
    def change(edge_index: Tensor) -> Tensor:
        return edge_index

    class Enclosed(Layer):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(change(edge_index), x=x)

    return Enclosed


LAST = 'with the last node'


@pytest.mark.parametrize(('kind', 'expected'), [
    (Degrees, 'yes'), (Updates, 'yes'), (Loops, LAST), (Asks, 'no'), (Sized, 'no'),
    (Helped, 'yes'), (HelpedBadly, 'no'), (OfModule, LAST), (OfOwnModule, 'no'), (OfClass, 'no'),
    (Attribute, 'yes'), (lambda: Attribute(asking), 'no'), (HasModule, 'yes'),
    (HasAskingModule, 'no'), (Nested, 'no'), (enclosed(), 'no'),
], ids=lambda value: getattr(value, '__name__', None))  # fmt: skip
def test_reads_a_list(kind: Any, expected: str) -> None:
    assert reads_a_list(kind()) == expected
    assert reads_a_list(pyg_fast.accelerate(kind())) == expected


@pytest.mark.parametrize('kind', [Degrees, Updates, Loops])
def test_few_edges(kind: Any, device: torch.device) -> None:
    """Its results are those of the layer on the list."""
    edges = graph(device)
    edges[0, 0] = N - 1
    prepared = ToCSR()(Data(edge_index=edges, num_nodes=N))
    theirs = kind().to(device)
    ours = pyg_fast.accelerate(kind().to(device))
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(N, 8, device=device)
    with pyg_fast.small_graphs('pyg'):
        for _ in range(3):
            torch.testing.assert_close(
                ours(x, prepared.edge_index), theirs(x, prepared.edge_index.as_tensor())
            )
    assert [type(each) for each in ours.seen[1:]] == [Tensor, Tensor]
    with pyg_fast.small_graphs('kernel'):
        ours(x, prepared.edge_index)
    assert isinstance(ours.seen[-1], EdgeIndex)


def test_last_node_without_an_edge(device: torch.device) -> None:
    """Of a list PyG would add one loop less."""
    prepared = ToCSR()(Data(edge_index=graph(device) % (N - 1), num_nodes=N))
    ours = pyg_fast.accelerate(Loops())
    x = torch.rand(N, 8, device=device)
    with pyg_fast.small_graphs('pyg'):
        for _ in range(3):
            assert ours(x, prepared.edge_index)[-1].equal(x[-1])
    assert not any(type(each) is Tensor for each in ours.seen)


class Flipped(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen.append(edge_index)
        return self.propagate(edge_index.flip(0), x=x)


class Both(Degrees):
    """It also uses the edges as they are."""

    def own(self, x: Tensor) -> Tensor:
        return self.propagate(self.seen[-1], x=x)


def test_lists_of_its_own() -> None:
    """On a CPU a forward makes them of the plain list, unless what it makes stays sorted, or it
    needs the graph as well."""
    edges = graph(torch.device('cpu'))
    prepared = ToCSR()(Data(edge_index=edges, num_nodes=N)).edge_index
    x = torch.rand(N, 8)
    seen = {}
    for kind in (Degrees, Flipped, Both):
        theirs, ours = kind(), pyg_fast.accelerate(kind())
        ours.load_state_dict(theirs.state_dict())
        with pyg_fast.small_graphs('kernel'):
            for each in (edges, prepared, prepared, prepared):
                plain = each.as_tensor() if each is prepared else each
                torch.testing.assert_close(ours(x, each), theirs(x, plain))
        seen[kind] = [type(each) is Tensor for each in ours.seen]
    given = [True, False, False, False]
    assert seen == {Degrees: [True, False, True, True], Flipped: given, Both: given}


class Refused(Degrees):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sort(-1).values


def test_what_is_refused_gets_the_list() -> None:
    prepared = ToCSR()(Data(edge_index=graph(torch.device('cpu')), num_nodes=N))
    layer = pyg_fast.accelerate(Refused())
    for _ in range(2):
        layer(torch.rand(N, 8), prepared.edge_index)
    assert [type(each) for each in layer.seen] == [ReadableEdgeIndex, Tensor]


@pytest.mark.parametrize('aggr', ['mul', 'median'])
def test_layers_without_a_kernel_get_the_list(aggr: str, device: torch.device) -> None:
    """PyG's code runs them for every input, and takes longer for an EdgeIndex."""
    prepared = ToCSR()(Data(edge_index=graph(device), num_nodes=N)).edge_index
    theirs = Degrees(aggr).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x = torch.rand(N, 8, device=device)
    expected = theirs(x, prepared.as_tensor())
    for size in ('pyg', 'kernel'):
        with pyg_fast.small_graphs(size):
            for _ in range(2):
                torch.testing.assert_close(ours(x, prepared), expected)
    other = Tensor if device.type == 'cpu' else ReadableEdgeIndex
    assert [type(each) for each in ours.seen] == [ReadableEdgeIndex, Tensor, other, other]
    (report,) = pyg_fast.accelerate_report(ours)
    assert report.fused is None
    assert report.ran == f"PyG's code: {report.reason}"
    assert type(pyg_fast.restore(ours)) is Degrees


class OfSizes(Degrees):
    def message(self, x_j: Tensor, size: list[int], index: Tensor) -> Tensor:
        assert type(index) is Tensor
        return x_j * size[1]


class TimesN(Degrees):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * N


def test_sizes_are_those_of_the_graph() -> None:
    """Of its list only `propagate` would know them, but not of another list."""
    prepared = ToCSR()(Data(edge_index=graph(torch.device('cpu')), num_nodes=N)).edge_index
    ours, theirs = pyg_fast.accelerate(OfSizes()), TimesN()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(N, 8)
    for size in ('pyg', 'kernel'):
        with pyg_fast.small_graphs(size):
            for _ in range(2):
                torch.testing.assert_close(ours(x, prepared), theirs(x, prepared))


def test_patched_layers_stay() -> None:
    layer = Degrees('median')
    layer.message = lambda x_j: 2 * x_j  # type: ignore[method-assign, assignment]
    assert type(pyg_fast.accelerate(layer)) is Degrees
