"""The place of pickles that 0.2 has written."""

from .._lazy import moved

__getattr__ = moved('sparse.graph')
