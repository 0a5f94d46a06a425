"""The accuracy of trained networks: the runs, and the tables of the reports."""
import dataclasses
import json
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
    bench.main(['--system', 'sampled', '--quick', '--device', 'cpu', '--graphs', 'CS,planted',
                '--epochs', '3', '--out', str(tmp_path)])
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert report['left_out'] == {'CS': 'PYG_FAST_DATA is not set'}
    rates, gcn, sage = report['sections']
    assert [section['title'] for section in (gcn, sage)] == ['GCN', 'SAGE']
    for section in (rates, gcn, sage):
        (cell,) = section['cells']
        full = cell['results']['all edges']['scores']
        assert len(full) == 2
        for strategy in bench.STRATEGIES:
            last = cell['results'][f'{strategy}, S = 384']  # The largest degree is 341.
            assert last['sampling_rate'] == 1
            assert last['scores'] == pytest.approx(full)
            assert f'{strategy}, S = 512' not in cell['results']
            one = cell['results'][f'{strategy}, S = 1']
            assert 0 < one['sampling_rate'] < 0.2
            assert one['lost'] == pytest.approx((sum(full) - sum(one['scores'])) / 2)
            assert len(cell['chosen'][strategy]) == 2
    markdown = written.with_suffix('.md').read_text()
    assert '| S | planted, fastrand | planted, bucket |' in markdown
    assert '| 384 | 100.00 |' in markdown


def test_features_of_eight_bits(bench: Any, tmp_path: Path) -> None:
    line = ['--system', 'sampled', '--quick', '--device', 'cpu', '--graphs', 'planted']
    line += ['--models', 'sage', '--epochs', '3']
    cells = []
    for option in ([], ['--quantize']):
        bench.main([*line, *option, '--out', str(tmp_path / str(len(option)))])
        (written,) = (tmp_path / str(len(option))).glob('*.json')
        report = json.loads(written.read_text())
        assert ('eight bits' in report['notes'][0]) == bool(option)
        cells.append(report['sections'][1]['cells'][0]['results'])
    exact, rounded = cells
    assert exact.keys() == rounded.keys()
    # The same networks, which round wherever they sample, even if that is all edges.
    assert exact.pop('all edges')['scores'] == rounded.pop('all edges')['scores']
    pairs = [(exact[key]['scores'], rounded[key]['scores']) for key in exact]
    assert any(a != b for a, b in pairs)
    assert all(a == pytest.approx(b, abs=10) for a, b in pairs)


def test_least_samples(bench: Any) -> None:
    def cell(graph: str, degree: float, fastrand: int | None, bucket: int | None) -> Any:
        least = {'fastrand': fastrand, 'bucket': bucket}
        results = {'all edges': bench.Trained(scores=[80.0, 81.0]),
                   'bucket, S = 6': bench.Trained(lost=0.125)}
        return bench.Swept(graph, 64, results, metric='AUC', mean_degree=degree, least=least,
                           chosen={strategy: [s, None] for strategy, s in least.items()})

    section = bench.Losses('GCN', columns={}, width='hidden', cells=[
        cell('sparse', 5, 8, 4), cell('dense', 40, 8, 8), cell('denser', 60, 4, None),
        cell('missed', 70, None, 4)])
    lines = section.markdown().splitlines()
    assert '| 6 | – | 0.12 | – | 0.12 | – | 0.12 | – | 0.12 |' in lines
    assert '| sparse | 5.0 | 64 | AUC | 80.50 ± 0.71 | 8 | 8, none | 4 | 4, none |' in lines
    assert lines[-1] == (
        'Of 3 graphs with a mean degree above 30, fastrand needs no larger S than bucket on 2; it '
        'does on missed.')
    assert [row['fastrand_holds_first'] for row in section.summary()] == [False, True, True, False]


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
def test_the_loader(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import _graphs, _minibatch

    monkeypatch.delenv('PYG_FAST_DATA', raising=False)
    left_out = {'CS': 'PYG_FAST_DATA is not set'}
    ways = {*bench.WAYS}
    try:
        _minibatch.pyg_backend()
    except _graphs.Missing as reason:
        left_out[bench.PYG] = str(reason)
        ways.remove(bench.PYG)
    bench.main([
        '--system', 'loader', '--quick', '--device', 'cpu', '--graphs', 'CS,planted', '--models',
        'sage', '--epochs', '2', '--out', str(tmp_path)])
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert report['left_out'] == left_out
    (section,) = report['sections']
    (cell,), (row,) = section['cells'], section['summary']
    assert cell['results'].keys() == ways
    full, ours = (cell['results'][name]['scores'] for name in (
        bench.FULL, bench.LOADER))
    assert len(full) == len(ours) == 2
    assert row['lost'] == pytest.approx((sum(full) - sum(ours)) / 2, rel=1e-3)
    assert '## SAGE' in written.with_suffix('.md').read_text()


def test_how_far_curves_differ(bench: Any) -> None:
    from benchmarks._harness import Cell

    accuracy = bench

    def trained(scores: list[float], *losses: list[float]) -> Any:
        return accuracy.Trained(scores=scores, losses=list(losses))

    section = accuracy.Curves('GCN', columns={}, cells=[Cell('g', 0, {
        accuracy.FULL: trained([90.0, 92.0], [1.0]),
        accuracy.LOADER: trained([89.0, 89.0], [2.0, 1.0], [4.0, 1.0]),
        accuracy.PLAIN: trained([90.0, 90.0], [2.0, 1.0], [3.0, 2.0])})])
    (row,) = section.summary()
    assert (row['lost'], row['curves_differ'], row['last_losses_differ']) == (2.0, 0.5, 0.5)
    assert row['seeds_differ'] == pytest.approx(0.5**0.5)
    assert section.markdown().endswith('The loader loses at most 1 point on 0 of 1; more on g.')
    better = dataclasses.replace(section, cells=[Cell('g', 0, {
        **section.cells[0].results, accuracy.LOADER: section.cells[0].results[accuracy.PLAIN]})])
    assert better.markdown().endswith('The loader loses at most 1 point on 1 of 1.')


@pytest.mark.parametrize('line', [
    ['--graphs', 'planted'], ['--graphs', 'planted', '--choose', '--runs', '1'],
    ['--system', 'gat', '--graphs', 'planted']])
def test_other_systems(bench: Any, tmp_path: Path, line: list[str]) -> None:
    bench.main(['--quick', '--device', 'cpu', '--epochs', '2', '--out', str(tmp_path), *line])
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    markdown = written.with_suffix('.md').read_text()
    for section in report['sections']:
        assert f"## {section['title']}\n" in markdown
        assert section['summary']
    titles = [section['title'] for section in report['sections']]
    assert titles == (
        ['Validation scores of ReLU, %'] if '--choose' in line else
        ['Test accuracy, %', 'Time per epoch, ms'] if 'gat' in line else
        ['Test accuracy, %', 'Test accuracy over epochs, %', 'Time per epoch, ms'])
