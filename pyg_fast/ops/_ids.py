"""Checks of node ids, of their map and of seeds."""

import torch
from torch import Tensor

from ._checks import check_strided
from .node_map import NodeMap

_WITHOUT_MATHS = (torch.uint16, torch.uint32, torch.uint64)


def check_ids(name: str, ids: Tensor, device: torch.device | None = None) -> None:
    """Raises unless :obj:`ids` are integers in one dimension, and on :obj:`device` if given."""
    check_strided(ids, name)
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise TypeError(f"'{name}' must hold integers, got {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"'{name}' must have one dimension, got {ids.dim()}")
    if device is not None and ids.device != device:
        raise ValueError(f"'{name}' must be on {device}, got {ids.device}")


def check_range(name: str, ids: Tensor, num_nodes: int) -> None:
    """Raises IndexError unless all ids are nodes; on CUDA it synchronises."""
    if ids.is_meta:
        raise ValueError(f"'{name}' must hold data, got a tensor on meta")
    if ids.numel() == 0:
        return
    if ids.dtype in _WITHOUT_MATHS:
        ids = ids.long()
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= num_nodes:
        raise IndexError(
            f"'{name}' must hold nodes in [0, {num_nodes}), got values from {low} to {high}"
        )


def check_map(node_map: object) -> None:
    """Raises unless :obj:`node_map` is a map or None."""
    if node_map is not None and not isinstance(node_map, NodeMap):
        raise TypeError(f"'node_map' must be a NodeMap, got {type(node_map).__name__}")


def fitting_map(
    node_map: NodeMap | None, num_nodes: int, num_ids: int, device: torch.device
) -> NodeMap:
    """The given map, or a new one for :obj:`num_ids` ids."""
    check_map(node_map)
    if node_map is None:
        # For few ids among many nodes, hashing is cheaper than an entry per node.
        return NodeMap(num_nodes, device, hashed=True if num_nodes > 64 * num_ids + 1024 else None)
    if (node_map.num_nodes, node_map.device) != (num_nodes, device):
        raise ValueError(
            f"'node_map' must be of {num_nodes} nodes on {device}, got one of "
            f'{node_map.num_nodes} on {node_map.device}'
        )
    return node_map


def is_readable(tensor: Tensor, device: torch.device) -> bool:
    """Whether kernels of a device can read it: on the device, or for a GPU pinned on the host."""
    if tensor.device == device:
        return True
    on_host = device.type == 'cuda' and tensor.device.type == 'cpu'
    return on_host and (tensor.numel() == 0 or tensor.is_pinned())  # Empty tensors are not pinned.


def check_csr(rowptr: Tensor, col: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A graph as kernels read it, from a device or, for a GPU, from pinned host memory.

    Its content is not checked.
    """
    check_ids('rowptr', rowptr)
    check_ids('col', col, rowptr.device)
    if rowptr.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"'rowptr' must hold int32 or int64, got {rowptr.dtype}")
    if col.dtype not in (torch.int32, rowptr.dtype):
        raise TypeError(f"'col' must hold int32, or int64 if 'rowptr' does, got {col.dtype}")
    if rowptr.numel() == 0:
        raise ValueError("'rowptr' must have num_nodes + 1 entries, got none")
    if rowptr.device == device:
        return rowptr.contiguous(), col.contiguous()
    for name, tensor in (('rowptr', rowptr), ('col', col)):
        if not is_readable(tensor, device):
            raise ValueError(
                f"'{name}' must be on {device}, or for a GPU in pinned host memory, got "
                f'{tensor.device}'
            )
        if not tensor.is_contiguous():
            raise ValueError(f"'{name}' must be contiguous in host memory")
    return rowptr, col


def seed_of(seed: object) -> int:
    """A seed that fits an int64: :obj:`seed`, or one from torch's generator."""
    if seed is None:
        return int(torch.randint(2**63 - 1, (1,)))
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"'seed' must be an integer, got {type(seed).__name__}")
    return (seed + 2**63) % 2**64 - 2**63
