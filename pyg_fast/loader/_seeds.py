"""The seeds of each batch of an epoch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from ..ops._checks import check_has_values
from ..ops.typed_sample import TypedSeeds
from ._options import BatchOptions, SamplingOptions
from ._pipeline import put
from ._structure import Structure
from ._typed_structure import EdgeType, TypedStructure, is_time

_WORD = 2**64 - 1


def mix_seeds(*numbers: int) -> int:
    """A pseudo-random 63-bit seed from numbers."""
    state = 0
    for number in numbers:  # SplitMix64
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _WORD
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _WORD
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _WORD
        state ^= state >> 31
    return state >> 1


class SeedBatch(NamedTuple):
    """The seeds of a batch: nodes around which it is sampled, and what it tells of them.

    Of :class:`~torch_geometric.data.HeteroData` `nodes` and `time` are by node type. Where each
    seed has a subgraph of its own, these are numbered in the order of the types here.
    """

    nodes: Tensor | dict[str, Tensor] | TypedSeeds
    metadata: tuple[object, ...]  # as that of PyG's SamplerOutput
    time: Tensor | dict[str, Tensor] | None = None  # int64: only earlier neighbours are sampled
    num_nodes: Tensor | None = None  # how many of `nodes`, on the device; the others repeat them
    batch: Tensor | None = None  # `batch.batch` of each subgraph; None: its number
    #: By edge type, sources and destinations of edges that the batch must not have.
    dropped: dict[EdgeType, Tensor] | None = None


class SeedTimes(NamedTuple):
    """The times that the graph gives the seeds of a type."""

    node_time: Tensor | None  # int64, of all nodes of the type
    is_needed: bool  # neighbours are sampled by time
    of_edges: bool  # whose times are those of edges


NO_TIMES = SeedTimes(None, False, False)


@dataclass(frozen=True)
class NodeInput:
    """A loader's arguments that say around which nodes to sample."""

    argument: ClassVar[str] = 'input_nodes'
    input_nodes: Any  # PyG's
    input_id: Tensor | None = None
    input_time: Tensor | None = None

    def read(
        self, data: Data | HeteroData | None, graph: Structure | TypedStructure,
        options: SamplingOptions, device: torch.device,
    ) -> 'NodeSeeds':  # fmt: skip
        """The seeds, checked and copied."""
        input_type, nodes, num_nodes, times = None, self.input_nodes, graph.num_nodes, NO_TIMES
        if isinstance(data, HeteroData):
            input_type, nodes = split_input_nodes(data, nodes)
            num_nodes = data[input_type].num_nodes
        if isinstance(nodes, str):
            _refuse_name(data, input_type, nodes)
        if isinstance(graph, TypedStructure):
            times = SeedTimes(
                graph.node_time.get(input_type), options.time_attr is not None,
                graph.has_edge_time,
            )  # fmt: skip
        return NodeSeeds.of(nodes, num_nodes, self.input_id, input_type, self.input_time, times)


@dataclass(frozen=True)
class NodeSeeds:
    """Nodes around which batches are sampled, on the CPU: a copy, since the caller may write the
    originals at any time."""

    nodes: Tensor  # int64
    input_id: Tensor | None  # `batch.input_id` of each; None: its position
    input_type: str | None = None
    input_time: Tensor | None = None  # `batch.seed_time` of each
    time: Tensor | None = None  # int64: what counts

    @classmethod
    def of(
        cls, input_nodes: Iterable[int] | Tensor | None, num_nodes: int, input_id: Tensor | None,
        input_type: str | None = None, input_time: Tensor | None = None,
        times: SeedTimes = NO_TIMES,
    ) -> 'NodeSeeds':  # fmt: skip
        """The seeds of a loader's arguments, checked."""
        if input_nodes is None:
            nodes = torch.arange(num_nodes)
        else:
            # Copy first: a check of the original would not cover later writes.
            nodes = copy_on_cpu('input_nodes', _as_tensor(input_nodes))
        if nodes.dtype == torch.bool:
            if nodes.numel() != num_nodes:
                raise ValueError(
                    f"'input_nodes' must have one entry for each of the {num_nodes} nodes if it is "
                    f'a mask, got {nodes.numel()}'
                )
            nodes = nodes.nonzero().view(-1)
            input_id = nodes if input_id is None else input_id
        nodes = nodes.to(torch.int64)
        wrong = find_outside(nodes, num_nodes)
        if wrong is not None:
            raise IndexError(f"'input_nodes' must be from 0 to {num_nodes - 1}, got {wrong}")
        given = nodes.numel(), 'input_nodes'
        if input_id is not None:
            input_id = copy_of_seeds('input_id', input_id, *given)
        if input_time is not None:
            input_time = copy_of_times('input_time', input_time, *given)
        time = _times(nodes, input_type, input_time, times)
        return cls(nodes, input_id, input_type, input_time, time)

    def __len__(self) -> int:
        return self.nodes.numel()

    def take(self, positions: Tensor, device: torch.device, seed: int) -> SeedBatch:
        def at(values: Tensor | None) -> Tensor | None:
            # A copy of few numbers need not wait for the work before it.
            return None if values is None else values[positions].to(device, non_blocking=True)

        input_id = positions if self.input_id is None else self.input_id[positions]
        input_id = input_id.to(device, non_blocking=True)
        nodes, time, kind = at(self.nodes), at(self.time), self.input_type
        assert nodes is not None
        return SeedBatch(
            nodes if kind is None else {kind: nodes}, (input_id, at(self.input_time)),
            time if kind is None or time is None else {kind: time},
        )  # fmt: skip

    def write(self, batch: Any, metadata: tuple) -> None:
        """Writes what a batch tells of its seeds."""
        store = batch._store if self.input_type is None else batch[self.input_type]
        for name, value in zip(('input_id', 'seed_time'), metadata, strict=True):
            put(store, name, value)
        put(store, 'batch_size', metadata[0].size(0))

    def to_input(self) -> NodeInput:
        nodes = self.nodes if self.input_type is None else (self.input_type, self.nodes)
        return NodeInput(nodes, self.input_id, self.input_time)

    def to_pyg(self) -> NodeSamplerInput:
        """A copy, as PyG's loader has it."""
        input_id, time = (t if t is None else t.clone() for t in (self.input_id, self.input_time))
        return NodeSamplerInput(input_id, self.nodes.clone(), time, self.input_type)


def _times(
    nodes: Tensor, input_type: str | None, input_time: Tensor | None, times: SeedTimes
) -> Tensor | None:
    """The time of each seed: as given, or that of its node."""
    if not times.is_needed:
        if input_time is not None:
            raise ValueError("'input_time' must be given together with 'time_attr'")
        return None
    if input_time is not None:
        return input_time.long()
    if times.node_time is not None:
        return times.node_time[nodes]
    of_type = '' if input_type is None else f' of type {input_type!r}'
    if times.of_edges:
        raise ValueError(
            f"'input_time' must be given for the seeds{of_type}: 'time_attr' names times of edges, "
            f'so that nodes have none'
        )
    raise ValueError(
        f"'input_time' must be given for the seeds{of_type}: nodes of this type have no 'time_attr'"
    )


def copy_of_seeds(name: str, values: object, count: int, argument: str) -> Tensor:
    """A copy on the CPU, of what is given for each of the seeds of an argument."""
    if not isinstance(values, Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(values).__name__}")
    if values.dim() != 1 or values.numel() != count:
        raise ValueError(
            f"'{name}' must have shape [{count}] as '{argument}', got {list(values.shape)}"
        )
    return copy_on_cpu(name, values)


def copy_on_cpu(name: str, values: Tensor) -> Tensor:
    """A copy on the CPU of an argument."""
    check_has_values(name, values)
    return torch.clone(values.detach().cpu())


def copy_of_times(name: str, values: object, count: int, argument: str) -> Tensor:
    """The same of times."""
    out = copy_of_seeds(name, values, count, argument)
    if not is_time(out.dtype):
        raise TypeError(f"'{name}' must hold integers, got {out.dtype}")
    return out


def split_input_nodes(
    data: HeteroData, input_nodes: object
) -> tuple[str, Iterable[int] | Tensor | None]:
    """The type of the seeds of :class:`~torch_geometric.data.HeteroData`, and the seeds."""
    if isinstance(input_nodes, str):
        input_type, nodes = input_nodes, None
    elif (
        isinstance(input_nodes, (tuple, list)) and len(input_nodes) == 2
        and isinstance(input_nodes[0], str)
    ):  # fmt: skip
        input_type, nodes = input_nodes
    else:
        raise TypeError(
            f"'input_nodes' must be a node type, or a pair of it and nodes, for HeteroData, got "
            f'{type(input_nodes).__name__}'
        )
    if input_type not in data.node_types:
        raise ValueError(
            f"'input_nodes' must name one of the node types {data.node_types}, got {input_type!r}"
        )
    return input_type, nodes


def _refuse_name(data: Data | HeteroData | None, input_type: str | None, name: str) -> None:
    """Raises for the name of a mask, in place of which the mask itself is wanted."""
    if input_type is None and (data is None or name not in data):
        return  # No mask: perhaps a node type is meant.
    store = 'data' if input_type is None else f'data[{input_type!r}]'
    raise TypeError(
        f"'input_nodes' must be a tensor or a list of nodes, got the name {name!r}: pass "
        f'{store}.{name}'
    )


def _as_tensor(input_nodes: object) -> Tensor:
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


def check_positions(name: str, positions: Iterable[int] | Tensor, num_seeds: int) -> Tensor:
    """Copies positions in the list of seeds, as int64 on the CPU.

    Raises:
        TypeError, IndexError: If they are invalid; `name` says where they come from.
    """
    # Copy first: a sampler may reuse one array while batches wait.
    try:
        positions = torch.clone(torch.as_tensor(positions).detach().cpu())
    except (TypeError, ValueError, RuntimeError) as error:
        got = type(positions).__name__
        raise TypeError(f'{name} must give positions of seeds, got {got}') from error
    if positions.numel() == 0:
        return positions.new_empty(0, dtype=torch.int64)
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(f'{name} must give positions of seeds, got {positions.dtype}')
    positions = positions.to(torch.int64).view(-1)
    wrong = find_outside(positions, num_seeds)
    if wrong is not None:
        raise IndexError(
            f'{name} must give positions of seeds from 0 to {num_seeds - 1}, got {wrong}'
        )
    return positions


def find_outside(ids: Tensor, end: int) -> int | None:
    """An id that is not from 0 to `end`, exclusive; None: there is none."""
    if ids.numel() == 0:
        return None
    low, high = int(ids.min()), int(ids.max())
    return low if low < 0 else high if high >= end else None


class SeedBatches:
    """The batches of every epoch, as positions in the list of seeds.

    The order of an epoch depends only on the seed and the number of the epoch. Several replicas
    divide it evenly: each step gives a part to every replica, and the sizes of two parts of an
    epoch differ by at most one.
    """

    def __init__(
        self, num_seeds: int, options: BatchOptions, seed: int, argument: str = 'input_nodes'
    ) -> None:
        self.num_seeds, self.options, self.seed = num_seeds, options, seed
        num_replicas, num_parts = options.num_replicas, len(self) * options.num_replicas
        if num_replicas > 1 and num_parts > num_seeds:
            raise ValueError(
                f"'{argument}' must hold at least {num_parts}, one for each of the {num_replicas} "
                f'replicas in each step, got {num_seeds}'
            )

    def __setstate__(self, state: dict) -> None:
        if 'options' not in state:  # Version 0.2 pickled the options one by one.
            num_seeds, seed = state.pop('num_seeds'), state.pop('seed')
            state = {'num_seeds': num_seeds, 'seed': seed, 'options': BatchOptions(**state)}
        self.__dict__.update(state)

    def __len__(self) -> int:
        options = self.options
        if options.batch_sampler is not None:
            return len(options.batch_sampler)  # type: ignore[arg-type]
        sampler = options.sampler
        count = self.num_seeds if sampler is None else len(sampler)  # type: ignore[arg-type]
        step = options.batch_size * options.num_replicas
        return count // step if options.drop_last else -(-count // step)

    def of_epoch(self, epoch: int) -> Iterator[tuple[int, Tensor]]:
        """The number of each batch of this replica, and the positions of its seeds: a tensor of its
        own, since the batch keeps it."""
        options, size = self.options, self.options.batch_size
        if options.batch_sampler is not None:
            for number, batch in enumerate(options.batch_sampler):
                yield number, check_positions('a sampler', batch, self.num_seeds)
            return
        order = self._order(epoch)
        count = order.numel()
        if options.num_replicas == 1:
            if options.drop_last:
                count -= count % size
            for number, start in enumerate(range(0, count, size)):
                yield number, order[start : min(start + size, count)].clone()
            return
        num_parts = len(self) * options.num_replicas
        if options.drop_last:
            count = num_parts * size
        for number in range(options.rank, num_parts, options.num_replicas):
            start, end = (k * count // num_parts for k in (number, number + 1))
            yield number, order[start:end].clone()

    def _order(self, epoch: int) -> Tensor:
        """The positions of all seeds, in the order of an epoch."""
        if self.options.sampler is not None:
            return check_positions('a sampler', list(self.options.sampler), self.num_seeds)
        if self.options.shuffle:
            generator = torch.Generator().manual_seed(mix_seeds(self.seed, epoch))
            return torch.randperm(self.num_seeds, generator=generator)
        return torch.arange(self.num_seeds)


Seeds = SeedBatches  # the name by which version 0.2 pickled it
