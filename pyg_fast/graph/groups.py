"""The path of :class:`Groups` in pickles of version 0.2."""

from ..sparse.groups import Groups as Groups
