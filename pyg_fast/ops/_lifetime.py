"""Keeps host memory alive until a GPU has read it."""

import threading

import torch
from torch import Tensor

_lock = threading.RLock()  # Reentrant: garbage collection may run while it is held.
# One entry per stream and memory, which bounds the number: the event after the last kernel that
# reads the memory, and a tensor that keeps it alive.
_alive: dict[tuple, tuple[torch.cuda.Event, Tensor]] = {}


def keep_until_read(device: torch.device, *tensors: Tensor | None) -> None:
    """Keeps tensors in host memory alive until all kernels launched so far on the current stream of
    `device` have run.

    Torch's host allocator does not know these kernels and would reuse the memory. Nothing waits:
    the next call releases what has been read, so the tensors of the last call stay until then.
    During a CUDA graph capture and in compiled code nothing is kept: there the caller must keep
    the tensors, for a graph as long as it may be replayed.
    """
    if torch.compiler.is_compiling() or device.type != 'cuda':
        return
    hosted = [t for t in tensors if t is not None and not t.is_cuda]
    if not hosted:
        return
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            _keep(torch.cuda.current_stream(), hosted)


def _keep(stream: torch.cuda.Stream, tensors: list[Tensor]) -> None:
    done = stream.record_event()
    dropped = []  # Freed after the lock is released: freeing memory may run any code.
    with _lock:
        for key, (event, _) in list(_alive.items()):
            if event.query():
                dropped.append(_alive.pop(key, None))
        for tensor in tensors:
            key = stream.device, stream.cuda_stream, tensor.untyped_storage().data_ptr()
            dropped.append(_alive.pop(key, None))
            _alive[key] = done, tensor
