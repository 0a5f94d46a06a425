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

    def list_modules(self) -> list[Module]:
        """All modules, once each."""
        return list(dict.fromkeys(m for root in self.roots for m in root.modules()))

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

    def fingerprint(self) -> tuple[object, ...]:
        """It changes if a tensor or the mode of a module is replaced, or an option of the
        optimizer: what is not read again by a replay. It holds the objects that it names."""
        # Outside of inference mode nobody may write what was made in it.
        found: list[object] = [torch.is_inference_mode_enabled()]
        for module in self.list_modules():
            found.append(module.training)
            for tensors in (module._parameters, module._buffers):
                found += [
                    (id(t), t.data_ptr(), t.requires_grad) for t in tensors.values()
                    if t is not None
                ]  # fmt: skip
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                found += [id(p) for p in group['params']]
                found += [(k, v) for k, v in group.items() if k not in ('params', 'lr')]
        return (*found, *map(id, self._optimizer_tensors()))


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
            parameter.grad = grad
        self.restore_rng()

