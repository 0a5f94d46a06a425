"""The attributes of nodes and edges, on the device from which batches read them."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore
from torch_geometric.typing import TensorFrame

from ..ops._library import ops
from ..ops.gather_rows import gather_rows
from ._pinned import pinned
from ._pipeline import behind
from ._shards import ShardedFeatures
from ._versions import state_of

PLACES = ('auto', 'host', 'device')
SHARDED = 'sharded'  # a place of features alone
_SHORT_ROW = 16  # bytes: reading a label costs the bus as much as several features


def is_apart(memory: torch.device, device: torch.device) -> bool:
    """Whether the device reads the memory over a bus."""
    return device.type == 'cuda' and memory.type == 'cpu'


class Budget:
    """The device memory that a loader may still use."""

    def __init__(self, device: torch.device, limit: int | None) -> None:
        if device.type != 'cuda':
            self.left = 0
        elif limit is None:
            self.left = torch.cuda.mem_get_info(device)[0] // 2
        else:
            self.left = limit

    def takes(self, place: str, num_bytes: int) -> bool:
        """Whether an object goes to the device; if so, subtracts it from the budget."""
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
    """One attribute: the user's value, and copies that batches read if the value is not on their
    device. A column is immutable: a new one replaces it.

    All copies are made and read on the current stream, which is the loader's own.
    """

    def __init__(
        self, name: str, value: Any, dim: int, num_rows: int, device: torch.device, place: str,
        cache: Cache | None,
    ) -> None:  # fmt: skip
        self.name, self.value = name, value
        self.on_host = place == 'host'
        self._dim, self._num_rows, self._device, self._place = dim, num_rows, device, place
        self._cache = cache if self.on_host else None
        self.source: Tensor | None = None
        self.rows: Tensor | None = None
        self.is_sharded = isinstance(value, ShardedFeatures)
        if self.is_sharded and value.num_nodes != num_rows:
            raise ValueError(
                f"'data.{name}' must have {num_rows} rows, one for each of data.num_nodes, got "
                f'{value.num_nodes}: set data.num_nodes'
            )
        if place == 'user':
            return
        source = value.detach()
        self._check(source)
        self._state = state_of(value)
        self.source = pinned(source) if self.on_host else source.to(device).contiguous()
        if self._cache is not None:
            self.rows = self.source[self._cache.nodes.cpu()].to(device)

    def anew(self) -> 'Column':
        """A new column of the present value."""
        if self._place == 'user':
            return self
        return Column(
            self.name, self.value, self._dim, self._num_rows, self._device, self._place,
            self._cache,
        )  # fmt: skip

    @property
    def is_stale(self) -> bool:
        """Whether the copy is known to be outdated; not all writes are visible."""
        return self.source is not None and state_of(self.value) != self._state

    @property
    def is_late(self) -> bool:
        """Whether batches read the value itself when the loader returns them, on the stream that
        uses them: on the loader's stream a read could race with a write."""
        value = self.value
        if self.source is not None or not isinstance(value, (Tensor, TensorFrame)):
            return False
        learns = isinstance(value, Tensor) and value.requires_grad
        return learns or value.device == self._device

    @property
    def row_bytes(self) -> int:
        assert self.source is not None
        return self.source[:1].nbytes if self.source.size(0) else 0

    def rows_at(
        self, index: Tensor, match: Tensor | None = None, previous: Tensor | None = None,
        counter: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """The rows of the nodes or edges of a batch."""
        if self.source is not None:
            position = None if self._cache is None else self._cache.position
            return _rows(self.source, index, match, previous, position, self.rows, counter)
        value = self.value
        if is_plain(value, self._dim) and value.device == self._device and value.is_contiguous():
            self._check(value)
            return _rows(value.detach(), index)
        return _select(value, index, self._dim, self._device)

    def _check(self, value: Tensor) -> None:
        if value.size(0) != self._num_rows:
            raise ValueError(
                f"'data.{self.name}' must have {self._num_rows} rows, as when the loader was made, "
                f'got {value.size(0)}'
            )


def is_plain(value: Any, dim: int) -> bool:
    """Whether kernels can read it: a part of a value with gradients must be made by autograd."""
    return (
        type(value) is Tensor and value.layout == torch.strided and dim == 0 and value.dim() > 0
        and not value.requires_grad
    )  # fmt: skip


def _rows(x: Tensor, index: Tensor, *args: Tensor | None) -> Tensor:
    args += (None,) * (5 - len(args))
    return ops.gather_rows.default(x, index, *args)  # The arguments are known to be valid.


def _select(value: Any, index: Tensor, dim: int, device: torch.device) -> Any:
    """PyG's selection, for values that no kernel can read."""
    if isinstance(value, Tensor):
        return value.index_select(dim, index.to(value.device)).to(device)
    index = index.cpu()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.take(value, index.numpy(), axis=dim)).to(device)
    if isinstance(value, TensorFrame):
        return value[index.to(value.device)].to(device)
    return type(value)([value[k] for k in index.tolist()])


class Table:
    """The node-level or the edge-level attributes of data, kept up to date."""

    def __init__(
        self, data: Data, level: str, num_rows: int, device: torch.device, stream: Any, place: str,
        budget: Budget, cache: Cache | None,
    ) -> None:  # fmt: skip
        self._data, self._level, self._num_rows = data, level, num_rows
        self._device, self._stream, self._place = device, stream, place
        self._budget, self._cache = budget, cache
        self._lock = threading.Lock()
        self._columns: dict[str, Column] = {}
        self._version = 0
        self.update()

    def update(self, refresh: bool = False) -> tuple[int, dict[str, Column]]:
        """The current attributes, and a number that changes with them; with `refresh`, makes all
        copies again."""
        store = self._data._store
        belongs = store.is_node_attr if self._level == 'node' else store.is_edge_attr
        with self._lock:
            before = self._columns
            held = {
                key: value
                for key, value in list(store.items())
                if key not in ('edge_index', 'adj_t', 'num_nodes')
                and (self._level == 'node' if isinstance(value, ShardedFeatures) else belongs(key))
            }
            valid = {
                key: column for key, column in before.items()
                if held.get(key) is column.value and not (refresh or column.is_stale)
            }  # fmt: skip
            if len(valid) != len(held) or len(valid) != len(before):
                with behind(self._stream):
                    columns = {key: valid.get(key) or self._read(key, held) for key in _small(held)}
                # Keep the order of data.
                self._columns = {key: columns[key] for key in held}
                self._version += 1
            return self._version, self._columns

    def _read(self, key: str, held: dict[str, Any]) -> Column:
        value = held[key]
        dim = self._data.__cat_dim__(key, value, self._data._store)
        column = self._columns.get(key)
        if column is not None and column.value is value and is_plain(value, dim):
            return column.anew()
        place = self._place_of(value, dim)
        return Column(key, value, dim, self._num_rows, self._device, place, self._cache)

    def _place_of(self, value: Any, dim: int) -> str:
        """Where batches read a value: the user's memory, or a copy."""
        if not is_plain(value, dim):
            return 'user'
        if not is_apart(value.device, self._device):
            return 'user' if value.device == self._device else 'device'
        place = self._place
        if place == 'host' and value[:1].nbytes <= _SHORT_ROW:
            place = 'auto'
        return 'device' if self._budget.takes(place, value.nbytes) else 'host'


def sharded(data: Data, device: torch.device) -> Data:
    """A copy of data whose features are divided over all processes, without short rows."""
    out = copy.copy(data)
    out.num_nodes = data.num_nodes  # The whole tensors are gone.
    for key, value in data._store.items():
        if (
            data._store.is_node_attr(key) and is_plain(value, data.__cat_dim__(key, value))
            and value[:1].nbytes > _SHORT_ROW
        ):  # fmt: skip
            out[key] = ShardedFeatures.split(value, device=device)
    return out


def _small(held: dict[str, Any]) -> list[str]:
    """The names of values, small ones first."""
    return sorted(held, key=lambda key: getattr(held[key], 'nbytes', 0))


class Remote:
    """Features served by a :class:`~torch_geometric.data.FeatureStore`."""

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
        """All attributes of a batch's nodes; reads only unmatched ones from the store."""
        attrs = self._store.get_all_tensor_attrs()
        if previous is None or any(attr.attr_name not in previous for attr in attrs):
            match = previous = None
        wanted, position = unmatched(n_id, match)
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
        out = {}
        for name, rows in found.items():
            before = None if previous is None else previous[name]
            out[name] = gather_rows(rows, position, match=match, previous=before, counter=counter)
            counter = None  # All attributes have the same counts: add them once.
        return out


def unmatched(n_id: Tensor, match: Tensor | None) -> tuple[Tensor, Tensor]:
    """The nodes of a batch whose rows it does not reuse, and the place of each of its nodes among
    them."""
    if match is None:
        return n_id, torch.arange(n_id.numel(), device=n_id.device)
    wanted = n_id[match < 0]
    if wanted.numel() == 0:  # The kernel needs a row, even if it reads none.
        wanted = n_id[:1]
    return wanted, ((match < 0).cumsum(0) - 1).clamp_(min=0)


def _as_rows(value: Any) -> Tensor:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def most_sampled(col: Tensor, num_nodes: int, ratio: float, device: torch.device) -> Tensor:
    """The share of nodes with the most outgoing edges, which are sampled most often; ties by id."""
    degree = torch.zeros(num_nodes, dtype=torch.int64, device=col.device)
    degree.index_add_(0, col.long(), torch.ones_like(col, dtype=torch.int64))
    order = degree.argsort(descending=True, stable=True)
    return order[: round(ratio * num_nodes)].to(device)
