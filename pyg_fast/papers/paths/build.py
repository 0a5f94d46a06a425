"""Execution paths of a graph and a mask."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..._progress import LARGE, progress
from ...graph.graph import graph_of, has_loops
from ...graph.prepared_graph import PreparedGraph, list_of
from ...graph.signature import signature_of
from ...ops._edges import check_edge_index
from ...ops._numbers import check_number
from ...sparse.graph import CHUNK, Graph, loop_counts, usual_group_size
from ...sparse.to_csr import csr_rows, to_csr, transpose_csr
from .execution_path import ExecutionPath, check_mask, mask_signature_of

# Groups of this size are the fastest up to this number of edges per row: on an H200 on all paths of
# benchmarks/paths.py.
_SHORT_ROWS, _GROUP_SIZE = 16, 32

# A path with this share of the edges (with `forward`: of the nodes) stores no copy of them; nor are
# sources gathered if they are this share of the nodes.
WHOLE = 0.7


@torch.inference_mode(False)  # A later training step may use them.
@torch.no_grad()
def execution_paths(
    edge_index: Tensor,
    mask: Tensor,
    num_layers: int,
    weighted: bool = False,
    forward: bool = False,
    checks: bool = True,
    strict: bool = False,
    debug: bool = False,
    keep_graph: bool = True,
) -> list[ExecutionPath]:
    r"""Prepares an execution path for each layer of a model that trains on some nodes.

    Args:
        edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`, on
            the device of the paths.
        mask (Tensor): The training nodes :math:`(N)`, bool.
        num_layers (int): Number of layers :math:`L`.
        weighted (bool): Whether edges have weights. (default: :obj:`False`)
        forward (bool): Whether layers compute only the active rows in training.
            (default: :obj:`False`)
        checks (bool): Whether gradients outside of a path are counted and raise an error.
            (default: :obj:`True`)
        strict (bool): Whether they raise it at once; each backward pass then waits for the
            device. (default: :obj:`False`)
        debug (bool): Whether rows that are not computed are NaN instead of zero, which shows
            wherever they are read; gradients are not checked then. (default: :obj:`False`)
        keep_graph (bool): Whether the graph stays beside the paths. Otherwise every path holds its
            edges, also most of them, and the degrees of all nodes; needs :obj:`forward`, and no
            weights. (default: :obj:`True`)

    Returns:
        list[ExecutionPath]: A path for each layer, first to last.

    Raises:
        TypeError: If :obj:`mask` is not a bool tensor.
        ValueError: If it is empty, on another device or has not one entry per node, or
            :obj:`num_layers` is below one, or paths cannot stand without the graph.
        IndexError: If the graph holds a node that :obj:`mask` does not have.
    """
    _check_options(num_layers, weighted, forward, keep_graph)
    _check_graph(edge_index, mask)
    num_nodes = mask.size(0)
    graph = graph_of(edge_index, num_nodes, num_nodes, drop_loops=True, wait=True, values=weighted)
    num_edges, signature = int(graph.rowptr[-1]), signature_of(edge_index)
    loops, mask_signature = _loops(edge_index, num_nodes), mask_signature_of(mask)
    degree = graph.rowptr.diff()

    paths: list[ExecutionPath] = []
    # If a layer needs most edges, so do all layers before it.
    active, whole = mask, False
    for layer in progress(range(num_layers)[::-1], 'execution paths', shown=num_edges >= LARGE):
        nodes = active.nonzero().view(-1)
        counts = degree[nodes].long()
        total = int(counts.sum())
        # A pass over all edges loses little if most are needed; rows of all nodes cost much more,
        # in linear maps and elsewhere.
        most = nodes.numel() >= WHOLE * num_nodes if forward else total >= WHOLE * num_edges
        whole = keep_graph and (whole or most)
        sources = _sources(graph, active, nodes, counts)
        path = ExecutionPath(
            layer=layer, num_layers=num_layers, num_nodes=num_nodes, num_edges=num_edges,
            num_src=int(sources.sum()), num_dst=nodes.numel(), num_path_edges=total,
            graph_signature=signature, mask_signature=mask_signature, forward=forward,
            checks=checks, strict=strict, debug=debug, loops=loops,
            degree=None if keep_graph else degree.int(), dst_position=_positions(nodes, num_nodes),
            counter=torch.zeros(1, dtype=torch.int64, device=mask.device),
        )  # fmt: skip
        if not whole:
            _add_rows(path, nodes, sources)
            _add_edges(path, graph, nodes, counts, weighted)
        paths.append(path)
        active = sources
    paths.reverse()
    _join(paths)
    return paths


def _check_options(num_layers: int, weighted: bool, forward: bool, keep_graph: bool) -> None:
    check_number('num_layers', num_layers, 1)
    if not keep_graph and not forward:
        raise ValueError(
            "'keep_graph' must be True with forward=False, whose forward pass computes all rows"
        )
    if not keep_graph and weighted:
        raise ValueError(
            "'keep_graph' must be True for a graph with edge weights, which layers normalise "
            'over all edges'
        )


def _check_graph(edge_index: Tensor, mask: Tensor) -> None:
    check_edge_index(edge_index)
    size = getattr(edge_index, '_sparse_size', (None, None))
    check_mask(mask, size[0] if size[0] is not None else size[1])
    if mask.device != edge_index.device:
        raise ValueError(f"'mask' is on {mask.device}, but 'edge_index' is on {edge_index.device}")


def _loops(edge_index: Tensor, num_nodes: int) -> Tensor | None:
    if isinstance(edge_index, PreparedGraph):
        return loop_counts(edge_index.graph) if has_loops(edge_index) else None
    data = list_of(edge_index)
    loops = data[0][data[0] == data[1]].long()
    return torch.bincount(loops, minlength=num_nodes) if loops.numel() else None


def _sources(graph: Graph, active: Tensor, nodes: Tensor, counts: Tensor) -> Tensor:
    """A mask of the active nodes and of the sources of their edges."""
    if nodes.numel() == active.numel():
        return active
    sources = active.clone()
    for picked in _picked(graph, nodes, counts):
        sources[graph.col[picked].long()] = True
    return sources


def _positions(nodes: Tensor, num_nodes: int) -> Tensor:
    position = torch.full((num_nodes,), -1, dtype=torch.int32, device=nodes.device)
    position[nodes] = torch.arange(nodes.numel(), dtype=torch.int32, device=nodes.device)
    return position


def _picked(graph: Graph, nodes: Tensor, counts: Tensor) -> Iterator[Tensor]:
    """The positions of the edges of some rows, in chunks."""
    ends = pad(counts.cumsum(0), (1, 0))
    shift = graph.rowptr[nodes].long() - ends[:-1]
    total = int(ends[-1])
    for begin in range(0, total, CHUNK):
        end = min(begin + CHUNK, total)
        row = csr_rows(ends, begin, end)
        yield torch.arange(begin, end, device=nodes.device) + shift.index_select(0, row)


def _add_rows(path: ExecutionPath, nodes: Tensor, sources: Tensor) -> None:
    """The rows of a path that is not whole."""
    # Gathering most nodes does not pay off. But of a layer below that is not whole, other rows are
    # not computed.
    most: float = path.num_nodes
    if not path.stands_alone or path.layer == 0:
        most = WHOLE * most
    path.dst_nodes, path.self_row, path.t_self_row = nodes, nodes.int(), path.dst_position
    if path.num_src < most:
        path.src_nodes = sources.nonzero().view(-1)
        path.src_position = _positions(path.src_nodes, path.num_nodes)
        path.self_row = path.src_position[nodes]
        path.t_self_row = path.dst_position[path.src_nodes]


def _add_edges(
    path: ExecutionPath, graph: Graph, nodes: Tensor, counts: Tensor, weighted: bool
) -> None:
    """The edges of a path that is not whole, between its rows."""
    num_dst, num_edges = path.num_dst, path.num_path_edges
    num_src = path.num_nodes if path.src_nodes is None else path.num_src
    if num_dst == path.num_nodes and not weighted:
        assert graph.t_col is not None
        path.rowptr, path.col = graph.rowptr, graph.col[:num_edges]
        path.t_rowptr, path.t_col = graph.t_rowptr, graph.t_col[:num_edges]
    else:
        index, device = graph.rowptr.dtype, nodes.device
        path.rowptr = rowptr = torch.zeros(num_dst + 1, dtype=index, device=device)
        rowptr[1:] = counts.cumsum(0)
        path.col = col = torch.empty(num_edges, dtype=torch.int32, device=device)
        perm = torch.empty(num_edges, dtype=index, device=device) if weighted else None
        end = 0
        for picked in _picked(graph, nodes, counts):
            begin, end = end, end + picked.numel()
            part = graph.col[picked]
            if path.src_position is not None:
                part = path.src_position.index_select(0, part)
            col[begin:end] = part
            if perm is not None:
                perm[begin:end] = picked if graph.perm is None else graph.perm[picked]
        if perm is None:
            path.t_rowptr, path.t_col = transpose_csr(rowptr, col, num_src)
        else:
            row = csr_rows(rowptr, 0, num_edges)
            t_rowptr, path.t_col, order = to_csr(
                torch.stack([col, row]), num_src, num_dst, by='src'
            )
            path.t_rowptr = t_rowptr.to(index)  # same dtype as the whole graph's positions
            path.perm, path.t_perm = perm, perm[order.long()]
    path.group_size = _group_size(path.col, num_dst)
    path.t_group_size = _group_size(path.col, num_src)


def _group_size(edges: Tensor, num_rows: int) -> int | None:
    if not edges.is_cuda:
        return None
    short = edges.numel() <= _SHORT_ROWS * num_rows
    return _GROUP_SIZE if short else usual_group_size(edges.numel())


def _join(paths: Sequence[ExecutionPath]) -> None:
    """The sources of a layer are the destinations of the layer below: share the tensor."""
    for below, path in zip(paths, paths[1:], strict=False):
        if path.src_nodes is not None and below.dst_nodes is not None:
            path.src_nodes, path.src_position = below.dst_nodes, below.dst_position
