"""The GraphSAGE layer."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.typing import Adj, OptPairTensor, Size

from .._lazy import lazy
from ..ops.cbsr import CBSR
from ..ops.linear_cbsr import linear_cbsr
from ..ops.linear_product import LinearAggregation, Plan, linear_product, reads_transpose
from ..sparse.operator import SparseOperator
from ._aggregated import AggregatedInput
from ._explain_size import refuse_weights
from ._layer import autocast_dtype
from ._modules import is_plain_linear, part_of, weight_and_bias
from ._reduce import Features, FusedReduce, Neighbours, reduce, source_of


class FusedSAGEConv(FusedReduce, SAGEConv):
    r"""The GraphSAGE operator of the `"Inductive Representation Learning on Large Graphs"
    <https://arxiv.org/abs/1706.02216>`_ paper on a fused kernel.

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N}(i)} \mathbf{x}_j

    A drop-in for :class:`~torch_geometric.nn.conv.SAGEConv`: the same options, parameters,
    state_dict, outputs and gradients. No message is stored. For sums and means the linear maps and
    the aggregation are one autograd function, which aggregates the narrower of :math:`\mathbf{X}`
    and :math:`\mathbf{X} \mathbf{W}_2^{\top}`; for a pair of features :math:`\mathbf{W}_1` is
    another.

    The aggregations :obj:`"sum"`, :obj:`"mean"`, :obj:`"max"`, :obj:`"min"`, :obj:`"var"`,
    :obj:`"std"`, :obj:`"powermean"` and lists of these are fused, for plain and for prepared
    (:class:`~pyg_fast.transforms.ToCSR`) graphs. Other aggregations, sparse matrices, static
    batches, dtypes other than float32, float64, float16 and bfloat16, hooks and explainers run
    PyG's own code. If several neighbours reach a maximum, the first gets the gradient.

    Args:
        in_channels (int or tuple): Size of each input sample, or :obj:`-1` to derive it from the
            first input. A tuple stands for the sizes of sources and destinations.
        out_channels (int): Size of each output sample.
        aggr (str or [str] or Aggregation, optional): The aggregation.
            (default: :obj:`"mean"`)
        normalize (bool, optional): Whether to :math:`\ell_2`-normalise the output.
            (default: :obj:`False`)
        root_weight (bool, optional): Whether to add the transformed features of the node itself.
            (default: :obj:`True`)
        project (bool, optional): Whether to apply a linear map and a ReLU before aggregating.
            (default: :obj:`False`)
        bias (bool, optional): Whether to learn an additive bias. (default: :obj:`True`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F_{in})`, or
          :math:`((|\mathcal{V}_s|, F_s), (|\mathcal{V}_t|, F_t))` if bipartite, edge indices
          :math:`(2, |\mathcal{E}|)`
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`, or
          :math:`(|\mathcal{V}_t|, F_{out})` if bipartite

    Raises:
        ValueError: If :obj:`edge_index` is on another device, or a size does not fit :obj:`x`.
        IndexError: If :obj:`edge_index` holds a node that :obj:`x` does not have.
    """

    _base = SAGEConv

    def forward(
        self,
        x: Tensor | OptPairTensor | AggregatedInput,
        edge_index: Adj,
        size: Size = None,
    ) -> Tensor:
        """"""
        if isinstance(x, AggregatedInput):
            return self._of_aggregated(x, edge_index)
        refuse_weights(size)
        plain = self._few_edges(x, edge_index)
        if plain is not None:
            size = size if plain is edge_index else None  # PyG reads none beside an EdgeIndex.
            return self._of_few_edges(x, plain, size)
        to = self._neighbours(x, edge_index, size)
        if to is None:
            return self._by_pyg(x, edge_index, size)
        return self._of_neighbours(to)

    def _of_neighbours(self, to: Neighbours) -> Tensor:
        """The layer on checked input."""
        if self._is_linear(to):
            return self._normalized(linear_product(*self._describe(to)))
        to = self._messages_of(to)
        out, root = self._aggregated(to), to.root
        if self.root_weight and root is not None:
            out = self._with_root(out, root)
        return self._normalized(out)

    def _by_pyg(self, x: Features, edge_index: Adj, size: Size) -> Tensor:
        """PyG's own way."""
        return super().forward(self._features_for_pyg(x), self._edges_for_pyg(edge_index), size)

    def _of_few_edges(self, x: Tensor | OptPairTensor, edge_index: Tensor, size: Size) -> Tensor:
        """PyG's own way for few edges, with less Python around the same operations."""
        few = None if self.project else self._propagate_few(x, edge_index, size)
        if few is None:
            return self._by_pyg(x, edge_index, size)
        out, root = self.lin_l(few[0]), few[1]
        if self.root_weight and root is not None:
            out = out + self.lin_r(root)
        return self._normalized(out)

    def _aggregation(self) -> tuple[object, ...]:
        return 'SAGE', self.flow, type(self.aggr_module).__name__, self.root_weight

    def _sums_of_nodes(self, to: Neighbours) -> bool:
        """Whether the layer is linear in sums or means of the nodes' own dense features."""
        return (
            isinstance(to.source, Tensor)
            and to.root is to.source
            and not self.project
            and not self._changes_messages()
            and type(part_of(self, 'aggr_module')) in (SumAggregation, MeanAggregation)
        )

    def _operator(
        self, to: Neighbours, transpose: bool, num_src: int | None = None
    ) -> SparseOperator:
        if type(part_of(self, 'aggr_module')) is MeanAggregation:
            return to.mean(transpose, num_src)
        return SparseOperator(to.graph(transpose, num_src=num_src))

    def _of_aggregated(self, x: AggregatedInput, edge_index: Adj) -> Tensor:
        self._check_aggregated(x, edge_index)
        weight, bias, root_weight = self._maps_of(x)
        out = F.linear(x.aggregated.to(weight.dtype), weight)
        out = out if bias is None else out + bias
        if root_weight is not None:
            assert x.root is not None
            out = out + F.linear(x.root.to(root_weight.dtype), root_weight)
        return self._normalized(out)

    def _maps_of(self, x: AggregatedInput) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The weight, bias and root weight for an aggregated input."""
        lin, lin_r = self.lin_l, self.lin_r if self.root_weight else None
        if not is_plain_linear(lin) or (lin_r is not None and not is_plain_linear(lin_r)):
            raise ValueError("'x' must be features: 'lin_l' or 'lin_r' is patched or has hooks")
        dtype = autocast_dtype(x.aggregated) or x.dtype
        bias = None if lin.bias is None else lin.bias.to(dtype)
        root_weight = None if lin_r is None else lin_r.weight.to(dtype)
        return lin.weight.to(dtype), bias, root_weight

    def _normalized(self, out: Tensor) -> Tensor:
        """The output, normalised if the layer does that."""
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _is_linear(self, to: Neighbours) -> bool:
        """Whether the layer is one linear product."""
        if not is_plain_linear(part_of(self, 'lin_l')) or not self._sums_of_nodes(to):
            return False
        if not self.root_weight:
            return True
        root = part_of(self, 'lin_r')
        return is_plain_linear(root) and weight_and_bias(root)[1] is None

    def _describe(self, to: Neighbours, op: SparseOperator | None = None) -> LinearAggregation:
        """The layer, before it normalises, as a linear map around an aggregation: by default of all
        neighbours."""
        x, (weight, bias) = to.source, weight_and_bias(part_of(self, 'lin_l'))
        root_weight = None
        if self.root_weight and to.root is not None:
            root_weight, _ = weight_and_bias(part_of(self, 'lin_r'))
        assert isinstance(x, Tensor)
        if op is None:
            op = self._operator(to, reads_transpose(x, weight))
        dtype = autocast_dtype(x)
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
            root_weight = None if root_weight is None else root_weight.to(dtype)
        return LinearAggregation(x, weight, bias, Plan(op), root_weight)

    def _neighbours(self, x: Features, edge_index: Adj, size: Size) -> Neighbours | None:
        if self.project and (self.flow != 'source_to_target' or isinstance(source_of(x), CBSR)):
            return None
        return super()._neighbours(x, edge_index, size)

    def _messages_of(self, to: Neighbours) -> Neighbours:
        return to._replace(source=self.lin(to.source).relu()) if self.project else to

    def _aggregated(self, to: Neighbours) -> Tensor:
        """The linear map of the aggregated neighbours."""
        x, lin, kind = to.source, self.lin_l, type(self.aggr_module)
        if isinstance(x, CBSR):
            dtype = autocast_dtype(x)
            to = to if dtype is None else to._replace(source=x.to(dtype))
        elif kind in (SumAggregation, MeanAggregation) and is_plain_linear(lin):
            alone = to._replace(root=None)
            return linear_product(*self._describe(alone))
        return lin(reduce(self.aggr_module, to))

    def _with_root(self, out: Tensor, root: Tensor | CBSR) -> Tensor:
        """Adds the linear map of the node's own features."""
        lin = self.lin_r
        plain = is_plain_linear(lin) and lin.bias is None
        if not isinstance(root, CBSR):
            return torch.addmm(out, root, lin.weight.t()) if plain else out + lin(root)
        if not plain:
            return out + lin(root.to_dense())
        weight, dtype = lin.weight, autocast_dtype(root)
        if dtype is not None:
            root, weight, out = root.to(dtype), weight.to(dtype), out.to(dtype)
        return linear_cbsr(root, weight, out)


__getattr__ = lazy(__name__, {'PathPreparedSAGEConv': 'papers.paths'})  # pickles of 0.2
