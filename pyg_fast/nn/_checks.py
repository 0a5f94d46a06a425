"""The reasons for which PyG's own code runs in place of a kernel.

Each function returns the reason for PyG's code, which reports show, or None. What holds for every
call is asked by :func:`accelerate` and reports (``_fused_why_never``), what may change by each
call. The checks of a function run in the order in which they stand; the manual's troubleshooting
page has the cure for each reason. What is not here: graphs too small for a kernel
(:mod:`~pyg_fast.graph.small_graphs`), operations of a message without kernel
(:mod:`~pyg_fast.message`), and what only one layer takes: its edges, as in
``FusedGCNConv._edges``.
"""

import dis
from collections.abc import Callable
from types import CodeType

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric import EdgeIndex
from torch_geometric.nn import FAConv, GraphConv, MessagePassing, RGATConv, TransformerConv
from torch_geometric.nn.aggr import (
    Aggregation,
    AttentionalAggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from torch_geometric.nn.aggr.scaler import DegreeScalerAggregation
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from ..message._inputs import why_not as why_not_device
from ..ops._checks import DTYPES
from ..ops._transforms import transforms_active
from ..sparse.to_csr import MOST_NODES
from ._modules import has_pygs, hooks_of, is_plain, is_pygs

# Aggregations of neighbours' features that have a kernel.
_REDUCED = (
    SumAggregation, MeanAggregation, MaxAggregation, MinAggregation, VarAggregation,
    StdAggregation, PowerMeanAggregation,
)  # fmt: skip
# Those that PyG fuses itself, if `fuse` allows it.
_FUSE_AGGRS = ('sum', 'add', 'mean', 'max', 'min')

REDUCES: dict[type, str] = {
    SumAggregation: 'sum', MeanAggregation: 'mean', MaxAggregation: 'max', MinAggregation: 'min',
    VarAggregation: 'var', StdAggregation: 'var',
}  # fmt: skip


# Sums of messages, weighted by a softmax: captured with the message.
TRACED = (SoftmaxAggregation, AttentionalAggregation)

# What a message may pass to a softmax.
OF_SOFTMAX = {'index', 'edge_index_i', 'ptr', 'size_i', 'dim_size'}
# What PyG gives a message of the graph.
OF_GRAPH = {
    'index', 'edge_index', 'edge_index_i', 'edge_index_j', 'adj_t', 'ptr', 'size', 'size_i',
    'size_j', 'dim_size',
}  # fmt: skip
# What a message may take to gather rows of nodes.
OF_GATHERS = {'edge_index', 'edge_index_j'}
# What a message may take, and not read.
STRUCTURE = OF_GRAPH - OF_SOFTMAX - OF_GATHERS
METHODS = ('message', 'aggregate', 'update', 'propagate', 'edge_update', 'forward')

# Layers whose `message` sets an attribute for `return_attention_weights` only: by `message`, their
# `forward` and the position of that argument in it.
_WRITES = {
    FAConv.message: (FAConv.forward, 4), RGATConv.message: (RGATConv.forward, 5),
    TransformerConv.message: (TransformerConv.forward, 3),
}  # fmt: skip

HOOKED = 'hooks on its message passing'
NO_AGGREGATION = 'aggr=None without an own aggregate'

# Forwards of this package, and those of PyG whose arguments and results they have.
FORWARDS: dict[Callable[..., object], Callable[..., object]] = {}


# Layers with kernels of their own -----------------------------------------------------------------


def why_not_layer(conv: MessagePassing, x: object) -> str | None:
    """Why PyG's code must run for this call of a layer with a kernel of its own: something observes
    or changes its behaviour, or no kernel takes its features :obj:`x`."""
    own, cls = conv.__dict__, type(conv)
    if _has_any_global_hook():
        return 'global module hooks'
    if transforms_active():
        return 'torch.func or forward-mode AD is active'
    if torch._C._get_tracing_state() is not None:
        return 'torch.jit.trace is active'
    # The flag itself: in torch 2.11 `is_exporting()` is true in all compiled code.
    if torch.compiler._is_exporting_flag:
        return 'torch.export is active'
    if conv._explain:
        return 'it is explained'
    if conv._decomposed_layers != 1:
        return f'decomposed_layers={conv._decomposed_layers}'
    if conv.node_dim != conv._node_dim:
        return f'node_dim={conv.node_dim}'
    if (
        own['_propagate_forward_pre_hooks']
        or own['_propagate_forward_hooks']
        or own['_message_forward_pre_hooks']
        or own['_message_forward_hooks']
        or own['_aggregate_forward_pre_hooks']
        or own['_aggregate_forward_hooks']
        or own['_message_and_aggregate_forward_pre_hooks']
        or own['_message_and_aggregate_forward_hooks']
        or own['_edge_update_forward_pre_hooks']
        or own['_edge_update_forward_hooks']
    ):
        return HOOKED
    # Compare methods of the class and of `own`: torch.compile sees bound ones as different.
    message, aggregate, update, message_and_aggregate, edge_update = cls._pyg_methods
    if (
        cls.message is not message
        or cls.aggregate is not aggregate
        or cls.update is not update
        or cls.message_and_aggregate is not message_and_aggregate
        or cls.edge_update is not edge_update
        or 'message' in own
        or 'aggregate' in own
        or 'update' in own
        or 'message_and_aggregate' in own
        or 'edge_update' in own
    ):
        return 'its message passing is overridden'
    if not has_pygs(conv, 'propagate') or not has_pygs(conv, 'edge_updater'):
        return 'its propagate or edge_updater is overridden'
    aggr = own['_modules'].get('aggr_module')
    if aggr is None or not is_plain(aggr):
        return 'its aggregation has hooks or is patched'
    if not isinstance(x, Tensor):
        return 'features that are no tensor'
    plain = type(x) is Tensor or type(x) is Parameter or isinstance(x, conv._other_features)
    if not plain:
        return f'features are a {type(x).__name__}'
    if x.layout != torch.strided or x.dim() != 2:
        return 'features that are no dense matrix'
    if not torch.compiler.is_compiling() and x.size(0) > MOST_NODES:
        return f'features of {x.size(0)} nodes'
    if x.dtype not in DTYPES:
        return f'features are {x.dtype}'
    if not (x.is_cuda or x.is_cpu):
        return f'features are on {x.device}'
    return None


def what_is(edges: object) -> str:
    """What edges are that are no list."""
    if isinstance(edges, (Tensor, SparseTensor)):
        return 'a sparse matrix'
    return f'an edge_index of type {type(edges).__name__}'


def may_fuse(conv: MessagePassing) -> bool:
    """Whether the layer's option `fuse` allows kernels: PyG reads it for some aggregations only."""
    return conv.fuse or conv.aggr not in _FUSE_AGGRS


def why_not_reduction(aggr: Aggregation) -> str | None:
    """Why an aggregation of neighbours' features has no kernel."""
    if type(aggr) is not MultiAggregation:
        return _why_not_one(aggr)
    for part in aggr.aggrs:
        if (why := _why_not_one(part)) is not None:
            return why
    if len({type(part) for part in aggr.aggrs}) < len(aggr.aggrs):
        return 'an aggregation is listed twice'
    if not is_plain(aggr) or (aggr.fused_aggr is not None and not is_plain(aggr.fused_aggr)):
        return 'MultiAggregation has hooks or is patched'
    return None


def _why_not_one(aggr: Aggregation) -> str | None:
    kind = type(aggr)
    if kind not in _REDUCED:
        return f'{kind.__name__} has no kernel'
    # Its powers must be finite at nodes without edges too, which PyG does not compute.
    if kind is PowerMeanAggregation and not (aggr.min_value or 0) > 0:
        return f'{kind.__name__} has no positive clamp_min'
    return None if is_plain(aggr) else f'{kind.__name__} has hooks or is patched'


# Layers whose message is captured ----------------------------------------------------------------


def why_not_message(
    conv: MessagePassing,
    edge_index: object,
    aggr: object,
    reads: str | None,
    replaced: Callable[..., object],
) -> str | None:
    """Why PyG's code must run for this call of `propagate`, whatever the message is. Arguments as
    of :func:`why_never_message`."""
    own = conv.__dict__
    if not isinstance(edge_index, Tensor) or (
        edge_index.layout != torch.strided and is_torch_sparse_tensor(edge_index)
    ):
        return what_is(edge_index)
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        return f'an edge_index of shape {list(edge_index.shape)}'
    reason = why_not_device(edge_index.device)
    if reason is not None:
        return reason
    if _has_any_global_hook():
        return 'global module hooks'
    if conv._explain:
        return 'it is explained'
    place = place_of_attention(conv)
    if place is not None and _wants_attention(conv, place):
        return 'return_attention_weights'
    if any(hooks_of(own)):
        return HOOKED
    if (
        isinstance(edge_index, EdgeIndex) and conv.SUPPORTS_FUSED_EDGE_INDEX and conv.fuse
        and edge_index.is_sorted_by_col and not _is_graph_conv(type(conv))
    ):  # fmt: skip
        return 'its message_and_aggregate takes an EdgeIndex'
    return why_never_message(conv, aggr, reads, replaced)


def _is_graph_conv(cls: type[MessagePassing]) -> bool:
    """Whether `message` and `message_and_aggregate` are known to do the same."""
    return (
        cls.message is GraphConv.message
        and cls.message_and_aggregate is GraphConv.message_and_aggregate
    )


def why_never_message(
    conv: MessagePassing, aggr: Aggregation, reads: str | None, replaced: Callable[..., object]
) -> str | None:
    """Why PyG's code must run for every input of a layer whose message is captured.

    Args:
        conv: The layer.
        aggr: Its aggregation.
        reads: The result of :func:`why_not_arguments`.
        replaced: The `propagate` that a fused class replaces.
    """
    reason = why_patched(conv, replaced) or reads
    if reason is not None:
        return reason
    if conv._decomposed_layers != 1:
        return f'decomposed_layers={conv._decomposed_layers}'
    return why_not_aggregation(aggr) if type(conv).aggregate is MessagePassing.aggregate else None


def why_patched(conv: MessagePassing, replaced: Callable[..., object]) -> str | None:
    """Why a layer is left as it is: its own code stands where ours would."""
    own = conv.__dict__
    for name in METHODS:
        if name in own and not (name == 'propagate' and has_pygs(conv, name)):  # an explainer's
            return f'its {name} is patched'
    return None if is_pygs(replaced) else 'its propagate is overridden'


def forwards_propagate(cls: type[MessagePassing]) -> bool:
    """Whether a class overrides `propagate` by one that calls `super().propagate`, and that is
    PyG's. What else it does with arguments and results does not matter."""
    replaced = [base.__dict__['propagate'] for base in cls.__mro__ if 'propagate' in base.__dict__]
    own = replaced[: replaced.index(MessagePassing.propagate)]
    codes = [getattr(function, '__code__', None) for function in own]
    return len(codes) > 0 and all(
        code is not None and '__class__' in code.co_freevars and 'propagate' in code.co_names
        for code in codes
    )


def captures_aggregate(conv: MessagePassing) -> bool:
    """Whether the `aggregate` of a layer is captured with its message: the layer's own, or a sum
    weighted by a softmax."""
    own = type(conv).aggregate is not MessagePassing.aggregate
    return own or type(conv.aggr_module) in TRACED


def why_not_arguments(conv: MessagePassing) -> str | None:
    """The reason if a method reads an argument that kernels do not provide, or None."""
    signature = conv.inspector.get_signature
    for method, names in _names_of_graph(conv).items():
        for name in names:
            if name in STRUCTURE:
                return f"'{method}' reads '{name}'"
    for name in signature('update').param_dict:
        if name in OF_GRAPH or name[-2:] in ('_i', '_j'):
            return f"'update' reads '{name}'"
    return None


def _names_of_graph(conv: MessagePassing) -> dict[str, list[str]]:
    """The arguments for the graph that `message` and the layer's own `aggregate` read."""
    methods = ['message']
    if type(conv).aggregate is not MessagePassing.aggregate:
        methods.append('aggregate')
    found = {}
    for method in methods:
        read = _read_names(getattr(getattr(conv, method), '__code__', None))
        named = conv.inspector.get_signature(method).param_dict
        found[method] = [name for name in named if name in read]
    return found


def reads_of_graph(conv: MessagePassing) -> set[str]:
    """The arguments for the graph that `message` or the layer's own `aggregate` reads."""
    return set().union(*_names_of_graph(conv).values())


def _read_names(code: CodeType | None) -> frozenset[str]:
    """The arguments for the graph that code reads, and perhaps some that it does not."""
    if code is None or not {'locals', 'vars', 'dir', 'eval', 'exec'}.isdisjoint(code.co_names):
        return frozenset(OF_GRAPH)
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = {name for name in OF_GRAPH if name not in own}  # A decorated function.
    for each in dis.get_instructions(code):
        if any(kind in each.opname for kind in ('FAST', 'DEREF', 'CELL', 'CLOSURE')):
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            found.update(OF_GRAPH.intersection(names))
    return frozenset(found)


def why_not_aggregation(aggr: Aggregation) -> str | None:
    """Why an aggregation of messages has no kernel."""
    if isinstance(aggr, torch.nn.Module):
        for module in aggr.modules() if aggr._modules else (aggr,):
            if not is_plain(module):
                return 'its aggregation has hooks or is patched'
    if aggr is None:
        return NO_AGGREGATION
    if type(aggr) in TRACED:
        return None
    for part in parts_of(aggr):
        if type(part) not in REDUCES:
            return f'{type(part).__name__} has no kernel'
        if type(part) is StdAggregation:
            part = part.var_aggr
        if type(part) is VarAggregation and part.semi_grad:
            return 'semi_grad=True'
    return None


def parts_of(aggr: Aggregation) -> list[Aggregation]:
    if type(aggr) is DegreeScalerAggregation:
        aggr = aggr.aggr
    return list(aggr.aggrs) if type(aggr) is MultiAggregation else [aggr]


def place_of_attention(conv: MessagePassing) -> int | None:
    """The position of `return_attention_weights`, if `message` sets an attribute only for it."""
    cls = type(conv)
    if cls.message not in _WRITES:
        return None
    forward, place = _WRITES[cls.message]
    return place if FORWARDS.get(cls.forward, cls.forward) is forward else None


def _wants_attention(conv: MessagePassing, place: int) -> bool:
    call = conv.__dict__.get('_call')
    if call is None or conv._forward_pre_hooks:  # Other arguments may come.
        return True
    args, kwargs = call
    return len(args) > place or kwargs.get('return_attention_weights') is not None
