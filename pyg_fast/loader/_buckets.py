"""The sizes to which a loader of graphs rounds up those of its batches."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ._levels import Ints, Padding

_MOST_BUCKETS = 6
# A sum of shuffled graphs that lies so many deviations above its mean is as good as never seen.
_DEVIATIONS = 4.0
_NUM_SAMPLES = 2000
_NUM_CANDIDATES = 64
# So that no edge of the padding is a loop.
_LEAST_NODES = 2


class BatchSizes(NamedTuple):
    """The numbers of nodes and of edges of some batches with the same number of graphs."""

    num_nodes: Ints
    num_edges: Ints


class Bucket(NamedTuple):
    """The size of a padded batch."""

    num_nodes: int
    num_edges: int


class Buckets(NamedTuple):
    """The sizes of padded batches.

    Args:
        num_graphs: The number of graphs of a batch; others are not padded.
        sizes: The buckets, each larger than the one before.
        overhead: The mean share of nodes or of edges that are padding, of which there are more.
    """

    num_graphs: int
    sizes: tuple[Bucket, ...]
    overhead: float

    def fit(self, num_nodes: int, num_edges: int) -> Padding | None:
        """What fills up a batch to the smallest bucket that holds it; None: there is none."""
        for bucket in self.sizes:
            extra = Padding(bucket.num_nodes - num_nodes, bucket.num_edges - num_edges)
            if extra.num_nodes >= _LEAST_NODES and extra.num_edges >= 0:
                return extra
        return None


def sum_batches(sizes: Ints, ids: Ints, batch_size: int) -> Ints:
    """The sums over whole batches of graphs in this order."""
    whole = len(ids) // batch_size * batch_size
    return sizes[ids[:whole]].reshape(-1, batch_size).sum(1)


def sample_batches(num_nodes: Ints, num_edges: Ints, batch_size: int) -> BatchSizes:
    """The sizes of batches of shuffled graphs; the same ones in every process."""
    generator, count = np.random.default_rng(0), len(num_nodes)
    found: list[tuple[Ints, Ints]] = []
    for _ in range(-(-_NUM_SAMPLES * batch_size // count)):
        ids = generator.permutation(count)
        found.append((
            sum_batches(num_nodes, ids, batch_size), sum_batches(num_edges, ids, batch_size)
        ))  # fmt: skip
        if sum(len(nodes) for nodes, _ in found) >= _NUM_SAMPLES:
            break
    return BatchSizes(*(np.concatenate(each) for each in zip(*found, strict=True)))


def choose_buckets(seen: BatchSizes, num_graphs: int, most: Bucket | None) -> Buckets:
    """The buckets that pad batches of such sizes least.

    Args:
        seen: The sizes of some batches.
        num_graphs: The number of graphs of each.
        most: The size of the largest possible batch, if others than those seen may come.
    """
    mean = np.array([each.mean() for each in seen])
    deviation = np.array([each.std() for each in seen])
    # By how many deviations a bucket must be larger than the mean to hold a batch.
    scale = np.where(deviation > 0, deviation, 1)
    load = ((np.stack(seen, 1) - mean) / scale).max(1)
    top = float(load.max()) if most is None else max(float(load.max()), _DEVIATIONS)
    limits = _choose_limits(load, top)
    sizes: list[Bucket] = []
    for limit in limits:
        nodes, edges = (int(x) for x in np.ceil(mean + limit * deviation - 1e-6))
        if most is not None:
            nodes, edges = min(nodes, most.num_nodes), min(edges, most.num_edges)
        bucket = _distinct(nodes + _LEAST_NODES, edges, num_graphs + 1)
        if bucket not in sizes:
            sizes.append(bucket)
    buckets = Buckets(num_graphs, tuple(sizes), 0.0)
    return buckets._replace(overhead=_overhead(buckets, seen))


def _distinct(num_nodes: int, num_edges: int, num_graphs: int) -> Bucket:
    """Numbers of nodes and edges that differ from each other and from that of the graphs."""
    if num_nodes == num_graphs:
        num_nodes += 1
    while num_edges in (num_nodes, num_graphs):
        num_edges += 1
    return Bucket(num_nodes, num_edges)


def _choose_limits(load: npt.NDArray[np.float64], top: float) -> list[float]:
    """The limits of the buckets with the smallest mean, if each load goes to the next limit above
    it: by dynamic programming over quantiles."""
    inner = np.unique(np.quantile(load, np.linspace(0, 1, _NUM_CANDIDATES)))
    limits = np.append(inner[inner < top], top)
    below = np.searchsorted(np.sort(load), limits, side='right')  # the number of loads up to each
    cost = below * limits  # with one bucket up to each limit
    before = np.zeros((_MOST_BUCKETS, len(limits)), dtype=np.int64)
    before[0] = -1
    for number in range(1, _MOST_BUCKETS):
        # With the last but one limit at `i` and the last one at `k`.
        costs = cost[:, None] + (below[None, :] - below[:, None]) * limits[None, :]
        costs[np.tril_indices(len(limits))] = np.inf
        best = costs.argmin(0)
        fewer = costs[best, np.arange(len(limits))]
        before[number] = np.where(fewer < cost, best, -2)  # -2: no better than with fewer buckets
        cost = np.minimum(cost, fewer)
    return _trace(limits, before)


def _trace(limits: npt.NDArray[np.float64], before: Ints) -> list[float]:
    place, chosen = len(limits) - 1, []
    for row in before[::-1]:
        if row[place] == -2:
            continue
        chosen.append(float(limits[place]))
        place = int(row[place])
        if place < 0:
            break
    return chosen[::-1]


def _overhead(buckets: Buckets, seen: BatchSizes) -> float:
    """The share of padding in batches of these sizes."""
    extra, total = np.zeros(2), np.zeros(2)
    for size in zip(seen.num_nodes.tolist(), seen.num_edges.tolist(), strict=True):
        padding = buckets.fit(*size)
        if padding is not None:
            extra += padding
            total += size
    return float((extra / np.maximum(total, 1)).max())
