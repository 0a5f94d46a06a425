"""A training step on batches of small graphs."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch_geometric.data import Batch

from ..errors import ShapeError
from ..loader import GraphLoader
from ..loader._selection import Draw
from .check import Result
from .gradients import Gradients
from .runs import Forward, Runs, Slot, real_rows_of
from .state import Copy, State
from .update import Update

Loss = Callable[[Any, Batch], Tensor]


class CapturedBatchStep(Runs):
    """A training step on batches of a loader, made by :func:`capture`. Calling it with a batch
    trains once and returns the loss."""

    def __init__(
        self, model: Module, loader: GraphLoader, optimizer: Optimizer | None, loss_fn: Loss, *,
        forward: Forward | None = None, compile: bool = False, scaler: GradScaler | None = None,
        check: bool = True,
    ) -> None:  # fmt: skip
        _check_arguments(optimizer, loss_fn, scaler)
        modules = [each for each in (model, loss_fn) if isinstance(each, Module)]
        self.optimizer, self.loss_fn, self.scaler = optimizer, loss_fn, scaler
        self._gradients = Gradients(adds=optimizer is None)
        super().__init__(model, loader, forward, compile, check, State(modules, optimizer, scaler))

    def reset(self) -> None:
        """Drops what is recorded; the next batches record it anew."""
        super().reset()
        self._update: Update | None = None
        if self.optimizer is not None:
            records = self._recorder.needs_state
            self._update = Update(self.optimizer, self.scaler, self._device, records)
        # An optimizer makes its state in its first step.
        self._has_state = self.optimizer is None
        self._parameters = self._state.parameters()
        self._gradients.keep(self._parameters)
        self._used: dict[int, list[Parameter]] = {}

    def epoch(self) -> Iterator[Tensor]:
        """Trains on all batches of the loader. It takes less time than a call for each: once a step
        is captured, a second graph makes its batches, in the memory from which it reads them.

        Yields:
            Tensor: The loss of each batch, as of a call.
        """
        for given in self._given():
            yield self._run(given)

    def __call__(self, batch: Batch) -> Tensor:
        """Trains once.

        Args:
            batch (Batch): A batch of the loader.

        Returns:
            Tensor: The loss, detached, of shape :math:`()`.

        Raises:
            TypeError: If no loader that pads has made the batch, or the loss is no tensor.
            ValueError: If padding changes a result, or the batch has other attributes than the
                first one of its size.
            RuntimeError: If the step waits for the GPU or cannot be captured.
        """
        if self.loader.pad is not None:  # A GPU will need it.
            real_rows_of(batch)
        return self._run(batch)

    def _run(self, given: Batch | Draw) -> Tensor:
        if not self._pads:
            return self._run_as_usual(self._without_padding(given))
        with self._running():
            self._renew()
            batch, slot = self._load(given)
            self._gradients.begin(self._parameters)
            if self._update is not None:
                self._update.read_rates()
            if self._has_state:
                return self._step(slot, batch)
            loss = self._first_step(slot, batch)
            self._has_state = True
            self._note_state()
            return loss

    def _run_as_usual(self, batch: Batch) -> Tensor:
        """A step as a loop writes it."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss = self._loss(self._output(batch, False), batch, False)
        check_requires_grad(loss)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self._update is not None:
            self._update.step()
        return loss.detach()

    def _step(self, slot: Slot | None, batch: Batch | None) -> Tensor:
        if slot is None:
            assert batch is not None
            self.num_eager += 1
            return self._train(batch, None)
        if slot.replay is None:
            assert batch is not None
            self._record(slot, batch)
            assert slot.replay is not None
        loss: Tensor = slot.replay()
        self._gradients.attach(self._used[id(slot)])
        return loss.clone()  # The next replay writes into it.

    def _first_step(self, slot: Slot | None, batch: Batch | None) -> Tensor:
        if slot is None or not self._recorder.needs_state:
            return self._step(slot, batch)
        return self._train(slot.inputs.view(), slot)

    def _record(self, slot: Slot, batch: Batch) -> None:
        """Records a step. What it changes meanwhile is put back."""
        known = set(map(id, self._gradients.tensors()))
        before = Copy(self._state, self._device, self._gradients.tensors())
        try:
            slot.replay = self._recorder.record(slot.inputs, lambda view: self._train(view, slot))
        finally:
            before.restore()
            for tensor in self._gradients.tensors():
                if id(tensor) not in known:
                    tensor.zero_()
        slot.inputs.write(batch)

    def _train(self, batch: Batch, slot: Slot | None) -> Tensor:
        """A step on a batch, which is padded if it is of a slot."""
        is_padded = slot is not None
        with self._masked(batch, is_padded):
            loss = self._loss(self._output(batch, is_padded), batch, is_padded)
            scaled = loss if self.scaler is None else self.scaler.scale(loss)
            used = self._gradients.backward(scaled, self._parameters)
        if slot is not None:
            self._used[id(slot)] = used
        if self._update is not None:
            self._update.step()
        return loss.detach()

    def _loss(self, out: object, batch: Batch, is_padded: bool) -> Tensor:
        loss = self.loss_fn(out, self._cut_graphs(batch, is_padded))
        check_loss(loss)
        return loss

    def _result(self, batch: Batch, is_padded: bool) -> Result:
        for parameter in self._parameters:
            parameter.grad = None
        out = self._output(batch, is_padded, may_compile=False)
        loss = self._loss(out, batch, is_padded)
        check_requires_grad(loss)
        outputs = [('the output of the model', t) for t in tree_leaves(out)]
        found = [(name, t.detach().clone()) for name, t in outputs if isinstance(t, Tensor)]
        found.append(('the loss', loss.detach().clone()))
        loss.backward()
        grads = [
            (name, parameter.grad)
            for root in self._state.roots for name, parameter in root.named_parameters()
            if parameter.grad is not None
        ]  # fmt: skip
        return Result(found, grads, self._buffers())

    def __repr__(self) -> str:
        optimizer = 'no optimizer' if self.optimizer is None else type(self.optimizer).__name__
        return self._describe(f'{type(self.model).__name__}, {optimizer}')


def check_loss(loss: object, name: str = 'loss_fn') -> None:
    """Raises unless a loss is a tensor of one number."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"'{name}' must return a tensor, got {type(loss).__name__}: return the loss alone"
        )
    if loss.numel() != 1:
        raise ShapeError(
            f"'{name}' must return a tensor of shape [], got {list(loss.shape)}: return the mean "
            'of it'
        )


def check_requires_grad(loss: Tensor, name: str = 'loss_fn') -> None:
    """Raises unless a loss has gradients."""
    if not loss.requires_grad:
        raise ValueError(f"'{name}' must return a loss of parameters, got one without gradient")


def _check_arguments(optimizer: object, loss_fn: object, scaler: object) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"'optimizer' must be an Optimizer, got {type(optimizer).__name__}")
    if not callable(loss_fn):
        raise TypeError(f"'loss_fn' must be callable, got {type(loss_fn).__name__}")
    if scaler is None:
        return
    if not isinstance(scaler, GradScaler):
        raise TypeError(f"'scaler' must be a GradScaler, got {type(scaler).__name__}")
    if optimizer is None:
        raise ValueError("'scaler' needs an 'optimizer': scale the loss in 'loss_fn' yourself")
