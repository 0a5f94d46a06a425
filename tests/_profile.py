"""The ops that a call runs, as PyTorch's profiler sees them."""

from collections.abc import Callable
from typing import Any

from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

# Ops that sort edges, and `csr_rows`, which lists those of a sorted graph.
SORTS = ('to_csr', 'to_csr_csc', 'to_csr_unweighted', 'transpose_csr', 'csr_rows')


def ops_of(run: Callable[[], Any]) -> dict[str, int]:
    """How often `run` calls each op."""
    with profile() as seen:
        run()
    return {event.key: event.count for event in seen.key_averages()}


class Before(TorchDispatchMode):
    """Calls `look` with the arguments of each call of an op of ours, before it runs."""

    def __init__(self, op: str, look: Callable[..., None]) -> None:
        super().__init__()
        self.op, self.look = f'pyg_fast::{op}', look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == self.op:
            self.look(*args)
        return func(*args, **(kwargs or {}))


def multiplies(run: Callable[[], Any]) -> bool:
    """Whether `run` multiplies by a sparse matrix of ours."""
    return any(op.startswith('pyg_fast::spmm') for op in ops_of(run))


def sorts_of(run: Callable[[], Any]) -> dict[str, int]:
    """How often `run` sorts or lists edges, by op. It must run some op of ours: otherwise the
    profiler could not have seen a sort."""
    calls = ops_of(run)
    assert any(op.startswith('pyg_fast::') for op in calls), sorted(calls)
    return {op: calls[f'pyg_fast::{op}'] for op in SORTS if f'pyg_fast::{op}' in calls}
