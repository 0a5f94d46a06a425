"""The papers' tables and figures: each can be rerun, and what stands beside what."""
import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyg_fast.nn import MaxK

ROOT = Path(__file__).parents[2]
DEVICE = torch.device('cpu')


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delenv('PYG_FAST_DATA', raising=False)
    from benchmarks.papers import __main__

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on work this small the others would wait for each other
    yield __main__
    torch.set_num_threads(threads)


@pytest.fixture
def exhibits(papers: Any) -> Any:
    from benchmarks.papers import _exhibit
    return _exhibit


def run(papers: Any, folder: Path, *args: str) -> tuple[dict[str, Any], str]:
    papers.main([
        '--quick', '--device', 'cpu', '--max-edges', '20000', '--repeats', '1', '--out',
        str(folder), *args])
    (written,) = folder.glob('*.json')
    return json.loads(written.read_text()), written.with_suffix('.md').read_text()


@pytest.mark.parametrize('name', [
    *(pytest.param(name, marks=pytest.mark.optional) for name in ('maxk', 'fastgl')),
    'sampled', 'gat', 'paths'])
def test_every_exhibit_is_rerun(papers: Any, tmp_path: Path, name: str) -> None:
    report, markdown = run(papers, tmp_path, name)
    paper = __import__(f'benchmarks.papers.{name}', fromlist=['PAPER']).PAPER
    assert report['bench'] == f'papers-{name}'
    assert report['left_out'] == paper.left_out
    assert [section['title'].split(':')[0] for section in report['sections']] == [
        made.name for made in paper.exhibits]
    for section in report['sections']:
        assert f"## {section['title']}\n" in markdown
        (about,) = section['summary']
        assert about['shows'] in markdown
        assert about['differs'] in markdown
        figures = [figure for cell in section['cells'] for figure in cell['here'].values()]
        assert any(isinstance(figure, float) and figure > 0 for figure in figures), section['title']
        for cell in section['cells']:
            assert all((result['error'] or 0) <= 1 for result in cell['results'].values())


def test_figures_of_the_papers_stand_beside_ours(papers: Any, tmp_path: Path) -> None:
    report, markdown = run(papers, tmp_path, 'maxk', '--only', 'Kernels')
    (section,) = report['sections']
    few, more = (cell for cell in section['cells'] if cell['paper'])
    assert (few['width'], few['paper']['backward over cuSPARSE']) == (8, 6.93)
    assert (more['width'], more['paper']['backward over cuSPARSE']) == (32, 2.55)
    assert 'forward, ms, here | forward over torch.sparse, here' in markdown
    assert 'backward over cuSPARSE, paper' in markdown
    assert 'one NVIDIA A100 (80 GB)' in markdown


def test_one_exhibit(papers: Any, tmp_path: Path) -> None:
    report, markdown = run(papers, tmp_path, 'maxk', 'sampled', '--only', 'Neighbourhoods')
    (section,) = report['sections']
    rates = [cell['here']['nodes read in full'] for cell in section['cells']]
    assert report['arguments']['papers'] == ['sampled']
    assert report['graphs'].keys() == {cell['graph'] for cell in section['cells']}
    assert all(0 <= rate <= 100 for rate in rates)
    assert rates == sorted(rates[:2]) + sorted(rates[2:])
    assert '| graph | S | nodes read in full, here |' in markdown


@pytest.mark.parametrize(('line', 'said'), [
    (['maxx'], "got paper 'maxx', expected some of maxk"),
    (['maxk', '--only', 'Table 99'], "--only: got 'Table 99', expected some of Accuracy"),
])
def test_refuses_unknown_names(
    papers: Any, capsys: pytest.CaptureFixture[str], line: list[str], said: str,
) -> None:
    with pytest.raises(SystemExit):
        papers.main(line)
    assert said in capsys.readouterr().err


def test_list(papers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    papers.main(['maxk', '--list'])
    assert re.search(r'^MaxK-GNN.*: Parabola, Memory traffic, Kernels', capsys.readouterr().out)


def test_a_failure_costs_one_exhibit(
    papers: Any, exhibits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from benchmarks.papers import maxk

    def fails(_: Any) -> None:
        raise RuntimeError('no such kernel')

    def works(it: Any) -> None:
        it.exhibit('Figure 9: another').line('graph', 0, here={'ms': 1.0})

    made = [exhibits.Maker('Figure 8', fails), exhibits.Maker('Figure 9', works)]
    paper = exhibits.Paper('maxk', 'MaxK-GNN', '', '', made, {'Table 3': 'it lists graphs'})
    monkeypatch.setattr(maxk, 'PAPER', paper)
    with pytest.raises(SystemExit, match='1'):
        run(papers, tmp_path, 'maxk')
    assert 'failed: maxk, Figure 8' in capsys.readouterr().err
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert report['left_out'] == {
        'Table 3': 'it lists graphs', 'Figure 8': 'it failed: no such kernel'}
    assert [section['title'] for section in report['sections']] == ['Figure 9: another']


def test_graphs_like_those_of_the_papers(exhibits: Any) -> None:
    from benchmarks._harness import Settings

    def like(name: str, max_edges: int) -> Any:
        args = argparse.Namespace(max_edges=max_edges, quick=True)
        it = exhibits.Run(args, Settings(DEVICE, repeats=1, limit=1, budget=1))
        it.report = argparse.Namespace(graphs={}, left_out={})
        graph = it.like(name)
        assert it.report.graphs == {graph.name: graph.summary()}
        return graph

    small = like('ogbn-arxiv', 20_000)
    assert small.name == 'ogbn-arxiv-like 1/128 (generated)'
    assert small.num_nodes == 169_343 // 128
    assert 0 < small.num_edges <= 20_000
    assert like('ogbn-arxiv', 40_000).name == 'ogbn-arxiv-like 1/64 (generated)'


def test_table(exhibits: Any) -> None:
    exhibit = exhibits.Exhibit(
        'Table 1: times', width='k', shows='Few are fast.', differs='Another chip.')
    exhibit.line('Reddit', 8, paper={'ms': 1234.5, 'rate': 0.25}, here={'ms': 1.0})
    exhibit.line('ddi', 0, here={'ms': 'none'})
    assert exhibit.markdown() == '\n'.join([
        '## Table 1: times', '', 'Few are fast.', '',
        '| graph | k | ms, paper | ms, here | rate, paper |',
        '| --- | --: | --: | --: | --: |',
        '| Reddit | 8 | 1,234 | 1 | 0.25 |',
        '| ddi | – | – | none | – |', '',
        'Another chip.'])


def test_figures(exhibits: Any) -> None:
    from benchmarks._harness import Result

    results = {'one': Result(2.0), 'two': Result(3.0), 'three': Result(note='OOM')}
    assert exhibits.fastest(results, 'two', 'one', 'four') == 2.0
    assert exhibits.fastest(results, 'three') == '–'
    assert exhibits.ratio(3.0, 2.0) == 1.5
    assert exhibits.ratio('–', 2.0) == exhibits.ratio(3.0, '–') == exhibits.ratio(3.0, 0.0) == '–'


def test_approximates_a_parabola_better_with_more_units(papers: Any) -> None:
    """As many networks as there are widths, k a quarter of each."""
    from benchmarks.papers.maxk import error_of_square

    linear = error_of_square(16, lambda x: x)
    few, some, many = (error_of_square(hidden, MaxK(hidden // 4)) for hidden in (4, 16, 64))
    assert few < 0.9 * linear
    assert some < 0.7 * few
    assert many < 0.8 * some
    assert many < 0.15 * linear


class FakeSpMM:
    """What cuSPARSE does, into one and the same tensor."""

    def __init__(
        self, rowptr: Tensor, col: Tensor, value: Tensor, x: Tensor, algorithm: str,
        preprocess: bool,
    ) -> None:
        assert algorithm in ('ALG1', 'ALG2', 'ALG3')
        assert preprocess
        size = (rowptr.numel() - 1, x.size(0))
        self.matrix = torch.sparse_csr_tensor(rowptr, col, value, size)
        self.x, self.out = x, x.new_empty(size[0], x.size(1))

    def __call__(self) -> Tensor:
        return self.out.copy_(self.matrix @ self.x)


@pytest.mark.parametrize('model', ['GCN', 'GAT'])
def test_gat_times_the_same_training(
    papers: Any, monkeypatch: pytest.MonkeyPatch, model: str,
) -> None:
    from benchmarks import _cusparse, _graphs
    from benchmarks.papers import gat

    monkeypatch.setattr(_cusparse, 'SpMM', FakeSpMM)
    task = gat.Task(_graphs.load('tiny', DEVICE).without_loops(), model, 5)
    names = {gat.OURS, gat.FRESH, *gat.PYG[model], *(gat.CUSPARSE if model == 'GCN' else [])}
    for name in task.inputs.keys() & names:
        assert task.error(name, fresh=name == gat.FRESH) <= 1, name
        assert task.step(name)().isfinite()
    task.state['conv1.bias'] += 0.1
    assert task.error(gat.OURS, fresh=False) > 1


def test_paths_below_the_last_layer(papers: Any) -> None:
    from benchmarks import _graphs, paths

    problem = paths.Problem(_graphs.load('tiny', DEVICE), 0.01)
    src, dst = problem.edge_index.as_tensor().tolist()
    reached = set(problem.nodes.tolist())
    for above in range(3):
        case = paths.Aggregation(problem, 5, above)
        assert set(case.active.nonzero().view(-1).tolist()) == reached
        assert case.check(case.on_path()()) <= 1
        reached |= {u for u, v in zip(src, dst, strict=True) if v in reached}
