"""The benchmarks of the loader: what they compare, and that nothing wrong is timed."""

import json
import math
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _in_process import run_script

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
    '--fanouts',
    '4,3',
    '--batch-size',
    '64',
    '--batch-sizes',
    '16,64',
    '--rows',
    '50',
    '--width',
    '12',
    '--hidden',
    '8',
    '--wait-hidden',
    '8',
    '--workers',
    '0',
    '--sweep-batches',
    '2',
    '--wait-batches',
    '2',
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    threads = torch.get_num_threads()
    from benchmarks import loader

    yield loader
    torch.set_num_threads(threads)


@pytest.fixture
def report(bench: Any, tmp_path: Path) -> Callable[..., tuple[dict, str]]:
    def run(*args: str) -> tuple[dict, str]:
        bench.main([*LINE, '--out', str(tmp_path), *args])
        (written,) = tmp_path.glob('*.json')
        return json.loads(written.read_text()), written.with_suffix('.md').read_text()

    return run


def sections_of(report: dict) -> dict[str, dict]:
    """By the first words of their titles; everything in them was measured, and is right."""
    for section in report['sections']:
        for cell in section['cells']:
            for name, result in cell['results'].items():
                assert result['median_ms'] is not None, (section['title'], name, result['note'])
                assert 0 < result['min_ms'] <= result['median_ms'] <= result['max_ms']
                assert result['error'] is None or result['error'] <= 1, (section['title'], name)
    return {section['title'].split(',')[0]: section for section in report['sections']}


@pytest.mark.optional
def test_sampling(bench: Any, report: Callable[..., tuple[dict, str]]) -> None:
    found, markdown = report('--parts', 'sample')
    sections = sections_of(found)
    sampling, alone = sections['Sampling with the id map'], sections['The id map alone']
    assert [(cell['graph'], cell['width']) for cell in sampling['cells']] == [
        ('tiny, [4, 3]', 16),
        ('tiny, [4, 3]', 64),
    ]
    backend = [name for name in sampling['cells'][0]['results'] if name.startswith('PyG')]
    assert bool(backend) == ("PyG's sampler" not in found['left_out'])
    for cell in sampling['cells']:
        results = cell['results']
        assert results.keys() == {bench.OURS, bench.CHECKED, bench.TORCH, *backend}
        edges = {
            name: cell['facts'][f'{name}, M/s'] * results[name]['median_ms'] * 1e3
            for name in results
        }
        assert 0 < edges[bench.OURS] <= cell['width'] * (4 + 4 * 3)
        for name in results:  # of the same distribution
            assert edges[name] == pytest.approx(edges[bench.OURS], rel=0.3)
    (cell,) = alone['cells']
    rate = cell['width'] / cell['results'][bench.OURS]['median_ms'] / 1e3
    assert cell['facts'][f'{bench.OURS}, M/s'] == pytest.approx(rate, rel=1e-4)
    assert f'| {rate:,.3g} |' in markdown


def test_aggregation(bench: Any, report: Callable[..., tuple[dict, str]]) -> None:
    found, _ = report('--parts', 'aggregate', '--widths', '5,8')
    assert [section['title'] for section in found['sections']] == [
        'Sums over fresh blocks, forward, float32',
        'Sums over fresh blocks, forward + backward, float32',
    ]
    sections_of(found)
    for section in found['sections']:
        assert [cell['graph'] for cell in section['cells'][:4]] == [
            'tiny, at most 5',
            'tiny, at most 10',
            'tiny, at most 15',
            'tiny, batch of [15, 10, 5]',
        ]
        for cell in section['cells']:
            assert cell['results'].keys() == {bench.OURS, bench.TORCH_SPARSE, bench.SCATTER}
            assert all(result['error'] > 0 for result in cell['results'].values())


@pytest.mark.optional
def test_epochs(bench: Any, report: Callable[..., tuple[dict, str]]) -> None:
    found, markdown = report('--parts', 'epoch,ablation', '--rival-batches', '2')
    sections = sections_of(found)
    loading = sections['An epoch of loading']['cells'][0]['results']
    training = sections['An epoch of training']['cells'][0]['results']
    rivals = set() if "PyG's NeighborLoader" in found['left_out'] else {bench.PYG, bench.PER_WORKER}
    assert loading.keys() == {bench.OURS, *rivals}
    assert {bench.OURS, bench.TRIMMED} < training.keys() or not rivals
    assert len(rivals & training.keys()) == len(rivals) // 2  # only the better one
    assert 'An epoch of tiny has 3 batches; PyG was given the first 2 of them.' in markdown
    ablation = sections['Training by the parts of the system']
    assert tuple(ablation['cells'][0]['results']) == bench.STEPS


def test_match_and_waiting(bench: Any, report: Callable[..., tuple[dict, str]]) -> None:
    found, markdown = report('--parts', 'match,walks,wait')
    sections = sections_of(found)
    for name in ('Loading', 'Random walks of 3 steps'):
        times, *traffic = (
            section for section in found['sections'] if section['title'].startswith(name)
        )
        assert tuple(times['cells'][0]['results']) == tuple(bench.VARIANTS)
        assert [cell['graph'] for cell in traffic[0]['cells']] == [
            f'tiny, [4, 3], {variant}' for variant in bench.VARIANTS
        ]
        assert traffic[0]['cells'][0]['facts']['share saved'] == 0
    (cell,) = sections['Waiting for data']['cells']
    both, alone, fetch = (
        cell['results'][name]['median_ms']
        for name in (bench.TRAINING, bench.AT_HAND, bench.LOADING)
    )
    facts = cell['facts']
    assert facts['waiting, by difference, %'] == pytest.approx(
        100 * (1 - alone / both), rel=1e-3, abs=1e-3
    )
    assert 0 <= facts['by the loader, %'] < 100
    assert facts['what takes longer'] == ('fetch', 'step')[alone > fetch]
    assert f'| {facts["by the loader, %"]:.3g} | {facts["what takes longer"]} |' in markdown


def test_sweep(bench: Any, report: Callable[..., tuple[dict, str]]) -> None:
    found, _ = report('--parts', 'sweep')
    sections = sections_of(found)
    assert [(cell['width']) for cell in sections['Training over batch size']['cells']] == [64, 128]
    for name in ('width', 'hidden'):
        assert [cell['width'] for cell in sections[f'Training over {name}']['cells']] == [8, 16]
    assert [cell['graph'] for cell in sections['Training over fanout']['cells']] == [
        'tiny, [2, 2]',
        'tiny, [3, 2]',
    ]


def test_numbers_of_processes(
    bench: Any, report: Callable[..., tuple[dict, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process runs in this one, two fail; tests/examples/test_fastgl_ddp.py has real ones."""

    def started(command: list[str], **options: Any) -> Any:
        if command[0] != sys.executable:
            return real(command, **options)
        assert command[1:4] == ['-m', 'torch.distributed.run', '--standalone']
        if command[4] == '--nproc-per-node=2':
            return bench.subprocess.CompletedProcess(
                command, 1, '', 'x\nRuntimeError: out of luck\n'
            )
        assert command[4] == '--nproc-per-node=1'
        run_script(command[5:])
        return bench.subprocess.CompletedProcess(command, 0, '', '')

    real = bench.subprocess.run
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    for name, value in {
        'RANK': 0,
        'LOCAL_RANK': 0,
        'WORLD_SIZE': 1,
        'MASTER_PORT': port,
        'MASTER_ADDR': '127.0.0.1',
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(str(ROOT / 'examples'))
    monkeypatch.setattr(bench.subprocess, 'run', started)
    options = '--parts', 'gpus', '--gpus', '1,2', '--features', 'auto,sharded'
    (cell,) = report(*options)[0]['sections'][0]['cells']
    results = cell['results']
    assert list(results) == ['1 process, auto', '2 processes, auto', '2 processes, sharded']
    assert results['1 process, auto']['count'] == 2  # the first epoch is not counted
    assert results['1 process, auto']['median_ms'] > 0
    assert results['2 processes, auto']['note'] == 'failed: RuntimeError: out of luck'


def test_what_crossed_the_bus(bench: Any) -> None:
    stats = bench.LoaderStats(
        num_batches=2, bytes_moved=10e6, bytes_saved_by_match=4e6, bytes_saved_by_cache=2e6
    )
    assert list(bench.traffic(stats).values()) == [5, stats.match_degree, 0.375, 2, 1]


@pytest.mark.parametrize('change', ['twice', 'other edge', 'fewer', 'other seed', 'order'])
def test_a_sample_is_compared_with_the_graph(bench: Any, change: str) -> None:
    graph = bench._graphs.load('tiny', torch.device('cpu'))
    seeds = torch.arange(0, 300, 10)
    right = bench.ops.neighbor_sample(graph.rowptr, graph.col, seeds, [4, 3], seed=1)
    assert bench._minibatch.sample_error(graph, seeds, (4, 3), right) == 0
    sub, fanout = right, (4, 3)
    if change == 'twice':
        first = int((right.rowptr.diff() > 1).nonzero()[0])
        at = int(right.rowptr[first])
        e_id, edge_index, col = right.e_id.clone(), right.edge_index.clone(), right.col.clone()
        e_id[at + 1], edge_index[0, at + 1], col[at + 1] = e_id[at], edge_index[0, at], col[at]
        sub = right._replace(e_id=e_id, edge_index=edge_index, col=col)
    elif change == 'other edge':
        sub = right._replace(e_id=right.e_id.roll(1))
    elif change == 'fewer':
        fanout = (5, 3)
    elif change == 'other seed':
        seeds = seeds.roll(1)
    else:
        sub = right._replace(edge_index=right.edge_index.flip(1))
    assert bench._minibatch.sample_error(graph, seeds, fanout, sub) > 1


def test_torch_ops_sample_the_same_way(bench: Any) -> None:
    graph = bench._graphs.load('tiny', torch.device('cpu'))
    seeds = torch.arange(0, 300, 7)
    sub = bench._minibatch.torch_sample(graph.rowptr, graph.col, seeds, [4, 3])
    assert torch.equal(sub.n_id[: seeds.numel()], seeds)
    assert sub.n_id.unique().numel() == sub.n_id.numel()
    src, dst = sub.n_id[sub.edge_index]
    edges = set(zip(*graph.edge_index.tolist(), strict=True))
    assert set(zip(src.tolist(), dst.tolist(), strict=True)) <= edges
    number = sub.edge_index[1].bincount(minlength=sub.n_id.numel())
    assert torch.equal(number[: seeds.numel()], graph.degree[seeds].clamp(max=4).long())
    ids = torch.tensor([5, 2, 5, 9, 2])
    found, local = bench._minibatch.torch_relabel(ids)
    assert (found.tolist(), local.tolist()) == ([5, 2, 9], [0, 1, 0, 2, 1])


@pytest.mark.parametrize('filters', [False, True])
def test_workers_of_the_rival_end_with_it(bench: Any, filters: bool) -> None:
    inputs = bench.Inputs(bench._graphs.load('tiny', torch.device('cpu')), 6)
    before = set(multiprocessing.active_children())
    left_out: dict[str, str] = {}
    if not bench._minibatch.pyg_backend(left_out, 'loader'):
        pytest.skip(left_out['loader'])
    loader = bench.pyg_loader(inputs, (4, 3), 20, 1, 2, filter_per_worker=filters)
    assert len(list(loader)) == len(list(loader)) == 2
    (worker,) = set(multiprocessing.active_children()) - before
    start = time.perf_counter()
    del loader
    assert not worker.is_alive()
    assert time.perf_counter() - start < 4  # torch gives up on a worker after 5


@pytest.mark.parametrize('window', [0, 4])
def test_the_loader_of_torch_ops_loads_what_is_right(bench: Any, window: int) -> None:
    graph = bench._graphs.load('tiny', torch.device('cpu'))
    inputs = bench.Inputs(graph, 6)
    plain = bench.Plain(
        inputs,
        20,
        lambda seeds: bench._minibatch.torch_sample(graph.rowptr, graph.col, seeds, [4, 3]),
        window,
    )
    batches = list(plain)
    assert len(batches) == inputs.num_batches(20) == 8
    assert all(bench.loaded(inputs, batch) == 0 for batch in batches)
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert torch.equal(seeds.sort()[0], inputs.nodes.sort()[0])
    wrong = batches[0].clone()
    wrong.x[-1, -1] += 1
    assert bench.loaded(inputs, wrong) == math.inf


def test_aggregations_of_blocks_are_compared(bench: Any) -> None:
    graph = bench._graphs.load('tiny', torch.device('cpu'))
    inputs = bench.Inputs(graph, 6)
    for name, sub, num_dst in bench.blocks(inputs, 32, 40, 6):
        block = bench.Block(name, sub, num_dst, 6)
        out, grad = block.ours(True)
        assert block.check((out, grad)) <= 1
        assert block.check((out, grad + 1e-3)) > 1
        assert block.check((out * 1.001,)) > 1
        assert block.check(block.scatter(True)) <= 1
        assert block.check(block.product('sorted', bench.TORCH_SPARSE, True)) <= 1


@pytest.mark.parametrize(
    'args', [('--parts', 'load'), ('--fanouts', '5,0'), ('--batch-size', '0'), ('--gpus', 'two')]
)
def test_arguments_are_checked(
    bench: Any, args: tuple[str, str], capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        bench.main(['--device', 'cpu', *args])
    assert args[0] in capsys.readouterr().err
