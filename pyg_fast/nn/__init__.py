"""The layers."""

from . import hgt as hgt  # It adds to MIXINS.
from . import relational as relational
from ._inference import inference
from ._path import AggregatedInput
from .gat import FusedGATConv, FusedGATv2Conv
from .gcn import PathPreparedGCNConv
from .gin import PathPreparedGINConv
from .maxk import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from .maxk_gnn import MaxKGNN
from .message_passing import FusedMessagePassing
from .path_prepared_gnn import PathPreparedGNN
from .sage import PathPreparedSAGEConv
from .sampled import SampledGCNConv, SampledSAGEConv
from .transformer import FusedTransformerConv

__all__ = [
    'AggregatedInput', 'FusedGATConv', 'FusedGATv2Conv', 'FusedMessagePassing',
    'FusedTransformerConv', 'MaxK', 'MaxKGCNConv', 'MaxKGINConv', 'MaxKGNN', 'MaxKSAGEConv',
    'PathPreparedGCNConv', 'PathPreparedGINConv', 'PathPreparedGNN', 'PathPreparedSAGEConv',
    'SampledGCNConv', 'SampledSAGEConv', 'inference',
]  # fmt: skip
