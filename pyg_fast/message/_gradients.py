"""The derivative of a planned message."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._ir import (
    EDGE,
    OF_DST,
    POINTWISE,
    Program,
    is_float,
)
from ._parse import EDGES, Parser
from ._plan import Plan
from ._trace import Like, trace


class Gradients(NamedTuple):
    """The derivative of a message.

    :obj:`program` has the loads of the kernel's inputs, then those of the gradients of its
    :obj:`outputs`, and for each softmax the sum of its values times their gradients. :obj:`of` has
    a position for each input, or None. :obj:`local` are derivatives by inputs of the destination,
    if these are products with the gradient of the only output. :obj:`dots` are, in
    :obj:`dot_program`, the products that the sums of the softmaxes add up, if any is needed.
    """

    program: Program
    of: tuple[int | None, ...]
    local_program: Program | None
    local: tuple[int | None, ...]
    dot_program: Program
    dots: tuple[int, ...]


def gradients(p: Plan) -> Gradients:
    """Derives the message by its inputs: torch's own formulas, traced."""
    kernel, outputs = p.kernel, [output.at for output in p.outputs]
    distinct = list(dict.fromkeys(outputs))
    # The gradient of a value: of all its sums together, and of each maximum and minimum.
    cotangents = cotangents_of(p)
    needed = kernel.reachable(distinct)
    loads = {
        kernel[at].attrs[1]: at
        for at in needed if kernel[at].op == 'load' and kernel[at].attrs[0] not in OF_DST
    }  # fmt: skip
    constants = [
        at for at in needed
        if kernel[at].op == 'keep' or (kernel[at].op == 'load' and kernel[at].attrs[0] in OF_DST)
    ]  # fmt: skip
    floats = [k for k, each in enumerate(p.inputs) if k in loads and is_float(each.dtype)]

    def program_of(kind: str) -> tuple[Program, list[int]]:
        """The gradients of inputs (`of`), those for gradients of one (`ones`), or the products of
        each softmax with its gradient (`dots`)."""

        def function(*args: Tensor) -> list[Tensor]:
            known = dict(zip([*loads.values(), *constants], args, strict=False))
            given = args[len(known) : len(known) + len(cotangents)]
            dots = args[len(known) + len(given) :]
            wanted = []
            # The forward pass has been cast already.
            with torch.enable_grad(), torch.autocast('cpu', enabled=False):
                for at in [loads[k] for k in floats] if kind != 'dots' else p.softmaxes:
                    if at not in known:
                        (known[at],) = kernel.evaluate([at], known, torch.float32)
                    known[at] = known[at].detach().requires_grad_()
                    wanted.append(known[at])
                values = kernel.evaluate([*distinct, *p.softmaxes], known, torch.float32)
                by = []
                for at, v in zip(distinct, values, strict=False):
                    parts = [
                        torch.ones_like(v) if kind == 'ones' else g
                        for (_, _, which), g in zip(cotangents, given, strict=True) if which == at
                    ]  # fmt: skip
                    by.append(sum(parts[1:], parts[0]))
                if kind == 'of':  # What the sum in a softmax adds to the gradients of scores.
                    by += [-dot for dot in dots]
                pairs = [(v, g) for v, g in zip(values, by, strict=False) if v.requires_grad]
                outs, seeds = zip(*pairs, strict=True)
                grads = torch.autograd.grad(outs, wanted, seeds, allow_unused=True)
            found = [
                torch.zeros_like(w) if f is None else f for f, w in zip(grads, wanted, strict=True)
            ]
            return [f * w for f, w in zip(found, wanted, strict=True)] if kind == 'dots' else found

        back = Program()
        inputs, positions = [], []
        for at in [*loads.values(), *constants]:
            value = kernel[at]
            dtype = value.dtype if not is_float(value.dtype) else 'float32'
            inputs.append(_like(value.shape, dtype))
            positions.append(back.add(*value, level=EDGE))
        of_dst = [*cotangents, *(('dot', n, at) for n, at in enumerate(p.softmaxes))]
        for role, k, at in of_dst:
            inputs.append(_like(kernel[at].shape, 'float32'))
            positions.append(back.add('load', (), (role, k), kernel[at].shape, 'float32', EDGE))
        graph = trace(function, inputs, derives=True)
        return back, Parser(back, EDGES[0]).read(graph, positions)

    def by_input(found: list[int]) -> tuple[int | None, ...]:
        of: list[int | None] = [None] * len(p.inputs)
        for k, at in zip(floats, found, strict=True):
            of[k] = at
        return tuple(of)

    program, found = program_of('of')
    # The results tell these sums where the message is a multiple of the softmax.
    by_results = all(is_multiple(p, n) for n in range(len(p.softmaxes)))
    dot_program, dots = (Program(), []) if by_results else program_of('dots')
    local_program = None
    local: list[int | None] = [None] * len(p.inputs)
    if (
        len(outputs) == 1
        and p.outputs[0].reduce in ('sum', 'mean')
        and _is_pointwise(kernel, outputs[0])
    ):
        local_program, ones = program_of('ones')
        shape = kernel[outputs[0]].shape
        local = [
            at if each.role == 'dst' and math.prod(each.shape) == math.prod(shape) else None
            for at, each in zip(by_input(ones), p.inputs, strict=True)
        ]
    return Gradients(
        program, by_input(found), local_program, tuple(local), dot_program, tuple(dots)
    )


def cotangents_of(p: Plan) -> list[tuple[str, int, int]]:
    """The role, number and value of each gradient that a backward pass reads: `grad` is that of
    all sums of a value, `picked` that of an output which chose one edge."""
    out: list[tuple[str, int, int]] = []
    for k, output in enumerate(p.outputs):
        if output.reduce in ('max', 'min'):
            out.append(('picked', k, output.at))
        elif ('grad', output.at) not in [(role, at) for role, _, at in out]:
            out.append(('grad', k, output.at))
    return out


def _is_pointwise(p: Program, output: int) -> bool:
    """Whether each number of the result depends on at most one number of each input of the
    destination that has as many."""
    return not any(p[at].op == 'softmax' for at in p.reachable([output])) and all(
        p[at].op in POINTWISE or p[at].op in ('load', 'const', 'keep', 'view', 'expand')
        or not _from_dst(p, at)
        for at in p.reachable([output])
    )  # fmt: skip


def _from_dst(p: Program, output: int) -> bool:
    return any(p[at].op == 'load' and p[at].attrs[0] == 'dst' for at in p.reachable([output]))


def is_multiple(p: Plan, n: int) -> bool:
    """Whether each number of the message is a multiple of one number of the softmax `n`, those of
    one head after another. Then the sum over a destination's edges of the softmax times its
    gradient is that of the results times theirs."""
    return all(
        output.reduce in ('sum', 'mean') and _is_multiple(p.kernel, output.at, p.softmaxes[n])
        for output in p.outputs
    )  # fmt: skip


def _is_multiple(kernel: Program, output: int, softmax: int) -> bool:
    # Of each number of a value, which number of the softmax it is a multiple of.
    found: dict[int, Tensor] = {}
    for at in kernel.reachable([output]):
        value = kernel[at]
        args = [arg for arg in value.args if arg in found]
        if at == softmax:
            found[at] = torch.arange(math.prod(value.shape)).view(value.shape)
        elif not args:
            continue
        elif value.op == 'view':
            found[at] = found[args[0]].reshape(value.shape)
        elif value.op == 'permute':
            found[at] = found[args[0]].permute(value.attrs)
        elif value.op in ('expand', 'cast', 'neg', 'mul') or (
            value.op == 'div' and args[0] == value.args[0]
        ):
            if len(args) > 1:
                return False
            found[at] = found[args[0]].expand(value.shape)
        else:
            return False
    if output not in found:
        return False
    heads = found[output].flatten()
    count = math.prod(kernel[softmax].shape)
    each = heads.numel() // count
    return each > 0 and heads.equal(torch.arange(count).repeat_interleave(each))


def _like(shape: tuple[int, ...], dtype: str) -> Like:
    return Like((EDGES[0], *shape), getattr(torch, dtype))
