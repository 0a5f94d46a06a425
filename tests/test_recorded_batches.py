"""Batches made by a graph in the memory of a captured step: those that the loader makes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GraphConv, global_mean_pool

import pyg_fast
from pyg_fast._batches.filling import Filling, StaticNumbers
from pyg_fast._batches.inputs import StaticBatch, _values_of
from pyg_fast._batches.record import recorder_of
from pyg_fast.loader import GraphLoader
from pyg_fast.loader._selection import Selection
from tests._replays import Replays
from tests.loader._small_graphs import NAMES, OF_PAIRS, check_equal, molecules, random_graphs

# Those with other rows than one for each node, edge or graph cannot be in a captured step.
OWN_ROWS = ('rings', 'ring_index', 'small_index', 'face', 'parts', 'complex')
RECORDED = [name for name in NAMES if name not in (*OF_PAIRS, *OWN_ROWS)]


class Shifted(Data):
    """With increments that are tensors."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key == 'half':
            return torch.tensor(2 + self.num_nodes)
        if key == 'wide':
            return torch.tensor([[1, self.num_nodes]])
        return super().__inc__(key, value, *args, **kwargs)


class Fillings:
    """Fills the memory of each size as a captured step does."""

    def __init__(self, loader: GraphLoader) -> None:
        device = loader._collated.device
        self.recorder = Replays() if device.type == 'cpu' else recorder_of(device)
        self._collated = loader._collated
        self.by_size: dict[tuple, tuple[StaticBatch, Filling]] = {}

    def fill(self, draw: Any, batch: Batch) -> StaticBatch:
        """The memory of the size of a batch, with that of the draw."""
        graphs = Selection(draw)
        key = tuple(graphs.num_rows)
        if key not in self.by_size:
            inputs = StaticBatch(batch)
            self.by_size[key] = inputs, Filling(self._collated, inputs, self.recorder, graphs)
        inputs, filling = self.by_size[key]
        filling(graphs)
        return inputs


def values_in(inputs: StaticBatch) -> dict[str, Any]:
    return dict(_values_of(inputs.view(sized=False)))


def tensors_of(batch: Batch) -> dict[str, Any]:
    """The values of a batch that a step keeps: no strings and other objects."""
    return {
        key: value for key, value in _values_of(batch).items()
        if key == 'num_nodes'
        or (leaves := tree_leaves(value)) and all(isinstance(leaf, Tensor) for leaf in leaves)
    }  # fmt: skip


def padded(loader: GraphLoader, epochs: int) -> Iterator[tuple[Any, Batch]]:
    for _ in range(epochs):
        for draw in loader._draw():
            if draw.padding is not None:
                yield draw, loader._make_batch(draw)


@pytest.mark.parametrize('order', ['sorted', 'dataset'])
@pytest.mark.parametrize('is_shifted', [True, False])
def test_they_are_those_of_the_loader(device: torch.device, order: str, is_shifted: bool) -> None:
    """To the bit: attributes of every kind, structure, padding and masks."""
    graphs = random_graphs(48, RECORDED, cls=Shifted if is_shifted else Data)
    loader = GraphLoader(
        graphs, 8, True, ['x', 'name', 'nested'], ['y'], device=device, pad='buckets',
        edge_order=order,
    )  # fmt: skip
    fillings, count = Fillings(loader), 0
    for draw, batch in padded(loader, 3):
        rng = torch.get_rng_state()
        found, wanted = values_in(fillings.fill(draw, batch)), tensors_of(batch)
        assert {'x', 'half', 'x_ptr', 'name_batch', 'nested_ptr', 'edge_mask'} <= set(wanted)
        check_equal(found, wanted)
        assert torch.equal(torch.get_rng_state(), rng)
        count += 1
    assert 1 < len(fillings.by_size) < count / 2
    if device.type == 'cpu':
        assert fillings.recorder.recorded[StaticNumbers] == len(fillings.by_size)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = GraphConv(4, 4), nn.Linear(4, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = self.conv(batch.x, batch.edge_index)
        return self.last(global_mean_pool(x, batch.batch)).squeeze(-1)


def loss_fn(out: Tensor, batch: Batch) -> Tensor:
    return (out - batch.y.view(-1)).square().mean()


def captured(loader: GraphLoader) -> Any:
    torch.manual_seed(0)
    model = Net().to(loader.device)
    step = pyg_fast.capture(model, loader, torch.optim.SGD(model.parameters(), 0.1, fused=True),
                            loss_fn)  # fmt: skip
    if loader.device.type == 'cpu':
        step._recorder = Replays()
        step.reset()
    return step


class Counting(GraphLoader):
    """Counts the batches that it makes."""

    num_made = 0

    def _make_batch(self, draw: Any) -> Any:
        self.num_made += 1
        return super()._make_batch(draw)


class Scaled(Counting):
    """Gives other batches than a GraphLoader."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            batch.y = 2 * batch.y
            yield batch


def test_what_the_loader_makes(device: torch.device) -> None:
    """The first batches of a size, and those without padding; all of a loader with other batches
    than a GraphLoader."""
    graphs = molecules(44)
    loader = Counting(graphs, 8, device=device, pad='buckets')
    step = captured(loader)
    assert len(list(step.epoch())) == 6
    first = loader.num_made
    assert first <= 1 + len(step._slots) + step.num_eager
    list(step.epoch())  # The second batch of the size of the first step is recorded.
    assert loader.num_made - first <= 2
    before = loader.num_made
    assert len(list(step.epoch())) == 6
    assert loader.num_made - before == 1 + loader.num_unpadded // 3
    assert loader.epoch == 3
    other = Scaled(graphs, 8, device=device, pad='buckets')
    twice = captured(other)
    start, *_, end = [loss for _ in range(3) for loss in twice.epoch()]
    assert start > end
    assert other.num_made == 3 * 6
    step.reset()
    step.loader = GraphLoader(graphs[::-1], 8, device=device, pad='buckets')
    plain = captured(step.loader)
    step.model.load_state_dict(plain.model.state_dict())
    for _ in range(2):
        losses = list(step.epoch()), list(plain.epoch())
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)


def test_batches_of_other_sizes(device: torch.device) -> None:
    """Those of a sampler of one's own, whose buckets its first epoch shows."""
    sampler = [[k, k + 1, *range(k + 2, k + 2 + (k % 3 == 0))] for k in range(20)]
    loader = Counting(molecules(44), batch_sampler=sampler, device=device, pad='buckets')
    step = captured(loader)
    losses = [list(step.epoch()) for _ in range(4)]
    assert loader.num_made < 4 * 20
    assert all(len(each) == 20 for each in losses)


def test_attributes_of_a_batch_that_was_changed(device: torch.device) -> None:
    """As when the loader makes the batch: sizes and attributes must be those of the first one."""
    loader = GraphLoader(molecules(16), 8, device=device, pad='buckets')
    step = captured(loader)
    for batch in [*loader, *loader]:
        batch.more = batch.x
        step(batch)
    with pytest.raises(ValueError, match="'batch' must have the attributes"):
        list(step.epoch())


# On a GPU ---------------------------------------------------------------------------------------
def test_many_batches_without_a_wait(cuda: torch.device) -> None:
    """The host is far ahead, on another stream than that of the recording: memory that copies and
    graphs read is not written before."""
    loader = GraphLoader(molecules(512), 8, True, device=cuda, pad='buckets')
    fillings, draws = Fillings(loader), []
    for draw, batch in padded(loader, 1):
        fillings.fill(draw, batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        with torch.cuda.stream(torch.cuda.Stream(cuda)):
            torch.cuda._sleep(2_000_000_000)
            for draw in loader._draw():
                key = tuple(Selection(draw).num_rows)
                if draw.padding is not None and key in fillings.by_size:
                    inputs = fillings.fill(draw, None)  # type: ignore[arg-type]
                    leaves = [t.clone() for t in inputs._leaves if isinstance(t, Tensor)]
                    draws.append((draw, leaves))
    finally:
        torch.cuda.set_sync_debug_mode('default')
    torch.cuda.synchronize()
    assert len(draws) > 32
    for draw, leaves in draws:
        wanted = [t for t in tree_leaves(tensors_of(loader._make_batch(draw)))
                  if isinstance(t, Tensor)]  # fmt: skip
        for a, b in zip(leaves, wanted, strict=True):
            assert torch.equal(a, b)


def test_random_numbers_of_a_gpu(cuda: torch.device) -> None:
    loader = GraphLoader(molecules(32), 8, device=cuda, pad='buckets')
    fillings, before = Fillings(loader), torch.cuda.get_rng_state(cuda)
    for draw, batch in padded(loader, 2):
        fillings.fill(draw, batch)
    assert torch.equal(torch.cuda.get_rng_state(cuda), before)


def test_pinned_memory_is_read_by_the_loader(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('pyg_fast.loader._place.Budget.take', lambda *args: False)
    loader = Counting(molecules(16), 8, device=cuda, pad='buckets')
    step = captured(loader)
    for _ in range(3):
        list(step.epoch())
    assert loader.num_made == 3 * 2
