"""Host memory that a GPU reads by itself."""

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

_lock = threading.RLock()  # Garbage may be collected while it is held.
_users: dict[int, int] = {}  # How many hold shared memory page-locked, by its address.


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in page-locked memory: of what is in such or in shared memory no copy is made.
    Shared memory is locked as long as the result lives."""
    if tensor.is_contiguous() and tensor.is_shared() and tensor.numel() > 0:
        view = tensor.view(tensor.shape)
        if _lock_pages(view):
            return view
    if tensor.is_contiguous() and tensor.is_pinned():
        return tensor
    return tensor.contiguous().pin_memory()


def _lock_pages(view: Tensor) -> bool:
    address, size = view.data_ptr(), view.nbytes
    runtime: Any = torch.cuda.cudart()
    with _lock:
        users = _users.get(address, 0)
        # What is locked by someone else may be unlocked at any time.
        if users == 0 and (
            view.is_pinned() or int(runtime.cudaHostRegister(address, size, 0)) != 0
        ):
            return False
        _users[address] = users + 1
    weakref.finalize(view, _unlock_pages, view.untyped_storage(), address)
    return True


def _unlock_pages(storage: Any, address: int) -> None:  # It holds the memory until then.
    with _lock:
        _users[address] -= 1
        if _users[address] == 0:
            del _users[address]
            torch.cuda.cudart().cudaHostUnregister(address)
