"""The seed nodes of each batch of an epoch."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WORD = 2**64 - 1


def mixed(*numbers: int) -> int:
    """A pseudo-random 63-bit seed from numbers."""
    state = 0
    for number in numbers:  # SplitMix64
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state >> 1


def resolve_input_nodes(
    input_nodes: Any, num_nodes: int, input_id: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Checked int64 ids of seeds on the CPU, and :obj:`batch.input_id` of each (:obj:`None`: its
    position). Both are copies: the caller may write the originals at any time."""
    if input_nodes is None:
        nodes = torch.arange(num_nodes)
    else:
        # Copy first: a check of the original would not cover later writes.
        nodes = torch.clone(_as_tensor(input_nodes).detach().cpu())
        if nodes.dtype == torch.bool:
            if nodes.numel() != num_nodes:
                raise ValueError(
                    f"'input_nodes' must have one entry for each of the {num_nodes} nodes if it is "
                    f'a mask, got {nodes.numel()}'
                )
            nodes = nodes.nonzero().view(-1)
            input_id = nodes if input_id is None else input_id
        nodes = nodes.to(torch.int64)
        if nodes.numel() > 0:
            low, high = int(nodes.min()), int(nodes.max())
            if low < 0 or high >= num_nodes:
                raise IndexError(
                    f"'input_nodes' must be from 0 to {num_nodes - 1}, got "
                    f'{low if low < 0 else high}'
                )
    if input_id is not None:
        if not isinstance(input_id, Tensor):
            raise TypeError(f"'input_id' must be a tensor, got {type(input_id).__name__}")
        if input_id.dim() != 1 or input_id.numel() != nodes.numel():
            raise ValueError(
                f"'input_id' must have shape [{nodes.numel()}] as 'input_nodes', got "
                f'{list(input_id.shape)}'
            )
        input_id = torch.clone(input_id.detach().cpu())
    return nodes, input_id


def _as_tensor(input_nodes: Any) -> Tensor:
    if isinstance(input_nodes, str) or (
        isinstance(input_nodes, tuple) and input_nodes and isinstance(input_nodes[0], str)
    ):
        raise TypeError("'input_nodes' must not name a node type: the graph has only one")
    if not isinstance(input_nodes, (Tensor, np.ndarray, Iterable)):
        raise TypeError(
            f"'input_nodes' must be a tensor or a list of nodes, got {type(input_nodes).__name__}"
        )
    if not isinstance(input_nodes, (Tensor, np.ndarray)):
        input_nodes = list(input_nodes)
        if not input_nodes:
            return torch.empty(0, dtype=torch.int64)
    nodes = torch.as_tensor(input_nodes)
    if nodes.is_floating_point() or nodes.is_complex():
        raise TypeError(f"'input_nodes' must hold integers or be a mask, got {nodes.dtype}")
    if nodes.dim() != 1:
        raise ValueError(f"'input_nodes' must have one dimension, got {list(nodes.shape)}")
    return nodes


def checked_positions(name: str, positions: Any, num_seeds: int) -> Tensor:
    """A copy of positions in the list of seeds, int64 on the CPU.

    Raises:
        TypeError, IndexError: If they are invalid; `name` says where they come from.
    """
    # Copy first: a sampler may reuse one array while batches wait.
    positions = torch.clone(torch.as_tensor(positions).detach().cpu())
    if positions.numel() == 0:
        return positions.new_empty(0, dtype=torch.int64)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f'{name} must give positions of seeds, got {positions.dtype}')
    positions = positions.to(torch.int64).view(-1)
    low, high = int(positions.min()), int(positions.max())
    if low < 0 or high >= num_seeds:
        raise IndexError(
            f'{name} must give positions of seeds from 0 to {num_seeds - 1}, got '
            f'{low if low < 0 else high}'
        )
    return positions


class Seeds:
    """The batches of every epoch, as positions in the list of seeds.

    The order of an epoch depends only on the seed and the number of the epoch. Several replicas
    divide it evenly: each step gives a part to every replica, and the sizes of two parts of an
    epoch differ by at most one.
    """

    def __init__(
        self,
        num_seeds: int,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        seed: int,
        rank: int,
        num_replicas: int,
        sampler: Iterable | None,
        batch_sampler: Iterable | None,
    ) -> None:
        self.num_seeds, self.batch_size = num_seeds, batch_size
        self.shuffle, self.drop_last, self.seed = shuffle, drop_last, seed
        self.rank, self.num_replicas = rank, num_replicas
        self.sampler, self.batch_sampler = sampler, batch_sampler
        parts = len(self) * num_replicas
        if num_replicas > 1 and parts > num_seeds:
            raise ValueError(
                f"'input_nodes' must hold at least {parts}, one for each of the {num_replicas} "
                f'replicas in each step, got {num_seeds}'
            )

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)  # type: ignore[arg-type]
        count = self.num_seeds if self.sampler is None else len(self.sampler)  # type: ignore
        step = self.batch_size * self.num_replicas
        return count // step if self.drop_last else -(-count // step)

    def batches(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """The number of each batch of this replica, and the positions of its seeds: a tensor of its
        own, since the batch keeps it."""
        if self.batch_sampler is not None:
            for number, batch in enumerate(self.batch_sampler):
                yield number, checked_positions('a sampler', batch, self.num_seeds)
            return
        if self.sampler is not None:
            order = checked_positions('a sampler', list(self.sampler), self.num_seeds)
        elif self.shuffle:
            generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
            order = torch.randperm(self.num_seeds, generator=generator)
        else:
            order = torch.arange(self.num_seeds)
        count, size = order.numel(), self.batch_size
        if self.num_replicas == 1:
            if self.drop_last:
                count -= count % size
            for number, start in enumerate(range(0, count, size)):
                yield number, order[start : min(start + size, count)].clone()
            return
        num_parts = len(self) * self.num_replicas
        if self.drop_last:
            count = num_parts * size
        for number in range(self.rank, num_parts, self.num_replicas):
            start, end = (k * count // num_parts for k in (number, number + 1))
            yield number, order[start:end].clone()
