"""The graph from which batches with types, times or a subgraph for each seed are sampled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage

from ..errors import ShapeError
from ..ops.neighbor_sample import sampling_weight
from ..ops.typed_sample import MOST_TYPES, TypedGraph, Types
from ._options import SamplingOptions
from ._pinned import pin
from ._structure import Structure, edges_of_data, edges_of_store, in_order_of

#: The name of a type; None: the only type of a :class:`~torch_geometric.data.Data` object.
NodeType: TypeAlias = str | None
EdgeType: TypeAlias = tuple[str, str, str] | None
T = TypeVar('T', str | None, tuple[str, str, str] | None)


@dataclass(frozen=True)
class TypedStructure:
    """All types of nodes and edges of a graph, in its order."""

    node_types: tuple[NodeType, ...]
    edge_types: tuple[EdgeType, ...]
    graph: TypedGraph
    loop_free: Mapping[EdgeType, bool]  # known to have no self-loops
    layout: Mapping[EdgeType, str]  # as of :class:`Structure`
    node_time: Mapping[NodeType, Tensor]  # int64, on the CPU: of seeds
    has_edge_time: bool = False

    @property
    def num_nodes(self) -> int:
        return self.graph.types.num_nodes

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.graph[1:] if isinstance(t, Tensor))

    @property
    def col(self) -> Tensor:
        return self.graph.col

    @cached_property
    def node_number(self) -> dict[NodeType, int]:
        """The place of each type among all."""
        return {key: k for k, key in enumerate(self.node_types)}

    @cached_property
    def edge_number(self) -> dict[EdgeType, int]:
        """The place of each type among all."""
        return {key: k for k, key in enumerate(self.edge_types)}

    @cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The types of nodes between which there are edges."""
        return tuple(dict.fromkeys(self.graph.types.ends))

    def first_node(self, node_type: NodeType) -> int:
        """Where the nodes of a type begin in the numbering of all."""
        return self.graph.types.first_node[self.node_number[node_type]]

    def place(self, device: torch.device, on_host: bool) -> 'TypedStructure':
        """The graph in memory from which batches on `device` can be sampled."""

        def move(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return pin(tensor.cpu()) if on_host else tensor.to(device).contiguous()

        types, *tensors = self.graph
        types = types._replace(table=types.table.to(device))
        return replace(self, graph=TypedGraph(types, *map(move, tensors)))  # type: ignore[arg-type]


def typed_structure(data: Data | HeteroData, options: SamplingOptions) -> TypedStructure:
    """The graph of data, of which options say what sorts and weighs its edges.

    Raises:
        ValueError, TypeError, IndexError: If attributes do not fit; the text names type and
            attribute.
    """
    if isinstance(data, HeteroData):
        stores = {store._key: store for store in data.edge_stores}
        nodes = {store._key: _num_nodes(store) for store in data.node_stores}
        for key in stores:
            for node_type in (key[0], key[2]):
                if node_type not in nodes:
                    raise ValueError(
                        f"'{name_of(key)}' must be between types of nodes that 'data' has, got "
                        f'{node_type!r}: set its features or num_nodes'
                    )
        parts = {
            key: edges_of_store(
                store, nodes[key[0]], nodes[key[2]], name_of(key), options.is_sorted
            )
            for key, store in stores.items()
        }  # fmt: skip
        if not parts:
            raise ValueError("'data' must have edges, got HeteroData without any")
        node_stores: dict[NodeType, BaseStorage] = {s._key: s for s in data.node_stores}
    else:
        stores, node_stores = {None: data._store}, {None: data._store}
        parts = {None: edges_of_data(data, options.is_sorted)}
        nodes = {None: data.num_nodes}
    if len(parts) + len(nodes) > MOST_TYPES:
        raise ValueError(
            f"'data' must have at most {MOST_TYPES} types, got {len(parts) + len(nodes)}"
        )
    node_time, edge_time = _find_times(data, node_stores, stores, options.time_attr)
    times = _times_of_edges(parts, node_time, edge_time, options.time_attr)
    if times:
        parts, times = _sort_by_time(parts, times, options.is_sorted)
    return _join(nodes, parts, times, stores, node_time, bool(edge_time), options)


def name_of(key: NodeType | EdgeType) -> str:
    """What errors call the part of data."""
    return 'data' if key is None else f'data[{key!r}]'


def _num_nodes(store: BaseStorage) -> int:
    num_nodes = store.num_nodes
    if num_nodes is None:
        raise ValueError(f"'{name_of(store._key)}' must have features or num_nodes, got neither")
    return num_nodes


# Times -------------------------------------------------------------------------------------------
def _find_times(
    data: Data | HeteroData, nodes: Mapping[NodeType, BaseStorage],
    edges: Mapping[EdgeType, BaseStorage], time_attr: str | None,
) -> tuple[dict[NodeType, Tensor], dict[EdgeType, Tensor]]:  # fmt: skip
    """The times of nodes and those of edges, of the types that have them; one of both is empty."""
    if time_attr is None:
        return {}, {}
    if isinstance(data, Data):
        is_there = time_attr in data._store
        has_nodes = is_there and data.is_node_attr(time_attr)  # first, as in PyG
        has_edges = is_there and not has_nodes and data.is_edge_attr(time_attr)
    else:
        has_nodes = any(time_attr in store for store in nodes.values())
        has_edges = any(time_attr in store for store in edges.values())
    if has_nodes and has_edges:
        raise ValueError(
            f"'time_attr' must name an attribute of nodes or one of edges, got {time_attr!r}, "
            f'which both have'
        )
    if isinstance(data, Data) and time_attr in data._store and not has_nodes and not has_edges:
        shape = getattr(data[time_attr], 'shape', None)
        got = type(data[time_attr]).__name__ if shape is None else list(shape)
        raise ShapeError(
            f"'data.{time_attr}' must have a time for each of {data.num_nodes} nodes, or for each "
            f"of {data.num_edges} edges, as 'time_attr' names it, got {got}"
        )
    if not has_nodes and not has_edges:
        raise ValueError(
            f"'time_attr' must name an attribute of nodes or of edges, got {time_attr!r}"
        )
    if has_nodes:
        return _check_times(nodes, time_attr, 'num_nodes'), {}
    return {}, _check_times(edges, time_attr, 'num_edges')


def _check_times(stores: Mapping[T, BaseStorage], time_attr: str, size: str) -> dict[T, Tensor]:
    out = {}
    for key, store in stores.items():
        if time_attr not in store:
            continue
        time, name, count = store[time_attr], f'{name_of(key)}.{time_attr}', getattr(store, size)
        if not isinstance(time, Tensor) or not is_time(time.dtype):
            got = time.dtype if isinstance(time, Tensor) else type(time).__name__
            raise TypeError(f"'{name}' must hold integers, as 'time_attr' names it, got {got}")
        if time.shape != (count,):
            raise ValueError(f"'{name}' must have shape [{count}], got {list(time.shape)}")
        out[key] = time.detach().long()
    return out


def is_time(dtype: torch.dtype) -> bool:
    """Whether numbers of this type are times: integers that an int64 holds."""
    is_integer = not dtype.is_floating_point and not dtype.is_complex
    return is_integer and dtype not in (torch.bool, torch.uint64)


def _times_of_edges(
    parts: Mapping[EdgeType, Structure], node_time: Mapping[NodeType, Tensor],
    edge_time: Mapping[EdgeType, Tensor], time_attr: str | None,
) -> dict[EdgeType, Tensor]:  # fmt: skip
    """The time of each edge, in the order of the structures: its own, or that of its source."""
    out = {}
    for key, part in parts.items():
        source = None if key is None else key[0]
        if key in edge_time:
            out[key] = in_order_of(edge_time[key], part, f'{name_of(key)}.{time_attr}')
        elif source in node_time:
            out[key] = node_time[source].to(part.col.device)[part.col.long()]
    return out


def _sort_by_time(
    parts: Mapping[EdgeType, Structure], times: Mapping[EdgeType, Tensor], is_sorted: bool
) -> tuple[dict[EdgeType, Structure], dict[EdgeType, Tensor]]:
    """Sorts the edges of each node by time; those of one time stay in order."""
    out, sorted_times = dict(parts), dict(times)
    for key, time in times.items():
        part = parts[key]
        degree = part.rowptr.diff()
        row = torch.arange(degree.numel(), device=time.device).repeat_interleave(degree)
        if not bool(((time[1:] < time[:-1]) & (row[1:] == row[:-1])).any()):
            continue
        if is_sorted:
            raise ValueError(
                f"'{name_of(key)}.edge_index' must be sorted by destination and time if "
                f"'is_sorted' is set"
            )
        order = time.argsort(stable=True)
        order = order[row[order].argsort(stable=True)]
        perm = order.to(part.rowptr.dtype) if part.perm is None else part.perm[order]
        out[key] = part._replace(col=part.col[order], perm=perm)
        sorted_times[key] = time[order]
    return out, sorted_times


# Joining -----------------------------------------------------------------------------------------
def _join(
    nodes: Mapping[NodeType, int], parts: Mapping[EdgeType, Structure],
    times: Mapping[EdgeType, Tensor], stores: Mapping[EdgeType, BaseStorage],
    node_time: Mapping[NodeType, Tensor], has_edge_time: bool, options: SamplingOptions,
) -> TypedStructure:  # fmt: skip
    node_types, edge_types = tuple(nodes), tuple(parts)
    device = next(iter(parts.values())).col.device
    num_edges = [part.col.numel() for part in parts.values()]
    weights = _weights(parts, stores, options)
    ends = [
        (0, 0) if key is None else (node_types.index(key[0]), node_types.index(key[2]))
        for key in edge_types
    ]
    types = Types.of(
        list(nodes.values()), ends, num_edges, _longest_rows(parts.values()),
        [key in times for key in parts], [key in weights for key in parts], device,
    )  # fmt: skip
    big = max(sum(num_edges), types.num_nodes) >= 2**31
    index = torch.int64 if big else torch.int32
    starts = [sum(num_edges[:k]) for k in range(len(num_edges))]
    rowptr = torch.cat([
        *(part.rowptr[:-1].to(device, index) + start
          for part, start in zip(parts.values(), starts, strict=True)),
        torch.tensor([sum(num_edges)], dtype=index, device=device),
    ])  # fmt: skip
    col = torch.cat([
        part.col.to(device, torch.int64 if types.num_nodes >= 2**31 else torch.int32)
        + types.first_node[src]
        for part, (src, _) in zip(parts.values(), ends, strict=True)
    ])  # fmt: skip
    perm = None
    if len(parts) > 1 or any(part.perm is not None for part in parts.values()):
        perm = torch.cat([
            torch.arange(part.col.numel(), dtype=index, device=device)
            if part.perm is None else part.perm.to(device, index)
            for part in parts.values()
        ])  # fmt: skip
    weight = _fill(weights, parts, device, torch.float64)
    if weight is not None:
        weight = sampling_weight(weight, col, options.replace)
    graph = TypedGraph(types, rowptr, col, perm, weight, _fill(times, parts, device, torch.int64))
    return TypedStructure(
        node_types, edge_types, graph,
        {key: part.loop_free and (key is None or key[0] == key[2]) for key, part in parts.items()},
        {key: part.layout for key, part in parts.items()},
        {key: time.cpu() for key, time in node_time.items()}, has_edge_time,
    )  # fmt: skip


def _longest_rows(parts: Iterable[Structure]) -> list[int]:
    """The most edges of a row of each structure."""
    # They may be on different devices.
    return [int(torch.cat([p.rowptr[:1] * 0, p.rowptr.diff()]).max()) for p in parts]


def _weights(
    parts: Mapping[EdgeType, Structure], stores: Mapping[EdgeType, BaseStorage],
    options: SamplingOptions,
) -> dict[EdgeType, Tensor]:  # fmt: skip
    """The weights of the edge types that have them, in the order of the structures."""
    attr = options.weight_attr
    if attr is None:
        return {}
    if not isinstance(attr, str):
        raise TypeError(f"'weight_attr' must be a name, got {type(attr).__name__}")
    found = {key: store[attr] for key, store in stores.items() if attr in store}
    if not found:
        raise ValueError(f"'weight_attr' must name an attribute of 'data', got {attr!r}")
    out = {}
    for key, value in found.items():
        name = f'{name_of(key)}.{attr}'
        weight = in_order_of(value, parts[key], name)
        out[key] = sampling_weight(weight, parts[key].col, False, name)
    return out


def _fill(
    values: Mapping[EdgeType, Tensor], parts: Mapping[EdgeType, Structure], device: torch.device,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """Values of all edges, zero for the types without; None: no type has them."""
    if not values:
        return None
    return torch.cat([
        values[key].to(device, dtype) if key in values
        else torch.zeros(part.col.numel(), dtype=dtype, device=device)
        for key, part in parts.items()
    ])  # fmt: skip
