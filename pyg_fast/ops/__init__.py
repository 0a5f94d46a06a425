"""The operations: typed checks, kernels, gradients."""

from ._library import with_cuda
from .graph import Graph
from .spmm import spmm
from .to_csr import to_csr

__all__ = ['Graph', 'spmm', 'to_csr', 'with_cuda']
