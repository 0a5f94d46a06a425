"""The example that trains on batches of molecules."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples._scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script('molecules', 'gps', 'gat', 'node_classification') as module:
        yield module


def test_all_sides_learn_alike(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    line = '--molecules 160 --batch-size 16 --channels 16 --layers 2 --epochs 4 --device'
    example.main([*line.split(), device.type])
    head, error, making, training = capsys.readouterr().out.splitlines()[2:]
    assert head.split() == ['PyG', 'pyg_fast', 'captured']
    pyg, *ours = map(float, error.split()[-3:])
    assert all(abs(pyg - each) < 0.05 for each in ours)  # The same weights and batches.
    assert all(float(value) > 0 for row in (making, training) for value in row.split()[-3:])


def test_one_side(example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture) -> None:
    line = '--layers-of ours --molecules 20 --epochs 1 --channels 4 --layers 1 --device'
    example.main([*line.split(), device.type])
    assert capsys.readouterr().out.splitlines()[2].split() == ['pyg_fast', 'captured']


def test_bad_options(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        example.parse(['--workers', '-1', '--device', 'cpu'])
    assert 'expected at least 0' in capsys.readouterr().err
