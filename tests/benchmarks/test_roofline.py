"""The rooflines: the bytes that are counted, the ceilings that they are held against."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
LINE = [
    '--quick',
    '--device',
    'cpu',
    '--threads',
    '1',
    '--repeats',
    '2',
    '--graphs',
    'tiny',
    '--widths',
    '8,16',
    '--tables',
    '1',
    '--buffer',
    '2',
    '--batch-size',
    '32',
]


def near(value: float) -> object:
    """Records have six digits."""
    return pytest.approx(value, rel=1e-4)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    from benchmarks import roofline

    yield roofline
    torch.set_num_threads(threads)


def test_report(bench: Any, tmp_path: Path) -> None:
    bench.main([*LINE, '--out', str(tmp_path)])
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    markdown = written.with_suffix('.md').read_text()
    sections = {section['title']: section for section in report['sections']}
    assert list(sections) == [
        'Streams, GB/s',
        'Random rows, GB/s',
        'Sums, float32',
        'Sums, bfloat16',
        'Execution paths, 10% training',
        'MaxK, k = 16, float32',
        'MaxK, k = 16, bfloat16',
        'Sampled sums, S = 32, float32',
        'Sampled sums, S = 32, bfloat16',
        'Sampled sums, S = 32, int8',
        'Mini-batches and preparation',
        'Attention, float32',
    ]
    (streams,) = sections['Streams, GB/s']['cells']
    copy, read = (streams['results'][name] for name in (bench.COPY, bench.READ))
    assert copy['num_bytes'] == 2 * read['num_bytes'] == 2 << 21
    rows = sections['Random rows, GB/s']['cells']
    assert [cell['width'] for cell in rows] == list(bench.ROWS)
    memory = max(each['num_bytes'] / each['min_ms'] * 1e3 for each in (copy, read))
    fastest = [
        max(each['num_bytes'] / each['min_ms'] * 1e3 for each in cell['results'].values())
        for cell in rows
    ]
    kernels = [
        (name, result)
        for section in report['sections'][2:]
        for cell in section['cells']
        for name, result in cell['results'].items()
    ]
    assert len(kernels) == 4 * 2 * 2 + 1 + 4 * 2 + 6 + 2 * 3 + 6
    for name, result in kernels:
        assert f'- {name}: ' in markdown
        assert result['error'] <= 1
        seconds = result['median_ms'] / 1e3
        assert result['stream_ceiling'] == near(max(memory, fastest[-1])) or (
            result['stream_ceiling'] == near(memory)
        )
        assert result['of_stream'] == near(result['must_move'] / seconds / result['stream_ceiling'])
        assert result['share'] == max(result['of_stream'], result['of_gather'])
        if result['gathered']:
            assert any(result['gather_ceiling'] == near(each) for each in fastest)
            assert result['of_gather'] == near(
                result['gathered'] / seconds / result['gather_ceiling']
            )


def test_bytes_of_a_sum(bench: Any) -> None:
    from benchmarks import _graphs

    graph = _graphs.load('tiny', torch.device('cpu'))
    case = bench.maxk.Case(graph, torch.float32, 16)
    made = {each.name: each.work for each in bench.sums_of(case, 8)}
    nodes, edges, row = graph.num_nodes, graph.num_edges, 4 * 8
    sources = graph.col.unique().numel()
    once = 4 * (nodes + 1) + 4 * edges + nodes * row
    plain = bench.Work(sources * row + once, edges * row + once, row, nodes * row)
    assert made['spmm, unweighted'] == plain
    weighted = bench.Work(plain.must_move + 4 * edges, plain.gathered + 4 * edges, row, nodes * row)
    assert made['spmm'] == made['spmm, gradient of weights'] == weighted
    back = made['spmm, gradient of x']  # positions of the weights besides; other distinct rows
    assert back.gathered == weighted.gathered + 4 * edges


def test_ceilings(bench: Any) -> None:
    ceilings = bench.Ceilings(1000)
    ceilings.memory = 5.0
    ceilings.rows = {(64, 100): 10.0, (64, 10_000): 2.0, (1024, 100): 20.0, (1024, 10_000): 4.0}
    assert ceilings.random_rows(100, 20_000) == 2
    assert ceilings.random_rows(600, 0) == 20
    assert ceilings.cached(8) == 10
    assert ceilings.stream(1000) == (bench.CACHE, 20)
    assert ceilings.stream(1001) == (bench.MEMORY, 5)
    result = bench.Result(2000.0, 2000.0, 2000.0, 3)
    found = bench.reached(result, bench.Work(500, 30, 64, 90), ceilings)
    assert (found.of_stream, found.of_gather) == (12.5, 1.5)
    assert (found.share, found.limit, found.stream) == (12.5, bench.CACHE, bench.CACHE)
    found = bench.reached(result, bench.Work(2000, 50_000, 64, 9_000), ceilings)
    assert (found.limit, found.share, found.of_random_rows) == ('cached rows', 2500, 12_500)


def test_wrong_results_are_not_timed(
    bench: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    right = bench.kernels

    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name == 'match':
                return lambda *args: right.match(*args).clamp(max=3)
            return getattr(right, name)

    monkeypatch.setattr(bench, 'kernels', Broken())
    with pytest.raises(bench._harness.Incorrect, match='match'):
        bench.main([*LINE, '--parts', 'batches', '--out', str(tmp_path)])


def test_walks(bench: Any) -> None:
    from benchmarks import _graphs

    graph = _graphs.load('tiny', torch.device('cpu'))
    start = torch.arange(graph.num_nodes)
    walk = bench.kernels.random_walk(graph.rowptr, graph.col, start, 4, 0.0, 1)
    assert bench.walk_error(graph, start, walk) == 0
    assert bench.walk_error(graph, start, walk.roll(1, 0)) > 1
    walk[graph.degree.argmax(), 2] = int((graph.degree == 0).nonzero()[0])  # reached by no edge
    assert bench.walk_error(graph, start, walk) > 1


@pytest.mark.parametrize(
    'args', [('--parts', 'gcn'), ('--tables', '0'), ('--buffer', '0'), ('--graphs', 'karate')]
)
def test_arguments_are_checked(
    bench: Any,
    args: tuple[str, str],
    capsys: pytest.CaptureFixture,
) -> None:
    with pytest.raises(SystemExit):
        bench.main(['--device', 'cpu', *args])
    assert args[0] in capsys.readouterr().err
