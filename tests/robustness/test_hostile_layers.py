"""Layers, transforms and the loader: NaN stays in its neighbourhood, and wrong input is refused."""

import copy
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.typing import OptTensor
from torch_geometric.utils import add_self_loops, scatter, softmax

from pyg_fast import accelerate, accelerate_report, nn, small_graphs, transforms
from pyg_fast.graph import prepare_edge_index, set_group_sizes
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
    wide = torch.randn(NODES, IN + 1, device=device)
    text = rf"'x' must have {IN} columns, as .* got shape \[{NODES}, 13"
    if name == 'FusedMessagePassing':  # Its message joins those of both ends.
        text = "'gate' must get 24 columns, as its in_features is 24, got shape .*26"
    with raises(ValueError, match=text):
        run(layer, wide, data)


# What is no tensor of features or edges; each error is also of the class that PyG raises, if any.
WRONG_TYPES: dict[str, tuple[Any, str, Callable[[Tensor, Tensor], tuple[Any, Any]]]] = {
    'no features': (TypeError, "'x' must be a tensor", lambda x, e: (None, e)),
    'an array': (
        TypeError,
        "'x' must be a tensor .* got ndarray",
        lambda x, e: (x.cpu().numpy(), e),
    ),
    'integers': (RuntimeError, r"'x' must hold .* x\.float\(\)", lambda x, e: (x.long(), e)),
    'float64': (RuntimeError, "'x' must have the dtype .*float32", lambda x, e: (x.double(), e)),
    'one dimension': (ValueError, r"'x' must have shape \[num_nodes", lambda x, e: (x[:, 0], e)),
    'another device': (
        RuntimeError,
        r"'x' must be on .* got a tensor on meta",
        lambda x, e: (x.to('meta'), e),
    ),
    'no edges': (ValueError, "'edge_index' must be a tensor .* None", lambda x, e: (x, None)),
    'a list': (
        ValueError,
        "'edge_index' must be a tensor .* got list",
        lambda x, e: (x, e.tolist()),
    ),
    'data': (
        TypeError,
        r"'x' must be a tensor .* got Data: pass data\.x",
        lambda x, e: (Data(x=x, edge_index=e), e),
    ),
    'a list of numbers': (TypeError, "'x' must be .* got list", lambda x, e: (x.tolist(), e)),
    'text': (TypeError, "'x' must be a tensor .* got str", lambda x, e: ('x', e)),
    'a number': (ValueError, "'x' must have shape", lambda x, e: (x[0, 0], e)),
    'three tensors': (ValueError, "'x' must be .*( got 3 tensors)?", lambda x, e: ((x, x, x), e)),
}


# Integers times the eps of GIN are floats, and the third of three tensors is not read.
PYG_TAKES = {
    ('GINConv', 'integers'), ('TransformerConv', 'three tensors'), ('GATv2Conv', 'three tensors'),
}  # fmt: skip


class Own(pyg.MessagePassing):
    """A layer as users write them, which does not say what it takes."""

    def __init__(self, in_channels: int, out_channels: int, edge_dim: int = 0) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels)
        self.lin_edges = torch.nn.Linear(edge_dim, out_channels) if edge_dim else None
        self.mlp = torch.nn.Linear(2 * in_channels + edge_dim, out_channels)

    def forward(self, x, edge_index, edge_attr=None):  # type: ignore[no-untyped-def]
        out = self.lin(x)
        edges = None if self.lin_edges is None else self.lin_edges(edge_attr)
        return out + self.propagate(edge_index, x=x, edge_attr=edge_attr, edges=edges)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: OptTensor, edges: OptTensor) -> Tensor:
        parts = (x_i, x_j) if edge_attr is None else (x_i, x_j, edge_attr)
        out = self.mlp(torch.cat(parts, -1))
        return out if edges is None else out + edges


@pytest.mark.parametrize('name', ['GCNConv', 'GraphConv'])
def test_layer_names_wrong_weights(device: torch.device, name: str, raises: Any) -> None:
    layer, data = accelerate(getattr(pyg, name)(IN, 4)).to(device), small_graph(device)
    weight = torch.rand(data.num_edges, device=device)
    wrong = {
        'must be a tensor, got float': 0.5,
        'must have shape': weight.repeat(3, 1).t().contiguous(),
        'must hold floating-point numbers': weight.long(),
    }
    for text, value in wrong.items():
        if name == 'GraphConv' and value is wrong['must hold floating-point numbers']:
            continue  # It multiplies by integers, as PyG's does.
        with raises((TypeError, ValueError), match=f"'edge_weight' {text}"):
            layer(data.x, data.edge_index, value)


@pytest.mark.parametrize('kind', WRONG_TYPES)
@pytest.mark.parametrize(
    'name',
    [
        'GCNConv',
        'SAGEConv',
        'GATConv',
        'GraphConv',
        'TransformerConv',
        'GATv2Conv',
        'GINConv',
        'own',
    ],
)
def test_layer_names_a_wrong_type(device: torch.device, name: str, kind: str, raises: Any) -> None:
    if name == 'GINConv':
        theirs: Any = pyg.GINConv(torch.nn.Linear(IN, 4))
    else:
        theirs = Own(IN, 4) if name == 'own' else getattr(pyg, name)(IN, 4)
    layer, data = accelerate(theirs).to(device), small_graph(device)
    error, text, change = WRONG_TYPES[kind]
    if (name, kind) in PYG_TAKES:
        layer(*change(data.x, data.edge_index))
        return
    with raises(error, match=text):
        layer(*change(data.x, data.edge_index))


@pytest.mark.parametrize('name', ['GATConv', 'GATv2Conv', 'TransformerConv', 'GINEConv'])
def test_layer_names_wrong_edge_attr(device: torch.device, name: str, raises: Any) -> None:
    first = torch.nn.Linear(IN, 4) if name == 'GINEConv' else IN
    out = () if name == 'GINEConv' else (4,)
    layer = accelerate(getattr(pyg, name)(first, *out, edge_dim=3)).to(device)
    data = small_graph(device)
    edge_attr = torch.rand(data.num_edges, 3, device=device)
    wrong = {
        'must have the dtype of .* got torch.float64': edge_attr.double(),
        'must hold floating-point numbers': edge_attr.long(),
        'must be on .* got a tensor on meta': edge_attr.to('meta'),
    }
    if name.startswith('GAT'):  # PyG's self-loops make floats of integers.
        del wrong['must hold floating-point numbers']
    for text, value in wrong.items():
        with raises(RuntimeError, match=f"'edge_attr' {text}"):
            layer(data.x, data.edge_index, value)
    with raises(ValueError, match="'edge_attr' must have .*3"):
        layer(data.x, data.edge_index, edge_attr.repeat(1, 2))
    with raises(TypeError, match="'edge_attr' must be a tensor, got list"):
        layer(data.x, data.edge_index, [0.5])
    if name in ('TransformerConv', 'GINEConv'):  # The others do without.
        with raises(ValueError, match="'edge_attr' must be given"):
            layer(data.x, data.edge_index, None)


# Layers that take features of edges, and the option that says how many.
OF_EDGES: dict[str, tuple[Callable[[], Any], str]] = {
    'ResGatedGraphConv': (lambda: pyg.ResGatedGraphConv(IN, 4, edge_dim=3), 'edge_dim'),
    'GENConv': (lambda: pyg.GENConv(IN, 4, edge_dim=3), 'edge_dim'),
    'NNConv': (lambda: pyg.NNConv(IN, 4, torch.nn.Linear(3, IN * 4)), 'nn'),
    'CGConv': (lambda: pyg.CGConv(IN, 3), 'dim'),
    'GMMConv': (lambda: pyg.GMMConv(IN, 4, 3, 2), 'dim'),
    'own': (lambda: Own(IN, 4, 3), 'a linear map'),
}  # fmt: skip


@pytest.mark.parametrize('name', OF_EDGES)
def test_layer_names_features_of_edges(device: torch.device, name: str, raises: Any) -> None:
    make, option = OF_EDGES[name]
    layer, data = accelerate(make()).to(device), small_graph(device)
    edge_attr = torch.rand(data.num_edges, 3, device=device)
    assert layer(data.x, data.edge_index, edge_attr).isfinite().all()
    wide = torch.cat([edge_attr, edge_attr], 1)
    with raises(ValueError, match=f"'edge_attr' must have 3 columns, as '?{option}.* got shape"):
        layer(data.x, data.edge_index, wide)
    if name != 'own':
        with raises(ValueError, match=f"'edge_attr' must have 3 columns, as '{option}"):
            layer(data.x, data.edge_index, edge_attr[:, 0])
    if name != 'GENConv':  # It does without.
        with raises((TypeError, ValueError), match="'edge_attr' must be (given|a tensor)"):
            layer(data.x, data.edge_index, None)
    with raises(TypeError, match="'edge_attr' must be a tensor, got list"):
        layer(data.x, data.edge_index, [0.5])


def test_layers_without_edge_dim(device: torch.device, raises: Any) -> None:
    data = small_graph(device)
    edge_attr = torch.rand(data.num_edges, 3, device=device)
    layer = accelerate(pyg.GINEConv(torch.nn.Linear(IN, 4))).to(device)
    with raises(ValueError, match=f"'edge_attr' must have {IN} columns, as 'x' has, .* no 'edge_d"):
        layer(data.x, data.edge_index, edge_attr)
    with raises(ValueError, match="'edge_attr' must be given, with as many columns as 'x'"):
        layer(data.x, data.edge_index, None)
    layer = accelerate(pyg.ResGatedGraphConv(IN, 4)).to(device)
    with raises(AssertionError, match="'edge_attr' must not be given to a layer without"):
        layer(data.x, data.edge_index, edge_attr)


def test_layer_names_what_is_missing(device: torch.device, raises: Any) -> None:
    """Not the other part of what a linear map takes, which is right."""
    layer = accelerate(pyg.PointNetConv(torch.nn.Linear(IN + 3, 4))).to(device)
    data = small_graph(device)
    pos = torch.randn(NODES, 3, device=device)
    assert layer(data.x, pos, data.edge_index).isfinite().all()
    with raises(ValueError, match=f"'x' must be given .* {IN + 3} columns, of which 'pos' has 3"):
        layer(None, pos, data.edge_index)


def test_own_layer_names_what_is_too_wide(device: torch.device, raises: Any) -> None:
    layer, data = accelerate(Own(IN, 4, 3)).to(device), small_graph(device)
    with raises(ValueError, match=r"^'edge_attr' must have 3 columns, .* got shape \[120, 12\]"):
        layer(data.x, data.edge_index, torch.rand(data.num_edges, IN, device=device))


def test_an_argument_that_no_message_reads_is_not_named(device: torch.device, raises: Any) -> None:
    class Unread(pyg.MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(IN + 1, 4)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, edge_attr=edge_attr)

        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            return self.lin(x_i + x_j)

    x, edges = torch.randn(NODES, IN), torch.randint(NODES, (2, 30))
    conv = accelerate(Unread()).to(device)
    with raises(ValueError, match=f"^'lin' must get {IN + 1} columns"):
        conv(x.to(device), edges.to(device), torch.randn(30, IN, device=device))


class Mixed(pyg.MessagePassing):
    """With features of edges that must be as the nodes'."""

    def __init__(self, maps: bool) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(IN, 4) if maps else torch.nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor, weights: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, weights=weights)

    def message(self, x_j: Tensor, weights: Tensor) -> Tensor:
        return self.lin(x_j * weights)


@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_own_layer_names_what_differs(device: torch.device, raises: Any, how: str) -> None:
    data = small_graph(device)
    narrow = torch.rand(data.num_edges, 5, device=device)
    text = f"'x' and 'weights' must have as many columns, .* got {IN} and 5"
    with small_graphs(how), raises(ValueError, match=text):
        accelerate(Mixed(False)).to(device)(data.x, data.edge_index, narrow)
    double = torch.rand(data.num_edges, IN, device=device).double()
    with small_graphs(how), raises(TypeError, match="'weights' must have the dtype of the layer's"):
        accelerate(Mixed(True)).to(device)(data.x, data.edge_index, double)


@pytest.mark.parametrize('is_module', [True, False])
@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_types_that_a_table_lacks_are_named(raises: Any, is_module: bool, how: str) -> None:
    class Types(pyg.MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            table = torch.nn.Embedding(5, IN)
            self.table = table if is_module else table.weight

        def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, edge_type=edge_type)

        def message(self, x_j: Tensor, edge_type: Tensor) -> Tensor:
            return x_j * (self.table(edge_type) if is_module else self.table[edge_type])

    conv, edges = accelerate(Types()), torch.randint(NODES, (2, 10))
    types, text = torch.arange(10), "^'edge_type' must hold .*, 'table', which has 5, got .* to 9"
    with small_graphs(how), raises(IndexError, match=text):
        conv(torch.randn(NODES, IN), edges, types)


class Numbered(pyg.MessagePassing):
    """With numbers of types that `forward` changes."""

    def __init__(self, classes: bool) -> None:
        super().__init__()
        self.classes, self.table = classes, torch.nn.Parameter(torch.randn(5, IN))

    def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor, by: Tensor | int) -> Tensor:
        return self.propagate(edge_index, x=x, kind=kind + by)

    def message(self, x_j: Tensor, kind: Tensor) -> Tensor:
        if self.classes:
            return torch.cat([x_j, torch.nn.functional.one_hot(kind, num_classes=5).float()], -1)
        return x_j * self.table[kind]


@pytest.mark.parametrize('by', [3, torch.full((10,), -12)])
@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_numbers_that_forward_computes_are_named(by: Tensor | int, how: str) -> None:
    """By the name that `propagate` got them; the argument of this name is right."""
    x, edges, types = torch.randn(NODES, IN), torch.randint(NODES, (2, 10)), torch.arange(10) % 5
    values = '-12 to -8' if isinstance(by, Tensor) else '3 to 7'
    texts = {
        True: rf"'kind' must hold classes in \[0, 5\), as one_hot gets 5 .*, got .* {values}",
        False: f"'kind' must hold numbers .* 'table', which has 5, got values from {values}",
    }
    for classes, text in texts.items():
        conv = accelerate(Numbered(classes))
        with small_graphs(how):
            conv(x, edges, types, 0)
            with pytest.raises(IndexError, match=f'^{text}') as error:
                conv(x, edges, types, by)
        assert isinstance(error.value, RuntimeError) == classes  # as torch raises for one_hot


@pytest.mark.parametrize('classes', [True, False])
@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_numbers_that_are_floats_are_named(classes: bool, how: str) -> None:
    x, edges = torch.randn(NODES, IN), torch.randint(NODES, (2, 10))
    with small_graphs(how), pytest.raises(TypeError, match=r"^'kind' must .*: kind.long\(\)"):
        accelerate(Numbered(classes))(x, edges, torch.zeros(10), 0)


class Ends(pyg.MessagePassing):
    """With features of nodes and edges by names of its own."""

    def forward(self, h: Any, edges: Tensor) -> Tensor:
        return self.propagate(edges, h=h)

    def message(self, h_j: Tensor) -> Tensor:
        return h_j.relu()


@pytest.mark.parametrize('how', ['kernel', 'pyg'])
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
@pytest.mark.parametrize('wrong', [-1, NODES])
def test_ends_of_edges_are_named(how: str, flow: str, wrong: int) -> None:
    """On a CPU: PyG's own code of a GPU would stop the device."""
    data, conv = small_graph(torch.device('cpu')), accelerate(Ends(flow=flow))
    for end in (0, 1):
        text = rf"^'edge_index\[{end}\]' must hold .* in \[0, {NODES}\), got .*(from|to) {wrong}\b"
        for h in (data.x, (data.x, data.x)):
            with small_graphs(how), pytest.raises(IndexError, match=text):
                conv(h, with_end(end, wrong)(data.edge_index))


@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_edges_that_are_floats_have_a_cure(how: str) -> None:
    data = small_graph(torch.device('cpu'))
    edges = data.edge_index.float()
    for conv, name in ((Ends(), 'edges'), (Edges(), 'edges'), (Own(IN, 4), 'edge_index')):
        text = rf"^'{name}' must hold integers, got torch.float32: {name}.long\(\)"
        with small_graphs(how), pytest.raises(ValueError, match=text) as error:
            accelerate(conv)(data.x, edges)
        assert isinstance(error.value, TypeError)
    with pytest.raises(TypeError, match=r'edge_index.long\(\)'):
        accelerate(pyg.GCNConv(IN, 4))(data.x, edges)


def test_one_feature_of_edges_is_a_column(device: torch.device, raises: Any) -> None:
    data = small_graph(device)
    edge_attr = torch.rand(data.num_edges, device=device)
    for name in ('GATConv', 'GATv2Conv'):  # As PyG's.
        accelerate(getattr(pyg, name)(IN, 4, edge_dim=1)).to(device)(
            data.x, data.edge_index, edge_attr
        )
    layer = pyg.TransformerConv(IN, 4, edge_dim=1).to(device)
    with pytest.raises(RuntimeError, match='mat1 and mat2'):
        layer(data.x, data.edge_index, edge_attr)
    with raises(ValueError, match=r"'edge_attr' must have shape \[\d+, 1\], .*: edge_attr.view"):
        accelerate(layer)(data.x, data.edge_index, edge_attr)


@pytest.mark.parametrize('name', ['GATConv', 'GATv2Conv', 'TransformerConv'])
def test_attention_names_several_features(device: torch.device, name: str, raises: Any) -> None:
    layer, data = accelerate(getattr(pyg, name)(IN, 4)).to(device), small_graph(device)
    with raises(AssertionError, match=r"'x' must have shape \[num_nodes.* got \[2, 80, 12\]"):
        layer(torch.stack([data.x, data.x]), data.edge_index)


class Moved(pyg.MessagePassing):
    """With two features of nodes."""

    def forward(self, x, edge_index, pos):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, pos=pos)

    def message(self, x_j: Tensor, pos_i: Tensor, pos_j: Tensor) -> Tensor:
        return x_j * (pos_i - pos_j).norm(dim=-1, keepdim=True)


def test_own_layer_names_rows_of_nodes(device: torch.device, raises: Any) -> None:
    layer, data = accelerate(Moved()).to(device), small_graph(device)
    pos = torch.randn(NODES - 5, 3, device=device)
    with raises(ValueError, match=rf"'pos' must have a row for each of {NODES} nodes, .* got"):
        layer(data.x, data.edge_index, pos)


class Weighted(pyg.MessagePassing):
    """With arguments of edges by names of its own."""

    def forward(self, x, edges, gate, part=None):  # type: ignore[no-untyped-def]
        return self.propagate(edges, x=x, gate=gate, part=part)

    def message(self, x_j: Tensor, gate: Tensor, part: OptTensor) -> Tensor:
        out = x_j * gate.view(-1, 1)
        return out if part is None else torch.cat([out, part], -1)


def test_own_layer_names_rows_of_edges(device: torch.device, raises: Any) -> None:
    layer, data = accelerate(Weighted()).to(device), small_graph(device)
    count = data.num_edges
    gate = torch.rand(count, device=device)
    with raises(ValueError, match=rf"'gate' must have shape \[{count}\], .* edge of 'edges', got"):
        layer(data.x, data.edge_index, gate[1:])
    with raises(ValueError, match=rf"'gate' must have shape \[{count}\], .*'gate_i' or 'gate_j'"):
        layer(data.x, data.edge_index, gate[:NODES])
    with raises(ValueError, match=rf"'part' must have shape \[{count}, 2\], .* of 'edges', got"):
        layer(data.x, data.edge_index, gate, torch.rand(count - 2, 2, device=device))


class Forgets(pyg.MessagePassing):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, gate=gate)


class NoColumn(Forgets):
    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return x_j * gate


class NoReturn(Forgets):
    def message(self, x_j):  # type: ignore[no-untyped-def]
        x_j.relu()


class NoArgument(Forgets):
    def message(self, x_j: Tensor, y_j: Tensor) -> Tensor:
        return x_j * y_j


class Misspelled(Forgets):
    def message(self, x_j: Tensor, gates: Tensor) -> Tensor:
        return x_j * gates


class NoFeatures(Forgets):
    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * edge_attr


class NoTensor(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, gate=None)

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return x_j * gate


class Pair(Forgets):
    def message(self, x_j):  # type: ignore[no-untyped-def]
        return x_j, 2 * x_j


class Summed(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sum(-1)


class Joined(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_i, (x_i - x_j).norm(dim=-1)], -1)


class NoEnd(Forgets):
    def message(self, x: Tensor) -> Tensor:
        return x


class ByPosition(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x)


class ByEnd(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x_j=x[edge_index[0]])

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


class Exchanged(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(x, x=edge_index)


class OneSize(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, size=x.size(0))


class OwnShape(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, size=x.size())


class Looped(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        edges, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        return self.propagate(edges, x=x, gate=gate)

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return x_j * gate.view(-1, 1)


class Pointers(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax((x_i * x_j).sum(-1, keepdim=True), index, size_i) * x_j


class ByEdges(Forgets):
    def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
        return softmax(x_j, edge_index) * x_j


class Swapped(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor, edge_index_i: Tensor) -> Tensor:
        return softmax(edge_index_i, (x_i * x_j).sum(-1)).view(-1, 1) * x_j


class SwappedColumn(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax(index, (x_i * x_j).sum(-1, keepdim=True), num_nodes=size_i) * x_j


class NoUpdate(Forgets):
    def update(self, aggr_out: Tensor, gates: Tensor) -> Tensor:
        return aggr_out + gates


class NoAggregate(Forgets):
    def aggregate(self, inputs: Tensor, index: Tensor, gates: Tensor) -> Tensor:
        return super().aggregate(inputs * gates, index)


class LateOutput(Forgets):
    def update(self, x: Tensor, aggr_out: Tensor) -> Tensor:
        return aggr_out + x


class NoUpdated(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x) + x

    def update(self, aggr_out):  # type: ignore[no-untyped-def]
        aggr_out.relu()


class NoAggregated(NoUpdated):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        out = self.propagate(edge_index, x=x)
        return out + x

    def aggregate(self, inputs, index):  # type: ignore[no-untyped-def]
        inputs.sum(0)

    def update(self, aggr_out):  # type: ignore[no-untyped-def]
        return aggr_out


class Widened(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.cat([x_j, x_j], -1)

    def update(self, aggr_out: Tensor, x: Tensor) -> Tensor:
        return aggr_out + x


class NoneAdded(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, gate=None)

    def update(self, aggr_out: Tensor, gate: Tensor) -> Tensor:
        return aggr_out + gate


class PairAdded(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=(x, x))

    def update(self, aggr_out: Tensor, x: Any) -> Tensor:
        return aggr_out + x


class TwoWidths(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, half=x[:, :6])

    def message(self, x_j: Tensor, half_j: Tensor) -> Tensor:
        return x_j + half_j


class InnerMap(Forgets):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(IN, 24), torch.nn.Linear(IN, 4))

    def message(self, x_j: Tensor) -> Tensor:
        return self.mlp(x_j)


class SecondMap(Forgets):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(IN, IN), pyg.Linear(2 * IN, 4)

    def message(self, x_j: Tensor) -> Tensor:
        x_j = self.a(x_j).relu()
        return self.b(x_j)


class FirstMap(SecondMap):
    def message(self, x_j: Tensor) -> Tensor:
        return self.b(x_j)


class MapOfForward(SecondMap):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x.relu())

    def message(self, x_j: Tensor) -> Tensor:
        return self.b(x_j)


class MapOfBoth(SecondMap):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.a(torch.cat([x_i, x_j], -1))


class MapUpdated(SecondMap):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def update(self, aggr_out: Tensor, x: Tensor) -> Tensor:
        return self.a(torch.cat([aggr_out, x], -1))


class MatrixOfOther(SecondMap):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.relu(x_j) @ self.b.weight.t()


class MapOfNumber(SecondMap):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(1, IN)

    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return self.a(gate) * x_j


class MapOfGathered(MapOfNumber):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        self.node_dim = 0
        return self.propagate(edge_index[:, :30], x=gate)

    def message(self, x_j: Tensor) -> Tensor:
        return self.a(x_j)


class MatrixOfX(SecondMap):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.nn.functional.linear(x_j, self.b.weight)


class ViewedRows(Forgets):
    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        return gate.view(-1, 1) * x_j

    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, gate=torch.stack([gate, gate], 1))


class RowsOfOther(ViewedRows):
    def message(self, x_j: Tensor, gate: Tensor) -> Tensor:
        column = gate.relu().view(-1, 1)
        return column * x_j


class HeadsBesideChannels(Forgets):
    heads = 3

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i.view(-1, self.heads, 4) * x_j


class HeadsBesideOne(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        part = x_j[:, :4]
        return torch.mul(
            x_i.view(-1, 3, 4), part)  # fmt: skip


class NoDegree(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, degree=x.sum(1))

    def message(self, x_j: Tensor, degree: Tensor) -> Tensor:
        return x_j / degree.view(-1, 1)


class ByDefault(Forgets):
    def message(self, x_j: Tensor, edge_attr: OptTensor = None) -> Tensor:
        return x_j * edge_attr


class NoSelf(Forgets):
    def message(x_j):  # type: ignore[no-untyped-def]
        return x_j


class InRows(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.cat([x_i, x_j])


class InRowsMapped(Forgets):
    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(2 * IN, 4)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j]))


class OfHeads(Forgets):
    def __init__(self) -> None:
        super().__init__(node_dim=0)

    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x.view(-1, 3, 4))

    def message(self, x_j: Tensor) -> Tensor:
        score = x_j.sum(-1)
        return score * x_j


class Array(Forgets):
    def message(self, x_j: Tensor) -> Any:
        return x_j.cpu().numpy()


class OtherHeads(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        alpha = x_j[:, :3].relu()
        return x_i.view(-1, 2, 6) * alpha.unsqueeze(-1)


class WrongView(Forgets):
    heads = 7

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.view(-1, self.heads, 4)


class OtherDevice(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * torch.rand(IN).to('meta')[:, None].flatten()


class WrongNorm(Forgets):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def message(self, x_j: Tensor) -> Tensor:
        return self.norm(x_j)


class Branches(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j if x_j > 0 else -x_j


class ByFeatures(Forgets):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return softmax(x_j, x_i) * x_j


class ByFloats(Forgets):
    def message(self, x_j: Tensor, index: Tensor) -> Tensor:
        return softmax(x_j, index.float()) * x_j


class ByNothing(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        return softmax(x_j) * x_j


class ByTorch(Forgets):
    def message(self, x_j: Tensor, index: Tensor) -> Tensor:
        return torch.softmax(x_j, index)


class ByChannels(Forgets):
    def message(self, x_j: Tensor, index: Tensor) -> Tensor:
        return softmax(x_j, index, dim=1) * x_j


class Averages(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return scatter(inputs, index, reduce='average')


class FewNodes(Forgets):
    def message(self, x_j: Tensor, index: Tensor) -> Tensor:
        return softmax(x_j, index, num_nodes=2) * x_j


class MistypedEnd(Forgets):
    def message(self, x_jj: Tensor) -> Tensor:
        return x_jj


class AllByName(Forgets):
    def message(self, **kwargs: Tensor) -> Tensor:
        return kwargs['x_j']


class ThreeParts(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=[x, x, x])


class ArrayOfNodes(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, pos=y.cpu().numpy())

    def message(self, x_j: Tensor, pos_j: Tensor) -> Tensor:
        return x_j + pos_j


class NoEdges(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(x=x)


class NoUnpacking(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(add_self_loops(edge_index), x=x)


class PartOfPair(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        pair = (x[:1].expand(3, -1), x)
        return pair[0] + self.propagate(edge_index, x=x)


class OfForward(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        scale = 2 * gate
        return self.propagate(edge_index, x=x, half=scale / 2)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * scale  # type: ignore[name-defined]  # noqa: F821


class InPlace(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        out = x_j[:, :4].exp()
        out += x_j
        return out


class IntoPart(Forgets):
    def message(self, x_j: Tensor) -> Tensor:
        out = torch.zeros_like(x_j)
        out[:, :2] = x_j
        return out


class FloatSize(Forgets):
    def forward(self, x, edge_index, gate, y):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, size=(80.0, 80.0))


@pytest.mark.parametrize(
    ('layer', 'text'),
    [
        (Array, "'message' must return a tensor, got ndarray: NumPy"),
        (
            OtherHeads,
            r"'message' cannot compute x_i.view\(-1, 2, 6\) \* alpha.unsqueeze\(-1\) where 'x_i' "
            r"has shape \[120, 12\], 'alpha' has shape \[120, 3\]: 2 and 3 must be equal, or",
        ),
        (WrongView, r"'message' cannot .* 'x_j' has .*: the sizes of a row, .7, 4., must be 12"),
        (OtherDevice, r"'message' cannot compute x_j \* .* 'x_j' has device c.*"),
        (WrongNorm, r"'message' cannot compute self.norm\(x_j\) where .* \[120, 12\]: Given norm"),
        (Branches, "'message' cannot compute x_j > 0 where .*: if takes a single value: torch.wh"),
        (ByFeatures, r"'index' of softmax must have shape .num_edges., got \[120, 12\]: .*size"),
        (ByFloats, "'index' of softmax must hold the destination of each edge, got torch.float32"),
        (ByNothing, "'index' of softmax must be a tensor with the destination .*, got None: soft"),
        (ByChannels, "'src' and 'index' of softmax .* with dim=1: the edges are along dim=0"),
        (Averages, r"'reduce' of scatter must be one of .*, got 'average'; did you mean 'mean'\?"),
        (ByTorch, "'dim' of torch's softmax must be an integer, got Tensor: a softmax over the"),
        (MistypedEnd, "'x_jj' must be given .*, got 'x', 'gate'; did you mean 'x_j'\\?$"),
        (AllByName, r"'message' must name each of its arguments, .* got \*\*kwargs"),
        (ThreeParts, "'x' must be a tensor, or a pair of .*, got 3 of them in a list"),
        (ArrayOfNodes, "'pos' must be a tensor of features of nodes, got ndarray"),
        (NoEdges, "'edge_index' must be given to propagate first, .* got 0 .* and 'x': propagate"),
        (NoUnpacking, "'edge_index' of propagate must be a tensor, got a tuple: functions such as"),
        (PartOfPair, r"'forward' cannot .* where 'pair\[0\]' has shape \[3, 12\]: 3 and 80 must"),
        (OfForward, r"'scale' is a variable of 'forward': give it .*, scale=scale\), and to 'mess"),
        (
            InPlace,
            r"'message' cannot compute out \+= x_j where 'out' has .* 4\], 'x_j' has .* 12\]: 4",
        ),
        (IntoPart, r"'message' cannot compute out\[:, :2\] = x_j where 'out' has .*, 'x_j' has .*"),
        (FloatSize, r"'size' of propagate must be a pair .*, got \(80.0, 80.0\)"),
        (NoColumn, rf"'message' combines {IN} channels with \d+ numbers, .*\.unsqueeze\(-1\)"),
        (NoReturn, "'message' returns None: return a tensor"),
        (NoArgument, "'y' must be given to propagate, as 'message' takes 'y_j'"),
        (Misspelled, "'gates' must be given to propagate, as 'message' takes 'gates', got 'x', 'g"),
        (NoFeatures, "'edge_attr' must be given to propagate, as .* 'edge_attr', got 'x', 'gate'$"),
        (NoTensor, "'gate' must be a tensor, as 'message' computes with it, got None"),
        (Pair, "'message' must return a tensor, got tuple"),
        (Summed, r"'message' must return a row of channels .* got shape \[\d+\]: keepdim=True"),
        (Joined, "'message' joins tensors of 2 and 1 dimensions: keepdim=True"),
        (NoEnd, "'x' must have shape .* got .*; features of nodes are 'x_i' or 'x_j' in 'message'"),
        (
            ByPosition,
            r"'size' of propagate must be a pair .* got Tensor: .* propagate\(edge_index, x",
        ),
        (ByEnd, "'x' must be given to propagate, as 'message' takes 'x_j', got 'x_j'$"),
        (
            Exchanged,
            r"'edge_index' of propagate must have shape \[2, num_edges\], got .*float32 of",
        ),
        (OneSize, "'size' of propagate must be a pair .* got int$"),
        (OwnShape, rf"'size' of propagate must be .* got \(80, {IN}\), which is the shape of 'x'"),
        (
            Looped,
            r"'gate' must have shape \[200\], .* got \[120\]: 'forward' has changed 'edge_index'",
        ),
        (Pointers, r"'ptr', the third argument of softmax, .* got int: .*num_nodes=size_i\)"),
        (ByEdges, r"'index' of softmax must have shape \[num_edges\], got \[2, 120\]"),
        (Swapped, r"'src', the first .* got torch.int64 of .* torch.float32 .*120\]: exchange"),
        (SwappedColumn, r"'src', the first .* got torch.int64 of .* torch.float32 .*1\]: exchange"),
        (
            NoUpdate,
            "'gates' must be given to propagate, as 'update' takes 'gates', got 'x', 'gate'; did "
            r"you mean 'gate'\?$",
        ),
        (NoAggregate, "'gates' must be given to propagate, as 'aggregate' takes 'gates', got 'x'"),
        (
            LateOutput,
            "'aggr_out' must be given .* the first argument of 'update' is what .* not 'x'",
        ),
        (NoUpdated, "'update' returns None: return a tensor"),
        (NoAggregated, "'aggregate' returns None: return a tensor"),
        (Widened, f"'aggr_out' and 'x' must have as many columns, .* got {2 * IN} and {IN}"),
        (NoneAdded, "'gate' must be a tensor, as 'update' computes with it, got None"),
        (PairAdded, r"'x' of 'update' is the pair that propagate got: x\[1\] is that of dest"),
        (TwoWidths, f"'x_j' and 'half_j' must have as many columns, .* got {IN} and 6"),
        (InnerMap, f"'mlp.1' must get {IN} columns, as its in_features is {IN}, got shape .*24"),
        (SecondMap, "'b' must get 24 columns, as its in_channels is 24, got shape .*120, 12"),
        (FirstMap, "'x' must have 24 columns, as a linear map of the layer takes, got shape .*80"),
        (MapOfForward, "'b' must get 24 columns, as its in_channels is 24, got shape .*120, 12"),
        (MapOfBoth, "'a' must get 12 columns, as its in_features is 12, got shape .*120, 24"),
        (MapUpdated, "'a' must get 12 columns, as its in_features is 12, got shape .*80, 24"),
        (MapOfNumber, r"'gate' must have shape \[120, 1\], .* got \[120\]: gate.view\(-1, 1\)"),
        (MapOfGathered, r"'gate' must have shape \[120, 1\], .* got \[120\]: gate.view"),
        (MatrixOfX, "'x' must have 24 columns, as a linear map of the layer takes, got shape .*80"),
        (
            MatrixOfOther,
            r"'message' cannot compute torch.relu\(x_j\) @ self.b.weight.t\(\) where 'x_j' has .*, "
            r"'self.b.weight' has shape \[4, 24\]: a matrix of 24 rows multiplies 24 col.* got 12$",
        ),
        (
            ViewedRows,
            r"'gate' must have 1 column, a row for each of 120 edges, .* views it, got .*120, 2\]",
        ),
        (RowsOfOther, "'message' combines 240 rows with 120 edges: "),
        (HeadsBesideChannels, r"'message' combines values of shapes \[120, 3, 4\] and \[120, 12\]"),
        (HeadsBesideOne, r"'message' combines values of shapes \[120, 3, 4\] and \[120, 4\]"),
        (NoDegree, r"'degree' must have shape \[120\], .* 'degree_i' or 'degree_j' in 'message'$"),
        (ByDefault, "'edge_attr' must be given to propagate, as .* 'edge_attr', got 'x', 'gate'$"),
        (NoSelf, "'message' returns the layer: its first parameter is 'self'"),
        (
            InRows,
            r"'message' must return a row for each of 120 edges, got shape \[240, 12\]: torch.cat",
        ),
        (
            InRowsMapped,
            "'message' gives a linear map of 24 columns 240 rows of 12, 2 for each edge",
        ),
        (OfHeads, r"'message' combines values of shapes \[120, 3, 4\] and \[120, 3\]: .unsqueeze"),
    ],
)
@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_own_layer_names_what_it_forgets(
    device: torch.device, layer: type[Forgets], text: str, how: str
) -> None:
    data = small_graph(device)
    gate = torch.rand(data.num_edges, device=device)
    errors = TypeError, ValueError, RuntimeError, NameError
    with small_graphs(how), pytest.raises(errors, match=f'^{text}'):
        accelerate(layer()).to(device)(data.x, data.edge_index, gate, data.x)


def test_softmax_of_too_few_nodes(device: torch.device) -> None:
    data = small_graph(device)
    if device.type == 'cpu':  # It stops a GPU.
        with pytest.raises(IndexError, match="^'num_nodes' of softmax must be more than all .* 2:"):
            accelerate(FewNodes())(data.x, data.edge_index, data.x, data.x)


class Sized(pyg.MessagePassing):
    """Passes a `size` on to `propagate`."""

    def forward(self, x, edge_index, size=None):  # type: ignore[no-untyped-def]
        return self.propagate(edge_index, x=x, size=size)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.sigmoid()


@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_own_layer_names_exchanged_ends(how: str) -> None:
    few, many = torch.randn(9, IN), torch.randn(NODES, IN)
    edges = torch.stack([torch.arange(NODES) % 9, torch.arange(NODES)])
    layer, size = accelerate(Sized()), r"'size' of propagate .*, \(9, 80\) by .*, got \(80, 9"
    pair = r"'x' must be a pair .* least 9 and 80 nodes, got 80 and 9 rows: exchange"
    with small_graphs(how):
        assert layer((few, many), edges, (9, NODES)).size(0) == NODES
        for text, x, given in (
            (size, (few, many), (NODES, 9)), (size, few, (NODES, 9)), (pair, (many, few), None),
        ):  # fmt: skip
            with pytest.raises((ValueError, IndexError), match=f'^{text}'):
                layer(x, edges, given)
        numbers = torch.tensor(9), torch.tensor(NODES)  # PyG takes these, too.
        assert layer(few, edges, numbers).size(0) == NODES


@pytest.mark.parametrize('how', ['kernel', 'pyg'])
@pytest.mark.parametrize(
    'make',
    [Sized, lambda: pyg.SAGEConv(IN, 4), lambda: pyg.GraphConv(IN, 4)],
    ids=['own', 'SAGEConv', 'GraphConv'],
)
def test_a_prepared_graph_has_a_size(
    device: torch.device, make: Callable[[], torch.nn.Module], how: str
) -> None:
    """PyG reads no other beside an EdgeIndex, nor do kernels."""
    data, conv = small_graph(device), make().to(device)
    prepared, _ = prepare_edge_index(data.edge_index, (NODES, NODES))
    fast, expected = accelerate(copy.deepcopy(conv)), conv(data.x, prepared)
    with small_graphs(how):
        for size in ((NODES, 12), (NODES, NODES + 1), (12, NODES), (NODES, None), data.x.size()):
            torch.testing.assert_close(fast(data.x, prepared, size=size), expected)


def test_a_size_that_fits_by_chance(device: torch.device) -> None:
    """The shape of features is a size like any other where the edges fit it."""
    x = torch.randn(NODES, IN, device=device)
    edges = torch.stack([torch.arange(NODES), torch.arange(NODES) % IN]).to(device)
    conv = Sized()
    out = accelerate(Sized())(x, edges, x.size())
    assert out.size(0) == IN
    torch.testing.assert_close(out, conv(x, edges, (NODES, IN)))


class Kinds(pyg.MessagePassing):
    """With embeddings of nodes and edges."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.kinds = torch.nn.Embedding(9, IN), torch.nn.Embedding(3, IN)
        self.lin = torch.nn.Linear(IN, IN)

    def forward(self, nodes, edges, kinds, weight):  # type: ignore[no-untyped-def]
        x = self.lin(nodes) if nodes.is_floating_point() else self.nodes(nodes)
        return self.propagate(edges, x=x, kinds=kinds, weight=weight)

    def message(self, x_j: Tensor, kinds: Tensor, weight: Tensor) -> Tensor:
        return x_j * self.kinds(kinds[:, 0]) + self.lin(weight)


@pytest.mark.parametrize(
    ('changed', 'text'),
    [
        (
            {'nodes': 9},
            "'nodes' must hold .* table .*, 'nodes', which has 9, got values from 1 to 9",
        ),
        ({'kinds': 3}, r"'kinds' must get numbers in \[0, 3\), .* got values from 1 to 3"),
        ({'kinds': -1}, r"'kinds' must get numbers in \[0, 3\), .* got values from -1 to 1"),
        (
            {'weight': 1},
            r"'weight' must hold floating-point numbers, got torch.int64: weight.float",
        ),
    ],
)
@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_own_layer_names_what_modules_lack(changed: dict[str, int], text: str, how: str) -> None:
    data = small_graph(torch.device('cpu'))
    given = {
        'nodes': torch.ones(NODES).long(), 'edges': data.edge_index,
        'kinds': torch.ones(data.num_edges, 2).long(), 'weight': torch.ones(data.num_edges, IN),
    }  # fmt: skip
    conv = accelerate(Kinds())
    with small_graphs(how):
        assert conv(**given).isfinite().all()
        for name, value in changed.items():
            given[name] = given[name].long()
            given[name][0] = value
        with pytest.raises((IndexError, TypeError), match=f'^{text}'):
            conv(**given)
    (report,) = accelerate_report(conv)
    assert re.match(rf'\w+: {text}', report.error)


class Unlike(pyg.MessagePassing):
    """A layer that takes other things by the names that PyG's layers have, and then fails."""

    def __init__(self, fail: Callable[[Any], Any]) -> None:
        super().__init__()
        self.table, self.lin, self.fail = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), fail
        self.in_channels, self.edge_dim, self.num_relations = 6, 6, 2

    def forward(self, x, edge_index, edge_attr, edge_weight, size):  # type: ignore[no-untyped-def]
        x = self.table(x[0])
        return self.propagate(edge_index, x=x, rows=edge_attr, weight=edge_weight + size)

    def message(self, x_j: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        return self.lin(x_j * weight + rows.sum()) + self.fail(self)


def raises_mine(layer: Any) -> None:
    raise ValueError("mine: 'x' has no size")


@pytest.mark.parametrize(
    ('fail', 'text'),
    [
        (raises_mine, "mine: 'x' has no size"),
        (lambda layer: layer.missing, "'Unlike' object has no attribute 'missing'"),
        (lambda layer: missing, "name 'missing' is not defined"),  # noqa: F821
        (lambda layer: {}['x'], "'x'"),
        (lambda layer: torch.ones(5) + torch.ones(7), 'The size of tensor a .5. must match'),
        (lambda layer: layer.table(torch.ones(2)), "Expected tensor for argument #1 'indices'"),
        (lambda layer: torch.ones(1, 4) + torch.ones(1, 9), 'The size of tensor a .4. must match'),
        (lambda layer: torch.ones(5)[7], 'index 7 is out of bounds for dimension 0 with size 5'),
        (lambda layer: 'a' + layer, 'can only concatenate str'),
    ],
)
@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_errors_of_the_user_stay(fail: Callable[[Any], Any], text: str, how: str) -> None:
    data, layer = small_graph(torch.device('cpu')), accelerate(Unlike(lambda layer: 0))
    given = torch.arange(NODES).view(1, -1) % 9, data.edge_index, torch.rand(3), torch.rand(120, 1)
    with small_graphs(how):
        assert layer(*given, 2).shape == (NODES, 4)
        layer.fail = fail
        with pytest.raises(Exception, match=f'^{text}') as error:
            layer(*given, 2)
    assert error.value.__cause__ is None


class Edges(pyg.MessagePassing):
    """With edges by a name of its own."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.propagate(edges, x=x)


@pytest.mark.parametrize('cls', [Own, Edges])
@pytest.mark.parametrize('prepared', [False, True])
def test_layer_names_what_is_exchanged(device: torch.device, cls: type, prepared: bool) -> None:
    data = small_graph(device)
    data = transforms.ToCSR()(data) if prepared else data
    layer = accelerate(cls(IN, 4) if cls is Own else cls()).to(device)
    text = r"'edge\w+' must be edges of shape .*, got torch.float32 .*, but 'x' has got such edges"
    with pytest.raises(ValueError, match=f'^{text}'):
        layer(data.edge_index, data.x)
    with pytest.raises(
        TypeError, match="^'x' must be a tensor, got Data alone: the layer takes x,"
    ):
        layer(data)


def test_layer_without_its_constructor() -> None:
    class NoInit(pyg.MessagePassing):
        def __init__(self) -> None:
            self.channels = 3

    class NoInitOfOurs(nn.FusedMessagePassing):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x)

    for layer in (NoInit(), NoInitOfOurs()):
        text = rf"'{type(layer).__name__}.__init__' must call super\(\).__init__\(\)"
        for function in (accelerate, accelerate_report):
            with pytest.raises(AttributeError, match=text):
                function(layer)
    with pytest.raises(AttributeError, match=text):
        layer(torch.ones(3, 4), torch.zeros(2, 5).long())


class Nodes(pyg.MessagePassing):
    """With what `forward` makes of nodes and edges."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.make, self.table = make, torch.nn.Embedding(4, 1)

    def forward(self, x: Tensor, edges: Tensor, kind: Tensor) -> Tensor:
        return self.propagate(edges, x=x, feature=self.make(x), kind=kind)

    def message(self, x_j: Tensor, feature_i: Tensor, kind: Tensor) -> Tensor:
        return x_j * feature_i.flatten(1).sum(-1, keepdim=True) * self.table(kind)


@pytest.mark.parametrize('how', ['kernel', 'pyg'])
def test_own_layer_names_what_forward_makes(device: torch.device, raises: Any, how: str) -> None:
    data = small_graph(device)
    kind = torch.zeros(data.num_edges, device=device)
    prepared = prepare_edge_index(data.edge_index, (NODES, NODES))[0]
    wrong = {
        r"'feature' must have shape .*, got \[80\]: feature.view\(-1, 1\)": lambda x: x[:, 0],
        r"'kind' must hold integers, got torch.float32: kind.long\(\)": lambda x: x,
    }
    if device.type == 'cpu':  # PyG's code stops a GPU, whose indices nobody knows.
        heads = r"'node_dim' must be 0 for 'feature' of shape \[80, 3, 4\]"
        wrong[heads] = lambda x: x.view(-1, 3, 4)
    for edges in (data.edge_index, prepared):
        for text, make in wrong.items():
            layer = accelerate(Nodes(make)).to(device)
            with small_graphs(how), raises((TypeError, ValueError), match=f'^{text}'):
                layer(data.x, edges, kind)


def test_types_that_are_a_column_are_named() -> None:
    """Rows of a table by them are as many as the square of the edges: of so many edges these need
    more memory than a process can address, whatever its machine promises."""

    class Columns(pyg.MessagePassing):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(5, IN))

        def forward(self, x: Tensor, edge_index: Tensor, kind: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, edge_type=kind)

        def message(self, x_j: Tensor, edge_type: Tensor) -> Tensor:
            return x_j * self.table[edge_type]

    conv, x = accelerate(Columns()), torch.randn(NODES, IN)
    given = torch.randint(NODES, (2, 9)), torch.zeros(9, 1, dtype=torch.int64)
    with small_graphs('kernel'):
        conv(x, *given)
        (report,) = accelerate_report(conv)
        assert "perhaps as 'edge_type' has shape [num_edges, 1] (File" in report.reason
        assert report.cure.startswith('edge_type.view(-1)')
    conv = accelerate(Columns())
    with small_graphs('pyg'):
        with pytest.warns(UserWarning, match=r"'edge_type' has shape \[9, 1\].*edge_type.view"):
            assert conv(x, *given).shape == (9, NODES, IN)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            conv(x, *given)
            accelerate(Columns())(x, given[0], given[1].view(-1))
    with small_graphs('kernel'):
        count = math.isqrt(2**48 // (4 * IN))
        with pytest.raises(
            ValueError, match=r"'kind' must have shape \[num_edges\].*: kind.view\(-1\)"
        ):
            conv(x, torch.zeros(2, count, dtype=torch.int64), torch.zeros(count, 1).long())


def test_own_layer_without_a_file(device: torch.device) -> None:
    """PyG writes no `propagate` for it, and passes a class for what is missing."""
    scope = {'__name__': __name__, 'Forgets': Forgets}
    exec('class Other(Forgets):\n    def message(self, x_j, gates): return x_j * gates', scope)
    data = small_graph(device)
    with pytest.raises(ValueError, match="'gates' must be given to propagate, as 'message' takes"):
        accelerate(scope['Other']()).to(device)(data.x, data.edge_index, data.x, data.x)


def test_own_layer_names_what_it_joins(device: torch.device, raises: Any) -> None:
    layer, data = (
        accelerate(pyg.EdgeConv(torch.nn.Linear(2 * IN, 4))).to(device),
        small_graph(device),
    )
    wide = torch.randn(NODES, IN + 1, device=device)
    with raises(ValueError, match=r"'x' must fit a linear map .* takes 24 .* gets 26: .*'x': 13"):
        layer(wide, data.edge_index)
    for layer in (Unreduced(), accelerate(UnreducedOfPyG(aggr=None))):
        with raises(ValueError, match="'aggr' must be given to a layer without an 'aggregate'"):
            layer(data.x, data.edge_index)


@pytest.mark.parametrize('name', ['RGCNConv', 'RGATConv'])
def test_layer_names_relations(device: torch.device, name: str, raises: Any) -> None:
    layer, data = accelerate(getattr(pyg, name)(IN, 4, 3)).to(device), small_graph(device)
    types = torch.randint(3, (data.num_edges,), device=device)
    wrong = {
        'must be given': None, 'must be a tensor, got list': types.tolist(),
        'must hold integers, got torch.float32': types.float(),
        'must have shape': types.view(-1, 1),
    }  # fmt: skip
    if device.type == 'cpu':  # A GPU fails an assertion.
        wrong[r'must hold relations in \[0, 3\), got values from 0 to 7'] = types.clamp(max=1) * 7
    for text, value in wrong.items():
        with raises((IndexError, TypeError, ValueError), match=f"'edge_type' {text}"):
            layer(data.x, data.edge_index, value)


def test_layer_names_types(device: torch.device, raises: Any) -> None:
    x, edges = {'a': torch.randn(9, 8, device=device)}, ('a', 'to', 'a')
    edge_index = {edges: torch.randint(9, (2, 40), device=device)}
    layer = accelerate(pyg.HGTConv(8, 8, (['a'], [edges]))).to(device)
    assert layer(x, edge_index)['a'].isfinite().all()
    for x_dict, text in (
        (x['a'], "'x_dict' must be a dictionary by node type, got Tensor: data.x_dict"),
        ({'a': x['a'].tolist()}, r"'x_dict\['a'\]' must be a tensor, got list"),
        ({'a': x['a'][:, 1:]}, r"'x_dict\['a'\]' must have 8 columns"),
        ({'b': x['a']}, r"'x_dict' must have features of 'a', which edges \('a', 'to', 'a'\) read"),
    ):
        with raises((TypeError, ValueError), match=text):
            layer(x_dict, edge_index)
    other = {('a', 'of', 'a'): edge_index[edges]}
    with raises(
        ValueError, match=r"must have edge types of the layer, .*, got \('a', 'of', 'a'\)$"
    ):
        layer(x, other)
    layer = accelerate(pyg.SAGEConv((8, 8), 4)).to(device)
    for pair in ((None, x['a']), (x['a'].tolist(), x['a'])):
        with raises(TypeError, match=rf"'x\[0\]' must be a tensor .* got {type(pair[0]).__name__}"):
            layer(pair, edge_index[edges])


class Unreduced(nn.FusedMessagePassing):
    def __init__(self) -> None:
        super().__init__(aggr=None)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


class UnreducedOfPyG(pyg.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)


@pytest.mark.parametrize(
    ('make', 'text'),
    [
        (lambda: nn.FusedGCNConv(8.0, 8), "'in_channels' must be an integer, got float"),
        (lambda: nn.FusedSAGEConv((8, '8'), 8), "'in_channels' must be an integer, got str"),
        (lambda: nn.FusedGATConv(8, None), "'out_channels' must be an integer, got NoneType"),
        (lambda: nn.FusedGATv2Conv(8, 8, heads='2'), "'heads' must be an integer, got str"),
        (lambda: nn.FusedTransformerConv(8, 8, heads=2.0), "'heads' must be an integer, got float"),
        (lambda: nn.FusedTransformerConv(8, 8, edge_dim='3'), "'edge_dim' must be an integer"),
        (lambda: nn.FusedGATConv(8, 8, dropout='x'), "'dropout' must be a number, got str"),
        (lambda: nn.FusedGCNConv(8, -1), "'out_channels' must be at least 0, got -1"),
        (lambda: nn.FusedGPSConv('8', None), "'channels' must be an integer, got str"),
        (lambda: nn.FusedGPSConv(8, None, heads=3), "'channels' must be a multiple of 'heads'"),
        (lambda: nn.FusedSAGEConv(8, 8, aggr='foo'), "'aggr' must be a name .* got 'foo'"),
        (lambda: nn.FusedMessagePassing(aggr=3), "'aggr' must be a name .* got 3"),
        (lambda: nn.PathPreparedGNN('gcn', 8, '8', 8, 2), "'hidden_channels' must be an integer"),
        (lambda: nn.PathPreparedGNN('gcn', 8, 8, 8, 2.0), "'num_layers' must be an integer"),
        (lambda: nn.MaxKGNN('gcn', 8, 8, 8.0, 2, k=4), "'out_channels' must be an integer"),
        (lambda: nn.PathPreparedGNN(['gcn'], 8, 8, 8, 2), "'conv' must be one of"),
        (lambda: nn.SampledGCNConv(8, 8, 0), "'num_samples' must be at least 1, got 0"),
    ],
)
def test_options_of_layers(make: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        make()


def test_signatures_stay() -> None:
    for ours in (nn.FusedGCNConv, nn.FusedGPSConv, nn.FusedTransformerConv):
        theirs = getattr(pyg, ours.__name__.removeprefix('Fused'))
        assert inspect.signature(ours) == inspect.signature(theirs)


@pytest.mark.parametrize('kind', ['no features', 'a list of numbers', 'data', 'a list'])
@pytest.mark.parametrize('name', ['PathPreparedGNN', 'MaxKGNN', 'SampledGCN', 'GPS'])
def test_model_names_a_wrong_type(device: torch.device, name: str, kind: str, raises: Any) -> None:
    layers: dict[str, Callable[[], Any]] = {
        'PathPreparedGNN': lambda: nn.PathPreparedGNN('gcn', IN, 8, 4, 2),
        'MaxKGNN': lambda: nn.MaxKGNN('sage', IN, 8, 4, 2, k=4),
        'SampledGCN': lambda: nn.SampledGCNConv(IN, 4, 3).eval(),
        'GPS': lambda: nn.FusedGPSConv(IN, None if kind != 'a list' else nn.FusedGCNConv(IN, IN)),
    }
    layer, data = layers[name]().to(device), small_graph(device)
    error, text, change = WRONG_TYPES[kind]
    with raises(error, match=text):
        layer(*change(data.x, data.edge_index))


def test_paths_that_are_none(device: torch.device) -> None:
    model, data = nn.PathPreparedGNN('gcn', IN, 8, 4, 2).to(device), small_graph(device)
    mask = torch.ones(NODES, dtype=torch.bool, device=device)
    for paths, got in ((mask, 'Tensor'), ([mask, mask], 'a list of Tensor'), (3, 'int')):
        with pytest.raises(TypeError, match=f"'paths' must be a list, .* got {got}: they are"):
            model(data.x, data.edge_index, paths=paths)
    with pytest.raises(ValueError, match=r"'mask' must have shape \[80\], got \[79\]"):
        model(data.x, data.edge_index, mask=mask[1:])


def test_numbers_of_graphs(device: torch.device) -> None:
    layer, data = nn.FusedGPSConv(IN, None).to(device), small_graph(device)
    batch = torch.zeros(NODES, dtype=torch.long, device=device)
    for wrong, text in (
        (batch[1:], r"'batch' must have shape \[80\]"),
        (batch.float(), "'batch' must hold numbers"),
        ([0] * NODES, "'batch' must be a tensor, got list"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=text):
            layer(data.x, data.edge_index, wrong)


@pytest.mark.parametrize('name', ['GATConv', 'GATv2Conv'])
def test_truth_values_of_edges(device: torch.device, name: str) -> None:
    """PyG's mean of them over the edges of a node, for its self-loop, is none of numbers."""
    theirs = getattr(pyg, name)(IN, 4, edge_dim=3).to(device).eval()
    data = small_graph(device)
    edge_attr = torch.rand(data.num_edges, 3, device=device) > 0.5
    expected = theirs(data.x, data.edge_index, edge_attr)
    out = accelerate(copy.deepcopy(theirs))(data.x, data.edge_index, edge_attr)
    torch.testing.assert_close(out, expected)


# Layers of PyG that fail at another place each: in PyG's `forward`, a message, a kernel.
OF_PYG: dict[str, Callable[[], Any]] = {
    'GraphConv': lambda: pyg.GraphConv(IN, 4), 'LEConv': lambda: pyg.LEConv(IN, 4),
    'SGConv': lambda: pyg.SGConv(IN, 4), 'ChebConv': lambda: pyg.ChebConv(IN, 4, 2),
    'ResGatedGraphConv': lambda: pyg.ResGatedGraphConv(IN, 4, edge_dim=3),
    'GINEConv': lambda: pyg.GINEConv(torch.nn.Linear(IN, 4), edge_dim=3),
    'RGCNConv': lambda: pyg.RGCNConv(IN, 4, 2), 'GCNConv': lambda: pyg.GCNConv(IN, 4),
    'GATv2Conv': lambda: pyg.GATv2Conv(IN, 4, edge_dim=3), 'SAGEConv': lambda: pyg.SAGEConv(IN, 4),
    'TransformerConv': lambda: pyg.TransformerConv(IN, 4, edge_dim=3),
    'GINConv': lambda: pyg.GINConv(torch.nn.Linear(IN, 4)),
}  # fmt: skip


@pytest.mark.parametrize('name', OF_PYG)
@pytest.mark.parametrize('prepared', [False, True])
@pytest.mark.parametrize('small', ['pyg', 'kernel'])
def test_layer_names_the_argument(
    device: torch.device, name: str, prepared: bool, small: str, raises: Any
) -> None:
    data = small_graph(device)
    data = transforms.ToCSR()(data) if prepared else data
    layer = accelerate(OF_PYG[name]()).to(device)
    names = inspect.signature(layer.forward).parameters
    all_edges = {
        'edge_weight': torch.rand(data.num_edges, device=device),
        'edge_attr': torch.rand(data.num_edges, 3, device=device),
        'edge_type': torch.zeros(data.num_edges, dtype=torch.long, device=device),
    }
    edges = {key: value for key, value in all_edges.items() if key in names}
    with small_graphs(small):
        assert layer(data.x, data.edge_index, **edges).isfinite().all()
        for key, value in edges.items():
            with raises(ValueError, match=rf"'{key}' must have shape \[{data.num_edges}"):
                layer(data.x, data.edge_index, **edges | {key: value[:-1]})
        if device.type == 'cpu':  # PyG's own code of a GPU would stop the device.
            with raises((IndexError, ValueError), match="'edge_index"):
                layer(data.x[: NODES // 2], data.edge_index, **edges)
        with raises(ValueError, match=f"'x' must have {IN} columns"):
            layer(data.x[:, 1:], data.edge_index, **edges)
        with raises((TypeError, ValueError), match="'edge_index'"):
            layer(data.x, torch.rand(2, data.num_edges, device=device), **edges)
        with raises(ValueError, match="'edge_index'"):
            layer(data.x, torch.zeros(5, 2, dtype=torch.long, device=device), **edges)


@pytest.mark.parametrize(
    ('name', 'attribute', 'value', 'text'),
    [
        *[(name, *case) for name in ('FusedGATConv', 'FusedGATv2Conv') for case in (
            ('dropout', 7.0, 'must be from 0 to 1, got 7.0'),
            ('dropout', 'a', 'must be a number, got str'),
            ('negative_slope', 'a', 'must be a number, got str'),
            ('bias', torch.nn.Parameter(torch.zeros(5)), r'must have shape \[4\], .* got \[5\]'),
        )],
        ('FusedGCNConv', 'bias', torch.nn.Parameter(torch.zeros(5)), r'.* \[4\], .* got \[5\]'),
        *[(name, *case) for name in ('SampledGCNConv', 'SampledSAGEConv') for case in (
            ('sample', 'foo', "must be one of .*, got 'foo'"),
            ('num_samples', 0, 'must be at least 1, got 0'),
            ('num_samples', 'a', 'must be an integer, got str'),
            ('strategy', 'foo', "must be one of .*, got 'foo'"),
        )],
    ],
)  # fmt: skip
def test_layer_names_an_attribute_that_was_changed(
    name: str, attribute: str, value: Any, text: str
) -> None:
    options = {'num_samples': 2} if name.startswith('Sampled') else {}
    layer = getattr(nn, name)(IN, 4, **options).train(not options)
    data = small_graph(torch.device('cpu'))
    setattr(layer, attribute, value)
    with pytest.raises((TypeError, ValueError), match=f"'{attribute}' {text}"):
        layer(data.x, data.edge_index)


@pytest.mark.parametrize('name', ['FusedGATConv', 'FusedGCNConv', 'PathPreparedGCNConv'])
def test_bias_that_pyg_takes(device: torch.device, name: str) -> None:
    """Of a wider dtype than the weights, or one for all channels."""
    data = small_graph(device)
    for bias in (torch.rand(4, dtype=torch.double), torch.rand(1)):
        layer = getattr(nn, name)(IN, 4).to(device)
        layer.bias = torch.nn.Parameter(bias.to(device))
        out, expected = (each(data.x, data.edge_index) for each in (layer, layer.to_base()))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(TypeError, match="'x' must have the dtype of the layer's .*float32"):
            layer(data.x.double(), data.edge_index)


@pytest.mark.parametrize('small', ['pyg', 'kernel'])
def test_weights_in_place_of_sizes(device: torch.device, small: str) -> None:
    data = small_graph(device)
    layer = accelerate(pyg.SAGEConv(IN, 4)).to(device)
    with small_graphs(small), pytest.raises(ValueError, match="'size' must be a pair .* weights"):
        layer(data.x, data.edge_index, torch.rand(data.num_edges, device=device))


@pytest.mark.parametrize('end', [0, 1])
@pytest.mark.parametrize('wrong', [-1, NODES])
@pytest.mark.parametrize('numbers', [False, True])
def test_relations_of_nodes_that_are_none(end: int, wrong: int, numbers: bool) -> None:
    data = small_graph(torch.device('cpu'))
    layer = accelerate(pyg.RGCNConv(NODES if numbers else IN, 4, 3))
    edge_type = torch.arange(data.num_edges) % 3
    text = rf"'edge_index\[{end}\]' must hold .* in \[0, {NODES}\), got values from .*{wrong}"
    x = None if numbers else data.x
    with small_graphs('kernel'), pytest.raises(IndexError, match=text):
        layer(x, with_end(end, wrong)(data.edge_index), edge_type)


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


@pytest.mark.parametrize('key', ['edge_attr', 'edge_weight', 'edge_type'])
@pytest.mark.parametrize('name', ['GroupSizes', 'Prepare', 'ToCSR'])
def test_transform_warns_of_rows_of_edges(name: str, key: str) -> None:
    data = small_graph(torch.device('cpu'))
    data[key] = torch.ones(data.num_edges - 1)
    with pytest.warns(UserWarning, match=f"'{key}' has not a row for each edge, so ToCSR does"):
        out = TRANSFORMS[name]()(data)
    assert out[key] is data[key]
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        data.edge_label, data[key] = torch.ones(3), torch.ones(data.num_edges)
        TRANSFORMS[name]()(data)


@pytest.mark.parametrize('data', [None, [Data()], torch.ones(3)])
@pytest.mark.parametrize('name', TRANSFORMS)
def test_transform_refuses_what_is_no_data(name: str, data: Any) -> None:
    with pytest.raises(TypeError, match="(?i)'?data'? .*got"):
        TRANSFORMS[name]()(data)


def test_what_is_no_number_of_nodes_or_graph() -> None:
    edges = small_graph(torch.device('cpu')).edge_index
    with pytest.raises(TypeError, match="'data.num_nodes' must be an integer, got str"):
        transforms.ToCSR()(Data(edge_index=edges, num_nodes='a'))
    with pytest.raises(TypeError, match="'size' must be a pair of the numbers .*, got int"):
        prepare_edge_index(edges, NODES)
    with pytest.raises(TypeError, match="'edge_index' must be an EdgeIndex, .*, got Tensor"):
        set_group_sizes(edges, 4)
    with pytest.raises(TypeError, match="'x' must be a tensor, got list"):
        nn.MaxK(2)([1.0])


def test_options_of_prepare() -> None:
    with pytest.raises(TypeError, match=r"Prepare got unexpected arguments \['foo'\]"):
        transforms.Prepare(2, foo=1)
    with pytest.raises(ValueError, match="'group_sizes' must be one of .* got 'x'"):
        transforms.Prepare(2, group_sizes='x')


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
            (ValueError, 'num_neighbors', [[], [-2], [2**31]]),
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


def test_loader_refuses_a_list() -> None:
    data = small_graph(torch.device('cpu'))
    with pytest.raises(TypeError, match="'data' must be one graph"):
        FastNeighborLoader([data, data], [3])


class OtherName(pyg.MessagePassing):
    def forward(self, x: Tensor, ei: Tensor) -> Tensor:
        return self.propagate(ei, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()


@pytest.mark.parametrize('how', ['pyg', 'kernel'])
def test_edges_of_another_name_that_are_turned(how: Any) -> None:
    layer = accelerate(OtherName())
    edges = torch.tensor([[0, 1], [1, 2], [2, 0]])
    with small_graphs(how), pytest.raises(ValueError, match=r'edge_index\.t\(\)'):
        layer(torch.rand(3, 4), edges)


class WithoutUpdate(pyg.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.edge_updater(edge_index, x=x)


def test_edge_updater_without_its_method() -> None:
    data = small_graph(torch.device('cpu'))
    with pytest.raises(NotImplementedError, match="^'edge_updater' needs a method 'edge_update'"):
        accelerate(WithoutUpdate())(data.x, data.edge_index)


def test_a_container_of_types_tells_of_which_edges(device: torch.device) -> None:
    of_types = {('a', 'r', 'b'): pyg.SAGEConv((IN, IN), 4), ('b', 's', 'a'): pyg.SAGEConv(IN, 4)}
    layer = accelerate(pyg.HeteroConv(of_types)).to(device)
    x = {name: torch.randn(NODES, IN, device=device) for name in 'ab'}
    edges = {kind: torch.randint(NODES, (2, 30), device=device) for kind in of_types}
    edges['b', 's', 'a'] = edges['b', 's', 'a'].float()
    text = r"'edge_index' must hold integers, .*, for edges \('b', 's', 'a'\)$"
    with pytest.raises(TypeError, match=text):
        layer(x, edges)
    edges['b', 's', 'a'] = edges['a', 'r', 'b']
    text = r"for edges \('b', 's', 'a'\): no features of 'b' are given, but of \['a', 'c'\]$"
    with pytest.raises(TypeError, match=text):
        layer({'a': x['a'], 'c': x['b']}, edges)


def test_points_without_positions(device: torch.device) -> None:
    data, pos = small_graph(device), torch.rand(NODES, 3, device=device)
    layer = accelerate(pyg.PointNetConv(torch.nn.Linear(IN + 3, 4))).to(device)
    with pytest.raises(TypeError, match="^'pos' must be given, got None"):
        layer(data.x, None, data.edge_index)
    layer = accelerate(pyg.PointTransformerConv(IN, 4)).to(device)
    with pytest.raises(ValueError, match=f"^'pos' must have a row for each of {NODES} nodes"):
        layer(data.x, pos[1:], data.edge_index)


def test_an_argument_of_a_call_that_is_misspelt(device: torch.device) -> None:
    layer, data = accelerate(pyg.GCNConv(IN, 4)).to(device), small_graph(device)
    with pytest.raises(TypeError, match="argument 'edge_weights'; did you mean 'edge_weight'"):
        layer(data.x, data.edge_index, edge_weights=torch.ones(1))
    with pytest.raises(TypeError, match="argument 'foo'$"):
        layer(data.x, data.edge_index, foo=1)


@pytest.mark.parametrize('how', ['pyg', 'kernel'])
def test_weights_of_edges_in_the_place_of_a_size(device: torch.device, how: str) -> None:
    """PyG does not look at it beside an EdgeIndex."""
    data = small_graph(device)
    prepared, _ = prepare_edge_index(data.edge_index, (NODES, NODES))
    weight = torch.rand(data.num_edges, device=device)
    text = "'size' must be a pair .*, got Tensor: the layer takes no weights of edges"
    for layer in (pyg.SAGEConv(IN, 4), pyg.GINConv(torch.nn.Linear(IN, 4))):
        for edges in (data.edge_index, prepared):
            with small_graphs(how), pytest.raises(ValueError, match=text):
                accelerate(layer).to(device)(data.x, edges, weight)
