"""A plain edge_index and its checks."""

import ctypes
from typing import TypeGuard

import torch
from torch import Tensor

from ._library import ops

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_edge_index(edge_index: Tensor) -> None:
    """Raises unless :obj:`edge_index` is an integer tensor of shape :obj:`[2, num_edges]`, or if
    an earlier call on CUDA found an invalid edge."""
    if not torch.compiler.is_compiling():
        raise_pending()
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'edge_index' must be a tensor, got {type(edge_index).__name__}")
    if edge_index.dtype not in _INDEX_DTYPES:
        size = edge_index.shape
        is_matrix = len(size) == 2 and size[0] == size[1] > 2
        cure = ': edge_index.long()' if edge_index.is_floating_point() else ''
        if is_matrix:
            cure = f' of shape {list(size)}: edge_index, _ = dense_to_sparse(adj)'
        raise TypeError(f"'edge_index' must hold integers, got {edge_index.dtype}{cure}")
    if edge_index.layout != torch.strided:
        raise TypeError(f"'edge_index' must be a strided tensor, got {edge_index.layout}")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        cure = ': edge_index.t().contiguous()' if edge_index.shape[1:] == (2,) else ''
        raise ValueError(
            f"'edge_index' must have shape [2, num_edges], got {list(edge_index.shape)}{cure}"
        )


def is_list(value: object) -> TypeGuard[Tensor]:
    """Whether a value has the form of a list of edges."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.dim() == 2 and value.size(0) == 2 and value.dtype in _INDEX_DTYPES


def kernel_index(edge_index: Tensor) -> Tensor:
    """A plain edge_index in a dtype that kernels read."""
    if edge_index.dtype in (torch.int32, torch.int64):
        return edge_index
    return edge_index.to(torch.int64)


def is_stream_capturing() -> bool:
    """Whether the current stream of the current GPU, if there is one, is captured."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_capturing(tensor: Tensor) -> bool:
    """Whether the current stream of a tensor's device is captured into a CUDA graph."""
    if torch.compiler.is_compiling() or not tensor.is_cuda:
        return False
    return torch.cuda.is_current_stream_capturing()


def check_invalid(
    edge_index: Tensor, invalid: Tensor | int, size: tuple[int, int], wait: bool = False
) -> None:
    """Raises IndexError if a kernel has counted invalid edges.

    On CUDA only if :obj:`wait`, and not in a capture; otherwise :func:`raise_pending` does it.
    """
    if edge_index.is_meta:
        return
    if isinstance(invalid, Tensor) and torch.compiler.is_compiling():
        assert_no_invalid(invalid)
    elif not edge_index.is_cuda:
        if int(invalid):
            raise_index_error(edge_index, *size)
    elif wait and not is_capturing(edge_index):
        if int(invalid):
            _record()[0] = 0  # The same kernel wrote it.
            raise_index_error(edge_index, *size)
    else:
        _record()


def assert_no_invalid(invalid: Tensor) -> None:
    """The check on the device, for compiled code."""
    torch._assert_async(invalid == 0, "pyg_fast: 'edge_index' holds indices outside of its graph")


def raise_index_error(edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Raises the IndexError for the first of the two rows with an invalid index."""
    for end, count in ((0, num_src), (1, num_dst)):
        low, high = (int(v) for v in edge_index[end].aminmax())
        if low < 0 or high >= count:
            raise IndexError(
                f"'edge_index[{end}]' must hold {_ENDS[end]} in [0, {count}), got values from "
                f'{low} to {high}'
            )


_ENDS = ('sources', 'destinations')
_WORDS = 2
_VALUE_BITS = 62
# Host memory to which CUDA kernels write an invalid edge; None: no kernel has run yet.
_invalid_edge: ctypes.Array[ctypes.c_int64] | None = None


def _record() -> ctypes.Array[ctypes.c_int64]:
    """The record of an invalid edge: two words; the first is zero if there is no such edge."""
    global _invalid_edge
    if _invalid_edge is None:
        address = ops.error_record()
        words = ctypes.c_int64 * _WORDS
        _invalid_edge = words.from_address(address) if address else words()
    return _invalid_edge


def raise_pending() -> None:
    """Raises IndexError if a CUDA kernel found an invalid edge since the last call."""
    if _invalid_edge is None or not _invalid_edge[0] or torch.cuda.is_current_stream_capturing():
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # Other kernels of that call may be about to report the edge, too.
    word, count = _invalid_edge
    _invalid_edge[0] = 0
    end = word >> _VALUE_BITS & 1
    value = word & (1 << _VALUE_BITS) - 1
    value -= (value >> _VALUE_BITS - 1) << _VALUE_BITS
    raise IndexError(
        f"'edge_index[{end}]' of an earlier pyg_fast call on CUDA must hold {_ENDS[end]} in "
        f'[0, {count}), got {value}; that call skipped such edges. Kernels report this without '
        'making the host wait, so the next call raises it'
    )
