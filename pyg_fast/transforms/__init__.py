"""Transforms that prepare graphs once, for all layers and epochs."""

from .execution_paths import ExecutionPaths
from .prepare import Prepare
from .reorder import Reorder
from .to_csr import ToCSR

__all__ = ['ExecutionPaths', 'Prepare', 'Reorder', 'ToCSR']
