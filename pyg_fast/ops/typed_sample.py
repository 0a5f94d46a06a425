"""Mini-batches of sampled neighbours in graphs with several types, with times, or with a subgraph
for each seed."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ._library import fake, ops
from .node_map import NodeMap

#: Most types of nodes and edges: their counts must fit the shared memory of a GPU.
MOST_TYPES = 4096

_MOST_EDGES = 2**31 - 1  # of a mini-batch
_MOST_GUESSED = 2**26  # most edges to allocate before their number is known
_MOST_HASHED = 2**23  # the same if ids are hashed: the table must be cleared for each batch
_MOST_BOUNDS = 64  # that are kept
_ALIGNMENT = 4  # entries: kernels read four int32 at once

Ints = npt.NDArray[np.int64]
T = TypeVar('T')


class Types(NamedTuple):
    """The types of nodes and edges of a graph. All nodes are numbered together, type by type; a row
    of the graph is a pair of an edge type and a node of the type of its destinations.

    `first_node` has the number of nodes as a last entry; `ends` are the types of sources and
    destinations of each edge type.
    """

    first_node: tuple[int, ...]
    size: Ints  # number of nodes of each type
    ends: tuple[tuple[int, int], ...]
    num_edges: Ints
    longest: Ints  # the most edges of a row
    table: Tensor  # as kernels read it, on the device
    src: Ints  # the first of `ends`
    dst: Ints  # the second of them

    @classmethod
    def of(
        cls, num_nodes: Sequence[int], ends: Sequence[tuple[int, int]], num_edges: Sequence[int],
        longest: Sequence[int], has_time: Sequence[bool], has_weight: Sequence[bool],
        device: torch.device,
    ) -> 'Types':  # fmt: skip
        """The types of a graph whose node types have `num_nodes` nodes."""
        first_node = (0, *np.cumsum(np.array(num_nodes, dtype=np.int64)).tolist())
        rows = [num_nodes[dst] for _, dst in ends]
        first_row = np.cumsum([0, *rows])[: len(rows)].tolist()
        table = [
            (row, src, dst, first_node[dst], timed, weighted)
            for row, (src, dst), timed, weighted in zip(
                first_row, ends, has_time, has_weight, strict=True
            )
        ]
        return cls(
            first_node, _ints(num_nodes), tuple(ends), _ints(num_edges), _ints(longest),
            torch.tensor(table, dtype=torch.int64, device=device).view(len(ends), 6),
            *(_ints([end[k] for end in ends]) for k in range(2)),
        )  # fmt: skip

    @property
    def num_nodes(self) -> int:
        return self.first_node[-1]

    def sizes(self) -> list[int]:
        """The number of nodes of each type."""
        return self.size.tolist()


def _ints(values: Sequence[int]) -> Ints:
    return np.array(values, dtype=np.int64)


class TypedGraph(NamedTuple):
    """A graph with types: row pointers, sources and positions in each type, and what chooses among
    the edges of a row, which ascend by `time`."""

    types: Types
    rowptr: Tensor
    col: Tensor
    perm: Tensor | None
    weight: Tensor | None  # by :func:`~pyg_fast.ops.neighbor_sample.sampling_weight`
    time: Tensor | None  # int64


class TypedSeeds(NamedTuple):
    """Seeds, by node type. `root` numbers the subgraphs, one for each seed; None: one for all.
    `time` is that of each subgraph.

    With `counts`, the numbers of seeds on the device, `sizes` are upper bounds of them, and what
    follows the seeds in `nodes` must repeat them.
    """

    nodes: Tensor  # int64, in the numbering of all nodes
    sizes: tuple[int, ...]  # number of seeds of each type
    root: Tensor | None = None  # int32
    time: Tensor | None = None  # int64
    counts: Tensor | None = None  # int64


class _Bound(NamedTuple):
    """Upper bounds for a hop."""

    edges: int
    new: Ints  # by type, the nodes that it finds
    num_new: int
    work: int  # of the next hop


class Rules(NamedTuple):
    """Which edges of a graph to draw: fan-outs by hop and edge type, -1: all."""

    fanouts: tuple[tuple[int, ...], ...]
    on_device: tuple[Tensor, ...]  # the same by hop, int64
    arrays: tuple[Ints, ...]  # and in NumPy
    #: Of hops, by their number and the numbers of seeds, which are the same in most batches.
    bounds: dict[tuple[int, tuple[int, ...]], _Bound]
    replace: bool = False
    last: bool = False  # only the latest edges
    max_age: int | None = None
    longest: tuple[int | None, ...] = ()  # the most edges of a row by type; None: no bound

    @classmethod
    def of(
        cls, fanouts: Sequence[Sequence[int]], device: torch.device, replace: bool = False,
        last: bool = False, max_age: int | None = None,
    ) -> 'Rules':  # fmt: skip
        table = torch.tensor(fanouts, dtype=torch.int64, device=device).view(len(fanouts), -1)
        longest = [
            None if min(by_hop) < 0 else max(by_hop) for by_hop in zip(*fanouts, strict=True)
        ]
        return cls(
            tuple(map(tuple, fanouts)), table.unbind(), tuple(map(_ints, fanouts)), {}, replace,
            last, max_age, tuple(longest),
        )  # fmt: skip


class TypedSubgraph(NamedTuple):
    """A mini-batch: by node type its nodes, as numbers in their type, and the roots of the
    subgraphs; by edge type its edges, sorted by destination.

    The tensors of all types are parts of one, which starts at multiples of 16 bytes.
    """

    n_id: Sequence[Tensor]
    batch: Sequence[Tensor] | None
    edge_index: Sequence[Tensor]
    rowptr: Sequence[Tensor]
    col: Sequence[Tensor]
    e_id: Sequence[Tensor]
    num_sampled_nodes: Sequence[list[int]]
    num_sampled_edges: Sequence[list[int]] | None
    indptr: Sequence[Tensor]  # as rowptr, int64
    wholes: tuple[Tensor, ...]  # of which the others are parts; none if they are not
    hops: tuple[Ints, Ints] | None  # as num_sampled_nodes and num_sampled_edges: nobody writes them


class Parts(Sequence[T]):
    """The parts of something by type, made when one is read. Until then there is no object for each
    type, which takes time to make and more in garbage collections."""

    def __init__(self, count: int, make: Callable[..., list[T]], *args: object) -> None:
        self._count, self._make, self._args = count, make, args
        self._parts: list[T] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k):  # type: ignore[no-untyped-def]
        return self._all()[k]

    def __iter__(self) -> Iterator[T]:
        return iter(self._all())

    def _all(self) -> list[T]:
        # No cached_property: before Python 3.12 all threads share its lock.
        if self._parts is None:
            self._parts = self._make(*self._args)
        return self._parts


def sample_typed(
    graph: TypedGraph, seeds: TypedSeeds, rules: Rules, seed: int, node_map: NodeMap,
    induced: bool = False,
) -> TypedSubgraph:  # fmt: skip
    """Samples edges around seeds hop by hop, and numbers their nodes in order of first occurrence,
    as pyg-lib does. With one type and no time, it draws what
    :func:`~pyg_fast.ops.neighbor_sample.sample_subgraph` draws.

    The map is one of all nodes or, for a subgraph per seed, a hashed one without a limit. On a GPU
    it waits once, for the sizes of the result, and once in each hop that would need too much memory
    in advance.

    Args:
        graph: The graph; it may be in pinned host memory.
        seeds: The seeds, in range.
        rules: Which edges to draw.
        seed: Of the random numbers; the same one gives the same batch on a CPU and a GPU.
        node_map: The map.
        induced: Take all edges between the sampled nodes; not for a subgraph per seed.
    """
    batch = _TypedBatch(graph, seeds, rules, node_map)
    for hop in range(len(rules.fanouts)):
        batch.run(hop, seed)
    return batch.take_induced() if induced else batch.take()


class _TypedBatch:
    """A mini-batch during sampling.

    It allocates the largest possible size if that is not too much; then it need not synchronise.
    """

    def __init__(
        self, graph: TypedGraph, seeds: TypedSeeds, rules: Rules, node_map: NodeMap
    ) -> None:
        self.graph, self.types, self.seeds = graph, graph.types, seeds
        self.rules, self.map = rules, node_map
        self.num_seeds = seeds.nodes.numel()
        self.device = seeds.nodes.device
        self.knows_sizes = not seeds.nodes.is_cuda  # without synchronisation
        self.new = _ints(seeds.sizes)  # upper bounds by type: nodes of the last hop
        self.is_exact = False  # whether these depend on more than the numbers of seeds
        self.max_nodes, self.max_edges, self.max_work = self.num_seeds, 0, 0
        self.counts = torch.from_numpy(self._first_counts()).to(self.device, non_blocking=True)
        if seeds.counts is not None:
            self.counts[1 : len(seeds.sizes) + 1] = seeds.counts.cumsum(0)
            work = seeds.counts[self.types.table[:, 2]].cumsum(0)
            self.counts[self.of_work][1 : work.numel() + 1] = work
        self.table = node_map.table(self.num_seeds)
        self.stamp = node_map.next_stamp()
        self._reserve()
        self._reserve_rows()
        self.sizes = len(rules.fanouts), len(self.types.first_node) - 1, self.types.num_nodes
        ops.begin_typed.default(
            seeds.nodes, seeds.root, self.n_id, self.root, self.counts, self.types.table,
            self.table, self.local, self.rowptr, self.stamp, *self.sizes,
        )  # fmt: skip

    def _first_counts(self) -> Ints:
        """What kernels count, see params/typed_sample.h: of the seeds known, of the hops zero."""
        hops, nodes, edges = (
            len(self.rules.fanouts), len(self.types.first_node) - 1, len(self.types.ends)
        )  # fmt: skip
        before = (hops + 1) * nodes + 1
        work = before + (hops + 1) * nodes
        drawn = work + (hops + 1) * edges + 1
        first_new = drawn + hops * edges + 1
        self.of_nodes, self.of_before = slice(0, before), slice(before, work)
        self.of_work, self.of_edges = slice(work, drawn), slice(drawn, first_new)
        out = np.zeros(first_new + edges, dtype=np.int64)
        self.new.cumsum(out=out[1 : nodes + 1])
        self.new[self.types.dst].cumsum(out=out[work + 1 : work + edges + 1])
        self.new_work = int(out[work + edges])  # an upper bound for the next hop
        return out

    def _reserve(self) -> None:
        most = self.num_seeds + self.max_edges
        if most >= _MOST_EDGES:
            raise ValueError(
                f"a mini-batch may have {_MOST_EDGES} edges, got {most}: lower 'num_neighbors' or "
                f'take fewer seeds'
            )
        scratch = self.map.scratch
        self.n_id = scratch('n_id', self.max_nodes, torch.int64)
        has_roots = self.seeds.root is not None
        self.root = scratch('root', self.n_id.numel(), torch.int32) if has_roots else None
        self.neighbor = scratch('neighbor', self.max_edges, torch.int64)
        size = self.neighbor.numel()
        self.dst = scratch('dst', size, torch.int32)
        self.e_id = scratch('e_id', size, torch.int64)
        self.local = scratch('local', self.num_seeds + size, torch.int32)

    def _reserve_rows(self) -> None:
        self.rowptr = self.map.scratch('rowptr', self.max_work + 1, torch.int32)

    def run(self, hop: int, seed: int) -> None:
        """Samples a hop."""
        graph, types, rules, counts = self.graph, self.types, self.rules, self.counts
        fanouts, fanout = rules.fanouts[hop], rules.on_device[hop]
        max_work = self.new_work
        self.max_work += max_work
        self._reserve_rows()
        max_age = -1 if rules.max_age is None else rules.max_age
        time = self.seeds.time if graph.time is not None else None
        hops, node_types, _ = self.sizes
        ops.typed_counts.default(
            graph.rowptr, graph.weight, graph.time, time, types.table, fanout, self.n_id,
            self.root, counts, self.rowptr, hops, node_types, hop, rules.replace, rules.last,
            max_age, max_work,
        )  # fmt: skip
        max_edges = self._grow(hop)
        ops.typed_neighbors.default(
            graph.rowptr, graph.col, graph.perm, graph.weight, graph.time, time, types.table,
            fanout, self.n_id, self.root, counts, self.rowptr, self.neighbor, self.dst, self.e_id,
            self.table, self.stamp, self.num_seeds, *self.sizes, hop, rules.replace, rules.last,
            max_age, seed, max(fanouts), -1 in fanouts, max_work, max_edges,
        )  # fmt: skip
        ops.append_typed.default(
            types.table, self.rowptr, self.neighbor, self.n_id, self.root, counts, self.table,
            self.local, self.stamp, self.num_seeds, *self.sizes, hop, max_edges,
        )  # fmt: skip

    def _grow(self, hop: int) -> int:
        """Allocates for the edges of a hop and the nodes at their ends; returns how many edges."""
        bound = None if self.knows_sizes else self._bound(hop)
        if bound is None:
            bound, self.is_exact = self._bound_of(self._read_sizes(hop)), True
        self.new, self.new_work = bound.new, bound.work
        self.max_edges += bound.edges
        self.max_nodes += bound.num_new
        self._reserve()
        self._fit_table(hop)
        return bound.edges

    def _bound(self, hop: int) -> _Bound | None:
        """Upper bounds before the numbers of the hop are known; None: they are too large."""
        key, known = (hop, self.seeds.sizes), self.rules.bounds
        found = None if self.is_exact else known.get(key)
        if found is None:
            edges = self._most_edges(hop)
            guessed = _MOST_HASHED if self.map.hashed else _MOST_GUESSED
            # First each by itself: the sum of large bounds may not fit.
            if self.max_edges + int(np.minimum(edges, guessed).sum()) >= guessed:
                return None
            found = self._bound_of(edges)
            if not self.is_exact and len(known) < _MOST_BOUNDS:
                known[key] = found
        return found

    def _bound_of(self, edges: Ints) -> _Bound:
        types = self.types
        new = np.bincount(types.src, edges, self.sizes[1]).astype(np.int64)
        if self.root is None:  # distinct nodes
            new = np.minimum(new, types.size)
        return _Bound(int(edges.sum()), new, int(new.sum()), int(new[types.dst].sum()))

    def _most_edges(self, hop: int) -> Ints:
        """Upper bounds of the edges of each type."""
        types, replace, fanout = self.types, self.rules.replace, self.rules.arrays[hop]
        of_row = fanout * (types.longest > 0) if replace else np.minimum(fanout, types.longest)
        most = self.new[types.dst] * np.where(fanout < 0, types.longest, of_row)
        is_distinct = self.root is None and hop > 0 and not replace
        return np.minimum(most, types.num_edges) if is_distinct else most

    def _read_sizes(self, hop: int) -> Ints:
        """The edges of each type of this hop; makes the bounds of earlier hops exact."""
        num_types, num_node_types = len(self.types.ends), self.sizes[1]
        work = self.counts[self.of_work][: (hop + 1) * num_types + 1]
        first_edge = self.rowptr[work[hop * num_types :]]
        num_nodes = self.counts[(hop + 1) * num_node_types]
        sizes = torch.cat([first_edge.long(), work[-1:], num_nodes.view(1)]).tolist()
        self.max_edges, self.max_work, self.max_nodes = sizes[0], sizes[-2], sizes[-1]
        return np.diff(sizes[:-2])

    def _fit_table(self, hop: int) -> None:
        if not self.map.hashed:
            return  # It has an entry for each node.
        table = self.map.table(self.max_nodes)
        if table is self.table:
            return
        self.table = table  # The hashed table was too small.
        seeds, root = self.seeds.nodes, self.seeds.root
        keys = seeds if root is None else root.long() * self.types.num_nodes + seeds
        done = int(self.counts[self.of_edges][hop * len(self.types.ends)])
        ops.relabel(torch.cat([keys, self.neighbor[:done]]), table, self.stamp)

    def take(self) -> TypedSubgraph:
        """What was sampled."""
        hops, node_types, _ = self.sizes
        num_types = len(self.types.ends)
        counts = self.counts.cpu().numpy()
        node_ends, edge_ends = counts[self.of_nodes], counts[self.of_edges]
        nodes = (node_ends[1:] - node_ends[:-1]).reshape(hops + 1, node_types)
        edges = (edge_ends[1:] - edge_ends[:-1]).reshape(hops, num_types)
        before = counts[self.of_before].reshape(hops + 1, node_types)
        total, count = nodes.sum(0), edges.sum(0)
        first = total.cumsum() - total
        node_shift = first + before - node_ends[:-1].reshape(nodes.shape)
        out_edges = _aligned(count)
        done = edges.cumsum(0) - edges
        edge_shift = out_edges[:-1] + done - edge_ends[:-1].reshape(edges.shape)
        rows = total[self.types.dst] + 1
        out_rows = _aligned(rows)
        layout = np.concatenate([
            self.types.first_node[:-1], node_shift.ravel(), edge_shift.ravel(), out_edges[:-1],
            count, out_rows[:-1],
        ])  # fmt: skip
        n_id, root, rowptr, col, ends, e_id = ops.take_typed.default(
            self.types.table, self.counts,
            torch.from_numpy(layout).to(self.device, non_blocking=True), self.n_id, self.root,
            self.rowptr, self.neighbor, self.dst, self.e_id, self.table, self.local, self.stamp,
            hops, node_types, int(node_ends[-1]), int(out_rows[-1]), int(edge_ends[-1]),
            int(out_edges[-1]),
        )  # fmt: skip
        sizes, of_edges, of_rows = (
            total.tolist(), _lengths(out_edges, count), _lengths(out_rows, rows)
        )  # fmt: skip
        indptr = rowptr.long()
        return TypedSubgraph(
            n_id.unsafe_split_with_sizes(sizes),
            None if self.root is None else root.unsafe_split_with_sizes(sizes),
            Parts(num_types, _cut_pairs, ends, out_edges, count),
            Parts(num_types, _cut, rowptr, of_rows), Parts(num_types, _cut, col, of_edges),
            Parts(num_types, _cut, e_id, of_edges), Parts(node_types, np.ndarray.tolist, nodes.T),
            Parts(num_types, np.ndarray.tolist, edges.T), Parts(num_types, _cut, indptr, of_rows),
            (n_id, *([] if self.root is None else [root]), rowptr, indptr, col, ends, e_id),
            (nodes.T, edges.T),
        )  # fmt: skip

    def take_induced(self) -> TypedSubgraph:
        """All edges between the sampled nodes."""
        sampled = self.take()
        dst = [dst for _, dst in self.types.ends]
        rows_of_type = [self.types.sizes()[d] for d in dst]
        first_row = np.cumsum([0, *rows_of_type]).tolist()
        rows = torch.cat([sampled.n_id[d] + row for row, d in zip(first_row, dst, strict=False)])
        graph = self.graph
        pointers = ops.count_induced(graph.rowptr, graph.col, rows, self.table, self.stamp)
        sizes = [sampled.n_id[d].numel() for d in dst]
        ends = pointers[np.cumsum([0, *sizes]).tolist()].tolist()
        if ends[-1] >= _MOST_EDGES:
            raise ValueError(f'a mini-batch may have {_MOST_EDGES} edges, got {ends[-1]}')
        col, edge_index, e_id = ops.induced_edges(
            graph.rowptr, graph.col, graph.perm, rows, pointers, self.table, self.local,
            self.stamp, ends[-1],
        )  # fmt: skip
        edges, indptr, cols, e_ids, row = [], [], [], [], 0
        for size, begin, end in zip(sizes, ends, ends[1:], strict=False):
            # Copies: kernels read them at multiples of 16 bytes.
            source, target = edge_index[:, begin:end]
            edges.append(torch.stack([source, target - row]))
            indptr.append(pointers[row : row + size + 1] - begin)
            cols.append(col[begin:end].clone())
            e_ids.append(e_id[begin:end].clone())
            row += size
        return sampled._replace(
            edge_index=edges, rowptr=[part.int() for part in indptr], col=cols, e_id=e_ids,
            num_sampled_edges=None, indptr=indptr, wholes=(), hops=None,
        )  # fmt: skip


def _aligned(sizes: Ints) -> Ints:
    """Where parts of these sizes begin, each at a multiple of 16 bytes, and where the last ends."""
    out = np.zeros(len(sizes) + 1, dtype=np.int64)
    (-(-sizes // _ALIGNMENT) * _ALIGNMENT).cumsum(out=out[1:])
    return out


def _lengths(starts: Ints, sizes: Ints) -> list[int]:
    """Of each of the parts that begin at `starts`, whose last is the end, the size and how much
    pads it."""
    out = np.empty(2 * len(sizes), dtype=np.int64)
    out[::2], out[1::2] = sizes, starts[1:] - starts[:-1] - sizes
    return out.tolist()


def _cut(whole: Tensor, lengths: list[int]) -> list[Tensor]:
    """The parts of these :func:`_lengths`, without what pads them."""
    # Without what autograd keeps of views: these hold integers.
    return list(whole.unsafe_split_with_sizes(lengths)[::2])


def _cut_pairs(whole: Tensor, begin: Ints, count: Ints) -> list[Tensor]:
    """The lists of edges of all types, whose numbers of sources and destinations begin at twice the
    number of edges before."""
    return [
        whole.as_strided((2, n), (max(n, 1), 1), 2 * first)
        for first, n in zip(begin.tolist(), count.tolist(), strict=False)
    ]


@fake('take_typed')
def _take_typed_fake(
    n_id: Tensor, root: Tensor | None, dst: Tensor, num_nodes: int, num_rows: int, room: int
) -> tuple[Tensor, ...]:
    return (
        n_id.new_empty(num_nodes),
        n_id.new_empty(0 if root is None else num_nodes),
        dst.new_empty(num_rows),
        dst.new_empty(room),
        n_id.new_empty(2 * room),
        n_id.new_empty(room),
    )


for _op in ('begin_typed', 'typed_counts', 'typed_neighbors', 'append_typed'):
    fake(_op)(lambda: None)  # These ops only write to their arguments.
