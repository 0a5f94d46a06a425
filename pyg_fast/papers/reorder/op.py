"""Rabbit Order: orders nodes along a hierarchy of communities."""

import torch
from torch import Tensor

from ...ops._library import fake, ops, reference
from ...ops._reference import edge_list


def rabbit_order(rowptr: Tensor, col: Tensor) -> Tensor:
    r"""The order of `"Rabbit Order: Just-in-time Parallel Reordering for Fast Graph Analysis"
    <https://doi.org/10.1109/IPDPS.2016.110>`_, unchecked.

    In ascending order of degree :math:`d` (equal degrees in a mixed order), each node, with the
    nodes merged into it, joins the neighbouring community with the largest gain of modularity,

    .. math::
        \Delta Q_{u,v} = 2 \left( \frac{w_{u,v}}{2m} - \frac{d_u d_v}{(2m)^2} \right),

    where :math:`w` counts the edges between two communities, :math:`m` counts all edges, and a
    community's degree is the sum of its nodes' degrees. A node without a gain stays alone. Each
    community then lists its first node and the nodes that joined it, in merge order, recursively.
    Communities of the largest degree come first, isolated nodes last.

    Edges count in both directions, duplicates separately, self-loops not. Ties go to the smaller
    index, and all arithmetic is exact: the order is the same on every machine. One CPU thread
    computes it, in memory for about twice the edges.

    Args:
        rowptr (Tensor): Row pointer :math:`(N + 1)`, int32 or int64.
        col (Tensor): Columns :math:`(|\mathcal{E}|)`.

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
