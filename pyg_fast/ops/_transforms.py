"""Function transforms of torch, for which kernels have no rules."""

import torch
from torch.autograd import forward_ad

_functorch_active = torch._C._are_functorch_transforms_active


def transforms_active() -> bool:
    """Whether :mod:`torch.func` (vmap, grad, jvp...) or forward-mode AD is active: public ops then
    run their torch reference, and layers PyG's own code."""
    return _functorch_active() or forward_ad._current_level >= 0


def check_no_forward_ad() -> None:
    """Raises RuntimeError in a backward pass whose tangents would be lost."""
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            'forward-mode AD was entered after the forward pass, whose kernels have no tangents: '
            'enter it before, or use torch.func, and pyg_fast runs torch operations'
        )
