"""The derivative of a message with linear maps of values computed for each edge."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._gradients import cotangents_of, differentiate, example, sum_cotangents
from ._ir import DST_ROLES, EDGE, Program, Refused, is_float
from ._parse import Parser
from ._plan import Plan
from ._trace import EDGES, trace

# In a program of the derivative: the value of a map, and the gradient of its input.
_VALUE, _BACK = 'map', 'back'


class _Map(NamedTuple):
    """A linear map in the message."""

    at: int
    x: int
    weight: int  # the parameter, or its transpose
    slot: int  # number of the parameter among the inputs
    transposed: bool


class MapGradients(NamedTuple):
    """The program of the gradients, and the position of the gradient by each input, or None. That
    by the parameter of maps is the sum of `outer` products of two values of each edge, one for each
    map, which a pass adds up."""

    program: Program
    of: tuple[int | None, ...]


def derive_maps(p: Plan) -> MapGradients:
    """The derivative of a message by its inputs.

    Torch derives what lies between the maps: there the value of a map is an input, and the input of
    a map a result.

    Raises:
        Refused: If another operation reads a parameter of a map, or torch's derivative has an
            operation that the program lacks.
    """
    maps, loads, constants = _parts_of(p)
    floats = [k for k, at in loads.items() if is_float(p.message[at].dtype)]
    traced, positions = _trace_between(p, maps, loads, [loads[k] for k in floats], constants)
    new = _Joined(p.message, traced, maps, positions[len(floats) :])
    of: list[int | None] = [None] * len(p.inputs)
    for k, at in zip(floats, positions, strict=False):
        of[k] = new.copy(at)
    factors: dict[int, list[int]] = {}  # of outer products, by parameter
    for number, each in enumerate(maps):
        x, grad = new.forward(each.x), new.copy(positions[len(floats) + number])
        factors.setdefault(each.slot, []).extend((grad, x) if each.transposed else (x, grad))
    for slot, args in factors.items():
        one = p.inputs[slot]
        of[slot] = new.program.add('outer', args, (), one.shape, one.dtype, EDGE)
    return MapGradients(new.program, tuple(of))


def derive_dots(p: Plan) -> tuple[Program, tuple[int, ...]]:
    """For each softmax of a message, its value times the gradient of that: a pass sums them.

    Raises:
        Refused: As :func:`derive_maps`.
    """
    maps, loads, constants = _parts_of(p)
    softmaxes = list(p.softmaxes)
    traced, positions = _trace_between(p, maps, loads, softmaxes, constants, of_softmaxes=True)
    new = _Joined(p.message, traced, maps, positions[len(softmaxes) :])
    return new.program, tuple([new.copy(at) for at in positions[: len(softmaxes)]])


def _parts_of(p: Plan) -> tuple[list[_Map], dict[int, int], list[int]]:
    """The maps of a message, its loads by the number of the input, and what gets no gradient."""
    message = p.message
    order = message.reachable([output.at for output in p.outputs])
    maps = _find_maps(message, order)
    weights = {each.slot for each in maps}
    loads = {
        message[at].attrs[1]: at for at in order
        if message[at].op == 'load' and message[at].attrs[0] not in DST_ROLES
        and message[at].attrs[1] not in weights
    }  # fmt: skip
    constants = [
        at for at in order
        if message[at].op == 'keep'
        or (message[at].op == 'load' and message[at].attrs[0] in DST_ROLES)
    ]  # fmt: skip
    return maps, loads, constants


def _find_maps(message: Program, order: Sequence[int]) -> list[_Map]:
    maps: list[_Map] = []
    others: set[int] = set()  # what others than maps read
    for at in order:
        op, args, _, _, _ = message[at]
        others.update(args[:1] if op == 'mm' else () if op == 'permute' else args)
    for at in order:
        if message[at].op != 'mm':
            continue
        x, weight = message[at].args
        base, transposed = weight, message[weight].op == 'permute'
        if transposed:
            (base,) = message[weight].args
        if message[base].op != 'load' or message[base].attrs[0] != 'param':
            raise Refused('a matrix product by what is no parameter')
        if weight in others or base in others:
            raise Refused('a parameter that is read by more than maps')
        maps.append(_Map(at, x, weight, message[base].attrs[1], transposed))
    return maps


def _trace_between(
    p: Plan, maps: Sequence[_Map], loads: dict[int, int], leading: Sequence[int],
    constants: Sequence[int], of_softmaxes: bool = False,
) -> tuple[Program, list[int]]:  # fmt: skip
    """The gradients by the `leading` values, then by those of the maps. `constants` are factors of
    dropouts and statistics of softmaxes. With `of_softmaxes` these lead: their values times the
    gradients."""
    message, cotangents = p.message, cotangents_of(p)
    program = Program()
    examples, positions = [], []

    def add(at: int, *attrs: object) -> None:
        """Adds an argument of the traced function, with the shape of a value of the message."""
        value = message[at]
        dtype = 'float32' if is_float(value.dtype) else value.dtype
        examples.append(example(value.shape, dtype))
        positions.append(program.add('load', (), attrs, value.shape, value.dtype, EDGE))

    for at in loads.values():
        add(at, *message[at].attrs)
    for number, each in enumerate(maps):
        add(each.at, _VALUE, number)
    for at in constants:
        examples.append(example(message[at].shape, 'float32'))
        positions.append(program.add(*message[at], dependence=EDGE))
    dots = [] if of_softmaxes else [('dot', n, at) for n, at in enumerate(p.softmaxes)]
    for role, k, at in [*cotangents, *dots]:
        add(at, role, k)
    for number, each in enumerate(maps):
        add(each.x, _BACK, number)
    wanted = [*leading, *(each.at for each in maps)]
    leaves = [*loads.values(), *(each.at for each in maps), *constants]

    def derive(*args: Tensor) -> list[Tensor]:
        count = len(leaves) + len(cotangents) + len(dots)
        values = dict(zip(leaves, args, strict=False))
        given, backs = args[len(leaves) : count], args[count:]
        grads = _derive_between(p, maps, values, wanted, given, backs)
        for k, at in enumerate(leading if of_softmaxes else ()):
            grads[k] = grads[k] * values[at].detach()
        return grads

    graph = trace(derive, examples, derives=True)
    return program, Parser(program, EDGES[0]).read(graph, positions)


def _derive_between(
    p: Plan, maps: Sequence[_Map], values: dict[int, Tensor], wanted: Sequence[int],
    given: Sequence[Tensor], backs: Sequence[Tensor],
) -> list[Tensor]:  # fmt: skip
    """The derivatives at `wanted`, for what is `given`, gradients of results and the sum of each
    softmax times its gradient, and gradients `backs` of the inputs of maps."""
    outputs = list(dict.fromkeys(output.at for output in p.outputs))
    cotangents = cotangents_of(p)
    grads = sum_cotangents(cotangents, given[: len(cotangents)], outputs)
    grads += [-dot for dot in given[len(cotangents) :]]
    if len(given) > len(cotangents):
        outputs += p.softmaxes
    outputs += [each.x for each in maps]
    leaves, derivatives = differentiate(
        p.message, values, wanted, outputs, [*grads, *backs], torch.float32
    )
    return [
        leaf.new_zeros(leaf.shape) if grad is None else grad
        for leaf, grad in zip(leaves, derivatives, strict=True)
    ]


class _Joined:
    """The program of the derivative, with the maps."""

    def __init__(
        self, message: Program, traced: Program, maps: Sequence[_Map], grads: Sequence[int]
    ) -> None:
        self.message, self.traced, self.maps, self.grads = message, traced, maps, grads
        self.program = Program()
        self._forward: dict[int, int] = {}
        self._copied: dict[int, int] = {}

    def forward(self, at: int) -> int:
        """A value of the message."""
        return self.program.graft(self.message, at, self._forward)

    def copy(self, at: int) -> int:
        """A value of the traced derivative."""
        for each in self.traced.reachable([at], self._copied):
            op, args, attrs, shape, dtype = self.traced[each]
            if op == 'load' and attrs[0] == _VALUE:
                out = self.forward(self.maps[attrs[1]].at)
            elif op == 'load' and attrs[0] == _BACK:
                out = self._back(self.maps[attrs[1]], self.grads[attrs[1]])
            else:
                inner = [self._copied[arg] for arg in args]
                out = self.program.add(op, inner, attrs, shape, dtype, EDGE)
            self._copied[each] = out
        return self._copied[at]

    def _back(self, one: _Map, grad: int) -> int:
        """The gradient of the input of a map."""
        program, weight = self.program, self.forward(one.weight)
        if one.transposed:
            (weight,) = program[weight].args
        else:
            weight = program.permute(weight, (1, 0))
        shape, dtype = self.message[one.x].shape, self.message[one.at].dtype
        return program.add('mm', (self.copy(grad), weight), ('computed',), shape, dtype, EDGE)
