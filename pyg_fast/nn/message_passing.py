"""Runs the message that a layer writes in PyTorch as one kernel."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch_geometric import EdgeIndex
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation, StdAggregation
from torch_geometric.typing import Adj, OptTensor, Size

from ..graph._cache import keeps_graph
from ..graph.graph import graph_of
from ..graph.prepared_graph import has_list
from ..graph.readable import readable
from ..graph.small_graphs import (
    TOO_FEW,
)
from ..message import Fallback, make_entry
from ..message._fallback import OWN, BySize, InMemory, tell, with_cure
from ..message._inputs import check_inputs
from ..message._rows import put_in
from ..ops._edges import is_list
from ..ops._numbers import check_flag
from ..ops._transforms import transforms_traced
from ..sparse.graph import Graph
from . import _direct
from ._checks import (
    OF_GATHERS,
    OF_SOFTMAX,
    REDUCES,
    STRUCTURE,
    captures_aggregate,
    forwards_propagate,
    parts_of,
    place_of_attention,
    reads_of_graph,
    why_never_message,
    why_not_arguments,
    why_not_message,
    why_patched,
)
from ._explain_edges import check_edge_rows
from ._explain_names import warn_of_keywords, warn_of_methods
from ._explain_size import check_size, refuse_weights
from ._explain_table import warn_of_columns
from ._few import (
    is_pygs_own,
    listed_by,
    note_in_memory,
    note_inputs,
    note_plan,
    tells_lists_apart,
    why_few,
    with_plain_list,
)
from ._layer import (
    ARGUMENTS,
    GIVEN,
    MADE,
    OTHER_BACKEND,
    FusedLayer,
    check_exported,
    edges_for_pyg,
    in_int64,
    with_own_code,
)
from ._marked import INDICES, Arguments, Marks, without_sources
from ._marked import propagate as marked_propagate
from ._modules import HOOKS, PROPAGATE
from ._reduce import combined

# Where neither features nor `size` tell the number of nodes.
NO_NODES = 'no input of nodes'
_Inputs: TypeAlias = dict[tuple[str, str], Tensor]  # by role and name


def _pairs_of(conv: MessagePassing, kwargs: dict[str, object]) -> dict[str, object]:
    """The arguments for PyG's `propagate`. Compiled from a template, as for any layer of PyG, it
    takes the first of a pair for sources; its Python code with `target_to_source` the second."""
    if conv.flow == 'source_to_target' or not (conv._fused_python and _runs_python(type(conv))):
        return kwargs
    bases = {name[:-2] for name in conv._user_args if name[-2:] in ('_i', '_j')}
    return {
        name: value[::-1] if name in bases and isinstance(value, (tuple, list)) else value
        for name, value in kwargs.items()
    }


def _runs_python(cls: type) -> bool:
    """Whether PyG's `propagate` of a class of ours is its Python code."""
    found = [
        base.__dict__['propagate']
        for base in cls.__mro__
        if 'propagate' in base.__dict__ and not issubclass(base, FusedPropagate)
    ]
    return found[0] in (PROPAGATE, MessagePassing.propagate)


class FusedPropagate(FusedLayer):
    """Mixin before a :class:`~torch_geometric.nn.MessagePassing`: :meth:`propagate` runs
    :meth:`message` and the aggregation as one kernel where that is PyG's result."""

    strict: bool = False
    _fused_own: ClassVar[tuple[str, ...]] = OWN
    _fused_python: ClassVar[bool] = False  # whether it replaces PyG's Python code
    _marks: Marks | None = None  # None: PyG's code in compiled code

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if getattr(cls.__call__, '__module__', None) == __name__:
            cls.__call__ = with_own_code(cls.__call__)  # type: ignore[method-assign]

    @property
    def explain(self) -> bool | None:
        """As :attr:`torch_geometric.nn.MessagePassing.explain`."""
        return self._explain

    @explain.setter
    def explain(self, explain: bool | None) -> None:
        if torch.jit.is_scripting():  # What follows is no TorchScript.
            raise ValueError("'explain' must be set before the layer is scripted")
        explained = self._explain
        MessagePassing.explain.fset(self, explain)
        if not explain:  # PyG leaves its own method on the layer, in front of that of the class.
            self.__dict__.pop('propagate', None)
            if explained:
                self._fused_note('an explainer observed the last call')

    @classmethod
    def _fused_why_never(cls, conv: MessagePassing) -> str | None:
        return why_never(conv)

    @classmethod
    def _fused_adopt(cls, conv: MessagePassing) -> None:
        conv.__dict__.pop('propagate', None)  # PyG's own: else a kernel never runs.
        super()._fused_adopt(conv)
        mark(conv)

    def _fused_is_never(self) -> bool:
        """Whether PyG's code runs for every input, as was known when the layer became ours."""
        is_own = type(self)._kernel is FusedPropagate._kernel
        return is_own and self._marks is None and self._fused_is_adopted()

    def _fused_how(self) -> str | None:
        entry = self.__dict__.get('_fused_entry')
        in_blocks = entry is not None and entry.in_blocks
        if self._last_run is None and '_last_run' in self.__dict__:
            return 'nothing: its forward called no propagate'
        return 'blocks' if self._last_run == '' and in_blocks else super()._fused_how()

    def _fused_beside(self) -> str:
        """What is known of a message that did not run, as there were few edges."""
        entry = self.__dict__.get('_fused_entry')
        if self._last_run is None or not self._last_run.endswith(TOO_FEW):
            return ''
        if entry is None:
            return ', so its message was not looked at'
        refused = list(entry.refused.values())
        return f'; with more: {refused[-1]}' if refused else ''

    def _fused_note(self, reason: str) -> None:
        """Records what ran: the first reason of a call stays."""
        if torch.compiler.is_compiling():
            self._fused_note_compiled(reason)
        else:
            self._fused_note_eager(reason)

    def _fused_note_eager(self, reason: str) -> None:
        """The same in eager calls."""
        own = self.__dict__
        if '_call' not in own or not own.get('_last_run'):
            own['_last_run'] = reason

    def _fused_note_edges(self, edge_index: object) -> None:
        own = self.__dict__
        sorts, (args, kwargs) = '', own.get('_call', ((), {}))
        given = (*args, *kwargs.values())
        is_given = has_lists = False
        for each in given:
            is_given |= each is edge_index
            has_lists |= type(each) is not Tensor and has_list(each)
        if is_given:
            sorts = GIVEN if type(edge_index) is Tensor and is_list(edge_index) else ''
        # PyG's layers have options that keep such a list, users change their own `forward`.
        elif not (is_pygs_own(self) or keeps_graph(edge_index)) and any(map(is_list, given)):
            sorts = MADE
        is_first = '_last_sorted' not in own
        if sorts or '_call' not in own or is_first:
            own['_last_sorted'] = sorts
        if has_lists or '_listed' in own:
            # A user's list tells nothing: what `forward` makes of a prepared graph may stay sorted.
            is_sorted = isinstance(edge_index, EdgeIndex) and edge_index.is_sorted
            knows = own.get('_makes_lists', False) or (is_first and '_listed' not in own)
            own['_makes_lists'] = sorts == MADE and not is_sorted and knows

    @classmethod
    def _fused_replaced(cls) -> Callable[..., Tensor]:
        """The `propagate` that the class replaces."""
        return super().propagate

    def _fused_pygs(self, edge_index: Adj, size: Size, kwargs: dict[str, object]) -> Tensor:
        """The result of the `propagate` that the class replaces."""
        if self._fused_python:
            return PROPAGATE(self, edge_index, size=size, **kwargs)
        return super().propagate(edge_index, size=size, **kwargs)

    def propagate(self, edge_index: Adj, size: Size = None, **kwargs: object) -> Tensor:
        r"""As :meth:`torch_geometric.nn.MessagePassing.propagate`."""
        if torch.compiler.is_compiling():
            self._fused_note_compiled(OTHER_BACKEND)  # Before a graph break in the message.
            marks, out = self._marks, _marked(self, edge_index, size, kwargs)
            if out is not None:
                return out
            no_nodes = marks is not None and not marks.arguments.ends and size is None
            self._fused_note_compiled(NO_NODES if no_nodes else ARGUMENTS)
            check_exported(edge_index)
            kwargs = _pairs_of(self, kwargs)
            return self._fused_pygs(edge_index, size, kwargs)
        refuse_weights(size)
        is_first = note_inputs(self, edge_index, kwargs)
        if is_first:
            warn_of_keywords(self, size, kwargs, stacklevel=3)
        reason, plain, listed = None, edge_index, listed_by(self)
        if listed is not None:
            # PyG reads no other beside an EdgeIndex, nor beside those made of it.
            size = listed.prepared.sparse_size()
            if listed.edge_index is edge_index:
                reason = listed.reason
                edge_index = edge_index if reason is not None else listed.prepared
        elif type(size) is torch.Size:
            check_size(self, edge_index, size, kwargs)
        if reason is None:
            # PyG's code takes longer for one. A prepared graph has no list yet.
            if has_list(edge_index):
                plain = edge_index.as_tensor()
            if not self.strict:
                # An EdgeIndex may be new at each call, as with the loops that `forward` adds.
                kind = 'prepared message' if keeps_graph(edge_index) else 'message'
                reason = why_few(self, plain, kind)
        if reason is not None:
            self._fused_note_eager(reason)
            if is_first:
                tell(self, BySize(reason))
            if plain is not edge_index and not tells_lists_apart(self):
                size, edge_index = edge_index.sparse_size(), plain  # PyG reads no other of one.
            edge_index = in_int64(edge_index)
            out = _direct.propagate(self, edge_index, size, kwargs)
            if out is None:
                if self.flow != 'source_to_target':
                    kwargs = _pairs_of(self, kwargs)
                out = self._fused_pygs(edge_index, size, kwargs)
            if is_first:
                warn_of_columns(self, out, edge_index, kwargs, stacklevel=3)
            return out
        try:
            out = self._kernel(edge_index, size, kwargs)
            self._fused_note_eager('')
            return out
        except Fallback as error:
            self._fused_note_eager(str(error))
            tell(self, error)
            if isinstance(error, InMemory):
                note_in_memory(self, edge_index, str(error))
            if self.strict:
                raise NotImplementedError(
                    f"{type(self).__name__}(strict=True): PyG's code would run: {with_cure(error)}"
                ) from error
        kwargs = _pairs_of(self, kwargs)
        if self.SUPPORTS_FUSED_EDGE_INDEX and isinstance(edge_index, EdgeIndex):
            check_edge_rows(edge_index.size(1), kwargs)  # PyG's product reads beyond short weights.
        elif plain is not edge_index and not plain.is_cuda and not tells_lists_apart(self):
            # PyG's code takes longer for an EdgeIndex than for its list.
            size, edge_index = edge_index.sparse_size(), plain
        return self._fused_pygs(edges_for_pyg(edge_index), size, kwargs)

    def _kernel(self, edge_index: Adj, size: Size, kwargs: dict[str, object]) -> Tensor:
        """The result of :meth:`propagate`, or :class:`Fallback`."""
        return _fused(self, edge_index, size, kwargs)

    def _only_reads(self) -> bool:
        """Whether `forward` returns another tensor than :meth:`propagate`, and writes into none."""
        return False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        own = self.__dict__
        if '_call' in own or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        if len(args) > 1 and has_list(args[1]) and not kwargs.get('return_attention_weights'):
            own.pop('_listed', None)
            args = with_plain_list(self, args)
        is_eager = get_eval_frame_callback() is None  # Nor are parts of it compiled.
        if is_eager:
            args = tuple([readable(x) if type(x) is EdgeIndex else x for x in args])
            for name, x in kwargs.items():
                if type(x) is EdgeIndex:
                    kwargs[name] = readable(x)
        own['_call'] = args, kwargs
        before = own.pop('_last_run', None)
        own.pop('_last_sorted', None)
        try:
            out = super().__call__(*args, **kwargs)
            if '_watched' in own:
                own['_writes'] = any(x._version != version for x, version in own['_watched'])
            if '_last_run' not in own and is_eager:
                own['_last_run'] = None
            return out
        except Exception:
            if before is not None:  # The backward pass of a checkpoint ends a call so, in between.
                own.setdefault('_last_run', before)
            raise
        finally:
            for name in ('_call', '_graphs', '_watched', '_listed'):
                if name in own:
                    del own[name]

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        for name in OWN:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        mark(self)

    def _fused_to_base(self) -> MessagePassing:
        # A layer of a user's own class has PyG's code by another `propagate`.
        cls: object = type(self)
        return self._fused_recast(getattr(cls, '_base', None) or _scripted_class(cls))

    @property
    def plan(self) -> str | None:
        """The plan of :meth:`message` in the last call: hoisted, fused and sunk parts; or why
        PyG's code ran. :obj:`None` before the first call."""
        reason = self._last_run
        if reason is None:
            return None
        return f"PyG's code: {reason}" if reason else self.__dict__['_fused_entry'].text


class FusedMessagePassing(FusedPropagate, MessagePassing):
    r"""Base class for creating message passing layers whose :meth:`message` runs as one kernel

    .. math::
        \mathbf{y}_i = \bigoplus_{j \in \mathcal{N}(i)} \phi(\mathbf{x}_i, \mathbf{x}_j,
        \mathbf{e}_{ji})

    with its backward pass, without tensors of the size of the edges times the channels. A drop-in
    replacement of :class:`~torch_geometric.nn.MessagePassing`: :meth:`message` is PyTorch code on
    :obj:`x_j`, :obj:`x_i` and edge features. A linear map of values computed for each edge runs
    over blocks of edges in place of a kernel. Where neither is known to give PyG's result, PyG's
    code runs; :attr:`plan` says why.

    Args:
        aggr (str or [str] or Aggregation, optional): As in PyG. Kernels exist for :obj:`"sum"`,
            :obj:`"mean"`, :obj:`"max"`, :obj:`"min"`, :obj:`"var"`, :obj:`"std"` and lists of
            them. (default: :obj:`"sum"`)
        strict (bool, optional): Whether to raise :class:`NotImplementedError` with the reason
            instead of running PyG's code, and to use blocks of edges also where all edges fit into
            one. (default: :obj:`False`)
        **kwargs (optional): Further arguments of :class:`~torch_geometric.nn.MessagePassing`.

    Example:
        >>> class Gated(FusedMessagePassing):
        ...     def forward(self, x, edge_index):
        ...         return self.propagate(edge_index, x=x)
        ...     def message(self, x_i, x_j):
        ...         return torch.sigmoid(x_i + x_j) * x_j
    """

    _fused_python: ClassVar[bool] = True

    def __init__(
        self, aggr: Aggregation = 'sum', *, strict: bool = False, **kwargs: object
    ) -> None:
        check_flag('strict', strict)
        super().__init__(aggr, **kwargs)
        self.strict = strict
        warn_of_methods(self, stacklevel=4)
        mark(self)

    def _set_jittable_templates(self, raise_on_error: bool = False) -> None:
        """PyG would replace :meth:`propagate` by one compiled from its template."""


def mark(conv: MessagePassing) -> None:
    """Finds out what :func:`torch.compile` cannot trace: the arguments of a layer's message."""
    conv.__dict__.pop('_marks', None)
    aggr, is_own = conv.aggr_module, type(conv)._kernel is FusedPropagate._kernel
    if not is_own or type(conv)._fused_why_never(conv) is not None:
        return
    captures = captures_aggregate(conv)
    reduces = () if captures else tuple(REDUCES[type(part)] for part in parts_of(aggr))
    conv.__dict__['_marks'] = Marks(conv.flow, _arguments(conv), type(aggr), reduces, captures)


def why_never(conv: MessagePassing) -> str | None:
    """Why PyG's code would run for every input of a layer, of ours or not yet."""
    return why_never_message(conv, conv.aggr_module, why_not_arguments(conv), _replaced(conv))


def may_adopt(conv: MessagePassing) -> bool:
    """Whether a layer may become one of ours: also where PyG's code runs it for every input, which
    then takes less time for the edges of a prepared graph."""
    return why_patched(conv, _replaced(conv)) is None


def _replaced(conv: MessagePassing) -> Callable[..., object]:
    """The `propagate` of a layer that ours replaces, or would."""
    cls = type(conv)
    if issubclass(cls, FusedPropagate):
        return cls._fused_replaced()
    if forwards_propagate(cls) and conv.flow == 'source_to_target':
        return PROPAGATE
    return cls.propagate


def why_not(
    conv: MessagePassing, edge_index: Adj, aggr: Aggregation, reads: str | None
) -> str | None:
    """As :func:`~pyg_fast.nn._checks.why_not_message`."""
    return why_not_message(conv, edge_index, aggr, reads, conv._fused_replaced())


def _is_exporting() -> bool:
    # Torch 2.11 traces `is_exporting()` as True for `torch.compile`, too.
    return bool(torch.compiler._is_exporting_flag)


def _marked(
    conv: MessagePassing, edge_index: Adj, size: Size, kwargs: dict[str, object]
) -> OptTensor:
    """The result of `propagate` with marks for :mod:`~pyg_fast.message._replace`, which makes
    kernels of them; None where PyG's code must run."""
    marks = conv._marks
    if marks is None or (_is_exporting() and not marks.in_export) or transforms_traced():
        return None
    for name in HOOKS:
        if len(getattr(conv, name)) > 0:
            return None
    out = marked_propagate(conv, marks, edge_index, size, kwargs)
    if out is None:
        return None
    update = marks.arguments.update
    return conv.update(out, **{name: kwargs.get(name, default) for name, default in update})


def _arguments(conv: MessagePassing) -> Arguments:
    """The arguments of a layer, stored on it until its signatures or its flow change."""
    signature, flow = conv.inspector.get_signature, conv.flow
    message, update = signature('message'), signature('update')
    captured = signature('aggregate') if captures_aggregate(conv) else None
    known = conv.__dict__.get('_fused_arguments')
    if known is not None:
        one, two, three, last = known.signatures
        if one is message and two is captured and three is update and last == flow:
            return known
    i, j = (1, 0) if flow == 'source_to_target' else (0, 1)
    fixed: dict[str, None] = {}
    structure, ends = [], []
    rest: list[tuple[str, object]] = []
    rows: list[tuple[str, object]] = []
    reads = reads_of_graph(conv)
    of_message = message.param_dict
    of_aggregate = {} if captured is None else captured.param_dict
    for name, param in {**of_aggregate, **of_message}.items():
        unread = name in STRUCTURE or (name in OF_GATHERS and name not in reads)
        if unread or name == 'ptr':  # The softmax takes the index.
            fixed[name] = None
        elif name in OF_SOFTMAX or name in OF_GATHERS:
            structure.append(name)
        elif name[-2:] in ('_i', '_j'):
            dim = j if name[-2:] == '_j' else i
            ends.append((('src' if dim == j else 'dst', name), name[:-2], dim, param.default))
        else:
            (rest if name in of_message else rows).append((name, param.default))
    if flow == 'target_to_source' and 'edge_index' in structure:
        structure.append(flow)
    found = Arguments(
        (message, captured, update, flow), why_not_arguments(conv), fixed, tuple(structure),
        tuple(ends), tuple(rest),
        tuple((name, param.default) for name, param in update.param_dict.items()), tuple(rows),
        tuple(of_message), tuple(of_aggregate), not reads.isdisjoint(INDICES),
        not OF_GATHERS.isdisjoint(structure),
    )  # fmt: skip
    conv.__dict__['_fused_arguments'] = found
    return found


def _fused(conv: MessagePassing, edge_index: Adj, size: Size, kwargs: dict[str, object]) -> Tensor:
    """The result of `propagate`.

    Raises:
        Fallback: If PyG's code must run.
    """
    aggr, names = conv.aggr_module, _arguments(conv)
    reason = why_not(conv, edge_index, aggr, names.refused)
    if reason is not None:
        raise Fallback(reason)
    inputs, other, moved, (num_src, num_dst) = _collect(conv, edge_index, size, kwargs, names)
    inputs = _unwritten(conv, inputs)
    given = edge_index
    if not names.reads_sources and 'src' not in [role for role, _ in inputs]:
        edge_index, num_src = without_sources(edge_index, conv.flow), num_dst
    entry = conv.__dict__.get('_fused_entry')
    if entry is None:
        entry = conv.__dict__['_fused_entry'] = make_entry(
            int(place_of_attention(conv) is not None)
        )

    def graph(transpose: bool) -> Graph:
        conv._fused_note_edges(given)
        if conv.flow == 'source_to_target':
            return _graph(conv, edge_index, num_src, num_dst, transpose)
        return _graph(conv, edge_index, num_dst, num_src, True).t()

    captures = names.signatures[1] is not None
    parts = [] if captures else parts_of(aggr)
    reduces = tuple(dict.fromkeys([REDUCES[type(part)] for part in parts]))
    aggregate = (conv.aggregate, names.of_message, names.of_aggregate) if captures else None
    node_dim = conv.node_dim

    def run(other: dict[str, object], structure: tuple[str, ...]) -> tuple[list[Tensor], str]:
        return entry(
            conv.message, graph, reduces, inputs, other, structure, aggregate, node_dim,
            None if conv.strict else edge_index.size(1),
            conv._only_reads() and type(conv).update is MessagePassing.update,
        )  # fmt: skip

    structure = names.structure + moved
    # The number of nodes, for a softmax, may change from call to call.
    counts = []
    if 'index' in structure:
        counts = [name for name, v in other.items() if type(v) is int and v == num_dst]
    found = None
    if counts:
        rest = {name: value for name, value in other.items() if name not in counts}
        with suppress(Fallback):  # Of another number, which equals it.
            found = run(rest, structure + tuple([f'count {name}' for name in counts]))
    outs, container = run(other, structure) if found is None else found
    note_plan(conv, entry.last, edge_index.is_cuda)
    for rank in {out.dim() for out in outs}:
        if rank < -node_dim and not captures:  # PyG raises an error.
            raise Fallback(f'a message of {rank} dimensions')
        if node_dim not in (0, -rank) and rank > -node_dim:  # As `view` needs it.
            outs = [
                out.movedim(0, node_dim).contiguous() if out.dim() == rank else out for out in outs
            ]
    out: Any = outs[0]
    if captures:
        out = put_in(container, outs)
    elif len(parts) > 1 or type(aggr) not in REDUCES or type(aggr) is StdAggregation:
        sums = dict(zip(reduces, outs, strict=True))
        of_parts = [sums[REDUCES[type(part)]] for part in parts]
        out = combined(aggr, of_parts, node_dim, lambda: graph(False).rowptr.diff())
    return conv.update(out, **{name: kwargs.get(name, default) for name, default in names.update})


def _collect(
    conv: MessagePassing,
    edge_index: Tensor,
    size: Size,
    kwargs: dict[str, object],
    names: Arguments,
) -> tuple[_Inputs, dict[str, object], tuple[str, ...], tuple[int, int]]:
    """The arguments of a message: tensors of nodes and edges by role and name, others by name; what
    :func:`_collect_batched` returns; and the numbers of sources and destinations.

    Raises:
        Fallback: If PyG's code must run.
    """
    sizes = list(conv._check_input(edge_index, size))
    if size is not None:  # PyG takes numbers in tensors, too.
        sizes = [each.item() if isinstance(each, Tensor) else each for each in sizes]
    num_edges, node_dim = edge_index.size(1), conv.node_dim
    other: dict[str, object] = dict(names.other)
    inputs: _Inputs = {}
    _collect_ends(conv, kwargs, names, inputs, other, sizes)
    source = 0 if conv.flow == 'source_to_target' else 1
    # PyG accepts any numbers of sources where the message gathers no input of them.
    if names.reads_sources and sizes[source] is None:
        raise Fallback("message reads 'edge_index_j' of an unknown number of sources: give `size`")
    for name, default in names.rest:
        value = kwargs.get(name, default)
        if isinstance(value, Tensor) and value.dim() > 0 and value.size(0) == num_edges:
            inputs['edge', name] = value
        elif isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            other[name] = _collect_parts(inputs, name, value, num_edges)
        elif value is inspect.Parameter.empty:
            raise Fallback(f"'{name}' is missing")
        else:
            other[name] = value
    order = sizes[::-1] if conv.flow == 'source_to_target' else sizes  # destinations first
    given = [count for count in order if count is not None]
    if not given:
        for (_, name), base, _, _ in names.ends:
            if other.get(name) is not None:
                raise Fallback(f"'{base}' is a {type(other[name]).__name__}, no tensor")
        raise Fallback(NO_NODES)
    num_dst, num_src = given[0], given[-1]
    if names.gathers:
        tensors = {name: x for name, x in other.items() if isinstance(x, Tensor) and x.dim() > 0}
        for name, x in tensors.items():
            if x.size(0) == num_dst and not -x.dim() < node_dim != 0:
                inputs['row', name] = x
                del other[name]
    if names.rows:
        _collect_rows(node_dim, kwargs, names, inputs, other, (num_edges, num_dst))
    moved = _collect_batched(node_dim, num_edges, inputs, other) if other else ()
    if not inputs:
        raise Fallback('no input of nodes or edges')
    check_inputs(edge_index.device, inputs.values(), num_edges, (num_src, num_dst))
    return inputs, other, moved, (num_src, num_dst)


def _collect_batched(
    node_dim: int, num_edges: int, inputs: _Inputs, other: dict[str, object]
) -> tuple[str, ...]:
    """Makes inputs of tensors that have edges at `node_dim`, behind other dimensions, and returns
    what tells the entry that they were moved."""
    found = [
        name for name, value in other.items()
        if isinstance(value, Tensor) and -value.dim() < node_dim < 0
        and value.size(node_dim) == num_edges
    ]  # fmt: skip
    for name in found:
        inputs['edge', name] = other.pop(name).movedim(node_dim, 0)  # type: ignore[attr-defined]
    return tuple([f'moved {name}' for name in found])


def _collect_ends(
    conv: MessagePassing, kwargs: dict[str, object], names: Arguments, inputs: _Inputs,
    other: dict[str, object], sizes: list[int | None],
) -> None:  # fmt: skip
    """Adds the arguments of the ends of edges, and notes the numbers of nodes in `sizes`."""
    # As PyG's template takes pairs in either flow, and its Python code where a layer has none.
    swaps = conv.flow != 'source_to_target' and not conv._fused_python and _runs_python(type(conv))
    for key, base, dim, default in names.ends:
        value = kwargs.get(base, default)
        if type(value) is not Tensor and isinstance(value, (tuple, list)):
            if len(value) != 2:
                raise Fallback(f"'{base}' has {len(value)} parts")
            for k, part in enumerate(value):
                _note_size(conv, sizes, k, base, part)
            value = value[(key[0] == 'dst') != swaps]
        if isinstance(value, Tensor):
            _note_size(conv, sizes, dim, base, value)
            if conv.node_dim not in (0, -value.dim()):
                value = value.movedim(conv.node_dim, 0)
            inputs[key] = value
        elif value is inspect.Parameter.empty:
            raise Fallback(f"'{key[1]}' is missing")
        else:
            other[key[1]] = value


def _collect_rows(
    node_dim: int, kwargs: dict[str, object], names: Arguments, inputs: _Inputs,
    other: dict[str, object], sizes: tuple[int, int],
) -> None:  # fmt: skip
    """Adds the arguments that an `aggregate` alone takes; `sizes` are the numbers of edges and of
    destinations."""
    num_edges, num_dst = sizes
    for name, default in names.rows:
        value = kwargs.get(name, default)
        if value is inspect.Parameter.empty:
            raise Fallback(f"'{name}' is missing")
        if isinstance(value, Tensor) and value.dim() > 0:
            if value.size(0) == num_edges:
                inputs['edge', name] = value
                continue
            rows = value.movedim(node_dim, 0) if -value.dim() < node_dim != 0 else value
            if rows.size(0) == num_dst:
                inputs['row', name] = rows
                continue
        other[name] = value


def _collect_parts(
    inputs: _Inputs, name: str, parts: Sequence[object], num_edges: int
) -> tuple[object, ...] | list[object]:
    """Adds the tensors of edges of a tuple or list to the inputs, as `name.0`, `name.1` and so on;
    returns the others, and None in their places."""
    rest = list(parts)
    for k, part in enumerate(parts):
        if isinstance(part, Tensor) and part.dim() > 0 and part.size(0) == num_edges:
            inputs['edge', f'{name}.{k}'], rest[k] = part, None
    return tuple(rest) if isinstance(parts, tuple) else rest


def _unwritten(conv: MessagePassing, inputs: _Inputs) -> _Inputs:
    """Inputs that the backward pass may read again: copies of those of nodes where the layer's
    `update` or `forward` writes into them; PyG's messages gather copies, too. The first call with
    gradients finds out."""
    own = conv.__dict__
    writes = own.get('_writes')
    if writes is False or '_call' not in own or not torch.is_grad_enabled():
        return inputs
    of_nodes = {key: x for key, x in inputs.items() if key[0] != 'edge'}
    if writes is None:  # Tensors of inference mode have no version; they are copied anyway.
        of = [(x, x._version) for x in of_nodes.values() if not x.is_inference()]
        own['_watched'] = own.get('_watched', []) + of
    copies = {id(x): x for x in of_nodes.values()}  # What is one tensor stays one.
    copies = {name: x.clone() for name, x in copies.items()}
    return inputs | {key: copies[id(x)] for key, x in of_nodes.items()}


def _graph(
    conv: MessagePassing, edge_index: Tensor, num_src: int, num_dst: int, transpose: bool
) -> Graph:
    """The graph of an `edge_index`. A plain one is sorted once in a call of `forward`, even if that
    propagates several times."""
    own, known = conv.__dict__, None
    if '_call' in own and not isinstance(edge_index, EdgeIndex) and not edge_index.is_inference():
        # Tensors of inference mode do not tell whether they were written.
        known = own.setdefault('_graphs', {})
    version = 0 if known is None else edge_index._version
    by = (id(edge_index), version, num_src, num_dst, transpose)
    if known is not None:
        found = known.get((*by[:-1], True)) or known.get(by)
        if found is not None:
            return found[1]
    graph = graph_of(edge_index, num_src, num_dst, transpose=transpose)
    if known is not None:
        known[by] = edge_index, graph
    return graph


def _note_size(
    conv: MessagePassing, sizes: list[int | None], dim: int, name: str, value: object
) -> None:
    if not isinstance(value, Tensor):
        return
    try:
        rows = value.size(conv.node_dim)
    except IndexError:
        shape = list(value.shape)
        raise Fallback(f"'{name}' has shape {shape}, without node_dim={conv.node_dim}") from None
    if sizes[dim] is None:
        sizes[dim] = rows
    elif sizes[dim] != rows:
        raise Fallback(f"'{name}' has {rows} nodes, others or size= say {sizes[dim]}")


class _FusedBelow(FusedPropagate, MessagePassing):
    """What stands after a class whose own `propagate` calls `super().propagate`, which is then
    fused."""

    _fused_python: ClassVar[bool] = True

    def propagate(self, edge_index: Adj, size: Size = None, **kwargs: object) -> Tensor:
        if self.flow == 'source_to_target':
            return super().propagate(edge_index, size, **kwargs)
        # Of a pair PyG's Python code takes the second for sources then.
        self._fused_note('its propagate is overridden')
        return PROPAGATE(self, edges_for_pyg(edge_index), size, **kwargs)


_classes: dict[type, type[FusedPropagate]] = {}
# What stands before a class whose kernels need more than its message.
MIXINS: dict[type, type] = {}


def fused_class(base: type) -> type[FusedPropagate]:
    """The subclass of a layer's class whose `propagate` is fused."""
    if base not in _classes:
        body = {
            '__module__': __name__,
            '_base': base,
            '__reduce_ex__': _reduce_ex,
            '_set_jittable_templates': FusedMessagePassing._set_jittable_templates,
        }
        bases = MIXINS.get(base, FusedPropagate), base
        if forwards_propagate(base):
            bases = base, _FusedBelow
        _classes[base] = type(f'Fused{base.__name__}', bases, body)
    return _classes[base]


@lru_cache(maxsize=64)
def _scripted_class(cls: type[MessagePassing]) -> type[MessagePassing]:
    """The class of a :class:`FusedMessagePassing` with PyG's `propagate`."""
    body = {
        '__module__': cls.__module__,
        '__jit_unused_properties__': ['plan'],
        'propagate': PROPAGATE,
        '_set_jittable_templates': MessagePassing._set_jittable_templates,
    }
    return type(f'Scripted{cls.__name__}', (cls,), body)


def _reduce_ex(self: FusedPropagate, protocol: object) -> tuple:
    """Pickles as a layer of the user's class, which becomes fused again."""
    return _remade, (self._base,), self.__getstate__()


def _remade(base: type) -> FusedPropagate:
    return object.__new__(fused_class(base))


__all__ = ['FusedMessagePassing', 'FusedPropagate', 'fused_class', 'may_adopt']
