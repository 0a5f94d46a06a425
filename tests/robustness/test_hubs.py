"""Every op on a row and a column of a tenth to all of the edges, beside its reference."""

import pytest
import torch
from torch import Tensor

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
