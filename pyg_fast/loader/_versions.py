"""Whether a tensor has been written. Not all writes are visible."""

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def state_of(tensor: Tensor) -> tuple:
    return version_of(tensor), tensor.data_ptr(), tensor.shape, tensor.requires_grad
