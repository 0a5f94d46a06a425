"""Checks shared by several ops: graphs, features, edge weights."""

import torch
from torch import Tensor

from ..graph.graph import graph_of
from ..graph.structure import Graph, check_graph

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


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


def check_features(x: Tensor, name: str) -> None:
    """Raises unless :obj:`x` is a matrix of a supported floating-point type."""
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"'{name}' must be a strided tensor, got {x.layout}")
    if x.dtype not in DTYPES:
        raise TypeError(f"'{name}' must be one of {DTYPES}, got {x.dtype}")
    if x.dim() != 2:
        raise ValueError(f"'{name}' must have shape [num_nodes, channels], got {list(x.shape)}")


def check_device(tensor: Tensor, x: Tensor, name: str, of: str = 'x') -> None:
    """Raises unless :obj:`tensor` is on the device of the features."""
    if tensor.device != x.device:
        raise ValueError(f"'{name}' is on {tensor.device}, but '{of}' is on {x.device}")


def check_edge_weight(edge_weight: Tensor, x: Tensor, num_edges: int, of: str = 'x') -> None:
    """Raises unless there is one weight per edge, of the features' dtype and device."""
    if not isinstance(edge_weight, Tensor):
        raise TypeError(f"'edge_weight' must be a tensor, got {type(edge_weight).__name__}")
    if edge_weight.layout != torch.strided:
        raise TypeError(f"'edge_weight' must be a strided tensor, got {edge_weight.layout}")
    if edge_weight.dtype != x.dtype:
        raise TypeError(f"'edge_weight' must be {x.dtype} as '{of}' is, got {edge_weight.dtype}")
    if edge_weight.dim() != 1 or edge_weight.size(0) != num_edges:
        raise ValueError(
            f"'edge_weight' must have shape [{num_edges}], got {list(edge_weight.shape)}"
        )
    check_device(edge_weight, x, 'edge_weight', of)
