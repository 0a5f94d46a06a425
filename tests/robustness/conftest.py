"""Fixtures of these tests."""

import gc
from collections.abc import Iterator

import pytest
import torch

from pyg_fast import with_cuda


@pytest.fixture(autouse=True, scope='package')
def one_thread() -> Iterator[None]:
    """Runs on one thread: to wake a second one takes longer than most calls here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_old_objects() -> None:
    """Hides objects that are older than the test from `gc.get_objects` and `gc.collect`."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available() or not with_cuda():
        pytest.skip('of CUDA only')
    return torch.device('cuda')
