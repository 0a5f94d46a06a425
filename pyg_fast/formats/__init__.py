"""What transforms make and kernels read."""

from ..ops.cbsr import CBSR
from ..ops.graph import graph_of, set_group_sizes
from ..ops.groups import Groups, groups_of
from .csr import to_edge_index
from .execution_path import ExecutionPath, execution_paths
from .gcn_norm import GCNNorm, gcn_norm

__all__ = [
    'CBSR', 'ExecutionPath', 'GCNNorm', 'Groups', 'execution_paths', 'gcn_norm', 'graph_of',
    'groups_of', 'set_group_sizes', 'to_edge_index',
]  # fmt: skip
