"""Runs the attention within graphs on a GPU, by Triton."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..message._cuda import launch_kernel, on_device
from ..message._tiles import shared_memory
from ..message._tiles_cuda import may_round, processors
from ..message._values import next_power_of_two
from ._composed import threshold_of
from ._triton import FORWARD, OF_KEYS, OF_QUERIES

_LOG2_E = math.log2(math.e)


def max_channels(dtype: torch.dtype) -> int:
    """The widest heads whose tiles fit into shared memory."""
    return 128 if dtype == torch.float64 else 256


def has_products() -> bool:
    """Whether all GPUs here have the products of the kernels; compiled code takes it as given."""
    return torch.compiler.is_compiling() or shared_memory() > 0


class Form(NamedTuple):
    """The tiles of a kernel: a program takes `rows` rows, and blocks of others one by one."""

    rows: int
    block: int
    warps: int
    stages: int


def choose_form(channels: int, dtype: torch.dtype, is_backward: bool, is_small: bool) -> Form:
    """The tiles for heads of a width: as large as the registers hold, and smaller ones where there
    are few rows for all processors."""
    width = max(16, next_power_of_two(channels))
    if dtype == torch.float64:
        return Form(16, 16, 4 if width <= 64 else 8, 1)
    if dtype == torch.float32:
        if width > 128 or (width > 64 and is_backward):
            return Form(16, 16, 8, 1)
        if is_small or width > 32:
            return Form(32, 32, 4, 1)
        return Form(64, 32 if is_backward else 64, 4, 1)
    if width > 128:
        return Form(32, 32, 8, 1)
    if is_small or width > 64:
        return Form(32, 32, 4, 2)
    return Form(64, 32 if is_backward else 64, 4, 2)


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None, dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The results, and the logarithms to base 2 of the sums of each row."""
    q, k, v = _strided(q, k, v)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=_acc(q), device=q.device)
    _launch(FORWARD, 'segment_attention', q, k, v, batch, seed, [out, lse], dropout_p, scale, False)
    return out, lse


def run_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None, seed: Tensor | None,
    out: Tensor, lse: Tensor, dropout_p: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of queries, keys and values: a kernel for the rows of each, so that nothing is
    added by atomics."""
    q, k, v = _strided(q, k, v)
    grad, delta = grad.contiguous(), torch.empty_like(lse)
    grads = [torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(3)]
    for text, name, tensors in (
        (OF_QUERIES, 'segment_attention_queries', [out, lse, grad, delta, grads[0]]),
        (OF_KEYS, 'segment_attention_keys', [lse, grad, delta, *grads[1:]]),
    ):
        _launch(text, name, q, k, v, batch, seed, tensors, dropout_p, scale, True)
    return grads[0], grads[1], grads[2]


def _strided(*tensors: Tensor) -> list[Tensor]:
    """With the numbers of a row side by side."""
    wanted = (tensors[0].size(2), 1)
    return [t if t.stride()[1:] == wanted else t.contiguous() for t in tensors]


def _acc(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def precision_of(dtype: torch.dtype) -> str:
    """How products of matrices are computed, by torch's setting."""
    if dtype == torch.float32:
        return 'high' if may_round() else 'highest'
    return 'float64' if dtype == torch.float64 else 'half'


def _launch(
    text: str, name: str, q: Tensor, k: Tensor, v: Tensor, batch: Tensor | None,
    seed: Tensor | None, tensors: list[Tensor], dropout_p: float, scale: float, is_backward: bool,
) -> None:  # fmt: skip
    import triton.language as tl

    num_rows, heads, channels = q.shape
    if q.numel() == 0:
        return
    is_small = num_rows * heads < 64 * 4 * processors(q.device)
    form = choose_form(channels, q.dtype, is_backward, is_small)
    acc = _acc(q)
    constants = (
        scale * _LOG2_E, heads, channels, q.stride(0), k.stride(0), v.stride(0), form.rows,
        form.block, max(16, next_power_of_two(channels)), form.stages, precision_of(q.dtype),
        batch is not None, seed is not None, tl.float64 if acc == torch.float64 else tl.float32,
    )  # fmt: skip
    programs = -(-num_rows // form.rows) * heads
    unread = tensors[0]
    structure = [unread if t is None else t.contiguous() for t in (batch, seed)]
    with on_device(q.device):
        launch_kernel(
            text, name, form.warps, programs, [q, k, v, *structure, *tensors],
            (num_rows, threshold_of(dropout_p)), constants,
        )  # fmt: skip
