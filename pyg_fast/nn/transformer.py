"""TransformerConv with its attention in fused kernels."""

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import TransformerConv
from torch_geometric.typing import Adj, OptTensor, PairTensor, SparseTensor

from ..ops.linear import linears
from ._checks import FORWARDS
from ._explain_options import naming_options
from ._modules import is_plain_linear, part_of, weight_and_bias
from .message_passing import MIXINS, FusedMessagePassing, FusedPropagate


class FusedTransformer(FusedPropagate):
    """Mixin before TransformerConv: the linear maps of the same features are one function."""

    def forward(
        self, x: Tensor | PairTensor, edge_index: Adj, edge_attr: OptTensor = None,
        return_attention_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, PairTensor] | tuple[Tensor, SparseTensor]:  # fmt: skip
        """"""
        maps = None if return_attention_weights is not None else self._maps(x)
        if maps is None:
            return super().forward(x, edge_index, edge_attr, return_attention_weights)
        query, key, value, *skip = maps
        shape = (-1, self.heads, self.out_channels)
        out = self.propagate(
            edge_index, query=query.view(shape), key=key.view(shape), value=value.view(shape),
            edge_attr=edge_attr,
        )  # fmt: skip
        self._alpha = None
        out = out.view(-1, self.heads * self.out_channels) if self.concat else out.mean(dim=1)
        if not skip:
            return out
        (own,), beta = skip, part_of(self, 'lin_beta')
        if beta is None:
            return out + own
        share = beta(torch.cat([out, own, out - own], dim=-1)).sigmoid()
        return share * own + (1 - share) * out

    def _only_reads(self) -> bool:
        known = type(self).forward in (FusedTransformer.forward, TransformerConv.forward)
        return known and (self.root_weight or not self.concat)

    def _maps(self, x: Tensor | PairTensor) -> tuple[Tensor, ...] | None:
        """Queries, keys, values, and the node's own part if there is one; None if PyG's code must
        map the features."""
        if (
            type(x) not in (Tensor, Parameter) or x.dim() != 2 or x.layout != torch.strided
            or torch.compiler.is_compiling() or _has_any_global_hook()
        ):  # fmt: skip
            return None
        names = ['lin_query', 'lin_key', 'lin_value', 'lin_skip'][: 4 if self.root_weight else 3]
        modules = [part_of(self, name) for name in names]
        if not all(map(is_plain_linear, modules)):
            return None
        weights, biases = zip(*map(weight_and_bias, modules), strict=True)
        if any(bias is None for bias in biases):
            return None
        return linears(x, weights, biases, joined=True)


FORWARDS[FusedTransformer.forward] = TransformerConv.forward
MIXINS[TransformerConv] = FusedTransformer


class FusedTransformerConv(FusedTransformer, TransformerConv):
    r"""The graph transformer operator from the `"Masked Label Prediction: Unified Message Passing
    Model for Semi-Supervised Classification" <https://arxiv.org/abs/2009.03509>`_ paper

    .. math::
        \mathbf{y}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{e = (j, i)} \alpha_e \left(
        \mathbf{W}_2 \mathbf{x}_j + \mathbf{W}_6 \mathbf{a}_e \right), \quad
        \alpha_e = \textrm{softmax}_i \left( \frac{(\mathbf{W}_3 \mathbf{x}_i)^{\top}
        (\mathbf{W}_4 \mathbf{x}_j + \mathbf{W}_6 \mathbf{a}_e)}{\sqrt{d}} \right)

    without tensors of the size of the edges times the channels. A drop-in replacement of
    :class:`torch_geometric.nn.TransformerConv`, with its arguments, parameters and shapes. Edge
    features of up to 128 channels are read as they are: their maps run on nodes, but in the kernels
    with heads of less than 4 channels, or more than 8 features for each. With
    :obj:`return_attention_weights` PyG's code runs; :attr:`plan` says what ran.
    """

    __init__ = naming_options(TransformerConv.__init__)
    _set_jittable_templates = FusedMessagePassing._set_jittable_templates


__all__ = ['FusedTransformerConv']
