"""Deprecated: use :mod:`pyg_fast.graph` and :mod:`pyg_fast.ops`."""

import warnings
from importlib import import_module
from typing import Any

_MOVED = {
    'CBSR': ('ops.cbsr', 'CBSR'),
    'ExecutionPath': ('graph.execution_path', 'ExecutionPath'),
    'GCNNorm': ('graph.gcn_norm', 'GCNNorm'),
    'Groups': ('sparse.groups', 'Groups'),
    'execution_paths': ('graph', 'execution_paths'),
    'gcn_norm': ('graph.gcn_norm', 'normalized'),
    'graph_of': ('graph.graph', 'graph_of'),
    'groups_of': ('sparse.groups', 'groups_of'),
    'set_group_sizes': ('graph.graph', 'set_group_sizes'),
    'to_edge_index': ('graph.csr', 'prepare_edge_index'),
}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, new = _MOVED[name]
    warnings.warn(
        f'pyg_fast.formats.{name} has moved: use pyg_fast.{module}.{new}',
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module(f'pyg_fast.{module}'), new)
