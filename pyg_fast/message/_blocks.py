"""Messages over blocks of edges, for those that no kernel computes: they map values of an edge
linearly. Torch's operators run on one block after another in the order of the destinations, and
again in the backward pass; no value of all edges is stored.

A program computes the values of one edge from inputs of that edge, its ends and parameters: the
parser refuses everything else. Its values for a block are therefore those for all edges.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops._library import ops
from ..ops.product import raw_product
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ..sparse.to_csr import csr_rows
from ._gradients import cotangents_of
from ._ir import NODES, OF_DST, PARAM, Program, Value
from ._plan import Plan
from ._triton import Out

# What the values of a block may take, with their gradients: bytes, or a share of a GPU's memory,
# where each of about 90 launches needs much work to be worth it.
MOST_BYTES = {'cpu': 2**26}
GPU_SHARE = 1 / 8
# Sums of more edges of a row add up such parts.
_PART = 256

# Odd numbers modulo 2**64: of SplitMix64, and one for the number of a dropout.
_GOLDEN, _ODD = -0x61C8864680B583EB, 0x2545F4914F6CDD1D

Inputs = dict[tuple[str, int], Tensor]


class _Rows(NamedTuple):
    """How the rows of a block's values are added up: first those of each part of a row, then the
    parts. `rows` are the numbers of the rows. On CUDA their count is not known: what follows the
    last one is empty, and goes to a row after all others."""

    parts: Graph
    wholes: Graph
    rows: Tensor

    def total(self, x: Tensor) -> Tensor:
        """The sums, in float32 or float64."""
        for graph in (self.parts, self.wholes):
            x = raw_product(SparseOperator(graph), x, out_acc=True)
        return x

    def best(self, x: Tensor, minimum: bool) -> tuple[Tensor, Tensor]:
        """The maxima or minima, and which values of the block these are."""
        x, first = ops.spmm_max(*self.parts[:3], None, x, minimum)
        x, second = ops.spmm_max(*self.wholes[:3], None, x, minimum)
        return x, first.gather(0, second.clamp(min=0).long())


class _Block(NamedTuple):
    """Consecutive edges in the order of the destinations."""

    src: Tensor
    dst: Tensor
    row: Tensor  # `dst`, or the number of destinations for an edge that was out of range
    edge: Tensor  # numbers of the edges, in the order of their inputs

    def inputs(self, program: Program, ats: Sequence[int], inputs: Inputs) -> dict[int, Tensor]:
        """The rows of inputs that values need and factors of dropouts, by their place in the
        program."""
        out = {}
        for at in program.reachable(ats):
            if program[at].op == 'load':
                role, k = program[at].attrs
                out[at] = self.of(role, inputs[role, k])
            elif program[at].op == 'keep':
                out[at] = kept(program[at], self.edge, inputs['seed', 0])
        return out

    def of(self, role: str, x: Tensor) -> Tensor:
        """The rows of an input."""
        if role == 'param':
            return x
        index = {'edge': self.edge, 'src': self.src}.get(role, self.dst)
        return x.index_select(0, index)


def kept(value: Value, edge: Tensor, seed: Tensor) -> Tensor:
    """The factors of a dropout for edges, which another pass finds again: by a hash of the seed,
    the edge and the place (SplitMix64, https://doi.org/10.1145/2714064.2660195)."""
    number, p = value.attrs[0], float.fromhex(value.attrs[1])
    size = math.prod(value.shape)
    place = torch.arange(size, device=edge.device)
    bits = edge.long().view(-1, 1) * size + place
    bits = bits * _GOLDEN + (seed + ((number * _ODD + 2**63) % 2**64 - 2**63))
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        bits ^= (bits >> shift) & (2 ** (64 - shift) - 1)
        bits *= factor
    bits ^= (bits >> 31) & (2**33 - 1)
    dropped = (bits & (2**53 - 1)) < int(p * 2**53)
    scale = 1 / (1 - p) if p < 1 else 0.0
    factors = torch.full(bits.shape, scale, dtype=getattr(torch, value.dtype), device=edge.device)
    return factors.masked_fill_(dropped, 0).view(-1, *value.shape)


def _blocks(graph: Graph, size: int) -> Iterator[_Block]:
    dtype, device = graph.rowptr.dtype, graph.col.device
    for begin in range(0, graph.num_edges, size):
        end = min(begin + size, graph.num_edges)
        row = csr_rows(graph.rowptr, begin, end)
        edge = None if graph.perm is None else graph.perm[begin:end]
        if edge is None:
            edge = torch.arange(begin, end, dtype=dtype, device=device)
        yield _Block(graph.col[begin:end], row.clamp(max=graph.num_dst - 1), row, edge)


def _bytes_of_edge(program: Program, ats: Sequence[int]) -> int:
    """What values of a program and their gradients take for an edge."""
    size = 0
    for at in program.reachable(ats):
        op, _, _, shape, dtype = program[at]
        if op != 'const' and program.level(at) != PARAM:
            bits = 24 if op == 'keep' else 0  # Integers that make the factors.
            size += math.prod(shape) * (getattr(torch, dtype).itemsize + bits)
    return 2 * size


def block_size(program: Program, ats: Sequence[int], device: torch.device) -> int:
    """How many edges a block has to compute values of a program and their gradients."""
    most = MOST_BYTES.get(device.type)
    if most is None:
        most = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, most // _bytes_of_edge(program, ats))


def _rows_of(row: Tensor, num_rows: int, order: Tensor | None = None) -> _Rows:
    """Those of values whose rows ascend, or do in an order of the values."""
    count = row.size(0)
    place = torch.arange(count + 2, dtype=torch.int32, device=row.device)
    starts = pad(row[1:] != row[:-1], (1, 0), value=True)
    # The numbers of the whole and of the part that each value belongs to, from 1.
    whole = starts.cumsum(0, dtype=torch.int32)
    part = starts.logical_or_(place[:count] % _PART == 0).cumsum(0, dtype=torch.int32)
    if _waits(row):
        num_wholes, num_parts = int(whole[-1]), int(part[-1])
    else:
        num_wholes = min(count, num_rows + 1)
        num_parts = min(count, num_wholes + count // _PART + 1)
    first_of_part = torch.searchsorted(part, place[1 : num_parts + 2], out_int32=True)
    first = torch.searchsorted(whole, place[1 : num_wholes + 2], out_int32=True)
    part_of = torch.searchsorted(first_of_part, first, out_int32=True)
    rows = pad(row, (0, 1), value=num_rows).index_select(0, first[:-1])
    columns = place[:count] if order is None else order.int()
    return _Rows(
        _structure(first_of_part, columns), _structure(part_of, place[:num_parts]), rows.long()
    )


def _waits(row: Tensor) -> bool:
    """Whether the numbers of wholes and parts may be read."""
    return not row.is_cuda


def _structure(rowptr: Tensor, col: Tensor) -> Graph:
    return Graph(rowptr, col, None, None, None, None, col.size(0), rowptr.size(0) - 1)


class _Sums:
    """Sums of values by row, of one block after another."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], acc: torch.dtype, like: Tensor):
        self.num_rows, self.shape = num_rows, shape
        size = num_rows + 1, math.prod(shape)  # The last row takes what a block fills up.
        self.sums = torch.zeros(size, dtype=acc, device=like.device)

    def add(self, rows: _Rows, x: Tensor) -> None:
        total = rows.total(x.reshape(x.size(0), -1).contiguous()).to(self.sums.dtype)
        total += self.sums.index_select(0, rows.rows)  # The rows differ: no atomic additions.
        self.sums.index_copy_(0, rows.rows, total)

    @property
    def value(self) -> Tensor:
        return self.sums[:-1].view(self.num_rows, *self.shape)


class _Extremes:
    """Maxima or minima by row, and the numbers of the edges that have them, or -1."""

    def __init__(self, graph: Graph, shape: tuple[int, ...], dtype: torch.dtype, kind: str):
        self.shape, self.minimum = shape, kind == 'min'
        size = graph.num_dst + 1, math.prod(shape)
        self.values = torch.zeros(size, dtype=dtype, device=graph.col.device)
        self.edges = torch.full_like(self.values, -1, dtype=graph.rowptr.dtype)

    def add(self, block: _Block, rows: _Rows, x: Tensor) -> None:
        x, which = rows.best(x.reshape(x.size(0), -1).contiguous(), self.minimum)
        edge = block.edge[which]
        old, old_edge = (t.index_select(0, rows.rows) for t in (self.values, self.edges))
        better = (x < old) if self.minimum else (x > old)
        better |= (old_edge < 0) | (x.isnan() & ~old.isnan())
        self.values.index_copy_(0, rows.rows, torch.where(better, x, old))
        self.edges.index_copy_(0, rows.rows, torch.where(better, edge, old_edge))

    def results(self) -> tuple[Tensor, Tensor]:
        return self.values[:-1].view(-1, *self.shape), self.edges[:-1].view(-1, *self.shape)


class _Variance:
    """Variances by row, by differences from its first value: those of equal values are 0."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], acc: torch.dtype, like: Tensor):
        self.shape = shape
        size = num_rows + 1, math.prod(shape)
        self.first = torch.zeros(size, dtype=acc, device=like.device)
        self.is_known = torch.zeros(num_rows + 1, 1, dtype=torch.bool, device=like.device)
        self.away, self.squares = (_Sums(num_rows, shape, acc, like) for _ in range(2))

    def add(self, block: _Block, rows: _Rows, x: Tensor) -> None:
        x = x.reshape(x.size(0), -1).to(self.first.dtype)
        starts = rows.parts.rowptr[rows.wholes.rowptr[:-1].long()].clamp(max=x.size(0) - 1)
        first, is_known = (t.index_select(0, rows.rows) for t in (self.first, self.is_known))
        first = torch.where(is_known, first, x.index_select(0, starts))
        self.first.index_copy_(0, rows.rows, first)
        self.is_known.index_fill_(0, rows.rows, True)
        away = x - self.first.index_select(0, block.row)
        self.away.add(rows, away)
        self.squares.add(rows, away * away)

    def results(self, degree: Tensor) -> tuple[Tensor, Tensor]:
        """The variances and the means."""
        away = self.away.value / degree
        var = (self.squares.value / degree - away * away).clamp_(min=0)
        return var, self.first[:-1].view(away.shape) + away


def reduced(
    program: Program, outs: Sequence[Out], graph: Graph, inputs: Inputs, acc: torch.dtype
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Values of a program reduced over the edges of each destination; the edges that maxima and
    minima chose, and the means of variances."""
    ats = [out.at for out in outs]
    found: list[_Sums | _Extremes | _Variance] = []
    for at, kind, _ in outs:
        _, _, _, shape, dtype = program[at]
        if kind in ('max', 'min'):
            found.append(_Extremes(graph, shape, getattr(torch, dtype), kind))
        else:
            made = _Variance if kind == 'var' else _Sums
            found.append(made(graph.num_dst, shape, acc, graph.col))
    for block in _blocks(graph, block_size(program, ats, graph.col.device)):
        rows = _rows_of(block.row, graph.num_dst)
        values = program.evaluate(ats, block.inputs(program, ats, inputs))
        for value, to in zip(values, found, strict=True):
            value = value.expand(block.row.size(0), *to.shape)
            to.add(rows, value) if isinstance(to, _Sums) else to.add(block, rows, value)
    results: list[Tensor] = []
    chosen: list[Tensor | None] = []
    for out, to in zip(outs, found, strict=True):
        own = acc if out.dtype == 'acc' else getattr(torch, out.dtype)
        degree = graph.rowptr.diff().clamp(min=1).view(-1, *(1,) * len(to.shape))
        second = None
        if isinstance(to, _Extremes):
            value, second = to.results()
        elif isinstance(to, _Variance):
            value, second = to.results(degree)
        else:
            value = to.value / degree if out.kind == 'mean' else to.value
        results.append(value.to(own))
        chosen.append(second)
    return results, chosen


def gradients(
    plan: Plan, graph: Graph, inputs: Inputs, needs: Sequence[bool], acc: torch.dtype
) -> list[Tensor | None]:
    """The gradients of the inputs that need one. `inputs` also has, by role, the gradients that
    :func:`cotangents_of` lists, what each softmax needs of all scores, and the seed."""
    derivative, kernel = _Derivative(plan, graph, inputs), plan.kernel
    lacking = [n for n in range(len(plan.softmaxes)) if ('dot', n) not in inputs]
    if lacking:
        inputs = inputs | derivative.dots(lacking, acc)
    dots = [inputs['dot', n] for n in range(len(plan.softmaxes))]
    loads = {}
    for at in kernel.reachable(derivative.outputs):
        value = kernel[at]
        if value.op == 'load' and value.attrs[0] not in OF_DST and needs[value.attrs[1]]:
            loads[value.attrs[1]] = at
    sums: dict[int, _Sums | Tensor] = {}
    for k in loads:
        role, x = plan.inputs[k].role, inputs[plan.inputs[k].role, k]
        if role in NODES:
            sums[k] = _Sums(x.size(0), x.shape[1:], acc, x)
        else:
            sums[k] = torch.zeros_like(x, dtype=x.dtype if role == 'edge' else acc)
    roles = {plan.inputs[k].role for k in loads}
    for block in _blocks(graph, derivative.size):
        _, grads = derivative.of(block, [*loads.values()], dots)
        rows = {}
        if 'dst' in roles:
            rows['dst'] = _rows_of(block.row, graph.num_dst)
        if 'src' in roles:
            src, order = block.src.sort(stable=True)
            rows['src'] = _rows_of(src, graph.num_src, order)
        for k, grad in zip(loads, grads, strict=True):
            to, role = sums[k], plan.inputs[k].role
            if grad is None:
                continue
            if isinstance(to, _Sums):
                to.add(rows[role], grad)
            elif role == 'param':
                to += grad
            else:
                to.index_copy_(0, block.edge.long(), grad)
    out: list[Tensor | None] = [None] * len(needs)
    for k, to in sums.items():
        grad = to.value if isinstance(to, _Sums) else to
        out[k] = grad.to(inputs[plan.inputs[k].role, k].dtype)
    return out


def _ats_of(plan: Plan) -> list[int]:
    return [*(output.at for output in plan.outputs), *plan.softmaxes]


def edges_of_block(plan: Plan, device: torch.device) -> int:
    """The edges of a block in the backward pass of a plan."""
    return block_size(plan.kernel, _ats_of(plan), device)


def fits(plan: Plan, num_edges: int, device: torch.device) -> bool:
    """Whether the tensors of all edges that PyG's code makes take at most half of the memory that
    is free."""
    return 2 * num_edges * _bytes_of_edge(plan.kernel, _ats_of(plan)) <= _free_bytes(device)


# The limit and the use of memory of a container: of control groups of version 2, and of 1.
_GROUPS = (
    ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory.current'),
    ('/sys/fs/cgroup/memory/memory.limit_in_bytes', '/sys/fs/cgroup/memory/memory.usage_in_bytes'),
)


def _free_bytes(device: torch.device) -> int:
    if device.type == 'cuda':
        free, _ = torch.cuda.mem_get_info(device)
        reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return free + reserved - used
    free = 2**32  # if nothing tells
    with suppress(OSError, StopIteration), open('/proc/meminfo') as facts:
        free = next(int(line.split()[1]) << 10 for line in facts if 'MemAvailable' in line)
    for paths in _GROUPS:
        with suppress(OSError, ValueError):  # There is none, or no limit.
            most, used = (int(Path(path).read_text()) for path in paths)
            free = min(free, most - used)
    return free


class _Derivative:
    """The derivative of a message over blocks."""

    def __init__(self, plan: Plan, graph: Graph, inputs: Inputs) -> None:
        self.plan, self.graph, self.inputs = plan, graph, inputs
        self.kernel, self.cotangents = plan.kernel, cotangents_of(plan)
        self.outputs = list(dict.fromkeys(output.at for output in plan.outputs))
        self.ats = [*self.outputs, *plan.softmaxes]
        self.size = edges_of_block(plan, graph.col.device)

    def dots(self, which: Sequence[int], acc: torch.dtype) -> Inputs:
        """The sums of the values of softmaxes times their gradients."""
        softmaxes = [self.plan.softmaxes[n] for n in which]
        shapes = [self.kernel[at].shape for at in softmaxes]
        found = [_Sums(self.graph.num_dst, shape, acc, self.graph.col) for shape in shapes]
        for block in _blocks(self.graph, self.size):
            rows = _rows_of(block.row, self.graph.num_dst)
            for to, value, grad in zip(found, *self.of(block, softmaxes), strict=True):
                if grad is not None:
                    to.add(rows, value * grad)
        return {('dot', n): to.value for n, to in zip(which, found, strict=True)}

    def of(
        self, block: _Block, wanted: Sequence[int], dots: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Values, and the derivatives by them. `dots` are what the sum in each softmax adds to the
        gradients of scores."""
        known = block.inputs(self.kernel, self.ats, self.inputs)
        for at in wanted:
            if at not in known:
                (known[at],) = self.kernel.evaluate([at], known)
            known[at] = known[at].detach().requires_grad_()
        leaves = [known[at] for at in wanted]
        grads = [self.cotangent(block, at) for at in self.outputs]
        grads += [-block.of('dot', dot) for dot in dots]
        ats = self.ats[: len(grads)]
        # The forward pass has been cast already.
        with torch.enable_grad(), torch.autocast(self.graph.col.device.type, enabled=False):
            values = [
                value.expand(grad.shape) for value, grad in
                zip(self.kernel.evaluate(ats, known), grads, strict=True)
            ]  # fmt: skip
            pairs = [
                (value, grad.to(value.dtype))
                for value, grad in zip(values, grads, strict=True) if value.requires_grad
            ]  # fmt: skip
            if not pairs:
                return leaves, [None] * len(leaves)
            found = torch.autograd.grad(
                [value for value, _ in pairs], leaves, [grad for _, grad in pairs],
                allow_unused=True,
            )  # fmt: skip
        return leaves, list(found)

    def cotangent(self, block: _Block, at: int) -> Tensor:
        """The gradient of a value, of all its reductions."""
        parts = []
        for role, k, which in self.cotangents:
            if which == at:
                grad = block.of('grad', self.inputs['grad', k])
                if role == 'picked':
                    edge = block.edge.view(-1, *(1,) * (grad.dim() - 1))
                    grad = torch.where(block.of('arg', self.inputs['arg', k]) == edge, grad, 0)
                parts.append(grad)
        return sum(parts[1:], parts[0])
