"""The accuracy of trained networks: the runs, and the tables of the reports."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import accuracy

    return accuracy


def test_report(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv('PYG_FAST_DATA', raising=False)
    bench.main(
        [
            '--system',
            'sampled',
            '--quick',
            '--device',
            'cpu',
            '--graphs',
            'CS,planted',
            '--epochs',
            '3',
            '--out',
            str(tmp_path),
        ]
    )
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert report['left_out'] == {'CS': 'PYG_FAST_DATA is not set'}
    assert [section['title'] for section in report['sections']] == [
        f'{model}: {what}'
        for model in ('GCN', 'SAGE')
        for what in ('points lost', 'S that loses at most 1 point')
    ]
    for lost, least in (report['sections'][:2], report['sections'][2:]):
        (chosen,) = least['cells']
        full = chosen['results']['all edges, %']['scores']
        assert len(full) == 2
        cells = {cell['width']: cell for cell in lost['cells']}
        assert max(cells) == 384  # The largest degree is 341.
        assert cells[384]['facts'] == {'edges read, %': 100}
        for strategy in bench.STRATEGIES:
            last, one = (cells[s]['results'][strategy] for s in (384, 1))
            assert last['sampling_rate'] == 1
            assert last['scores'] == pytest.approx(full)
            assert 0 < one['sampling_rate'] < 0.2
            lost = (sum(full) - sum(one['scores'])) / 2
            assert one['lost'] == pytest.approx(lost, rel=1e-5)  # six digits
            assert len(chosen['facts'][f'chosen, {strategy}']) == 2
            losses = {s: cell['results'][strategy]['lost'] for s, cell in cells.items()}
            least_s = chosen['facts'][f'least S, {strategy}']
            assert all(lost <= 1 for s, lost in losses.items() if s >= least_s)
        least = {name: chosen['facts'][f'least S, {name}'] for name in bench.STRATEGIES}
        for name, other in (('fastrand', 'bucket'), ('adaptive', 'fastrand')):
            answer = ('no', 'yes')[least[name] <= least[other]]
            assert chosen['facts'][f'{name} needs no larger S'] == answer
    markdown = written.with_suffix('.md').read_text()
    assert (
        '## GCN: points lost\n\n| graph | S | fastrand | bucket | adaptive | edges read, % |'
    ) in markdown
    assert re.search(r'\| planted \| 384 \| -?0\.00 \| -?0\.00 \| -?0\.00 \| 100 \|', markdown)


def test_features_of_eight_bits(bench: Any, tmp_path: Path) -> None:
    line = ['--system', 'sampled', '--quick', '--device', 'cpu', '--graphs', 'planted']
    line += ['--models', 'sage', '--epochs', '3']
    cells: list[Any] = []
    full: list[Any] = []
    for option in ([], ['--quantize']):
        bench.main([*line, *option, '--out', str(tmp_path / str(len(option)))])
        (written,) = (tmp_path / str(len(option))).glob('*.json')
        report = json.loads(written.read_text())
        assert ('eight bits' in report['notes'][0]) == bool(option)
        lost, least = (section['cells'] for section in report['sections'])
        full.append(least[0]['results']['all edges, %']['scores'])
        cells.append(
            [
                (cell['width'], name, each['scores'])
                for cell in lost
                for name, each in cell['results'].items()
            ]
        )
    # The same networks, which round wherever they sample, even if that is all edges.
    assert full[0] == full[1]
    assert [each[:2] for each in cells[0]] == [each[:2] for each in cells[1]]
    pairs = [(a, b) for (*_, a), (*_, b) in zip(*cells, strict=True)]
    assert any(a != b for a, b in pairs)
    assert all(a == pytest.approx(b, abs=10) for a, b in pairs)


def test_real_graphs_are_copied(
    bench: Any, data_root: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import _graphs

    root = data_root('HeterophilousGraphDataset', 'tolokers').parent
    monkeypatch.setenv('PYG_FAST_DATA', str(root))
    before = sorted(root.rglob('*'))
    assert _graphs.dataset('tolokers').num_nodes == 11_758
    with _graphs.copied('HeterophilousGraphDataset', 'tolokers') as copy:
        assert [file.name for file in copy.rglob('*.npz')] == ['tolokers.npz']
    assert not copy.exists()
    assert sorted(root.rglob('*')) == before
    with pytest.raises(_graphs.Missing, match='does not exist'), _graphs.copied('Amazon', 'none'):
        pass


@pytest.mark.optional
def test_the_loader(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _minibatch

    monkeypatch.delenv('PYG_FAST_DATA', raising=False)
    left_out = {'CS': 'PYG_FAST_DATA is not set'}
    ways = {*bench.WAYS}
    if not _minibatch.pyg_backend(left_out, bench.PYG):
        ways.remove(bench.PYG)
    bench.main(
        [
            '--system',
            'loader',
            '--quick',
            '--device',
            'cpu',
            '--graphs',
            'CS,planted',
            '--models',
            'sage',
            '--epochs',
            '2',
            '--out',
            str(tmp_path),
        ]
    )
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert report['left_out'] == left_out
    (section,) = report['sections']
    (cell,) = section['cells']
    assert cell['results'].keys() == ways
    full, ours = (cell['results'][name]['scores'] for name in (bench.FULL, bench.LOADER))
    assert len(full) == len(ours) == 2
    assert cell['facts']['lost, points'] == pytest.approx((sum(full) - sum(ours)) / 2, rel=1e-3)
    assert '## SAGE' in written.with_suffix('.md').read_text()


def test_how_far_curves_differ(bench: Any) -> None:
    full = bench.Trained(scores=[90.0, 92.0], losses=[[1.0]])
    ours = bench.Trained(scores=[89.0, 89.0], losses=[[2.0, 1.0], [4.0, 1.0]])
    plain = bench.Trained(scores=[90.0, 90.0], losses=[[2.0, 1.0], [3.0, 2.0]])
    assert list(bench.curves(full, ours, plain).values()) == pytest.approx([2, 0.5, 0.5, 0.5**0.5])


@pytest.mark.parametrize(
    'line', [['--graphs', 'planted', '--hidden', '32'], ['--system', 'gat', '--graphs', 'planted']]
)
def test_other_systems(bench: Any, tmp_path: Path, line: list[str]) -> None:
    """--choose, and all metrics: tests/examples/test_maxk_training.py."""
    bench.main(['--quick', '--device', 'cpu', '--epochs', '2', '--out', str(tmp_path), *line])
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    markdown = written.with_suffix('.md').read_text()
    (cell,) = report['sections'][0]['cells']
    first, *others = cell['results']
    mean = {
        name: sum(each['scores']) / len(each['scores']) for name, each in cell['results'].items()
    }
    assert {name: float(text) for name, text in cell['facts'].items()} == {
        f'{name}, difference': pytest.approx(mean[name] - mean[first], abs=0.01) for name in others
    }
    for section in report['sections']:
        assert f'## {section["title"]}\n' in markdown
        assert section['summary']
    titles = [section['title'] for section in report['sections']]
    assert titles == (
        ['Test accuracy, %', 'Time per epoch, ms']
        if 'gat' in line
        else ['Test accuracy, %', 'Test accuracy over epochs, %', 'Time per epoch, ms']
    )
