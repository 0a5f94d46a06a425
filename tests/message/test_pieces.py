"""Long rows in pieces: their kernels by numpy, and results and gradients on each device."""

import copy
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import MessagePassing
from torch_geometric.nn import conv as pyg
from torch_geometric.utils import scatter, softmax

import pyg_fast
from pyg_fast.graph.graph import graph_of
from pyg_fast.ops import message_passing
from pyg_fast.sparse.groups import Groups, groups_of
from tests._report import why_pygs

from ._by_numpy import by_numpy
from ._parts import (
    EDGE,
    SRC,
    Out,
    Pass,
    Pieces,
    Program,
    Schedule,
    _cuda,
    _passes,
    _pieces,
    divide_rows,
)

pytest.importorskip('triton')
N = 12


SIZES = st.integers(0, 2**40)


@given(num_edges=SIZES, num_rows=SIZES)
def test_sizes(num_edges: int, num_rows: int) -> None:
    """Memory of partial results is bounded, and rows are divided that are long beside others."""
    pieces = divide_rows(num_edges, num_rows, None, num_edges)
    assert isinstance(pieces, Pieces)
    size, longest, num_blocks, _ = pieces
    if num_blocks == 0:
        assert size == longest == num_edges <= 2**13
        return
    assert size >= 128
    assert size <= longest <= max(size, num_edges / 2**10)
    assert longest == size or longest * num_rows <= 4 * num_edges
    assert num_blocks <= 2**14
    assert num_blocks * size >= num_edges > 2**13
    for programs in (None, 64, 3000):
        count, slots = pieces.programs(programs)
        assert 2 * num_blocks <= count * slots
        assert count <= min(num_blocks, programs or 2**12)


@given(num_edges=SIZES, num_rows=SIZES, most=SIZES)
def test_known_longest_row(num_edges: int, num_rows: int, most: int) -> None:
    """There are no pieces where no row is long."""
    plain = divide_rows(num_edges, num_rows, None, num_edges)
    pieces = divide_rows(num_edges, num_rows, None, min(most, num_edges))
    assert isinstance(plain, Pieces)
    assert pieces == (plain if most > plain.longest else (num_edges, num_edges, 0, False))


@given(num_edges=SIZES, num_rows=SIZES, most=st.integers(1, 2**13), size=st.integers(1, 2**12))
def test_groups_of_long_rows(num_edges: int, num_rows: int, most: int, size: int) -> None:
    """Those of a prepared graph divide its rows if one is long, and has not too many."""
    groups = Groups(*[torch.empty(0)] * 5, 0, most, size)
    plain = divide_rows(num_edges, num_rows, None, num_edges)
    pieces = divide_rows(num_edges, num_rows, groups, min(groups.most_edges, num_edges))
    assert isinstance(plain, Pieces)
    divides = most <= 2**11 and size <= 2**10
    longest = plain.longest
    if divides:
        mean = num_edges // max(1, num_rows)
        longest = max(128, -(-num_edges // 2**14), min(4 * mean, num_edges // 2**12))
    if num_edges <= 2**13 or min(most * size, num_edges) <= longest:
        assert pieces == (num_edges, num_edges, 0, False)
    else:
        assert pieces is groups if divides else pieces == plain


every_row = partial(divide_rows, few=0)


def together(*numbers: Any, least: int) -> Any:
    """As in dense graphs, where one kernel takes rows and pieces."""
    pieces = every_row(*numbers, least=least)
    return pieces._replace(together=pieces.num_blocks > 0)  # type: ignore[call-arg]


def few_programs(*numbers: Any, least: int) -> Any:
    """As in large graphs, where each program has several blocks, and a row more edges than one."""
    pieces = every_row(*numbers, least=least)
    if isinstance(pieces, Groups):
        return pieces
    return pieces._replace(longest=pieces.longest + pieces.longest // 2)


def cuda_pass(
    outs: list[str], rowptr: list[int], x: Tensor, least: int, few: bool, known: bool,
    together: bool,
) -> tuple[list[Tensor], list[Tensor | None]]:  # fmt: skip
    """Reductions of the values of edges by the kernels of CUDA, run by numpy."""
    program = Program()
    at = program.add('load', (), ('edge', 0), x.shape[1:], 'float32', EDGE)
    source = program.add('load', (), ('src', 1), x.shape[1:], 'float32', SRC)
    value = program.pointwise('add', at, source)
    one = Pass(program, tuple(Out(value, kind, 'float32') for kind in outs), 'dst')
    starts = torch.tensor(rowptr, dtype=torch.int32)
    groups = groups_of(starts, least) if known else None
    columns = torch.zeros(len(x), dtype=torch.int32)
    schedule = Schedule(starts, columns, None, len(rowptr) - 1, groups, len(x), len(x))
    inputs = {('edge', 0): x, ('src', 1): torch.zeros(1, *x.shape[1:])}

    def how(*numbers: Any) -> Any:
        pieces = (few_programs if few else every_row)(*numbers, least=least)
        if isinstance(pieces, Groups):
            return pieces
        return pieces._replace(together=together and pieces.num_blocks > 0)

    def any_rows(x: Tensor, size: int) -> Tensor:
        return torch.randint(-2, len(rowptr) + 1, (size,), dtype=x.dtype)

    with by_numpy(how), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, 'new_empty', any_rows)  # Nobody clears this memory.
        patch.setattr(_cuda, '_MANY_ROWS', 1 if few else 100)
        if few:
            patch.setattr(_pieces, '_MAX_PROGRAMS', 40)
            patch.setattr(_pieces, '_MAX_BLOCKS', 700)
            patch.setattr(_pieces, '_MAX_OF_FEW', 2)
        return _cuda.run_pass_cuda(one, schedule, inputs, torch.float32, None)


@given(
    degrees=st.lists(st.one_of(st.integers(0, 4), st.integers(0, 70)), min_size=1, max_size=9),
    least=st.integers(1, 9), first=st.sampled_from([0, 0, 3]), left=st.sampled_from([0, 0, 20]),
    few=st.booleans(), known=st.booleans(), together=st.booleans(),
)  # fmt: skip
def test_every_row(
    degrees: list[int],
    least: int,
    first: int,
    left: int,
    few: bool,
    known: bool,
    together: bool,
) -> None:
    """Rows that begin and end anywhere in blocks, edges before the first row and after the last."""
    rowptr = [*itertools.accumulate(degrees, initial=first)]
    x = torch.randint(-100, 100, (rowptr[-1] + left, 1)).float()
    (total, best), (_, edge) = cuda_pass(['sum', 'max'], rowptr, x, least, few, known, together)
    for row, (begin, end) in enumerate(zip(rowptr, rowptr[1:], strict=False)):
        own = x[begin:end, 0]
        assert total[row] == own.sum()
        assert best[row] == (own.max() if end > begin else 0)
        assert edge[row] == (begin + own.argmax() if end > begin else -1)  # type: ignore[index]


def test_not_finite() -> None:
    """The first NaN or infinity, in whichever piece."""
    x = torch.arange(40.0).view(-1, 1).repeat(1, 4)
    x[17, 0] = x[29, 0] = float('nan')
    x[5, 1] = x[38, 1] = float('inf')
    x[3, 2] = -float('inf')
    for least, together in ((4, False), (4, True), (128, False)):
        (high, low), (at_high, at_low) = cuda_pass(
            ['max', 'min'], [0, 40, 40], x, least, False, False, together
        )
        assert at_high.tolist() == [[17, 5, 39, 39], [-1] * 4]  # type: ignore[union-attr]
        assert at_low.tolist() == [[17, 0, 3, 0], [-1] * 4]  # type: ignore[union-attr]
        assert high[0].isnan().tolist() == low[0].isnan().tolist() == [True, False, False, False]
        assert high[0, 1] == float('inf')
        assert low[0, 2] == -float('inf')


def test_long_sums() -> None:
    """No thread adds many numbers one after another, which would lose the last ones."""
    x = torch.full((60_000, 1), 0.1)
    x[0] = 2.0**11
    exact = x.double().sum()
    for together in (False, True):
        (total,), _ = cuda_pass(['sum'], [0, 60_000], x, 600, False, False, together)
        assert abs(total[0, 0] - exact) <= 2e-6 * exact
    assert abs(x.flatten().numpy().cumsum()[-1] - exact) > 1e-5 * exact  # One by one it is not.


class Plain(MessagePassing):
    def __init__(self, aggr: Any) -> None:
        super().__init__(aggr, node_dim=0)
        self.scale = torch.nn.Parameter(torch.randn(6))
        self.lin = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=w)

    def message(self, x_i: Tensor, x_j: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(x_j * self.scale + x_i) * self.lin(w)


class Attends(Plain):
    def message(  # type: ignore[override]
        self, x_i: Tensor, x_j: Tensor, w: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        score = (x_i * x_j * self.scale).unflatten(-1, (2, -1)).sum(-1, keepdim=True)
        return softmax(score, index, num_nodes=size_i) * (x_j + w).unflatten(-1, (2, -1))


class AttendsAndMore(Plain):
    """Its message is no multiple of its softmax."""

    def message(  # type: ignore[override]
        self, x_i: Tensor, x_j: Tensor, w: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        score = (x_i * x_j * self.scale).sum(-1, keepdim=True)
        return self.lin(w) + softmax(score, index, num_nodes=size_i) * x_j


class Rotates(Plain):
    """Values of edges and a parameter that are half as wide as the result."""

    def __init__(self, aggr: Any) -> None:
        super().__init__(aggr)
        self.phase = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, edge_index: Tensor, w: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=w[:, :3])

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        (a, b), angle = x_j.chunk(2, -1), w + self.phase
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


LAYERS = [
    *((Plain, aggr) for aggr in ('sum', 'mean', 'max', 'min', 'var', ['mean', 'max', 'std'])),
    (Attends, 'sum'), (Attends, 'mean'), (AttendsAndMore, 'sum'), (AttendsAndMore, 'max'),
]  # fmt: skip
of_layer = pytest.mark.parametrize(
    ('kind', 'aggr'), LAYERS, ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)


def hub(end: int, share: float, num_edges: int, num_nodes: int) -> Tensor:
    """Edges of which a share comes from (end 0) or goes to (end 1) one node."""
    edges = torch.randint(num_nodes, (2, num_edges))
    edges[end, : int(share * num_edges)] = 1
    return edges[:, torch.randperm(num_edges)]


def training(conv: Any, x: Tensor, edges: Any, w: Tensor, weight: Tensor | None) -> list[Tensor]:
    """The result, and the gradients of features, values of edges and parameters."""
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    out = conv(leaves[0], edges, leaves[1])
    weight = torch.ones_like(out) if weight is None else weight
    leaves += [p for p in conv.parameters() if p.requires_grad]
    grads = torch.autograd.grad(out, leaves, weight, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(
    ('kind', 'aggr'), [*LAYERS, (Rotates, 'sum'), (Rotates, 'max')],
    ids=lambda x: x.__name__ if isinstance(x, type) else str(x),
)  # fmt: skip
def test_training_by_numpy(kind: type, aggr: Any) -> None:
    """Both passes of CUDA, with hubs of all edges and of half."""
    conv = kind(aggr).double()
    fast = pyg_fast.accelerate(copy.deepcopy(conv).float())
    for end, share, least, how, size in ((1, 1.0, 5, every_row, None), (0, 0.5, 7, every_row, 3),
                                         (1, 0.5, 5, together, None)):  # fmt: skip
        x, w = (torch.randn(n, 6, dtype=torch.float64) for n in (N, 90))
        edges = hub(end, share, 90, N)
        weight = torch.randn_like(conv(x, edges, w))
        wanted = training(conv, x, edges, w, weight)
        with by_numpy(partial(how, least=least), size) as names:
            found = training(fast, x.float(), edges, w.float(), weight.float())
        assert not why_pygs(fast)
        assert ('message_owners' in names) == (how is together)
        assert names.count('message_combine') >= 2
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def exact_training(
    conv: Any, x: Tensor, edges: Tensor, w: Tensor, weight: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """What :func:`training` returns, in float64, each with the sum of its absolute terms."""
    conv = copy.deepcopy(conv).double()
    x, w, weight, index, num_edges = x.double(), w.double(), weight.double(), edges[1], len(w)
    params = {name: p.detach() for name, p in conv.named_parameters()}
    # Each edge has its own ends and parameters: their gradients are the terms.
    own = {name: p.expand(num_edges, *p.shape) for name, p in params.items()}
    own |= {'x_i': x[index], 'x_j': x[edges[0]], 'w': w}
    own = {name: value.clone().requires_grad_() for name, value in own.items()}
    del conv.scale
    conv.scale = own['scale']
    conv.lin = torch.nn.Identity()
    conv.lin.forward = lambda a: (a.unsqueeze(1) * own['lin.weight']).sum(-1) + own['lin.bias']
    args = (own['x_i'], own['x_j'], own['w'])
    message = conv.message(*args, *([] if type(conv) is Plain else [index, len(x)]))
    out = conv.aggr_module(message, index, dim_size=len(x), dim=0)
    grads = torch.autograd.grad(out, own.values(), weight, allow_unused=True)
    of = {name: grad for name, grad in zip(own, grads, strict=True) if grad is not None}
    size = message.abs().max()
    if conv.aggr in ('sum', 'mean'):
        size = scatter(message.abs(), index, 0, len(x), reduce=conv.aggr)
    found = [out.detach()], [size]
    for to, some in zip(found, (of, {name: grad.abs() for name, grad in of.items()}), strict=True):
        x_grad = torch.zeros_like(x).index_add_(0, index, some['x_i'])
        x_grad.index_add_(0, edges[0], some['x_j'])
        to += [x_grad, some['w'], *(some[name].sum(0) for name in params if name in some)]
    return list(zip(*found, strict=True))


@of_layer
def test_hubs(kind: type, aggr: Any, device: torch.device) -> None:
    """Sums are as exact as pairwise sums at any degree, and have the same bits at every call."""
    on_cuda = device.type == 'cuda'
    count, num_edges = 1_000, 300_000 if on_cuda else 50_000
    conv = kind(aggr).to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    x, w = (torch.rand(n, 6, device=device) for n in (count, num_edges))
    for end, share in itertools.product((0, 1), (0.1, 0.95)):
        edges = hub(end, share, num_edges, count).to(device)
        weight = torch.randn_like(conv(x, edges, w))
        found = training(fast, x, edges, w, weight)
        assert not why_pygs(fast)
        again = training(fast, x, edges, w, weight)
        exact = exact_training(conv, x, edges, w, weight)
        for a, b, (value, size) in zip(found, again, exact, strict=True):
            assert a.equal(b)
            # A product of matrices over all nodes is that of a library.
            limit = 1e-5 if a.shape == (6, 6) and not on_cuda else 2e-6
            assert (a - value).abs().max() <= limit * size.max()


PYG_LAYERS = {
    'GINE': (lambda: pyg.GINEConv(torch.nn.Linear(6, 6), edge_dim=3), 3),
    'GINE, product of matrices': (lambda: pyg.GINEConv(torch.nn.Linear(16, 6), edge_dim=20), 20),
    'PNA': (lambda: pyg.PNAConv(6, 6, ['mean', 'max', 'min', 'std'], ['identity'],
                                torch.tensor([0, 5])), None),
    'Transformer, edges': (lambda: pyg.TransformerConv(6, 4, heads=2, edge_dim=5), 5),
    'Transformer, tiles of heads': (lambda: pyg.TransformerConv(6, 24, heads=3), None),
    'Transformer, wide tiles': (lambda: pyg.TransformerConv(6, 24, heads=8, edge_dim=5), 5),
    'FeaSt': (lambda: pyg.FeaStConv(6, 5, heads=2), None),
}  # fmt: skip


@pytest.mark.parametrize('name', PYG_LAYERS)
def test_layers_by_numpy(name: str) -> None:
    """Programs of several tiles, of many rows and of products of matrices."""
    make, edge_dim = PYG_LAYERS[name]
    conv = make().double()
    fast = pyg_fast.accelerate(copy.deepcopy(conv).float())
    x = torch.randn(N, 16 if 'product' in name else 6, dtype=torch.float64)
    edges = hub(1, 0.5, 70, N)
    w = () if edge_dim is None else (torch.randn(70, edge_dim, dtype=torch.float64),)

    def step(conv: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in (x, *w)]
        out = conv(leaves[0], edges, *leaves[1:])
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        return [out, *torch.autograd.grad(out, [*leaves, *conv.parameters()], weight)]

    wanted = step(conv, torch.float64)
    with by_numpy(partial(few_programs, least=4)) as names:
        found = step(fast, torch.float32)
    assert not why_pygs(fast)
    assert names.count('message_combine') >= 2
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-5)


def test_long_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program adds its sums over all edges to those in memory before they are long."""
    program = Program()
    at = program.add('load', (), ('edge', 0), (1,), 'float32', EDGE)
    one = Pass(program, (Out(at, 'total', 'acc'),), 'dst')
    num_rows, degree = 80, 100
    x = torch.full((num_rows * degree, 1), 0.1)
    x[0] = 2.0**10
    rowptr = torch.arange(0, len(x) + 1, degree, dtype=torch.int32)
    columns = torch.zeros(len(x), dtype=torch.int32)
    schedule = Schedule(rowptr, columns, None, num_rows, None, len(x), 1)
    one_program = {'most_programs': lambda *_: 1, 'choose_tile': lambda _: _cuda.Tile(1, (1,), 1)}
    for name, choice in one_program.items():
        monkeypatch.setattr(_passes, name, choice)
    with by_numpy(partial(every_row, least=100_000)):
        (total,), _ = _cuda.run_pass_cuda(one, schedule, {('edge', 0): x}, torch.float32, None)
    exact = x.double().sum()
    assert total.shape == (1, 1)
    assert abs(total - exact) <= 1e-5 * exact
    assert abs(x.flatten().numpy().cumsum()[-1] - exact) > 1e-4 * exact  # One by one it is not.


def test_variance_of_equal_messages(device: torch.device) -> None:
    """It is 0, however large they are and however many."""
    for num_edges in (3_000, 300_000 if device.type == 'cuda' else 3_000):
        edges = hub(1, 0.5, num_edges, N).to(device)
        x = torch.tensor([0.1, 1 / 3, 1e4 / 7, -1e-3]).to(device)
        src, dst = x.expand(N, 4), torch.rand(N, 4, device=device)
        for fn in (lambda a, b: a * b, lambda a, b: (a * b).sum(-1, keepdim=True) + a):
            out = message_passing(edges, fn, {'a': src}, {'b': dst}, reduce='var', strict=True)
            assert out.eq(0).all()


def test_variance_of_equal_messages_by_numpy() -> None:
    edges, x = hub(1, 0.5, 90, N), torch.tensor([0.1, 1e4 / 7]).expand(N, 2)
    with by_numpy(partial(every_row, least=4)) as names:
        out = message_passing(edges, lambda a: a * 0.3, {'a': x}, reduce='var', strict=True)
    assert names == ['message_pass', 'message_pass', 'message_combine']
    assert out.eq(0).all()


def test_memory(cuda: torch.device) -> None:
    """Partial results take at most 32,768 rows, whatever the number of edges."""
    edges = torch.stack([torch.randint(1_000, (3_000_000,)), torch.zeros(3_000_000).long()])
    graph = graph_of(edges.to(cuda), 1_000, 1_000)
    x = torch.rand(1_000, 32, device=cuda)
    message_passing(graph, torch.sigmoid, {'input': x}, strict=True)
    torch.cuda.empty_cache()  # Torch counts a cached block, which may be larger, as a whole.
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    message_passing(graph, torch.sigmoid, {'input': x}, strict=True)
    most = torch.cuda.max_memory_allocated() - before
    assert most <= (32_768 + 2 * 1_000) * 32 * 4 + 2**18


def test_wide_tiles() -> None:
    """For short rows, unless only narrower tiles fit into the cache."""

    def is_wide(
        num_rows: int, num_cols: int, columns: int = 256, size: int = 4, num_edges: int = 32
    ) -> bool:
        col = torch.zeros(num_edges, dtype=torch.int32)
        of_rows = Schedule(col, col, None, num_rows, None, num_edges, num_cols)
        return _cuda._in_wide_tiles(of_rows, size, columns)

    assert is_wide(1, 40_000)
    assert not is_wide(1, 40_000, 512)
    assert is_wide(1, 20_000, 512)
    assert is_wide(1, 1_000_000)
    assert not is_wide(1, 150_000)
    assert not is_wide(0, 40_000)
    assert not is_wide(1, 40_000, num_edges=33)
    assert is_wide(1, 40_000, size=2, num_edges=64)
    assert not is_wide(1, 40_000, size=2, num_edges=65)


@pytest.mark.parametrize('heads', [3, 4, 16])
@pytest.mark.parametrize('half', [False, True])
@pytest.mark.parametrize('role', ['grad', 'dst'])
def test_columns_of_wide_tiles(heads: int, half: bool, role: str) -> None:
    """The narrowest first; more only where there are as many, in gradients of half types."""
    source: Any = SimpleNamespace(
        sizes=(heads, 64), tiled=True, totals=False, has_maps=False, num_tiles=1, half=half,
        loads=((role, 0),), of_softmax=role == 'grad',
    )  # fmt: skip
    tiles = _cuda.choose_wide_tiles(source)
    wide = [(tile.edges, *tile.columns) for tile in tiles]
    first = {3: [], 4: [(1, 4, 64)], 16: [(1, 4, 64)]}[heads]
    more = heads == 16 and half and role == 'grad'
    assert wide == [*first, *[(1, 8, 64)] * more]
    assert {tile.stages for tile in tiles} <= {(3 if role == 'grad' else 2) if half else 1}
