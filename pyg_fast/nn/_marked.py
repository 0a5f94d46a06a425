"""The messages of a layer while :func:`torch.compile` traces it: PyG's code with marks where it
gathers and aggregates, see :mod:`~pyg_fast.message._markers`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch_geometric import EdgeIndex
from torch_geometric.inspector import Signature
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import Adj, Size
from torch_geometric.utils import degree

from ..graph.graph import graph_of
from ..graph.prepared_graph import list_of
from ..message import _markers
from ..sparse.graph import Graph
from ._reduce import combined

# Arguments that are numbers of nodes, of one end of each edge or of both.
INDICES = ('index', 'edge_index', 'edge_index_i', 'edge_index_j')


class Arguments(NamedTuple):
    """The arguments of the `message`, `aggregate` and `update` of a layer."""

    # Of `message`, of `aggregate` if it is captured and of `update`; and the flow.
    signatures: tuple[Signature, Signature | None, Signature, str]
    refused: str | None
    other: dict[str, None]  # placeholders, which neither reads
    structure: tuple[str, ...]  # for a softmax, gathers, or an aggregation; perhaps the flow
    ends: tuple[tuple[tuple[str, str], str, int, object], ...]  # key, name, dimension, default
    rest: tuple[tuple[str, object], ...]
    update: tuple[tuple[str, object], ...]
    # Of a captured `aggregate`: the arguments that may have a row for each destination, and the
    # names of those of `message` and of `aggregate`.
    rows: tuple[tuple[str, object], ...] = ()
    of_message: tuple[str, ...] = ()
    of_aggregate: tuple[str, ...] = ()
    gathers: bool = False  # whether message or aggregate may gather by numbers of nodes
    reads_sources: bool = False  # whether it reads those of sources


class Marks(NamedTuple):
    """What a layer's `propagate` reads, found before :func:`torch.compile` traces it."""

    flow: str
    arguments: Arguments
    aggr: type
    reduces: tuple[str, ...]  # of each part of the aggregation
    captures: bool = False  # whether the layer's own `aggregate` is captured, too
    in_export: bool = False  # whether exported programs have the marks, too


def propagate(
    conv: MessagePassing, marks: Marks, edge_index: Tensor, size: Size, kwargs: dict[str, object]
) -> Any:
    """What `aggregate` returns with marks, or None where PyG's code must run."""
    aggr = conv.aggr_module
    if (
        not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided
        or edge_index.dim() != 2 or conv.flow != marks.flow or conv.explain
        or type(aggr) is not marks.aggr or conv.node_dim > 0
    ):  # fmt: skip
        return None
    i, j = (1, 0) if conv.flow == 'source_to_target' else (0, 1)
    edges = list_of(edge_index)
    index = edges[0], edges[1]
    sizes = [None, None] if size is None else list(size)
    arguments = marks.arguments
    given = _marked_arguments(conv, arguments, kwargs, index, sizes, i)
    if given is None:
        return None
    num_dst = sizes[i] if sizes[i] is not None else sizes[j]
    num_src = sizes[j] if sizes[j] is not None else sizes[i]
    assert num_src is not None
    assert num_dst is not None
    given |= _structure(arguments, edges, index, i, num_dst)
    reads_sources = arguments.reads_sources or any(
        role == 'src' and isinstance(given[name], Tensor) for (role, name), *_ in arguments.ends
    )
    if not reads_sources:
        edge_index, num_src = without_sources(edge_index, conv.flow), num_dst
    graph = _graph(edge_index, i == 1, num_src, num_dst)
    csr = [graph.rowptr, graph.col]
    if graph.t_rowptr is not None and graph.t_col is not None:
        csr += [graph.t_rowptr, graph.t_col]
    if marks.captures:
        if any(
            kwargs.get(name, default) is inspect.Parameter.empty
            for name, default in arguments.rows
        ):  # fmt: skip
            return None
        out = _aggregate(conv, arguments, kwargs, index[i], num_dst, given)
        return _marked_results(out, index[i], num_src, num_dst, csr, graph)
    message = conv.message(**given)
    if not isinstance(message, Tensor) or (dim := _dim_of(message, conv.node_dim)) < 0:
        return None  # PyG raises an error.
    outs = [
        _markers.aggregate(
            message, index[i], num_src, num_dst, reduce, csr, graph.perm, graph.t_perm, dim
        ) for reduce in marks.reduces
    ]  # fmt: skip
    return combined(aggr, outs, conv.node_dim, lambda: degree(index[i], num_dst, torch.long))


def marked_sum(
    message: Callable[..., Tensor], edge_index: Tensor, reverse: bool, x_j: Tensor, x_i: Tensor,
    edge_attr: Tensor,
) -> Tensor:  # fmt: skip
    """The sum of a layer's `message(x_i, x_j, edge_attr, index, size_i)` with marks, from rows of
    sources, of destinations and of edges."""
    edges, (num_src, num_dst) = list_of(edge_index), (x_j.size(0), x_i.size(0))
    source, index = (edges[1], edges[0]) if reverse else (edges[0], edges[1])
    out = message(
        _markers.gather(x_i, index, 'dst', 'x_i'), _markers.gather(x_j, source, 'src', 'x_j'),
        _markers.edge(edge_attr, index, 'edge_attr'), index, num_dst,
    )  # fmt: skip
    graph = _graph(edge_index, not reverse, num_src, num_dst)
    csr = [graph.rowptr, graph.col]
    if graph.t_rowptr is not None and graph.t_col is not None:
        csr += [graph.t_rowptr, graph.t_col]
    return _markers.aggregate(out, index, num_src, num_dst, 'sum', csr, graph.perm, graph.t_perm)


def _marked_results(
    out: Any, index: Tensor, num_src: int, num_dst: int, csr: list[Tensor], graph: Graph
) -> Any:
    """What an `aggregate` returned, each of its tensors with a mark."""
    parts = [out]
    if type(out) in (tuple, list, dict):
        parts = list(out.values() if type(out) is dict else out)
    if not all(isinstance(x, Tensor) for x in parts):
        return out
    results = [
        _markers.rows(x, index, num_src, num_dst, str(k), csr, graph.perm, graph.t_perm, parts)
        for k, x in enumerate(parts)
    ]
    if type(out) is dict:
        return dict(zip(out, results, strict=True))
    return type(out)(results) if type(out) in (tuple, list) else results[0]


def _structure(
    arguments: Arguments, edges: Tensor, ends: tuple[Tensor, Tensor], target: int, num_dst: int
) -> dict[str, object]:
    """The arguments of the graph that the message takes."""
    index = ends[target]
    found: dict[str, object] = {
        'index': index, 'edge_index_i': index, 'size_i': num_dst, 'dim_size': num_dst,
    }  # fmt: skip
    if arguments.reads_sources:
        found['edge_index_j'] = _markers.sources(ends[1 - target], index)
        found['edge_index'] = _markers.ends(edges, index, target == 0)
    return {name: found[name] for name in arguments.structure if name in found}


def _marked_arguments(
    conv: MessagePassing, arguments: Arguments, kwargs: dict[str, object],
    index: tuple[Tensor, Tensor], sizes: list[int | None], target: int,
) -> dict[str, object] | None:  # fmt: skip
    """The arguments of the message, values of nodes and edges with marks; None where PyG's code
    must run. Notes the numbers of nodes in :obj:`sizes`."""
    given: dict[str, object] = dict(arguments.other)
    for (role, argument), name, dim, default in arguments.ends:
        value = kwargs.get(name, default)
        if isinstance(value, (tuple, list)):
            if len(value) != 2:
                return None
            for k in (0, 1):
                if isinstance(value[k], Tensor):
                    conv._set_size(sizes, k, value[k])
            value = value[0 if role == 'src' else 1]
        if isinstance(value, Tensor):
            along = _dim_of(value, conv.node_dim)
            if along < 0 or (along > 0 and arguments.signatures[1] is not None):
                return None  # PyG raises an error; or a batch of a layer's own `aggregate`.
            conv._set_size(sizes, dim, value)
            value = _markers.gather(value, index[dim], role, argument, along)
        elif value is inspect.Parameter.empty:
            return None
        given[argument] = value
    if sizes == [None, None] or (arguments.reads_sources and sizes[1 - target] is None):
        return None
    num_dst = sizes[target] if sizes[target] is not None else sizes[1 - target]
    assert num_dst is not None
    for name, default in arguments.rest:
        value = kwargs.get(name, default)
        if value is inspect.Parameter.empty:
            return None
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            value = type(value)([_marked_edge(part, index[target], name) for part in value])
        elif isinstance(value, Tensor) and _has_rows(value, index[target].size(0)):
            value = _markers.edge(value, index[target], name)
        elif arguments.gathers and isinstance(value, Tensor) and _has_rows(value, num_dst):
            value = _markers.node(value, index[target], name)
        given[name] = value
    return given


def _dim_of(value: Tensor, node_dim: int) -> int:
    """The dimension of nodes or edges, counted from the first one; negative if there is none."""
    return node_dim + value.dim() if node_dim < 0 else node_dim


def _marked_edge(value: object, index: Tensor, name: str) -> object:
    """A value with a mark if it is one of edges."""
    if isinstance(value, Tensor) and _has_rows(value, index.size(0)):
        return _markers.edge(value, index, name)
    return value


def _aggregate(
    conv: MessagePassing, arguments: Arguments, kwargs: dict[str, object], index: Tensor,
    num_dst: int, given: dict[str, object],
) -> Any:  # fmt: skip
    """What the layer's own `aggregate` returns. Adds its arguments to those of the message."""
    for name, default in arguments.rows:
        value = kwargs.get(name, default)
        if isinstance(value, Tensor) and not _has_rows(value, index.size(0)):
            value = _markers.node(value, index, name) if _has_rows(value, num_dst) else value
        given[name] = _marked_edge(value, index, name)
    message = conv.message(**{name: given[name] for name in arguments.of_message})
    return conv.aggregate(message, **{name: given[name] for name in arguments.of_aggregate})


def _has_rows(value: Tensor, count: int) -> bool:
    return value.dim() > 0 and guard_or_false(value.size(0) == count)


def without_sources(edge_index: Tensor, flow: str) -> Tensor:
    """The edges of a message that reads no source: from each destination to itself. PyG accepts
    any numbers of sources there."""
    return list_of(edge_index)[int(flow == 'source_to_target')].expand(2, -1)


def _graph(edge_index: Adj, sorts: bool, num_src: int, num_dst: int) -> Graph:
    """The graph of the message, with the destinations in rows."""
    if isinstance(edge_index, EdgeIndex):  # What it has prepared are inputs of the compiled graph.
        if sorts:
            return graph_of(edge_index, num_src, num_dst)
        return graph_of(edge_index, num_dst, num_src).t()
    if sorts:
        rowptr, col, perm, t_rowptr, t_col, t_perm, _ = _markers.csr(edge_index, num_src, num_dst)
    else:
        t_rowptr, t_col, t_perm, rowptr, col, perm, _ = _markers.csr(edge_index, num_dst, num_src)
    return Graph(rowptr, col, perm, t_rowptr, t_col, t_perm, num_src, num_dst)
