"""Finds torch's activations in what the capture of a message made of them: torch computes one of
them, with its derivative, in fewer passes over memory."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from ._ir import Program, number

Activation: TypeAlias = Callable[[Tensor], Tensor]
# An operation with its arguments, a number, or what may be any value: `_X`, which the activation
# takes, and `_GRAD`, its gradient.
_Pattern: TypeAlias = Any

_X, _GRAD = object(), object()
_IS_FAR = ('gt', _X, 20)
_POWER = ('exp', ('where', _IS_FAR, 20, _X))
_SOFTPLUS = ('where', _IS_FAR, _X, ('log1p', _POWER))
_GRAD_OF_SOFTPLUS = (
    'add',
    ('where', _IS_FAR, _GRAD, 0),
    (
        'where',
        _IS_FAR,
        0,
        ('mul', ('div', ('where', _IS_FAR, 0, _GRAD), ('add', _POWER, 1)), _POWER),
    ),
)
_CUBE = ('mul', ('mul', _X, _X), _X)
_ACTIVATIONS: tuple[tuple[Activation, _Pattern], ...] = (
    (F.silu, ('mul', _X, ('sigmoid', _X))),
    (F.softplus, _SOFTPLUS),
    (F.mish, ('mul', _X, ('tanh', _SOFTPLUS))),
    (F.gelu, ('mul', ('mul', _X, 0.5), ('add', ('erf', ('mul', _X, math.sqrt(0.5))), 1))),
    (
        partial(F.gelu, approximate='tanh'),
        ('mul', ('mul', _X, 0.5), ('add', ('tanh', (
            'mul', ('add', _X, ('mul', _CUBE, 0.044715)), math.sqrt(2 / math.pi))), 1)),
    ),
    (F.elu, ('where', ('gt', _X, 0), _X, ('expm1', ('where', ('gt', _X, 0), 0, _X)))),
    (F.leaky_relu, ('where', ('gt', _X, 0), _X, ('mul', _X, 0.01))),
)  # fmt: skip


def find_activations(program: Program, order: Sequence[int]) -> dict[int, tuple[Activation, int]]:
    """The values that are activations, with their function and what it takes."""
    found: dict[int, tuple[Activation, int]] = {}
    for at in order:
        for function, pattern in _ACTIVATIONS:
            taken: dict[object, int] = {}
            if _matches(program, at, pattern, taken):
                found[at] = function, taken[_X]
                break
    return found


def find_softplus(program: Program, at: int) -> tuple[str, tuple[int, ...]] | None:
    """What a value is, if not for its own operation: `softplus` of a value, or `softplus_grad`, a
    gradient times the derivative of the softplus of a value."""
    taken: dict[object, int] = {}
    if _matches(program, at, _SOFTPLUS, taken):
        return 'softplus', (taken[_X],)
    taken.clear()
    if _matches(program, at, _GRAD_OF_SOFTPLUS, taken):
        return 'softplus_grad', (taken[_GRAD], taken[_X])
    return None


def _matches(program: Program, at: int, pattern: _Pattern, taken: dict[object, int]) -> bool:
    """Whether a value is of a pattern; `taken` collects what may be any value."""
    value = program[at]
    if pattern in (_X, _GRAD):
        return taken.setdefault(pattern, at) == at and value.op != 'const'
    if not isinstance(pattern, tuple):
        return value.op == 'const' and math.isclose(number(value), pattern, rel_tol=1e-12)
    op, *inner = pattern
    if value.op != op or len(value.args) != len(inner):
        return False
    return all(_matches(program, *pair, taken) for pair in zip(value.args, inner, strict=True))
