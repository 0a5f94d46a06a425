"""Host memory that a GPU reads directly."""

import threading
import weakref

import torch
from torch import Tensor

_lock = threading.RLock()  # Reentrant: garbage collection may run while it is held.
_users: dict[int, int] = {}  # number of users that keep shared memory page-locked, by address


def pin(tensor: Tensor) -> Tensor:
    """Copies a tensor to page-locked memory. Pinned and shared memory is not copied; shared memory
    is locked as long as the result lives."""
    if tensor.is_contiguous() and tensor.is_shared() and tensor.numel() > 0:
        view = tensor.view(tensor.shape)
        if _lock_pages(view):
            return view
    if tensor.is_contiguous() and tensor.is_pinned():
        return tensor
    return tensor.contiguous().pin_memory()


def _lock_pages(view: Tensor) -> bool:
    address, size = view.data_ptr(), view.nbytes
    runtime = torch.cuda.cudart()
    with _lock:
        users = _users.get(address, 0)
        # Memory locked by other code may be unlocked at any time, so it is not used.
        if users == 0 and (
            view.is_pinned() or int(runtime.cudaHostRegister(address, size, 0)) != 0
        ):
            return False
        _users[address] = users + 1
    weakref.finalize(view, _unlock_pages, view.untyped_storage(), address)
    return True


def _unlock_pages(storage: torch.UntypedStorage, address: int) -> None:
    # `storage` keeps the memory alive until here.
    with _lock:
        _users[address] -= 1
        if _users[address] == 0:
            del _users[address]
            torch.cuda.cudart().cudaHostUnregister(address)
