"""What runs on nodes and parameters before the kernel."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..sparse.graph import Graph
from ._ir import BOOLEAN, DST, PARAM, RISKY, SRC, Program, number


class _Step(NamedTuple):
    """The call of a function of torch."""

    at: int
    function: Any
    args: tuple[int, ...]
    numbers: tuple[tuple[int, Any], ...]  # Python numbers, by position in the arguments
    risky: tuple[tuple[int, Any], ...]  # position of an argument of nodes, and its end of the edge


class Prologue:
    """Inputs of the kernel and its tail, computed on nodes and parameters.

    No edge reads the row of a node without edges, so its gradient must be zero. Hoisted operations
    could make it NaN (zero times the derivative of a square root at zero): such rows are replaced.
    """

    def __init__(self, program: Program, wanted: list[int]) -> None:
        self.program, self.wanted = program, wanted
        self.order = program.reachable([at for at in wanted if program[at].op != 'load'])
        self.end = {at: program.level(at) for at in self.order if program.level(at) != PARAM}
        self.ends = {end for end in self.end.values() if end in (SRC, DST)}
        # Loads of nodes; the rows of nodes without edges are replaced.
        self.hidden = [
            (at, end) for at, end in self.end.items()
            if program[at].op == 'load' and end in self.ends
        ]  # fmt: skip
        self.constants = {at: number(program[at]) for at in wanted if program[at].op == 'const'}
        self.steps = self._steps()

    def _steps(self) -> list[_Step]:
        program = self.program
        users = [arg for at in self.order for arg in program[at].args] + self.wanted
        affine = {at: found for at in self.order if (found := self._affine(at, users)) is not None}
        inside = {map_ for map_, _ in affine.values()}
        turned = {
            at for at in self.order
            if program.operation(at) is torch.t and users.count(at) == 1
        }  # fmt: skip
        steps: list[_Step] = []
        for at in self.order:
            value = program[at]
            if value.op in ('load', 'const') or at in inside:
                continue
            function, args = program.operation(at), value.args
            map_, bias = affine.get(at, (at, None))
            if program.operation(map_) is torch.mm:
                x, weight = program[map_].args
                if weight in turned:
                    steps = [step for step in steps if step.at != weight]
                    function, args = linear, (x, *program[weight].args)
                    args += () if bias is None else (bias,)
                elif bias is not None:
                    function, args = torch.addmm, (bias, x, weight)
            numbers = [(k, self._number(at, arg)) for k, arg in enumerate(args)]
            ends = [(k, self.end.get(arg)) for k, arg in enumerate(args)]
            steps.append(_Step(
                at, function, args, tuple(each for each in numbers if each[1] is not None),
                tuple((k, end) for k, end in ends if end in self.ends and value.op in RISKY),
            ))  # fmt: skip
        return steps

    def _affine(self, at: int, users: list[int]) -> tuple[int, int] | None:
        """The linear map and the bias whose sum a value is, if no other value reads the map."""
        program = self.program
        value = program[at]
        if value.op != 'add':
            return None
        for one, bias in (value.args, value.args[::-1]):
            alike = {program[each].dtype for each in (at, one, bias, *program[one].args)}
            if (
                program.operation(one) is torch.mm and users.count(one) == 1 and len(alike) == 1
                and program.level(bias) == PARAM and program[bias].op != 'const'
                and program[bias].shape == value.shape
            ):  # fmt: skip
                return one, bias
        return None

    def _number(self, user: int, at: int) -> Any:
        """A constant: a number, or the shape, number and dtype of a tensor filled with it."""
        value = self.program[at]
        if value.op != 'const':
            return None
        if self.program.takes_numbers(user):
            return number(value)
        inner = [self.program[arg] for arg in self.program[user].args]
        dtype = self.program[user].dtype
        if self.program[user].op in BOOLEAN:
            dtype = next((each.dtype for each in inner if each.op != 'const'), dtype)
        return value.shape, number(value), getattr(torch, dtype)

    def __call__(self, read: dict[int, Tensor], graph: Graph | None) -> list[Tensor]:
        """Computes the values from the tensors read; differentiable if the graph is given."""
        if not self.steps and not self.constants:
            return [read[at] for at in self.wanted]
        known: dict[int, Any] = {**read, **self.constants}
        used: dict[int, Tensor] = {}
        if graph is not None:
            for end in self.ends:
                rowptr = graph.rowptr if end == DST else graph.t_rowptr
                assert rowptr is not None
                used[end] = rowptr[1:] != rowptr[:-1]
            for at, end in self.hidden:
                known[at] = _hidden(read[at], used[end], 0)
        for at, function, args, numbers, risky in self.steps:
            values: list[Any] = [known.get(arg) for arg in args]
            for k, value in numbers:
                if isinstance(value, tuple):
                    shape, fill, dtype = value
                    device = next(iter(read.values())).device
                    value = torch.full(shape, fill, dtype=dtype, device=device)
                values[k] = value
            if used:
                for k, end in risky:
                    values[k] = _hidden(values[k], used[end], 1)
            known[at] = function(*values)
        return [read[at] if at in read else known[at] for at in self.wanted]


def _hidden(x: Tensor, used: Tensor, number: float) -> Tensor:
    """Replaces the rows of nodes without edges by a number."""
    return torch.where(used.view(-1, *(1,) * (x.dim() - 1)), x, number)
