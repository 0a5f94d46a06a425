"""The graph in the form that kernels read: a CSR structure and its transpose."""

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ..ops._edges import check_edge_index, kernel_index, raise_pending
from ..ops._library import ops
from ..ops.to_csr import to_csr, to_csr_csc
from ._cache import cache_of, cached, store
from .groups import Groups, check_size, groups_of

# Few edges are not worth the time to make groups. With many there are enough rows to fill a GPU,
# and partial sums of small groups cost more than to wait for long rows.
_FEW, _MANY = 1 << 16, 1 << 23


class Graph(NamedTuple):
    r"""A sparse matrix :math:`\mathbf{A}` in CSR form with rows = destinations, and its transpose.

    Both structures refer to one order of edges, that of :obj:`edge_weight`, by :obj:`perm`
    and :obj:`t_perm` (:obj:`None`: the structure is in that order). Columns are int32; row pointers
    and positions are int32, or int64 from :math:`2^{31}` edges on. Ops check shapes and dtypes but
    not the content: row pointers and indices out of range crash. :meth:`from_edge_index` makes a
    checked graph.

    Shapes:
        - **rowptr:** :math:`(N_{dst} + 1)`, **col**, **perm:** :math:`(|\mathcal{E}|)`
        - **t_rowptr:** :math:`(N_{src} + 1)`, **t_col**, **t_perm:** :math:`(|\mathcal{E}|)`;
          :obj:`None` if no gradient is needed

    :obj:`groups` and :obj:`t_groups` divide the work on a GPU, for the graph and its transpose
    (:obj:`None`: the kernel divides it by rows).
    """

    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    t_rowptr: Tensor | None
    t_col: Tensor | None
    t_perm: Tensor | None
    num_src: int
    num_dst: int
    groups: Groups | None = None
    t_groups: Groups | None = None

    @staticmethod
    def from_edge_index(
        edge_index: Tensor, num_src: int | None = None, num_dst: int | None = None
    ) -> 'Graph':
        r"""The graph of an edge_index, with its transpose; checks every index.

        Args:
            edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`.
            num_src (int, optional): Number of source nodes. (default: :obj:`None`, the size of an
                EdgeIndex, or the largest index plus one)
            num_dst (int, optional): Number of destination nodes. (default: :obj:`None`, the
                number of sources)

        Raises:
            TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`.
        """
        check_edge_index(edge_index)
        known = getattr(edge_index, '_sparse_size', (None, None))
        num_src = known[0] if num_src is None else num_src
        num_dst = known[1] if num_dst is None else num_dst
        if num_src is None:
            data = edge_index._data if isinstance(edge_index, EdgeIndex) else edge_index
            num_src = int(data.max()) + 1 if data.numel() > 0 else 0
        num_dst = num_src if num_dst is None else num_dst
        return graph_of(edge_index, num_src, num_dst, wait=True)

    def t(self) -> 'Graph':
        """The transposed graph."""
        if self.t_rowptr is None or self.t_col is None:
            raise ValueError("'graph' was made without its transpose")
        return Graph(
            self.t_rowptr, self.t_col, self.t_perm, self.rowptr, self.col, self.perm,
            self.num_dst, self.num_src, self.t_groups, self.groups,
        )  # fmt: skip

    @property
    def num_edges(self) -> int:
        """The number of edges that an :obj:`edge_weight` must have."""
        return self.col.size(0)

    def with_groups(
        self, size: int | None, t_size: int | None = None, atomic: bool = False
    ) -> 'Graph':
        """The graph with its sums divided into groups.

        Args:
            size (int, optional): The most edges per group; :obj:`None`: no groups.
            t_size (int, optional): The size for the transpose, if there is one.
                (default: :obj:`None`)
            atomic (bool): As in :func:`~pyg_fast.graph.set_group_sizes`. (default: :obj:`False`)

        Raises:
            TypeError, ValueError: As :func:`~pyg_fast.graph.set_group_sizes`.
        """

        def cut(rowptr: Tensor | None, size: int | None) -> Groups | None:
            return None if rowptr is None or size is None else groups_of(rowptr, size, atomic)

        groups, alike = cut(self.rowptr, size), self.t_rowptr is self.rowptr and t_size == size
        t_groups = groups if alike else cut(self.t_rowptr, t_size)
        return self._replace(groups=groups, t_groups=t_groups)

    def scheduled(self) -> 'Graph':
        """The graph with groups of a size that suits most widths, on a GPU, unless it has some or
        few edges."""
        has_some = self.groups is not None or self.t_groups is not None
        if not self.col.is_cuda or has_some or self.num_edges < _FEW:
            return self
        size = 64 if self.num_edges < _MANY else 256
        return self.with_groups(size, size)

    def with_one_structure(self) -> 'Graph':
        """The graph with one CSR structure if it is symmetric. Synchronises."""
        if (
            self.num_src != self.num_dst
            or self.t_rowptr is None
            or self.t_col is None
            or not torch.equal(self.rowptr, self.t_rowptr)
            or not torch.equal(self.col, self.t_col)
        ):
            return self
        return self._replace(t_rowptr=self.rowptr, t_col=self.col)


def check_graph(graph: Graph) -> None:
    """Raises unless the tensors of a graph fit together; their content is not checked."""
    if torch.compiler.is_compiling():  # The kernels' own checks do it there.
        return
    rowptr, col, perm, t_rowptr, t_col, t_perm, num_src, num_dst = graph[:8]
    if not isinstance(rowptr, Tensor) or rowptr.dtype not in (torch.int32, torch.int64):
        got = rowptr.dtype if isinstance(rowptr, Tensor) else type(rowptr).__name__
        raise TypeError(f"'graph.rowptr' must be a tensor of int32 or int64, got {got}")
    _check_part(rowptr, 'rowptr', rowptr, num_dst + 1)
    _check_part(col, 'col', rowptr, None)
    num_edges = col.size(0)
    if perm is not None:
        _check_part(perm, 'perm', rowptr, num_edges)
    if t_rowptr is not None:
        _check_part(t_rowptr, 't_rowptr', rowptr, num_src + 1)
        _check_part(t_col, 't_col', rowptr, num_edges)
        if t_perm is not None:
            _check_part(t_perm, 't_perm', rowptr, num_edges)


def _check_part(t: Any, name: str, rowptr: Tensor, size: int | None) -> None:
    dtype = torch.int32 if name in ('col', 't_col') else rowptr.dtype
    if not isinstance(t, Tensor) or t.dtype != dtype or t.layout != torch.strided:
        got = f'{t.dtype}, {t.layout}' if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"'graph.{name}' must be a strided tensor of {dtype}, got {got}")
    if t.dim() != 1 or (size is not None and t.size(0) != size) or not t.is_contiguous():
        wanted = 'one dimension' if size is None else f'shape [{size}]'
        raise ValueError(
            f"'graph.{name}' must have {wanted} and be contiguous, got {list(t.shape)} with stride "
            f'{list(t.stride())}'
        )
    if t.device != rowptr.device:
        raise ValueError(
            f"'graph.{name}' is on {t.device}, but 'graph.rowptr' is on {rowptr.device}"
        )


def graph_of(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    transpose: bool = True,
    drop_loops: bool = False,
    wait: bool = False,
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

    Raises:
        TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`; ValueError also for an
            EdgeIndex whose size or sort order is wrong.
    """
    if not isinstance(edge_index, EdgeIndex):
        if transpose:
            return _sorted(edge_index, num_src, num_dst, drop_loops, wait)
        csr = to_csr(edge_index, num_src, num_dst, drop_loops=drop_loops, wait=wait)
        return Graph(*csr, None, None, None, num_src, num_dst)
    if torch.compiler.is_compiling():
        return _traced(edge_index, num_src, num_dst, transpose, drop_loops)
    raise_pending()
    key = ('graph', num_src, num_dst, drop_loops)
    graph = cached(edge_index, key)
    if graph is None:
        block = _of_block(edge_index, num_src, num_dst, drop_loops)
        graph = block
        if graph is None:
            graph = _prepare(edge_index, num_src, num_dst, drop_loops)
        sizes = cache_of(edge_index).facts.get('group_sizes')
        if sizes is not None and graph.groups is graph.t_groups is None:
            graph = graph.with_groups(*sizes)
        elif sizes is None and block is None:
            graph = graph.scheduled()
        store(edge_index, key, graph, wait=block is None)
    if transpose and graph.t_rowptr is None:
        graph = _with_transpose(graph, edge_index, drop_loops)
        store(edge_index, key, graph, wait=False)
        _share_transpose(edge_index, graph)
    return graph


def keep_block(
    edge_index: EdgeIndex,
    rowptr: Tensor,
    col: Tensor,
    hops: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    loop_free: bool = False,
) -> None:
    r"""Caches the CSR form of a sampled :obj:`edge_index`, so that it need not be sorted.

    It also covers the results of :func:`torch_geometric.utils.trim_to_layer`.

    Args:
        edge_index (EdgeIndex): Edges sorted by destination, all in range.
        rowptr (Tensor): Row pointer of the destinations :math:`(N + 1)`, int32.
        col (Tensor): Sources :math:`(|\mathcal{E}|)`, int32.
        hops (tuple, optional): The numbers of nodes and of edges added by each hop, from the
            seeds on: edges of the first :math:`h` hops have no nodes beyond these hops.
            (default: :obj:`None`)
        loop_free (bool): Whether there are no self-loops. (default: :obj:`False`)
    """
    size = rowptr.size(0) - 1
    graph = Graph(rowptr, col, None, None, None, None, size, size)
    facts = cache_of(edge_index).facts
    store(edge_index, ('graph', size, size, False), graph, wait=False)
    if loop_free:
        facts['num_loops'] = 0
        store(edge_index, ('graph', size, size, True), graph, wait=False)
    facts['hops'] = ()
    if hops is not None:
        nodes, edges = (list(accumulate(counts)) for counts in hops)
        facts['hops'] = tuple(zip([0, *edges], nodes, strict=True))


def set_group_sizes(
    edge_index: EdgeIndex, size: int | None, t_size: int | None = None, atomic: bool = False
) -> None:
    """Makes :func:`graph_of` return graphs with groups for this :obj:`edge_index` object.

    An edit of its data drops the group sizes; copies do not have them.

    Args:
        edge_index (EdgeIndex): The graph.
        size, t_size, atomic: As in :meth:`Graph.with_groups`.
    """
    for each in (size, t_size):
        if each is not None:
            check_size(each)
    cache = cache_of(edge_index)
    sizes = cache.facts['group_sizes'] = size, t_size, atomic
    made: dict[int, Graph] = {}  # by old graph: keys that share a graph keep sharing it
    for key in list(cache.entries):
        value = cached(edge_index, key)
        if not isinstance(value, Graph):  # derived from a graph with other groups
            del cache.entries[key]
            continue
        if id(value) not in made:
            made[id(value)] = value.with_groups(*sizes)
        store(edge_index, key, made[id(value)], wait=True)


def num_loops(edge_index: EdgeIndex) -> int:
    """The number of self-loops, counted once."""
    facts = cache_of(edge_index).facts
    if 'num_loops' not in facts:
        facts['num_loops'] = int((edge_index._data[0] == edge_index._data[1]).sum())
    return facts['num_loops']


@torch.inference_mode(False)  # A later training step may use it.
def _prepare(edge_index: EdgeIndex, num_src: int, num_dst: int, drop_loops: bool) -> Graph:
    data = edge_index.as_tensor().detach()
    check_edge_index(data)
    size = tuple(edge_index.sparse_size())
    for known, count, name in zip(size, (num_src, num_dst), ('source', 'destination'), strict=True):
        if known is not None and known != count:
            raise ValueError(
                f"'edge_index' is of size {size} (sources, destinations), but there are {count} "
                f'{name} nodes'
            )
    if drop_loops:
        if num_loops(edge_index) == 0:
            return graph_of(edge_index, num_src, num_dst)
        return _sorted(data, num_src, num_dst, drop_loops=True, wait=True)
    graph = _sorted(data, num_src, num_dst, drop_loops=False, wait=True)
    graph = graph.with_one_structure()
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


def _sorted(data: Tensor, num_src: int, num_dst: int, drop_loops: bool, wait: bool) -> Graph:
    both = to_csr_csc(data, num_src, num_dst, drop_loops=drop_loops, wait=wait)
    return Graph(*both, num_src, num_dst)


def _of_block(
    edge_index: EdgeIndex, num_src: int, num_dst: int, drop_loops: bool
) -> Graph | None:
    """The graph of a mini-batch or of its first hops, if the edges are such."""
    whole, facts = edge_index, cache_of(edge_index).facts
    if 'hops' in facts:
        graph = cached(edge_index, ('graph', num_src, num_dst, False))
    elif isinstance(edge_index._base, EdgeIndex):
        whole = edge_index._base
        facts = cache_of(whole).facts
        graph = _part_of_block(edge_index, whole, facts, num_src, num_dst)
    else:
        return None
    if graph is None or not drop_loops or facts.get('num_loops') == 0:
        return graph
    return _without_loops(graph, edge_index)


def _part_of_block(
    edge_index: EdgeIndex, whole: EdgeIndex, facts: dict, num_src: int, num_dst: int
) -> Graph | None:
    size, count = whole.sparse_size(0), edge_index.size(1)
    data, whole_data = edge_index._data, whole._data
    if (
        'hops' not in facts
        or edge_index._sort_order != whole._sort_order
        or tuple(edge_index.sparse_size()) != (num_src, num_dst)
        or (data.data_ptr(), data.stride()) != (whole_data.data_ptr(), whole_data.stride())
        or data.dtype != whole_data.dtype
        or count > whole_data.size(1)
    ):
        return None
    num_nodes = next((nodes for edges, nodes in facts['hops'] if count <= edges), size)
    if min(num_src, num_dst) < num_nodes or max(num_src, num_dst) > size:
        return None
    key = ('part', count, num_src, num_dst)
    part = cached(whole, key)
    if part is None:
        graph = cached(whole, ('graph', size, size, False))
        if graph is None:
            return None
        rowptr = graph.rowptr[: num_dst + 1].clamp(max=count)
        part = Graph(rowptr, graph.col[:count], None, None, None, None, num_src, num_dst)
        store(whole, key, part, wait=False)
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
        t_rowptr=None, t_col=None, t_perm=None,
    )  # fmt: skip


def _share_transpose(edge_index: EdgeIndex, graph: Graph) -> None:
    """Adds it to all cached graphs of the same edges."""
    for each in (edge_index, edge_index._base):
        if isinstance(each, EdgeIndex):
            for key, entry in list(cache_of(each).entries.items()):
                if isinstance(entry.value, Graph) and entry.value.col is graph.col:
                    store(each, key, graph, wait=False)


@torch.inference_mode(False)
def _with_transpose(graph: Graph, edge_index: EdgeIndex, drop_loops: bool) -> Graph:
    # The edges are known to be in range: no synchronisation.
    size = (graph.num_src, graph.num_dst)
    index64 = graph.rowptr.dtype == torch.int64
    *csc, _ = ops.to_csr.default(
        kernel_index(edge_index._data), *size, True, index64, drop_loops
    )
    return graph._replace(t_rowptr=csc[0], t_col=csc[1], t_perm=csc[2])


def _traced(
    edge_index: EdgeIndex, num_src: int, num_dst: int, transpose: bool, drop_loops: bool
) -> Graph:
    graph = cached(edge_index, ('graph', num_src, num_dst, drop_loops))
    if graph is None:
        return graph_of(edge_index._data, num_src, num_dst, drop_loops=drop_loops)
    if transpose and graph.t_rowptr is None:
        return _with_transpose(graph, edge_index, drop_loops)
    return graph
