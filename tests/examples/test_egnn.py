"""The example that learns forces."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples._scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script('egnn', 'gat', 'node_classification') as module:
        yield module


def test_both_sides_learn_alike(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    line = '--systems 8 --particles 5 --steps 20 --simulated 150 --layers 2 --channels 8 --device'
    example.main([*line.split(), device.type])
    head, error, drift, training = capsys.readouterr().out.splitlines()[2:]
    assert head.split() == ['PyG', 'pyg_fast']
    pyg, ours = map(float, error.split()[-2:])
    assert abs(pyg - ours) < 1  # The same weights and systems.
    assert all(float(value) < 1 for value in drift.split()[-2:])
    assert all(float(value) > 0 for value in training.split()[-2:])


def test_true_forces(example: ModuleType) -> None:
    """Two charges of one sign push each other apart, with opposite forces."""
    systems = example.draw(1, 2, torch.Generator().manual_seed(0), 'cpu')
    systems = systems._replace(charge=torch.ones(2, 1))
    gap, forces = systems.pos[0] - systems.pos[1], systems.forces()
    torch.testing.assert_close(forces[0], -forces[1])
    torch.testing.assert_close(forces[0], gap * (gap.square().sum() + 0.5) ** -1.5)


def test_bad_options(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        example.parse(['--particles', '1', '--device', 'cpu'])
    assert 'expected at least 2' in capsys.readouterr().err
