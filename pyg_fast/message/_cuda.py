"""Runs the passes of a plan on a GPU, by Triton."""

import itertools
import linecache
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..ops._edges import is_stream_capturing
from ..sparse.graph import Graph
from ..sparse.groups import Groups
from ._ir import SOFTMAX_ROLES, Inputs, Load, Program
from ._pieces import (
    ROWS_OF_OWNERS,
    WARPS_OF_OWNERS,
    WRITE_OWNERS,
    Pieces,
    combine_kernel,
    combine_launches,
    divide_rows,
)
from ._statistics import statistics_blocks, statistics_kernel
from ._triton import TWO_RESULTS, Out, Source
from ._values import next_power_of_two

if TYPE_CHECKING:
    import triton.language as tl

    from ._passes import Pass

# Limits where a program takes many rows: of programs, and of numbers in their sums over all edges.
_MAX_PROGRAMS, _MAX_TOTALS = 2**14, 2**23
# Where many rows have few edges on average, a program takes several rows: starting a program costs
# more than a row.
_FEW_EDGES, _MANY_ROWS, _ROWS_OF_FEW = 8, 2**15, 4
_TILE = 64  # columns, of results whose rows are divided
# The columns of a tile for rows of few edges, and how many edges are few for it, twice as many of
# half types.
_WIDE_TILE, _SHORT_ROW = 256, 32
_STAGES = 3  # of loops that have loads under way
_L2_CACHE = 50 * 2**20  # bytes, where there is no GPU


class Recipe(NamedTuple):
    """The kernel of a pass, and how to launch it."""

    source: Source
    tile: 'Tile'
    num_tiles: int
    most_programs: int | None  # of a tile; None: a program takes one row, or a few
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    nodes: list[Load]  # the inputs whose rows may have any stride
    tables: list[Load]
    wide: 'Recipe | None' = None  # the next wider one, for rows of few edges


# How many source texts stay in memory.
_MAX_KERNELS = 1024
_slots = itertools.cycle(range(_MAX_KERNELS))


@lru_cache(maxsize=_MAX_KERNELS)
def jit_function(text: str, name: str) -> Any:
    """The Triton function of a source text."""
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    file = f'<pyg_fast message {next(_slots)}>'
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    scope: dict[str, object] = {'triton': triton, 'tl': tl, 'libdevice': libdevice}
    scope['__name__'] = __name__
    exec(compile(text, file, 'exec'), scope)
    return scope[name]


class _Metadata(Protocol):
    shared: int  # bytes of shared memory of a program


class CompiledKernel(Protocol):
    """A kernel of Triton."""

    n_spills: int  # numbers of a thread that its registers do not hold
    metadata: '_Metadata'

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]: ...

    def _init_handles(self) -> None: ...


@lru_cache(maxsize=_MAX_KERNELS)
def _compiled_variants(text: str, name: str) -> dict[Hashable, CompiledKernel]:
    """The compiled variants of a Triton function, by what Triton specialises it for."""
    return {}


def check_not_capturing() -> None:
    """Raises while a CUDA graph is captured: the first call of a message compiles a kernel."""
    if is_stream_capturing():
        raise RuntimeError(
            'a CUDA graph captures the first call of a message: call the layer (and its backward '
            'pass) once before the capture'
        )


def compiled_kernel(
    text: str, name: str, num_warps: int, tensors: list[Tensor], numbers: tuple[int, ...],
    constants: tuple[object, ...], registers: int | None = None,
) -> CompiledKernel:  # fmt: skip
    """A Triton function, compiled for such arguments. A thread has so many :obj:`registers` at
    most."""
    pointers = [*map(Tensor.data_ptr, tensors)]
    return _variant(text, name, num_warps, tensors, pointers, numbers, constants, registers)


def launch_kernel(
    text: str, name: str, num_warps: int, num_programs: int, tensors: list[Tensor],
    numbers: tuple[int, ...], constants: tuple[object, ...], registers: int | None = None,
) -> None:  # fmt: skip
    """Launches a Triton function on the current device, past Triton's own dispatch, which takes
    several times as long to inspect the arguments; it asks the driver about each tensor, but not
    about a pointer."""
    pointers = [*map(Tensor.data_ptr, tensors)]
    found = _variant(text, name, num_warps, tensors, pointers, numbers, constants, registers)
    found[num_programs, 1, 1](*pointers, *numbers, *constants)


def _variant(
    text: str, name: str, num_warps: int, tensors: list[Tensor], pointers: list[int],
    numbers: tuple[int, ...], constants: tuple[object, ...], registers: int | None,
) -> CompiledKernel:  # fmt: skip
    variants = _compiled_variants(text, name)
    key = (
        tensors[0].get_device(), num_warps, registers, constants,
        *[number < 2**31 for number in numbers],
        *[t.dtype for t in tensors], *[pointer % 16 for pointer in pointers],
    )  # fmt: skip
    found = variants.get(key)
    if found is None:
        check_not_capturing()
        most = {} if registers is None else {'maxnreg': registers}
        arguments = (*tensors, *numbers, *constants)
        function = jit_function(text, name)
        found = function.warmup(*arguments, grid=(1,), num_warps=num_warps, **most)
        found._init_handles()
        variants[key] = found
    return found


class Tile(NamedTuple):
    """The shape of the blocks of a program, which takes one row (or piece of a row) at a time."""

    edges: int
    columns: tuple[int, ...]
    warps: int
    stages: int = 1  # blocks of edges that are under way, by loads through shared memory


def choose_tile(source: Source) -> Tile:
    """Chooses the blocks of a kernel by the width of its rows."""
    sizes = tuple(next_power_of_two(n) for n in source.sizes)
    if source.tiled:
        # Programs of one tile after another: the sources' rows of a tile stay in the L2 cache.
        sizes = (min(sizes[0], max(1, _TILE // math.prod(sizes[1:]))), *sizes[1:])
    width = math.prod(sizes)
    if source.has_dots:
        return Tile(16, (max(16, width),), 2, _STAGES)
    # Triton makes a product of matrices of the sum over 16 products, which TF32 would round.
    most = 4 if source.has_maps else 16
    values, has_heads = 256, len(sizes) > 1 and (sizes[0] > 1 or source.has_maps)
    is_backward = any(role == 'grad' for role, _ in source.loads)
    if source.totals or (is_backward and has_heads and not source.half):
        values = 128  # It holds more: sums, or several numbers of each head.
    elif source.half and not is_backward and len(sizes) == 1 and width >= 128:
        values = 512
    width *= next_power_of_two(source.num_tiles)
    return Tile(max(1, min(most, values // width)), sizes, 1)


def choose_wide_tiles(source: Source) -> list[Tile]:
    """The blocks for rows of few edges, the narrowest first: of several heads, so that a thread has
    more numbers of one edge to wait for at once, in gradients of half types twice as many. Such
    kernels of half types wait longer than they compute, and those of a softmax longest."""
    heads, *others = source.sizes
    if not (source.tiled and others) or source.totals or source.has_maps or source.num_tiles > 1:
        return []
    sizes = tuple(next_power_of_two(n) for n in others)
    stages = 1 if not source.half else _STAGES if source.of_softmax else 2
    is_backward = any(role == 'grad' for role, _ in source.loads)
    found: dict[int, Tile] = {}
    for most in (_WIDE_TILE, 2 * _WIDE_TILE) if source.half and is_backward else (_WIDE_TILE,):
        at_once = math.gcd(heads, max(1, most // math.prod(sizes)))
        columns = at_once * math.prod(sizes)
        if _TILE < columns <= most:
            found[columns] = Tile(max(1, _WIDE_TILE // columns), (at_once, *sizes), 1, stages)
    return list(found.values())


class Schedule(NamedTuple):
    """The CSR structure whose rows a pass walks."""

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    num_rows: int
    groups: Groups | None
    most_edges: int  # an upper bound of the edges of a row
    num_cols: int


def schedule_of(graph: Graph, role: str) -> Schedule:
    """The structure of a pass over rows of a role."""
    if role == 'src':
        graph = graph.t()
    return Schedule(
        graph.rowptr, graph.col, graph.perm, graph.num_dst, graph.groups, graph.most_edges,
        graph.num_src,
    )  # fmt: skip


def _in_wide_tiles(schedule: Schedule, itemsize: int, columns: int) -> bool:
    """Whether tiles of so many columns are faster: rows are short, and the L2 cache holds such a
    tile of what they gather, or not even a narrow one."""
    few = 2 * _SHORT_ROW if itemsize == 2 else _SHORT_ROW
    if schedule.col.size(0) > few * schedule.num_rows:
        return False
    column, cache = schedule.num_cols * itemsize, _l2_cache(schedule.col.device)
    return columns * column <= cache or _TILE * column > cache


@lru_cache
def _l2_cache(device: torch.device) -> int:
    if device.type != 'cuda':
        return _L2_CACHE
    return getattr(torch.cuda.get_device_properties(device), 'L2_cache_size', _L2_CACHE)


def most_programs(program: Program, outs: Sequence[Out], source: Source) -> int | None:
    """The limit of programs of a tile, if each holds parameters or sums over all edges."""
    if not (source.holds or source.totals):
        return None
    size = sum(math.prod(program[out.at].shape) for out in outs if out.kind == 'total')
    return min(_MAX_PROGRAMS, max(64, _MAX_TOTALS // max(1, size)))


def _count_programs(most: int | None, num_rows: int, num_edges: int) -> int:
    """How many programs of a tile take rows."""
    if most is not None:
        return min(num_rows, most)
    several = num_edges <= _FEW_EDGES * num_rows and num_rows >= _MANY_ROWS
    return -(-num_rows // _ROWS_OF_FEW) if several else num_rows


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one."""
    if device.index == torch._C._cuda_getDevice():  # Sooner than `torch.cuda.current_device`.
        return _HERE
    return torch.cuda.device(device)


class _Grid(NamedTuple):
    """The programs of a tile, and what they take."""

    units: int  # rows, or groups of a prepared graph
    of_units: int  # programs that take units
    of_pieces: int  # programs that take pieces of long rows
    lanes: int  # slots that one of these looks at
    slots: int | None  # partial results; None: no kernel takes them


class _Buffers(NamedTuple):
    """Results, and by number partial results of long rows; second ones of kinds that have two."""

    outs: list[Tensor]
    seconds: list[Tensor | None]
    parts: dict[int, Tensor]
    second_parts: dict[int, Tensor]


def run_pass_cuda(
    pass_: 'Pass', schedule: Schedule, inputs: Inputs, acc: torch.dtype, seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of a pass, and the second ones of kinds that have two."""
    rowptr, col, perm, num_rows, groups, most, _ = schedule
    num_edges = col.size(0)
    recipe, pieces = pass_.recipe(acc), divide_rows(num_edges, num_rows, groups, most)
    itemsize = 2 if recipe.source.half else acc.itemsize
    while recipe.wide is not None:
        if not _in_wide_tiles(schedule, itemsize, math.prod(recipe.wide.tile.columns)):
            break
        recipe = recipe.wide
    grid = _grid_of(recipe, pieces, num_rows, num_edges)
    buffers = _allocate(pass_, recipe, schedule, grid, acc)
    outs, seconds = buffers.outs, buffers.seconds
    if num_rows == 0:
        return outs, seconds
    owners = _launch_pass(recipe, schedule, pieces, grid, buffers, inputs, seed)
    if buffers.parts and grid.slots:
        _combine(pass_, pieces, buffers, owners, rowptr, acc)
    if perm is not None and num_edges > 0:  # Positions become numbers of edges.
        seconds = [
            torch.where(arg < 0, -1, perm[arg.clamp(min=0).long()])
            if arg is not None and out.kind in ('max', 'min')
            else arg
            for arg, out in zip(seconds, pass_.outs, strict=True)
        ]
    return outs, seconds


def _grid_of(recipe: Recipe, pieces: Pieces | Groups, num_rows: int, num_edges: int) -> _Grid:
    units, of_pieces, lanes, slots = num_rows, 0, 0, None
    if isinstance(pieces, Groups):
        units, slots = pieces.row.size(0), pieces.num_partials
    elif pieces.num_blocks:
        of_pieces, lanes = pieces.programs(recipe.most_programs)
        slots = 2 * pieces.num_blocks
    of_units = _count_programs(recipe.most_programs, units, num_edges)
    return _Grid(units, of_units, of_pieces, lanes, slots)


def _allocate(
    pass_: 'Pass', recipe: Recipe, schedule: Schedule, grid: _Grid, acc: torch.dtype
) -> _Buffers:
    buffers, device = _Buffers([], [], {}, {}), schedule.col.device
    for k, (out, shape, dtype) in enumerate(
        zip(pass_.outs, recipe.shapes, recipe.dtypes, strict=True)
    ):
        has_two, rows = out.kind in TWO_RESULTS, schedule.num_rows
        second = schedule.rowptr.dtype if out.kind in ('max', 'min') else acc
        if out.kind == 'edge':
            rows = schedule.col.size(0)
        elif out.kind == 'total':
            rows = grid.of_units + grid.of_pieces
        elif grid.slots is not None:
            of_part = (grid.slots, *shape)
            buffers.parts[k] = torch.empty(of_part, dtype=acc, device=device)
            if has_two:
                buffers.second_parts[k] = torch.empty(of_part, dtype=second, device=device)
        of_rows = (rows, *shape)
        buffers.outs.append(torch.empty(of_rows, dtype=dtype, device=device))
        buffers.seconds.append(
            torch.empty(of_rows, dtype=second, device=device) if has_two else None
        )
    return buffers


def _launch_pass(
    recipe: Recipe, schedule: Schedule, pieces: Pieces | Groups, grid: _Grid, buffers: _Buffers,
    inputs: Inputs, seed: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Launches the kernels of rows, pieces or groups. Returns what says which rows are long."""
    (rowptr, col, perm, num_rows), source, tile = schedule[:4], recipe.source, recipe.tile
    loads = [
        inputs[load] if load in inputs else _joined_statistics(inputs, load)
        for load in source.loads
    ]  # fmt: skip
    results = [*buffers.outs, *[x for x in buffers.seconds if x is not None]]
    partials = [*buffers.parts.values(), *buffers.second_parts.values()]
    nodes = [inputs[load] for load in recipe.nodes]
    steps = [x.stride(0) for x in nodes]
    offsets = offset_dtype(col, nodes, steps, [*loads, *buffers.outs, *buffers.parts.values()])
    rows = [inputs[load].size(0) for load in recipe.tables] if recipe.tables else []
    constants = perm is not None, offsets, tile.stages, tile.edges, *tile.columns, *steps, *rows
    edges = [col, rowptr if perm is None else perm]
    last = rowptr if seed is None else seed

    def launch(
        text: str, programs: int, tensors: list[Tensor], *numbers: int, lanes: int = 0
    ) -> None:
        launch_kernel(
            text, source.name, tile.warps, programs * recipe.num_tiles, [*tensors, last], numbers,
            (lanes, *constants) if lanes else constants,
        )  # fmt: skip

    if isinstance(pieces, Groups):
        tensors = [pieces.ptr, *edges, pieces.row, pieces.long_row, pieces.long_shift, *loads]
        tensors += results + partials
        launch(source.of_groups, grid.of_units, tensors, grid.units, grid.of_units)
        return [pieces.long_row, pieces.long_ptr]
    owner, sizes = rowptr.new_empty(grid.slots) if grid.slots else rowptr, pieces[:2]
    tensors = [rowptr, *edges, owner, *loads, *results]
    programs, before = grid.of_pieces, grid.of_units
    if pieces.together:
        _write_owners(rowptr, owner, num_rows, *sizes)
        programs, before = programs + before, 0
    else:
        launch(source.text, grid.of_units, tensors, num_rows, grid.of_units, *sizes)
    if grid.of_pieces:
        numbers = num_rows, programs, *sizes, grid.of_pieces, pieces.num_blocks, before
        launch(source.divides, programs, tensors + partials, *numbers, lanes=grid.lanes)
    return [owner]


def _write_owners(rowptr: Tensor, owner: Tensor, num_rows: int, size: int, longest: int) -> None:
    programs = -(-num_rows // ROWS_OF_OWNERS)
    numbers = num_rows, size, longest
    launch_kernel(
        WRITE_OWNERS, 'message_owners', WARPS_OF_OWNERS, programs, [rowptr, owner], numbers, ()
    )


def _joined_statistics(inputs: Inputs, load: Load) -> Tensor:
    """The statistics of a softmax side by side."""
    _, n = load
    # A pass that does not read `dot` gets any tensor in its place.
    return torch.stack([inputs.get((each, n), inputs['most', n]) for each in SOFTMAX_ROLES], -1)


def offset_dtype(
    col: Tensor, nodes: list[Tensor], steps: list[int], tensors: list[Tensor]
) -> 'tl.dtype':
    """The integers of offsets: those of 32 bits are faster. `steps` are those of rows of nodes."""
    import triton.language as tl

    of_nodes = [x.size(0) * step for x, step in zip(nodes, steps, strict=True)]
    widest = max([col.size(0), *of_nodes, *map(Tensor.numel, tensors)])
    return tl.int32 if widest < 2**31 else tl.int64


def _combine(
    pass_: 'Pass', pieces: Pieces | Groups, buffers: _Buffers, owners: list[Tensor],
    rowptr: Tensor, acc: torch.dtype,
) -> None:  # fmt: skip
    """Combines the partial results of the long rows."""
    import triton.language as tl

    pointers: list[Tensor] = []
    for k, part in buffers.parts.items():
        pointers += [part, buffers.outs[k]]
        second = buffers.seconds[k]
        if second is not None:
            pointers += [buffers.second_parts[k], second]
    sizes = [math.prod(part.shape[1:]) for part in buffers.parts.values()]
    numbers: tuple[int, ...]
    if isinstance(pieces, Groups):
        numbers = pieces.long_row.size(0), pieces.size
    else:
        numbers = pieces.num_blocks, rowptr.numel() - 1, pieces.size, pieces.longest
    kinds = tuple(pass_.outs[k].kind for k in buffers.parts)
    for form, programs, tiles in combine_launches(pieces, sizes):
        launch_kernel(
            combine_kernel(kinds, form), 'message_combine', form.warps, programs * tiles,
            [*pointers, *owners, rowptr], (programs, *numbers, *sizes),
            (tl.float64 if acc == torch.float64 else tl.float32,),
        )  # fmt: skip


def dot_of_results(
    most: Tensor, scale: Tensor, grads: Sequence[Tensor], results: Sequence[Tensor],
    acc: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sum of the results of each row times their gradients, and the three statistics of its
    softmax side by side."""
    import triton.language as tl

    count = most.numel()
    sizes = [each.numel() // count for each in results]
    block, columns = statistics_blocks(sizes)
    dot = torch.empty_like(most)
    stats = most.new_empty(*most.shape, len(SOFTMAX_ROLES))
    pairs = [each for pair in zip(grads, results, strict=True) for each in pair]
    with on_device(most.device):
        launch_kernel(
            statistics_kernel(len(results)), 'message_statistics', 4, -(-count // block),
            [most, scale, *pairs, dot, stats], (count,),
            (block, tl.float64 if acc == torch.float64 else tl.float32,
             *(each for pair in zip(sizes, columns, strict=True) for each in pair)),
        )  # fmt: skip
    return dot, stats
