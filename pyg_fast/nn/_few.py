"""Whether PyG's code runs a layer that has a generated kernel, and what the layer's `forward` gets
then: a graph of few edges takes less time so.

What is known of a layer stands in its own dictionary, see :data:`~pyg_fast.message._fallback.OWN`.
"""

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Linear
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import Adj

from ..graph.small_graphs import (
    TOO_FEW,
    has_few_columns,
    has_few_edges,
    is_narrow,
    reason_of,
    runs_pygs_code,
    width_for_limits,
    width_of_mlp,
)
from ..message._fallback import users_class
from ..message._plan import Plan
from ._checks import REDUCES, parts_of
from ._modules import hooks_of
from ._reads import gives_to_softmax, reads_a_list

_METHODS = ('message', 'aggregate', 'update', 'edge_update')


class Listed(NamedTuple):
    """The plain list that `forward` got in this call, in place of a prepared graph."""

    edge_index: Tensor
    prepared: EdgeIndex
    reason: str | None  # why PyG's code will run
    thread: int  # that calls: others may use the layer at the same time


def note_inputs(conv: MessagePassing, edge_index: object, kwargs: dict[str, object]) -> bool:
    """Notes how wide a message is, which hardly changes; returns whether it is the first call on
    such a device."""
    own = conv.__dict__
    on_gpu = isinstance(edge_index, Tensor) and edge_index.is_cuda
    if own.get('_on_gpu') is on_gpu:
        return False
    for name in ('_most_width', '_few_edges', '_of_mlp', '_work', '_learned'):
        own.pop(name, None)
    own['_on_gpu'], own['_columns'] = on_gpu, _width(conv.node_dim, kwargs)
    own['_width'] = _width_for_limits(conv, None, on_gpu)
    return True


def note_plan(conv: MessagePassing, plan: Plan | None, on_gpu: bool) -> None:
    """Notes what the first plan tells of a message."""
    own = conv.__dict__
    if plan is not None and '_of_mlp' not in own:
        own['_of_mlp'] = plan.is_mlp
        own['_learned'] = _width_for_limits(conv, plan, on_gpu), plan.work


def note_in_memory(conv: MessagePassing, edge_index: Tensor, reason: str) -> None:
    """Notes that PyG's code runs where its tensors of all edges fit into memory."""
    trains = torch.is_grad_enabled()
    conv.__dict__['_in_memory'] = edge_index.size(1), trains, edge_index.is_cuda, reason


def why_few(conv: MessagePassing, edge_index: Adj, kind: str) -> str | None:
    """Why PyG's code is faster for edges; None if it is not, or nobody knows."""
    own = conv.__dict__
    # What the last call has told counts in the next one, not where a checkpoint runs it again.
    if '_learned' in own and torch._C._current_graph_task_id() == -1:
        own['_width'], own['_work'] = own.pop('_learned')
        own.pop('_few_edges', None)
    if '_few_edges' in own and type(edge_index) is Tensor and edge_index.layout == torch.strided:
        most, of_kind = own['_few_edges']
        shape = edge_index.shape
        fits = len(shape) == 2 and shape[0] == 2 and shape[1] <= most
        if fits and kind == of_kind and runs_pygs_code():
            return reason_of(shape[1])
    # Whether a message is an MLP is known once it was captured.
    is_known = '_fused_entry' in own and '_learned' not in own
    if has_few_edges(edge_index, own['_width'], kind) and (
        is_known or conv._fused_is_never() or not _may_be_wider(conv, edge_index, kind)
    ):
        own['_few_edges'] = edge_index.size(1), kind  # So few are asked for at once.
        return reason_of(edge_index.size(1))
    if has_few_columns(edge_index, kind, own.get('_work')):
        return f'{own["_work"].columns} columns{TOO_FEW}'
    return _in_memory(own['_in_memory'], edge_index) if '_in_memory' in own else None


def _in_memory(known: tuple[int, bool, bool, str], edge_index: Adj) -> str | None:
    """Why PyG's code runs for no more edges than it ran for in an earlier call on such a device,
    which trained if this one does."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return None
    num_edges, trained, on_gpu, reason = known
    fits = edge_index.dim() == 2 and edge_index.size(1) <= num_edges
    fits = fits and trained == torch.is_grad_enabled() and on_gpu == edge_index.is_cuda
    return reason if fits and runs_pygs_code() else None


def with_plain_list(conv: MessagePassing, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a layer. What its `forward` calculates from a sorted list before `propagate`
    takes longer than from a plain one, which it gets where PyG's code will run: for few edges, or
    on a CPU for a message that has been refused; there also where it made all lists that kernels
    took of the last one."""
    own = conv.__dict__
    x, edge_index = args[:2]
    plain = edge_index.as_tensor()
    if conv.strict or not isinstance(x, Tensor) or own.get('_on_gpu') is not plain.is_cuda:
        return args  # At first nobody knows how wide the message is.
    has_hooks = own['_forward_pre_hooks'] or own['_forward_hooks'] or any(hooks_of(own))
    if has_hooks or not _takes_a_list(conv):  # They may tell them apart.
        return args
    reason = why_few(conv, plain, 'prepared message')
    if reason is None and not (
        plain.is_cpu and (own.get('_makes_lists', False) or _is_refused(conv))
    ):
        return args
    if edge_index.sparse_size() != (x.size(0), x.size(0)):
        return args
    own['_listed'] = Listed(plain, edge_index, reason, get_ident())
    return x, plain, *args[2:]


def listed_by(conv: MessagePassing) -> Listed | None:
    """The list that `forward` got in this call, if it got one."""
    listed: Listed | None = conv.__dict__.get('_listed')
    return listed if listed is not None and listed.thread == get_ident() else None


def _is_refused(conv: MessagePassing) -> bool:
    """Whether no kernel took the message in the last call, or ever will."""
    entry = conv.__dict__.get('_fused_entry')
    was_refused = entry is not None and entry.last is None and bool(entry.refused)
    return was_refused or conv._fused_is_never()


def is_pygs_own(conv: MessagePassing) -> bool:
    """Whether a layer is one of PyG, and its `forward` not the user's."""
    return users_class(conv).__module__.startswith('torch_geometric.')


def _takes_a_list(conv: MessagePassing) -> bool:
    """Whether the list in place of a sorted EdgeIndex changes nothing in a layer's `forward`."""
    own = conv.__dict__
    if '_reads' not in own:
        sizes = [_takes(conv, each, 'size') for each in _METHODS]
        is_same = is_pygs_own(conv) or reads_a_list(conv)
        own['_reads'] = is_same and not any(sizes) and not tells_lists_apart(conv)
    return bool(own['_reads'])


def tells_lists_apart(conv: MessagePassing) -> bool:
    """Whether a method of a layer's own gets what a plain list lacks, or the edges themselves. A
    softmax takes the row pointers, and does without."""
    own = conv.__dict__
    if '_tells' not in own:
        cls, base = type(conv), MessagePassing
        methods = [each for each in _METHODS if getattr(cls, each) is not getattr(base, each)]
        own['_tells'] = not is_pygs_own(conv) and any(
            _takes(conv, each, 'edge_index') or (
                _takes(conv, each, 'ptr') and not gives_to_softmax(getattr(cls, each), 'ptr')
            ) for each in methods
        )  # fmt: skip
    return bool(own['_tells'])


def _takes(conv: MessagePassing, method: str, name: str) -> bool:
    """Whether a method of a layer takes an argument."""
    # Not `get_flat_param_names`, which raises for arguments of several kinds.
    return name in conv.inspector.get_signature(method).param_dict


def _width(node_dim: int, kwargs: dict[str, object]) -> int:
    """The most numbers of a node or an edge in the inputs."""
    width = 1
    for value in kwargs.values():
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, Tensor) and x.dim() > 1 and x.numel() > 0:
                rows = x.size(node_dim if -x.dim() < node_dim < 0 else 0)
                width = max(width, x.numel() // rows)
    return width


def _width_for_limits(conv: MessagePassing, plan: Plan | None, on_gpu: bool) -> int:
    """The width of a message, for the limits of edges: by that of its inputs, and by its plan once
    that is known."""
    width: int = conv.__dict__.get('_columns', 1)
    if on_gpu:
        return width_of_mlp(width, True) if plan is not None and plan.is_mlp else width
    kinds = {'extremes'} if _has_extremes(conv) else set()
    if plan is not None:
        if is_narrow(plan.columns) and not kinds:
            return plan.columns  # However wide the features of edges are.
        width = max(width, plan.width)
        if plan.is_mlp and plan.repeats_work and not plan.has_rows_of_edges:
            width = width_of_mlp(width, False)
            kinds.add('maps of edges')
        elif plan.is_mlp and not plan.maps_edges_alone:
            width = width_of_mlp(width, False)
        elif plan.has_products and not (plan.softmaxes or plan.has_rows_of_edges):
            kinds.add('maps of edges' if plan.is_mlp else 'products')
        elif not plan.has_products and (plan.is_sum or plan.has_weights):
            kinds.add('sums' if plan.is_sum else 'weights')
        if any(output.reduce == 'var' for output in plan.outputs):
            kinds.add('variances')
        if plan.has_angles:
            kinds.add('angles')
        if not plan.has_products:
            if plan.num_written > 0:
                kinds.add('kept')
            if plan.has_rows_of_edges:
                kinds.add('rows of edges')
    return width_for_limits(width, kinds)


def _has_extremes(conv: MessagePassing) -> bool:
    """Whether a layer takes maxima or minima of its messages."""
    parts = [] if conv.aggr_module is None else parts_of(conv.aggr_module)
    return any(REDUCES.get(type(part)) in ('max', 'min') for part in parts)


def _may_be_wider(conv: MessagePassing, edge_index: Tensor, kind: str) -> bool:
    """Whether edges that are few for a message as wide as its inputs may be none for one that maps
    them or weights them; a first call of its kernel tells."""
    own = conv.__dict__
    columns = own['_columns']
    if edge_index.is_cuda:
        return not has_few_edges(edge_index, width_of_mlp(columns, True), kind)
    if '_most_width' not in own:  # Asked at every call of few edges.
        most = width_for_limits(columns, ['weights'])
        widths = [each.out_features for each in conv.modules() if isinstance(each, Linear)]
        if widths:
            most = max(most, width_of_mlp(max(columns, *widths), False))
        own['_most_width'] = width_for_limits(most, ['extremes'] if _has_extremes(conv) else [])
    return not has_few_edges(edge_index, own['_most_width'], kind)
