"""The demo: its options, its measures, and that both sides train the same network."""

import importlib.util
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

SCRIPT = Path(__file__).parents[2] / 'examples' / 'node_classification.py'


@pytest.fixture(scope='module')
def demo() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('node_classification', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def options(demo: ModuleType, line: str, device: str = 'cpu') -> Namespace:
    return demo.parse([*line.split(), '--device', device])


def test_usual_options(demo: ModuleType) -> None:
    args = options(demo, '')
    assert (args.dataset, args.size, args.model, args.runs) == ('planted', 'medium', 'gcn', 1)
    args = options(demo, '--dataset Cora --root data --hidden 5 --dropout 0 --epochs 7')
    assert (args.hidden, args.dropout, args.epochs) == (5, 0, 7)
    assert (args.lr, args.weight_decay, args.input_dropout) == (0.01, 5e-4, 0.5)


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--dataset Cora', '--dataset Cora needs --root, the folder to keep it in'),
        ('--model sage --cached', '--cached is for gcn, not for sage'),
        ('--dropout 1', 'argument --dropout: got 1, expected at least 0 and less than 1'),
        ('--epochs 0', 'argument --epochs: got 0, expected at least 1'),
        ('--lr fast', "argument --lr: invalid float value: 'fast'"),
        ('--plot a.txt', '--plot a.txt: expected a name ending in .png, .pdf or .svg'),
        ('--plot no/such/a.png', '--plot no/such/a.png: no such folder'),
    ],
)
def test_bad_options(
    demo: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(demo, line)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f'error: {message}')


@pytest.mark.skipif(torch.cuda.is_available(), reason='a CUDA device is here')
def test_no_cuda(demo: ModuleType, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        options(demo, '', device='cuda')
    assert '--device cuda: no GPU that torch can use' in capsys.readouterr().err
    assert options(demo, '', device='auto').device == 'cpu'


def test_data_that_is_nowhere(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError('no network')

    monkeypatch.setattr(demo.Amazon, 'download', offline)
    args = options(demo, f'--dataset Photo --root {tmp_path}')
    with pytest.raises(SystemExit, match='Photo is not in .*Amazon and cannot be downloaded: no'):
        demo.load(args)


@pytest.mark.parametrize('model', ['gcn', 'gcn --cached', 'sage', 'gin'])
def test_both_sides_train_the_same_network(
    demo: ModuleType, device: torch.device, record_calls: Callable[..., list], model: str
) -> None:
    trained = record_calls(
        demo,
        'train',
        lambda _, model, data, *rest: (
            type(model.convs[0]).__module__.split('.')[0],
            type(data.edge_index),
        ),
    )
    args = options(demo, f'--size tiny --epochs 6 --runs 2 --model {model}', device.type)
    pyg, ours = (demo.train_side(side, args) for side in demo.SIDES)

    rehearsal_and_runs = 3
    assert trained[:rehearsal_and_runs] == [('torch_geometric', torch.Tensor)] * rehearsal_and_runs
    assert trained[rehearsal_and_runs:] == [('pyg_fast', EdgeIndex)] * rehearsal_and_runs
    assert pyg.graph == ours.graph == '300 nodes, 1,954 edges, 64 features, 4 classes' or (
        device.type == 'cuda'
    )
    assert pyg.prepare_seconds == 0 < ours.prepare_seconds
    assert len(pyg.runs) == len(ours.runs) == 2
    for left, right in zip(pyg.runs, ours.runs, strict=True):
        assert len(left) == len(right) == 6
        assert [point.loss for point in left] == pytest.approx(
            [point.loss for point in right], rel=2e-3
        )
        assert left[-1].val == pytest.approx(right[-1].val, abs=0.03)
        assert left[-1].loss < left[0].loss
    assert pyg.runs[0][0].loss != pyg.runs[1][0].loss


def test_split(demo: ModuleType) -> None:
    y = torch.arange(3).repeat_interleave(torch.tensor([60, 100, 51]))
    parts = demo.split(Data(y=y, num_nodes=211), 3, seed=0)
    assert torch.cat(list(parts.values())).sort()[0].tolist() == list(range(211))
    assert y[parts['train']].bincount().tolist() == [20, 20, 20]
    assert y[parts['val']].bincount().tolist() == [30, 30, 30]
    again, other = (demo.split(Data(y=y, num_nodes=211), 3, seed=seed) for seed in (0, 1))
    assert torch.equal(parts['train'], again['train'])
    assert not torch.equal(parts['train'], other['train'])

    mask = torch.arange(211) < 70
    data = Data(y=y, train_mask=mask, val_mask=~mask, test_mask=mask)
    parts = demo.split(data, 3, seed=0)
    assert torch.equal(parts['val'], torch.arange(70, 211))


def outcomes(demo: ModuleType) -> dict[str, Any]:
    def run(*points: tuple[float, float, float]) -> list[Any]:
        return [demo.Point(seconds, 1.0, val, test) for seconds, val, test in points]

    return {
        'PyG': demo.Outcome(
            'a graph',
            0.0,
            60_000_000,
            [
                run((0.5, 0.7, 0.6), (0.9, 0.8, 0.75), (1.2, 0.8, 0.9)),
                run((0.4, 0.9, 0.85), (0.8, 0.8, 0.9), (1.2, 0.7, 0.9)),
            ],
        ),
        'pyg_fast': demo.Outcome(
            'a graph',
            0.003,
            8_000_000,
            [
                run((0.1, 0.7, 0.6), (0.2, 0.8, 0.7), (0.3, 0.9, 0.8)),
            ],
        ),
    }


def test_table(demo: ModuleType) -> None:
    rows = demo.table(outcomes(demo)).splitlines()
    assert [row.split() for row in rows] == [
        ['PyG', 'pyg_fast', 'ratio'],
        ['test', 'accuracy', '[%]', '80.0', '+-', '7.1', '80.0'],
        ['time', 'per', 'epoch', '[ms]', '400.00', '100.00', '4.00', 'x'],
        ['peak', 'memory', '[MB]', '60.0', '8.0', '7.50', 'x'],
        ['preparation,', 'once', '[ms]', '-', '3.00'],
    ]
    unknown = outcomes(demo)
    unknown['PyG'].peak_bytes = None
    assert demo.table(unknown).splitlines()[3].split()[3:] == ['unknown', 'unknown']


def test_plot(demo: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    demo.plot(outcomes(demo), 'GCN on a graph', tmp_path / 'plot.svg')
    picture = (tmp_path / 'plot.svg').read_text()
    for text in ('GCN on a graph', 'Training loss', 'Test accuracy [%]', 'ratio 4.00', '400 ms'):
        assert f'<!-- {text}' in picture or f'{text} -->' in picture


@pytest.mark.skipif(sys.platform != 'linux', reason='read from /proc')
def test_peak_memory_of_a_process(demo: ModuleType) -> None:
    memory = demo.PeakMemory(torch.device('cpu'))
    torch.ones(20_000_000)
    assert memory.growth() == pytest.approx(80e6, rel=0.2)
    memory = demo.PeakMemory(torch.device('cpu'))
    assert memory.growth() < 10e6


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
def test_peak_memory_of_a_gpu(demo: ModuleType) -> None:
    held = torch.ones(1_000_000, device='cuda')
    memory = demo.PeakMemory(held.device)
    torch.ones(20_000_000, device='cuda')
    assert memory.growth() == pytest.approx(80e6, rel=0.05)


def test_one_command(tmp_path: Path) -> None:
    pytest.importorskip('matplotlib')
    picture = tmp_path / 'plot.png'
    # The process of the second side is a fork: to spawn one takes 5 s.
    program = (
        'import multiprocessing as m, sys\n'
        "context, methods = m.get_context, iter(['spawn'])\n"
        "m.get_context = lambda method: context(next(methods, 'fork'))\n"
        '__file__ = sys.argv.pop(1)\n'
        "exec(compile(open(__file__).read(), __file__, 'exec'))"
    )
    command = [
        '-c',
        program,
        str(SCRIPT),
        '--size',
        'tiny',
        '--epochs',
        '4',
        '--device',
        'cpu',
        '--plot',
        str(picture),
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith('TQDM_')}
    done = _forks.run(*command, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    for line in (
        '300 nodes, 1,954 edges',
        'test accuracy [%]',
        'time per epoch [ms]',
        'peak memory [MB]',
        'preparation, once [ms]',
    ):
        assert line in done.stdout
    assert 'PyG      run 1/1: 100%' in done.stderr
    assert 'pyg_fast run 1/1: 100%' in done.stderr
    assert picture.read_bytes().startswith(b'\x89PNG')


def test_cora_reaches_its_accuracy(demo: ModuleType, data_root: Callable[[str, str], Path]) -> None:
    root = data_root('Planetoid', 'Cora').parent
    args = options(demo, f'--dataset Cora --root {root} --cached --input-dropout 0')
    assert demo.train_side('pyg_fast', args).accuracies[0] > 79.5
