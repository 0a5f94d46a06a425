"""Checks of arguments that several functions have: graphs and seeds."""

import torch
from torch import Tensor

from ..graph.graph import graph_of
from ..ops._checks import check_device, check_strided
from ..sparse.graph import Graph, check_graph


def checked_graph(
    graph: Graph | Tensor, x: Tensor, name: str, transpose: bool, values: bool = True
) -> Graph:
    """The graph for the rows of :obj:`x`, named :obj:`name`; with its transpose and, for
    :obj:`values` of edges, their positions on request."""
    if not isinstance(graph, Graph):
        if not isinstance(graph, Tensor):
            raise TypeError(f"'graph' must be a tensor or Graph, got {type(graph).__name__}")
        check_device(graph, x, 'graph', name)
        num_src, num_dst = getattr(graph, '_sparse_size', (None, None))
        num_src = x.size(0) if num_src is None else num_src
        graph = graph_of(
            graph, num_src, num_src if num_dst is None else num_dst, transpose=transpose,
            values=values,
        )  # fmt: skip
    else:
        check_graph(graph, values)
    check_device(graph.col, x, 'graph', name)
    if x.size(0) != graph.num_src:
        raise ValueError(
            f"'{name}' must have one row for each of the {graph.num_src} source nodes, got "
            f'{list(x.shape)}'
        )
    return graph


def check_seed(seed: Tensor, x: Tensor) -> None:
    """Raises unless :obj:`seed` is an int64 tensor of one number on the device of the features."""
    if not isinstance(seed, Tensor) or seed.dtype != torch.int64:
        got = seed.dtype if isinstance(seed, Tensor) else type(seed).__name__
        raise TypeError(f"'seed' must be an int64 tensor, got {got}")
    check_strided(seed, 'seed')
    if seed.shape != (1,):
        raise ValueError(f"'seed' must have shape [1], got {list(seed.shape)}")
    check_device(seed, x, 'seed')
