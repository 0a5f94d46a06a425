"""The edge_index of a loader's batches."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.utils import trim_to_layer

from pyg_fast.graph.batch_edge_index import BatchEdgeIndex
from pyg_fast.loader import FastNeighborLoader


@pytest.fixture
def batches(device: torch.device) -> list[Data]:
    data = Data(x=torch.randn(200, 3), edge_index=torch.randint(200, (2, 900)), num_nodes=200)
    return list(FastNeighborLoader(data, [3, 2], batch_size=30, device=device))


def assert_same(one: Tensor, other: Tensor) -> None:
    assert isinstance(one, EdgeIndex)
    assert isinstance(other, EdgeIndex)
    assert one.as_tensor().equal(other.as_tensor())
    assert one.sparse_size() == other.sparse_size()
    assert one.sort_order == other.sort_order


def test_is_an_edge_index(batches: list[Data]) -> None:
    edges = batches[0].edge_index
    size = batches[0].num_nodes
    assert type(edges) is BatchEdgeIndex
    assert edges.sparse_size() == (size, size)
    edges.validate()
    (colptr, row), _ = edges.get_csc()
    assert colptr.size(0) == size + 1
    assert row.equal(edges.as_tensor()[0])
    plain = EdgeIndex(edges.as_tensor(), sparse_size=(size, size), sort_order='col')
    x = torch.randn(size, 3, device=edges.device)
    torch.testing.assert_close(edges.matmul(x, transpose=True), plain.matmul(x, transpose=True))
    assert_same(edges.flip(0), plain.flip(0))
    assert_same(edges.sort_by('row').values, plain.sort_by('row').values)


def test_rows_are_plain(batches: list[Data]) -> None:
    edges = batches[0].edge_index
    rows = [*edges, edges[0], edges[1], edges[-2], edges[-1], *edges.unbind(), *edges.unbind(-2)]
    assert all(type(row) is Tensor for row in rows)
    for k, row in enumerate(rows):
        assert row.equal(edges.as_tensor()[k % 2])
    assert [one.tolist() for one in edges.unbind(1)] == edges.as_tensor().t().tolist()


def test_copies(batches: list[Data], device: torch.device) -> None:
    edges = batches[0].edge_index
    for other in (
        copy.copy(edges), copy.deepcopy(edges), edges.clone(), edges.to('cpu').to(device),
        pickle.loads(pickle.dumps(edges)),
    ):  # fmt: skip
        assert type(other) is BatchEdgeIndex
        assert_same(other, edges)
    assert edges.float().dtype == torch.float32
    assert not isinstance(edges + 0.5, EdgeIndex)
    file = io.BytesIO()
    torch.save(edges, file)
    file.seek(0)
    assert_same(torch.load(file), edges)
    first, second = Batch.from_data_list(batches[:2]).to_data_list()
    assert_same(first.edge_index, edges)
    assert second.edge_index.as_tensor().equal(batches[1].edge_index.as_tensor())


def test_trim_to_layer(batches: list[Data]) -> None:
    batch = batches[0]
    for layer in range(2):
        got = trim_to_layer(
            layer, batch.num_sampled_nodes, batch.num_sampled_edges, batch.x, batch.edge_index
        )
        plain = trim_to_layer(
            layer, batch.num_sampled_nodes, batch.num_sampled_edges, batch.x,
            batch.edge_index.as_tensor())  # fmt: skip
        assert got[0].equal(plain[0])
        assert got[1].as_tensor().equal(plain[1])


@pytest.mark.parametrize('dynamic', [True, None])
def test_sizes_that_compiled_code_reads(batches: list[Data], dynamic: bool | None) -> None:
    """They are those of each batch."""

    @torch.compile(backend='aot_eager', dynamic=dynamic)
    def sizes(edges: EdgeIndex) -> Tensor:
        rows, both = edges.num_rows, edges.sparse_size()
        return torch.tensor([rows, edges.num_cols, both[0], both[1], edges.size(1)])

    @torch.compile(backend='aot_eager', dynamic=dynamic)
    def zeros(edges: EdgeIndex) -> Tensor:
        return torch.zeros(edges.num_rows) + edges.sparse_size(1)

    for batch in batches:
        n = batch.num_nodes
        assert sizes(batch.edge_index).tolist() == [n, n, n, n, batch.edge_index.size(1)]
        assert zeros(batch.edge_index).tolist() == [n] * n
