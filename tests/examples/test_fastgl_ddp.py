"""The example on several GPUs, here with two processes and gloo: what they share, and what becomes
of the others when one dies."""

import json
import os
import socket
import sys
from pathlib import Path

import _forks
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / 'examples'
SCRIPT = EXAMPLES / 'fastgl_ddp.py'
QUICK = ['--size', 'tiny', '--hidden', '8', '--batch-size', '20', '--fanout', '3,2']


def start(script: Path, *args: str) -> list[_forks.Fork]:
    """Two processes, as torchrun starts them; but it would import PyTorch three times, and stops
    the others when one dies."""
    with socket.socket() as found:
        found.bind(('127.0.0.1', 0))
        port = found.getsockname()[1]
    return [
        _forks.Fork(
            str(script),
            *QUICK,
            *args,
            '--device',
            'cpu',
            env={
                **os.environ,
                'OMP_NUM_THREADS': '1',
                'RANK': str(rank),
                'LOCAL_RANK': str(rank),
                'WORLD_SIZE': '2',
                'MASTER_ADDR': '127.0.0.1',
                'MASTER_PORT': str(port),
            },
        )
        for rank in (0, 1)
    ]


def ended(processes: list[_forks.Fork]) -> list[tuple[str, str]]:
    """What each wrote, once all have ended."""
    try:
        return [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()


def patched(folder: Path, body: str) -> Path:
    """A script that changes something in the example before it runs it."""
    script = folder / 'patched.py'
    script.write_text(
        f'import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n'
        f'import os, torch\nimport fastgl_ddp\nRANK = int(os.environ["RANK"])\n{body}\n'
        'fastgl_ddp.main()\n'
    )
    return script


def test_two_processes_train_one_network(tmp_path: Path) -> None:
    # Each process records its batches, its inference (shared and alone) and its final weights.
    script = patched(
        tmp_path,
        f"""
train, run, seen, inferred, model = fastgl_ddp.train, fastgl_ddp.run, [], [], None

def noted(parallel, optimizer, batches, args):
    global model
    model = parallel.module
    epoch = []
    class Noting:
        def __iter__(self):
            for batch in batches:
                epoch.append(batch.n_id[:batch.batch_size].tolist())
                yield batch
    loss = train(parallel, optimizer, Noting(), args)
    seen.append(epoch)
    return loss

class Inference(fastgl_ddp.Inference):
    def __init__(self, data, x, args, *rest, **part):
        super().__init__(data, x, args, *rest, **part)
        self.alone = fastgl_training.Inference(data, x, args)
        self.counts = [batch.batch_size for batch in self.batches]

    def __call__(self, model):
        out = super().__call__(model)
        inferred.append((out, self.alone(model), sum(self.counts)))
        return out

def ending(args):
    outcome = run(args)
    torch.save({{'seen': seen, 'state': model.state_dict(), 'inferred': inferred}},
               {str(tmp_path)!r} + f'/{{RANK}}.pt')
    return outcome

import fastgl_training
fastgl_ddp.train, fastgl_ddp.run, fastgl_ddp.Inference = noted, ending, Inference
""",
    )
    file = tmp_path / 'record.json'
    processes = start(script, '--epochs', '3', '--json', str(file))
    (out, error), (other_out, other_error) = ended(processes)
    assert [process.returncode for process in processes] == [0, 0], error + other_error
    assert 'GCN of 2 layers on planted, tiny (cpu)' in out
    assert out.count('epoch   3:') == 1
    assert other_out == ''  # only one process prints
    record = json.loads(file.read_text())
    assert record['processes'] == 2
    assert len(record['seconds']) == len(record['runs'][0]) == 3
    assert record['runs'][0][-1]['loss'] < record['runs'][0][0]['loss']

    ends = [torch.load(tmp_path / f'{rank}.pt') for rank in (0, 1)]
    for one, other in zip(*(end['state'].values() for end in ends), strict=True):
        assert torch.equal(one, other)
    for results in zip(*(end['inferred'] for end in ends), strict=True):
        assert sum(count for *_, count in results) == 300  # nodes, about half of them by each
        for out, alone, count in results:
            torch.testing.assert_close(out, alone)
            assert 140 <= count <= 160
    epochs = list(zip(*(end['seen'] for end in ends), strict=True))
    for epoch in epochs:
        nodes = [node for part in epoch for batch in part for node in batch]
        assert len(nodes) == len(set(nodes)) == 150  # all training nodes, each once
        sizes = [[len(batch) for batch in part] for part in epoch]
        assert len(sizes[0]) == len(sizes[1]) == 4
        assert max(map(max, sizes)) <= 20
    assert epochs[0] != epochs[1]


def test_features_divided_over_two_hosts(tmp_path: Path) -> None:
    # Each process takes itself for the only one of its machine, so that both load the graph.
    script = patched(
        tmp_path,
        """
from pyg_fast.loader import _share
_share._machine = lambda: RANK
run, load_data, split = fastgl_ddp.run, fastgl_ddp.load_data, fastgl_ddp.ShardedFeatures.split
loaded, parts = [], []

def loading(args):
    loaded.append(1)
    return load_data(args)

def splitting(*args, **options):
    parts.append(split(*args, **options))
    return parts[-1]

def ending(args):
    outcome = run(args)
    assert loaded == [1]
    assert [(part.shape, len(part.part)) for part in parts] == (
        [((300, 64), 150)] if args.features == 'sharded' else [])
    return outcome

fastgl_ddp.load_data, fastgl_ddp.run = loading, ending
fastgl_ddp.ShardedFeatures.split = splitting
""",
    )
    runs = {}
    for features in ('auto', 'sharded'):
        file = tmp_path / f'{features}.json'
        processes = start(
            script, '--epochs', '2', '--no-reorder', '--features', features, '--json', str(file)
        )
        errors = [error for _, error in ended(processes)]
        assert [process.returncode for process in processes] == [0, 0], errors
        record = json.loads(file.read_text())
        runs[features] = [point | {'seconds': 0} for point in record['runs'][0]]
        assert (record['stats']['bytes_moved'] > 0) == (features == 'sharded')
    assert runs['sharded'] == runs['auto']


def test_when_one_dies_the_others_stop(tmp_path: Path) -> None:
    script = patched(
        tmp_path,
        """
train, epochs = fastgl_ddp.train, []

def dying(*args):
    epochs.append(1)
    if RANK == 1 and len(epochs) == 2:
        os._exit(3)
    return train(*args)

fastgl_ddp.train = dying
""",
    )
    processes = start(script, '--epochs', '500')
    (out, error), _ = ended(processes)
    # Threads of gloo may abort a process that ends by an exception.
    assert processes[0].returncode in (1, -6)
    assert processes[1].returncode == 3
    assert 'epoch   1:' in out
    assert 'epoch   2:' not in out
    assert 'RuntimeError' in error


def test_it_needs_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = set(sys.modules)
    import fastgl_ddp

    monkeypatch.delenv('RANK', raising=False)
    try:
        with pytest.raises(SystemExit):
            fastgl_ddp.parse(['--device', 'cpu'])
        assert 'start it by torchrun --nproc-per-node=N' in capsys.readouterr().err
        monkeypatch.setenv('RANK', '1')
        args = fastgl_ddp.parse(['--device', 'cpu', '--timeout', '5'])
        assert (args.loader, args.timeout, args.device) == ('fast', 5, 'cpu')
    finally:
        for name in {'fastgl_ddp', 'fastgl_training', 'node_classification'} - before:
            sys.modules.pop(name, None)
