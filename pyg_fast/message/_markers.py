"""Markers: operators that stand for inputs, gathers and aggregations in captured graphs.

In a graph that :func:`torch.compile` captures, :mod:`~pyg_fast.message._replace` replaces what lies
between markers by a kernel. Markers that it leaves decompose into PyG's operators.
"""

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from ..ops._edges import kernel_index
from ..sparse.to_csr import counts_in_int64

NAMESPACE = 'pyg_fast_message'
_library = torch.library.Library(NAMESPACE, 'DEF')
# Rows of nodes at one end of each edge. Nodes and edges are the dimension `dim`.
_library.define('gather(Tensor x, Tensor index, str role, str name, int dim=0) -> Tensor')
# An input of the edges.
_library.define('edge(Tensor(a) x, Tensor index, str name) -> Tensor(a)')
# An input of destinations that an `aggregate` takes.
_library.define('node(Tensor(a) x, Tensor index, str name) -> Tensor(a)')
# The sources of edges, and `edge_index` itself, beside the destinations.
_library.define('sources(Tensor(a) x, Tensor index) -> Tensor(a)')
_library.define('ends(Tensor(a) x, Tensor index, bool from_target) -> Tensor(a)')
# The structure of a plain list of edges and of its transpose, and what tells invalid edges.
_library.define(
    'csr(Tensor edge_index, SymInt num_src, SymInt num_dst) -> '
    '(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)'
)
# The kernel alone reads the structure.
_library.define(
    'aggregate(Tensor message, Tensor index, SymInt num_src, SymInt num_dst, str reduce, '
    'Tensor[] csr, Tensor? perm, Tensor? t_perm, int dim=0) -> Tensor'
)
# A result of a layer's own `aggregate`: its number in place of `reduce`, and all results.
_library.define(
    'rows(Tensor(a) x, Tensor index, SymInt num_src, SymInt num_dst, str number, '
    'Tensor[] csr, Tensor? perm, Tensor? t_perm, Tensor[] xs) -> Tensor(a)'
)


def _gather(x: Tensor, index: Tensor, role: str, name: str, dim: int = 0) -> Tensor:
    return x.index_select(dim, index)


def _same(x: Tensor, *rest: object) -> Tensor:
    return x.view_as(x)


def _csr(edge_index: Tensor, num_src: int, num_dst: int) -> tuple[Tensor, ...]:
    index64, edges = counts_in_int64(edge_index.size(1)), kernel_index(edge_index)
    return torch.ops.pyg_fast.to_csr_csc.default(edges, num_src, num_dst, index64, False)


def _aggregate(
    message: Tensor, index: Tensor, num_src: int, num_dst: int, reduce: str, csr: list[Tensor],
    perm: Tensor | None, t_perm: Tensor | None, dim: int = 0,
) -> Tensor:  # fmt: skip
    if reduce != 'var':
        return scatter(message, index, dim, num_dst, reduce)
    mean = scatter(message, index, dim, num_dst, 'mean')
    return scatter(message * message, index, dim, num_dst, 'mean') - mean * mean


_IMPLS = {
    'gather': _gather, 'csr': _csr, 'aggregate': _aggregate,
    **dict.fromkeys(('edge', 'node', 'rows', 'sources', 'ends'), _same),
}  # fmt: skip
for _name, _function in _IMPLS.items():
    _library.impl(_name, _function, 'CompositeImplicitAutograd')

gather = torch.ops.pyg_fast_message.gather.default
edge = torch.ops.pyg_fast_message.edge.default
node = torch.ops.pyg_fast_message.node.default
csr = torch.ops.pyg_fast_message.csr.default
aggregate = torch.ops.pyg_fast_message.aggregate.default
rows = torch.ops.pyg_fast_message.rows.default
sources = torch.ops.pyg_fast_message.sources.default
ends = torch.ops.pyg_fast_message.ends.default

# In the graph of a captured message; they never run.
_library.define('lift(Tensor x, Tensor edges, str role, str name) -> Tensor')
_library.define('dropout(Tensor x, float p) -> Tensor')
_library.define('end(Tensor x) -> Tensor')
_library.define('write(Tensor x) -> Tensor')
_library.define('end_of_rows(Tensor[] xs, str container) -> Tensor')
_library.define('row(Tensor x, SymInt num_nodes, str name) -> Tensor')
# The destinations and the sources of edges; and both, as the rows of `edge_index`.
_library.define('index(Tensor edges) -> Tensor')
_library.define('source(Tensor edges) -> Tensor')
_library.define('edge_index(Tensor edges, bool from_target) -> Tensor')
_library.impl('lift', lambda x, e, role, name: x.new_empty((e.size(0), *x.shape[1:])), 'Meta')
# As PyG's gathered inputs they need a gradient, and are no leaves.
torch.library.register_autograd(
    'pyg_fast_message::lift', lambda ctx, grad: (grad.sum(0, True), None, None, None), lib=_library
)
torch.library.register_autograd(
    'pyg_fast_message::row', lambda ctx, grad: (grad.sum(0, True), None, None), lib=_library
)
_library.impl('dropout', lambda x, p: torch.empty_like(x), 'Meta')
_library.impl('end', lambda x: torch.empty_like(x), 'Meta')
_library.impl('write', lambda x: torch.empty_like(x), 'Meta')
_library.impl('end_of_rows', lambda xs, container: torch.empty_like(xs[0]), 'Meta')
_library.impl('row', lambda x, num_nodes, name: x.new_empty((num_nodes, *x.shape[1:])), 'Meta')
for _name in ('index', 'source'):
    _library.impl(_name, lambda e: e.new_empty(e.size(0), dtype=torch.int64), 'Meta')
_library.impl(
    'edge_index', lambda e, from_target: e.new_empty((2, e.size(0)), dtype=torch.int64), 'Meta'
)
