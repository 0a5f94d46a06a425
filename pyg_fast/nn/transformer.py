"""TransformerConv with its attention in fused kernels."""

from torch_geometric.nn import TransformerConv

from .message_passing import FusedMessagePassing, FusedPropagate


class FusedTransformerConv(FusedPropagate, TransformerConv):
    r"""The graph transformer operator from the `"Masked Label Prediction: Unified Message Passing
    Model for Semi-Supervised Classification" <https://arxiv.org/abs/2009.03509>`_ paper

    .. math::
        \mathbf{y}_i = \mathbf{W}_1 \mathbf{x}_i + \sum_{e = (j, i)} \alpha_e \left(
        \mathbf{W}_2 \mathbf{x}_j + \mathbf{W}_6 \mathbf{a}_e \right), \quad
        \alpha_e = \textrm{softmax}_i \left( \frac{(\mathbf{W}_3 \mathbf{x}_i)^{\top}
        (\mathbf{W}_4 \mathbf{x}_j + \mathbf{W}_6 \mathbf{a}_e)}{\sqrt{d}} \right)

    without tensors of the size of the edges. A drop-in replacement of
    :class:`torch_geometric.nn.TransformerConv`, with its arguments, parameters and shapes. Edge
    features of up to 128 channels are read as they are: their maps run on nodes, but in the kernels
    with heads of less than 4 channels, or more than 8 features for each. With
    :obj:`return_attention_weights` PyG's code runs; :attr:`plan` says what ran.
    """

    _set_jittable_templates = FusedMessagePassing._set_jittable_templates


__all__ = ['FusedTransformerConv']
