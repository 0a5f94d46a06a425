"""The options of a loader: frozen values apart from the core, which check themselves."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.sampler.base import SubgraphType
from torch_geometric.sampler.neighbor_sampler import NumNeighborsType
from torch_geometric.typing import EdgeType, EdgeTypeStr

from .._alike import did_you_mean
from ..ops._checks import to_device
from ..ops._library import with_cuda
from ..ops._numbers import check_number, check_share
from ..ops.neighbor_sample import check_num_neighbors
from ..ops.random_walk import MOST_VISITS
from ._shards import ShardedFeatures

#: A graph in this process, or in a remote backend.
GraphData: TypeAlias = Data | HeteroData | tuple[FeatureStore, GraphStore]
OutputTransform: TypeAlias = Callable[[Any], Any]

PLACES = ('auto', 'host', 'device')
SHARDED = 'sharded'  # a place of features alone
SAMPLERS = ('neighbor', 'random_walk')
NEGATIVES = ('binary', 'triplet')
STRATEGIES = ('uniform', 'last')
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
    by_type: tuple[tuple[int, ...], ...] | None = None  # fan-outs by hop and edge type: HeteroData
    disjoint: bool = False
    time_attr: str | None = None
    temporal_strategy: str = 'uniform'
    max_age: int | None = None

    @property
    def has_roots(self) -> bool:
        """Whether each seed has a subgraph of its own."""
        return self.disjoint or self.time_attr is not None

    @property
    def is_typed(self) -> bool:
        """Whether the sampler with types, times and subgraphs makes the batches."""
        return self.by_type is not None or self.has_roots

    def __post_init__(self) -> None:
        check_bool('replace', self.replace)
        check_bool('is_sorted', self.is_sorted)
        check_bool('disjoint', self.disjoint)
        check_callable('transform_sampler_output', self.transform)
        check_choice('temporal_strategy', self.temporal_strategy, STRATEGIES)
        if self.time_attr is not None and not isinstance(self.time_attr, str):
            raise TypeError(f"'time_attr' must be a name, got {type(self.time_attr).__name__}")
        if self.max_age is not None:
            check_number('max_age', self.max_age)
            if self.time_attr is None:
                raise ValueError("'max_age' must not be given without 'time_attr'")
        if self.has_roots and self.subgraph_type == SubgraphType.induced:
            raise ValueError(
                "'disjoint' and 'time_attr' must not be given with subgraph_type='induced'"
            )
        if self.walks is None:
            return
        if self.is_typed:
            raise ValueError(
                'random walks must be on a graph with one type of nodes and edges, without '
                "'disjoint' and 'time_attr'"
            )
        if min(self.fanouts) < 1:
            raise ValueError(
                f"'num_neighbors' must be positive for random walks, got {min(self.fanouts)}"
            )
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
                "'sampler' and 'batch_sampler' must be given without 'shuffle' and 'num_replicas'"
            )
        if self.batch_sampler is not None and (self.batch_size != 1 or self.drop_last):
            raise ValueError("'batch_sampler' must be given without 'batch_size' and 'drop_last'")


def check_data(data: object) -> None:
    if isinstance(data, (Data, HeteroData)):
        return
    if isinstance(data, (tuple, list)) and len(data) == 2:
        features, graph = data
        if isinstance(data, list) and isinstance(graph, Data):
            raise TypeError("'data' must be one graph, got a list: Batch.from_data_list joins them")
        if isinstance(features, FeatureStore) and isinstance(graph, GraphStore):
            return
    raise TypeError(
        f"'data' must be a Data or HeteroData object or a (FeatureStore, GraphStore), got "
        f'{type(data).__name__}'
    )


def check_remote(data: object, sampling: SamplingOptions) -> None:
    """Raises an error for what a remote backend does not have."""
    if not isinstance(data, (Data, HeteroData)) and sampling.is_typed:
        raise ValueError(
            "'disjoint' and 'time_attr' must not be given for a (FeatureStore, GraphStore): use "
            'torch_geometric.loader.NeighborLoader'
        )


def refuse_unsupported(
    loader: type, neighbor_sampler: object, kwargs: Mapping[str, object]
) -> None:
    """Raises an error for arguments of PyG's loader that this loader does not have."""
    name = loader.__name__
    if neighbor_sampler is not None:
        raise TypeError(
            "'neighbor_sampler' must be None, this loader samples itself: use "
            f'torch_geometric.loader.{name.removeprefix("Fast")}'
        )
    if kwargs.get('collate_fn') is not None:
        raise TypeError("'collate_fn' must not be given: use 'transform'")
    refuse_unknown(loader, kwargs)


def refuse_unknown(loader: type, kwargs: Mapping[str, object]) -> None:
    """Raises an error for arguments that no loader has, with the name that a user may mean."""
    unknown = sorted(set(kwargs) - WITHOUT_EFFECT)
    if unknown:
        known = {*inspect.signature(loader).parameters, *WITHOUT_EFFECT}
        alike = did_you_mean(unknown[0], known)
        raise TypeError(f'{loader.__name__} got unexpected arguments {unknown}{alike}')


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"'{name}' must be True or False, got {value!r}")


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"'{name}' must be callable, got {type(value).__name__}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"'{name}' must be one of {choices}, got {value!r}")


def resolve_fanouts(
    data: GraphData, num_neighbors: NumNeighborsType
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...] | None]:
    """The fan-outs by hop, or of HeteroData by hop and edge type."""
    if isinstance(data, HeteroData):
        return (), _typed_fanouts(data, num_neighbors)
    if isinstance(num_neighbors, NumNeighbors):
        num_neighbors = num_neighbors.values
    return check_num_neighbors(_as_ints(num_neighbors), least=0), None


def _typed_fanouts(
    data: HeteroData, num_neighbors: NumNeighborsType
) -> tuple[tuple[int, ...], ...]:
    """The fan-outs by hop and edge type; zero: no edges of this type."""
    if isinstance(num_neighbors, NumNeighbors):
        default, num_neighbors = num_neighbors.default, num_neighbors.values
    else:
        default = None
    edge_types = data.edge_types
    if not isinstance(num_neighbors, Mapping):
        lists = dict.fromkeys(edge_types, num_neighbors)
    else:
        lists = {_edge_type_of(data, key): value for key, value in num_neighbors.items()}
        missing = [key for key in edge_types if key not in lists]
        if missing and default is None:
            raise ValueError(f"'num_neighbors' must name all edge types, got none for {missing[0]}")
        lists = {key: lists.get(key, default) for key in edge_types}
    checked = [check_num_neighbors(_as_ints(value), least=0) for value in lists.values()]
    lengths = {len(value) for value in checked}
    if len(lengths) > 1:
        raise ValueError(
            f"'num_neighbors' must have as many hops for all edge types, got {sorted(lengths)}"
        )
    return tuple(zip(*checked, strict=True))


def _edge_type_of(data: HeteroData, key: Any) -> EdgeType:
    """The edge type that a key names, also as PyG's text or without a relation."""
    edge_type = key
    if not isinstance(key, tuple) or len(key) != 3:
        with suppress(ValueError):
            edge_type = EdgeTypeStr(key).to_tuple()
    if edge_type not in data.edge_types:
        raise ValueError(
            f"'num_neighbors' must name edge types of 'data', {data.edge_types}, got {key!r}"
        )
    return edge_type


def _as_ints(values: Any) -> Any:
    """A list with Python's integers in place of NumPy's; anything else as it is."""
    if not isinstance(values, (list, tuple)):
        return values
    return [int(k) if isinstance(k, np.integer) else k for k in values]


def resolve_subgraph_type(subgraph_type: SubgraphType | str, directed: bool) -> SubgraphType:
    if directed:
        return SubgraphType(subgraph_type)
    warnings.warn("'directed' is deprecated, use subgraph_type='induced' instead", stacklevel=3)
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
    mode: object = neg_sampling
    if isinstance(neg_sampling, dict):
        mode = neg_sampling.get('mode')
    elif isinstance(neg_sampling, tuple):
        mode = next(iter(neg_sampling), None)
    if isinstance(mode, str):
        check_choice('neg_sampling', mode, NEGATIVES)
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


def _check_generator(generator: object) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        got = type(generator).__name__
        raise TypeError(f"'generator' must be a torch.Generator, got {got}")


def resolve_seed(seed: int | None, generator: torch.Generator | None, batches: BatchOptions) -> int:
    """The seed of all randomness, drawn from the generator if it is not given."""
    _check_generator(generator)
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
        stores = data.stores if isinstance(data, (Data, HeteroData)) else ()
        values = [value for store in stores for value in store.values()]
        tensors = [v.part if isinstance(v, ShardedFeatures) else v for v in values]
        devices = [value.device for value in tensors if isinstance(value, Tensor)]
        out = devices[0] if devices else torch.device('cpu')
    else:
        out = to_device(device)
    if out.type not in ('cpu', 'cuda'):
        raise ValueError(f"'device' must be a CPU or a CUDA device, got {str(out)!r}")
    if out.type == 'cuda':
        if not with_cuda():
            raise ValueError("'device' must be 'cpu': pyg_fast was built without CUDA")
        if not torch.cuda.is_available():
            raise ValueError(f"'device' must be 'cpu', since torch finds no GPU, got {str(out)!r}")
        if str(out) == 'cuda':
            out = torch.device('cuda', torch.cuda.current_device())
    return out
