"""Mini-batches of sampled neighbours."""

from collections.abc import Sequence
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from ._ids import check_csr, check_ids, check_map, check_range, fitting_map, is_readable, seed_of
from ._library import fake, ops, reference
from ._lifetime import keep_until_read
from ._numbers import check_flag, check_number
from ._reference import random_bits
from .node_map import NodeMap

_MOST_EDGES = 2**31 - 1  # of a mini-batch
_MOST_GUESSED = 2**26  # most edges to allocate before their number is known


class SampledSubgraph(NamedTuple):
    r"""The nodes and edges of a mini-batch.

    Shapes:
        - **n_id:** :math:`(N)`, int64: nodes of the graph; the seeds first, with repetitions, then
          the others in order of first occurrence
        - **edge_index:** :math:`(2, E)`, int64: sources and destinations as positions in
          :obj:`n_id`, sorted by destination
        - **rowptr:** :math:`(N + 1)`, **col:** :math:`(E)`, int32: the same edges as CSR, rows =
          destinations
        - **e_id:** :math:`(E)`, int64: the ids of the edges in the graph
        - **num_sampled_nodes:** per hop, the seeds first, **num_sampled_edges:** per hop;
          :obj:`None` for an induced subgraph, whose edges belong to no hop
    """

    n_id: Tensor
    edge_index: Tensor
    rowptr: Tensor
    col: Tensor
    e_id: Tensor
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int] | None


def neighbor_sample(
    rowptr: Tensor,
    col: Tensor,
    seeds: Tensor,
    num_neighbors: Sequence[int],
    *,
    perm: Tensor | None = None,
    edge_weight: Tensor | None = None,
    replace: bool = False,
    induced: bool = False,
    seed: int | None = None,
    node_map: NodeMap | None = None,
) -> SampledSubgraph:
    r"""Samples edges around seeds hop by hop, and gives their nodes local ids, as in the
    `"FastGL: A GPU-Efficient Framework for Accelerating Sampling-Based GNN Training at Large Scale"
    <https://arxiv.org/abs/2409.14939>`_ paper.

    A hop draws :math:`\min(d, k)` of the :math:`d` incoming edges of a node; every subset of this
    size has the same probability. With weights :math:`w` it draws edges one by one without
    replacement, in proportion to the weights of the remaining edges. A node is expanded once, in
    the hop after its first occurrence. One pass samples and fills the map from global to local ids.
    The same seed gives the same bits; without weights the same on a CPU and a GPU.

    The whole graph is checked at every call;
    :class:`~pyg_fast.loader.FastNeighborLoader` does so once.

    Args:
        rowptr (Tensor): Row pointer of the nodes' incoming edges :math:`(N + 1)`, int32 or int64.
        col (Tensor): Sources :math:`(|\mathcal{E}|)`, int32 or of the same dtype.
        seeds (Tensor): The seed nodes, of any integer dtype; they may repeat.
        num_neighbors (list of int): Most edges per node in each hop, from the seeds
            outwards; :obj:`-1`: all.
        perm (Tensor, optional): The id of each edge in :obj:`e_id` :math:`(|\mathcal{E}|)`.
            (default: :obj:`None`: its position)
        edge_weight (Tensor, optional): Weights :math:`(|\mathcal{E}|)`, in the order of :obj:`col`.
            Edges of weight zero are taken only by :obj:`-1`. (default: :obj:`None`)
        replace (bool): Draw with replacement: :math:`k` draws for each node with edges.
            (default: :obj:`False`)
        induced (bool): Return all edges of the graph between the sampled nodes.
            (default: :obj:`False`)
        seed (int, optional): Seed of the random numbers; :obj:`None`: from torch's generator.
            (default: :obj:`None`)
        node_map (NodeMap, optional): A map to reuse between calls, which is faster.
            (default: :obj:`None`)

    Returns:
        SampledSubgraph: On the device of :obj:`seeds`. The graph may be in pinned host memory,
        from which a GPU then reads the sampled parts; it is kept alive until then, as in
        :func:`gather_rows`.

    Raises:
        TypeError: If :obj:`rowptr`, :obj:`col`, :obj:`perm` or :obj:`seeds` do not hold integers,
            :obj:`edge_weight` no floating-point numbers, or :obj:`seed` is not an integer.
        ValueError: If a shape, a device or a number of neighbours is invalid, a weight is
            negative or not finite, or a mini-batch has more than :math:`2^{31} - 1` edges.
        IndexError: If a seed or a source is negative or too large.
    """
    fanouts = check_num_neighbors(num_neighbors)
    check_flag('replace', replace)
    check_flag('induced', induced)
    check_ids('seeds', seeds)
    rowptr, col = check_csr(rowptr, col, seeds.device)
    if perm is not None:
        perm = _check_perm(perm, rowptr, col, seeds.device)
    _check_pointers(rowptr, col.numel())
    num_nodes = rowptr.numel() - 1
    weight = None
    if edge_weight is not None:
        weight = sampling_weight(edge_weight, col, replace)
        if not is_readable(weight, seeds.device):
            weight = weight.pin_memory()
    check_range('seeds', seeds, num_nodes)
    check_range('col', col, num_nodes)
    node_map = fitting_map(node_map, num_nodes, num_nodes, seeds.device)
    out = sample_subgraph(
        rowptr, col, perm, weight, seeds.long().contiguous(), fanouts, replace, induced,
        seed_of(seed), node_map,
    )  # fmt: skip
    keep_until_read(seeds.device, rowptr, col, perm, weight)
    return out


def check_num_neighbors(num_neighbors: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """The numbers of neighbours by hop, each of them -1 or at least `least`.

    Raises:
        TypeError, ValueError: If they are not.
    """
    if not isinstance(num_neighbors, (list, tuple)):
        raise TypeError(
            f"'num_neighbors' must be a list of integers, got {type(num_neighbors).__name__}"
        )
    if len(num_neighbors) == 0:
        raise ValueError("'num_neighbors' must name at least one hop, got none")
    for number in num_neighbors:
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"'num_neighbors' must hold integers, got {type(number).__name__}")
        if number != -1 and not least <= number < 2**31:
            kind = 'positive' if least else 'non-negative'
            raise ValueError(
                f"'num_neighbors' must hold {kind} numbers or -1 (all neighbors), got {number}"
            )
    return tuple(num_neighbors)


def sampling_weight(
    edge_weight: Tensor, col: Tensor, replace: bool, name: str = 'edge_weight'
) -> Tensor:
    """Weights as the kernels read them: float64; cumulative sums for draws with replacement.
    Errors call them by `name`.

    Raises:
        TypeError, ValueError: As :func:`neighbor_sample`.
    """
    if not isinstance(edge_weight, Tensor) or not edge_weight.is_floating_point():
        got = edge_weight.dtype if isinstance(edge_weight, Tensor) else type(edge_weight).__name__
        raise TypeError(f"'{name}' must hold floating-point numbers, got {got}")
    if edge_weight.layout != torch.strided:
        raise TypeError(f"'{name}' must be a strided tensor, got {edge_weight.layout}")
    if edge_weight.shape != col.shape:
        raise ValueError(
            f"'{name}' must have shape {list(col.shape)}, got {list(edge_weight.shape)}"
        )
    if edge_weight.device != col.device:
        raise ValueError(f"'{name}' must be on {col.device}, got {edge_weight.device}")
    weight = edge_weight.detach().double()
    if not bool(((weight >= 0) & weight.isfinite()).all()):
        raise ValueError(f"'{name}' must not be negative, infinite or NaN")
    return weight.cumsum(0) if replace else weight.contiguous()


def _check_perm(perm: Tensor, rowptr: Tensor, col: Tensor, device: torch.device) -> Tensor:
    check_ids('perm', perm, col.device)
    if perm.dtype != rowptr.dtype:
        raise TypeError(f"'perm' must hold {rowptr.dtype}, as 'rowptr', got {perm.dtype}")
    if perm.shape != col.shape:
        raise ValueError(f"'perm' must have {col.numel()} entries, got {perm.numel()}")
    if not is_readable(perm, device):
        raise ValueError("'perm' must be in pinned host memory, as 'col'")
    if perm.device != device and not perm.is_contiguous():
        raise ValueError("'perm' must be contiguous in host memory")
    return perm.contiguous()


def _check_pointers(rowptr: Tensor, num_edges: int) -> None:
    if int(rowptr[0]) != 0 or int(rowptr[-1]) > num_edges or bool((rowptr.diff() < 0).any()):
        raise ValueError(f"'rowptr' must ascend from 0 to at most {num_edges}, the length of 'col'")


def sample_subgraph(
    rowptr: Tensor,
    col: Tensor,
    perm: Tensor | None,
    weight: Tensor | None,
    seeds: Tensor,
    fanouts: tuple[int, ...],
    replace: bool,
    induced: bool,
    seed: int,
    node_map: NodeMap,
    num_seeds: Tensor | None = None,
) -> SampledSubgraph:
    """:func:`neighbor_sample` of checked input: weights by :func:`sampling_weight`, nodes and
    :obj:`seed` of int64. With :obj:`num_seeds`, a number on the device, only the first ones are
    seeds, and the others must repeat them.

    On a GPU it synchronises once, for the sizes of the result, and once in each hop that would
    need too much memory in advance.
    """
    batch = _MiniBatch(rowptr, col, seeds, len(fanouts), node_map)
    if num_seeds is not None:
        batch.counts[0, 0] = num_seeds
    for hop, fanout in enumerate(fanouts):
        max_nodes, max_edges = batch.grow(hop, fanout, replace, weight)
        ops.sample_neighbors.default(
            rowptr, col, perm, weight, batch.n_id, batch.counts, batch.rowptr, batch.neighbor,
            batch.dst, batch.e_id, batch.table, batch.stamp, batch.num_seeds, hop, fanout, replace,
            seed, max_nodes, max_edges,
        )  # fmt: skip
        batch.append(hop, max_edges)
    return batch.take_induced(perm) if induced else batch.take()


class _MiniBatch:
    """A mini-batch during sampling.

    It allocates the largest possible size if that is not too much; then it need not synchronise.
    """

    def __init__(
        self, rowptr: Tensor, col: Tensor, seeds: Tensor, num_hops: int, node_map: NodeMap
    ) -> None:
        self.graph = rowptr, col
        self.map = node_map
        self.seeds = seeds
        self.num_seeds = seeds.numel()
        self.knows_sizes = not seeds.is_cuda  # without synchronisation
        self.max_nodes = self.max_new = self.num_seeds  # so far, and in the last hop
        self.max_edges = 0
        # Zeros: `grow` also copies counts of later hops.
        self.counts = torch.zeros(2, num_hops + 1, dtype=torch.int64, device=seeds.device)
        self.table = node_map.table(self.num_seeds)
        self.stamp = node_map.next_stamp()
        self._reserve()
        ops.begin_sample.default(seeds, self.n_id, self.counts, self.table, self.local, self.stamp)

    def _reserve(self) -> None:
        most = self.num_seeds + self.max_edges
        if most > _MOST_EDGES:
            raise ValueError(
                f"a mini-batch may have {_MOST_EDGES} edges, got {most}: lower 'num_neighbors' or "
                f'take fewer seeds'
            )
        scratch = self.map.scratch
        self.n_id = scratch('n_id', self.max_nodes, torch.int64)
        # As long as the longest request needs; the scratch may be larger.
        self.rowptr = scratch('rowptr', self.n_id.numel() + 1, torch.int32)
        self.neighbor = scratch('neighbor', self.max_edges, self.graph[0].dtype)
        size = self.neighbor.numel()
        self.dst = scratch('dst', size, torch.int32)
        self.e_id = scratch('e_id', size, torch.int64)
        self.local = scratch('local', self.num_seeds + size, torch.int32)

    def grow(self, hop: int, fanout: int, replace: bool, weight: Tensor | None) -> tuple[int, int]:
        """Computes the sizes of a hop and allocates: numbers of nodes and edges."""
        rowptr, col = self.graph
        ops.sample_counts.default(
            rowptr, weight, self.n_id, self.counts, self.rowptr, hop, fanout, replace, self.max_new
        )
        max_nodes = self.max_new
        max_edges = max_nodes * fanout if fanout >= 0 else _MOST_EDGES
        if hop > 0 and not replace:  # its nodes are distinct
            max_edges = min(max_edges, col.numel())
        if self.knows_sizes or self.max_edges + max_edges > _MOST_GUESSED:
            nodes, edges = self.counts[:, : hop + 2].tolist()
            max_nodes = nodes[hop] - (nodes[hop - 1] if hop > 0 else 0)
            max_edges = edges[hop + 1] - edges[hop]
            self.max_nodes, self.max_edges = nodes[hop], edges[hop]
        self.max_edges += max_edges
        self.max_new = min(max_edges, self.map.num_nodes)
        self.max_nodes += self.max_new
        self._reserve()
        self._fit_table(hop)
        return max_nodes, max_edges

    def _fit_table(self, hop: int) -> None:
        if not self.map.hashed:
            return  # It has an entry for each node.
        table = self.map.table(self.max_nodes)
        if table is not self.table:  # The hashed table was too small.
            self.table = table
            sampled = self.neighbor[: int(self.counts[1, hop])]
            ops.relabel(torch.cat([self.seeds, sampled.long()]), table, self.stamp)

    def append(self, hop: int, max_edges: int) -> None:
        """Gives local ids to the nodes that first occur in this hop."""
        ops.append_nodes.default(
            self.neighbor, self.n_id, self.counts, self.table, self.local, self.stamp,
            self.num_seeds, hop, max_edges,
        )  # fmt: skip

    def take(self) -> SampledSubgraph:
        """What was sampled."""
        nodes, edges = self.counts.tolist()
        n_id, rowptr, col, edge_index, e_id = ops.take_sample.default(
            self.n_id, self.rowptr, self.neighbor, self.dst, self.e_id, self.table, self.local,
            self.stamp, nodes[-1], nodes[-2], edges[-1],
        )  # fmt: skip
        return SampledSubgraph(
            n_id, edge_index, rowptr, col, e_id, _differences([0, *nodes]), _differences(edges)
        )

    def take_induced(self, perm: Tensor | None) -> SampledSubgraph:
        """All edges between the sampled nodes."""
        nodes = self.counts[0].tolist()
        n_id = self.n_id[: nodes[-1]].clone()
        pointers = ops.count_induced(*self.graph, n_id, self.table, self.stamp)
        num_edges = int(pointers[-1])
        if num_edges > _MOST_EDGES:
            raise ValueError(f'a mini-batch may have {_MOST_EDGES} edges, got {num_edges}')
        col, edge_index, e_id = ops.induced_edges(
            *self.graph, perm, n_id, pointers, self.table, self.local, self.stamp, num_edges
        )
        return SampledSubgraph(
            n_id, edge_index, pointers.int(), col, e_id, _differences([0, *nodes]), None
        )


def _differences(counts: list[int]) -> list[int]:
    return [after - before for before, after in zip(counts, counts[1:], strict=False)]


def relabel(
    ids: Tensor, num_ids: int | None = None, *, node_map: NodeMap | None = None
) -> tuple[Tensor, Tensor]:
    r"""Replaces ids by local ids, in order of first occurrence.

    .. math::
        \textrm{ids}_k = \textrm{n\_id}_{\textrm{local}_k}

    The id map of `FastGL <https://arxiv.org/abs/2409.14939>`_: unlike
    :func:`torch.unique`, it does not sort. Bitwise reproducible.

    Args:
        ids (Tensor): The ids :math:`(K)`, of any integer dtype.
        num_ids (int, optional): Upper bound of the ids, exclusive; :obj:`None`: the largest plus
            one. (default: :obj:`None`)
        node_map (NodeMap, optional): A map of :obj:`num_ids` nodes to reuse between calls, which is
            faster. (default: :obj:`None`)

    Returns:
        (Tensor, Tensor): :obj:`n_id`, the distinct ids, and :obj:`local`, the position of each id
        in :obj:`n_id` :math:`(K)`, both int64.

    Raises:
        TypeError: If :obj:`ids` does not hold integers.
        ValueError: If it does not have one dimension, or :math:`2^{31}` ids or more, or
            :obj:`node_map` does not fit.
        IndexError: If an id is negative or too large.
    """
    check_ids('ids', ids)
    if ids.numel() > _MOST_EDGES:
        raise ValueError(f"'ids' must have fewer than {_MOST_EDGES + 1} entries")
    check_map(node_map)
    if num_ids is None:
        num_ids = node_map.num_nodes if node_map else int(ids.max()) + 1 if ids.numel() else 0
    check_number('num_ids', num_ids)
    check_range('ids', ids, num_ids)
    node_map = fitting_map(node_map, num_ids, ids.numel(), ids.device)
    return relabel_ids(ids.long().contiguous(), node_map)


def relabel_ids(ids: Tensor, node_map: NodeMap) -> tuple[Tensor, Tensor]:
    """:func:`relabel` of checked int64 ids."""
    unique, local, count = ops.relabel(ids, node_map.table(ids.numel()), node_map.next_stamp())
    return unique[: int(count)], local


@fake('take_sample')
def _take_sample_fake(
    n_id: Tensor, dst: Tensor, num_nodes: int, num_edges: int
) -> tuple[Tensor, ...]:
    return (
        n_id.new_empty(num_nodes),
        dst.new_empty(num_nodes + 1),
        dst.new_empty(num_edges),
        n_id.new_empty(2, num_edges),
        n_id.new_empty(num_edges),
    )


@fake('count_induced')
def _count_induced_fake(n_id: Tensor) -> Tensor:
    return n_id.new_empty(n_id.size(0) + 1)


@fake('induced_edges')
def _induced_edges_fake(
    n_id: Tensor, local: Tensor, num_edges: int
) -> tuple[Tensor, Tensor, Tensor]:
    return local.new_empty(num_edges), n_id.new_empty(2, num_edges), n_id.new_empty(num_edges)


@fake('relabel')
def _relabel_fake(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return ids.new_empty(ids.size(0)), ids.new_empty(ids.size(0)), ids.new_empty(1)


for _op in ('begin_sample', 'sample_counts', 'sample_neighbors', 'append_nodes'):
    fake(_op)(lambda: None)  # These ops only write to their arguments.


@reference('neighbor_sample')
def _neighbor_sample_reference(
    rowptr: Tensor,
    col: Tensor,
    seeds: Tensor,
    fanouts: Sequence[int],
    edge_weight: Tensor | None = None,
    replace: bool = False,
    induced: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[int], list[int]]:
    """n_id, edge_index, e_id, and the numbers of nodes and edges of each hop."""
    weights = sums = None
    if edge_weight is not None:
        weights = edge_weight.double().tolist()
        sums = [0.0, *edge_weight.double().cumsum(0).tolist()]
    graph, n_id = (rowptr.tolist(), col.tolist(), weights, sums), seeds.tolist()
    local: dict[int, int] = {}
    for k, node in enumerate(n_id):
        local.setdefault(node, k)
    edges: list[tuple[int, int, int]] = []
    nodes, counts, first = [len(n_id)], [], 0
    for fanout in fanouts:
        last, before = len(n_id), len(edges)
        for dst in range(first, last):
            edges += _edges_of(graph, n_id[dst], dst, fanout, replace, seed)
        for source, _, _ in edges[before:]:
            if source not in local:
                local[source] = len(n_id)
                n_id.append(source)
        first = last
        nodes.append(len(n_id) - last)
        counts.append(len(edges) - before)
    if induced:
        every = [e for dst, node in enumerate(n_id) for e in _edges_of(graph, node, dst, -1)]
        edges = [edge for edge in every if edge[0] in local]
    src, dst, e_id = torch.tensor(
        [(local[s], d, e) for s, d, e in edges], dtype=torch.long
    ).view(-1, 3).t()  # fmt: skip
    return torch.tensor(n_id, dtype=torch.long), torch.stack([src, dst]), e_id, nodes, counts


def _edges_of(
    graph: tuple[list[int], list[int], list[float] | None, list[float] | None], node: int, dst: int,
    fanout: int, replace: bool = False, seed: int = 0,
) -> list[tuple[int, int, int]]:  # fmt: skip
    """The sampled edges of a node: source, local id of the node, and edge."""
    pointers, sources, weights, sums = graph
    begin, end = pointers[node], pointers[node + 1]
    weight = None if weights is None else weights[begin:end]
    running = None if sums is None else sums[begin : end + 1]
    edges = draw_edges(end - begin, fanout, weight, running, replace, seed, node)
    return [(sources[begin + e], dst, begin + e) for e in edges]


@reference('relabel')
def _relabel_reference(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct ids in order of first occurrence, and the position of each id."""
    place: dict[int, int] = {}
    local = [place.setdefault(i, len(place)) for i in ids.tolist()]
    return torch.tensor([*place], dtype=torch.long), torch.tensor(local, dtype=torch.long)


def draw_edges(
    degree: int,
    fanout: int,
    weight: list[float] | None,
    running: list[float] | None,
    replace: bool,
    seed: int,
    node: int,
) -> list[int]:
    """The sampled edges of a node, in order.

    `running`: for draws with replacement, the cumulative weights of all edges up to each of the
    node's edges, and the value before them.
    """
    bits = (random_bits(seed, node, k) for k in range(2**62))
    if fanout < 0 or degree == 0:
        return list(range(degree))
    if replace and running is not None:
        low, *sums = running
        last = max((e for e in range(degree) if sums[e] > (sums[e - 1] if e else low)), default=-1)
        units = (((next(bits) >> 11) + 1) * 2**-53 for _ in range(fanout if last >= 0 else 0))
        wanted = (max(low, sums[-1] - unit * (sums[-1] - low)) for unit in units)
        return [next((e for e in range(degree) if sums[e] > w), last) for w in wanted]
    if replace:
        return [next(bits) * degree >> 64 for _ in range(fanout)]
    if weight is not None:
        count = min(fanout, sum(w > 0 for w in weight))
        if count == degree:
            return list(range(degree))
        keys = [(-log(((b >> 11) + 1) * 2**-53), w) for w, b in zip(weight, bits, strict=False)]
        order = sorted((key / w, e) for e, (key, w) in enumerate(keys) if w > 0)
        return [e for _, e in order[:count]]
    if degree <= fanout:
        return list(range(degree))
    chosen: list[int] = []
    for last in range(degree - fanout, degree):
        drawn = next(bits) * (last + 1) >> 64
        chosen.append(last if drawn in chosen else drawn)
    return chosen
