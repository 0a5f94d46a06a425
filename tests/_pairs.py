"""Fewer combinations of parameters that still contain every pair of values."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairs(names: Sequence[str], *values: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test so that every two values of two parameters meet once at least."""

    def met(case: Iterable[int]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(case), 2))

    left = [*product(*(range(len(each)) for each in values))]
    missing = set().union(*map(met, left))
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(met(case) & missing))
        chosen.append(tuple(each[k] for each, k in zip(values, best, strict=True)))
        missing -= met(best)
    return pytest.mark.parametrize(names, chosen)
