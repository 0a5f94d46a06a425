"""`capture` of batches of small graphs: a step with padding is that of PyG's loop without."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    BatchNorm,
    GATConv,
    GCNConv,
    GINEConv,
    GPSConv,
    GraphNorm,
    HeteroBatchNorm,
    global_mean_pool,
)
from torch_geometric.nn.aggr import SoftmaxAggregation

import pyg_fast
from pyg_fast._batches.filling import StaticNumbers
from pyg_fast._batches.inputs import StaticBatch
from pyg_fast._batches.norms import Level, Masks, masked
from pyg_fast._batches.record import Direct
from pyg_fast.loader import GraphLoader
from tests._replays import Replays
from tests.loader._small_graphs import molecules

SIZE = 8  # of batches


@pytest.fixture(autouse=True)
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run on padded batches on a CPU, too, where they would do without."""
    monkeypatch.setattr(Direct, 'pads', True)


@pytest.fixture(scope='module')
def graphs() -> list[Data]:
    """Of 44 graphs the last batch is smaller."""
    found = molecules(44)
    for data in found:
        for key in ('x', 'edge_attr', 'y'):
            data[key] = data[key].double()
    return found


class Model(nn.Module):
    """Batch norms of edges, nodes and graphs, and layers that ask how many graphs there are."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.bond, self.bond_norm = nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None)
        self.conv = GINEConv(
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        )
        self.norm, self.pool = GraphNorm(4), SoftmaxAggregation(learn=True)
        self.virtual = nn.Embedding(1, 4)
        self.graph_norm, self.last = BatchNorm(4), nn.Linear(4, 1)
        self.unused = nn.Linear(2, 2)
        self.dropout = dropout

    def forward(self, batch: Batch) -> Tensor:
        num_graphs = batch.batch[-1].item() + 1
        each = self.virtual(batch.batch.new_zeros(num_graphs))
        x = self.conv(
            batch.x + each[batch.batch], batch.edge_index,
            self.bond_norm(self.bond(batch.edge_attr)),
        )  # fmt: skip
        x = F.dropout(self.norm(x, batch.batch), self.dropout, self.training)
        pooled = self.pool(x, batch.batch) + global_mean_pool(x, batch.batch, batch.num_graphs)
        return self.last(self.graph_norm(pooled)).squeeze(-1)


def loss_fn(out: Tensor, batch: Batch) -> Tensor:
    assert out.size(0) == batch.y.size(0) == batch.num_graphs
    return F.mse_loss(out, batch.y.view(-1))


def pad(graphs: list[Data], device: torch.device | str = 'cpu', **kwargs: Any) -> GraphLoader:
    return GraphLoader(graphs, SIZE, device=device, pad='buckets', **kwargs)


def sgd(model: nn.Module, lr: float = 0.125, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.5, **kwargs)


def replayed(step: Any) -> Any:
    """The step, with graphs that are recorded also on a CPU."""
    if step._device.type == 'cpu':
        step._recorder = Replays()
        step.reset()
    return step


def pygs_loop(
    model: nn.Module, loader: Any, optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, Batch], Tensor] = loss_fn,
) -> Iterator[Tensor]:  # fmt: skip
    for batch in loader:
        batch = batch.to(next(model.parameters()).device)
        optimizer.zero_grad()
        value = loss(model(batch), batch)
        value.backward()
        optimizer.step()
        yield value.detach()


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Parameters, gradients, buffers."""
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=1e-10, atol=1e-10)
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None), name
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-10)


def assert_close(a: list[Tensor], b: list[Tensor]) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('how', ['direct', 'replayed', 'accelerated'])
def test_like_pygs_loop(graphs: list[Data], device: torch.device, how: str) -> None:
    """With a schedule of the learning rate, weight decay, and an unused parameter."""
    ours = Model().double().to(device)
    pygs = copy.deepcopy(ours)
    if how == 'accelerated':
        pyg_fast.accelerate(ours)
    optimizers = [sgd(ours, fused=how != 'direct', weight_decay=0.25), sgd(pygs, weight_decay=0.25)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    loader = pad(graphs, device, shuffle=True, generator=torch.Generator().manual_seed(1))
    plain = DataLoader(graphs, SIZE, shuffle=True, generator=torch.Generator().manual_seed(1))
    step = pyg_fast.capture(ours, loader, optimizers[0], loss_fn)
    if how != 'direct':
        step = replayed(step)
    for _ in range(3):
        losses = [list(step.epoch()), list(pygs_loop(pygs, plain, optimizers[1]))]
        assert_close(*losses)
        assert_same(ours, pygs)
        assert all(optimizer.param_groups[0]['lr'] == schedules[1].get_last_lr()[0]
                   for optimizer in optimizers)  # fmt: skip
        for schedule in schedules:
            schedule.step()
    assert step.num_eager == 3 + loader.num_unpadded
    assert {id(loss) for loss in losses[0]} == {*map(id, set(losses[0]))}
    if how != 'direct' and device.type == 'cpu':
        recorder = step._recorder
        assert 1 < recorder.recorded[StaticNumbers] <= recorder.recorded[StaticBatch]
        assert recorder.recorded[StaticBatch] <= len(loader.buckets)
        assert recorder.replayed[StaticBatch] == 3 * 6 - step.num_eager - 1
        # The first batch of a size comes from the loader, and the one of the first step.
        made = recorder.recorded[StaticBatch] + 1
        assert recorder.replayed[StaticNumbers] == 3 * 6 - step.num_eager - made


class GPS(nn.Module):
    """Attention over the graphs of a batch."""

    def __init__(self, num_layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            GPSConv(
                4, GINEConv(nn.Linear(4, 4), edge_dim=3), heads=2, act='elu',
                attn_kwargs={'dropout': dropout},
            ) for _ in range(num_layers)
        )  # fmt: skip
        self.last = nn.Linear(4, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for conv in self.convs:
            x = conv(x, batch.edge_index, batch.batch, edge_attr=batch.edge_attr)
        return self.last(global_mean_pool(x, batch.batch)).squeeze(-1)


def test_gps(graphs: list[Data], device: torch.device) -> None:
    """PyG's waits for the size of the largest graph; the accelerated one does not."""
    pygs = GPS().double().to(device)
    ours = pyg_fast.accelerate(copy.deepcopy(pygs))
    plain, loader = DataLoader(graphs, SIZE), pad(graphs, device)
    step = replayed(pyg_fast.capture(ours, loader, sgd(ours, fused=True), loss_fn))
    optimizer = sgd(pygs)
    for _ in range(2):
        assert_close(list(step.epoch()), list(pygs_loop(pygs, plain, optimizer)))
        assert_same(ours, pygs)
    assert step.num_eager == 2 + loader.num_unpadded
    if device.type == 'cpu':
        assert step._recorder.replayed[StaticBatch] > 0
        step = replayed(pyg_fast.capture(pygs, loader, sgd(pygs, fused=True), loss_fn))
        with pytest.raises(RuntimeError, match='not permitted when stream is capturing'):
            list(step.epoch())


def test_dropout_of_gps(graphs: list[Data], device: torch.device) -> None:
    """Each replay drops other pairs; the check does without."""
    model = pyg_fast.accelerate(GPS(dropout=0.5).double().to(device))
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)
    step = replayed(pyg_fast.capture(model, pad(graphs, device), optimizer, loss_fn))
    batch = next(batch for batch in step.loader if batch.num_graphs > SIZE)
    losses = [step(batch).item() for _ in range(4)]
    assert len({*losses}) == 4


def test_a_step_leaves_no_trace_of_its_recording(graphs: list[Data], device: torch.device) -> None:
    """Recording runs a step: parameters, buffers, the state of the optimizer and random numbers are
    those before. With dropout the losses are those of steps that are not recorded."""
    results = []
    for records in (True, False):
        torch.manual_seed(2)
        model = Model(dropout=0.5).double().to(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.125, fused=True)
        step = pyg_fast.capture(model, pad(graphs, device), optimizer, loss_fn)
        if records:
            step = replayed(step)
            losses = list(step.epoch())
        elif device.type == 'cuda':
            pytest.skip('dropout draws other numbers in a graph')
        else:
            losses = list(step.epoch())
        results.append((losses, model, optimizer.state_dict()['state'], torch.get_rng_state()))
    (losses, model, state, rng), (others, other, other_state, other_rng) = results
    torch.testing.assert_close(losses, others, rtol=1e-6, atol=1e-6)  # of a rate in float32
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state, other_state, rtol=1e-5, atol=1e-6)
    assert torch.equal(rng, other_rng)
    assert losses[0] != losses[1]


def test_gradients_without_an_optimizer(graphs: list[Data], device: torch.device) -> None:
    """They add up over sizes of batches, and are cleared and clipped as usual."""
    results = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Model().double().to(device)
        optimizer = sgd(model)
        if is_ours:
            step = replayed(pyg_fast.capture(model, pad(graphs, device), None, loss_fn))
            batches: Any = step.loader
        else:
            step = lambda batch, model=model: loss_fn(model(batch), batch).backward()  # noqa: E731
            batches = GraphLoader(graphs, SIZE, device=device)
        for number, batch in enumerate([*batches, *batches]):
            step(batch)
            if number % 3 == 2:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad(set_to_none=number < 6)
        results.append((model, norm))
    assert_same(results[0][0], results[1][0])
    assert_close([results[0][1]], [results[1][1]])


def test_clipping_by_a_hook(graphs: list[Data], device: torch.device) -> None:
    losses = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Model().double().to(device)
        optimizer = sgd(model, fused=True)

        def clip(*_: Any, model: nn.Module = model) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        optimizer.register_step_pre_hook(clip)
        if is_ours:
            step = replayed(pyg_fast.capture(model, pad(graphs, device), optimizer, loss_fn))
            losses.append(list(step.epoch()))
        else:
            losses.append(list(pygs_loop(model, DataLoader(graphs, SIZE), optimizer)))
    assert_close(*losses)


def test_scaler(graphs: list[Data], device: torch.device) -> None:
    """Its scale changes as in a loop; a step with an infinite gradient is left out."""
    graphs = [data.clone() for data in graphs]
    graphs[2 * SIZE].y = torch.full((1, 1), float('inf')).double()
    results = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.125, fused=True)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=2)
        seen = []

        def forward(model: nn.Module, batch: Batch) -> Tensor:
            batch.x, batch.edge_attr = batch.x.float(), batch.edge_attr.float()
            return model(batch)

        def loss(out: Tensor, batch: Batch) -> Tensor:
            return F.mse_loss(out, batch.y.view(-1).float())

        if is_ours:
            step = replayed(pyg_fast.capture(
                model, pad(graphs, device), optimizer, loss, forward=forward, scaler=scaler
            ))  # fmt: skip
            for batch in [*step.loader, *step.loader]:
                step(batch)
                seen.append(scaler.get_scale())
        else:
            for batch in [*GraphLoader(graphs, SIZE, device=device)] * 2:
                optimizer.zero_grad()
                scaler.scale(loss(forward(model, batch.clone()), batch)).backward()
                scaler.step(optimizer)
                scaler.update()
                seen.append(scaler.get_scale())
        results.append((seen, model.state_dict()))
    assert results[0][0] == results[1][0]
    assert len(set(results[0][0])) > 2
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-3)


def test_what_is_replaced_is_recorded_anew(graphs: list[Data], device: torch.device) -> None:
    """A mode, a frozen parameter, parameters, and the state of the optimizer."""
    results = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Model().double().to(device)
        optimizer = sgd(model, fused=True)
        step = replayed(pyg_fast.capture(model, pad(graphs, device), optimizer, loss_fn))
        plain = GraphLoader(graphs, SIZE, device=device)
        run = step.epoch if is_ours else lambda: pygs_loop(model, plain, optimizer)  # noqa: B023
        losses = list(run())
        model.eval()
        losses += list(run())
        model.train()
        model.conv.nn[0].weight.requires_grad_(False)
        losses += list(run())
        with torch.no_grad():
            model.last.weight.mul_(2)  # A replay reads it.
        losses += list(run())
        model.last.weight.data = model.last.weight.detach() * 2
        losses += list(run())
        model.bond_norm = nn.BatchNorm1d(4, affine=False).double().to(device)
        losses += list(run())
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]['momentum'] = 0.25
        results.append([*losses, *run()])
    assert_close(*results)


# The check --------------------------------------------------------------------------------------
class Layered(nn.Module):
    """A model of one layer, and code after it."""

    def __init__(self, layer: nn.Module, after: Any = None) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), layer, nn.Linear(4, 1)
        self.after = after

    def forward(self, batch: Batch) -> Tensor:
        x = self.layer(self.first(batch.x))
        if self.after is not None:
            x = self.after(x, batch)
        return self.last(global_mean_pool(x, batch.batch)).squeeze(-1)


class OverRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x)[0]


@pytest.mark.parametrize(
    ('layer', 'after', 'loss', 'text'),
    [
        (OverRows(), None, loss_fn, r"the output of the model, by the layer 'layer' \(OverRows\)"),
        (Attention(), None, loss_fn, r"by the layer 'layer.inner' \(MultiheadAttention\)"),
        (nn.Identity(), lambda x, batch: x * batch.num_graphs, loss_fn,
         r"by the code before the layer 'last' \(Linear\)"),
        (nn.Identity(), None, lambda out, batch: out.mean() + batch.x.square().mean(),
         'the loss, by the code after the layers'),
        (nn.Identity(), lambda x, batch: x * (1e-9 + x.detach() * 0 + batch.x.square().sum(
            1, keepdim=True).add(0 * x.sum(1, keepdim=True)).sqrt()), loss_fn,
         "the gradient of 'first.(weight|bias)'"),
    ],
)  # fmt: skip
def test_a_layer_that_mixes_rows_is_named(
    graphs: list[Data], layer: nn.Module, after: Any, loss: Any, text: str
) -> None:
    model = Layered(layer, after).double()
    before = copy.deepcopy(model)
    step = pyg_fast.capture(model, pad(graphs), sgd(model), loss)
    batch = next(iter(step.loader))
    rng = torch.get_rng_state()
    with pytest.raises(ValueError, match=text):
        step(batch)
    assert_same(model, before)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(not module._forward_hooks for module in model.modules())


def test_the_check_is_without_dropout_and_autocast(graphs: list[Data]) -> None:
    attention, seen = Attention(), []
    model = Model(dropout=0.9).float()
    model.extra = nn.ModuleList([attention, nn.Dropout(0.9)])

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        batch.x, batch.edge_attr = batch.x.float(), batch.edge_attr.float()
        with torch.autocast('cpu', torch.bfloat16):
            seen.append(torch.is_autocast_enabled('cpu'))
            batch.x = model.extra[1](batch.x) + F.dropout(batch.x.t().contiguous(), 0.5).t()
            return model(batch).float()

    step = pyg_fast.capture(
        model, pad(graphs), sgd(model), lambda out, batch: out.square().mean(), forward=forward
    )
    next(step.epoch())
    assert seen == [False, False, True]
    assert attention.inner.dropout == 0.5
    assert model.extra[1].p == model.dropout == 0.9
    with torch.autocast('cpu', torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_random_numbers_of_a_model_need_no_check(graphs: list[Data]) -> None:
    model = Layered(nn.Identity(), lambda x, batch: x + torch.randn_like(x)).double()
    options = (model, pad(graphs), sgd(model), loss_fn)
    with pytest.raises(ValueError, match='pass check=False if only random numbers differ'):
        next(pyg_fast.capture(*options).epoch())
    assert next(pyg_fast.capture(*options, check=False).epoch()).isfinite()


def test_what_differs_by_rounding_is_compared_in_float64(
    graphs: list[Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 a ReLU may take the other side of its kink. Here a layer is coarse on purpose."""

    class Coarse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer('scale', torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            noise = 1e-2 * torch.arange(len(x)).flip(0)[:, None]
            return self.scale * (x + noise if x.dtype == torch.float32 else x)

    graphs = [data.clone() for data in graphs]
    for data in graphs:
        data.x = data.x.float()
    model = Layered(Coarse())
    before = copy.deepcopy(model)
    loss = lambda out, batch: out.square().mean()  # noqa: E731
    step = pyg_fast.capture(model, pad(graphs), torch.optim.SGD(model.parameters(), 0.0), loss)
    list(step.epoch())
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert {t.dtype for t in model.state_dict().values()} == {torch.float32}
    assert torch.get_default_dtype() == torch.float32
    model.layer.forward = lambda x: x.float() - x.float().mean(0)  # It takes no float64.
    step = pyg_fast.capture(model, pad(graphs), torch.optim.SGD(model.parameters(), 0.0), loss)
    with pytest.raises(ValueError, match=r"by the layer 'layer' \(Coarse\)"):
        next(step.epoch())


def test_a_loss_of_nodes_uses_the_mask(graphs: list[Data], device: torch.device) -> None:
    """Outputs of several kinds, a loss that is a module with parameters, labels of nodes."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.norm = nn.Parameter(torch.ones(())), nn.BatchNorm1d(4)

        def forward(self, out: tuple[Tensor, dict[str, Tensor]], batch: Batch) -> Tensor:
            nodes, others = out
            error = (self.norm(nodes) - batch.x).square().mean(1)
            error = (error * batch.node_mask).sum() / batch.node_mask.sum()
            return self.weight.square() * (error + others['pooled'].square().mean())

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = GINEConv(nn.Linear(4, 4), edge_dim=3), nn.BatchNorm1d(4)

        def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
            x = self.norm(self.conv(batch.x, batch.edge_index, batch.edge_attr))
            return x, {'pooled': global_mean_pool(x, batch.batch)}

    results = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model, loss = Nodes().double().to(device), Weighted().double().to(device)
        both = nn.ModuleList([model, loss])
        optimizer = sgd(both, fused=True)
        if is_ours:
            step = replayed(pyg_fast.capture(model, pad(graphs, device), optimizer, loss))
            losses = list(step.epoch())
        else:

            def masked_loss(out: Any, batch: Batch, loss: Any = loss) -> Tensor:
                batch.node_mask = batch.x.new_ones(batch.num_nodes)
                return loss(out, batch)

            losses = list(pygs_loop(model, DataLoader(graphs, SIZE), optimizer, masked_loss))
        results.append((losses, both))
    assert_close(results[0][0], results[1][0])
    assert_same(results[0][1], results[1][1])


# Batch norms ------------------------------------------------------------------------------------
@given(
    st.integers(2, 9), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.booleans(),
    st.sampled_from([0.1, None]), st.sampled_from([torch.float64, torch.bfloat16]), st.booleans(),
)  # fmt: skip
def test_batch_norm_of_real_rows(
    device: torch.device, count: int, padding: int, num_dims: int, affine: bool, tracks: bool,
    momentum: float | None, dtype: torch.dtype, compiles: bool,
) -> None:  # fmt: skip
    cls = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d)[num_dims]
    options = {'affine': affine, 'track_running_stats': tracks, 'momentum': momentum}
    norm = cls(3, **options).to(device, torch.float64 if dtype == torch.float64 else torch.float32)
    twin = copy.deepcopy(norm)
    x = torch.randn(count + padding, 3, *[2] * num_dims, dtype=dtype, device=device)
    x[count:] = torch.tensor([float('nan'), float('inf')])[torch.randint(2, (padding,))].view(
        -1, *[1] * (x.dim() - 1)
    )
    mask = torch.arange(count + padding, device=device) < count
    others = Level(torch.zeros(99), torch.tensor(99))
    a, b = x[:count].clone().requires_grad_(), x.clone().requires_grad_()
    for training in (True, True, False):
        norm.train(training), twin.train(training)
        out = norm(a)
        with masked({twin: 'norm'}, Masks(others, Level(~mask, mask.sum()), others)):
            assert isinstance(twin, cls)
            with mock.patch.object(torch.compiler, 'is_compiling', return_value=compiles):
                ours = twin(b)
        assert ours.dtype == out.dtype
        tolerance = 1e-10 if dtype == torch.float64 else 2e-2
        torch.testing.assert_close(ours[:count], out, rtol=tolerance, atol=tolerance)
        weights = torch.randn_like(out)
        grads = [
            torch.autograd.grad((y * weights).sum(), [x, *each.parameters()])
            for y, x, each in ((out, a, norm), (ours[:count], b, twin))
        ]  # fmt: skip
        if dtype == torch.float64:
            right, found = grads[0], [grads[1][0][:count], *grads[1][1:]]
            last = None if training or not tracks else 1  # As they are, rows have no numbers.
            torch.testing.assert_close(found[:last], list(right[:last]), rtol=1e-10, atol=1e-10)
    assert type(twin) is cls
    torch.testing.assert_close(twin.state_dict(), norm.state_dict(), rtol=1e-5, atol=1e-5)
    assert not {'_masks', '_path', '_seen'} & set(twin.__dict__)


def masked_norm(norm: nn.BatchNorm1d, x: Tensor, count: int) -> Tensor:
    """A batch norm of the first rows."""
    level = Level(torch.arange(len(x), device=x.device) >= count, torch.tensor(count).to(x.device))
    others = Level(torch.zeros(99), torch.tensor(99))
    with masked({norm: 'norm'}, Masks(others, level, others)):
        return norm(x)[:count]


def test_batch_norm_of_one_large_row(device: torch.device) -> None:
    """Neither a large mean nor a row far from it, or many rows of padding, cost digits."""
    x = torch.randn(4000, 3, dtype=torch.float64, device=device)
    x[0, 0], x[:, 1] = 1e4, x[:, 1] + 1e2
    x[1:, 2] = 0
    norm = nn.BatchNorm1d(3, momentum=1.0).to(device)
    wanted = nn.BatchNorm1d(3).to(device).double()(x[:3000]).float()
    found = masked_norm(norm, x.float(), 3000)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.running_var, x[:3000].float().var(0), rtol=1e-4, atol=0)


def test_second_derivatives_of_a_masked_batch_norm(device: torch.device) -> None:
    norm = nn.BatchNorm1d(2).to(device).double()
    x = torch.randn(7, 2, dtype=torch.float64, device=device, requires_grad=True)
    weights = torch.randn(5, 2, dtype=torch.float64, device=device)

    def forces(out: Tensor) -> list[Tensor]:
        (grad,) = torch.autograd.grad((out * weights).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), [x, norm.weight]))

    wanted, found = forces(norm(x[:5])), forces(masked_norm(norm, x, 5))
    torch.testing.assert_close(found, wanted)


def test_a_subclass_of_batch_norm_keeps_its_own_code(graphs: list[Data]) -> None:
    class Doubled(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    ours = Layered(Doubled(4)).double()
    pygs = copy.deepcopy(ours)
    losses = list(pyg_fast.capture(ours, pad(graphs), sgd(ours), loss_fn).epoch())
    assert_close(losses, list(pygs_loop(pygs, DataLoader(graphs, SIZE), sgd(pygs))))
    assert_same(ours, pygs)


def test_batch_norms_without_a_twin_are_refused(graphs: list[Data]) -> None:
    for norm in (nn.SyncBatchNorm(4), HeteroBatchNorm(4, 2)):
        model = Layered(norm)
        with pytest.raises(ValueError, match=f"must not have a {type(norm).__name__}, .* 'layer'"):
            pyg_fast.capture(model, pad(graphs), sgd(model), loss_fn)
    model = Layered(nn.BatchNorm1d(4), lambda x, batch: model.layer(x.view(2, -1, 4)[0])).double()
    some = [data for data in graphs if data.num_nodes % 2 == 0]
    rows = Rows()
    step = pyg_fast.capture(rows, pad(some), sgd(rows), lambda out, batch: out.square().mean())
    with pytest.raises(ValueError, match=r"batch norm 'norm' got \d+ rows, but a captured step"):
        next(step.epoch())


class Rows(nn.Module):
    """A batch norm of rows that are neither nodes nor edges nor graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, batch: Batch) -> Tensor:
        return self.norm(torch.cat([batch.x, batch.x[:1]]))


def test_a_single_row_runs_without_padding(graphs: list[Data]) -> None:
    """A batch norm of graphs refuses one graph, as without padding; one of nodes takes it."""
    model = Model().double()
    loader = GraphLoader(graphs, 1, pad='buckets')
    with pytest.raises(ValueError, match='Expected more than 1 value per channel'):
        next(pyg_fast.capture(model, loader, sgd(model), loss_fn).epoch())
    model = Layered(nn.BatchNorm1d(4)).double()
    step = pyg_fast.capture(model, loader, sgd(model), loss_fn)
    list(step.epoch())
    assert step.num_eager == loader.num_unpadded


# Inference --------------------------------------------------------------------------------------
def test_a_model_of_another_type(graphs: list[Data], device: torch.device) -> None:
    """Its gradients get other memory; inference mode leaves nothing that training cannot use."""
    model = Model().double().to(device)
    loader = pad(graphs, device)
    step = replayed(pyg_fast.capture(
        model, loader, None, lambda out, batch: out.float().square().mean(),
        forward=lambda model, batch: model(_as(model, batch)),
    ))  # fmt: skip
    evaluate = pyg_fast.capture_inference(
        model, loader, forward=lambda model, batch: model(_as(model, batch))
    )
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        list(step.epoch())
        assert model.last.weight.grad.dtype == dtype
        with torch.inference_mode():
            outs = [out for out, _ in evaluate.epoch()]
        for first, (again, _) in zip(outs, evaluate.epoch(), strict=True):
            torch.testing.assert_close(first, again)  # PyG's pooling on a GPU has no order.


def _as(model: nn.Module, batch: Batch) -> Batch:
    dtype = next(model.parameters()).dtype
    batch.x, batch.edge_attr = batch.x.to(dtype), batch.edge_attr.to(dtype)
    return batch


def test_inference(graphs: list[Data], device: torch.device) -> None:
    class All(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Batch) -> dict[str, Any]:
            return {'graphs': self.model(batch), 'nodes': batch.x * 2, 'more': (
                batch.edge_attr + 1, batch.num_features)}  # fmt: skip

    model = All(Model(dropout=0.5).double()).to(device)
    loader, plain = pad(graphs, device), GraphLoader(graphs, SIZE, device=device)
    list(pyg_fast.capture(model.model, loader, sgd(model), loss_fn).epoch())
    model.model.conv.eval()
    modes = [module.training for module in model.modules()]
    evaluate = replayed(pyg_fast.capture_inference(model, loader))
    for _ in range(2):
        found = list(evaluate.epoch())
        assert modes == [module.training for module in model.modules()]
        other = copy.deepcopy(model).eval()
        for (out, batch), real in zip(found, plain, strict=True):
            torch.testing.assert_close(out, other(real), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(other(batch), out, rtol=1e-10, atol=1e-10)
        with torch.no_grad():
            model.model.last.weight.mul_(2)  # Replays read it.
    assert evaluate.num_eager == 2 + loader.num_unpadded
    if device.type == 'cpu':
        assert evaluate._recorder.replayed[StaticBatch] == 12 - evaluate.num_eager


# Arguments --------------------------------------------------------------------------------------
def test_batches_that_are_not_padded_run_as_they_are(graphs: list[Data]) -> None:
    model = Model().double()
    sampler = [[k, k + 1, k + 2] for k in range(4)]
    step = pyg_fast.capture(
        model, GraphLoader(graphs, batch_sampler=sampler, pad='buckets'), sgd(model), loss_fn
    )
    list(step.epoch())
    assert step.num_eager == 4
    list(step.epoch())
    assert step.num_eager == 4
    with pytest.raises(TypeError, match="'batch' must be a batch of a GraphLoader with pad="):
        step(Batch.from_data_list(graphs[:3]))
    assert repr(step).startswith('CapturedBatchStep(Model, SGD; ')


def test_a_schedule_of_momentum_is_told(
    graphs: list[Data], caplog: pytest.LogCaptureFixture
) -> None:
    """It changes an option that a graph holds: each step is recorded anew, and right."""
    losses = []
    for is_ours in (True, False):
        torch.manual_seed(0)
        model = Model().double()
        optimizer = sgd(model, fused=True)
        if is_ours:
            step = replayed(pyg_fast.capture(model, pad(graphs), optimizer, loss_fn))
            found = step.epoch()
        else:
            found = pygs_loop(model, GraphLoader(graphs, SIZE), optimizer)
        losses.append([])
        for loss in found:
            losses[-1].append(loss)
            optimizer.param_groups[0]['momentum'] *= 0.5
    assert_close(*losses)
    assert caplog.text.count('recorded anew for every batch') == 1


def test_a_batch_that_was_changed(graphs: list[Data]) -> None:
    """A step reads its values; it refuses other attributes and sizes."""
    ours = Model().double()
    pygs = copy.deepcopy(ours)
    step = replayed(pyg_fast.capture(ours, pad(graphs), sgd(ours, fused=True), loss_fn))
    plain, optimizer = GraphLoader(graphs, SIZE), sgd(pygs)
    batches = list(zip(step.loader, plain, strict=True)) * 2
    for padded, real in batches:
        before = padded.x.clone()
        padded.x = before * 2
        real.x = real.x * 2
        assert_close([step(padded)], list(pygs_loop(pygs, [real], optimizer)))
        assert torch.equal(padded.x, before * 2)
    padded = batches[0][0]
    padded.x = padded.x.float()
    with pytest.raises(ValueError, match="'batch' must have tensors as the first batch of its"):
        step(padded)
    del padded.x
    with pytest.raises(ValueError, match="'batch' must have the attributes"):
        step(padded)


def test_a_model_that_writes_into_its_batch(graphs: list[Data]) -> None:
    ours = Model().double()
    pygs = copy.deepcopy(ours)

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        batch.x.mul_(2)
        return model(batch)

    step = replayed(pyg_fast.capture(
        ours, pad(graphs), sgd(ours, fused=True), loss_fn, forward=forward
    ))  # fmt: skip
    batches = [*step.loader] * 2
    losses = [step(batch.clone()) for batch in batches]
    plain = [forward(lambda batch: batch, batch) for batch in GraphLoader(graphs, SIZE)] * 2
    assert_close(losses, list(pygs_loop(pygs, plain, sgd(pygs))))


def test_refused(graphs: list[Data]) -> None:
    model, loader = Model().double(), pad(graphs)
    optimizer = sgd(model)
    some = [
        Data(**data, face=torch.zeros(3, k, dtype=torch.int64)) for k, data in enumerate(graphs)
    ]
    lbfgs = torch.optim.LBFGS(model.parameters())
    scaler = torch.amp.GradScaler('cpu')
    for args, options, error, text in [
        ((None, loader, optimizer, loss_fn), {}, TypeError, "'model' must be a Module"),
        ((model, loader, model, loss_fn), {}, TypeError, "'optimizer' must be an Optimizer"),
        ((model, loader, optimizer, None), {}, TypeError, "'loss_fn' must be callable"),
        ((model, loader, optimizer, F.mse_loss), {}, TypeError, "got PyTorch's mse_loss: write"),
        ((model, loader, optimizer, nn.MSELoss()), {}, TypeError, "got PyTorch's MSELoss: write"),
        ((Model(), loader, optimizer, loss_fn), {}, ValueError, "hold parameters of 'model'"),
        ((model, GraphLoader(graphs), optimizer, loss_fn), {}, ValueError, 'must pad its batches'),
        ((model, pad(some), optimizer, loss_fn), {}, ValueError, r"exclude_keys=\['face'\]"),
        ((model, loader, lbfgs, loss_fn), {}, ValueError, 'without a closure, got LBFGS'),
        ((model, loader, optimizer, loss_fn), {'scaler': 1}, TypeError, "'scaler' must be"),
        ((model, loader, None, loss_fn), {'scaler': scaler}, ValueError, "needs an 'optimizer'"),
        ((model, loader, optimizer, loss_fn), {'compile': 1}, TypeError, "'compile' must be"),
        ((model, loader, optimizer, loss_fn), {'forward': 1}, TypeError, "'forward' must be"),
        ((GCNConv(2, 2), loader, optimizer, loss_fn), {}, TypeError, 'pass forward=, such as'),
        ((nn.DataParallel(model), loader, optimizer, loss_fn), {}, ValueError, 'not be a DataPar'),
        ((model, loader, optimizer, loss_fn), {'mask': 'x'}, ValueError, "'mask' is of one graph"),
        ((model, graphs[0], optimizer, loss_fn), {'mask': None, 'compile': True}, ValueError,
         "'compile' is of batches"),
    ]:  # fmt: skip
        with pytest.raises(error, match=text):
            pyg_fast.capture(*args, **options)
    lazy = Layered(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match='must not have lazy layers without parameters'):
        pyg_fast.capture(lazy, loader, optimizer, loss_fn)
    lazy.other = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(lazy.other)
    with pytest.raises(ValueError, match='must not be a DistributedDataParallel'):
        pyg_fast.capture(lazy, loader, optimizer, loss_fn)
    for loss, error, text in [
        (lambda out, batch: (out.sum(), 1), TypeError, 'must return a tensor, got tuple'),
        (lambda out, batch: out, ValueError, r'of shape \[\], got \[8\]'),
        (lambda out, batch: out.sum().detach(), ValueError, 'got one without gradient'),
    ]:
        with pytest.raises(error, match=text):
            next(pyg_fast.capture(model, loader, optimizer, loss).epoch())
    model.sparse = nn.Embedding(1, 1, sparse=True, dtype=torch.float64)

    def forward(model: Any, batch: Batch) -> Tensor:
        return model(batch) + model.sparse(torch.zeros(1, dtype=torch.int64))[0]

    step = pyg_fast.capture(model, loader, optimizer, loss_fn, forward=forward, check=False)
    with pytest.raises(TypeError, match='must be dense, got a sparse one'):
        next(step.epoch())


def test_a_step_that_waits(graphs: list[Data]) -> None:
    """The recorder of these tests refuses what a CUDA graph does."""
    model = Layered(nn.Identity(), lambda x, batch: x[x[:, 0] > 0].sum() + x).double()
    step = replayed(pyg_fast.capture(
        model, pad(graphs), sgd(model, fused=True), loss_fn, check=False
    ))  # fmt: skip
    losses = step.epoch()
    next(losses)
    before = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match='not permitted when stream is capturing'):
        next(losses)
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)


# Compiled ---------------------------------------------------------------------------------------
def test_compiled(
    graphs: list[Data], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one compile for all sizes, without a graph break: a layer that asks for the number
    of graphs gets a constant."""
    monkeypatch.setattr('pyg_fast._batches.runs.backend', 'aot_eager')
    ours = Layered(nn.BatchNorm1d(4)).double().to(device)
    pygs = copy.deepcopy(ours)
    loader, plain = pad(graphs, device), DataLoader(graphs, SIZE)
    step = pyg_fast.capture(ours, loader, sgd(ours), loss_fn, compile=True)
    torch._dynamo.utils.counters.clear()
    losses = list(step.epoch())
    assert_close(losses, list(pygs_loop(pygs, plain, sgd(pygs))))
    assert_same(ours, pygs)
    assert len(step._slots) > 1
    counters = torch._dynamo.utils.counters
    assert counters['stats']['unique_graphs'] == 1
    assert not counters['graph_break']


class Pooled(nn.Module):
    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv, self.lin = conv, nn.Linear(4, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = self.conv(batch.x, batch.edge_index)
        return self.lin(global_mean_pool(x, batch.batch))


@pytest.mark.parametrize('conv', [GCNConv, GATConv])
def test_compiled_code_of_pyg(
    conv: type[nn.Module], graphs: list[Data], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Layers that nobody accelerated, whose loops of nodes break the graph."""
    monkeypatch.setattr('pyg_fast._batches.runs.backend', 'aot_eager')

    def mean_loss(out: Tensor, batch: Batch) -> Tensor:
        return out.square().mean()

    ours = Pooled(conv(graphs[0].x.size(1), 4)).double().to(device)
    pygs = copy.deepcopy(ours)
    step = pyg_fast.capture(ours, pad(graphs, device), sgd(ours), mean_loss, compile=True)
    if device.type == 'cuda':  # Those layers count loops.
        with pytest.raises(RuntimeError, match='the step waits for the GPU'):
            list(step.epoch())
        return
    losses = list(step.epoch())
    assert_close(losses, list(pygs_loop(pygs, DataLoader(graphs, SIZE), sgd(pygs), mean_loss)))
    assert_same(ours, pygs)


def test_compiled_gps(
    graphs: list[Data], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With attention over graphs in the code, without a graph break."""
    monkeypatch.setattr('pyg_fast._batches.runs.backend', 'aot_eager')
    ours = GPS(num_layers=1).double().to(device)
    pygs = copy.deepcopy(ours)
    pyg_fast.accelerate(ours)
    step = pyg_fast.capture(ours, pad(graphs, device), sgd(ours), loss_fn, compile=True)
    torch._dynamo.utils.counters.clear()
    losses = list(step.epoch())
    assert_close(losses, list(pygs_loop(pygs, DataLoader(graphs, SIZE), sgd(pygs))))
    assert_same(ours, pygs)
    assert not torch._dynamo.utils.counters['graph_break']


def test_inductor(graphs: list[Data], device: torch.device) -> None:
    model = Layered(nn.Identity()).double().to(device)
    evaluate = pyg_fast.capture_inference(model, pad(graphs, device), compile=True)
    for (out, _), real in zip(
        evaluate.epoch(), GraphLoader(graphs, SIZE, device=device), strict=True
    ):
        torch.testing.assert_close(out, model(real), rtol=1e-10, atol=1e-10)


def test_more_compiles_than_dynamo_allows(
    graphs: list[Data], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a compile for each size, in two modes, none falls back to eager."""
    monkeypatch.setattr('pyg_fast._batches.runs._DYNAMIC', False)
    monkeypatch.setattr('pyg_fast._batches.runs.backend', 'eager')
    model = Layered(nn.Dropout(0.5)).double()
    step = pyg_fast.capture(
        model, GraphLoader(graphs, 2, pad='buckets'), sgd(model), loss_fn, compile=True
    )
    torch._dynamo.utils.counters.clear()
    for training in (True, False):
        model.train(training)
        list(step.epoch())
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 2 * len(step._slots) > 8


@pytest.mark.parametrize('pads', [True, False])
@pytest.mark.parametrize('how', ['epoch', 'batches'])
def test_without_padding_on_a_cpu(
    graphs: list[Data], how: str, pads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is that of PyG's loop, to the bit: nothing is recorded, so nothing is padded, and the
    loader need not pad."""
    monkeypatch.setattr(Direct, 'pads', False)
    torch.manual_seed(0)
    ours = Model().double()
    pygs = copy.deepcopy(ours)
    loader, optimizer = pad(graphs) if pads else GraphLoader(graphs, SIZE), sgd(ours)
    step = pyg_fast.capture(ours, loader, optimizer, loss_fn)
    losses = list(step.epoch()) if how == 'epoch' else [step(batch) for batch in loader]
    assert len(step) == len(losses)
    with pytest.raises(TypeError, match=r'iterate over \.epoch\(\)'):
        list(step)
    other, wanted = sgd(pygs), []
    for batch in GraphLoader(graphs, SIZE):
        other.zero_grad()
        loss = loss_fn(pygs(batch), batch)
        loss.backward()
        other.step()
        wanted.append(loss.detach())
    assert torch.equal(torch.stack(losses), torch.stack(wanted))
    assert_same(ours, pygs)
    assert 'runs as usual on a CPU)' in repr(step)
    assert step.num_eager == 0
    evaluate = pyg_fast.capture_inference(ours, loader)
    for out, batch in evaluate.epoch():
        assert torch.equal(out, pygs.eval()(batch))
        assert batch.node_mask.all()
        assert len(batch.edge_mask) == batch.num_edges
    if not pads:
        with pytest.raises(ValueError, match='must pad its batches'):
            pyg_fast.capture(ours, loader, optimizer, loss_fn, compile=True)
