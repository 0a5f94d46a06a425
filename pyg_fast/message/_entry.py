"""The guarded call of a message."""

import itertools
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import eval_frame
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch.fx import _symbolic_trace

from ..graph.small_graphs import runs_pygs_code
from ..graph.structure import Graph
from ._blocks import edges_of_block, fits
from ._capture import Captured, backend
from ._fallback import Fallback
from ._ir import Refused
from ._plan import Plan, describe, plan
from ._run import Passes, check_not_capturing, run

# Before 2.13, Dynamo does not notice a function of the same code and other defaults.
torch._dynamo.config.skip_guards_on_constant_func_defaults = False
# Likewise hooks of modules that message calls.
torch._dynamo.config.skip_nnmodule_hook_guards = False
# Refusals of an entry, by its inputs. After so many it captures nothing more.
_MOST_REFUSALS = 32
_MOST_CAPTURES = 64


def _entry(
    function: Any, edges: Tensor, nodes: Tensor, inputs: dict[tuple[str, str], Tensor],
    other: dict[str, Any], structure: tuple[str, ...], aggr: Any, node_dim: int,
) -> Tensor:  # fmt: skip
    torch._check(edges.size(0) > 1)  # Fewer are PyG's, see `check_inputs`.
    values = dict(other)
    for name in ('index', 'edge_index_i'):
        if name in structure:
            values[name] = torch.ops.pyg_fast_message.index(edges)
    if 'size_i' in structure:
        values['size_i'] = nodes.size(0)
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


@lru_cache(maxsize=1024)
def _stand_in(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> Tensor:
    """Stands for an input in the capture, which reads no number of it."""
    check_not_capturing()
    with torch.inference_mode(False):
        return torch.empty((2, *shape), dtype=dtype, device=device, requires_grad=requires_grad)


@lru_cache(maxsize=64)
def _sizes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Stand for the edges and their destinations. Their sizes are no numbers that the capture could
    use or check."""
    with torch.inference_mode(False):
        both = tuple(torch.empty(2, dtype=torch.int8, device=device) for _ in range(2))
    for each in both:
        torch._dynamo.decorators.mark_unbacked(each, 0)
    return both  # type: ignore[return-value]


_numbers = itertools.count()
_ARGUMENTS = _entry.__code__.co_varnames[: _entry.__code__.co_argcount]
# Dynamo's compiled entries of a code object, and its callback for frames. If torch lacks one of
# these private names, every call goes through Dynamo.
_entries_of = getattr(torch._C._dynamo.eval_frame, '_debug_get_cache_entry_list', None)
_callback = getattr(torch._C._dynamo.eval_frame, 'get_eval_frame_callback', None)


def _unrecorded() -> AbstractContextManager[Any]:
    """Switches off the profiler marks of Dynamo, which take half of the time of a call."""
    if hasattr(torch._dynamo.config, 'record_runtime_overhead'):
        return torch._dynamo.config.patch(record_runtime_overhead=False)
    return nullcontext()


def _captures(code: Any) -> list[Any]:
    """Dynamo's compiled entries of a code object; none while a stance, a callback or a trace of the
    user changes how Dynamo would call it."""
    stance = getattr(eval_frame, '_stance', None)
    if (
        _entries_of is None
        or _callback is None
        or _callback() is not None
        or stance is None
        or stance.stance != 'default'
        or stance.backend is not None
        or getattr(_symbolic_trace, '_is_fx_tracing_flag', True)
    ):
        return []
    return _entries_of(code)


@lru_cache(maxsize=1024)
def _planned(captured: Captured, reduces: tuple[str, ...]) -> Passes:
    return Passes(plan(captured, reduces))


class Entry:
    """Captures functions of one code on the first call, and whenever what they read has changed."""

    def __init__(self, num_writes: int = 0) -> None:
        self.num_writes = num_writes
        self.refused: dict[Any, str] = {}
        self.num_captures = 0
        self.reduces: tuple[str, ...] = ()
        self.last: Plan | None = None
        self._compile()

    def _compile(self) -> None:
        # Dynamo keeps what it compiled by code object, and facts by its name: one for each entry.
        code = _entry.__code__.replace(co_name=f'message_{next(_numbers)}')
        fresh = types.FunctionType(code, _entry.__globals__)
        self.code = code
        self.compiled = torch.compile(
            fresh, fullgraph=True, dynamic=False, backend=backend(self._check, self.num_writes)
        )

    def _check(self, captured: Captured) -> None:
        check_not_capturing()
        self.num_captures += 1
        if self.num_captures > _MOST_CAPTURES:
            raise Refused(f'a message that changed {_MOST_CAPTURES} times, such as by a number')
        _planned(captured, self.reduces)

    def _capture(self, call: tuple[Any, ...]) -> tuple[Captured, tuple[Any, ...]]:
        """The message and its arguments, from a capture whose guards hold, or from a new one.

        Checks the guards as Dynamo does, but without its evaluation of the frame, which takes
        several times as long.
        """
        scope = dict(zip(_ARGUMENTS, call, strict=True))
        for each in _captures(self.code):
            guards, code = each.guard_manager, each.code
            # None: Dynamo dropped the entry, since an object was freed that it guards by address.
            if guards.cache_entry is not None and guards.root.check(scope):
                return types.FunctionType(code, _entry.__globals__)(*call)
        with _unrecorded():
            return self.compiled(*call)

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
            structure: Which of `index`, `edge_index_i` and `size_i` the message takes, for its
                softmax.
            aggr: A module that aggregates in place of `reduces`, by a sum.
            node_dim: The dimension of edges in the values of the message. Inputs and result of the
                entry have nodes and edges first.
            num_edges: With it, a message that needs blocks of edges and has one is PyG's.
            only_read: Whether nobody writes into the result: the backward pass may read it.

        Raises:
            Fallback: If no kernel can compute it.
        """
        if self.refused:
            known = self.refused.get(_kind(function, reduces, inputs, other))
            if known is None and len(self.refused) >= _MOST_REFUSALS:
                known = next(reversed(self.refused.values()))
            if known is not None:
                raise Fallback(known)
        self.reduces = reduces
        named = {
            key: _stand_in(x.shape[1:], x.dtype, x.device, x.requires_grad)
            for key, x in inputs.items()
        }
        device = next(iter(inputs.values())).device
        call = (function, *_sizes(device), named, other, structure, aggr, node_dim)
        try:
            try:
                captured, args = self._capture(call)
            except torch._dynamo.exc.FailOnRecompileLimitHit:
                self._compile()
                captured, args = self._capture(call)
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
        except Refused as error:
            reason = str(error)
        except RecursionError:
            reason = 'too many operations'
        except NotImplementedError as error:
            if 'pyg_fast_message' not in str(error):
                raise
            raise Fallback('torch.compile is disabled, which captures the message') from None
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if not isinstance(inner, Refused):
                raise inner from None
            reason = str(inner)
        except TorchDynamoException as error:
            reason = _reason(error)
        self.refused[_kind(function, reduces, inputs, other)] = reason
        raise Fallback(reason)


def _check_several_blocks(plan: Plan, num_edges: int, device: torch.device) -> None:
    """PyG's code is faster where its tensors of all edges fit into memory."""
    most = edges_of_block(plan, device)
    if num_edges <= most:
        raise Fallback(
            f'a linear map of values computed for each edge runs over blocks of {most} edges, and '
            f'there are {num_edges}'
        )
    if runs_pygs_code() and fits(plan, num_edges, device):
        raise Fallback(
            'a linear map of values computed for each edge runs over blocks only where tensors of '
            'all edges do not fit into memory'
        )


def _kind(function: Any, reduces: tuple, inputs: dict, other: dict) -> Any:
    """What a refusal holds for."""
    owner = getattr(function, '__self__', None)
    parts: list[Any] = [reduces, torch.is_grad_enabled(), getattr(owner, 'training', None)]
    parts += [(key, x.dtype, x.shape[1:], x.device) for key, x in inputs.items()]
    parts += [
        (name, (x.dtype, x.shape) if isinstance(x, Tensor) else str(x))
        for name, x in other.items()
    ]
    return tuple(parts)


def _reason(error: TorchDynamoException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    places = [line for line in lines if line.startswith('File "')]
    return f'{text} ({places[-1]})' if places else text
