"""The memory that a function uses at most."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Live(TorchDispatchMode):
    """Counts the bytes of all storages that ops have made and that are still alive."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):  # made before
            if isinstance(leaf, Tensor):
                self.known.add(leaf.untyped_storage()._cdata)
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.now -= size
        self.known.discard(key)


def live_bytes(
    function: Callable[[], Any], device: torch.device, rounded: bool = True
) -> tuple[Any, int]:
    """A function's result, and the most bytes of tensors that it had made and not freed yet: what
    kernels allocate for themselves counts only on CUDA. There blocks of the allocator count, unless
    the bytes shall not be :obj:`rounded`: a block may be up to 1 MB larger than its tensor, by what
    earlier tests have left in the cache."""
    if device.type == 'cuda':
        kind = 'allocated_bytes' if rounded else 'requested_bytes'
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_stats(device)[f'{kind}.all.current']
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.memory_stats(device)[f'{kind}.all.peak'] - before
    with _Live(set()) as live:
        result = function()
    return result, live.peak
