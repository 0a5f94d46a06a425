"""Features that a remote backend serves."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, TensorAttr

from ..ops.gather_rows import gather_rows
from ._columns import row_bytes_of


class RemoteFeatures:
    """Features served by a :class:`~torch_geometric.data.FeatureStore`."""

    exchange = None  # with other processes

    def __init__(self, store: FeatureStore, device: torch.device) -> None:
        self._store, self._device = store, device
        self.refresh()
        attrs = store.get_all_tensor_attrs()
        if any(isinstance(attr.group_name, str) for attr in attrs):
            names = sorted({str(attr.group_name) for attr in attrs})
            raise TypeError(f"'data' must be a graph with one type of nodes, got {names}")

    def crosses_bus(self) -> bool:
        return True

    def end_iterator(self, end: Exception) -> None:
        """No process waits for this one."""

    def refresh(self) -> None:
        """The next batch reuses no rows of the previous one."""
        self.version: object = object()  # another one each time

    def rows_at(
        self, n_id: Tensor, match: Tensor | None, previous: dict[str, Tensor] | None,
        counter_of: Callable[[int], Tensor],
    ) -> dict[str, Tensor]:  # fmt: skip
        """All attributes of a batch's nodes; reads only unmatched ones from the store."""
        attrs = self._store.get_all_tensor_attrs()
        if previous is None or any(attr.attr_name not in previous for attr in attrs):
            match = previous = None
        wanted, position = select_unmatched(n_id, match)
        fetched = self._fetch(attrs, wanted)
        if not fetched:
            return {}
        counter: Tensor | None = counter_of(sum(row_bytes_of(rows) for rows in fetched.values()))
        out = {}
        for name, rows in fetched.items():
            before = None if previous is None else previous[name]
            out[name] = gather_rows(rows, position, match=match, previous=before, counter=counter)
            counter = None  # All attributes have the same counts: add them once.
        return out

    def _fetch(self, attrs: list[TensorAttr], nodes: Tensor) -> dict[str, Tensor]:
        """Asks the store for the rows of nodes."""
        for attr in attrs:
            attr.index = nodes.cpu()
            if not attr.is_set('group_name'):
                attr.group_name = None
        values = self._store.multi_get_tensor(attrs)
        rows = (torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in values)
        return {
            attr.attr_name: value.to(self._device) for attr, value in zip(attrs, rows, strict=True)
        }


def select_unmatched(n_id: Tensor, match: Tensor | None) -> tuple[Tensor, Tensor]:
    """The nodes of a batch whose rows it does not reuse, and the place of each of its nodes among
    them."""
    if match is None:
        return n_id, torch.arange(n_id.numel(), device=n_id.device)
    wanted = n_id[match < 0]
    if wanted.numel() == 0:  # The kernel needs a row, even if it reads none.
        wanted = n_id[:1]
    return wanted, ((match < 0).cumsum(0) - 1).clamp_(min=0)
