"""Transforms that prepare graphs once, for all layers and epochs."""

from .to_csr import ToCSR

__all__ = ['ToCSR']
