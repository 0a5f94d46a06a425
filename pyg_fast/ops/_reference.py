"""Shared by the references of several ops: edges, messages, random bits."""

import torch
from torch import Tensor


def edge_list(rowptr: Tensor, col: Tensor, perm: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the position in `value` of every edge."""
    degree = rowptr.diff().long()
    row = torch.arange(degree.size(0), device=col.device).repeat_interleave(degree)
    position = torch.arange(row.size(0), device=col.device)
    return row, col[position].long(), position if perm is None else perm[position].long()


def messages(x: Tensor, value: Tensor | None, source: Tensor, position: Tensor) -> Tensor:
    return x[source] if value is None else x[source] * value.double()[position, None]


def random_bits(seed: int, node: int, draw: int) -> int:
    """The `draw`-th 64 random bits of a node."""
    start = mixed_bits((seed + draw * 0xD1342543DE82EF95) % 2**64)
    return mixed_bits((start + node * 0x9E3779B97F4A7C15) % 2**64)


def mixed_bits(h: int) -> int:
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    return h ^ h >> 31
