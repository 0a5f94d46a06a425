"""The example that trains on sampled batches: its options, what it trains, infers and reports."""

import importlib.util
import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import _forks
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import remove_self_loops

from pyg_fast.datasets import PlantedGraph
from pyg_fast.loader import FastNeighborLoader

SCRIPT = Path(__file__).parents[2] / 'examples' / 'fastgl_training.py'
QUICK = '--size tiny --hidden 16 --batch-size 40'
MODELS = ['gcn', 'sage', 'gin', 'gat']


@pytest.fixture(scope='module')
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location('fastgl_training_example', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script: it imports another one
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))
    del sys.modules[spec.name], sys.modules['node_classification']


@pytest.fixture(scope='module')
def tiny() -> Data:
    return PlantedGraph('tiny')[0]


def options(example: ModuleType, line: str, device: str = 'cpu') -> Namespace:
    return example.parse([*line.split(), '--device', str(device)])


def test_usual_options(example: ModuleType) -> None:
    args = options(example, '')
    assert (args.dataset, args.model, args.loader, args.layers) == (
        'planted',
        'gcn',
        'fast',
        'pyg_fast',
    )
    assert (args.fanout, args.batch_size) == ([15, 10, 5], 8000)  # the paper's, from the seeds on
    assert (args.match, args.reorder, args.window, args.cache_ratio) == (True, None, 8, 0)
    args = options(example, '--dataset CS --root data --fanout 5,-1 --no-match --reorder --lr 0')
    assert (args.fanout, args.match, args.reorder, args.lr) == ([5, -1], False, True, 0)
    assert (args.batch_size, args.epochs) == (512, 30)
    assert options(example, '--loader full').epochs == example.FULL_EPOCHS


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('--dataset CS', '--dataset CS needs --root, the folder to keep it in'),
        (
            '--fanout 5,0',
            "argument --fanout: got '5,0', expected a number of neighbours for each "
            'hop, or -1 for all',
        ),
        (
            '--fanout few',
            "argument --fanout: got 'few', expected a number of neighbours for each "
            'hop, or -1 for all',
        ),
        ('--cache-ratio 1.5', '--cache-ratio: got 1.5, expected at most 1'),
        ('--batch-size 0', 'argument --batch-size: got 0, expected at least 1'),
        ('--loader pyg --trim', '--trim needs --loader fast, got pyg'),
        ('--trim', '--trim is not for gcn, which needs the degrees of nodes that are cut off'),
        ('--json no/such/a.json', '--json no/such/a.json: no such folder'),
    ],
)
def test_bad_options(
    example: ModuleType, capsys: pytest.CaptureFixture, line: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(example, line)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f'error: {message}')


def test_nodes_have_one_part_each(example: ModuleType, tiny: Data) -> None:
    parts = example.nodes_of(tiny, seed=0)
    assert torch.equal(parts['val'], tiny.val_mask.nonzero().view(-1))
    bare = Data(x=tiny.x, num_nodes=tiny.num_nodes)
    of_seed = [example.nodes_of(bare, seed) for seed in (0, 0, 1)]
    for parts in of_seed:
        assert [nodes.numel() for nodes in parts.values()] == [150, 75, 75]
        assert torch.cat(list(parts.values())).unique().numel() == 300
    assert torch.equal(of_seed[0]['test'], of_seed[1]['test'])
    assert not torch.equal(of_seed[0]['test'], of_seed[2]['test'])
    bare.train_mask = tiny.train_mask  # an incomplete split does not count
    assert example.nodes_of(bare, 0)['train'].numel() == 150


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('loader', ['fast', 'full'])
def test_inference_by_layers_is_that_of_the_whole_graph(
    example: ModuleType, tiny: Data, device: torch.device, model: str, loader: str
) -> None:
    args = options(example, f'{QUICK} --model {model} --loader {loader}', device)
    torch.manual_seed(1)
    network = example.build(args, 64, 4).to(device).eval()
    if model == 'gin':
        for norm in network.norms[:-1]:  # values other than the initial ones, which have no effect
            torch.nn.init.uniform_(norm.module.running_mean)
            torch.nn.init.uniform_(norm.module.running_var, 0.5, 2)
    whole = tiny.clone().to(device)
    with torch.no_grad():
        expected = network(whole.x, whole.edge_index)
    out = example.Inference(example.inference_graph(tiny, args), tiny.x, args)(network)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # inference left the network unchanged
        torch.testing.assert_close(network(whole.x, whole.edge_index), expected)


@pytest.mark.parametrize(('fanout', 'epochs', 'error'), [('-1,-1,-1', 1, 1e-5), ('2,2,2', 60, 0.2)])
def test_gcn_on_batches_goes_by_the_degrees_of_the_graph(
    example: ModuleType, tiny: Data, device: torch.device, fanout: str, epochs: int, error: float
) -> None:
    data = tiny.clone()
    data.edge_index = remove_self_loops(data.edge_index)[0]
    args = options(example, f'{QUICK} --fanout={fanout}', device)
    torch.manual_seed(1)
    network = example.build(args, 64, 4).to(device).eval()
    network.act = torch.nn.Identity()  # a linear network keeps means
    nodes = data.train_mask.nonzero().view(-1)
    loader = example.new_loader(
        example.with_degrees(data, args), nodes, args.fanout, args, shuffle=False, seed=1
    )
    whole = data.clone().to(device)
    with torch.no_grad():
        right = network(whole.x, whole.edge_index)[nodes.to(device)]
        mean = (
            sum(
                torch.cat([network(*example.inputs(batch))[: batch.batch_size] for batch in loader])
                for _ in range(epochs)
            )
            / epochs
        )
    assert float((mean - right).norm() / right.norm()) < error


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('layers', ['pyg_fast', 'pyg'])
def test_training_learns(
    example: ModuleType,
    tiny: Data,
    device: torch.device,
    model: str,
    layers: str,
    capsys: pytest.CaptureFixture,
) -> None:
    line = f'{QUICK} --model {model} --layers {layers} --fanout 5,3 --epochs 6'
    args = options(example, f'{line} --evaluate-every 6', device)
    points, stats = example.run(tiny, 4, 0, args)
    assert points[-1].loss < 0.9 * points[0].loss
    assert [point.val is None for point in points] == [True] * 5 + [False]
    assert points[-1].test > 0.5  # four classes
    assert stats['num_batches'] == 6 * 4
    assert capsys.readouterr().out.count('epoch') == 6
    network = example.build(args, 64, 4)
    modules = {type(conv).__module__.split('.')[0] for conv in network.convs}
    assert modules == {'pyg_fast' if layers == 'pyg_fast' else 'torch_geometric'}


def test_trimmed_networks_learn_too(example: ModuleType, tiny: Data, device: torch.device) -> None:
    points, _ = example.run(
        tiny, 4, 0, options(example, f'{QUICK} --model sage --trim --epochs 4', device)
    )
    assert points[-1].loss < 0.8 * points[0].loss


def test_loaders(example: ModuleType, tiny: Data, device: torch.device) -> None:
    nodes = tiny.train_mask.nonzero().view(-1)
    line = f'{QUICK} --no-match --reorder --window 3 --features host --cache-ratio 0.5'
    args = options(example, line, device)
    ours = example.new_loader(tiny, nodes, [2], args)
    assert isinstance(ours, FastNeighborLoader)
    assert sorted(torch.cat([b.input_id for b in ours]).tolist()) == list(range(nodes.numel()))
    in_order = example.new_loader(tiny, nodes, [2], args, shuffle=False)
    assert torch.cat([batch.n_id[: batch.batch_size] for batch in in_order]).tolist() == (
        nodes.tolist()
    )


@pytest.mark.skipif(not (WITH_PYG_LIB or WITH_TORCH_SPARSE), reason='needs pyg-lib or torch-sparse')
def test_loader_of_pyg(example: ModuleType, tiny: Data) -> None:
    nodes = tiny.train_mask.nonzero().view(-1)
    args = options(example, f'{QUICK} --loader pyg')
    assert isinstance(example.new_loader(tiny, nodes, [2], args), NeighborLoader)


def test_match_and_reorder_do_not_change_what_is_learnt(
    example: ModuleType, device: torch.device
) -> None:
    data = PlantedGraph('small')[0]
    line = '--size small --batch-size 128 --epochs 8 --dropout 0 --features host --fanout 8,4 '
    line += '--evaluate-every 8'
    curves = {}
    for name, extra in {
        'plain': '--no-match --no-reorder',
        'match': '--no-reorder',
        'both': '--reorder',
    }.items():
        points, _ = example.run(data, 7, 0, options(example, f'{line} {extra}', device))
        curves[name] = torch.tensor([point.loss for point in points])
        assert points[-1].test > 0.8
    # The same batches in the same order; in another one: the same mean losses, nearly.
    torch.testing.assert_close(curves['match'], curves['plain'], rtol=5e-3, atol=5e-3)
    assert not torch.equal(curves['both'], curves['plain'])
    torch.testing.assert_close(curves['both'], curves['plain'], rtol=0.1, atol=0.05)


def test_sampled_batches_reach_the_accuracy_of_the_whole_graph(
    example: ModuleType, capsys: pytest.CaptureFixture
) -> None:
    line = '--size small --model gcn --runs 3 --fanout 15,10 --device cpu'
    found = [
        example.main(f'{line} {rest}'.split())
        for rest in ('--loader full --epochs 60 --evaluate-every 5', '--batch-size 256 --epochs 10')
    ]
    full, sampled = (torch.tensor(outcome.accuracies).mean() for outcome in found)
    assert full > 85
    assert sampled > full - 1
    assert len(capsys.readouterr().out.splitlines()) > 100


def test_script(tmp_path: Path) -> None:
    file = tmp_path / 'record.json'
    line = f'{QUICK} --epochs 2 --runs 2 --fanout 3,2 --device cpu --json {file}'
    done = _forks.run(str(SCRIPT), *line.split(), env={**os.environ, 'OMP_NUM_THREADS': '1'})
    assert done.returncode == 0, done.stderr
    assert 'GCN of 2 layers on planted, tiny (cpu)' in done.stdout
    record = json.loads(file.read_text())
    assert record['graph'] == {
        'nodes': 300,
        'edges': PlantedGraph('tiny')[0].num_edges,
        'features': 64,
        'classes': 4,
    }
    assert [len(run) for run in record['runs']] == [2, 2]
    assert record['stats']['num_batches'] == 2 * 4
    mean = sum(record['accuracies']) / 2
    assert f'test accuracy [%]       {mean:.2f} +- ' in done.stdout
    assert f'time per epoch [s]      {record["epoch_seconds"]:.3f}' in done.stdout


def test_record_of_a_run_that_was_never_evaluated(example: ModuleType) -> None:
    runs = [
        [example.Point(3.0, 1.0, None, None), example.Point(1.0, 0.5, None, None)],
        [example.Point(5.0, 1.0, None, None), example.Point(2.0, 0.5, None, None)],
    ]
    outcome = example.Outcome({'nodes': 3}, runs)
    assert outcome.accuracies == []
    assert outcome.epoch_seconds == 1.5  # without the first of each run
    assert example.summary(outcome) == 'time per epoch [s]      1.500'
