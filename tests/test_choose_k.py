"""`choose_k`: the models that it trains, their scores, and its choice."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Dropout, Identity, Linear, Module
from torch_geometric.data import Data

from pyg_fast import choose_k
from pyg_fast._choose_k import KChoice, KRow
from pyg_fast.datasets import PlantedGraph
from pyg_fast.nn import MaxK, MaxKGCNConv, MaxKGINConv, MaxKGNN, MaxKSAGEConv
from pyg_fast.ops import maxk
from pyg_fast.transforms import ToCSR


class Scripted(Module):
    """A model whose score is known."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score, self.dropout, self.maxk = score, Dropout(), MaxK(1)

    def forward(self, x: Tensor, edge_index: Tensor) -> float:
        assert not self.dropout.training
        assert not torch.is_grad_enabled()
        return self.score


def trainer(scores: dict[int | None, float]) -> tuple[Callable[[int | None], Module], list]:
    calls: list[int | None] = []

    def train(k: int | None) -> Module:
        calls.append(k)
        return Scripted(scores[k])

    return train, calls


DATA = Data(x=torch.zeros(2, 1), edge_index=torch.zeros(2, 0, dtype=torch.long))


@pytest.mark.parametrize(
    ('full', 'scores', 'max_drop', 'expected'),
    [
        (0.9, {4: 0.5, 8: 0.8, 16: 0.895, 32: 0.9}, 0.01, 16),
        (0.9, {4: 0.5, 8: 0.8, 16: 0.895, 32: 0.9}, 1.0, 4),
        (0.9, {4: 0.95, 8: 0.8, 16: 0.89, 32: 0.9}, 0.01, 16),  # That of 4 is chance.
        (0.9, {4: 0.9, 8: 0.9, 16: 0.9, 32: 0.8}, 0.01, None),
        (0.9, {4: 0.9, 8: math.nan, 16: 0.9}, 1.0, 16),
        (0.81, {8: 0.79, 16: 0.80}, 0.01, 16),  # 0.81 - 0.80 is more than 0.01 in binary.
    ],
)
def test_least_from_which_all_hold(
    full: float, scores: dict[int, float], max_drop: float, expected: int | None
) -> None:
    train, calls = trainer({None: full, **scores})
    choice = choose_k(train, DATA, max_drop, candidates=[*scores, 16], metric=lambda out, data: out)
    assert choice.k == expected
    assert choice.full_score == full
    assert calls == [None, *sorted(scores, reverse=True)]  # once each
    assert [row.k for row in choice.table] == sorted(scores)
    for row in choice.table:
        assert row[1:3] == pytest.approx((scores[row.k], full - scores[row.k]), nan_ok=True)
        assert row.seconds >= 0
    assert choice.model.score == (full if expected is None else scores[expected])
    assert choice.model.dropout.training
    head, whole, *rows = str(choice).splitlines()
    assert repr(choice) == str(choice)
    assert head.split() == ['k', 'score', 'drop', 'seconds']
    assert whole.split()[:3] == ['all', f'{full:.4g}', '0']
    chosen = [row.split()[0] for row in rows if row.endswith('chosen')]
    assert chosen == ([] if expected is None else [str(expected)])
    assert rows[-1].endswith('none is good enough') == (expected is None)


@pytest.mark.parametrize(
    ('make', 'expected'),
    [
        (lambda: MaxKGNN('gin', 5, 64, 3, 2, k=None), [2, 4, 8, 16, 32]),
        (lambda: MaxKGCNConv(5, 256, k=None), [8, 16, 32, 64, 128]),
        (lambda: MaxKSAGEConv(12, 4, k=None), [1, 2, 4]),
        (lambda: MaxKSAGEConv((12, 9), 4, k=None), [1, 2, 4]),
        (lambda: MaxKGCNConv(5, 1, k=None), [1]),
        (lambda: MaxKGINConv(Identity(), k=None), None),
        (lambda: Linear(3, 3), None),
    ],
)
def test_usual_candidates(make: Callable[[], Module], expected: list[int] | None) -> None:
    options = dict(metric=lambda out, data: 1.0, forward=lambda model, data: data.x)
    if expected is None:
        with pytest.raises(ValueError, match="'candidates' must be given"):
            choose_k(lambda k: make(), DATA, **options)
    else:
        assert [row.k for row in choose_k(lambda k: make(), DATA, **options).table] == expected


def test_trained_models_keep_few_features(device: torch.device) -> None:
    data = ToCSR()(PlantedGraph('tiny')[0]).to(device)
    num_classes = int(data.y.max()) + 1
    models = []

    def train(k: int | None) -> Module:
        torch.manual_seed(0)
        model = MaxKGNN('sage', 64, 32, num_classes, num_layers=2, k=k).to(device)
        optimizer = torch.optim.Adam(model.parameters(), 0.02)
        for _ in range(15):
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)[data.train_mask]
            torch.nn.functional.cross_entropy(out, data.y[data.train_mask]).backward()
            optimizer.step()
        models.append(model)
        return model

    with warnings.catch_warnings():
        warnings.simplefilter('error')
        choice = choose_k(train, data, 0.1, candidates=[2, 8, 16])
    assert choice.full_score > 0.4
    assert choice.model is next(m for m in models if m.k == choice.k)
    hits = choice.model.eval()(data.x, data.edge_index).argmax(-1) == data.y
    scores = {None: choice.full_score, **{row.k: row.score for row in choice.table}}
    assert float(hits[data.val_mask].double().mean()) == pytest.approx(scores[choice.k])


@pytest.mark.parametrize(
    ('kwargs', 'error', 'message'),
    [
        ({'train': 3}, TypeError, "'train' must be callable, got int"),
        ({'train': Linear(2, 2)}, TypeError, 'must be a function of k that returns .* Linear'),
        (
            {'train': lambda k: Scripted(0.5) if k is None else MaxKGNN('gcn', 4, 8, 3, 2, k=3)},
            ValueError,
            r"'train' must pass its k on .*: train\(2\) returned one with k=3",
        ),
        (
            {
                'train': lambda k: Scripted(0.5) if k is None else Linear(2, 2),
                'forward': lambda model, data: 0.5,
            },
            ValueError,
            'must return a model that applies MaxK, got a Linear with no MaxK layer',
        ),
        ({'train': lambda k: None}, TypeError, "'train' must return a torch.nn.Module, got None"),
        ({'max_drop': -1}, ValueError, "'max_drop' must be at least 0"),
        ({'max_drop': 1.0, 'metric': None}, ValueError, "'max_drop' must be below 1"),
        ({'metric': None}, ValueError, 'must have a val_mask and y'),
        ({'candidates': []}, ValueError, "'candidates' must hold at least one number of features"),
        ({'candidates': [0]}, ValueError, "must hold .* 'k' must be at least 1, got 0"),
        ({'candidates': '8'}, TypeError, "'candidates' must be a list of numbers of .*, got str"),
        ({'metric': lambda out, data: None}, TypeError, "'metric' must return a number, got None"),
        ({'candidates': [2.0]}, TypeError, "'k' must be an integer, got float"),
        ({'candidates': 8}, TypeError, "'candidates' must be a list of numbers of feat.*, got int"),
        ({'metric': 'acc'}, TypeError, "'metric' must be a function, .* got str: leave it out"),
        ({'forward': 'yes'}, TypeError, "'forward' must be a function, .* got str: leave it out"),
        ({'metric': lambda out, data: math.inf}, ValueError, 'finite score to compare with'),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    usual = dict(
        train=lambda k: Scripted(0.5), data=DATA, candidates=[2], metric=lambda out, data: out
    )
    with pytest.raises(error, match=message):
        choose_k(**{**usual, **kwargs})


def test_a_model_that_calls_maxk() -> None:
    """Without a layer that has a number of features."""

    def train(k: int | None) -> Module:
        model = Linear(2, 2)
        model.k = k
        return model

    def forward(model: Any, data: Data) -> float:
        if model.k is not None:
            maxk(torch.rand(3, 4), model.k)
        return 0.5

    choice = choose_k(train, DATA, candidates=[2], metric=lambda out, data: out, forward=forward)
    assert choice.k == 2


@pytest.mark.parametrize(('seconds', 'gains'), [(0.9, True), (1.0, False)])
def test_a_choice_tells_if_nothing_was_gained(seconds: float, gains: bool) -> None:
    rows = [KRow(2, 0.8, 0.1, 3.0), KRow(4, 0.9, 0.0, seconds)]
    assert ('MaxK gained no time here' in repr(KChoice(4, 0.9, 1.0, rows, Identity()))) != gains
    assert 'gained' not in repr(KChoice(None, 0.9, 0.5, rows, Identity()))
