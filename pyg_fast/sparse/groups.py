"""The edges of a graph in groups, the units of work of a GPU's sums."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .group_edges import group_edges

Device: TypeAlias = torch.device | str | int


class Groups(NamedTuple):
    r"""The edges of each row of a CSR structure in groups of at most :obj:`size`, as in the
    `"GNNAdvisor" <https://arxiv.org/abs/2006.06608>`_ paper.

    Groups are in the order of the edges, without gaps; a row without edges has an empty one. A row
    of several groups is *long*: each of its groups makes a partial sum. All tensors have the
    integer dtype of the graph. Groups divide the work on a GPU; on a CPU they have no effect.
    A GPU's sums process them in the order :obj:`order`: full groups by their place in the row, then
    the others, the longest first.

    Shapes:
        - **ptr:** the first edge of each group :math:`(G + 1)`
        - **row:** the row of each group :math:`(G)`, or :math:`-1 - k` for a group of the
          :math:`k`-th long row
        - **long_row:** the long rows :math:`(L)`
        - **long_ptr:** the first partial sum of each :math:`(L + 1)`
        - **long_shift:** for each long row, the difference between the number of a group and that
          of its partial sum :math:`(L)`
        - **order:** the numbers of the groups in that order :math:`(G)`; :obj:`None`: as they are
    """

    ptr: Tensor
    row: Tensor
    long_row: Tensor
    long_ptr: Tensor
    long_shift: Tensor
    num_partials: int
    most_groups: int  # of a row
    size: int
    atomic: bool = False
    order: Tensor | None = None

    @property
    def most_edges(self) -> int:
        """At least the number of edges of the longest row."""
        return self.most_groups * self.size

    def __repr__(self) -> str:
        parts = f'size={self.size}, groups={self.row.size(0)}, long_rows={self.long_row.size(0)}'
        return f'Groups({parts}{", atomic" if self.atomic else ""})'

    def _each(self, fn: Callable[[Tensor], Tensor]) -> 'Groups':
        return self._replace(
            ptr=fn(self.ptr), row=fn(self.row), long_row=fn(self.long_row),
            long_ptr=fn(self.long_ptr), long_shift=fn(self.long_shift),
            order=None if self.order is None else fn(self.order),
        )  # fmt: skip

    def to(self, device: Device | None = None, non_blocking: bool = False) -> 'Groups':
        """The groups on another device."""
        return self._each(lambda t: t.to(device=device, non_blocking=non_blocking))

    def cpu(self) -> 'Groups':
        """The groups on the CPU."""
        return self.to('cpu')

    def cuda(self, device: Device | None = None, non_blocking: bool = False) -> 'Groups':
        """The groups on a GPU."""
        return self._each(lambda t: t.cuda(device, non_blocking=non_blocking))

    def pin_memory(self) -> 'Groups':
        """The groups in pinned memory."""
        return self._each(Tensor.pin_memory)

    def share_memory_(self) -> 'Groups':
        """Moves all tensors to shared memory."""
        return self._each(Tensor.share_memory_)

    def clone(self) -> 'Groups':
        """A copy."""
        return self._each(Tensor.clone)

    def detach(self) -> 'Groups':
        """The groups themselves: integers have no gradient."""
        return self._each(Tensor.detach)


torch.serialization.add_safe_globals([Groups])


@torch.inference_mode(False)  # A later training step may use them.
def groups_of(rowptr: Tensor, size: int, atomic: bool = False) -> Groups:
    r"""Cuts the rows of a CSR structure into groups of at most :obj:`size` edges.

    Runs on the device of :obj:`rowptr`; waits for it once, to know the number of groups.

    Args:
        rowptr (Tensor): Row pointers :math:`(N + 1)`, int32 or int64.
        size (int): The most edges per group.
        atomic (bool): Whether the groups of a long row are added atomically, in any order, instead
            of in a fixed order: this writes less memory, but the last bits vary from run to run.
            Ignored with :func:`torch.use_deterministic_algorithms`. (default: :obj:`False`)

    Raises:
        TypeError: If :obj:`rowptr` is not an int32 or int64 tensor, or :obj:`size` no integer.
        ValueError: If :obj:`rowptr` is not a vector of at least one entry, :obj:`size` is not
            positive, or there are more groups than the dtype of :obj:`rowptr` holds.
    """
    if not isinstance(rowptr, Tensor) or rowptr.dtype not in (torch.int32, torch.int64):
        got = rowptr.dtype if isinstance(rowptr, Tensor) else type(rowptr).__name__
        raise TypeError(f"'rowptr' must be a tensor of int32 or int64, got {got}")
    if rowptr.dim() != 1 or rowptr.size(0) == 0:
        raise ValueError(f"'rowptr' must have shape [num_rows + 1], got {list(rowptr.shape)}")
    check_size(size)
    tensors, num_partials, most_groups, order = group_edges(rowptr, size)
    ptr, row, long_row, long_ptr, long_shift = tensors
    return Groups(
        ptr, row, long_row, long_ptr, long_shift, num_partials, most_groups, size, atomic, order
    )  # fmt: skip


def check_size(size: int, name: str = 'size') -> None:
    """Raises unless :obj:`size` is a positive integer."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"'{name}' must be an integer, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"'{name}' must be positive, got {size}")
