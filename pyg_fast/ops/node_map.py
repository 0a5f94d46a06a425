"""The map from the global ids of nodes to their local ones in a mini-batch."""

import torch
from torch import Tensor

from ._checks import to_device
from ._numbers import check_number

_NUM_STAMPS = 2**32 - 1
_MOST_DIRECT = 2**27  # nodes in a table with one entry each: 1 GB


class NodeMap:
    r"""Maps global node ids to the position of their first occurrence in a mini-batch.

    Each node has an entry of eight bytes with the number of its batch, so that the table need not
    be cleared between batches. For very many nodes, ids are hashed instead.

    Only one thread at a time may use a map. On CUDA it may move from one stream to another; the new
    stream waits for the old one. A copied or unpickled map starts empty.

    Args:
        num_nodes (int): Number of nodes; all ids are below it.
        device (torch.device or str): The device of the map.
        hashed (bool, optional): Whether ids are hashed; :obj:`None`: for more than :math:`2^{27}`
            nodes. (default: :obj:`None`)

    Raises:
        TypeError: If :obj:`num_nodes` is not an integer, or :obj:`device` no device.
        ValueError: If :obj:`num_nodes` is negative, or there is no such kind of :obj:`device`.
        RuntimeError: If a map is used while a CUDA graph is captured: its replays would find
            entries of earlier replays.
    """

    def __init__(
        self, num_nodes: int, device: torch.device | str, hashed: bool | None = None
    ) -> None:
        check_number('num_nodes', num_nodes)
        self.num_nodes = num_nodes
        self.device = torch.empty(0, device=to_device(device)).device  # with its index
        self.hashed = num_nodes > _MOST_DIRECT if hashed is None else hashed
        self._stamp = 0
        self._table: Tensor | None = None
        self._scratch: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None  # the last one that used it

    def __reduce__(self) -> tuple:
        return type(self), (self.num_nodes, self.device, self.hashed)

    def table(self, num_ids: int) -> Tensor:
        """The table, with room for :obj:`num_ids` different ids: :obj:`[1, num_nodes]`, or hashed
        :obj:`[2, num_slots]`, of entries and ids."""
        if self.device.type == 'cuda' and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                'a NodeMap must not be used while a CUDA graph is captured, because replays would '
                'find entries of earlier replays: call this outside of the capture'
            )
        size = self.num_nodes
        if self.hashed:  # At most half full, so that probes stay short.
            size = 1 << max(16, 2 * min(num_ids, self.num_nodes) - 1).bit_length()
        if self._table is None or self._table.size(1) < size:
            shape = (1 + self.hashed, size)
            self._table = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        return self._table

    def next_stamp(self, count: int = 1) -> int:
        """The stamp of a new batch; for several batches the highest one, the others are below it.
        Later work on the current stream runs after the earlier batches."""
        if self.device.type == 'cuda':
            self._move_to(torch.cuda.current_stream(self.device))
        if self._stamp < count:
            if self._table is not None:
                self._table.fill_(-1)
            self._stamp = _NUM_STAMPS
        self._stamp -= count
        return self._stamp + count - 1

    def scratch(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory of at least :obj:`size` entries that is kept between batches; growing keeps its
        content."""
        held = self._scratch.get(name)
        if held is None or held.dtype != dtype:
            # Zeros: growing also copies entries that were never written.
            held = self._scratch[name] = torch.zeros(size, dtype=dtype, device=self.device)
        elif held.numel() < size:
            grown = torch.zeros(size + size // 4, dtype=dtype, device=self.device)
            grown[: held.numel()] = held
            held = self._scratch[name] = grown
        return held

    def _move_to(self, stream: torch.cuda.Stream) -> None:
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
            for tensor in (self._table, *self._scratch.values()):
                if tensor is not None:
                    tensor.record_stream(stream)
        self._stream = stream
