"""Layers with a matrix for each relation: a graph whose nodes are pairs of a node and a relation.

An edge of relation r from j to i needs row (j, r) of the features times all matrices, or adds to
row (i, r) of the sums that the matrices take. No edge needs a matrix of its own.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric.typing
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing, RGATConv, RGCNConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.typing import Adj, OptTensor, PairOptTensor, Size
from torch_geometric.utils import softmax

from ..graph.graph import graph_of
from ..graph.prepared_graph import list_of
from ..message import Fallback, make_entry
from ..message._inputs import check_inputs
from ..ops._checks import DTYPES
from ..ops._edges import raise_index_error
from ..ops._library import ops
from ..ops.product import product
from ..sparse.graph import Graph
from ..sparse.operator import SparseOperator
from ..sparse.to_csr import MOST_NODES, counts_in_int64, csr_rows
from ._modules import is_plain_linear
from .message_passing import MIXINS, FusedPropagate, why_not

# Rows of all pairs may take the memory of PyG's messages, or this many numbers if those are fewer.
_MOST_NUMBERS = 1 << 26
_REDUCES = {SumAggregation: 'sum', MeanAggregation: 'mean'}
# PyG's methods, before any patch.
_METHODS = {cls: (cls.forward, cls.message, cls.update) for cls in (RGCNConv, RGATConv)}


def _check(
    conv: MessagePassing, cls: type[MessagePassing], edge_index: Adj, edge_type: object
) -> tuple[str, Tensor]:
    """How messages are reduced, and the relation of each edge, int64.

    Raises:
        Fallback: If PyG's code must run.
    """
    reason = why_not(conv, edge_index, conv.aggr_module, None)
    if reason is not None:
        raise Fallback(reason)
    if (cls.forward, cls.message, cls.update) != _METHODS[cls]:
        raise Fallback('its message passing is overridden')
    if type(conv.aggr_module) not in _REDUCES:
        raise Fallback(f'{type(conv.aggr_module).__name__} over relations')
    if conv.flow != 'source_to_target':
        raise Fallback(f'flow={conv.flow!r}')
    if (
        not isinstance(edge_type, Tensor) or edge_type.dim() != 1
        or edge_type.size(0) != edge_index.size(1) or edge_type.device != edge_index.device
        or edge_type.is_floating_point() or edge_type.dtype == torch.bool
    ):  # fmt: skip
        raise Fallback('an edge_type that is no number for each edge')
    kind = edge_type.long()
    if not kind.is_cuda and kind.size(0) > 0:
        low, high = kind.aminmax()
        if low < 0 or high >= conv.num_relations:  # PyG knows what to do.
            raise Fallback('relations out of range')
    return _REDUCES[type(conv.aggr_module)], kind


@contextmanager
def _naming_nodes(edge_index: Tensor, num_src: int, num_dst: int) -> Iterator[None]:
    """Errors of kernels speak of pairs of a node and a relation: these are of the nodes."""
    try:
        yield
    except IndexError as error:
        try:
            raise_index_error(list_of(edge_index), num_src, num_dst)
        except IndexError as found:
            raise found from error
        raise


def _ends(edge_index: Tensor) -> tuple[Tensor, Tensor]:
    plain = edge_index.as_tensor() if isinstance(edge_index, EdgeIndex) else edge_index
    source, target = plain.long().unbind()
    return source, target


class FusedRelationalSums(FusedPropagate):
    """Mixin before :class:`~torch_geometric.nn.RGCNConv`: one sum for all relations."""

    @property
    def plan(self) -> str | None:
        """As :attr:`FusedMessagePassing.plan <pyg_fast.nn.FusedMessagePassing.plan>`; the sum for
        all relations has no message."""
        return 'one sum for all relations' if self.__dict__.get('_one_sum') else super().plan

    def forward(
        self, x: OptTensor | PairOptTensor, edge_index: Adj, edge_type: OptTensor = None
    ) -> Tensor:
        if not torch.compiler.is_compiling():
            self.__dict__['_one_sum'] = False
            try:
                out = _sum(self, x, edge_index, edge_type)
                self._fused_note('')
                self.__dict__['_one_sum'] = True
                return out
            except Fallback:
                pass  # PyG propagates for each relation, which says what ran.
        return super().forward(x, edge_index, edge_type)


def _sum(
    conv: MessagePassing, x: OptTensor | PairOptTensor, edge_index: Adj, edge_type: OptTensor
) -> Tensor:
    """The result of RGCNConv."""
    reduce, kind = _check(conv, RGCNConv, edge_index, edge_type)
    x_l, x_r = _features(conv, x)
    is_id, num_relations = x_l is None, conv.num_relations
    if (
        torch_geometric.typing.WITH_SEGMM and reduce == 'mean' and not is_id
        and conv.num_bases is None and conv.num_blocks is None
    ):  # fmt: skip
        raise Fallback('PyG may take the mean over all relations')
    num_src, width = (conv.in_channels_l, conv.out_channels) if x_l is None else x_l.shape
    num_dst, read = x_r.size(0), [x_r] if x_l is None else [x_l, x_r]
    check_inputs(edge_index.device, read, edge_index.size(1), (num_src, num_dst))
    conv._check_input(edge_index, (num_src, num_dst))
    weight = _matrices(conv)
    of_features = None if is_id else weight
    if x_l is None:
        if num_src * num_relations > MOST_NODES:
            raise Fallback(f'{num_src * num_relations} pairs of a node and a relation')
        x_l = weight.reshape(-1, width)
    elif width != conv.in_channels_l:  # PyG knows what to do.
        raise Fallback(f'in_channels={conv.in_channels_l} for features of width {width}')
    edges = _Edges(edge_index, kind, num_src, num_dst, num_relations, is_id)
    with _naming_nodes(edge_index, num_src, num_dst):
        out = _way(edges, width)(edges, x_l.contiguous(), of_features, reduce == 'mean')
    out = out.to(torch.promote_types(out.dtype, torch.get_default_dtype()))
    if conv.root is not None:
        out = out + (x_r @ conv.root if x_r.is_floating_point() else conv.root[x_r])
    return out if conv.bias is None else out + conv.bias


def _features(conv: MessagePassing, x: OptTensor | PairOptTensor) -> tuple[Tensor | None, Tensor]:
    """The features of RGCNConv's sources, None where nodes have only numbers, and those of
    destinations, or their numbers.

    Raises:
        Fallback: If PyG's code must run.
    """
    x_l, x_r = x if isinstance(x, tuple) else (x, x)
    if x is None:
        x_r = torch.arange(conv.in_channels_l, device=conv.weight.device)
    if not isinstance(x_r, Tensor) or x_r.dim() != (2 if x_r.is_floating_point() else 1):
        raise Fallback('features that are no matrix')
    if x_l is None:
        fits = conv.num_blocks is None and not x_r.is_floating_point()
    else:
        fits = isinstance(x_l, Tensor) and x_l.dim() == 2 and x_r.is_floating_point()
    if not fits:
        raise Fallback('numbers of nodes')
    return x_l, x_r


def _matrices(conv: MessagePassing) -> Tensor:
    """The matrix of each relation of RGCNConv, or its diagonal blocks.

    Raises:
        Fallback: If PyG's code must run.
    """
    weight, num_relations = conv.weight, conv.num_relations
    if conv.num_bases is not None:
        weight = (conv.comp @ weight.view(conv.num_bases, -1)).view(
            num_relations, conv.in_channels_l, conv.out_channels
        )
    if weight.size(0) != num_relations or num_relations == 0:
        raise Fallback(f'num_relations={num_relations} of {weight.size(0)} matrices')
    return weight


class _Edges(NamedTuple):
    edge_index: Tensor
    kind: Tensor  # the relation of each edge, int64
    num_src: int
    num_dst: int
    num_relations: int
    by_relation: bool  # Each source has a row of features for each relation.

    def graph(self, row: Tensor, num_rows: int, x: Tensor) -> Graph:
        """From sources to the :obj:`row` of each edge."""
        source, _ = _ends(self.edge_index)
        if self.by_relation:
            of_kind = self.kind.clamp(0, self.num_relations - 1) * self.num_src + source
            source = torch.where((source >= 0) & (source < self.num_src), of_kind, -1)
        return graph_of(
            torch.stack([source, row]), x.size(0), num_rows, transpose=_needs_grad(x),
            values=False,
        )  # fmt: skip


def _needs_grad(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


def _way(edges: _Edges, width: int) -> Callable[[_Edges, Tensor, Tensor | None, bool], Tensor]:
    """The function that sums: one for few pairs, where the host need not know their number on a
    GPU and may on a CPU, or one for many."""
    num_edges, num_rows = edges.kind.size(0), edges.num_dst * (edges.num_relations + 1)
    few, width = (_sums_of_all, width) if edges.kind.is_cuda else (_sums_of_relations, 1)
    most = max(_MOST_NUMBERS, num_edges * width)
    return few if num_rows <= MOST_NODES and num_rows * width <= most else _sums_of_tiles


def _sums_of_all(edges: _Edges, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """A row for each pair of a destination and a relation, and one product with all matrices."""
    kind, num_dst, num_relations = edges.kind, edges.num_dst, edges.num_relations
    width, stride = x.size(1), num_relations + 1
    # Edges of other relations, which PyG ignores, have rows of their own.
    kind = torch.where((kind >= 0) & (kind < num_relations), kind, num_relations)
    graph = edges.graph(_ends(edges.edge_index)[1] * stride + kind, num_dst * stride, x)
    sums = product(SparseOperator(graph, mean=mean), x)
    sums = sums.view(num_dst, stride * width)[:, : num_relations * width]
    if weight is None:
        return sums.view(num_dst, num_relations, width).sum(1)
    if weight.dim() == 3:
        return sums @ weight.flatten(0, 1)
    sums = sums.view(num_dst, num_relations, *weight.shape[1:3])
    return torch.einsum('nrbc,rbcd->nbd', sums, weight).flatten(1)


def _sums_of_relations(edges: _Edges, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """A row for each pair that has edges, sorted by relation, and a product for each relation. The
    host reads the numbers of rows."""
    num_dst, num_relations = edges.num_dst, edges.num_relations
    target, num_rows = _ends(edges.edge_index)[1], num_dst * num_relations
    row = torch.where((target >= 0) & (target < num_dst), edges.kind * num_dst + target, -1)
    graph = edges.graph(row, num_rows, x)
    used = graph.rowptr.diff() > 0
    pairs = used.nonzero().view(-1)
    rowptr, t_col = F.pad(graph.rowptr[1:][pairs], (1, 0)), graph.t_col
    if t_col is not None:
        place = used.cumsum(0, dtype=t_col.dtype) - 1
        t_col = place[t_col.long()]
    graph = graph._replace(rowptr=rowptr, t_col=t_col, num_dst=pairs.size(0))
    out = product(SparseOperator(graph, mean=mean), x)
    if weight is not None:
        counts = (pairs // num_dst).bincount(minlength=num_relations).tolist()
        of_relations = zip(out.split(counts), weight.unbind(), strict=True)
        out = torch.cat([_mapped(rows, own) for rows, own in of_relations if rows.size(0) > 0])
    both = torch.stack([torch.arange(out.size(0), device=pairs.device), pairs % num_dst])
    graph = graph_of(both, out.size(0), num_dst, transpose=_needs_grad(out), values=False)
    return product(SparseOperator(graph), out, out_acc=True)


def _mapped(rows: Tensor, own: Tensor) -> Tensor:
    """Rows times the matrix, or the diagonal blocks, of a relation."""
    if own.dim() == 2:
        return rows @ own
    return torch.einsum('nbc,bcd->nbd', rows.view(-1, *own.shape[:2]), own).flatten(1)


class _Pairs(NamedTuple):
    """Rows for the pairs of a destination and a relation that have edges, sorted by relation.

    Those of a relation begin at a tile of rows and fill its last tile up with rows without edges.
    """

    sums: Graph  # from sources to rows
    tiles: Graph  # from each relation to its tiles
    totals: Graph  # from rows to destinations


def _sums_of_tiles(edges: _Edges, x: Tensor, weight: Tensor | None, mean: bool) -> Tensor:
    """A row for each pair that has edges, and a product of each tile with a matrix."""
    sums, tiles, totals = _pairs_of(edges, weight)
    if _needs_grad(x):
        sums = sums.with_transpose()
    out = product(SparseOperator(sums, mean=mean), x)
    if weight is not None:
        # The gradient of a relation's matrix is a sum over its tiles.
        of_tile = product(SparseOperator(tiles), weight.flatten(1))
        of_tile = of_tile.view(-1, *weight.shape[1:])
        out = out.view(tiles.num_dst, -1, x.size(1))
        if weight.dim() == 3:
            out = torch.bmm(out, of_tile)
        else:
            out = out.unflatten(2, weight.shape[1:3])
            out = torch.einsum('trbc,tbcd->trbd', out, of_tile).flatten(2)
        out = out.flatten(0, 1)
    if _needs_grad(out):
        totals = totals.with_transpose()
    return product(SparseOperator(totals), out, out_acc=True)


def _pairs_of(edges: _Edges, weight: Tensor | None) -> _Pairs:
    """Sorts edges by destination, unless the graph is prepared, and then by relation. No array has
    an entry for each pair that there could be."""
    edge_index, kind, num_src, num_dst, num_relations, by_relation = edges
    num_edges = kind.size(0)
    if counts_in_int64(num_edges):
        raise Fallback(f'{num_edges} edges')
    graph = graph_of(edge_index, num_src, num_dst, transpose=False)
    kind = kind if graph.perm is None else kind[graph.perm]
    target = csr_rows(graph.rowptr, 0, num_edges)
    # Edges of other relations, which PyG ignores, come last and belong to no row.
    edgeptr, target, order, _ = ops.to_csr.default(
        torch.stack([target.to(kind.dtype), kind]), num_dst, num_relations, False, False, False,
        report=False,
    )  # fmt: skip
    relation = csr_rows(edgeptr, 0, num_edges)
    is_next = ((target.diff() | relation.diff()) != 0).int()
    pair = F.pad(F.pad(is_next, (1, 0)), (0, 1), value=1).cumsum(0, dtype=torch.int32)
    pairptr = pair[edgeptr]

    most = _most_pairs(edges, pairptr)
    size = _tile_size(most, weight)
    num_tiles = (most + min(most, num_relations) * (size - 1)) // size
    num_rows = num_tiles * size
    if num_rows + num_edges > MOST_NODES:
        raise Fallback(f'{num_rows} pairs of a node and a relation')
    filled = (pairptr.diff() + (size - 1)) // size
    tileptr = F.pad(filled.cumsum(0, dtype=torch.int32), (1, 0))
    row = pair[:-1] + (tileptr * size - pairptr)[relation]
    ids = torch.arange(num_rows + 1, dtype=torch.int32, device=row.device)
    rowptr = torch.searchsorted(row, ids, out_int32=True).minimum(edgeptr[-1])

    col = graph.col[order]
    if by_relation:
        col += relation * num_src
        num_src *= num_relations
    sums = Graph.without_positions(rowptr, col, num_src, num_rows)
    tiles = Graph(
        ids[: num_tiles + 1].minimum(tileptr[-1]), csr_rows(tileptr, 0, num_tiles), None,
        tileptr, ids[:num_tiles], None, num_relations, num_tiles,
    )  # fmt: skip
    first, last = rowptr[:-1], rowptr[1:]
    target = torch.where(first < last, target[first.clamp(max=num_edges - 1)], -1)
    rowptr, col, _ = ops.to_csr_unweighted.default(
        torch.stack([ids[:-1], target]), num_rows, num_dst, False, False, report=False
    )
    totals = Graph.without_positions(rowptr, col, num_rows, num_dst)
    return _Pairs(sums, tiles, totals)


def _most_pairs(edges: _Edges, pairptr: Tensor) -> int:
    """The number of pairs. A GPU makes rows for as many as there may be: the host would wait."""
    if edges.kind.is_cuda:
        return min(edges.kind.size(0), edges.num_dst * edges.num_relations)
    return int(pairptr[-1])


def _tile_size(num_pairs: int, weight: Tensor | None) -> int:
    """The rows of a tile: with more, relations leave more of their last tiles empty; with fewer,
    more copies of their matrices are read."""
    if weight is None:
        return 1
    blocks = weight.size(1) if weight.dim() == 4 else 1
    width, size = blocks * sum(weight.shape[-2:]), weight[0].numel()
    # Both cost the same at the root of num_pairs * size / (relations * width): about that.
    about = math.isqrt(2 * num_pairs * size // max(1, weight.size(0) * width))
    return 1 << max(0, about.bit_length() - 1)


class FusedRelationalAttention(FusedPropagate):
    """Mixin before :class:`~torch_geometric.nn.RGATConv`: the maps of nodes, one for each relation,
    and a message without matrices."""

    def _kernel(self, edge_index: Adj, size: Size, kwargs: dict[str, object]) -> Tensor:
        return _attention(self, edge_index, size, **kwargs)

    def _message(
        self, value_j: Tensor, key_j: Tensor, query_i: Tensor, edge_type: Tensor,
        relations: Tensor, index: Tensor, size_i: int, edge_attr: OptTensor = None,
        edge_map: OptTensor = None, degree_i: OptTensor = None,
    ) -> Tensor:  # fmt: skip
        """As PyG's, of the row of the source and the edge's relation."""
        additive = self.attention_mode == 'additive-self-attention'
        own = edge_type.view(-1, 1, 1, 1) == relations.view(1, -1, 1, 1)
        query = torch.where(own, query_i, 0.0).sum(1)
        alpha = query + key_j if additive else query * key_j
        if edge_attr is not None:
            of_edge = (edge_attr @ edge_map).view(-1, self.heads, self.dim)
            alpha = alpha + of_edge if additive else alpha * of_edge
        if additive:
            alpha = F.leaky_relu(alpha, self.negative_slope)
        alpha = softmax(alpha, index, None, size_i)
        if self.mod == 'f-scaled':
            alpha = alpha * degree_i
        elif self.training and self.dropout > 0:
            alpha = F.dropout(alpha, p=self.dropout, training=True)
        value = value_j if additive else value_j.unsqueeze(2)
        out = alpha * value if additive else alpha.unsqueeze(3) * value
        if self.mod == 'additive':
            out = out + self.w * value
        elif self.mod == 'scaled':
            out = out * degree_i
        return out


def _attention(
    conv: MessagePassing, edge_index: Adj, size: Size, x: object, edge_type: object,
    edge_attr: object,
) -> Tensor:  # fmt: skip
    """The result of RGATConv."""
    reduce, kind = _check(conv, RGATConv, edge_index, edge_type)
    if conv.attention_mechanism != 'across-relation':
        raise Fallback(f'{conv.attention_mechanism} attention')
    if conv.mod == 'f-additive':  # It tells zero from the smallest numbers.
        raise Fallback(f'mod={conv.mod!r}')
    if conv.node_dim != 0:
        raise Fallback(f'node_dim={conv.node_dim}')
    if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype not in DTYPES:
        raise Fallback('features that are no matrix')
    if size is not None and any(each not in (None, x.size(0)) for each in size):
        raise Fallback('sizes that differ')
    conv._check_input(edge_index, size)
    inputs, other = _edge_features(conv, edge_attr, edge_index.size(1))
    check_inputs(
        edge_index.device, [x, *inputs.values()], edge_index.size(1), (x.size(0), x.size(0))
    )
    num_nodes, num_relations = x.size(0), conv.num_relations
    num_pairs = num_nodes * num_relations
    if num_pairs > min(MOST_NODES, edge_index.size(1) * x.size(1)):  # PyG's matrices take less.
        raise Fallback(f'{num_pairs} pairs of a node and a relation')

    source, target = _ends(edge_index)
    pair = torch.where((kind >= 0) & (kind < num_relations), source * num_relations + kind, -1)
    edges = torch.stack([pair, target])

    def graph(transpose: bool) -> Graph:
        return graph_of(edges, num_pairs, num_nodes, transpose=transpose)

    value, scores = _by_relation(conv, x), (conv.heads, conv.dim)
    inputs['edge', 'edge_type'] = kind.float()  # Kernels compare floats.
    inputs['src', 'value_j'] = value.view(-1, conv.heads, conv.out_channels)
    inputs['src', 'key_j'] = (value @ conv.k).view(-1, *scores)
    inputs['dst', 'query_i'] = (value @ conv.q).view(num_nodes, num_relations, *scores)
    other['relations'] = torch.arange(num_relations, dtype=torch.float32, device=x.device)
    if conv.mod in ('scaled', 'f-scaled'):
        degree = graph(False).rowptr.diff().to(value.dtype).view(-1, 1)
        inputs['dst', 'degree_i'] = _degree_scale(conv, degree)
    entry = conv.__dict__.get('_fused_entry')
    if entry is None:
        entry = conv.__dict__['_fused_entry'] = make_entry()
    with _naming_nodes(edge_index, num_nodes, num_nodes):
        (out,), _ = entry(conv._message, graph, (reduce,), inputs, other, ('index', 'size_i'))
    # `forward` wants it set, and forgets it.
    conv._alpha = out.detach()
    return conv.update(out)


def _edge_features(
    conv: MessagePassing, edge_attr: object, num_edges: int
) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
    """The features of edges and their map for the scores, as inputs of RGATConv's message.

    Raises:
        Fallback: If PyG's code must run.
    """
    if edge_attr is None:
        return {}, {}
    if not isinstance(edge_attr, Tensor) or edge_attr.dim() > 2 or conv.lin_edge is None:
        raise Fallback('edge features without a map')
    edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
    if edge_attr.size(0) != num_edges or not is_plain_linear(conv.lin_edge):
        raise Fallback('edge features by relation, or an observed map')
    edge_map = conv.lin_edge.weight.t() @ conv.e
    return {('edge', 'edge_attr'): edge_attr}, {'edge_map': edge_map}


def _degree_scale(conv: MessagePassing, degree: Tensor) -> Tensor:
    """The factors of RGATConv's `mod`, of the degrees."""
    shape = [degree.size(0), 1, -1]
    if conv.mod == 'scaled':
        degree = conv.activation(degree @ conv.l1 + conv.b1) @ conv.l2 + conv.b2
        if conv.attention_mode != 'additive-self-attention':
            shape.insert(1, 1)
    return degree.view(shape)


def _by_relation(conv: MessagePassing, x: Tensor) -> Tensor:
    """Each node's features times the matrix of each relation, a row for each pair."""
    num_relations, num_out = conv.num_relations, conv.heads * conv.out_channels
    weight = (
        conv.weight
        if conv.num_bases is None
        else ((conv.att @ conv.basis.view(conv.num_bases, -1)).view(num_relations, -1, num_out))
    )
    if weight.size(0) != num_relations:
        raise Fallback(f'num_relations={num_relations} of {weight.size(0)} matrices')
    if conv.num_blocks is not None:
        parts = x.view(x.size(0), *weight.shape[1:3])
        out = torch.einsum('nbc,rbcd->nrbd', parts, weight)
    else:
        out = x @ weight.transpose(0, 1).reshape(x.size(1), -1)
    return out.reshape(-1, num_out)


MIXINS[RGCNConv] = FusedRelationalSums
MIXINS[RGATConv] = FusedRelationalAttention
