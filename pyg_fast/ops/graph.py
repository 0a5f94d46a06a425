"""The graph as kernels read it: a CSR structure and its transpose."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from ._edges import check_edge_index
from .groups import Groups, check_size, groups_of
from .to_csr import to_csr, to_csr_csc

# The one attribute of ours on an EdgeIndex: {key: whatever was derived from it}.
_CACHE = '_pyg_fast_cache'


class _Cache(dict):
    """A dict that copies and pickles as an empty one: it can always be made again."""

    def __reduce__(self) -> tuple:
        return (dict, ())


class Graph(NamedTuple):
    r"""A sparse matrix :math:`\mathbf{A}` in CSR form with rows = destinations, and its transpose.

    Both lists of edges point into one order of edges, that of :obj:`edge_weight`: by :obj:`perm`
    and :obj:`t_perm` (:obj:`None`: the list is in that order itself). All tensors are of one
    integer type, int32 or int64.

    Shapes:
        - **rowptr:** :math:`(N_{dst} + 1)`, **col**, **perm:** :math:`(|\mathcal{E}|)`
        - **t_rowptr:** :math:`(N_{src} + 1)`, **t_col**, **t_perm:** :math:`(|\mathcal{E}|)`;
          :obj:`None` where no gradient will be asked for

    :obj:`groups` and :obj:`t_groups` hand out the edges of either on a GPU
    (:obj:`None`: the kernel does it by rows).
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
        """The same graph, its sums handed out by groups.

        Args:
            size (int, optional): The most edges of a group; :obj:`None`: no groups.
            t_size (int, optional): The same for the transpose, if there is one.
                (default: :obj:`None`)
            atomic (bool): As in :func:`~pyg_fast.formats.groups_of`. (default: :obj:`False`)

        Raises:
            TypeError, ValueError: As :func:`~pyg_fast.formats.groups_of`.
        """

        def cut(rowptr: Tensor | None, size: int | None) -> Groups | None:
            return None if rowptr is None or size is None else groups_of(rowptr, size, atomic)

        return self._replace(groups=cut(self.rowptr, size), t_groups=cut(self.t_rowptr, t_size))


def graph_of(
    edge_index: Tensor,
    num_src: int,
    num_dst: int,
    *,
    transpose: bool = True,
    drop_loops: bool = False,
) -> Graph:
    r"""The graph of a plain or prepared :obj:`edge_index`.

    A plain tensor is sorted at every call, by both ends at once. What is derived from an
    :class:`~torch_geometric.EdgeIndex` is kept on it, and made anew once its data, its size or
    its device change. Compiled code does not notice edits in place: it goes by what was kept.
    If it was given group sizes, see :func:`set_group_sizes`, the graph comes with groups.

    Args:
        edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`.
        num_src (int): Number of source nodes.
        num_dst (int): Number of destination nodes.
        transpose (bool): Whether a backward pass will need the transpose.
            (default: :obj:`True`)
        drop_loops (bool): Leave out edges from a node to itself. (default: :obj:`False`)

    Raises:
        TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`; ValueError also for an
            EdgeIndex whose size or sort order is not what it claims.
    """
    if isinstance(edge_index, EdgeIndex):
        if torch.compiler.is_compiling():
            return _traced(edge_index, num_src, num_dst, drop_loops)
        key = ('graph', num_src, num_dst, drop_loops)
        cache = cache_of(edge_index)
        graph = cache.get(key)
        if graph is None:
            graph = _prepare(edge_index, num_src, num_dst, drop_loops)
            sizes = cache.get('group_sizes')
            if sizes is not None and graph.groups is graph.t_groups is None:
                graph = graph.with_groups(*sizes)
            cache[key] = graph
        return graph
    if transpose:
        both = to_csr_csc(edge_index, num_src, num_dst, drop_loops=drop_loops)
        return Graph(*both, num_src, num_dst)
    csr = to_csr(edge_index, num_src, num_dst, drop_loops=drop_loops)
    return Graph(*csr, None, None, None, num_src, num_dst)


def cache_of(edge_index: EdgeIndex) -> dict:
    """What was derived from an EdgeIndex; empty again once its data have changed."""
    data = edge_index._data
    # An edit counts in the version of that of the two tensors that it went through.
    state = (id(data), _version(data), _version(edge_index), edge_index._sort_order)
    cache = edge_index.__dict__.get(_CACHE)
    if cache is None or cache.get('state') != state:
        # `data` is held, so that its id cannot come back for another tensor.
        cache = edge_index.__dict__[_CACHE] = _Cache(state=state, data=data)
    return cache


def kept(edge_index: EdgeIndex, key: tuple) -> Any:
    """An entry of :func:`cache_of`, or None, in a form that :func:`torch.compile` traces."""
    # Methods of EdgeIndex do not trace, reading its attributes does.
    cache = getattr(edge_index, _CACHE, None)
    return None if cache is None else cache.get(key)


def set_group_sizes(
    edge_index: EdgeIndex, size: int | None, t_size: int | None = None, atomic: bool = False
) -> None:
    """Has :func:`graph_of` give graphs of this very :obj:`edge_index` with groups from now on.

    They are forgotten once its data change, and by copies of it.

    Args:
        edge_index (EdgeIndex): The graph.
        size, t_size, atomic: As in :meth:`Graph.with_groups`.
    """
    for each in (size, t_size):
        if each is not None:
            check_size(each)
    cache = cache_of(edge_index)
    sizes = cache['group_sizes'] = size, t_size, atomic
    made: dict[int, Graph] = {}  # by the graph before: what several keys share stays shared
    for key, value in list(cache.items()):
        if isinstance(value, Graph):
            if id(value) not in made:
                made[id(value)] = value.with_groups(*sizes)
            cache[key] = made[id(value)]
        elif isinstance(key, tuple):  # made of a graph with other groups
            del cache[key]


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version  # Inference tensors count none.


def num_loops(edge_index: EdgeIndex) -> int:
    """The number of edges from a node to itself, counted once."""
    cache = cache_of(edge_index)
    if 'num_loops' not in cache:
        cache['num_loops'] = int((edge_index._data[0] == edge_index._data[1]).sum())
    return cache['num_loops']


@torch.inference_mode(False)  # What is kept may be asked for gradients later.
def _prepare(edge_index: EdgeIndex, num_src: int, num_dst: int, drop_loops: bool) -> Graph:
    # A new tensor, about which nothing is noted: edits through the EdgeIndex do not count in the
    # version of its data.
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
        return graph_of(data, num_src, num_dst, drop_loops=True)
    graph = graph_of(data, num_src, num_dst)
    if not edge_index.is_sorted:
        return graph
    # PyG's caches are not read: edits in place leave wrong ones behind.
    by_row = edge_index.is_sorted_by_row
    sorted_end = data[0 if by_row else 1]
    if bool((sorted_end[1:] < sorted_end[:-1]).any()):
        raise ValueError(
            f"'edge_index' claims to be sorted by {edge_index.sort_order!r} but is not"
        )
    return graph._replace(t_perm=None) if by_row else graph._replace(perm=None)


def _traced(edge_index: EdgeIndex, num_src: int, num_dst: int, drop_loops: bool) -> Graph:
    graph = kept(edge_index, ('graph', num_src, num_dst, drop_loops))
    if graph is None:
        graph = graph_of(edge_index._data, num_src, num_dst, drop_loops=drop_loops)
    return graph
