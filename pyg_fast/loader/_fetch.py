"""Fetches the attributes of one batch after the other, and reuses the rows that two share."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops._lifetime import keep_until_read
from ..ops.gather_rows import gather_rows
from ..ops.match import match
from ..ops.node_map import NodeMap
from ._batch import Attributes
from ._columns import Column
from ._features import HeteroFeatures, LocalFeatures
from ._hetero_subgraph import EdgeType, HeteroSubgraph
from ._pipeline import LateRead
from ._remote import RemoteFeatures, select_unmatched
from ._shards import Request, ShardedFeatures
from ._stats import Meter
from ._subgraph import Subgraph


class PreviousBatch:
    """The nodes of the batch before, and rows of theirs, which the next batch may reuse."""

    def __init__(self, node_map: NodeMap, meter: Meter) -> None:
        self.rows: dict[str, Tensor] = {}
        self._node_map, self._meter = node_map, meter
        self._n_id: Tensor | None = None
        self._version: object = None

    def forget_if_stale(self, version: object) -> None:
        """Forgets the batch if attributes have changed since it was fetched."""
        if version != self._version:
            self._n_id, self._version = None, version

    def match(self, n_id: Tensor) -> Tensor | None:
        """The position of each node in the batch before, or -1; None if there is none."""
        if self._n_id is None:
            return None
        self._meter.add_pair(min(n_id.numel(), self._n_id.numel()))
        return match(n_id, self._n_id, self._node_map.num_nodes, node_map=self._node_map)

    def replace(self, n_id: Tensor, rows: dict[str, Tensor]) -> None:
        # The user may write to the tensors of the batch.
        self._n_id, self.rows = n_id.clone(), rows


class RemoteFetcher:
    """Fetches from a remote backend, which has no edge-level attributes."""

    def __init__(
        self, features: RemoteFeatures, does_match: bool, meter: Meter, node_map: NodeMap
    ) -> None:
        self._features, self._does_match, self._meter = features, does_match, meter
        self._previous = PreviousBatch(node_map, meter)

    def fetch(self, part: Subgraph) -> Attributes:
        features, n_id, previous = self._features, part.n_id, self._previous
        previous.forget_if_stale(features.version)
        matched = previous.match(n_id) if self._does_match else None
        before = None if matched is None else previous.rows
        rows = features.rows_at(n_id, matched, before, self._meter.counter)
        if self._does_match:
            previous.replace(n_id, rows)
            rows = {key: value.clone() for key, value in rows.items()}
        return Attributes({**rows}, {}, [])


class _Ways(NamedTuple):
    """Ways in which the attributes of a version are fetched."""

    version: int
    on_host: dict[str, Column]
    shards: dict[str, Column]
    now: dict[str, Column]
    late: dict[str, Column]  # when the loader returns the batch


class LocalFetcher:
    """Fetches from the attributes of data.

    `is_ahead`: a thread works ahead. Otherwise the loader returns a batch right after fetching, and
    no attribute need be read late.
    """

    def __init__(
        self, features: LocalFeatures, does_match: bool, meter: Meter, node_map: NodeMap,
        device: torch.device, is_ahead: bool,
    ) -> None:  # fmt: skip
        self._features, self._does_match, self._meter = features, does_match, meter
        self._device, self._is_ahead = device, is_ahead
        self._previous = PreviousBatch(node_map, meter)
        self._previous_shards = _PreviousShards(device)
        self._ways: _Ways | None = None

    def fetch(self, part: Subgraph) -> Attributes:
        out = Attributes({}, {}, [])
        self.fetch_nodes(self.find_ways(), part.n_id, out)
        self.fetch_edges(self._features.edge_columns(), part.e_id, out)
        return out

    def fetch_edges(self, columns: dict[str, Column], e_id: Tensor | None, out: Attributes) -> None:
        """Adds the edge-level attributes; None: the edges are not known."""
        late = {}
        for key, column in columns.items():
            if e_id is None:
                out.edges[key] = None
            elif self._is_ahead and column.is_late:
                late[key] = column
            else:
                out.edges[key] = column.rows_at(e_id)
                if column.on_host:
                    keep_until_read(self._device, column.source)
        if late and e_id is not None:
            out.late.append(_read_late(late, e_id))

    def fetch_nodes(self, ways: '_Ways', n_id: Tensor, out: Attributes) -> None:
        """Adds the node-level attributes."""
        version, on_host, shards, now, late = ways
        self._previous.forget_if_stale(version)
        does_match = self._does_match and bool(on_host or shards)
        matched = self._previous.match(n_id) if does_match else None
        fetched = self._fetch_from_host(on_host, n_id, matched)
        for key, value in fetched.items():
            out.nodes[key] = value.clone() if does_match else value
        for key, column in now.items():
            out.nodes[key] = column.rows_at(n_id)
        if late:
            out.late.append(_read_late(late, n_id))
        if does_match:
            self._previous.replace(n_id, fetched)
        if shards:
            sharded = self._features.select_shards(shards)  # Their parts may be others now.
            out.late.append(self._plan_exchange(sharded, n_id, matched, is_counted=bool(on_host)))

    def find_ways(self) -> '_Ways':
        """How the node-level attributes are fetched, found once for each version of them."""
        version, columns = self._features.node_columns()
        if self._ways is None or self._ways.version != version:
            on_host = {key: column for key, column in columns.items() if column.on_host}
            shards = {key: columns[key] for key in self._features.select_shards(columns)}
            others = {k: c for k, c in columns.items() if k not in on_host and k not in shards}
            late = {k: c for k, c in others.items() if self._is_ahead and c.is_late}
            now = {k: c for k, c in others.items() if k not in late}
            self._ways = _Ways(version, on_host, shards, now, late)
        return self._ways

    def _fetch_from_host(
        self, columns: dict[str, Column], n_id: Tensor, matched: Tensor | None
    ) -> dict[str, Tensor]:
        """Reads rows over the bus, but for those of matched nodes."""
        if not columns:
            return {}
        row_bytes = sum(column.row_bytes for column in columns.values())
        counter: Tensor | None = self._meter.counter(row_bytes)
        out = {}
        for key, column in columns.items():
            before = None if matched is None else self._previous.rows.get(key)
            out[key] = column.gather(n_id, None if before is None else matched, before, counter)
            counter = None  # All columns have the same counts: add them once.
        # Others may replace a column before the GPU has read it.
        keep_until_read(self._device, *(column.source for column in columns.values()))
        return out

    def _plan_exchange(
        self, shards: dict[str, ShardedFeatures], n_id: Tensor, matched: Tensor | None,
        is_counted: bool,
    ) -> LateRead:  # fmt: skip
        """Prepares an exchange with other processes; `is_counted`: the counter of
        :meth:`_fetch_from_host` has the matched rows."""
        exchange = self._features.exchange
        assert exchange is not None
        wanted, place = select_unmatched(n_id, matched)
        planned = exchange.plan(wanted)
        planned = planned._replace(position=planned.position[place])
        num_matched = 0 if matched is None else int((matched >= 0).sum())
        row_bytes = sum(features.row_bytes for features in shards.values())
        previous_rows = self._previous_shards

        def request_all() -> Request:
            return exchange.plan(n_id)

        def read() -> dict[str, object]:
            previous = previous_rows.take(exchange.generation)
            request = planned if matched is None or previous is not None else request_all()
            request, rows = exchange.read_rows(request, list(shards.values()), request_all)
            reused = previous if request is planned and matched is not None else None
            out = {
                key: gather_rows(source, request.position) if reused is None
                else gather_rows(source, request.position, match=matched, previous=reused[key])
                for key, source in zip(shards, rows, strict=True)
            }  # fmt: skip
            num_reused = 0 if reused is None else num_matched
            self._meter.add_moved(
                request.num_moved * row_bytes, num_reused * row_bytes,
                0 if is_counted else num_reused,
            )  # fmt: skip
            if not self._does_match:
                return {**out}
            previous_rows.replace(out, exchange.generation)
            return {key: value.clone() for key, value in out.items()}

        return LateRead(
            read, [t for t in (planned.ids, planned.position, matched) if t is not None]
        )


class HeteroFetcher:
    """Fetches from the attributes of each type of nodes and edges."""

    def __init__(
        self, features: HeteroFeatures, does_match: bool, meter: Meter, node_map: NodeMap,
        device: torch.device, is_ahead: bool,
    ) -> None:  # fmt: skip
        self._features = features
        self._nodes, self._edges = (
            {
                key: LocalFetcher(part, does_match, meter, node_map, device, is_ahead)
                for key, part in parts.items()
            }
            for parts in (features.nodes, features.edges)
        )
        self._version: int | None = None
        # Of the types that have attributes, as of this version of the features.
        self._ways: list[tuple[str, _Ways]] = []
        self._columns: list[tuple[EdgeType, dict[str, Column]]] = []

    def fetch(self, part: HeteroSubgraph) -> dict[Any, Attributes]:
        """The attributes by type, of the types that have some."""
        version = self._features.update()
        if version != self._version:
            self._ways = [(key, fetcher.find_ways()) for key, fetcher in self._nodes.items()]
            columns = [(key, part.edge_columns()) for key, part in self._features.edges.items()]
            self._columns = [(key, by_name) for key, by_name in columns if by_name]
            self._version = version
        out: dict[Any, Attributes] = {}
        for node_type, ways in self._ways:
            attributes = out[node_type] = Attributes({}, {}, [])
            self._nodes[node_type].fetch_nodes(ways, part.n_id[node_type], attributes)
        for edge_type, by_name in self._columns:
            attributes = out[edge_type] = Attributes({}, {}, [])
            self._edges[edge_type].fetch_edges(by_name, part.e_id[edge_type], attributes)
        return out


class _PreviousShards:
    """The rows of sharded features that the batch before has: read on the stream of the caller,
    which may have changed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[str, Tensor] | None = None
        self._generation = 0
        self._done: torch.cuda.Event | None = None

    def replace(self, rows: dict[str, Tensor], generation: int) -> None:
        self._rows, self._generation = rows, generation
        if self._device.type == 'cuda':
            self._done = torch.cuda.current_stream(self._device).record_event()

    def take(self, generation: int) -> dict[str, Tensor] | None:
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


def _read_late(columns: dict[str, Column], index: Tensor) -> LateRead:
    # The batch has the index.
    return LateRead(lambda: {key: column.rows_at(index) for key, column in columns.items()}, [])
