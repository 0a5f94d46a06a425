"""Random walks, and the nodes that they visit most often."""

from torch import Tensor

from ._ids import check_csr, check_ids, check_range, seed_of
from ._library import fake, ops, reference
from ._lifetime import keep_until_read
from ._numbers import check_number, check_share
from ._reference import random_bits

MOST_VISITS = 1024  # steps of all walks from one node


def random_walk(
    rowptr: Tensor,
    col: Tensor,
    start: Tensor,
    walk_length: int,
    *,
    restart: float = 0.0,
    seed: int | None = None,
) -> Tensor:
    r"""Walks from nodes to sources of their incoming edges, drawn uniformly.

    A walk stays at a node without edges. The same seed gives the same walks on a CPU and a GPU;
    walks from the same node differ. The graph is not checked: a walk stays at a node id that is
    out of range, and no edge beyond the end of :obj:`col` is read.

    Args:
        rowptr (Tensor): Row pointer of the nodes' incoming edges :math:`(N + 1)`, int32 or int64.
        col (Tensor): Sources :math:`(|\mathcal{E}|)`, int32 or of the same dtype.
        start (Tensor): Start nodes :math:`(n)`, of any integer dtype; nodes may repeat.
        walk_length (int): The number of steps.
        restart (float): The probability that a step starts from the walk's first node instead of
            its current node. (default: :obj:`0.0`)
        seed (int, optional): Seed of the random numbers; :obj:`None`: from torch's generator.
            (default: :obj:`None`)

    Returns:
        Tensor: The node of each walk after each step, starting with its first node
        :math:`(n, \textrm{walk\_length} + 1)`, int64, on the device of :obj:`start`. The graph may
        be in pinned host memory, from which a GPU then reads the edges that it needs; it is kept
        alive until then, as in :func:`gather_rows`.

    Raises:
        TypeError: If :obj:`rowptr`, :obj:`col` or :obj:`start` does not hold integers of a
            supported dtype, or a number has the wrong type.
        ValueError: If a shape or a device does not fit, :obj:`walk_length` is negative, or
            :obj:`restart` is not a probability.
        IndexError: If a start node is negative or too large; on CUDA this check
            synchronises.
    """
    rowptr, col = _check_walk('start', start, rowptr, col, restart)
    check_number('walk_length', walk_length)
    out = ops.random_walk(rowptr, col, start.long(), walk_length, float(restart), seed_of(seed))
    keep_until_read(start.device, rowptr, col)
    return out


def pinsage_neighbors(
    rowptr: Tensor,
    col: Tensor,
    nodes: Tensor,
    num_neighbors: int,
    *,
    num_walks: int,
    walk_length: int,
    restart: float = 0.0,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The nodes that random walks visit most: the neighbourhoods of the `"Graph Convolutional
    Neural Networks for Web-Scale Recommender Systems" <https://arxiv.org/abs/1806.01973>`_ paper.

    :obj:`num_walks` walks of :obj:`walk_length` steps start at each node, as in
    :func:`random_walk`. Each step along an edge counts as a visit of its source, except visits of
    the start node. Equally often visited nodes are ordered by first visit, walk by walk. The same
    seed gives the same neighbours on a CPU and a GPU, independently of the other nodes.

    Args:
        rowptr (Tensor): Row pointer of the nodes' incoming edges :math:`(N + 1)`, int32 or int64.
        col (Tensor): Sources :math:`(|\mathcal{E}|)`, int32 or of the same dtype.
        nodes (Tensor): The nodes to find neighbours of :math:`(n)`, of any integer dtype.
        num_neighbors (int): Most neighbours per node, :math:`k`.
        num_walks (int): The number of walks per node.
        walk_length (int): The number of steps per walk; at most 1024 for all walks of a node.
        restart (float): The probability that a step starts from the walk's first node instead of
            its current node. (default: :obj:`0.0`)
        seed (int, optional): Seed of the random numbers; :obj:`None`: from torch's generator.
            (default: :obj:`None`)

    Returns:
        (Tensor, Tensor): The neighbours of each node, padded with -1 :math:`(n, k)`,
        and their numbers of visits, both int64, on the device of :obj:`nodes`. The graph may
        be in pinned host memory, as in :func:`random_walk`.

    Raises:
        TypeError, IndexError: As :func:`random_walk`.
        ValueError: If a shape or a device does not fit, a number is not positive, a node has more
            than 1024 steps, or :obj:`restart` is not a probability.
    """
    rowptr, col = _check_walk('nodes', nodes, rowptr, col, restart)
    for name, number in (
        ('num_neighbors', num_neighbors), ('num_walks', num_walks), ('walk_length', walk_length)
    ):  # fmt: skip
        check_number(name, number, 1)
    if num_walks * walk_length > MOST_VISITS:
        raise ValueError(
            f"'num_walks' times 'walk_length' must be at most {MOST_VISITS}, got {num_walks} "
            f'times {walk_length}'
        )
    out = ops.pinsage_neighbors(
        rowptr, col, nodes.long(), num_neighbors, num_walks, walk_length, float(restart),
        seed_of(seed),
    )  # fmt: skip
    keep_until_read(nodes.device, rowptr, col)
    return out


def _check_walk(
    name: str, nodes: Tensor, rowptr: Tensor, col: Tensor, restart: float
) -> tuple[Tensor, Tensor]:
    check_ids(name, nodes)
    rowptr, col = check_csr(rowptr, col, nodes.device)
    check_share('restart', restart)
    check_range(name, nodes, rowptr.numel() - 1)
    return rowptr, col


@fake('random_walk')
def _random_walk_fake(start: Tensor, walk_length: int) -> Tensor:
    return start.new_empty(start.size(0), walk_length + 1)


@fake('pinsage_neighbors')
def _pinsage_neighbors_fake(nodes: Tensor, num_neighbors: int) -> tuple[Tensor, Tensor]:
    size = nodes.size(0), num_neighbors
    return nodes.new_empty(size), nodes.new_empty(size)


@reference('random_walk')
def _random_walk_reference(
    rowptr: Tensor, col: Tensor, start: Tensor, walk_length: int, restart: float, seed: int
) -> Tensor:
    graph, out = (rowptr.tolist(), col.tolist()), []
    for key, first in enumerate(start.tolist()):
        path = [first]
        for step in range(walk_length):
            node = _next_node(graph, first, path[-1], seed, key, step, restart)
            path.append(path[-1] if node is None else node)
        out.append(path)
    return start.new_tensor(out).view(-1, walk_length + 1)


@reference('pinsage_neighbors')
def _pinsage_neighbors_reference(
    rowptr: Tensor,
    col: Tensor,
    nodes: Tensor,
    num_neighbors: int,
    num_walks: int,
    walk_length: int,
    restart: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    graph, out = (rowptr.tolist(), col.tolist()), []
    for first in nodes.tolist():
        visits: dict[int, int] = {}
        for walk in range(num_walks):
            at = first
            for step in range(walk * walk_length, (walk + 1) * walk_length):
                node = _next_node(graph, first, at, seed, first, step, restart)
                if node is not None:
                    at = node
                    visits[at] = visits.get(at, 0) + (at != first)
        visits.pop(first, None)
        most = sorted(visits.items(), key=lambda item: -item[1])[:num_neighbors]  # stable
        out.append(most + [(-1, 0)] * (num_neighbors - len(most)))
    both = nodes.new_tensor(out).view(-1, num_neighbors, 2)
    return both[:, :, 0].contiguous(), both[:, :, 1].contiguous()


def _next_node(
    graph: tuple[list[int], list[int]],
    first: int,
    node: int,
    seed: int,
    key: int,
    step: int,
    restart: float,
) -> int | None:
    """The next node of a walk; None if the node has no edges."""
    rowptr, col = graph
    if restart > 0 and ((random_bits(seed, key, 2 * step) >> 11) + 1) * 2.0**-53 <= restart:
        node = first
    degree = rowptr[node + 1] - rowptr[node]
    if degree == 0:
        return None
    return col[rowptr[node] + (random_bits(seed, key, 2 * step + 1) * degree >> 64)]
