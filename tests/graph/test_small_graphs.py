"""What runs layers on graphs of few edges."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator

import _forks
import pytest
import torch
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.nn import EdgeConv
from torch_geometric.nn import conv as pyg

import pyg_fast
from pyg_fast.graph import PreparedGraph
from pyg_fast.graph.readable import ReadableEdgeIndex
from pyg_fast.message._run import SLOWER_TWICE
from pyg_fast.nn import MaxKSAGEConv, SampledSAGEConv, gat
from pyg_fast.nn.message_passing import FusedMessagePassing
from pyg_fast.transforms import ToCSR
from tests._report import why_pygs

NODES, EDGES, WIDTH = 20, 90, 16


@pytest.fixture(autouse=True)
def by_default(limits: Callable[..., None]) -> Iterator[None]:
    kinds = itertools.product(('message', 'prepared message', 'sum'), (False, True))
    limits(few_edges=dict.fromkeys(kinds, (200_000, 8)))  # Figures of a GPU change.
    with pyg_fast.small_graphs('pyg'):
        yield


class Own(FusedMessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.sigmoid(x_i) * x_j


def layers() -> list:
    convs = [
        pyg.ResGatedGraphConv(WIDTH, 4), pyg.TransformerConv(WIDTH, 4), pyg.SAGEConv(WIDTH, 4),
        pyg.GINConv(torch.nn.Linear(WIDTH, 4)), pyg.GraphConv(WIDTH, 4, flow='target_to_source'),
        pyg.SAGEConv(WIDTH, 4, aggr='max'),
    ]  # fmt: skip
    return [pytest.param(conv, id=f'{type(conv).__name__}-{conv.aggr}') for conv in convs]


def of_few(device: torch.device, num_edges: int = EDGES) -> tuple[Tensor, Tensor]:
    x = torch.randn(NODES, WIDTH, device=device)
    return x, torch.randint(NODES, (2, num_edges), device=device)


@pytest.mark.parametrize('num_edges', [EDGES, 40_000])
@pytest.mark.parametrize('num_src', [NODES, NODES + 3])
def test_forward_of_pyg_gets_a_plain_list(
    num_edges: int, num_src: int, record_calls: Callable[..., list]
) -> None:
    """What it calculates from one takes less time, where its code runs and no size is lost."""
    seen = record_calls(
        pyg.GraphConv, 'forward', lambda _, conv, x, edge_index, *rest: type(edge_index)
    )
    conv = pyg.GraphConv(WIDTH, 4, aggr='mean')
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    x, edges = of_few(torch.device('cpu'), num_edges)
    nodes = x if num_src == NODES else (torch.randn(num_src, WIDTH), x)
    prepared = EdgeIndex(edges, sparse_size=(num_src, NODES))
    for _ in range(2):
        torch.testing.assert_close(fast(nodes, prepared), conv(nodes, edges))
    is_plain = num_edges == EDGES and num_src == NODES
    assert seen[::2] == [ReadableEdgeIndex, Tensor if is_plain else ReadableEdgeIndex]


class Sorts(pyg.MessagePassing):
    """Asks for more than a list."""

    def forward(self, x: Tensor, edge_index: EdgeIndex) -> Tensor:
        assert edge_index.sparse_size(0) == NODES
        return self.propagate(edge_index, x=x)


def test_own_forward_gets_what_it_is_given() -> None:
    conv = pyg_fast.accelerate(Sorts())
    x, edges = of_few(torch.device('cpu'))
    for _ in range(2):
        conv(x, EdgeIndex(edges, sparse_size=(NODES, NODES)))
        assert why_pygs(conv)


@pytest.mark.parametrize('num_edges', [EDGES, 40_000])
def test_nobody_lists_the_edges_of_a_prepared_graph(
    num_edges: int, device: torch.device, forbid: Callable[..., None]
) -> None:
    x, edges = of_few(device, num_edges)
    data = Data(edge_index=edges, num_nodes=NODES)
    graph = ToCSR(keep_edge_index=False)(data).edge_index
    conv = pyg_fast.accelerate(pyg.GraphConv(WIDTH, 4)).to(device)

    forbid(PreparedGraph, '_data')
    for _ in range(2):
        conv(x, graph)
        assert why_pygs(conv) == ''


@pytest.mark.parametrize('conv', layers())
def test_pygs_code(conv: torch.nn.Module, device: torch.device) -> None:
    """Its result, from a plain list and from a prepared one, and the report says so."""
    conv = copy.deepcopy(conv).to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    x, edges = of_few(device)
    with torch.no_grad():
        out = conv(x, edges)
        torch.testing.assert_close(fast(x, edges), out)
        assert pyg_fast.accelerate_report(fast)[0].ran == (
            f"PyG's code: {EDGES} edges are too few for a kernel to pay"
        )
        torch.testing.assert_close(fast(x, EdgeIndex(edges, sparse_size=(NODES, NODES))), out)
        with pyg_fast.small_graphs('kernel'):
            torch.testing.assert_close(fast(x, edges), out, rtol=1e-4, atol=1e-5)
            assert pyg_fast.accelerate_report(fast)[0].ran == type(fast).__name__


def test_gatv2_with_edges(device: torch.device) -> None:
    conv = pyg.GATv2Conv(WIDTH, 4, edge_dim=3).to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    x, edges = of_few(device)
    attr = torch.randn(EDGES, 3, device=device)
    torch.testing.assert_close(fast(x, edges, attr), conv(x, edges, attr))
    assert 'too few' in why_pygs(fast)


def test_the_report_says_what_is_known_of_the_message() -> None:
    class Prints(Own):
        def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
            str(x_i)
            return x_j

    x, edges = of_few(torch.device('cpu'))
    for conv, then in ((Own(), ''), (Prints(), '; with more: message calls str, which ')):
        fast, few = pyg_fast.accelerate(conv), f'{EDGES} edges are too few for a kernel to pay'
        fast(x, edges)
        (report,) = pyg_fast.accelerate_report(fast)
        assert report.reason == f'{few}, so its message was not looked at'
        assert report.cure.startswith("little: PyG's code is as fast here")
        with pyg_fast.small_graphs('kernel'):
            fast(x, edges)
        fast(x, edges)
        (report,) = pyg_fast.accelerate_report(fast)
        assert report.reason.startswith(few + then)
        assert (report.reason == few) == (then == '')
        assert report.cure.startswith('call it in forward' if then else 'little: ')


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    """Once for a class, and no warning."""

    class Logged(Own):
        pass

    x, edges = of_few(torch.device('cpu'))
    with caplog.at_level('INFO', 'pyg_fast'):
        for _ in range(2):
            conv = Logged()
            conv(x, edges)
            conv(x, edges)
    records = [record for record in caplog.records if record.name == 'pyg_fast']
    assert [(each.levelname, each.getMessage()) for each in records] == [
        ('INFO', f"Logged runs PyG's code: {EDGES} edges are too few for a kernel to pay")
    ]


class Summed(Own):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Weighted(Own):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=x.new_ones(edge_index.size(1), 1))

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return x_j * w


class Keeps(Own):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        self.kept = torch.sigmoid(x_i) * x_j
        return self.kept * x_j


class Normed(Own):
    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return torch.layer_norm(x_i + x_j, (WIDTH,))


@pytest.mark.parametrize(('conv', 'times'), [
    (Own(), 1), (Keeps(), 8 / 24), (Normed(), 5 / 24), (Summed(), 1.5),
    (Weighted(), 2), (Own('max'), 3.5), (Own(['mean', 'min']), 3.5), (Own('std'), 14 / 24),
])  # fmt: skip
def test_many_edges(conv: Own, times: float) -> None:
    """By edges and width: kernels run, for sums by weights and for maxima earlier."""
    x, edges = of_few(torch.device('cpu'), int(200_000 / times) // (WIDTH + 8) + 30)
    conv(x, edges)  # It may be the one that tells what the message is.
    conv(x, edges[:, :-60])
    assert why_pygs(conv)
    conv(x, edges)
    assert why_pygs(conv) == ''


@pytest.mark.parametrize(('conv', 'width', 'counted'), [
    (Own(), 8, 6), (Own(), 12, 15), (Summed(), 8, 16), (Own('max'), 8, 3.5 * 16),
], ids=str)  # fmt: skip
def test_columns_that_do_not_fill_a_vector(conv: Own, width: int, counted: int) -> None:
    """For those kernels pay later; `counted` is what stands for them in the limit of edges."""
    x, edges = torch.randn(NODES, width), of_few(torch.device('cpu'), 200_000 // 6 + 60)[1]
    conv(x, edges)
    most = int(200_000 / counted)
    conv(x, edges[:, : most - 30])
    assert why_pygs(conv)
    conv(x, edges[:, : most + 30])
    assert why_pygs(conv) == ''


def test_a_checkpoint_runs_the_same_again() -> None:
    """What the first call tells of a message counts from the next one on."""
    x, edges = of_few(torch.device('cpu'), 6000)
    conv, seen = Own(), []
    for _ in range(2):
        out = checkpoint(conv, x.requires_grad_(), edges, use_reentrant=False)
        seen.append(why_pygs(conv))
        out.sum().backward()  # It raises an error if other tensors are saved.
    assert seen == ['', '6000 edges are too few for a kernel to pay']


def test_a_layer_moves(device: torch.device, limits: Callable[..., None]) -> None:
    """Limits are those of the device on which it runs."""
    limits(few_edges={('message', False): (10**9, 8), ('message', True): (EDGES * WIDTH, 0)})
    conv = Normed()
    x, edges = of_few(torch.device('cpu'), 3 * EDGES)
    conv(x, edges)
    conv(x, edges)
    assert why_pygs(conv)
    conv.to(device)(x.to(device), edges.to(device))
    assert bool(why_pygs(conv)) == (device.type == 'cpu')


def test_kernels_pay_earlier(limits: Callable[..., None], device: torch.device) -> None:
    """On a prepared graph, which no call sorts, and on a CPU for an MLP of each edge."""
    limits(few_edges={('prepared message', on_gpu): (EDGES * WIDTH, 0) for on_gpu in (False, True)})
    x, edge_index = torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES))
    layer = Own().to(device)
    layer(x.to(device), edge_index.to(device))
    assert 'few' in why_pygs(layer)
    data = ToCSR()(Data(edge_index=edge_index, num_nodes=NODES))
    for graph in (data.edge_index, copy.deepcopy(data).edge_index):
        layer(x.to(device), graph.to(device))
        assert why_pygs(layer) == ''
    if device.type == 'cpu':
        limits(few_edges=(EDGES * WIDTH * 5, 0))
        mlp = Sequential(Linear(2 * WIDTH, 4), ReLU(), Linear(4, 4))
        layers = torch.nn.ModuleList(map(EdgeConv, (mlp, Linear(2 * WIDTH, 4))))
        layers = pyg_fast.accelerate(layers)
        for _ in range(2):
            for each in layers:
                each(x, edge_index)
        assert why_pygs(layers[0]) == ''
        assert 'few' in why_pygs(layers[1])


class Mapped(FusedMessagePassing):
    """A linear map of both ends and another one, or one of what each edge computes."""

    def __init__(self, both: bool) -> None:
        super().__init__('sum')
        self.both = both
        self.first, self.last = Linear(2 * WIDTH, WIDTH), Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        if self.both:
            return self.last(self.first(torch.cat([x_i, x_j], -1)).relu()).relu()
        return self.last((x_i - x_j).square()) * x_j


def test_kernels_pay_later_for_maps_of_edges(limits: Callable[..., None]) -> None:
    """They save no products where nodes have none."""
    limits(few_edges=(0, 0))
    both, alone = Mapped(True), Mapped(False)
    for layer in (both, alone, both, alone):  # What a call tells counts from the next one on.
        layer(torch.randn(NODES, WIDTH), torch.randint(NODES, (2, EDGES)))
        assert why_pygs(layer) == ''
    assert alone.__dict__['_width'] < both.__dict__['_width']


class Light(FusedMessagePassing):
    """Features of edges as they are, offsets times these, and more of the offsets."""

    def __init__(self, what: str) -> None:
        super().__init__('max' if what == 'max' else 'sum')
        self.what = what

    def forward(self, x: Tensor, edge_index: Tensor, e: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, e=e)

    def message(self, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
        if self.what in ('edges', 'max'):
            return e
        value = (x_j - x_i) * e
        return value if self.what == 'offsets' else value.tanh() * value.exp() + value.sin()


@pytest.mark.parametrize(('what', 'width', 'on_list', 'on_graph'), [
    ('edges', 15, True, True), ('edges', 32, True, False), ('max', 3, False, False),
    ('offsets', 3, True, True), ('offsets', 8, True, False), ('offsets', 16, False, False),
    ('more', 8, False, False),
])  # fmt: skip
def test_few_columns(
    what: str, width: int, on_list: bool, on_graph: bool, limits: Callable[..., None]
) -> None:
    """PyG's code runs where it computes what a message does in less time than an edge takes."""
    limits(few_edges=(0, 0))
    x, edge_index = torch.randn(NODES, width), torch.randint(NODES, (2, EDGES))
    data = ToCSR()(Data(edge_index=edge_index, num_nodes=NODES))
    for edges, is_light in ((edge_index, on_list), (data.edge_index, on_graph)):
        layer = Light(what)
        for _ in range(2):  # The first call looks at the message.
            layer(x, edges, torch.randn(EDGES, width))
        reason = f'{width} columns are too few for a kernel to pay'
        assert why_pygs(layer) == reason * is_light
        with pyg_fast.small_graphs('kernel'):
            layer(x, edges, torch.randn(EDGES, width))
        assert why_pygs(layer) == ''


def test_second_derivatives(limits: Callable[..., None], device: torch.device) -> None:
    """PyG's code computes them, as a call shows; what does not train has a kernel."""
    limits(few_edges=(0, 0))
    layer, edge_index = Own(), torch.randint(NODES, (2, EDGES), device=device)
    x = torch.randn(NODES, WIDTH, dtype=torch.float64, device=device, requires_grad=True)
    found = []
    for reason in ('', SLOWER_TWICE):
        out = layer(x, edge_index)
        assert why_pygs(layer) == reason
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        found += torch.autograd.grad(grad.square().sum(), x)
    torch.testing.assert_close(*found)
    with torch.no_grad():
        layer(x, edge_index)
    assert why_pygs(layer) == ''
    with pyg_fast.small_graphs('kernel'):
        layer(x, edge_index)
    assert why_pygs(layer) == ''


def test_kernels_where_asked() -> None:
    """With `strict`, deterministic algorithms, or inside of the context, which may be nested."""
    x, edges = of_few(torch.device('cpu'))
    conv = Own(strict=True)
    conv(x, edges)
    assert why_pygs(conv) == ''
    conv = Own()
    with pyg_fast.small_graphs('kernel'):
        with pyg_fast.small_graphs('pyg'):
            conv(x, edges)
            assert why_pygs(conv)
        conv(x, edges)
        assert why_pygs(conv) == ''
    torch.use_deterministic_algorithms(True)
    try:
        conv(x, edges)
    finally:
        torch.use_deterministic_algorithms(False)
    assert why_pygs(conv) == ''


def test_bipartite_sizes(device: torch.device) -> None:
    """Those of an EdgeIndex stand for the numbers of nodes, as in PyG."""
    conv = pyg.ResGatedGraphConv((WIDTH, WIDTH), 4).to(device)
    fast = pyg_fast.accelerate(copy.deepcopy(conv))
    x, edges = of_few(device)
    edges[1] %= 7
    both = x, x[:9]
    out = fast(both, EdgeIndex(edges, sparse_size=(NODES, 9)))
    torch.testing.assert_close(out, conv(both, edges))
    assert 'too few' in why_pygs(fast)


@pytest.mark.parametrize('conv', [
    MaxKSAGEConv(WIDTH, 4, k=2), SampledSAGEConv(WIDTH, 4, num_samples=2),
], ids=lambda conv: type(conv).__name__)  # fmt: skip
def test_other_results(conv: torch.nn.Module) -> None:
    """Layers of which PyG has none compute theirs."""
    conv.eval()
    x, edges = of_few(torch.device('cpu'))
    with torch.no_grad():
        out = conv(x, edges)
        with pyg_fast.small_graphs('kernel'):
            torch.testing.assert_close(out, conv(x, edges), rtol=0, atol=0)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="'how' must be 'pyg' or 'kernel', got 'fast'"):
        pyg_fast.small_graphs('fast')
    env = os.environ | {'PYG_FAST_SMALL_GRAPHS': '1'}
    done = _forks.run('-m', 'pyg_fast.graph.small_graphs', env=env)  # read as it is imported
    assert "PYG_FAST_SMALL_GRAPHS must be 'pyg' or 'kernel', got '1'" in done.stderr


def test_compiled_code_has_no_limit(forbid: Callable[..., None]) -> None:
    """It would be compiled again on either side of it."""
    forbid(gat, 'has_few_edges')
    conv = pyg_fast.accelerate(pyg.GATv2Conv(WIDTH, 4, edge_dim=3))
    x, edges = of_few(torch.device('cpu'))
    compiled = torch.compile(conv, backend='eager', fullgraph=True)
    assert compiled(x, edges, torch.randn(EDGES, 3)).shape == (NODES, 4)


def captured_step(conv: torch.nn.Module, device: torch.device) -> pyg_fast.CapturedStep:
    model = torch.nn.Linear(WIDTH, 2).to(device)
    x, edges = of_few(device)
    data = Data(x=x, edge_index=edges, y=torch.zeros(NODES, dtype=torch.long, device=device))
    lr = torch.tensor(0.1, device=device)
    return pyg_fast.capture(
        model, data, torch.optim.Adam(model.parameters(), lr, capturable=device.type == 'cuda'),
        torch.nn.functional.cross_entropy, mask=None,
        forward=lambda model, data: conv(model(data.x).repeat(1, 3), data.edge_index),
    )  # fmt: skip


def test_steps_on_a_cpu_run_as_usual() -> None:
    conv = Own()
    captured_step(conv, torch.device('cpu'))()
    assert 'too few' in why_pygs(conv)


def test_captured_steps_run_kernels(cuda: torch.device) -> None:
    """A CUDA graph has no host time to save, and cannot compile a kernel."""
    conv = Own().to(cuda)
    step = captured_step(conv, cuda)
    for _ in range(5):
        step()
        assert why_pygs(conv) == ''
