"""Checks of numbers and flags, and the dtype of sums."""

import torch
from torch import Tensor

_BELOW = 2**63  # Kernels use int64.


def check_number(name: str, number: object, least: int = 0) -> None:
    """Raises unless :obj:`number` is a 64-bit integer and at least :obj:`least`."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"'{name}' must be an integer, got {type(number).__name__}")
    if number < least:
        wanted = 'not be negative' if least == 0 else f'be at least {least}'
        raise ValueError(f"'{name}' must {wanted}, got {number}")
    if isinstance(number, int) and number >= _BELOW:
        raise ValueError(f"'{name}' must fit 64 bits, got {number}")


def check_share(name: str, number: object) -> None:
    """Raises unless :obj:`number` is from 0 to 1."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise TypeError(f"'{name}' must be a number, got {type(number).__name__}")
    if not 0 <= number <= 1:
        raise ValueError(f"'{name}' must be from 0 to 1, got {number}")


def check_flag(name: str, flag: object) -> None:
    """Raises unless :obj:`flag` is a bool; 0 and 1 are allowed."""
    if not isinstance(flag, int) or flag not in (0, 1):
        got = flag if isinstance(flag, int) else type(flag).__name__
        raise TypeError(f"'{name}' must be True or False, got {got}")


def adds_in_order(x: Tensor) -> bool:
    """Whether kernels for a tensor must add in a fixed order, where they otherwise would not."""
    return x.is_cuda and torch.are_deterministic_algorithms_enabled()


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums over :obj:`dtype` run."""
    return torch.float64 if dtype == torch.float64 else torch.float32
