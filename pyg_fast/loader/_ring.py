"""The edges of the graph that fills up a padded batch."""

import numpy as np

from ._levels import Padding
from ._send import Tail


def ring_of(padding: Padding, num_nodes: int, num_edges: int) -> tuple[Tail, Tail]:
    """The edges of a padding, spread over its nodes: each edge goes to a node from the next one, so
    that none is a loop.

    Args:
        padding: Its numbers of nodes and edges.
        num_nodes, num_edges: Those of the batch before it.

    Returns:
        Of all edges of the batch the sources and destinations, by destination, and by source the
        destinations and positions, undefined before the padding; and the row pointers both ways,
        zero there. All are int32.
    """
    count, extra = padding
    rows = np.arange(count + 1) * extra // count
    dst = np.repeat(np.arange(num_nodes, num_nodes + count), rows[1:] - rows[:-1])
    positions = np.arange(num_edges, num_edges + extra)
    # The edges of the last node come from the first one, and so first in the order by source.
    split = int(rows[-2])
    first = extra - split
    ends = np.empty((4, extra), dtype=np.int32)
    ends[0, :split], ends[0, split:] = dst[:split] + 1, num_nodes
    ends[1] = dst
    for row, values in ((2, dst), (3, positions)):
        ends[row, :first], ends[row, first:] = values[split:], values[:split]
    rowptr = np.empty((2, count + 1), dtype=np.int32)
    rowptr[0] = rows + num_edges
    rowptr[1, 0] = num_edges
    rowptr[1, 1:] = rows[:-1] + (first + num_edges)
    return (
        Tail(ends, num_edges + extra, is_zero_before=False),
        Tail(rowptr, num_nodes + count + 1, is_zero_before=True),
    )


def longest_row_of(padding: Padding) -> int:
    """The most edges of one of its nodes."""
    return -(-padding.num_edges // padding.num_nodes)
