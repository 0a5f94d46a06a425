"""The compiled ops, and what they must compute."""

import torch

# What ops must compute, in plain torch and float64; the edges that dropout of attention keeps; the
# error of an edge out of range, which CUDA reports later.
from pyg_fast.ops._attention import edges_and_loops, keeps
from pyg_fast.ops._edges import raise_pending
from pyg_fast.ops._library import reference

__all__ = [
    'OF_PYTHON', 'edges_and_loops', 'keeps', 'op_names', 'ops', 'raise_pending', 'reference',
]  # fmt: skip

ops = torch.ops.pyg_fast
OF_PYTHON = {'message', 'message_backward'}  # Not compiled; `import pyg_fast` does not define them.


def op_names() -> set[str]:
    """The names of all ops."""
    names = (name.partition('::') for name in torch._C._dispatch_get_all_op_names())
    return {op for library, _, op in names if library == 'pyg_fast'}
