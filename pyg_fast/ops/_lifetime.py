"""Host memory that a GPU reads stays there until it is read."""

import threading
from typing import Any

import torch
from torch import Tensor

_lock = threading.RLock()  # Garbage may be collected while it is held.
# By stream and memory, so that there are no more than these: the event behind the last kernel that
# reads the memory, and a tensor that keeps it.
_alive: dict[tuple, tuple[Any, Tensor]] = {}


def keep_until_read(device: torch.device, *tensors: Tensor | None) -> None:
    """Holds tensors in host memory until the kernels have run that the current stream of
    `device` has been given so far.

    Torch's host allocator does not know of these kernels and would hand the memory out again.
    Nothing is waited for: what is done by then is let go at the next call, and what the last
    call holds stays until another. While a CUDA graph is captured and in compiled code nothing is
    held: there the caller keeps what is read, for a graph as long as it may be replayed.
    """
    if torch.compiler.is_compiling() or device.type != 'cuda':
        return
    hosted = [t for t in tensors if t is not None and not t.is_cuda]
    if not hosted:
        return
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            _keep(torch.cuda.current_stream(), hosted)


def _keep(stream: Any, tensors: list[Tensor]) -> None:
    done = stream.record_event()
    dropped = []  # Outlives the lock: letting go of memory may run any code.
    with _lock:
        for key, (event, _) in list(_alive.items()):
            if event.query():
                dropped.append(_alive.pop(key, None))
        for tensor in tensors:
            key = stream.device, stream.cuda_stream, tensor.untyped_storage().data_ptr()
            dropped.append(_alive.pop(key, None))
            _alive[key] = done, tensor
