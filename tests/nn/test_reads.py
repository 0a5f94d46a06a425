"""Whether a layer's forward may get the list of a prepared graph."""

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import ChebConv, GCNConv, MessagePassing
from torch_geometric.typing import OptTensor, SparseTensor
from torch_geometric.utils import add_self_loops, degree, remove_self_loops, softmax

import pyg_fast
from pyg_fast.nn import message_passing
from pyg_fast.nn._reads import reads_a_list
from pyg_fast.transforms import ToCSR
from tests.nn import _layers
from tests.nn._layers import N, graph


class Layer(MessagePassing):
    def __init__(self, aggr: str = 'sum') -> None:
        super().__init__(aggr)
        self.lin = torch.nn.Linear(8, 8)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Degrees(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0], num_nodes=x.size(0))
        row, col = edge_index
        x = self.lin(x) / degree(col, x.size(0), dtype=x.dtype).view(-1, 1)
        return self.propagate(edge_index, x=x * (row.numel() > 0)) + self.own(x)

    def own(self, x: Tensor) -> Tensor:
        return x.relu()


class Updates(Layer):
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        if isinstance(edge_index, SparseTensor):
            edge_index = edge_index.fill_value(1.0)
        return self.propagate(edge_index, x=x * self.edge_updater(edge_index, x=x).sum())

    def edge_update(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        return softmax((x_i * x_j).sum(-1), index)


def norm(edge_index: Tensor, num_nodes: int) -> Tensor:
    edge_index = add_self_loops(edge_index, num_nodes=num_nodes)[0]
    return degree(edge_index[1], num_nodes).add(edge_index.size(1)).sum()


class Helped(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        count = x.shape[0]
        edges = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        edges = edges[:, edges[0] != edges[1]]
        return self.propagate(edges, x=x * norm(edge_index, count)) * self.own(edge_index, count)

    def own(self, edge_index: Tensor, count: int) -> Tensor:
        return degree(edge_index[0], count).sum()


class OfModule(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges = torch_geometric.utils.add_self_loops(edge_index, num_nodes=len(x))[0]
        return self.propagate(edges, x=x)


class HasModule(Degrees):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(GCNConv(8, 8), torch.nn.Linear(8, 8))

    def own(self, x: Tensor) -> Tensor:
        return self.inner[1](x)


class NoInput(Layer):
    """Its message has no input of nodes that tells their number, but the edges do."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edges, _ = remove_self_loops(edge_index)
        return self.propagate(edges, w=x[edges[0]])

    def message(self, w: Tensor) -> Tensor:  # type: ignore[override]
        return w


class Flipped(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index.flip(0), x=x)


class Both(Degrees):
    """It also uses the edges as they are."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        loops, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(loops, x=x) + self.propagate(edge_index, x=x)


READ = [Degrees, Updates, Helped, OfModule, HasModule, NoInput, Flipped, Both]


def asking(edge_index: Any) -> Any:
    return edge_index.num_rows


def loops_of(edge_index: Tensor, num_nodes: int | None = None) -> Tensor:
    return degree(add_self_loops(edge_index, num_nodes=num_nodes)[0][0]).sum()


def wrapped(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        return function(*args)

    return run


class Asks(Layer):
    """Forwards that may tell a list from an EdgeIndex."""

    loops = add_self_loops

    def sized(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x) * edge_index.num_rows

    def without_count(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(add_self_loops(edge_index)[0], x=x)

    def perhaps_a_count(self, x: Tensor, edge_index: Tensor, num_nodes: Any = None) -> Tensor:
        return self.propagate(add_self_loops(edge_index, num_nodes=num_nodes)[0], x=x)

    def changed_count(self, x: Tensor, edge_index: Tensor) -> Tensor:
        count: Any = x.size(0)
        if self.training:
            count = None
        return self.propagate(add_self_loops(edge_index, num_nodes=count)[0], x=x)

    def helper(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * asking(edge_index)

    def helper_without_count(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * loops_of(edge_index)

    def constructor(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * Data(edge_index=edge_index).num_nodes

    def other_module(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(_layers.prepared(edge_index), x=x)

    def module(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x, edge_index))

    def attribute(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(self.loops(edge_index)[0], x=x)

    def stored(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.edges = edge_index
        return self.propagate(edge_index, x=x)

    def kept(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.lists.append(edge_index)
        return self.propagate(edge_index, x=x)

    def returned(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.propagate(edge_index, x=x), edge_index

    def compared(self, x: Tensor, edge_index: Tensor, other: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x) * (2 if edge_index is other else 1)

    def imported(self, x: Tensor, edge_index: Tensor) -> Tensor:
        from torch_geometric.utils import add_self_loops

        return self.propagate(add_self_loops(edge_index)[0], x=x)

    def multiplied(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) + edge_index @ x

    def printed(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * len(f'{edge_index}')

    def of_locals(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x) * asking(locals()['edge_index'])

    def nested(self, x: Tensor, edge_index: Tensor) -> Tensor:
        def change() -> Tensor:
            return edge_index

        return self.propagate(change(), x=x)

    @wrapped
    def decorated(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def other_list(self, x: Tensor, edge_index: Tensor, other: Any = None) -> Tensor:
        return self.propagate(other, x=x)

    def another_name(self, x: Tensor, edge_index: Tensor) -> Tensor:
        (edges := edge_index)
        return self.propagate(edges, x=x)


ASKS = [name for name, value in vars(Asks).items() if callable(value) and name != 'loops']


class Calls(Degrees):
    def __call__(self, x: Tensor, edge_index: Any) -> Any:
        return super().__call__(x, edge_index)


class Norm(ChebConv):
    def __norm__(self, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__norm__(add_self_loops(edge_index)[0], *args, **kwargs)


def layer_of(name: str) -> type[Layer]:
    return type('Asking', (Asks,), {'forward': vars(Asks)[name]})


@pytest.mark.parametrize('kind', READ)
def test_read(kind: Any) -> None:
    assert reads_a_list(kind())
    assert reads_a_list(pyg_fast.accelerate(kind()))


@pytest.mark.parametrize('name', [*ASKS, 'its own call', 'inherited', 'on the layer'])
def test_not_read(name: str) -> None:
    layer: Any = Calls() if name == 'its own call' else Degrees()
    if name == 'inherited':
        layer = Norm(8, 8, 2)
    elif name == 'on the layer':
        layer.forward = functools.partial(Degrees.forward, layer)
    elif name in ASKS:
        layer = layer_of(name)()
    assert not reads_a_list(layer)
    if name != 'on the layer':
        assert not reads_a_list(pyg_fast.accelerate(layer))


@pytest.fixture
def lists(record_calls: Callable[..., list[bool]]) -> list[bool]:
    """Whether forward got a plain list in place of a prepared graph."""
    return record_calls(message_passing, 'with_plain_list', lambda out, *_: type(out[1]) is Tensor)


def prepared_graph(device: torch.device) -> EdgeIndex:
    """A graph whose last node has no edge."""
    edges = graph(device) % (N - 1)
    return ToCSR()(Data(edge_index=edges, num_nodes=N)).edge_index


@pytest.mark.parametrize('kind', READ)
def test_few_edges(kind: Any, device: torch.device, lists: list[bool]) -> None:
    """Its results are those of the layer on the EdgeIndex."""
    prepared = prepared_graph(device)
    theirs = kind().to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x = torch.rand(N, 8, device=device)
    expected = theirs(x, EdgeIndex(prepared.as_tensor(), sparse_size=(N, N), sort_order='col'))
    with pyg_fast.small_graphs('pyg'):
        for _ in range(3):
            torch.testing.assert_close(ours(x, prepared), expected)
    assert lists == [False, True, True]
    lists.clear()
    with pyg_fast.small_graphs('kernel'):
        torch.testing.assert_close(ours(x, prepared), expected)
    assert lists == [False]


def test_hooks_see_the_graph(lists: list[bool]) -> None:
    prepared = prepared_graph(torch.device('cpu'))
    ours, seen = pyg_fast.accelerate(Degrees()), []
    ours.register_forward_pre_hook(lambda _, args: seen.append(isinstance(args[1], EdgeIndex)))
    for _ in range(3):
        ours(torch.rand(N, 8), prepared)
    assert seen == [True] * 3
    assert lists == [False] * 3


def test_lists_of_its_own(lists: list[bool]) -> None:
    """On a CPU a forward makes them of the plain list, unless what it makes stays sorted, or it
    needs the graph as well."""
    edges = graph(torch.device('cpu'))
    prepared = prepared_graph(torch.device('cpu'))
    x = torch.rand(N, 8)
    seen = {}
    for kind in (Degrees, Flipped, Both):
        theirs, ours = kind(), pyg_fast.accelerate(kind())
        ours.load_state_dict(theirs.state_dict())
        with pyg_fast.small_graphs('kernel'):
            for each in (edges, prepared, prepared, prepared):
                plain = each.as_tensor() if each is prepared else each
                torch.testing.assert_close(ours(x, each), theirs(x, plain))
        seen[kind] = lists.copy()
        lists.clear()
    given = [False] * 3
    assert seen == {Degrees: [False, True, True], Flipped: given, Both: given}


class Switches(Layer):
    """It makes a list of its own in training alone."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.training:
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edge_index, x=x)


def test_a_graph_is_not_sorted_again(lists: list[bool]) -> None:
    prepared = prepared_graph(torch.device('cpu'))
    ours, x = pyg_fast.accelerate(Switches()), torch.rand(N, 8)
    with pyg_fast.small_graphs('kernel'):
        for _ in range(2):
            ours(x, prepared)
        ours.eval()(x, prepared)
    assert lists == [False, True, True]
    assert not pyg_fast.accelerate_report(ours)[0].sorts


class Refused(Degrees):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sort(-1).values


def test_what_is_refused_gets_the_list(lists: list[bool]) -> None:
    prepared = prepared_graph(torch.device('cpu'))
    layer = pyg_fast.accelerate(Refused())
    for _ in range(2):
        layer(torch.rand(N, 8), prepared)
    assert lists == [False, True]


@pytest.mark.parametrize('aggr', ['mul', 'median'])
def test_layers_without_a_kernel_get_the_list(
    aggr: str, device: torch.device, lists: list[bool]
) -> None:
    """PyG's code runs them for every input, and takes longer for an EdgeIndex."""
    prepared = prepared_graph(device)
    theirs = Degrees(aggr).to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x = torch.rand(N, 8, device=device)
    expected = theirs(x, prepared.as_tensor())
    for size in ('pyg', 'kernel'):
        with pyg_fast.small_graphs(size):
            for _ in range(2):
                torch.testing.assert_close(ours(x, prepared), expected)
    assert lists == [False, True, *[device.type == 'cpu'] * 2]
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
    prepared = prepared_graph(torch.device('cpu'))
    ours, theirs = pyg_fast.accelerate(OfSizes()), TimesN()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(N, 8)
    for size in ('pyg', 'kernel'):
        with pyg_fast.small_graphs(size):
            for _ in range(2):
                torch.testing.assert_close(ours(x, prepared), theirs(x, prepared))


class Untyped(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j, index, ptr, size_i):  # type: ignore[no-untyped-def, override]
        return x_j * softmax(x_j, index, ptr, size_i)


class OfPointers(Untyped):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def aggregate(self, inputs: Tensor, ptr: Tensor) -> Tensor:  # type: ignore[override]
        return torch_geometric.utils.segment(inputs, ptr)


class AsksForPointers(Untyped):
    """In a kernel it gets none: a softmax needs none there."""

    def message(self, x_j: Tensor, ptr: OptTensor) -> Tensor:  # type: ignore[override]
        return x_j if ptr is None else 2 * x_j


@pytest.mark.parametrize('kind', [Untyped, OfPointers, AsksForPointers])
def test_structure(kind: type[Layer]) -> None:
    """Arguments without types, of which PyG finds several kinds, and what only an EdgeIndex has."""
    prepared, x = prepared_graph(torch.device('cpu')), torch.rand(N, 8)
    ours, theirs = pyg_fast.accelerate(kind()), kind()
    edges = EdgeIndex(prepared.as_tensor(), sparse_size=(N, N), sort_order='col')
    for size in ('pyg', 'kernel')[: 1 if kind is AsksForPointers else 2]:
        with pyg_fast.small_graphs(size):
            for _ in range(3):
                torch.testing.assert_close(ours(x, prepared), theirs(x, edges))


def test_patched_layers_stay() -> None:
    layer = Degrees('median')
    layer.message = lambda x_j: 2 * x_j  # type: ignore[method-assign, assignment]
    assert type(pyg_fast.accelerate(layer)) is Degrees


def test_threads_share_a_layer() -> None:
    """Each with a graph of its own."""
    layer, others = pyg_fast.accelerate(Degrees()), []
    pairs = [(torch.rand(n, 8), torch.randint(n, (2, 60))) for n in (N, 20)]
    expected = [Degrees.forward(layer, *pair) for pair in pairs]
    prepared = ToCSR()(Data(edge_index=pairs[0][1], num_nodes=N)).edge_index
    other = threading.Thread(target=lambda: others.append(layer.propagate(
        add_self_loops(remove_self_loops(pairs[1][1])[0], num_nodes=20)[0], x=pairs[1][0],
    )))  # fmt: skip

    def in_between(x: Tensor) -> Tensor:
        other.start()
        other.join()
        return x.relu()

    for _ in range(2):
        layer(pairs[0][0], prepared)
    layer.own = in_between  # type: ignore[method-assign]
    torch.testing.assert_close(layer(pairs[0][0], prepared), expected[0])
    assert others[0].shape == (20, 8)
