"""The example of a relational database."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.examples._scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script('relational', 'link_prediction', 'node_classification') as module:
        yield module


def test_times_help(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    line = '--customers 300 --products 20 --questions 1000 --hidden 16 --epochs 4 --device'
    example.main([*line.split(), device.type])
    _, about, _, head, *lines = capsys.readouterr().out.splitlines()
    assert 'come back' in about
    assert head.split() == ['train', 'AUC', 'test', 'AUC', 'epoch', '[ms]']
    tests = {line[:20].strip(): float(line.split()[-2]) for line in lines}
    assert tests['pyg_fast'] > 0.6
    assert tests['pyg_fast'] > tests['pyg_fast, no times']


def test_questions_have_right_answers(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    args = example.parse(['--customers', '20', '--products', '5', '--device', 'cpu'])
    data = example.draw_database(args, generator)
    asked = example.ask(data, 200, example.TRAIN, generator)
    by, time = data['review', 'by', 'customer'].edge_index[1], data['review'].time
    for customer, day, label in zip(*asked, strict=True):
        days = time[by == customer]
        assert bool(label) == bool(((days > day) & (days <= day + example.WINDOW)).any())
