"""Attention within the graphs of a batch."""

from ._op import segment_attention

__all__ = ['segment_attention']
