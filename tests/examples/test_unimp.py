"""The example that trains UniMP."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples._scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script('unimp', 'gat', 'node_classification') as module:
        yield module


def test_both_sides_learn(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    line = '--size tiny --epochs 16 --hidden 4 --heads 2 --dropout 0 --device'
    example.main([*line.split(), device.type])
    head, accuracy, *_ = capsys.readouterr().out.splitlines()[2:]
    assert head.split() == ['PyG', 'pyg_fast']
    pyg, ours = map(float, accuracy.split()[-2:])
    assert pyg > 60
    assert abs(pyg - ours) < 3  # The same weights, the same labels shown, no dropout.


def test_labels_are_hidden(example: ModuleType) -> None:
    """The label of a node that shows none has no influence on it."""
    args = example.parse(['--size', 'tiny', '--device', 'cpu'])
    data, num_classes = example.load(args)
    model = example.UniMP(example.CONVS['pyg_fast'], data.num_features, num_classes, args).eval()
    shown = torch.arange(0, data.num_nodes, 2)
    expected = model(data, shown)
    data.y[1::2] = (data.y[1::2] + 1) % num_classes
    assert torch.equal(model(data, shown), expected)
    data.y[::2] = (data.y[::2] + 1) % num_classes
    assert not torch.allclose(model(data, shown), expected)


def test_bad_options(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        example.parse(['--dataset', 'Cora'])
    assert '--dataset Cora needs --root' in capsys.readouterr().err
