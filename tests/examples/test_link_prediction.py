"""The example of links: what it trains on batches of each loader, and its table."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples._scripts import script


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    with script('link_prediction', 'node_classification') as module:
        yield module


def test_area_under_the_curve(example: ModuleType) -> None:
    score, label = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([1, 1, 0, 0])
    assert example.auc(score, label) == 0.75
    assert example.auc(-score, label) == 0.25


def test_all_loaders_train(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip('torch_sparse')
    example.main(f'--size tiny --epochs 2 --device {device}'.split())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith('planted, tiny: 300 nodes')
    assert [line[:40].strip() for line in lines[3:]] == list(example.LOADERS)
    for line in lines[3:]:
        auc, milliseconds = line[40:].split()
        assert 0.5 < float(auc) <= 1
        assert float(milliseconds) > 0
