"""The features of a loader's data, in memory that batches read."""

import copy
import dataclasses
import threading
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage

from ._columns import SHORT_ROW, Budget, Cache, Column, Table, is_plain
from ._options import SHARDED, GraphData, StorageOptions
from ._shards import Exchange, ShardedFeatures
from ._structure import Structure
from ._typed_structure import TypedStructure, name_of


class LocalFeatures:
    """The attributes of a :class:`~torch_geometric.data.Data` object, or those of one type of
    nodes or edges."""

    def __init__(self, nodes: Table | None, edges: Table | None, device: torch.device) -> None:
        self._nodes, self._edges = nodes, edges
        #: Reads features that other processes hold.
        self.exchange: Exchange | None = None
        columns = self.node_columns()[1]
        shards = [c.value for c in columns.values() if isinstance(c.value, ShardedFeatures)]
        if shards:
            self.exchange = Exchange(shards[0], device)
            self.select_shards(columns)

    def node_columns(self) -> tuple[int, dict[str, Column]]:
        """The node-level attributes, and a number that changes with them."""
        return (0, {}) if self._nodes is None else self._nodes.update()

    def edge_columns(self) -> dict[str, Column]:
        """The edge-level attributes."""
        return {} if self._edges is None else self._edges.update()[1]

    def crosses_bus(self) -> bool:
        """Whether any features are not on the device of the batches."""
        if self.exchange is not None and self.exchange.size > 1:
            return True
        return any(column.on_host for column in self.node_columns()[1].values())

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
        shards = self.select_shards(self.node_columns()[1])
        self.exchange.answer(list(shards.values()))

    def refresh(self) -> None:
        """Reads all copies again; the next batch reuses no rows of the previous one."""
        for table in (self._nodes, self._edges):
            if table is not None:
                table.update(refresh=True)


def features_of_data(
    data: Data, graph: Structure | TypedStructure, storage: StorageOptions, budget: Budget,
    stream: torch.cuda.Stream | None,
) -> LocalFeatures:  # fmt: skip
    """The attributes of a :class:`~torch_geometric.data.Data` object."""
    device, num_nodes = storage.device, graph.num_nodes
    (cache,) = Cache.of_most_sampled(graph.col, [num_nodes], storage.cache_ratio, device)
    args = device, stream, storage.features, budget
    return LocalFeatures(
        Table(data._store, 'data', 'node', num_nodes, *args, cache),
        Table(data._store, 'data', 'edge', graph.col.numel(), *args, None), device,
    )  # fmt: skip


class _Contents(NamedTuple):
    """What the stores of all types hold. To compare them at once takes a fraction of the time that
    it takes for one after the other, in each batch."""

    sizes: list[int]
    keys: list[str]
    values: list[object]

    @classmethod
    def of(cls, stores: list[BaseStorage]) -> '_Contents':
        held = [store._mapping for store in stores]
        return cls(
            list(map(len, held)), list(chain.from_iterable(held)),
            list(chain.from_iterable(map(dict.values, held))),
        )  # fmt: skip

    def are(self, other: '_Contents | None') -> bool:
        """Whether these are the same objects."""
        return (
            other is not None and self.sizes == other.sizes
            and all(map(is_, self.keys, other.keys)) and all(map(is_, self.values, other.values))
        )  # fmt: skip


class HeteroFeatures:
    """The attributes of a :class:`~torch_geometric.data.HeteroData` object, by type."""

    exchange = None  # with other processes

    def __init__(
        self, data: HeteroData, graph: TypedStructure, storage: StorageOptions, budget: Budget,
        stream: torch.cuda.Stream | None,
    ) -> None:  # fmt: skip
        device = storage.device
        sizes, num_edges = graph.graph.types.sizes(), graph.graph.types.num_edges.tolist()
        caches = Cache.of_most_sampled(graph.col, sizes, storage.cache_ratio, device)
        args = device, stream, storage.features, budget
        self.nodes: dict[Any, LocalFeatures] = {
            key: LocalFeatures(
                Table(data[key], name_of(key), 'node', size, *args, cache), None, device
            )
            for key, size, cache in zip(graph.node_types, sizes, caches, strict=True)
        }  # fmt: skip
        self.edges: dict[Any, LocalFeatures] = {
            key: LocalFeatures(
                None, Table(data[key], name_of(key), 'edge', count, *args, None), device
            )
            for key, count in zip(graph.edge_types, num_edges, strict=True)
        }  # fmt: skip
        for key, part in self.nodes.items():
            if part.exchange is not None:
                raise ValueError(f"'{name_of(key)}' must not have sharded features")
        self._stores = [data[key] for key in (*self.nodes, *self.edges)]
        self._seen: _Contents | None = None
        self._copied: list[Column] = []
        self._version = 0
        self._lock = threading.Lock()

    def update(self, refresh: bool = False) -> int:
        """Looks for attributes that have changed; returns a number that changes with them."""
        with self._lock:
            held = _Contents.of(self._stores)
            is_stale = any(column.is_stale for column in self._copied)
            if refresh or is_stale or not held.are(self._seen):
                parts = *self.nodes.values(), *self.edges.values()
                if refresh:
                    for part in parts:
                        part.refresh()
                columns = [(part.node_columns()[1], part.edge_columns()) for part in parts]
                self._copied = [
                    column for each in chain.from_iterable(columns) for column in each.values()
                    if column.source is not None
                ]  # fmt: skip
                self._seen = held
                self._version += 1
            return self._version

    def crosses_bus(self) -> bool:
        """Whether any features are not on the device of the batches."""
        return any(part.crosses_bus() for part in self.nodes.values())

    def end_iterator(self, end: Exception) -> None:
        """No process waits for this one."""

    def refresh(self) -> None:
        """Reads all copies again; the next batch reuses no rows of the previous one."""
        self.update(refresh=True)


def shard_features(data: GraphData, storage: StorageOptions) -> tuple[GraphData, StorageOptions]:
    """With :obj:`features='sharded'` a copy of data whose features, without short rows, are divided
    over all processes; otherwise the arguments."""
    if storage.features != SHARDED:
        return data, storage
    if not isinstance(data, Data):
        raise ValueError(
            "'features' must be 'auto' for HeteroData and a (FeatureStore, GraphStore), got "
            "'sharded'"
        )
    out = copy.copy(data)
    out.num_nodes = data.num_nodes  # The whole tensors are gone.
    for key, value in data._store.items():
        is_feature = data._store.is_node_attr(key) and is_plain(value, data.__cat_dim__(key, value))
        if is_feature and value[:1].nbytes > SHORT_ROW:
            out[key] = ShardedFeatures.split(value, device=storage.device)
    return out, dataclasses.replace(storage, features='auto')
