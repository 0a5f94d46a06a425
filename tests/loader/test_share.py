"""One copy of a graph for all processes of a machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import _forks
import pytest
import torch
import torch.distributed as dist

from pyg_fast.graph.graph import GraphRequest, cache_of
from pyg_fast.loader import share_data
from pyg_fast.transforms import ToCSR
from tests.loader._graphs import equal, random_data

WORKER = """
import os, sys, torch, torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2)
from pyg_fast.loader import FastNeighborLoader, _share, share_data
from pyg_fast.graph.graph import GraphRequest, cache_of
from pyg_fast.transforms import ToCSR
from tests.loader._graphs import random_data
_share._MEMORY = folder + '/shared'

def make():
    assert rank == 0
    data = ToCSR()(random_data(100, 600))
    data.half, data.wide = torch.randn(100).half(), torch.randn(100, 0)
    return data

data = share_data(make)
dist.barrier()
assert os.listdir(_share._MEMORY) == []  # Its name is gone.
assert data.x.is_shared() and data.edge_index._data.is_shared()
assert data.edge_index._indptr.is_shared()
(graph,) = (entry.value for entry in cache_of(data.edge_index).entries.values())
assert graph.col.is_shared() and graph.col.dtype == torch.int32
if rank == 0:
    data.x[5] = 7.0
dist.barrier()
assert (data.x[5] == 7).all()

args = dict(batch_size=9, shuffle=True, seed=1, rank=rank, num_replicas=2)
seeds = torch.cat([b.n_id[:b.batch_size] for b in FastNeighborLoader(data, [3, 2], **args)])
both = [None, None]
dist.all_gather_object(both, seeds)
assert torch.equal(torch.cat(both).sort()[0], torch.arange(100))

def fail():
    raise KeyError('mine')

for wrong in (fail, lambda: lambda: 3):
    try:
        share_data(wrong)
    except RuntimeError as error:
        assert 'process 0' in str(error)
        assert (error.__cause__ is not None) == (rank == 0)
    else:
        raise AssertionError
dist.barrier()
assert os.listdir(_share._MEMORY) == []
dist.destroy_process_group()

# A thread that makes batches ahead does not outlive the interpreter.
from pyg_fast.loader._pipeline import PendingBatch, ThreadedIterator
from pyg_fast.loader._stats import Meter

def endless():
    while True:
        yield PendingBatch(data, [])

left = ThreadedIterator(endless(), None, Meter(torch.device('cpu')), 1, None, 2)
next(left)
print('done')
"""


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group('gloo', f'file://{tmp_path}/meet', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    (tmp_path / 'shared').mkdir()
    _forks.run_together(WORKER, 2, str(tmp_path), timeout=120)


def test_alone() -> None:
    data = random_data()
    assert share_data(lambda: data) is data
    with pytest.raises(TypeError, match='make_data'):
        share_data(data)  # type: ignore[arg-type]


@pytest.mark.usefixtures('group_of_one')
def test_writing_and_mapping() -> None:
    data = ToCSR()(random_data())
    data.again = data.x
    data.strided = torch.randn(60, 8)[:, ::2]
    data.names = ['a'] * 60
    data.scalar = torch.tensor(3)
    got = share_data(lambda: data)
    assert got is not data
    assert equal(got, data)
    assert got.again is got.x
    assert got.x.data_ptr() % 4096 == got.y.data_ptr() % 4096 == 0
    assert got.edge_index.is_sorted_by_col
    assert torch.equal(got.edge_index._indptr, data.edge_index._indptr)
    got.x.zero_()  # An edit of one is none of the others.
    assert GraphRequest(60, 60, False) in cache_of(got.edge_index).entries


@pytest.mark.usefixtures('group_of_one')
def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = []

    def full(file: int, *args: int) -> None:
        paths.append(os.readlink(f'/proc/self/fd/{file}'))
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'posix_fallocate', full)
    with pytest.raises(RuntimeError, match='share_data failed in process 0') as caught:
        share_data(random_data)
    assert isinstance(caught.value.__cause__, OSError)
    (path,) = paths
    assert os.path.isabs(path)
    assert not os.path.exists(path)
