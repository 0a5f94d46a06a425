"""Messages that users write in PyTorch, as one kernel."""

from ._fallback import Fallback, make_entry
from .message_passing import message_passing

__all__ = ['Fallback', 'make_entry', 'message_passing']
