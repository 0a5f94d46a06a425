"""The layers."""

from .gat import FusedGATConv, FusedGATv2Conv
from .gcn import PathPreparedGCNConv
from .gin import FastGINConv
from .maxk import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from .maxk_gnn import MaxKGNN
from .sage import FastSAGEConv

__all__ = [
    'FastGINConv', 'FastSAGEConv', 'FusedGATConv', 'FusedGATv2Conv', 'MaxK', 'MaxKGCNConv',
    'MaxKGINConv', 'MaxKGNN', 'MaxKSAGEConv', 'PathPreparedGCNConv',
]  # fmt: skip
