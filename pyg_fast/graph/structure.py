"""The path of :class:`Graph` in pickles of version 0.2."""

from ..sparse.graph import Graph as Graph
