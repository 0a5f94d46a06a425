"""The example of execution paths: its options, what it trains, what it checks, what it reports."""

import importlib.util
import json
import math
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

from pyg_fast.datasets import PlantedGraph
from pyg_fast.nn import AggregatedInput
from pyg_fast.transforms import ExecutionPaths, ToCSR

SCRIPT = Path(__file__).parents[2] / 'examples' / 'execution_paths.py'


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('execution_paths_example', SCRIPT)
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
    assert args.graphs == ['small', 'dense-small']
    assert args.shares == [0.5, 0.2, 0.1, 0.05, 0.01]
    assert args.layers == [1, 2, 3, 4]
    assert (args.model, args.hidden, args.steps) == ('gcn', 64, 10)
    args = options(example, '--graphs Cora,tiny,Cora --root data --shares 1,1e-3,1 --layers 7')
    assert (args.graphs, args.shares, args.layers) == (['Cora', 'tiny'], [1, 0.001], [7])


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--graphs small,CS,Cora', '--graphs CS,Cora needs --root, the folder to keep it in'),
        ('--graphs karate', "argument --graphs: got 'karate', expected some of tiny, small, "),
        ('--shares 0.5,0', "argument --shares: got '0.5,0', expected shares such as 0.1,0.01"),
        ('--shares 10', "argument --shares: got '10', expected shares such as 0.1,0.01"),
        ('--shares nan', "argument --shares: got 'nan', expected shares such as 0.1,0.01"),
        ('--layers 2,0', "argument --layers: got '2,0', expected numbers such as 1,2,3"),
        ('--layers two', "argument --layers: got 'two', expected numbers such as 1,2,3"),
        ('--steps 0', 'argument --steps: got 0, expected at least 1'),
        ('--dropout 1', 'argument --dropout: got 1, expected at least 0 and less than 1'),
        ('--plot a.txt', '--plot a.txt: expected a name ending in .png, .pdf or .svg'),
        pytest.param(
            *('--plot no/such/a.png', '--plot no/such/a.png: no such folder'),
            marks=pytest.mark.skipif(
                importlib.util.find_spec('matplotlib') is None, reason='needs matplotlib'
            ),
        ),
        ('--json no/such/a.json', '--json no/such/a.json: no such folder'),
    ],
)
def test_bad_options(
    example: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(example, line)
    assert stopped.value.code == 2
    assert f'error: {message}' in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize('model', ['gcn', 'sage', 'gin'])
def test_all_ways_train_the_same_network(
    example: ModuleType, device: torch.device, record_calls: Callable[..., list], model: str
) -> None:
    def trainer(_: None, self: Any, way: Any, data: Data, num_layers: int, *rest: Any) -> tuple:
        assert isinstance(data.edge_index, EdgeIndex)
        assert data.edge_index.device.type == device.type
        if way.paths:
            assert [path.num_layers for path in self.paths] == [num_layers] * num_layers
            assert all(path.forward == way.forward for path in self.paths)
            assert self.paths[-1].num_dst == self.nodes.numel()
        else:
            assert self.paths is None
        assert isinstance(self.x, AggregatedInput) == way.aggregate_input
        return way, num_layers, torch.cat([p.detach().view(-1) for p in self.model.parameters()])

    trained = record_calls(example.Trainer, '__init__', trainer)
    line = f'--graphs tiny --model {model} --shares 1,0.02,0.001 --layers 3,1 --steps 4'
    result = example.sweep('tiny', options(example, line, device.type))

    graph = PlantedGraph('tiny')
    assert result.graph == {
        'nodes': 300,
        'edges': graph[0].num_edges,
        'features': 64,
        'classes': graph.num_classes,
    }
    assert [(cell.share, cell.num_layers) for cell in result.cells] == [
        (1, 3),
        (1, 1),
        (0.02, 3),
        (0.02, 1),
        (0.001, 3),
        (0.001, 1),
    ]
    ways = list(example.WAYS.values())
    for at, cell in enumerate(result.cells):
        timed, exact = (trained[len(ways) * k : len(ways) * (k + 1)] for k in (2 * at, 2 * at + 1))
        for group, dtype in ((timed, torch.float32), (exact, torch.float64)):
            assert [entry[:2] for entry in group] == [(way, cell.num_layers) for way in ways]
            assert all(torch.equal(entry[2], group[0][2]) for entry in group)
            assert group[0][2].dtype == dtype
        assert [len(cell.seconds[way]) for way in example.WAYS] == [4] * 4
        assert all(seconds > 0 for times in cell.seconds.values() for seconds in times)
        assert [len(cell.losses[way]) for way in example.WAYS] == [example.CHECKED] * 4
        assert len(set(cell.losses['all active'])) == example.CHECKED
        assert cell.difference <= example.TOLERANCE
        assert cell.preparation_seconds > 0
        assert len(cell.paths) == cell.num_layers
        assert cell.paths[-1]['nodes'] == max(1, round(300 * cell.share))
        shares = [path['share'] for path in cell.paths]
        assert shares == sorted(shares, reverse=True)
        assert all(path['bytes'] > 0 for path in cell.paths)
    everything, _, few, *_ = result.cells
    assert all(path['whole'] and path['share'] == 1 for path in everything.paths)
    assert not few.paths[-1]['whole']
    assert 0 < few.paths[-1]['share'] < 0.2


@pytest.mark.parametrize('difference', ['a gradient', 'nan'])
def test_other_losses_are_an_error(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, difference: str
) -> None:
    class Wrong(example.Trainer):
        """Paths of all training nodes but one, without the checks that would refuse them; or
        losses that are no numbers."""

        def __init__(self, way: Any, data: Data, num_layers: int, *rest: Any) -> None:
            super().__init__(way, data, num_layers, *rest)
            if difference == 'a gradient' and way.paths and not way.forward:
                fewer = data.clone()
                fewer.train_mask[self.nodes[0]] = False
                transform = ExecutionPaths(num_layers, checks=False)
                self.paths, self.mask = transform(fewer).execution_paths, None

        def step(self) -> torch.Tensor:
            return super().step() * (math.nan if difference == 'nan' else 1)

    monkeypatch.setattr(example, 'Trainer', Wrong)
    size = 'nan' if difference == 'nan' else r'[\d.]+e'
    with pytest.raises(RuntimeError, match=f'losses with 10 %, 2 layers differ by {size}'):
        example.sweep('tiny', options(example, '--shares 0.1 --layers 2 --steps 1'))


def test_preparation_is_that_of_an_unknown_graph(
    example: ModuleType, record_calls: Callable[..., list]
) -> None:
    prepared = record_calls(
        example.Prepare,
        '__call__',
        lambda out, transform, data: (data.edge_index, len(out.execution_paths)),
    )
    plain = PlantedGraph('tiny')[0]
    assert example.preparation_seconds(plain, 3) > 0
    assert {type(edge_index) for edge_index, _ in prepared} == {torch.Tensor}
    tensors = {edge_index.data_ptr() for edge_index, _ in prepared} | {plain.edge_index.data_ptr()}
    assert len(tensors) == example.PREPARATIONS + 1
    assert {layers for _, layers in prepared} == {3}
    assert 'execution_paths' not in plain


def test_steps_of_a_trainer_learn(example: ModuleType, device: torch.device) -> None:
    data = ToCSR()(PlantedGraph('tiny')[0].to(device))
    args = options(example, '--dropout 0', device.type)
    trainer = example.Trainer(example.WAYS['cached'], data, 2, 4, args)
    losses = [trainer.step().item() for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.fixture
def result(example: ModuleType) -> Any:
    def path(share: float, whole: bool = False) -> dict[str, Any]:
        return {'nodes': 1, 'edges': 1, 'share': share, 'whole': whole, 'bytes': 8}

    def cell(share: float, paths: list[dict[str, Any]], *milliseconds: float) -> Any:
        seconds = {
            way: [1.0, ms / 1e3, ms / 1e4]
            for way, ms in zip(example.WAYS, milliseconds, strict=True)
        }
        losses = {way: [2.0, 1.0] for way in example.WAYS}
        losses['cached'] = [2.0, 1.0 + 1e-12 * share]
        return example.Cell(share, len(paths), paths, 0.03, seconds, losses)

    return example.Sweep(
        'tiny',
        {'nodes': 300},
        [
            cell(0.5, [path(0.5)], 10, 10.4, 8, 5),
            cell(0.5, [path(0.98, whole=True), path(0.5)], 20, 25, 20, 16),
            cell(0.01, [path(0.012)], 10, 8, 4, 2),
            cell(0.01, [path(0.3), path(0.012)], 20, 20, 5, 4),
        ],
    )


def test_figures(result: Any) -> None:
    cell = result.cells[1]
    assert str(cell) == '50 %, 2 layers'
    assert str(result.cells[2]) == '1 %, 1 layer'
    assert cell.step_seconds('backward') == pytest.approx(0.025)
    assert cell.speedup('backward') == pytest.approx(0.8)
    assert cell.speedup('all active') == 1
    assert cell.preparation_steps == pytest.approx(1.5)
    assert cell.difference == pytest.approx(2.5e-13, rel=1e-3)
    cell.losses['forward'] = [2.5, 1.0]
    assert cell.difference == pytest.approx(0.25)


def test_difference_of_no_number(result: Any) -> None:
    cell = result.cells[0]
    cell.losses['backward'] = [math.nan, 1.0]
    assert not cell.difference <= 1


def test_table(example: ModuleType, result: Any) -> None:
    lines = example.table(result).splitlines()
    assert [row.split() for row in lines] == [
        [
            'nodes',
            'layers',
            'edges',
            'of',
            'paths',
            'all',
            'active',
            'backward',
            'forward',
            'cached',
            'preparation',
        ],
        [
            '50',
            '1',
            '50',
            '10.00',
            '10.40',
            '0.96',
            'x',
            '8.00',
            '1.25',
            'x',
            '5.00',
            '2.00',
            'x',
            '3.0',
        ],
        [
            '50',
            '2',
            '98*',
            '50',
            '20.00',
            '25.00',
            '0.80',
            'x',
            '20.00',
            '1.00',
            'x',
            '16.00',
            '1.25',
            'x',
            '1.5',
        ],
        [
            '1',
            '1',
            '1',
            '10.00',
            '8.00',
            '1.25',
            'x',
            '4.00',
            '2.50',
            'x',
            '2.00',
            '5.00',
            'x',
            '3.0',
        ],
        [
            '1',
            '2',
            '30',
            '1',
            '20.00',
            '20.00',
            '1.00',
            'x',
            '5.00',
            '4.00',
            'x',
            '4.00',
            '5.00',
            'x',
            '1.5',
        ],
        [
            '*',
            'so',
            'many',
            'that',
            'no',
            'copy',
            'is',
            'kept:',
            'the',
            'layer',
            'runs',
            'on',
            'all',
            'edges',
        ],
    ]
    assert len({len(line) for line in lines[:-1]}) == 1
    result.cells[1].paths[0]['whole'] = False
    assert '*' not in example.table(result)


def test_verdict_names_what_does_not_pay(example: ModuleType, result: Any) -> None:
    assert example.verdict(result).splitlines() == [
        'backward: 0.99 x (geometric mean), best 1.25 x at 1 %, 1 layer, '
        'worst 0.80 x at 50 %, 2 layers',
        '  does not pay (below 1.05 x) with 1 layer: 50 %; 2 layers at all',
        'forward: 1.88 x (geometric mean), best 4.00 x at 1 %, 2 layers, '
        'worst 1.00 x at 50 %, 2 layers',
        '  does not pay (below 1.05 x) with 2 layers: 50 %',
        'cached: 2.81 x (geometric mean), best 5.00 x at 1 %, 1 layer, '
        'worst 1.25 x at 50 %, 2 layers',
    ]


def test_agreement_tells_the_largest_difference(example: ModuleType, result: Any) -> None:
    assert 'at most 2.5e-13 of the first loss apart' in example.agreement([result])


def test_plot(example: ModuleType, result: Any, tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    other = example.Sweep('small', {'nodes': 3000}, result.cells[:1])  # not all shares and depths
    example.plot([other, result], 'GCN on execution paths', tmp_path / 'plot.svg')
    picture = (tmp_path / 'plot.svg').read_text()
    for text in (
        'GCN on execution paths',
        'tiny: edges of paths [%]',
        'small: edges of paths [%]',
        'Speed-up: backward',
        'Speed-up: forward',
        'Speed-up: cached',
        'training nodes [%]',
        'layers',
        '1',
        '2',
        '50',
    ):
        assert f'<!-- {text} -->' in picture


def test_record(example: ModuleType, result: Any) -> None:
    args = options(example, '--graphs Cora --root data')
    record = json.loads(json.dumps(example.record(args, [result])))
    assert record['arguments']['root'] == 'data'
    assert record['versions']['torch'] == torch.__version__
    assert record['graphs']['tiny']['nodes'] == 300
    cell = record['graphs']['tiny']['cells'][2]
    assert (cell['share'], cell['layers'], cell['paths'][0]['share']) == (0.01, 1, 0.012)
    assert cell['step_ms'] == pytest.approx(
        {'all active': 10, 'backward': 8, 'forward': 4, 'cached': 2}
    )
    assert cell['speedup']['cached'] == pytest.approx(5)
    assert cell['preparation_ms'] == pytest.approx(30)
    assert cell['losses']['backward'] == [2, 1]


def test_one_command(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    command = [
        str(SCRIPT),
        '--graphs',
        'tiny,dense-small',
        '--shares',
        '0.5,0.01',
        '--layers',
        '1,2',
        '--steps',
        '3',
        '--hidden',
        '16',
        '--device',
        'cpu',
        '--plot',
        'plot.png',
        '--json',
        'record.json',
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith('TQDM_')}
    done = _forks.run(*command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for line in (
        'GCN on execution paths (cpu): hidden 16, dropout 0.5, 3 steps, seed 0',
        'tiny: 300 nodes, 1,954 edges',
        'dense-small: 3,000 nodes',
        'geometric mean',
        'In float64 all ways came to the same losses',
        'wrote plot.png',
        'wrote record.json',
    ):
        assert line in done.stdout
    assert 'dense-small     : 100%' in done.stderr
    assert (tmp_path / 'plot.png').read_bytes().startswith(b'\x89PNG')
    record = json.loads((tmp_path / 'record.json').read_text())
    assert [len(graph['cells']) for graph in record['graphs'].values()] == [4, 4]


def test_paths_of_cora(example: ModuleType, data_root: Callable[[str, str], Path]) -> None:
    root = data_root('Planetoid', 'Cora').parent
    args = options(example, f'--graphs Cora --root {root} --shares 0.01 --layers 2 --steps 1')
    (cell,) = example.sweep('Cora', args).cells
    assert cell.paths[1]['nodes'] == 27
    assert 0 < cell.paths[1]['share'] < cell.paths[0]['share'] < 0.3
    assert cell.difference <= example.TOLERANCE
