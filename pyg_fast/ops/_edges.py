"""A plain list of edges: its checks, and what was found out about it."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_INDEX_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_edge_index(edge_index: Tensor) -> None:
    """Raises unless :obj:`edge_index` is an integer tensor of shape :obj:`[2, num_edges]`."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"'edge_index' must be a tensor, got {type(edge_index).__name__}")
    if edge_index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"'edge_index' must hold integers, got {edge_index.dtype}")
    if edge_index.layout != torch.strided:
        raise TypeError(f"'edge_index' must be a strided tensor, got {edge_index.layout}")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            f"'edge_index' must have shape [2, num_edges], got {list(edge_index.shape)}"
        )


def kernel_index(edge_index: Tensor) -> Tensor:
    """A plain list of edges in a type that kernels read."""
    if edge_index.dtype in (torch.int32, torch.int64):
        return edge_index
    return edge_index.to(torch.int64)


# What was found out about a list of edges, in the version it was then.
_notes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def notes_of(edge_index: Tensor) -> dict:
    """What is known about this very list, as it is now; not to be asked in compiled code."""
    if edge_index.is_inference():  # Such tensors count no versions.
        return {}
    notes = _notes.get(edge_index)
    if notes is None or notes['version'] != edge_index._version:
        notes = _notes[edge_index] = {'version': edge_index._version}
    return notes


def cannot_wait(edge_index: Tensor) -> bool:
    """Whether results cannot be looked at: in compiled code and in the capture of a CUDA graph."""
    return torch.compiler.is_compiling() or (
        edge_index.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def is_checked(edge_index: Tensor, size: tuple[int, int]) -> bool:
    """Whether all indices of the list are known to be in range."""
    return not torch.compiler.is_compiling() and size in notes_of(edge_index)


def check_invalid(edge_index: Tensor, invalid: Tensor, size: tuple[int, int]) -> None:
    """Raises IndexError if there are invalid edges, else notes that there are none."""
    if edge_index.is_meta:  # which holds nothing to be wrong.
        return
    if cannot_wait(edge_index):
        assert_no_invalid(invalid)
    elif int(invalid):
        raise_index_error(edge_index, *size)
    else:
        notes_of(edge_index)[size] = True


def assert_no_invalid(invalid: Tensor) -> None:
    """The check on the device, for where its result cannot be waited for."""
    torch._assert_async(invalid == 0, "pyg_fast: 'edge_index' holds indices outside of its graph")


def raise_index_error(edge_index: Tensor, num_src: int, num_dst: int) -> None:
    """Raises the IndexError that names the first offending end."""
    for end, count, name in ((0, num_src, 'sources'), (1, num_dst, 'destinations')):
        low, high = (int(v) for v in edge_index[end].aminmax())
        if low < 0 or high >= count:
            raise IndexError(
                f"'edge_index[{end}]' must hold {name} in [0, {count}), got values from {low} "
                f'to {high}'
            )
