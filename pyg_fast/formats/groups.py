"""Groups of edges, and graphs that have them."""

from ..ops.graph import Graph, set_group_sizes
from ..ops.groups import Groups, groups_of

__all__ = ['Groups', 'groups_of', 'set_group_sizes', 'with_groups']


def with_groups(
    graph: Graph, size: int | None, t_size: int | None = None, atomic: bool = False
) -> Graph:
    """As :meth:`~pyg_fast.ops.Graph.with_groups`."""
    return graph.with_groups(size, t_size, atomic)
