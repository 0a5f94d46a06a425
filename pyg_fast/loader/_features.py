"""The attributes of nodes and edges, where batches read them from."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore
from torch_geometric.typing import TensorFrame

from ..ops._library import ops
from ..ops.fetch_rows import fetch_rows
from ._pinned import pinned

PLACES = ('auto', 'host', 'device')
_SHORT_ROW = 16  # Bytes: a label costs the bus as much as several features.


def is_apart(memory: torch.device, device: torch.device) -> bool:
    """Whether a bus lies between them that the device can read over."""
    return device.type == 'cuda' and memory.type == 'cpu'


class Budget:
    """The memory that a loader may still take on its device."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        if device.type != 'cuda':
            self.left = 0
        elif limit is None:
            self.left = torch.cuda.mem_get_info(device)[0] // 2
        else:
            self.left = limit

    def takes(self, place: str, num_bytes: int) -> bool:
        """Whether something goes to the device, which the budget then pays."""
        fits = place == 'device' or (place == 'auto' and num_bytes <= self.left)
        if fits:
            self.left -= num_bytes
        return fits


class Cache:
    """The rows of chosen nodes, kept on the device."""

    def __init__(self, nodes: Tensor, num_nodes: int) -> None:
        dtype = torch.int32 if num_nodes < 2**31 else torch.int64
        self.nodes = nodes
        self.position = torch.full((num_nodes,), -1, dtype=dtype, device=nodes.device)
        self.position[nodes] = torch.arange(nodes.numel(), dtype=dtype, device=nodes.device)


class Column:
    """One attribute: the value as the user has it, and what batches read it from."""

    def __init__(
        self, name: str, value: Any, dim: int, num_rows: int, device: torch.device, place: str,
        budget: Budget, cache: Cache | None,
    ) -> None:  # fmt: skip
        self.name, self.value, self.dim, self.device = name, value, dim, device
        self._num_rows = num_rows
        self.source: Tensor | None = None
        self.on_host = False
        self._cache = cache
        # Of a value that takes gradients each batch is a part of its graph.
        plain = (
            type(value) is Tensor and value.layout == torch.strided and dim == 0
            and value.dim() > 0 and not value.requires_grad
        )  # fmt: skip
        if plain:
            if place == 'host' and value[:1].nbytes <= _SHORT_ROW:
                place = 'auto'
            apart = is_apart(value.device, device)
            self.on_host = apart and not budget.takes(place, value.nbytes)
            self.read()

    def read(self) -> None:
        """Reads the value anew, as it is now."""
        value = self.value.detach()
        if value.size(0) != self._num_rows:
            raise ValueError(
                f"'data.{self.name}' must have {self._num_rows} rows, as data had when the loader "
                f'was made, got {value.size(0)}'
            )
        self.version = _version(self.value)
        if self.on_host:
            self.source = pinned(value)
        else:
            self.source = value.to(self.device).contiguous()
        self.rows = None
        if self.on_host and self._cache is not None:
            self.rows = self.source[self._cache.nodes.cpu()].to(self.device)

    @property
    def row_bytes(self) -> int:
        assert self.source is not None
        return self.source[:1].nbytes if self.source.size(0) else 0

    def rows_at(
        self, index: Tensor, match: Tensor | None = None, previous: Tensor | None = None,
        counter: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The rows of the nodes or edges of a batch."""
        if self.source is None:
            return _select(self.value, index, self.dim, self.device)
        position = None if self.rows is None or self._cache is None else self._cache.position
        return _rows(self.source, index, match, previous, position, self.rows, counter)


def _rows(x: Tensor, index: Tensor, *args: Tensor | None) -> Tensor:
    return ops.fetch_rows.default(x, index, *args)  # All of it is known to fit.


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _select(value: Any, index: Tensor, dim: int, device: torch.device) -> Any:
    """As PyG's loader does it, for what no kernel reads."""
    if isinstance(value, Tensor):
        return value.index_select(dim, index.to(value.device)).to(device)
    index = index.cpu()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.take(value, index.numpy(), axis=dim)).to(device)
    if isinstance(value, TensorFrame):
        return value[index.to(value.device)].to(device)
    return type(value)([value[k] for k in index.tolist()])


def synchronize(device: torch.device) -> None:
    """Waits for all that a device has been given."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


class Table:
    """The node-level or the edge-level attributes of data, kept in step with it."""

    def __init__(
        self, data: Data, level: str, num_rows: int, device: torch.device, place: str,
        budget: Budget, cache: Cache | None,
    ) -> None:  # fmt: skip
        self._data, self._level, self._num_rows = data, level, num_rows
        self._device, self._place, self._budget, self._cache = device, place, budget, cache
        self._lock = threading.Lock()
        self._columns: dict[str, Column] = {}
        self._version = 0
        self.update()

    def update(self) -> tuple[int, dict[str, Column]]:
        """The attributes as they are now, and a number that says when any has changed."""
        store = self._data._store
        belongs = store.is_node_attr if self._level == 'node' else store.is_edge_attr
        with self._lock:
            held = {
                key: value
                for key, value in list(store.items())
                if key not in ('edge_index', 'adj_t', 'num_nodes') and belongs(key)
            }
            changed = [k for k, c in self._columns.items() if held.get(k) is not c.value]
            stale = [
                c for k, c in self._columns.items()
                if k not in changed and c.source is not None and _version(c.value) != c.version
            ]  # fmt: skip
            added = [k for k in held if k not in self._columns or k in changed]
            if changed or stale or added:
                if self._columns:
                    synchronize(self._device)  # Kernels may still read what goes now.
                self._version += 1
            columns = {k: c for k, c in self._columns.items() if k not in changed}
            for column in stale:
                column.read()
            for key in sorted(added, key=lambda k: getattr(held[k], 'nbytes', 0)):
                value = held[key]
                dim = self._data.__cat_dim__(key, value, store)
                columns[key] = Column(
                    key, value, dim, self._num_rows, self._device, self._place, self._budget,
                    self._cache,
                )  # fmt: skip
            # In the order of the data's own.
            self._columns = {key: columns[key] for key in held}
            return self._version, self._columns


class Remote:
    """The features that a :class:`~torch_geometric.data.FeatureStore` serves."""

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self._store, self._device = store, device
        attrs = store.get_all_tensor_attrs()
        if any(isinstance(attr.group_name, str) for attr in attrs):
            names = sorted({str(attr.group_name) for attr in attrs})
            raise TypeError(f"'data' must be a graph with one type of nodes, got {names}")

    def rows_at(
        self,
        n_id: Tensor,
        match: Tensor | None,
        previous: dict[str, Tensor] | None,
        counter_of: Callable[[int], Tensor] | None,
    ) -> dict[str, Any]:
        """All attributes of the nodes of a batch; the store is asked for unmatched ones alone."""
        attrs = self._store.get_all_tensor_attrs()
        if previous is None or any(attr.attr_name not in previous for attr in attrs):
            match = previous = None
        wanted = n_id if match is None else n_id[match < 0]
        if wanted.numel() == 0:  # A row for the kernel, which it then does not need.
            wanted = n_id[:1]
        for attr in attrs:
            attr.index = wanted.cpu()
            if not attr.is_set('group_name'):
                attr.group_name = None
        found = {
            attr.attr_name: _as_rows(value).to(self._device)
            for attr, value in zip(attrs, self._store.multi_get_tensor(attrs), strict=True)
        }
        counter = None
        if counter_of is not None and found:
            counter = counter_of(sum(v[:1].nbytes if v.size(0) else 0 for v in found.values()))
        position = torch.arange(n_id.numel(), device=n_id.device)
        if match is not None:
            position = ((match < 0).cumsum(0) - 1).clamp_(min=0)
        out = {}
        for name, rows in found.items():
            before = None if previous is None else previous[name]
            out[name] = fetch_rows(rows, position, match=match, previous=before, counter=counter)
            counter = None  # All attributes have the same rows from the same places.
        return out


def _as_rows(value: Any) -> Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def most_sampled(col: Tensor, num_nodes: int, ratio: float, device: torch.device) -> Tensor:
    """The share of nodes with the most outgoing edges, which are sampled most; ties by id."""
    degree = torch.zeros(num_nodes, dtype=torch.int64, device=col.device)
    degree.index_add_(0, col.long(), torch.ones_like(col, dtype=torch.int64))
    order = degree.argsort(descending=True, stable=True)
    return order[: round(ratio * num_nodes)].to(device)
