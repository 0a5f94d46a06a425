"""Wrong and unusual variants of an argument."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _step(t: Tensor) -> Tensor:
    return t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t


def _reordered(t: Tensor) -> Tensor:
    # The same entries behind the strides of the transpose.
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


def _with(t: Tensor, number: Any, at: int = 0) -> Tensor:
    t = t.clone()
    if t.numel() > 0:
        t.view(-1)[at] = number
    return t


# Of the same entries.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    'transposed': _reordered,
    'step 2': _step,
    'at an offset': lambda t: torch.cat([t[:1], t])[1:],
    'of inference': lambda t: _inference(t),
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    'no rows': lambda t: t[:0],
    'no columns': lambda t: t[..., :0],
    'one row': lambda t: t[:1],
    'one column': lambda t: t[..., :1],
    'a row less': lambda t: t[:-1],
    'a row more': lambda t: torch.cat([t, t[:1]]),
    'one row for all': lambda t: t[:1].expand_as(t),
    'one column for all': lambda t: t[..., :1].expand_as(t),
    'more dimensions': lambda t: t[None],
    'flat': lambda t: t.flatten(),
    'a scalar': lambda t: t.flatten()[0],
    'sparse': lambda t: t.to_sparse(),
    'nowhere': lambda t: t.to('meta'),
}
TYPES = {
    str(dtype).removeprefix('torch.'): (lambda t, dtype=dtype: t.to(dtype))
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
        torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.complex64, torch.float8_e5m2,
    )
}  # fmt: skip
FLOATS: dict[str, Callable[[Tensor], Tensor]] = {
    'a NaN': lambda t: _with(t, float('nan')),
    'all NaN': lambda t: torch.full_like(t, float('nan')),
    'an infinity': lambda t: _with(t, float('inf'), -1),
    'minus infinity': lambda t: _with(t, -float('inf')),
    'both infinities': lambda t: _with(_with(t, float('inf')), -float('inf'), -1),
    'denormal': lambda t: t * torch.finfo(t.dtype).smallest_normal / 4,
    'minus zero': lambda t: torch.full_like(t, -0.0),
    'zero': torch.zeros_like,
}
INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    'minus one': lambda t: _with(t, -1),
    'one past the end': lambda t: _with(t, int(t.max()) + 2, -1),
    '2^31': lambda t: _with(t, 2**31 if t.dtype == torch.int64 else 2**31 - 1),
    '2^32': lambda t: _with(t.long(), 2**32),
    'the largest': lambda t: _with(t, torch.iinfo(t.dtype).max, -1),
    'the smallest': lambda t: _with(t, torch.iinfo(t.dtype).min),
    'descending': lambda t: t.sort(-1, descending=True)[0],
    'shifted': lambda t: t + 1,
    'shifted back': lambda t: t - 1,
    'zero': torch.zeros_like,
}
NUMBERS: list[Any] = [
    -(2**63) - 1, -(2**63), -2, -1, 0, 1, 2, 2**63, 2**64, -0.5, 0.5, 1.0,
    float('nan'), float('inf'),
]  # fmt: skip
OTHERS: list[Any] = [None, True, False, '', 'sum', b'sum', [], [1.0], {}, object()]
LISTS: list[Any] = [
    (), [0], [-1], [-2], [2**31], [2**63], [True], [None], ['1'], [1.5], (2, -1), 3, range(2),
    [torch.tensor(1)],
]  # fmt: skip


def _inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone()


def mutations(value: Any) -> list[tuple[str, Any]]:
    """The variants of an argument, each with a name."""
    if isinstance(value, list) and isinstance(value[0], Tensor):
        of_first = [(name, [t, *value[1:]]) for name, t in mutations(value[0])]
        return [*of_first, *((repr(v), v) for v in OTHERS)]
    others = [(repr(v)[:20], v) for v in (*OTHERS, *NUMBERS)]
    if isinstance(value, list):
        return [*others, *((repr(v), v) for v in LISTS)]
    if not isinstance(value, Tensor):
        return [*others, ('a tensor', torch.tensor([2.0, 1.0]))]
    kinds = {**LAYOUTS, **SHAPES, **TYPES}
    kinds.update(FLOATS if value.is_floating_point() else INTEGERS)
    return [*((name, change(value)) for name, change in kinds.items()), *others]
