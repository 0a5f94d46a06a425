"""Execution paths of a graph and a mask."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    check_number('num_layers', num_layers, 1)
    if not keep_graph:
        if not forward:
            raise ValueError(
                "'keep_graph' must be True with forward=False, whose forward pass computes all rows"
            )
        if weighted:
            raise ValueError(
                "'keep_graph' must be True for a graph with edge weights, which layers normalise "
                'over all edges'
            )
    check_edge_index(edge_index)
    size = getattr(edge_index, '_sparse_size', (None, None))
    check_mask(mask, size[0] if size[0] is not None else size[1])
    if mask.device != edge_index.device:
        raise ValueError(f"'mask' is on {mask.device}, but 'edge_index' is on {edge_index.device}")
    num_nodes = mask.size(0)
    graph = graph_of(
        edge_index, num_nodes, num_nodes, drop_loops=True, wait=True, values=weighted
    )
    common: dict[str, Any] = dict(
        num_layers=num_layers, num_nodes=num_nodes, loops=_loops(edge_index, num_nodes),
        graph_signature=signature_of(edge_index), mask_signature=mask_signature_of(mask),
        forward=forward, checks=checks, strict=strict, debug=debug,
    )  # fmt: skip
    common['num_edges'] = num_edges = int(graph.rowptr[-1])
    degree = graph.rowptr.diff()
    common['degree'] = None if keep_graph else degree.int()

    paths: list[ExecutionPath] = []
    # If a layer needs most edges, so do all layers before it.
    active, whole = mask, False
    for layer in reversed(range(num_layers)):
        nodes = active.nonzero().view(-1)
        counts = degree[nodes].long()
        total = int(counts.sum())
        fields = dict(
            common, layer=layer, num_dst=nodes.numel(), num_path_edges=total,
            dst_position=_positions(nodes, num_nodes),
            counter=torch.zeros(1, dtype=torch.int64, device=mask.device),
        )  # fmt: skip
        # A pass over all edges loses little if most are needed; rows of all nodes cost much more,
        # in linear maps and elsewhere.
        most = nodes.numel() >= WHOLE * num_nodes if forward else total >= WHOLE * num_edges
        whole = keep_graph and (whole or most)
        if nodes.numel() == num_nodes:
            sources = active
        else:
            sources = active.clone()
            for picked in _picked(graph, nodes, counts):
                sources[graph.col[picked].long()] = True
        fields['num_src'] = int(sources.sum())
        paths.append(_path(fields, graph, nodes, counts, sources, whole, weighted))
        active = sources
    paths.reverse()
    _join(paths)
    return paths


def _loops(edge_index: Tensor, num_nodes: int) -> Tensor | None:
    if isinstance(edge_index, PreparedGraph):
        return loop_counts(edge_index.graph) if has_loops(edge_index) else None
    data = list_of(edge_index)
    loops = data[0][data[0] == data[1]].long()
    return torch.bincount(loops, minlength=num_nodes) if loops.numel() else None


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


def _path(
    fields: dict[str, Any],
    graph: Graph,
    nodes: Tensor,
    counts: Tensor,
    sources: Tensor,
    whole: bool,
    weighted: bool,
) -> ExecutionPath:
    if whole:
        return ExecutionPath(**fields, **dict.fromkeys((
            'rowptr', 'col', 'perm', 't_rowptr', 't_col', 't_perm', 'src_nodes', 'src_position',
            'dst_nodes', 'self_row', 't_self_row', 'group_size', 't_group_size',
        )))  # fmt: skip
    num_dst, index = nodes.numel(), graph.rowptr.dtype
    num_edges, device = fields['num_path_edges'], nodes.device
    src_nodes = src_position = None
    # Gathering most nodes does not pay off. But of a layer below that is not whole, other rows are
    # not computed.
    most: float = fields['num_nodes']
    if fields['degree'] is None or fields['layer'] == 0:
        most = WHOLE * most
    if fields['num_src'] < most:
        src_nodes = sources.nonzero().view(-1)
        src_position = _positions(src_nodes, fields['num_nodes'])
    num_src = fields['num_nodes'] if src_nodes is None else src_nodes.numel()
    perm = t_perm = None
    if num_dst == fields['num_nodes'] and not weighted:
        rowptr, col = graph.rowptr, graph.col[:num_edges]
        t_rowptr, t_col = graph.t_rowptr, graph.t_col[:num_edges]  # type: ignore[index]
    else:
        rowptr = torch.zeros(num_dst + 1, dtype=index, device=device)
        rowptr[1:] = counts.cumsum(0)
        col = torch.empty(num_edges, dtype=torch.int32, device=device)
        perm = torch.empty(num_edges, dtype=index, device=device) if weighted else None
        end = 0
        for picked in _picked(graph, nodes, counts):
            begin, end = end, end + picked.numel()
            part = graph.col[picked]
            if src_position is not None:
                part = src_position.index_select(0, part)
            col[begin:end] = part
            if perm is not None:
                perm[begin:end] = picked if graph.perm is None else graph.perm[picked]
        if perm is None:
            t_rowptr, t_col = transpose_csr(rowptr, col, num_src)
        else:
            row = csr_rows(rowptr, 0, num_edges)
            t_rowptr, t_col, t_perm = to_csr(torch.stack([col, row]), num_src, num_dst, by='src')
            t_rowptr = t_rowptr.to(index)  # same dtype as the whole graph's positions
            t_perm = perm[t_perm.long()]
    dst_position = fields['dst_position']
    return ExecutionPath(
        **fields, rowptr=rowptr, col=col, perm=perm, t_rowptr=t_rowptr, t_col=t_col,
        t_perm=t_perm, group_size=_group_size(col, num_dst),
        t_group_size=_group_size(col, num_src), src_nodes=src_nodes, src_position=src_position,
        dst_nodes=nodes,
        self_row=(nodes if src_position is None else src_position[nodes]).int(),
        t_self_row=dst_position if src_nodes is None else dst_position[src_nodes],
    )  # fmt: skip


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
