"""A CSR structure with its transpose, as kernels read it."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops._edges import check_edge_index
from .groups import Groups, groups_of
from .to_csr import csr_rows, to_csr, to_csr_csc, transpose_csr

# Few edges are not worth the time to make groups. The more edges, the more rows fill a GPU, and the
# more partial sums of small groups cost beside waiting for long rows.
_FEW, _SOME, _MANY = 1 << 16, 1 << 22, 1 << 24

# So many terms of a source CUDA kernels add in any order: kManyTerms in csrc/cuda/rows.cuh.
MANY_TERMS = 1 << 14

# Edges at once in what needs temporary tensors of edges.
CHUNK = 1 << 26

# The positions that a graph does not store. Strings, as in pickles of version 0.2, and constants of
# compiled code.
Missing: TypeAlias = Literal['perm', 't_perm', 'perm and t_perm']


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

    :obj:`longest_row` is at least the number of edges of each row, if that is known: kernels then
    do not look for long rows. A row that has more costs time, and gives the same result.

    :obj:`missing` names the positions that a graph without values of edges does not store: there
    :obj:`None` does not stand for the order of the edges. If :obj:`perm` alone is missing, the
    order of the edges is that of the transpose, see :attr:`is_in_order_of_transpose`; if both are,
    it is lost. Ops with values of edges refuse such a graph, see :meth:`with_positions`.

    :obj:`full` says of the graph and of its transpose whether each row is known to have an edge.
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
    missing: Missing | None = None
    longest_row: int | None = None
    full: tuple[bool, bool] = (False, False)

    @staticmethod
    def from_edge_index(
        edge_index: Tensor, num_src: int | None = None, num_dst: int | None = None
    ) -> 'Graph':
        r"""The graph of an edge_index, with its transpose, by a sort that checks every index.
        :func:`~pyg_fast.graph.graph_of` takes the graph that an EdgeIndex holds.

        Args:
            edge_index (Tensor or EdgeIndex): Sources and destinations :math:`(2, |\mathcal{E}|)`.
            num_src (int, optional): Number of source nodes. (default: :obj:`None`, the size of an
                EdgeIndex, or the largest index plus one)
            num_dst (int, optional): Number of destination nodes. (default: :obj:`None`, the
                number of sources)

        Raises:
            TypeError, ValueError, IndexError: As :func:`~pyg_fast.ops.to_csr`; ValueError also if
                an EdgeIndex has another size.
        """
        check_edge_index(edge_index)
        size = getattr(edge_index, '_sparse_size', (None, None))
        num_src = size[0] if num_src is None else num_src
        num_dst = size[1] if num_dst is None else num_dst
        if num_src is None:
            num_src = int(edge_index.max()) + 1 if edge_index.numel() > 0 else 0
        num_dst = num_src if num_dst is None else num_dst
        check_node_counts(size, num_src, num_dst)
        return Graph(*to_csr_csc(edge_index, num_src, num_dst, wait=True), num_src, num_dst)

    def t(self) -> 'Graph':
        """The transposed graph."""
        if self.t_rowptr is None or self.t_col is None:
            raise ValueError("'graph' was made without its transpose")
        return Graph(
            self.t_rowptr, self.t_col, self.t_perm, self.rowptr, self.col, self.perm,
            self.num_dst, self.num_src, self.t_groups, self.groups, _SWAPPED[self.missing],
            full=self.full[::-1],
        )  # fmt: skip

    @staticmethod
    def without_positions(rowptr: Tensor, col: Tensor, num_src: int, num_dst: int) -> 'Graph':
        """A graph without its transpose and the positions of its edges."""
        return Graph(rowptr, col, None, None, None, None, num_src, num_dst, missing='perm')

    @property
    def has_positions(self) -> bool:
        """Whether it stores the positions of its edges, which values of edges need."""
        return self.missing is None

    @property
    def is_in_order_of_transpose(self) -> bool:
        """Whether only the transpose knows the order of the edges."""
        return self.missing == 'perm'

    @property
    def num_edges(self) -> int:
        """The number of edges that an :obj:`edge_weight` must have."""
        return self.col.size(0)

    @property
    def most_edges(self) -> int:
        """At least the number of edges of the longest row. It asks no GPU."""
        known = [self.num_edges]
        if self.groups is not None:
            known.append(self.groups.most_edges)
        if self.longest_row is not None:
            known.append(self.longest_row)
        return min(known)

    def transpose_of_hubs(self) -> tuple[Tensor | None, ...]:
        """The transpose, for a kernel that adds terms of sources in any order and gathers those of
        many edges; Nones if there is none, or no source has as many. It asks no GPU."""
        groups = self.t_groups
        if groups is not None and groups.most_edges <= MANY_TERMS:
            return None, None, None
        return self.t_rowptr, self.t_col, self.t_perm

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

    def with_default_groups(self) -> 'Graph':
        """The graph with groups of a size that suits most widths, on a GPU, unless it has some or
        few edges."""
        has_some = self.groups is not None or self.t_groups is not None
        size = usual_group_size(self.num_edges) if self.col.is_cuda and not has_some else None
        return self if size is None else self.with_groups(size, size)

    def with_full(self) -> 'Graph':
        """The graph that knows whether each row has an edge. Synchronises once."""
        both = [self.rowptr] if self.t_rowptr is None else [self.rowptr, self.t_rowptr]
        found = torch.stack([(rowptr[1:] > rowptr[:-1]).all() for rowptr in both]).tolist()
        return self._replace(full=(found[0], self.t_rowptr is not None and found[-1]))

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

    def with_positions(self) -> 'Graph':
        """The graph with the positions that it does not store, by a sort.

        Raises:
            ValueError: If they cannot be found.
        """
        if self.has_positions:
            return self
        if self.is_in_order_of_transpose:
            return self.t().with_positions().t()
        if self.missing == _BOTH:
            raise ValueError("'graph' has lost the positions of its edges: make it again")
        t_rowptr, t_col, t_perm = to_csr(
            torch.stack(ends_of(self, torch.int32)), self.num_src, self.num_dst, by='src'
        )
        index = self.rowptr.dtype
        part = self._replace(t_perm=t_perm.to(index), missing=None)
        compiling = torch.compiler.is_compiling()  # It would have to synchronise.
        if not compiling and self.t_col is not None and torch.equal(t_col, self.t_col):
            return part
        return part._replace(t_rowptr=t_rowptr.to(index), t_col=t_col)

    def with_transpose(self) -> 'Graph':
        """The graph with its transpose, without the positions of that."""
        if self.t_rowptr is not None:
            return self
        t_rowptr, t_col = transpose_csr(self.rowptr, self.col, self.num_src)
        groups = self.groups
        t_groups = None if groups is None else groups_of(t_rowptr, groups.size, groups.atomic)
        return self._replace(
            t_rowptr=t_rowptr, t_col=t_col, t_perm=None, t_groups=t_groups,
            missing='t_perm' if self.has_positions else _BOTH,
        )  # fmt: skip

    def without_loops(self) -> 'Graph':
        """The graph without self-loops, groups and positions. Synchronises."""
        rowptr, col = _without_loops(self)
        t_rowptr = t_col = None
        if self.t_rowptr is self.rowptr and self.t_col is self.col:
            t_rowptr, t_col = rowptr, col
        elif self.t_rowptr is not None:
            t_rowptr, t_col = _without_loops(self.t())
        return Graph(
            rowptr, col, None, t_rowptr, t_col, None, self.num_src, self.num_dst, missing=_BOTH
        )

    def mapped(self, func: Callable[[Tensor], Tensor]) -> 'Graph':
        """The graph with a function applied to each tensor; shared ones stay shared."""
        results: dict[int, Tensor] = {}

        def once(t: Tensor) -> Tensor:
            if id(t) not in results:
                results[id(t)] = func(t)
            return results[id(t)]

        return Graph._make(
            part._each(once) if isinstance(part, Groups) else
            once(part) if isinstance(part, Tensor) else part for part in self
        )  # fmt: skip


_BOTH: Missing = 'perm and t_perm'
_SWAPPED: dict[Missing | None, Missing | None] = {
    None: None, 'perm': 't_perm', 't_perm': 'perm', _BOTH: _BOTH,
}  # fmt: skip


def check_node_counts(
    size: tuple[int | None, int | None], num_src: int | None, num_dst: int | None
) -> None:
    """Raises unless they are those of an EdgeIndex, as far as both are known."""
    for known, count, name in zip(size, (num_src, num_dst), ('source', 'destination'), strict=True):
        if known is not None and count is not None and known != count:
            raise ValueError(
                f"'edge_index' is of size {size} (sources, destinations), but there are {count} "
                f'{name} nodes: prepare the edges again, by ToCSR, after nodes were added or '
                'removed, or give each node a row of features'
            )


def check_graph(graph: Graph, values: bool = False) -> None:
    """Raises unless the tensors of a graph fit together; their content is not checked. With
    :obj:`values` it must have the positions of its edges."""
    if values and not graph.has_positions:
        raise ValueError(
            f"'graph' does not store {graph.missing}, the positions of its edges, which values of "
            'edges need: use graph.with_positions()'
        )
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


def _check_part(t: object, name: str, rowptr: Tensor, size: int | None) -> None:
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


def usual_group_size(num_edges: int) -> int | None:
    """The size of groups that suits most widths on a GPU; None: by rows."""
    if num_edges < _FEW:
        return None
    return 64 if num_edges < _SOME else 128 if num_edges < _MANY else 256


def ends_of(graph: Graph, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Source and destination of each edge, in the order of the edges."""
    if graph.is_in_order_of_transpose:
        dst, src = ends_of(graph.t(), dtype)
        return src, dst
    if torch.compiler.is_compiling():  # Chunks would fix the number of edges.
        src, dst = graph.col, csr_rows(graph.rowptr, 0, graph.num_edges)
        if graph.perm is not None:
            place = graph.perm.long()
            src, dst = (torch.empty_like(end).scatter(0, place, end) for end in (src, dst))
        return src.to(dtype), dst.to(dtype)
    ends = tuple(
        torch.empty(graph.num_edges, dtype=dtype, device=graph.col.device) for _ in range(2)
    )
    for at, src, dst in edge_chunks(graph):
        for end, part in zip(ends, (src, dst), strict=True):
            if graph.perm is None:
                end[at] = part
            else:
                end[graph.perm[at].long()] = part.to(dtype)
    return ends  # type: ignore[return-value]


def edge_chunks(graph: Graph) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The places of consecutive edges in a structure, their sources and destinations, int32."""
    for begin in range(0, graph.num_edges, CHUNK):
        at = slice(begin, min(begin + CHUNK, graph.num_edges))
        yield at, graph.col[at], csr_rows(graph.rowptr, at.start, at.stop)


def loop_counts(graph: Graph) -> Tensor:
    """The number of self-loops of each destination, int64. Synchronises."""
    count = torch.zeros(graph.num_dst, dtype=torch.int64, device=graph.col.device)
    for _, src, dst in edge_chunks(graph):
        loops = dst[src == dst]
        count.index_add_(0, loops, torch.ones_like(loops, dtype=torch.int64))
    return count


def _without_loops(graph: Graph) -> tuple[Tensor, Tensor]:
    count = loop_counts(graph)
    num_kept = graph.num_edges - int(count.sum())
    col, end = graph.col.new_empty(num_kept), 0
    for _, src, dst in edge_chunks(graph):
        kept = src[src != dst]
        begin, end = end, end + kept.size(0)
        col[begin:end] = kept
    before = pad(count.cumsum(0), (1, 0))
    return (graph.rowptr - before).to(graph.rowptr.dtype), col
