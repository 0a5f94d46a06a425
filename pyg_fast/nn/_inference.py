"""Evaluation of all nodes, layer by layer, with bounded memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, ModuleList, Sequential
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import OptTensor

from ..errors import ShapeError
from ..ops._edges import check_edge_index
from ..ops.product import raw_product
from ..ops.row_blocks import RowBlock, column_tiles, row_blocks, tile_width
from ..sparse.operator import SparseOperator
from ._aggregated import AggregatedInput, AggregatesInput, stand_in
from ._explain_edges import check_edge_weight, check_edges
from ._explain_features import check_columns, check_input, columns_of
from ._modules import is_plain, mixes_nodes

_FEWEST_ROWS = 1024  # of a block, where memory is short
_ROWS, _BLOCKS = 1 << 16, 16  # otherwise
_SORT = 1 << 16  # bytes that sorting groups takes, however few
_SORTED = 24  # and of each: keys and numbers, twice


_RowFunction: TypeAlias = Callable[[Tensor], Tensor]  # a module, or a function of each row


class _Layer(NamedTuple):
    """A layer, what follows it up to the next layer, and its sizes."""

    conv: MessagePassing
    after: tuple[_RowFunction, ...]
    op: SparseOperator
    with_root: bool
    weight_dtype: torch.dtype | None
    in_channels: int
    out_channels: int
    dtype: torch.dtype  # of its input
    out_dtype: torch.dtype


class _Memory(NamedTuple):
    """How a layer runs: columns of a tile (None: all are on the device), rows and edges of a
    block, and the least memory for that."""

    width: int | None
    num_rows: int
    num_edges: int | None
    least: int


@torch.no_grad()
def inference(
    layers: Sequence[_RowFunction],
    x: Tensor,
    edge_index: Tensor,
    edge_weight: OptTensor = None,
    max_bytes: int | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    r"""Evaluates a stack of layers on all nodes, layer by layer in blocks of rows.

    The result is that of the stack in evaluation, up to summation order: each layer sums before
    its linear map. A block is summed, mapped, and goes through what follows the layer, before the
    next block. If the features of two layers do not fit into :obj:`max_bytes`, those between layers
    stay in host memory, and columns of them are copied to the device.

    Graph and features may be in host memory beside layers on a GPU: blocks of edges and columns of
    features are copied when they are needed, faster from pinned memory, which features need
    (:meth:`torch.Tensor.pin_memory`).

    Args:
        layers (Sequence): :class:`FusedGCNConv`, :class:`FusedSAGEConv` (sums and means) and
            :class:`FusedGINConv` layers, also on paths; modules or functions of each row between
            and after them.
        x (Tensor): Node features :math:`(|\mathcal{V}|, F_{in})`.
        edge_index (Tensor or EdgeIndex): The edges :math:`(2, |\mathcal{E}|)`.
        edge_weight (Tensor, optional): Edge weights :math:`(|\mathcal{E}|)`, for GCN layers.
            (default: :obj:`None`)
        max_bytes (int, optional): The device memory that the call may use, in addition to its
            arguments, the result if it is on the device, and what a prepared graph keeps.
            (default: :obj:`None`, on a GPU 9/10 of the free memory, otherwise any)
        device (torch.device or str, optional): Where to compute. (default: :obj:`None`, the device
            of the layers' parameters)

    Returns:
        Tensor: :math:`(|\mathcal{V}|, F_{out})`, on the device of :obj:`x`.

    Raises:
        TypeError: If there is no such layer or one of another kind, or :obj:`max_bytes` is no
            integer.
        ValueError: If :obj:`max_bytes` is too small, with the least possible; if a module mixes
            nodes or a layer has hooks or options that no kernel takes; if no layer takes
            :obj:`edge_weight`; if columns of :obj:`x` must be copied and it is not in pinned
            memory.
    """
    _check_arguments(layers, x, edge_index, edge_weight)
    if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int)):
        raise TypeError(f"'max_bytes' must be an integer, got {type(max_bytes).__name__}")
    device = _device_of(layers, x) if device is None else torch.device(device)
    device = torch.empty(0, device=device).device  # with its number
    first, stack = _stack(layers, x, edge_index, edge_weight)
    for function in first:
        x = function(x)
    on_device = x.device == device
    budgets: list[int] | None = None if max_bytes is None else [max_bytes] * len(stack)
    if max_bytes is None and device.type == 'cuda':
        top, free = stack[-1], _free_bytes(device)
        result = x.size(0) * top.out_channels * top.out_dtype.itemsize if on_device else 0
        # The last layer makes the result.
        budgets = [free * 9 // 10] * (len(stack) - 1) + [max(0, free - result) * 9 // 10]
    plans = _plans(stack, x.size(0), on_device, device, budgets)
    h = x
    for k, (layer, memory) in enumerate(zip(stack, plans, strict=True)):
        last = k == len(stack) - 1
        if memory.width is None and h.device != device:
            h = h.to(device, non_blocking=True)
        shape: tuple[int, ...] = x.size(0), layer.out_channels
        at = x.device if last else device
        if not last and plans[k + 1].width is not None:
            width = plans[k + 1].width or 1
            shape, at = (layer.out_channels // width, x.size(0), width), torch.device('cpu')
        pinned = at.type == 'cpu' and device.type == 'cuda' and not (last and not x.is_pinned())
        out = torch.empty(shape, dtype=layer.out_dtype, device=at, pin_memory=pinned)
        _run(layer, h, out, memory, device, edge_index)
        h = out
    if h.device.type == 'cpu' and device.type == 'cuda':
        torch.cuda.current_stream(device).synchronize()  # The host may read it at once.
    return h


def _check_arguments(layers: Any, x: object, edge_index: object, edge_weight: object) -> None:
    several = isinstance(layers, (Sequence, ModuleList, Sequential)) and not isinstance(layers, str)
    others = [each for each in layers if not callable(each)] if several else [layers]
    if others:
        name = type(others[0]).__name__
        got = f'a list with {name}' if several else name
        raise TypeError(
            f"'layers' must be a list of layers, and of modules and functions between them, got "
            f'{got}: a PathPreparedGNN has its own inference(data)'
        )
    check_input(x)
    if not isinstance(x, Tensor) or x.dim() == 0:
        what = 'a number' if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"'x' must be a tensor with a row for each node, got {what}")
    check_edges(edge_index)
    if isinstance(edge_index, Tensor) and edge_index.layout == torch.strided:
        check_edge_index(edge_index)
    check_edge_weight(edge_weight)


def _device_of(layers: Sequence[_RowFunction], x: Tensor) -> torch.device:
    for layer in layers:
        if isinstance(layer, Module):
            for parameter in layer.parameters():
                return parameter.device
    return x.device


def _free_bytes(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0]
    stats = torch.cuda.memory_stats(device)
    # What lies beside tensors in the allocator's segments cannot become part of a larger tensor.
    beside = stats.get('inactive_split_bytes.all.current', 0)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held - beside


def _stack(
    layers: Sequence[_RowFunction], x: Tensor, edge_index: Tensor, edge_weight: OptTensor
) -> tuple[list[_RowFunction], list[_Layer]]:
    """What precedes the first layer, and the layers."""
    first, convs = _by_layer(layers)
    if edge_weight is not None and not any(conv._takes_edge_weight for conv, _ in convs):
        kinds = sorted({type(conv).__name__ for conv, _ in convs})
        raise ValueError(f"'edge_weight' is not supported by {', '.join(kinds)}")
    sample = x[:0]
    for function in first:
        sample = function(sample)
    stack: list[_Layer] = []
    for conv, after in convs:
        _check_width(layers, conv, sample, is_x=not first and not stack)
        on = stand_in(sample.new_empty(x.size(0), 0, device=edge_index.device), edge_index)
        described = conv._input_plan(on, edge_index, edge_weight)
        if described is None:
            reason = conv._last_run or 'arguments that no kernel takes'
            raise ValueError(
                f"'layers' must be aggregated by kernels, but PyG's code would run in "
                f'{type(conv).__name__}: {reason}'
            )
        plan, with_root, weight_dtype = described
        assert plan.part is not None
        at = next((p.device for p in conv.parameters()), sample.device)
        out = _mapped(conv, sample.to(at), sample.to(at), weight_dtype, edge_index)
        for function in after:
            out = function(out)
        stack.append(_Layer(
            conv, tuple(after), plan.part, with_root, weight_dtype, sample.size(1), out.size(1),
            sample.dtype, out.dtype,
        ))  # fmt: skip
        sample = out
    return first, stack


def _check_width(
    layers: Sequence[_RowFunction], conv: AggregatesInput, sample: Tensor, is_x: bool
) -> None:
    """Raises unless what stands before a layer gives as many columns as it takes."""
    wanted = getattr(conv, 'in_channels', None) or columns_of(getattr(conv, 'nn', None))
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    if is_x:
        check_columns(sample, wanted)
    if sample.dim() != 2 or (isinstance(wanted, int) and 0 < wanted != sample.size(1)):
        k = next(k for k, each in enumerate(layers) if each is conv)
        raise ShapeError(
            f"'layers[{k}]' must take the features that it gets, of shape [num_nodes, {wanted}], "
            f'got {["num_nodes", *sample.shape[1:]]}'
        )


def _by_layer(
    layers: Sequence[_RowFunction],
) -> tuple[list[_RowFunction], list[tuple[AggregatesInput, list[_RowFunction]]]]:
    """What precedes the first layer, and each layer with what follows it."""
    first: list[_RowFunction] = []
    convs: list[tuple[AggregatesInput, list[_RowFunction]]] = []
    for k, layer in enumerate(layers):
        if isinstance(layer, AggregatesInput):
            if not is_plain(layer):
                raise ValueError(f"'layers[{k}]' must have no hooks or patches")
            convs.append((layer, []))
            continue
        if isinstance(layer, MessagePassing):
            raise TypeError(
                f"'layers[{k}]' must be a GCN, SAGE or GIN layer of ours or compute each row "
                f'separately, got {type(layer).__name__}'
            )
        part = mixes_nodes(layer) if isinstance(layer, Module) else None
        if part is not None:
            raise ValueError(
                f"'layers[{k}]' must compute each row separately, but {type(part).__name__} "
                'computes over all nodes'
            )
        (convs[-1][1] if convs else first).append(layer)
    if not convs:
        raise TypeError("'layers' must hold a GCN, SAGE or GIN layer of ours, got none")
    return first, convs


def _mapped(
    conv: MessagePassing,
    aggregated: Tensor,
    root: OptTensor,
    weight_dtype: torch.dtype | None,
    edge_index: Tensor,
) -> Tensor:
    """A layer on rows whose neighbours are already summed."""
    given = AggregatedInput(
        aggregated, root, weight_dtype, conv._aggregation(), edge_index.size(1), None
    )
    return conv._of_aggregated(given, edge_index)


def _plans(
    stack: list[_Layer],
    num_nodes: int,
    on_device: bool,
    device: torch.device,
    budgets: list[int] | None,
) -> list[_Memory]:
    """How each layer runs within its memory: with all features on the device if these fit,
    otherwise with those between layers in host memory."""

    def resident(k: int, most: int | None) -> _Memory:
        layer, fixed = stack[k], 0
        if k > 0 or not on_device:
            fixed += num_nodes * layer.in_channels * layer.dtype.itemsize
        if k < len(stack) - 1:
            fixed += num_nodes * layer.out_channels * layer.out_dtype.itemsize
        return _blocks_in(layer, None, fixed, device, most)

    def tiled(k: int, most: int) -> _Memory:
        layer = stack[k]
        if k == 0 and on_device:  # The features are an argument.
            return _blocks_in(layer, None, 0, device, most)
        column = 2 * num_nodes * layer.dtype.itemsize  # of two tiles
        smallest = _blocks_in(layer, 1, column, device, most)
        columns = (most - smallest.least) // 2 // max(column, 1)
        width = tile_width(layer.in_channels, max(1, columns))
        return _blocks_in(layer, width, column * width, device, most)

    if budgets is None:
        return [resident(k, None) for k in range(len(stack))]
    ways = [[way(k, most) for k, most in enumerate(budgets)] for way in (resident, tiled)]
    for plans in ways:
        if all(plan.least <= most for plan, most in zip(plans, budgets, strict=True)):
            return plans
    least = min(max(plan.least for plan in plans) for plans in ways)
    raise ValueError(
        f"'max_bytes' must be at least {least} for these layers and this graph, got {min(budgets)}"
    )


def _blocks_in(
    layer: _Layer, width: int | None, fixed: int, device: torch.device, max_bytes: int | None
) -> _Memory:
    """Rows and edges of a block in the memory that is left."""
    op = layer.op
    graph, num_rows = op.graph, op.graph.num_dst
    size = max(layer.dtype.itemsize, layer.out_dtype.itemsize)
    # Sums and own features, also contiguous; steps of the map and of what follows; row pointers,
    # positions and scales.
    per_row = (3 * layer.in_channels + 6 * layer.out_channels) * size + 32
    per_edge = 0
    if graph.col.device != device:
        per_edge += 4 + (0 if op.value is None else op.value.element_size())
        fixed += 0 if op.col_scale is None else op.col_scale.nbytes
    else:
        index = graph.rowptr.element_size()
        fixed += num_rows * index  # row pointers of all blocks
        if graph.groups is not None:
            # Of all blocks: the groups, their rows and their order. Of one: the sort of the order,
            # and partial sums.
            size_of_group = graph.groups.size
            fixed += 3 * index * (num_rows + graph.num_edges // size_of_group) + _SORT
            per_edge += -(-(_SORTED + 4 * layer.in_channels) // size_of_group)
            per_row += _SORTED
    degree = int(graph.rowptr.diff().max()) if num_rows > 0 else 0
    rows = min(num_rows, _FEWEST_ROWS)
    least = fixed + rows * per_row + degree * per_edge
    num_rows = min(num_rows, max(_ROWS, -(-num_rows // _BLOCKS)))
    num_edges = None
    if max_bytes is not None and least <= max_bytes:
        left = max_bytes - least
        num_rows = min(num_rows, rows + left // 2 // per_row)
        num_edges = None if per_edge == 0 else degree + left // 2 // per_edge
    return _Memory(width, max(1, num_rows), num_edges, least)


def _run(
    layer: _Layer,
    x: Tensor,
    out: Tensor,
    memory: _Memory,
    device: torch.device,
    edge_index: Tensor,
) -> None:
    """Computes a layer from :obj:`x` into :obj:`out`."""
    op, width = layer.op, memory.width
    staged = op.graph.col.device != device
    blocks = row_blocks(op.graph, memory.num_rows, memory.num_edges, keep_groups=not staged)
    if staged and op.col_scale is not None:
        op = op._replace(col_scale=op.col_scale.to(device))

    def write(start: int, stop: int, aggregated: Tensor) -> None:
        root = _rows(x, start, stop, device) if layer.with_root else None
        rows = _mapped(layer.conv, aggregated, root, layer.weight_dtype, edge_index)
        for function in layer.after:
            rows = function(rows)
        if out.dim() == 2:
            out[start:stop].copy_(rows, non_blocking=True)
            return
        for tile, columns in zip(out, rows.split(out.size(2), 1), strict=True):
            tile[start:stop].copy_(columns, non_blocking=True)

    def summed(tile: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        for block in blocks:
            yield block.start, block.stop, raw_product(_block_on(block, op, device), tile)

    if width is None or width == layer.in_channels:
        tiles = [(0, 0, x)] if width is None else column_tiles(x, device, width)
        for _, _, tile in tiles:
            for start, stop, aggregated in summed(tile):
                write(start, stop, aggregated)
        return
    count = op.graph.num_dst
    sums = torch.empty(
        (layer.in_channels // width, count, width), dtype=layer.dtype,
        pin_memory=device.type == 'cuda',
    )  # fmt: skip
    for first, _, tile in column_tiles(x, device, width):
        for start, stop, aggregated in summed(tile):
            sums[first // width, start:stop].copy_(aggregated, non_blocking=True)
    for start in range(0, count, memory.num_rows):
        stop = min(start + memory.num_rows, count)
        write(start, stop, _rows(sums, start, stop, device))


def _rows(x: Tensor, start: int, stop: int, device: torch.device) -> Tensor:
    """Rows of features or of tiles of features, on the device."""
    if x.dim() == 2:
        return x[start:stop].to(device, non_blocking=True)
    return torch.cat([tile[start:stop].to(device, non_blocking=True) for tile in x], 1)


def _block_on(block: RowBlock, op: SparseOperator, device: torch.device) -> SparseOperator:
    """A block of an operator on the device."""
    graph = block.graph
    if graph.col.device == device:
        return block.of(op)

    def moved(t: OptTensor) -> OptTensor:
        return None if t is None else t.to(device, non_blocking=True)

    part = block.of(op._replace(col_scale=None))
    value = part.value
    if value is not None and graph.perm is not None:
        value = value[graph.perm.long()]
    graph = graph._replace(rowptr=moved(graph.rowptr), col=moved(graph.col), perm=None)
    return part._replace(
        graph=graph, value=moved(value), row_scale=moved(part.row_scale), col_scale=op.col_scale,
        diag=moved(part.diag), self_row=moved(part.self_row),
    )  # fmt: skip
