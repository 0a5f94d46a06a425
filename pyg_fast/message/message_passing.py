"""A message written as a function, and its aggregation, as one kernel."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from ..graph.graph import graph_of
from ..sparse.graph import Graph, check_graph, ends_of
from ._fallback import Fallback, make_entry, with_cure
from ._inputs import check_inputs, why_not

if TYPE_CHECKING:
    from ._entry import Entry

REDUCES = ('sum', 'add', 'mean', 'max', 'min', 'var')
# By code: a function that is defined again at every call is captured once.
_entries: WeakKeyDictionary[object, 'Entry'] = WeakKeyDictionary()


def message_passing(
    graph: Graph | Tensor,
    fn: Callable[..., Tensor],
    src: Mapping[str, Tensor] | None = None,
    dst: Mapping[str, Tensor] | None = None,
    edge: Mapping[str, Tensor] | None = None,
    reduce: str = 'sum',
    *,
    strict: bool = False,
) -> Tensor:
    r"""Aggregates messages that a Python function computes from both ends of each edge.

    .. math::
        \mathbf{y}_i = \bigoplus_{e = (j, i) \in \mathcal{E}}
        \phi(\mathbf{s}_j, \mathbf{d}_i, \mathbf{a}_e)

    The function is captured by :func:`torch.compile` on the first call and whenever what it reads
    has changed, and runs as one kernel, forward and backward; no tensor of size
    :math:`|\mathcal{E}| \times F` is allocated but for inputs and gradients of edges. A linear map
    of values computed for each edge runs over blocks of edges in place of a kernel. Where neither
    is known to give the same result, PyTorch gathers, computes and scatters.
    Differentiable in all inputs and in tensors that the function closes over.

    Args:
        graph (EdgeIndex, Tensor or Graph): A graph prepared by
            :class:`~pyg_fast.transforms.ToCSR`; or a plain :obj:`edge_index`
            :math:`(2, |\mathcal{E}|)`, sorted at every call, of a square graph if only :obj:`src`
            or only :obj:`dst` has inputs; or an :class:`~pyg_fast.graph.Graph`.
        fn (callable): Takes the inputs by name, with one row per edge, and returns the messages
            :math:`(|\mathcal{E}|, *)`. Each message may depend on its own edge only, and on others
            by :func:`torch_geometric.utils.softmax`: a parameter :obj:`index` gets the destination
            of each edge, and :obj:`size_i` the number of destinations.
        src (dict, optional): Inputs of source nodes by name, :math:`(N_{src}, *)`.
            (default: :obj:`None`)
        dst (dict, optional): Inputs of destination nodes by name, :math:`(N_{dst}, *)`.
            (default: :obj:`None`)
        edge (dict, optional): Inputs of edges by name, :math:`(|\mathcal{E}|, *)`.
            (default: :obj:`None`)
        reduce (str): :obj:`"sum"` (or :obj:`"add"`), :obj:`"mean"`, :obj:`"max"`, :obj:`"min"`
            or :obj:`"var"`. A node without edges gets zeros. If several edges reach the maximum,
            one gets the gradient. (default: :obj:`"sum"`)
        strict (bool): Whether to raise :class:`NotImplementedError` with the reason where neither
            can run, and to use blocks also where all edges fit into one. (default: :obj:`False`)

    Returns:
        Tensor: The aggregated messages :math:`(N_{dst}, *)`.

    Raises:
        TypeError: If an input is no tensor, :obj:`src`, :obj:`dst` or :obj:`edge` no dict, or
            :obj:`fn` no function that returns a tensor.
        ValueError: If a name or a size does not fit, or :obj:`reduce` is unknown.
        IndexError: If the graph holds a node that the inputs do not have.
        NotImplementedError: With :obj:`strict=True`, if neither can run.

    Example:
        >>> gate = lambda k, q, v: torch.sigmoid(k + q) * v
        >>> out = message_passing(edge_index, gate, src=dict(q=q, v=v), dst=dict(k=k))
        >>> def attention(k, q, v, index, size_i):
        ...     score = (k * q).sum(-1, keepdim=True)
        ...     return softmax(score, index, num_nodes=size_i) * v
        >>> out = message_passing(edge_index, attention, src=dict(q=q, v=v), dst=dict(k=k))
    """
    if reduce not in REDUCES:
        raise ValueError(f"'reduce' must be one of {REDUCES}, got {reduce!r}")
    if not callable(fn):
        raise TypeError(f"'fn' must be a function of a message, got {type(fn).__name__}")
    reduce = 'sum' if reduce == 'add' else reduce
    inputs = _collect_inputs(src, dst, edge)
    num_src, num_dst = _sizes(graph, inputs)
    wanted = _structure_names(fn, inputs)
    try:
        return _run_entry(graph, fn, inputs, wanted, num_src, num_dst, reduce, strict)
    except Fallback as reason:
        if strict:
            raise NotImplementedError(
                f'message_passing(strict=True): {with_cure(reason)}'
            ) from reason
    source, target = ends_of(graph) if isinstance(graph, Graph) else graph
    ends = {'src': source, 'dst': target}
    values = {
        name: x if role == 'edge' else x.index_select(0, ends[role])
        for (role, name), x in inputs.items()
    }
    structure = {'index': target, 'size_i': num_dst}
    message = fn(**values, **{name: structure[name] for name in wanted})
    if not isinstance(message, Tensor):
        raise TypeError(f"'fn' must return a tensor, got {type(message).__name__}")
    total = partial(scatter, index=target, dim=0, dim_size=num_dst)
    if reduce == 'var':
        mean = total(message, reduce='mean').index_select(0, target)
        return total((message - mean).square(), reduce='mean')
    return total(message, reduce=reduce)


def _run_entry(
    graph: Graph | Tensor, fn: Callable[..., Tensor], inputs: dict[tuple[str, str], Tensor],
    wanted: tuple[str, ...], num_src: int, num_dst: int, reduce: str, strict: bool,
) -> Tensor:  # fmt: skip
    if torch.compiler.is_compiling():
        raise Fallback('torch.compile is active')
    if isinstance(graph, Graph):
        device, num_edges = graph.col.device, graph.num_edges
    else:
        device, num_edges = graph.device, graph.size(1)
    reason = why_not(device)
    if reason is not None:
        raise Fallback(reason)
    check_inputs(device, inputs.values(), num_edges, (num_src, num_dst))
    code = getattr(getattr(fn, '__func__', fn), '__code__', fn)
    if code not in _entries:
        _entries[code] = make_entry()

    def structure(transpose: bool) -> Graph:
        if isinstance(graph, Graph):
            return graph
        return graph_of(graph, num_src, num_dst, transpose=transpose)

    count = None if strict else num_edges
    (out,), _ = _entries[code](fn, structure, (reduce,), inputs, {}, wanted, num_edges=count)
    return out


def _structure_names(
    fn: Callable[..., Tensor], inputs: dict[tuple[str, str], Tensor]
) -> tuple[str, ...]:
    """The parameters of a function that a softmax needs."""
    given = {name for _, name in inputs}
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # It has none that Python knows.
        return ()
    return tuple(name for name in ('index', 'size_i') if name in parameters and name not in given)


def _collect_inputs(*roles: Mapping[str, object] | None) -> dict[tuple[str, str], Tensor]:
    """The inputs by role and name, checked."""
    inputs: dict[tuple[str, str], Tensor] = {}
    given: list[object] = [*roles]
    for role, values in zip(('src', 'dst', 'edge'), given, strict=True):
        if values is not None and not isinstance(values, Mapping):
            got = type(values).__name__
            raise TypeError(f"'{role}' must be a dict of tensors, such as dict(x=x), got {got}")
        for name, x in (values or {}).items():
            if not isinstance(x, Tensor):
                got = type(x).__name__
                raise TypeError(f"'{role}[{name!r}]' must be a tensor, got {got}")
            if x.dim() == 0:
                raise ValueError(f"'{role}[{name!r}]' must have a row per {role}, got a number")
            if any(name == other for _, other in inputs):
                raise ValueError(f'two inputs have the name {name!r}; rename one')
            inputs[role, name] = x
    if not inputs:
        raise ValueError("'src', 'dst' and 'edge' are empty; give the message an input")
    return inputs


def _sizes(graph: object, inputs: dict[tuple[str, str], Tensor]) -> tuple[int, int]:
    """The numbers of sources and destinations."""
    sizes: dict[str, int | None] = {'src': None, 'dst': None}
    if isinstance(graph, Graph):
        check_graph(graph, values=True)
        sizes = {'src': graph.num_src, 'dst': graph.num_dst, 'edge': graph.num_edges}
    elif not isinstance(graph, Tensor) or graph.dim() != 2 or graph.size(0) != 2:
        got = list(graph.shape) if isinstance(graph, Tensor) else type(graph).__name__
        raise ValueError(f"'graph' must be an edge_index of shape [2, num_edges], got {got}")
    else:
        rows, columns = getattr(graph, '_sparse_size', (None, None))
        sizes = {'src': rows, 'dst': columns, 'edge': graph.size(1)}
    for (role, name), x in inputs.items():
        if sizes[role] is None:
            sizes[role] = x.size(0)
        if x.size(0) != sizes[role]:
            raise ValueError(f"'{role}[{name!r}]' must have {sizes[role]} rows, got {x.size(0)}")
    num_src = sizes['src'] if sizes['src'] is not None else sizes['dst']
    num_dst = sizes['dst'] if sizes['dst'] is not None else sizes['src']
    if num_src is None or num_dst is None:
        raise ValueError("'graph' has no size: prepare it by ToCSR, or give an input of nodes")
    return num_src, num_dst
