"""The example that learns to simulate heat on meshes."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples._scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script('mesh', 'gat', 'node_classification') as module:
        yield module


def test_both_sides_learn_alike(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    line = '--side 8 --meshes 2 --steps 15 --rollout 3 --layers 2 --channels 8 --device'
    example.main([*line.split(), device.type])
    head, error, rollout, training = capsys.readouterr().out.splitlines()[2:]
    assert head.split() == ['PyG', 'pyg_fast']
    for line in (error, rollout):  # The same weights and meshes.
        pyg, ours = map(float, line.split()[-2:])
        assert abs(pyg - ours) < 1
    assert all(float(value) > 0 for value in training.split()[-2:])


def test_true_change(example: ModuleType) -> None:
    """A constant or linear temperature stays: finite elements are exact for these."""
    mesh = example.draw_mesh(6, torch.Generator().manual_seed(0), 'cpu')
    ramp = mesh.pos @ torch.tensor([[1.0], [-2.0]])
    for heat in (torch.ones(36, 1), ramp):
        assert mesh.change(heat).abs().max() < 1e-5
    bump = (mesh.pos - 2.5).square().sum(-1, keepdim=True)
    inner = mesh.is_border == 0
    torch.testing.assert_close(mesh.mass.sum(), torch.tensor(25.0))
    assert (mesh.change(bump)[inner] * mesh.mass[inner]).sum() > 0


def test_bad_options(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        example.parse(['--side', '2', '--device', 'cpu'])
    assert 'expected at least 3' in capsys.readouterr().err
