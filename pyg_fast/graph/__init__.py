"""Prepared graphs: their structure and its cache."""

from typing import TYPE_CHECKING

from .._lazy import lazy
from ..sparse.graph import Graph
from .batch_edge_index import BatchEdgeIndex
from .csr import prepare_edge_index
from .graph import graph_of, set_group_sizes
from .prepared_graph import PreparedGraph

if TYPE_CHECKING:
    from ..papers.paths import ExecutionPath, execution_paths

__getattr__ = lazy(__name__, dict.fromkeys(('ExecutionPath', 'execution_paths'), 'papers.paths'))

__all__ = [
    'BatchEdgeIndex', 'ExecutionPath', 'Graph', 'PreparedGraph', 'execution_paths', 'graph_of',
    'prepare_edge_index', 'set_group_sizes',
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
