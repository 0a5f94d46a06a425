"""Whether padding changes what a model computes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..errors import PaddingError

_RTOL = 1e-4

#: From the number of rows of a padded tensor to that of real ones.
Rows = dict[int, int]


class Result(NamedTuple):
    """What a step computes. Each value has a name."""

    outputs: list[tuple[str, Tensor]]
    grads: list[tuple[str, Tensor]]
    buffers: list[tuple[str, Tensor]]


#: Runs a step on a padded batch, or on the same batch without the padding; in float64 or not.
Run = Callable[[bool, bool], Result]


def check_padding(run: Run, modules: list[Module], rows: Rows, restore: Callable[[], None]) -> None:
    """Raises unless the results of real rows are those of the batch without the padding.

    A small difference may be that of rounding at the kink of a ReLU or at a maximum: what differs
    is compared again in float64.

    Args:
        run: Runs the step.
        modules: The model, and the loss if it is a module.
        rows: The numbers of rows of nodes, edges and graphs.
        restore: Undoes what a run changes.

    Raises:
        PaddingError: If a result differs. The error names the layer.
    """

    def once(is_padded: bool, is_exact: bool) -> Result:
        try:
            with in_float64(modules) if is_exact else nullcontext():
                return run(is_padded, is_exact)
        finally:
            restore()

    def find(is_exact: bool) -> str | None:
        return _find_difference(once(False, is_exact), once(True, is_exact), rows)

    with quiet(modules):
        what = find(False)
        if what is None:
            return
        try:
            what = find(True)
            place = '' if what is None else _locate(once, modules, rows, True)
        except RuntimeError:  # The model does not run in float64.
            place = _locate(once, modules, rows, False)
        if what is None:
            return
    raise PaddingError(
        f'capture: the padding of a batch changes {what}{place}. A layer that mixes rows of '
        'different graphs must leave the padding out: use batch.node_mask, batch.edge_mask or '
        'batch.graph_mask, in the loss, too; or pass check=False if only random numbers differ'
    )


def _find_difference(plain: Result, padded: Result, rows: Rows) -> str | None:
    for (name, a), (_, b) in zip(plain.outputs, padded.outputs, strict=True):
        if _differ(a, b, rows):
            return name
    for (name, a), (_, b) in zip(plain.buffers, padded.buffers, strict=True):
        if _differ(a, b, {}):
            return f'the buffer {name!r}'
    if [name for name, _ in plain.grads] != [name for name, _ in padded.grads]:
        return 'which parameters have gradients'
    largest = max((_largest(grad) for _, grad in plain.grads), default=0.0)
    for (name, a), (_, b) in zip(plain.grads, padded.grads, strict=True):
        if _differ(a, b, {}, largest):
            return f'the gradient of {name!r}'
    return None


def _largest(x: Tensor) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def _differ(plain: Tensor, padded: Tensor, rows: Rows, scale: float | None = None) -> bool:
    """Whether real rows differ. Tensors whose rows have no counterpart are not compared."""
    if padded.dim() and plain.shape != padded.shape:
        count = rows.get(padded.size(0))
        if count != plain.size(0) or plain.shape[1:] != padded.shape[1:]:
            return False
        padded = padded[:count]
    if plain.shape != padded.shape or not plain.is_floating_point():
        return False
    limit = max(_RTOL, 4 * torch.finfo(plain.dtype).eps)
    a, b = plain.detach().double(), padded.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return True
    a, b = (torch.where(x.isfinite(), x, 0) for x in (a, b))
    scale = _largest(a) if scale is None else scale
    return _largest(a - b) > limit * scale + 1e-2 * limit


# Where it differs -------------------------------------------------------------------------------
class _Call(NamedTuple):
    path: str
    module: Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def _locate(run: Run, modules: list[Module], rows: Rows, is_exact: bool) -> str:
    """Names the first layer whose output differs though its input does not."""
    records: list[list[_Call]] = []
    for is_padded in (False, True):
        calls: list[_Call] = []
        with _recorded(modules, calls):
            run(is_padded, is_exact)
        records.append(calls)
    plain, padded = records
    for a, b in zip(plain, padded, strict=False):
        if a.path != b.path:
            break
        if _any_differ(a.inputs, b.inputs, rows):
            return f', by the code before the layer {_text_of(a)}'
        if _any_differ(a.outputs, b.outputs, rows):
            return f', by the layer {_text_of(a)}'
    return ', by the code after the layers of the model'


def _text_of(call: _Call) -> str:
    return f'{call.path!r} ({type(call.module).__name__})'


def _any_differ(plain: list[Tensor], padded: list[Tensor], rows: Rows) -> bool:
    return any(_differ(a, b, rows) for a, b in zip(plain, padded, strict=False))


@contextmanager
def _recorded(modules: list[Module], calls: list[_Call]) -> Iterator[None]:
    """Keeps copies of what layers get and return: they may write into it later."""
    handles = []
    stack: list[list[Tensor]] = []

    def before(module: Module, args: Any, kwargs: Any) -> None:
        stack.append(_copies((args, kwargs)))

    def after(path: str) -> Callable[..., None]:
        def keep(module: Module, args: Any, out: Any) -> None:
            calls.append(_Call(path, module, stack.pop(), _copies(out)))

        return keep

    try:
        for root in modules:
            for path, module in root.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(after(path or type(root).__name__)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copies(value: object) -> list[Tensor]:
    leaves = tree_leaves(value)
    return [t.detach().clone() for t in leaves if isinstance(t, Tensor)]


@contextmanager
def in_float64(modules: list[Module]) -> Iterator[None]:
    """With parameters and buffers in float64, and tensors that a model makes."""
    parameters = list(dict.fromkeys(p for root in modules for p in root.parameters()))
    before = [p.data for p in parameters]
    buffers = [
        (module._buffers, name, buffer)
        for module in dict.fromkeys(m for root in modules for m in root.modules())
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point()
    ]  # fmt: skip
    doubles = {id(buffer): buffer.double() for _, _, buffer in buffers}
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        for parameter in parameters:
            if parameter.is_floating_point():
                parameter.grad = None
                parameter.data = parameter.data.double()
        for holder, name, buffer in buffers:
            holder[name] = doubles[id(buffer)]
        yield
    finally:
        torch.set_default_dtype(default)
        for parameter, data in zip(parameters, before, strict=True):
            parameter.grad = None
            parameter.data = data
        for holder, name, buffer in buffers:
            holder[name] = buffer


# Without random numbers -------------------------------------------------------------------------
class _NoDropout(TorchFunctionMode):
    """Functions that drop values return their input."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:  # fmt: skip
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs['input']
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif 'dropout_p' in kwargs:
                kwargs = kwargs | {'dropout_p': 0.0}
        return func(*args, **kwargs)


_DROPOUTS = frozenset((
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout,
    torch.dropout, torch.dropout_, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
))  # fmt: skip


@contextmanager
def quiet(modules: list[Module]) -> Iterator[None]:
    """Without dropout and autocast, also where the model itself turns them on."""
    changed: list[tuple[Module, str, float]] = []
    enter = torch.autocast.__enter__

    def enter_disabled(self: torch.autocast) -> object:
        is_enabled, self._enabled = self._enabled, False
        try:
            return enter(self)
        finally:
            self._enabled = is_enabled

    try:
        for module in dict.fromkeys(m for root in modules for m in root.modules()):
            name = 'p' if isinstance(module, _DropoutNd) else 'dropout'
            value = module.__dict__.get(name)
            if isinstance(value, float):
                changed.append((module, name, value))
                module.__dict__[name] = 0.0
        torch.autocast.__enter__ = enter_disabled  # type: ignore[method-assign]
        with ExitStack() as stack:
            for kind in ('cpu', 'cuda'):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(_NoDropout())
            yield
    finally:
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        for module, name, value in changed:
            module.__dict__[name] = value
