"""EPPGCN: training whose backward pass computes only what the loss reads."""

from .build import execution_paths
from .convs import PathPreparedGCNConv, PathPreparedGINConv, PathPreparedSAGEConv
from .execution_path import ExecutionPath
from .gnn import PathPreparedGNN
from .prepare import Prepare
from .transform import ExecutionPaths

__all__ = [
    'ExecutionPath', 'ExecutionPaths', 'PathPreparedGCNConv', 'PathPreparedGINConv',
    'PathPreparedGNN', 'PathPreparedSAGEConv', 'Prepare', 'execution_paths',
]  # fmt: skip
