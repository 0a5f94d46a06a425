"""The graphs of a batch: where their rows lie, on the host and on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops.join_edges import take_rows
from ._levels import EDGES, Ints, Levels, NumReal, Padding
from ._ring import ring_of
from ._send import Array


class Draw(NamedTuple):
    """The graphs that a batch will have, and what fills it up."""

    ids: Ints
    padding: Padding | None


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
    num_rows: tuple[int, ...]
    shifts: tuple[bool, ...]


class Selection:
    """The graphs of a batch: their rows at each level, as numbers on the host.

    With a padding the last graph is that of the padding. Its rows are those after the last row of
    the dataset, which are zero.
    """

    def __init__(self, levels: Levels, ids: Ints, padding: Padding | None = None) -> None:
        self.ids, self.padding, self._levels = ids, padding, levels
        ends = levels.ptr
        start, count = ends.take(ids, axis=1), ends.take(ids + 1, axis=1)
        count -= start
        if padding is not None:
            extra = np.zeros((len(ends), 1), dtype=np.int64)
            extra[: EDGES + 1, 0] = 1, *padding
            count = np.concatenate([count, extra], axis=1)
            start = np.concatenate([start, ends[:, -1:]], axis=1)
        self.num_graphs = count.shape[1]
        #: Of each level the first row of each graph in the dataset.
        self.start = start
        #: The same in the batch, and the number of rows.
        self.ptr = np.zeros((len(ends), self.num_graphs + 1), dtype=np.int64)
        np.cumsum(count, axis=1, out=self.ptr[:, 1:])
        #: The numbers of rows that are not of the padding.
        self.real = NumReal(*self.ptr[: EDGES + 1, len(ids)].tolist())

    def incs(self, number: int) -> Tensor:
        """What PyG adds to the rows of each graph, of increments that are tensors."""
        chosen = self._levels.incs[number][torch.from_numpy(self.ids)]
        out = chosen.new_zeros(self.num_graphs, *chosen.shape[1:])
        out[1:] = chosen.cumsum(0)[: self.num_graphs - 1]
        return out

    @property
    def num_rows(self) -> list[int]:
        """The numbers of graphs, nodes and edges."""
        num_rows: list[int] = self.ptr[: EDGES + 1, -1].tolist()
        return num_rows

    @property
    def sizes(self) -> Sizes:
        """The sizes of the batch."""
        is_padded = self.padding is not None
        shifts = is_padded | (self.ptr[:, self.num_graphs - 1] != 0)
        num_rows = self.ptr[:, -1].tolist()
        return Sizes(len(self.ids), is_padded, *map(tuple, (num_rows, shifts.tolist())))

    def numbers(self) -> list[Array]:
        """All that a device must know of the graphs: arrays whose shapes depend on the sizes of
        the batch alone."""
        incs = [self.incs(number).numpy() for number in range(len(self._levels.incs))]
        ring = () if self.padding is None else ring_of(
            self.padding, self.real.nodes, self.real.edges
        )  # fmt: skip
        return [self.ptr.copy(), self.start, *incs, *ring]


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
        """The first row of each graph in the batch, and the number of rows, int64."""
        return self.ptr[level]

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
