"""The rows of a sparse operator in blocks, and the columns of features in tiles: products in parts,
for memory that does not hold the whole result or all features."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ._ids import is_readable
from .gather_rows import gather_rows

_STAGED_AT_ONCE = 1 << 22  # rows of a tile that one kernel reads from host memory
_side: dict[torch.device, torch.cuda.Stream] = {}


class RowBlock(NamedTuple):
    """Rows :obj:`start` to :obj:`stop` of a graph, as a graph whose edges start at position
    :obj:`first_edge`."""

    start: int
    stop: int
    first_edge: int
    graph: Graph

    def of(self, op: SparseOperator) -> SparseOperator:
        """These rows of an operator over the graph; it has no transpose."""
        graph, value, rows = self.graph, op.value, slice(self.start, self.stop)
        if value is not None and graph.perm is None:
            value = value[self.first_edge : self.first_edge + graph.num_edges]
        self_row = op.self_row
        if self_row is None:
            device = graph.col.device
            self_row = torch.arange(self.start, self.stop, dtype=torch.int32, device=device)
        else:
            self_row = self_row[rows]
        return op._replace(
            graph=graph, value=value, self_row=self_row, t_diag=None, t_self_row=None,
            row_scale=None if op.row_scale is None else op.row_scale[rows],
            diag=None if op.diag is None else op.diag[rows],
        )  # fmt: skip


def row_blocks(
    graph: Graph, num_rows: int, num_edges: int | None = None, keep_groups: bool = True
) -> tuple[RowBlock, ...]:
    """Divides the rows of a graph into blocks of at most :obj:`num_rows` rows, and of at most
    :obj:`num_edges` edges or one row; blocks of a graph with groups have groups unless not
    :obj:`keep_groups`. Edges are not copied. Waits for the device."""
    if not keep_groups:
        graph = graph._replace(groups=None)
    rowptr, count = graph.rowptr, graph.num_dst
    if torch.compiler.is_compiling():  # Waiting and making groups is not possible.
        return tuple(
            RowBlock(start, min(start + num_rows, count), 0, graph._replace(
                rowptr=rowptr[start : min(start + num_rows, count) + 1], t_rowptr=None, t_col=None,
                t_perm=None, num_dst=min(num_rows, count - start), groups=None, t_groups=None,
            )) for start in range(0, count, num_rows)
        )  # fmt: skip
    starts = [*range(0, count, num_rows), count]
    ends = rowptr[torch.tensor(starts, device=rowptr.device)].tolist()
    blocks = []
    for (start, stop), (first, last) in zip(
        zip(starts, starts[1:], strict=False), zip(ends, ends[1:], strict=False), strict=True
    ):
        if num_edges is None or last - first <= num_edges:
            blocks.append(_block(graph, start, stop, first, last))
            continue
        part = rowptr[start : stop + 1].cpu().long()
        while start < stop:
            base = int(part[-1 - (stop - start)])
            most = int(torch.searchsorted(part, base + num_edges, right=True)) - 1
            end = max(start + 1, stop - (part.numel() - 1 - most))
            after = int(part[-1 - (stop - end)])
            blocks.append(_block(graph, start, end, base, after))
            start = end
    return tuple(blocks)


def _block(graph: Graph, start: int, stop: int, first: int, last: int) -> RowBlock:
    part = Graph(
        graph.rowptr[start : stop + 1] - first, graph.col[first:last],
        None if graph.perm is None else graph.perm[first:last], None, None, None, graph.num_src,
        stop - start, missing=graph.missing,
    )  # fmt: skip
    if graph.groups is not None:
        part = part.with_groups(graph.groups.size, atomic=graph.groups.atomic)
    return RowBlock(start, stop, first, part)


def tile_width(num_columns: int, most: int) -> int:
    """The largest divisor of the number of columns up to :obj:`most`, at least one."""
    return next(w for w in range(max(1, min(most, num_columns)), 0, -1) if num_columns % w == 0)


def column_tiles(
    x: Tensor, device: torch.device, width: int, nodes: Tensor | None = None
) -> Iterator[tuple[int, int, Tensor]]:
    """The columns of features in tiles on a device, from the first to the last.

    Features in host memory are copied tile by tile, each while the one before is in use, so two
    tiles are on the device. A tile is overwritten later: use it on the current stream, and before
    the next one.

    Args:
        x (Tensor): Features :math:`(N, F)`, on the device, or for a GPU in pinned memory; or tiles
            of them :math:`(F / w, N, w)`.
        device (torch.device): Where the tiles are.
        width (int): The columns of a tile, a divisor of :math:`F`.
        nodes (Tensor, optional): Only these rows :math:`(n)`, on the device. (default: :obj:`None`)

    Yields:
        tuple[int, int, Tensor]: The first column, that after the last, and the tile.

    Raises:
        ValueError: If features in host memory are not pinned or not contiguous.
    """
    num_columns = x.size(1) if x.dim() == 2 else x.size(0) * width
    starts = range(0, num_columns, width)
    if x.device == device:
        for start in starts:
            tile = x[start // width] if x.dim() == 3 else x[:, start : start + width]
            tile = tile.contiguous() if nodes is None else tile.index_select(0, nodes)
            yield start, start + width, tile
        return
    if not is_readable(x, device) or not x.is_contiguous():
        raise ValueError(
            f"'x' must be on {device}, or for a GPU contiguous in pinned host memory "
            f'(x.pin_memory()), got {x.device} with stride {list(x.stride())}'
        )
    yield from _staged(x, device, width, starts, nodes)


def _staged(
    x: Tensor, device: torch.device, width: int, starts: range, nodes: Tensor | None
) -> Iterator[tuple[int, int, Tensor]]:
    num_rows = x.size(-2) if nodes is None else nodes.size(0)
    main = torch.cuda.current_stream(device)
    side = _side_stream(device)
    tiles = [x.new_empty(num_rows, width, device=device) for _ in starts[:2]]
    for tile in tiles:
        tile.record_stream(side)  # An exception may drop it while it is written.
    if nodes is not None:
        nodes.record_stream(side)
    ready: dict[int, torch.cuda.Event] = {}
    side.wait_stream(main)

    def fetch(k: int) -> None:
        with torch.cuda.stream(side):
            _copy_columns(x, starts[k] // width, tiles[k % 2], nodes)
            ready[k % 2] = side.record_event()

    if len(starts) > 0:
        fetch(0)
    for k, start in enumerate(starts):
        if k + 1 < len(starts):
            if k > 0:  # The other tile has been read.
                side.wait_stream(main)
            fetch(k + 1)
        main.wait_event(ready[k % 2])
        yield start, start + width, tiles[k % 2]


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each GPU: each stream has its own free memory in torch's allocator."""
    if device not in _side:
        _side[device] = torch.cuda.Stream(device)
    return _side[device]


def _copy_columns(x: Tensor, number: int, out: Tensor, nodes: Tensor | None) -> None:
    """Copies a tile from pinned memory on the current stream, by kernels that read it."""
    if x.dim() == 3 and nodes is None:
        out.copy_(x[number], non_blocking=True)
        return
    assert x.dim() == 2
    width, count = out.size(1), x.size(1) // out.size(1)
    step = torch.arange(min(_STAGED_AT_ONCE, x.size(0)), device=out.device) * count + number
    for start in range(0, out.size(0), _STAGED_AT_ONCE):
        part = out[start : start + _STAGED_AT_ONCE]
        if nodes is None:
            rows = x[start : start + _STAGED_AT_ONCE].view(-1, width)
            index = step[: part.size(0)]
        else:
            rows = x.view(-1, width)
            index = nodes[start : start + _STAGED_AT_ONCE] * count + number
        part.copy_(gather_rows(rows, index))
