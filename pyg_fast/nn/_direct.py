"""What PyG's `propagate` calculates where a graph has few edges, without the search for arguments
that takes it as long: the same operations of torch on the same numbers, and so the same bits."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import (
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

# Methods that PyG's `propagate` calls, which a layer may override.
_METHODS = (
    '_check_input', '_collect', '_lift', '_index_select', '_index_select_safe', '_set_size',
    'aggregate', 'update',
)  # fmt: skip
_SCATTERS = {  # as torch_geometric.utils.scatter calls them
    SumAggregation: 'sum', MeanAggregation: 'mean', MaxAggregation: 'max', MinAggregation: 'min',
    MulAggregation: 'mul',
}  # fmt: skip


class Arguments(NamedTuple):
    """Those of a layer's `message`. A pair has values of sources and of destinations. PyG's code
    runs where one is missing: what it takes then depends on how it was made."""

    of_nodes: tuple[tuple[str, str, int], ...]  # name, name of the input, part
    of_graph: tuple[str, ...]
    others: tuple[str, ...]


def _arguments_of(conv: MessagePassing) -> Arguments | None:
    """None if PyG's `propagate` must run, whatever the graph is."""
    cls = type(conv)
    replaced = next(  # by a class of ours
        base.__dict__['propagate'] for base in cls.__mro__
        if 'propagate' in base.__dict__ and base.__module__.partition('.')[0] != 'pyg_fast'
    )  # fmt: skip
    if (
        conv.flow != 'source_to_target' or not is_pygs(replaced)
        or any(getattr(cls, name) is not getattr(MessagePassing, name) for name in _METHODS)
    ):  # fmt: skip
        return None
    of_nodes, of_graph, others = [], [], []
    for name in conv.inspector.get_signature('message').param_dict:
        if name in OF_GRAPH:
            of_graph.append(name)
        elif name[-2:] in ('_i', '_j'):
            of_nodes.append((name, name[:-2], int(name[-1] == 'i')))
        else:
            others.append(name)
    return Arguments(tuple(of_nodes), tuple(of_graph), tuple(others))


def propagate(
    conv: MessagePassing, edge_index: Tensor, size: Size, kwargs: dict[str, object]
) -> Tensor | None:
    """The result of `propagate`; None if PyG's must run, which also says what is wrong with
    arguments. `message` has not been called then."""
    own = conv.__dict__
    if '_direct' not in own:
        own['_direct'] = _arguments_of(conv)
    arguments: Arguments | None = own['_direct']
    if (
        arguments is None or any(hooks_of(own)) or _has_any_global_hook()
        or type(edge_index) is not Tensor or edge_index.dtype != torch.int64
        or conv.flow != 'source_to_target' or own['_explain'] or own['_decomposed_layers'] != 1
        or 'aggregate' in own or 'update' in own or torch._C._get_tracing_state() is not None
    ):  # fmt: skip
        return None
    dim = own['node_dim']
    sizes = [None, None] if size is None else list(size)
    given: dict[str, object] = {}
    try:
        ends = source, target = edge_index.unbind()
        for name, base, part in arguments.of_nodes:
            value = kwargs[base]
            if isinstance(value, (tuple, list)):
                first, second = value
                if not (_fits(sizes, 0, first, dim) and _fits(sizes, 1, second, dim)):
                    return None
                value = value[part]
            elif not _fits(sizes, part, value, dim):
                return None
            given[name] = value.index_select(dim, ends[part]) if isinstance(value, Tensor) else None
        for name in arguments.others:
            given[name] = kwargs[name]
    except (IndexError, KeyError, RuntimeError, ValueError):
        return None
    num_dst = sizes[0] if sizes[1] is None else sizes[1]
    if num_dst is None:
        return None
    if arguments.of_graph:
        num_src = sizes[1] if sizes[0] is None else sizes[0]
        known = {
            'index': target, 'edge_index': edge_index, 'edge_index_i': target,
            'edge_index_j': source, 'adj_t': None, 'ptr': None, 'size': sizes, 'size_i': num_dst,
            'size_j': num_src, 'dim_size': num_dst,
        }  # fmt: skip
        for name in arguments.of_graph:
            given[name] = known[name]
    out = conv.message(**given)
    aggr = conv.aggr_module
    reduce = _SCATTERS.get(type(aggr))
    if reduce is not None and is_plain(aggr):
        try:
            return scatter(out, target, dim, num_dst, reduce)
        except (IndexError, RuntimeError, ValueError):
            pass  # PyG's module says what is wrong.
    return aggr(out, target, ptr=None, dim_size=num_dst, dim=dim)


def _fits(sizes: list[int | None], part: int, value: object, dim: int) -> bool:
    """Whether a value has a row for each source or destination, as others have."""
    if value is None:
        return True
    if not isinstance(value, Tensor):
        return False
    if sizes[part] is None:
        sizes[part] = value.size(dim)
    return sizes[part] == value.size(dim)
