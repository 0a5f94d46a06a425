"""Linear maps of nodes before a kernel, as one function of autograd, beside PyG in float64."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import MessagePassing

import pyg_fast
from tests._report import plan_of

N, E = 12, 40
Message: TypeAlias = Callable[..., Tensor]


class Layer(MessagePassing):
    """A layer whose message is a function of itself and of its inputs."""

    def __init__(self, message: Message, aggr: Any = 'add', **modules: nn.Module):
        super().__init__(aggr=aggr)
        self.of_edge = message
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: object, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        return self.of_edge(self, x_i, x_j, e)


def _both(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return F.silu(self.second(F.silu(self.first(torch.cat([x_i, x_j], -1)))))


def _one(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(self.first(torch.cat([x_i, x_j], -1)))


def _difference(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return F.silu(self.second(F.silu(self.first(torch.cat([x_i, x_j - x_i], -1)))))


def _mesh(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return self.second(F.silu(self.third(torch.cat([x_i, x_j, e], -1))))


def _gated(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(self.k(x_i) + self.q(x_j)) * self.v(x_j)


def _tied(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(self.k(x_i) - self.k(x_j)) * self.k(x_j)


def _matrix(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    weight = self.matrix.weight
    mapped = torch.cat([x_i, x_j], -1) @ weight - x_j @ weight[: x_j.size(-1)]
    return torch.sigmoid(mapped)


def _negative(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sigmoid(-self.k(x_i) - self.q(x_j)) * e[:, :1]


def _read(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    return torch.sqrt(self.k(x_i).square()) * torch.log(self.q(x_j).abs()) * e[:, :1]


def _part(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    inner = x_i.size(-1)
    weight = self.third.weight
    return torch.tanh(x_i @ weight[:, :inner].t() + x_j @ weight[:, inner : 2 * inner].t())


def _overlapping(self: Layer, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
    inner = x_i.size(-1)
    weight = self.third.weight
    return torch.tanh(x_i @ weight[:, :inner].t() + x_j @ weight[:, 1 : inner + 1].t())


# In the graph of autograd.
NAME = '_MapNodesBackward'
# Operations that start kernels on a GPU.
STARTS = (
    'add', 'add_', 'addmm', 'addmm_', 'clone', 'copy_', 'cat', 'fill_', 'mm', 'mul', 'ne', 'neg',
    'sub', 'sum', 'where',
)  # fmt: skip
MESSAGES = (_both, _one, _difference, _mesh, _gated, _tied, _matrix, _negative, _read, _part)


def make_layer(
    message: Message, inner: int = 3, out: int = 4, bias: bool = True,
    aggr: Any = 'add', edge: int = 2,
) -> Layer:  # fmt: skip
    torch.manual_seed(1)
    k, q, v = (nn.Linear(inner, out, bias) for _ in range(3))
    return Layer(
        message, aggr, first=nn.Linear(2 * inner, out, bias), second=nn.Linear(out, 2, bias),
        third=nn.Linear(2 * inner + edge, out, bias), k=k, q=q, v=v,
        matrix=nn.Linear(out, 2 * inner, False),
    ).double()  # fmt: skip


def edges(num_src: int = N, num_dst: int = N) -> Tensor:
    """Edges that leave out some nodes at each end, others than at the other end."""
    draw = torch.Generator().manual_seed(2)
    src = torch.randint(2, num_src, (E,), generator=draw)
    return torch.stack([src, torch.randint(num_dst - 3, (E,), generator=draw)])


def inputs(inner: int = 3, edge: int = 2) -> tuple[Any, Tensor, Tensor]:
    x, e = torch.randn(N, inner).double(), torch.randn(E, edge).double()
    return x.requires_grad_(), edges(), e.requires_grad_()


def leaves_of(layer: nn.Module, args: Sequence[Any]) -> list[Tensor]:
    tensors = [t for x in args for t in (x if isinstance(x, tuple) else (x,))]
    return [t for t in (*tensors, *layer.parameters()) if t.requires_grad]


def gradients(layer: nn.Module, args: Sequence[Any], weight: Tensor | None = None) -> list[Tensor]:
    """The result, and the gradients of all that requires one."""
    out = layer(*args)
    if weight is None:
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    found = torch.autograd.grad(
        out, leaves_of(layer, args), weight, allow_unused=True, materialize_grads=True
    )
    return [out, *found]


def functions_of(out: Tensor) -> list[str]:
    """The names of the functions of the graph of autograd."""
    found, stack = {}, [out.grad_fn]
    while stack:
        each = stack.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            stack += [function for function, _ in each.next_functions]
    return [each.name() for each in found.values()]


def check(layer: Layer, args: Sequence[Any], weight: Tensor | None = None, maps: int = 1) -> None:
    """Ours gives what PyG's code gives, by so many functions of autograd."""
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    found, expected = gradients(ours, args, weight), gradients(layer, args, weight)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert 'PyG' not in plan_of(ours)
    assert functions_of(found[0]).count(NAME) == maps


@pytest.mark.parametrize('message', MESSAGES)
def test_gradients(message: Message) -> None:
    check(make_layer(message), inputs())


@pytest.mark.parametrize('aggr', ['mean', 'max', ['add', 'min']])
def test_aggregations(aggr: Any) -> None:
    check(make_layer(_both, aggr=aggr), inputs())


@settings(max_examples=12)
@given(
    st.sampled_from([_both, _difference, _mesh, _gated, _matrix]), st.sampled_from([1, 2, 7, 200]),
    st.sampled_from([1, 3, 70]), st.booleans(), st.sets(st.integers(0, 15), max_size=8),
    st.booleans(),
)  # fmt: skip
def test_shapes_and_frozen_parts(
    message: Message, inner: int, out: int, bias: bool, frozen: set[int], pair: bool
) -> None:
    layer, (x, index, e) = make_layer(message, inner, out, bias), inputs(inner)
    args: Any = (x, index, e)
    if pair:
        others = torch.randn(N + 4, inner, requires_grad=True, dtype=torch.double)
        args = ((x, others), index + torch.tensor([[0], [4]]), e)
    tensors = [*leaves_of(layer, args)]
    for k in frozen:
        if k < len(tensors):
            tensors[k].requires_grad_(False)
    if not leaves_of(layer, args):
        e.requires_grad_()
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    found, expected = gradients(ours, args), gradients(layer, args)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert 'PyG' not in plan_of(ours)


def test_overlapping_parts_of_a_weight_are_differentiated_by_torch() -> None:
    check(make_layer(_overlapping), inputs(), maps=0)


def test_one_map_is_differentiated_by_torch() -> None:
    check(make_layer(lambda self, x_i, x_j, e: self.k(x_j)), inputs(), maps=0)


@pytest.mark.parametrize('message', [_both, _difference, _gated, _read])
def test_nodes_that_no_edge_reads(message: Message) -> None:
    """Rows that are not finite reach no gradient, nor do gradients of results without edges."""
    layer, (x, index, e) = make_layer(message), inputs()
    src, dst = x.detach().clone(), x.detach().clone()
    src[:2], dst[-3:] = torch.nan, torch.inf
    args = (src.requires_grad_(), dst.requires_grad_()), index, e
    weight = torch.randn(layer(*args).shape).double()
    weight[-3:] = torch.nan
    assert gradients(layer, args, weight)[1].isfinite().all()
    check(layer, args, weight)
    both = x.detach().clone()  # Of one tensor no row is unread at both ends.
    both[-1] = torch.nan
    index = index.clone()
    index[0, index[0] == N - 1] = 3
    check(layer, (both.requires_grad_(), index, e), weight)


@pytest.mark.parametrize('message', [_both, _difference, _mesh, _gated, _read])
@pytest.mark.parametrize('frozen', ['', 'x', 'parameters'])
def test_second_derivatives(message: Message, frozen: str) -> None:
    layer, args = make_layer(message), inputs()
    args[0].requires_grad_(frozen != 'x')
    for each in layer.parameters():
        each.requires_grad_(frozen != 'parameters')
    ours, found = pyg_fast.accelerate(copy.deepcopy(layer)), []
    for each in (ours, layer):
        leaves = leaves_of(each, args)
        first = torch.autograd.grad(
            each(*args).square().sum(), leaves, create_graph=True, allow_unused=True
        )
        total = sum(grad.sin().sum() for grad in first if grad is not None)
        found.append(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))
    torch.testing.assert_close(*found)
    assert 'PyG' not in plan_of(ours)


def test_several_gradients_at_once_and_function_transforms() -> None:
    layer, args = make_layer(_both), inputs()
    ours, found = pyg_fast.accelerate(copy.deepcopy(layer)), []
    for each in (ours, layer):
        leaves, out = [args[0], *each.first.parameters()], each(*args)
        weights = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(3)).to(out)
        several = torch.autograd.grad(out, leaves, weights, is_grads_batched=True)
        jacobian = torch.func.jacrev(lambda x, of=each: of(x, *args[1:]))(args[0])
        found.append([*several, jacobian])
    torch.testing.assert_close(*found)


def test_third_derivative() -> None:
    layer, args = make_layer(_gated), inputs()
    ours, found = pyg_fast.accelerate(copy.deepcopy(layer)), []
    for each in (ours, layer):
        value, leaves = each(*args).sum(), [args[0], each.k.weight]
        for _ in range(3):
            grads = torch.autograd.grad(value, leaves, create_graph=True)
            value = sum(grad.sin().sum() for grad in grads)
        found.append(grads)
    torch.testing.assert_close(*found)


def test_writing_into_an_input_after_the_layer() -> None:
    """PyG gathers rows, and reads the input no more."""
    layer, (x, *rest) = make_layer(_both), inputs()
    found = []
    for each in (pyg_fast.accelerate(copy.deepcopy(layer)), layer):
        copied = x * 1
        out = each(copied, *rest)
        copied += 1
        found.append(torch.autograd.grad(out.sum(), [x, *each.parameters()], allow_unused=True))
    torch.testing.assert_close(*found)


def test_writing_into_a_weight_is_an_error() -> None:
    layer, args = pyg_fast.accelerate(make_layer(_both)), inputs()
    out = layer(*args)
    with torch.no_grad():
        layer.first.weight.add_(1)
    with pytest.raises(RuntimeError, match='was written before the backward pass'):
        out.sum().backward()


@pytest.mark.parametrize('inside', [False, True])
def test_autocast(inside: bool) -> None:
    layer, args = make_layer(_both).float(), [x.detach().float() for x in inputs()]
    args[0].requires_grad_()
    args[1] = edges()
    ours, found = pyg_fast.accelerate(copy.deepcopy(layer)), []
    for each in (ours, layer):
        with torch.autocast('cpu', torch.bfloat16):
            out = each(*args)
            if inside:
                found.append(gradients_of_sum(out, each, args))
        if not inside:
            found.append(gradients_of_sum(out, each, args))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.05)
    assert functions_of(ours(*args)).count(NAME) == 1
    # The backward pass rounds no more than outside.
    assert all(grad is None or grad.dtype == torch.float32 for grad in found[0])


def gradients_of_sum(out: Tensor, layer: nn.Module, args: Sequence[Tensor]) -> list[Tensor]:
    leaves = leaves_of(layer, args)
    return list(torch.autograd.grad(out.float().sum(), leaves, allow_unused=True))


def test_the_backward_pass_ignores_autocast() -> None:
    layer, args = pyg_fast.accelerate(make_layer(_both).float()), inputs()
    args = [args[0].detach().float().requires_grad_(), args[1], args[2].detach().float()]
    expected = gradients(layer, args)
    out = layer(*args)
    with torch.autocast('cpu', torch.bfloat16):
        weight = torch.linspace(-1, 1, out.numel()).view(out.shape)
        found = torch.autograd.grad(out, leaves_of(layer, args), weight, allow_unused=True)
    for ours, other in zip(found, expected[1:], strict=True):
        assert ours is None or torch.equal(ours, other)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_reproducibility(dtype: torch.dtype, device: torch.device) -> None:
    layer = make_layer(_both, 16, 24).to(device, dtype)
    x, index, e = (t.detach().to(device) for t in inputs(16))
    args = [x.to(dtype).requires_grad_(), index, e.to(dtype)]
    ours = pyg_fast.accelerate(copy.deepcopy(layer))
    first, second = gradients(ours, args), gradients(ours, args)
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    exact = copy.deepcopy(layer).double()
    expected = gradients(exact, [args[0].detach().double().requires_grad_(), index, e])
    for ours_, other in zip(first, expected, strict=True):
        assert ours_.dtype == dtype
        assert (ours_ - other).abs().max() <= 20 * torch.finfo(dtype).eps * other.abs().max()


@pytest.mark.parametrize(('message', 'most'), [(_both, 15), (_difference, 17)])
def test_few_operations(message: Message, most: int) -> None:
    """A step starts few kernels beside those of edges: each costs the host some microseconds."""
    layer, args = pyg_fast.accelerate(make_layer(message)), inputs()
    for _ in range(3):
        out = layer(*args)
    leaves = leaves_of(layer, args)
    given = torch.ones_like(out)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        torch.autograd.grad(layer(*args), leaves, given, allow_unused=True)
    names = [each.name for each in found.events() if each.name.startswith('aten::')]
    counts = {name: names.count(f'aten::{name}') for name in STARTS}
    assert sum(counts.values()) <= most, counts
