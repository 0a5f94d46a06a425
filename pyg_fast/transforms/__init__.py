"""Transforms that prepare graphs once, for all layers and epochs."""

from .reorder import Reorder
from .to_csr import ToCSR

__all__ = ['Reorder', 'ToCSR']
