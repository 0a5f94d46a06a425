"""A prepared graph in place of an edge_index."""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch_geometric import EdgeIndex
from torch_geometric.edge_index import SortOrder

from ..sparse.graph import Graph, Missing, check_graph, ends_of
from ..sparse.groups import Device, Groups
from .batch_edge_index import cache_key, not_compiled

_WRITES = '{} would write a PreparedGraph: change the list of to_edge_index()'


# The tensors of a graph, as attributes.
_PARTS = ('_rowptr', '_col', '_perm', '_t_rowptr', '_t_col', '_t_perm')
# What the attributes do not say: the sizes, the missing positions, whether both structures are one.
_Context: TypeAlias = tuple[int, int, Missing | None, bool]


class PreparedGraph(EdgeIndex):
    r"""A :class:`~pyg_fast.graph.Graph` in place of an :obj:`edge_index`, without a list of edges.

    It is an immutable :class:`~torch_geometric.EdgeIndex` of shape :math:`(2, |\mathcal{E}|)` that
    holds the int32 structure instead of the int64 list: about half of the memory of the list
    alone, a quarter of that of an :class:`~torch_geometric.EdgeIndex` with its caches. Layers and
    ops take it wherever they take an :obj:`edge_index`. Code of PyG and PyTorch gets the list from
    :meth:`to_edge_index`, made anew for each operation. Edges are in the order of the graph: that
    of :obj:`edge_weight` and other edge attributes.

    Args:
        graph (Graph): The structure, which must not be written afterwards.

    Raises:
        TypeError, ValueError: If the tensors of :obj:`graph` do not fit together, or it has places
            without an edge.
    """

    graph: Graph

    @staticmethod
    def __new__(cls: type['PreparedGraph'], graph: Graph) -> 'PreparedGraph':
        if not isinstance(graph, Graph):
            raise TypeError(f"'graph' must be a Graph, got {type(graph).__name__}")
        check_graph(graph)
        count = int(graph.rowptr[-1])
        if count != graph.num_edges:
            raise ValueError(
                f"'graph' must have an edge in each of its {graph.num_edges} places, got {count} "
                'edges'
            )
        return cls._of(graph)

    @classmethod
    def _of(cls, graph: Graph) -> 'PreparedGraph':
        out = Tensor._make_wrapper_subclass(
            cls, size=(2, graph.num_edges), strides=(graph.num_edges, 1), dtype=torch.int64,
            device=graph.col.device, requires_grad=False,
        )  # fmt: skip
        out.graph = graph
        for name in _PARTS:
            setattr(out, name, getattr(graph, name[1:]))
        out._sparse_size = graph.num_src, graph.num_dst
        by_dst = graph.perm is None and not graph.is_in_order_of_transpose
        out._sort_order = SortOrder.COL if by_dst else None
        return out

    def to_edge_index(self) -> EdgeIndex:
        """The list of the edges, as a plain :class:`~torch_geometric.EdgeIndex`."""
        return EdgeIndex(self._data, sparse_size=self._sparse_size, sort_order=self._sort_order)

    @property
    def _data(self) -> Tensor:
        # What EdgeIndex reads of its list.
        return torch.stack(ends_of(self.graph))

    def sort_by(self, *args: object, **kwargs: object) -> tuple:
        """The list of the edges in another order, as :meth:`torch_geometric.EdgeIndex.sort_by`."""
        out = self.to_edge_index().sort_by(*args, **kwargs)
        return out if out.indices is not None else out._replace(values=self)

    def sparse_resize_(self, *args: object, **kwargs: object) -> 'PreparedGraph':
        """Not possible: a prepared graph has a row for each node."""
        raise TypeError(_WRITES.format('sparse_resize_'))

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return self.graph.num_edges

    @property
    def num_src(self) -> int:
        """The number of source nodes."""
        return self.graph.num_src

    @property
    def num_dst(self) -> int:
        """The number of destination nodes."""
        return self.graph.num_dst

    @property
    def num_bytes(self) -> int:
        """The memory of the graph in bytes."""
        tensors = {id(t): t for t in self._tensors()}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    @property
    def dtype(self) -> torch.dtype:
        """That of the list, int64."""
        return torch.int64

    # Methods of a tensor container ------------------------------------------------------------

    def _tensors(self) -> Iterator[Tensor]:
        return (t for t in pytree.tree_leaves(tuple(self.graph)) if isinstance(t, Tensor))

    def _mapped(self, func: Callable[[Tensor], Tensor]) -> 'PreparedGraph':
        return self._of(self.graph.mapped(func))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """The graph on another device, as :meth:`torch.Tensor.to`; with another dtype the list."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(
            *args, **{k: v for k, v in kwargs.items() if k != 'copy'}
        )
        if dtype not in (None, torch.int64):
            return self.to_edge_index().to(*args, **kwargs)
        out = self if device is None else self._on(device, non_blocking)
        return self.clone() if out is self and kwargs.get('copy') else out

    def _on(self, device: Device, non_blocking: bool = False) -> 'PreparedGraph':
        if torch.empty(0, device=device).device == self.device:
            return self
        out = self.graph.mapped(lambda t: t.to(device, non_blocking=non_blocking))
        return self._of(out.with_default_groups())

    def cpu(self, *args: object, **kwargs: object) -> 'PreparedGraph':
        """The graph in host memory."""
        return self._on('cpu')

    def cuda(
        self, device: Device | None = None, non_blocking: bool = False, **kwargs: object
    ) -> 'PreparedGraph':
        """The graph on a GPU."""
        return self._on('cuda' if device is None else device, non_blocking)

    def clone(self, **kwargs: object) -> 'PreparedGraph':
        """A copy."""
        return self._mapped(Tensor.clone)

    def detach(self) -> 'PreparedGraph':
        """The graph itself: integers have no gradient."""
        return self

    def contiguous(self, **kwargs: object) -> 'PreparedGraph':
        """The graph itself."""
        return self

    def pin_memory(self, *args: object) -> 'PreparedGraph':
        """The graph in pinned memory."""
        return self._mapped(Tensor.pin_memory)

    def is_pinned(self, *args: object) -> bool:
        """Whether the graph is in pinned memory."""
        return all(t.is_pinned() for t in self._tensors() if t.numel() > 0)

    def share_memory_(self) -> 'PreparedGraph':
        """Moves the graph into shared memory."""
        for t in self._tensors():
            t.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the graph is in shared memory."""
        return all(t.is_shared() for t in self._tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keeps the memory until the work of a stream so far is done."""
        for t in self._tensors():
            t.record_stream(stream)

    def __copy__(self) -> 'PreparedGraph':
        return self._of(self.graph)

    def __deepcopy__(self, memo: dict) -> 'PreparedGraph':
        if id(self) not in memo:
            memo[id(self)] = self._mapped(lambda t: copy.deepcopy(t, memo))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: object) -> tuple:
        return PreparedGraph, (self.graph,)

    def __repr__(self) -> str:
        graph = self.graph
        device = f", device='{self.device}'" if self.device.type != 'cpu' else ''
        return (
            f'{type(self).__name__}(num_src={graph.num_src}, num_dst={graph.num_dst}, '
            f'num_edges={graph.num_edges}{device})'
        )

    def __setitem__(self, key: object, value: object) -> None:
        raise TypeError(_WRITES.format('__setitem__'))

    # For torch.compile, which would read the list of an EdgeIndex at every call ------------------

    def __tensor_flatten__(self) -> tuple[list[str], _Context]:
        graph = self.graph
        names = [name for name in _PARTS if getattr(graph, name[1:]) is not None]
        alike = graph.t_rowptr is graph.rowptr and graph.t_col is graph.col
        if alike:
            names = [name for name in names if name not in ('_t_rowptr', '_t_col')]
        return names, (graph.num_src, graph.num_dst, graph.missing, alike)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: _Context, outer_size: object, outer_stride: object
    ) -> 'PreparedGraph':
        num_src, num_dst, missing, alike = context
        if alike:
            inner = {**inner, '_t_rowptr': inner['_rowptr'], '_t_col': inner['_col']}
        graph = Graph(
            inner['_rowptr'], inner['_col'], inner.get('_perm'), inner.get('_t_rowptr'),
            inner.get('_t_col'), inner.get('_t_perm'), num_src, num_dst, missing=missing,
        )  # fmt: skip
        return PreparedGraph._of(graph)

    def _stable_hash_for_caching(self) -> str:
        return cache_key(self)

    @classmethod
    def __metadata_guard__(cls, known: _Context, new: _Context) -> bool:
        return known[2:] == new[2:]

    # The list, for everything that reads it ----------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Iterable[type], args: tuple = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        kwargs = kwargs or {}
        _check_not_written(func, args, kwargs)
        return not_compiled(_on_lists, func, args, kwargs)


def list_of(edge_index: Tensor) -> Tensor:
    """The list of the edges, a plain tensor."""
    if isinstance(edge_index, PreparedGraph):
        # Not `_data`, a property, which compiled code would evaluate at each call for its guards.
        return torch.stack(ends_of(edge_index.graph))
    return edge_index._data if isinstance(edge_index, EdgeIndex) else edge_index


def has_list(edge_index: object) -> bool:
    """Whether it is an :class:`~torch_geometric.EdgeIndex` that holds the list of its edges."""
    return isinstance(edge_index, EdgeIndex) and not isinstance(edge_index, PreparedGraph)


def _on_lists(func: OpOverload, args: tuple, kwargs: dict[str, object]) -> object:
    args, kwargs = pytree.tree_map_only(PreparedGraph, PreparedGraph.to_edge_index, (args, kwargs))
    return func(*args, **kwargs)


def _check_not_written(func: OpOverload, args: tuple, kwargs: dict[str, object]) -> None:
    schema = func._schema
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    for argument in schema.arguments:
        value = kwargs.get(argument.name, named.get(argument.name))
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written and isinstance(value, PreparedGraph):
            raise TypeError(_WRITES.format(func))
    if schema.name == 'aten::cat' and (args[1] if len(args) > 1 else kwargs.get('dim', 0)) == 0:
        raise TypeError(
            'a PreparedGraph cannot be joined with others: make a batch of edge_index, then apply '
            'ToCSR'
        )


torch.serialization.add_safe_globals([
    Graph, PreparedGraph,
    # Their paths in files of version 0.2.
    (Graph, 'pyg_fast.graph.structure.Graph'), (Groups, 'pyg_fast.graph.groups.Groups'),
])  # fmt: skip
