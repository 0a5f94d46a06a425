"""HGTConv: one product for the matrices of all relations of a node type.

PyG multiplies the nodes of each relation and head by a matrix of their own, one after another, and
reads a number for each edge and head, the relation's prior. Here a source has a row for each of its
relations, of a product with all their matrices, and priors are factors of the matrices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import ParameterDict
from torch_geometric.nn import HGTConv, MessagePassing
from torch_geometric.nn.dense import HeteroLinear
from torch_geometric.typing import Adj

from ..graph.prepared_graph import list_of
from ..message import Fallback
from ._modules import is_plain
from .message_passing import MIXINS, FusedPropagate, why_not
from .relational import _ends

_Relation = tuple[str, str, str]

# Narrower heads are multiplied together, by a matrix with theirs on its diagonal: small products
# take as long, above all those for the gradients of matrices, which add up over all nodes.
_LEAST_WIDTH = {'cpu': 16, 'cuda': 64}
# PyG's methods, before any patch.
_NAMES = ('forward', 'message', 'update', '_cat', '_construct_src_node_feat')
_METHODS = {(HGTConv, name): getattr(HGTConv, name) for name in _NAMES} | {
    (HeteroLinear, 'forward'): HeteroLinear.forward
}


class FusedHeterogeneousAttention(FusedPropagate):
    """Mixin before :class:`~torch_geometric.nn.HGTConv`: a product for all relations and heads of
    a node type, and a message without priors."""

    @property
    def plan(self) -> str | None:
        """As :attr:`FusedMessagePassing.plan <pyg_fast.nn.FusedMessagePassing.plan>`; also why
        PyG's code multiplied by the matrices of relations, if it did."""
        text, reason = super().plan, self.__dict__.get('_maps_reason')
        return f"{text}\nrelations: PyG's code: {reason}" if text and reason else text

    def forward(
        self, x_dict: dict[str, Tensor], edge_index_dict: dict[_Relation, Adj]
    ) -> dict[str, Tensor]:
        if torch.compiler.is_compiling():
            # PyG joins the lists of all relations; Inductor's code of prepared ones raises errors.
            plain = {
                relation: list_of(edges) if isinstance(edges, Tensor) else edges
                for relation, edges in edge_index_dict.items()
            }
            return super().forward(x_dict, plain)
        try:
            ends = _checked(self, x_dict, edge_index_dict)
        except Fallback as reason:
            self.__dict__['_maps_reason'] = str(reason)
            return super().forward(x_dict, edge_index_dict)
        self.__dict__['_maps_reason'] = ''
        return _forward(self, x_dict, ends)


def _checked(
    conv: MessagePassing, x_dict: dict[str, Tensor], edge_index_dict: dict[_Relation, Adj]
) -> dict[_Relation, tuple[Tensor, Tensor]]:
    """Sources and destinations of each relation.

    Raises:
        Fallback: If PyG's `forward` must run.
    """
    _check_layer(conv)
    heads, dtype, ends = conv.heads, conv.k_rel.weight.dtype, {}
    for relation, edge_index in edge_index_dict.items():
        reason = why_not(conv, edge_index, conv.aggr_module, None)
        if reason is not None:
            raise Fallback(reason)
        if edge_index.is_floating_point() or edge_index.dtype == torch.bool:
            raise Fallback(f'an edge_index of {edge_index.dtype}')
        if relation not in conv.edge_types_map:
            raise Fallback(f'{relation} is no edge type of the layer')
        prior = conv.p_rel['__'.join(relation)]
        if prior.shape != (1, heads) or prior.dtype != dtype:
            raise Fallback(f'p_rel of {prior.dtype} and shape {list(prior.shape)}')
        ends[relation] = _ends(edge_index)
        if edge_index.is_cuda or edge_index.size(1) == 0:
            continue
        for k, nodes in zip((0, -1), ends[relation], strict=True):
            low, high = nodes.aminmax()
            if low < 0 or high >= x_dict[relation[k]].size(0):  # PyG knows what to do.
                raise Fallback('nodes out of range')
    if len(ends) == 0:
        raise Fallback('no relations')
    numbers = [conv.edge_types_map[relation] for relation in ends]
    if numbers != sorted(numbers):  # PyG takes other matrices than those of the relations.
        raise Fallback('edge types in another order than in the metadata')
    return ends


def _check_layer(conv: MessagePassing) -> None:
    """Raises :class:`Fallback` if something changes or observes the layer."""
    if conv.flow != 'source_to_target':
        raise Fallback(f'flow={conv.flow!r}')
    for (cls, name), method in _METHODS.items():
        if getattr(cls, name) is not method:
            raise Fallback(f'{cls.__name__}.{name} is patched')
    if not conv.__dict__.keys().isdisjoint(_NAMES):
        raise Fallback('its methods are patched')
    heads, dim = conv.heads, conv.out_channels // conv.heads
    for name in ('k_rel', 'v_rel'):
        if not _is_plain_map(getattr(conv, name), (heads * len(conv.edge_types), dim, dim)):
            raise Fallback(f'{name} is observed or replaced, or has a bias')
    if not isinstance(conv.p_rel, ParameterDict):
        raise Fallback('p_rel is replaced')


def _is_plain_map(module: HeteroLinear, shape: tuple[int, ...]) -> bool:
    """Whether a map consists only of its matrices."""
    return (
        type(module) is HeteroLinear
        and is_plain(module)
        and module.bias is None
        and module.weight.shape == shape
    )


def _forward(
    conv: MessagePassing, x_dict: dict[str, Tensor], ends: dict[_Relation, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """As PyG's, of keys and values that have a row for each node and relation."""
    heads, channels = conv.heads, conv.out_channels
    nodes = {
        name: mapped.unflatten(1, (3, channels)).unbind(1)
        for name, mapped in conv.kqv_lin(x_dict).items()
    }
    sizes = {name: query.size(0) for name, (_, query, _) in nodes.items()}
    by_source: dict[str, list[_Relation]] = {}
    for relation in ends:
        by_source.setdefault(relation[0], []).append(relation)

    k_weight, v_weight = _matrices(conv, [each for group in by_source.values() for each in group])
    counts = [len(group) for group in by_source.values()]
    k, v = [], []
    for name, of_keys, of_values in zip(
        by_source, k_weight.split(counts, 2), v_weight.split(counts, 2), strict=True
    ):
        key, _, value = nodes[name]
        k.append(_product(key, of_keys))
        v.append(_product(value, of_values))
    q = torch.cat([query for _, query, _ in nodes.values()])
    out = conv.propagate(
        _edge_index(ends, by_source, sizes), k=torch.cat(k).view(-1, heads, channels // heads),
        q=q.view(-1, heads, channels // heads), v=torch.cat(v).view(-1, heads, channels // heads),
        edge_attr=k_weight.new_ones(1, heads),
    )  # fmt: skip

    parts = zip(nodes, F.gelu(out).split([*sizes.values()]), strict=True)
    out_dict = {name: part for name, part in parts if name in conv.dst_node_types}
    mapped_dict = conv.out_lin(out_dict)
    for name in out_dict:
        out, x = mapped_dict[name], x_dict[name]
        if out.size(-1) == x.size(-1):
            share = conv.skip[name].sigmoid()
            out = share * out + (1 - share) * x
        out_dict[name] = out
    return out_dict


def _edge_index(
    ends: dict[_Relation, tuple[Tensor, Tensor]], by_source: dict[str, list[_Relation]],
    sizes: dict[str, int],
) -> Tensor:  # fmt: skip
    """The edges of all relations, from rows of :func:`_product` for one type of sources after
    another to all nodes."""
    rows, begin = {}, 0
    for name, group in by_source.items():
        for place, relation in enumerate(group):
            rows[relation] = ends[relation][0] * len(group) + (begin + place)
        begin += sizes[name] * len(group)
    first, begin = {}, 0
    for name, size in sizes.items():
        first[name], begin = begin, begin + size
    targets = [target + first[relation[-1]] for relation, (_, target) in ends.items()]
    return torch.cat([*(rows[relation] for relation in ends), *targets]).view(2, -1)


def _matrices(conv: MessagePassing, relations: list[_Relation]) -> tuple[Tensor, Tensor]:
    """The matrices for keys, times the priors of relations, and for values: one of each group of
    heads and relation, of shape (groups, in, relations, out)."""
    heads, num_relations, dim = conv.heads, len(conv.edge_types), conv.k_rel.weight.size(-1)
    numbers = [conv.edge_types_map[relation] for relation in relations]
    prior = torch.cat([conv.p_rel['__'.join(relation)] for relation in relations])
    least = _LEAST_WIDTH.get(prior.device.type, 1)
    size = min([n for n in range(1, heads) if heads % n == 0 and n * dim >= least] or [heads])
    diagonal = torch.eye(size, dtype=prior.dtype, device=prior.device).view(size, 1, 1, size, 1)
    found = []
    for weight, factor in ((conv.k_rel.weight, prior), (conv.v_rel.weight, None)):
        of_relation = weight.view(heads, num_relations, dim, dim).unbind(1)
        own = torch.stack([of_relation[number] for number in numbers])
        if factor is not None:
            own = own * factor.view(-1, heads, 1, 1)
        own = own.view(-1, heads // size, size, dim, 1, dim).permute(1, 2, 3, 0, 4, 5)
        own = (own * diagonal).contiguous()
        found.append(own.view(heads // size, size * dim, len(numbers), size * dim))
    return found[0], found[1]


def _product(x: Tensor, matrices: Tensor) -> Tensor:
    """The rows times the matrix of each relation: a row for each, those of a node together."""
    groups, width, num_relations, _ = matrices.shape
    if groups == 1:
        return (x @ matrices.view(width, -1)).view(-1, width)
    out = x.view(-1, groups, width).transpose(0, 1) @ matrices.flatten(2)
    out = out.view(groups, -1, num_relations, width)
    return out.permute(1, 2, 0, 3).reshape(-1, groups * width)


MIXINS[HGTConv] = FusedHeterogeneousAttention
