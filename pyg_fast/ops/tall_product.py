"""The product of two matrices of many rows and few columns: gradients of small weights."""

import torch
from torch import Tensor

# A GPU divides the outputs of a product among its processors, so one of few outputs uses few of
# them. Products of many blocks of rows use all.
_BLOCK_ROWS = 1 << 10
_FEW_BLOCKS = 1 << 7
_MANY_OUTPUTS = 1 << 10


def tall_product(a: Tensor, b: Tensor) -> Tensor:
    r"""As :obj:`a.t() @ b`, unchecked; on CUDA many rows are divided into blocks.

    .. math::
        \mathbf{Y} = \mathbf{A}^{\top} \mathbf{B}

    Differentiable any number of times. Bitwise reproducible.

    Args:
        a (Tensor): :math:`\mathbf{A}` of shape :math:`(N, F_a)`.
        b (Tensor): :math:`\mathbf{B}` of shape :math:`(N, F_b)`, of the dtype of :obj:`a`.

    Returns:
        Tensor: :math:`\mathbf{Y}` of shape :math:`(F_a, F_b)`.
    """
    if not has_blocks(a, b.size(1)):
        return a.t() @ b
    blocks = a.size(0) // _BLOCK_ROWS
    end = blocks * _BLOCK_ROWS
    of_a, of_b = (t[:end].unflatten(0, (blocks, _BLOCK_ROWS)) for t in (a, b))
    out = torch.bmm(of_a.transpose(1, 2), of_b).sum(0)
    return out if end == a.size(0) else out.addmm(a[end:].t(), b[end:])


def has_blocks(a: Tensor, columns: int) -> bool:
    """Whether :func:`tall_product` divides its rows, given the columns of the other matrix. The
    result of a block in float16 or bfloat16 would be rounded once more."""
    return (
        a.is_cuda and a.dtype.itemsize >= 4 and not torch.compiler.is_compiling()
        and a.size(0) >= _FEW_BLOCKS * _BLOCK_ROWS and a.size(1) * columns <= _MANY_OUTPUTS
    )  # fmt: skip
