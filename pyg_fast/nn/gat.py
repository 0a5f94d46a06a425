"""GAT and GATv2 layers."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, OptTensor, PairTensor, Size, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor
from torch_geometric.utils.loop import compute_loop_attr

from ..graph.graph import graph_of
from ..graph.prepared_graph import list_of
from ..graph.small_graphs import has_few_edges, reason_of
from ..message import Fallback, make_entry
from ..message._entry import Entry
from ..message._fallback import tell
from ..message._inputs import Looped, check_inputs, looped
from ..ops._attention import AttentionArgs, drawn_seed
from ..ops._edges import check_edge_index
from ..ops._numbers import acc_dtype
from ..ops.attention_scores import attention_scores
from ..ops.edge_scores import edge_and_loop_scores, edge_scores
from ..ops.edge_sums import Selected, edge_sums
from ..ops.gat import GAT, attend
from ..ops.gatv2 import attend_v2
from ..ops.linear import linear, linears
from ..sparse.graph import Graph
from ._explain_edges import warn_of_missing_edges
from ._explain_features import check_like_parameters
from ._layer import Fused, entries, in_int64, known_edges
from ._marked import marked_sum
from ._modules import is_plain_linear, part_of, weight_and_bias

# Rules for the features of self-loops that have a kernel.
LOOP_FILLS = ('mean', 'add', 'sum')


class _FusedAttention(Fused):
    # Shared by both layers.
    _node_dim = 0

    @classmethod
    def _why_not_aggr(cls, conv: MessagePassing) -> str | None:
        sums = conv.aggr in ('add', 'sum') and type(conv.aggr_module) is SumAggregation
        return None if sums else f'aggr={conv.aggr!r}'

    @classmethod
    def _why_no_options(cls, conv: MessagePassing) -> str | None:
        fill = conv.fill_value
        by_rule = conv.lin_edge is not None and isinstance(fill, str) and conv.add_self_loops
        if not by_rule or fill in LOOP_FILLS:
            return None
        return f'edge_dim: fill_value={fill!r} of self-loops has no kernel'

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        *args: object,
        **kwargs: object,
    ) -> None:
        if heads < 1:
            raise ValueError(f"'heads' must be at least 1, got {heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"'dropout' must be from 0 to 1, got {dropout}")
        super().__init__(
            in_channels, out_channels, heads, concat, negative_slope, dropout, *args, **kwargs
        )

    def _ends(self, x: object) -> tuple[Tensor, Tensor] | None:
        """Features of sources and destinations, or None if PyG's code must run."""
        src, dst = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, x)
        if not self._unaltered(src):
            return None
        aggr = part_of(self, 'aggr_module')
        if self.aggr not in ('add', 'sum') or type(aggr) is not SumAggregation:
            self._fused_note(f'aggr={self.aggr!r}')
            return None
        if dst is src:
            return src, src
        if not self._unaltered(dst) or dst.dtype != src.dtype or dst.device != src.device:
            return None
        # With flow='target_to_source' PyG swaps the two of a pair.
        return (src, dst) if self.flow == 'source_to_target' else None

    def _graph(
        self, edge_index: Adj, src: Tensor, dst: Tensor, has_edges: bool = False
    ) -> Graph | None:
        """The graph, with its transpose if a backward pass may follow, or None if PyG's code must
        run."""
        self._fused_note_edges(edge_index)
        num_src, num_dst = src.size(0), dst.size(0)
        if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
            found = entries(edge_index, num_src, num_dst, self.flow)
            if found is None:
                return None
            edge_index, _ = found
        if edge_index.device != src.device:
            raise ValueError(f"'edge_index' is on {edge_index.device}, but 'x' is on {src.device}")
        if self.add_self_loops and num_src == num_dst:
            edge_index = known_edges(edge_index, num_src)
        reverse = self.flow == 'target_to_source'
        graph = graph_of(
            edge_index, num_src, num_dst, transpose=torch.is_grad_enabled() or reverse,
            drop_loops=self.add_self_loops,
            values=has_edges or reverse or (self.training and self.dropout > 0),
        )  # fmt: skip
        return graph.t() if reverse else graph

    def _attention_args(self, graph: Graph, x: Tensor, out_dtype: torch.dtype) -> AttentionArgs:
        num_loops = min(graph.num_src, graph.num_dst) if self.add_self_loops else 0
        dropout = self.dropout if self.training else 0.0
        return AttentionArgs(
            graph, num_loops, self.negative_slope, dropout, drawn_seed(None, dropout, x),
            out_dtype != x.dtype,
        )  # fmt: skip

    def _check_edge_attr(self, edge_index: Tensor, edge_attr: Tensor) -> None:
        wanted = [edge_index.size(1), self.edge_dim]
        got = [*edge_attr.shape, 1] if edge_attr.dim() == 1 else list(edge_attr.shape)
        if got != wanted:
            check_edge_index(edge_index)  # Its shape may be what is wrong.
            raise ValueError(f"'edge_attr' must have shape {wanted}, got {list(edge_attr.shape)}")
        # PyG's mean over self-loops takes integers, too.
        weight = self.lin_edge.weight
        if edge_attr.is_floating_point() or edge_attr.device != weight.device:
            check_like_parameters('edge_attr', edge_attr, weight)

    def _fused_bias(self, out_dtype: torch.dtype) -> OptTensor:
        """The bias, if the kernel can add it."""
        bias = part_of(self, 'bias')
        if bias is None or bias.dtype != out_dtype:
            return None
        if bias.size(-1) != self.heads * self.out_channels:
            return None  # torch adds it, or says that it does not fit.
        return bias if self.concat or self.heads == 1 else None

    def _finished(self, out: Tensor, res: OptTensor, has_bias: bool) -> Tensor:
        """Joins the heads, adds the residual, and the bias if it is missing."""
        out = out.flatten(1) if self.concat or self.heads == 1 else out.mean(dim=1)
        if res is not None:
            out = out + res
        return out if has_bias or self.bias is None else out + self.bias


class FusedGATConv(_FusedAttention, GATConv):
    r"""The graph attentional operator of the `"Graph Attention Networks"
    <https://arxiv.org/abs/1710.10903>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}}
        \alpha_{i,j} \mathbf{\Theta} \mathbf{x}_j, \quad
        \alpha_{i,j} = \mathrm{softmax}_j \, \mathrm{LeakyReLU} \left(
        \mathbf{a}^{\top}_{s} \mathbf{\Theta} \mathbf{x}_j
        + \mathbf{a}^{\top}_{t} \mathbf{\Theta} \mathbf{x}_i
        + \mathbf{a}^{\top}_{e} \mathbf{\Theta}_{e} \mathbf{e}_{i,j} \right)

    A drop-in for :class:`~torch_geometric.nn.conv.GATConv`: the same options, parameters,
    state_dict, outputs and gradients. Scores, softmax, dropout and aggregation are one forward and
    one backward kernel, see :func:`~pyg_fast.ops.gat`. Memory is :math:`O(N H C)`; only edge
    features need tensors of size :math:`|\mathcal{E}| \times H`. Dropout has PyG's rate but drops
    other edges; :func:`torch.manual_seed` reproduces it.

    A graph prepared by :class:`~pyg_fast.transforms.ToCSR` is sorted once, any other input at
    every call. These run PyG's own code: :obj:`return_attention_weights`, dtypes other than
    float32, float64, float16 and bfloat16, aggregations other than sums, a source without
    destination features, edge features of self-loops filled by maximum, minimum or product, hooks
    and explainers.

    Args:
        in_channels (int or (int, int)): Size of each input sample, or :obj:`-1` to derive it from
            the first input; a pair for source and destination nodes.
        out_channels (int): Size of each output sample :math:`C`, per head.
        heads (int, optional): Number of heads :math:`H`. (default: :obj:`1`)
        concat (bool, optional): Whether heads are concatenated (or averaged).
            (default: :obj:`True`)
        negative_slope (float, optional): Slope of the leaky ReLU below zero.
            (default: :obj:`0.2`)
        dropout (float, optional): Probability that an attention weight is dropped in training.
            (default: :obj:`0`)
        add_self_loops (bool, optional): Whether to add one self-loop to each node.
            (default: :obj:`True`)
        edge_dim (int, optional): Size of edge features. (default: :obj:`None`)
        fill_value (float or Tensor or str, optional): Features of self-loops, or how to derive them
            from those of a node's edges. (default: :obj:`"mean"`)
        bias (bool, optional): Whether to learn an additive bias. (default: :obj:`True`)
        residual (bool, optional): Whether to add a linear map of the node's own features.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V}_s|, F_{s}), (|\mathcal{V}_t|, F_{t}))`, edge indices
          :math:`(2, |\mathcal{E}|)` or sparse matrix
          :math:`(|\mathcal{V}_t|, |\mathcal{V}_s|)`, edge features :math:`(|\mathcal{E}|, D)`
          *(optional)*
        - **output:** node features :math:`(|\mathcal{V}_t|, H C)`, or
          :math:`(|\mathcal{V}_t|, C)` without :obj:`concat`

    Raises:
        ValueError: If :obj:`heads` or :obj:`dropout` is out of range, :obj:`edge_attr` has the
            wrong shape, or :obj:`edge_index` is on another device or does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GATConv

    def forward(
        self,
        x: Tensor | OptPairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        size: Size = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, PairTensor] | tuple[Tensor, SparseTensor]:
        """"""
        if edge_attr is not None and self.lin_edge is None and not torch.compiler.is_compiling():
            warnings.warn("'edge_attr' has no effect without 'edge_dim', as in PyG", stacklevel=5)
        if edge_attr is None:
            warn_of_missing_edges(self, edge_index, stacklevel=5)
        out = None
        if not return_attention_weights:
            out = self._fused(x, edge_index, edge_attr, size)
        if out is None:
            if return_attention_weights:
                self._fused_note('return_attention_weights')
            return super().forward(
                x, self._edges_for_pyg(edge_index), edge_attr, size, return_attention_weights
            )
        return out

    def _fused(self, x: object, edge_index: Adj, edge_attr: OptTensor, size: Size) -> Tensor | None:
        ends = self._ends(x)
        if ends is None or (size is not None and tuple(size) != (ends[0].size(0), ends[1].size(0))):
            return None
        lin, lin_edge = self.lin, self.lin_edge
        has_edges = lin_edge is not None and edge_attr is not None
        if lin_edge is not None and (
            not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index)
            or not is_plain_linear(lin_edge) or lin_edge.bias is not None
        ):  # fmt: skip
            return None
        by_rule = isinstance(self.fill_value, str) and self.add_self_loops and has_edges
        if by_rule and (self.fill_value not in LOOP_FILLS or ends[0] is not ends[1]):
            return None
        if has_edges and edge_attr.dtype == torch.bool:  # PyG's mean of truth values is another.
            return None

        src, dst = ends
        if has_edges:
            self._check_edge_attr(edge_index, edge_attr)
        # Before the linear maps: PyG's code would run them again, with hooks.
        graph = self._graph(edge_index, src, dst, has_edges)
        if graph is None:
            return None
        res = None if self.res is None else self.res(dst)
        heads, channels = self.heads, self.out_channels
        mapped = (lin or self.lin_src)(src)
        same = src is dst and lin is not None
        mapped_dst = mapped if same else (lin or self.lin_dst)(dst)
        att_src, att_dst = part_of(self, 'att_src'), part_of(self, 'att_dst')
        out_dtype = torch.promote_types(mapped.dtype, att_src.dtype)
        acc = acc_dtype(mapped.dtype)
        if out_dtype not in (mapped.dtype, acc):
            return None
        mapped = mapped.view(-1, heads, channels)
        args = self._attention_args(graph, mapped, out_dtype)
        alpha_edge = alpha_loop = None
        # Without any edge, PyG's scores do not depend on the edge features and their parameters.
        if has_edges and (edge_index.size(1) > 0 or args.num_loops > 0):
            alpha_edge, alpha_loop = self._edge_scores(
                edge_index, edge_attr, graph, args.num_loops, acc
            )
        bias = self._fused_bias(out_dtype)
        others = alpha_edge, alpha_loop, bias
        if same:
            out = GAT.apply(mapped, att_src, att_dst, *others, (args, True))
        else:
            (alpha_src,) = attention_scores(mapped, att_src)
            (alpha_dst,) = attention_scores(mapped_dst.view(-1, heads, channels), att_dst)
            out = attend(mapped, alpha_src, alpha_dst, *others, args)
        return self._finished(out, res, bias is not None)

    def _edge_scores(
        self,
        edge_index: Tensor,
        edge_attr: Tensor,
        graph: Graph,
        num_loops: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, OptTensor]:
        """Scores of edges and self-loops, without expanding the edge features to all channels."""
        edge_dim, fill = self.lin_edge.weight.size(1), self.fill_value
        with _no_autocast(edge_attr):
            weight = self.lin_edge.weight.view(self.heads, self.out_channels, edge_dim)
            weight = (weight * self.att_edge.view(self.heads, -1, 1)).sum(dim=1)
            edge_attr = edge_attr.view(-1, edge_dim).to(weight.dtype)
            if num_loops == 0:
                return edge_scores(edge_attr, weight).to(dtype), None
            if isinstance(fill, str):
                data = list_of(edge_index)
                rows = graph.t() if self.flow == 'target_to_source' else graph
                scores, loops = edge_and_loop_scores(edge_attr, weight, rows, data, fill == 'mean')
            else:
                if not isinstance(fill, Tensor):
                    fill = weight.new_full((edge_dim,), fill)
                scores = edge_scores(edge_attr, weight)
                loops = F.linear(fill.to(weight).view(1, -1), weight).expand(num_loops, -1)
        return scores.to(dtype), loops.to(dtype)


class FusedGATv2Conv(_FusedAttention, GATv2Conv):
    r"""The GATv2 operator of the `"How Attentive are Graph Attention Networks?"
    <https://arxiv.org/abs/2105.14491>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_{j \in \mathcal{N}(i) \cup \{ i \}}
        \alpha_{i,j} \mathbf{\Theta}_{s} \mathbf{x}_j, \quad
        \alpha_{i,j} = \mathrm{softmax}_j \left( \mathbf{a}^{\top} \mathrm{LeakyReLU} \left(
        \mathbf{\Theta}_{s} \mathbf{x}_j + \mathbf{\Theta}_{t} \mathbf{x}_i \right) \right)

    A drop-in for :class:`~torch_geometric.nn.conv.GATv2Conv`: the same options, parameters,
    state_dict, outputs and gradients. Scores, softmax, dropout and aggregation are one kernel in
    the forward pass and two in the backward pass, which recompute the scores, see
    :func:`~pyg_fast.ops.gatv2`. Memory is :math:`O(N H C)`. Dropout has PyG's rate but drops other
    edges; :func:`torch.manual_seed` reproduces it.

    A graph prepared by :class:`~pyg_fast.transforms.ToCSR` is sorted once, any other input at
    every call. Edge features of up to 128 channels are mapped inside of generated kernels, see
    :class:`~pyg_fast.nn.FusedMessagePassing`.
    These run PyG's own code: :obj:`return_attention_weights`, dtypes other than float32, float64,
    float16 and bfloat16, aggregations other than sums, hooks and explainers.

    Args:
        in_channels (int or (int, int)): Size of each input sample, or :obj:`-1` to derive it from
            the first input; a pair for source and destination nodes.
        out_channels (int): Size of each output sample :math:`C`, per head.
        heads (int, optional): Number of heads :math:`H`. (default: :obj:`1`)
        concat (bool, optional): Whether heads are concatenated (or averaged).
            (default: :obj:`True`)
        negative_slope (float, optional): Slope of the leaky ReLU below zero.
            (default: :obj:`0.2`)
        dropout (float, optional): Probability that an attention weight is dropped in training.
            (default: :obj:`0`)
        add_self_loops (bool, optional): Whether to add one self-loop to each node.
            (default: :obj:`True`)
        edge_dim (int, optional): Size of edge features. (default: :obj:`None`)
        fill_value (float or Tensor or str, optional): Features of self-loops, or how to derive them
            from those of a node's edges. (default: :obj:`"mean"`)
        bias (bool, optional): Whether to learn additive biases. (default: :obj:`True`)
        share_weights (bool, optional): Whether :math:`\mathbf{\Theta}_{s}` and
            :math:`\mathbf{\Theta}_{t}` are the same. (default: :obj:`False`)
        residual (bool, optional): Whether to add a linear map of the node's own features.
            (default: :obj:`False`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V}_s|, F_{s}), (|\mathcal{V}_t|, F_{t}))`, edge indices
          :math:`(2, |\mathcal{E}|)` or sparse matrix
          :math:`(|\mathcal{V}_t|, |\mathcal{V}_s|)`, edge features :math:`(|\mathcal{E}|, D)`
          *(optional)*
        - **output:** node features :math:`(|\mathcal{V}_t|, H C)`, or
          :math:`(|\mathcal{V}_t|, C)` without :obj:`concat`

    Raises:
        ValueError: If :obj:`heads` or :obj:`dropout` is out of range, or :obj:`edge_index` is on
            another device or does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = GATv2Conv

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, PairTensor] | tuple[Tensor, SparseTensor]:
        """"""
        out = None
        if edge_attr is None:
            warn_of_missing_edges(self, edge_index, stacklevel=5)
        if edge_attr is not None and self.lin_edge is not None and isinstance(edge_index, Tensor):
            kind = 'prepared message' if isinstance(edge_index, EdgeIndex) else 'message'
            if (
                not torch.compiler.is_compiling()  # where it would guard the number of edges
                and has_few_edges(edge_index, self.heads * self.out_channels, kind)
            ):
                self._fused_note(reason_of(edge_index.size(1)))
                if isinstance(edge_index, EdgeIndex):  # PyG's code takes longer for one.
                    edge_index = edge_index.as_tensor()
                return super().forward(x, in_int64(edge_index), edge_attr, return_attention_weights)
            if not is_torch_sparse_tensor(edge_index):
                self._check_edge_attr(edge_index, edge_attr)
                if not return_attention_weights:
                    out = self._with_edges(x, edge_index, edge_attr)
        elif not return_attention_weights and edge_attr is None:
            out = self._fused(x, edge_index)
        if out is None:
            if return_attention_weights:
                self._fused_note('return_attention_weights')
            return super().forward(
                x, self._edges_for_pyg(edge_index), edge_attr, return_attention_weights
            )
        return out

    def _fused(self, x: object, edge_index: Adj) -> Tensor | None:
        ends = self._ends(x)
        if ends is None or (self.edge_dim is not None and not isinstance(edge_index, Tensor)):
            return None
        src, dst = ends
        graph = self._graph(edge_index, src, dst)  # before the linear maps, as above
        if graph is None:
            return None
        res = None if self.res is None else self.res(dst)
        sent, received = self._maps(src, dst)
        att, dtype = self.att, sent.dtype
        out_dtype = torch.promote_types(dtype, att.dtype)
        if out_dtype not in (dtype, acc_dtype(dtype)):
            return None
        heads, channels = self.heads, self.out_channels
        bias = self._fused_bias(out_dtype)
        out = attend_v2(
            sent, received, att.to(dtype).view(heads, channels), bias,
            self._attention_args(graph, sent, out_dtype),
        )  # fmt: skip
        return self._finished(out, res, bias is not None)

    def _with_edges(self, x: object, edge_index: Tensor, edge_attr: Tensor) -> Tensor | None:
        """The layer with edge features, whose scores and message are captured as one message."""
        ends = self._ends(x)
        if ends is None:
            return None
        src, dst = ends
        if torch.compiler.is_compiling():
            return self._compiled(edge_index, edge_attr, src, dst)
        self._fused_note_edges(edge_index)
        reverse = self.flow == 'target_to_source'
        sizes, transpose = (src.size(0), dst.size(0)), torch.is_grad_enabled() or reverse
        loops = looped(edge_index, *sizes, transpose) if self.add_self_loops else None
        num_edges = edge_index.size(1) if loops is None else loops.graph.num_edges
        try:  # Before the linear maps: PyG's code would run them again.
            check_inputs(edge_index.device, (src, dst, edge_attr), num_edges, sizes)
        except Fallback as reason:
            self._fused_note(str(reason))
            tell(self, reason)
            return None
        if loops is not None:
            edge_attr = self._looped_attr(edge_index, edge_attr, loops, sizes)
        mapped, mapped_dst = self._maps(src, dst, joined=True)
        inputs = {
            ('src', 'x_j'): mapped, ('edge', 'edge_attr'): edge_attr, ('dst', 'x_i'): mapped_dst,
        }  # fmt: skip

        def graph(transpose: bool) -> Graph:
            if loops is None:
                out = graph_of(edge_index, *sizes, transpose=transpose or reverse)
            else:
                out = loops.graph
            return out.t() if reverse else out

        if self not in _entries:
            _entries[self] = make_entry()
        try:
            (out,), _ = _entries[self](
                self._attended,
                graph,
                ('sum',),
                inputs,
                {},
                ('index', 'size_i'),
                only_read=self.bias is not None or self.res is not None,
            )
        except Fallback as reason:
            self._fused_note(str(reason))
            tell(self, reason)
            return None
        return self._finished(out, None if self.res is None else self.res(dst), False)

    def _compiled(self, edge_index: Tensor, edge_attr: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        """PyG's code with marks, of which the backend `pyg_fast` makes a kernel. PyG's own breaks
        the graph where it removes self-loops; here they go to a node after the last instead."""
        num_src, num_dst = src.size(0), dst.size(0)
        reverse, edge_attr = self.flow == 'target_to_source', edge_attr.view(-1, self.edge_dim)
        mapped, mapped_dst = self._maps(src, dst)
        if self.add_self_loops:
            edge_index, edge_attr = self._with_loops(edge_index, edge_attr, num_src, num_dst)
            mapped_dst, num_dst = F.pad(mapped_dst, (0, 0, 0, 0, 0, 1)), num_dst + 1
        out = marked_sum(self._attended, edge_index, reverse, mapped, mapped_dst, edge_attr)
        if self.add_self_loops:
            out = out[:-1]
        return self._finished(out, None if self.res is None else self.res(dst), False)

    def _with_loops(
        self, edge_index: Tensor, edge_attr: Tensor, num_src: int, num_dst: int
    ) -> tuple[Tensor, Tensor]:
        """A self-loop of each node behind the edges, and their features; self-loops of the list get
        a node after the last destination, so that no size depends on their number."""
        num_loops, target = min(num_src, num_dst), int(self.flow == 'source_to_target')
        edge_index = list_of(edge_index)
        ends = list(edge_index)
        is_loop = ends[0] == ends[1]
        edge_attr = torch.where(is_loop.view(-1, 1), 0, edge_attr)
        listed = torch.stack([ends[0], torch.where(is_loop, num_loops, ends[1])])
        added = compute_loop_attr(listed, edge_attr, num_loops + 1, False, self.fill_value)
        edge_attr = torch.cat([edge_attr, added[:num_loops]])
        # A destination out of range stays one.
        beyond = torch.where(ends[target] < num_dst, ends[target], ends[target] + 1)
        ends[target] = torch.where(is_loop, num_dst, beyond)
        loops = torch.arange(num_loops, dtype=edge_index.dtype, device=edge_index.device)
        return torch.stack([torch.cat([end, loops]) for end in ends]), edge_attr

    def _looped_attr(
        self, edge_index: Tensor, edge_attr: Tensor, loops: Looped, sizes: tuple[int, int]
    ) -> Tensor:
        """The features of edges, then those of self-loops."""
        edge_attr, fill = edge_attr.view(-1, self.edge_dim), self.fill_value
        kept = edge_attr if loops.kept is None else Selected.apply(edge_attr, loops.kept)
        is_square = sizes[0] == sizes[1]
        if is_square:
            edge_index = known_edges(edge_index, sizes[0])
        if (
            isinstance(edge_index, EdgeIndex) and is_square and edge_attr.is_floating_point()
            and isinstance(fill, str) and fill in LOOP_FILLS
        ):  # fmt: skip
            graph = graph_of(edge_index, *sizes, transpose=False, drop_loops=True)
            data = list_of(edge_index)
            added = edge_sums(graph, edge_attr.contiguous(), data, fill == 'mean')
        else:  # A plain edge_index would be sorted again.
            listed = loops.edge_index
            if isinstance(fill, str) and listed.is_cuda and is_square:
                # On CUDA an index out of range is reported later, and must not fail here.
                listed = listed.clamp(0, sizes[0] - 1)
            added = compute_loop_attr(listed, kept, min(sizes), False, fill)
        return torch.cat([kept, added])

    def _maps(self, src: Tensor, dst: Tensor, joined: bool = False) -> tuple[Tensor, Tensor]:
        """The mapped features of sources and destinations, by heads; :obj:`joined` as for
        :func:`~pyg_fast.ops.linear.linears`."""
        shape, modules = (-1, self.heads, self.out_channels), (self.lin_l, self.lin_r)
        if src is dst and self.share_weights:
            mapped = _linear(self.lin_l, src).view(shape)
            return mapped, mapped
        if src is dst and all(is_plain_linear(m) and m.bias is not None for m in modules):
            weights, biases = zip(*map(weight_and_bias, modules), strict=True)
            one, other = linears(src, weights, biases, joined)
        else:
            one, other = _linear(self.lin_l, src), _linear(self.lin_r, dst)
        return one.view(shape), other.view(shape)

    def _attended(
        self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor, index: Tensor, size_i: int
    ) -> Tensor:
        alpha = GATv2Conv.edge_update(self, x_j, x_i, edge_attr, index, None, size_i)
        return GATv2Conv.message(self, x_j, alpha)


# By layer: captures are not part of its state.
_entries: WeakKeyDictionary[MessagePassing, Entry] = WeakKeyDictionary()


def _linear(module: Module, x: Tensor) -> Tensor:
    """The result of a linear map."""
    if not is_plain_linear(module):
        return module(x)
    weight, bias = weight_and_bias(module)
    return module(x) if bias is None else linear(x, weight, bias)


def _no_autocast(x: Tensor) -> AbstractContextManager:
    # PyG's layers compute the scores, which are sums, in the wider dtype.
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
