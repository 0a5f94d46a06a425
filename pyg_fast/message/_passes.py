"""The passes of a plan, generated when they are first needed."""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from ..sparse.graph import Graph
from ._cpu import check_maps, encode
from ._cuda import Recipe, Tile, choose_tile, choose_wide_tiles, most_programs
from ._gradients import Gradients, cotangents_of, derive_gradients
from ._instructions import CpuCode
from ._ir import EDGE, NODES, Inputs, Load, Program, Refused, is_float
from ._map_gradients import MapGradients, derive_dots, derive_maps
from ._plan import Plan, weighted_sum
from ._prologue import AfterReductions, Prologue
from ._softmax import is_multiple
from ._tiles import TileSource, generate_tiles
from ._triton import Out, generate

_TRITON_DTYPES = {torch.float64: 'tl.float64', torch.float32: 'tl.float32'}
# Passes share values of edges where that saves gathers of more than so many numbers of each edge.
_GATHERED = 64
# Of a table with up to so many rows a pass sums the gradient itself, a row after another.
_FEW_ROWS = 16


class _HasCache(Protocol):
    _cache: dict[Hashable, Any]


_Owner = TypeVar('_Owner', bound=_HasCache)
_Args = ParamSpec('_Args')
_Result = TypeVar('_Result')


def _memoize(
    method: Callable[Concatenate[_Owner, _Args], _Result],
) -> Callable[Concatenate[_Owner, _Args], _Result]:
    """Keeps a method's results in the `_cache` of its object, by the arguments."""
    name = method.__name__

    @wraps(method)
    def call(self: _Owner, *args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        key = (name, args, *kwargs.values()) if kwargs else (name, args)
        if key not in self._cache:
            self._cache[key] = method(self, *args, **kwargs)
        found: _Result = self._cache[key]
        return found

    return call


@dataclass(eq=False)
class Pass:
    """One walk over the rows of destinations (`dst`) or of sources (`src`)."""

    program: Program
    outs: tuple[Out, ...]
    row_role: str
    in_blocks: bool = False  # by torch's operators in place of a kernel
    in_tiles: bool = False  # by a kernel over tiles of edges
    _cache: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the rows of its results."""
        return [self.program[out.at].shape for out in self.outs]

    @_memoize
    def recipe(self, acc: torch.dtype) -> Recipe:
        """The Triton kernel. Raises :class:`Refused`."""
        source = generate(self.program, list(self.outs), self.row_role, _TRITON_DTYPES[acc])
        most = most_programs(self.program, self.outs, source)
        dtypes = [acc if out.dtype == 'acc' else getattr(torch, out.dtype) for out in self.outs]
        nodes = [load for load in source.loads if load[0] in NODES]
        tables = [load for load in source.loads if load[0] == 'table']

        def recipe(tile: Tile, wide: Recipe | None) -> Recipe:
            num_tiles = -(-source.sizes[0] // tile.columns[0]) if source.tiled else 1
            return Recipe(source, tile, num_tiles, most, self.shapes, dtypes, nodes, tables, wide)

        wide: Recipe | None = None
        for tile in reversed(choose_wide_tiles(source)):
            wide = recipe(tile, wide)
        return recipe(choose_tile(source), wide)

    @property
    def compares(self) -> bool:
        """Whether a maximum or minimum compares its values, or chose the edges."""
        return self._compares()

    @_memoize
    def _compares(self) -> bool:
        return any(out.kind in ('max', 'min') for out in self.outs) or any(
            value.op == 'load' and value.attrs[0] == 'picked' for value in self.program.values
        )

    @_memoize
    def tiles(self, precision: str) -> TileSource:
        """The Triton kernel over tiles of edges. Raises :class:`Refused`."""
        return generate_tiles(self.program, self.outs, precision)

    def check_tiles(self, on_cuda: bool) -> None:
        """Raises :class:`Refused` if tiles cannot compute the pass."""
        if on_cuda:
            self.tiles('highest')
        else:
            check_maps(self.program, self.outs, torch.float32)

    def fitting(self) -> 'list[Pass]':
        """The pass, or one for each result if their shapes do not fit together."""
        if len(self.outs) > 1:
            try:
                self.recipe(torch.float32)
            except Refused:
                return [Pass(self.program, (out,), self.row_role) for out in self.outs]
        return [self]

    @_memoize
    def first_value_pass(self) -> 'Pass':
        """The pass of the first message of each row, the origin of a variance."""
        return Pass(self.program, (Out(self.outs[-1].at, 'sum', 'acc'),), self.row_role)

    @_memoize
    def moments_pass(self) -> 'Pass':
        """The pass with the first and second moment about the row's first message, in place of the
        variance."""
        program, at = Program(), self.outs[-1].at
        places: dict[int, int] = {}
        outs = [out._replace(at=program.graft(self.program, out.at, places)) for out in self.outs]
        origin = program.load_statistic('first', 0, self.program[at].shape)
        away = program.pointwise('sub', outs.pop().at, origin)
        square = program.pointwise('mul', away, away)
        outs += [Out(away, 'mean', 'acc'), Out(square, 'mean', 'acc')]
        return Pass(program, tuple(outs), self.row_role)

    def code_for(self, acc: torch.dtype, inputs: Inputs) -> CpuCode:
        """The CPU code for these inputs."""
        key = (acc, *inputs, *[x.dtype for x in inputs.values()])
        code: CpuCode | None = self._cache.get(key)
        if code is None:
            acc = torch.float64 if acc == torch.float64 else torch.float32
            dtypes = {load: x.dtype for load, x in inputs.items()}
            code = self._cache[key] = self.code(acc, frozenset(dtypes.items()))
        return code

    @_memoize
    def code(self, acc: torch.dtype, dtypes: frozenset[tuple[Load, torch.dtype]]) -> CpuCode:
        """The CPU code for inputs of `dtypes`. Raises :class:`Refused`."""
        return encode(self.program, self.outs, self.row_role, acc, dict(dtypes))


class GradientPass(NamedTuple):
    """A pass of the backward pass. Its results are gradients, each of the inputs that
    :obj:`targets` lists for it, and then values of edges for the next pass, which reads them as
    the loads :obj:`shared`."""

    pass_: Pass
    targets: tuple[tuple[int, ...], ...]
    shared: tuple[Load, ...] = ()


class Backward(NamedTuple):
    """How a plan computes the gradients of the inputs that need one.

    The forward pass sums the derivatives by the inputs :obj:`local`, which are destinations' own;
    :obj:`passes` compute all other gradients.
    """

    local: tuple[int, ...]
    passes: tuple[GradientPass, ...]
    needs_transpose: bool  # whether a pass walks the rows of sources


class Passes:
    """The passes of a plan, generated when they are first needed."""

    def __init__(self, plan: Plan, of: 'Passes | None' = None) -> None:
        """:obj:`of` are the passes of the forward pass, if this plan is one of gradients alone."""
        self.plan = plan
        self._cache: dict[Hashable, Any] = {}
        prologue, message, tail = plan.prologue, plan.message, plan.tail
        self.wanted = [each.at for each in plan.inputs]
        if tail is not None:
            self.wanted += [at for at in (tail.weight, tail.bias) if at is not None]
        loads = {
            at: prologue[at].attrs
            for at in prologue.reachable(self.wanted) if prologue[at].op == 'load'
        }  # fmt: skip
        # Of inputs: position, role and name. And of those that the message gathers from itself, and
        # that must have a row for each node: position and end of the edge.
        self.reads = [(at, (attrs[0], *attrs[2:])[-1], attrs[1]) for at, attrs in loads.items()]
        self.gathers = [(at, attrs[0]) for at, attrs in loads.items() if attrs[2:]]
        self.prologue = Prologue(prologue, self.wanted)
        self.after = None if plan.rows is None else AfterReductions(plan.rows)
        self.acc: torch.dtype = getattr(torch, plan.acc)
        self.dtype: torch.dtype = getattr(torch, plan.dtype)
        self.dtypes: list[torch.dtype] = [getattr(torch, each.dtype) for each in plan.outputs]
        self.loads = [(each.role, k) for k, each in enumerate(plan.inputs)]
        # For each softmax, whether the message is a multiple of it.
        self.multiples = [is_multiple(message, plan.outputs, at) for at in plan.softmaxes]
        self.sums_locally = of is None  # whether the forward pass sums derivatives
        self.derives_twice = False  # whether a backward pass ran with create_graph=True
        if of is not None:
            self.multiples = of.multiples
        self.may_keep_maps = plan.may_keep_maps  # found once: it is asked at every call
        self.multiplies_in_tiles = tuple(map(plan.multiplies_in_tiles, (False, True)))
        self.has_variance = plan.outputs[-1].reduce == 'var'
        # The results that the backward pass reads: all multiples of a softmax, or the mean that
        # belongs to a variance.
        count = len(plan.outputs)
        self.saved_results: Sequence[int] = [count - 2] if self.has_variance else ()
        if any(self.multiples):
            self.saved_results = range(count)
        # The arguments of the captured function that get a gradient through each input of the
        # kernel: none if the results only compare it.
        derived = {
            message[at].attrs[:2] for each in plan.outputs for at in message.leaves(each.at)
        }  # fmt: skip
        self.leaves = [
            prologue.leaves(each.at) if load in derived else set()
            for each, load in zip(plan.inputs, self.loads, strict=True)
        ]
        self.weighted_sum = weighted_sum(plan) if of is None else None
        self.num_written = plan.num_written  # first results, which attributes hold
        # The inputs through which each result gets a gradient, and whether these differ.
        self.leaves_of_results = [
            {message[at].attrs[:2] for at in message.leaves(each.at)} for each in plan.outputs
        ]
        self.leaves_differ = any(
            each != self.leaves_of_results[0] for each in self.leaves_of_results
        )

    @_memoize
    def without_gradient(self, needs: tuple[bool, ...]) -> tuple[int, ...]:
        """The results through which no gradient flows to the inputs that need one."""
        loads = {load for load, needed in zip(self.loads, needs, strict=True) if needed}
        results = enumerate(self.leaves_of_results)
        return tuple([k for k, leaves in results if loads.isdisjoint(leaves)])

    @_memoize
    def without(self, unused: tuple[int, ...]) -> 'Passes':
        """The passes of the gradients where these outputs get none."""
        outputs = [each for k, each in enumerate(self.plan.outputs) if k not in unused]
        return Passes(self.plan._replace(outputs=tuple(outputs)), self)

    def by_load(self, inputs: Sequence[Tensor]) -> Inputs:
        """The inputs of the kernel by role and number."""
        return dict(zip(self.loads, inputs, strict=True))

    @property
    def gradients(self) -> Gradients:
        return self._derive()

    @_memoize
    def _derive(self) -> Gradients:
        return derive_gradients(self.plan, all(self.multiples))

    @_memoize
    def forward_passes(self, local: tuple[int, ...], cuda: bool) -> list[Pass]:
        """The passes of the results, then of the derivatives by `local` inputs: one, or one for
        each result if their shapes do not fit together."""
        whole = self._forward_pass(local)
        in_rows = not (self.plan.in_blocks or self.plan.in_tiles or self.has_variance)
        if not cuda or len(self.plan.outputs) < 2 or not in_rows:
            return [whole]
        return whole.fitting()

    def _forward_pass(self, local: tuple[int, ...]) -> Pass:
        plan, program = self.plan, Program()
        outputs = list(plan.outputs)
        if self.has_variance:  # Its result has the mean, and it reads the message itself.
            del outputs[-2]
            outputs[-1] = outputs[-1]._replace(at=plan.outputs[-2].at)
        places: dict[int, int] = {}
        outs = [
            Out(
                program.graft(plan.message, output.at, places), output.reduce,
                'acc' if any(self.multiples) else output.dtype,
            )
            for output in outputs
        ]  # fmt: skip
        places = {}
        for k in local:
            source, at = self.gradients.local_program, self.gradients.local[k]
            assert source is not None
            assert at is not None
            outs.append(Out(program.graft(source, at, places), 'sum', 'acc'))
        return Pass(program, tuple(outs), 'dst', plan.in_blocks, plan.in_tiles)

    @_memoize
    def backward(self, needs: tuple[bool, ...]) -> Backward:
        """How the gradients are computed, by which inputs need one."""
        if self.weighted_sum is not None:
            return Backward((), (), needs[self.weighted_sum.x])
        if self.plan.in_blocks or not any(needs):
            return Backward((), (), False)
        if self.plan.in_tiles:
            return self._backward_in_tiles(needs)
        derived = enumerate(self.gradients.local)
        local: tuple[int, ...] = ()
        if self.sums_locally:
            local = tuple([k for k, at in derived if at is not None and needs[k]])
        passes = self._gradient_passes(needs, local)
        roles = [each.pass_.row_role for each in passes]
        if roles == ['dst', 'src']:
            used = len(self.plan.inputs) + self.num_written
            passes = share_edge_values(passes[0], passes[1], used)
        return Backward(local, tuple(passes), 'src' in roles)

    def _backward_in_tiles(self, needs: tuple[bool, ...]) -> Backward:
        """Passes over tiles, and sums over sources of gradients of edges; none if tiles cannot
        compute a gradient: blocks do."""
        passes: list[GradientPass] = []
        if self.map_gradients is not None:
            with suppress(Refused):
                passes = self._tile_passes(needs, *self.map_gradients)
        pairs = zip(self.plan.inputs, needs, strict=True)
        # Also where blocks compute these: tiles may, once a kept value turns out to be unused.
        return Backward((), tuple(passes), any(one.role == 'src' and need for one, need in pairs))

    @property
    def repeats_wide_maps(self) -> bool:
        """Whether the backward pass of tiles has more products than PyG's code, of wide values."""
        return self._repeats_wide_maps()

    @_memoize
    def _repeats_wide_maps(self) -> bool:
        return self.plan.repeats_work and self.plan.has_wide_maps

    @property
    def map_gradients(self) -> MapGradients | None:
        """The derivative for passes over tiles, None if these cannot compute it."""
        return self._derive_maps()

    @_memoize
    def _derive_maps(self) -> MapGradients | None:
        with suppress(Refused):
            found = derive_maps(self.plan)
            if not all(self.multiples):
                self._derive_dots()
            return found
        return None

    @_memoize
    def _derive_dots(self) -> list[Pass]:
        """For each softmax of tiles, the pass of the sum of its values times their gradients."""
        program, dots = derive_dots(self.plan)
        passes = [Pass(program, (Out(at, 'sum', 'acc'),), 'dst', in_tiles=True) for at in dots]
        for each in passes:
            each.check_tiles(self.plan.on_cuda)
        return passes

    def _tile_passes(
        self, needs: tuple[bool, ...], program: Program, of: tuple[int | None, ...]
    ) -> list[GradientPass]:
        count = len(self.plan.inputs) + self.num_written
        by_edge: dict[Out, list[int]] = {}
        totals: dict[Out, list[int]] = {}
        # By the stored gradient of edges that a pass of its own sums: the dtype, and the inputs.
        by_row: dict[str, dict[tuple[int, str], list[int]]] = {'dst': {}, 'src': {}}
        for k, (each, at) in enumerate(zip(self.plan.inputs, of, strict=True)):
            if not needs[k] or at is None:
                continue
            # On a GPU tiles sum slower than a pass that reads what they stored.
            if each.role == 'src' or (each.role == 'dst' and self.plan.on_cuda):
                by_row[each.role].setdefault((at, each.dtype), []).append(k)
            elif each.role == 'param':
                totals.setdefault(Out(at, 'total', 'acc'), []).append(k)
            else:
                kind = 'edge' if each.role == 'edge' else 'sum'
                by_edge.setdefault(Out(at, kind, each.dtype), []).append(k)
        stored = [*dict.fromkeys([*by_row['dst'], *by_row['src']])]
        shared = tuple([('edge', count + k) for k in range(len(stored))])
        outs = [*by_edge, *totals, *(Out(at, 'edge', dtype) for at, dtype in stored)]
        if not outs:
            return []
        first = Pass(program, tuple(outs), 'dst', in_tiles=True)
        first.check_tiles(self.plan.on_cuda)
        into = tuple(map(tuple, [*by_edge.values(), *totals.values()]))
        passes, sums = [GradientPass(first, into, shared)], Program()
        loads = {
            (at, dtype): sums.add('load', (), load, program[at].shape, dtype, EDGE)
            for load, (at, dtype) in zip(shared, stored, strict=True)
        }
        for role, inputs in by_row.items():
            for one, ks in inputs.items():
                pass_ = Pass(sums, (Out(loads[one], 'sum', one[1]),), role)
                passes.append(GradientPass(pass_, (tuple(ks),)))
        return passes

    def _gradient_passes(
        self, needs: tuple[bool, ...], local: tuple[int, ...]
    ) -> list[GradientPass]:
        by_role: dict[str, list[int]] = {'src': [], 'dst': [], 'edge': [], 'param': [], 'table': []}
        for k, each in enumerate(self.plan.inputs):
            if needs[k] and self.gradients.of[k] is not None and k not in local:
                by_role[each.role].append(k)
        rows = {'dst': by_role['dst'], 'src': by_role['src']}
        # Gradients of edges and parameters need what any pass computes for each edge. The edges of
        # a destination are consecutive, and read its gradient once.
        of_edges = [*by_role['edge'], *by_role['param'], *by_role['table']]
        rows['dst' if rows['dst'] else 'src'] += of_edges
        passes: list[GradientPass] = []
        for role, inputs in rows.items():
            by_out: dict[Out, list[int]] = {}
            for k in inputs:
                by_out.setdefault(self._gradient_out(k), []).append(k)
            if inputs:
                passes += self._split_pass(by_out, role)
        return passes

    def _gradient_out(self, k: int) -> Out:
        at, (role, _, _, dtype) = self.gradients.of[k], self.plan.inputs[k]
        assert at is not None
        if role == 'param':
            return Out(at, 'total', 'acc')
        if role == 'table' and (by_row := self._by_row_of_table(k, at)) is not None:
            return Out(by_row, 'total', 'acc')
        return Out(at, 'edge' if role in ('edge', 'table') else 'sum', dtype)

    def _by_row_of_table(self, k: int, at: int) -> int | None:
        """The gradient of a row, for each row of a small table zero but for that of the edge; None
        for other tables, whose gradients are summed after the pass."""
        program, count = self.gradients.program, self.plan.inputs[k].shape[0]
        lookup = self.plan.lookup(k)
        (index,), wraps = lookup.args, lookup.attrs[-1]
        shape = program[at].shape
        if count > _FEW_ROWS or wraps or self.plan.message[index].shape:
            return None
        row = program.graft(self.plan.message, index, {})
        rank = 1 + len(shape)
        rows = program.cat(
            [program.view(program.const(n, 0, 'int64'), (1,) * rank) for n in range(count)], 0
        )
        own = program.pointwise('eq', program.view(row, (1,) * rank), rows)
        grad = program.view(at, (1, *shape))
        zero = program.const(0, rank, program[at].dtype)
        return program.pointwise('where', own, grad, zero, dtype=program[at].dtype)

    def _split_pass(self, by_out: dict[Out, list[int]], role: str) -> list[GradientPass]:
        """One pass, or one for each result if their shapes do not fit together."""
        passes = Pass(self.gradients.program, tuple(by_out), role).fitting()
        return [
            GradientPass(each, tuple([tuple(by_out[out]) for out in each.outs])) for each in passes
        ]

    def prepare_backward(self, needs: tuple[bool, ...], graph: Graph, inputs: Inputs) -> None:
        """Generates the kernels of the backward pass: it cannot fall back any more."""
        key = ('prepared', needs, graph.col.is_cuda)
        if not any(needs) or self.plan.in_blocks or self.plan.in_tiles or key in self._cache:
            return
        count, passes, acc = len(self.plan.softmaxes), self.backward(needs).passes, self.acc
        dots = [self.dot_pass(n) for n in range(count) if not self.multiples[n]]
        dtypes = {load: x.dtype for load, x in inputs.items()}
        dtypes |= dict.fromkeys(itertools.product(('most', 'scale', 'dot'), range(count)), acc)
        for role, k, _ in cotangents_of(self.plan):
            if role == 'edge':
                output = self.plan.outputs[k - len(self.plan.inputs)]
                dtypes['edge', k] = getattr(torch, output.dtype)
                continue
            dtypes['grad', k] = acc
            if role == 'picked':
                dtypes['arg', k] = graph.rowptr.dtype
        dtypes |= {load: acc for each in passes for load in each.shared}
        for pass_ in [*dots, *(each.pass_ for each in passes)]:
            if graph.col.is_cuda:
                pass_.recipe(acc)
            else:
                pass_.code(acc, frozenset(dtypes.items()))
        self._cache[key] = True

    @_memoize
    def softmax_pass(self, n: int) -> Pass:
        """The pass of the largest score and of the sum of exponentials."""
        message, program = self.plan.message, Program()
        score = program.graft(message, message[self.plan.softmaxes[n]].args[0], {})
        return Pass(program, (Out(score, 'softmax', 'acc'),), 'dst')

    @_memoize
    def softmax_passes_in_blocks(self, n: int) -> tuple[Pass, Pass]:
        """The passes of the largest score, and of the sum of exponentials, over blocks of edges."""
        message, largest, sums = self.plan.message, Program(), Program()
        score, most, _ = message[self.plan.softmaxes[n]].args
        places: dict[int, int] = {}
        away = sums.pointwise(
            'sub', sums.graft(message, score, places), sums.graft(message, most, places)
        )
        outs = [
            (largest, Out(largest.graft(message, score, {}), 'max', 'acc')),
            (sums, Out(sums.pointwise('exp', away), 'sum', 'acc')),
        ]
        first, second = (Pass(program, (out,), 'dst', True) for program, out in outs)
        return first, second

    @_memoize
    def joint_pass(self, cuda: bool, keeps: bool = True, copies: bool = False) -> Pass | None:
        """The pass of a softmax together with sums of its multiples, if the results are such.

        Args:
            cuda: Whether a GPU runs it.
            keeps: Whether the backward pass reads the sums as they are before rounding.
            copies: Whether it reads tensors of its own. On a GPU the pass writes these, as it does
                sums before rounding; they follow the results.
        """
        plan, message = self.plan, self.plan.message
        sums = all(output.reduce == 'sum' for output in plan.outputs)
        if not sums or self.multiples != [True] or plan.in_blocks:
            return None
        program, places = Program(), dict[int, int]()
        score = program.graft(message, message[plan.softmaxes[0]].args[0], places)
        outs = [Out(score, 'softmax', 'acc')]
        ats = [program.graft(message, o.at, places, joint=True) for o in plan.outputs]
        given = [output.dtype for output in plan.outputs]
        rounds = any(getattr(torch, dtype) != self.acc for dtype in given)
        before_rounding = ['acc'] * len(ats)
        written = [given if cuda else before_rounding]
        if cuda and keeps and (copies or rounds):
            written.append(before_rounding)
        for dtypes in written:
            outs += [Out(at, 'weighted', dtype) for at, dtype in zip(ats, dtypes, strict=True)]
        pass_ = Pass(program, tuple(outs), 'dst')
        with suppress(Refused):
            if cuda:
                pass_.recipe(self.acc)
            return pass_
        return None

    @_memoize
    def dot_pass(self, n: int) -> Pass:
        """The pass of the sum of a softmax's values times their gradients."""
        if self.plan.in_tiles:
            return self._derive_dots()[n]
        grads = self.gradients
        return Pass(grads.dot_program, (Out(grads.dots[n], 'sum', 'acc'),), 'dst')

    @_memoize
    def dropout_pass(self, at: int) -> Pass:
        """The pass of the factors of a dropout."""
        return Pass(self.plan.message, (Out(at, 'edge', 'acc'),), 'dst')


def share_edge_values(dst: GradientPass, src: GradientPass, num_inputs: int) -> list[GradientPass]:
    """The passes over destinations and over sources. The second one reads values of edges that the
    first one stores, where to compute them again it would gather many more numbers of each edge."""
    program, outs = dst.pass_.program, [out.at for out in src.pass_.outs]
    computed = set(program.reachable(out.at for out in dst.pass_.outs))
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
        is_narrow = 4 * math.prod(shape) <= width and is_float(dtype)
        if at in computed and is_narrow and op not in ('load', 'const'):
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
    shared = tuple(('edge', num_inputs + k) for k in range(len(cut)))
    for at, load in zip(cut, shared, strict=True):
        places[at] = new.add('load', (), load, program[at].shape, 'float32', EDGE)
    read = tuple(out._replace(at=new.graft(program, out.at, places)) for out in src.pass_.outs)
    stored = tuple(Out(at, 'edge', 'acc') for at in cut)
    return [
        GradientPass(Pass(program, dst.pass_.outs + stored, 'dst'), dst.targets, shared),
        GradientPass(Pass(new, read, 'src'), src.targets),
    ]
