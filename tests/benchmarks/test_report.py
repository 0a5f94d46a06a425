"""The pages of performance: which runs they are drawn from, and that nobody edits them by hand."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SUMS = 'sum, forward, float32'
README = (
    '# A\n\nWords.\n\n<!-- begin: python -m benchmarks.report -->\nold\n<!-- end -->\n\nMore.\n'
)


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import report

    return report


class Tree:
    """A made-up README, and results beside it."""

    def __init__(self, report: Any, root: Path) -> None:
        self.report, self.root, self.results = report, root, root / 'results'
        self.results.mkdir()
        (root / 'README.md').write_text(README)

    def add(
        self,
        name: str,
        day: int,
        times: Mapping[tuple[str, int], Mapping[str, float]],
        section: str = SUMS,
        bench: str = 'spmm',
        markdown: str = '',
        **changes: Any,
    ) -> None:
        data = {
            'bench': bench,
            'date': f'2030-01-{day:02}T00:00:00+00:00',
            'notes': ['About.'],
            'environment': {'device': 'NVIDIA Made-Up', 'commit': f'{name}0123456', 'dirty': False},
            'arguments': {'quick': False},
            'left_out': {},
            'sections': [
                {
                    'title': section,
                    'cells': [
                        {
                            'graph': graph,
                            'width': width,
                            'results': {
                                each: {'median_ms': ms, 'min_ms': ms, 'max_ms': ms, 'count': 3}
                                for each, ms in contenders.items()
                            },
                        }
                        for (graph, width), contenders in times.items()
                    ],
                }
            ],
        }
        for key, value in changes.items():
            (data['environment'] if key in ('device', 'commit') else data)[key] = value
        (self.results / f'{name}.json').write_text(json.dumps(data))
        (self.results / f'{name}.md').write_text(markdown or f'# {name}\n')

    def run(self, *args: str) -> None:
        self.report.main(['--results', str(self.results), '--root', str(self.root), *args])

    def page(self, name: str = '') -> str:
        """The page of all devices, or one of those below it."""
        file = f'{self.report.FOLDER}/{name}.md' if name else self.report.PAGE
        return (self.root / file).read_text()

    def readme(self) -> str:
        return (self.root / 'README.md').read_text()

    def plots(self) -> dict[str, bytes]:
        files = sorted(self.root.glob('docs/performance/*.svg'))
        return {file.name: file.read_bytes() for file in files}


@pytest.fixture
def tree(report: Any, tmp_path: Path) -> Tree:
    pytest.importorskip('matplotlib')
    return Tree(report, tmp_path)


def cell(ours: float, rival: float) -> dict[str, float]:
    return {'ours': ours, 'cuSPARSE ALG1': rival + 1, 'cuSPARSE ALG2': rival}


def test_the_newest_rows_are_taken(tree: Tree) -> None:
    tree.add('new', 3, {('reddit-like', 64): cell(2, 5), ('Computers', 64): cell(4, 5)})
    tree.add(
        'old',
        2,
        {
            ('reddit-like', 64): cell(4, 7),
            ('reddit-like', 256): cell(8, 9),
            ('moby', 64): cell(4, 3),
        },
    )
    tree.add('quick', 4, {('reddit-like', 64): cell(1, 1)}, arguments={'quick': True})
    tree.add('elsewhere', 1, {('reddit-like', 64): cell(6, 9)}, device='CPU Made-Up')
    tree.run()
    page, readme = tree.page('aggregation'), tree.readme()
    assert '| reddit-like | 2.50 | 64 | 2.00 | 5.00 (cuSPARSE ALG2) | a |' in page
    assert '| moby | 0.75 | 64 | 4.00 | 3.00 (cuSPARSE ALG2) | b |' in page
    assert 'Runs: (a) `benchmarks/results/new.md`, NVIDIA Made-Up, 2030-01-03, commit new0' in page
    assert 'times (moby, 64)' in page
    assert '| reddit-like | 1.50 | 64 | 6.00 | 9.00 (cuSPARSE ALG2) |' in page
    assert '8.00' not in page
    assert 'quick' not in page
    assert '| 1.25 | Computers | 4.00 | 5.00 (cuSPARSE ALG2) |' in readme
    assert 'results/new.md), NVIDIA Made-Up, 2030-01-03.' in readme
    assert readme.startswith('# A\n\nWords.')
    assert readme.endswith('<!-- end -->\n\nMore.\n')
    assert 'old\n' not in readme
    assert list(tree.plots()) == [
        'ratios-cpu-made-up.svg',
        'ratios-nvidia-made-up.svg',
        'sums-nvidia-made-up.svg',
    ]
    assert '(sums-nvidia-made-up.svg)' in page


def test_molecules(tree: Tree) -> None:
    eager, both = {'ours, eager': 9.0, 'PyG, 8 workers': 12.0}, {'ours, captured and compiled': 2.0}
    title = 'A training step'
    tree.add('gps', 1, {('32 graphs', 64): {**eager, **both}}, title, 'gps')
    tree.add('old', 2, {('GIN, 32 graphs', 300): {**eager, **both}}, title, 'molecules')
    tree.add('eager', 3, {('GIN, 32 graphs', 300): eager}, title, 'molecules')
    tree.run()
    page = tree.page('batches-of-small-graphs')
    assert '| GIN, 32 graphs | 6.00 | 300 | 2.00 | 12.0 (PyG, 8 workers) | 9.00 |' in page
    assert '| 32 graphs' not in page
    assert '| Training on batches of molecules | 6.00 |' in tree.page()


def test_a_chart_and_a_table_for_each_device(tree: Tree) -> None:
    tree.add('gpu', 3, {('reddit-like', 64): cell(2, 8), ('moby', 64): cell(4, 4)})
    tree.add('cpu', 2, {('moby', 64): cell(4, 3)}, device='CPU Made-Up')
    tree.run()
    page = tree.page()
    gpu, cpu = page.split('## NVIDIA Made-Up')[1].split('## CPU Made-Up')
    name = 'Weighted sums alone, beside cuSPARSE or MKL'
    assert f'| {name} | 2.00 | 1.00 | moby, F = 64 | 2 |' in gpu
    assert 'On NVIDIA Made-Up, 2030-01-03.' in gpu
    assert '(performance/ratios-nvidia-made-up.svg)' in gpu
    assert f'| {name} | 0.75 | 0.75 | moby, F = 64 | 1 |' in cpu
    assert '\nAggregation <performance/aggregation>\n' in cpu
    assert len(tree.report.WORKLOADS) <= tree.report.MOST


def test_wide_tables_are_divided(report: Any) -> None:
    rows = [['graph', *(f'a-long-name-{k}' for k in range(30))], ['---'] * 31]
    rows.append([str(k) for k in range(31)])
    table = ['| ' + ' | '.join(row) + ' |' for row in rows]
    lines = report.narrow(['Text.', '', *table, '', 'On.'])
    heads = [line for line in lines if line.startswith('| graph |')]
    assert len(heads) > 1
    found = [cell for line in heads for cell in line.split(' | ')[1:]]
    assert len(found) == 30
    assert all(len(line) < 200 for line in heads)
    assert lines[:2] + lines[-2:] == ['Text.', '', '', 'On.']
    short = ['| a | b |', '| --- | --- |', '| 1 | 2 |']
    assert report.narrow(short) == short


def test_names_of_contenders(tree: Tree) -> None:
    from benchmarks import sampled

    table = tree.report.SAMPLED
    times = {sampled.FASTRAND: 2, 'bucket': 3, sampled.FULL: 7, 'cuSPARSE ALG2': 8}
    tree.add('one', 1, {('reddit-like', 32): times}, table.section, table.bench)
    tree.run()
    page, readme = tree.page('sampled-aggregation'), tree.readme()
    assert '| graph | ratio | S | fastrand | best rival | bucket |' in page
    assert '| reddit-like | 3.50 | 32 | 2.00 | 7.00 (ours, all edges) | 3.00 |' in page
    assert '| 3.50 | reddit-like | 2.00 | 7.00 (ours, all edges) |' in readme


def test_check(tree: Tree, capsys: pytest.CaptureFixture) -> None:
    tree.add('one', 1, {('reddit-like', 64): cell(2, 5), ('Computers', 64): cell(2, 5)})
    with pytest.raises(SystemExit, match=r'sums-nvidia-made-up\.svg is not'):
        tree.run('--check')
    assert not (tree.root / 'docs').exists()
    tree.run()
    tree.run('--check')
    svg = tree.root / 'docs/performance/sums-nvidia-made-up.svg'
    for file, text, other in (
        (tree.root / tree.report.PAGE, '2.50', '1.00'),
        (svg.with_name('aggregation.md'), '2.00', '1.00'),
        (tree.root / 'README.md', '2.50', '9.9'),
        (svg, 'data ', 'other '),
    ):
        right = file.read_text()
        file.write_text(right.replace(text, other))
        with pytest.raises(SystemExit, match=file.name):
            tree.run('--check')
        file.write_text(right)
    tree.run('--check')
    for name in ('left.svg', 'left.md'):
        (svg.parent / name).write_text('')
        with pytest.raises(SystemExit, match=rf'{name} is not what the runs give'):
            tree.run('--check')
        tree.run()
        assert not (svg.parent / name).exists()
    tree.add('two', 2, {('reddit-like', 64): cell(1, 5)})
    with pytest.raises(SystemExit, match='5.00'):
        tree.run('--check')
    tree.run()
    assert list(tree.plots()) == ['ratios-nvidia-made-up.svg', svg.name]


def test_plots_are_the_same_every_time(tree: Tree) -> None:
    tree.add('one', 1, {('reddit-like', width): cell(width / 9, width / 5) for width in (16, 64)})
    tree.run()
    first, svg = tree.plots(), tree.root / 'docs/performance/sums-nvidia-made-up.svg'
    svg.unlink()
    tree.run()
    assert tree.plots() == first
    assert b'cuSPARSE' in first[svg.name]  # words, not outlines
    assert b'<dc:date>' not in first[svg.name]


@pytest.mark.parametrize('key', ['date', 'device', 'commit'])
def test_runs_that_do_not_say_what_they_are(tree: Tree, key: str) -> None:
    tree.add('one', 1, {('reddit-like', 64): cell(2, 5)}, **{key: None})
    with pytest.raises(SystemExit, match=f'one.json does not tell its {key}'):
        tree.run()
    assert not (tree.root / 'docs').exists()


def test_figures_need_a_run(tree: Tree) -> None:
    tree.add('one', 1, {('reddit-like', 64): cell(2, 5)})
    (tree.results / 'one.md').unlink()
    with pytest.raises(SystemExit, match=r'one\.json has no one\.md'):
        tree.run()
    (tree.results / 'one.md').write_text('')
    for words in ('takes 1.5 ms', '2.1 times as fast', 'a 40th of it', '4.6 % of', '3x', '2 GB'):
        (tree.root / 'README.md').write_text(f'{README}\n{words}\n')
        with pytest.raises(SystemExit, match='README.md has figures that name no run'):
            tree.run()
    words = '`x = 1.5 ms`, k = 32, Python 3.10, 64 x\n\n```python\ny = 3  # 2 times\n```\n'
    (tree.root / 'README.md').write_text(README + words.replace('64 x', '64'))
    tree.run()
    (tree.root / 'README.md').write_text('no place')
    with pytest.raises(SystemExit, match=r'README\.md has no lines'):
        tree.run()


def test_tables_as_they_are(tree: Tree) -> None:
    head = '| graph | S |\n| --- | --: |\n'
    title = 'GCN: S that loses at most 1 point'
    for name, day, rows, arguments in (
        ('old', 1, '| a | 1 |\n| b | 2 |\n', {}),
        ('new', 2, '| b | 3 |\n', {}),
        ('rounded', 3, '| b | 4 |\n', {'quantize': True}),
    ):
        tree.add(
            name,
            day,
            {},
            'GCN',
            'sampled-accuracy',
            f'# r\n\n## {title}\n\n{head}{rows}',
            arguments=arguments,
        )
    tree.run()
    page = tree.page('sampled-aggregation')
    assert '| graph | S | run |\n| --- | --: | --: |\n| b | 3 | a |\n| a | 1 | b |\n' in page
    assert 'rounded' not in page


def test_papers(tree: Tree) -> None:
    for name, day, titles in (
        ('old', 1, ('Figure 10: x', 'Figure 9: y')),
        ('new', 2, ('Figure 9: y',)),
    ):
        sections = [{'title': title, 'cells': []} for title in titles]
        text = '\n\n'.join(f'## {title}\n\nIt is {name}.\n\n| a |\n| --- |' for title in titles)
        tree.add(
            name,
            day,
            {},
            bench='papers-maxk',
            markdown=f'# p\n\n{text}\n',
            sections=sections,
            notes=['The paper (somewhere). Its figures.'],
            left_out={'Table 1': 'it is long'},
        )
    tree.run()
    page = tree.page('papers-maxk')
    assert page.startswith('# The paper\n')
    assert '\nsomewhere. Its figures.\n' in page
    first, second = (
        page.index('## Figure 9: y (NVIDIA Made-Up)\n\nIt is new.'),
        page.index('## Figure 10: x (NVIDIA Made-Up)\n\nIt is old.'),
    )
    assert first < second
    assert page.count('## ') == 2
    assert '\nPaper: The paper <performance/papers-maxk>\n' in tree.page()
    assert 'Left out: Table 1, since it is long.' in page


def test_rooflines(report: Any, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _harness, roofline

    monkeypatch.setenv('PYG_FAST_COMMIT', '0123456789')
    args = argparse.Namespace(device='cpu', out=tree.results, quick=False)
    made = _harness.Report('roofline', args, ['Notes.'])
    ceilings = roofline.Ceilings(0)
    ceilings.memory, ceilings.rows = 1e9, {(64, 1 << 20): 4e9}
    timed = {'median_ms': 2.0, 'min_ms': 2.0, 'max_ms': 2.0, 'count': 3}
    made.section('Streams, GB/s').cells.append(
        _harness.Cell('float32', 8, {'copy': roofline.Rate(**timed, num_bytes=2_000_000)})
    )
    result = roofline.reached(
        _harness.Result(**timed), roofline.Work(500_000, 6_000_000, 64, 1 << 20), ceilings
    )
    made.section('Sums, float32', roofline.Roofline, columns={}).cells.append(
        _harness.Cell('tiny', 16, {'spmm': result})
    )
    made.save()
    assert '| float32 | 8 | 1.0 |' in made.path.with_suffix('.md').read_text()
    tree.run()
    page = tree.page('rooflines')
    assert '| Streams | float32 | 8 | copy | 1.0 |' in page
    assert '| spmm | 75% | cached rows | Sums, float32 | tiny | 16 | 2.00 |' in page
    assert sorted(name.split('-')[0] for name in tree.plots()) == ['reached', 'roofline']
    tree.run('--check')


def test_what_stands_there_is_what_the_runs_give(report: Any) -> None:
    report.main(['--check'])
