"""Sums over a sample of each row of a sparse matrix, drawn inside the kernel: raw ops."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sparse.operator import STRATEGIES
from ._library import fake, reference
from ._numbers import acc_dtype
from .sampling import sampled_rows

MOST_SAMPLES = 4096


def check_sampling(num_samples: object, strategy: object) -> None:
    """Raises unless both are valid."""
    if isinstance(num_samples, bool) or not isinstance(num_samples, int):
        raise TypeError(f"'num_samples' must be an integer, got {type(num_samples).__name__}")
    if not 1 <= num_samples <= MOST_SAMPLES:
        raise ValueError(f"'num_samples' must be 1 to {MOST_SAMPLES}, got {num_samples}")
    if not isinstance(strategy, str):
        raise TypeError(f"'strategy' must be a string, got {type(strategy).__name__}")
    if strategy not in STRATEGIES:
        raise ValueError(f"'strategy' must be one of {STRATEGIES}, got {strategy!r}")


@fake('sampled_spmm')
def _sampled_spmm_fake(rowptr: Tensor, x: Tensor, out_acc: bool) -> Tensor:
    dtype = acc_dtype(x.dtype) if out_acc or x.dtype == torch.int8 else x.dtype
    return x.new_empty(rowptr.size(0) - 1, x.size(1), dtype=dtype)


@fake('quantize_rows')
def _quantize_rows_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(x.size(0), dtype=torch.float32),
    )


@reference('sampled_spmm')
def _sampled_spmm_reference(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    value: Tensor | None,
    x: Tensor,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    diag: Tensor | None,
    bias: Tensor | None,
    mean: bool,
    out_acc: bool,
    num_samples: int,
    strategy: int,
    seed: Tensor | None,
) -> Tensor:
    row, edge = sampled_rows(rowptr, num_samples, strategy, seed)
    sampled_rowptr = pad(torch.bincount(row, minlength=rowptr.size(0) - 1).cumsum(0), (1, 0))
    perm = edge if perm is None else perm[edge]
    if strategy in (2, 4) and not mean:
        zeros = int(strategy == 4)
        weight = ((rowptr.diff().double() + zeros) / (num_samples + zeros)).clamp(min=1)
        row_scale = weight if row_scale is None else weight * row_scale
    return reference.spmm(
        sampled_rowptr, col[edge], perm, value, x, row_scale, col_scale, diag, bias, mean
    )


@reference('quantize_rows')
def _quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.float()
    largest = x.abs().amax(1) if x.size(1) > 0 else x.new_zeros(x.size(0))
    inverse = (127 / largest).nan_to_num(nan=0, posinf=0)
    rounded = torch.where(inverse.view(-1, 1) > 0, x * inverse.view(-1, 1), 0).round()
    return rounded.to(torch.int8), largest / 127
