"""The order of batches in a window."""

import torch

from tests.loader._parts import greedy_order


def test_greedy() -> None:
    degree = torch.tensor(
        [
            [1.0, 0.1, 0.9, 0.2],
            [0.1, 1.0, 0.3, 0.8],
            [0.9, 0.3, 1.0, 0.3],
            [0.2, 0.8, 0.3, 1.0],
        ]
    )
    assert greedy_order(degree) == [0, 2, 1, 3]  # Of equals the first.


def test_small_windows() -> None:
    assert greedy_order(torch.ones(1, 1)) == [0]
    assert greedy_order(torch.ones(2, 2)) == [0, 1]
    assert greedy_order(torch.zeros(5, 5)) == [0, 1, 2, 3, 4]
