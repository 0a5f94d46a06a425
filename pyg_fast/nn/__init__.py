"""The layers."""

from .gcn import PathPreparedGCNConv
from .gin import FastGINConv
from .sage import FastSAGEConv

__all__ = ['FastGINConv', 'FastSAGEConv', 'PathPreparedGCNConv']
