"""The compiled ops, what they must compute, and the private parts of `pyg_fast.ops` that tests
call: they know these by this module alone."""

import torch

from pyg_fast.ops import _attention, _edges, _ids, _library, _lifetime, typed_sample
from pyg_fast.ops.neighbor_sample import draw_edges, sample_subgraph, sampling_weight

__all__ = [
    'OF_PYTHON', 'AttentionArgs', '_lifetime', 'draw_edges', 'edges_and_loops', 'fake', 'fakes',
    'fitting_map', 'guarded', 'guarded_ops', 'keep_until_read', 'keeps', 'op_names', 'ops',
    'raise_pending', 'reference', 'sample_subgraph', 'sampling_weight', 'typed_sample',
]  # fmt: skip

ops = torch.ops.pyg_fast
# Of Python, not compiled; `import pyg_fast` alone does not define all of them.
OF_PYTHON = {
    'message', 'message_backward', 'note_outside', 'segment_attention',
    'segment_attention_backward',
}  # fmt: skip

# What ops must compute, in plain torch and float64; the edges that dropout of attention keeps; the
# error of an edge out of range, which CUDA reports later.
reference = _library.reference
AttentionArgs, edges_and_loops = _attention.AttentionArgs, _attention.edges_and_loops
keeps, raise_pending = _attention.keeps, _edges.raise_pending

# Fake kernels; ops whose errors name arguments; the map of node ids that suits a call; inputs that
# live until a kernel has read them.
fake, fakes = _library.fake, _library.fakes
guarded, guarded_ops = _library._guarded, _library.ops
fitting_map, keep_until_read = _ids.fitting_map, _lifetime.keep_until_read


def op_names() -> set[str]:
    """The names of all ops."""
    names = (name.partition('::') for name in torch._C._dispatch_get_all_op_names())
    return {op for library, _, op in names if library == 'pyg_fast'}
