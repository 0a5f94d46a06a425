"""`capture`: a captured step trains as one that is not."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT, GCN

import pyg_fast
from pyg_fast import capture
from pyg_fast.datasets import PlantedGraph
from pyg_fast.nn import PathPreparedGNN
from pyg_fast.transforms import Prepare, ToCSR

STEPS = 6


def planted(device: torch.device) -> Data:
    data = PlantedGraph('tiny')[0]
    data.train_mask = torch.arange(data.num_nodes) % 3 == 0
    return data.to(device)


def gcn(device: torch.device, **kwargs: Any) -> torch.nn.Module:
    return pyg_fast.accelerate(GCN(64, 16, 2, 4, **kwargs)).to(device)


def adam(model: torch.nn.Module, device: torch.device, lr: float = 0.01) -> torch.optim.Adam:
    rate = torch.tensor(lr, device=device)
    return torch.optim.Adam(model.parameters(), rate, capturable=device.type == 'cuda')


def train(model: Any, data: Data, optimizer: torch.optim.Optimizer, forward: Any = None) -> Tensor:
    """A step as users write it."""
    optimizer.zero_grad()
    out = model(data.x, data.edge_index) if forward is None else forward(model, data)
    loss = cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize('name', ['GCN', 'GAT', 'prepared', 'paths', 'SGD'])
def test_like_a_loop(name: str, device: torch.device) -> None:
    data, forward = planted(device), None
    if name == 'GAT':
        model = pyg_fast.accelerate(GAT(64, 16, 2, 4, heads=2)).to(device)
    elif name == 'paths':
        model = PathPreparedGNN('gcn', 64, 16, 4, num_layers=2).to(device)
        data = Prepare(num_layers=2, mask='train_mask')(data)
        forward = lambda model, data: model(  # noqa: E731
            data.x, data.edge_index, paths=data.execution_paths
        )
    else:
        model = gcn(device)
        data = ToCSR()(data) if name == 'prepared' else data
    results = []
    for ours in (True, False):
        own = copy.deepcopy(model)
        if name == 'SGD':
            rate = torch.tensor(0.1, device=device)
            optimizer = torch.optim.SGD(
                own.parameters(), rate, momentum=0.9, dampening=0.5, fused=True
            )
        else:
            optimizer = adam(own, device)
        if ours:
            step = capture(own, data, optimizer, cross_entropy, forward=forward)
            found = [step() for _ in range(STEPS)]
            assert (step._graph is not None) == (device.type == 'cuda')
        else:
            found = [train(own, data, optimizer, forward) for _ in range(STEPS)]
        results.append([*found, *own.parameters()])
    torch.testing.assert_close(*results)
    assert len({float(loss) for loss in results[0][:STEPS]}) == STEPS


def test_changes_between_steps(device: torch.device) -> None:
    """The learning rate, features written and replaced, a frozen parameter, another mode."""
    data, model = planted(device), gcn(device, dropout=0.0)
    x = data.x.clone()
    results = []
    for ours in (True, False):
        own, mine = copy.deepcopy(model), copy.copy(data)
        mine.x = x.clone()
        optimizer = adam(own, device)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        found = []
        step = capture(own, mine, optimizer, cross_entropy)
        for k in range(20):
            if k == 5:
                mine.x.mul_(2)  # Replays read it.
            if k == 6:
                scheduler.step()
            if k == 8:
                mine.x = x + 1
            if k == 14:
                own.convs[0].bias.requires_grad_(False)
            if k == 15:
                own.eval()
            found.append(step() if ours else train(own, mine, optimizer))
        results.append([*found, *own.parameters()])
    torch.testing.assert_close(*results)


def test_dropout_draws_again(cuda: torch.device) -> None:
    data, model = planted(cuda), gcn(cuda, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.0, device=cuda), fused=True)
    step = capture(model, data, optimizer, cross_entropy, mask=None)
    found = [float(step()) for _ in range(8)]
    assert len(set(found)) == 8


def test_refused(device: torch.device) -> None:
    data, model = planted(device), gcn(device)
    optimizer = adam(model, device)
    with pytest.raises(TypeError, match="'model' must be a Module, got str"):
        capture('model', data, optimizer, cross_entropy)
    with pytest.raises(TypeError, match="'data' must be a Data or a GraphLoader, got Tensor"):
        capture(model, data.x, optimizer, cross_entropy)
    with pytest.raises(TypeError, match="'loss_fn' must be callable, got NoneType"):
        capture(model, data, optimizer, None)
    with pytest.raises(ValueError, match="'data' must have a vector 'seeds'"):
        capture(model, data, optimizer, cross_entropy, mask='seeds')
    with pytest.raises(TypeError, match="'mask' must be the name of a mask .*, got Tensor: store"):
        capture(model, data, optimizer, cross_entropy, mask=data.train_mask)
    for graphs, of in ((DataLoader([data]), 'its dataset'), ([data], 'the graphs')):
        cure = f'got {type(graphs).__name__}: for batches make a GraphLoader( .*)? of {of}$'
        with pytest.raises(TypeError, match=cure):
            capture(model, graphs, optimizer, cross_entropy)
    with pytest.raises(ValueError, match="'optimizer' must hold parameters of 'model'"):
        capture(gcn(device), data, optimizer, cross_entropy)
    with pytest.raises(ValueError, match="'optimizer' must step without a closure, got LBFGS"):
        capture(model, data, torch.optim.LBFGS(model.parameters()), cross_entropy)
    with pytest.raises(ValueError, match="'model' must not be a DataParallel"):
        capture(torch.nn.DataParallel(model), data, optimizer, cross_entropy)
    with pytest.raises(TypeError, match="'loss_fn' must be a function .* CrossEntropyLoss\\(\\)"):
        capture(model, data, optimizer, torch.nn.CrossEntropyLoss)
    with pytest.raises(TypeError, match="'loss_fn' must take two arguments, .* labels: too many"):
        capture(model, data, optimizer, lambda out: out.sum())
    with pytest.raises(TypeError, match="'forward' must be a function"):
        capture(model, data, optimizer, cross_entropy, forward='x')


@pytest.mark.parametrize(
    ('key', 'change', 'error', 'text'),
    [
        ('train_mask', torch.zeros_like, ValueError, "'data.train_mask' must select nodes, got no"),
        ('train_mask', lambda mask: mask[:0], ValueError, "'data.train_mask' must select nodes"),
        ('train_mask', lambda mask: mask[:-1], RuntimeError, "'data.train_mask' must have shape"),
        ('train_mask', Tensor.long, TypeError, r'got a 0 or 1 for each .*: data.train_mask.bool'),
        ('train_mask', Tensor.float, TypeError, 'must be a bool mask or indices .* got torch.flo'),
        ('train_mask', Tensor.byte, TypeError, 'must be a bool mask or indices .* got torch.uint'),
        ('train_mask', lambda mask: mask.new_full((3,), 9**9, dtype=torch.long), IndexError,
         "'data.train_mask' must hold nodes in"),
        ('train_mask', Tensor.tolist, ValueError, "'data' must have a vector 'train_mask'"),
        ('y', lambda y: None, ValueError, "'data.y' must be a tensor of labels, .* got NoneType"),
        ('y', lambda y: y[0], ValueError, "'data.y' must be a tensor of labels, .* got a number"),
        ('y', lambda y: y[1:], ValueError, "'data.train_mask' must have shape"),
    ],
)  # fmt: skip
def test_refused_data(
    device: torch.device, key: str, change: Callable[[Tensor], Any], error: type, text: str
) -> None:
    data, model = planted(device), gcn(device)
    data[key] = change(data[key])
    with pytest.raises(error, match=text):
        capture(model, data, adam(model, device), cross_entropy)


@pytest.mark.parametrize(
    ('loss_fn', 'forward', 'error', 'text'),
    [
        (partial(cross_entropy, reduction='none'), None, RuntimeError, r'of shape \[\], got \[\d+'),
        (lambda out, y: None, None, TypeError, "'loss_fn' must return a tensor, got NoneType"),
        (lambda out, y: out.detach().sum(), None, ValueError, 'got one without gradient'),
        (cross_entropy, lambda model, data: (model(data.x, data.edge_index), 0), TypeError,
         "'forward' must return a tensor, a row for each node, got tuple"),
        (cross_entropy, lambda model, data: model(data.x, data.edge_index)[1:], ValueError,
         "'forward' must return a row for each of the"),
    ],
)  # fmt: skip
def test_refused_results(
    device: torch.device, loss_fn: Any, forward: Any, error: type, text: str
) -> None:
    data, model = planted(device), gcn(device)
    step = capture(model, data, adam(model, device), loss_fn, forward=forward)
    with pytest.raises(error, match=text):
        step()


def test_refused_optimizers(cuda: torch.device) -> None:
    data, model = planted(cuda), gcn(cuda)
    before = [p.clone() for p in model.parameters()]
    rate = torch.tensor(0.01, device=cuda)
    for optimizer, reason in (
        (torch.optim.Adam(model.parameters(), 0.01, capturable=True), 'learning rate of Adam'),
        (torch.optim.Adam(model.parameters()), 'capturable=True'),
        (torch.optim.SGD(model.parameters(), rate), 'cannot hold SGD; add fused=True'),
        (torch.optim.SGD(model.parameters(), torch.tensor(0.01), fused=True), 'rate of SGD'),
        (torch.optim.Adagrad(model.parameters(), 0.01), 'Adagrad has no option'),
    ):
        with pytest.raises(ValueError, match=reason):
            capture(model, data, optimizer, cross_entropy)()
    step = capture(
        model, data, adam(model, cuda),
        lambda out, y: cross_entropy(out[y > 0], y[y > 0]),
    )  # fmt: skip
    step(), step()
    with pytest.raises(RuntimeError, match='waits for the GPU'):
        step()
    assert torch.cuda.get_sync_debug_mode() == 0
    assert any((a != b).any() for a, b in zip(before, model.parameters(), strict=True))


def test_repr(device: torch.device) -> None:
    data, model = planted(device), gcn(device)
    step = pyg_fast.capture(model, data, adam(model, device), cross_entropy)
    assert repr(step).startswith("CapturedStep(GCN, Adam, mask='train_mask'; ")
    if device.type == 'cpu':
        assert 'runs as usual on a CPU' in repr(step)
        return
    for count in range(3):
        assert f'not captured yet, after {count} of 3 first calls' in repr(step)
        step()
    step()
    assert repr(step).endswith('; captured)')


def test_a_loss_of_batches(device: torch.device) -> None:
    """Of a single graph a loss gets labels, which have no attributes of a batch."""
    data = Data(torch.randn(8, 4), torch.randint(8, (2, 20)), y=torch.randn(8, 2)).to(device)
    model = GCN(4, 8, 1, 2).to(device)
    lr = torch.tensor(0.1, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr, fused=True)

    def loss_fn(out: Tensor, batch: Any) -> Tensor:
        return (out - batch.y).square().mean()

    with pytest.raises(TypeError, match=r"'loss_fn' must take .*: 'Tensor' object has no .* 'y'"):
        pyg_fast.capture(model, data, optimizer, loss_fn, mask=None)()
