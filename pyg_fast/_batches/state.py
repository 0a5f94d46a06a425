"""What a step changes: parameters, buffers, the state of an optimizer and of a scaler, random
numbers. A copy of all puts it back in place; a fingerprint tells whether it was replaced."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.optim import Optimizer


class State:
    """The parts of a training step.

    Args:
        modules: The model, and a loss that is a module.
        optimizer: The optimizer, if there is one.
        scaler: The scaler of its gradients, if there is one.
    """

    def __init__(
        self, modules: Iterable[Module], optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
    ) -> None:  # fmt: skip
        self.roots, self.optimizer, self.scaler = list(modules), optimizer, scaler
        self.note()

    def parameters(self) -> list[Parameter]:
        """The parameters of all modules and of the optimizer, once each."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        found = [p for root in self.roots for p in root.parameters()]
        return list(dict.fromkeys([*found, *(p for group in groups for p in group['params'])]))

    def _buffers(self) -> list[Tensor]:
        return list(dict.fromkeys(b for root in self.roots for b in root.buffers()))

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        if self.optimizer is None:
            return
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _scaler_tensors(self) -> Iterator[Tensor]:
        for name in ('_scale', '_growth_tracker'):
            value = getattr(self.scaler, name, None)
            if isinstance(value, Tensor):
                yield value

    def tensors(self) -> list[Tensor]:
        """All tensors that a step may write."""
        return [
            *self.parameters(), *self._buffers(), *self._optimizer_tensors(),
            *self._scaler_tensors(),
        ]  # fmt: skip

    def note(self) -> None:
        """Takes the present objects as those whose fingerprints are compared. It holds them, so
        that no others have their ids."""
        self._modules = list(dict.fromkeys(m for root in self.roots for m in root.modules()))
        self._holders = [
            holder for m in self._modules for holder in (m._parameters, m._buffers, m._modules)
        ]
        self._tensors = [*self.parameters(), *self._buffers()]
        states = [] if self.optimizer is None else self.optimizer.state.values()
        self._held = [*self._tensors, *self._optimizer_tensors(), *states]

    def fingerprint(self) -> tuple[object, ...]:
        """It changes if a tensor or the mode of a module is replaced, or an option of the
        optimizer: what a replay does not read again. Each step asks for it."""
        found: list[object] = [id(x) for holder in self._holders for x in holder.values()]
        found += [module.training for module in self._modules]
        found += [tensor.data_ptr() for tensor in self._tensors]
        found += [tensor.requires_grad for tensor in self._tensors]
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                found += map(id, group['params'])
                found += [(k, v) for k, v in group.items() if k not in ('params', 'lr')]
            found += map(id, self.optimizer.state.values())
        # Outside of inference mode nobody may write what was made in it.
        return (torch.is_inference_mode_enabled(), *found)


class Copy:
    """The content of a state at one time.

    Args:
        state: The state.
        device: The device whose random numbers are of it.
        others: More tensors.
    """

    def __init__(self, state: State, device: torch.device, others: Iterable[Tensor] = ()) -> None:
        self._device = device
        tensors = [*state.tensors(), *others]
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._grads = [(p, p.grad) for p in state.parameters()]
        self._cpu_rng = torch.get_rng_state()
        self._rng = torch.cuda.get_rng_state(device) if device.type == 'cuda' else None

    def restore_rng(self) -> None:
        """Puts random numbers back."""
        torch.set_rng_state(self._cpu_rng)
        if self._rng is not None:
            torch.cuda.set_rng_state(self._rng, self._device)

    def restore(self) -> None:
        """Puts everything back in place."""
        with torch.no_grad():
            for tensor, value in self._pairs:
                tensor.copy_(value)
        for parameter, grad in self._grads:
            if grad is None or grad.dtype == parameter.dtype:  # in a check in float64
                parameter.grad = grad
        self.restore_rng()
