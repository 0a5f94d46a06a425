"""Fixtures of these tests."""

import gc
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks collect garbage around each measurement: of all that earlier tests and Dynamo have
    left, which takes longer than what is measured."""
    without = SimpleNamespace(**{**vars(gc), 'collect': lambda: 0})
    monkeypatch.setattr('benchmarks._harness.gc', without)
