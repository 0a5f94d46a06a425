"""Chooses how many edges of each node a trained model needs to read."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.typing import Adj
from torch_geometric.utils import to_edge_index

from ._progress import progress
from ._scores import (
    Forward,
    Metric,
    check_candidates,
    check_full_score,
    choice_text,
    evaluation_mode,
    least_that_holds,
    score_of,
)
from .ops._numbers import check_flag
from .ops.sampled_spmm import MOST_SAMPLES, check_sampling
from .papers.sampling import SampledGCNConv, SampledSAGEConv

Sampled: TypeAlias = SampledGCNConv | SampledSAGEConv
# Attributes of a layer that an evaluation changes.
_CHANGED = ('num_samples', 'strategy', 'sample', '_cached_norm', '_cached_edges')


class SampleRow(NamedTuple):
    """The measurements of :func:`choose_num_samples` for a number of samples."""

    num_samples: int
    score: float
    drop: float  # loss of score, compared with no sampling
    sampling_rate: float  # share of the edges that are read


class SampleChoice(NamedTuple):
    """What :func:`choose_num_samples` returns. It prints as a table."""

    num_samples: int | None  # None if no candidate is good enough
    full_score: float  # without sampling
    table: list[SampleRow]  # ascending

    def __repr__(self) -> str:
        rows = self.table
        measured = {
            'score': [self.full_score, *(row.score for row in rows)],
            'drop': [0.0, *(row.drop for row in rows)],
            'edges read': [1.0, *(row.sampling_rate for row in rows)],
        }
        return choice_text(
            'num_samples', self.num_samples, measured, [row.num_samples for row in rows]
        )


def choose_num_samples(
    model: Module,
    data: Data,
    max_drop: float = 0.01,
    *,
    candidates: Iterable[int] | None = None,
    metric: Metric | None = None,
    forward: Forward | None = None,
    strategy: str | None = None,
    apply: bool = True,
) -> SampleChoice:
    r"""Chooses how many edges :math:`S` of each node the sampled layers of a trained model read:
    the smallest :math:`S` whose validation score, and that of every larger candidate, stays within
    :obj:`max_drop` of the score with all edges. (A score that recovers and drops again would be
    chance.)

    The model is evaluated once without sampling and then once per candidate, ascending, in
    evaluation mode and without gradients. Only :obj:`num_samples` (and a given :obj:`strategy`) of
    its sampled layers change, and only if a number was found and :obj:`apply` is set. Layers with
    :obj:`sample="never"` always read all edges. With :obj:`strategy="unbiased"` a score is that of
    one draw.

    Args:
        model (torch.nn.Module): The model, with :class:`~pyg_fast.nn.SampledGCNConv` or
            :class:`~pyg_fast.nn.SampledSAGEConv` layers, or a single such layer.
        data (torch_geometric.data.Data): The data to evaluate it on.
        max_drop (float): Largest allowed loss of score; 0.01 is one point of
            accuracy, of which a drop of 1 or more is an error. (default: :obj:`0.01`)
        candidates (list[int], optional): The numbers of samples to try, from 1 to 4096.
            (default: :obj:`None`, the powers of two up to the first that keeps every edge, or to
            4096)
        metric (Callable, optional): The score of the model's output, higher being better, from
            :obj:`(out, data)`. (default: :obj:`None`, the accuracy on :obj:`data.val_mask`)
        forward (Callable, optional): The model's output, from :obj:`(model, data)`.
            (default: :obj:`None`, :obj:`model(data.x, data.edge_index)`)
        strategy (str, optional): The strategy, in place of the layers' own.
            (default: :obj:`None`)
        apply (bool): Whether to set the layers to the result. (default: :obj:`True`)

    Returns:
        SampleChoice: :obj:`num_samples`, or :obj:`None` if no candidate is good enough;
        :obj:`full_score`, without sampling; and :obj:`table`, ascending, whose rows have
        :obj:`num_samples`, :obj:`score`, :obj:`drop` and :obj:`sampling_rate`, the share of the
        edges that are read (the mean over the layers, including self-loops that are always kept).

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the model has no layer that samples or runs none, :obj:`max_drop` is negative
            or, without a :obj:`metric`, not below 1, :obj:`candidates` are empty or out of range,
            the :obj:`strategy` is unknown or not supported by a layer, the full score is not a
            finite number, or, without a :obj:`metric`, :obj:`data` has no :obj:`val_mask` with some
            nodes or not one class per node.

    Warns:
        UserWarning: If the accuracy without sampling is no better than chance: then the model is
            not trained, and no sample too small.

    Example:
        >>> choice = pyg_fast.choose_num_samples(model, data, max_drop=0.01)
        >>> choice.num_samples
        16
        >>> for row in choice.table:
        ...     print(row.num_samples, row.drop, row.sampling_rate)
    """
    check_flag('apply', apply)
    layers = _sampled_layers(model, strategy)
    given = None
    if candidates is not None:
        given = check_candidates(
            candidates, lambda number: check_sampling(number, 'fastrand'), 'samples'
        )
    score = score_of(data, max_drop, metric, forward)
    how = {} if strategy is None else {'strategy': strategy}
    with evaluation_mode(model), _restore_options(layers):
        _set(layers, sample='never')
        with _record_edges(layers) as seen:
            full_score = score(model)
        if not seen:
            raise ValueError("'model' was run, but none of its sampled layers")
        check_full_score(full_score, data, metric)
        rows = [_Rows.of(layer, edge_index) for layer, edge_index in seen]
        _set(layers, sample='always', **how)
        table = []
        usual = _powers(max(each.largest for each in rows))
        for num_samples in progress(given or usual, 'choose_num_samples'):
            _set(layers, num_samples=num_samples)
            reached = score(model)
            rate = sum(each.rate(num_samples) for each in rows) / len(rows)
            table.append(SampleRow(num_samples, reached, full_score - reached, rate))

    chosen = least_that_holds([(row.num_samples, row.drop) for row in table], max_drop)
    if apply and chosen is not None:
        _set(layers, num_samples=chosen, **how)
    return SampleChoice(chosen, full_score, table)


def _set(layers: Iterable[Sampled], **options: object) -> None:
    for layer in layers:
        for name, value in options.items():
            setattr(layer, name, value)


def _sampled_layers(model: Module, strategy: str | None) -> list[Sampled]:
    if not isinstance(model, Module):
        raise TypeError(f"'model' must be a torch.nn.Module, got {type(model).__name__}")
    layers = [m for m in model.modules() if isinstance(m, Sampled)]
    sampling = [layer for layer in layers if layer.sample != 'never']
    if not sampling:
        raise ValueError(
            "'model' has no sampled layer"
            if not layers
            else "'model' has no layer that samples: all have sample='never'"
        )
    if strategy is not None:
        check_sampling(1, strategy)
        for layer in sampling:
            layer.check_strategy(strategy)
    return sampling


def _powers(largest: int) -> list[int]:
    """Powers of two up to the first that is at least :obj:`largest`, or to the maximum."""
    last = min(max(largest, 1), MOST_SAMPLES)
    return [1 << k for k in range((last - 1).bit_length() + 1)]


@contextlib.contextmanager
def _restore_options(layers: list[Sampled]) -> Iterator[None]:
    """Restores what an evaluation changes of the layers afterwards."""
    before = [
        (layer, {name: vars(layer)[name] for name in _CHANGED if name in vars(layer)})
        for layer in layers
    ]
    try:
        yield
    finally:
        for layer, options in before:
            _set([layer], **options)


@contextlib.contextmanager
def _record_edges(layers: list[Sampled]) -> Iterator[list[tuple[Sampled, Adj]]]:
    """Records the edges of each call of a layer."""
    seen: list[tuple[Sampled, Adj]] = []

    def note(layer: Sampled, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        seen.append((layer, given['edge_index']))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


class _Rows(NamedTuple):
    """The edges from which a layer samples, as edges per row."""

    degree: Tensor
    num_loops: int  # self-loops, which some layers always keep

    @classmethod
    def of(cls, layer: Sampled, edge_index: Adj) -> '_Rows':
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            edge_index = to_edge_index(edge_index)[0].flip(0)  # Rows are the destinations.
        elif layer.flow == 'target_to_source':
            edge_index = edge_index.flip(0)
        src, dst = edge_index.as_subclass(Tensor)
        num_loops = 0
        if getattr(layer, 'add_self_loops', False):
            sampled = dst[src != dst]
            num_loops, dst = dst.numel() - sampled.numel(), sampled
        return cls(dst.long().bincount(), num_loops)

    @property
    def largest(self) -> int:
        return int(self.degree.max()) if self.degree.numel() > 0 else 0

    def rate(self, num_samples: int) -> float:
        edges = int(self.degree.sum())
        read = int(self.degree.clamp(max=num_samples).sum())
        return (read + self.num_loops) / max(edges + self.num_loops, 1)
