"""MaxK-GNN (ASPLOS'24): the top-k nonlinearity, layers on its sparse features, and the model."""

from .convs import MaxK, MaxKGCNConv, MaxKGINConv, MaxKSAGEConv
from .gnn import MaxKGNN
from .op import maxk

__all__ = ['MaxK', 'MaxKGCNConv', 'MaxKGINConv', 'MaxKGNN', 'MaxKSAGEConv', 'maxk']
