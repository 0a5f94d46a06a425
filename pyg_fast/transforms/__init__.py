"""Transforms that prepare graphs once, for all layers and epochs."""

from .execution_paths import ExecutionPaths
from .group_sizes import GroupSizes, choose_group_size
from .prepare import Prepare
from .reorder import Reorder
from .to_csr import ToCSR

__all__ = ['ExecutionPaths', 'GroupSizes', 'Prepare', 'Reorder', 'ToCSR', 'choose_group_size']
