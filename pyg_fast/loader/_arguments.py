"""Checks of a loader's arguments."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData
from torch_geometric.sampler import NumNeighbors
from torch_geometric.sampler.base import SubgraphType

from ..ops._library import with_cuda
from ..ops.neighbor_sample import check_num_neighbors
from ..ops.random_walk import MOST_VISITS
from ._shards import ShardedFeatures
from ._walks import Walks

SAMPLERS = ('neighbor', 'random_walk')
# Arguments for worker processes, which this loader does not have.
_WITHOUT_EFFECT = frozenset((
    'num_workers', 'persistent_workers', 'pin_memory', 'pin_memory_device', 'prefetch_factor',
    'worker_init_fn', 'multiprocessing_context', 'timeout', 'in_order', 'filter_per_worker',
    'dataset', 'collate_fn',
))  # fmt: skip


def check_data(data: Any) -> None:
    if isinstance(data, HeteroData):
        raise TypeError(
            "'data' must be a graph with one type of nodes and edges, got HeteroData: use "
            'torch_geometric.loader.NeighborLoader, or data.to_homogeneous()'
        )
    if isinstance(data, Data):
        return
    pair = isinstance(data, (tuple, list)) and len(data) == 2
    if not (pair and isinstance(data[0], FeatureStore) and isinstance(data[1], GraphStore)):
        raise TypeError(
            f"'data' must be a Data object or a (FeatureStore, GraphStore), got "
            f'{type(data).__name__}'
        )


def refuse(
    disjoint: bool, time_attr: Any, input_time: Any, temporal_strategy: str, neighbor_sampler: Any,
    kwargs: dict[str, Any],
) -> None:  # fmt: skip
    instead = 'use torch_geometric.loader.NeighborLoader'
    if disjoint:
        raise ValueError(f"'disjoint' must be False, batches are one graph: {instead}")
    if time_attr is not None or input_time is not None or temporal_strategy != 'uniform':
        raise ValueError(
            f"'time_attr', 'input_time' and 'temporal_strategy' must not be given, edges have no "
            f'time here: {instead}'
        )
    if neighbor_sampler is not None:
        raise TypeError(f"'neighbor_sampler' must be None, this loader samples itself: {instead}")
    if kwargs.get('collate_fn') is not None:
        raise TypeError("'collate_fn' must not be given: use 'transform'")
    unknown = sorted(set(kwargs) - _WITHOUT_EFFECT)
    if unknown:
        raise TypeError(f'FastNeighborLoader got unexpected arguments {unknown}')


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"'{name}' must be True or False, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"'{name}' must be an integer, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"'{name}' must be at least {least}, got {value}")


def check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"'{name}' must be a number, got {type(value).__name__}")
    if not 0 <= value <= 1:
        raise ValueError(f"'{name}' must be from 0 to 1, got {value}")


def fanouts_of(num_neighbors: Any) -> tuple[int, ...]:
    if isinstance(num_neighbors, NumNeighbors):
        num_neighbors = num_neighbors.values
    if isinstance(num_neighbors, (list, tuple)):
        num_neighbors = [plain_int(count) for count in num_neighbors]
    return check_num_neighbors(num_neighbors)


def walks_of(num_walks: int, walk_length: int, restart: float) -> Walks:
    for name, count in (('num_walks', num_walks), ('walk_length', walk_length)):
        check_count(name, count)
    check_share('restart', restart)
    if num_walks * walk_length > MOST_VISITS:
        raise ValueError(
            f"'num_walks' times 'walk_length' must be at most {MOST_VISITS}, got {num_walks} times "
            f'{walk_length}'
        )
    return Walks(num_walks, walk_length, restart)


def check_walks(
    fanouts: tuple[int, ...], kind: SubgraphType, replace: bool, weight_attr: str | None
) -> None:
    if -1 in fanouts:
        raise ValueError("'num_neighbors' must be positive for random walks, got -1")
    if kind != SubgraphType.directional or replace or weight_attr is not None:
        raise ValueError(
            "'subgraph_type', 'replace' and 'weight_attr' must not be given for random walks"
        )


def plain_int(value: Any) -> Any:
    """Converts integers of other types, such as numpy's, to int."""
    return int(value) if isinstance(value, np.integer) else value


def replicas_of(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    if (rank is None) != (num_replicas is None):
        raise ValueError("'rank' and 'num_replicas' must be given together")
    if rank is None or num_replicas is None:
        return 0, 1
    check_count('num_replicas', num_replicas)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"'rank' must be an integer, got {type(rank).__name__}")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"'rank' must be from 0 to {num_replicas - 1}, got {rank}")
    return rank, num_replicas


def device_of(data: Any, device: torch.device | str | None) -> torch.device:
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
