"""Blocks of rows and tiles of columns, against the whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pyg_fast.graph import Graph
from pyg_fast.ops.product import raw_product
from pyg_fast.ops.row_blocks import column_tiles, row_blocks, tile_width
from pyg_fast.sparse.operator import SparseOperator

N, E = 60, 500


def operator(device: torch.device, weighted: bool, sorts: bool) -> SparseOperator:
    edge_index = torch.randint(N, (2, E))
    edge_index[1, :90] = 11
    if sorts:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    graph = Graph.from_edge_index(edge_index.to(device), N)
    if sorts:
        graph = graph._replace(perm=None)

    def numbers(*size: int) -> Tensor:
        return torch.rand(*size, dtype=torch.double, device=device)

    return SparseOperator(
        graph, numbers(E) if weighted else None, numbers(N), numbers(N), numbers(N)
    )


@pytest.mark.parametrize('weighted', [True, False])
@pytest.mark.parametrize('sorts', [True, False])
@pytest.mark.parametrize('size', [None, 4])
def test_blocks_are_the_whole(
    device: torch.device, weighted: bool, sorts: bool, size: int | None
) -> None:
    op = operator(device, weighted, sorts)
    op = op._replace(graph=op.graph.with_groups(size, size))
    x = torch.randn(N, 5, dtype=torch.double, device=device)
    expected = raw_product(op, x)
    degree = op.graph.rowptr.diff()
    for num_rows, num_edges in ((N, None), (7, None), (1, None), (N, 30), (20, 1), (13, 95)):
        blocks = row_blocks(op.graph, num_rows, num_edges)
        assert [block.stop for block in blocks[:-1]] == [block.start for block in blocks[1:]]
        assert (blocks[0].start, blocks[-1].stop) == (0, N)
        for block in blocks:
            rows = block.stop - block.start
            assert 1 <= rows <= num_rows
            assert block.graph.num_edges == int(degree[block.start : block.stop].sum())
            assert num_edges is None or rows == 1 or block.graph.num_edges <= num_edges
            assert (block.graph.groups is None) == (size is None)
        out = torch.cat([raw_product(block.of(op), x) for block in blocks])
        torch.testing.assert_close(out, expected)
        assert all(b.graph.groups is None for b in row_blocks(op.graph, 7, keep_groups=False))
    assert row_blocks(op.graph._replace(rowptr=op.graph.rowptr[:1], num_dst=0), 5) == ()


def test_width_of_tiles() -> None:
    assert [tile_width(12, most) for most in (0, 1, 3, 5, 6, 11, 12, 40)] == [
        1, 1, 3, 4, 6, 6, 12, 12
    ]  # fmt: skip
    assert tile_width(7, 6) == 1


def assert_tiles(x: Tensor, device: torch.device, width: int, nodes: Tensor | None) -> None:
    expected = x if x.dim() == 2 else x.permute(1, 0, 2).flatten(1)
    expected = expected.to(device)
    expected = expected if nodes is None else expected[nodes]
    end = 0
    for start, stop, tile in column_tiles(x, device, width, nodes):
        assert start == end
        end = stop
        torch.testing.assert_close(tile, expected[:, start:stop], rtol=0, atol=0)
    assert end == expected.size(1)


@pytest.mark.parametrize('picks', [True, False])
def test_tiles_on_the_device(device: torch.device, picks: bool) -> None:
    x = torch.randn(N, 12, device=device)
    nodes = torch.tensor([3, 5, 50], device=device) if picks else None
    for width in (1, 4, 12):
        assert_tiles(x, x.device, width, nodes)
        assert_tiles(x.view(N, 12 // width, width).permute(1, 0, 2), x.device, width, nodes)


@pytest.mark.parametrize('picks', [True, False])
@pytest.mark.parametrize('dtype', [torch.float, torch.bfloat16])
def test_tiles_from_host_memory(
    cuda: torch.device, limits: Callable[..., None], picks: bool, dtype: torch.dtype
) -> None:
    cuda = torch.empty(0, device=cuda).device
    limits(rows_staged_at_once=16)
    x = torch.randn(N, 12).to(dtype).pin_memory()
    nodes = torch.tensor([3, 5, 50], device=cuda) if picks else None
    for width in (1, 3, 4, 12):
        assert_tiles(x, cuda, width, nodes)
        if not picks:
            tiles = x.view(N, 12 // width, width).permute(1, 0, 2).contiguous().pin_memory()
            assert_tiles(tiles, cuda, width, nodes)
    for bad in (x.clone(), x[:, :6]):
        with pytest.raises(ValueError, match='pinned host memory'):
            list(column_tiles(bad, cuda, 2))


def test_tiles_are_not_written_while_they_are_read(cuda: torch.device) -> None:
    cuda = torch.empty(0, device=cuda).device
    x = torch.arange(8.0).expand(1 << 18, 8).contiguous().pin_memory()
    for _ in range(3):
        sums = []
        for start, _, tile in column_tiles(x, cuda, 1):
            torch.cuda._sleep(1_000_000)  # The next copies would be done before this one is read.
            sums.append((tile.sum() - start * tile.size(0)).abs())
        assert torch.stack(sums).tolist() == [0.0] * 8
