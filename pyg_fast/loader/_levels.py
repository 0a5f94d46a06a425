"""Where the rows of each graph of a dataset lie, and those of a batch of its graphs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.data.storage import E_KEYS, N_KEYS

Ints = npt.NDArray[np.int64]


# The first levels: one row a graph, the nodes, and the edges.
GRAPHS, NODES, EDGES = range(3)


class Padding(NamedTuple):
    """The nodes and edges that fill a batch up to the sizes of its bucket, as one more graph."""

    num_nodes: int
    num_edges: int


class Levels:
    """The kinds of rows of a dataset: graphs, nodes, edges, and others with their own numbers of
    rows a graph.

    Args:
        num_nodes: The number of nodes of each graph.
        num_edges: The number of edges of each graph.
    """

    def __init__(self, num_nodes: Ints, num_edges: Ints) -> None:
        self._sizes: list[Ints] = []
        self._numbers: dict[bytes, list[int]] = {}
        self._ptr: Ints | None = None
        for sizes in (np.ones_like(num_nodes), num_nodes, num_edges):
            self._add(sizes)

    def _add(self, sizes: Ints) -> int:
        number = len(self._sizes)
        self._numbers.setdefault(sizes.tobytes(), []).append(number)
        self._sizes.append(sizes)
        self._ptr = None
        return number

    def find(self, key: str, sizes: Ints) -> int | None:
        """The level of an attribute with these numbers of rows: where several have them, its name
        decides, as in PyG."""
        numbers = self._numbers.get(sizes.tobytes())
        if numbers is None:
            return None
        if EDGES in numbers and (key in E_KEYS or 'edge' in key):
            return EDGES
        if NODES in numbers and (key in N_KEYS or 'node' in key):
            return NODES
        return numbers[0]

    def find_or_add(self, key: str, sizes: Ints) -> int:
        """The level of an attribute with these numbers of rows, a new one if there is none."""
        number = self.find(key, sizes)
        return self._add(sizes) if number is None else number

    def sizes(self, level: int) -> Ints:
        """The number of rows of each graph."""
        return self._sizes[level]

    @property
    def ptr(self) -> Ints:
        """Of each level the first row of each graph, and the number of rows."""
        if self._ptr is None:
            ptr = np.zeros((len(self._sizes), len(self._sizes[0]) + 1), dtype=np.int64)
            np.cumsum(np.stack(self._sizes), axis=1, out=ptr[:, 1:])
            self._ptr = ptr
        return self._ptr


class Rows(NamedTuple):
    """The rows of a batch at one level, int64."""

    source: Tensor  # in the dataset
    owner: Tensor  # the number of the graph of each in the batch


class Selection:
    """The graphs of a batch: their rows at each level, on the host and on the device.

    All sizes are known on the host, so nothing waits for a GPU; what a GPU reads goes there in one
    copy from pinned memory. With a padding the last graph is that of the padding. Its rows are
    those after the last row of the dataset, which are zero.
    """

    def __init__(
        self, levels: Levels, ids: Ints, device: torch.device, padding: Padding | None = None
    ) -> None:
        self.device, self.ids, self.padding, self.num_real = device, ids, padding, len(ids)
        ends = levels.ptr
        start, count = ends.take(ids, axis=1), ends.take(ids + 1, axis=1)
        count -= start
        if padding is not None:
            extra = np.zeros((len(ends), 1), dtype=np.int64)
            extra[: EDGES + 1, 0] = 1, *padding
            count = np.concatenate([count, extra], axis=1)
            start = np.concatenate([start, ends[:, -1:]], axis=1)
        self.num_graphs = count.shape[1]
        self._last = ends[:, -1]
        #: Of each level the first row of each graph in the batch, and the number of rows.
        self.ptr = np.zeros((len(ends), self.num_graphs + 1), dtype=np.int64)
        np.cumsum(count, axis=1, out=self.ptr[:, 1:])
        #: Of each level the first row of each graph in the dataset.
        self.start = start
        self._count, self._shift = count, start - self.ptr[:, :-1]
        self._rows: dict[int, Rows] = {}
        if device.type == 'cpu':
            self._ptr = torch.from_numpy(self.ptr.copy())  # The batch has it, and may write it.
        else:
            self._send(device)

    def _send(self, device: torch.device) -> None:
        """Copies to the device what it reads."""
        nodes, edges = self.ptr[NODES : EDGES + 1, :-1].astype(np.int32)
        of_edges = np.stack([nodes, nodes, nodes, edges], 1)
        sent = send([self.ptr, self._count, self._shift, of_edges, edges], device)
        self._ptr, self._sent_count, self._sent_shift = sent[:3]
        #: Of each graph what its edges add to both ends, the end in the transpose and the position;
        #: and its first edge, int32.
        self.of_edges, self.first_edge = sent[3:]

    def num_rows(self, level: int) -> int:
        """The number of rows of the batch."""
        return int(self.ptr[level, -1])

    def num_real_rows(self, level: int) -> int:
        """The number of rows that are not of the padding."""
        return int(self.ptr[level, self.num_real])

    def offsets(self, level: int) -> Tensor:
        """The first row of each graph in the batch, and the number of rows, int64."""
        return self._ptr[level]

    def rows(self, level: int) -> Rows:
        """The rows of the batch."""
        if level not in self._rows:
            on_host = self.device.type == 'cpu'
            self._rows[level] = (self._host_rows if on_host else self._find_rows)(level)
        return self._rows[level]

    def _find_rows(self, level: int) -> Rows:
        total = self.num_rows(level)
        owner = place = torch.arange(total, device=self.device)
        if level != GRAPHS:
            owner = torch.repeat_interleave(self._sent_count[level], output_size=total)
        source = self._sent_shift[level].index_select(0, owner).add_(place)
        if self.padding is not None:
            source.clamp_(max=int(self._last[level]))
        return Rows(source, owner)

    def _host_rows(self, level: int) -> Rows:
        """The same by NumPy, which takes a third of the time of torch for few rows."""
        count, shift = self._count[level], self._shift[level]
        owner = place = np.arange(self.num_rows(level))
        if level == GRAPHS:
            source = shift + place
        else:
            owner = np.repeat(np.arange(len(count)), count)
            source = np.repeat(shift, count)
            source += place
        if self.padding is not None:
            np.minimum(source, self._last[level], out=source)
        return Rows(torch.from_numpy(source), torch.from_numpy(owner))


def send(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Arrays on the device, by one copy that nothing waits for; those of longer numbers first."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == 'cpu':
        return tensors
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    parts = flat.pin_memory().to(device, non_blocking=True).split([t.nbytes for t in tensors])
    return [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
