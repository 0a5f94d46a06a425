"""PyTorch Geometric layers on compiled CUDA and CPU kernels."""

__version__ = '0.1.0'

from . import formats, nn, ops, transforms
from .ops import with_cuda

__all__ = ['__version__', 'formats', 'nn', 'ops', 'transforms', 'with_cuda']
