"""Shared by all fused layers: when the kernel may run, and how they stay PyG layers."""

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import _has_any_global_hook
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj, OptTensor, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor, to_edge_index

from ..graph.prepared_graph import PreparedGraph, list_of
from ..ops._checks import DTYPES
from ..ops._transforms import transforms_active
from ..ops.cbsr import CBSR
from ..sparse.to_csr import MOST_NODES

_METHODS = ('message', 'aggregate', 'update', 'message_and_aggregate', 'edge_update')
_LINEARS = {kind: kind.forward for kind in (Linear, torch.nn.Linear)}
# Those of message passing, and all of a layer.
HOOKS = tuple(
    f'_{where}_forward_{when}'
    for where in ('propagate', 'message', 'aggregate', 'message_and_aggregate', 'edge_update')
    for when in ('pre_hooks', 'hooks')
)
hooks_of = itemgetter(*HOOKS)
_tracing_state = torch._C._get_tracing_state
_COLLECT = {'propagate': 'collect', 'edge_updater': 'edge_collect'}  # defined beside it
# Whether a `propagate` or `edge_updater` is PyG's own, perhaps compiled from its template.
_PYGS: dict[Any, bool] = {MessagePassing.propagate: True, MessagePassing.edge_updater: True}


def allow_propagate(function: Any) -> None:
    """Treats a `propagate` of this package like PyG's."""
    _PYGS[function] = True


def note_propagate(*functions: Any) -> None:
    """Finds out whether these functions are PyG's own, which compiled code cannot do."""
    for function in functions:
        if function not in _PYGS:
            name, module = function.__qualname__, function.__module__
            # PyG makes one module per class that it compiles a function for.
            _PYGS[function] = name in _COLLECT and module.endswith(f'_{name}') and (
                _COLLECT[name] in function.__globals__
            )


def is_pygs(function: Any) -> bool:
    """Whether a `propagate` or `edge_updater` is PyG's own."""
    note_propagate(function)
    return _PYGS[function]


def _is_pygs(conv: Any, name: str) -> bool:
    """Whether neither a subclass nor the instance overrides the method."""
    function = getattr(type(conv), name)
    if function not in _PYGS and not torch.compiler.is_compiling():
        note_propagate(function)
    if not _PYGS.get(function, False):
        return False
    own = conv.__dict__.get(name)
    if own is None:
        return True
    # Explainers leave PyG's own function on the instance.
    function = getattr(own, '__func__', None)
    return getattr(own, '__self__', None) is conv and _PYGS.get(function, False)


class Fused:
    """Mixin for a subclass of a PyG convolution: it runs the fused kernel where the result is the
    same, and the base class for everything else (hooks, explainers, overridden messages, unusual
    inputs)."""

    _base: type[MessagePassing]  # PyG's class
    _pyg_methods: tuple[Any, ...]  # PyG's methods, before any patch
    _node_dim = -2  # node dimension of the base class
    _last_run: str | None = None  # why PyG's code ran in the last eager call; '' if it did not
    _own = (  # attributes that the base class does not have
        '_cached_norm', '_cached_signature', '_cached_edges', '_last_run', 'cache_input',
        'num_samples', 'strategy', 'sample', 'quantize',
    )  # fmt: skip

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if '_base' in cls.__dict__:
            cls._pyg_methods = tuple(getattr(cls._base, name) for name in _METHODS)

    def _fusible(self: Any, x: Any) -> bool:
        """Whether the kernel gives the result of PyG's own code, for features :obj:`x`."""
        if not self.fuse:
            self._note('fuse=False')
        return self.fuse and self._unaltered(x)

    def _unaltered(self: Any, x: Any) -> bool:
        reason = self._observed(x)
        self._note(reason or '')
        return reason is None

    def _left(self, edge_index: Any) -> Any:
        """The edges for PyG's own code, which runs this call."""
        if not torch.compiler.is_compiling() and not self._last_run:
            sparse = not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index)
            self._note('a sparse matrix' if sparse else 'arguments that no kernel takes')
        # Under a function transform and in inference mode PyG's EdgeIndex raises errors.
        if isinstance(edge_index, EdgeIndex) and (
            transforms_active() or torch.is_inference_mode_enabled()
        ):
            return edge_index.as_tensor()
        if isinstance(edge_index, PreparedGraph):
            return edge_index.to_edge_index()
        return edge_index

    def _note(self, reason: str) -> None:
        """Records what runs in this call, for :func:`~pyg_fast.accelerate_report`."""
        if not torch.compiler.is_compiling():
            self.__dict__['_last_run'] = reason

    def _observed(self: Any, x: Any) -> str | None:
        """The reason to run PyG's own code: something observes or changes its behaviour, or no
        kernel supports the features. None if the kernel may run.

        Only this function decides it.
        """
        own, cls = self.__dict__, type(self)
        if _has_any_global_hook():
            return 'global module hooks'
        if transforms_active():
            return 'torch.func or forward-mode AD is active'
        if _tracing_state() is not None:
            return 'torch.jit.trace is active'
        # The flag itself: in torch 2.11 `is_exporting()` is true in all compiled code.
        if torch.compiler._is_exporting_flag:
            return 'torch.export is active'
        if self._explain:
            return 'it is explained'
        if self._decomposed_layers != 1:
            return f'decomposed_layers={self._decomposed_layers}'
        if self.node_dim != self._node_dim:
            return f'node_dim={self.node_dim}'
        if (
            own['_propagate_forward_pre_hooks']
            or own['_propagate_forward_hooks']
            or own['_message_forward_pre_hooks']
            or own['_message_forward_hooks']
            or own['_aggregate_forward_pre_hooks']
            or own['_aggregate_forward_hooks']
            or own['_message_and_aggregate_forward_pre_hooks']
            or own['_message_and_aggregate_forward_hooks']
            or own['_edge_update_forward_pre_hooks']
            or own['_edge_update_forward_hooks']
        ):
            return 'hooks on its message passing'
        # Compare methods of the class and of `own`: torch.compile sees bound ones as different.
        message, aggregate, update, message_and_aggregate, edge_update = cls._pyg_methods
        if (
            cls.message is not message
            or cls.aggregate is not aggregate
            or cls.update is not update
            or cls.message_and_aggregate is not message_and_aggregate
            or cls.edge_update is not edge_update
            or 'message' in own
            or 'aggregate' in own
            or 'update' in own
            or 'message_and_aggregate' in own
            or 'edge_update' in own
        ):
            return 'its message passing is overridden'
        if not _is_pygs(self, 'propagate') or not _is_pygs(self, 'edge_updater'):
            return 'its propagate or edge_updater is overridden'
        aggr = own['_modules'].get('aggr_module')
        if aggr is None or not is_plain(aggr):
            return 'its aggregation has hooks or is patched'
        if not isinstance(x, Tensor):
            return 'features that are no tensor'
        if type(x) is not Tensor and type(x) is not Parameter:
            return f'features are a {type(x).__name__}'
        if x.layout != torch.strided or x.dim() != 2:
            return 'features that are no dense matrix'
        if not torch.compiler.is_compiling() and x.size(0) > MOST_NODES:
            return f'features of {x.size(0)} nodes'
        if x.dtype not in DTYPES:
            return f'features are {x.dtype}'
        if not (x.is_cuda or x.is_cpu):
            return f'features are on {x.device}'
        return None

    def _set_jittable_templates(self: Any, raise_on_error: bool = False) -> None:
        # One template per class serves all layers of the process: compile it with the fused
        # branch, even if this layer's aggregation does not support it.
        fuse, self.fuse = self.fuse, self.inspector.implements('message_and_aggregate')
        super()._set_jittable_templates(raise_on_error)  # type: ignore[misc]
        self.fuse = fuse
        cls = type(self)
        note_propagate(cls.propagate, cls.edge_updater)
        # Otherwise the base's compiled `propagate` would count as the original one.
        if _PYGS[cls.propagate]:
            cls._orig_propagate = MessagePassing.propagate
        if _PYGS[cls.edge_updater]:
            cls._orig_edge_updater = MessagePassing.edge_updater

    def __prepare_scriptable__(self: Any) -> MessagePassing:
        return self.to_base()

    def to_base(self: Any) -> MessagePassing:
        """PyG's own layer, sharing the parameters."""
        out = recast(self, self._base)
        for name in self._own:
            vars(out).pop(name, None)
        out._set_jittable_templates()  # TorchScript needs them; this may be the first of its class
        return out


def recast(module: Any, cls: Any) -> Any:
    """Changes the class of a module; shares parameters, buffers, submodules, hooks and options."""
    out = cls.__new__(cls)
    state = dict(module.__dict__)
    for name in ('_parameters', '_buffers', '_modules'):
        state[name] = state[name].copy()
    # Explainers set them as bound methods of the old module.
    for name in ('propagate', 'edge_updater'):
        state.pop(name, None)
    out.__dict__.update(state)
    return out


def entries(adj_t: Adj, num_src: int, num_dst: int) -> tuple[Tensor, OptTensor] | None:
    """Edges and weights of a transposed sparse matrix, or None if PyG's code must run."""
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


def is_plain(module: Module) -> bool:
    """Whether a module has no hooks and is not patched."""
    return (
        not module._forward_hooks
        and not module._forward_pre_hooks
        and not module._backward_hooks
        and not module._backward_pre_hooks
        and 'forward' not in module.__dict__
    )


def is_plain_linear(linear: Module) -> bool:
    """Whether a linear map consists only of its weight and bias."""
    kind = type(linear)
    return (
        kind in _LINEARS
        and kind.forward is _LINEARS[kind]
        and is_plain(linear)
        and 'weight' in linear._parameters
        and 'bias' in linear._parameters
    )


def weight_and_bias(linear: Any) -> tuple[Any, Any]:
    """The parameters of a plain linear map."""
    return linear._parameters['weight'], linear._parameters['bias']


def part_of(module: Module, name: str) -> Any:
    """The attribute of a module, found sooner if it is a submodule or parameter: each search by
    `Module.__getattr__` takes longer than most checks of a call."""
    found: Any = module._modules.get(name)
    if found is None:
        found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def known_edges(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Edges of a layer that adds self-loops. PyG allows an EdgeIndex of fewer nodes than there are;
    then without the data cached for its size."""
    if not isinstance(edge_index, EdgeIndex):
        return edge_index
    num_src, num_dst = edge_index._sparse_size
    fewer = num_src is not None and num_src < num_nodes
    if fewer or (num_dst is not None and num_dst < num_nodes):
        return list_of(edge_index)
    return edge_index


def autocast_dtype(x: Tensor | CBSR) -> torch.dtype | None:
    """The dtype to which autocast converts the operands of a linear map of :obj:`x`, or None."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return None
