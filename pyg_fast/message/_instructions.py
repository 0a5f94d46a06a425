"""Instructions of a pass on a CPU, and where the numbers that they read and write are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


@dataclass(eq=False)
class Slot:
    """Scratch memory of a value: `width` numbers, per edge or (`uniform`) once for all edges."""

    width: int
    uniform: bool
    place: int = -1
    last: int = -1  # the last instruction that uses it


Space: TypeAlias = Slot | tuple[str, int] | str  # a slot, ('input', k), ('total', k) or 'numbers'


class Ref(NamedTuple):
    """Where the numbers of a value are: a slot, an input or an output."""

    space: Space
    offset: int
    strides: tuple[int, ...]  # of each dimension
    edge: int | None  # the stride along edges; None: rows of an input, found by its index
    column: bool = False  # whether it moves on with the chunk of columns

    @property
    def uniform(self) -> bool:
        """Whether all edges share the value."""
        return self.edge == 0

    def permuted(self, order: Sequence[int]) -> 'Ref':
        """With dimensions in another order."""
        return self._replace(strides=tuple(self.strides[d] for d in order))

    def with_zero_strides(self, dims: tuple[int, ...]) -> 'Ref':
        """As the destination of a reduction: with strides 0 along reduced dimensions."""
        strides = tuple(0 if d in dims else s for d, s in enumerate(self.strides))
        return self._replace(strides=strides)


class Instruction(NamedTuple):
    """A loop nest over `sizes`, of which `edge_dim` is that of edges (-1: none)."""

    op: str
    sizes: list[int]
    edge_dim: int
    operands: list[tuple[Ref, list[int]]]
    extra: tuple[int, ...] = ()


class CpuCode(NamedTuple):
    """A pass as arguments of the op `message_pass`."""

    code: Tensor
    numbers: Tensor
    loads: tuple[tuple[str, int], ...]  # the inputs
    row_indices: tuple[int, ...]  # by what the row of each is found
    # Of each result: the kind, the shape and order of dimensions in memory, and the dtype.
    results: tuple[tuple[str, tuple[int, ...], tuple[int, ...] | None, torch.dtype], ...]
    kinds: tuple[int, ...]
    widest: int  # numbers of a row of a result
    wide: bool  # whether it computes in float64


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(accumulate(shape[:0:-1], lambda a, b: a * b, initial=1))[::-1] if shape else ()


def view_strides(
    strides: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The strides of a view of another shape, or None where it needs a copy."""
    kept = [(n, s) for n, s in zip(old, strides, strict=True) if n != 1]
    # Runs of dimensions that are one.
    runs: list[list[int]] = []
    for n, s in kept:
        if runs and runs[-1][1] == s * n:
            runs[-1] = [runs[-1][0] * n, s]
        else:
            runs.append([n, s])
    out: list[int] = []
    for n in reversed(new):
        if n == 1:
            out.append(0)
            continue
        if not runs:
            return None
        size, stride = runs[-1]
        if size % n:
            return None
        out.append(stride)
        if size == n:
            runs.pop()
        else:
            runs[-1] = [size // n, stride * n]
    return tuple(reversed(out))


def merge_dims(
    sizes: list[int], strides: list[list[int | None]], edge: bool
) -> tuple[list[int], list[list[int | None]]]:
    """Dimensions with the strides of each operand, those of size 1 dropped and neighbours joined.
    The first dimension is that of edges if `edge`; its size is 1 for each."""
    kept_sizes: list[int] = []
    kept: list[list[int | None]] = []  # by dimension
    for d, n in enumerate(sizes):
        each = [s[d] for s in strides]
        if n == 1 and not (edge and d == 0):
            continue
        if kept and all(
            a is not None and b is not None and a == b * n
            for a, b in zip(kept[-1], each, strict=True)
        ):
            kept_sizes[-1] *= n
            kept[-1] = each
        else:
            kept_sizes.append(n)
            kept.append(each)
    return kept_sizes, kept
