"""The passes of a plan on a CPU: csrc/cpu/message.isa.cpp interprets instructions, each for a tile
of edges at once."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..ops._library import fake, ops
from ..sparse.graph import Graph
from ._encoder import MAX_DIMS, Encoder, storage_layout
from ._instructions import CpuCode, Instruction, Slot
from ._ir import BINARY, DST_ROLES, POINTWISE, UNARY, Inputs, Load, Program, Refused
from ._triton import Out

if TYPE_CHECKING:
    from ._passes import Pass

# In the order of MessageOp in csrc/params/message.h.
_OPS_IN_ORDER = (
    'copy', *UNARY, *BINARY, 'where', 'fma', 'load', 'picked', 'keep', 'sum', 'amax', 'amin',
    'dot', 'product', 'row_sum', 'row_mean', 'row_max', 'row_min', 'to_edge', 'row_product',
    'row_softmax',
)  # fmt: skip
_OPCODES = {name: k for k, name in enumerate(_OPS_IN_ORDER)}
_KINDS = {
    'sum': 0, 'mean': 0, 'weighted': 0, 'edge': 1, 'total': 2, 'max': 3, 'min': 3, 'softmax': 4,
}  # fmt: skip
_ROW_INDICES = {'param': 0, 'row': 1, 'col': 2, 'edge': 3}
# Columns of a chunk, and numbers of a tile: they stay in the L1 cache.
_CHUNK = 64
_TILE_SIZE = 8192
# Of a tile with matrix products, each of which reads a whole matrix: they stay in the L2 cache.
_MAP_TILE_SIZE = 2**16
# Rows are divided into shares, whose sums over all edges are added up: by the size of the graph
# alone, so that results have the same bits for any number of threads (of which most divide 120). A
# share has a least number of edges, and as many numbers of all edges as torch gives a thread.
_MAX_SHARES, _MIN_EDGES, _GRAIN = 120, 512, 2**15
_MAX_EDGES = 126


@fake('message_pass')
def _message_pass() -> None:
    return None


def _chunk_program(program: Program, outs: list[int], width: int) -> tuple[Program, list[int]]:
    """The program for `width` columns, of values that have all columns or one."""
    new = Program()
    places: dict[int, int] = {}
    for at in program.reachable(outs):
        op, args, attrs, shape, dtype = program[at]
        inner = [places[arg] for arg in args]
        own = (1,) if math.prod(shape) == 1 else (width,)
        if op in ('view', 'cast', 'detach'):
            places[at] = inner[0]
        elif op == 'expand':
            places[at] = new.expand(inner[0], own)
        elif op == 'const':
            places[at] = new.add(op, (), attrs, own, dtype, 0)
        else:
            places[at] = new.add(op, inner, attrs, own, dtype, program.dependence(at))
    return new, [places[at] for at in outs]


_BY_COLUMN = ('const', 'load', 'keep', 'view', 'expand', 'cast', 'detach')


def _chunkable_width(program: Program, outs: list[int]) -> int:
    """The columns of a program that computes each of them by itself; 0 if it does not."""
    order = program.reachable(outs)
    whole = max(math.prod(program[at].shape) for at in order)
    for at in order:
        op, _, _, shape, _ = program[at]
        if math.prod(shape) not in (1, whole):
            return 0
        if op not in POINTWISE and op not in _BY_COLUMN:
            return 0
    return whole


def _allocate_slots(instructions: list[Instruction], edges: int) -> int:
    """Places the slots of some edges in scratch memory, where lifetimes do not overlap also over
    one another; returns its size. Slots begin with cache lines, and their ends have a line between:
    a load waits for a store at a distance of 4096 bytes."""
    slots: dict[Slot, int] = {}  # with the first instruction
    for k, one in enumerate(instructions):
        for ref, _ in one.operands:
            if isinstance(ref.space, Slot) and not ref.space.uniform:
                slots.setdefault(ref.space, k)
                ref.space.last = k
    live: list[Slot] = []
    size = 0
    for slot, begin in slots.items():
        live = [other for other in live if other.last >= begin]
        place = 0
        for other in sorted(live, key=lambda o: o.place):
            if place + _padded(slot.width * edges) <= other.place:
                break
            place = max(place, other.place + _padded(other.width * edges))
        slot.place = place
        live.append(slot)
        size = max(size, place + _padded(slot.width * edges))
    return size


def _padded(count: int) -> int:
    """Whole cache lines of float32 for so many numbers, and one more."""
    return -(-count // 16) * 16 + 16


def check_maps(program: Program, outs: Sequence[Out], acc: torch.dtype) -> None:
    """Raises :class:`Refused` if no instructions compute the results of a message with linear maps
    of values computed for each edge."""
    order = [program[at] for at in program.reachable(out.at for out in outs)]
    if any(out.kind in ('var', 'softmax', 'weighted') for out in outs):
        raise Refused('a variance of values that a linear map computed')
    dtypes = {(value.attrs[0], value.attrs[1]): acc for value in order if value.op == 'load'}
    encode(program, outs, 'dst', acc, dtypes)


def encode(
    program: Program, outs: Sequence[Out], row_role: str, acc: torch.dtype,
    dtypes: dict[Load, torch.dtype],
) -> CpuCode:  # fmt: skip
    """The instructions of a pass, for inputs of these dtypes.

    Raises:
        Refused: If no instruction computes a value.
    """
    inputs: list[Load] = []
    numbers: list[float] = []
    sections = _encode_sections(program, outs, acc, dtypes, inputs, numbers)
    bodies = [section.encoder.body for section in sections]
    most = max(1, *(_allocate_slots(body, 16) // 16 for body in bodies))
    first = sections[0].encoder.first
    uniform = len(numbers)
    for instruction in first:
        slot = instruction.operands[0][0].space
        if isinstance(slot, Slot) and slot.place < 0:
            slot.place = uniform
            uniform += slot.width
    size = _TILE_SIZE
    if any(value.op in ('mm', 'outer') for value in program.values):
        size = _MAP_TILE_SIZE
    edges = max(1, min(_MAX_EDGES, size // most))
    tile_size = max(1, *(_allocate_slots(body, edges) for body in bodies))
    words = [edges, tile_size, uniform, 1 + len(sections)]
    parts = [(0, 0, 1, first)]
    parts += [(each.start, each.step, each.repeats, each.encoder.body) for each in sections]
    for start, step, repeats, instructions in parts:
        words += [start, step, repeats, len(instructions)]
        for instruction in instructions:
            words += _encode_instruction(instruction, len(inputs))
    results = []
    for out in outs:
        shape, order = storage_layout(program, out.at, out.kind)
        turned = None if order == tuple(range(len(shape))) else (0, *(d + 1 for d in order))
        dtype = acc if out.dtype == 'acc' else getattr(torch, out.dtype)
        results.append((out.kind, shape, turned, dtype))
    return CpuCode(
        torch.tensor(words), torch.tensor(numbers, dtype=torch.float64), tuple(inputs),
        tuple(_ROW_INDICES[_row_index_of(role, row_role)] for role, _ in inputs),
        tuple(results), tuple(_KINDS[out.kind] for out in outs),
        max(math.prod(shape) for _, shape, _, _ in results), acc == torch.float64,
    )  # fmt: skip


class _Section(NamedTuple):
    """Instructions for `repeats` chunks of columns, `step` from one to the next."""

    start: int
    step: int
    repeats: int
    encoder: Encoder


def _encode_sections(
    program: Program, results: Sequence[Out], acc: torch.dtype,
    dtypes: dict[Load, torch.dtype], inputs: list[Load], numbers: list[float],
) -> list[_Section]:  # fmt: skip
    """All columns, or chunks of them and a rest. Adds to `inputs` and `numbers` what they use."""
    ats = [out.at for out in results]
    whole = _chunkable_width(program, ats)
    # A softmax of fewer scores would be computed again for each chunk.
    cut = whole > _CHUNK and all(
        math.prod(program[out.at].shape) == whole for out in results if out.kind == 'softmax'
    )
    # Avoid width-1 chunks: indistinguishable from a broadcast.
    step = next(n for n in range(_CHUNK, 1, -1) if not cut or whole % n != 1)
    parts = [(0, whole // step if cut else 1, step)]
    if cut and whole % step:
        parts.append((whole - whole % step, 1, whole % step))
    sections = []
    for start, repeats, width in parts:
        own, places = _chunk_program(program, ats, width) if cut else (program, ats)
        kinds = [out.kind for out in results]
        outs = list(zip(places, kinds, range(len(kinds)), strict=True))
        encoder = Encoder(own, outs, acc, inputs, dtypes, numbers, cut)
        encoder.run()
        sections.append(_Section(start, step, repeats, encoder))
    return sections


def _row_index_of(role: str, row_role: str) -> str:
    """By what a row of an input is found: the row of the pass, `col`, the edge, or nothing."""
    own = 'dst' if role in DST_ROLES else role
    return own if own in ('param', 'edge') else 'row' if own == row_role else 'col'


def _encode_instruction(one: Instruction, num_inputs: int) -> list[int]:
    """An instruction as MessageInstruction of csrc/params/message.h."""
    pad = MAX_DIMS - len(one.sizes)
    words = [_OPCODES[one.op], len(one.sizes), *one.sizes, *[1] * pad, one.edge_dim]
    operands = [*one.operands]
    for ref, strides in operands:
        space, place = 1, 0
        if isinstance(ref.space, Slot):
            space = 1 if ref.space.uniform else 0
            place = ref.space.place
        elif isinstance(ref.space, tuple):
            what, k = ref.space
            space = 2 + k if what == 'input' else 2 + num_inputs + k
        words += [space, place + ref.offset, int(ref.column), *strides, *[0] * pad]
    words += [0] * (9 * (4 - len(operands)))
    return words + [*one.extra, *[0] * (4 - len(one.extra))]


def run_pass_cpu(
    pass_: 'Pass', graph: Graph, inputs: Inputs, acc_dtype: torch.dtype, seed: Tensor | None
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results of a pass, and the second ones of kinds that have two.

    A result of kind `total` has a leading dimension of partial sums.
    """
    if pass_.row_role == 'src':
        graph = graph.t()
    code = pass_.code_for(acc_dtype, inputs)
    num_edges = graph.col.size(0)
    most = min(_MAX_SHARES, num_edges // _MIN_EDGES, num_edges * code.widest // _GRAIN)
    shares = max(1, most)
    rows = {'edge': num_edges, 'total': shares}
    stored: list[Tensor] = []
    args: list[Tensor] = []
    outs: list[Tensor] = []
    chosen: list[Tensor | None] = []
    for kind, shape, order, dtype in code.results:
        lead = rows.get(kind, graph.num_dst)
        out = torch.empty((lead, *shape), dtype=dtype)
        stored.append(out)
        outs.append(out if order is None else out.permute(order))
        if kind in ('max', 'min', 'softmax'):
            second = dtype if kind == 'softmax' else graph.rowptr.dtype
            args.append(torch.empty((lead, *shape), dtype=second))
            chosen.append(args[-1])
        else:
            chosen.append(None)
    ops.message_pass.default(
        graph.rowptr, graph.col, graph.perm, graph.num_src, code.code, code.numbers,
        [inputs[key] for key in code.loads], code.row_indices, stored, code.kinds, args, seed,
        code.wide, shares,
    )  # fmt: skip
    return outs, chosen
