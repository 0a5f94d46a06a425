"""The map from the global ids of nodes to their local ones in a mini-batch."""

from typing import Any

import torch
from torch import Tensor

from ._numbers import check_number

_NUM_STAMPS = 2**32 - 1
_MOST_DIRECT = 2**27  # Nodes with an entry each: 1 GB.


class NodeMap:
    r"""Where each node was first met in a mini-batch.

    With an entry of eight bytes for every node, stamped with the number of its batch, nothing has
    to be emptied between two batches. Where nodes are too many for that, ids are hashed instead.

    One thread at a time may use a map. On CUDA it may go from one stream to another, which then
    waits for the one before. A copy, or one that was pickled, starts empty.

    Args:
        num_nodes (int): Number of nodes; ids are below it.
        device (torch.device or str): Where the map is.
        hashed (bool, optional): Whether ids are hashed; :obj:`None`: from :math:`2^{27}` nodes on.
            (default: :obj:`None`)

    Raises:
        TypeError: If :obj:`num_nodes` is not an integer.
        ValueError: If it is negative.
        RuntimeError: If a map is used while a CUDA graph is captured, whose replays would find
            what earlier ones have noted.
    """

    def __init__(
        self, num_nodes: int, device: torch.device | str, hashed: bool | None = None
    ) -> None:
        check_number('num_nodes', num_nodes)
        self.num_nodes = num_nodes
        self.device = torch.empty(0, device=device).device  # with its number
        self.hashed = num_nodes > _MOST_DIRECT if hashed is None else hashed
        self._stamp = 0
        self._table: Tensor | None = None
        self._scratch: dict[str, Tensor] = {}
        self._stream: Any = None  # that has used it last

    def __reduce__(self) -> tuple:
        return type(self), (self.num_nodes, self.device, self.hashed)

    def table(self, num_ids: int) -> Tensor:
        """The table, with room for so many different ids: :obj:`[1, num_nodes]`, or hashed
        :obj:`[2, num_slots]`, of entries and ids."""
        if self.device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                'a NodeMap must not be used while a CUDA graph is captured, whose replays would '
                'find what earlier ones have noted: call this outside of the capture'
            )
        size = self.num_nodes
        if self.hashed:  # At most half full: probes stay short.
            size = 1 << max(16, 2 * min(num_ids, self.num_nodes) - 1).bit_length()
        if self._table is None or self._table.size(1) < size:
            shape = (1 + self.hashed, size)
            self._table = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        return self._table

    def next_stamp(self, count: int = 1) -> int:
        """The stamp of a new batch; of several: those of the others follow it downwards. What the
        current stream is given from then on comes behind the batches before."""
        if self.device.type == 'cuda':
            self._come_to(torch.cuda.current_stream(self.device))
        if self._stamp < count:
            if self._table is not None:
                self._table.fill_(-1)
            self._stamp = _NUM_STAMPS
        self._stamp -= count
        return self._stamp + count - 1

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of at least that size which stays from batch to batch; where it has to grow, what
        is in it is kept."""
        held = self._scratch.get(name)
        if held is None or held.dtype != dtype:
            # Zeros: what was never written is copied along when it grows.
            held = self._scratch[name] = torch.zeros(size, dtype=dtype, device=self.device)
        elif held.numel() < size:
            grown = torch.zeros(size + size // 4, dtype=dtype, device=self.device)
            grown[: held.numel()] = held
            held = self._scratch[name] = grown
        return held

    def _come_to(self, stream: Any) -> None:
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            for tensor in (self._table, *self._scratch.values()):
                if tensor is not None:
                    tensor.record_stream(stream)
        self._stream = stream
