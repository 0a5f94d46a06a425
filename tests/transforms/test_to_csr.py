import copy
import gc
import io
import pickle
import random
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric
import torch_geometric.transforms as T
import torch_geometric.typing
from _profile import Before
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.index import index2ptr
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import GPSE
from torch_geometric.transforms.rooted_subgraph import RootedSubgraphData
from torch_geometric.typing import SparseTensor

from pyg_fast import transforms
from pyg_fast.graph import PreparedGraph
from pyg_fast.transforms import ToCSR

N = 8
EDGES = torch.tensor(
    [
        [2, 0, 5, 0, 3, 7, 2, 2, 1, 6, 4, 4, 0, 1, 5, 5, 3, 6],
        [0, 2, 1, 1, 0, 5, 0, 2, 7, 6, 1, 0, 3, 2, 1, 7, 1, 2],
    ]
)
E = EDGES.size(1)


def assert_prepared(edge_index: Any, edges: Tensor, size: tuple[int, int]) -> None:
    """`edge_index` is `edges`, sorted stably, with the caches that PyG would make."""
    assert isinstance(edge_index, EdgeIndex)
    order = edges[1].argsort(stable=True)
    sorted_edges = edges.long()[:, order].contiguous()
    want = EdgeIndex(sorted_edges, sparse_size=size, sort_order='col').fill_cache_()
    t_perm = sorted_edges[0].argsort(stable=True)
    assert edge_index.as_tensor().equal(sorted_edges)
    assert tuple(edge_index.sparse_size()) == size
    assert edge_index.sort_order == 'col'
    assert edge_index._indptr.equal(want._indptr)
    assert edge_index._T_indptr.equal(index2ptr(sorted_edges[0][t_perm], size[0]))
    assert edge_index._T_indptr.equal(want.get_csr()[0][0])
    assert edge_index._T_perm.equal(t_perm)
    assert edge_index._T_index[0].equal(want._T_index[0])
    assert edge_index._T_index[1].equal(sorted_edges[1][t_perm])


def caches(edge_index: EdgeIndex) -> tuple[Tensor | None, ...]:
    return (
        edge_index._indptr,
        edge_index._T_perm,
        *edge_index._T_index,
        edge_index._T_indptr,
    )


def homogeneous() -> Data:
    return Data(edge_index=EDGES, edge_attr=torch.arange(E), num_nodes=N)


def bipartite() -> HeteroData:
    data = HeteroData()
    data['a'].x, data['b'].x = torch.rand(N, 2), torch.rand(9, 1)
    data['a', 'to', 'b'].edge_index = EDGES
    data['a', 'to', 'b'].edge_attr = torch.arange(E)
    data['b', 'self', 'b'].edge_index = EDGES.flip(0)
    return data


# Results ######################################################################################


@given(st.data(), st.integers(0, 6), st.integers(0, 6), st.sampled_from([torch.int32, torch.int64]))
def test_random_graphs(draw: Any, num_src: int, num_dst: int, dtype: torch.dtype) -> None:
    ends = st.tuples(st.integers(0, num_src - 1), st.integers(0, num_dst - 1))
    pairs = draw.draw(st.lists(ends, max_size=12)) if num_src and num_dst else []
    edges = torch.tensor(pairs, dtype=dtype).view(-1, 2).t()  # Not contiguous.
    data = HeteroData()
    data['a'].num_nodes, data['b'].num_nodes = num_src, num_dst
    data['a', 'to', 'b'].edge_index = edges
    data['a', 'to', 'b'].edge_weight = torch.arange(len(pairs))
    out = ToCSR()(data)['a', 'to', 'b']
    assert_prepared(out.edge_index, edges, (num_src, num_dst))
    assert edges[:, out.edge_weight].long().equal(out.edge_index.as_tensor())
    assert data['a', 'to', 'b'].edge_index is edges

    square = Data(edge_index=edges, num_nodes=max(num_src, num_dst))
    assert_prepared(ToCSR()(square).edge_index, edges, (square.num_nodes,) * 2)


def test_devices(device: torch.device) -> None:
    moved = ToCSR()(homogeneous()).to(device)
    made = ToCSR()(homogeneous().to(device))
    for data in (moved, made):
        assert data.edge_index.device.type == device.type
        assert all(c.device.type == device.type for c in caches(data.edge_index))
        assert_prepared(data.edge_index.cpu(), EDGES, (N, N))
        assert data.edge_attr.cpu().equal(EDGES[1].argsort(stable=True))
        assert ToCSR()(data).edge_index is data.edge_index
        back = data.to('cpu')
        assert_prepared(back.edge_index, EDGES, (N, N))


def test_attributes_on_another_device(device: torch.device) -> None:
    data = homogeneous()
    data.edge_index = data.edge_index.to(device)
    assert ToCSR()(data).edge_attr.equal(ToCSR()(homogeneous()).edge_attr)


@pytest.mark.parametrize('layout', ['expanded', 'strided', 'transposed', 'uint8'])
def test_odd_tensors(layout: str) -> None:
    edges = {
        'expanded': torch.tensor([[1], [3]]).expand(2, 5),
        'strided': EDGES[:, ::2],
        'transposed': EDGES.t().contiguous().t(),
        'uint8': EDGES.to(torch.uint8),
    }[layout]
    assert_prepared(ToCSR()(Data(edge_index=edges, num_nodes=N)).edge_index, edges, (N, N))


@pytest.mark.parametrize('num_nodes', [0, 3])
def test_no_edges(num_nodes: int, device: torch.device) -> None:
    data = Data(x=torch.rand(num_nodes, 2), edge_index=torch.empty(2, 0, dtype=torch.long))
    data.edge_attr = torch.empty(0, 3)
    out = ToCSR()(data)
    assert_prepared(out.edge_index, data.edge_index, (num_nodes, num_nodes))
    assert out.edge_attr.shape == (0, 3)
    assert ToCSR()(out).edge_index is out.edge_index
    # PyG moves an empty EdgeIndex in place, and leaves its outside where it was.
    moved = ToCSR()(out.to(device)).edge_index
    assert moved.device.type == moved.as_tensor().device.type == device.type


def test_stores_without_edge_index() -> None:
    data = ToCSR()(Data(x=torch.rand(3, 2), edge_attr=torch.rand(4)))
    assert 'edge_index' not in data
    adj = torch.eye(3).to_sparse_csr()
    assert ToCSR()(Data(adj_t=adj)).adj_t is adj
    hetero = bipartite()
    hetero['a', 'no', 'a'].adj_t = adj
    assert set(ToCSR()(hetero)['a', 'no', 'a'].keys()) == {'adj_t'}
    hetero['a', 'to', 'b'].adj_t = adj  # Beside an edge_index.
    assert ToCSR()(hetero)['a', 'to', 'b'].adj_t is adj
    times = torch.arange(2)
    assert ToCSR()(TemporalData(src=times, dst=times, t=times)).src is times


@pytest.mark.skipif(not torch_geometric.typing.WITH_TORCH_SPARSE, reason='needs torch-sparse')
def test_sparse_tensor_is_left_alone() -> None:
    data = T.ToSparseTensor()(homogeneous())
    out = ToCSR()(data)
    assert out.adj_t is data.adj_t
    assert 'edge_index' not in out


def test_rectangular() -> None:
    out = ToCSR()(bipartite())
    assert_prepared(out['a', 'to', 'b'].edge_index, EDGES, (N, 9))
    assert_prepared(out['b', 'self', 'b'].edge_index, EDGES.flip(0), (9, 9))
    assert out['a', 'to', 'b'].edge_attr.equal(EDGES[1].argsort(stable=True))


def test_unknown_number_of_nodes() -> None:
    with pytest.warns(UserWarning, match='num_nodes'):
        out = ToCSR()(Data(edge_index=EDGES[:, 8:9]))
    assert_prepared(out.edge_index, EDGES[:, 8:9], (N, N))
    assert out.num_nodes == N

    data = HeteroData()
    data['a', 'b'].edge_index = torch.tensor([[0, 4], [1, 0]])
    data['b', 'c'].edge_index = torch.tensor([[6], [0]])
    data['c', 'a'].edge_index = EdgeIndex([[2], [1]], sparse_size=(5, 6))
    out = ToCSR()(data)
    sizes = {key: tuple(store.edge_index.sparse_size()) for key, store in out.edge_items()}
    assert sizes == {('a', 'to', 'b'): (6, 7), ('b', 'to', 'c'): (7, 5), ('c', 'to', 'a'): (5, 6)}
    assert out.node_types == []


def test_attributes() -> None:
    data = homogeneous()
    order = EDGES[1].argsort(stable=True)
    data.edge_weight = torch.rand(E, requires_grad=True)
    data.edge_features_index = torch.stack([torch.arange(E), torch.arange(E)])
    data.edge_array = np.arange(2 * E).reshape(E, 2)
    data.edge_names = [f'e{i}' for i in range(E)]
    data.edge_tuple = tuple(range(E))
    data.edge_label = torch.arange(E)
    data.edge_label_index = EDGES.clone()
    data.num_sampled_edges = list(range(E))
    data.y, data.note = torch.arange(N), 'note'
    out = ToCSR()(data)
    assert out.edge_weight.equal(data.edge_weight[order])
    assert torch.autograd.grad(out.edge_weight[0], data.edge_weight)[0].argmax() == order[0]
    assert out.edge_features_index.equal(data.edge_features_index[:, order])
    assert np.array_equal(out.edge_array, data.edge_array[order.numpy()])
    assert out.edge_names == [f'e{i}' for i in order.tolist()]
    assert out.edge_tuple == tuple(order.tolist())
    for key in ('edge_label', 'edge_label_index', 'num_sampled_edges', 'y', 'note'):
        assert out[key] is data[key]
    assert data.edge_attr.equal(torch.arange(E))


def test_as_many_nodes_as_edges() -> None:
    data = Data(edge_index=torch.tensor([[0, 1, 2], [2, 1, 0]]), x=torch.arange(3).view(3, 1))
    data.names, data.edge_names, data.edge_attr = list('abc'), list('uvw'), torch.arange(3)
    out = ToCSR()(data)
    assert out.x is data.x
    assert (out.names, out.edge_names) == (list('abc'), list('wvu'))
    assert out.edge_attr.tolist() == [2, 1, 0]


@pytest.mark.parametrize('bad', [-1, N])
@pytest.mark.parametrize('end', [0, 1])
def test_index_out_of_range(bad: int, end: int, device: torch.device) -> None:
    edges = EDGES.clone()
    edges[end, 4] = bad
    with pytest.raises(IndexError, match=rf"^data: 'edge_index\[{end}\]'.* {bad}"):
        ToCSR()(Data(edge_index=edges.to(device), num_nodes=N))
    data = bipartite()
    data['b'].num_nodes = N
    data['b', 'self', 'b'].edge_index = edges.to(device)
    with pytest.raises(IndexError, match=r"^data\['b', 'self', 'b'\]: "):
        ToCSR()(data)
    assert data['a', 'to', 'b'].edge_index is EDGES


@pytest.mark.parametrize(
    ('edge_index', 'error'),
    [
        (EDGES.float(), TypeError),
        (EDGES.numpy(), TypeError),
        (EDGES[0], ValueError),
        (EDGES.t(), ValueError),
    ],
)
def test_not_an_edge_index(edge_index: Any, error: type[Exception]) -> None:
    data = HeteroData()
    data['a', 'to', 'b'].edge_index = edge_index
    with pytest.raises(error, match=r"^data\['a', 'to', 'b'\]: 'edge_index'"):
        ToCSR()(data)


def test_not_data() -> None:
    with pytest.raises(TypeError, match="'data' must be a Data or HeteroData, got Tensor"):
        ToCSR()(EDGES)


def test_functional_name() -> None:
    pipe = torch.utils.data.datapipes.iter.IterableWrapper([homogeneous()]).to_csr()
    assert_prepared(next(iter(pipe)).edge_index, EDGES, (N, N))


# EdgeIndex in ##################################################################################


@pytest.mark.parametrize('order', [None, 'row', 'col'])
@pytest.mark.parametrize('filled', [False, True])
def test_from_edge_index(order: str | None, filled: bool) -> None:
    edge_index = EdgeIndex(EDGES, sparse_size=(N, N))
    if order is not None:
        edge_index = edge_index.sort_by(order, stable=True).values
    if filled:
        edge_index.fill_cache_()
    plain = edge_index.as_tensor().clone()
    out = ToCSR()(Data(edge_index=edge_index))
    assert_prepared(out.edge_index, plain, (N, N))
    assert ToCSR()(out).edge_index is out.edge_index


def test_kept_or_mended() -> None:
    data = ToCSR()(homogeneous())
    good = data.edge_index
    for kind in ('wrong indptr', 'no T_perm', 'no T_index', 'int32', 'size', 'edges'):
        bad = good.clone()
        if kind == 'wrong indptr':
            bad._indptr = bad._T_indptr
        elif kind == 'no T_perm':
            bad._T_perm = None
        elif kind == 'no T_index':
            bad._T_index = (None, bad._T_index[1])
        elif kind == 'int32':
            bad = good.to(torch.int32)
        elif kind == 'size':
            bad._sparse_size = (None, N)
        else:
            bad[0, 0] = 7
        changed = Data(edge_index=bad, edge_attr=data.edge_attr, num_nodes=N)
        out = ToCSR()(changed)
        assert out.edge_index is not bad, kind
        assert_prepared(out.edge_index, bad.as_tensor(), (N, N))
        assert out.edge_attr.equal(data.edge_attr)
    assert ToCSR()(data).edge_attr is data.edge_attr
    # More nodes than when it was prepared:
    data.num_nodes = N + 1
    assert_prepared(ToCSR()(data).edge_index, EDGES, (N + 1, N + 1))


@pytest.mark.parametrize('order', ['row', 'col'])
def test_undirected_stays_so(order: str) -> None:
    both = torch.cat([EDGES, EDGES.flip(0)], dim=1)
    edge_index = EdgeIndex(both, sparse_size=(N, N), is_undirected=True)
    edge_index = edge_index.sort_by(order, stable=True).values.fill_cache_()
    plain = edge_index.as_tensor()
    out = ToCSR()(Data(edge_index=edge_index, num_nodes=N)).edge_index
    assert out.is_undirected
    assert_prepared(out, plain, (N, N))
    x = torch.rand(N, 3)
    want = torch.zeros_like(x).index_add(0, plain[1], x[plain[0]])
    assert out.matmul(x, transpose=True).allclose(want)


# Copies, files, collation ######################################################################


def saved(data: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize('make', [homogeneous, bipartite])
@pytest.mark.parametrize(
    'carry',
    [
        copy.copy,
        copy.deepcopy,
        lambda data: data.clone(),
        lambda data: data.to('cpu', non_blocking=True),
        lambda data: data.contiguous(),
        lambda data: data.share_memory_(),
        lambda data: pickle.loads(pickle.dumps(data)),
        lambda data: saved(data, weights_only=False),
        lambda data: ToCSR()(data),
        lambda data: type(data).from_dict(data.to_dict()),
    ],
)
def test_caches_survive(make: Callable, carry: Callable) -> None:
    out = carry(ToCSR()(make()))
    for store in out.edge_stores:
        plain = make().edge_stores[0 if store._key is None else out.edge_types.index(store._key)]
        edges = plain.edge_index
        size = (N, N) if store._key is None else tuple(store.size())
        assert_prepared(store.edge_index, edges, size)
        assert ToCSR()(out).edge_stores[0].edge_index is out.edge_stores[0].edge_index


def test_load_weights_only() -> None:
    assert_prepared(saved(ToCSR()(homogeneous()).edge_index, weights_only=True), EDGES, (N, N))
    # PyG does not vouch for `Data` itself.
    fields = saved(ToCSR()(homogeneous()).to_dict(), weights_only=True)
    assert_prepared(fields['edge_index'], EDGES, (N, N))


class Prepared(torch.utils.data.Dataset):
    """Graphs of one to four nodes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Data:
        edges = EDGES % (i + 1)
        return ToCSR()(Data(edge_index=edges, edge_attr=edges[0], x=torch.rand(i + 1, 1)))


def batch_edges(graphs: range) -> tuple[Tensor, int]:
    starts = [sum(range(graphs.start + 1, i + 1)) for i in graphs]
    edges = [Prepared()[i].edge_index.as_tensor() + s for i, s in zip(graphs, starts, strict=True)]
    return torch.cat(edges, dim=1), starts[-1] + graphs.stop


@pytest.mark.parametrize('num_workers', [0, 2])
def test_batching(num_workers: int) -> None:
    loader = DataLoader(Prepared(), batch_size=2, num_workers=num_workers)
    for batch, graphs in zip(loader, (range(0, 2), range(2, 4)), strict=True):
        edges, num_nodes = batch_edges(graphs)
        assert batch.edge_index.as_tensor().equal(edges)
        assert caches(batch.edge_index) == (None,) * 5
        out = ToCSR()(batch)
        assert_prepared(out.edge_index, edges, (num_nodes, num_nodes))
        for i, graph in enumerate(graphs):
            one = out[i]
            assert_prepared(ToCSR()(one).edge_index, Prepared()[graph].edge_index, (graph + 1,) * 2)
            assert one.edge_index.sparse_size() == (graph + 1, graph + 1)
            assert one.edge_attr.equal(one.edge_index.as_tensor()[0])


def test_workers_hand_over_caches() -> None:
    loader = torch.utils.data.DataLoader(Prepared(), batch_size=None, num_workers=1)
    for i, data in enumerate(loader):
        assert_prepared(data.edge_index, EDGES % (i + 1), (i + 1, i + 1))


@pytest.mark.parametrize('make', [homogeneous, bipartite])
def test_batch_of_plain_graphs(make: Callable) -> None:
    batch = ToCSR()(Batch.from_data_list([make(), make(), make()]))
    alone = ToCSR()(make())
    for i in range(3):
        for got, want in zip(batch[i].edge_stores, alone.edge_stores, strict=True):
            assert got.edge_index.equal(want.edge_index)
            assert tuple(got.edge_index.sparse_size()) == tuple(want.edge_index.sparse_size())
            assert got.edge_index.is_sorted_by_col
    assert batch[2].edge_stores[0].edge_attr.equal(alone.edge_stores[0].edge_attr)


def test_batch_with_changed_edges() -> None:
    batch = T.AddSelfLoops()(Batch.from_data_list([homogeneous(), homogeneous()]))
    edges = batch.edge_index
    assert_prepared(ToCSR()(batch).edge_index, edges, (2 * N, 2 * N))


def plain_twin(data: Any) -> Any:
    """The same data, in the same order, with plain tensors."""
    data = copy.copy(data)
    for store in data.edge_stores:
        store['edge_index'] = store['edge_index'].as_tensor().clone()
    return data


@pytest.mark.parametrize(
    'select',
    [
        lambda data: data.subgraph(torch.tensor([0, 1, 5, 2])),
        lambda data: data.subgraph(torch.arange(N) % 3 != 0),
        lambda data: data.edge_subgraph(torch.arange(E) % 2 == 0),
        lambda data: data.edge_subgraph(torch.tensor([4, 1, 9])),
        lambda data: data.sort(),
        lambda data: data.coalesce(),
    ],
    ids=['nodes', 'node mask', 'edge mask', 'edges', 'sort', 'coalesce'],
)
def test_selection(select: Callable, request: pytest.FixtureRequest) -> None:
    data = ToCSR()(homogeneous())
    if request.node.callspec.id in ('sort', 'coalesce'):
        if not torch_geometric.__version__.startswith('2.8.'):
            pytest.skip('known of PyG 2.8 only')
        with pytest.raises(AttributeError, match='dim_size'):
            select(data)
        return
    got, want = select(data), select(plain_twin(data))
    assert_same(got, want)
    assert_not_stale(got)
    assert_prepared(ToCSR()(got).edge_index, want.edge_index, (want.num_nodes,) * 2)


NEEDS_SAMPLER = pytest.mark.skipif(
    not (torch_geometric.typing.WITH_PYG_LIB or torch_geometric.typing.WITH_TORCH_SPARSE),
    reason='needs pyg-lib or torch-sparse',
)


def neighbors(data: Data | HeteroData, **kwargs: Any) -> list[Any]:
    seeds = None if isinstance(data, Data) else 'b'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # torch-sparse is deprecated for this.
        return list(NeighborLoader(data, [-1, -1], input_nodes=seeds, batch_size=3, **kwargs))


@NEEDS_SAMPLER
@pytest.mark.parametrize('make', [homogeneous, bipartite])
def test_neighbor_loader_of_prepared_graph(make: Callable) -> None:
    data = ToCSR()(make())
    if not torch_geometric.typing.WITH_PYG_LIB:
        if not torch_geometric.__version__.startswith('2.8.'):
            pytest.skip('known of PyG 2.8 only')
        with pytest.raises(RuntimeError, match='not allocated'):
            neighbors(data)
        return
    for got, want in zip(neighbors(data), neighbors(plain_twin(data)), strict=True):
        assert_same(got, want)


@NEEDS_SAMPLER
@pytest.mark.parametrize('make', [homogeneous, bipartite])
def test_transform_of_neighbor_loader(make: Callable) -> None:
    batches = zip(neighbors(make()), neighbors(make(), transform=ToCSR()), strict=True)
    for want, got in batches:
        for before, after in zip(want.edge_stores, got.edge_stores, strict=True):
            size = (want.num_nodes,) * 2 if before._key is None else tuple(before.size())
            assert_prepared(after.edge_index, before.edge_index, size)
            assert after.e_id.equal(before.e_id[before.edge_index[1].argsort(stable=True)])
            assert after.get('num_sampled_edges') == before.get('num_sampled_edges')


# Other transforms ##############################################################################


# Without duplicates: on those, PyG's own products of two sparse matrices read wild memory.
SIMPLE = EDGES.unique(dim=1).flip(1)


def nodes() -> dict[str, Tensor]:
    torch.manual_seed(1)
    normal = torch.nn.functional.normalize(torch.rand(N, 3))
    return {
        'x': torch.rand(N, 20),
        'pos': torch.rand(N, 3),
        'normal': normal,
        'norm': normal,
        'y': torch.arange(N) % 3,
        'train_mask': torch.arange(N) % 2 == 0,
        'val_index': torch.arange(3),
    }


def bare() -> Data:
    return Data(edge_index=SIMPLE, **nodes())


def flat() -> Data:
    data = bare()
    data.pos = data.pos[:, :2].clone()
    return data


def weighted() -> Data:
    data = bare()
    data.edge_weight, data.edge_attr = torch.rand(SIMPLE.size(1)), torch.rand(SIMPLE.size(1), 2)
    return data


def symmetric() -> Data:
    half = torch.tensor([(i, j) for i in range(N) for j in range(i) if (i + i * j) % 3 != 1]).t()
    return Data(edge_index=torch.cat([half, half.flip(0)], dim=1), **nodes())


def isolated() -> Data:
    edges = SIMPLE[:, (SIMPLE < 6).all(dim=0)]
    return Data(edge_index=edges, edge_attr=torch.rand(edges.size(1)), **nodes())


def mesh() -> Data:
    data = bare()
    data.face = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4], [2, 4, 5, 7]])
    return data


def grouped() -> Data:
    data = bare()
    data.batch = torch.zeros(N, dtype=torch.long)
    data.y, data.y_graph = torch.rand(N, 51), torch.rand(1, 11)  # The targets of GPSE.
    return data


def hetero() -> HeteroData:
    data = HeteroData()
    data['a'].update(nodes())
    data['b'].x, data['b'].y = torch.rand(N + 1, 20), torch.arange(N + 1)
    data['a', 'self', 'a'].edge_index = SIMPLE
    data['a', 'self', 'a'].edge_weight = torch.rand(SIMPLE.size(1))
    data['a', 'to', 'b'].edge_index = SIMPLE + torch.tensor([[0], [1]])
    data['a', 'to', 'b'].edge_attr = torch.rand(SIMPLE.size(1))
    data['b', 'rev', 'a'].edge_index = data['a', 'to', 'b'].edge_index.flip(0)
    return data


GRAPHS = (bare, flat, weighted, symmetric, isolated, mesh, grouped, hetero)
LOOPS, TO, REV = ('a', 'self', 'a'), ('a', 'to', 'b'), ('b', 'rev', 'a')
MISSING = torch.arange(N * 20).view(N, 20) % 7 == 0
# Square paths only: on others PyG reads outside of its caches.
PATHS = [[LOOPS, LOOPS]]

# Every transform of PyG, in the ways that can run on a small graph.
TRANSFORMS: dict[str, list[Callable]] = {
    'AddGPSE': [lambda: T.AddGPSE(GPSE(dim_inner=32, layers_mp=2).eval())],
    'AddLaplacianEigenvectorPE': [
        lambda: T.AddLaplacianEigenvectorPE(2),
        lambda: T.AddLaplacianEigenvectorPE(2, is_undirected=True),
    ],
    'AddMetaPaths': [
        lambda: T.AddMetaPaths(PATHS),
        lambda: T.AddMetaPaths(PATHS, weighted=True),
        lambda: T.AddMetaPaths(PATHS, max_sample=2, drop_orig_edge_types=True),
    ],
    'AddRandomMetaPaths': [lambda: T.AddRandomMetaPaths(PATHS, walks_per_node=3)],
    'AddRandomWalkPE': [lambda: T.AddRandomWalkPE(3)],
    'AddRemainingSelfLoops': [
        T.AddRemainingSelfLoops,
        lambda: T.AddRemainingSelfLoops('edge_attr', 'mean'),
    ],
    'AddSelfLoops': [T.AddSelfLoops, lambda: T.AddSelfLoops('edge_attr', 'mean')],
    'Cartesian': [T.Cartesian],
    'Center': [T.Center],
    'Compose': [lambda: T.Compose([T.NormalizeFeatures(), T.Center()])],
    'Constant': [T.Constant],
    'Delaunay': [T.Delaunay],
    'Distance': [T.Distance],
    'FaceToEdge': [T.FaceToEdge],
    'FeaturePropagation': [lambda: T.FeaturePropagation(MISSING, 3)],
    'FixedPoints': [lambda: T.FixedPoints(N)],
    'GCNNorm': [T.GCNNorm],
    'GDC': [
        lambda: T.GDC(sparsification_kwargs={'method': 'topk', 'k': 3, 'dim': 0}),
        lambda: T.GDC(
            diffusion_kwargs={'method': 'heat', 't': 5},
            sparsification_kwargs={'method': 'threshold', 'eps': 0.05},
        ),
    ],
    'GenerateMeshNormals': [T.GenerateMeshNormals],
    'GridSampling': [lambda: T.GridSampling(0.5)],
    'HalfHop': [T.HalfHop, lambda: T.HalfHop(p=0.5)],
    'IndexToMask': [T.IndexToMask],
    'KNNGraph': [lambda: T.KNNGraph(2)],
    'LaplacianLambdaMax': [T.LaplacianLambdaMax, lambda: T.LaplacianLambdaMax('rw')],
    'LargestConnectedComponents': [
        T.LargestConnectedComponents,
        lambda: T.LargestConnectedComponents(1, connection='strong'),
    ],
    'LineGraph': [T.LineGraph, lambda: T.LineGraph(force_directed=True)],
    'LinearTransformation': [lambda: T.LinearTransformation(2 * torch.eye(3))],
    'LocalCartesian': [T.LocalCartesian],
    'LocalDegreeProfile': [T.LocalDegreeProfile],
    'MaskToIndex': [T.MaskToIndex],
    'NodePropertySplit': [
        lambda: T.NodePropertySplit('popularity', [0.3, 0.1, 0.1, 0.2, 0.3]),
        lambda: T.NodePropertySplit('locality', [0.3, 0.1, 0.1, 0.2, 0.3]),
        lambda: T.NodePropertySplit('density', [0.3, 0.1, 0.1, 0.2, 0.3]),
    ],
    'NormalizeFeatures': [T.NormalizeFeatures],
    'NormalizeRotation': [T.NormalizeRotation],
    'NormalizeScale': [T.NormalizeScale],
    'OneHotDegree': [lambda: T.OneHotDegree(E), lambda: T.OneHotDegree(E, in_degree=True)],
    'Pad': [
        lambda: T.Pad(12, 40),
        lambda: T.Pad({'a': 9, 'b': 12}, {LOOPS: 20, TO: 21, REV: 22}),
    ],
    'PointPairFeatures': [T.PointPairFeatures],
    'Polar': [T.Polar],
    'RadiusGraph': [lambda: T.RadiusGraph(0.5)],
    'RandomFlip': [lambda: T.RandomFlip(0)],
    'RandomJitter': [lambda: T.RandomJitter(0.1)],
    'RandomLinkSplit': [
        T.RandomLinkSplit,
        lambda: T.RandomLinkSplit(is_undirected=True, split_labels=True),
        lambda: T.RandomLinkSplit(edge_types=[LOOPS], is_undirected=True),
    ],
    'RandomLinkSplit of two node types': [
        lambda: T.RandomLinkSplit(edge_types=[TO], rev_edge_types=[REV])
    ],
    'RandomNodeSplit': [lambda: T.RandomNodeSplit(num_val=2, num_test=2)],
    'RandomRotate': [lambda: T.RandomRotate(90)],
    'RandomScale': [lambda: T.RandomScale((1, 2))],
    'RandomShear': [lambda: T.RandomShear(0.1)],
    'RemoveDuplicatedEdges': [T.RemoveDuplicatedEdges],
    'RemoveIsolatedNodes': [T.RemoveIsolatedNodes],
    'RemoveSelfLoops': [T.RemoveSelfLoops, lambda: T.RemoveSelfLoops('edge_attr')],
    'RemoveTrainingClasses': [lambda: T.RemoveTrainingClasses([0])],
    'RootedEgoNets': [lambda: T.RootedEgoNets(2)],
    'RootedRWSubgraph': [lambda: T.RootedRWSubgraph(2)],
    'SIGN': [lambda: T.SIGN(2)],
    'SVDFeatureReduction': [lambda: T.SVDFeatureReduction(2)],
    'SamplePoints': [lambda: T.SamplePoints(5)],
    'Spherical': [T.Spherical],
    'TargetIndegree': [T.TargetIndegree],
    'ToDense': [T.ToDense],
    'ToDevice': [lambda: T.ToDevice('cpu')],
    'ToSparseTensor': [
        T.ToSparseTensor,
        lambda: T.ToSparseTensor(remove_edge_index=False),
        lambda: T.ToSparseTensor(layout=torch.sparse_coo),
        lambda: T.ToSparseTensor(layout=torch.sparse_csr),
    ],
    'ToUndirected': [T.ToUndirected, lambda: T.ToUndirected(merge=False)],
    'TwoHop': [T.TwoHop],
    'VirtualNode': [T.VirtualNode],
}
NOT_ON_GRAPHS = {'BaseTransform', 'ComposeFilters', 'ToSLIC'}
NEED_PYG_LIB = {'GridSampling', 'KNNGraph', 'RadiusGraph', 'RootedRWSubgraph'}
FAIL_AFTER_TO_CSR = {
    'AddMetaPaths',
    'AddRandomMetaPaths',
    'FeaturePropagation',
    'GDC',
    'LineGraph',
    'RandomLinkSplit of two node types',
    'RemoveDuplicatedEdges',
    'RootedEgoNets',
    'RootedRWSubgraph',
    'SIGN',
    'ToSparseTensor',
    'TwoHop',
}

MULTIPLY_EDGE_INDEX = {'AddMetaPaths', 'TwoHop'}


def stores_of(result: Any) -> list[Any]:
    if isinstance(result, tuple):
        return [store for part in result for store in part.stores]
    return list(result.stores)


def dense(value: Any) -> Any:
    if isinstance(value, SparseTensor):
        return value.to_dense()
    if isinstance(value, EdgeIndex):
        return value.as_tensor()
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return value.to_dense()
    return value


def assert_same(got: Any, want: Any) -> None:
    for a, b in zip(stores_of(got), stores_of(want), strict=True):
        assert set(a.keys()) == set(b.keys())
        for key in a.keys():  # noqa: SIM118 (a store is not a dict)
            u, v = dense(a[key]), dense(b[key])
            if isinstance(u, (Tensor, float)):
                torch.testing.assert_close(u, v, rtol=1e-4, atol=1e-5, equal_nan=True, msg=key)
            else:
                assert u == v, key


def assert_not_stale(result: Any) -> None:
    for store in stores_of(result):
        for value in store.values():
            if not isinstance(value, EdgeIndex):
                continue
            value.validate()
            if not value.is_sorted:
                assert caches(value) == (None,) * 5
                continue
            edges, size = value.as_tensor(), value.get_sparse_size()
            ends = (0, 1) if value.is_sorted_by_row else (1, 0)
            for end, ptr in zip(ends, (value._indptr, value._T_indptr), strict=True):
                assert ptr is None or ptr.equal(index2ptr(edges[end].sort().values, size[end]))
            if value._T_perm is not None:
                assert value._T_perm.sort().values.equal(torch.arange(edges.size(1)))
                assert bool((edges[ends[1]][value._T_perm].diff() >= 0).all())
                for index, end in zip(value._T_index, edges, strict=True):
                    assert index is None or index.equal(end[value._T_perm])


def seeded(run: Callable) -> Any:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return run()


def runs(name: str) -> list[tuple[Callable, Any, Any]]:
    """The transform, a prepared graph and what its plain twin becomes, where it can run at all."""
    found, missing = [], ''
    for make in TRANSFORMS[name]:
        for graph in GRAPHS:
            data = ToCSR()(graph())
            try:
                want = seeded(lambda: make()(plain_twin(data)))  # noqa: B023 (called at once)
            except ModuleNotFoundError as error:
                missing = str(error)
                continue
            except Exception:  # Not for such graphs.
                continue
            found.append((make, data, want))
    if not found and name in NEED_PYG_LIB and not torch_geometric.typing.WITH_PYG_LIB:
        pytest.skip('needs pyg-lib')
    if not found and missing:
        pytest.skip(missing)
    assert found
    return found


def test_all_transforms_are_tried() -> None:
    assert {name.split()[0] for name in TRANSFORMS} | NOT_ON_GRAPHS >= set(T.__all__)


def test_docstring_lists_what_fails() -> None:
    listed = re.findall(r'~torch_geometric\.transforms\.(\w+)', ToCSR.__doc__)
    assert sorted(listed) == sorted(name.split()[0] for name in FAIL_AFTER_TO_CSR)


@pytest.mark.optional
@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', sorted(TRANSFORMS.keys() - FAIL_AFTER_TO_CSR))
def test_transform_after_to_csr(name: str) -> None:
    for make, data, want in runs(name):
        got = seeded(lambda: make()(data))  # noqa: B023 (called at once)
        assert_same(got, want)
        assert_not_stale(got)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', sorted(FAIL_AFTER_TO_CSR))
def test_transform_still_fails_after_to_csr(name: str) -> None:
    if not torch_geometric.__version__.startswith('2.8.'):
        pytest.skip(f'the list was made for PyG 2.8, this is {torch_geometric.__version__}')
    if name in MULTIPLY_EDGE_INDEX:
        pytest.skip('its sparse product of mixed-up caches can crash the interpreter')
    if name == 'RootedRWSubgraph':  # The call fails before it needs pyg-lib.
        with pytest.raises(AttributeError, match='dim_size'):
            T.RootedRWSubgraph(2)(ToCSR()(bare()))
        return
    failures = 0
    for make, data, want in runs(name):
        try:
            assert_same(seeded(lambda: make()(data)), want)  # noqa: B023 (called at once)
        except Exception:
            failures += 1
    assert failures


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', sorted(TRANSFORMS))
def test_to_csr_after_transform(name: str) -> None:
    for _, _, result in runs(name):
        for data in result if isinstance(result, tuple) else (result,):
            out = ToCSR()(data)
            for before, after in zip(data.edge_stores, out.edge_stores, strict=True):
                if 'edge_index' not in before:
                    assert set(before.keys()) == set(after.keys())
                    continue
                assert set(before.keys()) | {'e_perm'} == set(after.keys())
                size = (data.num_nodes,) * 2 if before._key is None else tuple(before.size())
                assert_prepared(after.edge_index, before.edge_index, size)
                order = before.edge_index[1].argsort(stable=True)
                for key in ('edge_attr', 'edge_weight'):
                    if key in before and len(before[key]) == order.numel():
                        want = before[key][order]
                        torch.testing.assert_close(after[key], want, rtol=0, atol=0, equal_nan=True)


def test_rooted_subgraphs_keep_their_edges() -> None:
    rooted = T.RootedEgoNets(1)(homogeneous())
    assert isinstance(rooted, RootedSubgraphData)
    got, want = ToCSR()(rooted).map_data(), rooted.map_data()
    assert got.edge_attr.equal(want.edge_attr)
    assert got.edge_index.equal(want.edge_index)


# Without the list of edges ####################################################################


LEAN = ToCSR(keep_edge_index=False)


def assert_lean(edge_index: Any, edges: Tensor, size: tuple[int, int], values: bool) -> None:
    """`edge_index` has the structure of `edges`, sorted stably, and positions only for values."""
    assert type(edge_index) is PreparedGraph
    order = edges[1].argsort(stable=True)
    assert edge_index.to_edge_index().as_tensor().equal(edges.long()[:, order])
    assert tuple(edge_index.sparse_size()) == size
    graph = edge_index.graph
    assert graph.perm is None
    assert {t.dtype for t in (*graph[:2], *graph[3:5])} == {torch.int32}
    assert (graph.missing is None) == (graph.t_perm is not None) == values


@pytest.mark.parametrize('dtype', [torch.int32, torch.int64, torch.uint8])
def test_lean(device: torch.device, dtype: torch.dtype) -> None:
    data = Data(edge_index=EDGES.to(device, dtype), x=torch.rand(N, 1), edge_label=torch.ones(E))
    for each in (data, ToCSR()(data)):
        out = LEAN(each)
        assert_lean(out.edge_index.cpu(), EDGES, (N, N), values=False)
        assert LEAN(out).edge_index is out.edge_index
        assert ToCSR()(out).edge_index is out.edge_index
        assert (out.num_nodes, out.num_edges) == (N, E)
        assert list(out.keys()) == list(data.keys())  # also without `e_perm`
        assert isinstance(out.edge_index.to_edge_index(), EdgeIndex)
    assert data.edge_index.dtype == dtype


def test_lean_attributes() -> None:
    for make in (homogeneous, bipartite):
        out, want = LEAN(make()), ToCSR()(make())
        for got, full in zip(out.edge_stores, want.edge_stores, strict=True):
            values = 'edge_attr' in full
            size = tuple(full.edge_index.sparse_size())
            assert_lean(got.edge_index, full.edge_index.as_tensor(), size, values)
            assert not values or got.edge_attr.equal(full.edge_attr)
    moved = LEAN(bipartite()).to('cpu').clone()
    assert type(moved['a', 'to', 'b'].edge_index) is PreparedGraph


def test_lean_frees_the_list() -> None:
    alive: list[bool] = []
    data = Data(edge_index=EDGES.clone(), num_nodes=N)
    list_of_edges = weakref.ref(data.edge_index)

    def look(*_: Any) -> None:
        gc.collect()
        alive.append(list_of_edges() is not None)

    with Before('transpose_csr', look):
        LEAN.forward(data)
    assert alive == [False]
    assert_lean(data.edge_index, EDGES, (N, N), values=False)


@pytest.mark.parametrize('attributes', [False, True])
@pytest.mark.parametrize('keep', [False, True])
def test_lean_of_a_grown_graph(attributes: bool, keep: bool) -> None:
    edge_index = torch.tensor([[1, 0, 2, 1], [2, 1, 0, 0]])
    data = ToCSR(keep_edge_index=False)(Data(x=torch.randn(3, 2), edge_index=edge_index))
    if attributes:
        data.edge_attr = torch.arange(4)
    before = data.edge_index.to_edge_index().as_tensor()
    data.x = torch.randn(5, 2)
    data = ToCSR(keep_edge_index=keep)(data)
    assert isinstance(data.edge_index, PreparedGraph)
    assert (data.edge_index.num_src, data.edge_index.num_dst) == (5, 5)
    assert torch.equal(data.edge_index.to_edge_index().as_tensor(), before)
    assert not attributes or data.edge_attr.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ('kind', 'text'),
    [
        ('ToCSR', 'ToCSR()(data)'), ('GroupSizes', 'GroupSizes()(data)'),
        ('Reorder', 'Reorder()(data)'), ('Prepare', 'Prepare(num_layers)(data)'),
        ('ExecutionPaths', 'ExecutionPaths(num_layers)(data)'),
    ],
)  # fmt: skip
def test_data_in_place_of_options(kind: str, text: str) -> None:
    with pytest.raises(TypeError, match=f'{kind} takes options') as error:
        getattr(transforms, kind)(Data(num_nodes=2))
    assert str(error.value).endswith(text)


def test_lean_errors_leave_the_list() -> None:
    edges = EDGES.clone()
    edges[1, 3] = N
    data = Data(edge_index=edges, num_nodes=N)
    with pytest.raises(IndexError, match=r"^data: 'edge_index\[1\]'"):
        LEAN.forward(data)
    assert data.edge_index is edges
    with pytest.raises(TypeError, match="'keep_edge_index' must be True or False"):
        ToCSR(keep_edge_index='no')  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"'keep_edge'; it has .*; did you mean 'keep_edge_index'\?"
    ):
        ToCSR(keep_edge=False)  # type: ignore[call-arg]


def test_lean_batches() -> None:
    graphs = [Data(edge_index=EDGES % n, x=torch.rand(n, 2)) for n in (3, 5, 8)]
    batch = Batch.from_data_list(graphs)
    lean = LEAN(batch)
    assert_lean(lean.edge_index, batch.edge_index, (16, 16), values=False)
    again = Batch.from_data_list([LEAN(graph) for graph in graphs])
    full = Batch.from_data_list([ToCSR()(graph) for graph in graphs])
    assert torch.equal(torch.as_tensor(again.edge_index), torch.as_tensor(full.edge_index))
    for got, n in zip(lean.to_data_list(), (3, 5, 8), strict=True):
        want = ToCSR()(Data(edge_index=EDGES % n, num_nodes=n)).edge_index
        assert torch.equal(torch.as_tensor(got.edge_index), want.as_tensor())


def test_lean_subgraph() -> None:
    nodes = torch.tensor([0, 1, 5, 2])
    lean, full = (each(homogeneous()).subgraph(nodes) for each in (LEAN, ToCSR()))
    assert torch.equal(torch.as_tensor(lean.edge_index), torch.as_tensor(full.edge_index))
    assert lean.edge_attr.equal(full.edge_attr)


def test_repr() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert repr(ToCSR()) == 'ToCSR()'
        assert repr(LEAN) == 'ToCSR(keep_edge_index=False)'
        assert repr(ToCSR(perm=None)) == 'ToCSR(perm=None)'


# The permutation of the edges ##################################################################


@pytest.mark.parametrize('make', [homogeneous, bipartite])
@pytest.mark.parametrize('name', ['e_perm', 'edge_perm'])
def test_permutation(make: Callable, name: str) -> None:
    data = make()
    out = ToCSR(perm=name)(data)
    for before, after in zip(data.edge_stores, out.edge_stores, strict=True):
        assert after[name].dtype == torch.int64
        assert after.edge_index.as_tensor().equal(before.edge_index[:, after[name]])
    again = ToCSR(perm=name)(pickle.loads(pickle.dumps(out.to('cpu'))))
    for first, second in zip(out.edge_stores, again.edge_stores, strict=True):
        assert second[name].equal(first[name])
    for lean in (ToCSR(perm=None)(data), LEAN(data), LEAN(out)):
        assert all('e_perm' not in store for store in lean.edge_stores)


def test_permutation_of_edge_attributes_kept_outside() -> None:
    edge_attr, data = torch.rand(E, 3), Data(edge_index=EDGES, num_nodes=N)
    data.edge_attr = edge_attr
    out = ToCSR()(data)
    assert edge_attr[out.e_perm].equal(out.edge_attr)
    assert not edge_attr.equal(out.edge_attr)


def test_permutation_of_sorted_edges_stays_that_of_the_first_list() -> None:
    out = ToCSR()(homogeneous())
    batch = ToCSR()(Batch.from_data_list([out, out]))
    assert batch.e_perm.equal(torch.cat([out.e_perm] * 2))
    part = out.clone()  # Sorted by source, and so without caches of ours.
    part.edge_index, order = out.edge_index.sort_by('row')
    part.e_perm, part.edge_attr = out.e_perm[order], out.edge_attr[order]
    again = ToCSR()(part)
    assert again.edge_attr.equal(again.e_perm)
    assert again.edge_index.as_tensor().equal(EDGES[:, again.e_perm])


def test_permutation_of_a_subgraph() -> None:
    part = ToCSR()(homogeneous()).subgraph(torch.arange(5))
    assert part.edge_attr.equal(part.e_perm)
    again = ToCSR()(part)  # A plain tensor is a new list.
    assert again.edge_index.as_tensor().equal(part.edge_index[:, again.e_perm])


def test_permutation_of_replaced_edges() -> None:
    data = ToCSR()(homogeneous())
    for edges in (EDGES.flip(1), EDGES[:, 4:]):
        data.edge_index, data.edge_attr = edges, None
        data = ToCSR()(data)
        assert data.edge_index.as_tensor().equal(edges[:, data.e_perm])


def test_permutation_with_as_many_nodes_as_edges() -> None:
    data = Data(edge_index=torch.tensor([[0, 1, 2], [2, 1, 0]]), num_nodes=3)
    out = ToCSR()(data)
    out.edge_index = out.edge_index.sort_by('row').values
    assert ToCSR()(out).e_perm.tolist() == [0, 1, 2]


@pytest.mark.parametrize('value', [torch.arange(E), torch.rand(E), 'note'])
def test_permutation_leaves_an_attribute_of_the_name(value: Any) -> None:
    data = homogeneous()
    data.e_perm = value
    with pytest.warns(UserWarning, match="have an attribute 'e_perm' already") as caught:
        out = ToCSR()(data)
    assert caught[0].filename == __file__
    want = value[EDGES[1].argsort(stable=True)] if isinstance(value, Tensor) else value
    assert out.e_perm.equal(want) if isinstance(value, Tensor) else out.e_perm == want
    assert ToCSR(perm='edge_perm')(data).edge_perm.equal(EDGES[1].argsort(stable=True))


@pytest.mark.parametrize('name', ['', '_private', 3])
def test_name_of_the_permutation(name: Any) -> None:
    with pytest.raises(ValueError, match="'perm' must be the name of an attribute or None"):
        ToCSR(perm=name)
