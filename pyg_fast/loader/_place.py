"""Where the attributes of a dataset of graphs are kept."""

import torch
from torch import Tensor

from ._columns import Budget
from ._pinned import pin


class Place:
    """Moves attributes to the device, or into pinned memory that it reads, where they do not fit.

    Args:
        device: The device of the batches.
        is_padded: Whether batches read a row of zeros after the last one.
    """

    def __init__(self, device: torch.device, is_padded: bool) -> None:
        self.device, self._is_padded = device, is_padded
        self._budget = Budget(device, None)
        #: Whether all attributes fit there, so far.
        self.is_on_device = True

    def __call__(self, rows: Tensor) -> Tensor:
        if self._is_padded:
            rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        rows = rows.detach().contiguous()
        if self.device.type == 'cpu' or self._budget.take('auto', rows.nbytes):
            return rows.to(self.device)
        self.is_on_device = False
        return pin(rows.cpu())
