"""Layers on batches: PyG's and ours, trimmed or not, without any sort."""

import pickle
from collections.abc import Callable

import pytest
import torch
import torch_geometric.nn as gnn
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, trim_to_layer

import pyg_fast.nn as fnn
from pyg_fast.datasets import PlantedGraph
from pyg_fast.graph import graph as graphs
from pyg_fast.loader import FastNeighborLoader
from pyg_fast.ops import spmm
from tests.loader._graphs import random_data

PAIRS = [
    (gnn.GCNConv, fnn.PathPreparedGCNConv),
    (gnn.SAGEConv, fnn.PathPreparedSAGEConv),
    (gnn.GATConv, fnn.FusedGATConv),
]


def batch_of(device: torch.device, loops: bool = True, **kwargs: object) -> Data:
    data = random_data(200, 1500)
    if not loops:
        data.edge_index, data.edge_attr = remove_self_loops(data.edge_index, data.edge_attr)
    loader = FastNeighborLoader(data, [4, 3, 2], batch_size=12, seed=1, device=device, **kwargs)
    return next(iter(loader))


@pytest.fixture
def sorts(record_calls: Callable[..., list[str]]) -> list[str]:
    """Records sorts and synchronisations."""
    seen: list[str] = []
    for name in ('_prepare', 'to_csr', 'to_csr_csc', 'has_loops', 'check_edge_index'):
        record_calls(graphs, name, lambda *_, name=name, **__: name, seen)
    return seen


def run(convs: list, batch: Data, trim: bool, edge_index: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = batch.x
    for layer, conv in enumerate(convs):
        if trim:
            x, edge_index, _ = trim_to_layer(
                layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index
            )
        x = conv(x, edge_index)
    out = x[: batch.batch_size]
    params = [p for conv in convs for p in conv.parameters()]
    return out, list(torch.autograd.grad(out.square().sum(), params))


@pytest.mark.parametrize('loops', [False, True])
@pytest.mark.parametrize('trim', [False, True])
@pytest.mark.parametrize(('base', 'own'), PAIRS)
def test_layers(
    device: torch.device, sorts: list[str], base: type, own: type, trim: bool, loops: bool
) -> None:
    batch = batch_of(device, loops)
    theirs = [base(5, 4), base(4, 4), base(4, 3)]
    ours = [own(5, 4), own(4, 4), own(4, 3)]
    for one, two in zip(ours, theirs, strict=True):
        one.load_state_dict(two.state_dict())
    theirs, ours = ([conv.to(device) for conv in convs] for convs in (theirs, ours))
    wanted, wanted_grads = run(theirs, batch, trim, batch.edge_index.as_tensor())
    for _ in range(2):
        out, grads = run(ours, batch, trim, batch.edge_index)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grads, wanted_grads, rtol=1e-3, atol=1e-3)
    assert sorts == []
    out, _ = run(theirs, batch, trim, batch.edge_index)  # PyG's layers take it as well.
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)


def test_trimming_changes_nothing(device: torch.device) -> None:
    batch = batch_of(device)
    convs = [fnn.PathPreparedSAGEConv(5, 5).to(device) for _ in range(3)]
    whole, trimmed = (run(convs, batch, trim, batch.edge_index)[0] for trim in (False, True))
    torch.testing.assert_close(whole, trimmed)


@pytest.mark.parametrize('kind', ['directional', 'induced', 'bidirectional'])
def test_graphs_of_batches(device: torch.device, sorts: list[str], kind: str) -> None:
    batch = batch_of(device, subgraph_type=kind)
    num_nodes, plain = batch.num_nodes, batch.edge_index.as_tensor()
    for drop_loops in (False, True):
        args = (batch.edge_index, num_nodes, num_nodes)
        got = graphs.graph_of(*args, transpose=False, drop_loops=drop_loops)
        assert got.t_rowptr is None
        both = graphs.graph_of(*args, drop_loops=drop_loops)
        assert graphs.graph_of(*args, drop_loops=drop_loops) is both
        assert sorts == []
        wanted = graphs.graph_of(plain, num_nodes, num_nodes, drop_loops=drop_loops)
        sorts.clear()
        for name in ('rowptr', 'col', 't_rowptr', 't_col', 't_perm'):
            assert torch.equal(getattr(both, name), getattr(wanted, name)), name
        if drop_loops:
            assert torch.equal(both.perm, wanted.perm)
        else:
            assert both.perm is None
            assert torch.equal(wanted.perm, torch.arange(plain.size(1), device=device).int())
        assert got.longest_row == both.longest_row == (4 if kind == 'directional' else None)
        assert both.t().longest_row is None


def test_longest_rows(device: torch.device) -> None:
    """Kernels do not look for long rows in a batch, whose rows have at most the fan-out."""
    data = random_data(200, 1500)
    for fanouts, replace, most in (([2, 5], False, 5), ([3, 1], True, 3), ([-1, 2], False, None)):
        loader = FastNeighborLoader(data, fanouts, batch_size=12, replace=replace, device=device)
        batch = next(iter(loader))
        size, count = batch.num_nodes, batch.num_sampled_edges[0]
        graph = graphs.graph_of(batch.edge_index, size, size)
        assert graph.longest_row == most
        assert graph.most_edges == (graph.num_edges if most is None else most)
        longest = int(graph.rowptr.diff().max())
        assert longest <= graph.most_edges
        part = graphs.graph_of(batch.edge_index[:, :count], size, size)
        assert (part.num_edges, part.longest_row) == (count, most)


def test_transposed_once(device: torch.device) -> None:
    batch = batch_of(device, loops=False)
    num_nodes = batch.num_nodes
    first = graphs.graph_of(batch.edge_index, num_nodes, num_nodes)
    assert graphs.graph_of(batch.edge_index, num_nodes, num_nodes, drop_loops=True) is first


def test_spmm(device: torch.device) -> None:
    batch = batch_of(device)
    x = batch.x.clone().requires_grad_()
    out = spmm(batch.edge_index, x)
    adj = torch.zeros(batch.num_nodes, batch.num_nodes, device=device)
    source, target = batch.edge_index.as_tensor()
    adj.index_put_((target, source), torch.ones_like(source).float(), accumulate=True)
    torch.testing.assert_close(out, adj @ batch.x)
    grad = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, grad)[0], adj.t() @ grad)


def test_edits_of_edges_are_noticed(device: torch.device) -> None:
    batch = batch_of(device)
    conv = fnn.PathPreparedSAGEConv(5, 5).to(device)
    conv(batch.x, batch.edge_index)
    batch.edge_index[0, :10] = 0
    plain = batch.edge_index.as_tensor()
    torch.testing.assert_close(conv(batch.x, batch.edge_index), conv(batch.x, plain))

    batch = batch_of(device)
    args = batch.num_sampled_nodes, batch.num_sampled_edges
    x, part, _ = trim_to_layer(1, *args, batch.x, batch.edge_index)
    conv(x, part)
    part[0, :10] = 0
    torch.testing.assert_close(conv(x, part), conv(x, part.as_tensor()))
    x, part, _ = trim_to_layer(1, *args, batch.x, batch.edge_index)
    torch.testing.assert_close(conv(x, part), conv(x, part.as_tensor()))


def test_other_parts_of_a_batch_are_checked(device: torch.device) -> None:
    batch = batch_of(device)
    # The nodes that these edges lead from are not all there.
    part = batch.edge_index.narrow(1, 0, batch.edge_index.size(1))[:, :-1]
    part = part.sparse_resize_(13, 13)
    with pytest.raises((IndexError, ValueError)):
        graphs.graph_of(part, 13, 13)
    # Not the first ones, and every other one.
    num_nodes = batch.num_nodes
    for part in (batch.edge_index[:, 3:], batch.edge_index[:, ::2]):
        got = graphs.graph_of(part, num_nodes, num_nodes)
        wanted = graphs.graph_of(part.as_tensor(), num_nodes, num_nodes)
        assert torch.equal(got.col, wanted.col)
        assert torch.equal(got.rowptr, wanted.rowptr)


def test_in_inference_mode(device: torch.device) -> None:
    conv = fnn.PathPreparedSAGEConv(5, 5).to(device)
    data = random_data()
    with torch.inference_mode():
        for batch in FastNeighborLoader(data, [3, 2], batch_size=9, device=device):
            wanted = conv(batch.x, batch.edge_index.as_tensor())
            torch.testing.assert_close(conv(batch.x, batch.edge_index), wanted)
            assert torch.equal(batch.x.cpu(), data.x[batch.n_id.cpu()])


def test_batches_move_and_copy(device: torch.device, sorts: list[str]) -> None:
    batch = batch_of(device)
    conv = fnn.PathPreparedSAGEConv(5, 5).to(device)
    wanted = conv(batch.x, batch.edge_index)
    assert batch.to(batch.x.device).edge_index is batch.edge_index
    assert sorts == []
    for other in (batch.clone(), batch.cpu().to(device), pickle.loads(pickle.dumps(batch))):
        torch.testing.assert_close(conv(other.x, other.edge_index), wanted)


def test_compiled(device: torch.device) -> None:
    torch._dynamo.reset()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (fnn.PathPreparedSAGEConv(5, 5) for _ in range(2))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index)

    data = random_data(200, 1500)
    net = Net().to(device)
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    batches = list(FastNeighborLoader(data, [4, 3], batch_size=12, device=device))
    for batch in batches:  # The batches have as many sizes; few compiled graphs serve all of them.
        edge_index = batch.edge_index.as_tensor()
        wanted = net(batch.x, batch.edge_index)
        torch.testing.assert_close(compiled(batch.x, edge_index), wanted)
    assert len(batches) > 8
    assert counter.frame_count <= 3

    torch._dynamo.reset()
    compiled = torch.compile(net, backend='eager', fullgraph=True)
    batch = batches[0]
    params = list(net.parameters())
    grads = [
        torch.autograd.grad(model(batch.x, batch.edge_index).sum(), params)
        for model in (compiled, net)
    ]
    torch.testing.assert_close(*grads)


def test_training_learns(device: torch.device) -> None:
    data = PlantedGraph('tiny')[0]
    loader = FastNeighborLoader(
        data, [10, 10], batch_size=50, input_nodes=data.train_mask, shuffle=True, device=device
    )
    num_classes = int(data.y.max()) + 1
    convs = torch.nn.ModuleList(
        [fnn.PathPreparedSAGEConv(64, 32), fnn.PathPreparedSAGEConv(32, num_classes)]
    ).to(device)

    def forward(batch: Data) -> Tensor:
        x, edge_index = batch.x, batch.edge_index
        for layer, conv in enumerate(convs):
            x, edge_index, _ = trim_to_layer(
                layer, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index
            )
            x = conv(x, edge_index)
            x = x.relu() if layer == 0 else x
        return x[: batch.batch_size]

    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01)
    for _ in range(10):
        for batch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(forward(batch), batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
    test = FastNeighborLoader(
        data, [-1, -1], batch_size=256, input_nodes=data.test_mask, device=device
    )
    right = total = 0
    with torch.no_grad():
        for batch in test:
            right += int((forward(batch).argmax(1) == batch.y[: batch.batch_size]).sum())
            total += batch.batch_size
    assert total == int(data.test_mask.sum())
    assert right / total > 0.6
