"""Which seeds each batch gets, with one replica and with several."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from pyg_fast.loader import FastNeighborLoader
from tests.loader._graphs import equal, random_data
from tests.loader._parts import mix_seeds

GRAPH = random_data(300, 0)


def loader_of(count: int, size: int, **kwargs: Any) -> FastNeighborLoader:
    nodes = torch.arange(count)
    return FastNeighborLoader(GRAPH, [1], size, input_nodes=nodes, seed=3, **kwargs)


@given(
    count=st.integers(0, 300),
    size=st.integers(1, 40),
    num_replicas=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(deadline=None)
def test_no_seed_is_lost_or_repeated(
    count: int, size: int, num_replicas: int, shuffle: bool, drop_last: bool
) -> None:
    steps = count // (size * num_replicas) if drop_last else -(-count // (size * num_replicas))
    options = {'num_replicas': num_replicas, 'shuffle': shuffle, 'drop_last': drop_last}
    if num_replicas > 1 and steps * num_replicas > count:
        with pytest.raises(ValueError, match='input_nodes'):
            loader_of(count, size, rank=0, **options)
        return
    parts = []
    for rank in range(num_replicas):
        loader = loader_of(count, size, rank=rank, **options)
        parts.append([batch.input_id for batch in loader])
        assert len(parts[-1]) == len(loader) == steps
    batches = [part[step] for step in range(steps) for part in parts]
    order = torch.cat([torch.empty(0, dtype=torch.long), *batches])
    assert order.unique().numel() == order.numel()
    assert order.numel() == (steps * num_replicas * size if drop_last else count)
    sizes = [batch.numel() for batch in batches]
    assert all(0 < each <= size for each in sizes)
    if num_replicas > 1 and sizes:
        assert max(sizes) - min(sizes) <= 1
    if not shuffle:
        assert torch.equal(order, torch.arange(order.numel()))


def test_epochs_differ_and_come_again() -> None:
    loader, orders = loader_of(50, 7, shuffle=True), []
    for epoch in (0, 1, 0):
        loader.epoch = epoch
        orders.append(torch.cat([batch.input_id for batch in loader]))
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])


def test_mixed() -> None:
    numbers = {mix_seeds(a, b) for a in range(50) for b in range(50)}
    assert len(numbers) == 2500
    assert all(0 <= number < 2**63 for number in numbers)
    assert mix_seeds(-5, 2**70) == mix_seeds(-5, 2**70)
    ones = sum(bin(number).count('1') for number in numbers) / 2500
    assert 31 < ones < 32


def test_replicas_share_the_work_of_one_epoch() -> None:
    data = random_data()
    args = {'batch_size': 5, 'shuffle': True, 'seed': 3}
    loaders = [
        FastNeighborLoader(data, [2, 2], rank=rank, num_replicas=3, **args) for rank in range(3)
    ]
    for _ in range(2):
        parts = [list(loader) for loader in loaders]
        assert [len(part) for part in parts] == [4, 4, 4]
        nodes = torch.cat([b.n_id[: b.batch_size] for part in parts for b in part])
        assert torch.equal(nodes.sort()[0], torch.arange(60))
    alone = FastNeighborLoader(data, [2, 2], rank=0, num_replicas=1, **args)
    plain = FastNeighborLoader(data, [2, 2], **args)
    assert all(map(equal, alone, plain))


@pytest.mark.parametrize('kind', ['nodes', 'numpy', 'mask'])
def test_seeds_are_not_the_users_memory(device: torch.device, kind: str) -> None:
    seeds = torch.arange(50)
    if kind == 'mask':
        seeds = torch.arange(60) < 50
    given = seeds.numpy() if kind == 'numpy' else seeds
    input_id = torch.arange(50) + 100
    loader = FastNeighborLoader(
        random_data(), [3], 10, given, input_id=input_id, seed=0, device=device
    )
    wanted = list(loader)
    loader.epoch = 0
    seeds.fill_(1 if kind == 'mask' else 10**9)
    input_id.fill_(-1)
    assert all(map(equal, wanted, loader))
    assert torch.cat([batch.input_id.cpu() for batch in wanted]).equal(torch.arange(50) + 100)


@pytest.mark.parametrize('as_numpy', [False, True])
def test_what_a_sampler_fills_again_and_again(device: torch.device, as_numpy: bool) -> None:
    positions = torch.arange(4)

    def refilled(memory: object) -> object:
        for k in range(15):
            positions.copy_(torch.arange(4 * k, 4 * k + 4))
            yield memory
            positions.fill_(10**9)

    class Sampler:
        def __len__(self) -> int:
            return 15

        def __iter__(self) -> object:
            return refilled(positions.numpy() if as_numpy else positions)

    loader = FastNeighborLoader(
        random_data(), [3], batch_sampler=Sampler(), reorder=True, device=device
    )
    batches = sorted(loader, key=lambda batch: int(batch.input_id[0]))
    assert torch.cat([batch.input_id.cpu() for batch in batches]).equal(torch.arange(60))
    assert torch.cat([batch.n_id[:4].cpu() for batch in batches]).equal(torch.arange(60))
