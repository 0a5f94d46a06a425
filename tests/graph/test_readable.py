"""The edges that a layer's forward reads."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, remove_self_loops, to_undirected

import pyg_fast
from pyg_fast.graph._cache import cache_of
from pyg_fast.graph.readable import ReadableEdgeIndex, readable
from pyg_fast.transforms import ToCSR


def edges(device: torch.device) -> EdgeIndex:
    data = Data(edge_index=torch.randint(9, (2, 30)), num_nodes=11)
    out = ToCSR()(data.to(device)).edge_index
    assert type(out) is EdgeIndex
    return out


@pytest.mark.parametrize('func', [
    lambda e: e[0], lambda e: e[-1], lambda e: tuple(e), lambda e: e.unbind(0), lambda e: e[:, 2],
    lambda e: e[:, 3:9], lambda e: e[:, e[0] != e[1]], lambda e: e[:, e[0].argsort()],
    lambda e: e.flip(0), lambda e: e.clone(), lambda e: e.t(), lambda e: e.max(), lambda e: e + 1,
    lambda e: torch.cat([e, e], 1), lambda e: torch.cat([e, e], -1), lambda e: torch.cat([e, e]),
    lambda e: torch.cat([e, e + 0, e.as_tensor()], dim=1), lambda e: torch.stack([e[1], e[0]]),
    lambda e: torch.cat([e, EdgeIndex(e.as_tensor(), sparse_size=(12, None))], dim=1),
    lambda e: add_self_loops(e), lambda e: remove_self_loops(e), lambda e: to_undirected(e),
    lambda e: torch.where(e > 3, e, 0), lambda e: e.get_csr(), lambda e: e.sparse_size(),
    lambda e: torch.ones(11, 2, device=e.device).index_select(0, e[1]), lambda e: e.sort_by('row'),
    lambda e: e.matmul(torch.ones(11, 2, device=e.device), transpose=True),
])  # fmt: skip
def test_like_an_edge_index(func: Callable[[Any], Any], device: torch.device) -> None:
    given = edges(device)
    expected, got = func(given), func(readable(given))

    def same(one: Any, other: Any) -> bool:
        if isinstance(other, tuple) and isinstance(one, tuple):
            return len(one) == len(other) and all(map(same, one, other))
        return one.equal(other) if isinstance(other, Tensor) else one == other

    def check(got: Any, expected: Any) -> None:
        if isinstance(expected, EdgeIndex):
            assert isinstance(got, EdgeIndex)
            known = {name: value for name, value in vars(expected).items() if name[:4] != '_pyg'}
            for name in known.keys() - {'_data'}:
                one, other = vars(got).get(name), known[name]
                assert same(one, other), name
            got, expected = got.as_tensor(), expected.as_tensor()
        if isinstance(expected, Tensor):
            assert got.as_subclass(Tensor).equal(expected.as_subclass(Tensor))
        elif isinstance(expected, tuple):
            for one, other in zip(got, expected, strict=True):
                check(one, other)
        else:
            assert got == expected

    check(got, expected)


def test_rows_are_plain() -> None:
    view = readable(edges(torch.device('cpu')))
    loops, _ = add_self_loops(view, num_nodes=11)
    for each in (view, loops, loops[:, loops[0] > 2]):
        assert [type(row) for row in each] == [Tensor, Tensor]


def test_shares_what_is_known() -> None:
    given = edges(torch.device('cpu'))
    view = readable(given)
    assert isinstance(view, ReadableEdgeIndex)
    assert cache_of(view) is cache_of(given)
    with torch.inference_mode():
        assert cache_of(readable(given)) is cache_of(given)
    view.sparse_resize_(12, 12)
    assert given.sparse_size() == (12, 12)
    known = cache_of(given)
    view.add_(1)
    assert given.sparse_size() == view.sparse_size()
    assert cache_of(given) is not known
    for other in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert other.equal(given)
    assert type(pickle.loads(pickle.dumps(view))) is EdgeIndex
    with torch.inference_mode():
        made = edges(torch.device('cpu'))
        assert cache_of(readable(made)) is cache_of(made)


class Loops(MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[type] = []

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        self.seen.append(type(edge_index))
        edge_index, _ = add_self_loops(remove_self_loops(edge_index)[0])
        row, col = edge_index
        return self.propagate(edge_index, x=x, weight=(row + col).to(x.dtype))

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return x_j * weight.view(-1, 1)


@pytest.mark.parametrize('size', ['pyg', 'kernel'])
def test_layers_read_them(size: Any, device: torch.device) -> None:
    given = edges(device)
    x = torch.rand(11, 3, device=device, dtype=torch.float64)
    theirs = Loops()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    with pyg_fast.small_graphs(size):
        torch.testing.assert_close(ours(x, given), theirs(x, given))
        torch.testing.assert_close(ours(x, edge_index=given), theirs(x, given))
    assert ours.seen == [ReadableEdgeIndex] * 2


def test_a_view_lives_as_long_as_its_graph() -> None:
    """Users tell graphs apart by their ids."""
    edge_index = EdgeIndex(torch.tensor([[0, 1], [1, 0]]), sparse_size=(2, 2))
    view = readable(edge_index)
    assert readable(edge_index) is view
    known = weakref.ref(edge_index)
    del edge_index
    assert known() is None
