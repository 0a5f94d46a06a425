"""The options of a loader: frozen values apart from the core, which check themselves."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import NegativeSampling, NumNeighbors, SamplerOutput
from torch_geometric.sampler.base import SubgraphType

from ..ops._library import with_cuda
from ..ops._numbers import check_number, check_share
from ..ops.neighbor_sample import check_num_neighbors
from ..ops.random_walk import MOST_VISITS
from ._shards import ShardedFeatures

#: A graph in this process, or in a remote backend.
GraphData: TypeAlias = Data | tuple[FeatureStore, GraphStore]
OutputTransform: TypeAlias = Callable[[SamplerOutput], SamplerOutput]

PLACES = ('auto', 'host', 'device')
SHARDED = 'sharded'  # a place of features alone
SAMPLERS = ('neighbor', 'random_walk')
# Arguments for worker processes, which this loader does not have.
WITHOUT_EFFECT = frozenset((
    'num_workers', 'persistent_workers', 'pin_memory', 'pin_memory_device', 'prefetch_factor',
    'worker_init_fn', 'multiprocessing_context', 'timeout', 'in_order', 'filter_per_worker',
    'dataset', 'collate_fn',
))  # fmt: skip


class Walks(NamedTuple):
    """Random walks, whose most visited nodes are the sampled neighbours."""

    num_walks: int
    walk_length: int
    restart: float


@dataclass(frozen=True)
class SamplingOptions:
    """How neighbours are sampled around seeds."""

    fanouts: tuple[int, ...]
    walks: Walks | None = None  # None: neighbours are the sources of sampled edges
    replace: bool = False
    subgraph_type: SubgraphType = SubgraphType.directional
    weight_attr: str | None = None
    is_sorted: bool = False
    transform: OutputTransform | None = None

    def __post_init__(self) -> None:
        check_bool('replace', self.replace)
        check_bool('is_sorted', self.is_sorted)
        check_callable('transform_sampler_output', self.transform)
        if self.walks is None:
            return
        if -1 in self.fanouts:
            raise ValueError("'num_neighbors' must be positive for random walks, got -1")
        is_directional = self.subgraph_type == SubgraphType.directional
        if not is_directional or self.replace or self.weight_attr is not None:
            raise ValueError(
                "'subgraph_type', 'replace' and 'weight_attr' must not be given for random walks"
            )


@dataclass(frozen=True)
class StorageOptions:
    """Where graph and features are, and which rows a batch reuses."""

    device: torch.device
    features: str = 'auto'
    topology: str = 'auto'
    cache_ratio: float = 0.0
    max_device_bytes: int | None = None
    match: bool = True
    reorder: bool | None = None  # None: wherever rows are reused
    window: int = 8

    def __post_init__(self) -> None:
        check_bool('match', self.match)
        if self.reorder is not None:
            check_bool('reorder', self.reorder)
        check_number('window', self.window, 1)
        check_share('cache_ratio', self.cache_ratio)
        if self.max_device_bytes is not None:
            check_number('max_device_bytes', self.max_device_bytes)
        check_choice('features', self.features, (*PLACES, SHARDED))
        check_choice('topology', self.topology, PLACES)


@dataclass(frozen=True)
class BatchOptions:
    """How an epoch divides its seeds into batches, and the batches among replicas."""

    batch_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    rank: int = 0
    num_replicas: int = 1
    sampler: Iterable[int] | None = None  # positions of seeds
    batch_sampler: Iterable[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        check_bool('shuffle', self.shuffle)
        check_bool('drop_last', self.drop_last)
        check_number('batch_size', self.batch_size, 1)
        given = (self.sampler is not None) + (self.batch_sampler is not None)
        if given == 2 or (given == 1 and (self.shuffle or self.num_replicas > 1)):
            raise ValueError(
                "'sampler' and 'batch_sampler' must be given without 'shuffle' and "
                "'num_replicas'"
            )
        if self.batch_sampler is not None and (self.batch_size != 1 or self.drop_last):
            raise ValueError("'batch_sampler' must be given without 'batch_size' and 'drop_last'")


def check_data(data: object) -> None:
    if isinstance(data, HeteroData):
        raise TypeError(
            "'data' must be a graph with one type of nodes and edges, got HeteroData: use "
            'torch_geometric.loader.NeighborLoader, or data.to_homogeneous()'
        )
    if isinstance(data, Data):
        return
    if isinstance(data, (tuple, list)) and len(data) == 2:
        features, graph = data
        if isinstance(features, FeatureStore) and isinstance(graph, GraphStore):
            return
    raise TypeError(
        f"'data' must be a Data object or a (FeatureStore, GraphStore), got {type(data).__name__}"
    )


def refuse_unsupported(
    name: str, disjoint: bool, has_time: bool, neighbor_sampler: object,
    kwargs: Mapping[str, object],
) -> None:  # fmt: skip
    """Raises an error for arguments of PyG's loader that the loader of this name does not have."""
    instead = f'use torch_geometric.loader.{name.removeprefix("Fast")}'
    if disjoint:
        raise ValueError(f"'disjoint' must be False, batches are one graph: {instead}")
    if has_time:
        raise ValueError(
            f"'time_attr', 'input_time' and 'temporal_strategy' must not be given, edges have no "
            f'time here: {instead}'
        )
    if neighbor_sampler is not None:
        raise TypeError(f"'neighbor_sampler' must be None, this loader samples itself: {instead}")
    if kwargs.get('collate_fn') is not None:
        raise TypeError("'collate_fn' must not be given: use 'transform'")
    unknown = sorted(set(kwargs) - WITHOUT_EFFECT)
    if unknown:
        raise TypeError(f'{name} got unexpected arguments {unknown}')


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"'{name}' must be True or False, got {value!r}")


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"'{name}' must be callable, got {type(value).__name__}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"'{name}' must be one of {choices}, got {value!r}")


def resolve_fanouts(num_neighbors: Sequence[int] | NumNeighbors) -> tuple[int, ...]:
    if isinstance(num_neighbors, NumNeighbors):
        num_neighbors = num_neighbors.values
    if isinstance(num_neighbors, (list, tuple)):
        num_neighbors = [int(k) if isinstance(k, np.integer) else k for k in num_neighbors]
    return check_num_neighbors(num_neighbors)


def resolve_subgraph_type(subgraph_type: SubgraphType | str, directed: bool) -> SubgraphType:
    if directed:
        return SubgraphType(subgraph_type)
    warnings.warn(
        "'directed' is deprecated, use subgraph_type='induced' instead", stacklevel=3
    )
    return SubgraphType.induced


def resolve_negatives(
    neg_sampling: NegativeSampling | str | dict | None, ratio: float | None, true_negatives: bool
) -> NegativeSampling | None:
    """PyG's options of negative links, from both of its arguments."""
    check_bool('true_negatives', true_negatives)
    if ratio is not None and (isinstance(ratio, bool) or not isinstance(ratio, (int, float))):
        raise TypeError(f"'neg_sampling_ratio' must be a number, got {type(ratio).__name__}")
    if ratio is not None and not 0 <= ratio < float('inf'):
        raise ValueError(f"'neg_sampling_ratio' must be finite and not negative, got {ratio}")
    if ratio:
        if neg_sampling is not None:
            raise ValueError("'neg_sampling' and 'neg_sampling_ratio' must not both be given")
        neg_sampling = NegativeSampling('binary', ratio)
    if not isinstance(neg_sampling, (NegativeSampling, str, dict, tuple, NoneType)):
        raise TypeError(
            f"'neg_sampling' must be 'binary', 'triplet' or a NegativeSampling, got "
            f'{type(neg_sampling).__name__}'
        )
    out = NegativeSampling.cast(neg_sampling)
    if out is None:
        if true_negatives:
            raise ValueError("'true_negatives' must be given with 'neg_sampling'")
        return None
    if not out.amount < float('inf'):
        raise ValueError(f"'neg_sampling.amount' must be finite, got {out.amount}")
    return out


def resolve_walks(
    sampler: str | Iterable[int], num_walks: int, walk_length: int, restart: float
) -> Walks | None:
    """The walks of :obj:`sampler='random_walk'`; :obj:`None` for any other sampler."""
    if not isinstance(sampler, str):
        return None
    check_choice('sampler', sampler, SAMPLERS)
    if sampler != 'random_walk':
        return None
    check_number('num_walks', num_walks, 1)
    check_number('walk_length', walk_length, 1)
    check_share('restart', restart)
    if num_walks * walk_length > MOST_VISITS:
        raise ValueError(
            f"'num_walks' times 'walk_length' must be at most {MOST_VISITS}, got {num_walks} times "
            f'{walk_length}'
        )
    return Walks(num_walks, walk_length, restart)


def resolve_replicas(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    if (rank is None) != (num_replicas is None):
        raise ValueError("'rank' and 'num_replicas' must be given together")
    if rank is None or num_replicas is None:
        return 0, 1
    check_number('num_replicas', num_replicas, 1)
    check_number('rank', rank)
    if rank >= num_replicas:
        raise ValueError(f"'rank' must be from 0 to {num_replicas - 1}, got {rank}")
    return rank, num_replicas


def resolve_seed(
    seed: int | None, generator: torch.Generator | None, batches: BatchOptions
) -> int:
    """The seed of all randomness, drawn from the generator if it is not given."""
    if seed is not None:
        if generator is not None:
            raise ValueError("'seed' and 'generator' must not both be given")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"'seed' must be an integer, got {type(seed).__name__}")
        return seed
    if batches.num_replicas > 1 and batches.shuffle:
        raise ValueError(
            "'seed' must be given, with the same value for all, if several replicas shuffle"
        )
    return int(torch.randint(2**62, (1,), generator=generator))


def resolve_device(data: GraphData, device: torch.device | str | None) -> torch.device:
    """The device of the batches: by default that of the first tensor of data."""
    if device is None:
        values = data._store.values() if isinstance(data, Data) else ()
        tensors = [v.part if isinstance(v, ShardedFeatures) else v for v in values]
        devices = [value.device for value in tensors if isinstance(value, Tensor)]
        out = devices[0] if devices else torch.device('cpu')
    else:
        out = torch.device(device)
    if out.type not in ('cpu', 'cuda'):
        raise ValueError(f"'device' must be a CPU or a CUDA device, got {str(out)!r}")
    if out.type == 'cuda':
        if not with_cuda():
            raise ValueError("'device' must be 'cpu': pyg_fast was built without CUDA")
        if str(out) == 'cuda':
            out = torch.device('cuda', torch.cuda.current_device())
    return out
