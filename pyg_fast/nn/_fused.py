"""What every fused layer shares: when it may run its kernel, and how it stays a PyG layer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj, OptTensor, SparseTensor
from torch_geometric.utils import to_edge_index

from ..ops.cbsr import CBSR
from ..ops.spmm import DTYPES


class Fused:
    """Mixed into a subclass of a PyG convolution, which it leaves for the fused kernel where the
    result is the same. All else (hooks, explainers, overridden messages, odd inputs) goes the
    way of the base class."""

    _base: type[MessagePassing]  # PyG's class
    _node_dim = -2  # that the base counts nodes in
    _own = (  # attributes that no base has
        '_cached_norm', '_input_cache', 'cache_input', 'num_samples', 'strategy', 'sample',
        'quantize',
    )  # fmt: skip

    def _fusible(self: Any, x: Tensor) -> bool:
        return self.fuse and self._unaltered(x)

    def _unaltered(self: Any, x: Tensor) -> bool:
        base, cls, own = self._base, type(self), self.__dict__
        return (
            not self._explain
            and self._decomposed_layers == 1
            and self.node_dim == self._node_dim
            and isinstance(x, Tensor)
            and x.layout == torch.strided
            and x.dim() == 2
            and x.dtype in DTYPES
            and not self._propagate_forward_pre_hooks
            and not self._propagate_forward_hooks
            and not self._message_forward_pre_hooks
            and not self._message_forward_hooks
            and not self._aggregate_forward_pre_hooks
            and not self._aggregate_forward_hooks
            and not self._message_and_aggregate_forward_pre_hooks
            and not self._message_and_aggregate_forward_hooks
            and not self._edge_update_forward_pre_hooks
            and not self._edge_update_forward_hooks
            # Asked of the class and of `own`: bound methods look different to torch.compile.
            and cls.message is base.message
            and cls.aggregate is base.aggregate
            and cls.update is base.update
            and cls.message_and_aggregate is base.message_and_aggregate
            and cls.edge_update is base.edge_update
            and 'message' not in own
            and 'aggregate' not in own
            and 'update' not in own
            and 'message_and_aggregate' not in own
            and 'edge_update' not in own
        )

    def _set_jittable_templates(self: Any, raise_on_error: bool = False) -> None:
        # The template of the first layer in the process serves all: with the fused branch, even if
        # this layer's aggregation cannot take it.
        fuse, self.fuse = self.fuse, self.inspector.implements('message_and_aggregate')
        super()._set_jittable_templates(raise_on_error)  # type: ignore[misc]
        self.fuse = fuse
        # Else the base's compiled `propagate` would be taken for the original one.
        type(self)._orig_propagate = MessagePassing.propagate
        type(self)._orig_edge_updater = MessagePassing.edge_updater

    def __prepare_scriptable__(self: Any) -> MessagePassing:
        return self.to_base()

    def to_base(self: Any) -> MessagePassing:
        """PyG's own layer, sharing the parameters."""
        out = recast(self, self._base)
        for name in self._own:
            vars(out).pop(name, None)
        out._set_jittable_templates()  # TorchScript needs them; maybe it is the first of its class.
        return out


def recast(module: Any, cls: Any) -> Any:
    """A module of another class on the same parameters, buffers, submodules, hooks and options."""
    out = cls.__new__(cls)
    state = dict(module.__dict__)
    for name in ('_parameters', '_buffers', '_modules'):
        state[name] = state[name].copy()
    # Set by explainers as bound methods of the old module.
    for name in ('propagate', 'edge_updater'):
        state.pop(name, None)
    out.__dict__.update(state)
    return out


def entries(adj_t: Adj, num_src: int, num_dst: int) -> tuple[Tensor, OptTensor] | None:
    """Edges and weights of a transposed sparse matrix, or None where PyG has to do it."""
    if adj_t.size(0) != num_dst or adj_t.size(1) != num_src:
        return None
    value: OptTensor
    if isinstance(adj_t, SparseTensor):
        row, col, value = adj_t.coo()
    else:
        if adj_t.layout not in (torch.sparse_coo, torch.sparse_csr):
            return None
        (row, col), value = to_edge_index(adj_t)
    if value is not None and (value.dim() != 1 or value.requires_grad):
        return None
    return torch.stack([col, row]), value


def is_plain_linear(linear: Module) -> bool:
    """Whether a linear map is no more than its weight and bias."""
    return (
        type(linear) in (Linear, torch.nn.Linear)
        and not linear._forward_hooks
        and not linear._forward_pre_hooks
        and not linear._backward_hooks
        and not linear._backward_pre_hooks
        and 'weight' in linear._parameters
    )


def autocast_dtype(x: Tensor | CBSR) -> torch.dtype | None:
    """The type to which autocast takes the operands of a linear map of :obj:`x`, if it does."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None
