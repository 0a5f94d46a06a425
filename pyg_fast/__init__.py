"""PyTorch Geometric layers on compiled CUDA and CPU kernels."""

__version__ = '0.2.0'

import logging as _logging

# First: its functions stand above `graph`, which stands on its modules.
from . import ops  # isort: skip
from . import datasets, errors, graph, loader, nn, transforms
from . import papers as papers
from ._accelerate import accelerate, accelerate_report, restore
from ._batches import CapturedBatchStep, CapturedInference, capture_inference
from ._benchmark import Benchmark, benchmark
from ._capture import CapturedStep, capture
from ._choose_k import choose_k
from ._choose_num_samples import choose_num_samples
from ._compile import compile, export
from ._lazy import placed as _placed
from ._memory_estimate import MemoryEstimate, memory_estimate
from ._report import LayerReport
from .graph.small_graphs import small_graphs
from .ops import with_cuda

_logging.getLogger('pyg_fast').addHandler(_logging.NullHandler())

__getattr__ = _placed(__name__, ['nn', 'loader', 'transforms', 'graph', 'ops', 'errors'])

__all__ = [
    'Benchmark', 'CapturedBatchStep', 'CapturedInference', 'CapturedStep', 'LayerReport',
    'MemoryEstimate', '__version__', 'accelerate', 'accelerate_report', 'benchmark', 'capture',
    'capture_inference', 'choose_k', 'choose_num_samples', 'compile', 'datasets', 'errors',
    'export', 'graph', 'loader', 'memory_estimate', 'nn', 'ops', 'restore', 'small_graphs',
    'transforms', 'with_cuda',
]  # fmt: skip
