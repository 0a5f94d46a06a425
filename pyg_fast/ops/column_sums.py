"""Sums over the rows of a matrix: the gradients of biases."""

import torch
from torch import Tensor

from ._checks import DTYPES
from ._library import fake, ops, reference
from ._transforms import is_batched, transforms_active

# The kernels take two launches where torch's sum takes one: below some megabyte launches decide.
_MANY = 1 << 18


def column_sums(x: Tensor) -> Tensor:
    r"""The sum over the first dimension, unchecked.

    .. math::
        \mathbf{y}_c = \sum_i \mathbf{X}_{i,c}

    As :obj:`x.sum(0)`, which runs on a CPU, for small inputs, in compiled code, which fuses it, and
    where another derivative is recorded. Bitwise reproducible.

    Args:
        x (Tensor): A matrix :math:`(N, F)`, or a tensor with more dimensions.

    Returns:
        Tensor: Sums :math:`(F)` of the dtype of :obj:`x`, computed in float32 for float16 and
        bfloat16.
    """
    if (
        not x.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling()
        or x.numel() < _MANY or not x.is_contiguous() or x.dtype not in DTYPES
        or is_batched(x) or transforms_active()
    ):  # fmt: skip
        return x.sum(0)
    return ops.column_sums.default(x.flatten(1)).view(x.shape[1:])


@fake('column_sums')
def _column_sums_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.size(1))


@reference('column_sums')
def _column_sums_reference(x: Tensor) -> Tensor:
    return x.double().sum(0)
