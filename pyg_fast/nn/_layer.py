"""The protocol of our layers: subclasses of PyG's that stay PyG layers."""

import re
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeGuard, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.nn import Module
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import Adj, OptTensor, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor, to_edge_index

from .._alike import did_you_mean
from ..graph.batch_edge_index import not_compiled
from ..graph.prepared_graph import PreparedGraph, list_of
from ..ops._transforms import transforms_active
from ..ops.cbsr import CBSR
from ._checks import what_is, why_not_layer
from ._explain import explain, first_line, name_edge_type
from ._explain_code import EXPLAINED
from ._explain_options import naming_options
from ._modules import EDGE_UPDATER, PROPAGATE, PYGS, note_propagate

ModuleT = TypeVar('ModuleT', bound=Module)
P = ParamSpec('P')
T = TypeVar('T')

_METHODS = ('message', 'aggregate', 'update', 'message_and_aggregate', 'edge_update')
# Which list of edges a call sorted: that of the caller, or one that `forward` made of it.
GIVEN, MADE = 'given', 'made'
# Why PyG's code runs in compiled code, where nothing else is known.
ARGUMENTS = 'in compiled code no kernel takes its arguments'
# What holds unless the backend of torch.compile is ours, which notes what it makes of marks; and
# if it is, but has noted nothing.
OTHER_BACKEND = "torch.compile has another backend than 'pyg_fast'"
NOT_TOLD = 'torch.compile did not tell what runs it, as where it raised an error'
# Layers that Dynamo has traced, by their ids, as it names them in graphs.
traced: WeakValueDictionary[int, 'FusedModule'] = WeakValueDictionary()
# Set on layers that `pyg_fast.restore` changes back; copies and pickles keep it.
_MARK = '_accelerated'


# Type checkers see a mixin as a layer, whose attributes it reads.
if TYPE_CHECKING:
    from torch_geometric.nn import MessagePassing as Mixin
else:
    Mixin = object


class FusedModule:
    """Mixin for a subclass of a layer of PyG: it runs a kernel where that gives PyG's result, and
    PyG's code elsewhere. Parameters, options and state_dict are those of :obj:`_base`.

    A subclass says what :func:`~pyg_fast.accelerate` and reports ask: :meth:`_fused_why_never`, and
    by :meth:`_fused_note` what ran in each call. Names begin with ``_fused``: the mixin stands
    before the user's class, which must not meet them.
    """

    _base: type[Module]  # PyG's class
    _fused_own: ClassVar[tuple[str, ...]]  # attributes that the base class does not have
    _last_run: str | None = None  # why PyG's code ran in the last eager call; '' if it did not
    _last_compiled: str | None = None  # the same of code that :func:`torch.compile` compiled
    _last_error: str | None = None  # that the last eager call raised
    _last_sorted: str = ''  # which list of edges our code sorted in the last one, if it did

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        is_ours = cls.__module__.split('.')[0] == __name__.split('.')[0]
        if is_ours and ('__init__' in vars(cls) or '_base' in vars(cls)):
            cls.__init__ = naming_options(cls.__init__)  # type: ignore[assignment, method-assign]

    @classmethod
    def _fused_why_never(cls, conv: Any) -> str | None:
        """Why PyG's code would run for every input of a layer of this class or of :obj:`_base`;
        None if a kernel may run."""
        raise NotImplementedError

    @classmethod
    def _fused_adopt(cls, conv: Any) -> None:
        """Makes a layer of :obj:`_base` one of this class, in place."""
        conv.__class__ = cls
        setattr(conv, _MARK, True)

    def _fused_is_adopted(self) -> bool:
        """Whether :meth:`_fused_adopt` made the layer."""
        return _MARK in self.__dict__

    def _fused_release(self) -> None:
        """Undoes :meth:`_fused_adopt`."""
        own = self.__dict__
        for name in (_MARK, *self._fused_own):
            own.pop(name, None)
        self.__class__ = self._base  # type: ignore[assignment]

    def _fused_how(self) -> str | None:
        """How our code ran in the last eager call: by a 'kernel', or over 'blocks' of edges."""
        return 'kernel' if self._last_run == '' else None

    def _fused_beside(self) -> str:
        """What else is known where PyG's code ran, to stand after the reason."""
        return ''

    def _fused_note(self, reason: str) -> None:
        """Records what runs in this call, for :func:`~pyg_fast.accelerate_report`."""
        if torch.compiler.is_compiling():
            self._fused_note_compiled(reason)
        else:
            self.__dict__['_last_run'] = reason

    def _fused_note_compiled(self, reason: str, follows: bool = False) -> None:
        """Records what will run in code that Dynamo traces, as :meth:`_fused_note` in eager calls.

        Args:
            reason: Why PyG's code runs; an empty text if it does not.
            follows: Whether a reason that this trace has recorded before stays.
        """
        comptime(_note_traced)  # It reads the variables of this method.

    def _fused_note_edges(self, edge_index: object) -> None:
        """Records whether this call sorts its edges, as it does a plain list."""
        if not torch.compiler.is_compiling():
            self.__dict__['_last_sorted'] = GIVEN if type(edge_index) is Tensor else ''

    def __prepare_scriptable__(self) -> Any:
        """PyG's own layer, sharing the parameters."""
        raise NotImplementedError


class FusedLayer(FusedModule, Mixin):
    """Mixin for a subclass of a :class:`~torch_geometric.nn.MessagePassing` layer.

    Two mixins are of this kind: :class:`Fused` for layers with a kernel of their own, which replace
    `forward`, and :class:`~pyg_fast.nn.message_passing.FusedPropagate` for layers with a generated
    kernel, whose `propagate` it replaces.
    """

    _base: type[MessagePassing]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if getattr(cls.__call__, '__module__', None) == __name__:
            cls.__call__ = with_own_code(cls.__call__)  # type: ignore[method-assign]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        try:
            out = super().__call__(*args, **kwargs)
        except Exception as error:
            if isinstance(error, AttributeError):
                _name_users_class(self, error)
            is_explained = isinstance(error, EXPLAINED)
            found = not_compiled(explain, self, args, kwargs, error) if is_explained else None
            # The backward pass of a checkpoint ends a call so, in between.
            ends = type(error).__module__ == torch.utils.checkpoint.__name__
            if '(strict=True)' not in str(error) and not ends:  # The former is the report.
                self.__dict__['_last_error'] = first_line(found or error)
            if not isinstance(error, KeyError) and str(found or error).startswith("'"):
                name_edge_type(found or error)  # Others are not ours.
            if found is None:
                raise
            raise found from error
        if self._last_error is not None:
            del self._last_error
        return out

    def __prepare_scriptable__(self) -> MessagePassing:
        return self._fused_to_base()

    def _fused_to_base(self) -> MessagePassing:
        """PyG's own layer, sharing the parameters."""
        return self._fused_recast(self._base)

    def _fused_recast(self, cls: type[MessagePassing]) -> MessagePassing:
        out = recast(self, cls)
        for name in self._fused_own:
            vars(out).pop(name, None)
        out._set_jittable_templates()  # TorchScript needs them; this may be the first of its class
        return out


def _note_traced(context: ComptimeContext) -> None:
    """Runs while Dynamo traces :meth:`FusedModule._fused_note_compiled`: what that method would do
    itself would be a part of the compiled code."""
    if torch.compiler.is_exporting():
        return
    variable = context.get_local('self')
    # A private name of torch: without it reports say less.
    tracker = getattr(variable, '_i_will_not_complain_if_bc_breaks_VariableTracker', None)
    layer = None if tracker is None else getattr(tracker().realize(), 'value', None)
    if not isinstance(layer, FusedModule):
        return
    reason, follows = (context.get_local(name) for name in ('reason', 'follows'))
    known = reason.as_python_constant() if reason.is_python_constant() else ARGUMENTS
    known = NOT_TOLD if known == OTHER_BACKEND and _compiles_for_us() else known
    if not follows.as_python_constant() or not layer._last_compiled:
        layer.__dict__['_last_compiled'] = known
    traced[id(layer)] = layer


def _compiles_for_us() -> bool:
    """Whether Dynamo traces for our backend; False if torch lacks the private name that tells."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        given = InstructionTranslator.current_tx().output.compiler_fn
    except (ImportError, AttributeError):
        return False
    function = getattr(given, 'compiler_fn', given)
    return (getattr(function, '__module__', '') or '').partition('.')[0] == 'pyg_fast'


def _name_users_class(conv: FusedModule, error: AttributeError) -> None:
    """Makes an error of an attribute that a layer lacks speak of the class that the user wrote, and
    of a name that is alike, as Python does at the end of a program alone."""
    if not error.args or not isinstance(error.args[0], str):
        return
    ours, users = f"'{type(conv).__name__}' object", f"'{written_class(conv).__name__}' object"
    text = error.args[0].replace(ours, users)
    lacking = re.fullmatch(rf"{re.escape(users)} has no attribute '(\w+)'", text)
    if lacking is not None:
        text += did_you_mean(lacking[1], (name for name in dir(conv) if name[:1] != '_'))
        error.name = None  # Else Python would add it again.
    error.args = text, *error.args[1:]


def written_class(conv: FusedModule) -> type:
    """The class of a layer as its owner made it, which may be one of ours."""
    return conv._base if conv._fused_is_adopted() else type(conv)


def with_own_code(function: Callable[P, T]) -> Callable[P, T]:
    """A copy of a function. Dynamo compiles a code object at most eight times: the layers that a
    program compiles one by one would share the number."""
    out = FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    out.__qualname__, out.__doc__ = function.__qualname__, function.__doc__
    return out


class Fused(FusedLayer):
    """Mixin for a layer with a kernel of its own, which replaces `forward`; the base class runs
    for everything else (hooks, explainers, overridden messages, unusual inputs).

    A layer sets :obj:`_base`, and defines :meth:`_why_not_aggr`, :meth:`_why_no_options` where an
    option has no kernel, and `forward`. This asks :meth:`_fusible` (or :meth:`_unaltered` where the
    option `fuse` has no meaning) before it runs the kernel, and otherwise calls PyG's `forward`
    with :meth:`_edges_for_pyg`. `nn/__init__.py` exports the layer, `_accelerate.py` lists it.
    """

    fuse: bool
    _pyg_methods: tuple[Callable[..., object], ...]  # PyG's methods, before any patch
    _node_dim = -2  # node dimension of the base class
    _other_features: type | tuple[type, ...] = ()  # classes of tensors beside torch's own
    # `cache_input` is of layers that 0.2 has pickled.
    _fused_own: ClassVar[tuple[str, ...]] = (
        '_last_run', '_last_compiled', '_last_sorted', '_last_error', 'cache_input',
    )  # fmt: skip

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if '_base' in cls.__dict__:
            cls._pyg_methods = tuple(getattr(cls._base, name) for name in _METHODS)

    @classmethod
    def _fused_why_never(cls, conv: MessagePassing) -> str | None:
        if isinstance(conv, cls):  # Each call asks for the rest.
            return cls._why_no_options(conv)
        if 'forward' in vars(conv):
            return 'its forward is patched'
        for name in (*_METHODS, 'propagate', 'edge_updater'):
            own = vars(conv).get(name)
            # Explainers leave PyG's own method on the instance.
            if own is not None and getattr(own, '__self__', None) is not conv:
                return f'its {name} is patched'
        if conv.explain:
            return 'explains'
        if conv.node_dim != cls._node_dim:
            return f'node_dim={conv.node_dim}'
        if conv.decomposed_layers != 1:
            return f'decomposed_layers={conv.decomposed_layers}'
        return cls._why_not_aggr(conv) or cls._why_no_options(conv)

    @classmethod
    def _why_not_aggr(cls, conv: MessagePassing) -> str | None:
        """Why the aggregation of a layer has no kernel."""
        raise NotImplementedError

    @classmethod
    def _why_no_options(cls, conv: MessagePassing) -> str | None:
        """Why no kernel takes the options of a layer."""
        return None

    @classmethod
    def _fused_adopt(cls, conv: MessagePassing) -> None:
        note_propagate(cls.propagate, cls.edge_updater)
        super()._fused_adopt(conv)

    def _fusible(self, x: object) -> TypeGuard[Tensor]:
        """Whether the kernel may run for features :obj:`x`: nothing observes or changes PyG's own
        code, and a kernel takes such features. What is asked of edges and aggregations is the
        layer's."""
        if not self.fuse:
            self._fused_note('fuse=False')
        return self.fuse and self._unaltered(x)

    def _unaltered(self, x: object) -> TypeGuard[Tensor]:
        reason = why_not_layer(self, x)
        self._fused_note(reason or '')
        return reason is None

    def _edges_for_pyg(self, edge_index: Adj) -> Adj:
        """The edges in a form that PyG's own code takes, which runs this call; notes a reason if
        none is known."""
        if torch.compiler.is_compiling():
            self._fused_note_compiled(ARGUMENTS, follows=True)
        elif not self._last_run:
            sparse = not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index)
            self._fused_note(what_is(edge_index) if sparse else 'arguments that no kernel takes')
        return edges_for_pyg(edge_index)

    def __prepare_scriptable__(self) -> MessagePassing:
        return self.to_base()

    def to_base(self) -> MessagePassing:
        """PyG's own layer, sharing the parameters."""
        return self._fused_to_base()

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        # One template per class serves all layers of the process: compile it with the fused
        # branch, even if this layer's aggregation does not support it.
        fuse, self.fuse = self.fuse, self.inspector.implements('message_and_aggregate')
        super()._set_jittable_templates(raise_on_error)
        self.fuse = fuse
        cls = type(self)
        note_propagate(cls.propagate, cls.edge_updater)
        # Otherwise the base's compiled `propagate` would count as the original one.
        if PYGS[cls.propagate]:
            cls._orig_propagate = PROPAGATE
        if PYGS[cls.edge_updater]:
            cls._orig_edge_updater = EDGE_UPDATER


def recast(module: Module, cls: type[ModuleT]) -> ModuleT:
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


def edges_for_pyg(edge_index: Adj) -> Adj:
    """The edges in a form that PyG's own code takes. Under a function transform and in inference
    mode PyG's EdgeIndex raises errors."""
    check_exported(edge_index)
    if isinstance(edge_index, EdgeIndex) and (
        transforms_active() or torch.is_inference_mode_enabled()
    ):
        return edge_index.as_tensor()
    if isinstance(edge_index, PreparedGraph):
        return edge_index.to_edge_index()
    return in_int64(edge_index)


def in_int64(edge_index: Adj) -> Adj:
    """A plain list of edges in the dtype that PyG's code takes; kernels take all integers."""
    if type(edge_index) is Tensor and edge_index.dtype in (torch.int32, torch.int16, torch.int8):
        return edge_index.long()
    return edge_index


def check_exported(edge_index: object) -> None:
    """Raises :class:`TypeError` where PyG's code or torch would raise an error that names neither
    the argument nor the cure; or the program would take no plain tensor."""
    if torch.compiler._is_exporting_flag and isinstance(edge_index, EdgeIndex):
        kind = type(edge_index).__name__
        raise TypeError(
            f"'edge_index' must be a plain tensor to export a model, got {kind}: pass "
            'edge_index.as_tensor()'
        )


def entries(adj_t: Adj, num_src: int, num_dst: int, flow: str) -> tuple[Tensor, OptTensor] | None:
    """Edges and weights of a transposed sparse matrix, or None if PyG's code must run."""
    if not isinstance(adj_t, SparseTensor) and not is_torch_sparse_tensor(adj_t):
        return None
    if torch.compiler.is_compiling() or flow != 'source_to_target':
        return None
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
