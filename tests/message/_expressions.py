"""Random messages, as Python functions of torch operations."""

import random
from collections.abc import Callable

import torch
from torch import Tensor

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sigmoid, torch.tanh, torch.relu, torch.neg, torch.abs, torch.exp,
    lambda t: torch.nn.functional.leaky_relu(t, 0.2), torch.nn.functional.silu,
    torch.nn.functional.elu, torch.nn.functional.softplus, torch.nn.functional.gelu,
    lambda t: t * 0.5 - 1, lambda t: (t * t + 1).sqrt(), lambda t: (t.abs() + 0.5).log(),
    lambda t: t.clamp(-0.5, 0.7), torch.sin, torch.cos, lambda t: t.pow(3),
    lambda t: t.softmax(-1), lambda t: torch.nn.functional.normalize(t, dim=-1),
    lambda t: t.sum(-1, keepdim=True).expand_as(t), lambda t: t - t.mean(-1, keepdim=True),
    lambda t: t.amax(-1, keepdim=True) + t, lambda t: t + 1,
    lambda t: t.view(t.size(0), 2, -1).transpose(1, 2).reshape(t.shape),
    lambda t: torch.cat([t[:, 2:], t[:, :2]], -1), lambda t: t[:, :1] * t,
    lambda t: t.unflatten(-1, (2, -1)).softmax(1).flatten(1), torch.atan,
    lambda t: (t.sin() * 0.9).acos(), lambda t: (t.cos() * 0.9).asin(),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add, torch.sub, torch.mul, lambda a, b: a / (b.abs() + 1), torch.maximum, torch.minimum,
    lambda a, b: torch.where(a > b, a, b * 0.5), lambda a, b: (a * b).sum(-1, keepdim=True) + a,
    lambda a, b: torch.where(a.isnan(), b, a), lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.cat([a, b], -1)[:, a.size(-1) // 2 : -(a.size(-1) // 2)],
    lambda a, b: torch.stack([a, b], 1).amax(1), lambda a, b: a.masked_fill(b > 0.5, 0.25),
    lambda a, b: torch.addcmul(a, b, b, value=0.1), lambda a, b: torch.atan2(a, b.abs() + 0.1),
]  # fmt: skip


class Expression:
    """A random tree of operations over named leaves; prints as their numbers."""

    def __init__(self, seed: int, leaves: list[str], depth: int = 4) -> None:
        self.random = random.Random(seed)
        self.leaves = leaves
        self.tree = self._made(depth)

    def _made(self, depth: int) -> tuple:
        kind = self.random.random()
        if depth == 0 or kind < 0.1:
            return (self.random.choice(self.leaves),)
        if kind < 0.5:
            return self.random.randrange(len(UNARY)), self._made(depth - 1)
        parts = self._made(depth - 1), self._made(depth - 1)
        return self.random.randrange(len(BINARY)), *parts

    def __call__(self, values: dict[str, Tensor]) -> Tensor:
        return self._value(self.tree, values)

    def _value(self, tree: tuple, values: dict[str, Tensor]) -> Tensor:
        if len(tree) == 1:
            return values[tree[0]]
        if len(tree) == 2:
            return UNARY[tree[0]](self._value(tree[1], values))
        return BINARY[tree[0]](self._value(tree[1], values), self._value(tree[2], values))

    def __repr__(self) -> str:
        return repr(self.tree)
