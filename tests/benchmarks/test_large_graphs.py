"""The benchmark of large graphs runs, and its references are right."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import large_graphs

    threads = torch.get_num_threads()
    yield large_graphs
    torch.set_num_threads(threads)


def run(bench: Any, folder: Path, device: torch.device, *args: str) -> tuple[list[Any], str]:
    bench.main(['--quick', '--device', device.type, '--threads', '1', '--out', str(folder), *args])
    (written,) = folder.glob('*.json')
    return json.loads(written.read_text())['sections'], written.with_suffix('.md').read_text()


def test_training(bench: Any, tmp_path: Path, device: torch.device) -> None:
    (section,), markdown = run(
        bench, tmp_path, device, '--parts', 'training', '--convs', 'sage', '--symmetric'
    )
    assert f'## {bench.TRAINING}\n' in markdown
    (cell,) = section['cells']
    assert cell['graph'] == 'papers-like-tiny, sage, bfloat16, symmetric'
    assert [cell['results'][name]['count'] for name in ('step', 'inference')] == [5, 2]
    assert cell['facts']['edges'] == 580_000
    assert cell['facts']['estimated, GiB'] > 0


def test_paths_equal_the_whole_graph(bench: Any, tmp_path: Path, device: torch.device) -> None:
    """In 20 steps of float32 without dropout; the gradients are those of float64."""
    (losses, gradients), _ = run(
        bench,
        tmp_path,
        device,
        '--parts',
        'losses,gradients',
        '--dtypes',
        'float32',
        '--steps',
        '20',
        '--lr',
        '0.002',
    )
    assert [cell['graph'] for cell in losses['cells']] == [
        f'papers-like-tiny, {conv}, float32' for conv in bench.CONVS
    ]
    for cell in losses['cells']:
        facts = cell['facts']
        assert facts['steps compared'] == 20
        assert facts['last loss compared'] > 0.05  # or rounding is all of it
        assert facts['largest relative difference'] < 1e-4
        assert facts['test accuracy on paths, %'] == pytest.approx(
            facts['on the whole graph, %'], abs=3
        )
    for cell in gradients['cells']:
        assert cell['facts']['largest relative error of a parameter'] < 1e-5


def test_neighbourhood(bench: Any, limits: Callable[..., None]) -> None:
    limits(edges_looked_at=2)
    edge_index = torch.tensor([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]], dtype=torch.int32)
    seeds = torch.arange(6) == 4
    edges = bench.neighbourhood(edge_index, seeds, 3)
    assert sorted(edges.t().tolist()) == [[1, 2], [2, 3], [3, 4]]
    assert seeds.nonzero().view(-1).tolist() == [4]


def test_arguments_are_checked(bench: Any, capsys: pytest.CaptureFixture) -> None:
    for args in (('--sizes', 'tiny'), ('--convs', 'gin'), ('--dtypes', 'int8'), ('--seeds', '0')):
        with pytest.raises(SystemExit):
            bench.main(['--device', 'cpu', *args])
        assert args[0] in capsys.readouterr().err
