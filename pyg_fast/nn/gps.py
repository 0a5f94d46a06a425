"""The layer of GPS: message passing beside attention within each graph."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import MultiheadAttention, Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric.nn import GPSConv
from torch_geometric.typing import Adj

from ..attention._op import attend, check_order_of_graphs
from ..attention._op import why_not as why_not_rows
from ..errors import DtypeError, ShapeError
from ..graph.small_graphs import runs_pygs_code
from ..message._inputs import why_not as why_not_device
from ._explain_code import EXPLAINED
from ._explain_features import check_columns, check_input
from ._layer import FusedModule, recast
from ._modules import is_plain

# PyG's and PyTorch's methods, before any patch.
_GPS_FORWARD, _FORWARD = GPSConv.forward, MultiheadAttention.forward
# On a CPU each size of graph costs a call of PyTorch's attention, where PyG pads: with graphs of 5
# to 29 nodes a step takes as long from so many nodes on.
_FEW_NODES = 1_200


class FusedGPSConv(FusedModule, GPSConv):
    r"""The general, powerful, scalable graph transformer layer of the `"Recipe for a General,
    Powerful, Scalable Graph Transformer" <https://arxiv.org/abs/2205.12454>`_ paper, whose global
    attention is a kernel over the graphs of a batch.

    .. math::
        \mathbf{X}^{\prime} = \textrm{MLP} \left( \textrm{MPNN} (\mathbf{X}, \mathbf{A}) +
        \textrm{Attention} (\mathbf{X}) \right)

    A drop-in for :class:`~torch_geometric.nn.conv.GPSConv`: the same options, parameters,
    state_dict, outputs and gradients. Graphs are not padded to the size of the largest one, which
    PyG waits for the GPU to know, and scores are not stored: so the layer can be captured, see
    :func:`pyg_fast.capture`. The dropout of :obj:`attn_kwargs` draws other numbers than PyG's.

    PyG's own code runs for :obj:`attn_type="performer"`, on a CPU for batches of fewer than 1,200
    nodes, where it is faster, see :class:`~pyg_fast.small_graphs`, for the options
    :obj:`add_bias_kv` and :obj:`add_zero_attn` of :obj:`attn_kwargs`, and on a GPU for heads of
    more than 256 channels.

    Args:
        channels (int): Size of each input sample.
        conv (MessagePassing, optional): The local message passing layer, which stays as it is;
            :func:`~pyg_fast.accelerate` replaces it, too.
        heads (int, optional): Number of attention heads. (default: :obj:`1`)
        dropout (float, optional): Dropout probability of features. (default: :obj:`0.`)
        act (str or Callable, optional): The activation of the MLP. (default: :obj:`"relu"`)
        act_kwargs (dict[str, Any], optional): Its arguments. (default: :obj:`None`)
        norm (str or Callable, optional): The normalization. (default: :obj:`"batch_norm"`)
        norm_kwargs (dict[str, Any], optional): Its arguments. (default: :obj:`None`)
        attn_type (str, optional): :obj:`"multihead"` or :obj:`"performer"`.
            (default: :obj:`"multihead"`)
        attn_kwargs (dict[str, Any], optional): Arguments of
            :class:`torch.nn.MultiheadAttention`. (default: :obj:`None`)

    Shapes:
        - **input:** node features :math:`(|\mathcal{V}|, F)`, edge indices
          :math:`(2, |\mathcal{E}|)`, the graph of each node in ascending order
          :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F)`

    Raises:
        ValueError: If on a CPU the graphs of the nodes are not in ascending order.
        IndexError: If on a CPU the number of a graph is negative.
    """

    _base = GPSConv
    _fused_own = ('_last_run', '_last_compiled')

    @classmethod
    def _fused_why_never(cls, conv: GPSConv) -> str | None:
        if GPSConv.forward is not _GPS_FORWARD or 'forward' in vars(conv):
            return 'its forward is patched'
        attn = conv.attn
        if type(attn) is not MultiheadAttention:
            if conv.attn_type != 'multihead':
                return f'attn_type={conv.attn_type!r}'
            return f'its attention is a {type(attn).__name__}'
        if attn.bias_k is not None or attn.add_zero_attn:
            return 'add_bias_kv' if attn.bias_k is not None else 'add_zero_attn'
        if not attn.batch_first or not attn._qkv_same_embed_dim:
            return 'its attention has batch_first=False, or keys of another size'
        if not is_plain(attn) or MultiheadAttention.forward is not _FORWARD:
            return 'its attention has hooks or is patched'
        return None

    def forward(
        self, x: Tensor, edge_index: Adj, batch: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """"""
        reason = self._why_not(x, batch)
        self._fused_note(reason or '')
        if reason is not None:
            if torch.compiler.is_compiling():
                return super().forward(x, edge_index, batch, **kwargs)
            try:
                return super().forward(x, edge_index, batch, **kwargs)
            except EXPLAINED as error:
                _explain_batch(x, self.channels, batch, error)
                raise
        of_graphs = {'batch': batch} if self.norm_with_batch else {}
        local = None
        if self.conv is not None:
            local = self._drop(self.conv(x, edge_index, **kwargs)) + x
            local = local if self.norm1 is None else self.norm1(local, **of_graphs)
        out = self._drop(self._attention(x, batch)) + x
        out = out if self.norm2 is None else self.norm2(out, **of_graphs)
        out = out if local is None else local + out
        out = out + self.mlp(out)
        return out if self.norm3 is None else self.norm3(out, **of_graphs)

    def _why_not(self, x: object, batch: object) -> str | None:
        """Why PyG's code must run for this call."""
        # First, since all else takes its share of the time of few nodes.
        if (
            batch is not None and isinstance(x, Tensor) and x.is_cpu and x.dim() == 2
            and not torch.compiler.is_compiling() and x.size(0) < _FEW_NODES and runs_pygs_code()
        ):  # fmt: skip
            return f'{x.size(0)} nodes are too few for a kernel to pay'
        if _has_any_global_hook():
            return 'global module hooks'
        # The flag itself: in torch 2.11 `is_exporting()` is true in all compiled code.
        if torch.compiler._is_exporting_flag:
            return 'torch.export is active'
        reason = self._fused_why_never(self)
        if reason is not None:
            return reason
        if not isinstance(x, Tensor):
            return 'features that are no tensor'
        if type(x) not in (Tensor, Parameter):
            return f'features are a {type(x).__name__}'
        if x.layout != torch.strided or x.dim() != 2 or x.size(1) != self.attn.embed_dim:
            return f'features of shape {list(x.shape)}'
        reason = why_not_device(x.device) or why_not_rows(x, self.attn.head_dim)
        if reason is not None:
            return reason
        if batch is None:
            return None
        if not isinstance(batch, Tensor) or batch.dtype not in (torch.int32, torch.int64):
            return 'a batch that is no tensor of int32 or int64'
        if batch.dim() != 1 or batch.size(0) != x.size(0) or batch.device != x.device:
            return f'a batch of shape {list(batch.shape)} on {batch.device}'
        return None

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, p=self.dropout, training=self.training)

    def _attention(self, x: Tensor, batch: Tensor | None) -> Tensor:
        """What the attention computes of rows without padding."""
        attn = self.attn
        heads, width = attn.num_heads, attn.head_dim
        projected = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = projected.view(-1, 3, heads, width).unbind(1)
        dropout_p = attn.dropout if attn.training else 0.0
        out = attend(q, k, v, batch, dropout_p, 1 / math.sqrt(width))
        return F.linear(out.flatten(1), attn.out_proj.weight, attn.out_proj.bias)

    def __prepare_scriptable__(self) -> GPSConv:
        return self.to_base()

    def to_base(self) -> GPSConv:
        """PyG's own layer, sharing the parameters."""
        out = recast(self, GPSConv)
        vars(out).pop('_last_run', None)
        return out


def _explain_batch(x: object, channels: int, batch: object, error: Exception) -> None:
    """Raises an error that names the features or the numbers of graphs, if they do not fit."""
    if str(error).startswith("'") and ' must ' in str(error):
        return  # Of the local layer.
    try:
        check_input(x)
        check_columns(x, channels, 'channels')
    except (TypeError, ValueError) as found:
        raise found from error
    if batch is None or not isinstance(x, Tensor):
        return
    if not isinstance(batch, Tensor):
        raise TypeError(f"'batch' must be a tensor, got {type(batch).__name__}") from error
    if batch.is_floating_point() or batch.dtype == torch.bool:
        raise DtypeError(f"'batch' must hold numbers of graphs, got {batch.dtype}") from error
    if batch.shape != x.shape[:1]:
        raise ShapeError(
            f"'batch' must have shape {list(x.shape[:1])}, a number for each node, got "
            f'{list(batch.shape)}'
        ) from error
    try:
        check_order_of_graphs(batch)
    except ValueError as found:
        raise found from error
