"""The example that trains GPS."""

import random
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch_geometric.data import Batch

import pyg_fast
from pyg_fast.transforms import ToCSR
from tests.examples._scripts import script


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with script('gps', 'gat', 'node_classification') as module:
        yield module


def test_both_sides_learn(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture
) -> None:
    line = '--molecules 160 --batch-size 16 --channels 16 --layers 1 --epochs 8 --lr 0.03 --device'
    example.main([*line.split(), device.type])
    head, error, *_, guess = capsys.readouterr().out.splitlines()[2:]
    assert head.split() == ['PyG', 'pyg_fast']
    pyg, ours = map(float, error.split()[-2:])
    assert pyg < 0.9 * float(guess.split()[-1].rstrip('.'))
    assert abs(pyg - ours) < 0.05  # The same weights and batches.


@pytest.mark.parametrize('kind', ['gine', 'gated', 'transformer', 'gatv2'])
def test_same_results(kind: str, example: ModuleType, device: torch.device) -> None:
    generator = random.Random(0)
    batch = Batch.from_data_list([example.molecule(generator) for _ in range(4)]).to(device)
    torch.manual_seed(0)
    model = example.GPS(kind, 8, 2).to(device)
    expected = model(batch)
    pyg_fast.accelerate(model)
    torch.testing.assert_close(model(ToCSR()(batch)), expected, atol=1e-4, rtol=1e-4)
    for report in pyg_fast.accelerate_report(model):
        assert report.ran is not None
        assert report.ran.startswith('Fused')


def test_molecules(example: ModuleType) -> None:
    generator = random.Random(1)
    for _ in range(20):
        data = example.molecule(generator)
        assert data.is_undirected()
        assert not data.has_isolated_nodes()
        assert not data.has_self_loops()
        assert data.edge_index[0].bincount().max() <= 4


def test_bad_options(example: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        example.parse(['--channels', '6', '--device', 'cpu'])
    assert 'multiple of 4' in capsys.readouterr().err
