"""Makes batches in the memory from which a captured step reads them."""

from collections.abc import Callable

import torch

from ..loader._collated import Collated
from ..loader._selection import DeviceRows, Selection
from ..loader._send import pack, unpack
from .inputs import StaticBatch
from .record import Recorder


class StaticNumbers:
    """Memory of their own for what the device must know of the graphs of a batch.

    A batch that is written later must have the same sizes.

    Args:
        graphs: The graphs of a batch of which it has the sizes.
        device: The device.
    """

    def __init__(self, graphs: Selection, device: torch.device) -> None:
        self._sizes, self._like = graphs.sizes, graphs.numbers()
        self._flat = torch.empty_like(pack(self._like, pin=False), device=device)
        self.write(graphs)

    def write(self, graphs: Selection) -> None:
        """Copies the numbers of a batch, for which nothing waits."""
        flat = pack(graphs.numbers(), pin=self._flat.is_cuda)
        self._flat.copy_(flat, non_blocking=True)

    def view(self) -> DeviceRows:
        """The rows of the batch that was written last. Each view makes them anew."""
        return DeviceRows(self._sizes, unpack(self._flat, self._like), None)


class Filling:
    """Fills the inputs of a step: the operations by which a loader makes a batch, recorded once for
    a size of batches, read what differs from batch to batch as numbers that are copied before.

    Args:
        collated: The dataset, which must be in the memory of the device.
        inputs: The inputs.
        recorder: What records the operations.
        graphs: The graphs of a batch of this size.
    """

    def __init__(
        self, collated: Collated, inputs: StaticBatch, recorder: Recorder, graphs: Selection
    ) -> None:
        def fill(rows: DeviceRows) -> None:
            inputs.write_values(collated.values(rows, masks=True))

        self._read = collated, inputs  # What a graph reads and writes must stay alive.
        self._numbers = StaticNumbers(graphs, collated.device)
        self._replay: Callable[[], object] = recorder.record(self._numbers, fill)

    def __call__(self, graphs: Selection) -> None:
        """Fills the inputs with the batch of these graphs."""
        self._numbers.write(graphs)
        self._replay()
