"""The memory from which a captured step reads batches."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch_geometric.data import Batch

from ..graph._cache import cache_of
from ..graph.batch_edge_index import DisjointEdgeIndex
from ..loader._edges import EdgeTensors, graph_in
from ..loader._levels import NumReal


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

    _last: str  # A number might become a symbol, behind a graph break.

    @classmethod
    def of(cls, ids: Tensor, last: int) -> 'SizedIds':
        out = ids.as_subclass(cls)
        out._last = str(last)
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
            last = int(args[0]._last)
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
        values = _values_of(batch)
        edge_index = batch._store._mapping.get('edge_index')
        self._edges = _Edges(edge_index) if isinstance(edge_index, DisjointEdgeIndex) else None
        self._names = list(values)
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
        self.write_values(_values_of(batch))

    def write_values(self, values: Mapping[str, object]) -> None:
        """Copies the values of a batch, as :meth:`Collated.values` makes them.

        Raises:
            ValueError: As of :meth:`write`.
        """
        flat = [leaf for key in self._kept for leaf in _leaves_of(values.get(key))]
        if list(values) != self._names or len(flat) != len(self._leaves):
            raise ValueError(
                f"'batch' must have the attributes {self._names}, as the first batch of its size, "
                f'got {list(values)}'
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
        self._longest_row = graph_in(edge_index).longest_row
        self._is_loop_free = cache_of(edge_index).has_loops is False

    def view(self, tensors: EdgeTensors) -> DisjointEdgeIndex:
        return tensors.to_edge_index(self._longest_row, self._is_loop_free)


def _values_of(batch: Batch) -> dict[str, object]:
    """The values of a batch, as :meth:`Collated.values` makes them."""
    values = dict(batch._store._mapping)
    edge_index = values.get('edge_index')
    if isinstance(edge_index, DisjointEdgeIndex):
        values['edge_index'] = EdgeTensors.of(edge_index)
    return values


def _leaves_of(value: object) -> Sequence[object]:
    return (value,) if type(value) is Tensor else tree_leaves(value)


def _are_tensors(value: object) -> bool:
    leaves, _ = tree_flatten(value)
    return bool(leaves) and all(isinstance(leaf, Tensor) for leaf in leaves)
