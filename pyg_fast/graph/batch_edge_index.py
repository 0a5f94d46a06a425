"""The edge_index of a loader's batches."""

from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch_geometric import EdgeIndex
from torch_geometric.edge_index import SortOrder

P = ParamSpec('P')
T = TypeVar('T')
E = TypeVar('E', bound=EdgeIndex)


@torch.compiler.disable
def not_compiled(func: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function that Dynamo would compile by itself after a graph break, and cannot."""
    return func(*args, **kwargs)


class BatchEdgeIndex(EdgeIndex):
    r"""An :class:`~torch_geometric.EdgeIndex`, sorted by destination, of a batch of nodes.

    Code that :func:`torch.compile` makes with :obj:`dynamic=True` for one batch runs for all: a
    size is a guard only where code reads it. Of an :class:`~torch_geometric.EdgeIndex` it always
    is. Its rows are plain tensors: each operation of a :class:`~torch_geometric.Index` runs Python,
    which on small graphs takes longer than the operation.
    """

    @classmethod
    def of(cls, data: Tensor, rowptr: Tensor) -> 'BatchEdgeIndex':
        r"""Of a list of edges.

        Args:
            data (Tensor): The list :math:`(2, |\mathcal{E}|)`, sorted by destination.
            rowptr (Tensor): Row pointers of the destinations :math:`(N + 1)`, int64.
        """
        size = rowptr.size(0) - 1
        return sorted_edges(cls, data, rowptr, (size, size))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: object, outer_size: object, outer_stride: object
    ) -> EdgeIndex:
        if set(inner) != {'_data', '_indptr'}:
            return EdgeIndex.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return cls.of(inner['_data'], inner['_indptr'])

    def __repr__(self) -> str:
        if type(self._data) is not Tensor:  # Compilers log it; a fake tensor has no numbers.
            return f'{type(self).__name__}({list(self.shape)})'
        return super().__repr__()

    def _stable_hash_for_caching(self) -> str:
        return cache_key(self)

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Iterable[type], args: tuple = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        if func in ROWS and (len(args) == 1 or args[1] in (0, -2)):
            return func(args[0]._data, *args[1:], **(kwargs or {}))
        if func is torch.ops.aten.slice.Tensor and type(args[0]._data) is not Tensor:
            # Compiled `trim_to_layer`: Dynamo cannot trace the `sparse_resize_` of an EdgeIndex.
            return func(args[0]._data, *args[1:], **(kwargs or {}))
        out = not_compiled(super().__torch_dispatch__, func, types, args, kwargs)
        if func in _COPIES and type(out) is EdgeIndex and _is_plain(out):
            return cls.of(out._data, out._indptr)
        return out

    @classmethod
    def __metadata_guard__(cls, known: tuple, new: tuple) -> bool:
        return _is_square(known[0]) and _is_square(new[0]) and bool(known[1:] == new[1:])


_make_wrapper = Tensor._make_wrapper_subclass


def wrapper(data: Tensor, cls: type[E]) -> E:
    """An EdgeIndex in front of a list of edges, without the attributes that it needs."""
    return _make_wrapper(cls, data.size(), data.stride(), dtype=data.dtype, device=data.device)


def sorted_edges(cls: type[E], data: Tensor, rowptr: Tensor, size: tuple[int, int]) -> E:
    r"""An :class:`~torch_geometric.EdgeIndex` of edges that are sorted by destination.

    It does not check the list, as the constructor does by cutting it: a batch has one for each edge
    type.

    Args:
        cls (type): The class.
        data (Tensor): The list :math:`(2, |\mathcal{E}|)`, whose rows are contiguous.
        rowptr (Tensor): Row pointers of the destinations :math:`(N + 1)`, int64.
        size ((int, int)): Numbers of sources and destinations.
    """
    out = wrapper(data, cls)
    out._data, out._sparse_size, out._sort_order = data, size, SortOrder.COL
    out._indptr = rowptr
    return out


def edges_of_batch(data: Tensor, rowptr: Tensor, size: tuple[int, int]) -> EdgeIndex:
    r"""As :func:`sorted_edges`; with as many sources as destinations a :class:`BatchEdgeIndex`."""
    cls = BatchEdgeIndex if size[0] == size[1] else EdgeIndex
    return sorted_edges(cls, data, rowptr, size)


class DisjointEdgeIndex(BatchEdgeIndex):
    r"""The edges of a batch of graphs, which PyG's :meth:`batch[i]` cuts into those of one graph: a
    part is a plain tensor, since the size of the batch is not that of a graph."""

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Iterable[type], args: tuple = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        if func is torch.ops.aten.slice.Tensor:
            return func(args[0]._data, *args[1:], **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def cache_key(edge_index: EdgeIndex) -> str:
    """What compiled code depends on, for PyTorch's cache on disk: sizes are symbols there, which
    the key that PyTorch makes by itself cannot hold."""
    names, context = edge_index.__tensor_flatten__()
    parts = [
        (name, str(part.dtype), str(part.device), str(part.shape), str(part.stride()))
        for name in names
        for part in [getattr(edge_index, name)]
    ]
    return str((type(edge_index).__qualname__, str(edge_index.shape), parts, str(context)))


ROWS = {torch.ops.aten.select.int, torch.ops.aten.unbind.int}
_COPIES = {
    torch.ops.aten.clone.default, torch.ops.aten._to_copy.default, torch.ops.aten.alias.default,
    torch.ops.aten._pin_memory.default,
}  # fmt: skip


def _is_plain(out: EdgeIndex) -> bool:
    """Whether row pointers are all that is known of the list."""
    return (
        out._indptr is not None and out._sort_order == SortOrder.COL
        and out._indptr.size(0) - 1 == out._sparse_size[0] == out._sparse_size[1]
        and out._T_perm is None and out._T_indptr is None and out._cat_metadata is None
        and not out._is_undirected
    )  # fmt: skip


def _is_square(size: tuple[int | None, int | None]) -> bool:
    return size[0] is not None and bool(size[0] == size[1])


torch.serialization.add_safe_globals([BatchEdgeIndex, DisjointEdgeIndex])
