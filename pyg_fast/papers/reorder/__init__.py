"""Rabbit Order and other orders of nodes with better cache locality."""

from .transform import Reorder

__all__ = ['Reorder']
