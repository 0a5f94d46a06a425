"""Fixtures of these tests."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope='module')
def no_old_objects() -> Iterator[None]:
    """Benchmarks collect garbage around each measurement: not among what earlier tests have left,
    such as all that Dynamo keeps."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
