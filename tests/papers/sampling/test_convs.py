"""Layers that sample against PyG's own on the edges that they take, and on all of them."""

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from _captures import captured
from _pairs import pairs
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import GCN, GCNConv, SAGEConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor

import pyg_fast
from pyg_fast.graph import execution_paths, prepare_edge_index
from pyg_fast.nn import (
    FusedGCNConv,
    FusedSAGEConv,
    PathPreparedGCNConv,
    PathPreparedSAGEConv,
    SampledGCNConv,
    SampledSAGEConv,
)
from pyg_fast.ops import maxk
from pyg_fast.ops.sampling import sampled_positions
from tests._report import may_leave, must_fuse

NODES, DST, EDGES = 40, 25, 300
IN, OUT, S = 6, 20, 3
KINDS = ('gcn', 'sage')
LAYERS = {
    'gcn': (GCNConv, PathPreparedGCNConv, SampledGCNConv),
    'sage': (SAGEConv, PathPreparedSAGEConv, SampledSAGEConv),
}
CODES = {'bucket': 0, 'fastrand': 1, 'paper': 3, 'adaptive': 4}
FIXED = ('bucket', 'fastrand', 'paper')  # not random, and sums are not scaled
STRATEGIES = (*FIXED, 'unbiased', 'adaptive')
FLOWS = ('source_to_target', 'target_to_source')
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def edges(num_src: int = NODES, num_dst: int = NODES, num_edges: int = EDGES) -> Tensor:
    """Edges with double ones, self-loops, some of them double, a hub and nodes without any."""
    edge_index = torch.stack([
        torch.randint(num_src - 3, (num_edges,)), torch.randint(num_dst - 3, (num_edges,))
    ])  # fmt: skip
    edge_index[1, : num_edges // 6] = 5
    edge_index[:, 60:65] = torch.arange(5)
    return torch.cat([edge_index, edge_index[:, 58:70]], dim=1)


def weights(edge_index: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    weight = torch.rand(edge_index.size(1), dtype=torch.float64) + 0.1
    # On CUDA, PyG takes any of several self-loops of a node: they get equal weights.
    loop = edge_index[0] == edge_index[1]
    weight[loop] = 0.5 + edge_index[0][loop].double() / NODES
    return weight.to(dtype)


def taken(
    edge_index: Tensor, strategy: str, num_samples: int = S, drop_loops: bool = False,
    flow: str = FLOWS[0],
) -> Tensor:  # fmt: skip
    """Positions of the edges that a layer takes, and of the self-loops that it keeps beside."""
    by_row: dict[int, list[int]] = {}
    ends = edge_index.tolist()
    for position, (src, dst) in enumerate(zip(*ends, strict=True)):
        if not drop_loops or src != dst:
            by_row.setdefault(dst if flow == FLOWS[0] else src, []).append(position)
    positions = [
        row[i] for row in by_row.values()
        for i in sampled_positions(len(row), num_samples, CODES[strategy], 0, 0)
    ]  # fmt: skip
    if drop_loops:
        positions += [i for i, (src, dst) in enumerate(zip(*ends, strict=True)) if src == dst]
    return torch.tensor(positions, dtype=torch.long, device=edge_index.device)


def adapted(
    edge_index: Tensor, weight: Tensor | None, flow: str = FLOWS[0]
) -> tuple[Tensor, Tensor]:
    """The matrix of an adaptive GCN: its edges and their weights, self-loops last."""
    proper = (edge_index[0] != edge_index[1]).nonzero().view(-1)
    given = edge_index.double().new_ones(edge_index.size(1)) if weight is None else weight
    (src, dst), entry = gcn_norm(edge_index, given, NODES, flow=flow)  # of all edges
    row = dst if flow == FLOWS[0] else src
    ratio = (row[: proper.numel()].bincount(minlength=NODES) + 1).double() / (S + 1)
    ratio = ratio.clamp(min=1)
    entry = entry * torch.cat([ratio.pow(2 / 3)[row[: proper.numel()]], ratio])
    kept = torch.isin(proper, taken(edge_index, 'adaptive', S, drop_loops=True, flow=flow))
    kept = torch.cat([kept, kept.new_ones(NODES)])
    return torch.stack([src, dst])[:, kept], entry[kept]


def layers(
    kind: str, strategy: str = 'fastrand', num_samples: int = S, device: Any = 'cpu',
    dtype: torch.dtype = torch.float64, channels: Any = (IN, OUT), sample: str = 'eval',
    quantize: bool = False, **kwargs: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """PyG's layer, and ours on the same weights, in evaluation."""
    theirs, own = LAYERS[kind][0](*channels, **kwargs), LAYERS[kind][2]
    if kind == 'gcn' and theirs.bias is not None:
        torch.nn.init.normal_(theirs.bias)
    ours = own(*channels, num_samples, strategy, sample=sample, quantize=quantize, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs.to(device, dtype).eval(), ours.to(device, dtype).eval()


def base_of(kind: str, ours: Any, channels: Any = (IN, OUT), **kwargs: Any) -> Any:
    """The layer that ours builds on, with the same weights."""
    base = LAYERS[kind][1](*channels, **kwargs)
    base.load_state_dict(ours.state_dict())
    weight = next(ours.parameters())
    return base.to(weight.device, weight.dtype)


def features(*size: int, device: Any = 'cpu', dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, dtype=torch.float64).to(device, dtype)


def prepare(edge_index: Tensor, size: tuple[int, int] = (NODES, NODES)) -> tuple[Tensor, Tensor]:
    return prepare_edge_index(edge_index, size)


def gradients(conv: Any, x: Any, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output and the gradients of features, weights and parameters."""
    pair = x if isinstance(x, tuple) else (x,)
    pair = tuple(None if v is None else v.detach().requires_grad_() for v in pair)
    out = conv(pair if isinstance(x, tuple) else pair[0], *args, **kwargs)
    inputs = [*(v for v in pair if v is not None), *conv.parameters()]
    inputs += [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=torch.float64)
    grads = torch.autograd.grad(
        (out.double() * weight.view_as(out)).sum(), inputs, allow_unused=True
    )
    return [out, *(torch.zeros_like(v) if g is None else g
                   for v, g in zip(inputs, grads, strict=True))]  # fmt: skip


def assert_same(theirs: list[Tensor], ours: list[Tensor], **tolerance: float) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, **tolerance)


def assert_equal(theirs: list[Tensor], ours: list[Tensor]) -> None:
    assert_same(theirs, ours, rtol=0, atol=0)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


# When it samples ------------------------------------------------------------------------------


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_trains_in_full(kind: str, prepared: bool, strategy: str, device: torch.device) -> None:
    theirs, ours = layers(kind, strategy, device=device, quantize=True)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph = prepare(edge_index)[0] if prepared else edge_index
    full = gradients(theirs, x, edge_index)
    must_fuse(ours)
    assert_same(full, gradients(ours.train(), x, graph))
    if device.type == 'cpu':
        assert_equal(gradients(base_of(kind, ours), x, graph), gradients(ours, x, graph))
    sampled = gradients(ours.eval(), x, graph)
    assert not torch.allclose(sampled[0], full[0])
    _, never_samples = layers(kind, strategy, device=device, sample='never')
    never_samples.load_state_dict(theirs.state_dict())
    for train in (True, False):
        assert_same(full, gradients(must_fuse(never_samples).train(train), x, graph))


@pytest.mark.parametrize('kind', KINDS)
def test_when_it_samples(kind: str, device: torch.device) -> None:
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    theirs, ours = layers(kind, device=device)
    full, sampled = theirs(x, edge_index), ours(x, edge_index)
    for sample, expected in (
        ('eval', (full, sampled)), ('always', (sampled, sampled)), ('never', (full, full))
    ):  # fmt: skip
        _, conv = layers(kind, device=device, sample=sample)
        conv.load_state_dict(theirs.state_dict())
        for train, right in zip((True, False), expected, strict=True):
            torch.testing.assert_close(conv.train(train)(x, edge_index), right)
    ours.num_samples = EDGES
    torch.testing.assert_close(ours(x, edge_index), full)
    ours.num_samples, ours.strategy = S, 'bucket'
    other = theirs(x, edge_index[:, taken(edge_index, 'bucket', drop_loops=kind == 'gcn')])
    torch.testing.assert_close(ours(x, edge_index), other)


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('channels', [(6, 20), (20, 6)])
@pytest.mark.parametrize('kind', KINDS)
def test_small_degrees_are_the_base_layer(
    kind: str, channels: tuple[int, int], strategy: str, device: torch.device
) -> None:
    edge_index = edges().to(device)
    graph, perm = prepare(edge_index)
    most = int(edge_index[1].bincount().max())
    for dtype in DTYPES:
        _, ours = layers(kind, strategy, most, device, dtype, channels)
        base = base_of(kind, ours, channels).eval()
        x = features(NODES, channels[0], device=device, dtype=dtype)
        weight = weights(edge_index.cpu(), dtype).to(device)[perm]
        for more in ((),) if kind == 'sage' else ((), (weight,)):
            with torch.no_grad():
                expected, out = base(x, graph, *more), must_fuse(ours)(x, graph, *more)
            if device.type == 'cpu' and not more:
                assert torch.equal(out, expected)
            else:
                torch.testing.assert_close(out, expected)
            tolerance = {} if dtype.itemsize > 2 else {'rtol': 0.03, 'atol': 0.03 * NODES}
            assert_same(
                gradients(base, x, graph, *more), gradients(ours, x, graph, *more), **tolerance
            )


# On the edges that are taken ------------------------------------------------------------------

GCN_OPTIONS = [
    dict(add_self_loops=loops, improved=improved, flow=flow, bias=bias)
    for loops, improved, flow, bias in itertools.product(
        (None, False), (False, True), FLOWS, (True, False)
    )
] + [dict(normalize=False, flow=flow, bias=bias) for flow in FLOWS for bias in (True, False)]


@pytest.mark.parametrize('strategy', FIXED)
@pytest.mark.parametrize('weighted', ['unweighted', 'weighted', 'gradient'])
@pytest.mark.parametrize('channels', [(6, 20), (20, 6)])
def test_gcn(channels: tuple[int, int], weighted: str, strategy: str, device: torch.device) -> None:
    edge_index = edges().to(device)
    weight = weights(edge_index.cpu()).to(device)
    graph, perm = prepare(edge_index)
    x = features(NODES, channels[0], device=device)
    # Each combination for one strategy, which all meet every two options.
    for options in GCN_OPTIONS[FIXED.index(strategy) :: len(FIXED)]:
        theirs, ours = layers('gcn', strategy, device=device, channels=channels, **options)
        must_fuse(ours)
        for given, w in ((edge_index, weight), (graph, weight[perm])):
            plain = given.as_subclass(Tensor)
            at = taken(plain, strategy, S, ours.add_self_loops, options['flow'])
            if weighted == 'unweighted':
                assert_same(gradients(theirs, x, plain[:, at]), gradients(ours, x, given))
                continue
            w = w.clone().requires_grad_(weighted == 'gradient')
            expected = gradients(theirs, x, plain[:, at], w.detach()[at].requires_grad_())
            # Ours is the gradient of all edges, PyG's that of those that were taken.
            expected[-1] = torch.zeros_like(w).index_add_(0, at, expected[-1])
            out = gradients(ours, x, given, w)
            assert_same(expected[: len(out)], out)


@pytest.mark.parametrize('strategy', FIXED)
@pytest.mark.parametrize('channels', [(6, 20), (20, 6)])
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'normalize': True},
        {'root_weight': False},
        {'bias': False},
        {'project': True},
        {'project': True, 'normalize': True, 'root_weight': False, 'bias': False},
    ],
    ids=lambda options: ','.join(options) or 'plain',
)
def test_sage(
    options: dict[str, Any], channels: tuple[int, int], strategy: str, device: torch.device
) -> None:
    x, edge_index = features(NODES, channels[0], device=device), edges().to(device)
    graph, _ = prepare(edge_index)
    kept = edge_index[:, taken(edge_index, strategy)]
    for aggr in ('mean', 'sum', 'max', 'min', ['mean', 'max', 'std'], 'powermean'):
        theirs, ours = layers(
            'sage', strategy, device=device, channels=channels, aggr=aggr, **options
        )
        expected = gradients(theirs, x, kept)
        for given in (edge_index, graph):
            assert_same(expected, gradients(must_fuse(ours), x, given))


@pytest.mark.parametrize('aggr', ['median', 'softmax', 'mul', ['mean', 'softmax']])
def test_aggregations_without_a_kernel(aggr: Any, device: torch.device) -> None:
    x, edge_index = features(NODES, IN, device=device).abs(), edges().to(device)
    kept = edge_index[:, taken(edge_index, 'fastrand')]
    kept = kept[:, kept[1].argsort(stable=True)]
    theirs, ours = layers('sage', device=device, aggr=aggr)
    for given in (edge_index, prepare(edge_index)[0]):
        assert_same(gradients(theirs, x, kept), gradients(ours, x, given))
    for kwargs in ({'aggr': 'mean'}, {'aggr': 'max'}, {'decomposed_layers': 2}):
        theirs, ours = layers('gcn', device=device, **kwargs)
        kept = edge_index[:, taken(edge_index, 'fastrand', drop_loops=True)]
        assert_same(gradients(theirs, x, kept), gradients(ours, x, edge_index))


@pytest.mark.parametrize('strategy', FIXED)
@pytest.mark.parametrize('aggr', ['mean', 'max'])
@pytest.mark.parametrize('root', [True, False])
@pytest.mark.parametrize('project', [True, False])
def test_bipartite(
    project: bool, root: bool, aggr: str, strategy: str, device: torch.device
) -> None:
    theirs, ours = layers(
        'sage', strategy, device=device, channels=((8, 6), 24), aggr=aggr, project=project
    )
    x_src = features(NODES, 8, device=device)
    x_dst = features(DST, 6, device=device) if root else None
    edge_index, size = edges(NODES, DST).to(device), (NODES, DST)
    kept = edge_index[:, taken(edge_index, strategy)]
    expected = gradients(theirs, (x_src, x_dst), kept, size=size)
    graph, _ = prepare(edge_index, size)
    must_fuse(ours)
    assert_same(expected, gradients(ours, (x_src, x_dst), edge_index, size=size))
    assert_same(expected, gradients(ours, (x_src, x_dst), graph))
    may_leave(ours)
    ours.register_message_forward_hook(lambda module, args, out: None)
    assert_same(expected, gradients(ours, (x_src, x_dst), edge_index, size=size))
    assert_same(expected, gradients(ours, (x_src, x_dst), graph))
    with pytest.raises(ValueError, match='size'):
        ours((x_src[1:], x_dst), graph)


@pytest.mark.parametrize('strategy', FIXED)
@pytest.mark.parametrize('aggr', ['mean', 'max'])
def test_target_to_source(aggr: str, strategy: str, device: torch.device) -> None:
    theirs, ours = layers('sage', strategy, device=device, flow=FLOWS[1], aggr=aggr)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    kept = edge_index[:, taken(edge_index, strategy, flow=FLOWS[1])]
    by_row = EdgeIndex(edge_index, sparse_size=(NODES, NODES)).sort_by('row', stable=True).values
    expected = gradients(theirs, x, kept)
    for given in (edge_index, prepare(edge_index)[0], by_row):
        sample = taken(given.as_subclass(Tensor), strategy, flow=FLOWS[1])
        rows = given.as_subclass(Tensor)[:, sample]
        assert_same(gradients(theirs, x, rows), gradients(must_fuse(ours), x, given))
    assert_same(expected, gradients(ours, x, edge_index))
    pair = x, features(NODES, IN, device=device)
    may_leave(ours)
    assert_same(gradients(theirs, pair, kept), gradients(ours, pair, edge_index))


@pytest.mark.parametrize('strategy', FIXED)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('channels', [(8, 24), (24, 8)])
@pytest.mark.parametrize('kind', KINDS)
def test_dtypes(
    kind: str, channels: tuple[int, int], dtype: torch.dtype, strategy: str, device: torch.device
) -> None:
    edge_index = edges().to(device)
    theirs, ours = layers(kind, strategy, device=device, dtype=dtype, channels=channels)
    x = features(NODES, channels[0], device=device, dtype=dtype)
    weight = [weights(edge_index.cpu(), dtype).to(device)] if kind == 'gcn' else []
    at = taken(edge_index, strategy, drop_loops=kind == 'gcn')
    of_taken = edge_index[:, at], *(w[at].double() for w in weight)
    exact = gradients(theirs.double(), x.double(), *of_taken)
    got = gradients(must_fuse(ours), x, edge_index, *weight)
    assert all(v.dtype == dtype for v in got)
    for a, b in zip(exact, got, strict=True):
        bound = 30 * torch.finfo(dtype).eps * float(a.detach().abs().max() + 1)
        torch.testing.assert_close(b.double(), a, rtol=0, atol=bound)


def test_mixed_dtypes(device: torch.device) -> None:
    edge_index = edges().to(device)
    weight = weights(edge_index.cpu(), torch.float32).to(device)
    at = taken(edge_index, 'fastrand', drop_loops=True)
    theirs, ours = layers('gcn', device=device, dtype=torch.bfloat16, bias=False)
    x = features(NODES, IN, device=device, dtype=torch.bfloat16)
    expected, out = theirs(x, edge_index[:, at], weight[at]), ours(x, edge_index, weight)
    assert out.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('channels', [(8, 24), (24, 8)])
@pytest.mark.parametrize('kind', KINDS)
def test_autocast(kind: str, channels: tuple[int, int], device: torch.device) -> None:
    edge_index = edges().to(device)
    theirs, ours = layers(kind, device=device, dtype=torch.float32, channels=channels)
    x = features(NODES, channels[0], device=device, dtype=torch.float32)
    kept = edge_index[:, taken(edge_index, 'fastrand', drop_loops=kind == 'gcn')]
    with torch.autocast(device.type, torch.bfloat16):
        expected, got = gradients(theirs, x, kept), gradients(must_fuse(ours), x, edge_index)
        assert ours.double()(x.double(), edge_index).dtype == torch.float64
    assert expected[0].dtype == (torch.float32 if kind == 'gcn' else torch.bfloat16)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.02 * float(a.detach().abs().max() + 1))


@pytest.mark.parametrize('index', [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize('kind', KINDS)
def test_index_dtypes_and_strides(kind: str, index: torch.dtype, device: torch.device) -> None:
    _, ours = layers(kind, device=device)
    x, edge_index = features(IN, NODES, device=device).t(), edges().to(device)
    expected = ours(x.contiguous(), edge_index)
    strided = edge_index.t().contiguous().t().to(index)
    torch.testing.assert_close(ours(x, strided), expected)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize(('num_nodes', 'num_edges'), [(0, 0), (1, 0), (1, 5), (5, 0)])
def test_tiny_graphs(
    num_nodes: int, num_edges: int, strategy: str, kind: str, device: torch.device
) -> None:
    edge_index = torch.zeros(2, num_edges, dtype=torch.long, device=device)
    theirs, ours = layers(kind, strategy, device=device)
    x = features(num_nodes, IN, device=device)
    # They are all alike: unbiased, and the mean of a sample, are those of all edges.
    expected = gradients(theirs, x, edge_index)
    for given in (edge_index, prepare(edge_index, (num_nodes, num_nodes))[0]):
        assert_same(expected, gradients(must_fuse(ours), x, given))


@pytest.mark.parametrize('kind', KINDS)
def test_isolated_nodes(kind: str, device: torch.device) -> None:
    theirs, ours = layers(kind, 'unbiased', device=device)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    torch.testing.assert_close(ours(x, edge_index)[-3:], theirs(x, edge_index)[-3:])


@pytest.mark.parametrize('kind', KINDS)
def test_lazy_channels(kind: str, device: torch.device) -> None:
    edge_index = edges().to(device)
    x = features(NODES, IN, device=device, dtype=torch.float32)
    ours = LAYERS[kind][2](-1, OUT, S).to(device).eval()
    first = ours(x, edge_index)
    theirs = LAYERS[kind][0](IN, OUT).to(device)
    theirs.load_state_dict(ours.state_dict())
    kept = edge_index[:, taken(edge_index, 'fastrand', drop_loops=kind == 'gcn')]
    torch.testing.assert_close(first, theirs(x, kept))
    assert_same(gradients(theirs, x, kept), gradients(must_fuse(ours), x, edge_index))


# The adaptive sample --------------------------------------------------------------------------


@pytest.mark.parametrize(('weighted', 'flow'), [(True, FLOWS[0]), (False, FLOWS[1])])
def test_adaptive_gcn(weighted: bool, flow: str, device: torch.device) -> None:
    edge_index, x = edges().to(device), features(NODES, IN, device=device)
    weight = weights(edge_index.cpu()).to(device) if weighted else None
    theirs, ours = layers('gcn', 'adaptive', device=device, flow=flow)
    _, caching = layers('gcn', 'adaptive', device=device, flow=flow, cached=True)
    caching.load_state_dict(ours.state_dict())
    theirs.normalize = False

    def hooked(conv: Any, *args: Any) -> list[Tensor]:
        handle = conv.register_message_forward_hook(lambda module, args, out: 2 * out)
        results = gradients(conv, *args)
        handle.remove()
        return results

    graph, order = prepare(edge_index)
    for given, own in ((edge_index, slice(None)), (graph, order)):
        w = None if weight is None else weight[own]
        matrix = adapted(edge_index[:, own], w, flow)
        for conv in (ours, caching)[: 2 if given is edge_index else 1]:
            assert_same(gradients(theirs, x, *matrix), gradients(conv, x, given, w))
            # PyG's own code gets the same matrix.
            assert_same(hooked(theirs, x, *matrix), hooked(conv, x, given, w))
        if w is not None:
            w.requires_grad_()
            outs = theirs(x, *adapted(edge_index[:, own], w, flow)), ours(x, given, w)
            assert_same(*(torch.autograd.grad(out.sin().sum(), w) for out in outs))
    batch, matrix = features(3, NODES, IN, device=device), adapted(edge_index, weight, flow)
    assert_same(gradients(theirs, batch, *matrix), gradients(ours, batch, edge_index, weight))


@pytest.mark.parametrize('aggr', ['mean', 'sum', 'max', ['max', 'mean']])
def test_adaptive_sage(aggr: Any, device: torch.device) -> None:
    edge_index, x = edges().to(device), features(NODES, IN, device=device)
    theirs, ours = layers('sage', 'adaptive', device=device, aggr=aggr)
    kept = edge_index[:, taken(edge_index, 'adaptive')]
    expected = gradients(theirs, x, kept)
    if aggr == 'sum':
        ratio = ((edge_index[1].bincount(minlength=NODES) + 1) / (S + 1)).clamp(min=1)
        every = torch.zeros(NODES, NODES, dtype=torch.double, device=device)
        every.index_put_((kept[1], kept[0]), ratio.double()[kept[1]], accumulate=True)
        sums = every @ x
        torch.testing.assert_close(ours(x, edge_index), ours.lin_l(sums) + ours.lin_r(x))
    else:
        assert_same(expected, gradients(must_fuse(ours), x, edge_index))
        may_leave(ours)
    # PyG's own code cannot scale a sum: it reads all edges.
    given = edge_index if aggr == 'sum' else kept
    for conv in (theirs, ours):
        conv.register_message_forward_hook(lambda module, args, out: 2 * out)
    assert_same(gradients(theirs, x, given), gradients(ours, x, edge_index))


# Caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('weighted', [False, True])
def test_cached(weighted: bool, strategy: str, device: torch.device) -> None:
    edge_index = edges().to(device)
    weight = weights(edge_index.cpu()).to(device) if weighted else None
    x = features(NODES, IN, device=device)
    _, plain = layers('gcn', strategy, device=device)
    _, ours = layers('gcn', strategy, device=device, cached=True)
    ours.load_state_dict(plain.state_dict())
    for train in (True, False, True, False):
        results = []
        for conv in (plain, ours):
            torch.manual_seed(4)
            results.append(gradients(must_fuse(conv).train(train), x, edge_index, weight))
        assert_same(*results)
    for num_samples in (1, 5, S):
        ours.num_samples = plain.num_samples = num_samples
        results = []
        for conv in (plain.eval(), ours.eval()):
            torch.manual_seed(4)
            results.append(gradients(conv, x, edge_index, weight))
        assert_same(*results)
    other = edge_index.flip(0)
    torch.manual_seed(4)
    assert_same(results[0], gradients(ours, x, other))  # the graph of the first call
    ours.reset_parameters()
    ours.load_state_dict(plain.state_dict())
    torch.manual_seed(4)
    assert not torch.allclose(ours(x, other, weight), results[0][0])


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_what_pyg_caches_is_for_training(strategy: str, device: torch.device) -> None:
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    theirs, ours = layers('gcn', strategy, device=device, cached=True)
    torch.manual_seed(4)
    sampled = ours(x, edge_index)
    ours.reset_parameters()
    ours.load_state_dict(theirs.state_dict())
    handle = ours.register_message_forward_hook(lambda module, args, out: None)
    full = ours.train()(x, edge_index)
    assert ours._cached_edge_index is not None
    torch.testing.assert_close(full, theirs(x, edge_index))
    handle.remove()
    torch.manual_seed(4)
    torch.testing.assert_close(must_fuse(ours).eval()(x, edge_index), sampled)
    torch.testing.assert_close(ours.train()(x, edge_index), full)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('strategy', FIXED)
def test_prepared_graphs_keep_what_was_made(strategy: str, kind: str, device: torch.device) -> None:
    edge_index = edges().to(device)
    graph, perm = prepare(edge_index)
    weight = [weights(edge_index.cpu()).to(device)[perm]] if kind == 'gcn' else []
    x = features(NODES, IN, device=device)
    results = {}
    for num_samples in (S, 7, S):  # Degrees are kept for each sample by itself.
        _, ours = layers(kind, strategy, num_samples, device)
        ours.load_state_dict(results.setdefault('state', ours.state_dict()))
        with torch.profiler.profile() as profile:
            out = must_fuse(ours)(x, graph, *weight)
        if num_samples in results:
            assert not any('to_csr' in event.key for event in profile.key_averages())
        torch.testing.assert_close(out, results.setdefault(num_samples, out))
    assert not torch.allclose(results[S], results[7])
    if weight:
        before = ours(x, graph, *weight)
        weight[0].mul_(torch.linspace(1, 2, weight[0].numel(), device=device))
        after = ours(x, graph, *weight)
        assert not torch.allclose(before, after)
        torch.testing.assert_close(after, ours(x, graph.as_tensor(), *weight))


@pytest.mark.parametrize('kind', KINDS)
def test_graph_first_met_in_inference_mode(kind: str, device: torch.device) -> None:
    _, ours = layers(kind, device=device)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph, _ = prepare(edge_index)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x, graph), ours(x, edge_index))
    assert_same(gradients(ours, x, edge_index), gradients(ours, x, graph))
    assert_same(gradients(ours.train(), x, edge_index), gradients(ours, x, graph))


@pytest.mark.parametrize('kind', KINDS)
def test_paths(kind: str, device: torch.device) -> None:
    edge_index = edges().to(device)
    graph, _ = prepare(edge_index)
    mask = torch.arange(NODES, device=device) < 4
    path = execution_paths(graph, mask, 1)[0]
    theirs, ours = layers(kind, device=device)
    x = features(NODES, IN, device=device)
    full = theirs(x, edge_index)
    for given in (None, path):
        with torch.no_grad():
            torch.testing.assert_close(ours.train()(x, graph, path=given), full)
    out = ours(x, graph, path=path)
    torch.testing.assert_close(out, full)
    grads = [torch.autograd.grad(o[mask].sum(), next(c.parameters()))
             for o, c in ((out, ours), (full, theirs))]  # fmt: skip
    torch.testing.assert_close(*grads)
    kept = graph.as_tensor()[:, taken(graph.as_tensor(), 'fastrand', drop_loops=kind == 'gcn')]
    torch.testing.assert_close(ours.eval()(x, graph, path=path), theirs(x, kept))
    _, always = layers(kind, device=device, sample='always')
    with pytest.raises(ValueError, match="'path' is for full aggregation"):
        always.train()(x, graph, path=path)
    with pytest.raises(TypeError, match='ExecutionPath'):
        ours(x, graph, path=mask)


# Unbiased -------------------------------------------------------------------------------------


# Each sum, and what is sorted: edges, their weights.
@pytest.mark.parametrize(
    ('case', 'prepared'),
    [('gcn', False), ('gcn, weighted', False), ('gcn, weighted', True), ('sage', True),
     ('sage, sum', False)],
)  # fmt: skip
def test_unbiased_on_average(case: str, prepared: bool, device: torch.device) -> None:
    # Each number is within five standard errors of its mean: of the 600 of a case one is not in
    # about one run of 2,900, and the seed is fixed. A layer is linear, so that gradients are too.
    kind = case.split(',')[0]
    options = {'aggr': 'sum'} if 'sum' in case else {}
    theirs, ours = layers(kind, 'unbiased', 4, device, channels=(3, 4), sample='always', **options)
    x, edge_index = features(NODES, 3, device=device), edges().to(device)
    weight = [weights(edge_index.cpu()).to(device)] if 'weighted' in case else []
    graph, order = prepare(edge_index) if prepared else (edge_index, slice(None))
    must_fuse(ours).train()
    expected = torch.cat([t.detach().flatten() for t in gradients(theirs, x, edge_index, *weight)])
    draws = torch.stack([
        torch.cat([t.detach().flatten()
                   for t in gradients(ours, x, graph, *(w[order] for w in weight))])
        for _ in range(600)
    ])  # fmt: skip
    spread = draws.std(0)
    assert float(spread.max()) > 0.1
    error = (draws.mean(0) - expected).abs()
    assert (error <= 5 * spread / math.sqrt(len(draws)) + 1e-9).all()


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_unbiased_draws_anew_at_every_call(kind: str, train: bool, device: torch.device) -> None:
    _, ours = layers(kind, 'unbiased', device=device, sample='always')
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    must_fuse(ours).train(train)
    torch.manual_seed(5)
    first, second = gradients(ours, x, edge_index), gradients(ours, x, edge_index)
    assert not torch.allclose(first[0], second[0])
    torch.manual_seed(5)
    assert_equal(first, gradients(ours, x, edge_index))
    assert_equal(second, gradients(ours, x, edge_index))


@pytest.mark.parametrize('channels', [(6, 20), (20, 6)])
@pytest.mark.parametrize('kind', KINDS)
def test_backward_takes_the_sample_of_forward(
    kind: str, channels: tuple[int, int], device: torch.device
) -> None:
    _, ours = layers(
        kind, 'unbiased', device=device, channels=channels, sample='always', bias=False
    )
    edge_index = edges().to(device)
    for given in (edge_index, prepare(edge_index)[0]):
        x = features(NODES, channels[0], device=device).requires_grad_()
        out = must_fuse(ours)(x, given)
        direction = torch.randn_like(out)
        (grad,) = torch.autograd.grad(out, x, direction)
        # The layer is linear in x: it is its own derivative.
        torch.testing.assert_close((grad * x).sum(), (direction * out).sum())


def test_unbiased_always_keeps_self_loops(device: torch.device) -> None:
    degree = 50
    edge_index = torch.stack([torch.arange(1, degree + 1), torch.zeros(degree, dtype=torch.long)])
    _, ours = layers('gcn', 'unbiased', 2, device, channels=(1, 1), bias=False)
    x = torch.zeros(degree + 1, 1, dtype=torch.float64, device=device)
    x[0] = 1
    expected = ours.lin.weight.item() / (degree + 1)
    for _ in range(20):
        assert ours(x, edge_index.to(device))[0].item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('kind', KINDS)
def test_same_bits(kind: str, strategy: str, device: torch.device) -> None:
    _, ours = layers(kind, strategy, 40, device, torch.float32, sample='always')
    x = features(NODES, IN, device=device, dtype=torch.float32)
    edge_index = edges(num_edges=20_000).to(device)
    for graph in (edge_index, prepare(edge_index)[0]):
        runs = []
        for _ in range(3):
            torch.manual_seed(3)
            runs.append(gradients(ours, x, graph))
        assert same(runs[0], runs[1])
        assert same(runs[0], runs[2])


# Eight bits -----------------------------------------------------------------------------------


@pytest.mark.parametrize('channels', [(32, 48), (48, 32)])
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('kind', KINDS)
def test_quantize(
    kind: str, strategy: str, channels: tuple[int, int], device: torch.device
) -> None:
    edge_index = edges().to(device)
    for dtype in DTYPES:
        _, exact = layers(kind, strategy, device=device, dtype=dtype, channels=channels)
        _, ours = layers(
            kind, strategy, device=device, dtype=dtype, channels=channels, quantize=True
        )
        ours.load_state_dict(exact.state_dict())
        x = features(NODES, channels[0], device=device, dtype=dtype)

        def run(conv: Any, x: Tensor = x) -> Tensor:
            torch.manual_seed(6)
            return must_fuse(conv)(x, edge_index)

        # A call that needs any gradient does not round.
        assert torch.equal(run(ours), run(exact))
        graph, _ = prepare(edge_index, (NODES, NODES))  # in place of scattering in any order
        with torch.no_grad():
            full = [must_fuse(conv.train())(x, graph) for conv in (ours, exact)]
            assert torch.equal(*full)
            out, right = run(ours.eval()).double(), run(exact.eval()).double()
        assert not torch.equal(out, right)
        # Every term is off by 1/254 of the largest of its row at most; they are not all so.
        assert float((out - right).abs().max()) < 0.03 * float(right.abs().max())
        for parameter in ours.parameters():
            parameter.requires_grad_(False)
        torch.testing.assert_close(run(ours).double(), out, rtol=0, atol=0)
        assert torch.equal(run(ours, x.clone().requires_grad_()), right.to(dtype))


def test_quantize_is_for_sums_and_means(device: torch.device) -> None:
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    theirs, ours = layers('sage', device=device, aggr='max', quantize=True)
    with torch.no_grad():
        out = ours(x, edge_index)
    expected = theirs(x, edge_index[:, taken(edge_index, 'fastrand')])
    torch.testing.assert_close(out, expected)


# Derivatives, compilers -----------------------------------------------------------------------


@pairs(
    ('channels', 'case', 'strategy'),
    [(3, 2), (2, 5)], ['gcn', 'gcn, weighted', 'sage', 'sage, max'], STRATEGIES,
)  # fmt: skip
def test_gradcheck(
    channels: tuple[int, int], case: str, strategy: str, device: torch.device
) -> None:
    if 'max' in case and strategy == 'unbiased':
        return
    # Without duplicate self-loops: all of them take the gradient of the one that counts, as in PyG.
    edge_index = torch.randint(8, (2, 24)).unique(dim=1).to(device)
    graph, perm = prepare(edge_index, (8, 8))
    kind = case.split(',')[0]
    options = {'aggr': 'max'} if 'max' in case else {}
    _, conv = layers(kind, strategy, 2, device, channels=channels, sample='always', **options)
    names = [name for name, _ in conv.named_parameters()]

    def run(x: Tensor, *given: Tensor) -> Tensor:
        torch.manual_seed(8)
        state = dict(zip(names, given, strict=False))
        return torch.func.functional_call(conv, state, (x, graph, *given[len(names) :]))

    inputs = [features(8, channels[0], device=device), *conv.parameters()]
    if 'weighted' in case:
        inputs.append(weights(edge_index.cpu()).to(device)[perm])
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    if 'max' not in case:
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


# Each case on each graph, a pickled one once for each kind; compiled code only hands strategies on.
@pytest.mark.parametrize(
    ('case', 'graph_kind', 'strategy'),
    [
        (case, graph_kind, STRATEGIES[k % len(STRATEGIES)])
        for k, (case, graph_kind) in enumerate(itertools.product(
            ('sage, list', 'sage', 'gcn, weighted', 'gcn'), ('plain', 'prepared', 'pickled')
        ))
        if (case, graph_kind) not in (('sage, list', 'pickled'), ('gcn', 'pickled'))
    ],
)  # fmt: skip
def test_compile(case: str, graph_kind: str, strategy: str, device: torch.device) -> None:
    kind = case.split(',')[0]
    if 'list' in case and strategy == 'unbiased':
        return
    edge_index = edges().to(device)
    options = {'aggr': ['max', 'mean']} if 'list' in case else {}
    _, conv = layers(kind, strategy, device=device, sample='always', **options)
    graph, order = (edge_index, slice(None)) if graph_kind == 'plain' else prepare(edge_index)
    if graph_kind == 'pickled':  # PyG's caches survive this, ours do not.
        graph = pickle.loads(pickle.dumps(graph))
    weight = [weights(edge_index.cpu()).to(device)[order]] if 'weighted' in case else []
    x = features(NODES, IN, device=device)
    torch.manual_seed(9)
    expected = gradients(conv, x, graph, *weight)
    torch._dynamo.reset()
    compiled = torch.compile(must_fuse(conv), fullgraph=True, backend='aot_eager')
    torch.manual_seed(9)
    first = gradients(compiled, x, graph, *weight)
    assert_same(expected, first)
    if strategy == 'unbiased':
        assert not torch.allclose(compiled(x, graph, *weight), first[0])


@pytest.mark.parametrize('kind', KINDS)
def test_compile_quantized_evaluation_after_training(kind: str, device: torch.device) -> None:
    _, conv = layers(kind, device=device, dtype=torch.float32, quantize=True)
    x = features(NODES, IN, device=device, dtype=torch.float32)
    graph, _ = prepare(edges().to(device))
    torch._dynamo.reset()
    compiled = torch.compile(must_fuse(conv), fullgraph=True, backend='aot_eager')
    assert_same(gradients(conv.train(), x, graph), gradients(compiled, x, graph))
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(x, graph), conv.eval()(x, graph))


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('kind', KINDS)
def test_captured_training_step(kind: str, strategy: str, device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('CUDA graphs need a GPU')
    graph, _ = prepare(edges().to(device))
    _, conv = layers(kind, strategy, device=device, dtype=torch.float32, sample='always')
    x = features(NODES, IN, device=device, dtype=torch.float32)

    def step() -> list[Tensor]:
        out = conv(x, graph)
        return [out, *torch.autograd.grad(out.square().sum(), list(conv.parameters()))]

    replay, results = captured(step, warm_ups=3)
    replay()
    first = [t.detach().clone() for t in results]
    replay()
    if strategy == 'unbiased':
        assert not torch.allclose(results[0], first[0])
    else:
        assert_same(first, step())
        assert_equal(first, [t.detach() for t in results])


# PyG's own way --------------------------------------------------------------------------------


@pytest.mark.parametrize('strategy', [*FIXED, 'unbiased'])
@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_hooks(kind: str, prepared: bool, strategy: str, device: torch.device) -> None:
    theirs, ours = layers(kind, strategy, device=device)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    graph, order = prepare(edge_index) if prepared else (edge_index, slice(None))
    weight = [weights(edge_index.cpu()).to(device)] if kind == 'gcn' else []
    at = slice(None)
    if strategy != 'unbiased':
        at = taken(edge_index, strategy, drop_loops=kind == 'gcn')
    for conv in (theirs, ours):
        handle = conv.register_message_forward_hook(lambda module, args, out: 2 * out)
    assert_same(
        gradients(theirs, x, edge_index[:, at], *(w[at] for w in weight)),
        gradients(ours, x, graph, *(w[order] for w in weight)),
    )
    handle.remove()
    must_fuse(ours)(x, graph)


@pytest.mark.parametrize('kind', KINDS)
def test_hooks_of_the_linear_map_run(kind: str, device: torch.device) -> None:
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    theirs, ours = layers(kind, device=device)
    kept = edge_index[:, taken(edge_index, 'fastrand', drop_loops=kind == 'gcn')]
    for conv in (theirs, ours):
        lin = conv.lin if kind == 'gcn' else conv.lin_l
        lin.register_forward_hook(lambda module, args, out: 2 * out)
    assert_same(gradients(theirs, x, kept), gradients(must_fuse(ours), x, edge_index))


@pytest.mark.parametrize('strategy', ['fastrand', 'unbiased'])
@pytest.mark.parametrize('kind', KINDS)
def test_explainers_are_given_all_edges(kind: str, strategy: str, device: torch.device) -> None:
    edge_index = edges(num_edges=100).to(device)
    x = features(NODES, IN, device=device, dtype=torch.float32)
    target = torch.randint(OUT, (NODES,), device=device)
    masks = []
    for conv in layers(kind, strategy, device=device, dtype=torch.float32):
        torch.manual_seed(0)
        explainer = Explainer(
            conv, GNNExplainer(epochs=3), explanation_type='phenomenon', edge_mask_type='object',
            model_config=dict(mode='multiclass_classification', task_level='node',
                              return_type='raw'),
        )  # fmt: skip
        masks.append(explainer(x, edge_index, target=target).edge_mask)
    torch.testing.assert_close(*masks)
    assert masks[0].max() > 0


@pytest.mark.parametrize('strategy', [*FIXED, 'unbiased'])
@pytest.mark.parametrize('kind', KINDS)
def test_static_batches(kind: str, strategy: str, device: torch.device) -> None:
    theirs, ours = layers(kind, strategy, device=device)
    x, edge_index = features(3, NODES, IN, device=device), edges().to(device)
    at = slice(None)
    if strategy != 'unbiased':
        at = taken(edge_index, strategy, drop_loops=kind == 'gcn')
    assert_same(gradients(theirs, x, edge_index[:, at]), gradients(ours, x, edge_index))


def test_other_weights_and_subclasses(device: torch.device) -> None:
    edge_index = edges().to(device)
    at = taken(edge_index, 'fastrand', drop_loops=True)
    x = features(NODES, IN, device=device)
    theirs, ours = layers('gcn', device=device)
    wide = layers('gcn', device=device, dtype=torch.float32)
    for conv in wide:  # Of a type that neither features nor their sums have.
        weight = weights(edge_index.cpu()).to(device)
        out = conv(x.float(), *((edge_index, weight) if conv is wide[1] else
                                (edge_index[:, at], weight[at])))  # fmt: skip
        assert out.dtype == torch.float64

    class Doubled(SampledGCNConv):
        def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
            return 2 * super().message(x_j, edge_weight)

    doubled = Doubled(IN, OUT, S).to(device).double().eval()
    doubled.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(
        doubled(x, edge_index) - doubled.bias, 2 * (theirs(x, edge_index[:, at]) - theirs.bias)
    )


@pytest.mark.parametrize('strategy', FIXED)
@pytest.mark.parametrize('loops', [None, False])
@pytest.mark.parametrize('layout', ['coo', 'csr', 'SparseTensor', 'SparseTensor without values'])
@pytest.mark.filterwarnings('ignore:Sparse', 'ignore:Converting sparse tensor')
def test_gcn_of_sparse_matrices(
    layout: str, loops: bool | None, strategy: str, device: torch.device
) -> None:
    sparse_tensor = layout.startswith('SparseTensor')
    if sparse_tensor and not WITH_TORCH_SPARSE:
        pytest.skip('torch-sparse is not installed')
    if sparse_tensor and device.type == 'cuda':
        pytest.skip('torch-sparse was built for the CPU')
    # By rows, as a matrix holds its entries.
    row, col = edges().flip(0).unique(dim=1).to(device)
    value = torch.rand(row.numel(), dtype=torch.float64, device=device) + 0.1

    def matrix(at: Any) -> Any:
        r, c, v = row[at], col[at], value[at]
        if sparse_tensor:
            v = None if 'without' in layout else v
            return SparseTensor(row=r, col=c, value=v, sparse_sizes=(NODES, NODES))
        made = torch.sparse_coo_tensor(torch.stack([r, c]), v, (NODES, NODES)).coalesce()
        return made if layout == 'coo' else made.to_sparse_csr()

    theirs, ours = layers('gcn', strategy, device=device, add_self_loops=loops)
    x = features(NODES, IN, device=device)
    edge_index = torch.stack([col, row])
    # PyG replaces the loops of a SparseTensor, and adds one to those of a torch matrix.
    drops = sparse_tensor and ours.add_self_loops
    at = taken(edge_index, strategy, drop_loops=drops).unique()
    adj_t, kept = matrix(slice(None)), matrix(at)
    assert_same(gradients(theirs, x, kept), gradients(must_fuse(ours), x, adj_t))
    assert_same(gradients(theirs, x, adj_t), gradients(ours.train(), x, adj_t))
    may_leave(ours)
    ours.eval().register_message_forward_hook(lambda module, args, out: None)
    with pytest.raises(NotImplementedError, match='sparse matrix'):
        ours(x, adj_t)


@pytest.mark.filterwarnings('ignore:Sparse', 'ignore:Converting sparse tensor')
def test_sage_of_sparse_matrices(device: torch.device) -> None:
    row, col = edges().flip(0).unique(dim=1).to(device)
    ones = torch.ones(row.numel(), dtype=torch.float64, device=device)
    adj_t = torch.sparse_coo_tensor(torch.stack([row, col]), ones, (NODES, NODES)).coalesce()
    x = features(NODES, IN, device=device)
    theirs, ours = layers('sage', device=device)
    for given in (adj_t, adj_t.to_sparse_csr()):
        with pytest.raises(NotImplementedError, match="pass an 'edge_index'"):
            ours(x, given)
        assert_same(gradients(theirs, x, given), gradients(ours.train(), x, given))
        ours.eval()
    for options in ({'sample': 'never'}, {'strategy': 'unbiased'}):
        _, conv = layers('sage', device=device, **options)
        conv.load_state_dict(theirs.state_dict())
        assert_same(gradients(theirs, x, adj_t), gradients(conv, x, adj_t))


def test_sage_of_sparse_features(device: torch.device) -> None:
    x = maxk(features(NODES, IN, device=device), 3)
    edge_index = edges().to(device)
    for aggr in ('mean', 'max'):
        _, ours = layers('sage', device=device, aggr=aggr)
        torch.testing.assert_close(ours(x, edge_index), ours(x.to_dense(), edge_index))


# A PyG layer like others ----------------------------------------------------------------------


@pytest.mark.parametrize('kind', KINDS)
def test_is_a_pyg_layer(kind: str) -> None:
    theirs, ours = layers(kind, 'bucket')
    inner = '6, 20' if kind == 'gcn' else '6, 20, aggr=mean'
    name = LAYERS[kind][2].__name__
    assert repr(ours) == f"{name}({inner}, num_samples=3, strategy='bucket')"
    ours.quantize = True
    assert repr(ours).endswith("strategy='bucket', quantize=True)")
    ours.quantize = False
    assert isinstance(ours, LAYERS[kind][0])
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    x, edge_index = features(NODES, IN), edges()
    expected = gradients(ours, x, edge_index)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert repr(again) == repr(ours)
        assert not again.training
        assert_equal(expected, gradients(must_fuse(again), x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning')
def test_torchscript(kind: str) -> None:
    theirs, ours = layers(kind, dtype=torch.float32)
    for run in (torch.jit.script, lambda conv: conv.to_base()):
        with pytest.raises(NotImplementedError, match=r'torch\.compile'):
            run(ours)
    _, ours = layers(kind, dtype=torch.float32, sample='never')
    ours.load_state_dict(theirs.state_dict())
    x, edge_index = features(NODES, IN, dtype=torch.float32), edges()
    torch.testing.assert_close(torch.jit.script(ours)(x, edge_index), theirs(x, edge_index))
    base = ours.to_base()
    assert type(base) is LAYERS[kind][0]
    assert not hasattr(base, 'num_samples')
    torch.testing.assert_close(base(x, edge_index), theirs(x, edge_index))


@pytest.mark.parametrize('kind', KINDS)
def test_accelerate_leaves_it_alone(kind: str) -> None:
    _, ours = layers(kind)
    model = torch.nn.ModuleList([ours, LAYERS[kind][0](IN, OUT)])
    x, edge_index = features(NODES, IN), edges()
    expected = ours(x, edge_index)
    reports = pyg_fast.accelerate_report(pyg_fast.accelerate(model))
    name = LAYERS[kind][2].__name__
    assert reports[0][:7] == ('0', name, name, None, name, 'kernel', None)
    assert type(model[1]) is {'gcn': FusedGCNConv, 'sage': FusedSAGEConv}[kind]
    pyg_fast.restore(model)
    assert type(model[0]) is LAYERS[kind][2]
    assert type(model[1]) is LAYERS[kind][0]
    assert torch.equal(model[0](x, edge_index), expected)


def test_in_a_model_of_pyg() -> None:
    class Sampled(GCN):
        def init_conv(self, in_channels: Any, out_channels: int, **kwargs: Any) -> Any:
            return SampledGCNConv(in_channels, out_channels, S, **kwargs)

    theirs = GCN(IN, 16, 2, OUT, dropout=0.0).double()
    ours = Sampled(IN, 16, 2, OUT, dropout=0.0).double()
    ours.load_state_dict(theirs.state_dict())
    x, edge_index = features(NODES, IN), edges()
    assert_same(gradients(theirs, x, edge_index), gradients(ours, x, edge_index))
    kept = edge_index[:, taken(edge_index, 'fastrand', drop_loops=True)]
    assert_same(gradients(theirs, x, kept), gradients(ours.eval(), x, edge_index))


# Bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', KINDS)
def test_bad_options(kind: str) -> None:
    def build(num_samples: Any = S, strategy: Any = 'fastrand', **kwargs: Any) -> Any:
        return LAYERS[kind][2](IN, OUT, num_samples, strategy, **kwargs)

    for num_samples in (1, 4096, 4097, 10**6):
        assert build(num_samples).num_samples == num_samples
    for num_samples in (0, -1):
        with pytest.raises(ValueError, match="'num_samples' must be at least 1, got"):
            build(num_samples)
    for num_samples in (3.0, '3', None, True):
        with pytest.raises(TypeError, match="'num_samples' must be an integer"):
            build(num_samples)
    with pytest.raises(ValueError, match="'strategy' must be one of .*got 'random'"):
        build(strategy='random')
    with pytest.raises(TypeError, match="'strategy' must be a string"):
        build(strategy=1)
    for sample in ('train', True, None):
        with pytest.raises(ValueError, match="'sample' must be one of"):
            build(sample=sample)
    for quantize in (1, 'int8', None):
        with pytest.raises(TypeError, match="'quantize' must be a bool"):
            build(quantize=quantize)
    if kind == 'sage':
        for aggr in ('max', 'std', ['mean', 'sum']):
            with pytest.raises(ValueError, match='supports only sums and means'):
                build(strategy='unbiased', aggr=aggr)
    else:
        with pytest.raises(ValueError, match='self-loops'):
            build(add_self_loops=True, normalize=False)


@pytest.mark.parametrize('hooked', [False, True])
@pytest.mark.parametrize('kind', KINDS)
def test_bad_input(kind: str, hooked: bool, device: torch.device, raises: Any) -> None:
    _, ours = layers(kind, device=device)
    if hooked:  # The checks of PyG's own way are PyG's, but for those of the sample.
        ours.register_message_forward_hook(lambda module, args, out: None)
    x, edge_index = features(NODES, IN, device=device), edges().to(device)
    for end, bad in itertools.product((0, 1), (NODES, -1)):
        wrong = edge_index.clone()
        wrong[end, 7] = bad
        with raises(IndexError, match=rf'edge_index\[{end}\]'):
            ours(x, wrong)
    with raises(TypeError, match='edge_index'):
        ours(x, edge_index.double())
    with raises(ValueError, match='edge_index'):
        ours(x, edge_index[:1])
    graph, _ = prepare(edge_index)
    with raises(ValueError, match='size'):
        ours(x[1:], graph)
    with raises(ValueError, match="'edge_index' is on meta"):
        ours(x, edge_index.to('meta'))
    if kind == 'gcn':
        with raises(ValueError, match='tuple'):
            ours((x, x), edge_index)
        weight = torch.ones(edge_index.size(1), dtype=x.dtype, device=device)
        for bad in (weight[1:], torch.cat([weight, weight])):
            with raises(ValueError, match='edge_weight'):
                ours(x, edge_index, bad)
        if not hooked:
            with raises(ValueError, match="'edge_weight' is on meta"):
                ours(x, edge_index, weight.to('meta'))
    else:
        with raises(ValueError, match='size'):
            ours(x, edge_index, size=(NODES + 1, NODES))


@pytest.mark.parametrize('cls', [SampledGCNConv, SampledSAGEConv])
def test_more_samples_than_a_kernel_takes(device: torch.device, cls: type) -> None:
    conv = cls(4, 3, 5000, sample='always').to(device).eval()
    edge_index = torch.stack([torch.arange(6000) % 50, torch.zeros(6000, dtype=torch.long)])
    x, conv = torch.randn(50, 4, device=device, dtype=torch.double), conv.double()
    out = conv(x, edge_index.to(device))
    conv.sample = 'never'
    torch.testing.assert_close(out, conv(x, edge_index.to(device)))


def test_cached_keeps_the_first_graph_if_pygs_code_runs_first(device: torch.device) -> None:
    conv = SampledGCNConv(4, 3, 200, sample='always', cached=True).to(device)
    first, other = torch.randint(12, (2, 2, 50), device=device)
    x = torch.randn(12, 4, device=device)
    hook = conv.register_propagate_forward_hook(lambda module, args, out: None)
    before = conv(x, first)
    hook.remove()
    torch.testing.assert_close(conv(x, other), before)
    conv._cached_norm = conv._cached_edges = None
    assert not torch.allclose(conv(x, other), before)


@pytest.mark.parametrize('weighted', [False, True])
def test_cached_is_of_the_first_graph_for_all_samples(device: torch.device, weighted: bool) -> None:
    first, other = torch.randint(12, (2, 2, 50), device=device)
    w_first, w_other = torch.rand(2, 50, device=device) if weighted else (None, None)
    x = torch.randn(12, 4, device=device)
    conv = SampledGCNConv(4, 3, 2, sample='eval', cached=True).to(device)
    same = SampledGCNConv(4, 3, 2, sample='eval').to(device)
    same.load_state_dict(conv.state_dict())
    for training, num_samples in ((False, 2), (True, 2), (False, 3), (False, 2)):
        for each in (conv, same):
            each.train(training).num_samples = num_samples
        expected = same(x, first, w_first)
        given = (first, w_first) if (training, num_samples) == (False, 2) else (other, w_other)
        torch.testing.assert_close(conv(x, *given), expected)
    conv.reset_parameters()
    assert conv._cached_edges is None
