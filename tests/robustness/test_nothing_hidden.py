"""Nothing is remembered about a tensor that its owner may write, and nothing that would be observed
or altered in PyG's code is passed over. Each test holds a defect that was silent once."""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch_geometric.nn as pyg
from _captures import captured
from torch import Tensor
from torch.nn import Linear, Module, Parameter
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm as pyg_gcn_norm
from torch_geometric.nn.dense.linear import Linear as PyGLinear

import pyg_fast
from pyg_fast import nn, ops
from pyg_fast.graph import execution_paths
from pyg_fast.transforms import ToCSR

N, E, IN, OUT = 50, 300, 8, 6

LAYERS: dict[str, Callable[..., Module]] = {
    'gcn': lambda **kwargs: pyg.GCNConv(IN, OUT, **kwargs),
    'sage': lambda **kwargs: pyg.SAGEConv(IN, OUT, **kwargs),
    'gin': lambda **kwargs: pyg.GINConv(Linear(IN, OUT), **kwargs),
    'gat': lambda **kwargs: pyg.GATConv(IN, OUT // 2, heads=2, **kwargs),
    'gatv2': lambda **kwargs: pyg.GATv2Conv(IN, OUT // 2, heads=2, **kwargs),
}
CACHING: dict[str, Callable[..., Module]] = {
    'gcn': lambda **kwargs: nn.PathPreparedGCNConv(IN, OUT, **kwargs),
    'sage': lambda **kwargs: nn.PathPreparedSAGEConv(IN, OUT, **kwargs),
    'sum': lambda **kwargs: nn.PathPreparedSAGEConv(IN, OUT, aggr='sum', **kwargs),
    'rootless': lambda **kwargs: nn.PathPreparedSAGEConv(IN, OUT, root_weight=False, **kwargs),
    'gin': lambda **kwargs: nn.PathPreparedGINConv(Linear(IN, OUT), eps=0.5, **kwargs),
}


def pair(kind: str, device: Any = 'cpu', **kwargs: Any) -> tuple[Module, Module]:
    """PyG's layer and ours on the same parameters."""
    theirs = LAYERS[kind](**kwargs).to(device)
    return theirs, pyg_fast.accelerate(copy.deepcopy(theirs))


def graph(device: Any = 'cpu', loops: bool = True) -> Data:
    edge_index = torch.randint(N, (2, E))
    edge_index[1] = (edge_index[0] + 1 + edge_index[1] % (N - 1)) % N
    if loops:  # One of a node at most: on CUDA PyG takes any of several.
        edge_index[:, :20] = torch.arange(20).repeat(2, 1)
    return Data(x=torch.randn(N, IN), edge_index=edge_index, edge_weight=torch.rand(E) + 0.5).to(
        device
    )


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# Values are read at every call ------------------------------------------------------------------


def write_data(tensor: Tensor) -> None:
    tensor.data.mul_(3)


def write_numpy(tensor: Tensor) -> None:
    if tensor.is_cuda:
        pytest.skip('numpy writes in the memory of a CPU')
    tensor.detach().numpy()[...] *= 3


def write_fused_optimizer(tensor: Tensor) -> None:
    parameter = Parameter(torch.empty(0, device=tensor.device))
    parameter.data = tensor.data
    parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam([parameter], lr=0.3, fused=True).step()


def write_view(tensor: Tensor) -> None:
    tensor.data[: tensor.size(0) // 2] = 0.7


WRITES = [write_data, write_numpy, write_fused_optimizer, write_view]


@pytest.mark.parametrize('write', WRITES)
@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('loops', [False, True])
def test_edge_weights(
    device: torch.device, write: Callable[[Tensor], None], prepared: bool, loops: bool
) -> None:
    data = graph(device, loops)
    data = ToCSR()(data) if prepared else data
    theirs, ours = pair('gcn', device)
    edges = data.edge_index.as_tensor() if prepared else data.edge_index
    with torch.no_grad():
        for _ in range(3):
            close(
                ours(data.x, data.edge_index, data.edge_weight),
                theirs(data.x, edges, data.edge_weight),
            )
            version = data.edge_weight._version
            write(data.edge_weight)
            assert data.edge_weight._version == version


@pytest.mark.parametrize('write', WRITES)
@pytest.mark.parametrize('forward', [False, True])
@pytest.mark.parametrize('normalize', [False, True])
def test_edge_weights_on_paths(
    device: torch.device, write: Callable[[Tensor], None], forward: bool, normalize: bool
) -> None:
    data = ToCSR()(graph(device))
    mask = torch.arange(N, device=device) < 4
    (path,) = execution_paths(data.edge_index, mask, 1, weighted=True, forward=forward)
    assert not path.is_whole
    conv = nn.PathPreparedGCNConv(IN, OUT, normalize=normalize).to(device)

    def run(path: Any) -> list[Tensor]:
        x = data.x.clone().requires_grad_()
        out = conv(x, data.edge_index, data.edge_weight, path=path)[mask]
        return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, conv.lin.weight])]

    for _ in range(3):
        for actual, expected in zip(run(path), run(None), strict=True):
            close(actual, expected)
        write(data.edge_weight)


@pytest.mark.parametrize('replace', [True, False])
def test_gcn_norm_counts_loops_at_every_call(device: torch.device, replace: bool) -> None:
    with_loops, without = graph(device).edge_index, graph(device, loops=False).edge_index
    edges = (without if replace else with_loops).clone()
    for content in (with_loops, without, with_loops):
        edges.data.copy_(content)
        index, weight = ops.gcn_norm(edges, None, N)
        expected_index, expected_weight = pyg_gcn_norm(edges, None, N)
        assert torch.equal(index, expected_index)
        close(weight, expected_weight)


@pytest.mark.parametrize('mode', ['scatter', 'reduce'])
def test_indices_are_checked_at_every_call(mode: str) -> None:
    data = graph()
    ops.aggregate(data.edge_index, data.x, mode=mode)
    data.edge_index.data[0, 3] = 10**6
    with pytest.raises(IndexError, match=r"'edge_index\[0\]' must hold sources in \[0, 50\)"):
        ops.aggregate(data.edge_index, data.x, mode=mode)


@pytest.mark.parametrize('mode', ['scatter', 'reduce'])
@pytest.mark.parametrize(('end', 'wrong'), [(0, 10**6), (1, -3), (1, 2**40)])
def test_next_call_reports_indices(cuda: torch.device, mode: str, end: int, wrong: int) -> None:
    data = graph(cuda)
    edges = data.edge_index.clone()
    edges[end, 3] = wrong
    kept = torch.arange(E, device=cuda) != 3
    expected = ops.aggregate(edges[:, kept], data.x, mode=mode)
    close(ops.aggregate(edges, data.x, mode=mode), expected)
    torch.cuda.synchronize()
    name = ('sources', 'destinations')[end]
    message = rf"'edge_index\[{end}\]' of an earlier .* {name} .*{wrong}"
    with pytest.raises(IndexError, match=message):
        ops.aggregate(data.edge_index, data.x, mode=mode)
    ops.aggregate(data.edge_index, data.x, mode=mode)  # reported once


@pytest.mark.parametrize('sampled', [False, True])
def test_backward_reports_no_indices(cuda: torch.device, sampled: bool) -> None:
    data = graph(cuda)
    x = data.x.requires_grad_()
    if sampled:  # Its backward pass sorts edges of which some are left out.
        out = ops.sampled_spmm(data.edge_index, x, 2)
    else:
        out = ops.aggregate(data.edge_index, x, mode='scatter')
    out.sum().backward()
    torch.cuda.synchronize()
    ops.aggregate(data.edge_index, x)


def test_capture_refuses_a_size_that_depends_on_data(cuda: torch.device) -> None:
    edges = graph(cuda).edge_index
    ops.gcn_norm(edges, None, N)
    torch.cuda.synchronize()
    message = "'add_self_loops' must be False while a CUDA graph"
    with (
        pytest.raises(RuntimeError, match=message),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        ops.gcn_norm(edges, None, N)
    ops.gcn_norm(edges, None, N)


def test_masks_are_read_at_every_call(device: torch.device) -> None:
    data = ToCSR()(graph(device))
    mask = torch.arange(N, device=device) < 4
    net = nn.PathPreparedGNN('gcn', IN, 8, OUT, 2).to(device)
    for shift in range(3):
        expected, actual = (
            torch.autograd.grad(
                net(data.x, data.edge_index, mask=given)[mask].square().sum(),
                list(net.parameters()),
            )
            for given in (None, mask)
        )
        for a, b in zip(actual, expected, strict=True):
            close(a, b)
        mask.data.copy_(torch.arange(N, device=device) % 9 == shift)


def test_paths_of_one_mask_alone_are_kept(device: torch.device) -> None:
    data = graph(device)
    mask = torch.arange(N, device=device) < 4
    net = nn.PathPreparedGNN('gcn', IN, 8, OUT, 2).to(device)
    made = []
    for _ in range(4):
        edges = data.edge_index[:, torch.rand(E, device=device) > 0.5]
        net(data.x, edges, mask=mask)[mask].sum().backward()
        assert net._last_paths is not None
        made.append(weakref.ref(net._last_paths[1][0]))
    gc.collect()
    assert [ref() is None for ref in made] == [True, True, True, False]
    assert copy.deepcopy(net)._last_paths is None
    net.reset_paths()
    gc.collect()
    assert made[-1]() is None


# Inputs that are aggregated once ----------------------------------------------------------------


@pytest.mark.parametrize('kind', CACHING)
def test_layers_of_version_0_2_with_cache_input(kind: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'cache_input'"):
        CACHING[kind](cache_input=True)
    data, conv = graph(), CACHING[kind]()
    conv.__dict__['cache_input'] = True  # as their pickles have it
    again = pickle.loads(pickle.dumps(conv))
    assert again.cache_input
    close(again(data.x, data.edge_index), conv(data.x, data.edge_index))
    close(again.to_base()(data.x, data.edge_index), conv(data.x, data.edge_index))
    assert 'cache_input' not in vars(again.to_base())


@pytest.mark.parametrize('kind', CACHING)
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
@pytest.mark.parametrize('prepared', [False, True])
def test_aggregated_input(device: torch.device, kind: str, flow: str, prepared: bool) -> None:
    data = graph(device)
    data = ToCSR()(data) if prepared else data
    conv = CACHING[kind](flow=flow).to(device)
    args = (data.edge_weight,) if kind == 'gcn' else ()
    x = conv.aggregate_input(data.x, data.edge_index, *args)
    expected = conv(data.x, data.edge_index, *args)
    wanted = torch.autograd.grad(expected.square().sum(), list(conv.parameters()))
    data.x.data.mul_(2)  # What was made stays what it was.
    out = conv(x, data.edge_index, *args)
    close(out, expected)
    for a, b in zip(
        torch.autograd.grad(out.square().sum(), list(conv.parameters())), wanted, strict=True
    ):
        close(a, b)
    assert x.size() == (N, IN)
    moved = x.to(torch.float64)
    assert conv.double()(moved, data.edge_index, *args).dtype == torch.float64


@pytest.mark.parametrize('kind', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('forward', [False, True])
def test_aggregated_input_of_a_model(device: torch.device, kind: str, forward: bool) -> None:
    data = ToCSR()(graph(device))
    mask = torch.arange(N, device=device) < 4
    net = nn.PathPreparedGNN(kind, IN, 8, OUT, 2).to(device)
    paths = execution_paths(data.edge_index, mask, 2, forward=forward)
    given = net.aggregate_input(data.x, data.edge_index)
    results = []
    for x, options in ((data.x, {}), (given, {}), (given, {'paths': paths})):
        loss = net(x, data.edge_index, **options)[mask].square().sum()
        results.append([loss, *torch.autograd.grad(loss, list(net.parameters()))])
    for other in results[1:]:
        for a, b in zip(other, results[0], strict=True):
            close(a, b)


def test_aggregated_input_is_refused() -> None:
    data = ToCSR()(graph())
    conv = nn.PathPreparedGCNConv(IN, OUT)
    x = conv.aggregate_input(data.x, data.edge_index)
    other = ToCSR()(graph())
    with pytest.raises(ValueError, match='another graph'):
        conv(x, other.edge_index)
    with pytest.raises(ValueError, match='another graph'):
        conv(x, data.edge_index[:, 1:])
    for layer in (
        nn.PathPreparedGCNConv(IN, OUT, add_self_loops=False),
        nn.PathPreparedSAGEConv(IN, OUT),
        nn.MaxKGCNConv(IN, OUT, k=2),
        nn.SampledGCNConv(IN, OUT, 3, sample='always'),
    ):
        with pytest.raises(ValueError, match="'x' must be"):
            layer(x, data.edge_index)
    with pytest.raises(ValueError, match="'x' must not require a gradient"):
        conv.aggregate_input(data.x.clone().requires_grad_(), data.edge_index)
    with pytest.raises(ValueError, match="'edge_weight' must not require a gradient"):
        conv.aggregate_input(data.x, data.edge_index, torch.rand(E, requires_grad=True))
    with pytest.raises(ValueError, match=f"'x' must have {IN} columns, as 'in_channels'"):
        conv.aggregate_input(data.x[:, 1:], data.edge_index)
    gin = nn.FusedGINConv(torch.nn.Sequential(torch.nn.Linear(IN, OUT)))
    gin.aggregate_input(data.x, data.edge_index)
    with pytest.raises(ValueError, match=f"'x' must have {IN} columns, as 'nn'"):
        gin.aggregate_input(data.x[:, 1:], data.edge_index)
    nn.FusedSAGEConv(-1, OUT).aggregate_input(data.x[:, 1:], data.edge_index)
    conv.register_message_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match='hooks'):
        conv(x, data.edge_index)


# Between forward and backward -------------------------------------------------------------------


@pytest.mark.parametrize('prepared', [False, True])
def test_weights_changed_before_the_backward_pass(device: torch.device, prepared: bool) -> None:
    data = graph(device)
    data = ToCSR()(data) if prepared else data
    edges = data.edge_index.as_tensor() if prepared else data.edge_index
    for normalize in (False, True):
        theirs, ours = pair('gcn', device, normalize=normalize)
        results: list[Any] = []
        for conv, given in ((theirs, edges), (ours, data.edge_index)):
            x, weight = data.x.clone().requires_grad_(), data.edge_weight.clone()
            out = conv(x, given, weight)
            weight.mul_(3)
            try:
                out.square().sum().backward()
                results.append(x.grad)
            except RuntimeError as error:
                results.append('modified by an inplace operation' in str(error))
        assert type(results[0]) is type(results[1])
        if normalize:
            close(results[1], results[0])
        else:
            assert results == [True, True]


SMALL: dict[str, Callable[[], Module]] = {
    'maxk': lambda: nn.MaxKGCNConv(IN, OUT, k=3),
    'sampled': lambda: nn.SampledGCNConv(IN, OUT, 3, 'unbiased', sample='always'),
    **{k: (lambda k=k: pyg_fast.accelerate(LAYERS[k]())) for k in LAYERS},  # type: ignore[misc]
}


@pytest.mark.usefixtures('no_old_objects')
@pytest.mark.parametrize('kind', SMALL)
@pytest.mark.parametrize('prepared', [False, True])
def test_nothing_outlives_the_backward_pass(kind: str, prepared: bool) -> None:
    """A running sum of losses keeps their nodes of autograd, and nothing else."""
    conv, total = SMALL[kind](), torch.zeros(())

    def alive() -> int:
        gc.collect()
        return sum(type(t) is Tensor and t.numel() > 1 for t in gc.get_objects())

    counts = []
    for _ in range(4):
        data = ToCSR()(graph()) if prepared else graph()
        loss = conv(data.x, data.edge_index).square().sum()
        loss.backward()
        total = total + loss
        del data, loss
        counts.append(alive())
    assert counts[-1] == counts[0]


def test_context_attributes_hold_no_tensor() -> None:
    data = ToCSR()(graph())
    mask = torch.arange(N) < 4
    (path,) = execution_paths(data.edge_index, mask, 1, weighted=True)

    def tensors(value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(tensors, value))
        return isinstance(value, Tensor)

    for kind, make in SMALL.items():
        conv, x = make(), data.x.clone().requires_grad_()
        outs = [conv(x, data.edge_index), conv(x, data.edge_index.as_tensor())]
        if kind == 'gcn':
            on_path = nn.PathPreparedGCNConv(IN, OUT)
            outs.append(on_path(x, data.edge_index, data.edge_weight, path=path))
        seen, stack = set(), [out.grad_fn for out in outs]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
            for name, value in getattr(node, '__dict__', {}).items():
                assert not tensors(value), (kind, node, name)


# What PyG's code would show ---------------------------------------------------------------------


def doubled(forward: Callable) -> Callable:
    return lambda *args, **kwargs: forward(*args, **kwargs) * 2


PATCHES = [
    ('gcn', 'lin.forward'), ('sage', 'lin_l.forward'), ('sage', 'lin_r.forward'),
    ('sage', 'aggr_module.forward'), ('gcn', 'aggr_module.forward'), ('gcn', 'propagate'),
    ('gat', 'propagate'), ('gat', 'edge_updater'), ('gat', 'lin.forward'),
    ('gatv2', 'lin_l.forward'), ('gat', 'aggr_module.forward'), ('gin', 'nn.forward'),
]  # fmt: skip


@pytest.mark.parametrize(('kind', 'path'), PATCHES)
@pytest.mark.parametrize('when', ['before', 'after'])
def test_patched_instances(kind: str, path: str, when: str) -> None:
    data = ToCSR()(graph())

    def patch(layer: Any) -> Any:
        *parents, name = path.split('.')
        for parent in parents:
            layer = getattr(layer, parent)
        setattr(layer, name, doubled(getattr(layer, name)))

    torch.manual_seed(3)
    theirs = LAYERS[kind]()
    torch.manual_seed(3)
    ours = LAYERS[kind]()
    if when == 'before':
        patch(ours)
    ours = pyg_fast.accelerate(ours)
    if when == 'after':
        patch(ours)
    plain = data.edge_index.as_tensor()
    before = theirs(data.x, plain)
    patch(theirs)
    expected = theirs(data.x, plain)
    assert not torch.allclose(before, expected)
    for edges in (plain, data.edge_index):
        close(ours(data.x, edges), expected)


@pytest.mark.parametrize('kind', LAYERS)
def test_global_hooks(kind: str) -> None:
    data = ToCSR()(graph())
    theirs, ours = pair(kind)
    plain = data.edge_index.as_tensor()
    before = theirs(data.x, plain)
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 2 if 'Linear' in type(module).__name__ else None
    )
    try:
        expected = theirs(data.x, plain)
        for edges in (plain, data.edge_index):
            close(ours(data.x, edges), expected)
    finally:
        handle.remove()
    assert not torch.allclose(before, expected)
    close(ours(data.x, data.edge_index), before)


OURS = {'gcn': nn.PathPreparedGCNConv, 'sage': nn.PathPreparedSAGEConv, 'gat': nn.FusedGATConv}


@pytest.mark.parametrize('kind', OURS)
@pytest.mark.parametrize('explained', [False, True])
def test_propagate_of_a_subclass(kind: str, explained: bool) -> None:
    data, out = graph(), []
    for base in (OURS[kind]._base, OURS[kind]):

        class Mine(base):  # type: ignore[misc, valid-type]
            def propagate(self, *args: Any, **kwargs: Any) -> Tensor:
                return super().propagate(*args, **kwargs) * 2

        torch.manual_seed(3)
        layer = Mine(IN, OUT)
        if explained:
            layer.explain = True
            layer.explain = False
        out.append(layer(data.x, data.edge_index))
    close(*out)


def test_method_of_pygs_class_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    data = graph()
    theirs, ours = pair('gcn')
    monkeypatch.setattr(PyGLinear, 'forward', lambda self, x: x @ self.weight.t() * 2)
    close(ours(data.x, data.edge_index), theirs(data.x, data.edge_index))


def test_explaining_leaves_no_slow_path() -> None:
    data = graph()
    theirs, ours = pair('gcn')
    for layer in (theirs, ours):
        layer.explain = True
        layer.explain = False
    close(ours(data.x, data.edge_index), theirs(data.x, data.edge_index))
    assert pyg_fast.accelerate_report(ours)[0].ran == 'FusedGCNConv'


# Function transforms, tracing, other tensors ----------------------------------------------------


def by_forward_ad(run: Callable, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Callable, Tensor], Any]] = {
    'grad': lambda run, x: torch.func.grad(lambda x: run(x).square().sum())(x),
    'vmap': lambda run, x: torch.vmap(run)(torch.stack([x, 2 * x])),
    'vjp': lambda run, x: torch.func.vjp(run, x)[1](torch.ones(N, OUT))[0],
    'jvp': lambda run, x: torch.func.jvp(run, (x,), (torch.ones_like(x),))[1],
    'jacrev': lambda run, x: torch.func.jacrev(lambda x: run(x)[0])(x),
    'hessian': lambda run, x: torch.func.hessian(lambda y: run(x + y).square().sum())(x[0]),
    'forward_ad': by_forward_ad,
}


@pytest.mark.parametrize('transform', TRANSFORMS)
@pytest.mark.parametrize('kind', LAYERS)
def test_function_transforms_of_layers(kind: str, transform: str) -> None:
    data = ToCSR()(graph())
    theirs, ours = pair(kind)
    plain = data.edge_index.as_tensor()
    expected = TRANSFORMS[transform](lambda x: theirs(x, plain), data.x)
    for edges in (plain, data.edge_index):
        close(TRANSFORMS[transform](lambda x, edges=edges: ours(x, edges), data.x), expected)


def messages(x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    return x[edges[0]] * weight.view(-1, 1)


def summed(x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros(N, x.size(-1)).index_add(0, edges[1], messages(x, edges, weight))


OPS: dict[str, tuple[Callable, Callable]] = {
    'spmm': (ops.spmm, summed),
    'scatter': (lambda e, x, w: ops.aggregate(e, x, w, 'scatter'), summed),
    'max': (
        lambda e, x, w: ops.spmm(e, x, w, 'max'),
        lambda x, e, w: (
            x.new_zeros(N, x.size(-1)).scatter_reduce(
                0, e[1].view(-1, 1).expand(-1, x.size(-1)), messages(x, e, w), 'amax',
                include_self=False,
            )
        ),
    ),
    'maxk': (
        lambda e, x, w: ops.cbsr_spmm(e, ops.maxk(x, IN), w), summed,
    ),
    'sampled': (lambda e, x, w: ops.sampled_spmm(e, x, 4000, edge_weight=w), summed),
    'gcn_norm': (
        lambda e, x, w: summed(x, *ops.gcn_norm(e, w, N)),
        lambda x, e, w: summed(x, *pyg_gcn_norm(e, w, N)),
    ),
}  # fmt: skip


@pytest.mark.parametrize('transform', ['grad', 'vmap', 'jvp', 'jacrev', 'forward_ad'])
@pytest.mark.parametrize('op', OPS)
def test_function_transforms_of_ops(op: str, transform: str) -> None:
    data, (ours, theirs) = graph(), OPS[op]
    edges, weight = data.edge_index, data.edge_weight
    run = TRANSFORMS[transform]
    close(
        run(lambda x: ours(edges, x, weight), data.x),
        run(lambda x: theirs(x, edges, weight), data.x),
    )
    if transform in ('grad', 'jvp', 'forward_ad'):
        close(
            run(lambda w: ours(edges, data.x, w), weight),
            run(lambda w: theirs(data.x, edges, w), weight),
        )


@pytest.mark.parametrize('transform', ['grad', 'jvp'])
@pytest.mark.parametrize('v2', [False, True])
def test_function_transforms_of_attention(transform: str, v2: bool) -> None:
    data, heads = graph(), 2
    x, att = data.x.view(N, heads, -1), torch.randn(heads, IN // heads)
    a, b = torch.randn(N, heads), torch.randn(N, heads)

    def run(x: Tensor) -> Tensor:
        x = x.view(N, heads, -1)
        out = ops.gatv2(data.edge_index, x, x, att) if v2 else ops.gat(data.edge_index, x, a, b)
        return out.flatten(1)

    flat = x.flatten(1)
    if transform == 'grad':
        y = flat.clone().requires_grad_()
        (expected,) = torch.autograd.grad(run(y).square().sum(), y)
    else:
        step = 1e-3
        expected = (run(flat + step) - run(flat - step)) / (2 * step)
    actual = TRANSFORMS[transform](run, flat)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


def test_forward_ad_around_the_backward_pass_raises() -> None:
    data = ToCSR()(graph())
    _, ours = pair('gcn')
    x = data.x.clone().requires_grad_()
    out = ours(x, data.edge_index)
    with forward_ad.dual_level():
        grad = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RuntimeError, match='forward-mode AD was entered after'):
            torch.autograd.grad(out, x, grad)


@pytest.mark.parametrize('kind', LAYERS)
def test_jit_trace(kind: str) -> None:
    data = graph()
    theirs, ours = pair(kind)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        traced = torch.jit.trace(ours, (data.x, data.edge_index), check_trace=False)
    for size in (N, N - 10, N + 10):
        x, edges = torch.randn(size, IN), torch.randint(size, (2, 100))
        close(traced(x, edges), theirs(x, edges))


@pytest.mark.parametrize('kind', ['sage', 'gin', 'gcn'])
def test_export_holds_no_op_of_ours(kind: str) -> None:
    data = graph()
    options = {'add_self_loops': False} if kind == 'gcn' else {}
    _, ours = pair(kind, **options)
    program = torch.export.export(ours, (data.x, data.edge_index))
    assert 'pyg_fast' not in str(program.graph)


@pytest.mark.parametrize('kind', LAYERS)
def test_tensors_without_data(kind: str) -> None:
    options = {'add_self_loops': False} if kind in ('gcn', 'gat', 'gatv2') else {}
    data = graph()
    theirs = LAYERS[kind](**options).to('meta')
    ours = pyg_fast.accelerate(LAYERS[kind](**options).to('meta'))
    x, edges = data.x.to('meta'), data.edge_index.to('meta')
    assert ours(x, edges).shape == theirs(x, edges).shape == (N, OUT)
    theirs, ours = pair(kind, **options)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(t) for t in (data.x, data.edge_index)]
        assert ours(*fake).shape == theirs(*fake).shape == (N, OUT)


@pytest.mark.parametrize('kind', ['gcn', 'gat', 'gatv2'])
@pytest.mark.parametrize('size', [(N, N), (None, N), (N + 5, N)])
def test_edge_index_that_names_fewer_nodes(kind: str, size: Any) -> None:
    data = graph()
    theirs, ours = pair(kind)
    x = torch.cat([data.x, torch.randn(10, IN)])
    close(ours(x, EdgeIndex(data.edge_index, sparse_size=size)), theirs(x, data.edge_index))


# The report of what ran --------------------------------------------------------------------------


def test_report_says_what_ran() -> None:
    data = graph()
    sparse = torch.sparse_coo_tensor(data.edge_index.flip(0), torch.ones(E), (N, N)).to_sparse_csr()
    for kind in LAYERS:
        _, ours = pair(kind)
        name = type(ours).__name__
        (report,) = pyg_fast.accelerate_report(ours)
        assert (report.fused, report.reason, report.ran) == (name, None, None)
        ours(data.x, data.edge_index)
        assert pyg_fast.accelerate_report(ours)[0].ran == name
        if kind in ('sage', 'gin'):
            ours(data.x, sparse)
            assert pyg_fast.accelerate_report(ours)[0].ran == "PyG's code: a sparse matrix"
        handle = ours.register_message_forward_hook(lambda *args: None)
        ours(data.x, data.edge_index)
        assert 'hooks' in pyg_fast.accelerate_report(ours)[0].ran
        handle.remove()
    (report,) = pyg_fast.accelerate_report(pyg.GATConv(IN, OUT, edge_dim=2, fill_value='max'))
    assert report.fused is None
    assert "fill_value='max'" in report.reason
    _, gat = pair('gat')
    gat(data.x, data.edge_index, return_attention_weights=True)
    assert pyg_fast.accelerate_report(gat)[0].ran == "PyG's code: return_attention_weights"


def test_cached_graph_serves_pygs_code_too() -> None:
    """PyG's contract for `cached`: the first graph is that of all calls."""
    first, second = graph(), graph()
    theirs, ours = pair('gcn', cached=True)
    for layer in (theirs, ours):
        layer(first.x, first.edge_index, first.edge_weight)
        layer.register_message_forward_hook(lambda *args: None)
    close(
        ours(first.x, second.edge_index, second.edge_weight),
        theirs(first.x, second.edge_index, second.edge_weight),
    )


@pytest.mark.parametrize('weighted', [False, True])
def test_cached_graph_in_compiled_code(weighted: bool) -> None:
    data = ToCSR()(graph())
    theirs, ours = pair('gcn', cached=True)
    args = (data.edge_weight,) if weighted else ()
    compiled = torch.compile(ours, fullgraph=True, backend='aot_eager')
    expected = theirs(data.x, data.edge_index.as_tensor(), *args)
    close(compiled(data.x, data.edge_index, *args), expected)


# Streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['gcn', 'weighted', 'sage', 'gat'])
def test_what_is_kept_is_ready_on_every_stream(cuda: torch.device, kind: str) -> None:
    num_nodes, num_edges = 20_000, 200_000
    data = Data(
        x=torch.randn(num_nodes, 32), edge_index=torch.randint(num_nodes, (2, num_edges)),
        edge_weight=torch.rand(num_edges) + 0.5,
    ).to(cuda)  # fmt: skip
    data = ToCSR()(data)
    make = {'gat': nn.FusedGATConv, 'sage': nn.PathPreparedSAGEConv}.get(
        kind, nn.PathPreparedGCNConv
    )
    conv = make(32, 32).to(cuda).eval()
    args = (data.edge_weight,) if kind == 'weighted' else ()
    fresh = ToCSR()(Data(x=data.x, edge_index=data.edge_index.as_tensor().clone())).edge_index
    with torch.no_grad():
        expected = conv(data.x, fresh, *args)
        torch.cuda.synchronize()
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(first):
            junk = [torch.full((num_nodes,), float('nan'), device=cuda) for _ in range(64)]
            first.synchronize()
            del junk
            torch.cuda._sleep(400_000_000)
            out = conv(data.x, data.edge_index, *args)
        with torch.cuda.stream(second):
            other = conv(data.x, data.edge_index, *args)
        torch.cuda.synchronize()
    close(out, expected)
    close(other, expected)


def test_what_a_capture_has_read_stays(cuda: torch.device) -> None:
    data = ToCSR()(graph(cuda))
    _, conv = pair('gcn', cuda)
    with torch.no_grad():
        expected = conv(data.x, data.edge_index)
        replay, out = captured(lambda: conv(data.x, data.edge_index))
        pyg_fast.graph.set_group_sizes(data.edge_index, 4)  # builds the cache again
        gc.collect()
        junk = [torch.full((n,), -1, dtype=torch.int32, device=cuda) for n in (N + 1, E) * 50]
        replay()
        torch.cuda.synchronize()
        del junk
    close(out, expected)
