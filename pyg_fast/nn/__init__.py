"""The layers."""

from typing import TYPE_CHECKING

from .._lazy import lazy
from . import hgt as hgt  # It adds to MIXINS.
from . import relational as relational
from ._aggregated import AggregatedInput
from ._inference import inference
from .gat import FusedGATConv, FusedGATv2Conv
from .gcn import FusedGCNConv
from .gin import FusedGINConv
from .gps import FusedGPSConv
from .message_passing import FusedMessagePassing
from .sage import FusedSAGEConv
from .transformer import FusedTransformerConv

if TYPE_CHECKING:
    from ..papers.maxk import MaxK, MaxKGCNConv, MaxKGINConv, MaxKGNN, MaxKSAGEConv
    from ..papers.paths import (
        PathPreparedGCNConv,
        PathPreparedGINConv,
        PathPreparedGNN,
        PathPreparedSAGEConv,
    )
    from ..papers.sampling import SampledGCNConv, SampledSAGEConv

_MAXK, _PATHS, _SAMPLING = 'papers.maxk', 'papers.paths', 'papers.sampling'
_ROOMS = {
    'MaxK': _MAXK, 'MaxKGCNConv': _MAXK, 'MaxKGINConv': _MAXK, 'MaxKGNN': _MAXK,
    'MaxKSAGEConv': _MAXK, 'PathPreparedGCNConv': _PATHS, 'PathPreparedGINConv': _PATHS,
    'PathPreparedGNN': _PATHS, 'PathPreparedSAGEConv': _PATHS, 'SampledGCNConv': _SAMPLING,
    'SampledSAGEConv': _SAMPLING,
}  # fmt: skip
__getattr__ = lazy(__name__, _ROOMS)

__all__ = [
    'AggregatedInput', 'FusedGATConv', 'FusedGATv2Conv', 'FusedGCNConv', 'FusedGINConv',
    'FusedGPSConv', 'FusedMessagePassing', 'FusedSAGEConv', 'FusedTransformerConv', 'MaxK',
    'MaxKGCNConv', 'MaxKGINConv', 'MaxKGNN', 'MaxKSAGEConv', 'PathPreparedGCNConv',
    'PathPreparedGINConv', 'PathPreparedGNN', 'PathPreparedSAGEConv', 'SampledGCNConv',
    'SampledSAGEConv', 'inference',
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
