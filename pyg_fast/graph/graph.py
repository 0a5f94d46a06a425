"""The structure of a plain or prepared edge_index: sorted, cached, transposed when needed."""

from collections.abc import Callable
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..ops._edges import check_edge_index, is_capturing, kernel_index, raise_pending
from ..ops._library import ops
from ..sparse.graph import Graph, check_node_counts, ends_of, loop_counts
from ..sparse.groups import check_size
from ..sparse.to_csr import to_csr, to_csr_csc, to_csr_unweighted
from ._cache import (
    Cache,
    Entry,
    Made,
    SampledHops,
    cache_of,
    derive,
    flipped,
    look_up,
    look_up_eagerly,
    noted_loops,
    store,
)
from .batch_edge_index import BatchEdgeIndex
from .prepared_graph import PreparedGraph

# Up to this number of edges one CUDA kernel sorts both ways, with positions.
_SMALL = 1 << 15


class GraphRequest(NamedTuple):
    """The edges as a :class:`Graph`, as asked of :func:`graph_of`."""

    num_src: int
    num_dst: int
    drop_loops: bool
    kind: str = 'graph'


class PreparedRequest(NamedTuple):
    """The :class:`Graph` of a :class:`PreparedGraph` with something that it does not hold."""

    part: Literal['transpose', 'positions', 'no loops', 'no loops, positions']
    kind: str = 'prepared graph'


class PartRequest(NamedTuple):
    """The :class:`Graph` of a mini-batch's first edges."""

    num_edges: int
    num_src: int
    num_dst: int
    kind: str = 'part'


def _is_small(edge_index: Tensor) -> bool:
    return not isinstance(edge_index, Tensor) or (
        edge_index.is_cuda and edge_index.numel() <= 2 * _SMALL
    )


def graph_of(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    transpose: bool = True,
    drop_loops: bool = False,
    wait: bool = False,
    values: bool = True,
) -> Graph:
    r"""The graph of a plain or prepared :obj:`edge_index`.

    A plain tensor is sorted at every call, both ways at once. An
    :class:`~torch_geometric.EdgeIndex` caches its structure, ready on every CUDA stream; its data
    must not be written afterwards, as for PyG's own caches: make a new one. On a GPU it has groups
    unless there are few edges; :func:`set_group_sizes` changes their sizes. The structure of a
    mini-batch, see :func:`keep_block`, has none, and is transposed when a gradient first needs it.

    Args:
        edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`.
        num_src (int): Number of source nodes.
        num_dst (int): Number of destination nodes.
        transpose (bool): Whether a backward pass will need the transpose.
            (default: :obj:`True`)
        drop_loops (bool): Whether to remove self-loops. (default: :obj:`False`)
        wait (bool): As in :func:`~pyg_fast.ops.to_csr`, for a plain tensor. For an EdgeIndex it
            always waits. (default: :obj:`False`)
        values (bool): Whether a kernel may read values of edges, by their positions. Otherwise the
            graph may lack those, see :obj:`Graph.missing`, and the rows of its transpose may be in
            another order than the edges. (default: :obj:`True`)

    Raises:
        TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`; ValueError also for an
            EdgeIndex whose size or sort order is wrong.
    """
    if isinstance(edge_index, PreparedGraph):
        return _of_prepared(edge_index, num_src, num_dst, transpose, drop_loops, values)
    if not isinstance(edge_index, EdgeIndex):
        return _sorted(edge_index, num_src, num_dst, transpose, drop_loops, wait, values)
    if torch.compiler.is_compiling():
        return _traced(edge_index, num_src, num_dst, transpose, drop_loops, values)
    raise_pending()
    request = GraphRequest(num_src, num_dst, drop_loops)
    graph = look_up_eagerly(edge_index, request)
    if graph is None and (whole := flipped(edge_index)) is not None:
        return graph_of(whole, num_dst, num_src, drop_loops=drop_loops).t()
    if graph is None:
        block = _of_mini_batch(edge_index, num_src, num_dst, drop_loops)
        graph = block
        if graph is None:
            graph = _prepare(edge_index, num_src, num_dst, drop_loops)
        sizes = cache_of(edge_index).group_sizes
        if sizes is not None and graph.groups is graph.t_groups is None:
            graph = graph.with_groups(*sizes)
        elif sizes is None and block is None:
            graph = graph.with_default_groups()
        store(edge_index, request, graph, wait=block is None)
    if transpose and graph.t_rowptr is None:
        graph = _with_transpose(graph, edge_index, drop_loops)
        store(edge_index, request, graph, wait=False)
        _share_transpose(edge_index, graph)
    return graph


def _of_prepared(
    prepared: PreparedGraph,
    num_src: int,
    num_dst: int,
    transpose: bool,
    drop_loops: bool,
    values: bool,
) -> Graph:
    """The graph of a :class:`PreparedGraph`, with what it does not hold, cached."""
    graph = prepared.graph
    check_node_counts((graph.num_src, graph.num_dst), num_src, num_dst)
    compiling = torch.compiler.is_compiling()
    if compiling:  # Fewer symbols for the same sizes.
        graph = graph._replace(num_src=num_src, num_dst=num_dst)
    else:
        raise_pending()

    def derived(request: PreparedRequest, make: Callable[[], Graph]) -> Graph:
        if compiling:  # Groups wait for the device.
            return derive(prepared, request, make)._replace(num_src=num_src, num_dst=num_dst)
        return derive(prepared, request, lambda: _with_groups_of(prepared, make()), wait=True)

    if drop_loops and (noted_loops if compiling else has_loops)(prepared) is not False:
        loop_free = PreparedRequest('no loops')
        if not values and (not compiling or look_up(prepared, loop_free) is not None):
            return derived(loop_free, lambda: graph.with_transpose().without_loops())
        # The sizes of its tensors do not depend on the number of loops.
        return derived(PreparedRequest('no loops, positions'), lambda: _sorted(
            torch.stack(ends_of(graph)), num_src, num_dst, drop_loops=True
        ))  # fmt: skip
    if transpose and graph.t_rowptr is None:
        graph = derived(PreparedRequest('transpose'), graph.with_transpose)
    if values and not graph.has_positions:
        graph = derived(PreparedRequest('positions'), graph.with_positions)
    return graph


def _with_groups_of(prepared: PreparedGraph, graph: Graph) -> Graph:
    """The graph with groups of the sizes that the user set, or of the usual ones."""
    sizes = cache_of(prepared).group_sizes
    if sizes is not None:
        return graph.with_groups(*sizes)
    return graph.with_default_groups() if graph.groups is None else graph


def prepare_for_compiled(edge_index: EdgeIndex, loops: bool, values: bool) -> None:
    """Makes what compiled code reads of a graph, and cannot keep: it would sort at every call.

    Args:
        edge_index (EdgeIndex): The graph. Nothing is made for one without sizes, of a batch, or in
            a capture, which cannot wait.
        loops: Whether layers remove self-loops.
        values: Whether kernels read values of edges.
    """
    num_src, num_dst = edge_index._sparse_size
    has_sizes = num_src is not None and num_dst is not None
    if not has_sizes or isinstance(edge_index, BatchEdgeIndex) or is_capturing(edge_index):
        return
    graph_of(edge_index, num_src, num_dst, values=values)
    if loops and num_src == num_dst:
        graph_of(edge_index, num_src, num_dst, drop_loops=True, values=values)


def keep_block(
    cache: Cache,
    rowptr: Tensor,
    col: Tensor,
    hops: SampledHops | None = None,
    loop_free: bool = False,
    longest_row: int | None = None,
    num_src: int | None = None,
    made: Made | None = None,
) -> None:
    r"""Fills the cache of a sampled EdgeIndex with its CSR form, so that it need not be sorted.

    It also covers the results of :func:`torch_geometric.utils.trim_to_layer`.

    Args:
        cache (Cache): That of edges sorted by destination, all in range.
        rowptr (Tensor): Row pointer of the destinations :math:`(N + 1)`, int32.
        col (Tensor): Sources :math:`(|\mathcal{E}|)`, int32.
        hops (SampledHops, optional): The numbers of nodes and of edges added by each hop, from
            the seeds on: edges of the first :math:`h` hops have no nodes beyond these hops.
            (default: :obj:`None`)
        loop_free (bool): Whether there are no self-loops. (default: :obj:`False`)
        longest_row (int, optional): As in :class:`Graph`. (default: :obj:`None`)
        num_src (int, optional): Number of sources. (default: :obj:`None`, that of destinations)
        made (Made, optional): Where the tensors were made, outside of a capture. (default:
            :obj:`None`, on the current stream)
    """
    num_dst = rowptr.size(0) - 1
    num_src = num_dst if num_src is None else num_src
    graph = Graph(rowptr, col, None, None, None, None, num_src, num_dst, longest_row=longest_row)
    keep_graph(cache, graph, loop_free, made)
    if hops is not None:
        edges, src, dst = hops  # Their owner may write into lists.
        cache.hops = SampledHops(tuple(edges), tuple(src), tuple(dst))


def keep_graph(cache: Cache, graph: Graph, loop_free: bool, made: Made | None = None) -> None:
    """Fills the cache of an EdgeIndex with the structure that a loader made beside it, without a
    wait.

    Args:
        cache (Cache): That of edges sorted by destination, all in range.
        graph (Graph): The same edges in the same order.
        loop_free (bool): Whether there are no self-loops.
        made (Made, optional): As in :func:`keep_block`. (default: :obj:`None`)
    """
    cache.hops = SampledHops()
    if made is None and is_capturing(cache.data):
        return
    request = GraphRequest(graph.num_src, graph.num_dst, False)
    entry = cache.entries[request] = Entry(graph, False, made)
    if loop_free:
        cache.has_loops = False
        cache.entries[GraphRequest(graph.num_src, graph.num_dst, True)] = entry


def set_group_sizes(
    edge_index: EdgeIndex, size: int | None, t_size: int | None = None, atomic: bool = False
) -> None:
    """Makes :func:`graph_of` return graphs with groups for this :obj:`edge_index` object.

    An edit of its data drops the group sizes; copies do not have them.

    Args:
        edge_index (EdgeIndex): The graph.
        size, t_size, atomic: As in :meth:`Graph.with_groups`.
    """
    if not isinstance(edge_index, EdgeIndex):
        got = type(edge_index).__name__
        raise TypeError(f"'edge_index' must be an EdgeIndex, as ToCSR makes one, got {got}")
    for each in (size, t_size):
        if each is not None:
            check_size(each)
    cache = cache_of(edge_index)
    sizes = cache.group_sizes = size, t_size, atomic
    if isinstance(edge_index, PreparedGraph):
        edge_index.graph = edge_index.graph.with_groups(*sizes)
    grouped: dict[int, Graph] = {}  # by old graph: requests that share a graph keep sharing it
    for request in list(cache.entries):
        value = look_up(edge_index, request)
        if not isinstance(value, Graph):  # derived from a graph with other groups
            del cache.entries[request]
            continue
        if id(value) not in grouped:
            grouped[id(value)] = value.with_groups(*sizes)
        store(edge_index, request, grouped[id(value)], wait=True)


def has_loops(edge_index: EdgeIndex) -> bool:
    """Whether there are self-loops, found once. A number would be a constant of compiled code."""
    cache = cache_of(edge_index)
    if cache.has_loops is None:
        if isinstance(edge_index, PreparedGraph):
            cache.has_loops = bool(loop_counts(edge_index.graph).any())
        else:
            cache.has_loops = bool((edge_index._data[0] == edge_index._data[1]).any())
    return cache.has_loops


@torch.inference_mode(False)  # A later training step may use it.
def _prepare(edge_index: EdgeIndex, num_src: int, num_dst: int, drop_loops: bool) -> Graph:
    data = edge_index.as_tensor().detach()
    check_edge_index(data)
    check_node_counts(edge_index._sparse_size, num_src, num_dst)
    if drop_loops:
        if not has_loops(edge_index):
            return graph_of(edge_index, num_src, num_dst)
        return _sorted(data, num_src, num_dst, drop_loops=True, wait=True)
    graph = _sorted(data, num_src, num_dst, wait=True)
    graph = graph.with_one_structure().with_full()
    if not edge_index.is_sorted:
        return graph
    # PyG's caches may be wrong after edits in place: ignore them.
    by_row = edge_index.is_sorted_by_row
    sorted_end = data[0 if by_row else 1]
    if bool((sorted_end[1:] < sorted_end[:-1]).any()):
        raise ValueError(
            f"'edge_index' claims to be sorted by {edge_index.sort_order!r} but is not"
        )
    return graph._replace(t_perm=None) if by_row else graph._replace(perm=None)


def _sorted(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    transpose: bool = True,
    drop_loops: bool = False,
    wait: bool = False,
    values: bool = True,
) -> Graph:
    """The graph of a plain edge_index; without :obj:`values` of edges a large one has no positions,
    which takes less memory."""
    args = edge_index, num_src, num_dst
    if not values and not _is_small(edge_index):
        csr = to_csr_unweighted(*args, drop_loops=drop_loops, wait=wait)
        graph = Graph.without_positions(*csr, num_src, num_dst)
        return graph.with_transpose() if transpose else graph
    if transpose:
        return Graph(*to_csr_csc(*args, drop_loops=drop_loops, wait=wait), num_src, num_dst)
    by_dst = to_csr(*args, drop_loops=drop_loops, wait=wait)
    return Graph(*by_dst, None, None, None, num_src, num_dst)


def _of_mini_batch(
    edge_index: EdgeIndex, num_src: int, num_dst: int, drop_loops: bool
) -> Graph | None:
    """The graph of a mini-batch or of its first hops, if the edges are such."""
    cache = cache_of(edge_index)
    if cache.hops is not None:
        graph = look_up(edge_index, GraphRequest(num_src, num_dst, False))
    elif isinstance(edge_index._base, EdgeIndex):
        whole = edge_index._base
        cache = cache_of(whole)
        graph = _part_of_mini_batch(edge_index, whole, cache.hops, num_src, num_dst)
    else:
        return None
    if graph is None or not drop_loops or cache.has_loops is False:
        return graph
    return _without_loops(graph, edge_index)


def _part_of_mini_batch(
    edge_index: EdgeIndex, whole: EdgeIndex, hops: SampledHops | None, num_src: int, num_dst: int
) -> Graph | None:
    (size_src, size_dst), count = whole.sparse_size(), edge_index.size(1)
    data, whole_data = edge_index._data, whole._data
    is_part = (data.data_ptr(), data.stride()) == (whole_data.data_ptr(), whole_data.stride())
    if (
        hops is None
        or edge_index._sort_order != whole._sort_order
        or tuple(edge_index.sparse_size()) != (num_src, num_dst)
        or not (is_part or count == 0)  # Tensors without entries have no address.
        or data.dtype != whole_data.dtype
        or count > whole_data.size(1)
    ):
        return None
    added = (0, *hops.edges), hops.src, hops.dst
    ends = zip(*map(accumulate, added), strict=False)  # Without entries if not known.
    src, dst = next(
        ((src, dst) for edges, src, dst in ends if count <= edges), (size_src, size_dst)
    )
    if not (src <= num_src <= size_src and dst <= num_dst <= size_dst):
        return None
    request = PartRequest(count, num_src, num_dst)
    part = look_up(whole, request)
    if part is None:
        graph = look_up(whole, GraphRequest(size_src, size_dst, False))
        if graph is None:
            return None
        rowptr = graph.rowptr[: num_dst + 1].clamp(max=count)
        part = Graph(
            rowptr, graph.col[:count], None, None, None, None, num_src, num_dst,
            longest_row=graph.longest_row,
        )  # fmt: skip
        store(whole, request, part, wait=False)
    return part


@torch.inference_mode(False)
def _without_loops(graph: Graph, edge_index: EdgeIndex) -> Graph:
    # Keeps the order, so it needs no sort; sizes are known, so it needs no synchronisation.
    col, data = graph.col, edge_index._data
    num_edges = col.size(0)
    stays = data[0] != data[1]
    dtype = graph.rowptr.dtype
    before = torch.cat([stays.new_zeros(1, dtype=dtype), stays.cumsum(0, dtype=dtype)])
    target = torch.where(stays, before[:-1], num_edges).long()

    def moved(values: Tensor) -> Tensor:
        return values.new_zeros(num_edges + 1).scatter_(0, target, values)[:-1]

    position = torch.arange(num_edges, dtype=dtype, device=col.device)
    return graph._replace(
        rowptr=before[graph.rowptr.long()], col=moved(col), perm=moved(position),
        t_rowptr=None, t_col=None, t_perm=None, full=(False, False),
    )  # fmt: skip


def _share_transpose(edge_index: EdgeIndex, graph: Graph) -> None:
    """Adds it to all cached graphs of the same edges."""
    for each in (edge_index, edge_index._base):
        if isinstance(each, EdgeIndex):
            for request, entry in list(cache_of(each).entries.items()):
                if isinstance(entry.value, Graph) and entry.value.col is graph.col:
                    store(each, request, graph, wait=False)


@torch.inference_mode(False)
def _with_transpose(graph: Graph, edge_index: EdgeIndex, drop_loops: bool) -> Graph:
    # The edges are known to be in range: no synchronisation.
    size = (graph.num_src, graph.num_dst)
    index64 = graph.rowptr.dtype == torch.int64
    *csc, _ = ops.to_csr.default(kernel_index(edge_index._data), *size, True, index64, drop_loops)
    return graph._replace(t_rowptr=csc[0], t_col=csc[1], t_perm=csc[2])


def _of_batch(edge_index: BatchEdgeIndex, num_src: int, num_dst: int) -> Graph:
    rowptr, data = edge_index._indptr, edge_index._data
    assert rowptr is not None
    torch._check(rowptr.size(0) == num_dst + 1)
    return Graph(rowptr.int(), data[0].int(), None, None, None, None, num_src, num_dst)


def _traced(
    edge_index: EdgeIndex, num_src: int, num_dst: int, transpose: bool, drop_loops: bool,
    values: bool,
) -> Graph:  # fmt: skip
    if isinstance(edge_index, BatchEdgeIndex) and edge_index._indptr is not None:
        graph = _of_batch(edge_index, num_src, num_dst)
        if not drop_loops and transpose:
            if values:  # by a sort
                return graph._replace(missing='t_perm').with_positions()
            return graph.with_transpose()
        if not drop_loops:
            return graph
        return graph_of(edge_index._data, num_src, num_dst, drop_loops=True)
    graph = look_up(edge_index, GraphRequest(num_src, num_dst, drop_loops))
    if graph is None:
        return graph_of(edge_index._data, num_src, num_dst, drop_loops=drop_loops)
    if transpose and graph.t_rowptr is None:
        return _with_transpose(graph, edge_index, drop_loops)
    return graph
