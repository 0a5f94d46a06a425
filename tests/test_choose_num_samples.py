"""`choose_num_samples`: its measurements, its choice, and the model that it leaves unchanged."""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Dropout, Module, ModuleList
from torch_geometric.data import Data

from pyg_fast import choose_num_samples
from pyg_fast._choose_num_samples import SampleChoice, SampleRow
from pyg_fast.datasets import PlantedGraph
from pyg_fast.nn import PathPreparedGCNConv, SampledGCNConv, SampledSAGEConv
from pyg_fast.transforms import ToCSR

CONVS = [SampledGCNConv, SampledSAGEConv]


class Net(Module):
    def __init__(self, conv: Any, num_samples: int = 3, **kwargs: Any) -> None:
        super().__init__()
        self.convs = ModuleList(
            [conv(64, 16, num_samples, **kwargs), conv(16, 4, num_samples, **kwargs)]
        )
        self.dropout = Dropout(0.5)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.dropout(self.convs[0](x, edge_index).relu())
        return self.convs[1](x, edge_index)


def planted(device: torch.device | str = 'cpu') -> Data:
    return ToCSR()(PlantedGraph('tiny')[0].to(device))


def accuracy(model: Module, data: Data) -> float:
    with torch.no_grad():
        hits = model(data.x, data.edge_index).argmax(dim=-1) == data.y
    return float(hits[data.val_mask].sum()) / int(data.val_mask.sum())


def sampled(model: Net, num_samples: int, strategy: str = 'fastrand', when: str = 'eval') -> Net:
    """A copy of the model in evaluation mode that samples so."""
    model = copy.deepcopy(model).eval()
    for conv in model.convs:
        conv.sample, conv.num_samples, conv.strategy = when, num_samples, strategy
    return model


def scripted(model: Net, full: float, scores: dict[int, float]) -> Callable[[Any, Any], float]:
    """A metric by the number of samples that the model has at that time."""

    def score(out: Any, data: Any) -> float:
        (state,) = {(conv.sample, conv.num_samples) for conv in model.convs}
        return full if state[0] == 'never' else scores[state[1]]

    return score


def state_of(model: Net) -> Any:
    return (
        [(name, module.training) for name, module in model.named_modules()],
        [
            (c.num_samples, c.strategy, c.sample, c.quantize, len(c._forward_pre_hooks))
            for c in model.convs
        ],
        {name: value.clone() for name, value in model.state_dict().items()},
    )


def assert_same(state: Any, other: Any) -> None:
    assert state[:2] == other[:2]
    assert state[2].keys() == other[2].keys()
    assert all(torch.equal(value, other[2][name]) for name, value in state[2].items())


@pytest.mark.parametrize('strategy', [None, 'bucket', 'paper'])
@pytest.mark.parametrize('conv', CONVS)
def test_scores_are_those_of_the_model(
    conv: type[Module], strategy: str | None, device: torch.device
) -> None:
    data = planted(device)
    model = Net(conv).to(device).train()
    choice = choose_num_samples(model, data, strategy=strategy, apply=False)
    assert choice.full_score == pytest.approx(accuracy(sampled(model, 1, when='never'), data))
    assert len({row.score for row in choice.table}) > 2
    for row in choice.table:
        again = accuracy(sampled(model, row.num_samples, strategy or 'fastrand'), data)
        assert row.score == pytest.approx(again)
        assert row.drop == choice.full_score - row.score
    assert choice.table[-1].drop == 0  # It reads all edges.


@pytest.mark.parametrize('flow', ['source_to_target', 'target_to_source'])
@pytest.mark.parametrize('conv', CONVS)
def test_sampling_rate(conv: type[Module], flow: str, device: torch.device) -> None:
    src = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 2, 2])
    dst = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2, 3])  # three loops; degrees 4, 3, 2, 1, 0
    edge_index = torch.stack([src, dst] if flow == 'source_to_target' else [dst, src])
    data = Data(x=torch.randn(5, 64), edge_index=edge_index).to(device)
    model = Net(conv, flow=flow).to(device)
    choice = choose_num_samples(model, data, metric=lambda out, data: 0.0, apply=False)
    rates = {row.num_samples: row.sampling_rate for row in choice.table}
    if conv is SampledGCNConv:  # which keeps the loops; others: 3, 2, 1, 1, 0
        assert rates == pytest.approx({1: (3 + 4) / 10, 2: (3 + 6) / 10, 4: 1})
    else:
        assert rates == pytest.approx({1: 4 / 10, 2: 7 / 10, 4: 1})


def test_sampling_rate_is_the_mean_of_layers(device: torch.device) -> None:
    class Two(Net):
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            x = self.convs[0](x, edge_index).relu()
            return self.convs[1](edge_index=edge_index[:, :1], x=x)

    data = Data(x=torch.randn(3, 64), edge_index=torch.tensor([[0, 1, 2, 0], [0, 0, 0, 1]]))
    choice = choose_num_samples(
        Two(SampledSAGEConv).to(device), data.to(device), metric=lambda out, data: 0.0
    )
    assert [row.sampling_rate for row in choice.table] == pytest.approx([(2 / 4 + 1) / 2, 7 / 8, 1])


@pytest.mark.parametrize('layout', ['sparse_csr', 'sparse_coo'])
@pytest.mark.filterwarnings('ignore:Sparse')
def test_matrices(layout: str, device: torch.device) -> None:
    data = planted(device)
    src, dst = data.edge_index.as_subclass(Tensor)
    apart = src != dst  # A matrix counts a node's loop twice, as in PyG.
    data.edge_index = torch.stack([src[apart], dst[apart]])
    data = ToCSR()(data)
    data.adj_t = torch.sparse_coo_tensor(
        data.edge_index.as_subclass(Tensor).flip(0),
        torch.ones(data.num_edges, device=device),
        (data.num_nodes, data.num_nodes),
        check_invariants=True,
    ).coalesce()
    if layout == 'sparse_csr':
        data.adj_t = data.adj_t.to_sparse_csr()
    model = Net(SampledGCNConv).to(device)
    usual = choose_num_samples(model, data, apply=False)
    choice = choose_num_samples(
        model, data, apply=False, forward=lambda model, data: model(data.x, data.adj_t)
    )
    assert choice == usual


@pytest.mark.parametrize(
    ('full', 'scores', 'max_drop', 'expected'),
    [
        (0.9, {1: 0.5, 2: 0.8, 4: 0.895, 8: 0.9}, 0.01, 4),
        (0.9, {1: 0.5, 2: 0.8, 4: 0.895, 8: 0.9}, 0.0, 8),
        (0.9, {1: 0.5, 2: 0.8, 4: 0.895, 8: 0.9}, 1.0, 1),
        (0.9, {1: 0.95, 2: 0.8, 4: 0.89, 8: 0.9}, 0.01, 4),  # The score of one sample is too noisy.
        (0.9, {1: 0.95, 2: 0.91, 4: 0.99, 8: 0.9}, 0.0, 1),
        (0.9, {1: 0.9, 2: 0.9, 4: 0.9, 8: 0.8}, 0.01, None),
        (0.9, {1: 0.9, 2: math.nan, 4: 0.9, 8: 0.9}, 1.0, 4),
        (0.81, {1: 0.79, 2: 0.80}, 0.01, 2),  # 0.81 - 0.80 is more than 0.01 in binary.
        (-3.0, {1: -9.0, 2: -3.5}, 1, 2),
    ],
)
def test_least_from_which_all_hold(
    full: float, scores: dict[int, float], max_drop: float, expected: int | None
) -> None:
    model = Net(SampledSAGEConv, num_samples=7)
    choice = choose_num_samples(
        model,
        planted(),
        max_drop,
        candidates=[*sorted(scores, reverse=True), 2],
        metric=scripted(model, full, scores),
    )
    assert choice.num_samples == expected
    assert choice.full_score == full
    assert [row.num_samples for row in choice.table] == sorted(scores)
    assert [conv.num_samples for conv in model.convs] == [expected or 7] * 2


def test_prints_as_a_table() -> None:
    rows = [SampleRow(1, 0.70123456, 0.1, 0.25), SampleRow(4, 0.8 - 1e-17, 1e-17, 0.5)]
    assert str(SampleChoice(4, 0.8, rows)).splitlines() == [
        'num_samples  score   drop  edges read',
        'all          0.8     0     1',
        '1            0.7012  0.1   0.25',
        '4            0.8     0     0.5         chosen',
    ]


def test_usual_candidates() -> None:
    def tried(num_edges: int) -> list[int]:
        dst = torch.zeros(num_edges, dtype=torch.long)
        data = Data(x=torch.randn(2, 64), edge_index=torch.stack([torch.ones_like(dst), dst]))
        choice = choose_num_samples(
            Net(SampledGCNConv), data, metric=lambda out, data: 0.0, apply=False
        )
        return [row.num_samples for row in choice.table]

    assert tried(0) == tried(1) == [1]
    assert tried(4) == [1, 2, 4]
    assert tried(5) == [1, 2, 4, 8]
    assert tried(4097) == tried(9000) == [1 << k for k in range(13)]


@pytest.mark.parametrize('conv', CONVS)
@pytest.mark.parametrize('apply', [False, True])
def test_nothing_else_changes(conv: type[Module], apply: bool, device: torch.device) -> None:
    data = planted(device)
    model = Net(conv).to(device)
    model.convs[0].sample = 'always'
    model.train()
    model.dropout.eval()
    before = state_of(model)
    choice = choose_num_samples(model, data, 0.99, strategy='bucket', apply=apply)
    assert torch.is_grad_enabled()
    assert choice.num_samples == 1
    after = state_of(model)
    if apply:
        for layer in after[1]:
            assert layer[:2] == (1, 'bucket')
        for layer, (number, strategy) in zip(model.convs, [(3, 'fastrand')] * 2, strict=True):
            layer.num_samples, layer.strategy = number, strategy
        after = state_of(model)
    assert_same(before, after)


@pytest.mark.parametrize('place', ['metric', 'forward', 'layer'])
@pytest.mark.parametrize('call', [1, 2, 4])
def test_restored_after_an_error(place: str, call: int) -> None:
    calls = []

    def fail(result: Any) -> Any:
        calls.append(result)
        if len(calls) == call:
            raise RuntimeError('failed')
        return result

    model = Net(SampledGCNConv)
    before = state_of(model)
    kwargs: dict[str, Any] = {}
    if place == 'metric':
        kwargs['metric'] = lambda out, data: fail(0.5)
    elif place == 'forward':
        kwargs['forward'] = lambda model, data: fail(model(data.x, data.edge_index))
    else:
        model.convs[1].register_forward_hook(lambda conv, args, out: fail(out))
    with pytest.raises(RuntimeError, match='failed'):
        choose_num_samples(model, planted(), strategy='bucket', **kwargs)
    assert len(calls) == call
    assert torch.is_grad_enabled()
    assert_same(before, state_of(model))


def test_cached_graphs_are_not_kept(device: torch.device) -> None:
    model = Net(SampledGCNConv, cached=True).to(device)
    choose_num_samples(model, planted(device), apply=False)
    assert all(conv._cached_norm is None for conv in model.convs)


def test_layers_that_never_sample_are_left_out() -> None:
    data = planted()
    model = Net(SampledSAGEConv)
    model.convs[0].sample = 'never'
    choice = choose_num_samples(model, data, 0.99)
    assert choice.num_samples == 1
    assert [(conv.num_samples, conv.sample) for conv in model.convs] == [(3, 'never'), (1, 'eval')]
    for row in choice.table:
        again = copy.deepcopy(model).eval()
        again.convs[1].num_samples = row.num_samples
        assert row.score == pytest.approx(accuracy(again, data))


def test_a_layer_is_a_model() -> None:
    data = planted()
    layer = SampledGCNConv(64, 4, 9)
    assert choose_num_samples(layer, data, 0.99).num_samples == layer.num_samples == 1


def test_forward_and_metric_get_what_is_given() -> None:
    model, data, seen = Net(SampledGCNConv), planted(), []

    def forward(*args: Any) -> str:
        seen.append(args)
        model(data.x, data.edge_index)
        assert not model.dropout.training
        assert not torch.is_grad_enabled()
        return 'output'

    def metric(*args: Any) -> Tensor:
        seen.append(args)
        return torch.tensor(0.5)

    choice = choose_num_samples(model, data, candidates=[2], metric=metric, forward=forward)
    assert seen == [(model, data), ('output', data)] * 2
    assert choice == (2, 0.5, [(2, 0.5, 0.0, choice.table[0].sampling_rate)])


def test_unbiased_is_one_draw_of_the_seed() -> None:
    data, model = planted(), Net(SampledSAGEConv)

    def draw(seed: int) -> list[float]:
        torch.manual_seed(seed)
        choice = choose_num_samples(
            model,
            data,
            strategy='unbiased',
            candidates=[1, 2, 4],
            apply=False,
            metric=lambda out, data: float(out.double().sum()),
        )
        return [row.score for row in choice.table]

    assert draw(1) == draw(1) != draw(2)


def test_compiled_models_are_not_compiled_anew() -> None:
    compiled = []

    def backend(module: Any, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    model, data = Net(SampledGCNConv).eval(), planted()
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        fast(data.x, data.edge_index)
    assert compiled
    compiled.clear()
    choice = choose_num_samples(fast, data, apply=False)
    assert choice == choose_num_samples(model, data, apply=False)
    assert not compiled


def test_a_trained_model_reads_less() -> None:
    data = ToCSR()(PlantedGraph('dense-small')[0])
    model = ModuleList([SampledSAGEConv(64, 12, 1)])

    def forward(model: Module, data: Data) -> Tensor:
        return model[0](data.x, data.edge_index)

    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(30):
        optimizer.zero_grad()
        out = forward(model, data)
        torch.nn.functional.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
    choice = choose_num_samples(model, data, 0.02, forward=forward)
    row = next(row for row in choice.table if row.num_samples == choice.num_samples)
    assert choice.full_score > 0.6
    assert 1 < row.num_samples <= 256
    assert row.sampling_rate < 0.95
    assert model[0].num_samples == row.num_samples


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        ({'model': 'net'}, TypeError, "'model' must be a torch.nn.Module, got str"),
        ({'model': PathPreparedGCNConv(64, 4)}, ValueError, "'model' has no sampled layer"),
        ({'model': SampledGCNConv(64, 4, 1, sample='never')}, ValueError, "have sample='never'"),
        ({'max_drop': -0.01}, ValueError, "'max_drop' must be at least 0, got -0.01"),
        ({'max_drop': math.nan}, ValueError, "'max_drop' must be at least 0, got nan"),
        ({'max_drop': 1}, ValueError, "'max_drop' must be below 1, since it is a share"),
        ({'max_drop': '1%'}, TypeError, "'max_drop' must be a number, got str"),
        ({'max_drop': True}, TypeError, "'max_drop' must be a number, got bool"),
        ({'candidates': []}, ValueError, "'candidates' must hold at least one number"),
        ({'candidates': [4, 0]}, ValueError, 'must be 1 to 4096, got 0'),
        ({'candidates': [4097]}, ValueError, 'must be 1 to 4096, got 4097'),
        ({'candidates': [2.0]}, TypeError, 'must be an integer, got float'),
        ({'candidates': 8}, TypeError, "'candidates' must be a list of numbers of samp.*, got int"),
        ({'apply': 'no'}, TypeError, "'apply' must be True or False, got str"),
        ({'metric': 'acc'}, TypeError, "'metric' must be a function, .* got str: leave it out"),
        ({'strategy': 'best'}, ValueError, "'strategy' must be one of"),
        ({'strategy': 3}, TypeError, "'strategy' must be a string"),
        (
            {'model': SampledSAGEConv(64, 4, 1, aggr='max'), 'strategy': 'unbiased'},
            ValueError,
            "strategy='unbiased' supports only sums and means",
        ),
        ({'metric': lambda out, data: math.nan}, ValueError, 'finite score to compare with'),
        ({'forward': lambda model, data: data.x}, ValueError, 'none of its sampled layers'),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Net(SampledGCNConv)
    before = state_of(model)
    with pytest.raises(error, match=message):
        choose_num_samples(**{'model': model, 'data': planted(), **kwargs})
    assert_same(before, state_of(model))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'val_mask': None}, 'must have a val_mask and y'),
        ({'y': None}, 'must have a val_mask and y'),
        ({'val_mask': torch.zeros(300, dtype=torch.bool)}, 'some of them set'),
        ({'val_mask': torch.ones(300, 10, dtype=torch.bool)}, 'one entry for each node'),
        ({'val_mask': torch.arange(300)}, 'must be a bool tensor'),
        ({'y': torch.ones(300, 5)}, 'one class for each node'),
        ({'y': torch.ones(300)}, 'one class for each node'),
    ],
)
def test_data_that_the_usual_metric_cannot_use(change: dict[str, Any], message: str) -> None:
    data = planted()
    for name, value in change.items():
        data[name] = value
    model = Net(SampledGCNConv)
    with pytest.raises(ValueError, match=message):
        choose_num_samples(model, data)
    choose_num_samples(model, data, metric=lambda out, data: 1.0)
    if 'val_mask' in change:
        del data.val_mask
        with pytest.raises(ValueError, match=message if change['val_mask'] is None else 'val_mask'):
            choose_num_samples(model, data)


def test_a_model_of_chance_is_warned_of() -> None:
    data = planted()
    model = Net(SampledGCNConv)
    with pytest.warns(UserWarning, match='no better than that of naming the most common class'):
        choose_num_samples(model, data)
    right = torch.nn.functional.one_hot(data.y % 4).float()
    data.y = data.y % 4

    def forward(model: Module, data: Data) -> Tensor:
        model(data.x, data.edge_index)
        return right

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        choose_num_samples(model, data, forward=forward)
        choose_num_samples(model, data, metric=lambda out, data: 0.0)
    data.y = torch.zeros_like(data.y)  # Accuracy says nothing about a single class.
    with pytest.warns(UserWarning, match='the accuracy .* that of naming .* common class, 1.000'):
        choose_num_samples(model, data, forward=forward)
