"""Linear maps of heads: each head has a block of one matrix."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ._checks import DTYPES
from ._library import fake, ops, reference
from ._saved import Context, save, saved
from ._transforms import is_batched, transforms_active

# A GPU keeps the block of a head in shared memory: kSharedBytes of csrc/cuda/head_map.cu.
_MOST_BYTES = 48 << 10


def head_map(
    x: Tensor, weight: Tensor, heads: int, transposed: bool = False, other: Tensor | None = None
) -> Tensor:
    r"""Maps the features of each head by its own columns of a weight, unchecked.

    .. math::
        \mathbf{Y}_{n,h} = \mathbf{X}_{n,h} \mathbf{W}_h + \mathbf{Z}_{n,h}

    or by :math:`\mathbf{W}_h^{\top}` if :obj:`transposed`, where :math:`\mathbf{W}_h` of shape
    :math:`(D, C)` are the columns of head :math:`h`. Differentiable any number of times. Bitwise
    reproducible.

    Args:
        x (Tensor): :math:`(N, H \cdot D)`, transposed :math:`(N, H \cdot C)`.
        weight (Tensor): :math:`\mathbf{W}` of shape :math:`(D, H \cdot C)`, of the dtype of
            :obj:`x`.
        heads (int): :math:`H`.
        transposed (bool, optional): Whether blocks are transposed. (default: :obj:`False`)
        other (Tensor, optional): :math:`\mathbf{Z}` of the shape of the result.
            (default: :obj:`None`)

    Returns:
        Tensor: :math:`(N, H \cdot C)`, transposed :math:`(N, H \cdot D)`.
    """
    if (
        _differentiable.only or not _runs(x, weight, other) or not _fits(weight, heads)
    ):  # fmt: skip
        return _in_torch(x, weight, other, heads, transposed)
    if not torch.is_grad_enabled():
        return ops.head_map.default(x, weight, other, heads, transposed)
    return HeadMap.apply(x, weight, other, heads, transposed)


class _Differentiable(threading.local):
    only = False


_differentiable = _Differentiable()


@contextmanager
def in_torch() -> Iterator[None]:
    """Maps heads by torch's operations alone: a trace of these sees no autograd function."""
    before, _differentiable.only = _differentiable.only, True
    try:
        yield
    finally:
        _differentiable.only = before


def head_map_weight(x: Tensor, grad: Tensor, heads: int) -> Tensor:
    r"""The gradient of the weight of :func:`head_map`, which is not transposed, unchecked.

    .. math::
        \mathbf{W}_h = \sum_n \mathbf{X}_{n,h}^{\top} \mathbf{G}_{n,h}

    Differentiable any number of times. Bitwise reproducible. Shapes are those of :func:`head_map`;
    :math:`\mathbf{G}` has the dtype of :obj:`x`.
    """
    if not _runs(x, grad):
        return _weight_in_torch(x, grad, heads)
    if not torch.is_grad_enabled():
        return ops.head_map_weight.default(x, grad, heads)
    return HeadMapWeight.apply(x, grad, heads)


def _runs(x: Tensor, y: Tensor, z: Tensor | None = None) -> bool:
    """Whether the kernels take these tensors."""
    z = x if z is None else z
    return (
        x.dtype == y.dtype == z.dtype and x.dtype in DTYPES
        and not (transforms_active() or is_batched(x, y, z))
    )  # fmt: skip


def _fits(weight: Tensor, heads: int) -> bool:
    if not weight.is_cuda or weight.size(1) == 0:
        return True
    features, channels = weight.size(0), weight.size(1) // heads
    numbers = (features + 1) * (channels + 1)
    return numbers * max(4, weight.dtype.itemsize) <= _MOST_BYTES


class HeadMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, other: Tensor | None, heads: int, transposed: bool
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        save(ctx, x if needs_weight else None, weight if needs_x else None)
        ctx.heads, ctx.transposed = heads, transposed
        return ops.head_map.default(x, weight, other, heads, transposed)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved(ctx)
        grad_x = grad_weight = None
        if weight is not None:
            grad_x = head_map(grad, weight, ctx.heads, not ctx.transposed)
        if x is not None:
            of_x, of_y = (grad, x) if ctx.transposed else (x, grad)
            grad_weight = head_map_weight(of_x, of_y, ctx.heads)
        return grad_x, grad_weight, grad if ctx.needs_input_grad[2] else None, None, None


class HeadMapWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, x: Tensor, grad: Tensor, heads: int) -> Tensor:
        needs_x, needs_grad = ctx.needs_input_grad[:2]
        save(ctx, x if needs_grad else None, grad if needs_x else None)
        ctx.heads = heads
        return ops.head_map_weight.default(x, grad, heads)

    @staticmethod
    def backward(ctx: Context, of_weight: Tensor) -> tuple[Tensor | None, ...]:
        x, grad = saved(ctx)
        return (
            None if grad is None else head_map(grad, of_weight, ctx.heads, True),
            None if x is None else head_map(x, of_weight, ctx.heads),
            None,
        )


@fake('head_map')
def _head_map_fake(x: Tensor, weight: Tensor, heads: int, transposed: bool) -> Tensor:
    return x.new_empty(x.size(0), heads * weight.size(0) if transposed else weight.size(1))


@fake('head_map_weight')
def _head_map_weight_fake(x: Tensor, grad: Tensor, heads: int) -> Tensor:
    return x.new_empty(x.size(1) // heads, grad.size(1))


def _in_torch(
    x: Tensor, weight: Tensor, other: Tensor | None, heads: int, transposed: bool
) -> Tensor:
    """:func:`head_map` in torch operations."""
    blocks = _by_heads(weight, heads)
    out = torch.bmm(_by_heads(x, heads), blocks.transpose(1, 2) if transposed else blocks)
    out = out.transpose(0, 1).reshape(x.size(0), heads * out.size(2))
    return out if other is None else out + other


def _weight_in_torch(x: Tensor, grad: Tensor, heads: int) -> Tensor:
    """:func:`head_map_weight` in torch operations."""
    blocks = torch.bmm(_by_heads(x, heads).transpose(1, 2), _by_heads(grad, heads))
    return blocks.transpose(0, 1).reshape(blocks.size(1), grad.size(1))


def _by_heads(x: Tensor, heads: int) -> Tensor:
    return x.reshape(x.size(0), heads, x.size(1) // heads).transpose(0, 1)


@reference('head_map')
def _head_map_reference(
    x: Tensor, weight: Tensor, other: Tensor | None, heads: int, transposed: bool
) -> Tensor:
    wide = None if other is None else other.double()
    return _in_torch(x.double(), weight.double(), wide, heads, transposed)


@reference('head_map_weight')
def _head_map_weight_reference(x: Tensor, grad: Tensor, heads: int) -> Tensor:
    return _weight_in_torch(x.double(), grad.double(), heads)
