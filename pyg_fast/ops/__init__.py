"""The operations: typed checks, kernels, gradients."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imported only to register raw ops; they have no public function.
from . import attention_scores as attention_scores
from . import path as path
from ._library import with_cuda
from .aggregate import aggregate
from .cbsr import CBSR
from .cbsr_spmm import cbsr_spmm
from .gat import gat
from .gather_rows import gather_rows
from .gatv2 import gatv2
from .gcn_norm import gcn_norm
from .match import match, match_degree
from .neighbor_sample import SampledSubgraph, neighbor_sample, relabel
from .node_map import NodeMap
from .random_walk import pinsage_neighbors, random_walk
from .sampled_spmm import sampled_spmm
from .spmm import spmm
from .to_csr import to_csr

if TYPE_CHECKING:
    from ..papers.maxk import maxk

__all__ = [
    'CBSR',
    'NodeMap',
    'SampledSubgraph',
    'aggregate',
    'cbsr_spmm',
    'gather_rows',
    'gat',
    'gatv2',
    'gcn_norm',
    'match',
    'match_degree',
    'maxk',
    'message_passing',
    'neighbor_sample',
    'random_walk',
    'relabel',
    'sampled_spmm',
    'spmm',
    'to_csr',
    'pinsage_neighbors',
    'with_cuda',
]


def __getattr__(name: str) -> Any:
    if name == 'message_passing':  # It is made of other ops, and imported when it is used.
        return import_module('pyg_fast.message').message_passing
    if name == 'maxk':
        return import_module('pyg_fast.papers.maxk').maxk
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
