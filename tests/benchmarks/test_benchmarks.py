"""The benchmarks run and report, and do not time what is wrong."""

import contextlib
import importlib
import importlib.util
import io
import json
import math
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import _forks
import pytest
import torch
from _in_process import run_script
from torch_geometric.data import Data

from pyg_fast._batches.record import Direct
from tests._compiled import Backend

ROOT = Path(__file__).parents[2]


def run(bench: str, folder: Path, *args: str) -> tuple[dict, str, str]:
    command = [
        '--quick',
        '--device',
        'cpu',
        '--threads',
        '1',
        '--repeats',
        '2',
        '--out',
        str(folder),
        *args,
    ]
    out, log, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.delenv('PYG_FAST_DATA', raising=False)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(log):
            importlib.import_module(f'benchmarks.{bench}').main(command)
    torch.set_num_threads(threads)
    (written,) = folder.glob('*.json')
    markdown = written.with_suffix('.md').read_text()
    assert markdown in out.getvalue()
    return json.loads(written.read_text()), markdown, log.getvalue()


def check_report(report: dict, markdown: str) -> None:
    assert report['environment']['torch'] == torch.__version__
    assert report['environment']['threads'] == 1
    assert report['arguments']['repeats'] == 2
    for section in report['sections']:
        assert f'## {section["title"]}\n' in markdown
        for cell in section['cells']:
            for name, result in cell['results'].items():
                assert result['median_ms'] is not None, (section['title'], name, result['note'])
                assert 0 < result['min_ms'] <= result['median_ms'] <= result['max_ms']
                assert result['count'] >= 2


def test_one_command_names_all() -> None:
    known = importlib.import_module('benchmarks.__main__').benchmarks()
    assert {'spmm', 'layers', 'before_after', 'hubs', 'report', 'papers'} <= known.keys()
    assert all(known.values())
    with pytest.raises(SystemExit, match='layers  '):
        run_script([str(ROOT / 'benchmarks/__main__.py'), 'no such'])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The modes of all calls of torch.compile, which translates nothing into C++."""
    modes, right = [], torch.compile

    def traced(model=None, mode=None, **options):
        if options.keys() - {'dynamic'}:  # a decorator of torch's own, or our backend
            return right(model, mode=mode, **options)
        modes.append(mode)
        return right(model, backend='eager', **options)

    monkeypatch.setattr(torch, 'compile', traced)
    return modes


def test_layers(tmp_path: Path, compiled: list[str | None]) -> None:
    report, markdown, _ = run(
        'layers', tmp_path, '--graphs', 'tiny', '--layers', 'GCN', '--parts', 'steps,forward'
    )
    check_report(report, markdown)
    assert compiled == [None, None, 'reduce-overhead'] * 2  # ours, then PyG's twice
    assert [section['title'] for section in report['sections']] == [
        'One layer, forward + backward',
        'One layer, forward',
    ]
    for section in report['sections']:
        (cell,) = section['cells']
        assert cell['graph'] == 'tiny: GCN'
        assert {'ours, torch.compile', 'PyG', 'PyG, torch.compile', 'PyG torch CSR'} < (
            cell['results'].keys()
        )
        assert all(result['error'] <= 1 for result in cell['results'].values())


def test_new_graphs_and_models(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'layers',
        tmp_path,
        '--graphs',
        'tiny',
        '--layers',
        'SAGE max,GAT 8 heads',
        '--widths',
        '16',
        '--in-channels',
        '6',
        '--parts',
        'fresh,model,launches',
        '--model-graphs',
        'tiny',
    )
    check_report(report, markdown)
    new, *models = report['sections']
    assert new['title'] == 'A new graph at each step, forward + backward'
    assert [cell['graph'] for cell in new['cells']] == [
        f'{graph}: {layer}'
        for layer in ('SAGE max', 'GAT 8 heads')
        for graph in ('tiny', 'Cora-sized')
    ]
    assert [section['title'] for section in models] == [
        f'tiny, GATConv, the {what}'
        for what in (
            'two layers forward + backward',
            'whole training step',
            'whole training step on a new list of edges',
        )
    ]
    row = new['summary'][0]
    assert (row['ours'], row['rival'], row['cells']) == ('ours, edge_index', 'PyG', 4)
    for section in report['sections']:
        for cell in section['cells']:
            assert all(result['error'] <= 1 for result in cell['results'].values())


def test_kernels_in_compiled_code(
    tmp_path: Path, compiled: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('pyg_fast._compile.backend', backend := Backend())
    report, markdown, _ = run(
        'compiled', tmp_path, '--layers', 'own sum', '--sizes', 'hubs', '--rounds', '2'
    )
    check_report(report, markdown)
    (section,) = report['sections']
    (cell,) = section['cells']
    assert list(cell['results']) == [
        'ours, prepared',
        'ours, edge_index',
        'ours, prepared, eager',
        'PyG, torch.compile',
    ]
    assert all(result['error'] <= 1 for result in cell['results'].values())
    assert cell['facts'].keys() == {'PyG / ours, prepared', 'PyG / ours, edge_index'}
    assert 'ours, prepared: geometric mean' in markdown
    assert backend.kernels > 0
    assert compiled == [None]  # PyG's


def test_message(tmp_path: Path, compiled: list[str | None]) -> None:
    layers = {'GINE': 0, 'sum': 1}
    report, markdown, _ = run(
        'message',
        tmp_path,
        '--graphs',
        'tiny',
        '--widths',
        '8',
        '--layers',
        ','.join(layers),
        '--modes',
        'step',
    )
    check_report(report, markdown)
    (section,) = report['sections']
    assert [cell['graph'] for cell in section['cells']] == [f'tiny: {name}' for name in layers]
    for cell, by_op in zip(section['cells'], layers.values(), strict=True):
        assert list(cell['results']) == [
            'ours, prepared',
            'ours, edge_index',
            'PyG, torch.compile',
            'PyG',
            *['ours, spmm'] * by_op,
        ]
        assert all(result['error'] <= 1 for result in cell['results'].values())
    assert compiled == [None] * 2


@pytest.mark.parametrize('name', ['RGCN', 'RGAT', 'HGT'])
def test_messages_of_types(harness, name: str) -> None:
    from benchmarks import _graphs, message

    case = message.Case(
        message.KINDS[name], _graphs.load('tiny', torch.device('cpu')).without_loops(), 8
    )
    assert case.typed[1].unique().tolist() == list(range(7))
    outputs = case.step(message.PLAIN, message.STEP)()
    assert case.check(outputs) <= 1
    outputs[0].view(-1)[0] += outputs[0].norm() * 1e-2
    assert not case.check(outputs) <= 1


@pytest.mark.parametrize('name', ['gated message', 'PNA', 'GEN sum'])
def test_messages_are_compared(harness, name: str) -> None:
    from benchmarks import _graphs, message

    class Alone(message.Case):
        def fits(self, size: int) -> bool:
            return False

    graph = _graphs.load('tiny', torch.device('cpu')).without_loops()
    case = message.Case(message.KINDS[name], graph, 8)
    outputs = case.step(message.PREPARED, message.STEP)()
    assert case.check(outputs) <= 1
    assert case.check(outputs[:1]) <= 1  # of a forward pass
    for place, t in enumerate(outputs[: 1 if name == 'PNA' else None]):
        for slip in (t.norm() * 1e-2, math.nan):
            wrong = t.clone()
            wrong.view(-1)[-1] += slip
            assert not case.check([*outputs[:place], wrong, *outputs[place + 1 :]]) <= 1
    # As exact as PyG's layer is enough, and no more than twice its error.
    loose = [t * (1 + 2e-3) for t in outputs]
    assert case.check(loose) > 1
    case.by_pyg = tuple(t * (1 + 1.1e-3) for t in outputs)
    assert case.check(loose) <= 1
    case.by_pyg = tuple(t * (1 + 0.9e-3) for t in outputs)
    assert case.check(loose) > 1
    alone = Alone(message.KINDS[name], graph, 8)
    alone.layer = case.layer
    alone.by_pyg = ()
    assert case.check(alone.expected) <= 1e-3


def test_before_after(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'before_after', tmp_path, str(ROOT), str(ROOT), '--sizes', 'tiny', '--rounds', '2'
    )
    (section,) = report['sections']
    assert len(section['cells']) > 25
    for cell in section['cells']:
        assert cell['graph'].startswith('tiny: ')
        assert {name for name, each in cell['results'].items() if each['median_ms'] > 0} == {
            'before',
            'after',
        }
    assert '| tiny: GCN step, prepared |' in markdown


def test_before_after_of_a_tree_without_the_package(
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
) -> None:
    from benchmarks import before_after

    with pytest.raises(SystemExit, match=str(tmp_path)):
        before_after.main([str(tmp_path), str(tmp_path), '--sizes', 'tiny', '--device', 'cpu'])
    assert 'has no pyg_fast' in capfd.readouterr().err


def test_hubs(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'hubs', tmp_path, '--parts', 'layers,both,dense,batches,relations', '--layers', 'SAGE max'
    )
    check_report(report, markdown)
    *tables, relations = report['sections']
    dense = [section for section in tables if section['title'].startswith('Many edges: ')]
    assert [section['cells'][0]['width'] for section in dense] == [4, 10, 25, 28]
    tables = [section for section in tables if section not in dense]
    assert [section['title'] for section in tables] == [
        'A row and a column of h edges',
        "flow='target_to_source'",
        'A batch of FastNeighborLoader',
    ]
    for section in tables:
        assert [(cell['graph'], cell['width']) for cell in section['cells']] == [
            ('SAGE max', 0),
            ('SAGE max', 1000),
        ]
        without, hub = (cell['facts'] for cell in section['cells'])
        times = [cell['results']['ours, prepared']['median_ms'] for cell in section['cells']]
        assert without['ours, prepared / h = 0'] == 1
        assert hub['ours, prepared / h = 0'] == pytest.approx(times[1] / times[0], rel=1e-3)
    for section in report['sections']:
        for cell in section['cells']:
            assert cell['facts']['goal'] in ('holds', 'fails')
            assert all(result['error'] <= 1 for result in cell['results'].values())
    assert len(relations['cells']) == 2
    sizes = report['graphs']
    assert sizes['batch, h = 1,000']['largest_column'] > sizes['batch, h = 1,000']['edges'] / 4


def test_edge_mlp(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'edge_mlp',
        tmp_path,
        '--layers',
        'EGNN,mesh',
        '--precisions',
        'highest,bfloat16',
        '--eager-only',
    )
    check_report(report, markdown)
    assert [section['title'] for section in report['sections']] == [
        'A step, highest',
        'A step, bfloat16',
        'Forward, highest',
        'Forward, bfloat16',
    ]
    for section in report['sections']:
        assert [cell['graph'] for cell in section['cells']] == ['EGNN', 'mesh']
        for cell in section['cells']:
            assert cell['results'].keys() == {'ours, prepared', 'ours, edge_index', 'PyG'}
            assert cell['results']['ours, prepared']['error'] <= 1


def test_few_edges(tmp_path: Path) -> None:
    report, markdown, _ = run('few_edges', tmp_path, '--layers', 'self-loops,attention')
    check_report(report, markdown)
    (section,) = report['sections']
    assert [cell['graph'] for cell in section['cells']] == ['self-loops', 'attention']
    for cell in section['cells']:
        assert set(cell['facts']) == {
            'ours, edge_index / best choice',
            'ours, prepared / best choice',
        }
        assert len(cell['results']) == 5
        assert cell['results']['ours, prepared, kernels']['error'] <= 1


def test_few_edges_are_compared(harness) -> None:
    from benchmarks import few_edges

    case = few_edges.Case(few_edges.EdgeMLP, 60, 3, torch.device('cpu'))
    case.calls = 1
    outputs = case.step(few_edges.PREPARED)()
    assert case.check(outputs) <= 1
    for place, t in enumerate(outputs):
        wrong = t + t.norm() * 1e-2
        changed = [*outputs[:place], wrong, *outputs[place + 1 :]]
        assert (case.check(changed) <= 1) == (not t.any())  # Features of edges have no gradient.
    # As exact as PyG's layer is enough, and no more than twice its error.
    loose = [t * (1 + 2e-4) for t in outputs]
    for error, fits in ((0.9, False), (1.1, True)):
        case.error_of_pyg = error
        assert (case.check(loose) <= 1) == fits


def test_attention(
    tmp_path: Path, compiled: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import attention

    kind = attention.KINDS['graph']._replace(sizes=((4, 8),))
    monkeypatch.setitem(attention.KINDS, 'graph', kind)
    report, markdown, _ = run(
        'attention',
        tmp_path,
        '--cases',
        'graph,mesh to grid',
        '--graphs',
        'tiny',
        '--scale',
        '0.001',
        '--buffer',
        '1',
        '--modes',
        'step',
    )
    check_report(report, markdown)
    assert compiled == [None] * 2
    assert report['left_out'] == {'anemoi-models': 'its kernels are for GPUs'}
    _, section = report['sections']
    assert section['title'] == 'Attention, step, float32'
    assert [cell['graph'] for cell in section['cells']] == [
        'tiny: 4 x 8',
        'mesh to grid: 16 x 64',
    ]
    for cell in section['cells']:
        assert list(cell['results']) == [
            'ours, prepared',
            'ours, edge_index',
            'PyG',
            'PyG, torch.compile',
        ]
        assert all(result['error'] <= 1 for result in cell['results'].values())
        assert cell['facts']['share of bandwidth'] > 0
    nodes, edges, sources = (
        report['graphs']['mesh to grid'][what] for what in ('nodes', 'edges', 'sources')
    )
    assert (nodes, edges, sources) == (552, 3 * 552, 42)
    row = 4 * 16 * 64
    forward = (2 * nodes + 2 * sources + edges) * row + 4 * (edges + nodes + 1)
    step = 2 * forward + (nodes + 2 * sources + edges) * row
    assert cell['facts']['least MB'] == pytest.approx(step / 1e6, rel=1e-4)


@pytest.mark.parametrize(
    ('name', 'degree'),
    [('mesh', 8), ('mesh at random', 8), ('grid to mesh', 40), ('mesh to grid', 3)],
)
def test_attention_by_anemoi(
    harness, limits: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, degree: int
) -> None:
    """Its kernels get the arrays that they read, and what is wrong is seen."""
    from benchmarks import attention

    def conv(q, k, v, e, csc, reverse):
        (row, colptr), (rowptr, edge_ids, edge_dst) = csc, reverse
        dst = torch.arange(q.size(0)).repeat_interleave(colptr.diff())
        assert torch.equal(dst, edge_dst)
        src = torch.arange(k.size(0)).repeat_interleave(rowptr.diff())
        assert torch.equal(row[edge_ids], src)
        weights = ((q[dst] * (k[row] + e)).sum(-1) / q.size(-1) ** 0.5).exp()
        total = torch.zeros(q.shape[:2]).index_add(0, dst, weights)
        messages = (v[row] + e) * (weights / total[dst]).unsqueeze(-1)
        return torch.zeros_like(q).index_add(0, dst, messages)

    module = SimpleNamespace(graph_transformer_attention_conv=conv)
    for found, loaded in ((None, None), (conv, module)):
        monkeypatch.setitem(sys.modules, 'anemoi.models.triton.gt', loaded)
        told: dict[str, str] = {}
        bench = SimpleNamespace(
            cuda=True, report=SimpleNamespace(left_out=told), note=lambda line: None
        )
        assert attention.anemoi(bench) is found
        assert ('cannot be imported' in told.get('anemoi-models', '')) == (found is None)

    edges = attention.KINDS[name].make(name, 0.001, torch.device('cpu'))
    pairs = edges.edge_index[0] * edges.num_dst + edges.edge_index[1]
    assert pairs.unique().numel() == pairs.numel() == degree * edges.num_dst
    assert edges.summary()['largest_degree'] == degree
    limits(messages_at_once=1 << 12)
    case = attention.Case(edges, 2, 8, torch.float32)
    outputs = case.step(attention.ANEMOI, attention.STEP, conv)()
    assert case.check(outputs) <= 1
    for place, t in enumerate(outputs):
        wrong = t.clone()
        wrong.view(-1)[-1] += t.norm() * 1e-2
        assert not case.check([*outputs[:place], wrong, *outputs[place + 1 :]]) <= 1
    limits(messages_at_once=1 << 20)
    at_once = attention.Case(edges, 2, 8, torch.float32)
    assert case.check(at_once.expected) <= 1e-2


def test_molecules(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'molecules', tmp_path, '--eager-only', '--parts', 'train,loader,first,evaluate'
    )
    check_report(report, markdown)
    train, making, evaluate = report['sections']  # the first epoch would compile
    theirs = {'PyG, no workers', 'PyG, batches at hand'}
    for section in (train, evaluate):
        assert [cell['graph'] for cell in section['cells']] == ['GIN, 4 graphs', 'GPS, 4 graphs']
        for cell in section['cells']:
            assert cell['results'].keys() == {'ours, captured', 'ours, eager', *theirs}
            assert all(result['error'] <= 1 for result in cell['results'].values())
    assert all(cell['facts']["PyG's loader / ours"] > 0 for cell in train['cells'])
    (cell,) = making['cells']
    assert cell['results'].keys() == {'ours', 'ours, padded', 'PyG, no workers'}
    assert all(result['error'] == 0 for result in cell['results'].values())


def test_precisions_of_molecules(harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All contenders of a cell compute in one of them."""
    from benchmarks import molecules

    make, seen = molecules.Training.make, set()

    def noting(case, name):
        seen.add((case.tolerance, torch.get_float32_matmul_precision(), name))
        return make(case, name)

    monkeypatch.setattr(molecules.Training, 'make', noting)
    options = '--eager-only', '--models', 'gin', '--parts', 'train', '--batches', '2'
    report, markdown, _ = run('molecules', tmp_path, *options, '--precisions', 'highest,high')
    check_report(report, markdown)
    titles = [section['title'] for section in report['sections']]
    assert titles == ['A training step', 'A training step, high']
    first, _ = report['sections']
    names = first['cells'][0]['results'].keys()
    assert seen == {
        (molecules._FIRST[precision], precision, name)
        for precision in ('highest', 'high') for name in names
    }  # fmt: skip
    assert torch.get_float32_matmul_precision() == 'highest'


def test_the_first_epoch_of_molecules(
    harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import _molecules, molecules

    monkeypatch.setattr(Direct, 'pads', True)  # As on a GPU, where sizes are counted.
    capture, folders = molecules.pyg_fast.capture, []
    monkeypatch.setattr(
        molecules.pyg_fast, 'capture', lambda *args, compile, **more: capture(*args, **more)
    )

    precisions = []

    def in_this_process(command, env, **_):
        folders.append(Path(env['TORCHINDUCTOR_CACHE_DIR']).parent)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            _molecules.main(command[4:])
        precisions.append(torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision('highest')
        return SimpleNamespace(returncode=0, stdout=out.getvalue())

    monkeypatch.setattr(molecules, 'subprocess', SimpleNamespace(run=in_this_process, PIPE=None))
    report, markdown, _ = run(
        'molecules', tmp_path, '--parts', 'first', '--models', 'gin', '--precisions', 'high'
    )
    (section,) = report['sections']
    assert section['title'] == 'The first epoch, compiled, high'
    assert precisions == ['high', 'high']
    (cell,) = section['cells']
    assert not cell['results']
    assert cell['facts'][molecules.COLD] > 0
    assert cell['facts'][molecules.WARM] > 0
    assert 1 <= cell['facts']['sizes'] <= 6
    assert folders[0] == folders[1]
    assert not folders[0].exists()


def test_models_of_molecules(harness, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import _molecules, molecules

    made, right = [], torch.compile

    def traced(model=None, **options):  # and not translated into C++
        if options != {'dynamic': True}:  # of ours
            return right(model, **options)
        made.append(model)
        return right(model, backend='eager', dynamic=True)

    monkeypatch.setattr(torch, 'compile', traced)
    args = SimpleNamespace(width=20, depth=1, workers=(0,))
    bench = SimpleNamespace(args=args, device=torch.device('cpu'), cuda=False)
    for name, kind in _molecules.KINDS.items():
        graphs = _molecules.molecules(8, kind.positions)
        model = molecules.Model(kind, bench, graphs)
        for size in (2, 4):
            case = molecules.Training(model, graphs, size, bench, 'highest')
            for which in (molecules.EAGER, *[molecules.COMPILED] * (name == 'gin')):
                losses = case.make(which)()
                assert case.check(losses) <= 1, (name, which)
            assert case.check(1.01 * losses) > 1
    assert len(made) == 1  # for both sizes


@pytest.mark.parametrize('change', ['', 'x', 'y', 'edge_attr', 'edge_index', 'batch'])
def test_batches_of_molecules_are_compared(harness, change: str) -> None:
    from benchmarks import _molecules, molecules

    graphs = _molecules.molecules(8)
    device = torch.device('cpu')
    right = molecules.last_of(molecules.PyGLoader(graphs, 4, 0, device))
    batch = molecules.last_of(_molecules.our_loader(graphs, 4, device, 'buckets'))
    if change:
        value = batch[change].clone()
        value.view(-1)[0] += 1
        batch[change] = value
    assert (molecules.batch_error(right, batch) > 1) == bool(change)


@pytest.mark.optional
def test_more_hubs(tmp_path: Path) -> None:
    report, markdown, _ = run('hubs', tmp_path, '--parts', 'layers,hetero,widths')
    check_report(report, markdown)
    layers, types, widths = report['sections']
    assert [cell['graph'] for cell in layers['cells']] == ['own sum', 'SAGE max', 'GATv2 8 x 8'] * 2
    assert [cell['graph'] for cell in types['cells']] == ['SAGE 64', 'GATv2 4 x 16'] * 2
    assert len(widths['cells']) == 5
    for cell in widths['cells']:
        assert cell['results'].keys() == {'ours', 'ours, multiple of 4'}


def test_goals_of_hubs(harness) -> None:
    from benchmarks import hubs

    verdict = hubs.Verdict()

    def cell(plain: float, prepared: float, pyg: float | None) -> dict:
        times = {hubs.PLAIN: plain, hubs.PREPARED: prepared, hubs.PYG: pyg}
        return verdict('GCN', {name: harness.Result(median_ms=ms) for name, ms in times.items()})

    assert cell(2.0, 1.0, 2.5)['goal'] == 'holds'
    assert cell(2.5, 1.3, 2.5) == {
        'ours, edge_index / h = 0': 1.25,
        'ours, prepared / h = 0': 1.3,
        'goal': 'holds',
    }
    assert cell(2.7, 1.0, 5.0)['goal'] == 'fails'
    assert cell(2.0, 1.4, 5.0)['goal'] == 'fails'
    assert cell(2.0, 1.0, 1.9)['goal'] == 'fails'
    assert cell(2.0, 1.0, None)['goal'] == 'holds'
    assert verdict.held == [True, True, False, False, False, True]


@pytest.mark.parametrize('name', ['sum, weights', 'mean', 'GAT', 'GATv2'])
def test_errors_of_sums(harness, name: str) -> None:
    from benchmarks import hubs

    for place in hubs.PLACES:
        terms = hubs.Terms(hubs.SUMS[name], place, 800, torch.device('cpu'))
        if place != '1,000 nodes':
            src, dst = terms.edge_index.unbind()
            assert not bool((dst if place == 'one row' else src).any())
        for which in (hubs.PLAIN, hubs.PREPARED, hubs.PYG):
            assert 0 < terms.error(which) < 5e-6
        for magnitude, value in zip(terms._in_double(True), terms._in_double(False), strict=True):
            assert (magnitude >= value.abs() * (1 - 1e-12)).all()
    right = hubs.SUMS[name].ours
    for wrong in (
        lambda *args, **given: right(*args, **given) * (1 + 1e-5),
        lambda *args, **given: right(
            *args,
            **{key: value * (1 + 1e-5) - value.detach() * 1e-5 for key, value in given.items()},
        ),
    ):
        terms.sums = hubs.SUMS[name]._replace(ours=wrong)
        assert terms.error(hubs.PLAIN) > 5e-6


def test_a_tree_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process measures the same cells; here before this one does."""
    from benchmarks import _turns, hubs

    class Process:
        def __init__(self, command: list[str], **_) -> None:
            assert command[1:5] == [_turns.__file__, str(ROOT), 'hubs', '--quick']
            self.stdin, answers = io.StringIO(), io.StringIO()
            with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
                patch.setattr('sys.stdin', io.StringIO('\n' * 9))
                patch.setattr('sys.stdout', answers)
                hubs.main(command[4:])
            self.stdout = io.StringIO(answers.getvalue())

        def communicate(self) -> None:
            assert self.stdout.read() == ''

    monkeypatch.setattr(_turns, 'Popen', Process)
    report, markdown, _ = run(
        'hubs', tmp_path, '--parts', 'layers', '--layers', 'SAGE max', '--before', str(ROOT)
    )
    # The commit, or without one the folder's name, not where it lies.
    assert re.fullmatch(f'[0-9a-f]{{40}}|{re.escape(ROOT.name)}', report['arguments']['before'])
    check_report(report, markdown)
    (section,) = report['sections']
    for cell in section['cells']:
        assert list(cell['results']) == [
            'ours, edge_index',
            'before, ours, edge_index',
            'ours, prepared',
            'before, ours, prepared',
            'PyG',
        ]
        assert cell['results']['before, ours, prepared']['error'] is None
    rows = [(row['ours'], row['rival']) for row in section['summary']]
    assert ('ours, prepared', 'before, ours, prepared') in rows
    monkeypatch.undo()
    ended = _forks.run(_turns.__file__, str(tmp_path), 'hubs', '--in-turns')
    assert f'{tmp_path} has no pyg_fast' in ended.stderr


def test_facts_of_a_tree(harness, tmp_path: Path) -> None:
    from benchmarks import _turns

    class Measured(_turns.Before):
        def cell(self, *key: object) -> dict:
            return lines[0]

    answers = io.StringIO()
    turns = _turns.Turns(io.StringIO('\n\n'), answers)
    with contextlib.suppress(SystemExit):
        turns.say(('title', 'a', 8), {}, {'ours': 1.0})
        turns.say(('title', 'b', 8), {}, {})
        raise AssertionError('the second turn never came')
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert lines[0] == {'key': ['title', 'a', 8], 'results': {}, 'facts': {'ours': 1.0}}
    assert len(lines) == 2
    bench = harness.Bench('hubs', '', ['--device', 'cpu', '--out', str(tmp_path)])
    bench.before = object.__new__(Measured)
    bench.add('title', 'a', 8, {}, facts={'ours': 2.0, 'PyG': 3.0})
    assert bench.report.sections[0].cells[0].facts == {'ours': 2.0, 'before, ours': 1.0, 'PyG': 3.0}
    before = object.__new__(_turns.Before)
    before.tree, before.process = (
        tmp_path,
        subprocess.Popen(
            [sys.executable, '-c', 'print(input() + \'{"key": ["title", "b", 8]}\')'],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ),
    )
    with pytest.raises(SystemExit, match="measured .*'b', 8.*, expected .*'a', 8"):
        before.cell('title', 'a', 8)
    before.end()


def test_paths(tmp_path: Path) -> None:
    report, markdown, _ = run('paths', tmp_path)
    check_report({**report, 'sections': report['sections'][:-1]}, markdown)
    titles = [section['title'].split(',')[0] for section in report['sections']]
    assert titles == [
        'Backward aggregation of the last layer',
        'Backward aggregation of the layer below',
        '2-layer GCN',
        '2-layer GCN',
        'GCN',
        'Preparing the paths of 2 layers beside a step of training',
        'Group sizes',
        'Test accuracy of a GCN',
    ]
    scores = report['sections'].pop()['cells'][0]['facts']
    assert scores['path, %'] == scores['all active, %'] > 0
    assert scores['path, loss'] == pytest.approx(scores['all active, loss'], rel=1e-4)
    for section in report['sections'][:-2]:
        for cell in section['cells']:
            assert all(result['error'] <= 1 for result in cell['results'].values())


def test_aggregate(tmp_path: Path, limits: Callable[..., None]) -> None:
    limits(random_graphs=((300, 1_000), (500, 2_000)))
    report, markdown, _ = run('aggregate', tmp_path)
    check_report(report, markdown)
    (section,) = report['sections']
    assert len(section['cells']) == 4
    for cell in section['cells']:
        assert {'scatter', 'reduce', 'auto', 'PyG ops'} == cell['results'].keys()
        assert all(result['error'] <= 1 for result in cell['results'].values())


def test_reorder(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'reorder', tmp_path, '--graphs', 'tiny,small', '--widths', '5,8', '--edges', '1000'
    )
    check_report(report, markdown)
    *sorts, sums, costs = report['sections']
    assert [section['title'] for section in sorts] == [
        'Sorting edges into CSR',
        'Preparing a graph, CSR and CSC',
        'Normalized weights of GCN',
    ]
    scipy = importlib.util.find_spec('scipy')
    methods = {'rabbit', 'degree', *(['rcm'] if scipy else [])}
    assert ('SciPy' in report['left_out'].get('rcm', '')) == (scipy is None)
    assert [(cell['graph'], cell['width']) for cell in sums['cells']] == [
        ('tiny', 5),
        ('tiny', 8),
        ('small', 5),
        ('small', 8),
    ]
    for cell in sums['cells']:
        assert cell['results'].keys() == methods | {'as is'}
        assert all(result['error'] <= 1 for result in cell['results'].values())
    assert [cell['results'].keys() for cell in costs['cells']] == [methods | {'ToCSR'}] * 2
    (places,) = (note for note in report['notes'] if note.startswith('small: '))
    gap = {name: float(gap) for name, gap in re.findall(r'([a-z ]+) (0\.\d+), 0\.\d+', places)}
    assert gap.keys() == {' as is', *(f' {method}' for method in methods)}
    assert min(gap, key=gap.get) == ' rabbit'
    assert max(gap, key=gap.get) == ' as is'


def test_reorder_notices_another_graph(harness) -> None:
    from benchmarks import _graphs, reorder
    from benchmarks.spmm import Case

    graph = _graphs.load('tiny', torch.device('cpu'))
    contender, _ = reorder.costs(graph, ['rabbit'])
    out = contender.make()()
    assert contender.check(out) <= 1
    out.perm_index = out.perm_index.roll(1)
    assert not contender.check(out) <= 1
    case = Case(graph, torch.float32, 4)
    data = Data(x=case.x, edge_index=graph.prepared, edge_weight=case.weight)
    out = reorder.Reorder('rabbit')(data)
    for shift in (0, 1):
        out.inverse_index = out.inverse_index.roll(shift)
        (contender,) = reorder.contenders(case, {'rabbit': out}, 4)
        assert (contender.check(contender.make()()) <= 1) == (shift == 0)


@pytest.mark.optional
def test_spmm(tmp_path: Path) -> None:
    report, markdown, log = run(
        'spmm',
        tmp_path,
        '--graphs',
        'tiny,ddi',
        '--widths',
        '8',
        '--reduce',
        'sum,max',
        '--backward',
        '--dtypes',
        'float32,float64',
    )
    check_report(report, markdown)
    assert report['left_out'] == {'ddi': 'PYG_FAST_DATA is not set'}
    assert 'Left out: ddi' in markdown
    assert report['graphs']['tiny']['nodes'] == 300
    sections = {section['title']: section for section in report['sections']}
    assert len(sections) == 12  # four of sums, two of maxima
    cell = sections['sum, forward, float32']['cells'][0]
    assert {'ours', 'ours, unweighted', 'torch.sparse', 'PyG scatter'} <= cell['results'].keys()
    assert all(result['error'] <= 1 for result in cell['results'].values())
    rivals = {k: r['median_ms'] for k, r in cell['results'].items() if 'ours' not in k}
    best = sections['sum, forward, float32']['summary'][0]
    assert best['rival'] == 'the best'
    assert math.isclose(
        best['geometric_mean'],
        min(rivals.values()) / cell['results']['ours']['median_ms'],
        rel_tol=1e-4,
    )
    assert best['worst'] == {
        'ratio': pytest.approx(best['geometric_mean']),
        'graph': 'tiny',
        'width': 8,
    }


@pytest.mark.optional
def test_maxk(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'maxk',
        tmp_path,
        '--graphs',
        'tiny',
        '--widths',
        '12',
        '--k',
        '2,12,16',
        '--select-widths',
        '16,300',
        '--dtypes',
        'float32,float64',
        '--models',
        'sage,gcn,gin',
        '--training-k',
        '2,4',
        '--hidden',
        '8',
        '--layers',
        '2',
    )
    check_report(report, markdown)
    sections = {section['title']: section for section in report['sections']}
    assert list(sections) == [
        *(
            f'Aggregation at F=12, {mode}, {dtype}'
            for dtype in ('float32', 'float64')
            for mode in ('forward', 'gradient of the values')
        ),
        *(
            f'Selection at F={width}, {dtype}'
            for dtype in ('float32', 'float64')
            for width in (16, 300)
        ),
        *(f'Training step, {model}, 2 layers, hidden 8' for model in ('sage', 'gcn', 'gin')),
    ]
    for title, section in sections.items():
        assert [cell['width'] for cell in section['cells']] == (
            [2, 12] if 'F=12' in title else [2, 12, 16] if 'F=' in title else [2, 4]
        )
        for cell in section['cells']:
            for name, result in cell['results'].items():
                assert (
                    name == 'copy of as many bytes'
                    or 'aggregations' in name
                    or (result['error'] <= 1)
                )
    forward = sections['Aggregation at F=12, forward, float32']
    ours = {'ours', 'ours, unweighted', 'ours, balanced', 'ours, as dense'}
    of_all_columns = {'ours, spmm', 'torch.sparse', 'torch.sparse int64'}
    few, many = (cell['results'] for cell in forward['cells'])
    assert few.keys() == many.keys() == ours | of_all_columns
    assert all(few[name] == many[name] for name in of_all_columns)  # measured once
    assert all(few[name] != many[name] for name in ours)
    best = forward['summary'][0]
    assert math.isclose(
        best['by_width']['2'],
        min(few[name]['median_ms'] for name in of_all_columns - {'ours, spmm'})
        / few['ours']['median_ms'],
        rel_tol=1e-4,
    )
    gradient = sections['Aggregation at F=12, gradient of the values, float64']
    assert 'ours, deterministic' in gradient['cells'][0]['results']
    selection = sections['Selection at F=300, float32']['cells'][0]['results']
    assert selection.keys() == {'ours', 'ours, balanced', 'torch.topk', 'copy of as many bytes'}
    training = sections['Training step, sage, 2 layers, hidden 8']['cells'][0]['results']
    assert {
        'ours, MaxK',
        'ours, MaxK balanced',
        'ours, ReLU',
        'PyG edge_index',
        'PyG torch CSR',
    } <= training.keys()
    share = (
        training['aggregations of ours, ReLU']['median_ms'] / (training['ours, ReLU']['median_ms'])
    )
    assert f'tiny, sage: aggregations take {share:.0%} of the step' in markdown
    assert 'Amdahl' in markdown


def test_sampled(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'sampled',
        tmp_path,
        '--graphs',
        'tiny',
        '--widths',
        '12',
        '--samples',
        '3,8',
        '--dtypes',
        'float32,float64,int8',
        '--channels',
        '9',
        '--hidden',
        '8',
        '--model-samples',
        '4',
    )
    check_report(report, markdown)
    sections = {section['title']: section for section in report['sections']}
    assert list(sections) == [
        *(
            f'Aggregation at F=12, {rest}'
            for rest in ('float32', 'float64', 'int8', 'forward + backward, float32')
        ),
        *(
            f'{what}, 9 to 8 to 41, float32'
            for what in (
                'Training step of a GCN',
                'Inference of a GCN, its aggregations alone',
                'Inference of a GCN',
            )
        ),
    ]
    strategies = {'fastrand', 'adaptive', 'bucket', 'unbiased', 'paper'}
    full = {'in full', 'torch.sparse', 'torch.sparse int64'}
    kernels = sections['Aggregation at F=12, float32']
    few, many = (cell['results'] for cell in kernels['cells'])
    of_sample = {'making the sample', *(f'given the sample: {name}' for name in full)}
    assert few.keys() == many.keys() == (strategies | full | of_sample | {'fastrand, unweighted'})
    assert all(few[name] == many[name] for name in full)  # measured once
    assert all(few[name] != many[name] for name in few.keys() - full)
    int8 = sections['Aggregation at F=12, int8']['cells'][0]['results']
    assert int8.keys() == strategies | {
        'in full',
        'fastrand, unweighted',
        'fastrand, rounding included',
    }
    for title in list(sections)[3:]:
        widths = [3, 8] if title.startswith('Aggregation') else [4]
        assert [cell['width'] for cell in sections[title]['cells']] == widths
        for cell in sections[title]['cells']:
            more = {'fastrand, int8'} if 'Inference' in title else set()
            more |= {'PyG GCNConv'} if title.startswith('Inference of a GCN, 9') else set()
            assert cell['results'].keys() == strategies | {'in full'} | more
    for section in report['sections']:
        for cell in section['cells']:
            assert all(result['error'] <= 1 for result in cell['results'].values())
    row = next(row for row in kernels['summary'] if row['rival'] == 'in full')
    assert row['by_width']['3'] == pytest.approx(
        few['in full']['median_ms'] / few['fastrand']['median_ms'], rel=1e-4
    )
    assert re.search(r'tiny keeps \d+\.\d% of its edges at S=3 .*, \d+\.\d% of .* S=8', markdown)


def test_gat(tmp_path: Path) -> None:
    report, markdown, _ = run(
        'gat', tmp_path, '--graphs', 'tiny', '--configs', '2x4,3x5', '--dtypes', 'float32,bfloat16'
    )
    check_report(report, markdown)
    sections = {section['title']: section for section in report['sections']}
    assert list(sections) == [
        f'ops.{model}, {mode}, {dtype}'
        for model, modes in (
            ('gat', ('forward', 'backward')),
            ('gatv2', ('forward', 'forward + backward')),
        )
        for dtype in ('float32', 'bfloat16')
        for mode in modes
    ]
    forward, backward = (sections[f'ops.gat, {mode}, float32'] for mode in ('forward', 'backward'))
    for section in (forward, backward):
        assert [(cell['graph'], cell['width']) for cell in section['cells']] == [
            ('tiny, 2 x 4', 8),
            ('tiny, 3 x 5', 15),
        ]
    assert forward['cells'][0]['results'].keys() == {
        'ours, inference',
        'ours, training',
        'ours, training, dropout 0.6',
        'PyG ops',
    }
    assert backward['cells'][0]['results'].keys() == {'ours', 'ours, dropout 0.6', 'PyG ops'}
    for title, section in sections.items():
        for cell in section['cells']:
            for name, result in cell['results'].items():
                assert result['error'] <= 1 or (name == 'PyG ops' and 'bfloat16' in title)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import _harness

    return _harness


@pytest.mark.parametrize(
    'args', [('--graphs', 'karate'), ('--widths', '0'), ('--dtypes', 'int8'), ('--reduce', 'min')]
)
def test_arguments_are_checked(harness, args, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import spmm

    with pytest.raises(SystemExit):
        spmm.main(['--device', 'cpu', *args])
    assert args[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    'args', [('--k', '0'), ('--widths', 'wide'), ('--models', 'sage,gat'), ('--dtypes', 'int8')]
)
def test_arguments_of_maxk_are_checked(harness, args, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import maxk

    with pytest.raises(SystemExit):
        maxk.main(['--device', 'cpu', *args])
    assert args[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    'args', [('--configs', '8x0'), ('--configs', '8'), ('--models', 'gcn'), ('--dtypes', 'int8')]
)
def test_arguments_of_gat_are_checked(harness, args, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import gat

    with pytest.raises(SystemExit):
        gat.main(['--device', 'cpu', *args])
    assert args[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    'args',
    [('--samples', '0'), ('--widths', 'wide'), ('--dtypes', 'int4'), ('--model-samples', '-1')],
)
def test_arguments_of_sampled_are_checked(harness, args, capsys: pytest.CaptureFixture) -> None:
    from benchmarks import sampled

    with pytest.raises(SystemExit):
        sampled.main(['--device', 'cpu', *args])
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


@pytest.fixture
def maxk_case(harness):
    from benchmarks import _graphs, maxk

    graph = _graphs.load('tiny', torch.device('cpu'))
    return maxk.Case(graph, torch.float32, 12)


def test_maxk_compares_aggregations(maxk_case) -> None:
    from benchmarks import maxk

    case, cbsr = maxk_case, maxk_case.largest(4)
    right = maxk.ops.cbsr_spmm(case.graph.prepared, cbsr, case.weight)
    assert case.error(right, cbsr, case.weight) <= 1
    assert case.error(right, cbsr, case.ones) > 1
    assert case.error(right, case.largest(4, balanced=True), case.weight) > 1
    assert case.error(right[:, :3], cbsr, case.weight) == math.inf
    for row, column in ((int(case.graph.degree.argmax()), 2), (299, 11)):
        for slip in (1e-3, math.nan):
            wrong = right.clone()
            wrong[row, column] += slip
            assert not case.error(wrong, cbsr, case.weight) <= 1
    grad = maxk.gradients(case, 4)
    assert [contender.name for contender in grad] == [
        'ours',
        'ours, deterministic',
        'ours, balanced',
        'ours, as dense',
    ]
    for contender in grad:
        out = contender.make()()
        assert contender.check(out) <= 1
        out[200, 3] += 1e-3
        assert contender.check(out) > 1


@pytest.mark.parametrize('balanced', [False, True])
def test_maxk_compares_selections(harness, balanced: bool) -> None:
    from benchmarks import maxk

    selection = maxk.Selection(50, 20, torch.float32, torch.device('cpu'))
    selection.x[7] = 1
    x = selection.x
    values, columns = maxk.kernels.maxk(x, 5, balanced)
    order = torch.randperm(5)
    assert selection.error((values[:, order], columns[:, order]), 5, balanced) == 0
    assert selection.error((values, columns), 5, not balanced) > 1
    assert selection.error((values[:, :4], columns[:, :4]), 5, balanced) > 1
    assert selection.error((values, columns.roll(1, 1)), 5, balanced) > 1
    other = columns.clone()
    other[7, int(columns[7].argmax())] = 19  # as large, but not the lowest column
    assert selection.error((x.gather(1, other.long()), other), 5, balanced) > 1
    top = x.topk(5)[0]
    assert selection.value_error(top, 5) == 0
    top[49, 2] += 1e-6
    assert selection.value_error(top, 5) > 1


@pytest.mark.parametrize('model', ['sage', 'gcn', 'gin'])
def test_maxk_compares_training(harness, model: str) -> None:
    from benchmarks import _graphs, maxk

    graph = _graphs.load('tiny', torch.device('cpu'))
    training = maxk.Training(graph, model, hidden=8, num_layers=2)
    for net, *which in (
        (training.relu(), None, False),
        (training.maxk(3), 3, False),
        (training.maxk(3, balanced=True), 3, True),
    ):
        outputs = training.step(net, training.graph.prepared)()
        assert len(outputs) == 1 + len(list(net.parameters()))
        assert training.error(outputs, *which) <= 1
        assert training.error(outputs, 3, not which[1]) > 1
        assert training.error(outputs, 5) > 1
        for wrong in (1.05 * outputs[3], outputs[3] + math.nan):
            assert not training.error([*outputs[:3], wrong, *outputs[4:]], *which) <= 1


@pytest.fixture
def sampled_case(harness):
    from benchmarks import _graphs, sampled

    return sampled.Case(_graphs.load('tiny', torch.device('cpu')), 'float32', 12)


def test_sampled_notices_other_edges(harness, sampled_case) -> None:
    from benchmarks import sampled

    graph = sampled_case.graph
    samplings = {name: sampled.drawn(3, name, graph.col.device) for name in sampled.STRATEGIES}
    for name, sampling in samplings.items():
        made = sampled.sampled_graph(sampled_case.graph.structure, sampling)
        taken = sampled.Taken(graph, sampling, made)
        assert taken.edges.numel() == int(graph.degree.clamp(max=3).sum())
        for other in samplings.values():
            if other is not sampling:
                with pytest.raises(harness.Incorrect, match='took other edges'):
                    sampled.Taken(graph, other, made)
        unbiased = bool((taken.factor == (graph.degree.double() / 3).clamp(min=1)).all())
        assert unbiased == (name == 'unbiased')
        wrong = made._replace(col=made.col.flip(0))
        with pytest.raises(harness.Incorrect, match='took other edges'):
            sampled.Taken(graph, sampling, wrong)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'int8'])
def test_sampled_compares_aggregations(harness, dtype: str) -> None:
    from benchmarks import _graphs, sampled

    case = sampled.Case(_graphs.load('tiny', torch.device('cpu')), dtype, 12)
    contenders = sampled.sampling_contenders(case, 3) + sampled.full_contenders(case)
    outputs = {}
    for contender in contenders:
        try:
            outputs[contender.name] = out = contender.make()()
        except NotImplementedError:  # of bfloat16 by torch.sparse
            assert not contender.ours
            continue
        assert contender.check(out) <= 1, contender.name
        if contender.name == 'making the sample':
            out[1][5] += 1
            assert contender.check(out) > 1
            continue
        for row, slip in ((0, 0.1), (299, 0.1), (150, math.nan)):
            wrong = out.clone()
            wrong[row, 11] += slip
            assert not contender.check(wrong) <= 1, contender.name
    checks = {contender.name: contender.check for contender in contenders}
    for name in sampled.STRATEGIES:  # Of each of them other edges are right.
        for other in (*sampled.STRATEGIES, 'fastrand, unweighted', 'in full'):
            if other != name:
                assert checks[name](outputs[other]) > 1
    if dtype == 'int8':
        exact = sampled.Case(case.graph, 'float32', 12)
        assert checks['fastrand'](exact.run(sampled.Sampling(3), exact.weight)) > 1


@pytest.mark.parametrize('what', ['inference', 'aggregations', 'step'])
def test_sampled_compares_models(harness, what: str) -> None:
    from benchmarks import _graphs, sampled

    model = sampled.Model(_graphs.load('tiny', torch.device('cpu')), 9, 8)
    names = (*sampled.STRATEGIES, 'in full', *(['fastrand, int8'] if what != 'step' else []))
    contenders = model.contenders(what, 4, names)
    outputs = {contender.name: contender.make()() for contender in contenders}
    for contender in contenders:
        assert contender.check(outputs[contender.name]) <= 1
        for name, other in outputs.items():
            # What is not rounded passes for what is, but not the other way round.
            if name not in (contender.name, contender.name.removesuffix(', int8')):
                assert contender.check(other) > 1, (contender.name, name)
        for place, t in enumerate(outputs[contender.name]):
            for slip in (t.norm() * 0.1, math.nan):
                wrong = t.clone()
                wrong.view(-1)[-1] += slip
                changed = list(outputs[contender.name])
                changed[place] = wrong
                assert not contender.check(changed) <= 1, (contender.name, place)


@pytest.mark.parametrize('model', ['gat', 'gatv2'])
def test_gat_compares_kernels(harness, limits: Callable[..., None], model: str) -> None:
    from benchmarks import _graphs, gat

    graph = _graphs.load('tiny', torch.device('cpu'))
    case = gat.CASES[model](graph, torch.float32, 2, 5)
    dropouts = 0.0, gat.DROPOUT
    by_pyg = [case.truth(dropout) for dropout in dropouts]
    for dropout in dropouts:
        outputs = case.work(case.ours, gat.STEP, dropout)()
        assert case.check(outputs, gat.STEP, dropout) <= 1
        assert case.check(outputs, gat.STEP, gat.DROPOUT - dropout) > 1
        for place, t in enumerate(outputs):
            for slip in (1e-2 * float(t.abs().max()), math.nan):
                wrong = t.clone()
                wrong.view(-1)[3] += slip
                changed = [*outputs[:place], wrong, *outputs[place + 1 :]]
                assert not case.check(changed, gat.STEP, dropout) <= 1, (place, slip)
        for mode, part in ((gat.FORWARD, outputs[:1]), (gat.BACKWARD, outputs[1:])):
            assert all(map(torch.equal, case.work(case.ours, mode, dropout)(), part))
    limits(bytes_of_pygs_messages=0)  # Our kernel in float64 is the reference then.
    for dropout, expected in zip(dropouts, by_pyg, strict=True):
        del case._truth[dropout]
        assert case.error(case.truth(dropout), expected) < 1e-6


@pytest.mark.parametrize(
    'name', ['GCN', 'SAGE mean', 'SAGE max', 'GIN', 'GAT 8 heads', 'GATv2 1 head']
)
def test_layers_are_compared(harness, limits: Callable[..., None], name: str) -> None:
    from benchmarks import _graphs, layers

    graph = _graphs.load('tiny', torch.device('cpu')).without_loops()
    kind = layers.KINDS[name]
    case = layers.Case(kind, graph, 8, 7)
    assert case.by_pyg
    for which in kind.contenders(cuda=False):
        if 'compile' in which:
            continue
        outputs = case.step(which)()
        assert case.check(outputs) <= 1
        for place, t in enumerate(outputs[: 1 if kind.tolerance is None else None]):
            for slip in (t.norm() * 3e-3, math.nan):
                wrong = t.clone()
                wrong.view(-1)[-1] += slip
                assert not case.check([*outputs[:place], wrong, *outputs[place + 1 :]]) <= 1
    limits(bytes_of_pygs_messages=0)
    ours = layers.Case(kind, graph, 8, 7)
    assert not ours.by_pyg
    ours.state = case.state
    assert case.check(ours.expected) <= 1e-3


class FakeSpMM:
    """What cuSPARSE does, into one and the same tensor."""

    def __init__(self, rowptr, col, value, x, algorithm: str, preprocess: bool) -> None:
        assert algorithm in ('ALG1', 'ALG2', 'ALG3')
        assert preprocess
        size = (rowptr.numel() - 1, x.size(0))
        self.matrix = torch.sparse_csr_tensor(rowptr, col, value, size)
        self.x, self.out = x, x.new_empty(size[0], x.size(1))

    def __call__(self):
        return self.out.copy_(self.matrix @ self.x)


@pytest.mark.parametrize('name', ['GCN', 'GAT 8 heads'])
def test_models_train_the_same_way(harness, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from benchmarks import _cusparse, _graphs, layers

    monkeypatch.setattr(_cusparse, 'SpMM', FakeSpMM)
    graph = _graphs.load('tiny', torch.device('cpu')).without_loops()
    task = layers.Task(layers.KINDS[name], graph, layers.data_of(graph))
    names = [*layers.LAYERS, *[*layers.CACHED[:2], *layers.CUSPARSE] * (name == 'GCN')]
    for which in names:
        assert task.error(which, fresh=which == layers.PLAIN) <= 1, which
        assert task.training(which)().isfinite()
        assert task.check(task.layers(which)()) <= 1
    assert task.reference == ('PyG torch CSR' if name == 'GCN' else 'PyG')
    assert task.expected_losses.numel() == 3
    task.state['conv1.bias'] += 0.1
    assert task.error(layers.PREPARED) > 1


def test_launches_are_shown(
    harness,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from benchmarks import layers

    counts = iter([10, 20, 50, 8, 9, None])

    def launches(_):
        count = next(counts)
        if count is None:
            raise torch.cuda.OutOfMemoryError
        return count

    monkeypatch.setattr(layers, 'launches', launches)
    bench = harness.Bench(
        'layers',
        '',
        ['--device', 'cpu', '--out', str(tmp_path)],
        widths=harness.Option((8,)),
        model_graphs=harness.Option(()),
    )
    layers.run_launches(bench, ['GCN', 'GAT 8 heads'], ['tiny'])
    assert bench.report.markdown().splitlines()[-2:] == [
        '| tiny: GCN | 8 | 10 | 20 | 50 | 5 | 2.5 |',
        '| tiny: GAT 8 heads | 8 | 8 | 9 | – | – | – |',
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
def test_launches_are_counted(harness) -> None:
    from benchmarks import layers

    x = torch.ones(1000, device='cuda')
    assert layers.launches(lambda: x.clone().sin().cos()) == 2  # the copy is none


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
        'title',
        columns={'ours': ['ours'], 'rival': ['rival 1', 'rival 2']},
        versus=[harness.Versus('rival', 'ours', ['rival 1', 'rival 2'])],
    )
    for graph, width, first, second in (('a', 16, 8.0, 9.0), ('b', 16, 9.0, 2.0), ('b', 64, 1, 4)):
        section.cells.append(
            harness.Cell(
                graph,
                width,
                {
                    'ours': harness.Result(1.0, 1.0, 1.0, 3),
                    'rival 1': harness.Result(first, first, first, 3),
                    'rival 2': harness.Result(second, second, second, 3),
                },
            )
        )
    (summary,) = section.summary()
    assert summary['cells'] == 3
    assert math.isclose(summary['geometric_mean'], 16 ** (1 / 3))
    assert summary['by_width'] == {'16': pytest.approx(4), '64': pytest.approx(1)}
    assert summary['worst'] == {'ratio': 1.0, 'graph': 'b', 'width': 64}
    assert '| b | 16 | 1.00 | 2.00 (2) | rival 2 | 2.00 |' in section.markdown()


def measured_graphs(harness, path: Path) -> list[dict]:
    """What --measure writes, of times made up: an edge costs time, and so do each partial sum and
    the longest group."""
    from benchmarks import group_sizes as bench

    graphs = []
    for skew in ('even', 'graph500', 'strong'):
        for scale, degree in ((6, 4), (6, 16), (8, 4), (8, 16), (9, 8), (10, 4)):
            edges = bench.rmat(scale, degree, bench.SKEWS[skew], torch.device('cpu'), seed=scale)
            graph = bench.graph_of(edges, 1 << scale, 1 << scale, transpose=False)
            degrees = bench.Degrees.of(graph.rowptr)
            sizes = [s for s in bench.SIZES if s < 2 * degrees.largest]
            times = {str(s): degrees.num_edges * (1 + 3 / s) + 20.0 * s for s in sizes}
            graphs.append(
                {
                    'name': f'{skew} {scale} {degree}',
                    'base': f'{skew} {scale} {degree}',
                    'degrees': degrees._asdict(),
                    'ms': {'64': {'none': 1.0, **times}},
                }
            )
    environment = {'device': 'made up', 'torch': '0', 'commit': 'none'}
    path.write_text(json.dumps({'environment': environment, 'graphs': graphs}))
    return graphs


def test_group_sizes_are_fitted(
    harness,
    limits: Callable[..., None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    from benchmarks import group_sizes as bench
    from pyg_fast.transforms import group_sizes

    limits(fitted_group_sizes=())  # restored afterwards
    file = tmp_path / 'measured.json'
    measured_graphs(harness, file)
    bench.main(['--fit', str(file)])
    assert len(group_sizes._FITTED) == 6
    markdown = file.with_suffix('.md').read_text()
    assert markdown in capsys.readouterr().out
    rows = [line.split(' | ') for line in markdown.splitlines()]
    shares = {row[0].strip('| '): row[1] for row in rows if len(row) == 4}
    fitted, paper = (int(shares[f'regression, {how}'].rstrip('%')) for how in ('fitted', 'paper'))
    assert fitted >= 80 > paper


def test_group_sizes_between_those_measured(harness, tmp_path: Path) -> None:
    from benchmarks import group_sizes as bench

    file = tmp_path / 'measured.json'
    graphs = measured_graphs(harness, file)
    _, cells = bench.read(file)
    assert {cell.is_held_out for cell in cells} == {False, True}
    cell = cells[0]._replace(
        times={'none': 1.0, '4': 8.0, '8': 4.0, '16': 16.0}, degrees=bench.Degrees(9, 40, 20, 0)
    )
    assert [cell.slowdown(size) for size in (1, 4, 8, 16, 20, 99)] == pytest.approx(
        [2, 2, 1, 4, 4, 4]
    )
    assert cell.slowdown(12) == pytest.approx(4 ** math.log2(1.5))
    assert [round(2**size) for _, size in cell.extremes] == [8, 16]
    assert bench.score([cell], lambda _: 8) == (1, 1, 1)
    assert bench.score([cell, cell], lambda _: 4) == pytest.approx((0, 2, 2))
    assert len(cells) == len(graphs)


@pytest.mark.parametrize('skew', ['even', 'graph500'])
def test_rmat(harness, skew: str) -> None:
    from benchmarks import group_sizes as bench

    edges, again = (
        bench.rmat(9, 16, bench.SKEWS[skew], torch.device('cpu'), seed=1) for _ in range(2)
    )
    assert torch.equal(edges, again)
    assert edges.unique(dim=1).size(1) == edges.size(1)
    assert int(edges.min()) >= 0
    assert 400 < int(edges.max()) < 512
    assert 0.6 * 16 * 512 < edges.size(1) <= 16 * 512
    largest = int(edges[1].bincount().max())
    assert largest < 40 if skew == 'even' else largest > 80


def test_rows_of_a_path(harness) -> None:
    from benchmarks import group_sizes as bench

    edges = torch.randint(200, (2, 3000))
    graph = bench.graph_of(edges, 200, 200)
    part = bench.some_rows(graph, 0.25)
    assert 20 < part.num_dst < 80
    lists = [
        graph.col[a:b].tolist() for a, b in zip(graph.rowptr[:-1], graph.rowptr[1:], strict=True)
    ]
    for a, b in zip(part.rowptr[:-1], part.rowptr[1:], strict=True):
        assert part.col[a:b].tolist() in lists
    assert part.rowptr[-1] == part.col.numel()


def test_group_sizes_are_measured_on_a_gpu(harness, tmp_path: Path) -> None:
    from benchmarks import group_sizes as bench

    file = tmp_path / 'measured.json'
    with pytest.raises(SystemExit, match='needs a GPU'):
        bench.main(['--measure', str(file), '--device', 'cpu'])
    if not torch.cuda.is_available():
        return
    bench.main(['--measure', str(file), '--quick'])
    report, cells = bench.read(file)
    assert report['environment']['device'] == torch.cuda.get_device_name()
    assert {cell.width for cell in cells} == set(bench.WIDTHS)
    assert all(ms > 0 for cell in cells for ms in cell.times.values())


@pytest.mark.parametrize('above', range(3))
def test_paths_below_the_last_layer(harness, above: int) -> None:
    from benchmarks import _graphs, paths

    problem = paths.Problem(_graphs.load('tiny', torch.device('cpu')), 0.01)
    src, dst = problem.edge_index.as_tensor().tolist()
    reached = set(problem.nodes.tolist())
    for _ in range(above):
        reached |= {u for u, v in zip(src, dst, strict=True) if v in reached}
    case = paths.Aggregation(problem, 5, above)
    assert set(case.active.nonzero().view(-1).tolist()) == reached
    assert case.check(case.on_path()()) <= 1


def test_smaller_graphs(harness) -> None:
    from benchmarks import _graphs

    device = torch.device('cpu')
    small = _graphs.load('arxiv-like', device, 20_000)
    assert small.name == 'arxiv-like 1/128'
    assert small.num_nodes == 169_343 // 128
    assert 0 < small.num_edges <= 20_000
    assert _graphs.load('arxiv-like', device, 40_000).name == 'arxiv-like 1/64'
    assert _graphs.load('tiny', device, 40_000).name == 'tiny'
