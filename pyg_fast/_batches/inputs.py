"""The memory from which a captured step reads batches."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch

from ..graph._cache import cache_of
from ..graph.batch_edge_index import DisjointEdgeIndex
from ..graph.graph import graph_of, keep_graph
from ..loader._levels import NumReal
from ..sparse.graph import Graph


def num_real_of(batch: object) -> NumReal | None:
    """What a loader that pads tells of a batch."""
    store = getattr(batch, '_store', None)
    return None if store is None else store.__dict__.get('_num_real')


class Known(int):
    """A number that has what is asked of a tensor with one."""

    def item(self) -> int:
        return int(self)

    def __add__(self, other: int) -> 'Known':
        return Known(int(self) + other)


class SizedIds(Tensor):
    """The graph of each row, or the first row of each graph, which knows its last and largest
    value: most layers ask for it, and would wait for a GPU."""

    _last: int

    @classmethod
    def of(cls, ids: Tensor, last: int) -> 'SizedIds':
        out = ids.as_subclass(cls)
        out._last = last
        return out

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:  # fmt: skip
        asks = func in _LARGEST and len(args) == 1 and not kwargs
        if func is Tensor.__getitem__ and type(args[1]) is int and args[1] == -1:
            asks = True
        if asks and isinstance(args[0], SizedIds):
            last = args[0]._last
            if not torch.compiler.is_compiling():
                return torch.tensor(last)
            return Known(last) if _TRACES_SUBCLASSES else last
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


# Dynamo of torch 2.11 makes no object of a subclass of int.
_TRACES_SUBCLASSES = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 12)
_LARGEST = (Tensor.max, torch.max, Tensor.amax, torch.amax)


class StaticBatch:
    """Tensors of their own with the content of a padded batch.

    A batch that is written later must have the same sizes. Strings and other objects are left out.

    Args:
        batch: The batch of which they have the sizes.
    """

    def __init__(self, batch: Batch) -> None:
        self._names = list(batch._store._mapping)
        edge_index = batch._store._mapping.get('edge_index')
        self._edges = _Edges(edge_index) if isinstance(edge_index, DisjointEdgeIndex) else None
        values = dict(batch._store._mapping)
        if isinstance(edge_index, DisjointEdgeIndex):
            values['edge_index'] = _tensors_of(edge_index)
        kept = {key: v for key, v in values.items() if key == 'num_nodes' or _are_tensors(v)}
        self._kept = list(kept)
        flat, self._spec = tree_flatten(kept)
        # Numbers are sizes, which do not change.
        self._leaves = [t.clone() if isinstance(t, Tensor) else t for t in flat]
        template = copy.copy(batch)
        template._store._mapping.clear()
        for name in ('_slice_dict', '_inc_dict', '_num_real'):  # of a batch
            template._store.__dict__.pop(name, None)
        self._template = template

    def write(self, batch: Batch) -> None:
        """Copies the content of a batch.

        Raises:
            ValueError: If the batch does not have the attributes and sizes of the first one.
        """
        flat = [leaf for key in self._kept for leaf in _leaves_of(batch, key)]
        if list(batch._store._mapping) != self._names or len(flat) != len(self._leaves):
            raise ValueError(
                f"'batch' must have the attributes {self._names}, as the first batch of its size, "
                f'got {list(batch._store._mapping)}'
            )
        pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for old, new in zip(self._leaves, flat, strict=True):
            if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
                continue
            if (old.shape, old.dtype, old.device) != (new.shape, new.dtype, new.device):
                raise ValueError(
                    "'batch' must have tensors as the first batch of its size, "
                    f'{old.dtype} of shape {list(old.shape)} on {old.device}, got {new.dtype} of '
                    f'shape {list(new.shape)} on {new.device}'
                )
            olds, news = pairs.setdefault(old.dtype, ([], []))
            olds.append(old)
            news.append(new)
        with torch.no_grad():
            for olds, news in pairs.values():
                torch._foreach_copy_(olds, news)

    def view(self, sized: bool = True) -> Batch:
        """A new batch that reads these tensors. Nothing is known of its edges but what all batches
        have in common, so that a replay computes again what a model derives from them. In a
        capture prepared graphs keep nothing: make it before, on the same stream.

        Args:
            sized: Whether `batch` and `ptr` know their sizes.
        """
        out = copy.copy(self._template)
        values = tree_unflatten(self._leaves, self._spec)
        if self._edges is not None:
            values['edge_index'] = self._edges.view(values['edge_index'])
        mapping = out._store._mapping
        mapping.update((name, values[name]) for name in self._names if name in values)
        if not sized:
            return out
        mapping['ptr'] = SizedIds.of(mapping['ptr'], mapping['batch'].size(0))
        mapping['batch'] = SizedIds.of(mapping['batch'], mapping['graph_mask'].size(0) - 1)
        return out


class _Edges:
    """What the edges of all batches of a size have in common."""

    def __init__(self, edge_index: DisjointEdgeIndex) -> None:
        self._num_nodes = edge_index.sparse_size(0)
        self._longest_row = _graph_in(edge_index).longest_row
        self._is_loop_free = cache_of(edge_index).has_loops is False

    def view(self, tensors: list[Tensor]) -> DisjointEdgeIndex:
        data, long_rowptr, rowptr, col, t_rowptr, t_col, t_perm = tensors
        size = self._num_nodes
        graph = Graph(
            rowptr, col, None, t_rowptr, t_col, t_perm, size, size,
            longest_row=self._longest_row,
        )  # fmt: skip
        out = DisjointEdgeIndex.of(data, long_rowptr)
        keep_graph(out, graph, self._is_loop_free)
        return out


def _leaves_of(batch: Batch, key: str) -> Sequence[object]:
    value = batch._store._mapping.get(key)
    if type(value) is Tensor:
        return (value,)
    return _tensors_of(value) if isinstance(value, DisjointEdgeIndex) else tree_leaves(value)


def _graph_in(edge_index: EdgeIndex) -> Graph:
    """The structure that the loader kept."""
    size = edge_index.sparse_size(0)
    return graph_of(edge_index, size, size)


def _tensors_of(edge_index: DisjointEdgeIndex) -> list[Tensor]:
    graph = _graph_in(edge_index)
    parts = [
        edge_index.as_tensor(), edge_index._indptr, graph.rowptr, graph.col, graph.t_rowptr,
        graph.t_col, graph.t_perm,
    ]  # fmt: skip
    return [part for part in parts if part is not None]


def _are_tensors(value: object) -> bool:
    leaves, _ = tree_flatten(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
