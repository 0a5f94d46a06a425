"""Messages that gather rows of nodes themselves, or read no source, or tuples of edge features."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import scatter, softmax

import pyg_fast
from tests._compiled import assert_like_pyg
from tests._report import why_pygs

N, E, F = 60, 300, 8


class Layer(MessagePassing):
    def __init__(self, flow: str = 'source_to_target') -> None:
        super().__init__(aggr='sum', flow=flow)
        self.emb = torch.nn.Embedding(N, F)

    def forward(self, x: Any, edge_index: Tensor, z: Any) -> Tensor:
        return self.propagate(edge_index, x=x, z=z)


class Parameter(Layer):
    def message(self, x_j: Tensor, edge_index_j: Tensor) -> Tensor:
        return x_j * self.emb.weight[edge_index_j]


class Embedding(Layer):
    def message(self, x_j: Tensor, edge_index_i: Tensor) -> Tensor:
        return x_j * self.emb(edge_index_i)


class Both(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index: Tensor) -> Tensor:
        row, col = edge_index
        return x_j * torch.sigmoid(2 * z)[row] - z.index_select(0, col)


class Softmax(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index: Tensor, edge_index_i: Tensor) -> Tensor:
        return z[edge_index[0]] * softmax(x_j, edge_index_i, num_nodes=z.size(0))


class SoftmaxByRow(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index: Tensor) -> Tensor:
        target = 1 if self.flow == 'source_to_target' else 0
        both = edge_index.unbind()
        weight = softmax(x_j, edge_index[target]) + softmax(2 * x_j, edge_index[target - 2])
        return (weight + softmax(3 * x_j, both[target])) * z[both[0]]


class SoftmaxInForward(Layer):
    """Over the sources of edges."""

    def forward(self, x: Tensor, edge_index: Tensor, z: Tensor) -> Tensor:
        source = edge_index[0 if self.flow == 'source_to_target' else 1]
        alpha = softmax(x[source] * z[source], source, num_nodes=x.size(0))
        return self.propagate(edge_index, x=x, alpha=alpha)

    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return alpha * x_j


class Own(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j.relu()

    def aggregate(
        self, inputs: Tensor, z: Tensor, edge_index: Tensor, index: Tensor, dim_size: int
    ) -> Tensor:
        return scatter(inputs * z[edge_index[1]] + z[edge_index[0]], index, 0, dim_size)


class Sourceless(Layer):
    def message(self, x_i: Tensor, z: Tensor) -> Tensor:
        return x_i.relu() * z


class OnlyTarget(Layer):
    def message(self, x_i: Tensor) -> Tensor:
        return x_i.sigmoid()


class Parts(Layer):
    def message(self, x_j: Tensor, z: Any) -> Tensor:
        return x_j * z[0] + z[1] * (1 if z[2] is None else 2)


class OnDiagonal(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return torch.diag_embed(x_j).sum(1)


class Product(Layer):
    def message(self, x_j: Tensor, edge_index_j: Tensor) -> Tensor:
        return x_j * edge_index_j.view(-1, 1)


class Compares(Layer):
    def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
        return x_j * (edge_index[0] < edge_index[1]).view(-1, 1)


class Flat(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index: Tensor) -> Tensor:
        return x_j * z[edge_index.t()[:, 0]]


class OverSources(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index_j: Tensor) -> Tensor:
        return x_j * softmax(x_j, edge_index_j)


class OverRow(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index: Tensor) -> Tensor:
        return x_j * softmax(x_j, edge_index[0])


class OverSized(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index: Tensor, size_i: int) -> Tensor:
        return x_j * scatter(x_j, edge_index[0], 0, size_i, 'max')[edge_index[0]]


class Size(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index_j: Tensor) -> Tensor:
        return x_j * z[edge_index_j] / z.size(0)


class Aggregated(Layer):
    def message(self, x_j: Tensor, index: Tensor, edge_index_j: Tensor, dim_size: int) -> Tensor:
        return x_j * scatter(x_j, index, 0, dim_size)[edge_index_j]


def call(rows: int, num_edges: int, device: torch.device, of: str = 'rows') -> list[Any]:
    """The arguments of a call, on a graph of so many nodes."""
    generator = torch.Generator().manual_seed(rows + num_edges)

    def random(count: int) -> Tensor:
        x = torch.randn(count, F, generator=generator, dtype=torch.float64)
        return x.to(device).requires_grad_()

    edge_index = torch.randint(rows, (2, num_edges), generator=generator).to(device)
    z: Any = random(rows if of == 'rows' else num_edges)
    if of == 'parts':
        z = (z, random(num_edges), None)
    return [random(rows), edge_index, z]


def gradients(conv: Any, args: list[Any]) -> list[Tensor | None]:
    """The result of a layer and all gradients."""
    out = conv(*args)
    parts = args[2] if isinstance(args[2], tuple) else args[2:]
    leaves = [x for x in (args[0], *parts, *conv.parameters()) if isinstance(x, Tensor)]
    weight = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)]


def check(theirs: Layer, ours: Any, args: list[Any]) -> None:
    for one, other in zip(gradients(theirs, args), gradients(ours, args), strict=True):
        torch.testing.assert_close(
            other if other is not None or one is None else torch.zeros_like(one),
            one if one is not None or other is None else torch.zeros_like(other),
        )


TAKEN = [
    (Parameter, 'rows'), (Embedding, 'rows'), (Both, 'rows'), (Softmax, 'rows'), (Own, 'rows'),
    (SoftmaxByRow, 'rows'), (SoftmaxInForward, 'rows'), (OnDiagonal, 'rows'), (Sourceless, 'edges'),
    (OnlyTarget, 'rows'), (Parts, 'parts'),
]  # fmt: skip


@pytest.mark.parametrize(('cls', 'of'), TAKEN)
@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
def test_taken(cls: type[Layer], of: str, flow: str, device: torch.device) -> None:
    """Also in a second call of other sizes, and where a table has not a row for each node."""
    theirs = cls(flow).to(device).double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    check(theirs, ours, call(N, E, device, of))
    assert why_pygs(ours) == ''
    check(theirs, ours, call(N - 7, E + 50, device, of))
    check(theirs, ours, call(N, N, device, of))


@pytest.mark.parametrize(('cls', 'of'), TAKEN)
def test_compiled(cls: type[Layer], of: str, device: torch.device) -> None:
    calls = [call(*sizes, device, of) for sizes in ((N, E), (N, E + 50), (N - 7, E + 1))]
    if cls in (Parameter, Embedding):  # A table of N rows: its sizes are no symbols.
        assert_like_pyg(cls().double(), calls[:1], kernels=1, dynamic=False)
    else:
        backend = assert_like_pyg(cls().double(), calls)
        assert backend.kernels >= 1


class Forwards(Layer):
    def message(self, x_j: Tensor, z: Tensor, edge_index_i: Tensor) -> Tensor:
        return x_j * z[edge_index_i]

    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return 2 * super().propagate(edge_index, size=size, **kwargs)


def test_compiled_with_its_own_propagate(device: torch.device) -> None:
    calls = [call(*sizes, device) for sizes in ((N, E), (N, E + 50))]
    assert assert_like_pyg(Forwards().double(), calls).kernels >= 1


@pytest.mark.parametrize(
    ('cls', 'reason'),
    [
        (Product, "arithmetic of int64 ('edge_index_j')"),
        (Compares, "a comparison of int64 ('edge_index_j')"),
        (Flat, "of 'edge_index' has no kernel"),
        *[(each, 'over the edges of each source (') for each in (OverSources, OverRow, OverSized)],
        (Size, 'the number of edges or nodes is used as a number'),
        (Aggregated, "message gathers by 'edge_index_j' what it aggregated"),
    ],
)
def test_refused(cls: type[Layer], reason: str, device: torch.device) -> None:
    theirs = cls().to(device).double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    check(theirs, ours, call(N, E, device))
    assert reason in why_pygs(ours)
    if cls.__name__.startswith('Over'):
        assert 'utils.softmax(score, edge_index[0]' in pyg_fast.accelerate_report(ours)[0].cure


def test_rows_of_another_number(device: torch.device) -> None:
    """A table of more rows than there are nodes, which PyG's code reads."""
    theirs = Parameter().to(device).double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    check(theirs, ours, call(N - 7, E, device))
    assert why_pygs(ours) == f'message gathers from {N} rows by the indices of {N - 7} sources'
    check(theirs, ours, call(N, E, device))
    assert why_pygs(ours) == ''


@pytest.mark.parametrize(('make', 'reason'), [
    (lambda: torch.nn.Embedding(N, F, padding_idx=3), 'an embedding of nodes with padding_idx'),
    (lambda: torch.nn.Embedding(N, F, scale_grad_by_freq=True), 'sparse or scaled gradients'),
])  # fmt: skip
def test_embeddings_with_other_gradients(
    make: Callable[[], torch.nn.Embedding], reason: str, device: torch.device
) -> None:
    theirs = Embedding()
    theirs.emb = make()
    theirs = theirs.to(device).double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    check(theirs, ours, call(N, E, device))
    assert reason in why_pygs(ours)


@pytest.mark.parametrize('named', [True, False])
def test_number_of_sources_that_nothing_tells(named: bool, device: torch.device) -> None:
    """PyG accepts any sources where the message gathers no input of them."""
    theirs = (Sourceless if not named else Unread)().to(device).double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x, edge_index, z = call(N, E, device, 'edges')
    edge_index = torch.stack([edge_index[0] + 1000, edge_index[1]])
    check(theirs, ours, [x, edge_index, z])
    reason = "message reads 'edge_index_j' of an unknown number of sources: give `size`"
    assert why_pygs(ours) == (reason if named else '')


class Unread(Layer):
    def message(self, x_i: Tensor, z: Tensor, edge_index_j: Tensor) -> Tensor:
        assert edge_index_j is not None
        return x_i * z


def test_bipartite(device: torch.device) -> None:
    """A table has a row for each source, or for each destination: the numbers of these differ."""
    theirs = Both().to(device).double()
    ours = pyg_fast.accelerate(copy.deepcopy(theirs))
    x, edge_index, z = call(N, E, device)
    edge_index = edge_index % torch.tensor([[N], [20]], device=device)
    pair = x, torch.randn(20, F, dtype=torch.float64, device=device)
    for table in (z, z[:40], z[:20]):
        args = pair, edge_index % torch.tensor([[table.size(0)], [20]], device=device), table
        torch.testing.assert_close(ours(*args), theirs(*args))
        assert 'rows' in why_pygs(ours) or 'has no row for each node' in why_pygs(ours)


class WithoutTemplate(MessagePassing):
    """Its arguments have no types: PyG makes no template of it, and runs Python."""

    def forward(self, x: Any, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i, x_j, index, dim_size):  # type: ignore[no-untyped-def, override]
        return x_i * x_j + dim_size


@pytest.mark.parametrize('how', ['pyg', 'kernel'])
def test_pairs_without_a_template(how: Any, device: torch.device) -> None:
    """PyG's Python code takes the second of a pair for sources, if these are the second row."""
    x = torch.rand(9, 4, device=device), torch.rand(9, 4, device=device)
    edge_index = torch.randint(9, (2, 40), device=device)
    theirs = WithoutTemplate(flow='target_to_source')
    ours = pyg_fast.accelerate(WithoutTemplate(flow='target_to_source'))
    with pyg_fast.small_graphs(how):
        torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))
