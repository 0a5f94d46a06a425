"""The graphs of a batch: where their rows lie, on the host and on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops.join_edges import take_rows
from ._levels import EDGES, GRAPHS, Ints, Levels, NumReal, Padding
from ._ring import ring_of
from ._send import Array, send


class Draws:
    """Where the rows of the graphs of some batches lie, which takes as long as for one batch.

    Args:
        levels: The levels of the dataset.
        ids: The graphs of each batch, as many in all :math:`(N, B)`.
    """

    def __init__(self, levels: Levels, ids: Ints) -> None:
        first, last = levels.ptr, ids.shape[1] - 1
        start, end = (first.take(at, axis=1).swapaxes(0, 1) for at in (ids, ids + 1))
        self.levels, self.ids = levels, ids
        #: Of each batch and level the first row of each graph in the dataset.
        self.start = np.ascontiguousarray(start)
        #: The same in the batch, and the number of rows.
        self.ptr = np.zeros((len(ids), len(first), last + 2), dtype=np.int64)
        np.cumsum(end - start, axis=2, out=self.ptr[:, :, 1:])
        self.num_rows: list[list[int]] = self.ptr[:, :, -1].tolist()
        self.shifts: list[list[bool]] = (self.ptr[:, :, last] != 0).tolist()
        self._sent: list[tuple[Tensor, ...]] | None = None
        self._stream: int | None = None

    def send(self, number: int, device: torch.device) -> Sequence[Tensor] | None:
        """The numbers :attr:`ptr` and :attr:`start` of a batch on the device, which a batch must
        not keep: those of all batches are sent by one copy. None: another stream has them."""
        stream = None
        if device.type != 'cpu':
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            if torch.cuda.is_current_stream_capturing():
                return None
        if self._sent is None:
            sent = send([self.ptr, self.start], device)
            self._sent, self._stream = list(zip(*(t.unbind() for t in sent), strict=True)), stream
        return self._sent[number] if self._stream == stream else None


class Draw(NamedTuple):
    """The graphs that a batch will have, and what fills it up."""

    draws: Draws  # of this batch and others
    number: int  # of the batch
    padding: Padding | None = None

    @property
    def num_rows(self) -> Sequence[int]:
        """The number of rows of each level, without those of the padding."""
        return self.draws.num_rows[self.number]

    def send(self, device: torch.device) -> Sequence[Tensor] | None:
        """As :meth:`Selection.numbers`, on the device; None: they must be sent alone."""
        if self.padding is not None or self.draws.levels.incs:
            return None
        return self.draws.send(self.number, device)


class Sizes(NamedTuple):
    """The sizes of a batch, which padded batches of a bucket have in common.

    Args:
        num_real: The number of graphs that are not of a padding.
        is_padded: Whether there is one more graph.
        num_rows: The number of rows of each level.
        shifts: Whether increments that are sizes of the level are added. PyG does not if that of
            the last graph is zero; with a padding they always are, so that dtypes stay the same.
    """

    num_real: int
    is_padded: bool
    num_rows: Sequence[int]
    shifts: Sequence[bool]


class Selection:
    """The graphs of a batch: their rows at each level, as numbers on the host.

    With a padding the last graph is that of the padding. Its rows are those after the last row of
    the dataset, which are zero.
    """

    def __init__(self, draw: Draw) -> None:
        draws, number, padding = draw
        self.ids: Ints = draws.ids[number]
        self.padding, self._levels = padding, draws.levels
        num_rows, shifts = draws.num_rows[number], draws.shifts[number]
        #: The numbers of rows that are not of the padding.
        self.real = NumReal(*num_rows[: EDGES + 1])
        #: As of :class:`Draws`.
        self.start: Ints = draws.start[number]
        self.ptr: Ints = draws.ptr[number]
        if padding is not None:
            extra = 1, *padding, *[0] * (len(num_rows) - EDGES - 1)
            num_rows = [rows + more for rows, more in zip(num_rows, extra, strict=True)]
            shifts = [True] * len(shifts)
            ends = np.array(num_rows)[:, None]
            self.start = np.concatenate([self.start, self._levels.ptr[:, -1:]], axis=1)
            self.ptr = np.concatenate([self.ptr, ends], axis=1)
        self.num_graphs = num_rows[GRAPHS]
        #: The sizes of the batch.
        self.sizes = Sizes(len(self.ids), padding is not None, num_rows, shifts)

    def incs(self, number: int) -> Tensor:
        """What PyG adds to the rows of each graph, of increments that are tensors."""
        chosen = self._levels.incs[number][torch.from_numpy(self.ids)]
        out = chosen.new_zeros(self.num_graphs, *chosen.shape[1:])
        out[1:] = chosen.cumsum(0)[: self.num_graphs - 1]
        return out

    @property
    def num_rows(self) -> Sequence[int]:
        """The numbers of graphs, nodes and edges."""
        return self.sizes.num_rows[: EDGES + 1]

    def numbers(self) -> list[Array]:
        """All that a device must know of the graphs: arrays whose shapes depend on the sizes of
        the batch alone."""
        incs = [self.incs(number).numpy() for number in range(len(self._levels.incs))]
        ring = () if self.padding is None else ring_of(
            self.padding, self.real.nodes, self.real.edges
        )  # fmt: skip
        return [self.ptr, self.start, *incs, *ring]


class RowSources:
    """The attributes of a dataset whose rows an op takes for a batch, all at once."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.levels: list[int] = []
        self.shifts: list[int] = []

    def add(self, rows: Tensor, level: int, shift: int | None) -> int:
        """Adds an attribute with rows of a level, and returns its number.

        Args:
            rows: The rows of all graphs.
            level: Their level.
            shift: The level of which the first row of its graph is added to each, int32 or int64.
        """
        self.rows.append(rows)
        self.levels.append(level)
        self.shifts.append(-1 if shift is None else shift)
        return len(self.rows) - 1


class DeviceRows:
    """The rows of a batch on its device, made there of the numbers that a :class:`Selection` sends.

    All sizes are known on the host, so nothing waits for a GPU, and what is made of them may be
    recorded: other batches of these sizes differ in what `sent` holds, and in `ids`.

    Args:
        sizes: The sizes of the batch.
        sent: The numbers of the selection.
        ids: The graphs, of which a batch has the strings and other objects; None: it has None.
    """

    def __init__(self, sizes: Sizes, sent: Sequence[Tensor], ids: Ints | None) -> None:
        self.sizes, self.ids = sizes, ids
        #: Of each level the first row of each graph in the batch, and the number of rows.
        self.ptr = sent[0]
        #: The first row of each graph in the dataset.
        self.start = sent[1]
        self._others = sent[2:]
        self._taken: list[Tensor] = []
        self._owner: dict[int, Tensor] = {}
        self._are_real: dict[int, Tensor] = {}

    def num_rows(self, level: int) -> int:
        """The number of rows of the batch."""
        return self.sizes.num_rows[level]

    def offsets(self, level: int) -> Tensor:
        """The first row of each graph in the batch, and the number of rows, int64: a new tensor."""
        return torch.select_copy(self.ptr, 0, level)

    def incs(self, number: int) -> Tensor:
        """What PyG adds to the rows of each graph, of increments that are tensors."""
        return self._others[number]

    def ring(self) -> tuple[Tensor, Tensor]:
        """The edges of the padding, and their row pointers, see :func:`~._ring.ring_of`."""
        edges, rowptr = self._others[-2:]
        return edges, rowptr

    def read(
        self, sources: RowSources, owner: Sequence[int] = (), are_real: Sequence[int] = ()
    ) -> None:
        """Makes the attributes of the batch, and for levels what :meth:`owner` and :meth:`are_real`
        return, by one operation."""
        sizes, count = self.sizes, len(sources.rows)
        made = take_rows(
            self.start, self.ptr, sources.rows, sources.levels, sources.shifts, owner,
            are_real, sizes.num_rows, sizes.num_real,
        )  # fmt: skip
        self._taken += made[:count]
        self._owner |= zip(owner, made[count:], strict=False)
        self._are_real |= zip(are_real, made[count + len(owner) :], strict=True)

    def taken(self, number: int) -> Tensor:
        """An attribute of the batch."""
        return self._taken[number]

    def owner(self, level: int) -> Tensor:
        """The graph of each row, int64."""
        if level not in self._owner:
            self.read(_NONE, owner=(level,))
        return self._owner[level]

    def are_real(self, level: int) -> Tensor:
        """Which rows are not of the padding."""
        if level not in self._are_real:
            self.read(_NONE, are_real=(level,))
        return self._are_real[level]


_NONE = RowSources()
