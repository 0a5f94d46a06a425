"""Chooses how many features of each node MaxK keeps."""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data

from ._progress import progress
from ._scores import (
    Forward,
    Metric,
    Score,
    check_candidates,
    check_full_score,
    choice_text,
    evaluation_mode,
    least_that_holds,
    score_of,
)
from .papers.maxk import MaxK, MaxKGCNConv, MaxKGINConv, MaxKGNN, MaxKSAGEConv
from .papers.maxk.convs import check_k

_WITH_K = MaxKGCNConv, MaxKSAGEConv, MaxKGNN
_APPLY = MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv, MaxKGNN
_FEWEST, _MOST = 1 / 32, 1 / 2  # shares of the features: fewer lose much, more save little


class KRow(NamedTuple):
    """The measurements of :func:`choose_k` for a number of features."""

    k: int
    score: float
    drop: float  # loss of score, compared with no MaxK
    seconds: float  # of the training


class KChoice(NamedTuple):
    """What :func:`choose_k` returns. It prints as a table."""

    k: int | None  # None if no candidate is good enough
    full_score: float  # without MaxK
    full_seconds: float
    table: list[KRow]  # ascending
    model: Module  # trained with this k

    def __repr__(self) -> str:
        rows = self.table
        measured = {
            'score': [self.full_score, *(row.score for row in rows)],
            'drop': [0.0, *(row.drop for row in rows)],
            'seconds': [self.full_seconds, *(row.seconds for row in rows)],
        }
        text = choice_text('k', self.k, measured, [row.k for row in rows])
        chosen = next((row for row in rows if row.k == self.k), None)
        if chosen is not None and chosen.seconds >= self.full_seconds:
            text += '\nMaxK gained no time here.'
        return text


def choose_k(
    train: Callable[[int | None], Module],
    data: Data,
    max_drop: float = 0.01,
    *,
    candidates: Iterable[int] | None = None,
    metric: Metric | None = None,
    forward: Forward | None = None,
) -> KChoice:
    r"""Chooses how many features :math:`k` of each node MaxK keeps: the smallest :math:`k` whose
    validation score, and that of every larger candidate, stays within :obj:`max_drop` of the score
    without MaxK, as :func:`choose_num_samples` chooses the number of samples.

    MaxK is part of the training, so each candidate is a model of its own: :obj:`train(None)`, then
    :obj:`train(k)` once for each candidate, descending, return trained models. Two runs of one
    :math:`k` differ too: seed them alike, or let :obj:`train` return the best of several. The
    scores are computed in evaluation mode and without gradients.

    Args:
        train (Callable): Makes and trains a model from :obj:`k`; :obj:`None`: without MaxK.
        data (torch_geometric.data.Data): The data to evaluate the models on.
        max_drop (float): Largest allowed loss of score; 0.01 is one point of
            accuracy, of which a drop of 1 or more is an error. (default: :obj:`0.01`)
        candidates (list[int], optional): The numbers of features to try. (default: :obj:`None`,
            the powers of two from a 32th to a half of the features of the model's MaxK layers)
        metric (Callable, optional): The score of a model's output, higher being better, from
            :obj:`(out, data)`. (default: :obj:`None`, the accuracy on :obj:`data.val_mask`)
        forward (Callable, optional): A model's output, from :obj:`(model, data)`.
            (default: :obj:`None`, :obj:`model(data.x, data.edge_index)`)

    Returns:
        KChoice: :obj:`k`, or :obj:`None` if no candidate is good enough; :obj:`full_score` and
        :obj:`full_seconds`, without MaxK; :obj:`table`, ascending, whose rows have :obj:`k`,
        :obj:`score`, :obj:`drop` and :obj:`seconds`, those of the training; and :obj:`model`, which
        was trained with :obj:`k`.

    Raises:
        TypeError: If an argument is of the wrong type, or :obj:`train` does not return a module.
        ValueError: If a model of :obj:`train` has another :obj:`k` or applies no MaxK,
            :obj:`max_drop` is negative or, without a :obj:`metric`, not below 1, :obj:`candidates`
            are empty, below one or, without a layer that says how many features there are, missing,
            the full score is not a finite number, or, without a :obj:`metric`, :obj:`data` has no
            :obj:`val_mask` with some nodes or not one class per node.

    Warns:
        UserWarning: If the accuracy without MaxK is no better than chance.

    Example:
        >>> def train(k):
        ...     model = MaxKGNN('sage', 64, 256, 7, num_layers=3, k=k)
        ...     ...  # trains it
        ...     return model
        >>> choice = pyg_fast.choose_k(train, data, max_drop=0.01)
        >>> choice.k
        32
    """
    if isinstance(train, Module):
        raise TypeError(
            "'train' must be a function of k that returns a trained model, got a model, "
            f'{type(train).__name__}'
        )
    if not callable(train):
        raise TypeError(f"'train' must be callable, got {type(train).__name__}")
    given = None if candidates is None else check_candidates(candidates, check_k, 'features')
    score = score_of(data, max_drop, metric, forward)
    model, full_score, full_seconds = _measure(train, None, score)
    check_full_score(full_score, data, metric)
    table: list[KRow] = []
    chosen = None
    for k in progress((given or _usual_candidates(model))[::-1], 'choose_k'):
        trained, reached, seconds = _measure(train, k, score)
        table.insert(0, KRow(k, reached, full_score - reached, seconds))
        if least_that_holds([(row.k, row.drop) for row in table], max_drop) == k:
            chosen, model = k, trained
        del trained
    return KChoice(chosen, full_score, full_seconds, table, model)


def _measure(
    train: Callable[[int | None], Module], k: int | None, score: Score
) -> tuple[Module, float, float]:
    """A trained model, its score, and the seconds of its training."""
    start = time.perf_counter()
    model = train(k)
    if not isinstance(model, Module):
        raise TypeError(f"'train' must return a torch.nn.Module, got {type(model).__name__}")
    kept = [each.k for each in model.modules() if isinstance(each, _WITH_K)]
    found = {each for each in kept if each is not None}
    is_known = k is None or any(isinstance(each, _APPLY) for each in model.modules())
    if found and k not in found:
        raise ValueError(
            f"'train' must pass its k on to the model: train({k}) returned one with k="
            f'{", ".join(map(str, sorted(found)))}'
        )
    with evaluation_mode(model):
        seconds = time.perf_counter() - start
        with nullcontext() if is_known else _Seen() as seen:
            reached = score(model)
    if seen is not None and not seen.maxk:
        raise ValueError(
            f"'train' must return a model that applies MaxK, got a {type(model).__name__} with no "
            'MaxK layer: use MaxKGNN, a MaxK layer or MaxK(k) in it'
        )
    return model, reached, seconds


class _Seen(TorchDispatchMode):
    """Notes whether MaxK runs, by its op."""

    maxk = False

    def __torch_dispatch__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.maxk |= func is torch.ops.pyg_fast.maxk.default
        return func(*args, **(kwargs or {}))


def _usual_candidates(model: Module) -> list[int]:
    widths = [width for module in model.modules() if (width := _width(module)) is not None]
    if not widths:
        raise ValueError(
            "'candidates' must be given, since no layer of the model says how many features it has"
        )
    width = min(widths)
    powers = [1 << n for n in range(width.bit_length())]
    return [k for k in powers if _FEWEST <= k / width <= _MOST] or [1]


def _width(module: Module) -> int | None:
    """The number of features to which a module applies MaxK."""
    if isinstance(module, MaxKGNN):
        return module.hidden_channels
    if isinstance(module, MaxKGCNConv):
        return module.out_channels
    if isinstance(module, MaxKSAGEConv):
        width = module.in_channels
        return width if isinstance(width, int) else width[0]
    return None
