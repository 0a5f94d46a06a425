"""Recognizes a softmax over the edges of each destination in the quotient that it is traced to, and
sums of its multiples."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ._ir import EDGE, Program, number

_MAX_EPSILON = 1e-12  # that a softmax adds to its sums


def softmax_of(program: Program, a: int, b: int) -> int | None:
    """The softmax whose quotient `a / b` is, if it is that of :func:`torch_geometric.utils.softmax`
    or written as it is; also under ``torch.no_grad``."""
    frozen = all(program[_strip(program, at)].op == 'detach' for at in (a, b))
    out = _quotient(program, a, b, ('detach',) if frozen else ())
    return program.detach(out) if frozen and out is not None else out


def _quotient(program: Program, a: int, b: int, through: tuple[str, ...]) -> int | None:
    b = _strip(program, b, *through)
    if program[b].op == 'add':
        b, little = program[b].args
        if program[little].op != 'const' or not 0 <= number(program[little]) < _MAX_EPSILON:
            return None
        b = _strip(program, b, *through)
    numerator = _strip(program, a, *through)
    top = program[numerator]
    if program[b].op != 'rowsum' or top.op != 'exp':
        return None
    if _strip(program, program[b].args[0], *through) != numerator:
        return None
    shifted = program[_strip(program, top.args[0], *through)]
    if shifted.op != 'sub':
        return None
    # A softmax has the same gradient with a maximum that is detached.
    score, most = shifted.args[0], _strip(program, shifted.args[1], 'detach')
    if program[most].op != 'rowmax':
        return None
    of, score_of = (_strip(program, at, 'detach') for at in (program[most].args[0], score))
    if of != score_of or (not through and score_of != _strip(program, score)):
        return None
    return program.add('softmax', (score,), (), program[score].shape, top.dtype, EDGE)


def _strip(program: Program, at: int, *others: str) -> int:
    """Strips conversions, and other operations that do not change a number."""
    while program[at].op in ('cast', *others):
        (at,) = program[at].args
    return at


def is_multiple(message: Program, outputs: Sequence[tuple[int, str, str]], softmax: int) -> bool:
    """Whether the outputs are sums or means of multiples of a softmax, head by head. Then the sum
    over a destination's edges of the softmax times its gradient equals the results times theirs."""
    return all(
        reduce in ('sum', 'mean') and _is_multiple(message, at, softmax)
        for at, reduce, _ in outputs
    )  # fmt: skip


def _is_multiple(message: Program, output: int, softmax: int) -> bool:
    # By position: for each number of a value, which number of the softmax it is a multiple of.
    multiples: dict[int, Tensor] = {}
    for at in message.reachable([output]):
        value = message[at]
        args = [arg for arg in value.args if arg in multiples]
        if at == softmax:
            multiples[at] = torch.arange(math.prod(value.shape)).view(value.shape)
        elif not args:
            continue
        elif value.op == 'view':
            multiples[at] = multiples[args[0]].reshape(value.shape)
        elif value.op == 'permute':
            multiples[at] = multiples[args[0]].permute(value.attrs)
        elif value.op in ('expand', 'cast', 'neg', 'mul') or (
            value.op == 'div' and args[0] == value.args[0]
        ):
            if len(args) > 1:
                return False
            multiples[at] = multiples[args[0]].expand(value.shape)
        else:
            return False
    if output not in multiples:
        return False
    heads = multiples[output].flatten()
    count = math.prod(message[softmax].shape)
    each = heads.numel() // count
    return each > 0 and heads.equal(torch.arange(count).repeat_interleave(each))
