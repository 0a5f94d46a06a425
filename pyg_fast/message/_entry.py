"""The entry of a layer or function: the guarded call of its messages.

All captures of one message's code are in one store, whichever layers made them: a second layer of a
class finds those of the first. Only Dynamo's guards decide whether a capture serves a call: they
check all that the message read, such as numbers, modules, and shapes and dtypes of parameters. The
store shortens the search: by class, aggregation, and names, shapes, dtypes and device of inputs. An
entry first tries the capture that served it last.

A store holds a limited number of captures, and drops the least recently used. Each capture has its
own code object, which Dynamo compiles once: Dynamo's limit of compilations per code object is never
reached, and a dropped capture is freed. One backend serves all captures and holds no layer; layers
hold captures, and captures no layer.

Captures are made, and their guards checked, with gradients and for inputs that require them, also
under ``no_grad`` and in inference mode: a capture serves training and evaluation. Where the message
asks for these modes itself (`_MODE_NAMES`), they are those of the call.

Numbers are constants at first. A float that differs from that of an earlier capture becomes an
argument of the kernel, where one takes it. A layer with another number that changes at its calls
runs PyG's code from the third value on.
"""

import itertools
import logging
import os
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from types import CodeType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch_geometric
from torch import Tensor
from torch._dynamo import eval_frame, pgo
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx import _symbolic_trace

from ..graph.small_graphs import runs_pygs_code
from ..sparse.graph import Graph
from ._blocks import edges_per_block, fits_memory
from ._capture import CapturedMessage, CaptureRequest, Written, backend, capture_for
from ._cuda import check_not_capturing
from ._fallback import OWN, Fallback, InMemory
from ._ir import Refused
from ._passes import Passes
from ._plan import Plan, describe, make_plan
from ._run import SLOWER_IN_TILES, SLOWER_TWICE, is_slower_in_tiles, keeps_maps, run
from ._trace import READS_VALUE, describe_error, line_of, tracing

# Before 2.13, Dynamo does not notice a function of the same code and other defaults.
torch._dynamo.config.skip_guards_on_constant_func_defaults = False
# Nor hooks of modules that the message calls.
torch._dynamo.config.skip_nnmodule_hook_guards = False
_MAX_REFUSALS = 32  # of an entry; after these it captures nothing more
_MAX_CAPTURES = 64  # of an entry
_MAX_STORED = 256  # captures in a store
# From this value of a number that changes on, PyG's code runs: of a layer's attribute; of an
# argument, as a layer may propagate with the same few again; of all functions of one code.
_MAX_VALUES, _MAX_VALUES_OF_ARGUMENT, _MAX_VALUES_OF_FUNCTION = 3, 8, 32


Function: TypeAlias = Callable[..., Tensor]
NamedInputs: TypeAlias = dict[tuple[str, str], Tensor]  # by role and name
# Of each input: role and name, the shape of its rows, dtype and device.
_InputKinds: TypeAlias = tuple[tuple[tuple[str, str], torch.Size, torch.dtype, torch.device], ...]
_Call: TypeAlias = tuple[CapturedMessage, tuple[Tensor, ...]]  # a message and its arguments
# A layer's `aggregate`, and the names of the arguments of `message` and of `aggregate`.
Aggregate: TypeAlias = tuple[Callable[..., object], tuple[str, ...], tuple[str, ...]]


def _entry(
    function: Function, edges: Tensor, nodes: Tensor, inputs: NamedInputs,
    other: dict[str, object], structure: tuple[str, ...], aggr: Aggregate | None, node_dim: int,
) -> Tensor:  # fmt: skip
    """What Dynamo traces: the message, and perhaps its aggregation, its inputs and results between
    markers."""
    torch._check(edges.size(0) > 1)  # Fewer are PyG's, see `check_inputs`.
    torch._check(nodes.size(0) > 0)
    values: dict[str, Any] = dict(other)
    parts: dict[str, list[object]] = {}
    for name in ('index', 'edge_index_i'):
        if name in structure:
            values[name] = torch.ops.pyg_fast_message.index(edges)
    if 'edge_index_j' in structure:
        values['edge_index_j'] = torch.ops.pyg_fast_message.source(edges)
    if 'edge_index' in structure:
        from_target = 'target_to_source' in structure
        values['edge_index'] = torch.ops.pyg_fast_message.edge_index(edges, from_target)
    for name in ('size_i', 'dim_size'):
        if name in structure:
            values[name] = nodes.size(0)
    for name in structure:
        if name.startswith('count '):
            values[name[6:]] = nodes.size(0)
    for (role, name), value in inputs.items():
        if role == 'row':
            lifted = torch.ops.pyg_fast_message.row(value, nodes.size(0), name)
        else:
            lifted = torch.ops.pyg_fast_message.lift(value, edges, role, name)
        is_moved = role != 'edge' or f'moved {name}' in structure
        if is_moved and -lifted.dim() < node_dim != 0:
            lifted = lifted.movedim(0, node_dim)
        name, _, part = name.partition('.')
        if part:
            parts.setdefault(name, list(values[name]))[int(part)] = lifted
        else:
            values[name] = lifted
    for name, several in parts.items():
        values[name] = tuple(several) if type(values[name]) is tuple else several
    if aggr is None:
        message = function(**values)
        if not isinstance(message, Tensor):
            raise Refused('message returns no tensor')
        if -message.dim() < node_dim != 0:
            message = message.movedim(node_dim, 0)
        return torch.ops.pyg_fast_message.end(message)
    aggregate, of_message, of_aggregate = aggr
    out: Any = aggregate(
        function(**{name: values[name] for name in of_message}),
        **{name: values[name] for name in of_aggregate},
    )
    container = 'tuple' if type(out) is tuple else 'list' if type(out) is list else ''
    outs = list(out) if container else [out]
    if type(out) is dict:
        container, outs = ' '.join(['dict', *out]), list(out.values())
    if not all(isinstance(x, Tensor) for x in outs):
        raise Refused('aggregate returns no tensor')
    return torch.ops.pyg_fast_message.end_of_rows(
        [x.movedim(node_dim, 0) if -x.dim() < node_dim != 0 else x for x in outs], container
    )


@lru_cache(maxsize=1024)
def _placeholders(kinds: _InputKinds, needs: tuple[bool, ...] | None) -> tuple[object, ...]:
    """Tensors that stand for the edges, their destinations and the inputs in a capture. `needs`
    says which inputs require gradients; None for all that can. The sizes of edges and destinations
    are unbacked: the message cannot compute with them, nor guards check them."""
    check_not_capturing()
    with torch.inference_mode(False):
        named = {
            key: torch.empty(
                (2, *shape), dtype=dtype, device=device,
                requires_grad=dtype.is_floating_point if needs is None else needs[k],
            )
            for k, (key, shape, dtype, device) in enumerate(kinds)
        }  # fmt: skip
        both = tuple(torch.empty(2, dtype=torch.int8, device=kinds[0][3]) for _ in range(2))
    for each in both:
        torch._dynamo.decorators.mark_unbacked(each, 0)
    return (*both, named)


_numbers = itertools.count()
_ARGUMENTS = _entry.__code__.co_varnames[: _entry.__code__.co_argcount]
# Dynamo's compiled entries of a code object, and its callback for frames. If torch lacks one of
# these private names, PyG's code runs.
try:
    from torch._C._dynamo.eval_frame import (
        _debug_get_cache_entry_list,
        get_eval_frame_callback,
        set_eval_frame,
    )
except ImportError:
    _debug_get_cache_entry_list = None  # type: ignore[assignment]
_DYNAMIC = pgo.auto_dynamic
_log = logging.getLogger('pyg_fast')
# Names by which code asks for the modes of a call: a capture for all modes cannot answer.
_MODE_NAMES = frozenset((
    'is_grad_enabled', 'is_inference_mode_enabled', 'is_inference', 'requires_grad', 'is_leaf',
    'grad_fn', 'grad',
))  # fmt: skip
# Paths of code that asks, and does the same either way.
_MODE_NEUTRAL = tuple(os.path.join(each.__path__[0], '') for each in (torch, torch_geometric.utils))


@contextmanager
def _dynamo_settings() -> Iterator[None]:
    """Dynamo's settings for a capture: floats that changed become arguments, and no profiler marks,
    which take half of the time of a call."""
    wanted = {
        'record_runtime_overhead': False, 'use_recursive_dict_tags_for_guards': False,
        'automatic_dynamic_shapes': True, 'assume_static_by_default': True,
        'specialize_float': False,
    }  # fmt: skip
    config = torch._dynamo.config
    with config.patch({name: value for name, value in wanted.items() if hasattr(config, name)}):
        yield


class _ReadsMode(Refused):
    """The message asks whether gradients are on."""


class _Modes:
    """The modes under which captures are made and checked: with gradients, without inference
    mode, and out of Dynamo's sight."""

    def __init__(self, as_called: bool) -> None:
        self.enables_grad = not as_called and not torch.is_grad_enabled()
        self.inference: torch.inference_mode | None = None
        self.callback: Any = None  # of Dynamo

    def __enter__(self) -> None:
        if get_eval_frame_callback() is not None:
            self.callback = set_eval_frame(None)
        if self.enables_grad:
            if torch.is_inference_mode_enabled():
                self.inference = torch.inference_mode(False)
                self.inference.__enter__()
            torch._C._set_grad_enabled(True)

    def __exit__(self, *error: object) -> None:
        if self.enables_grad:
            torch._C._set_grad_enabled(False)
            if self.inference is not None:
                self.inference.__exit__(*error)
        if self.callback is not None:
            set_eval_frame(self.callback)


_DISABLED = 'torch.compile is disabled, which captures the message'


def _check_stance() -> None:
    """Raises :class:`Fallback` where the user changed what Dynamo does."""
    if _debug_get_cache_entry_list is None:
        raise Fallback(f'PyTorch {torch.__version__} does not tell what it captured')
    stance = eval_frame._stance
    if stance.stance != 'default' or stance.backend is not None:
        raise Fallback(_DISABLED)
    if _symbolic_trace._is_fx_tracing_flag:
        with tracing:  # Perhaps another thread does, for a layer of ours.
            if _symbolic_trace._is_fx_tracing_flag:
                raise Fallback('torch.fx is tracing')


def _reads_mode(code: CodeType) -> bool:
    """Whether code asks for the modes of a call."""
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    return not names.isdisjoint(_MODE_NAMES) and not code.co_filename.startswith(_MODE_NEUTRAL)


def _user_name(source: str) -> str:
    """A source of Dynamo as the user would write it."""
    source = re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r'.\1', source)
    for pattern, name in (
        (r"L\['function'\]\.__self__\.", 'self.'), (r"L\['other'\]\['(\w+)'\]", r'\1'),
        (r"G\['__import_\w+'\]\.", 'global '), (r"G\['(\w+)'\]", r'global \1'),
    ):  # fmt: skip
        text, count = re.subn(f'^{pattern}', name, source)
        if count:
            return text
    return source.removeprefix("L['function'].")


def _message_name(function: Function) -> str:
    """The name of a message for the log."""
    owner = getattr(function, '__self__', None)
    name = getattr(function, '__name__', type(function).__name__)
    if owner is None:
        return name
    return f'{getattr(type(owner), "_base", type(owner)).__name__}.{name}'


# As Dynamo's module, whose own `call_size` turns Dynamo off, and on again.
_utils = types.SimpleNamespace(**{**vars(torch._dynamo.utils), 'call_size': Tensor.size})


def _without_switches(code: CodeType) -> Callable[..., Any]:
    """The function of code that Dynamo made. It is called while Dynamo is off: what it calls need
    not turn it off and on again, which takes longer than the rest."""
    known = _entry.__globals__
    scope = {name: known[name] for name in code.co_names if name in known}
    for name, value in scope.items():
        if value is torch._dynamo.utils:
            scope[name] = _utils
        elif isinstance(value, types.FunctionType):
            scope[name] = getattr(value, '_torchdynamo_orig_callable', value)
    return types.FunctionType(code, scope)


class _GuardedCapture:
    """What Dynamo compiled of a message, and the guards under which it serves a call."""

    def __init__(self) -> None:
        # Dynamo stores compiled code by code object, and numbers that changed by its name.
        self.code = _entry.__code__.replace(co_name=f'message_{next(_numbers)}')
        self.function: Callable[..., _Call]
        self.guards: Any = None  # a GuardManagerWrapper
        self.used = 0  # by the clock of its store
        self.read: dict[str, object] = {}  # numbers by source; `_DYNAMIC` are arguments

    def compile(
        self, call: tuple[object, ...], floats: dict[str, Any], request: CaptureRequest
    ) -> _Call:
        """Captures the message of a call. Those of `floats` that changed become arguments."""
        check_not_capturing()  # Dynamo reads the state of random numbers, which ends a capture.
        fresh = types.FunctionType(self.code, _entry.__globals__)
        compiled = torch.compile(fresh, fullgraph=True, backend=backend)
        by = pgo.CodeId.make(self.code)
        # The settings hold for all threads.
        with tracing, capture_for(request), _dynamo_settings():
            seen = pgo.get_code_state()[by].automatic_dynamic
            for name, value in floats.items():
                seen[name] = pgo.FrameStateSizeEntry(scalar=value)
            try:
                result = compiled(*call)
            except BackendCompilerFailed as error:
                raise error.inner_exception from None
            except NotImplementedError as error:
                if 'pyg_fast_message' in str(error):
                    raise Fallback(_DISABLED) from None
                raise Refused(describe_error(error)) from None
            except (RecursionError, Refused):
                raise
            except Exception as error:  # If it is the user's, PyG's code raises it.
                raise Refused(describe_error(error)) from None
            finally:
                self.read = _numbers_of(self.code)
                pgo.get_code_state().pop(by, None)
        entries = _debug_get_cache_entry_list(self.code)
        if len(entries) != 1 or entries[0].code is None:
            raise Refused('what message reads was freed while it was captured')
        self.guards = entries[0].guard_manager
        self.function = _without_switches(entries[0].code)
        return result

    def __del__(self) -> None:
        # Dynamo keeps guards as long as an object lives that they guard by address.
        if self.guards is not None:
            vars(self.guards).clear()
            self.guards.cache_entry = self.guards.extra_state = None

    def is_dropped(self) -> bool:
        """Whether Dynamo dropped it, as an object was freed that it guards by address."""
        return self.guards.cache_entry is None

    def accepts(self, scope: dict[str, object]) -> bool:
        """Whether the guards hold for the arguments of a call."""
        return not self.is_dropped() and self.guards.root.check(scope)


def _numbers_of(code: CodeType) -> dict[str, object]:
    """The numbers that the capture of a code object reads, by source."""
    seen = pgo.get_code_state()[pgo.CodeId.make(code)].automatic_dynamic
    numbers = {name: each.scalar for name, each in seen.items() if not isinstance(each.size, tuple)}
    return {name: value for name, value in numbers.items() if value is not pgo.auto_unset}


# By which a store finds captures: the inputs, which require gradients (None: any), the class of the
# layer, the number of attributes that the message sets, and the aggregations.
_Kind: TypeAlias = tuple[_InputKinds, tuple[bool, ...] | None, int, int, tuple[str, ...]]


class _CaptureStore:
    """The captures of messages of one code."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.by_kind: dict[_Kind, tuple[_GuardedCapture, ...]] = {}
        self.reads_mode = False  # whether the message asks for the modes of a call
        self.floats: dict[str, Any] = {}  # by source: the value of a capture, or `_DYNAMIC`
        self.constants: set[str] = set()  # sources of floats that no kernel takes as arguments
        self.refused: dict[object, str] = {}  # reasons, by what instances are made of
        self.clock = itertools.count(1)

    def add(self, kind: _Kind, capture: _GuardedCapture) -> None:
        with self.lock:
            capture.used = next(self.clock)
            others = self.by_kind.get(kind, ())
            self.by_kind[kind] = capture, *(each for each in others if not each.is_dropped())
            if sum(map(len, self.by_kind.values())) > _MAX_STORED:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        captures = ((each.used, kind) for kind, each_of in self.by_kind.items() for each in each_of)
        used, kind = min(captures, key=lambda pair: pair[0])
        rest = tuple([each for each in self.by_kind[kind] if each.used != used])
        self.by_kind[kind] = rest
        if not rest:
            del self.by_kind[kind]

    def refuse(self, key: object, reason: str) -> None:
        with self.lock:
            if len(self.refused) >= _MAX_STORED:
                self.refused.clear()
            self.refused[key] = reason


_stores: WeakKeyDictionary[object, _CaptureStore] = WeakKeyDictionary()  # by code
_stores_lock = threading.Lock()


def _code_of(function: Function) -> object:
    return getattr(function, '__code__', function)


def _store_for(code: object) -> _CaptureStore:
    with _stores_lock:
        if code not in _stores:
            _stores[code] = _CaptureStore()
        return _stores[code]


@lru_cache(maxsize=1024)
def _passes_for(
    captured: CapturedMessage, reduces: tuple[str, ...], keeps_maps: bool = False
) -> Passes:
    return Passes(make_plan(captured, reduces, keeps_maps))


class _Changes(Refused):
    """A number has another value at each capture."""


class Entry:
    """The guarded call of the messages of a layer, or of a function: captured on the first call,
    and whenever no capture's guards hold."""

    def __init__(self, num_writes: int = 0) -> None:
        self.num_writes = num_writes
        self.refused: dict[object, str] = {}  # reasons, by the key of the call; None: all calls
        self.num_captures = 0
        self.numbers: dict[str, list[object]] = {}  # values that captures read, by source
        self.last: Plan | None = None
        self.code: Callable[[], object] = lambda: None  # a weak reference
        self.store = _CaptureStore()
        # By kind of the call: the capture that served last, and placeholders of its inputs.
        self.recent: dict[_Kind, tuple[_GuardedCapture, tuple[object, ...]]] = {}

    def _check(
        self, capture: _GuardedCapture, reduces: tuple[str, ...], owner: object,
        captured: CapturedMessage, codes: Sequence[CodeType] | None,
    ) -> None:  # fmt: skip
        """Raises :class:`Refused` before a capture is used."""
        check_not_capturing()
        if not self.store.reads_mode and (codes is None or any(map(_reads_mode, codes))):
            raise _ReadsMode
        for source, value in _numbers_of(capture.code).items():
            most = _MAX_VALUES_OF_FUNCTION if owner is None else _MAX_VALUES
            if source.startswith("L['other']"):
                most = _MAX_VALUES_OF_ARGUMENT
            values = self.numbers.setdefault(source, [])
            if type(value) in (int, float) and value not in values:
                values.append(value)
                if len(values) >= most:
                    raise _Changes(f'a number that changes: {_user_name(source)}')
        self.num_captures += 1
        if self.num_captures > _MAX_CAPTURES:
            raise _Changes(f'a message that changed {_MAX_CAPTURES} times')
        _passes_for(captured, reduces)

    def _capture(
        self, function: Function, reduces: tuple[str, ...], inputs: NamedInputs, *rest: object
    ) -> _Call:
        """The message and its arguments, from a capture whose guards hold, or from a new one.

        Checks the guards as Dynamo does, but without its evaluation of the frame, which takes
        several times as long.
        """
        code = _code_of(function)
        if self.code() is not code:
            self.code, self.store = ref(code), _store_for(code)
        store, owner = self.store, getattr(function, '__self__', None)
        kinds = tuple([(key, x.shape[1:], x.dtype, x.device) for key, x in inputs.items()])
        needs: tuple[bool, ...] | None = None
        if store.reads_mode:
            needs = tuple([x.requires_grad for x in inputs.values()])
        kind = kinds, needs, id(type(owner)), self.num_writes, reduces
        last, placeholders = self.recent.get(kind) or (None, _placeholders(kinds, needs))
        call = (function, *placeholders, *rest)
        _check_stance()
        with _Modes(store.reads_mode):
            scope = dict(zip(_ARGUMENTS, call))  # noqa: B905
            if last is not None and last.accepts(scope):
                return last.function(*call)
            for capture in store.by_kind.get(kind, ()):
                if capture.accepts(scope):
                    capture.used = next(store.clock)
                    self._remember(kind, capture, placeholders)
                    return capture.function(*call)
            with suppress(_ReadsMode):
                return self._capture_or_refuse(kind, call, rest, owner)
        store.reads_mode = True
        return self._capture(function, reduces, inputs, *rest)

    def _capture_or_refuse(
        self, kind: _Kind, call: tuple[object, ...], rest: tuple[object, ...], owner: object
    ) -> _Call:
        """Captures a message, unless the store refused it for an instance that is made alike."""
        store = self.store
        if store.refused:
            reason = store.refused.get((kind, _dtype_settings(), _fingerprint((call[0], *rest))))
            if reason is not None:
                raise Refused(reason)
        try:
            return self._capture_new(kind, call, owner)
        except (_ReadsMode, _Changes):
            raise
        except Refused as error:
            key = kind, _dtype_settings(), _fingerprint((call[0], *rest))
            store.refuse(key, str(error))
            raise

    def _remember(
        self, kind: _Kind, capture: _GuardedCapture, placeholders: tuple[object, ...]
    ) -> None:
        if len(self.recent) >= _MAX_STORED:
            self.recent.clear()
        self.recent[kind] = capture, placeholders

    def _capture_new(self, kind: _Kind, call: tuple[Any, ...], owner: object) -> _Call:
        if torch._dynamo.config.disable:
            raise Fallback(_DISABLED)
        store, start, capture = self.store, time.perf_counter(), _GuardedCapture()
        check = partial(self._check, capture, kind[-1], owner)
        request = CaptureRequest(check, owner, self.num_writes)
        with store.lock:
            floats = dict(store.floats)
        try:
            result = capture.compile(call, floats, request)
        except (_ReadsMode, _Changes):
            raise
        except Refused:
            changed = {name for name, value in capture.read.items() if value is _DYNAMIC}
            if changed <= store.constants:
                raise
            with store.lock:  # Capture them as constants: perhaps no kernel takes such arguments.
                store.constants |= changed
                for name in changed:
                    store.floats.pop(name, None)
            return self._capture_new(kind, call, owner)
        with store.lock:
            for name, value in capture.read.items():
                if name not in store.constants and (value is _DYNAMIC or type(value) is float):
                    store.floats[name] = value
            store.add(kind, capture)
        self._remember(kind, capture, call[1:4])
        _log.info('captured %s in %.2f s', _message_name(call[0]), time.perf_counter() - start)
        return result

    @property
    def text(self) -> str | None:
        """A description of the plan of the last call."""
        return None if self.last is None else describe(self.last)

    @property
    def in_blocks(self) -> bool:
        """Whether the last message ran over blocks of edges."""
        return self.last is not None and self.last.in_blocks

    def __call__(
        self, function: Function, graph: Callable[[bool], Graph], reduces: tuple[str, ...],
        inputs: NamedInputs, other: dict[str, object], structure: tuple[str, ...] = (),
        aggr: Aggregate | None = None, node_dim: int = 0, num_edges: int | None = None,
        only_read: bool = False,
    ) -> tuple[list[Tensor], str]:  # fmt: skip
        """The aggregated message, for each of `reduces`; or what `aggr` returns, and in which
        container: none, `tuple`, `list`, or `dict` with its keys.

        Args:
            function: The message.
            graph: Makes the graph, with its transpose on request.
            reduces: `sum`, `mean`, `max`, `min` or `var`; none with `aggr`.
            inputs: Inputs by role (`src`, `dst`, `edge`; `row` for one of destinations that
                `aggr` takes) and name of the argument.
            other: All other arguments.
            structure: Which of `index`, `edge_index`, `edge_index_i`, `edge_index_j`, `size_i` and
                `dim_size` the message or `aggr` takes; `target_to_source` for this flow; `moved`
                with the name of an input of edges that had them at `node_dim`; and `count` with
                that of an argument that is the number of destinations.
            aggr: What aggregates in place of `reduces`.
            node_dim: The dimension of edges in the values of the message. Inputs and result of the
                entry have nodes and edges first.
            num_edges: If given, a message that runs over blocks of edges, and of so many over only
                one, falls back.
            only_read: Whether nobody writes into the result: the backward pass may read it.

        Raises:
            Fallback: If no kernel can compute it.
        """
        if self.refused:
            self._raise_refused(function, reduces, inputs, other)
        device = next(iter(inputs.values())).device
        try:
            captured, args = self._capture(
                function, reduces, inputs, other, structure, aggr, node_dim
            )
            if captured.most_nodes < sys.maxsize and graph(False).num_dst > captured.most_nodes:
                raise Fallback(f'a number of nodes in message, {captured.most_nodes}, is too small')
            if captured.numbers and device.type != 'cpu':
                args = _to_device(args, captured.numbers, device)
            passes = captured.passes.get(reduces)
            if passes is None:
                passes = captured.passes[reduces] = _passes_for(captured, reduces)
            trains = torch.is_grad_enabled()
            if num_edges is not None and trains and keeps_maps(passes, num_edges, device):
                passes = _passes_for(captured, reduces, True)
            self.last = passes.plan
            if num_edges is not None and passes.plan.in_blocks:
                _check_several_blocks(passes.plan, num_edges, device)
            if num_edges is not None and is_slower_in_tiles(passes, num_edges, trains, device):
                raise InMemory(SLOWER_IN_TILES)
            if num_edges is not None and trains and passes.derives_twice:
                _check_derives_twice(passes.plan, num_edges, device)
            outs = run(passes, graph, args, inputs, device, only_read)
            if captured.writes:
                outs = _set_attributes(function, outs, len(captured.writes))
            return outs, '' if captured.rows is None else captured.rows.container
        except _Changes as error:
            reason = f'{error}{line_of(function, str(error).partition(": ")[2])}'
            self.refused[None] = reason
            _warn_once(function, reason)
        except Refused as error:
            reason = _in_users_terms(function, _with_columns(inputs, str(error)))
        except RecursionError:
            reason = 'too many operations'
        self.refused[self._refusal_key(function, reduces, inputs, other)] = reason
        raise Fallback(reason)

    def _raise_refused(
        self, function: Function, reduces: tuple[str, ...], inputs: NamedInputs,
        other: dict[str, object],
    ) -> None:  # fmt: skip
        """Raises :class:`Fallback` if the entry refused such a call before, or too many calls."""
        reason = self.refused.get(None)
        if reason is None:
            reason = self.refused.get(self._refusal_key(function, reduces, inputs, other))
        if reason is None and len(self.refused) >= _MAX_REFUSALS:
            reason = next(reversed(self.refused.values()))
        if reason is not None:
            raise Fallback(reason)

    def _refusal_key(
        self, function: Function, reduces: tuple[str, ...], inputs: NamedInputs,
        other: dict[str, object],
    ) -> object:  # fmt: skip
        """Cache key of a refusal."""
        owner = getattr(function, '__self__', None)
        return (
            reduces, getattr(owner, 'training', None),
            self.store.reads_mode and torch.is_grad_enabled(), _dtype_settings(),
            *((key, x.dtype, x.shape[1:], x.device) for key, x in inputs.items()),
            *((name, (x.dtype, x.shape) if isinstance(x, Tensor) else str(x))
              for name, x in other.items()),
        )  # fmt: skip


def _in_users_terms(function: Function, reason: str) -> str:
    """The reason for a refusal, with the line that Dynamo does not name."""
    what, _, place = reason.partition(' (File ')
    # What is refused then is what Dynamo makes of NumPy's functions.
    if 'numpy' in getattr(_code_of(function), 'co_names', ()):
        return f'message converts to NumPy{line_of(function, ".numpy")}'
    if what == READS_VALUE and re.search(r'\bnp\.\w', place):
        return reason.replace(what, 'message calls NumPy', 1)
    if what == READS_VALUE and 'one_hot(' in place:
        return reason.replace(what, 'message calls one_hot without the number of classes', 1)
    if ': assert ' in place:
        return reason.replace(what, 'message asserts what edges have', 1)
    if what.endswith('used as a number') and not place:
        found = {line_of(function, name) for name in ('.size', '.shape', '.numel', 'len')} - {''}
        return what + found.pop() if len(found) == 1 else what
    return reason


def _with_columns(inputs: NamedInputs, reason: str) -> str:
    """The reason for a refusal, with the name of numbers that are a column: rows of a table by them
    have one dimension more, and combine all edges with all."""
    for (role, name), value in inputs.items():
        if role == 'edge' and value.shape[1:] == (1,) and value.dtype in (torch.int64, torch.int32):
            words = f" mixes edges, perhaps as '{name}' has shape [num_edges, 1]"
            return reason.replace(' mixes edges', words, 1)
    return reason


def _to_device(
    args: tuple[Tensor, ...], which: tuple[int, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """The arguments of a message, with numbers as tensors of the device."""
    return tuple(
        torch.full((), x.item(), dtype=x.dtype, device=device) if k in which else x
        for k, x in enumerate(args)
    )


def _warn_once(function: Function, reason: str) -> None:
    """Warns of a message that changes at its calls, once for each reason."""
    title = _message_name(function)
    if (title, reason) not in _warned and len(_warned) < _MAX_STORED:
        _warned.add((title, reason))
        warnings.warn(
            f"{title}: {reason}. PyG's code runs it from now on; a kernel could read a tensor "
            'in place of the number',
            stacklevel=2,
        )


_warned: set[tuple[str, str]] = set()


def _set_attributes(function: Function, outs: list[Tensor], count: int) -> list[Tensor]:
    """Gives the attributes that a message set their values of edges, the last `count` of the
    results; returns the other ones."""
    own: dict[str, object] = getattr(function, '__self__').__dict__  # noqa: B009
    names = {name: value for name, value in own.items() if isinstance(value, Written)}
    order = sorted({value.place for value in names.values()})
    written = dict(zip(order, outs[-count:], strict=True))
    for name, value in names.items():
        own[name] = written[value.place]
    return outs[:-count]


def _check_several_blocks(plan: Plan, num_edges: int, device: torch.device) -> None:
    """Raises :class:`InMemory` where PyG's code is faster, as its tensors fit into memory."""
    most, what = edges_per_block(plan, device), _what_has_no_tiles(plan)
    if num_edges <= most:
        raise InMemory(
            f'{what} runs over blocks of {most} edges to save memory, and there are {num_edges}'
        )
    if runs_pygs_code() and fits_memory(plan, num_edges, device):
        raise InMemory(
            f'{what} runs over blocks only where tensors of all edges do not fit into memory'
        )


def _check_derives_twice(plan: Plan, num_edges: int, device: torch.device) -> None:
    """Raises :class:`InMemory` where PyG's code computes second derivatives, as of energies whose
    forces are trained: ours computes the message by torch's operators again."""
    if runs_pygs_code() and fits_memory(plan, num_edges, device):
        raise InMemory(SLOWER_TWICE)


def _what_has_no_tiles(plan: Plan) -> str:
    """Why blocks would run a message with linear maps of each edge, and no kernel over tiles."""
    if plan.softmaxes and plan.on_cuda:
        return 'a softmax of linear maps of each edge'
    if 'var' in plan.reduces:
        return 'a variance of linear maps of each edge'
    return 'a linear map of values computed for each edge'


def _dtype_settings() -> tuple[object, ...]:
    """The global settings that decide the dtypes of results."""
    autocast = [torch.is_autocast_enabled(device) for device in ('cpu', 'cuda')]
    return (*autocast, torch.get_default_dtype())


def _fingerprint(value: object, depth: int = 0) -> object:
    """A key of all that a message may read of a layer, without references to the layer's objects:
    layers of equal keys are refused for the same reason."""
    if isinstance(value, (int, float, str, torch.dtype, torch.device, type(None))):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.requires_grad
    if depth > 8 or (isinstance(value, (tuple, list, dict)) and len(value) > 64):
        return type(value).__name__
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(_fingerprint(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return tuple((str(key), _fingerprint(each, depth + 1)) for key, each in value.items())
    if isinstance(value, torch.nn.Module):
        state = {key: each for key, each in vars(value).items() if key not in OWN}
        return id(type(value)), _fingerprint(state, depth + 1)
    if isinstance(value, partial):
        return 'partial', _fingerprint((value.func, value.args, value.keywords), depth + 1)
    if not hasattr(value, '__code__'):
        # Functions in C, as torch's and NumPy's, have names; other objects only those of classes.
        names = [getattr(value, name, None) for name in ('__module__', '__qualname__', '__name__')]
        return type(value).__name__, *map(str, names)
    cells = _closure_values(value)
    own = getattr(value, '__self__', None), getattr(value, '__defaults__', None), cells
    return id(_code_of(value)), _fingerprint(own, depth + 1)  # type: ignore[arg-type]


def _closure_values(function: object) -> list[object]:
    """The values that a function closes over."""
    out = []
    for each in getattr(function, '__closure__', None) or ():
        with suppress(ValueError):  # It is empty.
            out.append(each.cell_contents)
    return out
