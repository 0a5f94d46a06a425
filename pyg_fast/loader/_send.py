"""Sends arrays to a device: all of a batch by one copy, for which nothing waits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Bytes: where an array may begin.
_ALIGNED = 16


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays as tensors on the device; on a CPU without a copy."""
    if device.type == 'cpu':
        return [torch.from_numpy(array) for array in arrays]
    return unpack(pack(arrays, pin=True).to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[np.ndarray], pin: bool) -> Tensor:
    """Copies arrays side by side into one piece of host memory. Torch does not use pinned memory
    for anything else before copies of it have run."""
    begins = _begins(arrays)
    flat = torch.empty(begins[-1], dtype=torch.uint8, device='cpu', pin_memory=pin)
    memory = flat.numpy()
    for begin, array in zip(begins, arrays, strict=False):
        part = memory[begin : begin + array.nbytes]
        part.view(array.dtype).reshape(array.shape)[...] = array
    return flat


def unpack(flat: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """The parts of packed memory, as tensors like the arrays."""
    return [
        flat[begin : begin + array.nbytes].view(_dtype_of(array)).view(array.shape)
        for begin, array in zip(_begins(arrays), arrays, strict=False)
    ]


def _begins(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins, and the end."""
    begins = [0]
    for array in arrays:
        begins.append(begins[-1] + -(-array.nbytes // _ALIGNED) * _ALIGNED)
    return begins


def _dtype_of(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype
