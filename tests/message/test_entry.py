"""Captures are shared by layers, freed with them, and made again if what they read has changed."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import EdgeConv, MessagePassing, TransformerConv

from pyg_fast import accelerate, accelerate_report
from tests._report import why_pygs
from tests.message._parts import _entry

N, E, C = 30, 200, 8


class Layer(MessagePassing):
    """Messages of all layers here take the same: PyG compiles their code once by class name."""

    scale: Any = 1.0

    def __init__(self, channels: int = C) -> None:
        super().__init__(aggr='sum')
        self.lin = nn.Linear(channels, channels)
        self.act = torch.tanh

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.act(self.lin(x_i) + x_j) * self.scale


def edges(seed: int = 0) -> Tensor:
    return torch.randint(N, (2, E), generator=torch.Generator().manual_seed(seed))


def check(ours: Any, channels: int = C, ran: str | None = '') -> int:
    """Compares a layer with PyG's, forward and backward, and returns how often it was captured."""
    theirs = copy.copy(ours)
    theirs.__dict__ = ours.__getstate__()
    theirs.__class__ = ours._base
    x = torch.randn(N, channels)
    results = []
    for conv in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = conv(leaf, edges())
        found = [out]
        if out.requires_grad:
            leaves = [leaf, *(p for p in conv.parameters() if p.requires_grad)]
            found += torch.autograd.grad((out * x).sum(), leaves, allow_unused=True)
        results.append(found)
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    if ran is not None:
        assert why_pygs(ours) == ran
    return vars(ours)['_fused_entry'].num_captures


def test_a_second_layer_is_not_captured() -> None:
    class Own(Layer):
        pass

    first = accelerate(Own())
    assert check(first) == 1
    with torch.no_grad():
        assert check(first.eval()) == 1
    second = accelerate(Own())
    with torch.inference_mode():
        second(torch.randn(N, C), edges())
    assert check(second) == 0
    assert check(copy.deepcopy(first)) == 0
    assert check(pickle.loads(pickle.dumps(accelerate(Layer())))) <= 1
    wide = accelerate(Own(2 * C))
    assert (check(wide, 2 * C), check(second), check(wide, 2 * C)) == (1, 0, 1)


def test_what_a_message_reads() -> None:
    """Every change is seen, whichever layer made the capture."""

    class Own(Layer):
        pass

    first, second = accelerate(Own()), accelerate(Own())
    check(first)
    changes = [
        lambda conv: setattr(conv, 'act', torch.sigmoid),
        lambda conv: setattr(conv, 'lin', nn.Linear(C, C, bias=False)),
        lambda conv: setattr(conv.lin, 'weight', nn.Parameter(torch.randn(C, C))),
        lambda conv: conv.lin.weight.requires_grad_(False),
        lambda conv: conv.lin.register_forward_hook(lambda module, args, out: out * 3),
        lambda conv: setattr(conv, 'lin', nn.Identity()),
        lambda conv: setattr(conv, 'scale', 2.0),
        lambda conv: setattr(Own, 'scale', 3.0),
        lambda conv: delattr(conv, 'scale'),
    ]
    for change in changes:
        change(second)
        check(second)
        check(first)
    with torch.autocast('cpu', torch.bfloat16):
        out = first(torch.randn(N, C), edges())
        assert out.dtype == Own.forward(first, torch.randn(N, C), edges()).dtype
    check(first)
    torch._dynamo.reset()
    check(first)


def test_modes_that_a_message_asks_for() -> None:
    class Own(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_j * (2 if torch.is_grad_enabled() else 3) * (4 if x_j.requires_grad else 5)

    for _ in range(2):
        ours, x = accelerate(Own()), torch.ones(N, C)
        degree = torch.bincount(edges()[1], minlength=N).view(-1, 1).expand(N, C)
        for leaf, factor in ((x, 10), (x.clone().requires_grad_(), 8), (x, 10)):
            torch.testing.assert_close(ours(leaf, edges()), (degree * factor).float())
        with torch.no_grad():
            torch.testing.assert_close(ours(x.clone().requires_grad_(), edges()), degree * 15.0)


def test_variants_stay() -> None:
    class Own(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_j * self.scale

    layers = []
    for k in range(20):
        layers.append(accelerate(Own()))
        layers[-1].scale = k
    for _ in range(2):
        assert [check(conv) for conv in layers] == [1] * 20


def test_refusals_are_shared() -> None:
    class Own(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_j.sort(-1).values * self.scale

    first, second = accelerate(Own()), accelerate(Own())
    check(first, ran=None)
    makes: list[Any] = []
    make = vars(first)['_fused_entry']._capture_new
    cls = type(vars(first)['_fused_entry'])
    cls._capture_new = lambda *args: makes.append(args) or make(*args[1:])
    try:
        check(second, ran=why_pygs(first))
    finally:
        cls._capture_new = make.__func__
    assert not makes
    assert 'sort' in why_pygs(first)


@pytest.mark.parametrize('wraps', [lambda act: act, partial], ids=['itself', 'partial'])
def test_refusals_are_of_one_function(wraps: Callable[[Any], Any]) -> None:
    class Builtin(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.act(x_j - x_i)

    for act in (torch.special.i0e, torch.tanh, torch.special.i0e, torch.erf):
        conv = Builtin()
        conv.act = wraps(act)
        accelerate(conv)(torch.randn(N, C), edges())
        refused = act is torch.special.i0e
        assert why_pygs(conv).startswith('aten.special_i0e.default has no kernel') == refused


def test_dropped_layers_are_freed() -> None:
    refs = []
    for _ in range(3):

        class Own(Layer):  # Its messages have one code.
            pass

        conv = accelerate(Own())
        check(conv)
        refs += [weakref.ref(conv), weakref.ref(vars(conv)['_fused_entry'])]
    del conv
    gc.collect()
    assert [each() for each in refs] == [None] * 6


def test_threads() -> None:
    class Own(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return (self.lin(x_j) * x_i).relu() * self.scale

    layers, x, errors = [Own() for _ in range(4)], torch.randn(N, C), []
    for k, conv in enumerate(layers):
        conv.scale = k % 2
    expected = [conv(x, edges()).detach() for conv in layers]
    for conv in layers:
        accelerate(conv)

    def call(k: int) -> None:
        try:
            for _ in range(5):
                leaf = x.clone().requires_grad_()
                out = layers[k](leaf, edges())
                out.sum().backward()
                torch.testing.assert_close(out, expected[k], atol=1e-4, rtol=1e-4)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for conv in layers:
        check(conv)


@pytest.mark.parametrize('where', ['layer', 'message'])
def test_a_number_that_changes(where: str) -> None:
    class Own(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.count = 0

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            if where == 'layer':
                self.count += 1
            return self.propagate(edge_index, x=x)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            if where == 'message':
                self.count += 1
            return x_j * self.count

    ours = accelerate(Own())
    x, theirs = torch.randn(N, C), Own()
    _entry._warned.clear()
    results = []
    with pytest.warns(UserWarning, match='Own.message: a number .*: self.count') as seen:
        results += [(ours(x, edges()), theirs(x, edges())) for _ in range(5)]
    for actual, expected in results:
        torch.testing.assert_close(actual, expected)
    assert len(seen) == 1
    assert ours.count == 5
    assert why_pygs(ours).startswith('a number that changes: self.count (File ')
    assert vars(ours)['_fused_entry'].num_captures == 2


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16])
def test_a_float_that_changes(dtype: torch.dtype) -> None:
    """It becomes an argument of the kernel, whichever layer has another one."""

    class Own(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.power = nn.Parameter(torch.tensor(2.0)), 2.0

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            factor = self.scale**self.power - 0.1
            return torch.sigmoid(x_i / self.scale) * factor + self.scale * self.weight * x_j

    layers, x = [Own().to(dtype) for _ in range(3)], torch.randn(N, C).to(dtype)
    for k, conv in enumerate(layers):
        conv.load_state_dict(layers[0].state_dict())
        conv.scale = 1 + 0.2 * k
    others = [accelerate(copy.deepcopy(conv)) for conv in layers]
    for _ in range(4):
        for ours, theirs in zip(others, layers, strict=True):
            ours.scale = theirs.scale = theirs.scale * 0.9
            results = []
            for conv in (ours, theirs):
                leaf = x.clone().requires_grad_()
                out = conv(leaf, edges())
                loss = (out * x).sum()
                results.append([out, *torch.autograd.grad(loss, [leaf, conv.weight])])
            tolerance = 1e-1 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(*results, atol=tolerance, rtol=tolerance)
            assert why_pygs(ours) == ''
    assert sum(vars(ours)['_fused_entry'].num_captures for ours in others) <= 2


def test_a_float_that_no_kernel_takes_as_an_argument() -> None:
    class Own(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return nn.functional.leaky_relu(x_i + x_j, self.scale)

    first, second = accelerate(Own()), accelerate(Own())
    first.scale, second.scale = 0.1, 0.2
    assert (check(first), check(second)) == (1, 1)
    for scale in (0.2, 0.3):
        first.scale = scale
        assert check(first) <= 2
    first.scale = 0.4
    with pytest.warns(UserWarning, match='self.scale'):
        check(first, ran=None)
    assert why_pygs(first).startswith('a number that changes: self.scale (File ')


class Wrong(Layer):
    """What a user's error looks like."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if self.how == 'shapes':
            return x_j @ torch.ones(5, 5)
        if self.how == 'assert':
            assert x_i.size(0) == 3, 'three edges'
        if self.how == 'raise':
            raise NotImplementedError('of mine')
        return x_j * self.nothing


@pytest.mark.parametrize('how', ['shapes', 'assert', 'raise', 'attribute'])
def test_errors_of_users(how: str, capfd: pytest.CaptureFixture) -> None:
    """They are PyG's, those of shapes with the code, and PyTorch prints nothing about them."""
    x, raised = torch.randn(N, C), []
    for conv in (Wrong(how), accelerate(Wrong(how))):
        with pytest.raises(Exception, match='.') as error:
            conv(x, edges())
        found = error.value if how != 'shapes' else error.value.__cause__ or error.value
        text = str(found).replace('FusedWrong', 'Wrong')
        raised.append((type(found), text.splitlines()[0]))
    assert raised[0] == raised[1]
    assert how != 'shapes' or 'cannot compute x_j @ torch.ones' in str(error.value)
    assert capfd.readouterr() == ('', '')


def test_log(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    class Logged(Layer):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return x_j * 2 if self.scale == 1 else x_j.sort(-1).values

    layers = [accelerate(Logged()) for _ in range(3)]
    layers[1].scale = layers[2].scale = 2
    check(layers[0])
    assert capfd.readouterr() == ('', '')
    layers[0] = accelerate(Logged())
    _entry._stores.clear()
    with caplog.at_level('INFO', 'pyg_fast'):
        for conv in layers:
            check(conv, ran=None)
        layers[0](torch.randn(N, C), edges()[:, :1])  # Too few edges.
    records = [record for record in caplog.records if record.name == 'pyg_fast']
    texts = [record.getMessage() for record in records]
    assert texts[0].startswith('captured Logged.message in ')
    assert texts[1].startswith("Logged runs PyG's code: aten.sort")
    assert texts[2:] == ["Logged runs PyG's code: 1 edges"]
    assert [record.levelname for record in records] == ['INFO', 'WARNING', 'INFO']


@pytest.mark.parametrize('make', [
    lambda: TransformerConv(C, C), lambda: EdgeConv(nn.Sequential(
        nn.Linear(2 * C, C), nn.ReLU(), nn.Linear(C, C))),
])  # fmt: skip
def test_first_call_in_a_checkpoint(make: Callable[[], nn.Module]) -> None:
    """The trace of the message saves nothing for the backward pass, which computes again."""
    layer, x = accelerate(make()), torch.randn(N, C, requires_grad=True)
    found = checkpoint(layer, x, edges(), use_reentrant=False)
    grads = torch.autograd.grad(found.square().sum(), [x, *layer.parameters()])
    assert [each.runs_on for each in accelerate_report(layer)] == ['kernel']
    out = layer(x, edges())
    torch.testing.assert_close(out, found)
    torch.testing.assert_close(
        grads, torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    )
