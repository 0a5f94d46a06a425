"""Sampled mini-batches and batches of small graphs: the loaders, their statistics, graphs and
features shared by processes."""

from ._shards import ShardedFeatures
from ._share import share_data
from ._stats import LoaderStats
from .graph_loader import GraphLoader
from .link_neighbor_loader import FastLinkNeighborLoader
from .neighbor_loader import FastNeighborLoader

__all__ = [
    'FastLinkNeighborLoader', 'FastNeighborLoader', 'GraphLoader', 'LoaderStats', 'ShardedFeatures',
    'share_data',
]  # fmt: skip
