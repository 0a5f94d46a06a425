"""MaxKGNN against the same model of PyG's layers on dense features."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from _captures import check_training
from torch import Tensor
from torch.nn import Identity, LayerNorm, Linear, Module, ModuleList
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.nn import BatchNorm, GCNConv, GINConv, MessagePassing, SAGEConv
from torch_geometric.nn import LayerNorm as GraphNorm

import pyg_fast
from pyg_fast.graph import prepare_edge_index
from pyg_fast.nn import MaxKGCNConv, MaxKGINConv, MaxKGNN, MaxKSAGEConv
from tests._report import must_fuse

NODES, EDGES, IN, HIDDEN, OUT, LAYERS = 40, 300, 7, 16, 5, 3
KINDS = ('gcn', 'sage', 'gin')
NORMS: dict[Any, Callable[[int], Module]] = {
    None: lambda channels: Identity(),
    'batch_norm': BatchNorm,
    'layer_norm': lambda channels: GraphNorm(channels, mode='node'),
}


def kept(x: Tensor, k: int, balanced: bool) -> Tensor:
    """MaxK by torch's own ops."""
    order = x.detach().sort(dim=-1, descending=True, stable=True)[1]
    if balanced:
        rank = order.argsort(-1)
        columns = torch.stack([rank[:, c::k].argmin(-1) * k + c for c in range(k)], -1)
    else:
        columns = order[:, :k]
    return x * torch.zeros_like(x).scatter_(-1, columns, 1)


def gcn() -> GCNConv:
    """Only the aggregation."""
    conv = GCNConv(1, 1, bias=False)
    conv.lin = Identity()
    return conv


class Dense(Module):
    """The model by its formula."""

    def __init__(
        self, conv: str, num_layers: int = LAYERS, hidden: int = HIDDEN, k: int | None = None,
        norm: str | None = None, balanced: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kind, self.k, self.balanced = conv, k, balanced
        make: Callable[[], MessagePassing] = {
            'gcn': gcn,
            'sage': lambda: SAGEConv(hidden, hidden),
            'gin': lambda: GINConv(Identity(), train_eps=True),
        }[conv]
        self.lin_in = Linear(IN, hidden)
        self.lins = ModuleList(
            Identity() if conv == 'sage' else Linear(hidden, hidden) for _ in range(num_layers)
        )
        self.convs = ModuleList(make() for _ in range(num_layers))
        self.norms = ModuleList(NORMS[norm](hidden) for _ in range(num_layers))
        self.lin_out = Linear(hidden, OUT)
        self.dropout: Module = Identity()

    def forward(self, x: Tensor, edge_index: Tensor, *args: Tensor) -> Tensor:
        x = self.lin_in(x)
        x = x if self.kind == 'sage' else x.relu()
        for lin, conv, norm in zip(self.lins, self.convs, self.norms, strict=True):
            x = lin(x)
            x = x.relu() if self.k is None else kept(x, self.k, self.balanced)
            x = norm(conv(self.dropout(x), edge_index, *args))
        return self.lin_out(x)


def models(
    conv: str, device: Any = 'cpu', dtype: torch.dtype = torch.float64, hidden: int = HIDDEN,
    **kwargs: Any,
) -> tuple[Dense, MaxKGNN]:  # fmt: skip
    kwargs.setdefault('k', None)
    ours = MaxKGNN(conv, IN, hidden, OUT, LAYERS, **kwargs)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith(('eps', 'bias')):
                parameter.uniform_(-0.5, 0.5)
    theirs = Dense(conv, LAYERS, hidden, **kwargs)
    theirs.load_state_dict(ours.state_dict())
    return theirs.to(device, dtype), ours.to(device, dtype)


def graph(device: Any = 'cpu') -> Tensor:
    edge_index = torch.randint(NODES - 3, (2, EDGES))
    return torch.cat([edge_index, edge_index[:, :9]], dim=1).to(device)


def features(device: Any = 'cpu', dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(NODES, IN, dtype=torch.float64).to(device, dtype)


def all_fuse(model: Any) -> Any:
    for conv in model.convs:
        must_fuse(conv)
    return model


def gradients(model: Module, x: Tensor, *args: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = model(x, *args)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype)
    inputs = [x, *model.parameters()]
    return [out, *torch.autograd.grad((out * weight.view_as(out)).sum(), inputs)]


def assert_same(theirs: list[Tensor], ours: list[Tensor]) -> None:
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('k', [None, 1, 3, 9, HIDDEN])
@pytest.mark.parametrize('balanced', [False, True])
def test_same_as_dense(
    balanced: bool, k: int | None, norm: str | None, kind: str, device: torch.device
) -> None:
    theirs, ours = models(kind, device, k=k, norm=norm, balanced=balanced)
    x, edge_index = features(device), graph(device)
    prepared, _ = prepare_edge_index(edge_index, (NODES, NODES))
    expected = gradients(theirs, x, edge_index)
    all_fuse(ours)
    for given in (edge_index, prepared, prepared):
        assert_same(expected, gradients(ours, x, given))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('hidden', [256, 257, 384])
def test_wide(hidden: int, kind: str, device: torch.device) -> None:
    theirs, ours = models(kind, device, hidden=hidden, k=hidden // 8)
    x, edge_index = features(device), graph(device)
    assert_same(gradients(theirs, x, edge_index), gradients(all_fuse(ours), x, edge_index))


@pytest.mark.parametrize('k', [None, 3])
def test_edge_weights(k: int | None, device: torch.device) -> None:
    theirs, ours = models('gcn', device, k=k)
    edge_index = graph(device)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    weight = torch.rand(edge_index.size(1), dtype=torch.float64, device=device) + 0.1
    args = features(device), edge_index, weight
    assert_same(gradients(theirs, *args), gradients(all_fuse(ours), *args))
    for kind in ('sage', 'gin'):
        with pytest.raises(ValueError, match="'edge_weight'"):
            models(kind, device, k=k)[1](*args)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('k', [None, 3])
def test_dropout_is_of_what_is_kept(k: int | None, kind: str, device: torch.device) -> None:
    """Any module that maps zero to zero can replace the dropout."""
    theirs, ours = models(kind, device, k=k)
    theirs.dropout = ours.dropout = torch.nn.Hardshrink(0.2)
    x, edge_index = features(device), graph(device)
    assert_same(gradients(theirs, x, edge_index), gradients(all_fuse(ours), x, edge_index))

    model = MaxKGNN(kind, IN, HIDDEN, OUT, LAYERS, k=k, dropout=0.5).to(device).double()
    # The same bits at every call.
    edge_index, _ = prepare_edge_index(edge_index, (x.size(0), x.size(0)))
    torch.manual_seed(1)
    first, second = model(x, edge_index), model(x, edge_index)
    torch.manual_seed(1)
    assert torch.equal(model(x, edge_index), first)
    assert not torch.allclose(first, second)
    model.eval()
    assert torch.equal(model(x, edge_index), model(x, edge_index))
    everything = MaxKGNN(kind, IN, HIDDEN, OUT, 1, k=k, dropout=1.0).to(device).double()
    out = everything(x, edge_index)
    assert torch.equal(out, out[:1].expand_as(out))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_and_autocast(dtype: torch.dtype, kind: str, device: torch.device) -> None:
    _, model = models(kind, device, torch.float32, k=3, norm='layer_norm')
    x, edge_index = features(device, torch.float32), graph(device)
    exact = model(x, edge_index)
    for autocast in (False, True):
        if autocast and dtype == torch.float32:
            continue
        own = all_fuse(copy.deepcopy(model) if autocast else copy.deepcopy(model).to(dtype))
        with torch.autocast(device.type, dtype, enabled=autocast):
            out = own(x if autocast else x.to(dtype), edge_index)
        assert out.dtype == dtype
        out.float().sum().backward()
        assert all(p.grad.isfinite().all() for p in own.parameters())
        # In low precision MaxK may choose another of two nearly equal features: most rows agree.
        near = (out.float() - exact).abs() <= 30 * torch.finfo(dtype).eps * exact.abs().max()
        assert near.float().mean() > 0.9


# The layers' own tests compile every pair of kind, entries and graph.
@pytest.mark.parametrize(
    ('prepared', 'k', 'kind'),
    [(True, None, 'sage'), (False, 3, 'gcn'), (True, 9, 'gin')],
)
def test_compile(prepared: bool, k: int | None, kind: str, device: torch.device) -> None:
    torch._dynamo.reset()
    theirs, ours = models(kind, device, k=k, norm='layer_norm')
    x, edge_index = features(device), graph(device)
    given = prepare_edge_index(edge_index, (NODES, NODES))[0] if prepared else edge_index
    compiled = torch.compile(all_fuse(ours), fullgraph=True, backend='aot_eager')
    assert_same(gradients(theirs, x, edge_index), gradients(compiled, x, given))


@pytest.mark.parametrize('kind', KINDS)
def test_explainer(kind: str, device: torch.device) -> None:
    theirs, ours = models(kind, device, torch.float32, k=3)
    x, edge_index = features(device, torch.float32), graph(device)
    masks = []
    for model in (theirs, ours):
        torch.manual_seed(0)
        explainer = Explainer(
            model, GNNExplainer(epochs=3), explanation_type='model', node_mask_type='attributes',
            edge_mask_type='object',
            model_config=dict(mode='multiclass_classification', task_level='node',
                              return_type='raw'),
        )  # fmt: skip
        explanation = explainer(x, edge_index)
        masks.append([explanation.edge_mask, explanation.node_mask])
    for a, b in zip(*masks, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
    assert masks[0][0].max() > 0


def test_relu_is_the_same_model() -> None:
    """The same parameters from the same seed, whichever the nonlinearity is."""
    for kind in KINDS:
        states = []
        for k in (None, 3):
            torch.manual_seed(0)
            states.append(MaxKGNN(kind, IN, HIDDEN, OUT, LAYERS, k=k).state_dict())
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))


def test_norms() -> None:
    model = MaxKGNN('gcn', IN, HIDDEN, OUT, LAYERS, k=None, norm=LayerNorm(HIDDEN))
    assert [type(norm) for norm in model.norms] == [LayerNorm] * LAYERS
    assert len({id(norm) for norm in model.norms}) == LAYERS
    for kwargs, mode in ((None, 'node'), ({'eps': 0.1}, 'node'), ({'mode': 'graph'}, 'graph')):
        model = MaxKGNN('gcn', IN, HIDDEN, OUT, 1, 3, norm='layer_norm', norm_kwargs=kwargs)
        assert model.norms[0].mode == mode
    assert MaxKGNN('gcn', IN, HIDDEN, OUT, 1, None, norm='LayerNorm').norms[0].mode == 'node'


@pytest.mark.parametrize('kind', KINDS)
def test_is_a_module(kind: str) -> None:
    theirs, ours = models(kind, k=3, norm='batch_norm')
    x, edge_index = features(), graph()
    expected = gradients(theirs, x, edge_index)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_same(expected, gradients(all_fuse(again), x, edge_index))
    assert repr(ours) == f'MaxKGNN({kind!r}, 7, 16, 5, num_layers=3, k=3)'
    before = copy.deepcopy(ours.state_dict())
    ours.reset_parameters()
    changed = {name for name, value in ours.state_dict().items()
               if not torch.equal(value, before[name])}  # fmt: skip
    assert changed >= {name for name, _ in ours.named_parameters() if 'norms' not in name}
    if kind == 'gin':
        assert all(float(conv.eps) == 0 for conv in ours.convs)
    pyg_fast.accelerate(ours)
    reports = pyg_fast.accelerate_report(ours)
    assert len(reports) == LAYERS
    assert all(r.layer == r.fused and r.reason is None for r in reports)


def test_lazy_channels() -> None:
    model = MaxKGNN('sage', -1, HIDDEN, OUT, LAYERS, k=3)
    out = model(features(dtype=torch.float32), graph())
    assert out.shape == (NODES, OUT)
    assert model.lin_in.weight.shape == (HIDDEN, IN)


def test_bad_arguments() -> None:
    for kind in ('gat', 'GCN', None):
        with pytest.raises(ValueError, match="'conv'"):
            MaxKGNN(kind, IN, HIDDEN, OUT, LAYERS, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'num_layers'"):
        MaxKGNN('gcn', IN, HIDDEN, OUT, 0)
    for k in (0, -1, HIDDEN + 1):
        with pytest.raises(ValueError, match="'k'"):
            MaxKGNN('gcn', IN, HIDDEN, OUT, LAYERS, k=k)
    for k in (1.0, '3', True):
        with pytest.raises(TypeError, match="'k'"):
            MaxKGNN('gcn', IN, HIDDEN, OUT, LAYERS, k=k)
    with pytest.raises(ValueError, match='dropout'):
        MaxKGNN('gcn', IN, HIDDEN, OUT, LAYERS, 3, dropout=1.5)


@pytest.mark.parametrize('kind', KINDS)
def test_keeps_little_for_the_backward_pass(kind: str, device: torch.device) -> None:
    """Per layer one dense matrix, the input of the next linear map, and what MaxK has kept."""
    _, model = models(kind, device, k=3)
    x, edge_index = features(device), graph(device)
    dense, sparse = set(), set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (NODES, HIDDEN):
            dense.add(tensor.data_ptr())
        if tensor.shape == (NODES, 3):
            sparse.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = model(x, edge_index)
    assert len(dense) == LAYERS + 1
    assert len(sparse) >= LAYERS
    out.sum().backward()


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('k', [None, 3])
def test_learns(k: int | None, kind: str, device: torch.device) -> None:
    model = MaxKGNN(kind, IN, 32, OUT, 2, k=k, norm='layer_norm').to(device)
    x, edge_index = features(device, torch.float32), graph(device)
    label = torch.randint(OUT, (NODES,), device=device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x, edge_index), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize('kind', KINDS)
def test_captured_training_step(kind: str, device: torch.device) -> None:
    if device.type != 'cuda':
        pytest.skip('CUDA graphs need a GPU')
    edge_index, _ = prepare_edge_index(graph(device), (NODES, NODES))
    model = MaxKGNN(kind, IN, HIDDEN, OUT, LAYERS, k=3, norm='layer_norm').to(device)
    x = features(device, torch.float32)
    # The gradient adds in any order, and MaxK may tell near-equal features apart otherwise.
    check_training(model, lambda model: model(x, edge_index).square().sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    'make',
    [lambda **k: MaxKGNN('sage', IN, HIDDEN, OUT, 1, **k), lambda **k: MaxKSAGEConv(4, 4, **k),
     lambda **k: MaxKGCNConv(4, 4, **k), lambda **k: MaxKGINConv(Identity(), **k)],
)  # fmt: skip
def test_omitted_k_warns(make: Callable[..., Module]) -> None:
    with pytest.warns(FutureWarning, match="without 'k' applies no MaxK") as caught:
        model = make()
    assert [warning.filename for warning in caught] == [__file__]
    assert model.k is None
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert make(k=None).k is None
        assert make(k=2).k == 2
        assert copy.deepcopy(pickle.loads(pickle.dumps(model))).k is None


@pytest.mark.parametrize(
    ('make', 'name'),
    [(lambda k: MaxKSAGEConv(4, 16, k), 'aggr'), (lambda k: MaxKGCNConv(4, 16, k), 'improved'),
     (lambda k: MaxKGINConv(Identity(), k), 'eps')],
)  # fmt: skip
def test_k_by_position_is_refused(make: Callable[[int], Module], name: str) -> None:
    with pytest.raises(TypeError, match=rf"'{name}' must not be the integer 8.* by name, k=8$"):
        make(8)
    assert MaxKGINConv(Identity(), 8, k=None).eps == 8
