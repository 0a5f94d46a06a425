"""ES-SpMM and CacheSample: layers that aggregate a sample of each node's edges."""

from .convs import SampledGCNConv, SampledSAGEConv

__all__ = ['SampledGCNConv', 'SampledSAGEConv']
