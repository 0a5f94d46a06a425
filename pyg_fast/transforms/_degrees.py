"""What group sizes are chosen by: a few facts about the rows of a CSR structure."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Degrees(NamedTuple):
    """What is asked of the rows of a CSR structure."""

    num_rows: int
    num_edges: int
    largest: int
    squares: int  # the sum of squared degrees

    @classmethod
    def of(cls, rowptr: Tensor) -> 'Degrees':
        """Waits for the device once."""
        degree = rowptr.long().diff()
        if degree.size(0) == 0:
            return cls(0, 0, 0, 0)
        facts = torch.stack([degree.sum(), degree.max(), degree.square().sum()])
        return cls(degree.size(0), *facts.tolist())

    def features(self, width: int) -> list[float]:
        """What the fitted regression and the classifier go by."""
        mean = self.num_edges / max(self.num_rows, 1)
        of_an_edge = self.squares / max(self.num_edges, 1)  # the degree where an edge ends
        numbers = (self.num_rows, mean, self.largest, of_an_edge)
        return [1.0, *(math.log2(1 + number) for number in numbers), math.log2(width)]
