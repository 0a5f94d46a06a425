"""Checks shared by several ops: features, edge weights."""

import torch
from torch import Tensor

from ..errors import DeviceError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_strided(x: Tensor, name: str) -> None:
    """Raises unless :obj:`x` is a strided tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"'{name}' must be a strided tensor, got {x.layout}")


def to_device(device: torch.device | str) -> torch.device:
    """The device that an argument names."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"'device' must be a device, such as 'cuda' or 'cpu', got {device!r}") from error


def check_has_values(name: str, values: Tensor) -> None:
    """Raises for a tensor on the meta device."""
    if values.is_meta:
        raise DeviceError(
            f"'{name}' must be on a CPU or a CUDA device, got a tensor on meta, which has no values"
        )


def check_features(x: Tensor, name: str) -> None:
    """Raises unless :obj:`x` is a matrix of a supported floating-point type."""
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        check_strided(x, name)
    if x.dtype not in DTYPES:
        raise TypeError(f"'{name}' must be one of {DTYPES}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"'{name}' must have shape [num_nodes, channels], got {list(x.shape)}")


def check_device(tensor: Tensor, x: Tensor, name: str, of: str = 'x') -> None:
    """Raises unless :obj:`tensor` is on the device of the features."""
    if tensor.device != x.device:
        raise ValueError(f"'{name}' is on {tensor.device}, but '{of}' is on {x.device}")


def check_edge_weight(edge_weight: Tensor, x: Tensor, num_edges: int, of: str = 'x') -> None:
    """Raises unless there is one weight per edge, of the features' dtype and device."""
    check_strided(edge_weight, 'edge_weight')
    if edge_weight.dtype != x.dtype:
        raise TypeError(f"'edge_weight' must be {x.dtype} as '{of}' is, got {edge_weight.dtype}")
    if edge_weight.dim() != 1 or edge_weight.size(0) != num_edges:
        raise ValueError(
            f"'edge_weight' must have shape [{num_edges}], got {list(edge_weight.shape)}"
        )
    check_device(edge_weight, x, 'edge_weight', of)
