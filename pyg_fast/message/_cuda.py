"""Runs the passes of a plan on a GPU, by Triton."""

import itertools
import linecache
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..sparse.graph import Graph
from ..sparse.groups import Groups
from ._ir import NODES, STATISTICS, Program
from ._pieces import (
    ROWS_OF_OWNERS,
    WARPS_OF_OWNERS,
    WRITE_OWNERS,
    Pieces,
    combination,
    combinations,
    pieces_of,
)
from ._statistics import statistics_blocks, statistics_kernel
from ._triton import OF_TWO, Out, Source
from ._values import power

if TYPE_CHECKING:
    from ._passes import Pass

# Programs that take many rows each: the most of them, and of numbers in their sums over all edges.
_MOST_PROGRAMS, _MOST_TOTALS = 2**14, 2**23
# Where many rows have few edges on average, a program takes several rows: to start it takes longer
# than to add one.
_FEW_EDGES, _MANY_ROWS, _ROWS_OF_FEW = 8, 2**15, 4
_TILE = 64  # columns, of results whose rows are divided


class Recipe(NamedTuple):
    """What a pass needs for its launch."""

    source: Source
    tile: 'Tile'
    num_tiles: int
    most_programs: int | None  # of a tile; or a program takes a row, or a few
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]


# Source texts in memory.
_MOST_KERNELS = 1024
_slots = itertools.cycle(range(_MOST_KERNELS))


@lru_cache(maxsize=_MOST_KERNELS)
def _jitted(text: str, name: str) -> Any:
    """The Triton function of a source text."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    file = f'<pyg_fast message {next(_slots)}>'
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, Any] = {'triton': triton, 'tl': tl, 'libdevice': libdevice}
    scope['__name__'] = __name__
    exec(compile(text, file, 'exec'), scope)
    return scope[name]


@lru_cache(maxsize=_MOST_KERNELS)
def _compiled(text: str, name: str) -> dict[Any, Any]:
    """The machine code of a Triton function, by what Triton specialises it for."""
    return {}


def check_not_capturing() -> None:
    """Raises while a CUDA graph is captured: the first call of a message compiles a kernel."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            'a CUDA graph captures the first call of a message: call the layer (and its backward '
            'pass) once before the capture'
        )


def _launch(
    text: str, name: str, num_warps: int, num_programs: int, tensors: list[Tensor],
    numbers: tuple[int, ...], constants: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launches a Triton function on the current device. Triton's own launch first finds out what
    the arguments are, which takes several times as long."""
    compiled = _compiled(text, name)
    key = (
        torch.cuda.current_device(), constants, *[number < 2**31 for number in numbers],
        *[(t.dtype, t.data_ptr() % 16) for t in tensors],
    )  # fmt: skip
    found = compiled.get(key)
    if found is None:
        check_not_capturing()
        function = _jitted(text, name)[num_programs,]
        compiled[key] = function(*tensors, *numbers, *constants, num_warps=num_warps)
    else:
        found[num_programs, 1, 1](*tensors, *numbers, *constants)


class Tile(NamedTuple):
    """The shape of a program's blocks: a program takes one row (or piece of a row) at a time."""

    edges: int
    columns: tuple[int, ...]
    warps: int


def tile_shape(source: Source) -> Tile:
    """From a small table, by the width of a row."""
    sizes = tuple(power(n) for n in source.sizes)
    if source.tiled:
        # Programs of one tile after another: the sources' rows of a tile stay in the L2 cache.
        sizes = (min(sizes[0], max(1, _TILE // math.prod(sizes[1:]))), *sizes[1:])
    width = math.prod(sizes)
    if source.has_dots:
        return Tile(16, (max(16, width),), 2)
    # Triton makes a product of matrices of the sum over 16 products, which TF32 would round.
    most = 4 if source.has_maps else 16
    values, has_heads = 256, len(sizes) > 1 and (sizes[0] > 1 or source.has_maps)
    is_backward = any(role == 'grad' for role, _ in source.loads)
    if source.totals or (is_backward and has_heads and not source.half):
        values = 128  # It holds more: sums, or several numbers of each head.
    elif source.half and not is_backward and len(sizes) == 1 and width >= 128:
        values = 512
    width *= power(source.num_tiles)
    return Tile(max(1, min(most, values // width)), sizes, 1)


class Schedule(NamedTuple):
    """The rows that a pass walks."""

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    num_rows: int
    groups: Groups | None
    most_edges: int  # at least those of the longest row


def schedule_of(graph: Graph, role: str) -> Schedule:
    """The structure of a pass."""
    if role == 'src':
        graph = graph.t()
    return Schedule(
        graph.rowptr, graph.col, graph.perm, graph.num_dst, graph.groups, graph.most_edges
    )


def most_programs(program: Program, outs: Sequence[Out], source: Source) -> int | None:
    """The most programs of a tile, if each holds parameters or sums of all edges."""
    if not (source.holds or source.totals):
        return None
    size = sum(math.prod(program[out.at].shape) for out in outs if out.kind == 'total')
    return min(_MOST_PROGRAMS, max(64, _MOST_TOTALS // max(1, size)))


def _num_programs(most: int | None, num_rows: int, num_edges: int) -> int:
    """The programs of a tile that take rows: each takes one row, or many."""
    if most is not None:
        return min(num_rows, most)
    several = num_edges <= _FEW_EDGES * num_rows and num_rows >= _MANY_ROWS
    return -(-num_rows // _ROWS_OF_FEW) if several else num_rows


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one."""
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def run_pass_cuda(
    one: 'Pass', schedule: Schedule, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The results of a pass, and the second ones of kinds that have two."""
    rowptr, col, perm, num_rows, groups, most = schedule
    recipe, pieces = one.recipe(acc), pieces_of(col.size(0), num_rows, groups, most)
    source, tile = recipe.source, recipe.tile
    units, of_pieces, slots = num_rows, 0, 0
    if isinstance(pieces, Groups):
        units, slots = pieces.row.size(0), pieces.num_partials
    elif pieces.num_blocks:
        of_pieces, lanes = pieces.programs(recipe.most_programs)
        slots = 2 * pieces.num_blocks
    of_rows = _num_programs(recipe.most_programs, units, col.size(0))
    device, index = col.device, rowptr.dtype
    outs: list[Tensor] = []
    args: dict[int, Tensor] = {}
    parts: dict[int, Tensor] = {}
    part_args: dict[int, Tensor] = {}
    for k, (out, shape, dtype) in enumerate(
        zip(one.outs, recipe.shapes, recipe.dtypes, strict=True)
    ):
        rows = {'edge': col.size(0), 'total': of_rows + of_pieces}.get(out.kind, num_rows)
        outs.append(torch.empty((rows, *shape), dtype=dtype, device=device))
        second = index if out.kind in ('max', 'min') else acc
        if out.kind in OF_TWO:
            args[k] = torch.empty((rows, *shape), dtype=second, device=device)
        if out.kind not in ('edge', 'total'):
            parts[k] = torch.empty((slots, *shape), dtype=acc, device=device)
            if k in args:
                part_args[k] = torch.empty(parts[k].shape, dtype=second, device=device)
    chosen: list[Tensor | None] = [args.get(k) for k in range(len(outs))]
    if num_rows == 0:
        return outs, chosen
    edges = [col, rowptr if perm is None else perm]
    loads = [_input(inputs, load) for load in source.loads]
    last = rowptr if seed is None else seed
    nodes = [inputs[load] for load in source.loads if load[0] in NODES]
    steps = [x.stride(0) for x in nodes]
    apart = [x.size(0) * x.stride(0) for x in nodes]
    widest = max(col.size(0), *(t.numel() for t in (*loads, *outs, *parts.values())), *apart)
    constants = perm is not None, _offset(widest), tile.edges, *tile.columns, *steps
    results = [*outs, *args.values()]
    of_parts = [*parts.values(), *part_args.values()]
    if isinstance(pieces, Groups):
        _launch(
            source.of_groups, source.name, tile.warps, of_rows * recipe.num_tiles,
            [pieces.ptr, *edges, pieces.row, pieces.long_row, pieces.long_shift, *loads, *results,
             *of_parts, last],
            (units, of_rows), constants,
        )  # fmt: skip
        owners = [pieces.long_row, pieces.long_ptr]
    else:
        owner = rowptr.new_empty(slots) if slots else rowptr
        owners, sizes = [owner], (pieces.size, pieces.longest)
        structure = [rowptr, *edges, owner]
        if pieces.together:
            _launch(
                WRITE_OWNERS, 'message_owners', WARPS_OF_OWNERS, -(-num_rows // ROWS_OF_OWNERS),
                [rowptr, owner], (num_rows, *sizes), (),
            )  # fmt: skip
        else:
            _launch(
                source.text, source.name, tile.warps, of_rows * recipe.num_tiles,
                [*structure, *loads, *results, last], (num_rows, of_rows, *sizes), constants,
            )  # fmt: skip
        if of_pieces:
            programs, before = of_pieces, of_rows
            if pieces.together:
                programs, before = of_pieces + of_rows, 0
            _launch(
                source.divides, source.name, tile.warps, programs * recipe.num_tiles,
                [*structure, *loads, *results, *of_parts, last],
                (num_rows, programs, *sizes, of_pieces, pieces.num_blocks, before),
                (lanes, *constants),
            )  # fmt: skip
    if parts and slots:
        _combine(one, pieces, parts, part_args, outs, chosen, owners, rowptr, acc)
    if perm is not None and col.size(0) > 0:  # Positions become numbers of edges.
        chosen = [
            torch.where(arg < 0, -1, perm[arg.clamp(min=0).long()])
            if arg is not None and out.kind in ('max', 'min') else arg
            for arg, out in zip(chosen, one.outs, strict=True)
        ]
    return outs, chosen


def _input(inputs: dict[tuple[str, int], Tensor], load: tuple[str, int]) -> Tensor:
    role, n = load
    if role != 'stats' or load in inputs:
        return inputs[load]
    # A pass that reads no third one gets any.
    return torch.stack([inputs.get((each, n), inputs['most', n]) for each in STATISTICS], -1)


def _offset(widest: int) -> Any:
    """The integers of offsets: those of 32 bits are faster."""
    import triton.language as tl

    return tl.int32 if widest < 2**31 else tl.int64


def _combine(
    one: 'Pass', pieces: Pieces | Groups, parts: dict[int, Tensor], part_args: dict[int, Tensor],
    outs: list[Tensor], chosen: list[Tensor | None], owners: list[Tensor], rowptr: Tensor,
    acc: torch.dtype,
) -> None:  # fmt: skip
    """Combines the pieces of the long rows."""
    import triton.language as tl

    pointers: list[Any] = []
    for k, part in parts.items():
        pointers += [part, outs[k]]
        if k in part_args:
            pointers += [part_args[k], chosen[k]]
    sizes = [math.prod(part.shape[1:]) for part in parts.values()]
    numbers: tuple[int, ...]
    if isinstance(pieces, Groups):
        numbers = pieces.long_row.size(0), pieces.size
    else:
        numbers = pieces.num_blocks, rowptr.numel() - 1, pieces.size, pieces.longest
    kinds = tuple(one.outs[k].kind for k in parts)
    for form, programs, tiles in combinations(pieces, sizes):
        _launch(
            combination(kinds, form), 'message_combine', form.warps, programs * tiles,
            [*pointers, *owners, rowptr], (programs, *numbers, *sizes),
            (tl.float64 if acc == torch.float64 else tl.float32,),
        )  # fmt: skip


def dot_of_results(
    most: Tensor, scale: Tensor, grads: Sequence[Tensor], results: Sequence[Tensor],
    acc: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum of the results of each row times their gradients, and what is known of its softmax
    side by side."""
    import triton.language as tl

    count = most.numel()
    sizes = [each.numel() // count for each in results]
    block, columns = statistics_blocks(sizes)
    dot = torch.empty_like(most)
    stats = most.new_empty(*most.shape, len(STATISTICS))
    pairs = [each for pair in zip(grads, results, strict=True) for each in pair]
    with on_device(most.device):
        _launch(
            statistics_kernel(len(results)), 'message_statistics', 4, -(-count // block),
            [most, scale, *pairs, dot, stats], (count,),
            (block, tl.float64 if acc == torch.float64 else tl.float32,
             *(each for pair in zip(sizes, columns, strict=True) for each in pair)),
        )  # fmt: skip
    return dot, stats
