"""CUDA graphs on a CPU: what a step did to its tensors is done again, without its Python code."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
_WAIT = {
    aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default,
    aten.equal.default, aten.is_nonzero.default, aten._local_scalar_dense.default,
}  # fmt: skip


class Replays:
    """A recorder of steps, as `pyg_fast._batches.record.CudaGraphs` is one."""

    needs_state = pads = True

    def __init__(self) -> None:
        #: How often each kind of inputs was recorded, and replayed.
        self.recorded: Counter[type] = Counter()
        self.replayed: Counter[type] = Counter()

    def record(self, inputs: Any, step: Callable[[Any], Any]) -> Callable[[], Any]:
        step(inputs.view())  # as a warm-up
        view, log = inputs.view(), Log()
        with log:
            out = step(view)
        self.recorded[type(inputs)] += 1

        def replay() -> Any:
            self.replayed[type(inputs)] += 1
            log.replay()
            return out

        return replay


class Log(TorchDispatchMode):
    """The operations of some code, which may run again. It raises where a GPU would be waited for,
    as a capture does."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple, dict[str, Any], Any]] = []
        self._on_host: dict[int, Tensor] = {}  # tensors that are on the host of a GPU, too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_host = func is aten.lift_fresh.default or (
            bool(inputs) and all(id(t) in self._on_host for t in inputs)
        )
        if not is_host and _waits(func, args, kwargs):
            raise RuntimeError(f'operation not permitted when stream is capturing: {func}')
        out = func(*args, **kwargs)
        if is_host:
            self._on_host.update((id(t), t) for t in tree_leaves(out) if isinstance(t, Tensor))
        self._calls.append((func, _plain(args), _plain(kwargs), _plain(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self._calls:
            returns = [each.alias_info for each in func._schema.returns]
            if any(info is not None and not info.is_write for info in returns):
                continue  # A view sees what is written into its base.
            new = func(*args, **kwargs)
            if any(info is not None for info in returns) or func._schema.is_mutable:
                continue  # The operation has written into its arguments.
            for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(value)


def _waits(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get('output_size') is None
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return any(t is not None and t.dtype == torch.bool for t in args[1])
    return func in _WAIT


def _plain(value: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, value)
