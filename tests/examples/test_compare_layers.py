"""The table of all layers: its options, what it trains and measures, what it reports."""

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import _forks
import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing

import pyg_fast
from pyg_fast.nn import SampledGCNConv

SCRIPT = Path(__file__).parents[2] / 'examples' / 'compare_layers.py'
QUICK = '--size tiny --hidden 16 --heads 4 --k 4 --samples 3 --epochs 3'


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('compare_layers_example', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script: it imports another one
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules[spec.name], sys.modules['node_classification']


def options(example: ModuleType, line: str, device: Any = 'cpu') -> Namespace:
    return example.parse([*line.split(), '--device', str(device)])


def test_all_layers_are_there(example: ModuleType) -> None:
    members = {name: getattr(pyg_fast.nn, name) for name in pyg_fast.nn.__all__}
    layers = {
        name
        for name, member in members.items()
        if isinstance(member, type) and issubclass(member, MessagePassing)
    }
    layers.remove('FusedMessagePassing')  # a base class
    assert {layer.conv.__name__ for layer in example.LAYERS if layer.is_ours} == layers
    for family in example.FAMILIES:
        first, *others = (layer for layer in example.LAYERS if layer.family == family)
        assert not first.is_ours
        assert others
        assert all(issubclass(layer.conv, first.conv) for layer in others)
    names = [layer.name for layer in example.LAYERS]
    assert len(set(names)) == len(names)


def test_usual_options(example: ModuleType) -> None:
    args = options(example, '')
    assert (args.dataset, args.size, args.epochs, args.runs) == ('planted', 'small', 30, 1)
    assert example.chosen(args) == list(example.LAYERS)
    args = options(example, '--dataset Cora --root data --families gat sage --lr 0')
    assert {layer.family for layer in example.chosen(args)} == {'sage', 'gat'}
    assert (args.root, args.lr) == (Path('data'), 0)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--dataset CiteSeer', '--dataset CiteSeer needs --root, the folder to keep it in'),
        ('--hidden 20', '--hidden 20 is no multiple of --heads 8'),
        ('--hidden 16 --k 17', '--k 17 is more than --hidden 16'),
        ('--samples 5000', '--samples 5000 is more than 4096'),
        ('--runs 0', 'argument --runs: got 0, expected at least 1'),
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


@pytest.fixture(scope='module')
def measured(example: ModuleType, device: torch.device) -> dict[Any, Any]:
    """The outcomes of all layers on a tiny graph, in this process."""
    args = options(example, f'{QUICK} --dropout 0', device)
    return {layer: example.measure(layer, args) for layer in example.LAYERS}


def test_every_layer_trains(measured: dict[Any, Any]) -> None:
    for layer, outcome in measured.items():
        assert outcome.graph == {'nodes': 300, 'edges': 1954, 'features': 64, 'classes': 4}
        (run,) = outcome.runs
        assert len(run) == 3
        assert run[-1].loss < run[0].loss, layer
        assert all(p.step_seconds > 0 and p.inference_seconds > 0 for p in run)


def test_exact_layers_do_the_same_as_pygs(example: ModuleType, measured: dict[Any, Any]) -> None:
    for family in example.FAMILIES:
        pyg, *ours = (layer for layer in measured if layer.family == family)
        losses = {layer: [p.loss for p in measured[layer].runs[0]] for layer in (pyg, *ours)}
        for layer in ours:
            same = losses[layer] == pytest.approx(losses[pyg], rel=1e-3)
            assert same != layer.is_maxk, layer  # a sampled one trains on all edges


def test_graphs_are_prepared(example: ModuleType) -> None:
    data, _ = example.load(options(example, QUICK))
    by_name = {layer.name: layer for layer in example.LAYERS}
    nodes = torch.arange(20)
    assert example.prepared(by_name['GCNConv'], data, nodes) is data
    graph = example.prepared(by_name['MaxKGCNConv'], data, nodes)
    assert isinstance(graph.edge_index, EdgeIndex)
    assert 'execution_paths' not in graph
    graph = example.prepared(by_name['PathPreparedGINConv, path'], data, nodes)
    assert [path.layer for path in graph.execution_paths] == [0, 1]
    assert graph.execution_paths[1].num_dst == 20
    assert type(data.edge_index) is torch.Tensor
    assert int(data.train_mask.sum()) != 20  # the mask of the data set stays


def test_options_reach_the_layers(example: ModuleType) -> None:
    args = options(example, QUICK)
    for layer in example.LAYERS:
        net = example.Net(layer, 8, 3, args)
        kept = [getattr(conv, 'k', None) for conv in (net.conv1, net.conv2)]
        if layer.is_maxk:
            assert sorted(k or 0 for k in kept) == [0, 4]
        else:
            assert kept == [None, None]
        if layer.conv is SampledGCNConv:
            assert net.conv1.num_samples == net.conv2.num_samples == 3
        out = net(torch.randn(5, 8), torch.tensor([[0, 1, 4], [1, 2, 0]]))
        assert out.shape == (5, 3)
    assert net.conv1.heads == 4


def outcome(example: ModuleType, seconds: float, test: float, peak: int | None) -> Any:
    run = [example.Point(seconds, seconds / 2, 1.0, val, test) for val in (0.5, 0.4)]
    return example.Outcome({'nodes': 3}, [run, run], peak)


def test_table(example: ModuleType) -> None:
    pyg, ours, path = example.LAYERS[:3]
    text = example.table(
        {
            pyg: outcome(example, 0.4, 0.8, 2_000_000),
            ours: outcome(example, 0.1, 0.81, 500_000),
            path: None,
            example.LAYERS[5]: None,
            example.LAYERS[6]: outcome(example, 0.2, 0.7, None),
        }
    )
    assert [line.split() for line in text.splitlines()[1:]] == [
        [],
        ['GCNConv', '80.0', '+-', '0.0', '400.00', '200.00', '2.00'],
        [
            'FusedGCNConv',
            '81.0',
            '+-',
            '0.0',
            '100.00',
            '4.00',
            'x',
            '50.00',
            '4.00',
            'x',
            '0.50',
            '4.00',
            'x',
        ],
        ['PathPreparedGCNConv,', 'path', 'out', 'of', 'memory'],
        [],
        ['SAGEConv', 'out', 'of', 'memory'],
        ['FusedSAGEConv', '70.0', '+-', '0.0', '200.00', '100.00', 'unknown'],
    ]


def test_out_of_memory(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pool:
        """A process pool whose processes run out of memory."""

        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def __enter__(self) -> 'Pool':
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def submit(self, *_: Any) -> None:
            raise torch.OutOfMemoryError('no')

    monkeypatch.setattr(example, 'ProcessPoolExecutor', Pool)
    args = options(example, QUICK)
    assert example.in_own_process(example.LAYERS[0], args) is None
    assert example.record(args, {example.LAYERS[0]: None})['outcomes'] == {'GCNConv': None}


def test_one_command(tmp_path: Path) -> None:
    written = tmp_path / 'scores.json'
    # Forks in place of spawned processes, which test_node_classification.py runs.
    program = (
        'import multiprocessing as m, runpy, sys\ncontext = m.get_context\n'
        "m.get_context = lambda method: context('fork' if method == 'spawn' else method)\n"
        'sys.argv.pop(0)\n'
        f'sys.path[0] = {str(SCRIPT.parent)!r}\n'
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [
        '-c',
        program,
        str(SCRIPT),
        *QUICK.split(),
        '--families',
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
        'planted, tiny (cpu): two layers, hidden 16, 4 heads, k 4, S 3, 3 epochs, seed 0',
        '300 nodes, 1,954 edges, 64 features, 4 classes',
        'peak memory [MB]',
        f'wrote {written}',
    ):
        assert line in done.stdout
    assert 'FusedGATv2Conv             run 1/1: 100%' in done.stderr
    outcomes = json.loads(written.read_text())['outcomes']
    assert list(outcomes) == ['GATv2Conv', 'FusedGATv2Conv']
    pyg, ours = outcomes.values()
    assert ours['accuracies'] == pytest.approx(pyg['accuracies'], abs=3)
    assert ours['step_ms'] > 0
