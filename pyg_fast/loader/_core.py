"""Makes mini-batches: samples, renumbers and fetches."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler.base import SubgraphType

from ..ops._lifetime import keep_until_read
from ..ops.gather_rows import gather_rows
from ..ops.match import match, match_degree
from ..ops.neighbor_sample import sample_subgraph
from ..ops.node_map import NodeMap
from ._batch import Subgraph, batch_of
from ._features import (
    SHARDED,
    Budget,
    Cache,
    Column,
    Remote,
    Table,
    is_apart,
    most_sampled,
    sharded,
    unmatched,
)
from ._order import greedy_order
from ._pipeline import Late, Made, behind
from ._seeds import checked_positions, mixed, resolve_input_nodes
from ._shards import Exchange, Request, ShardedFeatures
from ._stats import Meter
from ._structure import Structure, structure_of_data, structure_of_store
from ._walks import Walks, walk_subgraph


class Core:
    """State shared by the iterators of a loader; it does not know the loader.

    A copy without shared memory, such as an unpickled one, is made again from the same arguments:
    it reads the graph again, and decides again what fits on its device.
    """

    def __init__(
        self, data: Any, fanouts: tuple[int, ...], walks: Walks | None, replace: bool,
        subgraph_type: SubgraphType, weight_attr: str | None,
        transform_sampler_output: Callable | None, is_sorted: bool, custom_cls: Callable | None,
        device: torch.device, features: str, topology: str, cache_ratio: float,
        limit: int | None, seed: int, input_nodes: Any, input_id: Tensor | None, match: bool,
        reorder: bool | None, window: int,
    ) -> None:  # fmt: skip
        if features == SHARDED:
            if not isinstance(data, Data):
                raise ValueError(
                    "'features' must be 'auto' for a (FeatureStore, GraphStore), got 'sharded'"
                )
            data, features = sharded(data, device), 'auto'
        self._arguments = {k: v for k, v in locals().items() if k != 'self'}
        self.given = data
        self.fanouts, self.walks, self.replace = fanouts, walks, replace
        self.subgraph_type = subgraph_type
        self.transform_sampler_output, self.custom_cls = transform_sampler_output, custom_cls
        self.device, self.seed = device, seed
        self.meter = Meter(device)
        # High priority: otherwise the kernels of a training step leave its small ones no room.
        self.stream = torch.cuda.Stream(device, -1) if device.type == 'cuda' else None
        self._maps: list[NodeMap] = []
        self._lock = threading.Lock()
        #: How often all copies were read again, whatever the versions.
        self.refreshes = 0
        budget = Budget(device, limit)

        self.data: Data | None = None
        self.remote: Remote | None = None
        if isinstance(data, Data):
            self.data = data
            structure = structure_of_data(data, is_sorted, weight_attr, replace)
        else:
            if weight_attr is not None:
                raise ValueError("'weight_attr' must not be given for a (FeatureStore, GraphStore)")
            structure = structure_of_store(*data)
            self.remote = Remote(data[0], device)
        self.num_nodes = structure.num_nodes
        self.nodes, self.input_id = resolve_input_nodes(input_nodes, self.num_nodes, input_id)
        self._arguments.update(input_nodes=self.nodes, input_id=self.input_id)
        on_host = device.type == 'cuda' and not budget.takes(topology, structure.num_bytes)
        cache = None
        if cache_ratio > 0 and is_apart(torch.device('cpu'), device):
            nodes = most_sampled(structure.col, self.num_nodes, cache_ratio, device)
            cache = Cache(nodes, self.num_nodes)
        self.structure: Structure = structure.placed(device, on_host)
        if self.data is not None:
            counts: tuple = (('node', self.num_nodes), ('edge', structure.col.numel()))
            self.node_table, self.edge_table = (
                Table(
                    self.data, level, count, device, self.stream, features, budget,
                    cache if level == 'node' else None,
                )
                for level, count in counts
            )  # fmt: skip
        #: Reads features that other processes hold.
        self.exchange: Exchange | None = None
        if self.data is not None:
            columns = self.node_table.update()[1]
            held = [column.value for column in columns.values() if column.is_sharded]
            if held:
                self.exchange = Exchange(held[0], device)
                self.shards(columns)
        self.match = match and self.crosses
        self.reorder = self.match if reorder is None else reorder
        self.window = window if device.type == 'cuda' or self.reorder else 1

    def __reduce__(self) -> tuple:
        return _made_anew, (self._arguments,)

    @property
    def crosses(self) -> bool:
        """Whether any features are not on the device of the batches."""
        if self.remote is not None:
            return True
        if self.exchange is not None and self.exchange.size > 1:
            return True
        return any(column.on_host for column in self.node_table.update()[1].values())

    def shards(self, columns: dict[str, Column]) -> dict[str, ShardedFeatures]:
        """The features of which other processes hold rows, in the same order in all of them."""
        found = {key: columns[key].value for key in sorted(columns) if columns[key].is_sharded}
        for key, features in found.items():
            if self.exchange is None:
                raise ValueError(
                    f"'data.{key}' must be sharded before the loader is made: make a new loader"
                )
            self.exchange.check(key, features)
        return found

    def ended(self, end: Exception) -> None:
        """Tells the processes with which rows are exchanged that an iterator has ended."""
        if self.exchange is None:
            return
        if not isinstance(end, StopIteration):
            self.exchange.fail(end)
            return
        held = self.shards(self.node_table.update()[1])
        self.exchange.answer(list(held.values()))

    def refresh(self) -> None:
        """Reads all copies again; the next batch reuses no rows of the previous one."""
        if self.data is not None:
            self.node_table.update(refresh=True)
            self.edge_table.update(refresh=True)
        with self._lock:
            self.refreshes += 1

    @contextmanager
    def _node_map(self) -> Iterator[NodeMap]:
        """A map for exclusive use, on the loader's stream."""
        with self._lock:
            node_map = self._maps.pop() if self._maps else None
        if node_map is None:
            node_map = NodeMap(self.num_nodes, self.device)
        try:
            yield node_map
        finally:
            with self._lock:
                self._maps.append(node_map)

    def made(self, batches: Iterator[tuple[int, Tensor]], epoch: int) -> Iterator[Made]:
        """All batches of an epoch, in the order in which the loader returns them."""
        with self._node_map() as node_map:
            fetcher = _Fetcher(self, node_map)
            while window := list(islice(batches, self.window)):
                with self.meter.timed('sample'):
                    parts = [
                        self._sample(positions, mixed(self.seed, epoch, number, 1), node_map)
                        for number, positions in window
                    ]
                    order = list(range(len(parts)))
                    if self.reorder and len(parts) > 2:
                        n_ids = [part.n_id for part in parts]
                        order = greedy_order(match_degree(n_ids, self.num_nodes, node_map=node_map))
                for k in order:
                    part, parts[k] = parts[k], None  # type: ignore[call-overload]
                    with self.meter.timed('fetch'):
                        made = fetcher.batch(part)
                    yield made
                    del made, part

    def one(self, index: Tensor | list[int], seed: int) -> Data:
        """A single batch, made in this thread, of positions that the user gives."""
        try:
            positions = checked_positions("'index'", index, self.nodes.numel())
            with behind(self.stream), self._node_map() as node_map:
                with self.meter.timed('sample'):
                    part = self._sample(positions, seed, node_map)
                with self.meter.timed('fetch'):
                    made = _Fetcher(self, node_map).batch(part)
        except Exception as error:
            self.ended(error)
            raise
        if self.stream is not None:
            self.stream.synchronize()  # The caller may free the graph in host memory now.
            current = torch.cuda.current_stream(self.device)
            for tensor in made.tensors:
                tensor.record_stream(current)
        return made.finished(self.meter)

    def _sample(self, positions: Tensor, seed: int, node_map: NodeMap) -> Subgraph:
        structure = self.structure
        seeds = self.nodes[positions].to(self.device)
        input_id = positions if self.input_id is None else self.input_id[positions]
        input_id = input_id.to(self.device)
        if self.walks is not None:
            part = walk_subgraph(
                structure, seeds, self.fanouts, self.walks, seed, input_id, node_map
            )
        else:
            induced = self.subgraph_type == SubgraphType.induced
            out = sample_subgraph(
                structure.rowptr, structure.col, structure.perm, structure.weight, seeds,
                self.fanouts, self.replace, induced, seed, node_map,
            )  # fmt: skip
            nodes, edges = out.num_sampled_nodes, out.num_sampled_edges
            hops = None if edges is None else (tuple(nodes), tuple(edges))
            part = Subgraph(
                out.n_id, out.edge_index, out.rowptr, out.col, out.e_id,
                None if edges is None else nodes, edges, input_id, hops,
                longest_row=None if induced or min(self.fanouts) < 0 else max(self.fanouts),
            )  # fmt: skip
        if self.subgraph_type == SubgraphType.bidirectional:
            part = part.to_bidirectional()
        if self.transform_sampler_output is not None:
            part = part.transformed(self.transform_sampler_output)
        return part


class _Fetcher:
    """Fetches the attributes of one batch after the other, and keeps rows for the next one."""

    def __init__(self, core: Core, node_map: NodeMap) -> None:
        self._core, self._node_map = core, node_map
        self._n_id: Tensor | None = None
        self._rows: dict[str, Tensor] = {}
        self._version: tuple[int, int] | None = None
        self._moved = _Moved(core.device)
        # Without a thread that works ahead, a batch is returned right after fetching.
        self._ahead = core.stream is not None

    def batch(self, part: Subgraph) -> Made:
        core = self._core
        late: list[Late] = []
        nodes = self._fetch_remote(part.n_id) if core.remote else self._fetch(part.n_id, late)
        edges: dict[str, Any] = {}
        keys: list[str] = []
        if core.data is not None:
            for key, column in core.edge_table.update()[1].items():
                if self._ahead and part.e_id is not None and column.is_late:
                    late.append(_late(key, column, part.e_id))
                    continue
                keys.append(key)
                if part.e_id is not None:
                    edges[key] = column.rows_at(part.e_id)
                    if column.on_host:
                        self._keep([column])
        core.meter.add_batch(part.n_id.numel(), part.edge_index.size(1))
        structure = core.structure
        return batch_of(
            core.data, core.custom_cls, part, structure.layout, structure.loop_free, nodes, edges,
            keys, late,
        )  # fmt: skip

    def _keep(self, columns: list[Column]) -> None:
        """Keeps columns alive until the GPU has read them, since others may replace them."""
        keep_until_read(self._core.device, *(column.source for column in columns))

    def _forget_if(self, version: tuple[int, int]) -> None:
        if version != self._version:  # Rows fetched before may be stale.
            self._n_id, self._version = None, version

    def _fetch(self, n_id: Tensor, late: list[Late]) -> dict[str, Any]:
        core = self._core
        version, columns = core.node_table.update()
        self._forget_if((version, core.refreshes))
        hosted = [column for column in columns.values() if column.on_host]
        counter = core.meter.counter(sum(c.row_bytes for c in hosted)) if hosted else None
        shards = core.shards(columns)
        matching = core.match and bool(hosted or shards)
        found = self._matched(n_id) if matching else None
        out, fetched = {}, {}
        for key, column in columns.items():
            if self._ahead and column.is_late:
                late.append(_late(key, column, n_id))
                continue
            if column.is_sharded:
                continue
            if not column.on_host:
                out[key] = column.rows_at(n_id)
                continue
            before = self._rows.get(key) if found is not None else None
            rows = column.rows_at(n_id, None if before is None else found, before, counter)
            counter = None  # All columns have the same counts: add them once.
            if matching:
                fetched[key] = rows
            out[key] = rows.clone() if matching else rows
        if hosted:
            self._keep(hosted)
        if matching:
            self._n_id, self._rows = n_id.clone(), fetched
        if shards:
            late.append(self._exchanged(shards, n_id, found, counted=bool(hosted)))
        return out

    def _exchanged(
        self, shards: dict[str, ShardedFeatures], n_id: Tensor, found: Tensor | None, counted: bool
    ) -> Late:
        """Prepares an exchange with other processes; `counted`: matched rows are in a counter."""
        core, moved = self._core, self._moved
        exchange = core.exchange
        assert exchange is not None
        wanted, place = unmatched(n_id, found)
        planned = exchange.request(wanted)
        position = planned.position[place]
        row_bytes = sum(features.row_bytes for features in shards.values())
        num_matched = 0 if found is None else int((found >= 0).sum())

        def anew() -> Request:
            return exchange.request(n_id)

        def read() -> dict[str, Any]:
            previous = moved.taken(exchange.generation)
            request = planned if found is None or previous is not None else anew()
            request, rows = exchange.rows(request, list(shards.values()), anew)
            out, matched = {}, 0
            for key, source in zip(shards, rows, strict=True):
                if request is not planned:
                    out[key] = gather_rows(source, request.position)
                elif found is None or previous is None:
                    out[key] = gather_rows(source, position)
                else:
                    matched = num_matched
                    out[key] = gather_rows(source, position, match=found, previous=previous[key])
            core.meter.add_moved(
                request.num_moved * row_bytes, matched * row_bytes, 0 if counted else matched
            )
            if not core.match:
                return out
            moved.keep(out, exchange.generation)
            return {key: value.clone() for key, value in out.items()}

        return Late(read, [t for t in (planned.ids, position, found) if t is not None])

    def _fetch_remote(self, n_id: Tensor) -> dict[str, Any]:
        core = self._core
        assert core.remote is not None
        self._forget_if((0, core.refreshes))
        found = self._matched(n_id) if core.match else None
        rows = core.remote.rows_at(
            n_id, found, self._rows if found is not None else None, core.meter.counter
        )
        if core.match:
            self._n_id, self._rows = n_id.clone(), rows
            return {key: value.clone() for key, value in rows.items()}
        return rows

    def _matched(self, n_id: Tensor) -> Tensor | None:
        """The rows of these nodes in the previous batch."""
        if self._n_id is None:
            return None
        self._core.meter.add_pair(min(n_id.numel(), self._n_id.numel()))
        return match(n_id, self._n_id, self._core.num_nodes, node_map=self._node_map)


class _Moved:
    """The rows of sharded features that the batch before has: read on the stream of the caller,
    which may have changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[str, Tensor] | None = None
        self._generation = 0
        self._done: Any = None

    def keep(self, rows: dict[str, Tensor], generation: int) -> None:
        self._rows, self._generation = rows, generation
        if self._device.type == 'cuda':
            self._done = torch.cuda.current_stream(self._device).record_event()

    def taken(self, generation: int) -> dict[str, Tensor] | None:
        """The rows, once; None if they are not those of this generation."""
        rows, self._rows = self._rows, None
        if generation != self._generation:
            return None
        if rows is not None and self._done is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._done)
            for tensor in rows.values():
                tensor.record_stream(current)
        return rows


def _late(key: str, column: Column, index: Tensor) -> Late:
    return Late(lambda: {key: column.rows_at(index)}, [])  # The batch has the index.


def _made_anew(arguments: dict[str, Any]) -> Core:
    return Core(**arguments)
