"""Sampled mini-batches: the loader, its statistics, graphs and features shared by processes."""

from ._shards import ShardedFeatures
from ._share import share_data
from ._stats import LoaderStats
from .neighbor_loader import FastNeighborLoader

__all__ = ['FastNeighborLoader', 'LoaderStats', 'ShardedFeatures', 'share_data']
