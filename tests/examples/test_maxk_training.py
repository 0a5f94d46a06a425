"""MaxK's example: options, scores, what it trains, its table; and the benchmark that runs it."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import _forks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_fast.datasets import MultiLabelPlantedGraph, PlantedGraph

SCRIPT = Path(__file__).parents[2] / 'examples' / 'maxk_training.py'


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('maxk_training', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script: it imports another one
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules[spec.name], sys.modules['node_classification']


def options(example: ModuleType, line: str, device: str = 'cpu') -> Namespace:
    return example.parse([*line.split(), '--device', device])


def test_usual_options(example: ModuleType) -> None:
    args = options(example, '')
    assert (args.dataset, args.size, args.hidden, args.runs) == ('planted', 'medium', 256, 1)
    assert [str(variant) for variant in args.variants] == [
        'ReLU',
        'MaxK, k = 8',
        'MaxK, k = 16',
        'MaxK, k = 32',
        'MaxK, k = 64',
    ]
    args = options(example, '--dataset planted-labels --k 2,relu,5,2 --balanced --norm none')
    assert (args.size, args.layers, args.hidden, args.norm) == ('dense-medium', 4, 384, 'none')
    assert [str(variant) for variant in args.variants] == [
        'ReLU',
        'MaxK, k = 2',
        'MaxK, k = 5',
        'balanced MaxK, k = 2',
        'balanced MaxK, k = 5',
    ]
    args = options(example, '--dataset Cora --root data --hidden 9 --k 9 --epochs 7')
    assert (args.hidden, args.epochs, args.weight_decay) == (9, 7, 5e-4)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--dataset CS', '--dataset CS needs --root, the folder to keep it in'),
        ('--hidden 16 --k 8,17', '--k 17: more than the 16 hidden channels'),
        ('--k 0', "argument --k: got '0', expected k of at least 1"),
        ('--k 8,tanh', "argument --k: got '8,tanh', expected such as relu,16,32"),
        ('--dropout 1', 'argument --dropout: got 1, expected at least 0 and less than 1'),
        ('--lr fast', "argument --lr: invalid float value: 'fast'"),
        ('--plot a.txt', '--plot a.txt: expected a name ending in .png, .pdf or .svg'),
        ('--plot no/such/a.png', '--plot no/such/a.png: no such folder'),
    ],
)
def test_bad_options(
    example: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(example, line)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f'error: {message}')


def pairs_in_order(score: Tensor, label: Tensor) -> float:
    """The area under the ROC curve, by counting pairs."""
    difference = score[label == 1].view(-1, 1) - score[label == 0]
    return ((difference > 0).double() + 0.5 * (difference == 0)).mean().item()


@given(st.data())
def test_auc_counts_pairs(example: ModuleType, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(2, 40))
    labels = data.draw(st.integers(1, 4))
    levels = data.draw(st.integers(1, 50))  # few distinct scores: most nodes tie
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    out = torch.randint(levels, (nodes, labels), generator=generator) / 7 - 2
    y = torch.randint(2, (nodes, labels), generator=generator).float()
    counted = [
        pairs_in_order(out[:, label], y[:, label])
        for label in range(labels)
        if 0 < y[:, label].sum() < nodes
    ]
    if counted:
        assert example.auc(out, y) == pytest.approx(sum(counted) / len(counted), abs=1e-12)
    else:
        assert math.isnan(example.auc(out, y))


def test_auc_of_many_nodes(example: ModuleType, device: torch.device) -> None:
    y = (torch.arange(200_000, device=device) % 50 == 0).float().view(-1, 1)
    score = torch.randn(200_000, 1, device=device)
    assert example.auc(score, y) == pytest.approx(0.5, abs=0.02)
    assert example.auc(y, y) == 1
    assert example.auc(-y, y) == 0
    assert example.auc(torch.cat([score, y], 1), torch.cat([y, y], 1)) == pytest.approx(
        (1 + example.auc(score, y)) / 2
    )


def test_other_scores(example: ModuleType) -> None:
    out = torch.tensor([[2.0, -1.0, 0.5], [-1.0, -2.0, -3.0], [-1.0, 3.0, 0.1]])
    y = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
    hits, false, missed = 3, 1, 1
    assert example.micro_f1(out, y) == pytest.approx(2 * hits / (2 * hits + false + missed))
    assert example.micro_f1(-torch.ones(2, 3), torch.zeros(2, 3)) == 0
    assert example.accuracy(out, torch.tensor([0, 1, 1])) == pytest.approx(2 / 3)


@pytest.mark.parametrize('model', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('dataset', ['planted', 'planted-labels'])
def test_all_variants_train_the_same_network(
    example: ModuleType,
    device: torch.device,
    record_calls: Callable[..., list],
    model: str,
    dataset: str,
) -> None:
    def trainer(_: None, self: Any, model: Any, data: Any, *rest: Any) -> tuple:
        assert isinstance(data.edge_index, EdgeIndex)
        assert data.edge_index.device.type == device.type
        start = torch.cat([p.detach().view(-1) for p in model.parameters()])
        return model.k, model.balanced, start

    trained = record_calls(example.Trainer, '__init__', trainer)
    args = options(
        example,
        f'--dataset {dataset} --size tiny --model {model} --layers 2 --hidden 16 --k 4 '
        '--balanced --epochs 8 --runs 2 --dropout 0',
        device.type,
    )
    result = example.sweep(args)

    _, *runs = trained  # the first one measures the aggregation
    assert [run[:2] for run in runs] == 2 * [(None, False), (4, False), (4, True)]
    first, second = runs[0][2], runs[3][2]
    assert all(torch.equal(run[2], first) for run in runs[:3])
    assert all(torch.equal(run[2], second) for run in runs[3:])
    assert not torch.equal(first, second)

    expected = MultiLabelPlantedGraph if dataset == 'planted-labels' else PlantedGraph
    graph = expected('tiny')
    assert result.graph == {
        'nodes': 300,
        'edges': graph[0].num_edges,
        'features': 64,
        'classes': graph.num_classes,
    }
    assert result.metrics == (('AUC', 'micro-F1') if dataset == 'planted-labels' else ('accuracy',))
    losses = []
    for outcome in result.outcomes:
        assert [len(run) for run in outcome.runs] == [8, 8]
        assert outcome.epoch_seconds > 0
        for run in outcome.runs:
            assert run[-1].loss < run[0].loss
            assert all(0 <= score <= 1 for point in run for score in point.val + point.test)
            losses.append(run[-1].loss)
    assert len(set(losses)) == 6
    assert result.aggregation_seconds > 0


def test_aggregation_that_is_not_seen(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, 'AGGREGATION', ('aten::nothing',))
    with pytest.raises(RuntimeError, match='has seen no time of aten::nothing'):
        example.sweep(options(example, '--size tiny --hidden 4 --k 2 --epochs 1'))


@pytest.fixture
def result(example: ModuleType) -> Any:
    def run(*points: tuple[float, float, float]) -> list[Any]:
        return [
            example.Point(seconds, 1.0, (val, 0.0), (test, 0.3)) for seconds, val, test in points
        ]

    return example.Sweep(
        {'nodes': 3},
        ('AUC', 'micro-F1'),
        [
            example.Outcome(
                example.Variant(),
                [
                    run((0.5, 0.7, 0.6), (0.4, 0.8, 0.75), (0.3, 0.8, 0.9)),
                    run((0.4, 0.9, 0.85), (0.4, 0.8, 0.9), (0.4, 0.7, 0.9)),
                ],
            ),
            example.Outcome(example.Variant(8), [run((0.2, 0.7, 0.9))]),
            example.Outcome(example.Variant(8, True), [run((0.25, 0.7, 0.8))]),
        ],
        aggregation_seconds=0.3,
    )


def test_limit_of_the_speed_up(result: Any) -> None:
    assert result.aggregation_share == pytest.approx(0.75)
    assert result.limit == pytest.approx(4)
    assert [result.speedup(outcome) for outcome in result.outcomes] == pytest.approx([1, 2, 1.6])


def test_table(example: ModuleType, result: Any) -> None:
    assert [row.split() for row in example.table(result).splitlines()] == [
        [
            'test',
            'AUC',
            '[%]',
            'test',
            'micro-F1',
            '[%]',
            'time',
            'per',
            'epoch',
            '[ms]',
            'speed-up',
        ],
        ['ReLU', '80.0', '+-', '7.1', '30.0', '+-', '0.0', '400.00', '1.00', 'x'],
        ['MaxK,', 'k', '=', '8', '90.0', '30.0', '200.00', '2.00', 'x'],
        ['balanced', 'MaxK,', 'k', '=', '8', '80.0', '30.0', '250.00', '1.60', 'x'],
        ['limit', '(Amdahl)', '100.00', '4.00', 'x'],
        [],
        ['The', 'aggregation', 'takes', '75.0', '%', 'of', 'an', 'epoch', 'with', 'ReLU.'],
    ]


def test_plot(example: ModuleType, result: Any, tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    example.plot(result, 'MaxK on a graph', tmp_path / 'plot.svg')
    picture = (tmp_path / 'plot.svg').read_text()
    for text in (
        'MaxK on a graph',
        'Test AUC [%]',
        'Time per epoch [ms]',
        'ReLU',
        'MaxK',
        'balanced MaxK',
        'limit: 4.00 x',
    ):
        assert f'<!-- {text} -->' in picture


def run_python(*command: str, cwd: Path) -> subprocess.CompletedProcess:
    env = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith('TQDM_') and key != 'PYG_FAST_DATA'
    }
    done = _forks.run(*command, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done


def test_one_command(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    done = run_python(
        str(SCRIPT),
        '--size',
        'tiny',
        '--hidden',
        '16',
        '--k',
        'relu,2,4',
        '--epochs',
        '3',
        '--device',
        'cpu',
        '--plot',
        'plot.png',
        cwd=tmp_path,
    )
    for line in (
        '300 nodes, 1,954 edges, 64 features, 4 classes',
        'test accuracy [%]',
        'time per epoch [ms]',
        'limit (Amdahl)',
        'The aggregation takes',
    ):
        assert line in done.stdout
    assert 'MaxK, k = 4              run 1/1: 100%' in done.stderr
    assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')


def test_benchmark(tmp_path: Path) -> None:
    done = run_python(
        '-m',
        'benchmarks.accuracy',
        '--quick',
        '--graphs',
        'Cora,planted,planted-labels',
        '--k',
        '4,8',
        '--hidden',
        '8',
        '--epochs',
        '1',
        '--device',
        'cpu',
        '--threads',
        '1',
        '--out',
        str(tmp_path),
        cwd=SCRIPT.parents[1],
    )
    (written,) = tmp_path.glob('accuracy-*.json')
    report, markdown = json.loads(written.read_text()), written.with_suffix('.md').read_text()
    assert markdown in done.stdout
    assert report['left_out'] == {'Cora': 'PYG_FAST_DATA is not set'}
    assert report['graphs']['planted']['nodes'] == 3000
    sections = {section['title']: section for section in report['sections']}
    assert list(sections) == [
        'Test accuracy, %',
        'Test accuracy over epochs, %',
        'Test AUC, %',
        'Test micro-F1, %',
        'Test AUC over epochs, %',
        'Time per epoch, ms',
    ]
    for title, section in sections.items():
        if 'over epochs' in title:
            continue
        assert f'## {title}\n' in markdown
        for cell in section['cells']:
            assert list(cell['results']) == [
                'ReLU',
                'MaxK, k = 4',
                'MaxK, k = 8',
                'balanced MaxK, k = 4',
                'balanced MaxK, k = 8',
            ]
            for result in cell['results'].values():
                assert 0 < result['min_ms'] <= result['median_ms'] <= result['max_ms']
    scores = sections['Test AUC, %']['cells'][0]['results']
    means = {name: sum(result['scores']) / 2 for name, result in scores.items()}
    for row in sections['Test AUC, %']['summary']:
        assert row['mean'] == pytest.approx(means[row['variant']], rel=1e-4)
        assert row['difference'] == pytest.approx(means[row['variant']] - means['ReLU'], rel=1e-3)
        assert f'{row["mean"]:.2f} ± ' in markdown


def test_benchmark_chooses_by_validation_scores_alone(tmp_path: Path) -> None:
    done = run_python(
        '-m',
        'benchmarks.accuracy',
        '--choose',
        '--quick',
        '--graphs',
        'planted',
        '--hidden',
        '8',
        '--epochs',
        '2',
        '--device',
        'cpu',
        '--threads',
        '1',
        '--out',
        str(tmp_path),
        cwd=SCRIPT.parents[1],
    )
    (written,) = tmp_path.glob('accuracy-*.json')
    report, markdown = json.loads(written.read_text()), written.with_suffix('.md').read_text()
    (section,) = report['sections']
    assert section['title'] == 'Validation scores of ReLU, %'
    (cell,), (row,) = section['cells'], section['summary']
    assert len(cell['results']) == 9
    means = {name: sum(result['scores']) / 2 for name, result in cell['results'].items()}
    assert len(set(means.values())) > 1
    assert means[row['chosen']] == max(means.values())
    assert f'**{means[row["chosen"]]:.2f} ± ' in markdown
    assert 'seeds from 100 on' in report['notes'][0]
    assert 'test accuracy' not in (done.stdout + done.stderr).lower()


def test_cora_reaches_its_accuracy(
    example: ModuleType, data_root: Callable[[str, str], Path]
) -> None:
    root = data_root('Planetoid', 'Cora').parent
    args = options(example, f'--dataset Cora --root {root} --hidden 64 --k 16 --epochs 40')
    for outcome in example.sweep(args).outcomes:
        assert outcome.scores[0][0] > 76
