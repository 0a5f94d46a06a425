"""Function transforms of torch, which the kernels do not support."""

import torch
from torch.autograd import forward_ad

_is_batched = torch._C._functorch.is_legacy_batchedtensor
_functorch_active = torch._C._are_functorch_transforms_active


def transforms_active() -> bool:
    """Whether :mod:`torch.func` (vmap, grad, jvp...) or forward-mode AD is active. Public ops then
    run their torch reference, and layers run PyG's own code."""
    return _functorch_active() or forward_ad._current_level >= 0


def transforms_traced() -> bool:
    """As :func:`transforms_active`, while :func:`torch.compile` traces."""
    return _functorch_active()


def is_batched(*gradients: torch.Tensor) -> bool:
    """Whether one of some gradients stands for several, as with `is_grads_batched=True`; never in
    compiled code, which Dynamo could not trace through the question."""
    return not torch.compiler.is_compiling() and any(map(_is_batched, gradients))


def check_no_forward_ad() -> None:
    """Raises RuntimeError in a backward pass that would lose tangents."""
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            'forward-mode AD was entered after the forward pass, which computed no tangents: enter '
            'it before, or use torch.func; pyg_fast then runs torch operations'
        )
