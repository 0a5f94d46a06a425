"""Training of a model on paths with less memory: parts that are computed again, tiles of columns,
inputs aggregated for a path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from pyg_fast.graph import PreparedGraph, execution_paths, graph_of, prepare_edge_index
from pyg_fast.nn import PathPreparedGNN

from .test_convs import assert_equal, model_step, random_graph

N = 400
# Of 450 edges each path is a part; of 4000 the first one is the whole graph.
EDGES = [450, 4000]


@pytest.fixture(autouse=True)
def many_blocks(limits: Callable[..., None]) -> None:
    limits(fewest_rows_of_streams=7)


def problem(device: torch.device, edges: int, dtype: torch.dtype = torch.double) -> tuple:
    edge_index, mask = random_graph(N, edges, 0.05, device)
    edge_index = prepare_edge_index(edge_index, (N, N))[0]
    x = torch.randn(N, 6, dtype=dtype, device=device)
    return x, edge_index, mask, execution_paths(edge_index, mask, 3, forward=True, debug=True)


def nets(conv: str, device: torch.device, dtype: torch.dtype = torch.double, **kwargs: Any) -> list:
    """A model, and one of the same weights that keeps less."""
    lean = {name: kwargs.pop(name) for name in ('checkpoint', 'tile') if name in kwargs}
    plain = PathPreparedGNN(conv, 6, 8, 8, 3, **kwargs)
    other = PathPreparedGNN(conv, 6, 8, 8, 3, **kwargs, **lean)
    other.load_state_dict(plain.state_dict())
    return [net.to(device, dtype) for net in (plain, other)]


@pytest.mark.parametrize('edges', EDGES)
@pytest.mark.parametrize('dropout', [0.0, 0.5])
@pytest.mark.parametrize(
    ('conv', 'options'),
    [('gcn', {}), ('gcn', {'improved': True, 'bias': False}), ('gcn', {'norm': 'layer_norm'}),
     ('gcn', {'act': 'tanh'}), ('sage', {}), ('sage', {'normalize': True}),
     ('sage', {'root_weight': False, 'aggr': 'sum'}), ('gin', {'train_eps': True})],
)  # fmt: skip
def test_equals_the_plain_step(
    device: torch.device, conv: str, options: dict[str, Any], dropout: float, edges: int
) -> None:
    x, edge_index, mask, paths = problem(device, edges)
    for lean in ({'checkpoint': True}, {'tile': 4}, {'checkpoint': True, 'tile': 2}):
        plain, net = nets(conv, device, dropout=dropout, **options, **lean)
        for given in ({'paths': paths}, {}):
            expected = model_step(plain, x, edge_index, mask)
            assert_equal(model_step(net, x, edge_index, mask, **given), expected)
        net.eval()
        plain.eval()
        assert_equal([net(x, edge_index, paths=paths)], [plain(x, edge_index)])


def test_with_edge_weights(device: torch.device) -> None:
    edge_index, mask = random_graph(N, 450, 0.05, device)
    x = torch.randn(N, 6, dtype=torch.double, device=device)
    weight = torch.rand(edge_index.size(1), dtype=torch.double, device=device)
    for given in (edge_index, prepare_edge_index(edge_index, (N, N))[0]):
        paths = execution_paths(given, mask, 3, weighted=True, forward=True)
        for lean in ({'checkpoint': True}, {'tile': 2}):
            plain, net = nets('gcn', device, dropout=0.5, **lean)
            expected = model_step(plain, x, given, mask, edge_weight=weight)
            actual = model_step(net, x, given, mask, edge_weight=weight, paths=paths)
            assert_equal(actual, expected)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('lean', [{'checkpoint': True}, {'tile': 2}, {}])
def test_gradient_of_the_input_of_a_path(
    device: torch.device, conv: str, lean: dict[str, Any]
) -> None:
    x, edge_index, mask, paths = problem(device, 450)
    assert paths[0].src_nodes is not None
    plain, net = nets(conv, device, **lean)
    grads = []
    for each, given in ((plain, {}), (net, {'paths': paths})):
        own = x.clone().requires_grad_()
        each(own, edge_index, **given)[mask].square().sum().backward()
        grads.append(own.grad)
    assert_equal(grads[1:], grads[:1])


@pytest.mark.parametrize('lean', [{'checkpoint': True}, {'tile': 2, 'checkpoint': True}])
@pytest.mark.parametrize('conv', ['gcn', 'sage'])
def test_one_row_does_not_write_the_bias(
    device: torch.device, conv: str, lean: dict[str, Any]
) -> None:
    _, edge_index, mask, _ = problem(device, 450)
    x = torch.randn(N, 6, dtype=torch.double, device=device)
    mask = torch.zeros_like(mask)
    mask[edge_index[1, 0]] = True
    paths = execution_paths(edge_index, mask, 3, forward=True)
    plain, net = nets(conv, device, act=None, **lean)
    expected = model_step(plain, x, edge_index, mask)
    for _ in range(2):
        assert_equal(model_step(net, x, edge_index, mask, paths=paths), expected)
    assert_equal(list(net.parameters()), list(plain.parameters()))


@pytest.mark.parametrize('aggr', ['mean', 'max'])
def test_tiles_of_another_aggregation(device: torch.device, aggr: str) -> None:
    x, edge_index, mask, paths = problem(device, 450)
    plain, net = nets('gin', device, tile=2, aggr=aggr)
    expected = model_step(plain, x, edge_index, mask)
    for given in ({}, {'paths': paths}):
        assert_equal(model_step(net, x, edge_index, mask, **given), expected)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
def test_parameters_of_functional_call(device: torch.device, conv: str) -> None:
    x, edge_index, mask, paths = problem(device, 450)
    plain, net = nets(conv, device, act='prelu', checkpoint=True)
    every = {k: (2 * p.detach()).requires_grad_() for k, p in net.named_parameters()}
    for own in (every, {'act.weight': every['act.weight']}):
        both = {**net.state_dict(), **{k: p.detach() for k, p in own.items()}}
        plain.load_state_dict(both)
        loss, *grads = model_step(plain, x, edge_index, mask)
        out = torch.func.functional_call(net, own, (x, edge_index), {'paths': paths})
        got = out[mask].square().sum()
        expected = [g for (k, _), g in zip(net.named_parameters(), grads, strict=True) if k in own]
        assert_equal(
            [got.detach(), *torch.autograd.grad(got, list(own.values()))], [loss, *expected]
        )
    if conv == 'gin':
        own = dict(plain.named_parameters())
        out = torch.func.functional_call(net, own, (x, edge_index), {'paths': paths})
        with pytest.raises(RuntimeError, match='layer 1 has other parameters'):
            out[mask].sum().backward()


def test_models_share_paths(device: torch.device) -> None:
    edge_index, mask = random_graph(N, 4000, 0.05, device)
    edge_index[:, :40] = edge_index[0, :40]  # loops
    x = torch.randn(N, 6, dtype=torch.double, device=device)
    weight = torch.rand(edge_index.size(1), dtype=torch.double, device=device)
    for given in (edge_index, prepare_edge_index(edge_index, (N, N))[0]):
        paths = execution_paths(given, mask, 3, forward=True, weighted=True)
        assert paths[0].is_whole
        for conv, edge_weight in (('sage', None), ('gcn', None), ('gcn', weight)) * 2:
            plain, net = nets(conv, device, checkpoint=True)
            args = {} if edge_weight is None else {'edge_weight': edge_weight}
            expected = model_step(plain, x, given, mask, **args)
            assert_equal(model_step(net, x, given, mask, paths=paths, **args), expected)


@pytest.mark.parametrize('part', ['activation', 'function', 'mlp'])
def test_random_numbers_are_the_same_again(device: torch.device, part: str) -> None:
    x, edge_index, mask, paths = problem(device, 450)
    acts = {'activation': 'rrelu', 'function': lambda x: x * torch.rand_like(x), 'mlp': 'relu'}
    plain, net = nets('gin', device, act=acts[part], checkpoint=True)
    for each in (plain, net):
        if part == 'mlp':
            each.convs[1].nn.append(torch.nn.Dropout())
    expected = model_step(plain, x, edge_index, mask, paths=paths)
    assert_equal(model_step(net, x, edge_index, mask, paths=paths), expected)


# A smooth activation: rounding takes features over the border of a ReLU, where gradients jump.
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('conv', ['gcn', 'sage'])
def test_half_precision(device: torch.device, conv: str, dtype: torch.dtype) -> None:
    x, edge_index, mask, paths = problem(device, 450, dtype)
    for lean in ({'checkpoint': True}, {'tile': 2}):
        plain, net = nets(conv, device, dtype, dropout=0.5, act='tanh', **lean)
        actual = model_step(net, x, edge_index, mask, paths=paths)
        exact = model_step(plain.double(), x.double(), edge_index, mask)
        assert_equal([a.double() for a in actual], exact, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('lean', [{'checkpoint': True}, {'tile': 2}])
def test_autocast(device: torch.device, conv: str, lean: dict[str, Any]) -> None:
    x, edge_index, mask, paths = problem(device, 450, torch.float)
    plain, net = nets(conv, device, torch.float, act='tanh', **lean)
    for layer in (*plain.convs, *net.convs) if conv == 'gin' else ():
        layer.nn[1] = torch.nn.Tanh()
    exact = model_step(plain, x, edge_index, mask)
    with torch.autocast(device.type, torch.bfloat16):
        # A float32 bias makes GCN's result float32.
        out = net(x, edge_index, paths=paths)
        assert out.dtype == (torch.float if conv == 'gcn' else torch.bfloat16)
        actual = model_step(net, x, edge_index, mask, paths=paths)
    assert_equal([a.to(e.dtype) for a, e in zip(actual, exact, strict=True)], exact, 0.05)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
def test_paths_alone_under_autocast(device: torch.device, conv: str) -> None:
    x, edge_index, mask, _ = problem(device, 450, torch.float)
    paths = execution_paths(edge_index, mask, 3, forward=True, keep_graph=False)
    plain, _ = nets(conv, device, torch.float)
    with torch.autocast(device.type, torch.bfloat16):
        expected = plain(x, edge_index)[mask]
        actual = plain(x, None, paths=paths)[mask]
    assert actual.dtype == expected.dtype
    assert (actual - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
def test_paths_alone_train_after_inference_mode(device: torch.device, conv: str) -> None:
    x, edge_index, mask, _ = problem(device, 450)
    mask = torch.ones_like(mask)  # All rows: nothing is gathered.
    paths = execution_paths(edge_index, mask, 3, forward=True, keep_graph=False)
    plain, _ = nets(conv, device)
    with torch.inference_mode():
        plain(x, None, paths=paths, active_only=True)
    expected = model_step(plain, x, edge_index, mask)
    assert_equal(model_step(plain, x, None, mask, paths=paths), expected)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('tile', [None, 2])
def test_input_aggregated_for_a_path(device: torch.device, conv: str, tile: int | None) -> None:
    x, edge_index, mask, paths = problem(device, 450)
    plain, net = nets(conv, device, dropout=0.5)
    expected = model_step(plain, x, edge_index, mask)
    given = net.convs[0].aggregate_input(x, edge_index, path=paths[0], tile=tile)
    assert given.aggregated.size(0) == paths[0].num_dst < N
    assert given.shape == (N, 6)
    moved = given.to(device)
    for each in (given, moved):
        assert_equal(model_step(net, each, edge_index, mask, paths=paths), expected)
    again = execution_paths(edge_index, mask, 3, forward=True)
    assert_equal(model_step(net, given, edge_index, mask, paths=again), expected)
    other = execution_paths(edge_index, ~mask, 3, forward=True)
    for wrong in (other, execution_paths(edge_index, mask, 3), None):
        with pytest.raises(ValueError, match='aggregated for the .* rows of a path'):
            net(given, edge_index, paths=wrong)
    whole = net.aggregate_input(x, edge_index, paths=execution_paths(edge_index, mask, 3))
    assert whole.aggregated.size(0) == N


def saved_bytes(run: Any) -> tuple[Any, int]:
    """The result of a function, and the bytes of all storages that it saves for backward."""
    storages = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return run(), sum(storages.values())


def test_what_a_step_keeps(device: torch.device) -> None:
    x, edge_index, mask, paths = problem(device, 450, torch.float)
    width, counts = 8 * 4, [path.num_dst for path in paths]
    kept = {}
    for conv in ('gcn', 'sage'):
        for dropout in (0.0, 0.5):
            plain, net = nets(conv, device, torch.float, dropout=dropout, checkpoint=True)
            for each in (plain, net):
                each(x, edge_index, paths=paths, active_only=True)  # The paths keep what they need.
                _, kept[each is net] = saved_bytes(
                    lambda each=each: each(x, edge_index, paths=paths, active_only=True)
                )
            results = sum(counts[:2]) * width
            aggregated = counts[1] * width + counts[2] * width  # of layers 1 and 2
            # Layer 0 widens from 6 to 8, so it aggregates first too.
            aggregated += counts[0] * 6 * 4
            assert kept[False] - kept[True] >= aggregated - len(counts) * N * 16
            assert kept[False] >= results + aggregated


def test_no_result_before_a_relu_is_kept(device: torch.device) -> None:
    x, edge_index, mask, paths = problem(device, 450, torch.float)
    net = PathPreparedGNN('gcn', 6, 8, 8, 3, dropout=0.5).to(device)
    shapes: list[tuple[int, ...]] = []
    seen = set()

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in seen and t.dim() == 2 and t.is_floating_point():
            seen.add(t.untyped_storage().data_ptr())
            shapes.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x, edge_index, paths=paths, active_only=True)
    counts = [path.num_dst for path in paths]
    # The aggregated features of each layer and the features after each ReLU; nothing else.
    expected = [(counts[0], 6), (counts[1], 8), (counts[2], 8), (counts[0], 8), (counts[1], 8)]
    weights = [tuple(conv.lin.weight.shape) for conv in net.convs]
    assert sorted(shapes) == sorted([(N, 6), *expected, *weights])


def test_gradients_of_gradients_need_all_kept(device: torch.device) -> None:
    x, edge_index, mask, paths = problem(device, 450)
    plain, net = nets('gcn', device, checkpoint=True)
    loss = plain(x, edge_index, paths=paths, active_only=True).square().sum()
    torch.autograd.grad(loss, plain.convs[0].lin.weight, create_graph=True)[0].sum().backward()
    loss = net(x, edge_index, paths=paths, active_only=True).square().sum()
    with pytest.raises(RuntimeError, match='checkpoint=False'):
        torch.autograd.grad(loss, net.convs[0].lin.weight, create_graph=True)


@pytest.mark.parametrize(
    ('conv', 'lean'), [('gcn', {'checkpoint': True}), ('sage', {'tile': 3}), ('gin', {'tile': 3})]
)
def test_compile(
    device: torch.device, limits: Callable[..., None], conv: str, lean: dict[str, Any]
) -> None:
    limits(fewest_rows_of_streams=40, blocks_of_streams=3)
    x, edge_index, mask, paths = problem(device, 450, torch.float)
    net = nets(conv, device, torch.float, dropout=0.5, **lean)[1]

    def step(run: Any) -> list[Tensor]:
        torch.manual_seed(7)
        loss = run(x, edge_index, paths=paths, active_only=True).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    compiled = torch.compile(net, fullgraph=True, backend='aot_eager')
    step(net)
    assert_equal(step(compiled), step(net), 1e-5)


def test_refuses_what_does_not_fit() -> None:
    for bad, error in (('2', TypeError), (True, TypeError), (0, ValueError)):
        with pytest.raises(error, match="'tile' must be"):
            PathPreparedGNN('gcn', 6, 8, 8, 3, tile=bad)
    for name, text in (
        ('checkpoint', 'True or False'), ('fill', 'a number'), ('norm_kwargs', 'a dictionary'),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"'{name}' must be {text}.*, got str"):
            PathPreparedGNN('gcn', 6, 8, 8, 3, **{name: 'yes'})
    x, edge_index, mask, _ = problem(torch.device('cpu'), 450)
    with pytest.raises(TypeError, match="'active_only' must be True or False, got str"):
        PathPreparedGNN('gcn', 6, 8, 8, 3)(x, edge_index, mask=mask, active_only='yes')


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('edges', EDGES)
def test_features_in_host_memory(cuda: torch.device, conv: str, edges: int) -> None:
    x, edge_index, mask, paths = problem(cuda, edges)
    host = x.cpu().pin_memory()
    plain, net = nets(conv, cuda, dropout=0.5, checkpoint=True, tile=2)
    expected = model_step(plain, x, edge_index, mask)
    for each in (plain, net):
        for _ in range(2):
            assert_equal(model_step(each, host, edge_index, mask, paths=paths), expected)
        assert_equal(model_step(each, host, edge_index, mask), expected)
    given = net.aggregate_input(host, edge_index, paths=paths)
    assert given.device == edge_index.device
    assert_equal(model_step(net, given, edge_index, mask, paths=paths), expected)
    plain.eval()
    assert_equal([plain(host, edge_index)], [plain(x, edge_index)])
    with pytest.raises(ValueError, match='pinned host memory'):
        net(x.cpu(), edge_index, paths=paths)
    with pytest.raises(ValueError, match='must not require a gradient'):
        net(x.cpu().pin_memory().requires_grad_(), edge_index, paths=paths)


@pytest.mark.parametrize('conv', ['gcn', 'sage', 'gin'])
@pytest.mark.parametrize('lean', [{}, {'checkpoint': True}, {'tile': 2}])
def test_paths_that_stand_alone(device: torch.device, conv: str, lean: dict[str, Any]) -> None:
    x, edge_index, mask, _ = problem(device, 450)
    plain, net = nets(conv, device, dropout=0.5, **lean)
    expected = model_step(plain, x, edge_index, mask)
    paths = execution_paths(edge_index, mask, 3, forward=True, keep_graph=False)
    given = net.aggregate_input(x, None, paths=paths)  # type: ignore[arg-type]
    for each in (x, given):
        assert_equal(model_step(net, each, None, mask, paths=paths), expected)
    plain.eval()
    some = net.eval()(x, None, paths=paths, active_only=True)
    assert_equal([some.detach()], [plain(x, edge_index)[mask].detach()])


@pytest.mark.parametrize('lean', [{}, {'checkpoint': True}, {'tile': 3}])
def test_graph_without_its_list(device: torch.device, lean: dict[str, Any]) -> None:
    x, edge_index, mask, _ = problem(device, 450)
    plain, net = nets('gcn', device, dropout=0.5, **lean)
    graph = PreparedGraph(graph_of(edge_index, N, N))
    paths = execution_paths(graph, mask, 3, forward=True)
    expected = model_step(plain, x, edge_index, mask)
    assert_equal(model_step(net, x, graph, mask, paths=paths), expected)
    out = net.inference(Data(x=x, edge_index=graph))
    assert_equal([out], [plain.eval()(x, edge_index).detach()])


def test_out_of_memory_says_where_and_what_helps(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, edge_index, mask, paths = problem(device, 450, torch.float)
    plain, net = nets('gcn', device, torch.float, checkpoint=True)
    counts = [path.num_dst for path in paths]

    def full(size: int) -> Any:
        def run(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError(f'CUDA out of memory. Tried to allocate {size} bytes.')

        return run

    def message(net: PathPreparedGNN, **kwargs: Any) -> str:
        with pytest.raises(torch.OutOfMemoryError) as raised:
            net(x, edge_index, **kwargs)
        assert raised.value.__cause__ is raised.value.__context__ is None
        return str(raised.value)

    where = 'pyg_fast.papers.paths.gnn'
    with monkeypatch.context() as patch:
        patch.setattr(f'{where}.linear_product', full(counts[0] * 6 * 4))
        text = message(plain, paths=paths, active_only=True)
        assert f'Tried to allocate {counts[0] * 24} bytes' in text
        part = f'layer 0 (PathPreparedGCNConv, {counts[0]} of {N} rows, 6 to 8 columns)'
        assert f'It was for the aggregated features of {part}.' in text
        for option in ('checkpoint=True', 'pin_memory', 'keep_edge_index', 'keep_graph'):
            assert option in text
        assert 'active_only' not in text
        assert 'forward=True' not in text
        assert 'active_only=True' in message(plain, paths=paths)
    with monkeypatch.context() as patch:
        patch.setattr(f'{where}.linear_product', full(12345))
        text = message(net, paths=paths)
        assert 'It was for layer 0' in text
        assert 'checkpoint' not in text
    with monkeypatch.context() as patch:
        patch.setattr(f'{where}.expand', full(N * 8 * 4))
        text = message(net, paths=paths)
        assert f'It was for the output of all {N} nodes' in text
    with monkeypatch.context() as patch:
        patch.setattr(type(net.convs[2]), 'forward', full(10))
        assert 'model.inference' in message(net.eval())
        assert 'forward=True' in message(plain)


def test_out_of_memory_on_a_gpu(cuda: torch.device) -> None:
    x, edge_index, mask, paths = problem(cuda, 450, torch.float)
    net = PathPreparedGNN('gcn', 6, 8, 8, 3, bias=False).to(cuda)
    wide = torch.zeros(1, device=cuda).expand(2**40 // paths[0].num_dst, 6)
    net.convs[0].lin.weight = torch.nn.Parameter(wide)
    with pytest.raises(torch.OutOfMemoryError, match='It was for layer 0'):
        net(x, edge_index, paths=paths)
