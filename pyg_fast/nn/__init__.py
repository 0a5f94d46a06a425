"""The layers."""

from .gcn import PathPreparedGCNConv

__all__ = ['PathPreparedGCNConv']
