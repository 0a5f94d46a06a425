"""Whether a tensor has been written. Not all writes are visible."""

from typing import TypeAlias

import torch
from torch import Tensor

#: Version, address, shape, and whether it requires gradients.
State: TypeAlias = tuple[int, int, torch.Size, bool]


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def state_of(tensor: Tensor) -> State:
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.requires_grad
