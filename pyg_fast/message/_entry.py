"""The guarded call of a message.

All captures of messages of one code are in one store (:class:`_Captures`), whichever layers made
them: a second layer of a class finds those of the first. The guards of Dynamo alone decide whether
a capture serves a call: they check all that the message read, such as numbers, modules and the
shapes and types of parameters. The store only makes the search short: by class, aggregation, and
names, shapes, types and device of the inputs. A layer tries the capture first that served it last.

A store holds a limited number of captures; the one that was found least recently leaves first.
Each has its own code object, which Dynamo compiles once: its limit on compilations of a code object
is never reached, and what leaves the store is freed. One backend serves all captures and holds no
layer; layers hold captures, and captures no layer.

Captures are made, and their guards checked, with gradients and for inputs that require them, also
under ``no_grad`` and in inference mode: a capture serves training and evaluation. Where the code
asks for these modes itself (`_ASKS`), they are those of the call instead.

Numbers are constants at first. A float that differs from that of an earlier capture becomes an
argument of the kernel, where one takes it. A layer with another number that changes at its calls is
PyG's from the third value on.
"""

import itertools
import logging
import os
import re
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch_geometric
from torch import Tensor
from torch._dynamo import eval_frame, pgo
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch.fx import _symbolic_trace

from ..graph.small_graphs import runs_pygs_code
from ..sparse.graph import Graph
from ._blocks import edges_of_block, fits
from ._capture import Captured, Request, backend, requested
from ._cuda import check_not_capturing
from ._fallback import OWN, Fallback, InMemory
from ._ir import Refused
from ._passes import Passes
from ._plan import Plan, describe, plan
from ._run import run
from ._trace import one_line, tracing

# Before 2.13, Dynamo does not notice a function of the same code and other defaults.
torch._dynamo.config.skip_guards_on_constant_func_defaults = False
# Likewise hooks of modules that message calls.
torch._dynamo.config.skip_nnmodule_hook_guards = False
# Refusals of an entry, by its inputs. After so many it captures nothing more.
_MOST_REFUSALS = 32
_MOST_CAPTURES = 64
# Captures of a code that are kept.
_MOST_STORED = 256
# At this value of a number that changes, PyG's code runs from then on.
_MOST_VALUES = 3
_MOST_VALUES_OF_ARGUMENT = 8  # A layer may propagate with the same few again and again.
_MOST_VALUES_OF_FUNCTION = 32  # All functions of one code count together.


def _entry(
    function: Any, edges: Tensor, nodes: Tensor, inputs: dict[tuple[str, str], Tensor],
    other: dict[str, Any], structure: tuple[str, ...], aggr: Any, node_dim: int,
) -> Tensor:  # fmt: skip
    torch._check(edges.size(0) > 1)  # Fewer are PyG's, see `check_inputs`.
    values = dict(other)
    for name in ('index', 'edge_index_i'):
        if name in structure:
            values[name] = torch.ops.pyg_fast_message.index(edges)
    for name in ('size_i', 'dim_size'):
        if name in structure:
            values[name] = nodes.size(0)
    for (role, name), value in inputs.items():
        lifted = torch.ops.pyg_fast_message.lift(value, edges, role, name)
        if role != 'edge' and node_dim not in (0, -lifted.dim()):
            lifted = lifted.movedim(0, node_dim)
        values[name] = lifted
    out = function(**values)
    if aggr is not None:
        out = aggr(out, torch.ops.pyg_fast_message.index(edges), None, nodes.size(0), node_dim)
    if -out.dim() < node_dim != 0:
        out = out.movedim(node_dim, 0)
    if aggr is not None:
        return torch.ops.pyg_fast_message.end_of_sum(out)
    return torch.ops.pyg_fast_message.end(out)


# By name of an argument: its role, and the shape of its rows, its type and its device.
Inputs = tuple[tuple[tuple[str, str], torch.Size, torch.dtype, torch.device], ...]


@lru_cache(maxsize=1024)
def _stand_ins(kind: Inputs, needs: tuple[bool, ...] | None) -> tuple[Any, ...]:
    """Stand for the edges, their destinations and the inputs in the capture, which reads no number
    of them. `needs` says which require gradients; None for all that can. The sizes of the first two
    are no numbers that the capture could use or check."""
    check_not_capturing()
    with torch.inference_mode(False):
        named = {
            key: torch.empty(
                (2, *shape), dtype=dtype, device=device,
                requires_grad=dtype.is_floating_point if needs is None else needs[k],
            )
            for k, (key, shape, dtype, device) in enumerate(kind)
        }  # fmt: skip
        both = tuple(torch.empty(2, dtype=torch.int8, device=kind[0][3]) for _ in range(2))
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
# What code asks for that a capture for all modes cannot answer.
_ASKS = frozenset((
    'is_grad_enabled', 'is_inference_mode_enabled', 'is_inference', 'requires_grad', 'is_leaf',
    'grad_fn', 'grad',
))  # fmt: skip
# Code that asks, and does the same either way.
_SAME = tuple(os.path.join(each.__path__[0], '') for each in (torch, torch_geometric.utils))


@contextmanager
def _settings() -> Iterator[None]:
    """Dynamo's settings for a capture. Without its profiler marks, which take half of the time of a
    call; and floats that changed become arguments."""
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
        self.changes = not as_called and not torch.is_grad_enabled()
        self.inference: Any = None
        self.callback: Any = None

    def __enter__(self) -> None:
        if get_eval_frame_callback() is not None:
            self.callback = set_eval_frame(None)
        if self.changes:
            if torch.is_inference_mode_enabled():
                self.inference = torch.inference_mode(False)
                self.inference.__enter__()
            torch._C._set_grad_enabled(True)

    def __exit__(self, *error: Any) -> None:
        if self.changes:
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


def _asks(code: Any) -> bool:
    """Whether code asks for the modes of a call."""
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    return not names.isdisjoint(_ASKS) and not code.co_filename.startswith(_SAME)


def _name_of(source: str) -> str:
    """What a user calls what Dynamo has by its source."""
    source = re.sub(r"\._(?:modules|buffers|parameters)\['(\w+)'\]", r'.\1', source)
    for pattern, name in (
        (r"L\['function'\]\.__self__\.", 'self.'), (r"L\['other'\]\['(\w+)'\]", r'\1'),
        (r"G\['__import_\w+'\]\.", 'global '), (r"G\['(\w+)'\]", r'global \1'),
    ):  # fmt: skip
        found, count = re.subn(f'^{pattern}', name, source)
        if count:
            return found
    return source.removeprefix("L['function'].")


def _title(function: Any) -> str:
    """The name of a message for the log."""
    owner = getattr(function, '__self__', None)
    name = getattr(function, '__name__', type(function).__name__)
    if owner is None:
        return name
    return f'{getattr(type(owner), "_base", type(owner)).__name__}.{name}'


class _Capture:
    """A message that Dynamo compiled once, and the guards under which that serves a call."""

    def __init__(self) -> None:
        # Dynamo keeps what it compiled by code object, and facts by its name: one for each capture.
        self.code = _entry.__code__.replace(co_name=f'message_{next(_numbers)}')
        self.function: Any = None
        self.guards: Any = None
        self.used = 0
        self.read: dict[str, Any] = {}  # numbers by source; `_DYNAMIC` are arguments

    def make(
        self, call: tuple[Any, ...], floats: dict[str, Any], request: Request
    ) -> tuple[Captured, tuple[Any, ...]]:
        """The message and its arguments. Those of `floats` that changed become arguments."""
        check_not_capturing()  # Dynamo reads the state of random numbers, which ends a capture.
        fresh = types.FunctionType(self.code, _entry.__globals__)
        compiled = torch.compile(fresh, fullgraph=True, backend=backend)
        by = pgo.CodeId.make(self.code)
        with tracing, requested(request), _settings():  # These settings hold for all threads.
            seen = pgo.get_code_state()[by].automatic_dynamic
            for name, value in floats.items():
                seen[name] = pgo.FrameStateSizeEntry(scalar=value)
            try:
                found = compiled(*call)
            except BackendCompilerFailed as error:
                raise error.inner_exception from None
            except NotImplementedError as error:
                if 'pyg_fast_message' in str(error):
                    raise Fallback(_DISABLED) from None
                raise Refused(_reason(error)) from None
            except (RecursionError, Refused):
                raise
            except Exception as error:  # If it is the user's, PyG's code raises it.
                raise Refused(_reason(error)) from None
            finally:
                self.read = _numbers_of(self.code)
                pgo.get_code_state().pop(by, None)
        entries = _debug_get_cache_entry_list(self.code)
        if len(entries) != 1 or entries[0].code is None:
            raise Refused('what message reads was freed while it was captured')
        self.guards = entries[0].guard_manager
        self.function = types.FunctionType(entries[0].code, _entry.__globals__)
        return found

    def __del__(self) -> None:
        # Dynamo keeps guards for as long as any object lives that they know by its address.
        if self.guards is not None:
            vars(self.guards).clear()
            self.guards.cache_entry = self.guards.extra_state = None

    def is_dropped(self) -> bool:
        """Whether Dynamo dropped it, since an object was freed that it guards by address."""
        return self.guards.cache_entry is None

    def serves(self, scope: dict[str, Any]) -> bool:
        """Whether the guards hold for the arguments of a call."""
        return not self.is_dropped() and self.guards.root.check(scope)


def _numbers_of(code: Any) -> dict[str, Any]:
    """The numbers that the capture of a code object reads, by source."""
    seen = pgo.get_code_state()[pgo.CodeId.make(code)].automatic_dynamic
    numbers = {name: each.scalar for name, each in seen.items() if not isinstance(each.size, tuple)}
    return {name: value for name, value in numbers.items() if value is not pgo.auto_unset}


class _Captures:
    """The captures of messages of one code."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.found: dict[Any, tuple[_Capture, ...]] = {}
        self.asks = False  # whether the message asks for the modes of a call
        self.floats: dict[str, Any] = {}  # by source: the value of a capture, or that it changes
        self.constants: set[str] = set()  # sources of floats that no kernel takes as arguments
        self.refused: dict[Any, str] = {}  # by what instances are made of
        self.clock = itertools.count(1)

    def add(self, kind: Any, capture: _Capture) -> None:
        with self.lock:
            capture.used = next(self.clock)
            known = self.found.get(kind, ())
            self.found[kind] = (capture, *(each for each in known if not each.is_dropped()))
            if sum(map(len, self.found.values())) > _MOST_STORED:
                oldest = min((each.used, key) for key in self.found for each in self.found[key])
                rest = [each for each in self.found[oldest[1]] if each.used != oldest[0]]
                self.found[oldest[1]] = tuple(rest)
                if not rest:
                    del self.found[oldest[1]]


_stores: WeakKeyDictionary[Any, _Captures] = WeakKeyDictionary()
_stores_lock = threading.Lock()


def _code_of(function: Any) -> Any:
    return getattr(getattr(function, '__func__', function), '__code__', function)


def _store_of(code: Any) -> _Captures:
    with _stores_lock:
        if code not in _stores:
            _stores[code] = _Captures()
        return _stores[code]


@lru_cache(maxsize=1024)
def _planned(captured: Captured, reduces: tuple[str, ...]) -> Passes:
    return Passes(plan(captured, reduces))


class _Changes(Refused):
    """A number has another value at each capture."""


class Entry:
    """The messages of a layer, or of a function: captured on the first call, and whenever what they
    read is what no capture read before."""

    def __init__(self, num_writes: int = 0) -> None:
        self.num_writes = num_writes
        self.refused: dict[Any, str] = {}  # None for all calls
        self.num_captures = 0
        self.numbers: dict[str, list[Any]] = {}  # values that captures read, by source
        self.last: Plan | None = None
        self.code: Any = lambda: None  # a weak reference
        self.store = _Captures()
        # What served last, and the stand-ins of its inputs, by kind of the call.
        self.served: dict[Any, tuple[_Capture, tuple[Any, ...]]] = {}

    def _check(
        self, capture: _Capture, reduces: tuple[str, ...], owner: Any, captured: Captured,
        codes: Sequence[Any] | None,
    ) -> None:  # fmt: skip
        """Raises :class:`Refused` before a capture is used."""
        check_not_capturing()
        if not self.store.asks and (codes is None or any(map(_asks, codes))):
            raise _ReadsMode
        for source, value in _numbers_of(capture.code).items():
            most = _MOST_VALUES_OF_FUNCTION if owner is None else _MOST_VALUES
            if source.startswith("L['other']"):
                most = _MOST_VALUES_OF_ARGUMENT
            values = self.numbers.setdefault(source, [])
            if type(value) in (int, float) and value not in values:
                values.append(value)
                if len(values) >= most:
                    raise _Changes(f'a number that changes: {_name_of(source)}')
        self.num_captures += 1
        if self.num_captures > _MOST_CAPTURES:
            raise _Changes(f'a message that changed {_MOST_CAPTURES} times')
        _planned(captured, reduces)

    def _capture(
        self, function: Any, reduces: tuple[str, ...], inputs: dict[tuple[str, str], Tensor],
        *rest: Any,
    ) -> tuple[Captured, tuple[Any, ...]]:  # fmt: skip
        """The message and its arguments, from a capture whose guards hold, or from a new one.

        Checks the guards as Dynamo does, but without its evaluation of the frame, which takes
        several times as long.
        """
        code = _code_of(function)
        if self.code() is not code:
            self.code, self.store = ref(code), _store_of(code)
        store, owner = self.store, getattr(function, '__self__', None)
        shapes = tuple([(key, x.shape[1:], x.dtype, x.device) for key, x in inputs.items()])
        modes: Any = None
        if store.asks:
            modes = tuple([x.requires_grad for x in inputs.values()])
        kind = shapes, modes, id(type(owner)), self.num_writes, reduces
        last, stand_ins = self.served.get(kind) or (None, _stand_ins(shapes, modes))
        call = (function, *stand_ins, *rest)
        _check_stance()
        with _Modes(store.asks):
            scope = dict(zip(_ARGUMENTS, call))  # noqa: B905
            if last is not None and last.serves(scope):
                return last.function(*call)
            for capture in store.found.get(kind, ()):
                if capture.serves(scope):
                    capture.used = next(store.clock)
                    self._serve(kind, capture, stand_ins)
                    return capture.function(*call)
            refusal = None
            if store.refused:
                refusal = store.refused.get((kind, _precision(), _makeup((function, *rest))))
            if refusal is not None:
                raise Refused(refusal)
            try:
                return self._make(kind, call, reduces, owner)
            except _ReadsMode:
                store.asks = True
            except _Changes:
                raise
            except Refused as error:
                with store.lock:
                    if len(store.refused) >= _MOST_STORED:
                        store.refused.clear()
                    store.refused[kind, _precision(), _makeup((function, *rest))] = str(error)
                raise
        return self._capture(function, reduces, inputs, *rest)

    def _serve(self, kind: Any, capture: _Capture, stand_ins: tuple[Any, ...]) -> None:
        if len(self.served) >= _MOST_STORED:
            self.served.clear()
        self.served[kind] = capture, stand_ins

    def _make(
        self, kind: Any, call: tuple[Any, ...], reduces: tuple[str, ...], owner: Any
    ) -> tuple[Captured, tuple[Any, ...]]:
        """Captures a message."""
        if torch._dynamo.config.disable:
            raise Fallback(_DISABLED)
        store, start, capture = self.store, time.perf_counter(), _Capture()
        request = Request(partial(self._check, capture, reduces, owner), self.num_writes)
        with store.lock:
            floats = dict(store.floats)
        try:
            found = capture.make(call, floats, request)
        except (_ReadsMode, _Changes):
            raise
        except Refused:
            changed = {name for name, value in capture.read.items() if value is _DYNAMIC}
            if changed <= store.constants:
                raise
            with store.lock:  # Perhaps no kernel takes them as arguments.
                store.constants |= changed
                for name in changed:
                    store.floats.pop(name, None)
            return self._make(kind, call, reduces, owner)
        with store.lock:
            for name, value in capture.read.items():
                if name not in store.constants and (value is _DYNAMIC or type(value) is float):
                    store.floats[name] = value
            store.add(kind, capture)
        self._serve(kind, capture, call[1:4])
        _log.info('captured %s in %.2f s', _title(call[0]), time.perf_counter() - start)
        return found

    @property
    def text(self) -> str | None:
        """What the plan of the last call made of the message."""
        return None if self.last is None else describe(self.last)

    @property
    def in_blocks(self) -> bool:
        """Whether the last message ran over blocks of edges."""
        return self.last is not None and self.last.in_blocks

    def __call__(
        self,
        function: Any,
        graph: Callable[[bool], Graph],
        reduces: tuple[str, ...],
        inputs: dict[tuple[str, str], Tensor],
        other: dict[str, Any],
        structure: tuple[str, ...] = (),
        aggr: Any = None,
        node_dim: int = 0,
        num_edges: int | None = None,
        only_read: bool = False,
    ) -> list[Tensor]:
        """The aggregated message.

        Args:
            function: The message.
            graph: Makes the graph, with its transpose on request.
            reduces: `sum`, `mean`, `max`, `min` or `var`.
            inputs: Inputs by role (`src`, `dst`, `edge`) and name of the argument.
            other: All other arguments.
            structure: Which of `index`, `edge_index_i`, `size_i` and `dim_size` the message takes,
                for its softmax.
            aggr: A module that aggregates in place of `reduces`, by a sum.
            node_dim: The dimension of edges in the values of the message. Inputs and result of the
                entry have nodes and edges first.
            num_edges: With it, a message that needs blocks of edges and has one is PyG's.
            only_read: Whether nobody writes into the result: the backward pass may read it.

        Raises:
            Fallback: If no kernel can compute it.
        """
        if self.refused:
            known = self.refused.get(None)
            if known is None:
                known = self.refused.get(_kind(function, reduces, inputs, other, self.store.asks))
            if known is None and len(self.refused) >= _MOST_REFUSALS:
                known = next(reversed(self.refused.values()))
            if known is not None:
                raise Fallback(known)
        device = next(iter(inputs.values())).device
        try:
            captured, args = self._capture(
                function, reduces, inputs, other, structure, aggr, node_dim
            )
            if captured.numbers and device.type != 'cpu':
                args = tuple([
                    torch.full((), x.item(), dtype=x.dtype, device=device)
                    if k in captured.numbers else x
                    for k, x in enumerate(args)
                ])  # fmt: skip
            passes = captured.plans.get(reduces)
            if passes is None:
                passes = captured.plans[reduces] = _planned(captured, reduces)
            self.last = passes.plan
            if num_edges is not None and passes.plan.in_blocks:
                _check_several_blocks(passes.plan, num_edges, device)
            seed = None
            if passes.plan.num_dropouts:
                seed = torch.randint(2**62, (1,), device=device)
            return run(passes, graph, args, inputs, seed, only_read)
        except _Changes as error:
            self.refused[None] = reason = str(error)
            _warn(function, reason)
        except Refused as error:
            reason = str(error)
        except RecursionError:
            reason = 'too many operations'
        self.refused[_kind(function, reduces, inputs, other, self.store.asks)] = reason
        raise Fallback(reason)


def _warn(function: Any, reason: str) -> None:
    """Warns once of a message that changes at its calls."""
    title = _title(function)
    if (title, reason) not in _warned and len(_warned) < _MOST_STORED:
        _warned.add((title, reason))
        warnings.warn(
            f"{title}: {reason}. PyG's code runs it from now on; a kernel could read a tensor "
            'in place of the number',
            stacklevel=2,
        )


_warned: set[tuple[str, str]] = set()


def _check_several_blocks(plan: Plan, num_edges: int, device: torch.device) -> None:
    """PyG's code is faster where its tensors of all edges fit into memory."""
    most = edges_of_block(plan, device)
    if num_edges <= most:
        raise InMemory(
            f'a linear map of values computed for each edge runs over blocks of {most} edges, and '
            f'there are {num_edges}'
        )
    if runs_pygs_code() and fits(plan, num_edges, device):
        raise InMemory(
            'a linear map of values computed for each edge runs over blocks only where tensors of '
            'all edges do not fit into memory'
        )


def _kind(function: Any, reduces: tuple, inputs: dict, other: dict, asks: bool) -> Any:
    """What a refusal holds for."""
    owner = getattr(function, '__self__', None)
    parts: list[Any] = [reduces, getattr(owner, 'training', None)]
    parts += [asks and torch.is_grad_enabled(), _precision()]
    parts += [(key, x.dtype, x.shape[1:], x.device) for key, x in inputs.items()]
    parts += [
        (name, (x.dtype, x.shape) if isinstance(x, Tensor) else str(x))
        for name, x in other.items()
    ]
    return tuple(parts)


def _precision() -> tuple[Any, ...]:
    """What decides the types of results beside those of inputs."""
    autocast = [torch.is_autocast_enabled(device) for device in ('cpu', 'cuda')]
    return (*autocast, torch.get_default_dtype())


def _makeup(value: Any, depth: int = 0) -> Any:
    """What a message may read of a layer: others that are made alike are refused for the same
    reason. It holds none of the layer's objects."""
    if isinstance(value, (int, float, str, torch.dtype, torch.device, type(None))):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device, value.requires_grad
    if depth > 8 or (isinstance(value, (tuple, list, dict)) and len(value) > 64):
        return type(value).__name__
    if isinstance(value, (tuple, list)):
        return type(value).__name__, *(_makeup(each, depth + 1) for each in value)
    if isinstance(value, dict):
        return tuple((str(key), _makeup(each, depth + 1)) for key, each in value.items())
    if isinstance(value, torch.nn.Module):
        state = {key: each for key, each in vars(value).items() if key not in OWN}
        return id(type(value)), _makeup(state, depth + 1)
    if not hasattr(value, '__code__'):
        return type(value).__name__
    cells = _cells(value)
    own = getattr(value, '__self__', None), getattr(value, '__defaults__', None), cells
    return id(_code_of(value)), _makeup(own, depth + 1)


def _cells(function: Any) -> list[Any]:
    """What a function closes over."""
    out = []
    for each in getattr(function, '__closure__', None) or ():
        with suppress(ValueError):  # It is empty.
            out.append(each.cell_contents)
    return out


def _reason(error: Exception) -> str:
    """An error of Dynamo in one line."""
    text = one_line(error)
    if isinstance(error, TorchDynamoException):
        return text
    return f'{type(error).__name__}: {text}'
