"""The outputs of a model for batches of small graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map
from torch_geometric.data import Batch

from ..loader import GraphLoader
from .check import Result
from .runs import Forward, Runs, Slot, real_rows_of
from .state import Copy, State


def capture_inference(
    model: Module, loader: GraphLoader, *, forward: Forward | None = None, compile: bool = False,
    check: bool = True,
) -> 'CapturedInference':  # fmt: skip
    r"""The outputs of a model for batches of small graphs, by one CUDA graph for each size of
    padded batches.

    .. code-block:: python

        evaluate = pyg_fast.capture_inference(model, loader)
        for out, batch in evaluate.epoch():
            error = (out - batch.y).abs().mean()

    The model runs in evaluation mode and without gradients; its modes are restored. Parameters are
    read where they are, so that a model in training may be evaluated again and again. Everything
    else is as in :func:`capture`.

    Args:
        model (torch.nn.Module): The model.
        loader (GraphLoader): The loader of the batches, on a GPU with :obj:`pad='buckets'`.
        forward (Callable, optional): The output, from :obj:`(model, batch)`. (default: :obj:`None`,
            :obj:`model(batch)`)
        compile (bool): Whether Inductor compiles :obj:`forward`. (default: :obj:`False`)
        check (bool): Whether to compare the first batch of each size with that without padding.
            (default: :obj:`True`)

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If the loader does not pad, on a GPU or with :obj:`compile`, or the model has a
            batch norm that cannot leave out padding.
    """
    return CapturedInference(model, loader, forward=forward, compile=compile, check=check)


class CapturedInference(Runs):
    """The outputs of a model, made by :func:`capture_inference`. Calling it with a batch returns
    those of its real graphs, nodes or edges."""

    def __init__(
        self, model: Module, loader: GraphLoader, *, forward: Forward | None = None,
        compile: bool = False, check: bool = True,
    ) -> None:  # fmt: skip
        roots = [model] if isinstance(model, Module) else []
        super().__init__(model, loader, forward, compile, check, State(roots))

    def epoch(self) -> Iterator[tuple[Any, Batch]]:
        """Runs the model on all batches of the loader.

        Yields:
            tuple: The output for a batch, and the batch, both without padding.
        """
        if not self._pads:
            for given in self._given():
                plain = self._without_padding(given)
                yield self(plain), plain
            return
        for batch in self.loader:
            yield self(batch), self._without_padding(batch)

    def __call__(self, batch: Batch) -> Any:
        """Runs the model once.

        Args:
            batch (Batch): A batch of the loader.

        Returns:
            The output of the model without rows of the padding, in new tensors.

        Raises:
            TypeError, ValueError, RuntimeError: As a captured training step.
        """
        if self.loader.pad is not None:  # A GPU will need it.
            real = real_rows_of(batch)
        if not self._pads:
            with torch.no_grad(), _evaluating(self.model):
                return self._output(self._without_padding(batch), False)
        with torch.no_grad(), self._running(), _evaluating(self.model):
            self._renew()
            slot = self._find(batch, real)
            if slot is None:
                self.num_eager += 1
                return self._output(batch, False)
            if slot.replay is None:
                self._record(slot, batch)
                assert slot.replay is not None
            rows = {batch.node_mask.size(0): real.nodes, batch.edge_mask.size(0): real.edges}
            return tree_map(lambda x: _copy_real(x, rows), slot.replay())

    def _record(self, slot: Slot, batch: Batch) -> None:
        before = Copy(self._state, self._device)
        try:
            slot.replay = self._recorder.record(slot.inputs, self._run)
        finally:
            before.restore()
        slot.inputs.write(batch)

    def _run(self, batch: Batch) -> Any:
        with self._masked(batch, True):
            return self._output(batch, True)

    def _result(self, batch: Batch, is_padded: bool) -> Result:
        outputs = tree_leaves(self._output(batch, is_padded, may_compile=False))
        found = [('the output of the model', t.clone()) for t in outputs if isinstance(t, Tensor)]
        return Result(found, [], self._buffers())

    def __repr__(self) -> str:
        return self._describe(type(self.model).__name__)


def _copy_real(value: object, rows: dict[int, int]) -> object:
    """A copy: the next replay writes into the tensor."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() and value.size(0) in rows:
        value = value[: rows[value.size(0)]]
    return value.clone()


@contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    modules = [m for m in model.modules() if m.training]
    try:
        for module in modules:
            module.__dict__['training'] = False
        yield
    finally:
        for module in modules:
            module.__dict__['training'] = True
