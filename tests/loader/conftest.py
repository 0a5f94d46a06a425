"""What holds for every batch of the loader's tests."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fast.graph._cache import Cache, Promise, cache_of, tensors_of
from pyg_fast.graph.batch_edge_index import edges_of_batch

from ._parts import _core


@pytest.fixture(scope='package', autouse=True)
def streams_know_all_tensors() -> Iterator[None]:
    """Memory that a stream is not told of may be given to others while it reads: what a batch with
    types lists must hold all of its tensors that are not the user's own."""
    build = _core.build_hetero_batch

    def checked(data: Any, *args: Any) -> Any:
        pending = build(data, *args)
        if torch.autograd._profiler_enabled():  # A test counts the ops of a batch.
            return pending
        known = set(map(_memory, [*pending.tensors, *_tensors(data)]))
        assert known.issuperset(map(_memory, _tensors(pending.batch)))
        return pending

    _core.build_hetero_batch = checked
    yield
    _core.build_hetero_batch = build


def _cache_in(edge_index: EdgeIndex) -> Cache:
    """What the cache would hold, which is left to be made late."""
    promise = vars(edge_index).get('_pyg_fast_cache')
    if not isinstance(promise, Promise):
        return cache_of(edge_index)
    same = edges_of_batch(edge_index._data, edge_index._indptr, edge_index.sparse_size())
    promise.give(same)
    assert cache_of(same).entries
    return cache_of(same)


def _tensors(data: Any) -> Iterator[Tensor]:
    for store in data.stores:
        for value in store.values():
            if isinstance(value, EdgeIndex):
                yield from (x for x in (value._data, value._indptr) if x is not None)
                for entry in _cache_in(value).entries.values():
                    yield from tensors_of(entry.value)
            elif isinstance(value, Tensor) and value.layout == torch.strided:
                yield value


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
