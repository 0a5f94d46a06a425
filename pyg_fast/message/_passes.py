"""The kernels of a plan: one for each pass over the rows of destinations or of sources."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..sparse.graph import Graph
from ._cpu import encode
from ._cuda import Recipe, most_programs, tile_shape
from ._gradients import Gradients, cotangents_of, gradients, is_multiple
from ._instructions import Code
from ._ir import EDGE, Program, Refused, is_float
from ._plan import Plan, weighted_sum
from ._prologue import Prologue
from ._triton import Out, generate

_ACC = {torch.float64: 'tl.float64', torch.float32: 'tl.float32'}
_GATHERED = 64  # numbers of an edge whose gathering takes longer than another load


@dataclass(eq=False)
class Pass:
    """One kernel over rows of destinations (`dst`) or of sources (`src`)."""

    program: Program
    outs: tuple[Out, ...]
    row_role: str
    in_blocks: bool = False  # by torch's operators in place of a kernel
    _made: dict[Any, Any] = field(default_factory=dict)

    def recipe(self, acc: torch.dtype) -> Recipe:
        """The kernel on CUDA. Raises :class:`Refused`."""
        if acc not in self._made:
            source = generate(self.program, list(self.outs), self.row_role, _ACC[acc])
            tile = tile_shape(source)
            self._made[acc] = Recipe(
                source, tile,
                -(-source.sizes[0] // tile.columns[0]) if source.tiled else 1,
                most_programs(self.program, self.outs, source),
                [self.program[out.at].shape for out in self.outs],
                [acc if out.dtype == 'acc' else getattr(torch, out.dtype) for out in self.outs],
            )  # fmt: skip
        return self._made[acc]

    def first(self) -> 'Pass':
        """The pass of the values of which the last result is the variance."""
        if 'first' not in self._made:
            out = Out(self.outs[-1].at, 'sum', 'acc')
            self._made['first'] = Pass(self.program, (out,), self.row_role)
        return self._made['first']

    def from_first(self) -> 'Pass':
        """The pass with, in place of that variance, the means of the differences from the first
        value of each row and of their squares."""
        if 'from_first' not in self._made:
            program, at = Program(), self.outs[-1].at
            places: dict[int, int] = {}
            outs = [
                out._replace(at=program.graft(self.program, out.at, places)) for out in self.outs
            ]
            first = program.of_dst('first', 0, self.program[at].shape)
            away = program.point('sub', outs.pop().at, first)
            outs += [
                Out(each, 'mean', 'acc') for each in (away, program.point('mul', away, away))
            ]
            self._made['from_first'] = Pass(program, tuple(outs), self.row_role)
        return self._made['from_first']

    def code_for(self, acc: torch.dtype, inputs: dict[tuple[str, int], Tensor]) -> Code:
        """The kernel on a CPU, for inputs by role and number."""
        key = (acc, *inputs, *[x.dtype for x in inputs.values()])
        if key not in self._made:
            acc = torch.float64 if acc == torch.float64 else torch.float32
            self._made[key] = self.code(acc, {k: x.dtype for k, x in inputs.items()})
        return self._made[key]

    def code(self, acc: torch.dtype, dtypes: dict[tuple[str, int], torch.dtype]) -> Code:
        """The kernel on a CPU, for inputs of `dtypes`. Raises :class:`Refused`."""
        key = (acc, frozenset(dtypes.items()))
        if key not in self._made:
            self._made[key] = encode(self, acc, dtypes)
        return self._made[key]


class Passes:
    """The kernels of a plan: generated when they are first needed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._gradients: Gradients | None = None
        self._made: dict[Any, Any] = {}
        before, tail = plan.before, plan.tail
        self.wanted = [each.at for each in plan.inputs]
        if tail is not None:
            self.wanted += [at for at in (tail.weight, tail.bias) if at is not None]
        self.reads = [
            (at, *before[at].attrs)
            for at in before.reachable(self.wanted) if before[at].op == 'load'
        ]  # fmt: skip
        self.prologue = Prologue(before, self.wanted)
        self.acc: torch.dtype = getattr(torch, plan.acc)
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.roles = [(each.role, k) for k, each in enumerate(plan.inputs)]
        self.multiple = any(map(self.is_multiple, range(len(plan.softmaxes))))
        self.has_variance = plan.outputs[-1].reduce == 'var'
        # Of each input, the loads that get its gradient: none if results only compare it.
        kernel = plan.kernel
        derived = {kernel[at].attrs for each in plan.outputs for at in kernel.leaves(each.at)}
        self.leaves = [
            before.leaves(each.at) if role in derived else set()
            for each, role in zip(plan.inputs, self.roles, strict=True)
        ]
        self.weighted_sum = weighted_sum(plan)

    def by_role(self, inputs: Sequence[Tensor]) -> dict[tuple[str, int], Tensor]:
        """The inputs of the kernel by role and number."""
        return dict(zip(self.roles, inputs, strict=True))

    @property
    def gradients(self) -> Gradients:
        if self._gradients is None:
            self._gradients = gradients(self.plan)
        return self._gradients

    def local(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """Inputs of the destination whose derivative the forward pass sums."""
        key = ('local', needs)
        if key not in self._made:
            few = self.plan.in_blocks or not any(needs)
            derived = () if few else enumerate(self.gradients.local)
            self._made[key] = tuple(k for k, at in derived if at is not None and needs[k])
        return self._made[key]

    def needs_transpose(self, needs: tuple[bool, ...]) -> bool:
        """Whether the backward pass reads the edges by their sources."""
        if self.plan.in_blocks:
            return False
        key = ('needs_transpose', needs)
        if key not in self._made:
            if self.weighted_sum is not None:
                self._made[key] = needs[self.weighted_sum.x]
            else:
                steps = self.backward(needs, self.local(needs)) if any(needs) else []
                self._made[key] = any(step.one.row_role == 'src' for step in steps)
        return self._made[key]

    def forward(self, local: tuple[int, ...]) -> Pass:
        """The pass of the results, then of derivatives by `local` inputs."""
        key = ('forward', local)
        if key not in self._made:
            plan = self.plan
            program = Program()
            places: dict[int, int] = {}
            outs = []
            outputs = list(plan.outputs)
            if self.has_variance:  # Its result has the mean, and it reads the message itself.
                del outputs[-2]
                outputs[-1] = outputs[-1]._replace(at=plan.outputs[-2].at)
            for output in outputs:
                dtype = 'acc' if self.multiple else output.dtype
                at = program.graft(plan.kernel, output.at, places)
                outs.append(Out(at, output.reduce, dtype))
            places = {}
            for k in local:
                grads = self.gradients
                at = program.graft(grads.local_program, grads.local[k], places)  # type: ignore
                outs.append(Out(at, 'sum', 'acc'))
            self._made[key] = Pass(program, tuple(outs), 'dst', plan.in_blocks)
        return self._made[key]

    def backward(self, needs: tuple[bool, ...], local: tuple[int, ...]) -> list['Step']:
        """The passes of the gradients."""
        key = ('backward', needs, local)
        if key not in self._made:
            plan, grads = self.plan, self.gradients
            by_role: dict[str, list[int]] = {'src': [], 'dst': [], 'edge': [], 'param': []}
            for k, each in enumerate(plan.inputs):
                if needs[k] and grads.of[k] is not None and k not in local:
                    by_role[each.role].append(k)
            steps = []
            rows = {'dst': by_role['dst'], 'src': by_role['src']}
            # They need what any pass computes for each edge. Rows of destinations have their edges
            # in order, and read their gradients once.
            rows['dst' if rows['dst'] else 'src'] += by_role['edge'] + by_role['param']
            for role, which in rows.items():
                by_out: dict[Out, list[int]] = {}
                for k in which:
                    by_out.setdefault(self._gradient(k), []).append(k)
                if which:
                    steps += self._divided(grads.program, by_out, role)
            if [step.one.row_role for step in steps] == ['dst', 'src']:
                steps = shared(steps[0], steps[1], len(plan.inputs))
            self._made[key] = steps
        return self._made[key]

    def _gradient(self, k: int) -> Out:
        at, (role, _, _, dtype) = self.gradients.of[k], self.plan.inputs[k]
        assert at is not None
        if role == 'param':
            return Out(at, 'total', 'acc')
        return Out(at, 'edge' if role == 'edge' else 'sum', dtype)

    def _divided(
        self, program: Program, by_out: dict[Out, list[int]], role: str
    ) -> list['Step']:
        """One pass, or one for each result if their shapes do not fit together."""
        one = Pass(program, tuple(by_out), role)
        if len(by_out) > 1:
            try:
                one.recipe(torch.float32)
            except Refused:
                return [
                    Step(Pass(program, (out,), role), (tuple(which),))
                    for out, which in by_out.items()
                ]
        return [Step(one, tuple(map(tuple, by_out.values())))]

    def prepare(
        self,
        needs: tuple[bool, ...],
        local: tuple[int, ...],
        acc: torch.dtype,
        graph: Graph,
        inputs: dict[tuple[str, int], Tensor],
    ) -> None:
        """Generates the kernels of the backward pass, or refuses."""
        key = ('prepared', needs, local, acc, graph.col.is_cuda)
        if not any(needs) or self.plan.in_blocks or key in self._made:
            return
        count = len(self.plan.softmaxes)
        dots = [self.dot(n) for n in range(count) if not self.is_multiple(n)]
        steps = self.backward(needs, local)
        for one in [*dots, *(step.one for step in steps)]:
            if graph.col.is_cuda:
                one.recipe(acc)
            else:
                dtypes = {k: t.dtype for k, t in inputs.items()}
                of_softmax = itertools.product(('most', 'scale', 'dot'), range(count))
                dtypes |= dict.fromkeys(of_softmax, acc)
                for kind, k, _ in cotangents_of(self.plan):
                    dtypes['grad', k] = acc
                    if kind == 'picked':
                        dtypes['arg', k] = graph.rowptr.dtype
                dtypes |= {load: acc for step in steps for load in step.kept}
                one.code(acc, dtypes)
        self._made[key] = True

    def of_softmax(self, n: int) -> Pass:
        """The pass of the largest score and of the sum of exponentials."""
        key = ('softmax', n)
        if key not in self._made:
            kernel, program = self.plan.kernel, Program()
            at = program.graft(kernel, kernel[self.plan.softmaxes[n]].args[0], {})
            self._made[key] = Pass(program, (Out(at, 'softmax', 'acc'),), 'dst')
        return self._made[key]

    def of_softmax_in_blocks(self, n: int) -> list[Pass]:
        """The pass of the largest score, then that of the sum of exponentials, over blocks of
        edges."""
        key = ('softmax in blocks', n)
        if key not in self._made:
            kernel = self.plan.kernel
            score, most, _ = kernel[self.plan.softmaxes[n]].args
            passes = []
            for kind in ('max', 'sum'):
                program = Program()
                places: dict[int, int] = {}
                at = program.graft(kernel, score, places)
                if kind == 'sum':
                    most = program.graft(kernel, most, places)
                    at = program.point('exp', program.point('sub', at, most))
                passes.append(Pass(program, (Out(at, kind, 'acc'),), 'dst', True))
            self._made[key] = passes
        return self._made[key]

    def joint(self, cuda: bool) -> Pass | None:
        """The pass of a softmax and of the message, if that is a multiple of it."""
        key = ('joint', cuda)
        if key not in self._made:
            self._made[key] = None
            plan = self.plan
            sums = all(output.reduce == 'sum' for output in plan.outputs)
            if sums and len(plan.softmaxes) == 1 and self.is_multiple(0) and not plan.in_blocks:
                kernel, program = plan.kernel, Program()
                places: dict[int, int] = {}
                score = program.graft(kernel, kernel[plan.softmaxes[0]].args[0], places)
                outs = [Out(score, 'softmax', 'acc')]
                for output in plan.outputs:
                    at = program.graft(kernel, output.at, places, joint=True)
                    outs.append(Out(at, 'weighted', 'acc'))
                one = Pass(program, tuple(outs), 'dst')
                with suppress(Refused):
                    if cuda:
                        one.recipe(getattr(torch, self.plan.acc))
                    self._made[key] = one
        return self._made[key]

    def is_multiple(self, n: int) -> bool:
        """Whether the message is a multiple of a softmax."""
        key = ('is_multiple', n)
        if key not in self._made:
            self._made[key] = is_multiple(self.plan, n)
        return self._made[key]

    def dot(self, n: int) -> Pass:
        """The pass of the sum of a softmax's values times their gradients."""
        key = ('dot', n)
        if key not in self._made:
            grads = self.gradients
            self._made[key] = Pass(grads.dot_program, (Out(grads.dots[n], 'sum', 'acc'),), 'dst')
        return self._made[key]

    def kept(self, at: int) -> Pass:
        """The pass of the factors of a dropout."""
        key = ('kept', at)
        if key not in self._made:
            self._made[key] = Pass(self.plan.kernel, (Out(at, 'edge', 'acc'),), 'dst')
        return self._made[key]


class Step(NamedTuple):
    """A pass of the backward pass: the inputs whose gradient each of its results is, then results
    that :obj:`kept` names as inputs of later passes."""

    one: Pass
    which: tuple[tuple[int, ...], ...]
    kept: tuple[tuple[str, int], ...] = ()


def shared(dst: Step, src: Step, num_inputs: int) -> list[Step]:
    """The passes over destinations and over sources. The second one reads values of edges that the
    first one has computed, where to compute them again it would gather many more numbers of each
    edge."""
    program, outs = dst.one.program, [out.at for out in src.one.outs]
    known = set(program.reachable(out.at for out in dst.one.outs))
    width = max(math.prod(program[at].shape) for at in outs)
    cut: dict[int, None] = {}
    seen: set[int] = set()
    stack = list(outs)
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        op, args, _, shape, dtype = program[at]
        is_few = 4 * math.prod(shape) <= width and is_float(dtype)
        if at in known and is_few and op not in ('load', 'const'):
            cut[at] = None
        else:
            stack.extend(args)
    gathered = sum(
        math.prod(program[at].shape) for at in program.reachable(outs)
        if at not in seen and program[at].op == 'load'
        and program[at].attrs[0] not in ('src', 'param')
    )  # fmt: skip
    added = sum(math.prod(program[at].shape) for at in cut)
    if not cut or gathered < 4 * added + _GATHERED:
        return [dst, src]
    new, places = Program(), {}
    kept = tuple(('edge', num_inputs + k) for k in range(len(cut)))
    for at, load in zip(cut, kept, strict=True):
        places[at] = new.add('load', (), load, program[at].shape, 'float32', EDGE)
    placed = [out._replace(at=new.graft(program, out.at, places)) for out in src.one.outs]
    more = tuple(Out(at, 'edge', 'acc') for at in cut)
    return [
        Step(Pass(program, dst.one.outs + more, 'dst'), dst.which, kept),
        Step(Pass(new, tuple(placed), 'src'), src.which),
    ]
