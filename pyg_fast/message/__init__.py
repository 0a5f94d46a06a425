"""Messages that users write in PyTorch, as one kernel."""

from ._entry import Entry, Fallback

__all__ = ['Entry', 'Fallback']
