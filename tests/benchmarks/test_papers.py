"""The papers' tables and figures: each can be rerun, beside the figures of the paper."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pyg_fast.nn import MaxK

ROOT = Path(__file__).parents[2]


@pytest.fixture
def papers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.delenv('PYG_FAST_DATA', raising=False)
    from benchmarks import papers

    threads = torch.get_num_threads()
    papers.run.cache_clear()
    yield papers
    torch.set_num_threads(threads)


def run(papers: Any, folder: Path, *args: str) -> tuple[dict[str, Any], str]:
    papers.main(
        [
            '--quick',
            '--device',
            'cpu',
            '--threads',
            '1',
            '--max-edges',
            '2000',
            '--repeats',
            '1',
            '--out',
            str(folder),
            *args,
        ]
    )
    (written,) = folder.glob('*.json')
    return json.loads(written.read_text()), written.with_suffix('.md').read_text()


@pytest.mark.optional
@pytest.mark.parametrize('name', ['maxk', 'sampled', 'gat', 'paths', 'fastgl'])
def test_every_exhibit_is_rerun(papers: Any, tmp_path: Path, name: str) -> None:
    report, markdown = run(papers, tmp_path, name)
    paper = papers.PAPERS[name]
    assert report['bench'] == f'papers-{name}'
    assert report['left_out'].items() >= paper.left_out.items()
    assert [section['title'] for section in report['sections']] == [
        exhibit.title for exhibit in paper.exhibits
    ]
    for section in report['sections']:
        assert section['cells'], section['title']
        for cell in section['cells']:
            assert all((result['error'] or 0) <= 1 for result in cell['results'].values())
    for exhibit in paper.exhibits:
        assert exhibit.shows in markdown
        assert exhibit.differs in markdown


def test_every_command_is_one(papers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmarks take the options of all exhibits, of quick runs too."""
    from benchmarks import _harness

    class Parsed(Exception):
        pass

    def parsed(*args: Any) -> None:
        raise Parsed

    monkeypatch.setattr(_harness, 'start', parsed)
    for paper in papers.PAPERS.values():
        for exhibit in paper.exhibits:
            for quick in (False, True) if isinstance(exhibit.commands, list) else ():
                for _, line in papers.lines_of(exhibit, quick):
                    with pytest.raises(Parsed):
                        papers.run(papers.shlex.join(line), ())


def test_figures_of_the_papers_stand_beside_ours(papers: Any, tmp_path: Path) -> None:
    report, markdown = run(papers, tmp_path, 'maxk', '--only', 'Kernels')
    (section,) = report['sections']
    assert section['summary'][0]['paper']['backward over cuSPARSE, k = 8'] == 6.93
    assert 'The paper: backward over cuSPARSE, k = 8 6.93; ' in markdown
    assert 'one NVIDIA A100 (80 GB)' in markdown
    assert {cell['width'] for cell in section['cells']} == {8, 32}
    assert '**Aggregation at F=256, forward, float32**\n\n| graph | k | ours |' in markdown
    assert list(report['graphs']) == ['arxiv-like 1/2048', 'reddit-like 1/65536']


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        (['maxx'], "got paper 'maxx', expected some of maxk"),
        (['maxk', '--only', 'Table 99'], "--only: got 'Table 99', expected some of Accuracy"),
    ],
)
def test_refuses_unknown_names(
    papers: Any,
    capsys: pytest.CaptureFixture[str],
    line: list[str],
    said: str,
) -> None:
    with pytest.raises(SystemExit):
        papers.main(line)
    assert said in capsys.readouterr().err


def test_list(papers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    papers.main(['maxk', '--list'])
    assert re.search(r'^MaxK-GNN.*: Parabola, Memory traffic, Kernels', capsys.readouterr().out)


def test_a_failure_costs_one_exhibit(
    papers: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(_: bool) -> Any:
        raise RuntimeError('no such kernel')

    exhibits = [
        papers.Exhibit('Figure 8: one', 'It fails.', fails),
        papers.Exhibit('Figure 9: another', 'It works.', lambda quick: (['| a |'], [])),
    ]
    paper = papers.Paper('MaxK-GNN', '', '', exhibits, {'Table 3': 'it lists graphs'})
    monkeypatch.setitem(papers.PAPERS, 'maxk', paper)
    with pytest.raises(SystemExit, match='1'):
        run(papers, tmp_path, 'maxk')
    assert 'failed: maxk, Figure 8' in capsys.readouterr().err
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert report['left_out'] == {
        'Table 3': 'it lists graphs',
        'Figure 8': 'it failed: no such kernel',
    }
    assert [section['title'] for section in report['sections']] == ['Figure 9: another']


def test_approximates_a_parabola_better_with_more_units(papers: Any) -> None:
    """As many networks as there are widths, k a quarter of each."""
    linear = papers.error_of_square(16, lambda x: x)
    few, some, many = (papers.error_of_square(hidden, MaxK(hidden // 4)) for hidden in (4, 16, 64))
    assert few < 0.9 * linear
    assert some < 0.7 * few
    assert many < 0.8 * some
    assert many < 0.15 * linear
