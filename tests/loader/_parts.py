"""The private parts of the loader that tests call: they know these by this module alone."""

from pyg_fast.loader import (
    _columns,
    _core,
    _links,
    _negatives,
    _order,
    _pipeline,
    _sample,
    _seeds,
    _stats,
)

__all__ = [
    'Budget', 'Meter', 'PendingBatch', 'ThreadedIterator', '_columns', '_core', '_links',
    '_negatives', '_sample', 'greedy_order', 'mix_seeds',
]  # fmt: skip

Budget = _columns.Budget  # of device memory, for features
greedy_order = _order.greedy_order  # of the batches in a window
PendingBatch, ThreadedIterator = _pipeline.PendingBatch, _pipeline.ThreadedIterator
Meter = _stats.Meter
mix_seeds = _seeds.mix_seeds
