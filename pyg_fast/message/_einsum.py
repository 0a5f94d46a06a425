"""`torch.einsum` of values of the edges and a parameter, by operations that the parser reads:
torch's own product has the edges in its second dimension."""

import math
import re

import torch
from torch import Tensor

_MOST_MATRICES = 16  # that are multiplied one by one


def einsum_of_edges(equation: str, operands: tuple[Tensor, ...], num_edges: int) -> Tensor | None:
    """The result, or None for what torch computes as it is: other than two operands, of which one
    has the edges."""
    found = re.fullmatch(r'(\w+),(\w+)->(\w+)', equation.replace(' ', ''))
    if found is None or len(operands) != 2:
        return None
    names: tuple[str, ...] = found.groups()
    if any(len(set(each)) < len(each) for each in names):
        return None
    of_edges = [k for k in (0, 1) if num_edges in operands[k].shape]
    if len(of_edges) != 1:
        return None
    (k,) = of_edges
    x, w = operands[k], operands[1 - k]
    of_x, of_w, out = names[k], names[1 - k], names[2]
    edge = of_x[[*x.shape].index(num_edges)]
    if edge in of_w or edge not in out or len(of_x) != x.dim() or len(of_w) != w.dim():
        return None
    x, of_x = _summed(x, of_x, of_w + out)
    w, of_w = _summed(w, of_w, of_x + out)
    shared = ''.join(n for n in of_x if n in of_w and n in out)
    reduced = ''.join(n for n in of_x if n in of_w and n not in out)
    new = ''.join(n for n in of_w if n not in of_x)
    rest = ''.join(n for n in of_x if n not in shared + reduced + edge)
    if not reduced or not new:
        # Products of numbers, which autocast would not compute in its dtype, as it does matrices.
        if reduced and torch.is_autocast_enabled(x.device.type):
            return None
        order = edge + rest + shared + new + reduced
        product = _aligned(x, of_x, order) * _aligned(w, of_w, order)
        dims = [order.index(n) for n in reduced]
        result = product.sum(dims) if dims else product
        return _ordered(result, order[: len(order) - len(reduced)], out)
    sizes = dict(zip(of_x + of_w, [*x.shape, *w.shape], strict=True))
    count, size = (math.prod(sizes[n] for n in some) for some in (shared, reduced))
    if count > _MOST_MATRICES:
        return None
    x = _ordered(x, of_x, edge + shared + rest + reduced)
    x = x.reshape(num_edges, count, *(sizes[n] for n in rest), size)
    w = _ordered(w, of_w, shared + reduced + new).reshape(count, size, -1)
    parts = [torch.matmul(x[:, h], w[h]) for h in range(count)]
    result = torch.stack(parts, 1) if shared else parts[0]
    order = edge + shared + rest + new
    return _ordered(result.reshape([sizes[n] for n in order]), order, out)


def _summed(x: Tensor, names: str, kept: str) -> tuple[Tensor, str]:
    """Without the dimensions that no other operand has, nor the result."""
    dims = [k for k, n in enumerate(names) if n not in kept]
    return (x.sum(dims) if dims else x), ''.join(n for n in names if n in kept)


def _ordered(x: Tensor, names: str, order: str) -> Tensor:
    return x if names == order else x.permute([names.index(n) for n in order])


def _aligned(x: Tensor, names: str, order: str) -> Tensor:
    """With all dimensions of `order`, those that it lacks of size 1."""
    x = _ordered(x, names, ''.join(n for n in order if n in names))
    for k, n in enumerate(order):
        if n not in names:
            x = x.unsqueeze(k)
    return x
