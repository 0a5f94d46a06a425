"""Features whose rows are divided over processes."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _forks
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput

from pyg_fast.loader import FastNeighborLoader, ShardedFeatures
from pyg_fast.transforms import ToCSR
from tests.loader._graphs import equal, random_data

BEGIN = """
import datetime, inspect, os, sys, torch, torch.distributed as dist
from torch_geometric.data import Data
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=size,
                        timeout=datetime.timedelta(seconds=60))
from pyg_fast.loader import FastNeighborLoader, ShardedFeatures
from tests.loader._graphs import equal, random_data

def same(batch, other):
    batch.pop('num_nodes', None) if isinstance(batch, dict) else batch._store.pop('num_nodes', None)
    return equal(batch, other)

def refused(kind, text, function):
    try:
        function()
    except kind as error:
        assert text in str(error), error
        return error
    raise AssertionError('no error')
"""

ROWS = (
    BEGIN
    + """
from pyg_fast.loader._pipeline import ThreadedIterator

data = random_data(100, 600)
for dtype in (torch.float64, torch.float16, torch.bfloat16):
    data[str(dtype)[6:]] = torch.randn(100, 3, 2 if dtype.itemsize == 8 else 4).to(dtype)
wide = [key for key in data.keys() if key in ('x', 'float64', 'float16', 'bfloat16')]
for key in wide:  # the same in all processes
    dist.broadcast(data[key].view(torch.uint8), 0)
parts = {'rank': rank, 'num_replicas': size}
args = dict(batch_size=7, shuffle=True, seed=3)

for match, reorder in ((False, False), (True, False), (True, True)):
    loader = FastNeighborLoader(data, [3, 2], features='sharded', match=match, reorder=reorder,
                                **args, **parts)
    for key in wide:
        held = loader.data[key]
        assert held.part.size(0) == (rank + 1) * 100 // size - rank * 100 // size
        assert held.shape == data[key].shape and held.dtype == data[key].dtype
    plain = FastNeighborLoader(data, [3, 2], match=match, **args, **parts)
    start, end, away = rank * 100 // size, (rank + 1) * 100 // size, 0
    for epoch in range(2):
        got, wanted = list(loader), list(plain)
        away += sum(int(((b.n_id < start) | (b.n_id >= end)).sum()) for b in got)
        if reorder:
            for batches in (got, wanted):
                batches.sort(key=lambda batch: batch.n_id[:batch.batch_size].tolist())
        assert len(got) == len(wanted) and all(map(same, got, wanted))
    stats = loader.stats
    assert (stats.match_degree is None) == (not match)
    row_bytes = sum(data[key][:1].nbytes for key in wide)
    if not match:
        assert stats.bytes_moved == away * row_bytes
    else:
        assert 0 < stats.match_degree < 1 and stats.bytes_saved_by_match > 0
        assert stats.bytes_moved < away * row_bytes

# Different numbers of batches, of different sizes; rows held unevenly, one process without any.
bounds = [0, 1, 1, 100][:size] + [100]
part = data.x[bounds[rank]:bounds[rank + 1]].clone()
own = Data(x=ShardedFeatures(part, 100), edge_index=data.edge_index, num_nodes=100)
seeds = torch.arange(100)[rank::size][:[5, 0, 31][rank]]
loader = FastNeighborLoader(own, [-1, 4], input_nodes=seeds, batch_size=2, seed=rank)
for epoch in range(3):
    batches = list(loader)
    assert len(batches) == -(-seeds.numel() // 2)
    for batch in batches:
        assert torch.equal(batch.x, data.x[batch.n_id])
        batch.x.zero_()

# A batch by call; all processes leave an epoch; the next one is right.
seeds = torch.arange(100)
loader = FastNeighborLoader(own, [4], input_nodes=seeds, batch_size=12, seed=rank)
for batches in ([loader([rank, 4])], [b for b, _ in zip(loader, range(3))], list(loader)):
    for batch in batches:
        assert torch.equal(batch.x, data.x[batch.n_id])

# As on CUDA: a thread makes batches ahead, rows are exchanged in this one.
for count in (4, 100):
    core = loader._core
    iterator = ThreadedIterator(core.make_batches(loader._seeds.of_epoch(0), 0), None, core.meter,
                                len(loader), None, 2, core.features.end_iterator)
    for batch, _ in zip(iterator, range(count)):
        assert torch.equal(batch.x, data.x[batch.n_id])
    iterator.close()

# Writes of each process reach all, after refresh also in rows that would be reused.
part.add_(1), data.x.add_(1)
dist.barrier()
iterator = iter(loader)
for k, batch in enumerate(iterator):
    assert torch.equal(batch.x, data.x[batch.n_id])
    if k == 2:
        break
    if k == 0:  # Only one process writes, between two batches.
        before = loader.stats
        data.x[bounds[2]:] *= 2
        if rank == 2:
            part.mul_(2)
    else:  # None of its rows was reused.
        assert loader.stats.bytes_saved_by_match == before.bytes_saved_by_match
assert loader.stats.bytes_saved_by_match > before.bytes_saved_by_match
part.data.mul_(2), data.x.mul_(2)
loader.refresh()
dist.barrier()
assert all(torch.equal(batch.x, data.x[batch.n_id]) for batch in iterator)

# A group without a backend for the CPU, as NCCL: the loader makes one, of ranks in the same order.
config = dist.get_backend_config
free = 'sort_ranks' in inspect.signature(dist.new_group).parameters
odd = dist.new_group([1, 0, 2], sort_ranks=False) if free else dist.new_group([0, 1, 2])
place = dist.get_rank(odd)
own.x = ShardedFeatures(data.x[[0, 10, 50][place]:[10, 50, 100][place]], 100, odd)
dist.get_backend_config = lambda group: 'cuda:nccl'
loader = FastNeighborLoader(own, [4], batch_size=9 + rank, seed=rank)
assert loader._core.features.exchange._control is not odd
for batch in loader:
    assert torch.equal(batch.x, data.x[batch.n_id])
dist.get_backend_config = config

# Features of several groups: none of them talks to the others.
half = dist.new_group([0, 2])
if rank != 1:
    place = dist.get_rank(half)
    own.x = ShardedFeatures(data.x[place * 50:place * 50 + 50], 100, half)
    for batch in FastNeighborLoader(own, [4], batch_size=9 + rank, seed=rank):
        assert torch.equal(batch.x, data.x[batch.n_id])
else:
    refused(ValueError, 'must contain this process', lambda: ShardedFeatures.split(data.x, half))
dist.barrier()
dist.destroy_process_group()
print('done')
"""
)

ERRORS = (
    BEGIN
    + """
data = random_data(100, 600)

# Arguments of one process.
wrong = data.x if rank else [1]
error = refused(RuntimeError if rank else TypeError, "'part' must be a tensor",
                lambda: ShardedFeatures(wrong, 100))
refused(ValueError, 'rows in all processes together', lambda: ShardedFeatures(data.x, 100))
half = data.x[:50]
refused(ValueError, 'same dtype', lambda: ShardedFeatures(half if rank else half.double(), 100))

# Making a batch fails in one process: all raise, and can go on.
class Failing:
    count = 0
    def __call__(self, out):
        self.count += 1
        if rank == 1 and self.count == 3:
            raise KeyError('mine')
        return out

loader = FastNeighborLoader(data, [3, 2], batch_size=11, features='sharded', seed=rank,
                            transform_sampler_output=Failing())
error = refused(KeyError if rank else RuntimeError, 'mine', lambda: list(loader))
assert rank or 'process 1' in str(error)
for batch in loader:
    assert torch.equal(batch.x, data.x[batch.n_id])
refused(IndexError if rank else RuntimeError, 'positions', lambda: loader([rank * 1000]))
assert loader([1]).batch_size == 1

# Attributes of one process.
two = Data(x=ShardedFeatures.split(data.x), edge_index=data.edge_index, num_nodes=100)
two.z = ShardedFeatures.split(data.x)
if rank:
    del two.z
loader = FastNeighborLoader(two, [3], batch_size=11, seed=0)
refused(RuntimeError, 'same ShardedFeatures', lambda: list(loader))

# A process takes no batches any more.
group = dist.new_group(timeout=datetime.timedelta(seconds=1))
two = Data(x=ShardedFeatures.split(data.x, group), edge_index=data.edge_index, num_nodes=100)
iterator = iter(FastNeighborLoader(two, [3], batch_size=11, seed=rank))
next(iterator)
if rank == 0:
    refused(RuntimeError, 'does not take batches any more', lambda: next(iterator))
dist.barrier()

# A process ends in the middle of an epoch.
loader = FastNeighborLoader(data, [3, 2], batch_size=11, features='sharded', seed=rank)
iterator = iter(loader)
next(iterator)
if rank == 1:
    os._exit(3)
refused(RuntimeError, 'one of them has ended', lambda: next(iterator))
print('done', flush=True)
os._exit(0)  # Threads of gloo may abort a process whose neighbour is gone.
"""
)

STORES = (
    BEGIN
    + """
from tests.loader.test_remote import stores
data = random_data(100, 600)
parts = dict(batch_size=9, shuffle=True, seed=1, rank=rank, num_replicas=size)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 4))
for layout in ('coo', 'csc'):
    loader = FastNeighborLoader(stores(data, layout), [3, 2], **parts)
    for epoch in range(2):
        seeds = []
        for batch in loader:
            assert torch.equal(batch.x, data.x[batch.n_id])
            assert torch.equal(batch.y, data.y[batch.n_id])
            model(batch.x).square().mean().backward()
            seeds.append(batch.n_id[:batch.batch_size])
        both = [None] * size
        dist.all_gather_object(both, torch.cat(seeds))
        assert torch.equal(torch.cat(both).sort()[0], torch.arange(100))
dist.barrier()
dist.destroy_process_group()
print('done')
"""
)


def test_rows_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    _forks.run_together(ROWS, 3, '3', str(tmp_path))


def test_errors_of_a_process_reach_the_others(tmp_path: Path) -> None:
    _forks.run_together(ERRORS, 2, '2', str(tmp_path), codes={1: 3})


def test_remote_backends_of_several_processes(tmp_path: Path) -> None:
    _forks.run_together(STORES, 2, '2', str(tmp_path))


@pytest.fixture
def data() -> Data:
    return random_data(100, 600)


@pytest.fixture
def own(data: Data, device: torch.device) -> Iterator[Data]:
    """Data whose features are those of a single process."""
    out = copy.copy(data)
    out.num_nodes = data.num_nodes
    out.x = ShardedFeatures.split(data.x, device=device)
    return out


ARGS: dict[str, Any] = {'batch_size': 11, 'shuffle': True, 'seed': 2}


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_process(device: torch.device, data: Data, dtype: torch.dtype) -> None:
    data.x = torch.randn(100, 17).to(dtype)
    data.narrow, data.scalar = torch.randn(100, 4), torch.randn(100)
    wanted = FastNeighborLoader(data, [3, 2], device=device, **ARGS)
    loader = FastNeighborLoader(data, [3, 2], features='sharded', device=device, **ARGS)
    assert {k for k, v in loader.data if isinstance(v, ShardedFeatures)} == {'x'}
    assert isinstance(data.x, torch.Tensor)
    for batch, other in zip(loader, wanted, strict=True):
        del batch.num_nodes
        assert equal(batch, other)
    assert loader.stats.bytes_moved == 0


def test_the_whole_tensor_is_released(device: torch.device, data: Data) -> None:
    x, loader = weakref.ref(data.x), None
    loader = FastNeighborLoader(data, [3], features='sharded', device=device, **ARGS)
    del data.x
    gc.collect()
    assert x() is None
    assert next(iter(loader)).x.size(1) == 5


def test_it_is_read_at_each_batch(device: torch.device, data: Data, own: Data) -> None:
    loader = FastNeighborLoader(own, [3, 2], match=False, device=device, **ARGS)
    for k, batch in enumerate(loader):
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()] * 2**k)
        own.x.part.data.mul_(2)


def test_copies(device: torch.device, data: Data, own: Data) -> None:
    loader = FastNeighborLoader(own, [3, 2], device=device, **ARGS)
    other = copy.deepcopy(loader)
    own.x.part.zero_()
    for batch in other:
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    with pytest.raises(TypeError, match='cannot be pickled'):
        pickle.dumps(loader)
    assert repr(own.x) == 'ShardedFeatures([100, 5], rows=100)'
    assert own.x.dtype == torch.float32
    assert ToCSR()(own.to('cpu')).x is own.x


def test_arguments(data: Data) -> None:
    with pytest.raises(TypeError, match="'part' must be a tensor"):
        ShardedFeatures([1], 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match='strided'):
        ShardedFeatures(data.x.to_sparse(), 100)
    with pytest.raises(TypeError, match="'num_nodes' must be an integer"):
        ShardedFeatures(data.x, 100.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='a scalar'):
        ShardedFeatures(torch.tensor(1.0), 1)
    with pytest.raises(ValueError, match='gradients'):
        ShardedFeatures(data.x.clone().requires_grad_(), 100)
    with pytest.raises(ValueError, match='must have 99 rows'):
        ShardedFeatures(data.x, 99)
    with pytest.raises(TypeError, match="'x' must be a tensor"):
        ShardedFeatures.split(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='a scalar'):
        ShardedFeatures.split(torch.tensor(1.0))


def test_errors_of_a_loader(device: torch.device, data: Data, own: Data) -> None:
    args = {**ARGS, 'device': device}
    with pytest.raises(ValueError, match="'features' must be one of"):
        FastNeighborLoader(data, [3], features='shared', **args)
    with pytest.raises(ValueError, match="'topology' must be one of"):
        FastNeighborLoader(data, [3], topology='sharded', **args)
    with pytest.raises(ValueError, match='FeatureStore'):
        FastNeighborLoader((data, data), [3], features='sharded', **args)
    own.num_nodes = 101
    with pytest.raises(ValueError, match='set data.num_nodes'):
        FastNeighborLoader(own, [3], **args)
    own.num_nodes = 100

    def moved(out: SamplerOutput) -> SamplerOutput:
        out.node = out.node - 1
        return out

    wrong = FastNeighborLoader(own, [3], transform_sampler_output=moved, batch_size=100)
    with pytest.raises(IndexError, match='nodes from 0 to 99, got some from -1 to 98'):
        next(iter(wrong))
    late = FastNeighborLoader(data, [3], **args)
    data.z = own.x
    with pytest.raises(ValueError, match='make a new loader'):
        next(iter(late))
    data.y2 = copy.copy(own.x)
    data.y2.bounds = (0, 50)
    with pytest.raises(ValueError, match='divided as the other'):
        FastNeighborLoader(data, [3], **args)


def test_host_memory_must_be_pinned(device: torch.device, data: Data) -> None:
    if device.type == 'cpu':
        pytest.skip('a CPU reads all of its memory')
    args = {**ARGS, 'device': device}
    data.z = ShardedFeatures(data.x, 100)
    with pytest.raises(ValueError, match='pinned'):
        FastNeighborLoader(data, [3], **args)
    data.z = ShardedFeatures(data.x.pin_memory(), 100)
    batch = next(iter(FastNeighborLoader(data, [3], **args)))
    assert torch.equal(batch.z.cpu(), data.x[batch.n_id.cpu()])
