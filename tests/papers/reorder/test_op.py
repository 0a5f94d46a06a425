"""Rabbit Order: against the reference, and on graphs whose order is known."""

import pytest
import torch
from _raw_ops import ops, reference
from hypothesis import given
from ops._graphs import GRAPHS, Edges, edge_lists
from torch import Tensor
from torch._subclasses import FakeTensorMode

from pyg_fast.ops import to_csr
from pyg_fast.papers.reorder.op import rabbit_order

SQUARE = [name for name, edges in GRAPHS.items() if edges.num_src == edges.num_dst]


def csr(edges: Edges, dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor]:
    rowptr, col, _ = to_csr(edges.edge_index, edges.num_src, edges.num_dst)
    return rowptr.to(dtype), col.to(dtype)


def order(pairs: list[tuple[int, int]], num_nodes: int) -> list[int]:
    edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()
    return rabbit_order(*csr(Edges(edge_index, num_nodes, num_nodes))).tolist()


@pytest.mark.parametrize('name', SQUARE)
@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
def test_named_graphs(device: torch.device, name: str, dtype: torch.dtype) -> None:
    rowptr, col = csr(GRAPHS[name], dtype)
    perm = rabbit_order(rowptr.to(device), col.to(device))
    assert perm.device.type == device.type
    assert perm.dtype == torch.int64
    assert perm.cpu().equal(reference.rabbit_order(rowptr, col))


@given(edge_lists(square=True))
def test_any_graph(edges: Edges) -> None:
    perm = rabbit_order(*csr(edges))
    assert perm.sort()[0].equal(torch.arange(edges.num_src))
    assert perm.equal(reference.rabbit_order(*csr(edges)))


@pytest.mark.parametrize('num_edges', [60, 300, 1500])
def test_larger_graphs(num_edges: int) -> None:
    # Trees of merges many levels deep.
    edge_index = (torch.rand(2, num_edges).pow(2) * 200).long()
    graph = csr(Edges(edge_index, 200, 200))
    assert rabbit_order(*graph).equal(reference.rabbit_order(*graph))


def test_hubs_and_chains() -> None:
    node = torch.arange(1, 200)
    for others in (node * 0, node - 1, node // 2, torch.stack([node * 0, node * 0 + 1])):
        edge_index = torch.stack(torch.broadcast_tensors(node, others)).flatten(1)
        graph = csr(Edges(edge_index, 200, 200))
        assert rabbit_order(*graph).equal(reference.rabbit_order(*graph))


@given(edge_lists(square=True))
def test_direction_and_loops_do_not_matter(edges: Edges) -> None:
    loops = torch.arange(edges.num_src).expand(2, -1)
    turned = edges.edge_index.flip(0)
    both = torch.cat([edges.edge_index, turned], dim=1)
    want = rabbit_order(*csr(edges))
    for edge_index in (turned, both, torch.cat([edges.edge_index, loops], dim=1)):
        assert rabbit_order(*csr(edges._replace(edge_index=edge_index))).equal(want)


def test_known_orders() -> None:
    assert order([], 0) == []
    assert order([], 3) == [0, 1, 2]
    assert order([(1, 1)], 2) == [0, 1]
    assert order([(3, 1)], 5) == [3, 1, 0, 2, 4]  # node 1 joins node 3
    # Gains in 14ths: 0 joins 1 and 3 joins 2 by 3 - 3 * 4 / 14; 1 and 2 lose by 1 - 7 * 7 / 14.
    heavy = [(0, 1), (2, 3)] * 3
    assert order([*heavy, (1, 2)], 4) == [1, 0, 2, 3]
    # Where all else is equal, a node joins the neighbour that has more edges with it.
    square = [(0, 1), (1, 2), (2, 3), (3, 0)]
    for pair in square:
        found = order([*square, pair, pair], 4)
        assert abs(found.index(pair[0]) - found.index(pair[1])) == 1


def test_communities_stay_together_the_heaviest_first() -> None:
    sizes = [4, 9, 1, 6, 1, 12]
    clique = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    clique = clique[torch.randperm(clique.numel())]
    pairs = (clique.view(-1, 1) == clique).nonzero().tolist()
    found = clique[order(pairs, clique.numel())]
    assert found.tolist() == [5] * 12 + [1] * 9 + [3] * 6 + [0] * 4 + sorted(found[-2:].tolist())


def test_opcheck_and_fake_kernel() -> None:
    graph = csr(GRAPHS['square'])
    torch.library.opcheck(torch.ops.pyg_fast.rabbit_order.default, graph)
    with FakeTensorMode() as mode:
        fake = ops.rabbit_order(*map(mode.from_tensor, graph))
    perm = ops.rabbit_order(*graph)
    assert (fake.shape, fake.dtype, fake.stride()) == (perm.shape, perm.dtype, perm.stride())


@pytest.mark.parametrize('bad', ['dtypes', 'float', 'strided', 'matrix', 'no rowptr'])
def test_tensors_that_do_not_fit(bad: str) -> None:
    rowptr, col = csr(GRAPHS['square'])
    args = {
        'dtypes': (rowptr, col.long()),
        'float': (rowptr.float(), col.float()),
        'strided': (rowptr, col.repeat_interleave(2)[::2]),
        'matrix': (rowptr, col.view(-1, 1)),
        'no rowptr': (rowptr[:0], col),
    }[bad]
    with pytest.raises(RuntimeError):
        ops.rabbit_order(*args)
