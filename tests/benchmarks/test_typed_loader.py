"""The benchmark of the loaders with types, times and links: its report, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_geometric.typing

ROOT = Path(__file__).parents[2]
LINE = [
    '--quick', '--device', 'cpu', '--threads', '1', '--repeats', '2', '--scale', '0.001',
    '--batches', '2', '--batch-size', '16', '--time-batch-size', '16', '--width', '9',
]  # fmt: skip


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    from benchmarks import typed_loader

    yield typed_loader
    torch.set_num_threads(threads)


@pytest.fixture
def bench(typed: Any, tmp_path: Path) -> Any:
    found = []

    class Kept(typed.Bench):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            found.append(self)

        def has(self, part: str) -> bool:
            return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typed, 'Bench', Kept)
        typed.main([*LINE, '--out', str(tmp_path)])
    return found[0]


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without a 'pyg-lib'")
def test_report(typed: Any, tmp_path: Path) -> None:
    typed.main([*LINE, '--out', str(tmp_path)])
    (written,) = tmp_path.glob('*.json')
    report = json.loads(written.read_text())
    assert [
        [(cell['graph'], cell['width']) for cell in section['cells']]
        for section in report['sections']
    ] == [
        [('MAG-like', 7), ('MAG-like', 140)],
        [('relational, last', 16), ('relational, uniform', 16)],
        [('products-like 1/1024', 16)],
        [('MAG-like', 16)],
    ]
    assert {name: graph['edge_types'] for name, graph in report['graphs'].items()} == {
        'MAG-like, 7 edge types': 7,
        'MAG-like, 140 edge types': 140,
        'relational, 22 edge types': 22,
        'products-like 1/1024, 1 edge types': 1,
    }
    edges = [graph['edges'] for graph in report['graphs'].values()]
    assert edges[0] == edges[1]
    has_types, has_time = (
        torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE,
        torch_geometric.typing.WITH_PYG_LIB,
    )
    for section in report['sections']:
        rivals = has_time if 'time' in section['title'] else has_types
        for cell in section['cells']:
            assert ('PyG, no workers' in cell['results']) == rivals
            for result in cell['results'].values():
                assert result['median_ms'] > 0
                assert result['error'] is None or result['error'] <= 1
            assert cell['results']['ours']['error'] is not None
            if 'Training' not in section['title']:
                assert cell['facts']['edges'] > 0
                assert cell['facts']['fetching'] > 0
    many = report['sections'][0]['cells'][1]
    times = [many['results'][name]['median_ms'] for name in (typed.OURS, typed.FEW)]
    assert many['facts']['time / 7 edge types'] == pytest.approx(times[0] / times[1], rel=1e-3)
    assert ("PyG's loader of time" in report['left_out']) != has_time


@pytest.mark.parametrize(
    'change',
    ['', 'another edge', 'an edge twice', 'features', 'more wanted', 'a later seed', 'last'],
)
def test_batches_are_compared_with_the_graph(typed: Any, bench: Any, change: str) -> None:
    graph = typed.database(bench)
    rules = typed.Rules((3, 2), typed.UNIFORM, 'customer')
    seeds = torch.arange(16)
    batch = next(
        iter(
            typed.node_loader(
                bench, graph, rules.fanouts, 'customer', seeds, 16, 1, None,
                times=torch.full((16,), typed._SPAN * 3 // 4),
            )
        )
    )  # fmt: skip
    visits = batch['visit', 'of', 'customer']
    if change == 'another edge':
        visits.e_id = visits.e_id.roll(1)
    elif change == 'an edge twice':
        src, dst = visits.edge_index
        k = int((dst[1:] == dst[:-1]).nonzero()[0])
        visits.e_id[k + 1], src[k + 1] = visits.e_id[k].clone(), src[k].clone()
    elif change == 'features':
        batch['order'].x[-1, -1] += 1
    elif change == 'more wanted':
        rules = rules._replace(fanouts=(3, 3))
    elif change == 'a later seed':  # more rows might be there
        batch['customer'].seed_time[:] = typed._SPAN
    elif change == 'last':
        rules = rules._replace(strategy=typed.LAST)
    assert (typed.batch_error(graph, rules, batch) > 1) == bool(change)


def test_links_are_compared(typed: Any, bench: Any) -> None:
    graph = typed.products_like(bench)
    links = graph.edges[typed.OF_DATA].edge_index[:, ::50]
    rules = typed.Rules((4, 3))
    batches = [
        next(
            iter(
                typed.FastLinkNeighborLoader(
                    graph.data, [4, 3], batch_size=32, edge_label_index=links, seed=1,
                    neg_sampling='binary', drop_seed_edges=drop,
                )
            )
        )
        for drop in (False, True)
    ]  # fmt: skip
    assert typed.link_error(graph, rules, links, batches[0]) == 0
    assert typed.dropped_error(graph, links, batches[1]) == 0
    assert typed.dropped_error(graph, links, batches[0]) > 1
    assert typed.link_error(graph, rules, links.roll(1, 1), batches[0]) > 1
    batches[0].edge_label = batches[0].edge_label.roll(1)
    assert typed.link_error(graph, rules, links, batches[0]) > 1


def test_training_is_compared(typed: Any, bench: Any) -> None:
    training = typed.Training(bench, typed.mag_like(bench))
    losses = training.make(typed.OURS, None)()
    assert training.check(losses) <= 1
    for wrong in (losses * 1.001, losses.clone().add_(torch.tensor([0, 0.1]))):
        assert training.check(wrong) > 1
