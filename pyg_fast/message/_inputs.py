"""Checks the inputs of messages, and replaces self-loops of their graphs."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.utils import add_self_loops

from ..graph._cache import derive, look_up
from ..graph.graph import graph_of
from ..ops._checks import DTYPES
from ..ops._transforms import transforms_active
from ..sparse.graph import Graph
from ..sparse.to_csr import MOST_NODES
from ._fallback import BySize, Fallback


def why_not(device: torch.device) -> str | None:
    """The reason why no kernel may run now, or None if one may."""
    if device.type not in ('cpu', 'cuda'):
        return f'no kernel on {device.type}'
    if transforms_active():
        return 'torch.func or forward-mode AD is active'
    if torch._C._get_tracing_state() is not None:
        return 'torch.jit.trace is active'
    return None


def check_inputs(
    device: torch.device, inputs: Iterable[Tensor], num_edges: int, sizes: tuple[int, int]
) -> None:
    """Checks the inputs of a message.

    Raises:
        Fallback: If no kernel takes one.
    """
    if num_edges < 2:
        raise BySize(f'{num_edges} edges')
    for value in inputs:
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise Fallback(f'an input is a {type(value).__name__}')
        if value.layout != torch.strided:
            raise Fallback(f'an input is {value.layout}')
        if value.device != device:
            raise Fallback(f'an input is on {value.device}, the edges on {device}')
        if value.dtype not in DTYPES and value.is_floating_point():
            raise Fallback(f'an input is {value.dtype}')
    if max(sizes) > MOST_NODES:
        raise BySize(f'{max(sizes)} nodes')


class Looped(NamedTuple):
    """A graph with self-loops, its edges ordered as by
    :func:`~torch_geometric.utils.add_self_loops`."""

    edge_index: Tensor  # without self-loops
    kept: Tensor | None  # the numbers of these edges; None for all
    graph: Graph  # with one self-loop per node


class LoopedRequest(NamedTuple):
    """The edges as :class:`Looped`."""

    num_src: int
    num_dst: int
    transpose: bool
    kind: str = 'looped'


def looped(edge_index: Tensor, num_src: int, num_dst: int, transpose: bool) -> Looped:
    """A graph with its self-loops replaced by one per node. An EdgeIndex caches it."""
    if not isinstance(edge_index, EdgeIndex):
        return _looped(edge_index, num_src, num_dst, transpose)

    def make() -> Looped:
        loops = _looped(edge_index.as_tensor(), num_src, num_dst, transpose)
        return loops._replace(graph=loops.graph.with_default_groups())

    both = None if transpose else look_up(edge_index, LoopedRequest(num_src, num_dst, True))
    if both is not None:
        return both
    return derive(edge_index, LoopedRequest(num_src, num_dst, transpose), make, wait=True)


def _looped(edge_index: Tensor, num_src: int, num_dst: int, transpose: bool) -> Looped:
    kept = (edge_index[0] != edge_index[1]).nonzero().view(-1)
    is_simple = kept.size(0) == edge_index.size(1)
    if not is_simple:
        edge_index = edge_index.index_select(1, kept)
    both, _ = add_self_loops(edge_index, num_nodes=min(num_src, num_dst))
    graph = graph_of(both, num_src, num_dst, transpose=transpose)
    return Looped(edge_index, None if is_simple else kept, graph)
