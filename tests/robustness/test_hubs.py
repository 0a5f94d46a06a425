"""Every op on a row and a column of a tenth to all of the edges, beside its reference."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyg_fast import ops
from pyg_fast.ops.attention_scores import attention_scores
from pyg_fast.ops.head_map import head_map_weight
from tests.ops._graphs import hubs

from . import _entries
from ._entries import ENTRIES, on
from .test_hostile_input import check, check_gradients

NUM_NODES = 40
WITH_EDGES = [
    name for name, entry in ENTRIES.items()
    if {'graph', 'edge_index', 'rowptr'} & entry.make().keys()
]  # fmt: skip


def test_most_ops_have_edges() -> None:
    assert {ENTRIES[name].op for name in WITH_EDGES} == {
        'to_csr', 'spmm', 'aggregate', 'gcn_norm', 'cbsr_spmm', 'gat', 'gatv2', 'sampled_spmm',
        'neighbor_sample', 'random_walk', 'pinsage_neighbors',
    }  # fmt: skip


@pytest.mark.parametrize('name', WITH_EDGES)
@pytest.mark.parametrize('row', [0.1, 0.5, 1.0])
def test_op(
    device: torch.device, name: str, row: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []
    for column, aligned in ((0.1, True), (0.5, False), (1.0, True)):
        edges = hubs(NUM_NODES - 1, NUM_NODES - 1, 1900, row, column, aligned).edge_index
        monkeypatch.setattr(_entries, 'NUM_NODES', NUM_NODES)
        monkeypatch.setattr(_entries, 'NUM_EDGES', edges.size(1))
        monkeypatch.setattr(_entries, 'edges', lambda edges=edges: drawn.append(edges) or edges)
        args = {key: on(device, value) for key, value in ENTRIES[name].make().items()}
        assert check(name, args, set())
        check_gradients(name, args)
    assert len(drawn) == 3


SUMS = ('sum, weights', 'mean', 'own sum', 'own softmax', 'GAT', 'GATv2')
LIMIT = 2e-6  # of errors, over the sum of absolute terms


@pytest.mark.parametrize('place', ['one row', 'one column', '1,000 nodes'])
@pytest.mark.parametrize('name', SUMS)
def test_long_sums(
    device: torch.device, name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients are as exact as pairwise sums."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks import hubs as bench

    assert set(SUMS) == bench.SUMS.keys()
    terms = bench.Terms(bench.SUMS[name], place, 200_000, device)
    assert terms.error(bench.PREPARED) <= LIMIT


NUM_TERMS, FEW = 200_000, 100


def hub(end: int, num_nodes: int = FEW) -> Tensor:
    """Edges of which all are of node 0."""
    edges = torch.randint(num_nodes, (2, NUM_TERMS))
    edges[end] = 0
    return edges


def cbsr_spmm(edges: Tensor, x: Tensor, w: Tensor) -> Tensor:
    columns = (torch.arange(FEW).view(-1, 1) + torch.tensor([0, 3, 4])) % 7
    cbsr = ops.CBSR(x[:, :3], columns.sort(1).values.to(torch.uint8), 7)
    return ops.cbsr_spmm(edges, cbsr, w)


# Functions of positive numbers, of which the gradients are sums of positive numbers too.
LONG: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    **{f'aggregate, end {end}': (
        lambda x, w, end=end: ops.aggregate(hub(end), x, w), ((FEW, 5), (NUM_TERMS,)))
        for end in (0, 1)},
    **{f'cbsr_spmm, end {end}': (
        lambda x, w, end=end: cbsr_spmm(hub(end), x, w), ((FEW, 5), (NUM_TERMS,)))
        for end in (0, 1)},
    'gcn_norm': (lambda w: ops.gcn_norm(hub(1), w, FEW)[1], ((NUM_TERMS,),)),
    'maximum': (
        lambda x: ops.spmm(torch.stack([torch.zeros(NUM_TERMS).long(), torch.arange(NUM_TERMS)]),
                           x, reduce='max'), ((NUM_TERMS, 2),)),
    'attention_scores': (
        lambda x, a: attention_scores(x, a)[0], ((NUM_TERMS, 2, 3), (2, 3))),
    'head_map_weight': (
        lambda x, grad: head_map_weight(x, grad, 2), ((NUM_TERMS, 6), (NUM_TERMS, 4))),
}


@pytest.mark.parametrize('name', LONG)
def test_long_sums_of_op(name: str) -> None:
    """Also where there is no softmax, and a sum of absolute terms is the sum."""
    run, shapes = LONG[name]
    found = []
    given = [torch.rand(shape) for shape in shapes]
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        leaves = [value.to(dtype).requires_grad_() for value in given]
        out = run(*leaves)
        grad = torch.full(out.shape, torch.tensor(0.3).item(), dtype=dtype)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for actual, exact in zip(*found, strict=True):
        assert (actual - exact).abs().max() <= LIMIT * exact.abs().max()
