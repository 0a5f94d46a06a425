"""Files that version 0.2 wrote: its classes had other paths."""

from pathlib import Path

import pytest
import torch

from pyg_fast.graph import ExecutionPath, Graph, PreparedGraph
from pyg_fast.graph.gcn_norm import GCNNorm
from pyg_fast.ops import spmm
from pyg_fast.ops.product import product
from pyg_fast.sparse.groups import Groups
from pyg_fast.sparse.operator import Sampling, SparseOperator

FILES = Path(__file__).parent / 'of_0_2'
EDGES = torch.tensor([[0, 1, 2, 2, 3, 4, 0], [1, 0, 1, 3, 2, 2, 4]])


@pytest.mark.parametrize('weights_only', [False, True])
def test_graphs(weights_only: bool) -> None:
    graph, prepared, paths = torch.load(FILES / 'prepared.pt', weights_only=weights_only).values()
    assert type(graph) is Graph
    assert type(prepared) is PreparedGraph
    assert type(paths[0]) is ExecutionPath
    assert type(graph.groups) is Groups
    assert (graph.groups.size, graph.t_groups.size) == (2, 3)
    paths[0].check_fits(prepared.device, EDGES, 5)
    x = torch.randn(5, 3)
    expected = torch.zeros(5, 3).index_add(0, EDGES[1], x[EDGES[0]])
    for each in (graph, prepared):
        torch.testing.assert_close(spmm(each, x), expected)
    weight = torch.randn(7)
    with pytest.raises(ValueError, match='with_positions'):
        spmm(prepared.graph, x, weight)  # which stores no t_perm
    order = prepared.to_edge_index().as_tensor()
    message = weight.view(-1, 1) * x[order[0]]
    expected = torch.zeros(5, 3).index_add(0, order[1], message)
    torch.testing.assert_close(spmm(prepared, x, weight), expected)


def test_constants_of_a_layer() -> None:
    norm, data = torch.load(FILES / 'constants.pt', weights_only=False).values()
    assert type(norm) is GCNNorm
    assert type(norm.operator) is SparseOperator
    assert type(norm.operator.sampling) is Sampling
    assert type(data.edge_index) is PreparedGraph
    assert data.execution_paths[0].num_nodes == 5
    x, whole = torch.randn(5, 3), norm.operator._replace(sampling=None)
    message = torch.arange(7.0).view(-1, 1) * x[EDGES[0]]
    expected = torch.zeros(5, 3).index_add(0, EDGES[1], message)
    torch.testing.assert_close(product(whole, x), expected)
