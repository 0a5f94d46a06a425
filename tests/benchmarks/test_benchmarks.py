"""The benchmarks run and report, and do not time what is wrong."""
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(bench: str, folder: Path, *args: str) -> tuple[dict, str, str]:
    command = [sys.executable, '-m', f'benchmarks.{bench}', '--quick', '--device', 'cpu',
               '--threads', '1', '--repeats', '2', '--out', str(folder), *args]
    environment = {k: v for k, v in os.environ.items() if k != 'PYG_FAST_DATA'}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (written,) = folder.glob('*.json')
    markdown = written.with_suffix('.md').read_text()
    assert markdown in done.stdout
    return json.loads(written.read_text()), markdown, done.stderr


def check_report(report: dict, markdown: str) -> None:
    assert report['environment']['torch'] == torch.__version__
    assert report['environment']['threads'] == 1
    assert report['arguments']['repeats'] == 2
    for section in report['sections']:
        assert f"## {section['title']}\n" in markdown
        for cell in section['cells']:
            for name, result in cell['results'].items():
                assert result['median_ms'] is not None, (section['title'], name, result['note'])
                assert 0 < result['min_ms'] <= result['median_ms'] <= result['max_ms']
                assert result['count'] >= 2


def test_spmm(tmp_path: Path) -> None:
    report, markdown, log = run(
        'spmm', tmp_path, '--graphs', 'tiny,ddi', '--widths', '8', '--reduce', 'sum,mean,max',
        '--backward', '--also', 'tiny:5:float64')
    check_report(report, markdown)
    assert report['left_out'] == {'ddi': 'PYG_FAST_DATA is not set'}
    assert 'Left out: ddi' in markdown
    assert report['graphs']['tiny']['nodes'] == 300
    sections = {section['title']: section for section in report['sections']}
    assert len(sections) == 9  # four of sums, two each of means and maxima, one in float64
    cell = sections['sum, forward, float32']['cells'][0]
    assert {'ours', 'ours, unweighted', 'torch.sparse', 'PyG scatter'} <= cell['results'].keys()
    assert all(result['error'] <= 1 for result in cell['results'].values())
    rivals = {k: r['median_ms'] for k, r in cell['results'].items() if 'ours' not in k}
    best = sections['sum, forward, float32']['summary'][0]
    assert best['rival'] == 'the best'
    assert math.isclose(
        best['geometric_mean'], min(rivals.values()) / cell['results']['ours']['median_ms'])
    assert best['worst'] == {
        'ratio': pytest.approx(best['geometric_mean']), 'graph': 'tiny', 'width': 8}


def test_gcn(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'gcn', tmp_path, '--graphs', 'tiny', '--channels', '8', '--edges', '1000')
    check_report(report, markdown)
    assert 'planted graph of the size of Cora' in markdown
    titles = [section['title'] for section in report['sections']]
    assert titles == [
        'One layer, forward', 'One layer, forward + backward',
        'Cora, the two conv layers forward + backward, eager',
        'Cora, the whole training step, eager',
        'Cora, the whole training step without input dropout, eager',
        'Sorting edges into CSR', 'Preparing a graph, CSR and CSC']
    step = report['sections'][1]['cells'][0]['results']
    assert {'ours, prepared', 'ours, edge_index', 'PyG edge_index', 'PyG torch CSR'} <= step.keys()
    assert all(result['error'] <= 1 for result in step.values())


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import _harness
    return _harness


@pytest.mark.parametrize('args', [
    ('--graphs', 'karate'), ('--widths', '0'), ('--dtypes', 'int8'), ('--also', 'tiny:8:::no')])
def test_arguments_are_checked(harness, args, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import spmm
    with pytest.raises(SystemExit):
        spmm.main(['--device', 'cpu', *args])
    assert args[0] in capsys.readouterr().err


def test_the_check_notices_small_errors(harness) -> None:
    from benchmarks import spmm
    right = torch.randn(500, 7, dtype=torch.double) + 3
    for dtype, slip in ((torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        out = right.to(dtype, copy=True)
        assert spmm.excess(out, right, right.abs()) <= 1
        out[321, 5] += slip
        assert spmm.excess(out, right, right.abs()) > 1
        out[321, 5] = math.nan
        assert not spmm.excess(out, right, right.abs()) <= 1
    assert spmm.excess(right[:, :3], right, right.abs()) == math.inf


def test_a_wrong_result_of_ours_stops_the_benchmark(harness) -> None:
    settings = harness.Settings(torch.device('cpu'), repeats=2, limit=10, budget=1)
    for error in (1.5, math.nan, math.inf):
        wrong = harness.Contender('ours', lambda: list, ours=True, check=lambda _, e=error: e)
        with pytest.raises(harness.Incorrect, match='ours'):
            harness.measure([wrong], settings)


def test_what_becomes_of_rivals(harness) -> None:
    def fail():
        raise RuntimeError('not implemented for this\nand more')

    def exhaust():
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    settings = harness.Settings(torch.device('cpu'), repeats=4, limit=0.2, budget=1)
    contenders = [
        harness.Contender('ours', lambda: list, ours=True),
        harness.Contender('failing', lambda: fail),
        harness.Contender('large', exhaust),
        harness.Contender('inexact', lambda: list, check=lambda _: 2.0),
        harness.Contender('wrong', lambda: list, check=lambda _: math.nan),
        harness.Contender('slow', lambda: lambda: time.sleep(0.25)),
    ]
    results = harness.measure(contenders, settings)
    assert results['ours'].count == 4
    assert results['failing'].note == 'failed: not implemented for this'
    assert results['failing'].text() == 'failed'
    assert results['large'].text() == 'OOM'
    assert results['inexact'].text().endswith('†')
    assert results['wrong'].text() == 'wrong'
    assert results['wrong'].count == 0
    assert results['slow'].count == 1
    assert results['slow'].text().endswith('‡')


def test_ours_may_not_fail(harness) -> None:
    def fail():
        raise RuntimeError('broken kernel')

    settings = harness.Settings(torch.device('cpu'), repeats=2, limit=10, budget=1)
    with pytest.raises(RuntimeError, match='broken kernel'):
        harness.measure([harness.Contender('ours', lambda: fail, ours=True)], settings)


def test_summary(harness) -> None:
    section = harness.Section(
        'title', columns={'ours': ['ours'], 'rival': ['rival 1', 'rival 2']},
        versus=[harness.Versus('rival', 'ours', ['rival 1', 'rival 2'])])
    for graph, width, first, second in (('a', 16, 8.0, 9.0), ('b', 16, 9.0, 2.0), ('b', 64, 1, 4)):
        section.cells.append(harness.Cell(graph, width, {
            'ours': harness.Result(1.0, 1.0, 1.0, 3),
            'rival 1': harness.Result(first, first, first, 3),
            'rival 2': harness.Result(second, second, second, 3)}))
    (summary,) = section.summary()
    assert summary['cells'] == 3
    assert math.isclose(summary['geometric_mean'], 16 ** (1 / 3))
    assert summary['by_width'] == {'16': pytest.approx(4), '64': pytest.approx(1)}
    assert summary['worst'] == {'ratio': 1.0, 'graph': 'b', 'width': 64}
    assert '| b | 16 | 1.00 | 2.00 (2) | rival 2 | 2.00 |' in section.markdown()
