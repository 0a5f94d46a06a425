"""Runs messages over blocks of edges: those with linear maps of values computed for each edge,
which no kernel has. Torch's operators run on one block after another, in the order of the
destinations, and again in the backward pass; no value of all edges is stored.

A program computes the values of one edge from inputs of that edge, its ends and parameters, as the
parser refuses everything else: so it may run on any block of edges.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops._hash import mix64_
from ..ops._library import ops
from ..ops.product import raw_product
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ..sparse.to_csr import csr_rows
from ._gradients import cotangents_of, differentiate
from ._ir import DST_ROLES, NODES, PARAM, Inputs, Program, Value
from ._plan import Plan
from ._triton import Out

# The memory for the values of a block and their gradients: bytes on a CPU, a share of a GPU's,
# where each of about 90 launches needs much work to be worth it.
MAX_BYTES = {'cpu': 2**26}
GPU_SHARE = 1 / 8
# Edges of a part of a row: sums of longer rows add up parts.
_PART = 256

# Odd multipliers modulo 2**64: the increment of SplitMix64, and one for the number of a dropout.
_GOLDEN, _ODD = -0x61C8864680B583EB, 0x2545F4914F6CDD1D


class _RowGroups(NamedTuple):
    """How a block's values are reduced by row: first within parts of a row, then over parts. `rows`
    are the rows of the block. On CUDA their number is not read: the list is padded by empty rows,
    whose results go to a row after all others."""

    parts: Graph
    wholes: Graph
    rows: Tensor

    def total(self, x: Tensor) -> Tensor:
        """The sums, in float32 or float64."""
        for graph in (self.parts, self.wholes):
            x = raw_product(SparseOperator(graph), x, out_acc=True)
        return x

    def best(self, x: Tensor, minimum: bool) -> tuple[Tensor, Tensor]:
        """The maxima or minima, and the positions of these in the block."""
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
        """The rows of inputs and factors of dropouts that values need, by position in the
        program."""
        out = {}
        for at in program.reachable(ats):
            if program[at].op == 'load':
                role, k = program[at].attrs
                out[at] = self.of(role, inputs[role, k])
            elif ('keep', at) in inputs:
                out[at] = self.of('edge', inputs['keep', at])
            elif program[at].op == 'keep':
                out[at] = dropout_factors(program[at], self.edge, inputs['seed', 0])
        return out

    def of(self, role: str, x: Tensor) -> Tensor:
        """The rows of an input."""
        if role == 'param':
            return x
        index = {'edge': self.edge, 'src': self.src}.get(role, self.dst)
        return x.index_select(0, index)


def dropout_factors(value: Value, edge: Tensor, seed: Tensor) -> Tensor:
    """The factors of a dropout for edges, the same in each pass: a hash of the seed, the edge and
    the channel (SplitMix64, https://doi.org/10.1145/2714064.2660195)."""
    number, p = value.attrs[0], float.fromhex(value.attrs[1])
    size = math.prod(value.shape)
    place = torch.arange(size, device=edge.device)
    bits = edge.long().view(-1, 1) * size + place
    bits = bits * _GOLDEN + (seed + ((number * _ODD + 2**63) % 2**64 - 2**63))
    mix64_(bits)
    dropped = (bits & (2**53 - 1)) < int(p * 2**53)
    scale = 1 / (1 - p) if p < 1 else 0.0
    factors = torch.full(bits.shape, scale, dtype=getattr(torch, value.dtype), device=edge.device)
    return factors.masked_fill_(dropped, 0).view(-1, *value.shape)


def _iterate_blocks(graph: Graph, size: int) -> Iterator[_Block]:
    dtype, device = graph.rowptr.dtype, graph.col.device
    for begin in range(0, graph.num_edges, size):
        end = min(begin + size, graph.num_edges)
        row = csr_rows(graph.rowptr, begin, end)
        edge = None if graph.perm is None else graph.perm[begin:end]
        if edge is None:
            edge = torch.arange(begin, end, dtype=dtype, device=device)
        yield _Block(graph.col[begin:end], row.clamp(max=graph.num_dst - 1), row, edge)


def _bytes_per_edge(program: Program, ats: Sequence[int]) -> int:
    """The memory of the values of a program and their gradients for an edge."""
    size = 0
    for at in program.reachable(ats):
        op, _, _, shape, dtype = program[at]
        if op != 'const' and program.dependence(at) != PARAM:
            bits = 24 if op == 'keep' else 0  # int64 temporaries of the hash
            size += math.prod(shape) * (getattr(torch, dtype).itemsize + bits)
    return 2 * size


def block_size(program: Program, ats: Sequence[int], device: torch.device) -> int:
    """The number of edges of a block, for values of a program and their gradients."""
    most = MAX_BYTES.get(device.type)
    if most is None:
        most = int(GPU_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, most // _bytes_per_edge(program, ats))


def _group_rows(row: Tensor, num_rows: int, order: Tensor | None = None) -> _RowGroups:
    """Groups values by row; the rows ascend, or do in the `order` of the values."""
    count = row.size(0)
    place = torch.arange(count + 2, dtype=torch.int32, device=row.device)
    starts = pad(row[1:] != row[:-1], (1, 0), value=True)
    # By value: the count of rows and of parts up to it.
    whole = starts.cumsum(0, dtype=torch.int32)
    part = starts.logical_or_(place[:count] % _PART == 0).cumsum(0, dtype=torch.int32)
    if _may_sync(row):
        num_wholes, num_parts = int(whole[-1]), int(part[-1])
    else:
        num_wholes = min(count, num_rows + 1)
        num_parts = min(count, num_wholes + count // _PART + 1)
    first_of_part = torch.searchsorted(part, place[1 : num_parts + 2], out_int32=True)
    first = torch.searchsorted(whole, place[1 : num_wholes + 2], out_int32=True)
    part_of = torch.searchsorted(first_of_part, first, out_int32=True)
    rows = pad(row, (0, 1), value=num_rows).index_select(0, first[:-1])
    columns = place[:count] if order is None else order.int()
    return _RowGroups(_csr(first_of_part, columns), _csr(part_of, place[:num_parts]), rows.long())


def _may_sync(row: Tensor) -> bool:
    """Whether counts may be read without a device sync."""
    return not row.is_cuda


def _csr(rowptr: Tensor, col: Tensor) -> Graph:
    return Graph(rowptr, col, None, None, None, None, col.size(0), rowptr.size(0) - 1)


class _Sums:
    """Sums of values by row, of one block after another."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], acc: torch.dtype, like: Tensor):
        self.num_rows, self.shape = num_rows, shape
        size = num_rows + 1, math.prod(shape)  # The last row takes what a block fills up.
        self.sums = torch.zeros(size, dtype=acc, device=like.device)

    def add(self, rows: _RowGroups, x: Tensor) -> None:
        total = rows.total(x.reshape(x.size(0), -1).contiguous()).to(self.sums.dtype)
        total += self.sums.index_select(0, rows.rows)  # The rows differ: no atomic additions.
        self.sums.index_copy_(0, rows.rows, total)

    @property
    def value(self) -> Tensor:
        return self.sums[:-1].view(self.num_rows, *self.shape)


class _Extremes:
    """Maxima or minima by row, and the edges that have them, or -1."""

    def __init__(self, graph: Graph, shape: tuple[int, ...], dtype: torch.dtype, kind: str):
        self.shape, self.minimum = shape, kind == 'min'
        size = graph.num_dst + 1, math.prod(shape)
        self.values = torch.zeros(size, dtype=dtype, device=graph.col.device)
        self.edges = torch.full_like(self.values, -1, dtype=graph.rowptr.dtype)

    def add(self, block: _Block, rows: _RowGroups, x: Tensor) -> None:
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
    """Variances by row, by moments about its first value: that of equal values is exactly 0."""

    def __init__(self, num_rows: int, shape: tuple[int, ...], acc: torch.dtype, like: Tensor):
        self.shape = shape
        size = num_rows + 1, math.prod(shape)
        self.first = torch.zeros(size, dtype=acc, device=like.device)
        self.is_known = torch.zeros(num_rows + 1, 1, dtype=torch.bool, device=like.device)
        self.away, self.squares = (_Sums(num_rows, shape, acc, like) for _ in range(2))

    def add(self, block: _Block, rows: _RowGroups, x: Tensor) -> None:
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


class _Values:
    """Values of edges, which are not reduced."""

    def __init__(self, graph: Graph, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape = shape
        self.values = torch.empty(graph.num_edges, *shape, dtype=dtype, device=graph.col.device)

    def add(self, block: _Block, rows: _RowGroups, x: Tensor) -> None:
        self.values.index_copy_(0, block.edge.long(), x.to(self.values.dtype))


def reduce_blocks(
    program: Program, outs: Sequence[Out], graph: Graph, inputs: Inputs, acc: torch.dtype
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Values of a program reduced over the edges of each destination, and the second results of
    kinds that have two."""
    ats = [out.at for out in outs]
    reductions: list[_Sums | _Extremes | _Variance | _Values] = []
    for at, kind, _ in outs:
        _, _, _, shape, dtype = program[at]
        if kind == 'edge':
            reductions.append(_Values(graph, shape, getattr(torch, dtype)))
        elif kind in ('max', 'min'):
            reductions.append(_Extremes(graph, shape, getattr(torch, dtype), kind))
        else:
            cls = _Variance if kind == 'var' else _Sums
            reductions.append(cls(graph.num_dst, shape, acc, graph.col))
    for block in _iterate_blocks(graph, block_size(program, ats, graph.col.device)):
        rows = _group_rows(block.row, graph.num_dst)
        values = program.evaluate(ats, block.inputs(program, ats, inputs))
        for value, to in zip(values, reductions, strict=True):
            value = value.expand(block.row.size(0), *to.shape)
            to.add(rows, value) if isinstance(to, _Sums) else to.add(block, rows, value)
    results: list[Tensor] = []
    chosen: list[Tensor | None] = []
    for out, to in zip(outs, reductions, strict=True):
        own = acc if out.dtype == 'acc' else getattr(torch, out.dtype)
        degree = graph.rowptr.diff().clamp(min=1).view(-1, *(1,) * len(to.shape))
        second = None
        if isinstance(to, _Extremes):
            value, second = to.results()
        elif isinstance(to, _Variance):
            value, second = to.results(degree)
        elif isinstance(to, _Values):
            value = to.values
        else:
            value = to.value / degree if out.kind == 'mean' else to.value
        results.append(value.to(own))
        chosen.append(second)
    return results, chosen


def block_gradients(
    plan: Plan, graph: Graph, inputs: Inputs, needs: Sequence[bool], acc: torch.dtype
) -> list[Tensor | None]:
    """The gradients of the inputs that need one. `inputs` also has the cotangents that
    :func:`cotangents_of` lists, the statistics of softmaxes, and the seed, or the factors of
    dropouts of another executor."""
    derivative, message = _Derivative(plan, graph, inputs), plan.message
    lacking = [n for n in range(len(plan.softmaxes)) if ('dot', n) not in inputs]
    if lacking:
        inputs = inputs | derivative.dots(lacking, acc)
    dots = [inputs['dot', n] for n in range(len(plan.softmaxes))]
    loads = {}
    for at in message.reachable(derivative.outputs):
        value = message[at]
        if value.op == 'load' and value.attrs[0] not in DST_ROLES and needs[value.attrs[1]]:
            loads[value.attrs[1]] = at
    roles = {k: plan.inputs[k].role for k in loads}
    sums = {k: _gradient_sum(role, inputs[role, k], acc) for k, role in roles.items()}
    for block in _iterate_blocks(graph, derivative.size):
        _, grads = derivative.of(block, [*loads.values()], dots)
        rows = {}
        if 'dst' in roles.values():
            rows['dst'] = _group_rows(block.row, graph.num_dst)
        if 'src' in roles.values():
            src, order = block.src.sort(stable=True)
            rows['src'] = _group_rows(src, graph.num_src, order)
        for k, grad in zip(loads, grads, strict=True):
            to = sums[k]
            if grad is None:
                continue
            if isinstance(to, _Sums):
                to.add(rows[roles[k]], grad)
            elif roles[k] == 'param':
                to += grad
            else:
                to.index_copy_(0, block.edge.long(), grad)
    out: list[Tensor | None] = [None] * len(needs)
    for k, to in sums.items():
        grad = to.value if isinstance(to, _Sums) else to
        out[k] = grad.to(inputs[roles[k], k].dtype)
    return out


def _gradient_sum(role: str, x: Tensor, acc: torch.dtype) -> _Sums | Tensor:
    """What the gradient of an input is added up in."""
    if role in NODES:
        return _Sums(x.size(0), x.shape[1:], acc, x)
    return torch.zeros_like(x, dtype=x.dtype if role == 'edge' else acc)


def _value_positions(plan: Plan) -> list[int]:
    return [*(output.at for output in plan.outputs), *plan.softmaxes]


def edges_per_block(plan: Plan, device: torch.device) -> int:
    """The number of edges of a block in the backward pass of a plan."""
    return block_size(plan.message, _value_positions(plan), device)


def fits_memory(plan: Plan, num_edges: int, device: torch.device) -> bool:
    """Whether PyG's tensors of all edges take at most half of the free memory."""
    size = num_edges * _bytes_per_edge(plan.message, _value_positions(plan))
    return 2 * size <= _free_bytes(device)


# Files with the memory limit and usage of a container: cgroup v2, and v1.
_GROUPS = (
    ('/sys/fs/cgroup/memory.max', '/sys/fs/cgroup/memory.current'),
    ('/sys/fs/cgroup/memory/memory.limit_in_bytes', '/sys/fs/cgroup/memory/memory.usage_in_bytes'),
)


def _free_bytes(device: torch.device) -> int:
    if device.type == 'cuda':
        free, _ = torch.cuda.mem_get_info(device)
        reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        return free + reserved - used
    free = 2**32  # if the system does not tell
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
        self.message, self.cotangents = plan.message, cotangents_of(plan)
        self.outputs = list(dict.fromkeys(output.at for output in plan.outputs))
        self.ats = [*self.outputs, *plan.softmaxes]
        self.size = edges_per_block(plan, graph.col.device)

    def dots(self, which: Sequence[int], acc: torch.dtype) -> Inputs:
        """The sums of the values of softmaxes times their gradients."""
        softmaxes = [self.plan.softmaxes[n] for n in which]
        shapes = [self.message[at].shape for at in softmaxes]
        found = [_Sums(self.graph.num_dst, shape, acc, self.graph.col) for shape in shapes]
        for block in _iterate_blocks(self.graph, self.size):
            rows = _group_rows(block.row, self.graph.num_dst)
            for to, value, grad in zip(found, *self.of(block, softmaxes), strict=True):
                if grad is not None:
                    to.add(rows, value * grad)
        return {('dot', n): to.value for n, to in zip(which, found, strict=True)}

    def of(
        self, block: _Block, wanted: Sequence[int], dots: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Values, and the derivatives by them. `dots` are what the sum in each softmax adds to the
        gradients of scores."""
        values = block.inputs(self.message, self.ats, self.inputs)
        grads = [self.cotangent(block, at) for at in self.outputs]
        grads += [-block.of('dot', dot) for dot in dots]
        return differentiate(self.message, values, wanted, self.ats[: len(grads)], grads)

    def cotangent(self, block: _Block, at: int) -> Tensor:
        """The gradient of a value, of all its reductions."""
        parts = []
        for role, k, which in self.cotangents:
            if which == at:
                own = 'edge' if role == 'edge' else 'grad'
                grad = block.of(own, self.inputs[own, k])
                if role == 'picked':
                    edge = block.edge.view(-1, *(1,) * (grad.dim() - 1))
                    grad = torch.where(block.of('arg', self.inputs['arg', k]) == edge, grad, 0)
                parts.append(grad)
        return sum(parts[1:], parts[0])
