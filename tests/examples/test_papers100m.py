"""The example that trains on a graph of the size of ogbn-papers100M."""

import gzip
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from pyg_fast.datasets import DirectedSize, PlantedGraph


@pytest.fixture
def example() -> Iterator[ModuleType]:
    folder = str(Path(__file__).parents[2] / 'examples')
    sys.path.insert(0, folder)  # as for a script: it imports another one
    yield importlib.import_module('papers100m')
    sys.path.remove(folder)
    for name in ('papers100m', 'node_classification'):
        sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def small() -> Data:
    return PlantedGraph(DirectedSize(3_000, 40_000, 5, train=0.1, val=0.1, test=0.3))[0]


def write_ogb(root: Path, data: Data, fortran: bool = False) -> None:
    """OGB's raw files of a graph whose nodes without a mask have no label."""
    labelled = data.train_mask | data.val_mask | data.test_mask
    label = data.y.float().where(labelled, torch.nan).view(-1, 1)
    (root / 'raw').mkdir()
    (root / 'split' / 'time').mkdir(parents=True)
    edges = data.edge_index.numpy()
    np.savez(
        root / 'raw' / 'data.npz',
        edge_index=np.asfortranarray(edges) if fortran else edges,
        node_feat=data.x.numpy(),
        node_year=np.zeros((data.num_nodes, 1)),
        num_nodes_list=np.array([data.num_nodes]),
        num_edges_list=np.array([data.num_edges]),
    )
    np.savez(root / 'raw' / 'node-label.npz', node_label=label.numpy())
    for part, name in (('train', 'train'), ('val', 'valid'), ('test', 'test')):
        nodes = data[f'{part}_mask'].nonzero().view(-1).tolist()
        with gzip.open(root / 'split' / 'time' / f'{name}.csv.gz', 'wt') as file:
            file.writelines(f'{node}\n' for node in nodes)


@pytest.mark.parametrize(
    'line',
    [
        '--conv gcn --aggregate-input --int64',
        '--conv sage --symmetric --host-features --checkpoint --dtype float32 --dropout 0.1',
    ],
)
def test_it_learns(
    example: ModuleType, device: torch.device, capsys: pytest.CaptureFixture, line: str
) -> None:
    example.main(f'--size papers-like-tiny --steps 10 {line} --device {device.type}'.split())
    out = capsys.readouterr().out
    assert out.startswith(
        f'20,000 nodes, {580_000 if "symmetric" in line else 290_000:,} edges, 128 features, '
        f'10 classes, 217 training nodes ({device.type})\n'
    )
    assert out.count('ExecutionPath(') == 3
    for name in ('making the graph', 'preparing', 'training step', 'inference of all nodes'):
        assert re.search(rf'^{name} +[\d.e-]+ s   (unknown|[\d.]+ GiB)', out, re.MULTILINE)
    assert re.search(r'estimated [\d.]+', out)
    assert float(re.search(r'test accuracy ([\d.]+) %', out)[1]) > 60


@pytest.mark.parametrize('fortran', [False, True])
def test_files_of_ogb(
    example: ModuleType,
    device: torch.device,
    small: Data,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fortran: bool,
) -> None:
    write_ogb(tmp_path, small, fortran)
    monkeypatch.setattr(example, 'CHUNK', 10_000)  # several chunks, the last one smaller
    line = ['--root', str(tmp_path), '--device', device.type, '--host-features']
    data, num_classes = example.load(example.parse(line))
    assert num_classes == 5
    assert set(data.keys()) == set(small.keys())
    assert data.x.device.type == 'cpu'
    assert data.x.is_pinned() == (device.type == 'cuda')
    assert torch.equal(data.x, small.x.bfloat16())
    assert data.edge_index.dtype == torch.int32
    assert data.edge_index.is_contiguous()
    labelled = small.train_mask | small.val_mask | small.test_mask
    assert torch.equal(data.y.cpu(), torch.where(labelled, small.y, -1))
    for key in ('edge_index', 'train_mask', 'val_mask', 'test_mask'):
        assert data[key].device.type == device.type
        assert torch.equal(data[key].cpu(), small[key].to(data[key].dtype))


def test_training_on_files_of_ogb(
    example: ModuleType,
    device: torch.device,
    small: Data,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    write_ogb(tmp_path, small)
    example.main(['--steps', '10', '--device', device.type, '--root', str(tmp_path)])
    out = capsys.readouterr().out
    assert out.startswith('3,000 nodes, 40,000 edges, 128 features, 5 classes, 300 training nodes')
    assert 'reading the graph' in out
    assert float(re.search(r'test accuracy ([\d.]+) %', out)[1]) > 60


@pytest.mark.parametrize('what', ['missing', 'short', 'two graphs'])
def test_files_that_are_not_ogbs(
    example: ModuleType, small: Data, tmp_path: Path, what: str
) -> None:
    write_ogb(tmp_path, small)
    file = tmp_path / 'raw' / 'data.npz'
    arrays = dict(np.load(file))
    if what == 'missing':
        (tmp_path / 'split' / 'time' / 'valid.csv.gz').unlink()
    elif what == 'two graphs':
        np.savez(file, **arrays | {name: np.array([1, 2]) for name in arrays if 'list' in name})
    else:
        np.savez(file, **arrays)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                np.lib.format,
                'read_array_header_1_0',
                lambda _: ((3_000, 999), False, np.dtype('float32')),
            )
            with pytest.raises(example.Missing, match='node_feat ends too early'):
                example.read_array(file, 'node_feat', torch.float32, 'cpu')
        return
    message = {
        'missing': r'valid.csv.gz does not exist: expected raw/data.npz',
        'two graphs': r'data.npz: expected one graph, got 2',
    }[what]
    with pytest.raises(SystemExit, match=message):
        example.main(['--device', 'cpu', '--root', str(tmp_path)])


def test_small_updates_are_not_lost(example: ModuleType, small: Data) -> None:
    """Weights are float32 even if the network computes in bfloat16."""
    args = example.parse(['--device', 'cpu', '--lr', '1e-6'])
    data = example.prepare(small.clone(), args)
    data.x = data.x.bfloat16()
    training = example.Training(data, 5, args)
    before = [weight.clone() for weight in training.weights]
    for _ in range(2):
        training.step()
    for weight, start, low in zip(
        training.weights, before, training.model.parameters(), strict=True
    ):
        assert (weight.dtype, low.dtype) == (torch.float32, torch.bfloat16)
        assert not torch.equal(weight, start)
        assert torch.equal(low, weight.bfloat16())


def test_prepared_graph_replaces_the_list(example: ModuleType, small: Data) -> None:
    data = small.clone()
    example.prepare(data, example.parse(['--device', 'cpu']))
    from pyg_fast.graph import PreparedGraph

    assert isinstance(data.edge_index, PreparedGraph)


def test_both_ways(example: ModuleType) -> None:
    edge_index = torch.tensor([[0, 1, 2], [3, 1, 0]], dtype=torch.int32)
    assert example.both_ways(edge_index).tolist() == [[0, 1, 2, 3, 1, 0], [3, 1, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--size tiny', 'invalid choice'),
        ('--conv gat', 'invalid choice'),
        ('--steps 0', 'argument --steps: got 0, expected at least 1'),
        ('--inference-bytes 0', 'argument --inference-bytes: got 0, expected at least 1'),
    ],
)
def test_bad_options(
    example: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        example.parse(line.split())
    assert message in capsys.readouterr().err
