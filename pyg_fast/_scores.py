"""Scores of models on validation nodes, by which :func:`choose_num_samples` and :func:`choose_k`
choose."""

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data

from ._report import table_of

T = TypeVar('T')
Metric: TypeAlias = Callable[[Tensor, Data], float]
Forward: TypeAlias = Callable[[Module, Data], Tensor]
Score: TypeAlias = Callable[[Module], float]

_ROUNDING = 1e-9  # Tolerance: 0.81 - 0.8 is slightly above 0.01.


def score_of(data: Data, max_drop: float, metric: Metric | None, forward: Forward | None) -> Score:
    """The score of a model: its accuracy on the validation nodes, unless a metric is given.

    Raises:
        TypeError, ValueError: If :obj:`max_drop` is no allowed loss of this score, the data do not
            suit it, or :obj:`metric` or :obj:`forward` cannot be called.
    """
    if metric is not None and not callable(metric):
        raise TypeError(
            f"'metric' must be a function, metric(out, data), got {type(metric).__name__}: leave "
            'it out for the accuracy on data.val_mask'
        )
    check_forward(forward)
    if isinstance(max_drop, bool) or not isinstance(max_drop, int | float):
        raise TypeError(f"'max_drop' must be a number, got {type(max_drop).__name__}")
    if not max_drop >= 0:
        raise ValueError(f"'max_drop' must be at least 0, got {max_drop}")
    if metric is None:
        if max_drop >= 1:
            raise ValueError(
                f"'max_drop' must be below 1, since it is a share of accuracy, got {max_drop}: one "
                'point is 0.01'
            )
        _check_val_mask(data)
        metric = _val_accuracy
    return partial(_score, data, metric, forward or _forward)


def check_forward(forward: object) -> None:
    """Raises unless the output of a model comes from a function, or is the usual one."""
    if forward is not None and not callable(forward):
        raise TypeError(
            f"'forward' must be a function, forward(model, data), got {type(forward).__name__}: "
            'leave it out for model(data.x, data.edge_index)'
        )
    if forward is not None:
        _check_takes_two('forward', forward, 'the model and the data')


def _check_takes_two(name: str, function: Callable, what: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"'{name}' must take two arguments, {what}: {error}") from error


def check_loss_fn(name: str, loss_fn: object, of: str | None) -> None:
    """Raises unless a loss can be called: a function, or an object; with :obj:`of`, by the output
    and what is named so, which no loss of PyTorch takes."""
    if not callable(loss_fn):
        raise TypeError(f"'{name}' must be callable, got {type(loss_fn).__name__}")
    kind = type(loss_fn) if isinstance(loss_fn, Module) else loss_fn
    title = getattr(kind, '__name__', 'a loss')
    if of is not None and str(getattr(kind, '__module__', '')).startswith('torch.nn'):
        raise TypeError(
            f"'{name}' must take the output and the {of}, got PyTorch's {title}: write lambda out, "
            f'{of}: loss(out, {of}.y)'
        )
    if isinstance(loss_fn, type):
        raise TypeError(
            f"'{name}' must be a function or an object, got the class {title}: write {title}()"
        )
    assert callable(loss_fn)
    _check_takes_two(name, loss_fn, f'the output and the {of or "labels"}')


def check_candidates(
    candidates: Iterable[int], check: Callable[[int], None], what: str
) -> list[int]:
    """The candidates, each of them checked, ascending."""
    given: object = candidates
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise TypeError(
            f"'candidates' must be a list of numbers of {what}, such as [8, 16, 32], got "
            f'{type(candidates).__name__}'
        )
    chosen = list(candidates)
    for candidate in chosen:
        try:
            check(candidate)
        except (TypeError, ValueError) as error:
            raise type(error)(f"'candidates' must hold numbers of {what}: {error}") from None
    if not chosen:
        raise ValueError(f"'candidates' must hold at least one number of {what}, got none")
    return sorted(set(chosen))


def choice_text(
    name: str, chosen: int | None, measured: Mapping[str, Sequence[float]], values: Sequence[int]
) -> str:
    """A choice as a table of what was measured, first of the model without sampling or MaxK."""
    columns = [['all', *map(str, values)]]
    columns += [[f'{round(value, 9):.4g}' for value in column] for column in measured.values()]
    marks = ['', *('chosen' if value == chosen else '' for value in values)]
    table = table_of((name, *measured, ''), zip(*columns, marks, strict=True))
    return table if chosen is not None else f'{table}\n{name}: none is good enough'


def check_full_score(score: float, data: Data, metric: Metric | None) -> None:
    """Raises unless a score, of which others may lose some, is a number; warns if the accuracy is
    that of chance."""
    if not math.isfinite(score):
        raise ValueError(f"'metric' must return a finite score to compare with, got {score}")
    if metric is not None:
        return
    y = data.y[data.val_mask]
    chance = y.unique(return_counts=True)[1].max().item() / y.numel()
    # Two standard deviations of the accuracy of a model that names the most common class.
    if score <= chance + 2 * math.sqrt(chance * (1 - chance) / y.numel()):
        warnings.warn(
            f'the accuracy {score:.3f} on the validation nodes is no better than that of naming '
            f'the most common class, {chance:.3f}: nothing can be lost. Train the model before',
            stacklevel=3,
        )


def least_that_holds(drops: Sequence[tuple[T, float]], max_drop: float) -> T | None:
    """The first value, of ascending ones, from which on every loss of score is small enough."""
    chosen = None
    for value, drop in reversed(drops):
        if not drop <= max_drop + _ROUNDING:  # also for NaN
            break
        chosen = value
    return chosen


@contextlib.contextmanager
def evaluation_mode(model: Module) -> Iterator[None]:
    """Evaluation mode, without gradients; restores the modes of all modules afterwards."""
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        # Compiled code would recompile for every candidate.
        with torch.no_grad(), torch.compiler.set_stance('force_eager'):
            yield
    finally:
        for module, flag in training:
            module.training = flag


def _score(data: Data, metric: Metric, forward: Forward, model: Module) -> float:
    score: Any = metric(forward(model, data), data)
    try:
        return float(score)
    except (TypeError, ValueError, RuntimeError) as error:
        got = list(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise TypeError(f"'metric' must return a number, got {got}") from error


def _forward(model: Module, data: Data) -> Tensor:
    return model(data.x, data.edge_index)


def _val_accuracy(out: Tensor, data: Data) -> float:
    mask = data.val_mask
    return (out[mask].argmax(dim=-1) == data.y[mask]).double().mean().item()


def _check_val_mask(data: Data) -> None:
    mask, y = getattr(data, 'val_mask', None), getattr(data, 'y', None)
    if not isinstance(mask, Tensor) or not isinstance(y, Tensor):
        raise ValueError("'data' must have a val_mask and y, or pass a 'metric'")
    if mask.dtype != torch.bool or mask.dim() != 1 or not bool(mask.any()):
        raise ValueError(
            "'data.val_mask' must be a bool tensor with one entry for each node, some of them set"
        )
    if y.dim() != 1 or y.is_floating_point():
        raise ValueError("'data.y' must be one class for each node, or pass a 'metric'")
