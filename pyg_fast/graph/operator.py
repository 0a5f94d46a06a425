"""The path of :class:`SparseOperator` in pickles of version 0.2."""

from ..sparse.operator import Sampling as Sampling
from ..sparse.operator import SparseOperator as SparseOperator
