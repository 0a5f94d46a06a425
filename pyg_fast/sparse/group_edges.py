"""Cuts the rows of a CSR structure into groups of edges."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..ops._library import fake, ops, reference


def group_edges(rowptr: Tensor, size: int) -> tuple[tuple[Tensor, ...], int, int, Tensor]:
    """The tensors of :class:`~pyg_fast.graph.Groups`, the number of partial sums, the most groups
    of a row, and the order of the groups. Waits for the device once.

    Raises:
        ValueError: If there are more groups than the dtype of :obj:`rowptr` holds.
    """
    count = ops.count_groups(rowptr, size)
    most = count[0].diff().amax(0, keepdim=True) if count.size(1) > 1 else count[0]
    num_groups, num_long, most_groups = torch.cat([count[:, -1], most]).tolist()
    if num_groups > torch.iinfo(rowptr.dtype).max:
        raise ValueError(
            f'group_size={size} needs {num_groups} groups, more than {rowptr.dtype} holds; choose '
            'a larger group_size'
        )
    groups = ops.group_edges(rowptr, count, size, num_groups, num_long)
    ptr, row, _, long_ptr, long_shift = groups
    order = ops.order_groups(ptr, row, long_ptr, long_shift, size)
    num_short = rowptr.size(0) - 1 - num_long
    return groups, num_groups - num_short, most_groups, order


@fake('count_groups')
def _count_groups_fake(rowptr: Tensor) -> Tensor:
    return rowptr.new_empty(2, rowptr.size(0), dtype=torch.long)


@fake('group_edges')
def _group_edges_fake(rowptr: Tensor, num_groups: int, num_long: int) -> tuple[Tensor, ...]:
    sizes = (num_groups + 1, num_groups, num_long, num_long + 1, num_long)
    return tuple(rowptr.new_empty(size) for size in sizes)


@fake('order_groups')
def _order_groups_fake(row: Tensor) -> Tensor:
    return torch.empty_like(row)


@reference('count_groups')
def _count_groups_reference(rowptr: Tensor, size: int) -> Tensor:
    count = ((rowptr.long().diff() + (size - 1)) // size).clamp(min=1)
    return pad(torch.stack([count, count > 1]).cumsum(1), (1, 0))


@reference('group_edges')
def _group_edges_reference(
    rowptr: Tensor, count: Tensor, size: int, num_groups: int, num_long: int
) -> tuple[Tensor, ...]:
    first, number = count[0, :-1], count[1, :-1]
    each = count[0].diff()
    of = torch.arange(each.size(0), device=rowptr.device).repeat_interleave(each)
    ptr = rowptr[of] + (torch.arange(num_groups, device=rowptr.device) - first[of]) * size
    long_row = (each > 1).nonzero().view(-1)
    row = torch.where(each[of] > 1, -1 - number[of], of)
    long_ptr = pad(each[long_row].cumsum(0), (1, 0))
    out = (torch.cat([ptr, rowptr[-1:]]), row, long_row, long_ptr, first[long_row] - long_ptr[:-1])
    return tuple(t.to(rowptr.dtype) for t in out)


@reference('order_groups')
def _order_groups_reference(
    ptr: Tensor, row: Tensor, long_ptr: Tensor, long_shift: Tensor, size: int
) -> Tensor:
    most = 2**15 - 1
    length, is_long = ptr.diff(), row < 0
    of = (-1 - row[is_long]).long()
    place = torch.zeros_like(row)
    place[is_long] = is_long.nonzero().view(-1).to(row.dtype) - (long_shift + long_ptr[:-1])[of]
    key = torch.where(length < size, 2**16 - 1 - length.clamp(max=most), place.clamp(max=most))
    return key.argsort(stable=True).to(row.dtype)
