"""The edges of the graph that fills up a padded batch."""

import numpy as np
import numpy.typing as npt

from ._levels import Padding

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]


def ring_of(padding: Padding, num_nodes: int, num_edges: int) -> Arrays:
    """The edges of a padding, spread over its nodes: each edge goes to a node from the next one, so
    that none is a loop.

    Args:
        padding: Its numbers of nodes and edges.
        num_nodes, num_edges: Those of the batch before it.

    Returns:
        The sources and destinations of all edges of the batch, by destination, and by source their
        destinations and positions, undefined before the padding; and the row pointers both ways,
        zero there.
    """
    count, extra = padding
    rows = np.arange(count + 1) * extra // count
    dst = np.repeat(np.arange(num_nodes, num_nodes + count), np.diff(rows))
    positions = np.arange(num_edges, num_edges + extra)
    # The edges of the last node come from the first one, and so first in the order by source.
    split = int(rows[-2])
    first = extra - split
    edges = np.empty((4, num_edges + extra), dtype=np.int32)
    ends = edges[:, num_edges:]
    ends[0, :split], ends[0, split:] = dst[:split] + 1, num_nodes
    ends[1] = dst
    for row, values in ((2, dst), (3, positions)):
        ends[row, :first], ends[row, first:] = values[split:], values[:split]
    rowptr = np.zeros((2, num_nodes + count + 1), dtype=np.int32)
    rowptr[0, num_nodes:] = rows + num_edges
    rowptr[1, num_nodes] = num_edges
    rowptr[1, num_nodes + 1 :] = rows[:-1] + (first + num_edges)
    return edges, rowptr


def longest_row_of(padding: Padding) -> int:
    """The most edges of one of its nodes."""
    return -(-padding.num_edges // padding.num_nodes)
