"""The attributes of a dataset of graphs: collated once, as PyG collates those of a batch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Data
from torch_geometric.typing import SparseTensor, TensorFrame
from torch_geometric.utils import is_sparse

from ..ops._checks import check_has_values
from ._levels import EDGES, GRAPHS, NODES, Ints, Levels
from ._place import Place
from ._selection import DeviceRows, RowSources, Selection

#: What PyG keeps of an attribute to take a graph out of a batch: a tensor, or dictionaries and
#: lists of them.
Slices: TypeAlias = 'Tensor | dict[str, Slices] | list[Slices] | None'

#: Of some levels the number of rows that are kept.
Counts: TypeAlias = Mapping[int, int]

# Types of rows that are taken with what PyG adds to them.
_SHIFTED = (torch.int32, torch.int64)

# Attributes that have as many rows as edges by chance, and are not in their order.
_OF_OTHER_EDGES = ('edge_label', 'edge_label_index')


class NotCollatable(Exception):
    """PyG's code must collate the dataset. The text is the reason."""


class Attribute(Protocol):
    """An attribute of all graphs of a dataset."""

    def take(self, batch: DeviceRows) -> object:
        """Its value in a batch."""

    def slices(self, graphs: Selection) -> Slices:
        """PyG's first row of each graph, on the host."""

    def incs(self, graphs: Selection) -> Slices:
        """PyG's increment of each graph, on the host."""

    def follow(self, batch: DeviceRows) -> tuple[Slices, Slices]:
        """The graph of each row and the first row of each graph, as of :obj:`follow_batch`."""

    def cut(self, value: object, counts: Counts) -> object:
        """The first rows of its value in a batch."""

    def cut_follow(self, value: object, counts: Counts) -> object:
        """The first rows of the graph of each row."""

    def has_own_rows(self) -> bool:
        """Whether it has other rows than one for each node, edge or graph."""


@dataclass
class TensorAttribute:
    """Tensors, joined along a dimension, and numbers, stacked."""

    number: int  # of the rows, of which that dimension is the first one
    shape: torch.Size  # of all rows
    dtype: torch.dtype
    dim: int
    level: int
    #: The increments: numbers as the sizes of a level, or tensors, which the levels know; or none.
    inc_level: int | None = None
    inc: int | None = None

    def take(self, batch: DeviceRows) -> Tensor:
        out = batch.taken(self.number)
        offset = self._offset(batch)
        if offset is not None:
            out = out + offset
        return out if self.dim == 0 else out.movedim(0, self.dim).contiguous()

    def _offset(self, batch: DeviceRows) -> Tensor | None:
        """What PyG adds to each row, unless rows are taken with it."""
        rank = len(self.shape)
        if self.inc is not None:
            incs = batch.incs(self.inc)
            incs = incs.view(len(incs), *[1] * (rank + 1 - incs.dim()), *incs.shape[1:])
            return incs.squeeze(self.dim + 1).index_select(0, batch.owner(self.level))
        if self.inc_level is None or self.dtype in _SHIFTED:
            return None
        if not batch.sizes.shifts[self.inc_level]:
            return None
        dtype = torch.result_type(torch.empty(1, dtype=self.dtype), torch.tensor(0))
        offset = batch.ptr[self.inc_level, :-1].to(dtype)
        return offset.index_select(0, batch.owner(self.level)).view(-1, *[1] * (rank - 1))

    def slices(self, graphs: Selection) -> Tensor:
        return torch.from_numpy(graphs.ptr[self.level].copy())

    def incs(self, graphs: Selection) -> Tensor:
        if self.inc is not None:
            return graphs.incs(self.inc)
        if self.inc_level is None:
            return torch.zeros(graphs.num_graphs, dtype=torch.int64)
        return torch.from_numpy(graphs.ptr[self.inc_level, :-1].copy())

    def follow(self, batch: DeviceRows) -> tuple[Tensor, Tensor]:
        return batch.owner(self.level).clone(), batch.offsets(self.level)

    def cut(self, value: object, counts: Counts) -> object:
        return cut_rows(value, self.level, counts, self.dim)

    def cut_follow(self, value: object, counts: Counts) -> object:
        return cut_rows(value, self.level, counts)

    def has_own_rows(self) -> bool:
        return self.level > EDGES


@dataclass
class ObjectAttribute:
    """Strings, lists and other objects: a batch has a list of them."""

    values: list[object]

    def take(self, batch: DeviceRows) -> list[object] | None:
        if batch.ids is None:
            return None
        out = [self.values[k] for k in batch.ids.tolist()]
        return out + [None] * batch.sizes.is_padded

    def slices(self, graphs: Selection) -> Tensor:
        return torch.arange(graphs.num_graphs + 1)

    def incs(self, graphs: Selection) -> None:
        return None

    def follow(self, batch: DeviceRows) -> tuple[Tensor, Tensor]:
        return batch.owner(GRAPHS).clone(), batch.offsets(GRAPHS)

    def cut(self, value: object, counts: Counts) -> object:
        assert isinstance(value, list)
        return value[: counts.get(GRAPHS, len(value))]

    def cut_follow(self, value: object, counts: Counts) -> object:
        return cut_rows(value, GRAPHS, counts)

    def has_own_rows(self) -> bool:
        return False


@dataclass
class DictAttribute:
    """Dictionaries of attributes."""

    parts: dict[str, Attribute]

    def take(self, batch: DeviceRows) -> dict[str, object]:
        return {key: part.take(batch) for key, part in self.parts.items()}

    def slices(self, graphs: Selection) -> dict[str, Slices]:
        return {key: part.slices(graphs) for key, part in self.parts.items()}

    def incs(self, graphs: Selection) -> dict[str, Slices]:
        return {key: part.incs(graphs) for key, part in self.parts.items()}

    def follow(self, batch: DeviceRows) -> tuple[Slices, Slices]:
        both = {key: part.follow(batch) for key, part in self.parts.items()}
        owner, ptr = ({key: pair[k] for key, pair in both.items()} for k in range(2))
        return owner, ptr

    def cut(self, value: object, counts: Counts) -> object:
        assert isinstance(value, dict)
        return {key: part.cut(value[key], counts) for key, part in self.parts.items()}

    def cut_follow(self, value: object, counts: Counts) -> object:
        assert isinstance(value, dict)
        return {key: part.cut_follow(value[key], counts) for key, part in self.parts.items()}

    def has_own_rows(self) -> bool:
        return any(part.has_own_rows() for part in self.parts.values())


@dataclass
class ListAttribute:
    """Lists of attributes, of which the first is a tensor."""

    parts: list[Attribute]

    def take(self, batch: DeviceRows) -> list[object]:
        return [part.take(batch) for part in self.parts]

    def slices(self, graphs: Selection) -> list[Slices]:
        return [part.slices(graphs) for part in self.parts]

    def incs(self, graphs: Selection) -> list[Slices]:
        return [part.incs(graphs) for part in self.parts]

    def follow(self, batch: DeviceRows) -> tuple[list[Slices], list[Slices]]:
        both = [part.follow(batch) for part in self.parts]
        return [owner for owner, _ in both], [ptr for _, ptr in both]

    def cut(self, value: object, counts: Counts) -> object:
        assert isinstance(value, list)
        return [part.cut(each, counts) for part, each in zip(self.parts, value, strict=True)]

    def cut_follow(self, value: object, counts: Counts) -> object:
        assert isinstance(value, list)
        return [part.cut_follow(each, counts) for part, each in zip(self.parts, value, strict=True)]

    def has_own_rows(self) -> bool:
        return any(part.has_own_rows() for part in self.parts)


def cut_rows(value: object, level: int, counts: Counts, dim: int = 0) -> object:
    """The first rows of a tensor of a level, all if the level is not counted."""
    assert isinstance(value, Tensor)
    return value.narrow(dim, 0, counts[level]) if level in counts else value


# Reading ----------------------------------------------------------------------------------------
class Order:
    """The order of the edges in which their attributes are kept.

    Args:
        levels: Those of the dataset.
        perm: The position of each edge in the dataset.
    """

    def __init__(self, levels: Levels, perm: Tensor) -> None:
        self.levels, self._perm = levels, perm

    def of(self, key: str, level: int | None) -> Tensor | None:
        """The positions for an attribute, None if it has no row for each edge."""
        is_of_edges = level == EDGES and key not in _OF_OTHER_EDGES
        return self._perm if is_of_edges else None

    def permute(self, key: str, values: list[object]) -> list[object]:
        """Lists and arrays that have an entry for each edge, in this order."""
        sizes = np.array([
            len(value) if isinstance(value, (list, tuple)) else
            value.shape[0] if isinstance(value, np.ndarray) and value.ndim > 0 else -1
            for value in values
        ], dtype=np.int64)  # fmt: skip
        perm = self.of(key, self.levels.find(key, sizes))
        if perm is None:
            return values
        begin = np.cumsum(sizes) - sizes
        local = np.split(perm.cpu().numpy() - np.repeat(begin, sizes), begin[1:])
        return [
            value[part] if isinstance(value, np.ndarray) else
            _take_at(value, part)
            for value, part in zip(values, local, strict=True)
        ]  # fmt: skip

    def renumber(self, positions: Tensor, level: int) -> Tensor:
        """Positions of edges in their graph, in this order. Those that no edge has stay."""
        counts = torch.from_numpy(self.levels.sizes(EDGES))
        graph = torch.arange(len(counts)).repeat_interleave(
            torch.from_numpy(self.levels.sizes(level))
        )
        perm = self._perm.cpu().long()
        new = torch.empty_like(perm)
        new[perm] = torch.arange(len(perm))
        shape = [-1, *[1] * (positions.dim() - 1)]
        start = (counts.cumsum(0) - counts)[graph].view(shape).to(positions.device)
        exist = (positions >= 0) & (positions < counts[graph].view(shape).to(positions.device))
        at = torch.where(exist, positions + start, 0)
        found = (new.to(positions.device)[at] - start).to(positions.dtype)
        return torch.where(exist, found, positions)


def _take_at(value: object, places: Ints) -> object:
    """The entries of a list or a tuple at these places."""
    assert isinstance(value, (list, tuple))
    out = [value[k] for k in places]
    return out if isinstance(value, list) else tuple(out)


class Column:
    """The values of one attribute, graph by graph, and what PyG asks the graph about each."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._kind: object = None
        self._values: list[object] = []
        self._dims: set[object] = set()
        self._incs: list[object] = []
        self._counts_itself = False  # whether a class of the user tells increments
        self._parts: dict[object, Column] = {}

    def add(self, graph: int, data: Data, value: object) -> None:
        """Adds the value of a graph.

        Raises:
            ValueError: If it is not like those of the graphs before.
            NotCollatable: If only PyG's code can join such values.
        """
        dim, value = self._find_dim(data, value)
        kind = _kind_of(self.key, value, dim)
        if not self._values:
            self._kind = kind
        elif kind != self._kind:
            raise ValueError(
                f"'{self.key}' is {_text_of(kind)} in graph {graph} of the dataset, but "
                f'{_text_of(self._kind)} in graph 0: make them alike, or pass '
                f"exclude_keys=['{self.key}']"
            )
        self._values.append(value)
        if isinstance(value, (Tensor, int, float)):
            self._dims.add(dim)
            self._incs.append(data.__inc__(self.key, value, data._store))
            self._counts_itself |= type(data).__inc__ is not Data.__inc__
        elif isinstance(value, (Mapping, Sequence)):
            for key, inner in _items_of(value, kind):
                name = str(key) if isinstance(value, Mapping) else self.key
                column = self._parts.setdefault(key, Column(name))
                column.add(graph, data, inner)

    def _find_dim(self, data: Data, value: object) -> tuple[object, object]:
        """The dimension along which PyG joins a value, and the value that it joins."""
        if not isinstance(value, Tensor):
            return 0, value
        _check_joinable(self.key, value)
        dim = data.__cat_dim__(self.key, value, data._store)
        if dim is None or value.dim() == 0:
            return 0, value.unsqueeze(0)
        if not isinstance(dim, int):
            raise NotCollatable(f"'{self.key}' has more than one dimension of rows")
        return dim % value.dim(), value

    @property
    def is_tensor(self) -> bool:
        """Whether each graph has a tensor."""
        return len(self._dims) == 1 and isinstance(self._values[0], Tensor)

    def num_rows(self) -> Ints:
        """The number of rows of the tensor of each graph."""
        (dim,) = self._dims
        return np.array([t.size(dim) for t in self._values], dtype=np.int64)  # type: ignore[attr-defined]

    def why_unsure(self, levels: Levels) -> str | None:
        """Why nobody knows whether the values are of edges, with which they must be sorted."""
        reasons = [part.why_unsure(levels) for part in self._parts.values()]
        if self._dims and isinstance(self._values[0], Tensor):
            reasons.append(levels.why_unsure(self.key, self.num_rows()))
        if self._are_positions(levels) and self._may_be_by_chance(levels):
            reasons.append(
                f"'{self.key}' may hold positions of edges, or of others as many as these"
            )
        return next(filter(None, reasons), None)

    def _are_positions(self, levels: Levels) -> bool:
        """Whether the values are positions of edges: a class of the user counts them so."""
        incs = self._incs
        return (
            self._counts_itself and self.key != 'edge_index' and isinstance(self._values[0], Tensor)
            and all(isinstance(inc, int) for inc in incs)
            and incs == levels.sizes(EDGES).tolist() and any(incs)
        )  # fmt: skip

    def _may_be_by_chance(self, levels: Levels) -> bool:
        """Whether increments by the numbers of edges may be those of others: nodes, or anything
        where all graphs have as many edges."""
        counts = levels.sizes(EDGES)
        return bool((counts == counts[0]).all() or (counts == levels.sizes(NODES)).all())

    def are_edges(self, num_nodes: Ints) -> bool:
        """Whether the values are lists of edges, which PyG joins as those of graphs with so many
        nodes."""
        if not isinstance(self._kind, tuple) or self._kind[1] != (2, -1):
            return False
        if self._kind[0] not in (torch.int32, torch.int64):
            return False
        incs = self._incs
        return all(isinstance(inc, int) for inc in incs) and incs == num_nodes.tolist()

    def join(self) -> Tensor:
        """The tensors of all graphs as one."""
        (dim,) = self._dims
        return torch.cat(self._values, dim)  # type: ignore[arg-type]

    def collate(
        self, levels: Levels, place: Place, order: Order | None, into: RowSources
    ) -> Attribute:
        """Joins the values of all graphs."""
        parts = {
            key: column.collate(levels, place, order, into) for key, column in self._parts.items()
        }
        if isinstance(self._kind, frozenset):
            return DictAttribute(parts)  # type: ignore[arg-type]
        if parts:
            return ListAttribute(list(parts.values()))
        if not self._dims:
            values = self._values if order is None else order.permute(self.key, self._values)
            return ObjectAttribute(values)
        return self._collate_tensors(levels, place, order, into)

    def _collate_tensors(
        self, levels: Levels, place: Place, order: Order | None, into: RowSources
    ) -> TensorAttribute:
        (dim,) = self._dims
        assert isinstance(dim, int)
        if not isinstance(self._values[0], Tensor):
            rows, level = torch.tensor(self._values), GRAPHS
        else:
            level = levels.find_or_add(self.key, self.num_rows())
            rows = self.join().movedim(dim, 0)
        perm = None if order is None else order.of(self.key, level)
        if perm is not None:
            rows = rows[perm.to(rows.device)]
        if order is not None and self._are_positions(levels) and rows.dtype in _SHIFTED:
            rows = order.renumber(rows, level)
        self._values = []
        inc_level, inc = self._collate_incs(levels, rows, dim)
        shift = inc_level if rows.dtype in _SHIFTED else None
        number = into.add(place(rows), level, shift)
        return TensorAttribute(number, rows.shape, rows.dtype, dim, level, inc_level, inc)

    def _collate_incs(
        self, levels: Levels, rows: Tensor, dim: int
    ) -> tuple[int | None, int | None]:
        incs = self._incs
        if isinstance(incs[0], Tensor):
            inc = torch.stack(incs).cpu()  # type: ignore[arg-type]
            if inc.dim() > 1:
                shape = [1] * (rows.dim() + 1 - inc.dim()) + list(inc.shape[1:])
                if len(shape) != rows.dim() or shape[dim] != 1:
                    raise NotCollatable(f"'{self.key}' has an increment for each of its rows")
                return None, levels.add_incs(inc)
            incs = inc.tolist()
        counts = np.array(incs)
        if counts.dtype.kind not in 'iub':
            raise NotCollatable(f"'{self.key}' has increments that are no integers")
        if not counts.any():
            return None, None
        return levels.find_or_add(self.key, counts.astype(np.int64)), None


def _check_joinable(key: str, value: Tensor) -> None:
    check_has_values(key, value)
    what = (
        'sparse' if is_sparse(value) else 'nested' if value.is_nested else
        f'of class {type(value).__name__}' if isinstance(value, (Index, EdgeIndex)) else
        'part of a computation that requires gradients' if value.requires_grad else None
    )  # fmt: skip
    if what is not None:
        raise NotCollatable(f"'{key}' is {what}")


def _kind_of(key: str, value: object, dim: object) -> object:
    """What the values of all graphs must have in common."""
    if isinstance(value, (SparseTensor, TensorFrame)):
        raise NotCollatable(f"'{key}' is a {type(value).__name__}")
    if isinstance(value, Tensor):
        assert isinstance(dim, int)
        return value.dtype, (*value.shape[:dim], -1, *value.shape[dim + 1 :]), value.device
    if isinstance(value, (int, float)):
        return type(value)
    if isinstance(value, Mapping):
        return frozenset(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if is_list and isinstance(value[0], (Tensor, SparseTensor)):  # type: ignore[index]
        return len(value)  # type: ignore[arg-type]
    return object


def _text_of(kind: object) -> str:
    if isinstance(kind, tuple):
        dtype, shape, device = kind
        sizes = ', '.join('*' if size < 0 else str(size) for size in shape)
        return f'{dtype} of shape [{sizes}] on {device}'
    if isinstance(kind, frozenset):
        return f'a dictionary of {sorted(map(str, kind))}'
    if isinstance(kind, int):
        return f'a list of {kind} tensors'
    return 'no tensor or number' if kind is object else f'of type {kind.__name__}'  # type: ignore[attr-defined]


def _items_of(value: object, kind: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(kind, int) and isinstance(value, Sequence):
        yield from enumerate(value)
