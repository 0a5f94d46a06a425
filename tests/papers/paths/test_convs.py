"""Layers and models on execution paths, against themselves on all edges."""

import pickle
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from _captures import captured
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Linear, Module, ModuleList
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_fast.graph import ExecutionPath, PreparedGraph, execution_paths, prepare_edge_index
from pyg_fast.graph.csr import prepare_graph
from pyg_fast.nn import (
    MaxKGINConv,
    MaxKSAGEConv,
    PathPreparedGCNConv,
    PathPreparedGINConv,
    PathPreparedGNN,
    PathPreparedSAGEConv,
)
from tests.ops._graphs import hubs

KINDS = ['gcn', 'improved', 'plain', 'sage', 'sum', 'rootless', 'gin', 'eps']
WIDTHS = [5, 7, 3, 6, 4, 8, 2]


def conv_of(kind: str, in_channels: int, out_channels: int, **kwargs: Any) -> Module:
    if kind in ('gcn', 'improved', 'plain'):
        return PathPreparedGCNConv(
            in_channels, out_channels, improved=kind == 'improved', normalize=kind != 'plain',
            **kwargs,
        )  # fmt: skip
    if kind in ('gin', 'eps'):
        return PathPreparedGINConv(
            Linear(in_channels, out_channels), eps=0.5, train_eps=kind == 'eps', **kwargs
        )
    return PathPreparedSAGEConv(
        in_channels, out_channels, aggr='sum' if kind == 'sum' else 'mean',
        root_weight=kind != 'rootless', normalize=kind == 'sum', **kwargs,
    )  # fmt: skip


class Case:
    """A stack of layers on a graph of which some nodes train."""

    def __init__(
        self,
        kind: str,
        edge_index: Tensor,
        mask: Tensor,
        num_layers: int,
        dtype: torch.dtype = torch.double,
        weighted: bool = False,
        learned_input: bool = True,
        **kwargs: Any,
    ) -> None:
        device = edge_index.device
        self.edge_index, self.mask, self.num_layers = edge_index, mask, num_layers
        widths = WIDTHS[: num_layers + 1]
        self.net = ModuleList(
            conv_of(kind, *widths[k : k + 2], **kwargs) for k in range(num_layers)
        ).to(device, dtype)
        x = torch.randn(mask.numel(), widths[0], dtype=dtype, device=device)
        self.x = x.requires_grad_(learned_input)
        self.args: tuple[Any, ...] = (edge_index,)
        if weighted:
            self.args += (torch.rand(edge_index.size(1), dtype=dtype, device=device) + 0.1,)

    def paths(self, **kwargs: Any) -> list[ExecutionPath]:
        return execution_paths(
            self.edge_index, self.mask, self.num_layers, len(self.args) > 1, **kwargs
        )

    def out(self, paths: Any = None) -> Tensor:
        x = self.x
        for k, conv in enumerate(self.net):
            x = conv(x, *self.args, path=None if paths is None else paths[k])
            x = x.tanh() if k + 1 < self.num_layers else x
        return x

    def step(self, paths: Any = None) -> list[Tensor]:
        """The output of training nodes, the loss, and all gradients."""
        out = self.out(paths)[self.mask]
        scale = torch.linspace(-1, 2, out.numel(), dtype=out.dtype, device=out.device)
        loss = (out * scale.view_as(out)).sum() + (out * out).sum()
        leaves = [t for t in (self.x, *self.net.parameters()) if t.requires_grad]
        grads = torch.autograd.grad(loss, leaves)
        return [out.detach(), loss.detach(), *grads]


def assert_equal(actual: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        assert not a.isnan().any()
        assert (a - e).double().norm() <= tolerance * (1 + e.double().norm())


def random_graph(
    num_nodes: int, num_edges: int, share: float, device: torch.device, loops: bool = True
) -> tuple[Tensor, Tensor]:
    edge_index = torch.randint(num_nodes, (2, num_edges))
    if not loops:
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[torch.randperm(num_nodes)[: max(1, int(share * num_nodes))]] = True
    return edge_index.to(device), mask.to(device)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    num_nodes = draw(st.integers(1, 30))
    node = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=50))
    edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()
    if draw(st.integers(0, 7)) == 0:
        share = draw(st.sampled_from([0.1, 0.5, 1.0]))
        edge_index = hubs(num_nodes, num_nodes, 1100, share, share, draw(st.booleans())).edge_index
    if draw(st.booleans()):  # undirected
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    if draw(st.booleans()):
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    mask = torch.zeros(num_nodes, dtype=torch.bool)
    mask[draw(st.lists(node, min_size=1, max_size=4))] = True
    return edge_index.contiguous(), mask, draw(st.integers(1, 6))


@settings(max_examples=100)
@given(problem=problems(), kind=st.sampled_from(KINDS), forward=st.booleans(),
       prepared=st.booleans(), weighted=st.booleans(), learned_input=st.booleans())  # fmt: skip
def test_same_as_all_active(
    problem: Any, kind: str, forward: bool, prepared: bool, weighted: bool, learned_input: bool
) -> None:
    edge_index, mask, num_layers = problem
    if prepared:
        edge_index = prepare_edge_index(edge_index, (mask.numel(),) * 2)[0]
    weighted = weighted and kind in ('gcn', 'improved', 'plain')
    case = Case(kind, edge_index, mask, num_layers, weighted=weighted, learned_input=learned_input)
    paths = case.paths(forward=forward, debug=forward)
    expected = case.step()
    for _ in range(2):  # The second call reads the cache of the first one.
        assert_equal(case.step(paths), expected)


@settings(max_examples=100)
@given(problem=problems(), kind=st.sampled_from(KINDS), lean=st.booleans())
def test_paths_alone(problem: Any, kind: str, lean: bool) -> None:
    edge_index, mask, num_layers = problem
    if lean:
        edge_index = PreparedGraph(prepare_graph([edge_index], (mask.numel(),) * 2))
    case = Case(kind, edge_index, mask, num_layers)
    expected = case.step()
    paths = case.paths(forward=True, debug=True, keep_graph=False)
    assert not any(path.is_whole for path in paths)
    paths = pickle.loads(pickle.dumps(paths))
    case.args = (None,)
    for _ in range(2):
        assert_equal(case.step(paths), expected)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('forward', [False, True])
@pytest.mark.parametrize(
    'dtype', [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str
)
def test_types(device: torch.device, kind: str, forward: bool, dtype: torch.dtype) -> None:
    edge_index, mask = random_graph(400, 700, 0.05, device)
    case = Case(kind, edge_index, mask, 3, dtype, kind == 'plain')
    paths = case.paths(forward=forward)
    assert any(not path.is_whole for path in paths)
    tolerance = 1e-10 if dtype == torch.float64 else 30 * torch.finfo(dtype).eps
    assert_equal(case.step(paths), case.step(), tolerance)


@pytest.mark.parametrize('kind', ['gcn', 'sage', 'gin', 'eps'])
@pytest.mark.parametrize('forward', [False, True])
def test_dense_graph_runs_on_all_edges(device: torch.device, kind: str, forward: bool) -> None:
    edge_index, mask = random_graph(60, 1500, 0.3, device)
    case = Case(kind, edge_index, mask, 3)
    paths = case.paths(forward=forward)
    assert [path.is_whole for path in paths] == [True, True, False]
    assert paths[2].src_nodes is None  # Most nodes are sources: their rows stay where they are.
    assert_equal(case.step(paths), case.step())


class Shapes(TorchDispatchMode):
    """The shapes of what ops return, by their names."""

    def __enter__(self) -> 'Shapes':
        self.of: dict[str, list[tuple[int, ...]]] = {}
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.of.setdefault(func._schema.name.split('::')[1], []).append(tuple(out.shape))
        return out


# Layers whose gradient of the features is a sum itself write it in place; those that map it after
# the sum, or add that of a root, expand it.
@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ('kind', 'channels', 'in_place'),
    [
        ('gcn', (5, 7), True), ('gcn', (7, 5), False),
        ('plain', (5, 7), True), ('rootless', (5, 7), True), ('rootless', (7, 5), False),
        ('sage', (5, 7), False), ('gin', (7, 5), True), ('eps', (5, 7), True),
    ],
)  # fmt: skip
def test_sum_is_written_in_place(
    device: torch.device, kind: str, channels: tuple[int, int], in_place: bool, dtype: torch.dtype
) -> None:
    edge_index, mask = random_graph(400, 700, 0.05, device)
    (path,) = execution_paths(edge_index, mask, 1)
    assert path.src_nodes is not None
    conv = conv_of(kind, *channels).to(device, dtype)
    x = torch.randn(400, channels[0], device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(400, channels[1], device=device, dtype=dtype) * mask.view(-1, 1)
    (expected,) = torch.autograd.grad(conv(x, edge_index), x, grad)
    out = conv(x, edge_index, path=path)
    with Shapes() as shapes:
        (actual,) = torch.autograd.grad(out, x, grad, retain_graph=True)
    tolerance = 1e-10 if dtype == torch.float64 else 30 * torch.finfo(dtype).eps
    assert_equal([actual], [expected], tolerance)
    (size,) = shapes.of.get('spmm', []) + shapes.of.get('spmm_groups', [])
    assert size[0] == (400 if in_place else path.num_src)
    assert ('expand_rows' in shapes.of) == (not in_place)
    (again,) = torch.autograd.grad(out, x, grad, create_graph=True)
    assert_equal([again.detach()], [actual], tolerance)


@pytest.mark.parametrize('kind', ['gcn', 'sage', 'gin', 'eps'])
@pytest.mark.parametrize('forward', [False, True])
def test_second_derivatives(device: torch.device, kind: str, forward: bool) -> None:
    edge_index, mask = random_graph(12, 15, 0.2, device)
    case = Case(kind, edge_index, mask, 2)
    paths = case.paths(forward=forward, checks=False)
    parameters = list(case.net.parameters())

    def run(x: Tensor, *_: Tensor) -> Tensor:
        case.x = x
        return case.out(paths)[mask]

    x = case.x.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize('constant', [False, True])
def test_second_derivatives_of_normalised_rows(device: torch.device, constant: bool) -> None:
    # The norm of a row of zeros has no second derivative, which must not count as a lost gradient.
    edge_index, mask = random_graph(40, 60, 0.1, device)
    conv = PathPreparedSAGEConv(6, 4, normalize=True).to(device, torch.double)
    x = torch.randn(40, 6, device=device, dtype=torch.double, requires_grad=not constant)
    leaves = [*conv.parameters()] if constant else [x, *conv.parameters()]
    path = execution_paths(edge_index, mask, 1, forward=True, strict=True)[0]
    given = conv.aggregate_input(x, edge_index) if constant else x
    results = []
    for options in ({'path': path}, {}):
        out = conv(given, edge_index, **options)[mask]
        first = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    assert_equal(*results)


@pytest.mark.parametrize('kind', KINDS)
def test_forward_computes_active_rows_alone(device: torch.device, kind: str) -> None:
    edge_index, mask = random_graph(300, 400, 0.03, device)
    case = Case(kind, edge_index, mask, 1)
    whole = case.out()
    for debug in (False, True):
        path = case.paths(forward=True, debug=debug)[0]
        out = case.out([path])
        assert_equal([out[mask].detach()], [whole[mask].detach()])
        rest = out[~mask].detach()
        assert rest.isnan().all() if debug else (rest == torch.finfo(rest.dtype).tiny).all()
        case.net.eval()
        assert_equal([case.out([path]).detach()], [whole.detach()])
        case.net.train()
        with torch.no_grad():
            assert_equal([case.out([path])], [whole.detach()])


@pytest.mark.parametrize('forward', [False, True])
def test_autocast(device: torch.device, forward: bool) -> None:
    edge_index, mask = random_graph(300, 400, 0.05, device)
    for kind in ('gcn', 'sage'):
        case = Case(kind, edge_index, mask, 2, torch.float32)
        paths = case.paths(forward=forward)
        with torch.autocast(device.type, torch.bfloat16):
            assert case.out(paths).dtype == case.out().dtype
            assert_equal(case.step(paths), case.step(), 0.1)


# Gradients outside -------------------------------------------------------------------------------


def outside(case: Case, paths: Any) -> Tensor:
    """A loss that reads other nodes, too."""
    return case.out(paths).square().sum()


@pytest.mark.parametrize('kind', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('forward', [False, True])
def test_loss_on_other_nodes_is_noticed(device: torch.device, kind: str, forward: bool) -> None:
    edge_index, mask = random_graph(300, 300, 0.03, device)
    case = Case(kind, edge_index, mask, 1)
    (path,) = case.paths(forward=forward)
    lost = f'lost gradients of {int((~mask).sum())} rows'
    path.check()  # no error yet
    with pytest.raises(ValueError, match=lost):
        case.out([path]).sum().backward()  # the first one waits for a GPU
    for check in (lambda: case.out([path]), path.check):
        path.check()  # reported once
        if device.type == 'cpu':
            with pytest.raises(ValueError, match=lost):
                case.out([path]).sum().backward()
        else:
            case.out([path]).sum().backward()
            with pytest.raises(ValueError, match=lost):
                check()
    outside(case, [path]) if not forward else case.out([path]).sum()
    case.step([path])
    case.step([path])


def test_strict_raises_at_once(device: torch.device) -> None:
    edge_index, mask = random_graph(300, 300, 0.03, device)
    case = Case('gcn', edge_index, mask, 1)
    with pytest.raises(ValueError, match='lost gradients'):
        case.out(case.paths(strict=True)).sum().backward()


def test_checks_can_be_off(device: torch.device) -> None:
    edge_index, mask = random_graph(300, 300, 0.03, device)
    case = Case('gcn', edge_index, mask, 1)
    paths = case.paths(checks=False)
    case.out(paths).sum().backward()
    case.out(paths)
    paths[0].check()


def test_gradients_that_are_not_numbers_are_noticed(device: torch.device) -> None:
    edge_index, mask = random_graph(50, 30, 0.03, device)
    case = Case('gcn', edge_index, mask, 1)
    (path,) = case.paths()
    out = case.out([path])
    with pytest.raises(ValueError, match='lost gradients'):
        out.backward(torch.where(mask.view(-1, 1), 0.0, float('nan')).expand_as(out))


# Arguments that do not fit -----------------------------------------------------------------------


def test_another_graph(device: torch.device) -> None:
    edge_index, mask = random_graph(100, 150, 0.05, device)
    case = Case('gcn', edge_index, mask, 1)
    (path,) = case.paths()
    conv = case.net[0]
    other = edge_index.clone()
    other[0, 3] = (other[0, 3] + 1) % 100
    with pytest.raises(ValueError, match='made of another graph'):
        conv(case.x, other, path=path)
    with pytest.raises(ValueError, match='made of another graph'):
        conv(case.x, edge_index[:, 1:], path=path)
    conv(case.x, edge_index.flip(1), path=path)  # The same edges in another order.
    with pytest.raises(ValueError, match='of a graph of 100 nodes, but there are 101'):
        conv(torch.randn(101, 5, dtype=torch.double, device=device), edge_index, path=path)
    edge_index[0, 3] = (edge_index[0, 3] + 1) % 100
    with pytest.raises(ValueError, match='the graph has changed'):
        conv(case.x, edge_index, path=path)


def test_order_of_weighted_edges(device: torch.device) -> None:
    edge_index, mask = random_graph(100, 150, 0.05, device)
    case = Case('gcn', edge_index, mask, 1, weighted=True)
    (path,) = case.paths()
    with pytest.raises(ValueError, match='made of another graph'):
        case.net[0](case.x, edge_index.flip(1), case.args[1].flip(0), path=path)
    (unweighted,) = execution_paths(edge_index, mask, 1)
    with pytest.raises(ValueError, match='without edge weights'):
        case.net[0](case.x, *case.args, path=unweighted).sum().backward()


def test_bad_paths(device: torch.device) -> None:
    edge_index, mask = random_graph(100, 150, 0.05, device)
    case = Case('gcn', edge_index, mask, 2)
    paths = case.paths()
    with pytest.raises(TypeError, match="'path' must be an ExecutionPath, got list"):
        case.net[0](case.x, edge_index, path=paths)
    reverse = PathPreparedGCNConv(5, 3, flow='target_to_source').to(device, torch.double)
    with pytest.raises(ValueError, match='source_to_target'):
        reverse(case.x, edge_index, path=paths[0])
    if device.type == 'cuda':
        with pytest.raises(ValueError, match="'path' is on cpu, but 'x' is on cuda"):
            case.net[0](case.x, edge_index, path=paths[0].cpu())


@pytest.mark.parametrize('forward', [False, True])
def test_layers_that_send_something_else_run_as_ever(device: torch.device, forward: bool) -> None:
    edge_index, mask = random_graph(300, 400, 0.05, device)
    case = Case('sage', edge_index, mask, 2, learned_input=False)
    for make in (
        lambda a, b: MaxKSAGEConv(a, b, k=2),
        lambda a, b: MaxKGINConv(Linear(a, b), k=2),
        lambda a, b: PathPreparedSAGEConv(a, b, project=True),
        lambda a, b: PathPreparedSAGEConv(a, b, aggr='max'),
        lambda a, b: PathPreparedGCNConv(a, b, aggr='max'),
    ):
        case.net = ModuleList([make(5, 7), make(7, 3)]).to(device, torch.double)
        assert_equal(case.step(case.paths(forward=forward)), case.step())


def test_learned_weights_keep_their_gradient(device: torch.device) -> None:
    edge_index, mask = random_graph(100, 150, 0.05, device)
    case = Case('gcn', edge_index, mask, 1, weighted=True)
    weight = case.args[1].requires_grad_()
    expected, actual = (
        torch.autograd.grad(case.out(paths)[mask].sum(), [weight, case.x])
        for paths in (None, case.paths())
    )
    assert_equal(list(actual), list(expected))


def test_batch_norm_in_gin(device: torch.device) -> None:
    edge_index, mask = random_graph(100, 100, 0.05, device)
    net = torch.nn.Sequential(Linear(5, 4), torch.nn.BatchNorm1d(4)).to(device)
    conv = PathPreparedGINConv(net).to(device)
    x = torch.randn(100, 5, device=device)
    with pytest.raises(ValueError, match='BatchNorm1d computes over all nodes'):
        conv(x, edge_index, path=execution_paths(edge_index, mask, 1, forward=True)[0])
    conv(x, edge_index, path=execution_paths(edge_index, mask, 1)[0])


# The input that is aggregated once ---------------------------------------------------------------


@pytest.mark.parametrize('kind', ['gcn', 'sage', 'rootless', 'gin', 'eps'])
@pytest.mark.parametrize('forward', [None, False, True])
@pytest.mark.parametrize('prepared', [False, True])
def test_aggregated_input(
    device: torch.device, kind: str, forward: bool | None, prepared: bool
) -> None:
    edge_index, mask = random_graph(300, 400, 0.05, device)
    if prepared:
        edge_index = prepare_edge_index(edge_index, (300, 300))[0]
    case = Case(kind, edge_index, mask, 2, learned_input=False)
    expected = case.step()
    paths = None if forward is None else case.paths(forward=forward)
    case.x = case.net[0].aggregate_input(case.x, edge_index)
    for _ in range(3):
        assert_equal(case.step(paths), expected)
    if forward:
        alone = case.paths(forward=True, keep_graph=False)
        case.args = (None,)
        assert_equal(case.step(alone), expected)
        other = torch.randint(300, (2, 401), device=device)
        alone = execution_paths(other, mask, 2, forward=True, keep_graph=False)
        with pytest.raises(ValueError, match='aggregated over another graph'):
            case.step(alone)


def test_input_aggregated_in_inference_mode_serves_training(device: torch.device) -> None:
    edge_index, mask = random_graph(300, 400, 0.05, device)
    case = Case('gcn', edge_index, mask, 1, learned_input=False)
    expected = case.step()
    with torch.inference_mode():
        case.x = case.net[0].aggregate_input(case.x, edge_index)
    assert_equal(case.step(), expected)


# Models ------------------------------------------------------------------------------------------


def model_step(net: Module, x: Tensor, edge_index: Tensor, of: Tensor, **kwargs: Any) -> list:
    torch.manual_seed(7)
    out = net(x, edge_index, **kwargs)
    loss = out[of].square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('forward', [False, True])
@pytest.mark.parametrize('dropout', [0.0, 0.5])
@pytest.mark.parametrize('edges', [450, 600, 4000])
def test_model(device: torch.device, conv: str, forward: bool, dropout: float, edges: int) -> None:
    edge_index, mask = random_graph(400, edges, 0.05, device)
    edge_index = prepare_edge_index(edge_index, (400, 400))[0]
    paths = execution_paths(edge_index, mask, 3, forward=forward, debug=True)
    net = PathPreparedGNN(conv, 7, 8, 5, 3, dropout=dropout, norm='layer_norm')
    net = net.to(device, torch.double)
    x = torch.randn(400, 7, dtype=torch.double, device=device)
    expected = model_step(net, x, edge_index, mask)
    for kwargs in ({'paths': paths}, {'mask': mask}, {'paths': paths, 'mask': mask}):
        assert_equal(model_step(net, x, edge_index, mask, **kwargs), expected)
    for kwargs in ({'paths': paths}, {'mask': mask}):
        torch.manual_seed(7)
        out = net(x, edge_index, **kwargs, active_only=True)
        assert out.size(0) == int(mask.sum())
        loss = out.square().sum()
        grads = torch.autograd.grad(loss, list(net.parameters()))
        assert_equal([loss.detach(), *grads], expected)
    net.eval()
    assert_equal([net(x, edge_index, paths=paths)], [net(x, edge_index)])
    for kwargs in ({'paths': paths}, {'mask': mask}):
        some = net(x, edge_index, **kwargs, active_only=True)
        assert_equal([some], [net(x, edge_index)[mask]])
    with pytest.raises(ValueError, match="'active_only' needs 'paths' or 'mask'"):
        net(x, edge_index, active_only=True)
    if not forward:
        return
    wanted = net(x, edge_index)[mask]
    net.train()
    lean = PreparedGraph(prepare_graph([edge_index], (400, 400)))
    for edges in (edge_index, lean):
        alone = execution_paths(edges, mask, 3, forward=True, debug=True, keep_graph=False)
        assert_equal(model_step(net, x, None, mask, paths=alone), expected)
        assert_equal([net.eval()(x, None, paths=alone, active_only=True)], [wanted])
        net.train()
    assert_equal(model_step(net, x, lean, mask, paths=paths), expected)


def test_model_on_paths_that_do_not_stand_alone(device: torch.device) -> None:
    edge_index, mask = random_graph(400, 600, 0.05, device)
    alone = execution_paths(edge_index, mask, 2, forward=True, keep_graph=False)
    net = PathPreparedGNN('gcn', 7, 8, 5, 2).to(device)
    x = torch.randn(400, 7, device=device)
    for paths in (None, execution_paths(edge_index, mask, 2, forward=True)):
        with pytest.raises(ValueError, match="'edge_index' must be given, unless 'paths' stand"):
            net(x, None, paths=paths)
    with pytest.raises(ValueError, match="'edge_weight' must be None"):
        net(x, None, torch.ones(600, device=device), paths=alone)
    with pytest.raises(ValueError, match="'edge_index' must be given to compute all rows"):
        net.eval()(x, None, paths=alone)
    for conv, options in (('gcn', {'aggr': 'max'}), ('sage', {'aggr': 'max'}),
                          ('sage', {'project': True})):  # fmt: skip
        other = PathPreparedGNN(conv, 7, 8, 5, 2, **options).to(device)
        with pytest.raises(ValueError, match="'edge_index' must be given, since"):
            other(x, None, paths=alone)
    for layer in (net.convs[0], PathPreparedSAGEConv(7, 8), PathPreparedGINConv(Linear(7, 8))):
        layer.to(device)
        with pytest.raises(ValueError, match="'edge_index' must be given without a 'path'"):
            layer(x, None)
    with pytest.raises(ValueError, match="'keep_graph' must be True with forward=False"):
        execution_paths(edge_index, mask, 2, keep_graph=False)
    with pytest.raises(ValueError, match="'keep_graph' must be True for a graph with edge weig"):
        execution_paths(edge_index, mask, 2, True, forward=True, keep_graph=False)


@pytest.mark.parametrize(
    ('conv', 'options'),
    [('sage', {'normalize': True}), ('sage', {'aggr': 'max'}), ('sage', {'project': True}),
     ('sage', {'root_weight': False, 'aggr': 'sum'}), ('gcn', {'aggr': 'max'}),
     ('gcn', {'improved': True, 'bias': False}), ('gin', {'train_eps': True, 'eps': 0.3})],
)  # fmt: skip
def test_model_hands_options_on(device: torch.device, conv: str, options: dict[str, Any]) -> None:
    edge_index, mask = random_graph(400, 500, 0.05, device)
    net = PathPreparedGNN(conv, 7, 8, 5, 3, **options).to(device, torch.double)
    x = torch.randn(400, 7, dtype=torch.double, device=device)
    expected = model_step(net, x, edge_index, mask)
    for forward in (False, True):
        paths = execution_paths(edge_index, mask, 3, forward=forward)
        assert_equal(model_step(net, x, edge_index, mask, paths=paths), expected)
    net = PathPreparedGNN(conv, 7, 8, 5, 3, flow='target_to_source').to(device, torch.double)
    for forward in (False, True):
        paths = execution_paths(edge_index, mask, 3, forward=forward)
        with pytest.raises(ValueError, match='source_to_target'):
            net(x, edge_index, paths=paths)


def test_model_is_a_stack_of_layers(device: torch.device) -> None:
    edge_index, mask = random_graph(400, 600, 0.05, device)
    net = PathPreparedGNN('sage', 7, 8, 5, 3).to(device, torch.double)
    base = pyg.GraphSAGE(7, 8, 3, 5).to(device, torch.double)
    base.load_state_dict(net.state_dict())
    x = torch.randn(400, 7, dtype=torch.double, device=device)
    paths = execution_paths(edge_index, mask, 3, forward=True)
    assert_equal(
        model_step(net, x, edge_index, mask, paths=paths), model_step(base, x, edge_index, mask)
    )


def test_model_notices_a_loss_on_other_nodes(device: torch.device) -> None:
    edge_index, mask = random_graph(400, 500, 0.05, device)
    net = PathPreparedGNN('gcn', 7, 8, 5, 2, fill=0.0).to(device)
    x = torch.randn(400, 7, device=device)
    for forward in (False, True):
        paths = execution_paths(edge_index, mask, 2, forward=forward)
        with pytest.raises(ValueError, match='of layer 1 has lost gradients'):
            net(x, edge_index, paths=paths).sum().backward()


def test_model_prepares_again_for_another_mask(device: torch.device) -> None:
    edge_index, mask = random_graph(400, 500, 0.05, device)
    net = PathPreparedGNN('gcn', 7, 8, 5, 2).to(device, torch.double)
    x = torch.randn(400, 7, dtype=torch.double, device=device)
    for _ in range(2):
        expected = model_step(net, x, edge_index, mask)
        assert_equal(model_step(net, x, edge_index, mask, mask=mask), expected)
        mask[:50] = ~mask[:50]  # in place


def test_model_refuses_what_does_not_fit(device: torch.device) -> None:
    edge_index, mask = random_graph(400, 500, 0.05, device)
    net = PathPreparedGNN('gcn', 7, 8, 5, 2).to(device)
    x = torch.randn(400, 7, device=device)
    with pytest.raises(ValueError, match="'paths' must be those of 2 layers"):
        net(x, edge_index, paths=execution_paths(edge_index, mask, 3))
    paths = execution_paths(edge_index, mask, 2)
    with pytest.raises(ValueError, match="'paths' must be those of 2 layers"):
        net(x, edge_index, paths=paths[::-1])
    with pytest.raises(ValueError, match='another mask'):
        net(x, edge_index, paths=paths, mask=~mask)
    for bad, error in ((mask.long(), TypeError), (mask & False, ValueError)):
        with pytest.raises(error, match="'mask' must"):
            net(x, edge_index, mask=bad)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        torch.compile(net, backend='eager', fullgraph=True)(x, edge_index, mask=mask)
    for norm in ('batch_norm', 'graph_norm', 'pair_norm'):
        with pytest.raises(ValueError, match="'norm' must treat each node by itself.*'layer_norm'"):
            PathPreparedGNN('gcn', 7, 8, 5, 2, norm=norm)
    for kwargs in ({'conv': 'gat'}, {'num_layers': 0}, {'dropout': 1.5}):
        given = {'conv': 'gcn', 'num_layers': 2} | kwargs
        with pytest.raises(ValueError, match=f"'{next(iter(kwargs))}' must be"):
            PathPreparedGNN(in_channels=7, hidden_channels=8, out_channels=5, **given)
    sage = PathPreparedGNN('sage', 7, 8, 5, 2).to(device)
    with pytest.raises(ValueError, match="'edge_weight' is not supported"):
        sage(x, edge_index, torch.ones(500, device=device))


@pytest.mark.parametrize(
    ('kind', 'forward', 'stands_alone'),
    [('gcn', False, False), ('gcn', True, True), ('sage', True, True), ('gin', True, False)],
)
def test_compile(device: torch.device, kind: str, forward: bool, stands_alone: bool) -> None:
    torch._dynamo.reset()
    edge_index, mask = random_graph(300, 400, 0.05, device)
    edge_index = prepare_edge_index(edge_index, (300, 300))[0]
    case = Case(kind, edge_index, mask, 2, torch.float32)
    paths = case.paths(forward=forward)
    expected = case.step(paths)
    compiled = torch.compile(case.out, fullgraph=True, backend='aot_eager')
    case.out = lambda paths: compiled(paths)  # type: ignore[method-assign]
    assert_equal(case.step(paths), expected, 1e-5)
    with pytest.raises(ValueError, match='lost gradients of'):
        case.out(case.paths(forward=forward)).sum().backward()
    if stands_alone:
        case.args = (None,)
        alone = case.paths(forward=True, keep_graph=False)
        assert_equal(case.step(alone), expected, 1e-5)


def test_cuda_graph(device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('of CUDA only')
    edge_index, mask = random_graph(300, 400, 0.05, device)
    edge_index = prepare_edge_index(edge_index, (300, 300))[0]
    nodes = mask.nonzero().view(-1)
    net = PathPreparedGNN('gcn', 7, 8, 5, 2).to(device)
    x = torch.randn(300, 7, device=device)
    paths = execution_paths(edge_index, mask, 2, forward=True)
    parameters = list(net.parameters())

    def step() -> list[Tensor]:
        loss = net(x, edge_index, paths=paths).index_select(0, nodes).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    expected = step()
    replay, results = captured(step, warm_ups=3)
    replay()
    assert_equal(results, expected, 1e-5)
    for path in paths:
        path.check()
