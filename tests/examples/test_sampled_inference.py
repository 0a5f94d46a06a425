"""The example of sampled inference: its options, what it trains and measures, what it reports."""

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import _forks
import pytest
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fast.datasets import planted_structure

SCRIPT = Path(__file__).parents[2] / 'examples' / 'sampled_inference.py'


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('sampled_inference_example', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script: it imports others
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    for name in (spec.name, 'maxk_training', 'node_classification'):
        del sys.modules[name]


def options(example: ModuleType, line: str, device: str = 'cpu') -> Namespace:
    return example.parse([*line.split(), '--device', device])


def test_usual_options(example: ModuleType) -> None:
    args = options(example, '')
    assert (args.dataset, args.size, args.model, args.samples) == (
        'planted',
        'dense-small',
        'gcn',
        None,
    )
    assert (args.strategies, args.max_drop, args.runs) == (['fastrand', 'bucket'], 1, 1)
    args = options(example, '--dataset planted-labels --samples 4,2,4 --strategies paper')
    assert (args.size, args.samples, args.strategies) == ('dense-hubs', [4, 2], ['paper'])
    args = options(example, '--dataset tolokers --root data --dropout 0')
    assert (args.epochs, args.weight_decay, args.dropout) == (400, 0, 0)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--dataset tolokers', '--dataset tolokers needs --root, the folder to keep it in'),
        ('--samples 4,0', "argument --samples: got '4,0', expected numbers from 1 to 4096"),
        ('--samples 4097', "argument --samples: got '4097', expected numbers from 1 to 4096"),
        ('--samples few', "argument --samples: got 'few', expected numbers from 1 to 4096"),
        ('--strategies fastrand,best', "argument --strategies: got 'fastrand,best', expected some"),
        ('--max-drop -1', 'argument --max-drop: got -1, expected at least 0'),
        ('--repeats -1', 'argument --repeats: got -1, expected at least 0'),
        ('--dropout 1', 'argument --dropout: got 1, expected at least 0 and less than 1'),
        ('--plot a.txt', '--plot a.txt: expected a name ending in .png, .pdf or .svg'),
        ('--plot no/such/a.png', '--plot no/such/a.png: no such folder'),
        ('--markdown no/such/a.md', '--markdown no/such/a.md: no such folder'),
        ('--json no/such/a.json', '--json no/such/a.json: no such folder'),
    ],
)
def test_bad_options(
    example: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    if line.startswith('--plot'):
        pytest.importorskip('matplotlib')
    with pytest.raises(SystemExit) as stopped:
        options(example, line)
    assert stopped.value.code == 2
    assert f'error: {message}' in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize('model', ['gcn', 'sage'])
def test_trains_in_full_and_samples_at_inference(
    example: ModuleType, device: torch.device, record_calls: Callable[..., list], model: str
) -> None:
    def call(_: Tensor, net: Any, x: Tensor, edge_index: Tensor) -> tuple:
        assert isinstance(edge_index, EdgeIndex)
        assert edge_index.device.type == device.type
        conv, other = net.convs
        how = (conv.sample, conv.num_samples, conv.strategy)
        assert how == (other.sample, other.num_samples, other.strategy)
        return net, net.training, how

    calls = record_calls(example.Net, 'forward', call)
    args = options(
        example,
        f'--size tiny --model {model} --epochs 12 --runs 2 --repeats 3 --samples 128,1,4 '
        '--strategies bucket,unbiased',
        device.type,
    )
    result = example.sweep(args)

    assert [(cell.strategy, cell.num_samples) for cell in result.cells] == [
        (strategy, s) for strategy in ('bucket', 'unbiased') for s in (1, 4, 128)
    ]
    rowptr, _ = planted_structure('tiny')
    degree = rowptr.diff()
    assert result.graph == {
        'nodes': 300,
        'edges': int(degree.sum()),
        'largest_degree': int(degree.max()),
        'features': 64,
        'classes': 4,
    }
    assert int(degree.max()) <= 128
    networks = list(dict.fromkeys(call[0] for call in calls))
    assert len(networks) == len(result.full_scores) == 2
    first, second = (next(network.parameters()) for network in networks)
    assert not torch.equal(first, second)
    for network in networks:
        mine = [call[1:] for call in calls if call[0] is network]
        assert sum(training for training, _ in mine) == 12
        assert all(how[0] == 'never' for training, how in mine if training)
        for strategy in ('bucket', 'unbiased'):
            for s in (1, 4, 128):  # scored, and timed in the first run
                assert mine.count((False, ('always', s, strategy))) == 1
                timed = mine.count((False, ('eval', s, strategy)))
                assert timed == (4 if network is networks[0] else 0)
    for cell in result.cells:
        assert len(cell.scores) == 2
        assert len(cell.seconds) == 3
        assert all(seconds > 0 for seconds in cell.seconds)
    assert len(result.full_seconds) == 3
    assert all(len(chosen) == 2 for chosen in result.chosen.values())
    bucket = result.of('bucket')
    assert bucket[-1].scores == pytest.approx(result.full_scores)
    assert bucket[-1].sampling_rate == 1 > bucket[0].sampling_rate > 0
    assert result.loss(bucket[-1]) == pytest.approx(0)
    assert min(result.full_scores) > 0.5


def test_no_more_samples_than_edges(example: ModuleType) -> None:
    assert example.within([8, 2, 4, 16], 4) == [2, 4]
    assert example.within([8, 2, 4, 16], 5) == [2, 4, 8]
    assert example.within([2, 4], 100) == [2, 4]
    assert example.within([3, 5], 0) == [3]


def test_test_scores_are_of_their_own_samples(example: ModuleType) -> None:
    args = options(example, '--size tiny --epochs 3 --samples 1,2,128 --repeats 0')
    data, num_classes, task = example.load_data(args)
    data = example.ToCSR()(data)
    parts = example.parts_of(data, num_classes, 0)
    model = example.Net(example.SampledGCNConv, 64, 16, 4).eval()
    result = example.Sweep({}, 'accuracy')
    example.measure(result, model, data, parts, example.accuracy, [1, 2, 128], args)
    test = parts['test']
    for cell in result.cells:
        model.sample('eval', cell.num_samples, cell.strategy)
        out = model(data.x, data.edge_index)
        assert cell.scores == [example.accuracy(out[test], data.y[test])]
    model.sample('never')
    out = model(data.x, data.edge_index)
    assert result.full_scores == [example.accuracy(out[test], data.y[test])]
    assert len({tuple(cell.scores) for cell in result.cells}) > 2


def test_goes_back_to_the_best_weights(example: ModuleType) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(1, 1)

        def epochs(self, count: int) -> Iterator[Any]:
            for epoch, val in enumerate((0.2, 0.8, 0.8, 0.5)[:count]):
                torch.nn.init.constant_(self.model.weight, epoch)
                yield example.maxk_training.Point(0.1, 1.0, (val, 0.0), (0.0, 0.0))

    trainer = Trainer()
    example.train(trainer, 4, 'test')
    assert trainer.model.weight.item() == 1
    assert not trainer.model.training


def test_many_labels(example: ModuleType) -> None:
    args = options(example, '--dataset planted-labels --size tiny --epochs 2 --repeats 0')
    result = example.sweep(args)
    assert result.graph['classes'] == example.NUM_LABELS == 112
    assert result.metric == 'AUC'
    assert result.full_seconds == []
    assert 'inference' not in example.table(result)


def test_one_of_several_splits(example: ModuleType) -> None:
    data = example.Data(x=torch.ones(6, 1), y=torch.zeros(6, dtype=torch.long))
    for k, part in enumerate(('train', 'val', 'test')):
        data[f'{part}_mask'] = torch.tensor([[k == n % 3, k == (n + 1) % 3] for n in range(6)])
    assert example.parts_of(data, 2, 4)['train'].tolist() == [0, 3]
    assert example.parts_of(data, 2, 5)['train'].tolist() == [2, 5]
    assert data.train_mask.shape == (6, 2)


def test_auc_of_two_classes(example: ModuleType) -> None:
    out = torch.tensor([[0.0, 1.0], [5.0, 5.5], [1.0, 0.0], [0.0, 0.1]])
    y = torch.tensor([1, 1, 0, 0])
    assert example.margin_auc(out, y) == 1
    assert example.margin_auc(out, 1 - y) == 0
    assert example.margin_auc(out, torch.tensor([1, 0, 0, 1])) == 0.75


@pytest.fixture
def result(example: ModuleType) -> Any:
    cells = [
        example.Cell('fastrand', 2, 0.1, [0.60, 0.62], [2e-3, 1e-3, 9.0]),
        example.Cell('fastrand', 4, 0.25, [0.79, 0.81], [4e-3]),
        example.Cell('fastrand', 8, 1.0, [0.80, 0.81], [5e-3]),
        example.Cell('bucket', 2, 0.1, [0.82, 0.80], [2e-3]),
        example.Cell('bucket', 4, 0.25, [0.7, 0.7], [4e-3]),
        example.Cell('bucket', 8, 1.0, [0.70, 0.81], [16e-3]),
    ]
    return example.Sweep(
        {'nodes': 30, 'edges': 1200, 'largest_degree': 8},
        'accuracy',
        [0.80, 0.81],
        [8e-3],
        cells,
        {'fastrand': [2, 4], 'bucket': [None, 8]},
    )


def test_figures(result: Any) -> None:
    assert result.loss(result.cells[0]) == pytest.approx(19.5)
    assert result.loss(result.cells[3]) == pytest.approx(-0.5)
    assert result.speedup(result.cells[0]) == pytest.approx(4)
    assert result.least('fastrand', 1.0) == 4
    assert result.least('fastrand', 0.1) == 8
    assert result.least('bucket', 1.0) is None  # The scores of two samples are too noisy.
    assert result.least('bucket', 10.6) == 2


def test_table_and_verdict(example: ModuleType, result: Any) -> None:
    lines = example.table(result).splitlines()
    assert lines[0] == (
        '| strategy | S | edges read, % | test accuracy, % | lost, points | inference, ms '
        '| speed-up |'
    )
    assert lines[2] == '| all edges | – | 100.00 | 80.50 ± 0.71 | – | 8.00 | – |'
    assert lines[4] == '| fastrand | 4 | 25.00 | 80.00 ± 1.41 | 0.50 | 4.00 | 2.00 x |'
    assert lines[8] == '| bucket | 8 | 100.00 | 75.50 ± 7.78 | 5.00 | 16.00 | 0.50 x |'
    assert example.verdict(result, 1.0).splitlines() == [
        '- fastrand: within 1 points by the test nodes: S = 4 and more; chosen by the validation '
        'nodes: 2, 4',
        '- bucket: within 1 points by the test nodes: no S loses so little; chosen by the '
        'validation nodes: none, 8',
    ]


def test_plot(example: ModuleType, result: Any, tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    example.plot(result, 'GCN sampled', tmp_path / 'plot.svg')
    picture = (tmp_path / 'plot.svg').read_text()
    for text in (
        'GCN sampled',
        'Test accuracy [%]',
        'Edges read [%]',
        'Time per inference [ms]',
        'fastrand',
        'bucket',
        'all edges',
        '2',
        '4',
        '8',
    ):
        assert f'<!-- {text} -->' in picture
    result.full_seconds, result.cells = [], result.cells[:3]
    result.chosen = {'fastrand': [2, 4]}
    example.plot(result, 'GCN sampled', tmp_path / 'untimed.svg')
    untimed = (tmp_path / 'untimed.svg').read_text()
    assert '<!-- Edges read [%] -->' in untimed
    assert '<!-- bucket -->' not in untimed
    assert 'Time per inference' not in untimed


def test_record(example: ModuleType, result: Any) -> None:
    args = options(example, '--dataset Cora --root data')
    record = json.loads(json.dumps(example.record(args, result)))
    assert record['arguments']['root'] == 'data'
    assert record['versions']['torch'] == torch.__version__
    assert record['full'] == {'scores': [0.80, 0.81], 'ms': pytest.approx(8)}
    assert record['cells'][0] == {
        'strategy': 'fastrand',
        'num_samples': 2,
        'sampling_rate': 0.1,
        'scores': [0.60, 0.62],
        'lost_points': pytest.approx(19.5),
        'ms': pytest.approx(2),
    }
    assert record['least'] == {'fastrand': 4, 'bucket': None}
    assert record['chosen'] == {'fastrand': [2, 4], 'bucket': [None, 8]}


def test_one_command(tmp_path: Path) -> None:
    plots = importlib.util.find_spec('matplotlib') is not None
    command = [
        str(SCRIPT),
        '--size',
        'small',
        '--epochs',
        '5',
        '--repeats',
        '2',
        '--device',
        'cpu',
        '--markdown',
        'table.md',
        '--json',
        'record.json',
        *['--plot', 'plot.png'] * plots,
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith('TQDM_')}
    done = _forks.run(*command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for line in (
        'GCN on planted, small, sampled at inference (cpu): 2 layers, hidden 64, 5 epochs',
        '3,000 nodes, 25,174 edges, 341 largest degree',
        '| all edges | – | 100.00 |',
        '- bucket: within 1 points',
        'wrote table.md',
        'wrote record.json',
    ):
        assert line in done.stdout
    assert 'gcn  run 1/1: 100%' in done.stderr
    assert '| fastrand | 512 | 100.00 |' in (tmp_path / 'table.md').read_text()
    assert len(json.loads((tmp_path / 'record.json').read_text())['cells']) == 20
    if plots:
        assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')


def test_tolokers(example: ModuleType, data_root: Callable[[str, str], Path]) -> None:
    root = data_root('HeterophilousGraphDataset', 'tolokers').parent
    args = options(
        example, f'--dataset tolokers --root {root} --epochs 2 --repeats 0 --samples 2,4096'
    )
    result = example.sweep(args)
    assert result.graph['nodes'] == 11_758
    assert result.metric == 'AUC'
    assert result.of('fastrand')[-1].scores == pytest.approx(result.full_scores)
