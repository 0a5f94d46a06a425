"""The attributes of data as columns, in memory that batches read."""

import threading
from collections.abc import Sequence
from operator import is_
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data.storage import BaseStorage
from torch_geometric.typing import TensorFrame

from ..graph.csr import perm_name
from ..ops._checks import check_has_values
from ..ops._library import ops
from ._pinned import pin
from ._pipeline import run_on
from ._shards import ShardedFeatures
from ._versions import State, state_of

SHORT_ROW = 16  # bytes: reading a label costs the bus as much as several features


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

    def take(self, place: str, num_bytes: int) -> bool:
        """Whether an object goes to the device; if so, subtracts it from the budget."""
        fits = place == 'device' or (place == 'auto' and num_bytes <= self.left)
        if fits:
            self.left -= num_bytes
        return fits


class Cache:
    """The rows of chosen nodes, on the device."""

    def __init__(self, nodes: Tensor, num_nodes: int) -> None:
        dtype = torch.int32 if num_nodes < 2**31 else torch.int64
        self.nodes = nodes
        self.position = torch.full((num_nodes,), -1, dtype=dtype, device=nodes.device)
        self.position[nodes] = torch.arange(nodes.numel(), dtype=dtype, device=nodes.device)

    @classmethod
    def of_most_sampled(
        cls, col: Tensor, num_nodes: Sequence[int], ratio: float, device: torch.device
    ) -> 'list[Cache | None]':
        """Caches a share of the nodes of each type: those with the most outgoing edges, which are
        sampled most often, ties by id. None: nothing is to be cached.

        Args:
            col: The sources of all edges.
            num_nodes: The number of nodes of each type, which are numbered one after the other.
        """
        if ratio == 0 or not is_apart(torch.device('cpu'), device):
            return [None] * len(num_nodes)
        degree = torch.zeros(sum(num_nodes), dtype=torch.int64, device=col.device)
        degree.index_add_(0, col.long(), torch.ones_like(col, dtype=torch.int64))
        parts = degree.split(list(num_nodes))
        orders = [part.argsort(descending=True, stable=True) for part in parts]
        return [
            cls(order[: round(ratio * size)].to(device), size)
            for order, size in zip(orders, num_nodes, strict=True)
        ]


class Column:
    """One attribute: the user's value, and copies that batches read if the value is not on their
    device. A column is immutable: a new one replaces it.

    All copies are made and read on the current stream, which is the loader's own.
    """

    def __init__(
        self, name: str, value: object, dim: int, num_rows: int, device: torch.device, place: str,
        cache: Cache | None,
    ) -> None:  # fmt: skip
        self.name, self.value = name, value
        self.on_host = place == 'host'
        self._dim, self._num_rows, self._device, self._place = dim, num_rows, device, place
        self._cache = cache if self.on_host else None
        self._copied: Tensor | None = None
        self._state: State | None = None
        self.source: Tensor | None = None  # the copy
        self.rows: Tensor | None = None  # those in the cache
        if isinstance(value, ShardedFeatures) and value.num_nodes != num_rows:
            raise ValueError(
                f"'{name}' must have {num_rows} rows, one for each of data.num_nodes, got "
                f'{value.num_nodes}: set data.num_nodes'
            )
        if place != 'user' and isinstance(value, Tensor):
            self._copy(value)

    def _copy(self, value: Tensor) -> None:
        source = value.detach()
        self._check(source)
        self._copied, self._state = value, state_of(value)
        self.source = pin(source) if self.on_host else source.to(self._device).contiguous()
        if self._cache is not None:
            self.rows = self.source[self._cache.nodes.cpu()].to(self._device)

    def copy_again(self) -> 'Column':
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
        return self._copied is not None and state_of(self._copied) != self._state

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
        return row_bytes_of(self.source)

    def gather(
        self, index: Tensor, match: Tensor | None = None, previous: Tensor | None = None,
        counter: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Reads rows of the copy, as :func:`~pyg_fast.ops.gather_rows`."""
        assert self.source is not None
        position = None if self._cache is None else self._cache.position
        return _rows(self.source, index, match, previous, position, self.rows, counter)

    def rows_at(self, index: Tensor) -> object:
        """The rows of the nodes or edges of a batch."""
        if self.source is not None:
            return self.gather(index)
        value = self.value
        if is_plain(value, self._dim) and value.device == self._device and value.is_contiguous():
            self._check(value)
            return _rows(value, index)
        return _select(value, index, self._dim, self._device)

    def _check(self, value: Tensor) -> None:
        if value.size(0) != self._num_rows:
            raise ValueError(
                f"'{self.name}' must have {self._num_rows} rows, as when the loader was made, "
                f'got {value.size(0)}'
            )


def row_bytes_of(rows: Tensor) -> int:
    return rows[:1].nbytes if rows.size(0) else 0


def _size_of(value: object) -> int:
    """The bytes of a value that may be copied: sparse tensors have no such number."""
    return value.nbytes if isinstance(value, Tensor) and value.layout == torch.strided else 0


def is_plain(value: object, dim: int) -> TypeGuard[Tensor]:
    """Whether kernels can read it: autograd must make a part of a value with gradients."""
    return (
        type(value) is Tensor and value.layout == torch.strided and dim == 0 and value.dim() > 0
        and not value.requires_grad
    )  # fmt: skip


def _rows(x: Tensor, index: Tensor, *args: Tensor | None) -> Tensor:
    args += (None,) * (5 - len(args))
    return ops.gather_rows.default(x, index, *args)  # The arguments are known to be valid.


def _select(
    value: Tensor | np.ndarray | TensorFrame | list | tuple, index: Tensor, dim: int,
    device: torch.device,
) -> object:  # fmt: skip
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
    """The node-level or the edge-level attributes of a store of data, kept up to date; `name` says
    in errors which store."""

    def __init__(
        self, store: BaseStorage, name: str, level: str, num_rows: int, device: torch.device,
        stream: torch.cuda.Stream | None, place: str, budget: Budget, cache: Cache | None,
    ) -> None:  # fmt: skip
        self._store, self._name, self._level, self._num_rows = store, name, level, num_rows
        self._device, self._stream, self._place = device, stream, place
        self._budget, self._cache = budget, cache
        self._lock = threading.Lock()
        self._columns: dict[str, Column] = {}
        self._seen: dict[str, object] = {}  # what the store had at the last update
        self._version = 0
        self.update()

    def update(self, refresh: bool = False) -> tuple[int, dict[str, Column]]:
        """The current attributes, and a number that changes with them; with `refresh`, makes all
        copies again."""
        with self._lock:
            if not refresh and self._is_current():
                return self._version, self._columns
            self._seen = dict(self._store._mapping)
            before, held = self._columns, self._attributes()
            valid = {
                key: column for key, column in before.items()
                if held.get(key) is column.value and not (refresh or column.is_stale)
            }  # fmt: skip
            if len(valid) != len(held) or len(valid) != len(before):
                with run_on(self._stream):  # Small ones first: more of them fit on the device.
                    names = sorted(held, key=lambda key: _size_of(held[key]))
                    columns = {key: valid.get(key) or self._read(key, held[key]) for key in names}
                # Keep the order of data.
                self._columns = {key: columns[key] for key in held}
                self._version += 1
            return self._version, self._columns

    def _is_current(self) -> bool:
        """Whether the store has what it had, and no copy is stale. To look which attributes belong
        to the rows takes longer, for each type of each batch."""
        seen, now = self._seen, self._store._mapping
        if len(seen) != len(now) or not all(map(is_, seen, now)):
            return False
        if not all(map(is_, seen.values(), now.values())):
            return False
        return not self._columns or not any(column.is_stale for column in self._columns.values())

    def _attributes(self) -> dict[str, object]:
        store, is_node_level = self._store, self._level == 'node'
        belongs = store.is_node_attr if is_node_level else store.is_edge_attr
        others = 'edge_index', 'adj_t', 'num_nodes', perm_name(store)
        return {
            key: value
            for key, value in list(store.items())
            if key not in others
            and (is_node_level if isinstance(value, ShardedFeatures) else belongs(key))
        }

    def _read(self, key: str, value: object) -> Column:
        dim = self._store._parent().__cat_dim__(key, value, self._store)
        column = self._columns.get(key)
        if column is not None and column.value is value and is_plain(value, dim):
            return column.copy_again()
        place = self._choose_place(key, value, dim)
        name = f'{self._name}.{key}'
        return Column(name, value, dim, self._num_rows, self._device, place, self._cache)

    def _choose_place(self, key: str, value: object, dim: int) -> str:
        """Where batches read a value: the user's memory, or a copy."""
        if not is_plain(value, dim):
            return 'user'
        check_has_values(f'{self._name}.{key}', value)
        if not is_apart(value.device, self._device):
            return 'user' if value.device == self._device else 'device'
        place = self._place
        if place == 'host' and value[:1].nbytes <= SHORT_ROW:
            place = 'auto'
        return 'device' if self._budget.take(place, value.nbytes) else 'host'
