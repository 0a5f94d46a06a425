"""Prepared graphs: their structure, its cache, execution paths."""

from ..sparse.graph import Graph
from ._prepare_paths import execution_paths
from .batch_edge_index import BatchEdgeIndex
from .csr import prepare_edge_index
from .execution_path import ExecutionPath
from .graph import graph_of, set_group_sizes
from .prepared_graph import PreparedGraph

__all__ = [
    'BatchEdgeIndex', 'ExecutionPath', 'Graph', 'PreparedGraph', 'execution_paths', 'graph_of',
    'prepare_edge_index', 'set_group_sizes',
]  # fmt: skip
