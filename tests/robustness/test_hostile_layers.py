"""Layers, transforms and the loader: NaN stays in its neighbourhood, and wrong input is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_fast import transforms
from pyg_fast.loader import FastNeighborLoader

from ._layers import IN, LAYERS, graph, run

# MaxK takes no graph.
ON_GRAPHS = [name for name in LAYERS if name != 'MaxK']
TWO_LAYERS = {'MaxKGNN', 'PathPreparedGNN'}
NODES = 80


def with_end(end: int, node: int) -> Callable[[Tensor], Tensor]:
    def change(edge_index: Tensor) -> Tensor:
        edge_index = edge_index.clone()
        edge_index[end, 3] = node
        return edge_index

    return change


# An error, and how to get it.
BAD_EDGES: dict[str, tuple[type, Callable[[Tensor], Any]]] = {
    'a negative source': (IndexError, with_end(0, -1)),
    'a negative destination': (IndexError, with_end(1, -1)),
    'a source too large': (IndexError, with_end(0, NODES)),
    'a destination too large': (IndexError, with_end(1, NODES)),
    '2^32': (IndexError, with_end(0, 2**32)),  # an index that is 0 in its low 32 bits
    'the largest': (IndexError, with_end(1, 2**63 - 1)),
    'floating point': (TypeError, Tensor.float),
    'bool': (TypeError, Tensor.bool),
    'three rows': (ValueError, lambda edges: torch.cat([edges, edges[:1]])),
    'one dimension': (ValueError, lambda edges: edges[0]),
}
# Where PyG's own check comes first.
PYGS_ERRORS = {
    (layer, kind): ValueError
    for layer in ('FusedMessagePassing', 'FusedTransformerConv')
    for kind in ('floating point', 'bool')
}  # fmt: skip


def small_graph(device: torch.device) -> Data:
    return graph(device, NODES, 120)  # Few edges: not every node reaches every other.


def reached(edge_index: Tensor, node: int, hops: int) -> Tensor:
    mask = torch.zeros(NODES, dtype=torch.bool, device=edge_index.device)
    mask[node] = True
    for _ in range(hops):
        mask[edge_index[1, mask[edge_index[0]]]] = True
    return mask


@pytest.mark.parametrize('name', LAYERS)
@pytest.mark.parametrize('number', [float('nan'), float('inf'), -float('inf')])
def test_what_is_not_finite_stays_within_reach(
    device: torch.device, name: str, number: float
) -> None:
    data = small_graph(device)
    layer = LAYERS[name]().to(device).eval()
    node = int(data.edge_index[0, 0])
    x = data.x.clone()
    x[node, 1] = number
    given = x.clone()
    clean, out = (run_again(layer, features, data) for features in (data.x, x))
    mask = reached(data.edge_index, node, 2 if name in TWO_LAYERS else 0 if name == 'MaxK' else 1)
    assert 0 < int(mask.sum()) < NODES
    assert out[~mask].isfinite().all()
    torch.testing.assert_close(out[~mask], clean[~mask])
    assert torch.equal(x.nan_to_num(7.0), given.nan_to_num(7.0))
    if number != number and not name.startswith('Sampled'):
        assert out[mask].isnan().any(1).all()


def run_again(layer: torch.nn.Module, x: Tensor, data: Data) -> Tensor:
    torch.manual_seed(0)  # The same sample, the same dropout.
    with torch.no_grad():
        return run(layer, x, data)


@pytest.mark.parametrize('name', ON_GRAPHS)
@pytest.mark.parametrize('kind', BAD_EDGES)
def test_layer_refuses_edges(device: torch.device, name: str, kind: str, raises: Any) -> None:
    layer, data = LAYERS[name]().to(device), small_graph(device)
    error, change = BAD_EDGES[kind]
    with raises(PYGS_ERRORS.get((name, kind), error), match="'edge_index"):
        run(layer, data.x, Data(edge_index=change(data.edge_index)))
    assert run(layer, data.x, data).isfinite().all()  # The error is not reported again.


@pytest.mark.parametrize('name', ON_GRAPHS)
def test_layer_refuses_features(device: torch.device, name: str, raises: Any) -> None:
    layer, data = LAYERS[name]().to(device), small_graph(device)
    with raises(IndexError, match="'edge_index"):
        run(layer, data.x[: NODES // 2], data)
    # Shapes that no linear map takes: torch raises the error.
    with raises(RuntimeError, match='shapes cannot be multiplied'):
        run(layer, torch.randn(NODES, IN + 1, device=device), data)


TRANSFORMS: dict[str, Callable[[], Callable[[Data], Any]]] = {
    'ExecutionPaths': lambda: transforms.ExecutionPaths(2, mask='train_mask'),
    'GroupSizes': transforms.GroupSizes,
    'Prepare': lambda: transforms.Prepare(2, mask='train_mask'),
    'Reorder': transforms.Reorder,
    'ToCSR': transforms.ToCSR,
    'the loader': lambda: lambda data: FastNeighborLoader(data, [3, 2], batch_size=9),
}


def test_every_transform_is_here() -> None:
    assert set(TRANSFORMS) == set(transforms.__all__) - {'choose_group_size'} | {'the loader'}


@pytest.mark.parametrize('name', TRANSFORMS)
@pytest.mark.parametrize('kind', [*BAD_EDGES, 'text'])
def test_transform_refuses_edges(name: str, kind: str) -> None:
    data = small_graph(torch.device('cpu'))
    error, change = BAD_EDGES.get(kind, (TypeError, lambda _: 'text'))
    good, data.edge_index = data.edge_index, change(data.edge_index)
    data.num_nodes = NODES
    with pytest.raises(error, match='edge_index'):
        TRANSFORMS[name]()(data)
    data.edge_index = good
    TRANSFORMS[name]()(data)


@pytest.mark.parametrize('name', ['ExecutionPaths', 'Prepare'])
@pytest.mark.parametrize(
    ('error', 'mask'),
    [
        (ValueError, torch.ones(NODES - 1, dtype=torch.bool)),
        (ValueError, torch.ones(NODES, 2, dtype=torch.bool)),
        (TypeError, torch.ones(NODES)),
        (TypeError, torch.arange(3)),
    ],
)
def test_transform_refuses_masks(name: str, error: type, mask: Tensor) -> None:
    data = small_graph(torch.device('cpu'))
    data.train_mask = mask
    with pytest.raises(error, match="'data.train_mask'"):
        TRANSFORMS[name]()(data)


def test_loader_hands_out_what_is_not_finite(device: torch.device) -> None:
    data = small_graph(torch.device('cpu'))
    data.x[::3] = float('nan')
    data.x[1::3] = -float('inf')
    seen = 0
    for batch in FastNeighborLoader(data, [3, 2], batch_size=9, device=device):
        expected = data.x[batch.n_id.cpu()]
        assert torch.equal(batch.x.cpu().view(torch.int32), expected.view(torch.int32))
        seen += batch.batch_size
    assert seen == NODES


@pytest.mark.parametrize(
    ('error', 'name', 'value'),
    [
        (error, name, value)
        for error, name, values in (
            (TypeError, 'num_neighbors', [None, 'a', 3, [2.0], [True], [None]]),
            (ValueError, 'num_neighbors', [[], [0], [-2], [2**31], [3, 0]]),
            (TypeError, 'batch_size', [None, '9', 2.5, True]),
            (ValueError, 'batch_size', [0, -1]),
            (TypeError, 'input_nodes', ['paper', torch.tensor([0.5]), torch.ones(NODES)]),
            (ValueError, 'input_nodes', [torch.ones(7, dtype=torch.bool)]),
            (IndexError, 'input_nodes', [torch.tensor([-1]), torch.tensor([NODES]), [2**40]]),
            (TypeError, 'shuffle', [None, 'yes']),
        )
        for value in values
    ],
)
def test_loader_refuses_arguments(error: type, name: str, value: Any) -> None:
    data = small_graph(torch.device('cpu'))
    options = {'num_neighbors': [3, 2], 'batch_size': 9, name: value}
    with pytest.raises(error, match=f"'{name}'"):
        next(iter(FastNeighborLoader(data, **options)))
