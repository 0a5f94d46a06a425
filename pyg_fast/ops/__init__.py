"""The operations: typed checks, kernels, gradients."""

import warnings
from importlib import import_module
from typing import Any

# These register raw ops, and have no public function.
from . import head_scores as head_scores
from . import path as path
from . import rabbit_order as rabbit_order
from ._library import with_cuda
from .aggregate import aggregate
from .cbsr import CBSR
from .cbsr_spmm import cbsr_spmm
from .fetch_rows import fetch_rows
from .gat import gat
from .gatv2 import gatv2
from .gcn_norm import gcn_norm
from .match import match, match_degree
from .maxk import maxk
from .neighbor_sample import SampledSubgraph, neighbor_sample, relabel
from .node_map import NodeMap
from .random_walk import random_walk, visited_neighbors
from .sampled_spmm import sampled_spmm
from .spmm import spmm
from .to_csr import to_csr

__all__ = [
    'CBSR',
    'NodeMap',
    'SampledSubgraph',
    'aggregate',
    'cbsr_spmm',
    'fetch_rows',
    'gat',
    'gatv2',
    'gcn_norm',
    'match',
    'match_degree',
    'maxk',
    'neighbor_sample',
    'random_walk',
    'relabel',
    'sampled_spmm',
    'spmm',
    'to_csr',
    'visited_neighbors',
    'with_cuda',
]


def __getattr__(name: str) -> Any:
    if name != 'Graph':
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    warnings.warn(
        'pyg_fast.ops.Graph has moved: use pyg_fast.graph.Graph', DeprecationWarning, stacklevel=2
    )
    return import_module('..graph', __name__).Graph
