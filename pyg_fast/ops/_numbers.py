"""Numbers and flags: their checks, and the type of sums."""

from typing import Any

import torch

_BELOW = 2**63  # What kernels count in.


def check_number(name: str, number: Any, least: int = 0) -> None:
    """Raises unless this is an integer of 64 bits, and at least so large."""
    if isinstance(number, bool) or not isinstance(number, (int, torch.SymInt)):
        raise TypeError(f"'{name}' must be an integer, got {type(number).__name__}")
    if number < least:
        wanted = 'not be negative' if least == 0 else f'be at least {least}'
        raise ValueError(f"'{name}' must {wanted}, got {number}")
    if isinstance(number, int) and number >= _BELOW:
        raise ValueError(f"'{name}' must fit 64 bits, got {number}")


def check_flag(name: str, flag: Any) -> None:
    """Raises unless this is yes or no; one and zero will do."""
    if not isinstance(flag, int):
        raise TypeError(f"'{name}' must be True or False, got {type(flag).__name__}")


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type that sums over :obj:`dtype` run in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
