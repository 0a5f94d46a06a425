"""Gradients in memory that all captured graphs share."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Parameter


class Gradients:
    """The gradients of parameters: the same tensors after each step, so that what reads
    :obj:`.grad` may be captured, and so that gradients of several sizes of batches add up.

    Args:
        adds: Whether a step adds to the gradients that there are.
    """

    def __init__(self, adds: bool) -> None:
        self._adds = adds
        self._buffers: dict[Parameter, Tensor] = {}

    def tensors(self) -> list[Tensor]:
        """The memory."""
        return list(self._buffers.values())

    def keep(self, parameters: Iterable[Parameter]) -> None:
        """Drops the memory of other parameters, and of those that are no longer like it."""
        self._buffers = {
            p: buffer for p in parameters if (buffer := self._buffers.get(p)) is not None
            and (p.shape, p.dtype, p.device) == (buffer.shape, buffer.dtype, buffer.device)
        }  # fmt: skip

    def begin(self, parameters: Iterable[Parameter]) -> None:
        """Takes over the gradients to which a step adds, as they were left by the user."""
        if not self._adds:
            return
        cleared = []
        for parameter in parameters:
            buffer, grad = self._buffers.get(parameter), parameter.grad
            if buffer is None:
                if grad is not None:
                    self._buffers[parameter] = grad.detach().clone()
            elif grad is None:
                cleared.append(buffer)
            elif grad is not buffer:
                buffer.copy_(grad)
        if cleared:
            torch._foreach_zero_(cleared)

    def backward(self, loss: Tensor, parameters: Iterable[Parameter]) -> list[Parameter]:
        """Computes the gradients of a loss; returns the parameters that have one.

        Raises:
            TypeError: If a gradient is sparse.
        """
        parameters = list(parameters)
        before = [p.grad for p in parameters]
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        used, new = [], []
        for parameter, old in zip(parameters, before, strict=True):
            grad = parameter.grad
            if grad is None:
                parameter.grad = old if self._adds else None
                continue
            if grad.layout != torch.strided:
                raise TypeError(
                    'capture: the gradient of a parameter of shape '
                    f'{list(parameter.shape)} must be dense, got a sparse one: make the Embedding '
                    'with sparse=False'
                )
            used.append(parameter)
            new.append(grad.detach())
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.zeros_like(grad)
        buffers = [self._buffers[p] for p in used]
        if buffers:
            write = torch._foreach_add_ if self._adds else torch._foreach_copy_
            write(buffers, new)
        self.attach(used)
        return used

    def attach(self, used: Iterable[Parameter]) -> None:
        """Makes the memory the gradients of the parameters that a step has used."""
        for parameter in used:
            buffer = self._buffers[parameter]
            if parameter.grad is not buffer:
                parameter.grad = buffer
