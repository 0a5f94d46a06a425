"""Signatures of edges and masks, which change with any of their numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..sparse.graph import CHUNK, edge_chunks
from ._cache import cache_of
from .prepared_graph import PreparedGraph, list_of


def hash_of(values: Tensor) -> Tensor:
    # Any change of one number changes the sum; int64 wraps around.
    mixed = (values ^ (values >> 31)) * -7046029254386353131
    return ((mixed ^ (mixed >> 29)) * -4417276706812531889).sum()


def signature_of(edge_index: Tensor) -> tuple[int, ...]:
    """A signature of the edges: their number, set and order.

    A prepared graph caches it; for a plain edge_index it is computed at every call.
    """
    if not isinstance(edge_index, EdgeIndex):
        return _signature(edge_index)
    cache = cache_of(edge_index)
    if cache.signature is None:
        cache.signature = _signature(edge_index)
    return cache.signature


def _signature(edge_index: Tensor) -> tuple[int, ...]:
    # In chunks: the edges of the largest graphs leave no room for int64 copies.
    num_edges, device = edge_index.size(1), edge_index.device
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for at, src, dst, position in _listed(edge_index):
        edge = src.long() * 3141592653589793239 + dst.long() * 2718281828459045235
        if position is None:
            position = torch.arange(at.start, at.stop, device=device)
        order = position * 1618033988749894849
        total += torch.stack([hash_of(edge), hash_of(edge ^ order)])
    return num_edges, *total.tolist()


def _listed(edge_index: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Chunks of the edges: which ones, their sources, destinations, and positions in the list if
    these are others."""
    if isinstance(edge_index, PreparedGraph):
        graph = edge_index.graph
        if graph.is_in_order_of_transpose:
            yield from ((at, dst, src, None) for at, src, dst in edge_chunks(graph.t()))
            return
        for at, src, dst in edge_chunks(graph):
            yield at, src, dst, None if graph.perm is None else graph.perm[at].long()
        return
    data = list_of(edge_index)
    for begin in range(0, data.size(1), CHUNK):
        at = slice(begin, min(begin + CHUNK, data.size(1)))
        yield at, data[0, at], data[1, at], None
