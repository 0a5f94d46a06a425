"""Rabbit Order: nodes numbered along a hierarchy of communities."""

import torch
from torch import Tensor

from ._library import fake, ops, reference
from ._reference import edge_list


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
    return ops.rabbit_order(rowptr.cpu(), col.cpu().int()).to(col.device)


@fake('rabbit_order')
def _rabbit_order_fake(rowptr: Tensor) -> Tensor:
    return rowptr.new_empty(rowptr.size(0) - 1, dtype=torch.int64)


@reference('rabbit_order')
def _rabbit_order_reference(rowptr: Tensor, col: Tensor) -> Tensor:
    num_nodes = rowptr.size(0) - 1
    weight = col.new_zeros(num_nodes, num_nodes, dtype=torch.int64)
    row, source, _ = edge_list(rowptr, col, None)
    weight.index_put_((row, source), torch.ones_like(row), accumulate=True)
    weight = (weight + weight.t()).fill_diagonal_(0)
    strength = weight.sum(1)
    total = strength.sum()
    members = [[node] for node in range(num_nodes)]
    scattered = (torch.arange(num_nodes) * -0x61C8864680B583EB).argsort()
    for node in scattered[strength[scattered].argsort(stable=True)].tolist():
        gain = weight[node] * total - strength[node] * strength
        gain[weight[node] == 0] = -1
        if gain.max() <= 0:
            continue
        best = int((gain == gain.max()).nonzero()[0])
        weight[best] += weight[node]
        weight[:, best] += weight[:, node]
        weight[node] = weight[:, node] = weight[best, best] = 0
        strength[best] += strength[node]
        members[best] += members[node]
        members[node] = []
    order = strength.argsort(descending=True, stable=True).tolist()
    return torch.tensor([m for node in order for m in members[node]], dtype=torch.int64)
