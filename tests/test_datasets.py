"""The planted graph: structure, features, labels, masks, and what it is for."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCN, MLP, GraphSAGE
from torch_geometric.transforms import NormalizeFeatures

import pyg_fast
from pyg_fast import datasets
from pyg_fast.datasets import (
    DIRECTED_SIZES,
    SIZES,
    DirectedSize,
    MultiLabelPlantedGraph,
    PlantedGraph,
    PlantedSize,
    planted_structure,
)


def assert_sound(rowptr: Tensor, col: Tensor, size: PlantedSize) -> None:
    """Symmetric, columns strictly ascending within a row, int32, within bounds."""
    assert rowptr.dtype == col.dtype == torch.int32
    assert rowptr.shape == (size.num_nodes + 1,)
    assert rowptr[0] == 0
    assert rowptr[-1] == col.numel() <= 2 * size.num_pairs
    row = torch.arange(size.num_nodes).repeat_interleave(rowptr.diff().long())
    edge = row * size.num_nodes + col
    assert (edge.diff() > 0).all()
    if col.numel() > 0:
        assert 0 <= col.min() <= col.max() < size.num_nodes
    assert torch.equal(edge, (col.long() * size.num_nodes + row).sort()[0])


@pytest.mark.parametrize('name', ['tiny', 'small', 'medium', 'dense-small'])
def test_structure_of_named_sizes(name: str) -> None:
    assert_sound(*planted_structure(name), SIZES[name])


@given(st.data())
def test_structure_of_any_size(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(1, 40))
    size = PlantedSize(
        num_nodes,
        data.draw(st.integers(0, 100)),
        data.draw(st.integers(1, num_nodes)),  # many of the communities are empty
        data.draw(st.sampled_from([0.0, 0.5, 1.0])),
    )
    assert_sound(*planted_structure(size, seed=data.draw(st.integers(0, 2**32))), size)


def test_structure_is_that_of_published_figures_on_cpu() -> None:
    rowptr, col = planted_structure('small')
    assert col.numel() == 25_174
    assert (col.long() * torch.arange(col.numel())).sum() == 465_587_700_508
    assert rowptr.diff().max() == 341


def test_data_are_those_of_published_figures_on_cpu() -> None:
    data = PlantedGraph('small')[0]
    place = torch.arange(3_000)
    assert (data.y * place).sum() == 13_566_880
    assert ((data.val_mask + 2 * data.test_mask.long()) * place).sum() == 3_375_193
    assert data.x.double().sum() == pytest.approx(-1828.71595, abs=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason='no CUDA device')
@pytest.mark.parametrize(
    ('name', 'num_edges'),
    [('arxiv-like', 2_287_963), ('reddit-like', 88_889_437), ('products-like', 105_462_338)],
)
def test_structure_is_that_of_published_figures_on_cuda(name: str, num_edges: int) -> None:
    rowptr, col = planted_structure(name, device='cuda')
    assert rowptr.is_cuda
    assert rowptr.shape == (SIZES[name].num_nodes + 1,)
    assert col.shape == (num_edges,)


def test_degrees_are_skewed() -> None:
    degree = planted_structure('medium')[0].diff().double()
    assert degree.max() > 50 * degree.mean()
    assert degree.median() < 0.6 * degree.mean()


def test_hubs_are_in_the_regime_of_proteins() -> None:
    degree = planted_structure('dense-hubs')[0].diff().double()
    assert degree.mean() == pytest.approx(597, rel=0.01)  # that of ogbn-proteins
    assert degree.max() > 10 * degree.mean()


def test_edges_stay_inside_communities() -> None:
    size = PlantedSize(4_000, 20_000, 8, inside=1.0)
    data = PlantedGraph(size, astray=0.0)[0]
    src, dst = data.y[data.edge_index]
    assert torch.equal(src, dst)
    data = PlantedGraph(size._replace(inside=0.5), astray=0.0)[0]
    src, dst = data.y[data.edge_index]
    assert (src == dst).double().mean() == pytest.approx(0.5 + 0.5 / 8, abs=0.04)


def test_graph_has_the_structure(device: torch.device) -> None:
    rowptr, col = planted_structure('tiny', seed=3, device=device)
    data = PlantedGraph('tiny', seed=3, num_channels=5, signal=0.1, device=device)[0]
    assert all(value.device.type == device.type for _, value in data)
    assert torch.equal(data.edge_index[1], col.long())
    assert torch.equal(data.edge_index[0].bincount(minlength=300), rowptr.diff().long())
    assert data.is_coalesced()
    assert data.is_undirected()


def test_same_seed_same_graph(device: torch.device) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = PlantedGraph('tiny', seed=7, device=device)[0]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = PlantedGraph('tiny', seed=7, device=device)[0]
    other = PlantedGraph('tiny', seed=8, device=device)[0]
    for key, value in first:
        assert torch.equal(value, second[key])
        assert not torch.equal(value, other[key])


def test_labels() -> None:
    size = PlantedSize(20_000, 1_000, 12)
    communities = PlantedGraph(size, astray=0.0)[0].y
    assert communities.unique().tolist() == list(range(12))
    folded = PlantedGraph(size, astray=0.0, num_classes=5)
    assert torch.equal(folded[0].y, communities % 5)
    assert folded.num_classes == 5
    strays = PlantedGraph(size, astray=0.3)[0].y != communities
    assert strays.double().mean() == pytest.approx(0.3 * 11 / 12, abs=0.02)
    assert PlantedGraph(PlantedSize(1_000, 0, 100)).num_classes == 47


def test_features_are_noisy_centroids() -> None:
    data = PlantedGraph(PlantedSize(40_000, 0, 3), num_channels=16, signal=5.0)[0]
    assert data.x.dtype == torch.float32
    for label in range(3):
        x = data.x[data.y == label]
        assert x.mean(dim=0).norm() == pytest.approx(5.0, abs=0.1)
        assert x.std(dim=0) == pytest.approx(torch.ones(16), abs=0.05)


def test_masks_part_the_nodes() -> None:
    data = PlantedGraph('small')[0]
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool
    assert masks.sum(dim=0).eq(1).all()
    assert masks.sum(dim=1).tolist() == [1500, 750, 750]


def test_is_a_dataset() -> None:
    dataset = PlantedGraph('tiny', transform=NormalizeFeatures(), num_channels=9)
    assert len(dataset) == 1
    assert repr(dataset).startswith('PlantedGraph(')
    assert (dataset.num_classes, dataset.num_features) == (4, 9)
    data = dataset[0]
    assert isinstance(data, Data)
    assert data.validate()
    assert data.num_nodes == 300
    assert data.x.min() >= 0
    assert PlantedGraph('tiny', num_channels=9)[0].x.min() < 0
    for twin in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert torch.equal(twin[0].x, data.x)
    assert next(iter(DataLoader(dataset))).num_nodes == 300


def test_one_node_without_edges() -> None:
    data = PlantedGraph(PlantedSize(1, 0, 1))[0]
    assert data.x.shape == (1, 64)
    assert data.edge_index.shape == (2, 0)
    assert data.validate()


def accuracy(model: torch.nn.Module, data: Data) -> float:
    """Trains a model for a moment and tests it."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for _ in range(25):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
    correct = model(data.x, data.edge_index).argmax(dim=1) == data.y
    return correct[data.test_mask].double().mean().item()


class FeaturesOnly(MLP):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x)


def test_convolution_beats_features_alone() -> None:
    dataset = PlantedGraph('small')
    gcn = GCN(64, 64, 2, dataset.num_classes, cached=True)
    mlp = FeaturesOnly([64, 64, dataset.num_classes], dropout=0.5)
    assert 0.85 < accuracy(gcn, dataset[0]) < 0.95
    assert accuracy(mlp, dataset[0]) < 0.72


def test_types(device: torch.device) -> None:
    exact = PlantedGraph('tiny', device=device)[0]
    data = PlantedGraph('tiny', dtype=torch.bfloat16, index_dtype=torch.int32, device=device)[0]
    assert (data.x.dtype, data.edge_index.dtype) == (torch.bfloat16, torch.int32)
    assert torch.equal(data.x, exact.x.bfloat16())
    assert torch.equal(data.edge_index, exact.edge_index.int())


# Directed sizes ---------------------------------------------------------------------------------
def test_directed_sizes_are_those_of_papers100m() -> None:
    whole = DIRECTED_SIZES['papers-like']
    assert whole[:3] == (111_059_956, 1_615_685_872, 172)
    for name, share in (('eighth', 8), ('half', 2)):
        part = DIRECTED_SIZES[f'papers-like-{name}']
        assert part == whole._replace(
            num_nodes=whole.num_nodes // share, num_edges=whole.num_edges // share
        )
    # The numbers of training, validation and test nodes.
    for share, count in zip(whole[4:], (1_207_179, 125_265, 214_338), strict=True):
        assert share * whole.num_nodes == pytest.approx(count, rel=1e-3)


def test_directed_graph(device: torch.device) -> None:
    size = DirectedSize(30_003, 435_000, 20)  # some communities have a member more
    data = PlantedGraph(size, 3, astray=0.0, num_classes=20, device=device)[0]
    assert all(value.device.type == device.type for _, value in data)
    assert data.validate()
    assert data.x.shape == (30_003, 128)
    assert (data.x.dtype, data.edge_index.dtype) == (torch.float32, torch.int64)
    assert data.num_edges == 435_000
    assert not data.has_self_loops()
    assert torch.equal(data.y.cpu(), torch.arange(30_003) % 20)
    src, dst = data.y[data.edge_index]
    assert (src == dst).double().mean().item() == pytest.approx(0.8 + 0.2 / 20, abs=0.005)
    degrees = [end.bincount(minlength=30_003).double() for end in data.edge_index]
    for degree in degrees:
        # Of log-normal propensities the first hundredth holds 15 % of the sum.
        top = degree.sort(descending=True)[0][:300].sum() / degree.sum()
        assert top.item() == pytest.approx(0.155, abs=0.015)
        assert degree.max() > 30 * degree.mean()
        assert degree.median() < 0.5 * degree.mean()
    assert abs(torch.corrcoef(torch.stack(degrees))[0, 1].item()) < 0.05
    for degree in degrees:  # nowhere are there many hubs or few
        hubs = degree.argsort(descending=True)[:1000]
        assert (hubs * 10 // 30_003).bincount(minlength=10).min() > 70

    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dtype == torch.bool
    assert masks.sum(dim=0).max() == 1
    assert masks.sum(dim=1).tolist() == [round(30_003 * share) for share in size[4:]]


@given(st.data())
def test_directed_structure_of_any_size(data: st.DataObject) -> None:
    num_nodes = data.draw(st.integers(2, 40))
    size = DirectedSize(
        num_nodes,
        data.draw(st.integers(0, 100)),
        data.draw(st.integers(1, num_nodes)),
        data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        *data.draw(st.sampled_from([(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.25, 0.25, 0.5)])),
    )
    graph = PlantedGraph(size, num_channels=1)[0]
    assert graph.edge_index.shape == (2, size.num_edges)
    assert graph.validate()
    assert not graph.has_self_loops()
    assert graph.train_mask.sum() == round(size.train * num_nodes)


def test_all_members_of_a_community_are_drawn() -> None:
    edge_index = PlantedGraph(DirectedSize(100, 100_000, 7, inside=1.0))[0].edge_index
    assert all(end.unique().numel() == 100 for end in edge_index)


def test_same_seed_same_directed_graph(device: torch.device) -> None:
    first, second, other = (
        PlantedGraph('papers-like-tiny', seed=seed, device=device)[0] for seed in (7, 7, 8)
    )
    for key, value in first:
        assert torch.equal(value, second[key])
        assert not torch.equal(value, other[key])
    lean = PlantedGraph(
        'papers-like-tiny', 7, dtype=torch.bfloat16, index_dtype=torch.int32, device=device
    )[0]
    assert (lean.x.dtype, lean.edge_index.dtype) == (torch.bfloat16, torch.int32)
    assert torch.equal(lean.edge_index, first.edge_index.int())
    assert torch.equal(lean.train_mask, first.train_mask)


def test_directed_graph_is_that_of_published_figures_on_cpu() -> None:
    data = PlantedGraph('papers-like-tiny')[0]
    place = torch.arange(290_000)
    assert (data.edge_index * place).sum() == 838_141_883_083_765
    assert (data.y * place[:20_000]).sum() == 901_410_152
    assert (data.train_mask * place[:20_000]).sum() == 2_107_208
    assert data.x.double().sum() == pytest.approx(-2888.7379, abs=1e-3)


class Largest(TorchDispatchMode):
    """The bytes of new tensors by their size, largest first."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage.data_ptr()] = max(
                    self.seen.get(storage.data_ptr(), 0), storage.nbytes()
                )
        return out


def test_directed_graph_is_written_in_blocks(limits: Callable[..., None]) -> None:
    """Only the tensors of the graph, and a permutation of its nodes, are larger than a block."""
    limits(block_of_planted_edges=1000, block_of_planted_nodes=100)
    size = DirectedSize(10_000, 100_000, 10)
    with Largest() as largest:
        data = PlantedGraph(size, dtype=torch.bfloat16)[0]
    block = max(2 * 8 * 1000, 4 * 128 * 100)
    large = {at: count for at, count in largest.seen.items() if count > block}
    own = {value.untyped_storage().data_ptr() for _, value in data}
    assert {data.x.data_ptr(), data.edge_index.data_ptr()} <= set(large)
    assert sorted(count for at, count in large.items() if at not in own) in ([], [8 * 10_000])


def test_dataset_holds_no_copy() -> None:
    dataset = PlantedGraph('papers-like-tiny')
    data = dataset[0]
    for key, value in dataset._data:
        assert data[key].data_ptr() == value.data_ptr()


def test_convolution_learns_a_directed_graph() -> None:
    dataset = PlantedGraph('papers-like-tiny')
    gcn = pyg_fast.accelerate(GCN(128, 64, 2, dataset.num_classes))
    mlp = FeaturesOnly([128, 64, dataset.num_classes])
    test = dataset[0]
    test.test_mask = ~test.train_mask  # more than the few of the test
    assert 0.75 < accuracy(gcn, test) < 0.95
    assert accuracy(mlp, test) < 0.6


@pytest.mark.parametrize(('name', 'mean_degree'), [('dense-small', 65.2), ('dense-medium', 92.6)])
def test_dense_sizes(name: str, mean_degree: float) -> None:
    degree = planted_structure(name)[0].diff().double()
    assert degree.mean() == pytest.approx(mean_degree, abs=0.1)
    assert degree.max() > 20 * degree.mean()


@pytest.mark.parametrize('noise', [0.0, 0.3])
def test_labels_are_the_highest_scores(noise: float) -> None:
    size = PlantedSize(400, 20_000, 5, 0.5)
    data = MultiLabelPlantedGraph(size, seed=3, num_labels=6, noise=noise)[0]
    generator = torch.Generator().manual_seed(3)
    _, _, community = datasets._plant(size, generator)
    favours = torch.randn(5, 6, generator=generator).double()
    adjacency = torch.zeros(400, 400, dtype=torch.double)
    adjacency[data.edge_index[1], data.edge_index[0]] = 1
    share = adjacency / adjacency.sum(dim=1, keepdim=True).clamp(min=1)
    score = share @ favours[community] + noise * torch.randn(400, 6, generator=generator)

    assert data.y.dtype == torch.float32
    for label in range(6):
        having = data.y[:, label] == 1
        assert (data.y[~having, label] == 0).all()
        assert having.sum() == round(400 * 0.4 * 20 ** (-label / 5))
        assert score[having, label].min() > score[~having, label].max() - 1e-9


def test_features_are_noisy_centroids_of_communities() -> None:
    size = PlantedSize(40_000, 1_000, 3)
    data = MultiLabelPlantedGraph(size, num_channels=16, signal=5.0, num_labels=2)[0]
    community = PlantedGraph(size, astray=0.0)[0].y
    assert data.x.dtype == torch.float32
    for c in range(3):
        x = data.x[community == c]
        assert x.mean(dim=0).norm() == pytest.approx(5.0, abs=0.1)
        assert x.std(dim=0) == pytest.approx(torch.ones(16), abs=0.05)


def test_multi_label_graph_has_the_structure(device: torch.device) -> None:
    rowptr, col = planted_structure('tiny', seed=3, device=device)
    dataset = MultiLabelPlantedGraph('tiny', 3, NormalizeFeatures(), num_labels=7, device=device)
    data = dataset[0]
    assert all(value.device.type == device.type for _, value in data)
    assert torch.equal(data.edge_index[1], col.long())
    assert torch.equal(data.edge_index[0].bincount(minlength=300), rowptr.diff().long())
    assert data.validate()
    assert data.x.min() >= 0
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.sum(dim=0).eq(1).all()
    assert masks.sum(dim=1).tolist() == [150, 75, 75]
    assert repr(dataset).startswith('MultiLabelPlantedGraph(')
    assert (dataset.num_classes, dataset.num_features) == (7, 64)
    again, other = (
        MultiLabelPlantedGraph('tiny', seed, NormalizeFeatures(), num_labels=7, device=device)[0]
        for seed in (3, 4)
    )
    for key, value in data:
        assert torch.equal(value, again[key])
        assert not torch.equal(value, other[key])


def test_one_label_of_one_node_without_edges() -> None:
    data = MultiLabelPlantedGraph(PlantedSize(1, 0, 1), num_labels=1)[0]
    assert data.y.tolist() == [[0.0]]
    assert data.edge_index.shape == (2, 0)


def pairs_in_order(model: torch.nn.Module, data: Data) -> float:
    """Trains a model for a moment; the share of test nodes with and without a label it ranks."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)[data.train_mask]
        F.binary_cross_entropy_with_logits(out, data.y[data.train_mask]).backward()
        optimizer.step()
    model.eval()
    out = model(data.x, data.edge_index)[data.test_mask]
    return (
        torch.stack(
            [
                (score[label == 1].view(-1, 1) > score[label == 0]).double().mean()
                for score, label in zip(out.t(), data.y[data.test_mask].t(), strict=True)
            ]
        )
        .mean()
        .item()
    )


def test_neighbourhood_tells_labels_that_features_do_not() -> None:
    size = PlantedSize(3_000, 100_000, 12, 0.5)
    dataset = MultiLabelPlantedGraph(size, num_labels=8)
    sage = pyg_fast.accelerate(GraphSAGE(64, 64, 3, dataset.num_classes, norm='batch_norm'))
    mlp = FeaturesOnly([64, 64, dataset.num_classes], dropout=0.5)
    assert 0.85 < pairs_in_order(sage, dataset[0]) < 0.97
    assert pairs_in_order(mlp, dataset[0]) < 0.75


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'size': 'huge'}, ValueError, r"'size' must be one of tiny, small"),
        ({'size': 300}, TypeError, r"'size' must be a name, a PlantedSize or a Direc.*, got int"),
        ({'size': PlantedSize(0, 1, 1)}, ValueError, r"'num_nodes' must be 1 to .*got 0"),
        ({'size': PlantedSize(2**31, 1, 1)}, ValueError, r"'num_nodes' must be .*got 2147483648"),
        ({'size': PlantedSize(9, -1, 1)}, ValueError, r"'num_pairs' must be 0 to .*got -1"),
        ({'size': PlantedSize(9, 2**30, 1)}, ValueError, r"'num_pairs' must be .*got 1073741824"),
        ({'size': PlantedSize(9, 9, 0)}, ValueError, r"'num_communities' must be 1 to 9, got 0"),
        ({'size': PlantedSize(9, 9, 10)}, ValueError, r"'num_communities' must be .*got 10"),
        ({'size': PlantedSize(9, 9, 2, 1.1)}, ValueError, r"'inside' must be 0 to 1, got 1.1"),
        ({'size': PlantedSize(9, 9, 2, float('nan'))}, ValueError, r"'inside' must be .*got nan"),
        ({'size': DirectedSize(1, 9, 1)}, ValueError, r"'num_nodes' must be 2 to .*got 1"),
        ({'size': DirectedSize(9, -1, 1)}, ValueError, r"'num_edges' must be at least 0, got -1"),
        ({'size': DirectedSize(9, 9, 10)}, ValueError, r"'num_communities' must be .*got 10"),
        ({'size': DirectedSize(9, 9, 2, -1)}, ValueError, r"'inside' must be 0 to 1, got -1"),
        ({'size': DirectedSize(9, 9, 2, train=2)}, ValueError, r"'train' must be 0 to 1, got 2"),
        (
            {'size': DirectedSize(9, 9, 2, 0.5, 0.5, 0.5, 0.5)},
            ValueError,
            r"'train' \+ 'val' \+ 'test' must be 0 to 1, got 1.5",
        ),
        ({'dtype': torch.int32}, TypeError, r"'dtype' must be a floating-point type, got torch.i"),
        ({'index_dtype': torch.int16}, TypeError, r"'index_dtype' must be torch.int32 or torch.in"),
        ({'num_channels': 0}, ValueError, r"'num_channels' must be at least 1, got 0"),
        ({'num_classes': 5}, ValueError, r"'num_classes' must be 1 to 4, got 5"),
        ({'astray': -0.1}, ValueError, r"'astray' must be 0 to 1, got -0.1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PlantedGraph(**{'size': 'tiny', **arguments})


@pytest.mark.parametrize(
    ('arguments', 'error', 'message'),
    [
        ({'size': 'huge'}, ValueError, r"'size' must be one of tiny, small"),
        ({'num_channels': 0}, ValueError, r"'num_channels' must be at least 1, got 0"),
        ({'num_labels': 0}, ValueError, r"'num_labels' must be at least 1, got 0"),
        ({'noise': -0.1}, ValueError, r"'noise' must be at least 0, got -0.1"),
        ({'noise': float('nan')}, ValueError, r"'noise' must be .*got nan"),
    ],
)
def test_bad_arguments_of_a_multi_label_graph(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MultiLabelPlantedGraph(**{'size': 'tiny', **arguments})


def test_repr_shows_the_size() -> None:
    assert repr(PlantedGraph('tiny')) == "PlantedGraph('tiny')"
    size = SIZES['tiny']
    assert repr(PlantedGraph(size)) == f'PlantedGraph({size!r})'
    assert repr(copy.copy(PlantedGraph('tiny'))) == "PlantedGraph('tiny')"
    assert repr(MultiLabelPlantedGraph('tiny')) == "MultiLabelPlantedGraph('tiny')"
