"""Batches of small graphs, beside PyG's."""

import copy
import logging
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.transforms as T
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import ConcatDataset, DistributedSampler, RandomSampler, Subset
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData, InMemoryDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, global_add_pool

import pyg_fast
from pyg_fast.graph import graph_of
from pyg_fast.graph.prepared_graph import list_of
from pyg_fast.loader import GraphLoader
from pyg_fast.nn import FusedGATConv, FusedGCNConv, FusedSAGEConv
from pyg_fast.transforms import ToCSR
from tests.loader._small_graphs import (
    NAMES,
    OF_PAIRS,
    PairData,
    check_batch,
    check_equal,
    molecules,
    random_graphs,
)


def sort_edges(data: Data) -> Data:
    """A graph with its edges, and what belongs to them, by destination and source."""
    out = copy.copy(data)
    if 'edge_index' not in out:
        return out
    src, dst = data.edge_index
    perm = torch.from_numpy(np.lexsort([src.numpy(), dst.numpy()]))
    out.edge_index = data.edge_index[:, perm]
    for key in ('edge_attr', 'edge_kind'):
        if key in out:
            out[key] = data[key][perm]
    if 'edge_names' in out:
        out.edge_names = [data.edge_names[k] for k in perm]
    if 'edge_array' in out:
        out.edge_array = data.edge_array[perm.numpy()]
    return out


@st.composite
def cases(draw: st.DrawFn) -> SimpleNamespace:
    cls = draw(st.sampled_from([Data, PairData]))
    usual = [name for name in NAMES if name not in OF_PAIRS]
    names = draw(st.lists(st.sampled_from(usual), min_size=1, unique=True))
    if cls is PairData:
        if not {'x', 'num_nodes'} & set(names):
            names.append('x')
        names += draw(st.permutations(OF_PAIRS))
    elif not {'x', 'num_nodes', 'batch'} & set(names):  # PyG would guess the number of nodes
        names.append('num_nodes')
    count = draw(st.integers(1, 5))
    return SimpleNamespace(
        graphs=random_graphs(count, names, draw(st.integers(0, 999)), cls, draw(st.booleans())),
        ids=draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6)),
        order=draw(st.sampled_from(['sorted', 'dataset'])),
        follow=draw(st.lists(st.sampled_from(names), unique=True, max_size=3)),
        exclude=draw(st.lists(st.sampled_from(names[1:] or ['z']), unique=True, max_size=2)),
    )  # fmt: skip


@pytest.mark.filterwarnings('ignore:Unable to accurately infer')
@settings(max_examples=100)
@given(case=cases())
def test_as_pygs_batches(device: torch.device, case: SimpleNamespace) -> None:
    options = dict(follow_batch=case.follow, exclude_keys=case.exclude)
    loader = GraphLoader(case.graphs, device=device, edge_order=case.order, **options)
    got = loader(case.ids)
    sorts = isinstance(got.get('edge_index'), EdgeIndex)
    # With as many edges as nodes the names of attributes decide; increments may be those of edges.
    is_sure = any(each.num_nodes != each.num_edges for each in case.graphs) and any(
        len(each.get('x_t', ())) != each.num_edges for each in case.graphs
    )
    if 'edge_index' in got and is_sure:
        assert sorts == (case.order == 'sorted')
    graphs = list(map(sort_edges, case.graphs)) if sorts else case.graphs
    wanted = Batch.from_data_list([graphs[k] for k in case.ids], **options)
    check_batch(got, wanted, device)


@pytest.mark.filterwarnings('ignore:Unable to accurately infer')
@pytest.mark.parametrize('cls', [Data, PairData])
def test_every_kind_of_attribute(device: torch.device, cls: type) -> None:
    names = [name for name in NAMES if cls is PairData or name not in OF_PAIRS]
    graphs = random_graphs(5, names, cls=cls)
    wanted = Batch.from_data_list(graphs, names)
    check_batch(GraphLoader(graphs, 5, False, names, device=device, edge_order='dataset')(range(5)),
                wanted, device)  # fmt: skip


def test_graphs_without_edges_or_nodes(device: torch.device) -> None:
    graphs = [
        Data(x=torch.ones(n, 1), edge_index=torch.zeros(2, e, dtype=torch.int64))
        for n, e in ((1, 0), (0, 0), (3, 2), (0, 0))
    ]  # fmt: skip
    loader = GraphLoader(graphs, 4, device=device)
    for ids in ([0, 1], [1], [1, 2, 3], [3, 3], [2, 0]):
        check_batch(loader(ids), Batch.from_data_list([graphs[k] for k in ids]), device)


def test_points_without_edges(device: torch.device) -> None:
    points = [Data(pos=torch.randn(k + 1, 3), y=k) for k in range(4)]
    check_batch(
        GraphLoader(points, device=device)([2, 0, 3]),
        Batch.from_data_list([points[k] for k in (2, 0, 3)]), device,
    )  # fmt: skip


# Prepared edges ---------------------------------------------------------------------------------
@pytest.mark.parametrize('is_symmetric', [True, False])
@pytest.mark.parametrize('pad', [None, 'buckets'])
def test_structure(device: torch.device, is_symmetric: bool, pad: str | None) -> None:
    names = ['edge_index', 'x', 'edge_attr']
    graphs = molecules(40) if is_symmetric else random_graphs(40, names)
    loader = GraphLoader(graphs, 8, True, device=device, pad=pad, drop_last=True)
    for batch in loader:
        edge_index, size = batch.edge_index, batch.num_nodes
        assert edge_index.is_sorted_by_col
        assert tuple(edge_index.sparse_size()) == (size, size)
        kept, made = graph_of(edge_index, size, size), graph_of(edge_index.as_tensor(), size, size)
        assert kept.col.data_ptr() == graph_of(edge_index, size, size).col.data_ptr()
        assert (kept.t_col is kept.col) == (is_symmetric and pad is None)
        assert kept.perm is None
        assert made.perm is not None
        assert torch.equal(made.perm.cpu(), torch.arange(batch.num_edges, dtype=torch.int32))
        for name in ('rowptr', 'col', 't_rowptr', 't_col', 't_perm'):
            check_equal(getattr(kept, name), getattr(made, name), name)
        assert int(made.rowptr.diff().max()) <= kept.most_edges
        assert torch.equal(edge_index._indptr, kept.rowptr.long())


@pytest.mark.parametrize('layer', [FusedGCNConv, FusedSAGEConv, FusedGATConv])
@pytest.mark.parametrize('order', ['sorted', 'dataset'])
def test_layers(device: torch.device, layer: type, order: str) -> None:
    graphs = molecules(12)
    conv = layer(4, 8).to(device)
    batch = GraphLoader(graphs, 12, device=device, edge_order=order)(range(12))
    wanted = Batch.from_data_list(graphs).to(device)
    out = conv(batch.x, batch.edge_index)
    torch.testing.assert_close(out, conv(wanted.x, wanted.edge_index), rtol=1e-4, atol=1e-5)
    parts = torch.cat([conv(data.x, data.edge_index) for data in batch.to_data_list()])
    torch.testing.assert_close(out, parts, rtol=1e-4, atol=1e-5)


def test_layers_of_pyg(device: torch.device) -> None:
    graphs, conv = molecules(6), GCNConv(4, 8).to(device)
    batch = GraphLoader(graphs, 6, device=device)(range(6))
    wanted = conv(*(Batch.from_data_list(graphs).to(device)[key] for key in ('x', 'edge_index')))
    torch.testing.assert_close(conv(batch.x, batch.edge_index), wanted, rtol=1e-4, atol=1e-5)


def test_edges_move_and_compile(device: torch.device) -> None:
    loader = GraphLoader(molecules(30), 10, device=device)
    conv = FusedSAGEConv(4, 8).to(device)
    compiled = torch.compile(conv, dynamic=True, fullgraph=True, backend='aot_eager')
    for batch in loader:
        moved = copy.copy(batch).to('cpu').to(device)
        assert type(moved.edge_index) is type(batch.edge_index)
        assert type(moved[0].edge_index) is Tensor
        out = compiled(moved.x, moved.edge_index)
        torch.testing.assert_close(out, conv(batch.x, batch.edge_index), rtol=1e-4, atol=1e-5)


def test_prepared_dataset(device: torch.device) -> None:
    """An EdgeIndex or a PreparedGraph is joined as its list."""
    graphs = molecules(5)
    wanted = GraphLoader(graphs, device=device)([3, 1])
    for keep in (True, False):
        prepared = [ToCSR(keep)(copy.copy(data)) for data in graphs]
        batch = GraphLoader(prepared, device=device)([3, 1])
        check_equal(batch.edge_index, wanted.edge_index)
        check_equal(batch.edge_attr, wanted.edge_attr)


# The interface of PyG's loader ------------------------------------------------------------------
def same_batches(ours: Any, theirs: Any) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.y.cpu(), b.y)
        assert torch.equal(a.x.cpu(), b.x)


@pytest.mark.parametrize('options', [
    dict(batch_size=4), dict(batch_size=4, shuffle=True),
    dict(batch_size=4, shuffle=True, drop_last=True), dict(batch_size=50, shuffle=True), dict(),
    dict(batch_size=3, sampler=[5, 1, 2, 2, 0]), dict(batch_sampler=[[1], [3, 2, 1], [-1]]),
    dict(batch_size=4, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True),
])  # fmt: skip
def test_arguments_of_pyg(device: torch.device, options: dict[str, Any]) -> None:
    graphs = molecules(19)
    of_workers = 'num_workers', 'persistent_workers', 'pin_memory'
    theirs = DataLoader(graphs, **{k: v for k, v in options.items() if k not in of_workers})
    ours = GraphLoader(graphs, device=device, **options)
    assert isinstance(ours, DataLoader)
    assert len(ours) == len(theirs)
    assert ours.num_workers == 0
    for _ in range(2):
        state = torch.get_rng_state()
        got = list(ours)
        torch.set_rng_state(state)
        same_batches(got, theirs)


def test_generator(device: torch.device) -> None:
    graphs = molecules(19)
    loaders = [
        cls(graphs, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
        for cls in (GraphLoader, DataLoader)
    ]  # fmt: skip
    for _ in range(3):
        same_batches(*loaders)


@pytest.mark.parametrize('options', [
    {}, {'num_samples': 7}, {'num_samples': 45}, {'replacement': True, 'num_samples': 33},
])  # fmt: skip
@pytest.mark.parametrize('has_generator', [False, True])
def test_random_samplers(options: dict[str, Any], has_generator: bool) -> None:
    """Their orders, and what they leave of a generator."""
    graphs, batches = molecules(19), []
    for cls in (GraphLoader, DataLoader):
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(3) if has_generator else None
        sampler = RandomSampler(graphs, generator=generator, **options)  # type: ignore[arg-type]
        loader = cls(graphs, 4, sampler=sampler)
        batches.append([*loader, *loader])
    same_batches(*batches)


def test_many_batches(device: torch.device) -> None:
    """More than those of which numbers are made at once. None shares memory with another."""
    graphs = molecules(150)
    batches = list(GraphLoader(graphs, 2, device=device))
    same_batches(batches, DataLoader(graphs, 2))
    tensors = [t for batch in batches for t in batch._store._mapping.values()]
    parts = [t.as_tensor() if isinstance(t, EdgeIndex) else t for t in tensors]
    assert len({t.untyped_storage().data_ptr() for t in parts}) == len(parts)


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_few_operations_for_each_batch(device: torch.device) -> None:
    """Two kernels, the copy of `ptr`, and rows of structures: what batches have in common is done
    for many at once."""
    loader, counts = GraphLoader(molecules(128), 2, True, device=device), []
    batches = iter(loader)
    for _ in range(60):
        with Operations() as operations:
            next(batches)
        counts.append(operations.count)
    assert counts[0] > max(counts[1:])
    assert max(counts[1:]) <= 5


class Stored(InMemoryDataset):
    """A dataset in memory, of the same graphs."""

    def __init__(self, graphs: list[Data], transform: Any = None) -> None:
        super().__init__(None, transform)
        self.data, self.slices = self.collate(graphs)


def test_datasets(device: torch.device) -> None:
    graphs = molecules(12)
    stored = Stored(graphs)
    for dataset in (
        graphs, tuple(graphs), stored, stored[3:], Subset(graphs, [3, 1, 1]), stored.shuffle(),
        ConcatDataset([stored, graphs[:2]]), stored[[2]],
    ):  # fmt: skip
        same_batches(GraphLoader(dataset, 5, device=device), DataLoader(dataset, 5))


def test_reading_keeps_no_copy_of_each_graph() -> None:
    stored = Stored(molecules(12))
    GraphLoader(stored)
    assert stored._data_list is None


def test_transform_runs_once(device: torch.device) -> None:
    calls = []

    def count(data: Data) -> Data:
        calls.append(1)
        data.z = data.x.sum(1)
        return data

    graphs = molecules(6)
    loader = GraphLoader(Stored(graphs, T.Compose([count, T.Distance()]).transforms[0]), 6)
    for _ in range(2):
        (batch,) = loader
        check_equal(batch.z, torch.cat([data.x.sum(1) for data in graphs]))
    assert len(calls) == 6


@pytest.mark.parametrize('transform', [
    T.RandomJitter(0.1), T.Compose([T.Center(), T.AddLaplacianEigenvectorPE(2)]), T.FixedPoints(3),
])  # fmt: skip
def test_random_transforms_are_refused(transform: Any) -> None:
    last = transform.transforms[-1] if isinstance(transform, T.Compose) else transform
    stored = Stored(molecules(3), transform)
    for dataset in (stored, Subset(stored, [0]), ConcatDataset([stored])):
        with pytest.raises(ValueError, match=f'applies {type(last).__name__}, which is random'):
            GraphLoader(dataset)


@pytest.mark.parametrize('key', ['bond', 'edge_attr', 'edge_bond'])
def test_attributes_that_may_be_those_of_edges(
    key: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """With as many edges as nodes only a name tells; or one graph lacks a row."""
    graphs = []
    for n in (10, 6, 10, 7):
        graphs.append(Data(x=torch.randn(n, 4), edge_index=torch.randint(n, (2, n))))
        graphs[-1][key] = torch.randn(n - (key == 'edge_attr' and n == 6), 3)
    short = key == 'edge_attr'
    text = 'of graph 1 of the dataset has 5 rows for 6 edges'
    with pytest.warns(UserWarning, match=text) if short else nullcontext() as found:
        ours = list(GraphLoader(graphs, 2, device=device))
    assert not short or found[0].filename == __file__
    theirs = list(DataLoader(graphs, 2))
    assert ('in the order of the dataset' in caplog.text) == (key != 'edge_bond')
    for mine, other in zip(ours, theirs, strict=True):
        ends, wanted = list_of(mine.edge_index).cpu(), other.edge_index
        order = torch.arange(wanted.size(1))
        if key == 'edge_bond':
            order = (wanted[1] * mine.num_nodes + wanted[0]).argsort(stable=True)
        assert torch.equal(ends, wanted[:, order])
        rows = other[key] if key != 'edge_bond' else other[key][order]
        assert torch.equal(mine[key].cpu(), rows)


@pytest.mark.parametrize('draw', [
    lambda: torch.randn(1), lambda: random.random(), lambda: np.random.rand(),
])  # fmt: skip
def test_own_random_transforms_warn(draw: Callable[[], Any]) -> None:
    def transform(data: Data) -> Data:
        data.noise = float(draw())
        return data

    with pytest.warns(UserWarning, match='drew random numbers') as caught:
        GraphLoader(Stored(molecules(3), transform))
    assert caught[0].filename == __file__


def test_copies(device: torch.device) -> None:
    graphs = molecules(9)
    loader = GraphLoader(graphs, 4, device=device, pad='buckets', follow_batch=['x'])
    for other in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader)):
        assert repr(other) == repr(loader)
        for a, b in zip(other, loader, strict=True):
            check_equal(a._store._mapping, b._store._mapping)
    batch = loader([1, 2])
    for other in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch), copy.copy(batch)):
        check_batch(other, batch, device)


def test_later_changes_have_no_effect(device: torch.device) -> None:
    graphs = molecules(3)
    loader = GraphLoader(graphs, 3, device=device)
    first = loader([0]).x.clone()
    graphs[0].x += 1
    batch = loader([0])
    check_equal(batch.x, first)
    batch.x += 1
    check_equal(loader([0]).x, first)


def test_as_lightning_makes_it_again(device: torch.device) -> None:
    """From its public attributes, with a sampler of its own."""
    graphs = molecules(12)
    loader = GraphLoader(graphs, 4, follow_batch=['x'], device=device, edge_order='dataset')
    names = {
        'dataset', 'batch_size', 'follow_batch', 'exclude_keys', 'device', 'pad', 'edge_order',
        'drop_last', 'generator', 'rank', 'num_replicas', 'num_workers', 'collate_fn', 'pin_memory',
        'timeout', 'worker_init_fn', 'multiprocessing_context', 'prefetch_factor',
        'persistent_workers', 'pin_memory_device', 'in_order',
    }  # fmt: skip
    sampler = DistributedSampler(graphs, 2, 0, shuffle=False)
    again = GraphLoader(**{name: getattr(loader, name) for name in names}, sampler=sampler)
    (first, second) = again
    check_batch(first, loader([0, 2, 4, 6]), device)
    check_batch(second, loader([8, 10]), device)


# Replicas ---------------------------------------------------------------------------------------
def test_replicas_share_graphs(device: torch.device) -> None:
    graphs = [Data(x=torch.ones(1, 1), y=k) for k in range(20)]
    loaders = [GraphLoader(graphs, 3, True, rank=k, num_replicas=2, device=device) for k in (0, 1)]
    epochs = []
    for _ in range(2):
        parts = [torch.cat([batch.y for batch in loader]).tolist() for loader in loaders]
        assert sorted(parts[0] + parts[1]) == list(range(20))
        epochs.append(parts)
    assert epochs[0] != epochs[1]
    sampler = DistributedSampler(graphs, 2, 1)
    same = GraphLoader(graphs, 3, sampler=sampler, device=device)
    sampler.set_epoch(1)
    assert torch.cat([batch.y for batch in same]).tolist() == epochs[1][1]


# What PyG's code collates -----------------------------------------------------------------------
def hetero(k: int) -> HeteroData:
    data = HeteroData()
    data['a'].x = torch.full((k + 1, 2), float(k))
    data['a', 'to', 'a'].edge_index = torch.zeros(2, k, dtype=torch.int64)
    return data


def fallbacks() -> dict[str, list[Any]]:
    sparse = torch.eye(2).to_sparse_csr()
    return {
        'HeteroData': [hetero(k) for k in range(3)],
        "'adj' is sparse": [Data(x=torch.ones(2, 1), adj=sparse) for _ in range(3)],
        'requires gradients': [Data(x=torch.ones(2, 1, requires_grad=True)) for _ in range(3)],
        'tuple': [(Data(x=torch.ones(k, 1)), hetero(k)) for k in range(1, 4)],
        'Batch': [Batch.from_data_list(molecules(2)) for _ in range(3)],
    }  # fmt: skip


@pytest.mark.parametrize('reason', list(fallbacks()))
def test_pygs_code(device: torch.device, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    dataset = fallbacks()[reason]
    with caplog.at_level(logging.WARNING, 'pyg_fast'):
        loader = GraphLoader(dataset, 2, device=device)
        batches = list(loader)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    for batch, wanted in zip(batches, DataLoader(dataset, 2), strict=True):
        pairs = zip(batch, wanted, strict=True) if reason == 'tuple' else [(batch, wanted)]
        for a, b in pairs:
            for one, other in zip(a.stores, b.stores, strict=True):
                for key in other:
                    if key != 'adj':
                        check_equal(one[key], other[key])
                        is_tensor = isinstance(one[key], Tensor)
                        assert not is_tensor or one[key].device.type == device.type
    with pytest.raises(ValueError, match="'pad' must be None"):
        GraphLoader(dataset, 2, pad='buckets')


# Errors -----------------------------------------------------------------------------------------
def graph(**values: Any) -> Data:
    return Data(x=torch.ones(2, 3), **values)


@pytest.mark.parametrize(('values', 'message'), [
    (({'z': 1}, {}), "'z' is in graph 0 of the dataset but not in graph 1"),
    (({}, {'z': 1}), "'z' is in graph 1 of the dataset but not in graph 0"),
    (({'z': torch.ones(1)}, {'z': torch.ones(1).long()}),
     r"'z' is torch.int64 of shape \[\*\] on cpu in graph 1 of the dataset, but torch.float32 of"),
    (({'z': torch.ones(2, 3)}, {'z': torch.ones(2, 4)}), r'of shape \[\*, 4\] on cpu in graph 1'),
    (({'z': torch.ones(2)}, {'z': torch.ones(2, 1)}), r'of shape \[\*, 1\] on cpu in graph 1'),
    (({'z': 1}, {'z': 2.5}), "'z' is of type float in graph 1 of the dataset, but of type int in"),
    (({'z': 'a'}, {'z': 2}), 'of type int in graph 1 of the dataset, but no tensor or number in'),
    (({'z': {'a': 1}}, {'z': {'b': 1}}), r"a dictionary of \['b'\] in graph 1"),
    (({'z': [torch.ones(1)]}, {'z': [torch.ones(1)] * 2}), 'a list of 2 tensors in graph 1'),
])  # fmt: skip
def test_graphs_that_differ(values: tuple[dict, dict], message: str) -> None:
    graphs = [graph(**each) for each in values]
    with pytest.raises(ValueError, match=message) as error:
        GraphLoader(graphs)
    assert "exclude_keys=['" in str(error.value)
    batch = GraphLoader(graphs, 2, exclude_keys=['z'])([0, 1])
    assert set(batch.keys()) == {'x', 'batch', 'ptr'}


EDGES = torch.tensor([[0, 1, 1], [1, 0, 1]])


@pytest.mark.parametrize(('edges', 'error', 'text'), [
    (EDGES.float(), TypeError, r"'edge_index' of graph 1 .* must hold integers, got torch.float32"),
    (EDGES > 0, TypeError, r"'edge_index' of graph 1 .* must hold integers, got torch.bool"),
    (EDGES.t(), ValueError, r'must have shape .* got \[3, 2\]: edge_index.t\(\).contiguous\(\)'),
    (EDGES[0], ValueError, r"'edge_index' of graph 1 .* must have shape .* got \[3\]"),
    (EDGES.to('meta'), RuntimeError, "'edge_index' must be on a CPU or a CUDA device"),
    (EDGES[:, 1:], RuntimeError, "'edge_attr' of graph 0 .* row for each of its 3 edges, got 2"),
])  # fmt: skip
def test_edges_that_are_none(edges: Tensor, error: type, text: str) -> None:
    attrs = torch.ones(2, 1), torch.ones(3, 1)
    graphs = [graph(edge_index=e, edge_attr=a) for e, a in zip((EDGES, edges), attrs, strict=True)]
    if edges.shape != (2, 2):
        graphs[0].edge_attr = graphs[1].edge_attr
    for order in ('sorted', 'dataset'):
        with pytest.raises(error, match=text):
            GraphLoader(graphs, edge_order=order)


def test_own_edges() -> None:
    """A class that says how its edges are joined, and attributes of each graph that are named as
    those of edges."""

    class Rows(Data):
        def __cat_dim__(self, key: str, value: Any, *args: Any) -> Any:
            return 0 if key == 'edge_index' else super().__cat_dim__(key, value, *args)

    batch = GraphLoader([Rows(x=torch.ones(2, 3), edge_index=EDGES.t())] * 2, 2)([0, 1])
    assert batch.edge_index.shape == (6, 2)
    graphs = [graph(edge_index=e, edge_weight=torch.ones(1)) for e in (EDGES, EDGES[:, :0])]
    assert GraphLoader(graphs, 2)([0, 1]).edge_weight.shape == (2,)


@pytest.mark.parametrize(
    ('index', 'text'),
    [
        ([0.5], "'index' must hold numbers of graphs: 'float'"), (['a'], "'index' must hold numb"),
        (torch.tensor([0.5]), "'index' must hold"), (5, "'index' must be a list .* got int"),
        ('a', "'index' must be a list .* got str"), (None, "'index' must be a list"),
    ],
)  # fmt: skip
def test_wrong_index(index: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        GraphLoader(molecules(2), 2)(index)


def test_wrong_arguments() -> None:
    graphs = molecules(4)
    for wrong in (['a.pt', 'b.pt'], [None]):
        with pytest.raises(TypeError, match=f'must hold graphs, got {type(wrong[0]).__name__} as'):
            GraphLoader(wrong)
    with pytest.raises(TypeError, match="'dataset' must be a list of Data .* got str"):
        GraphLoader('a.pt')
    with pytest.raises(ValueError, match="'device' must be a device, such as 'cuda' .* got 'gpu'"):
        GraphLoader(graphs, device='gpu')
    with pytest.raises(TypeError, match=r"unexpected arguments \['batchsize'\]"):
        GraphLoader(graphs, batchsize=3)
    with pytest.raises(TypeError, match="'dataset' must be a list of Data"):
        GraphLoader(iter(graphs))
    with pytest.raises(TypeError, match=r"'dataset' .* got one Data: write \[data\]"):
        GraphLoader(graphs[0], 4)
    with pytest.raises(TypeError, match=r"'dataset' .* DataBatch: write data.to_data_list\(\)"):
        GraphLoader(Batch.from_data_list(graphs), 4)
    with pytest.raises(ValueError, match="'dataset' must hold at least one graph"):
        GraphLoader([])
    with pytest.raises(TypeError, match='graphs of one class, got Data as graph 0 and PairData as'):
        GraphLoader([*graphs, PairData(x=torch.ones(1, 1))])
    with pytest.raises(ValueError, match="'edge_order' must be one of"):
        GraphLoader(graphs, edge_order='csr')
    with pytest.raises(ValueError, match="'pad' must be 'buckets' or None"):
        GraphLoader(graphs, pad='yes')
    with pytest.raises(ValueError, match="'rank' and 'num_replicas' must be given together"):
        GraphLoader(graphs, rank=0)
    with pytest.raises(ValueError, match="without 'rank' and 'num_replicas'"):
        GraphLoader(graphs, rank=0, num_replicas=2, sampler=[0])
    with pytest.raises(IndexError, match='the dataset has 4 graphs, got the number 4'):
        list(GraphLoader(graphs, sampler=[0, 4]))
    graphs[2].edge_index = graphs[2].edge_index + graphs[2].num_nodes - 1
    with pytest.raises(IndexError, match=r"'edge_index' of graph 2 of the dataset must hold nodes"):
        GraphLoader(graphs)


def test_bar_of_slow_datasets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr('pyg_fast.loader._read_graphs._SLOW', 0)
    GraphLoader(Stored(molecules(3)))
    err = capsys.readouterr().err
    assert 'reading graphs' in err
    assert 'collating graphs' in err
    GraphLoader(molecules(3))  # a list: nothing is read
    err = capsys.readouterr().err
    assert 'reading graphs' not in err
    assert 'collating graphs' in err
    monkeypatch.undo()
    GraphLoader(Stored(molecules(3)))
    assert capsys.readouterr().err == ''


# The device -------------------------------------------------------------------------------------
@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode('error')
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.mark.parametrize('pad', [None, 'buckets'])
@pytest.mark.parametrize('order', ['sorted', 'dataset'])
def test_no_batch_waits(cuda: torch.device, pad: str | None, order: str) -> None:
    names = [name for name in NAMES if name not in ('edge_names', 'edge_array')]
    graphs = random_graphs(24, names, cls=PairData)
    loader = GraphLoader(graphs, 8, True, ['x'], device=cuda, pad=pad, edge_order=order)
    list(loader)
    with no_waiting():
        batches = list(loader)
    assert len(batches) == 3


def test_batches_on_several_streams(cuda: torch.device) -> None:
    """Each is made on the current stream, also if another one has the numbers of its graphs."""
    graphs = molecules(48)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    batches, loader = [], iter(GraphLoader(graphs, 4, device=cuda))
    with no_waiting():
        for number in range(12):
            with torch.cuda.stream(streams[number % 3]):
                torch.cuda._sleep(10_000_000)
                batches.append(next(loader))
    torch.cuda.synchronize()
    same_batches(batches, DataLoader(graphs, 4))


def test_structure_on_another_stream(cuda: torch.device) -> None:
    """It waits for the stream of the loader, and that alone."""
    loader, side = iter(GraphLoader(molecules(24), 8, device=cuda)), torch.cuda.Stream()
    next(loader)
    with no_waiting(), torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        batch = next(loader)
        size = batch.num_nodes
    with no_waiting():
        found = [t.clone() for t in graph_of(batch.edge_index, size, size)[:6] if t is not None]
    torch.cuda.synchronize()
    wanted = [t for t in graph_of(batch.edge_index, size, size)[:6] if t is not None]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_layers_do_not_wait_for_a_structure(cuda: torch.device) -> None:
    loader = GraphLoader(molecules(24), 8, device=cuda)
    net = pyg_fast.accelerate(GCNConv(4, 8).to(cuda))
    for number, batch in enumerate(loader):
        with no_waiting() if number else nullcontext():
            out = net(batch.x, batch.edge_index)
            global_add_pool(out, batch.batch, batch.num_graphs).sum().backward()


def test_attributes_in_pinned_memory(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in NAMES if name not in OF_PAIRS]
    graphs = random_graphs(9, names)
    wanted = GraphLoader(graphs, device=cuda)([3, 1, 7])
    monkeypatch.setattr('pyg_fast.loader._place.Budget.take', lambda *args: False)
    check_batch(GraphLoader(graphs, device=cuda)([3, 1, 7]), wanted, cuda)


def test_masks_of_the_dataset() -> None:
    """They stay, but for a loader that pads."""
    graphs = molecules(4)
    for data in graphs:
        data.node_mask = torch.arange(data.num_nodes) % 2 == 0
    (batch,) = GraphLoader(graphs, 4)
    assert not batch.node_mask.all()
    with pytest.raises(ValueError, match="no attribute 'node_mask' with pad="):
        GraphLoader(graphs, 4, pad='buckets')
    model = torch.nn.Linear(1, 1)
    step = pyg_fast.capture(
        model,
        GraphLoader(graphs, 2),
        None,
        lambda out, batch: out.sum() * batch.node_mask.all(),
        forward=lambda model, batch: model(torch.ones(1, 1)),
    )
    assert all(loss == 0 for loss in step.epoch())


class Directed(Data):
    """A graph that holds the position of each edge's reverse."""

    def __inc__(self, key: str, value: Any, *args: Any) -> Any:
        return self.num_edges if key in ('rev', 'rev_edge_index') else super().__inc__(key, value)


@pytest.mark.parametrize('key', ['rev', 'rev_edge_index'])
@pytest.mark.parametrize('dtype', [torch.int32, torch.int64])
@pytest.mark.parametrize('alike', [False, True])
def test_positions_of_edges(
    key: str, dtype: torch.dtype, alike: bool, device: torch.device,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """They name the same edges in the order of the loader; a negative one stays."""
    graphs = []
    for n in (9, 5, 7):
        ends = torch.randint(n, (2, n))
        x = torch.randn(2 * n if alike else n, 2)
        graphs.append(Directed(x, torch.cat([ends, ends.flip(0)], 1)))
        graphs[-1][key] = torch.arange(2 * n).roll(n).to(dtype)
    (batch,) = GraphLoader(graphs, 3, device=device)
    ends = list_of(batch.edge_index)
    assert batch[key].dtype == dtype
    assert ends[:, batch[key].long()].equal(ends.flip(0))
    assert ('in the order of the dataset' in caplog.text) == alike
    (alone,) = GraphLoader(graphs[:1], 1, device=device)
    ends = list_of(alone.edge_index)
    assert ends[:, alone[key].long()].equal(ends.flip(0))
    graphs[0][key][0] = -1
    (batch,) = GraphLoader(graphs, 3, device=device)
    assert (batch[key] == -1).sum() == 1
