"""What PyG's `propagate` calculates where a graph has few edges, without the search for arguments
that takes it as long: the same operations of torch on the same numbers, and so the same bits."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import (
    Aggregation,
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MulAggregation,
    SumAggregation,
)
from torch_geometric.typing import Size
from torch_geometric.utils import scatter

from ._checks import OF_GRAPH
from ._modules import hooks_of, is_plain, is_pygs

# Methods that PyG's `propagate` calls, which a layer hardly overrides.
_METHODS = (
    '_check_input', '_collect', '_lift', '_index_select', '_index_select_safe', '_set_size',
)  # fmt: skip
_SCATTERS = {  # as torch_geometric.utils.scatter calls them
    SumAggregation: 'sum', MeanAggregation: 'mean', MaxAggregation: 'max', MinAggregation: 'min',
    MulAggregation: 'mul',
}  # fmt: skip


class Arguments(NamedTuple):
    """What layers that 0.2 has saved hold as `_direct`, which nothing reads."""

    of_nodes: tuple[tuple[str, str, int], ...]
    of_graph: tuple[str, ...]
    others: tuple[str, ...]


class Taken(NamedTuple):
    """Those of a layer's `message`, and of its own `aggregate` and `update`, if it has them. A pair
    has values of sources and of destinations. PyG's code runs where one is missing: what it takes
    then depends on how it was made."""

    target: int  # the row of the edges that has their destinations
    of_nodes: tuple[tuple[str, str, int], ...]  # name, name of the input, row
    of_message: tuple[str, ...]  # the others
    of_aggregate: tuple[str, ...] | None
    of_update: tuple[str, ...] | None
    of_graph: frozenset[str]


def _arguments_of(conv: MessagePassing) -> Taken | None:
    """None if PyG's `propagate` must run, whatever the graph is."""
    cls = type(conv)
    replaced = next(  # by a class of ours
        base.__dict__['propagate'] for base in cls.__mro__
        if 'propagate' in base.__dict__ and base.__module__.partition('.')[0] != 'pyg_fast'
    )  # fmt: skip
    if not is_pygs(replaced) or any(
        getattr(cls, name) is not getattr(MessagePassing, name) for name in _METHODS
    ):
        return None
    target = int(conv.flow == 'source_to_target')
    of_nodes, of_message = [], []
    for name in conv.inspector.get_signature('message').param_dict:
        if name[-2:] in ('_i', '_j') and name not in OF_GRAPH:
            of_nodes.append((name, name[:-2], target if name[-1] == 'i' else 1 - target))
        else:
            of_message.append(name)
    of_aggregate, of_update = (_arguments_of_own(conv, name) for name in ('aggregate', 'update'))
    names = {*of_message, *(of_aggregate or ()), *(of_update or ())}
    if any(name[-2:] in ('_i', '_j') for name in names - OF_GRAPH):
        return None  # It may be of nodes that the message does not take.
    of_graph = frozenset(names & OF_GRAPH)
    return Taken(target, tuple(of_nodes), tuple(of_message), of_aggregate, of_update, of_graph)


def _arguments_of_own(conv: MessagePassing, method: str) -> tuple[str, ...] | None:
    """The arguments of a layer's own method beside the first."""
    if getattr(type(conv), method) is getattr(MessagePassing, method):
        return None
    return tuple(conv.inspector.get_signature(method).param_dict)


def propagate(
    conv: MessagePassing, edge_index: Tensor, size: Size, kwargs: dict[str, object]
) -> Tensor | None:
    """The result of `propagate`; None if PyG's must run, which also says what is wrong with
    arguments. `message` has not been called then."""
    own = conv.__dict__
    if '_taken' not in own:
        own['_taken'] = _arguments_of(conv)
    arguments: Taken | None = own['_taken']
    if (
        arguments is None or any(hooks_of(own)) or _has_any_global_hook()
        or type(edge_index) is not Tensor or edge_index.dtype != torch.int64
        or arguments.target != (conv.flow == 'source_to_target') or own['_explain']
        or own['_decomposed_layers'] != 1 or 'aggregate' in own or 'update' in own
        or torch._C._get_tracing_state() is not None
    ):  # fmt: skip
        return None
    dim, target = own['node_dim'], arguments.target
    sizes = [None, None] if size is None else list(size)
    given: dict[str, object] = {}
    try:
        ends = edge_index.unbind()
        for name, base, row in arguments.of_nodes:
            value = kwargs[base]
            if isinstance(value, (tuple, list)):
                first, second = value
                # PyG's code made from a template and its Python code take other parts of it.
                if target == 0 and first is not second:
                    return None
                if not (_fits(sizes, 0, first, dim) and _fits(sizes, 1, second, dim)):
                    return None
                value = value[row]
            elif not _fits(sizes, row, value, dim):
                return None
            given[name] = value.index_select(dim, ends[row]) if isinstance(value, Tensor) else None
        src, dst = sizes[1 - target], sizes[target]
        num_src, num_dst = dst if src is None else src, src if dst is None else dst
        if num_dst is None:
            return None
        if arguments.of_graph:
            index, other = ends[target], ends[1 - target]
            known = {
                'index': index, 'edge_index': edge_index, 'edge_index_i': index,
                'edge_index_j': other, 'adj_t': None, 'ptr': None, 'size': sizes,
                'size_i': num_dst, 'size_j': num_src, 'dim_size': num_dst,
            }  # fmt: skip
            kwargs = {**kwargs, **known}
        given.update({name: kwargs[name] for name in arguments.of_message})
        of_aggregate = {name: kwargs[name] for name in arguments.of_aggregate or ()}
        of_update = {name: kwargs[name] for name in arguments.of_update or ()}
    except (IndexError, KeyError, RuntimeError, ValueError):
        return None
    out = conv.message(**given)
    if arguments.of_aggregate is not None:
        out = conv.aggregate(out, **of_aggregate)
    else:
        out = _aggregate(conv.aggr_module, out, ends[target], num_dst, dim)
    return out if arguments.of_update is None else conv.update(out, **of_update)


def _aggregate(aggr: Aggregation, out: Tensor, index: Tensor, num_dst: int, dim: int) -> Tensor:
    reduce = _SCATTERS.get(type(aggr))
    if reduce is not None and is_plain(aggr):
        try:
            return scatter(out, index, dim, num_dst, reduce)
        except (IndexError, RuntimeError, ValueError):
            pass  # PyG's module says what is wrong.
    return aggr(out, index, ptr=None, dim_size=num_dst, dim=dim)


def _fits(sizes: list[int | None], part: int, value: object, dim: int) -> bool:
    """Whether a value has a row for each source or destination, as others have."""
    if value is None:
        return True
    if not isinstance(value, Tensor):
        return False
    if sizes[part] is None:
        sizes[part] = value.size(dim)
    return sizes[part] == value.size(dim)
