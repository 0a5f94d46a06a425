"""Features from host memory: match, the cache, and data that change meanwhile."""

import gc

import pytest
import torch
from _raw_ops import keep_until_read
from torch_geometric.data import Data
from torch_geometric.sampler import SamplerOutput

from pyg_fast.loader import FastNeighborLoader
from tests.loader._graphs import Apart, equal, random_data
from tests.loader._parts import Budget

ARGS = {'batch_size': 11, 'shuffle': True, 'seed': 2}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Apart:
    """Makes loaders whose features are in host memory."""
    return Apart(monkeypatch, device)


def moved_bytes(device: torch.device) -> int:
    """Of a node: a label and a mask stay on a GPU."""
    return 20 if device.type == 'cuda' else 29


@pytest.fixture
def data() -> Data:
    return random_data(200, 1500)


def test_match_changes_nothing(device: torch.device, apart: Apart, data: Data) -> None:
    plain = list(apart(data, [3, 2], match=False, device=device, **ARGS))
    for reorder in (False, True):
        got = list(apart(data, [3, 2], match=True, reorder=reorder, device=device, **ARGS))
        if reorder:
            got.sort(key=lambda batch: int(batch.n_id[0]))
            plain.sort(key=lambda batch: int(batch.n_id[0]))
        assert all(map(equal, plain, got))
        for batch in got:
            assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_only_the_rest_is_fetched(device: torch.device, apart: Apart, data: Data) -> None:
    del data.y, data.train_mask, data.edge_attr
    read = []  # before each fetch, the bytes of all batches so far

    def record(out: SamplerOutput) -> SamplerOutput:
        stats = loader.stats
        read.append((stats.bytes_saved_by_match, stats.bytes_moved))
        return out

    loader = apart(
        data, [3, 2], reorder=False, window=1, transform_sampler_output=record, device=device,
        **ARGS,
    )  # fmt: skip
    nodes = [set(batch.n_id.tolist()) for batch in loader]
    record(SamplerOutput(None, None, None, None))
    shared = [0] + [len(a & b) for a, b in zip(nodes, nodes[1:], strict=False)]
    rows = torch.tensor(read).diff(dim=0) / 20
    assert rows.tolist() == [[k, len(n) - k] for k, n in zip(shared, nodes, strict=True)]
    stats = loader.stats
    smaller = sum(min(len(a), len(b)) for a, b in zip(nodes, nodes[1:], strict=False))
    assert stats.match_degree == pytest.approx(sum(shared) / smaller)
    assert stats.bytes_saved_by_match == 20 * sum(shared)
    assert stats.bytes_moved == 20 * (stats.num_nodes - sum(shared))
    assert stats.bytes_saved_by_cache == stats.cache_hits == 0


def test_bytes_are_those_of_all_columns(device: torch.device, apart: Apart, data: Data) -> None:
    loader = apart(data, [3, 2], match=False, device=device, **ARGS)
    list(loader)
    assert loader.stats.bytes_moved == moved_bytes(device) * loader.stats.num_nodes
    assert loader.stats.match_degree is None


def test_reorder_raises_the_match_degree(device: torch.device, apart: Apart, data: Data) -> None:
    degrees = []
    for reorder in (False, None):
        loader = apart(data, [3, 2], reorder=reorder, device=device, **ARGS)
        list(loader)
        degrees.append(loader.stats.match_degree)
    assert degrees[0] < degrees[1]


def test_rows_come_in_order_without_shuffle(device: torch.device, apart: Apart, data: Data) -> None:
    loader = apart(data, [3, 2], batch_size=11, device=device)
    seeds = torch.cat([batch.n_id[: batch.batch_size].cpu() for batch in loader])
    assert torch.equal(seeds, torch.arange(200))
    assert loader.stats.match_degree > 0


def test_edits_of_a_batch_never_reach_the_next(
    device: torch.device, apart: Apart, data: Data
) -> None:
    seen = []

    def transform(batch: Data) -> Data:
        seen.append((batch.n_id.cpu().clone(), batch.x.cpu().clone()))
        batch.x.fill_(float('nan'))
        batch.n_id.fill_(0)
        return batch

    plain = list(apart(data, [3, 2], device=device, **ARGS))
    loader = apart(data, [3, 2], device=device, transform=transform, **ARGS)
    edited = list(loader)
    assert all(batch.x.isnan().all() for batch in edited)
    assert loader.stats.match_degree > 0
    for (n_id, x), batch in zip(seen, plain, strict=True):
        assert torch.equal(n_id, batch.n_id.cpu())
        assert torch.equal(x, batch.x.cpu())


@pytest.mark.parametrize('ratio', [0.0, 0.1, 1.0])
def test_cache(device: torch.device, apart: Apart, data: Data, ratio: float) -> None:
    plain = list(apart(data, [3, 2], match=False, device=device, **ARGS))
    loader = apart(data, [3, 2], match=False, cache_ratio=ratio, device=device, **ARGS)
    got = list(loader)
    assert all(map(equal, plain, got))
    degree = torch.bincount(data.edge_index[0], minlength=200)
    kept = degree.argsort(descending=True, stable=True)[: round(ratio * 200)]
    hits = sum(int(torch.isin(batch.n_id.cpu(), kept).sum()) for batch in got)
    stats = loader.stats
    assert stats.cache_hits == hits
    assert stats.bytes_saved_by_cache == moved_bytes(device) * hits
    assert stats.bytes_moved == moved_bytes(device) * (stats.num_nodes - hits)
    both = apart(data, [3, 2], cache_ratio=ratio, reorder=False, device=device, **ARGS)
    assert all(map(equal, plain, both))
    assert both.stats.cache_hits <= hits


def test_other_attributes_from_host_memory(device: torch.device, apart: Apart, data: Data) -> None:
    data.flags = torch.rand(200, 3) < 0.5
    data.half = torch.randn(200, 2, 2).bfloat16()
    data.strided = torch.randn(200, 8)[:, ::2]
    data.names = [str(k) for k in range(200)]
    for batch in apart(data, [3, 2], cache_ratio=0.2, device=device, **ARGS):
        n_id = batch.n_id.cpu()
        for key in ('flags', 'half', 'strided', 'y', 'train_mask'):
            assert torch.equal(batch[key].cpu(), data[key][n_id])
            assert batch[key].device.type == device.type
        assert torch.equal(batch.edge_attr.cpu(), data.edge_attr[batch.e_id.cpu()])
        assert batch.names == [str(k) for k in n_id.tolist()]


@pytest.mark.parametrize('cache_ratio', [0.0, 0.3])
@pytest.mark.parametrize('place', ['host', 'device'])
def test_edits_in_the_middle_of_an_epoch(
    device: torch.device, apart: Apart, data: Data, place: str, cache_ratio: float
) -> None:
    args = {**ARGS, 'batch_size': 4, 'device': device, 'cache_ratio': cache_ratio}
    if place == 'host':
        loader = apart(data, [3, 2], **args)
    else:
        loader = FastNeighborLoader(data, [3, 2], features='device', **args)
    before = data.x.clone()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    data.x.add_(100)
    changed = [torch.equal(b.x.cpu(), data.x[b.n_id.cpu()]) for b in iterator]
    ahead = 3 if device.type == 'cuda' else 0
    assert all(changed[ahead:])
    loader.epoch = 0
    data.x.copy_(before)
    for k, batch in enumerate(loader):
        if k == 6:
            data.x = before * 3
        wanted = before if k <= 6 else before * 3
        if not 6 < k <= 6 + ahead:
            assert torch.equal(batch.x.cpu(), wanted[batch.n_id.cpu()])


def write(data: Data, how: str, value: float) -> None:
    """Fills the features in a way that no version counter sees, or by NumPy's."""
    if how == 'data':
        data.x.data.fill_(value)
    elif how == 'other storage':
        data.x.data = torch.full_like(data.x, value)
    elif how == 'numpy':
        data.x.numpy()[...] = value
    elif how == 'own numpy':
        data.x[...] = value


@pytest.mark.parametrize('how', ['data', 'other storage', 'numpy', 'own numpy'])
def test_what_lies_at_hand_is_read_at_each_batch(data: Data, how: str) -> None:
    if how == 'own numpy':
        data.x = data.x.numpy()
    loader = FastNeighborLoader(data, [3, 2], **ARGS)
    for k, batch in enumerate(loader):
        assert k == 0 or (batch.x == k).all()
        write(data, how, k + 1)
    write(data, how, 50)
    assert (loader([1, 2]).x == 50).all()


def test_the_users_tensor_on_the_device_is_read_at_hand_out(
    device: torch.device, data: Data
) -> None:
    data = data.to(device)
    data.strided = torch.randn(8, 200, device=device).t()
    data.learned = torch.nn.Parameter(torch.randn(200, 2, device=device))
    loader = FastNeighborLoader(data, [3, 2], **ARGS)
    keys = ('x', 'y', 'strided', 'learned')
    for k, batch in enumerate(loader):
        for key in keys:
            assert torch.equal(batch[key], data[key][batch.n_id])
        assert torch.equal(batch.edge_attr, data.edge_attr[batch.e_id])
        assert batch.learned.requires_grad
        for key in (*keys, 'edge_attr'):
            data[key].data.fill_(k)
    names = list(data.to_dict())
    assert list(batch.to_dict())[: len(names)] == names


def test_features_on_the_device_are_of_one_state(device: torch.device) -> None:
    if device.type == 'cpu':
        pytest.skip('nothing runs at the same time')
    data = random_data(400_000, 2_000_000).to(device)
    data.x = torch.zeros(400_000, 256, device=device)
    loader = FastNeighborLoader(data, [10, 5], batch_size=4096, seed=1, device=device)
    torn = []
    for k, batch in enumerate(loader):
        low, high = batch.x.aminmax()
        torn.append((low != k) | (high != k))
        data.x.add_(1)
        if k == 60:
            break
    assert not torch.stack(torn).any()


@pytest.mark.parametrize('cache_ratio', [0.0, 0.5])
@pytest.mark.parametrize('how', ['data', 'other storage', 'numpy'])
def test_refresh(
    device: torch.device, apart: Apart, data: Data, how: str, cache_ratio: float
) -> None:
    loader = apart(data, [3, 2], device=device, cache_ratio=cache_ratio, **ARGS)
    list(loader)
    for value in (1, 2):
        write(data, how, value)
        data.y.numpy()[...] = value
        data.edge_attr.data.fill_(value)
        loader.refresh()
        for batch in [*loader, loader([1])]:
            for key in ('x', 'y', 'edge_attr'):
                assert (batch[key] == value).all()


def test_refresh_in_the_middle_of_an_epoch(device: torch.device, apart: Apart, data: Data) -> None:
    loader = apart(data, [3, 2], device=device, **{**ARGS, 'batch_size': 4})
    data.x.data.fill_(-1)
    loader.refresh()
    ahead = 3 if device.type == 'cuda' else 0
    for k, batch in enumerate(loader):
        assert (batch.x == batch.x[0, 0]).all()  # No batch mixes two states.
        assert k - 1 - ahead <= batch.x[0, 0] <= k - 1
        data.x.data.fill_(k)
        loader.refresh()
        data.x.data.fill_(-100)  # All rows are copied before the call returns.


def test_refresh_of_many_iterators(device: torch.device, apart: Apart, data: Data) -> None:
    loader = apart(data, [3, 2], device=device, cache_ratio=0.3, **{**ARGS, 'batch_size': 3})
    for batches in zip(*(iter(loader) for _ in range(3)), strict=True):
        loader.refresh()
        for batch in batches:
            assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_attributes_that_begin_to_learn(device: torch.device, apart: Apart, data: Data) -> None:
    loader = apart(data, [3, 2], device=device, **ARGS)
    assert not next(iter(loader)).x.requires_grad
    data.x.requires_grad_()
    batch = next(iter(loader))
    batch.x.sum().backward()
    assert data.x.grad is not None
    assert data.x.grad.sum() == batch.x.numel()


def test_weights_are_read_once(device: torch.device) -> None:
    data = random_data(30, 200)
    data.edge_index = data.edge_index[:, data.edge_index[1].argsort(stable=True)]
    data.weight = torch.rand(200, dtype=torch.float64)
    args = {'weight_attr': 'weight', 'batch_size': 9, 'seed': 1, 'device': device}
    wanted = list(FastNeighborLoader(data, [2, 2], **args))
    loader = FastNeighborLoader(data, [2, 2], **args)
    data.weight.fill_(float('nan'))
    for a, b in zip(wanted, loader, strict=True):
        assert torch.equal(a.e_id, b.e_id)


def test_attributes_that_come_and_go(device: torch.device, apart: Apart, data: Data) -> None:
    loader = apart(data, [3, 2], device=device, **ARGS)
    list(loader)
    data.z = torch.randn(200, 2)
    del data.y
    for batch in loader:
        assert 'y' not in batch
        assert torch.equal(batch.z.cpu(), data.z[batch.n_id.cpu()])
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_other_numbers_of_nodes(device: torch.device, data: Data) -> None:
    loader = FastNeighborLoader(data, [3, 2], device=device, **ARGS)
    next(iter(loader))
    for key in ('x', 'y', 'train_mask'):
        data[key] = data[key][:50]
    with pytest.raises(ValueError, match=r"'data\.\w+' must have 200 rows"):
        next(iter(loader))


def test_nothing_is_matched_where_features_are_at_hand(device: torch.device, data: Data) -> None:
    loader = FastNeighborLoader(data, [3, 2], features='device', device=device, **ARGS)
    list(loader)
    assert loader.stats.match_degree is None
    assert loader.stats.bytes_moved == 0


def test_budget() -> None:
    budget = Budget(torch.device('cpu'), None)
    budget.left = 100
    assert budget.take('auto', 60)
    assert not budget.take('auto', 60)
    assert budget.take('auto', 40)
    assert budget.take('device', 1000)
    assert not budget.take('auto', 1)
    assert not budget.take('host', 0)


@pytest.mark.parametrize('limit', [0, 7000, 10**9])
def test_larger_than_a_limit(device: torch.device, data: Data, limit: int) -> None:
    wanted = list(FastNeighborLoader(data, [3, 2], **ARGS))
    loader = FastNeighborLoader(
        data, [3, 2], max_device_bytes=limit, reorder=False, device=device, **ARGS
    )
    assert all(map(equal, wanted, loader))
    if device.type == 'cuda':
        assert loader._core.graph.col.is_cuda == (limit > 10_000)
        # The graph does not fit in 7000 bytes, x, y and the mask do.
        stats = loader.stats
        row_bytes = 0 if limit > 0 else 20 + 8 + 1
        assert stats.bytes_moved + stats.bytes_saved_by_match == row_bytes * stats.num_nodes


@pytest.mark.parametrize('place', ['host', 'device'])
@pytest.mark.parametrize('kind', ['directional', 'induced'])
def test_topology(device: torch.device, data: Data, place: str, kind: str) -> None:
    data.weight = torch.rand(1500)
    args = {**ARGS, 'subgraph_type': kind, 'weight_attr': 'weight'}
    wanted = list(FastNeighborLoader(data, [3, 2], topology='device', device=device, **args))
    loader = FastNeighborLoader(data, [3, 2], topology=place, reorder=False, device=device, **args)
    assert all(map(equal, wanted, loader))


def test_shared_and_pinned_memory_is_not_copied(device: torch.device, data: Data) -> None:
    if device.type == 'cpu':
        pytest.skip('host memory is locked for a GPU')
    data.x = data.x.share_memory_()
    data.z = data.x.clone().pin_memory()
    loaders = [
        FastNeighborLoader(data, [3, 2], features='host', device=device, **ARGS) for _ in range(2)
    ]
    for key in ('x', 'z'):
        data[key].data.neg_()  # No version counter sees it: a copy would stay as it was.
    first, second = loaders
    for batch in first:
        for key in ('x', 'z'):
            assert torch.equal(batch[key].cpu(), data[key][batch.n_id.cpu()])

    def release() -> None:
        gc.collect()
        torch.cuda.synchronize()
        keep_until_read(device, torch.zeros(1).pin_memory())  # drops what has been read

    assert data.x.is_pinned()
    del loaders, first
    release()
    assert data.x.is_pinned()
    for batch in second:
        assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])
    del second
    release()
    assert not data.x.is_pinned()
