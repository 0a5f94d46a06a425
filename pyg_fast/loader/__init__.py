"""Sampled mini-batches: the loader, its statistics, and graphs shared by processes."""

from ._share import share_data
from ._stats import LoaderStats
from .neighbor_loader import FastNeighborLoader

__all__ = ['FastNeighborLoader', 'LoaderStats', 'share_data']
