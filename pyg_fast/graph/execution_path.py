"""The place of pickles that 0.2 has written."""

from .._lazy import lazy

__getattr__ = lazy(__name__, {'ExecutionPath': 'papers.paths'})
