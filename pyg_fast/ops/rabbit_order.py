"""Rabbit Order: nodes numbered along a hierarchy of communities."""

from torch import Tensor

from ._library import ops


def rabbit_order(rowptr: Tensor, col: Tensor) -> Tensor:
    r"""The order of `"Rabbit Order: Just-in-time Parallel Reordering for Fast Graph Analysis"
    <https://doi.org/10.1109/IPDPS.2016.110>`_, unchecked.

    In ascending order of their degrees :math:`d`, equal ones scattered, nodes and what they have
    merged with join the neighbouring community by which modularity gains most,

    .. math::
        \Delta Q_{u,v} = 2 \left( \frac{w_{u,v}}{2m} - \frac{d_u d_v}{(2m)^2} \right),

    where :math:`w` counts the edges between two, :math:`m` all of them, and a community's degree
    is the sum of its nodes'. They stay by themselves where nothing is gained. Each community then
    lists its first node and what joined it, in the order of the merges, and so on inwards; those
    of the largest degree come first, isolated nodes last.

    Edges count in both directions, duplicates each, loops not at all. Ties go to the smaller
    index, all arithmetic is exact: the order is the same everywhere. It is computed on the CPU,
    by one thread, in memory for about twice the edges.

    Args:
        rowptr (Tensor): Where each node's edges begin :math:`(N + 1)`, int32 or int64.
        col (Tensor): Their other ends :math:`(|\mathcal{E}|)`.

    Returns:
        Tensor: The node at each new position :math:`(N)`, int64, on the device of :obj:`col`.
    """
    return ops.rabbit_order(rowptr.cpu(), col.cpu()).to(col.device)
