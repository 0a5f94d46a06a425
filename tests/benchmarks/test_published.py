"""The corpus of layers in the manner of published ones, and their benchmark."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_benchmarks import check_report, run
from torch_geometric.nn import MessagePassing

import pyg_fast

ROOT = Path(__file__).parents[2]
# A layer of each kind, and an autograd function.
SOME = [
    'GatedGCN',
    'MPNN',
    'GAT of PyG 1.4',
    'RotatE',
    'GNS step',
    'straight-through gate',
    'edge gates',
    'GPR-GNN',
    'edge tuple',
    'angle gate',
    'traffic',
    'spiking',
]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module('benchmarks.published')


@pytest.fixture
def inputs(published: Any) -> Any:
    return published.Inputs.make(*published.molecules(2), 8)


def test_the_corpus(published: Any, inputs: Any) -> None:
    assert len(published.LAYERS) >= 42
    assert {layer.kind for layer in published.LAYERS.values()} == published.KINDS.keys()
    assert {published.LAYERS[name].kind for name in SOME} == published.KINDS.keys()
    for name, layer in published.LAYERS.items():
        torch.manual_seed(0)
        made = layer.make(8)
        assert any(isinstance(module, MessagePassing) for module in made.modules()), name
        given = inputs.of(layer.inputs.split(), torch.float32)
        out = made(*given)
        assert out.shape == (inputs.x.size(0), 8), name
        leaves = [*(t for t in given if t.requires_grad), *made.parameters()]
        grads = torch.autograd.grad(out.square().sum(), leaves)
        assert all(grad.isfinite().all() for grad in grads), name
        assert all(bool(grad.any()) for grad in grads[1:]), name  # each parameter is used


@pytest.mark.parametrize('name', SOME)
def test_ours_is_as_exact(published: Any, inputs: Any, name: str) -> None:
    case = published.Case(published.LAYERS[name], inputs, inputs.prepared())
    by_pyg, ours = (case.step(which)() for which in (published.PYG, published.OURS))
    for which in (published.OURS, published.PREPARED):
        assert case.checked(which, case.step(which)(), by_pyg) <= 1
    assert re.fullmatch("kernel|blocks|PyG's code: .+", case.runs)
    assert str(ROOT) not in case.runs
    wrong = [ours[0] * 1.01, *ours[1:]]
    with pytest.raises(importlib.import_module('benchmarks._harness').Incorrect, match='ours'):
        case.checked(published.OURS, wrong, by_pyg)


def test_circular_correlation(published: Any) -> None:
    layer = published.LAYERS['CompGCN corr'].make(8).double()
    a, b = torch.randn(2, 5, 8, dtype=torch.double)
    expected = torch.fft.irfft(torch.fft.rfft(a).conj() * torch.fft.rfft(b), n=8)
    torch.testing.assert_close(layer.ccorr(a, b), expected, atol=1e-5, rtol=0)


def test_what_ran(published: Any, inputs: Any) -> None:
    case = published.Case(published.LAYERS['GPR-GNN'], inputs, inputs.prepared())
    case.step(published.OURS)
    assert case.runs == 'kernel'
    with pyg_fast.small_graphs('pyg'):
        case.step(published.OURS)
    assert case.runs.startswith("PyG's code: ")
    assert case.runs.endswith(' edges are too few for a kernel to pay')
    assert published.brief('no kernel (File "/a/b c/d.py", line 3:\n  x | y)') == (
        'no kernel (File d.py, line 3: x / y)'
    )
    assert len(published.brief('word ' * 99)) <= 160
    cells = [
        published.Cell(name, 8, {}, {'runs': ran})
        for name, ran in {
            'EGNN': 'blocks',
            'FAGCN': 'kernel',
            'GRAND': 'kernel',
            'MPNN': 'kernel',
            'T-GCN': "PyG's code: why and kernel",
        }.items()
    ]
    assert published.shares(cells) == '3 of 5 run as kernels: message 2 of 3, edge MLP 1 of 2.'


def test_sizes_and_intervals(published: Any) -> None:
    edge_index, num_nodes = published.molecules(112)
    assert 2_500 < num_nodes < 3_500
    assert 5_500 < edge_index.size(1) < 7_500
    assert int(edge_index.max()) < num_nodes
    assert int(edge_index.min()) == 0
    reverse = set(map(tuple, edge_index.flip(0).t().tolist()))
    assert reverse == set(map(tuple, edge_index.t().tolist()))
    median, low, high = published.interval([1.0] * 50 + [1.2] * 49)
    assert (median, low) == (1.0, 1.0)
    assert high == pytest.approx(1.2)
    median, low, high = published.interval([0.9] * 60 + [2.0] * 5)
    assert (median, low, high) == pytest.approx((0.9, 0.9, 0.9))


def test_rounds_alternate(published: Any) -> None:
    from benchmarks import _harness

    bench = published.Bench(
        'published',
        '',
        ['--device', 'cpu'],
        rounds=_harness.Option(4),
        least=_harness.Option(2),
        seconds=_harness.Option(100),
    )
    called: list[str] = []
    runs = {name: lambda name=name: called.append(name) for name in ('ours', 'PyG')}
    times, again = published.rounds(runs, bench)
    assert ' '.join(called) == 'ours PyG' + ' PyG ours PyG ours PyG PyG' * 2
    assert [len(values) for values in (*times.values(), again)] == [4, 4, 4]


def test_record(tmp_path: Path) -> None:
    report, markdown, _ = run('published', tmp_path, '--layers', 'weighted mean,GatedGCN')
    check_report(report, markdown)
    assert report['left_out'] == dict.fromkeys(
        ('Computers', 'tolokers'), 'PYG_FAST_DATA is not set'
    )
    assert [section['title'] for section in report['sections']] == [
        'A training step, molecules',
        'A training step, hubs',
    ]
    for section in report['sections']:
        cells = {cell['graph']: cell for cell in section['cells']}
        assert cells.keys() == {'weighted mean', 'GatedGCN'}
        for name, cell in cells.items():
            assert list(cell['results']) == ['ours', 'ours, prepared', 'PyG']
            facts = cell['facts']
            low, high = map(float, re.findall(r'[\d.]+', facts['95 %']))
            assert low - 0.01 <= facts['PyG / ours'] <= high + 0.01
            assert (facts['goal'] == 'holds') == (high >= 0.97) or abs(high - 0.97) < 0.01
            assert facts['kind'] == {'weighted mean': 'message', 'GatedGCN': 'aggregate'}[name]
            assert facts['runs'] == 'kernel'
    notes = json.dumps(report['notes'])
    assert 'The goal holds in ' in notes
    assert (
        'hubs: 2 of 2 run as kernels: message 1 of 1, aggregate 1 of 1. Geometric means: PyG / ours'
        in notes
    )
    assert report['graphs']['hubs']['largest_degree'] > 1000 / 15
