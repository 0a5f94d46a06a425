"""Nodes that mini-batches share."""

from collections.abc import Sequence
from itertools import accumulate, combinations

import torch
from torch import Tensor

from ._ids import check_ids, check_range, fitting_map
from ._library import fake, ops, reference
from ._numbers import check_number
from .node_map import NodeMap

_MOST_BATCHES = 32  # at once


def match(
    n_id: Tensor, previous: Tensor, num_nodes: int, *, node_map: NodeMap | None = None
) -> Tensor:
    r"""Finds the nodes of a mini-batch that were in the previous one, whose features need not be
    fetched again, as in the `"FastGL: A GPU-Efficient Framework for Accelerating Sampling-Based GNN
    Training at Large Scale" <https://arxiv.org/abs/2409.14939>`_ paper.

    .. math::
        \textrm{out}_i = \begin{cases}
            \min \{ j : \textrm{previous}_j = \textrm{n\_id}_i \} & \textrm{if there is any} \\
            -1 & \textrm{otherwise}
        \end{cases}

    Nothing is sorted: the nodes of one batch are written to a map, and those of the other are
    looked up in it.

    Args:
        n_id (Tensor): The nodes of a mini-batch :math:`(N)`, of any integer dtype.
        previous (Tensor): Those of the previous one :math:`(M)`, on the same device. If a node
            repeats, as seeds may, its first position counts.
        num_nodes (int): Number of nodes of the graph; all ids are below it.
        node_map (NodeMap, optional): A map of :obj:`num_nodes` nodes to reuse between calls, which
            is faster. (default: :obj:`None`)

    Returns:
        Tensor: The position in :obj:`previous` of each node, or -1 :math:`(N)`, int64.

    Raises:
        TypeError: If :obj:`n_id` or :obj:`previous` does not hold integers, or :obj:`num_nodes` is
            not an integer.
        ValueError: If a shape, a device, :obj:`num_nodes` or :obj:`node_map` does not fit.
        IndexError: If a node is negative or too large. On CUDA the check would synchronise, so it
            is skipped if a :obj:`node_map` is given; the result for such a node is -1.
    """
    check_ids('n_id', n_id)
    check_ids('previous', previous, n_id.device)
    check_number('num_nodes', num_nodes)
    if node_map is None or not n_id.is_cuda:
        check_range('n_id', n_id, num_nodes)
        check_range('previous', previous, num_nodes)
    node_map = fitting_map(node_map, num_nodes, previous.numel(), n_id.device)
    table = node_map.table(previous.numel())
    return ops.match(n_id.long(), previous.long(), table, node_map.next_stamp(), num_nodes)


def match_degree(
    n_ids: Sequence[Tensor], num_nodes: int, *, node_map: NodeMap | None = None
) -> Tensor:
    r"""The share of nodes that each pair of mini-batches has in common, by which `FastGL
    <https://arxiv.org/abs/2409.14939>`_ orders them:

    .. math::
        \textrm{out}_{a,b} = \frac{|\mathcal{V}_a \cap \mathcal{V}_b|}
            {\min(|\mathcal{V}_a|, |\mathcal{V}_b|)}

    of the sets :math:`\mathcal{V}` of their nodes: a repeated node counts once. Zero if a batch
    has no nodes. The counts are exact, in any order of summation.

    Args:
        n_ids (list of Tensor): The nodes of each mini-batch, of any integer dtype.
        num_nodes (int): Number of nodes of the graph; all ids are below it.
        node_map (NodeMap, optional): As in :func:`match`. (default: :obj:`None`)

    Returns:
        Tensor: float64, :math:`(B, B)` for :math:`B` mini-batches, on their device.

    Raises:
        TypeError: If :obj:`n_ids` is not a list of integer tensors, or :obj:`num_nodes` not an
            integer.
        ValueError: If there are no mini-batches, or a shape, a device, :obj:`num_nodes` or
            :obj:`node_map` does not fit.
        IndexError: If a node is negative or too large, checked as in :func:`match`; otherwise such
            a node is not counted.
    """
    if not isinstance(n_ids, Sequence):
        raise TypeError(f"'n_ids' must be a list of tensors, got {type(n_ids).__name__}")
    if len(n_ids) == 0:
        raise ValueError("'n_ids' must hold at least one tensor, got none")
    for k, n_id in enumerate(n_ids):
        check_ids(f'n_ids[{k}]', n_id, None if k == 0 else n_ids[0].device)
    check_number('num_nodes', num_nodes)
    if node_map is None or not n_ids[0].is_cuda:
        for k, n_id in enumerate(n_ids):
            check_range(f'n_ids[{k}]', n_id, num_nodes)
    most = sum(n_id.numel() for n_id in n_ids)
    node_map = fitting_map(node_map, num_nodes, most, n_ids[0].device)
    count = _count_shared(n_ids, node_map)
    size = count.diagonal()
    return count.double() / torch.minimum(size.view(-1, 1), size).clamp(min=1)


def _count_shared(n_ids: Sequence[Tensor], node_map: NodeMap) -> Tensor:
    """The numbers of distinct nodes that two batches share."""
    num_batches = len(n_ids)
    if num_batches <= _MOST_BATCHES:
        ptr = torch.tensor([0, *accumulate(n_id.numel() for n_id in n_ids)])
        ids = torch.cat([n_id.long() for n_id in n_ids])
        table = node_map.table(ids.numel())
        return ops.match_degree(ids, ptr, table, node_map.next_stamp(), node_map.num_nodes)
    count = torch.empty(num_batches, num_batches, dtype=torch.int64, device=n_ids[0].device)
    half = _MOST_BATCHES // 2
    halves = [range(k, min(k + half, num_batches)) for k in range(0, num_batches, half)]
    for a, b in combinations(halves, 2):
        batches = [*a, *b]
        at = torch.tensor(batches, device=count.device)
        count[at.view(-1, 1), at] = _count_shared([n_ids[k] for k in batches], node_map)
    return count


@fake('match')
def _match_fake(n_id: Tensor) -> Tensor:
    return torch.empty_like(n_id, memory_format=torch.contiguous_format)


@fake('match_degree')
def _match_degree_fake(ids: Tensor, ptr: Tensor) -> Tensor:
    return ids.new_empty(ptr.size(0) - 1, ptr.size(0) - 1)


@reference('match')
def _match_reference(
    n_id: Tensor, previous: Tensor, map: Tensor, stamp: int, num_nodes: int
) -> Tensor:
    ids = previous.tolist()
    row = {node: k for k, node in reversed(list(enumerate(ids)))}
    return n_id.new_tensor([row.get(node, -1) for node in n_id.tolist()])


@reference('match_degree')
def _match_degree_reference(
    ids: Tensor, ptr: Tensor, map: Tensor, stamp: int, num_nodes: int
) -> Tensor:
    batches = [set(batch.tolist()) for batch in ids.tensor_split(ptr[1:-1])]
    return ids.new_tensor([[len(a & b) for b in batches] for a in batches])
