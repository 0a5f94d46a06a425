"""The operations: typed checks, kernels, gradients."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from ..functional.aggregate import aggregate
from ..functional.cbsr_spmm import cbsr_spmm
from ..functional.gat import gat
from ..functional.gatv2 import gatv2
from ..functional.gcn_norm import gcn_norm
from ..functional.sampled_spmm import sampled_spmm
from ..functional.spmm import spmm
from ..sparse.to_csr import to_csr

# Imported only to register raw ops; they have no public function.
from . import attention_scores as attention_scores
from . import path as path
from . import typed_sample as typed_sample
from ._library import with_cuda
from .cbsr import CBSR
from .gather_rows import gather_rows
from .match import match, match_degree
from .neighbor_sample import SampledSubgraph, neighbor_sample, relabel
from .node_map import NodeMap
from .random_walk import pinsage_neighbors, random_walk

if TYPE_CHECKING:
    from ..attention import segment_attention
    from ..message.message_passing import message_passing
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
    'segment_attention',
    'spmm',
    'to_csr',
    'pinsage_neighbors',
    'with_cuda',
]


def __getattr__(name: str) -> object:
    # They stand above other ops, and are imported when they are used.
    if name == 'message_passing':
        return import_module('pyg_fast.message').message_passing
    if name == 'segment_attention':
        return import_module('pyg_fast.attention').segment_attention
    if name == 'maxk':
        return import_module('pyg_fast.papers.maxk').maxk
    raise AttributeError(
        f'module {__name__!r} has no attribute {name!r}', name=name, obj=sys.modules[__name__]
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
