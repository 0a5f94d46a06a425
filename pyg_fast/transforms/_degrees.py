"""Degree statistics of a CSR structure, from which group sizes are chosen."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Degrees(NamedTuple):
    """Degree statistics of the rows of a CSR structure."""

    num_rows: int
    num_edges: int
    largest: int
    squares: int  # the sum of squared degrees

    @classmethod
    def of(cls, rowptr: Tensor) -> 'Degrees':
        """Synchronises once."""
        degree = rowptr.long().diff()
        if degree.size(0) == 0:
            return cls(0, 0, 0, 0)
        facts = torch.stack([degree.sum(), degree.max(), degree.square().sum()])
        return cls(degree.size(0), *facts.tolist())

    def features(self, width: int) -> list[float]:
        """The input of the fitted regression."""
        mean = self.num_edges / max(self.num_rows, 1)
        of_an_edge = self.squares / max(self.num_edges, 1)  # mean degree over the edges' rows
        numbers = (self.num_rows, mean, self.largest, of_an_edge)
        return [1.0, *(math.log2(1 + number) for number in numbers), math.log2(width)]
