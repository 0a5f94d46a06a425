"""Runs the passes over tiles of edges on a GPU."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops.column_sums import column_sums
from ..sparse.graph import Graph
from ..sparse.to_csr import csr_rows
from . import _cuda
from ._ir import NODES, Inputs
from ._tile_texts import EDGES, PLAN, PLANNED, combine_text
from ._tile_values import Factor
from ._tiles import RESERVED, Form, TileSource, shared_memory

if TYPE_CHECKING:
    from ._passes import Pass

# Kernels count edges in int32, and the parts of rows behind the rows.
_MAX_EDGES, _MAX_PLACES = 2**31 - 2**16, 2**31 - 2
# Factors of gradients of matrices are stored for so many edges at once, at most, and at least; and
# in so many bytes, between these.
_MOST_EDGES, _LEAST_EDGES, _FACTOR_BYTES = 2**18, 2**16, 2**28


def takes(graph: Graph) -> bool:
    """Whether tiles may run on a graph: other ones run over blocks of edges."""
    places = graph.num_dst + 2 * (graph.num_edges // EDGES + 1)
    return graph.col.is_cuda and graph.num_edges <= _MAX_EDGES and places <= _MAX_PLACES


def run_pass_tiles(
    pass_: 'Pass', graph: Graph, inputs: Inputs, seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of a pass over destinations, and the chosen edges of maxima and minima."""
    source = pass_.tiles(matmul_precision(pass_))
    has_nodes = graph.num_src > 0 and graph.num_dst > 0  # Kernels read the first of either.
    num_tiles = -(-graph.num_edges // EDGES) if has_nodes else 0
    most = processors(graph.col.device) * max([form.per_processor for form in source.forms])
    buffers = _allocate(pass_, source, graph, num_tiles, max(1, min(num_tiles, most)))
    outs = buffers.outs
    if num_tiles:
        _launch_tiles(pass_, source, graph, inputs, seed, num_tiles, buffers)
    if buffers.totals is not None:
        sums = column_sums(buffers.totals)
        for k, first in source.totals.items():
            shape = pass_.shapes[k]
            outs[k] = sums[first : first + math.prod(shape)].view(1, *shape)
    for k, out in enumerate(pass_.outs):
        if out.kind == 'mean':
            degree = graph.rowptr.diff().clamp(min=1)
            outs[k] /= degree.view(-1, *(1,) * (outs[k].dim() - 1))
    perm = graph.perm
    chosen: list[Tensor | None] = [None] * len(outs)
    for k, arg in buffers.seconds.items():
        if perm is not None and num_tiles:  # Positions become numbers of edges.
            arg = torch.where(arg < 0, -1, perm[arg.clamp(min=0).long()])
        chosen[k] = arg
    return outs, chosen


def _launch_tiles(
    pass_: 'Pass', source: TileSource, graph: Graph, inputs: Inputs, seed: Tensor | None,
    num_tiles: int, buffers: '_Buffers',
) -> None:  # fmt: skip
    """Launches the kernel of the tiles, and those that combine what several tiles have of rows."""
    outs, seconds, parts, second_parts = buffers[:4]
    num_edges, device = graph.num_edges, graph.col.device
    loads = [inputs[load] for load in source.loads]
    step = _tiles_at_once(source.factors, num_tiles, buffers.num_programs)
    factors = [
        torch.empty(
            buffers.num_programs * EDGES if each.is_local else min(step * EDGES, num_edges),
            each.stored, dtype=getattr(torch, each.dtype), device=device,
        )
        for each in source.factors
    ]  # fmt: skip
    written = [out for k, out in enumerate(outs) if k not in source.pairs]
    tensors = [
        *loads, *factors, *written, *seconds.values(), *parts.values(), *second_parts.values(),
        graph.rowptr if seed is None else seed,
    ]  # fmt: skip
    nodes = [inputs[load] for load in source.loads if load[0] in NODES]
    steps = [x.stride(0) for x in nodes]
    offset = _cuda.offset_dtype(graph.col, nodes, steps, tensors)
    row_of = csr_rows(graph.rowptr, 0, num_edges)
    rank_of = place_of = row_of
    if parts:
        rank_of, place_of = _plan_tiles(graph, row_of, num_tiles)
    perm = graph.col if graph.perm is None else graph.perm
    sizes = num_edges, graph.num_dst
    tensors = [row_of, graph.col, perm, rank_of, place_of, *tensors]
    flags = graph.perm is not None, offset
    form = _choose_form(source, tensors, (*sizes, 0, num_tiles, 1), flags, steps)
    constants = _constants(flags, form, steps)
    most = min(buffers.num_programs, processors(device) * form.per_processor)
    for first in range(0, num_tiles, step):
        end = min(first + step, num_tiles)
        num_programs = min(most, end - first)
        _cuda.launch_kernel(
            source.text, 'message_tiles', form.warps, num_programs, tensors,
            (*sizes, first, end, num_programs), constants, form.registers,
        )  # fmt: skip
        if not source.pairs:
            continue
        count = min(end * EDGES, num_edges) - first * EDGES
        stored = [
            x[:count, : each.size] for x, each in zip(factors, source.factors, strict=True)
        ]  # fmt: skip
        for k, pairs in source.pairs.items():
            for n, (left, right) in enumerate(pairs):
                _add_product(outs[k][0], stored[left], stored[right], first == n == 0)
    for k, part in parts.items():
        text = combine_text(pass_.outs[k].kind, math.prod(part.shape[1:]))
        second = [seconds[k], second_parts[k]] if k in seconds else []
        _cuda.launch_kernel(
            text, 'combine_tiles', 1, num_tiles, [graph.rowptr, row_of, outs[k], part, *second],
            sizes, (offset,),
        )  # fmt: skip


def _choose_form(
    source: TileSource, tensors: list[Tensor], numbers: tuple[int, ...],
    flags: tuple[object, ...], steps: Sequence[int],
) -> Form:  # fmt: skip
    """The first form whose registers hold the values of a tile, but for few, and whose programs fit
    into shared memory; else the last one."""
    chosen, key = _chosen_forms(source.text), (tensors[0].device, flags)
    if key not in chosen:
        _cuda.check_not_capturing()
        *others, last = source.forms
        chosen[key] = next((
            form for form in others
            if _fits(source.text, form, tensors, numbers, _constants(flags, form, steps))
        ), last)  # fmt: skip
    return chosen[key]


def _fits(
    text: str, form: Form, tensors: list[Tensor], numbers: tuple[int, ...],
    constants: tuple[object, ...],
) -> bool:  # fmt: skip
    """Whether registers and shared memory hold what the programs of a form need."""
    try:
        kernel = _cuda.compiled_kernel(
            text, 'message_tiles', form.warps, tensors, numbers, constants, form.registers
        )
    except RuntimeError:  # Triton's passes fail on it.
        return False
    shared = form.per_processor * (kernel.metadata.shared + RESERVED)
    return kernel.n_spills <= form.spills and shared <= shared_memory() + RESERVED


def _constants(
    flags: tuple[object, ...], form: Form, steps: Sequence[int]
) -> tuple[object, ...]:  # fmt: skip
    return (*flags, form.stages, *steps)


@lru_cache(maxsize=1024)
def _chosen_forms(text: str) -> dict[tuple[torch.device, tuple[object, ...]], Form]:
    """The form of a source on each GPU, by what else its code depends on."""
    return {}


def _tiles_at_once(factors: Sequence[Factor], num_tiles: int, num_programs: int) -> int:
    """The tiles of a launch: all, if it stores nothing for a product."""
    width = sum(
        each.stored * getattr(torch, each.dtype).itemsize for each in factors if not each.is_local
    )
    if width == 0:
        return num_tiles
    most = max(_LEAST_EDGES, min(_MOST_EDGES, _FACTOR_BYTES // width)) // EDGES
    # Whole rounds of all programs, as many in each launch: none waits for others at the end.
    rounds, most_rounds = -(-num_tiles // num_programs), max(1, most // num_programs)
    num_launches = -(-rounds // most_rounds)
    return min(num_tiles, -(-rounds // num_launches) * num_programs)


def _add_product(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Adds the sum of outer products of two factors, or begins with it."""
    if left.dtype == torch.float32:
        total.addmm_(left.t(), right, beta=0 if is_first else 1)
    elif is_first:
        total.copy_(product_of_halves(left.t(), right))
    else:
        total += product_of_halves(left.t(), right)


def product_of_halves(one: Tensor, two: Tensor) -> Tensor:
    """The product of matrices of half types, which it does not round to these."""
    return torch.mm(one, two, out_dtype=torch.float32)


def _plan_tiles(graph: Graph, row_of: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
    """What :data:`PLAN` computes."""
    rank_of, place_of = torch.empty_like(row_of), row_of.new_empty(num_tiles * EDGES)
    _cuda.launch_kernel(
        PLAN, 'plan_tiles', PLANNED, -(-num_tiles // PLANNED), [row_of, rank_of, place_of],
        (graph.num_edges, graph.num_dst), (),
    )  # fmt: skip
    return rank_of, place_of


@lru_cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def matmul_precision(pass_: 'Pass') -> str:
    """How products of float32 are computed, by torch's setting; those that a maximum compares, or
    chose, always as exactly as float32 does."""
    return 'high' if not pass_.compares and may_round() else 'highest'


def may_round() -> bool:
    """Whether torch rounds products of float32 to TF32."""
    try:
        return torch.get_float32_matmul_precision() != 'highest'
    except RuntimeError:  # Newer settings are in use.
        return torch.backends.cuda.matmul.fp32_precision == 'tf32'


class _Buffers(NamedTuple):
    """Results, and by their numbers the parts of rows in tiles; second ones of kinds that have
    two."""

    outs: list[Tensor]
    seconds: dict[int, Tensor]
    parts: dict[int, Tensor]
    second_parts: dict[int, Tensor]
    num_programs: int
    totals: Tensor | None  # a row of each program


def _allocate(
    pass_: 'Pass', source: TileSource, graph: Graph, num_tiles: int, num_programs: int
) -> _Buffers:
    device, places = graph.col.device, graph.rowptr.dtype
    width, totals = source.total_width, None
    if width:
        totals = torch.zeros(num_programs, width, dtype=torch.float32, device=device)
    out = _Buffers([], {}, {}, {}, num_programs, totals)
    for k, ((_, kind, name), shape) in enumerate(zip(pass_.outs, pass_.shapes, strict=True)):
        dtype = torch.float32 if name == 'acc' else getattr(torch, name)
        if kind == 'total' and k in source.pairs:
            start = torch.empty if num_tiles else torch.zeros
            out.outs.append(start(1, *shape, dtype=torch.float32, device=device))
            continue
        if totals is not None and kind == 'total':
            out.outs.append(totals[:, source.totals[k] :])
            continue
        if kind == 'edge':
            out.outs.append(torch.empty(graph.num_edges, *shape, dtype=dtype, device=device))
            continue
        dtype = torch.float32 if kind == 'mean' else dtype
        # Kernels write the rows that have edges.
        start = torch.empty if graph.full[0] else torch.zeros
        out.outs.append(start(graph.num_dst, *shape, dtype=dtype, device=device))
        out.parts[k] = torch.empty(2 * num_tiles, *shape, dtype=torch.float32, device=device)
        if kind in ('max', 'min'):
            out.seconds[k] = torch.full(out.outs[-1].shape, -1, dtype=places, device=device)
            out.second_parts[k] = torch.empty(out.parts[k].shape, dtype=places, device=device)
    return out
