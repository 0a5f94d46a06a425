"""The compiled ops, and what they must compute."""

import torch

# Ops in plain torch and float64; and the error of an edge out of range, which CUDA reports later.
from pyg_fast.ops._edges import raise_pending
from pyg_fast.ops._library import reference

__all__ = ['op_names', 'ops', 'raise_pending', 'reference']

ops = torch.ops.pyg_fast


def op_names() -> set[str]:
    """The names of all ops."""
    names = (name.partition('::') for name in torch._C._dispatch_get_all_op_names())
    return {op for library, _, op in names if library == 'pyg_fast'}
