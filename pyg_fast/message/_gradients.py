"""The derivative of a planned message: torch's own formulas, traced into programs."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._ir import DST_ROLES, EDGE, POINTWISE, Program, Refused, is_float
from ._parse import Parser
from ._plan import Plan
from ._trace import EDGES, Like, trace


class Gradients(NamedTuple):
    """The derivative of a message.

    :obj:`program` loads the kernel's inputs, the gradients of its outputs, and for each softmax the
    sum of its values times their gradients. :obj:`of` has the position of the gradient by each
    input, or None. :obj:`local` are, in :obj:`local_program`, derivatives by inputs of the
    destination, if the gradients are products of these with the gradient of the only output.
    :obj:`dots` are, in :obj:`dot_program`, the products that the sums of the softmaxes add up, if
    a pass computes these.
    """

    program: Program
    of: tuple[int | None, ...]
    local_program: Program | None
    local: tuple[int | None, ...]
    dot_program: Program
    dots: tuple[int, ...]


def derive_gradients(p: Plan, by_results: bool) -> Gradients:
    """Derives the message by its inputs.

    Args:
        p: The plan.
        by_results: Whether the results tell the sums of softmaxes, as they are multiples of these.

    Raises:
        Refused: If an operation of the derivative has no kernel.
    """
    derivation = _Derivation(p)
    program, positions = derivation.trace('gradients')
    dot_program, dots = (Program(), []) if by_results else derivation.trace('dots')
    local_program = None
    local: list[int | None] = [None] * len(p.inputs)
    output = p.outputs[0]
    if len(p.outputs) == 1 and output.reduce in ('sum', 'mean') and _is_local(p.message, output.at):
        local_program, ones = derivation.trace('ones')
        size = math.prod(p.message[output.at].shape)
        local = [
            at if each.role == 'dst' and math.prod(each.shape) == size else None
            for at, each in zip(derivation.by_input(ones), p.inputs, strict=True)
        ]
    return Gradients(
        program, derivation.by_input(positions), local_program, tuple(local), dot_program,
        tuple(dots),
    )  # fmt: skip


class _Derivation:
    """Traces derivatives of a plan's message."""

    def __init__(self, p: Plan) -> None:
        self.plan, self.message = p, p.message
        self.outputs = list(dict.fromkeys(output.at for output in p.outputs))
        self.cotangents = cotangents_of(p)
        self.loads: dict[int, int] = {}  # positions of loads, by number of the input
        self.constants: list[int] = []  # positions that get no gradient
        for at in self.message.reachable(self.outputs):
            op, _, attrs, _, _ = self.message[at]
            if (op == 'load' and attrs[0] not in DST_ROLES) or op == 'lookup':
                self.loads[attrs[1]] = at
            elif op in ('load', 'keep'):
                self.constants.append(at)
        self.floats = [
            k for k, each in enumerate(p.inputs) if k in self.loads and is_float(each.dtype)
        ]

    def by_input(self, positions: list[int]) -> tuple[int | None, ...]:
        of = dict(zip(self.floats, positions, strict=True))
        return tuple(of.get(k) for k in range(len(self.plan.inputs)))

    def trace(self, kind: str) -> tuple[Program, list[int]]:
        """The `gradients` of the inputs, those for result gradients of one (`ones`), or the
        products of each softmax with its gradient (`dots`)."""
        program = Program(by_parts=True)
        examples, positions = [], []
        places: dict[int, int] = {}
        for at in [*self.loads.values(), *self.constants]:
            value = self.message[at]
            dtype = value.dtype if not is_float(value.dtype) else 'float32'
            examples.append(example(value.shape, dtype))
            if value.op == 'lookup':
                positions.append(program.graft(self.message, at, places))
            else:
                positions.append(program.add(*value, dependence=EDGE))
        dots = [('dot', n, at) for n, at in enumerate(self.plan.softmaxes)]
        for role, k, at in [*self.cotangents, *dots]:
            shape = self.message[at].shape
            examples.append(example(shape, 'float32'))
            positions.append(program.add('load', (), (role, k), shape, 'float32', EDGE))
        graph = trace(lambda *args: self._derive(kind, args), examples, derives=True)
        return program, Parser(program, EDGES[0]).read(graph, positions)

    def _derive(self, kind: str, args: Sequence[Tensor]) -> list[Tensor]:
        """The function that is traced."""
        values = dict(zip([*self.loads.values(), *self.constants], args, strict=False))
        given = args[len(values) : len(values) + len(self.cotangents)]
        parts = [torch.ones_like(grad) if kind == 'ones' else grad for grad in given]
        grads = sum_cotangents(self.cotangents, parts, self.outputs)
        outputs = list(self.outputs)
        if kind == 'gradients':  # What the sum in a softmax adds to the gradients of scores.
            outputs += self.plan.softmaxes
            grads += [-dot for dot in args[len(values) + len(given) :]]
        softmaxes = list(self.plan.softmaxes)
        wanted = softmaxes if kind == 'dots' else [self.loads[k] for k in self.floats]
        leaves, derivatives = differentiate(
            self.message, values, wanted, outputs, grads, torch.float32
        )
        if kind != 'dots' and all(grad is None for grad in derivatives):
            raise Refused('a message whose derivative is zero')
        full = [
            torch.zeros_like(leaf) if grad is None else grad
            for leaf, grad in zip(leaves, derivatives, strict=True)
        ]
        if kind == 'dots':
            return [grad * leaf for grad, leaf in zip(full, leaves, strict=True)]
        return full


def differentiate(
    program: Program, values: dict[int, Tensor], wanted: Sequence[int], outputs: Sequence[int],
    grads: Sequence[Tensor], dtype: torch.dtype | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """The values at `wanted`, and the derivatives by them of `outputs` with the gradients `grads`.
    `values` holds the loads, and gets the values at `wanted`."""
    # The forward pass has been cast already.
    with torch.enable_grad(), torch.autocast(grads[0].device.type, enabled=False):
        for at in wanted:
            if at not in values:
                (values[at],) = program.evaluate([at], values, dtype)
            values[at] = values[at].detach().requires_grad_()
        leaves = [values[at] for at in wanted]
        pairs = [
            (x if x.shape == grad.shape else x.expand(grad.shape), grad.to(x.dtype))
            for x, grad in zip(program.evaluate(outputs, values, dtype), grads, strict=True)
            if x.requires_grad
        ]
        if not pairs:
            return leaves, [None] * len(leaves)
        results, seeds = zip(*pairs, strict=True)
        return leaves, list(torch.autograd.grad(results, leaves, seeds, allow_unused=True))


def cotangents_of(p: Plan) -> list[tuple[str, int, int]]:
    """The role, output number and position of each gradient that a backward pass loads: `grad` is
    the gradient of all sums of a value together, `picked` that of a maximum or minimum, which goes
    to the edge that it chose. The gradient of a value that is not reduced is an input of edges,
    numbered after all others."""
    out: list[tuple[str, int, int]] = []
    for k, output in enumerate(p.outputs):
        if output.reduce == 'edge':
            out.append(('edge', len(p.inputs) + k, output.at))
        elif output.reduce in ('max', 'min'):
            out.append(('picked', k, output.at))
        elif ('grad', output.at) not in [(role, at) for role, _, at in out]:
            out.append(('grad', k, output.at))
    return out


def sum_cotangents(
    cotangents: Sequence[tuple[str, int, int]], grads: Sequence[Tensor], outputs: Sequence[int]
) -> list[Tensor]:
    """The gradient of each output, of all its reductions."""
    out = []
    for at in outputs:
        parts = [grad for (_, _, of), grad in zip(cotangents, grads, strict=True) if of == at]
        out.append(sum(parts[1:], parts[0]))
    return out


def _is_local(p: Program, output: int) -> bool:
    """Whether the derivative by an input of the destination, of the result's size, is a factor of
    each edge: no number of the result mixes several numbers of that input."""
    return not any(p[at].op == 'softmax' for at in p.reachable([output])) and all(
        p[at].op in POINTWISE or p[at].op in ('load', 'const', 'keep', 'view', 'expand')
        or not _from_dst(p, at)
        for at in p.reachable([output])
    )  # fmt: skip


def _from_dst(p: Program, output: int) -> bool:
    return any(p[at].op == 'load' and p[at].attrs[0] == 'dst' for at in p.reachable([output]))


def example(shape: tuple[int, ...], dtype: str) -> Like:
    """Values of edges that a derivative is traced with."""
    return Like((EDGES[0], *shape), getattr(torch, dtype))
