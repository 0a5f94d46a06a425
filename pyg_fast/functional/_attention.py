"""Shared by GAT and GATv2: the checks of their arguments."""

from torch import Tensor

from ..graph.graph import graph_of
from ..ops._attention import AttentionArgs, drawn_seed
from ..ops._checks import DTYPES, check_device, check_strided
from ..ops._numbers import check_flag
from ..sparse.graph import Graph, check_graph
from ._arguments import check_seed


def attention_args(
    graph: Graph | Tensor,
    x: Tensor,
    num_dst: int,
    negative_slope: float,
    dropout: float,
    add_self_loops: bool,
    seed: Tensor | None,
    transpose: bool,
) -> AttentionArgs:
    """Checks the arguments."""
    for name, number in (('negative_slope', negative_slope), ('dropout', dropout)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise TypeError(f"'{name}' must be a number, got {type(number).__name__}")
    check_flag('add_self_loops', add_self_loops)
    if not 0 <= dropout <= 1:
        raise ValueError(f"'dropout' must be from 0 to 1, got {dropout}")
    if seed is not None:
        check_seed(seed, x)
    if isinstance(graph, Graph):
        check_graph(graph, values=True)
        if add_self_loops:
            raise ValueError("'add_self_loops' must be False for a Graph, got True")
        check_device(graph.col, x, 'graph')
        if (graph.num_src, graph.num_dst) != (x.size(0), num_dst):
            raise ValueError(
                f"'graph' has {graph.num_src} source and {graph.num_dst} destination nodes, but "
                f'there are features of {x.size(0)} and {num_dst}'
            )
    elif isinstance(graph, Tensor):
        check_device(graph, x, 'graph')
        graph = graph_of(graph, x.size(0), num_dst, transpose=transpose, drop_loops=add_self_loops)
    else:
        raise TypeError(f"'graph' must be a tensor or Graph, got {type(graph).__name__}")
    num_loops = min(x.size(0), num_dst) if add_self_loops else 0
    return AttentionArgs(
        graph, num_loops, float(negative_slope), float(dropout), drawn_seed(seed, dropout, x), False
    )


def check_heads(x: Tensor, name: str, shape: tuple[int | None, ...] = (None, None, None)) -> None:
    """Raises unless :obj:`x` is a strided floating-point tensor of that shape."""
    check_strided(x, name)
    if x.dtype not in DTYPES:
        raise TypeError(f"'{name}' must be one of {DTYPES}, got {x.dtype}")
    fits = x.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, x.shape, strict=True)
    )
    if not fits:
        names = ('num_nodes', 'heads', 'channels')
        wanted = ', '.join(str(names[k] if want is None else want) for k, want in enumerate(shape))
        raise ValueError(f"'{name}' must have shape [{wanted}], got {list(x.shape)}")
