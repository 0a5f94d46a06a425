"""The operations: typed checks, kernels, gradients."""

from ._library import with_cuda
from .cbsr import CBSR
from .cbsr_spmm import cbsr_spmm
from .graph import Graph
from .maxk import maxk
from .spmm import spmm
from .to_csr import to_csr

__all__ = ['CBSR', 'Graph', 'cbsr_spmm', 'maxk', 'spmm', 'to_csr', 'with_cuda']
