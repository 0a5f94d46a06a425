"""The features of a loader's data, in memory that batches read."""

import copy
import dataclasses

import torch
from torch_geometric.data import Data

from ._columns import SHORT_ROW, Budget, Cache, Column, Table, is_plain
from ._options import SHARDED, GraphData, StorageOptions
from ._shards import Exchange, ShardedFeatures
from ._structure import Structure


class LocalFeatures:
    """The attributes of a :class:`~torch_geometric.data.Data` object."""

    def __init__(
        self, data: Data, graph: Structure, storage: StorageOptions, budget: Budget,
        stream: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        device, place = storage.device, storage.features
        cache = Cache.of_most_sampled(graph, storage.cache_ratio, device)
        num_nodes, num_edges = graph.num_nodes, graph.col.numel()
        self.nodes = Table(data, 'node', num_nodes, device, stream, place, budget, cache)
        self.edges = Table(data, 'edge', num_edges, device, stream, place, budget, None)
        #: Reads features that other processes hold.
        self.exchange: Exchange | None = None
        columns = self.nodes.update()[1]
        shards = [c.value for c in columns.values() if isinstance(c.value, ShardedFeatures)]
        if shards:
            self.exchange = Exchange(shards[0], device)
            self.select_shards(columns)

    def crosses_bus(self) -> bool:
        """Whether any features are not on the device of the batches."""
        if self.exchange is not None and self.exchange.size > 1:
            return True
        return any(column.on_host for column in self.nodes.update()[1].values())

    def select_shards(self, columns: dict[str, Column]) -> dict[str, ShardedFeatures]:
        """The features of which other processes hold rows, in the same order in all of them."""
        shards = {}
        for key in sorted(columns):
            value = columns[key].value
            if isinstance(value, ShardedFeatures):
                if self.exchange is None:
                    raise ValueError(
                        f"'data.{key}' must be sharded before the loader is made: make a new loader"
                    )
                self.exchange.check(key, value)
                shards[key] = value
        return shards

    def end_iterator(self, end: Exception) -> None:
        """Tells the processes with which rows are exchanged that an iterator has ended."""
        if self.exchange is None:
            return
        if not isinstance(end, StopIteration):
            self.exchange.fail(end)
            return
        shards = self.select_shards(self.nodes.update()[1])
        self.exchange.answer(list(shards.values()))

    def refresh(self) -> None:
        """Reads all copies again; the next batch reuses no rows of the previous one."""
        self.nodes.update(refresh=True)
        self.edges.update(refresh=True)


def shard_features(data: GraphData, storage: StorageOptions) -> tuple[GraphData, StorageOptions]:
    """With :obj:`features='sharded'` a copy of data whose features, without short rows, are divided
    over all processes; otherwise the arguments."""
    if storage.features != SHARDED:
        return data, storage
    if not isinstance(data, Data):
        raise ValueError(
            "'features' must be 'auto' for a (FeatureStore, GraphStore), got 'sharded'"
        )
    out = copy.copy(data)
    out.num_nodes = data.num_nodes  # The whole tensors are gone.
    for key, value in data._store.items():
        is_feature = data._store.is_node_attr(key) and is_plain(value, data.__cat_dim__(key, value))
        if is_feature and value[:1].nbytes > SHORT_ROW:
            out[key] = ShardedFeatures.split(value, device=storage.device)
    return out, dataclasses.replace(storage, features='auto')
