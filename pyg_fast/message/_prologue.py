"""Runs what a plan computes on nodes and parameters: its prologue before the passes, and what
follows the reductions of an `aggregate`."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.linear import linear
from ..sparse.graph import Graph
from ._activations import Activation, find_activations
from ._ir import BOOLEAN, DST, PARAM, RISKY, SRC, Program, number
from ._rows import RowPart

# A Python number, or the shape, number and dtype of a tensor filled with it.
_Constant: TypeAlias = float | tuple[tuple[int, ...], float, torch.dtype]


class _Call(NamedTuple):
    """A call of a function of torch, which returns a tensor, or one for each of several values."""

    at: int | tuple[int, ...]
    function: Callable[..., Any]
    args: tuple[int, ...]
    constants: tuple[tuple[int, _Constant], ...]  # by position in the arguments
    risky: tuple[tuple[int, int], ...]  # position of an argument of nodes, and its end of the edge


class Prologue:
    """Computes the inputs of the passes, and the weights of the tail.

    No edge reads the row of a node without edges, so its gradient must be zero. Hoisted operations
    could make it NaN (zero times the derivative of a square root at zero): such rows are replaced.
    """

    def __init__(self, program: Program, wanted: list[int]) -> None:
        self.program, self.wanted = program, wanted
        self.activations: dict[int, tuple[Activation, int]] = {}
        self.order = self._find_order()
        self.end = {at: end for at in self.order if (end := program.dependence(at)) != PARAM}
        self.ends = {end for end in self.end.values() if end in (SRC, DST)}
        # Loads of nodes, whose rows of nodes without edges are replaced.
        self.masked = [
            (at, end) for at, end in self.end.items()
            if program[at].op == 'load' and end in self.ends
        ]  # fmt: skip
        self.constants = {at: number(program[at]) for at in wanted if program[at].op == 'const'}
        self.calls = self._make_calls()

    def _find_order(self) -> list[int]:
        """The values to compute, without those that are within an activation."""
        wanted = [at for at in self.wanted if self.program[at].op != 'load']
        found = find_activations(self.program, self.program.reachable(wanted))
        needed, stack = set(), wanted
        while stack:
            at = stack.pop()
            if at in needed:
                continue
            needed.add(at)
            if at in found:
                self.activations[at] = found[at]
            stack += self._args(at)
        return sorted(needed)

    def _args(self, at: int) -> tuple[int, ...]:
        """What the call of a value takes."""
        return self.activations[at][1:] if at in self.activations else self.program[at].args

    def _make_calls(self) -> list[_Call]:
        program = self.program
        users = [arg for at in self.order for arg in self._args(at)] + self.wanted
        affine = {
            at: parts for at in self.order if (parts := self._find_affine(at, users)) is not None
        }
        inside = {map_ for map_, _ in affine.values()}
        transposed = {
            at for at in self.order
            if program.operation(at) is torch.t and users.count(at) == 1
        }  # fmt: skip
        calls: list[_Call] = []
        splits = self._find_splits()
        for at in self.order:
            value = program[at]
            if value.op in ('load', 'const') or at in inside:
                continue
            if at in self.activations:
                activation, x = self.activations[at]
                calls.append(_Call(at, activation, (x,), (), ()))
                continue
            if at in splits:
                pieces = splits[at]
                if at == min(pieces):
                    sizes = [program[each].attrs[2] for each in pieces]
                    split = partial(torch.split, split_size_or_sections=sizes, dim=value.attrs[0])
                    calls.append(_Call(pieces, split, value.args, (), ()))
                continue
            function, args = program.operation(at), value.args
            map_, bias = affine.get(at, (at, None))
            if program.operation(map_) is torch.mm:
                x, weight = program[map_].args
                if weight in transposed:
                    calls = [step for step in calls if step.at != weight]
                    function = F.linear if bias is None else linear
                    args = (x, *program[weight].args)
                    args += () if bias is None else (bias,)
                elif bias is not None:
                    function, args = torch.addmm, (bias, x, weight)
            constants = [
                (k, self._constant(at, arg)) for k, arg in enumerate(args)
                if program[arg].op == 'const'
            ]  # fmt: skip
            ends = [(k, self.end[arg]) for k, arg in enumerate(args) if arg in self.end]
            risky = [(k, end) for k, end in ends if end in self.ends and value.op in RISKY]
            calls.append(_Call(at, function, args, tuple(constants), tuple(risky)))
        return calls

    def _find_splits(self) -> dict[int, tuple[int, ...]]:
        """For each part of a parameter that is cut into parts without a rest: all of its parts. One
        call of them has one gradient, where each part's would be written into zeros."""
        program = self.program
        parts: dict[tuple[int, int], list[int]] = {}
        for at in self.order:
            value = program[at]
            if value.op == 'slice' and program.dependence(at) == PARAM and value.attrs[3] == 1:
                parts.setdefault((value.args[0], value.attrs[0]), []).append(at)
        found: dict[int, tuple[int, ...]] = {}
        for (whole, dim), each_of in parts.items():
            each_of.sort(key=lambda at: program[at].attrs[1])
            ends = list(accumulate(program[at].attrs[2] for at in each_of))
            starts = [program[at].attrs[1] for at in each_of]
            if starts == [0, *ends[:-1]] and ends[-1] == program[whole].shape[dim]:
                found |= dict.fromkeys(each_of, tuple(each_of))
        return found

    def _find_affine(self, at: int, users: list[int]) -> tuple[int, int] | None:
        """The linear map and the bias whose sum a value is, if no other value reads the map."""
        program = self.program
        value = program[at]
        if value.op != 'add':
            return None
        for one, bias in (value.args, value.args[::-1]):
            alike = {program[each].dtype for each in (at, one, bias, *program[one].args)}
            if (
                program.operation(one) is torch.mm and users.count(one) == 1 and len(alike) == 1
                and program.dependence(bias) == PARAM and program[bias].op != 'const'
                and program[bias].shape == value.shape
            ):  # fmt: skip
                return one, bias
        return None

    def _constant(self, user: int, at: int) -> _Constant:
        """A constant as an argument of `user`."""
        value = self.program[at]
        if self.program.takes_numbers(user):
            return number(value)
        inner = [self.program[arg] for arg in self.program[user].args]
        dtype = self.program[user].dtype
        if self.program[user].op in BOOLEAN:
            dtype = next((each.dtype for each in inner if each.op != 'const'), dtype)
        return value.shape, number(value), getattr(torch, dtype)

    def __call__(self, read: dict[int, Tensor], graph: Graph | None) -> list[Tensor]:
        """Computes the values from the tensors read; differentiable if the graph is given."""
        if not self.calls and not self.constants:
            return [read[at] for at in self.wanted]
        values: dict[int, Tensor] = {**read, **self.constants}  # type: ignore[dict-item]
        used: dict[int, Tensor] = {}
        if graph is not None:
            for end in self.ends:
                if graph.full[0 if end == DST else 1]:
                    continue
                rowptr = graph.rowptr if end == DST else graph.t_rowptr
                assert rowptr is not None
                used[end] = has_edges(rowptr)
            for at, end in self.masked:
                if end in used:
                    values[at] = replace_unread_rows(read[at], used[end], 0)
        for where, function, args, constants, risky in self.calls:
            given: list = [values.get(arg) for arg in args]
            for k, constant in constants:
                if isinstance(constant, tuple):
                    shape, fill, dtype = constant
                    device = next(iter(read.values())).device
                    given[k] = torch.full(shape, fill, dtype=dtype, device=device)
                else:
                    given[k] = constant
            for k, end in risky:
                if end in used:
                    given[k] = replace_unread_rows(given[k], used[end], 1)
            if isinstance(where, tuple):
                values.update(zip(where, function(*given), strict=True))
            else:
                values[where] = function(*given)
        return [read[at] if at in read else values[at] for at in self.wanted]


class AfterReductions:
    """Computes what an `aggregate` returns from its reductions."""

    def __init__(self, rows: RowPart) -> None:
        program = rows.program
        self.function = Prologue(program, list(rows.outputs))
        loads = [at for at in program.reachable(rows.outputs) if program[at].op == 'load']
        kinds = {at: program[at].attrs for at in loads}
        self.reduced = [(at, k) for at, (role, k) in kinds.items() if role == 'reduced']
        self.degrees = [at for at, (role, _) in kinds.items() if role == 'degree']
        # Of inputs of nodes and of parameters: position, role and name.
        self.reads = [
            (at, role, name) for at, (role, name) in kinds.items() if role in ('row', 'param')
        ]
        self.dtypes = {at: getattr(torch, program[at].dtype) for at in loads}
        # A node without edges gives no gradient, also where that of an operation is not finite.
        self.masks = any(
            program[at].op in RISKY and not _divides_by_degree(program, at)
            for at in program.reachable(rows.outputs)
        )

    def __call__(
        self, outs: Sequence[Tensor], read: Sequence[Tensor], rowptr: Tensor
    ) -> list[Tensor]:
        """The results, from the reductions and the tensors that :obj:`reads` lists."""
        if self.masks and torch.is_grad_enabled():
            used = has_edges(rowptr)
            outs = [replace_unread_rows(x, used, 0) if x.requires_grad else x for x in outs]
        values = {at: x for (at, _, _), x in zip(self.reads, read, strict=True)}
        values |= {at: outs[k].to(self.dtypes[at]) for at, k in self.reduced}
        values |= {at: rowptr.diff().to(self.dtypes[at]) for at in self.degrees}
        results = self.function(values, None)
        # A caller may write into one of two that are equal.
        return [x.clone() if any(x is y for y in results[:k]) else x for k, x in enumerate(results)]


def _divides_by_degree(program: Program, at: int) -> bool:
    """Whether a value is a quotient by what depends on degrees alone."""
    loads = [
        program[each].attrs for each in program.reachable(program[at].args[1:2])
        if program[each].op == 'load'
    ]  # fmt: skip
    return program[at].op == 'div' and all(role == 'degree' for role, _ in loads)


def has_edges(rowptr: Tensor) -> Tensor:
    """Which nodes have edges."""
    return rowptr[1:] != rowptr[:-1]


def replace_unread_rows(x: Tensor, used: Tensor, number: float) -> Tensor:
    """Replaces the rows of nodes without edges by a number."""
    return torch.where(used.view(-1, *(1,) * (x.dim() - 1)), x, number)
