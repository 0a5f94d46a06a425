"""PyG's 59 convolution classes with options, what must run each of them, and its record.

`python -m tests.nn._layers` writes the record, of which the manual draws its page.
"""

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric.typing
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch_geometric import EdgeIndex
from torch_geometric.nn import conv as pyg
from torch_geometric.nn.aggr import MultiAggregation
from torch_geometric.nn.conv import spline_conv

import pyg_fast
from pyg_fast.graph import Graph, PreparedGraph
from tests.ops._graphs import hubs

RECORD = Path(__file__).parents[2] / 'docs/systems/layers.json'
# Not counted among the 59: the base class, layers of other libraries, and those that pass no
# messages themselves.
LEFT_OUT = {
    'MessagePassing', 'CuGraphSAGEConv', 'CuGraphGATConv', 'CuGraphRGCNConv', 'FusedGATConv',
    'HeteroConv', 'WLConv', 'XConv',
}  # fmt: skip

N, E, F, D = 37, 160, 16, 6
NUM_SRC = 29  # of a bipartite graph
METADATA = (['a', 'b'], [('a', 'to', 'b'), ('b', 'to', 'a')])


def graph(device: torch.device, seed: int = 0) -> Tensor:
    """With isolated nodes, a hub, a self-loop and duplicate edges."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(N - 3, (2, E), generator=generator)
    edges[1, :40] = 5
    edges[:, -2:] = torch.tensor([[1, 2], [1, 2]])
    edges[:, -3] = edges[:, -4]
    loops = edges[0] == edges[1]  # Of several on a node, PyG takes the weight of any.
    edges[0, loops] = (edges[0, loops] + 1) % (N - 3)
    edges[:, 0] = 5
    return edges.to(device)


def hub_graph(device: torch.device) -> Tensor:
    """A row and a column with most of the edges, without loops."""
    edges = hubs(N - 3, N - 3, 1300, 0.5, 0.4, aligned=True).edge_index
    loops = edges[0] == edges[1]
    edges[0, loops] = (edges[0, loops] + 1) % (N - 3)
    return edges.to(device)


def prepared(edges: Tensor, num_src: int = N) -> EdgeIndex:
    return EdgeIndex(edges, sparse_size=(num_src, N))


def lean(edges: Tensor, num_src: int = N) -> PreparedGraph:
    """Without the list, and without the positions in the transpose."""
    graph = Graph.from_edge_index(edges, num_src, N)
    return PreparedGraph(graph._replace(t_perm=None, missing='t_perm'))


def arguments(
    names: str,
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    edges: Tensor | None = None,
) -> list[Any]:
    """Arguments of a layer's `forward`, by name. A name with `!` is a prepared graph, one with `#`
    has no list of edges."""
    generator = torch.Generator().manual_seed(2)
    edges = graph(device) if edges is None else edges
    num_edges = edges.size(1)

    def random(*shape: int) -> Tensor:
        x = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1
        return x.to(device, dtype).requires_grad_()

    bipartite = torch.stack([edges[0] % NUM_SRC, edges[1]])
    made: dict[str, Callable[[], Any]] = {
        'x': lambda: random(N, F),
        'x_0': lambda: random(N, F),
        'two': lambda: random(N, 2 * F),
        'stack': lambda: random(N, 3, F),
        'batch': lambda: random(2, N, F),
        'none': lambda: None,
        'pair': lambda: (random(NUM_SRC, F), random(N, F)),
        'pos': lambda: random(N, 3),
        'normal': lambda: random(N, 3),
        'edges': lambda: edges,
        'edges!': lambda: prepared(edges),
        'edges#': lambda: lean(edges),
        'bipartite': lambda: bipartite,
        'bipartite!': lambda: prepared(bipartite, NUM_SRC),
        'bipartite#': lambda: lean(bipartite, NUM_SRC),
        'other_edges': lambda: edges.flip(0)[:, :90],
        'hyperedges': lambda: edges,
        'mesh': lambda: torch.stack([edges[0], torch.arange(num_edges, device=device) // 4 % N])[
            :, : num_edges // 4 * 4
        ],
        'weight': lambda: random(num_edges),
        'attr': lambda: random(num_edges, D),
        'pseudo': lambda: (random(num_edges, 2) - 0.1).detach().requires_grad_(),
        'wide': lambda: random(num_edges, F),
        'relation': lambda: torch.arange(num_edges, device=device) % 3,
        'kind': lambda: torch.arange(N, device=device) % 2,
        'hyperattr': lambda: random(int(edges[1].max()) + 1, F),
        'xs': lambda: {'a': random(NUM_SRC, F), 'b': random(N, F)},
        'relations': lambda: {METADATA[1][0]: bipartite, METADATA[1][1]: bipartite.flip(0)},
    }
    return [made[name]() for name in names.split()]


def tensors(value: Any) -> list[Tensor]:
    """The float tensors of arguments or results."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [each for part in value for each in tensors(part)]
    return []


def run(layer: Module, args: list[Any]) -> list[Tensor | None]:
    """Results, which the caller may `view`, and all gradients; None where there is none."""
    outs = tensors(layer(*args))
    assert all(out.is_contiguous() for out in outs)
    weights = [
        torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device) for out in outs
    ]
    total = sum((out.flatten() * w).sum() for out, w in zip(outs, weights, strict=True))
    leaves = [*tensors(args), *(p for p in layer.parameters() if p.requires_grad)]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [*outs, *grads]


def both(conv: Any, device: torch.device) -> tuple[Any, Any]:
    """A layer, with every parameter random, and its accelerated copy: PyG leaves one of RGATConv
    uninitialized, and those of HGTConv that are factors 1."""
    for parameter in conv.parameters():
        if not isinstance(parameter, torch.nn.UninitializedParameter):
            torch.nn.init.normal_(parameter, std=0.5)
    conv = conv.double().to(device)
    return conv, pyg_fast.accelerate(copy.deepcopy(conv))


def assert_alike(got: list[Tensor | None], expected: list[Tensor | None], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        if one is None or other is None:  # Optimizers and DDP see the difference to zeros.
            assert one is other
            continue
        scale = max(1.0, other.abs().max().item()) if other.numel() > 0 else 1.0
        torch.testing.assert_close(one / scale, other / scale, atol=tolerance, rtol=tolerance)


# pyg-lib's functions, as far as the layers call them, for machines without it -------------------
def _knn(
    x: Tensor, y: Tensor, ptr_x: None, ptr_y: None, k: int, cosine: bool, num_workers: int
) -> Tensor:
    col = torch.cdist(y, x).topk(k, largest=False).indices
    row = torch.arange(y.size(0), device=y.device).repeat_interleave(k)
    return torch.stack([row, col.flatten()])


def _spline_basis(
    pseudo: Tensor, size: Tensor, is_open: Tensor, degree: int
) -> tuple[Tensor, Tensor]:
    assert degree == 1
    place = pseudo * (size - is_open).to(pseudo)
    low, basis, index = place.floor().long(), [], []
    for corner in itertools.product((0, 1), repeat=pseudo.size(1)):
        high = torch.tensor(corner, device=pseudo.device)
        share = place - low
        basis.append(torch.where(high.bool(), share, 1 - share).prod(-1))
        strides = torch.cumprod(torch.cat([torch.ones_like(size[:1]), size[:-1]]), 0)
        index.append(((low + high) % size * strides).sum(-1))
    return torch.stack(basis, -1), torch.stack(index, -1)


def _spline_weighting(x: Tensor, weight: Tensor, basis: Tensor, index: Tensor) -> Tensor:
    return torch.einsum('es,ei,esio->eo', basis, x, weight[index])


def use_pyg_lib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the layers what they need of pyg-lib where it is not installed."""
    typing = torch_geometric.typing
    changes = [
        *[(typing, 'WITH_KNN', True), (torch.ops.pyg, 'knn', _knn)] * (not typing.WITH_KNN),
        *[
            (spline_conv, 'spline_basis', _spline_basis),
            (spline_conv, 'spline_weighting', _spline_weighting),
        ] * (not typing.WITH_SPLINE),
    ]  # fmt: skip
    for owner, name, value in changes:
        monkeypatch.setattr(owner, name, value, raising=False)


# The layers ---------------------------------------------------------------------------------------
KERNEL, BLOCKS = 'message as one kernel', 'message over blocks of edges'
TILES = 'message as one kernel over tiles of edges'
GCN, SAGE, GIN = 'FusedGCNConv', 'FusedSAGEConv', 'FusedGINConv'
GAT, GATV2 = 'FusedGATConv', 'FusedGATv2Conv'
OURS = (KERNEL, TILES, BLOCKS, GCN, SAGE, GIN, GAT, GATV2)


class Case(NamedTuple):
    """A layer with options, and what must run it."""

    layer: str
    options: str  # for the record
    make: Callable[[], Module]
    runs: str = KERNEL  # KERNEL, our class, or the start of the reason why PyG's code runs
    args: str = 'x edges'  # names of `arguments`
    dtype: torch.dtype = torch.float64
    why: str = ''  # for the record, where the reason is that of a trace

    @property
    def name(self) -> str:
        return f'{self.layer}, {self.options}' if self.options else self.layer

    @property
    def is_ours(self) -> bool:
        return self.runs in OURS


def mlp(num_in: int, num_out: int) -> Module:
    return Sequential(Linear(num_in, num_out), ReLU(), Linear(num_out, num_out))


def pna() -> Module:
    scalers = ['identity', 'amplification', 'attenuation']
    degrees = torch.tensor([0, 5, 9, 3])
    return pyg.PNAConv(F, F, ['mean', 'min', 'max', 'std'], scalers, degrees, towers=2)


def combined() -> Module:
    kwargs = dict(in_channels=F, out_channels=8)
    return pyg.SimpleConv(MultiAggregation(['mean', 'std', 'min'], mode='proj', mode_kwargs=kwargs))


WEIGHTED, EDGES, BIPARTITE = 'x edges weight', 'x edges attr', 'pair bipartite'
REVERSED = 'target_to_source'
# fmt: off
CASES = [
    Case('AGNNConv', '', lambda: pyg.AGNNConv()),
    Case('APPNP', '', lambda: pyg.APPNP(2, 0.1)),
    Case('ARMAConv', '2 stacks, 2 layers', lambda: pyg.ARMAConv(F, 8, 2, 2)),
    Case('AntiSymmetricConv', 'phi=GCNConv', lambda: pyg.AntiSymmetricConv(F), GCN),
    Case('CGConv', 'edge features', lambda: pyg.CGConv(F, D), args=EDGES),
    Case('CGConv', "aggr='mean'", lambda: pyg.CGConv(F, 0, aggr='mean')),
    Case('ChebConv', 'K=3', lambda: pyg.ChebConv(F, 8, 3)),
    Case('ClusterGCNConv', '', lambda: pyg.ClusterGCNConv(F, 8)),
    Case('DNAConv', '2 heads', lambda: pyg.DNAConv(F, 2), args='stack edges'),
    Case('DNAConv', '2 groups', lambda: pyg.DNAConv(F, 2, 2), 'aten.expand',
         args='stack edges', why='a product with one matrix per group'),
    Case('DirGNNConv', 'conv=SAGEConv', lambda: pyg.DirGNNConv(pyg.SAGEConv(F, 8)), SAGE),
    Case('DirGNNConv', 'conv=GraphConv', lambda: pyg.DirGNNConv(pyg.GraphConv(F, 8))),
    Case('DynamicEdgeConv', 'nn=Linear', lambda: pyg.DynamicEdgeConv(Linear(2 * F, 8), 4),
         args='x'),
    Case('EGConv', "aggregators=['symnorm']", lambda: pyg.EGConv(F, F)),
    Case('EdgeConv', "nn=MLP, aggr='sum'", lambda: pyg.EdgeConv(mlp(2 * F, 8), 'sum')),
    Case('EdgeConv', "nn=MLP, aggr='mean'", lambda: pyg.EdgeConv(mlp(2 * F, 8), 'mean')),
    Case('EdgeConv', "nn=Linear, aggr='max'", lambda: pyg.EdgeConv(Linear(2 * F, F))),
    Case('EdgeConv', "nn=MLP, aggr='max'", lambda: pyg.EdgeConv(mlp(2 * F, F)), TILES),
    Case('FAConv', '', lambda: pyg.FAConv(F), args='x x_0 edges'),
    Case('FastRGCNConv', '', lambda: pyg.FastRGCNConv(F, 8, 3), 'aten.scatter.value has no kernel',
         args='x edges relation'),
    Case('FeaStConv', '2 heads', lambda: pyg.FeaStConv(F, F, heads=2)),
    Case('FiLMConv', '', lambda: pyg.FiLMConv(F, F)),
    Case('GATConv', '2 heads', lambda: pyg.GATConv(F, 8, 2), GAT),
    Case('GATConv', 'edge features', lambda: pyg.GATConv(F, 8, 2, edge_dim=D), GAT, EDGES),
    Case('GATConv', 'bipartite', lambda: pyg.GATConv((F, F), 8, add_self_loops=False), GAT,
         BIPARTITE),
    Case('GATv2Conv', '2 heads', lambda: pyg.GATv2Conv(F, 8, 2), GATV2),
    Case('GATv2Conv', 'bipartite', lambda: pyg.GATv2Conv((F, F), 8, add_self_loops=False), GATV2,
         BIPARTITE),
    Case('GATv2Conv', 'edge features', lambda: pyg.GATv2Conv(F, 8, 2, edge_dim=D), GATV2,
         EDGES),
    Case('GCN2Conv', '', lambda: pyg.GCN2Conv(F, 0.1, 0.5, 1), args='x x_0 edges'),
    Case('GCNConv', 'edge weights', lambda: pyg.GCNConv(F, 8), GCN, WEIGHTED),
    Case('GCNConv', f"flow='{REVERSED}'", lambda: pyg.GCNConv(F, 8, flow=REVERSED), GCN),
    Case('GENConv', "aggr='add'", lambda: pyg.GENConv(F, F, aggr='add')),
    Case('GENConv', "aggr='softmax'", lambda: pyg.GENConv(F, F)),
    Case('GINConv', '', lambda: pyg.GINConv(mlp(F, 8)), GIN),
    Case('GINConv', 'bipartite', lambda: pyg.GINConv(mlp(F, 8)), GIN, BIPARTITE),
    Case('GINEConv', 'edge_dim', lambda: pyg.GINEConv(Linear(F, F), edge_dim=D), args=EDGES),
    Case('GINEConv', 'wide edge features', lambda: pyg.GINEConv(Linear(F, F)),
         args='x edges wide'),
    Case('GMMConv', '', lambda: pyg.GMMConv(F, F, dim=D, kernel_size=3), args=EDGES),
    Case('GPSConv', 'conv=ResGatedGraphConv', lambda: pyg.GPSConv(F, pyg.ResGatedGraphConv(F, F))),
    Case('GatedGraphConv', '', lambda: pyg.GatedGraphConv(F, 2)),
    Case('GeneralConv', '', lambda: pyg.GeneralConv(F, 8)),
    Case('GeneralConv', 'edge features, 2 heads, undirected messages',
         lambda: pyg.GeneralConv(F, 8, D, directed_msg=False, heads=2), args=EDGES),
    Case('GeneralConv', 'attention', lambda: pyg.GeneralConv(F, 8, attention=True)),
    Case('GraphConv', '', lambda: pyg.GraphConv(F, 8)),
    Case('GraphConv', 'bipartite', lambda: pyg.GraphConv((F, F), 8), args=BIPARTITE),
    Case('GraphConv', f"edge weights, flow='{REVERSED}'",
         lambda: pyg.GraphConv(F, 8, aggr='max', flow=REVERSED), args=WEIGHTED),
    Case('GraphConv', 'several feature matrices', lambda: pyg.GraphConv(F, 8), args='batch edges'),
    Case('GravNetConv', '', lambda: pyg.GravNetConv(F, 8, 3, 4, 5), args='x'),
    Case('HANConv', '', lambda: pyg.HANConv(F, 8, METADATA), args='xs relations'),
    Case('HEATConv', '', lambda: pyg.HEATConv(F, 8, 2, 3, 4, D, 4), TILES,
         'x edges kind relation attr'),
    Case('HGTConv', '', lambda: pyg.HGTConv(F, 8, METADATA), args='xs relations'),
    Case('HypergraphConv', '', lambda: pyg.HypergraphConv(F, 8), args='x hyperedges'),
    Case('HypergraphConv', 'attention', lambda: pyg.HypergraphConv(F, 8, True, heads=2),
         args='x hyperedges none hyperattr'),
    Case('LEConv', '', lambda: pyg.LEConv(F, F)),
    Case('LGConv', '', lambda: pyg.LGConv()),
    Case('MFConv', '', lambda: pyg.MFConv(F, 8)),
    Case('MeshCNNConv', '', lambda: pyg.MeshCNNConv(F, 8), 'the number of edges', 'x mesh',
         why='message mixes edges: it takes every fourth'),
    Case('MixHopConv', '', lambda: pyg.MixHopConv(F, 8)),
    Case('NNConv', 'nn=Linear', lambda: pyg.NNConv(F, 8, Linear(D, F * 8)), args=EDGES),
    Case('NNConv', 'nn=MLP', lambda: pyg.NNConv(F, 8, mlp(D, F * 8)), TILES, EDGES),
    Case('PANConv', '', lambda: pyg.PANConv(F, 8, 2), 'a sparse matrix', dtype=torch.float32),
    Case('PDNConv', '', lambda: pyg.PDNConv(F, 8, D, 8), args=EDGES),
    Case('PNAConv', '4 aggregations, 3 scalers, 2 towers', pna),
    Case('PPFConv', 'local_nn=Linear', lambda: pyg.PPFConv(Linear(F + 4, 8)),
         args='x pos normal edges'),
    Case('PointGNNConv', 'mlp_f=Linear',
         lambda: pyg.PointGNNConv(mlp(F, 3), Linear(F + 3, 8), Linear(8, F)), args='x pos edges'),
    Case('PointGNNConv', 'mlp_f=MLP',
         lambda: pyg.PointGNNConv(mlp(F, 3), mlp(F + 3, 8), Linear(8, F)), TILES, 'x pos edges'),
    Case('PointNetConv', '', lambda: pyg.PointNetConv(), args='x pos edges'),
    Case('PointNetConv', 'local_nn=Linear', lambda: pyg.PointNetConv(Linear(F + 3, 8)),
         args='x pos edges'),
    Case('PointNetConv', 'local_nn=MLP', lambda: pyg.PointNetConv(mlp(F + 3, 8)), TILES,
         'x pos edges'),
    Case('PointTransformerConv', '', lambda: pyg.PointTransformerConv(F, 8),
         args='x pos edges'),
    Case('RGATConv', '', lambda: pyg.RGATConv(F, 8, 3), args='x edges relation'),
    Case('RGATConv', '2 blocks, 2 heads, edge features, multiplicative attention',
         lambda: pyg.RGATConv(F, 8, 3, num_blocks=2, heads=2, dim=2, edge_dim=D, attention_mode=
                              'multiplicative-self-attention'), args='x edges relation attr'),
    Case('RGATConv', 'within-relation attention',
         lambda: pyg.RGATConv(F, 8, 3, attention_mechanism='within-relation'),
         'within-relation attention', 'x edges relation'),
    Case('RGCNConv', '', lambda: pyg.RGCNConv(F, 8, 3), args='x edges relation'),
    Case('RGCNConv', "aggr='max'", lambda: pyg.RGCNConv(F, 8, 3, aggr='max'),
         args='x edges relation'),
    Case('RGCNConv', '2 bases', lambda: pyg.RGCNConv(F, 8, 3, 2), args='x edges relation'),
    Case('RGCNConv', '2 blocks, bipartite', lambda: pyg.RGCNConv((F, F), 8, 3, num_blocks=2),
         args='pair bipartite relation'),
    Case('ResGatedGraphConv', '', lambda: pyg.ResGatedGraphConv(F, F)),
    Case('ResGatedGraphConv', 'edge features', lambda: pyg.ResGatedGraphConv(F, F, edge_dim=D),
         args=EDGES),
    Case('SAGEConv', f"flow='{REVERSED}'", lambda: pyg.SAGEConv(F, 8, flow=REVERSED), SAGE),
    Case('SAGEConv', "bipartite, aggr=['mean', 'max']",
         lambda: pyg.SAGEConv((F, F), 8, ['mean', 'max']), SAGE, BIPARTITE),
    Case('SGConv', 'K=2', lambda: pyg.SGConv(F, 8, K=2)),
    Case('SSGConv', 'K=2', lambda: pyg.SSGConv(F, 8, 0.1, 2)),
    Case('SignedConv', 'first_aggr=True', lambda: pyg.SignedConv(F, 8, True),
         args='x edges other_edges'),
    Case('SignedConv', 'first_aggr=False', lambda: pyg.SignedConv(F, 8, False),
         args='two edges other_edges'),
    Case('SimpleConv', "aggr='mean'", lambda: pyg.SimpleConv('mean')),
    Case('SimpleConv', "aggr=['sum', 'max', 'var']",
         lambda: pyg.SimpleConv(['sum', 'max', 'var'])),
    Case('SimpleConv', "aggr=MultiAggregation(mode='proj')", combined),
    Case('SplineConv', '', lambda: pyg.SplineConv(F, 8, 2, 3), '', 'x edges pseudo',
         why="pyg-lib's operators have no kernel"),
    Case('SuperGATConv', '', lambda: pyg.SuperGATConv(F, 8).eval()),
    Case('TAGConv', 'K=3', lambda: pyg.TAGConv(F, 8)),
    Case('TransformerConv', '', lambda: pyg.TransformerConv(F, 8, 2)),
    Case('TransformerConv', 'edge features, beta',
         lambda: pyg.TransformerConv(F, 8, 2, edge_dim=D, beta=True), args=EDGES),
    Case('TransformerConv', 'bipartite, concat=False',
         lambda: pyg.TransformerConv((F, F), 8, 2, concat=False), args=BIPARTITE),
    Case('WLConvContinuous', '', lambda: pyg.WLConvContinuous()),
]
# fmt: on
BY_NAME = {case.name: case for case in CASES}


def record() -> list[dict[str, Any]]:
    """What runs each layer, with all option sets tested."""
    rows: dict[tuple[str, str], list[str]] = {}
    for case in CASES:
        runs = case.runs if case.is_ours else f"PyG's code: {case.why or case.runs}"
        rows.setdefault((case.layer, runs), []).append(case.options or 'default')
    return [
        {'layer': layer, 'runs': runs, 'options': options}
        for (layer, runs), options in sorted(rows.items(), key=lambda row: row[0][0].lower())
    ]


def record_text() -> str:
    return '[\n ' + ',\n '.join(map(json.dumps, record())) + '\n]\n'


if __name__ == '__main__':
    RECORD.write_text(record_text())
