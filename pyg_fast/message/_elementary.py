"""Torch's functions that kernels lack, in those that they have.

Autograd derives these: each has torch's derivative, finite where torch's is. What would be infinite
where it is not chosen has another argument there, as zero times infinity is NaN.
"""

import math
import operator
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

from ._ir import Refused

_LOG_2 = math.log(2)
_MANY = 90_000  # No channels: sizes of edges and nodes while a message is traced are larger.
_MAX_FLIPPED = 128  # each is a value of its own
_MAX_IN_TURN = 16  # channels of which each is computed from the one before
_FAR = 1e9  # The square of such a number is the same beside 1.


def lerp_by_number(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """Torch's own decomposition rounds the weight to float32."""
    away = end - start
    return start + away * weight if abs(weight) < 0.5 else end - away * (1 - weight)


def sinh(x: Tensor) -> Tensor:
    near = x.abs() < 1
    low = torch.where(near, x, 0.0)
    # Half of a power overflows later than the power.
    far = (x - _LOG_2).exp() - (-x - _LOG_2).exp()
    return torch.where(near, (low.expm1() - (-low).expm1()) * 0.5, far)


def cosh(x: Tensor) -> Tensor:
    near = x.abs() < 1
    low = torch.where(near, x, 0.0) * 0.5
    twice = low.expm1() - (-low).expm1()  # the sine of half of it
    far = (x - _LOG_2).exp() + (-x - _LOG_2).exp()
    return torch.where(near, twice * twice * 0.5 + 1, far)


def asinh(x: Tensor) -> Tensor:
    # A size with a derivative at zero.
    sign = torch.where(x < 0, x.new_full((), -1.0), 1.0)
    size = x * sign
    is_far = size > _FAR
    low = torch.where(is_far, 0.0, size)
    square = low * low
    near = (low + square / ((square + 1).sqrt() + 1)).log1p()
    far = torch.where(is_far, size, 1.0).log() + _LOG_2
    return torch.where(is_far, far, near) * sign


def acosh(x: Tensor) -> Tensor:
    is_far = x > _FAR
    more = torch.where(is_far, 1.0, x) - 1
    # At one the derivative of a root of the product would be infinity times zero.
    near = (more + more.sqrt() * (more + 2).sqrt()).log1p()
    far = torch.where(is_far, x, 1.0).log() + _LOG_2
    return torch.where(is_far, far, near)


def atanh(x: Tensor) -> Tensor:
    return (x.log1p() - (-x).log1p()) * 0.5


def tan(x: Tensor) -> Tensor:
    return x.sin() / x.cos()


def hypot(a: Tensor, b: Tensor) -> Tensor:
    # Squares of large numbers overflow. The result does not depend on the factor.
    most = torch.maximum(a.abs(), b.abs()).detach()
    most = torch.where((most == 0) | (most == math.inf), 1.0, most)
    a, b = a / most, b / most
    return (a * a + b * b).sqrt() * most


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    larger = a > b
    below = torch.where(larger, b - a, a - b)
    out = torch.where(larger, a, b) + below.exp().log1p()
    return torch.where((a == b) & (a.abs() == math.inf), a, out)


def logit(x: Tensor, eps: float | None = None) -> Tensor:
    if eps is not None and eps >= 0:
        x = torch.where(x < eps, eps, x)
        x = torch.where(x > 1 - eps, 1 - eps, x)
    return x.log() - (-x).log1p()


def hardswish(x: Tensor) -> Tensor:
    more = x + 3
    return x * torch.where(more <= 0, 0.0, torch.where(more >= 6, 6.0, more)) / 6


def softshrink(x: Tensor, least: float = 0.5) -> Tensor:
    return torch.where(x.abs() <= least, 0.0, x - x.sign() * least)


def hardshrink(x: Tensor, least: float = 0.5) -> Tensor:
    return torch.where(x.abs() <= least, 0.0, x)


def trunc(x: Tensor) -> Tensor:
    return torch.where(x < 0, x.ceil(), x.floor())


def frac(x: Tensor) -> Tensor:
    return x - trunc(x)


def round_to_even(x: Tensor) -> Tensor:
    low = x.floor()
    rest, half = x - low, low * 0.5
    is_odd = half != half.floor()
    up = torch.where((rest > 0.5) | ((rest == 0.5) & is_odd), 1.0, 0.0)
    return torch.where(rest == rest, low + up, low)  # Infinity stays.


def sinc(x: Tensor) -> Tensor:
    is_zero = x == 0
    angle = torch.where(is_zero, 1.0, x) * math.pi
    return torch.where(is_zero, 1.0, angle.sin() / angle)


def isinf(x: Tensor) -> Tensor:
    return x.abs() == math.inf


def isfinite(x: Tensor) -> Tensor:
    return x.abs() < math.inf


def flip(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in dims:
        if x.size(dim) >= _MANY:
            raise Refused('a flip along the edges')
        if x.size(dim) > _MAX_FLIPPED:
            raise Refused(f'a flip of more than {_MAX_FLIPPED} channels')
        x = torch.cat([x.narrow(dim, k, 1) for k in reversed(range(x.size(dim)))], dim)
    return x


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        raise Refused('a roll along the edges')
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.size(dim)
        start = -shift % size if size else 0
        if start:
            x = torch.cat([x.narrow(dim, start, size - start), x.narrow(dim, 0, start)], dim)
    return x


def norm(
    x: Tensor,
    ord: float = 2,
    dim: list[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dtype is not None:
        raise Refused('a norm that converts to a dtype')
    if -math.inf < ord < 0:
        raise Refused(f'a norm of order {ord}')
    dims = dim or list(range(x.dim()))
    if abs(ord) == math.inf:
        return x.abs().amax(dims, keepdim) if ord > 0 else x.abs().amin(dims, keepdim)
    if ord == 0:
        return torch.where(x == 0, 0.0, x.new_ones(())).sum(dims, keepdim)
    if ord == 1:
        return x.abs().sum(dims, keepdim)
    if ord == 2:
        power = (x * x).sum(dims, keepdim)
    else:
        # The derivative of a power below one is infinite at zero, torch's norm has zero there.
        is_zero = x == 0
        power = torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, x.abs()).pow(ord))
        power = power.sum(dims, keepdim)
    is_zero = power == 0
    power = torch.where(is_zero, 1.0, power)
    return torch.where(is_zero, 0.0, power.sqrt() if ord == 2 else power.pow(1 / ord))


def _in_turn(x: Tensor, dim: int, name: str, dtype: torch.dtype | None) -> list[Tensor]:
    """The parts of a dimension, of which an operation takes one after the other."""
    if x.size(dim) > _MAX_IN_TURN:
        what = 'over edges' if dim % x.dim() == 0 else f'of more than {_MAX_IN_TURN} channels'
        raise Refused(f'a {name} {what}')
    if dtype is None and not x.is_floating_point():
        dtype = torch.int64
    return list((x if dtype is None else x.to(dtype)).unbind(dim))


def prod(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    out = reduce(operator.mul, _in_turn(x, dim, 'product', dtype))
    return out.unsqueeze(dim) if keepdim else out


def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    parts = _in_turn(x, dim, 'cumulative sum', dtype)
    return torch.stack(list(accumulate(parts, operator.add)), dim)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    parts = _in_turn(x, dim, 'cumulative product', dtype)
    return torch.stack(list(accumulate(parts, operator.mul)), dim)


def diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    rows, columns = x.size(dim1), x.size(dim2)
    dim1, dim2 = dim1 % x.dim(), dim2 % x.dim()
    places = [(k, k + offset) for k in range(rows) if 0 <= k + offset < columns]
    if not 0 < len(places) <= _MAX_FLIPPED:
        raise Refused(f'a diagonal of {len(places)} numbers')
    second = dim2 - (dim2 > dim1)
    return torch.stack([x.select(dim1, a).select(second, b) for a, b in places], -1)


def fmax(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a >= b) | torch.ne(b, b), a, b)


def fmin(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((a <= b) | torch.ne(b, b), a, b)


def _quotient(x: Tensor, by: float) -> Tensor:
    """A quotient that is exact, as that by a power of two is: else the multiple below a number may
    be another one than torch's, which divides without rounding."""
    if by == 0 or math.frexp(abs(by))[0] != 0.5:
        raise Refused(f'a remainder of a division by {by}, which is no power of two,')
    return x / by


def remainder(x: Tensor, by: float) -> Tensor:
    return x - _quotient(x, by).floor() * by


def fmod(x: Tensor, by: float) -> Tensor:
    return x - trunc(_quotient(x, by)) * by


def rrelu(
    x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:  # fmt: skip
    if training:
        raise Refused('rrelu in training draws random numbers')
    return torch.where(x > 0, x, x * ((lower + upper) / 2))


def nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    range_of = torch.finfo(x.dtype)
    out = torch.where(torch.ne(x, x), 0.0 if nan is None else nan, x)
    out = torch.where(x == math.inf, range_of.max if posinf is None else posinf, out)
    return torch.where(x == -math.inf, range_of.min if neginf is None else neginf, out)


def pad(x: Tensor, sizes: Sequence[int], value: float = 0) -> Tensor:
    """Torch's decomposition writes into an empty tensor."""
    for k in range(0, len(sizes), 2):
        before, after, dim = sizes[k], sizes[k + 1], x.dim() - 1 - k // 2
        start, stop = max(0, -before), x.size(dim) + min(0, after)
        if stop <= start and max(before, after) <= 0:
            raise Refused('an empty value')
        if start > 0 or stop < x.size(dim):
            x = x.narrow(dim, start, stop - start)
        parts = [
            torch.full((*x.shape[:dim], n, *x.shape[dim + 1 :]), value, dtype=x.dtype,
                       device=x.device)
            for n in (before, after) if n > 0
        ]  # fmt: skip
        if parts:
            parts.insert(int(before > 0), x)
            x = torch.cat(parts, dim)
    return x
