"""An EdgeIndex whose operations take little time beside those of its list."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric import EdgeIndex
from torch_geometric.edge_index import HANDLED_FUNCTIONS, CatMetadata

from ._cache import forget
from .batch_edge_index import ROWS, wrapper

# A user may tell graphs apart by their ids: that of a view must live as long as its EdgeIndex.
_views = WeakTensorKeyDictionary()


class ReadableEdgeIndex(EdgeIndex):
    r"""The :class:`~torch_geometric.EdgeIndex` that a layer's :meth:`forward` reads.

    Its rows are plain tensors: each operation of a :class:`~torch_geometric.Index` runs Python,
    which on small graphs takes longer than the operation. What else an
    :class:`~torch_geometric.EdgeIndex` returns stays, with rows of this kind.
    """

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: Iterable[type], args: tuple = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:  # fmt: skip
        if func in ROWS and (len(args) == 1 or args[1] in (0, -2)):
            return func(args[0]._data, *args[1:], **(kwargs or {}))
        if func._schema.is_mutable:
            # A write is noticed by the version of what was written, and this is the layer's own.
            for value in args:
                if isinstance(value, EdgeIndex):
                    forget(value)
        if func is torch.ops.aten.cat.default and _joins_edges(*args):
            return _joined(args[0])
        if func in HANDLED_FUNCTIONS:
            out = HANDLED_FUNCTIONS[func](*args, **(kwargs or {}))
            if type(out) is EdgeIndex:
                out.__class__ = cls
            return out
        if kwargs or any(isinstance(value, (tuple, list)) for value in args):
            args, kwargs = pytree.tree_map_only(EdgeIndex, _list_of, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))
        return func(*[_list_of(x) if isinstance(x, EdgeIndex) else x for x in args])

    def __reduce_ex__(self, protocol: object) -> tuple:
        return _view(self, EdgeIndex).__reduce_ex__(protocol)


def readable(edge_index: EdgeIndex) -> EdgeIndex:
    """The same edges as a :class:`ReadableEdgeIndex`, which shares all that is known of them: what
    is found out or changed of the one holds for the other."""
    # Caches know an EdgeIndex by its version: that of a new one is 0.
    if edge_index.is_inference() or edge_index._version != 0:
        return edge_index
    known = _views.get(edge_index)
    if known is None or known._data is not edge_index._data or known._version != 0:
        with torch.inference_mode(False):
            known = _views[edge_index] = _view(edge_index, ReadableEdgeIndex)
    return known


def _view(edge_index: EdgeIndex, cls: type[EdgeIndex]) -> EdgeIndex:
    out = wrapper(edge_index._data, cls)
    out.__dict__ = edge_index.__dict__
    return out


def _joins_edges(parts: Sequence[Tensor], dim: int = 0) -> bool:
    return dim in (1, -1) and all(isinstance(part, EdgeIndex) for part in parts)


def _joined(parts: Sequence[EdgeIndex]) -> EdgeIndex:
    """As PyG's, whose Python takes longer than to join the lists: self-loops are added so."""
    data = torch.cat([part._data for part in parts], dim=1)
    out = wrapper(data, ReadableEdgeIndex)
    sizes = [part._sparse_size for part in parts]
    rows, cols = (None if None in each else max(each) for each in zip(*sizes, strict=True))
    undirected = [part._is_undirected for part in parts]
    out._data, out._sparse_size, out._is_undirected = data, (rows, cols), all(undirected)
    orders = [part._sort_order for part in parts]
    out._cat_metadata = CatMetadata([part.size(1) for part in parts], sizes, orders, undirected)
    return out


def _list_of(edge_index: EdgeIndex) -> Tensor:
    return edge_index._data
