import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
import torch_geometric.typing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.datasets import Planetoid
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import GCNConv
from torch_geometric.transforms.rooted_subgraph import RootedSubgraphData

from pyg_fast.datasets import PlantedGraph
from pyg_fast.graph import execution_paths
from pyg_fast.nn import PathPreparedGCNConv
from pyg_fast.ops import spmm
from pyg_fast.transforms import Reorder, ToCSR

WITH_SCIPY = importlib.util.find_spec('scipy') is not None
METHODS = ['rabbit', *(['rcm'] if WITH_SCIPY else []), 'degree']
N = 8
EDGES = torch.tensor(  # Directed, with loops and duplicates; node 6 has no edge.
    [
        [2, 0, 5, 0, 3, 7, 2, 2, 1, 4, 4, 0, 1, 5, 5, 3],
        [0, 2, 1, 1, 0, 5, 0, 2, 7, 1, 0, 3, 2, 1, 7, 1],
    ]
)
E = EDGES.size(1)

needs_scipy = pytest.mark.skipif(not WITH_SCIPY, reason='rcm needs SciPy')
each_method = pytest.mark.parametrize(
    'method', ['rabbit', pytest.param('rcm', marks=needs_scipy), 'degree']
)


def graph() -> Data:
    return Data(
        x=torch.arange(2 * N).view(N, 2).float(),
        y=torch.arange(N),
        train_mask=torch.arange(N) % 3 == 0,
        edge_index=EDGES,
        edge_attr=torch.arange(E),
    )


def assert_reordered(out: Data, data: Data) -> Tensor:
    """Checks the two permutations and the graph itself, and returns the first."""
    perm, inverse, nodes = out.perm_index, out.inverse_index, torch.arange(data.num_nodes)
    assert perm.dtype == inverse.dtype == torch.int64
    assert perm.cpu().sort()[0].equal(nodes)
    assert inverse[perm].cpu().equal(nodes)
    assert perm[out.edge_index.long()].equal(data.edge_index.long())
    assert out.num_nodes == data.num_nodes
    assert {*out.keys()} == {*data.keys(), 'perm_index', 'inverse_index'}
    return perm


# Results ######################################################################################


@given(st.data(), st.integers(0, 12), st.sampled_from(METHODS))
def test_any_graph(draw: Any, n: int, method: str) -> None:
    ends = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    pairs = draw.draw(st.lists(ends, max_size=40)) if n else []
    pairs += pairs[:1] * draw.draw(st.sampled_from([0, 2, 500]))
    edges = torch.tensor(pairs, dtype=torch.long).view(-1, 2).t()  # Not contiguous.
    data = Data(  # Integers, whose sums are exact.
        x=torch.randint(-8, 9, (n, 3)).float(),
        y=torch.arange(n),
        mask=torch.rand(n, 2) < 0.5,
        edge_index=edges,
        edge_weight=torch.randint(-8, 9, (len(pairs),)).float(),
    )
    out = Reorder(method)(data)
    perm = assert_reordered(out, data)
    assert out.x.equal(data.x[perm])
    assert out.y.equal(perm)
    assert out.mask.equal(data.mask[perm])
    # Every edge keeps its place, hence its weight; sums come out the same to the last bit.
    assert out.edge_weight is data.edge_weight
    want = spmm(data.edge_index, data.x, data.edge_weight)
    assert spmm(out.edge_index, out.x, out.edge_weight)[out.inverse_index].equal(want)
    # Sorted it is the same graph, and edges take their weights along.
    prepared = Reorder(method)(ToCSR()(data))
    assert prepared.perm_index.equal(perm)
    assert weighted_edges(prepared) == weighted_edges(out)
    got = spmm(prepared.edge_index, prepared.x, prepared.edge_weight)
    assert got[prepared.inverse_index].equal(want)


def weighted_edges(data: Data) -> list[tuple[int, int, float]]:
    return sorted(zip(*data.edge_index.tolist(), data.edge_weight.tolist(), strict=True))


@each_method
def test_devices(device: torch.device, method: str) -> None:
    for data in (graph(), ToCSR()(graph())):
        want = Reorder(method)(data)
        out = Reorder(method)(data.to(device))
        for key, value in want:
            assert out[key].device.type == device.type
            assert out[key].tolist() == value.tolist(), key


def test_attributes_on_another_device(device: torch.device) -> None:
    data = graph()
    data.edge_index = data.edge_index.to(device)
    out = Reorder()(data)
    assert out.x.device.type == 'cpu'
    assert out.x.equal(data.x[out.perm_index.cpu()])


@pytest.mark.parametrize('prepare', [False, True])
@each_method
def test_input_is_left_alone(method: str, prepare: bool) -> None:
    data = ToCSR()(graph()) if prepare else graph()
    kept, cloned = copy.copy(data), data.clone()
    Reorder(method)(data)
    assert {*data.keys()} == {*kept.keys()}
    assert all(data[key] is value for key, value in kept)
    assert all(data[key].equal(value) for key, value in cloned)


def test_degree_comes_in_and_goes_out() -> None:
    edges = torch.tensor([[0, 3, 3, 3, 1, 4], [2, 2, 1, 2, 1, 2]])
    out = Reorder('degree')(Data(edge_index=edges, num_nodes=6))
    assert out.perm_index.tolist() == [2, 1, 3, 0, 4, 5]  # degrees 4, 3, 3, 1, 1, 0


@needs_scipy
def test_rcm_narrows_the_band_of_a_mesh() -> None:
    side = 20
    node = torch.arange(side * side).view(side, side)
    pairs = [node[1:], node[:-1]], [node[:, 1:], node[:, :-1]]
    edges = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in pairs], dim=1)
    edges = torch.randperm(side * side)[edges]
    out = Reorder('rcm')(Data(edge_index=edges, num_nodes=side * side)).edge_index
    assert (edges[0] - edges[1]).abs().max() > 10 * side
    assert (out[0] - out[1]).abs().max() <= 2 * side


def blocks_read(edge_index: Tensor) -> int:
    """How many blocks of 8 nodes each block of 64 destinations reads, in all."""
    src, dst = edge_index.long()
    return torch.unique(torch.stack([src // 8, dst // 64]), dim=1).size(1)


def test_neighbours_come_closer() -> None:
    data = PlantedGraph('small')[0]
    gap, blocks = {}, {}
    for method in METHODS:
        out = Reorder(method)(data).edge_index
        gap[method] = (out[0] - out[1]).abs().double().mean()
        blocks[method] = blocks_read(out)
    gap_before = (data.edge_index[0] - data.edge_index[1]).abs().double().mean()
    blocks_before = blocks_read(data.edge_index)
    assert all(blocks[method] < 0.6 * blocks_before for method in METHODS)
    assert gap['rabbit'] < 0.4 * gap_before
    assert gap['rabbit'] < 0.6 * min(gap[method] for method in METHODS if method != 'rabbit')


@each_method
def test_on_real_data(data_root: Callable[[str, str], Path], method: str) -> None:
    data = Planetoid(str(data_root('Planetoid', 'Cora')), 'Cora')[0]
    out = Reorder(method)(data)
    perm = assert_reordered(out, data)
    for key in ('x', 'y', 'train_mask', 'val_mask', 'test_mask'):
        assert out[key].equal(data[key][perm])
    assert blocks_read(out.edge_index) < 0.9 * blocks_read(data.edge_index)


@each_method
@pytest.mark.parametrize('prepare', [False, True])
def test_layers_give_the_same(method: str, prepare: bool) -> None:
    data = PlantedGraph('tiny')[0]
    data.edge_weight = torch.rand(data.num_edges)
    want = GCNConv(data.num_features, 5)
    conv = PathPreparedGCNConv(data.num_features, 5)
    conv.load_state_dict(want.state_dict())
    out = Reorder(method)(ToCSR()(data) if prepare else data)
    result = conv(out.x, out.edge_index, out.edge_weight)[out.inverse_index]
    torch.testing.assert_close(result, want(data.x, data.edge_index, data.edge_weight))


# Graphs ########################################################################################


@each_method
@pytest.mark.parametrize('num_nodes', [0, 1, 4])
def test_no_edges(method: str, num_nodes: int) -> None:
    data = Data(x=torch.rand(num_nodes, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    data.num_nodes, data.number = num_nodes, 3  # Neither names a node.
    out = Reorder(method)(data)
    assert (out.num_nodes, out.number) == (num_nodes, 3)
    assert out.x.equal(data.x[assert_reordered(out, data)])


@each_method
def test_one_node_with_loops(method: str) -> None:
    out = Reorder(method)(Data(x=torch.rand(1, 2), edge_index=torch.zeros(2, 3).long()))
    assert out.edge_index.equal(torch.zeros(2, 3).long())


@each_method
def test_isolated_nodes_count_where_only_edges_tell_of_nodes(method: str) -> None:
    edges = torch.tensor([[5, 5], [1, 3]])
    with pytest.warns(UserWarning, match='num_nodes'):
        out = Reorder(method)(Data(edge_index=edges))
    assert out.num_nodes == out.perm_index.numel() == 6
    assert out.perm_index[out.edge_index].equal(edges)


@pytest.mark.parametrize('dtype', [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_types_of_edges(dtype: torch.dtype) -> None:
    data = graph()
    data.edge_index = EDGES.to(dtype)
    out = Reorder()(data)
    assert out.edge_index.dtype == dtype
    assert_reordered(out, data)


@each_method
def test_types_of_edges_that_cannot_hold_all_nodes(method: str) -> None:
    data = Data(edge_index=torch.arange(200).view(2, 100).to(torch.uint8), num_nodes=300)
    out = Reorder(method)(data)
    assert out.edge_index.dtype == torch.int64
    assert_reordered(out, Data(edge_index=data.edge_index, num_nodes=300))


@pytest.mark.parametrize('layout', ['expanded', 'strided', 'transposed'])
@each_method
def test_layouts_of_edges(method: str, layout: str) -> None:
    edges = {
        'expanded': torch.tensor([[1], [3]]).expand(2, 5),
        'strided': EDGES[:, ::2],
        'transposed': EDGES.t().contiguous().t(),
    }[layout]
    data = Data(edge_index=edges, num_nodes=N)
    assert_reordered(Reorder(method)(data), data)


@pytest.mark.parametrize('order', [None, 'row', 'col'])
@each_method
def test_edge_index_is_sorted_again(method: str, order: str | None) -> None:
    both = torch.cat([EDGES, EDGES.flip(0)], dim=1)
    edge_index = EdgeIndex(both, sparse_size=(N, N), is_undirected=True)
    if order is not None:
        edge_index = edge_index.sort_by(order, stable=True).values
    plain = Data(edge_index=edge_index.as_tensor(), edge_attr=torch.arange(2 * E), num_nodes=N)
    want = ToCSR()(Reorder(method)(plain))
    out = Reorder(method)(Data(edge_index=edge_index, edge_attr=torch.arange(2 * E)))
    assert isinstance(out.edge_index, EdgeIndex)
    assert out.edge_index.is_undirected
    assert out.edge_index.sort_order == 'col'
    assert tuple(out.edge_index.sparse_size()) == (N, N)
    assert out.edge_index.as_tensor().equal(want.edge_index.as_tensor())
    assert out.edge_attr.equal(want.edge_attr)
    assert ToCSR()(out).edge_index is out.edge_index  # Caches and all.
    given = edge_index.as_tensor()[:, out.e_perm]
    assert out.inverse_index[given].equal(out.edge_index.as_tensor())
    first = ToCSR(perm='edge_perm')(Data(edge_index=both, num_nodes=N))
    again = Reorder(method)(first)
    given = again.inverse_index[both[:, again.edge_perm]]
    assert given.equal(again.edge_index.as_tensor())


# Attributes ####################################################################################


@each_method
def test_attributes(method: str) -> None:
    data = graph()
    data.names = [f'n{i}' for i in range(N)]
    data.tuple = tuple(range(N))
    data.array = np.arange(3 * N).reshape(N, 3)
    data.sparse = torch.eye(N).to_sparse_csr()
    data.weights = torch.rand(N, requires_grad=True)
    data.parent_index = torch.arange(N)  # of each node one node
    data.note, data.scale, data.of_graph = 'note', 2.0, torch.rand(N + 1, 3)
    out = Reorder(method)(data)
    perm, inverse = out.perm_index, out.inverse_index
    assert out.names == [f'n{i}' for i in perm.tolist()]
    assert out.tuple == tuple(perm.tolist())
    assert np.array_equal(out.array, data.array[perm.numpy()])
    assert out.sparse.layout == torch.sparse_csr
    assert out.sparse.to_dense().equal(torch.eye(N)[perm])
    assert torch.autograd.grad(out.weights[0], data.weights)[0].argmax() == perm[0]
    assert out.parent_index.equal(torch.arange(N))  # Each is its own parent still.
    for key in ('note', 'scale', 'of_graph', 'edge_attr'):
        assert out[key] is data[key]
    data.parent_index = torch.full((N,), 3)
    assert Reorder(method)(data).parent_index.equal(inverse[data.parent_index])


def test_tensor_frame() -> None:
    torch_frame = pytest.importorskip('torch_frame')
    stype = torch_frame.stype.numerical
    frame = torch_frame.TensorFrame({stype: torch.arange(N).view(N, 1)}, {stype: ['a']})
    data = graph()
    data.tf = frame
    out = Reorder()(data)
    assert out.tf.feat_dict[stype].view(-1).equal(out.perm_index)


@each_method
def test_attributes_that_name_nodes(method: str) -> None:
    ids = [3, 0, 7, 3]
    data = graph()
    data.edge_label_index = EDGES[:, :N].clone()  # As many edges as nodes.
    data.edge_label = torch.arange(N)
    data.neg_edge_index = EdgeIndex(EDGES[:, :3], sparse_size=(N, N))
    data.face = torch.arange(3 * N).view(3, N) % N
    data.root_index = torch.tensor(3)
    data.small_index = torch.tensor(ids, dtype=torch.uint8)
    data.group_index = Index([0, 3, 3], dim_size=N, is_sorted=True)
    data.array_index, data.list_index, data.int_index = np.array(ids), ids, 7
    data.hops_index = [torch.tensor([3]), (0, 7)]
    out = Reorder(method)(data)
    perm = out.perm_index
    for key in ('edge_label_index', 'face', 'root_index', 'small_index'):
        assert out[key].dtype == data[key].dtype
        assert perm[out[key].long()].equal(data[key].long())
    assert out.edge_label is data.edge_label
    assert isinstance(out.neg_edge_index, EdgeIndex)
    assert perm[out.neg_edge_index.as_tensor()].equal(EDGES[:, :3])
    assert isinstance(out.group_index, Index)
    assert perm[out.group_index.as_tensor()].tolist() == [0, 3, 3]
    assert not out.group_index.is_sorted or out.group_index.as_tensor().diff().min() >= 0
    assert isinstance(out.array_index, np.ndarray)
    assert perm[torch.from_numpy(out.array_index)].tolist() == ids
    assert perm[out.list_index].tolist() == ids
    assert type(out.int_index) is int
    assert perm[out.int_index] == 7
    assert perm[out.hops_index[0]].tolist() == [3]
    assert isinstance(out.hops_index[1], tuple)
    assert perm[[*out.hops_index[1]]].tolist() == [0, 7]


def test_names_with_index_that_hold_none() -> None:
    data = graph()
    data.index_name, data.index_weight = 'a', torch.rand(3)
    data.index_mask, data.index_names = torch.arange(N) < 2, np.array(['a', 'b'])
    out = Reorder()(data)
    assert out.index_mask.equal(data.index_mask[out.perm_index])
    for key in ('index_name', 'index_weight', 'index_names'):
        assert out[key] is data[key]


def test_ids_that_only_a_subclass_knows() -> None:
    class Rooted(Data):
        def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            return self.num_nodes if key == 'roots' else super().__inc__(key, value)

    data = Rooted(**graph().to_dict(), roots=torch.tensor([3, 0]))
    out = Reorder()(data)
    assert isinstance(out, Rooted)
    assert out.perm_index[out.roots].tolist() == [3, 0]


def test_as_many_nodes_as_edges() -> None:
    data = Data(edge_index=torch.tensor([[2, 1, 2], [1, 2, 0]]), x=torch.arange(3).view(3, 1))
    data.names, data.edge_names, data.edge_attr = list('abc'), list('uvw'), torch.arange(3)
    out = Reorder()(data)
    assert not out.perm_index.equal(torch.arange(3))
    assert out.x.view(-1).equal(out.perm_index)
    assert out.names == [data.names[i] for i in out.perm_index.tolist()]
    assert (out.edge_names, out.edge_attr.tolist()) == (list('uvw'), [0, 1, 2])


# Before and after ##############################################################################


@pytest.mark.parametrize('prepare', [False, True])
def test_again_relates_to_the_first_order(prepare: bool) -> None:
    data = ToCSR()(graph()) if prepare else graph()
    out = T.Compose([Reorder(method) for method in reversed(METHODS)])(data)
    assert out.y.equal(out.perm_index)
    assert out.x[out.inverse_index].equal(data.x)
    assert {*out.keys()} == {*data.keys(), 'perm_index', 'inverse_index'}


def test_batches_and_subgraphs() -> None:
    graphs = [graph(), Data(**{**graph().to_dict(), 'edge_index': EDGES.flip(0)})]
    batch = next(iter(DataLoader([Reorder()(data) for data in graphs], batch_size=2)))
    x = torch.cat([data.x for data in graphs])
    assert batch.x[batch.inverse_index].equal(x)
    assert batch.x.equal(x[batch.perm_index])
    assert_reordered(batch.get_example(1), graphs[1])
    part = Reorder()(graph()).subgraph(torch.tensor([1, 4, 6]))
    assert part.y.equal(part.perm_index)


@pytest.mark.skipif(
    not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE),
    reason='needs pyg-lib or torch-sparse',
)
@pytest.mark.filterwarnings('ignore:Using .NeighborSampler')
def test_neighbor_loader() -> None:
    data = PlantedGraph('tiny')[0]
    batch = next(iter(NeighborLoader(Reorder()(data), [3, 3], batch_size=8)))
    assert batch.x.equal(data.x[batch.perm_index])
    with pytest.raises(ValueError, match='belongs to a batch'):
        Reorder()(batch)


def test_functional_name_and_repr() -> None:
    pipe = torch.utils.data.datapipes.iter.IterableWrapper([graph()]).reorder('degree')
    assert_reordered(next(iter(pipe)), graph())
    assert repr(Reorder()) == "Reorder(method='rabbit')"


# Bad input #####################################################################################


@pytest.mark.parametrize('bad', [-1, N])
@pytest.mark.parametrize('key', ['edge_index', 'edge_label_index', 'root_index', 'list_index'])
def test_index_out_of_range(key: str, bad: int) -> None:
    data = graph()
    data[key] = {
        'edge_index': torch.tensor([[0], [bad]]),
        'edge_label_index': torch.tensor([[0], [bad]]),
        'root_index': torch.tensor(bad),
        'list_index': [0, bad],
    }[key]
    with pytest.raises(IndexError, match=rf"'{key}.* hold .*\[0, 8\), got values from .*{bad}"):
        Reorder()(data)


@pytest.mark.parametrize(
    ('edge_index', 'error'),
    [
        (EDGES.float(), TypeError),
        (EDGES.numpy(), TypeError),
        (EDGES[0], ValueError),
        (EDGES.t(), ValueError),
        (None, ValueError),
    ],
)
def test_not_an_edge_index(edge_index: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="'edge_index'"):
        Reorder()(Data(x=torch.rand(N, 2), edge_index=edge_index))


@pytest.mark.parametrize(
    'data',
    [
        HeteroData(),
        TemporalData(src=torch.arange(2), dst=torch.arange(2), t=torch.arange(2)),
        Batch.from_data_list([graph(), graph()]),
        RootedSubgraphData(edge_index=EDGES),
        EDGES,
    ],
    ids=lambda data: type(data).__name__,
)
def test_other_kinds_of_data(data: Any) -> None:
    with pytest.raises(TypeError, match=f'homogeneous Data object, got {type(data).__name__}'):
        Reorder()(data)


def test_sparse_matrices() -> None:
    for key in ('adj', 'adj_t'):
        with pytest.raises(TypeError, match=f"'{key}' is a sparse matrix"):
            Reorder()(Data(edge_index=EDGES, x=torch.rand(N, 2), **{key: torch.eye(N).to_sparse()}))


@pytest.mark.skipif(not torch_geometric.typing.WITH_TORCH_SPARSE, reason='needs torch-sparse')
def test_sparse_tensor() -> None:
    with pytest.raises(TypeError, match="'adj_t' is a sparse matrix"):
        Reorder()(T.ToSparseTensor()(graph()))


@pytest.mark.parametrize('key', ['batch', 'ptr', 'batch_size', 'input_id'])
def test_what_loaders_made(key: str) -> None:
    data = graph()
    data[key] = 2 if key == 'batch_size' else torch.zeros(N, dtype=torch.long)
    with pytest.raises(ValueError, match=f"'{key}' belongs to a batch"):
        Reorder()(data)


def test_what_was_prepared_for_the_present_order() -> None:
    paths = execution_paths(EDGES, graph().train_mask, num_layers=2)
    for key, value in {'execution_paths': paths, 'first': paths[0], 'pair': (*paths,)}.items():
        data = graph()
        data[key] = value
        with pytest.raises(ValueError, match=f"'{key}' was prepared for the present order"):
            Reorder()(data)


def test_permutations_of_another_origin() -> None:
    out = Reorder('degree')(graph())
    assert not out.perm_index.equal(out.inverse_index)
    for pair in (
        {'perm_index': out.perm_index},
        {'inverse_index': out.inverse_index},
        {'perm_index': out.perm_index, 'inverse_index': out.perm_index},
        {'perm_index': out.perm_index[1:], 'inverse_index': out.inverse_index[1:]},
        {'perm_index': out.perm_index + 1, 'inverse_index': out.inverse_index + 1},
        {'perm_index': [*range(N)], 'inverse_index': [*range(N)]},
    ):
        data = graph()
        data.update(pair)
        with pytest.raises(ValueError, match="'perm_index' and 'inverse_index' were not"):
            Reorder()(data)


@pytest.mark.parametrize('method', ['Rabbit', '', None, 3])
def test_unknown_method(method: Any) -> None:
    with pytest.raises(ValueError, match="'method' must be one of"):
        Reorder(method)


def test_scipy_is_needed_for_rcm_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'scipy', None)
    with pytest.raises(ImportError, match=r"SciPy: pip install 'pyg_fast\[reorder\]'"):
        Reorder('rcm')
    for method in ('rabbit', 'degree'):
        Reorder(method)(graph())
