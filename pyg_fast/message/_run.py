"""Runs a plan: the prologue on nodes, the kernels, and the linear map after them."""

import itertools
import linecache
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.utils import softmax

from ..graph.groups import Groups
from ..graph.operator import SparseOperator
from ..graph.structure import Graph, ends_of
from ..ops._saved import save, saved
from ..ops._transforms import is_batched
from ..ops.column_sums import column_sums
from ..ops.head_map import head_map
from ..ops.product import product
from . import _blocks
from ._cpu import Code, encode, run_pass_cpu
from ._generator import power
from ._ir import EDGE, NODES, OF_DST, SRC, STATISTICS, Program, Refused, is_float
from ._pieces import (
    ROWS_OF_OWNERS,
    WARPS_OF_OWNERS,
    WRITE_OWNERS,
    Pieces,
    combination,
    combinations,
    pieces_of,
)
from ._plan import (
    Gradients,
    Plan,
    WeightedSum,
    cotangents_of,
    gradients,
    is_multiple,
    sums_of,
    weighted_sum,
)
from ._prologue import Prologue
from ._statistics import statistics_blocks, statistics_kernel
from ._triton import OF_TWO, Out, Source, generate

_ACC = {torch.float64: 'tl.float64', torch.float32: 'tl.float32'}
# Programs that take many rows each: the most of them, and of numbers in their sums over all edges.
_MOST_PROGRAMS, _MOST_TOTALS = 2**14, 2**23
# Where many rows have few edges on average, a program takes several rows: to start it takes longer
# than to add one.
_FEW_EDGES, _MANY_ROWS, _ROWS_OF_FEW = 8, 2**15, 4
_TILE = 64  # columns, of results whose rows are divided
_GATHERED = 64  # numbers of an edge whose gathering takes longer than another load


@dataclass(eq=False)
class Pass:
    """One kernel over rows of destinations (`dst`) or of sources (`src`)."""

    program: Program
    outs: tuple[Out, ...]
    row_role: str
    in_blocks: bool = False  # by torch's operators in place of a kernel
    _made: dict[Any, Any] = field(default_factory=dict)

    def recipe(self, acc: torch.dtype) -> 'Recipe':
        """The kernel on CUDA. Raises :class:`Refused`."""
        if acc not in self._made:
            source = generate(self.program, list(self.outs), self.row_role, _ACC[acc])
            tile = tile_shape(source)
            self._made[acc] = Recipe(
                source, tile,
                -(-source.sizes[0] // tile.columns[0]) if source.tiled else 1,
                _most_programs(self, source),
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
    groups: Groups | None = None


def schedule_of(graph: Graph, role: str) -> Schedule:
    """The structure of a pass."""
    if role == 'src':
        graph = graph.t()
    return Schedule(graph.rowptr, graph.col, graph.perm, graph.num_dst, graph.groups)


def _most_programs(one: Pass, source: Source) -> int | None:
    """The most programs of a tile, if each holds parameters or sums of all edges."""
    if not (source.holds or source.totals):
        return None
    size = sum(math.prod(one.program[out.at].shape) for out in one.outs if out.kind == 'total')
    return min(_MOST_PROGRAMS, max(64, _MOST_TOTALS // max(1, size)))


def _num_programs(most: int | None, num_rows: int, num_edges: int) -> int:
    """The programs of a tile that take rows: each takes one row, or many."""
    if most is not None:
        return min(num_rows, most)
    several = num_edges <= _FEW_EDGES * num_rows and num_rows >= _MANY_ROWS
    return -(-num_rows // _ROWS_OF_FEW) if several else num_rows


def run_pass(
    one: Pass, graph: Graph, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The results of a pass, and the chosen edges of a maximum or minimum."""
    if one.in_blocks:
        return _blocks.reduced(one.program, one.outs, graph, _seeded(inputs, seed), acc)
    if not graph.col.is_cuda:
        if one.outs[-1].kind == 'var':
            return _variance_cpu(one, graph, inputs, acc, seed)
        return run_pass_cpu(one, graph, inputs, acc, seed)
    schedule = schedule_of(graph, one.row_role)
    with _on(graph.col.device):
        return _run_pass_cuda(one, schedule, inputs, acc, seed)


def _variance_cpu(
    one: Pass, graph: Graph, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The results of a pass whose last one is a variance, by differences from the first message of
    each destination: those of equal messages are 0."""
    starts, given = graph, inputs
    if graph.num_edges > 0:
        start = graph.rowptr[:-1].clamp(max=graph.num_edges - 1)
        edges = start if graph.perm is None else graph.perm[start]
        rowptr = torch.arange(start.numel() + 1, dtype=start.dtype)
        starts = graph._replace(rowptr=rowptr, col=graph.col[start], perm=edges)
        missing = start.numel() - graph.num_edges  # The kernel takes a row for each of these edges.
        given = inputs | {
            key: torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
            for key, x in inputs.items() if key[0] == 'edge' and missing > 0
        }  # fmt: skip
    (first,), _ = run_pass_cpu(one.first(), starts, given, acc, seed)
    outs, chosen = run_pass_cpu(one.from_first(), graph, inputs | {('first', 0): first}, acc, seed)
    *others, away, squares = outs
    var = (squares - away * away).clamp_(min=0)
    has_edges = (graph.rowptr.diff() > 0).view(-1, *(1,) * (away.dim() - 1))
    mean = torch.where(has_edges, first + away, 0)
    return [*others, var.to(getattr(torch, one.outs[-1].dtype))], [*chosen[:-2], mean]


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one."""
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _seeded(
    inputs: dict[tuple[str, int], Tensor], seed: Tensor | None
) -> dict[tuple[str, int], Tensor]:
    return inputs if seed is None else {**inputs, ('seed', 0): seed}


def _run_pass_cuda(
    one: Pass, schedule: Schedule, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    rowptr, col, perm, num_rows, groups = schedule
    recipe, pieces = one.recipe(acc), pieces_of(col.size(0), num_rows, groups)
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
    one: Pass, pieces: Pieces | Groups, parts: dict[int, Tensor], part_args: dict[int, Tensor],
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


def _with_dot(
    plan: Plan, known: dict[tuple[str, int], Tensor], n: int, grads: Sequence[Tensor],
    results: Sequence[Tensor], acc: torch.dtype,
) -> None:  # fmt: skip
    """Adds the sum of a softmax's values times their gradients, where results are multiples of it:
    that is the sum of the results times theirs."""
    most, scale = known['most', n], known['scale', n]
    if plan.in_blocks or not most.is_cuda:
        shape = (most.size(0), *plan.kernel[plan.softmaxes[n]].shape, -1)
        first, *others = (
            (grad * each).reshape(shape).sum(-1)
            for grad, each in zip(grads, results, strict=True)
        )
        known['dot', n] = sum(others, first)
        return
    import triton.language as tl

    count = most.numel()
    sizes = [each.numel() // count for each in results]
    block, columns = statistics_blocks(sizes)
    dot = known['dot', n] = torch.empty_like(most)
    stats = known['stats', n] = most.new_empty(*most.shape, len(STATISTICS))
    pairs = [each for pair in zip(grads, results, strict=True) for each in pair]
    with _on(most.device):
        _launch(
            statistics_kernel(len(results)), 'message_statistics', 4, -(-count // block),
            [most, scale, *pairs, dot, stats], (count,),
            (block, tl.float64 if acc == torch.float64 else tl.float32,
             *(each for pair in zip(sizes, columns, strict=True) for each in pair)),
        )  # fmt: skip


class FusedMessage(torch.autograd.Function):
    """The kernels of a plan. With `create_graph=True` its backward is that of torch operations."""

    @staticmethod
    def forward(
        ctx: Any, passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
        only_read: bool, *inputs: Tensor,
    ) -> Any:  # fmt: skip
        found, kept = results_of(passes, graph, seed, needs, inputs)
        ctx.passes, ctx.needs = passes, needs
        rounded = tuple(map(_no_view, found))
        if not only_read:  # The caller may write into what it gets.
            results = [x.clone() if any(x is y for y in rounded) else x for x in kept.results]
            kept = kept._replace(results=tuple(results))
        save(ctx, graph, seed, inputs, *kept)
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        passes, needs = ctx.passes, ctx.needs
        graph, seed, inputs, *kept = saved(ctx)
        # create_graph=True, or several gradients at once.
        if torch.is_grad_enabled() or any(map(is_batched, grads)):
            chosen = Kept(*kept).chosen
            found = _differentiable(
                passes, graph, seed, inputs, chosen, needs, grads, passes.acc
            )
        else:
            found = gradients_of(passes, graph, seed, needs, inputs, Kept(*kept), grads)
        return None, None, None, None, None, *found


class Kept(NamedTuple):
    """What the backward pass of a plan reads of the forward pass, in the dtype of the arithmetic.

    :obj:`local` are the sums of derivatives by some inputs of destinations, :obj:`chosen` the edges
    that maxima and minima chose, :obj:`stats` two tensors for each softmax, and :obj:`results` some
    of the results, see :func:`kept_results`.
    """

    local: tuple[Tensor, ...]
    chosen: tuple[Tensor | None, ...]
    stats: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


def kept_results(passes: Passes) -> Sequence[int]:
    """The results that the backward pass reads."""
    count = len(passes.plan.outputs)
    return range(count) if passes.multiple else [count - 2] if passes.has_variance else ()


def results_of(
    passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
    inputs: Sequence[Tensor],
) -> tuple[list[Tensor], Kept]:  # fmt: skip
    """The results of a plan, and what the backward pass reads, perhaps the same tensors."""
    acc, local = passes.acc, passes.local(needs)
    known = passes.by_role(inputs)
    # What the backward pass cannot compute is refused now.
    passes.prepare(needs, local, acc, graph, known)
    outs, chosen, of_softmax = _forward(passes, local, graph, known, acc, seed)
    outputs = passes.plan.outputs
    count = len(outputs)
    rounded = [
        out.to(getattr(torch, output.dtype)) for out, output in zip(outs, outputs, strict=False)
    ]
    results = tuple([outs[k] for k in kept_results(passes)])
    return rounded, Kept(
        tuple(outs[count:]), tuple(chosen[:count]), tuple(of_softmax.values()), results
    )


def gradients_of(
    passes: Passes, graph: Graph, seed: Tensor | None, needs: tuple[bool, ...],
    inputs: Sequence[Tensor], kept: Kept, grads: tuple[Tensor, ...],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of the inputs that need one, by kernels."""
    plan, acc = passes.plan, passes.acc
    if passes.has_variance:
        *others, of_mean, of_var = grads
        grads = *others, of_mean - 2 * kept.results[0] * of_var, of_var
    grads = tuple([grad.contiguous() for grad in grads])
    known = passes.by_role(inputs)
    for n in range(len(plan.softmaxes)):
        known['most', n], known['scale', n] = kept.stats[2 * n : 2 * n + 2]
    total = _cotangents(plan, graph, grads, acc)
    for role, k, at in cotangents_of(plan):
        chosen = kept.chosen[k] if role == 'picked' else None
        if chosen is not None:
            known['grad', k], known['arg', k] = grads[k], chosen
        else:
            known['grad', k] = total[at]
    for n in range(len(plan.softmaxes)):
        if passes.is_multiple(n):
            _with_dot(plan, known, n, grads, kept.results, acc)
        elif not plan.in_blocks:
            (known['dot', n],), _ = run_pass(passes.dot(n), graph, known, acc, seed)
    out: list[Tensor | None] = [None] * len(inputs)
    if plan.in_blocks:
        out = _blocks.gradients(plan, graph, _seeded(known, seed), needs, acc)
    local = passes.local(needs)
    for k, derivative in zip(local, kept.local, strict=True):
        grad = total[plan.outputs[0].at]
        out[k] = (grad.reshape(derivative.shape) * derivative).to(inputs[k].dtype)
    for one, which, extra in [] if plan.in_blocks else passes.backward(needs, local):
        found, _ = run_pass(one, graph, known, acc, seed)
        known |= zip(extra, found[len(which) :], strict=True)
        for ks, each in zip(which, found, strict=False):
            if plan.inputs[ks[0]].role == 'param':
                each = column_sums(each) if each.size(0) > 1 else each
            for k in ks:  # Copies: gradients of different parameters must not share memory.
                grad = each if k == ks[0] else each.clone()
                out[k] = grad.to(inputs[k].dtype).reshape(inputs[k].shape)
    for k, needed in enumerate(needs):
        if needed and out[k] is None:
            out[k] = torch.zeros_like(inputs[k])
    return out


def _no_view(x: Tensor) -> Tensor:
    """A tensor that the caller may write into: autograd forbids it for views made in a function."""
    return torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x


def _forward(
    passes: Passes, local: tuple[int, ...], graph: Graph, inputs: dict[tuple[str, int], Tensor],
    acc: torch.dtype, seed: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None], dict[tuple[str, int], Tensor]]:  # fmt: skip
    """The results, chosen edges, and what each softmax needs of all scores."""
    joint = passes.joint(graph.col.is_cuda) if passes.plan.softmaxes else None
    if joint is not None:
        (most, *outs), (scale, *chosen) = run_pass(joint, graph, inputs, acc, seed)
        assert scale is not None
        return outs, chosen, {('most', 0): most, ('scale', 0): scale}
    found = _of_softmaxes(passes, graph, inputs, acc, seed)
    outs, chosen = run_pass(passes.forward(local), graph, inputs | found, acc, seed)
    if passes.has_variance:
        mean = chosen.pop()
        assert mean is not None
        outs.insert(-1, mean)
        chosen += [None, None]
    return outs, chosen, found


def _of_softmaxes(
    passes: Passes, graph: Graph, inputs: dict[tuple[str, int], Tensor], acc: torch.dtype,
    seed: Tensor | None,
) -> dict[tuple[str, int], Tensor]:  # fmt: skip
    """For each softmax, the largest score of each destination, and the reciprocal of the sum of
    exponentials."""
    found: dict[tuple[str, int], Tensor] = {}
    for n in range(len(passes.plan.softmaxes)):
        if passes.plan.in_blocks:
            most, sums = passes.of_softmax_in_blocks(n)
            (found['most', n],), _ = run_pass(most, graph, inputs, acc, seed)
            (total,), _ = run_pass(sums, graph, inputs | found, acc, seed)
            found['scale', n] = total.reciprocal_()
            continue
        one = passes.of_softmax(n)
        (found['most', n],), (scale,) = run_pass(one, graph, inputs, acc, seed)
        assert scale is not None
        found['scale', n] = scale
    return found


def _cotangents(
    plan: Plan, graph: Graph, grads: tuple[Tensor, ...], acc: torch.dtype
) -> dict[int, Tensor]:
    """By value of the message: the gradient that each of its edges gets, at the destination."""
    degree: Tensor | None = None
    total: dict[int, Tensor] = {}
    for output, grad in zip(plan.outputs, grads, strict=True):
        if output.reduce in ('max', 'min'):
            continue
        if output.reduce in ('mean', 'var'):
            if degree is None:
                degree = graph.rowptr.diff().clamp(min=1)
            grad = grad.to(acc) / degree.view(-1, *(1,) * (grad.dim() - 1))
        total[output.at] = total[output.at] + grad if output.at in total else grad
    return total


def _differentiable(
    passes: Passes, graph: Graph, seed: Tensor | None, inputs: tuple[Tensor, ...],
    chosen: tuple[Tensor | None, ...], needs: tuple[bool, ...], grads: tuple[Tensor, ...],
    acc: torch.dtype,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients in torch operations, for another derivative, or several at once."""
    plan, create_graph = passes.plan, torch.is_grad_enabled()
    keeps = {}
    for at in plan.kernel.reachable([output.at for output in plan.outputs]):
        if plan.kernel[at].op == 'keep' and plan.in_blocks:
            assert seed is not None
            edges = torch.arange(graph.num_edges, device=graph.col.device)
            keeps[at] = _blocks.kept(plan.kernel[at], edges, seed)
        elif plan.kernel[at].op == 'keep':
            (keeps[at],), _ = run_pass(passes.kept(at), graph, {}, acc, seed)
    # The forward pass has been cast already.
    with torch.enable_grad(), torch.autocast(graph.col.device.type, enabled=False):
        inputs = tuple(t.view_as(t) for t in inputs)  # One tensor may be several inputs.
        outs = unfused(plan, graph, inputs, keeps, chosen)
    wanted = [t for t, needed in zip(inputs, needs, strict=True) if needed]
    found = iter(torch.autograd.grad(
        outs, wanted, grads, create_graph=create_graph, allow_unused=True, materialize_grads=True,
    ))  # fmt: skip
    return [next(found) if needed else None for needed in needs]


def unfused(
    plan: Plan,
    graph: Graph,
    inputs: tuple[Tensor, ...],
    keeps: dict[int, Tensor] | None = None,
    chosen: tuple[Tensor | None, ...] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """The results of the kernels in torch operations, with tensors of the size of the edges.

    Args:
        plan (Plan): The plan.
        graph (Graph): The graph.
        inputs (tuple of Tensor): Inputs of the kernel.
        keeps (dict, optional): Factors of dropouts, by their place in the program.
            (default: :obj:`None`)
        chosen (tuple, optional): The edges that maxima and minima chose. (default: :obj:`None`,
            torch divides the gradient of a tie)
        dtype (torch.dtype, optional): The dtype to compute in. (default: :obj:`None`, that of the
            inputs)
    """
    kernel = plan.kernel
    col, row = ends_of(graph)
    ends = {'src': col, 'dst': row}
    known: dict[int, Tensor] = dict(keeps or {})
    for at in kernel.reachable([output.at for output in plan.outputs]):
        if kernel[at].op == 'load' and kernel[at].attrs[0] not in OF_DST:
            role, k = kernel[at].attrs
            x = (
                inputs[k]
                if dtype is None or not is_float(kernel[at].dtype)
                else inputs[k].to(dtype)
            )
            known[at] = x.index_select(0, ends[role]) if role in ends else x
    for at in plan.softmaxes:
        (score,) = kernel.evaluate(kernel[at].args[:1], known, dtype)
        own = getattr(torch, kernel[at].dtype) if dtype is None else dtype
        score = score.to(own).expand(col.size(0), *kernel[at].shape)
        known[at] = softmax(score, row, num_nodes=graph.num_dst)
    names = {'sum': 'sum', 'mean': 'mean', 'var': 'mean', 'max': 'amax', 'min': 'amin'}
    outs = []
    for k, output in enumerate(plan.outputs):
        at = plan.outputs[-2].at if output.reduce == 'var' else output.at
        (m,) = kernel.evaluate([at], known, dtype)
        m = m.expand(col.size(0), *kernel[output.at].shape)
        arg = None if chosen is None else chosen[k]
        if arg is not None:
            picked = m.gather(0, arg.clamp(min=0).long())
            outs.append(picked.masked_fill(arg < 0, 0))
            continue
        zero = m.new_zeros(graph.num_dst, *m.shape[1:])
        index = row.view(-1, *(1,) * (m.dim() - 1)).expand_as(m)
        if output.reduce == 'var':
            if dtype is None:
                m = m.to(getattr(torch, kernel[output.at].dtype))
            zero = zero.to(m.dtype)
            mean = zero.scatter_reduce(0, index, m, 'mean', include_self=False)
            m = (m - mean.index_select(0, row)).square()
        outs.append(zero.scatter_reduce(0, index, m, names[output.reduce], include_self=False))
    if dtype is None:
        pairs = zip(outs, plan.outputs, strict=True)
        outs = [out.to(getattr(torch, output.dtype)) for out, output in pairs]
    return outs


def run(
    passes: Passes, graph_of: Callable[[bool], Graph], args: tuple,
    named: dict[tuple[str, str], Tensor], seed: Tensor | None, only_read: bool,
) -> list[Tensor]:  # fmt: skip
    """The aggregated message, for the arguments of the captured function and its inputs of nodes
    and edges. `graph_of` makes the graph, with its transpose on request. The caller must not write
    into the result if that is `only_read`."""
    device = next(iter(named.values())).device.type
    if torch.is_autocast_enabled(device):  # The plan has its conversions.
        with torch.autocast(device, enabled=False):
            return run(passes, graph_of, args, named, seed, only_read)
    plan = passes.plan
    read = {
        at: args[name] if role == 'param' else named[role, name] for at, role, name in passes.reads
    }
    needs = None
    if torch.is_grad_enabled():
        leaves = {at for at, x in read.items() if x.requires_grad}
        if leaves:
            needs = tuple([not leaves.isdisjoint(each) for each in passes.leaves])
            # Autograd saves no tensor of inference mode; PyG saves the rows gathered of it.
            read = {at: x.clone() if x.is_inference() else x for at, x in read.items()}
    hoists = passes.prologue.ends if needs is not None else ()
    graph = graph_of(SRC in hoists or (needs is not None and passes.needs_transpose(needs)))
    values = passes.prologue(read, graph if hoists else None)
    # Here, so that the backward pass has the inputs of the graph of autograd.
    pairs = zip(values, plan.inputs, strict=False)
    inputs = [x if _is_readable(x, each.role) else x.contiguous() for x, each in pairs]
    if passes.weighted_sum is not None:
        outs = [product_of(passes.weighted_sum, graph, inputs, plan.outputs[0].dtype)]
    elif needs is not None and True in needs:
        only_read = only_read or plan.tail is not None
        outs = list(FusedMessage.apply(passes, graph, seed, needs, only_read, *inputs))
    else:
        outs, _, _ = _forward(passes, (), graph, passes.by_role(inputs), passes.acc, seed)
    return finished(passes, outs, values, graph.rowptr)


def finished(
    passes: Passes, outs: list[Tensor], values: Sequence[Tensor], rowptr: Tensor
) -> list[Tensor]:
    """The aggregated message, from the results of the kernels and the values of the prologue."""
    plan = passes.plan
    if plan.tail is not None:
        *others, out = outs
        out, weight = out.flatten(1), values[len(plan.inputs)].to(out.dtype)
        other = others[0].flatten(1) if others else None
        if plan.tail.heads > 1:
            out = head_map(out, weight, plan.tail.heads, other=other)
        else:
            out = out @ weight if other is None else torch.addmm(other, out, weight)
        if plan.tail.bias is not None:
            bias = values[-1]
            degree = rowptr.diff().unsqueeze(1)
            if plan.outputs[0].reduce == 'mean':
                degree = degree.clamp(max=1)
            out = out + bias * degree.to(out.dtype)
        outs = [out.view(-1, *plan.tail.shape)]
    if 'var' in plan.reduces:
        sums = dict(zip(sums_of(plan.reduces), outs, strict=True))
        outs = [sums[reduce] for reduce in plan.reduces]
    return [out.to(passes.dtype) for out in outs]


def _is_readable(x: Tensor, role: str) -> bool:
    """Whether kernels read a tensor as it is: on CUDA they take rows of nodes at any distance."""
    if x.is_contiguous():
        return True
    return x.is_cuda and role in NODES and x.detach()[0].is_contiguous()


def product_of(how: WeightedSum, graph: Graph, inputs: list[Tensor], dtype: str) -> Tensor:
    x = inputs[how.x]
    weight = None if how.weight is None else inputs[how.weight].reshape(-1)
    op = SparseOperator(graph, weight, mean=how.mean)
    rows = x.reshape(x.size(0), -1).contiguous()
    out = product(op, rows, out_acc=rows.dtype != getattr(torch, dtype))
    return out.view(-1, *x.shape[1:])
