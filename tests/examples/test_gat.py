"""GAT's example: its options, what it trains, when it ends, its table and record."""

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
from torch_geometric import EdgeIndex
from torch_geometric.data import Data

SCRIPT = Path(__file__).parents[2] / 'examples' / 'gat.py'


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('gat_example', SCRIPT)
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
    assert (args.dataset, args.size, args.model, args.layers_of) == (
        'planted',
        'small',
        'gat',
        'both',
    )
    args = options(example, '--dataset Cora --root data')
    assert (args.heads, args.hidden, args.out_heads, args.dropout) == (8, 8, 1, 0.6)
    assert (args.lr, args.weight_decay, args.patience) == (0.005, 5e-4, 100)
    args = options(example, '--dataset PubMed --root data --epochs 7 --lr 0')
    assert (args.out_heads, args.lr, args.weight_decay, args.epochs) == (8, 0, 1e-3, 7)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--dataset CiteSeer', '--dataset CiteSeer needs --root, the folder to keep it in'),
        ('--heads 0', 'argument --heads: got 0, expected at least 1'),
        ('--dropout 1', 'argument --dropout: got 1, expected at least 0 and less than 1'),
        ('--lr fast', "argument --lr: invalid float value: 'fast'"),
        ('--json no/such/a.json', '--json no/such/a.json: no such folder'),
    ],
)
def test_bad_options(
    example: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(example, line)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f'error: {message}')


@pytest.mark.parametrize('model', ['gat', 'gatv2'])
def test_both_sides_train_the_same_network(
    example: ModuleType, device: torch.device, record_calls: Callable[..., list], model: str
) -> None:
    trained = record_calls(
        example,
        'train',
        lambda _, model, data, *rest: (
            *(type(conv).__name__ for conv in (model.conv1, model.conv2)),
            type(data.edge_index),
        ),
    )
    args = options(
        example,
        f'--size tiny --epochs 6 --runs 2 --model {model} --out-heads 3 --dropout 0',
        device.type,
    )
    size, outcomes = example.compare(args)

    name = {'gat': 'GATConv', 'gatv2': 'GATv2Conv'}[model]
    turn = [(name, name, torch.Tensor), (f'Fused{name}', f'Fused{name}', EdgeIndex)]
    assert trained == turn * 2
    assert (size['nodes'], size['features'], size['classes']) == (300, 64, 4)
    pyg, ours = outcomes['PyG'], outcomes['pyg_fast']
    assert pyg.epochs == ours.epochs == [6, 6]
    for left, right in zip(pyg.runs, ours.runs, strict=True):
        for measure in ('loss', 'val_loss'):
            assert [getattr(point, measure) for point in left] == pytest.approx(
                [getattr(point, measure) for point in right], rel=2e-3
            )
        assert left[-1].loss < left[0].loss
    assert pyg.runs[0][0].loss != pyg.runs[1][0].loss


def test_dropout_of_features_and_attention(example: ModuleType) -> None:
    edge_index = torch.arange(30).view(2, 15) % 7
    for conv in example.CONVS.values():
        net = example.GAT(conv, 5, 3)
        assert net.dropout == net.conv1.dropout == net.conv2.dropout == 0.6
        first, second = (net(torch.ones(7, 5), edge_index) for _ in range(2))
        assert not torch.equal(first, second)
        net.eval()
        first, second = (net(torch.ones(7, 5), edge_index) for _ in range(2))
        assert torch.equal(first, second)


def test_one_side(example: ModuleType) -> None:
    _, outcomes = example.compare(
        options(example, '--size tiny --epochs 1 --heads 1 --hidden 2 --layers-of ours')
    )
    assert list(outcomes) == ['pyg_fast']
    assert [row.split()[-1] for row in example.table(outcomes).splitlines()[:1]] == ['pyg_fast']


def test_patience(example: ModuleType) -> None:
    class Fixed(torch.nn.Module):
        """Scores that get worse after some epochs, the loss first."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.epoch = 0

        def forward(self, x: torch.Tensor, _: Any) -> torch.Tensor:
            self.epoch += self.training
            right = min(self.epoch, 6) if self.epoch < 9 else 3  # of 8 nodes
            out = torch.full((8, 2), -float(max(self.epoch, 4)))
            out[torch.arange(8), (torch.arange(8) >= right).long()] *= -1
            return out + 0 * self.weight

    nodes = torch.arange(8)
    data = Data(x=torch.zeros(8, 1), y=torch.zeros(8, dtype=torch.long), edge_index=None)
    parts = dict.fromkeys(('train', 'val', 'test'), nodes)
    args = Namespace(lr=0.1, weight_decay=0.0, epochs=30, patience=4)
    points = list(example.train(Fixed(), data, parts, args))
    assert [point.val for point in points[:9]] == [n / 8 for n in (1, 2, 3, 4, 5, 6, 6, 6, 3)]
    assert len(points) == 8 + 4  # the last of the best epochs, then the patience
    assert (
        len(list(example.train(Fixed(), data, parts, Namespace(**{**vars(args), 'epochs': 10}))))
        == 10
    )


@pytest.fixture
def outcomes(example: ModuleType) -> dict[str, Any]:
    def run(*points: tuple[float, float, float, float]) -> list[Any]:
        return [
            example.Point(seconds, 1.0, val_loss, val, test)
            for seconds, val_loss, val, test in points
        ]

    return {
        'PyG': example.Outcome(
            [
                run((0.4, 2.0, 0.8, 0.7), (0.4, 1.0, 0.8, 0.81), (0.5, 0.9, 0.7, 0.9)),
                run((0.3, 1.0, 0.9, 0.79)),
            ]
        ),
        'pyg_fast': example.Outcome([run((0.1, 1.0, 0.7, 0.805)), run((0.1, 1.0, 0.7, 0.815))]),
    }


def test_table(example: ModuleType, outcomes: dict[str, Any]) -> None:
    assert [row.split() for row in example.table(outcomes).splitlines()] == [
        ['PyG', 'pyg_fast'],
        [
            'test',
            'accuracy',
            '[%]',
            '80.00',
            '+-',
            '1.41',
            '81.00',
            '+-',
            '0.71',
            '+1.00',
            'points',
        ],
        ['epochs', '2', '1'],
        ['time', 'per', 'epoch', '[ms]', '400.00', '100.00', '4.00', 'x'],
    ]


def test_record(example: ModuleType, outcomes: dict[str, Any]) -> None:
    args = options(example, '--dataset Cora --root data')
    record = json.loads(json.dumps(example.record(args, {'nodes': 3}, outcomes)))
    assert record['arguments']['root'] == 'data'
    assert record['versions']['torch'] == torch.__version__
    assert record['outcomes']['PyG'] == {
        'accuracies': pytest.approx([81, 79]),
        'mean_accuracy': pytest.approx(80),
        'epochs': [3, 1],
        'epoch_ms': pytest.approx(400),
    }


def test_one_command(tmp_path: Path) -> None:
    written = tmp_path / 'scores.json'
    command = [
        str(SCRIPT),
        '--size',
        'tiny',
        '--epochs',
        '3',
        '--runs',
        '2',
        '--model',
        'gatv2',
        '--device',
        'cpu',
        '--json',
        str(written),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith('TQDM_')}
    done = _forks.run(*command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for line in (
        'gatv2 on planted, tiny (cpu): 8 x 8, then 1 heads',
        '300 nodes, 1,954 edges',
        'test accuracy [%]',
        'time per epoch [ms]',
        f'wrote {written}',
    ):
        assert line in done.stdout
    assert 'pyg_fast run 2/2: 100%' in done.stderr
    record = json.loads(written.read_text())
    for side in ('PyG', 'pyg_fast'):
        assert len(record['outcomes'][side]['accuracies']) == 2


def test_cora_reaches_its_accuracy(
    example: ModuleType, data_root: Callable[[str, str], Path]
) -> None:
    root = data_root('Planetoid', 'Cora').parent
    args = options(example, f'--dataset Cora --root {root} --layers-of ours --epochs 60 --lr 0.02')
    _, outcomes = example.compare(args)
    assert outcomes['pyg_fast'].accuracies[0] > 78
