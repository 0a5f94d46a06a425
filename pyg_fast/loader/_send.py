"""Sends arrays to a device: all of a batch by one copy, for which nothing waits."""

import functools
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

# Bytes: where an array may begin.
_ALIGNED = 16
# Of most arrays: their memory is a tensor of it.
_NUMBER = np.dtype(np.int64)


class Tail(NamedTuple):
    """The last columns of a matrix. The others are zero, or undefined, which takes no time."""

    values: np.ndarray
    num_columns: int
    is_zero_before: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.values), self.num_columns

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        return len(self.values) * self.num_columns * self.values.itemsize


Array: TypeAlias = np.ndarray | Tail


def send(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on the device; on a CPU without a copy."""
    if device.type != 'cpu':
        return unpack(pack(arrays, pin=True).to(device, non_blocking=True), arrays)
    out = []
    for array in arrays:
        if isinstance(array, Tail):
            whole = np.empty(array.shape, array.dtype)
            _write(array, whole)
            array = whole
        out.append(torch.from_numpy(array))
    return out


def pack(arrays: Sequence[Array], pin: bool) -> Tensor:
    """Writes arrays side by side into one piece of host memory. Torch does not use pinned memory
    for anything else before copies of it have run."""
    begins = _begins(arrays)
    size = begins[-1] // _NUMBER.itemsize
    flat = torch.empty(size, dtype=torch.int64, device='cpu', pin_memory=pin)
    memory = flat.numpy()
    for begin, array in zip(begins, arrays, strict=False):
        _write(array, np.ndarray(array.shape, array.dtype, memory, begin))
    return flat


def unpack(flat: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """The parts of packed memory, as tensors like the arrays."""
    typed = {_NUMBER: flat}
    out = []
    for begin, array in zip(_begins(arrays), arrays, strict=False):
        if array.dtype not in typed:
            typed[array.dtype] = flat.view(_dtype_of(array.dtype))
        strides = [math.prod(array.shape[k + 1 :]) for k in range(len(array.shape))]
        out.append(
            typed[array.dtype].as_strided(array.shape, strides, begin // array.dtype.itemsize)
        )
    return out


def _write(array: Array, out: np.ndarray) -> None:
    if not isinstance(array, Tail):
        out[...] = array
        return
    before = array.num_columns - array.values.shape[1]
    out[:, before:] = array.values
    if array.is_zero_before:
        out[:, :before] = 0


def _begins(arrays: Sequence[Array]) -> list[int]:
    """Where each array begins, and the end."""
    return [0, *accumulate(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]


@functools.cache
def _dtype_of(dtype: np.dtype) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
